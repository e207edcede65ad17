"""``gated_mlp`` is two ``linear`` of one input, an activation and a third ``linear``, with the same codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8kit.autograd import Tensor, apply, tensor
from fp8kit.errors import FormatError, ShapeError, UnsupportedError
from fp8kit.formats import bfloat16, float32
from fp8kit.ops.activation import ActivationSpec, activation
from fp8kit.ops.gated_mlp import GatedMLPSpec, gated_activations, gated_mlp
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec
from fp8kit.testing import assert_close, assert_same_bits, sum_slack
from tests.support.operands import BLOCKS, CURRENT, DELAYED, normal, one

ROWS, K, F, N = 20, 24, 40, 36
PREFIXES = "gate", "up", "down"
# scales of x, w and g of each product; x is one array for gate and up
SCALES = {"gate": (50.0, 300.0, 900.0), "up": (50.0, 200.0, 1500.0), "down": (12.0, 250.0, 700.0)}


def spec_of(bias: str = "add", layout: str = "oi", kind: str = "swiglu", fp8: Any = DELAYED) -> GatedMLPSpec:
    sizes = {"gate": (K, F), "up": (K, F), "down": (F, N)}
    made = {
        name: ProductSpec(k, (n,), layout, bias, fp8, prefix=f"{name}_") for name, (k, n) in sizes.items()
    }
    return GatedMLPSpec(**made, activation=kind)


def values_of(layout: str = "oi", dtype: Any = float32) -> dict[str, Any]:
    found = {"x": normal(ROWS, K)}
    for name, (k, n) in {"gate": (K, F), "up": (K, F), "down": (F, N)}.items():
        found[f"{name}_weight0"] = normal(*((n, k) if layout == "oi" else (k, n))) / 5
        found[f"{name}_bias0"] = normal(n)
    return {name: value.astype(dtype.numpy) for name, value in found.items()}


def fused(spec: GatedMLPSpec, inputs: dict[str, Tensor]) -> dict[str, Any]:
    scales = {
        f"{name}_{o}_scale": one(v)
        for name, own in SCALES.items()
        for o, v in zip("xw", own[:2], strict=True)
    }
    late = {f"{name}_g_scale": one(own[2]) for name, own in SCALES.items()}
    return apply(gated_mlp, spec, inputs | scales, backward_inputs=late)


def separate(spec: GatedMLPSpec, inputs: dict[str, Tensor], g: Any) -> Tensor:
    """The parts one after the other, forward and backward; "x up" is up's own x."""

    def product(name: str, of: Tensor) -> Any:
        x_scale, w_scale, g_scale = map(one, SCALES[name])
        own = LinearSpec(replace(getattr(spec, name), prefix=""))
        given = {"x": of, "x_scale": x_scale, "w_scale": w_scale, "weight0": inputs[f"{name}_weight0"]}
        if f"{name}_bias0" in inputs:
            given["bias0"] = inputs[f"{name}_bias0"]
        return apply(linear, own, given, backward_inputs={"g_scale": g_scale})["y"]

    gate, up = product("gate", inputs["x"]), product("up", inputs["x up"])
    h = tensor(np.concatenate([gate.numpy(), up.numpy()], 1), True)
    y: Tensor = product("down", apply(activation, ActivationSpec(spec.activation, 2 * F), {"x": h})["y"])
    y.backward(g)
    for part, half in zip((gate, up), np.split(h.grad.numpy(), 2, axis=1), strict=True):
        part.backward(np.ascontiguousarray(half))
    return y


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "bias", "layout"), [("swiglu", "add", "oi"), ("geglu", "none", "io")])
def test_the_same_codes_as_its_parts(kind: str, bias: str, layout: str, dtype: Any) -> None:
    spec = spec_of(bias, layout, kind)
    values = {n: v for n, v in values_of(layout, dtype).items() if bias == "add" or "bias" not in n}
    g, unit = normal(ROWS, N).astype(dtype.numpy), 2.0**-24 if dtype is float32 else 2.0**-8
    made = {name: tensor(value, True) for name, value in values.items()}
    out = fused(spec, made)
    out["y"].backward(g)
    parts = {name: tensor(value, True) for name, value in (values | {"x up": values["x"]}).items()}
    assert_same_bits("y", out["y"].numpy(), separate(spec, parts, g).numpy())
    assert out["gate_x_amax"].numpy() == out["up_x_amax"].numpy() == np.abs(values["x"]).max()
    for name in values:
        got, want = made[name].grad.numpy(), parts[name].grad.numpy()
        wide = want.astype(np.float64)
        if name == "x":  # the second of two terms is not rounded before it is added
            term = parts["x up"].grad.numpy().astype(np.float64)
            assert_close(name, got, wide + term, dtype, unit * np.abs(term))
        elif name in ("gate_bias0", "up_bias0"):  # sums of rows that two kernels make in their own orders
            slack = sum_slack(ROWS * np.abs(wide).max() + ROWS, ROWS) + unit * np.abs(wide)
            assert_close(name, got, wide, dtype, slack)
        else:
            assert_same_bits(name, got, want)


@pytest.mark.parametrize("wanted", ["x", "down_weight0", "gate_weight0 up_weight0", "x down_bias0"])
def test_some_gradients_alone(wanted: str) -> None:
    """Have the bits that they have beside all others."""
    spec, values, g, found = spec_of(), values_of(), normal(ROWS, N), []
    for names in (values, wanted.split()):
        inputs = {name: tensor(value, name in names) for name, value in values.items()}
        fused(spec, inputs)["y"].backward(g)
        found.append({name: inputs[name].grad.numpy() for name in wanted.split()})
    for name in wanted.split():
        assert_same_bits(name, found[1][name], found[0][name])


@pytest.mark.parametrize("wanted", ["gate_weight0", "up_weight0 x", "up_bias0"])
def test_gradients_that_come_only_together(wanted: str) -> None:
    inputs = {name: tensor(value, name in wanted.split()) for name, value in values_of().items()}
    with pytest.raises(UnsupportedError, match=r"^gated_mlp: gradients: got those of .*, expected those of"):
        fused(spec_of(), inputs)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"activation": "silu"}, FormatError, r"activation: got 'silu', expected one of geglu, glu"),
        ({"activation": "clamped_swiglu"}, FormatError, "activation: got 'clamped_swiglu'"),
        ({"up": ProductSpec(K, (F - 4,), fp8=DELAYED, prefix="up_")}, ShapeError, "up, down: got up from 24"),
        *(
            (
                {"down": ProductSpec(F, (N,), fp8=fp8, prefix="down_")},
                FormatError,
                "down: got .* expected one",
            )
            for fp8 in (CURRENT, BLOCKS, None)
        ),
    ],
)
def test_what_it_does_not_fuse(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"^gated_mlp: {words}"):
        replace(spec_of(), **change)


def test_activations() -> None:
    assert set(gated_activations()) == {"geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu"}
