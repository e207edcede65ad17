"""Contract cases of scaling by blocks of 128: the cast bit for bit against the codec, the product against
float64.

Tolerance of the product: that of ``fp8_gemm`` with the split accumulator (see ``gemm``'s text; tensor cores
may lose the same before each promotion at the end of a block), and four more float32 roundings of each term
for the scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.arrays import Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import E4M3, E5M2, HIGH_PRECISION, DType, Format, bfloat16, float32, uint8
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.elementwise import ROUNDOFF, draw, hole, table, wide
from fp8kit.testing.contract.gemm import added, fp8_slack, joining_slack

Array = np.ndarray[Any, Any]
Tile = tuple[int, int]
LINE, SQUARE = (1, 128), (128, 128)
NAMES = {LINE: "1x128", SQUARE: "128x128"}


def up(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def sample(rows: int, columns: int, dtype: DType) -> Array:
    """Values whose magnitude changes from block to block, with zero blocks, tiny ones, Inf and NaN."""
    rng = np.random.default_rng(rows + 1000 * columns)
    x = rng.standard_normal((rows, columns))
    for i, j in np.ndindex(-(-rows // 32), -(-columns // 64)):
        part = x[32 * i : 32 * i + 32, 64 * j : 64 * j + 64]
        part *= 2.0 ** rng.integers(-40, 12)
        kind = rng.integers(0, 8)
        if kind == 0:
            part[...] = 0
        elif kind == 1:
            part *= 2.0**-100
        elif kind == 2 and part.size:
            part[rng.integers(0, part.shape[0]), rng.integers(0, part.shape[1])] = rng.choice(
                [np.inf, -np.inf, np.nan]
            )
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype.numpy)


def operand(
    x: Array, tile: Tile, fmt: Format, power_2: bool, epsilon: float, largest: float
) -> tuple[Array, Array, Array]:
    """(codes, scale_inv in cuBLASLt's layout, scale_inv of every code) of one orientation, tile by tile, from
    the rule's text."""
    rows, columns = x.shape
    codes = np.zeros((up(rows, 16), up(columns, 128)), np.uint8)
    shape = (
        (codes.shape[1] // 128, codes.shape[0])
        if tile == LINE
        else (up(rows, 128) // 128, up(codes.shape[1] // 128, 4))
    )
    layout = np.ones(shape, np.float32)
    spread = np.ones(codes.shape, np.float32)
    for i, j in np.ndindex(-(-rows // tile[0]), -(-columns // tile[1])):
        at = (
            slice(i * tile[0], min((i + 1) * tile[0], rows)),
            slice(j * tile[1], min((j + 1) * tile[1], columns)),
        )
        part = x[at].astype(np.float32)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            amax = max(np.fmax.reduce(np.abs(part), axis=None, initial=np.float32(0)), np.float32(epsilon))
            scale = np.float32(1)
            if 0 < amax < np.inf:
                scale = np.float32(fmt.max) / np.float32(amax)
                scale = np.float32(largest) if np.isinf(scale) else scale
                if power_2:
                    scale = np.exp2(np.floor(np.log2(np.float64(scale)))).astype(np.float32)
            codes[at] = codec.encode(part * scale, fmt)
            inverse = np.float32(1) / scale
        layout[(j, i) if tile == LINE else (i, j)] = inverse
        spread[at] = inverse
    return codes, layout, spread


def _quantize(
    dtype: DType,
    shape: Tile,
    tile: Tile,
    fmt: Format = E4M3,
    power_2: bool = True,
    epsilon: float = 0.0,
    wanted: str = "both",
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        x = sample(*shape, dtype)
        rule = tile, fmt, power_2, epsilon, dtype.max
        sides = {"q": operand(x, *rule), "q_t": operand(np.ascontiguousarray(x.T), *rule)}
        views = {
            name: (poisoned(codes.shape, uint8, device), poisoned(layout.shape, float32, device))
            for name, (codes, layout, _) in sides.items()
            if wanted in (name, "both")
        }
        (q, scale_inv), (q_t, scale_inv_t) = (views.get(name, (None, None)) for name in sides)
        kernels.block_quantize(put(x, device), q, scale_inv, q_t, scale_inv_t, fmt, tile, power_2, epsilon, 0)
        for name, (codes, layout, _) in sides.items():
            if name in views:
                assert_same_bits(f"{name}'s scales", get(views[name][1]), layout)
                assert_same_bits(name, get(views[name][0]), codes)

    return run


def _quantize_many(tile: Tile, count: int) -> Callable[[Kernels, Device], None]:
    """Matrices of all types and shapes in one call, and then small ones of one type; every fifth in one
    orientation."""

    def run(kernels: Kernels, device: Device) -> None:
        kinds = [HIGH_PRECISION[i % 3 if i < 12 else 1] for i in range(count)]
        xs = [sample(*(SHAPES[i % len(SHAPES)] if i < 12 else (9, 20)), kind) for i, kind in enumerate(kinds)]
        columns: tuple[list[Any], list[Any], list[Any], list[Any]] = ([], [], [], [])
        qs, scales, q_ts, scale_ts = columns
        wants = []
        for i, (x, kind) in enumerate(zip(xs, kinds, strict=True)):
            both = [operand(np.ascontiguousarray(side), tile, E4M3, True, 0.0, kind.max) for side in (x, x.T)]
            wants.append(both)
            for at, (codes, layout, _) in enumerate(both):
                there = x.size and i % 5 != at
                columns[2 * at].append(poisoned(codes.shape, uint8, device) if there else None)
                columns[2 * at + 1].append(poisoned(layout.shape, float32, device) if there else None)
        kernels.block_quantize_many(
            [put(x, device) for x in xs], qs, scales, q_ts, scale_ts, E4M3, tile, True, 0.0, 0
        )
        for i, both in enumerate(wants):
            for at, (codes, layout, _) in enumerate(both):
                if columns[2 * at][i] is not None:
                    assert_same_bits(f"codes {at} of {i}", get(columns[2 * at][i]), codes)
                    assert_same_bits(f"scales {at} of {i}", get(columns[2 * at + 1][i]), layout)

    return run


def _gemm(
    dtype: DType,
    sizes: tuple[int, int, int],
    a_tile: Tile = LINE,
    b_tile: Tile = SQUARE,
    a_format: Format = E4M3,
    b_format: Format = E4M3,
    power_2: bool = True,
    bias: bool = False,
    add: str = "",
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        m, n, k = sizes
        # every block has a magnitude of its own, so that a scale in the wrong place shows
        values = [draw(1, (m, k), float32), draw(2, (n, k), float32)]
        for i, x in enumerate(values):
            grid = np.exp2(
                np.random.default_rng(7 + i).uniform(-3, 3, (up(x.shape[0], 128) // 128, up(k, 128) // 128))
            )
            x *= np.kron(grid, np.ones((128, 128)))[: x.shape[0], :k].astype(np.float32)
        a, b = (
            operand(x, tile, fmt, power_2, 0.0, float32.max)
            for x, tile, fmt in zip(values, (a_tile, b_tile), (a_format, b_format), strict=True)
        )
        shift, before = draw(3, (n,), dtype), draw(4, (m, n), dtype)
        out, check = hole((m, n), dtype, device, 0)
        addend = added(add, before, out, kernels)
        kernels.block_gemm(
            put(a[0], device),
            put(b[0], device),
            out,
            a_format,
            b_format,
            put(a[1], device),
            put(b[1], device),
            a_tile,
            b_tile,
            put(shift, device) if bias else None,
            addend,
            workspace(kernels.fp8_gemm_workspace(m, n), device),
            0,
        )
        left, right = codec.decode(a[0], a_format) * wide(a[2]), codec.decode(b[0], b_format) * wide(b[2])
        reference, magnitude = left[:m] @ right[:n].T, np.abs(left[:m]) @ np.abs(right[:n]).T
        slack = fp8_slack(magnitude, k, False, device) + 4 * ROUNDOFF * magnitude
        joined = [wide(part) for wanted, part in ((bias, shift), (add, before)) if wanted]
        slack = slack + joining_slack(reference, dtype, joined, device)
        for part in joined:
            reference, slack = reference + part, slack + sum_slack(np.abs(part), 1)
        assert_close("out", get(out), reference, dtype, slack)
        check()

    return run


SHAPES = ((128, 128), (256, 384), (130, 70), (1, 1), (17, 129), (300, 513), (0, 64), (64, 0))
SIZES = (
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
_TILES = ((LINE, SQUARE), (SQUARE, LINE), (LINE, LINE))
_PAIRS = ((E5M2, E4M3), (E4M3, E5M2))

CASES = [
    *table(
        "block_quantize",
        {
            f"{d.name}-{NAMES[t]}-{m}x{n}": _quantize(d, (m, n), t)
            for d in HIGH_PRECISION
            for t in NAMES
            for m, n in SHAPES
        },
    ),
    *table(
        "block_quantize",
        {
            f"{d.name}-{NAMES[t]}-{f}-float-scales": _quantize(
                d, (150, 300), t, f, power_2=False, epsilon=2.0**-20
            )
            for d in HIGH_PRECISION
            for t in NAMES
            for f in (E4M3, E5M2)
        },
    ),
    *table(
        "block_quantize",
        {
            f"{NAMES[t]}-{w}-only": _quantize(bfloat16, (144, 200), t, wanted=w)
            for t in NAMES
            for w in ("q", "q_t")
        },
    ),
    *table("block_quantize_many", {f"{NAMES[t]}-{n}": _quantize_many(t, n) for t in NAMES for n in (1, 80)}),
    *table(
        "block_gemm",
        {
            f"{d.name}-{NAMES[a]}-{NAMES[b]}-{'x'.join(map(str, s))}": _gemm(d, s, a, b)
            for d in HIGH_PRECISION
            for a, b in _TILES
            for s in SIZES
        },
    ),
    *table(
        "block_gemm",
        {
            f"{d.name}-{f}-{g}": _gemm(d, (48, 160, 256), a_format=f, b_format=g)
            for d in HIGH_PRECISION
            for f, g in _PAIRS
        },
    ),
    *table(
        "block_gemm",
        {f"{d.name}-float-scales": _gemm(d, (144, 160, 256), power_2=False) for d in HIGH_PRECISION},
    ),
    *table(
        "block_gemm",
        {
            f"{d.name}-{n[0]}x{n[1]}-{'bias' if i else ''}{j}": _gemm(d, n, bias=i, add=j)
            for d in HIGH_PRECISION
            for n in ((48, 160, 256), (17, 33, 256))
            for i, j in ((True, ""), (False, "accumulate"), (True, "accumulate"), (True, "add"))
        },
    ),
]
