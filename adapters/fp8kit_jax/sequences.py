"""Where sequences lie in rows of tokens: ``SequenceDescriptor``, and the order of tokens in which a causal
mask costs ranks the same (``reorder_causal_load_balancing``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8kit.arguments import integer, shown
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit_jax.arguments import as_array, on_host

Pair = tuple[Any, Any]
_OP = "SequenceDescriptor"


def _pair(name: str, value: Any) -> Pair:
    """Integers for queries and keys; ids in floats, as jnp.ones makes them, become such."""
    pair = tuple(value) if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    first = as_array(_OP, name, pair[0])
    found = first, first if pair[1] is pair[0] else as_array(_OP, name, pair[1])
    if name == "segment_ids":
        found = _each(
            lambda ids: ids.astype(jnp.int32) if jnp.issubdtype(ids.dtype, jnp.floating) else ids, found
        )
    if not all(jnp.issubdtype(one.dtype, jnp.integer) and one.ndim in (1, 2) for one in found):
        got = ", ".join(f"{one.dtype} {one.shape}" for one in found)
        raise ShapeError(_OP, name, got, "integers (batch,) or (batch, ...), or a pair of them")
    return found[0], found[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceDescriptor:
    """Lengths of sequences in rows of tokens (b, s), pairs for queries and keys: ``seqlens`` int32 (b,),
    a sequence at each row's start, or (b, n) with ``seq_offsets`` int32 (b, n) or (b, n + 1), where in the
    row they start; or ``segment_ids`` int32 (b, s), tokens of the sequences 1, 2, ... one after the other, 0
    for tokens of none. ``reordered``: whether ids are in the order that queries, keys and values have, where
    a call splits sequences with load balancing. Source: Transformer Engine's ``SequenceDescriptor`` in
    JAX."""

    seqlens: Pair | None = None
    seq_offsets: Pair | None = None
    segment_ids: Pair | None = None
    reordered: bool = field(default=True, metadata={"static": True})

    @classmethod
    def from_seqlens(cls, seqlens: Any) -> SequenceDescriptor:
        """One sequence a row, (b,), or a pair of such for queries and keys."""
        return cls(seqlens=_pair("seqlens", seqlens))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens: Any, seq_offsets: Any) -> SequenceDescriptor:
        """Several sequences a row, (b, n), and where in the row they start."""
        return cls(seqlens=_pair("seqlens", seqlens), seq_offsets=_pair("seq_offsets", seq_offsets))

    @classmethod
    def from_segment_ids_and_pos(
        cls,
        segment_ids: Any,
        segment_pos: Any = None,
        *,
        is_thd: bool | None = None,
        is_segment_ids_reordered: bool | None = None,
    ) -> SequenceDescriptor:
        """Make a descriptor from the number of each token's sequence, (b, s). ``segment_pos``: positions
        within sequences, which count from 0 here: not read. ``is_thd``: the layout says it.
        ``is_segment_ids_reordered``: with load balancing, whether ``reorder_causal_load_balancing`` was given
        the ids too; None, as Transformer Engine has had it since 2.14, is True."""
        reordered = is_segment_ids_reordered is None or bool(is_segment_ids_reordered)
        return cls(segment_ids=_pair("segment_ids", segment_ids), reordered=reordered)

    def lengths(self, how: Any = None) -> Pair:
        """Returns the tokens of each row's one sequence, (b,), for queries and keys; ``how`` as ``packed``
        has it: in a shard_map ids are the device's. ArgumentError for several, of ids that are not traced."""
        if self.segment_ids is not None:
            for ids in self.segment_ids:
                if on_host(ids) is not None and _several(np.asarray(ids)):
                    wanted = "one a row, or a packed qkv_layout, 'thd_thd_thd' say"
                    raise ArgumentError(_OP, "segment_ids", "rows of several sequences", wanted)
            found = _each(lambda ids: jnp.sum(ids != 0, -1, dtype=jnp.int32), self.segment_ids)
            parts = how is not None and how.manual
            return _each(lambda a: jax.lax.psum(a, how.axis), found) if parts else found
        if self.seqlens is None or any(n.ndim != 1 for n in self.seqlens):
            got = None if self.seqlens is None else f"shape {self.seqlens[0].shape}"
            raise ArgumentError(_OP, "seqlens", got, "(batch,), or a packed qkv_layout, 'thd_thd_thd' say")
        return self.seqlens

    def packed(self, sizes: Pair, most: int, how: Any = None) -> dict[str, Any]:
        """``cu_seqlens_q``, ``cu_seqlens_kv`` and their ``_padded`` twins, int32 (b * most + 1,), of rows of
        tokens laid end to end in natural order; ``max_seqlen_q`` and ``max_seqlen_kv``. ``sizes``: (b, s) of
        queries and of keys; ``most``: sequences of a row, or as many as ``seqlens`` has places; ``how``: the
        ``context_parallel.Division`` of a call whose sequences are split. Arrays of both sides are the same
        where they were given once."""
        found: dict[str, Any] = {"max_seqlen_q": sizes[0][1], "max_seqlen_kv": sizes[1][1]}
        given = [pair for pair in (self.seqlens, self.seq_offsets, self.segment_ids) if pair is not None]
        same = sizes[0] == sizes[1] and all(one is other for one, other in given)
        # empty places keep theirs, so that those of queries and of keys stay pairs
        most = max([most, *(n.shape[1] for n in self.seqlens or () if n.ndim == 2)])
        for side, own, (rows, length) in zip(("q", "kv"), (0, 1), sizes, strict=True):
            if own and same:
                found |= {f"cu_seqlens_kv{end}": found[f"cu_seqlens_q{end}"] for end in ("", "_padded")}
                break
            lengths, starts = self._sequences(own, rows, length, most, how)
            own_starts = (jnp.arange(rows, dtype=jnp.int32)[:, None] * length + starts).reshape(-1)
            lengths, zero = lengths.reshape(-1), jnp.zeros(1, jnp.int32)
            ends = jax.lax.cummax(jnp.where(lengths > 0, own_starts + lengths, 0))
            # a sequence of no tokens begins where the one before ends
            begins = jnp.where(lengths > 0, own_starts, jnp.concatenate([zero, ends[:-1]]))
            total = jnp.full((1,), rows * length, jnp.int32)
            sums = jnp.cumsum(lengths, dtype=jnp.int32)
            found[f"cu_seqlens_{side}"] = jnp.concatenate([zero, sums])
            found[f"cu_seqlens_{side}_padded"] = jnp.concatenate([begins, total])
        return found

    def _sequences(self, own: int, rows: int, length: int, most: int, how: Any) -> Pair:
        """Lengths and first tokens within the row of a row's sequences, (b, most) each."""
        if self.segment_ids is not None:
            ids = self.segment_ids[own]
            if how is not None and how.manual:  # the device's
                ids = jax.lax.all_gather(ids, how.axis, axis=1, tiled=True)
            if how is not None and how.order is not None and self.reordered:
                ids = _inverse(ids, *how.order)
            if ids.shape != (rows, length):
                raise ShapeError(_OP, "segment_ids", f"shape {ids.shape}", f"shape {(rows, length)}")
            _want_at_most(most, ids, f"at most {most}, as max_segments_per_seq says")
            numbers = jnp.arange(1, most + 1, dtype=ids.dtype)
            same = ids[:, None, :] == numbers[None, :, None]
            return jnp.sum(same, -1, dtype=jnp.int32), jnp.argmax(same, -1).astype(jnp.int32)
        lengths = None if self.seqlens is None else self.seqlens[own]
        if lengths is None or lengths.ndim != 2 or self.seq_offsets is None:
            raise ArgumentError(
                _OP, "seqlens", "one a row", "several with offsets, or segment_ids, for 'thd'"
            )
        if lengths.shape[0] != rows:
            raise ShapeError(_OP, "seqlens", f"shape {lengths.shape}", f"({rows}, sequences)")
        count = lengths.shape[1]
        starts = self.seq_offsets[own][:, :count]
        lengths = jnp.maximum(lengths, 0)  # -1: there is none
        fill = [(0, 0), (0, most - count)]
        lengths, starts = (jnp.pad(a.astype(jnp.int32), fill) for a in (lengths, starts))
        return lengths, starts


def _several(ids: Any) -> bool:
    """Whether a row has more than one number beside 0."""
    return bool(((ids != 0) & (ids != ids.max(-1, initial=0, keepdims=True))).any())


def _want_at_most(most: int, ids: Any, wanted: str) -> None:
    """ArgumentError for more sequences a row, where the ids can be looked at."""
    found = 0 if on_host(ids) is None else int(np.asarray(ids).max(initial=0))
    if found > most:
        raise ArgumentError(_OP, "segment_ids", f"{found} sequences a row", wanted)


def _each(function: Any, pair: Pair) -> Pair:
    """Returns the function of both; what was one array stays one."""
    first = function(pair[0])
    return first, first if pair[1] is pair[0] else function(pair[1])


# --- the order of tokens ------------------------------------------------------------------------------------


class ReorderStrategy(Enum):
    """DualChunkSwap: of 2 n chunks rank r of n has chunks r and 2 n - 1 - r. Striped: rank r has every n-th
    token, or stripe of tokens, from the r-th on."""

    DualChunkSwap = 0
    Striped = 1


def _order(strategy: ReorderStrategy, length: int, cp_size: int, stripe: int | None) -> np.ndarray:
    op = "reorder_causal_load_balancing"
    if not isinstance(strategy, ReorderStrategy):
        raise ArgumentError(op, "strategy", shown(strategy), "a ReorderStrategy")
    ranks = integer(op, "cp_size", cp_size, 1, 2**20)
    if strategy is ReorderStrategy.DualChunkSwap:
        unit, chunks = 2 * ranks, np.arange(2 * ranks)
        taken = np.stack([chunks[:ranks], chunks[::-1][:ranks]], 1).reshape(-1)
    else:
        unit = ranks * (1 if stripe is None else integer(op, "stripe_size", stripe, 1, 2**31 - 1))
    if length % unit:
        raise ShapeError(op, "tensor", f"{length} tokens", f"a multiple of {unit}")
    tokens = np.arange(length)
    if strategy is ReorderStrategy.DualChunkSwap:
        return tokens.reshape(unit, -1)[taken].reshape(-1)
    return tokens.reshape(-1, ranks, unit // ranks).swapaxes(0, 1).reshape(-1)


def reorder_causal_load_balancing(
    tensor: Any, strategy: ReorderStrategy, cp_size: int, seq_dim: int, stripe_size: int | None = None
) -> Any:
    """Returns the tokens along ``seq_dim`` in the order of ``strategy``, of which ``cp_size`` ranks get equal
    parts. Source: Transformer Engine's function of that name."""
    tensor = as_array("reorder_causal_load_balancing", "tensor", tensor)
    order = _order(strategy, tensor.shape[seq_dim], cp_size, stripe_size)
    return jnp.take(tensor, order, axis=seq_dim)


def _inverse(ids: Any, strategy: ReorderStrategy, devices: int, stripe: int | None) -> Any:
    return inverse_reorder_causal_load_balancing(ids, strategy, devices, 1, stripe)


def inverse_reorder_causal_load_balancing(
    tensor: Any, strategy: ReorderStrategy, cp_size: int, seq_dim: int, stripe_size: int | None = None
) -> Any:
    """Returns what ``reorder_causal_load_balancing`` was given."""
    tensor = as_array("inverse_reorder_causal_load_balancing", "tensor", tensor)
    order = _order(strategy, tensor.shape[seq_dim], cp_size, stripe_size)
    return jnp.take(tensor, np.argsort(order), axis=seq_dim)
