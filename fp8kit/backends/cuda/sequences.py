"""Between sequences that lie one after the other and a padded batch."""

from __future__ import annotations

import functools
import operator

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import whole_warps

_WORDS = {16: "uint4", 8: "u64", 4: "u32", 2: "u16"}  # bytes -> the sources' type
_MOST_BLOCKS = 2**31 - 1  # of a grid's first dimension; the others take 65,535


def grid_of(rows: int) -> int:
    """Blocks for kernels in which a block does a row, and goes on to further ones where there are more rows
    than blocks."""
    return min(rows, _MOST_BLOCKS)


def steps_of(view: ArrayView, qkv_format: str) -> tuple[int, int, int]:
    """Elements from token to token, batch to batch (0 for thd) and head to head."""
    if qkv_format == "thd":
        return view.strides[0], 0, view.strides[1]
    first, second, head, _ = view.strides
    return (first, second, head) if qkv_format == "sbhd" else (second, first, head)


def in_words(
    source: str, function: str, x: ArrayView, y: ArrayView, *steps: int
) -> tuple[launch.Kernel, int]:
    """Returns the kernel that moves elements in the widest words that addresses and ``steps``, in bytes,
    allow, and a word's bytes."""
    places = functools.reduce(operator.or_, steps, x.ptr | y.ptr)
    word = next(size for size in _WORDS if places % size == 0)
    return launch.kernel(source, function, y.device.index, W=_WORDS[word]), word


def unpack_sequences(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    _move("unpack_sequences", x, y, lengths, starts, tokens=x.shape[0], batch=y, stream=stream)


def pack_sequences(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    _move("pack_sequences", x, y, lengths, starts, tokens=y.shape[0], batch=x, stream=stream)


def unpack_heads(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """``unpack_sequences`` of tokens (t, heads, d), which may be strided, to a batch (b, s, heads, d)."""
    rows = y.reshape(*y.shape[:2], -1)
    _move("unpack_sequences", x, rows, lengths, starts, tokens=x.shape[0], batch=rows, stream=stream)


def pack_heads(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """``pack_sequences`` of a batch (b, s, heads, d) to tokens (t, heads, d), which may be strided."""
    rows = x.reshape(*x.shape[:2], -1)
    _move("pack_sequences", rows, y, lengths, starts, tokens=y.shape[0], batch=rows, stream=stream)


def _move(
    function: str,
    x: ArrayView,
    y: ArrayView,
    lengths: ArrayView,
    starts: ArrayView,
    tokens: int,
    batch: ArrayView,
    stream: int,
) -> None:
    """A block for each row of y, in the widest words that rows and addresses allow. Tokens may have their
    heads apart."""
    given, item = (x if batch is y else y), x.dtype.itemsize
    row, part, head = (item * size for size in (batch.shape[-1], given.shape[-1], given.shape[-1]))
    token = item * given.strides[0]
    if given.ndim == 3:
        head = item * given.strides[1]
    kernel, word = in_words("sequences.cu", function, x, y, row, part, token, head)
    batches, longest, _ = batch.shape
    grid = grid_of(batches * longest if batch is y else tokens)
    sizes = (size // word for size in (row, part, token, head))
    args = (x.ptr, y.ptr, lengths.ptr, starts.ptr, tokens, batches, longest, *sizes)
    launch.launch(kernel, grid, whole_warps(row // word), args, stream)
