"""``DotProductAttention``, ``MultiHeadAttention`` and ``RelativePositionBiases`` as Flax modules with
Transformer Engine's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from fp8kit.arguments import shown
from fp8kit.errors import FormatError, ShapeError
from fp8kit.layers.attention_inputs import normed_and_rotated
from fp8kit_jax import attention as functions
from fp8kit_jax import functional
from fp8kit_jax.flax import cache, lora
from fp8kit_jax.flax.common import NORM_AXES, check_fixed, fan_in, form, partitioned, want_array
from fp8kit_jax.flax.dense import DenseGeneral, LayerNorm, LayerNormDenseGeneral, returned
from fp8kit_jax.layers import check_join

QKV_LAYOUTS = {"bs3hd": 1, "bshd_bs2hd": 2, "bshd_bshd_bshd": 3}  # and how many arrays they are
QK_NORMS = {"L2Normalization": "", "RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
# whether the pairs of a rotary embedding are neighbours
GROUPINGS = {"consecutive": False, "alternate": True}


class DotProductAttention(nn.Module):
    """Scaled dot product attention of separate query, key and value, h (b, s, heads, d), or (s, b, heads, d)
    with ``transpose_batch_sequence``. ``scale_factor`` None: 1 / sqrt(head_dim). No parameter, but
    ``softmax_offset`` of softmax "learnable".

    ``attn_mask_type`` "padding..." takes lengths as ``sequence_descriptor``: int32 (b,), or a pair for
    queries and keys. ``mask``, instead: bool (1 | b, 1 | heads, 1 | s_q, s_kv), True masks out; a causal type
    and the window hide what they hide besides. ``qkv_layout``: "bshd_bshd_bshd"; "bshd_bs2hd": key is (b, s,
    2, groups, d), value None; "bs3hd": query is (b, s, 3, heads, d), the others None. ``dtype``: what the
    inputs are cast to, None: as they are. ``float32_logits``: scores are float32 either way.
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

    @nn.compact
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
        check_fixed(self, fixed)
        given = (("query", query), ("key", key), ("value", value))
        layers = [want_array(self, name, a) for name, a in given if a is not None or name == "query"]
        layers = [a if self.dtype is None else jnp.asarray(a, self.dtype) for a in layers]
        options = self._options(layers, sequence_descriptor, bias, mask)
        if mask is not None and "causal" in self.attn_mask_type:
            options["mask"] = jnp.asarray(mask) != 0
        rate = 0.0 if deterministic else self.attention_dropout
        if rate:
            options |= {"dropout_rate": rate, "dropout_key": self.make_rng(self.dropout_rng_name)}
        if self.softmax_type == "learnable":
            options["softmax_offset"] = self.param(
                "softmax_offset", nn.initializers.zeros, (self.num_attention_heads,), jnp.float32
            )
        return checkpoint_name(
            functions.dot_product_attention(*layers, **options), self.context_checkpoint_name
        )

    def validate(self, layers: Sequence[Any], sequence_descriptor: Any, bias: Any, mask: Any) -> None:
        """Refuse what a call would refuse, and run nothing; ``jax.ShapeDtypeStruct``s stand for the layers. A
        mask may be stood for too."""
        check_fixed(self, {})
        if self.dtype is not None:
            layers = [jax.ShapeDtypeStruct(a.shape, self.dtype) for a in layers]
        options = self._options(layers, sequence_descriptor, bias, mask)
        if mask is not None and "causal" in self.attn_mask_type:
            options["mask"] = jax.ShapeDtypeStruct(mask.shape, bool)
        if self.softmax_type == "learnable":
            options["softmax_offset"] = jax.ShapeDtypeStruct((self.num_attention_heads,), jnp.float32)
        functions.validate(*layers, **options)

    def _options(
        self, layers: Sequence[Any], sequence_descriptor: Any, bias: Any, mask: Any
    ) -> dict[str, Any]:
        """The arguments of the function beside the layers, which fit the fields; the mask as it came."""
        groups, count = self.num_gqa_groups or self.num_attention_heads, QKV_LAYOUTS.get(self.qkv_layout)
        if count is None:
            raise FormatError(
                "DotProductAttention", "qkv_layout", repr(self.qkv_layout), f"one of {', '.join(QKV_LAYOUTS)}"
            )
        last = (groups if count > 1 else self.num_attention_heads, self.head_dim)
        if (
            len(layers) != count
            or layers[0].shape[-2:] != (self.num_attention_heads, self.head_dim)
            or layers[-1].shape[-2:] != last
        ):
            wanted = (
                f"{count} arrays (..., {self.num_attention_heads}, {self.head_dim}) to (..., {last[0]}, "
                f"{last[1]})"
            )
            raise ShapeError("DotProductAttention", "shapes", [a.shape for a in layers], wanted)
        options: dict[str, Any] = {}
        if sequence_descriptor is not None:
            pair = (
                sequence_descriptor if isinstance(sequence_descriptor, tuple) else (sequence_descriptor,) * 2
            )
            if len(pair) != 2:
                raise ShapeError(
                    "DotProductAttention", "sequence_descriptor", f"{len(pair)} of them", "lengths, or a pair"
                )
            options["cu_seqlens_q"], options["cu_seqlens_kv"] = map(functions.running_sums, pair)
        if mask is not None and (not hasattr(mask, "shape") or len(mask.shape) < 2):
            raise ShapeError("DotProductAttention", "mask", shown(mask), "an array (..., s_q, s_kv)")
        kind, window, corner = self.attn_mask_type, self.window_size, None
        if mask is not None:
            kind, window, corner = functions.beside_mask("DotProductAttention", kind, window)
        return options | {
            "attn_mask_type": kind,
            "mask": mask,
            "bias": bias,
            "attn_bias_type": self.attn_bias_type,
            "scale_factor": self.scale_factor,
            "qkv_format": form(self),
            "window_size": window,
            "bottom_right_diagonal": corner,
            "softmax_type": self.softmax_type,
        }


class MultiHeadAttention(nn.Module):
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
    embedding or, ``qk_norm_before_rope``, before it. Fields of ``common.FIXED`` have one value. ``decode``:
    see ``cache``.
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
    return_residual: bool = False
    return_bias: bool = False
    join_residual: bool = False
    join_layernorm_output: bool = False

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
        check_fixed(self, fixed)
        asked = {"return_bias": self.return_bias}
        check_join("MultiHeadAttention", self.join_residual, return_residual=self.return_residual, **asked)
        check_join(
            "MultiHeadAttention",
            self.join_layernorm_output,
            "join_layernorm_output",
            join_residual=self.join_residual,
            **asked,
        )
        heads, groups = self.num_attention_heads, self.num_gqa_groups or self.num_attention_heads
        own = inputs_q is inputs_kv
        shared = {"use_bias": self.use_bias, "bias_init": self.bias_init, "dtype": self.dtype}

        def init(parts: int, query: bool) -> Any:
            base = self.kernel_init or fan_in(2 if parts > 1 else 1)

            def start(key: Any, shape: Any, dtype: Any) -> Any:
                kernel, depth = base(key, shape, dtype), math.sqrt(self.head_dim)
                if not (query and self.scaled_query_init):
                    return kernel
                return kernel.at[:, 0].divide(depth) if parts > 1 else kernel / depth

            return start

        def axes(parts: int, out: bool = False) -> dict[str, Any]:
            joined = ("nvte_w_joined",) if parts > 1 else ()
            kernel = ("nvte_w_tp", "nvte_w_fsdp") if out else ("nvte_w_fsdp", *joined, "nvte_w_tp")
            return {
                "kernel_axes": kernel,
                "bias_axes": ("nvte_w_no_shard",) if out else (*joined, "nvte_w_tp"),
            }

        def normed(name: str, features: Any, parts: int) -> Any:
            wanted = self.return_layernorm_output or self.join_layernorm_output or (own and parts == 1)
            return LayerNormDenseGeneral(
                features,
                self.input_layernorm,
                self.layernorm_type,
                self.layernorm_epsilon,
                self.zero_centered_gamma,
                kernel_init=init(parts, True),
                return_layernorm_output=wanted,
                name=name,
                return_residual=True,
                **NORM_AXES,
                **axes(parts),
                **shared,
                **lora.fields(self, "qkv_proj"),
            )(inputs_q)

        def plain(
            name: str, features: Any, x: Any, parts: int = 1, return_bias: bool = False, residual: Any = None
        ) -> Any:
            adaptation = lora.fields(self, "output_proj" if name == "out" else "qkv_proj")
            return DenseGeneral(
                features,
                kernel_init=init(parts, False),
                name=name,
                return_bias=return_bias,
                **axes(parts, name == "out"),
                **shared,
                **adaptation,
            )(x, residual)

        # queries and keys go through something of their own
        separate = self.enable_rotary_pos_emb or self.qk_norm_type is not None or decode
        packed = own and self.fuse_qkv_params and groups == heads
        stands = self._stands(inputs_q, inputs_kv, separate, packed)
        past = cache.Past(self, *stands[1:], sequence_descriptor) if decode else None
        kind, window = self.attn_mask_type, self.window_size
        if past is not None and past.index is not None:
            kind, window = "arbitrary", None  # the mask says it all
        core = DotProductAttention(
            self.head_dim,
            heads,
            groups,
            self.attention_dropout,
            kind,
            self.attn_bias_type,
            dropout_rng_name=self.dropout_rng_name,
            qkv_layout=list(QKV_LAYOUTS)[len(stands) - 1],
            scale_factor=1 / math.sqrt(self.head_dim) if self.scale_attn_logits else 1.0,
            transpose_batch_sequence=self.transpose_batch_sequence,
            window_size=window,
            softmax_type=self.softmax_type,
        )
        rotate, norms = self._rotation(past), {name: self._norm(name) for name in ("q_norm", "k_norm")}
        if past is None:
            core.validate(stands, sequence_descriptor, bias, mask)
        else:
            core.validate([stands[0], *past.stands()], sequence_descriptor, *past.validated(mask, bias))
        if packed:
            y, ln, residual = normed("qkv", (3, heads * self.head_dim), 3)
            layers = [y[..., i, :] for i in range(3)] if separate else [y]
        else:
            q, ln, residual = normed("query", heads * self.head_dim, 1)
            source = ln if own else inputs_kv
            if self.fuse_qkv_params:
                kv = plain("kv", (2, groups * self.head_dim), source, 2)
                layers = [q, kv[..., 0, :], kv[..., 1, :]] if separate else [q, kv]
            else:
                layers = [q, *(plain(name, groups * self.head_dim, source) for name in ("key", "value"))]
        layers = [a.reshape(*a.shape[:-1], -1, self.head_dim) for a in layers]
        if separate:
            layers[:2] = (
                normed_and_rotated(a, norm, rotate, self.qk_norm_before_rope)
                for a, norm in zip(layers[:2], norms.values(), strict=True)
            )
        if past is not None:
            layers[1:], mask, bias = past.extended(*layers[1:], mask, bias)
        o = core(
            *layers,
            *[None] * (3 - len(layers)),
            sequence_descriptor,
            bias,
            deterministic=deterministic,
            mask=mask,
        )
        o = o if past is None else past.checked(o)
        stream = ln if self.join_layernorm_output else residual if self.join_residual else None
        y = plain(
            "out",
            inputs_q.shape[-1],
            o.reshape(*o.shape[:-2], -1),
            return_bias=self.return_bias,
            residual=stream,
        )
        y, *unadded = y if self.return_bias else (y,)
        return returned(self, y, ln, residual, *unadded)

    def _stands(self, inputs_q: Any, inputs_kv: Any, separate: bool, packed: bool) -> list[Any]:
        """What stands for the layers that the core attention will be given. ShapeError for inputs that do not
        fit each other."""
        heads, groups = self.num_attention_heads, self.num_gqa_groups or self.num_attention_heads
        for name, value in (("inputs_q", inputs_q), ("inputs_kv", inputs_kv)):
            if not hasattr(value, "shape") or len(value.shape) != 3:
                got = f"shape {value.shape}" if hasattr(value, "shape") else shown(value)
                raise ShapeError(
                    "MultiHeadAttention", name, got, f"an array ({', '.join(form(self)[:2])}, features)"
                )

        def layer(source: Any, *last: int) -> Any:
            return jax.ShapeDtypeStruct((*source.shape[:-1], *last, self.head_dim), inputs_q.dtype)

        if packed and not separate:
            return [layer(inputs_q, 3, heads)]
        if separate or not self.fuse_qkv_params:
            return [layer(inputs_q, heads), layer(inputs_kv, groups), layer(inputs_kv, groups)]
        return [layer(inputs_q, heads), layer(inputs_kv, 2, groups)]

    def _norm(self, name: str) -> Any:
        """The norm of queries or keys as a function, None where there is none."""
        if self.qk_norm_type is None:
            return None
        if self.qk_norm_type not in QK_NORMS:
            raise FormatError(
                "MultiHeadAttention", "qk_norm_type", repr(self.qk_norm_type), f"one of {', '.join(QK_NORMS)}"
            )
        if self.qk_norm_type == "L2Normalization":
            return lambda x: functional.l2norm(x, self.qk_norm_eps)
        return LayerNorm(self.qk_norm_eps, QK_NORMS[self.qk_norm_type], dtype=self.dtype, name=name)

    def _rotation(self, past: cache.Past | None) -> Any:
        """The rotary embedding as a function, None where there is none."""
        if not self.enable_rotary_pos_emb:
            return None
        if self.rotary_pos_emb_group_method not in GROUPINGS:
            wanted = f"one of {', '.join(GROUPINGS)}"
            raise FormatError(
                "MultiHeadAttention",
                "rotary_pos_emb_group_method",
                repr(self.rotary_pos_emb_group_method),
                wanted,
            )
        order, alternate = form(self), GROUPINGS[self.rotary_pos_emb_group_method]
        low, high = self.rotary_pos_emb_windows

        def rotate(x: Any) -> Any:
            positions = x.shape[order.index("s")] if past is None else past.length
            freqs = functional.rope_frequencies(self.head_dim, positions, high / low, alternate) / low
            return functional.rope(
                x, freqs, None if past is None else past.starts(), qkv_format=order, interleaved=alternate
            )

        return rotate


class RelativePositionBiases(nn.Module):
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
        buckets = self.num_buckets // 2 if bidirectional else self.num_buckets
        start = np.where(distance < 0, buckets, 0) if bidirectional else 0
        distance = np.abs(distance) if bidirectional else np.maximum(distance, 0)
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
