"""Keys and values of sequences that grow: a cache of pages, written at the sequences' ends and read as a
padded batch."""

from __future__ import annotations

import math

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda.sequences import WORDS, grid_of


def cache_append_(
    x: ArrayView,
    cache: ArrayView,
    pages: ArrayView,
    fresh: ArrayView,
    totals: ArrayView,
    starts: ArrayView | None,
    qkv_format: str,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    heads, dim = x.shape[-2:]
    if qkv_format == "thd":
        token, batch, head = x.strides[0], 0, x.strides[1]
        tokens = rows = x.shape[0]
    else:
        s, b = (0, 1) if qkv_format == "sbhd" else (1, 0)
        token, batch, head = x.strides[s], x.strides[b], x.strides[2]
        tokens, rows = x.shape[s], x.shape[s] * x.shape[b]
    kernel, word = _moving("cache_append", x, cache, (dim, token, batch, head))
    steps = [n * x.dtype.itemsize // word for n in (dim, token, batch, head)]
    args = (
        x.ptr,
        cache.ptr,
        pages.ptr,
        fresh.ptr,
        totals.ptr,
        0 if starts is None else starts.ptr,
        tokens,
        pages.shape[0],
        cache.shape[0],
        pages.shape[1],
        cache.shape[1],
        heads,
        *steps,
    )
    launch.launch(kernel, grid_of(rows), _threads(heads * steps[0]), args, stream)


def cache_gather(
    cache: ArrayView, y: ArrayView, pages: ArrayView, totals: ArrayView, qkv_format: str, stream: int
) -> None:
    """See ``backends.protocol``."""
    row = math.prod(y.shape[2:])
    sequence_first = qkv_format == "sbhd"
    longest, batches = y.shape[:2] if sequence_first else (y.shape[1], y.shape[0])
    strides = (y.shape[1] * row, row) if sequence_first else (row, y.shape[1] * row)
    kernel, word = _moving("cache_gather", cache, y, (row,))
    steps = [n * y.dtype.itemsize // word for n in (row, *strides)]
    args = (
        cache.ptr,
        y.ptr,
        pages.ptr,
        totals.ptr,
        longest,
        batches,
        cache.shape[0],
        pages.shape[1],
        cache.shape[1],
        *steps,
    )
    launch.launch(kernel, grid_of(batches * longest), _threads(steps[0]), args, stream)


def _moving(function: str, x: ArrayView, y: ArrayView, steps: tuple[int, ...]) -> tuple[launch.Kernel, int]:
    """The kernel in the widest words that addresses and ``steps``, in elements, allow, and a word's bytes."""
    word = next(
        size
        for size in (16, 8, 4, 2)
        if all(n % size == 0 for n in (x.ptr, y.ptr, *(s * x.dtype.itemsize for s in steps)))
    )
    return launch.kernel("kv_cache.cu", function, y.device.index, W=WORDS[word]), word


def _threads(words: int) -> int:
    return min(256, max(32, -(-words // 32) * 32))
