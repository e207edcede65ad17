"""Unit scaling in JAX, as pure functions: ``dense`` for products, the other operations, and ``scale_fwd`` and
``scale_bwd``, which multiply in one direction only. Formulas and sources: ``fp8kit.layers.unit_scaling``."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from fp8kit.layers import unit_scaling as shared
from fp8kit.layers.base import spec_object
from fp8kit.layers.unit_scaling import learning_rate_factor
from fp8kit_jax import layers
from fp8kit_jax.arguments import as_array
from fp8kit_jax.attention import dot_product_attention
from fp8kit_jax.functional import dropout_add
from fp8kit_jax.rules import apply


class _OfArrays(shared.UnitScaling):
    def operation(self, operation: Any, spec: tuple[Any, ...], inputs: Any) -> Any:
        there = {name: as_array("unit_scaling", name, x) for name, x in inputs.items() if x is not None}
        found = next(iter(apply(operation, spec_object(*spec), there).values()))
        return found.reshape(()) if operation.results == ("loss",) else found

    def dtype_name(self, x: Any) -> str:
        return str(x.dtype.name)

    def own_dropout(self, x: Any, p: float, **random: Any) -> Any:
        return dropout_add(x, rate=p, **random)

    def constants(self, values: list[float], like: Any) -> Any:
        return jnp.asarray(values, jnp.float32)

    def own_attention(
        self, query: Any, key: Any, value: Any, scale: float, mask: str, p: float, **random: Any
    ) -> Any:
        options: dict[str, Any] = {"attn_mask_type": mask, "scale_factor": scale, "dropout_rate": p, **random}
        o = dot_product_attention(query, key, value, **options)
        return o.reshape(*o.shape[:-2], -1)


(
    scale_fwd,
    scale_bwd,
    gelu,
    silu,
    silu_glu,
    softmax,
    matmul,
    add,
    residual_split,
    residual_add,
    dropout,
    norm,
    embedding,
    cross_entropy,
    mse,
    attention,
) = (getattr(_OfArrays(), name) for name in shared.FUNCTIONS)


def dense(
    x: Any,
    kernel: Any,
    bias: Any = None,
    *,
    readout: bool = False,
    constraint: str | None = shared.OUTPUT,
    quantizer_set: Any = None,
) -> Any:
    """y = (x kernel + bias) / sqrt(fan_in), in FP8 as the autocast in force says: ``fp8kit_jax.dense`` with
    the factors of ``fp8kit.nn.unit_scaling.Linear``.

    ``x``: h (..., K); ``kernel``: h (K, N) of deviation 1; ``bias``: h (N,) or None; ``quantizer_set``: see
    ``fp8kit_jax.dense``. Returns h (..., N).
    """
    factors = shared.linear_factors(*kernel.shape, math.prod(x.shape[:-1]), readout, constraint)
    kernel = scale_bwd(kernel, factors.parameter)
    bias = None if bias is None else scale_bwd(bias, factors.parameter)
    y = layers.dense(scale_bwd(x, factors.input), kernel, bias, quantizer_set=quantizer_set)
    return scale_fwd(y, factors.output)


# the names of `shared.FUNCTIONS` as strings, which the site's reference wants
__all__ = [
    "add",
    "attention",
    "cross_entropy",
    "dense",
    "dropout",
    "embedding",
    "gelu",
    "learning_rate_factor",
    "matmul",
    "mse",
    "norm",
    "residual_add",
    "residual_split",
    "scale_bwd",
    "scale_fwd",
    "silu",
    "silu_glu",
    "softmax",
]
