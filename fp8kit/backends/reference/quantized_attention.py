"""Attention over quantised operands, block by block as ``attention.py``: the probabilities and the scores'
gradients are rounded to a narrow format between the products."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fp8kit import codec
from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import AttentionExtras, AttentionSpec
from fp8kit.backends.protocol.quantized_attention import DS_DRAW, P_DRAWS
from fp8kit.backends.reference._numpy import Array, quiet
from fp8kit.backends.reference.attention import Backward, Gradients, exponentials, forward, heads_of
from fp8kit.backends.reference.attention_rules import Block, true_lengths
from fp8kit.backends.reference.cast_rows import encode_row, rounding
from fp8kit.backends.reference.philox import row_words
from fp8kit.backends.reference.quantize import table32
from fp8kit.backends.reference.scales import scales_of
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.formats import float32
from fp8kit.quantization import Quantizer


def clear_padding_(x: ArrayView, cu_seqlens: ArrayView, stream: int) -> None:
    """See ``Kernels.clear_padding_``."""
    values = x.numpy()
    for batch, length in enumerate(true_lengths(cu_seqlens, *x.shape[::2][:2])):
        values[batch, :, length:] = 0


class Rounded(NamedTuple):
    """A quantizer with its scale, as ``_round_row`` takes it, and what is drawn where it rounds
    stochastically."""

    how: Any
    table: Array
    scale: np.float32
    inverse: np.float32
    quantizer: Quantizer
    rng: ArrayView | None
    draw: int

    @classmethod
    def of(
        cls, quantizer: Quantizer, rng: ArrayView | None = None, draw: int = 0, amax: np.float32 | None = None
    ) -> Rounded:
        """Make the rounding by a quantizer's static scale, or by the scale of an ``amax``."""
        fmt = quantizer.format
        scale = np.float32(quantizer.static_scale)
        if amax is not None:
            scale = scales_of(amax, fmt.max, quantizer.power_2, quantizer.epsilon, float32.max)[()]
        return cls(rounding(fmt, True), table32(fmt), scale, np.float32(1) / scale, quantizer, rng, draw)

    def round(self, x: Array, at: Block) -> None:
        """Scores of a block (b * h * rows, columns) rounded, in place."""
        bits, fmt = self.quantizer.stochastic_bits, self.quantizer.format
        if self.rng is None or not bits:
            _round(x, *self[:4])
            return
        starts = at.starts((0, 0, at.sizes.kv_heads * at.sizes.group)) + (self.draw << 48)
        drawn = row_words(self.rng, starts, x.shape[1])
        codes = codec.encode(x * self.scale, fmt, "stochastic", True, drawn, bits)
        np.multiply(self.table[codes], self.inverse, out=x)

    def rounded(self, x: Array) -> Array:
        """Returns float32 values rounded to nearest even."""
        values = x.copy(order="C")
        _round(values.reshape(-1, x.shape[-1]), *self[:4])
        return values


@njit
def _round_row(x: Any, how: Any, table: Any, scale: Any, inverse: Any) -> None:
    """x = its values in the format, in place. x: float32 (n,); the rest: ``Rounded``."""
    codes = np.empty(x.size, np.uint8)
    encode_row(x.view(np.uint32), scale, how, codes)
    for j in range(x.size):
        x[j] = table[codes[j]] * inverse


@njit(parallel=True, fastmath={"contract"})
def _softmax(scores: Array, lse: Array, inverse: Array, sinks: Array, place: Any) -> None:
    """Scores (heads * rows, columns) become exp(score - largest); ``inverse``: 1 / their sum, 0 for rows that
    see nothing."""
    for r in prange(scores.shape[0]):
        lse[r], inverse[r] = exponentials(scores[r], sinks[r], r, place)


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
    rng: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.quantized_attention_fwd``."""
    rounded = Rounded.of(p, rng, P_DRAWS[0])

    def softmax(scores: Array, lse: Array, sinks: Array, at: Block) -> Array:
        inverse = np.empty_like(lse)
        _softmax(scores, lse, inverse, sinks, at.place)
        rounded.round(scores, at)
        return inverse

    forward((q, k, v, o, lse), extras, spec, softmax, scale_first=False)


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
    rng: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``Kernels.quantized_attention_bwd``: one pass over the blocks for the amax of dS, one for the
    products."""
    call = Backward((do, q, k, v, o), lse, extras, spec, scale_first=False)
    groups = call.keys.shape[1]
    queries, upstream = (heads_of(view, spec, groups) for view in (q_rows, do_rows))
    found = Gradients(queries, heads_of(k_rows, spec), call.values, upstream)
    bias = None if dbias is None else np.zeros(dbias.shape, np.float32)
    most = np.float32(0)
    for _, _, slopes, _ in call.blocks(bias):
        most = np.fmax(most, np.fmax.reduce(np.abs(slopes), axis=None))
    rounded, rounded_p = Rounded.of(ds, rng, DS_DRAW, most), Rounded.of(p, rng, P_DRAWS[1])
    for at, weights, slopes, factors in call.blocks():
        rounded_p.round(weights.reshape(-1, at.width), at)
        rounded.round(slopes.reshape(-1, at.width), at)
        found.add(at, weights, slopes, factors)
    found.put(dq, dk, dv, spec)
    call.put(dbias, bias, doffset)
