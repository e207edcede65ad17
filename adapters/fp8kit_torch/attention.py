"""``MultiheadAttention``: attention with its projections (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8kit import layers
from fp8kit.layers.attention_inputs import PARTS
from fp8kit_torch.attention_base import AttentionBase
from fp8kit_torch.dot_product_attention import DotProductAttention
from fp8kit_torch.torch_compat import HOOKS, global_hooks

_FORWARD = DotProductAttention.forward  # which a program may put another one in the place of


class MultiheadAttention(layers.MultiheadAttention, AttentionBase):
    def shows_heads(self, core: Any) -> bool:
        own = core.__dict__
        if "forward" in own or getattr(type(core), "forward", None) is not _FORWARD:
            return True
        return any(map(own.get, HOOKS)) or global_hooks()

    def heads_of(self, layers: Mapping[str, Tensor]) -> list[Tensor]:
        core, dim = self.core_attention, self.core_attention.kv_channels
        found: list[Tensor] = []
        for name, layer in layers.items():
            counts = [self._heads[part] for part in PARTS[name]]
            if len(counts) == 1:
                leading = layer.shape[: 1 if core.qkv_format == "thd" else 2]
                found.append(layer.reshape(*leading, counts[0], dim))
            elif self._interleaved:  # group by group
                groups = core.num_gqa_groups
                parts = layer.unflatten(-1, (groups, -1, dim)).split([n // groups for n in counts], -2)
                found += [part.flatten(-3, -2) for part in parts]
            else:
                found += layer.unflatten(-1, (sum(counts), dim)).split(counts, -2)
        return found
