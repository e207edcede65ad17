"""Attention over quantised operands in float64, and the error that float32 may make of it.

A probability, or a gradient of the scores, that lies nearer to the middle of two codes than float32's error
may become either: where, and only where, the codes at both ends of the error differ, the difference is
allowed. So it is of values that are rounded stochastically, by the words that the contract names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.backends.protocol import AttentionSpec
from fp8kit.backends.protocol.quantized_attention import DS_DRAW, P_DRAWS
from fp8kit.formats import float32
from fp8kit.quantization import Quantizer
from fp8kit.testing.attention import Oracle, Sizes
from fp8kit.testing.compare import ROUNDOFF, Array
from fp8kit.testing.contract.dropout import philox


def _rounded(
    x: Array, error: Array, how: Quantizer, words: Array | None, scale: float, scale_error: float
) -> tuple[Array, Array]:
    """x rounded, stochastically by its ``words`` if there are any, and by how much a value may differ whose x
    errs by ``error``, with a scale that errs relatively by ``scale_error``."""
    fmt, bits = how.format, how.stochastic_bits or 32
    rounding: codec.Rounding = "nearest" if words is None else "stochastic"

    def values(x: Array, scale: float) -> Array:
        return np.asarray(
            codec.decode(codec.encode(x * scale, fmt, rounding, True, words, bits), fmt) / scale
        )

    middle = values(x, scale)
    off = np.zeros_like(middle)
    for own in (scale * (1 - scale_error), scale * (1 + scale_error)):
        for at in (x - error, x + error):
            off = np.maximum(off, np.abs(values(at, own) - middle))
    return middle, off


class QuantizedOracle(Oracle):
    """``Oracle`` of the contract's kernels over quantised operands; ``do_rows``, ``q_rows``, ``k_rows``,
    ``rng``: see there. All arrays (b, h, s, d); backward takes o and the log-sum-exp as ``Oracle`` does."""

    def __init__(
        self,
        sizes: Sizes,
        rules: AttentionSpec,
        p: Quantizer,
        ds: Quantizer,
        q: Array,
        k: Array,
        v: Array,
        do: Array,
        rows: tuple[Array, Array, Array],
        rng: Array | None = None,
        mask: Array | None = None,
        bias: Array | None = None,
        slopes: Array | None = None,
        offset: Array | None = None,
        keep: Array | None = None,
        given: Array | None = None,
    ) -> None:
        extras: Any = mask, bias, slopes, offset, keep, given
        super().__init__(float32, sizes, rules, True, q, k, v, do, *extras)
        factors = np.ones(1) if keep is None else keep
        groups = np.repeat(v.astype(np.float64), self.group, axis=1)
        relative = 2 * self.score_error + (sizes.s_kv + sizes.d + 16) * ROUNDOFF
        terms = (2 * sizes.s_kv + 16) * ROUNDOFF

        def words(how: Quantizer, draw: int) -> Array | None:
            if not how.stochastic_bits or rng is None:
                return None
            element = np.arange(self.probabilities.size).reshape(self.probabilities.shape)
            return philox(rng, (draw << 48) + element).astype(np.uint32)

        def probabilities(x: Array, draw: int) -> tuple[Array, Array]:
            found = _rounded(x, relative * x, p, words(p, draw), p.static_scale, 2 * ROUNDOFF)
            return found[0] * factors, found[1] * factors

        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.where(self.total > 0, 1 / self.total, 0)
        weights, off = probabilities(self.probabilities * self.total, P_DRAWS[0])
        self.o = weights @ groups * inverse
        self.o_size = weights @ np.abs(groups) * inverse
        self.o_slack = off @ np.abs(groups) * inverse + (relative + terms) * self.o_size
        self.o_given = self.o.astype(np.float32)

        error = (relative + (2 * sizes.d + 8) * ROUNDOFF) * self.slope_sizes + self.bend_error
        error *= abs(self.scale)
        exact = self.scale * self.slopes
        most = np.abs(exact).max(initial=0)
        factor, scale_error = ds.format.max / max(most, ds.epsilon) if most else 1.0, 0.0
        if ds.power_2:
            factor = 2.0 ** np.floor(np.log2(factor))
        elif most:
            scale_error = float(error.max() / most) + 4 * ROUNDOFF
        slopes_, slope_off = _rounded(exact, error, ds, words(ds, DS_DRAW), factor, scale_error)
        weights, off = probabilities(self.probabilities, P_DRAWS[1])
        do_rows, q_rows, k_rows = (x.astype(np.float64) for x in rows)
        k_rows = np.repeat(k_rows, self.group, axis=1)
        terms = (max(sizes.s_q * self.group, sizes.s_kv) + 16) * ROUNDOFF
        operands = q_rows, k_rows, do_rows
        self.grads |= self.products(slopes_ / self.scale, weights, *operands)
        slack = (slope_off + terms * np.abs(slopes_)) / self.scale, off + terms * np.abs(weights)
        self.slacks |= self.products(*slack, *map(np.abs, operands))
