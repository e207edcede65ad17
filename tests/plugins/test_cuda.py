"""A plugin's kernel for CUDA arrays, in plain CuPy: chosen, proved, used by a layer, and what it lacks falls
through to the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.plugins import CannotTake, Kind, OpImpl, explain, registry
from fp8kit.testing import check_implementation

pytestmark = pytest.mark.gpu
CUDA = Device("cuda")


class Foreign:
    """A stream's handle, as CuPy takes one."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def test_a_kernel_in_cupy() -> None:
    import cupy

    calls: list[str] = []

    def add(a: Any, b: Any, out: Any, stream: int) -> None:
        if a.dtype.name == "bfloat16":
            raise CannotTake("float32 and float16 only")
        calls.append(a.dtype.name)
        if a.size:
            with cupy.cuda.Stream.from_external(Foreign(stream)) if stream else cupy.cuda.Stream.null:
                total = cupy.asarray(a).reshape(-1, b.size) + cupy.asarray(b).reshape(1, -1)
                cupy.asarray(out)[...] = total.reshape(out.shape)

    impl = OpImpl(
        "add",
        "cupy.add",
        Kind.VENDOR,
        add,
        vendor="acme",
        priority=110,
        min_arch=80,
        devices=frozenset({"cuda"}),
    )
    report = check_implementation(impl)
    assert report.ok
    assert report.device == CUDA
    assert report.count("declined") > 0
    registry.register_impl(impl)
    assert explain("add", "cuda").chosen is impl
    x = fk.tensor(np.full((4, 16), 1.5, np.float32), device="cuda")
    calls.clear()
    assert (x + x).numpy().tolist() == [[3.0] * 16] * 4
    assert calls == ["float32"]
    half = fk.tensor(np.full((4, 16), 1.5, np.float32), device="cuda", dtype="bfloat16")
    assert (half + half).numpy().astype(np.float32).tolist() == [[3.0] * 16] * 4, "the engine's own"
    with fk.use_backend("cupy"):
        assert dispatch.default_device() == CUDA
        layer = fk.nn.LayerNormMLP(16, 32)
        (x + layer(x)).backward(x.detach())
    assert set(calls) == {"float32"}
    with fk.use_backend("cuda"):
        calls.clear()
        _ = x + x
    assert calls == []
    assert dispatch.kernels(CUDA).norm_bwd_workspace(64, 64) == registry.get_implementations(
        "norm_bwd_workspace"
    )[0].fn(64, 64)
