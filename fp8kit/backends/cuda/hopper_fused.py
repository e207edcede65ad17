"""FP8 products on Hopper with what follows them (raw_kernels/hopper_epilogue.cuh): the kernel of
``hopper_gemm``, compiled with an epilogue.

What it makes of the product has the bits of ``hopper_gemm``'s product and the pass that would follow it, but
for the sums of a bias' gradient, whose order is another. Which activations, formats and scales there are, the
kernel's list of variants says.
"""

from __future__ import annotations

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.activation import ACTIVATIONS, known
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, cast_bytes, ceil_div, lines_bytes, sum_partials
from fp8kit.backends.cuda.fused_gemm import SUM_ROWS
from fp8kit.backends.cuda.hopper_gemm import ARCHS, FINISHERS, SHARED, THREADS, packed, planned
from fp8kit.backends.cuda.own_gemm import PROMOTE, SCALES
from fp8kit.backends.cuda.quantize import format_name
from fp8kit.backends.cuda.structures import Packer, Structure
from fp8kit.backends.protocol import Cast
from fp8kit.backends.registry import CannotTake
from fp8kit.errors import BackendError
from fp8kit.formats import DType, Format

__all__ = ["ARCHS", "fp8_gemm_act", "fp8_gemm_act_bwd", "fp8_gemm_cast", "fp8_gemm_lines"]

_FURTHER = Packer("4Pq3d40x")  # struct Further behind its cast
_NO_PARAMS = (0.0, 0.0, 0.0)
_HALF = 128  # a gated activation's halves are multiples of so many columns, so that tiles end where they do
_SCALES = {((0, 0), (0, 0)): "whole", **SCALES}
_OUTSIDE = "hopper_fused"


def _run(
    epilogue: str,
    act: str,
    a: ArrayView,
    b: ArrayView,
    out: ArrayView | None,
    shape: tuple[int, int],
    dtype: DType,
    formats: tuple[Format, Format],
    scale_invs: tuple[ArrayView, ArrayView],
    tiles: tuple[tuple[int, int], tuple[int, int]],
    fast: bool,
    bias: ArrayView | None,
    addend: ArrayView | None,
    further: Structure,
    stream: int,
) -> None:
    """One product of ``shape``, with what the kernel is told ``further``. CannotTake beside the contract's
    refusals: on devices that are not of compute capability 9.0, for what is empty, odd addresses, a bias of
    another dtype, and what the kernel's variants do not have."""
    (m, n), (left, right) = shape, map(format_name, formats)
    if not (m and n and a.shape[1]):
        raise CannotTake(_OUTSIDE, "a, b", "nothing to multiply", "elements")
    if left is None or right is None or (bias is not None and bias.dtype is not dtype):
        raise CannotTake(_OUTSIDE, "formats, bias", f"{formats}", f"E4M3 or E5M2, a bias of {dtype.name}")
    scales, steps = _SCALES.get(tiles, "none"), (0, 0)
    if scales == "whole" and (scale_invs[0].size > 1 or scale_invs[1].size > 1):
        steps = 1, 1
    elif scales != "whole":
        steps = launch.row_stride(scale_invs[0]), launch.row_stride(scale_invs[1])
    given = out if out is not None else addend
    plan = planned(
        a.device.index,
        m,
        n,
        a.shape[1],
        launch.row_stride(a),
        launch.row_stride(b),
        n if given is None else launch.row_stride(given),
        a.shape[0],
        b.shape[0],
        (left, right, launch.type_name(dtype)),
        scales,
        steps,
        0 if fast and scales == "whole" else PROMOTE,
        epilogue,
        act,
        ACTIVATIONS[act].parts if epilogue == "forward" and act in ACTIVATIONS else 1,
        out is not None,
    )
    if (a.ptr | b.ptr | scale_invs[0].ptr | scale_invs[1].ptr) % 16:
        raise CannotTake(_OUTSIDE, "a, b, scales", "addresses", "multiples of 16")
    if out is not None and (out.ptr | launch.row_stride(out) * dtype.itemsize) % 16:
        raise CannotTake(_OUTSIDE, "out", "rows", "at multiples of 16 bytes")
    job = packed(plan, a, b, scale_invs, out, bias, addend, further=further)
    threads = THREADS + (FINISHERS if epilogue == "backward" else 0)
    launch.launch(plan.kernel, plan.blocks, threads, (job,), stream, SHARED)


def _want_codes(cast: Cast | None, m: int, columns: int) -> None:
    """``_want_view`` of q, by eights, and of q_t, by sixteens."""
    if cast is not None:
        _want_view(cast.q, 8, (m, columns))
        _want_view(cast.q_t, 16, (columns, m))


def _want_view(codes: ArrayView | None, step: int, extents: tuple[int, int]) -> None:
    """CannotTake for codes that are not written ``step`` at a time, or reach beyond the tiles of the result,
    which end at multiples of 128."""
    if codes is None:
        return
    if (codes.ptr | launch.row_stride(codes) | codes.shape[1]) % step:
        raise CannotTake(_OUTSIDE, "cast", f"{codes.shape} at {codes.ptr:#x}", f"multiples of {step}")
    if any(have > ceil_div(extent, 128) * 128 for have, extent in zip(codes.shape, extents, strict=True)):
        raise CannotTake(_OUTSIDE, "cast", f"codes {codes.shape}", f"those of {extents}, little padding")


def _want_halves(gated: bool, features: int) -> None:
    if gated and features % _HALF:
        raise CannotTake(_OUTSIDE, "features", features, f"a multiple of {_HALF} for a gated activation")


def fp8_gemm_act(
    a: ArrayView,
    b: ArrayView,
    h: ArrayView | None,
    shape: tuple[int, int],
    dtype: DType,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    bias: ArrayView | None,
    y: ArrayView | None,
    amax: ArrayView | None,
    cast: Cast | None,
    activation: str,
    params: tuple[float, ...],
    fast_accumulate: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``, and ``_run``; needs no workspace."""
    row = known(activation, params)
    features = shape[1] // row.parts
    _want_halves(row.gated, features)
    _want_codes(cast, shape[0], features)
    further = cast_bytes(cast, amax) + _FURTHER.pack(
        0, address(bias), address(y), 0, features, *(params or _NO_PARAMS)
    )
    operands = a, b, h, shape, dtype, (a_format, b_format), (a_scale_inv, b_scale_inv), ((0, 0), (0, 0))
    _run("forward", activation, *operands, fast_accumulate, None, None, further, stream)


def fp8_gemm_act_bwd(
    a: ArrayView,
    b: ArrayView,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    x: ArrayView,
    bias: ArrayView | None,
    dx: ArrayView | None,
    dbias: ArrayView | None,
    amax: ArrayView | None,
    cast: Cast | None,
    activation: str,
    params: tuple[float, ...],
    fast_accumulate: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``, and ``_run``. BackendError for a dbias without a workspace."""
    row, (m, width) = known(activation, params), x.shape
    features = width // row.parts
    _want_halves(row.gated, features)
    _want_codes(cast, m, width)
    sums, rows = 0, ceil_div(m, SUM_ROWS)
    if dbias is not None:
        if workspace is None or workspace.size < rows * width * 4:
            raise BackendError("fp8_gemm_act_bwd", "workspace", workspace, f"{rows * width * 4} bytes")
        sums = workspace.ptr
    further = cast_bytes(cast, amax) + _FURTHER.pack(
        x.ptr, address(bias), address(dx), sums, features, *(params or _NO_PARAMS)
    )
    operands = a, b, None, (m, features), x.dtype, (a_format, b_format), (a_scale_inv, b_scale_inv)
    tiles = (0, 0), (0, 0)
    _run("backward", activation, *operands, tiles, fast_accumulate, None, None, further, stream)
    if dbias is not None:
        sum_partials(sums, rows, dbias, None, stream)


def fp8_gemm_cast(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView | None,
    shape: tuple[int, int],
    dtype: DType,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    bias: ArrayView | None,
    addend: ArrayView | None,
    cast: Cast | None,
    fast_accumulate: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``, and ``_run``; needs no workspace."""
    _want_codes(cast, *shape)
    further = cast_bytes(cast, None) + _FURTHER.pack(0, 0, 0, 0, shape[1], *_NO_PARAMS)
    operands = a, b, out, shape, dtype, (a_format, b_format), (a_scale_inv, b_scale_inv), ((0, 0), (0, 0))
    _run("forward", "identity", *operands, fast_accumulate, bias, addend, further, stream)


def fp8_gemm_lines(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView | None,
    shape: tuple[int, int],
    dtype: DType,
    a_format: Format,
    b_format: Format,
    a_scale_inv: ArrayView,
    b_scale_inv: ArrayView,
    a_tile: Tile,
    b_tile: Tile,
    bias: ArrayView | None,
    addend: ArrayView | None,
    q: ArrayView,
    scale_inv: ArrayView,
    format: Format,
    power_2: bool,
    epsilon: float,
    fast_accumulate: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``, and ``_run``; needs no workspace."""
    _want_view(q, 8, shape)
    further = lines_bytes(format, q, scale_inv, power_2, epsilon)
    further = further + _FURTHER.pack(0, 0, 0, 0, shape[1], *_NO_PARAMS)
    operands = a, b, out, shape, dtype, (a_format, b_format), (a_scale_inv, b_scale_inv), (a_tile, b_tile)
    _run("lines", "identity", *operands, fast_accumulate, bias, addend, further, stream)
