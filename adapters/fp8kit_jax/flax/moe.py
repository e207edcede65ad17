"""``GroupedMLP``: the experts of a mixture, two grouped products, as a Flax module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from fp8kit.arguments import NamedWell
from fp8kit_jax.checks import GROUPED
from fp8kit_jax.flax.common import check_fields, want_array
from fp8kit_jax.flax.grouped import GroupedDense
from fp8kit_jax.moe import expert_activation, expert_kind


class GroupedMLP(NamedWell, nn.Module):
    """y[r] = (act(x[r] W1[e] + b1[e]) p[r]) W2[e] + b2[e] for the rows r of group e, in FP8 under
    ``autocast``; rows of no group are 0.

    * ``experts`` E, ``intermediate_dim`` F; H is x's last dimension. ``activations``, ``activation_params``:
      as ``fp8kit_jax.activation``, but for ("xielu",), whose numbers are learned; a = len(activations).
    * Children ``fc1`` and ``fc2`` are ``GroupedDense``: parameters fc1.kernel (E, H, a F), the gate's columns
      first, fc2.kernel (E, F, H), and with ``use_bias`` fc1.bias (E, a F), fc2.bias (E, H). ``kernel_init``,
      ``bias_init``, ``dtype``, ``input_axes``: theirs; ``kernel_axes_1``, ``bias_axes_1``, ``kernel_axes_2``,
      ``bias_axes_2``: of each, and ``hidden_axes`` of what lies between.
    """

    experts: int
    intermediate_dim: int
    activations: Sequence[str] = ("silu", "linear")
    activation_params: Any = None
    kernel_init: Any = None
    kernel_axes_1: tuple[Any, ...] = ()
    kernel_axes_2: tuple[Any, ...] = ()
    use_bias: bool = False
    bias_init: Any = nn.initializers.zeros
    bias_axes_1: tuple[Any, ...] = ()
    bias_axes_2: tuple[Any, ...] = ()
    dtype: Any = jnp.float32
    input_axes: tuple[Any, ...] = ()
    hidden_axes: tuple[Any, ...] = ()

    @nn.compact
    def __call__(
        self, inputs: Any, group_sizes: Any, probs: Any = None, tokens_per_expert: Any = None
    ) -> Any:
        """``inputs``: h (M, H), groups of rows one after the other; ``group_sizes``: integers (E,), on the
        device; ``probs``: h (M,), of any type, or None: what lies between the products is multiplied by them.
        ``tokens_per_expert``, without probs: integers (E,), how many rows of each group are tokens; of the
        rest, padding, it becomes 0, so that its biases change no scale. Returns h (M, H). Differentiable in
        inputs and probs. Raises ShapeError, FormatError, ArgumentError, and what ``GroupedDense`` raises."""
        check_fields(self, rules=GROUPED)
        expert_kind("GroupedMLP", self.activations, self.activation_params)
        x = want_array(self, "inputs", inputs)
        shared = {name: getattr(self, name) for name in ("kernel_init", "use_bias", "bias_init", "dtype")}

        def part(name: str, features: int, i: int, axes: tuple[Any, ...]) -> GroupedDense:
            own = {f"{kind}_axes": getattr(self, f"{kind}_axes_{i}") for kind in ("kernel", "bias")}
            return GroupedDense(self.experts, features, name=name, input_axes=axes, **shared, **own)

        wide = len(tuple(self.activations)) * self.intermediate_dim
        hidden = part("fc1", wide, 1, self.input_axes)(x, group_sizes)
        hidden = expert_activation(
            "GroupedMLP",
            hidden,
            self.activations,
            self.activation_params,
            group_sizes,
            probs,
            tokens_per_expert,
        )
        return part("fc2", x.shape[-1], 2, self.hidden_axes)(hidden, group_sizes)
