"""How far an implementation may be from the reference, operation by operation: the contract's own bounds, for
any arguments.

The formulas are those of ``fp8kit.testing.contract`` (each module's text derives its own) as functions of a
call's arguments. What is not named here agrees bit for bit. A bound holds for either side against exact
arithmetic; ``verify`` doubles it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.arrays import Device
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.backends.protocol import NORMALIZATIONS
from fp8kit.testing.attention import Oracle, Sizes
from fp8kit.testing.compare import epsilon, sum_slack
from fp8kit.testing.contract.dropout import keep_factors
from fp8kit.testing.contract.elementwise import ROUNDOFF
from fp8kit.testing.contract.gemm import fp8_slack, joining_slack

Array = np.ndarray[Any, Any]
Given = Mapping[str, Any]  # the arguments, their arrays as NumPy on the host as they were before the call
# argument -> bound of its elements; "cast": of the values that are cast; "params[3]" for one of a list
Slack = dict[str, Any]


def slack(operation: str, given: Given, device: Device) -> Slack:
    """Bounds of the outputs that need not agree bit for bit. Not finite where the arguments are not: then any
    finite value is right."""
    rule = RULES.get(operation)
    with np.errstate(all="ignore"):
        return {} if rule is None else rule(given, device)


def _w(x: Any) -> Array:
    return np.asarray(x).astype(np.float64)


def _size(x: Any) -> Any:
    return 0.0 if x is None else np.abs(_w(x))


def _kept(x: Any) -> Any:
    """The size of what dropout lets through or makes 0, whatever it was: where it is not finite, the result
    is neither, or none of it."""
    return np.nan_to_num(_size(x), nan=0.0, posinf=0.0)


# --- products -----------------------------------------------------------------------------------------------


def _joined(g: Given, product: Array, magnitude: Array, slack: Array, device: Device) -> Slack:
    """A product's bound with what a bias and an addend add to it."""
    joined = [_w(extra) for extra in (g["bias"], g["addend"]) if extra is not None]
    slack = slack + joining_slack(product, _dtype(g["out"]), joined, device)
    return {"out": slack + sum(sum_slack(np.abs(extra), 1) for extra in joined)}


def _gemm(g: Given, device: Device) -> Slack:
    a, b = _w(g["a"]), _w(g["b"])
    a, b = a.T if g["layout"] == "tn" else a, b.T if g["layout"] == "nt" else b
    magnitude = np.abs(a) @ np.abs(b)
    return _joined(g, a @ b, magnitude, sum_slack(magnitude, a.shape[1]), device)


def _fp8_gemm(g: Given, device: Device) -> Slack:
    m, n = g["out"].shape
    a, b = (codec.decode(g[x], g[f"{x}_format"]) * _w(g[f"{x}_scale_inv"]).reshape(-1, 1) for x in "ab")
    a, b = a[:m], b[:n]
    magnitude = np.abs(a) @ np.abs(b).T
    return _joined(
        g, a @ b.T, magnitude, fp8_slack(magnitude, a.shape[1], g["fast_accumulate"], device), device
    )


def _block_gemm(g: Given, device: Device) -> Slack:
    def operand(x: str, rows: int) -> Array:
        codes, scales = codec.decode(g[x], g[f"{x}_format"]), _w(g[f"{x}_scale_inv"])
        scales = scales.T if g[f"{x}_tile"][0] == 1 else np.repeat(scales, 128, 0)
        return np.asarray((codes * np.repeat(scales, 128, 1)[: codes.shape[0], : codes.shape[1]])[:rows])

    a, b = operand("a", g["out"].shape[0]), operand("b", g["out"].shape[1])
    magnitude = np.abs(a) @ np.abs(b).T
    return _joined(
        g,
        a @ b.T,
        magnitude,
        fp8_slack(magnitude, a.shape[1], False, device) + 4 * ROUNDOFF * magnitude,
        device,
    )


# --- rows ---------------------------------------------------------------------------------------------------


def _gain(g: Given, columns: int) -> Any:
    return columns**-0.5 if g["weight"] is None else _w(g["weight"]) + g["zero_centered_gamma"]


def _norm_fwd(g: Given, device: Device) -> Slack:
    x = _w(g["x"])
    n, layer = x.shape[1], g["normalization"] == NORMALIZATIONS[0]
    mean = x.mean(1, keepdims=True) * layer
    small = g["epsilon"] / max(n, 1) if g["normalization"] == "L2Normalization" else g["epsilon"]
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + small)
    gain = np.abs(_gain(g, n))
    mean_slack = sum_slack(np.abs(x).mean(1, keepdims=True), n) * layer
    deviation = mean_slack + 2 * ROUNDOFF * (np.abs(x) + np.abs(mean))
    relative = (
        0.5 * ((n + 8) * ROUNDOFF + 2 * deviation.max(1, keepdims=True, initial=0) * rstd) + 4 * ROUNDOFF
    )
    scaled = np.abs(x - mean) * rstd * gain
    y = gain * rstd * deviation + scaled * (relative + 4 * ROUNDOFF) + 2 * ROUNDOFF * _size(g["bias"])
    return {"y": y, "cast": y, "amax": y, "mean": mean_slack[:, 0], "rstd": (rstd * relative)[:, 0]}


def _norm_bwd(g: Given, device: Device) -> Slack:
    x, dy, rstd = _w(g["x"]), _w(g["dy"]), _w(g["rstd"])[:, None]
    m, n = x.shape
    layer = g["normalization"] == NORMALIZATIONS[0]
    mean = _w(g["mean"])[:, None] if layer else np.zeros((m, 1))
    unit = (x - mean) * rstd
    unit_slack = 3 * ROUNDOFF * (np.abs(x) + np.abs(mean)) * rstd
    d = dy * _gain(g, n)
    along, level = (d * unit).mean(1, keepdims=True), d.mean(1, keepdims=True) * layer
    along_slack = sum_slack(np.abs(d * unit).mean(1, keepdims=True), n) + (np.abs(d) * unit_slack).mean(
        1, keepdims=True
    )
    level_slack = sum_slack(np.abs(d).mean(1, keepdims=True), n) * layer
    terms = np.abs(d) + np.abs(level) + np.abs(unit * along)
    dx = rstd * (4 * ROUNDOFF * terms + level_slack + np.abs(unit) * along_slack + unit_slack * np.abs(along))
    dx = dx + 2 * ROUNDOFF * (rstd * terms + 2 * _size(g["residual"]))
    dweight = sum_slack(np.abs(dy * unit).sum(0), m) + (np.abs(dy) * unit_slack).sum(0)
    return {"dx": dx, "dweight": dweight, "dbias": sum_slack(np.abs(dy).sum(0), m)}


_RATES = {"silu": 1.0, "qgelu": 1.702}
_FIRST = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped",
}  # what a gated activation does to its first half


def _curve(x: Array, curve: str, params: tuple[float, ...]) -> tuple[Any, Any, Any, Any]:
    """Bound of a curve's value, bound of its slope, sizes of both."""
    size = np.abs(x)
    if curve == "relu":
        return ROUNDOFF * size, 0 * x, size, np.ones_like(x)
    if curve == "srelu":
        return 4 * ROUNDOFF * size**2, 8 * ROUNDOFF * size, size**2, 2 * size
    if curve == "sigmoid":
        return (
            16 * ROUNDOFF * np.ones_like(x),
            16 * ROUNDOFF * np.ones_like(x),
            np.ones_like(x),
            np.ones_like(x),
        )
    rate = (
        2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        if curve == "gelu"
        else _RATES.get(curve) or params[1]
    )
    # no smooth curve here is steeper than 1.2
    return 16 * ROUNDOFF * size, 16 * ROUNDOFF * (1 + size * rate), size, np.full_like(x, 2.0)


def _inputs(g: Given) -> tuple[Array, Array | None]:
    """The sum with the bias, and where gated its two halves."""
    x = _w(g["x"]) + (0 if g["bias"] is None else _w(g["bias"]))
    if not ACTIVATIONS[g["activation"]].gated:
        return x, None
    left, right = np.split(x, 2, axis=1)
    return left, right


def _curves(g: Given) -> tuple[tuple[Any, Any, Any, Any], Any, Any]:
    """The first half's curve, and size and bound of the second half's factor (1 and 0 where there is none). A
    bound of the sum's own rounding, which may fall on either side of a kink, is part of the curve's."""
    left, right = _inputs(g)
    params = g["params"]
    value, slope, size, steep = _curve(left, _FIRST.get(g["activation"]) or str(g["activation"]), params)
    rounded = (ROUNDOFF * np.abs(left)) if g["bias"] is not None else 0.0
    curve = value + steep * rounded, slope, size, steep
    if right is None:
        return curve, 1.0, 0.0
    offset = params[2] if params else 0.0
    return curve, np.abs(right) + abs(offset), 2 * ROUNDOFF * (np.abs(right) + abs(offset))


def _act_fwd(g: Given, device: Device) -> Slack:
    (value, _, size, _), factor, factor_slack = _curves(g)
    y = value * factor + size * factor_slack + 4 * ROUNDOFF * size * factor
    return {"y": y, "cast": y, "amax": y}


def _act_bwd(g: Given, device: Device) -> Slack:
    (value, slope, size, steep), factor, factor_slack = _curves(g)
    dy = _size(g["dy"])
    first = dy * (factor * slope + factor_slack * steep + 4 * ROUNDOFF * factor * steep)
    second = dy * (value + 4 * ROUNDOFF * size)
    dx = first if isinstance(factor, float) else np.concatenate([first, second], axis=1)
    largest = (
        dy * factor * steep
        if isinstance(factor, float)
        else np.concatenate([dy * factor * steep, dy * size], axis=1)
    )
    dbias = sum_slack(largest.sum(0), len(dy)) + (dx + epsilon(_dtype(g["x"])) * largest).sum(0)
    return {"dx": dx, "cast": dx, "amax": dx, "dbias": dbias}


def _dropout_add(g: Given, device: Device) -> Slack:
    value = (_kept(g["x"]) + _kept(g["bias"])) / (1 - g["p"])
    return {"y": 3 * ROUNDOFF * value + ROUNDOFF * _size(g["residual"])}


def _dropout_bwd(g: Given, device: Device) -> Slack:
    size = _kept(g["dy"]) / (1 - g["p"])
    total = size.sum(0)
    return {
        "dx": ROUNDOFF * size,
        "dbias": sum_slack(total, len(size)) + epsilon(_dtype(g["dy"])) / 2 * total,
    }


def _drop_path(g: Given, device: Device) -> Slack:
    return {"y": 2 * ROUNDOFF * _kept(g["x"]) / (1 - g["p"]) + ROUNDOFF * _size(g["residual"])}


def _rope(g: Given, device: Device) -> Slack:
    x = np.nan_to_num(_size(g["x"] if "x" in g else g["dy"]), nan=0.0)
    return {
        name: 12 * ROUNDOFF * x.max(-1, keepdims=True, initial=0) * np.ones_like(x) for name in ("y", "dx")
    }


# --- ends ---------------------------------------------------------------------------------------------------


def _embedding_bwd(g: Given, device: Device) -> Slack:
    ids, rows = g["ids"].reshape(-1).astype(np.int64), len(g["dtable"])
    known = (ids >= 0) & (ids < rows)
    size = np.zeros(g["dtable"].shape)
    np.add.at(size, ids[known], _size(g["dout"])[known])
    return {"dtable": (np.bincount(ids[known], minlength=rows)[:, None] + 4) * ROUNDOFF * size}


def _cross_entropy_fwd(g: Given, device: Device) -> Slack:
    x = _w(g["logits"])
    v, s = x.shape[1], g["label_smoothing"]
    lse = np.logaddexp.reduce(x, axis=1)
    lse_slack = (v + 16) * ROUNDOFF + 2 * ROUNDOFF * np.abs(lse)
    targets = g["targets"]
    inside = (targets >= 0) & (targets < v)
    picked = x[np.arange(len(x)), np.where(inside, targets, 0)]
    loss = lse_slack + 4 * ROUNDOFF * (np.abs(lse) + np.abs(picked)) + s * sum_slack(np.abs(x).mean(1), v)
    kept = targets != g["ignore_index"]
    size = np.abs(lse) + np.abs(picked) + s * np.abs(x).mean(1)
    mean = (loss[kept].mean() + sum_slack(size[kept].mean(), int(kept.sum()))) if kept.any() else 0.0
    return {"loss": loss, "lse": lse_slack, "total": np.array([mean, 0.0])}


def _cross_entropy_bwd(g: Given, device: Device) -> Slack:
    x, lse = _w(g["logits"]), _w(g["lse"])[:, None]
    s = g["label_smoothing"]
    upstream = _size(g["dloss"]).reshape(-1, 1) / (1 if g["total"] is None else max(float(g["total"][1]), 1))
    p = np.exp(x - lse)
    p_slack = p * ROUNDOFF * (np.abs(x) + np.abs(lse) + 8)
    return {"dlogits": upstream * (p_slack + 6 * ROUNDOFF * (p + 1 + s))}


# --- attention ----------------------------------------------------------------------------------------------


def _oracle(g: Given, device: Device) -> Oracle:
    spec, extras = g["spec"], g["extras"]
    order = (1, 2, 0, 3) if spec.qkv_format == "sbhd" else (0, 2, 1, 3)
    q, k, v = (g[name].transpose(order) for name in "qkv")
    do = g["do"].transpose(order) if "do" in g else np.ones((*q.shape[:3], v.shape[3]))
    n, m = (
        () if cu is None else tuple(int(length) for length in np.diff(cu))
        for cu in (extras.cu_seqlens_q, extras.cu_seqlens_kv)
    )
    sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], n, m, v.shape[3])
    keep = keep_factors(extras.rng, spec.dropout, (*q.shape[:3], k.shape[2])) if spec.dropout else None
    return Oracle(
        _dtype(g["q"]),
        sizes,
        spec,
        device.kind == "cpu",
        q,
        k,
        v,
        do,
        extras.mask,
        extras.bias,
        extras.alibi_slopes,
        extras.softmax_offset,
        keep,
    )


def _attention_fwd(g: Given, device: Device) -> Slack:
    found = _oracle(g, device)
    back = (2, 0, 1, 3) if g["spec"].qkv_format == "sbhd" else (0, 2, 1, 3)
    return {"o": found.o_slack.transpose(back), "lse": found.lse_slack}


def _attention_bwd(g: Given, device: Device) -> Slack:
    found = _oracle(g, device)
    back = (2, 0, 1, 3) if g["spec"].qkv_format == "sbhd" else (0, 2, 1, 3)
    return {
        name: found.forward_slack(name).transpose(back)
        if name[1:] in ("q", "k", "v")
        else found.forward_slack(name)
        for name in found.grads
    }


# --- many tensors -------------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    return float(np.asarray(value).reshape(-1)[0])


def _each(g: Given) -> list[tuple[str, Array, Array, float]]:
    """(index, weights that are updated, gradients after their scaling, decay) of each tensor."""
    factor = 1.0 if g["inv_scale"] is None else _number(g["inv_scale"])
    rows = zip(g["params"], g["masters"], g["grads"], g["weight_decays"], strict=True)
    return [
        (f"[{i}]", _size(p if w is None else w), _size(d) * abs(factor), decay)
        for i, (p, w, d, decay) in enumerate(rows)
    ]


def _adamw(g: Given, device: Device) -> Slack:
    found: Slack = {}
    lr, step, b1, b2 = _number(g["lr"]), _number(g["step"]), g["beta1"], g["beta2"]
    for (at, w, d, decay), m, v in zip(_each(g), g["exp_avgs"], g["exp_avg_sqs"], strict=True):
        size, square = b1 * _size(m) + (1 - b1) * d, b2 * _size(v) + (1 - b2) * d * d
        update = lr * (size / (1 - b1**step) / (np.sqrt(square / (1 - b2**step)) + g["epsilon"]) + decay * w)
        found |= {f"exp_avgs{at}": 8 * ROUNDOFF * size, f"exp_avg_sqs{at}": 8 * ROUNDOFF * square}
        found |= dict.fromkeys((f"params{at}", f"masters{at}"), 32 * ROUNDOFF * update + 2 * ROUNDOFF * w)
    return found


def _sgd(g: Given, device: Device) -> Slack:
    found: Slack = {}
    lr, momentum = _number(g["lr"]), g["momentum"]
    for (at, w, d, decay), b in zip(_each(g), g["buffers"], strict=True):
        size = d + decay * w + momentum * _size(b)
        found[f"buffers{at}"] = 8 * ROUNDOFF * size
        found |= dict.fromkeys((f"params{at}", f"masters{at}"), 16 * ROUNDOFF * lr * size + 2 * ROUNDOFF * w)
    return found


def _l2norm(g: Given, device: Device) -> Slack:
    norm = math.sqrt(sum(float(np.square(_w(x)).sum()) for x in g["xs"]))
    return {"out": sum_slack(norm, sum(x.size for x in g["xs"])) / 2}


def _clip(g: Given, device: Device) -> Slack:
    return {f"xs[{i}]": 8 * ROUNDOFF * _size(x) for i, x in enumerate(g["xs"])}


def _columns(argument: str, output: str) -> Callable[[Given, Device], Slack]:
    return lambda g, device: {output: sum_slack(_size(g[argument]).sum(0), len(g[argument]))}


def _dtype(x: Array) -> Any:
    from fp8kit import formats

    return formats.dtype(x.dtype)


RULES: dict[str, Callable[[Given, Device], Slack]] = {
    "quantize_transpose": _columns("x", "dbias"),
    "gemm": _gemm,
    "fp8_gemm": _fp8_gemm,
    "block_gemm": _block_gemm,
    "norm_fwd": _norm_fwd,
    "norm_bwd": _norm_bwd,
    "act_fwd": _act_fwd,
    "act_bwd": _act_bwd,
    "dropout_add": _dropout_add,
    "dropout_bwd": _dropout_bwd,
    "drop_path": _drop_path,
    "attention_fwd": _attention_fwd,
    "attention_bwd": _attention_bwd,
    "rope_fwd": _rope,
    "rope_bwd": _rope,
    "embedding_bwd": _embedding_bwd,
    "cross_entropy_fwd": _cross_entropy_fwd,
    "cross_entropy_bwd": _cross_entropy_bwd,
    "adamw_": _adamw,
    "sgd_": _sgd,
    "l2norm": _l2norm,
    "clip_": _clip,
    "sum_rows": _columns("x", "out"),
}
