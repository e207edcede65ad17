"""``quantize``: arrays of any library as codes of a narrow format with scales.

``value = decode(code) * scale_inv``, one scale a tensor, a row or a block (Micikevicius et al. 2022, FP8
Formats for Deep Learning, for the scale of a tensor; DeepSeek-V3 technical report, 2024, 3.3.2, for 1x128 and
128x128 blocks; OCP Microscaling Formats 1.0 for mx; NVIDIA, Pretraining Large Language Models with NVFP4,
arXiv 2509.25149). What it makes is a ``QuantizedArray``; ``Float8Tensor`` is its former name.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arguments import choice, flag, integer, is_integer, named_well, shown
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends import dispatch
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import E2M1, E4M3
from fp8kit.quantization import FOUR_OVER_SIX, MX_RULES, ROTATIONS, SIGNS, TILES, Quantizer
from fp8kit.quantized_array import QuantizedArray, of_views
from fp8kit.tiles import Rotation, along_of, cast_rotated, tiling, whole_amax

__all__ = ["Float8Tensor", "QuantizedArray", "quantize"]

Float8Tensor = QuantizedArray

_RULES = {"mx": ("power_2", *MX_RULES), "nvfp4": ("exact", *FOUR_OVER_SIX)}  # of others "exact" and "power_2"
_quantizer = lru_cache(maxsize=256)(Quantizer)
_BITS = 32  # of stochastic rounding, where nothing is said
_FLOAT32_MAX = formats.float32.max
_FLOATS = ("float32", "bfloat16", "float16", "float64")  # dtypes that are quantised
_QUANTISED = f"one of {', '.join(_FLOATS)}"


@named_well
def quantize(
    x: Any,
    format: Any = None,
    scale: Any = None,
    scaling: str = "tensor",
    rounding: str = "nearest",
    saturate: bool = True,
    rng: Any = None,
    *,
    scale_rule: str | None = None,
    stochastic_bits: int = _BITS,
    along: int = -1,
    hadamard: int = 0,
    signs: str = "plus",
) -> QuantizedArray:
    """``encode(x * scale)`` as a QuantizedArray of x's library and device.

    * ``x``: array of float32, bfloat16, float16 or float64; its last dimension is a row, the leading ones are
      the rows. A float64 array is first rounded to float32.
    * ``format``: a Format, its name, or a dtype of its codes (``ml_dtypes.float8_e5m2``, say); E4M3 by
      default, E2M1 of NVFP4. E8M0, the format of scales, has no sign: negative values
      become NaN, and zero its smallest value, 2^-127.
    * ``scale``: float32, one for each tile: a number or 1 element ("tensor"), one a row ("row"), or the grid
      of blocks; positive and finite, and so must 1 / scale be in float32 (above 2^-128; of an array on a GPU
      the values are not checked). None: current scaling by ``scale_rule``.
    * ``scaling``: "tensor", "row", or blocks of rows x columns, 1xN or NxN (tiles at the edges are smaller):
      "block_1x128" with float32 scales, "mx_1x32" with E8M0 scales, N 16, 32, 64 or 128; "nvfp4_1x16",
      "nvfp4_16x16" with E4M3 scales, and one of the tensor; "nvfp4_row_1x16" with one of each row.
    * ``scale_rule``: "exact", ``format.max / amax`` (1 where amax is 0, Inf or NaN); "power_2", that rounded
      down to a power of two; of mx also "floor", "ceil", "even", "rceil" and "te", the rules of E8M0 scales
      (``fp8kit.blocks.scale_bytes`` says them), where NaN makes its whole block NaN; of NVFP4 "exact", its
      two levels (``fp8kit.blocks.nvfp4_scales``), or "4over6_mae", "4over6_mse", "4over6_mae_256",
      "4over6_mse_256", of E2M1 to nearest (``fp8kit.blocks.four_over_six``). None: "exact" for "tensor",
      "row" and NVFP4, else "power_2".
    * ``rounding``: "nearest" (ties to even), or "stochastic" with ``rng``, int64 (seed, offset) of
      Philox4x32-10, neither negative, by so many random bits an element: ``stochastic_bits``, 1 to 32.
    * ``saturate``: beyond the largest finite value, and Inf, become it; else Inf, or NaN where the format has
      no Inf. NaN stays NaN, and in a format without NaN becomes the largest value.
    * ``along``: 0, rows and blocks are transposed: they lie along the first dimension (of the rows that all
      leading dimensions make), as the product with a transposed array wants them; so does the rotation.
    * ``hadamard``: 16, 32, 64 or 128: so many neighbours are first rotated by a Hadamard matrix, in float32;
      ``signs`` of its columns: "plus", "te" (Transformer Engine's 16) or "random" (by ``rng``). Products of
      operands that were rotated alike are those of the unrotated ones, and ``dequantize`` rotates back.

    Raises FormatError for a dtype, scaling, rule, rounding, scale or format that does not fit, and for
    ``stochastic_bits`` or ``signs`` that would have no effect, ShapeError for a scale of another shape.
    """
    view = _floats(x)
    rows = arrays.contiguous(view).rows()
    lies = 1 if type(along) is int and along == -1 else along_of("quantize", along)
    tile, grid = tiling(scaling, rows.shape, lies)
    kind = scaling.partition("_")[0]
    if format is None:
        format = E2M1 if kind == "nvfp4" else E4M3
    else:
        format = formats.number_format(format, "quantize")
    saturate = flag("quantize", "saturate", saturate, FormatError)
    if not saturate and format.nan_code is None:
        raise FormatError("quantize", "saturate", f"False for {format}, which has no Inf and no NaN", "True")
    rule = _rule(scale_rule, kind)
    want_rotation(hadamard, signs)
    where, random = view.device, bool(hadamard) and signs == "random"
    state = _rng(rounding, rng, random, where)
    bits = integer("quantize", "stochastic_bits", stochastic_bits, 1, 32, FormatError)
    if rounding == "nearest":
        _no_effect(
            "stochastic_bits", bits, _BITS, "rounding 'nearest'", "rounding='stochastic', which takes it"
        )
        bits = 0
    if not hadamard:
        _no_effect("signs", signs, "plus", "hadamard=0", "hadamard=16 or more, which takes it")
    if rule in FOUR_OVER_SIX and (bits or hadamard or format != E2M1):
        got = f"{rule!r} with {format}, {rounding!r}, hadamard={hadamard}"
        raise FormatError("quantize", "scale_rule", got, "E2M1, to nearest, without a rotation")
    rotation = None
    if hadamard:
        rotation = Rotation(hadamard, signs, arrays.duplicate(state) if random and state else None)
    kernels, stream = dispatch.kernels(where), arrays.current_stream(where)
    codes = arrays.empty(view.shape, formats.uint8, where)
    scale_inv = arrays.empty(grid, formats.float32, where)
    scale_codes = tensor_scale = None
    codes_of_scales = kind == "nvfp4" or rule in MX_RULES
    if codes_of_scales and scale is not None:
        raise FormatError("quantize", "scale", shown(scale), f"None with scales by {rule!r} of {scaling}")
    if codes_of_scales and not saturate:
        raise FormatError("quantize", "saturate", "False", f"True with scales by {rule!r} of {scaling}")
    # a cast of its own also where the plain one would look at columns, or at an array rotated before
    fused = kind in ("block", "mx") and (hadamard or not lies) and scale is None and saturate and rows.size
    if codes_of_scales or fused:
        # power_2 of mx is that of blocks
        blocks = scaling if codes_of_scales else f"block{scaling[len(kind) :]}"
        quantizer = _quantizer(format, blocks, "current", rule, 0.0, 1.0, bits, hadamard, signs)
        target = codes.reshape(*rows.shape)
        scale_codes, tensor_scale = _by_rule(rows, target, scale_inv, quantizer, lies, state, kernels, stream)
    elif hadamard and kind == "tensor" and scale is None and saturate and rows.size:
        own = _quantizer(format, scaling, "current", rule, 0.0, 1.0, bits, hadamard, signs)
        amax, factor = (arrays.empty((1,), formats.float32, where) for _ in range(2))
        source, three = _high_precision(rows, kernels, stream), (amax, factor, scale_inv)
        cast_rotated(kernels, source, codes.reshape(*rows.shape), None, three, own, lies, 0, state, stream)
    else:
        if hadamard and rows.size:
            source, drawn = _high_precision(rows, kernels, stream), state if random else None
            rows = arrays.empty(rows.shape, formats.float32, where)
            kernels.rotate(source, rows, None, hadamard, signs, lies, drawn, stream)
        if scale is None:
            factors = arrays.empty(grid, formats.float32, where)
            amax = arrays.zeros(grid, formats.float32, where)
            kernels.amax(rows, amax, tile, stream)
            # what a block's scale is where format.max / amax overflows: the largest value of x's dtype, as
            # Transformer Engine has it
            for_inf = min(view.dtype.max, _FLOAT32_MAX) if kind == "block" else _FLOAT32_MAX
            power_2 = rule == "power_2"
            kernels.scale_from_amax(amax, factors, scale_inv, format.max, power_2, 0.0, for_inf, stream)
        else:
            factors = _scale(scale, grid, where)
        results = codes.reshape(*rows.shape), factors, scale_inv, None
        kernels.quantize(rows, *results, format, tile, saturate, bits, 0, state if bits else None, stream)
    how = format, scaling, None if scale is not None else rule, lies, rotation
    return of_views(codes, scale_inv, x, *how, scale_codes, tensor_scale)


def _floats(x: Any) -> ArrayView:
    """Returns the view of an array that is cast. FormatError for others."""
    if isinstance(x, QuantizedArray):
        got = f"a QuantizedArray of {x.format}"
        raise FormatError("quantize", "x", got, f"{_QUANTISED}: x.dequantize() has such values")
    try:
        view = arrays.as_view(x, "quantize", "x")
    except FormatError:
        if not hasattr(x, "dtype") or str(x.dtype).removeprefix("torch.") in _FLOATS:
            raise
        raise FormatError("quantize", "x", x.dtype, _QUANTISED) from None
    if view.dtype.name not in _FLOATS:  # of the dtypes that arrays may have this takes few
        raise FormatError("quantize", "x", view.dtype.name, _QUANTISED)
    return view


def _rule(rule: Any, kind: str) -> str:
    """Returns the rule of the scales of "tensor", "row", "block", "mx" or "nvfp4"."""
    if rule is None:
        return "power_2" if kind in ("block", "mx") else "exact"
    known = _RULES.get(kind, ("exact", "power_2"))
    return choice("quantize", "scale_rule", rule, known, FormatError)


def want_rotation(hadamard: Any, signs: Any) -> None:
    """FormatError for a rotation that there is not."""
    if not isinstance(hadamard, int) or isinstance(hadamard, bool) or hadamard not in (0, *ROTATIONS):
        raise FormatError("quantize", "hadamard", shown(hadamard), f"one of {(0, *ROTATIONS)}")
    choice("quantize", "signs", signs, SIGNS, FormatError)


def _no_effect(name: str, value: Any, usual: Any, why: str, wanted: str) -> None:
    """FormatError for an argument that has no effect beside another one, and is not its default."""
    if value != usual:
        raise FormatError("quantize", name, f"{shown(value)} with {why}", wanted)


def _high_precision(rows: ArrayView, kernels: Any, stream: int) -> ArrayView:
    """float64 as float32, others as they are."""
    if rows.dtype in formats.HIGH_PRECISION:
        return rows
    narrow = arrays.empty(rows.shape, formats.float32, rows.device)
    kernels.copy(rows, narrow, stream)
    return narrow


def _by_rule(
    rows: ArrayView,
    codes: ArrayView,
    scale_inv: ArrayView,
    quantizer: Quantizer,
    along: int,
    state: ArrayView | None,
    kernels: Any,
    stream: int,
) -> tuple[ArrayView | None, ArrayView | None]:
    """Write the codes of a matrix and their scales by the kernel ``cast_blocks``. Returns the codes of the
    scales and the scale of the tensor, where there are such."""
    where, kind = rows.device, quantizer.granularity.partition("_")[0]
    two_levels = kind == "nvfp4"
    scale_codes = None if kind == "block" else arrays.empty(scale_inv.shape, formats.uint8, where)
    rows = _high_precision(rows, kernels, stream)
    random = state if quantizer.hadamard and quantizer.signs == "random" else None
    amax = tensor_scale = None
    if two_levels:
        lines = max(rows.shape[1 - along], 1) if quantizer.row_scaled else 1
        amax = arrays.zeros((lines,), formats.float32, where)
        tensor_scale = arrays.empty((lines,), formats.float32, where)
        if rows.size:
            lines_rotated = quantizer.hadamard and quantizer.row_scaled
            rotated = arrays.empty(rows.shape, formats.float32, where) if lines_rotated else None
            whole_amax(kernels, rows, quantizer, along, amax, rotated, random, stream)
        else:  # an amax of 0
            arrays.copy(tensor_scale, np.ones(lines, np.float32))
    drawn = state if quantizer.stochastic_bits else random
    results = codes, scale_inv, scale_codes, None, amax, tensor_scale
    kernels.cast_blocks(rows, *results, quantizer, along, 0, drawn, None, stream)
    if scale_codes is not None and not rows.size:  # no tile, but its scale: that of zeros
        arrays.zero_(scale_codes)
        inverse = 0.0 if two_levels else 2.0**-127
        arrays.copy(scale_inv, np.full(scale_inv.shape, inverse, np.float32))
    return scale_codes, tensor_scale


def _rng(rounding: str, rng: Any, random_signs: bool, where: arrays.Device) -> ArrayView | None:
    choice("quantize", "rounding", rounding, ("nearest", "stochastic"), FormatError)
    if (rng is None) != (rounding == "nearest" and not random_signs):
        if rng is None:
            wanted = 'a seed and an offset, such as rng=(0, 0), for rounding="stochastic" or random signs'
        else:
            wanted = 'None with rounding="nearest" and no random signs, which draw nothing'
        raise FormatError("quantize", "rng", shown(rng), wanted)
    if rng is None:
        return None
    if is_integer(rng):
        raise FormatError("quantize", "rng", rng, f"int64 (seed, offset): rng=({abs(rng)}, 0)")
    if isinstance(rng, tuple | list):
        numbers = [integer("quantize", "rng", value, 0, 2**63 - 1, FormatError) for value in rng]
        rng = np.array(numbers, np.int64)
    state = arrays.as_view(rng, "quantize", "rng")
    if state.dtype is not formats.int64 or state.size != 2:
        raise FormatError("quantize", "rng", f"{state.dtype.name} {state.shape}", "int64 (seed, offset)")
    if state.device.kind == "cpu" and (state.numpy() < 0).any():
        raise FormatError("quantize", "rng", state.numpy().tolist(), "no negative seed or offset")
    return arrays.to(arrays.contiguous(state), where)


def _scale(scale: Any, grid: Shape, where: arrays.Device) -> ArrayView:
    if isinstance(scale, str):
        hint = f": scaling={scale!r} says how" if scale in TILES else ""
        raise FormatError("quantize", "scale", shown(scale), f"numbers, or an array of float32{hint}")
    own = isinstance(scale, int | float | np.generic | list | tuple)
    view = arrays.as_view(_numbers(scale) if own else scale, "quantize", "scale")
    # one a row may also come with the rows' own leading dimensions; blocks must come as their grid
    fits = view.size == math.prod(grid) and (view.shape == grid or 1 in grid[-1:])
    if view.dtype is not formats.float32:
        raise FormatError("quantize", "scale", view.dtype.name, "float32")
    if not fits:
        raise ShapeError("quantize", "scale", f"shape {view.shape}", f"shape {grid}")
    if view.device.kind == "cpu":
        with np.errstate(all="ignore"):
            fit = np.isfinite(view.numpy()) & (view.numpy() > 0) & np.isfinite(1 / view.numpy())
        if not fit.all():
            wanted = "finite positive float32 numbers whose inverse is finite too (above 2^-128 = 2.94e-39)"
            raise FormatError("quantize", "scale", shown(scale), wanted)
    return arrays.to(arrays.contiguous(view), where).reshape(*grid)


def _numbers(scale: Any) -> np.ndarray[Any, Any]:
    """Numbers of Python or NumPy as float32; FormatError for others, a bool among them."""
    try:
        given = np.asarray(scale)
        if given.dtype.kind in "iuf" and not isinstance(scale, bool):
            with np.errstate(all="ignore"):
                return given.astype(np.float32)
    except (TypeError, ValueError, OverflowError):  # nested unevenly
        pass
    raise FormatError("quantize", "scale", shown(scale), "numbers, or an array of float32")
