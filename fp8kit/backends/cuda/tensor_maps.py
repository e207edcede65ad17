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
_TYPES = {"uint8": (0, 1), "float16": (6, 2), "float32": (7, 4), "bfloat16": (9, 2)}
_NO_SWIZZLE, _SWIZZLE_128B = 0, 3
_PROMOTE_256B = 3


@memoized("tensor maps")
def tensor_map(
    kind: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzled: bool = False
) -> bytes:
    """Returns a map without its address: of an array of ``kind`` ("uint8", "float16", "bfloat16", "float32")
    with up to five dimensions, the contiguous one first: ``sizes``; ``strides``, in elements, of all but the
    first dimension; and the sizes of the ``box`` that is copied at once. ``swizzled``: chunks of 16 bytes in
    a box's rows of 128 bytes are put as tensor cores find them without bank conflicts.

    BackendError where the driver refuses it: addresses and strides are multiples of 16 bytes, a box's sides
    at most 256; and where its maps are not what this module's text says.
    """
    arguments = kind, sizes, strides, box, swizzled
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
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool,
) -> bytes:
    (number, itemsize), rank = _TYPES[kind], len(sizes)
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
        (ctypes.c_uint64 * (rank - 1))(*(stride * itemsize for stride in strides)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLE_128B if swizzled else _NO_SWIZZLE,
        _PROMOTE_256B,
        0,
    )
    if status:
        what = f"{kind} {sizes}, strides {strides}, box {box}"
        raise BackendError(f"tensor_map: {what}: {launch.error_text(status)}")
    return memory.raw[start : start + _BYTES]
