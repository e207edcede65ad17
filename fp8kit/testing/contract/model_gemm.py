"""The product with another chip's arithmetic against Python's exact fractions, bit for bit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, HIGH_PRECISION, Format, float32, uint8
from fp8kit.testing.contract import Arguments, Array, KernelTest, Options, Results, Sampler, product
from fp8kit.testing.contract.gemm import ADDED, joined

Tile = tuple[int, int]


def model_gemm(
    s: Sampler,
    m: int,
    n: int,
    k: int | None = None,
    a: Format = E4M3,
    b: Format = E4M3,
    accumulation: Accumulation = ACCUMULATIONS["hopper_split"],
    tiles: tuple[Tile, Tile] = ((0, 0), (0, 0)),
    special: bool = False,
    bias: bool = False,
    add: str = "",
    scales: Format | None = None,
) -> Arguments:
    """Codes of values over many binades, zeros among them; without ``special`` no NaN and no Inf.
    ``scales``: a format that all scales have."""
    k = n if k is None else k
    made: Arguments = {"a_format": a, "b_format": b, "accumulation": accumulation}
    for name, fmt, rows, tile in (("a", a, m, tiles[0]), ("b", b, n, tiles[1])):
        values = s.random.standard_normal((rows, k)) * np.exp2(s.random.integers(-8, 7, (rows, k)))
        codes = codec.encode(values * (s.random.random((rows, k)) > 0.1), fmt)
        if special and codes.size:
            codes.flat[s.random.integers(0, codes.size, 3)] = fmt.nan_code
            if fmt.inf_code is not None:
                codes.flat[s.random.integers(0, codes.size, 3)] = fmt.inf_code | fmt.sign_code
        grid = [max(1, -(-size // (t or max(size, 1)))) for size, t in zip((rows, k), tile, strict=True)]
        made[name] = s.put(codes, uint8)
        drawn = s.random.uniform(0.01, 0.1, grid)
        if scales is not None:
            wide = drawn * np.exp2(s.random.integers(-6, 12, grid)) * (s.random.random(grid) > 0.05)
            drawn = codec.decode(codec.encode(wide, scales), scales)
        made[f"{name}_scale_inv"] = s.put(drawn, float32)
        made[f"{name}_tile"] = tile
    return made | joined(s, m, n, s.dtype, bias, add)


def _exponent(value: Fraction) -> int:
    """floor(log2 |value|)."""
    found = value.numerator.bit_length() - value.denominator.bit_length()
    return found if abs(value) >= Fraction(2) ** found else found - 1


def _cut(value: Fraction, unit: Fraction) -> Fraction:
    """Toward zero to a multiple of ``unit``."""
    return int(value / unit) * unit


def _step(c: Fraction, products: list[tuple[Fraction, int]], bits: int) -> Fraction:
    """One instruction: ``products`` and the sums of their factors' exponents."""
    own = max(_exponent(c), -126) if c else -126
    most = max([own, *(exponent for value, exponent in products if value)])
    unit = Fraction(2) ** (most - bits)
    total = _cut(c, unit) + sum(_cut(value, unit) for value, _ in products)
    return _cut(total, Fraction(2) ** (_exponent(total) - min(bits, 23))) if total else total


def _scaled_sum(
    a: Any, terms: list[tuple[Fraction, int]], scales: tuple[list[Any], list[Any]], block: int
) -> Any:
    """The sum of scaled groups."""
    how, total = a.accumulation, np.float32(0)
    if any(np.isnan(scale) for own in scales for scale in own):
        return np.float32(np.nan)
    for first in range(0, len(terms), how.promote or max(len(terms), 1)):
        part = terms[first : first + (how.promote or len(terms))]
        c = Fraction(0)
        for at in range(0, len(part), how.chunk):
            step = []
            for start in range(at, min(at + how.chunk, len(part)), how.group):
                members = part[start : min(start + how.group, at + how.chunk)]
                pair = [Fraction(float(own[(first + start) // block])) for own in scales]
                value = sum((value for value, _ in members), Fraction(0)) * pair[0] * pair[1]
                exponent = sum(_exponent(scale) for scale in pair if scale)
                step.append((value, exponent + (members[0][1] if how.group == 1 else 0)))
            c = _step(c, step, how.fraction_bits)
        total = total + np.float32(float(c))
    return total


def _nearest(value: Fraction) -> np.float32:
    """Returns the value rounded once, to nearest even."""
    if not value:
        return np.float32(0)
    unit = Fraction(2) ** (max(_exponent(abs(value)), -126) - 23)
    return np.float32(float(round(value / unit) * unit))


def _element(a: Any, row: tuple[Array, Array], scales: tuple[list[Any], list[Any]], block: int) -> float:
    """One element of the result."""
    values = [codec.decode(c, f) for c, f in zip(row, (a.a_format, a.b_format), strict=True)]
    if not all(np.isfinite(v).all() for v in values):
        return float(np.sum(values[0] * values[1]))
    lowest = [math.frexp(f.smallest_normal)[1] - 1 for f in (a.a_format, a.b_format)]
    terms = [
        (
            Fraction(x) * Fraction(y),
            max(math.frexp(x)[1] - 1, lowest[0]) + max(math.frexp(y)[1] - 1, lowest[1]),
        )
        for x, y in zip(*map(np.ndarray.tolist, values), strict=True)
    ]
    how, blocked = a.accumulation, a.a_tile[1] or a.b_tile[1]
    if how.group:
        return float(_scaled_sum(a, terms, scales, block))
    total, result = np.float64(0), np.float32(0)
    for i, start in enumerate(range(0, len(terms), block)):
        own = terms[start : start + block]
        left, right = scales[0][i], scales[1][i]
        if how.exact and blocked:
            exact = float(sum((value for value, _ in own), Fraction(0)))
            total = total + np.float64(exact) * np.float64(left * right)
            continue
        summed, promote = np.float32(0), how.promote or block
        if how.exact:
            summed = _nearest(sum((value for value, _ in own), Fraction(0)))
        else:
            for first in range(0, len(own), promote):
                c = Fraction(0)
                part = own[first : first + promote]
                for at in range(0, len(part), how.chunk):
                    c = _step(c, part[at : at + how.chunk], how.fraction_bits)
                summed = summed + np.float32(float(c))
        if not blocked:
            by_rows = a.a_tile[0] or a.b_tile[0]
            result = summed * right * left if by_rows else summed * (left * right)
        else:
            by_rows = a.a_tile[0] == a.b_tile[0] == 1
            x, y = (summed * left, right) if by_rows else (summed, left * right)
            result = _nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(result)))
    return float(np.float32(total)) if how.exact and blocked else float(result)


def model_gemm_oracle(a: Any) -> Results:
    """Element by element."""
    (m, n), k = a.out.shape, a.a.shape[1]
    block = a.a_tile[1] or a.b_tile[1] or max(k, 1)
    rows = []
    for name, count in (("a", m), ("b", n)):
        tile, scale_inv = getattr(a, f"{name}_tile"), getattr(a, f"{name}_scale_inv")
        wide = max(1, -(-k // block))
        rows.append([np.resize(scale_inv[i // (tile[0] or max(count, 1))], wide) for i in range(count)])
    out = np.array(
        [
            [_element(a, (a.a[i], a.b[j]), (list(rows[0][i]), list(rows[1][j])), block) for j in range(n)]
            for i in range(m)
        ],
        np.float32,
    )
    out = out.reshape(m, n)
    for part in (a.bias, a.addend):
        out = out if part is None else out + part.astype(np.float32)
    return {"out": out.astype(a.out.dtype)}


_ROWS: tuple[Tile, Tile] = ((1, 0), (1, 0))
_BLOCKS: dict[str, tuple[Tile, Tile]] = {
    "1x128": ((1, 128), (128, 128)),
    "1x32": ((1, 32), (1, 32)),
    "16x16-row": ((16, 16), (1, 0)),
}
_PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2), (E2M1, E4M3), (Format("E3M4", 3, 4), E5M2))
_SCALED = {name: how for name, how in ACCUMULATIONS.items() if how.group} | {
    "groups-of-4": Accumulation(20, 12, 24, 4),
    "products-promoted": Accumulation(25, 16, 64, 1),
}
_HOW = {
    **{name: how for name, how in ACCUMULATIONS.items() if not how.group},
    "f35": Accumulation(35, 64),
    "f4": Accumulation(4, 7, 21),
    "chunk-100": Accumulation(13, 100),
}
_SIZES = ((3, 4, 32), (2, 3, 200), (1, 1, 1), (65, 2, 40), (2, 70, 33), (0, 3, 8), (2, 2, 0))
_CASES: dict[str, Options] = {
    **product(
        "{m}x{n}x{k}-{accumulation}",
        {
            "m n k": _SIZES,
            "accumulation": {name: {"accumulation": _HOW[name]} for name in ("hopper_split", "exact")},
        },
    ),
    **product(
        "{a}-{b}-{accumulation}",
        {"a b": _PAIRS, "accumulation": {name: {"accumulation": how} for name, how in _HOW.items()}},
        m=3,
        n=3,
        k=150,
    ),
    **product(
        "{tiles}-{accumulation}",
        {
            "tiles": {
                "rows": {"tiles": _ROWS},
                **{name: {"tiles": tiles} for name, tiles in _BLOCKS.items()},
            },
            "accumulation": {
                name: {"accumulation": _HOW[name]} for name in ("hopper_fast", "hopper_split", "exact", "f35")
            },
        },
        m=17,
        n=3,
        k=300,
    ),
    **product(
        "{accumulation}-{tiles}",
        {
            "accumulation": {
                f"{name}-{a}-{b}": {"accumulation": how, "a": a, "b": b}
                for name, how in _SCALED.items()
                for a, b in ((E2M1, E2M1), (E4M3, E5M2) if how.group == 1 else (E3M2, E2M3))
            },
            "tiles": {
                "1x32": {"tiles": ((1, 32), (1, 32)), "scales": E8M0},
                "16x16": {"tiles": ((1, 16), (16, 16)), "scales": E4M3},
            },
        },
        m=5,
        n=4,
        k=200,
    ),
    "blackwell_mx-special": {
        "accumulation": ACCUMULATIONS["blackwell_mx"],
        "tiles": ((1, 32), (1, 32)),
        "scales": E8M0,
        "special": True,
        "m": 5,
        "n": 6,
        "k": 96,
    },
    **product("special-{a}-{b}", {"a b": _PAIRS[:3]}, m=5, n=6, k=40, special=True),
    **product("{dtype.name}", {"dtype": HIGH_PRECISION}, m=5, n=3, k=64),
    **product("{dtype.name}-bias-{add}", {"dtype": HIGH_PRECISION, "add": ADDED}, m=5, n=3, k=64, bias=True),
    **product(
        "{dtype.name}-bias", {"dtype": HIGH_PRECISION}, m=5, n=3, k=64, bias=True, accumulation=Accumulation()
    ),
}

TESTS = (KernelTest("model_gemm", model_gemm, model_gemm_oracle, _CASES),)
