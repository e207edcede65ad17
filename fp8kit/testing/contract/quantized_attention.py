"""Attention over quantised operands against float64 (``fp8kit.testing.quantized_attention``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.backends.protocol import SPECS
from fp8kit.formats import E4M3, E5M2, float32
from fp8kit.quantization import Quantizer
from fp8kit.testing.attention import ORDERS
from fp8kit.testing.contract import Arguments, Array, KernelTest, Options, Results, Sampler, product, snapshot
from fp8kit.testing.contract import attention as plain
from fp8kit.testing.contract.running_sums import BATCH, GOOD, LENGTH, bad_cases
from fp8kit.testing.quantized_attention import QuantizedOracle

_P = Quantizer(E4M3, scale_source="static", static_scale=256.0)
_DS = Quantizer(E5M2)


def clear_padding_(
    s: Sampler,
    m: int,
    n: int,
    b: int = BATCH,
    h: int = 2,
    length: int = LENGTH,
    d: int = 5,
    sums: Any = GOOD,
    padding: float = np.nan,
) -> Arguments:
    """``padding``: the last row of each head."""
    if m:
        b, h, length, d = 4, max(1, n // 64), max(1, m // 4), 64
        sums = tuple(range(0, b * length + 1, length))
    x = s.draw((b, h, length, d))
    x[:, :, -1] = padding
    return {"x": s.put(x), "cu_seqlens": s.sums(*sums)}


def clear_padding_oracle(a: Any) -> Results:
    """See ``protocol.Kernels.clear_padding_``."""
    out = a.x.copy()
    for batch, length in enumerate(np.diff(a.cu_seqlens)):
        out[batch, :, max(int(length), 0) :] = 0
    return {"x": out}


def _narrow(x: Array, share: float = 0.25) -> Array:
    """Values of E4M3."""
    return codec.decode(codec.encode(x / share, E4M3), E4M3).astype(np.float32) * np.float32(share)


def quantized_attention_fwd(
    s: Sampler, m: int, n: int, p: Quantizer = _P, ds: Quantizer = _DS, **options: Any
) -> Arguments:
    """All arrays in float32, whatever the sampler's dtype."""
    rng = s.rng() if p.stochastic_bits or ds.stochastic_bits else None
    made = plain.attention_fwd(s, m, n, padding=0.0, **options)
    host = snapshot({name: made[name] for name in ("q", "k", "v", "do", "extras")}, s.device)
    narrow = {name: s.put(_narrow(getattr(host, name))) for name in ("q", "k", "v", "do")}
    bias = host.extras.bias
    extras = made["extras"]._replace(bias=None if bias is None else s.put(bias, float32))
    return {**made, **narrow, "o": s.output(*made["o"].shape, dtype=float32)} | {
        "extras": extras,
        "p": p,
        "rng": rng,
    }


def _oracle(a: Any, backward: bool) -> QuantizedOracle:
    sizes, (q, k, v, do), extras = plain.call_of(a, backward)
    order, rows = ORDERS[a.spec.qkv_format], (do, q, k)
    if backward:
        rows = tuple(x.transpose(order) for x in (a.do_rows, a.q_rows, a.k_rows))
    ds = a.ds if backward else _DS
    return QuantizedOracle(sizes, a.spec, a.p, ds, q, k, v, do, rows, a.rng, *extras)


def quantized_attention_fwd_oracle(a: Any) -> Results:
    """See ``QuantizedOracle``."""
    found = _oracle(a, False)
    return {
        "o": (plain.placed(found.o, a.spec), plain.placed(found.o_slack, a.spec)),
        "lse": (found.lse, found.lse_slack),
    }


def quantized_attention_bwd(
    s: Sampler, m: int, n: int, ds: Quantizer = _DS, run_forward: bool = False, **options: Any
) -> Arguments:
    """The operands of products over rows are others than those of products over features. o and lse are the
    oracle's, or with ``run_forward`` the kernel's."""
    made = quantized_attention_fwd(s, m, n, ds=ds, **options)
    host = snapshot(made, s.device)
    if run_forward:
        plain.run(s, SPECS["quantized_attention_fwd"], made)
    else:
        exact = _oracle(host, False)
        made |= {"o": s.put(plain.placed(exact.o_given, host.spec)), "lse": s.put(exact.lse_given)}
    rows = {f"{name}_rows": s.put(_narrow(getattr(host, name), 0.3)) for name in ("do", "q", "k")}
    return {**made, **rows, **plain.gradients(s, made, float32), "ds": ds}


def quantized_attention_bwd_oracle(a: Any) -> Results:
    """See ``QuantizedOracle``."""
    return plain.results_of(_oracle(a, True), a)


_ALL: dict[str, Options] = {
    name: options
    for name, options in {**plain.ALL_CASES, **plain.FLOAT32_CASES}.items()
    if "parts" not in options and not options.get("zero_padded")
} | {
    "p-448": {"p": Quantizer(E4M3, scale_source="static", static_scale=448.0)},
    "p-stochastic": {"p": replace(_P, stochastic_bits=32)},
    "p-8-bits-many-tiles": {
        "p": replace(_P, stochastic_bits=8),
        "s_q": 140,
        "s_kv": 75,
        "dropout": 0.25,
        "placed": False,
    },
    "many-tiles": {"s_q": 300, "s_kv": 140, "h": 4, "h_kv": 2, "window": (-1, 0)},
}
_BACKWARD: dict[str, Options] = _ALL | {
    "ds-e4m3-power-2": {"ds": Quantizer(E4M3, scale_rule="power_2")},
    "ds-stochastic": {"ds": replace(_DS, stochastic_bits=32), "window": (-1, 0)},
    "ds-8-bits": {"ds": replace(_DS, stochastic_bits=8), "p": replace(_P, stochastic_bits=8)},
    "p-and-ds-e5m2": {"p": Quantizer(E5M2, scale_source="static", static_scale=2.0**15)},
}
_TIMED: Options = {"window": (-1, 0), "softmax_scale": 0.125}

TESTS = (
    KernelTest(
        "clear_padding_",
        clear_padding_,
        clear_padding_oracle,
        {
            "lengths": {},
            "one": {"b": 1, "h": 1, "d": 1, "sums": (0, 3)},
            **{
                name: {"sums": own["sums"], "known": own["known"], "padding": 1.0}
                for name, own in bad_cases({}, {"sums": ("sums",)}).items()
                if "float32" in name
            },
        },
    ),
    KernelTest(
        "quantized_attention_fwd",
        quantized_attention_fwd,
        quantized_attention_fwd_oracle,
        product("{case}", {"case": _ALL}),
        _TIMED,
    ),
    KernelTest(
        "quantized_attention_bwd",
        quantized_attention_bwd,
        quantized_attention_bwd_oracle,
        product("{case}", {"case": _BACKWARD}),
        {**_TIMED, "run_forward": True},
    ),
)
