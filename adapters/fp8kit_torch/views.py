"""Torch tensors as what fp8kit's operations read and write: an address, a shape, a dtype. No copy, no DLPack
capsule."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8kit import formats
from fp8kit.arrays import ArrayView, Device, contiguous_strides
from fp8kit.errors import ArgumentError, FormatError
from fp8kit.formats import DType
from fp8kit.spec import Meta

_DTYPES = {
    getattr(torch, name): formats.DTYPES[name]
    for name in (
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    )
}
_KNOWN = f"one of {', '.join(map(str, _DTYPES))}"
_TORCH = {kind: dtype for dtype, kind in _DTYPES.items()}
FLOATS = tuple(_TORCH[kind] for kind in formats.HIGH_PRECISION)  # what is computed in


def dtype_of(kind: DType) -> torch.dtype:
    """The torch dtype of an fp8kit dtype; FormatError where torch has none."""
    try:
        return _TORCH[kind]
    except (KeyError, TypeError):
        known = ", ".join(k.name for k in _TORCH)
        raise FormatError(
            "dtype_of", "kind", getattr(kind, "name", repr(kind)[:60]), f"one of {known}"
        ) from None


def has_kind(dtype: torch.dtype) -> bool:
    """Whether fp8kit has a torch dtype."""
    return dtype in _DTYPES


def kind_of(dtype: torch.dtype) -> DType:
    """The fp8kit dtype of a torch dtype; FormatError where there is none."""
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise FormatError("fp8kit_torch", "dtype", dtype, _KNOWN)
    return kind


def as_view(tensor: torch.Tensor) -> ArrayView:
    """A tensor on the CPU or a CUDA device as a view of its own memory, strides kept. Costs about a
    microsecond.

    Its place on torch's autograd is not looked at. FormatError for dtypes and devices that fp8kit does not
    have.
    """
    try:
        kind, device = _DTYPES.get(tensor.dtype), tensor.device
        start, strides = tensor.data_ptr(), tensor.stride()
    except (AttributeError, TypeError, RuntimeError):
        wanted = "a dense torch.Tensor with memory of its own"
        raise FormatError("as_view", "tensor", type(tensor).__name__, wanted) from None
    if kind is None or device.type not in ("cpu", "cuda"):
        raise FormatError("as_view", "tensor", f"{tensor.dtype} on {device}", f"cpu or cuda, {_KNOWN}")
    shape = tuple(tensor.shape)
    kept = None if strides == contiguous_strides(shape) else strides
    return ArrayView(start, shape, kind, Device(device.type, device.index or 0), tensor, kept)


def optional_view(tensor: torch.Tensor | None) -> ArrayView | None:
    """``as_view``, or None of None."""
    return None if tensor is None else as_view(tensor)


def empty_like_metas(metas: Mapping[str, Meta], like: torch.Tensor) -> list[torch.Tensor]:
    """A tensor for each meta from torch's allocator, on the device of ``like``: undefined, or zeros where the
    meta asks for them."""
    if not isinstance(metas, Mapping) or not all(isinstance(meta, Meta) for meta in metas.values()):
        wanted = "a mapping of names to fp8kit.spec.Metas"
        raise ArgumentError("empty_like_metas", "metas", type(metas).__name__, wanted)
    if not isinstance(like, torch.Tensor):
        raise ArgumentError("empty_like_metas", "like", type(like).__name__, "a torch.Tensor")
    return [
        (torch.zeros if meta.zero else torch.empty)(
            meta.shape, dtype=dtype_of(meta.dtype), device=like.device
        )
        for meta in metas.values()
    ]
