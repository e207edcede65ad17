"""Which operations the door knows, and the types that their specs are made of: all of ``fp8kit.ops``, found
by themselves."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

from fp8kit import ops
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.spec import Operation
from fp8kit_jax.program import register_operation, register_specs

MUTATING = ("cached_attention",)  # writes into its inputs, which JAX's arrays forbid

for _info in pkgutil.iter_modules(ops.__path__):
    _module = importlib.import_module(f"fp8kit.ops.{_info.name}")
    _own = [
        value for value in vars(_module).values() if getattr(value, "__module__", None) == _module.__name__
    ]
    _specs = [
        value
        for value in _own
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__name__[0] != "_"
    ]
    for _operation in [
        value for value in _own if isinstance(value, Operation) and value.name not in MUTATING
    ]:
        register_operation(_operation)
    register_specs(*_specs)
register_specs(Quantization, Gemm, Quantizer)
