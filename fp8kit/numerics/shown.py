"""What the calls of one step have shown: arrays on their devices, and how they come to the host.

The counts and sums of all calls on one stream lie in one block of device memory. At the end of the step one
copy per block is put on that stream, into page-locked memory; nobody waits for it before the numbers are
wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.formats import uint8
from fp8kit.inspection import Entry
from fp8kit.numerics.dumps import on_host
from fp8kit.spec import Meta

Array = np.ndarray[Any, Any]
_BLOCK = 1 << 16  # bytes: of some hundred tensors without histograms
_ALIGNMENT = 64  # bytes


class Block:
    """Memory for the arrays of calls on one stream, at least ``nbytes`` bytes of a frontend's ``memory``."""

    def __init__(self, memory: Any, stream: int, nbytes: int) -> None:
        self._view: ArrayView = memory.view(Meta((max(nbytes, _BLOCK),), uint8))
        self._stream, self._used = stream, 0
        self._fetched: Callable[[], Array] | None = None
        self._host: Array | None = None

    def place(self, nbytes: int) -> ArrayView | None:
        """So many bytes of it, uint8, contents undefined; None where they are not left."""
        start = self._used
        if start + nbytes > self._view.size:
            return None
        self._used = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return ArrayView(self._view.ptr + start, (nbytes,), uint8, self._view.device, self)

    def fetch(self) -> None:
        """Begin to copy it to the host, behind what is on its stream now."""
        used = self._view.slice(0, 0, min(self._used, self._view.size))
        self._fetched = arrays.provider(used.device).fetch(used, self._stream)

    def host(self, part: ArrayView) -> Array:
        """A part on the host; waits until it is there."""
        if self._host is None:
            assert self._fetched is not None
            self._host = self._fetched()
        start = part.ptr - self._view.ptr
        return self._host[start : start + part.size]

    @property
    def on_host(self) -> bool:
        """Whether it need not be waited for."""
        return self._view.device.kind == "cpu"


class Shown:
    """The arrays of one step, ``taken``: each with what it holds."""

    def __init__(self) -> None:
        self.taken: list[tuple[Entry, Any]] = []
        self._blocks: dict[Any, list[Block]] = {}

    def place(self, memory: Any, nbytes: int) -> ArrayView:
        """Memory for an array of a call that is about to run: on the device and the stream of ``memory``."""
        stream = memory.stream()
        blocks = self._blocks.setdefault((memory.device, stream), [])
        found = blocks[-1].place(nbytes) if blocks else None
        if found is None:
            blocks.append(Block(memory, stream, nbytes))
            found = blocks[-1].place(nbytes)
            assert found is not None
        return found

    def take(self, entries: Mapping[str, Entry], shown: Sequence[Any]) -> None:
        """Note what a call has shown."""
        self.taken += zip(entries.values(), shown, strict=True)

    def fetch(self) -> bool:
        """Begin to copy to the host. Whether it is all there already, or cannot come by itself."""
        blocks = [block for own in self._blocks.values() for block in own]
        for block in blocks:
            block.fetch()
        others = any(not isinstance(_owner(array), Block) for _, array in self.taken)
        return others or all(block.on_host for block in blocks)

    @staticmethod
    def host(array: Any) -> Array:
        """One of the arrays on the host; waits until it is there."""
        owner = _owner(array)
        return owner.host(array) if isinstance(owner, Block) else on_host(array)


def _owner(array: Any) -> Any:
    return array.owner if isinstance(array, ArrayView) else None
