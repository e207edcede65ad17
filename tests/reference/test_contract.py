"""Every kernel of the CPU engine keeps the contract."""

from __future__ import annotations

import inspect

import pytest

from fp8kit.arrays import CPU
from fp8kit.backends import dispatch, protocol
from fp8kit.backends.reference import IMPLEMENTATIONS
from fp8kit.testing.contract import Case, cases


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_contract(case: Case) -> None:
    case.run(dispatch.kernels(CPU), CPU)


def test_every_kernel_has_a_case() -> None:
    assert {case.kernel for case in cases()} | {
        k for k in protocol.KERNELS if k.endswith("_workspace")
    } == set(protocol.KERNELS)


def test_case_names_are_unique() -> None:
    names = [str(case) for case in cases()]
    assert len(names) == len(set(names))


def test_engine_is_complete() -> None:
    assert set(IMPLEMENTATIONS) == set(protocol.KERNELS)


@pytest.mark.parametrize("kernel", protocol.KERNELS)
def test_signature(kernel: str) -> None:
    assert list(inspect.signature(IMPLEMENTATIONS[kernel]).parameters) == list(
        protocol.signature(kernel).parameters
    )
