"""fp8kit: FP8 transformer layers on NumPy and CuPy arrays, and under PyTorch and JAX without a compiled
extension.

Names are loaded when they are first used: ``import fp8kit`` initialises no GPU and imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# at once: a submodule of the same name would take its place when it is first imported
from fp8kit.autocast import autocast
from fp8kit.warmup import warmup  # likewise

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fp8kit import autograd, distributed, nn, numerics, optim, plugins, recipe, recipes
    from fp8kit.accumulation import Accumulation
    from fp8kit.arrays import ArrayView, Device, synchronize
    from fp8kit.autograd import Function, Tensor, no_grad, tensor
    from fp8kit.backends.dispatch import deterministic, use_backend
    from fp8kit.errors import (
        ArgumentError,
        AutogradError,
        BackendError,
        CheckpointError,
        FormatError,
        Fp8kitError,
        NonFiniteError,
        RecipeError,
        ShapeError,
        UnsupportedError,
    )
    from fp8kit.float8 import Float8Tensor, QuantizedArray, quantize
    from fp8kit.formats import (
        E2M1,
        E2M3,
        E3M2,
        E4M3,
        E4M3_240,
        E5M2,
        E8M0,
        MXINT8,
        DType,
        Format,
        bfloat16,
        float16,
        float32,
        int32,
        int64,
        uint8,
    )
    from fp8kit.graphs import graph
    from fp8kit.lab.overrides import override
    from fp8kit.lru import cache_info
    from fp8kit.nn.random import draw_from, manual_seed
    from fp8kit.nn.recompute import checkpoint
    from fp8kit.numerics.inspect import inspect
    from fp8kit.ops.registry import register_operation
    from fp8kit.quantized_matmul import matmul
    from fp8kit.serialization import load, save

# module -> the public names that it holds; "": the submodules that are public
_HOLDS = {
    "": "autograd distributed nn numerics optim recipe recipes testing formats arrays plugins",
    "accumulation": "Accumulation",
    "arrays": "ArrayView Device synchronize",
    "autograd": "Function Tensor no_grad tensor",
    "backends.dispatch": "deterministic use_backend",
    "serialization": "load save",
    "errors": (
        "Fp8kitError ShapeError ArgumentError FormatError RecipeError BackendError CheckpointError "
        "AutogradError NonFiniteError UnsupportedError"
    ),
    "float8": "Float8Tensor QuantizedArray quantize",
    "formats": (
        "E2M1 E2M3 E3M2 E4M3 E4M3_240 E5M2 E8M0 MXINT8 DType Format bfloat16 float16 float32 int32 "
        "int64 uint8"
    ),
    "graphs": "graph",
    "numerics.inspect": "inspect",
    "lab.overrides": "override",
    "lru": "cache_info",
    "quantized_matmul": "matmul",
    "nn.random": "draw_from manual_seed",
    "nn.recompute": "checkpoint",
    "ops.registry": "register_operation",
}
_PUBLIC = {name: module for module, names in _HOLDS.items() for name in names.split()}

__all__ = sorted([*_PUBLIC, "__version__", "autocast", "warmup"])


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        from fp8kit import recipe
        from fp8kit.errors import meant

        method = "; it is a method of what quantize gives: q.dequantize()" if name == "dequantize" else ""
        if getattr(vars(recipe).get(name), "__module__", "") == recipe.__name__:
            method = f"; it is fp8kit.recipe.{name}"
        said = f"module 'fp8kit' has no attribute {name!r}{method or meant(name, __all__)}"
        raise AttributeError(said, name=name)
    found = importlib.import_module(f"fp8kit.{module or name}")
    value = getattr(found, name) if module else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
