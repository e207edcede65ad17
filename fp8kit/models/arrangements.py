"""How the layers of a ``GPT`` are arranged: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fp8kit.arguments import choice

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Arrangement:
    """How every layer is made, and what stands around them.

    * ``layer``: further arguments of every ``TransformerLayer``. ``width``: the feed-forward width over the
      hidden size, rounded up to a multiple of 16.
    * ``depth_gain``: the norms after the branches start at 1 / sqrt(number of layers).
    * ``unit_embeddings``: what the embeddings give is multiplied by 1 / its initial deviation.
    * ``final_norm``: a norm before the head, of the layers' kind.
    * ``source``: where it is from.
    """

    name: str
    layer: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    width: float = 4.0
    depth_gain: bool = False
    unit_embeddings: bool = False
    final_norm: bool = True
    source: str = ""

    def ffn(self, hidden: int) -> int:
        """Returns the feed-forward width."""
        return -(-int(self.width * hidden) // 16) * 16


ARRANGEMENTS = {
    arrangement.name: arrangement
    for arrangement in (
        Arrangement("gpt2", source="Radford et al. 2019"),
        Arrangement(
            "fog",
            {
                "norm_position": "after",
                "normalization": "RMSNorm",
                "activation": "xielu",
                "qk_norm_type": "RMSNorm",
                "qk_norm_learned": False,
                "softmax_scale": 0.125,
                "bias": False,
            },
            depth_gain=True,
            unit_embeddings=True,
            final_norm=False,
            source="FOG, Hernandez-Cano et al. 2025, arXiv:2505.20524",
        ),
        Arrangement(
            "smooth_swiglu",
            {"normalization": "RMSNorm", "activation": "swiglu", "smooth_swiglu": "channel", "bias": False},
            width=8 / 3,
            source="Fishman et al. 2024, arXiv:2409.12517",
        ),
    )
}


def arrangement(name: str) -> Arrangement:
    """Returns the arrangement of that name; ArgumentError that lists them where there is none."""
    return ARRANGEMENTS[choice("arrangement", "name", name, ARRANGEMENTS)]
