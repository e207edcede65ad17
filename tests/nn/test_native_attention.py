"""Attention by an engine's FP8 kernels: the numbers of the emulation whose o and gradients are rounded.

The CPU has no such kernels to choose, but the contract's; here they are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.arrays import CPU
from fp8kit.attention_quantization import attention_of
from fp8kit.autograd.call import apply
from fp8kit.errors import RecipeError
from fp8kit.formats import E4M3, E5M2
from fp8kit.ops import attention_native
from fp8kit.ops.attention import AttentionSpec, attention
from fp8kit.quantization import Quantizer
from fp8kit.testing import assert_same_bits, relative_error
from fp8kit.testing.attention import attention_oracle

F = np.float32
FORWARD, BACKWARD = Quantizer(E4M3), Quantizer(E5M2)
HOW = {
    "current": attention_of(FORWARD, BACKWARD),
    "e4m3": attention_of(FORWARD, FORWARD),
    "power 2": attention_of(replace(FORWARD, scale_rule="power_2"), replace(BACKWARD, scale_rule="power_2")),
    "mha": attention_of(FORWARD, BACKWARD, True),
    "mha, delayed": attention_of(FORWARD, BACKWARD, True, False),
}
B, H, G, D = 2, 4, 2, 16


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions in which FP8 kernels ran; chosen for every size."""
    ran: list[str] = []
    monkeypatch.setattr(attention_native, "LEAST", 0)
    monkeypatch.setattr(attention_native.NativeCall, "workspace", lambda self, kernels, backward: 1)
    for name in ("forward", "backward"):
        own = getattr(attention_native.NativeCall, name)

        def noted(self: Any, *arguments: Any, name: str = name, own: Any = own) -> None:
            ran.append(name)
            own(self, *arguments)

        monkeypatch.setattr(attention_native.NativeCall, name, noted)
    return ran


def run(spec: AttentionSpec, layers: dict[str, Any], do: Any, **more: Any) -> tuple[Any, dict[str, Any]]:
    """o, and the gradients by the layers' names."""
    inputs = {name: fk.tensor(x, device=CPU, requires_grad=True) for name, x in layers.items()}
    given = {name: fk.tensor(x, device=CPU) for name, x in more.items()}
    o = apply(attention, spec, inputs | given)["o"]
    o.backward(fk.tensor(do, device=CPU))
    return o.numpy(), {name: leaf.grad.numpy() for name, leaf in inputs.items()}


def as_native(how: Any) -> Any:
    """The emulation whose results are rounded as the kernels round them."""
    return replace(how, o=how.o or how.v, dqkv=how.dqkv or how.do, emulated=True)


def alike(grads: dict[str, Any], want: dict[str, Any], exact: bool = False) -> None:
    """Backward rounds o anew, by a scale from the amax of an o that is rounded: the same codes, but a scale
    that may differ in its last bit, and so does D. A rounding of dS or of a gradient that this turns over
    moves a value by a step of its format: 4e-4 of the whole here. ``exact``: scales are powers of two."""
    for x, got in grads.items():
        if exact:
            assert_same_bits(f"d{x}", got, want[x])
        else:
            assert relative_error(got, want[x]) < 4e-4, x


MASKS = {
    "no mask": {"mask": "no_mask"},
    "causal": {"mask": "causal"},
    "padding": {"mask": "padding"},
    "padding and causal": {"mask": "padding_causal"},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", HOW)
def test_the_emulation_with_rounded_results(name: str, form: str, mask: str, chosen: list[str]) -> None:
    """In float32: the same operands, scales and rules. NaN in padding reaches nothing."""
    how, s = HOW[name], 21
    leading = (s, B) if form == "sbhd" else (B, s)
    layers = {x: draw(i, *leading, n * D) for i, (x, n) in enumerate({"q": H, "k": G, "v": G}.items())}
    do, more = draw(4, *leading, H * D), {}
    if "padding" in mask:
        sums = np.array([0, 21, 30], np.int32)
        more = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums}
        for x in (*layers.values(), do):
            x[(slice(9, None), 1) if form == "sbhd" else (1, slice(9, None))] = np.nan
    spec = AttentionSpec(H, D, G, form, layout="separate", quantized=how, **MASKS[mask])
    o, grads = run(spec, layers, do, **more)
    assert chosen == ["forward", "backward"]
    want, slopes = run(replace(spec, quantized=as_native(how)), layers, do, **more)
    assert chosen == ["forward", "backward"]
    assert_same_bits("o", o, want)
    alike(grads, slopes, name == "power 2")


@pytest.mark.parametrize("layout", ["qkv", "q_kv", "qkv_interleaved"])
def test_one_array_has_one_scale(layout: str, chosen: list[str]) -> None:
    how, s = HOW["mha"], 13
    widths = {"qkv": 3 * H * D} if layout != "q_kv" else {"q": H * D, "kv": 2 * H * D}
    layers = {name: draw(i, s, B, width) for i, (name, width) in enumerate(widths.items())}
    if layout != "q_kv":
        layers["qkv"][..., :D] *= 30
    do = draw(7, s, B, H * D)
    spec = AttentionSpec(H, D, mask="causal", layout=layout, quantized=how)
    o, grads = run(spec, layers, do)
    want, slopes = run(replace(spec, quantized=as_native(how)), layers, do)
    assert chosen == ["forward", "backward"]
    assert_same_bits("o", o, want)
    alike(grads, slopes)


def test_packed_sequences(chosen: list[str]) -> None:
    how, sums = HOW["current"], np.array([0, 5, 18], np.int32)
    layers = {x: draw(i, 18, n * D) for i, (x, n) in enumerate({"q": H, "k": G, "v": G}.items())}
    do, more = draw(5, 18, H * D), {"cu_seqlens_q": sums, "cu_seqlens_kv": sums}
    sizes = {"max_seqlen_q": 13, "max_seqlen_kv": 13}
    spec = AttentionSpec(H, D, G, "thd", "padding_causal", layout="separate", quantized=how, **sizes)
    o, grads = run(spec, layers, do, **more)
    want, slopes = run(replace(spec, quantized=as_native(how)), layers, do, **more)
    assert chosen == ["forward", "backward"]
    assert_same_bits("o", o, want)
    alike(grads, slopes)


@pytest.mark.parametrize(
    "how",
    [
        replace(HOW["current"], emulated=True),
        replace(HOW["current"], rows_per_block=16),
        replace(HOW["current"], rotation=16),
        replace(HOW["current"], ds=FORWARD),
        replace(HOW["current"], k=replace(FORWARD, format=E5M2)),
        attention_of(Quantizer(E4M3, "mx_1x32", scale_rule="te"), replace(BACKWARD)),
    ],
    ids=["emulated", "blocks of rows", "rotation", "two formats", "two forward formats", "mx"],
)
def test_other_data_are_emulated(how: Any, chosen: list[str]) -> None:
    layers = {x: draw(i, 9, B, H * D) for i, x in enumerate("qkv")}
    run(AttentionSpec(H, D, mask="causal", layout="separate", quantized=how), layers, draw(3, 9, B, H * D))
    assert not chosen


def test_what_rounded_results_add(chosen: list[str]) -> None:
    """The squares of errors add: a cast to m mantissa bits has 2^-m / sqrt(12) of a binade's start, for
    uniform values in it 2^-m / sqrt(12 * 7 / 3). Normal data, in which not all binades count alike: 15 %. D
    takes the rounded o, which moves dq and dk a little more: 4 %."""
    d, leading = 64, (1, 160)
    layers = {x: draw(i, *leading, 2 * d) for i, x in enumerate("qkv")}
    do = draw(3, *leading, 2 * d)
    spec = AttentionSpec(2, d, qkv_format="bshd", mask="causal", layout="separate", quantized=HOW["current"])
    apart = {name: x.reshape(*leading, 2, d) for name, x in layers.items()}
    exact = attention_oracle(spec, *apart.values(), do.reshape(*leading, 2, d))
    errors = []
    for how in (HOW["current"], replace(HOW["current"], emulated=True)):
        o, grads = run(replace(spec, quantized=how), layers, do)
        found = {"o": o} | {f"d{x}": grad for x, grad in grads.items()}
        truth = {name: exact[name][0].reshape(*leading, 2 * d) for name in found}
        errors.append({name: relative_error(x, truth[name]) for name, x in found.items()})
    assert chosen == ["forward", "backward"]
    native, emulated = errors
    for name, bits in {"o": 3, "dq": 2, "dk": 2, "dv": 2}.items():
        cast = 2.0**-bits / np.sqrt(28)
        more = 1.04 if name in ("dq", "dk") else 1.0
        assert native[name] ** 2 - (more * emulated[name]) ** 2 < (1.15 * cast) ** 2, name
        assert native[name] ** 2 - emulated[name] ** 2 > (0.85 * cast) ** 2, name


def test_small_calls_are_emulated_and_engines_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size first, then by every direction that will run."""
    asked: list[bool] = []

    def workspace(self: Any, kernels: Any, backward: bool) -> int:
        asked.append(backward)
        return 0 if backward else 8

    monkeypatch.setattr(attention_native.NativeCall, "workspace", workspace)
    x = draw(0, 7, B, 3 * H * D)
    spec = AttentionSpec(H, D, mask="no_mask", quantized=HOW["current"])

    def emulated() -> Any:
        return run(spec, {"qkv": x}, draw(1, 7, B, H * D))[0]

    before = emulated()
    assert not asked
    # 2 batches, 4 heads, 7 by 7 scores, 2 x 16 features
    monkeypatch.setattr(attention_native, "LEAST", 2 * 4 * 49 * 32 + 1)
    emulated()
    assert not asked
    monkeypatch.setattr(attention_native, "LEAST", 2 * 4 * 49 * 32)
    spec = replace(spec, softmax_scale=0.25)  # another plan, of the same numbers
    assert_same_bits("o", emulated(), before)
    assert asked == [False, True]


def test_the_cpu_engine_takes_none() -> None:
    kernels = fk.backends.dispatch.kernels(CPU)
    shape, spec = (1, 8, 4096, 128), AttentionSpec(8, 128, quantized=HOW["current"])
    for backward in (False, True):
        assert kernels.fp8_attention_workspace(shape, shape, shape, spec, E4M3, E5M2, backward, True) == 0


def test_a_word_that_is_no_bool() -> None:
    with pytest.raises(RecipeError, match="emulated"):
        replace(HOW["current"], emulated="yes")
    assert str(replace(HOW["current"], emulated=True)).endswith("emulated everywhere")
