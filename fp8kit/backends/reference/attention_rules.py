"""What a row of the attention sees and what is added to its scores, for ``attention.py``: the rule stands
here once.

Operands there are (b, h_kv, group, s, d); a ``Block`` is some query rows of some batches and the columns that
one of its rows sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.backends.reference._numpy import Array, Float32, f32
from fp8kit.backends.reference.dropout import Dropout
from fp8kit.backends.reference.sequences import lengths_of
from fp8kit.backends.reference.threads import njit

# Query rows of a block: fewer waste less above the diagonal, more make better matrix products.
_LEAST_ROWS, _MOST_ROWS = 16, 128
# Multiplications up to which OpenBLAS runs a product in the calling thread: waking its threads for every head
# costs more than they save.
_ONE_THREAD = 1 << 18
# Scores of a block: what stays in cache, and a memory bound for long sequences with many heads.
_SCORES = 1 << 19


@njit
def seen(row: Any, shift: Any, left: Any, right: Any, columns: Any) -> Any:
    """Columns first ... last - 1 of ``columns`` that query row ``row`` sees by its place on the diagonal:
    (first, last)."""
    place = row + shift
    first = min(columns, max(0, place - left)) if left >= 0 else 0
    last = min(columns, place + right + 1) if right >= 0 else columns
    return first, max(first, last)


@njit
def seen_within(row: Any, place: Any) -> Any:
    """``seen`` of row ``row`` of a block's scores at ``Block.place``, counted from the block's first
    column."""
    top, rows, start, shift, left, right, columns = place
    first, last = seen(top + row % rows, shift, left, right, columns)
    return first - start, last - start


class Sizes(NamedTuple):
    """Batches, key heads, query heads of each, query and key length."""

    batches: int
    kv_heads: int
    group: int
    rows: int
    columns: int

    @classmethod
    def of(cls, queries: Float32, keys: Float32) -> Sizes:
        """Those of operands (b, h_kv, group, s, d)."""
        batches, kv_heads, group, rows = queries.shape[:4]
        return cls(batches, kv_heads, group, rows, keys.shape[3])


class Block(NamedTuple):
    """Query rows ``first`` ... ``last`` - 1 of ``batches``, and the columns ``start`` ... ``stop`` - 1.

    ``band``: (shift, left, right, true columns) as ``seen`` takes them.
    """

    batches: slice
    first: int
    last: int
    start: int
    stop: int
    band: tuple[int, int, int, int]
    sizes: Sizes

    @property
    def rows(self) -> tuple[slice, ...]:
        """Index of the block's query rows."""
        return (self.batches, slice(None), slice(None), slice(self.first, self.last))

    @property
    def columns(self) -> tuple[slice, ...]:
        """Index of the key and value rows that they see."""
        return (self.batches, slice(None), slice(None), slice(self.start, self.stop))

    @property
    def place(self) -> tuple[int, ...]:
        """Where the block's scores lie, as ``seen_within`` takes it."""
        return (self.first, self.last - self.first, self.start, *self.band)

    @property
    def width(self) -> int:
        """Columns of the block."""
        return self.stop - self.start

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(b, h_kv, group, rows, columns) of the block's scores."""
        return (
            self.batches.stop - self.batches.start,
            self.sizes.kv_heads,
            self.sizes.group,
            self.last - self.first,
            self.width,
        )

    def buffers(self, buffer: Float32) -> tuple[Float32, Float32]:
        """Returns the buffer, or a larger one where it is too small, and its beginning as this block's
        scores."""
        size = math.prod(self.shape)
        if buffer.size < size:
            buffer = np.empty(size, np.float32)
        return buffer, buffer[:size].reshape(self.shape)

    def factors(self, random: Dropout, place: tuple[int, int, int]) -> Float32:
        """Returns the dropout factors of this block; ``place``: see ``place_of``."""
        return random.factors(self.starts(place), self.width).reshape(self.shape)

    def starts(self, place: tuple[int, int, int]) -> Array:
        """Returns the index of each score row's first element, int64 (b * h * rows,): element ((batch * heads
        + head) * s_q + i) * s_kv + j; ``place``: see ``place_of``."""
        z = self.sizes
        batches = np.arange(self.batches.start, self.batches.stop) + place[0]
        heads = batches[:, None] * place[2] + place[1] + np.arange(z.kv_heads * z.group)
        rows = np.arange(self.first, self.last)
        return ((heads.reshape(-1, 1) * z.rows + rows) * z.columns + self.start).reshape(-1)

    def of(self, array: Array) -> Array:
        """Returns the block's part of an array over the scores, (1 | b, 1 | h, 1 | s_q, s_kv), broadcastable
        with its scores."""
        part = self._part(array)
        heads = (1, 1) if part.shape[1] == 1 else (self.sizes.kv_heads, self.sizes.group)
        return part.reshape(part.shape[0], *heads, *part.shape[2:])

    def add_to(self, total: Float32, values: Float32) -> None:
        """Add the block's ``values`` to an array over the scores, summed over its dimensions of size 1."""
        b, _, _, r, c = self.shape
        values = values.reshape(b, -1, r, c)
        for axis in range(3):
            if total.shape[axis] == 1:
                values = np.add.reduce(values, axis=axis, keepdims=True)
        part = self._part(total)
        part += values

    def _part(self, array: Array) -> Array:
        """Returns a view of the block's part of such an array, whole where a dimension is 1."""
        whole = (self.batches, slice(None), slice(self.first, self.last))
        rows = (slice(None) if n == 1 else at for n, at in zip(array.shape[:3], whole, strict=True))
        return array[(*rows, slice(self.start, self.stop))]


def blocks(sizes: Sizes, depth: int, extras: AttentionExtras, spec: AttentionSpec) -> Iterator[Block]:
    """Every block that has anything to do."""
    left, right = spec.window
    step = max(_LEAST_ROWS, min(_MOST_ROWS, _ONE_THREAD // max(1, sizes.columns * depth)))
    alike = extras.cu_seqlens_q is None and extras.cu_seqlens_kv is None
    together = max(1, _SCORES // max(1, sizes.kv_heads * sizes.group * step * sizes.columns)) if alike else 1
    rows = true_lengths(extras.cu_seqlens_q, sizes.batches, sizes.rows)
    columns = true_lengths(extras.cu_seqlens_kv, sizes.batches, sizes.columns)
    for batch in range(0, sizes.batches, together):
        n, m = int(rows[batch]), int(columns[batch])
        band = (m - n if spec.bottom_right else 0, left, right, m)
        for first in range(0, n, step):
            last = min(first + step, n)
            start, stop = seen(first, *band)[0], seen(last - 1, *band)[1]
            if start < stop:
                yield Block(
                    slice(batch, min(batch + together, sizes.batches)), first, last, start, stop, band, sizes
                )


def place_of(extras: AttentionExtras, sizes: Sizes) -> tuple[int, int, int]:
    """Returns, for dropout, the first batch and the first head within the whole attention, and its number of
    heads."""
    if extras.dropout_place is None:
        return 0, 0, sizes.kv_heads * sizes.group
    batch, head, heads = (int(n) for n in extras.dropout_place.numpy())
    return batch, head, heads


def true_lengths(cu_seqlens: ArrayView | None, batches: int, length: int) -> Array:
    """True length of each batch."""
    return np.full(batches, length) if cu_seqlens is None else np.minimum(lengths_of(cu_seqlens), length)


class Scores:
    """What is made of the products scale * q k^T, and the further score of a softmax type."""

    def __init__(self, extras: AttentionExtras, spec: AttentionSpec) -> None:
        self.mask = None if extras.mask is None else extras.mask.numpy() != 0
        self.bias = None if extras.bias is None else f32(extras.bias)
        self.bias_factor = np.float32(spec.softmax_scale if spec.bias == "pre_scale_bias" else 1)
        self.slopes = None if extras.alibi_slopes is None else extras.alibi_slopes.numpy()
        self.offset = None if extras.softmax_offset is None else extras.softmax_offset.numpy()
        self.sink = spec.softmax_type != "vanilla"
        self.cap = np.float32(spec.softcap)
        self.bias_capped = bool(self.cap) and spec.bias == "pre_scale_bias"

    def complete(self, scores: Float32, at: Block, derivatives: bool = False) -> Float32 | None:
        """Cap a block's products and add the bias, in place; -Inf where the mask array masks out. Returns the
        cap's ``derivatives`` where there is a cap and they are asked for."""
        found = None
        if self.bias is not None and self.bias_capped:
            scores += self.bias_factor * at.of(self.bias)
        if self.cap:
            scores /= self.cap
            np.tanh(scores, out=scores)
            found = 1 - scores * scores if derivatives else None
            scores *= self.cap
        if self.bias is not None and not self.bias_capped:
            scores += self.bias_factor * at.of(self.bias)
        if self.slopes is not None:
            z = at.sizes
            slopes = np.broadcast_to(self.slopes, (z.batches, z.kv_heads * z.group))[at.batches]
            distance = np.abs(
                np.arange(at.first, at.last)[:, None] + at.band[0] - np.arange(at.start, at.stop)
            ).astype(np.float32)
            scores -= slopes.reshape(*at.shape[:3], 1, 1) * distance
        if self.mask is not None:
            np.copyto(scores, np.float32(-np.inf), where=at.of(self.mask))
        return found

    def sinks(self, sizes: Sizes) -> Float32:
        """Returns the further score of each head, float32 (h_kv, group, 1); -Inf where there is none."""
        shape = (sizes.kv_heads, sizes.group, 1)
        if self.offset is not None:
            return self.offset.reshape(shape)
        return np.full(shape, 0 if self.sink else -np.inf, np.float32)
