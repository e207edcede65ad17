"""``matmul``: the product of two quantised arrays, summed as a chip's tensor cores do."""

from __future__ import annotations

from typing import Any

from fp8kit import arrays, formats, quantized_product
from fp8kit.arguments import shown
from fp8kit.backends import dispatch
from fp8kit.errors import FormatError
from fp8kit.quantized_array import QuantizedArray


def matmul(
    a: QuantizedArray, b: QuantizedArray, *, accumulate: Any = "fp32", dtype: Any = formats.float32
) -> Any:
    """Returns the product of (..., K) and (K, N) as an array (..., N) of ``dtype``, in a's library.

    * ``accumulate``: "fp32", as ``a @ b``: the device's own product with sums promoted to float32, whose last
      bits differ from device to device. Or a sum with the same bits on every device, a NaN's payload aside:
      "exact"; the arithmetic of a chip, "hopper_fast", "hopper_split", "ada_fast", "hopper_mma", "blackwell",
      and, with scales of blocks in E8M0 or E4M3, "blackwell_mx" and "blackwell_fp4"; or any
      ``fk.Accumulation``.
    * ``dtype``: float32, bfloat16 or float16; the float32 result is rounded to it once.

    With scales of tensors or rows the sum of codes is multiplied by both scales at the end, in float32: of
    tensors sum * (left * right), of rows (sum * right) * left. With blocks along K each block is summed by
    itself, multiplied by its two scales and added to a float32 sum, of "exact" a float64 one; those of
    "blackwell_mx" and "blackwell_fp4" are part of each term (``fk.Accumulation``). NVFP4's scales of tensors
    multiply the float32 result. Modelled sums take formats of at most 5 exponent bits, and rows and blocks
    that run along K.

    Raises FormatError for an argument that is not a quantised array, for a format or a scaling that does not
    fit, and for rotations that do not cancel; ShapeError where the inner sizes differ, ArgumentError for
    another ``accumulate``.
    """
    op = "matmul"
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, QuantizedArray):
            raise FormatError(op, name, shown(value), "a quantised array: what fk.quantize returns")
    kind = formats.dtype(dtype, op, "dtype", formats.HIGH_PRECISION)
    if isinstance(accumulate, str) and accumulate == "fp32":
        return a.matmul(b, kind)
    how, operands = quantized_product.modelled(a, b, accumulate)
    where, stream = a.device, arrays.current_stream(a.device)
    out = arrays.empty((*a.shape[:-1], b.shape[1]), kind, where)
    if not out.size:
        return arrays.to_library(out, a.data)
    two_level = a._tensor_scale_inv is not None or b._tensor_scale_inv is not None
    wide = arrays.empty(out.shape, formats.float32, where) if two_level else out
    (left, scale_a, tile_a), (right, scale_b, tile_b) = operands
    kernels = dispatch.kernels(where)
    call = left, right, wide.rows(), a.format, b.format, scale_a, scale_b, tile_a, tile_b, how, None, None
    kernels.model_gemm(*call, stream)
    if two_level:
        scales = a._tensor_scale_inv, b._tensor_scale_inv
        quantized_product.times_tensor_scales(wide, *scales, kernels, stream)
        kernels.copy(wide.rows(), out.rows(), stream)
    return arrays.to_library(out, a.data)
