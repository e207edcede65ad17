"""CUDA attention in FP8: cuDNN against float64, beside the emulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import slowness
from fp8kit.arrays import Device
from fp8kit.attention_quantization import attention_of
from fp8kit.autograd.call import apply
from fp8kit.backends.cuda import cudnn_fp8, fp8_attention
from fp8kit.backends.cuda.attention_problem import Problem
from fp8kit.formats import E4M3, E5M2
from fp8kit.ops import attention_native
from fp8kit.ops.attention import AttentionSpec, attention
from fp8kit.quantization import Quantizer
from fp8kit.testing import assert_same_bits, relative_error
from fp8kit.testing.attention import Rules, attention_oracle

CUDA = Device("cuda", 0)
HYBRID = attention_of(Quantizer(E4M3), Quantizer(E5M2))
B, H, G, S, D = 2, 4, 2, 512, 128
BASE = AttentionSpec(H, D, G, "bshd", "causal", layout="separate", quantized=HYBRID)
SUMS = np.array([0, 512, 712], np.int32)
CASES = {
    "causal": BASE,
    "no mask": replace(BASE, mask="no_mask"),
    "sbhd": replace(BASE, qkv_format="sbhd"),
    "padding": replace(BASE, mask="padding"),
    "padding causal": replace(BASE, mask="padding_causal"),
    "one scale": replace(BASE, quantized=attention_of(Quantizer(E4M3), Quantizer(E5M2), True)),
    "e4m3": replace(BASE, quantized=attention_of(Quantizer(E4M3), Quantizer(E4M3))),
}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions in which cuDNN ran, which takes every size."""
    ran: list[str] = []
    monkeypatch.setattr(attention_native, "LEAST", 0)
    for name in ("forward", "backward"):
        own = getattr(attention_native.NativeCall, name)

        def noted(self: Any, *arguments: Any, name: str = name, own: Any = own) -> None:
            ran.append(name)
            own(self, *arguments)

        monkeypatch.setattr(attention_native.NativeCall, name, noted)
    return ran


def data(spec: AttentionSpec) -> tuple[dict[str, Any], Any]:
    random = np.random.default_rng(5)
    lead = (S, B) if spec.qkv_format == "sbhd" else (B, S)
    layers = {
        name: random.standard_normal((*lead, heads, D)).astype(np.float32)
        for name, heads in (("q", H), ("k", G), ("v", G))
    }
    do = (0.01 * random.standard_normal((*lead, H, D))).astype(np.float32)
    if spec.padded:
        for x in (*layers.values(), do):
            x[1, 200:] = 0
    return layers, do


def run(spec: AttentionSpec, layers: dict[str, Any], do: Any) -> dict[str, Any]:
    inputs = {name: fk.tensor(x, device=CUDA, requires_grad=True) for name, x in layers.items()}
    more = {}
    if spec.padded:
        more = {f"cu_seqlens_{side}": fk.tensor(SUMS, device=CUDA) for side in ("q", "kv")}
    o = apply(attention, spec, inputs | more)["o"]
    o.backward(fk.tensor(do.reshape(o.shape), device=CUDA))
    return {"o": o.numpy().reshape(do.shape)} | {f"d{name}": x.grad.numpy() for name, x in inputs.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_errors_are_the_emulation_s(name: str, chosen: list[str]) -> None:
    """At most 1.3 times those of the emulation whose results are rounded alike: tensor cores keep 13 bits
    below the largest term, which is little beside FP8's 3."""
    spec = CASES[name]
    how = spec.quantized
    assert how is not None
    layers, do = data(spec)
    sums = (SUMS, SUMS) if spec.padded else None
    exact = attention_oracle(spec, *layers.values(), do, cu_seqlens=sums)
    native = run(spec, layers, do)
    assert chosen == ["forward", "backward"]
    alike = replace(how, o=how.o or how.v, dqkv=how.dqkv or how.do, emulated=True)
    emulated = run(replace(spec, quantized=alike), layers, do)
    assert chosen == ["forward", "backward"]
    for what, got in native.items():
        off, usual = (relative_error(x, exact[what][0]) for x in (got, emulated[what]))
        assert off <= 1.3 * usual, what


@pytest.mark.gpu
def test_deterministic_calls_give_the_same_bits(chosen: list[str]) -> None:
    spec = replace(BASE, deterministic=True)
    first, second = (run(spec, *data(spec)) for _ in range(2))
    assert chosen[:2] == ["forward", "backward"]  # the second call may be the first one, recorded
    for name, x in first.items():
        assert_same_bits(name, x, second[name])


@pytest.mark.gpu
def test_what_cudnn_does_not_take_is_emulated_and_said(chosen: list[str]) -> None:
    slowness.forget()
    spec = replace(BASE, head_dim=64, head_dim_v=64)
    shapes = {"q": H, "k": G, "v": G}
    layers = {name: np.ones((B, S, heads, 64), np.float32) for name, heads in shapes.items()}
    run(spec, layers, np.ones((B, S, H, 64), np.float32))
    assert not chosen
    (said,) = slowness.said()
    assert said.cause == "FP8 attention with head_dim 64: cuDNN's backward takes 128"
    assert "emulated in float32" in said.effect


PROBLEM = Problem(2, 4, 2, 64, 64, 128, 128, "float32", "bshd", 0.1, zero_padded=True)
REFUSED = {
    "bias 'alibi': cuDNN has none in FP8": PROBLEM._replace(bias="alibi"),
    "softmax_type 'learnable': cuDNN has none in FP8": PROBLEM._replace(softmax_type="learnable"),
    "softcap 30.0: cuDNN has none in FP8": PROBLEM._replace(softcap=30.0),
    "mask 'arbitrary': cuDNN is not used with a mask array": PROBLEM._replace(masked=True),
    "one row by one column": PROBLEM._replace(rows=1, columns=1),
    "head_dim 96: cuDNN's backward takes 128": PROBLEM._replace(dim=96),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_beforehand(reason: str) -> None:
    hybrid = ("E4M3", "E5M2")
    assert cudnn_fp8.refused(PROBLEM, hybrid, True) is None
    assert cudnn_fp8.refused(REFUSED[reason], hybrid, True) == reason
    other = cudnn_fp8.refused(PROBLEM, ("E3M4", "E5M2"), False)
    assert other == "format E3M4: cuDNN takes E4M3 and E5M2"


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_problems_of_shapes_with_heads_first(form: str) -> None:
    rules = Rules(form, (-1, 0), softmax_scale=0.1)
    q, k, v = (2, 4, 64, 128), (2, 2, 80, 128), (2, 2, 80, 32)
    found = fp8_attention._problem(q, k, v, rules)
    wanted = PROBLEM._replace(columns=80, dim_v=32, left=-1, right=0)
    assert found == wanted
    key = cudnn_fp8.key_of(found, ("E4M3", "E5M2"), True, False, 3)
    assert (key.deterministic, key.device, key.formats) == (False, 3, ("E4M3", "E5M2"))
    assert key.strides[:4] == (
        (4 * 64 * 128, 64 * 128, 128, 1),
        (2 * 80 * 128, 80 * 128, 128, 1),
        (2 * 80 * 32, 80 * 32, 32, 1),
        (4 * 64 * 32, 64 * 32, 32, 1),
    )
    for backward, count in ((False, 4 + 4 + 2 + 1 + 1), (True, 8 + 7 + 5 + 4 + 1)):
        names = cudnn_fp8.names(backward)
        assert len({cudnn_fp8.UIDS[name] for name in names}) == len(names) == count
