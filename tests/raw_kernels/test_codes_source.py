"""How chips without FP8 instructions read codes, by the source itself, compiled for the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fp8kit import codec
from fp8kit.formats import E4M3, E5M2, Format
from fp8kit.raw_kernels import manifest
from fp8kit.testing.compare import assert_same_bits
from tests.support import host_compiled


@pytest.mark.kernels
@pytest.mark.skipif(host_compiled.COMPILER is None, reason="there is no g++ here")
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_pair_of_codes_becomes_two_float16(fmt: Format, tmp_path: Path) -> None:
    """NaN as the instruction of newer chips gives it."""
    made = host_compiled.library(manifest.source("hopper_gemm.cu").variants[0], tmp_path)
    pairs = np.arange(2**16, dtype="<u2")
    found = np.array([made.decoded(int(fmt == E5M2), int(pair)) for pair in pairs], np.int32).view("<u2")
    with np.errstate(invalid="ignore"):
        want = codec.decode(pairs.view(np.uint8), fmt).astype(np.float16)
    bits = np.where(np.isnan(want), 0x7FFF, want.view(np.uint16)).astype("<u2")
    assert_same_bits("halves", found, bits)
