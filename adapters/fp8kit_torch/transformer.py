"""``TransformerLayer``: attention and MLP, each with its norm, its residual and its dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, on_behalf_of
from fp8kit.layers.attention_inputs import ACROSS, sequence_starts, want_no_encoder
from fp8kit.ops.drop_path import drop_path
from fp8kit.ops.dropout_add import add, dropout_add
from fp8kit.ops.values import check_sequences
from fp8kit_torch.arguments import (
    CONSTRUCTOR,
    has_foreign_code,
    options_of,
    positive,
    refuse,
    want_input,
    want_like,
)
from fp8kit_torch.attention import MultiheadAttention
from fp8kit_torch.bound import TensorMeta, validate
from fp8kit_torch.call import apply
from fp8kit_torch.checks import CONSTRUCTED, check
from fp8kit_torch.dot_product_attention import CALLED
from fp8kit_torch.draws import next_rng
from fp8kit_torch.inference import InferenceParams
from fp8kit_torch.linear import Linear
from fp8kit_torch.module import as_branch, part_of
from fp8kit_torch.norm import LayerNorm, RMSNorm
from fp8kit_torch.norm_mlp import LayerNormMLP
from fp8kit_torch.parameters import Init
from fp8kit_torch.reprs import described
from fp8kit_torch.specs import spec_for
from fp8kit_torch.te_compat.methods import TransformerEngineMethods
from fp8kit_torch.torch_compat import global_forward_hooks
from fp8kit_torch.views import as_view

# what the attention across has in common with the layer's own
_CROSS_OPTIONS = ("core_attention_bias_type", "core_attention_bias", "alibi_slopes", "fast_zero_fill")
# the core attention's arguments -> what the layer calls them: of its own attention, of the cross-attention
_OWN = {
    "attention_mask": "attention_mask",
    "attn_mask_type": "self_attn_mask_type",
    "window_size": "window_size",
    "bottom_right_diagonal": "bottom_right_diagonal",
    "inference_params": "inference_params",
}
_ACROSS = {
    "attention_mask": "enc_dec_attn_mask",
    "attn_mask_type": "enc_dec_attn_mask_type",
    "window_size": "enc_dec_window_size",
    "bottom_right_diagonal": "enc_dec_bottom_right_diagonal",
}
# whether a residual starts after a branch's norm -> its name among the branch's outputs, and how to ask for
# it
_STREAMS = {False: ("residual", {"residual": True}), True: ("normed", {"return_norm": True})}


# parts whose last product may add the residual, where nobody has put another forward into their place
_JOINING = (MultiheadAttention, Linear, LayerNormMLP)


class TransformerLayer(TransformerEngineMethods, torch.nn.Module):
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
    * ``fuse_wgrad_accumulation``, ``fuse_qkv_params``, ``qkv_weight_interleaved``, ``zero_centered_gamma``,
      ``bias``, ``activation``, ``activation_params``, ``normalization``, ``layernorm_epsilon``,
      ``params_dtype``, ``device``, ``layer_number``, ``name``: as the children.
    * ``seq_length``, ``micro_batch_size``: accepted; in Transformer Engine they are hints for a warm-up, and
      there is none here.
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
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Any = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
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
    ) -> None:
        op = "TransformerLayer"
        check(op, CONSTRUCTED, locals())
        super().__init__()
        refuse(op, CONSTRUCTOR[op], locals())
        positive(
            op,
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            num_attention_heads=num_attention_heads,
        )
        decoder = layer_type == "decoder"
        if decoder and attn_input_format == "thd":
            raise ArgumentError(
                op, "attn_input_format", "'thd'", "'sbhd' or 'bshd' with layer_type 'decoder'"
            )
        if not decoder:
            want_no_encoder(
                op,
                "a tensor",
                ACROSS,
                enc_dec_attn_mask_type=enc_dec_attn_mask_type,
                enc_dec_window_size=enc_dec_window_size,
                enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal,
            )
        alone = {
            "layer_type": (layer_type, "encoder"),
            "output_layernorm": (output_layernorm, False),
            "apply_residual_connection_post_layernorm": (apply_residual_connection_post_layernorm, False),
        }
        for argument, (value, usual) in alone.items():
            if parallel_attention_mlp and value != usual:
                raise ArgumentError(op, argument, repr(value), f"{usual!r} with parallel_attention_mlp")
        self.hidden_size, self.hidden_dropout, self.drop_path_rate = (
            hidden_size,
            float(hidden_dropout),
            float(drop_path_rate),
        )
        self.layer_number, self.name, self.layer_type, self.attn_input_format = (
            layer_number,
            name,
            layer_type,
            attn_input_format,
        )
        self.parallel_attention_mlp = bool(parallel_attention_mlp)
        self.apply_residual_connection_post_layernorm = bool(apply_residual_connection_post_layernorm)
        shared: dict[str, Any] = {
            "bias": bias,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "params_dtype": params_dtype,
            "device": device,
            "return_bias": not parallel_attention_mlp,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
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
        self.layernorm: torch.nn.Module | None = None
        if output_layernorm:
            kind = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = kind(
                hidden_size,
                layernorm_epsilon,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )

    def extra_repr(self) -> str:
        """Sizes, and what is not as usual (``reprs``)."""
        return described(self)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """Returns the shape and dtype of ``hidden_states``: h (s, b, H), (b, s, H) with "bshd", (t, H) with
        "thd".

        * ``self_attn_mask_type``, ``window_size``, ``bottom_right_diagonal`` and their ``enc_dec_`` twins
          override the constructor's.
        * ``encoder_output``: h, in the same format, of a decoder. ``enc_dec_attn_mask``: the
          ``attention_mask`` of the attention across, a pair with a padding mask. All that is about it is None
          for an encoder, ArgumentError otherwise.
        * ``attention_mask``, ``rotary_pos_emb``, ``cu_seqlens_q``, ``inference_params``,
          ``checkpoint_core_attention`` and the others: as ``MultiheadAttention.forward``, for the self
          attention; the attention across gets the score's bias, ALiBi's slopes and
          ``checkpoint_core_attention`` too, as in Transformer Engine. ``is_first_microbatch``: see
          ``Linear``.
        """
        options = options_of(
            core_attention_bias_type,
            core_attention_bias,
            alibi_slopes,
            cu_seqlens_q,
            cu_seqlens_kv,
            cu_seqlens_q_padded,
            cu_seqlens_kv_padded,
            max_seqlen_q,
            max_seqlen_kv,
            fast_zero_fill,
            pad_between_seqs,
        )
        named = {
            "attention_mask": attention_mask,
            "self_attn_mask_type": self_attn_mask_type,
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "inference_params": inference_params,
            "rotary_pos_emb": rotary_pos_emb,
            "is_first_microbatch": is_first_microbatch,
            "encoder_output": encoder_output,
            "enc_dec_attn_mask": enc_dec_attn_mask,
            "enc_dec_attn_mask_type": enc_dec_attn_mask_type,
            "enc_dec_window_size": enc_dec_window_size,
            "enc_dec_bottom_right_diagonal": enc_dec_bottom_right_diagonal,
        }
        given = {name: value for name, value in named.items() if value is not None}
        op, first, recomputed = "TransformerLayer", is_first_microbatch, checkpoint_core_attention
        compiled = torch.compiler.is_compiling()
        if not compiled and (given or options or recomputed is not False):
            check(op, CALLED, {**given, **options, "checkpoint_core_attention": recomputed})
        x = want_input(op, "hidden_states", hidden_states, self.hidden_size, self.attn_input_format)
        children: Any = self._modules
        attention, inter = children["self_attention"], self.inter_attention
        if inter is not None and encoder_output is None:
            raise ArgumentError(op, "encoder_output", None, "a tensor with layer_type 'decoder'")
        if inter is None and given:
            want_no_encoder(op, "a tensor", **{n: v for n, v in given.items() if n.startswith("enc")})
        own = options | {name: given[mine] for name, mine in _OWN.items() if mine in given}
        ahead = attention.settle(op, x, None, own, rotary_pos_emb, _OWN)
        if not compiled:
            part_of(op, "layernorm_mlp", children["layernorm_mlp"]).want_ready(x)
            want_like(self.layernorm, x)
        paths = own if ahead.core is None else ahead.core.beside, inference_params
        if self.training and self.drop_path_rate and self.attn_input_format == "thd" and not compiled:
            self._want_starts(x, sequence_starts(*paths))
        core: dict[str, Any] = {"options": own, "ahead": ahead, "checkpoint_core": recomputed}
        core_across: dict[str, Any] = {}
        if inter is not None:
            across = {name: options[name] for name in _CROSS_OPTIONS if name in options}
            across |= {name: given[mine] for name, mine in _ACROSS.items() if mine in given}
            beyond = inter.settle(op, x, encoder_output, across, None, _ACROSS)
            core_across = {"options": across, "ahead": beyond, "checkpoint_core": recomputed}
        return self._layer(x, first, core | {"rotary_pos_emb": rotary_pos_emb}, core_across, paths)

    def _layer(
        self, x: Tensor, first: bool | None, core: Mapping[str, Any], across: Mapping[str, Any], paths: Any
    ) -> Tensor:
        """The layer's output. ``core``, ``across``: what ``MultiheadAttention.branch`` is told; ``paths``:
        see ``_join``."""
        children: Any = self._modules
        attention, mlp, inter = children["self_attention"], children["layernorm_mlp"], self.inter_attention
        if self.parallel_attention_mlp:
            bias = "add" if attention.proj.use_bias else "none"
            out = as_branch(
                attention(x, is_first_microbatch=first, part={"bias": bias, "residual": True, **core})
            )
            beside = as_branch(mlp(out.residual, first, part={"bias": bias, "residual": True}))
            both = apply(add, spec_for("AddSpec"), {"a": out.y, "b": beside.y})["y"]
            return self._join(both, None, beside.residual, paths)

        post = self.apply_residual_connection_post_layernorm
        a = self._attend(attention, x, first, core, post and attention.input_layernorm, paths)
        if inter is not None:
            a = self._attend(inter, a, first, across, post, None)
        if not post and self._joins(paths, mlp):
            y = as_branch(mlp(a, first, part={"bias": "add" if mlp.use_bias else "none", "joins": True})).y
        else:
            stream, ask = _STREAMS[post]
            late = self._late_bias(mlp, mlp)
            out = as_branch(mlp(a, first, part={"bias": late, **ask}))
            y = self._join(out.y, mlp.fc2_bias if late == "deferred" else None, getattr(out, stream), paths)
        return y if self.layernorm is None else self.layernorm(y)

    def _attend(
        self,
        layer: MultiheadAttention,
        x: Tensor,
        first: bool | None,
        given: Mapping[str, Any],
        post: bool,
        paths: Any,
    ) -> Tensor:
        """x, or with ``post`` its norm, and what ``layer`` makes of it."""
        stream, ask = _STREAMS[post]
        proj: Any = layer._modules["proj"]
        if self._joins(paths, layer, proj):
            bias = "add" if proj.use_bias else "none"
            return as_branch(
                layer(x, is_first_microbatch=first, part={"bias": bias, "joins": stream, **given, **ask})
            ).y
        late = self._late_bias(layer, proj)
        out = as_branch(layer(x, is_first_microbatch=first, part={"bias": late, **given, **ask}))
        return self._join(out.y, layer.proj_bias if late == "deferred" else None, getattr(out, stream), paths)

    def _joins(self, paths: Any, *parts: Any) -> bool:
        """Whether a branch's last product adds the residual: nothing comes between, and nobody wants to see
        what the branch alone gives, or what one of its ``parts`` does."""
        if self.training and (self.hidden_dropout or (self.drop_path_rate and paths is not None)):
            return False
        if global_forward_hooks():
            return False
        for part in parts:
            if type(part) not in _JOINING or part._forward_hooks or "forward" in vars(part):
                return False
        return True

    def _late_bias(self, branch: MultiheadAttention | LayerNormMLP, last: Linear | LayerNormMLP) -> str:
        """Who adds a branch's last bias: dropout_add does ("deferred"; the product's backward makes its
        gradient), but not where the parameter may be there within the branch's call only."""
        if not last.use_bias:
            return "none"
        return "add" if has_foreign_code(branch) or has_foreign_code(last) else "deferred"

    def _want_starts(self, x: Tensor, starts: Tensor | None) -> None:
        """Fp8kitError for sequences that ``drop_path`` would refuse."""
        with on_behalf_of("TransformerLayer", starts="cu_seqlens_q"):
            like = {
                "x": x,
                "residual": x,
                "rng": TensorMeta((2,), torch.int64, x.device),
                **({} if starts is None else {"starts": starts}),
            }
            validate(
                drop_path,
                spec_for("DropPathSpec", self.hidden_size, self.drop_path_rate, self.attn_input_format),
                like,
            )
            if starts is not None and type(starts) is Tensor and starts.device.type == "cpu":
                check_sequences("drop_path", {"starts": as_view(starts)}, "starts", x.shape[0])

    def _join(
        self,
        branch: Tensor,
        bias: Tensor | None,
        residual: Any,
        paths: tuple[Mapping[str, Any], Any] | None = None,
    ) -> Tensor:
        """residual + dropout(branch + bias), samples dropped where ``paths`` are given: what
        ``sequence_starts`` is asked."""
        p = self.hidden_dropout if self.training else 0.0
        rate = self.drop_path_rate if self.training and paths is not None else 0.0
        residual = residual.to(branch.dtype)
        joined = branch
        if not rate or p or bias is not None:
            inputs = {
                "x": branch,
                "bias": None if bias is None else bias.detach().to(branch.dtype),
                "residual": None if rate else residual,
                "rng": next_rng(branch.device) if p else None,
            }
            joined = apply(dropout_add, spec_for("DropoutAddSpec", self.hidden_size, p, False), inputs)["y"]
        if not rate or paths is None:
            return joined
        inputs = {"x": joined, "residual": residual, "rng": next_rng(branch.device)}
        if self.attn_input_format == "thd":
            starts = sequence_starts(*paths)
            inputs["starts"] = None if starts is None else starts.to(branch.device)
        return apply(
            drop_path, spec_for("DropPathSpec", self.hidden_size, rate, self.attn_input_format), inputs
        )["y"]
