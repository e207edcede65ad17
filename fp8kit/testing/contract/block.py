"""Scaling by blocks of 128: the cast bit for bit against the codec, the product against float64.

Tolerance of the product: that of ``fp8_gemm`` with the split accumulator (see ``gemm``'s text; tensor cores
may lose the same before each promotion at the end of a block), and four more float32 roundings of each term
for the scales. On Hopper it is known to the bit, as there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from fp8kit import formats
from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.protocol import BLOCK, block_shapes
from fp8kit.formats import E4M3, E5M2, DType, Format, bfloat16, float32, uint8
from fp8kit.testing.contract import (
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    narrowed,
    product,
    sized,
    typed,
)
from fp8kit.testing.contract.casts import operand
from fp8kit.testing.contract.gemm import fp8_gemm_oracle, joined, modelled, sizes
from fp8kit.testing.contract.rotations import narrow, put_special

_WRITTEN = ("q", "scale_inv", "q_t", "scale_inv_t")
LINE, SQUARE = (1, BLOCK), (BLOCK, BLOCK)
NAMES = {LINE: "1x128", SQUARE: "128x128"}


def blocks(s: Sampler, rows: int, columns: int, dtype: DType) -> Array:
    """Values on the host whose magnitude changes from block to block, with zero blocks, tiny ones, Inf and
    NaN."""
    x = s.random.standard_normal((rows, columns))
    for i, j in np.ndindex(-(-rows // 32), -(-columns // 64)):
        part = x[32 * i : 32 * i + 32, 64 * j : 64 * j + 64]
        part *= 2.0 ** s.random.integers(-40, 12)
        kind = s.random.integers(0, 8)
        if kind == 0:
            part[...] = 0
        elif kind == 1:
            part *= 2.0**-100
        elif kind == 2 and part.size:
            put_special(s, part)
    return narrow(x, dtype)


def block_quantize(
    s: Sampler,
    m: int,
    n: int,
    tile: Tile = LINE,
    fmt: Format = E4M3,
    power_2: bool = True,
    epsilon: float = 0.0,
    only: str = "",
    strewn: bool = True,
) -> Arguments:
    """``only``: "q" or "q_t"."""

    def side(name: str, rows: int, columns: int) -> list[ArrayView | None]:
        codes, layout = block_shapes(rows, columns, tile)
        missing = only not in ("", name)
        return [
            None if missing else s.output(*codes, dtype=uint8),
            None if missing else s.output(*layout, dtype=float32),
        ]

    (q, scale_inv), (q_t, scale_inv_t) = side("q", m, n), side("q_t", n, m)
    return {
        "x": s.put(blocks(s, m, n, s.dtype)) if strewn else s.normal(m, n),
        "q": q,
        "scale_inv": scale_inv,
        "q_t": q_t,
        "scale_inv_t": scale_inv_t,
        "format": fmt,
        "tile": tile,
        "power_2": power_2,
        "epsilon": epsilon,
    }


def block_quantize_oracle(a: Any) -> Results:
    """See ``operand``."""
    rule = a.tile, a.format, a.power_2, a.epsilon, formats.dtype(a.x.dtype).max
    (q, scale_inv), (q_t, scale_inv_t) = operand(a.x, *rule), operand(a.x.T, *rule)
    return {"q": q, "scale_inv": scale_inv, "q_t": q_t, "scale_inv_t": scale_inv_t}


def block_quantize_stack(s: Sampler, m: int, n: int, matrices: int = 3, **options: Any) -> Arguments:
    """``matrices`` of them, ``options`` as ``block_quantize``'s."""
    made = block_quantize(s, m, n, **options)
    for name in _WRITTEN:
        if made[name] is not None:
            made[name] = s.output(matrices, *made[name].shape, dtype=made[name].dtype)
    rows = matrices * m
    x = s.put(blocks(s, rows, n, s.dtype)) if options.get("strewn", True) else s.normal(rows, n)
    return {**made, "x": x.reshape(matrices, m, n)}


def block_quantize_stack_oracle(a: Any) -> Results:
    """Matrix by matrix."""
    each = [block_quantize_oracle(SimpleNamespace(**{**vars(a), "x": x})) for x in a.x]
    return {name: np.stack([found[name] for found in each]) for name in _WRITTEN}


def block_gemm(
    s: Sampler,
    m: int,
    n: int,
    k: int | None = None,
    a_tile: Tile = LINE,
    b_tile: Tile = SQUARE,
    a: Format = E4M3,
    b: Format = E4M3,
    power_2: bool = True,
    bias: bool = False,
    add: str = "",
) -> Arguments:
    """Every block has a scale of its own, so that one in the wrong place shows; zero codes beyond the
    matrices."""
    k = n if k is None else k

    def matrix(rows: int, tile: Tile, fmt: Format) -> tuple[ArrayView, ArrayView]:
        codes, layout = block_shapes(rows, k, tile)
        values = np.zeros(codes, np.uint8)
        values[:rows, :k] = narrowed(s.draw((rows, k), 8.0), fmt)
        exponents = s.random.uniform(-5, 1, layout)
        return s.put(values), s.put(np.exp2(np.round(exponents) if power_2 else exponents), float32)

    (left, left_scales), (right, right_scales) = matrix(m, a_tile, a), matrix(n, b_tile, b)
    return {
        "a": left,
        "b": right,
        "a_format": a,
        "b_format": b,
        "a_scale_inv": left_scales,
        "b_scale_inv": right_scales,
        "a_tile": a_tile,
        "b_tile": b_tile,
        **joined(s, m, n, s.dtype, bias, add),
    }


def block_operand(s: Sampler, m: int, n: int, tile: Tile = (1, 32), along: int = 1) -> Arguments:
    """Any codes of the format's bits, and any codes of scales."""
    rows, k = (m, n) if along else (n, m)
    high, wide = tile if along else tile[::-1]
    q, q_scales = block_shapes(rows, k, (1, tile[1]))
    codes = s.random.integers(0, 256 if tile[1] == 32 else 16, (m, n))
    scales = s.random.integers(0, 256, (-(-m // high), -(-n // wide)))
    return {
        "codes": s.put(codes.astype(np.uint8)),
        "scales": s.put(scales.astype(np.uint8)),
        "q": s.output(*q, dtype=uint8),
        "q_scales": s.output(*q_scales, dtype=uint8),
        "tile": tile,
        "along": along,
    }


def block_operand_oracle(a: Any) -> Results:
    """Byte by byte, from NVIDIA's text: the scale of row r and block c is byte 16 (r % 32) + 4 (r % 128 / 32)
    + c % 4 of its tile of 128 x 4."""
    (high, width), codes, scales = a.tile, a.codes, a.scales
    codes, scales = (codes, scales) if a.along else (codes.T, scales.T)
    (rows, k), (padded, nbytes) = codes.shape, a.q.shape
    whole = np.zeros((padded, nbytes * 32 // width), np.uint8)
    whole[:rows, :k] = codes
    found, across = np.zeros(a.q_scales.size, np.uint8), -(-whole.shape[1] // (4 * width))
    for r, c in np.ndindex(rows, scales.shape[1]):
        tile = r // 128 * across + c // 4
        found[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = scales[r // high, c]
    return {"q": whole if width == 32 else whole[:, ::2] + 16 * whole[:, 1::2], "q_scales": found}


_SHAPES = ((128, 128), (256, 384), (130, 70), (1, 1), (17, 129), (300, 513), (0, 64), (64, 0))
_SIZES = sizes(
    (128, 128, 128),
    (256, 384, 512),
    (64, 144, 128),
    (17, 33, 130),
    (1, 300, 640),
    (200, 16, 257),
    (5, 7, 3),
    (0, 16, 128),
    (17, 33, 0),
)
_PAIRS = {
    f"{NAMES[a]}-{NAMES[b]}": {"a_tile": a, "b_tile": b}
    for a, b in ((LINE, SQUARE), (SQUARE, LINE), (LINE, LINE))
}
_JOINED = {
    f"{'bias' * bias}{add}": {"bias": bias, "add": add}
    for bias, add in ((True, ""), (False, "accumulate"), (True, "accumulate"), (True, "add"))
}
_FLOAT: Options = {"m": 150, "n": 300, "power_2": False, "epsilon": 2.0**-20}


_TILES = {name: {"tile": tile} for tile, name in NAMES.items()}
_QUANTIZE = {
    **typed(
        {
            **product("{tile}-{case}", {"tile": _TILES, "case": sized(_SHAPES)}),
            **product("{tile}-{fmt}-float-scales", {"tile": _TILES, "fmt": (E4M3, E5M2)}, **_FLOAT),
        }
    ),
    **product("{tile}-{only}-only", {"tile": _TILES, "only": ("q", "q_t")}, m=144, n=200, dtype=bfloat16),
}
_STACKS = {
    **typed(product("{tile}-{case}", {"tile": _TILES, "case": sized(((1, 1), (130, 70), (256, 384)))})),
    **product("{tile}-{only}-only", {"tile": _TILES, "only": ("q", "q_t")}, m=144, n=200, matrices=2),
    **product("{tile}-{fmt}-float-scales", {"tile": _TILES, "fmt": (E4M3, E5M2)}, **_FLOAT),
}
_GEMM = {
    **product("{tiles}-{case}", {"tiles": _PAIRS, "case": _SIZES}),
    **product("{a}-{b}", {"a b": ((E5M2, E4M3), (E4M3, E5M2))}, m=48, n=160, k=256),
    "float-scales": {"m": 144, "n": 160, "k": 256, "power_2": False},
    **product("{m}x{n}-{added}", {"m n": ((48, 160), (17, 33)), "added": _JOINED}, k=256),
}

_CODES = {"{}x{}".format(*tile): {"tile": tile} for tile in ((1, 32), (32, 32), (1, 16), (16, 16))}
_OPERAND = product("{tile}-along{along}-{case}", {"tile": _CODES, "along": (1, 0), "case": sized(_SHAPES)})

TESTS = (
    KernelTest("block_quantize", block_quantize, block_quantize_oracle, _QUANTIZE, {"strewn": False}),
    KernelTest(
        "block_quantize_stack",
        block_quantize_stack,
        block_quantize_stack_oracle,
        _STACKS,
        {"strewn": False, "matrices": 1},
    ),
    KernelTest("block_operand", block_operand, block_operand_oracle, _OPERAND),
    KernelTest("block_gemm", block_gemm, fp8_gemm_oracle, typed(_GEMM), bits=modelled),
)
