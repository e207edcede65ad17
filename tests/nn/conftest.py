"""Shared by the module tests: the device, and seeds."""

from __future__ import annotations

import pytest

from fp8kit import nn


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the modules live."""
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    nn.manual_seed(1234)
