"""``TransformerLayer``: attention and MLP, each with its norm, its residual and its dropout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fp8kit.arguments import choice, flag, integer, number
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor, apply
from fp8kit.errors import ArgumentError, on_behalf_of
from fp8kit.layers.attention_inputs import ACROSS, Ahead, known_options, sequence_starts, want_no_encoder
from fp8kit.nn import random
from fp8kit.nn.attention import MultiheadAttention
from fp8kit.nn.embedding import dropout_spec
from fp8kit.nn.later import CONSTRUCTOR, later
from fp8kit.nn.module import Module, as_tokens, positive
from fp8kit.nn.norm import LayerNorm, RMSNorm
from fp8kit.nn.norm_mlp import LayerNormMLP
from fp8kit.nn.random import Init
from fp8kit.ops.attention_spec import FORMATS
from fp8kit.ops.drop_path import DropPathSpec, drop_path
from fp8kit.ops.dropout_add import dropout_add
from fp8kit.ops.values import check_sequences

# what the attention across has in common with the layer's own
_CROSS_OPTIONS = ("core_attention_bias_type", "core_attention_bias", "alibi_slopes", "fast_zero_fill")
# the arguments of the attention across, and what the layer calls them
_ACROSS = {
    "attn_mask_type": "enc_dec_attn_mask_type",
    "window_size": "enc_dec_window_size",
    "attention_mask": "enc_dec_attn_mask",
    "bottom_right_diagonal": "enc_dec_bottom_right_diagonal",
}
# whether a residual starts after a branch's norm -> its name among the branch's outputs, and how to ask for
# it
_STREAMS = {False: ("residual", {"residual": True}), True: ("normed", {"return_norm": True})}


class TransformerLayer(Module):
    """One layer, norms before the branches ::

        a = x + dropout(self_attention(norm(x)))         child self_attention
        a = a + dropout(inter_attention(norm(a), e))     child inter_attention, with layer_type "decoder" only
        y = a + dropout(mlp(norm(a)))                    child layernorm_mlp

    * ``hidden_size`` H, ``ffn_hidden_size``, ``num_attention_heads``, ``num_gqa_groups``, ``kv_channels``: as
      the children.
    * ``hidden_dropout``: of the branches' outputs; ``attention_dropout``: of the attention weights; while
      training.
    * ``drop_path_rate``: probability q of dropping a whole sample from the self attention's and the MLP's
      output (after their dropout), while training; what stays is divided by 1 - q. A sample is a sequence of
      the batch in each format (Transformer Engine takes the first dimension, which is one only with "bshd");
      the attention across is not dropped, as there.
    * ``self_attn_mask_type``, ``window_size``, ``bottom_right_diagonal``, ``softmax_type``,
      ``rotary_pos_interleaved``, ``qk_norm_type``, ``qk_norm_eps``, ``qk_norm_before_rope``: as
      ``MultiheadAttention``. ``attn_input_format``: "sbhd", "bshd" or "thd".
    * ``layer_type``: "encoder", or "decoder": e is ``encoder_output``, and ``enc_dec_attn_mask_type``,
      ``enc_dec_window_size``, ``enc_dec_bottom_right_diagonal`` are the second attention's; not with "thd",
      where nothing says how e's sequences lie. An encoder takes these three at their defaults only,
      ArgumentError otherwise: Transformer Engine ignores them.
    * ``apply_residual_connection_post_layernorm``: the residuals start after the norms. ``output_layernorm``:
      the norm of the self attention's input is left out (its residual starts at x then), and one of the
      layer's output added (child ``layernorm``).
    * ``parallel_attention_mlp``: y = x + dropout(self_attention(norm(x)) + mlp(norm'(x))); with neither of
      these two, for encoders.
    * ``init_method``, ``output_layer_init_method``: of qkv and fc1, of proj and fc2; None is normal(0,
      0.023).
    * ``fuse_qkv_params``, ``qkv_weight_interleaved``, ``zero_centered_gamma``, ``bias``, ``activation``,
      ``activation_params``, ``normalization``, ``layernorm_epsilon``, ``params_dtype``, ``device``,
      ``layer_number``, ``name``: as the children.
    * ``seq_length``, ``micro_batch_size``: accepted; in Transformer Engine they are hints for a warm-up, and
      there is none here.

    Raises Fp8kitError for arguments out of their range.
    """

    @on_behalf_of(
        "TransformerLayer",
        eps="layernorm_epsilon",
        attn_mask_type="self_attn_mask_type",
        qkv_format="attn_input_format",
    )
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        *,
        params_dtype: Any = None,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Any = None,
        normalization: str = "LayerNorm",
        device: Any = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        **other: Any,
    ) -> None:
        op = "TransformerLayer"
        later(op, CONSTRUCTOR[op], other)
        positive(
            op,
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            num_attention_heads=num_attention_heads,
        )
        self.hidden_dropout = number(op, "hidden_dropout", hidden_dropout, 1.0)
        self.drop_path_rate = number(op, "drop_path_rate", drop_path_rate, 1.0)
        self.parallel_attention_mlp = flag(op, "parallel_attention_mlp", parallel_attention_mlp)
        self.apply_residual_connection_post_layernorm = flag(
            op, "apply_residual_connection_post_layernorm", apply_residual_connection_post_layernorm
        )
        output_layernorm = flag(op, "output_layernorm", output_layernorm)
        choice(op, "attn_input_format", attn_input_format, FORMATS)
        decoder = choice(op, "layer_type", layer_type, ("encoder", "decoder")) == "decoder"
        if decoder and attn_input_format == "thd":
            raise ArgumentError(
                op, "attn_input_format", "'thd'", "'sbhd' or 'bshd' with layer_type 'decoder'"
            )
        if not decoder:
            want_no_encoder(
                op,
                "an array",
                ACROSS,
                enc_dec_attn_mask_type=enc_dec_attn_mask_type,
                enc_dec_window_size=enc_dec_window_size,
                enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal,
            )
        alone = {
            "layer_type": (layer_type, "encoder"),
            "output_layernorm": (output_layernorm, False),
            "apply_residual_connection_post_layernorm": (
                self.apply_residual_connection_post_layernorm,
                False,
            ),
        }
        for argument, (value, usual) in alone.items():
            if self.parallel_attention_mlp and value != usual:
                raise ArgumentError(op, argument, repr(value), f"{usual!r} with parallel_attention_mlp")
        self.hidden_size, self.name = int(hidden_size), name
        self.layer_number = None if layer_number is None else integer(op, "layer_number", layer_number)
        self.layer_type, self.attn_input_format = layer_type, attn_input_format
        shared: dict[str, Any] = {
            "bias": bias,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "params_dtype": params_dtype,
            "device": device,
            "return_bias": not self.parallel_attention_mlp,
        }

        def attention(
            child: str, mask: str, window: tuple[int, int] | None, corner: bool | None, **more: Any
        ) -> MultiheadAttention:
            return MultiheadAttention(
                hidden_size,
                num_attention_heads,
                kv_channels,
                attention_dropout,
                layernorm_epsilon,
                init_method,
                output_layer_init_method,
                layer_number,
                mask,
                window,
                corner,
                num_gqa_groups=num_gqa_groups,
                fuse_qkv_params=fuse_qkv_params,
                qkv_weight_interleaved=qkv_weight_interleaved,
                qkv_format=attn_input_format,
                rotary_pos_interleaved=rotary_pos_interleaved,
                softmax_type=softmax_type,
                qk_norm_type=qk_norm_type,
                qk_norm_eps=qk_norm_eps,
                qk_norm_before_rope=qk_norm_before_rope,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                name=None if name is None else f"{name}.{child}",
                **more,
                **shared,
            )

        self.self_attention = attention(
            "self_attention",
            self_attn_mask_type,
            window_size,
            bottom_right_diagonal,
            input_layernorm=not output_layernorm,
        )
        self.inter_attention: MultiheadAttention | None = None
        if decoder:
            with on_behalf_of(op, **_ACROSS):
                self.inter_attention = attention(
                    "inter_attention",
                    enc_dec_attn_mask_type,
                    enc_dec_window_size,
                    enc_dec_bottom_right_diagonal,
                    input_layernorm=True,
                    attention_type="cross",
                )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            init_method=init_method,
            activation=activation,
            activation_params=activation_params,
            output_layer_init_method=output_layer_init_method,
            name=None if name is None else f"{name}.layernorm_mlp",
            **shared,
        )
        self.layernorm: Module | None = None
        if output_layernorm:
            kind = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = kind(
                hidden_size,
                layernorm_epsilon,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Any = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        **options: Any,
    ) -> Tensor:
        """Returns the shape and dtype of ``hidden_states``: h (s, b, H), (b, s, H) with "bshd", (t, H) with
        "thd".

        * ``self_attn_mask_type``, ``window_size``, ``bottom_right_diagonal`` and their ``enc_dec_`` twins
          override the constructor's.
        * ``encoder_output``: h, in the same format, of a decoder. ``enc_dec_attn_mask``: the
          ``attention_mask`` of the attention across, a pair with a padding mask. All that is about it is None
          for an encoder.
        * ``attention_mask``, ``rotary_pos_emb``, ``cu_seqlens_q``, ``inference_params``,
          ``checkpoint_core_attention`` and the other ``options``: as ``MultiheadAttention.forward``, for the
          self attention; the attention across gets the score's bias, ALiBi's slopes and
          ``checkpoint_core_attention`` too, as in Transformer Engine. ``is_first_microbatch``: see
          ``Linear``.

        Raises ShapeError and FormatError for arrays that do not fit, Fp8kitError for other arguments that do
        not, TypeError for an unknown option.
        """
        op = "TransformerLayer"
        known_options(op, options)
        dtype = self.self_attention.proj.weight_inputs()["weight0"].dtype
        x = as_tokens(op, "hidden_states", hidden_states, self.attn_input_format, self.hidden_size, dtype)
        if self.inter_attention is not None and encoder_output is None:
            raise ArgumentError(op, "encoder_output", None, "an array with layer_type 'decoder'")
        if self.inter_attention is None:
            want_no_encoder(
                op,
                "an array",
                encoder_output=encoder_output,
                enc_dec_attn_mask=enc_dec_attn_mask,
                enc_dec_attn_mask_type=enc_dec_attn_mask_type,
                enc_dec_window_size=enc_dec_window_size,
                enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal,
            )
        own = {
            **options,
            "attention_mask": attention_mask,
            "attn_mask_type": self_attn_mask_type,
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "inference_params": inference_params,
        }
        first, attention, mlp = is_first_microbatch, self.self_attention, self.layernorm_mlp
        flag(op, "checkpoint_core_attention", checkpoint_core_attention)
        with on_behalf_of(op, attn_mask_type="self_attn_mask_type"):
            ahead = attention.settle("attention", x, None, own, rotary_pos_emb)
        paths = ahead.core.beside, inference_params
        if self.training and self.drop_path_rate and self.attn_input_format == "thd":
            with on_behalf_of(op, starts="cu_seqlens_q_padded"):
                check_sequences("drop_path", {"starts": sequence_starts(*paths)}, "starts", x.shape[0])
        across: dict[str, Any] = {}
        if self.inter_attention is not None:
            across = {name: options[name] for name in _CROSS_OPTIONS if name in options}
            across |= {
                "attention_mask": enc_dec_attn_mask,
                "attn_mask_type": enc_dec_attn_mask_type,
                "window_size": enc_dec_window_size,
                "bottom_right_diagonal": enc_dec_bottom_right_diagonal,
            }
            with on_behalf_of(op, **_ACROSS):
                beyond = self.inter_attention.settle("attention", x, encoder_output, across, None)
        if self.parallel_attention_mlp:
            bias = "add" if attention.proj.use_bias else "none"
            out = attention.branch(x, first, bias, own, ahead, checkpoint_core_attention, residual=True)
            beside = mlp.branch(out["residual"], first, bias, residual=True)
            return self._join(out["y"] + beside["y"], None, beside["residual"], paths)

        post = self.apply_residual_connection_post_layernorm
        dropped, thinned = self.training and self.hidden_dropout, self.training and self.drop_path_rate
        # Where nothing comes between, a branch's last product adds bias and residual. Else ``_join`` does,
        # and that product's backward makes the bias's gradient.
        early, late = ("add", "deferred") if attention.proj.use_bias else ("none", "none")

        def attend(
            layer: MultiheadAttention, x: Tensor, given: Any, ahead: Ahead, post: bool, paths: Any
        ) -> Tensor:
            stream, ask = _STREAMS[post]
            joins = not (dropped or (thinned and paths is not None))
            out = layer.branch(
                x,
                first,
                early if joins else late,
                given,
                ahead,
                checkpoint_core_attention,
                **ask,
                joins=stream if joins else None,
            )
            return out["y"] if joins else self._join(out["y"], layer.proj_bias, out[stream], paths)

        a = attend(attention, x, own, ahead, post and attention.input_layernorm, paths)
        if self.inter_attention is not None:
            a = attend(self.inter_attention, a, across, beyond, post, None)
        if post or dropped or thinned:
            stream, ask = _STREAMS[post]
            out = mlp.branch(a, first, late, **ask)
            y = self._join(out["y"], mlp.fc2_bias, out[stream], paths)
        else:
            y = mlp.branch(a, first, early, joins=True)["y"]
        return y if self.layernorm is None else self.layernorm(y)

    def _join(
        self,
        branch: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        paths: tuple[Mapping[str, Any], Any] | None = None,
    ) -> Tensor:
        """residual + dropout(branch + bias), samples dropped where ``paths`` are given: what
        ``sequence_starts`` is asked."""
        p = self.hidden_dropout if self.training else 0.0
        rate = self.drop_path_rate if self.training and paths is not None else 0.0
        inputs: dict[str, Tensor | ArrayView | None] = {
            "x": branch,
            "bias": None if bias is None else bias.view,
        }
        if not rate:
            inputs["residual"] = residual
        joined = branch
        if p or bias is not None or not rate:
            draw = random.next_rng if p else None
            joined = apply(dropout_add, dropout_spec(self.hidden_size, p, False), inputs, draw=draw)["y"]
        if not rate or paths is None:
            return joined
        inputs = {"x": joined, "residual": residual}
        if self.attn_input_format == "thd":
            inputs["starts"] = sequence_starts(*paths)
        return apply(
            drop_path,
            _path_spec(self.hidden_size, rate, self.attn_input_format),
            inputs,
            draw=random.next_rng,
        )["y"]


@lru_cache(maxsize=1024)
def _path_spec(features: int, p: float, form: str) -> DropPathSpec:
    """The same object for the same arguments: plans are found by a spec's identity."""
    return DropPathSpec(features, p, form)
