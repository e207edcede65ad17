"""Kernels that are launched before the one in front of them has ended see all that it writes: here it writes
late, having let them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import implementation
from fp8kit.backends.cuda.device import provider
from fp8kit.backends.protocol import AttentionExtras, Cast
from fp8kit.formats import E4M3, bfloat16, float32, uint8
from fp8kit.quantization import Quantizer
from fp8kit.raw_kernels import manifest
from fp8kit.testing.attention import Rules

pytestmark = pytest.mark.gpu
GPU = Device("cuda", 0)
ROWS, COLUMNS = 512, 1024
LATE = """
extern "C" __global__ void late(unsigned* to, const unsigned* from, long long n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const long long start = clock64();
  while (clock64() - start < 400000) {}
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    to[i] = from[i];
}
"""


class Memory:
    """The arrays of a call beside x, made by the first call and used again by each other: nothing is then put
    on the stream for them."""

    def __init__(self) -> None:
        self.kept: list[ArrayView] = []
        self.outputs: list[ArrayView] = []
        self.next = 0

    def _keep(self, make: Callable[[], ArrayView]) -> ArrayView:
        if self.next == len(self.kept):
            self.kept.append(make())
        self.next += 1
        return self.kept[self.next - 1]

    def blank(self, *shape: int, dtype: Any = float32) -> ArrayView:
        """An output."""

        def make() -> ArrayView:
            self.outputs.append(arrays.zeros(shape, dtype, GPU))
            return self.outputs[-1]

        return self._keep(make)

    def ones(self, *shape: int, dtype: Any = bfloat16) -> ArrayView:
        return self._keep(lambda: arrays.to(arrays.as_view(np.ones(shape, dtype.numpy)), GPU))

    def places(self) -> ArrayView:
        """A row map that leaves every row where it is."""
        places = np.stack([np.arange(ROWS), np.zeros(ROWS)], 1).astype(np.int32)
        return self._keep(lambda: arrays.to(arrays.as_view(places), GPU))

    def space(self, size: int) -> ArrayView:
        return self._keep(lambda: arrays.zeros((size,), uint8, GPU))

    def cast(self) -> Cast:
        q, q_t = self.blank(ROWS, COLUMNS, dtype=uint8), self.blank(COLUMNS, ROWS, dtype=uint8)
        return Cast(E4M3, q, q_t, self.ones(1, dtype=float32), self.blank(1), self.blank(1))

    def again(self) -> Memory:
        """Blank outputs, for the next call."""
        for view in self.outputs:
            provider.fill_zero(view, 0)
        self.next = 0
        return self


LINES = Quantizer(E4M3, "mx_1x32", scale_rule="te")
GRIDS = {1: (ROWS, COLUMNS // 32), 0: (ROWS // 32, COLUMNS)}  # of its scales, by the dimension they lie along

CAUSAL, HEADS = Rules(window=(-1, 0)), (ROWS, 1, COLUMNS // 64, 64)


def heads(x: ArrayView) -> ArrayView:
    return ArrayView(x.ptr, HEADS, x.dtype, GPU, x)


Call = Callable[[Any, ArrayView, Memory], None]
# what is called, and how, where its name alone does not say it
CALLS: dict[str, Call] = {
    "amax": lambda k, x, r: k.amax(x, r.blank(1), x.shape, 0),
    "quantize_transpose": lambda k, x, r: k.quantize_transpose(
        x,
        r.cast(),
        r.blank(COLUMNS, dtype=bfloat16),
        r.space(k.quantize_transpose_workspace(ROWS, COLUMNS)),
        0,
    ),
    "act_fwd": lambda k, x, r: k.act_fwd(x, None, None, None, r.cast(), "gelu", (), 0),
    "act_bwd": lambda k, x, r: k.act_bwd(
        x,
        x,
        None,
        None,
        r.blank(COLUMNS, dtype=bfloat16),
        None,
        r.cast(),
        None,
        "gelu",
        (),
        r.space(k.act_bwd_workspace(ROWS, COLUMNS)),
        0,
    ),
    "norm_fwd": lambda k, x, r: k.norm_fwd(
        x,
        r.ones(COLUMNS),
        r.ones(COLUMNS),
        None,
        r.blank(ROWS),
        r.blank(ROWS),
        None,
        r.cast(),
        "LayerNorm",
        1e-5,
        False,
        0,
    ),
    "norm_bwd": lambda k, x, r: k.norm_bwd(
        x,
        x,
        r.ones(COLUMNS),
        r.ones(ROWS, dtype=float32),
        r.ones(ROWS, dtype=float32),
        x,
        r.blank(ROWS, COLUMNS, dtype=bfloat16),
        r.blank(COLUMNS, dtype=bfloat16),
        r.blank(COLUMNS, dtype=bfloat16),
        "LayerNorm",
        False,
        r.space(k.norm_bwd_workspace(ROWS, COLUMNS)),
        0,
    ),
    "dropout_add": lambda k, x, r: k.dropout_add(
        x, None, x, r.blank(ROWS, COLUMNS, dtype=bfloat16), 0.0, None, 0
    ),
    "sum_rows": lambda k, x, r: k.sum_rows(
        x, r.blank(COLUMNS, dtype=bfloat16), r.space(k.column_sum_workspace(ROWS, COLUMNS)), 0
    ),
    "permute_rows": lambda k, x, r: k.permute_rows(
        x, r.places(), None, r.blank(ROWS, COLUMNS, dtype=bfloat16), 0
    ),
    "unpermute_rows": lambda k, x, r: k.unpermute_rows(
        x, r.places(), None, r.blank(ROWS, COLUMNS, dtype=bfloat16), 0
    ),
    "permute_probs": lambda k, x, r: k.permute_probs(x, r.places(), r.blank(ROWS, dtype=bfloat16), 0),
    "unpermute_probs": lambda k, x, r: k.unpermute_probs(
        x, x, r.places(), r.blank(ROWS, 8, dtype=bfloat16), 0
    ),
    **{
        f"rotate along {along}": lambda k, x, r, along=along: k.rotate(
            x, r.blank(ROWS, COLUMNS), r.blank(1), 32, "te", along, None, 0
        )
        for along in (1, 0)
    },
    **{
        f"rotate_back along {along}": lambda k, x, r, along=along: k.rotate_back(
            x, r.blank(ROWS, COLUMNS), None, 32, "te", along, None, 0
        )
        for along in (1, 0)
    },
    **{
        f"cast_blocks along {along}": lambda k, x, r, along=along: k.cast_blocks(
            x,
            r.blank(ROWS, COLUMNS, dtype=uint8),
            *(r.blank(*GRIDS[along], dtype=kind) for kind in (float32, uint8)),
            r.blank(ROWS, COLUMNS, dtype=bfloat16),
            None,
            None,
            LINES,
            along,
            0,
            None,
            None,
            0,
        )
        for along in (1, 0)
    },
    "fp8_gemm by a kernel of our own": lambda k, x, r: implementation("fp8_gemm", "hopper_gemm.cu")(
        ArrayView(x.ptr, (ROWS, COLUMNS), uint8, GPU, x),  # whatever its bytes are as codes
        r.ones(COLUMNS, COLUMNS, dtype=uint8),
        r.blank(ROWS, COLUMNS, dtype=bfloat16),
        E4M3,
        E4M3,
        r.ones(1, dtype=float32),
        r.ones(1, dtype=float32),
        None,
        None,
        True,
        None,
        0,
    ),
    "attention_fwd": lambda k, x, r: k.attention_fwd(
        *[heads(x)] * 3,
        r.blank(*HEADS, dtype=bfloat16),
        r.blank(1, HEADS[2], ROWS),
        AttentionExtras(),
        CAUSAL,
        None,
        0,
    ),
    "attention_bwd": lambda k, x, r: k.attention_bwd(
        *[heads(x)] * 4,
        r.ones(*HEADS),
        r.ones(1, HEADS[2], ROWS, dtype=float32),
        *[r.blank(*HEADS, dtype=bfloat16) for _ in range(3)],
        None,
        None,
        AttentionExtras(),
        CAUSAL,
        True,
        r.space(4 * HEADS[2] * ROWS),
        0,
    ),
    "block_operand": lambda k, x, r: k.block_operand(
        ArrayView(x.ptr, (ROWS, COLUMNS), uint8, GPU, x),
        r.ones(ROWS, COLUMNS // 32, dtype=uint8),
        r.blank(ROWS, COLUMNS, dtype=uint8),
        r.blank(ROWS * COLUMNS // 32, dtype=uint8),
        (1, 32),
        1,
        0,
    ),
    "scale_from_amax": lambda k, x, r: k.scale_from_amax(
        ArrayView(x.ptr, (16,), float32, GPU, x), r.blank(16), r.blank(16), 448.0, False, 0.0, 3e38, 0
    ),
}


def test_every_early_kernel_has_a_call() -> None:
    """update_delayed changes what it reads, and is left to the tests of whole steps."""
    early = {function for entry in manifest.sources() for function in entry.early}
    operations = {name.partition(" ")[0] for name in CALLS}
    called = {f for name in operations for functions in manifest.uses(name).values() for f in functions}
    assert early - called == {"update_delayed"}


@pytest.mark.parametrize("again", [False, True], ids=["once", "behind another"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_written_late_is_seen(name: str, again: bool) -> None:
    import cupy

    kernels, late = dispatch.kernels(GPU), cupy.RawKernel(LATE, "late")
    values = (
        np.random.default_rng(7).standard_normal((ROWS, COLUMNS)).astype(np.float32).astype(bfloat16.numpy)
    )
    source, x = (arrays.to(arrays.as_view(values), GPU) for _ in range(2))
    memory, most, found = Memory(), arrays.zeros((1,), float32, GPU), []
    CALLS[name](kernels, x, memory)
    for delayed in (False, True):
        memory.again()
        if delayed:
            provider.fill_zero(x, 0)
        arrays.synchronize(GPU)
        if delayed:
            late((16,), (256,), (np.uintp(x.ptr), np.uintp(source.ptr), np.int64(ROWS * COLUMNS // 2)))
        if again:  # an early kernel that itself stands behind the late one
            kernels.amax(x, most, x.shape, 0)
        CALLS[name](kernels, x, memory)
        arrays.synchronize(GPU)
        found.append([view.numpy().tobytes() for view in memory.outputs])
    assert found[0] == found[1]
    assert any(any(part) for part in found[0])
