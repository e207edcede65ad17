"""Tests of what is Hopper's alone: on a device, and without one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from fp8kit.backends.cuda import hopper_gemm, launch
from fp8kit.raw_kernels import manifest


def want_hopper() -> None:
    """Skips the test on another GPU than Hopper, which has none of these kernels and other sums."""
    if (found := launch.capability(0)) != hopper_gemm.CAPABILITY:
        pytest.skip(f"for compute capability 9.0 alone, this GPU has {'.'.join(map(str, found))}")


def planned(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``_plan`` of a module without a device; kernels stand for their defines."""
    monkeypatch.setattr(launch, "capability", lambda index: (9, 0))
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    monkeypatch.setattr(launch, "kernel", lambda source, name, index, **defines: manifest.defines(**defines))
    monkeypatch.setattr(module, "tensor_map", lambda *arguments: repr(arguments).encode())
    return module._plan.__wrapped__
