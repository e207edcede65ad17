"""``DotProductAttention`` and ``MultiHeadAttention`` as NNX modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp8kit.arguments import check, flag, optional
from fp8kit.errors import FormatError, ShapeError
from fp8kit.layers.attention_inputs import normed_and_rotated
from fp8kit_jax import attention as functions
from fp8kit_jax import functional
from fp8kit_jax.arguments import as_array, stand
from fp8kit_jax.checks import RULES, size
from fp8kit_jax.layers import check_join
from fp8kit_jax.nnx.dense import DenseGeneral, LayerNorm, LayerNormDenseGeneral, want_rngs

QK_NORMS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}


class Dropout(nnx.Module):
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

    def __call__(self) -> tuple[float, Any]:
        """(rate, key) to use now, (0, None) where nothing is dropped."""
        return (0.0, None) if self.idle or self.stream is None else (self.rate, self.stream())


class DotProductAttention(nnx.Module):
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

    def __call__(self, query: Any, key: Any = None, value: Any = None, **given: Any) -> Any:
        """``query``, ``key``, ``value``: separate or packed; ``given``: ``mask``, ``bias``, ``cu_seqlens_q``
        and so on."""
        functions.known("DotProductAttention", given)
        if self.dropout.stream is not None:  # whose state changes with a draw
            layers = {"query": query, "key": key, "value": value}
            self.validate(
                *(
                    None if a is None else stand("dot_product_attention", name, a)
                    for name, a in layers.items()
                ),
                **given,
            )
        rate, key_now = self.dropout()
        options = {**self._options(), **given, "dropout_rate": rate, "dropout_key": key_now}
        return functions.dot_product_attention(query, key, value, **options)

    def validate(self, query: Any, key: Any = None, value: Any = None, **given: Any) -> None:
        """Refuse what a call would refuse, and run nothing; ``jax.ShapeDtypeStruct``s stand for ``query``,
        ``key`` and ``value``."""
        functions.validate(query, key, value, **{**self._options(), **given})

    def _options(self) -> dict[str, Any]:
        return {
            **dict(self.options),
            **({} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset[...]}),
        }


class MultiHeadAttention(nnx.Module):
    """Projections, attention, output projection.

    * ``hidden_size`` H, ``num_attention_heads``, ``num_gqa_groups`` (None: as many), ``head_dim`` (None: H /
      heads).
    * ``input_layernorm``: the norm before the projections. Children: self attention ``qkv`` (with groups
      ``query`` and ``kv``); ``cross``: ``query`` and ``kv``; ``core``, ``out``.
    * ``qk_norm_type``: "L2Normalization", "RMSNorm" or "LayerNorm" of each query's and key's features,
      children ``q_norm``, ``k_norm``; after the rotary embedding, or before it (``qk_norm_before_rope``).
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
        heads = num_attention_heads
        if hidden_size % heads and head_dim is None:
            raise ShapeError("MultiHeadAttention", "hidden_size", hidden_size, f"a multiple of {heads} heads")
        if heads % (num_gqa_groups or heads):
            raise ShapeError(
                "MultiHeadAttention", "num_gqa_groups", num_gqa_groups, f"a divisor of {heads} heads"
            )
        if qk_norm_type not in (None, "L2Normalization", *QK_NORMS):
            wanted = f"one of L2Normalization, {', '.join(QK_NORMS)}"
            raise FormatError("MultiHeadAttention", "qk_norm_type", repr(qk_norm_type), wanted)
        self.groups, self.head_dim = num_gqa_groups or heads, head_dim or hidden_size // heads
        self.hidden = hidden_size
        self.cross, self.rotary, self.first = cross, rotary, qk_norm_before_rope
        self.qk_norm_type, self.qk_norm_eps = qk_norm_type, qk_norm_eps
        shared: dict[str, Any] = {"rngs": rngs, "use_bias": use_bias, "dtype": dtype}
        norm = {
            "epsilon": epsilon,
            "layernorm_type": layernorm_type,
            "zero_centered_gamma": zero_centered_gamma,
        }

        def projection(features: Any) -> DenseGeneral:
            return (
                LayerNormDenseGeneral(hidden_size, features, **norm, **shared)
                if input_layernorm
                else DenseGeneral(hidden_size, features, **shared)
            )

        packed = not cross and self.groups == heads
        self.qkv = projection((3, heads * self.head_dim)) if packed else None
        self.query = None if packed else projection(heads * self.head_dim)
        own = projection if not cross else lambda features: DenseGeneral(hidden_size, features, **shared)
        self.kv = None if packed else own((2, self.groups * self.head_dim))
        self.core = DotProductAttention(heads, attention_dropout=attention_dropout, rngs=rngs, **options)
        self.out = DenseGeneral(heads * self.head_dim, hidden_size, **shared)
        kind = QK_NORMS.get(qk_norm_type or "")
        self.q_norm, self.k_norm = (
            LayerNorm(self.head_dim, epsilon=qk_norm_eps, layernorm_type=kind, dtype=dtype) if kind else None
            for _ in range(2)
        )

    def __call__(
        self,
        x: Any,
        encoded: Any = None,
        *,
        return_residual: bool = False,
        return_bias: bool = False,
        join_residual: bool = False,
        **given: Any,
    ) -> Any:
        """``x``: h (b, s, H); ``encoded``: h (b, s_kv, H), for cross-attention. ``given``: as
        ``DotProductAttention``.
        Returns h like x, or a tuple with x, as ``LayerNormDenseGeneral``, and with ``return_bias`` the bias
        of ``out``, which then is not added, or None. ``join_residual``: x is added to y, by the product of
        ``out``; neither of the two then."""
        return_residual = flag("MultiHeadAttention", "return_residual", return_residual)
        return_bias = flag("MultiHeadAttention", "return_bias", return_bias)
        join_residual = flag("MultiHeadAttention", "join_residual", join_residual)
        check_join(
            "MultiHeadAttention", join_residual, return_residual=return_residual, return_bias=return_bias
        )
        if (encoded is not None) != self.cross:
            wanted = "an array for cross-attention" if self.cross else "None for self attention"
            raise ShapeError("MultiHeadAttention", "encoded", None if encoded is None else "an array", wanted)
        self._validate(x, encoded if self.cross else x, given)
        first = self.qkv or self.query
        if isinstance(first, LayerNormDenseGeneral):
            y, residual = first(x, return_residual=True)
        else:
            y, residual = first(x), x
        layers = [self._apart(y)]
        if self.kv is not None:
            layers.append(self._apart(self.kv(encoded if self.cross else x)))
        if self.rotary or self.qk_norm_type is not None:
            packed = layers[-1]
            parts = [*layers[:-1], *(packed[..., i, :, :] for i in range(packed.shape[-3]))]
            q, k = (
                normed_and_rotated(a, self._norm(own), self._rotation(), self.first)
                for a, own in zip(parts, (self.q_norm, self.k_norm), strict=False)
            )
            layers = [q, k, parts[2]]
        o = self.core(*layers, **given)
        y = self.out(
            o.reshape(*o.shape[:-2], -1),
            return_bias=return_bias,
            residual=residual if join_residual else None,
        )
        y, *unadded = y if return_bias else (y,)
        more = [*([residual] if return_residual else []), *unadded]
        return (y, *more) if more else y

    def _validate(self, x: Any, source: Any, given: Mapping[str, Any]) -> None:
        """Refuse what does not fit before the projections run."""
        functions.known("MultiHeadAttention", given)
        x, source = as_array("MultiHeadAttention", "x", x), as_array("MultiHeadAttention", "encoded", source)
        for name, value in (("x", x), ("encoded", source)):
            if value.ndim != 3 or value.shape[-1] != self.hidden:
                raise ShapeError(
                    "MultiHeadAttention", name, f"shape {value.shape}", f"(batch, sequence, {self.hidden})"
                )
        heads = self.core.num_attention_heads

        def layer(own: Any, *last: int) -> Any:
            return jax.ShapeDtypeStruct((*own.shape[:-1], *last, self.head_dim), own.dtype)

        if self.rotary or self.qk_norm_type is not None:
            layers = [layer(x, heads), layer(source, self.groups), layer(source, self.groups)]
        elif self.qkv is not None:
            layers = [layer(x, 3, heads)]
        else:
            layers = [layer(x, heads), layer(source, 2, self.groups)]
        self.core.validate(*layers, **given)

    def _apart(self, x: Any) -> Any:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def _norm(self, own: LayerNorm | None) -> Any:
        """The norm of queries or keys as a function, None where there is none."""
        return (
            (lambda x: functional.l2norm(x, self.qk_norm_eps))
            if own is None and self.qk_norm_type is not None
            else own
        )

    def _rotation(self) -> Any:
        """The rotary embedding as a function, None where there is none."""
        return (
            (lambda x: functional.rope(x, functional.rope_frequencies(self.head_dim, x.shape[1])))
            if self.rotary
            else None
        )
