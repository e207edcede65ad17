"""What a cast of any kind gives, step by step in NumPy: ``fp8kit.blocks`` for scales and rotations,
``fp8kit.codec`` for codes, Philox by the book for random bits. And strategies that draw such casts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import blocks, codec, formats
from fp8kit.errors import Fp8kitError
from fp8kit.formats import E2M1, Format
from fp8kit.quantization import FOUR_OVER_SIX, MX_RULES, ROTATIONS, SIGNS, TILES
from fp8kit.testing.contract.dropout import philox
from fp8kit.testing.contract.rotations import rotated

Array = np.ndarray[Any, Any]
NAMED = list(formats.FORMATS.values())
_MOST = np.finfo(np.float32).max
KINDS = ("tensor", "row", "block", "mx", "nvfp4_1", "nvfp4_row")


@st.composite
def any_format(draw: Any) -> Format | None:
    """Returns a format, or None where there is none of these bits."""
    exponent = draw(st.integers(0, 8))
    usual = max(2 ** (exponent - 1) - 1 if exponent else 0, 0)
    given = {
        "exponent_bits": exponent,
        "mantissa_bits": draw(st.integers(-1, 7 - min(exponent, 7)) | st.integers(0, 7)),
        "bias": draw(st.sampled_from([usual, usual + 1]) | st.integers(-1, 130)),
        "special": draw(st.sampled_from(["none", "fn", "ieee"])),
        "signed": draw(st.integers(0, 3)) > 0,
        "zero": draw(st.integers(0, 3)) > 0,
        "twos_complement": draw(st.integers(0, 9)) == 0,
    }
    try:
        return Format("drawn", **given)
    except Fp8kitError:
        return None


@dataclass(frozen=True)
class How:
    """How ``fk.quantize`` is told to cast."""

    format: Format
    scaling: str = "tensor"
    rule: str | None = None
    bits: int = 0
    along: int = 1
    hadamard: int = 0
    signs: str = "plus"
    seed: int = 0

    @property
    def kind(self) -> str:
        return self.scaling.partition("_")[0]

    @property
    def row_scaled(self) -> bool:
        """Whether rows have what a tensor has."""
        return self.scaling.startswith("nvfp4_row")

    def but(self, **changes: Any) -> How:
        """Returns the same but for some fields, without the choice between two scales where these do not fit
        it."""
        found = replace(self, **changes)
        fits = found.format == E2M1 and not found.bits and not found.hadamard
        return replace(found, rule=None) if found.rule in FOUR_OVER_SIX and not fits else found

    @property
    def rng(self) -> Array | None:
        """(seed, offset), where the cast draws."""
        random = self.bits or (self.hadamard and self.signs == "random")
        return np.array([self.seed, 7]) if random else None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``fk.quantize``."""
        found = {"format": self.format, "scaling": self.scaling, "scale_rule": self.rule, "along": self.along}
        if self.hadamard:
            found |= {"hadamard": self.hadamard, "signs": self.signs}
        if self.bits:
            found |= {"rounding": "stochastic", "stochastic_bits": self.bits}
        return found if self.rng is None else found | {"rng": tuple(self.rng.tolist())}

    def cast(self, x: Any) -> fk.QuantizedArray:
        """``fk.quantize``."""
        return fk.quantize(x, **self.options)


def hows(kind: str = "", **fixed: Any) -> st.SearchStrategy[How]:
    """Casts of all formats, tiles, rules, roundings, rotations and orientations, but for what is fixed;
    ``kind``: of ``KINDS``, of tiles whose name begins so."""
    tiles = [name for name in TILES if name.startswith(kind)]

    @st.composite
    def drawn(draw: Any) -> How:
        fmt = draw(st.sampled_from(NAMED))
        if draw(st.booleans()):
            fmt = draw(any_format()) or fmt
        scaling = draw(st.sampled_from(tiles))
        own = {"mx": (None, "power_2", *MX_RULES), "nvfp4": (None, "exact", *FOUR_OVER_SIX)}
        rules = own.get(scaling.partition("_")[0], (None, "exact", "power_2"))
        rule = draw(st.sampled_from(rules))
        given = {
            "format": fmt,
            "scaling": scaling,
            "rule": rule,
            "bits": draw(st.sampled_from([0, 0, 1, 3, 8, 32])),
            "along": draw(st.integers(0, 1)),
            "hadamard": draw(st.sampled_from([0, 0, *ROTATIONS])),
            "signs": draw(st.sampled_from(SIGNS)),
            "seed": draw(st.integers(0, 2**40)),
        }
        if rule in FOUR_OVER_SIX:
            given |= {"format": E2M1, "bits": 0, "hadamard": 0}
        return How(**given).but(**fixed)

    return drawn()


class Expected(NamedTuple):
    """What a cast gives, everything of the matrix as it lies. ``values``: decode(codes) * scale_inv, float32,
    of a rotated matrix rotated still."""

    codes: Array
    scale_inv: Array
    scale_codes: Array | None
    tensor_scale_inv: Array | None
    values: Array


def tile_of(how: How, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a tile."""
    rows, columns = TILES[how.scaling] if how.along else TILES[how.scaling][::-1]
    return rows or max(shape[0], 1), columns or max(shape[1], 1)


def spread(per_tile: Array, shape: tuple[int, int], tile: tuple[int, int]) -> Array:
    """One value a tile at each element."""
    down, across = np.indices(shape)
    return np.asarray(per_tile)[down // tile[0], across // tile[1]]


def _amax(x: Array, tile: tuple[int, int], keep_nan: bool) -> Array:
    """Returns the largest magnitude of each tile."""
    grid = tuple(max(1, -(-n // t)) for n, t in zip(x.shape, tile, strict=True))
    found = np.zeros(grid, np.float32)
    most = np.maximum if keep_nan else np.fmax
    for i in np.ndindex(grid):
        part = np.abs(x[tuple(slice(a * t, (a + 1) * t) for a, t in zip(i, tile, strict=True))])
        found[i] = most.reduce(part, axis=None, initial=np.float32(0))
    return found


def expected(x: Array, how: How) -> Expected:
    """Of a matrix x of float32, bfloat16, float16 or float64."""
    with np.errstate(all="ignore"):
        return _expected(x, how)


def _expected(x: Array, how: How) -> Expected:
    fmt, rule = how.format, how.rule
    wide = rotated(x.astype(np.float32), how.hadamard, how.signs, how.along, how.rng)
    tile = tile_of(how, x.shape)
    by_codes = how.kind == "nvfp4" or rule in MX_RULES
    amax = _amax(wide, tile, by_codes)
    scale_codes = tensor = None
    if how.kind == "nvfp4":
        lines = how.along if how.row_scaled else None
        whole = np.fmax.reduce(np.abs(wide), axis=lines, keepdims=True, initial=np.float32(0))
        scale_codes, scale, inverse, tensor = blocks.nvfp4_scales(amax, whole, fmt)
        tensor = np.asarray(tensor, np.float32).reshape(-1)
        if rule in FOUR_OVER_SIX:
            scale_codes, scale, inverse = _four_over_six(wide, whole, how)
            bound = blocks.scale_bound(rule)
            tensor = np.asarray(blocks.nvfp4_tensor_scale(whole, fmt, bound)[1], np.float32).reshape(-1)
    elif rule in MX_RULES:
        scale_codes = blocks.scale_bytes(amax, fmt, rule)
        scale, inverse = blocks.scales_of_bytes(scale_codes)
    else:
        usable = np.isfinite(amax) & (amax > 0)
        scale = np.where(usable, np.float32(fmt.max) / np.where(usable, amax, 1), np.float32(1))
        most = min(formats.dtype(x.dtype).max, _MOST) if how.kind == "block" else _MOST
        scale = np.where(np.isinf(scale), np.float32(most), scale.astype(np.float32))
        if rule == "power_2" or (rule is None and how.kind in ("block", "mx")):
            scale = (scale.view(np.uint32) & 0xFF800000).view(np.float32)
        inverse = np.float32(1) / scale
    scaled = wide * spread(scale, x.shape, tile).astype(np.float32)
    if how.bits:
        words = philox(how.rng, np.arange(x.size).reshape(x.shape)).astype(np.uint32)
        codes = codec.encode(scaled, fmt, "stochastic", True, words, how.bits)
    else:
        codes = codec.encode(scaled, fmt)
    values = codec.decode(codes, fmt).astype(np.float32) * spread(inverse, x.shape, tile)
    return Expected(codes, inverse.astype(np.float32), scale_codes, tensor, values)


def _four_over_six(x: Array, whole: Array, how: How) -> list[Array]:
    """Codes of scales, scales and inverses, one a tile, by the choice between two."""
    lying, high = x if how.along else x.T, TILES[how.scaling][0]
    down, across = (-(-n // tile) for n, tile in zip(lying.shape, (high, 16), strict=True))
    padded = np.zeros((down * high, across * 16), np.float32)
    padded[: lying.shape[0], : lying.shape[1]] = lying
    parts = padded.reshape(down, high, across, 16).swapaxes(1, 2).reshape(-1, high, 16)
    if high > 1 and not how.along:  # a square's rows are the matrix's own
        parts = parts.swapaxes(1, 2)
    most = np.repeat(whole.reshape(-1), across) if how.row_scaled else whole
    three = blocks.four_over_six(parts, most, str(how.rule))[:3]
    grids = (part.reshape(down, across) for part in three)
    return [np.ascontiguousarray(grid if how.along else grid.T) for grid in grids]
