"""Scales of blocks, and rotations before the cast: what the rules mean, in plain NumPy.

A block's scale follows from its amax, the largest magnitude in it. The functions here say which scale, bit
for bit; the engines' fused cast (``Kernels.cast_blocks``) is tested against them. Amaxes are those of
``abs`` and ``max`` with NaN kept: a block that holds a NaN has the amax NaN.

Sources: OCP Microscaling Formats 1.0, section 6.3 (floor); torchao's ``ScaleCalculationMode`` (ceil, even);
cuBLAS's documentation, "1D Block Quantization" (rceil); NVIDIA, Pretraining Large Language Models with NVFP4,
arXiv 2509.25149, and Transformer Engine (NVFP4's two levels, the fixed signs); Quartet and Quartet II, below;
Cook et al. 2025, Four Over Six, arXiv 2512.02010, and Transformer Engine (its choice between two scales).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.arguments import choice, shown
from fp8kit.errors import ArgumentError, RecipeError, ShapeError
from fp8kit.formats import E2M1, E4M3, Format
from fp8kit.quantization import EDEN, FOUR_OVER_SIX, MX_RULES, Quantizer

Array = np.ndarray[Any, Any]

# Signs of the columns of the Hadamard matrix in Transformer Engine's random Hadamard transform, fixed there.
TE_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
# Random signs are drawn from the words of elements from here on of a generator's stream: no array has so
# many elements that its stochastic rounding gets there.
SIGNS_AT = 1 << 63

# the largest magnitude that a normal variable's best cast to E2M1 keeps, in deviations, and what is added to
# them (Quartet)
GAUSS_MOST, GAUSS_LEAST = 2.92247856, 1e-8
_NAN_BYTE, _MOST_BYTE = 0xFF, 0xFE
FLOAT32_MAX = np.finfo(np.float32).max


def kind_of(quantizer: Quantizer) -> str:
    """Returns what kind of scales a quantizer's blocks have: "mx", E8M0, "nvfp4", E4M3 below a scale of the
    tensor, "moss", E8M0 below one, or "block", float32. RecipeError where it has no blocks."""
    kind = quantizer.granularity.partition("_")[0]
    if kind in ("tensor", "row"):
        raise RecipeError(
            "Quantizer", "granularity", quantizer.granularity, "mx_*, nvfp4_*, moss_* or block_*"
        )
    return kind


def tile_of(quantizer: Quantizer, along: int) -> tuple[int, int]:
    """(rows, columns) of a quantizer's tiles on a matrix whose contraction is its last dimension, ``along``
    1, or its first, ``along`` 0."""
    rows, columns = quantizer.tile
    return (rows, columns) if along else (columns, rows)


def largest_exponent(fmt: Format) -> int:
    """Returns the exponent of a format's largest value: 8 for E4M3, 2 for E2M1."""
    return int(np.frexp(fmt.max)[1]) - 1


def even_addend(fmt: Format) -> int:
    """Returns what rule "even" adds to the bits of a float32 amax before it drops the mantissa: half a unit
    of a format's last place in the binade of its largest value, where fixed point has one bit fewer."""
    return 1 << (22 - fmt.mantissa_bits + (fmt.exponent_bits == 0))


def scale_bytes(amax: Any, fmt: Format, rule: str) -> Array:
    """Returns the E8M0 scales of blocks by a rule of ``quantization.MX_RULES``: uint8 like ``amax``, float32
    of any shape, at least 0. The byte B means that codes stand for values times 2^(B-127).

    With e and m the exponent and mantissa fields of amax, and emax the exponent of the format's largest value

    * "floor": ``e - emax``. Amaxes between the format's largest value and the next power of two saturate.
    * "ceil": one more where m > 0. "even": e of amax rounded to the format's mantissa bits, halves away from
      zero.
    * "rceil", "te": e of ``v = amax * (1 / max)``, both in float32, and one more where its m > 0: the least
      power of two with which nothing saturates. Where v is subnormal: 1 for v > 2^-127, else 0.

    What is less than 0 is 0, so it is for an amax of 0; what is more than 254 is 254. NaN is 255. Inf is 255
    as well, but for "te": 254.

    Raises ArgumentError for another rule.
    """
    choice("scale_bytes", "rule", rule, MX_RULES)
    largest = np.asarray(amax, np.float32)
    bits = largest.view(np.uint32).astype(np.int64)
    found = np.clip(_unlimited_byte(bits, largest, fmt, rule), 0, _MOST_BYTE)
    inf = _MOST_BYTE if rule == "te" else _NAN_BYTE
    found = np.where(np.isinf(largest), inf, np.where(np.isnan(largest), _NAN_BYTE, found))
    return found.astype(np.uint8)


def _unlimited_byte(bits: Array, amax: Array, fmt: Format, rule: str) -> Array:
    if rule in ("rceil", "te"):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            bits = (amax * (np.float32(1) / np.float32(fmt.max))).view(np.uint32).astype(np.int64)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        return np.asarray(exponent + (mantissa > np.where(exponent == 0, 0x400000, 0)))
    if rule == "even":
        bits = bits + even_addend(fmt)
    up = (bits & 0x7FFFFF) > 0 if rule == "ceil" else 0
    return np.asarray((bits >> 23) + up - largest_exponent(fmt))


def scales_of_bytes(scale_codes: Any) -> tuple[Array, Array]:
    """(scale, scale_inv) of E8M0 bytes, uint8 of any shape: 2^(127-B) and 2^(B-127), float32 of the same
    shape, both exact; NaN for 255."""
    exponent = np.asarray(scale_codes, np.uint8).astype(np.int32) - 127
    nan = exponent == 128
    one = np.where(nan, np.float32(np.nan), np.float32(1))
    exponent = np.where(nan, 0, exponent)
    return np.ldexp(one, -exponent), np.ldexp(one, exponent)


def gauss_bytes(blocks: Any) -> Array:
    """E8M0 scales of E2M1 by the rule "gauss" (Castro et al. 2025, Quartet, arXiv 2505.14669, and its code):
    uint8 (n,) of blocks (n, k), float32, k 16, 32, 64 or 128; what a block at the end lacks is 0.

    2^floor(log2(2.92247856 / 6 * deviation + 1e-8)), the power of two nearest below the scale that casts a
    normal variable with the least squared error: codes clip what is larger. deviation^2 = sum x^2 / k - (sum
    x / k)^2, at least 0. Each step in float32; the sums go from left to right over 16 neighbours each, and
    those are added as a tree: i and i + 1, then pairs of these. 255 where that is not finite.
    """
    x = np.asarray(blocks, np.float32)
    with np.errstate(all="ignore"):
        share = np.float32(1 / x.shape[1])
        squares, mean = _line_sums(x * x) * share, _line_sums(x) * share
        deviation = np.sqrt(np.maximum(squares - mean * mean, np.float32(0)))
        scale = np.float32(GAUSS_MOST / E2M1.max) * deviation + np.float32(GAUSS_LEAST)
    found = scale.view(np.uint32) >> np.uint32(23)
    return np.where(np.isfinite(scale), found, _NAN_BYTE).astype(np.uint8)


def _line_sums(x: Array) -> Array:
    """(n,): sums of blocks (n, k) in the order that ``gauss_bytes`` says."""
    lines = x.reshape(len(x), x.shape[1] // 16, 16)
    total: Array = np.zeros(lines.shape[:2], np.float32)
    for column in range(16):
        total = total + lines[..., column]
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total[:, 0]


def scale_bound(rule: str) -> float:
    """Returns the largest scale of a block that NVFP4's scale of the tensor allows for, by a rule: 448, 256,
    or, where it may grow afterwards, 255.99."""
    return 255.99 if rule == EDEN else 256.0 if rule.endswith("_256") else E4M3.max


def tensor_bound(quantizer: Quantizer) -> float:
    """Likewise by a quantizer; the scales of "moss" are at most 1."""
    return scale_bound(quantizer.scale_rule) if quantizer.granularity.startswith("nvfp4") else 1.0


def factor_inverse(quantizer: Quantizer) -> Any:
    """1 / ``factor`` in float32."""
    return np.float32(1) / np.float32(quantizer.factor)


def eden(
    x: Any, tensor_amax: Any, words: Any, group: int, epsilon: float = 0.0, factor: float = 1.0
) -> tuple[Array, Array, Array]:
    """NVFP4's scales by the rule "eden" (Panferov et al. 2026, Quartet II, arXiv 2601.22813, and its code):
    (codes, scale, value) of x (R, C), float32 that was rotated along its rows, in blocks of 16, each (R,
    ceil(C / 16)). tensor_amax: float32, one; words: uint32 like the results; group: 16, 32, 64 or 128, what
    was rotated together. Each step in float32, S and D by ``nvfp4_tensor_scale`` with 255.99 for 448 ::

        c     = E4M3(min(amax * (S * (1 / 6)), 448)), nearest even; 1 where that is 0; amax at least epsilon
        scale = min(1 / (c * D), float32's largest value) * factor, at most that value
        q     = E2M1(x * scale)                      to nearest even: what the codes will be
        t     = sum v^2 / sum (v * q), v = x * scale, of a group; 1 where that is not finite and positive
        codes = E4M3(min(c * t, 448))                stochastically, by the block's word
        value = of codes; the codes q stand for q * value * D / factor

    The sums go as in ``gauss_bytes``. The rounding to nearest shortens what it rounds, and t makes up for it:
    over random rotations the values' mean is x. (The authors' code breaks ties of q upwards.)
    """
    given = np.asarray(x, np.float32)
    rows, columns = given.shape
    across, per = -(-columns // 16), group // 16
    groups = -(-across // per)
    padded = np.zeros((rows, groups * group), np.float32)
    padded[:, :columns] = given
    blocks = padded.reshape(rows, groups * per, 16)
    tensor_scale, tensor_inverse = nvfp4_tensor_scale(
        np.asarray(tensor_amax).reshape(()), E2M1, scale_bound(EDEN)
    )
    with np.errstate(all="ignore"):
        amax = np.maximum(np.abs(blocks).max(2), np.float32(epsilon))
        base = np.minimum(amax * (tensor_scale * (np.float32(1) / np.float32(6))), np.float32(E4M3.max))
        first = codec.decode(codec.encode(base, E4M3), E4M3).astype(np.float32)
        first = np.where(first == 0, np.float32(1), first)
        scale = np.minimum(np.float32(1) / (first * tensor_inverse), FLOAT32_MAX)
        scale = np.minimum(scale * np.float32(factor), FLOAT32_MAX)
        v = blocks * scale[..., None]
        q = codec.decode(codec.encode(v, E2M1), E2M1).astype(np.float32)
        squares, products = (
            _line_sums(part.reshape(rows * groups, group)).reshape(rows, groups) for part in (v * v, v * q)
        )
        ratio = squares / products
        ratio = np.where((ratio > 0) & np.isfinite(ratio), ratio, np.float32(1))
        corrected = np.minimum(first * np.repeat(ratio, per, 1), np.float32(E4M3.max))[:, :across]
    codes = codec.encode(corrected, E4M3, "stochastic", True, np.asarray(words, np.uint32), 32)
    return codes, scale[:, :across], codec.decode(codes, E4M3).astype(np.float32)


def nvfp4_tensor_scale(tensor_amax: Any, fmt: Format = E2M1, bound: float = E4M3.max) -> tuple[Any, Any]:
    """NVFP4's scale of a tensor and its reciprocal, float32 like ``tensor_amax``: S = bound * format.max /
    amax, at most float32's largest value; 1 where the amax is 0, Inf or NaN. D = 1 / S."""
    amax = np.asarray(tensor_amax, np.float32)
    with np.errstate(all="ignore"):
        scale = np.minimum(np.float32(bound * fmt.max) / amax, FLOAT32_MAX)
        scale = np.where((amax > 0) & np.isfinite(amax), scale, np.float32(1))
        return scale, np.float32(1) / scale


def nvfp4_scales(block_amax: Any, tensor_amax: Any, fmt: Format = E2M1) -> tuple[Array, Array, Array, Any]:
    """NVFP4's two levels of scales: (codes, scale, scale_inv, tensor_scale_inv) of blocks in a tensor.

    block_amax: float32 of any shape; tensor_amax: float32, one, or one for each block that broadcasts. Every
    step in float32, S and D those of ``nvfp4_tensor_scale`` ::

        codes     = E4M3(min(block_amax * (S * (1 / format.max)), 448))      uint8, nearest even
        scale_inv = E4M3's value of the code * D
        scale     = min(1 / scale_inv, float32's largest value)

    NaN stays NaN; a block of zeros has the code 0, and so may one of small values: they become zeros when
    they are decoded.
    """
    amax = np.asarray(block_amax, np.float32)
    given = np.asarray(tensor_amax, np.float32)
    tensor_scale, tensor_scale_inv = nvfp4_tensor_scale(given.reshape(()) if given.size == 1 else given, fmt)
    factor = tensor_scale * (np.float32(1) / np.float32(fmt.max))
    with np.errstate(all="ignore"):
        codes = codec.encode(np.minimum(amax * factor, np.float32(E4M3.max)), E4M3)
        scale_inv = codec.decode(codes, E4M3).astype(np.float32) * tensor_scale_inv
        scale = np.minimum(np.float32(1) / scale_inv, FLOAT32_MAX)
    return codes, scale, scale_inv, tensor_scale_inv


def four_over_six(
    blocks: Any, tensor_amax: Any, rule: str, epsilon: float = 0.0
) -> tuple[Array, Array, Array, Array]:
    """NVFP4's scales by a rule of ``quantization.FOUR_OVER_SIX``: (codes, scale, scale_inv, whether the
    largest value of the block became 4) of blocks (n, rows, 16), float32; rows 1 or 16, what a tile at the
    end lacks is 0. tensor_amax: float32, one, or (n,), that of each block's row.

    Two scales are tried. With the first the block's amax becomes 6, as in ``nvfp4_scales``; with the second,
    1.5 times as large, 4, where E2M1's values lie closer to each other. All in float32, S, D by
    ``nvfp4_tensor_scale`` with the bound of the rule, A the tensor's amax ::

        base  = amax(block) / 6 * S             codes = E4M3(min(base, 448)), E4M3(min(base * 1.5, 448))
        q     = E2M1(x * min(1 / (c * D), float32's largest value))       of each code's value c
        error = sum of |v - x|, or of (v - x)^2, with v = q * c * A / (6 * bound), from the left to the right

    and the second is taken where its error is less; amax(block) is at least ``epsilon``. The 16 rows' errors
    of a square are added as a tree: i and i + 8, i + 4, i + 2, i + 1. Raises ArgumentError for another rule.
    """
    choice("four_over_six", "rule", rule, FOUR_OVER_SIX)
    x, bound = np.asarray(blocks, np.float32), scale_bound(rule)
    largest = np.asarray(tensor_amax, np.float32)
    largest = largest.reshape(()) if largest.size == 1 else largest
    tensor_scale, tensor_scale_inv = nvfp4_tensor_scale(largest, E2M1, bound)
    found: list[Any] = []
    with np.errstate(all="ignore"):
        base = np.maximum(np.abs(x).max((1, 2)), np.float32(epsilon)) / np.float32(E2M1.max) * tensor_scale
        for factor in (1.0, 1.5):
            codes = codec.encode(np.minimum(base * np.float32(factor), np.float32(E4M3.max)), E4M3)
            value = codec.decode(codes, E4M3).astype(np.float32)
            scale_inv = value * tensor_scale_inv
            scale = np.minimum(np.float32(1) / scale_inv, FLOAT32_MAX)
            q = codec.decode(codec.encode(x * scale[:, None, None], E2M1), E2M1).astype(np.float32)
            by_block = [each.reshape(-1, 1, 1) for each in (value, largest)]
            values = q * by_block[0] * by_block[1] / np.float32(E2M1.max * bound)
            found.append((codes, scale, scale_inv, _error(values - x, "mse" in rule)))
        six, four = found
        better = four[3] < six[3]
    codes, scale, scale_inv = (np.where(better, b, a) for a, b in zip(six[:3], four[:3], strict=True))
    return codes, scale, scale_inv, better


def _error(apart: Array, squares: bool) -> Array:
    """(n,): the errors of blocks (n, rows, 16), added in the order that ``four_over_six`` says."""
    each = apart * apart if squares else np.abs(apart)
    total: Array = np.zeros(each.shape[:2], np.float32)
    for column in range(each.shape[2]):
        total = total + each[..., column]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def signs_of(signs: Any, count: int) -> Array:
    """Returns the signs of ``count`` indices along the contraction, float32 (count,) of 1 and -1.

    ``signs``: "plus", all 1; "te", ``TE_SIGNS`` again and again; or an array of 1 and -1, of as many.
    Raises ArgumentError for another word, ShapeError for an array of another shape.
    """
    if isinstance(signs, str):
        choice("hadamard", "signs", signs, ("plus", "te"))
        return np.ones(count, np.float32) if signs == "plus" else np.resize(TE_SIGNS, count)
    found = np.asarray(signs, np.float32)
    if found.shape != (count,):
        raise ShapeError("hadamard", "signs", f"shape {found.shape}", f"({count},)")
    return found


def hadamard(x: Any, n: int, signs: Any = "plus") -> Array:
    """x rotated: every n neighbours along the last dimension, counted from its start, times their signs and
    times Sylvester's Hadamard matrix over sqrt(n). float32, like x, which is float32 or narrower; the
    neighbours behind the last whole group stay as they are.

    The order of the additions is fixed, so that all engines have the same bits: n values are combined to a +
    b and a - b with the one 1 further on, then 2, 4 ... n / 2, each in float32; one multiplication by
    float32(1 / sqrt(n)) ends it. ``signs``: see ``signs_of``. n: a power of two.

    Raises ArgumentError for another n.
    """
    if not isinstance(n, int) or n < 1 or n & (n - 1):
        raise ArgumentError("hadamard", "n", shown(n), "a power of two")
    values = np.array(x, np.float32)
    whole = values.shape[-1] // n * n
    factors = signs_of(signs, values.shape[-1])
    groups = (values[..., :whole] * factors[:whole]).reshape(*values.shape[:-1], whole // n, n)
    distance = 1
    with np.errstate(over="ignore", invalid="ignore"):
        while distance < n:
            pairs = groups.reshape(*groups.shape[:-1], n // (2 * distance), 2, distance)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            groups = np.stack([low + high, low - high], axis=-2).reshape(groups.shape)
            distance *= 2
        groups = groups * np.float32(1 / np.sqrt(n))
    values[..., :whole] = groups.reshape(*values.shape[:-1], whole)
    return values
