"""``transformer_engine.jax.attention``: enumerations, ``fused_attn``, descriptors."""

from __future__ import annotations

from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fp8kit.arguments import choice, shown
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit_jax.checks import ALIASES
from fp8kit_jax.flax.attention import DotProductAttention
from fp8kit_jax.flax.common import FIXED
from fp8kit_jax.scopes import is_raw_key
from fp8kit_jax.sequences import (
    ReorderStrategy,
    SequenceDescriptor,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)


class AttnBiasType(Enum):
    """What is added to scores, and when."""

    NO_BIAS = "no_bias"
    PRE_SCALE_BIAS = "pre_scale_bias"
    POST_SCALE_BIAS = "post_scale_bias"


class AttnMaskType(Enum):
    """What is masked out."""

    NO_MASK = "no_mask"
    PADDING_MASK = "padding"
    CAUSAL_MASK = "causal"
    PADDING_CAUSAL_MASK = "padding_causal"
    CAUSAL_BOTTOM_RIGHT_MASK = "causal_bottom_right"
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = "padding_causal_bottom_right"

    def is_causal(self) -> bool:
        """Whether it masks out what comes later."""
        return "causal" in self.value

    def is_padding(self) -> bool:
        """Whether it masks out tokens of no sequence."""
        return "padding" in self.value

    def is_bottom_right(self) -> bool:
        """Whether the diagonal ends in the last corner."""
        return self.value.endswith("bottom_right")


class AttnSoftmaxType(Enum):
    """What beside the scores is in the sum."""

    VANILLA_SOFTMAX = "vanilla"
    OFF_BY_ONE_SOFTMAX = "off_by_one"
    LEARNABLE_SOFTMAX = "learnable"

    @classmethod
    def from_str(cls, name: str) -> AttnSoftmaxType:
        """Returns the softmax type of this name, in either spelling."""
        known = {each.value: each for each in cls} | {"off-by-one": cls.OFF_BY_ONE_SOFTMAX}
        return known[choice("AttnSoftmaxType", "name", name, known)]


class QKVLayout(Enum):
    """How queries, keys and values lie."""

    BS3HD = "bs3hd"
    BSHD_BS2HD = "bshd_bs2hd"
    BSHD_BSHD_BSHD = "bshd_bshd_bshd"
    T3HD = "t3hd"
    THD_T2HD = "thd_t2hd"
    THD_THD_THD = "thd_thd_thd"

    def is_qkvpacked(self) -> bool:
        """Whether they are one array."""
        return self in (QKVLayout.BS3HD, QKVLayout.T3HD)

    def is_kvpacked(self) -> bool:
        """Whether keys and values are one."""
        return self in (QKVLayout.BSHD_BS2HD, QKVLayout.THD_T2HD)

    def is_separate(self) -> bool:
        """Whether each is an array of its own."""
        return self in (QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD)

    def is_thd(self) -> bool:
        """Whether rows hold several sequences."""
        return self.value.startswith("t")


class CPStrategy(Enum):
    """How ranks share sequences."""

    DEFAULT = 0
    ALL_GATHER = 1
    RING = 2


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    """Returns the mask type of that name. ArgumentError for one that there is not."""
    known = {each.value: each for each in AttnMaskType}
    name = ALIASES.get(attn_mask_type, attn_mask_type)
    return known[choice("canonicalize_attn_mask_type", "attn_mask_type", name, known)]


def make_swa_mask(
    segment_pos_q: Any,
    segment_pos_kv: Any,
    window_size: tuple[int, int] | None = None,
    dtype: Any = jnp.float32,
) -> Any:
    """Returns a sliding window as an array (b, 1, s_q, s_kv), 1 where a query sees a key.
    ``segment_pos_...``: each token's position in its sequence, (b, s). ``window_size``: how far it sees to
    the left and to the right, -1 without end; None: everywhere."""
    q, kv = jnp.asarray(segment_pos_q)[:, None, :, None], jnp.asarray(segment_pos_kv)[:, None, None, :]
    left, right = (-1, -1) if window_size is None else window_size
    seen = jnp.ones(jnp.broadcast_shapes(q.shape, kv.shape), bool)
    seen = seen if left < 0 else seen & (kv >= q - left)
    return (seen if right < 0 else seen & (kv <= q + right)).astype(dtype)


def is_fused_attn_kernel_available(*arguments: Any, **named: Any) -> bool:
    """True: every call runs, by one kernel or another."""
    return True


def fused_attn(
    qkv: tuple[Any, ...],
    bias: Any,
    sequence_descriptor: Any,
    seed: Any,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    softmax_type: AttnSoftmaxType,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: tuple[int, int] | None = None,
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT,
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    context_checkpoint_name: str = "context",
    softmax_offset: Any = None,
    stripe_size: int | None = None,
    **score: Any,
) -> Any:
    """``flax.DotProductAttention`` as a function: (b, s, heads, d) of queries, keys and values, one to three
    arrays by ``qkv_layout``. ``seed``: a JAX key. UnsupportedError for functions that change scores."""
    op = "fused_attn"
    for name, value in score.items():
        if value is not None:
            raise UnsupportedError(op, name, shown(value), f"None: {FIXED['score_mod'][1]}")
    if not isinstance(qkv, tuple | list) or not qkv:
        raise ArgumentError(op, "qkv", shown(qkv), "a tuple of arrays")
    dim, rate = qkv[0].shape[-1], dropout_probability if is_training else 0.0
    kind = None if attn_bias_type is AttnBiasType.NO_BIAS else attn_bias_type.value
    learned = {}
    if softmax_offset is not None:  # (1, heads, 1, 1) there
        learned = {"params": {"softmax_offset": jnp.reshape(softmax_offset, -1)}}
    module = DotProductAttention(
        dim,
        qkv[0].shape[-2],
        qkv[-1].shape[-2],
        rate,
        attn_mask_type.value,
        kind,
        qkv_layout=qkv_layout.value,
        scale_factor=scaling_factor,
        window_size=window_size,
        max_segments_per_seq=max_segments_per_seq,
        context_parallel_causal_load_balanced=context_parallel_causal_load_balanced,
        context_parallel_axis=context_parallel_axis,
        context_parallel_strategy=context_parallel_strategy.name,
        softmax_type=softmax_type.value,
        stripe_size=stripe_size,
    )
    rngs = {"dropout": jax.random.wrap_key_data(seed) if is_raw_key(seed) else seed} if rate else None
    o = module.apply(learned, *qkv, *[None] * (3 - len(qkv)), sequence_descriptor, bias, rngs=rngs)
    return checkpoint_name(o, context_checkpoint_name)


__all__ = [
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "CPStrategy",
    "QKVLayout",
    "ReorderStrategy",
    "SequenceDescriptor",
    "canonicalize_attn_mask_type",
    "fused_attn",
    "inverse_reorder_causal_load_balancing",
    "is_fused_attn_kernel_available",
    "make_swa_mask",
    "reorder_causal_load_balancing",
]
