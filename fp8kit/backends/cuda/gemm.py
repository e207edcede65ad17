"""The contract's matrix products on cuBLASLt.

A call looks its plan up by shapes, strides and dtypes and launches it. What cuBLASLt cannot write directly (an FP8 product whose sizes
are not multiples of 16, a bias of another dtype than the output's) goes through float32 and one small kernel, so that every output is still
rounded once. ``timed``: by the fastest of cuBLASLt's algorithms instead of the first (``algorithms``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8kit import formats
from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import algorithms, launch
from fp8kit.backends.cuda.cublaslt import WORKSPACE, MatmulKey, Plan, Scaling, plan
from fp8kit.backends.protocol import Layout
from fp8kit.errors import BackendError, expected
from fp8kit.formats import DType, Format, float32

_PLANS: dict[tuple[Any, ...], Plan] = {}
_TENSOR: tuple[Scaling, Scaling] = ("tensor", "tensor")
_ROW: tuple[Scaling, Scaling] = ("row", "row")
_ONE = (1,)
_ALIGNMENT = 16  # bytes that cuBLASLt's FP8 products need, and its fast ones want


def gemm(a: ArrayView, b: ArrayView, out: ArrayView, layout: Layout, bias: ArrayView | None, accumulate: bool,
         workspace: ArrayView | None, stream: int, timed: bool = False) -> None:
    """See ``backends.protocol``. BackendError when cuBLASLt is missing or refuses."""
    m, n = out.shape
    if not (m and n):
        return
    k = a.shape[0] if layout == "tn" else a.shape[1]
    if k == 0:
        _finish(None, 0, bias, out, accumulate, stream)
        return
    late_bias = bias is not None and bias.dtype is not out.dtype
    bias_ptr = 0 if bias is None or late_bias else bias.ptr
    index, limit = out.device.index, _usable(workspace)
    a_stride, b_stride, out_stride = (v.shape[1] if v._strides is None else launch.row_stride(v) for v in (a, b, out))
    aligned = not (a.ptr | b.ptr | out.ptr | bias_ptr) % _ALIGNMENT
    fused = bias_ptr != 0
    quick = (index, layout, m, n, k, a_stride, b_stride, out_stride, a.dtype, out.dtype, fused, accumulate, aligned, limit, timed)
    ready = _PLANS.get(quick)
    if ready is None:
        alignment = _ALIGNMENT if aligned else min(a.dtype.itemsize, out.dtype.itemsize)
        key = MatmulKey(m, n, k, layout, a.dtype, b.dtype, out.dtype, a_stride, b_stride, out_stride, bias=fused, accumulate=accumulate,
                        workspace=limit, alignment=alignment, timed=timed)

        def run(own: Plan, to: int) -> None:
            own.run(a.ptr, b.ptr, to, 0, 0, bias_ptr, _address(workspace, limit), limit, stream)

        ready = _planned(quick, key, index, run, stream)
    ready.run(a.ptr, b.ptr, out.ptr, 0, 0, bias_ptr, _address(workspace, limit), limit, stream)
    if late_bias:
        _finish(out.ptr, out_stride, bias, out, False, stream)


def fp8_gemm(a: ArrayView, b: ArrayView, out: ArrayView, a_format: Format, b_format: Format, a_scale_inv: ArrayView, b_scale_inv: ArrayView,
             bias: ArrayView | None, accumulate: bool, fast_accumulate: bool, workspace: ArrayView | None, stream: int,
             timed: bool = False) -> None:
    """See ``backends.protocol``. Where the sizes are not multiples of 16, the workspace must have ``fp8_gemm_workspace`` bytes.

    BackendError when cuBLASLt is missing or refuses, for formats other than E4M3 and E5M2, and for a workspace that is too small.
    """
    scaling = _TENSOR if a_scale_inv.shape == _ONE == b_scale_inv.shape else _ROW
    scaled_gemm(a, b, out, a_format, b_format, a_scale_inv, b_scale_inv, scaling, bias, accumulate, fast_accumulate, workspace, stream,
                timed)


def scaled_gemm(a: ArrayView, b: ArrayView, out: ArrayView, a_format: Format, b_format: Format, a_scale_inv: ArrayView,
                b_scale_inv: ArrayView, scaling: tuple[Scaling, Scaling], bias: ArrayView | None, accumulate: bool, fast_accumulate: bool,
                workspace: ArrayView | None, stream: int, timed: bool = False) -> None:
    """``fp8_gemm`` with any scaling of a and b that cuBLASLt has; for the others see ``cublaslt.MatmulKey``."""
    m, n = out.shape
    if not (m and n):
        return
    (padded_m, k), padded_n = a.shape, b.shape[0]
    if k == 0:
        _finish(None, 0, bias, out, accumulate, stream)
        return
    index, limit, out_stride = out.device.index, _usable(workspace), n if out._strides is None else launch.row_stride(out)
    # cuBLASLt adds only a bfloat16 bias to a float32 product, so that one's is added afterwards
    late_bias = bias is not None and out.dtype is float32
    bias_ptr = 0 if bias is None or late_bias else bias.ptr
    unfit = padded_m != m or padded_n != n or (out.ptr | out_stride * out.dtype.itemsize | bias_ptr) % _ALIGNMENT != 0
    fused, written = bias_ptr != 0 and not unfit, float32 if unfit else out.dtype
    quick = (index, padded_m, padded_n, k, a_format.name, b_format.name, written, 0 if unfit else out_stride, fused, accumulate,
             fast_accumulate, scaling, limit, timed)
    ready = _PLANS.get(quick)
    if ready is None:
        key = MatmulKey(
            padded_m, padded_n, k, "nt", _code_type(a_format), _code_type(b_format), written, launch.row_stride(a), launch.row_stride(b),
            padded_n if unfit else out_stride, bias=fused, accumulate=accumulate and not unfit, scaling=scaling,
            fast_accumulate=fast_accumulate, workspace=limit, alignment=_ALIGNMENT, timed=timed,
        )

        def run(own: Plan, to: int) -> None:
            own.run(a.ptr, b.ptr, to, a_scale_inv.ptr, b_scale_inv.ptr, 0 if unfit else bias_ptr, _address(workspace, limit), limit, stream)

        ready = _planned(quick, key, index, run, stream)
    product, scratch = out.ptr, _address(workspace, limit)
    if unfit:
        wanted = WORKSPACE + 4 * padded_m * padded_n
        if workspace is None or workspace.shape[0] < wanted:
            got = "None" if workspace is None else f"{workspace.shape[0]} bytes"
            raise BackendError(expected("fp8_gemm", "workspace", got, f"at least {wanted} bytes for an output of {(m, n)}"))
        product = workspace.ptr + WORKSPACE
    ready.run(a.ptr, b.ptr, product, a_scale_inv.ptr, b_scale_inv.ptr, 0 if unfit else bias_ptr, scratch, limit, stream)
    if unfit:
        _finish(product, padded_n, bias, out, accumulate, stream)
    elif late_bias:
        _finish(product, out_stride, bias, out, False, stream)


def _planned(quick: tuple[Any, ...], key: MatmulKey, index: int, run: Callable[[Plan, int], None], stream: int) -> Plan:
    """The plan of a problem, kept under ``quick``; not where its algorithm is to be timed and cannot be now. ``run(plan, out)`` launches
    the product with an output elsewhere."""
    found = plan(key, index)
    if not key.timed or algorithms.settle(found, lambda to: run(found, to), stream):
        _PLANS[quick] = found
    return found


def gemm_workspace() -> int:
    """See ``backends.protocol``."""
    return WORKSPACE


def fp8_gemm_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``. The padded output is float32."""
    padded_rows, padded_columns = -(-rows // 16) * 16, -(-columns // 16) * 16
    return WORKSPACE + (0 if (padded_rows, padded_columns) == (rows, columns) else 4 * padded_rows * padded_columns)


def _usable(workspace: ArrayView | None) -> int:
    """Bytes of a workspace that cuBLASLt gets: all it wants, or none."""
    return WORKSPACE if workspace is not None and workspace.shape[0] >= WORKSPACE else 0


def _address(workspace: ArrayView | None, limit: int) -> int:
    return workspace.ptr if workspace is not None and limit else 0


def _code_type(fmt: Format) -> DType:
    found = formats.dtype_of_format(fmt)
    if fmt not in (formats.E4M3, formats.E5M2) or found is None:
        raise BackendError(expected("fp8_gemm", "format", fmt, "E4M3 or E5M2"))
    return found


def _finish(product: int | None, stride: int, bias: ArrayView | None, out: ArrayView, accumulate: bool, stream: int) -> None:
    m, n = out.shape
    index, name = out.device.index, launch.type_name(out.dtype)
    kernel = launch.kernel("gemm.cu", "finish", index, T=name, B=name if bias is None else launch.type_name(bias.dtype))
    args = (product or 0, 0 if bias is None else bias.ptr, out.ptr, m, n, stride, launch.row_stride(out), accumulate)
    launch.launch(kernel, launch.blocks(m * n, 256, index), 256, args, stream)
