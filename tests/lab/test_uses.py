"""Which raw kernels an operation launches stands in their sources, and that is what the engine's host code
does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import (
    OWN,
    cublaslt,
    gemm,
    hopper_flash,
    hopper_fused,
    hopper_gemm,
    hopper_grouped,
    implementation,
    launch,
)
from fp8kit.backends.protocol import KERNELS, SPECS, map_arrays
from fp8kit.backends.registry import CannotTake
from fp8kit.formats import uint8
from fp8kit.raw_kernels import manifest
from fp8kit.testing.contract import Case, SampleCall, Sampler, cases
from tests.support.contract import usual

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
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """What the engine launches, which loads nothing here."""
    found: set[tuple[str, str]] = set()

    def note(kernel: launch.Kernel, *arguments: Any) -> None:
        found.add((kernel.source, kernel.name))

    monkeypatch.setattr(launch, "runtime", _Runtime)
    monkeypatch.setattr(
        cublaslt, "plan", lambda key, device: SimpleNamespace(run=lambda *arguments: None, tuned=True)
    )
    monkeypatch.setattr(
        gemm, "_plan", lambda *arguments: SimpleNamespace(run=lambda *arguments: None, tuned=True)
    )
    for module in (hopper_gemm, hopper_grouped, hopper_flash):
        monkeypatch.setattr(module, "tensor_map", lambda *arguments: bytes(120))
    planned = hopper_gemm.planned.__wrapped__
    for module in (hopper_gemm, hopper_fused):
        monkeypatch.setattr(module, "planned", planned)
    monkeypatch.setattr(hopper_grouped, "_plan", hopper_grouped._plan.__wrapped__)
    monkeypatch.setattr("fp8kit.backends.cuda.attention._why_not_cudnn", lambda *arguments: "no library here")
    monkeypatch.setattr("fp8kit.backends.cuda.cudnn_fp8.why_not", lambda *arguments: None)
    monkeypatch.setattr("fp8kit.backends.cuda.cudnn_plans.put", lambda *arguments: None)
    # nobody looks into the memory that a call works in, up to 32 MiB
    monkeypatch.setattr(
        Sampler, "workspace", lambda sampler, nbytes: ArrayView(1 << 20, (nbytes,), uint8, CPU)
    )
    with launch.launching_by(note):
        yield found


class _Here:
    """One of the engine's kernels on views of host memory that say that they lie on a GPU; the CPU's for
    every other."""

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def __getattr__(self, name: str) -> Any:
        if name != self.operation:
            # that one asks for a device
            own = name.endswith("_workspace") and not name.startswith(("attention", "fp8_attention"))
            return implementation(name) if own else getattr(dispatch.kernels(CPU), name)

        def there(view: ArrayView) -> ArrayView:
            return ArrayView(view.ptr, view.shape, view.dtype, GPU, view, view._strides)

        def call(*args: Any, **named: Any) -> None:
            arguments = SPECS[name].bind(*args, **named)
            arguments = {key: map_arrays(value, there) for key, value in arguments.items()}
            if name.startswith(("attention", "fp8_attention")):
                arguments["workspace"] = ArrayView(1 << 20, (1 << 40,), uint8, GPU)
            for source in ("", *(own for own, kernels in OWN.items() if name in kernels)):
                with suppress(CannotTake):
                    implementation(name, source)(**arguments)

        return call


LAUNCHING = [name for name in KERNELS if SPECS[name].launches]


def launches(operation: str, case: Case) -> None:
    """Nothing is computed, and nothing compared."""
    kernels = _Here(operation)
    SampleCall(case, kernels, CPU).run(kernels)


def said(operation: str) -> set[tuple[str, str]]:
    """(source, function) of all that the sources say it launches."""
    uses = manifest.uses(operation)
    return {(source, function) for source, functions in uses.items() for function in functions}


@pytest.mark.parametrize("operation", LAUNCHING)
def test_an_operation_launches_what_the_sources_say(operation: str, launched: set[tuple[str, str]]) -> None:
    """By every value of every option, and by as many other cases as it takes."""
    known = said(operation)
    only_with_cudnn = {
        ("attention_padding.cu", name) for name in manifest.source("attention_padding.cu").functions
    }
    for case in usual(operation):
        launches(operation, case)
    for case in cases(operation):
        if known - only_with_cudnn <= launched:
            break
        launches(operation, case)
    assert launched <= known
    assert known - only_with_cudnn <= launched


@pytest.mark.combinations
@pytest.mark.parametrize("operation", LAUNCHING)
def test_nor_do_the_other_cases_launch_more(operation: str, launched: set[tuple[str, str]]) -> None:
    found = list(cases(operation))
    for case in found[:: max(1, len(found) // 60)]:
        launches(operation, case)
    assert launched <= said(operation)


def test_every_raw_kernel_names_operations_of_the_contract() -> None:
    for entry in manifest.sources():
        for function in entry.functions:
            assert any(entry.launched_by(function, name) for name in KERNELS), function
            assert set(entry.operations[function]) <= set(KERNELS), function
    assert all(bool(manifest.uses(name)) == SPECS[name].launches for name in KERNELS)
