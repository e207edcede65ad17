"""Modules against plain torch's with the same weights: outputs and gradients, in float32, bfloat16, float16
and FP8.

Two questions are asked of each tensor. Is it as near to plain torch's in the same dtype as Transformer
Engine's own tests ask (``dtype_tols`` of its ``tests/pytorch/utils.py``, ``test_*_accuracy`` of its
``tests/pytorch/test_numerics.py``, per element)? And, since both sides round and those tolerances are wide
where layers are fused, is it as near to the same computation in float64 as the roundings on its way allow (in
the 2-norm)?
"""

from __future__ import annotations

import copy
from math import sqrt
from typing import Any, NamedTuple

import fp8kit_torch as te
import pytest
import torch
from torch import nn

from fp8kit.testing import relative_error
from tests.support.combinations import combinations
from tests.support.tensors import assert_tensor_close

from .twins import scope

TOKENS, BATCH, H, OUT, FFN, HEADS = 16, 2, 128, 192, 256, 4
SHAPE = (TOKENS, BATCH, H)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# the relative error of one rounding to nearest, at most
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# (rtol, atol) that PyTorch and Transformer Engine (``dtype_tols``) have as defaults: more than one
# step of the dtype relative to the value (2^-7 and 2^-10 in 16 bits), so that two results that were each
# rounded once from nearly the same sum agree; in float32 an element that comes out near 0 has the error of
# the terms of its sum, a few 2^-24 of values of about 10
ROUNDED_ONCE = {torch.float32: (1.3e-6, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float16: (1e-3, 1e-5)}


def by_dtype(float32, bfloat16, float16):
    return {torch.float32: float32, torch.bfloat16: bfloat16, torch.float16: float16}


class PlainMLP(nn.Sequential):
    """norm, fc1, GELU, fc2."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm, nn.Linear(H, FFN), nn.GELU(approximate="tanh"), nn.Linear(FFN, H))


class PlainLayer(nn.Module):
    """A causal layer with its norms before the branches, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = (
            nn.LayerNorm(H),
            nn.MultiheadAttention(H, HEADS),
            PlainMLP(nn.LayerNorm(H)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, hidden = self.norm(x), torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        a = x + self.attention(y, y, y, attn_mask=hidden, need_weights=False)[0]
        return a + self.mlp(a)  # type: ignore[no-any-return]


class Case(NamedTuple):
    """``ours``, ``plain``: functions that make the modules; ``names``: of a parameter of plain torch's -> of
    ours, several where they are the rows of one. ``forward``, ``backward``: how often a value is rounded on
    its way to the output, and to a gradient; ``outputs``, ``gradients``: (rtol, atol) for each dtype."""

    ours: Any
    plain: Any
    names: dict[str, Any]
    forward: int
    backward: int
    outputs: dict[torch.dtype, tuple[float, float]] = ROUNDED_ONCE
    gradients: dict[torch.dtype, tuple[float, float]] = ROUNDED_ONCE


def norm_names(at: str, ours: str, bias: bool = True) -> dict[str, str]:
    return {f"{at}{name}": f"{ours}{name}" for name in ("weight", "bias")[: 1 + bias]}


def mlp_names(at: str = "", ours: str = "", bias: bool = True) -> dict[str, str]:
    products = {
        f"{at}{i}.{name}": f"{ours}{fc}_{name}"
        for i, fc in ((1, "fc1"), (3, "fc2"))
        for name in ("weight", "bias")
    }
    return norm_names(f"{at}0.", f"{ours}layer_norm_", bias) | products


# Transformer Engine's (rtol, atol) of ``test_layernorm_linear_accuracy``, ``test_layernorm_mlp_accuracy`` and
# ``test_gpt_accuracy``: plain torch rounds in other places, and an element that comes out near 0 has the
# error of the terms that cancel in it. Only of a layer's gradients in float32 less is allowed here, its
# output's 5e-3, where that test has 5e-2 for the many more tokens that are summed up there.
NORM_LINEAR = by_dtype((1e-3, 2.5e-4), (4e-2, 2e-2), (4e-2, 2e-3))
NORM_LINEAR_GRADIENTS = by_dtype((1e-3, 1e-3), (4e-2, 5e-2), (4e-2, 5e-2))
MLP = by_dtype((1e-3, 2e-2), (4e-2, 5e-2), (4e-2, 5e-2))
MLP_GRADIENTS = by_dtype((1e-3, 2e-2), (4e-2, 2e-1), (1e-2, 2e-1))
LAYER = by_dtype((1.3e-6, 5e-3), (1.6e-2, 1e-1), (1e-3, 5e-2))
LAYER_GRADIENTS = by_dtype((1e-2, 5e-3), (1e-2, 1e-1), (1e-2, 5e-2))

LINEAR = {"weight": "weight", "bias": "bias"}
QKV = {
    f"attention.in_proj_{name}": tuple(
        f"self_attention.layernorm_qkv.{part}_{name}" for part in ("query", "key", "value")
    )
    for name in ("weight", "bias")
}
PROJ = {f"attention.out_proj.{name}": f"self_attention.proj.{name}" for name in ("weight", "bias")}
# Roundings. Norms and products: one each, of what they give. LayerNormLinear: norm, product; back: the
# product's, the norm's, and norm(x). LayerNormMLP: norm, fc1, activation, fc2; back as many again.
# TransformerLayer: norm, qkv, softmax, context, proj and the sum before the MLP's four and another sum; back
# as many again.
CASES = {
    "Linear": Case(lambda **o: te.Linear(H, OUT, **o), lambda: nn.Linear(H, OUT), LINEAR, 1, 1),
    "LayerNorm": Case(lambda **o: te.LayerNorm(H, **o), lambda: nn.LayerNorm(H), LINEAR, 1, 1),
    "RMSNorm": Case(
        lambda **o: te.RMSNorm(H, **o), lambda: nn.RMSNorm(H, eps=1e-5), {"weight": "weight"}, 1, 1
    ),
    "LayerNormLinear": Case(
        lambda **o: te.LayerNormLinear(H, OUT, **o),
        lambda: nn.Sequential(nn.LayerNorm(H), nn.Linear(H, OUT)),
        norm_names("0.", "layer_norm_") | norm_names("1.", ""),
        2,
        3,
        NORM_LINEAR,
        NORM_LINEAR_GRADIENTS,
    ),
    "LayerNormMLP": Case(
        lambda **o: te.LayerNormMLP(H, FFN, **o),
        lambda: PlainMLP(nn.LayerNorm(H)),
        mlp_names(),
        4,
        8,
        MLP,
        MLP_GRADIENTS,
    ),
    "LayerNormMLP with RMSNorm": Case(
        lambda **o: te.LayerNormMLP(H, FFN, normalization="RMSNorm", **o),
        lambda: PlainMLP(nn.RMSNorm(H, eps=1e-5)),
        mlp_names(bias=False),
        4,
        8,
        MLP,
        MLP_GRADIENTS,
    ),
    "TransformerLayer": Case(
        lambda **o: te.TransformerLayer(H, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, **o),
        PlainLayer,
        norm_names("norm.", "self_attention.layernorm_qkv.layer_norm_")
        | QKV
        | PROJ
        | mlp_names("mlp.", "layernorm_mlp."),
        11,
        22,
        LAYER,
        LAYER_GRADIENTS,
    ),
}


def joined(tensors: dict[str, torch.Tensor], names: Any) -> torch.Tensor:
    """Our tensor or tensors, as plain torch has them."""
    return tensors[names] if isinstance(names, str) else torch.cat([tensors[name] for name in names])


def made(case: Case, device: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Our module, plain torch's with the same weights, and that one in float64. Weights as they start (0.023
    times normal values, as in Transformer Engine's tests), all else moved away from 0 and 1, where a wrong
    norm weight or bias would not be seen."""
    ours = case.ours(params_dtype=dtype, device=device)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    plain, own = (
        case.plain().to(device=device, dtype=dtype),
        {name: p.detach() for name, p in ours.named_parameters()},
    )
    assert {name for name, _ in plain.named_parameters()} == set(case.names)
    plain.load_state_dict({name: joined(own, names) for name, names in case.names.items()})
    return ours, plain, copy.deepcopy(plain).double()


def stepped(
    module: nn.Module, x: torch.Tensor, g: torch.Tensor, recipe: Any = None
) -> dict[str, torch.Tensor]:
    """Output and gradients of one step, by name."""
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    with scope(te, recipe):
        y = module(leaf)
    y.backward(g)
    assert y.dtype == x.dtype
    assert leaf.grad is not None
    return {"y": y.detach(), "dx": leaf.grad} | {
        name: p.grad for name, p in module.named_parameters() if p.grad is not None
    }


def as_plain(case: Case, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our step's tensors by the names of plain torch's."""
    return {name: found[name] for name in ("y", "dx")} | {
        name: joined(found, names) for name, names in case.names.items()
    }


def near(what: str, got: torch.Tensor, want: torch.Tensor, tolerance: tuple[float, float]) -> None:
    """Each element within atol + rtol |want|."""
    assert_tensor_close(what, got.double(), want.double(), tolerance[1] + tolerance[0] * want.abs())


def host(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().cpu().numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CASES)
def test_a_step_is_plain_torchs(device, kind, dtype):
    case = CASES[kind]
    ours, plain, exact = made(case, device, dtype)
    x = torch.randn(SHAPE, dtype=dtype, device=device)
    g = torch.randn_like(plain(x).detach())
    got, beside, wanted = (
        as_plain(case, stepped(ours, x, g)),
        stepped(plain, x, g),
        stepped(exact, x.double(), g.double()),
    )
    assert set(got) == set(beside) == set(wanted)
    # plain torch's norms in 16 bits may round in between (RMSNorm does, before the weight): float64 is asked
    # instead, no less closely
    reference = wanted if "Norm" in kind and case.outputs is ROUNDED_ONCE else beside
    for name, tensor in got.items():
        near(
            f"{kind}: {name}",
            tensor,
            reference[name],
            case.outputs[dtype] if name == "y" else case.gradients[dtype],
        )
        # each rounding moves a tensor by at most UNIT of its norm, about 0.4 of that in the mean, and a sum
        # of K terms in float32 goes astray by about sqrt(K) 2^-24 in whatever order, where K is FFN at most;
        # independent errors add as squares
        bound = sqrt(case.forward if name == "y" else case.backward) * (UNIT[dtype] + sqrt(FFN) * 2.0**-24)
        assert relative_error(host(tensor), host(wanted[name])) < bound, name


# --- FP8 ----------------------------------------------------------------------------------------------------

RECIPES = {
    "delayed": te.DelayedScaling(amax_history_len=4),
    "current": te.Float8CurrentScaling(),
    "block": te.Float8BlockScaling(),
}
ROWS = 128  # block scaling wants whole blocks on a GPU
# Transformer Engine's ``quantization_tols``: a step of E4M3 relative to a value, and somewhat more than half
# of one at 1. Its weights' size (0.023) and a mean's gradient keep the sums of 128 rounded products within
# it: of y 4.5 times 0.0376 of 0.26, that is 0.044.
FP8 = (0.125, 0.0675)
E4M3 = 0.0266  # the relative error of a normal variable that is rounded to E4M3: derived in docs/numerics.md
E5M2 = 2 * E4M3  # a bit less of mantissa
# Small tensors scatter about the expected error (biases of 128 elements by 6 %), an activation's derivative
# is taken at a rounded value (1.5 % more), and a norm's backward takes the largest part out of its gradient,
# not of the error: at most 1.2 was seen, on other draws.
SPREAD = 1.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_fp8_linear_of_values_that_fp8_holds_is_plain_torchs(device, recipe, dtype):
    """Integers up to 7 have three significant bits, which E4M3 and E5M2 hold; every recipe's scales are
    powers of two for them (448 / 7 = 2^6, 57344 / 7 = 2^13). So nothing but the output is rounded, and the
    tolerance is that of the dtype, not FP8's. Sums of 128 products of up to 49 need 13 bits, which the tensor
    cores' accumulators have."""

    def grid(*shape, step):
        return (torch.randint(-7, 8, shape, device=device) * step).to(dtype)

    case = CASES["Linear"]._replace(ours=lambda **o: te.Linear(H, 256, **o), plain=lambda: nn.Linear(H, 256))
    ours, plain, _ = made(case, device, dtype)
    with torch.no_grad():
        for name in ("weight", "bias"):
            values = grid(*getattr(ours, name).shape, step=2.0**-6)
            getattr(ours, name).copy_(values)
            getattr(plain, name).copy_(values)
    x, g = grid(ROWS, H, step=2.0**-2), grid(ROWS, 256, step=2.0**-3)
    for _ in range(2):  # delayed scaling: with a scale of 1, then of the step before
        got, wanted = stepped(ours, x, g, RECIPES[recipe]), stepped(plain, x, g)
        for name, tensor in got.items():
            near(name, tensor, wanted[name], ROUNDED_ONCE[dtype])


@combinations(
    {
        "kind": ["Linear", "LayerNormMLP", "LayerNormMLP with RMSNorm"],
        "recipe": RECIPES.keys(),
        "dtype": DTYPES,
    }
)
def test_an_fp8_step_is_near_plain_torchs(device, kind, recipe, dtype):
    case = CASES[kind]
    if kind == "Linear":
        case = case._replace(ours=lambda **o: te.Linear(H, 256, **o), plain=lambda: nn.Linear(H, 256))
    ours, plain, exact = made(case, device, dtype)
    x = torch.randn(ROWS, H, dtype=dtype, device=device)
    # of a mean over the rows, as a loss gives it; in float16 16 times that, lest gradients fall among its
    # subnormals: loss scaling
    g = torch.randn_like(plain(x).detach()) * ((16 if dtype is torch.float16 else 1) / ROWS)
    for _ in range(2):  # delayed scaling has seen the tensors in the second step
        found = stepped(ours, x, g, RECIPES[recipe])
    got, beside, wanted = as_plain(case, found), stepped(plain, x, g), stepped(exact, x.double(), g.double())
    back = E4M3 if recipe == "block" else E5M2  # the format of gradients
    # Each product casts both its operands; errors of independent casts add as squares. Linear: x and W; dx
    # and dW: one operand of each format. MLP: two products forward; back, gradients are cast twice, beside
    # the four casts forward.
    forward, backward = (
        (sqrt(2) * E4M3, sqrt(E4M3**2 + back**2))
        if kind == "Linear"
        else (2 * E4M3, sqrt(4 * E4M3**2 + 2 * back**2))
    )
    for name, tensor in got.items():
        unscaled = 1 if name == "y" or dtype is not torch.float16 else 16
        near(name, tensor.double() / unscaled, beside[name].double() / unscaled, FP8)
        bound = (
            SPREAD * (forward if name == "y" else backward)
            + sqrt(case.forward if name == "y" else case.backward) * UNIT[dtype]
        )
        assert relative_error(host(tensor), host(wanted[name])) < bound, name
