"""What Hopper's product does with its result, by the source itself without a GPU: compiled for the host, on
what the host code says, with sums that NumPy makes. It keeps the contract."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest

from fp8kit.arrays import CPU
from fp8kit.backends.cuda import launch
from fp8kit.testing.contract import cases
from tests.support import host_compiled
from tests.support.hopper import Emulated
from tests.support.hopper_fused import JOB, NAMES, as_hopper, parts_of, sum_partials, tile_sums, together

# every epilogue, activation and dtype; whole tiles and parts; codes of either format, paddings, maxima, sums
CASES = (
    "fp8_gemm_act-bfloat16-gelu-cast-33x48-fast",
    "fp8_gemm_act-float32-swiglu-cast-300x256-split",
    "fp8_gemm_act-float16-gelu-cast-and-result",
    "fp8_gemm_act-bfloat16-gelu-cast-by-amax",
    "fp8_gemm_act-bfloat16-relu-amax",
    "fp8_gemm_act_bwd-bfloat16-swiglu-cast-300x256-split",
    "fp8_gemm_act_bwd-float32-gelu-cast-33x48-fast",
    "fp8_gemm_act_bwd-float16-relu-300x256",
    "fp8_gemm_cast-bfloat16-cast-joined",
    "fp8_gemm_cast-float32-cast-padded-17x40",
    "fp8_gemm_lines-bfloat16-300x256-split-blocks-True",
    "fp8_gemm_lines-float32-33x48-joined",
    "fp8_gemm_lines-float16-e5m2",
)
EVERY = {str(case): case for name in NAMES for case in cases(name)}


@pytest.mark.kernels
@pytest.mark.skipif(host_compiled.COMPILER is None, reason="there is no g++ here")
@pytest.mark.parametrize("name", CASES)
def test_the_source_keeps_the_contract(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hopper(kernel: launch.Kernel, job: bytes) -> None:
        how, fields = dict(kernel.defines), struct.unpack(JOB, job)
        made = host_compiled.library(kernel.defines, tmp_path)
        halves = parts_of(how["ACT"]) if how["EPILOGUE"] == "forward" else 1
        tall, wide = fields[25:27]
        tiles, places = [], []
        for down, across in np.ndindex(tall, wide * together(how)):
            row, column = down * int(how["BM"]), across * int(how["BN"]) // halves
            tiles.append(tile_sums(how, fields, row, column)[0])
            places += [row, column, 0, 1]
        sums = np.ascontiguousarray(np.stack(tiles), np.float32)
        with host_compiled.placed(job) as place:
            made.run_tiles(place, ctypes.c_void_p(sums.ctypes.data), len(tiles), *places)

    as_hopper(monkeypatch)
    kernels = Emulated("hopper_gemm.cu", NAMES, {"hopper_gemm.cu": hopper, "dropout.cu": sum_partials})
    EVERY[name].run(kernels, CPU)  # type: ignore[arg-type]
    assert kernels.taken
