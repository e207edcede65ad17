"""Checks of the functions' arguments before anything is traced: arrays by name, numbers, and values that can
be looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8kit import formats
from fp8kit.arguments import number, shown
from fp8kit.arrays import ArrayView, as_view
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.ops.values import check_sequences
from fp8kit.spec import Meta


def is_key(value: Any) -> bool:
    """Whether it is one of JAX's typed keys, or an array of them."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def as_array(operation: str, argument: str, value: Any) -> Any:
    """Returns a JAX array, or what JAX makes one of, any shape and dtype. FormatError that names the argument
    for anything else."""
    try:
        textual = isinstance(value, tuple | list) and np.asarray(value).dtype.kind not in "biufcV"
        if not (value is None or textual or is_key(value) or isinstance(value, str | bytes)):
            return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise FormatError(operation, argument, "None" if value is None else shown(value), "an array")


def as_rows(operation: str, argument: str, value: Any, last: str = "features") -> Any:
    """``as_array`` of an array with a last dimension. ShapeError for a scalar."""
    array = as_array(operation, argument, value)
    if array.ndim < 1:
        raise ShapeError(operation, argument, "a scalar", f"shape (..., {last})")
    return array


def meta_of(operation: str, argument: str, value: Any) -> Meta:
    """Shape and dtype that ``as_array(value)`` will have, where it can be said without making it. FormatError
    if it is not an array of a dtype of fp8kit."""
    if is_key(value) or not isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        value = as_array(operation, argument, value)
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(value.dtype))
    return Meta(tuple(value.shape), formats.dtype(dtype, operation, argument))


def in_dtype_of(x: Any, *parameters: Any) -> list[Any]:
    """Returns the parameters, None among them, in x's dtype where both are float32, bfloat16 or float16; as
    they are elsewhere, for the operation to refuse by name. Gradients come back in the parameters' own
    dtypes."""

    def high(array: Any) -> bool:
        is_array = isinstance(array, np.ndarray | np.generic | jax.Array)  # a dtype has a dtype, too
        return is_array and array.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)

    def cast(value: Any) -> Any:
        return jnp.asarray(value, x.dtype) if high(x) and high(value) else value

    return [cast(value) for value in parameters]


def check_fused(operation: str, fused: bool, what: str = "join_residual", **asked: bool) -> None:
    """ArgumentError where ``what`` is added to y, and the bias or the residual is ``asked`` for too."""
    for name, value in asked.items():
        if fused and value:
            raise ArgumentError(operation, name, value, f"False with {what}")


def as_number(operation: str, argument: str, value: Any, **limits: Any) -> float:
    """Returns a static number within ``limits`` (``fp8kit.arguments.number``), also as an array without
    dimensions. ArgumentError for others."""
    scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    if scalar and not isinstance(value, jax.core.Tracer):
        value = value.item()
    return number(operation, argument, value, **limits)


def check_sums(
    operation: str, arrays: Mapping[str, Any], name: str, total: int | None, longest: int | None = None
) -> None:
    """ArgumentError for running sums ``name``, int32 (b + 1,), and their ``_padded`` twin, that do not fit
    ``total`` tokens and sequences up to ``longest``: for arrays on the CPU that have values. Traced ones are
    looked at when the program runs."""
    check_sequences(
        operation, {key: on_host(arrays.get(key)) for key in (name, f"{name}_padded")}, name, total, longest
    )


def on_host(value: Any) -> ArrayView | None:
    """Returns integers whose values can be looked at without waiting: on the CPU, and not traced. None for
    others."""
    if value is None or isinstance(value, jax.core.Tracer) or is_key(value):  # keys are refused elsewhere
        return None
    if isinstance(value, jax.Array) and not (
        value.is_fully_addressable and all(d.platform == "cpu" for d in value.devices())
    ):
        return None
    host = np.asarray(value)
    if isinstance(value, tuple | list) and host.dtype.kind in "iu":  # what JAX makes of them
        host = host.astype(np.int32)
    return as_view(host) if host.dtype.kind in "iu" else None
