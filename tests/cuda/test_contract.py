"""Every kernel of the CUDA engine keeps the contract."""

from __future__ import annotations

import pytest

from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.testing.contract import Case, cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_contract(case: Case) -> None:
    device = Device("cuda", 0)
    case.run(dispatch.kernels(device), device)
