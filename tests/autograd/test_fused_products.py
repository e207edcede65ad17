"""Layers whose products go on at once into activations and their gradients, where a policy names a kernel for
that: the bits of the layers without, and which layers ask for it. Likewise activations that cast by
blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.execution import plans
from fp8kit.nn import LayerNormMLP
from fp8kit.ops.product_block import BlockProduct
from fp8kit.testing.compare import assert_same_bits

FUSED = ("fp8_gemm_act", "fp8_gemm_act_bwd")
DELAYED = fk.recipe.DelayedScaling(amax_history_len=2)
BLOCKS = fk.recipe.Float8BlockScaling()


@contextmanager
def counted(*names: str) -> Iterator[dict[str, int]]:
    """Policies that name these kernels, whose calls are counted."""
    calls = dict.fromkeys(names, 0)

    def noting(name: str) -> Any:
        def noted(original: Any, *arguments: Any) -> None:
            calls[name] += 1
            original(*arguments)

        return noted

    policy = SelectionPolicy(per_op=dict.fromkeys(names, ("reference",)))
    with policy_context(policy), ExitStack() as blocks:
        for name in names:
            blocks.enter_context(fk.override(name, noting(name)))
        yield calls


def trained(recipe: Any, steps: int = 3, **more: Any) -> dict[str, Any]:
    """Everything that some steps of an MLP leave behind."""
    random, found = np.random.default_rng(0), {}
    layer = LayerNormMLP(48, 80, **{"activation": "gelu", **more})
    for _, parameter in layer.named_parameters():
        value = random.standard_normal(parameter.shape) / np.sqrt(parameter.shape[-1])
        arrays.copy(parameter.view, arrays.as_view(value.astype(parameter.dtype.numpy)))
    for step in range(steps):
        x, g = (
            fk.tensor(random.standard_normal((17, 48)).astype(np.float32), requires_grad=which == 0)
            for which in range(2)
        )
        with fk.autocast(recipe=recipe):
            y = layer(x)
        y.backward(g)
        found |= {f"y{step}": y.numpy(), f"dx{step}": x.grad.numpy()}
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                found[f"{name}{step}"] = parameter.grad.numpy().copy()
            parameter.grad = None
    return found


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same_bits(name, found[name], value)


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_has_the_bits_of_product_and_pass(activation: str, bias: bool) -> None:
    wanted = trained(DELAYED, activation=activation, bias=bias)
    with counted(*FUSED) as calls:
        found = trained(DELAYED, activation=activation, bias=bias)
    same(found, wanted)
    assert calls == dict.fromkeys(FUSED, 3)


@pytest.mark.parametrize("one", FUSED)
def test_each_half_is_fused_alone(one: str) -> None:
    wanted = trained(DELAYED)
    with counted(one) as calls:
        same(trained(DELAYED), wanted)
    assert calls == {one: 3}
    with policy_context(SelectionPolicy(per_op={one: (f"impl:reference.{one}",)})):
        same(trained(DELAYED), wanted)


def test_inference_keeps_no_product() -> None:
    layer, seen = LayerNormMLP(48, 80, activation="gelu"), []

    def noted(original: Any, a: Any, b: Any, h: Any, *rest: Any) -> None:
        seen.append(h)
        original(a, b, h, *rest)

    x = fk.tensor(np.random.default_rng(1).standard_normal((17, 48)).astype(np.float32))

    def run() -> Any:
        with fk.no_grad(), fk.autocast(recipe=DELAYED):
            return layer(x).numpy()

    wanted = run()
    policy = SelectionPolicy(per_op={"fp8_gemm_act": ("reference",)})
    with policy_context(policy), fk.override("fp8_gemm_act", noted):
        assert_same_bits("y", run(), wanted)
    assert seen == [None]


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        (fk.recipe.Float8CurrentScaling(), {}),  # the amax comes before the cast
        (fk.recipe.Float8BlockScaling(), {}),
        (DELAYED, {"checkpoint": True}),
        (DELAYED, {"activation": "xielu"}),
    ],
    ids=["current", "blocks", "recomputed", "learned"],
)
def test_what_is_never_fused(recipe: Any, more: Any) -> None:
    wanted = trained(recipe, **more)
    with counted(*FUSED) as calls:
        same(trained(recipe, **more), wanted)
    assert calls == dict.fromkeys(FUSED, 0)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        (BLOCKS, {}),
        (BLOCKS, {"activation": "swiglu"}),
        (BLOCKS, {"bias": False}),
        (BLOCKS, {"checkpoint": True}),
        (fk.recipe.Float8BlockScaling(fp8_format=fk.recipe.Format.HYBRID, use_f32_scales=True), {}),
        (fk.recipe.Float8BlockScaling(backward_override="high_precision"), {}),
    ],
    ids=["gelu", "swiglu", "plain", "recomputed", "float-scales", "backward"],
)
def test_casts_by_blocks_have_the_bits_of_two_passes(
    recipe: Any, more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"act_fwd": 0, "act_bwd": 0}

    def noting(name: str) -> Any:
        cast = 4 if name == "act_fwd" else 6  # its place among the arguments

        def noted(original: Any, *arguments: Any) -> None:
            calls[name] += arguments[cast] is not None and arguments[cast].tile is not None
            original(*arguments)

        return noted

    with ExitStack() as blocks:
        for name in calls:
            blocks.enter_context(fk.override(name, noting(name)))
        found = trained(recipe, **more)
        backward = recipe.backward_override is None
        assert calls == {"act_fwd": 6 if "checkpoint" in more else 3, "act_bwd": 3 * backward}
        monkeypatch.setattr(BlockProduct, "fuses_cast", False)
        monkeypatch.setattr(BlockProduct, "scales_local", False)
        plans.plans.clear()
        apart = trained(recipe, **more)
        assert sum(calls.values()) == (9 if "checkpoint" in more else 3 + 3 * backward)
    same(found, apart)
