"""Routers in NumPy: keys, a stable sort from the largest down, probabilities in float32."""

from __future__ import annotations

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.router import Routing
from fp8kit.backends.reference._numpy import Array, Float32, blocks, f32, quiet, store

_TINY = np.float32(1e-20)
_ONE = np.float32(1)


@quiet
def route(
    logits: ArrayView, bias: ArrayView | None, probs: ArrayView, chosen: ArrayView, rule: Routing, stream: int
) -> None:
    """See ``protocol.Kernels.route``."""
    x, taken = f32(logits), chosen.numpy()
    made = np.empty(probs.shape, np.float32)
    for part in blocks(*x.shape):
        keys = _keys(x[part], rule)
        if rule.dense:
            taken[part] = _largest(keys, rule.topk)
        else:
            taken[part] = _choose(keys if bias is None else keys + f32(bias), rule)
        made[part] = _probs(x[part], taken[part] != 0, rule)
    store(probs, made)


@quiet
def route_bwd(
    logits: ArrayView, chosen: ArrayView, dprobs: ArrayView, dlogits: ArrayView, rule: Routing, stream: int
) -> None:
    """See ``protocol.Kernels.route_bwd``."""
    x, g, taken = f32(logits), f32(dprobs), chosen.numpy() != 0
    made = np.empty(x.shape, np.float32)
    for part in blocks(*x.shape):
        made[part] = _backward(x[part], taken[part], g[part], rule)
    store(dlogits, made)


@quiet
def aux_loss(
    probs: ArrayView,
    counts: ArrayView,
    total: ArrayView | None,
    loss: ArrayView,
    factor: float,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``protocol.Kernels.aux_loss``. Summed in float64."""
    sums = probs.numpy().astype(np.float64).sum(0) * counts.numpy().astype(np.float64)
    store(loss, np.array([_factor(factor, total) * sums.sum()]).astype(np.float32))


@quiet
def aux_loss_bwd(
    dloss: ArrayView,
    counts: ArrayView,
    total: ArrayView | None,
    dprobs: ArrayView,
    factor: float,
    stream: int,
) -> None:
    """See ``protocol.Kernels.aux_loss_bwd``."""
    row = _factor(factor, total) * dloss.numpy().astype(np.float64) * counts.numpy().astype(np.float64)
    store(dprobs, np.broadcast_to(row.astype(np.float32), dprobs.shape))


def _factor(factor: float, total: ArrayView | None) -> float:
    return factor if total is None else float(np.float64(factor) / np.float64(total.numpy()[0]) ** 2)


def _keys(x: Float32, rule: Routing) -> Float32:
    """Returns what experts are chosen by, the bias aside."""
    if rule.score != "softmax":
        return _score(x, rule.score)
    return _softmax(x, np.ones(x.shape, bool)) if rule.before and not rule.dense else x


def _largest(keys: Float32, count: int, among: Array | None = None) -> Array:
    """Returns where the ``count`` largest keys of each row are, of those ``among`` which they must be."""
    order = np.where(np.isnan(keys), np.inf, -keys)  # ascending; NaN behind -Inf's Inf by its index alone
    rank = np.isnan(keys).astype(np.int8)
    if among is not None:
        rank = np.where(among, rank, 2)
    places = np.lexsort((order, rank), axis=1)[:, :count]
    found = np.zeros(keys.shape, bool)
    np.put_along_axis(found, places, True, 1)
    return found


def _choose(keys: Float32, rule: Routing) -> Array:
    if not rule.groups:
        return _largest(keys, rule.topk)
    rows, experts = keys.shape
    own = keys.reshape(rows * rule.groups, experts // rule.groups)
    best = _largest(own, rule.topk // rule.group_topk)
    descending = -np.sort(-np.where(best, own, -np.inf), axis=1)[:, : rule.topk // rule.group_topk]
    descending[np.isnan(np.where(best, own, 0)).any(1), 0] = np.nan
    totals = descending[:, 0].copy()
    for column in descending.T[1:]:
        totals += column
    kept = _largest(totals.reshape(rows, rule.groups), rule.group_topk)
    return _largest(keys, rule.topk, np.repeat(kept, experts // rule.groups, 1))


def _softmax(x: Float32, among: Array) -> Float32:
    """Softmax over those ``among`` each row, 0 elsewhere."""
    inside: Float32 = np.where(among, x, np.float32(-np.inf))
    made = np.exp(inside - inside.max(1, keepdims=True))
    return np.where(among, made / made.sum(1, keepdims=True), np.float32(0))


def _sigmoid(x: Float32) -> Float32:
    return np.asarray(_ONE / (_ONE + np.exp(-x)))


def _score(x: Float32, score: str) -> Float32:
    if score == "sigmoid":
        return _sigmoid(x)
    return np.sqrt(np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x))))  # type: ignore[no-any-return]


def _slope(x: Float32, s: Float32, score: str) -> Float32:
    """ds / dx."""
    if score == "sigmoid":
        return s * _sigmoid(-x)
    return np.where(s == 0, np.float32(0), _sigmoid(x) / (s + s))


def _probs(x: Float32, taken: Array, rule: Routing) -> Float32:
    everywhere = np.ones_like(taken)
    if rule.score == "softmax":
        made = _softmax(x, everywhere if rule.before or rule.dense else taken)
    else:
        made = _score(x, rule.score)
        if rule.dense or rule.topk > 1:
            inside = np.where(everywhere if rule.dense else taken, made, np.float32(0))
            made = made / (inside.sum(1, keepdims=True) + _TINY)
    return np.where(everywhere if rule.dense else taken, made * np.float32(rule.factor), 0)


def _backward(x: Float32, taken: Array, g: Float32, rule: Routing) -> Float32:
    wanted = np.ones_like(taken) if rule.dense else taken
    g = np.where(wanted, g * np.float32(rule.factor), np.float32(0))
    if rule.score == "softmax":
        p = _softmax(x, np.ones_like(taken) if rule.before else wanted)
        return p * (g - (g * p).sum(1, keepdims=True))  # type: ignore[no-any-return]
    s = _score(x, rule.score)
    slope = _slope(x, s, rule.score)
    if rule.dense or rule.topk > 1:
        inside = np.where(wanted, s, np.float32(0))
        total = inside.sum(1, keepdims=True) + _TINY
        g = (g - (g * inside).sum(1, keepdims=True) / total) / total
    return np.where(wanted, g * slope, np.float32(0))
