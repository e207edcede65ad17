"""Keys and values of sequences that grow: a cache of pages, written at the sequences' ends and read as a
padded batch."""

from __future__ import annotations

from collections.abc import Iterator

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Array, bits_of
from fp8kit.backends.reference.sequences import lengths_of


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
    """Each sequence's new tokens to its end; see ``protocol.Kernels.cache_append_``."""
    source, target = bits_of(x), bits_of(cache)
    for batch, (count, length) in enumerate(
        zip(lengths_of(fresh).tolist(), lengths_of(totals).tolist(), strict=True)
    ):
        if starts is not None:
            first = int(starts.numpy()[batch].clip(0, len(source)))
            tokens = source[first : first + count]
        else:
            tokens = (source[:, batch] if qkv_format == "sbhd" else source[batch])[:count]
        for page, inside, at in _places(pages, batch, length - count, length - count + len(tokens), target):
            target[page, inside] = tokens[at]


def cache_gather(
    cache: ArrayView, y: ArrayView, pages: ArrayView, totals: ArrayView, qkv_format: str, stream: int
) -> None:
    """Each sequence's positions one after the other, 0 beyond; see ``protocol.Kernels.cache_gather``."""
    source, target = bits_of(cache), bits_of(y)
    target[...] = 0
    for batch, length in enumerate(lengths_of(totals).tolist()):
        rows = target[:, batch] if qkv_format == "sbhd" else target[batch]
        for page, inside, at in _places(pages, batch, 0, min(length, len(rows)), source):
            rows[at] = source[page, inside]


def _places(
    pages: ArrayView, batch: int, first: int, last: int, cache: Array
) -> Iterator[tuple[int, slice, slice]]:
    """Positions first ... last - 1 of a sequence, page by page: (page, places in it, places among the
    positions). Positions that the table names no page of the cache for are left out."""
    table, size, start = pages.numpy()[batch], cache.shape[1], first
    first, last = max(first, 0), min(last, len(table) * size)
    while first < last:
        number, place = divmod(first, size)
        count = min(last - first, size - place)
        if 0 <= table[number] < len(cache):
            yield int(table[number]), slice(place, place + count), slice(first - start, first - start + count)
        first += count
