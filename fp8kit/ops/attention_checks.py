"""What an attention call refuses: inputs that do not fit its spec or each other."""

from __future__ import annotations

from typing import NamedTuple

from fp8kit import formats
from fp8kit.arrays import Shape
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import HIGH_PRECISION, DType
from fp8kit.ops.attention_spec import LAYOUTS, AttentionSpec, batch_of, check_starts, length_of
from fp8kit.ops.attention_views import Dense, lse_shape, meta_of, side_of, want_features
from fp8kit.ops.product import want
from fp8kit.spec import Metas


def check_inputs(spec: AttentionSpec, metas: Metas) -> DType:
    """Refuse inputs that do not fit ``spec`` or each other; the dtype of all of them."""
    layout = LAYOUTS[spec.layout]
    first = next(iter(layout))
    kind = want("attention", first, metas, None, *HIGH_PRECISION).dtype
    # side of the product -> (input, leading dimensions) first seen there
    rows: dict[str, tuple[str, Shape]] = {}
    dims = 1 if spec.packed else 2
    for name, parts in layout.items():
        shape, dtype = meta_of(metas, name)[:2]
        if dtype is not kind:
            raise FormatError("attention", name, dtype, f"{kind} as the other inputs")
        wanted: list[Shape] = [(spec.width(parts),)]
        if len(parts) == 1:
            wanted.append((spec.heads(parts), spec.features(parts)))
        want_features("attention", name, shape, spec.qkv_format, wanted)
        _, seen = rows.setdefault(side_of(name), (name, shape[:dims]))
        if shape[:dims] != seen:
            raise ShapeError("attention", name, f"shape {shape}", f"{seen} leading, as the other of k and v")
    if not spec.packed:
        batches = [batch_of(spec.qkv_format, shape) for _, shape in rows.values()]
        if any(batch != batches[0] for batch in batches):
            named = {name: batch for (name, _), batch in zip(rows.values(), batches, strict=True)}
            raise ShapeError("attention", "batch", f"{named}", "one batch size")
        return kind
    lengths = meta_of(metas, "cu_seqlens_q").shape
    check_starts("attention", "cu_seqlens_q", lengths, max(shape[0] for _, shape in rows.values()))
    if "qkv" in layout and spec.max_seqlen_q != spec.max_seqlen_kv:
        longest = f"{spec.max_seqlen_q} as max_seqlen_q, with one qkv"
        raise ShapeError("attention", "max_seqlen_kv", spec.max_seqlen_kv, longest)
    return kind


class _Extra(NamedTuple):
    """One of the further inputs: whether it must come, its dtypes and shapes, why, how an error says the
    shapes where they are many, and whether it may also come unasked."""

    must: bool
    dtypes: tuple[DType, ...]
    shapes: list[Shape]
    why: str
    many: str = ""
    optional: bool = False

    @property
    def said(self) -> str:
        """The shapes as an error says them."""
        return self.many or " or ".join(map(str, self.shapes))


def check_extras(spec: AttentionSpec, metas: Metas, dense: Dense, kind: DType) -> tuple[str, ...]:
    """Check the inputs beside q, k and v: that those which are needed are there, of the right shapes and
    dtypes. Returns the names of those that are there, without an unused rng."""
    batch, heads, rows = lse_shape(dense)
    columns = length_of(dense.spec.qkv_format, dense.parts["k"].shape)
    over_scores: list[Shape] = [(b, h, r, columns) for b in (1, batch) for h in (1, heads) for r in (1, rows)]
    many = f"({batch} or 1, {heads} or 1, {rows} or 1, {columns})"
    with_mask, with_bias = f"with mask {spec.mask!r}", f"with bias {spec.bias!r}"
    padded = f"{with_mask}, qkv_format {spec.qkv_format!r}"
    sums = _Extra(spec.padded, (formats.int32,), [(batch + 1,)], padded)
    starts = sums._replace(must=False, optional=spec.packed)
    of_heads: list[Shape] = [(heads,), (batch, heads)]
    learnable, softmax = spec.softmax_type == "learnable", f"with softmax_type {spec.softmax_type!r}"
    drawn = f"with dropout {spec.dropout}" if spec.dropout or not spec.needs_rng else "with random signs"
    table = {
        "cu_seqlens_q": sums,
        "cu_seqlens_kv": sums,
        "cu_seqlens_q_padded": starts,
        "cu_seqlens_kv_padded": starts,
        "mask": _Extra(spec.masked, (formats.bool_, formats.uint8), over_scores, with_mask, many),
        "bias": _Extra(spec.biased, (kind,), over_scores, with_bias, many),
        "alibi_slopes": _Extra(spec.bias == "alibi", (formats.float32,), of_heads, with_bias),
        "softmax_offset": _Extra(learnable, (formats.float32,), of_heads[:1], softmax),
        "rng": _Extra(spec.needs_rng, (formats.int64,), [(2,)], drawn, optional=True),
        "dropout_place": _Extra(spec.placed, (formats.int32,), [(3,)], f"with placed {spec.placed}"),
    }
    found = []
    for name, extra in table.items():
        meta = metas.get(name)
        if meta is None:
            if extra.must:
                wanted = f"{extra.dtypes[0].name} {extra.said} {extra.why}"
                raise ShapeError("attention", name, None, wanted)
            continue
        if not (extra.must or extra.optional):
            raise ShapeError("attention", name, f"shape {meta.shape}", f"None {extra.why}")
        if meta.dtype not in extra.dtypes:
            raise FormatError("attention", name, meta.dtype, " or ".join(d.name for d in extra.dtypes))
        if meta.shape not in extra.shapes:
            raise ShapeError("attention", name, f"shape {meta.shape}", extra.said)
        if extra.must or name != "rng":
            found.append(name)
    return tuple(found)
