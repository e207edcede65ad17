"""``DotProductAttention``, ``MultiHeadAttention`` and ``RelativePositionBiases`` as Flax modules with
Transformer Engine's names."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache as once
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from fp8kit.arguments import NamedWell, choice, shown
from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError
from fp8kit_jax import attention as functions
from fp8kit_jax.checks import UNTYPED
from fp8kit_jax.context_parallel import SPLIT, placed
from fp8kit_jax.flax import cache, lora
from fp8kit_jax.flax.common import (
    FIXED,
    NORM_AXES,
    RENAMED,
    EitherCase,
    check_fields,
    draws_keys,
    form,
    partitioned,
    shared_fields,
    want_array,
    want_fused,
)
from fp8kit_jax.flax.dense import DenseGeneral, LayerNorm, LayerNormDenseGeneral, returned
from fp8kit_jax.modules import attention_layers, fan_in, layer_structs, qk_norms, rotation
from fp8kit_jax.scopes import plain_attention
from fp8kit_jax.sequences import SequenceDescriptor

# and how many arrays they are
QKV_LAYOUTS = {"bs3hd": 1, "bshd_bs2hd": 2, "bshd_bshd_bshd": 3, "t3hd": 1, "thd_t2hd": 2, "thd_thd_thd": 3}
# fields that are the function's arguments
_OPTIONS = "attn_mask_type", "attn_bias_type", "scale_factor", "window_size", "softmax_type", "softcap"
log = logging.getLogger("fp8kit")
# whether the pairs of a rotary embedding are neighbours
GROUPINGS = {"consecutive": False, "alternate": True}


def want_lengths(operation: str, kind: str, argument: str, mask: Any, descriptor: Any) -> None:
    """ShapeError that names the ``argument`` for the mask of ``operation`` where nothing says what a padding
    mask hides."""
    if mask is None and descriptor is None and "padding" in str(kind):
        wanted = f"a mask, or a sequence_descriptor, with mask {kind!r}"
        raise ShapeError(operation, argument, None, wanted)


@once
def _say_unread(mask: str) -> None:
    """Warn once that lengths which a caller gave have no effect."""
    log.warning("sequence_descriptor is not read with mask type %r, as in Transformer Engine", mask)


def _of_heads(mask: Any, groups: int, each: int) -> Any:
    """A mask (b, 1 | groups, 1 | each, s_q, s_kv) as (b, 1 | heads, s_q, s_kv). ShapeError for others."""
    batch, *own, queries, keys = mask.shape
    if own[0] not in (1, groups) or own[1] not in (1, each):
        wanted = f"(batch, 1 or {groups}, 1 or {each}, s_q, s_kv)"
        raise ShapeError("DotProductAttention", "mask", f"shape {mask.shape}", wanted)
    if own == [1, 1]:
        groups = each = 1
    shape = batch, groups * each, queries, keys
    if isinstance(mask, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, mask.dtype)
    return jnp.broadcast_to(mask, (batch, groups, each, queries, keys)).reshape(shape)


class DotProductAttention(NamedWell, EitherCase):
    """Scaled dot product attention of separate query, key and value, h (b, s, heads, d), or (s, b, heads, d)
    with ``transpose_batch_sequence``; value's d may be another. Within a shard_map heads may be a part of
    ``num_attention_heads`` and ``num_gqa_groups``. ``scale_factor`` None: 1 / sqrt(head_dim). No parameter,
    but ``softmax_offset`` of softmax "learnable".

    ``attn_mask_type`` "padding..." takes lengths as ``sequence_descriptor``: int32 (b,), or a pair for
    queries and keys, or a ``fp8kit_jax.SequenceDescriptor``; other types do not read it. ``mask``, instead
    (an array of 3 or 4 dimensions in the descriptor's place is one, and of 5, whose heads are two
    dimensions): bool (1 | b, 1 | heads, 1 | s_q, s_kv), True masks out; a causal type and the window hide
    what they hide besides. ``qkv_layout``: "bshd_bshd_bshd"; "bshd_bs2hd": key is (b, s, 2, groups, d), value
    None; "bs3hd": query is (b, s, 3, heads, d), the others None. "thd_thd_thd", "thd_t2hd" and "t3hd" are the
    same shapes with up to ``max_segments_per_seq`` sequences in each row, as a SequenceDescriptor says;
    tokens of none are 0. A window of a mask without "bottom_right" goes from the first query and the first
    key on. ``dtype``: what the inputs are cast to, None: as they are. ``float32_logits``: scores are float32
    either way. ``softcap`` c: c * tanh(score / c) stands for scaled scores, before their bias, 0: no cap.
    ``context_parallel_axis``, ``context_parallel_causal_load_balanced``,
    ``context_parallel_strategy`` and ``stripe_size``: see ``fp8kit_jax.dot_product_attention``.
    ``context_checkpoint_name``: the result's name for the policies of ``jax.checkpoint``. Fields of
    ``common.FIXED`` have one value.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: Any = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool | None = None
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Any = None
    score_mod_bprop: Any = None
    stripe_size: int | None = None
    softcap: float = 0.0

    @nn.compact
    @draws_keys
    def __call__(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        sequence_descriptor: Any = None,
        bias: Any = None,
        *,
        deterministic: bool = False,
        mask: Any = None,
        **fixed: Any,
    ) -> Any:
        """Attend. Returns h (b, s, heads, d)."""
        check_fields(self, fixed, rules=UNTYPED)
        inputs = {"query": query, "key": key, "value": value}.items()
        layers = [want_array(self, name, a) for name, a in inputs if a is not None or name == "query"]
        layers = [a if self.dtype is None else jnp.asarray(a, self.dtype) for a in layers]
        options = self._options(layers, sequence_descriptor, bias, mask)
        rate = 0.0 if deterministic else self.attention_dropout
        if rate:
            options |= {"dropout_rate": rate, "dropout_key": self.make_rng(self.dropout_rng_name)}
        if self.softmax_type == "learnable":
            options["softmax_offset"] = self.param(
                "softmax_offset", nn.initializers.zeros, (self.num_attention_heads,), jnp.float32
            )
        given = dict(zip(("query", "key", "value"), [*layers, None, None], strict=False))
        name = ".".join(map(str, self.path))
        packed = options["qkv_format"] == "thd"
        o = functions.attend(name, functions.DEFAULTS | given | options, packed)
        return checkpoint_name(o, self.context_checkpoint_name)

    def validate(self, layers: Sequence[Any], sequence_descriptor: Any, bias: Any, mask: Any) -> None:
        """Raise what a call would raise, and compute nothing. ``layers``: ``jax.ShapeDtypeStruct``s, which
        the mask may be too."""
        check_fields(self, rules=UNTYPED)
        if self.dtype is not None:
            layers = [jax.ShapeDtypeStruct(a.shape, self.dtype) for a in layers]
        options = self._options(layers, sequence_descriptor, bias, mask)
        if self.softmax_type == "learnable":
            options["softmax_offset"] = jax.ShapeDtypeStruct((self.num_attention_heads,), jnp.float32)
        functions.validate(*layers, **options)

    def _options(
        self, layers: Sequence[Any], sequence_descriptor: Any, bias: Any, mask: Any
    ) -> dict[str, Any]:
        """Returns the arguments of the function beside the layers. ShapeError for layers that do not fit the
        fields."""
        op, heads, dim = "DotProductAttention", self.num_attention_heads, self.head_dim
        count = QKV_LAYOUTS[choice(op, "qkv_layout", self.qkv_layout, QKV_LAYOUTS, FormatError)]
        last = (self.num_gqa_groups or heads) if count > 1 else heads
        if len(layers) != count:
            wanted = f"{count}, with qkv_layout {self.qkv_layout!r}"
            raise ShapeError(op, "query, key and value", f"{len(layers)} arrays", wanted)
        if jax.sharding.get_abstract_mesh().manual_axes:  # of a shard_map: a device may have a part of them
            parts = heads // (layers[0].shape[-2] or heads)
            if heads == parts * layers[0].shape[-2] and last % parts == 0:
                for name in ("attn_bias_type", "softmax_type"):
                    if parts > 1 and (own := getattr(self, name)) in ("alibi", "learnable"):
                        wanted = "another within a shard_map over heads: which heads these are is not known"
                        raise UnsupportedError(op, name, repr(own), wanted)
                heads, last = heads // parts, last // parts
        for at, field, most in ((0, "num_attention_heads", heads), (count - 1, "num_gqa_groups", last)):
            own = layers[at].shape[-1] if at == 2 else dim  # values have features of their own
            if layers[at].shape[-2:] != (most, own):
                wanted = f"(..., {most}, {dim}), by {field} {most} and head_dim {dim}"
                raise ShapeError(op, ("query", "key", "value")[at], f"shape {layers[at].shape}", wanted)
        if mask is None and getattr(sequence_descriptor, "ndim", 0) > 2:
            sequence_descriptor, mask = None, sequence_descriptor
        if getattr(mask, "ndim", 0) == 5:
            mask = _of_heads(mask, last, heads // last)
        packed = self.qkv_layout.startswith("t")
        options = {name: getattr(self, name) for name in (*SPLIT, *_OPTIONS)}
        options |= {"qkv_format": "thd" if packed else form(self), "mask": mask, "bias": bias}
        left, right = self.window_size or (-1, -1)
        if "causal" in self.attn_mask_type and right > 0:  # the mask hides it
            options["window_size"] = left, 0
        # from the first token on, unless the mask says otherwise; ALiBi's diagonal stays where it is
        if max(left, right) >= 0 and self.attn_bias_type != "alibi":
            options["bottom_right_diagonal"] = self.attn_mask_type.endswith("bottom_right")
        how = placed(options)
        if not packed:
            want_lengths(op, self.attn_mask_type, "mask", mask, sequence_descriptor)
        if packed:
            if not isinstance(sequence_descriptor, SequenceDescriptor):
                wanted = f"a SequenceDescriptor with qkv_layout {self.qkv_layout!r}"
                raise ArgumentError(op, "sequence_descriptor", shown(sequence_descriptor), wanted)
            if form(self) != "bshd":
                raise ArgumentError(op, "transpose_batch_sequence", True, "False with a packed qkv_layout")
            # of the whole sequences
            devices = how.devices if how is not None and how.manual else 1
            sizes = tuple((a.shape[0], a.shape[1] * devices) for a in (layers[0], layers[-1]))
            options |= sequence_descriptor.packed(sizes, self.max_segments_per_seq, how)
        elif isinstance(sequence_descriptor, SequenceDescriptor) and "padding" not in self.attn_mask_type:
            _say_unread(self.attn_mask_type)
        elif sequence_descriptor is not None:
            if isinstance(sequence_descriptor, SequenceDescriptor):
                sequence_descriptor = sequence_descriptor.lengths(how)
            lone = not isinstance(sequence_descriptor, tuple)
            pair = (sequence_descriptor,) * 2 if lone else sequence_descriptor
            if len(pair) != 2:
                raise ShapeError(op, "sequence_descriptor", f"{len(pair)} of them", "lengths, or a pair")
            q, kv = pair
            sums = functions.running_sums(q)
            read = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums if kv is q else functions.running_sums(kv)}
            if "padding" in self.attn_mask_type:
                options |= read
            else:
                _say_unread(self.attn_mask_type)
        if mask is not None:
            if not hasattr(mask, "shape") or len(mask.shape) < 2:
                raise ShapeError(op, "mask", shown(mask), "an array (..., s_q, s_kv)")
            beside = functions.beside_mask(op, self.attn_mask_type, options["window_size"])
            options |= {name: value for name, value in beside.items() if value is not None}
            if "causal" in self.attn_mask_type:
                abstract = isinstance(layers[0], jax.ShapeDtypeStruct)
                options["mask"] = (
                    jax.ShapeDtypeStruct(mask.shape, bool) if abstract else jnp.asarray(mask) != 0
                )
        return options


class MultiHeadAttention(NamedWell, EitherCase):
    """Projections, attention, output projection; returns (y, norm(inputs_q) where
    ``return_layernorm_output``, else None), and with ``return_residual`` inputs_q itself, as
    ``LayerNormDenseGeneral``, and with ``return_bias`` the bias of ``out``, which then is not added, or None.
    ``join_residual``: inputs_q is added to y, by the product of ``out``; neither of the two then.
    ``join_layernorm_output``: norm(inputs_q) is, instead; no ``return_bias`` then.

    Children: ``qkv`` (self attention, no groups, ``fuse_qkv_params``), else ``query`` and ``kv``, or
    ``query``, ``key``, ``value``; the first holds the input's norm; ``DotProductAttention_0``; ``out``. Their
    parameters carry Transformer Engine's logical axes (see ``common.extend_logical_axis_rules``), in Flax's
    boxes.

    ``scale_attn_logits``: whether scores are divided by sqrt(head_dim); ``scaled_query_init``: whether the
    query's initial kernel is instead. Rotary embedding of queries and keys by ``rotary_pos_emb_windows``
    (lowest, highest wave length / 2 pi), "consecutive" halves or "alternate" neighbours.
    ``low_rank_adaptation_scope``: one of ``lora.SCOPES``. ``qk_norm_type``: "L2Normalization", "RMSNorm" or
    "LayerNorm" of each query's and each key's features, children ``q_norm``, ``k_norm``; after the rotary
    embedding or, ``qk_norm_before_rope``, before it; ``qk_norm_learned``: False has gains of 1 and no
    parameters for them. ``scale_factor``: what scores are multiplied by, instead of what
    ``scale_attn_logits`` says. Fields of ``common.FIXED`` have one value. ``decode``: see ``cache``.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Any = None
    use_bias: bool = False
    bias_init: Any = nn.initializers.zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool | None = None
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    float32_logits: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Any = None
    score_mod_bprop: Any = None
    num_heads: int | None = None
    dropout_rate: float | None = None
    output_layernorm: bool | None = None
    apply_residual_connection_post_layernorm: bool | None = None
    fuse_qkv: bool | None = None
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    qk_norm_learned: bool = True
    scale_factor: float | None = None
    return_residual: bool = False
    return_bias: bool = False
    join_residual: bool = False
    join_layernorm_output: bool = False
    softcap: float = 0.0

    @nn.compact
    def __call__(
        self,
        inputs_q: Any,
        inputs_kv: Any,
        mask: Any = None,
        bias: Any = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
        sequence_descriptor: Any = None,
        **fixed: Any,
    ) -> tuple[Any, ...]:
        """``inputs_q``: h (b, s_q, H); ``inputs_kv``: h (b, s_kv, H), the same object for self attention."""
        check_fields(self, fixed, FIXED | RENAMED)
        want_fused(self, "join_residual", "return_residual", "return_bias")
        want_fused(self, "join_layernorm_output", "return_bias", "join_residual")
        op, heads = "MultiHeadAttention", self.num_attention_heads
        groups, own = self.num_gqa_groups or heads, inputs_q is inputs_kv

        def projection(kind: Any, name: str, features: Any, **more: Any) -> Any:
            """Returns the module of a projection, with ``more`` fields."""
            out, several = name == "out", isinstance(features, tuple)
            base, depth = self.kernel_init or fan_in(1 + several), math.sqrt(self.head_dim)

            def scaled(key: Any, shape: Any, dtype: Any) -> Any:
                kernel = base(key, shape, dtype)
                return kernel.at[:, 0].divide(depth) if several else kernel / depth

            columns = ("nvte_w_joined", "nvte_w_tp")[not several :]
            fields = {
                "kernel_init": scaled if self.scaled_query_init and name in ("qkv", "query") else base,
                "kernel_axes": ("nvte_w_tp", "nvte_w_fsdp") if out else ("nvte_w_fsdp", *columns),
                "bias_axes": ("nvte_w_no_shard",) if out else columns,
                "name": name,
                "enable_low_rank_adaptation": lora.adapts(self, "output_proj" if out else "qkv_proj"),
            }
            return kind(features, **shared_fields(self, kind, fields | more))

        # queries and keys go through something of their own
        separate = self.enable_rotary_pos_emb or self.qk_norm_type is not None or decode
        packed = own and self.fuse_qkv_params and groups == heads
        for name, value in (("inputs_q", inputs_q), ("inputs_kv", inputs_kv)):
            if not hasattr(value, "shape") or len(value.shape) != 3:
                got = f"shape {value.shape}" if hasattr(value, "shape") else shown(value)
                raise ShapeError(op, name, got, f"an array ({', '.join(form(self)[:2])}, features)")
        count = 3 if separate or not self.fuse_qkv_params else 1 if packed else 2
        structs = layer_structs(inputs_q, inputs_kv, heads, groups, self.head_dim, count)
        past = cache.Past(self, *structs[1:], sequence_descriptor) if decode else None
        kind, window = self.attn_mask_type, self.window_size
        if past is not None and past.index is not None:
            kind, window = "arbitrary", None  # the mask says it all
        usual = 1 / math.sqrt(self.head_dim) if self.scale_attn_logits else 1.0
        options = {
            "attn_mask_type": kind,
            "dtype": None,
            "qkv_layout": list(QKV_LAYOUTS)[count - 1],
            "scale_factor": usual if self.scale_factor is None else self.scale_factor,
            "window_size": window,
        }
        want_lengths(op, kind, "mask", mask, sequence_descriptor)
        core = DotProductAttention(**shared_fields(self, DotProductAttention, options))
        rotate = None
        if self.enable_rotary_pos_emb:
            method = self.rotary_pos_emb_group_method
            choice(op, "rotary_pos_emb_group_method", method, GROUPINGS, FormatError)
            positions = () if past is None else (past.length, past.starts())
            windows = self.rotary_pos_emb_windows
            rotate = rotation(self.head_dim, GROUPINGS[method], windows, form(self), *positions)

        def norm(name: str, kind: str) -> LayerNorm:
            return LayerNorm(self.qk_norm_eps, kind, dtype=self.dtype, name=name)

        norms = qk_norms(op, self.qk_norm_type, norm, self.qk_norm_learned)
        seen = (structs[1:], mask, bias) if past is None else past.structs(mask, bias)
        core.validate([structs[0], *seen[0]], sequence_descriptor, seen[2], seen[1])
        width, output = heads * self.head_dim, self.return_layernorm_output or self.join_layernorm_output
        first = projection(
            LayerNormDenseGeneral,
            *(("qkv", (3, width)) if packed else ("query", width)),
            enable_layernorm=self.input_layernorm,
            epsilon=self.layernorm_epsilon,
            return_layernorm_output=output or (own and not packed),
            return_residual=True,
            **NORM_AXES,
        )
        y, ln, residual = first(inputs_q)
        projections = [y]
        if not packed:
            width, source = groups * self.head_dim, ln if own else inputs_kv
            rest = {"kv": (2, width)} if self.fuse_qkv_params else {"key": width, "value": width}
            projections += [projection(DenseGeneral, *one, return_bias=False)(source) for one in rest.items()]
        layers = attention_layers(self, projections, separate, norms, rotate)
        if past is not None:
            layers[1:], mask, bias = past.extended(layers[1:], mask, bias)
        beside = {"sequence_descriptor": sequence_descriptor, "bias": bias, "mask": mask}
        with plain_attention(past is not None):
            o = core(*layers, deterministic=deterministic, **beside)
        o = o if past is None else past.checked(o)
        out = projection(DenseGeneral, "out", inputs_q.shape[-1])
        stream = ln if self.join_layernorm_output else residual if self.join_residual else None
        y = out(o.reshape(*o.shape[:-2], o.shape[-2] * o.shape[-1]), stream)
        return returned(self, *(y if self.return_bias else (y,)), normed=ln, residual=residual)


class RelativePositionBiases(NamedWell, nn.Module):
    """T5's learned biases by distance (Raffel et al. 2020): parameter ``rel_embedding`` (heads, buckets);
    returns (1, heads, s_q, s_k)."""

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Any = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    embedding_axes: tuple[Any, ...] = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> Any:
        """Distances up to half the buckets have one each, longer ones share logarithmic buckets up to
        ``max_distance``."""
        distance = np.arange(q_seqlen)[:, None] - np.arange(k_seqlen)[None]
        buckets, start = self.num_buckets, 0
        if bidirectional:
            buckets = buckets // 2
            start, distance = np.where(distance < 0, buckets, 0), np.abs(distance)
        distance = np.maximum(distance, 0)
        exact = buckets // 2
        wide = (
            np.log(np.maximum(distance, 1) / exact) / math.log(self.max_distance / exact) * (buckets - exact)
        )
        bucket = start + np.where(
            distance < exact, distance, np.minimum(exact + wide.astype(np.int32), buckets - 1)
        )
        init = partitioned(self.embedding_init, self.embedding_axes)
        table = self.param("rel_embedding", init, (self.num_attention_heads, self.num_buckets), jnp.float32)
        return jnp.take(jnp.asarray(table, self.dtype), jnp.asarray(bucket), axis=1)[None]
