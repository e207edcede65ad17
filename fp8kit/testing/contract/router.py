"""Routers against float64: the choice exactly, probabilities and gradients with the bounds of their sums.

Tolerances, with u = 2^-24: exp(x - top) and the other scores have the relative error u |x - top| of their
argument and some 8 u of exp, log and sqrt; a sum over E experts adds E u, a quotient both. ``_relative`` is
twice that, since a gradient is a difference of two such terms.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.backends.protocol.router import MOST_EXPERTS, Routing
from fp8kit.formats import DType, bfloat16, float16, float32, int32, int64, uint8
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    product,
    sum_slack,
    wide,
)

_TINY = 1e-20
_USUAL = Routing("softmax", 8)


def _score(x: Array, score: str) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)) if score == "sigmoid" else np.sqrt(np.logaddexp(0, x)))


def _slope(x: Array, score: str) -> Array:
    s = _score(x, "sigmoid")
    return s * (1 - s) if score == "sigmoid" else s / (2 * _score(x, score))  # type: ignore[no-any-return]


def _softmax(x: Array, among: Array) -> Array:
    made = np.where(
        among, np.exp(np.where(among, x - np.where(among, x, -np.inf).max(1, keepdims=True), 0)), 0
    )
    return made / made.sum(1, keepdims=True)  # type: ignore[no-any-return]


def _take(keys: Array, count: int) -> list[int]:
    """The largest keys' places: NaN last, of equal ones the lowest first."""
    return sorted(range(len(keys)), key=lambda e: (np.isnan(keys[e]), -keys[e], e))[:count]


def choice(x: Array, bias: Array | None, rule: Routing) -> Array:
    """The chosen experts, uint8 (T, E), by a loop over tokens."""
    found = np.zeros(x.shape, np.uint8)
    keys = x
    if rule.score != "softmax":
        keys = _score(x, rule.score)
    elif rule.before and not rule.dense:
        keys = _softmax(x, np.ones(x.shape, bool))
    if bias is not None and not rule.dense:
        keys = keys + bias
    for t, own in enumerate(keys):
        among = np.arange(len(own))
        if rule.groups and not rule.dense:
            parts = own.reshape(rule.groups, -1)
            count = rule.topk // rule.group_topk
            totals = np.array([part[_take(part, count)].sum() for part in parts])
            kept = _take(totals, rule.group_topk)
            among = among.reshape(parts.shape)[sorted(kept)].reshape(-1)
        found[t, among[_take(own[among], rule.topk)]] = 1
    return found


def probabilities(x: Array, taken: Array, rule: Routing) -> Array:
    """float64 (T, E)."""
    everywhere = np.ones(x.shape, bool)
    wanted = everywhere if rule.dense else taken != 0
    if rule.score == "softmax":
        made = _softmax(x, everywhere if rule.before else wanted)
    else:
        made = _score(x, rule.score)
        if rule.dense or rule.topk > 1:
            made = made / (np.where(wanted, made, 0).sum(1, keepdims=True) + _TINY)
    return np.where(wanted, made * rule.factor, 0)


def _relative(x: Array, rule: Routing) -> Array:
    size = np.abs(x).max(1, keepdims=True) if x.size else np.zeros((len(x), 1))
    return np.asarray(2 * ROUNDOFF * (x.shape[1] + 24 + 2 * size))


def _logits(s: Sampler, m: int, n: int, tied: bool, special: bool) -> Any:
    def values() -> Array:
        x = s.draw((m, n), 2.0)
        if tied:
            x = np.round(x)
        if special:
            x[0, 1], x[1, 0], x[2, :3] = np.nan, -np.inf, 90
            x[3, :], x[3, 1] = -80, -79
        return x.astype(s.dtype.numpy)

    return s.array((m, n), s.dtype, values)


def _bias(s: Sampler, n: int) -> Any:
    return s.normal(n, scale=0.3, dtype=float32)


def route(
    s: Sampler,
    m: int,
    n: int,
    rule: Routing = _USUAL,
    bias: bool = False,
    probs: DType | None = None,
    tied: bool = False,
    special: bool = False,
) -> Arguments:
    """``m`` tokens, ``n`` experts, 1024 at most; ``probs``: their type, None for the logits'; ``tied``: many
    equal logits; ``special``: NaN, Inf and large ones among them."""
    n = min(n, MOST_EXPERTS)
    return {
        "logits": _logits(s, m, n, tied, special),
        "bias": _bias(s, n) if bias else None,
        "probs": s.output(m, n, dtype=probs),
        "chosen": s.output(m, n, dtype=uint8),
        "rule": rule,
    }


def route_oracle(a: Any) -> Results:
    """The rule of the contract, a token at a time."""
    x = wide(a.logits)
    chosen = choice(x, None if a.bias is None else wide(a.bias), a.rule)
    probs = probabilities(x, chosen, a.rule)
    return {"chosen": chosen, "probs": (probs, np.nan_to_num(_relative(x, a.rule), posinf=0) * np.abs(probs))}


def route_bwd(
    s: Sampler, m: int, n: int, rule: Routing = _USUAL, probs: DType | None = None, tied: bool = False
) -> Arguments:
    """See ``route``."""
    n = min(n, MOST_EXPERTS)
    logits = _logits(s, m, n, tied, False)
    taken = s.put(choice(wide(logits.numpy()), None, rule))
    return {
        "logits": logits,
        "chosen": taken,
        "dprobs": s.normal(m, n, dtype=probs),
        "dlogits": s.output(m, n),
        "rule": rule,
    }


def route_bwd_oracle(a: Any) -> Results:
    """The derivative."""
    x, rule = wide(a.logits), a.rule
    wanted = np.ones(x.shape, bool) if rule.dense else a.chosen != 0
    g = np.where(wanted, wide(a.dprobs) * rule.factor, 0)
    relative = _relative(x, rule)
    if rule.score == "softmax":
        p = _softmax(x, np.ones(x.shape, bool) if rule.before else wanted)
        size = p * (np.abs(g) + (np.abs(g) * p).sum(1, keepdims=True))
        return {"dlogits": (p * (g - (g * p).sum(1, keepdims=True)), 2 * relative * size)}
    s, slope = _score(x, rule.score), _slope(x, rule.score)
    size = np.abs(g)
    if rule.dense or rule.topk > 1:
        inside = np.where(wanted, s, 0)
        total = inside.sum(1, keepdims=True) + _TINY
        size = (np.abs(g) + (np.abs(g) * inside).sum(1, keepdims=True) / total) / total
        g = (g - (g * inside).sum(1, keepdims=True) / total) / total
    return {"dlogits": (np.where(wanted, g * slope, 0), np.where(wanted, 3 * relative * size * slope, 0))}


def _counts(s: Sampler, n: int, kind: DType) -> Any:
    return s.array((n,), kind, lambda: s.random.integers(0, 50, n).astype(kind.numpy))


def _total(s: Sampler, total: int) -> Any:
    return s.put((total,), int64) if total else None


def aux_loss(s: Sampler, m: int, n: int, kind: DType = int32, total: int = 0) -> Arguments:
    """``kind``: of the counts; ``total``: tokens in all, 0 without."""

    def probs() -> Array:
        return np.abs(s.draw((m, n))).astype(s.dtype.numpy)

    return {
        "probs": s.array((m, n), s.dtype, probs),
        "counts": _counts(s, n, kind),
        "total": _total(s, total),
        "loss": s.output(1),
        "factor": 0.01,
    }


def _factor(a: Any) -> float:
    return float(a.factor if a.total is None else a.factor / float(a.total[0]) ** 2)


def aux_loss_oracle(a: Any) -> Results:
    """A sum of products."""
    terms = wide(a.probs) * wide(a.counts)
    loss = np.array([_factor(a) * terms.sum()])
    return {
        "loss": (loss, abs(_factor(a)) * sum_slack(np.abs(terms).sum(), terms.size) + 4 * ROUNDOFF * loss)
    }


def aux_loss_bwd(s: Sampler, m: int, n: int, kind: DType = int32, total: int = 0) -> Arguments:
    """See ``aux_loss``."""
    return {
        "dloss": s.normal(1),
        "counts": _counts(s, n, kind),
        "total": _total(s, total),
        "dprobs": s.output(m, n),
        "factor": 0.01,
    }


def aux_loss_bwd_oracle(a: Any) -> Results:
    """A row of products, in every row."""
    row = _factor(a) * wide(a.dloss) * wide(a.counts)
    return {"dprobs": (np.broadcast_to(row, a.dprobs.shape), 4 * ROUNDOFF * np.abs(row))}


# --- cases --------------------------------------------------------------------------------------------------

_RULES = {
    "softmax": Routing("softmax", 2),
    "softmax-one": Routing("softmax", 1),
    "softmax-before": Routing("softmax", 3, before=True, factor=2.5),
    "softmax-groups": Routing("softmax", 4, 4, 2),
    "softmax-before-groups": Routing("softmax", 4, 8, 4, True),
    "sigmoid": Routing("sigmoid", 4, factor=2.5),
    "sigmoid-one": Routing("sigmoid", 1),
    "sigmoid-groups": Routing("sigmoid", 8, 8, 4, factor=1.5),
    "sqrtsoftplus": Routing("sqrtsoftplus", 3),
    "sqrtsoftplus-one": Routing("sqrtsoftplus", 1, factor=0.5),
    "softmax-dense": Routing("softmax", 2, dense=True),
    "sigmoid-dense": Routing("sigmoid", 2, dense=True),
    "sqrtsoftplus-dense": Routing("sqrtsoftplus", 1, dense=True),
}
_WITH = {name: {"rule": rule, "m": 9, "n": 64} for name, rule in _RULES.items()}
_BIASED: dict[str, Options] = {
    f"{name}-bias": {**_WITH[name], "bias": True}
    for name in ("sigmoid", "sigmoid-groups", "sqrtsoftplus", "sigmoid-one")
}
_SIZES: dict[str, Options] = {
    f"{m}x{n}": {"rule": Routing(score, k), "m": m, "n": n}
    for m, n, k, score in (
        (1, 1, 1, "softmax"),
        (5, 3, 3, "sigmoid"),
        (0, 8, 2, "softmax"),
        (3, 1024, 9, "softmax"),
    )
}
_TIED: dict[str, Options] = {
    f"{name}-tied": {**_WITH[name], "tied": True}
    for name in ("softmax", "sigmoid", "softmax-groups", "softmax-dense")
}
_KINDS: dict[str, Options] = {
    f"{dtype.name}-{name}": {**_WITH[name], "dtype": dtype, "probs": probs}
    for dtype in (bfloat16, float16)
    for name, probs in (("softmax", None), ("sigmoid-groups", None), ("softmax-dense", float32))
}
_SPECIAL: dict[str, Options] = {
    f"{name}-special": {**_WITH[name], "special": True} for name in ("softmax", "softmax-groups", "sigmoid")
}
_COUNTS = product(
    "{dtype.name}-{kind.name}-{m}x{n}-{total}",
    {
        "dtype": (float32, bfloat16, float16),
        "kind": (int32, int64, float32),
        "m n": ((33, 8), (0, 4), (700, 70)),
        "total": (0, 100),
    },
)

TESTS = (
    KernelTest("route", route, route_oracle, {**_WITH, **_BIASED, **_SIZES, **_TIED, **_KINDS, **_SPECIAL}),
    KernelTest("route_bwd", route_bwd, route_bwd_oracle, {**_WITH, **_SIZES, **_TIED, **_KINDS}),
    KernelTest("aux_loss", aux_loss, aux_loss_oracle, _COUNTS),
    KernelTest("aux_loss_bwd", aux_loss_bwd, aux_loss_bwd_oracle, _COUNTS),
)
