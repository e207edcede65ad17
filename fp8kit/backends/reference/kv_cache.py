"""Keys and values of sequences that grow: a cache of pages, written at the sequences' ends and read as a padded batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp8kit import formats
from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Array

_BITS = {2: formats.uint16, 4: formats.uint32}


def cache_append_(x: ArrayView, cache: ArrayView, pages: ArrayView, fresh: ArrayView, totals: ArrayView, starts: ArrayView | None,
                  qkv_format: str, stream: int) -> None:
    """Each sequence's new tokens to its end; see ``protocol.Kernels.cache_append_``."""
    source, target, table = _values(x), _values(cache), pages.numpy()
    new, lengths = np.diff(fresh.numpy()), np.diff(totals.numpy())
    for batch, (count, length) in enumerate(zip(new.tolist(), lengths.tolist(), strict=True)):
        if starts is not None:
            first = int(starts.numpy()[batch])
            tokens = source[first : first + count]
        else:
            tokens = (source[:, batch] if qkv_format == "sbhd" else source[batch])[:count]
        for page, inside, at in _places(length - count, length - count + len(tokens), target.shape[1]):
            target[table[batch, page], inside] = tokens[at]


def cache_gather(cache: ArrayView, y: ArrayView, pages: ArrayView, totals: ArrayView, qkv_format: str, stream: int) -> None:
    """Each sequence's positions one after the other, 0 beyond; see ``protocol.Kernels.cache_gather``."""
    source, target, table = _values(cache), _values(y), pages.numpy()
    target[...] = 0
    for batch, length in enumerate(np.diff(totals.numpy()).tolist()):
        rows = target[:, batch] if qkv_format == "sbhd" else target[batch]
        for page, inside, at in _places(0, min(length, len(rows)), source.shape[1]):
            rows[at] = source[table[batch, page], inside]


def _values(view: ArrayView) -> Array:
    """The elements as integers of their size: what is moved is not looked at."""
    return view.view(_BITS[view.dtype.itemsize]).numpy()


def _places(first: int, last: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Positions first ... last - 1 of a sequence, page by page: (number of the page, places in it, places among the positions)."""
    start = first
    while first < last:
        page, place = divmod(first, size)
        count = min(last - first, size - place)
        yield page, slice(place, place + count), slice(first - start, first - start + count)
        first += count
