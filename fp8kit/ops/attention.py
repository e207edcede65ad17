"""Scaled dot-product attention as one operation: o = dropout(softmax(mask(scale * q k^T))) v per head.

Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2; grouped query heads: Ainslie et al. 2023; the gradients recompute
the probabilities from the rows' log-sum-exp (Dao et al., FlashAttention, 2022, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fp8kit import formats
from fp8kit.arrays import ArrayView, Shape, contiguous_strides
from fp8kit.errors import FormatError, ShapeError, expected
from fp8kit.formats import HIGH_PRECISION, DType
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views

# layout -> input name -> the parts that lie in its last dimension, in this order
LAYOUTS: dict[str, dict[str, str]] = {
    "separate": {"q": "q", "k": "k", "v": "v"},
    "q_kv": {"q": "q", "kv": "kv"},
    "qkv": {"qkv": "qkv"},
    "qkv_interleaved": {"qkv": "qkv"},
}
FORMATS = ("sbhd", "bshd")
MASKS = ("no_mask", "causal", "padding", "padding_causal")


@dataclass(frozen=True)
class AttentionSpec:
    """Static arguments of ``Attention``.

    * ``num_heads``: query heads h. ``num_gqa_groups``: key and value heads g, a divisor of h; 0 means h.
    * ``head_dim``: features d of one head.
    * ``qkv_format``: order of the leading dimensions, "sbhd" (sequence first) or "bshd".
    * ``mask``: "no_mask", "causal" (row i sees columns 0 ... i, aligned top-left), "padding" or "padding_causal" (each batch's true lengths
      come in ``cu_seqlens``).
    * ``softmax_scale``: factor of q k^T; 0 means 1 / sqrt(head_dim).
    * ``dropout``: probability of dropping an attention weight, in [0, 1).
    * ``deterministic``: backward gives the same bits every time.
    * ``layout``: which inputs there are. "separate": q, k, v; "q_kv": q and kv; "qkv": one input qkv. A packed input holds its parts one
      after the other in the last dimension: [h * d of q | g * d of k | g * d of v]. "qkv_interleaved": one input qkv, head after head, each
      [d of q | d of k | d of v]; only where g = h.
    """

    num_heads: int
    head_dim: int
    num_gqa_groups: int = 0
    qkv_format: str = "sbhd"
    mask: str = "causal"
    softmax_scale: float = 0.0
    dropout: float = 0.0
    deterministic: bool = False
    layout: str = "qkv"

    def __post_init__(self) -> None:
        if self.num_gqa_groups == 0:
            object.__setattr__(self, "num_gqa_groups", self.num_heads)
        if self.softmax_scale == 0 and self.head_dim > 0:
            object.__setattr__(self, "softmax_scale", 1 / math.sqrt(self.head_dim))

    def heads(self, part: str) -> int:
        """Heads of "q", "k" or "v"."""
        return self.num_heads if part == "q" else self.num_gqa_groups

    def width(self, parts: str) -> int:
        """Features of an input that holds ``parts``."""
        return sum(self.heads(part) for part in parts) * self.head_dim

    @property
    def interleaved(self) -> bool:
        """Whether the parts of the packed input alternate from head to head."""
        return self.layout == "qkv_interleaved"

    @property
    def padded(self) -> bool:
        """Whether the mask needs cu_seqlens."""
        return self.mask.startswith("padding")


class Part(NamedTuple):
    """Where q, k or v lies inside an input: a 4-dimensional strided view, ``offset`` elements from its start."""

    input: str
    shape: Shape
    strides: Shape
    offset: int

    def of(self, view: ArrayView) -> ArrayView:
        """The part of ``view``, no copy."""
        return view.with_strides(self.shape, self.strides, self.offset)


class Attention(Operation):
    """Inputs by ``spec.layout``: q (s_q, b, h * d), k and v (s_kv, b, g * d) or their packed form, h (float32, bfloat16 or float16),
    C-contiguous; the heads of an unpacked part may be a dimension of their own: (s_q, b, h, d). With "bshd" b comes first.

    ``cu_seqlens_q``, ``cu_seqlens_kv``: int32 (b + 1,), running sums of the true lengths, with a padding mask and only there.
    ``rng``: int64 (2,) seed and offset, where dropout > 0. Output ``o``: (s_q, b, h * d), as the projection wants it; rows
    beyond the true length are 0. Saved: ``lse``, float32 (b, h, s_q), the rows' log-sum-exp.

    ``infer`` raises ShapeError for sizes and names that do not fit, FormatError for dtypes.
    """

    name: ClassVar[str] = "attention"

    def infer(self, spec: AttentionSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        _check_spec(spec)
        parts = LAYOUTS[spec.layout]
        kind = _check_inputs(spec, metas)
        q = _meta(metas, "q" if "q" in parts else "qkv").shape
        batch, rows = _batch(spec, q), _length(spec, q)
        outputs = {"o": Meta((*q[:2], spec.width("q")), kind)}
        if not needs & parts.keys():
            return Signature(outputs)
        extra = (*(("cu_seqlens_q", "cu_seqlens_kv") if spec.padded else ()), *(("rng",) if spec.dropout else ()))
        return Signature(
            outputs,
            saved={"lse": Meta((batch, spec.num_heads, rows), formats.float32)},
            kept=(*parts, "o", *extra),
            grads={name: Meta(_meta(metas, name).shape, kind) for name in parts if name in needs},
        )

    def plan(self, spec: AttentionSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        signature = self.infer(spec, metas, needs)
        parts = _place(spec, metas)
        kind = signature.outputs["o"].dtype
        shapes = parts["q"].shape, parts["k"].shape

        def workspace(backward: bool) -> Meta:
            return Meta((kernels.attention_workspace(*shapes, kind, spec, backward),), formats.uint8)

        scratch = {"workspace": workspace(False)}
        if not signature.saved:
            scratch["lse"] = Meta((_batch(spec, shapes[0]), spec.num_heads, _length(spec, shapes[0])), formats.float32)
            return Plan(spec, signature, kernels, scratch, {}, parts)
        unwanted = {name: Meta(_meta(metas, name).shape, kind) for name in LAYOUTS[spec.layout] if name not in signature.grads}
        return Plan(spec, signature, kernels, scratch, {"workspace": workspace(True), **unwanted}, parts)

    def forward(self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        spec: AttentionSpec = plan.spec
        q, k, v = _views(plan, inputs)
        lse = saved["lse"] if plan.signature.saved else scratch["lse"]
        plan.kernels.attention_fwd(
            q,
            k,
            v,
            _heads_apart(outputs["o"], q),
            lse,
            inputs.get("cu_seqlens_q"),
            inputs.get("cu_seqlens_kv"),
            inputs["rng"] if spec.dropout else None,
            spec,
            scratch["workspace"],
            stream,
        )

    def backward(self, plan: Plan, kept: Views, saved: Views, cotangents: Views, grads: Views, scratch: Views, stream: int) -> None:
        """Fill the gradients that are wanted. The cotangent of ``o`` has o's shape, C-contiguous."""
        spec: AttentionSpec = plan.spec
        q, k, v = _views(plan, kept)
        dq, dk, dv = _views(plan, {name: grads.get(name) or scratch[name] for name in LAYOUTS[spec.layout]})
        plan.kernels.attention_bwd(
            _heads_apart(cotangents["o"], q),
            q,
            k,
            v,
            _heads_apart(kept["o"], q),
            saved["lse"],
            dq,
            dk,
            dv,
            kept.get("cu_seqlens_q"),
            kept.get("cu_seqlens_kv"),
            kept["rng"] if spec.dropout else None,
            spec,
            spec.deterministic,
            scratch["workspace"],
            stream,
        )


attention = Attention()


def _views(plan: Plan, views: Views) -> tuple[ArrayView, ArrayView, ArrayView]:
    """The strided q, k, v inside the inputs (or dq, dk, dv inside their gradients)."""
    q, k, v = (part.of(views[part.input]) for part in plan.extra.values())
    return q, k, v


def _heads_apart(o: ArrayView | None, q: ArrayView) -> ArrayView:
    """o (s, b, h * d) as (s, b, h, d)."""
    assert o is not None
    return o.with_strides(q.shape, contiguous_strides(q.shape))


def _place(spec: AttentionSpec, metas: Metas) -> dict[str, Part]:
    """Where q, k and v lie, in this order."""
    places = {}
    for name, parts in LAYOUTS[spec.layout].items():
        first, second = _meta(metas, name).shape[:2]
        width, offset = spec.width(parts), 0
        for part in parts:
            shape = (first, second, spec.heads(part), spec.head_dim)
            head = len(parts) * spec.head_dim if spec.interleaved else spec.head_dim  # from one head of a part to its next
            places[part] = Part(name, shape, (second * width, width, head, 1), offset)
            offset += spec.head_dim if spec.interleaved else spec.width(part)
    return places


def _batch(spec: AttentionSpec, shape: Shape) -> int:
    return shape[spec.qkv_format.index("b")]


def _length(spec: AttentionSpec, shape: Shape) -> int:
    return shape[spec.qkv_format.index("s")]


def _meta(metas: Metas, name: str) -> Meta:
    meta = metas.get(name)
    if meta is None:
        raise ShapeError(expected("attention", name, None, "an array"))
    return meta


def _check_spec(spec: AttentionSpec) -> None:
    def check(argument: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise ShapeError(expected("attention", argument, repr(getattr(spec, argument)), wanted))

    check("num_heads", spec.num_heads > 0, "at least 1")
    check("head_dim", spec.head_dim > 0, "at least 1")
    check("num_gqa_groups", spec.num_gqa_groups > 0 and spec.num_heads % spec.num_gqa_groups == 0, f"a divisor of {spec.num_heads} heads")
    check("qkv_format", spec.qkv_format in FORMATS, f"one of {', '.join(FORMATS)}")
    check("mask", spec.mask in MASKS, f"one of {', '.join(MASKS)}")
    check("layout", spec.layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}")
    check("layout", not spec.interleaved or spec.num_gqa_groups == spec.num_heads, f"one with {spec.num_gqa_groups} groups of heads")
    check("softmax_scale", math.isfinite(spec.softmax_scale), "a finite number")
    check("dropout", 0 <= spec.dropout < 1, "a probability in [0, 1)")


def _check_inputs(spec: AttentionSpec, metas: Metas) -> DType:
    """Refuse inputs that do not fit ``spec`` or each other; the dtype of all of them."""
    layout = LAYOUTS[spec.layout]
    kind = _meta(metas, next(iter(layout))).dtype
    if kind not in HIGH_PRECISION:
        raise FormatError(expected("attention", next(iter(layout)), kind, "float32, bfloat16 or float16"))
    rows: dict[str, tuple[str, Shape]] = {}  # side of the product -> (input, leading dimensions) first seen there
    for name, parts in layout.items():
        shape, dtype = _meta(metas, name)[:2]
        if dtype is not kind:
            raise FormatError(expected("attention", name, dtype, f"{kind} as the other inputs"))
        wanted = [(spec.width(parts),), *([(spec.heads(parts), spec.head_dim)] if len(parts) == 1 else [])]
        if len(shape) < 3 or shape[2:] not in wanted or 0 in shape:
            leading = ", ".join("sequence" if letter == "s" else "batch" for letter in spec.qkv_format[:2])
            forms = " or ".join(f"({leading}, {', '.join(map(str, last))})" for last in wanted)
            raise ShapeError(expected("attention", name, f"shape {shape}", f"{forms}, nothing empty"))
        _, seen = rows.setdefault("q" if "q" in parts else "kv", (name, shape[:2]))
        if shape[:2] != seen:
            raise ShapeError(expected("attention", name, f"shape {shape}", f"{seen} leading, as the other of k and v"))
    batches = {_batch(spec, shape): name for name, shape in rows.values()}
    if len(batches) > 1:
        raise ShapeError(expected("attention", "batch", f"{batches}", "one batch size"))
    _check_small(spec, metas, next(iter(batches)))
    return kind


def _check_small(spec: AttentionSpec, metas: Metas, batch: int) -> None:
    """cu_seqlens and rng: there where they are needed, and as they should be."""
    small: Mapping[str, tuple[bool, Meta, str]] = {
        "cu_seqlens_q": (spec.padded, Meta((batch + 1,), formats.int32), f"with mask {spec.mask!r}"),
        "cu_seqlens_kv": (spec.padded, Meta((batch + 1,), formats.int32), f"with mask {spec.mask!r}"),
        "rng": (spec.dropout > 0, Meta((2,), formats.int64), f"with dropout {spec.dropout}"),
    }
    for name, (needed, wanted, why) in small.items():
        meta = metas.get(name)
        if meta is None:
            if needed:
                raise ShapeError(expected("attention", name, None, f"{wanted.dtype.name} {wanted.shape} {why}"))
            continue
        if not needed and name != "rng":  # a generator may be at hand where nothing is dropped; lengths would go unheard
            raise ShapeError(expected("attention", name, f"shape {meta.shape}", f"None {why}"))
        if meta.dtype is not wanted.dtype:
            raise FormatError(expected("attention", name, meta.dtype, wanted.dtype.name))
        if meta.shape != wanted.shape:
            raise ShapeError(expected("attention", name, f"shape {meta.shape}", f"{wanted.shape}"))
