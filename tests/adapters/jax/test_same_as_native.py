"""The same bits as ``fp8kit.nn`` on the CPU and on a GPU: outputs, gradients and FP8 state of layers with
weights, for the same weights (in the same layout), inputs and recipe, over several steps. On the GPU under
the deterministic policy, which is captured when JAX traces."""

from __future__ import annotations

import fp8kit_jax as fj
import pytest

from fp8kit import nn
from tests.adapters.jax.native import RECIPES, F, K, random_parameters, steps
from tests.support.combinations import combinations

pytestmark = pytest.mark.usefixtures("same_bits")
N = 56


@combinations({"recipe": RECIPES.keys(), "dtype": ["float32", "bfloat16"]})
def test_dense(recipe, dtype, device):
    module = nn.Linear(K, N, params_dtype=dtype, device=device)

    def function(p, sets, x):
        return fj.dense(x, p["weight"], p["bias"], ((-1,), (1,)), sets[0])

    steps(module, function, random_parameters(module, dtype), RECIPES[recipe], dtype, 1, device)


@combinations({"recipe": RECIPES.keys(), "norm": ["LayerNorm", "RMSNorm"]})
def test_layernorm_dense(recipe, norm, device):
    module = nn.LayerNormLinear(
        K, N, normalization=norm, eps=1e-5, zero_centered_gamma=norm == "RMSNorm", device=device
    )

    def function(p, sets, x):
        return fj.layernorm_dense(
            x,
            p["weight"],
            p["layer_norm_weight"],
            p.get("layer_norm_bias"),
            p["bias"],
            norm.lower(),
            norm == "RMSNorm",
            1e-5,
            sets[0],
            kernel_layout="oi",
        )

    steps(module, function, random_parameters(module, "float32"), RECIPES[recipe], "float32", 1, device)


# activation -> its names in JAX, its parameters; the first two with every recipe, each of the others with one
MLPS = {
    "gelu": (("gelu",), None),
    "swiglu": (("silu", "linear"), None),
    "srelu": (("squared_relu",), None),
    "qgeglu": (("quick_gelu", "linear"), None),
    "clamped_swiglu": (("clamped_silu", "clamped_linear"), {"limit": 0.5}),
}
PAIRS = [(recipe, kind) for kind in ("gelu", "swiglu") for recipe in RECIPES]
PAIRS += [("block", "srelu"), ("current", "qgeglu"), ("high", "clamped_swiglu")]


USUAL = PAIRS[:5:2] + PAIRS[6:10:2] + PAIRS[10:]  # every recipe, and every kind


@combinations({"pair": {"-".join(pair): pair for pair in PAIRS}}, usual=["-".join(pair) for pair in USUAL])
def test_layernorm_mlp(pair, device):
    recipe, kind = pair
    types, numbers = MLPS[kind]
    module = nn.LayerNormMLP(K, F, eps=1e-5, activation=kind, activation_params=numbers, device=device)

    def function(p, sets, x):
        kernels = p["fc1_weight"].reshape(len(types), F, K), p["fc2_weight"]
        biases = p["fc1_bias"].reshape(len(types), F), p["fc2_bias"]
        return fj.layernorm_mlp(
            x,
            p["layer_norm_weight"],
            p["layer_norm_bias"],
            kernels,
            biases,
            "layernorm",
            False,
            1e-5,
            types,
            sets,
            kernel_layout="oi",
            activation_params=numbers,
        )

    steps(module, function, random_parameters(module, "float32"), RECIPES[recipe], "float32", 2, device)


class Adding(nn.Linear):
    """As ``fp8kit.nn.TransformerLayer`` has its output projections, but for where the residual comes from."""

    def forward(self, x):
        return self.compute(x, None, "add", x)


@combinations({"recipe": RECIPES.keys()}, usual=["delayed", "current", "block"])
def test_a_product_that_adds_a_residual(recipe, device):
    """In bfloat16, where what is rounded twice shows."""
    module = Adding(K, K, params_dtype="bfloat16", device=device)

    def function(p, sets, x):
        return fj.dense(x, p["weight"], p["bias"], ((-1,), (1,)), sets[0], residual=x)

    steps(module, function, random_parameters(module, "bfloat16"), RECIPES[recipe], "bfloat16", 1, device)


class Joining(nn.LayerNormMLP):
    """As ``fp8kit.nn.TransformerLayer`` has it."""

    def forward(self, x):
        return self.compute(x, None, "add", fused_residual=True)


@combinations({"recipe": RECIPES.keys()}, usual=["delayed", "current", "block"])
def test_an_mlp_that_adds_its_residual(recipe, device):
    """In bfloat16, where what is rounded twice shows."""
    module = Joining(K, F, eps=1e-5, params_dtype="bfloat16", device=device)

    def function(p, sets, x):
        kernels, biases = (p["fc1_weight"][None], p["fc2_weight"]), (p["fc1_bias"][None], p["fc2_bias"])
        return fj.layernorm_mlp(
            x,
            p["layer_norm_weight"],
            p["layer_norm_bias"],
            kernels,
            biases,
            epsilon=1e-5,
            quantizer_sets=sets,
            kernel_layout="oi",
            join_residual=True,
        )

    steps(module, function, random_parameters(module, "bfloat16"), RECIPES[recipe], "bfloat16", 2, device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_norms(norm, dtype, device):
    centred = norm == "RMSNorm"
    module = getattr(nn, norm)(K, eps=1e-5, zero_centered_gamma=centred, params_dtype=dtype, device=device)

    def function(p, sets, x):
        return fj.layernorm(x, p["weight"], p.get("bias"), norm.lower(), centred, 1e-5)

    steps(module, function, random_parameters(module, dtype), None, dtype, 0, device)
