"""``DotProductAttention`` (Vaswani et al. 2017; grouped query heads: Ainslie et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.layers.attention_inputs import MISPLACED, Settled, alibi_slopes, layout_of, pair_of, want_padding
from fp8kit.layers.kv_steps import cached_mask
from fp8kit.ops.attention import attention
from fp8kit.ops.attention_spec import BIASES, FORMATS, MASKS
from fp8kit.ops.kv_cache import cached_attention
from fp8kit.ops.values import check_sequences, check_sums
from fp8kit_torch import checks
from fp8kit_torch.arguments import CONSTRUCTOR, FORWARD, positive, refuse
from fp8kit_torch.bound import TensorMeta, validate
from fp8kit_torch.call import apply
from fp8kit_torch.checks import CONSTRUCTED, MASK_ALIASES, channels, check, instance, optional
from fp8kit_torch.draws import next_rng
from fp8kit_torch.inference import InferenceParams
from fp8kit_torch.kv_cache import LONGEST, trace_cached
from fp8kit_torch.library import policy_now
from fp8kit_torch.parameters import ParameterModule
from fp8kit_torch.recompute import checkpoint
from fp8kit_torch.specs import spec_for
from fp8kit_torch.te_compat.methods import TransformerEngineMethods
from fp8kit_torch.views import as_view, dtype_of, kind_of

CALLED = checks.CALLED | {
    "inference_params": optional(instance(InferenceParams, "an fp8kit_torch.InferenceParams, or None"))
}
_SUMS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_STEP = 64  # lengths that are asked for are rounded up to multiples of this, so that plans are found again


def one_of(operation: str, argument: str, value: str, allowed: tuple[str, ...]) -> str:
    """``value``, which must be one of ``allowed``; Fp8kitError otherwise."""
    if value not in allowed:
        raise ArgumentError(operation, argument, repr(value), f"one of {', '.join(allowed)}")
    return value


@lru_cache(maxsize=64)
def _kept_slopes(heads: int, device: torch.device) -> Tensor:
    return torch.tensor(alibi_slopes(heads), dtype=torch.float32, device=device)


class DotProductAttention(TransformerEngineMethods, ParameterModule):
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
      see ``fp8kit.ops.attention_spec.AttentionSpec``.
    * ``softmax_scale``: None is 1 / sqrt(d). ``softmax_type``: "vanilla"; "off-by-one": exp(0) joins the
      denominator; "learnable": exp(softmax_offset[h]) does, a float32 parameter (h,) that starts at 0.
      ``device``: where that lies.
    * ``layer_number``: the layer's place in ``inference_params``. ``name``: kept, for the user.

    Other arguments are Transformer Engine's, at their defaults only (``layers.unsupported.CONSTRUCTOR``).
    """

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
        op = "DotProductAttention"
        check(op, CONSTRUCTED, locals())
        channels(op, "kv_channels", kv_channels)
        super().__init__()
        refuse(op, CONSTRUCTOR[op], locals())
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if num_attention_heads % groups:
            raise ArgumentError(op, "num_gqa_groups", groups, f"a divisor of {num_attention_heads} heads")
        self.num_attention_heads, self.kv_channels, self.num_gqa_groups = (
            num_attention_heads,
            kv_channels,
            groups,
        )
        self.attention_dropout, self.softmax_scale = float(attention_dropout), float(softmax_scale or 0.0)
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.attention_type, self.softmax_type = attention_type, softmax_type
        self.window_size, self.bottom_right_diagonal = _window(op, window_size), bottom_right_diagonal
        self.layer_number, self.name = layer_number, name
        if self.softmax_type == "learnable":
            self.add_parameter(
                "softmax_offset", (num_attention_heads,), torch.nn.init.zeros_, torch.float32, device
            )

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        *,
        settled: Settled | None = None,
    ) -> Tensor:
        """Attend. Arguments that have a twin in the constructor override it.

        * ``query_layer`` h (s_q, b, h, d), ``key_layer`` (s_kv, b, g, d), ``value_layer`` (s_kv, b, g, d_v);
          with "bshd" b comes first, with "thd" t stands for s and b. Or ``kv_layer`` (s_kv, b, g (d + d_v)):
          k's features, then v's. Or ``qkv_layer``: q's too (``qkv_interleave_dim`` -3), or head after head,
          each q, k, v (-2; only where g = h).
        * ``cu_seqlens_q``, ``cu_seqlens_kv``: int32 (b + 1,), running sums of the true lengths, for padding
          masks; with "thd" ``cu_seqlens_q_padded``, ``cu_seqlens_kv_padded`` say where the sequences start,
          if there are gaps (``pad_between_seqs``). They start at 0, never fall and end at most at t; no
          sequence is longer than s or ``max_seqlen_q``. Other values are an ArgumentError on the CPU; on a
          GPU nobody looks at them: then rows may come out wrong, but nothing out of bounds is touched.
        * ``max_seqlen_q``, ``max_seqlen_kv``: for "thd"; None asks cu_seqlens, which waits for the device,
          and rounds up to 64.
        * ``attention_mask``: True masks out. With "arbitrary": bool (1 | b, 1 | h, 1 | s_q, s_kv). With a
          padding mask and no cu_seqlens: bool (b, 1, 1, s) of q, or a pair for q and k, padding last.
        * ``core_attention_bias_type``: "no_bias"; "pre_scale_bias" or "post_scale_bias" with
          ``core_attention_bias`` h (1 | b, 1 | h, 1 | s_q, s_kv), differentiable; "alibi", with
          ``alibi_slopes`` float32 (h,) or (b, h), or the paper's.
        * ``fast_zero_fill``: accepted; outputs of no row are always 0.
        * ``checkpoint_core_attention``: what is saved for backward is computed once more there, the same
          bits.
        * ``inference_params``: the layers are the new tokens of a step that was announced to it, and attend
          over their whole sequences. The step says the lengths, so cu_seqlens and padding masks are not given
          (but "thd"'s ``cu_seqlens_q_padded``). No bias array, no "arbitrary" mask, no cross attention, no
          gradient.
        * ``fp8_output``, ``bf16_backward``, ``num_splits``, ``score_mod`` and its like: at their defaults
          only.
        * ``settled``: what ``settle`` said of these options, where it was asked before the layers were there;
          else this asks.

        Returns (s_q, b, h d_v), (b, s_q, h d_v) or (t, h d_v), rows beyond the true length 0. Raises
        Fp8kitError kinds.
        """
        op = "DotProductAttention"
        if settled is None:
            refuse(
                op,
                FORWARD[op],
                {
                    "fp8_output": fp8_output,
                    "bf16_backward": bf16_backward,
                    "num_splits": num_splits,
                    "score_mod": score_mod,
                    "score_mod_bprop": score_mod_bprop,
                    "score_mod_tensors": score_mod_tensors,
                    "score_mod_bprop_tensors": score_mod_bprop_tensors,
                },
            )
        if settled is None and not torch.compiler.is_compiling():
            check(op, CALLED, locals())
        options: dict[str, Any] = {}
        if settled is None or checkpoint_core_attention:
            options = {
                "attention_mask": attention_mask,
                "qkv_format": qkv_format,
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_kv": cu_seqlens_kv,
                "cu_seqlens_q_padded": cu_seqlens_q_padded,
                "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_kv": max_seqlen_kv,
                "attn_mask_type": attn_mask_type,
                "window_size": window_size,
                "bottom_right_diagonal": bottom_right_diagonal,
                "core_attention_bias_type": core_attention_bias_type,
                "core_attention_bias": core_attention_bias,
                "alibi_slopes": alibi_slopes,
                "inference_params": inference_params,
                "pad_between_seqs": pad_between_seqs,
                "qkv_interleave_dim": qkv_interleave_dim,
            }
        if checkpoint_core_attention:
            return checkpoint(
                self,
                query_layer,
                key_layer,
                value_layer,
                use_reentrant=False,
                qkv_layer=qkv_layer,
                kv_layer=kv_layer,
                settled=settled,
                **options,
            )
        layout, inputs = _layers(op, query_layer, key_layer, value_layer, qkv_layer, kv_layer)
        if settled is None:
            cached = inference_params is not None and torch.is_grad_enabled()
            settled = self.settle(
                op,
                layout,
                inputs,
                options,
                tuple(n for n, t in inputs.items() if t.requires_grad) if cached else (),
            )
        first = next(iter(inputs.values()))
        inputs.update(settled.beside)
        if inference_params is not None:
            inputs.update(
                inference_params.inputs(
                    self.layer_number, self.num_gqa_groups, self._dims, kind_of(first.dtype)
                )
            )
        if self.training and self.attention_dropout:
            inputs["rng"] = next_rng(first.device)
        if inference_params is not None and torch.compiler.is_compiling():
            return trace_cached(settled.spec, inputs, inference_params.handle, self.layer_number)
        o = apply(settled.operation, settled.spec, inputs)["o"]
        if inference_params is not None:
            inference_params.stepped(self.layer_number)
        return o

    @property
    def _dims(self) -> tuple[int, int]:
        """Features of a head of q and k, and of v."""
        return (
            self.kv_channels if isinstance(self.kv_channels, tuple) else (self.kv_channels, self.kv_channels)
        )

    def settle(
        self,
        operation: str,
        layout: str,
        layers: Mapping[str, Tensor | TensorMeta],
        options: Mapping[str, Any],
        wanted: tuple[str, ...] = (),
    ) -> Settled:
        """Decide what a call of ``forward`` comes to, and refuse what it would refuse of ``operation``'s
        arguments; nothing is changed.

        ``layers``: the operation's inputs of ``layout``, or what stands for those that are not there yet;
        then what the operation itself refuses is found here too (``wanted``: the layers whose gradient will
        be). ``options``: ``forward``'s arguments.
        """
        op, of = operation, options.get
        form = (
            self.qkv_format
            if of("qkv_format") is None
            else one_of(op, "qkv_format", options["qkv_format"], FORMATS)
        )
        mask = of("attn_mask_type")
        mask = (
            self.attn_mask_type if mask is None else one_of(op, "attn_mask_type", mask, MASKS + MASK_ALIASES)
        )
        bias = one_of(op, "core_attention_bias_type", of("core_attention_bias_type", "no_bias"), BIASES)
        interleave = of("qkv_interleave_dim", -3)
        if interleave not in (-3, -2) or (interleave == -2 and layout == "q_kv"):
            raise ArgumentError(op, "qkv_interleave_dim", interleave, "-3, or -2 with qkv_layer")
        if interleave == -2 and layout == "qkv":
            layout = "qkv_interleaved"
        first = next(iter(layers.values()))
        device = first.device
        given = {name: options[name] for name in (*_SUMS, "alibi_slopes") if of(name) is not None}
        if of("attention_mask") is not None:
            if "padding" in mask and of("cu_seqlens_q") is None:
                given.update(counted(op, options["attention_mask"], _lengths(form, layers)))
            elif mask == "arbitrary":
                given["mask"] = options["attention_mask"]
                if not isinstance(given["mask"], Tensor):
                    raise ArgumentError(
                        op, "attention_mask", type(given["mask"]).__name__, f"a tensor with {mask!r}"
                    )
            else:
                raise ArgumentError(
                    op,
                    "attention_mask",
                    "a tensor",
                    f"None with {mask!r}, or a padding mask without cu_seqlens",
                )
        beside: dict[str, Tensor] = {name: value.detach().to(device) for name, value in given.items()}
        if bias == "alibi" and of("alibi_slopes") is None:
            beside["alibi_slopes"] = _slopes(self.num_attention_heads, device)
        if of("core_attention_bias") is not None:
            beside["bias"] = options["core_attention_bias"]
        if self.softmax_type == "learnable":
            beside["softmax_offset"] = self.softmax_offset
        gaps, said = (
            of("cu_seqlens_q_padded") is not None or of("cu_seqlens_kv_padded") is not None,
            of("pad_between_seqs"),
        )
        if said is not None and said != gaps:
            raise ArgumentError(
                op, "pad_between_seqs", said, "True with cu_seqlens_*_padded, False without, or None"
            )
        corner, window = of("bottom_right_diagonal"), of("window_size")
        corner = self.bottom_right_diagonal if corner is None else bool(corner)
        window = self.window_size if window is None else _window(op, window)
        longest, asked, cache = (0, 0), attention, of("inference_params")
        step: dict[str, TensorMeta] = {}
        if cache is not None:
            mask, corner, asked = self._check_cached(op, mask, bias, beside), None, cached_attention
            if torch.compiler.is_compiling():
                cache.check_layer(op, self.layer_number)
                longest = LONGEST
            else:
                own = (
                    tuple(first.shape[: 1 if form == "thd" else 2]),
                    self.num_gqa_groups,
                    self._dims,
                    kind_of(first.dtype),
                )
                metas, longest = cache.check_step(op, self.layer_number, form, *own)
                step = {
                    name: TensorMeta(meta.shape, dtype_of(meta.dtype), cache.cu_seqlens_q.device)
                    for name, meta in metas.items()
                }
        else:
            if form == "thd":
                longest = (
                    _longest(op, "q", of("max_seqlen_q"), beside),
                    _longest(op, "kv", of("max_seqlen_kv"), beside),
                )
            q = layers["q"] if "q" in layers else layers["qkv"]
            k = layers["k"] if "k" in layers else layers["kv"] if "kv" in layers else layers["qkv"]
            check_values(op, form, beside, q.shape, k.shape, longest)
        dropout = self.attention_dropout if self.training else 0.0
        channels, channels_v = self._dims
        spec = spec_for(
            "AttentionSpec",
            self.num_attention_heads,
            channels,
            self.num_gqa_groups,
            form,
            mask,
            self.softmax_scale,
            dropout,
            policy_now().deterministic,
            layout,
            channels_v,
            window,
            corner,
            bias,
            self.softmax_type,
            *longest,
        )
        # a draw changes the generator's state, a first step makes caches
        if dropout or cache is not None or type(first) is TensorMeta:
            rng = {"rng": TensorMeta((2,), torch.int64, device)} if dropout else {}
            validate(asked, spec, {**layers, **beside, **step, **rng}, wanted)
        return Settled(asked, spec, beside)

    def _check_cached(self, op: str, mask: str, bias: str, inputs: dict[str, Tensor]) -> str:
        """The mask over a cache; Fp8kitError for what attention over a cache cannot be given."""
        why = "with inference_params, whose step says the lengths"
        if self.attention_type == "cross":
            raise ArgumentError(op, "attention_type", "'cross'", "'self', with inference_params")
        if bias not in ("no_bias", "alibi"):
            raise ArgumentError(
                op, "core_attention_bias_type", repr(bias), "'no_bias' or 'alibi', with inference_params"
            )
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_kv_padded"):
            if name in inputs:
                raise ArgumentError(op, name, "a tensor", f"None {why}")
        return cached_mask(op, mask)


def _slopes(heads: int, device: torch.device) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.tensor(alibi_slopes(heads), dtype=torch.float32, device=device)
    return _kept_slopes(heads, device)


def _window(operation: str, window_size: Any) -> tuple[int, int]:
    """(left, right); None is (-1, -1). Fp8kitError for other than two integers of at least -1."""
    if window_size is None:
        return (-1, -1)
    window = tuple(window_size) if isinstance(window_size, tuple | list) else ()
    if len(window) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < -1 for n in window):
        raise ArgumentError(
            operation, "window_size", repr(window_size), "(left, right), each -1 (unbounded) or more, or None"
        )
    return window[0], window[1]


def _layers(
    operation: str, query: Any, key: Any, value: Any, qkv: Any, kv: Any
) -> tuple[str, dict[str, Tensor]]:
    """The layout's name and its inputs. Fp8kitError for a mixture of forms."""
    given = {"query_layer": query, "key_layer": key, "value_layer": value, "kv_layer": kv, "qkv_layer": qkv}
    layout, inputs = layout_of(operation, given)
    return layout, {name: given[argument] for name, argument in inputs.items()}


def _lengths(form: str, inputs: Mapping[str, Tensor | TensorMeta]) -> tuple[int, int] | None:
    """(s_q, s_kv) of the layers; None with "thd", whose layers do not say them, and for layers without a
    sequence."""
    q = inputs["q"] if "q" in inputs else inputs["qkv"]
    k = inputs["k"] if "k" in inputs else inputs["kv"] if "kv" in inputs else inputs["qkv"]
    dim = form.index("s") if "s" in form else -1
    return None if dim < 0 or min(q.ndim, k.ndim) <= dim else (q.shape[dim], k.shape[dim])


def counted(operation: str, attention_mask: Any, lengths: tuple[int, int] | None) -> dict[str, Tensor]:
    """cu_seqlens from boolean padding masks (b, 1, 1, s), True where masked out, for q and k of ``lengths``.
    FormatError for another dtype, ShapeError where s is another and where padding is not last (that is asked
    of the device, but not within ``torch.compile``)."""
    found: dict[str, Tensor] = {}
    for name, mask in zip(
        ("cu_seqlens_q", "cu_seqlens_kv"), pair_of(operation, "attention_mask", attention_mask), strict=True
    ):
        want_padding(operation, mask.shape, lengths, bool(found))
        if mask.dtype not in (torch.bool, torch.uint8):
            raise FormatError(operation, "attention_mask", mask.dtype, "torch.bool, True where masked out")
        rows = mask[:, 0, 0] != 0
        if not torch.compiler.is_compiling() and bool((rows[:, :-1] & ~rows[:, 1:]).any()):
            raise ShapeError(operation, "attention_mask", *MISPLACED)
        sums = (~rows).sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        found[name] = torch.nn.functional.pad(sums, (1, 0))
    return found


def check_values(
    operation: str,
    form: str,
    options: Mapping[str, Any],
    queries: Sequence[int],
    keys: Sequence[int],
    longest: tuple[int, int] = (0, 0),
) -> None:
    """ArgumentError for ``cu_seqlens_*`` on the CPU that do not fit queries and keys of these shapes, s or t
    among them. Within ``torch.compile`` and for tensors without values nobody looks."""
    if torch.compiler.is_compiling():
        return
    views = {
        name: as_view(options[name])
        for name in _SUMS
        if type(options.get(name)) is Tensor and options[name].device.type == "cpu"
    }
    for side, shape, most in zip(("q", "kv"), (queries, keys), longest, strict=True):
        at = max(form.find("s"), 0)
        if views and len(shape) > at:
            check_sequences(
                operation,
                views,
                f"cu_seqlens_{side}",
                shape[0] if form == "thd" else None,
                most or None if form == "thd" else shape[at],
            )


def _longest(operation: str, side: str, given: int | None, inputs: dict[str, Tensor]) -> int:
    """The longest sequence: what was given, or what cu_seqlens say."""
    if given is not None:
        positive(operation, **{f"max_seqlen_{side}": given})
        return given
    lengths = inputs.get(f"cu_seqlens_{side}")
    if lengths is None:
        raise ArgumentError(
            operation, f"cu_seqlens_{side}", None, "int32 (batch + 1,), with qkv_format 'thd'"
        )
    if torch.compiler.is_compiling():
        raise ArgumentError(operation, f"max_seqlen_{side}", None, "an int, within torch.compile")
    if lengths.ndim != 1 or not lengths.numel() or lengths.is_meta:
        return _STEP  # refused with the shapes
    sums = lengths.cpu().numpy()
    check_sums(operation, f"cu_seqlens_{side}", sums, None)
    return max(_STEP, -(-int(np.diff(sums).max(initial=0)) // _STEP) * _STEP)
