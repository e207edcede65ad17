"""Tensor maps: what Hopper's copy engine (TMA) is told of a matrix, made by the driver on the host.

A map is 128 bytes that only the driver writes. The address is the first eight of them: ``tensor_map`` gives
the other 120, made once for a shape, and sees for itself that they do not depend on the address. So a map is
a pointer of a kernel's structure and those bytes, and recorded calls can move it (``structures``).
"""

from __future__ import annotations

import ctypes
import struct

from fp8kit.backends.cuda import launch
from fp8kit.errors import BackendError
from fp8kit.lru import memoized

CODES = "P120s"  # of a map in a ``Packer``
NONE = (0, bytes(120))
_BYTES, _ALIGNMENT = 128, 64
_SOME, _OTHER = 1 << 32, (1 << 46) + 4096  # addresses that stand for any
# CUtensorMapDataType: its number and an element's bytes; CUtensorMapSwizzle, CUtensorMapL2promotion (cuda.h)
_TYPES = {"uint8": (0, 1), "float32": (7, 4)}
_NO_SWIZZLE, _SWIZZLE_128B = 0, 3
_PROMOTE_256B = 3


@memoized("tensor maps")
def tensor_map(
    kind: str,
    columns: int,
    rows: int,
    stride: int,
    box_columns: int,
    box_rows: int,
    swizzled: bool = False,
    matrices: int = 0,
) -> bytes:
    """A map without its address: of a matrix of ``kind`` ("uint8", "float32") whose rows lie ``stride``
    elements apart, copied by boxes of so many columns and rows. ``swizzled``: chunks of 16 bytes in a box's
    rows of 128 bytes are put as tensor cores find them without bank conflicts. ``matrices``: the map has a
    third dimension, of so many of them, one behind the other; 0: it has two.

    BackendError where the driver refuses it: addresses and strides are multiples of 16 bytes, a box's sides
    at most 256; and where its maps are not what this module's text says.
    """
    arguments = kind, columns, rows, stride, box_columns, box_rows, swizzled, matrices
    made, other = (_encoded(address, *arguments) for address in (_SOME, _OTHER))
    if (made[:8], other[:8]) != (struct.pack("=Q", _SOME), struct.pack("=Q", _OTHER)) or made[8:] != other[
        8:
    ]:
        raise BackendError(
            "tensor_map", "driver", made.hex(), "an address, and 120 bytes that do not depend on it"
        )
    return made[8:]


def _encoded(
    address: int,
    kind: str,
    columns: int,
    rows: int,
    stride: int,
    box_columns: int,
    box_rows: int,
    swizzled: bool,
    matrices: int,
) -> bytes:
    sizes, boxes = [columns, rows], [box_columns, box_rows]
    strides = [stride * _TYPES[kind][1], rows * stride * _TYPES[kind][1]]
    if matrices:
        sizes, boxes = [*sizes, matrices], [*boxes, 1]
    rank = len(sizes)
    number = _TYPES[kind][0]
    calls = launch.runtime()
    calls.setDevice(calls.getDevice())  # the driver wants a context, and a new thread has none
    memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    start = -ctypes.addressof(memory) % _ALIGNMENT
    status = launch.driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(memory) + start),
        number,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides[: rank - 1]),
        (ctypes.c_uint32 * rank)(*boxes),
        (ctypes.c_uint32 * rank)(*(1 for _ in sizes)),
        0,
        _SWIZZLE_128B if swizzled else _NO_SWIZZLE,
        _PROMOTE_256B,
        0,
    )
    if status:
        what = (
            f"{kind} ({matrices or 1}, {rows}, {columns}), stride {stride}, box ({box_rows}, {box_columns})"
        )
        raise BackendError(f"tensor_map: {what}: {launch.error_text(status)}")
    return memory.raw[start : start + _BYTES]
