"""The published recipes that every frontend is tested under, and modules to test them with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit import formats, nn, recipe
from fp8kit.quantization import Quantization
from fp8kit.recipes import NAMED

OVERRIDES = ("high_precision", "dequantized")


def _values_for(name: str, *gemms: str) -> recipe.DataRecipe:
    """A named recipe some GEMMs of which multiply fprop's values."""
    made = {
        gemm: replace(own, compute="dequantized") if gemm in gemms else own
        for gemm, own in NAMED[name].recipe.quantization.gemms.items()
    }
    return recipe.DataRecipe(Quantization(**made), name)


# recipes without a name of their own
VARIANTS = {
    **{
        f"{kind.__name__} {how}": kind(backward_override=how)  # type: ignore[call-arg]
        for kind in (recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.Float8BlockScaling)
        for how in OVERRIDES
    },
    "rowwise, dgrad dequantized": _values_for("rowwise", "dgrad"),
    "rowwise, wgrad dequantized": _values_for("rowwise", "wgrad"),
}
RECIPES = {name: each.recipe for name, each in NAMED.items()} | VARIANTS
RANDOM = tuple(name for name, recipe in RECIPES.items() if recipe.quantization.needs_rng)
DTYPES = ("float32", "bfloat16", "float16")

# sizes: more than one block of 128 along one contraction, and none of them a multiple of a block's size, so
# that the last blocks are smaller
ROWS, IN, OUT = 40, 144, 56
MODULES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "Linear": (IN, OUT, {"in_features": IN, "out_features": OUT}),
    "LayerNormMLP": (IN, IN, {"hidden_size": IN, "ffn_hidden_size": OUT}),
}


def draw(seed: int, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    """Normal numbers of the host."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32).astype(formats.dtype(dtype).numpy)


def parameters(module: Any, dtype: str) -> dict[str, Any]:
    """Random values of a native module's parameters."""
    found = {}
    for i, (name, parameter) in enumerate(module.named_parameters()):
        values = draw(100 + i, parameter.shape, "float32", 0.1) + np.float32(name.endswith("norm_weight"))
        found[name] = values.astype(formats.dtype(dtype).numpy)
    return found


def native(kind: str, dtype: str, **more: Any) -> Any:
    """A module of ``MODULES`` on the CPU, with random parameters."""
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
