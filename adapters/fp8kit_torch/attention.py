"""``MultiheadAttention``: attention with its projections (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import Fp8kitError, expected
from fp8kit_torch.apply import run
from fp8kit_torch.arguments import CONSTRUCTOR, FORWARD, only, positive, refuse
from fp8kit_torch.dot_product_attention import DotProductAttention
from fp8kit_torch.linear import Linear
from fp8kit_torch.module import Init, want_input
from fp8kit_torch.norm_linear import LayerNormLinear
from fp8kit_torch.rope import angles
from fp8kit_torch.specs import spec_for

# what forward hands to the core attention as it is
CORE_OPTIONS = (
    "attention_mask", "attn_mask_type", "window_size", "bottom_right_diagonal", "core_attention_bias_type", "core_attention_bias",
    "alibi_slopes", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv",
    "fast_zero_fill", "pad_between_seqs",
)  # fmt: skip


class MultiheadAttention(torch.nn.Module):
    """proj(attention(projections of x)).

    * ``hidden_size`` H, ``num_attention_heads`` h, ``kv_channels`` d (None: H / h), ``num_gqa_groups`` g (None: h).
    * ``attention_type``: "self", or "cross": the queries come from ``hidden_states``, keys and values from ``encoder_output``.
    * ``input_layernorm``: a norm before the queries' projection. Children: self, ``layernorm_qkv`` (LayerNormLinear) or ``qkv`` (Linear);
      cross, ``layernorm_query`` or ``query_layer``, and ``key_value``.
    * ``fuse_qkv_params``: False keeps ``query_weight``, ``key_weight``, ``value_weight`` apart; True makes one ``weight``. Its rows then go
      head by head, each q, k, v (``qkv_weight_interleaved``; not yet with fewer groups than heads, nor across), or all of q, then k, then
      v.
    * ``init_method``, ``output_layer_init_method``: for the projections in and out.
    * ``return_bias``: proj's bias is returned, not added. ``return_layernorm_output``: also return norm(x).
    * ``rotary_pos_interleaved``: how ``rotary_pos_emb`` pairs features, see ``RotaryPositionEmbedding``.
    * ``attention_dropout``, ``attn_mask_type``, ``window_size``, ``bottom_right_diagonal``, ``softmax_type``, ``qkv_format``: as
      ``DotProductAttention`` (child ``core_attention``). Others as ``Linear`` and ``LayerNormLinear``.
    """

    def __init__(self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None, attention_dropout: float = 0.1,
                 layernorm_epsilon: float = 1e-5, init_method: Init | None = None, output_layer_init_method: Init | None = None,
                 layer_number: int | None = None, attn_mask_type: str = "causal", window_size: tuple[int, int] | None = None,
                 bottom_right_diagonal: bool | None = None, *, num_gqa_groups: int | None = None, fuse_wgrad_accumulation: bool = False,
                 params_dtype: torch.dtype | None = None, return_bias: bool = False, return_layernorm_output: bool = False,
                 input_layernorm: bool = False, attention_type: str = "self", fuse_qkv_params: bool = False,
                 zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True, rotary_pos_interleaved: bool = False,
                 bias: bool = True, normalization: str = "LayerNorm", device: Any = None, qkv_format: str = "sbhd",
                 name: str | None = None, softmax_type: str = "vanilla", **other: Any) -> None:
        super().__init__()
        op = "MultiheadAttention"
        refuse(op, CONSTRUCTOR[op], other)
        positive(op, hidden_size=hidden_size, num_attention_heads=num_attention_heads)
        if kv_channels is None and hidden_size % num_attention_heads:
            raise Fp8kitError(expected(op, "hidden_size", hidden_size, f"a multiple of {num_attention_heads} heads, or kv_channels given"))
        channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        core = DotProductAttention(
            num_attention_heads, channels, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type, window_size,
            bottom_right_diagonal, layer_number=layer_number, attention_type=attention_type, softmax_type=softmax_type, device=device)
        self._interleaved = bool(fuse_qkv_params and qkv_weight_interleaved)  # weights kept apart are always joined as q, k, v
        if self._interleaved and (core.num_gqa_groups != num_attention_heads or attention_type == "cross"):
            only(op, {"qkv_weight_interleaved": (qkv_weight_interleaved, False)})
        q, kv = num_attention_heads * channels, core.num_gqa_groups * channels
        split = {"query": q, "key": kv, "value": kv}
        shared: dict[str, Any] = {"bias": bias, "params_dtype": params_dtype, "device": device,
                                  "fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        self.input_layernorm, self.return_bias = bool(input_layernorm), bool(return_bias)
        self.return_layernorm_output, self.name, self.layer_number = bool(return_layernorm_output), name, layer_number
        self.attention_type, self.rotary_pos_interleaved = attention_type, bool(rotary_pos_interleaved)
        if self.return_layernorm_output and not self.input_layernorm:
            raise Fp8kitError(expected(op, "return_layernorm_output", True, "input_layernorm=True beside it"))

        def sized(parts: tuple[str, ...]) -> dict[str, Any]:
            sizes = {part: split[part] for part in parts}
            return {"out_features": sum(sizes.values()), "init_method": init_method, "parameters_split": None if fuse_qkv_params else sizes}

        def plain(*parts: str) -> Linear:
            return Linear(hidden_size, **sized(parts), **shared)

        def normed(*parts: str) -> LayerNormLinear:
            return LayerNormLinear(hidden_size, eps=layernorm_epsilon, normalization=normalization,
                                   zero_centered_gamma=zero_centered_gamma, **sized(parts), **shared)

        cross = attention_type == "cross"
        self._first = {(False, False): "qkv", (False, True): "layernorm_qkv", (True, False): "query_layer",
                       (True, True): "layernorm_query"}[cross, self.input_layernorm]
        setattr(self, self._first, (normed if self.input_layernorm else plain)(*(("query",) if cross else ("query", "key", "value"))))
        self.key_value: Linear | None = plain("key", "value") if cross else None
        self.core_attention = core
        self.proj = Linear(q, hidden_size, init_method=output_layer_init_method, **shared)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, encoder_output: Tensor | None = None,
                attn_mask_type: str | None = None, window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None,
                is_first_microbatch: bool | None = None, *, rotary_pos_emb: Any = None, **other: Any) -> Any:
        """Attend.

        * ``hidden_states``: h (s, b, H), (b, s, H) with "bshd", (t, H) with "thd". ``encoder_output``: likewise, with "cross" and only
          there.
        * ``rotary_pos_emb``: angles from ``RotaryPositionEmbedding``, or a pair of them for queries and keys, which are turned by them.
        * ``attention_mask``, ``attn_mask_type`` and the other options of ``DotProductAttention.forward``: as there.

        Returns y like ``hidden_states``, or a tuple (y, bias where ``return_bias``, norm(x) where ``return_layernorm_output``).
        """
        op = "MultiheadAttention"
        options = {name: other.pop(name) for name in CORE_OPTIONS if name in other}
        refuse(op, FORWARD[op], other)
        bias = "add" if self.proj.use_bias and not self.return_bias else "none"
        options.update(attention_mask=attention_mask, attn_mask_type=attn_mask_type, window_size=window_size,
                       bottom_right_diagonal=bottom_right_diagonal)
        x = want_input(op, "hidden_states", hidden_states, self.proj.out_features)
        out = self.branch(x, is_first_microbatch, bias, options, encoder_output, rotary_pos_emb, return_norm=self.return_layernorm_output)
        parts: list[Any] = [out["y"]]
        if self.return_bias:
            parts.append(self.proj.bias)
        if self.return_layernorm_output:
            parts.append(out["normed"])
        return tuple(parts) if len(parts) > 1 else parts[0]

    def branch(self, x: Tensor, is_first_microbatch: bool | None, bias: str, options: Mapping[str, Any],
               encoder_output: Tensor | None = None, rotary_pos_emb: Any = None, residual: bool = False,
               return_norm: bool = False) -> dict[str, Tensor]:
        """Outputs "y", and "residual" and "normed" where asked for (see ``LayerNormLinear.branch``); ``bias``: proj's; ``options``: the
        core attention's."""
        op, cross, first = "MultiheadAttention", self.attention_type == "cross", getattr(self, self._first)
        if (encoder_output is not None) != cross:
            got, wanted = ("None", "a tensor") if cross else ("a tensor", "None")
            raise Fp8kitError(expected(op, "encoder_output", got, f"{wanted} with {self.attention_type} attention"))
        out: dict[str, Tensor] = {"residual": x}
        if self.input_layernorm:
            out = first.branch(x, is_first_microbatch, first.bias_mode, residual, return_norm)
            y = out["y"]
        else:
            y = first.branch(x, is_first_microbatch, first.bias_mode)
        layers: dict[str, Tensor] = {"query_layer" if cross else "qkv_layer": y}
        if self.key_value is not None:
            source = want_input(op, "encoder_output", encoder_output, self.key_value.in_features)
            layers["kv_layer"] = self.key_value.branch(source, is_first_microbatch, self.key_value.bias_mode)
        if rotary_pos_emb is not None:
            layers = self._turned(layers, rotary_pos_emb, options)
        o = self.core_attention(**layers, qkv_interleave_dim=-2 if self._interleaved else -3, **options)
        return {**out, "y": self.proj.branch(o, is_first_microbatch, bias)}

    def _turned(self, layers: Mapping[str, Tensor], rotary_pos_emb: Any, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """The projections with queries and keys turned by their positions; values as they are."""
        op, core = "MultiheadAttention", self.core_attention
        pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple | list) else (rotary_pos_emb, rotary_pos_emb)
        if len(pair) != 2:
            raise Fp8kitError(expected(op, "rotary_pos_emb", f"{len(pair)} tensors", "one, or a pair for queries and keys"))
        heads, groups, dim = core.num_attention_heads, core.num_gqa_groups, core.kv_channels
        turn = {"q": (heads, dim, "freqs"), "k": (groups, dim, "freqs" if pair[0] is pair[1] else "k_freqs"), "v": (groups, dim, "")}
        found = {}
        for name, layer in layers.items():
            parts = {"query_layer": "q", "kv_layer": "kv", "qkv_layer": "qkv"}[name]
            inputs: dict[str, Tensor | None] = {"x": layer}
            for part, freqs in zip("qk", pair, strict=True):
                if part in parts:
                    inputs[turn[part][2]] = angles(op, "rotary_pos_emb", freqs, layer.device)
            if core.qkv_format == "thd":
                side = "kv" if name == "kv_layer" else "q"
                starts = options.get(f"cu_seqlens_{side}_padded")
                starts = options.get(f"cu_seqlens_{side}") if starts is None else starts
                if starts is not None:
                    inputs["cu_seqlens"] = starts.to(layer.device)
            segments = tuple([turn[part] for part in parts])
            spec = spec_for("RopeSpec", segments, core.qkv_format, self.rotary_pos_interleaved, self._interleaved)
            found[name] = run("rope", spec, inputs)["y"]
        return found
