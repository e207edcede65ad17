"""The cache of keys and values, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.formats import int32
from fp8kit.testing.contract import Arguments, Array, KernelTest, Options, Results, Sampler, product, typed
from fp8kit.testing.contract.running_sums import BATCH, FAR, GOOD, LENGTH, TOKENS, bad_cases, running

Sums = tuple[int, ...]


def _cache(
    s: Sampler,
    m: int,
    n: int,
    totals: Sums = (),
    size: int = 128,
    pages: int = 0,
    heads: int = 0,
    dim: int = 64,
    table: Any = None,
) -> Arguments:
    """A cache with sequences of these ``totals`` in ``pages`` of ``size`` in no order; entries behind a
    sequence's last page name no page. By default one of ``m`` tokens in pages of 128, with heads of 64."""
    totals = totals or (0, m)
    pages, heads = pages or -(-m // size), heads or n // 64
    if table is None:
        used = [-(-length // size) for length in np.diff(totals)]
        free = s.random.permutation(pages)
        table = np.full((len(used), max(used)), pages + 7)
        for b, count in enumerate(used):
            table[b, :count], free = free[:count], free[count:]
    return {
        "cache": s.normal(pages, size, heads, dim),
        "pages": s.put(table, int32),
        "totals": s.sums(*totals),
    }


def cache_append_(
    s: Sampler,
    m: int,
    n: int,
    form: str = "sbhd",
    fresh: Sums = (),
    starts: Sums = (),
    longest: int = 0,
    tokens: int = 0,
    **cache: Any,
) -> Arguments:
    """``longest`` new tokens of each sequence at most, or ``tokens`` of all; ``cache``: see ``_cache``."""
    made, fresh, longest = _cache(s, m, n, **cache), fresh or (0, m), longest or m
    batch = len(fresh) - 1
    leading = {"sbhd": (longest, batch), "bshd": (batch, longest), "thd": (tokens,)}[form]
    return {
        **made,
        "x": s.normal(*leading, *made["cache"].shape[2:]),
        "fresh": s.sums(*fresh),
        "starts": s.sums(*starts) if form == "thd" else None,
        "qkv_format": form,
    }


def cache_append_oracle(a: Any) -> Results:
    """Token by token."""
    cache, size = a.cache.copy(), a.cache.shape[1]
    for b, (new, length) in enumerate(zip(np.diff(a.fresh), np.diff(a.totals), strict=True)):
        for i in range(new):
            token = {"sbhd": (i, b), "bshd": (b, i)}.get(a.qkv_format) or (a.starts[b] + i,)
            page, place = divmod(int(length - new + i), size)
            cache[a.pages[b, page], place] = a.x[token]
    return {"cache": cache}


def cache_gather(s: Sampler, m: int, n: int, form: str = "sbhd", longest: int = 0, **cache: Any) -> Arguments:
    """``longest`` positions are read of each sequence; ``cache``: see ``_cache``."""
    made, longest = _cache(s, m, n, **cache), longest or m
    batch = made["pages"].shape[0]
    leading = (longest, batch) if form == "sbhd" else (batch, longest)
    return {**made, "y": s.output(*leading, *made["cache"].shape[2:]), "qkv_format": form}


def cache_gather_oracle(a: Any) -> Results:
    """Position by position."""
    y, size = np.zeros_like(a.y), a.cache.shape[1]
    by_batch: Array = y.swapaxes(0, 1) if a.qkv_format == "sbhd" else y
    for b, length in enumerate(np.diff(a.totals)):
        for p in range(min(length, by_batch.shape[1])):
            by_batch[b, p] = a.cache[a.pages[b, p // size], p % size]
    return {"y": y}


# lengths with the new tokens, new tokens, and the cache
_SHAPES: dict[str, tuple[Sums, Sums, Options]] = {
    "slots": ((5, 17, 1), (5, 1, 1), {"size": 32, "pages": 4, "heads": 2, "dim": 16}),
    "pages": ((5, 17, 9, 8), (2, 7, 1, 8), {"size": 4, "pages": 24, "heads": 3, "dim": 8}),
    "odd": ((3, 7), (3, 4), {"size": 5, "pages": 6, "heads": 1, "dim": 7}),
    "one": ((40,), (1,), {"size": 16, "pages": 3, "heads": 4, "dim": 64}),
}


def _append(name: str, form: str, packed: bool) -> Options:
    """``packed``: the new tokens lie among other features of a row; with thd, also with gaps between the
    sequences."""
    lengths, new, cache = _SHAPES[name]
    starts = running(count + 2 * packed for count in new)
    sums = {"totals": running(lengths), "fresh": running(new), "starts": starts}
    room = {"longest": max(new) + 1, "tokens": starts[-1] + 3, "parts": {"x": (-1, 0, 8)} if packed else {}}
    return {"form": form, **cache, **sums, **room}


_APPEND = {
    f"{name}-{form}{'-packed' * packed}": _append(name, form, packed)
    for name in _SHAPES
    for form in ("sbhd", "bshd", "thd")
    for packed in (False, True)
}
# some sequences are longer than what is read
_READ = {name: {"totals": running(lengths), **cache} for name, (lengths, _, cache) in _SHAPES.items()}
_GATHER = product("{case}-{form}", {"case": _READ, "form": ("sbhd", "bshd")}, longest=12)
_CACHE: Options = {"size": 4, "pages": 6, "heads": 2, "dim": 8}
_GOOD: Options = {**_CACHE, "table": np.array((3, 1, 5, 0, 2, 4)).reshape(BATCH, 2)}
_WILD: Options = {**_CACHE, "table": np.array((3, FAR, -1, 0, 6, -FAR - 1)).reshape(BATCH, 2)}
_THD: Options = {"form": "thd", "tokens": TOKENS, "fresh": GOOD, "totals": GOOD, "starts": GOOD}
_SBHD: Options = {"form": "sbhd", "longest": LENGTH, "totals": GOOD}
_BAD_APPEND = {
    **bad_cases(
        {**_GOOD, **_THD},
        {
            "lengths": ("totals",),
            "starts": ("starts",),
            "both": ("totals", "starts"),
            "fresh": ("fresh",),
            "fresh-and-starts": ("fresh", "starts"),
        },
    ),
    **bad_cases({**_WILD, **_THD}, {"pages": ("totals",), "pages-fresh": ("fresh",)}),
    **bad_cases({**_GOOD, **_SBHD}, {"sbhd": ("fresh",)}),
    **bad_cases({**_WILD, **_SBHD}, {"pages-sbhd": ("fresh",)}),
}
_BSHD: Options = {"form": "bshd", "longest": 12}
_BAD_GATHER = {
    **bad_cases({**_GOOD, **_BSHD}, {"lengths": ("totals",)}),
    **bad_cases({**_WILD, **_BSHD}, {"pages": ("totals",)}),
}

TESTS = (
    KernelTest("cache_append_", cache_append_, cache_append_oracle, {**typed(_APPEND), **_BAD_APPEND}),
    KernelTest("cache_gather", cache_gather, cache_gather_oracle, {**typed(_GATHER), **_BAD_GATHER}),
)
