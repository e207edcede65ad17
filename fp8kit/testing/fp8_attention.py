"""Attention in FP8 in float64, and the error that an engine may make of it.

On the CPU sums are float32's, and the error is ``QuantizedOracle``'s. Hopper's tensor cores keep 13 bits
below the largest of 32 products and the sum so far (``fp8kit.accumulation``): each of these 33 may lose one
unit of them, at every step of 32 along the contraction. And an engine that goes through the keys block by
block casts exp(score - m'), with the largest score m' so far, and corrects by exp(m' - m) afterwards: that is
another rounding of the same size, half a step of the format, at another place of its grid.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.backends.protocol import AttentionSpec
from fp8kit.formats import Format
from fp8kit.quantization import Quantizer
from fp8kit.testing.attention import Sizes
from fp8kit.testing.compare import ROUNDOFF, Array
from fp8kit.testing.quantized_attention import QuantizedOracle

_KEPT, _STEP = 2.0**-13, 32
Bounded = tuple[Array, Array]  # values, and by how much they may err


def _lost(terms: int) -> float:
    """Returns the error of a sum of so many products, relative to the largest magnitude that it meets."""
    return float(-(-terms // _STEP) * (_STEP + 1)) * _KEPT


def half_step(fmt: Format) -> tuple[float, float]:
    """Returns the largest error of a cast: relative to a normal value, and of a subnormal one."""
    return 2.0 ** -(fmt.mantissa_bits + 1), 2.0 ** -(fmt.bias + fmt.mantissa_bits)


def scale_of(most: float, how: Quantizer) -> float:
    """``scale_from_amax``'s, in float64."""
    most = max(most, how.epsilon)
    scale = how.format.max / most if most else 1.0
    return float(2.0 ** np.floor(np.log2(scale))) if how.power_2 else scale


def rounded(parts: list[Bounded], how: Quantizer) -> list[Bounded]:
    """Values that are rounded with one scale for all; what they are rounded to is within the bounds."""
    most = max((float(np.abs(x).max(initial=0)) for x, _ in parts), default=0.0)
    least = scale_of(most + max((float(e.max(initial=0)) for _, e in parts), default=0.0), how)
    relative, tiny = half_step(how.format)
    # the least scale has the largest steps; a largest value that errs may be clipped by as much
    return [(x, 2 * e + (relative + 4 * ROUNDOFF) * (np.abs(x) + e) + tiny / least) for x, e in parts]


class Fp8Oracle(QuantizedOracle):
    """``results``: o, lse, dq, dk, dv with bounds, before they are rounded to FP8. Arrays (b, h, s, d) of
    values; ``given``: o as backward takes it, rounded to FP8. ``exact``: the engine's sums are float32's."""

    def __init__(
        self,
        exact: bool,
        sizes: Sizes,
        rules: AttentionSpec,
        p: Quantizer,
        ds: Quantizer,
        q: Array,
        k: Array,
        v: Array,
        do: Array,
        given: Array | None = None,
    ) -> None:
        super().__init__(sizes, rules, p, ds, q, k, v, do, (do, q, k), given=given)
        names = ("dq", "dk", "dv")
        if exact:
            self.results = {name: (self.grads[name], self.slacks[name]) for name in names}
            self.results |= {"o": (self.o, self.o_slack), "lse": (self.lse, self.lse_slack)}
            return
        z = sizes
        keys, values = (np.repeat(x, self.group, axis=1).astype(np.float64) for x in (k, v))

        def met(x: Array, y: Array) -> Array:
            """Returns what a sum of products over features meets: a term, the whole, and thrice the walk to
            it."""
            other = np.abs(y).max(-1)[..., None, :]
            walk = np.sqrt((x * x) @ (y * y).swapaxes(-1, -2))
            found = np.abs(x).max(-1)[..., None] * other + np.abs(x @ y.swapaxes(-1, -2)) + 3 * walk
            return np.asarray(found)

        score = abs(self.scale) * _lost(z.d) * met(q.astype(np.float64), keys) + self.score_error
        score = np.where(self.probabilities > 0, score, 0)
        worst = score.max(-1, keepdims=True)
        p_relative, p_tiny = half_step(p.format)
        relative = np.exp(score + worst) - 1
        seen = self.probabilities > 0
        # weights are cast by the largest one so far, which is at most the largest of all
        top = self.probabilities.max(-1, keepdims=True)
        off = (relative + p_relative * (1 + relative)) * self.probabilities
        cast = off + seen * p_tiny / p.static_scale * np.maximum(top, 0) * np.exp(worst)
        size = self.probabilities @ np.abs(values)
        exact_o = self.probabilities @ values
        self.results = {
            "o": (exact_o, cast @ np.abs(values) + _lost(z.s_kv) * (size + cast @ np.abs(values))),
            "lse": (self.lse, worst[..., 0] + self.lse_slack),
        }
        upstream = do.astype(np.float64)
        slopes = self.scale * self.slopes
        slope = abs(self.scale) * self.probabilities * _lost(z.d) * met(upstream, values)
        slope = (slope + np.abs(slopes) * relative) * (1 + relative) + 64 * ROUNDOFF * self.slope_sizes
        ds_relative, ds_tiny = half_step(ds.format)
        most = float(np.abs(slopes).max(initial=0) + slope.max(initial=0))
        slope = slope + ds_relative * (np.abs(slopes) + slope) + seen * ds_tiny / scale_of(most, ds)
        weight = off + seen * p_tiny / p.static_scale
        exact_grads = self.products(self.slopes, self.probabilities, q.astype(float), keys, upstream)
        operands = np.abs(q).astype(float), np.abs(keys), np.abs(upstream)
        bounds = self.products(slope / abs(self.scale), weight, *operands)
        magnitudes = self.products(np.abs(self.slopes), self.probabilities, *operands)
        lost = {"dq": _lost(z.s_kv), "dk": _lost(z.s_q * self.group), "dv": _lost(z.s_q * self.group)}
        for name in names:
            size = np.abs(magnitudes[name]) + np.abs(bounds[name])
            self.results[name] = (exact_grads[name], np.abs(bounds[name]) + lost[name] * size)


def fp8_results(found: Fp8Oracle, out: Quantizer, dqkv: Quantizer | None, groups: Any = ()) -> dict[str, Any]:
    """Returns the results of a call, rounded to FP8: of forward without ``dqkv``, else of backward."""
    if dqkv is None:
        (o,) = rounded([found.results["o"]], out)
        return {"o": o, "lse": found.results["lse"]}
    names = "dq", "dk", "dv"
    made: dict[str, Any] = {}
    for group in set(groups):
        own = [name for name, number in zip(names, groups, strict=True) if number == group]
        made |= dict(zip(own, rounded([found.results[name] for name in own], dqkv), strict=True))
    return made
