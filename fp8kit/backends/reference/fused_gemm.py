"""FP8 products with what follows them: two kernels of this engine each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.backends.composed import composed
from fp8kit.backends.reference.activation import act_bwd, act_fwd
from fp8kit.backends.reference.block import block_gemm, block_quantize
from fp8kit.backends.reference.gemm import fp8_gemm
from fp8kit.backends.reference.quantize import quantize_transpose
from fp8kit.formats import DType


def _place(
    shape: tuple[int, int], dtype: DType, workspace: ArrayView | None, device: Any
) -> tuple[ArrayView, ArrayView | None]:
    """Returns a fresh array."""
    return arrays.empty(shape, dtype, device), workspace


fp8_gemm_act, fp8_gemm_act_bwd, fp8_gemm_cast, fp8_gemm_lines = composed(
    SimpleNamespace(
        fp8_gemm=fp8_gemm,
        block_gemm=block_gemm,
        act_fwd=act_fwd,
        act_bwd=act_bwd,
        quantize_transpose=quantize_transpose,
        block_quantize=block_quantize,
    ),
    _place,
    __name__,
)
