"""Statistics: counts exactly, sums in float64 of NumPy within its rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.arrays import Tile
from fp8kit.backends.protocol import Rule
from fp8kit.backends.protocol.statistics import (
    BRIEF_COUNTS,
    CAST_COUNTS,
    CODE_COUNTS,
    EXPONENTS,
    OVERFLOW_SLACK,
    TENSOR_COUNTS,
)
from fp8kit.formats import E2M1, E4M3, E5M2, HIGH_PRECISION, MXINT8, DType, Format, float32, float64, int64
from fp8kit.testing.contract import (
    Arguments,
    Array,
    KernelTest,
    Results,
    Sampler,
    product,
    sized,
    typed,
    wide,
)

_SIZES = ((17, 33), (1, 1), (5, 1), (0, 16), (3, 0), (130, 96), (9, 4100), (257, 1024))
_ROUNDING = 2.0**-52


def _around(value: Any, magnitude: Any, terms: int) -> tuple[Array, Array]:
    """A sum of float64 and what its order may change."""
    return np.asarray(value), (terms + 8) * _ROUNDING * np.asarray(magnitude)


def _values(s: Sampler, m: int, n: int, kind: str) -> Any:
    """Values of a ``kind``: "strewn", with NaN and Inf; "finite"; "normal"; "zeros"; "large", about a mean
    that is 1000 times as large as their deviation; "tiny", whose squares float32 does not have."""
    if kind == "tiny":
        return s.normal(m, n, scale=1e-30 if s.dtype.max > 1e30 else 1e-6)
    if kind in ("strewn", "finite"):
        return s.strewn(m, n, kind == "finite")
    if kind == "zeros":
        return s.full(-0.0, m, n, dtype=s.dtype)
    return s.normal(m, n, mean=1000.0 if kind == "large" else 0.0)


def tensor_statistics(s: Sampler, m: int, n: int, kind: str = "normal") -> Arguments:
    """Counts that something has been added to."""
    counts = np.arange(TENSOR_COUNTS)
    return {"x": _values(s, m, n, kind), "counts": s.put(counts), "moments": s.output(8, dtype=float64)}


def _exponents(x: Array) -> Array:
    """Returns the exponents by ``frexp``; values below float32's normal ones are in bin 0."""
    finite = x[np.isfinite(x)]
    place = np.frexp(finite)[1] - 1 + 127
    place = np.where(finite == 0, 256, np.maximum(place, 0))
    counts = np.bincount(place, minlength=EXPONENTS)
    counts[255] += x.size - finite.size
    return counts


def _special(x: Array) -> list[int]:
    """How many values are NaN, Inf and -Inf."""
    return [np.isnan(x).sum(), (x == np.inf).sum(), (x == -np.inf).sum()]


def _mean(v: Array) -> tuple[float, float]:
    """The mean, and the sum of the squares of the deviations from it."""
    return (v.mean(), ((v - v.mean()) ** 2).sum()) if v.size else (0.0, 0.0)


def tensor_statistics_oracle(a: Any) -> Results:
    """NumPy's, of the finite values."""
    x = wide(a.x).reshape(-1)
    kinds = _special(x)
    counts = a.counts + np.concatenate([_exponents(x), kinds])
    v = x[np.isfinite(x)]
    size = np.abs(v)
    sums = size.sum(), (v**2).sum(), (v**4).sum()
    ends = v.min(initial=np.inf), v.max(initial=-np.inf), size[size > 0].min(initial=np.inf)
    mean, apart = _mean(v)
    most = size.max(initial=0)
    _, slack = _around(0, [0, 0, 0, *sums, most, apart + most * np.sqrt(v.size * apart)], v.size)
    return {"counts": counts, "moments": (np.array([*ends, *sums, mean, apart]), slack)}


def tile_statistics(s: Sampler, m: int, n: int, tile: Tile = (1, 32), kind: str = "normal") -> Arguments:
    """Ratios that are less than any, or greater."""
    return {"x": _values(s, m, n, kind), "ratios": s.put([0.0, 2.0**300], float64), "tile": tile}


def tile_statistics_oracle(a: Any) -> Results:
    """Tile by tile."""
    x, (height, width), found = wide(a.x), a.tile, np.array(a.ratios)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            v = np.abs(x[i : i + height, j : j + width].reshape(-1))
            v = v[np.isfinite(v)]
            if v.any():
                crest = v.max() ** 2 * v.size / (v**2).sum()
                found = np.maximum(found, [crest, v.max() / v[v > 0].min()])
    return {"ratios": _around(found, found, height * width)}


def cast_statistics(
    s: Sampler,
    m: int,
    n: int,
    fmt: Format = E4M3,
    tile: Tile = (0, 0),
    kind: str = "strewn",
    scale: float = 1.0,
) -> Arguments:
    """Any codes, and x not far from them. One scale is 0, one NaN, where there are several."""
    tile = tile[0] or max(m, 1), tile[1] or max(n, 1)
    grid = max(1, -(-m // tile[0])) * max(1, -(-n // tile[1]))
    scales = scale * np.exp2(s.random.integers(-3, 4, grid).astype(np.float32))
    if grid > 2:
        scales[1], scales[2] = 0, np.nan
    codes = s.random.integers(0, 256, (m, n)).astype(np.uint8)
    return {
        "x": _values(s, m, n, kind),
        "q": s.put(codes),
        "scale_inv": s.put(scales.astype(np.float32)),
        "counts": s.put(np.arange(CAST_COUNTS)),
        "sums": s.output(4, dtype=float64),
        "format": fmt,
        "tile": tile,
    }


def cast_statistics_oracle(a: Any) -> Results:
    """The definitions, with the codec's values."""
    x, (m, n) = wide(a.x), a.x.shape
    scales = a.scale_inv.reshape(max(1, -(-m // a.tile[0])), max(1, -(-n // a.tile[1])))
    each = np.repeat(np.repeat(scales, a.tile[0], 0), a.tile[1], 1)[:m, :n]
    codes = codec.decode(a.q, a.format).astype(np.float32)
    values = wide(codes * each)
    used = each != 0
    limit = wide(each) * np.float64(np.float32(a.format.max))
    beyond = np.isfinite(x) & used & (np.abs(x) * (1 - OVERFLOW_SLACK) > limit)
    kinds = [x != 0, used & (codes != 0), used & (np.abs(codes) == np.float32(a.format.max)), beyond]
    exponents = _exponents(wide(a.scale_inv))
    counts = a.counts + np.concatenate([exponents, [x.size], [kind.sum() for kind in kinds]])
    known = wide(a.scale_inv)[~np.isnan(a.scale_inv)]
    ends = known.min(initial=np.inf), known.max(initial=-np.inf)
    sums = ((x - values) ** 2).sum(), (x**2).sum()
    slack = _around(0, [*sums, 0, 0], x.size)[1]
    return {"counts": counts, "sums": (np.array([*sums, *ends]), slack)}


def pair_statistics(s: Sampler, m: int, n: int, other: DType = float32, kind: str = "normal") -> Arguments:
    """Two that do not resemble each other."""
    return {
        "x": _values(s, m, n, kind),
        "twin": s.normal(m, n, dtype=other),
        "sums": s.output(4, dtype=float64),
    }


def pair_statistics_oracle(a: Any) -> Results:
    """Sums in float64."""
    x, t = wide(a.x), wide(a.twin)
    sums = np.array([(x * t).sum(), (x * x).sum(), (t * t).sum(), ((x - t) ** 2).sum()])
    return {"sums": _around(sums, [np.abs(x * t).sum(), *sums[1:]], x.size)}


def brief_statistics(
    s: Sampler,
    m: int,
    n: int,
    kind: str = "normal",
    fmt: Format = E4M3,
    scale: float | None = 1.0,
    moments: bool = True,
    deep: bool = False,
    power_2: bool = False,
    amax: float = 3.0,
) -> Arguments:
    """Of x and its cast; by a scale, or by the rule of an amax where ``scale`` is None, none for 0."""
    x = _values(s, m, n, kind)
    made: Arguments = {"x": x, "format": fmt, "deep": deep}
    if moments:
        made |= {"counts": s.output(BRIEF_COUNTS, dtype=int64), "moments": s.output(8, dtype=float64)}
    if scale == 0:
        return {**made, "format": None}
    made |= {"codes": s.output(CODE_COUNTS, dtype=int64), "scale_inv": s.output(2, dtype=float64)}
    if scale is not None:
        return made | {"scale": s.put([scale], float32)}
    return made | {"amax": s.put([amax], float32), "rule": Rule(power_2, 0.0)}


def brief_statistics_oracle(a: Any) -> Results:
    """The definitions; the cast by the codec."""
    x, found = wide(a.x).reshape(-1), Results()
    v = x[np.isfinite(x)]
    if a.counts is not None:
        kinds = _special(x)
        found["counts"] = np.array([x.size, *kinds])
        size = np.abs(v)
        sums = np.array([size.sum(), (v**2).sum(), (v**4).sum() if a.deep else 0.0])
        least = size[size > 0].min(initial=np.inf) if a.deep else np.inf
        mean, apart = _mean(v)
        # deviations are from the mean of 256 of the values: what eight float32 additions, and two roundings
        # of each term before them, may change
        pivot = _pivot(x)
        around = apart + v.size * (mean - pivot) ** 2
        off = np.abs(v - pivot).sum()
        slack_apart = around + off * abs(mean - pivot) * 2
        slack = 10 * 2.0**-24 * np.array([*sums, off / max(v.size, 1), slack_apart])
        slack[1] += slack[4] + 2 * v.size * abs(mean) * slack[3]
        values = [v.min(initial=np.inf), v.max(initial=-np.inf), least, *sums, mean, apart]
        exact = _around(0, [0, 0, 0, *sums, size.max(initial=0), around], v.size)[1]
        found["moments"] = np.array(values), exact + np.array([0, 0, 0, *slack])
    if a.codes is not None:
        found |= _brief_codes(a, x)
    return found


def _pivot(x: Array) -> float:
    """What the CUDA engine takes deviations from."""
    if not x.size:
        return 0.0
    some = x[np.minimum(np.arange(256), x.size - 1) if x.size < 256 else x.size // 256 * np.arange(256)]
    some = some[np.isfinite(some)].astype(np.float64)
    if not some.size:
        return 0.0
    apart = some.max() - some.min()
    step = 2.0 ** (np.frexp(apart)[1] - 9) if apart else 0.0
    return float(np.rint(some.mean() / step) * step if step else some.mean())


def _brief_codes(a: Any, x: Array) -> Results:
    if a.rule is None:
        scale = np.float32(a.scale[0])
    else:
        amax = a.amax[0]
        usable = 0 < amax < np.inf
        scale = np.float32(a.format.max) / amax if usable else np.float32(1)
        if a.rule.power_2:
            scale = np.exp2(np.floor(np.log2(scale)), dtype=np.float32)
    inverse = np.float32(1) / scale
    codes = codec.encode(x.astype(np.float32) * scale, a.format)
    values, limit = codec.decode(codes, a.format), float(inverse) * a.format.max
    beyond = np.isfinite(x) & (np.abs(x) * (1 - OVERFLOW_SLACK) > limit) & (limit > 0)
    kinds = [x != 0, values != 0, np.abs(values) == a.format.max, beyond]
    ends = [inverse, inverse] if x.size else [np.inf, -np.inf]
    return {
        "codes": np.array([x.size, *(kind.sum() for kind in kinds)]),
        "scale_inv": (np.array(ends, np.float64), np.zeros(2)),
    }


_KINDS = ("strewn", "finite", "zeros", "large")
_ROWS = {"parts": {"x": (1, 8, 16)}}
_TENSOR = {
    **sized(_SIZES),
    **product("{kind}-{m}x{n}", {"kind": _KINDS, "m n": ((37, 71), (64, 256))}),
    "rows": {"m": 37, "n": 72, **_ROWS},
    "shifted": {"m": 37, "n": 72, "parts": {"x": (None, 1, 0)}},
    "many": {"m": 1030, "n": 1111},
}
_TILES = {
    **product("{tile}-{m}x{n}", {"tile": ((1, 32), (32, 1), (16, 16), (3, 5), (1, 1)), "m n": _SIZES[:-2]}),
    **product("{kind}-{tile}", {"kind": _KINDS, "tile": ((1, 32), (32, 1), (32, 32))}, m=70, n=150),
    **product("rows-{tile}", {"tile": ((1, 32), (64, 1), (4, 4))}, m=37, n=72, **_ROWS),
    **product("one-{tile}", {"tile": ((1, 4096), (4096, 1), (4096, 4096))}, m=70, n=150),
}
_CAST = {
    **sized(_SIZES),
    **product(
        "{tile}-{kind}",
        {"tile": ((0, 0), (1, 0), (0, 1), (1, 32), (32, 1), (16, 16)), "kind": ("strewn", "finite")},
        m=70,
        n=150,
    ),
    **product("{fmt}", {"fmt": (E5M2, E2M1, MXINT8)}, m=37, n=71, tile=(1, 16)),
    "small": {"m": 37, "n": 71, "kind": "normal", "scale": 2.0**-9},
    "rows": {"m": 37, "n": 72, "kind": "finite", "parts": {"x": (1, 8, 16), "q": (1, 3, 4)}},
    "many": {"m": 1030, "n": 1111, "kind": "normal", "tile": (1, 128)},
}
_PAIR = {
    **product("{other.name}-{m}x{n}", {"other": HIGH_PRECISION, "m n": _SIZES}),
    "strewn": {"m": 37, "n": 71, "kind": "strewn"},
    "rows": {"m": 37, "n": 72, "parts": {"x": (1, 8, 16), "twin": (1, 3, 4)}},
    "many": {"m": 1030, "n": 1111},
}
_BRIEF = {
    **sized(_SIZES),
    **product(
        "{kind}-{scale}-deep{deep}",
        {"kind": (*_KINDS, "tiny"), "scale": (0, None, 3.7), "deep": (True, False)},
        m=37,
        n=72,
    ),
    **product("{fmt}-{scale}", {"fmt": (E4M3, E5M2), "scale": (2.0**-12, 0.3, 2.0**9)}, m=64, n=256),
    **product(
        "amax{amax}-{power_2}",
        {"amax": (0.0, 1e-30, 7.0, np.inf), "power_2": (True, False)},
        m=9,
        n=64,
        scale=None,
    ),
    "codes alone": {"m": 37, "n": 71, "kind": "strewn", "moments": False},
    "rows": {"m": 37, "n": 72, **_ROWS},
    "shifted": {"m": 37, "n": 72, "parts": {"x": (None, 1, 0)}},
    "many": {"m": 1030, "n": 1111, "scale": None},
}

TESTS = (
    KernelTest("tensor_statistics", tensor_statistics, tensor_statistics_oracle, typed(_TENSOR)),
    KernelTest("tile_statistics", tile_statistics, tile_statistics_oracle, typed(_TILES)),
    KernelTest("cast_statistics", cast_statistics, cast_statistics_oracle, typed(_CAST), {"kind": "normal"}),
    KernelTest("pair_statistics", pair_statistics, pair_statistics_oracle, typed(_PAIR)),
    KernelTest("brief_statistics", brief_statistics, brief_statistics_oracle, typed(_BRIEF), {"scale": None}),
)
