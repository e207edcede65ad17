"""``DotProductAttention`` (Vaswani et al. 2017; grouped query heads: Ainslie et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from fp8kit.arguments import without_unknown
from fp8kit.collectives import share
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.formats import float32
from fp8kit.layers import context_parallel, sequence_policies
from fp8kit.layers.attention_call import AttentionCall
from fp8kit.layers.attention_inputs import ResolvedCall, core_options, layout_of
from fp8kit.layers.unsupported import FORWARD, refuse
from fp8kit.ops.attention_spec import FORMATS

# attributes that a call without options depends on
CORE_SETTINGS = """num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type
    window_size bottom_right_diagonal softcap softmax_scale softmax_type"""
NO_WINDOW = (-1, -1)
_NO_FORK = nullcontext()


class DotProductAttention(AttentionCall):
    """o = dropout(softmax(scores)) v for each head, over the scores that the mask leaves; scores =
    softmax_scale * q k^T and a bias.

    * ``num_attention_heads`` h; ``kv_channels``: features of one head, d, or (d of q and k, d of v);
      ``num_gqa_groups``: key and value heads g (None: h). ``attention_type``: "self" or "cross", kept for the
      user: lengths may always differ.
    * ``attention_dropout``: probability, while training. ``qkv_format``: "sbhd", "bshd" or "thd" (sequences
      one after the other).
    * ``attn_mask_type``: "no_mask", "causal" (aligned top-left), "causal_bottom_right", "padding",
      "padding_causal" (also "padding,causal", "causal,padding"), "padding_causal_bottom_right" or
      "arbitrary". ``window_size`` (left, right), -1 unbounded, None: no window. ``bottom_right_diagonal``:
      see ``fp8kit.ops.attention_spec.AttentionSpec``. In torch causal masks have their own, whatever it says,
      and end there, also with a window that goes on to the right.
    * ``softcap``: c * tanh(x / c) stands for x = softmax_scale * q k^T, before biases (but one that is scaled
      too), the mask and softmax, as in Gemma 2; 0: no cap. On a GPU cuDNN's kernels and those for Hopper know
      none: such a call is one of fp8kit's own for any chip.
    * ``softmax_scale``: None is 1 / sqrt(d). ``softmax_type``: "vanilla"; "off-by-one": exp(0) is added to
      the denominator; "learnable": exp(softmax_offset[h]) is, a float32 parameter (h,) that starts at 0
      and may be cast with the model. ``device``: where that lies. In torch ``softmax_offset`` is None with
      "vanilla", and zeros with "off-by-one".
    * ``tp_size``, ``tp_group``: each rank has a part of the heads, whose layers it is given;
      ``alibi_slopes`` are then to be given too.
    * ``cp_group``, ``cp_comm_type`` and others: as ``set_context_parallel_group``, which may come later. Each
      rank's layers are then its chunks of the sequences, and what says where sequences are (cu_seqlens,
      max_seqlen) is of the whole ones; lengths of "thd", gaps included, are multiples of 2 P.
    * ``layer_number``: the layer's place in ``inference_params``. ``name``: what recipes by name know it by.

    Under ``autocast`` with a recipe that has ``fp8_dpa`` its products are quantised
    (``fp8kit.attention_quantization``), but not over a cache: there it is in high precision, as Transformer
    Engine's.

    Other arguments are Transformer Engine's, at their defaults only (``layers.unsupported.CONSTRUCTOR``).
    Raises ArgumentError for arguments out of their range, UnsupportedError for what fp8kit does not have.
    """

    layer_name = "DotProductAttention"

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        *,
        device: Any = None,
    ) -> None:
        super().__init__()
        arguments, op = self.checked(locals()), self.layer_name
        if kv_channels is None:
            raise ArgumentError(op, "kv_channels", None, "an int, or two: of q and k, and of v")
        arguments.num_gqa_groups = arguments.num_gqa_groups or arguments.num_attention_heads
        arguments.window_size = arguments.window_size or NO_WINDOW
        arguments.softmax_scale = arguments.softmax_scale or 0.0
        self.keep(arguments, f"{CORE_SETTINGS} layer_number attention_type name")
        if self.num_attention_heads % self.num_gqa_groups:
            wanted = f"a divisor of {num_attention_heads} heads"
            raise ArgumentError(op, "num_gqa_groups", self.num_gqa_groups, wanted)
        self.take_group(arguments)
        if self.tp_size > 1:  # this rank's heads
            for name in ("num_attention_heads", "num_gqa_groups"):
                setattr(self, name, share(getattr(self, name), self.tp_size, op, name))
        if cp_group is not None:
            self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        if softmax_type == "learnable":
            shape = (self.num_attention_heads,)
            self.add_parameter("softmax_offset", shape, 0.0, self.dtype_of(float32), device)
        else:
            self.add_offset(softmax_type != "vanilla", device)

    @without_unknown
    def forward(
        self,
        query_layer: Any = None,
        key_layer: Any = None,
        value_layer: Any = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        cu_seqlens_q_padded: Any = None,
        cu_seqlens_kv_padded: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Any = None,
        alibi_slopes: Any = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Any = None,
        kv_layer: Any = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
        *,
        prepared: ResolvedCall | None = None,
        **unknown: Any,
    ) -> Any:
        """Attend. Arguments that have a twin in the constructor override it.

        * ``query_layer`` h (s_q, b, h, d), ``key_layer`` (s_kv, b, g, d), ``value_layer`` (s_kv, b, g, d_v);
          with "bshd" b comes first, with "thd" t stands for s and b. Or ``kv_layer`` (s_kv, b, g (d + d_v)):
          k's features, then v's. Or ``qkv_layer``: q's too (``qkv_interleave_dim`` -3), or head after head,
          each q, k, v (-2; only where g = h). Both also with their dimensions apart: (..., 3, h, d) or
          (..., 2, g, d) with -3, (..., h, 3, d) or (..., g, 2, d) with -2.
        * ``cu_seqlens_q``, ``cu_seqlens_kv``: int32 (b + 1,), running sums of the true lengths, for padding
          masks; with "thd" ``cu_seqlens_q_padded``, ``cu_seqlens_kv_padded`` say where the sequences start,
          if there are gaps (``pad_between_seqs``: False is right beside them where there are none). Other
          masks and formats do not look at them. They start at 0, never fall and end at most at t; no
          sequence is longer than s or ``max_seqlen_q``. On the CPU other values are an ArgumentError; on a
          GPU they are not checked: then rows may come out wrong, but nothing out of bounds is read or
          written.
        * ``max_seqlen_q``, ``max_seqlen_kv``: for "thd"; an int, or an array of one, which waits for its
          device; None asks cu_seqlens, which waits too, and rounds up to 64.
        * ``attention_mask``: True masks out. With "arbitrary": bool (1 | b, 1 | h, 1 | s_q, s_kv). With a
          padding mask and no cu_seqlens: bool (b, 1, 1, s) of q, or a pair for q and k, padding last. Not
          looked at in other cases, as in Transformer Engine.
        * ``core_attention_bias_type``: "no_bias"; "pre_scale_bias" or "post_scale_bias" with
          ``core_attention_bias`` h (1 | b, 1 | h, 1 | s_q, s_kv), differentiable; "alibi", with
          ``alibi_slopes`` float32 (h,) or (b, h), or the paper's.
        * ``fast_zero_fill``: accepted; outputs of no row are always 0.
        * ``checkpoint_core_attention``: what is saved for backward is computed once more there, the same
          bits.
        * ``inference_params``: the layers are the new tokens of a step that was announced to it, and attend
          over their whole sequences. The step says the lengths: cu_seqlens need not be given, and on the CPU
          an ArgumentError says where they are others; ``cu_seqlens_kv`` may leave out the cached tokens.
          "thd"'s ``cu_seqlens_q_padded`` says where the new tokens start. No bias array, no "arbitrary" mask,
          no cross-attention, and no gradient: in evaluation mode o has none, in training mode it must be
          under ``no_grad()``.
        * ``bf16_backward``: backward in high precision, where the recipe quantises attention.
          ``num_splits``: accepted; kernels choose their own. ``fp8_output``: o as a ``QuantizedTensor`` where
          the recipe quantises attention, as an input of the next layer with a scale of its own; PyTorch only.
          ``score_mod`` and its like: at their defaults only.
        * ``thd_attention_policies``: mappings, each with the numbers of some sequences of "thd"
          (``sequence_ids``, integers (n,) in rising order) and their ``mask_type``, ``window_size`` and
          perhaps ``bottom_right_diagonal``, instead of the call's. Each sequence belongs to one, which on a
          GPU is not checked. ``thd_attention_policy_dispatch``: "auto" or "grouped"; both are the same here:
          each policy is a call over the tokens where they lie, and the outputs are added. Not beside a bias,
          a cache, context parallelism or ``return_max_logit``; ``torch.compile`` leaves it to eager code.
        * ``prepared``: what ``resolve`` returned for these options, where it was asked before the layers were
          there; else this asks.

        Returns (s_q, b, h d_v), (b, s_q, h d_v) or (t, h d_v), rows beyond the true length 0. Raises
        ShapeError, FormatError and BackendError for arrays that do not fit, ArgumentError for other
        arguments, UnsupportedError for what fp8kit does not have.
        """
        if unknown:
            self.refuse_names(unknown)
        op = self.layer_name
        if qkv_layer is not None or kv_layer is not None:
            form = self.qkv_format if qkv_format is None else qkv_format
            unpacked = self._unpacked(form, qkv_layer, kv_layer, qkv_interleave_dim)
            qkv_layer, kv_layer = unpacked[:2]
            if len(unpacked) > 2 and key_layer is None and value_layer is None:
                (key_layer, value_layer), qkv_interleave_dim = unpacked[2:], -3
        elif prepared is None and inference_params is None:
            form = self.qkv_format if qkv_format is None else qkv_format
            found = self.packed(query_layer, key_layer, value_layer, form)
            if found is not None:
                query_layer, kv_layer, qkv_layer, qkv_interleave_dim = found
                key_layer = value_layer = None
        layers = {
            "query_layer": query_layer,
            "key_layer": key_layer,
            "value_layer": value_layer,
            "kv_layer": kv_layer,
            "qkv_layer": qkv_layer,
        }
        options: dict[str, Any] = {}
        if prepared is None or checkpoint_core_attention:
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
            options |= {"qkv_format": qkv_format, "qkv_interleave_dim": qkv_interleave_dim}
        if prepared is None:
            more = {
                "score_mod": score_mod,
                "score_mod_bprop": score_mod_bprop,
                "score_mod_tensors": score_mod_tensors,
                "score_mod_bprop_tensors": score_mod_bprop_tensors,
            }
            refuse(op, FORWARD[op], more)
            asked = {"bf16_backward": bf16_backward, "fp8_output": fp8_output}
            options |= {name: flag for name, flag in asked.items() if flag}
            if fp8_output:
                self.check_supported({"fp8_output": fp8_output})
            plain = {
                "checkpoint_core_attention": checkpoint_core_attention,
                **asked,
                "num_splits": num_splits,
            }
            self.check_arguments({**layers, **options, **plain})
            if thd_attention_policies is not None:
                return self.attend_by_policies(layers, {**options, **plain})
        if checkpoint_core_attention:
            again: Any = self
            return self.call_checkpointed(again, **layers, **options, prepared=prepared)
        layout, names = layout_of(op, layers)
        inputs = {name: self.as_input(argument, layers[argument]) for name, argument in names.items()}
        if prepared is None:
            needs: tuple[str, ...] = ()
            if inference_params is not None and self.training and self.is_grad_enabled():
                needs = tuple([name for name, layer in inputs.items() if layer.requires_grad])
            prepared = self.resolve(layout, inputs, options, needs)
        if self.context is not None:
            return context_parallel.attend(self, self.context, prepared, inputs)
        dtype = next(iter(inputs.values())).dtype
        inputs.update(prepared.beside)
        if inference_params is None:
            with self.forked() if prepared.draws else _NO_FORK:
                o = self.call(prepared.operation, prepared.spec, inputs, prepared.draws)["o"]
            o = self.narrowed(o) if fp8_output else o
            return (o, self.max_logit(prepared.spec, inputs)) if self.return_max_logit else o
        kind = self.kind_of(dtype)
        inputs.update(inference_params.inputs(self.layer_number, self.num_gqa_groups, self._dims, kind))
        with _NO_FORK if self.training else self.no_grad():
            o = self.call_cached(prepared, inputs, inference_params, prepared.draws)
            return self.narrowed(o) if fp8_output else o

    def packed(self, q: Any, k: Any, v: Any, form: Any) -> Any:
        """(query_layer, kv_layer, qkv_layer, qkv_interleave_dim) where layers are views of one array, which a
        frontend knows; None otherwise."""
        return None

    def attend_by_policies(self, layers: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """``sequence_policies.attend``."""
        return sequence_policies.attend(self, layers, options)

    def max_logit(self, spec: Any, inputs: Mapping[str, Any]) -> Any:
        """Returns the largest score of each head, for ``return_max_logit``, where a frontend has it."""
        raise NotImplementedError

    def narrowed(self, o: Any) -> Any:
        """o for ``fp8_output``, where a frontend has it."""
        raise NotImplementedError

    def call_cached(self, prepared: ResolvedCall, inputs: dict[str, Any], cache: Any, rng: bool) -> Any:
        """Attention over a cache, whose step this layer has taken then."""
        o = self.call(prepared.operation, prepared.spec, inputs, rng)["o"]
        cache.stepped(self.layer_number)
        return o

    def _unpacked(self, form: Any, qkv: Any, kv: Any, at: Any) -> tuple[Any, ...]:
        """``qkv_layer`` and ``kv_layer`` with the three dimensions at their end as one, where they are apart:
        views. Where keys and values lie head by head there is no such view, and they come as two further
        values."""
        if not isinstance(form, str) or form not in FORMATS:
            return qkv, kv  # refused later
        apart = len(form) + 1
        if _dimensions(qkv) == apart:
            qkv = self._joined("qkv_layer", qkv, 3, at)
        if _dimensions(kv) == apart:
            if at == -2 and kv.shape[-2] == 2:
                return qkv, None, kv[..., 0, :], kv[..., 1, :]
            kv = self._joined("kv_layer", kv, 2, at)
        return qkv, kv

    def _joined(self, argument: str, layer: Any, parts: int, at: Any) -> Any:
        shape = tuple(layer.shape)
        if at not in (-3, -2) or shape[at] != parts:
            wanted = f"{parts} in dimension qkv_interleave_dim, -3 or -2, not {at}"
            raise ShapeError(self.layer_name, argument, f"shape {shape}", wanted)
        return layer.reshape(*shape[:-3], shape[-3] * shape[-2] * shape[-1])


def _dimensions(value: Any) -> int:
    """Returns an array's number of dimensions, 0 for anything else, which is refused later."""
    shape = getattr(value, "shape", ())
    return len(shape) if isinstance(shape, tuple) else 0
