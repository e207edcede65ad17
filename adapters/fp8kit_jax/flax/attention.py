"""``DotProductAttention``, ``MultiHeadAttention`` and ``RelativePositionBiases`` as Flax modules with Transformer Engine's names."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fp8kit.errors import FormatError, ShapeError, expected
from fp8kit_jax import attention as functions
from fp8kit_jax import small
from fp8kit_jax.flax.common import NORM_AXES, check_fixed, fan_in, partitioned
from fp8kit_jax.flax.dense import DenseGeneral, LayerNorm, LayerNormDenseGeneral

QKV_LAYOUTS = {"bs3hd": 1, "bshd_bs2hd": 2, "bshd_bshd_bshd": 3}  # and how many arrays they are

QK_NORMS = {"L2Normalization": "", "RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}


class DotProductAttention(nn.Module):
    """Scaled dot product attention of separate query, key and value, h (b, s, heads, d), or (s, b, heads, d) with
    ``transpose_batch_sequence``. ``scale_factor`` None: 1 / sqrt(head_dim). No parameter, but ``softmax_offset`` of softmax "learnable".

    ``attn_mask_type`` "padding..." takes lengths as ``sequence_descriptor``: int32 (b,), or a pair for queries and keys; other masks take
    ``mask``, True masks out, which makes the type "arbitrary". ``qkv_layout``: "bshd_bshd_bshd"; "bshd_bs2hd": key is (b, s, 2, groups, d),
    value None; "bs3hd": query is (b, s, 3, heads, d), the others None. ``dtype``: what the inputs are cast to, None: as they are.
    ``float32_logits``: scores are float32 either way. Fields of ``common.FIXED`` have one value.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dropout_rng_name: str = "dropout"
    scale_factor: float | None = None
    transpose_batch_sequence: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    qkv_layout: str = "bshd_bshd_bshd"
    dtype: Any = None
    float32_logits: bool = False
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    score_mod: Any = None
    score_mod_bprop: Any = None

    @nn.compact
    def __call__(self, query: Any, key: Any = None, value: Any = None, sequence_descriptor: Any = None, bias: Any = None, *,
                 deterministic: bool = False, mask: Any = None) -> Any:
        """Attend. Returns h (b, s, heads, d)."""
        check_fixed(self)
        groups, count = self.num_gqa_groups or self.num_attention_heads, QKV_LAYOUTS.get(self.qkv_layout)
        if count is None:
            raise FormatError(expected("DotProductAttention", "qkv_layout", repr(self.qkv_layout), f"one of {', '.join(QKV_LAYOUTS)}"))
        layers = [a if self.dtype is None else jnp.asarray(a, self.dtype) for a in (query, key, value) if a is not None]
        last = (groups if count > 1 else self.num_attention_heads, self.head_dim)
        if len(layers) != count or layers[0].shape[-2:] != (self.num_attention_heads, self.head_dim) or layers[-1].shape[-2:] != last:
            wanted = f"{count} arrays (..., {self.num_attention_heads}, {self.head_dim}) to (..., {last[0]}, {last[1]})"
            raise ShapeError(expected("DotProductAttention", "shapes", [a.shape for a in layers], wanted))
        options: dict[str, Any] = {}
        if sequence_descriptor is not None:
            pair = sequence_descriptor if isinstance(sequence_descriptor, tuple) else (sequence_descriptor,) * 2
            options["cu_seqlens_q"], options["cu_seqlens_kv"] = map(functions.running_sums, pair)
        rate = 0.0 if deterministic else self.attention_dropout
        if rate:
            options |= {"dropout_rate": rate, "dropout_key": self.make_rng(self.dropout_rng_name)}
        kind = self.attn_mask_type
        if mask is not None:
            if kind == "causal":
                rows, columns = mask.shape[-2:]
                mask = (jnp.asarray(mask) != 0) | (jnp.arange(columns) > jnp.arange(rows)[:, None])
            kind = "arbitrary"
        if self.softmax_type == "learnable":
            options["softmax_offset"] = self.param("softmax_offset", nn.initializers.zeros, (self.num_attention_heads,), jnp.float32)
        return functions.dot_product_attention(
            *layers, attn_mask_type=kind, mask=mask, bias=bias, attn_bias_type=self.attn_bias_type,
            scale_factor=self.scale_factor, qkv_format="sbhd" if self.transpose_batch_sequence else "bshd", window_size=self.window_size,
            softmax_type=self.softmax_type, **options,
        )  # fmt: skip


class MultiHeadAttention(nn.Module):
    """Projections, attention, output projection; returns (y, norm(inputs_q) where ``return_layernorm_output``, else None).

    Children: ``qkv`` (self attention, no groups, ``fuse_qkv_params``), else ``query`` and ``kv``, or ``query``, ``key``, ``value``; the
    first holds the input's norm; ``DotProductAttention_0``; ``out``. ``scale_attn_logits``: whether scores are divided by sqrt(head_dim);
    ``scaled_query_init``: whether the query's initial kernel is instead. Rotary embedding of queries and keys by
    ``rotary_pos_emb_windows`` (lowest, highest wave length / 2 pi), "consecutive" halves or "alternate" neighbours.

    ``qk_norm_type``: "L2Normalization", "RMSNorm" or "LayerNorm" of each query's and each key's features, children ``q_norm``, ``k_norm``;
    after the rotary embedding or, ``qk_norm_before_rope``, before it. ``logical_partitioning``: parameters carry Transformer Engine's
    logical axes (see ``common.extend_logical_axis_rules``). Fields of ``common.FIXED`` have one value.
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
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    logical_partitioning: bool = False
    float32_logits: bool = False
    low_rank_adaptation_scope: str = "none"
    enable_sequence_parallel: bool = False
    score_mod: Any = None
    score_mod_bprop: Any = None

    @nn.compact
    def __call__(self, inputs_q: Any, inputs_kv: Any, mask: Any = None, bias: Any = None, *, deterministic: bool = False,
                 sequence_descriptor: Any = None) -> tuple[Any, Any]:
        """``inputs_q``: h (b, s_q, H); ``inputs_kv``: h (b, s_kv, H), the same object for self attention."""
        check_fixed(self)
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
            if not self.logical_partitioning:
                return {}
            joined = ("nvte_w_joined",) if parts > 1 else ()
            kernel = ("nvte_w_tp", "nvte_w_fsdp") if out else ("nvte_w_fsdp", *joined, "nvte_w_tp")
            return {"kernel_axes": kernel, "bias_axes": ("nvte_w_no_shard",) if out else (*joined, "nvte_w_tp")}

        def normed(name: str, features: Any, parts: int) -> Any:
            return LayerNormDenseGeneral(
                features, self.input_layernorm, self.layernorm_type, self.layernorm_epsilon, self.zero_centered_gamma,
                kernel_init=init(parts, True), return_layernorm_output=self.return_layernorm_output or (own and parts == 1), name=name,
                **(axes(parts) | NORM_AXES if self.logical_partitioning else {}), **shared)(inputs_q)  # fmt: skip

        def plain(name: str, features: Any, x: Any, parts: int = 1) -> Any:
            return DenseGeneral(features, kernel_init=init(parts, False), name=name, **axes(parts, name == "out"), **shared)(x)

        apart = self.enable_rotary_pos_emb or self.qk_norm_type is not None  # queries and keys go through something of their own
        if own and self.fuse_qkv_params and groups == heads:
            y, ln = normed("qkv", (3, heads * self.head_dim), 3)
            layers = [y[..., i, :] for i in range(3)] if apart else [y]
        else:
            q, ln = normed("query", heads * self.head_dim, 1)
            source = ln if own else inputs_kv
            if self.fuse_qkv_params:
                kv = plain("kv", (2, groups * self.head_dim), source, 2)
                layers = [q, kv[..., 0, :], kv[..., 1, :]] if apart else [q, kv]
            else:
                layers = [q, *(plain(name, groups * self.head_dim, source) for name in ("key", "value"))]
        layers = [a.reshape(*a.shape[:-1], -1, self.head_dim) for a in layers]
        if apart:
            layers[:2] = self._changed(layers[0], "q_norm"), self._changed(layers[1], "k_norm")
        core = DotProductAttention(
            self.head_dim, heads, groups, self.attention_dropout, self.attn_mask_type, self.attn_bias_type, self.dropout_rng_name,
            1 / math.sqrt(self.head_dim) if self.scale_attn_logits else 1.0, self.transpose_batch_sequence, self.window_size,
            self.softmax_type, list(QKV_LAYOUTS)[len(layers) - 1])  # fmt: skip
        o = core(*layers, *[None] * (3 - len(layers)), sequence_descriptor, bias, deterministic=deterministic, mask=mask)
        y = plain("out", inputs_q.shape[-1], o.reshape(*o.shape[:-2], -1))
        return y, ln if self.return_layernorm_output else None

    def _changed(self, x: Any, name: str) -> Any:
        """Queries or keys after their norm and their rotary embedding."""
        if self.qk_norm_type is not None and self.qk_norm_before_rope:
            x = self._normed(x, name)
        x = self._turned(x) if self.enable_rotary_pos_emb else x
        return x if self.qk_norm_type is None or self.qk_norm_before_rope else self._normed(x, name)

    def _normed(self, x: Any, name: str) -> Any:
        if self.qk_norm_type not in QK_NORMS:
            raise FormatError(expected("MultiHeadAttention", "qk_norm_type", repr(self.qk_norm_type), f"one of {', '.join(QK_NORMS)}"))
        if self.qk_norm_type == "L2Normalization":
            return small.l2norm(x, self.qk_norm_eps)
        return LayerNorm(self.qk_norm_eps, QK_NORMS[self.qk_norm_type], dtype=self.dtype, name=name)(x)

    def _turned(self, x: Any) -> Any:
        form, alternate = "sbhd" if self.transpose_batch_sequence else "bshd", self.rotary_pos_emb_group_method == "alternate"
        low, high = self.rotary_pos_emb_windows
        freqs = small.rope_frequencies(self.head_dim, x.shape[form.index("s")], high / low, alternate) / low
        return small.rope(x, freqs, qkv_format=form, interleaved=alternate)


class RelativePositionBiases(nn.Module):
    """T5's learned biases by distance (Raffel et al. 2020): parameter ``rel_embedding`` (heads, buckets); returns (1, heads, s_q, s_k)."""

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Any = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    embedding_axes: tuple[Any, ...] = ()
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> Any:
        """Distances up to half the buckets have one each, longer ones share logarithmic buckets up to ``max_distance``."""
        distance = np.arange(q_seqlen)[:, None] - np.arange(k_seqlen)[None]
        buckets = self.num_buckets // 2 if bidirectional else self.num_buckets
        start = np.where(distance < 0, buckets, 0) if bidirectional else 0
        distance = np.abs(distance) if bidirectional else np.maximum(distance, 0)
        exact = buckets // 2
        wide = np.log(np.maximum(distance, 1) / exact) / math.log(self.max_distance / exact) * (buckets - exact)
        bucket = start + np.where(distance < exact, distance, np.minimum(exact + wide.astype(np.int32), buckets - 1))
        init = partitioned(self.embedding_init, self.embedding_axes)
        table = self.param("rel_embedding", init, (self.num_attention_heads, self.num_buckets), jnp.float32)
        return jnp.take(jnp.asarray(table, self.dtype), jnp.asarray(bucket), axis=1)[None]
