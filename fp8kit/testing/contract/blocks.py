"""Casts by blocks of any rule: bit for bit against ``fp8kit.blocks`` and the codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fp8kit import blocks as rules
from fp8kit import codec, formats
from fp8kit.arrays import ArrayView, Tile
from fp8kit.formats import E2M1, E4M3, E5M2, FORMATS, bfloat16, float32, uint8
from fp8kit.quantization import EDEN, FOUR_OVER_SIX, GAUSS, MX_RULES, Quantizer
from fp8kit.testing.contract import (
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    product,
    rotations,
    sized,
    typed,
)
from fp8kit.testing.contract.casts import each, largest, scale_of, scaled
from fp8kit.testing.contract.dropout import philox
from fp8kit.testing.contract.quantize import USERS
from fp8kit.testing.contract.rotations import ROTATIONS, SHAPES, drawn, rotated


def cast_blocks(
    s: Sampler,
    m: int,
    n: int,
    along: int = 1,
    fmt: Any = E4M3,
    granularity: str = "mx_1x32",
    rule: str = "",
    epsilon: float = 0.0,
    bits: int = 0,
    size: int = 0,
    kind: str = "plus",
    only: str = "",
    amax: float | None = None,
    strewn: bool = True,
    draw: int = 0,
    ties: str = "even",
    factor: float = 1.0,
    inside: bool = False,
    whole: bool = False,
) -> Arguments:
    """``rule``: rceil for mx_* and moss_*, and exact for others where it is not named; ``size``, ``kind``: of
    a rotation; ``only``: the outputs, else all but ``inside``; ``amax``: the tensor's; ``whole``: of block_*,
    that of all of x."""
    usual = "rceil" if granularity.startswith("m") else "exact"
    quantizer = Quantizer(
        fmt,
        granularity,
        scale_rule=rule or usual,
        epsilon=epsilon,
        stochastic_bits=bits,
        hadamard=size,
        signs=kind,
        ties=ties,
        factor=factor,
    )
    tile = rules.tile_of(quantizer, along)
    tiles = -(-m // tile[0]) * -(-n // tile[1])
    two_levels = quantizer.two_level
    outputs: dict[str, Callable[[], ArrayView | None]] = {
        "q": lambda: s.output(m, n, dtype=uint8),
        "scale_inv": lambda: s.output(tiles, dtype=float32),
        "scale_codes": lambda: None if granularity.startswith("block") else s.output(tiles, dtype=uint8),
        "values": lambda: s.output(m, n),
        "tensor_scale_inv": lambda: s.output(lines, dtype=float32) if quantizer.scaled_after else None,
    }
    lines = (m if along else n) if quantizer.row_scaled else 1
    if strewn:
        host = drawn(s, m, n, s.dtype)
        x, found = s.put(host), float(largest(host[np.isfinite(host.astype(np.float32))]))
    else:
        x, found = s.normal(m, n), 5.0
    return {
        "x": x,
        **{name: make() if not only or name in only.split() else None for name, make in outputs.items()},
        "tensor_amax": _amaxes(s, found if amax is None else amax, lines) if two_levels or whole else None,
        "quantizer": quantizer,
        "along": along,
        "draw": draw,
        "rng": s.rng() if quantizer.needs_rng else None,
        "inside": s.output(m, n, dtype=uint8) if inside else None,
    }


def _amaxes(s: Sampler, amax: float, lines: int) -> ArrayView:
    """One amax, or one for each line, up to 2^30 times smaller."""
    factors = 2.0 ** -s.random.integers(0, 30, lines) if lines > 1 else np.ones(lines)
    with np.errstate(over="ignore"):
        return s.put((amax * factors).astype(np.float32))


def _blocks(x: Array, tile: Tile) -> Array:
    """The blocks of x, (n, *tile), row-major, with zeros behind the matrix."""
    down, across = (-(-size // each) for size, each in zip(x.shape, tile, strict=True))
    padded = np.zeros((down * tile[0], across * tile[1]), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded.reshape(down, tile[0], across, tile[1]).swapaxes(1, 2).reshape(-1, *tile)


def _corrected(x: Array, a: Any, tile: Tile) -> Any:
    """(codes, scale, scale_inv, D) of the blocks of x, row-major, by ``blocks.eden``, line by line."""
    how: Quantizer = a.quantizer
    _, tensor_inverse = rules.nvfp4_tensor_scale(a.tensor_amax, E2M1, 255.99)
    grid = tuple(-(-size // t) for size, t in zip(x.shape, tile, strict=True))
    codes, scale, value = (np.zeros(grid, kind) for kind in (np.uint8, np.float32, np.float32))
    for line in range(x.shape[1 - a.along]):
        at = (line, slice(None)) if a.along else (slice(None), line)
        first = np.arange(0, x.shape[a.along], 16)
        places = line * x.shape[1] + first if a.along else first * x.shape[1] + line
        words = philox(a.rng, (a.draw << 48) + places).astype(np.uint32)
        own = rules.eden(
            x[at][None], a.tensor_amax, words[None], max(how.hadamard, 16), how.epsilon, how.factor
        )
        codes[at], scale[at], value[at] = (each[0] for each in own)
    return codes.reshape(-1), scale.reshape(-1), value.reshape(-1) * tensor_inverse, tensor_inverse


def tile_amax(x: Array, tile: Tile, keep_nan: bool) -> Array:
    """The amax of every tile, row-major."""
    most = np.maximum if keep_nan else np.fmax
    found = np.abs(x)
    for axis in range(2):
        found = most.reduceat(found, range(0, x.shape[axis], tile[axis]), axis=axis, dtype=np.float32)
    return most(found, np.float32(0)).reshape(-1)  # 0 of nothing but NaN, where that is ignored


def cast_blocks_oracle(a: Any) -> Results:
    """Step by step as the contract reads."""
    how: Quantizer = a.quantizer
    kind, tile, fmt = rules.kind_of(how), rules.tile_of(how, a.along), how.format
    x = rotated(a.x, how.hadamard, how.signs, a.along, a.rng)
    amax = np.maximum(tile_amax(x, tile, kind != "block"), np.float32(how.epsilon))
    codes, tensor_inverse, r = None, np.float32(1), rules.factor_inverse(how)
    value = None
    if how.scale_rule == EDEN:
        codes, scale, inverse, tensor_inverse = _corrected(x, a, tile)
    elif how.scale_rule == GAUSS:
        codes = rules.gauss_bytes(_blocks(x, tile).reshape(-1, how.tile[1]))
        scale, inverse = rules.scales_of_bytes(codes)
    elif kind == "moss":
        own, tensor_inverse = rules.nvfp4_tensor_scale(a.tensor_amax.reshape(()), fmt, 1.0)
        codes = rules.scale_bytes(amax * own, fmt, how.scale_rule)
        scale, value = rules.scales_of_bytes(codes)
        with np.errstate(over="ignore"):
            scale, inverse = np.minimum(scale * own, np.finfo(np.float32).max), value * tensor_inverse
    elif kind == "mx":
        codes = rules.scale_bytes(amax, fmt, how.scale_rule)
        scale, inverse = rules.scales_of_bytes(codes)
    elif kind == "nvfp4":
        _, tensor_inverse = rules.nvfp4_tensor_scale(a.tensor_amax, fmt, rules.scale_bound(how.scale_rule))
        largest = a.tensor_amax
        if how.row_scaled:
            counts = -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])
            lying = largest.reshape(-1, 1) if a.along else largest.reshape(1, -1)
            largest = np.broadcast_to(lying, counts).reshape(-1)
        if how.scale_rule in FOUR_OVER_SIX:
            blocks = _blocks(x, tile).reshape(-1, *how.tile)
            codes, scale, inverse, _ = rules.four_over_six(blocks, largest, how.scale_rule, how.epsilon)
        else:
            codes, scale, inverse, _ = rules.nvfp4_scales(amax, largest, fmt)
    else:
        for_inf = formats.dtype(a.x.dtype).max
        if a.tensor_amax is not None:
            amax, for_inf = np.maximum(amax, a.tensor_amax), float32.max
        scale = scale_of(amax, fmt.max, how.power_2, how.epsilon, for_inf)
        inverse = np.float32(1) / scale

    def spread(per_tile: Array) -> Array:
        return each(per_tile, x.shape, tile) if x.size else np.zeros(x.shape, np.float32)

    value = codec.decode(codes, E4M3) if kind == "nvfp4" and codes is not None else value
    value = (inverse if kind == "mx" else inverse * r) if value is None else value
    if how.scale_rule != EDEN:
        with np.errstate(over="ignore"):
            grown = scale * np.float32(how.factor)
        scale = grown if how.factor == 1 else np.minimum(grown, np.finfo(np.float32).max)
    values = scaled(x, spread(scale))
    if how.ties == "down":
        q = codec.encode(values, fmt, "stochastic", True, np.full(x.shape, 1 << 31, np.uint32))
    elif how.stochastic_bits:
        at = (a.draw << 48) + np.arange(x.size).reshape(x.shape)
        words = philox(a.rng, at).astype(np.uint32)
        q = codec.encode(values, fmt, "stochastic", True, words, how.stochastic_bits)
    else:
        q = codec.encode(values, fmt)
    with np.errstate(all="ignore"):
        found: Results = {
            "q": q,
            "scale_inv": inverse * r,
            "values": scaled(codec.decode(q, fmt), spread(value.astype(np.float32))).astype(a.x.dtype),
            "tensor_scale_inv": np.reshape(tensor_inverse * r, -1),
            "inside": (np.abs(values) <= np.float32(fmt.max)).astype(np.uint8),
        }
    return found if codes is None else {**found, "scale_codes": codes}


_GRANULARITIES = tuple(
    [f"mx_{rows}x{n}" for n in (16, 32, 64, 128) for rows in (1, n)]
    + ["nvfp4_1x16", "nvfp4_16x16", "block_1x128", "block_128x128", "block_1x32", "block_64x64"]
)
_FORMATS = (*FORMATS.values(), *USERS)
_LINES: dict[str, Options] = {
    "mx": {"granularity": "mx_1x32"},
    "nvfp4": {"granularity": "nvfp4_1x16", "fmt": E2M1},
    "block": {"granularity": "block_1x128", "epsilon": 2.0**-20},
    "square": {"granularity": "mx_32x32", "fmt": E2M1},
}
_BOTH = (1, 0)
_CAST = {
    **typed(product("{kind}-along{along}-{case}", {"kind": _LINES, "along": _BOTH, "case": sized(SHAPES)})),
    **product(
        "{granularity}-along{along}",
        {"granularity": _GRANULARITIES, "along": _BOTH},
        m=150,
        n=280,
        dtype=bfloat16,
    ),
    **product("{fmt}-{rule}", {"fmt": _FORMATS, "rule": MX_RULES}, m=40, n=160),
    **product("{fmt}-nvfp4", {"fmt": _FORMATS}, m=40, n=160, granularity="nvfp4_1x16", dtype=bfloat16),
    **product("{fmt}-block", {"fmt": _FORMATS}, m=40, n=160, granularity="block_1x64"),
    **product(
        "nvfp4-amax{amax}",
        {"amax": (0.0, 1e-45, 3e38, np.inf)},
        m=32,
        n=64,
        granularity="nvfp4_1x16",
        fmt=E2M1,
    ),
    **product(
        "{rule}-{granularity}-along{along}",
        {
            "rule": FOUR_OVER_SIX,
            "granularity": ("nvfp4_1x16", "nvfp4_16x16", "nvfp4_row_1x16"),
            "along": _BOTH,
        },
        m=150,
        n=280,
        fmt=E2M1,
        dtype=bfloat16,
    ),
    **typed(
        product(
            "4over6-{granularity}-along{along}-{case}",
            {
                "granularity": ("nvfp4_1x16", "nvfp4_16x16", "nvfp4_row_1x16"),
                "along": _BOTH,
                "case": sized(SHAPES[:-2]),
            },
            rule="4over6_mse_256",
            fmt=E2M1,
        )
    ),
    **product(
        "4over6-amax{amax}-{rule}",
        {"amax": (0.0, 1e-45, 3e38, np.inf), "rule": ("4over6_mae", "4over6_mse_256")},
        m=32,
        n=64,
        granularity="nvfp4_16x16",
        fmt=E2M1,
    ),
    **product(
        "rows-{case}-along{along}",
        {
            "case": {
                "E2M1": {"fmt": E2M1},
                "E4M3": {"fmt": E4M3},
                "random": {"fmt": E2M1, "bits": 8},
                "rotated": {"fmt": E2M1, "size": 16, "kind": "te"},
            },
            "along": _BOTH,
        },
        m=130,
        n=256,
        granularity="nvfp4_row_1x16",
    ),
    **product("{kind}-epsilon", {"kind": {k: {**v, "epsilon": 0.4} for k, v in _LINES.items()}}, m=32, n=64),
    **product(
        "power_2-{granularity}", {"granularity": ("block_1x32", "block_32x32")}, m=40, n=80, rule="power_2"
    ),
    **product(
        "{fmt}-stochastic{bits}-along{along}",
        {"fmt": _FORMATS, "bits": (32, 8, 1), "along": _BOTH},
        m=37,
        n=71,
    ),
    "stochastic-draw": {"m": 40, "n": 70, "bits": 8, "draw": 32767},
    **product(
        "stochastic{bits}-{kind}-along{along}",
        {"bits": (32, 5), "kind": _LINES, "along": _BOTH},
        m=130,
        n=256,
        dtype=bfloat16,
    ),
    **product(
        "hadamard{rotation}-{kind}-along{along}",
        {"rotation": ROTATIONS, "kind": _LINES, "along": _BOTH},
        m=140,
        n=270,
        dtype=bfloat16,
    ),
    **typed(
        product(
            "hadamard-along{along}-{case}",
            {"along": _BOTH, "case": sized(SHAPES)},
            size=64,
            kind="te",
            granularity="block_1x32",
        )
    ),
    **typed(
        product(
            "{rule}-along{along}-{case}",
            {
                "rule": {
                    "gauss": {"rule": GAUSS, "granularity": "mx_1x32", "size": 32, "ties": "down"},
                    "gauss128": {"rule": GAUSS, "granularity": "mx_1x128"},
                    "eden": {"rule": EDEN, "granularity": "nvfp4_1x16", "size": 128, "kind": "random"},
                    "moss": {"granularity": "moss_1x32"},
                },
                "along": _BOTH,
                "case": sized(SHAPES),
            },
            fmt=E2M1,
            inside=True,
        )
    ),
    **product(
        "eden{size}-factor{factor}-amax{amax}",
        {"size": (0, 32), "factor": (1.0, 0.99), "amax": (0.0, 1e-45, 3e38, np.inf, 2.0)},
        m=33,
        n=80,
        rule=EDEN,
        granularity="nvfp4_1x16",
        fmt=E2M1,
        draw=3,
        epsilon=2.0**-20,
    ),
    **product(
        "moss-{fmt}-{rule}-amax{amax}",
        {"fmt": (E4M3, E5M2, E2M1), "rule": MX_RULES, "amax": (0.0, 3e38, np.inf, 2.0)},
        m=20,
        n=70,
        granularity="moss_1x32",
    ),
    **product(
        "factor{factor}-{kind}-along{along}",
        {
            "factor": (0.75, 1.5),
            "kind": {
                **_LINES,
                "moss": {"granularity": "moss_1x32"},
                "rows": {"granularity": "nvfp4_row_1x16", "fmt": E2M1},
                "random": {"granularity": "mx_1x32", "rule": "floor", "bits": 32, "fmt": E2M1, "size": 32},
            },
            "along": _BOTH,
        },
        m=70,
        n=140,
        dtype=bfloat16,
        inside=True,
    ),
    **typed(
        product(
            "whole-{granularity}-{rule}-along{along}-amax{amax}",
            {
                "granularity": ("block_1x128", "block_64x64"),
                "rule": {"exact": {}, "power_2": {"rule": "power_2", "size": 64, "kind": "te"}},
                "along": _BOTH,
                "amax": (None, 0.0, 1e-37, 1e-45, np.inf, 2.0**20),
            },
            m=70,
            n=280,
            whole=True,
        )
    ),
    **product("whole-{fmt}", {"fmt": _FORMATS}, m=40, n=160, granularity="block_1x128", whole=True, bits=8),
    **product("{fmt}-ties", {"fmt": _FORMATS}, m=40, n=160, ties="down"),
    **product(
        "ties-inside-{kind}-along{along}",
        {"kind": _LINES, "along": _BOTH},
        m=70,
        n=140,
        ties="down",
        inside=True,
    ),
    **product(
        "{only}-only-along{along}",
        {"only": ("q", "scale_inv", "scale_codes", "values", "q values"), "along": _BOTH},
        m=48,
        n=80,
    ),
}

TESTS = (
    *rotations.TESTS,
    KernelTest("cast_blocks", cast_blocks, cast_blocks_oracle, _CAST, {"strewn": False}),
)
