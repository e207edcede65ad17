"""Keys and values of sequences that grow: a cache of pages, written at the sequences' ends and read as a
padded batch."""

from __future__ import annotations

import math

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, whole_warps
from fp8kit.backends.cuda.sequences import grid_of, in_words


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
    steps = [n * x.dtype.itemsize for n in (dim, token, batch, head)]
    kernel, word = in_words("kv_cache.cu", "cache_append", x, cache, *steps)
    words = [step // word for step in steps]
    args = (
        x.ptr,
        cache.ptr,
        pages.ptr,
        fresh.ptr,
        totals.ptr,
        address(starts),
        tokens,
        pages.shape[0],
        cache.shape[0],
        pages.shape[1],
        cache.shape[1],
        heads,
        *words,
    )
    launch.launch(kernel, grid_of(rows), whole_warps(heads * words[0]), args, stream)


def cache_gather(
    cache: ArrayView, y: ArrayView, pages: ArrayView, totals: ArrayView, qkv_format: str, stream: int
) -> None:
    """See ``backends.protocol``."""
    row = math.prod(y.shape[2:])
    sequence_first = qkv_format == "sbhd"
    longest, batches = y.shape[:2] if sequence_first else (y.shape[1], y.shape[0])
    strides = (y.shape[1] * row, row) if sequence_first else (row, y.shape[1] * row)
    itemsize = y.dtype.itemsize
    kernel, word = in_words("kv_cache.cu", "cache_gather", cache, y, row * itemsize)
    words = [n * itemsize // word for n in (row, *strides)]
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
        *words,
    )
    launch.launch(kernel, grid_of(batches * longest), whole_warps(words[0]), args, stream)
