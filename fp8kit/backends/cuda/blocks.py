"""Casts by blocks of any rule, and rotations."""

from __future__ import annotations

import functools
import math
import struct

import numpy as np

from fp8kit import blocks as rules
from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.backends.cuda.quantize import format_name, narrow
from fp8kit.formats import E2M1, DType, Format, float32
from fp8kit.quantization import EDEN, FOUR_OVER_SIX, GAUSS, Quantizer

_THREADS = 256
_LINES = 32  # rows of 128 columns that a block of rotate_lines takes
_SPAN, _PANEL = 128, 64  # rows and columns of a panel
_ROTATION = struct.Struct("=3if")  # raw_kernels/blocks.cuh
_REST = struct.Struct("=16i9f")  # of raw_kernels/blocks_cast.cuh's BlockCast, behind the format and that
# ROUTE -> number of the route
_ROUTES = {"e4m3": 0, "e5m2": 1, "steps": 2, "general": 3}
_KINDS = {"mx": 0, "nvfp4": 1, "block": 2, "moss": 3}
_FOURS = {"mae": 1, "mse": 2}


def _rotation(n: int, signs: str) -> bytes:
    """Returns the sources' ``Rotation``."""
    flips = 0
    if signs == "te":
        flips = sum(1 << k for k, sign in enumerate(rules.TE_SIGNS) if sign < 0)
    return _ROTATION.pack(n, signs == "random", flips, 1 / math.sqrt(n) if n else 0.0)


def _route(fmt: Format) -> str:
    """Returns what makes the codes of a format."""
    name = format_name(fmt)
    if name is not None:
        return name
    return "steps" if fmt.signed and fmt.zero and fmt.mantissa_bits and fmt.bias <= 64 else "general"


@functools.cache
def _cast(quantizer: Quantizer, dtype: DType, inside: bool) -> tuple[str, bytes]:
    """(the define ROUTE, the sources' ``BlockCast``) of a quantizer and x's dtype; ``inside``: whether it is
    said which elements were not clipped. RecipeError for blocks or a rule that there are not."""
    kind, rule, fmt = rules.kind_of(quantizer), quantizer.scale_rule, quantizer.format
    down = quantizer.ties == "down"
    route, bits = _route(fmt), 32 if down else quantizer.stochastic_bits
    rows, columns = quantizer.tile
    four = _FOURS[rule.split("_")[1]] if rule in FOUR_OVER_SIX else 0
    with np.errstate(over="ignore", divide="ignore"):
        largest = np.float32(fmt.max)
        inverse = np.float32(1) / largest
    bound = rules.tensor_bound(quantizer) * fmt.max
    rest = _REST.pack(
        _ROUTES[route],
        _KINDS[kind],
        columns,
        columns.bit_length() - 1,
        rows > 1,
        rule in ("rceil", "te"),
        rules.even_addend(fmt) if rule == "even" else 0,
        rule == "ceil",
        rules.largest_exponent(fmt),
        0xFE if rule == "te" else 0xFF,
        quantizer.power_2,
        quantizer.row_scaled,
        four,
        down,
        rule == GAUSS,
        rule == EDEN,
        largest,
        inverse,
        quantizer.epsilon,
        dtype.max,
        bound if bound <= float32.max else math.inf,
        quantizer.factor,
        rules.factor_inverse(quantizer),
        rules.GAUSS_MOST / E2M1.max,
        rules.GAUSS_LEAST,
    )
    packed = narrow(fmt, True, bits) + _rotation(quantizer.hadamard, quantizer.signs) + rest
    if inside or quantizer.levers or kind == "moss" or rule in (GAUSS, EDEN):
        return "levers", packed
    if bits or route == "general" or fmt.twos_complement:
        return "any", packed
    if four or quantizer.row_scaled:
        return "four" if fmt == E2M1 else "any", packed
    return "e2m1" if fmt == E2M1 else route, packed


def _turn(
    source: str,
    stem: str,
    x: ArrayView,
    out: ArrayView | None,
    beside: tuple[ArrayView | None, ...],
    how: bytes,
    along: int,
    stream: int,
) -> None:
    """Launch ``STEM_lines`` or ``STEM_columns``. ``beside``: the arrays after x and out."""
    rows, columns = x.shape
    if not x.size:
        return
    if along:
        name, grid = f"{stem}_lines", ceil_div(rows, _LINES) * ceil_div(columns, _SPAN)
    else:
        name, grid = f"{stem}_columns", ceil_div(rows, _SPAN) * ceil_div(columns, _PANEL)
    function = kernel(source, name, x, OUT=launch.type_name((x if out is None else out).dtype))
    pointers = (x.ptr, *map(address, (out, *beside)))
    launch.launch(function, grid, _THREADS, (*pointers, rows, columns, how), stream)


def rotate(
    x: ArrayView,
    out: ArrayView | None,
    amax: ArrayView | None,
    n: int,
    signs: str,
    along: int,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    _turn("blocks_rotate.cu", "rotate", x, out, (amax, rng), _rotation(n, signs), along, stream)


def rotate_back(
    x: ArrayView,
    out: ArrayView,
    inside: ArrayView | None,
    n: int,
    signs: str,
    along: int,
    rng: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    _turn("blocks_back.cu", "back", x, out, (inside, rng), _rotation(n, signs), along, stream)


def cast_blocks(
    x: ArrayView,
    q: ArrayView | None,
    scale_inv: ArrayView | None,
    scale_codes: ArrayView | None,
    values: ArrayView | None,
    tensor_amax: ArrayView | None,
    tensor_scale_inv: ArrayView | None,
    quantizer: Quantizer,
    along: int,
    draw: int,
    rng: ArrayView | None,
    inside: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. RecipeError for a quantizer of other blocks or rules."""
    rows, columns = x.shape
    whole = tensor_amax is not None and not quantizer.two_level
    route, packed = _cast(quantizer, float32 if whole else x.dtype, inside is not None)
    # squares are the same along both dimensions, but for rotations
    square = quantizer.tile[0] > 1
    lines = bool(along) or (square and not quantizer.hadamard)
    width = _SPAN if lines or square else _PANEL
    function = kernel("blocks_cast.cu", "cast_lines" if lines else "cast_columns", x, ROUTE=route)
    outputs = (q, scale_inv, scale_codes, values, tensor_amax, tensor_scale_inv, rng, inside)
    grid = ceil_div(rows, _SPAN) * ceil_div(columns, width)
    arguments = (x.ptr, *map(address, outputs), rows, columns, draw, packed)
    launch.launch(function, max(grid, 1), _THREADS, arguments, stream)
