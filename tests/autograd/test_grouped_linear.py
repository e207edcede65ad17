"""Groups of rows: the bits of one ``linear`` for each group, FP8 scales and amaxes included, and gradients
against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit.autograd import apply, tensor
from fp8kit.errors import FormatError, ShapeError
from fp8kit.ops.grouped_linear import GroupedLinearSpec, grouped_linear
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing import assert_same_bits, check_grads

RNG = np.random.default_rng(5)
K, N, ROWS = 24, 40, (5, 0, 16, 3)
RECIPES = {
    "plain": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layout", ["oi", "io"])
def test_equals_one_linear_for_each_group(name: str, layout: str) -> None:
    recipe, delayed = RECIPES[name], name == "delayed"
    product = ProductSpec(K, (N,), layout, fp8=None if recipe is None else recipe.quantization)
    shape = (N, K) if layout == "oi" else (K, N)
    x, g = tensor(normal(sum(ROWS), K), requires_grad=True), normal(sum(ROWS), N)
    own = [
        {name: tensor(normal(*s), requires_grad=True) for name, s in (("weight0", shape), ("bias0", (N,)))}
        for _ in ROWS
    ]
    scales = [{f"{operand}_scale": tensor(np.float32([2.0**i + 1])) for operand in "xw"} for i in range(4)]
    late = [tensor(np.float32([100.0 + i])).view for i in range(4)]
    inputs: dict[str, Any] = {"x": x}
    for i in range(len(ROWS)):
        inputs |= {f"{i}_{key}": value for key, value in own[i].items()}
        inputs |= {f"{i}_{key}": value for key, value in scales[i].items()} if delayed else {}
    made = apply(
        grouped_linear,
        GroupedLinearSpec(product, ROWS),
        inputs,
        backward_inputs={f"{i}_g_scale": late[i] for i in range(len(ROWS))} if delayed else {},
    )
    made["y"].backward(g)
    start = 0
    for i, rows in enumerate(ROWS):
        part = slice(start, start := start + rows)
        grads = {key: leaf.grad.numpy() for key, leaf in own[i].items()}
        if not rows:
            assert not any(grad.any() for grad in grads.values())
            assert not [key for key in made if key.startswith(f"{i}_")]
            continue
        twin = {key: tensor(leaf.numpy(), requires_grad=True) for key, leaf in own[i].items()}
        alone = tensor(x.numpy()[part], requires_grad=True)
        more: dict[str, Any] = scales[i] if delayed else {}
        wanted = apply(
            linear,
            LinearSpec(product),
            {"x": alone, **twin, **more},
            backward_inputs={"g_scale": late[i]} if delayed else {},
        )
        wanted["y"].backward(g[part])
        assert_same_bits(f"y {i}", made["y"].numpy()[part], wanted.pop("y").numpy())
        assert_same_bits(f"dx {i}", x.grad.numpy()[part], alone.grad.numpy())
        for key, leaf in twin.items():
            assert_same_bits(f"d{key} {i}", grads[key], leaf.grad.numpy())
        for key, amax in wanted.items():
            assert_same_bits(f"{key} {i}", made[f"{i}_{key}"].numpy(), amax.numpy())


def test_gradients_against_differences() -> None:
    spec = GroupedLinearSpec(ProductSpec(K, (N,)), (2, 0, 3))

    def call(x: Any, *parameters: Any) -> Any:
        named = {f"{i // 2}_{('weight0', 'bias0')[i % 2]}": p for i, p in enumerate(parameters)}
        return apply(grouped_linear, spec, {"x": x, **named})["y"]

    check_grads(call, [normal(5, K), *(normal(*s) for _ in range(3) for s in ((N, K), (N,)))])


def test_only_what_is_wanted_has_a_gradient() -> None:
    spec = GroupedLinearSpec(ProductSpec(K, (N,), bias="none"), (2, 3))
    w = [tensor(normal(N, K), requires_grad=bool(i)) for i in range(2)]
    y = apply(grouped_linear, spec, {"x": tensor(normal(5, K)), "0_weight0": w[0], "1_weight0": w[1]})["y"]
    y.backward(normal(5, N))
    assert w[0].grad is None
    assert w[1].grad.shape == (N, K)


def test_refusals() -> None:
    product = ProductSpec(K, (N,), bias="none")
    x, w = tensor(normal(5, K)), tensor(normal(N, K))
    for rows in ((2, 2), (6, -1), ()):
        with pytest.raises(ShapeError, match=r"grouped_linear: rows: .* numbers of rows that sum to 5"):
            apply(grouped_linear, GroupedLinearSpec(product, rows), {"x": x, "0_weight0": w, "1_weight0": w})
    spec = GroupedLinearSpec(product, (2, 3))
    with pytest.raises(ShapeError, match="1_weight0: missing"):
        apply(grouped_linear, spec, {"x": x, "0_weight0": w})
    half = tensor(normal(N, K), dtype="float16")
    with pytest.raises(FormatError, match="1_weight0: got float16, expected float32"):
        apply(grouped_linear, spec, {"x": x, "0_weight0": w, "1_weight0": half})
