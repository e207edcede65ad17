"""Every published recipe in all three frontends: eager, compiled and jitted, with the same bits."""

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from fp8kit_torch import module as layers_of_torch

import fp8kit as fk
from fp8kit import formats, recipe_info
from fp8kit.errors import RecipeError, UnsupportedError
from fp8kit.testing import assert_same_bits
from tests.support import named
from tests.support.combinations import combinations
from tests.support.named import DTYPES, MODULES, RANDOM, RECIPES, batch, native, parameters

STEPS = 2
STATES = ("scaling_fwd", "scaling_bwd")
SLOTS = {"x": ("scaling_fwd", 3, 0), "kernel": ("scaling_fwd", 3, 1), "grad": ("scaling_bwd", 2, 0)}


@pytest.fixture(autouse=True)
def _same_bits():
    with fk.deterministic():
        yield
    torch._dynamo.reset()


def host(tensor):
    """A torch tensor as an array of its dtype, bfloat16 too."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(formats.bfloat16.numpy).copy()
    return tensor.numpy().copy()


def of_host(array):
    """The other way round."""
    if array.dtype == formats.bfloat16.numpy:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def state_of(module):
    """Scales and histories of a module of either frontend, by name; {} without state."""
    return {
        f"{name}.{field}": np.asarray(getattr(module.fp8_meta[name], field)).copy()
        for name in STATES
        if name in module.fp8_meta
        for field in ("scale", "amax_history")
    }


def native_steps(name, kind, dtype, pairs):
    """``pairs``: the random numbers of each step."""
    module = native(kind, dtype)
    for number in range(STEPS):
        source = lambda device, own=pairs[number]: fk.tensor(own, device=device)  # noqa: E731
        with fk.draw_from(source):
            found = named.step(module, RECIPES[name], *batch(kind, number, dtype))
        yield found | state_of(module)


def torch_module(kind, dtype, **more):
    module = getattr(ft, kind)(params_dtype=getattr(torch, dtype), device="cpu", **MODULES[kind][2], **more)
    values = parameters(native(kind, dtype), dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(of_host(values[name]))
    return module


def torch_step(module, recipe, x, g, call=None, **options):
    own = of_host(x).requires_grad_()
    module.zero_grad()
    with ft.autocast(recipe=recipe):
        y = (module if call is None else call)(own, **options)
    y.backward(of_host(g))
    grads = {name: host(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    return {"y": host(y), "dx": host(own.grad), **grads}


def torch_steps(name, kind, dtype, compiled):
    module = torch_module(kind, dtype)
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else None
    for number in range(STEPS):
        torch.manual_seed(number)
        found = torch_step(module, RECIPES[name], *batch(kind, number, dtype), call)
        yield found | state_of(module)


def torch_pairs():
    """What the steps' modules draw."""
    for number in range(STEPS):
        torch.manual_seed(number)
        yield ft.dropout_seed("cpu").numpy().copy()


def key_of(number):
    return jax.random.key(1000 + number)


def jax_pairs():
    for number in range(STEPS):
        yield fj.dropout_seed(jax.random.fold_in(key_of(number), 1))


def jax_layer(kind):
    """``function(x, parameters, sets)``: kernels lie as the other frontends have them."""
    if kind == "Linear":
        return lambda x, own, sets: fj.dense(x, own["weight"], own["bias"], ((1,), (1,)), sets[0])

    def layer(x, own, sets):
        fc1 = own["fc1_weight"]
        kernels = fc1.reshape(1, *fc1.shape), own["fc2_weight"]
        biases = own["fc1_bias"].reshape(1, -1), own["fc2_bias"]
        norm = own["layer_norm_weight"], own["layer_norm_bias"]
        more = {"quantizer_sets": sets, "kernel_layout": "oi", "epsilon": 1e-5}
        return fj.layernorm_mlp(x, *norm, kernels, biases, **more)

    return layer


def jax_steps(name, kind, dtype):
    recipe, module = RECIPES[name], native(kind, dtype)
    own, layer = parameters(module, dtype), jax_layer(kind)

    @jax.jit
    def step(own, sets, key, x, g):
        with fj.autocast(enabled=True, recipe=recipe, rng=key):
            y, pull = jax.vjp(layer, x, own, sets)
            return y, *pull(g)

    sets = tuple(fj.create_set(recipe) for _ in module.gemms)
    for number in range(STEPS):
        y, dx, grads, sets = step(own, sets, key_of(number), *batch(kind, number, dtype))
        found = {"y": np.asarray(y), "dx": np.asarray(dx)}
        found |= {own: np.asarray(grad) for own, grad in grads.items()}
        yield found | slots_of(sets)


def slots_of(sets):
    return {
        f"{i}.{slot}.{field}": np.asarray(value).reshape(-1)
        for i, each in enumerate(sets)
        for slot in SLOTS
        if getattr(each, slot) is not None
        for field, value in getattr(each, slot)._asdict().items()
    }


def as_slots(step, products):
    """The state of a native step as ``slots_of`` has it."""
    found = {key: value for key, value in step.items() if not key.startswith(STATES)}
    for i in range(products):
        for slot, (state, each, at) in SLOTS.items():
            if f"{state}.scale" in step:
                column = each * i + at
                found[f"{i}.{slot}.scale"] = step[f"{state}.scale"][column : column + 1]
                history = step[f"{state}.amax_history"][:, column]
                found[f"{i}.{slot}.amax_history"] = np.ascontiguousarray(history)
    return found


def same(frontend, got, want):
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.keys() == b.keys()
        for what in b:
            assert_same_bits(f"{frontend}, step {number}: {what}", a[what], b[what])


# to compile costs more than it may find for another recipe: one in six is compiled or jitted
WAYS = ["compiled", "eager", "eager", "jitted", *["eager"] * 8]
USUAL = [
    "-".join((name, list(MODULES)[i % 2], DTYPES[i // 2 % len(DTYPES)], WAYS[i % 12]))
    for i, name in enumerate(RECIPES)
]


@combinations(
    {"name": list(RECIPES), "kind": list(MODULES), "dtype": DTYPES, "way": ["eager", "compiled", "jitted"]},
    USUAL,
)
def test_the_same_bits_in_three_frontends(name, kind, dtype, way):
    """Two steps: y, dx, the parameters' gradients, and where scales have state that too. ``make test`` runs
    every recipe in one way."""
    pairs = jax_pairs() if way == "jitted" else torch_pairs()
    want = list(native_steps(name, kind, dtype, list(pairs)))
    if way == "jitted":
        want = [as_slots(step, 1 if kind == "Linear" else 2) for step in want]
        same(way, jax_steps(name, kind, dtype), want)
    else:
        same(way, torch_steps(name, kind, dtype, way == "compiled"), want)


@combinations({"name": RANDOM}, usual=RANDOM[::8])
def test_jax_wants_a_key_for_random_bits(name):
    """And eager calls draw what jitted ones draw."""
    x, _ = batch("Linear", 0, "float32")
    own = parameters(native("Linear", "float32"), "float32")

    def layer(key):
        with fj.autocast(enabled=True, recipe=RECIPES[name], rng=key):
            y, pull = jax.vjp(lambda x: fj.dense(x, own["weight"], None, ((1,), (1,))), x)
            return y, *pull(y)

    with pytest.raises(
        RecipeError, match=r"dense: rng: missing, expected a key: autocast\(\.\.\., rng=key\)"
    ):
        layer(None)
    for eager, jitted in zip(layer(key_of(0)), jax.jit(layer)(key_of(0)), strict=True):
        assert_same_bits("jitted", np.asarray(jitted), np.asarray(eager))
    assert any((a != b).any() for a, b in zip(layer(key_of(0)), layer(key_of(1)), strict=True))


EMULATED = [
    name for name, recipe in RECIPES.items() if recipe_info.support_of(recipe, None).status == "emulated"
]


@pytest.mark.parametrize("name", EMULATED)
def test_torch_holds_no_codes_of_emulated_products(name):
    recipe, x = RECIPES[name], torch.ones(4, named.IN, requires_grad=True)
    said = "got emulated products of .*, expected a recipe whose products take FP8 codes"
    # those have tensors of their own for weights
    if not name.startswith(("mxfp8", "nvfp4", "fp4_all", "delayed x, mx")):
        blocks = recipe.quantization.w.coded_scales
        why = "expected a recipe of Transformer Engine's formats and scales" if blocks else said
        with (
            pytest.raises(UnsupportedError, match=f"quantized_model_init: recipe: .*{why}"),
            ft.quantized_model_init(recipe=recipe),
        ):
            pass
    module = torch_module("Linear", "float32")
    for argument in ("fp8_output", "fp8_grad"):
        with pytest.raises(UnsupportedError, match=f"Linear: {argument}: {said}"), ft.autocast(recipe=recipe):
            module(x, **{argument: True})


def reentrant(module, x):
    return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=True)


@combinations({"name": list(RECIPES)}, usual=list(RECIPES)[::6])
def test_torch_caches_recomputes_and_accumulates(name, monkeypatch):
    """An FP8 weight that is kept over microbatches, activations that are recomputed, by fp8kit's checkpoint
    and torch's, and ``main_grad``: the bits of a plain step."""
    kind, recipe = "LayerNormMLP", RECIPES[name]
    x, g = batch(kind, 0, "float32")
    # one pair for all draws: a weight that is cast on its own draws one more
    pair = torch.tensor([3, 5])
    monkeypatch.setattr(layers_of_torch, "next_rng", lambda device: pair)
    want = [torch_step(torch_module(kind, "float32"), recipe, x, g)]
    kept = torch_module(kind, "float32")
    # with delayed scaling the scales have moved after the first microbatch, and the kept weight has not
    for first in (True, False) if recipe.history is None else (True,):
        same(
            f"is_first_microbatch={first}", [torch_step(kept, recipe, x, g, is_first_microbatch=first)], want
        )
    for checkpoint in (ft.checkpoint, reentrant):
        module = torch_module(kind, "float32")
        found = torch_step(module, recipe, x, g, lambda v, m=module, c=checkpoint: c(m, v))
        same(checkpoint.__qualname__, [found], want)
    fused = torch_module(kind, "float32", fuse_wgrad_accumulation=True)
    weights = {"fc1_weight": fused.fc1_weight, "fc2_weight": fused.fc2_weight}
    for parameter in weights.values():
        parameter.main_grad = torch.full_like(parameter, 3.0)
    found = torch_step(fused, recipe, x, g)
    for weight, parameter in weights.items():
        added = np.full(parameter.shape, 3, np.float32) + want[0][weight]
        assert_same_bits(weight, host(parameter.main_grad), added)
    rest = want[0].keys() - weights.keys()
    same("main_grad", [{key: found[key] for key in rest}], [{key: want[0][key] for key in rest}])
