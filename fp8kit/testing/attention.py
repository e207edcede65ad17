"""Attention in float64: what both engines and the operation are compared with.

``attention_oracle`` gives values and the sizes of their terms; ``Oracle`` knows every rule, and the error
that float32 may make.

Tolerances, with u = 2^-24: a score's error is that of a sum of d products; a probability's relative error is
twice the largest score error (score and log-sum-exp) plus (s_kv + 16) u. A cap adds 8 u of the score (tanh
within 2 ulp, and four roundings), and its derivative 1 - t^2 errs by 2 (1 - t^2) / cap of the score's error,
and by 12 u for t's own and the roundings. Tensor-core attention rounds P and dS to the operands' 16-bit dtype
before the next product: off the CPU, half an epsilon of each term is allowed for that, and as much for what
P's rounding did; in float16, whose steps are 2^-24 below 2^-14, also half such a step for each P and dS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8kit.backends.protocol import AttentionSpec
from fp8kit.formats import DType, float16, float32, float64
from fp8kit.testing.compare import ROUNDOFF, Array, epsilon

ORDERS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}  # of dimensions, to (b, h, s, d)


@dataclass(frozen=True)
class Rules:
    """The contract's AttentionSpec; fields as ``backends.protocol.AttentionSpec``."""

    qkv_format: str = "sbhd"
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    softmax_scale: float = 0.3
    dropout: float = 0.0
    bias: str = "no_bias"
    softmax_type: str = "vanilla"
    padded: bool = False
    masked: bool = False
    zero_padded: bool = False
    placed: bool = False
    softcap: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Batches, query and key length, query and key heads, depth of q and k and (0: the same) of v; true
    lengths of each batch where the rules say padded; leading sizes of bias and mask."""

    b: int = 2
    s_q: int = 17
    s_kv: int = 17
    h: int = 2
    h_kv: int = 2
    d: int = 16
    lengths_q: tuple[int, ...] = ()
    lengths_kv: tuple[int, ...] = ()
    d_v: int = 0
    over: tuple[int, int, int] = (1, 1, 1)

    @classmethod
    def of(cls, q: Array, v: Array, cu_q: Any = None, cu_kv: Any = None) -> Sizes:
        """Those of arrays (b, heads, s, d), with running sums of the true lengths if there are any."""
        (b, h, s_q, d), (_, h_kv, s_kv, d_v) = q.shape, v.shape
        true_q, true_kv = (() if cu is None else tuple(np.diff(cu).tolist()) for cu in (cu_q, cu_kv))
        return cls(b, s_q, s_kv, h, h_kv, d, true_q, true_kv, d_v)

    @property
    def depth_v(self) -> int:
        """Depth of v."""
        return self.d_v or self.d


def _columns(sizes: Sizes, rules: AttentionSpec) -> tuple[Array, Array]:
    """Returns, for each batch and row, where its diagonal is, and how many keys there are; (b, 1, s_q | 1,
    1)."""
    queries, keys = (
        np.array(lengths or (longest,) * sizes.b)[:, None, None, None]
        for lengths, longest in ((sizes.lengths_q, sizes.s_q), (sizes.lengths_kv, sizes.s_kv))
    )
    return np.arange(sizes.s_q)[:, None] + rules.bottom_right * (keys - queries), keys


def visible(sizes: Sizes, rules: AttentionSpec, mask: Array | None = None) -> Array:
    """Returns which scores are seen, bool (b, 1 | h, s_q, s_kv), from the rule's words: one comparison a
    condition."""
    (place, keys), j = _columns(sizes, rules), np.arange(sizes.s_kv)
    left, right = rules.window
    found = rows(sizes)[:, None, :, None] & (j < keys)
    found = found & ((left < 0) | (j >= place - left)) & ((right < 0) | (j <= place + right))
    return np.asarray(found if mask is None else found & (mask == 0))


def rows(sizes: Sizes) -> Array:
    """Returns which rows are no padding, bool (b, s_q)."""
    return np.arange(sizes.s_q) < np.array(sizes.lengths_q or (sizes.s_q,) * sizes.b)[:, None]


class Oracle:
    """Results in float64 and the error bounds of a case. All arrays (b, h, s, d); ``keep``: dropout's factors
    over the scores.

    ``o``, ``lse``, ``grads`` (dq, dk, dv, dbias, doffset) and the slacks beside them; sizes are the sums of
    the absolute values of a result's terms. A dtype of float64 rounds nothing. Backward is the
    gradient for ``o_given`` and ``lse_given``, the rounded results that a kernel is handed, or for another
    ``given`` o; ``forward_slack`` is for one that takes its own forward's. ``exact``: the engine keeps P and
    dS in float32.
    """

    def __init__(
        self,
        dtype: DType,
        sizes: Sizes,
        rules: AttentionSpec,
        exact: bool,
        q: Array,
        k: Array,
        v: Array,
        do: Array,
        mask: Array | None = None,
        bias: Array | None = None,
        slopes: Array | None = None,
        offset: Array | None = None,
        keep: Array | None = None,
        given: Array | None = None,
    ) -> None:
        z, self.scale, self.group = sizes, rules.softmax_scale, sizes.h // sizes.h_kv
        q, k, v, do = (np.asarray(x).astype(np.float64) for x in (q, k, v, do))
        k, v = (np.repeat(x, self.group, axis=1) for x in (k, v))
        seen = np.broadcast_to(visible(z, rules, mask), (z.b, z.h, z.s_q, z.s_kv))
        self.rows = rows(z)[:, None]
        bias_factor = self.scale if rules.bias == "pre_scale_bias" else 1.0
        added = np.zeros((1, 1, 1, 1)) if bias is None else bias.astype(np.float64) * bias_factor
        if slopes is not None:
            distance = np.abs(_columns(z, rules)[0] - np.arange(z.s_kv))
            added = -np.broadcast_to(slopes.astype(np.float64), (z.b, z.h))[..., None, None] * distance
        inner, cap = self.scale * q @ k.swapaxes(-1, -2), rules.softcap
        bends, within = np.ones((1, 1, 1, 1)), cap > 0 and rules.bias == "pre_scale_bias"
        if cap:
            part = np.tanh((inner + added * within) / cap)
            inner, bends = cap * part, 1 - part * part
        scores = np.where(seen, inner + added * (not within), -np.inf)
        sink = np.full((z.h, 1, 1), -np.inf if rules.softmax_type == "vanilla" else 0.0)
        if offset is not None:
            sink = offset.astype(np.float64)[:, None, None]
        top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
        top = np.where(np.isfinite(top), top, 0)
        with np.errstate(divide="ignore"):
            lse = np.log(np.exp(scores - top).sum(-1, keepdims=True) + np.exp(sink - top)) + top
        self.lse = np.where(self.rows, lse[..., 0], -np.inf)
        finite = np.where(np.isfinite(self.lse), self.lse, 0)[..., None]
        # exp(score - the largest one) is so many times a probability
        self.total = np.exp(finite - top)
        p = np.where(seen, np.exp(scores - finite), 0)
        factors = np.ones(1) if keep is None else keep
        kept = p * factors
        self.o = kept @ v

        self.score_size = self.scale * (np.abs(q) @ np.abs(k).swapaxes(-1, -2)).max(initial=0)
        largest = self.score_size + np.abs(added).max() + np.abs(finite).max()
        self.score_error = (z.d + 6 + 8 * (cap > 0)) * ROUNDOFF * largest
        relative = 2 * self.score_error + (z.s_kv + z.d + 16) * ROUNDOFF
        if not exact and dtype is not float32:
            relative += epsilon(dtype)
        step = 0.0 if exact or dtype is not float16 else 2.0**-25
        self.o_size = kept @ np.abs(v)
        self.o_slack = relative * self.o_size + step * (p > 0) @ np.abs(v)
        self.lse_slack = self.score_error + (z.s_kv + 16) * ROUNDOFF + 2 * ROUNDOFF * np.abs(finite[..., 0])

        rounded = self.o if dtype is float64 else self.o.astype(np.float32).astype(dtype.numpy)
        self.o_given = rounded if given is None else given
        self.lse_given = self.lse.astype(np.float32)
        terms: Any = do * self.o_given.astype(np.float64)
        delta, delta_size = terms.sum(-1, keepdims=True), np.abs(terms).sum(-1, keepdims=True)
        self.probabilities, self.kept, upstream = p, kept, do @ v.swapaxes(-1, -2) * factors
        self.upstream_size = np.abs(do) @ np.abs(v).swapaxes(-1, -2) * factors
        beyond, beyond_size = p * (upstream - delta), p * (self.upstream_size + delta_size)
        ds, size, self.bends = beyond * bends, beyond_size * bends, bends
        self.slopes, self.slope_sizes = ds, size
        off = self.score_error / cap if cap else 0.0
        # of dS, by the cap's derivative
        self.bend_error = beyond_size * (2 * off * (bends + off) + 12 * ROUNDOFF * (cap > 0))
        relative += (z.s_q * self.group + 2 * z.d + 8) * ROUNDOFF
        self.grads = self.products(ds, kept, q, k, do)
        slack = relative * size + self.bend_error + step * (size > 0)
        self.slacks = self.products(slack, relative * kept + step * (kept > 0), *map(np.abs, (q, k, do)))
        self.rounding = 0.0 if dtype is float32 else epsilon(dtype)
        self.sizes: dict[str, Array] = {}
        # dS itself is not rounded on its way to dbias and doffset, on any engine
        if bias is not None:
            axes = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
            terms = (ds, size, self.bend_error) if within else (beyond, beyond_size, 0 * size)
            self.grads["dbias"], self.sizes["dbias"], error = (
                bias_factor * x.sum(axes, keepdims=True) for x in terms
            )
            self._precise("dbias", z.s_kv + 3 * z.d + 24 + size.size // bias.size)
            self.slacks["dbias"] = self.slacks["dbias"] + error
        if offset is not None:
            with np.errstate(invalid="ignore"):
                weight = np.where(self.rows, np.exp(sink[..., 0] - finite[..., 0]), 0)
            self.grads["doffset"] = -(weight * delta[..., 0]).sum((0, 2))
            self.sizes["doffset"] = (weight * delta_size[..., 0]).sum((0, 2))
            self._precise("doffset", z.b * z.s_q + z.d + 24)

    def _precise(self, name: str, terms: int) -> None:
        self.slacks[name] = (2 * self.score_error + terms * ROUNDOFF) * self.sizes[name]

    def products(self, ds: Array, kept: Array, q: Array, k: Array, do: Array) -> dict[str, Array]:
        """dq, dk and dv from dS and the probabilities that dropout kept; ``k`` is repeated for its group."""

        def over_group(x: Array) -> Array:
            return np.asarray(x.reshape(len(x), -1, self.group, *x.shape[2:]).sum(2))

        dk, dv = self.scale * ds.swapaxes(-1, -2) @ q, kept.swapaxes(-1, -2) @ do
        return {"dq": self.scale * ds @ k, "dk": over_group(dk), "dv": over_group(dv)}

    def forward_slack(self, name: str) -> Array:
        """Returns the slack of a gradient whose backward took the o and the log-sum-exp that its own forward
        made: doubled for their errors, and an epsilon of the terms for an o that was rounded the other way,
        where the slack does not hold one yet."""
        return np.asarray(2 * self.slacks[name] + self.rounding * self.sizes.get(name, 0.0))


def attention_oracle(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    keep: Any = 1.0,
    cu_seqlens: tuple[Any, Any] | None = None,
) -> dict[str, tuple[Any, Any]]:
    """name -> (value, sum of the absolute values of its terms), both float64, of "o", "dq", "dk" and "dv" in
    the spec's format, and of "lse", (b, h, s_q) with the largest absolute sum of a score's terms.

    ``q``, ``k``, ``v``, ``do``: arrays (s, b, heads, d), or (b, s, heads, d) with "bshd". ``keep``: dropout's
    factors (b, h, s_q, s_kv). ``cu_seqlens``: of queries and keys, (b + 1,) each, with a padding mask.
    Source: Vaswani et al. 2017, 3.2; the gradients are the derivatives of its formula (Dao et al. 2022,
    appendix B). NumPy's ValueError for shapes that do not fit each other.
    """
    order = ORDERS[spec.qkv_format]
    q, k, v, do = (np.asarray(x, np.float64).transpose(order) for x in (q, k, v, do))
    sizes = Sizes.of(q, v, *(cu_seqlens or ()))
    exact = Oracle(float64, sizes, spec, True, q, k, v, do, keep=np.asarray(keep))
    delta_size = (abs(do) * exact.o_size).sum(-1, keepdims=True)
    ds_size = exact.bends * exact.probabilities * (exact.upstream_size + delta_size)
    k = np.repeat(k, exact.group, 1)
    magnitudes = {"o": exact.o_size, **exact.products(ds_size, exact.kept, abs(q), abs(k), abs(do))}
    values, back = {"o": exact.o, **exact.grads}, np.argsort(order)
    found = {name: (values[name].transpose(back), size.transpose(back)) for name, size in magnitudes.items()}
    return {"lse": (exact.lse, exact.score_size), **found}
