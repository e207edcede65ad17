"""The contract of what knows a token's place in its sequence: the cache of keys and values, and rotary
embedding."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView


class Positions(Protocol):
    """The cache of keys and values, and rotary embedding."""

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

    def rope_fwd(
        self,
        x: ArrayView,
        freqs: ArrayView,
        y: ArrayView,
        start_positions: ArrayView | None,
        lengths: ArrayView | None,
        starts: ArrayView | None,
        qkv_format: str,
        interleaved: bool,
        stream: int,
    ) -> None:
        """Rotary position embedding (Su et al., RoFormer, 2021). x, y: h (s, b, h, d) for sbhd, (b, s, h, d)
        for bshd, (t, h, d) for thd; may be strided, last stride 1; y may be x's memory. freqs: float32
        (positions, r), r even, at most d: angles. Of the first r features, y_f = x_f cos(a_f) + p_f sin(a_f)
        with a = freqs[position] and p the partner: -x_{f + r / 2} in the first half and x_{f - r / 2} in the
        second, or, ``interleaved``, -x_{f + 1} for even and x_{f - 1} for odd f. Features beyond r are
        copied. The position is the place in the sequence, plus start_positions[b] (int32 (b,)). A position
        beyond freqs gives NaN.

        lengths, starts: int32 (b + 1,), running sums of the true lengths and where the sequences begin, as
        ``pack_sequences`` takes them; None but for thd. Tokens of no sequence become 0, all features of them,
        whatever they were."""

    def rope_bwd(
        self,
        dy: ArrayView,
        freqs: ArrayView,
        dx: ArrayView,
        start_positions: ArrayView | None,
        lengths: ArrayView | None,
        starts: ArrayView | None,
        qkv_format: str,
        interleaved: bool,
        stream: int,
    ) -> None:
        """Gradient of ``rope_fwd`` with respect to x: the transposed rotation, 0 for tokens of no
        sequence. dx may be dy's memory."""
