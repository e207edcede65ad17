"""Scaled dot-product attention as one operation: o = dropout(softmax(scores)) v per head, over the scores that the mask leaves.

Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2; grouped query heads: Ainslie et al. 2023; the gradients recompute
the probabilities from the rows' log-sum-exp (Dao et al., FlashAttention, 2022, appendix B).

The kernels know padded batches only. Sequences that lie one after the other ("thd") are unpacked before and packed after them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from fp8kit import formats
from fp8kit.arrays import ArrayView, Shape, contiguous_strides
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.errors import FormatError, ShapeError, expected
from fp8kit.formats import HIGH_PRECISION, DType
from fp8kit.ops.attention_spec import FORMATS, LAYOUTS, MASKS, AttentionSpec, batch_of, check, check_starts, length_of
from fp8kit.ops.values import check_lengths
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views

__all__ = ["FORMATS", "LAYOUTS", "MASKS", "Attention", "AttentionSpec", "attention"]


class Part(NamedTuple):
    """Where q, k or v lies inside an input: a 4-dimensional strided view, ``offset`` elements from its start."""

    input: str
    shape: Shape
    strides: Shape
    offset: int

    def of(self, view: ArrayView) -> ArrayView:
        """The part of ``view``, no copy."""
        return view.with_strides(self.shape, self.strides, self.offset)


class Dense(NamedTuple):
    """The call as the kernels see it: ``spec`` with a padded format, each input's ``shapes`` there, the ``parts`` q, k, v, o's shape."""

    spec: AttentionSpec
    shapes: dict[str, Shape]
    parts: dict[str, Part]
    o: Shape


class Attention(Operation):
    """Inputs by ``spec.layout``: q (s_q, b, h * d), k (s_kv, b, g * d) and v (s_kv, b, g * d_v), or their packed form, h (float32, bfloat16
    or float16), C-contiguous; the heads of an unpacked part may be a dimension of their own: (s_q, b, h, d). With "bshd" b comes
    first; with "thd" t tokens stand where s and b stand.

    * ``cu_seqlens_q``, ``cu_seqlens_kv``: int32 (b + 1,), running sums of the true lengths, with a padding mask and only there. With "thd"
      also ``cu_seqlens_q_padded``, ``cu_seqlens_kv_padded``: where each sequence starts, if there are gaps between them.
    * ``mask``: bool or uint8 (1 | b, 1 | h, 1 | s_q, s_kv), with mask "arbitrary". ``bias``: likewise, in the inputs' dtype, with a bias.
    * ``alibi_slopes``: float32 (h,) or (b, h), with "alibi". ``softmax_offset``: float32 (h,), with softmax type "learnable".
    * ``rng``: int64 (2,) seed and offset, where dropout > 0.

    Batch, lengths and t may be 0: without keys o is 0, and where nothing is attended to or by, gradients are. Heads and features may not.

    Output ``o``: (s_q, b, h * d_v), as the projection wants it; rows beyond the true length, and tokens of no sequence, are 0. Saved:
    ``lse``, float32 (b, h, s_q), the rows' log-sum-exp. Gradients of q, k, v (in their layout), bias and softmax_offset.

    ``infer`` raises ShapeError for sizes and names that do not fit, FormatError for dtypes; ``forward`` ArgumentError for running sums on
    the CPU that are none (``ops.values``).
    """

    name: ClassVar[str] = "attention"

    def infer(self, spec: AttentionSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        check(spec)
        layout = LAYOUTS[spec.layout]
        kind = check_inputs(spec, metas)
        dense = dense_of(spec, metas)
        extras = check_extras(spec, metas, dense, kind)
        q = meta_of(metas, next(iter(layout))).shape
        outputs = {"o": Meta((*_leading(spec, q), spec.num_heads * spec.head_dim_v), kind)}
        grads = {n: meta_of(metas, n) for n in (*layout, "bias", "softmax_offset") if n in needs}
        if not grads:
            return Signature(outputs)
        if not attends(spec, metas):
            return Signature(outputs, grads={n: Meta(meta.shape, meta.dtype, zero=True) for n, meta in grads.items()})
        return Signature(
            outputs,
            saved={"lse": Meta(lse_shape(dense), formats.float32)},
            kept=(*layout, "o", *extras),
            grads={n: Meta(meta.shape, meta.dtype) for n, meta in grads.items()},
        )

    def plan(self, spec: AttentionSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        signature = self.infer(spec, metas, needs)
        dense, (o, kind, _) = dense_of(spec, metas), signature.outputs["o"]
        if not attends(spec, metas):
            size = math.prod(o)
            workspace_of_sums = Meta((kernels.column_sum_workspace(0, size),), formats.uint8)
            return Plan(spec, signature, kernels, {"nothing": Meta((0, size), kind), "workspace": workspace_of_sums} if size else {})
        shapes = [part.shape for part in dense.parts.values()]
        dbias = signature.grads["bias"].shape if "bias" in signature.grads else None

        def workspace(backward: bool) -> dict[str, Meta]:
            nbytes = kernels.attention_workspace(*shapes, dbias if backward else None, kind, dense.spec, backward)
            return {"workspace": Meta((nbytes,), formats.uint8)}

        def padded(names: Iterable[str]) -> dict[str, Meta]:
            """Room for the padded form of ``names``, nothing where the format is a padded one."""
            whole = {**dense.shapes, "o": dense.o, "do": dense.o, **{f"d{name}": shape for name, shape in dense.shapes.items()}}
            return {f"dense_{name}": Meta(whole[name], kind) for name in names} if spec.packed else {}

        scratch = workspace(False) | padded((*dense.shapes, "o"))
        if not signature.saved:
            return Plan(spec, signature, kernels, scratch | {"lse": Meta(lse_shape(dense), formats.float32)}, {}, dense)
        backward = workspace(True) | padded((*dense.shapes, "o", "do", *(f"d{name}" for name in dense.shapes)))
        if not spec.packed:
            backward |= {f"dense_d{name}": Meta(shape, kind) for name, shape in dense.shapes.items() if name not in signature.grads}
        return Plan(spec, signature, kernels, scratch, backward, dense)

    def forward(self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int) -> None:
        spec, dense = plan.spec, plan.extra
        check_lengths(self.name, spec, inputs)
        if dense is None:
            out = _there(outputs["o"])
            if out.size:  # tokens without keys: the sums of no rows are 0
                plan.kernels.sum_rows(scratch["nothing"], out.reshape(out.size), scratch["workspace"], stream)
            return
        q, k, v = _parts(dense, {name: unpacked(plan, inputs, inputs[name], name, scratch, stream) for name in dense.shapes})
        o = scratch["dense_o"] if spec.packed else outputs["o"]
        lse = saved["lse"] if plan.signature.saved else scratch["lse"]
        plan.kernels.attention_fwd(q, k, v, heads_apart(o, dense), lse, extras_of(spec, inputs), dense.spec, scratch["workspace"], stream)
        if spec.packed:
            plan.kernels.pack_sequences(o, tokens_of(outputs["o"]), *places_of(inputs, "q"), stream)

    def backward(self, plan: Plan, kept: Views, saved: Views, cotangents: Views, grads: Views, scratch: Views, stream: int) -> None:
        """Fill the gradients that are wanted. The cotangent of ``o`` has o's shape, C-contiguous."""
        spec, dense = plan.spec, plan.extra
        if dense is None:
            return
        q, k, v = _parts(dense, {name: unpacked(plan, kept, kept[name], name, scratch, stream) for name in dense.shapes})
        o = heads_apart(unpacked(plan, kept, kept["o"], "o", scratch, stream), dense)
        do = heads_apart(unpacked(plan, kept, cotangents["o"], "do", scratch, stream), dense)
        whole = {name: scratch.get(f"dense_d{name}") or grads[name] for name in dense.shapes}
        dq, dk, dv = _parts(dense, whole)
        plan.kernels.attention_bwd(
            do, q, k, v, o, saved["lse"], dq, dk, dv, grads.get("bias"), grads.get("softmax_offset"), extras_of(spec, kept), dense.spec,
            spec.deterministic, scratch["workspace"], stream,
        )  # fmt: skip
        if spec.packed:
            for name in dense.shapes:
                if name in plan.signature.grads:
                    plan.kernels.pack_sequences(whole[name], tokens_of(grads[name]), *places_of(kept, _side(name)), stream)


attention = Attention()


# --- views ------------------------------------------------------------------------------------------------------------


def _parts(dense: Dense, views: Views) -> tuple[ArrayView, ArrayView, ArrayView]:
    """The strided q, k, v inside the inputs (or dq, dk, dv inside their gradients)."""
    q, k, v = (part.of(_there(views[part.input])) for part in dense.parts.values())
    return q, k, v


def _there(view: ArrayView | None) -> ArrayView:
    assert view is not None
    return view


def heads_apart(o: ArrayView | None, dense: Dense) -> ArrayView:
    """o (s, b, h * d_v) as (s, b, h, d_v)."""
    shape = (*dense.parts["q"].shape[:3], dense.spec.head_dim_v)
    return _there(o).with_strides(shape, contiguous_strides(shape))


def extras_of(spec: AttentionSpec, views: Views) -> AttentionExtras:
    """What the kernels read beside q, k and v; a generator that is at hand but not needed is left out."""
    rng = views["rng"] if spec.dropout else None
    return AttentionExtras(rng=rng, **{name: views.get(name) for name in AttentionExtras._fields if name != "rng"})


def _side(name: str) -> str:
    """Whose lengths an array has: q's or those of k and v."""
    return "kv" if name in ("k", "v", "kv") else "q"


def places_of(views: Views, side: str) -> tuple[ArrayView, ArrayView]:
    """Running sums of the true lengths, and where the sequences start."""
    lengths = _there(views[f"cu_seqlens_{side}"])
    return lengths, views.get(f"cu_seqlens_{side}_padded") or lengths


def tokens_of(view: ArrayView | None) -> ArrayView:
    """(t, h * d) or (t, h, d) as a matrix of tokens."""
    view = _there(view)
    return view.reshape(view.shape[0], -1)


def unpacked(plan: Plan, views: Views, view: ArrayView | None, name: str, scratch: Views, stream: int) -> ArrayView:
    """An array in the padded form that the kernels take; itself where it has it."""
    if not plan.spec.packed:
        return _there(view)
    dense = _there(scratch[f"dense_{name}"])
    plan.kernels.unpack_sequences(tokens_of(view), dense, *places_of(views, _side(name)), stream)
    return dense


# --- shapes -----------------------------------------------------------------------------------------------------------


def meta_of(metas: Metas, name: str) -> Meta:
    """The input's meta; ShapeError where there is none."""
    meta = metas.get(name)
    if meta is None:
        raise ShapeError(expected("attention", name, None, "an array"))
    return meta


def attends(spec: AttentionSpec, metas: Metas) -> bool:
    """Whether there are queries and keys at all: no kernel is asked about arrays of nothing."""
    return not any(0 in meta_of(metas, name).shape for name in LAYOUTS[spec.layout])


def _leading(spec: AttentionSpec, shape: Shape) -> Shape:
    """The dimensions before the features: (s, b), (b, s) or (t,)."""
    return shape[: 1 if spec.packed else 2]


def lse_shape(dense: Dense) -> Shape:
    """(b, h, s_q)."""
    form, q = dense.spec.qkv_format, dense.parts["q"].shape
    return batch_of(form, q), dense.spec.num_heads, length_of(form, q)


def dense_of(spec: AttentionSpec, metas: Metas) -> Dense:
    """The call in a padded format."""
    inner = dataclasses.replace(spec, qkv_format="bshd") if spec.packed else spec
    shapes, parts = {}, {}
    for name, letters in LAYOUTS[spec.layout].items():
        leading = _leading(spec, meta_of(metas, name).shape)
        if spec.packed:
            leading = (meta_of(metas, "cu_seqlens_q").shape[0] - 1, spec.max_seqlen_kv if _side(name) == "kv" else spec.max_seqlen_q)
        width, offset = spec.width(letters), 0
        shapes[name] = (*leading, width)
        for part in letters:
            shape = (*leading, spec.heads(part), spec.features(part))
            head = sum(spec.features(other) for other in letters) if spec.interleaved else spec.features(part)  # from head to head
            parts[part] = Part(name, shape, (leading[1] * width, width, head, 1), offset)
            offset += spec.features(part) if spec.interleaved else spec.width(part)
    return Dense(inner, shapes, parts, (*parts["q"].shape[:2], spec.num_heads * spec.head_dim_v))


# --- checks -----------------------------------------------------------------------------------------------------------


def check_inputs(spec: AttentionSpec, metas: Metas) -> DType:
    """Refuse inputs that do not fit ``spec`` or each other; the dtype of all of them."""
    layout = LAYOUTS[spec.layout]
    kind = meta_of(metas, next(iter(layout))).dtype
    if kind not in HIGH_PRECISION:
        raise FormatError(expected("attention", next(iter(layout)), kind, "float32, bfloat16 or float16"))
    rows: dict[str, tuple[str, Shape]] = {}  # side of the product -> (input, leading dimensions) first seen there
    dims = 1 if spec.packed else 2
    for name, parts in layout.items():
        shape, dtype = meta_of(metas, name)[:2]
        if dtype is not kind:
            raise FormatError(expected("attention", name, dtype, f"{kind} as the other inputs"))
        wanted = [(spec.width(parts),), *([(spec.heads(parts), spec.features(parts))] if len(parts) == 1 else [])]
        if len(shape) < dims + 1 or shape[dims:] not in wanted:
            letters = {"s": "sequence", "b": "batch", "t": "tokens"}
            leading = ", ".join(letters[letter] for letter in spec.qkv_format[:dims])
            forms = " or ".join(f"({leading}, {', '.join(map(str, last))})" for last in wanted)
            raise ShapeError(expected("attention", name, f"shape {shape}", forms))
        _, seen = rows.setdefault(_side(name), (name, shape[:dims]))
        if shape[:dims] != seen:
            raise ShapeError(expected("attention", name, f"shape {shape}", f"{seen} leading, as the other of k and v"))
    if not spec.packed:
        batches = [batch_of(spec.qkv_format, shape) for _, shape in rows.values()]
        if any(batch != batches[0] for batch in batches):
            named = {name: batch for (name, _), batch in zip(rows.values(), batches, strict=True)}
            raise ShapeError(expected("attention", "batch", f"{named}", "one batch size"))
        return kind
    lengths = meta_of(metas, "cu_seqlens_q").shape
    check_starts("attention", "cu_seqlens_q", lengths, max(shape[0] for _, shape in rows.values()))
    if "qkv" in layout and spec.max_seqlen_q != spec.max_seqlen_kv:
        raise ShapeError(expected("attention", "max_seqlen_kv", spec.max_seqlen_kv, f"{spec.max_seqlen_q} as max_seqlen_q, with one qkv"))
    return kind


class _Extra(NamedTuple):
    """One of the further inputs: whether it may come, whether it must, its dtypes and shapes, how an error says the shapes, and why."""

    may: bool
    must: bool
    dtypes: tuple[DType, ...]
    shapes: list[Shape]
    said: str
    why: str


def check_extras(spec: AttentionSpec, metas: Metas, dense: Dense, kind: DType) -> tuple[str, ...]:
    """What comes beside q, k and v: there where it is needed, and as it should be. The names that are there, but for an unused rng."""
    batch, heads, rows = lse_shape(dense)
    columns = length_of(dense.spec.qkv_format, dense.parts["k"].shape)
    over_scores: list[Shape] = [(b, h, r, columns) for b in (1, batch) for h in (1, heads) for r in (1, rows)]
    lengths: list[Shape] = [(batch + 1,)]
    said = f"({batch} or 1, {heads} or 1, {rows} or 1, {columns})"
    why_padded = f"with mask {spec.mask!r}, qkv_format {spec.qkv_format!r}"
    sums = _Extra(spec.padded, spec.padded, (formats.int32,), lengths, str(lengths[0]), why_padded)
    table = {
        "cu_seqlens_q": sums,
        "cu_seqlens_kv": sums,
        "cu_seqlens_q_padded": sums._replace(may=spec.packed, must=False),
        "cu_seqlens_kv_padded": sums._replace(may=spec.packed, must=False),
        "mask": _Extra(spec.masked, spec.masked, (formats.bool_, formats.uint8), over_scores, said, f"with mask {spec.mask!r}"),
        "bias": _Extra(spec.biased, spec.biased, (kind,), over_scores, said, f"with bias {spec.bias!r}"),
        "alibi_slopes": _Extra(spec.bias == "alibi", spec.bias == "alibi", (formats.float32,), [(heads,), (batch, heads)],
                               f"({heads},) or ({batch}, {heads})", f"with bias {spec.bias!r}"),
        "softmax_offset": _Extra(spec.softmax_type == "learnable", spec.softmax_type == "learnable", (formats.float32,), [(heads,)],
                                 f"({heads},)", f"with softmax_type {spec.softmax_type!r}"),
        "rng": _Extra(True, spec.dropout > 0, (formats.int64,), [(2,)], "(2,)", f"with dropout {spec.dropout}"),
    }  # fmt: skip
    found = []
    for name, (may, must, dtypes, shapes, said, why) in table.items():
        meta = metas.get(name)
        if meta is None:
            if must:
                raise ShapeError(expected("attention", name, None, f"{dtypes[0].name} {said} {why}"))
            continue
        if not may:
            raise ShapeError(expected("attention", name, f"shape {meta.shape}", f"None {why}"))
        if meta.dtype not in dtypes:
            raise FormatError(expected("attention", name, meta.dtype, " or ".join(d.name for d in dtypes)))
        if meta.shape not in shapes:
            raise ShapeError(expected("attention", name, f"shape {meta.shape}", said))
        if must or name != "rng":
            found.append(name)
    return tuple(found)
