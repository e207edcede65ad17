"""An attention call as its kernels see it: padded batches, and where q, k and v lie inside the inputs."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from fp8kit.arrays import ArrayView, Shape, contiguous_strides
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.errors import ShapeError
from fp8kit.ops.attention_spec import LAYOUTS, AttentionSpec, batch_of, length_of
from fp8kit.spec import Meta, Metas, Plan, Views


class Part(NamedTuple):
    """Where q, k or v lies inside an input: a 4-dimensional strided view, ``offset`` elements from its
    start."""

    input: str
    shape: Shape
    strides: Shape
    offset: int

    def of(self, view: ArrayView) -> ArrayView:
        """The part of ``view``, no copy."""
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
    """The input's meta; ShapeError where there is none."""
    meta = metas.get(name)
    if meta is None:
        raise ShapeError("attention", name, None, "an array")
    return meta


def attends(spec: AttentionSpec, metas: Metas) -> bool:
    """Whether there are queries and keys at all: no kernel is asked about arrays of nothing."""
    return not any(0 in meta_of(metas, name).shape for name in LAYOUTS[spec.layout])


def leading_of(spec: AttentionSpec, shape: Shape) -> Shape:
    """The dimensions before the features: (s, b), (b, s) or (t,)."""
    return shape[: 1 if spec.packed else 2]


def lse_shape(dense: Dense) -> Shape:
    """(b, h, s_q)."""
    form, q = dense.spec.qkv_format, dense.parts["q"].shape
    return batch_of(form, q), dense.spec.num_heads, length_of(form, q)


def dense_of(spec: AttentionSpec, metas: Metas) -> Dense:
    """The call in a padded format."""
    # unpacking writes 0
    inner = dataclasses.replace(spec, qkv_format="bshd", zero_padded=True) if spec.packed else spec
    shapes, parts = {}, {}
    for name, letters in LAYOUTS[spec.layout].items():
        leading = leading_of(spec, meta_of(metas, name).shape)
        if spec.packed:
            leading = (
                meta_of(metas, "cu_seqlens_q").shape[0] - 1,
                spec.max_seqlen_kv if side_of(name) == "kv" else spec.max_seqlen_q,
            )
        width, offset = spec.width(letters), 0
        shapes[name] = (*leading, width)
        for part in letters:
            shape = (*leading, spec.heads(part), spec.features(part))
            # from head to head
            head = sum(spec.features(other) for other in letters) if spec.interleaved else spec.features(part)
            parts[part] = Part(name, shape, (leading[1] * width, width, head, 1), offset)
            offset += spec.features(part) if spec.interleaved else spec.width(part)
    leading, heads = parts["q"].shape[:2], (spec.num_heads, spec.head_dim_v)
    whole = (*leading, *heads)
    return Dense(
        inner, shapes, parts, (*leading, math.prod(heads)), Part("o", whole, contiguous_strides(whole), 0)
    )


# --- views --------------------------------------------------------------------------------------------------


def parts_of(dense: Dense, views: Views) -> tuple[ArrayView, ArrayView, ArrayView]:
    """The strided q, k, v inside the inputs (or dq, dk, dv inside their gradients)."""
    q, k, v = [part.of(there(views[part.input])) for part in dense.parts.values()]
    return q, k, v


def there(view: ArrayView | None) -> ArrayView:
    """A view that the call's signature asked for."""
    assert view is not None
    return view


def heads_apart(o: ArrayView | None, dense: Dense) -> ArrayView:
    """o (s, b, h * d_v) as (s, b, h, d_v)."""
    return dense.heads.of(there(o))


def extras_of(spec: AttentionSpec, views: Views) -> AttentionExtras:
    """What the kernels read beside q, k and v; a generator that is at hand but not needed is left out."""
    rng = views["rng"] if spec.dropout else None
    return AttentionExtras(
        rng=rng, **{name: views.get(name) for name in AttentionExtras._fields if name != "rng"}
    )


def side_of(name: str) -> str:
    """Whose lengths an array has: q's or those of k and v."""
    return "kv" if name in ("k", "v", "kv") else "q"


def places_of(views: Views, side: str) -> tuple[ArrayView, ArrayView]:
    """Running sums of the true lengths, and where the sequences start."""
    lengths = there(views[f"cu_seqlens_{side}"])
    return lengths, views.get(f"cu_seqlens_{side}_padded") or lengths


def tokens_of(view: ArrayView | None) -> ArrayView:
    """(t, h * d) or (t, h, d) as a matrix of tokens."""
    view = there(view)
    return view.reshape(view.shape[0], -1)


def unpacked(
    plan: Plan, views: Views, view: ArrayView | None, name: str, scratch: Views, stream: int
) -> ArrayView:
    """An array in the padded form that the kernels take; itself where it has it."""
    if not plan.spec.packed:
        return there(view)
    dense = there(scratch[f"dense_{name}"])
    plan.kernels.unpack_sequences(tokens_of(view), dense, *places_of(views, side_of(name)), stream)
    return dense
