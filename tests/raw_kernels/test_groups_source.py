"""What Hopper's product does with codes of other groups, by the source itself without a GPU: ``clear``,
compiled for the host."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from fp8kit.raw_kernels import manifest
from tests.support import host_compiled


@pytest.mark.kernels
@pytest.mark.skipif(host_compiled.COMPILER is None, reason="there is no g++ here")
def test_only_the_codes_of_other_groups_are_cleared(tmp_path: Path) -> None:
    # the support's text has an epilogue; `clear` is the same with all
    variant = next(v for v in manifest.source("hopper_gemm.cu").variants if dict(v)["EPILOGUE"] == "forward")
    how, made = dict(variant), host_compiled.library(variant, tmp_path)
    rows = int(how["BM"]) + int(how["BN"])
    stage = np.random.default_rng(0).integers(1, 256, (rows, 128)).astype(np.uint8)
    # what swizzled copies do: sixteen codes of a row lie where its number says
    place = 16 * (np.arange(128) // 16 ^ np.arange(rows)[:, None] % 8) + np.arange(128) % 16
    for begin, stop in (
        (0, 1),
        (0, 16),
        (0, 127),
        (3, 5),
        (5, 128),
        (15, 113),
        (32, 64),
        (16, 48),
        (127, 128),
    ):
        swizzled = np.take_along_axis(stage, place, 1)  # its own inverse
        assert made.run_clear(ctypes.c_void_p(swizzled.ctypes.data), begin, stop) == 1
        own = np.arange(128)
        want = np.where((own >= begin) & (own < stop), stage, 0)
        np.testing.assert_array_equal(np.take_along_axis(swizzled, place, 1), want)
