"""What the Flax modules share: parameters, and FP8 state in the collection ``fp8_metas``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from fp8kit.recipe import DelayedScaling
from fp8kit_jax.quantizers import QuantizerSet
from fp8kit_jax.scopes import recipe_in_force
from fp8kit_jax.state import FP8_COLLECTION_NAME, Slot

Shape = tuple[int, ...]


def quantizer_set(module: nn.Module, postfix: str = "") -> QuantizerSet:
    """The set of one product by the autocast in force; with delayed scaling its slots are the module's variables ``x{postfix}_scale``,
    ``x{postfix}_amax_history`` and those of ``kernel`` and ``grad`` (Transformer Engine's names)."""
    recipe = recipe_in_force()
    if not isinstance(recipe, DelayedScaling):
        return QuantizerSet(recipe=recipe)
    fresh = Slot.fresh(recipe.amax_history_len)

    def slot(name: str) -> Slot:
        fields = fresh._asdict().items()
        return Slot(**{field: module.variable(FP8_COLLECTION_NAME, f"{name}{postfix}_{field}", lambda v=v: v).value for field, v in fields})

    return QuantizerSet(slot("x"), slot("kernel"), slot("grad"), recipe)


def fan_in(features: int) -> Any:
    """Initialiser of kernels whose first dimension is the input: variance 1 / fan-in, truncated normal."""
    return nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=tuple(range(1, features + 1)))


def partitioned(init: Any, axes: tuple[Any, ...]) -> Any:
    """The initialiser, with the parameter's logical axes where there are some."""
    return nn.with_logical_partitioning(init, axes) if axes else init


def norm_parameters(module: Any, features: int, dtype: Any) -> tuple[Any, Any]:
    """``scale`` and, of a LayerNorm, ``ln_bias`` of a module with Transformer Engine's fields, in ``dtype``."""
    start = module.scale_init or (nn.initializers.zeros if module.zero_centered_gamma else nn.initializers.ones)
    scale = module.param("scale", partitioned(start, module.scale_axes), (features,), module.dtype)
    if module.layernorm_type == "rmsnorm":
        return jnp.asarray(scale, dtype), None
    name, init, axes = ("ln_bias", module.ln_bias_init, module.ln_bias_axes) if hasattr(module, "ln_bias_init") else (
        "ln_bias", module.bias_init, module.bias_axes)
    return jnp.asarray(scale, dtype), jnp.asarray(module.param(name, partitioned(init, axes), (features,), module.dtype), dtype)
