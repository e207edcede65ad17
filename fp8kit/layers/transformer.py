"""``TransformerLayer``: attention and MLP, each with its norm, its residual and its dropout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fp8kit.arguments import without_unknown
from fp8kit.errors import ArgumentError, on_behalf_of
from fp8kit.layers.attention_base import AttentionBase
from fp8kit.layers.attention_inputs import CROSS_DEFAULTS, core_options, sequence_starts, want_no_encoder
from fp8kit.layers.base import Init, child_name, picked
from fp8kit.layers.dot_product_attention import NO_WINDOW
from fp8kit.layers.fields import PartField
from fp8kit.layers.residual import residual_sum, want_arrangement
from fp8kit.ops.drop_path import drop_path
from fp8kit.ops.dropout_add import add, dropout_add
from fp8kit.ops.values import check_sequences

# what the cross-attention has in common with the layer's own
_CROSS_OPTIONS = (
    "softcap",
    "core_attention_bias_type",
    "core_attention_bias",
    "alibi_slopes",
    "fast_zero_fill",
)
# how sequences lie: the queries' arguments -> those of keys and values
_SEQUENCES = {
    "cu_seqlens_q": "cu_seqlens_kv",
    "cu_seqlens_q_padded": "cu_seqlens_kv_padded",
    "max_seqlen_q": "max_seqlen_kv",
}
# the core attention's arguments -> what the layer calls them: of its own attention, of the cross-attention
_OWN = {"attn_mask_type": "self_attn_mask_type", "qkv_format": "attn_input_format"}
_CROSS = {
    "attention_mask": "enc_dec_attn_mask",
    "attn_mask_type": "enc_dec_attn_mask_type",
    "window_size": "enc_dec_window_size",
    "bottom_right_diagonal": "enc_dec_bottom_right_diagonal",
}
# arguments that are those of the attentions, of the attentions and the MLP, and of the norm alone
_OF_ATTENTIONS = """kv_channels attention_dropout layernorm_epsilon layer_number num_gqa_groups
    fuse_qkv_params qkv_weight_interleaved rotary_pos_interleaved softcap softmax_type qk_norm_type
    qk_norm_eps qk_norm_before_rope qk_norm_learned softmax_scale seq_length micro_batch_size"""
_OF_BRANCHES = """init_method output_layer_init_method bias normalization zero_centered_gamma params_dtype
    device fuse_wgrad_accumulation get_rng_state_tracker tp_group tp_size sequence_parallel
    set_parallel_mode"""
# the norms after the branches
_NORMS = ("self_attention_norm", "inter_attention_norm", "mlp_norm")
# whether a residual starts after a branch's norm -> its name in ``Branch``, and how to ask for it
_STREAMS: dict[bool, tuple[str, dict[str, Any]]] = {
    False: ("residual", {"residual": True}),
    True: ("normed", {"return_norm": True}),
}


class TransformerLayer(AttentionBase):
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
      the cross-attention is not dropped, as there.
    * ``self_attn_mask_type``, ``window_size``, ``bottom_right_diagonal``, ``softcap``, ``softmax_type``,
      ``rotary_pos_interleaved``, ``qk_norm_type``, ``qk_norm_eps``, ``qk_norm_before_rope``: as
      ``MultiheadAttention``. ``attn_input_format``: "sbhd", "bshd" or "thd".
    * ``layer_type``: "encoder", or "decoder": e is ``encoder_output``, and ``enc_dec_attn_mask_type``,
      ``enc_dec_window_size``, ``enc_dec_bottom_right_diagonal`` are the second attention's. An encoder takes
      these three at their defaults only, ArgumentError otherwise: Transformer Engine ignores them.
    * ``apply_residual_connection_post_layernorm``: the residuals start after the norms. ``output_layernorm``:
      the norm of the self attention's input is left out (its residual starts at x then), and one of the
      layer's output added (child ``layernorm``).
    * ``parallel_attention_mlp``: y = x + dropout(self_attention(norm(x)) + mlp(norm'(x))); with neither of
      these two, for encoders.
    * ``norm_position``: "before" the branches, or "after" each, none of these three then ::

          y = x + dropout(norm(self_attention(x)))     children self_attention, self_attention_norm
          y = y + dropout(norm(mlp(y)))                children layernorm_mlp, without a norm, and mlp_norm

      (between them ``inter_attention`` and ``inter_attention_norm`` of a decoder), with ``norm_gain``, what
      the norms' factors start at (None: 1). FOG (Hernandez-Cano et al. 2025, arXiv:2505.20524) has them so,
      with 1 / sqrt(number of layers), "RMSNorm", ``qk_norm_type`` "RMSNorm", ``qk_norm_learned`` False,
      ``softmax_scale`` 0.125 and ``activation`` "xielu".
    * ``smooth_swiglu``: as ``LayerNormMLP``. ``softmax_scale``, ``qk_norm_learned``: as
      ``MultiheadAttention``.
    * ``init_method``, ``output_layer_init_method``: of qkv and fc1, of proj and fc2, functions that fill an
      array of the parameter's shape in place; None is normal(0, 0.023).
    * ``fuse_wgrad_accumulation``, ``fuse_qkv_params``, ``qkv_weight_interleaved``, ``zero_centered_gamma``,
      ``bias``, ``activation``, ``activation_params``, ``normalization``, ``layernorm_epsilon``,
      ``params_dtype``, ``device``, ``layer_number``, ``name``: as the children.
    * ``tp_group``, ``tp_size``, ``set_parallel_mode``, ``sequence_parallel``: as ``MultiheadAttention``; with
      the latter x and y are the rank's part of the sequence, their first dimension.
    * ``seq_length``, ``micro_batch_size``: accepted; in Transformer Engine they are hints for a warm-up, and
      there is none here. Others are Transformer Engine's: without effect, or at
      their defaults only (``layers.unsupported``: ``WITHOUT_EFFECT``, ``CONSTRUCTOR``).

    Raises ArgumentError for arguments out of their range, FormatError for a dtype, BackendError for a device,
    UnsupportedError for what fp8kit does not have.
    """

    layer_name = "TransformerLayer"
    self_attn_mask_type = PartField("self_attention", "attn_mask_type")
    window_size = PartField("self_attention", "window_size", NO_WINDOW)
    bottom_right_diagonal = PartField("self_attention", "bottom_right_diagonal")
    softcap = PartField("self_attention", "softcap", others=("inter_attention",))
    layer_number = PartField("self_attention", "layer_number", others=("inter_attention",))
    hidden_size: int
    hidden_dropout: float
    drop_path_rate: float
    attn_input_format: str
    parallel_attention_mlp: bool
    norm_position: str
    apply_residual_connection_post_layernorm: bool

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
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: Any = None,
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
        *,
        norm_position: str = "before",
        norm_gain: float | None = None,
        smooth_swiglu: str | None = None,
        softmax_scale: float | None = None,
        qk_norm_learned: bool = True,
    ) -> None:
        super().__init__()
        arguments, op, make = self.checked(locals()), self.layer_name, self.frontend
        self.keep(
            arguments,
            """hidden_size layer_type hidden_dropout drop_path_rate attn_input_format
            parallel_attention_mlp apply_residual_connection_post_layernorm norm_position name""",
        )
        decoder = layer_type == "decoder"
        if not decoder:
            want_no_encoder(
                op,
                self.array_name,
                CROSS_DEFAULTS,
                enc_dec_attn_mask_type=enc_dec_attn_mask_type,
                enc_dec_window_size=enc_dec_window_size,
                enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal,
            )
        want_arrangement(op, vars(arguments))
        before = self.norm_position == "before"
        self.take_group(arguments)
        shared = picked(arguments, _OF_BRANCHES) | {"return_bias": not parallel_attention_mlp}
        attention = partial(
            make.MultiheadAttention,
            hidden_size,
            num_attention_heads,
            qkv_format=attn_input_format,
            **picked(arguments, _OF_ATTENTIONS),
            **shared,
        )
        self.self_attention = attention(
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=before and not output_layernorm,
            name=child_name(name, "self_attention"),
        )
        self.inter_attention: Any = None
        if decoder:
            with on_behalf_of(op, **_CROSS):
                self.inter_attention = attention(
                    attn_mask_type=enc_dec_attn_mask_type,
                    window_size=enc_dec_window_size,
                    bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                    input_layernorm=before,
                    attention_type="cross",
                    name=child_name(name, "inter_attention"),
                )
        self.layernorm_mlp = make.LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            smooth_swiglu=smooth_swiglu,
            input_layernorm=before,
            name=child_name(name, "layernorm_mlp"),
            **shared,
        )
        norm = partial(
            make.LayerNorm if normalization == "LayerNorm" else make.RMSNorm,
            hidden_size,
            layernorm_epsilon,
            bool(sequence_parallel and self.tp_size > 1) or None,
            params_dtype=params_dtype,
            zero_centered_gamma=zero_centered_gamma,
            device=device,
        )
        self.layernorm: Any = norm() if output_layernorm else None
        if not before:
            gain = 1.0 if arguments.norm_gain is None else arguments.norm_gain
            self.self_attention_norm = norm(gain=gain)
            self.inter_attention_norm = norm(gain=gain) if decoder else None
            self.mlp_norm = norm(gain=gain)

    @without_unknown
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
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Any = None,
        alibi_slopes: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        cu_seqlens_q_padded: Any = None,
        cu_seqlens_kv_padded: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
        **unknown: Any,
    ) -> Any:
        """Returns an array of the shape and dtype of ``hidden_states``: h (s, b, H), (b, s, H) with "bshd",
        (t, H) with "thd".

        * ``self_attn_mask_type``, ``window_size``, ``bottom_right_diagonal`` and their ``enc_dec_`` twins
          override the constructor's.
        * ``encoder_output``: h, in the same format, of a decoder. ``enc_dec_attn_mask``: the
          ``attention_mask`` of the cross-attention, a pair with a padding mask. All that is about it is None
          for an encoder, ArgumentError otherwise.
        * ``attention_mask``, ``rotary_pos_emb``, ``cu_seqlens_q``, ``inference_params``,
          ``checkpoint_core_attention`` and the others: as ``MultiheadAttention.forward``, for the self
          attention; the cross-attention gets the cap, the score's bias, ALiBi's slopes and
          ``checkpoint_core_attention`` too, as in Transformer Engine. ``is_first_microbatch``: see
          ``Linear``.
        * A decoder with "thd", or whose cross-attention has a padding mask and no ``enc_dec_attn_mask``:
          ``cu_seqlens_q`` and its kin say how its own sequences lie, for both attentions, ``cu_seqlens_kv``
          and its kin how the encoder's do.

        Raises ShapeError, FormatError and BackendError for arrays that do not fit, ArgumentError and
        UnsupportedError for other arguments.
        """
        if unknown:
            self.refuse_names(unknown)
        own = core_options(
            attention_mask,
            self_attn_mask_type,
            window_size,
            bottom_right_diagonal,
            softcap,
            inference_params,
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
            thd_attention_policies,
            thd_attention_policy_dispatch,
        )
        of_encoder = {
            "encoder_output": encoder_output,
            "enc_dec_attn_mask": enc_dec_attn_mask,
            "enc_dec_attn_mask_type": enc_dec_attn_mask_type,
            "enc_dec_window_size": enc_dec_window_size,
            "enc_dec_bottom_right_diagonal": enc_dec_bottom_right_diagonal,
        }
        of_encoder = {name: value for name, value in of_encoder.items() if value is not None}
        beside = {
            "rotary_pos_emb": rotary_pos_emb,
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
        }
        named = {_OWN.get(name, name): value for name, value in own.items()}
        self.check_arguments({**named, **of_encoder, **beside})
        op, form, recomputed = self.layer_name, self.attn_input_format, checkpoint_core_attention
        x = self.as_input("hidden_states", hidden_states, self.hidden_size, form)
        attention, inter = self.parts["self_attention"], self.inter_attention
        if inter is None:
            want_no_encoder(op, self.array_name, **of_encoder)
        source = encoder_output
        if inter is not None:
            if source is None:
                raise ArgumentError(
                    op, "encoder_output", None, f"{self.array_name} with layer_type 'decoder'"
                )
            source = self.as_input("encoder_output", source, self.hidden_size, form)
        given, shared = own, inter is not None and form == "thd"
        if inter is not None and not shared and enc_dec_attn_mask is None:
            attends = getattr(inter, "parts", {}).get("core_attention")
            shared = "padding" in str(enc_dec_attn_mask_type or getattr(attends, "attn_mask_type", None))
        if shared:
            own = {name: value for name, value in own.items() if name not in _SEQUENCES.values()}
            own |= {kv: own[q] for q, kv in _SEQUENCES.items() if q in own}
        prepared = attention.prepare(op, x, None, own, rotary_pos_emb, _OWN)
        if not self.is_compiling():
            for name in ("layernorm_mlp", "layernorm", *(_NORMS if self.norm_position == "after" else ())):
                self.check_part(op, name, x)
        paths = own if prepared.core is None else prepared.core.beside, inference_params
        if self.training and self.drop_path_rate and form == "thd" and not self.is_compiling():
            self._check_starts(x, sequence_starts(*paths))
        core = {"options": own, "prepared": prepared, "checkpoint_core": recomputed}
        core["rotary_pos_emb"] = rotary_pos_emb
        cross: dict[str, Any] = {}
        if inter is not None:
            lengths = (*_SEQUENCES, *_SEQUENCES.values(), "pad_between_seqs") if shared else ()
            asked = *_CROSS_OPTIONS, *lengths
            of_cross = {name: given[name] for name in asked if name in given}
            of_cross |= {name: of_encoder[mine] for name, mine in _CROSS.items() if mine in of_encoder}
            prepared = inter.prepare(op, x, source, of_cross, None, _CROSS)
            cross = {"options": of_cross, "prepared": prepared, "checkpoint_core": recomputed}
        return self._layer(x, is_first_microbatch, core, cross, paths)

    def _layer(
        self, x: Any, first: bool | None, core: Mapping[str, Any], cross: Mapping[str, Any], paths: Any
    ) -> Any:
        """Returns the layer's output. ``core``, ``cross``: further arguments of
        ``MultiheadAttention.compute``; ``paths``: see ``_add_residual``."""
        parts: Mapping[str, Any] = self.parts
        attention, mlp, inter = parts["self_attention"], parts["layernorm_mlp"], self.inter_attention
        if self.parallel_attention_mlp:
            out = self.call_branch(attention, x, first, residual=True, **core)
            other = self.call_branch(mlp, out.residual, first, residual=True)
            both = self.call(add, self.spec_for("AddSpec"), {"a": out.y, "b": other.y})["y"]
            return self._add_residual(both, None, other.residual, paths)

        post = self.apply_residual_connection_post_layernorm
        norms = [getattr(self, name) if self.norm_position == "after" else None for name in _NORMS]
        own = post and attention.input_layernorm
        x = self._join(attention, attention.parts["proj"], x, first, core, own, paths, norms[0])
        if inter is not None:
            x = self._join(inter, inter.parts["proj"], x, first, cross, post, None, norms[1])
        y = self._join(mlp, mlp, x, first, {}, post, paths, norms[2])
        return y if self.layernorm is None else self.layernorm(y)

    def _join(
        self,
        branch: Any,
        last: Any,
        x: Any,
        first: bool | None,
        more: Mapping[str, Any],
        post: bool,
        paths: Any,
        norm: Any,
    ) -> Any:
        """x, or with ``post`` its norm, after a branch, whose last product is that of ``last``; ``norm``: the
        branch's own, or None. ``more``: further arguments of its ``compute``."""
        if norm is not None:
            y = self.call_branch(branch, x, first, **more).y
            return self._add_residual(norm(y), None, x, paths)
        (stream, ask), is_mlp = _STREAMS[post], branch is last
        if not (post and is_mlp) and self._may_fuse(paths, branch, last):
            ask = {"fused_residual": True} if is_mlp else {"fused_residual": stream, **ask}
            return self.call_branch(branch, x, first, **more, **ask).y
        bias = None
        if not (self.has_hooks(branch) or self.has_hooks(last)) and last.use_bias:
            # dropout_add adds it, and the product's backward makes its gradient; hooks may supply the
            # parameter within the branch's call only
            bias = "deferred"
        out = self.call_branch(branch, x, first, bias=bias, **more, **ask)
        unadded = getattr(branch, "fc2_bias" if is_mlp else "proj_bias") if bias == "deferred" else None
        return self._add_residual(out.y, unadded, getattr(out, stream), paths)

    def _may_fuse(self, paths: Any, *parts: Any) -> bool:
        """Whether a branch's last product adds the residual: no dropout lies between, and no hook reads the
        branch's own result or that of one of its ``parts``."""
        if self.training and (self.hidden_dropout or (self.drop_path_rate and paths is not None)):
            return False
        return self.may_fuse(*parts)

    def _check_starts(self, x: Any, starts: Any) -> None:
        """Check the sequences as ``drop_path`` does: ShapeError, FormatError, and on the CPU
        ArgumentError."""
        with on_behalf_of(self.layer_name, starts="cu_seqlens_q_padded"):
            inputs = {"x": x, "residual": x, "starts": starts}
            spec = self.spec_for(
                "DropPathSpec", self.hidden_size, self.drop_path_rate, self.attn_input_format
            )
            self.check_call(drop_path, spec, inputs, rng=True)
            views = self.host_views({} if starts is None else {"starts": starts})
            check_sequences("drop_path", views, "starts", x.shape[0])

    def _add_residual(
        self, branch: Any, bias: Any, residual: Any, paths: tuple[Mapping[str, Any], Any] | None
    ) -> Any:
        """residual + dropout(branch + bias), samples dropped where ``paths`` are: the arguments of
        ``sequence_starts``."""
        p = self.hidden_dropout if self.training else 0.0
        rate = self.drop_path_rate if self.training and paths is not None else 0.0
        residual = self.same_dtype(residual, branch)

        def add(x: Any, bias: Any, residual: Any) -> Any:
            bias = None if bias is None else self.detached(bias, x)
            spec = self.spec_for("DropoutAddSpec", self.hidden_size, p, False)
            return self.call(dropout_add, spec, {"x": x, "bias": bias, "residual": residual}, rng=bool(p))[
                "y"
            ]

        def drop(x: Any, residual: Any) -> Any:
            inputs = {"x": x, "residual": residual}
            if paths is not None and self.attn_input_format == "thd":
                starts = sequence_starts(*paths)
                inputs["starts"] = None if starts is None else self.constant("cu_seqlens_q", starts, branch)
            spec = self.spec_for("DropPathSpec", self.hidden_size, rate, self.attn_input_format)
            return self.call(drop_path, spec, inputs, rng=True)["y"]

        return residual_sum(branch, bias, residual, p, rate, add, drop)
