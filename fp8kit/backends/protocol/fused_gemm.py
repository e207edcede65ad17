"""The contract of FP8 products whose result goes on at once: into an activation, a gradient, a cast.

Each is two kernels of the contract one after the other, and has their bits. The product between them is an
output, or None where it is not needed: then an engine that fuses the two never writes it, and another one
keeps it in the workspace.
"""

from __future__ import annotations

from typing import Any, Protocol

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.backends.protocol.cast import Cast
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.formats import DType, Format


def _shape(a: Any) -> tuple[int, int]:
    """Rows and columns of the product of a call."""
    if hasattr(a, "shape"):
        return a.shape  # type: ignore[no-any-return]
    return a.x.shape[0], a.x.shape[1] // ACTIVATIONS[a.activation].parts


def _workspace(kernels: Any, a: Any) -> int:
    dtype = a.x.dtype if hasattr(a, "x") else a.dtype
    return int(kernels.fused_workspace(*_shape(a), dtype.itemsize))


def _flops(a: Any) -> float:
    rows, columns = _shape(a)
    return float(2 * rows * columns * a.a.shape[1])


class FusedProducts(Protocol):
    """FP8 products with what follows them."""

    @kernel(writes="h y cast", updates="amax", casts="y", workspace=_workspace, flops=_flops)
    def fp8_gemm_act(
        self,
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
        """``fp8_gemm`` of a and b without bias or addend into h, ``dtype`` of ``shape`` (M, N), then
        ``act_fwd`` of h with the rest. Not both amax and cast are given."""

    @kernel(
        writes="dx dbias cast",
        updates="amax",
        casts="dx",
        sums={"dbias": "dx"},
        workspace=_workspace,
        flops=_flops,
    )
    def fp8_gemm_act_bwd(
        self,
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
        """``fp8_gemm`` of a and b into an array of x's dtype, then ``act_bwd`` with that as dy, and the
        rest. Not both amax and cast are given; no codes lie in dy."""

    @kernel(writes="out cast", casts="out", workspace=_workspace, flops=_flops)
    def fp8_gemm_cast(
        self,
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
        """``fp8_gemm`` into out, ``dtype`` of ``shape`` (M, N), then ``quantize_transpose`` of out without
        dbias. Without a cast: the product alone."""

    @kernel(writes="out q scale_inv", workspace=_workspace, flops=_flops)
    def fp8_gemm_lines(
        self,
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
        """``fp8_gemm`` (tiles (0, 0), of both), or ``block_gemm``, into out, ``dtype`` of ``shape`` (M, N),
        then ``block_quantize`` of out in lines of 1 x 128 into q and scale_inv."""

    @workspace_of("fp8_gemm_act", "fp8_gemm_act_bwd", "fp8_gemm_cast", "fp8_gemm_lines")
    def fused_workspace(self, rows: int, columns: int, itemsize: int) -> int:
        """Bytes of workspace of these products, of (rows, columns) elements of so many bytes."""
