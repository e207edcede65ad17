"""The rotary embedding against complex rotations in float64.

float32's cos and sin are within 2 units of the last place; two products and a sum follow: 6 u of the terms'
absolute values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from fp8kit.formats import bfloat16, float16, float32
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    product,
    typed,
    wide,
)
from fp8kit.testing.contract.running_sums import LENGTH, LENGTHS_AND_STARTS, TOKENS, bad_cases

Sums = tuple[int, ...]
BACK = ("dy", "dx")


def _tokens(lengths: Any, starts: Any, count: int) -> Iterator[tuple[int, int, int]]:
    """(token, sequence, place in it) of each of ``count`` tokens that belongs to a sequence."""
    for b, length in enumerate(np.diff(lengths)):
        start = int(starts[b])
        yield from ((start + i, b, i) for i in range(max(0, -start), min(int(length), count - start)))


def rotation(
    s: Sampler,
    m: int,
    n: int,
    names: tuple[str, str] = ("x", "y"),
    form: str = "sbhd",
    batch: int = 1,
    heads: int = 0,
    depth: int = 64,
    rotated: int = 0,
    positions: int = 0,
    interleaved: bool = False,
    first: Sums = (),
    doubled: bool = True,
    lengths: Sums = (),
    starts: Sums = (),
    blank: bool = False,
) -> Arguments:
    """``names``: of what is rotated, and of the result. ``m`` places or tokens, ``heads`` (by default ``n``
    features of 64). ``first``: start_positions. ``doubled``: both features of a pair turn by the same angle,
    as in the paper. ``blank``: tokens of no sequence hold NaN."""
    heads, rotated = heads or n // 64, rotated or depth
    leading = {"sbhd": (m, batch), "bshd": (batch, m), "thd": (m,)}[form]
    x = s.draw((*leading, heads, depth)).astype(s.dtype.numpy)
    angles = s.draw((positions or m, rotated), 3.0)
    if doubled:
        half = angles[:, : rotated // 2]
        angles = np.repeat(half, 2, axis=1) if interleaved else np.concatenate([half, half], axis=1)
    if blank:
        x[np.setdiff1d(np.arange(m), [token for token, *_ in _tokens(lengths, starts, m)])] = np.nan
    return {
        names[0]: s.put(x),
        "freqs": s.put(angles),
        names[1]: s.output(*x.shape),
        "start_positions": s.sums(*first[:batch]) if first else None,
        "lengths": s.sums(*lengths) if form == "thd" else None,
        "starts": s.sums(*starts) if form == "thd" else None,
        "qkv_format": form,
        "interleaved": interleaved,
    }


def _places(a: Any, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The position of every token, and whether it belongs to a sequence."""
    count = len(a.lengths) - 1 if a.qkv_format == "thd" else shape[a.qkv_format.index("b")]
    first = np.zeros(count, int) if a.start_positions is None else a.start_positions
    if a.qkv_format == "thd":
        place, belongs = np.zeros(shape[0], int), np.zeros(shape[0], bool)
        for token, b, i in _tokens(a.lengths, a.starts, shape[0]):
            place[token], belongs[token] = i + first[b], True
        return place, belongs
    place = np.arange(shape[a.qkv_format.index("s")])[:, None] + first
    return (place if a.qkv_format == "sbhd" else place.T), np.ones(shape[:2], bool)


def _rotate(a: Any, values: Array, back: bool) -> tuple[Array, Array]:
    """Each feature f of a pair turns by its own angle; ``back``: the transposed matrix. NaN beyond the
    angles; features beyond the rotated ones, and tokens of no sequence, are exact."""
    place, belongs = _places(a, values.shape)
    known = place < len(a.freqs)
    angle = np.where(known[..., None], wide(a.freqs)[np.where(known, place, 0)], np.nan)[..., None, :]
    rotated, f = angle.shape[-1], np.arange(angle.shape[-1])
    partner = f ^ 1 if a.interleaved else (f + rotated // 2) % rotated
    x, out = wide(values), wide(values)
    y, sine = x[..., :rotated], np.where(f < partner, -1.0, 1.0) * np.sin(angle)
    other = y[..., partner] * (sine[..., partner] if back else sine)
    out[..., :rotated] = y * np.cos(angle) + other
    slack = np.full(x.shape, -np.inf)
    terms = np.abs(y * np.cos(angle)) + np.abs(other) + np.abs(y) + np.abs(y[..., partner])
    slack[..., :rotated] = 6 * ROUNDOFF * np.nan_to_num(terms)
    out[~belongs], slack[~belongs] = 0, -np.inf
    return out, slack


def rope_oracle(a: Any, names: tuple[str, str] = ("x", "y")) -> Results:
    """See ``_rotate``."""
    return {names[1]: _rotate(a, getattr(a, names[0]), back=names == BACK)}


# a sequence of nothing, and two rows of no sequence after the last; where they start with rows of no sequence
# before, between and after them
_LENGTHS, _GAPS = (0, 4, 4, 9, 14), (1, 8, 8, 14, 19)
_FORMS: dict[str, Options] = {
    "sbhd": {"form": "sbhd", "m": 9, "batch": 2, "positions": 9},
    "bshd": {"form": "bshd", "m": 9, "batch": 2, "positions": 9},
    "thd": {
        "form": "thd",
        "m": 22,
        "batch": 4,
        "lengths": _LENGTHS,
        "starts": _LENGTHS,
        "positions": 5,
        "blank": True,
    },
}
_WITH_GAPS: Options = {**_FORMS["thd"], "starts": _GAPS}


def _cases(x: str, y: str) -> dict[str, Options]:
    """Cases of ``rope_fwd`` or ``rope_bwd``."""
    packed: Options = {"parts": {x: (-2, 0, 3), y: (-2, 3, 0)}}  # among other heads
    in_place: Options = {"same": {y: x}}
    gaps: dict[str, Options] = {
        "offsets": {"first": (5, 0, 3, 11), "positions": 16, **in_place},
        "partial": {"depth": 24, "rotated": 10, **packed},
    }
    every: dict[str, Options] = {
        "halves": {},
        "interleaved": {"interleaved": True},
        "partial-interleaved": {"depth": 7, "rotated": 6, "interleaved": True, **in_place},
        "own-angles": {"doubled": False, **packed},
        "own-angles-interleaved": {"doubled": False, "interleaved": True},
        **gaps,
    }
    cases = {
        **product("{form}-{case}", {"form": _FORMS, "case": every}, heads=3, depth=16),
        **product("thd-gaps-{case}", {"case": gaps}, heads=3, depth=16, **_WITH_GAPS),
    }
    some = {name: own for name, own in cases.items() if "partial" in name}
    return {**typed(cases, (float32, bfloat16)), **typed(some, (float16,))}


_BAD: Options = {"form": "thd", "m": TOKENS, "heads": 2, "depth": 8, "positions": LENGTH}
_BEYOND: Options = {"m": 2, "heads": 1, "depth": 4, "rotated": 2, "positions": 3, "first": (2,)}

TESTS = (
    KernelTest(
        "rope_fwd",
        rotation,
        rope_oracle,
        {**_cases("x", "y"), "positions-beyond": _BEYOND, **bad_cases(_BAD, LENGTHS_AND_STARTS, "lost")},
    ),
    KernelTest(
        "rope_bwd",
        functools.partial(rotation, names=BACK),
        functools.partial(rope_oracle, names=BACK),
        _cases(*BACK),
    ),
)
