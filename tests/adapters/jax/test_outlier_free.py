"""Layers without outliers in JAX: Smooth-SwiGLU and xIELU as functions, with the native layer's bits; in Flax
and NNX with norms after the branches, which the native layer has too."""

from __future__ import annotations

import contextlib

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from fp8kit_jax import flax as flax_modules
from fp8kit_jax import nnx as nnx_modules

from fp8kit import autocast, nn, tensor
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.testing import assert_close, assert_same_bits, relative_error
from tests.adapters.jax.native import RECIPES, F, K, draw, random_parameters, steps
from tests.support.combinations import combinations

pytestmark = pytest.mark.usefixtures("same_bits")
# name -> the native layer's options, activation in JAX
MLPS = {
    "channel": ({"activation": "swiglu", "smooth_swiglu": "channel"}, ("silu", "linear")),
    "token": ({"activation": "geglu", "smooth_swiglu": "token"}, ("gelu", "linear")),
    "xielu": ({"activation": "xielu"}, ("xielu",)),
    "no-norm": ({"activation": "xielu", "input_layernorm": False}, ("xielu",)),
}


@combinations({"recipe": RECIPES.keys(), "kind": MLPS.keys()})
def test_the_function_is_the_native_layer(recipe, kind, device):
    options, types = MLPS[kind]
    module = nn.LayerNormMLP(K, F, eps=1e-5, device=device, **options)

    def function(p, sets, x):
        alphas = (p["alpha_p"], p["alpha_n"]) if types == ("xielu",) else None
        return fj.layernorm_mlp(
            x,
            p.get("layer_norm_weight"),
            p.get("layer_norm_bias"),
            (p["fc1_weight"].reshape(len(types), F, K), p["fc2_weight"]),
            (p["fc1_bias"].reshape(len(types), F), p["fc2_bias"]),
            "layernorm",
            False,
            1e-5,
            types,
            sets,
            kernel_layout="oi",
            smooth_swiglu=options.get("smooth_swiglu"),
            alphas=alphas,
        )

    steps(module, function, random_parameters(module, "float32"), RECIPES[recipe], "float32", 2, device)


@pytest.mark.parametrize("recipe", ["high", "current"])
def test_kernels_the_other_way_round(recipe):
    """By channel s multiplies the rows of a kernel (F, H): the same values, sums in another order."""
    x, kernels = draw(0, (32, K)), (draw(1, (K, 2, F), scale=0.2), draw(2, (F, K), scale=0.2))
    transposed = np.ascontiguousarray(kernels[0].transpose(1, 2, 0)), np.ascontiguousarray(kernels[1].T)
    found = []
    for given, layout in ((kernels, "io"), (transposed, "oi")):
        sets = (fj.create_set(RECIPES[recipe]) if RECIPES[recipe] else fj.noop_quantizer_set,) * 2

        def total(given, layout=layout, sets=sets):
            y = fj.layernorm_mlp(
                x,
                None,
                None,
                given,
                activation_type=("silu", "linear"),
                quantizer_sets=sets,
                kernel_layout=layout,
                smooth_swiglu="channel",
            )
            return (y**2).sum()

        found.append(jax.jit(jax.value_and_grad(total))(given))
    (value, grads), (want, transposed_grads) = found
    assert relative_error(np.asarray(value), np.asarray(want)) < 1e-5
    assert relative_error(np.asarray(grads[0]).transpose(1, 2, 0), np.asarray(transposed_grads[0])) < 1e-5
    assert relative_error(np.asarray(grads[1]).T, np.asarray(transposed_grads[1])) < 1e-5


@combinations(
    {"recipe": ["high", "current"], "kind": ["xielu", "token", "channel"]},
    usual=["high-xielu", "current-token"],
)
def test_over_devices(kind, recipe):
    """Rows and inner features over a mesh of four: values and gradients of one device, sums in another order
    aside. Smoothed, every device does the whole."""
    options, types = MLPS[kind]
    parts = len(types)
    args = [draw(0, (8, 16, 64)), np.ones(64, np.float32), draw(1, (64, parts, 128), scale=0.1)]
    args += [draw(2, (128, 64), scale=0.1)]
    args += [np.float32([0.3]), np.float32([-0.7])] if parts == 1 else []

    def total(x, gamma, first, second, *alphas):
        sets = (fj.create_set(RECIPES[recipe]) if RECIPES[recipe] else fj.noop_quantizer_set,) * 2
        more = {"smooth_swiglu": options.get("smooth_swiglu"), "alphas": alphas or None}
        return (
            fj.layernorm_mlp(
                x,
                gamma,
                None,
                (first, second),
                norm_type="rmsnorm",
                activation_type=types,
                quantizer_sets=sets,
                **more,
            )
            ** 2
        ).sum()

    step = jax.jit(jax.value_and_grad(total, argnums=tuple(range(len(args)))))
    want, wanted = step(*args)
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("rows", "tensor"))
    specs = [("rows",), (), (None, None, "tensor"), ("tensor",), (), ()]
    placed = [
        jax.device_put(a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        for a, spec in zip(args, specs, strict=False)
    ]
    value, grads = step(*placed)
    assert relative_error(np.asarray(value), np.asarray(want)) < 1e-5
    for i, (got, grad) in enumerate(zip(grads, wanted, strict=True)):
        assert relative_error(np.asarray(got), np.asarray(grad)) < 1e-4, i


def test_the_activation_alone():
    x, alphas = draw(0, (5, 1, 24), scale=2.0), (np.float32([0.3]), np.float32([-0.7]))

    def formula(x, p, n):
        p, n = jax.nn.softplus(p), 0.5 + jax.nn.softplus(n)
        return jnp.where(x > 0, p * x * x, n * (jnp.expm1(x) - x)) + 0.5 * x

    def own(x, *alphas):
        return fj.activation(x, ("xielu",), alphas=alphas)

    with jax.enable_x64(True):
        wide = [jnp.asarray(value, jnp.float64) for value in (x[:, 0], *alphas)]
        want, pull = jax.vjp(jax.jit(formula), *wide)
        slopes = pull(jnp.ones_like(want))
        want, slopes = np.asarray(want), [np.asarray(slope) for slope in slopes]
    y, grads = jax.jit(lambda *a: (lambda y, pull: (y, pull(jnp.ones_like(y))))(*jax.vjp(own, *a)))(
        x, *alphas
    )
    # eight float32 operations on numbers of that size
    assert_close("y", np.asarray(y), want, "float32", 8 * 2.0**-24 * (1 + x[:, 0].astype(np.float64) ** 2))
    slack = 8 * 2.0**-24 * (2 + 2 * np.abs(x[:, 0]))
    assert_close("dx", np.asarray(grads[0])[:, 0], slopes[0], "float32", slack)
    for got, slope in zip(grads[1:], slopes[1:], strict=True):
        assert_close("alpha", np.asarray(got), slope, "float32", x.size * 2.0**-24 * float((x**2).sum()))


FOG = {"norm_position": "after", "norm_gain": 0.5, "qk_norm_type": "RMSNorm", "qk_norm_learned": False}
SIZES = (32, 48, 4)
# native parameter -> path in Flax, in NNX
PATHS = {
    "self_attention.qkv.weight": ("attention/qkv/kernel", "attention/qkv/kernel"),
    "self_attention.proj.weight": ("attention/out/kernel", "attention/out/kernel"),
    "layernorm_mlp.fc1_weight": ("mlp/wi_kernel", "mlp/wi_kernel"),
    "layernorm_mlp.fc2_weight": ("mlp/wo_kernel", "mlp/wo_kernel"),
    "layernorm_mlp.alpha_p": ("mlp/alpha_p", "mlp/alpha_p"),
    "layernorm_mlp.alpha_n": ("mlp/alpha_n", "mlp/alpha_n"),
    "self_attention_norm.weight": ("attention_norm/scale", "attention_norm/scale"),
    "mlp_norm.weight": ("mlp_norm/scale", "mlp_norm/scale"),
}


def the_layers():
    """The native layer, the Flax module and the NNX module of one arrangement."""
    own = nn.TransformerLayer(
        *SIZES,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        attn_input_format="bshd",
        normalization="RMSNorm",
        activation="xielu",
        bias=False,
        softmax_scale=0.125,
        device="cpu",
        **FOG,
    )
    linen_layer = flax_modules.TransformerLayer(
        *SIZES,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_type="rmsnorm",
        layernorm_epsilon=1e-5,
        mlp_activations=("xielu",),
        enable_relative_embedding=False,
        scale_factor=0.125,
        **FOG,
    )
    nnx_layer = nnx_modules.TransformerLayer(
        *SIZES,
        rngs=nnx.Rngs(0),
        layernorm_type="rmsnorm",
        epsilon=1e-5,
        mlp_activations=("xielu",),
        scale_factor=0.125,
        attn_mask_type="causal",
        **FOG,
    )
    return own, linen_layer, nnx_layer


GAINS = ("self_attention.q_norm.weight", "self_attention.k_norm.weight")


def native_step(module, recipe, x, g):
    """As ``native.step``; nothing for parameters that are not trained."""
    x = tensor(x, requires_grad=True, device="cpu")
    with contextlib.nullcontext() if recipe is None else autocast(recipe=recipe):
        y = module(x)
    y.backward(tensor(g, device="cpu"))
    grads = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    assert set(PATHS) == set(grads)
    return y.numpy(), grads | {"x": x.grad.numpy()}


def kernel_of(values, like):
    """A native weight (out, in) as a kernel of that shape."""
    return np.asarray(values).T.reshape(like.shape) if len(like.shape) > 1 else np.asarray(values)


@combinations({"recipe": ["high", "current"]}, usual=["current"])
def test_norms_after_the_branches(recipe):
    """The native layer's output and gradients. Products of kernels that lie the other way are the same sums
    in another order."""
    own, linen_layer, nnx_layer = the_layers()
    state = random_parameters(own, "float32")
    x, g = draw(1, (2, 16, 32)), draw(2, (2, 16, 32))
    own.load_state_dict({**state, **{name: np.ones_like(state[name]) for name in GAINS}})
    want_y, want = native_step(own, RECIPES[recipe], x, g)
    with fj.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        made = linen.unbox(linen_layer.init(jax.random.key(0), x, deterministic=True))["params"]
        nnx_state = nnx.state(nnx_layer, nnx.Param)
        assert_same_bits("start", np.asarray(made["attention_norm"]["scale"]), np.full(32, 0.5, np.float32))
        trees = made, nnx.to_pure_dict(nnx_state)
        assert all(len(jax.tree.leaves(tree)) == len(PATHS) for tree in trees)  # no gains of queries and keys

        def flax_call(params, x):
            return linen_layer.apply({"params": params}, x, deterministic=True)

        def nnx_call(params, x):
            graph, rest = nnx.split(nnx_layer)
            nnx.replace_by_pure_dict(rest, params)
            return nnx.merge(graph, rest)(x)

        for place, (call, tree) in enumerate(zip((flax_call, nnx_call), trees, strict=True)):
            params = jax.tree.map(lambda a: a, tree)
            for name, paths in PATHS.items():
                *walk, leaf = paths[place].split("/")
                at = params
                for part in walk:
                    at = at[part]
                at[leaf] = jnp.asarray(kernel_of(state[name], at[leaf]))
            y, pull = jax.vjp(jax.jit(call), params, x)
            grads, dx = pull(g)
            assert relative_error(np.asarray(y), want_y) < 1e-5
            assert relative_error(np.asarray(dx), want["x"]) < 1e-4
            for name, paths in PATHS.items():
                at = grads
                for part in paths[place].split("/"):
                    at = at[part]
                assert relative_error(np.asarray(at), kernel_of(want[name], at)) < 1e-4, name


@combinations({"recipe": ["delayed", "current"]}, usual=())
def test_it_learns(recipe):
    """Flax, FP8 state handed on, the learned numbers among what moves."""
    layer = the_layers()[1]
    x, want = draw(1, (2, 16, 32)), draw(2, (2, 16, 32))
    with fj.autocast(enabled=True, recipe=RECIPES[recipe]):
        variables = linen.unbox(layer.init(jax.random.key(0), x, deterministic=True))
        optimizer = optax.adam(1e-2)
        moments = optimizer.init(variables["params"])

        @jax.jit
        def step(variables, moments):
            def loss(variables):
                return ((layer.apply(variables, x, deterministic=True) - want) ** 2).mean()

            value, grads = jax.value_and_grad(loss)(variables)
            updates, moments = optimizer.update(grads["params"], moments, variables["params"])
            rest = {name: grads[name] for name in variables if name != "params"}
            return value, {"params": optax.apply_updates(variables["params"], updates), **rest}, moments

        losses = []
        for _ in range(12):
            value, variables, moments = step(variables, moments)
            losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    start = float(np.log(np.expm1(0.8)))
    assert abs(float(variables["params"]["mlp"]["alpha_p"][0]) - start) > 1e-4


def test_what_is_refused():
    x, gamma = draw(0, (4, K)), np.ones(K, np.float32)
    kernels = draw(1, (K, 1, F)), draw(2, (F, K))
    with pytest.raises(ShapeError, match="alphas"):
        fj.layernorm_mlp(x, gamma, None, kernels, norm_type="rmsnorm", activation_type=("xielu",))
    with pytest.raises(ArgumentError, match="smooth_swiglu"):
        fj.layernorm_mlp(x, gamma, None, kernels, norm_type="rmsnorm", smooth_swiglu="token")
    module = flax_modules.LayerNormMLP(
        F, activations=("silu", "linear"), smooth_swiglu="token", intermediate_dropout_rate=0.5
    )
    with pytest.raises(ArgumentError, match="smooth_swiglu"):
        module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    post = flax_modules.TransformerLayer(32, 48, 4, norm_position="after", output_layernorm=True)
    with pytest.raises(ArgumentError, match="output_layernorm"):
        post.init(jax.random.key(0), draw(0, (2, 4, 32)), deterministic=True)
    with pytest.raises(ArgumentError, match="norm_gain"):
        nnx_modules.TransformerLayer(32, 48, 4, rngs=nnx.Rngs(0), norm_gain=0.5)
