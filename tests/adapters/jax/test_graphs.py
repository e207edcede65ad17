"""CUDA graphs: a replay of recorded calls, which the frontend allows under ``fk.deterministic``, gives every
bit that the calls give."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from fp8kit_jax import activation, calls

import fp8kit as fk


def verdict(platform, **environment):
    """The experiment in a process of its own, with XLA's flags for graphs."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""} | environment
    command = [sys.executable, "-m", "tests.adapters.jax.graphs", platform]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip(), done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0 or found["verdict"] == "refused", done.stderr
    return found


@pytest.mark.programs
def test_the_experiment_itself():
    """On a CPU nothing is recorded: the handler runs for every call, and both ways give the same bits."""
    found = verdict("cpu", JAX_PLATFORMS="cpu", OPENBLAS_NUM_THREADS="1", NUMBA_NUM_THREADS="1")
    assert found["verdict"] == "never replayed", found
    assert found["handler runs"] == found["calls"]
    assert found["calls"][0] == found["calls"][1] > 0


@pytest.mark.gpu
def test_a_replay_gives_the_bits_of_the_calls(capsys):
    """Scales, histories, inputs and keys change from step to step: a replay that went on with old ones
    differs in a bit."""
    found = verdict("gpu")
    with capsys.disabled():
        print(f"\ncommand buffers: {json.dumps(found)}")
    assert found["verdict"] in ("replayed", "never replayed")


def test_calls_may_be_recorded_where_they_are_deterministic():
    """Elsewhere large products are timed, which no recording allows."""
    for wanted, name in ((True, calls.RECORDED), (False, calls.TARGET)):
        with fk.deterministic(wanted):
            text = jax.jit(lambda x: activation(x, ("gelu",))).lower(jnp.ones((2, 1, 8))).as_text()
        assert f"{name}(" in text or f'"{name}"' in text or f"@{name}(" in text
