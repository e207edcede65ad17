"""Which raw kernels an operation launches stands in a table, and the table is what the engine's host code
does."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import cublaslt, gemm, implementation, launch
from fp8kit.backends.cuda.compile import Resources
from fp8kit.backends.protocol import KERNELS, signature
from fp8kit.formats import uint8
from fp8kit.lab.outputs import walk
from fp8kit.raw_kernels import manifest
from fp8kit.testing.contract import cases

GPU = Device("cuda", 0)


class _Runtime:
    """A driver without a device: every attribute is that of an H200, no call does anything."""

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return {75: 9, 76: 0, 16: 132, 81: 233472, 97: 232448}[attribute]

    def getDevice(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """What the engine asks for, with nothing loaded and nothing launched."""
    found: set[tuple[str, str]] = set()

    def look_up(source: str, function: str, device: int, **defines: str) -> launch.Kernel:
        entry = manifest.source(source)
        assert manifest.defines(**defines) in entry.variants, (source, defines)
        found.add((source, function))
        raw = SimpleNamespace(kernel=SimpleNamespace(ptr=1 << 44))
        return launch.Kernel(function, device, raw, entry.parameters[function], Resources(0, 0, 0, 0, 0))

    monkeypatch.setattr(launch, "kernel", look_up)
    monkeypatch.setattr(launch, "launch", lambda *arguments: None)
    monkeypatch.setattr(launch, "runtime", _Runtime)
    monkeypatch.setattr(
        cublaslt, "plan", lambda key, device: SimpleNamespace(run=lambda *arguments: None, settled=True)
    )
    for name in ("_plain_plan", "_scaled_plan"):
        monkeypatch.setattr(
            gemm, name, lambda *arguments: SimpleNamespace(run=lambda *arguments: None, settled=True)
        )
    monkeypatch.setattr("fp8kit.backends.cuda.attention._why_not_cudnn", lambda *arguments: "no library here")
    return found


class _Here:
    """One of the engine's kernels on views of host memory that say that they lie on a GPU; the CPU's for
    every other."""

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def __getattr__(self, name: str) -> Any:
        if name != self.operation:
            # that one asks for a device
            own = name.endswith("_workspace") and not name.startswith("attention")
            return implementation(name) if own else getattr(dispatch.kernels(CPU), name)

        def there(view: ArrayView) -> ArrayView:
            return ArrayView(view.ptr, view.shape, view.dtype, GPU, view, view._strides)

        def call(*args: Any, **named: Any) -> None:
            arguments = dict(signature(name).bind(*args, **named).arguments)
            arguments = {key: walk(value, there) for key, value in arguments.items()}
            if name.startswith("attention"):
                arguments["workspace"] = ArrayView(1 << 20, (1 << 40,), uint8, GPU)
            implementation(name)(**arguments)

        return call


@pytest.mark.parametrize("operation", sorted(manifest.USES))
def test_an_operation_launches_what_the_table_says(operation: str, launched: set[tuple[str, str]]) -> None:
    found = [case for case in cases() if case.kernel == operation]
    for case in found[:: max(1, len(found) // 60)]:
        with contextlib.suppress(AssertionError):  # nothing was computed
            case.run(_Here(operation), CPU)  # type: ignore[arg-type]
    known = {
        (source, function) for source, functions in manifest.USES[operation].items() for function in functions
    }
    only_with_cudnn = {
        ("attention_padding.cu", name) for name in manifest.source("attention_padding.cu").functions
    }
    assert launched <= known
    assert known - only_with_cudnn <= launched


def test_every_raw_kernel_is_in_the_table() -> None:
    named = {
        (source, function)
        for uses in manifest.USES.values()
        for source, functions in uses.items()
        for function in functions
    }
    assert named == {(entry.name, function) for entry in manifest.sources() for function in entry.functions}
    assert set(manifest.USES) == {name for name in KERNELS if "stream" in signature(name).parameters}
