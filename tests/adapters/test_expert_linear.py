"""Grouped products with sizes on the device, in three frontends: against float64 products of what the casts
give, groups without rows, rows of no group, gradients."""

from __future__ import annotations

import copy
from functools import partial

import fp8kit_jax as fj
import fp8kit_jax.flax as fj_flax
import fp8kit_jax.nnx as fj_nnx
import fp8kit_torch as ft
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx

import fp8kit as fk
from fp8kit import codec
from fp8kit.arrays import Device
from fp8kit.autograd import apply
from fp8kit.errors import ArgumentError, AutogradError, FormatError, ShapeError, UnsupportedError
from fp8kit.ops.expert_linear import ExpertLinearSpec, expert_linear
from fp8kit.quantization import Quantization, Quantizer
from fp8kit.recipe import DataRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MMParams
from fp8kit.testing import assert_same_bits
from fp8kit.testing.compare import assert_close, sum_slack
from fp8kit.testing.contract.gemm import fp8_slack
from tests.support.combinations import combinations

CPU = Device("cpu", 0)
E, K, N, M = 4, 136, 24, 40
SIZES = np.array([7, 0, 20, 6], np.int32)  # seven rows of no group
RNG = np.random.default_rng(5)
X = RNG.standard_normal((M, K)).astype(np.float32)
W = RNG.standard_normal((E, N, K)).astype(np.float32) * np.exp2(np.arange(E, dtype=np.float32))[:, None, None]
B = RNG.standard_normal((E, N)).astype(np.float32)
G = RNG.standard_normal((M, N)).astype(np.float32)
ROW = DataRecipe(Quantization.of(*(Quantizer(fmt, "row") for fmt in (fk.E4M3, fk.E4M3, fk.E5M2))), "rows")
RECIPES = {"plain": None, "current": Float8CurrentScaling(), "row": ROW, "block": Float8BlockScaling()}
GROUPS = [slice(a, a + n) for a, n in zip(np.cumsum(SIZES) - SIZES, SIZES, strict=True)]


def cast(x, rule, axis):
    """The values that a matrix has once it is cast along the contraction ``axis``: the rule, tile by tile."""
    if rule is None:
        return x.astype(np.float64)
    height, width = rule.tile
    tile = (height or x.shape[0], width or x.shape[1])
    if height and not width:
        tile = (1, x.shape[1]) if axis else (x.shape[0], 1)
    elif axis == 0:
        tile = tile[::-1] if height else tile
    out = np.zeros(x.shape)
    for i in range(0, x.shape[0], tile[0]):
        for j in range(0, x.shape[1], tile[1]):
            part = x[i : i + tile[0], j : j + tile[1]]
            amax = max(np.abs(part).max(initial=0), np.float32(rule.epsilon))
            scale = np.float32(rule.format.max) / amax if amax > 0 else np.float32(1)
            if rule.power_2:
                scale = np.exp2(np.floor(np.log2(scale))).astype(np.float32)
            codes = codec.encode(part * scale, rule.format)
            inverse = np.float32(1) / scale
            out[i : i + tile[0], j : j + tile[1]] = codec.decode(codes, rule.format) * np.float64(inverse)
    return out


def expected(recipe, device=CPU):
    """name -> (value, what rounding may make of it) in float64; on a GPU that of tensor cores' FP8 sums."""
    rules = dict.fromkeys(("fprop", "dgrad", "wgrad"), (None, None))
    if recipe is not None:
        rules = {name: (gemm.a, gemm.b) for name, gemm in recipe.quantization.gemms.items()}
    found = {name: (np.zeros(s), np.zeros(s)) for name, s in (("y", (M, N)), ("x", (M, K)))}
    found |= {name: (np.zeros(s), np.zeros(s)) for name, s in (("weight", W.shape), ("bias", B.shape))}

    def put(name, at, a, b, more=0.0):
        value, slack = found[name]
        size = np.abs(a) @ np.abs(b)
        sums = sum_slack if recipe is None or name == "bias" else partial(fp8_slack, fast=True, device=device)
        value[at] = a @ b + more
        slack[at] = sums(size + np.abs(more), a.shape[1] + 1) + 2.0**-21 * size

    own, grad = (np.where(np.arange(M)[:, None] < SIZES.sum(), v, np.float32(0)) for v in (X, G))
    x, g = cast(own, rules["fprop"][0], 1), cast(grad, rules["dgrad"][0], 1)
    gt, xt = cast(grad, rules["wgrad"][0], 0), cast(own, rules["wgrad"][1], 0)
    for e, rows in enumerate(GROUPS):
        put("y", rows, x[rows], cast(W[e], rules["fprop"][1], 1).T, B[e])
        put("x", rows, g[rows], cast(W[e], rules["dgrad"][1], 0))
        put("weight", e, gt[rows].T, xt[rows])
        put("bias", e, np.ones((1, rows.stop - rows.start)), G[rows].astype(np.float64))
    return found


def native(recipe, layout="oi"):
    weight = W if layout == "oi" else np.ascontiguousarray(W.transpose(0, 2, 1))
    given = {"x": X, "weight": weight, "bias": B}
    leaves = {name: fk.tensor(value, requires_grad=True, device="cpu") for name, value in given.items()}
    sizes = fk.tensor(SIZES, device="cpu")
    with fk.autocast(enabled=recipe is not None, recipe=recipe):
        y = fk.nn.moe.grouped_dense(leaves["x"], leaves["weight"], sizes, leaves["bias"], layout)
    y.backward(G)
    made = {"y": y.numpy()} | {name: leaf.grad.numpy() for name, leaf in leaves.items()}
    if layout == "io":
        made["weight"] = made["weight"].transpose(0, 2, 1)
    return made


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_what_the_casts_give(recipe):
    made = native(RECIPES[recipe])
    for name, (value, slack) in expected(RECIPES[recipe]).items():
        assert_close(name, made[name], value, "float32", slack)
    for name, other in native(RECIPES[recipe], "io").items():
        value, slack = expected(RECIPES[recipe])[name]
        assert_close(f"io: {name}", other, value, "float32", slack)
    rest = slice(SIZES.sum(), None)
    assert not made["y"][rest].any()
    assert not made["x"][rest].any()
    assert not made["weight"][1].any()


@pytest.mark.parametrize("slots", [0, 10], ids=["one after another", "slots"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_no_group_change_nothing(recipe, slots):
    """Large numbers, Inf and NaN there, of x and of the gradient: the bits are those of zeros."""
    quantization = None if RECIPES[recipe] is None else RECIPES[recipe].quantization
    starts = np.arange(E) * slots if slots else np.cumsum(SIZES) - SIZES
    sizes = np.minimum(SIZES, slots or M)
    dead = np.ones(M, bool)
    for start, size in zip(starts, sizes, strict=True):
        dead[start : start + size] = False
    made = []
    for junk in (0.0, 1e4, np.inf, np.nan):
        x, g = (np.where(dead[:, None], np.float32(junk), given) for given in (X, G))
        given = {"x": x, "weight": W, "bias": B}
        leaves = {name: fk.tensor(value, requires_grad=True, device="cpu") for name, value in given.items()}
        spec = ExpertLinearSpec(E, K, N, "oi", quantization, slots)
        y = apply(expert_linear, spec, leaves | {"group_sizes": fk.tensor(sizes, device="cpu")})["y"]
        y.backward(g)
        made.append({"y": y.numpy()} | {name: leaf.grad.numpy() for name, leaf in leaves.items()})
    for other in made[1:]:
        for name, want in made[0].items():
            assert_same_bits(name, other[name], want)


@pytest.mark.parametrize("dims", [(2, 1, 1), (1, 1, 2)], ids=["x in squares", "gradients in squares"])
def test_rows_of_no_group_change_no_square(dims):
    """Of 128 rows, where all of an operand could be cast as one: squares with rows of a group and others."""
    names = "x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"
    recipe = fk.recipe.Float8BlockScaling(**dict(zip(names, dims, strict=True)))
    sizes = np.array([40, 24], np.int32)
    made = []
    for junk in (0.0, 1e6):
        x, g = (np.random.default_rng(i).normal(size=(128, 256)).astype(np.float32) for i in (1, 2))
        x[64:], g[64:] = junk, junk
        weight = np.random.default_rng(3).normal(size=(2, 256, 256)).astype(np.float32)
        leaf = fk.tensor(x, requires_grad=True, device="cpu")
        with fk.autocast(recipe=recipe):
            y = fk.nn.moe.grouped_dense(leaf, weight, fk.tensor(sizes, device="cpu"))
        y.backward(g)
        made.append((y.numpy(), leaf.grad.numpy()))
    for name, want, other in zip(("y", "x"), *made, strict=True):
        assert_same_bits(name, other, want)


@pytest.mark.parametrize("recipe", ["current", "row", "block"])
def test_weights_that_are_cast_at_once_have_the_same_codes(recipe):
    """Those of a layout that is cast matrix by matrix, since it is transposed."""
    weight = (
        RNG.standard_normal((2, 128, 256)).astype(np.float32) * np.array([1, 9], np.float32)[:, None, None]
    )
    x, sizes = RNG.standard_normal((20, 256)).astype(np.float32), np.array([11, 9], np.int32)
    made = []
    for layout in ("oi", "io"):
        w = weight if layout == "oi" else np.ascontiguousarray(weight.transpose(0, 2, 1))
        spec = ExpertLinearSpec(2, 256, 128, layout, RECIPES[recipe].quantization)
        given = {"x": x, "group_sizes": sizes, "weight": w}
        leaves = {name: fk.tensor(value, device="cpu") for name, value in given.items()}
        made.append(apply(expert_linear, spec, leaves | {"bias": None})["y"].numpy())
    assert_same_bits("y", *made)


@combinations(
    {"compiled": {"eager": False, "fullgraph": True}, "recipe": list(RECIPES)},
    usual=["eager-plain", "eager-row", "eager-block", "fullgraph-current"],
)
def test_torch_modules_with_sizes_on_the_device(recipe, compiled):
    layer = ft.GroupedLinear(E, K, N, device="cpu", use_grouped_tensor=True)
    with torch.no_grad():
        for e in range(E):
            getattr(layer, f"weight{e}").copy_(torch.from_numpy(W[e]))
            getattr(layer, f"bias{e}").copy_(torch.from_numpy(B[e]))
    x, sizes = torch.from_numpy(X.copy()).requires_grad_(), torch.from_numpy(SIZES).long()
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with ft.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
        y = call(x, sizes)
    y.backward(torch.from_numpy(G))
    made = {"y": y.detach().numpy(), "x": x.grad.numpy()}
    for name in ("weight", "bias"):
        made[name] = torch.stack([getattr(layer, f"{name}{e}").grad for e in range(E)]).numpy()
    for name, want in native(RECIPES[recipe]).items():
        assert_same_bits(name, made[name], want)


def native_module(dtype="float32", **options):
    layer = fk.nn.GroupedLinear(E, K, N, params_dtype=dtype, device="cpu", use_grouped_tensor=True, **options)
    with fk.no_grad():
        for e in range(E):
            getattr(layer, f"weight{e}").copy_(W[e])
            if layer.use_bias:
                getattr(layer, f"bias{e}").copy_(B[e])
    return layer


@pytest.mark.parametrize("lying", ["side by side", "apart"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_native_modules_with_sizes_on_the_device(recipe, lying):
    """The bits of the function, also where a parameter was replaced, of either type of integers."""
    layer = native_module()
    if lying == "apart":
        layer.weight1 = fk.nn.Parameter(fk.tensor(W[1].copy(), device="cpu").view)
    x, sizes = fk.tensor(X, requires_grad=True, device="cpu"), fk.tensor(SIZES.astype(np.int64), device="cpu")
    with fk.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
        y = layer(x, sizes)
    y.backward(G)
    made = {"y": y.numpy(), "x": x.grad.numpy()}
    for name in ("weight", "bias"):
        made[name] = np.stack([getattr(layer, f"{name}{e}").grad.numpy() for e in range(E)])
    for name, want in native(RECIPES[recipe]).items():
        assert_same_bits(name, made[name], want)


def test_weights_of_native_modules_lie_side_by_side():
    """Weights are one array without a copy, in the order of checkpoints; what changes one between the passes
    is found out."""
    layer = native_module(bias=False)
    addresses = [getattr(layer, f"weight{e}").view.ptr for e in range(E)]
    assert np.diff(addresses).tolist() == [layer.weight0.view.nbytes] * (E - 1)
    names = [f"{kind}{e}" for e in range(2) for kind in ("weight", "bias")]
    assert [name for name, _ in fk.nn.GroupedLinear(2, K, N).named_parameters()] == names
    x, sizes = fk.tensor(X, requires_grad=True, device="cpu"), fk.tensor(SIZES, device="cpu")
    y = layer(x, sizes)
    with fk.no_grad():
        layer.weight2.zero_()
    with pytest.raises(AutogradError, match="weight2: got a value changed in place"):
        y.backward(G)
    assert x.grad is None
    y = layer(X, sizes)  # whose backward reads no weight
    with fk.autocast(recipe=RECIPES["current"]):
        coded = layer(x, sizes)  # nor this one's, but for codes
    with fk.no_grad():
        layer.weight2.zero_()
    y.backward(G)
    coded.backward(G)
    layer.zero_grad()
    layer.weight0.requires_grad = False
    frozen = layer(x, sizes)
    frozen.backward(G)
    assert layer.weight0.grad is None
    assert layer.weight2.grad.numpy().any()
    again = copy.deepcopy(layer)
    assert_same_bits("deepcopy", again(X, sizes).numpy(), frozen.numpy())
    saved = fk.nn.GroupedLinear(E, K, N, bias=False, device="cpu", use_grouped_tensor=True)
    saved.load_state_dict(layer.state_dict())
    assert_same_bits("loaded", saved(X, sizes).numpy(), frozen.numpy())


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_of_a_native_module_share_the_cast_weights(recipe):
    """The bits of calls that cast anew; later ones take the first one's codes, whatever the weights are by
    then, until another first one, other values or another recipe come."""
    layer, sizes = native_module(), fk.tensor(SIZES, device="cpu")

    def step(first):
        x = fk.tensor(X, requires_grad=True, device="cpu")
        layer.zero_grad()
        y = layer(x, sizes, first)
        y.backward(G)
        return [y.numpy(), x.grad.numpy(), layer.weight2.grad.numpy()]

    with fk.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
        want = step(None)
        first, later = step(True), step(False)
        with fk.no_grad():
            layer.weight2.zero_()
        stale, anew = step(False), step(True)
    held = want if recipe != "plain" else anew  # in high precision the weights are read as they are
    for made, other in ((first, want), (later, want), (stale, held)):
        for name, got, true in zip(("y", "x", "weight2"), made, other, strict=True):
            assert_same_bits(name, got, true)
    assert (anew[0] != want[0]).any()
    with fk.autocast(recipe=Float8CurrentScaling(use_power_2_scales=True)):
        other, cast = step(False), step(None)
    assert_same_bits("another recipe", other[0], cast[0])


def test_a_refused_first_micro_batch_of_a_native_module_casts_nothing():
    layer, sizes = native_module(), fk.tensor(SIZES, device="cpu")
    with fk.autocast(recipe=RECIPES["current"]):
        want = layer(X, sizes, True).numpy()
        with fk.no_grad():
            layer.weight2.zero_()
        with pytest.raises(FormatError):
            layer(fk.tensor(X, dtype="bfloat16", device="cpu"), sizes, True)
        assert_same_bits("the first one's codes", layer(X, sizes, False).numpy(), want)
        assert (layer(X, sizes, True).numpy() != want).any()


def test_what_native_modules_read_on_the_host():
    """Sizes in an array on the CPU, unless it is asked for otherwise; what refuses them on the device."""
    layer, sizes = native_module(), fk.tensor(SIZES, device="cpu")
    other = fk.nn.GroupedLinear(E, K, N, device="cpu")
    other.load_state_dict(layer.state_dict())
    with pytest.raises(ShapeError, match=r"m_splits: .*sum to 40"):  # those sum to 33
        other(X, sizes)
    own = layer(X, sizes).numpy()
    slack = sum_slack(np.abs(X[:33]) @ np.abs(W).max(0).T + 1, K + 1)
    assert_close("y", own[:33], other(X[:33], sizes).numpy().astype(np.float64), "float32", slack)
    with fk.no_grad():
        y, biases = native_module(return_bias=True)(X, sizes)
    assert len(biases) == E
    assert_close("y", (own - y.numpy())[:7], np.tile(B[0], (7, 1)), "float32", slack[:7])
    with pytest.raises(UnsupportedError, match="delayed scaling"), fk.autocast(recipe=DelayedScaling()):
        layer(X, sizes)
    with pytest.raises(ShapeError, match=r"GroupedLinear: m_splits: got shape \(3,\)"):
        layer(X, fk.tensor(SIZES[1:], device="cpu"))
    with pytest.raises(FormatError, match=r"m_splits: got .*float32, shape \(4,\), expected integers"):
        layer(X, fk.tensor(SIZES.astype(np.float32), device="cpu"))
    with pytest.raises(UnsupportedError, match="calibrating"), fk.autocast(enabled=False, calibrating=True):
        layer(X, sizes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_dense_in_jax(recipe):
    kernel = np.ascontiguousarray(W.transpose(0, 2, 1))

    @jax.jit
    def step(x, kernel, bias, sizes, g):
        with fj.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
            y, pull = jax.vjp(
                lambda *own: fj.grouped_dense(own[0], own[1], sizes, bias=own[2]), x, kernel, bias
            )
        return y, *pull(g)

    made = dict(zip(("y", "x", "weight", "bias"), map(np.asarray, step(X, kernel, B, SIZES, G)), strict=True))
    made["weight"] = made["weight"].transpose(0, 2, 1)
    for name, want in native(RECIPES[recipe], "io").items():
        assert_same_bits(name, made[name], want)


def test_the_shape_of_ragged_dot():
    """As ``jax.lax.ragged_dot`` in float32; kernels (E, N, K) too, and another dtype of the result."""
    kernel, sizes = jnp.asarray(W.transpose(0, 2, 1)), jnp.asarray(SIZES)
    own = fj.ragged_dot(X, kernel, sizes)
    want = jax.lax.ragged_dot(X, kernel, sizes, precision="highest")
    filled = slice(0, int(SIZES.sum()))
    slack = sum_slack(np.abs(X) @ np.abs(W).max(0).T, K)
    assert_close(
        "y", np.asarray(own)[filled], np.asarray(want, np.float64)[filled], "float32", 2 * slack[filled]
    )
    swapped = fj.grouped_dense(X, W, sizes, ((1,), (2,)), preferred_element_type=jnp.bfloat16)
    assert swapped.dtype == jnp.bfloat16
    assert_same_bits("bfloat16", np.asarray(swapped), np.asarray(own).astype(ml_dtypes.bfloat16))


def test_slots_for_decoding():
    """Groups in slots of ten rows: those beyond a group's size are 0."""
    sizes = np.array([3, 0, 10, 7], np.int32)
    inputs = {"x": X, "weight": W, "group_sizes": sizes}
    leaves = {name: fk.tensor(value, device="cpu") for name, value in inputs.items()}
    y = apply(expert_linear, ExpertLinearSpec(E, K, N, slots=10), leaves)["y"].numpy()
    for e, size in enumerate(sizes):
        rows = slice(10 * e, 10 * e + size)
        size_of = np.abs(X[rows]).astype(np.float64) @ np.abs(W[e]).T
        assert_close("y", y[rows], X[rows].astype(np.float64) @ W[e].T, "float32", sum_slack(size_of, K))
        assert not y[10 * e + size : 10 * e + 10].any()


@combinations({"recipe": RECIPES.keys()}, usual=["current"])
def test_slots_in_three_frontends(recipe):
    """The same bits, compiled too, and those of the rows of groups one after another where rows have scales
    of their own."""
    sizes, kernel = np.array([3, 0, 10, 7], np.int32), np.ascontiguousarray(W.transpose(0, 2, 1))
    kind = {"enabled": recipe != "plain", "recipe": RECIPES[recipe]}
    with fk.autocast(**kind):
        want = fk.nn.moe.grouped_dense(X, kernel, sizes, B, slots=10).numpy()
    given = [torch.from_numpy(v) for v in (X, kernel, sizes, B)]
    with ft.autocast(**kind):
        for call in (ft.grouped_dense, torch.compile(ft.grouped_dense, fullgraph=True, backend="aot_eager")):
            assert_same_bits("torch", call(*given, slots=10).numpy(), want)

    @jax.jit
    def step(x, kernel, sizes, bias):
        with fj.autocast(**kind):
            return fj.grouped_dense(x, kernel, sizes, bias=bias, slots=10)

    assert_same_bits("jax", np.asarray(step(X, kernel, sizes, B)), want)
    live = np.concatenate([np.arange(10 * e, 10 * e + size) for e, size in enumerate(sizes)])
    assert not np.delete(want, live, 0).any()
    with fk.autocast(**kind):
        dense = fk.nn.moe.grouped_dense(X[live], kernel, sizes, B).numpy()
    slack = sum_slack(np.abs(X[live]).max() * np.abs(W).max() * K, K)  # of products of other shapes
    assert_close("dense", want[live], dense.astype(np.float64), "float32", slack)


def test_grouped_dense_of_torch():
    """The bits of the native function, with gradients, and its refusals."""
    kernel = np.ascontiguousarray(W.transpose(0, 2, 1))
    leaves = [torch.from_numpy(v.copy()).requires_grad_() for v in (X, kernel, B)]
    sizes = torch.from_numpy(SIZES)
    with ft.autocast(recipe=RECIPES["current"]):
        y = ft.grouped_dense(leaves[0], leaves[1], sizes.long(), leaves[2], name="experts")
    y.backward(torch.from_numpy(G))
    made = {"y": y.detach()} | dict(zip(("x", "weight", "bias"), (v.grad for v in leaves), strict=True))
    made["weight"] = made["weight"].transpose(1, 2)
    for name, want in native(RECIPES["current"], "io").items():
        assert_same_bits(name, made[name].numpy(), want)
    x, kernel, _ = (leaf.detach() for leaf in leaves)
    for error, given, more in (
        (ShapeError, (x, kernel[0], sizes), {}),
        (ShapeError, (x, kernel, sizes[1:]), {}),
        (FormatError, (x, kernel, sizes.float()), {}),
        (ShapeError, (x, kernel, sizes), {"slots": 9}),
        (ArgumentError, (x, kernel, sizes), {"slots": -1}),
        (ArgumentError, (x, kernel, sizes), {"layout": "nt"}),
        (FormatError, (x, kernel.half(), sizes), {}),
    ):
        with pytest.raises(error, match="grouped_dense: "):
            ft.grouped_dense(*given, **more)
    for call in (fk.nn.moe.grouped_dense, fj.grouped_dense):
        with pytest.raises(ArgumentError, match="grouped_dense: slots"):
            call(X, W.transpose(0, 2, 1).copy(), SIZES, slots=-1)


@combinations({"kind": ["linen", "nnx"], "recipe": ["plain", "current"]})
def test_modules_of_flax(kind, recipe):
    """The function on the module's own kernel and bias."""
    sizes = jnp.asarray(SIZES)
    with fj.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
        if kind == "linen":
            module = fj_flax.GroupedDense(E, N, use_bias=True, bias_init=jax.nn.initializers.ones)
            own = module.init(jax.random.key(0), X, sizes)["params"]
            y = jax.jit(module.apply)({"params": own}, X, sizes)
        else:
            module = fj_nnx.GroupedDense(E, K, N, use_bias=True, rngs=nnx.Rngs(0))
            own, y = {"kernel": module.kernel[...], "bias": module.bias[...]}, module(X, sizes)
        want = fj.grouped_dense(X, own["kernel"], sizes, bias=own["bias"])
    assert own["kernel"].shape == (E, K, N)
    assert abs(float(own["kernel"].std()) * K**0.5 - 1) < 0.05
    assert_same_bits("y", np.asarray(y), np.asarray(want))
    with pytest.raises(ArgumentError, match="GroupedDense: features"):
        fj_nnx.GroupedDense(E, K, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match="GroupedDense: experts"):
        fj_flax.GroupedDense(0, N).init(jax.random.key(0), X, sizes)


@pytest.mark.parametrize("layout", ["oi", "io"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows(recipe, layout):
    """Nothing to cast of x and of the gradient, and gradients of 0."""
    weight = W if layout == "oi" else np.ascontiguousarray(W.transpose(0, 2, 1))
    given = {"x": X[:0], "weight": weight, "bias": B}
    leaves = {name: fk.tensor(value, requires_grad=True, device="cpu") for name, value in given.items()}
    sizes = fk.tensor(np.zeros(E, np.int32), device="cpu")
    with fk.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        y = fk.nn.moe.grouped_dense(leaves["x"], leaves["weight"], sizes, leaves["bias"], layout)
    y.backward(G[:0])
    assert y.shape == (0, N)
    for name, leaf in leaves.items():
        assert leaf.grad.shape == given[name].shape
        assert not leaf.grad.numpy().any()


def test_no_rows_and_refusals():
    sizes = jnp.zeros(E, jnp.int32)
    kernel = jnp.asarray(W.transpose(0, 2, 1))
    y, pull = jax.vjp(lambda x, w: fj.grouped_dense(x, w, sizes), jnp.zeros((0, K)), kernel)
    assert y.shape == (0, N)
    assert not pull(y)[1].any()
    with pytest.raises(ShapeError, match="x and kernel"):
        fj.grouped_dense(X, kernel[0], sizes)
    with pytest.raises(ShapeError, match="group_sizes"):
        fj.grouped_dense(X, kernel, sizes[1:])
    with pytest.raises(ShapeError, match="ragged_dot: lhs and rhs"):
        fj.ragged_dot(X, kernel[0], sizes)
    with pytest.raises(ShapeError, match="ragged_dot: rhs"):
        fj.ragged_dot(X, kernel[:, :7], sizes)
    with pytest.raises(UnsupportedError, match="ragged_dot: precision: got 'highest'"):
        fj.ragged_dot(X, kernel, sizes, precision="highest")
    assert fj.ragged_dot(X, kernel, sizes, precision="default").shape == (M, N)
    with pytest.raises(FormatError, match="group_sizes"):
        fj.grouped_dense(X, kernel, sizes.astype(jnp.float32))
    with pytest.raises(ShapeError, match="contracting_dims"):
        fj.grouped_dense(X, kernel, sizes, ((0,), (1,)))
    with pytest.raises(UnsupportedError, match="group_offset"):
        fj.grouped_dense(X, kernel, sizes, group_offset=jnp.zeros(1))
    with pytest.raises(ShapeError, match="grouped_dense: kernel"):
        fk.nn.moe.grouped_dense(X, W[0], SIZES)
    with pytest.raises(UnsupportedError, match="calibrating"), fk.autocast(enabled=False, calibrating=True):
        fk.nn.moe.grouped_dense(X, W, SIZES, layout="oi")
    with pytest.raises(ArgumentError, match="layout"):
        fk.nn.moe.grouped_dense(X, W, SIZES, layout="nt")
    with pytest.raises(ArgumentError, match="grouped_dense: name: got 3"):
        fk.nn.moe.grouped_dense(X, W, SIZES, layout="oi", name=3)
    delayed = DelayedScaling()
    for given in (None, fj.create_set(delayed)):
        with (
            pytest.raises(
                UnsupportedError, match=r"grouped_dense: recipe: got delayed.*Float8CurrentScaling"
            ),
            fj.autocast(True, delayed),
        ):
            fj.grouped_dense(X, kernel, sizes, quantizer_set=given)
    with pytest.raises(FormatError, match="grouped_dense: kernel: got float16"):
        fk.nn.moe.grouped_dense(X, W.astype(np.float16), SIZES, layout="oi")
    layer = ft.GroupedLinear(2, K, N, device="cpu", use_grouped_tensor=True)
    x = torch.zeros(4, K)
    modelled = Float8CurrentScaling(fp8_gemm_fprop=MMParams(accumulation="hopper_fast"))
    said = r"fprop\.accumulation: got hopper_fast, expected 'fast' or 'split'"
    with pytest.raises(UnsupportedError, match=f"GroupedLinear: {said}"), ft.autocast(recipe=modelled):
        layer(x, torch.tensor([4, 0]))
    with pytest.raises(UnsupportedError, match=f"grouped_dense: {said}"), fk.autocast(recipe=modelled):
        fk.nn.moe.grouped_dense(X, W, SIZES, layout="oi")
    with pytest.raises(UnsupportedError, match=f"grouped_dense: {said}"), fj.autocast(True, modelled):
        fj.grouped_dense(X, kernel, sizes)
    with pytest.raises(ShapeError, match="m_splits"):
        layer(x, torch.tensor([4]))
    with pytest.raises(UnsupportedError, match="delayed scaling"), ft.autocast(recipe=DelayedScaling()):
        layer(x, torch.tensor([4, 0]))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gpu_agrees_and_a_graph_holds_it(recipe):
    """The kernel on a GPU within the bounds of float64; captured once, it follows other sizes."""
    layer = ft.GroupedLinear(E, K, N, device="cuda")
    with torch.no_grad():
        for e in range(E):
            getattr(layer, f"weight{e}").copy_(torch.from_numpy(W[e]))
            getattr(layer, f"bias{e}").copy_(torch.from_numpy(B[e]))
    x, sizes = torch.from_numpy(X).cuda().requires_grad_(), torch.from_numpy(SIZES).cuda()
    with ft.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
        y = layer(x, sizes)
        y.backward(torch.from_numpy(G).cuda())
        want = expected(RECIPES[recipe], Device("cuda", 0))
        made = {"y": y, "x": x.grad}
        for name in ("weight", "bias"):
            made[name] = torch.stack([getattr(layer, f"{name}{e}").grad for e in range(E)])
        for name, (value, slack) in want.items():
            assert_close(name, made[name].detach().cpu().numpy(), value, "float32", 2 * slack)
        with torch.no_grad():
            graph, fixed, static = torch.cuda.CUDAGraph(), sizes.clone(), x.detach().clone()
            layer(static, fixed)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = layer(static, fixed)
            fixed.copy_(sizes.flip(0))
            graph.replay()
            again = layer(static, fixed)
    assert_same_bits("replayed", out.cpu().numpy(), again.cpu().numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_native_modules_on_the_gpu(recipe):
    """Within the bounds of float64; captured once, it follows other sizes."""
    layer = fk.nn.GroupedLinear(E, K, N, device="cuda")
    layer.load_state_dict(native_module().state_dict())
    x, sizes = fk.tensor(X, requires_grad=True, device="cuda"), fk.tensor(SIZES, device="cuda")

    def call(x, sizes):
        with fk.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
            return layer(x, sizes)

    y = call(x, sizes)
    y.backward(G)
    made = {"y": y.numpy(), "x": x.grad.numpy()}
    for name in ("weight", "bias"):
        made[name] = np.stack([getattr(layer, f"{name}{e}").grad.numpy() for e in range(E)])
    for name, (value, slack) in expected(RECIPES[recipe], Device("cuda", 0)).items():
        assert_close(name, made[name], value, "float32", 2 * slack)
    other, fixed = fk.tensor(SIZES[::-1].copy(), device="cuda"), x.detach()
    with fk.no_grad():
        captured = fk.graph(call, warmup=1)
        for given in (sizes, sizes, other):  # run, captured, replayed
            again = captured(fixed, given)
        assert_same_bits("replayed", again.numpy(), call(fixed, other).numpy())
