"""Contract cases of running sums that are none: nothing outside the arrays is read or written.

The doors of the CPU refuse such values; those of a GPU cannot look at them. What the results are is not said,
but each array lies between guards: an output's are bytes that stay as they are, and an input's are NaN, which
shows where a result holds one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from fp8kit import formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import AttentionExtras, Kernels
from fp8kit.formats import DType, bfloat16, float32
from fp8kit.testing.attention import Rules
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import Case, get, poisoned, put, workspace
from fp8kit.testing.contract.dropout import RNG
from fp8kit.testing.contract.elementwise import Array, draw, table

_GUARD = 512  # elements before and after each array
_TOKENS, _BATCH, _LENGTH, _HEADS, _DIM = 24, 3, 8, 2, 8
_FAR = 2**31 - 1
_GOOD = (0, 5, 13, 20)
_BAD = {
    "decreasing": (0, 13, 5, 20),
    "beyond": (0, 5, 13, 4000),
    "far": (0, 5, _FAR, _FAR),
    "behind-all": (4000, 4001, 4002, 4003),
    "late": (7, 12, 20, 27),
    "negative": (-9, 5, 13, 20),
    "far-back": (-_FAR - 1, _FAR, -_FAR - 1, _FAR),
    "nothing": (0, 0, 0, 0),
}
Call = Callable[[Kernels, "_Arrays", ArrayView, ArrayView], None]


class _Arrays:
    """Makes arrays between guards, and looks at them afterwards."""

    def __init__(self, dtype: DType, device: Device) -> None:
        self.dtype, self.device = dtype, device
        self._outputs: list[tuple[str, ArrayView, int]] = []

    def input(self, seed: int, *shape: int) -> ArrayView:
        """Drawn values, NaN round them."""
        values = draw(seed, shape, self.dtype).ravel()
        guard = np.full(_GUARD, np.nan).astype(values.dtype)
        return (
            put(np.concatenate([guard, values, guard]), self.device)
            .slice(0, _GUARD, values.size)
            .reshape(*shape)
        )

    def output(
        self, name: str, *shape: int, dtype: DType | None = None, values: Array | None = None
    ) -> ArrayView:
        """To be written; ``values``: what it holds before."""
        size, kind = int(np.prod(shape)), dtype or self.dtype
        whole = poisoned((size + 2 * _GUARD,), kind, self.device)
        if values is not None:
            held = get(whole).copy()
            held[_GUARD : _GUARD + size] = values.ravel()
            whole = put(held, self.device)
        self._outputs.append((name, whole, size))
        return whole.slice(0, _GUARD, size).reshape(*shape)

    def check(self, some_lost: bool) -> None:
        """``some_lost``: NaN among the results has another reason."""
        for name, whole, size in self._outputs:
            held = get(whole)
            for beside in (held[:_GUARD], held[_GUARD + size :]):
                assert_same_bits(
                    f"beside {name}", beside.view(np.uint8), np.full(beside.nbytes, 0xFF, np.uint8)
                )
            inside = held[_GUARD : _GUARD + size].astype(np.float32)
            assert some_lost or not np.isnan(inside).any(), f"{name}: NaN from outside an input"


def _case(
    call: Call, dtype: DType, lengths: tuple[int, ...], starts: tuple[int, ...], some_lost: bool = False
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        arrays = _Arrays(dtype, device)
        call(
            kernels, arrays, put(np.array(lengths, np.int32), device), put(np.array(starts, np.int32), device)
        )
        arrays.check(some_lost)

    return run


def _unpack(kernels: Kernels, arrays: _Arrays, lengths: ArrayView, starts: ArrayView) -> None:
    x, y = arrays.input(1, _TOKENS, 24), arrays.output("y", _BATCH, _LENGTH, 24)
    kernels.unpack_sequences(x, y, lengths, starts, 0)


def _pack(kernels: Kernels, arrays: _Arrays, lengths: ArrayView, starts: ArrayView) -> None:
    x, y = arrays.input(1, _BATCH, _LENGTH, 24), arrays.output("y", _TOKENS, 24)
    kernels.pack_sequences(x, y, lengths, starts, 0)


def _rope(kernels: Kernels, arrays: _Arrays, lengths: ArrayView, starts: ArrayView) -> None:
    x, y = arrays.input(1, _TOKENS, _HEADS, _DIM), arrays.output("y", _TOKENS, _HEADS, _DIM)
    freqs = put(draw(2, (_LENGTH, _DIM), float32), arrays.device)
    kernels.rope_fwd(x, freqs, y, None, lengths, starts, "thd", False, 0)


def _drop_path(kernels: Kernels, arrays: _Arrays, lengths: ArrayView, starts: ArrayView) -> None:
    x, y = arrays.input(1, _TOKENS, 24), arrays.output("y", _TOKENS, 24)
    kernels.drop_path(x, None, y, starts, 1, _BATCH, 0.5, put(RNG, arrays.device), 0)


def _append(pages: tuple[int, ...]) -> Call:
    """``pages``: what the table names."""

    def call(kernels: Kernels, arrays: _Arrays, lengths: ArrayView, starts: ArrayView) -> None:
        x = arrays.input(1, _TOKENS, _HEADS, _DIM)
        cache = arrays.output("cache", 6, 4, _HEADS, _DIM, values=draw(2, (6, 4, _HEADS, _DIM), arrays.dtype))
        where = put(np.array(pages, np.int32).reshape(_BATCH, 2), arrays.device)
        fresh = put(np.array(_GOOD, np.int32), arrays.device)
        kernels.cache_append_(x, cache, where, fresh, lengths, starts, "thd", 0)
        kernels.cache_append_(x, cache, where, lengths, fresh, starts, "thd", 0)
        x = arrays.input(3, _LENGTH, _BATCH, _HEADS, _DIM)
        kernels.cache_append_(x, cache, where, lengths, fresh, None, "sbhd", 0)

    return call


def _gather(pages: tuple[int, ...]) -> Call:
    def call(kernels: Kernels, arrays: _Arrays, lengths: ArrayView, starts: ArrayView) -> None:
        cache, y = arrays.input(1, 6, 4, _HEADS, _DIM), arrays.output("y", _BATCH, 12, _HEADS, _DIM)
        where = put(np.array(pages, np.int32).reshape(_BATCH, 2), arrays.device)
        kernels.cache_gather(cache, y, where, lengths, "bshd", 0)

    return call


def _attention(backward: bool, swapped: bool, rules: Rules) -> Call:
    """``swapped``: the bad sums are the keys'."""
    rules = dataclasses.replace(rules, padded=True)

    def call(kernels: Kernels, arrays: _Arrays, lengths: ArrayView, starts: ArrayView) -> None:
        shape, lse_shape = (_LENGTH, _BATCH, _HEADS, _DIM), (_BATCH, _HEADS, _LENGTH)
        q, k, v = (arrays.input(seed, *shape) for seed in (1, 2, 3))
        good = put(np.array(_GOOD, np.int32), arrays.device)
        extras = AttentionExtras(*((good, lengths) if swapped else (lengths, good)))
        o, lse = arrays.output("o", *shape), arrays.output("lse", *lse_shape, dtype=formats.float32)
        asked = (shape, shape, shape, None, arrays.dtype, rules)
        room = workspace(kernels.attention_workspace(*asked, False, True, ()), arrays.device)
        kernels.attention_fwd(q, k, v, o, lse, extras, rules, room, 0)
        if backward:
            dq, dk, dv = (arrays.output(name, *shape) for name in ("dq", "dk", "dv"))
            room = workspace(kernels.attention_workspace(*asked, True, True, ()), arrays.device)
            kernels.attention_bwd(
                arrays.input(4, *shape), q, k, v, o, lse, dq, dk, dv, None, None, extras, rules, True, room, 0
            )

    return call


def _both(kernel: str, call: Call, some_lost: bool = False) -> list[Case]:
    """Bad lengths with good starts, the other way round, and both, in a wide and a narrow dtype."""
    rows = {}
    for d in (float32, bfloat16):
        for name, bad in _BAD.items():
            rows[f"{d.name}-bad-lengths-{name}"] = _case(call, d, bad, _GOOD, some_lost)
            rows[f"{d.name}-bad-starts-{name}"] = _case(call, d, _GOOD, bad, some_lost)
            rows[f"{d.name}-bad-both-{name}"] = _case(call, d, bad, bad, some_lost)
    return table(kernel, rows)


def _lengths(kernel: str, name: str, call: Call) -> list[Case]:
    """Bad lengths only."""
    return table(
        kernel,
        {
            f"{d.name}-bad-{name}-{kind}": _case(call, d, bad, _GOOD)
            for d in (float32, bfloat16)
            for kind, bad in _BAD.items()
        },
    )


_PAGES = (3, 1, 5, 0, 2, 4)
_WILD = (3, _FAR, -1, 0, 6, -_FAR - 1)
_BANDED = Rules(window=(-1, 0), bottom_right=True)

CASES = [
    *_both("unpack_sequences", _unpack),
    *_both("pack_sequences", _pack, some_lost=True),  # rows without a place are NaN
    *_both("rope_fwd", _rope, some_lost=True),  # so are positions beyond the angles
    *_both("drop_path", _drop_path),
    *_both("cache_append_", _append(_PAGES)),
    *_lengths("cache_append_", "pages", _append(_WILD)),
    *_lengths("cache_gather", "lengths", _gather(_PAGES)),
    *_lengths("cache_gather", "pages", _gather(_WILD)),
    *_lengths("attention_fwd", "queries", _attention(False, False, Rules())),
    *_lengths("attention_fwd", "keys", _attention(False, True, _BANDED)),
    *_lengths("attention_bwd", "queries", _attention(True, False, _BANDED)),
    *_lengths("attention_bwd", "keys", _attention(True, True, Rules())),
]
