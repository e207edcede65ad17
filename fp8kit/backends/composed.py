"""FP8 products and what follows them as two kernels of an engine, one after the other: the functions of the
contract's ``fused_gemm`` for an engine that has both kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.activation import known
from fp8kit.backends.protocol import Cast
from fp8kit.formats import DType, Format

# makes the array of a product that is no output: its shape and dtype, the call's workspace and device -> the
# array, and the workspace that is left
Place = Callable[[tuple[int, int], DType, ArrayView | None, Any], tuple[ArrayView, ArrayView | None]]
LINE = (1, 128)


def composed(k: SimpleNamespace, place: Place, module: str) -> tuple[Callable[..., None], ...]:
    """``fp8_gemm_act``, ``fp8_gemm_act_bwd``, ``fp8_gemm_cast`` and ``fp8_gemm_lines`` of a ``module``, by
    the kernels of ``k``: fp8_gemm, block_gemm, act_fwd, act_bwd, quantize_transpose, block_quantize."""

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
        """See ``backends.protocol``."""
        if h is None:
            h, workspace = place(shape, dtype, workspace, a.device)
        how = a_format, b_format, a_scale_inv, b_scale_inv, None, None, fast_accumulate
        k.fp8_gemm(a, b, h, *how, workspace, stream)
        k.act_fwd(h, bias, y, amax, cast, activation, params, stream)

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
        """See ``backends.protocol``."""
        shape = x.shape[0], x.shape[1] // known(activation, params).parts
        dy, space = place(shape, x.dtype, workspace, a.device)
        how = a_format, b_format, a_scale_inv, b_scale_inv, None, None, fast_accumulate
        k.fp8_gemm(a, b, dy, *how, space, stream)
        k.act_bwd(dy, x, bias, dx, dbias, amax, cast, None, activation, params, space, stream)

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
        """See ``backends.protocol``."""
        if out is None:
            out, workspace = place(shape, dtype, workspace, a.device)
        how = a_format, b_format, a_scale_inv, b_scale_inv, bias, addend, fast_accumulate
        k.fp8_gemm(a, b, out, *how, workspace, stream)
        if cast is not None:
            k.quantize_transpose(out, cast, None, None, stream)

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
        """See ``backends.protocol``."""
        if out is None:
            out, workspace = place(shape, dtype, workspace, a.device)
        how = a_format, b_format, a_scale_inv, b_scale_inv
        if a_tile == b_tile == (0, 0):
            k.fp8_gemm(a, b, out, *how, bias, addend, fast_accumulate, workspace, stream)
        else:
            k.block_gemm(a, b, out, *how, a_tile, b_tile, bias, addend, workspace, stream)
        k.block_quantize(out, q, scale_inv, None, None, format, LINE, power_2, epsilon, stream)

    made = fp8_gemm_act, fp8_gemm_act_bwd, fp8_gemm_cast, fp8_gemm_lines
    for function in made:
        function.__module__ = module
    return made
