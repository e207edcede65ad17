"""``GroupedDense``: the experts of a mixture as an NNX module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from fp8kit.arguments import NamedWell, check
from fp8kit_jax import grouped
from fp8kit_jax.arguments import as_array
from fp8kit_jax.checks import GROUPED
from fp8kit_jax.modules import fan_in_of_experts
from fp8kit_jax.nnx.dense import _kernel, _Quantizers, _value, _zeros, want_rngs
from fp8kit_jax.scopes import recipe_in_force


class GroupedDense(NamedWell, nnx.Module):
    """y[r] = x[r] kernel[e] + bias[e] for the rows r of group e, in FP8 under ``autocast``; rows of no group
    are 0. Parameters ``kernel`` (experts, K, N) and, with ``use_bias``, ``bias`` (experts, N)."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        kernel_init: Any = None,
        dtype: Any = jnp.float32,
    ) -> None:
        check("GroupedDense", GROUPED, locals())
        want_rngs("GroupedDense", rngs)
        shape = experts, in_features, features
        self.kernel = _kernel(rngs, shape, dtype, kernel_init or fan_in_of_experts)
        self.bias = _zeros((experts, features), dtype, use_bias)
        self.quantizers = _Quantizers(type(self).__name__)

    def __call__(self, x: Any, group_sizes: Any) -> Any:
        """``x``: h (M, K), groups of rows one after the other; ``group_sizes``: integers (experts,), on the
        device. Returns h (M, N). See ``fp8kit_jax.grouped_dense``."""
        x = as_array("GroupedDense", "x", x)
        recipe = recipe_in_force("GroupedDense", self.quantizers.layer)
        grouped.want_scales_of_data("GroupedDense", recipe)
        arrays = _value(self.kernel, x.dtype), group_sizes
        return grouped.grouped_dense(
            x, *arrays, bias=_value(self.bias, x.dtype), quantizer_set=self.quantizers._in_force()
        )
