"""A transformer layer through every frontend: Flax, NNX, PyTorch and ``fp8kit.nn``, with the same weights, on
the CPU and on a GPU.

The output, dx, the gradients of norms and biases and the FP8 state are the same bits. Kernels lie (in, out)
in Flax and NNX, where the other frontends have (out, in): their gradients are the same sums in another order.
Without FP8 cuBLASLt may for that reason sum outputs in another order too (FP8 products have one layout), so
that those layers are compared on the CPU.
"""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import numpy as np
import pytest
import torch
from flax import linen, nnx, traverse_util
from fp8kit_jax import flax as flax_modules
from fp8kit_jax import nnx as nnx_modules

import fp8kit as fk
from fp8kit.testing import assert_same_bits, epsilon, relative_error
from tests.adapters.jax.native import RECIPES, draw, slots
from tests.adapters.torch.twins import (
    WIDTH,
    batches,
    native_step,
    numpy_of,
    same,
    same_state,
    torch_step,
    twins,
)
from tests.support.combinations import combinations

pytestmark = pytest.mark.usefixtures("same_bits")
INNER, HEADS, EPSILON = 64, 3, 1e-5
OPTIONS = {
    "num_attention_heads": HEADS,
    "num_gqa_groups": HEADS,
    "attn_input_format": "bshd",
    "fuse_qkv_params": True,
    "qkv_weight_interleaved": False,
    "layernorm_epsilon": EPSILON,
}
# Two sums of 10 terms of random signs, whose magnitudes add up to about sqrt(10) times the sum: in float32
# (Higham 2002, eq. 3.5), and by one instruction of the tensor cores (docs/numerics.md). What is rounded to 16
# bits then may differ by one step.
SUMS = {"cpu": 2 * 10 * 2.0**-24 * 10**0.5, "cuda": 2 * 2.0**-13 * 10**0.5}

QKV, PROJ, MLP = "self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp"
# native parameter -> path in Flax, in NNX
PARAMETERS = {
    f"{QKV}.layer_norm_weight": ("attention/qkv/scale", "attention/qkv/norm/scale"),
    f"{QKV}.layer_norm_bias": ("attention/qkv/ln_bias", "attention/qkv/norm/ln_bias"),
    f"{QKV}.weight": ("attention/qkv/kernel",) * 2,
    f"{PROJ}.weight": ("attention/out/kernel",) * 2,
    f"{MLP}.layer_norm_weight": ("mlp/scale", "mlp/norm/scale"),
    f"{MLP}.layer_norm_bias": ("mlp/ln_bias", "mlp/norm/ln_bias"),
    f"{MLP}.fc1_weight": ("mlp/wi_kernel",) * 2,
    f"{MLP}.fc2_weight": ("mlp/wo_kernel",) * 2,
}
BIASES = {
    f"{QKV}.bias": ("attention/qkv/bias",) * 2,
    f"{PROJ}.bias": ("attention/out/bias",) * 2,
    f"{MLP}.fc1_bias": ("mlp/wi_bias",) * 2,
    f"{MLP}.fc2_bias": ("mlp/wo_bias",) * 2,
}
PLAIN = "self_attention.qkv"  # with the norm at the layer's end instead, in Flax
ELSEWHERE = {
    f"{PLAIN}.weight": ("attention/qkv/kernel",),
    f"{PLAIN}.bias": ("attention/qkv/bias",),
    "layernorm.weight": ("output_layernorm/scale",),
    "layernorm.bias": ("output_layernorm/ln_bias",),
}
# native module, number of its product -> path of a slot's array in Flax, in NNX
PRODUCTS = {
    (QKV, 0): ("fp8/attention/qkv/{}_{}", "fp8/attention/qkv/quantizers/{}_{}"),
    (PROJ, 0): ("fp8/attention/out/{}_{}", "fp8/attention/out/quantizers/{}_{}"),
    (MLP, 0): ("fp8/mlp/{}_0_{}", "fp8/mlp/quantizers_0/{}_{}"),
    (MLP, 1): ("fp8/mlp/{}_1_{}", "fp8/mlp/quantizers_1/{}_{}"),
}


def flax_layer(x, bias, encoded=None, **options):
    """``function(variables, x)`` of variables by their paths, with ``encoded`` where there is one, and their
    shapes."""
    layer = flax_modules.TransformerLayer(
        WIDTH,
        INNER,
        HEADS,
        layernorm_epsilon=EPSILON,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        enable_relative_embedding=False,
        scale_attn_logits=True,
        dtype=x.dtype,
        use_bias=bias,
        **options,
    )
    shapes = linen.unbox(jax.eval_shape(layer.init, jax.random.key(0), x, encoded))
    shapes = {**shapes["params"], "fp8": shapes.get(fj.FP8_COLLECTION_NAME, {})}

    def function(variables, x, encoded=None):
        params = traverse_util.unflatten_dict(variables, "/")
        return layer.apply(
            {fj.FP8_COLLECTION_NAME: params.pop("fp8", {}), "params": params}, x, encoded, deterministic=True
        )

    return function, traverse_util.flatten_dict(shapes, sep="/")


def nnx_layer(x, bias, **options):
    """Likewise."""
    fields = {"epsilon": EPSILON, "dtype": x.dtype, "use_bias": bias} | options
    made = nnx.eval_shape(
        lambda: nnx_modules.TransformerLayer(WIDTH, INNER, HEADS, rngs=nnx.Rngs(0), **fields)
    )
    layer, state = nnx.split(made)
    leaves, kind = jax.tree_util.tree_flatten_with_path(state)
    paths = ["/".join(part.key for part in path if hasattr(part, "key")) for path, _ in leaves]
    paths = [f"fp8/{path}" if "/quantizers" in path else path for path in paths]

    def function(variables, x):
        return nnx.merge(layer, jax.tree.unflatten(kind, [variables[path] for path in paths]))(x)

    return function, {path: leaf for path, (_, leaf) in zip(paths, leaves, strict=True)}


NATIVE = {"head_dim": "kv_channels"}  # of arguments whose names differ
FRONTENDS = {"flax": flax_layer, "nnx": nnx_layer}
DTYPES = ("float32", "bfloat16")
CASES = [
    ("flax", "delayed", "float32", False),
    ("flax", "delayed", "bfloat16", True),
    ("flax", "block", "bfloat16", False),
]
CASES += [("nnx", "delayed", "float32", True), ("nnx", "block", "float32", False)]
CASES += [
    (frontend, "current", dtype, bias)
    for frontend in FRONTENDS
    for dtype, bias in zip(DTYPES, (True, False), strict=True)
]


@combinations(
    {"case": {"-".join(map(str, case)): case for case in CASES}},
    usual=["flax-delayed-bfloat16-True", "flax-block-bfloat16-False", "nnx-current-bfloat16-False"],
)
def test_a_transformer_layer(case, device):
    same_layer(*case, device)


@pytest.mark.parametrize(
    ("frontend", "dtype", "bias"),
    [("flax", "bfloat16", True), ("flax", "float32", False), ("nnx", "bfloat16", False)],
)
def test_a_transformer_layer_without_fp8(frontend, dtype, bias):
    same_layer(frontend, "high", dtype, bias, "cpu")


# the former in test_a_decoder, too
@combinations(
    {"option": ["apply_residual_connection_post_layernorm", "output_layernorm"]}, usual=["output_layernorm"]
)
def test_residuals_that_start_elsewhere(option, device):
    same_layer("flax", "delayed", "bfloat16", True, device, **{option: True})


@combinations({"frontend": FRONTENDS.keys()}, usual=["flax"])
def test_heads_that_are_wider_than_the_layer(frontend, device):
    """Three heads of 24 features in a layer of 48."""
    same_layer(frontend, "delayed", "bfloat16", True, device, head_dim=24)


ACROSS = "inter_attention.layernorm_query"
DECODER = {  # native parameter -> path in Flax
    **{
        name: flax.replace("attention/", "self_attention/")
        for name, (flax, _) in (PARAMETERS | BIASES).items()
    },
    **{
        f"{ACROSS}.layer_norm_{name}": f"encoder_decoder_attention/query/{own}"
        for name, own in (("weight", "scale"), ("bias", "ln_bias"))
    },
    **{
        f"{module}.{name}": f"encoder_decoder_attention/{own}/{path}"
        for name, path in (("weight", "kernel"), ("bias", "bias"))
        for module, own in (
            (ACROSS, "query"),
            ("inter_attention.key_value", "kv"),
            ("inter_attention.proj", "out"),
        )
    },
}


@combinations({"recipe": ["current", "block"], "post": [False, True]}, usual=["current-True"])
def test_a_decoder(recipe, post):
    """In bfloat16, one step: the cross-attention adds its residual within its product, too. Beside the
    native layer alone."""
    _, native = twins(
        "TransformerLayer",
        "cpu",
        "bfloat16",
        **OPTIONS,
        layer_type="decoder",
        apply_residual_connection_post_layernorm=post,
    )
    x, encoded, g = (draw(seed, (2, n, WIDTH), "bfloat16") for seed, n in ((0, 5), (1, 7), (2, 5)))
    own = {name: value.numpy() for name, value in native.named_parameters()}
    assert own.keys() == DECODER.keys()
    with fj.autocast(enabled=True, recipe=RECIPES[recipe]):
        function, shapes = flax_layer(
            x,
            True,
            encoded,
            apply_residual_connection_post_layernorm=post,
            layer_type=flax_modules.TransformerLayerType.DECODER,
        )
        variables = {path: own[name].T.reshape(shapes[path].shape) for name, path in DECODER.items()}
        y, pull = jax.jit(lambda *a: jax.vjp(function, *a))(variables, x, encoded)
        found, *inputs = pull(g)
    leaves = [fk.tensor(a, requires_grad=True) for a in (x, encoded)]
    with fk.autocast(recipe=RECIPES[recipe]):
        want = native(leaves[0], encoder_output=leaves[1])
    want.backward(fk.tensor(g))
    assert_same_bits("y", np.asarray(y), want.numpy())
    for what, got, leaf in zip(("dx", "of encoded"), inputs, leaves, strict=True):
        assert_same_bits(what, np.asarray(got), leaf.grad.numpy())
    for name, value in native.named_parameters():
        got = np.asarray(found[DECODER[name]])
        if value.grad.numpy().ndim == 1:
            assert_same_bits(name, got.reshape(-1), value.grad.numpy())
        else:
            assert relative_error(got, value.grad.numpy().T.reshape(got.shape)) <= epsilon("bfloat16"), name


@combinations({"dtype": DTYPES}, usual=())
def test_dropout_by_the_same_keys(dtype, device):
    """Three steps of NNX's layer and of the native one, which draws by the keys of the former's streams."""
    drops = {"hidden_dropout": 0.25, "attention_dropout": 0.1}
    _, native = twins("TransformerLayer", device, dtype, **OPTIONS | drops, drop_path_rate=0.4)
    layer = nnx_modules.TransformerLayer(
        WIDTH,
        INNER,
        HEADS,
        rngs=nnx.Rngs(0),
        epsilon=EPSILON,
        dtype=dtype,
        use_bias=True,
        drop_path=0.4,
        **drops,
    )
    paths = {name: path for name, (_, path) in (PARAMETERS | BIASES).items()}
    own = {name: value.numpy() for name, value in native.named_parameters()}
    assert own.keys() == paths.keys()
    definition, weights, rest = nnx.split(layer, nnx.Param, ...)
    flat, rest = traverse_util.flatten_dict(nnx.to_pure_dict(weights), sep="/"), nnx.to_pure_dict(rest)
    flat = {path: own[name].T.reshape(flat[path].shape) for name, path in paths.items()}
    kernels = max(SUMS[device], 0.0 if dtype == "float32" else epsilon(dtype))

    def whole(flat, rest):
        return nnx.merge(definition, nnx.State(traverse_util.unflatten_dict(flat, sep="/")), nnx.State(rest))

    @jax.jit
    def step(flat, rest, x, g):
        y, pull = jax.vjp(lambda flat, x: whole(flat, rest)(x), flat, x)
        return y, pull(g)

    for number, x in enumerate(batches(device, dtype, shape=(6, 5, WIDTH))):
        g = np.asarray(draw(number, x.shape, dtype))
        with fj.autocast(enabled=True, recipe=RECIPES["current"]):
            y, (found, dx) = step(flat, rest, numpy_of(x), g)
        twin = whole(flat, rest)
        # in the order in which both layers draw
        streams = [twin.attention.core.dropout, *(twin.dropout, twin.path) * 2]
        keys = iter([stream._drawn()[1] for stream in streams])
        rest = nnx.to_pure_dict(nnx.split(twin, nnx.Param, ...)[2])  # the next step has the next keys
        with fk.draw_from(lambda device, keys=keys: fk.tensor(fj.dropout_seed(next(keys)), device=device)):
            want_y, want_dx, want = native_step(
                native, RECIPES["current"], x, torch.tensor(g.astype(np.float32)).to(x.dtype)
            )
        assert next(keys, None) is None
        assert_same_bits(f"step {number}: y", np.asarray(y), want_y.numpy())
        assert_same_bits(f"step {number}: dx", np.asarray(dx), want_dx.numpy())
        for name, path in paths.items():
            got, value = np.asarray(found[path]), want[name].numpy()
            if value.ndim == 1:
                assert_same_bits(f"step {number}: {name}", got.reshape(-1), value)
            else:
                assert relative_error(got, value.T.reshape(got.shape)) <= kernels, f"step {number}: {name}"


def same_layer(frontend, recipe, dtype, bias, device, **options):
    """Three steps of a layer through all frontends."""
    torch.manual_seed(1234)
    given = {NATIVE.get(name, name): value for name, value in options.items()}
    ours, native = twins("TransformerLayer", device, dtype, **OPTIONS | given, bias=bias)
    which, recipe = list(FRONTENDS).index(frontend), RECIPES[recipe]
    kernels = max(SUMS[device], 0.0 if dtype == "float32" else epsilon(dtype))
    parameters = {
        name: path
        for name, path in (PARAMETERS | BIASES | ELSEWHERE).items()
        if name in dict(native.named_parameters())
    }
    variables, step = {}, None

    def alike(what, got, value):
        if recipe is not None:
            assert_same_bits(what, got, value)
        else:  # the BLAS may sum a product with (in, out) in another order than one with (out, in)
            assert relative_error(got, value) <= kernels, what

    for number, x in enumerate(batches(device, dtype, shape=(2, 5, WIDTH))):
        y, dx, grads, g = torch_step(ours, ours, recipe, x)
        want_y, want_dx, want = native_step(native, recipe, x, g)
        for name, mine, other in (
            ("y", y, want_y.view),
            ("dx", dx, want_dx),
            *((name, grads[name], want[name]) for name in grads),
        ):
            same(mine, other, f"PyTorch, step {number}: {name}")
        same_state(ours, native)

        with fj.autocast(enabled=recipe is not None, recipe=recipe):
            if step is None:
                variables, step = started(
                    FRONTENDS[frontend], native, parameters, which, numpy_of(x), bias, options
                )
            found_y, (found, found_dx) = step(variables, numpy_of(x), numpy_of(g))
        alike(f"step {number}: y", np.asarray(found_y), want_y.numpy())
        alike(f"step {number}: dx", np.asarray(found_dx), want_dx.numpy())
        for name, paths in parameters.items():
            got, value = np.asarray(found[paths[which]]), want[name].numpy()
            if value.ndim == 1:
                alike(f"step {number}: {name}", got.reshape(-1), value)
            else:
                assert relative_error(got, value.T.reshape(got.shape)) <= kernels, f"step {number}: {name}"
        variables = variables | {path: value for path, value in found.items() if path.startswith("fp8/")}
        same_slots(f"step {number}", native, variables, which, recipe)


def started(frontend, native, parameters, which, x, bias, options):
    """The variables of a layer with the native one's weights and fresh state, and a step: y, the gradients of
    variables and x."""
    function, shapes = frontend(x, bias, **options)
    fresh = {
        path: np.full(leaf.shape, path.endswith("_scale"), np.float32)
        for path, leaf in shapes.items()
        if path.startswith("fp8/")
    }
    own = {name: value.numpy() for name, value in native.named_parameters()}
    weights = {
        paths[which]: own[name].T.reshape(shapes[paths[which]].shape) for name, paths in parameters.items()
    }
    assert fresh.keys() | weights.keys() == shapes.keys()
    assert own.keys() == parameters.keys()

    @jax.jit
    def step(variables, x, g):
        y, pull = jax.vjp(function, variables, x)
        return y, pull(g)

    return fresh | weights, step


def same_slots(what, native, variables, which, recipe):
    """The FP8 state of all products."""
    if recipe is None or not recipe.delayed():
        assert not any(path.startswith("fp8/") for path in variables)
        return
    modules = dict(native.named_modules())
    for (module, product), paths in PRODUCTS.items():
        for slot, values in slots(modules.get(module) or modules[PLAIN], product).items():
            for field, want in zip(("scale", "amax_history"), values, strict=True):
                path = paths[which].format(slot, field)
                assert_same_bits(f"{what}: {path}", np.asarray(variables[path]), want)
