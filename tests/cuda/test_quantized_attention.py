"""FP8 attention on a GPU: small tiles, deterministic runs, the structure that the kernels take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.arrays import CPU, Device
from fp8kit.attention_quantization import attention_of
from fp8kit.backends.cuda import quantized_attention as engine
from fp8kit.backends.cuda import unfused
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.formats import E4M3, E5M2
from fp8kit.ops.attention import AttentionSpec
from fp8kit.quantization import Quantizer
from fp8kit.raw_kernels import manifest
from fp8kit.testing import assert_same_bits, relative_error
from fp8kit.testing.contract import kernel_test
from fp8kit.testing.contract.sampler import Sampler

CUDA = Device("cuda", 0)
PLAIN = attention_of(Quantizer(E4M3), Quantizer(E5M2))
HOW = {
    "current": PLAIN,
    "flash attention 3": replace(PLAIN, rows_per_block=64, rotation=64, signs="random"),
    "mx": attention_of(*[Quantizer(fmt, "mx_1x32", scale_rule="te") for fmt in (E4M3, E5M2)]),
    "mha": attention_of(Quantizer(E4M3), Quantizer(E5M2), True),
    "v rotated": replace(PLAIN, rotation_v=64, signs="te"),
    "stochastic": replace(
        PLAIN,
        rotation_v=64,
        **{
            name: replace(getattr(PLAIN, name), stochastic_bits=bits)
            for name, bits in {"q": 32, "k": 8, "v": 8, "do": 32, "p": 8, "ds": 32}.items()
        },
    ),
}
B, S, HEADS, GROUPS, DIM = 2, 150, 4, 2, 64


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(how: Any, device: Device, **options: Any) -> list[Any]:
    """o and the gradients of q, k, v and of a bias."""
    from fp8kit.autograd.call import apply
    from fp8kit.ops.attention import attention

    spec = AttentionSpec(
        HEADS, DIM, GROUPS, layout="separate", bias="post_scale_bias", quantized=how, **options
    )
    values = [draw(i, S, B, heads * DIM) for i, heads in enumerate((HEADS, GROUPS, GROUPS))]
    leaves = [fk.tensor(x, device=device, requires_grad=True) for x in (*values, draw(7, 1, HEADS, S, S))]
    inputs: dict[str, Any] = dict(zip(("q", "k", "v", "bias"), leaves, strict=True))
    if spec.needs_rng:
        inputs["rng"] = fk.tensor(np.array((3, 5), np.int64), device=device)
    o = apply(attention, spec, inputs)["o"]
    o.backward(fk.tensor(draw(9, S, B, HEADS * DIM), device=device))
    return [o.numpy(), *(leaf.grad.numpy() for leaf in leaves)]


@pytest.fixture(params=[1, 60_000, 1 << 28])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Bytes of scores: of one row of one head, of some, of all."""
    monkeypatch.setattr(unfused, "_LIMIT", request.param)
    unfused.layout.cache_clear()
    yield request.param
    unfused.layout.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"dropout": 0.25}, {"window_size": (9, 0)}], ids=str)
@pytest.mark.parametrize("name", HOW)
def test_the_engines_agree(name: str, options: dict[str, Any], limit: int) -> None:
    """Whatever the tiles: the CPU's results but for roundings of P and dS that float32's last bits turn over,
    each 2^-4 or 2^-3 of a term: 2.2e-3 of these few values on an H200. Where gradients are rounded to E5M2,
    one that turns over moves by up to 2^-2 of itself: a hundred of 38400 are 1e-2, all of them 5e-2."""
    most = 1e-2 if HOW[name].dqkv else 4e-3
    for a, b in zip(run(HOW[name], CUDA, **options), run(HOW[name], CPU, **options), strict=True):
        assert relative_error(a, b) < most


@pytest.mark.gpu
@pytest.mark.parametrize("name", HOW)
def test_runs_give_the_same_bits(name: str) -> None:
    for a, b in zip(run(HOW[name], CUDA, dropout=0.25), run(HOW[name], CUDA, dropout=0.25), strict=True):
        assert_same_bits(name, a, b)


def test_the_structure_has_the_sources_layout() -> None:
    """The rules, then as many 32-bit words as raw_kernels/quantized_attention.cu declares: two formats, and
    between them a scale and its inverse; then where random numbers lie, and the first ones of two casts."""
    source = manifest.text("quantized_attention.cu")
    body = re.search(r"struct QuantizedRules \{(.*?)\};", source, re.DOTALL)
    assert body is not None
    assert [line.strip() for line in body[1].strip().splitlines()] == [
        "Rules rules;",
        "Narrow p;",
        "float scale, inverse;",
        "Narrow ds;",
        "const i64* rng;",
        "u64 p_draw, ds_draw;  // where the words of a cast begin",
    ]
    fields = re.search(r"struct Narrow \{(.*?)\};", manifest.text("fp8.cuh"), re.DOTALL)
    assert fields is not None
    count = len(re.findall(r"^\s*i32 \w+;", fields[1], re.MULTILINE))
    formats = 4 * (2 * count + 2)
    whole: Any = engine._roundings(PLAIN.p, PLAIN.ds, fk.tensor(np.int64([3, 5]), device="cpu").view)
    made = whole[:formats]
    assert (len(whole), whole.pointers) == (formats + 24, (formats,))
    assert np.frombuffer(whole, np.int64, 2, formats + 8).tolist() == [2 << 48, 3 << 48]
    forward = engine._roundings(PLAIN.p, None, None)
    assert np.frombuffer(forward, np.int64, 3, formats).tolist() == [0, 1 << 48, 3 << 48]
    scale, inverse = np.frombuffer(made, np.float32)[count : count + 2]
    assert (scale, inverse) == (256.0, 2.0**-8)
    mantissas = np.frombuffer(made, np.int32)[[0, count + 2]]
    assert mantissas.tolist() == [3, 2]


def test_what_a_workspace_holds() -> None:
    """Forward a factor for each row of a tile, backward dS's amax and scale, behind what the unfused path
    has."""
    sampler: Any = Sampler(None, CPU)
    call = kernel_test("quantized_attention_fwd").arguments(sampler, b=2, h=4, h_kv=2, s_q=300, s_kv=140)
    about = engine._problem(call["q"].shape, call["k"].shape, call["v"].shape, call["spec"])
    for backward, names in ((False, ["inverse"]), (True, ["amax", "scale", "scale_inv"])):
        plain, cut = unfused.layout(about, backward), engine._layout(about, backward)
        own = [cut.places[name] for name in names]
        assert own[0] == plain.places["end"]
        assert own == sorted(set(own))
        assert cut.places["end"] - own[-1] >= (4 * cut.groups * cut.rows if not backward else 4)
        shapes = call["q"].shape, call["k"].shape, call["v"].shape
        assert (
            engine.quantized_attention_workspace(*shapes, None, call["spec"], backward) == cut.places["end"]
        )
    assert isinstance(call["extras"], AttentionExtras)
