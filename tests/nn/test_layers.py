"""Linear, LayerNormLinear, LayerNormMLP, LayerNorm, RMSNorm: forward and backward against float64 with
running error bounds.

In FP8 the oracle quantises the operands with the codec, at the scales that the module has, so every case
checks the FP8 arithmetic itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from fp8kit import formats, nn
from fp8kit.autograd import tensor
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.errors import Fp8kitError
from fp8kit.recipe import Float8BlockScaling, Format
from fp8kit.testing.compare import assert_close, relative_error
from tests.support.combinations import combinations
from tests.support.layers import MODES, draw, make, quantiser, step
from tests.support.products import Product, f64
from tests.support.running_error import R, activation, assert_within, norm, norm_grad

DTYPES = ("float32", "bfloat16", "float16")


class Sizes(NamedTuple):
    """Rows of the input, its features, those of the output, and of an MLP's hidden layer."""

    shape: tuple[int, ...] = (3, 5)
    k: int = 40
    n: int = 56
    f: int = 48


USUAL = Sizes()
SHAPE, K, N, F = USUAL
# a multiple of nothing
ODD = [Sizes((rows,), *features) for rows in (1, 3, 17) for features in ((33, 19, 21), (7, 131, 5))]
G_SCALE = 2.0**-6  # gradients are small numbers, as in training


def warmed(module, mode, dtype, k, n, shape=SHAPE):
    """Two steps on other data, so that delayed scales and histories are not at their start."""
    for seed in (10, 20):
        step(module, mode, draw(seed, (*shape, k), dtype, 2.0), draw(seed + 1, (*shape, n), dtype, G_SCALE))
    return {name: f64(parameter) for name, parameter in module.named_parameters()}


def data(dtype, k, n, shape=SHAPE):
    x, g = draw(1, (*shape, k), dtype), draw(2, (*shape, n), dtype, G_SCALE)
    return x, g, R(x.astype(np.float64).reshape(-1, k)), R(g.astype(np.float64).reshape(-1, n))


@pytest.mark.parametrize(
    ("dtype", "bias"), [("float32", True), ("float32", False), ("bfloat16", True), ("float16", True)]
)
@pytest.mark.parametrize("mode", MODES)
def test_linear(device, dtype, mode, bias):
    check_linear(device, dtype, mode, bias)


def check_linear(device, dtype, mode, bias=True, sizes=USUAL):
    shape, k, n, _ = sizes
    module = make(nn.Linear, device, dtype, in_features=k, out_features=n, bias=bias)
    p = warmed(module, mode, dtype, k, n, shape)
    x, g, rx, rg = data(dtype, k, n, shape)
    product = Product(rx, p["weight"], quantiser(mode, module))
    y, dx, grads = step(module, mode, x, g)
    want_dx, want_dw, want_db = product.backward(rg)
    assert_within("y", y, product.forward(p.get("bias")).rounded(dtype))
    assert_within("dx", dx, want_dx.rounded(dtype))
    assert_within("dw", grads["weight"], want_dw.rounded(dtype))
    if bias:
        assert_within("db", grads["bias"], want_db.rounded(dtype))


BLOCK_RECIPES = {
    "default": Float8BlockScaling(),
    "hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "lines": Float8BlockScaling(w_block_scaling_dim=1),
    "square_x": Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "square_g": Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1, use_f32_scales=True),
}


@combinations(
    {
        "of": {
            "float32": ("float32", (150, 300, 200)),
            "bfloat16": ("bfloat16", (129, 136, 257)),
            "float16": ("float16", (256, 128, 128)),
        },
        "recipe": list(BLOCK_RECIPES),
    }
)
def test_linear_of_many_blocks(device, monkeypatch, recipe, of):
    """Magnitudes that change from block to block, so that a scale in the wrong place shows."""
    dtype, (m, k, n) = of
    monkeypatch.setitem(MODES, recipe, BLOCK_RECIPES[recipe])
    module = make(nn.Linear, device, dtype, in_features=k, out_features=n)
    rng = np.random.default_rng(5)
    x, g, w = (
        (
            draw(seed, shape, dtype, scale)
            * np.exp2(rng.integers(-4, 4, shape[:1]))[:, None]
            * np.exp2(rng.integers(-2, 2, shape[1]))
        ).astype(formats.dtype(dtype).numpy)
        for seed, shape, scale in ((1, (m, k), 1.0), (2, (m, n), G_SCALE), (3, (n, k), 0.1))
    )
    module.load_state_dict({"weight": w, "bias": draw(4, (n,), dtype)})
    y, dx, grads = step(module, recipe, x, g)
    assert module.fp8_meta == {}
    product, rg = (
        Product(R(x.astype(np.float64)), w.astype(np.float64), quantiser(recipe, module)),
        R(g.astype(np.float64)),
    )
    want_dx, want_dw, want_db = product.backward(rg)
    assert_within("y", y, product.forward(f64(module.bias)).rounded(dtype))
    assert_within("dx", dx, want_dx.rounded(dtype))
    assert_within("dw", grads["weight"], want_dw.rounded(dtype))
    assert_within("db", grads["bias"], want_db.rounded(dtype))


def test_block_scaling_keeps_what_is_promised(device):
    """Relative errors of a Linear on normal data against high precision: at most Transformer Engine's for
    this recipe."""
    size = 512
    module = make(nn.Linear, device, "float32", in_features=size, out_features=size, bias=False)
    x, g = draw(1, (size, size), "float32"), draw(2, (size, size), "float32")
    module.load_state_dict({"weight": draw(3, (size, size), "float32")})
    y, dx, grads = step(module, "block", x, g)
    w = f64(module.weight)
    x, g = x.astype(np.float64), g.astype(np.float64)
    for got, want in ((y, x @ w.T), (dx, g @ w), (grads["weight"], g.T @ x)):
        assert relative_error(got, want) < 0.0377


@pytest.mark.parametrize("mode", ["high", "delayed", "current", "block"])
@pytest.mark.parametrize("split", [("q", "k_"), {"q": 24, "k": 32}, {"q": 32, "kv": 16, "g": 8}])
def test_linear_with_split_parameters_is_the_joined_one(device, mode, split):
    whole = make(nn.Linear, device, "float32", in_features=K, out_features=N)
    parts = make(nn.Linear, device, "float32", in_features=K, out_features=N, parameters_split=split)
    names = [name.rstrip("_") for name in split]
    sizes = list(split.values()) if isinstance(split, dict) else [N // 2] * 2
    assert [name for name, _ in parts.named_parameters()] == [
        f"{n}_{kind}" for kind in ("weight", "bias") for n in names
    ]
    edges = np.cumsum(sizes)[:-1]
    state = {}
    for kind in ("weight", "bias"):
        state |= {
            f"{n}_{kind}": np.ascontiguousarray(a)
            for n, a in zip(names, np.split(getattr(whole, kind).numpy(), edges), strict=True)
        }
    parts.load_state_dict(state)
    for seed in range(3):
        x, g = draw(seed, (*SHAPE, K), "float32"), draw(seed + 9, (*SHAPE, N), "float32", G_SCALE)
        y, dx, grads = step(whole, mode, x, g)
        y2, dx2, grads2 = step(parts, mode, x, g)
        # another order of float32 sums at most; operands have the same codes
        pairs = [("y", y2, y), ("dx", dx2, dx)]
        for kind in ("weight", "bias"):
            pairs.append((kind, np.concatenate([grads2[f"{n}_{kind}"] for n in names]), grads[kind]))
        for what, got, want in pairs:
            assert_close(what, got, want, "float64", 2.0**-18 * np.abs(want).max())


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(device, dtype, kind, zero_centered):
    module = make(kind, device, dtype, normalized_shape=K, eps=1e-3, zero_centered_gamma=zero_centered)
    p = {name: f64(parameter) for name, parameter in module.named_parameters()}
    x, g, rx, rg = data(dtype, K, K)
    y, dx, grads = step(module, "high", x, g)
    want, xhat, rstd = norm(rx, p["weight"], p.get("bias"), kind.__name__, 1e-3, zero_centered)
    want_dx, want_dw, want_db = norm_grad(rg, xhat, rstd, p["weight"], kind.__name__, zero_centered)
    assert_within("y", y, want.rounded(dtype))
    assert_within("dx", dx, want_dx.rounded(dtype))
    assert_within("dw", grads["weight"], want_dw.rounded(dtype))
    if kind is nn.LayerNorm:
        assert_within("db", grads["bias"], want_db.rounded(dtype))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("mode", ["high", "delayed", "current", "block"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_linear(device, dtype, mode, kind):
    check_layer_norm_linear(device, dtype, mode, kind)


def check_layer_norm_linear(device, dtype, mode, kind, sizes=USUAL):
    shape, k, n, _ = sizes
    centred = (kind == "RMSNorm") != (dtype == "float16")
    module = make(
        nn.LayerNormLinear,
        device,
        dtype,
        in_features=k,
        out_features=n,
        normalization=kind,
        zero_centered_gamma=centred,
    )
    p = warmed(module, mode, dtype, k, n, shape)
    x, g, rx, rg = data(dtype, k, n, shape)
    normed, xhat, rstd = norm(rx, p["layer_norm_weight"], p.get("layer_norm_bias"), kind, 1e-5, centred)
    product = Product(normed.rounded(dtype), p["weight"], quantiser(mode, module))
    y, dx, grads = step(module, mode, x, g)
    dnormed, want_dw, want_db = product.backward(rg)
    want_dx, want_dgamma, want_dbeta = norm_grad(
        dnormed.rounded(dtype), xhat, rstd, p["layer_norm_weight"], kind, centred
    )
    assert_within("y", y, product.forward(p["bias"]).rounded(dtype))
    assert_within("dw", grads["weight"], want_dw.rounded(dtype))
    assert_within("db", grads["bias"], want_db.rounded(dtype))
    assert_within("dx", dx, want_dx.rounded(dtype))
    assert_within("dgamma", grads["layer_norm_weight"], want_dgamma.rounded(dtype))
    if kind == "LayerNorm":
        assert_within("dbeta", grads["layer_norm_bias"], want_dbeta.rounded(dtype))


MLP_MODES = ("high", "delayed", "current", "block")
# such that many elements lie beyond the limit
CLAMP = {"limit": 0.5, "alpha": 1.25, "glu_linear_offset": 0.75}
# every activation in every mode, and the first in every dtype too
MLP_CASES = [
    (DTYPES[(i + j) % 3], mode, kind)
    for i, kind in enumerate(ACTIVATIONS)
    for j, mode in enumerate(MLP_MODES)
]
MLP_CASES += [
    case
    for case in ((dtype, mode, "gelu") for dtype in DTYPES for mode in MLP_MODES)
    if case not in MLP_CASES
]


@pytest.mark.parametrize(("dtype", "mode", "kind"), MLP_CASES)
def test_layer_norm_mlp(device, dtype, mode, kind):
    check_layer_norm_mlp(device, dtype, mode, kind)


def check_layer_norm_mlp(device, dtype, mode, kind, sizes=USUAL):
    shape, k, _, f = sizes
    params = CLAMP if kind == "clamped_swiglu" else None
    normalization, centred = ("RMSNorm", True) if dtype == "float16" else ("LayerNorm", dtype == "bfloat16")
    module = make(
        nn.LayerNormMLP,
        device,
        dtype,
        hidden_size=k,
        ffn_hidden_size=f,
        activation=kind,
        activation_params=params,
        normalization=normalization,
        zero_centered_gamma=centred,
    )
    p = warmed(module, mode, dtype, k, k, shape)
    x, g, rx, rg = data(dtype, k, k, shape)
    normed, xhat, rstd = norm(
        rx, p["layer_norm_weight"], p.get("layer_norm_bias"), normalization, 1e-5, centred
    )
    fc1 = Product(normed.rounded(dtype), p["fc1_weight"], quantiser(mode, module, 0))
    act, act_back = activation(
        fc1.forward().rounded(dtype) + p["fc1_bias"], kind, tuple((params or {}).values())
    )
    fc2 = Product(act.rounded(dtype), p["fc2_weight"], quantiser(mode, module, 1))
    y, dx, grads = step(module, mode, x, g)
    dact, dw2, db2 = fc2.backward(rg)
    dh = act_back(dact.rounded(dtype)).rounded(dtype)
    dnormed, dw1, db1 = fc1.backward(dh)
    want_dx, dgamma, dbeta = norm_grad(
        dnormed.rounded(dtype), xhat, rstd, p["layer_norm_weight"], normalization, centred
    )
    assert_within("y", y, fc2.forward(p["fc2_bias"]).rounded(dtype))
    named = {
        "fc2_weight": dw2,
        "fc2_bias": db2,
        "fc1_weight": dw1,
        "fc1_bias": db1,
        "layer_norm_weight": dgamma,
    }
    if normalization == "LayerNorm":
        named["layer_norm_bias"] = dbeta
    for name, want in named.items():
        assert_within(name, grads[name], want.rounded(dtype))
    assert_within("dx", dx, want_dx.rounded(dtype))


@combinations(
    {
        "how": {
            **{mode: (mode, "float32") for mode in MODES},
            "delayed-bfloat16": ("delayed", "bfloat16"),
            "block-float16": ("block", "float16"),
        },
        "sizes": ODD,
    }
)
def test_sizes_that_are_a_multiple_of_nothing(device, how, sizes):
    mode, dtype = how
    check_linear(device, dtype, mode, True, sizes)
    if mode in MLP_MODES:
        check_layer_norm_linear(device, dtype, mode, "LayerNorm", sizes)
        check_layer_norm_mlp(device, dtype, mode, "geglu", sizes)


def test_returned_bias_and_norm(device):
    x = draw(1, (4, K), "float32")
    plain = make(nn.LayerNormMLP, device, "float32", hidden_size=K, ffn_hidden_size=F)
    more = make(
        nn.LayerNormMLP,
        device,
        "float32",
        hidden_size=K,
        ffn_hidden_size=F,
        return_bias=True,
        return_layernorm_output=True,
    )
    on = tensor(x, device=plain.device)
    y, bias, normed = more(on)
    assert_close("y", f64(y) + f64(bias), f64(plain(on)), "float64", 2.0**-20)
    norm_only = nn.LayerNorm(K, device=device)
    norm_only.load_state_dict({"weight": more.layer_norm_weight, "bias": more.layer_norm_bias})
    np.testing.assert_array_equal(f64(normed), f64(norm_only(on)))
    linear = make(nn.Linear, device, "float32", in_features=K, out_features=N, return_bias=True)
    y, bias = linear(on)
    assert bias is linear.bias
    product = Product(R(x), f64(linear.weight), None)
    assert_within("y", f64(y), product.forward().rounded("float32"))


def test_inputs_may_be_any_array_and_wrong_ones_are_named(device):
    linear = nn.Linear(K, N, device="cpu")
    x = draw(1, (2, K), "float32")
    np.testing.assert_array_equal(f64(linear(x)), f64(linear(tensor(x))))
    with pytest.raises(ValueError, match=r"inp.*list"):
        linear([1.0])
    with pytest.raises(ValueError, match="inp: got shape"):
        linear(x[:, :-1].copy())
    with pytest.raises(ValueError, match="bfloat16"):
        linear(draw(1, (2, K), "bfloat16"))
    with pytest.raises(Fp8kitError, match=r"fp8_output.*yet"):
        linear(x, fp8_output=True)
