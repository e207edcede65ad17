"""The contract of the cache of keys and values."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel


class Caches(Protocol):
    """The cache of keys and values."""

    @kernel(updates="cache", exact=True)
    def cache_append_(
        self,
        x: ArrayView,
        cache: ArrayView,
        pages: ArrayView,
        fresh: ArrayView,
        totals: ArrayView,
        starts: ArrayView | None,
        qkv_format: str,
        stream: int,
    ) -> None:
        """New keys or values written at the ends of their sequences in a cache of pages. x: h (s, b, g, d)
        for sbhd, (b, s, g, d) for bshd, (t, g, d) for thd; may be strided, last stride 1. cache: x's dtype
        (pages, page size, g, d). pages: int32 (b, m): where sequence b's positions lie, page after page.
        fresh, totals: int32 (b + 1,), running sums of the sequences' new tokens and of their lengths with
        them. starts: int32 (b + 1,), where the sequences begin in t; None but for thd. With n of its length L
        new, sequence b's token i < n goes to position p = L - n + i: cache[pages[b, p / size], p % size].
        Tokens beyond n, or of no sequence, are not read."""

    @kernel(writes="y", exact=True)
    def cache_gather(
        self,
        cache: ArrayView,
        y: ArrayView,
        pages: ArrayView,
        totals: ArrayView,
        qkv_format: str,
        stream: int,
    ) -> None:
        """Sequences read out of a cache of pages, as a padded batch: position p < L of sequence b, 0 beyond.
        y: h (s, b, g, d) for sbhd, (b, s, g, d) for bshd, C-contiguous; the rest as in ``cache_append_``.
        What lies beyond y's s is left out."""
