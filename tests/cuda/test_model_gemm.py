"""The model of Hopper's tensor cores against the tensor cores: every bit of cuBLASLt's FP8 products, of sizes
beyond the contract's, which asks for the same."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.arithmetic import DATA, PAIRS, codes, compare, values
from fp8kit.accumulation import ACCUMULATIONS
from fp8kit.arrays import Device
from fp8kit.formats import Format
from tests.support.hopper import want_hopper

GPU = Device("cuda", 0)
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper() -> None:
    want_hopper()


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
