"""``ScaledTensor``: codes of a narrow format with their scales, a pytree, in JAX's native float8 dtypes where
there is one; ``quantize``, ``dequantize``, ``gemm``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit import formats
from fp8kit.arguments import choice, flag, integer, named_well, shown
from fp8kit.arrays import Shape
from fp8kit.backends.dispatch import block_shapes
from fp8kit.errors import FormatError, ShapeError
from fp8kit.float8 import want_rotation
from fp8kit.formats import E2M1, E4M3, E5M2, Format
from fp8kit.ops import casts
from fp8kit.ops.fp8_gemm import Fp8GemmSpec, fp8_gemm
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import FOUR_OVER_SIX, MX_RULES, TILES, Quantizer
from fp8kit.tiles import along_of
from fp8kit_jax import primitive
from fp8kit_jax.arguments import as_array
from fp8kit_jax.keys import rng_inputs
from fp8kit_jax.rules import apply

# kind of scaling -> its rules
_RULES = {"mx": ("power_2", *MX_RULES), "nvfp4": ("exact", *FOUR_OVER_SIX)}
_NATIVE_BLOCKS = {"block_1x128", "block_128x128"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledTensor:
    """``decode(data) * scale_inv``.

    * ``data``: codes (..., N), ``jnp.float8_e4m3fn`` or another native dtype, uint8 of a format that has
      none. ``scale_inv``: float32, one a tile: (1,) for "tensor", (rows, 1) for "row", (ceil(rows / r),
      ceil(N / c)) for r x c blocks, all leading dimensions flattened into rows.
    * ``format``, ``scaling``, ``along``: static; see ``quantize``.
    * ``hadamard``, ``signs``: static, of its rotation; ``rng``: what its random signs were drawn from, or
      None.
    * ``scale_codes``, ``tensor_scale_inv``: as ``fp8kit.QuantizedArray`` has them, of scales by the rules of
      MX and of NVFP4; else None.
    """

    data: Any
    scale_inv: Any
    format: Format = field(default=E4M3, metadata={"static": True})
    scaling: str = field(default="tensor", metadata={"static": True})
    scale_codes: Any = None
    tensor_scale_inv: Any = None
    along: int = field(default=1, metadata={"static": True})
    hadamard: int = field(default=0, metadata={"static": True})
    signs: str = field(default="plus", metadata={"static": True})
    rng: Any = None

    @property
    def shape(self) -> Shape:
        """Extent in elements."""
        return tuple(self.data.shape)

    def dequantize(self, dtype: Any = jnp.float32) -> Any:
        """See ``dequantize``."""
        return dequantize(self, dtype)


@named_well
def quantize(
    x: Any,
    format: Any = None,
    scale: Any = None,
    scaling: str = "tensor",
    rounding: str = "nearest",
    saturate: bool = True,
    key: Any = None,
    *,
    stochastic_bits: int = 32,
    scale_rule: str | None = None,
    along: int = -1,
    hadamard: int = 0,
    signs: str = "plus",
) -> ScaledTensor:
    """``encode(x * scale)`` as a ScaledTensor; the same codes and scales as ``fp8kit.quantize``.

    * ``x``: float32, bfloat16 or float16 (..., N). ``format``: as of ``fp8kit.quantize``.
    * ``scale``: float32, one for each tile; None: format.max / amax, rounded down to a power of two for
      blocks. In a shard_map the amax of "tensor" is that of all devices.
    * ``scaling``: "tensor", "row", "block_1x128", "mx_1x32", "nvfp4_1x16" or another of
      ``fp8kit.quantize``'s, and so are ``scale_rule`` and ``along``, of blocks. ``rounding``: "nearest", or
      "stochastic" with ``key``, by ``stochastic_bits`` random bits, 1 to 32.
    * ``hadamard``, ``signs``: a rotation before the cast, as ``fp8kit.quantize`` has it; "random" signs are
      drawn with ``key``, too. ``dequantize`` rotates back, and so does ``gemm`` but for operands that were
      rotated alike (random signs: by one and the same ``ScaledTensor.rng``).
    * ``saturate``: beyond the largest finite value, and Inf, become it.

    No gradient: wrap it for a straight-through estimate. Raises FormatError or ShapeError.
    """
    x = as_array("quantize", "x", x)
    kind = str(scaling).partition("_")[0]
    default = E2M1 if kind == "nvfp4" else E4M3
    format = default if format is None else formats.number_format(format, "quantize")
    native = _native(format)
    want_rotation(hadamard, signs)
    random = bool(hadamard) and signs == "random"
    known = isinstance(rounding, str) and rounding in ("nearest", "stochastic")
    if not known or (key is None) != (rounding == "nearest" and not random):
        wanted = '"nearest", or "stochastic" with a key, which random signs want, too'
        raise FormatError("quantize", "rounding", repr(rounding), wanted)
    if not hadamard and signs != "plus":
        raise FormatError("quantize", "signs", f"{signs!r} with hadamard=0", "hadamard=16 or more")
    lies = 1 if type(along) is int and along == -1 else along_of("quantize", along)
    grid = _grid("quantize", scaling, x.shape, lies)
    largest = formats.float32.max
    for_inf = min(primitive.meta_of(x).dtype.max, largest) if scaling.startswith("block") else largest
    saturate = flag("quantize", "saturate", saturate)
    bits = integer("quantize", "stochastic_bits", stochastic_bits, 1, 32, FormatError)
    if rounding == "nearest" and bits != 32:
        got, wanted = f"{bits} with rounding 'nearest'", "rounding='stochastic', which takes it"
        raise FormatError("quantize", "stochastic_bits", got, wanted)
    rule = _rule(scale_rule, kind)
    bits = bits if rounding == "stochastic" else 0
    turn = {
        "hadamard": hadamard,
        "signs": signs,
        "rng": rng_inputs(key, "quantize")["rng"] if random else None,
    }
    fused = bool(hadamard) and kind in ("block", "mx") and scale is None and saturate
    if rule in (*MX_RULES, *FOUR_OVER_SIX) or kind == "nvfp4" or not lies or fused:
        _want_blocks(scale, saturate, scaling, rule, format, bool(bits or hadamard))
        quantizer = Quantizer(
            format,
            scaling if rule != "power_2" else f"block{scaling[len(kind) :]}",
            scale_rule=rule,
            stochastic_bits=bits,
            hadamard=hadamard,
            signs=signs,
        )
        return replace(_by_blocks(x, quantizer, scaling, lies, grid, key), **turn)
    if hadamard and x.size:
        x = _rotated(x, hadamard, signs, lies, turn["rng"])
    if not x.size:  # as fp8kit.quantize has it: nothing to measure, so the scale is 1 where there is one
        whole = jnp.ones(1) if scale is None else as_array("quantize", "scale", scale).astype(jnp.float32)
        return ScaledTensor(
            jnp.zeros(x.shape, native), jnp.broadcast_to(1 / whole, grid), format, scaling, **turn
        )
    source, tile = "current" if scale is None else "scale", TILES[scaling]
    spec = casts.QuantizeSpec(format, tile, saturate, rule == "power_2", for_inf, source, bits)
    inputs = {"x": x} | (rng_inputs(key, "quantize") if bits else {})
    if scale is not None:
        scales = as_array("quantize", "scale", scale)
        if jnp.iscomplexobj(scales):
            raise FormatError("quantize", "scale", scales.dtype, "float32")
        inputs["scale"] = scales.astype(jnp.float32).reshape(-1)
    out = apply(casts.quantize, spec, inputs)
    return ScaledTensor(_typed(out["q"], native), out["scale_inv"].reshape(grid), format, scaling, **turn)


def _rotated(
    x: Any, n: int, signs: str, along: int, rng: Any, back: bool = False, dtype: Any = "float32"
) -> Any:
    """x rotated, or rotated back."""
    spec = casts.RotateSpec(n, signs, along, back, dtype)
    return apply(casts.rotate, spec, {"x": x} | ({} if rng is None else {"rng": rng}))["out"]


def _by_blocks(
    x: Any, quantizer: Quantizer, scaling: str, along: int, grid: tuple[int, ...], key: Any
) -> ScaledTensor:
    """x cast by blocks of any rule."""
    fmt, tile = quantizer.format, quantizer.tile if along else quantizer.tile[::-1]
    if not x.size:  # as fp8kit.quantize has it: no tile, but its scale, that of zeros; of float32 ones 1
        inverse = {"nvfp4": 0.0, "block": 1.0}.get(quantizer.granularity.partition("_")[0], 2.0**-127)
        lines = math.prod(x.shape[:-1]) if along else x.shape[-1]
        return ScaledTensor(
            jnp.zeros(x.shape, _native(fmt)),
            jnp.full(grid, inverse, jnp.float32),
            fmt,
            scaling,
            jnp.zeros(grid, jnp.uint8) if quantizer.coded_scales else None,
            jnp.ones(max(lines, 1) if quantizer.row_scaled else 1) if quantizer.two_level else None,
            along,
        )
    spec = casts.QuantizeSpec(
        fmt, tile, stochastic_bits=quantizer.stochastic_bits, blocks=quantizer, along=along
    )
    out = apply(casts.quantize, spec, {"x": x} | (rng_inputs(key, "quantize") if quantizer.needs_rng else {}))
    codes = out.get("scale_codes")
    return ScaledTensor(
        _typed(out["q"], _native(fmt)),
        out["scale_inv"].reshape(grid),
        fmt,
        scaling,
        None if codes is None else codes.reshape(grid),
        out.get("tensor_scale_inv"),
        along,
    )


def _rule(rule: Any, kind: str) -> str:
    if rule is None:
        return "power_2" if kind in ("block", "mx") else "exact"
    return choice("quantize", "scale_rule", rule, _RULES.get(kind, ("exact", "power_2")), FormatError)


def _want_blocks(scale: Any, saturate: bool, scaling: str, rule: str, format: Format, levers: bool) -> None:
    """Refuse what casts by blocks of any rule do not have."""
    if scaling in ("tensor", "row"):
        raise FormatError("quantize", "along", 0, f"-1 with scaling {scaling!r}")
    if scale is not None:
        raise FormatError("quantize", "scale", shown(scale), f"None with scales by {rule!r} of {scaling}")
    if not saturate:
        raise FormatError("quantize", "saturate", "False", f"True with scales by {rule!r} of {scaling}")
    if rule in FOUR_OVER_SIX and (levers or format != E2M1):
        wanted = "E2M1, to nearest, without a rotation"
        raise FormatError("quantize", "scale_rule", f"{rule!r} with {format}", wanted)


def _typed(codes: Any, native: Any) -> Any:
    return codes if native == jnp.uint8 else jax.lax.bitcast_convert_type(codes, native)


def dequantize(q: ScaledTensor, dtype: Any = jnp.float32) -> Any:
    """``decode(data) * scale_inv`` in float32, rounded to ``dtype`` (float32, bfloat16 or float16); an array
    of q's shape. FormatError for another dtype or scaling."""
    _scaled("dequantize", "q", q)
    kind = _high_precision("dequantize", dtype)
    _grid("dequantize", q.scaling, q.shape, q.along)
    if not math.prod(q.shape):
        return jnp.zeros(q.shape, kind.numpy)
    if q.hadamard:
        values = dequantize(replace(q, hadamard=0, signs="plus", rng=None))
        return _rotated(values, q.hadamard, q.signs, q.along, q.rng, True, kind.name)
    inputs = {"q": _codes(q), "scale_inv": q.scale_inv.reshape(-1)}
    tile = TILES[q.scaling] if q.along else TILES[q.scaling][::-1]
    return apply(casts.dequantize, casts.DequantizeSpec(q.format, tile, kind.name), inputs)["x"]


def gemm(a: ScaledTensor, b: ScaledTensor, dtype: Any = jnp.float32, fast_accumulate: bool = False) -> Any:
    """a b^T, accumulated in float32.

    * ``a``: ScaledTensor (..., K); ``b``: ScaledTensor (N, K). On the tensor cores where both are scaled by
      the tensor, by rows, or by blocks of 128 along K (not both 128x128), E4M3 and E5M2, not both E5M2; sizes
      are padded to multiples of 16 here. Others are decoded to float32, exactly but for scales that are no
      powers of two, and multiplied in it.
    * ``dtype``: of the result, float32, bfloat16 or float16. ``fast_accumulate``: in the tensor cores' own
      width, not for blocks.

    Returns h (..., N); no gradient. Raises ShapeError for sizes, FormatError for formats, scalings and dtypes
    that do not fit.
    """
    _scaled("gemm", "a", a)
    _scaled("gemm", "b", b)
    kind = _high_precision("gemm", dtype)
    fast_accumulate = flag("gemm", "fast_accumulate", fast_accumulate)
    if len(b.shape) != 2 or not a.shape or a.shape[-1] != b.shape[1]:
        raise ShapeError("gemm", "shapes", f"{a.shape}, {b.shape}", "(..., K), (N, K)")
    alike = (a.hadamard, a.signs, a.along) == (b.hadamard, b.signs, b.along) and a.rng is b.rng
    if (a.hadamard or b.hadamard) and alike and a.along:  # they cancel
        a, b = (replace(each, hadamard=0, signs="plus", rng=None) for each in (a, b))
    pair = (a.scaling, b.scaling)
    by_blocks = set(pair) <= _NATIVE_BLOCKS and pair != ("block_128x128",) * 2 and a.along == b.along == 1
    codes = not {a.format, b.format} - {E4M3, E5M2} and not a.format == b.format == E5M2
    plain = not (a.hadamard or b.hadamard)
    if not codes or not plain or not (by_blocks or pair in (("tensor",) * 2, ("row",) * 2)):
        return _decoded_gemm(a, b, kind, fast_accumulate)
    if by_blocks and fast_accumulate:
        raise FormatError("gemm", "fast_accumulate", True, "False for blocks")
    rows, columns = math.prod(a.shape[:-1]), b.shape[0]
    if not (rows and columns and b.shape[1]):
        return jnp.zeros((*a.shape[:-1], columns), kind.numpy)
    tiles = (TILES[a.scaling], TILES[b.scaling]) if by_blocks else None
    inputs: dict[str, Any] = {}
    for name, operand in (("a", a), ("b", b)):
        codes, scale = _codes(operand).reshape(-1, a.shape[-1]), operand.scale_inv
        if tiles is None:
            padded = tuple(-(-n // 16) * 16 for n in codes.shape)
            inputs[f"{name}_scale_inv"] = (
                scale if operand.scaling == "tensor" else _padded(scale.reshape(-1), padded[:1], 1.0)
            )
        else:
            padded, grid = block_shapes(*codes.shape, TILES[operand.scaling])
            inputs[f"{name}_scale_inv"] = _padded(
                scale.T if operand.scaling == "block_1x128" else scale, grid, 1.0
            )
        inputs[name] = _padded(codes, padded, 0)
    spec = Fp8GemmSpec(rows, columns, kind.name, a.format, b.format, tiles, fast_accumulate)
    return apply(fp8_gemm, spec, inputs)["out"].reshape(*a.shape[:-1], columns)


def _decoded_gemm(a: ScaledTensor, b: ScaledTensor, kind: formats.DType, fast: bool) -> Any:
    """Returns the product of the values, in float32; scales of NVFP4's tensors multiply it."""
    if fast:
        raise FormatError("gemm", "fast_accumulate", True, "False where the values are multiplied")
    (n, k), lead = b.shape, a.shape[:-1]
    if not (math.prod(lead) and n and k):
        return jnp.zeros((*lead, n), kind.numpy)
    (left, left_scale), (right, right_scale) = _values(a), _values(b)
    spec = LinearSpec(ProductSpec(k, (n,), bias="none"))
    y = apply(linear, spec, {"x": left.reshape(-1, k), "weight0": right})["y"]
    for scale, shape in ((left_scale, (-1, 1)), (right_scale, (1, -1))):
        y = y if scale is None else y * scale.reshape(shape)
    return y.astype(kind.numpy).reshape(*lead, n)


def _values(q: ScaledTensor) -> tuple[Any, Any]:
    """Returns the float32 values; of NVFP4 without the scale of the tensor, or of its rows where they lie
    along the contraction, and that."""
    whole = q.tensor_scale_inv
    if whole is None or q.hadamard or (whole.size > 1 and not q.along):
        return dequantize(q), None
    spec = casts.DequantizeSpec(E4M3, (0, 0), "float32")
    blocks = apply(casts.dequantize, spec, {"q": q.scale_codes, "scale_inv": jnp.ones(1)})["x"]
    return dequantize(replace(q, scale_inv=blocks)), whole


def _scaled(operation: str, argument: str, value: Any) -> None:
    if not isinstance(value, ScaledTensor):
        raise FormatError(operation, argument, shown(value), "a ScaledTensor, as quantize makes one")


def _high_precision(operation: str, dtype: Any) -> formats.DType:
    return formats.dtype(dtype, operation, "dtype", formats.HIGH_PRECISION)


def _padded(array: Any, shape: Shape, value: Any) -> Any:
    return jnp.pad(
        array, [(0, n - m) for n, m in zip(shape, array.shape, strict=True)], constant_values=value
    )


def _codes(q: ScaledTensor) -> Any:
    return q.data if q.data.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(q.data, jnp.uint8)


def _native(format: Format) -> Any:
    """Returns the dtype of a format's codes: JAX's own, or uint8."""
    kind = formats.dtype_of_format(format)
    return jnp.dtype(jnp.uint8) if kind is None or kind.dlpack[1] != 8 else kind.numpy


def _grid(operation: str, scaling: str, shape: Shape, along: int = 1) -> tuple[int, ...]:
    """Returns the shape of an array's scales."""
    choice(operation, "scaling", scaling, list(TILES), FormatError)
    if scaling == "tensor":
        return (1,)
    high, wide = casts.whole(shape, TILES[scaling] if along else TILES[scaling][::-1])
    return -(-math.prod(shape[:-1]) // high), -(-(shape[-1] if shape else 1) // wide)
