"""What a call of the core attention resolves to: an operation, its spec, and inputs beside the layers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp8kit.arguments import choice, shown
from fp8kit.errors import ArgumentError, AutogradError, ShapeError, UnsupportedError
from fp8kit.layers import context_group
from fp8kit.layers.arguments import MASK_ALIASES, longest
from fp8kit.layers.attention_base import AttentionBase
from fp8kit.layers.attention_inputs import ResolvedCall, pair_of
from fp8kit.ops.attention import attention
from fp8kit.ops.attention_spec import ARGUMENTS, BIASES, FORMATS, MASKS, AttentionSpec
from fp8kit.ops.kv_cache import cached_attention
from fp8kit.ops.values import check_sequences, check_sums
from fp8kit.spec import Operation

log = logging.getLogger("fp8kit")

_SUMS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_OF_A_STEP = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_kv_padded")  # what a step of a cache says
_STEP = 64  # lengths that are asked for are rounded up to multiples of this, so that plans are found again
# max_seqlen_q, max_seqlen_kv of a cached step within torch.compile: known when it runs
TRACED_LENGTHS = (1, 1)


@functools.cache
def _say_unread(mask: str) -> None:
    """Warn once that a mask which a caller gave has no effect."""
    log.warning(
        "attention_mask is not read with mask type %r, as in Transformer Engine: 'padding', 'padding_causal' "
        "and 'arbitrary' read it",
        mask,
    )


class AttentionCall(AttentionBase):
    """The half of ``DotProductAttention`` that computes nothing: ``resolve``. Its attributes are arguments of
    the constructor."""

    num_attention_heads: int
    kv_channels: int | tuple[int, int]
    num_gqa_groups: int
    attention_dropout: float
    qkv_format: str
    attn_mask_type: str
    window_size: tuple[int, int]
    bottom_right_diagonal: bool | None
    layer_number: int | None
    attention_type: str
    softmax_scale: float
    softmax_type: str
    softcap: float
    name: str | None
    return_max_logit = False
    # whatever bottom_right_diagonal and the right of window_size say, as in Transformer Engine
    causal_masks_have_their_corner = False

    @property
    def _dims(self) -> tuple[int, int]:
        """Features of a head of q and k, and of v."""
        return (
            self.kv_channels if isinstance(self.kv_channels, tuple) else (self.kv_channels, self.kv_channels)
        )

    def resolve(
        self,
        layout: str,
        layers: Mapping[str, Any],
        options: Mapping[str, Any],
        needs: tuple[str, ...] = (),
        stand_ins: bool = False,
    ) -> ResolvedCall:
        """Returns the operation, spec and further inputs of a call of ``forward``, refusing what it would
        refuse; nothing is changed.

        ``layers``: the operation's inputs of ``layout``, or ``stand_ins`` of those that are not there yet:
        then what the operation itself refuses is found here too (``needs``: the layers whose gradient will be
        wanted). ``options``: ``forward``'s arguments.
        """
        op, of = self.layer_name, options.get
        form, mask, bias = of("qkv_format"), of("attn_mask_type"), of("core_attention_bias_type", "no_bias")
        form = self.qkv_format if form is None else choice(op, "qkv_format", form, FORMATS)
        if mask is None:
            mask = self.attn_mask_type
        else:
            choice(op, "attn_mask_type", mask, MASKS + MASK_ALIASES)
        choice(op, "core_attention_bias_type", bias, BIASES)
        if form == "thd" and "padding" not in mask and of("inference_params") is None:
            wanted = "one of the padding masks, with qkv_format 'thd'"
            raise ArgumentError(op, "attn_mask_type", repr(mask), wanted)
        interleave = of("qkv_interleave_dim", -3)
        if interleave not in (-3, -2) or (interleave == -2 and layout == "q_kv"):
            raise ArgumentError(op, "qkv_interleave_dim", interleave, "-3, or -2 with qkv_layer")
        if interleave == -2 and layout == "qkv":
            layout = "qkv_interleaved"
        group, first = self.context, next(iter(layers.values()))
        if group is not None:
            layers, stand_ins = self._whole(group, form, layers, of("inference_params")), True
        beside = self._arrays(form, mask, bias, layers, options)
        gaps, declared = (
            of("cu_seqlens_q_padded") is not None or of("cu_seqlens_kv_padded") is not None,
            of("pad_between_seqs"),
        )
        if declared and not gaps:
            wanted = "False or None without cu_seqlens_*_padded, which say where the gaps are"
            raise ArgumentError(op, "pad_between_seqs", declared, wanted)
        corner, window = of("bottom_right_diagonal"), of("window_size")
        corner = self.bottom_right_diagonal if corner is None else bool(corner)
        window = self.window_size if window is None else (int(window[0]), int(window[1]))
        if self.causal_masks_have_their_corner and "causal" in mask:
            corner, window = None, (window[0], min(window[1], 0))
        cap = of("softcap")
        asked: Operation = attention
        longest, cache = (0, 0), of("inference_params")
        step: dict[str, Any] = {}
        if cache is not None:
            mask, corner, asked = self._cached_mask(mask, bias, beside, cache), None, cached_attention
            called = "layers" if stand_ins else ARGUMENTS[next(iter(layers))]
            step, longest = self._step_of(cache, form, called, first)
        else:
            if form == "thd":
                longest = (
                    self._longest("q", of("max_seqlen_q"), beside),
                    self._longest("kv", of("max_seqlen_kv"), beside),
                )
            self._check_sequences(form, beside, layers, longest)
        dropout = self.attention_dropout if self.training else 0.0
        channels, channels_v = self._dims
        fields = (
            self.num_attention_heads,
            channels,
            self.num_gqa_groups,
            form,
            mask,
            self.softmax_scale,
            dropout,
            self.is_deterministic(),
            layout,
            channels_v,
            window,
            corner,
            bias,
            self.softmax_type,
            self.softcap if cap is None else float(cap),
            *longest,
        )
        spec, draws = self.attention_spec(cache is None, fields, of("bf16_backward") is True)
        if group is not None:
            self._check_whole(group, spec, layers, beside, options)
        draws = draws or bool(dropout)
        if cache is not None and needs and not self.is_compiling():
            wanted = "inference: eval(), or no_grad()"
            raise AutogradError(op, "inference_params", "a call with gradients on", wanted)
        # a draw changes the random state, a first step makes caches
        if stand_ins or draws or cache is not None:
            self.check_call(asked, spec, {**layers, **beside, **step}, needs, draws)
        return ResolvedCall(asked, spec, beside, draws)

    def _step_of(
        self, cache: Any, form: str, name: str, first: Any
    ) -> tuple[dict[str, Any], tuple[int, int]]:
        """Returns what stands for the arrays that a step on a ``cache`` gets besides, and its lengths;
        ``name``: what errors call the ``first`` layer."""
        if self.is_compiling():
            cache.check_layer(self.layer_name, self.layer_number)
            return {}, TRACED_LENGTHS
        leading = tuple(first.shape[: 1 if form == "thd" else 2])
        own = self.num_gqa_groups, self._dims, self.kind_of(first.dtype)
        metas, longest = cache.check_step(
            self.layer_name, self.layer_number, form, leading, *own, layers=name
        )
        where = cache.cu_seqlens_q.device
        return {
            name: self.stand_in(meta.shape, self.dtype_of(meta.dtype), where) for name, meta in metas.items()
        }, longest

    def _check_whole(
        self,
        group: context_group.ContextGroup,
        spec: AttentionSpec,
        layers: Mapping[str, Any],
        beside: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Refuse what ranks that divide a sequence do not attend by."""
        op = self.layer_name
        context_group.check(op, group, spec, options)
        sides = {side: tuple(shape) for side, shape in zip(("q", "kv"), _leading(layers), strict=True)}
        known = self.host_views({name: beside[name] for name in _SUMS if name in beside})
        sums = {name: view.numpy() for name, view in known.items()}
        context_group.check_tokens(op, group, spec, sides, sums)

    def _whole(
        self, group: context_group.ContextGroup, form: str, layers: Mapping[str, Any], cache: Any
    ) -> dict[str, Any]:
        """Returns what stands for the layers of whole sequences. UnsupportedError within ``torch.compile``,
        with a ``cache``, and where scores are looked at."""
        op = self.layer_name
        if cache is not None:
            wanted = "None with context parallelism: caches are not divided"
            raise UnsupportedError(op, "inference_params", "a cache", wanted)
        if self.is_compiling():
            wanted = "one outside of torch.compile (torch.compiler.disable): ranks communicate in it"
            raise UnsupportedError(op, "call", "one within torch.compile, of several ranks", wanted)
        if self.return_max_logit:
            wanted = "False with context parallelism: a rank has a part of the scores"
            raise UnsupportedError(op, "return_max_logit", True, wanted)
        found = {}
        for name, layer in layers.items():
            shape = tuple(layer.shape)
            whole = context_group.whole_shape(form, shape, group.size)
            found[name] = self.stand_in(whole, layer.dtype, layer.device)
        return found

    def _arrays(
        self, form: str, mask: str, bias: str, layers: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the operation's inputs beside the layers."""
        op, of, first = self.layer_name, options.get, next(iter(layers.values()))
        # Transformer Engine looks at lengths where the mask or the format asks for them, and at no others
        packed = form == "thd" or of("inference_params") is not None
        # of the others the shape says where sequences start
        sums = _SUMS if packed else _SUMS[:2] if "padding" in mask else ()
        found = {name: options[name] for name in (*sums, "alibi_slopes") if of(name) is not None}
        arguments = {}
        padding = of("attention_mask")
        if padding is None and "padding" in mask and not packed and of("cu_seqlens_q") is None:
            self._want_lengths(form, mask, layers)
        if padding is not None:
            if "padding" in mask and of("cu_seqlens_q") is None:
                found.update(self._sums_of_masks(padding, form, layers))
            elif mask == "arbitrary":
                found["mask"], arguments["mask"] = padding, "attention_mask"
            elif not all(hasattr(each, "shape") for each in pair_of(op, "attention_mask", padding)):
                raise ArgumentError(op, "attention_mask", shown(padding), f"{self.array_name} or None")
            elif "padding" not in mask and not self.is_compiling():
                _say_unread(mask)
        found = {
            name: self.constant(arguments.get(name, name), value, first) for name, value in found.items()
        }
        if bias == "alibi" and of("alibi_slopes") is None:
            if self.tp_size > 1:
                wanted = f"those of this rank's {self.num_attention_heads} heads"
                raise ArgumentError(op, "alibi_slopes", None, wanted)
            found["alibi_slopes"] = self.slopes(self.num_attention_heads, first.device)
        if of("core_attention_bias") is not None:
            found["bias"] = self.as_input("core_attention_bias", options["core_attention_bias"])
        if self.softmax_type == "learnable":
            found["softmax_offset"] = self.widened(self.softmax_offset)  # type: ignore[attr-defined]
        return found

    def _want_lengths(self, form: str, mask: str, layers: Mapping[str, Any]) -> None:
        """ShapeError for a padding ``mask`` without lengths."""
        batch, length = form.index("b"), form.index("s")
        q, kv = ((shape[batch], 1, 1, shape[length]) for shape in _leading(layers))
        shapes = f"{q}" if q == kv else f"{q} for queries and {kv} for keys"
        wanted = f"bool {shapes}, True at padding, or cu_seqlens_q and cu_seqlens_kv, int32 ({q[0] + 1},)"
        raise ShapeError(self.layer_name, "attention_mask", None, f"{wanted}, with mask {mask!r}")

    def _cached_mask(self, mask: str, bias: str, inputs: dict[str, Any], cache: Any) -> str:
        """Returns the mask of new tokens over a cache that means what ``mask`` means over whole sequences;
        the lengths that the step says are taken out of ``inputs``. ArgumentError for an argument that
        attention over a cache does not take."""
        op = self.layer_name
        if not isinstance(cache, self.frontend.InferenceParams):
            raise ArgumentError(op, "inference_params", shown(cache), "InferenceParams or None")
        if self.attention_type == "cross":
            raise ArgumentError(op, "attention_type", "'cross'", "'self', with inference_params")
        if bias not in ("no_bias", "alibi"):
            raise ArgumentError(
                op, "core_attention_bias_type", repr(bias), "'no_bias' or 'alibi', with inference_params"
            )
        given = {name: inputs.pop(name) for name in _OF_A_STEP if name in inputs}
        for name, values in self.host_views(given).items():
            # Transformer Engine reads none of them: its programs say keys' lengths with or without the cached
            owns = ("cu_seqlens_kv", "cu_seqlens_q") if name == "cu_seqlens_kv" else (name,)
            cache.check_sums_of_step(op, name, owns, values.numpy())
        if mask == "arbitrary":
            wanted = "a causal or padding mask or no_mask, with inference_params"
            raise ArgumentError(op, "attn_mask_type", repr(mask), wanted)
        return "padding_causal_bottom_right" if "causal" in mask else "padding"

    def _sums_of_masks(self, masks: Any, form: str, layers: Mapping[str, Any]) -> dict[str, Any]:
        """cu_seqlens from boolean padding masks (b, 1, 1, s), True where masked out, for queries and keys.
        ShapeError for another shape; layers of "thd" do not say s."""
        op, at, found = self.layer_name, form.find("s"), {}
        sides = {"q": "queries", "kv": "keys"}
        pair = pair_of(op, "attention_mask", masks)
        for (side, said), mask, layer in zip(sides.items(), pair, _leading(layers), strict=True):
            mask = self.as_input("attention_mask", mask)
            shape = tuple(mask.shape)
            if len(shape) != 4 or shape[1:3] != (1, 1):
                raise ShapeError(op, "attention_mask", f"shape {shape}", "(batch, 1, 1, sequence)")
            if 0 <= at < len(layer) and shape[3] != layer[at]:
                wanted = f"(batch, 1, 1, {layer[at]}) for {said}, a pair where the lengths differ"
                raise ShapeError(op, "attention_mask", f"shape {shape}", wanted)
            found[f"cu_seqlens_{side}"] = self.sums_of_mask(mask)
        return found

    def _check_sequences(
        self, form: str, inputs: Mapping[str, Any], layers: Mapping[str, Any], longest: tuple[int, int]
    ) -> None:
        """ArgumentError for ``cu_seqlens_*`` on the CPU that do not fit s or t of the layers."""
        views = self.host_views({name: inputs[name] for name in _SUMS if name in inputs})
        for side, shape, most in zip(("q", "kv"), _leading(layers), longest, strict=True):
            at = max(form.find("s"), 0)
            if views and len(shape) > at:
                check_sequences(
                    self.layer_name,
                    views,
                    f"cu_seqlens_{side}",
                    shape[0] if form == "thd" else None,
                    most or None if form == "thd" else shape[at],
                )

    def _longest(self, side: str, most: Any, inputs: Mapping[str, Any]) -> int:
        """Returns the longest sequence: ``most``, or what cu_seqlens say."""
        if most is not None:
            if not isinstance(most, int):  # which a symbol of torch.compile is
                most = longest(self.layer_name, f"max_seqlen_{side}", most)
            return max(int(most), 1)
        op, lengths = self.layer_name, inputs.get(f"cu_seqlens_{side}")
        if lengths is None:
            raise ArgumentError(op, f"cu_seqlens_{side}", None, "int32 (batch + 1,), with qkv_format 'thd'")
        if self.is_compiling():
            raise ArgumentError(op, f"max_seqlen_{side}", None, "an int, within torch.compile")
        sums = None if len(lengths.shape) != 1 or not lengths.shape[0] else self.host_values(lengths)
        if sums is None:
            return _STEP  # refused with the shapes
        check_sums(op, f"cu_seqlens_{side}", sums, None)
        return max(_STEP, -(-int(np.diff(sums).max(initial=0)) // _STEP) * _STEP)


def _leading(inputs: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
    """Shapes of what holds the queries and of what holds the keys."""
    first, *others = inputs.values()
    return first.shape, (others or [first])[0].shape
