"""Tests of what is Hopper's alone: on a device, and without one."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fp8kit import arrays
from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import fused_gemm, hopper_gemm, hopper_grouped, implementation, launch
from fp8kit.backends.protocol import SPECS, map_arrays
from fp8kit.formats import E4M3, E5M2, float32
from fp8kit.raw_kernels import manifest
from fp8kit.testing.contract import put


def want_hopper() -> None:
    """Skips the test on another GPU than Hopper, which has none of these kernels and other sums."""
    if (found := launch.capability(0)) != hopper_gemm.CAPABILITY:
        pytest.skip(f"for compute capability 9.0 alone, this GPU has {'.'.join(map(str, found))}")


def fill_shared_memory_with_nan(kernels: Any) -> None:
    """By a product of large tiles whose codes are NaN, on every multiprocessor."""
    codes, scale = put(np.full((4096, 1024), 0x7F, np.uint8), GPU), put(np.ones(1, np.float32), GPU)
    out = arrays.empty((4096, 4096), float32, GPU)
    kernels.fp8_gemm(codes, codes, out, E4M3, E4M3, scale, scale, None, None, True, None, 0)


def planned(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What plans a module's products, without a device; kernels stand for their defines."""
    monkeypatch.setattr(launch, "capability", lambda index: (9, 0))
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    monkeypatch.setattr(launch, "kernel", lambda source, name, index, **defines: manifest.defines(**defines))
    for own in {module, hopper_gemm}:  # `hopper_gemm` makes the result's map for others
        monkeypatch.setattr(own, "tensor_map", lambda *arguments: repr(arguments).encode())
    return getattr(module, "planned" if module is hopper_gemm else "_plan").__wrapped__


def use_largest_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made by the largest tiles that there are, whatever their sizes; no plan is kept."""

    def largest(along: Any, m: int, n: int, k: int, groups: int, promote: int, *more: int) -> Any:
        return hopper_gemm.Tiling(256, 128) if promote else hopper_gemm.Tiling(128, 256)

    monkeypatch.setattr(hopper_grouped, "tiling", largest)
    keep_no_plans(monkeypatch)


def keep_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of groups are planned anew at each call."""
    for name in ("_plan", "_plan_high"):
        monkeypatch.setattr(hopper_grouped, name, getattr(hopper_grouped, name).__wrapped__)


# --- kernels carried out in NumPy on what the host tells them -----------------------------------------------

GPU = Device("cuda", 0)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
_MAP = "=9q48x"  # what a stand-in of a map says
_KINDS = ("uint8", "float32", "bfloat16", "float16")


def memory(address: int, count: int, dtype: Any) -> np.ndarray[Any, Any]:
    """So many elements of the host's memory."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype)


def map_of(kind: str, sizes: Any, strides: Any, area: Any, swizzled: bool = False) -> bytes:
    """A stand-in for ``tensor_map``, of three dimensions."""
    full = (*sizes, 1)[:3], (*strides, 0)[:2], (*area, 1)[:3]
    return struct.pack(_MAP, _KINDS.index(kind), *full[0], *full[1], *full[2])


def described(tensor_map: bytes) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What a stand-in was made of: kind, sizes, strides, box."""
    kind, *numbers = struct.unpack(_MAP, tensor_map)
    return _KINDS[kind], tuple(numbers[:3]), tuple(numbers[3:5]), tuple(numbers[5:])


def box(address: int, tensor_map: bytes, column: int, row: int, matrix: int = 0) -> np.ndarray[Any, Any]:
    """What one copy brings: zeros outside of the array."""
    kind, columns, rows, matrices, stride, apart, width, height, one = struct.unpack(_MAP, tensor_map)
    dtype = np.dtype(_KINDS[kind])
    assert one == 1
    assert column * dtype.itemsize % 16 == 0
    assert address % 16 == 0
    assert (stride | apart) * dtype.itemsize % 16 == 0
    assert apart in (0, rows * stride)
    made = np.zeros((height, width), dtype)
    flat = memory(address, matrices * rows * stride, dtype).reshape(-1, rows, stride)
    if matrix < matrices:
        part = flat[matrix, max(row, 0) : row + height, column : min(column + width, columns)]
        made[: part.shape[0], : part.shape[1]] = part
    return made


class Emulated:
    """Kernels of the contract, ``names``, by the engine's host code for ``source`` on memory of the host; the
    CPU engine's for every other. ``carried_out``: source -> what does a launch of it: the kernel and its
    arguments."""

    def __init__(
        self, source: str, names: Collection[str], carried_out: Mapping[str, Callable[..., None]]
    ) -> None:
        self.source, self.names, self.carried_out, self.taken = source, names, carried_out, 0

    def fused_workspace(self, *sizes: int) -> int:
        return fused_gemm.fused_workspace(*sizes)

    def __getattr__(self, name: str) -> Any:
        if name not in self.names:
            return getattr(dispatch.kernels(CPU), name)

        def there(view: ArrayView) -> ArrayView:
            return ArrayView(view.ptr, view.shape, view.dtype, GPU, view, view._strides)

        def run(kernel: launch.Kernel, grid: Any, block: Any, args: Any, *rest: Any) -> None:
            self.carried_out[kernel.source](kernel, *args)

        def call(*args: Any, **named: Any) -> None:
            given = SPECS[name].bind(*args, **named)
            given = {key: map_arrays(value, there) for key, value in given.items()}
            with launch.launching_by(run):
                implementation(name, self.source)(**given)
            self.taken += 1

        return call
