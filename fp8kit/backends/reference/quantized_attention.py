"""Attention over quantised operands, block by block as ``attention.py``: the probabilities and the scores'
gradients are rounded to a narrow format between the products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fp8kit.arrays import ArrayView, as_view
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.backends.reference._numpy import Array, Float32, quiet, store
from fp8kit.backends.reference.attention import (
    gradient,
    heads_of,
    offset_gradient,
    over_group,
    put_heads,
    within,
)
from fp8kit.backends.reference.attention_rules import (
    Block,
    Scores,
    Sizes,
    blocks,
    place_of,
    seen_within,
    true_lengths,
)
from fp8kit.backends.reference.cast_rows import encode_row, rounding
from fp8kit.backends.reference.dropout import Dropout, dropout
from fp8kit.backends.reference.exponential import exp32
from fp8kit.backends.reference.quantize import table32
from fp8kit.backends.reference.scales import scale_from_amax
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.formats import float32
from fp8kit.quantization import Quantizer


def clear_padding_(x: ArrayView, cu_seqlens: ArrayView, stream: int) -> None:
    """See ``Kernels.clear_padding_``."""
    values = x.numpy()
    for batch, length in enumerate(true_lengths(cu_seqlens, *x.shape[::2][:2])):
        values[batch, :, length:] = 0


class _Rounded(NamedTuple):
    """A quantizer with its scale, as ``_round_row`` takes it."""

    how: Any
    table: Array
    scale: np.float32
    inverse: np.float32

    @classmethod
    def of(cls, quantizer: Quantizer, amax: np.float32 | None = None) -> _Rounded:
        """By its static scale, or that of an ``amax``."""
        fmt = quantizer.format
        scale = np.full(2, quantizer.static_scale, np.float32)
        scale[1] = np.float32(1) / scale[0]
        if amax is not None:
            rule = fmt.max, quantizer.power_2, quantizer.epsilon, float32.max
            scale_from_amax(
                as_view(np.full(1, amax, np.float32)), as_view(scale[:1]), as_view(scale[1:]), *rule, 0
            )
        return cls(rounding(fmt, True), table32(fmt), scale[0], scale[1])


@njit
def _round_row(x: Any, how: Any, table: Any, scale: Any, inverse: Any) -> None:
    """x = its values in the format, in place. x: float32 (n,); the rest: ``_Rounded``."""
    codes = np.empty(x.size, np.uint8)
    encode_row(x.view(np.uint32), scale, how, codes)
    for j in range(x.size):
        x[j] = table[codes[j]] * inverse


@njit(parallel=True, fastmath={"contract"})
def _softmax(
    scores: Array,
    lse: Array,
    inverse: Array,
    sinks: Array,
    place: Any,
    how: Any,
    table: Array,
    scale: Any,
    scale_inv: Any,
) -> None:
    """Scores (heads * rows, columns) become rounded exp(score - largest), 0 where a row does not see a
    column; ``inverse``: 1 / the sum of the unrounded ones, 0 for rows that see nothing."""
    for r in prange(scores.shape[0]):
        first, last = seen_within(r, place)
        top = sinks[r]
        for j in range(first, last):
            top = max(top, scores[r, j])
        if top == -np.inf:
            lse[r] = top
            inverse[r] = 0
            last = first
        else:
            total = exp32(sinks[r] - top)
            for j in range(first, last):
                e = exp32(scores[r, j] - top)
                scores[r, j] = e
                total += e
            lse[r] = top + np.log(total)
            inverse[r] = np.float32(1) / total
            _round_row(scores[r, first:last], how, table, scale, scale_inv)
        scores[r, :first] = 0
        scores[r, last:] = 0


@njit(parallel=True)
def _round(x: Array, how: Any, table: Array, scale: Any, scale_inv: Any) -> None:
    """All rows of x (rows, columns) rounded, in place."""
    for r in prange(x.shape[0]):
        _round_row(x[r], how, table, scale, scale_inv)


@quiet
def quantized_attention_fwd(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    extras: AttentionExtras,
    spec: AttentionSpec,
    p: Quantizer,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.quantized_attention_fwd``."""
    keys, values = heads_of(k, spec), heads_of(v, spec)
    queries = heads_of(q, spec, keys.shape[1])
    sizes, scale, rounded = Sizes.of(queries, keys), np.float32(spec.softmax_scale), _Rounded.of(p)
    out = np.zeros((*queries.shape[:4], values.shape[4]), np.float32)
    sums, scores = lse.numpy().reshape(queries.shape[:4]), Scores(extras, spec)
    sinks = scores.sinks(sizes)
    sums[...] = np.where(within(extras, sizes), sinks, np.float32(-np.inf))
    random, place = dropout(spec.dropout, extras.rng), place_of(extras, sizes)
    buffer = np.empty(0, np.float32)
    for at in blocks(sizes, queries.shape[4], extras, spec):
        buffer, weights = at.buffers(buffer)
        np.matmul(queries[at.rows], keys[at.columns].swapaxes(-1, -2), out=weights)
        weights *= scale
        scores.complete(weights, at)
        lse_block, inverse = (np.empty(weights.shape[:4], np.float32) for _ in range(2))
        further = np.broadcast_to(sinks, weights.shape[:4]).reshape(-1)
        rows = weights.reshape(-1, at.width), lse_block.reshape(-1), inverse.reshape(-1)
        _softmax(*rows, further, at.place, *rounded)
        sums[at.rows] = lse_block
        if random is not None:
            weights *= at.factors(random, place)
        out[at.rows] = np.matmul(weights, values[at.columns]) * inverse[..., None]
    put_heads(o, out, spec)


class _Backward:
    """What both passes over the blocks read."""

    def __init__(
        self, views: tuple[ArrayView, ...], lse: ArrayView, extras: AttentionExtras, spec: AttentionSpec
    ) -> None:
        do, q, k, v, o = views
        self.keys, self.values = heads_of(k, spec), heads_of(v, spec)
        groups = self.keys.shape[1]
        self.queries, self.upstream = heads_of(q, spec, groups), heads_of(do, spec, groups)
        self.sizes = Sizes.of(self.queries, self.keys)
        self.delta = np.add.reduce(self.upstream * heads_of(o, spec, groups), axis=-1, keepdims=True)
        self.sums = lse.numpy().reshape(self.queries.shape[:4])
        self.scores, self.factor = Scores(extras, spec), np.float32(spec.softmax_scale)
        self.random, self.place = dropout(spec.dropout, extras.rng), place_of(extras, self.sizes)
        self.extras, self.spec = extras, spec

    def blocks(self) -> Iterator[tuple[Block, Float32, Float32, Float32 | None]]:
        """Each block, its probabilities, gradients of q k^T, both unrounded, and dropout's factors."""
        first, second = np.empty(0, np.float32), np.empty(0, np.float32)
        for at in blocks(self.sizes, self.queries.shape[4], self.extras, self.spec):
            first, p = at.buffers(first)
            second, ds = at.buffers(second)
            np.matmul(self.queries[at.rows], self.keys[at.columns].swapaxes(-1, -2), out=p)
            p *= self.factor
            self.scores.complete(p, at)
            np.matmul(self.upstream[at.rows], self.values[at.columns].swapaxes(-1, -2), out=ds)
            factors = self._factors(at, self.random)
            if factors is not None:
                ds *= factors
            rows = p.reshape(-1, at.width), ds.reshape(-1, at.width)
            statistics = self.sums[at.rows].reshape(-1), self.delta[at.rows].reshape(-1)
            gradient(*rows, *statistics, at.place, self.factor)
            yield at, p, ds, factors

    def _factors(self, at: Block, random: Dropout | None) -> Float32 | None:
        return None if random is None else at.factors(random, self.place)


@quiet
def quantized_attention_bwd(
    do: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    do_rows: ArrayView,
    q_rows: ArrayView,
    k_rows: ArrayView,
    dq: ArrayView,
    dk: ArrayView,
    dv: ArrayView,
    dbias: ArrayView | None,
    doffset: ArrayView | None,
    extras: AttentionExtras,
    spec: AttentionSpec,
    p: Quantizer,
    ds: Quantizer,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.quantized_attention_bwd``: one pass over the blocks for the amax of dS, one for the
    products."""
    call = _Backward((do, q, k, v, o), lse, extras, spec)
    groups = call.keys.shape[1]
    queries, upstream = (heads_of(view, spec, groups) for view in (q_rows, do_rows))
    keys = heads_of(k_rows, spec)
    bias = None if dbias is None else np.zeros(dbias.shape, np.float32)
    most = np.float32(0)
    for at, _, slopes, _ in call.blocks():
        most = np.fmax(most, np.fmax.reduce(np.abs(slopes), axis=None))
        if bias is not None:
            at.add_to(bias, slopes)
    rounded, rounded_p = _Rounded.of(ds, most), _Rounded.of(p)
    dqueries, dkeys = np.zeros_like(queries), np.zeros_like(keys)
    dvalues = np.zeros_like(call.values)
    for at, weights, slopes, factors in call.blocks():
        _round(weights.reshape(-1, at.width), *rounded_p)
        _round(slopes.reshape(-1, at.width), *rounded)
        if factors is not None:
            weights *= factors
        dvalues[at.columns] += over_group(weights, upstream[at.rows])
        dqueries[at.rows] = np.matmul(slopes, keys[at.columns])
        dkeys[at.columns] += over_group(slopes, queries[at.rows])
    put_heads(dq, dqueries, spec)
    put_heads(dk, dkeys, spec)
    put_heads(dv, dvalues, spec)
    if dbias is not None and bias is not None:
        store(dbias, bias * (call.scores.bias_factor / call.factor))
    if doffset is not None:
        offset_gradient(doffset, call.sums, call.delta, call.scores, call.sizes, extras)
