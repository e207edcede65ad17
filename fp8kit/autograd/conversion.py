"""``tensor``: a Tensor of any array or numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arguments import shown
from fp8kit.arrays import ArrayView, Device
from fp8kit.autograd.tensors import Tensor
from fp8kit.backends import dispatch
from fp8kit.errors import FormatError
from fp8kit.formats import DType


def tensor(array: Any, requires_grad: bool = False, dtype: Any = None, device: Any = None) -> Tensor:
    """Returns a Tensor over ``array``'s own memory (anything that ``arrays.as_view`` takes, or nested Python
    numbers).

    A given ``dtype`` or ``device`` other than the array's own makes a copy. Raises FormatError if it is not
    an array, BackendError for a device that is not here.
    """
    source = array if isinstance(array, Tensor) else None
    if source is not None:
        array = source.view
    if isinstance(array, int | float | list | tuple):
        numpy = None if dtype is None else formats.dtype(dtype, "tensor", "dtype").numpy
        try:
            array = np.asarray(array, dtype=numpy)
        except (TypeError, ValueError, OverflowError) as error:
            wanted = f"nested numbers of one length ({error})"
            raise FormatError("tensor", "array", shown(array), wanted) from None
        if numpy is None and array.dtype == np.float64:
            array = array.astype(np.float32)
        if device is None:
            device = dispatch.default_device()
    view = arrays.as_view(array, "tensor", "array")
    known = dict.fromkeys((view.dtype, *formats.HIGH_PRECISION))
    kind = view.dtype if dtype is None else formats.dtype(dtype, "tensor", "dtype", known)
    where = None if device is None else arrays.usable(device, "tensor", "device")
    if kind is not view.dtype:
        view = _converted(view, kind, where or view.device)
    if where is not None:
        view = arrays.to(view, where)
    made = Tensor(view, requires_grad)
    return made if source is None or view is not source.view else source._sharing(made)


def _converted(view: ArrayView, kind: DType, where: Device) -> ArrayView:
    """Returns the values as ``kind``, on their way to ``where``: float64 goes through float32, as in
    ``quantize``. FormatError for other dtypes."""
    if view.dtype not in (*formats.HIGH_PRECISION, formats.float64) or kind not in formats.HIGH_PRECISION:
        wanted = "float64, float32, bfloat16 or float16 to become one of the last three"
        raise FormatError("tensor", "dtype", f"{view.dtype.name} to become {kind.name}", wanted)
    view = arrays.contiguous(view)
    if where.kind != "cpu":  # a GPU converts sooner than the host, which would load its engine for that
        if view.dtype is formats.float64 and view.device.kind == "cpu":  # half the bytes
            with np.errstate(over="ignore"):
                view = arrays.as_view(view.numpy().astype(np.float32))
        view = arrays.to(view, where)
    if kind is view.dtype:
        return view
    out = arrays.empty(view.shape, kind, view.device)
    dispatch.kernels(view.device).copy(view, out, arrays.current_stream(view.device))
    return out
