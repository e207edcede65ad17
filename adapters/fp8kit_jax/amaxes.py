"""Amaxes as inputs of an operation: where devices share them, they are measured, reduced, and given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from fp8kit.formats import float32
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta
from fp8kit_jax.division import divide

AMAX = Meta((1,), float32)


def with_amaxes(product: ProductSpec) -> ProductSpec:
    """The product with its amaxes as inputs."""
    assert product.fp8 is not None
    return replace(product, fp8=product.fp8.map(Quantizer.with_amax))


def amax_of(x: Any) -> Any:
    """max|x|, NaN ignored, float32 (1,)."""
    size = jnp.abs(x).astype(jnp.float32)
    return jnp.max(jnp.where(jnp.isnan(size), 0.0, size)).reshape(1)


def scale_of(amax: Any, largest: float) -> Any:
    """The scale that current scaling takes from an amax, float32 (1,): ``largest / amax``, 1 where amax is 0
    or Inf."""
    usable = jnp.isfinite(amax) & (amax > 0)
    return jnp.where(usable, divide(largest, jnp.where(usable, amax, 1.0)), 1.0)
