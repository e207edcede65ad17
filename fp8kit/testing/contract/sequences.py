"""Contract cases of packing and unpacking: bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import get, poisoned, put
from fp8kit.testing.contract.elementwise import Array, draw, table

# true lengths, gaps after each sequence, tokens after the last one, padded length, features
_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, int]] = {
    "plain": ((5, 17, 3), (0, 0, 0), 0, 17, 24),
    "empty-sequences": ((0, 4, 0, 9, 0), (0, 0, 0, 0, 0), 0, 12, 7),
    "gaps": ((5, 1, 8), (3, 15, 0), 6, 8, 33),
    "one": ((40,), (0,), 0, 64, 512),
    "too-long": ((5, 9, 3), (0, 1, 0), 2, 6, 8),
    "nothing": ((0, 0), (0, 2), 3, 4, 16),
}


def _sums(lengths: tuple[int, ...]) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _case(dtype: DType, name: str, way: str) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        lengths, gaps, rest, longest, features = _SHAPES[name]
        sums, starts = _sums(lengths), _sums(tuple(a + b for a, b in zip(lengths, gaps, strict=True)))
        tokens = draw(1, (int(starts[-1]) + rest, features), dtype)
        batch = draw(2, (len(lengths), longest, features), dtype)
        places: list[ArrayView] = (
            [put(sums, device)] if not any(gaps) else [put(sums, device), put(starts, device)]
        )
        if way == "unpack_sequences":
            want = np.zeros_like(batch)
            for b, n in enumerate(lengths):
                want[b, :n] = tokens[starts[b] : starts[b] + min(n, longest)]
            source, out = put(tokens, device), poisoned(batch.shape, dtype, device)
        else:
            want = np.zeros_like(tokens)
            for b, n in enumerate(lengths):
                want[starts[b] : starts[b] + n] = np.nan
                want[starts[b] : starts[b] + min(n, longest)] = batch[b, :n]
            source, out = put(batch, device), poisoned(tokens.shape, dtype, device)
        getattr(kernels, way)(source, out, places[0], places[-1], 0)
        found = get(out)
        lost = np.isnan(want)
        assert np.isnan(found[lost]).all(), f"{way}: rows that have no place are no NaN"
        assert_same_bits(way, np.where(lost, want, found), want)

    return run


CASES = [
    case
    for way in ("unpack_sequences", "pack_sequences")
    for case in table(
        way, {f"{d.name}-{name}": _case(d, name, way) for d in HIGH_PRECISION for name in _SHAPES}
    )
]
