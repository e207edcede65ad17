"""Shared by the torch frontend's tests: the device, seeds, and the switch that promises equal bits."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

import fp8kit as fk


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the modules live."""
    return request.param


@pytest.fixture
def everywhere(device):
    """What the test makes without a word about it is on that device."""
    with torch.device(device):
        yield


@pytest.fixture(autouse=True)
def _same_bits():
    torch.manual_seed(1234)
    with fk.deterministic():
        yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _no_time_of_guards(monkeypatch):
    """For its log torch.compile measures how long new guards take, with the processor's caches emptied: 40 ms
    for each compilation."""
    if "torch._dynamo.guards" in sys.modules:
        monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *arguments: 0.0)


@pytest.fixture(autouse=True)
def _beside_jax(monkeypatch):
    """Where other tests of the process have had JAX work, XLA's threads ask the device what torch's default
    mode of captures does not bear of any thread: there it looks at the capturing one alone."""
    if "jax" in sys.modules:
        monkeypatch.setattr(torch.cuda, "graph", partial(torch.cuda.graph, capture_error_mode="thread_local"))
