"""A transformer layer through every door: Flax, NNX, PyTorch and ``fp8kit.nn``, with the same weights in FP8, on the CPU and on a GPU.

What goes forward, and its FP8 state, is the same bits. So is what goes backward on the CPU in float32, but for the kernels of Flax: those
are (in, out), where the other doors have (out, in), so that their gradients are the same sums in another order. Elsewhere the gradient of
the residual stream is rounded once more in JAX: ``fp8kit.nn`` adds it within the norm's own kernel, XLA after it.
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

from fp8kit.testing import assert_same_bits, relative_error
from tests.adapters.jax.native import RECIPES, slots
from tests.adapters.torch.twins import WIDTH, batches, native_step, numpy_of, same, same_state, torch_step, twins

pytestmark = pytest.mark.usefixtures("same_bits")
INNER, HEADS, EPSILON = 64, 3, 1e-5
OPTIONS = {"num_attention_heads": HEADS, "num_gqa_groups": HEADS, "attn_input_format": "bshd", "bias": False, "fuse_qkv_params": True,
           "qkv_weight_interleaved": False, "layernorm_epsilon": EPSILON}  # fmt: skip
SUMS = 2.0**-20  # float32 sums of 10 terms in another order
# Two gradients through four products in a row, each cast to E5M2 with an error of 0.0594 (docs/numerics.md), none like the other's
CODES = 0.0594 * (4 * 2) ** 0.5

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
# native module, number of its product -> path of a slot's array in Flax, in NNX
PRODUCTS = {
    (QKV, 0): ("fp8/attention/qkv/{}_{}", "fp8/attention/qkv/quantizers/{}_{}"),
    (PROJ, 0): ("fp8/attention/out/{}_{}", "fp8/attention/out/quantizers/{}_{}"),
    (MLP, 0): ("fp8/mlp/{}_0_{}", "fp8/mlp/quantizers_0/{}_{}"),
    (MLP, 1): ("fp8/mlp/{}_1_{}", "fp8/mlp/quantizers_1/{}_{}"),
}


def flax_layer(x):
    """``function(variables, x)`` of variables by their paths, and their shapes."""
    layer = flax_modules.TransformerLayer(
        WIDTH, INNER, HEADS, layernorm_epsilon=EPSILON, hidden_dropout=0.0, attention_dropout=0.0, enable_relative_embedding=False,
        scale_attn_logits=True, dtype=x.dtype)  # fmt: skip
    shapes = linen.unbox(jax.eval_shape(layer.init, jax.random.key(0), x))
    shapes = {**shapes["params"], "fp8": shapes.get(fj.FP8_COLLECTION_NAME, {})}

    def function(variables, x):
        params = traverse_util.unflatten_dict(variables, "/")
        return layer.apply({fj.FP8_COLLECTION_NAME: params.pop("fp8", {}), "params": params}, x, deterministic=True)

    return function, traverse_util.flatten_dict(shapes, sep="/")


def nnx_layer(x):
    """Likewise."""
    made = nnx.eval_shape(lambda: nnx_modules.TransformerLayer(WIDTH, INNER, HEADS, rngs=nnx.Rngs(0), epsilon=EPSILON, dtype=x.dtype))
    layer, state = nnx.split(made)
    leaves, kind = jax.tree_util.tree_flatten_with_path(state)
    paths = ["/".join(part.key for part in path if hasattr(part, "key")) for path, _ in leaves]
    paths = [f"fp8/{path}" if "/quantizers" in path else path for path in paths]

    def function(variables, x):
        return nnx.merge(layer, jax.tree.unflatten(kind, [variables[path] for path in paths]))(x)

    return function, {path: leaf for path, (_, leaf) in zip(paths, leaves, strict=True)}


DOORS = {"flax": flax_layer, "nnx": nnx_layer}
CASES = [("flax", "delayed", "float32"), ("flax", "block", "float32"), ("nnx", "delayed", "float32")]
CASES += [(door, "current", dtype) for door in DOORS for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("door", "recipe", "dtype"), CASES)
def test_a_transformer_layer(door, recipe, dtype, device):
    torch.manual_seed(1234)
    ours, native = twins("TransformerLayer", device, dtype, **OPTIONS)
    which, exact, recipe = list(DOORS).index(door), device == "cpu" and dtype == "float32", RECIPES[recipe]
    variables, step = {}, None
    for number, x in enumerate(batches(device, dtype, shape=(2, 5, WIDTH))):
        y, dx, grads, g = torch_step(ours, ours, recipe, x)
        want_y, want_dx, want = native_step(native, recipe, x, g)
        for name, mine, other in (("y", y, want_y.view), ("dx", dx, want_dx), *((name, grads[name], want[name]) for name in grads)):
            same(mine, other, f"PyTorch, step {number}: {name}")
        same_state(ours, native)

        with fj.autocast(enabled=True, recipe=recipe):
            if step is None:
                variables, step = started(DOORS[door], native, which, numpy_of(x))
            found_y, (found, found_dx) = step(variables, numpy_of(x), numpy_of(g))
        assert_same_bits(f"step {number}: y", np.asarray(found_y), want_y.numpy())
        alike(f"step {number}: dx", found_dx, want_dx.numpy(), 0.0 if exact else CODES)
        for name, paths in PARAMETERS.items():
            value, kernel = want[name].numpy(), not name.split(".")[-1].startswith("layer_norm")
            bound = CODES if not exact else SUMS if kernel else 0.0
            alike(f"step {number}: {name}", found[paths[which]], value.T.reshape(found[paths[which]].shape), bound)
        variables = variables | {path: value for path, value in found.items() if path.startswith("fp8/")}
        same_slots(f"step {number}", native, variables, which, recipe, exact)


def started(door, native, which, x):
    """The variables of a layer with the native one's weights and fresh state, and a step: y, the gradients of variables and x."""
    function, shapes = door(x)
    fresh = {path: np.full(leaf.shape, path.endswith("_scale"), np.float32) for path, leaf in shapes.items() if path.startswith("fp8/")}
    own = {name: value.numpy() for name, value in native.named_parameters()}
    weights = {paths[which]: own[name].T.reshape(shapes[paths[which]].shape) for name, paths in PARAMETERS.items()}
    assert fresh.keys() | weights.keys() == shapes.keys()
    assert own.keys() == PARAMETERS.keys()

    @jax.jit
    def step(variables, x, g):
        y, pull = jax.vjp(function, variables, x)
        return y, pull(g)

    return fresh | weights, step


def alike(what, got, want, bound):
    """The same bits, or a relative error within ``bound``."""
    if not bound:
        assert_same_bits(what, np.asarray(got), want)
    else:
        assert relative_error(np.asarray(got), want) <= bound, what


def same_slots(what, native, variables, which, recipe, exact):
    """The FP8 state of all products; the gradients' within ``CODES`` where they are not the same bits."""
    if not recipe.delayed():
        assert not any(path.startswith("fp8/") for path in variables)
        return
    modules = dict(native.named_modules())
    for (module, product), paths in PRODUCTS.items():
        for slot, values in slots(modules[module], product).items():
            for field, want in zip(("scale", "amax_history"), values, strict=True):
                path = paths[which].format(slot, field)
                alike(f"{what}: {path}", variables[path], want, 0.0 if exact or slot != "grad" else CODES)
