"""FP8 products by a kernel of our own, for any chip from Ampere on (raw_kernels/mma_gemm.cu), without
cuBLASLt, which has FP8 from Ada on, and scales of blocks on Hopper alone. The order of an element's sums does
not depend on sizes or tiles.
"""

from __future__ import annotations

from fp8kit import slowness
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.backends.cuda.own_gemm import Product, contract
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.registry import CannotTake

ARCHS = 80, None  # the least compute capability times ten, and no greatest
SOURCE = "mma_gemm.cu"
_TENSOR_CORES = (8, 9)  # that multiply codes
_THREADS, _STAGES, _COLUMNS, _DEPTH = 256, 3, 128, 128  # of mma_gemm.cu
_TILE_ROWS = (128, 32)
_JOB = Packer("7P8q")  # struct Job


def tile_rows(m: int, n: int, multiprocessors: int) -> int:
    """Rows of the tiles that an m x n result is made in: the fewer ones where tiles of the others would
    leave more than half of the multiprocessors without work."""
    most, fewer = _TILE_ROWS
    tiles = ceil_div(m, most) * ceil_div(n, _COLUMNS)
    return most if 2 * tiles >= multiprocessors else fewer


def _run(product: Product, stream: int) -> None:
    a, b, out = product.a, product.b, product.out
    (m, n), k = out.shape, a.shape[1]
    a_stride, b_stride = launch.row_stride(a), launch.row_stride(b)
    if (a.ptr | b.ptr | a_stride | b_stride | k) % 16:
        raise CannotTake("mma_gemm", "a, b", "addresses of rows", "multiples of 16, also of codes in a row")
    if launch.capability(out.device.index) < _TENSOR_CORES:
        slowness.say(
            "this GPU has no FP8 tensor cores",
            "FP8 products multiply codes as float16, no faster than bfloat16's",
            "use a GPU of compute capability 8.9 or higher, or autocast(enabled=False)",
        )
    rows = tile_rows(m, n, launch.sm_count(out.device.index))
    job = _JOB.pack(
        a.ptr,
        b.ptr,
        product.a_scale_inv.ptr,
        product.b_scale_inv.ptr,
        address(product.bias),
        address(product.addend),
        out.ptr,
        m,
        n,
        k,
        a_stride,
        b_stride,
        launch.row_stride(out),
        *product.steps,
    )
    variant = kernel(
        SOURCE,
        "mma_gemm",
        out,
        LEFT=product.left,
        RIGHT=product.right,
        SCALES=product.scales,
        PROMOTE=str(product.promote),
        BM=str(rows),
    )
    tiles = ceil_div(m, rows) * ceil_div(n, _COLUMNS)
    launch.launch(variant, tiles, _THREADS, (job,), stream, _STAGES * (rows + _COLUMNS) * _DEPTH)


fp8_gemm, block_gemm = contract("mma_gemm", _run)
