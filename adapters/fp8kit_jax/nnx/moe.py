"""``GroupedMLP``: the experts of a mixture, two grouped products, as an NNX module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from fp8kit.arguments import NamedWell, check
from fp8kit_jax.arguments import as_array
from fp8kit_jax.checks import GROUPED
from fp8kit_jax.moe import expert_activation, expert_kind
from fp8kit_jax.nnx.dense import want_rngs
from fp8kit_jax.nnx.grouped import GroupedDense


class GroupedMLP(NamedWell, nnx.Module):
    """y[r] = (act(x[r] W1[e] + b1[e]) p[r]) W2[e] + b2[e] for the rows r of group e, in FP8 under
    ``autocast``; rows of no group are 0.

    ``num_features`` H, ``intermediate_dim`` F; ``activations``, ``activation_params``: as
    ``fp8kit_jax.activation``, but for ("xielu",), whose numbers are learned; a = len(activations). Children
    ``fc1`` and ``fc2`` are ``GroupedDense``: parameters fc1.kernel (experts, H, a F), the gate's columns
    first, fc2.kernel (experts, F, H), and with ``use_bias`` fc1.bias (experts, a F), fc2.bias (experts, H).
    """

    def __init__(
        self,
        experts: int,
        num_features: int,
        intermediate_dim: int,
        *,
        rngs: nnx.Rngs,
        activations: Sequence[str] = ("silu", "linear"),
        activation_params: Mapping[str, float] | None = None,
        use_bias: bool = False,
        kernel_init: Any = None,
        dtype: Any = jnp.float32,
    ) -> None:
        check("GroupedMLP", GROUPED, locals())
        expert_kind("GroupedMLP", activations, activation_params)
        want_rngs("GroupedMLP", rngs)
        self.activations = tuple(activations)
        self.activation_params = None if activation_params is None else tuple(activation_params.items())
        more: dict[str, Any] = {"rngs": rngs, "use_bias": use_bias, "kernel_init": kernel_init}
        wide = len(self.activations) * intermediate_dim
        self.fc1 = GroupedDense(experts, num_features, wide, dtype=dtype, **more)
        self.fc2 = GroupedDense(experts, intermediate_dim, num_features, dtype=dtype, **more)

    def __call__(self, x: Any, group_sizes: Any, probs: Any = None, tokens_per_expert: Any = None) -> Any:
        """``x``: h (M, H), groups of rows one after the other; ``group_sizes``, ``probs``,
        ``tokens_per_expert``: as those of ``fp8kit_jax.flax.GroupedMLP``. Returns h (M, H)."""
        hidden = self.fc1(as_array("GroupedMLP", "x", x), group_sizes)
        params = None if self.activation_params is None else dict(self.activation_params)
        hidden = expert_activation(
            "GroupedMLP", hidden, self.activations, params, group_sizes, probs, tokens_per_expert
        )
        return self.fc2(hidden, group_sizes)
