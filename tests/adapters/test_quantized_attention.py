"""FP8 attention in all three frontends: eager, compiled and jitted, with the same bits; layers with
projections; what stays in high precision."""

from __future__ import annotations

from dataclasses import replace

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from flax import linen, nnx
from fp8kit_jax import flax as flax_layers
from fp8kit_jax import nnx as nnx_layers

import fp8kit as fk
from fp8kit.errors import RecipeError
from fp8kit.recipe import (
    DataRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerLayer,
)
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_same_bits, relative_error
from tests.support.combinations import combinations
from tests.support.quantized_attention import cast

B, S, HEADS, DIM = 2, 33, 4, 16
CURRENT = Float8CurrentScaling(fp8_dpa=True)
ROUNDED = {
    name: replace(getattr(CURRENT.attention, name), stochastic_bits=bits)
    for name, bits in {"q": 32, "k": 32, "v": 8, "do": 8, "p": 16, "ds": 32}.items()
}
LEVERS = {"rows_per_block": 16, "rotation": 16, "rotation_v": 16, "signs": "random"}
RANDOM = DataRecipe(CURRENT.quantization, "random", replace(CURRENT.attention, **LEVERS, **ROUNDED))
RECIPES = {
    "delayed": DelayedScaling(fp8_dpa=True),
    "delayed mha": DelayedScaling(fp8_dpa=True, fp8_mha=True),
    "current": CURRENT,
    "current mha": Float8CurrentScaling(fp8_dpa=True, fp8_mha=True),
    "mxfp8": MXFP8BlockScaling(fp8_dpa=True),
    "nvfp4": NVFP4BlockScaling(fp8_dpa=True, disable_stochastic_rounding=True),
    "flash attention 3": NAMED["flash_attention_3"].recipe,
}


@pytest.fixture(autouse=True)
def _same_bits():
    with fk.deterministic():
        yield
    torch._dynamo.reset()


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layers_of(groups=HEADS):
    return [draw(i, B, S, heads, DIM) for i, heads in enumerate((HEADS, groups, groups))]


def native(recipe, layers, g, **options):
    """o and the gradients of the native core attention."""
    core = fk.nn.DotProductAttention(HEADS, DIM, layers[1].shape[2], qkv_format="bshd", **options)
    own = [fk.tensor(x, requires_grad=True) for x in layers]
    with fk.autocast(enabled=recipe is not None, recipe=recipe):
        o = core(*own)
    o.backward(fk.tensor(g))
    return [o.numpy(), *(x.grad.numpy() for x in own)]


def of_torch(recipe, layers, g, compiled, **options):
    core = ft.DotProductAttention(HEADS, DIM, layers[1].shape[2], qkv_format="bshd", **options)
    call = torch.compile(core, fullgraph=True, backend="aot_eager") if compiled else core
    own = [torch.tensor(x, requires_grad=True) for x in layers]
    with ft.autocast(enabled=recipe is not None, recipe=recipe):
        o = call(*own)
    o.backward(torch.tensor(g))
    return [o.detach().numpy(), *(x.grad.numpy() for x in own)]


def of_jax(recipe, layers, g, key=None, **options):
    def attend(*own):
        with fj.autocast(enabled=recipe is not None, recipe=recipe, rng=key):
            return fj.dot_product_attention(*own, **options)

    o, pull = jax.vjp(jax.jit(attend), *layers)
    grads = pull(jnp.asarray(g.reshape(o.shape)))
    return [np.asarray(o).reshape(g.shape), *map(np.asarray, grads)]


def same(what, found, want):
    for name, a, b in zip("oqkv", found, want, strict=True):
        assert_same_bits(f"{what}: {name}", a, b)


@combinations(
    {"name": RECIPES.keys(), "groups": [HEADS, 2]},
    usual=["delayed mha-2", "current-4", "mxfp8-4", "nvfp4-2", "flash attention 3-4"],
)
def test_the_same_bits_in_three_frontends(name, groups):
    recipe, layers, g = RECIPES[name], layers_of(groups), draw(9, B, S, HEADS * DIM)
    want, exact = native(recipe, layers, g), native(None, layers, g)
    for a, b in zip(want, exact, strict=True):
        assert 0.01 < relative_error(a, b) < 0.16  # it is quantised, and near
    same("eager", of_torch(recipe, layers, g, False), want)
    same("compiled", of_torch(recipe, layers, g, True), want)
    same("jitted", of_jax(recipe, layers, g), want)


def test_random_signs_in_three_frontends():
    """The pair that each frontend draws decides; another one gives other bits."""
    layers, g = layers_of(), draw(9, B, S, HEADS * DIM)
    torch.manual_seed(3)
    pair = ft.dropout_seed("cpu").numpy().copy()
    with fk.draw_from(lambda device: fk.tensor(pair, device=device)):
        want = native(RANDOM, layers, g)
    for compiled in (False, True):
        torch.manual_seed(3)
        same("torch", of_torch(RANDOM, layers, g, compiled), want)
    assert (of_torch(RANDOM, layers, g, False)[0] != want[0]).any()
    key = jax.random.key(5)
    pair = fj.dropout_seed(jax.random.fold_in(key, 1))
    with fk.draw_from(lambda device: fk.tensor(pair, device=device)):
        want = native(RANDOM, layers, g)
    same("jax", of_jax(RANDOM, layers, g, key), want)
    with pytest.raises(RecipeError, match=r"dot_product_attention: rng: missing, expected a key"):
        of_jax(RANDOM, layers, g)


@combinations(
    {"name": ["delayed mha", "current", "current mha", "mxfp8", "flash attention 3"]}, usual=["delayed mha"]
)
def test_layers_with_projections(name):
    """``TransformerLayer``: two training steps, torch eager and compiled as native."""
    recipe, options = RECIPES[name], {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    first = fk.nn.TransformerLayer(64, 128, HEADS, **options)
    values = {key: p.numpy().copy() for key, p in first.named_parameters()}
    want = []
    for number in range(2):
        x = fk.tensor(draw(number, S, B, 64), requires_grad=True)
        first.zero_grad()
        with fk.autocast(recipe=recipe):
            y = first(x)
        y.backward(fk.tensor(draw(5, S, B, 64)))
        want.append([y.numpy(), x.grad.numpy(), first.self_attention.proj.weight.grad.numpy()])
    for compiled in (False, True):
        layer = ft.TransformerLayer(64, 128, HEADS, device="cpu", **options)
        with torch.no_grad():
            for key, parameter in layer.named_parameters():
                parameter.copy_(torch.from_numpy(values[key]))
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        for number in range(2):
            x = torch.tensor(draw(number, S, B, 64), requires_grad=True)
            layer.zero_grad()
            with ft.autocast(recipe=recipe):
                y = call(x)
            y.backward(torch.tensor(draw(5, S, B, 64)))
            found = y.detach().numpy(), x.grad.numpy(), layer.self_attention.proj.weight.grad.numpy()
            for a, b in zip(found, want[number], strict=True):
                assert_same_bits(f"compiled={compiled}, step {number}", a, b)


def test_mha_hands_on_what_the_projection_multiplies():
    """Under ``fp8_mha`` o holds values of the forward format, and the projection's cast, by the same rule,
    changes none of them; the gradient of the packed projection likewise, in the backward format."""
    recipe = RECIPES["current mha"]
    core, how = fk.nn.DotProductAttention(HEADS, DIM, qkv_format="bshd"), recipe.attention
    x = fk.tensor(draw(0, B, S, 3 * HEADS * DIM), requires_grad=True)
    with fk.autocast(recipe=recipe):
        o = core(qkv_layer=x)
    o.backward(fk.tensor(draw(1, B, S, HEADS * DIM)))
    for found, own in ((o, how.o), (x.grad, how.dqkv)):
        values = found.numpy().reshape(1, 1, -1, 1)
        assert len(np.unique(np.abs(values))) <= 2 ** (own.format.bits - 1)
        again = cast(values, own, how, 1)
        assert relative_error(again, values) < 2.0**-22  # scale_inv's rounding
    plain = native(CURRENT, layers_of(), draw(9, B, S, HEADS * DIM))
    assert len(np.unique(np.abs(plain[0]))) > 2**8


def test_mha_has_one_scale_for_q_k_and_v_in_every_layout_and_frontend():
    """Under ``fp8_mha`` a large v coarsens q and k, alike for separate arrays, for views of one array, and
    for the packed layer."""
    recipe, g = RECIPES["current mha"], draw(9, B, S, HEADS * DIM)
    layers = [x * factor for x, factor in zip(layers_of(), (1, 1, 2.0**12), strict=True)]
    want = native(recipe, layers, g)
    assert relative_error(want[0], native(CURRENT, layers, g)[0]) > 0.05  # q and k have lost bits
    packed = np.concatenate([x.reshape(B, S, -1) for x in layers], -1)
    core, x = fk.nn.DotProductAttention(HEADS, DIM, qkv_format="bshd"), fk.tensor(packed, requires_grad=True)
    with fk.autocast(recipe=recipe):
        o = core(qkv_layer=x)
    o.backward(fk.tensor(g))
    parts = [part.reshape(B, S, HEADS, DIM) for part in np.split(x.grad.numpy(), 3, axis=-1)]
    same("packed", [o.numpy(), *parts], want)
    for compiled in (False, True):
        same("torch", of_torch(recipe, layers, g, compiled), want)
    core = ft.DotProductAttention(HEADS, DIM, qkv_format="bshd")
    own = torch.tensor(packed, requires_grad=True)
    with ft.autocast(recipe=recipe):
        o = core(*(part.unflatten(-1, (HEADS, DIM)) for part in own.chunk(3, -1)))
    o.backward(torch.tensor(g))
    parts = [part.reshape(B, S, HEADS, DIM) for part in np.split(own.grad.numpy(), 3, axis=-1)]
    same("torch, views", [o.detach().numpy(), *parts], want)
    same("jax", of_jax(recipe, layers, g), want)


@combinations(
    {"kind": ["flax", "nnx"], "name": ["current", "current mha", "mxfp8", "flash attention 3"]},
    usual=["flax-current mha", "nnx-mxfp8"],
)
def test_modules_of_jax_attend_as_the_function_does(kind, name):
    """And Flax's and NNX's layers with projections run jitted, forward and backward, near high precision."""
    layers = layers_of()
    want = of_jax(CURRENT, layers, draw(9, B, S, HEADS * DIM))[0]
    if kind == "flax":
        core = flax_layers.DotProductAttention(DIM, HEADS)
        run = jax.jit(lambda *own: core.apply({}, *own))
        layer = flax_layers.MultiHeadAttention(DIM, HEADS, input_layernorm=True)
        x = draw(3, B, S, HEADS * DIM)
        own = layer.init(jax.random.key(0), x, x, deterministic=True)
        call = lambda p, x: layer.apply(p, x, x, deterministic=True)[0]  # noqa: E731
    else:
        made = nnx_layers.DotProductAttention(HEADS)
        run = jax.jit(lambda *own: made(*own))
        module = nnx_layers.MultiHeadAttention(HEADS * DIM, HEADS, rngs=nnx.Rngs(0))
        graph, own = nnx.split(module)
        x = draw(3, B, S, HEADS * DIM)
        call = lambda p, x: nnx.merge(graph, p)(x)  # noqa: E731
    with fj.autocast(enabled=True, recipe=CURRENT):
        assert_same_bits("o", np.asarray(run(*layers)).reshape(want.shape), want)

    def loss(recipe, how=jax.value_and_grad):
        def of(p):
            with fj.autocast(enabled=recipe is not None, recipe=recipe):
                return (call(p, x) ** 2).mean()

        return jax.jit(how(of))(own)

    plain, grads = loss(None)
    linear = loss(Float8CurrentScaling(), how=lambda of: of)
    found, own_grads = loss(RECIPES[name])
    assert found not in (plain, linear)
    assert abs(found / plain - 1) < 0.1
    pairs = zip(jax.tree.leaves(own_grads), jax.tree.leaves(grads), strict=True)
    apart = [(float(((a - b) ** 2).sum()), float((b**2).sum())) for a, b in pairs]
    assert (sum(a for a, _ in apart) / sum(b for _, b in apart)) ** 0.5 < 0.2


def test_jax_vmap_and_meshes():
    """A call under ``vmap`` is the calls one by one; over a mesh each device runs the whole."""
    layers = [np.stack([x, 2 * x + 1]) for x in layers_of()]

    def attend(*own):
        with fj.autocast(enabled=True, recipe=CURRENT):
            return fj.dot_product_attention(*own)

    many = np.asarray(jax.vmap(attend)(*layers))
    for i in range(2):
        assert_same_bits(f"element {i}", many[i], np.asarray(attend(*(x[i] for x in layers))))
    devices = np.array(jax.devices()[:2])
    mesh = jax.sharding.Mesh(devices, ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    own = [x[0] for x in layers]
    placed = [jax.device_put(x, split) for x in own]
    assert_same_bits("mesh", np.asarray(jax.jit(attend)(*placed)), np.asarray(attend(*own)))


@pytest.mark.parametrize("frontend", ["native", "torch"])
def test_a_cache_is_in_high_precision(frontend):
    """Attention over a key-value cache under ``fp8_dpa`` gives the bits of a recipe without it."""
    here, found = (fk.nn, []) if frontend == "native" else (ft, [])
    make = fk.tensor if frontend == "native" else torch.tensor
    autocast = fk.autocast if frontend == "native" else ft.autocast
    no_grad = fk.no_grad if frontend == "native" else torch.no_grad
    for recipe in (CURRENT, Float8CurrentScaling(), None):
        core = here.DotProductAttention(HEADS, DIM, qkv_format="bshd", layer_number=1)
        cache = here.InferenceParams(B, 16, num_heads_kv=HEADS, head_dim_k=DIM, dtype=make(draw(0, 1)).dtype)
        cache.pre_step(dict.fromkeys(range(B), 4))
        with no_grad(), autocast(enabled=recipe is not None, recipe=recipe):
            o = core(*(make(x[:, :4].copy()) for x in layers_of()), inference_params=cache)
        found.append(np.asarray(o.numpy()))
    assert_same_bits("fp8_dpa", found[0], found[1])
    assert_same_bits("high precision", found[0], found[2])


def test_flax_decodes_in_high_precision():
    """A prompt's call, which makes the cache, and a token's."""
    layer, x = flax_layers.MultiHeadAttention(DIM, HEADS), draw(3, B, 8, HEADS * DIM)
    found, token = [], x[:, :1]
    variables = layer.init(jax.random.key(0), x, x, decode=True, deterministic=True)
    for recipe in (CURRENT, Float8CurrentScaling()):
        with fj.autocast(enabled=True, recipe=recipe):
            y, _ = layer.apply(variables, token, token, decode=True, deterministic=True, mutable=["cache"])
            prompt, _ = layer.apply(
                {"params": variables["params"]}, x, x, decode=True, deterministic=True, mutable=["cache"]
            )
            found.append([np.asarray(y[0]), np.asarray(prompt[0])])
            plain = np.asarray(layer.apply({"params": variables["params"]}, x, x, deterministic=True)[0])
        found[-1].append(plain)
    for a, b in zip(found[0][:2], found[1][:2], strict=True):
        assert_same_bits("decoded", a, b)
    assert (found[0][2] != found[1][2]).any()  # without decoding it is quantised


BY_NAME = PerLayer(CURRENT, (("high.*", None), ("plain", Float8CurrentScaling())))


@combinations({"name": ["high.core", "plain", "other", None]}, usual=())  # test_layer_recipes
def test_recipes_by_name_compiled(name):
    layers, g = layers_of(), draw(9, B, S, HEADS * DIM)
    expected = native(None if name in ("high.core", "plain") else CURRENT, layers, g)
    same("compiled", of_torch(BY_NAME, layers, g, True, name=name), expected)


def test_recipes_by_name():
    """``PerLayer`` decides for attention by the core attention's name."""
    recipe = BY_NAME
    layers, g = layers_of(), draw(9, B, S, HEADS * DIM)
    exact, want = native(None, layers, g), native(CURRENT, layers, g)
    for name, expected in (("high.core", exact), ("plain", exact), ("other", want), (None, want)):
        same("native", native(recipe, layers, g, name=name), expected)
        same("eager", of_torch(recipe, layers, g, False, name=name), expected)
    layer = fk.nn.MultiheadAttention(64, HEADS, name="block")
    assert layer.core_attention.name == "block.core_attention"
    assert fk.nn.name_layers(layer).core_attention.name == "core_attention"
    with pytest.raises(RecipeError, match="names"):
        of_jax(recipe, layers, g)

    class Parent(linen.Module):
        @linen.compact
        def __call__(self, *own):
            return [
                flax_layers.DotProductAttention(DIM, HEADS, name=name)(*own) for name in ("high", "other")
            ]

    with fj.autocast(enabled=True, recipe=PerLayer(CURRENT, (("high", None),))):
        with pytest.raises(RecipeError, match="names"):
            fj.dot_product_attention(*layers)
        for found, expected in zip(Parent().apply({}, *layers), (exact, want), strict=True):
            assert_same_bits("flax", np.asarray(found).reshape(g.shape), expected[0])


def reentrant(function, *own):
    return torch.utils.checkpoint.checkpoint(function, *own, use_reentrant=True)


def not_reentrant(function, *own):
    return torch.utils.checkpoint.checkpoint(function, *own, use_reentrant=False)


@pytest.mark.parametrize("checkpoint", [ft.checkpoint, reentrant, not_reentrant])
def test_checkpoints_of_torch(checkpoint):
    """A core attention by itself, whose backward runs outside of the autocast."""
    layers, g = layers_of(), draw(9, B, S, HEADS * DIM)
    for recipe in (CURRENT, RANDOM):
        results = []
        for again in (False, True):
            torch.manual_seed(4)
            core = ft.DotProductAttention(HEADS, DIM, qkv_format="bshd")
            own = [torch.tensor(x, requires_grad=True) for x in layers]
            with ft.autocast(recipe=recipe):
                o = checkpoint(core, *own) if again else core(*own)
            o.backward(torch.tensor(g))
            results.append([o.detach().numpy(), *(x.grad.numpy() for x in own)])
        same("torch", *results)


def test_recomputed_attention():
    """What ``checkpoint_core_attention`` computes once more is what was computed, random signs too."""
    layers, g = layers_of(), draw(9, B, S, HEADS * DIM)
    for recipe in (CURRENT, RANDOM):
        results = []
        core = fk.nn.DotProductAttention(HEADS, DIM, qkv_format="bshd")
        for call in (
            core,
            lambda *own, core=core: core(*own, checkpoint_core_attention=True),
            lambda *own, core=core: fk.checkpoint(core, *own),
        ):
            fk.manual_seed(4)
            own = [fk.tensor(x, requires_grad=True) for x in layers]
            with fk.autocast(recipe=recipe):
                o = call(*own)
            o.backward(fk.tensor(g))
            results.append([o.numpy(), *(x.grad.numpy() for x in own)])
        for found in results[1:]:
            same("native", found, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "sequence"), [(128, 64), (1024, 512), (4096, 2048)])
@pytest.mark.parametrize("name", ["delayed", "current mha", "flash attention 3"])
def test_a_layer_of_torch_on_a_gpu(name, hidden, sequence):
    """So many steps that recorded calls become graphs; finite, and near high precision."""
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    torch.manual_seed(0)
    layer = ft.TransformerLayer(
        hidden,
        4 * hidden,
        hidden // 64 if hidden < 4096 else 32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=kind["dtype"],
        device="cuda",
    )
    x, g = (torch.randn(sequence, 2, hidden, **kind) for _ in range(2))
    x.requires_grad_()
    want = layer(x).detach()
    for _ in range(12):
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with ft.autocast(recipe=RECIPES[name]):
            y = layer(x)
        y.backward(g)
    assert torch.isfinite(x.grad).all()
    assert relative_error(y.detach().float().cpu().numpy(), want.float().cpu().numpy()) < 0.1
