"""Eight virtual CPU devices for every test of the JAX frontend, set before JAX looks for devices; tests run
there but for those marked gpu."""

from __future__ import annotations

import faulthandler
import importlib.util
import os

import pytest

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy and PyTorch allocate on the same GPU
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads where an operation was called

LIMIT = 60  # seconds for a test: GPUs are lent by the minute
NEED_FLAX = [
    "test_flax.py",
    "test_flax_decode.py",
    "test_flax_fields.py",
    "test_flax_options.py",
    "test_nnx.py",
    "test_residual.py",
    "test_residual_modules.py",
    "test_same_layers.py",
    "test_two_gpus_split.py",
]
collect_ignore = [] if importlib.util.find_spec("flax") else NEED_FLAX


def pytest_terminal_summary(terminalreporter):
    """What was left out, said."""
    if collect_ignore:
        terminalreporter.write_line(
            f"Flax is not installed: {', '.join(collect_ignore)} are left out", yellow=True
        )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the native frontend's arrays live; JAX's are ``placed`` there too."""
    return request.param


@pytest.fixture
def ends_when_stuck(capfd):
    """A test that stands still ends its process, which says where: within XLA, Python hears no signal."""
    with capfd.disabled():
        error = os.dup(2)
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=error)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(error)


@pytest.fixture
def same_bits():
    """The policy that promises equal bits."""
    import fp8kit as fk

    with fk.deterministic():
        yield


@pytest.fixture(autouse=True)
def placed(request):
    """Arrays go to the first CPU device, or to the GPU."""
    import jax

    kind = "gpu" if request.node.get_closest_marker("gpu") is not None else "cpu"
    with jax.default_device(jax.devices(kind)[0]):
        yield
