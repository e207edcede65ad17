"""Between sequences that lie one after the other and a padded batch."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch

WORDS = {2: "u16", 4: "u32", 8: "u64", 16: "uint4"}  # bytes -> the sources' type


def unpack_sequences(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    batches, longest, _ = y.shape
    kernel, words, threads = _moving("unpack_sequences", x, y)
    launch.launch(kernel, (longest, batches), threads, (x.ptr, y.ptr, lengths.ptr, starts.ptr, words), stream)


def pack_sequences(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    batches, longest, _ = x.shape
    kernel, words, threads = _moving("pack_sequences", x, y)
    launch.launch(kernel, y.shape[0], threads, (x.ptr, y.ptr, lengths.ptr, starts.ptr, batches, longest, words), stream)


def _moving(function: str, x: ArrayView, y: ArrayView) -> tuple[launch.Kernel, int, int]:
    """The kernel in the widest words that rows and addresses allow, words in a row, and threads for it."""
    row = x.shape[-1] * x.dtype.itemsize
    places = x.ptr | y.ptr | row
    word = next(size for size in (16, 8, 4, 2) if places % size == 0)
    words = row // word
    return launch.kernel("sequences.cu", function, y.device.index, W=WORDS[word]), words, min(256, max(32, -(-words // 32) * 32))
