"""Contract cases of the cache of keys and values: bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit.arrays import Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import get, poisoned, put
from fp8kit.testing.contract.elementwise import Array, draw, table

# lengths with the new tokens, new tokens, page size, pages, heads, features
_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, int, int]] = {
    "slots": ((5, 17, 1), (5, 1, 1), 32, 4, 2, 16),
    "pages": ((5, 17, 9, 8), (2, 7, 1, 8), 4, 24, 3, 8),
    "odd": ((3, 7), (3, 4), 5, 6, 1, 7),
    "one": ((40,), (1,), 16, 3, 4, 64),
}
_LONGEST = 12  # positions of a gathered batch: some sequences are longer


def _sums(lengths: tuple[int, ...]) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _pages(lengths: tuple[int, ...], size: int, pages: int) -> Array:
    """A table of pages in no order; entries behind a sequence's last page name no page."""
    width = max(-(-n // size) for n in lengths)
    free = np.random.default_rng(3).permutation(pages).astype(np.int32)
    found = np.full((len(lengths), width), pages + 7, np.int32)
    for b, n in enumerate(lengths):
        used = -(-n // size)
        found[b, :used], free = free[:used], free[used:]
    return found


def _append(dtype: DType, name: str, form: str, packed: bool) -> Callable[[Kernels, Device], None]:
    """``packed``: the new tokens lie among other features of a row; with thd, also with gaps between the
    sequences."""

    def run(kernels: Kernels, device: Device) -> None:
        lengths, fresh, size, pages, heads, dim = _SHAPES[name]
        longest, gap = max(fresh) + 1, 2 if packed else 0
        starts = _sums(tuple(n + gap for n in fresh))
        leading = {
            "sbhd": (longest, len(fresh)),
            "bshd": (len(fresh), longest),
            "thd": (int(starts[-1]) + 3,),
        }[form]
        x, cache = (
            draw(1, (*leading, heads, dim + 8 * packed), dtype),
            draw(2, (pages, size, heads, dim), dtype),
        )
        where = _pages(lengths, size, pages)
        want = cache.copy()
        for b, (n, length) in enumerate(zip(fresh, lengths, strict=True)):
            for i in range(n):
                token = {"sbhd": (i, b), "bshd": (b, i), "thd": (int(starts[b]) + i,)}[form]
                place = length - n + i
                want[where[b, place // size], place % size] = x[token][:, :dim]
        target, source = put(cache, device), put(x, device).slice(len(leading) + 1, 0, dim)
        kernels.cache_append_(
            source,
            target,
            put(where, device),
            put(_sums(fresh), device),
            put(_sums(lengths), device),
            put(starts, device) if form == "thd" else None,
            form,
            0,
        )
        assert_same_bits("cache", get(target), want)

    return run


def _gather(dtype: DType, name: str, form: str) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        lengths, _, size, pages, heads, dim = _SHAPES[name]
        cache, where = draw(2, (pages, size, heads, dim), dtype), _pages(lengths, size, pages)
        want = np.zeros((len(lengths), _LONGEST, heads, dim), dtype.numpy)
        for b, length in enumerate(lengths):
            for p in range(min(length, _LONGEST)):
                want[b, p] = cache[where[b, p // size], p % size]
        want = np.ascontiguousarray(want.swapaxes(0, 1)) if form == "sbhd" else want
        y = poisoned(want.shape, dtype, device)
        kernels.cache_gather(put(cache, device), y, put(where, device), put(_sums(lengths), device), form, 0)
        assert_same_bits("y", get(y), want)

    return run


CASES = [
    *table(
        "cache_append_",
        {
            f"{d.name}-{name}-{form}{'-packed' * packed}": _append(d, name, form, packed)
            for d in HIGH_PRECISION
            for name in _SHAPES
            for form in ("sbhd", "bshd", "thd")
            for packed in (False, True)
        },
    ),
    *table(
        "cache_gather",
        {
            f"{d.name}-{name}-{form}": _gather(d, name, form)
            for d in HIGH_PRECISION
            for name in _SHAPES
            for form in ("sbhd", "bshd")
        },
    ),
]
