"""Attention in float64: what both engines and the operation are compared with.

``attention_oracle`` gives values and the sizes of their terms; ``Oracle`` knows every rule, and the error
that float32 may make.

Tolerances, with u = 2^-24: a score's error is that of a sum of d products; a probability's relative error is
twice the largest score error (score and log-sum-exp) plus (s_kv + 16) u. Tensor-core attention rounds P and
dS to the operands' 16-bit dtype before the next product: off the CPU, half an epsilon of each term is
allowed for that, and as much for what P's rounding did; in float16, whose steps are 2^-24 below 2^-14, also
half such a step for each P and dS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8kit.formats import DType, float16, float32
from fp8kit.ops.attention_spec import AttentionSpec
from fp8kit.testing.compare import ROUNDOFF, Array, epsilon


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
    lengths_q: tuple[int, ...] = field(default=())
    lengths_kv: tuple[int, ...] = field(default=())
    d_v: int = 0
    over: tuple[int, int, int] = (1, 1, 1)

    @property
    def depth_v(self) -> int:
        """Depth of v."""
        return self.d_v or self.d


def visible(sizes: Sizes, rules: Rules, mask: Array | None = None) -> Array:
    """Which scores are seen, bool (b, 1 | h, s_q, s_kv), from the rule's words: one comparison a
    condition."""
    z = sizes
    i, j = np.arange(z.s_q)[:, None], np.arange(z.s_kv)
    n = np.array(z.lengths_q or (z.s_q,) * z.b)[:, None, None, None]
    m = np.array(z.lengths_kv or (z.s_kv,) * z.b)[:, None, None, None]
    place = i + (m - n if rules.bottom_right else 0 * n)
    left, right = rules.window
    found = (i < n) & (j < m) & ((left < 0) | (j >= place - left)) & ((right < 0) | (j <= place + right))
    return np.asarray(found if mask is None else found & (mask == 0))


def distance(sizes: Sizes, rules: Rules) -> Array:
    """|i' - j| as ALiBi takes it, (b, 1, s_q, s_kv)."""
    z = sizes
    n = np.array(z.lengths_q or (z.s_q,) * z.b)[:, None, None, None]
    m = np.array(z.lengths_kv or (z.s_kv,) * z.b)[:, None, None, None]
    return np.asarray(
        np.abs(np.arange(z.s_q)[:, None] + (m - n if rules.bottom_right else 0 * n) - np.arange(z.s_kv))
    )


class Oracle:
    """Results in float64 and the error bounds of a case. All arrays (b, h, s, d); ``keep``: dropout's factors
    over the scores.

    ``o``, ``lse``, ``grads`` (dq, dk, dv, dbias, doffset) and ``slacks`` beside them. Backward is the
    gradient for ``o_given`` and ``lse_given``, the rounded results that a kernel is handed, or for another
    ``given`` o; ``forward_slack`` is for one that takes its own forward's. ``exact``: the engine keeps P and
    dS in float32.
    """

    def __init__(
        self,
        dtype: DType,
        sizes: Sizes,
        rules: Rules,
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
        z, scale = sizes, rules.softmax_scale
        group = z.h // z.h_kv
        q, k, v, do = (np.asarray(x).astype(np.float64) for x in (q, k, v, do))
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        seen = np.broadcast_to(visible(z, rules, mask), (z.b, z.h, z.s_q, z.s_kv))
        self.rows = np.arange(z.s_q) < np.array(z.lengths_q or (z.s_q,) * z.b)[:, None, None]
        added = np.zeros((1, 1, 1, 1))
        if bias is not None:
            added = bias.astype(np.float64) * (scale if rules.bias == "pre_scale_bias" else 1)
        if slopes is not None:
            added = -np.broadcast_to(slopes.astype(np.float64), (z.b, z.h))[..., None, None] * distance(
                z, rules
            )
        scores = np.where(seen, scale * q @ k.swapaxes(-1, -2) + added, -np.inf)
        sink = np.full((z.h, 1, 1), -np.inf if rules.softmax_type == "vanilla" else 0.0)
        if offset is not None:
            sink = offset.astype(np.float64)[:, None, None]
        top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
        top = np.where(np.isfinite(top), top, 0)
        with np.errstate(divide="ignore"):
            lse = np.log(np.exp(scores - top).sum(-1, keepdims=True) + np.exp(sink - top)) + top
        self.lse = np.where(self.rows, lse[..., 0], -np.inf)
        finite = np.where(np.isfinite(self.lse), self.lse, 0)[..., None]
        p = np.where(seen, np.exp(scores - finite), 0)
        factors = np.ones(1) if keep is None else keep
        self.o = (p * factors) @ v

        largest = (
            scale * (np.abs(q) @ np.abs(k).swapaxes(-1, -2)).max(initial=0)
            + np.abs(added).max()
            + np.abs(finite).max()
        )
        self.score_error = (z.d + 6) * ROUNDOFF * largest
        relative = 2 * self.score_error + (z.s_kv + z.d + 16) * ROUNDOFF
        if not exact and dtype is not float32:
            relative += epsilon(dtype)
        step = 0.0 if exact or dtype is not float16 else 2.0**-25
        self.o_slack = (relative * p * factors + step * (p > 0)) @ np.abs(v)
        self.lse_slack = self.score_error + (z.s_kv + 16) * ROUNDOFF + 2 * ROUNDOFF * np.abs(finite[..., 0])

        self.o_given = self.o.astype(np.float32).astype(dtype.numpy) if given is None else given
        self.lse_given = self.lse.astype(np.float32)
        terms = do * self.o_given.astype(np.float64)
        delta, delta_size = terms.sum(-1, keepdims=True), np.abs(terms).sum(-1, keepdims=True)
        ds = p * (do @ v.swapaxes(-1, -2) * factors - delta)
        size = p * (np.abs(do) @ np.abs(v).swapaxes(-1, -2) * factors + delta_size)
        relative += (z.s_q * group + 2 * z.d + 8) * ROUNDOFF

        def over_group(x: Array) -> Array:
            return np.asarray(x.reshape(z.b, z.h_kv, group, *x.shape[2:]).sum(2))

        ds_t, size_t, kept = ds.swapaxes(-1, -2), size.swapaxes(-1, -2), (p * factors).swapaxes(-1, -2)
        self.sizes: dict[str, Array] = {}
        self.rounding = 0.0 if dtype is float32 else epsilon(dtype)
        self.grads = {"dq": scale * ds @ k, "dk": over_group(scale * ds_t @ q), "dv": over_group(kept @ do)}
        self.slacks = {
            "dq": scale * (relative * size + step * (p > 0)) @ np.abs(k),
            "dk": over_group(scale * (relative * size_t + step * (size_t > 0)) @ np.abs(q)),
            "dv": over_group((relative * kept + step * (kept > 0)) @ np.abs(do)),
        }
        if bias is not None:
            axes = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
            factor = scale if rules.bias == "pre_scale_bias" else 1.0
            summed = z.b * z.h * z.s_q * z.s_kv // bias.size
            self.grads["dbias"] = factor * ds.sum(axes, keepdims=True)
            # dS itself is not rounded on its way to dbias, on any engine
            precise = 2 * self.score_error + (z.s_kv + 3 * z.d + 24 + summed) * ROUNDOFF
            self.sizes["dbias"] = factor * size.sum(axes, keepdims=True)
            self.slacks["dbias"] = precise * self.sizes["dbias"]
        if offset is not None:
            with np.errstate(invalid="ignore"):
                weight = np.where(self.rows, np.exp(sink[..., 0] - finite[..., 0]), 0)
            self.grads["doffset"] = -(weight * delta[..., 0]).sum((0, 2))
            precise = 2 * self.score_error + (z.b * z.s_q + z.d + 24) * ROUNDOFF
            self.sizes["doffset"] = (weight * delta_size[..., 0]).sum((0, 2))
            self.slacks["doffset"] = precise * self.sizes["doffset"]

    def forward_slack(self, name: str) -> Array:
        """The slack of a gradient whose backward took the o and the log-sum-exp that its own forward made:
        doubled for their errors, and an epsilon of the terms for an o that was rounded the other way, where
        the slack does not hold one yet."""
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
    order = (1, 2, 0, 3) if spec.qkv_format == "sbhd" else (0, 2, 1, 3)
    back = tuple(int(i) for i in np.argsort(order))
    q, k, v, do = (np.asarray(x, np.float64).transpose(order) for x in (q, k, v, do))
    repeat = spec.num_heads // spec.num_gqa_groups
    k, v = np.repeat(k, repeat, 1), np.repeat(v, repeat, 1)
    b, rows, columns = q.shape[0], q.shape[2], k.shape[2]
    i, j = np.arange(rows)[:, None], np.arange(columns)
    seen = np.ones((b, 1, rows, columns), bool)
    lengths_q, lengths_kv = np.full((b, 1, 1, 1), rows), np.full((b, 1, 1, 1), columns)
    if cu_seqlens is not None:
        lengths_q, lengths_kv = (np.diff(np.asarray(c))[:, None, None, None] for c in cu_seqlens)
    place, (left, right) = i + (lengths_kv - lengths_q) * spec.bottom_right, spec.window
    seen = (
        seen
        & (i < lengths_q)
        & (j < lengths_kv)
        & ((left < 0) | (j >= place - left))
        & ((right < 0) | (j <= place + right))
    )
    scores = np.where(seen, spec.softmax_scale * q @ k.swapaxes(2, 3), -np.inf)
    with np.errstate(divide="ignore"):
        top = np.where(seen.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0)
        lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    p = np.where(seen, np.exp(scores - np.where(np.isfinite(lse), lse, 0)), 0)
    dropped = p * keep

    def results(q: Any, k: Any, v: Any, do: Any, sign: int) -> dict[str, Any]:
        o = dropped @ v
        ds = (
            spec.softmax_scale * p * (keep * (do @ v.swapaxes(2, 3)) + sign * (do * o).sum(-1, keepdims=True))
        )
        found = {"o": o, "dq": ds @ k, "dk": ds.swapaxes(2, 3) @ q, "dv": dropped.swapaxes(2, 3) @ do}
        grouped = {
            n: found[n].reshape(b, -1, repeat, columns, found[n].shape[3]).sum(2) for n in ("dk", "dv")
        }
        return {n: x.transpose(back) for n, x in (found | grouped).items()}

    values, sizes = results(q, k, v, do, -1), results(abs(q), abs(k), abs(v), abs(do), 1)
    score_size = spec.softmax_scale * (abs(q) @ abs(k).swapaxes(2, 3)).max()
    return {"lse": (lse[..., 0], score_size), **{n: (values[n], sizes[n]) for n in values}}
