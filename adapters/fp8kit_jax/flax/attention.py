"""``DotProductAttention``, ``MultiHeadAttention`` and ``RelativePositionBiases`` as Flax modules with Transformer Engine's names."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fp8kit.errors import ShapeError, expected
from fp8kit_jax import attention as functions
from fp8kit_jax import small
from fp8kit_jax.flax.common import fan_in
from fp8kit_jax.flax.dense import DenseGeneral, LayerNormDenseGeneral


class DotProductAttention(nn.Module):
    """Scaled dot product attention of separate query, key and value, h (b, s, heads, d), or (s, b, heads, d) with
    ``transpose_batch_sequence``. ``scale_factor`` None: 1 / sqrt(head_dim). No parameter, but ``softmax_offset`` of softmax "learnable".

    ``attn_mask_type`` "padding..." takes lengths as ``sequence_descriptor``: int32 (b,), or a pair for queries and keys; other masks take
    ``mask``, True masks out, which makes the type "arbitrary".
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

    @nn.compact
    def __call__(self, query: Any, key: Any, value: Any, sequence_descriptor: Any = None, bias: Any = None, *,
                 deterministic: bool = False, mask: Any = None) -> Any:
        """Attend. Returns h (b, s, heads, d)."""
        groups = self.num_gqa_groups or self.num_attention_heads
        if query.shape[-2:] != (self.num_attention_heads, self.head_dim) or key.shape[-2:] != (groups, self.head_dim):
            got = f"query {query.shape}, key {key.shape}"
            wanted = f"(..., {self.num_attention_heads}, {self.head_dim}) and (..., {groups}, {self.head_dim})"
            raise ShapeError(expected("DotProductAttention", "shapes", got, wanted))
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
            query, key, value, attn_mask_type=kind, mask=mask, bias=bias, attn_bias_type=self.attn_bias_type,
            scale_factor=self.scale_factor, qkv_format="sbhd" if self.transpose_batch_sequence else "bshd", window_size=self.window_size,
            softmax_type=self.softmax_type, **options,
        )  # fmt: skip


class MultiHeadAttention(nn.Module):
    """Projections, attention, output projection; returns (y, norm(inputs_q) where ``return_layernorm_output``, else None).

    Children: ``qkv`` (self attention, no groups, ``fuse_qkv_params``), else ``query`` and ``kv``, or ``query``, ``key``, ``value``; the
    first holds the input's norm; ``DotProductAttention_0``; ``out``. ``scale_attn_logits``: whether scores are divided by sqrt(head_dim);
    ``scaled_query_init``: whether the query's initial kernel is instead. Rotary embedding of queries and keys by
    ``rotary_pos_emb_windows`` (lowest, highest wave length / 2 pi), "consecutive" halves or "alternate" neighbours.
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

    @nn.compact
    def __call__(self, inputs_q: Any, inputs_kv: Any, mask: Any = None, bias: Any = None, *, deterministic: bool = False,
                 sequence_descriptor: Any = None) -> tuple[Any, Any]:
        """``inputs_q``: h (b, s_q, H); ``inputs_kv``: h (b, s_kv, H), the same object for self attention."""
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

        def normed(name: str, features: Any, parts: int) -> Any:
            return LayerNormDenseGeneral(
                features, self.input_layernorm, self.layernorm_type, self.layernorm_epsilon, self.zero_centered_gamma,
                kernel_init=init(parts, True), return_layernorm_output=self.return_layernorm_output or (own and parts == 1), name=name,
                **shared)(inputs_q)  # fmt: skip

        def plain(name: str, features: Any, x: Any, parts: int = 1) -> Any:
            return DenseGeneral(features, kernel_init=init(parts, False), name=name, **shared)(x)

        if own and self.fuse_qkv_params and groups == heads:
            y, ln = normed("qkv", (3, heads * self.head_dim), 3)
            q, k, v = (y[..., i, :] for i in range(3))
        else:
            q, ln = normed("query", heads * self.head_dim, 1)
            source = ln if own else inputs_kv
            if self.fuse_qkv_params:
                kv = plain("kv", (2, groups * self.head_dim), source, 2)
                k, v = kv[..., 0, :], kv[..., 1, :]
            else:
                k, v = (plain(name, groups * self.head_dim, source) for name in ("key", "value"))
        q, k, v = (a.reshape(*a.shape[:-1], n, self.head_dim) for a, n in ((q, heads), (k, groups), (v, groups)))
        if self.enable_rotary_pos_emb:
            q, k = self._turned(q), self._turned(k)
        core = DotProductAttention(
            self.head_dim, heads, groups, self.attention_dropout, self.attn_mask_type, self.attn_bias_type, self.dropout_rng_name,
            1 / math.sqrt(self.head_dim) if self.scale_attn_logits else 1.0, self.transpose_batch_sequence, self.window_size,
            self.softmax_type)  # fmt: skip
        o = core(q, k, v, sequence_descriptor, bias, deterministic=deterministic, mask=mask)
        y = plain("out", inputs_q.shape[-1], o.reshape(*o.shape[:-2], -1))
        return y, ln if self.return_layernorm_output else None

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
        table = self.param("rel_embedding", self.embedding_init, (self.num_attention_heads, self.num_buckets), jnp.float32)
        return jnp.take(jnp.asarray(table, self.dtype), jnp.asarray(bucket), axis=1)[None]
