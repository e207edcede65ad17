"""The contract's matrix products on cuBLASLt.

A call looks its plan up by shapes, strides and dtypes and launches it. An FP8 product that cuBLASLt cannot
write directly, since its sizes, or its rows' addresses in bytes, are not multiples of 16, goes through
float32 and one small kernel, which adds bias and addend, too, so that it is rounded once. A bias that
cuBLASLt does not take is added by that kernel afterwards. ``timed``: by the fastest of cuBLASLt's algorithms
instead of the first (``algorithms``).
"""

from __future__ import annotations

import functools

from fp8kit import formats
from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import algorithms, elementwise, launch
from fp8kit.backends.cuda.cublaslt import KEPT, WORKSPACE, MatmulKey, Plan, Scaling, plan
from fp8kit.backends.protocol import Layout
from fp8kit.errors import BackendError
from fp8kit.formats import DType, Format, float32

_TENSOR: tuple[Scaling, Scaling] = ("tensor", "tensor")
_ROW: tuple[Scaling, Scaling] = ("row", "row")
_ONE = (1,)
_ALIGNMENT = 16  # bytes that cuBLASLt's FP8 products need, and its fast ones want


def gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    layout: Layout,
    bias: ArrayView | None,
    addend: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
    timed: bool = False,
) -> None:
    """See ``backends.protocol``. BackendError when cuBLASLt is missing or refuses."""
    m, n = out.shape
    if not (m and n):
        return
    k = a.shape[0] if layout == "tn" else a.shape[1]
    if k == 0:
        _finish(None, 0, bias, out, addend, stream)
        return
    late_bias = bias is not None and (bias.dtype is not out.dtype or bias.ptr % _ALIGNMENT != 0)
    bias_ptr = 0 if bias is None or late_bias else bias.ptr
    index, limit = out.device.index, _usable(workspace)
    a_stride, b_stride, out_stride = launch.row_stride(a), launch.row_stride(b), launch.row_stride(out)
    aligned = not (a.ptr | b.ptr | out.ptr | bias_ptr) % _ALIGNMENT
    added = _added(addend, out, aligned, stream)
    fused = bias_ptr != 0
    ready = _plain_plan(
        index,
        layout,
        m,
        n,
        k,
        a_stride,
        b_stride,
        out_stride,
        a.dtype,
        out.dtype,
        fused,
        addend is not None,
        aligned,
        limit,
        timed,
    )
    scratch = _address(workspace, limit)
    if not ready.tuned:
        algorithms.tune(
            ready,
            lambda to: ready.run(a.ptr, b.ptr, to, 0, 0, bias_ptr, scratch, limit, stream, added),
            stream,
        )
    ready.run(a.ptr, b.ptr, out.ptr, 0, 0, bias_ptr, scratch, limit, stream, added)
    if late_bias:
        _finish(None, 0, bias, out, out, stream)


def fp8_gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    bias: ArrayView | None,
    addend: ArrayView | None,
    fast_accumulate: bool,
    workspace: ArrayView | None,
    stream: int,
    timed: bool = False,
) -> None:
    """See ``backends.protocol``. Where the sizes are not multiples of 16, the workspace must have
    ``fp8_gemm_workspace`` bytes, and where out's rows are not at such addresses, M N floats more.

    BackendError when cuBLASLt is missing or refuses, for formats other than E4M3 and E5M2, and for a
    workspace that is too small.
    """
    scaling = _TENSOR if a_scale_inv.shape == _ONE == b_scale_inv.shape else _ROW
    scaled_gemm(
        a,
        b,
        out,
        a_format,
        b_format,
        a_scale_inv,
        b_scale_inv,
        scaling,
        bias,
        addend,
        fast_accumulate,
        workspace,
        stream,
        timed,
    )


def scaled_gemm(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    scaling: tuple[Scaling, Scaling],
    bias: ArrayView | None,
    addend: ArrayView | None,
    fast_accumulate: bool,
    workspace: ArrayView | None,
    stream: int,
    timed: bool = False,
) -> None:
    """``fp8_gemm`` with any scaling of a and b that cuBLASLt has; for the others see
    ``cublaslt.MatmulKey``."""
    m, n = out.shape
    if not (m and n):
        return
    (padded_m, k), padded_n = a.shape, b.shape[0]
    if k == 0:
        _finish(None, 0, bias, out, addend, stream)
        return
    index, limit, out_stride = out.device.index, _usable(workspace), launch.row_stride(out)
    # cuBLASLt adds only a bfloat16 bias to a float32 product, and none at an odd address, so these are added
    # afterwards
    late_bias = bias is not None and (out.dtype is float32 or bias.ptr % _ALIGNMENT != 0)
    bias_ptr = 0 if bias is None or late_bias else bias.ptr
    unfit = padded_m != m or padded_n != n or (out.ptr | out_stride * out.dtype.itemsize) % _ALIGNMENT != 0
    fused, written = bias_ptr != 0 and not unfit, float32 if unfit else out.dtype
    a_stride, b_stride = launch.row_stride(a), launch.row_stride(b)
    ready = _scaled_plan(
        index,
        padded_m,
        padded_n,
        k,
        _code_type(a_format),
        _code_type(b_format),
        written,
        a_stride,
        b_stride,
        padded_n if unfit else out_stride,
        fused,
        addend is not None and not unfit,
        fast_accumulate,
        scaling,
        limit,
        timed,
    )
    product, scratch = out.ptr, _address(workspace, limit)
    if unfit:
        wanted = WORKSPACE + 4 * padded_m * padded_n
        if workspace is None or workspace.shape[0] < wanted:
            got = "None" if workspace is None else f"{workspace.shape[0]} bytes"
            why = f"{(m, n)} at address {out.ptr:#x}, rows {out_stride * out.dtype.itemsize} bytes apart"
            raise BackendError(
                "fp8_gemm", "workspace", got, f"at least {wanted} bytes for an output of {why}"
            )
        product = workspace.ptr + WORKSPACE
    scales = a_scale_inv.ptr, b_scale_inv.ptr
    bias_ptr, added = (0, 0) if unfit else (bias_ptr, _added(addend, out, True, stream))
    if not ready.tuned:
        algorithms.tune(
            ready,
            lambda to: ready.run(a.ptr, b.ptr, to, *scales, bias_ptr, scratch, limit, stream, added),
            stream,
        )
    ready.run(a.ptr, b.ptr, product, *scales, bias_ptr, scratch, limit, stream, added)
    if unfit:
        _finish(product, padded_n, bias, out, addend, stream)
    elif late_bias:
        _finish(None, 0, bias, out, out, stream)


# A call looks its plan up by what it knows without making a key. These tables hold plans for as long as they
# are among the last used, too.


@functools.lru_cache(KEPT)
def _plain_plan(
    index: int,
    layout: Layout,
    m: int,
    n: int,
    k: int,
    a_stride: int,
    b_stride: int,
    out_stride: int,
    operand: DType,
    out: DType,
    bias: bool,
    accumulate: bool,
    aligned: bool,
    workspace: int,
    timed: bool,
) -> Plan:
    alignment = _ALIGNMENT if aligned else min(operand.itemsize, out.itemsize)
    return plan(
        MatmulKey(
            m,
            n,
            k,
            layout,
            operand,
            operand,
            out,
            a_stride,
            b_stride,
            out_stride,
            bias=bias,
            accumulate=accumulate,
            workspace=workspace,
            alignment=alignment,
            timed=timed,
        ),
        index,
    )


@functools.lru_cache(KEPT)
def _scaled_plan(
    index: int,
    m: int,
    n: int,
    k: int,
    a: DType,
    b: DType,
    out: DType,
    a_stride: int,
    b_stride: int,
    out_stride: int,
    bias: bool,
    accumulate: bool,
    fast_accumulate: bool,
    scaling: tuple[Scaling, Scaling],
    workspace: int,
    timed: bool,
) -> Plan:
    return plan(
        MatmulKey(
            m,
            n,
            k,
            "nt",
            a,
            b,
            out,
            a_stride,
            b_stride,
            out_stride,
            bias=bias,
            accumulate=accumulate,
            scaling=scaling,
            fast_accumulate=fast_accumulate,
            workspace=workspace,
            alignment=_ALIGNMENT,
            timed=timed,
        ),
        index,
    )


def gemm_workspace() -> int:
    """See ``backends.protocol``."""
    return WORKSPACE


def fp8_gemm_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``. The padded output is float32."""
    padded_rows, padded_columns = -(-rows // 16) * 16, -(-columns // 16) * 16
    return WORKSPACE + (
        0 if (padded_rows, padded_columns) == (rows, columns) else 4 * padded_rows * padded_columns
    )


def _usable(workspace: ArrayView | None) -> int:
    """Bytes of a workspace that cuBLASLt gets: all it wants, or none."""
    return WORKSPACE if workspace is not None and workspace.shape[0] >= WORKSPACE else 0


def _address(workspace: ArrayView | None, limit: int) -> int:
    return workspace.ptr if workspace is not None and limit else 0


def _code_type(fmt: Format) -> DType:
    if fmt is formats.E4M3:  # by identity first: a format's hash and equality look at all of its fields
        return formats.float8_e4m3fn
    if fmt is formats.E5M2:
        return formats.float8_e5m2
    found = formats.dtype_of_format(fmt)
    if fmt not in (formats.E4M3, formats.E5M2) or found is None:
        raise BackendError("fp8_gemm", "format", fmt, "E4M3 or E5M2")
    return found


def _added(addend: ArrayView | None, out: ArrayView, aligned: bool, stream: int) -> int:
    """The address of an addend apart from ``out``, 0 for none or out itself, which it is copied to where the
    product wants ``aligned`` addresses and its own is not."""
    if addend is None or addend.ptr == out.ptr:
        return 0
    if aligned and addend.ptr % _ALIGNMENT:
        elementwise.copy(addend, out, stream)
        return 0
    return addend.ptr


def _finish(
    product: int | None,
    stride: int,
    bias: ArrayView | None,
    out: ArrayView,
    addend: ArrayView | None,
    stream: int,
) -> None:
    m, n = out.shape
    index, name = out.device.index, launch.type_name(out.dtype)
    kernel = launch.kernel(
        "gemm.cu", "finish", index, T=name, B=name if bias is None else launch.type_name(bias.dtype)
    )
    args = (
        product or 0,
        0 if bias is None else bias.ptr,
        0 if addend is None else addend.ptr,
        out.ptr,
        m,
        n,
        stride,
        launch.row_stride(out),
    )
    launch.launch(kernel, launch.blocks(m * n, 256, index), 256, args, stream)
