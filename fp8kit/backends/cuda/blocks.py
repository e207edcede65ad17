"""Casts by blocks of any rule, and rotations: on the CPU alone so far."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.errors import BackendError
from fp8kit.quantization import Quantizer


def rotate(
    x: ArrayView,
    out: ArrayView | None,
    amax: ArrayView | None,
    n: int,
    signs: str,
    along: int,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError always."""
    raise BackendError("rotate", "x", f"an array on {x.device}", "one on the CPU")


def cast_blocks(
    x: ArrayView,
    q: ArrayView | None,
    scale_inv: ArrayView | None,
    scale_codes: ArrayView | None,
    values: ArrayView | None,
    tensor_amax: ArrayView | None,
    tensor_scale_inv: ArrayView | None,
    quantizer: Quantizer,
    along: int,
    draw: int,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError always."""
    raise BackendError("cast_blocks", "x", f"an array on {x.device}", "one on the CPU")
