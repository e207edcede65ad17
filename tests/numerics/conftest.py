"""What the laboratory's tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device a test runs on; the GPU by ``make test-gpu``."""
    return request.param
