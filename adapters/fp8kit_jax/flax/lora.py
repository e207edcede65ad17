"""Low-rank adaptation (Hu et al., LoRA, 2021): y + alpha / rank * x A B, A and B small, in high precision."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from fp8kit.arguments import choice
from fp8kit.errors import FormatError
from fp8kit_jax.flax.common import kernel_parameter, parameter

_PARTS = ("qkv_proj", "output_proj", "mlp")
# Transformer Engine's names -> which projections of a layer are adapted
SCOPES = (
    {"none": (), "all": _PARTS}
    | {part: (part,) for part in _PARTS}
    | {f"exclude_{part}": tuple(other for other in _PARTS if other != part) for part in _PARTS}
)


def adapts(module: Any, part: str) -> bool:
    """Whether a module's ``low_rank_adaptation_scope`` has a part of it; FormatError for an unknown scope."""
    scope = module.low_rank_adaptation_scope or "none"
    choice(type(module).__name__, "low_rank_adaptation_scope", scope, SCOPES, FormatError)
    return part in SCOPES[scope]


def adapted(
    module: Any, y: Any, x: Any, axis: tuple[int, ...], features: tuple[int, ...], prefix: str = ""
) -> Any:
    """y (..., features...) with the adaptation of x added, where the module has it; dimensions ``axis`` of x
    are summed over.

    Parameters ``{prefix}lora_a_kernel`` (summed dimensions..., features[:-1]..., rank), started as the
    kernel, and ``{prefix}lora_b_kernel`` (features[:-1]..., rank, features[-1]), started as zeros. alpha
    None: a factor of 1.
    """
    if not module.enable_low_rank_adaptation:
        return y
    rank, alpha = module.low_rank_adaptation_dim, module.low_rank_adaptation_alpha
    ins, outs = tuple(x.shape[d] for d in axis), features[:-1]
    axes = [(None,) * (len(dims) + len(features)) for dims in (ins, (rank,))]
    a = kernel_parameter(module, f"{prefix}lora_a_kernel", ins, (*outs, rank), axes[0], x.dtype)
    shape, zeros = (*outs, rank, features[-1]), nn.initializers.zeros
    b = parameter(module, f"{prefix}lora_b_kernel", zeros, axes[1], shape, x.dtype)
    i, o = "ijkl"[: len(ins)], "nop"[: len(outs)]
    moved = jnp.moveaxis(x, axis, range(-len(axis), 0))
    low = jnp.einsum(f"...{i},{i}{o}r->...{o}r", moved, a)
    return y + jnp.einsum(f"...{o}r,{o}rz->...{o}z", low, b) * jnp.asarray(
        1.0 if alpha is None else alpha / rank, y.dtype
    )
