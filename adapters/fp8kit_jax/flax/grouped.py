"""``GroupedDense``: the experts of a mixture as a Flax module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from fp8kit.arguments import NamedWell
from fp8kit_jax import grouped
from fp8kit_jax.checks import GROUPED
from fp8kit_jax.flax.common import (
    bias_parameter,
    check_fields,
    constrained,
    parameter,
    quantizer_set,
    want_array,
)
from fp8kit_jax.modules import fan_in_of_experts
from fp8kit_jax.scopes import recipe_in_force


class GroupedDense(NamedWell, nn.Module):
    """y[r] = x[r] kernel[e] + bias[e] for the rows r of group e, in FP8 under ``autocast``; rows of no group
    are 0.

    * ``experts`` E, ``features`` N. Parameters ``kernel`` (E, K, N) and, with ``use_bias``, ``bias`` (E, N),
      in ``dtype``, cast to x's dtype when used. ``kernel_init`` None: variance 1 / K, truncated normal.
    * ``kernel_axes``, ``bias_axes``, ``input_axes``: logical axes, see ``DenseGeneral``.
    """

    experts: int
    features: int
    kernel_init: Any = None
    kernel_axes: tuple[Any, ...] = ()
    use_bias: bool = False
    bias_init: Any = nn.initializers.zeros
    bias_axes: tuple[Any, ...] = ()
    dtype: Any = jnp.float32
    input_axes: tuple[Any, ...] = ()

    @nn.compact
    def __call__(self, inputs: Any, group_sizes: Any) -> Any:
        """``inputs``: h (M, K), groups of rows one after the other; ``group_sizes``: integers (E,), on the
        device. Returns h (M, N). See ``fp8kit_jax.grouped_dense``."""
        check_fields(self, rules=GROUPED)
        path = ".".join(map(str, self.path)) or self.name or ""
        grouped.want_scales_of_data("GroupedDense", recipe_in_force("GroupedDense", path))
        x = constrained(want_array(self, "inputs", inputs), self.input_axes)
        init = self.kernel_init or fan_in_of_experts
        shape = (self.experts, x.shape[-1], self.features)
        kernel = parameter(self, "kernel", init, self.kernel_axes, shape, x.dtype)
        bias = bias_parameter(self, "bias", self.bias_axes, (self.experts, self.features), x.dtype)
        return grouped.grouped_dense(x, kernel, group_sizes, bias=bias, quantizer_set=quantizer_set(self))
