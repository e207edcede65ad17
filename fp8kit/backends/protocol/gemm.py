"""The contract of matrix products."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.formats import Format

Layout = Literal["nt", "nn", "tn"]


def product_workspace(kernels: Any, a: Any) -> int:
    """Bytes of an FP8 product's workspace: a float32 result more where strides leave out's rows unaligned."""
    stride = 0 if a.out.contiguous else a.out.strides[0] * a.out.dtype.itemsize
    extra = 4 * a.out.size if (a.out.ptr | stride) % 16 else 0
    return int(kernels.fp8_gemm_workspace(*a.out.shape)) + extra


def product_flops(a: Any) -> float:
    """Returns a multiplication and an addition for each term of the result."""
    terms = a.a.shape[0 if getattr(a, "layout", "nt") == "tn" else 1]
    return float(2 * a.out.size * terms)


class Products(Protocol):
    """Matrix products."""

    @kernel(writes="out", workspace=lambda kernels, a: kernels.gemm_workspace(), flops=product_flops)
    def gemm(
        self,
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        layout: Layout,
        bias: ArrayView | None,
        addend: ArrayView | None,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """High-precision product: out = a b^T ("nt": a (M, K), b (N, K)), a b ("nn": (M, K), (K, N)) or a^T b
        ("tn": (K, M), (K, N)), accumulated in float32. a, b: h, the same; out: h, the same dtype or float32,
        (M, N); bias: a's dtype (N,) or None, added. addend: of out's shape, dtype and strides, or None,
        added: out itself, to accumulate, or an array apart from it. a, b and out may be strided along rows
        (last stride 1). Before a bias and before an addend joins a 16-bit out, the engine may round to out's
        dtype (cuBLASLt does in some of its kernels)."""

    @workspace_of("gemm", "fp8_gemm")
    def gemm_workspace(self) -> int:
        """Bytes of workspace that ``gemm`` and ``fp8_gemm`` want, padded output included (see
        ``fp8_gemm_workspace``)."""

    @kernel(writes="out", workspace=product_workspace, flops=product_flops)
    def fp8_gemm(
        self,
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
    ) -> None:
        """FP8 product: out = (a b^T) * a_scale_inv * b_scale_inv. a: uint8 (Mp, K), b: uint8 (Np, K), K, Mp,
        Np multiples of 16; out: h (M, N), Mp - 16 < M <= Mp, Np - 16 < N <= Np: rows and columns beyond are
        not computed into it. scale_inv: float32 [1], or [Mp] and [Np] (row scaling, both). bias: out's dtype
        (N,) or None. fast_accumulate lets the engine accumulate in the tensor cores' own width (Hopper: 14
        bits); False promotes to float32 regularly (split accumulator). Not both E5M2. a, b and the scales are
        16-byte aligned, and so are out's rows, or the workspace has 4 M N bytes more. addend, and rounding
        where it or a bias joins: as in ``gemm``."""

    @workspace_of("fp8_gemm", "block_gemm")
    def fp8_gemm_workspace(self, rows: int, columns: int) -> int:
        """Bytes for an FP8 product of (rows, columns): ``gemm_workspace`` and, where the sizes need padding,
        a padded output."""

    @kernel(writes="out")
    def scale_product(
        self,
        x: ArrayView,
        out: ArrayView,
        a_scale_inv: ArrayView | None,
        b_scale_inv: ArrayView | None,
        bias: ArrayView | None,
        addend: ArrayView | None,
        stream: int,
    ) -> None:
        """out = x * (a_scale_inv * b_scale_inv) + bias + addend, in float32 in this order, rounded once. x:
        float32 (M, N); out: h (M, N); scale_inv: float32 [1], or [M] of a and [N] of b, None for 1; bias:
        out's dtype (N,) or None; addend: out's shape and dtype, out itself among them, or None."""
