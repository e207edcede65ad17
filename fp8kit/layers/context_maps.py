"""Which rows of tokens ranks of context parallelism have: maps int32 (R, 2) for ``fp8kit.ops.permute``, whose
row r says (source row, 0), and running sums of parts of sequences.

Of P ranks, rank r has chunks r and 2 P - 1 - r of the 2 P chunks of each sequence. Padded batches have maps
that follow from sizes, made on the host. Those of packed sequences follow from running sums that a device
has: functions of ``xp``, an array library (NumPy, CuPy, torch), and its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8kit.arrays import Shape
from fp8kit.lru import LRU, SHAPES

KNOWN: LRU[Any, Any] = LRU(SHAPES, name="maps of context parallelism")
Array = np.ndarray[Any, Any]

# --- of sizes -----------------------------------------------------------------------------------------------


def numbers(*values: int) -> Array:
    """Returns the values themselves."""
    return np.array(values, np.int32)


def multiples(count: int, step: int) -> Array:
    """0, step, 2 step, ...: (count,)."""
    return np.arange(count, dtype=np.int32) * np.int32(step)


def some_rows(first: int, count: int) -> Array:
    """Returns the map of rows first ... first + count - 1."""
    return _map(np.arange(first, first + count))


def positions(tokens: int, size: int, rank: int) -> Array:
    """Returns the map of the positions that a rank's ``tokens`` have in their sequence."""
    chunk, half = tokens // 2, np.arange(tokens // 2)
    return _map(np.concatenate([half + rank * chunk, half + (2 * size - 1 - rank) * chunk]))


def order(form: str, lead: Shape, parts: int, chunks: int) -> Array:
    """Returns the map from rows (parts, tokens) of ranks to those of sequences in their order, of padded
    batches; ``lead``: dimensions of a rank's tokens; ``chunks``: of a rank, 1 where it has neighbouring
    tokens."""
    ranks = [rows + part * rows.size for part, rows in enumerate([_sequence_first(form, lead)] * parts)]
    if chunks == 1:
        return _map(_as(form, np.concatenate(ranks)))
    half = len(ranks[0]) // 2
    halves = [rows[:half] for rows in ranks] + [rows[half:] for rows in reversed(ranks)]
    return _map(_as(form, np.concatenate(halves)))


def chunks(form: str, lead: Shape, part: int | None) -> Array:
    """Returns the map that takes a rank's two chunks apart, or one of them, ``part``, of padded batches."""
    rows = _sequence_first(form, lead)
    half = len(rows) // 2
    both = [_as(form, rows[:half]), _as(form, rows[half:])]
    return _map(np.concatenate(both) if part is None else both[part])


def _sequence_first(form: str, lead: Shape) -> Array:
    """Returns the numbers of a rank's rows as (s, b)."""
    rows = np.arange(lead[0] * lead[1]).reshape(lead)
    return rows if form == "sbhd" else rows.T


def _as(form: str, rows: Array) -> Array:
    """Rows (s, b) in the order of ``form``."""
    return (rows if form == "sbhd" else rows.T).reshape(-1)


def _map(rows: Array) -> Array:
    return np.stack([rows, np.zeros_like(rows)], 1).astype(np.int32)


# --- of running sums ----------------------------------------------------------------------------------------


def divided(xp: Any, starts: Any, count: int) -> Any:
    """Returns where sequences start of which each has one of ``count`` equal parts."""
    return starts // count


def chunk_sums(xp: Any, lengths: Any, starts: Any, numbers: Sequence[int]) -> Any:
    """Running sums of the true lengths within chunk ``number`` of ``count``, ``numbers`` = (count, number);
    ``lengths``: running sums of the true lengths, ``starts``: where the whole sequences start."""
    count, number = numbers
    chunk = xp.diff(starts) // count
    return running(xp, xp.clip(xp.diff(lengths) - number * chunk, 0 * chunk, chunk))


def all_chunk_sums(xp: Any, lengths: Any, starts: Any, numbers: Sequence[int]) -> Any:
    """``chunk_sums`` of every chunk: (count, b + 1)."""
    (count,) = numbers
    return xp.stack([chunk_sums(xp, lengths, starts, (count, number)) for number in range(count)])


def sums_up_to(xp: Any, lengths: Any, starts: Any, numbers: Sequence[int]) -> Any:
    """Running sums of the true lengths within the first ``most`` of ``count`` chunks, ``numbers`` = (count,
    most)."""
    count, most = numbers
    chunk = xp.diff(starts) // count
    return running(xp, xp.clip(xp.diff(lengths), 0 * chunk, most * chunk))


def packed_order(xp: Any, tokens: Any, starts: Any, parts: int) -> Any:
    """Returns the map from rows (parts, t) of ranks to those of sequences in their order. ``tokens``: 0 ...
    parts t - 1; ``starts``: where the sequences start in the result."""
    start, length, place = _within(xp, tokens, starts)
    chunk = length // (2 * parts)
    number = place // xp.clip(chunk, 1, None)
    first = number < parts
    owner = xp.where(first, number, 2 * parts - 1 - number)
    row = owner * (len(tokens) // parts) + start // parts + place % xp.clip(chunk, 1, None)
    row = row + xp.where(first, 0 * chunk, chunk)
    return _checked_map(xp, row, (place >= 0) & (place < length))


def packed_chunks(xp: Any, tokens: Any, starts: Any, part: int | None) -> Any:
    """Returns the map that takes a rank's two chunks of each sequence apart, or one of them, ``part``.
    ``tokens``: 0 ... t / 2 - 1; ``starts``: where this rank's parts of the sequences start."""
    start, half, place = _within(xp, tokens, starts // 2)
    there = (place >= 0) & (place < half)
    found = [_checked_map(xp, 2 * start + each * half + place, there) for each in (0, 1)]
    return xp.concatenate(found) if part is None else found[part]


def chunk_starts(xp: Any, starts: Any, size: int) -> Any:
    """Returns where a rank's chunks start among its tokens, two of each sequence: (2 b + 1,)."""
    chunk = xp.diff(starts) // (2 * size)
    return running(xp, xp.stack([chunk, chunk], 1).reshape(-1))


def chunk_positions(xp: Any, starts: Any, size: int, rank: int) -> Any:
    """Returns the positions in their sequences at which a rank's chunks start: (2 b,)."""
    chunk = xp.diff(starts) // (2 * size)
    return xp.stack([chunk * rank, chunk * (2 * size - 1 - rank)], 1).reshape(-1)


def running(xp: Any, lengths: Any) -> Any:
    """(b + 1,)."""
    return xp.cumsum(xp.concatenate([0 * lengths[:1], lengths]), 0)


def _within(xp: Any, tokens: Any, starts: Any) -> tuple[Any, Any, Any]:
    """Returns for each token the start and the length of its sequence, and its place there. A token after the
    last sequence counts to that one, at a place beyond its length."""
    at = xp.clip(xp.searchsorted(starts, tokens, side="right") - 1, 0, len(starts) - 2)
    return starts[at], (starts[1:] - starts[:-1])[at], tokens - starts[at]


def _checked_map(xp: Any, rows: Any, there: Any) -> Any:
    """Returns the map of rows, empty where a row is not ``there``."""
    rows = xp.where(there, rows, 0 * rows - 1)
    return xp.stack([rows, xp.where(there, 0 * rows, rows)], 1)
