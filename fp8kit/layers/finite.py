"""What frontends that look for Inf and NaN (``autocast(check_finite=True)``) have in common."""

from __future__ import annotations

from fp8kit.errors import NonFiniteError

# (operation, input): a mask's -Inf is no fault, nor is what lies in the unused part of a cache
MAY_BE_INFINITE = {
    ("attention", "bias"),
    ("attention", "softmax_offset"),
    ("cached_attention", "softmax_offset"),
    ("cached_attention", "k_cache"),
    ("cached_attention", "v_cache"),
}


def refuse(where: str, value: str, nans: int, infs: int, size: int) -> None:
    """NonFiniteError for a ``value`` of ``size`` elements in the layer ``where``, unless all are finite."""
    if nans or infs:
        raise NonFiniteError(where, value, f"{nans} NaN and {infs} Inf of {size}", "finite numbers")
