"""Attention of new tokens over all of their sequences, whose earlier keys and values lie in a cache of pages:
one step of inference.

A mutating operation: it writes the new keys and values into the cache. It has no gradient. Source of the
pages: Kwon et al., PagedAttention, 2023.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fp8kit import formats
from fp8kit.arrays import ArrayView, contiguous_strides
from fp8kit.errors import AutogradError, ShapeError
from fp8kit.formats import DType, int32
from fp8kit.ops.attention_checks import check_extras, check_inputs
from fp8kit.ops.attention_spec import ARGUMENTS, LAYOUTS, AttentionSpec, check
from fp8kit.ops.attention_views import (
    Dense,
    Part,
    attends,
    dense_of,
    extras_of,
    heads_apart,
    lse_shape,
    pack,
    places_of,
    unpacked,
)
from fp8kit.ops.product import want
from fp8kit.ops.values import check_lengths
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet

_NAME = "cached_attention"


class CachedAttention(Operation):
    """Inputs q, k, v of the new tokens, in any layout and format of ``ops.attention.Attention``, equally many
    tokens of each; and

    * ``k_cache``, ``v_cache``: h (pages, page size, g, d) and (..., d_v), changed in place; ``pages``: int32
      (b, m), the pages of each sequence in order. See ``backends.protocol.Kernels.cache_append_``.
    * ``cu_seqlens_q``, ``cu_seqlens_kv``: int32 (b + 1,), running sums of the sequences' new tokens and of
      their lengths with them; in sbhd and bshd a sequence's new tokens come first, what follows is padding.
      With "thd" also ``cu_seqlens_q_padded``, as there.
    * ``alibi_slopes``, ``softmax_offset``, ``rng``: as there.

    The spec's mask is one of the padding masks, and it has no bias array. ``max_seqlen_kv``: positions that
    the caches are read up to, none of the sequences may be longer; ``max_seqlen_q``: with "thd", as there.
    Output ``o``: as there.

    ``infer`` raises ShapeError for sizes and names that do not fit, FormatError for dtypes, AutogradError
    where a gradient is wanted.
    """

    name = _NAME
    results = ("o",)
    mutates = ("k_cache", "v_cache")
    arguments = ARGUMENTS

    def infer(self, spec: AttentionSpec, metas: Metas, needs: Needs) -> Signature:
        return self._inferred(spec, metas, needs)[0]

    def _inferred(self, spec: AttentionSpec, metas: Metas, needs: Needs) -> tuple[Signature, Dense]:
        """Returns what ``infer`` answers, and the new tokens as the kernels see them."""
        check(spec)
        if needs:
            got, wanted = "an array that requires a gradient", "inference: eval(), or no_grad()"
            raise AutogradError(_NAME, ", ".join(sorted(needs)), got, wanted)
        if not spec.padded:
            raise ShapeError(_NAME, "mask", repr(spec.mask), "one of the padding masks")
        if spec.biased:
            wanted = "no_bias or alibi: a bias array does not grow with a sequence"
            raise ShapeError(_NAME, "bias", repr(spec.bias), wanted)
        if spec.quantized is not None:
            wanted = "None: attention over a cache is in high precision"
            raise ShapeError(_NAME, "quantized", str(spec.quantized), wanted)
        if spec.max_seqlen_kv < 1:
            raise ShapeError(_NAME, "max_seqlen_kv", spec.max_seqlen_kv, "at least 1")
        # of the inputs, which hold as many keys as queries
        new = dataclasses.replace(spec, max_seqlen_kv=spec.max_seqlen_q)
        kind = check_inputs(new, metas)
        dims = 1 if spec.packed else 2
        leading = {name: want(_NAME, name, metas).shape[:dims] for name in LAYOUTS[spec.layout]}
        tokens = next(iter(leading.values()))
        # a size that torch.compile left open has no hash
        if any(other != tokens for other in leading.values()):
            raise ShapeError(_NAME, "inputs", f"leading dimensions {leading}", "equally many tokens of each")
        dense = dense_of(new, metas)
        check_extras(spec, metas, dense, kind)
        if metas.get("cu_seqlens_kv_padded") is not None:
            wanted = "None: the cache knows where keys lie"
            raise ShapeError(_NAME, "cu_seqlens_kv_padded", "an array", wanted)
        batch = lse_shape(dense)[0]
        _check_cache(spec, metas, batch, kind)
        outputs = {"o": Meta((*tokens, spec.num_heads * spec.head_dim_v), kind)}
        return Signature(outputs), dense

    def plan(self, spec: AttentionSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature, dense = self._inferred(spec, metas, needs)
        if not attends(spec, metas):
            return Plan(spec, signature, kernels)
        kind, q = signature.outputs["o"].dtype, dense.parts["q"]
        caches = [want(_NAME, f"{name}_cache", metas).shape for name in "kv"]
        strides = q.strides, *map(contiguous_strides, caches)
        settings = spec.max_seqlen_kv, kind, dense.spec, strides
        nbytes = kernels.paged_attention_workspace(q.shape, *caches, *settings)
        scratch = {
            "workspace": Meta((nbytes,), formats.uint8),
            "lse": Meta(lse_shape(dense), formats.float32),
        }
        if spec.packed:
            scratch |= {f"dense_{q.input}": Meta(dense.shapes[q.input], kind), "dense_o": Meta(dense.o, kind)}
        return Plan(spec, signature, kernels, scratch, extra=dense)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        """Write the new keys and values into the caches, and attend over all of the sequences' positions.
        Nothing where none is new. ArgumentError for invalid running sums on the CPU (``ops.values``).
        """
        spec, inputs, scratch, k = plan.spec, ws.inputs, ws.scratch, ws.kernels
        check_lengths(_NAME, spec, inputs, ("q",))
        if plan.extra is None:
            return
        dense: Dense = plan.extra
        pages, fresh, totals = (inputs[name] for name in ("pages", "cu_seqlens_q", "cu_seqlens_kv"))
        starts = places_of(inputs, "q")[1] if spec.packed else None
        for name in "kv":
            new, cache = _new(spec, dense.parts[name], inputs), inputs[f"{name}_cache"]
            k.cache_append_(new, cache, pages, fresh, totals, starts, spec.qkv_format, ws.stream)
        part = dense.parts["q"]
        q = part.of(unpacked(spec, ws, inputs[part.input], part.input))
        o = scratch["dense_o"] if spec.packed else ws.outputs["o"]
        settings = extras_of(spec, inputs), dense.spec, scratch["workspace"]
        arrays = q, inputs["k_cache"], inputs["v_cache"], heads_apart(o, dense), scratch["lse"]
        k.paged_attention_fwd(*arrays, pages, spec.max_seqlen_kv, *settings, ws.stream)
        pack(spec, ws, o, "o")


cached_attention = CachedAttention()


def _new(spec: AttentionSpec, part: Part, inputs: Views) -> ArrayView:
    """Returns the new tokens' k or v inside its input, heads apart: 4-dimensional, or (t, g, d) with
    "thd"."""
    view: ArrayView = inputs[part.input]
    if not spec.packed:
        return part.of(view)
    return view.with_strides((view.shape[0], *part.shape[2:]), part.strides[1:], part.offset)


def _check_cache(spec: AttentionSpec, metas: Metas, batch: int, kind: DType) -> None:
    """Refuse caches and a table of pages that do not fit the call."""
    table, size = want(_NAME, "pages", metas, None, int32), 0
    for name, dim in (("k_cache", spec.head_dim), ("v_cache", spec.head_dim_v)):
        meta = want(_NAME, name, metas, None, kind)
        size = size or (meta.shape[1] if len(meta.shape) == 4 else 1)
        if len(meta.shape) != 4 or meta.shape[1:] != (size, spec.num_gqa_groups, dim):
            raise ShapeError(
                _NAME, name, f"shape {meta.shape}", f"(pages, {size}, {spec.num_gqa_groups}, {dim})"
            )
    if len(table.shape) != 2 or table.shape[0] != batch or table.shape[1] * size < spec.max_seqlen_kv:
        wanted = f"({batch}, pages of {size} for {spec.max_seqlen_kv} positions)"
        raise ShapeError(_NAME, "pages", f"shape {table.shape}", wanted)
