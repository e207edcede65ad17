"""Scaled dot-product attention, forward and backward, block by block over (batch, query rows).

Queries are scaled and all operands copied to (b, h, s, d) float32 first; a block is the scores of some query rows of every head of one
batch, (h_kv, group, rows, columns), so grouped-query attention is NumPy broadcasting of k and v over ``group``. A causal or padded block
computes only the columns that one of its rows sees. Backward recomputes P from the log-sum-exp (Dao et al. 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import AttentionSpec
from fp8kit.backends.reference._numpy import Array, Float32, quiet, store
from fp8kit.backends.reference.dropout import Dropout, dropout
from fp8kit.errors import BackendError, expected
from fp8kit.formats import DType

# Query rows of a block: fewer waste less above the diagonal, more make better matrix products.
_ROWS = 128
# Scores of a block, a memory bound for long sequences and many heads.
_SCORES = 1 << 22

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
    for at in _blocks(queries, keys, cu_seqlens_q, cu_seqlens_kv, spec):
        scores = at.scores(queries, keys)
        top = scores.max(axis=-1, keepdims=True)
        scores -= top
        np.exp(scores, out=scores)
        denominator = np.add.reduce(scores, axis=-1, keepdims=True)
        sums[at.rows] = (top + np.log(denominator))[..., 0]
        if random is not None:
            scores *= at.factors(random)
        block = np.matmul(scores, values[at.columns])
        block /= denominator
        out[at.rows] = block
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
    for at in _blocks(queries, keys, cu_seqlens_q, cu_seqlens_kv, spec):
        p = at.scores(queries, keys)
        p -= sums[at.rows][..., None]
        np.exp(p, out=p)
        factors = None if random is None else at.factors(random)
        dvalues[at.columns] += _over_group(p if factors is None else p * factors, upstream[at.rows])
        ds = np.matmul(upstream[at.rows], values[at.columns].swapaxes(-1, -2))
        if factors is not None:
            ds *= factors
        ds -= delta[at.rows]
        ds *= p
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
    """Some query rows of one batch and the columns that they see. Operands are (b, h_kv, group, s, d), group 1 for keys and values."""

    batch: int
    first: int
    last: int
    seen: int
    causal: bool
    shape: tuple[int, int, int, int]  # h_kv, group, s_q, s_kv

    @property
    def rows(self) -> tuple[int, slice, slice, slice]:
        return (self.batch, slice(None), slice(None), slice(self.first, self.last))

    @property
    def columns(self) -> tuple[int, slice, slice, slice]:
        return (self.batch, slice(None), slice(None), slice(0, self.seen))

    def scores(self, queries: Float32, keys: Float32) -> Float32:
        """q k^T, (h_kv, group, rows, seen), -Inf where a row does not see a column."""
        scores = np.matmul(queries[self.rows], keys[self.columns].swapaxes(-1, -2))
        if self.causal and self.seen > self.first:
            hidden = np.arange(self.first, self.last)[:, None] < np.arange(self.first, self.seen)
            scores[..., self.first :] += np.where(hidden, np.float32(-np.inf), np.float32(0))
        return np.asarray(scores)

    def factors(self, random: Dropout) -> Float32:
        """The dropout factors of this block: element ((batch * heads + head) * s_q + i) * s_kv + j."""
        kv_heads, group, length, width = self.shape
        heads = kv_heads * group
        rows = self.last - self.first
        found = np.empty((heads, rows, self.seen), np.float32)
        for head in range(heads):
            start = ((self.batch * heads + head) * length + self.first) * width
            found[head] = random.factors(start, (rows, width))[:, : self.seen]
        return found.reshape(kv_heads, group, rows, self.seen)


def _blocks(queries: Float32, keys: Float32, cu_q: ArrayView | None, cu_kv: ArrayView | None, spec: AttentionSpec) -> Iterator[_Block]:
    """Every block that has anything to do. Causal is aligned top-left: row i sees columns 0 ... i."""
    if spec.mask not in _CAUSAL:
        raise BackendError(expected("attention", "mask", repr(spec.mask), f"one of {', '.join(_CAUSAL)}"))
    causal = _CAUSAL[spec.mask]
    batches, kv_heads, group, length, _ = queries.shape
    width = keys.shape[3]
    lengths, widths = _true(cu_q, batches, length), _true(cu_kv, batches, width)
    step = max(1, min(_ROWS, _SCORES // max(1, kv_heads * group * width)))
    for batch in range(batches):
        for first in range(0, int(lengths[batch]), step):
            last = min(first + step, int(lengths[batch]))
            seen = min(last, int(widths[batch])) if causal else int(widths[batch])
            if seen:
                yield _Block(batch, first, last, seen, causal, (kv_heads, group, length, width))


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
    """left^T right, summed over the query heads that share a key head: (h_kv, 1, columns, d)."""
    product = np.matmul(left.swapaxes(-1, -2), right)
    return np.add.reduce(product, axis=1, keepdims=True) if product.shape[1] != 1 else product
