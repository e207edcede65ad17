"""``ring_attention``: attention over sequences that ranks divide among them; keys and values go round a ring.

Source: Liu et al., Ring Attention with Blockwise Transformers, 2023; which chunks a rank has: Brandon et al.,
Striped Attention, 2023, and Transformer Engine (chunks r and 2 P - 1 - r of 2 P, so that all ranks have as
much to do under a causal mask).

A row's output over all keys is the mean of its outputs over some keys each, weighted by the exponentials of
their log-sum-exps; so each rank attends with its queries over the chunk of keys that it has just got, merges,
and hands the chunk on. Backward goes round once more: with the log-sum-exp of all keys, which forward kept,
``attention``'s own backward over one chunk gives that chunk's part of each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays, collectives
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.errors import ShapeError, UnsupportedError
from fp8kit.formats import float32, int32
from fp8kit.lru import memoized
from fp8kit.ops.attention import attention
from fp8kit.ops.attention_spec import ARGUMENTS, UNBOUNDED, AttentionSpec
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet

_PARTS = ("q", "k", "v")
_STARTS = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_SUMS = {"cu_seqlens_q": "sums_q", "cu_seqlens_kv": "sums_kv"}
# stands for the log-sum-exp of a row that has seen nothing yet: -Inf would make NaN of weights
NOTHING = -1e30


def chunks_of(rank: Any, ranks: int, chunks: int) -> tuple[Any, ...]:
    """Returns the numbers of the ``chunks`` of a sequence, 1 or 2, that ``rank`` of so many ``ranks`` has; it
    may be an array."""
    return (rank,) if chunks == 1 else (rank, 2 * ranks - 1 - rank)


def off_diagonal(spec: AttentionSpec) -> AttentionSpec:
    """Returns the attention of a chunk of queries over an earlier chunk of keys, or over any without a causal
    mask: all see all, but for padding. ``spec``: that of a chunk over itself."""
    return replace(spec, mask="padding" if spec.padded else "no_mask", window_size=UNBOUNDED)


@dataclass(frozen=True)
class RingSpec:
    """``attention``: of the whole sequences, with layout "separate" and mask "no_mask", "causal", "padding"
    or "padding_causal"; its ``max_seqlen`` are those of a chunk. ``group``: name of the ``collectives``.
    ``chunks``: of a sequence on each rank, 2, or 1 without a mask. ``label``: what errors call the layer."""

    attention: AttentionSpec
    group: str
    chunks: int = 2
    label: str = ""


class _Block(NamedTuple):
    """An attention of one chunk of queries over one chunk of keys, run within this operation: its ``plan``,
    and the names of its temporaries."""

    kind: str
    plan: Plan

    def scratch(self, backward: bool) -> dict[str, Meta]:
        metas = self.plan.backward_scratch if backward else self.plan.scratch
        return {f"{self.kind}_{name}": meta for name, meta in metas.items()}

    def working_set(
        self, ws: WorkingSet, inputs: Views, outputs: Views, lse: ArrayView, backward: bool
    ) -> WorkingSet:
        metas = self.plan.backward_scratch if backward else self.plan.scratch
        own = {name: ws.scratch[f"{self.kind}_{name}"] for name in metas}
        return WorkingSet(ws.kernels, inputs, outputs, {"lse": lse}, own, ws.stream)


class _Ring(NamedTuple):
    """What a plan remembers: the ranks, the two kinds of blocks, on the diagonal of a causal mask and
    elsewhere, and a chunk's o and lse as its kernels write them."""

    ranks: Any
    diagonal: _Block
    other: _Block
    o: Meta
    lse: Meta

    def blocks(self, spec: RingSpec, source: int) -> Iterator[tuple[int, int, int, int, _Block]]:
        """Yields the blocks of scores that the mask leaves of this rank's queries and the keys of the rank
        ``source``: the places of the two chunks on their ranks, their numbers in the sequence, and the kind
        of block."""
        for i, row in enumerate(chunks_of(self.ranks.rank, self.ranks.size, spec.chunks)):
            for j, column in enumerate(chunks_of(source, self.ranks.size, spec.chunks)):
                if not spec.attention.causal or column <= row:
                    yield i, j, row, column, self.diagonal if row == column else self.other


class RingAttention(Operation):
    """Inputs, for n chunks a rank: q (n, c_q, b, h * d), k (n, c_kv, b, g * d), v (n, c_kv, b, g * d_v), or
    with "bshd" b before c, h (float32, bfloat16 or float16): chunk after chunk of this rank. With "thd" (n,
    t, ...): of each sequence its first chunk, one after the other, then of each its second one.

    * ``sums_q``, ``sums_kv``: int32 (n P, b + 1), for each chunk of the whole sequences the running sums of
      the batches' true lengths within it; with a padding mask. ``cu_seqlens_q_padded``,
      ``cu_seqlens_kv_padded``: int32 (b + 1,), where each sequence's chunk begins in t, with "thd".
    * ``rng``: as ``attention``'s, where quantised operands are rotated by random signs.

    Output ``o`` (n, c_q, b, h * d_v). Saved: ``lse`` float32 (n, b, h, c_q), over all keys. Gradients of q, k
    and v; those of k and v are summed in float32 on their way round. With quantised operands each block is
    cast by its own amaxes.

    ``infer`` raises what ``attention`` would raise for a chunk, ShapeError for another number of chunks or
    none, UnsupportedError for options that need more than one block of chunks.
    """

    name = "ring_attention"
    results = ("o",)
    holds_interpreter = True
    arguments = ARGUMENTS

    def communicates(self, spec: RingSpec) -> bool:
        return True

    def infer(self, spec: RingSpec, metas: Metas, needs: Needs) -> Signature:
        _refuse(spec.attention)
        chunk = self._of_chunk(spec, metas)
        found = attention.infer(spec.attention, chunk, frozenset(_PARTS))
        if "lse" not in found.saved:
            raise ShapeError(self.name, "q, k, v", "an empty chunk", "at least one token in each")
        many = {"o": found.outputs["o"], "lse": found.saved["lse"]}
        o, lse = (meta._replace(shape=(spec.chunks, *meta.shape)) for meta in many.values())
        grads = {name: meta for name in _PARTS if name in needs and (meta := metas[name]) is not None}
        if not grads:
            return Signature({"o": o})
        kept = *_PARTS, "o", *(n for n in (*_SUMS.values(), *_STARTS, "rng") if metas.get(n) is not None)
        return Signature({"o": o}, {"lse": lse}, kept, grads)

    def _of_chunk(self, spec: RingSpec, metas: Metas) -> dict[str, Meta]:
        """Returns what an attention of one chunk over one chunk gets."""
        found = {}
        for name in _PARTS:
            meta = metas.get(name)
            if meta is None or not meta.shape or meta.shape[0] != spec.chunks:
                got = None if meta is None else f"shape {meta.shape}"
                raise ShapeError(self.name, name, got, f"({spec.chunks} chunks, ...)")
            found[name] = meta._replace(shape=meta.shape[1:])
        count = spec.chunks * collectives.named(spec.group).size
        for name, own in _SUMS.items():
            meta = metas.get(own)
            if meta is not None:
                if len(meta.shape) != 2 or meta.shape[0] != count:
                    raise ShapeError(self.name, own, f"shape {meta.shape}", f"({count}, batch + 1)")
                found[name] = meta._replace(shape=meta.shape[1:])
        found |= {name: meta for name in (*_STARTS, "rng") if (meta := metas.get(name)) is not None}
        return found

    def plan(self, spec: RingSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        signature, chunk = self.infer(spec, metas, needs), self._of_chunk(spec, metas)
        whole = spec.attention
        diagonal, other = (
            _Block(kind, attention.plan(each, chunk, frozenset(_PARTS), kernels))
            for kind, each in (("diagonal", whole), ("other", off_diagonal(whole)))
        )
        o, lse = diagonal.plan.signature.outputs["o"], diagonal.plan.signature.saved["lse"]
        ring = _Ring(collectives.named(spec.group), diagonal, other, o, lse)
        rows = math.prod(o.shape) // whole.head_dim_v
        kv = {name: meta for name in ("k", "v") if (meta := metas[name]) is not None}
        moving = {f"{name}{i}": meta for name, meta in kv.items() for i in (0, 1)}
        wide = Meta((max(math.prod(m.shape) for m in (o, *map(chunk.__getitem__, _PARTS))),), float32)
        scratch = moving | diagonal.scratch(False) | other.scratch(False) | {"wide": wide, "block_o": o}
        scratch |= {"block_lse": lse, "sum": Meta((spec.chunks, rows, whole.head_dim_v), float32)}
        scratch |= {"total": Meta((spec.chunks, rows), float32), "by_rows": lse}
        of_rows = Meta((rows,), float32)
        scratch |= {"pair": Meta((rows, 2), float32), "weight": of_rows, "loss": of_rows}
        scratch["targets"] = Meta((rows,), int32)  # any values: the loss is not read
        backward: dict[str, Meta] = {}
        if signature.grads:
            backward = moving | diagonal.scratch(True) | other.scratch(True) | {"wide": wide}
            backward |= {f"block_d{name}": chunk[name] for name in _PARTS}
            sums = {name: meta._replace(dtype=float32) for name, meta in kv.items()}
            backward |= {f"d{name}{i}": meta for name, meta in sums.items() for i in (0, 1)}
            q = metas["q"]
            assert q is not None
            backward["dq"] = q._replace(dtype=float32)
        return Plan(spec, signature, kernels, scratch, backward, ring)

    # --- forward --------------------------------------------------------------------------------------------

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        ring, spec = plan.extra, plan.spec
        total, nothing = ws.scratch["total"], constant(NOTHING, ws.inputs["q"].device)
        ws.kernels.copy(nothing.repeated(total.size), total.reshape(total.size), ws.stream)
        started: set[int] = set()
        kv = {name: ws.inputs[name] for name in ("k", "v")}
        for step in range(ring.ranks.size):
            source = (ring.ranks.rank - step) % ring.ranks.size
            for i, j, row, column, block in ring.blocks(spec, source):
                inputs = _inputs(ws, kv, i, j, row, column)
                o, lse = ws.scratch["block_o"], ws.scratch["block_lse"]
                attention.forward(block.plan, block.working_set(ws, inputs, {"o": o}, lse, False))
                self._merge(plan, ws, i, o, lse, i not in started)
                started.add(i)
            if step + 1 < ring.ranks.size:
                kv = _handed_on(plan, ws, kv, step)
        for i in range(spec.chunks):
            o = ws.outputs["o"].slice(0, i, 1)
            ws.kernels.copy(ws.scratch["sum"].slice(0, i, 1).reshape(*o.shape), o, ws.stream)
            if plan.signature.saved:
                self._lse_as_kernels_have_it(plan, ws, i)

    def _merge(self, plan: Plan, ws: WorkingSet, i: int, o: ArrayView, lse: ArrayView, first: bool) -> None:
        """Chunk i's sum = w0 sum + w1 o with the weights of softmax(total, lse), and total their
        log-sum-exp."""
        kernels, stream, s = ws.kernels, ws.stream, ws.scratch
        total, out, pair = s["total"].at(i), s["sum"].at(i), s["pair"]
        old, new = (_column(pair, at) for at in (0, 1))
        kernels.copy(total, old, stream)
        self._by_rows(plan, ws, i, lse, new)
        if first:
            kernels.copy(constant(0.0, out.device).repeated(out.size), out.reshape(out.size), stream)
        kernels.cross_entropy_fwd(pair, s["targets"], s["loss"], total, None, 0.0, -100, stream)
        kernels.softmax_fwd(pair, pair, stream)
        wide, weight = s["wide"].first(out.shape), s["weight"]
        kernels.copy(o.reshape(*out.shape), wide, stream)
        for values, own in ((out, old), (wide, new)):
            kernels.copy(own, weight, stream)
            kernels.scale_lines(values, weight, values, 0, 1.0, False, stream)
        kernels.add(out, wide, out, stream)

    def _by_rows(self, plan: Plan, ws: WorkingSet, i: int, lse: ArrayView, rows: ArrayView) -> None:
        """lse (b, h, c) into ``rows``, one number for each row of o's heads."""
        spec, ring = plan.spec.attention, plan.extra
        if not spec.packed:
            apart = _leading(spec, ring)
            ordered = lse.transpose(2, 0, 1) if spec.qkv_format == "sbhd" else lse.transpose(0, 2, 1)
            step = rows.strides[0]
            strides = tuple(step * stride for stride in arrays.contiguous_strides(apart))
            ws.kernels.copy(ordered, rows.with_strides(apart, strides), ws.stream)
            return
        batch, heads, longest = lse.shape
        ordered = ws.scratch["by_rows"].reshape(batch, longest, heads)
        ws.kernels.copy(lse.transpose(0, 2, 1), ordered, ws.stream)
        flat = ws.scratch["weight"]
        places = self._places(plan, ws, i)
        ws.kernels.pack_sequences(ordered, flat.reshape(-1, heads), *places, ws.stream)
        ws.kernels.copy(flat, rows, ws.stream)

    def _lse_as_kernels_have_it(self, plan: Plan, ws: WorkingSet, i: int) -> None:
        """Save chunk i's log-sum-exp over all keys, (b, h, c)."""
        spec, ring, total = plan.spec.attention, plan.extra, ws.scratch["total"].at(i)
        lse = ws.saved["lse"].at(i)
        if not spec.packed:
            rows = total.reshape(*_leading(spec, ring))
            ordered = rows.transpose(1, 2, 0) if spec.qkv_format == "sbhd" else rows.transpose(0, 2, 1)
            ws.kernels.copy(ordered, lse, ws.stream)
            return
        batch, heads, longest = lse.shape
        ordered = ws.scratch["by_rows"].reshape(batch, longest, heads)
        places = self._places(plan, ws, i)
        ws.kernels.unpack_sequences(total.reshape(-1, heads), ordered, *places, ws.stream)
        ws.kernels.copy(ordered.transpose(0, 2, 1), lse, ws.stream)

    def _places(self, plan: Plan, ws: WorkingSet, i: int) -> tuple[ArrayView, ArrayView]:
        """Lengths and starts of the sequences in this rank's chunk i of q."""
        ranks = plan.extra.ranks
        chunk = chunks_of(ranks.rank, ranks.size, plan.spec.chunks)[i]
        return ws.inputs["sums_q"].at(chunk), ws.inputs["cu_seqlens_q_padded"]

    # --- backward -------------------------------------------------------------------------------------------

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        """Keys, values and their gradients go round together; after as many steps as there are ranks the
        gradients are at home."""
        ring, spec, size = plan.extra, plan.spec, plan.extra.ranks.size
        kv = {name: ws.inputs[name] for name in ("k", "v")}
        sums = {name: ws.scratch[f"d{name}0"] for name in ("k", "v")} | {"q": ws.scratch["dq"]}
        started: set[tuple[str, int]] = set()
        for step in range(size):
            source = (ring.ranks.rank - step) % size
            for i, j, row, column, block in ring.blocks(spec, source):
                inputs = _inputs(ws, kv, i, j, row, column) | {"o": ws.inputs["o"].at(i)}
                grads = {name: ws.scratch[f"block_d{name}"] for name in _PARTS}
                own = block.working_set(ws, inputs, grads, ws.saved["lse"].at(i), True)
                attention.backward(block.plan, own, {"o": cotangents["o"].at(i)})
                for name, at in (("q", i), ("k", j), ("v", j)):
                    _add(ws, grads[name], sums[name].at(at), (name, at) not in started)
                    started.add((name, at))
            if step + 1 < size:
                kv = _handed_on(plan, ws, kv, step)
            for name in ("k", "v") if size > 1 else ():
                there = ws.scratch[f"d{name}{(step + 1) % 2}"]
                ring.ranks.shift(sums[name], there, ws.stream, spec.label)
                sums[name] = there
        for name, grad in ws.outputs.items():
            ws.kernels.copy(sums[name], grad, ws.stream)


def _refuse(spec: AttentionSpec) -> None:
    """UnsupportedError for options that need more of the scores than one block of chunks."""
    op, parts = RingAttention.name, "a block of chunks knows no place in the whole"
    for field, found, wanted in (
        ("mask", spec.mask, ("no_mask", "causal", "padding", "padding_causal")),
        ("layout", spec.layout, ("separate",)),
        ("window_size", spec.window_size, ((-1, -1), (-1, 0)) if spec.causal else ((-1, -1),)),
        ("dropout", spec.dropout, (0.0,)),
        ("bias", spec.bias, ("no_bias",)),
        ("softmax_type", spec.softmax_type, ("vanilla",)),
    ):
        if found not in wanted:
            raise UnsupportedError(op, field, repr(found), f"{' or '.join(map(repr, wanted))}: {parts}")
    if spec.quantized is not None and spec.quantized.stochastic:
        same = f"codes rounded to nearest: {parts}, and all would draw the same bits"
        raise UnsupportedError(op, "quantized", str(spec.quantized), same)


def _inputs(
    ws: WorkingSet, kv: Mapping[str, ArrayView], i: int, j: int, row: int, column: int
) -> dict[str, ArrayView]:
    """Returns what the attention of this rank's chunk i over the chunk j of ``kv`` gets; ``row``, ``column``:
    their numbers in the sequence."""
    found = {"q": ws.inputs["q"].at(i)} | {name: view.at(j) for name, view in kv.items()}
    for (name, own), chunk in zip(_SUMS.items(), (row, column), strict=True):
        if ws.inputs.get(own) is not None:
            found[name] = ws.inputs[own].at(chunk)
    return found | {name: view for name in (*_STARTS, "rng") if (view := ws.inputs.get(name)) is not None}


def _handed_on(plan: Plan, ws: WorkingSet, kv: Mapping[str, ArrayView], step: int) -> dict[str, ArrayView]:
    """Returns the keys and values of the rank before the one whose ``kv`` are here."""
    found = {}
    for name, view in kv.items():
        found[name] = ws.scratch[f"{name}{step % 2}"]
        plan.extra.ranks.shift(view, found[name], ws.stream, plan.spec.label)
    return found


def _add(ws: WorkingSet, part: ArrayView, total: ArrayView, first: bool) -> None:
    """total, float32, += part; = part where it is the ``first``."""
    if first:
        ws.kernels.copy(part, total.reshape(*part.shape), ws.stream)
        return
    wide = ws.scratch["wide"].first(part.shape)
    ws.kernels.copy(part, wide, ws.stream)
    ws.kernels.add(total, wide, total, ws.stream)


def _column(view: ArrayView, i: int) -> ArrayView:
    """view[:, i]."""
    rows, columns = view.shape
    return view.with_strides((rows,), (columns,), i)


def _leading(spec: AttentionSpec, ring: _Ring) -> Shape:
    """Returns the rows of a chunk's o as dimensions: (c, b, h) or (b, c, h)."""
    return *ring.o.shape[:2], spec.num_heads


@memoized("constants of ring attention")
def constant(value: float, device: Device) -> ArrayView:
    """float32 (1,) on the device."""
    return arrays.to(np.array([value], np.float32), device)


ring_attention = RingAttention()
