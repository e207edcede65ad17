"""The casts by one scale, or by one for each tile: bit for bit against the codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.arrays import Tile
from fp8kit.backends.protocol import Rule
from fp8kit.formats import E4M3, E5M2, FORMATS, HIGH_PRECISION, Format, bfloat16, float32, float64, uint8
from fp8kit.testing.contract import (
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    product,
    sized,
    typed,
)
from fp8kit.testing.contract.casts import each, scale_of, scaled, tile_amax
from fp8kit.testing.contract.dropout import philox
from fp8kit.testing.contract.scales import ROW, SIZES, TILINGS, WHOLE, tile_count, tile_of

USERS = (
    Format("E3M4", 3, 4),
    Format("U5M3", 5, 3, special="fn", signed=False),
    Format("E4M0", 4, 0, special="none"),
    Format("E0M4", 0, 4, special="fn"),
    Format("INT4", 0, 3, special="none", twos_complement=True),
)


def _scales(s: Sampler, count: int) -> Array:
    """Scales that are no powers of two, so that the product rounds."""
    return s.random.uniform(0.01, 30, count).astype(np.float32)


def quantize(
    s: Sampler,
    m: int,
    n: int,
    fmt: Format = E4M3,
    tile: Tile = WHOLE,
    saturate: bool = True,
    stochastic_bits: int = 0,
    draw: int = 0,
    amax: bool = True,
    values: Array | None = None,
    strewn: bool = True,
) -> Arguments:
    """``values``: x, taken as it is; else drawn."""
    tiles = tile_count(m, n, tile)
    scale = np.ones(tiles, np.float32) if values is not None else _scales(s, tiles)
    return {
        "x": s.put(values) if values is not None else s.strewn(m, n) if strewn else s.normal(m, n),
        "q": s.output(m, n, dtype=uint8),
        "scale": s.put(scale),
        "scale_inv": s.output(tiles, dtype=float32),
        "amax": s.full(0.0, tiles) if amax else None,
        "format": fmt,
        "tile": tile_of(tile, m, n),
        "saturate": saturate,
        "stochastic_bits": stochastic_bits,
        "draw": draw,
        "rng": s.rng() if stochastic_bits else None,
    }


def quantize_oracle(a: Any) -> Results:
    """The codec's bits."""
    words, bits = None, a.stochastic_bits
    if bits:
        words = philox(a.rng, (a.draw << 48) + np.arange(a.x.size).reshape(a.x.shape)).astype(np.uint32)
    rounding: codec.Rounding = "stochastic" if bits else "nearest"
    values = scaled(a.x, each(a.scale, a.x.shape, a.tile))
    found: Results = {
        "q": codec.encode(values, a.format, rounding, a.saturate, words, bits or 32),
        "scale_inv": np.float32(1) / a.scale,
    }
    return found if a.amax is None else {**found, "amax": tile_amax(a.x, a.tile, a.amax)}


def dequantize(
    s: Sampler, m: int, n: int, fmt: Format = E4M3, tile: Tile = WHOLE, strewn: bool = True
) -> Arguments:
    """All codes, one after the other; else of normal values."""
    every = np.arange(256, dtype=np.uint8)
    return {
        "q": s.put(np.resize(every, (m, n))) if strewn else s.codes(m, n, fmt),
        "x": s.output(m, n),
        "scale_inv": s.put(_scales(s, tile_count(m, n, tile))),
        "format": fmt,
        "tile": tile_of(tile, m, n),
    }


def dequantize_oracle(a: Any) -> Results:
    """One float32 product, one rounding."""
    values = scaled(codec.decode(a.q, a.format), each(a.scale_inv, a.q.shape, a.tile))
    with np.errstate(over="ignore", invalid="ignore"):
        return {"x": values.astype(a.x.dtype)}


def quantize_transpose(
    s: Sampler,
    m: int,
    n: int,
    fmt: Format = E4M3,
    cast: Options | None = None,
    dbias: bool = False,
    strewn: bool = True,
) -> Arguments:
    """``fmt``: the cast's, where that does not say. ``dbias``: of values that can be added up."""
    return {
        "x": s.strewn(m, n) if strewn and not dbias else s.normal(m, n, scale=3.0),
        "cast": s.cast(m, n, **{"fmt": fmt, **(cast or {})}),
        "dbias": s.output(n) if dbias else None,
    }


def quantize_stack(
    s: Sampler,
    m: int,
    n: int,
    matrices: int = 3,
    fmt: Format = E4M3,
    power_2: bool = False,
    epsilon: float = 0.0,
    wider: bool = False,
    only: str = "",
    strewn: bool = True,
) -> Arguments:
    """Amaxes that differ, one of them 0; ``wider``: codes have a margin. ``only``: "q" or "q_t"."""
    more = 16 * wider
    shape = m + more, n + 2 * more
    amax = np.exp2(s.random.uniform(-6, 6, matrices)).astype(np.float32)
    amax[-1:] = 0
    rows = matrices * m
    x = s.strewn(rows, n) if strewn else s.normal(rows, n, scale=3.0)
    return {
        "x": x.reshape(matrices, m, n),
        "q": s.output(matrices, *shape, dtype=uint8) if only != "q_t" else None,
        "q_t": s.output(matrices, *shape[::-1], dtype=uint8) if only != "q" else None,
        "amax": s.put(amax),
        "scale_inv": s.output(matrices, dtype=float32),
        "format": fmt,
        "power_2": power_2,
        "epsilon": epsilon,
    }


def quantize_stack_oracle(a: Any) -> Results:
    """The codec's bits, matrix by matrix, by the rule's text."""
    scale = scale_of(a.amax, a.format.max, a.power_2, a.epsilon, float32.max)
    sizes = a.q.shape[1:] if a.q is not None else a.q_t.shape[:0:-1]
    codes = np.zeros((len(a.x), *sizes), np.uint8)
    for x, own, to in zip(a.x, scale, codes, strict=True):
        to[: x.shape[0], : x.shape[1]] = codec.encode(scaled(x, own), a.format)
    return {"q": codes, "q_t": codes.transpose(0, 2, 1), "scale_inv": np.float32(1) / scale}


def _boundaries(fmt: Format) -> Array:
    """Every value of the format, every midpoint, and the float32 next to each on both sides."""
    values = codec.table(fmt)[: 1 << fmt.bits]
    points = np.unique(np.concatenate([values[np.isfinite(values)], [2 * fmt.max, fmt.max * 1.0625]]))
    with np.errstate(over="ignore"):
        at = np.concatenate([points, (points[1:] + points[:-1]) / 2]).astype(np.float32)
    return np.concatenate([at, *(np.nextafter(at, np.float32(end)) for end in (np.inf, -np.inf))])[None]


_FORMATS = (*FORMATS.values(), *USERS)
_TILED = product("{tiling}", {"tiling": TILINGS}, m=130, n=300)


def _both(cases: Mapping[str, Options]) -> dict[str, Options]:
    """Cases in both FP8 formats."""
    return product("{fmt}-{case}", {"fmt": (E4M3, E5M2), "case": cases})


def _quantize_cases() -> dict[str, Options]:
    found = _both(
        {
            **typed(sized(SIZES), (*HIGH_PRECISION, float64)),
            **product("{case}", {"case": _TILED}, dtype=bfloat16),
            "no-amax": {"m": 33, "n": 65, "amax": False},
        }
    )
    for fmt in _FORMATS:
        values = _boundaries(fmt)
        at = {"fmt": fmt, "m": 1, "n": values.size, "amax": False, "values": values}
        found[f"{fmt}-boundaries"] = at
        drawn = {"fmt": fmt, "m": 9, "n": 31, "tile": ROW}
        found |= {f"{fmt}-stochastic-{bits}": {**drawn, "stochastic_bits": bits} for bits in (32, 8, 1)}
        found[f"{fmt}-stochastic-draw"] = {**drawn, "stochastic_bits": 8, "draw": 32767}
        if fmt.nan_code is not None:
            over = {"fmt": fmt, "m": 33, "n": 65, "saturate": False}
            found[f"{fmt}-boundaries-unsaturated"] = {**at, "saturate": False}
            found[f"{fmt}-unsaturated"] = over
            found[f"{fmt}-unsaturated-stochastic"] = {**over, "stochastic_bits": 32}
    return found


_DEQUANTIZE = {
    **_both({**_TILED, **typed({"": {"m": 7, "n": 111}})}),
    **product("{fmt}-all-codes", {"fmt": _FORMATS}, m=3, n=256),
}


def _transpose_cases() -> dict[str, Options]:
    sizes = ((1, 1), (16, 16), (33, 65), (128, 80), (200, 130), (256, 192), (0, 70))
    wide: Options = {"amax": 0.0, "wider": True}
    cases = sized(sizes, cast=wide)
    for rule in (Rule(False, 0.0), Rule(True, 1e3)):
        cast = {"rule": rule, "amax": 4.0}
        by_amax = {"m n": ((16, 32), (256, 192))}
        cases |= product(f"{{m}}x{{n}}-by-amax-{rule.power_2}", by_amax, cast=cast, strewn=False)
    cases |= {f"{only}-only": {"m": 70, "n": 48, "cast": {**wide, "only": only}} for only in ("q", "q_t")}
    cases |= product("{m}x{n}-dbias", {"m n": ((150, 70), (256, 128))}, cast=wide, dbias=True)
    cases["dbias-of-nothing"] = {"m": 0, "n": 70, "cast": wide, "dbias": True}
    return _both(typed(cases))


def _stack_cases() -> dict[str, Options]:
    sizes = ((1, 1), (16, 16), (33, 65), (128, 64), (256, 192), (0, 70))
    cases = sized(sizes, wider=True) | {
        "whole": {"m": 256, "n": 128},
        "one": {"m": 70, "n": 48, "matrices": 1},
    }
    cases |= {f"{only}-only": {"m": 70, "n": 48, "only": only} for only in ("q", "q_t")}
    cases["power-2"] = {"m": 48, "n": 32, "power_2": True, "epsilon": 1e-3}
    return _both(typed(cases))


_TIMED_STACK = {"strewn": False, "matrices": 1}  # as large as what the others are timed on

TESTS = (
    KernelTest("quantize", quantize, quantize_oracle, _quantize_cases(), {"strewn": False}),
    KernelTest("dequantize", dequantize, dequantize_oracle, _DEQUANTIZE, {"strewn": False}),
    KernelTest("quantize_transpose", quantize_transpose, None, _transpose_cases(), {"strewn": False}),
    KernelTest("quantize_stack", quantize_stack, quantize_stack_oracle, _stack_cases(), _TIMED_STACK),
)
