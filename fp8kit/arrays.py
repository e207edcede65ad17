"""Arrays as pointers: what any array becomes when it comes in, with no copy.

``ArrayView`` is what every package takes: kernels read and write views, operations pass them on, frontends
allocate them. Where arrays live, and who serves them there, is said in ``devices``, whose names are found
here too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np

from fp8kit import dlpack, formats
from fp8kit.arguments import is_integer, shown, sizes
from fp8kit.devices import (
    CPU,
    Device,
    DeviceProvider,
    available,
    current_stream,
    device,
    provider,
    register_device,
    synchronize,
    usable,
)
from fp8kit.errors import BackendError, FormatError, ShapeError
from fp8kit.formats import DType

__all__ = [
    "CPU",
    "ArrayView",
    "Device",
    "DeviceProvider",
    "Shape",
    "as_sizes",
    "as_view",
    "assign",
    "available",
    "contiguous",
    "contiguous_strides",
    "copy",
    "current_stream",
    "device",
    "empty",
    "provider",
    "register_device",
    "synchronize",
    "to",
    "to_library",
    "usable",
    "zero_",
    "zeros",
]

Shape = tuple[int, ...]
Tile = tuple[int, int]  # rows and columns of elements that share a scale, 0: all
# what any element can be moved as
_BITS = {1: formats.uint8, 2: formats.uint16, 4: formats.uint32, 8: formats.uint64}


class ArrayView:
    """An n-dimensional array by pointer.

    ``ptr`` is the address of the first element, ``shape`` its extent in elements, ``strides`` in elements (C
    order when not given), ``dtype`` a ``DType``; FP8 codes are kept as ``uint8``, their format travels
    beside. ``owner`` is whatever keeps the memory alive. Views are cheap values: reshaping or slicing makes
    another over the same memory. Nothing is checked here: what made the array vouches for it. Methods raise
    ShapeError or FormatError where the view's shape, strides or dtype do not allow the call.
    """

    __slots__ = ("_strides", "device", "dtype", "owner", "ptr", "shape")

    def __init__(
        self,
        ptr: int,
        shape: Shape,
        dtype: DType,
        device: Device,
        owner: object = None,
        strides: Shape | None = None,
    ) -> None:
        self.ptr = ptr
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.owner = owner
        self._strides = strides

    @property
    def strides(self) -> Shape:
        """Distance between neighbours along each dimension, in elements."""
        return contiguous_strides(self.shape) if self._strides is None else self._strides

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        if self._strides is None:
            return True
        wanted = contiguous_strides(self.shape)
        return self.size == 0 or all(
            n == 1 or s == w for n, s, w in zip(self.shape, self._strides, wanted, strict=True)
        )

    @property
    def writable(self) -> bool:
        """Whether the memory may be written: False over a read-only NumPy array and over what DLPack says is
        read-only."""
        if isinstance(self.owner, np.ndarray):
            return bool(self.owner.flags.writeable)
        return not (isinstance(self.owner, dlpack.Borrowed | _Fixed) and self.owner.read_only)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps not counted."""
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, *shape: int) -> ArrayView:
        """Returns the same elements under another shape (one -1 is worked out); ShapeError when not
        C-contiguous or of another size."""
        size = self.size
        try:
            shape = tuple(map(index, shape))
        except TypeError:
            raise ShapeError("reshape", "shape", shown(shape), "ints") from None
        if -1 in shape:
            rest = -math.prod(shape)
            at = shape.index(-1)
            shape = (*shape[:at], size // rest if rest else 0, *shape[at + 1 :])
        if math.prod(shape) != size or not self.contiguous or min(shape, default=0) < 0:
            wanted = f"{size} elements, C-contiguous (strides {self.strides})"
            raise ShapeError("reshape", "shape", shape, wanted)
        return ArrayView(self.ptr, shape, self.dtype, self.device, self.owner)

    def rows(self) -> ArrayView:
        """Returns the array as a matrix: all leading dimensions flattened into rows, the last one kept."""
        shape = self.shape
        if self._strides is None and shape:
            if len(shape) == 2:
                return self
            matrix = math.prod(shape[:-1]), shape[-1]
            return ArrayView(self.ptr, matrix, self.dtype, self.device, self.owner)
        last = shape[-1] if shape else 1
        return self.reshape(self.size // last if last else math.prod(shape[:-1]), last)

    def slice(self, dim: int, start: int, length: int) -> ArrayView:
        """``length`` elements from ``start`` along ``dim``. ShapeError where they are not all there."""
        try:
            dim, start, length = index(dim), index(start), index(length)
            extent = self.shape[dim]
        except (TypeError, IndexError):
            raise ShapeError(
                "slice", "dim, start, length", shown((dim, start, length)), f"ints within {self.shape}"
            ) from None
        if min(start, length) < 0 or start + length > extent:
            raise ShapeError("slice", f"range along dim {dim}", (start, length), f"within {extent}")
        strides = self.strides
        dim %= len(strides)
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        kept = None if self._strides is None and dim == 0 else strides
        ptr = self.ptr + start * strides[dim] * self.dtype.itemsize
        return ArrayView(ptr, shape, self.dtype, self.device, self.owner, kept)

    def first(self, shape: Shape) -> ArrayView:
        """Returns the first elements of an array of one dimension under another shape. ShapeError where they
        are not all there."""
        return self.slice(0, 0, math.prod(shape)).reshape(*shape)

    def at(self, i: int) -> ArrayView:
        """Returns what is at ``i`` of the first dimension. ShapeError where nothing is."""
        return self.slice(0, i, 1).reshape(*self.shape[1:])

    def repeated(self, count: int) -> ArrayView:
        """Returns a single element as an array (count,), each of which it is. ShapeError for another size,
        and for a ``count`` that is not one."""
        (extent,) = sizes("repeated", (count,), ShapeError)
        if self.size != 1 or extent < 0:
            got = f"{extent} times one of {self.shape}"
            raise ShapeError("repeated", "count", got, "at least 0 times a single element")
        return ArrayView(self.ptr, (extent,), self.dtype, self.device, self.owner, (0,))

    def transpose(self, *axes: int) -> ArrayView:
        """Returns the same memory with its dimensions in the order ``axes``. ShapeError unless they are a
        permutation."""
        strides = self.strides
        if sorted(sizes("transpose", axes, ShapeError)) != list(range(len(strides))):
            raise ShapeError("transpose", "axes", axes, f"each of 0 ... {len(strides) - 1} once")
        return self.with_strides(tuple(self.shape[a] for a in axes), tuple(strides[a] for a in axes))

    def with_strides(self, shape: Shape, strides: Shape, offset: int = 0) -> ArrayView:
        """Any strided view of the same memory, ``offset`` elements further on. The caller answers for its
        bounds."""
        ptr = self.ptr + offset * self.dtype.itemsize
        return ArrayView(ptr, shape, self.dtype, self.device, self.owner, strides)

    def view(self, dtype: DType | str) -> ArrayView:
        """Returns the same bytes as another dtype of the same item size; FormatError otherwise."""
        if not isinstance(dtype, DType):
            dtype = formats.dtype(dtype)
        if dtype.itemsize != self.dtype.itemsize:
            raise FormatError("view", "dtype", dtype, f"{self.dtype.itemsize} bytes an element")
        return ArrayView(self.ptr, self.shape, dtype, self.device, self.owner, self._strides)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the array as NumPy: the same memory on the CPU, read-only where that is; a copy from any
        other device.

        What is written through it no count of changes sees (``Tensor.version``): backward would use the new
        values without a word.
        """
        if self.device.kind != "cpu":
            return duplicate(self, CPU).numpy()
        if isinstance(self.owner, np.ndarray):
            own = self.owner
            same = own.ctypes.data == self.ptr and own.shape == self.shape and own.dtype == self.dtype.numpy
            if same and self.contiguous and own.flags.c_contiguous:
                return own
        array = dlpack.array_at(self.ptr, self.shape, self.strides, self.dtype.numpy, self.owner)
        array.flags.writeable = self.writable
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.device.kind != "cpu":
            raise FormatError(
                "__array__", "array", f"device {self.device}", "the CPU; .numpy() copies from a GPU"
            )
        own = self.numpy()
        return np.array(own, dtype) if copy else np.asarray(own, dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> ArrayView:
        return duplicate(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "ArrayView cannot be pickled: it is memory by address; use fk.save and fk.load, or numpy()"
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_code(self.device.kind), self.device.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            here = self.__dlpack_device__()
            raise BufferError(f"__dlpack__: dl_device: got {dl_device}, expected {here}: it is not moved")
        if stream is not None and stream != -1 and self.device.kind != "cpu":
            provider(self.device).order_after(stream, self.device)
        return dlpack.export(duplicate(self) if copy else self, max_version)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        if self.device.kind != "cuda":
            raise AttributeError("__cuda_array_interface__: the array is not on a CUDA device")
        strides, itemsize = self._strides, self.dtype.itemsize
        return {
            "shape": self.shape,
            "typestr": self.dtype.numpy.str,
            "data": (self.ptr, not self.writable),
            "version": 3,
            "strides": None if strides is None else tuple(s * itemsize for s in strides),
            "stream": current_stream(self.device) or 1,
        }

    def __repr__(self) -> str:
        return f"ArrayView({self.shape}, {self.dtype.name}, {self.device})"


def contiguous_strides(shape: Shape) -> Shape:
    """Strides in elements of a C-contiguous array of ``shape``, a tuple of ints."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def empty(shape: Shape, dtype: DType | str, where: Device) -> ArrayView:
    """Returns a fresh C-contiguous array, its contents undefined. ``shape`` in elements.

    ShapeError for extents that are negative or no ints, FormatError for another dtype, BackendError for
    memory that cannot be had.
    """
    if type(shape) is not tuple:
        shape = as_sizes(shape)
    for n in shape:
        if type(n) is not int or n < 0:
            shape = as_sizes(shape)
            break
    if not isinstance(dtype, DType):
        dtype = formats.dtype(dtype)
    ptr, owner = provider(where).alloc(math.prod(shape) * dtype.itemsize, where)
    return ArrayView(ptr, shape, dtype, where, owner)


def zeros(shape: Shape, dtype: DType, where: Device) -> ArrayView:
    """Returns a fresh C-contiguous array of zeros."""
    view = empty(shape, dtype, where)
    zero_(view)
    return view


def zero_(view: ArrayView) -> None:
    """Write zeros over a C-contiguous view, in stream order. ShapeError for a strided one, FormatError for
    read-only memory."""
    view = as_view(view)
    if not view.contiguous:
        raise ShapeError("zero_", "view", f"strides {view.strides}", "C-contiguous")
    want_writable("zero_", "view", view)
    fill_zero(view, current_stream(view.device))


def fill_zero(view: ArrayView, stream: int) -> None:
    """Write zeros over a C-contiguous view, on ``stream``."""
    provider(view.device).fill_zero(view, stream)


def copy(dst: Any, src: Any) -> None:
    """Copy between any C-contiguous arrays of the same dtype and size, across devices or on one, in stream
    order. ShapeError for others, FormatError for a ``dst`` in read-only memory."""
    dst, src = as_view(dst), as_view(src)
    if dst.dtype is not src.dtype or dst.size != src.size or not (dst.contiguous and src.contiguous):
        raise ShapeError("copy", "dst", dst, f"C-contiguous, {src.size} elements of {src.dtype.name}")
    want_writable("copy", "dst", dst)
    where = src.device if src.device.kind != "cpu" else dst.device
    provider(where).copy(dst, src, current_stream(where))


def want_writable(operation: str, argument: str, view: ArrayView) -> None:
    """FormatError for read-only memory."""
    if not view.writable:
        raise FormatError(operation, argument, "read-only memory", "memory that may be written")


def duplicate(view: ArrayView, where: Device | None = None) -> ArrayView:
    """Returns a C-contiguous copy in memory of its own, on the same device or ``where``."""
    own = empty(view.shape, view.dtype, view.device if where is None else where)
    copy(own, contiguous(view))
    return own


def to(view: Any, where: Device | str) -> ArrayView:
    """Returns a view of any array where it already lives on ``where``, else a copy there."""
    view = as_view(view)
    if not isinstance(where, Device):
        where = device(where)
    return view if view.device == where else duplicate(view, where)


def assign(dst: ArrayView, src: ArrayView) -> None:
    """Copy between views of the same dtype and shape on one device, both with any strides, by the device's
    own library."""
    if dst.dtype is not src.dtype or dst.shape != src.shape or dst.device != src.device:
        raise ShapeError("assign", "dst", dst, repr(src))
    want_writable("assign", "dst", dst)
    bits = _BITS[dst.dtype.itemsize]
    native(dst.view(bits))[...] = native(src.view(bits))


def contiguous(view: ArrayView) -> ArrayView:
    """Returns the view itself when it is C-contiguous, else a C-contiguous copy made by the device's own
    library."""
    view = as_view(view)
    if view.contiguous:
        return view
    bits = native(view.view(_BITS[view.dtype.itemsize]))
    try:
        return as_view(bits.copy(order="C")).view(view.dtype)
    except MemoryError as error:
        lacking = f"contiguous: {view.nbytes} bytes on {view.device} cannot be had ({error})"
        raise BackendError(lacking) from None


def as_view(array: Any, operation: str = "as_view", argument: str = "array") -> ArrayView:
    """Any array as a view of its own memory, with no copy.

    Takes an ArrayView, whatever has ``__fp8kit_view__``, NumPy (ml_dtypes included),
    ``__cuda_array_interface__``, or ``__dlpack__`` on a known device. FormatError for anything else, and for
    a dtype that fp8kit does not have, about ``argument`` of ``operation``.
    """
    if isinstance(array, ArrayView):
        return array
    try:
        return _view_of(array)
    except (FormatError, BackendError) as error:
        raise error.renamed(operation, argument) from None


def _view_of(array: Any) -> ArrayView:
    own = getattr(array, "__fp8kit_view__", None)
    if own is not None:
        return own()  # type: ignore[no-any-return]
    if isinstance(array, np.ndarray | np.generic):
        array = np.asarray(array)
        kind = formats.dtype(array.dtype)
        if any(s % kind.itemsize for s in array.strides):
            got = f"dtype {array.dtype.str}, strides {array.strides}"
            raise FormatError("as_view", "array", got, "strides of whole elements")
        strides = None if array.flags.c_contiguous else tuple(s // kind.itemsize for s in array.strides)
        return ArrayView(array.ctypes.data, array.shape, kind, CPU, array, strides)
    if type(array).__module__.partition(".")[0] == "cupy":
        return _from_cuda_interface(array)
    if hasattr(type(array), "__dlpack__"):
        return from_dlpack(array)
    if hasattr(type(array), "__cuda_array_interface__"):
        return _from_cuda_interface(array)
    wanted = "an array: NumPy, CuPy, or with __dlpack__ or __cuda_array_interface__"
    raise FormatError("as_view", "array", _kind(array), wanted)


def from_dlpack(array: Any) -> ArrayView:
    """Returns a view of what ``array.__dlpack__`` gives; see ``dlpack.import_``."""
    ptr, shape, kind, device, owner, strides = dlpack.import_(array, lambda *on: current_stream(Device(*on)))
    view = ArrayView(ptr, shape, kind, Device(*device), owner, strides)
    return view.reshape(*shape) if strides is not None and view.contiguous else view


def _kind(value: Any) -> str:
    """Returns what is no array, as errors call it."""
    if value is None:
        return "None"
    return type(value).__name__ + (f" {shown(value)}" if isinstance(value, str | int | float) else "")


class _Fixed:
    """Keeps an array alive whose ``__cuda_array_interface__`` says that it is read-only."""

    __slots__ = ("array",)
    read_only = True

    def __init__(self, array: Any) -> None:
        self.array = array


def _from_cuda_interface(array: Any) -> ArrayView:
    number = array.device.id if hasattr(getattr(array, "device", None), "id") else 0
    try:
        interface = array.__cuda_array_interface__
        kind = formats.dtype(np.dtype(array.dtype) if hasattr(array, "dtype") else interface["typestr"])
        strides, (ptr, read_only), _ = interface.get("strides"), interface["data"], interface["shape"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        got = f"{type(array).__name__} with a __cuda_array_interface__ that is incomplete ({error})"
        wanted = "typestr, shape and data, as the interface has it"
        raise FormatError("as_view", "array", got, wanted) from None
    owner, where = _Fixed(array) if read_only else array, Device("cuda", number)
    if strides is not None:
        strides = tuple(s // kind.itemsize for s in strides)
    return ArrayView(ptr, tuple(interface["shape"]), kind, where, owner, strides)


def native(view: ArrayView) -> Any:
    """Returns the view as an array of its device's own library, sharing memory."""
    return provider(view.device).native(view)


def to_library(view: ArrayView, like: Any) -> Any:
    """Returns the view as an array of the library that ``like`` belongs to, sharing memory where that library
    can.

    NumPy for NumPy and plain Python values, CuPy for CuPy, through ``from_dlpack`` for any other library that
    has it, else the view itself. Of a class of a program's own its base's library.
    """
    view = as_view(view)
    for kind in type(like).__mro__[:-1]:
        library = kind.__module__.partition(".")[0]
        if library in ("numpy", "builtins", "cupy"):
            return native(view)
        module = sys.modules.get(library)
        namespace = like.__array_namespace__() if hasattr(like, "__array_namespace__") else module
        take = getattr(namespace, "from_dlpack", None)
        if library == "fp8kit":
            break
        if take is not None:
            return take(view)
    return view


def as_sizes(shape: int | Sequence[int]) -> Shape:
    """Returns a shape argument as a tuple; ShapeError for negative or non-integer entries."""
    one_by_one = isinstance(shape, Iterable) and not isinstance(shape, str | bytes | np.ndarray)
    extents: tuple[Any, ...] = tuple(shape) if one_by_one else (shape,)  # type: ignore[arg-type]
    if not all(is_integer(n) and 0 <= n < 2**63 for n in extents):
        raise ShapeError("shape", "shape", shown(shape), "non-negative integers")
    return tuple(map(index, extents))
