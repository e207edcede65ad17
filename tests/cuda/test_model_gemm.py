"""The model of Hopper's tensor cores against the tensor cores: every bit of cuBLASLt's FP8 products."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.arithmetic import DATA, PAIRS, codes, compare, values
from fp8kit import arrays
from fp8kit.accumulation import ACCUMULATIONS
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import launch
from fp8kit.formats import Format
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import SampleCall, cases, host, put

GPU = Device("cuda", 0)
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if launch.capability(0) != (9, 0):
        pytest.skip("the model is Hopper's")


@pytest.mark.parametrize("mode", ["fast", "split"])
@pytest.mark.parametrize("spread", DATA.values(), ids=list(DATA))
@pytest.mark.parametrize("pair", PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
@pytest.mark.parametrize("k", [32, 64, 128, 512, 4096])
def test_every_bit_of_a_product(k: int, pair: tuple[Format, Format], spread: float, mode: str) -> None:
    draw = np.random.default_rng(k)
    a, b = (codes(values(draw, 1024, k, spread, GPU), fmt) for fmt in pair)
    found = compare(a, b, pair, ACCUMULATIONS[f"hopper_{mode}"], mode == "fast", GPU)
    assert (found.same, found.splits) == (1.0, 1)


def test_a_contraction_that_is_split_is_said_and_differs() -> None:
    draw = np.random.default_rng(0)
    a, b = (codes(values(draw, rows, 8192, 0.0, GPU), PAIRS[0][0]) for rows in (64, 128))
    found = compare(a, b, PAIRS[0], ACCUMULATIONS["hopper_fast"], True, GPU)
    assert found.splits > 1
    assert found.same < 0.5


def _grid(scale_inv: ArrayView, tile: tuple[int, int], rows: int, k: int) -> ArrayView:
    """Scales as ``block_gemm`` has them as one a tile, row-major."""
    scales = host(scale_inv)
    scales = scales.T[:rows] if tile[0] == 1 else scales[: -(-rows // 128), : k // 128]
    return put(np.ascontiguousarray(scales), GPU)


@pytest.mark.parametrize("kernel", ["fp8_gemm", "block_gemm"])
def test_the_contracts_products_bit_for_bit(kernel: str) -> None:
    """Every sample call without bias and addend, rows and blocks of scales among them."""
    tried, kernels = 0, dispatch.kernels(GPU)
    for case in cases():
        if case.kernel != kernel:
            continue
        call = SampleCall(case, kernels, GPU)
        a = SimpleNamespace(**call.arguments)
        (m, n), k = a.out.shape, a.a.shape[1]
        if a.bias is not None or a.addend is not None or not (m and n and k):
            continue
        (out,) = call.run(kernels).values()
        scales = [scale.reshape(-1, 1) for scale in (a.a_scale_inv, a.b_scale_inv)]
        tiles = [(0, 0), (0, 0)]
        if kernel == "block_gemm":
            tiles = [a.a_tile, a.b_tile]
            scales = [
                _grid(*both, k) for both in zip((a.a_scale_inv, a.b_scale_inv), tiles, (m, n), strict=True)
            ]
        elif scales[0].size > 1:
            tiles = [(1, 0), (1, 0)]
        codes = a.a.slice(0, 0, m), a.b.slice(0, 0, n)
        how = ACCUMULATIONS["hopper_fast" if getattr(a, "fast_accumulate", False) else "hopper_split"]
        modelled = arrays.empty((m, n), a.out.dtype, GPU)
        kernels.model_gemm(*codes, modelled, a.a_format, a.b_format, *scales, *tiles, how, None, None, 0)
        assert_same_bits(f"{kernel} {case.name}", out, host(modelled))
        tried += 1
    assert tried > 15
