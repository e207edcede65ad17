"""What a recipe's casts cost on given data: the error of each operand, and of y, dx and dW of a Linear,
against float64.

The operands are cast as the layer casts them, with the same random bits, so that their exact products are the
layer's results but for the sums and the results' own rounding. Of each are reported, for values v that stand
for x (numerator and denominator in float64)

* ``relative_error``: sqrt(sum (x - v)^2 / sum x^2), and ``sqnr_db``, the signal to quantisation noise ratio,
  10 log10(sum x^2 / sum (x - v)^2), in dB; 0 and None where there is no error, Inf and -Inf where there is
  one and every x is 0, as where the terms of a product cancel.
* ``clipped``: the share of elements with |x| > format.max * scale_inv, beyond what float32 rounds of it.
* ``flushed``: the share of elements that are not 0 and whose value is.

Of a product they are those of the whole matrix, which its largest rows decide; ``row_errors`` has the
median over the rows of each row's own relative error, sqrt(sum (x - v)^2 / sum x^2) along it, of rows that
are not 0.

A recipe whose scales follow from earlier steps is checked in its second step, on the data of the first: the
scales are those of the data's own amaxes, and what a scale that is a step late costs is not in the errors.

Of an operand that is cast from the values that fprop multiplied, the errors are against these. Of an operand
that is rotated before its cast all four are those of the rotated operand; a rotation is
orthogonal, so that the first two are those of the operand itself, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays, codec, formats, nn
from fp8kit.arguments import choice
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.formats import DType, float32
from fp8kit.ops.emulated_casts import scale_lines_of
from fp8kit.quantization import OPERANDS, Quantizer
from fp8kit.recipe import Recipe

HostArray = np.ndarray[Any, Any]

DISTRIBUTIONS = {
    "normal": "standard normal",
    "student_t": "Student's t of 3 degrees of freedom",
    "lognormal": "exp of a standard normal variable, with a random sign",
    "outliers": "standard normal, and one in a thousand has a normal variable of deviation 10 added to it",
}
_DEGREES = 3
_OUTLIERS, _DEVIATION = 1e-3, 10.0  # Shah et al. 2024, FlashAttention-3, section 4.3
# (GEMM, matrix) -> the number of the operand's random words (``ops.product_emulated``), and whether its
# contraction is the matrix's last dimension
_CASTS = {
    ("fprop", "x"): (0, 1),
    ("fprop", "w"): (1, 1),
    ("dgrad", "g"): (2, 1),
    ("dgrad", "w"): (3, 0),
    ("wgrad", "g"): (4, 0),
    ("wgrad", "x"): (5, 0),
}
_ROUNDED = 1 + 2.0**-22  # of a scale, its inverse and a product in float32


class Errors(NamedTuple):
    """What a cast, or a product, did to values; see the module."""

    relative_error: float
    sqnr_db: float | None
    clipped: float | None = None
    flushed: float | None = None


class Cast(NamedTuple):
    """An operand that was cast: float64 of the matrix's shape. ``source``: what was cast, after a rotation;
    ``values``: what its codes stand for; ``most``: the largest value that a code of the element's tile stands
    for."""

    source: HostArray
    values: HostArray
    most: HostArray


class Checked(NamedTuple):
    """The errors that a recipe makes: ``operands``: (GEMM, matrix) -> errors, None of one that is not cast;
    ``results``: "y", "dx", "dw" -> errors; ``plain``: likewise of the layer without the recipe; ``casts``:
    (GEMM, matrix) -> the operand; ``found``: the results, float64; ``row_errors``: "y" and "dx" -> the median
    over rows; ``step``: the step that was checked, 2 with scales from earlier steps, else 1."""

    operands: dict[tuple[str, str], Errors | None]
    results: dict[str, Errors]
    plain: dict[str, Errors]
    casts: dict[tuple[str, str], Cast | None]
    found: dict[str, HostArray]
    row_errors: dict[str, float]
    step: int


def drawn(kind: str, shape: Shape, seed: int, which: int) -> HostArray:
    """float32 of a shape, drawn from a distribution of ``DISTRIBUTIONS`` by NumPy's Philox with the key
    (seed, which). ArgumentError for another one."""
    choice("recipes", "--data", kind, DISTRIBUTIONS)
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, which))))
    if kind == "student_t":
        found = random.standard_t(_DEGREES, shape)
    elif kind == "lognormal":
        found = np.exp(random.standard_normal(shape)) * random.choice((-1.0, 1.0), shape)
    else:
        found = random.standard_normal(shape)
    if kind == "outliers":
        found += _DEVIATION * random.standard_normal(shape) * (random.random(shape) < _OUTLIERS)
    return found.astype(np.float32)


def errors(exact: HostArray, values: HostArray, most: HostArray | None = None) -> Errors:
    """Returns the errors of values that stand for exact ones, float64 of one shape; with ``most``, the
    largest value that each might have, the shares too."""
    signal, noise = float(np.sum(exact**2)), float(np.sum((exact - values) ** 2))
    relative, decibel = 0.0, None
    if noise:
        relative = math.sqrt(noise / signal) if signal else math.inf
        decibel = 10 * math.log10(signal / noise) if signal else -math.inf
    if most is None:
        return Errors(relative, decibel)
    flushed = (exact != 0) & (values == 0)
    clipped = (np.abs(exact) > most * _ROUNDED) & ~flushed
    return Errors(relative, decibel, float(clipped.mean()), float(flushed.mean()))


def row_error(exact: HostArray, values: HostArray) -> float:
    """Returns the median over rows, float64 (rows, columns), of the relative error of values that stand for
    exact ones; rows of zeros are left out, and without others it is 0."""
    signal, noise = (exact**2).sum(1), ((exact - values) ** 2).sum(1)
    rows = signal > 0
    return float(np.median(np.sqrt(noise[rows] / signal[rows]))) if rows.any() else 0.0


def check(
    recipe: Recipe, x: Any, w: Any, g: Any, dtype: Any = float32, device: Device | None = None, seed: int = 0
) -> Checked:
    """Returns the errors of a Linear under a recipe, y = x w^T, with the output gradient g.

    x (M, K), w (N, K), g (M, N): arrays of the host, rounded to ``dtype`` (float32, bfloat16, float16) first:
    what is reported is the recipe's error, not that of this rounding. ``device``: where the layer runs, None
    the default device. ``seed``: of stochastic rounding, with the offset 0. Scales of delayed scaling are
    those of a second step with the same data.

    Raises ShapeError for other shapes, ArgumentError for values that are not finite in ``dtype``, FormatError
    for another dtype; BackendError or UnsupportedError where the recipe does not run.
    """
    kind = formats.dtype(dtype, "check", "dtype", formats.HIGH_PRECISION)
    where = device or dispatch.default_device()
    matrices = {name: _matrix(name, value, kind) for name, value in (("x", x), ("w", w), ("g", g))}
    (m, k), (n, inner), shape = (matrices[name].shape for name in "xwg")
    if inner != k or shape != (m, n):
        got = ", ".join(f"{name} {matrix.shape}" for name, matrix in matrices.items())
        raise ShapeError("check", "shapes", got, "x (M, K), w (N, K), g (M, N)")
    words = np.array([seed, 0], np.int64)
    found, scales = _layer(recipe, matrices, kind, where, words)
    plain, _ = _layer(None, matrices, kind, where, words)
    wide = {name: matrix.astype(np.float64) for name, matrix in matrices.items()}
    exact = {"y": wide["x"] @ wide["w"].T, "dx": wide["g"] @ wide["w"], "dw": wide["g"].T @ wide["x"]}
    casts: dict[tuple[str, str], Cast | None] = {}
    for gemm, own in recipe.quantization.gemms.items():
        for matrix, side, quantizer in zip(OPERANDS[gemm], "ab", (own.a, own.b), strict=True):
            place = gemm, matrix
            if own.compute == "dequantized" and matrix != "g":
                casts[place] = casts["fprop", matrix]
            elif own.compute == "quantized" and own.plain != side:
                number, along = _CASTS[place]
                given = matrices[matrix]
                fprop = casts["fprop", matrix] if own.recast and matrix != "g" else None
                if fprop is not None:
                    given = fprop.values.astype((float32 if kind is formats.float16 else kind).numpy)
                source = arrays.to(given, where)
                earlier = scales.get(matrix) if quantizer.needs_state else None
                casts[place] = _cast(source, quantizer, along, number, words, earlier)
            else:
                casts[place] = None
    operands = {
        place: None if c is None else errors(c.source, c.values, c.most) for place, c in casts.items()
    }
    results = {name: errors(exact[name], found[name]) for name in exact}
    without = {name: errors(exact[name], plain[name]) for name in exact}
    rows = {name: row_error(exact[name], found[name]) for name in ("y", "dx")}
    return Checked(operands, results, without, casts, found, rows, 1 + (recipe.history is not None))


def _matrix(name: str, value: Any, kind: DType) -> HostArray:
    with np.errstate(over="ignore"):
        matrix = np.ascontiguousarray(np.asarray(value).astype(kind.numpy))
    if matrix.ndim != 2 or not matrix.size:
        raise ShapeError("check", name, f"shape {matrix.shape}", "a matrix, not empty")
    if not np.isfinite(matrix.astype(np.float32)).all():
        raise ArgumentError("check", name, "Inf or NaN", f"values that are finite in {kind.name}")
    return matrix


def _layer(
    recipe: Recipe | None, matrices: dict[str, HostArray], kind: DType, where: Device, words: HostArray
) -> tuple[dict[str, HostArray], dict[str, HostArray]]:
    """y, dx and dw of a Linear, float64; and where scales have state those of x, w and g, float32 [1]."""
    n, k = matrices["w"].shape
    layer: Any = nn.Linear(k, n, bias=False, params_dtype=kind, device=where)
    layer.load_state_dict({"weight": matrices["w"]})
    delayed = recipe is not None and recipe.history is not None
    scales: dict[str, HostArray] = {}
    for _ in range(1 + delayed):
        if delayed and "scaling_fwd" in layer.fp8_meta:
            forward, backward = (_scales(layer, state) for state in ("scaling_fwd", "scaling_bwd"))
            scales = {"x": forward[:1], "w": forward[1:2], "g": backward[:1]}
        layer.zero_grad()
        x = tensor(matrices["x"], requires_grad=True, device=where)
        with nn.draw_from(lambda device: tensor(words, device=where)):
            with autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(x)
            y.backward(tensor(matrices["g"], device=where))
    found = {"y": y, "dx": x.grad, "dw": layer.weight.grad}
    return {name: np.asarray(value.numpy()).astype(np.float64) for name, value in found.items()}, scales


def _scales(layer: Any, state: str) -> HostArray:
    return np.array(layer.fp8_meta[state].views["scale"].numpy())


def _cast(
    matrix: ArrayView,
    quantizer: Quantizer,
    along: int,
    number: int,
    words: HostArray,
    scale: HostArray | None,
) -> Cast:
    """Returns a matrix, h (rows, columns), as a layer casts it; ``number`` of its random words, ``scale``
    where an earlier step gave it."""
    where, shape = matrix.device, matrix.shape
    k, stream = dispatch.kernels(where), arrays.current_stream(where)
    source, rng = matrix, arrays.to(words, where)
    codes = arrays.empty(shape, formats.uint8, where)
    amax = arrays.zeros((1,), float32, where)
    if quantizer.hadamard:
        source = arrays.empty(shape, float32, where)
        signs = rng if quantizer.signs == "random" else None
        k.rotate(matrix, source, amax, quantizer.hadamard, quantizer.signs, along, signs, stream)
    else:
        k.amax(matrix, amax, shape, stream)
    high, wide = quantizer.tile if along else quantizer.tile[::-1]
    tile = high or shape[0], wide or shape[1]
    grid = -(-shape[0] // tile[0]), -(-shape[1] // tile[1])
    scale_inv = arrays.empty(grid, float32, where)
    if quantizer.granularity in ("tensor", "row"):
        factors = arrays.empty(grid, float32, where)
        amaxes = arrays.zeros(grid, float32, where)
        scale_lines_of(k, source, quantizer, tile, amaxes, factors, scale_inv, stream)
        if scale is not None:
            arrays.copy(factors, np.full(grid, scale[0], np.float32))
            arrays.copy(scale_inv, np.full(grid, np.float32(1) / scale[0], np.float32))
        bits = quantizer.stochastic_bits
        how = quantizer.format, tile, True, bits, number, rng if bits else None
        k.quantize(source, codes, factors, scale_inv, None, *how, stream)
    else:
        two_level = quantizer.two_level
        if quantizer.row_scaled:
            amax = arrays.zeros((shape[1 - along],), float32, where)
            k.amax(source, amax, (1, shape[1]) if along else (shape[0], 1), stream)
        inverse = arrays.empty(amax.shape, float32, where) if two_level else None
        random = rng if quantizer.needs_rng else None
        known = amax if two_level else None
        targets = codes, scale_inv, None, None, known, inverse
        k.cast_blocks(matrix, *targets, quantizer, along, number, random, None, stream)
    each = _host(scale_inv).astype(np.float64)
    each = each.repeat(tile[0], 0)[: shape[0]].repeat(tile[1], 1)[:, : shape[1]]
    values = codec.decode(_host(codes), quantizer.format).astype(np.float64) * each
    return Cast(_host(source).astype(np.float64), values, quantizer.format.max * each)


def _host(view: ArrayView) -> HostArray:
    return np.asarray(arrays.to(view, arrays.CPU).numpy())
