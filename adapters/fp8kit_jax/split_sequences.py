"""Where sequences lie on devices that divide them: the lengths and starts of a device's parts, and of what
meets in one block of attention, a chunk of queries and a chunk of keys.

All is of arrays that may be traced: devices run one program, and which chunks one has follows from its index.
The chunks themselves, and their running sums in padded batches, are ``fp8kit.layers.context_maps``'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8kit.layers import context_maps as maps
from fp8kit.ops.ring_attention import chunks_of

Sums = dict[str, Any]
SIDES = ("q", "kv")


class Packed(NamedTuple):
    """Sequences within rows of tokens, in the tokens' natural order: ``lengths`` and ``starts``, int32 (rows,
    n), starts counted from the row's."""

    lengths: Any
    starts: Any


def packed_sequences(sums: Any, starts: Any, rows: int, length: int) -> Packed:
    """Returns the sequences of running sums (rows * n + 1,) and of their starts among ``rows`` of ``length``
    tokens."""
    first = jnp.arange(rows, dtype=jnp.int32)[:, None] * length
    return Packed(jnp.diff(sums).reshape(rows, -1), starts[:-1].reshape(rows, -1) - first)


class Part(NamedTuple):
    """What a device has of packed sequences: ``begins`` and ``ends`` among its ``tokens`` of each row, int32
    (rows, n), and ``places``, which token of its sequence the first one is."""

    begins: Any
    ends: Any
    places: Any
    tokens: int

    def sums(self, side: str) -> Sums:
        """Returns the running sums of the parts' lengths, and where they start in the rows, laid end to
        end."""
        rows = self.begins.shape[0]
        first = jnp.arange(rows, dtype=jnp.int32)[:, None] * self.tokens
        total = jnp.full((1,), rows * self.tokens, jnp.int32)
        return {
            f"cu_seqlens_{side}": maps.running(jnp, (self.ends - self.begins).reshape(-1)),
            f"cu_seqlens_{side}_padded": jnp.concatenate([(self.begins + first).reshape(-1), total]),
        }

    def without_first(self, some: Any) -> Part:
        """Returns the parts without the first token of those that are True in ``some``."""
        return self._replace(begins=jnp.minimum(self.begins + some.astype(jnp.int32), self.ends))


def part_of(whole: Packed, device: Any, devices: int, tokens: int, striped: bool) -> Part:
    """Returns what a device, an index or an array, has of each row: ``tokens`` neighbours, or, ``striped``,
    every token whose number modulo ``devices`` is its own."""

    def here(place: Any) -> Any:
        """Returns how many of the device's tokens lie before a place in the row."""
        before = (place - device + devices - 1) // devices if striped else place - device * tokens
        return jnp.clip(before, 0, tokens).astype(jnp.int32)

    begins, ends = here(whole.starts), here(whole.starts + whole.lengths)
    first = begins * devices + device if striped else begins + device * tokens
    return Part(begins, ends, first - whole.starts, tokens)


def seen_by(whole: Packed, part: Part, causal: bool) -> Packed:
    """Returns, of each sequence, the tokens that the queries of ``part``, neighbours, see: all, or with a
    causal mask those up to its last one."""
    if not causal:
        return whole
    count = part.ends - part.begins
    return whole._replace(lengths=jnp.where(count > 0, part.places + count, 0))


def whole_sums(whole: Packed, length: int) -> Sums:
    """Returns the running sums and starts, of keys, of whole rows of ``length`` tokens, laid end to end."""
    return Part(whole.starts, whole.starts + whole.lengths, None, length).sums("kv")


def chunk_sums(sums: Any, length: int, chunks: int, device: Any, devices: int, half: Any) -> Any:
    """Running sums (b + 1,) of the true lengths within a device's ``chunks`` of sequences of ``length``
    tokens, whose true lengths have the running ``sums``, or within one of its two, ``half``."""
    starts = jnp.arange(sums.shape[0], dtype=jnp.int32) * length
    numbers = chunks_of(device, devices, chunks)
    if half is not None:
        numbers = (jnp.where(half == 0, *numbers),)
    return sum(maps.chunk_sums(jnp, sums, starts, (chunks * devices, number)) for number in numbers)


# --- rows of tokens and rows of sequences -------------------------------------------------------------------


def by_token(lse: Any, sums: Mapping[str, Any], tokens: int) -> Any:
    """(t, h) of what has a number for each row of each packed sequence, (b, h, longest); -Inf elsewhere."""
    starts, lengths = sums["cu_seqlens_q_padded"], jnp.diff(sums["cu_seqlens_q"])
    row = jnp.arange(tokens, dtype=jnp.int32)
    at = jnp.clip(jnp.searchsorted(starts, row, side="right") - 1, 0, lengths.shape[0] - 1)
    place = row - starts[at]
    found = lse[at, :, jnp.clip(place, 0, lse.shape[2] - 1)]
    return jnp.where(((place >= 0) & (place < lengths[at]))[:, None], found, -jnp.inf)


def by_sequence(rows: Any, sums: Mapping[str, Any], longest: int) -> Any:
    """(b, h, longest) of (t, h), the inverse of ``by_token``."""
    starts, lengths = sums["cu_seqlens_q_padded"][:-1], jnp.diff(sums["cu_seqlens_q"])
    place = jnp.arange(longest, dtype=jnp.int32)
    found = rows[jnp.clip(starts[:, None] + place, 0, rows.shape[0] - 1)]
    there = (place < lengths[:, None])[:, :, None]
    return jnp.where(there, found, -jnp.inf).transpose(0, 2, 1)
