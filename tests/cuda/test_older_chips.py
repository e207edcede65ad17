"""What chips without FP8 instructions run (compute capability 8.0 to 8.7): conversions by bits, and products
of codes as float16. A newer chip runs the same sources with -DBY_BITS."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, recipe_info
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import register
from fp8kit.backends.registry import OpRegistry
from fp8kit.raw_kernels import manifest
from fp8kit.recipes import NAMED
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import cases, get, put

GPU = Device("cuda", 0)
SOURCES = {
    "quantize": "quantize.cu",
    "dequantize": "quantize.cu",
    "block_quantize": "block.cu",
    "fp8_gemm": "mma_gemm.cu",
    "block_gemm": "mma_gemm.cu",
}


def by_bits(kernel: str) -> Any:
    """The kernel's source, without the instructions."""
    text = manifest.text(SOURCES[kernel])
    assert "#include" in text
    return fk.override(kernel, text.replace("#include", "#define BY_BITS\n#include", 1))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", SOURCES)
def test_contract(kernel: str) -> None:
    """Not every case launches these sources: an empty array launches nothing, and formats other than E4M3 and
    E5M2 have a source of their own."""
    with by_bits(kernel) as used:
        for case in cases(kernel):
            case.run(dispatch.kernels(GPU), GPU)
    assert used.calls


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [fk.E4M3, fk.E5M2], ids=str)
def test_every_code_and_every_float(fmt: fk.Format) -> None:
    """The float32 values: every sign, exponent and first mantissa bits, and what decides a tie."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    values = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)
    x, one = put(values.reshape(6, -1), GPU), put(np.ones((1, 1), np.float32), GPU)
    every, made = put(np.arange(256, dtype=np.uint8).reshape(1, -1), GPU), []
    stream = arrays.current_stream(GPU)
    for blocks in ((), (by_bits("quantize"), by_bits("dequantize"))):
        with contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block)
            q, back = put(np.zeros(x.shape, np.uint8), GPU), put(np.zeros((1, 256), np.float32), GPU)
            inverse, kernels = put(np.zeros((1, 1), np.float32), GPU), dispatch.kernels(GPU)
            # one scale, saturating, to nearest
            kernels.quantize(x, q, one, inverse, None, fmt, x.shape, True, 0, 0, None, stream)
            kernels.dequantize(every, back, one, fmt, every.shape, stream)
            assert all(block.calls for block in blocks)
        made.append((get(q), get(back)))
    assert_same_bits("codes", made[1][0], made[0][0])
    assert_same_bits("values", made[1][1], made[0][1])


def test_they_take_our_products() -> None:
    registry = OpRegistry()
    register(registry)
    for name in ("fp8_gemm", "block_gemm"):
        fit = [impl.impl_id for impl in registry.get_implementations(name) if (impl.min_arch or 0) <= 80]
        assert "cuda.mma_" + name in fit
        assert "cuda.fp8_gemm" not in fit


@pytest.mark.parametrize("name", ["delayed", "current", "block", "rowwise"])
def test_recipes_say_how(name: str) -> None:
    recipe = NAMED[name].recipe
    assert recipe_info.support_of(recipe, (8, 6)) == ("emulated", "codes become float16 in the product")
    assert recipe_info.support_of(recipe, (8, 9)).status == "native"
    refused = recipe_info.support_of(recipe, (7, 5))
    assert refused.status == "refused"
    assert "needs compute capability 8.0, not 7.5" in refused.why
