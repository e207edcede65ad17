"""Context parallelism: the attention of ``DotProductAttention`` where ranks divide the sequences.

Each of P ranks has chunks r and 2 P - 1 - r of the 2 P chunks of every sequence, one after the other, so that
under a causal mask all have as much to do. An attention of whole sequences is made of existing operations, in
one of Transformer Engine's ways:

* "a2a": ranks exchange heads for sequence (Jacobs et al., DeepSpeed Ulysses, 2023). Each attends with its
  part of the heads over whole sequences, and gives the outputs back.
* "all_gather": each rank gets all keys and values, and attends with its own queries, chunk by chunk.
* "p2p": keys and values go round a ring (``fp8kit.ops.ring_attention``).
* "a2a+p2p": "a2a" within an inner group, then "p2p" among the ranks of an outer one.

What moves are rows of tokens: ``permute`` brings rows of ranks into the order of the sequences and back, by
maps that ``fp8kit.layers.context_maps`` makes, the same way for sbhd, bshd and thd.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fp8kit.arrays import Shape
from fp8kit.collectives import Collectives
from fp8kit.errors import ShapeError
from fp8kit.layers import context_maps as maps
from fp8kit.layers.context_group import ContextGroup, whole_shape
from fp8kit.lru import memoized
from fp8kit.ops.attention import attention
from fp8kit.ops.attention_spec import LAYOUTS, AttentionSpec
from fp8kit.ops.attention_views import side_of
from fp8kit.ops.communicate import columns_to_rows, gather_rows, rows_to_columns
from fp8kit.ops.permute import permute, unpermute
from fp8kit.ops.ring_attention import chunks_of, ring_attention
from fp8kit.ops.split_heads import split_heads
from fp8kit.spec import Operation

if TYPE_CHECKING:
    from fp8kit.layers.attention_base import AttentionBase
    from fp8kit.layers.attention_inputs import ResolvedCall


def angles_of_rank(
    layer: AttentionBase, argument: str, angles: Any, tokens: int, size: int, rank: int
) -> Any:
    """Returns the angles (s, r) of the ``tokens`` of sequences of s tokens or fewer that rank ``rank`` of
    ``size`` has. ShapeError for too few."""
    if tokens % 2 or angles.shape[0] < tokens * size:
        wanted = f"at least {tokens * size} positions, of an even number of tokens on each rank"
        got = f"{angles.shape[0]} positions for {tokens} tokens of {size} ranks"
        raise ShapeError(layer.layer_name, argument, got, wanted)
    row_map = _fixed(layer, angles, maps.positions, tokens, size, rank)
    spec = layer.spec_for("PermuteSpec")
    return layer.call(permute, spec, {"x": angles, "row_map": row_map})["y"]


def chunks_of_rank(layer: AttentionBase, starts: Any, size: int, rank: int) -> dict[str, Any]:
    """Returns how ``rope`` is told of a rank's chunks of packed sequences, each a sequence of its own that
    starts somewhere; ``starts``: where the whole ones start."""
    return {
        "cu_seqlens": layer.indices(partial(maps.chunk_starts, size=size), starts),
        "start_positions": layer.indices(partial(maps.chunk_positions, size=size, rank=rank), starts),
    }


def attend(layer: AttentionBase, group: ContextGroup, call: ResolvedCall, inputs: Mapping[str, Any]) -> Any:
    """o like this rank's queries, (s_q, b, h * d_v) and so on. ``call``: what ``resolve`` made of whole
    sequences; ``inputs``: this rank's layers by the operation's names."""
    return _RankCall(layer, group, call, inputs).attend()


class _RankCall:
    """One call: its arrays on their way."""

    def __init__(
        self, layer: AttentionBase, group: ContextGroup, call: ResolvedCall, inputs: Mapping[str, Any]
    ) -> None:
        self.layer, self.group, self.beside = layer, group, call.beside
        self.spec: AttentionSpec = call.spec
        self.form, self.draws = self.spec.qkv_format, call.draws
        self.like = next(iter(inputs.values()))
        dims = 1 if self.spec.packed else 2
        first, *others = inputs.values()
        # dimensions of this rank's tokens before their features
        self.lead = {"q": tuple(first.shape[:dims])}
        self.lead["kv"] = tuple((others or [first])[0].shape[:dims])
        self.rows = {name: self._matrix(x, dims) for name, x in self._apart(inputs).items()}
        self.starts = {side: self._starts(side) for side in ("q", "kv")}
        self.order: dict[str, Any] = {}  # of an exchange

    def attend(self) -> Any:
        lead, heads = self.lead["q"], self.group.heads
        if heads is not None:
            self._exchange(heads)
        rows = self.group.rows
        if rows is None:
            o = self._attention(self.spec, self.rows, self.lead, {})
        elif self.group.kind == "all_gather":
            o = self._over_gathered(rows)
        else:
            o = self._over_ring(rows)
        if heads is not None:
            o = self._unpermuted(o, self.order["q"])
            o = self._moved(rows_to_columns, o, heads)
        return o.reshape(*lead, o.shape[-1])

    # --- the ways -------------------------------------------------------------------------------------------

    def _exchange(self, ranks: Collectives) -> None:
        """Make the rows those of all ``ranks``, in the order of the sequences, with this rank's heads."""
        outer = self.group.size // ranks.size
        self.order = {side: self._order(side, ranks.size, outer, 2) for side in ("q", "kv")}
        for name, x in self.rows.items():
            x = self._moved(columns_to_rows, x, ranks)
            self.rows[name] = self._permuted(x, self.order[side_of(name)])
        self.lead = {side: whole_shape(self.form, lead, ranks.size) for side, lead in self.lead.items()}
        whole, own = self.spec.num_heads, self.spec.num_heads // ranks.size
        groups = self.spec.num_gqa_groups // ranks.size
        self.spec = _changed(self.spec, num_heads=own, num_gqa_groups=groups)
        self.beside = dict(self.beside)
        first = own * ranks.rank
        if self.spec.dropout:  # each head drops what it drops on one rank, given its random state
            self.spec = _changed(self.spec, placed=True)
            self.beside["dropout_place"] = _fixed(self.layer, self.like, maps.numbers, 0, first, whole)
        offset = self.beside.get("softmax_offset")
        if offset is not None:
            own_heads = _fixed(self.layer, self.like, maps.some_rows, first, own)
            offset = self._permuted(offset.reshape(whole, 1), own_heads)
            self.beside["softmax_offset"] = offset.reshape(own)

    def _over_gathered(self, ranks: Collectives) -> Any:
        """Returns the output's rows, by all keys and values."""
        order = self._order("kv", ranks.size, 1, self._chunks)
        whole = {"q": self.lead["q"], "kv": whole_shape(self.form, self.lead["kv"], ranks.size)}
        for name in ("k", "v"):
            self.rows[name] = self._permuted(self._moved(gather_rows, self.rows[name], ranks), order)
        if self._chunks == 1:
            return self._attention(self.spec, self.rows, whole, {})
        mask = "padding_causal_bottom_right" if self.spec.causal else "padding"
        changed = {"mask": mask, "bottom_right_diagonal": None}
        spec = _changed(self.spec, **changed, **self._longest(ranks.size, ("q",)))
        whole["q"] = self._of_chunk("q")[1:]
        outputs = []
        for number, part in zip(chunks_of(ranks.rank, ranks.size, 2), (0, 1), strict=True):
            row_map = self._chunk_map("q", part)
            rows = {**self.rows, "q": self._permuted(self.rows["q"], row_map)}
            count = 2 * ranks.size
            most = number + 1 if self.spec.causal else count
            sums = {
                "cu_seqlens_q": self._sums("q", maps.chunk_sums, count, number),
                "cu_seqlens_kv": self._sums("kv", maps.sums_up_to, count, most),
            }
            if self.spec.packed:
                sums["cu_seqlens_q_padded"] = self._divided("q", count)
                sums["cu_seqlens_kv_padded"] = self.starts["kv"]
            o = self._attention(spec, rows, whole, sums)
            outputs.append(self._unpermuted(o, row_map, math.prod(self.lead["q"])))
        return outputs[0] + outputs[1]

    def _over_ring(self, ranks: Collectives) -> Any:
        """Returns the output's rows, by keys and values that come round."""
        chunks, spec = self._chunks, self.spec
        sides = {side: self._chunk_map(side) for side in ("q", "kv")} if chunks == 2 else {}
        inputs: dict[str, Any] = {}
        for name, x in self.rows.items():
            row_map = sides.get(side_of(name))
            x = x if row_map is None else self._permuted(x, row_map)
            inputs[name] = x.reshape(*self._of_chunk(side_of(name)), x.shape[-1])
        if spec.padded:
            for side in ("q", "kv"):
                inputs[f"sums_{side}"] = self._sums(side, maps.all_chunk_sums, chunks * ranks.size)
        if spec.packed:
            for side in ("q", "kv"):
                inputs[f"cu_seqlens_{side}_padded"] = self._divided(side, chunks * ranks.size)
        spec = _changed(spec, **self._longest(ranks.size, ("q", "kv")), layout="separate")
        ring = self.layer.spec_for("RingSpec", spec, ranks.name, chunks, self.layer.layer_name)
        o = self._attended(ring_attention, ring, inputs)
        o = o.reshape(math.prod(self.lead["q"]), o.shape[-1])
        return o if sides.get("q") is None else self._unpermuted(o, sides["q"])

    def _attention(
        self, spec: AttentionSpec, rows: Mapping[str, Any], lead: Mapping[str, Shape], sums: Mapping[str, Any]
    ) -> Any:
        """Returns the output's rows of an attention over rows of whole sequences."""
        inputs = {name: x.reshape(*lead[side_of(name)], x.shape[-1]) for name, x in rows.items()}
        inputs |= {**self.beside, **sums}
        o = self._attended(attention, _changed(spec, layout="separate"), inputs)
        return o.reshape(-1, o.shape[-1])

    def _attended(self, operation: Operation, spec: Any, inputs: Mapping[str, Any]) -> Any:
        with self.layer.forked() if self.draws else nullcontext():
            return self.layer.call(operation, spec, inputs, self.draws)["o"]

    # --- what moves -----------------------------------------------------------------------------------------

    def _apart(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """q, k and v."""
        spec, found = self.spec, {}
        unit = math.gcd(spec.head_dim, spec.head_dim_v)
        groups = spec.num_heads if spec.interleaved else 1
        for name, letters in LAYOUTS[spec.layout].items():
            x = inputs[name]
            if len(letters) == 1:
                found[name] = x
                continue
            parts = tuple((part, spec.heads(part) * spec.features(part) // unit) for part in letters)
            how = self.layer.spec_for("SplitHeadsSpec", parts, unit, groups)
            found |= self.layer.call(split_heads, how, {"x": x})
        return found

    def _matrix(self, x: Any, dims: int) -> Any:
        return x.reshape(math.prod(x.shape[:dims]), math.prod(x.shape[dims:]))

    def _moved(self, operation: Operation, x: Any, ranks: Collectives) -> Any:
        spec = self.layer.spec_for("GroupSpec", ranks.name, self.layer.layer_name)
        return self.layer.call(operation, spec, {"x": x})["y"]

    def _permuted(self, x: Any, row_map: Any) -> Any:
        spec = self.layer.spec_for("PermuteSpec")
        return self.layer.call(permute, spec, {"x": x, "row_map": row_map})["y"]

    def _unpermuted(self, x: Any, row_map: Any, tokens: int = -1) -> Any:
        spec = self.layer.spec_for("UnpermuteSpec", x.shape[0] if tokens < 0 else tokens)
        return self.layer.call(unpermute, spec, {"x": x, "row_map": row_map})["y"]

    # --- where sequences and their chunks lie ---------------------------------------------------------------

    @property
    def _chunks(self) -> int:
        """Into how many parts a rank's tokens fall: without a mask their order does not matter."""
        return 1 if self.spec.mask == "no_mask" else 2

    def _starts(self, side: str) -> Any:
        """Returns where the whole sequences start, int32 (b + 1,), those of batches one after the other."""
        if self.spec.packed:
            lengths = self.beside[f"cu_seqlens_{side}"]
            return self.beside.get(f"cu_seqlens_{side}_padded", lengths)
        lead = dict(zip(self.form, self.lead[side], strict=False))
        return _fixed(self.layer, self.like, maps.multiples, lead["b"] + 1, lead["s"] * self.group.size)

    def _sums(self, side: str, function: Any, *numbers: int) -> Any:
        """Running sums that ``function`` of ``context_maps`` makes of the whole sequences'."""
        starts = self.starts[side]
        lengths = self.beside.get(f"cu_seqlens_{side}") if self.spec.padded else starts
        return self.layer.indices(partial(function, numbers=numbers), lengths, starts)

    def _divided(self, side: str, count: int) -> Any:
        """Returns where parts of the sequences start of which each has ``count``, one of each after the
        other."""
        return self.layer.indices(partial(maps.divided, count=count), self.starts[side])

    def _order(self, side: str, parts: int, outer: int, chunks: int) -> Any:
        """Returns the map that brings the rows of ``parts`` ranks, one rank's after the other's, into the
        order of the sequences, of which they have one of ``outer`` parts; ``chunks``: of a rank."""
        lead = self.lead[side]
        if not self.spec.packed:
            return _fixed(self.layer, self.like, maps.order, self.form, lead, parts, chunks)
        tokens = _fixed(self.layer, self.like, maps.multiples, parts * lead[0], 1)
        function = partial(maps.packed_order, parts=parts)
        return self.layer.indices(function, tokens, self._divided(side, outer))

    def _chunk_map(self, side: str, part: int | None = None) -> Any:
        """Returns the map that takes the two chunks of each sequence apart, or takes one of them, ``part``;
        None for one that changes nothing."""
        lead = self.lead[side]
        if self.form == "sbhd" and part is None:
            return None
        if not self.spec.packed:
            return _fixed(self.layer, self.like, maps.chunks, self.form, lead, part)
        tokens = _fixed(self.layer, self.like, maps.multiples, lead[0] // 2, 1)
        function = partial(maps.packed_chunks, part=part)
        there = self.group.rows.size if self.group.rows is not None else 1
        return self.layer.indices(function, tokens, self._divided(side, there))

    def _of_chunk(self, side: str) -> Shape:
        """(chunks, the dimensions of one before its features)."""
        lead, at = self.lead[side], max(self.form.find("s"), 0)
        return self._chunks, *lead[:at], lead[at] // self._chunks, *lead[at + 1 :]

    def _longest(self, ranks: int, sides: Sequence[str]) -> dict[str, int]:
        """Returns the longest chunk of a packed sequence. Where there are gaps the longest sequence does not
        say it."""
        found = {}
        for side in sides if self.spec.packed else ():
            whole = getattr(self.spec, f"max_seqlen_{side}")
            gaps = f"cu_seqlens_{side}_padded" in self.beside
            found[f"max_seqlen_{side}"] = whole if gaps else -(-whole // (2 * ranks))
        return found


@memoized("specs of context parallelism")
def _changed(spec: AttentionSpec, **fields: Any) -> AttentionSpec:
    """Returns the spec with other fields, the same object for the same ones."""
    return replace(spec, **fields)


def _fixed(layer: AttentionBase, like: Any, make: Any, *arguments: Any) -> Any:
    """Returns an int32 array of ``context_maps`` that depends on sizes alone, on the device of ``like``; made
    once."""
    if layer.is_compiling():
        return layer.index_array(make(*arguments), like)
    key = layer.array_name, str(like.device), make, *arguments
    found = maps.KNOWN.get(key)
    return maps.KNOWN.put(key, layer.index_array(make(*arguments), like)) if found is None else found
