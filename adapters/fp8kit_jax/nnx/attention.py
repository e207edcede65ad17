"""``DotProductAttention`` and ``MultiHeadAttention`` as NNX modules."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from fp8kit.arguments import NamedWell, check, optional
from fp8kit.errors import ShapeError
from fp8kit_jax import attention as functions
from fp8kit_jax.arguments import as_array, check_fused
from fp8kit_jax.checks import RULES, size
from fp8kit_jax.modules import attention_layers, layer_structs, qk_norms, rotation
from fp8kit_jax.nnx.dense import DenseGeneral, LayerNorm, LayerNormDenseGeneral, norm_options, want_rngs


class Dropout(NamedWell, nnx.Module):
    """A probability and the keys for it: none in evaluation (``module.eval()``). ``rate`` in [0, 1)."""

    def __init__(self, rate: float, rngs: nnx.Rngs | None) -> None:
        check("Dropout", RULES, locals())
        if rate:
            want_rngs("Dropout", rngs, "dropout")
        self.rate, self.deterministic = float(rate), False
        self.stream = rngs.dropout.fork() if rate and rngs is not None else None

    @property
    def idle(self) -> bool:
        """Whether nothing is dropped now."""
        return self.stream is None or self.deterministic

    def _drawn(self) -> tuple[float, Any]:
        """(rate, key) to use now, (0, None) where nothing is dropped."""
        return (0.0, None) if self.idle or self.stream is None else (self.rate, self.stream())


class DotProductAttention(NamedWell, nnx.Module):
    """Attention without projections, as ``fp8kit_jax.dot_product_attention``. Parameter ``softmax_offset``
    (heads,) of softmax "learnable".

    ``attention_dropout`` wants ``rngs``; ``options``: ``attn_mask_type``, ``scale_factor``, ``window_size``,
    ``qkv_format``, ``softmax_type``, ``attn_bias_type``, ``bottom_right_diagonal`` and the like, arguments of
    every call.
    """

    def __init__(
        self,
        num_attention_heads: int,
        *,
        attention_dropout: float = 0.0,
        rngs: nnx.Rngs | None = None,
        **options: Any,
    ) -> None:
        functions.known("DotProductAttention", options)
        check("DotProductAttention", RULES, locals() | options)
        self.options, self.num_attention_heads = tuple(options.items()), num_attention_heads
        self.dropout = Dropout(attention_dropout, rngs)
        learnable = options.get("softmax_type") == "learnable"
        self.softmax_offset = nnx.Param(jnp.zeros((num_attention_heads,), jnp.float32)) if learnable else None

    def __call__(self, query: Any, key: Any = None, value: Any = None, **options: Any) -> Any:
        """``query``, ``key``, ``value``: separate or packed; ``options``: ``mask``, ``bias``,
        ``cu_seqlens_q`` and so on."""
        functions.known("DotProductAttention", options)
        if self.dropout.stream is not None:  # whose state changes with a draw
            self._validate(query, key, value, **options)
        rate, dropout_key = self.dropout._drawn()
        options = self._options() | options | {"dropout_rate": rate, "dropout_key": dropout_key}
        return functions.dot_product_attention(query, key, value, **options)

    def _validate(self, query: Any, key: Any = None, value: Any = None, **options: Any) -> None:
        """Raise what a call would raise, and compute nothing. ``query``, ``key``, ``value``: arrays or
        ``jax.ShapeDtypeStruct``s."""
        functions.validate(query, key, value, **self._options() | options)

    def _options(self) -> dict[str, Any]:
        offset = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset[...]}
        return dict(self.options) | offset


class MultiHeadAttention(NamedWell, nnx.Module):
    """Projections, attention, output projection.

    * ``hidden_size`` H, ``num_attention_heads``, ``num_gqa_groups`` (None: as many), ``head_dim`` (None: H /
      heads).
    * ``input_layernorm``: the norm before the projections. Children: self attention ``qkv`` (with groups
      ``query`` and ``kv``); ``cross``: ``query`` and ``kv``; ``core``, ``out``.
    * ``qk_norm_type``: "L2Normalization", "RMSNorm" or "LayerNorm" of each query's and key's features,
      children ``q_norm``, ``k_norm``; after the rotary embedding, or before it (``qk_norm_before_rope``);
      ``qk_norm_learned``: False has gains of 1 and no parameters for them.
      ``rotary``: whether there is one.
    * ``options``: of ``DotProductAttention``, but the format is "bshd". Others: as ``LayerNormDenseGeneral``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        rngs: nnx.Rngs,
        num_gqa_groups: int | None = None,
        head_dim: int | None = None,
        attention_dropout: float = 0.0,
        input_layernorm: bool = True,
        cross: bool = False,
        rotary: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        qk_norm_learned: bool = True,
        use_bias: bool = False,
        layernorm_type: str = "layernorm",
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        dtype: Any = jnp.float32,
        **options: Any,
    ) -> None:
        functions.known("MultiHeadAttention", options)
        want_rngs("MultiHeadAttention", rngs)
        check("MultiHeadAttention", RULES | {"head_dim": optional(size)}, locals() | options)
        op, heads = "MultiHeadAttention", num_attention_heads
        if hidden_size % heads and head_dim is None:
            raise ShapeError(op, "hidden_size", hidden_size, f"a multiple of {heads} heads")
        if heads % (num_gqa_groups or heads):
            raise ShapeError(op, "num_gqa_groups", num_gqa_groups, f"a divisor of {heads} heads")
        self.groups, self.head_dim = num_gqa_groups or heads, head_dim or hidden_size // heads
        self.hidden, self.cross, self.rotary = hidden_size, cross, rotary
        self.qk_norm_type, self.qk_norm_eps = qk_norm_type, qk_norm_eps
        self.qk_norm_before_rope, self.qk_norm_learned = qk_norm_before_rope, qk_norm_learned
        shared: dict[str, Any] = {"rngs": rngs, "use_bias": use_bias, "dtype": dtype}
        norm = norm_options(locals())

        def projection(features: Any, normed: bool = input_layernorm) -> DenseGeneral:
            if normed:
                return LayerNormDenseGeneral(hidden_size, features, **norm | shared)
            return DenseGeneral(hidden_size, features, **shared)

        packed, width = not cross and self.groups == heads, heads * self.head_dim
        self.qkv = projection((3, width)) if packed else None
        self.query = None if packed else projection(width)
        wide = 2, self.groups * self.head_dim
        self.kv = None if packed else projection(wide, input_layernorm and not cross)
        self.core = DotProductAttention(heads, attention_dropout=attention_dropout, rngs=rngs, **options)
        self.out = DenseGeneral(width, hidden_size, **shared)

        def head_norm(name: str, kind: str) -> LayerNorm:
            return LayerNorm(self.head_dim, epsilon=qk_norm_eps, layernorm_type=kind, dtype=dtype)

        self.q_norm, self.k_norm = qk_norms(op, qk_norm_type, head_norm, qk_norm_learned)

    def __call__(
        self,
        x: Any,
        encoded: Any = None,
        *,
        return_residual: bool = False,
        return_bias: bool = False,
        join_residual: bool = False,
        **options: Any,
    ) -> Any:
        """``x``: h (b, s, H); ``encoded``: h (b, s_kv, H), for cross-attention. ``options``: as
        ``DotProductAttention``.
        Returns h like x, or a tuple with x, as ``LayerNormDenseGeneral``, and with ``return_bias`` the bias
        of ``out``, which then is not added, or None. ``join_residual``: x is added to y, by the product of
        ``out``; neither of the two then."""
        check("MultiHeadAttention", RULES, locals())
        op, heads = "MultiHeadAttention", self.core.num_attention_heads
        asked = {"return_residual": bool(return_residual), "return_bias": bool(return_bias)}
        check_fused(op, join_residual, **asked)
        if (encoded is not None) != self.cross:
            wanted = "an array for cross-attention" if self.cross else "None for self attention"
            raise ShapeError(op, "encoded", None if encoded is None else "an array", wanted)
        source = encoded if self.cross else x
        separate = self.rotary or self.qk_norm_type is not None
        functions.known(op, options)
        x, source = as_array(op, "x", x), as_array(op, "encoded", source)
        for name, value in (("x", x), ("encoded", source)):
            if value.ndim != 3 or value.shape[-1] != self.hidden:
                raise ShapeError(op, name, f"shape {value.shape}", f"(batch, sequence, {self.hidden})")
        count = 3 if separate else 1 if self.kv is None else 2
        structs = layer_structs(x, source, heads, self.groups, self.head_dim, count)
        self.core._validate(*structs, **options)
        first = self.qkv or self.query
        normed = isinstance(first, LayerNormDenseGeneral)
        y, residual = first(x, return_residual=True) if normed else (first(x), x)
        projections = [y] if self.kv is None else [y, self.kv(source)]
        rotate = rotation(self.head_dim) if self.rotary else None
        layers = attention_layers(self, projections, separate, (self.q_norm, self.k_norm), rotate)
        o = self.core(*layers, **options)
        y = self.out(
            o.reshape(*o.shape[:-2], o.shape[-2] * o.shape[-1]),
            return_bias=return_bias,
            residual=residual if join_residual else None,
        )
        y, *unadded = y if return_bias else (y,)
        more = [*([residual] if return_residual else []), *unadded]
        return (y, *more) if more else y
