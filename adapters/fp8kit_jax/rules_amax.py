"""Amaxes that devices share: where scales are current, they are measured first, reduced, and given to the operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp


def scaled_now(spec: Any, products: Sequence[Any] = ()) -> bool:
    """Whether the spec's one product, or one of ``products``, has scales of whole tensors that are taken now (current scaling)."""
    fp8s = [getattr(product, "fp8", None) for product in (getattr(spec, "product", None), *products)]
    return any(fp8 is not None and fp8.x.source == "current" for fp8 in fp8s)


def with_amaxes(spec: Any) -> Any:
    """The spec with its amaxes as inputs."""
    fp8 = spec.product.fp8
    known = {name: replace(getattr(fp8, name), source="amax") for name in ("x", "w", "g")}
    return replace(spec, product=replace(spec.product, fp8=replace(fp8, **known)))


def amax_of(x: Any) -> Any:
    """max|x|, NaN ignored, float32 (1,)."""
    size = jnp.abs(x).astype(jnp.float32)
    return jnp.max(jnp.where(jnp.isnan(size), 0.0, size)).reshape(1)
