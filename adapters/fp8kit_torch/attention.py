"""``MultiheadAttention``: attention with its projections (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, BackendError, FormatError, ShapeError, on_behalf_of
from fp8kit.layers.attention_inputs import (
    LAYERS,
    PARTS,
    QK_NORMS,
    Ahead,
    layout_of,
    normed_and_turned,
    pair_of,
    projected,
    turning,
)
from fp8kit.lru import LRU
from fp8kit.ops.rope import rope as rotate  # ``rope`` here is a module of Transformer Engine
from fp8kit.ops.split_heads import split_heads
from fp8kit_torch.arguments import (
    CONSTRUCTOR,
    autocast_dtype,
    has_foreign_code,
    options_of,
    positive,
    refuse,
    want_input,
    want_like,
)
from fp8kit_torch.bound import TensorMeta, validate
from fp8kit_torch.call import apply
from fp8kit_torch.checks import CONSTRUCTED, check
from fp8kit_torch.dot_product_attention import CALLED, DotProductAttention, one_of
from fp8kit_torch.inference import InferenceParams
from fp8kit_torch.library import policy_now
from fp8kit_torch.linear import Linear
from fp8kit_torch.module import Branch, as_branch, part_of
from fp8kit_torch.norm import L2Normalization, LayerNorm, RMSNorm
from fp8kit_torch.norm_linear import LayerNormLinear
from fp8kit_torch.parameters import Init
from fp8kit_torch.recompute import checkpoint
from fp8kit_torch.reprs import described
from fp8kit_torch.rope import angles, check_turns
from fp8kit_torch.specs import spec_for
from fp8kit_torch.te_compat.methods import TransformerEngineMethods

_NO_NAMES: Mapping[str, str] = {}
# all that a call of the core attention without options depends on, beside its input's shape, dtype and place
_SETTINGS = attrgetter(
    "num_attention_heads",
    "kv_channels",
    "num_gqa_groups",
    "qkv_format",
    "attn_mask_type",
    "window_size",
    "bottom_right_diagonal",
    "softmax_scale",
    "softmax_type",
    "attention_dropout",
    "training",
)
_PREPARED: LRU[Any, Ahead] = LRU(1024)  # such calls, once they were checked


class MultiheadAttention(TransformerEngineMethods, torch.nn.Module):
    """proj(attention(projections of x)).

    * ``hidden_size`` H, ``num_attention_heads`` h, ``kv_channels`` d (None: H / h), ``num_gqa_groups`` g
      (None: h).
    * ``attention_type``: "self", or "cross": the queries come from ``hidden_states``, keys and values from
      ``encoder_output``.
    * ``input_layernorm``: a norm before the queries' projection. Children: self, ``layernorm_qkv``
      (LayerNormLinear) or ``qkv`` (Linear); cross, ``layernorm_query`` or ``query_layer``, and ``key_value``.
    * ``fuse_qkv_params``: False keeps ``query_weight``, ``key_weight``, ``value_weight`` apart (but
      ``query_layer`` has one ``weight``, as in Transformer Engine); True makes one ``weight``. Its rows then
      go group by group, each the h / g queries' heads, the key's and the value's (``qkv_weight_interleaved``;
      across: each k, v), or all of q, then k, then v.
    * ``qk_norm_type``: "L2Normalization", "RMSNorm" or "LayerNorm" of each query's and each key's d features,
      with ``qk_norm_eps``: children ``q_norm``, ``k_norm``, their parameters (d,) in ``params_dtype``. It
      comes after the rotary embedding, or before it (``qk_norm_before_rope``).
    * ``init_method``, ``output_layer_init_method``: for the projections in and out.
    * ``return_bias``: proj's bias is returned, not added. ``return_layernorm_output``: also return norm(x).
    * ``rotary_pos_interleaved``: how ``rotary_pos_emb`` pairs features, see ``RotaryPositionEmbedding``.
    * ``attention_dropout``, ``attn_mask_type``, ``window_size``, ``bottom_right_diagonal``, ``softmax_type``,
      ``qkv_format``: as ``DotProductAttention`` (child ``core_attention``). Others as ``Linear`` and
      ``LayerNormLinear``.
    * ``seq_length``, ``micro_batch_size``: accepted; in Transformer Engine they are hints for a warm-up, and
      there is none here.
    """

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
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Any = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
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
    ) -> None:
        op = "MultiheadAttention"
        check(op, CONSTRUCTED, locals())
        super().__init__()
        refuse(op, CONSTRUCTOR[op], locals())
        positive(op, hidden_size=hidden_size, num_attention_heads=num_attention_heads)
        positive(
            op,
            **{
                n: v
                for n, v in (("seq_length", seq_length), ("micro_batch_size", micro_batch_size))
                if v is not None
            },
        )
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ArgumentError(
                op, "hidden_size", hidden_size, f"a multiple of {num_attention_heads} heads, or kv_channels"
            )
        channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        core = DotProductAttention(
            num_attention_heads,
            channels,
            num_gqa_groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            bottom_right_diagonal,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_type=softmax_type,
            device=device,
        )
        cross, groups = attention_type == "cross", core.num_gqa_groups
        self.input_layernorm, self.return_bias = bool(input_layernorm), bool(return_bias)
        self.return_layernorm_output, self.name, self.layer_number = (
            bool(return_layernorm_output),
            name,
            layer_number,
        )
        self.attention_type, self.rotary_pos_interleaved = attention_type, bool(rotary_pos_interleaved)
        self.qk_norm_before_rope = bool(qk_norm_before_rope)
        if self.return_layernorm_output and not self.input_layernorm:
            raise ArgumentError(op, "return_layernorm_output", True, "input_layernorm=True beside it")
        self.q_norm, self.k_norm = _qk_norms(op, qk_norm_type, channels, qk_norm_eps, params_dtype, device)
        # weights kept apart are always joined as q, k, v
        self._interleaved = bool(fuse_qkv_params and qkv_weight_interleaved)
        # The core attention takes a packed projection as it is, but for groups of unlike parts; norms want
        # rows of one head.
        self._apart = self.q_norm is not None or (
            self._interleaved and (cross or groups != num_attention_heads)
        )

        q, kv = num_attention_heads * channels, groups * channels
        split = {"query": q, "key": kv, "value": kv}
        shared: dict[str, Any] = {
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }

        def sized(child: str, *parts: str) -> dict[str, Any]:
            sizes = {part: split[part] for part in parts}
            whole = fuse_qkv_params or child == "query_layer"
            return {
                "out_features": sum(sizes.values()),
                "init_method": init_method,
                "parameters_split": None if whole else sizes,
                "name": None if name is None else f"{name}.{child}",
            } | shared

        self._first = {
            (False, False): "qkv",
            (False, True): "layernorm_qkv",
            (True, False): "query_layer",
            (True, True): "layernorm_query",
        }[cross, self.input_layernorm]
        first = sized(self._first, *(("query",) if cross else split))
        if self.input_layernorm:
            first |= {
                "eps": layernorm_epsilon,
                "normalization": normalization,
                "zero_centered_gamma": zero_centered_gamma,
            }
        setattr(
            self, self._first, (LayerNormLinear if self.input_layernorm else Linear)(hidden_size, **first)
        )
        self.key_value: Linear | None = (
            Linear(hidden_size, **sized("key_value", "key", "value")) if cross else None
        )
        self.core_attention = core
        self.proj = Linear(
            q,
            hidden_size,
            init_method=output_layer_init_method,
            name=None if name is None else f"{name}.proj",
            **shared,
        )

    def extra_repr(self) -> str:
        """Sizes, and what is not as usual (``reprs``)."""
        return described(self)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
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
        *,
        part: Mapping[str, Any] | None = None,
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
          which are turned by them.
        * ``attention_mask``, ``attn_mask_type``, ``cu_seqlens_q`` and the others of
          ``DotProductAttention.forward``: as there.

        Returns y like ``hidden_states``, or a tuple (y, bias where ``return_bias``, norm(x) where
        ``return_layernorm_output``). ``part``: for the layer that this is a part of, see ``branch``.
        """
        # the layer that this is a part of calls, so that hooks run; it has asked for what is asked here
        if part is not None:
            return self.branch(hidden_states, is_first_microbatch, **part)
        op = "MultiheadAttention"
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
            "attn_mask_type": attn_mask_type,
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "inference_params": inference_params,
        }
        options |= {name: value for name, value in named.items() if value is not None}
        if not torch.compiler.is_compiling():
            beside = {"encoder_output": encoder_output, "rotary_pos_emb": rotary_pos_emb}
            flags = {"is_first_microbatch": is_first_microbatch}
            flags["checkpoint_core_attention"] = checkpoint_core_attention
            check(op, CALLED, {**options, **beside, **flags})
        x = want_input(
            op, "hidden_states", hidden_states, self.proj.out_features, self.core_attention.qkv_format
        )
        bias = "add" if self.proj.use_bias and not self.return_bias else "none"
        ahead = self.settle(op, x, encoder_output, options, rotary_pos_emb)
        out = self.branch(
            x,
            is_first_microbatch,
            bias,
            options,
            ahead,
            checkpoint_core_attention,
            return_norm=self.return_layernorm_output,
            rotary_pos_emb=rotary_pos_emb,
        )
        parts: list[Any] = [out.y]
        if self.return_bias:
            parts.append(self.proj_bias)
        if self.return_layernorm_output:
            parts.append(out.normed)
        return tuple(parts) if len(parts) > 1 else parts[0]

    @property
    def proj_bias(self) -> Tensor | None:
        """The output projection's bias, None where there is none."""
        return self.proj.bias

    def settle(
        self,
        operation: str,
        x: Tensor,
        encoder_output: Tensor | None,
        options: Mapping[str, Any],
        rotary_pos_emb: Any,
        names: Mapping[str, str] = _NO_NAMES,
    ) -> Ahead:
        """Decide and check all of a call before its first projection runs: ``encoder_output``, ``options`` of
        the core attention, the angles. Fp8kitError kinds, with nothing changed; ``names``: what ``operation``
        calls arguments that have another name there. Within ``torch.compile`` the core and the turns are left
        to be settled with the layers."""
        children = self._modules
        core: Any = children["core_attention"]
        cross, form = self.attention_type == "cross", core.qkv_format
        if (encoder_output is not None) != cross:
            got, wanted = ("None", "a tensor") if cross else ("a tensor", "None")
            raise ArgumentError(
                operation, "encoder_output", got, f"{wanted} with {self.attention_type} attention"
            )
        source, key_value = None, self.key_value
        if key_value is not None:
            source = want_input(operation, "encoder_output", encoder_output, key_value.in_features, form)
        if torch.compiler.is_compiling():
            return Ahead(None, source, None)
        if source is not None:
            self._want_source(operation, x, source)
        if not has_foreign_code(self):
            for name in (self._first, "proj") if key_value is None else (self._first, "key_value", "proj"):
                part_of("MultiheadAttention", name, children[name]).want_ready(x)
            for norm in (self.q_norm, self.k_norm) if self._apart else ():
                want_like(norm, x)
        plain = (
            type(core) is DotProductAttention and not options and source is None and rotary_pos_emb is None
        )
        key: Any = None
        if plain:
            own = *_SETTINGS(core), self._apart, self._interleaved, policy_now().deterministic
            key = x.shape[:-1], autocast_dtype(x) or x.dtype, x.device, *own
            known = _PREPARED.get(key)
            if known is not None:
                return known
        with on_behalf_of(operation, **names):
            found = self._settled(x, source, options, rotary_pos_emb)
        return _PREPARED.put(key, found) if plain and not found.core.beside else found

    def _want_source(self, operation: str, x: Tensor, source: Tensor) -> None:
        at = self.core_attention.qkv_format.find("b")
        if at >= 0 and source.shape[at] != x.shape[at]:
            raise ShapeError(
                operation,
                "encoder_output",
                f"shape {tuple(source.shape)}",
                f"a batch of {x.shape[at]}, as hidden_states",
            )
        if source.device != x.device:
            raise BackendError(
                operation, "encoder_output", f"device {source.device}", f"device {x.device}, as hidden_states"
            )
        if source.dtype is not x.dtype and autocast_dtype(x) is None:
            raise FormatError(operation, "encoder_output", source.dtype, f"{x.dtype}, as hidden_states")

    def _settled(
        self, x: Tensor, source: Tensor | None, options: Mapping[str, Any], rotary_pos_emb: Any
    ) -> Ahead:
        op, core, dtype = "attention", self.core_attention, autocast_dtype(x) or x.dtype
        shapes = projected(
            core,
            tuple(x.shape[:-1]),
            None if source is None else tuple(source.shape[:-1]),
            self._apart,
            self.q_norm is not None,
        )
        stands = {name: TensorMeta(shape, dtype, x.device) for name, shape in shapes.items()}
        layout, names = layout_of(op, {**dict.fromkeys(PARTS), **stands})
        wanted: tuple[str, ...] = ()
        if options.get("inference_params") is not None and torch.is_grad_enabled():
            used = (x, *getattr(self, self._first).parameters())
            wanted = tuple(names)[:1] if any(tensor.requires_grad for tensor in used) else ()
        settled = core.settle(
            op,
            layout,
            {name: stands[argument] for name, argument in names.items()},
            {**options, "qkv_interleave_dim": self._interleave_dim},
            wanted,
        )
        return Ahead(
            settled,
            source,
            {} if rotary_pos_emb is None else self._turns(op, stands, rotary_pos_emb, options),
        )

    @property
    def _interleave_dim(self) -> int:
        return -2 if self._interleaved and not self._apart else -3

    def branch(
        self,
        x: Tensor,
        is_first_microbatch: bool | None,
        bias: str,
        options: Mapping[str, Any],
        ahead: Ahead,
        checkpoint_core: bool = False,
        residual: bool = False,
        return_norm: bool = False,
        rotary_pos_emb: Any = None,
        joins: str | None = None,
    ) -> Branch:
        """y, and "residual", the residual stream, and "normed", norm(x), where asked for, one of which proj's
        product adds to y where it ``joins``; ``bias``: proj's; ``options``: the core attention's, and
        ``ahead`` what ``settle`` said of them and of ``rotary_pos_emb``."""
        children: Any = self._modules
        first, core, source = children[self._first], children["core_attention"], ahead.source
        asked: dict[str, Any] = {"bias": first.bias_mode}
        if self.input_layernorm:
            out = as_branch(
                first(x, is_first_microbatch, part=asked | {"residual": residual, "return_norm": return_norm})
            )
        else:
            out = Branch(first(x, is_first_microbatch, part=asked), x)
        layers: dict[str, Tensor] = {"qkv_layer" if source is None else "query_layer": out.y}
        if source is not None:
            across = children["key_value"]
            layers["kv_layer"] = across(source, is_first_microbatch, part={"bias": across.bias_mode})
        if self._apart:
            layers = self._split(layers)

        def turn(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
            turns = (
                self._turns("MultiheadAttention", found, rotary_pos_emb, options)
                if ahead.turns is None
                else ahead.turns
            )
            return {
                **found,
                **{
                    name: apply(rotate, spec, {"x": found[name], **beside})["y"]
                    for name, (spec, beside) in turns.items()
                },
            }

        if self._apart or rotary_pos_emb is not None:
            layers = normed_and_turned(
                layers, self._normed, None if rotary_pos_emb is None else turn, self.qk_norm_before_rope
            )
        given = {**layers, **options, "qkv_interleave_dim": self._interleave_dim}
        if ahead.core is not None and isinstance(core, DotProductAttention):
            given["settled"] = ahead.core
        o = checkpoint(core, use_reentrant=False, **given) if checkpoint_core else core(**given)
        asked = (
            {"bias": bias} if joins is None else {"bias": bias, "residual": getattr(out, joins).to(o.dtype)}
        )
        return Branch(children["proj"](o, is_first_microbatch, part=asked), out.residual, out.normed)

    def _split(self, layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Queries, keys and values, each (..., heads, d)."""
        core = self.core_attention
        heads, groups, found = (
            {"q": core.num_attention_heads, "k": core.num_gqa_groups, "v": core.num_gqa_groups},
            core.num_gqa_groups,
            {},
        )
        for name, layer in layers.items():
            if name == "query_layer" and self.q_norm is None:
                found[name] = layer
                continue
            parts = tuple([(LAYERS[part], heads[part]) for part in PARTS[name]])
            repeated = self._interleaved and name != "query_layer"
            found |= apply(
                split_heads,
                spec_for("SplitHeadsSpec", parts, core.kv_channels, groups if repeated else 1),
                {"x": layer},
            )
        return found

    def _normed(self, layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Queries and keys normalised where there are norms for it."""
        if self.q_norm is None or self.k_norm is None:
            return dict(layers)
        return {
            **layers,
            "query_layer": self.q_norm(layers["query_layer"]),
            "key_layer": self.k_norm(layers["key_layer"]),
        }

    def _turns(
        self,
        operation: str,
        layers: Mapping[str, Tensor | TensorMeta],
        rotary_pos_emb: Any,
        options: Mapping[str, Any],
    ) -> dict[str, tuple[Any, Mapping[str, Tensor]]]:
        """How each of the layers, or what stands for them, will be turned; checked."""
        core, cache = self.core_attention, options.get("inference_params")
        pair = pair_of(operation, "rotary_pos_emb", rotary_pos_emb)
        found: dict[str, tuple[Any, Mapping[str, Tensor]]] = {}
        for name, layer in layers.items():

            def placed(argument: str, value: Tensor, device: torch.device = layer.device) -> Tensor:
                return (
                    angles(operation, argument, value, device)
                    if argument == "rotary_pos_emb"
                    else value.to(device)
                )

            if PARTS[name] != "v":
                segments, inputs = turning(operation, name, layer, pair, core, options, placed)
                spec = spec_for(
                    "RopeSpec",
                    segments,
                    core.qkv_format,
                    self.rotary_pos_interleaved,
                    self._interleaved and not self._apart,
                )
                validate(rotate, spec, inputs)
                if cache is None and core.qkv_format == "thd":
                    check_turns(operation, spec, inputs, layer.shape[0])
                found[name] = spec, {argument: value for argument, value in inputs.items() if argument != "x"}
        return found


def _qk_norms(
    operation: str, kind: str | None, features: int, eps: float, params_dtype: torch.dtype | None, device: Any
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """The norms of queries and keys; the one without parameters is the same for both."""
    if kind is None:
        return None, None
    if one_of(operation, "qk_norm_type", kind, QK_NORMS) == "L2Normalization":
        norm = L2Normalization(eps=eps)
        return norm, norm
    norms = [
        (RMSNorm if kind == "RMSNorm" else LayerNorm)(features, eps, params_dtype=params_dtype, device=device)
        for _ in range(2)
    ]
    return norms[0], norms[1]
