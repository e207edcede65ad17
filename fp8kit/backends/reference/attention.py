"""Scaled dot-product attention, forward and backward, block by block over (batches, query rows).

Queries are scaled and all operands copied to (b, h, s, d) float32 first; a block is the scores of some query rows of every head of some
batches, (b, h_kv, group, rows, columns), so grouped-query attention is NumPy broadcasting of k and v over ``group``. A causal or padded
block computes only the columns that one of its rows sees. Backward recomputes P from the log-sum-exp (Dao et al. 2022, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import AttentionSpec
from fp8kit.backends.reference._numpy import Array, Float32, quiet, store
from fp8kit.backends.reference.dropout import Dropout, dropout
from fp8kit.backends.reference.exponential import exp32
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.errors import BackendError, expected
from fp8kit.formats import DType

# Query rows of a block: fewer waste less above the diagonal, more make better matrix products.
_LEAST_ROWS, _MOST_ROWS = 16, 128
# Multiplications up to which OpenBLAS runs a product in the calling thread: waking its threads for every head costs more than they save.
_ONE_THREAD = 1 << 18
# Scores of a block: what stays in cache, and a memory bound for long sequences with many heads.
_SCORES = 1 << 19

_CAUSAL = {"no_mask": False, "padding": False, "causal": True, "padding_causal": True}
_TO_HEADS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}  # to (b, h, s, d)
_FROM_HEADS = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}


@quiet
def attention_fwd(q: ArrayView, k: ArrayView, v: ArrayView, o: ArrayView, lse: ArrayView, cu_seqlens_q: ArrayView | None,
                  cu_seqlens_kv: ArrayView | None, rng: ArrayView | None, spec: AttentionSpec, workspace: ArrayView | None,
                  stream: int) -> None:
    """``o = dropout(softmax(mask(softmax_scale * q k^T))) v`` and the rows' log-sum-exp; see ``protocol.Kernels.attention_fwd``."""
    keys, values = _heads(k, spec), _heads(v, spec)
    queries = _heads(q, spec, keys.shape[1])
    queries *= np.float32(spec.softmax_scale)
    out = np.zeros_like(queries)
    sums = lse.numpy().reshape(queries.shape[:4])
    sums[...] = -np.inf
    random = dropout(spec.dropout, rng)
    buffer = np.empty(0, np.float32)
    for at in _blocks(queries, keys, cu_seqlens_q, cu_seqlens_kv, spec):
        buffer, p = at.room(buffer)
        np.matmul(queries[at.rows], keys[at.columns].swapaxes(-1, -2), out=p)
        lse_block = np.empty(p.shape[:4], np.float32)
        _softmax(p.reshape(-1, at.seen), lse_block.reshape(-1), at.first, at.last - at.first, at.causal)
        sums[at.rows] = lse_block
        if random is not None:
            p *= at.factors(random)
        out[at.rows] = np.matmul(p, values[at.columns])
    _put(o, out, spec)


@quiet
def attention_bwd(do: ArrayView, q: ArrayView, k: ArrayView, v: ArrayView, o: ArrayView, lse: ArrayView, dq: ArrayView,
                  dk: ArrayView, dv: ArrayView, cu_seqlens_q: ArrayView | None, cu_seqlens_kv: ArrayView | None,
                  rng: ArrayView | None, spec: AttentionSpec, deterministic: bool, workspace: ArrayView | None, stream: int) -> None:
    """Gradients of ``attention_fwd``; see ``protocol.Kernels.attention_bwd``.

    With P recomputed, M the dropout factors and D = rowsum(do * o): dv = (P M)^T do, dS = P ((do v^T) M - D), dq = scale dS k,
    dk = scale dS^T q.
    """
    scale = np.float32(spec.softmax_scale)
    keys, values = _heads(k, spec), _heads(v, spec)
    queries, upstream = _heads(q, spec, keys.shape[1]), _heads(do, spec, keys.shape[1])
    queries *= scale
    delta = np.add.reduce(upstream * _heads(o, spec, keys.shape[1]), axis=-1, keepdims=True)
    sums = lse.numpy().reshape(queries.shape[:4])
    dqueries, dkeys, dvalues = np.zeros_like(queries), np.zeros_like(keys), np.zeros_like(values)
    random = dropout(spec.dropout, rng)
    first, second = np.empty(0, np.float32), np.empty(0, np.float32)
    for at in _blocks(queries, keys, cu_seqlens_q, cu_seqlens_kv, spec):
        first, p = at.room(first)
        second, ds = at.room(second)
        np.matmul(queries[at.rows], keys[at.columns].swapaxes(-1, -2), out=p)
        np.matmul(upstream[at.rows], values[at.columns].swapaxes(-1, -2), out=ds)
        factors = None if random is None else at.factors(random)
        if factors is not None:
            ds *= factors
        _gradient(p.reshape(-1, at.seen), ds.reshape(-1, at.seen), sums[at.rows].reshape(-1), delta[at.rows].reshape(-1), at.first,
                  at.last - at.first, at.causal)
        if factors is not None:
            p *= factors
        dvalues[at.columns] += _over_group(p, upstream[at.rows])
        dqueries[at.rows] = np.matmul(ds, keys[at.columns])
        dkeys[at.columns] += _over_group(ds, queries[at.rows])
    dqueries *= scale
    _put(dq, dqueries, spec)
    _put(dk, dkeys, spec)
    _put(dv, dvalues, spec)


def attention_workspace(q: tuple[int, ...], kv: tuple[int, ...], dtype: DType, spec: AttentionSpec, backward: bool) -> int:
    """No workspace on the CPU."""
    return 0


class _Block(NamedTuple):
    """Some query rows of some batches and the columns that they see. Operands are (b, h_kv, group, s, d), group 1 for keys and values."""

    batches: slice
    first: int
    last: int
    seen: int
    causal: bool
    shape: tuple[int, int, int, int]  # h_kv, group, s_q, s_kv

    @property
    def rows(self) -> tuple[slice, ...]:
        """Index of the block's query rows."""
        return (self.batches, slice(None), slice(None), slice(self.first, self.last))

    @property
    def columns(self) -> tuple[slice, ...]:
        """Index of the key and value rows that they see."""
        return (self.batches, slice(None), slice(None), slice(0, self.seen))

    def room(self, buffer: Float32) -> tuple[Float32, Float32]:
        """The buffer, or a larger one where it is too small, and its beginning as this block's (b, h_kv, group, rows, seen) scores."""
        shape = (self.batches.stop - self.batches.start, *self.shape[:2], self.last - self.first, self.seen)
        size = math.prod(shape)
        if buffer.size < size:
            buffer = np.empty(size, np.float32)
        return buffer, buffer[:size].reshape(shape)

    def factors(self, random: Dropout) -> Float32:
        """The dropout factors of this block: element ((batch * heads + head) * s_q + i) * s_kv + j."""
        kv_heads, group, length, width = self.shape
        heads = np.arange(self.batches.start * kv_heads * group, self.batches.stop * kv_heads * group)
        rows = np.arange(self.first, self.last)
        starts = (heads[:, None] * length + rows) * width
        return random.factors(starts.reshape(-1), self.seen).reshape(-1, kv_heads, group, len(rows), self.seen)


def _blocks(queries: Float32, keys: Float32, cu_q: ArrayView | None, cu_kv: ArrayView | None, spec: AttentionSpec) -> Iterator[_Block]:
    """Every block that has anything to do. Causal is aligned top-left: row i sees columns 0 ... i."""
    if spec.mask not in _CAUSAL:
        raise BackendError(expected("attention", "mask", repr(spec.mask), f"one of {', '.join(_CAUSAL)}"))
    causal = _CAUSAL[spec.mask]
    batches, kv_heads, group, length, depth = queries.shape
    width = keys.shape[3]
    step = max(_LEAST_ROWS, min(_MOST_ROWS, _ONE_THREAD // max(1, width * depth)))
    together = max(1, _SCORES // max(1, kv_heads * group * step * width)) if cu_q is None and cu_kv is None else 1
    lengths, widths = _true(cu_q, batches, length), _true(cu_kv, batches, width)
    for batch in range(0, batches, together):
        rows, columns = int(lengths[batch]), int(widths[batch])
        for first in range(0, rows, step):
            last = min(first + step, rows)
            seen = min(last, columns) if causal else columns
            if seen:
                yield _Block(slice(batch, min(batch + together, batches)), first, last, seen, causal, (kv_heads, group, length, width))


def _true(cu_seqlens: ArrayView | None, batches: int, length: int) -> Array:
    """True length of each batch."""
    return np.full(batches, length) if cu_seqlens is None else np.diff(cu_seqlens.numpy())


def _heads(x: ArrayView, spec: AttentionSpec, kv_heads: int | None = None) -> Float32:
    """A fresh float32 (b, h_kv, group, s, d) copy of q, k, v, o or do; group is 1 without ``kv_heads``."""
    moved = x.numpy().transpose(_TO_HEADS[spec.qkv_format]).astype(np.float32, order="C")
    batches, heads, length, depth = moved.shape
    outer = heads if kv_heads is None else kv_heads
    return moved.reshape(batches, outer, heads // max(outer, 1), length, depth)


def _put(view: ArrayView, values: Float32, spec: AttentionSpec) -> None:
    """Store (b, h_kv, group, s, d) values into a view of the spec's format."""
    batches, outer, group, length, depth = values.shape
    store(view, values.reshape(batches, outer * group, length, depth).transpose(_FROM_HEADS[spec.qkv_format]))


def _over_group(left: Float32, right: Float32) -> Float32:
    """left^T right, summed over the query heads that share a key head: (b, h_kv, 1, columns, d)."""
    product = np.matmul(left.swapaxes(-1, -2), right)
    return np.add.reduce(product, axis=2, keepdims=True) if product.shape[2] != 1 else product


@njit(parallel=True, fastmath={"contract"})
def _softmax(scores: Array, lse: Array, first: Any, rows: Any, causal: Any) -> None:
    """Scores (heads * rows, columns) of query rows ``first`` ... become probabilities in place, 0 where a row does not see a column."""
    columns = scores.shape[1]
    for r in prange(scores.shape[0]):
        seen = min(columns, first + r % rows + 1) if causal else columns
        top = scores[r, 0]
        for j in range(seen):
            top = max(top, scores[r, j])
        total = np.float32(0)
        for j in range(seen):
            e = exp32(scores[r, j] - top)
            scores[r, j] = e
            total += e
        lse[r] = top + np.log(total)
        factor = np.float32(1) / total
        for j in range(seen):
            scores[r, j] *= factor
        for j in range(seen, columns):
            scores[r, j] = 0


@njit(parallel=True, fastmath={"contract"})
def _gradient(scores: Array, ds: Array, lse: Array, delta: Array, first: Any, rows: Any, causal: Any) -> None:
    """Scores become probabilities and ds, which holds the probabilities' gradients, the scores' gradients; both in place."""
    columns = scores.shape[1]
    for r in prange(scores.shape[0]):
        seen = min(columns, first + r % rows + 1) if causal else columns
        for j in range(seen):
            p = exp32(scores[r, j] - lse[r])
            scores[r, j] = p
            ds[r, j] = p * (ds[r, j] - delta[r])
        for j in range(seen, columns):
            scores[r, j] = 0
            ds[r, j] = 0
