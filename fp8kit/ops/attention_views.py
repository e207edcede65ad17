"""An attention call as its kernels see it: padded batches, and where q, k and v lie inside the inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fp8kit.arrays import ArrayView, Shape, contiguous_strides
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.errors import ShapeError
from fp8kit.ops.attention_spec import LAYOUTS, AttentionSpec, batch_of, length_of
from fp8kit.ops.product import want
from fp8kit.spec import Meta, Metas, Views, WorkingSet


class Part(NamedTuple):
    """Where q, k or v lies inside an input: a strided view with its heads apart, ``offset`` elements from the
    input's start."""

    input: str
    shape: Shape
    strides: Shape
    offset: int

    def of(self, view: ArrayView) -> ArrayView:
        """Returns the part of ``view``, no copy."""
        return view.with_strides(self.shape, self.strides, self.offset)


class Dense(NamedTuple):
    """The call as the kernels see it: ``spec`` with a padded format, each input's ``shapes`` there, the
    ``parts`` q, k, v, o's shape, and o with its ``heads`` apart."""

    spec: AttentionSpec
    shapes: dict[str, Shape]
    parts: dict[str, Part]
    o: Shape
    heads: Part


# --- shapes -------------------------------------------------------------------------------------------------


def meta_of(metas: Metas, name: str) -> Meta:
    """Returns the meta of an input of attention; ShapeError where there is none."""
    return want("attention", name, metas)


def want_features(
    operation: str, name: str, shape: Shape, qkv_format: str, forms: Sequence[Shape], more: str = ""
) -> None:
    """ShapeError unless the dimensions after those of ``qkv_format`` are one of ``forms``, and not 0."""
    dims = len(qkv_format) - 2
    if len(shape) < dims + 1 or shape[dims:] not in forms or 0 in shape[dims:]:
        letters = {"s": "sequence", "b": "batch", "t": "tokens"}
        leading = ", ".join(letters[letter] for letter in qkv_format[:dims])
        wanted = " or ".join(f"({leading}, {', '.join(map(str, last))})" for last in forms)
        raise ShapeError(operation, name, f"shape {shape}", f"{wanted}{more}")


def attends(spec: AttentionSpec, metas: Metas) -> bool:
    """Whether there are queries and keys at all: no kernel is asked about arrays of nothing."""
    return not any(0 in meta_of(metas, name).shape for name in LAYOUTS[spec.layout])


def leading_of(spec: AttentionSpec, shape: Shape) -> Shape:
    """Returns the dimensions before the features: (s, b), (b, s) or (t,)."""
    return shape[: 1 if spec.packed else 2]


def lse_shape(dense: Dense) -> Shape:
    """(b, h, s_q)."""
    form, q = dense.spec.qkv_format, dense.parts["q"].shape
    return batch_of(form, q), dense.spec.num_heads, length_of(form, q)


def dense_of(spec: AttentionSpec, metas: Metas) -> Dense:
    """Returns the call in a padded format."""
    # unpacking writes 0
    inner = dataclasses.replace(spec, qkv_format="bshd", zero_padded=True) if spec.packed else spec
    leading = {name: leading_of(spec, meta_of(metas, name).shape) for name in LAYOUTS[spec.layout]}
    if spec.packed:
        batch, longest = meta_of(metas, "cu_seqlens_q").shape[0] - 1, (spec.max_seqlen_q, spec.max_seqlen_kv)
        leading = {name: (batch, longest[side_of(name) == "kv"]) for name in leading}
    shapes, parts = parts_within(spec, leading)
    whole = (*parts["q"].shape[:2], spec.num_heads, spec.head_dim_v)
    apart = Part("o", whole, contiguous_strides(whole), 0)
    return Dense(inner, shapes, parts, (*whole[:2], math.prod(whole[2:])), apart)


def parts_within(
    spec: AttentionSpec, leading: Mapping[str, Shape]
) -> tuple[dict[str, Shape], dict[str, Part]]:
    """Shapes of the inputs with such dimensions before their features, and where q, k and v lie in them."""
    shapes, parts = {}, {}
    for name, letters in LAYOUTS[spec.layout].items():
        offset = 0
        shapes[name] = (*leading[name], spec.width(letters))
        before = contiguous_strides(shapes[name])[:-1]
        for part in letters:
            shape = (*leading[name], spec.heads(part), spec.features(part))
            # from head to head
            head = sum(spec.features(other) for other in letters) if spec.interleaved else spec.features(part)
            parts[part] = Part(name, shape, (*before, head, 1), offset)
            offset += spec.features(part) if spec.interleaved else spec.width(part)
    return shapes, parts


# --- views --------------------------------------------------------------------------------------------------


def parts_of(parts: Mapping[str, Part], views: Views) -> list[ArrayView]:
    """Returns the strided q, k, v inside the inputs (or dq, dk, dv inside their gradients)."""
    return [part.of(views[part.input]) for part in parts.values()]


def heads_apart(o: ArrayView, dense: Dense) -> ArrayView:
    """o (s, b, h * d_v) as (s, b, h, d_v)."""
    return dense.heads.of(o)


def extras_of(spec: AttentionSpec, views: Views) -> AttentionExtras:
    """Returns what the kernels read beside q, k and v; a generator that is at hand but not needed is left
    out."""
    extras = AttentionExtras(*map(views.get, AttentionExtras._fields))
    return extras if spec.dropout else extras._replace(rng=None)


def side_of(name: str) -> str:
    """Returns the side whose lengths an array has: "q", or "kv"."""
    return "kv" if name in ("k", "v", "kv") else "q"


def places_of(views: Views, side: str) -> tuple[ArrayView, ArrayView]:
    """Running sums of the true lengths, and where the sequences start."""
    lengths = views[f"cu_seqlens_{side}"]
    return lengths, views.get(f"cu_seqlens_{side}_padded") or lengths


def tokens_of(view: ArrayView) -> ArrayView:
    """(t, h * d) or (t, h, d) as a matrix of tokens."""
    return view.reshape(view.shape[0], -1)


def unpacked(spec: AttentionSpec, ws: WorkingSet, view: ArrayView, name: str) -> ArrayView:
    """Returns an array in the padded form that the kernels take, in the scratch ``dense_{name}``; itself
    where it has it."""
    if not spec.packed:
        return view
    dense: ArrayView = ws.scratch[f"dense_{name}"]
    places = places_of(ws.inputs, side_of(name))
    ws.kernels.unpack_sequences(tokens_of(view), dense, *places, ws.stream)
    return dense


def pack(spec: AttentionSpec, ws: WorkingSet, dense: ArrayView, name: str) -> None:
    """Write the output ``name`` from its padded form, where it has another."""
    if spec.packed:
        places = places_of(ws.inputs, side_of(name))
        ws.kernels.pack_sequences(dense, tokens_of(ws.outputs[name]), *places, ws.stream)
