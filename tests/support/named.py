"""The published recipes that every frontend is tested under, and modules to test them with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit import formats, nn, recipe
from fp8kit.quantization import AmaxHistory, Gemm, Quantization, Quantizer
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_same_bits
from tests.support.layers import draw

OVERRIDES = ("high_precision", "dequantized")


def _values_for(name: str, *gemms: str) -> recipe.DataRecipe:
    """Returns a named recipe some GEMMs of which multiply fprop's values."""
    made = {
        gemm: replace(own, compute="dequantized") if gemm in gemms else own
        for gemm, own in NAMED[name].recipe.quantization.gemms.items()
    }
    return recipe.DataRecipe(Quantization(**made), name)


_X, _G, _ROW = Quantizer(formats.E4M3), Quantizer(formats.E5M2), Quantizer(formats.E4M3, "row")
_ROTATED = {"hadamard": 32, "signs": "random"}


def _data(name: str, *gemms: Any) -> recipe.DataRecipe:
    made = Quantization(*gemms) if isinstance(gemms[0], Gemm) else Quantization.of(*gemms)
    return recipe.DataRecipe(made, name)


def _fixed(own: Quantizer, scale: float) -> Quantizer:
    return replace(own, scale_source="static", static_scale=scale)


# levers of operands with scales of tensors and rows, and static scales
_LEVERS = (
    _data("tensors, random bits", replace(_X, stochastic_bits=32), _X, replace(_G, stochastic_bits=8)),
    _data(
        "tensors, rotated wgrad",
        Gemm(_X, _X),
        Gemm(_G, _X),
        Gemm(replace(_G, hadamard=16, signs="te"), replace(_X, hadamard=16, signs="te")),
    ),
    _data(
        "rows, rotated and random",
        Gemm(replace(_ROW, hadamard=128), replace(_ROW, hadamard=128)),
        *[Gemm(replace(_ROW, stochastic_bits=5, **_ROTATED), replace(_ROW, **_ROTATED))] * 2,
    ),
    _data("rows of E2M1", *[replace(_ROW, format=formats.E2M1, stochastic_bits=16, **_ROTATED)] * 3),
    _data("fixed scales", _fixed(_X, 8.0), _fixed(_X, 32.0), _fixed(_G, 3000.0)),
    _data("fixed scales, random bits", _fixed(_X, 8.0), _X, _fixed(replace(_G, stochastic_bits=32), 3e3)),
)
# scales of earlier steps for some operands, others for the rest
_EARLIER, _EARLIER_G = replace(_X, scale_source="delayed"), replace(_G, scale_source="delayed")
_MX, _WINDOW = Quantizer(formats.E4M3, "mx_1x32", scale_rule="te"), AmaxHistory(448.0, 57344.0, 4)
_EARLIER_TOO = (
    recipe.DataRecipe(Quantization.of(_EARLIER, _MX, _MX), "delayed x, mx", history=_WINDOW),
    recipe.DataRecipe(
        Quantization.of(
            Quantizer(formats.E2M1, "nvfp4_1x16"), _EARLIER, replace(_EARLIER_G, stochastic_bits=8), "split"
        ),
        "delayed w and g, random bits, nvfp4",
        history=replace(_WINDOW, power_2=True, amax_algo="most_recent"),
    ),
    recipe.DataRecipe(
        Quantization.of(_ROW, _EARLIER, _EARLIER_G, "hopper_fast"),
        "predicted w, delayed g, rows",
        history=replace(_WINDOW, growth=1e-2, length=2),
    ),
    recipe.DataRecipe(
        Quantization.of(_EARLIER, _EARLIER, _EARLIER_G),
        "powers of two",
        history=replace(_WINDOW, power_2=True),
    ),
    recipe.DataRecipe(
        Quantization.of(_EARLIER, _EARLIER, _EARLIER_G),
        "once in a window",
        history=replace(_WINDOW, length=2, by_window=True),
    ),
)
# recipes without a name of their own
VARIANTS = {
    **{
        f"{kind.__name__} {how}": kind(backward_override=how)  # type: ignore[call-arg]
        for kind in (recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.Float8BlockScaling)
        for how in OVERRIDES
    },
    "rowwise, dgrad dequantized": _values_for("rowwise", "dgrad"),
    "rowwise, wgrad dequantized": _values_for("rowwise", "wgrad"),
    **{each.name: each for each in (*_LEVERS, *_EARLIER_TOO)},
    "nvfp4, all fields": recipe.NVFP4BlockScaling(
        disable_rht=True,
        disable_stochastic_rounding=True,
        disable_2d_quantization=True,
        row_scaled_activation=True,
        nvfp4_4over6="all",
        nvfp4_4over6_e4m3_use_256="weights",
        nvfp4_4over6_err_mode="MSE",
        backward_override="dequantized",
    ),
    "nvfp4, 4over6 of rows": recipe.NVFP4BlockScaling(
        disable_rht=True, row_scaled_activation=True, nvfp4_4over6="activations"
    ),
    "nvfp4, 4over6 of weights": recipe.NVFP4BlockScaling(nvfp4_4over6="weights"),
}
RECIPES = {name: each.recipe for name, each in NAMED.items()} | VARIANTS
# those that draw, and whose steps are else the same again
RANDOM = tuple(name for name, own in RECIPES.items() if own.quantization.needs_rng and own.history is None)
DTYPES = ("float32", "bfloat16", "float16")

# sizes: more than one block of 128 along one contraction, and none of them a multiple of a block's size, so
# that the last blocks are smaller
ROWS, IN, OUT = 40, 144, 56
MODULES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "Linear": (IN, OUT, {"in_features": IN, "out_features": OUT}),
    "LayerNormMLP": (IN, IN, {"hidden_size": IN, "ffn_hidden_size": OUT}),
}


def same_steps(got: Iterable[Mapping[str, Any]], want: Iterable[Mapping[str, Any]]) -> None:
    """The same arrays of every step, bit for bit."""
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.keys() == b.keys()
        for name in b:
            assert_same_bits(f"step {step}: {name}", a[name], b[name])


def parameters(module: Any, dtype: str) -> dict[str, Any]:
    """Random values of a native module's parameters."""
    found = {}
    for i, (name, parameter) in enumerate(module.named_parameters()):
        values = draw(100 + i, parameter.shape, "float32", 0.1) + np.float32(name.endswith("norm_weight"))
        found[name] = values.astype(formats.dtype(dtype).numpy)
    return found


def native(kind: str, dtype: str, **more: Any) -> Any:
    """Returns a module of ``MODULES`` on the CPU, with random parameters."""
    module = getattr(nn, kind)(params_dtype=dtype, device="cpu", **MODULES[kind][2], **more)
    module.load_state_dict(parameters(module, dtype))
    return module


def batch(kind: str, number: int, dtype: str) -> tuple[Any, Any]:
    """x and the gradient of y of a step: sizes change from step to step."""
    features, out, _ = MODULES[kind]
    x = draw(2 * number, (ROWS, features), dtype, 2.0**number)
    return x, draw(2 * number + 1, (ROWS, out), dtype, 0.01)


def step(module: Any, recipe: Any, x: Any, g: Any, call: Any = None, **options: Any) -> dict[str, Any]:
    """y, dx and the gradients of a native module's parameters, arrays of the host."""
    own = fk.tensor(x, requires_grad=True, device="cpu")
    module.zero_grad()
    with fk.autocast(enabled=recipe is not None, recipe=recipe):
        y = (call or module)(own, **options)
    y.backward(fk.tensor(g, device="cpu"))
    grads = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.numpy(), "dx": own.grad.numpy(), **grads}
