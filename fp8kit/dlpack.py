"""DLPack 1.1 in and out: array exchange by a C struct inside a Python capsule, with native codes for bfloat16
and float8.

The ctypes structs mirror dlpack.h (dmlc/dlpack, version 1.1); the C text stands above each. The protocol
around them is the Python array API standard's ``__dlpack__`` and ``__dlpack_device__``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8kit import formats
from fp8kit.errors import BackendError, FormatError

if TYPE_CHECKING:
    from fp8kit.arrays import ArrayView

VERSION = (1, 1)
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY, of DLManagedTensorVersioned.flags

# DLDeviceType: kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLVulkan = 7, kDLMetal = 8, kDLROCM = 10,
# kDLCUDAManaged = 13, kDLOneAPI = 14
_DEVICE_CODES = {"cpu": 1, "cuda": 2, "vulkan": 7, "metal": 8, "rocm": 10, "oneapi": 14}
# pinned host memory is the CPU's, managed memory CUDA's
_DEVICE_KINDS = {code: kind for kind, code in _DEVICE_CODES.items()} | {3: "cpu", 13: "cuda"}


class DLDevice(ctypes.Structure):
    # typedef struct { DLDeviceType device_type; int32_t device_id; } DLDevice;
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    # typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    # typedef struct { void* data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t* shape; int64_t*
    # strides; uint64_t byte_offset; } DLTensor;
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    # typedef struct DLManagedTensor {
    #   DLTensor dl_tensor; void* manager_ctx; void (*deleter)(struct DLManagedTensor* self);
    # } DLManagedTensor;
    _fields_ = (("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DLPackVersion(ctypes.Structure):
    # typedef struct { uint32_t major; uint32_t minor; } DLPackVersion;
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class DLManagedTensorVersioned(ctypes.Structure):
    # typedef struct DLManagedTensorVersioned { DLPackVersion version; void* manager_ctx; void
    # (*deleter)(struct DLManagedTensorVersioned* self); uint64_t flags; DLTensor dl_tensor; }
    # DLManagedTensorVersioned;
    _fields_ = (
        ("version", DLPackVersion),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )


_WANTED = "an array that DLPack hands over"
_TRACED = "an array; a traced value has no memory yet, and fp8kit_jax has functions of these"
_Managed = DLManagedTensor | DLManagedTensorVersioned

# capsule name -> (struct, name after a consumer has taken it)
_CAPSULES: dict[bytes, tuple[type[_Managed], bytes]] = {
    b"dltensor_versioned": (DLManagedTensorVersioned, b"used_dltensor_versioned"),
    b"dltensor": (DLManagedTensor, b"used_dltensor"),
}

# const char* PyCapsule_GetName(PyObject*); void* PyCapsule_GetPointer(PyObject*, const char*);
# int PyCapsule_SetName(PyObject*, const char*)
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
# The GIL is held around a deleter, as NumPy and CPython's own consumers do.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


def device_code(kind: str) -> int:
    """DLPack's DLDeviceType of a device kind: 1 for "cpu", 2 for "cuda". BackendError for a kind that DLPack
    does not have."""
    try:
        return _DEVICE_CODES[kind]
    except KeyError:
        raise BackendError("dlpack", "device", repr(kind), f"one of {', '.join(_DEVICE_CODES)}") from None


def array_at(
    ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], owner: object
) -> np.ndarray[Any, Any]:
    """Returns a writable NumPy array over memory at the address ``ptr`` that keeps ``owner`` alive; the
    memory is not touched.

    ``strides`` in elements, of any sign; ``ptr`` is the address of element (0, ..., 0).
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    reach = [(n - 1) * s * dtype.itemsize for n, s in zip(shape, strides, strict=True)]
    below, above = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    buffer: Any = (ctypes.c_char * (above - below + dtype.itemsize)).from_address(ptr + below)
    buffer._fp8kit_owner = owner
    return np.ndarray(shape, dtype, buffer, -below, tuple(s * dtype.itemsize for s in strides))


def export(view: ArrayView, max_version: tuple[int, int] | None) -> object:
    """Returns a capsule over the view's memory, which it keeps alive until the consumer's deleter call.

    "dltensor_versioned" when ``max_version`` is at least (1, 0), else the older "dltensor". The capsule, its
    deleter and its destructor are NumPy's, made over the same address with integers of the same width; only
    device and element type are written in after. Python code as a deleter would not do: it may be called
    while an exception is pending, or after the interpreter has shut down.

    Raises FormatError for float4 (DLPack packs two codes a byte, fp8kit keeps one), BackendError for a device
    that DLPack lacks, and BufferError for read-only memory where the consumer takes no version, as the older
    capsule cannot say it.
    """
    kind = view.dtype
    if kind.dlpack[1] < 8:
        raise FormatError(
            "dlpack", "dtype", kind.name, "a type of at least 8 bits; export its codes as uint8"
        )
    stand_in = array_at(view.ptr, view.shape, view.strides, np.dtype(f"u{kind.itemsize}"), (view.owner,))
    stand_in.flags.writeable = view.writable
    versioned = max_version is not None and tuple(max_version) >= (1, 0)
    capsule = stand_in.__dlpack__(max_version=VERSION) if versioned else stand_in.__dlpack__()
    tensor = _managed(capsule)[0].dl_tensor
    tensor.device = DLDevice(device_code(view.device.kind), view.device.index)
    tensor.dtype = DLDataType(*kind.dlpack, 1)
    return capsule


class Imported(NamedTuple):
    """Another library's array: address, sizes, where it lies, and what keeps its memory. ``strides`` are in
    elements, None for an array without gaps."""

    ptr: int
    shape: tuple[int, ...]
    dtype: formats.DType
    device: tuple[str, int]
    owner: Borrowed
    strides: tuple[int, ...] | None


def import_(array: Any, current_stream: Callable[[str, int], int]) -> Imported:
    """Returns the memory of any array that has ``__dlpack__``; the producer's deleter runs when the owner is
    collected.

    On CUDA the producer is asked to make ``current_stream(kind, index)`` of its device wait for its work.
    Raises FormatError where the producer refuses, or for an element type that fp8kit lacks (sub-byte and
    vector types), BackendError for a device that it does not know.
    """
    try:
        code, index = map(int, array.__dlpack_device__())
    except Exception as error:  # the producer's own kinds: whatever they are, there is no array here
        wanted = _TRACED if type(array).__name__.endswith("Tracer") else _WANTED
        raise FormatError(
            "dlpack", "array", f"{type(array).__name__} that does not say its device ({error})", wanted
        ) from error
    if code not in _DEVICE_KINDS:
        raise BackendError("dlpack", "device", f"type {code}", f"one of {', '.join(_DEVICE_CODES)}")
    kind = _DEVICE_KINDS[code]
    # None means the host has no streams; 0 is ambiguous on CUDA and forbidden, 1 is its legacy default stream
    stream = {} if kind == "cpu" else {"stream": current_stream(kind, index) or 1}
    capsule = _ask(array, stream)
    managed, name = _managed(capsule)
    tensor = managed.dl_tensor
    element = (int(tensor.dtype.code), int(tensor.dtype.bits))
    if tensor.dtype.lanes != 1 or element[1] < 8:
        got = f"type code {element[0]}, {element[1]} bits, {tensor.dtype.lanes} lanes"
        raise FormatError("dlpack", "dtype", got, "1 lane of at least 8 bits")
    dtype = formats.dtype_from_dlpack(*element)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    _capsule_rename(capsule, _CAPSULES[name][1])
    read_only = isinstance(managed, DLManagedTensorVersioned) and bool(managed.flags & _READ_ONLY)
    owner = Borrowed(ctypes.addressof(managed), managed.deleter, read_only)
    return Imported((tensor.data or 0) + tensor.byte_offset, shape, dtype, (kind, index), owner, strides)


class Borrowed:
    """Another library's memory: calls the producer's deleter, once, when collected. ``read_only``: the
    producer said so."""

    __slots__ = ("_address", "_deleter", "read_only")

    def __init__(self, address: int, deleter: int | None, read_only: bool = False) -> None:
        self._address = address
        self.read_only = read_only
        self._deleter: Callable[[int], None] | None = _Deleter(deleter) if deleter else None

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._address)


def _ask(array: Any, stream: dict[str, int]) -> Any:
    """Returns the producer's capsule; producers older than DLPack 1.0 do not know ``max_version``."""
    try:
        try:
            return array.__dlpack__(**stream, max_version=VERSION)
        except TypeError:
            return array.__dlpack__(**stream)
    except (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise FormatError(
            "dlpack", "array", f"{type(array).__name__} that does not export itself ({error})", _WANTED
        ) from error


def _managed(capsule: Any) -> tuple[_Managed, bytes]:
    """Returns the struct inside a capsule that has not been consumed yet, and the capsule's name."""
    try:
        name = _capsule_name(capsule)
    except ValueError:  # no capsule
        name = type(capsule).__name__
    if name not in _CAPSULES:
        raise FormatError("dlpack", "capsule", repr(name), "an unused dltensor or dltensor_versioned")
    return _CAPSULES[name][0].from_address(_capsule_pointer(capsule, name)), name
