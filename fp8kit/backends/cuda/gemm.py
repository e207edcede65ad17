"""The contract's matrix products on cuBLASLt.

A call looks its plan up by shapes, strides and dtypes and launches it. An FP8 product that cuBLASLt cannot
write directly, since its sizes, or its rows' addresses in bytes, are not multiples of 16, goes through
float32 and one small kernel, which adds bias and addend, too, so that it is rounded once. A bias that
cuBLASLt does not take is added by that kernel afterwards. ``timed``: by the fastest of cuBLASLt's algorithms
instead of the first (``algorithms``).
"""

from __future__ import annotations

import logging
from typing import Any

from fp8kit import formats
from fp8kit.accumulation import Accumulation, on_chip
from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import algorithms, elementwise, launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.backends.cuda.cublaslt import WORKSPACE, MatmulKey, MatmulPlan, Scaling, plan
from fp8kit.backends.protocol import Layout
from fp8kit.errors import BackendError
from fp8kit.formats import DType, Format, float32
from fp8kit.lru import memoized

log = logging.getLogger("fp8kit")

_TENSOR: tuple[Scaling, Scaling] = ("tensor", "tensor")
_ROW: tuple[Scaling, Scaling] = ("row", "row")
_MX: tuple[Scaling, Scaling] = ("mx", "mx")
_NVFP4: tuple[Scaling, Scaling] = ("nvfp4", "nvfp4")
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
        _finish(0, 0, bias, out, addend, stream)
        return
    late_bias = bias is not None and (bias.dtype is not out.dtype or bias.ptr % _ALIGNMENT != 0)
    bias_ptr = 0 if bias is None or late_bias else bias.ptr
    limit = _usable(workspace)
    aligned = not (a.ptr | b.ptr | out.ptr | bias_ptr) % _ALIGNMENT
    added = _added(addend, out, aligned, stream)
    ready = _plan(
        out.device.index,
        m,
        n,
        k,
        layout,
        a.dtype,
        a.dtype,
        out.dtype,
        launch.row_stride(a),
        launch.row_stride(b),
        launch.row_stride(out),
        bias_ptr != 0,
        addend is not None,
        None,
        False,
        limit,
        _ALIGNMENT if aligned else min(a.dtype.itemsize, out.dtype.itemsize),
        timed,
    )
    space = _address(workspace, limit)
    ready.run((a.ptr, b.ptr, out.ptr, 0, 0, bias_ptr, space, added), limit, stream)
    if late_bias:
        _finish(0, 0, bias, out, out, stream)


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
    scaling: tuple[Scaling, Scaling] | None = None,
) -> None:
    """See ``backends.protocol``. Where the sizes are not multiples of 16, the workspace must have
    ``fp8_gemm_workspace`` bytes, and where out's rows are not at such addresses, M N floats more.
    ``scaling``: any that cuBLASLt has (``cublaslt.MatmulKey``); None is the contract's, by the scales' sizes.

    BackendError when cuBLASLt is missing or refuses, for formats other than E4M3 and E5M2 (of "nvfp4": E2M1,
    two codes in a byte), and for a workspace that is too small.
    """
    if scaling is None:
        scaling = _scaling(a_scale_inv, b_scale_inv)
    m, n = out.shape
    if not (m and n):
        return
    if a.shape[1] == 0:
        _finish(0, 0, bias, out, addend, stream)
        return
    limit = _usable(workspace)
    operands = a, b, out, a_format, b_format, bias, addend
    ready, unfit, bias_ptr = _fp8_plan(*operands, scaling, fast_accumulate, limit, timed)
    product, padded_n = out.ptr, b.shape[0]
    if unfit:
        wanted = WORKSPACE + 4 * a.shape[0] * padded_n
        if workspace is None or workspace.shape[0] < wanted:
            got = "None" if workspace is None else f"{workspace.shape[0]} bytes"
            apart = launch.row_stride(out) * out.dtype.itemsize
            why = f"{(m, n)} at address {out.ptr:#x}, rows {apart} bytes apart"
            raise BackendError(
                "fp8_gemm", "workspace", got, f"at least {wanted} bytes for an output of {why}"
            )
        product = workspace.ptr + WORKSPACE
    added = 0 if unfit else _added(addend, out, True, stream)
    scales, space = (a_scale_inv.ptr, b_scale_inv.ptr), _address(workspace, limit)
    ready.run((a.ptr, b.ptr, product, *scales, bias_ptr, space, added), limit, stream)
    if unfit:
        _finish(product, padded_n, bias, out, addend, stream)
    elif bias is not None and not bias_ptr:
        _finish(0, 0, bias, out, out, stream)


def _fp8_plan(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    a_format: Format,
    b_format: Format,
    bias: ArrayView | None,
    addend: ArrayView | None,
    scaling: tuple[Scaling, Scaling],
    fast_accumulate: bool,
    limit: int,
    timed: bool,
) -> tuple[MatmulPlan, bool, int]:
    """Returns the plan of an FP8 product that is not empty, with ``limit`` bytes of workspace; whether it
    goes through float32; the address of the bias that it adds, 0 for none."""
    (m, n), (padded_m, k), padded_n, out_stride = out.shape, a.shape, b.shape[0], launch.row_stride(out)
    strides = launch.row_stride(a), launch.row_stride(b)
    if scaling == _NVFP4:  # two codes in a byte
        k, strides = 2 * k, (2 * strides[0], 2 * strides[1])
    unfit = padded_m != m or padded_n != n or (out.ptr | out_stride * out.dtype.itemsize) % _ALIGNMENT != 0
    # cuBLASLt adds only a bfloat16 bias to a float32 product, and none at an odd address, so these are added
    # afterwards, and so is one that it does not take beside scales of blocks
    late = unfit or bias is None or out.dtype is float32 or bias.ptr % _ALIGNMENT != 0
    bias_ptr = 0 if late or bias is None else bias.ptr
    problem = (
        out.device.index,
        padded_m,
        padded_n,
        k,
        "nt",
        _code_type(a_format, scaling),
        _code_type(b_format, scaling),
        float32 if unfit else out.dtype,
        *strides,
        padded_n if unfit else out_stride,
    )
    rest = addend is not None and not unfit, scaling, fast_accumulate, limit, _ALIGNMENT, timed
    if bias_ptr and scaling in (_MX, _NVFP4) and not _takes(*problem, True, *rest):
        bias_ptr = 0
    return _plan(*problem, bias_ptr != 0, *rest), unfit, bias_ptr


def sums(call: Any, scaling: tuple[Scaling, Scaling] | None = None) -> Accumulation | None:
    """Returns how a call of ``fp8_gemm``, its arguments by name, adds its terms. None where that is not known
    to the bit: on other chips than Hopper, and where the first algorithm cuts the contraction into parts; and
    where there are none."""
    fast = scaling is None and call.fast_accumulate
    how = on_chip(launch.capability(call.out.device.index), fast)
    if how is None or not (call.out.size and call.a.shape[1]):
        return None
    scaling = scaling or _scaling(call.a_scale_inv, call.b_scale_inv)
    operands = call.a, call.b, call.out, call.a_format, call.b_format, call.bias, call.addend
    ready, *_ = _fp8_plan(*operands, scaling, fast, _usable(call.workspace), False)
    return how if ready.splits == 1 else None


fp8_gemm._sums = sums  # type: ignore[attr-defined]


def _scaling(a_scale_inv: ArrayView, b_scale_inv: ArrayView) -> tuple[Scaling, Scaling]:
    return _TENSOR if a_scale_inv.shape == _ONE == b_scale_inv.shape else _ROW


@memoized("cuBLASLt plans by call")
def _plan(index: int, *fields: Any) -> MatmulPlan:
    """Returns the plan of ``MatmulKey(*fields)``. A call finds it by what it knows, without making a key; it
    is held here as long as it is among the last used, too."""
    found = plan(MatmulKey(*fields), index)
    if not found.tuned:
        found.tune = algorithms.tune
    return found


@memoized("whether cuBLASLt takes a bias, by call")
def _takes(*fields: Any) -> bool:
    """Whether cuBLASLt has an algorithm for ``MatmulKey(*fields[1:])``: layers ask for one without a bias
    when they are planned (``scaled_workspace``), and one with a bias may not be there."""
    try:
        _plan(*fields)
    except BackendError as error:
        log.info("%s", error)
        return False
    return True


def gemm_workspace() -> int:
    """See ``backends.protocol``."""
    return WORKSPACE


def fp8_gemm_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``. The padded output is float32."""
    padded = ceil_div(rows, 16) * ceil_div(columns, 16) * 16**2
    return WORKSPACE + (0 if padded == rows * columns else 4 * padded)


def scaled_workspace(
    index: int,
    sizes: tuple[int, int, int],
    pair: tuple[Format, Format],
    out: DType,
    scaling: tuple[Scaling, Scaling],
) -> int:
    """Workspace of a product of codes by their blocks' scales, of ``sizes`` M, N, K; 0 where cuBLASLt has no
    algorithm for it."""
    m, n, _ = sizes
    (rows, columns), k = (ceil_div(size, 16) * 16 for size in (m, n)), ceil_div(sizes[2], 32) * 32
    types = (_code_type(own, scaling) for own in pair)
    kind = out if (rows, columns) == (m, n) else float32
    rest = k, k, columns, False, False, scaling, False, WORKSPACE, _ALIGNMENT, False
    try:
        if all(sizes):
            _plan(index, rows, columns, k, "nt", *types, kind, *rest)
    except BackendError as error:
        log.info("%s", error)
        return 0
    return fp8_gemm_workspace(m, n)


def _usable(workspace: ArrayView | None) -> int:
    """Bytes of a workspace that cuBLASLt gets: all it wants, or none."""
    return WORKSPACE if workspace is not None and workspace.shape[0] >= WORKSPACE else 0


def _address(workspace: ArrayView | None, limit: int) -> int:
    return workspace.ptr if workspace is not None and limit else 0


def _code_type(fmt: Format, scaling: tuple[Scaling, Scaling]) -> DType:
    if scaling != _NVFP4:  # by identity first: a format's hash and equality look at all of its fields
        if fmt is formats.E4M3:
            return formats.float8_e4m3fn
        if fmt is formats.E5M2:
            return formats.float8_e5m2
    known = (formats.E2M1,) if scaling == _NVFP4 else (formats.E4M3, formats.E5M2)
    found = formats.dtype_of_format(fmt)
    if fmt not in known or found is None:
        raise BackendError("fp8_gemm", "format", fmt, " or ".join(map(str, known)))
    return found


def _added(addend: ArrayView | None, out: ArrayView, aligned: bool, stream: int) -> int:
    """Returns the address of an addend apart from ``out``, 0 for none or out itself, which it is copied to
    where the product wants ``aligned`` addresses and its own is not."""
    if addend is None or addend.ptr == out.ptr:
        return 0
    if aligned and addend.ptr % _ALIGNMENT:
        elementwise.copy(addend, out, stream)
        return 0
    return addend.ptr


def scale_product(
    x: ArrayView,
    out: ArrayView,
    a_scale_inv: ArrayView | None,
    b_scale_inv: ArrayView | None,
    bias: ArrayView | None,
    addend: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    if out.size:
        steps = [int(scale is not None and scale.size > 1) for scale in (a_scale_inv, b_scale_inv)]
        scales = address(a_scale_inv), address(b_scale_inv), *steps
        _finish(x.ptr, x.shape[1], bias, out, addend, stream, scales)


def _finish(
    product: int,
    stride: int,
    bias: ArrayView | None,
    out: ArrayView,
    addend: ArrayView | None,
    stream: int,
    scales: tuple[int, ...] = (0, 0, 0, 0),
) -> None:
    m, n = out.shape
    function = kernel("gemm.cu", "finish", out, B=launch.type_name((out if bias is None else bias).dtype))
    strides = stride, launch.row_stride(out)
    args = (product, address(bias), address(addend), out.ptr, m, n, *strides, *scales)
    launch.launch(function, launch.blocks(m * n, 256, out.device.index), 256, args, stream)
