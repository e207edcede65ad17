"""``GroupedMLP`` of Flax and NNX: a loop over the experts in float64, and the bits of torch's operations,
with gradients, inside ``jax.jit``."""

from __future__ import annotations

import functools

import fp8kit_jax as fj
import fp8kit_jax.flax as fj_flax
import fp8kit_jax.nnx as fj_nnx
import fp8kit_torch as ft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError
from fp8kit.formats import E4M3, E5M2
from fp8kit.layers.base import spec_object
from fp8kit.ops.scaled_activation import scaled_activation
from fp8kit.quantization import Quantization, Quantizer
from fp8kit.recipe import DataRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, PerLayer
from fp8kit.testing import assert_same_bits
from fp8kit.testing.compare import assert_close, sum_slack
from tests.support.combinations import combinations

E, H, F, SIZES = 3, 32, 24, np.array([16, 0, 11], np.int32)
M = 32  # five rows of no group
RNG = np.random.default_rng(2)
X, G = (RNG.standard_normal((M, H)).astype(np.float32) for _ in range(2))
P = RNG.random(M).astype(np.float32)
ROW = DataRecipe(Quantization.of(*(Quantizer(fmt, "row") for fmt in (E4M3, E4M3, E5M2))), "rows")
RECIPES = {"plain": None, "current": Float8CurrentScaling(), "row": ROW, "block": Float8BlockScaling()}
GATED = {("silu", "linear"): 2, ("gelu",): 1}


def parameters(wide):
    """fc1 and fc2 with kernel and bias, as both libraries' modules hold them."""
    shapes = {"fc1": ((E, H, wide), (E, wide)), "fc2": ((E, F, H), (E, H))}
    made = {}
    for name, (kernel, bias) in shapes.items():
        made[name] = {
            "kernel": RNG.standard_normal(kernel).astype(np.float32) * 0.2,
            "bias": RNG.standard_normal(bias).astype(np.float32) * 0.2,
        }
    return made


def step(kind, activations, given, recipe, probs=P, sizes=SIZES, x=X, g=G, **more):
    """name -> y and the gradients of G's product with it, of one compiled step."""
    rule = {"enabled": recipe is not None, "recipe": recipe}
    if kind == "linen":
        module = fj_flax.GroupedMLP(E, F, activations=activations, use_bias=True)

        def call(own, x, p):
            return module.apply({"params": own}, x, sizes, p, **more)
    else:
        model = fj_nnx.GroupedMLP(E, H, F, activations=activations, use_bias=True, rngs=nnx.Rngs(0))
        graph, _ = nnx.split(model)

        def call(own, x, p):
            state = nnx.State({k: {n: nnx.Param(v) for n, v in part.items()} for k, part in own.items()})
            return nnx.merge(graph, state)(x, sizes, p, **more)

    @jax.jit
    def run(own, x, p, g):
        with fj.autocast(**rule):
            y, pull = jax.vjp(call, own, x, p)
        return y, pull(g)

    y, (own, x, p) = run(given, x, probs, g)
    made = {"y": y, "x": x, **({} if probs is None else {"probs": p})}
    made |= {f"{part}.{name}": v for part, values in own.items() for name, v in values.items()}
    return {name: np.asarray(value) for name, value in made.items()}


def of_torch(activation, given, recipe):
    """The same by torch's functions, on kernels (E, in, out) too."""
    leaves = {
        f"{part}.{name}": torch.from_numpy(v.copy()).requires_grad_()
        for part, values in given.items()
        for name, v in values.items()
    }
    x, p = (torch.from_numpy(v.copy()).requires_grad_() for v in (X, P))
    sizes = torch.from_numpy(SIZES)
    with ft.autocast(enabled=recipe is not None, recipe=recipe):
        hidden = ft.grouped_dense(x, leaves["fc1.kernel"], sizes, leaves["fc1.bias"])
        spec = spec_object("ScaledActivationSpec", activation, hidden.shape[-1])
        hidden = ft.apply(scaled_activation, spec, {"x": hidden, "probs": p})["y"]
        y = ft.grouped_dense(hidden, leaves["fc2.kernel"], sizes, leaves["fc2.bias"])
    y.backward(torch.from_numpy(G))
    made = {"y": y.detach().numpy(), "x": x.grad.numpy(), "probs": p.grad.numpy()}
    return made | {name: leaf.grad.numpy() for name, leaf in leaves.items()}


@combinations(
    {
        "activations": {"-".join(types): types for types in GATED},
        "recipe": [*RECIPES],
        "kind": ["linen", "nnx"],
    }
)
def test_the_bits_of_torch(activations, recipe, kind):
    given = parameters(GATED[activations] * F)
    name = {2: "swiglu", 1: "gelu"}[GATED[activations]]
    made = step(kind, activations, given, RECIPES[recipe])
    for what, want in of_torch(name, given, RECIPES[recipe]).items():
        assert_same_bits(what, made[what], want)


def test_a_loop_over_the_experts():
    """In high precision, against torch's own float64, and torch's module on the same weights."""
    given = parameters(2 * F)
    made = step("nnx", ("silu", "linear"), given, None)
    wide = {
        f"{part}.{name}": torch.from_numpy(v).double().requires_grad_()
        for part, values in given.items()
        for name, v in values.items()
    }
    x, p = (torch.from_numpy(v).double().requires_grad_() for v in (X, P))
    outs = []
    ends = np.cumsum(SIZES)
    for e, (start, end) in enumerate(zip(ends - SIZES, ends, strict=True)):
        gate, up = (x[start:end] @ wide["fc1.kernel"][e] + wide["fc1.bias"][e]).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up * p[start:end, None]
        outs.append(hidden @ wide["fc2.kernel"][e] + wide["fc2.bias"][e])
    outs.append(torch.zeros(M - ends[-1], H, dtype=torch.float64))
    y = torch.cat(outs)
    y.backward(torch.from_numpy(G).double())
    module = ft.GroupedMLP(E, H, F, device="cpu", use_grouped_tensor=True)
    with torch.no_grad():
        for name, whole in wide.items():
            part, _, leaf = name.partition(".")
            for e in range(E):
                value = whole[e].T if leaf == "kernel" else whole[e]
                module.get_parameter(f"{part}.{leaf.replace('kernel', 'weight')}{e}").copy_(value)
    other = module(torch.from_numpy(X), torch.from_numpy(SIZES), torch.from_numpy(P))
    want = {"y": y.detach(), "x": x.grad, "probs": p.grad} | {n: leaf.grad for n, leaf in wide.items()}
    for name, value in want.items():
        # three sums in a row, each over at most max(H, 2 F) terms of these sizes
        slack = 64 * sum_slack(float(value.abs().max()) + 1, 2 * F + H)
        assert_close(name, made[name], value.numpy(), "float32", slack)
        if name == "y":
            assert_close("module", other.detach().numpy(), value.numpy(), "float32", slack)


@combinations(
    {"kind": ["linen", "nnx"], "recipe": ["plain", "current"]}, usual=["linen-current", "nnx-plain"]
)
def test_padding_becomes_nothing(kind, recipe):
    """``tokens_per_expert`` is a probability of 1 for tokens and of 0 for padding, and none is 1 for all."""
    given, counts = parameters(2 * F), jnp.array([9, 0, 7])
    starts = np.cumsum(SIZES) - SIZES
    own = np.zeros(M, np.float32)
    for start, count in zip(starts, counts.tolist(), strict=True):
        own[start : start + count] = 1
    of = functools.partial(step, kind, ("silu", "linear"), given, RECIPES[recipe])
    made, want = of(None, tokens_per_expert=counts), of(own)
    without, ones = of(None), of(np.ones(M, np.float32))
    for name in made:
        assert_same_bits(name, made[name], want[name])
        assert_same_bits(name, without[name], ones[name])


@combinations({"kind": ["linen", "nnx"]}, usual=["linen"])
def test_small_integers_are_sizes(kind):
    """Their sums, as of 300 rows, are larger than they can say."""
    given, x, sizes, counts = parameters(2 * F), np.tile(X, (10, 1))[:300], [100] * 3, [90, 100, 70]
    made = []
    for own in ("int8", "int32"):
        more = {"sizes": np.array(sizes, own), "tokens_per_expert": jnp.array(counts, own)}
        made.append(step(kind, ("silu", "linear"), given, None, None, x=x, g=x, **more))
    for name, want in made[1].items():
        assert_same_bits(name, made[0][name], want)


def test_recipes_and_names():
    """A part has the recipe of its own name; delayed scaling is refused by name."""
    module = fj_flax.GroupedMLP(E, F)
    own = module.init(jax.random.key(0), X, SIZES)
    assert jax.tree.map(jnp.shape, own["params"]) == {
        "fc1": {"kernel": (E, H, 2 * F)},
        "fc2": {"kernel": (E, F, H)},
    }
    with fj.autocast(True, PerLayer(Float8CurrentScaling(), (("fc1", None),))):
        mixed = module.apply(own, X, SIZES)
    hidden = fj.grouped_dense(X, own["params"]["fc1"]["kernel"], SIZES)
    hidden = fj.activation(hidden.reshape(M, 2, F), ("silu", "linear"))
    with fj.autocast(True, Float8CurrentScaling()):
        want = fj.grouped_dense(hidden, own["params"]["fc2"]["kernel"], SIZES)
    assert_same_bits("y", np.asarray(mixed), np.asarray(want))
    with pytest.raises(UnsupportedError, match="delayed"), fj.autocast(True, DelayedScaling()):
        module.init(jax.random.key(0), X, SIZES)


def test_refusals():
    for make in (
        lambda **more: fj_flax.GroupedMLP(**{"experts": E, "intermediate_dim": F} | more).init(
            jax.random.key(0), X, SIZES
        ),
        lambda **more: fj_nnx.GroupedMLP(
            **{"experts": E, "num_features": H, "intermediate_dim": F} | more, rngs=nnx.Rngs(0)
        ),
    ):
        with pytest.raises(ArgumentError, match=r"GroupedMLP: activations: .*learned"):
            make(activations=("xielu",))
        with pytest.raises(ArgumentError, match="GroupedMLP: activations"):
            make(activations=("silu", "silu"))
        with pytest.raises(ArgumentError, match="GroupedMLP: experts"):
            make(experts=0)
        with pytest.raises(ArgumentError, match="GroupedMLP: intermediate_dim"):
            make(intermediate_dim=0)
    model = fj_nnx.GroupedMLP(E, H, F, rngs=nnx.Rngs(0))
    with pytest.raises(ShapeError, match="GroupedMLP: probs"):
        model(X, SIZES, P[1:])
    with pytest.raises(ShapeError, match="GroupedMLP: tokens_per_expert"):
        model(X, SIZES, None, SIZES[1:])
    with pytest.raises(ArgumentError, match=r"tokens_per_expert: .*None with probs"):
        model(X, SIZES, P, SIZES)
    with pytest.raises(FormatError, match="GroupedMLP: x"):
        model("x", SIZES)
