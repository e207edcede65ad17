"""Attention in FP8 against float64 (``fp8kit.testing.fp8_attention``). Heads have 128 features, the only ones
that cuDNN's backward for Hopper takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.backends.protocol import SPECS
from fp8kit.formats import E4M3, E5M2, Format, float32
from fp8kit.quantization import Quantizer
from fp8kit.testing.attention import Sizes
from fp8kit.testing.contract import Arguments, Array, KernelTest, Options, Results, Sampler, product, snapshot
from fp8kit.testing.contract import attention as plain
from fp8kit.testing.contract.sampler import narrowed
from fp8kit.testing.fp8_attention import Fp8Oracle, fp8_results, scale_of

_P = Quantizer(E4M3, scale_source="static", static_scale=256.0)
_DS = Quantizer(E5M2)
_RULES: Options = {"qkv_format": "bshd", "zero_padded": True, "softmax_scale": 0.08}
_SMALL: Options = {"s_q": 48, "s_kv": 48, "d": 128}


def _codes(x: Array, lengths: tuple[int, ...], how: Quantizer) -> tuple[Array, Any]:
    """Codes with 0 in padding, and the inverse of their scale."""
    x = plain.filled(x, lengths, 0)
    scale = np.float32(scale_of(float(np.abs(x).max(initial=0)), how))
    return narrowed(x * scale, how.format), np.float32(1) / scale


def fp8_attention_fwd(
    s: Sampler, m: int, n: int, forward: Format = E4M3, share: float = 1.0, **options: Any
) -> Arguments:
    """``share``: of q and k."""
    z, rules = plain.problem(m, n, (_RULES if m else _RULES | _SMALL) | options, 2048, 128)
    how = Quantizer(forward)
    shapes = {"q": (z.h, z.s_q), "k": (z.h_kv, z.s_kv), "v": (z.h_kv, z.s_kv)}
    made: dict[str, Any] = {}
    inverses = []
    for name, (heads, length) in shapes.items():
        x = s.draw((z.b, heads, length, z.depth_v if name == "v" else z.d), 1.0 if name == "v" else share)
        codes, inverse = _codes(x, z.lengths_q if name == "q" else z.lengths_kv, how)
        made[name] = s.put(codes)
        inverses.append(inverse)
    static = dataclasses.replace(_P, format=forward, static_scale=256.0 if forward == E4M3 else 2.0**15)
    return {
        **made,
        "scale_invs": s.put(inverses, float32),
        "o": s.output(z.b, z.h, z.s_q, z.depth_v, dtype=float32),
        "lse": s.output(z.b, z.h, z.s_q, dtype=float32),
        "extras": plain.extras(s, z, rules, ((), ())),
        "spec": rules,
        "p": static,
        "out": how,
    }


def _oracle(a: Any, backward: bool) -> Fp8Oracle:
    sizes = Sizes.of(a.q, a.v, a.extras.cu_seqlens_q, a.extras.cu_seqlens_kv)
    inverses = a.scale_invs.astype(np.float64)

    def values(codes: Array, i: int, fmt: Format) -> Array:
        return np.asarray(codec.decode(codes, fmt) * inverses[i], np.float32)

    q, k, v = (values(x, i + backward, a.p.format) for i, x in enumerate((a.q, a.k, a.v)))
    do, given, ds = np.ones((*q.shape[:3], sizes.d_v)), None, _DS
    if backward:
        do, ds = values(a.do, 0, a.ds.format), a.ds
        scale = np.float32(scale_of(float(np.abs(a.o).max(initial=0)), a.out))
        codes = codec.encode(a.o * scale, a.out.format)
        given = codec.decode(codes, a.out.format).astype(np.float64) / scale
    return Fp8Oracle(a.device.kind == "cpu", sizes, a.spec, a.p, ds, q, k, v, do, given)


def fp8_attention_fwd_oracle(a: Any) -> Results:
    """See ``Fp8Oracle``."""
    return fp8_results(_oracle(a, False), a.out, None)


def fp8_attention_bwd(
    s: Sampler,
    m: int,
    n: int,
    backward: Quantizer = _DS,
    groups: tuple[int, int, int] = (0, 1, 2),
    deterministic: bool = True,
    run_forward: bool = False,
    **options: Any,
) -> Arguments:
    """o and lse are the oracle's, or with ``run_forward`` the kernel's."""
    made = fp8_attention_fwd(s, m, n, **options)
    codes, inverse = _codes(s.draw(made["o"].shape, 0.01), options.get("lengths_q", ()), backward)
    host = snapshot(made, s.device)
    if run_forward:
        plain.run(s, SPECS["fp8_attention_fwd"], made)
    else:
        exact = _oracle(host, False)
        made |= {"o": s.put(exact.o.astype(np.float32)), "lse": s.put(exact.lse.astype(np.float32))}
    inverses = np.concatenate([[inverse], host.scale_invs])
    return {
        **made,
        "scale_invs": s.put(inverses, float32),
        "do": s.put(codes),
        **{f"d{name}": s.output(*made[name].shape, dtype=float32) for name in "qkv"},
        "ds": backward,
        "dqkv": backward,
        "groups": groups,
        "deterministic": deterministic,
    }


def fp8_attention_bwd_oracle(a: Any) -> Results:
    """See ``Fp8Oracle``."""
    return fp8_results(_oracle(a, True), a.out, a.dqkv, a.groups)


_CAUSAL: Options = {"window": (-1, 0)}
_PADDED: Options = {"padded": True, "b": 3, "lengths_q": (48, 7, 20), "lengths_kv": (48, 7, 20)}
_FORMS: dict[str, Options] = {
    "no_mask": {},
    "causal": _CAUSAL,
    "sbhd": {"qkv_format": "sbhd", **_CAUSAL},
    "padding": _PADDED,
    "padding-causal": {**_PADDED, **_CAUSAL},
    "padding-cross": {**_PADDED, "s_kv": 70, "lengths_kv": (70, 33, 1)},
    "groups": {"h": 4, "h_kv": 2, **_CAUSAL},
    "cross": {"s_q": 33, "s_kv": 150},
    "long": {"b": 1, "s_q": 300, "s_kv": 300, **_CAUSAL},
    "peaked": {"share": 4.0, **_CAUSAL},
}
_FORWARD: dict[str, Options] = {
    **_FORMS,
    **product("depth-{d}", {"d": (16, 64, 256)}),
    "depth-of-v": {"d": 64, "d_v": 32},
}
_BACKWARD: dict[str, Options] = {
    **_FORMS,
    "e4m3": {"backward": Quantizer(E4M3), **_CAUSAL},
    "power-2": {"backward": Quantizer(E5M2, scale_rule="power_2")},
    "one-scale": {"groups": (0, 0, 0)},
    "two-scales": {"groups": (0, 1, 1), **_CAUSAL},
    "not-deterministic": {"deterministic": False, **_CAUSAL},
}
_TIMED: Options = {"softmax_scale": 0.0883883, **_CAUSAL}

TESTS = (
    KernelTest(
        "fp8_attention_fwd",
        fp8_attention_fwd,
        fp8_attention_fwd_oracle,
        product("{case}", {"case": _FORWARD}),
        _TIMED,
    ),
    KernelTest(
        "fp8_attention_bwd",
        fp8_attention_bwd,
        fp8_attention_bwd_oracle,
        product("{case}", {"case": _BACKWARD}),
        {**_TIMED, "run_forward": True},
    ),
)
