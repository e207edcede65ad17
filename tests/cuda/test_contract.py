"""Every kernel of the CUDA engine keeps the contract."""

from __future__ import annotations

import pytest

from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.testing.contract import Case, cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_contract(case: Case) -> None:
    device = Device("cuda", 0)
    case.run(dispatch.kernels(device), device)


@pytest.mark.parametrize("case", list(cases("block_gemm")), ids=str)
def test_products_of_blocks_behind_hoppers_own(case: Case) -> None:
    """cuBLASLt's, which take what that one cannot."""
    device = Device("cuda", 0)
    with policy_context(SelectionPolicy(per_op={"block_gemm": ("impl:cuda.block_gemm",)})):
        case.run(dispatch.kernels(device), device)
