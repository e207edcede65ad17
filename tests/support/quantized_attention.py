"""Attention over quantised operands, transcribed in NumPy float32 from the formulas of
``fp8kit.attention_quantization``, head by head and without blocks of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import blocks, codec
from fp8kit.attention_quantization import AttentionQuantization
from fp8kit.quantization import Quantizer

Array = Any
F = np.float32


def by_scale(x: Array, fmt: Any, scale: Any) -> Array:
    """Values of codes with a scale."""
    inverse = F(1) / F(scale)
    return (codec.decode(codec.encode(x * F(scale), fmt), fmt).astype(F) * inverse).astype(F)


def current_scale(x: Array, own: Quantizer) -> Any:
    amax = max(F(np.abs(x).max(initial=0)), F(own.epsilon))
    if amax == 0 or not np.isfinite(amax):
        return F(1)
    with np.errstate(over="ignore"):
        scale = min(F(own.format.max) / amax, np.finfo(F).max)
    return F(2.0 ** np.floor(np.log2(np.float64(scale)))) if own.power_2 else F(scale)


def by_lines(x: Array, own: Quantizer, along: int) -> Array:
    """Values of a head (s, d) cast by blocks along one dimension."""
    if not along:
        return by_lines(x.T, own, 1).T
    n, out = own.tile[1], np.empty_like(x)
    for start in range(0, x.shape[1], n):
        part = x[:, start : start + n]
        if own.granularity.startswith("block"):
            scale = np.array([current_scale(line, own) for line in part], F)
            inverse = F(1) / scale
        else:
            byte = blocks.scale_bytes(np.abs(part).max(1), own.format, own.scale_rule)
            scale, inverse = blocks.scales_of_bytes(byte)
        codes = codec.encode(part * scale[:, None], own.format)
        out[:, start : start + n] = codec.decode(codes, own.format).astype(F) * inverse[:, None]
    return out


def cast(x: Array, own: Quantizer, how: AttentionQuantization, along: int, scale: Any = None) -> Array:
    """An operand (b, heads, s, d) as its products read it; ``scale``: of the whole, where it is shared."""
    if own.granularity != "tensor":
        return np.stack([[by_lines(head, own, along) for head in batch] for batch in x])
    rows = how.rows_per_block
    if not rows:
        return by_scale(x, own.format, current_scale(x, own) if scale is None else scale)
    out = np.empty_like(x)
    for at in np.ndindex(*x.shape[:2]):
        for start in range(0, x.shape[2], rows):
            part = x[at][start : start + rows]
            out[at][start : start + rows] = by_scale(part, own.format, current_scale(part, own))
    return out


def rotation(d: int, n: int, signs: Array) -> Array:
    """The matrix that rows are multiplied by, (d, d)."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    whole = np.kron(np.eye(d // n), h) / np.sqrt(n)
    return signs[:, None] * whole


class Transcribed:
    """o and, with an output gradient, dq, dk, dv of q (b, h, s_q, d), k, v (b, g, s_kv, d), float32;
    ``seen``: bool (s_q, s_kv)."""

    def __init__(
        self,
        how: AttentionQuantization,
        q: Array,
        k: Array,
        v: Array,
        seen: Array,
        scale: float,
        signs: Array | None = None,
        do: Array | None = None,
        exact: bool = False,
    ) -> None:
        group, d, joint = q.shape[1] // k.shape[1], q.shape[3], how.joint
        turn = None
        if how.rotation:
            turn = rotation(d, how.rotated(d), np.ones(d) if signs is None else signs)
            q, k = ((x.astype(np.float64) @ turn).astype(F) for x in (q, k))
        shared = current_scale(np.concatenate([x.reshape(-1) for x in (q, k, v)]), how.q) if joint else None

        def made(x: Array, name: str, along: int) -> Array:
            return x if exact else cast(x, getattr(how, name), how, along, shared if name in "qkv" else None)

        def rounded(x: Array, own: Quantizer, by: Any) -> Array:
            return x if exact else by_scale(x, own.format, by)

        def repeated(x: Array) -> Array:
            return np.repeat(x, group, 1)

        def summed(x: Array) -> Array:
            return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

        scores = F(scale) * (made(q, "q", 1) @ repeated(made(k, "k", 1)).swapaxes(2, 3))
        scores = np.where(seen, scores, F(-np.inf))
        top = scores.max(-1, keepdims=True)
        e = np.exp(scores - top)
        total = e.sum(-1, keepdims=True)
        self.p = rounded(e, how.p, how.p.static_scale)
        self.o = (self.p @ repeated(made(v, "v", 0))) / total
        if how.o is not None:
            self.o = rounded(self.o, how.o, current_scale(self.o, how.o))
        if do is None:
            return
        p = np.exp(scores - (top + np.log(total)))
        upstream = made(do, "do", 1)
        delta = (upstream * self.o).sum(-1, keepdims=True)
        ds = F(scale) * p * (upstream @ repeated(made(v, "v", 1)).swapaxes(2, 3) - delta)
        ds = rounded(ds, how.ds, current_scale(ds, how.ds))
        weights = rounded(p, how.p, how.p.static_scale)
        dv = summed(weights.swapaxes(2, 3) @ made(do, "do", 0))
        dq, dk = ds @ repeated(made(k, "k", 0)), summed(ds.swapaxes(2, 3) @ made(q, "q", 0))
        if how.dqkv is not None:
            parts = [x.reshape(-1) for x in (dq, dk, dv)]
            by = [current_scale(np.concatenate(parts) if joint else x, how.dqkv) for x in parts]
            dq, dk, dv = (rounded(x, how.dqkv, s) for x, s in zip((dq, dk, dv), by, strict=True))
        if turn is not None:
            dq, dk = (x.astype(np.float64) @ turn.T for x in (dq, dk))
        self.grads = {"q": dq, "k": dk, "v": dv}
