"""Scaled dot-product attention, forward and backward, block by block over (batches, query rows).

Queries are scaled and all operands copied to (b, h, s, d) float32 first; a block is the scores of some query
rows of every head of some batches, (b, h_kv, group, rows, columns), so grouped-query attention is NumPy
broadcasting of k and v over ``group``. A block computes only the columns that one of its rows sees
(``attention_rules``). Backward recomputes P from the log-sum-exp (Dao et al. 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.backends.reference._numpy import Array, Float32, quiet, store
from fp8kit.backends.reference.attention_rules import (
    Block,
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

    def softmax(scores: Array, lse: Array, sinks: Array, at: Block) -> None:
        _softmax(scores, lse, sinks, at.place)

    forward((q, k, v, o, lse), extras, spec, softmax, scale_first=True)


def forward(
    views: tuple[ArrayView, ...],
    extras: AttentionExtras,
    spec: AttentionSpec,
    softmax: Callable[..., Array | None],
    *,
    scale_first: bool,
) -> None:
    """The loop over the blocks. ``views``: q, k, v, o, lse. ``softmax`` makes scores (heads * rows, columns)
    of a block weights, in place, writes the rows' log-sum-exp and returns what the rows' results are
    multiplied by, if anything. ``scale_first``: the queries are scaled, not the scores."""
    q, k, v, o, lse = views
    keys, values = heads_of(k, spec), heads_of(v, spec)
    queries, scale = heads_of(q, spec, keys.shape[1]), np.float32(spec.softmax_scale)
    if scale_first:
        queries *= scale
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
        if not scale_first:
            p *= scale
        scores.complete(p, at)
        lse_block = np.empty(p.shape[:4], np.float32)
        further = np.broadcast_to(sinks, p.shape[:4]).reshape(-1)
        factors = softmax(p.reshape(-1, at.width), lse_block.reshape(-1), further, at)
        sums[at.rows] = lse_block
        if random is not None:
            p *= at.factors(random, place)
        out[at.rows] = np.matmul(p, values[at.columns])
        if factors is not None:
            out[at.rows] *= factors.reshape(*p.shape[:4], 1)
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
    -sum exp(offset - lse) D. A cap's derivative is a factor of dS, but not for a bias that is added after it.
    """
    call = Backward((do, q, k, v, o), lse, extras, spec, scale_first=True)
    found = Gradients(call.queries, call.keys, call.values, call.upstream)
    bias = None if dbias is None else np.zeros(dbias.shape, np.float32)
    for at, p, ds, factors in call.blocks(bias):
        found.add(at, p, ds, factors)
    found.queries *= np.float32(spec.softmax_scale)
    found.put(dq, dk, dv, spec)
    call.put(dbias, bias, doffset)


class Backward:
    """What a backward pass over the blocks reads. ``views``: do, q, k, v, o. ``scale_first``: the queries are
    scaled, not their products with the keys."""

    def __init__(
        self,
        views: tuple[ArrayView, ...],
        lse: ArrayView,
        extras: AttentionExtras,
        spec: AttentionSpec,
        *,
        scale_first: bool,
    ) -> None:
        do, q, k, v, o = views
        self.keys, self.values = heads_of(k, spec), heads_of(v, spec)
        groups = self.keys.shape[1]
        self.queries, self.upstream = heads_of(q, spec, groups), heads_of(do, spec, groups)
        self.factor: np.float32 | None = np.float32(spec.softmax_scale)
        if scale_first:
            self.queries *= self.factor
            self.factor = None
        self.sizes = Sizes.of(self.queries, self.keys)
        self.delta = np.add.reduce(self.upstream * heads_of(o, spec, groups), axis=-1, keepdims=True)
        self.sums = lse.numpy().reshape(self.queries.shape[:4])
        self.scores = Scores(extras, spec)
        self.random, self.place = dropout(spec.dropout, extras.rng), place_of(extras, self.sizes)
        self.extras, self.spec = extras, spec

    def blocks(self, bias: Float32 | None = None) -> Iterator[tuple[Block, Float32, Float32, Float32 | None]]:
        """Each block, its probabilities, gradients of its queries' and keys' products, and dropout's factors;
        the scores' gradients are added to ``bias``."""
        first, second = np.empty(0, np.float32), np.empty(0, np.float32)
        for at in blocks(self.sizes, self.queries.shape[4], self.extras, self.spec):
            first, p = at.buffers(first)
            second, ds = at.buffers(second)
            np.matmul(self.queries[at.rows], self.keys[at.columns].swapaxes(-1, -2), out=p)
            if self.factor is not None:
                p *= self.factor
            capped = self.scores.complete(p, at, derivatives=True)
            np.matmul(self.upstream[at.rows], self.values[at.columns].swapaxes(-1, -2), out=ds)
            factors = None if self.random is None else at.factors(self.random, self.place)
            if factors is not None:
                ds *= factors
            rows = p.reshape(-1, at.width), ds.reshape(-1, at.width)
            statistics = self.sums[at.rows].reshape(-1), self.delta[at.rows].reshape(-1)
            _gradient(*rows, *statistics, at.place, np.float32(1) if self.factor is None else self.factor)
            if bias is not None and not self.scores.bias_capped:
                at.add_to(bias, ds)
            if capped is not None:
                ds *= capped
            if bias is not None and self.scores.bias_capped:
                at.add_to(bias, ds)
            yield at, p, ds, factors

    def put(self, dbias: ArrayView | None, slopes: Float32 | None, doffset: ArrayView | None) -> None:
        """Store the gradients of the bias, from the sum of the products' gradients, and of the learnable
        softmax_offset, -sum exp(offset - lse) rowsum(do * o)."""
        if dbias is not None and slopes is not None:
            factor = self.scores.bias_factor
            store(dbias, slopes * (factor if self.factor is None else factor / self.factor))
        if doffset is not None:
            # a row whose offset is -Inf too and that sees nothing has no probabilities
            some = self.sums != -np.inf
            sums = np.where(some, self.sums, np.float32(0))
            weights = np.exp(self.scores.sinks(self.sizes) - sums) * self.delta[..., 0]
            inside = np.where(within(self.extras, self.sizes) & some, weights, np.float32(0))
            store(doffset, -np.add.reduce(inside, axis=(0, 3)).reshape(-1))


class Gradients:
    """Sums of the gradients of queries, keys and values, and the operands that they are products with."""

    def __init__(self, queries: Float32, keys: Float32, values: Float32, upstream: Float32) -> None:
        self._queries, self._keys, self._upstream = queries, keys, upstream
        self.queries, self.keys, self.values = (np.zeros_like(x) for x in (queries, keys, values))

    def add(self, at: Block, p: Float32, ds: Float32, factors: Float32 | None) -> None:
        """A block's part: of its probabilities, which dropout's ``factors`` are put on, and slopes."""
        if factors is not None:
            p *= factors
        self.values[at.columns] += over_group(p, self._upstream[at.rows])
        self.queries[at.rows] = np.matmul(ds, self._keys[at.columns])
        self.keys[at.columns] += over_group(ds, self._queries[at.rows])

    def put(self, dq: ArrayView, dk: ArrayView, dv: ArrayView, spec: AttentionSpec) -> None:
        """Store them."""
        put_heads(dq, self.queries, spec)
        put_heads(dk, self.keys, spec)
        put_heads(dv, self.values, spec)


def within(extras: AttentionExtras, sizes: Sizes) -> Array:
    """Whether a query row lies within its batch's true length: bool (b, 1, 1, s_q)."""
    lengths = true_lengths(extras.cu_seqlens_q, sizes.batches, sizes.rows)
    return (np.arange(sizes.rows) < lengths[:, None])[:, None, None]


def heads_of(x: ArrayView, spec: AttentionSpec, kv_heads: int | None = None) -> Float32:
    """Returns a fresh float32 (b, h_kv, group, s, d) copy of q, k, v, o or do; group is 1 without
    ``kv_heads``."""
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


@njit(fastmath={"contract"})
def exponentials(scores: Any, sink: Any, row: Any, place: Any) -> Any:
    """Scores (columns,) of a row of a block at ``place`` become exp(score - largest), 0 where the row does
    not see a column; (log-sum-exp, 1 / sum), 0 the latter where it sees nothing. ``sink``: its further
    score."""
    first, last = seen_within(row, place)
    top = sink
    for j in range(first, last):
        top = max(top, scores[j])
    lse, factor = top, np.float32(0)
    if top == -np.inf:
        last = first
    else:
        total = exp32(sink - top)
        for j in range(first, last):
            e = exp32(scores[j] - top)
            scores[j] = e
            total += e
        lse = top + np.log(total)
        factor = np.float32(1) / total
    scores[:first] = 0
    scores[last:] = 0
    return lse, factor


@njit(parallel=True, fastmath={"contract"})
def _softmax(scores: Array, lse: Array, sinks: Array, place: Any) -> None:
    """Scores (heads * rows, columns) of a block become probabilities."""
    for r in prange(scores.shape[0]):
        lse[r], factor = exponentials(scores[r], sinks[r], r, place)
        for j in range(scores.shape[1]):  # of whole rows Numba would compile a check and its error's text too
            scores[r, j] *= factor


@njit(parallel=True, fastmath={"contract"})
def _gradient(scores: Array, ds: Array, lse: Array, delta: Array, place: Any, factor: Any) -> None:
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
