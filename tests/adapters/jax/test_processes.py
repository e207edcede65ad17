"""Several processes of ``jax.distributed`` on CPUs, each with two devices: one device's losses, and an end of
all when one is killed."""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests.adapters.jax.processes import CASES, HEARTBEAT, STEPS
from tests.support.meshes import train
from tests.support.processes import start
from tests.support.split_sequences import PACKED_BOUND

pytestmark = pytest.mark.programs
TOTAL = 1e-3  # of the losses, whose sums over devices are in another order


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def started(name, ranks):
    """The processes of a program."""
    return start("tests.adapters.jax.processes", ranks, free_port(), name, JAX_PLATFORMS="cpu")


def test_training_by_two_processes():
    ended = [(rank.communicate(timeout=500), rank.returncode) for rank in started("training", 2)]
    assert [code for _, code in ended] == [0, 0], ended[0][0][1][-2000:]
    found, other = (json.loads(out.splitlines()[-1]) for (out, _), _ in ended)
    assert found == other  # losses and FP8 state, the same in both
    assert len(found["state"]) == 12
    for model, recipe, layout in CASES:
        want, _ = train(model, recipe, STEPS)
        got = found["losses"][f"{model} {recipe} {layout}"]
        assert len(got) == STEPS
        assert abs(sum(got) - sum(want)) <= TOTAL * sum(want)


def test_keys_and_values_go_round_processes():
    ended = [(rank.communicate(timeout=200), rank.returncode) for rank in started("rings", 2)]
    assert [code for _, code in ended] == [0, 0], ended[0][0][1][-2000:]
    for (out, _), _ in ended:
        errors = [json.loads(line) for line in out.splitlines()[-2:]]
        assert max(errors) <= PACKED_BOUND, errors


def test_a_killed_process_ends_the_other():
    """By JAX's own heartbeats, with a message that names it, within a minute."""
    ranks = started("dying", 2)
    ranks[1].wait(timeout=200)
    killed = time.monotonic()
    ranks[1].communicate()
    out, error = ranks[0].communicate(timeout=200)
    assert time.monotonic() - killed < 60
    assert ranks[1].returncode == -9
    assert ranks[0].returncode != 0
    assert f"step {2}" in out
    assert error.count("Terminating process because the JAX distributed service detected fatal errors") == 1
    assert "tasks are unhealthy (stopped sending heartbeats):\n1\n" in error
    assert HEARTBEAT < 60
