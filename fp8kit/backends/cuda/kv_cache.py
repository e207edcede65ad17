"""Keys and values of sequences that grow: a cache of pages, written at the sequences' ends and read as a
padded batch."""

from __future__ import annotations

import math

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, whole_warps
from fp8kit.backends.cuda.sequences import grid_of, in_words, steps_of


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
    *outer, heads, dim = x.shape
    tokens = x.shape[qkv_format.index("t" if qkv_format == "thd" else "s")]
    steps = [n * x.dtype.itemsize for n in (dim, *steps_of(x, qkv_format))]
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
    launch.launch(kernel, grid_of(math.prod(outer)), whole_warps(heads * words[0]), args, stream)


def cache_gather(
    cache: ArrayView, y: ArrayView, pages: ArrayView, totals: ArrayView, qkv_format: str, stream: int
) -> None:
    """See ``backends.protocol``."""
    row, (token, batch, _) = math.prod(y.shape[2:]), steps_of(y, qkv_format)
    longest, batches = (y.shape[qkv_format.index(name)] for name in "sb")
    itemsize = y.dtype.itemsize
    kernel, word = in_words("kv_cache.cu", "cache_gather", cache, y, row * itemsize)
    words = [n * itemsize // word for n in (row, token, batch)]
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
