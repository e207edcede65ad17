"""``MultiheadAttention``: attention with its projections (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from fp8kit import arrays
from fp8kit.arguments import choice, flag, integer
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor, apply, is_grad_enabled, validate
from fp8kit.errors import ArgumentError, BackendError, ShapeError, on_behalf_of
from fp8kit.layers.attention_inputs import (
    LAYERS,
    PARTS,
    QK_NORMS,
    Ahead,
    known_options,
    layout_of,
    normed_and_turned,
    pair_of,
    projected,
    turning,
)
from fp8kit.nn.dot_product_attention import DotProductAttention
from fp8kit.nn.later import CONSTRUCTOR, later
from fp8kit.nn.linear import Linear
from fp8kit.nn.module import Module, as_tensor, as_tokens, hints, positive
from fp8kit.nn.norm import L2Normalization, LayerNorm, RMSNorm
from fp8kit.nn.norm_linear import LayerNormLinear
from fp8kit.nn.random import Init
from fp8kit.nn.rope import angles, rope_spec
from fp8kit.ops.rope import RopeSpec, check_tokens, rope
from fp8kit.ops.split_heads import SplitHeadsSpec, split_heads


class MultiheadAttention(Module):
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

    Raises Fp8kitError for arguments out of their range.
    """

    argument_names: ClassVar[dict[str, str]] = {
        "x": "hidden_states",
        "freqs": "rotary_pos_emb",
        "k_freqs": "rotary_pos_emb",
    }

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
        *,
        num_gqa_groups: int | None = None,
        params_dtype: Any = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: Any = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        rotary_pos_interleaved: bool = False,
        softmax_type: str = "vanilla",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        **other: Any,
    ) -> None:
        op = "MultiheadAttention"
        later(op, CONSTRUCTOR[op], other)
        positive(op, hidden_size=hidden_size, num_attention_heads=num_attention_heads)
        hints(op, seq_length=seq_length, micro_batch_size=micro_batch_size, kv_channels=kv_channels)
        if layer_number is not None:
            integer(op, "layer_number", layer_number)
        if kv_channels is None and hidden_size % num_attention_heads:
            wanted = f"a multiple of {num_attention_heads} heads, or kv_channels given"
            raise ArgumentError(op, "hidden_size", hidden_size, wanted)
        hidden_size, num_attention_heads = int(hidden_size), int(num_attention_heads)
        channels = hidden_size // num_attention_heads if kv_channels is None else int(kv_channels)
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
        self.input_layernorm = flag(op, "input_layernorm", input_layernorm)
        self.return_bias = flag(op, "return_bias", return_bias)
        self.return_layernorm_output = flag(op, "return_layernorm_output", return_layernorm_output)
        self.rotary_pos_interleaved = flag(op, "rotary_pos_interleaved", rotary_pos_interleaved)
        self.qk_norm_before_rope = flag(op, "qk_norm_before_rope", qk_norm_before_rope)
        self.attention_type, self.layer_number, self.name = attention_type, core.layer_number, name
        fused, repeated = (
            flag(op, "fuse_qkv_params", fuse_qkv_params),
            flag(op, "qkv_weight_interleaved", qkv_weight_interleaved),
        )
        if self.return_layernorm_output and not self.input_layernorm:
            raise ArgumentError(op, "return_layernorm_output", True, "input_layernorm=True beside it")
        self.q_norm, self.k_norm = _qk_norms(op, qk_norm_type, channels, qk_norm_eps, params_dtype, device)
        self._interleaved = fused and repeated  # weights kept apart are always joined as q, k, v
        # The core attention takes a packed projection as it is, but for groups of unlike parts; norms want
        # rows of one head.
        self._apart = self.q_norm is not None or (
            self._interleaved and (cross or groups != num_attention_heads)
        )

        q, kv = num_attention_heads * channels, groups * channels
        split = {"query": q, "key": kv, "value": kv}
        shared: dict[str, Any] = {"bias": bias, "params_dtype": params_dtype, "device": device}

        def sized(child: str, *parts: str) -> dict[str, Any]:
            sizes = {part: split[part] for part in parts}
            whole = fused or child == "query_layer"
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
        self.key_value = Linear(hidden_size, **sized("key_value", "key", "value")) if cross else None
        self.core_attention = core
        self.proj = Linear(
            q,
            hidden_size,
            init_method=output_layer_init_method,
            name=None if name is None else f"{name}.proj",
            **shared,
        )

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
        **options: Any,
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
        * ``attention_mask``, ``attn_mask_type``, ``cu_seqlens_q`` and the other ``options`` of
          ``DotProductAttention.forward``: as there.

        Returns y like ``hidden_states``, or a tuple (y, bias where ``return_bias``, norm(x) where
        ``return_layernorm_output``). Raises ShapeError, FormatError and other Fp8kitError kinds for what does
        not fit, TypeError for an unknown option.
        """
        op = "MultiheadAttention"
        known_options(op, options)
        dtype = self.proj.weight_inputs()["weight0"].dtype
        x = as_tokens(
            op, "hidden_states", hidden_states, self.core_attention.qkv_format, self.proj.out_features, dtype
        )
        bias = "add" if self.proj.use_bias and not self.return_bias else "none"
        options |= {
            "attention_mask": attention_mask,
            "attn_mask_type": attn_mask_type,
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "inference_params": inference_params,
        }
        flag(op, "checkpoint_core_attention", checkpoint_core_attention)
        with on_behalf_of(op):
            ahead = self.settle("attention", x, encoder_output, options, rotary_pos_emb)
        out = self.branch(
            x,
            is_first_microbatch,
            bias,
            options,
            ahead,
            checkpoint_core_attention,
            return_norm=self.return_layernorm_output,
        )
        parts: list[Any] = [out["y"]]
        if self.return_bias:
            parts.append(self.proj_bias)
        if self.return_layernorm_output:
            parts.append(out["normed"])
        return tuple(parts) if len(parts) > 1 else parts[0]

    def settle(
        self, operation: str, x: Tensor, encoder_output: Any, options: Mapping[str, Any], rotary_pos_emb: Any
    ) -> Ahead:
        """Decide and check all of a call before its first projection runs: ``encoder_output``, ``options`` of
        the core attention, the angles. Fp8kitError kinds, with nothing changed."""
        cross, core = self.attention_type == "cross", self.core_attention
        if (encoder_output is not None) != cross:
            got, wanted = ("None", "an array") if cross else ("an array", "None")
            raise ArgumentError(
                operation, "encoder_output", got, f"{wanted} with {self.attention_type} attention"
            )
        source = None
        if self.key_value is not None:
            source = as_tokens(
                operation,
                "encoder_output",
                encoder_output,
                core.qkv_format,
                self.key_value.in_features,
                x.dtype,
            )
            at = core.qkv_format.find("b")
            if at >= 0 and source.shape[at] != x.shape[at]:
                wanted = f"a batch of {x.shape[at]}, as hidden_states"
                raise ShapeError(operation, "encoder_output", f"shape {source.shape}", wanted)
            if source.device != x.device:
                raise BackendError(
                    operation,
                    "encoder_output",
                    f"device {source.device}",
                    f"device {x.device}, as hidden_states",
                )
        shapes = projected(
            core,
            x.shape[:-1],
            None if source is None else source.shape[:-1],
            self._apart,
            self.q_norm is not None,
        )
        stands = {name: ArrayView(0, shape, x.dtype, x.device) for name, shape in shapes.items()}
        layout, names = layout_of(operation, {**dict.fromkeys(PARTS), **stands})
        interleave = -2 if self._interleaved and not self._apart else -3
        wanted_grads: tuple[str, ...] = ()
        if options.get("inference_params") is not None and is_grad_enabled():
            used = (x, *getattr(self, self._first).parameters())
            wanted_grads = tuple(names)[:1] if any(tensor.requires_grad for tensor in used) else ()
        settled = core.settle(
            operation,
            layout,
            {name: stands[argument] for name, argument in names.items()},
            {**options, "qkv_interleave_dim": interleave},
            wanted_grads,
        )
        turns = {} if rotary_pos_emb is None else self._turns(operation, stands, rotary_pos_emb, options)
        return Ahead(settled, source, turns)

    @property
    def proj_bias(self) -> Any:
        """The output projection's bias, None where there is none."""
        return getattr(self.proj, "bias", None)

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
        joins: str | None = None,
    ) -> dict[str, Tensor]:
        """Outputs "y", and "residual" and "normed" where asked for (see ``LayerNormLinear.branch``), one of
        which proj's product adds to y where it ``joins``; ``bias``: proj's; ``options``: the core
        attention's, and ``ahead`` what ``settle`` said of them."""
        first, source = getattr(self, self._first), ahead.source
        out: dict[str, Tensor] = {"residual": x}
        if self.input_layernorm:
            out = first.branch(x, is_first_microbatch, first.bias_mode, residual, return_norm)
            y = out["y"]
        else:
            y = first.branch(x, is_first_microbatch, first.bias_mode)
        layers: dict[str, Tensor] = {"qkv_layer" if source is None else "query_layer": y}
        if self.key_value is not None and source is not None:
            layers["kv_layer"] = self.key_value.branch(source, is_first_microbatch, self.key_value.bias_mode)
        if self._apart:
            layers = self._split(layers)
        turn = None if not ahead.turns else lambda found: self._turned(found, ahead.turns)
        layers = normed_and_turned(layers, self._normed, turn, self.qk_norm_before_rope)
        dim = -2 if self._interleaved and not self._apart else -3
        o = self.core_attention(
            **layers,
            **options,
            qkv_interleave_dim=dim,
            checkpoint_core_attention=checkpoint_core,
            settled=ahead.core,
        )
        return out | {
            "y": self.proj.branch(o, is_first_microbatch, bias, None if joins is None else out[joins])
        }

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
            parts = tuple((LAYERS[part], heads[part]) for part in PARTS[name])
            repeated = self._interleaved and name != "query_layer"
            found |= apply(
                split_heads, _split_spec(parts, core.kv_channels, groups if repeated else 1), {"x": layer}
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
        self, operation: str, layers: Mapping[str, ArrayView], rotary_pos_emb: Any, options: Mapping[str, Any]
    ) -> dict[str, tuple[RopeSpec, Mapping[str, ArrayView]]]:
        """How each of the layers, which views stand for, will be turned; checked."""
        core, cache = self.core_attention, options.get("inference_params")
        pair = pair_of(operation, "rotary_pos_emb", rotary_pos_emb)
        found: dict[str, tuple[RopeSpec, Mapping[str, ArrayView]]] = {}
        for name, layer in layers.items():

            def placed(argument: str, value: Any, device: arrays.Device = layer.device) -> ArrayView:
                view = (
                    angles(operation, argument, value)
                    if argument == "rotary_pos_emb"
                    else as_tensor(operation, argument, value).view
                )
                return arrays.to(view, device)

            if PARTS[name] != "v":
                segments, inputs = turning(operation, name, layer, pair, core, options, placed)
                spec = rope_spec(
                    segments,
                    core.qkv_format,
                    self.rotary_pos_interleaved,
                    self._interleaved and not self._apart,
                )
                validate(rope, spec, inputs, self)
                if cache is None:
                    check_tokens(operation, spec, inputs, layer.shape[0])
                found[name] = spec, {argument: value for argument, value in inputs.items() if argument != "x"}
        return found

    def _turned(
        self, layers: Mapping[str, Tensor], turns: Mapping[str, tuple[RopeSpec, Mapping[str, ArrayView]]]
    ) -> dict[str, Tensor]:
        """The projections with queries and keys turned by their positions; values as they are."""
        return {
            **layers,
            **{
                name: apply(rope, spec, {"x": layers[name], **beside}, owner=self)["y"]
                for name, (spec, beside) in turns.items()
            },
        }


@lru_cache(maxsize=1024)
def _split_spec(parts: tuple[tuple[str, int], ...], head_dim: int, groups: int) -> SplitHeadsSpec:
    """The same object for the same arguments: plans are found by a spec's identity."""
    return SplitHeadsSpec(parts, head_dim, groups)


def _qk_norms(
    operation: str, kind: str | None, features: int, eps: float, params_dtype: Any, device: Any
) -> tuple[Module | None, Module | None]:
    """The norms of queries and keys; the one without parameters is the same for both."""
    if kind is None:
        return None, None
    if choice(operation, "qk_norm_type", kind, QK_NORMS) == "L2Normalization":
        norm = L2Normalization(eps=eps)
        return norm, norm
    norms = [
        (RMSNorm if kind == "RMSNorm" else LayerNorm)(features, eps, params_dtype=params_dtype, device=device)
        for _ in range(2)
    ]
    return norms[0], norms[1]
