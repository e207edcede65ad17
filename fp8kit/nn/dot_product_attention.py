"""``DotProductAttention`` (Vaswani et al. 2017; grouped query heads: Ainslie et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from fp8kit import arrays
from fp8kit.arguments import choice, flag, integer, number, shown
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.autograd import Tensor, apply, is_grad_enabled, validate
from fp8kit.backends.policy import get_policy
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.formats import bool_, float32, int64, uint8
from fp8kit.layers.attention_inputs import MISPLACED, Settled, alibi_slopes, layout_of, pair_of, want_padding
from fp8kit.layers.kv_steps import cached_mask
from fp8kit.layers.unsupported import FORWARD
from fp8kit.nn import random
from fp8kit.nn.inference import InferenceParams
from fp8kit.nn.later import CONSTRUCTOR, later
from fp8kit.nn.module import Module, as_tensor, make_parameter, positive, resolve
from fp8kit.nn.recompute import checkpoint
from fp8kit.ops.attention import AttentionSpec, attention
from fp8kit.ops.attention_spec import BIASES, FORMATS, MASKS, SOFTMAX_TYPES
from fp8kit.ops.kv_cache import cached_attention
from fp8kit.ops.values import check_sequences, check_sums
from fp8kit.spec import Operation

_ALIASES = ("padding,causal", "causal,padding")
_SUMS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@lru_cache(maxsize=1024)
def _spec(*arguments: Any) -> AttentionSpec:
    """The same object for the same arguments: plans are found by a spec's identity."""
    return AttentionSpec(*arguments)


@lru_cache(maxsize=64)
def alibi_slopes_for(heads: int, device: Device) -> ArrayView:
    """ALiBi's slopes, float32 (h,)."""
    return arrays.to(arrays.as_view(np.array(alibi_slopes(heads), np.float32)), device)


class DotProductAttention(Module):
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
      see ``ops.attention_spec.AttentionSpec``.
    * ``softmax_scale``: None is 1 / sqrt(d). ``softmax_type``: "vanilla"; "off-by-one": exp(0) joins the
      denominator; "learnable": exp(softmax_offset[h]) does, a float32 parameter (h,) that starts at 0.
      ``device``: where that lies.
    * ``layer_number``: the layer's place in ``inference_params``. ``name``: kept, for the user.

    ``other``: Transformer Engine's further arguments, at their defaults (``fp8kit.nn.later``).

    Raises Fp8kitError for arguments out of their range.
    """

    argument_names: ClassVar[dict[str, str]] = {
        "q": "query_layer",
        "k": "key_layer",
        "v": "value_layer",
        "kv": "kv_layer",
        "qkv": "qkv_layer",
        "bias": "core_attention_bias",
        "mask": "attention_mask",
    }

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
        *,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        name: str | None = None,
        device: Any = None,
        **other: Any,
    ) -> None:
        op = "DotProductAttention"
        later(op, CONSTRUCTOR[op], other)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        pair = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        if len(pair) != 2:
            raise ArgumentError(op, "kv_channels", shown(kv_channels), "an int, or two: of q and k, and of v")
        channels, channels_v = pair
        positive(op, num_attention_heads=num_attention_heads, kv_channels=channels, num_gqa_groups=groups)
        positive(op, kv_channels=channels_v)
        if num_attention_heads % groups:
            raise ArgumentError(op, "num_gqa_groups", groups, f"a divisor of {num_attention_heads} heads")
        self.num_attention_heads, self.num_gqa_groups = int(num_attention_heads), int(groups)
        self.kv_channels: int | tuple[int, int] = (
            (int(channels), int(channels_v)) if isinstance(kv_channels, tuple) else int(channels)
        )
        self.attention_dropout = number(op, "attention_dropout", attention_dropout, 1.0)
        self.softmax_scale = (
            0.0 if softmax_scale is None else number(op, "softmax_scale", softmax_scale, above=0.0)
        )
        self.qkv_format = choice(op, "qkv_format", qkv_format, FORMATS)
        self.attn_mask_type = choice(op, "attn_mask_type", attn_mask_type, MASKS + _ALIASES)
        self.attention_type = choice(op, "attention_type", attention_type, ("self", "cross"))
        self.softmax_type = choice(op, "softmax_type", softmax_type, SOFTMAX_TYPES)
        self.window_size, self.bottom_right_diagonal = (
            _window(op, window_size),
            _corner(op, bottom_right_diagonal),
        )
        self.layer_number, self.name = (
            None if layer_number is None else integer(op, "layer_number", layer_number),
            name,
        )
        if self.softmax_type == "learnable":
            self.softmax_offset = make_parameter((num_attention_heads,), 0.0, *resolve(op, float32, device))

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
        *,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Any = None,
        alibi_slopes: Any = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        qkv_layer: Any = None,
        kv_layer: Any = None,
        qkv_interleave_dim: int = -3,
        settled: Settled | None = None,
        **other: Any,
    ) -> Tensor:
        """Attend. Arguments that have a twin in the constructor override it.

        * ``query_layer`` h (s_q, b, h, d), ``key_layer`` (s_kv, b, g, d), ``value_layer`` (s_kv, b, g, d_v);
          with "bshd" b comes first, with "thd" t stands for s and b. Or ``kv_layer`` (s_kv, b, g (d + d_v)):
          k's features, then v's. Or ``qkv_layer``: q's too (``qkv_interleave_dim`` -3), or head after head,
          each q, k, v (-2; only where g = h).
        * ``cu_seqlens_q``, ``cu_seqlens_kv``: int32 (b + 1,), running sums of the true lengths, for padding
          masks; with "thd" ``cu_seqlens_q_padded``, ``cu_seqlens_kv_padded`` say where the sequences start,
          if there are gaps (``pad_between_seqs``). They start at 0, never fall and end at most at t; no
          sequence is longer than s or ``max_seqlen_q``. On the CPU other values are an ArgumentError; on a
          GPU nobody looks at them: then rows may come out wrong, but nothing out of bounds is read or
          written.
        * ``max_seqlen_q``, ``max_seqlen_kv``: for "thd"; None asks cu_seqlens, which waits for the device,
          and rounds up to 64.
        * ``attention_mask``: True masks out. With "arbitrary": bool (1 | b, 1 | h, 1 | s_q, s_kv). With a
          padding mask and no cu_seqlens: bool (b, 1, 1, s) of q, or a pair for q and k, padding last; counted
          on the host.
        * ``core_attention_bias_type``: "no_bias"; "pre_scale_bias" or "post_scale_bias" with
          ``core_attention_bias`` h (1 | b, 1 | h, 1 | s_q, s_kv), differentiable; "alibi", with
          ``alibi_slopes`` float32 (h,) or (b, h), or the paper's.
        * ``checkpoint_core_attention``: what this call saves for backward is computed once more there, the
          same bits.
        * ``fast_zero_fill``: accepted; outputs of no row are always 0.
        * ``inference_params``: the layers are the new tokens of a step that was announced to it, and attend
          over their whole sequences. The step says the lengths, so cu_seqlens and padding masks are not given
          (but "thd"'s ``cu_seqlens_q_padded``). No bias array, no "arbitrary" mask, no cross attention, no
          gradient.
        * ``settled``: what ``settle`` said of these options, where it was asked before the layers were there;
          else this asks.

        Returns (s_q, b, h d_v), (b, s_q, h d_v) or (t, h d_v), rows beyond the true length 0. Raises
        Fp8kitError kinds.
        """
        given = dict(locals())  # the arguments
        op = "DotProductAttention"
        later(op, FORWARD[op], other)
        if flag(op, "checkpoint_core_attention", checkpoint_core_attention):
            call = {
                name: value
                for name, value in given.items()
                if name not in ("self", "other", "checkpoint_core_attention")
            }
            return checkpoint(self, **call, **other)  # type: ignore[no-any-return]
        layout, inputs = _layers(op, query_layer, key_layer, value_layer, qkv_layer, kv_layer)
        if settled is None:
            cached = inference_params is not None and is_grad_enabled()
            wanted = tuple(name for name, value in inputs.items() if cached and value.requires_grad)
            settled = self.settle(op, layout, inputs, given, wanted)
        dtype = next(iter(inputs.values())).dtype
        inputs = {**inputs, **settled.beside}
        if inference_params is not None:
            assert self.layer_number is not None
            inputs |= inference_params.inputs(self.layer_number, self.num_gqa_groups, self._dims, dtype)
        draw = random.next_rng if settled.spec.dropout else None
        o = apply(settled.operation, settled.spec, inputs, owner=self, draw=draw)["o"]
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
        layers: Mapping[str, Tensor | ArrayView],
        options: Mapping[str, Any],
        wanted: tuple[str, ...] = (),
    ) -> Settled:
        """Decide what a call of ``forward`` comes to, and refuse what it would refuse of ``operation``'s
        arguments; nothing is changed.

        ``layers``: the operation's inputs of ``layout``; views of pointer 0 stand for those that are not
        there yet, and then what the operation itself refuses is found here too (``wanted``: the layers whose
        gradient will be). ``options``: ``forward``'s arguments.
        """
        op, of = operation, options.get
        flag(op, "fast_zero_fill", of("fast_zero_fill", True))
        form = (
            self.qkv_format
            if of("qkv_format") is None
            else choice(op, "qkv_format", of("qkv_format"), FORMATS)
        )
        mask = of("attn_mask_type")
        mask = self.attn_mask_type if mask is None else choice(op, "attn_mask_type", mask, MASKS + _ALIASES)
        bias = choice(op, "core_attention_bias_type", of("core_attention_bias_type", "no_bias"), BIASES)
        interleave = integer(op, "qkv_interleave_dim", of("qkv_interleave_dim", -3))
        if interleave not in (-3, -2) or (interleave == -2 and layout == "q_kv"):
            raise ArgumentError(op, "qkv_interleave_dim", interleave, "-3, or -2 with qkv_layer")
        if interleave == -2 and layout == "qkv":
            layout = "qkv_interleaved"
        first = next(iter(layers.values()))
        device = first.device
        beside: dict[str, Tensor | ArrayView] = {}
        given = {name: options[name] for name in (*_SUMS, "alibi_slopes") if of(name) is not None}
        if of("attention_mask") is not None:
            if "padding" in mask and "cu_seqlens_q" not in given:
                given |= _counted(op, options["attention_mask"], _lengths(form, layers))
            elif mask == "arbitrary":
                given["mask"] = options["attention_mask"]
            else:
                raise ArgumentError(
                    op,
                    "attention_mask",
                    "an array",
                    f"None with {mask!r}, or a padding mask without cu_seqlens",
                )
        for name, value in given.items():
            beside[name] = arrays.to(as_tensor(op, self.argument_names.get(name, name), value).view, device)
        if bias == "alibi" and "alibi_slopes" not in given:
            beside["alibi_slopes"] = alibi_slopes_for(self.num_attention_heads, device)
        if of("core_attention_bias") is not None:
            beside["bias"] = as_tensor(op, "core_attention_bias", options["core_attention_bias"])
        if self.softmax_type == "learnable":
            beside["softmax_offset"] = self.softmax_offset
        gaps, said = any(of(name) is not None for name in _SUMS[2:]), of("pad_between_seqs")
        if said is not None and flag(op, "pad_between_seqs", said) != gaps:
            raise ArgumentError(
                op, "pad_between_seqs", said, "True with cu_seqlens_*_padded, False without, or None"
            )
        corner = of("bottom_right_diagonal")
        corner = self.bottom_right_diagonal if corner is None else _corner(op, corner)
        window = self.window_size if of("window_size") is None else _window(op, options["window_size"])
        positive(
            op, **{name: options[name] for name in ("max_seqlen_q", "max_seqlen_kv") if of(name) is not None}
        )
        longest: tuple[int, int] = (0, 0)
        cache = of("inference_params")
        asked: Operation = attention
        step: dict[str, ArrayView] = {}
        if cache is not None:
            if not isinstance(cache, InferenceParams):
                raise ArgumentError(op, "inference_params", shown(cache), "InferenceParams or None")
            mask, corner, asked = self._check_cached(op, mask, bias, beside), None, cached_attention
            leading = first.shape[: 1 if form == "thd" else 2]
            metas, longest = cache.check_step(
                op, self.layer_number, form, leading, self.num_gqa_groups, self._dims, first.dtype
            )
            step = {name: ArrayView(0, meta.shape, meta.dtype, cache.device) for name, meta in metas.items()}
        else:
            if form == "thd":
                longest = (
                    _longest(op, "q", of("max_seqlen_q"), beside),
                    _longest(op, "kv", of("max_seqlen_kv"), beside),
                )
            # with a cache the operation looks at what the step says
            check_values(op, form, beside, *_leading(layers), longest)
        dropout = self.attention_dropout if self.training else 0.0
        channels, channels_v = self._dims
        spec = _spec(
            self.num_attention_heads,
            channels,
            self.num_gqa_groups,
            form,
            mask,
            self.softmax_scale,
            dropout,
            get_policy().deterministic,
            layout,
            channels_v,
            window,
            corner,
            bias,
            self.softmax_type,
            *longest,
        )
        if isinstance(first, ArrayView) or cache is not None:  # a first step makes caches
            inputs = {
                **layers,
                **beside,
                **step,
                **({"rng": ArrayView(0, (2,), int64, device)} if dropout else {}),
            }
            validate(asked, spec, inputs, self, wanted)
        return Settled(asked, spec, beside)

    def _check_cached(self, op: str, mask: str, bias: str, inputs: Mapping[str, Any]) -> str:
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
                raise ArgumentError(op, name, "an array", f"None {why}")
        return cached_mask(op, mask)


def _leading(inputs: Mapping[str, Any]) -> tuple[Shape, Shape]:
    """Shapes of what holds the queries and of what holds the keys."""
    queries, keys = (
        "q" if "q" in inputs else "qkv",
        "k" if "k" in inputs else "kv" if "kv" in inputs else "qkv",
    )
    return inputs[queries].shape, inputs[keys].shape


def check_values(
    operation: str,
    form: str,
    inputs: Mapping[str, Any],
    queries: Shape,
    keys: Shape,
    longest: tuple[int | None, int | None],
) -> None:
    """ArgumentError for ``cu_seqlens_*`` on the CPU that do not fit queries and keys of these shapes, s or t
    among them."""
    for side, shape, most in zip(("q", "kv"), (queries, keys), longest, strict=True):
        at = max(form.find("s"), 0)
        if len(shape) > at:
            check_sequences(
                operation,
                inputs,
                f"cu_seqlens_{side}",
                shape[0] if form == "thd" else None,
                most or None if form == "thd" else shape[at],
            )


def _window(operation: str, window_size: Any) -> tuple[int, int]:
    """(left, right); None is (-1, -1). Fp8kitError for other than two integers of at least -1."""
    if window_size is None:
        return (-1, -1)
    window = tuple(window_size) if isinstance(window_size, tuple | list) else ()
    if len(window) != 2 or any(
        isinstance(n, bool) or not isinstance(n, int | np.integer) or n < -1 for n in window
    ):
        raise ArgumentError(
            operation, "window_size", repr(window_size), "(left, right), each -1 (unbounded) or more, or None"
        )
    return int(window[0]), int(window[1])


def _corner(operation: str, bottom_right_diagonal: bool | None) -> bool | None:
    return (
        None
        if bottom_right_diagonal is None
        else flag(operation, "bottom_right_diagonal", bottom_right_diagonal)
    )


def _layers(
    operation: str, query: Any, key: Any, value: Any, qkv: Any, kv: Any
) -> tuple[str, dict[str, Any]]:
    """The layout's name and its inputs. Fp8kitError for a mixture of forms."""
    given = {"query_layer": query, "key_layer": key, "value_layer": value, "kv_layer": kv, "qkv_layer": qkv}
    layout, inputs = layout_of(operation, given)
    return layout, {
        name: as_tensor(operation, argument, given[argument]) for name, argument in inputs.items()
    }


def _lengths(form: str, inputs: Mapping[str, Any]) -> tuple[int, int] | None:
    """(s_q, s_kv) of the layers; None with "thd", whose layers do not say them, and for layers without a
    sequence."""
    queries, keys = _leading(inputs)
    dim = form.find("s")
    return None if dim < 0 or min(len(queries), len(keys)) <= dim else (queries[dim], keys[dim])


def _counted(operation: str, attention_mask: Any, lengths: tuple[int, int] | None) -> dict[str, Any]:
    """cu_seqlens from boolean padding masks (b, 1, 1, s), True where masked out, for q and k; ShapeError
    where s is not ``lengths``'."""
    found: dict[str, Any] = {}
    for name, mask in zip(
        ("cu_seqlens_q", "cu_seqlens_kv"), pair_of(operation, "attention_mask", attention_mask), strict=True
    ):
        view = as_tensor(operation, "attention_mask", mask).view
        want_padding(operation, view.shape, lengths, bool(found))
        if view.dtype not in (bool_, uint8):
            raise FormatError(operation, "attention_mask", view.dtype.name, "bool, True where masked out")
        rows = view.numpy()[:, 0, 0] != 0
        if (rows[:, :-1] & ~rows[:, 1:]).any():
            raise ShapeError(operation, "attention_mask", *MISPLACED)
        found[name] = np.concatenate([[0], np.cumsum((~rows).sum(1))]).astype(np.int32)
    return found


def _longest(operation: str, side: str, given: int | None, inputs: Mapping[str, Any]) -> int:
    """The longest sequence: what was given, or what cu_seqlens say, rounded up to a multiple of 64 so that
    plans are found again."""
    if given is not None:
        positive(operation, **{f"max_seqlen_{side}": given})
        return int(given)
    lengths = inputs.get(f"cu_seqlens_{side}")
    if lengths is None:
        raise ArgumentError(
            operation, f"cu_seqlens_{side}", None, "int32 (batch + 1,), with qkv_format 'thd'"
        )
    if lengths.ndim != 1 or not lengths.size:
        return 64  # refused with the shapes
    sums = lengths.numpy()
    check_sums(operation, f"cu_seqlens_{side}", sums, None)
    return max(64, -(-int(np.diff(sums).max(initial=0)) // 64) * 64)
