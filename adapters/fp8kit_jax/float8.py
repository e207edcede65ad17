"""``ScaledTensor``: FP8 codes in JAX's native float8 dtypes with their scales, a pytree; ``quantize``,
``dequantize``, ``gemm``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit import formats
from fp8kit.arguments import choice, flag, integer, shown
from fp8kit.backends.dispatch import block_shapes
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import E4M3, E5M2, Format
from fp8kit.ops import casts
from fp8kit.ops.fp8_gemm import Fp8GemmSpec, fp8_gemm
from fp8kit.quantization import TILES
from fp8kit_jax import primitive
from fp8kit_jax.arguments import as_array
from fp8kit_jax.functional import rng_inputs
from fp8kit_jax.rules import apply

# NVFP4 has two levels of scales, and formats that JAX's arrays do not hold
_SCALINGS = [name for name in TILES if not name.startswith("nvfp4")]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledTensor:
    """``decode(data) * scale_inv``.

    * ``data``: float8 codes (..., N), ``jnp.float8_e4m3fn`` or another native dtype. ``scale_inv``: float32,
      one a tile: (1,) for "tensor", (rows, 1) for "row", (ceil(rows / r), ceil(N / c)) for r x c blocks, all
      leading dimensions flattened into rows.
    * ``format``, ``scaling``: static; see ``quantize``.
    """

    data: Any
    scale_inv: Any
    format: Format = field(default=E4M3, metadata={"static": True})
    scaling: str = field(default="tensor", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in elements."""
        return tuple(self.data.shape)

    def dequantize(self, dtype: Any = jnp.float32) -> Any:
        """See ``dequantize``."""
        return dequantize(self, dtype)


def quantize(
    x: Any,
    format: Format = E4M3,
    scale: Any = None,
    scaling: str = "tensor",
    rounding: str = "nearest",
    saturate: bool = True,
    key: Any = None,
    *,
    stochastic_bits: int = 32,
) -> ScaledTensor:
    """``encode(x * scale)`` as a ScaledTensor; the same codes and scales as ``fp8kit.quantize``.

    * ``x``: float32, bfloat16 or float16 (..., N). ``format``: one that JAX has a dtype for: E4M3, E5M2,
      E8M0.
    * ``scale``: float32, one for each tile; None: format.max / amax, rounded down to a power of two for
      blocks. In a shard_map the amax of "tensor" is that of all devices.
    * ``scaling``: "tensor", "row", "block_1x128", "mx_1x32" or another of ``fp8kit.quantize``'s, but for
      NVFP4. ``rounding``: "nearest", or "stochastic" with ``key``, by ``stochastic_bits`` random bits, 1 to
      32. Scale rules, rotations and ``along`` are ``fp8kit.quantize``'s alone.
    * ``saturate``: beyond the largest finite value, and Inf, become it.

    No gradient: wrap it for a straight-through estimate. Raises FormatError or ShapeError.
    """
    x = as_array("quantize", "x", x)
    native = _native("quantize", format)
    if not isinstance(rounding, str) or rounding != ("nearest" if key is None else "stochastic"):
        raise FormatError("quantize", "rounding", repr(rounding), '"nearest", or "stochastic" with a key')
    grid = _grid("quantize", scaling, x.shape)
    blocks = scaling not in ("tensor", "row")
    largest = formats.float32.max
    for_inf = min(primitive.meta_of(x).dtype.max, largest) if scaling.startswith("block") else largest
    saturate = flag("quantize", "saturate", saturate)
    bits = integer("quantize", "stochastic_bits", stochastic_bits, 1, 32, FormatError)
    if not x.size:  # as fp8kit.quantize has it: nothing to measure, so the scale is 1 where there is one
        whole = jnp.ones(1) if scale is None else as_array("quantize", "scale", scale).astype(jnp.float32)
        return ScaledTensor(jnp.zeros(x.shape, native), jnp.broadcast_to(1 / whole, grid), format, scaling)
    source, tile = "current" if scale is None else "scale", TILES[scaling]
    spec = casts.QuantizeSpec(format, tile, saturate, blocks, for_inf, source, 0 if key is None else bits)
    inputs = {"x": x} | (rng_inputs(key) if key is not None else {})
    if scale is not None:
        scales = as_array("quantize", "scale", scale)
        if jnp.iscomplexobj(scales):
            raise FormatError("quantize", "scale", scales.dtype, "float32")
        inputs["scale"] = scales.astype(jnp.float32).reshape(-1)
    out = apply(casts.quantize, spec, inputs)
    return ScaledTensor(
        jax.lax.bitcast_convert_type(out["q"], native), out["scale_inv"].reshape(grid), format, scaling
    )


def dequantize(q: ScaledTensor, dtype: Any = jnp.float32) -> Any:
    """``decode(data) * scale_inv`` in float32, rounded to ``dtype`` (float32, bfloat16 or float16); an array
    of q's shape. FormatError for another dtype or scaling."""
    _scaled("dequantize", "q", q)
    kind = _high_precision("dequantize", dtype)
    _grid("dequantize", q.scaling, q.shape)
    if not math.prod(q.shape):
        return jnp.zeros(q.shape, kind.numpy)
    inputs = {"q": _codes(q), "scale_inv": q.scale_inv.reshape(-1)}
    return apply(casts.dequantize, casts.DequantizeSpec(q.format, TILES[q.scaling], kind.name), inputs)["x"]


def gemm(a: ScaledTensor, b: ScaledTensor, dtype: Any = jnp.float32, fast_accumulate: bool = False) -> Any:
    """a b^T on the tensor cores, accumulated in float32.

    * ``a``: ScaledTensor (..., K); ``b``: ScaledTensor (N, K). Both scaled by the tensor, both by rows, or
      both by blocks of 128 along K (not both 128x128). E4M3 and E5M2, not both E5M2. Sizes are padded to
      multiples of 16 here.
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
    if {a.format, b.format} - {E4M3, E5M2} or a.format == b.format == E5M2:
        raise FormatError("gemm", "formats", f"{a.format}, {b.format}", "E4M3 and E5M2, not both E5M2")
    pair = (a.scaling, b.scaling)
    by_blocks = set(pair) <= {"block_1x128", "block_128x128"} and pair != ("block_128x128",) * 2
    if not by_blocks and pair not in (("tensor",) * 2, ("row",) * 2):
        wanted = "tensor, row or blocks of 128 for both, not 128x128 for both"
        raise FormatError("gemm", "scaling", pair, wanted)
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


def _scaled(operation: str, argument: str, value: Any) -> None:
    if not isinstance(value, ScaledTensor):
        raise FormatError(operation, argument, shown(value), "a ScaledTensor, as quantize makes one")


def _high_precision(operation: str, dtype: Any) -> formats.DType:
    kind = formats.dtype(dtype, operation, "dtype")
    if kind not in formats.HIGH_PRECISION:
        raise FormatError(operation, "dtype", kind.name, "float32, bfloat16 or float16")
    return kind


def _padded(array: Any, shape: tuple[int, ...], value: Any) -> Any:
    return jnp.pad(
        array, [(0, n - m) for n, m in zip(shape, array.shape, strict=True)], constant_values=value
    )


def _codes(q: ScaledTensor) -> Any:
    return jax.lax.bitcast_convert_type(q.data, jnp.uint8)


def _native(operation: str, format: Format) -> Any:
    kind = formats.dtype_of_format(format) if isinstance(format, Format) else None
    if kind is None or kind.dlpack[1] != 8:
        raise FormatError(operation, "format", shown(format), "E4M3, E5M2 or E8M0")
    return kind.numpy


def _grid(operation: str, scaling: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array's scales."""
    choice(operation, "scaling", scaling, _SCALINGS, FormatError)
    if scaling == "tensor":
        return (1,)
    high, wide = casts.whole(shape, TILES[scaling])
    return -(-math.prod(shape[:-1]) // high), -(-(shape[-1] if shape else 1) // wide)
