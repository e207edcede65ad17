"""``TransformerLayer``: self attention and MLP, each with its norm, its residual and its dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import Fp8kitError, expected
from fp8kit_torch.apply import run
from fp8kit_torch.arguments import CONSTRUCTOR, FORWARD, only, positive, refuse
from fp8kit_torch.attention import CORE_OPTIONS, MultiheadAttention
from fp8kit_torch.draws import next_rng
from fp8kit_torch.module import Init, want_input
from fp8kit_torch.norm import LayerNorm, RMSNorm
from fp8kit_torch.norm_mlp import LayerNormMLP
from fp8kit_torch.specs import spec_for

_OWN = ("attention_mask", "attn_mask_type", "window_size", "bottom_right_diagonal")


class TransformerLayer(torch.nn.Module):
    """One layer, norms before the branches ::

        a = x + dropout(self_attention(norm(x)))          child self_attention
        y = a + dropout(mlp(norm(a)))                     child layernorm_mlp

    * ``hidden_size`` H, ``ffn_hidden_size``, ``num_attention_heads``, ``num_gqa_groups``, ``kv_channels``: as the children.
    * ``hidden_dropout``: of both branches' outputs; ``attention_dropout``: of the attention weights; while training.
    * ``self_attn_mask_type``, ``window_size``, ``bottom_right_diagonal``, ``softmax_type``, ``rotary_pos_interleaved``: as
      ``MultiheadAttention``. ``attn_input_format``: "sbhd", "bshd" or "thd".
    * ``apply_residual_connection_post_layernorm``: the residuals start after the norms. ``output_layernorm``: the norm of the
      attention's input is left out, and one of the layer's output added (child ``layernorm``).
    * ``init_method``, ``output_layer_init_method``: of qkv and fc1, of proj and fc2; None is normal(0, 0.023).
    * ``fuse_wgrad_accumulation``, ``fuse_qkv_params``, ``qkv_weight_interleaved``, ``zero_centered_gamma``, ``bias``, ``activation``,
      ``normalization``, ``layernorm_epsilon``, ``params_dtype``, ``device``, ``layer_number``, ``name``: as the children.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None,
                 layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1,
                 init_method: Init | None = None, output_layer_init_method: Init | None = None, layer_number: int | None = None,
                 kv_channels: int | None = None, self_attn_mask_type: str = "causal", window_size: tuple[int, int] | None = None,
                 bottom_right_diagonal: bool | None = None, *, params_dtype: torch.dtype | None = None,
                 fuse_wgrad_accumulation: bool = False, apply_residual_connection_post_layernorm: bool = False,
                 output_layernorm: bool = False, fuse_qkv_params: bool = False, rotary_pos_interleaved: bool = False,
                 zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True, bias: bool = True, activation: str = "gelu",
                 normalization: str = "LayerNorm", device: Any = None, attn_input_format: str = "sbhd", name: str | None = None,
                 softmax_type: str = "vanilla", **other: Any) -> None:
        super().__init__()
        op = "TransformerLayer"
        refuse(op, CONSTRUCTOR[op], other)
        positive(op, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size, num_attention_heads=num_attention_heads)
        if not 0 <= hidden_dropout < 1:
            raise Fp8kitError(expected(op, "hidden_dropout", hidden_dropout, "a probability in [0, 1)"))
        if apply_residual_connection_post_layernorm and output_layernorm:
            only(op, {"output_layernorm": (True, False)})
        self.hidden_size, self.hidden_dropout = hidden_size, float(hidden_dropout)
        self.layer_number, self.name = layer_number, name
        self.apply_residual_connection_post_layernorm = bool(apply_residual_connection_post_layernorm)
        shared: dict[str, Any] = {"bias": bias, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma,
                                  "params_dtype": params_dtype, "device": device, "fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon, init_method, output_layer_init_method,
            layer_number, self_attn_mask_type, window_size, bottom_right_diagonal, num_gqa_groups=num_gqa_groups,
            input_layernorm=not output_layernorm, fuse_qkv_params=fuse_qkv_params, qkv_weight_interleaved=qkv_weight_interleaved,
            qkv_format=attn_input_format, return_bias=True, rotary_pos_interleaved=rotary_pos_interleaved, softmax_type=softmax_type,
            **shared)
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, return_bias=True, init_method=init_method, activation=activation,
            output_layer_init_method=output_layer_init_method, **shared)
        self.layernorm: torch.nn.Module | None = None
        if output_layernorm:
            kind = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = kind(hidden_size, layernorm_epsilon, params_dtype=params_dtype, zero_centered_gamma=zero_centered_gamma,
                                  device=device)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, self_attn_mask_type: str | None = None,
                window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None, *,
                is_first_microbatch: bool | None = None, rotary_pos_emb: Any = None, **other: Any) -> Tensor:
        """``hidden_states``: h (s, b, H), (b, s, H) with "bshd", (t, H) with "thd". ``self_attn_mask_type`` overrides the constructor's;
        ``attention_mask``, ``rotary_pos_emb``, ``cu_seqlens_q`` and the other options of the attention: as ``MultiheadAttention.forward``.
        ``is_first_microbatch``: see ``Linear``. Returns the same shape and dtype.
        """
        op = "TransformerLayer"
        options = {name: other.pop(name) for name in CORE_OPTIONS if name in other and name not in _OWN}
        options.update(attention_mask=attention_mask, attn_mask_type=self_attn_mask_type, window_size=window_size,
                       bottom_right_diagonal=bottom_right_diagonal)
        refuse(op, FORWARD[op], other)
        x = want_input(op, "hidden_states", hidden_states, self.hidden_size)
        post = self.apply_residual_connection_post_layernorm
        stream = "normed" if post else "residual"
        attention, mlp = self.self_attention, self.layernorm_mlp
        bias = "deferred" if attention.proj.use_bias else "none"  # dropout_add adds it, proj's backward makes its gradient
        out = attention.branch(x, is_first_microbatch, bias, options, None, rotary_pos_emb, residual=not post, return_norm=post)
        a = self._join(out["y"], attention.proj.bias, out[stream])
        out = mlp.branch(a, is_first_microbatch, bias, residual=not post, return_norm=post)
        y = self._join(out["y"], mlp.fc2_bias, out[stream])
        return y if self.layernorm is None else self.layernorm(y)

    def _join(self, branch: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + dropout(branch + bias)."""
        p = self.hidden_dropout if self.training else 0.0
        if bias is not None:
            bias = bias.detach().to(branch.dtype)
        inputs = {"x": branch, "bias": bias, "residual": residual.to(branch.dtype), "rng": next_rng(branch.device) if p else None}
        return run("dropout_add", spec_for("DropoutAddSpec", self.hidden_size, p, False), inputs)["y"]
