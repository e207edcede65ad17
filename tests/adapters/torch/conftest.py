"""Shared by the torch door's tests: the device, seeds, and the switch that promises equal bits."""

from __future__ import annotations

import pytest
import torch

import fp8kit as fk


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the modules live."""
    return request.param


@pytest.fixture(autouse=True)
def _same_bits():
    torch.manual_seed(1234)
    with fk.deterministic():
        yield
    torch._dynamo.reset()
