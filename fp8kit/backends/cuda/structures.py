"""Structures that kernels take by value, as bytes that know where their pointers are."""

from __future__ import annotations

import re
import struct

_CODE = re.compile(r"(\d*)([a-zA-Z])")


class Structure(bytes):
    """The bytes of a structure; of several, one behind the other, with ``+``. ``pointers``: where the
    pointers are, in bytes from the start, those that are null too."""

    pointers: tuple[int, ...] = ()

    def __add__(self, other: bytes) -> Structure:  # type: ignore[override]
        return _of(bytes.__add__(self, other), self, other)

    def __radd__(self, other: bytes) -> Structure:
        return _of(bytes.__add__(other, self), other, self)


def _of(whole: bytes, first: bytes, second: bytes) -> Structure:
    made = Structure(whole)
    made.pointers = (
        *getattr(first, "pointers", ()),
        *(len(first) + at for at in getattr(second, "pointers", ())),
    )
    return made


class Packer:
    """A ``struct.Struct`` without padding, in whose codes "P" is a pointer of 8 bytes."""

    __slots__ = ("_pack", "pointers", "size")

    def __init__(self, codes: str) -> None:
        fields = struct.Struct("=" + codes.replace("P", "Q"))
        self._pack, self.size = fields.pack, fields.size
        found, at = [], 0
        for count, code in _CODE.findall(codes):
            for _ in range(int(count or 1)):
                if code == "P":
                    found.append(at)
                at += struct.calcsize("=Q" if code == "P" else f"={code}")
        self.pointers = tuple(found)

    def pack(self, *values: float | bytes) -> Structure:
        """Returns the structure of these values."""
        made = Structure(self._pack(*values))
        made.pointers = self.pointers
        return made
