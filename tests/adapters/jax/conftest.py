"""Eight virtual CPU devices for every test of the JAX door, set before JAX looks for devices; tests run there but for those marked gpu."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


@pytest.fixture(autouse=True)
def placed(request):
    """Arrays go to the first CPU device, or to the GPU."""
    import jax

    kind = "gpu" if request.node.get_closest_marker("gpu") is not None else "cpu"
    with jax.default_device(jax.devices(kind)[0]):
        yield
