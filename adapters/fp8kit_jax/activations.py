"""``activation``: the activations of an MLP as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from fp8kit.errors import FormatError, ShapeError, expected
from fp8kit.ops.norm_mlp import ACTIVATIONS
from fp8kit_jax import operations
from fp8kit_jax.rules import apply

ACTIVATION_TYPES = {("gelu",): "gelu", ("relu",): "relu", ("silu",): "silu", ("silu", "linear"): "swiglu"}


def activation(x: Any, activation_type: Sequence[str]) -> Any:
    """The activation of x, or the product of two. ``x``: h (..., a, F) with a = len(activation_type); ``activation_type``: ("gelu",) (tanh
    form, Hendrycks & Gimpel 2016), ("relu",), ("silu",) or ("silu", "linear") (SwiGLU). Returns h (..., F)."""
    x, name = jnp.asarray(x), activation_name("activation", activation_type)
    parts = ACTIVATIONS[name]
    if x.ndim < 2 or x.shape[-2] != parts:
        raise ShapeError(expected("activation", "x", f"shape {x.shape}", f"(..., {parts}, features) for {tuple(activation_type)}"))
    flat = x.reshape(*x.shape[:-2], parts * x.shape[-1])
    return apply(operations.activation, operations.ActivationSpec(name, flat.shape[-1]), {"x": flat})["y"]


def activation_name(operation: str, activation_type: Sequence[str]) -> str:
    """fp8kit's name of an activation; FormatError for one that there is not."""
    name = ACTIVATION_TYPES.get(tuple(activation_type))
    if name is None:
        known = ", ".join(map(str, ACTIVATION_TYPES))
        raise FormatError(expected(operation, "activation_type", repr(tuple(activation_type)), f"one of {known}"))
    return name
