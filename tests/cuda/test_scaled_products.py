"""Products of MX and NVFP4 codes by tensor cores, on a chip that is simulated: nobody lent us one of compute
capability 10.0. What cuBLASLt is told and handed stands against NVIDIA's documents (cuBLAS, "1D Block Scaling
Factors Layout" and cublasLtMatmulMatrixScale_t), transcribed here; what the product is, against decoded
operands on the CPU engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import formats, quantized_product, scaled_products
from fp8kit.arrays import CPU, ArrayView, Device, as_view
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import block, cublaslt, launch, mma_gemm
from fp8kit.backends.registry import CannotTake
from fp8kit.errors import BackendError
from fp8kit.formats import E2M1, E4M3, E5M2, bfloat16
from fp8kit.testing.compare import assert_close, sum_slack
from tests.support.cuda_libraries import Library

GPU = Device("cuda", 0)
# cudaDataType; cublasLtMatmulDescAttributes_t; cublasLtMatmulMatrixScale_t
R_8F_E4M3, R_8F_E5M2, R_4F_E2M1, R_16BF = 28, 29, 33, 14
TRANSA, TRANSB, A_SCALE, B_SCALE, A_MODE, B_MODE = 3, 4, 17, 18, 31, 32
VEC16_UE4M3, VEC32_UE8M0 = 1, 2
MX, NVFP4 = {"scaling": "mx_1x32"}, {"scaling": "nvfp4_1x16"}


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "capability", lambda index: (10, 0))


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- what cuBLASLt is told ----------------------------------------------------------------------------------


def view(at: int, *shape: int, dtype: Any = formats.uint8) -> ArrayView:
    return ArrayView(at, shape, dtype, GPU)


def product(tiles: tuple[tuple[int, int], tuple[int, int]], pair: Any, k: int = 64) -> None:
    """(48, K) by (32, K), at 4096 and 8192, with scales at 256 and 512."""
    bytes_of = k // 2 if tiles[0][1] == 16 else k
    a, b, out = view(4096, 48, bytes_of), view(8192, 32, bytes_of), view(1 << 16, 48, 32, dtype=bfloat16)
    block.block_gemm(a, b, out, *pair, view(256, 512), view(512, 512), *tiles, None, None, None, 7)


@pytest.mark.parametrize(
    ("tile", "pair", "types", "mode"),
    [
        ((1, 32), (E4M3, E5M2), (R_8F_E4M3, R_8F_E5M2), VEC32_UE8M0),
        ((1, 16), (E2M1, E2M1), (R_4F_E2M1, R_4F_E2M1), VEC16_UE4M3),
    ],
)
@pytest.mark.usefixtures("blackwell")
def test_what_cublaslt_is_told(tile: Any, pair: Any, types: Any, mode: int, library: Library) -> None:
    """It computes out^T = b a^T of column-major matrices: A is our b, transposed, and has b's scales. Sizes
    and distances are in elements, also where two lie in a byte."""
    for kept in (block.gemm._plan, cublaslt.plan):
        kept.cache_clear()
    product((tile, tile), pair)
    told = dict(library.attributes)
    assert (told[TRANSA], told[TRANSB]) == (1, 0)
    assert (told[A_MODE], told[B_MODE]) == (mode, mode)
    assert (told[A_SCALE], told[B_SCALE]) == (512, 256)
    assert library.layouts == [(types[1], 64, 32, 64), (types[0], 64, 48, 64), (R_16BF, 32, 48, 32)]
    (given,) = library.products
    assert (given[0], given[2]) == (8192, 4096)


@pytest.mark.usefixtures("blackwell")
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles, pair, words in (
        (((1, 32), (1, 128)), (E4M3, E4M3), r"\(1, 32\), \(1, 128\)"),
        (((1, 16), (1, 16)), (E4M3, E4M3), "format.*E4M3.*E2M1"),
        (((1, 32), (1, 32)), (E2M1, E2M1), "format.*E2M1.*E4M3 or E5M2"),
    ):
        with pytest.raises(BackendError, match=words):
            product(tiles, pair)
    monkeypatch.setattr(launch, "capability", lambda index: (9, 0))
    with pytest.raises(CannotTake, match=r"compute capability 9\.0.*from 10\.0 on"):
        product(((1, 32), (1, 32)), (E4M3, E4M3))
    monkeypatch.setattr(block, "block_gemm", mma_gemm.block_gemm)
    with pytest.raises(CannotTake, match=r"\(1, 32\), \(1, 32\)"):  # the next one is asked
        product(((1, 32), (1, 32)), (E4M3, E4M3))


# --- what it is handed --------------------------------------------------------------------------------------


def laid_out(codes: Any) -> Any:
    """Scales (rows, blocks) as cuBLAS's document lays them out: in a tile of 128 x 4 the one of row r and
    block c is byte (r % 32) * 16 + (r / 32) * 4 + c; tiles lie one after the other, those of the same rows
    first; what is missing in the last ones is 0."""
    rows, count = codes.shape
    across = -(-count // 4)
    found = np.zeros(-(-rows // 128) * across * 512, np.uint8)
    for r, c in np.ndindex(rows, count):
        tile = (r // 128) * across + c // 4
        found[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = codes[r, c]
    return found


@pytest.mark.parametrize("scales", ["lines", "squares"])
@pytest.mark.parametrize("kind", ["mx", "nvfp4"])
@pytest.mark.parametrize("size", [(17, 96, 40), (150, 320, 130)], ids=str)
def test_the_bytes_that_it_is_handed(size: Any, kind: str, scales: str) -> None:
    """Codes, two of E2M1 in a byte, and scales of both operands; and the product, by the CPU engine from
    those bytes: that of the decoded operands within float32's sums."""
    m, k, n = size
    width = 32 if kind == "mx" else 16
    scaling = f"{kind}_{1 if scales == 'lines' else width}x{width}"
    a, b = (fk.quantize(draw(i, rows, k), scaling=scaling) for i, rows in enumerate((m, n)))
    handed: list[Any] = []
    kernels = SimpleNamespace(**vars(dispatch.kernels(CPU)))
    right = kernels.block_gemm
    kernels.block_gemm = lambda *given: handed.append(given) or right(*given)
    out = np.empty((m, n), np.float32)
    assert quantized_product._block_product(a, b.T, as_view(out), kernels, 0)
    ((left, other, _, *pair, left_scales, other_scales, tile, _, bias, addend, _, _),) = handed
    assert (pair, tile, bias, addend) == ([a.format, b.format], (1, width), None, None)
    for codes, own_scales, array, rows in ((left, left_scales, a, m), (other, other_scales, b, n)):
        want = np.zeros((rows + -rows % 16, k), np.uint8)
        want[:rows] = array.data
        if kind == "nvfp4":
            want = want[:, ::2] | want[:, 1::2] << 4
        np.testing.assert_array_equal(codes.numpy(), want)
        each = np.repeat(array.scale_codes, 1 if scales == "lines" else width, 0)[:rows]
        np.testing.assert_array_equal(own_scales.numpy(), laid_out(each))
    exact, terms = a.matmul(b.T, "float32"), np.abs(a.dequantize()) @ np.abs(b.dequantize()).T
    assert_close("out", out, np.asarray(exact, np.float64), "float32", 2 * sum_slack(terms, k))


# --- when, and what is said ---------------------------------------------------------------------------------


def way(a: Any, b: Any) -> tuple[str, str]:
    return quantized_product._way(quantized_product._left(a), quantized_product._right(b), GPU)


@pytest.mark.usefixtures("blackwell")
def test_when_the_product_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(0, 32, 96)
    mx, nv, transposed = (fk.quantize(x, **how) for how in (MX, NVFP4, {**MX, "along": 0}))
    for a in (mx, nv, transposed.T):
        assert way(a, a.T) == ("block_gemm", "this chip's tensor cores take their scales")
    for a, b, why in (
        (mx, nv.T, "E2M1 by NVFP4's of 16"),
        (fk.quantize(x, E5M2, **MX), fk.quantize(x, E5M2, **MX).T, "not E5M2 twice"),
        (fk.quantize(x, E2M1, **MX), fk.quantize(x, E2M1, **MX).T, "E4M3 and E5M2"),
        (transposed, transposed.T, "along a contraction of a multiple of 32"),
        (*(fk.quantize(x[:, :48], **NVFP4), fk.quantize(x[:, :48], **NVFP4).T), "a multiple of 32"),
    ):
        kernel, said = way(a, b)
        assert kernel == "gemm"
        assert why in said
    monkeypatch.setattr(launch, "capability", lambda index: (9, 0))
    assert way(mx, mx.T) == ("gemm", "the FP8 products take no mx_1x32 @ mx_1x32")
    monkeypatch.setattr(scaled_products, "takes_scales", lambda where: True)
    assert "native, the block-scaled product (kernel block_gemm), on the codes, because this" in mx.explain()
