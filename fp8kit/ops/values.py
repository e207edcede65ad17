"""Values that only a look at the data can refuse: running sums of lengths, and indices.

A look at a device's memory waits for the device, so values there are not checked: what a kernel does with
wrong values is said by its contract (``backends.protocol``), and it never leaves its arrays. On the CPU a
look costs next to nothing, and wrong values are ArgumentErrors: operations look when they run, before any
kernel; frontends before they allocate by what the values say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fp8kit import formats
from fp8kit.arrays import ArrayView
from fp8kit.errors import ArgumentError
from fp8kit.ops.attention_spec import LAYOUTS, AttentionSpec, length_of
from fp8kit.spec import Views

_SHOWN = 12  # entries of an array in an error


def check_sums(
    operation: str, name: str, sums: np.ndarray[Any, Any], total: int | None, longest: int | None = None
) -> None:
    """Refuse running sums (b + 1,) that do not start at 0, fall, pass ``total`` rows, or hold a sequence
    longer than ``longest``."""
    values = sums.astype(np.int64)
    lengths = np.diff(values)
    if values.size and (values[0] != 0 or (lengths < 0).any()):
        raise ArgumentError(
            operation, name, _shown(values), "running sums: 0 first, then none less than the one before"
        )
    if total is not None and values.size and values[-1] > total:
        raise ArgumentError(
            operation, name, _shown(values), f"running sums up to {total}, the rows that there are"
        )
    if longest is not None and (lengths > longest).any():
        raise ArgumentError(
            operation, name, _shown(values), f"sequences of at most {longest}, not of {lengths.max()}"
        )


def check_starts_fit(
    operation: str, name: str, starts: np.ndarray[Any, Any], sums: np.ndarray[Any, Any], total: int
) -> None:
    """Refuse starts of sequences (b + 1,), the last where they end, that leave [0, ``total``] or leave no
    room for one of ``sums``."""
    values = starts.astype(np.int64)
    if values.size and (
        values[0] < 0 or values[-1] > total or (np.diff(values) < np.diff(sums.astype(np.int64))).any()
    ):
        wanted = (
            f"places in [0, {total}] with room for each sequence of {_shown(sums)} before the next starts"
        )
        raise ArgumentError(operation, name, _shown(values), wanted)


def check_sequences(
    operation: str, views: Views, name: str, total: int | None, longest: int | None = None
) -> None:
    """``check_sums`` of the view ``name``, and ``check_starts_fit`` of its ``_padded`` twin, where they are
    there and on the CPU. Such of another shape or dtype are left to ``infer``."""
    sums, starts = _host(views.get(name)), _host(views.get(f"{name}_padded"))
    if sums is not None:
        check_sums(operation, name, sums, total if starts is None else None, longest)
    if sums is not None and starts is not None and total is not None and starts.shape == sums.shape:
        check_starts_fit(operation, f"{name}_padded", starts, sums, total)


def check_lengths(
    operation: str, spec: AttentionSpec, views: Views, sides: Iterable[str] = ("q", "kv")
) -> None:
    """``check_sequences`` of an attention's ``cu_seqlens_q`` and ``cu_seqlens_kv``, or one of them, by its
    inputs q, k and v."""
    if spec.padded:
        for side in sides:
            view = next(views[name] for name, parts in LAYOUTS[spec.layout].items() if side[0] in parts)
            assert view is not None
            longest = spec.max_seqlen_q if side == "q" else spec.max_seqlen_kv
            total, most = (
                (view.shape[0], longest) if spec.packed else (None, length_of(spec.qkv_format, view.shape))
            )
            check_sequences(operation, views, f"cu_seqlens_{side}", total, most)


def check_indices(
    operation: str, name: str, view: ArrayView | None, count: int, ignored: int | None = None
) -> None:
    """Refuse indices on the CPU that are not in [0, ``count``), but for ``ignored``."""
    if view is None or view.device.kind != "cpu":
        return
    values = view.numpy()
    wrong = (values < 0) | (values >= count)
    if ignored is not None:
        wrong &= values != ignored
    if wrong.any():
        wanted = (
            f"classes in [0, {count}), or {ignored} to ignore a row"
            if ignored is not None
            else f"indices in [0, {count})"
        )
        raise ArgumentError(operation, name, f"{int(values[wrong][0])} among them", wanted)


def check_groups(operation: str, name: str, sizes: ArrayView | None, rows: int, slots: int) -> None:
    """Refuse sizes of groups on the CPU that are negative or claim more than there are, ``rows``; with
    ``slots``, more than so many each. Such of another shape or dtype are left to ``infer``."""
    if sizes is None or sizes.device.kind != "cpu" or sizes.dtype is not formats.int32 or sizes.ndim != 1:
        return
    counts = sizes.numpy().tolist()
    if min(counts, default=0) < 0 or (slots and max(counts, default=0) > slots):
        wanted = f"numbers of rows in [0, {slots}]" if slots else "numbers of rows, at least 0"
        raise ArgumentError(operation, name, _shown(sizes.numpy()), wanted)
    if not slots and sum(counts) > rows:
        wanted = f"at most {rows}, as many as there are"
        raise ArgumentError(operation, name, f"{sum(counts)} rows together", wanted)


def _host(view: ArrayView | None) -> np.ndarray[Any, Any] | None:
    there = view is not None and view.device.kind == "cpu" and view.ndim == 1 and view.dtype is formats.int32
    return view.numpy() if view is not None and there else None


def _shown(values: np.ndarray[Any, Any]) -> str:
    return f"{values.tolist()}" if values.size <= _SHOWN else f"[{', '.join(map(str, values[:_SHOWN]))}, ...]"
