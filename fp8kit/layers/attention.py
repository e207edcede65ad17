"""``MultiheadAttention``: attention with its projections (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from fp8kit.arguments import without_unknown
from fp8kit.errors import ArgumentError, BackendError, FormatError, ShapeError, on_behalf_of
from fp8kit.layers.attention_heads import AttentionHeads
from fp8kit.layers.attention_inputs import PreparedCall, core_options, layout_of, normed_and_rotated
from fp8kit.layers.base import Branch, Init, child_name, picked
from fp8kit.layers.dot_product_attention import CORE_SETTINGS, NO_WINDOW
from fp8kit.layers.fields import PartField
from fp8kit.layers.sequence_policies import POLICIES
from fp8kit.layers.sequence_policies import check as check_policies
from fp8kit.lru import LRU, SHAPES
from fp8kit.ops.rope import rope

_NO_NAMES: Mapping[str, str] = {}
# arguments that are those of the core attention
_OF_CORE = """num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type
    window_size bottom_right_diagonal softcap layer_number attention_type softmax_type softmax_scale device
    get_rng_state_tracker tp_group tp_size"""
# all that a call of the core attention without options depends on, beside its input's shape, dtype and device
_SETTINGS = attrgetter(*CORE_SETTINGS.split(), "training")
# child -> what the logs of Transformer Engine's debug features call it
_DEBUG_NAMES = {
    "layernorm_qkv": "layernorm_linear_qkv",
    "qkv": "linear_qkv",
    "layernorm_query": "layernorm_linear_q",
    "query_layer": "linear_q",
    "key_value": "linear_kv",
}
_WRAPPED = "qkv_format", "kv_channels", "num_attention_heads", "num_gqa_groups"  # asked of the core attention
_PREPARED: LRU[Any, PreparedCall] = LRU(SHAPES, name="attention calls")  # checked ones


class MultiheadAttention(AttentionHeads):
    """proj(attention(projections of x)).

    * ``hidden_size`` H, ``num_attention_heads`` h, ``kv_channels`` d (None: H / h), ``num_gqa_groups`` g
      (None: h).
    * ``attention_type``: "self", or "cross": the queries come from ``hidden_states``, keys and values from
      ``encoder_output``.
    * ``input_layernorm``: a norm before the queries' projection. Children: self, ``layernorm_qkv``
      (LayerNormLinear) or ``qkv`` (Linear); cross, ``layernorm_query`` or ``query_layer``, and ``key_value``.
    * ``fuse_qkv_params``: False keeps ``query_weight``, ``key_weight``, ``value_weight`` as separate
      parameters (but ``query_layer`` has one ``weight``, as in Transformer Engine); True makes one
      ``weight``. Its rows then go group by group, each the h / g queries' heads, the key's and the value's
      (``qkv_weight_interleaved``; cross: each k, v), or all of q, then k, then v.
    * ``qk_norm_type``: "L2Normalization", "RMSNorm" or "LayerNorm" of each query's and each key's d features,
      with ``qk_norm_eps``: children ``q_norm``, ``k_norm``, their parameters (d,) in ``params_dtype``. It
      comes after the rotary embedding, or before it (``qk_norm_before_rope``). ``qk_norm_learned``: False
      keeps their parameters as they start, gains of 1.
    * ``softmax_scale``: what scores are multiplied by; None: 1 / sqrt(d).
    * ``init_method``, ``output_layer_init_method``: for the projections in and out.
    * ``return_bias``: proj's bias is returned, not added. ``return_layernorm_output``: also return norm(x).
    * ``rotary_pos_interleaved``: how ``rotary_pos_emb`` pairs features, see ``RotaryPositionEmbedding``.
    * ``tp_group``, ``tp_size``, ``sequence_parallel``: as ``Linear``; with several ranks
      ``set_parallel_mode`` is True: each has a part of the heads, the projections in are split as "column",
      proj as "row".
    * ``attention_dropout``, ``attn_mask_type``, ``window_size``, ``bottom_right_diagonal``, ``softcap``,
      ``softmax_type``, ``qkv_format``: as ``DotProductAttention`` (child ``core_attention``). Others as
      ``Linear`` and ``LayerNormLinear``.
    * ``seq_length``, ``micro_batch_size``: accepted; in Transformer Engine they are hints for a warm-up, and
      there is none here.

    Raises ArgumentError for arguments out of their range, FormatError for a dtype, BackendError for a device,
    UnsupportedError for what fp8kit does not have.
    """

    layer_name = "MultiheadAttention"
    attn_mask_type = PartField("core_attention", "attn_mask_type")
    window_size = PartField("core_attention", "window_size", NO_WINDOW)
    bottom_right_diagonal = PartField("core_attention", "bottom_right_diagonal")
    softcap = PartField("core_attention", "softcap")
    layer_number = PartField("core_attention", "layer_number")
    hidden_size: int
    input_layernorm: bool
    attention_type: str
    qk_norm_before_rope: bool

    @on_behalf_of("MultiheadAttention", eps="layernorm_epsilon")
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Any = None,
        sequence_parallel: bool = False,
        params_dtype: Any = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: Any = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        softmax_scale: float | None = None,
        qk_norm_learned: bool = True,
    ) -> None:
        super().__init__()
        arguments, op, make = self.checked(locals()), self.layer_name, self.frontend
        self.keep(
            arguments,
            """hidden_size input_layernorm return_bias return_layernorm_output attention_type
            rotary_pos_interleaved qk_norm_before_rope name""",
        )
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ArgumentError(
                op,
                "hidden_size",
                hidden_size,
                f"a multiple of num_attention_heads ({num_attention_heads}), or kv_channels, a head's size",
            )
        if kv_channels is None:
            arguments.kv_channels = arguments.hidden_size // arguments.num_attention_heads
        own_name = child_name(name, "core_attention")
        core = make.DotProductAttention(**picked(arguments, _OF_CORE), name=own_name)
        self.take_group(arguments)
        if self.tp_size > 1 and not arguments.set_parallel_mode:
            wanted = "True with several ranks: each has a part of the heads"
            raise ArgumentError(op, "set_parallel_mode", False, wanted)
        split = self.tp_size > 1
        # ranks have parts of the sequence around the attention, which has it all
        self.sequence_parts = self.tp_size if arguments.sequence_parallel else 1
        channels = core.kv_channels
        heads, groups = core.num_attention_heads * self.tp_size, core.num_gqa_groups * self.tp_size
        cross = attention_type == "cross"
        if self.return_layernorm_output and not self.input_layernorm:
            raise ArgumentError(op, "return_layernorm_output", True, "input_layernorm=True beside it")
        of_norms = picked(arguments, "params_dtype device") | {"learned": arguments.qk_norm_learned}
        self.q_norm, self.k_norm = self._qk_norms(qk_norm_type, channels, qk_norm_eps, of_norms)
        # separate weights are always packed as q, k, v
        self._interleaved = bool(fuse_qkv_params and qkv_weight_interleaved)
        # The core attention takes a packed projection as it is, but for groups of unlike parts; norms want
        # rows of one head.
        self._separate = self.q_norm is not None or (self._interleaved and (cross or groups != heads))

        q, kv = heads * channels, groups * channels
        rows = {"query": q, "key": kv, "value": kv}
        shared = picked(
            arguments,
            """bias params_dtype device fuse_wgrad_accumulation get_rng_state_tracker tp_group tp_size
            sequence_parallel""",
        )

        def sized(child: str, *parts: str) -> dict[str, Any]:
            sizes = {part: rows[part] for part in parts}
            whole = fuse_qkv_params or child == "query_layer"
            return {
                "out_features": sum(sizes.values()),
                "init_method": init_method,
                "parameters_split": None if whole else sizes,
                "name": child_name(name, child),
                "parallel_mode": "column" if split else None,
            } | shared

        kind = make.Linear
        self._first = "query_layer" if cross else "qkv"
        norm: dict[str, Any] = {}
        if self.input_layernorm:
            kind, self._first = make.LayerNormLinear, "layernorm_query" if cross else "layernorm_qkv"
            norm = {"eps": layernorm_epsilon, **picked(arguments, "normalization zero_centered_gamma")}
        first = sized(self._first, *(("query",) if cross else rows))
        setattr(self, self._first, kind(hidden_size, **first, **norm))
        self.key_value = make.Linear(hidden_size, **sized("key_value", "key", "value")) if cross else None
        for child in (self._first, *(["key_value"] if cross else [])):
            getattr(self, child).debug_name = child_name(name, _DEBUG_NAMES[child])
        if split and fuse_qkv_params and not self._interleaved:
            packed: Any = self.key_value if cross else getattr(self, self._first)
            blocks = (1, 1) if cross else (heads // groups, 1, 1)
            for parameter in ("weight", "bias") if packed.use_bias else ("weight",):
                packed.mark_parameter(parameter, 0, False, blocks)
        self.core_attention = core
        init = output_layer_init_method
        shared["parallel_mode"] = "row" if split else None
        self.proj = make.Linear(q, hidden_size, init_method=init, name=child_name(name, "proj"), **shared)

    @without_unknown
    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        encoder_output: Any = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
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
        *,
        part: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> Any:
        """Attend.

        * ``hidden_states``: h (s, b, H), (b, s, H) with "bshd", (t, H) with "thd". ``encoder_output``:
          likewise, with "cross" and only there.
        * ``checkpoint_core_attention``: what the core attention saves for backward is computed once more
          there, the same bits.
        * ``inference_params``: handed to the core attention; its ``rope_starts(batch)``, int32 (b,), are the
          positions at which ``rotary_pos_emb`` starts, its ``cu_seqlens_q``, int32 (b + 1,), the lengths of
          "thd".
        * ``rotary_pos_emb``: angles from ``RotaryPositionEmbedding``, or a pair of them for queries and keys,
          which are rotated by them.
        * ``attention_mask``, ``attn_mask_type``, ``cu_seqlens_q`` and the others of
          ``DotProductAttention.forward``: as there.

        Returns y like ``hidden_states``, or a tuple (y, bias where ``return_bias``, norm(x) where
        ``return_layernorm_output``). Raises ShapeError, FormatError and BackendError for arrays that do not
        fit, ArgumentError and UnsupportedError for other arguments. ``part``: for the layer that this is a
        part of, see ``compute``.
        """
        if unknown:
            self.refuse_names(unknown)
        # the layer that this is a part of calls, so that hooks run; it has checked what is checked here
        if part is not None:
            return self.compute(hidden_states, is_first_microbatch, **part)
        op, cross = self.layer_name, self.attention_type == "cross"
        options = core_options(
            attention_mask,
            attn_mask_type,
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
        beside = {
            "encoder_output": encoder_output,
            "rotary_pos_emb": rotary_pos_emb,
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
        }
        self.check_arguments({**options, **beside})
        form = self.own_core().qkv_format
        x = self.as_input("hidden_states", hidden_states, self.hidden_size, form)
        if (encoder_output is not None) != cross:
            got, wanted = ("None", self.array_name) if cross else (self.array_name, "None")
            raise ArgumentError(op, "encoder_output", got, f"{wanted} with {self.attention_type} attention")
        source = encoder_output
        if source is not None:
            source = self.as_input("encoder_output", source, self.hidden_size, form)
        prepared = self.prepare(op, x, source, options, rotary_pos_emb)
        out = self.compute(
            x,
            is_first_microbatch,
            options,
            prepared,
            "none" if self.return_bias else None,
            checkpoint_core_attention,
            return_norm=self.return_layernorm_output,
            rotary_pos_emb=rotary_pos_emb,
        )
        return self.returned(out.y, "proj_bias", out.normed)

    @property
    def proj_bias(self) -> Any:
        """The output projection's bias, None where there is none."""
        return self.proj.bias

    def own_core(self) -> Any:
        """The core attention, or what wraps it. ArgumentError for another module in its place."""
        core = self.parts["core_attention"]
        own = isinstance(core, self.frontend.DotProductAttention)
        if not own and not all(hasattr(core, name) for name in _WRAPPED):
            wanted = "a DotProductAttention, a subclass, or a wrapper that shows its attributes"
            raise ArgumentError(self.layer_name, "core_attention", f"a {type(core).__name__}", wanted)
        return core

    def prepare(
        self,
        operation: str,
        x: Any,
        source: Any,
        options: Mapping[str, Any],
        rotary_pos_emb: Any,
        names: Mapping[str, str] = _NO_NAMES,
    ) -> PreparedCall:
        """Resolve and check all of a call before its first projection runs: ``source``, which is an encoder's
        output, ``options`` of the core attention, the angles. Raises what ``forward`` raises, with nothing
        changed; ``names``: what ``operation`` calls arguments that have another name there."""
        if self.is_compiling():
            return PreparedCall(None, source, None)
        core = self.own_core()
        if source is not None:
            self._check_source(operation, x, source)
        if not self.has_hooks(self):
            self.check_part(operation, self._first, x)
            if source is not None:
                self.check_part(operation, "key_value", x)
            self.check_part(operation, "proj", x)
            if self._separate:
                self.check_part(operation, "q_norm", x)
                self.check_part(operation, "k_norm", x)
        if POLICIES in options and options[POLICIES] is not None:
            with on_behalf_of(operation, **names):
                check_policies(core, options, x)
            return PreparedCall(None, source, None)
        plain = not options and source is None and rotary_pos_emb is None
        key: Any = None
        if plain and type(core) is self.frontend.DotProductAttention:
            how = core.attention_quantization()
            own = *_SETTINGS(core), self._separate, self._interleaved, self.is_deterministic(), how
            own = *own, self.sequence_parts, core.context
            key = x.shape[:-1], self.call_dtype(x), x.device, *own
            known = _PREPARED.get(key)
            if known is not None:
                return known
        with on_behalf_of(operation, layers="hidden_states", **names):
            found = self._prepared(x, source, options, rotary_pos_emb)
        assert found.core is not None
        return found if key is None or found.core.beside else _PREPARED.put(key, found)

    def _check_source(self, operation: str, x: Any, source: Any) -> None:
        """ShapeError, BackendError or FormatError for an encoder's output that does not go with ``x``."""
        at = self.core_attention.qkv_format.find("b")
        if at >= 0 and source.shape[at] != x.shape[at]:
            got, wanted = f"shape {tuple(source.shape)}", f"a batch of {x.shape[at]}, as hidden_states"
            raise ShapeError(operation, "encoder_output", got, wanted)
        if source.device != x.device:
            got, wanted = f"device {source.device}", f"device {x.device}, as hidden_states"
            raise BackendError(operation, "encoder_output", got, wanted)
        if self.call_dtype(source) is not self.call_dtype(x):
            got, wanted = (str(getattr(tensor.dtype, "name", tensor.dtype)) for tensor in (source, x))
            raise FormatError(operation, "encoder_output", got, f"{wanted}, as hidden_states")

    def _prepared(self, x: Any, source: Any, options: Mapping[str, Any], rotary_pos_emb: Any) -> PreparedCall:
        core, dtype, shapes = self.core_attention, self.call_dtype(x), self._projected(x, source)
        stand_ins = {name: self.stand_in(shape, dtype, x.device) for name, shape in shapes.items()}
        layout, names = layout_of(self.layer_name, stand_ins)
        needs: tuple[str, ...] = ()
        if options.get("inference_params") is not None and core.training and self.is_grad_enabled():
            used = (x, *getattr(self, self._first).parameters())
            needs = tuple(names)[:1] if any(tensor.requires_grad for tensor in used) else ()
        layers = {name: stand_ins[argument] for name, argument in names.items()}
        resolved = core.resolve(
            layout, layers, {**options, "qkv_interleave_dim": self._interleave_dim}, needs, True
        )
        rotations = {} if rotary_pos_emb is None else self._rotations(stand_ins, rotary_pos_emb, options)
        return PreparedCall(resolved, source, rotations)

    def compute(
        self,
        x: Any,
        is_first_microbatch: bool | None,
        options: Mapping[str, Any],
        prepared: PreparedCall,
        bias: str | None = None,
        checkpoint_core: bool = False,
        residual: bool = False,
        return_norm: bool = False,
        rotary_pos_emb: Any = None,
        fused_residual: str | None = None,
    ) -> Branch:
        """y, and "residual", the residual stream, and "normed", norm(x), where asked for, one of which proj's
        product adds to y where it is the ``fused_residual``; ``options``: the core attention's, and
        ``prepared`` what ``prepare`` returned for them and ``rotary_pos_emb``; ``bias``: proj's, see
        ``Linear.compute``."""
        parts: Mapping[str, Any] = self.parts
        first, core, source = parts[self._first], parts["core_attention"], prepared.source
        micro = is_first_microbatch
        if self.input_layernorm:
            out = self.call_branch(first, x, micro, residual=residual, return_norm=return_norm)
        else:
            out = Branch(self.call_part(first, x, micro), x)
        layers = {"qkv_layer" if source is None else "query_layer": out.y}
        if source is not None:
            key_value = parts["key_value"]
            layers["kv_layer"] = self.call_part(key_value, source, micro)
        if self._separate:
            layers = self._split(layers)

        def rotated(found: Mapping[str, Any]) -> dict[str, Any]:
            rotations = prepared.rotations
            if rotations is None:
                rotations = self._rotations(found, rotary_pos_emb, options)
            changed = {
                name: self.call(rope, spec, {"x": found[name], **beside})["y"]
                for name, (spec, beside) in rotations.items()
            }
            return {**found, **changed}

        if self._separate or rotary_pos_emb is not None:
            rotate = None if rotary_pos_emb is None else rotated
            layers = normed_and_rotated(layers, self._normed, rotate, self.qk_norm_before_rope)
        call, arguments = core, dict(options)
        if self.shows_heads(core):
            call = partial(core, *self.heads_of(layers))
        else:
            arguments |= {**layers, "qkv_interleave_dim": self._interleave_dim}
            if prepared.core is not None:
                arguments["prepared"] = prepared.core
        o = self.call_checkpointed(call, **arguments) if checkpoint_core else call(**arguments)
        asked: dict[str, Any] = {"bias": bias}
        if fused_residual is not None:
            asked["residual"] = self.same_dtype(getattr(out, fused_residual), o)
        return Branch(self.call_part(parts["proj"], o, micro, **asked), out.residual, out.normed)
