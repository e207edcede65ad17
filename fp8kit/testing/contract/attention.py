"""Contract cases of the attention, against float64.

Tolerances, with u = 2^-24: a score's error is that of a sum of d products; a probability's relative error is twice the largest score error
(score and log-sum-exp) plus (s_kv + 16) u. Tensor-core attention rounds P and dS to the operands' 16-bit dtype before the next product: off
the CPU, half an epsilon of each term is allowed for that, and as much for what P's rounding did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16, float16, float32
from fp8kit.testing.compare import assert_close, assert_same_bits, epsilon
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.dropout import RNG, keep_factors
from fp8kit.testing.contract.elementwise import ROUNDOFF, Array, draw, host, table, wide


@dataclass(unsafe_hash=True)
class Spec:
    """The contract's AttentionSpec."""

    qkv_format: str = "sbhd"
    mask: str = "no_mask"
    softmax_scale: float = 0.3
    dropout: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Batches, query and key length, query and key heads, depth; true lengths of each batch where the mask is a padding one."""

    b: int = 2
    s_q: int = 17
    s_kv: int = 17
    h: int = 2
    h_kv: int = 2
    d: int = 16
    lengths_q: tuple[int, ...] = field(default=())
    lengths_kv: tuple[int, ...] = field(default=())


class Problem:
    """Inputs (b, h, s, d), float64 results, and the error bounds of a case."""

    def __init__(self, dtype: DType, sizes: Sizes, spec: Spec, device: Device) -> None:
        z = sizes
        self.dtype, self.sizes, self.spec = dtype, sizes, spec
        self.q, self.do = draw(1, (z.b, z.h, z.s_q, z.d), dtype), draw(4, (z.b, z.h, z.s_q, z.d), dtype)
        self.k, self.v = draw(2, (z.b, z.h_kv, z.s_kv, z.d), dtype), draw(3, (z.b, z.h_kv, z.s_kv, z.d), dtype)
        group = z.h // z.h_kv
        q, do = wide(self.q), wide(self.do)
        k, v = (np.repeat(wide(x), group, axis=1) for x in (self.k, self.v))
        seen = np.ones((z.b, 1, z.s_q, z.s_kv), bool)
        self.rows = np.ones((z.b, 1, z.s_q), bool)
        for i in range(z.b if z.lengths_q else 0):
            self.rows[i, :, z.lengths_q[i] :] = False
            seen[i, :, z.lengths_q[i] :] = False
            seen[i, :, :, z.lengths_kv[i] :] = False
        if "causal" in spec.mask:
            seen &= np.tri(z.s_q, z.s_kv, dtype=bool)
        scores = np.where(seen, spec.softmax_scale * q @ k.swapaxes(-1, -2), -np.inf)
        top = np.where(seen.any(-1, keepdims=True), scores.max(-1, keepdims=True, initial=-np.inf), 0)
        with np.errstate(divide="ignore"):
            self.lse = (np.log(np.exp(scores - top).sum(-1, keepdims=True)) + top)[..., 0]
        p = np.where(seen, np.exp(scores - np.where(np.isfinite(self.lse), self.lse, 0)[..., None]), 0)
        factors = keep_factors(RNG, spec.dropout, scores.shape) if spec.dropout else np.ones(scores.shape)
        self.o = (p * factors) @ v
        largest = spec.softmax_scale * (np.abs(q) @ np.abs(k).swapaxes(-1, -2)).max(initial=0)
        self.score_error = (z.d + 6) * ROUNDOFF * largest
        relative = 2 * self.score_error + (z.s_kv + z.d + 16) * ROUNDOFF
        if device.kind != "cpu" and dtype is not float32:
            relative += epsilon(dtype)
        self.o_slack = relative * (p * factors) @ np.abs(v)
        # backward, from the rounded o and lse that the kernel is given
        self.o_given, self.lse_given = self.o.astype(np.float32).astype(dtype.numpy), self.lse.astype(np.float32)
        delta = (do * wide(self.o_given)).sum(-1, keepdims=True)
        dp = do @ v.swapaxes(-1, -2) * factors
        ds = p * (dp - delta)
        size = p * (np.abs(do) @ np.abs(v).swapaxes(-1, -2) * factors + np.abs(do * wide(self.o_given)).sum(-1, keepdims=True))
        relative += (z.s_q * group + 2 * z.d + 8) * ROUNDOFF
        scale = spec.softmax_scale

        def over_group(x: Array) -> Array:
            return np.asarray(x.reshape(z.b, z.h_kv, group, *x.shape[2:]).sum(2))

        turned, turned_size = ds.swapaxes(-1, -2), size.swapaxes(-1, -2)
        kept = (p * factors).swapaxes(-1, -2)
        self.grads = {"dq": scale * ds @ k, "dk": over_group(scale * turned @ q), "dv": over_group(kept @ do)}
        self.slacks = {"dq": relative * scale * size @ np.abs(k), "dk": over_group(relative * scale * turned_size @ np.abs(q)),
                       "dv": over_group(relative * kept @ np.abs(do))}

    def place(self, x: Array) -> Array:
        """(b, h, s, d) values in the spec's order of dimensions."""
        return np.ascontiguousarray(x.transpose((2, 0, 1, 3) if self.spec.qkv_format == "sbhd" else (0, 2, 1, 3)))

    def offsets(self, device: Device) -> tuple[ArrayView | None, ArrayView | None]:
        """cu_seqlens of queries and keys, None without padding."""
        if not self.sizes.lengths_q:
            return None, None
        q, kv = (put(np.concatenate([[0], np.cumsum(n)]).astype(np.int32), device) for n in (self.sizes.lengths_q, self.sizes.lengths_kv))
        return q, kv

    def room(self, kernels: Kernels, backward: bool, device: Device) -> ArrayView:
        """The workspace."""
        nbytes = kernels.attention_workspace(self.place(self.q).shape, self.place(self.k).shape, self.dtype, self.spec, backward)
        return workspace(nbytes, device)


def _packed(parts: tuple[Array, ...], device: Device, blank: bool = False) -> list[ArrayView]:
    """Arrays of equal shape as views into one buffer, next to each other along the heads (a layer's joint projection)."""
    heads = parts[0].shape[2]
    joint = np.concatenate(parts, axis=2)
    whole = poisoned(joint.shape, _dtype(parts[0]), device) if blank else put(joint, device)
    return [whole.slice(2, i * heads, heads) for i in range(len(parts))]


def _dtype(x: Array) -> DType:
    return next(d for d in HIGH_PRECISION if d.numpy == x.dtype)


def _fwd(dtype: DType, sizes: Sizes, spec: Spec, packed: bool = False) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        case = Problem(dtype, sizes, spec, device)
        parts = tuple(case.place(x) for x in (case.q, case.k, case.v))
        q, k, v = _packed(parts, device) if packed else (put(x, device) for x in parts)
        o, lse = poisoned(parts[0].shape, dtype, device), poisoned((sizes.b, sizes.h, sizes.s_q), float32, device)
        kernels.attention_fwd(q, k, v, o, lse, *case.offsets(device), put(RNG, device) if spec.dropout else None, spec,
                              case.room(kernels, False, device), 0)
        assert_close("o", get(o), case.place(case.o), dtype, case.place(case.o_slack))
        rows = np.broadcast_to(case.rows, case.lse.shape)
        slack = case.score_error + (sizes.s_kv + 16) * ROUNDOFF + 2 * ROUNDOFF * np.abs(np.where(np.isfinite(case.lse), case.lse, 0))
        assert_close("lse", np.where(rows, get(lse), 0), np.where(rows, case.lse, 0), float32, slack)

    return run


def _bwd(dtype: DType, sizes: Sizes, spec: Spec, packed: bool = False) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        case = Problem(dtype, sizes, spec, device)
        parts = tuple(case.place(x) for x in (case.q, case.k, case.v))
        q, k, v = _packed(parts, device) if packed else (put(x, device) for x in parts)
        results = []
        for _ in range(2):
            grads = _packed(parts, device, True) if packed else [poisoned(x.shape, dtype, device) for x in parts]
            kernels.attention_bwd(put(case.place(case.do), device), q, k, v, put(case.place(case.o_given), device),
                                  put(case.lse_given, device), grads[0], grads[1], grads[2], *case.offsets(device),
                                  put(RNG, device) if spec.dropout else None, spec, True, case.room(kernels, True, device), 0)
            results.append([host(g) for g in grads])
        for name, got, again in zip(("dq", "dk", "dv"), *results, strict=True):
            assert_close(name, got, case.place(case.grads[name]), dtype, case.place(case.slacks[name]))
            assert_same_bits(f"{name}, the second time", again, got)

    return run


_FORMATS = ("sbhd", "bshd")
_PADDED = Sizes(3, 17, 33, 2, 2, 16, (17, 5, 1), (33, 9, 20))
_CAUSAL_PADDED = Sizes(3, 33, 33, 2, 2, 16, (33, 5, 20), (33, 5, 20))

# name -> sizes, spec, packed: run forward and backward, in every high-precision dtype
_ALL = {
    **{f"{f}-{m}": (Sizes(), Spec(f, m), False) for f in _FORMATS for m in ("no_mask", "causal")},
    **{f"{f}-padding": (_PADDED, Spec(f, "padding"), False) for f in _FORMATS},
    **{f"{f}-padding_causal": (_CAUSAL_PADDED, Spec(f, "padding_causal"), False) for f in _FORMATS},
    **{f"{f}-groups": (Sizes(h=6, h_kv=2, s_q=19, s_kv=19, d=8), Spec(f, "causal"), False) for f in _FORMATS},
    **{f"{f}-packed": (Sizes(h=3, h_kv=3), Spec(f, "causal"), True) for f in _FORMATS},
    "cross": (Sizes(s_q=9, s_kv=40, d=64), Spec(), False),
    "one-query-one-head": (Sizes(b=1, s_q=1, s_kv=21, h=1, h_kv=1), Spec(), False),
    "long": (Sizes(b=1, s_q=300, s_kv=300, h=1, h_kv=1, d=32), Spec(mask="causal"), False),
}
# only in float32: dropout (vendor libraries draw their own masks in 16 bits), an odd depth, a batch whose keys are all padding, unequal
# causal lengths
_FLOAT32 = {
    "dropout": (Sizes(s_kv=23), Spec(dropout=0.25), False),
    "dropout-causal-groups": (Sizes(s_q=150, s_kv=150, h=4, b=1), Spec(mask="causal", dropout=0.1), False),
    "dropout-padding": (_PADDED, Spec("bshd", "padding", dropout=0.5), False),
    "odd-depth": (Sizes(d=5), Spec(mask="causal"), False),
    "nothing-to-see": (Sizes(2, 17, 33, 2, 2, 16, (17, 5), (33, 0)), Spec(mask="padding"), False),
    "causal-long-queries": (Sizes(s_q=33, s_kv=17), Spec(mask="causal"), False),
    "causal-long-keys": (Sizes(s_q=17, s_kv=33), Spec(mask="causal"), False),
}

CASES = [
    *(case for kernel, make in (("attention_fwd", _fwd), ("attention_bwd", _bwd)) for case in (
        *table(kernel, {f"{d.name}-{name}": make(d, *row) for d in (float32, bfloat16, float16) for name, row in _ALL.items()}),
        *table(kernel, {f"float32-{name}": make(float32, *row) for name, row in _FLOAT32.items()}),
    )),
]
