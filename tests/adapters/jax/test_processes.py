"""Several processes of ``jax.distributed``, each with two devices of the CPU or with a GPU: one device's
losses, and an end of all when one is killed."""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests.adapters.jax.processes import CASES, HEARTBEAT, STEPS
from tests.support.meshes import train
from tests.support.processes import PLACES, said, start
from tests.support.split_sequences import BFLOAT16_BOUND, PACKED_BOUND

on_both = pytest.mark.parametrize("place", PLACES)
TOTAL = 1e-3  # of the losses, whose sums over devices are in another order


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def started(name, place):
    """Two processes of a program."""
    return start("tests.adapters.jax.processes", 2, free_port(), name, place, JAX_PLATFORMS=place)


def ended(name, place):
    """The lines that each wrote."""
    ranks = started(name, place)
    found = said(ranks, 500 if place == "cpu" else 120)
    assert [rank.returncode for rank in ranks] == [0, 0], found[0][1][-2000:]
    return [out.splitlines() for out, _ in found]


@on_both
def test_training_by_two_processes(place):
    found, other = (json.loads(lines[-1]) for lines in ended("training", place))
    assert found == other  # losses and FP8 state, the same in both
    assert len(found["state"]) == 12
    for model, recipe, layout in CASES["cpu" if place == "cpu" else "gpu"]:
        want, _ = train(model, recipe, STEPS)
        got = found["losses"][f"{model} {recipe} {layout}"]
        assert len(got) == STEPS
        assert abs(sum(got) - sum(want)) <= TOTAL * sum(want)


@on_both
def test_keys_and_values_go_round_processes(place):
    for lines in ended("rings", place):
        errors = [json.loads(line) for line in lines[-2:]]
        assert max(errors) <= (PACKED_BOUND if place == "cpu" else BFLOAT16_BOUND), errors


@on_both
def test_a_killed_process_ends_the_other(place):
    """By JAX's own heartbeats, with a message that names it, within a minute."""
    ranks = started("dying", place)
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
