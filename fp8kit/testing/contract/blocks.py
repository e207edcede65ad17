"""Casts by blocks of any rule, and rotations: bit for bit against ``fp8kit.blocks`` and the codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fp8kit import blocks as rules
from fp8kit import codec, formats
from fp8kit.arrays import ArrayView
from fp8kit.formats import E2M1, E4M3, E5M2, FORMATS, DType, bfloat16, float16, float32, uint8
from fp8kit.quantization import EDEN, FOUR_OVER_SIX, GAUSS, MX_RULES, Quantizer
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
from fp8kit.testing.contract.casts import largest, scale_of, scaled
from fp8kit.testing.contract.dropout import philox
from fp8kit.testing.contract.quantize import USERS
from fp8kit.testing.contract.scales import Tile, each


def drawn(s: Sampler, rows: int, columns: int, dtype: DType) -> Array:
    """Values on the host whose magnitude changes every eight rows and columns, with zeros, tiny ones, ties,
    Inf and NaN."""
    x = s.random.standard_normal((rows, columns))
    x[s.random.random(x.shape) < 0.2] = s.random.choice([0.0, -0.0, 1.5, -1.25, 1.75, 5.0, 3.5, 2.5])
    for i, j in np.ndindex(-(-rows // 8), -(-columns // 8)):
        part = x[8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
        part *= 2.0 ** s.random.integers(-30, 12)
        kind = s.random.integers(0, 40)
        if kind < 6:
            part[...] = 0
        elif kind < 9:
            part *= 2.0**-110
        elif kind < 11:
            part[tuple(s.random.integers(0, part.shape))] = s.random.choice([np.inf, -np.inf, np.nan])
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype.numpy)


def signs(kind: str, count: int, rng: Array | None) -> Any:
    """``blocks.hadamard``'s signs of so many indices."""
    if kind != "random":
        return kind
    at = np.arange(count, dtype=np.uint64)
    index = np.uint64(rules.SIGNS_AT) + at // np.uint64(32)
    words = philox(rng, index).astype(np.uint64)  # type: ignore[arg-type]
    return np.where(words >> (at % np.uint64(32)) & np.uint64(1), np.float32(-1), np.float32(1))


def rotated(x: Array, n: int, kind: str, along: int, rng: Array | None) -> Array:
    """x in float32, rotated along its last (``along`` 1) or first dimension."""
    lying = x.astype(np.float32) if along else x.astype(np.float32).T
    found = rules.hadamard(lying, n, signs(kind, lying.shape[1], rng)) if n else lying
    return np.ascontiguousarray(found if along else found.T)


def rotate(
    s: Sampler,
    m: int,
    n: int,
    size: int = 16,
    kind: str = "plus",
    along: int = 1,
    out: str = "x",
    amax: float | None = 0.001,
    strewn: bool = True,
) -> Arguments:
    """``size``: values that are rotated together; ``kind``: of signs; ``out``: "x", its dtype, "float32", or
    nothing."""
    return {
        "x": s.put(drawn(s, m, n, s.dtype)) if strewn else s.normal(m, n),
        "out": s.output(m, n, dtype=float32 if out == "float32" else s.dtype) if out else None,
        "amax": s.scalar(amax),
        "n": size,
        "signs": kind,
        "along": along,
        "rng": s.rng() if kind == "random" else None,
    }


def rotate_oracle(a: Any) -> Results:
    """``blocks.hadamard``, one rounding."""
    values = rotated(a.x, a.n, a.signs, a.along, a.rng)
    found: Results = {} if a.amax is None else {"amax": np.maximum(a.amax, largest(values))}
    return found if a.out is None else {**found, "out": values.astype(a.out.dtype)}


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
) -> Arguments:
    """``rule``: rceil for mx_* and moss_*, and exact for others where it is not named; ``size``, ``kind``: of
    a rotation; ``only``: the outputs, else all but ``inside``; ``amax``: the tensor's."""
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
        "tensor_amax": _amaxes(s, found if amax is None else amax, lines) if two_levels else None,
        "quantizer": quantizer,
        "along": along,
        "draw": draw,
        "rng": s.rng() if quantizer.needs_rng else None,
        "inside": s.output(m, n, dtype=uint8) if inside else None,
    }


def rotate_back(
    s: Sampler,
    m: int,
    n: int,
    size: int = 16,
    kind: str = "plus",
    along: int = 1,
    out: str = "x",
    mask: bool = False,
    strewn: bool = True,
) -> Arguments:
    """``mask``: whether some elements count as 0; else as ``rotate``."""
    return {
        "x": s.put(drawn(s, m, n, s.dtype)) if strewn else s.normal(m, n),
        "out": s.output(m, n, dtype=float32 if out == "float32" else s.dtype),
        "inside": s.put((s.random.random((m, n)) > 0.2).astype(np.uint8), uint8) if mask else None,
        "n": size,
        "signs": kind,
        "along": along,
        "rng": s.rng() if size and kind == "random" else None,
    }


def rotate_back_oracle(a: Any) -> Results:
    """The rotation without signs is its own reverse; theirs follows."""
    x = a.x.astype(np.float32)
    x = x if a.inside is None else np.where(a.inside != 0, x, np.float32(0))
    values = rotated(x, a.n, "plus", a.along, None)
    whole = values.shape[a.along] // a.n * a.n if a.n else 0
    own = signs(a.signs, whole, a.rng)
    factors = rules.signs_of(own, whole)
    values = values if a.along else values.T
    values[:, :whole] *= factors
    return {"out": (values if a.along else values.T).astype(a.out.dtype)}


def _amaxes(s: Sampler, amax: float, lines: int) -> ArrayView:
    """One amax, or one for each line, up to 2^30 times smaller."""
    factors = 2.0 ** -s.random.integers(0, 30, lines) if lines > 1 else np.ones(lines)
    with np.errstate(over="ignore"):
        return s.put((amax * factors).astype(np.float32))


def _tried(x: Array, a: Any, tile: Tile) -> Any:
    """(codes, scale, scale_inv) of the tiles of x, row-major, by ``blocks.four_over_six``."""
    how: Quantizer = a.quantizer
    found: list[Array] = []
    amaxes: list[Any] = []
    for i in range(0, x.shape[0], tile[0]):
        for j in range(0, x.shape[1], tile[1]):
            block = np.zeros(tile, np.float32)
            part = x[i : i + tile[0], j : j + tile[1]]
            block[: part.shape[0], : part.shape[1]] = part
            found.append(block.reshape(1, -1) if how.tile[0] == 1 else block)
            amaxes.append(a.tensor_amax[i if a.along else j] if how.row_scaled else a.tensor_amax[0])
    if not found:
        return np.empty(0, np.uint8), *np.empty((2, 0), np.float32)
    amax = np.array(amaxes, np.float32) if how.row_scaled else a.tensor_amax[:1]
    return rules.four_over_six(np.array(found), amax, how.scale_rule, how.epsilon)[:3]


def _lines(x: Array, a: Any, tile: Tile) -> list[Array]:
    """The blocks of x, row-major, along their length, with zeros behind the matrix."""
    found = []
    for i in range(0, x.shape[0], tile[0]):
        for j in range(0, x.shape[1], tile[1]):
            block = np.zeros(max(tile), np.float32)
            part = x[i : i + tile[0], j : j + tile[1]].reshape(-1)
            block[: part.size] = part
            found.append(block)
    return found


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
        codes = rules.gauss_bytes(np.array(_lines(x, a, tile), np.float32).reshape(-1, how.tile[1]))
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
        if how.scale_rule in FOUR_OVER_SIX:
            codes, scale, inverse = _tried(x, a, tile)
        else:
            largest = a.tensor_amax
            if how.row_scaled:
                counts = -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])
                lying = largest.reshape(-1, 1) if a.along else largest.reshape(1, -1)
                largest = np.broadcast_to(lying, counts).reshape(-1)
            codes, scale, inverse, _ = rules.nvfp4_scales(amax, largest, fmt)
    else:
        scale = scale_of(amax, fmt.max, how.power_2, how.epsilon, formats.dtype(a.x.dtype).max)
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


_SHAPES = ((128, 128), (256, 384), (130, 70), (1, 1), (17, 129), (5, 512), (300, 40), (0, 64), (64, 0))
_ROTATIONS = {
    f"{size}-{kind}": {"size": size, "kind": kind}
    for size in (16, 32, 64, 128)
    for kind in ("plus", "te", "random")
}
_ROTATE = {
    **typed(
        product("along{along}-{case}", {"along": (1, 0), "case": sized(_SHAPES)}, size=32, kind="random")
    ),
    **product(
        "along{along}-{rotation}", {"along": (1, 0), "rotation": _ROTATIONS}, m=260, n=264, dtype=bfloat16
    ),
    **product(
        "{dtype.name}-along{along}-float32-out",
        {"dtype": (bfloat16, float16), "along": (1, 0)},
        m=150,
        n=200,
        out="float32",
    ),
    **product(
        "along{along}-{only}",
        {"along": (1, 0), "only": {"amax": {"out": ""}, "out": {"amax": None}}},
        m=70,
        n=96,
    ),
}

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
    **typed(product("{kind}-along{along}-{case}", {"kind": _LINES, "along": _BOTH, "case": sized(_SHAPES)})),
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
                "case": sized(_SHAPES[:-2]),
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
        {"rotation": _ROTATIONS, "kind": _LINES, "along": _BOTH},
        m=140,
        n=270,
        dtype=bfloat16,
    ),
    **typed(
        product(
            "hadamard-along{along}-{case}",
            {"along": _BOTH, "case": sized(_SHAPES)},
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
                "case": sized(_SHAPES),
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

_BACK = {
    **typed(
        product(
            "along{along}-{case}",
            {"along": (1, 0), "case": sized(_SHAPES)},
            size=32,
            kind="random",
            mask=True,
        )
    ),
    **product(
        "along{along}-{rotation}-{mask}",
        {
            "along": (1, 0),
            "rotation": {**_ROTATIONS, "none": {"size": 0}},
            "mask": {"masked": {"mask": True}, "all": {}},
        },
        m=150,
        n=264,
    ),
    **product(
        "{dtype.name}-along{along}-float32",
        {"dtype": (bfloat16, float16), "along": (1, 0)},
        m=150,
        n=200,
        out="float32",
        mask=True,
    ),
}

TESTS = (
    KernelTest("rotate", rotate, rotate_oracle, _ROTATE, {"strewn": False}),
    KernelTest("rotate_back", rotate_back, rotate_back_oracle, _BACK, {"strewn": False}),
    KernelTest("cast_blocks", cast_blocks, cast_blocks_oracle, _CAST, {"strewn": False}),
)
