"""Scaled dot-product attention, forward and backward, block by block over (batches, query rows).

Queries are scaled and all operands copied to (b, h, s, d) float32 first; a block is the scores of some query
rows of every head of some batches, (b, h_kv, group, rows, columns), so grouped-query attention is NumPy
broadcasting of k and v over ``group``. A block computes only the columns that one of its rows sees
(``attention_rules``). Backward recomputes P from the log-sum-exp (Dao et al. 2022, appendix B).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.backends.reference._numpy import Array, Float32, quiet, store
from fp8kit.backends.reference.attention_rules import (
    Scores,
    Sizes,
    blocks,
    place_of,
    seen_within,
    true_lengths,
)
from fp8kit.backends.reference.dropout import dropout
from fp8kit.backends.reference.exponential import exp32
from fp8kit.backends.reference.threads import njit, prange

_TO_HEADS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}  # to (b, h, s, d)
_FROM_HEADS = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}


@quiet
def attention_fwd(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    extras: AttentionExtras,
    spec: AttentionSpec,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """``o = dropout(softmax(scores)) v`` and the rows' log-sum-exp; see
    ``protocol.Kernels.attention_fwd``."""
    keys, values = heads_of(k, spec), heads_of(v, spec)
    queries = heads_of(q, spec, keys.shape[1])
    queries *= np.float32(spec.softmax_scale)
    sizes = Sizes.of(queries, keys)
    out = np.zeros((*queries.shape[:4], values.shape[4]), np.float32)
    sums = lse.numpy().reshape(queries.shape[:4])
    scores = Scores(extras, spec)
    sinks = scores.sinks(sizes)
    # until a row turns out to see something
    sums[...] = np.where(within(extras, sizes), sinks, np.float32(-np.inf))
    random, place = dropout(spec.dropout, extras.rng), place_of(extras, sizes)
    buffer = np.empty(0, np.float32)
    for at in blocks(sizes, queries.shape[4], extras, spec):
        buffer, p = at.buffers(buffer)
        np.matmul(queries[at.rows], keys[at.columns].swapaxes(-1, -2), out=p)
        scores.complete(p, at)
        lse_block = np.empty(p.shape[:4], np.float32)
        further = np.broadcast_to(sinks, p.shape[:4]).reshape(-1)
        _softmax(p.reshape(-1, at.width), lse_block.reshape(-1), further, at.place)
        sums[at.rows] = lse_block
        if random is not None:
            p *= at.factors(random, place)
        out[at.rows] = np.matmul(p, values[at.columns])
    put_heads(o, out, spec)


@quiet
def attention_bwd(
    do: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    dbias: ArrayView | None,
    doffset: ArrayView | None,
    extras: AttentionExtras,
    spec: AttentionSpec,
    deterministic: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """Gradients of ``attention_fwd``; see ``protocol.Kernels.attention_bwd``.

    With P recomputed, M the dropout factors and D = rowsum(do * o): dv = (P M)^T do, dS = P ((do v^T) M - D),
    dq = scale dS k, dk = scale dS^T q, dbias = dS (times scale where it is added before scaling), doffset =
    -sum exp(offset - lse) D.
    """
    scale = np.float32(spec.softmax_scale)
    keys, values = heads_of(k, spec), heads_of(v, spec)
    queries, upstream = heads_of(q, spec, keys.shape[1]), heads_of(do, spec, keys.shape[1])
    queries *= scale
    sizes = Sizes.of(queries, keys)
    delta = np.add.reduce(upstream * heads_of(o, spec, keys.shape[1]), axis=-1, keepdims=True)
    sums = lse.numpy().reshape(queries.shape[:4])
    dqueries, dkeys, dvalues = np.zeros_like(queries), np.zeros_like(keys), np.zeros_like(values)
    bias = None if dbias is None else np.zeros(dbias.shape, np.float32)
    scores = Scores(extras, spec)
    random, place = dropout(spec.dropout, extras.rng), place_of(extras, sizes)
    first, second = np.empty(0, np.float32), np.empty(0, np.float32)
    for at in blocks(sizes, queries.shape[4], extras, spec):
        first, p = at.buffers(first)
        second, ds = at.buffers(second)
        np.matmul(queries[at.rows], keys[at.columns].swapaxes(-1, -2), out=p)
        scores.complete(p, at)
        np.matmul(upstream[at.rows], values[at.columns].swapaxes(-1, -2), out=ds)
        factors = None if random is None else at.factors(random, place)
        if factors is not None:
            ds *= factors
        statistics = sums[at.rows].reshape(-1), delta[at.rows].reshape(-1)
        gradient(p.reshape(-1, at.width), ds.reshape(-1, at.width), *statistics, at.place, np.float32(1))
        if factors is not None:
            p *= factors
        if bias is not None:
            at.add_to(bias, ds)
        dvalues[at.columns] += over_group(p, upstream[at.rows])
        dqueries[at.rows] = np.matmul(ds, keys[at.columns])
        dkeys[at.columns] += over_group(ds, queries[at.rows])
    dqueries *= scale
    put_heads(dq, dqueries, spec)
    put_heads(dk, dkeys, spec)
    put_heads(dv, dvalues, spec)
    if dbias is not None and bias is not None:
        store(dbias, bias * scores.bias_factor)
    if doffset is not None:
        offset_gradient(doffset, sums, delta, scores, sizes, extras)


def offset_gradient(
    doffset: ArrayView, sums: Float32, delta: Float32, scores: Scores, sizes: Sizes, extras: AttentionExtras
) -> None:
    """The gradient of a learnable softmax_offset. ``sums``: the rows' log-sum-exp, (b, h_kv, group, s_q);
    ``delta``: rowsum(do * o), one dimension more."""
    some = sums != -np.inf  # a row whose offset is -Inf too and that sees nothing has no probabilities
    weights = np.exp(scores.sinks(sizes) - np.where(some, sums, np.float32(0))) * delta[..., 0]
    inside = np.where(within(extras, sizes) & some, weights, np.float32(0))
    store(doffset, -np.add.reduce(inside, axis=(0, 3)).reshape(-1))


def within(extras: AttentionExtras, sizes: Sizes) -> Array:
    """Whether a query row lies within its batch's true length: bool (b, 1, 1, s_q)."""
    lengths = true_lengths(extras.cu_seqlens_q, sizes.batches, sizes.rows)
    return (np.arange(sizes.rows) < lengths[:, None])[:, None, None]


def heads_of(x: ArrayView, spec: AttentionSpec, kv_heads: int | None = None) -> Float32:
    """A fresh float32 (b, h_kv, group, s, d) copy of q, k, v, o or do; group is 1 without ``kv_heads``."""
    moved = x.numpy().transpose(_TO_HEADS[spec.qkv_format]).astype(np.float32, order="C")
    batches, heads, length, depth = moved.shape
    outer = heads if kv_heads is None else kv_heads
    return moved.reshape(batches, outer, heads // max(outer, 1), length, depth)


def put_heads(view: ArrayView, values: Float32, spec: AttentionSpec) -> None:
    """Store (b, h_kv, group, s, d) values into a view of the spec's format."""
    batches, outer, group, length, depth = values.shape
    store(view, values.reshape(batches, outer * group, length, depth).transpose(_FROM_HEADS[spec.qkv_format]))


def over_group(left: Float32, right: Float32) -> Float32:
    """left^T right, summed over the query heads that share a key head: (b, h_kv, 1, columns, d)."""
    product = np.matmul(left.swapaxes(-1, -2), right)
    return np.add.reduce(product, axis=2, keepdims=True) if product.shape[2] != 1 else product


@njit(parallel=True, fastmath={"contract"})
def _softmax(scores: Array, lse: Array, sinks: Array, place: Any) -> None:
    """Scores (heads * rows, columns) of a block at ``place`` become probabilities, 0 where a row does not see
    a column. ``sinks``: each row's further score."""
    for r in prange(scores.shape[0]):
        first, last = seen_within(r, place)
        top = sinks[r]
        for j in range(first, last):
            top = max(top, scores[r, j])
        if top == -np.inf:
            lse[r] = top
            last = first
        else:
            total = exp32(sinks[r] - top)
            for j in range(first, last):
                e = exp32(scores[r, j] - top)
                scores[r, j] = e
                total += e
            lse[r] = top + np.log(total)
            factor = np.float32(1) / total
            for j in range(first, last):
                scores[r, j] *= factor
        scores[r, :first] = 0
        scores[r, last:] = 0


@njit(parallel=True, fastmath={"contract"})
def gradient(scores: Array, ds: Array, lse: Array, delta: Array, place: Any, factor: Any) -> None:
    """Scores become probabilities and ds, which holds the probabilities' gradients, the scores' gradients
    times ``factor``; both in place."""
    for r in prange(scores.shape[0]):
        first, last = seen_within(r, place)
        if lse[r] == -np.inf:
            last = first
        for j in range(first, last):
            p = exp32(scores[r, j] - lse[r])
            scores[r, j] = p
            ds[r, j] = factor * p * (ds[r, j] - delta[r])
        scores[r, :first] = 0
        scores[r, last:] = 0
        ds[r, :first] = 0
        ds[r, last:] = 0
