"""FP8 products with what follows them: a product and a pass of this engine each, the product that the engine
chooses by itself. The kernel that does both at once is Hopper's (``hopper_fused``)."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.composed import composed
from fp8kit.backends.cuda import FP8_ARCH, block, gemm, hopper_gemm, launch, mma_gemm
from fp8kit.backends.cuda._rows import ceil_div
from fp8kit.backends.cuda.activation import act_bwd, act_bwd_workspace, act_fwd
from fp8kit.backends.cuda.block import block_quantize
from fp8kit.backends.cuda.gemm import fp8_gemm_workspace
from fp8kit.backends.cuda.quantize import quantize_transpose
from fp8kit.backends.registry import CannotTake
from fp8kit.errors import BackendError
from fp8kit.formats import DType

SUM_ROWS = 64  # rows whose sum ``hopper_fused`` adds to the sums of columns at once
_ALIGNMENT = 256  # bytes


def _fp8_gemm(a: ArrayView, *more: Any) -> None:
    """cuBLASLt's product where it has one, else that of any chip."""
    major, minor = launch.capability(a.device.index)
    (gemm if 10 * major + minor >= FP8_ARCH else mma_gemm).fp8_gemm(a, *more)


def _block_gemm(a: ArrayView, *more: Any) -> None:
    """Hopper's own product where it takes the call, else ``block``'s."""
    if launch.capability(a.device.index) == hopper_gemm.CAPABILITY:
        with suppress(CannotTake):
            hopper_gemm.block_gemm(a, *more)
            return
    block.block_gemm(a, *more)


def _bytes(rows: int, columns: int, itemsize: int) -> int:
    return ceil_div(rows * columns * itemsize, _ALIGNMENT) * _ALIGNMENT


def place(
    shape: tuple[int, int], dtype: DType, workspace: ArrayView | None, device: Any
) -> tuple[ArrayView, ArrayView | None]:
    """Returns the first bytes of the workspace."""
    wanted = fused_workspace(*shape, dtype.itemsize)
    if workspace is None or workspace.size < wanted:
        got = None if workspace is None else f"{workspace.size} bytes"
        raise BackendError("fused_gemm", "workspace", got, f"{wanted} bytes")
    own = _bytes(*shape, dtype.itemsize)
    product = ArrayView(workspace.ptr, shape, dtype, workspace.device, workspace.owner)
    return product, workspace.slice(0, own, workspace.size - own)


def fused_workspace(rows: int, columns: int, itemsize: int) -> int:
    """See ``backends.protocol``: the product, and behind it the larger workspace of the GEMM and the pass."""
    sums = ceil_div(rows, SUM_ROWS) * 2 * columns * 4
    behind = fp8_gemm_workspace(rows, columns), act_bwd_workspace(rows, 2 * columns), sums
    return _bytes(rows, columns, itemsize) + max(behind)


fp8_gemm_act, fp8_gemm_act_bwd, fp8_gemm_cast, fp8_gemm_lines = composed(
    SimpleNamespace(
        fp8_gemm=_fp8_gemm,
        block_gemm=_block_gemm,
        act_fwd=act_fwd,
        act_bwd=act_bwd,
        quantize_transpose=quantize_transpose,
        block_quantize=block_quantize,
    ),
    place,
    __name__,
)
