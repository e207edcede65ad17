"""Attention over quantised operands, transcribed in NumPy float32 from the formulas of
``fp8kit.attention_quantization``, head by head and without blocks of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import blocks, codec
from fp8kit.attention_quantization import AttentionQuantization
from fp8kit.quantization import Quantizer
from fp8kit.testing.contract.dropout import philox

Array = Any
F = np.float32
_FIRST = {name: 4 + 2 * i for i, name in enumerate(("q", "k", "v", "do", "o", "dq", "dk", "dv"))}


def encoded(x: Array, own: Quantizer, words: Array | None) -> Array:
    """Codes, stochastically by ``words`` of x's shape."""
    if words is None:
        return codec.encode(x, own.format)
    return codec.encode(x, own.format, "stochastic", True, words, own.stochastic_bits)


def by_scale(x: Array, own: Quantizer, scale: Any, words: Array | None = None) -> Array:
    """Values of codes with a scale."""
    inverse, codes = F(1) / F(scale), encoded(x * F(scale), own, words)
    return (codec.decode(codes, own.format).astype(F) * inverse).astype(F)


def current_scale(x: Array, own: Quantizer) -> Any:
    amax = max(F(np.abs(x).max(initial=0)), F(own.epsilon))
    if amax == 0 or not np.isfinite(amax):
        return F(1)
    with np.errstate(over="ignore"):
        scale = min(F(own.format.max) / amax, np.finfo(F).max)
    return F(2.0 ** np.floor(np.log2(np.float64(scale)))) if own.power_2 else F(scale)


def by_lines(x: Array, own: Quantizer, along: int, words: Array | None) -> Array:
    """Values of a head (s, d) cast by blocks along one dimension."""
    if not along:
        return by_lines(x.T, own, 1, None if words is None else words.T).T
    n, out = own.tile[1], np.empty_like(x)
    for start in range(0, x.shape[1], n):
        part = x[:, start : start + n]
        if own.granularity.startswith("block"):
            scale = np.array([current_scale(line, own) for line in part], F)
            inverse = F(1) / scale
        else:
            byte = blocks.scale_bytes(np.abs(part).max(1), own.format, own.scale_rule)
            scale, inverse = blocks.scales_of_bytes(byte)
        drawn = None if words is None else words[:, start : start + n]
        codes = encoded(part * scale[:, None], own, drawn)
        out[:, start : start + n] = codec.decode(codes, own.format).astype(F) * inverse[:, None]
    return out


def cast(
    x: Array,
    own: Quantizer,
    how: AttentionQuantization,
    along: int,
    scale: Any = None,
    words: Array | None = None,
) -> Array:
    """Returns an operand (b, heads, s, d) as its products read it; ``scale``: of the whole, where it is
    shared."""
    out, rows = np.empty_like(x), how.rows_per_block
    if own.granularity == "tensor" and not rows:
        return by_scale(x, own, current_scale(x, own) if scale is None else scale, words)
    for at in np.ndindex(*x.shape[:2]):
        drawn = None if words is None else words[at]
        if own.granularity != "tensor":
            out[at] = by_lines(x[at], own, along, drawn)
            continue
        for start in range(0, x.shape[2], rows):
            part = slice(start, start + rows)
            some = None if drawn is None else drawn[part]
            out[at][part] = by_scale(x[at][part], own, current_scale(x[at][part], own), some)
    return out


def rotation(d: int, n: int, signs: Array) -> Array:
    """Returns the matrix that rows are multiplied by, (d, d)."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    whole = np.kron(np.eye(d // n), h) / np.sqrt(n)
    return signs[:, None] * whole


class Transcribed:
    """o and, with an output gradient, dq, dk, dv of q (b, h, s_q, d), k, v (b, g, s_kv, d), float32;
    ``seen``: bool (s_q, s_kv); ``pair``: seed and offset of the random words. Casts have the numbers P 1, in
    backward 2, dS 3, and from 4 on, two by two, q, k, v, dO, o, dq, dk, dv, of blocks along the features one
    more; an element's is counted in its matrix of all heads, each padded to whole blocks, of P and dS in all
    scores."""

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
        pair: tuple[int, int] = (0, 0),
    ) -> None:
        group, d, joint = q.shape[1] // k.shape[1], q.shape[3], how.joint
        turns = {
            of: rotation(d, how.rotated(d, of), np.ones(d) if signs is None else signs)
            for of in ("rotation", "rotation_v")
            if getattr(how, of)
        }

        def rotated(x: Array, of: str, back: bool = False) -> Array:
            turn = turns.get(of)
            return x if turn is None else (x.astype(np.float64) @ (turn.T if back else turn)).astype(F)

        q, k, v = rotated(q, "rotation"), rotated(k, "rotation"), rotated(v, "rotation_v")

        def words(own: Quantizer, draw: int, shape: tuple[int, ...], padded: int) -> Array | None:
            if not own.stochastic_bits:
                return None
            place = np.arange(np.prod(shape[:2]) * padded * shape[3]).reshape(*shape[:2], padded, shape[3])
            return philox(pair, (draw << 48) + place[:, :, : shape[2]]).astype(np.uint32)

        shared = current_scale(np.concatenate([x.reshape(-1) for x in (q, k, v)]), how.q) if joint else None

        def made(x: Array, name: str, along: int) -> Array:
            own, padded = getattr(how, name), -(-x.shape[2] // how.step) * how.step
            draw = _FIRST[name] + (along if own.granularity != "tensor" else 0)
            drawn = words(own, draw, x.shape, padded)
            return x if exact else cast(x, own, how, along, shared if name in "qkv" else None, drawn)

        def rounded(x: Array, own: Quantizer, by: Any, draw: int) -> Array:
            return x if exact else by_scale(x, own, by, words(own, draw, x.shape, x.shape[2]))

        def repeated(x: Array) -> Array:
            return np.repeat(x, group, 1)

        def summed(x: Array) -> Array:
            return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

        scores = F(scale) * (made(q, "q", 1) @ repeated(made(k, "k", 1)).swapaxes(2, 3))
        scores = np.where(seen, scores, F(-np.inf))
        top = scores.max(-1, keepdims=True)
        e = np.exp(scores - top)
        total = e.sum(-1, keepdims=True)
        self.p = rounded(e, how.p, how.p.static_scale, 1)
        self.o = rotated((self.p @ repeated(made(v, "v", 0))) / total, "rotation_v", back=True)
        if how.o is not None:
            self.o = rounded(self.o, how.o, current_scale(self.o, how.o), _FIRST["o"])
        if do is None:
            return
        p = np.exp(scores - (top + np.log(total)))
        do = rotated(do, "rotation_v")
        upstream = made(do, "do", 1)
        delta = (upstream * rotated(self.o, "rotation_v")).sum(-1, keepdims=True)
        ds = F(scale) * p * (upstream @ repeated(made(v, "v", 1)).swapaxes(2, 3) - delta)
        ds = rounded(ds, how.ds, current_scale(ds, how.ds), 3)
        weights = rounded(p, how.p, how.p.static_scale, 2)
        dv = summed(weights.swapaxes(2, 3) @ made(do, "do", 0))
        dq, dk = ds @ repeated(made(k, "k", 0)), summed(ds.swapaxes(2, 3) @ made(q, "q", 0))
        if how.dqkv is not None:
            parts = [x.reshape(-1) for x in (dq, dk, dv)]
            by = [current_scale(np.concatenate(parts) if joint else x, how.dqkv) for x in parts]
            first = (_FIRST[name] for name in ("dq", "dk", "dv"))
            parts = zip((dq, dk, dv), by, first, strict=True)
            dq, dk, dv = (rounded(x, how.dqkv, scale, draw) for x, scale, draw in parts)
        dq, dk = (rotated(x, "rotation", back=True) for x in (dq, dk))
        self.grads = {"q": dq, "k": dk, "v": rotated(dv, "rotation_v", back=True)}
