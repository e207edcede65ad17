"""``DotProductAttention`` and ``MultiheadAttention`` (Vaswani et al. 2017; grouped query heads: Ainslie et al. 2023)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fp8kit import arrays
from fp8kit.autograd import Tensor, apply
from fp8kit.backends.policy import get_policy
from fp8kit.errors import Fp8kitError, expected
from fp8kit.nn import random
from fp8kit.nn.later import CONSTRUCTOR, FORWARD, later, not_yet
from fp8kit.nn.linear import Linear
from fp8kit.nn.module import Module, as_tensor, positive
from fp8kit.nn.norm_linear import LayerNormLinear
from fp8kit.nn.random import Init
from fp8kit.ops.attention import FORMATS, MASKS, AttentionSpec, attention


def _one_of(operation: str, argument: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise Fp8kitError(expected(operation, argument, repr(value), f"one of {', '.join(allowed)}; no other yet"))
    return value


@lru_cache(maxsize=1024)
def _spec(heads: int, channels: int, groups: int, qkv_format: str, mask: str, scale: float, dropout: float, deterministic: bool,
          layout: str) -> AttentionSpec:
    """The same object for the same arguments: plans are found by a spec's identity."""
    return AttentionSpec(heads, channels, groups, qkv_format, mask, scale, dropout, deterministic, layout)


class DotProductAttention(Module):
    """o = dropout(softmax(mask(softmax_scale * q k^T))) v for each head; no parameters.

    * ``num_attention_heads`` h; ``kv_channels`` d, features of one head; ``num_gqa_groups``: key and value heads g (None: h).
    * ``attention_dropout``: probability, while training. ``qkv_format``: "sbhd" or "bshd".
    * ``attn_mask_type``: "no_mask", "causal" (aligned top-left), "padding" or "padding_causal" (with cu_seqlens).
    * ``softmax_scale``: None is 1 / sqrt(d). ``layer_number``, ``name``: kept, for the user.

    ``other``: Transformer Engine's further arguments, at their defaults (``fp8kit.nn.later``).
    """

    def __init__(self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int | None = None, attention_dropout: float = 0.0,
                 qkv_format: str = "sbhd", attn_mask_type: str = "causal", *, layer_number: int | None = None,
                 softmax_scale: float | None = None, name: str | None = None, **other: Any) -> None:
        op = "DotProductAttention"
        later(op, CONSTRUCTOR[op], other)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        positive(op, num_attention_heads=num_attention_heads, kv_channels=kv_channels, num_gqa_groups=groups)
        if num_attention_heads % groups:
            raise Fp8kitError(expected(op, "num_gqa_groups", groups, f"a divisor of {num_attention_heads} heads"))
        if softmax_scale is not None and not softmax_scale > 0:
            raise Fp8kitError(expected(op, "softmax_scale", softmax_scale, "a positive number or None"))
        if not 0 <= attention_dropout < 1:
            raise Fp8kitError(expected(op, "attention_dropout", attention_dropout, "a probability in [0, 1)"))
        self.num_attention_heads, self.kv_channels, self.num_gqa_groups = num_attention_heads, kv_channels, groups
        self.attention_dropout, self.softmax_scale = float(attention_dropout), float(softmax_scale or 0.0)
        self.qkv_format = _one_of(op, "qkv_format", qkv_format, FORMATS)
        self.attn_mask_type = _one_of(op, "attn_mask_type", attn_mask_type, MASKS)
        self.layer_number, self.name = layer_number, name

    def forward(self, query_layer: Any = None, key_layer: Any = None, value_layer: Any = None, qkv_format: str | None = None,
                cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, attn_mask_type: str | None = None, qkv_layer: Any = None,
                qkv_interleave_dim: int = -3, **other: Any) -> Tensor:
        """``query_layer`` h (s_q, b, h, d), ``key_layer`` and ``value_layer`` (s_kv, b, g, d); with "bshd" b comes first. Or
        ``qkv_layer`` (s, b, (h + 2 g) d): q's features, then k's, then v's (``qkv_interleave_dim`` -3: 3, h, d where g = h), or head after
        head, each q, k, v (-2: h, 3, d, and g = h). ``cu_seqlens``: int32 (b + 1,), running sums of the true lengths, for padding masks.

        Returns (s_q, b, h d), rows beyond the true length 0.
        """
        op = "DotProductAttention"
        later(op, FORWARD[op], other)
        form = self.qkv_format if qkv_format is None else _one_of(op, "qkv_format", qkv_format, FORMATS)
        mask = self.attn_mask_type if attn_mask_type is None else _one_of(op, "attn_mask_type", attn_mask_type, MASKS)
        given = {"query_layer": query_layer, "key_layer": key_layer, "value_layer": value_layer}
        inputs: dict[str, Any]
        if qkv_layer is not None:
            if any(value is not None for value in given.values()):
                raise Fp8kitError(expected(op, "qkv_layer", "also separate query, key or value layers", "one of the two forms"))
            inputs = {"qkv": as_tensor(op, "qkv_layer", qkv_layer)}
        else:
            inputs = {letter: as_tensor(op, name, value) for letter, (name, value) in zip("qkv", given.items(), strict=True)}
        if qkv_interleave_dim not in (-3, -2):
            raise Fp8kitError(expected(op, "qkv_interleave_dim", qkv_interleave_dim, "-3 or -2"))
        device = next(iter(inputs.values())).device
        for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
            if lengths is not None:
                inputs[name] = arrays.to(as_tensor(op, name, lengths).view, device)
        dropout = self.attention_dropout if self.training else 0.0
        if dropout:
            inputs["rng"] = random.next_rng(device)
        spec = _spec(self.num_attention_heads, self.kv_channels, self.num_gqa_groups, form, mask, self.softmax_scale, dropout,
                     get_policy().deterministic,
                     "separate" if qkv_layer is None else "qkv" if qkv_interleave_dim == -3 else "qkv_interleaved")
        return apply(attention, spec, inputs)["o"]


class MultiheadAttention(Module):
    """Self attention with its projections: proj(attention(qkv(x))).

    * ``hidden_size`` H, ``num_attention_heads`` h, ``kv_channels`` d (None: H / h), ``num_gqa_groups`` g (None: h).
    * ``input_layernorm``: a norm before the projection; then the child is ``layernorm_qkv`` (LayerNormLinear), else ``qkv`` (Linear).
    * ``fuse_qkv_params``: False keeps ``query_weight``, ``key_weight``, ``value_weight`` apart; True makes one ``weight``. Its rows then go
      head by head, each q, k, v (``qkv_weight_interleaved``; not yet with fewer groups than heads), or all of q, then k, then v.
    * ``init_method``, ``output_layer_init_method``: for the projections in and out.
    * ``return_bias``: proj's bias is returned, not added. ``return_layernorm_output``: also return norm(x).
    * ``attention_dropout``, ``attn_mask_type``, ``qkv_format``: as ``DotProductAttention`` (child ``core_attention``). Others as
      ``Linear`` and ``LayerNormLinear``.
    """

    def __init__(self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None, attention_dropout: float = 0.1,
                 layernorm_epsilon: float = 1e-5, init_method: Init | None = None, output_layer_init_method: Init | None = None,
                 layer_number: int | None = None, attn_mask_type: str = "causal", *, num_gqa_groups: int | None = None,
                 params_dtype: Any = None, return_bias: bool = False, return_layernorm_output: bool = False, input_layernorm: bool = False,
                 fuse_qkv_params: bool = False, zero_centered_gamma: bool = False,
                 qkv_weight_interleaved: bool = True, bias: bool = True, normalization: str = "LayerNorm", device: Any = None,
                 qkv_format: str = "sbhd", name: str | None = None, **other: Any) -> None:
        op = "MultiheadAttention"
        later(op, CONSTRUCTOR[op], other)
        positive(op, hidden_size=hidden_size, num_attention_heads=num_attention_heads)
        if kv_channels is None and hidden_size % num_attention_heads:
            raise Fp8kitError(expected(op, "hidden_size", hidden_size, f"a multiple of {num_attention_heads} heads, or kv_channels given"))
        channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        self.core_attention = core = DotProductAttention(
            num_attention_heads, channels, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type, layer_number=layer_number)
        self._interleaved = bool(fuse_qkv_params and qkv_weight_interleaved)  # weights kept apart are always joined as q, k, v
        if self._interleaved and core.num_gqa_groups != num_attention_heads:
            not_yet(op, {"qkv_weight_interleaved": (qkv_weight_interleaved, False)})
        q, kv = num_attention_heads * channels, core.num_gqa_groups * channels
        split = None if fuse_qkv_params else {"query": q, "key": kv, "value": kv}
        shared: dict[str, Any] = {"bias": bias, "params_dtype": params_dtype, "device": device}
        self.input_layernorm, self.return_bias = bool(input_layernorm), bool(return_bias)
        self.return_layernorm_output, self.name, self.layer_number = bool(return_layernorm_output), name, layer_number
        if self.return_layernorm_output and not self.input_layernorm:
            raise Fp8kitError(expected(op, "return_layernorm_output", True, "input_layernorm=True beside it"))
        if self.input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size, q + 2 * kv, layernorm_epsilon, init_method=init_method, normalization=normalization, parameters_split=split,
                zero_centered_gamma=zero_centered_gamma, **shared)
        else:
            self.qkv = Linear(hidden_size, q + 2 * kv, init_method=init_method, parameters_split=split, **shared)
        self.proj = Linear(q, hidden_size, init_method=output_layer_init_method, **shared)

    def forward(self, hidden_states: Any, attn_mask_type: str | None = None, is_first_microbatch: bool | None = None,
                cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, **other: Any) -> Any:
        """``hidden_states``: h (s, b, H), or (b, s, H) with "bshd". ``attn_mask_type``, ``cu_seqlens``: as ``DotProductAttention``.

        Returns y like ``hidden_states``, or a tuple (y, bias where ``return_bias``, norm(x) where ``return_layernorm_output``).
        """
        later("MultiheadAttention", FORWARD["MultiheadAttention"], other)
        x = as_tensor("MultiheadAttention", "hidden_states", hidden_states)
        bias = "add" if self.proj.use_bias and not self.return_bias else "none"
        normed = self.return_layernorm_output
        out = self.branch(x, is_first_microbatch, bias, attn_mask_type, cu_seqlens_q, cu_seqlens_kv, return_norm=normed)
        parts: list[Any] = [out["y"]]
        if self.return_bias:
            parts.append(self.proj_bias)
        if self.return_layernorm_output:
            parts.append(out["normed"])
        return tuple(parts) if len(parts) > 1 else parts[0]

    @property
    def proj_bias(self) -> Any:
        """The output projection's bias, None where there is none."""
        return getattr(self.proj, "bias", None)

    def branch(self, x: Tensor, is_first_microbatch: bool | None, bias: str, attn_mask_type: str | None, cu_seqlens_q: Any,
               cu_seqlens_kv: Any, residual: bool = False, return_norm: bool = False) -> dict[str, Tensor]:
        """Outputs "y", and "residual" and "normed" where asked for (see ``LayerNormLinear.branch``); ``bias``: proj's."""
        if self.input_layernorm:
            first = self.layernorm_qkv
            out = first.branch(x, is_first_microbatch, first.bias_mode, residual, return_norm)
            qkv = out["y"]
        else:
            out = {"residual": x}
            qkv = self.qkv.branch(x, is_first_microbatch, self.qkv.bias_mode)
        o = self.core_attention(qkv_layer=qkv, qkv_interleave_dim=-2 if self._interleaved else -3, attn_mask_type=attn_mask_type,
                                cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
        return out | {"y": self.proj.branch(o, is_first_microbatch, bias)}
