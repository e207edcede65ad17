"""A process that is killed ends the job, with a message that names it and the layer."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from fp8kit_torch import collectives
from fp8kit_torch.collectives import TorchCollectives, naming_failures

from fp8kit.collectives import call_failed, reason
from fp8kit.commands import launch
from fp8kit.errors import ArgumentError, BackendError
from tests.support.source import ROOT

SAID = {
    "tp": r"rank 0: in call \d+, all_reduce max of float32 \(1,\) in LayerNormMLP mlp fc1",
    "fsdp": r"rank 0: in all_gather\w+ for 0",
}


@pytest.mark.programs
@pytest.mark.parametrize("how", SAID)
def test_a_killed_process_ends_the_job(how):
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FP8KIT_DEVICE": "cpu"}
    words = [sys.executable, "-m", "fp8kit", "launch", "-n", "2", "-m", "tests.support.failing_torch_rank"]
    done = subprocess.run([*words, how], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    ended = time.monotonic()
    assert done.returncode == 1
    assert re.search(f"collectives: the ranks' call failed: {SAID[how]}", done.stderr), done.stderr[-3000:]
    # nor a traceback of torch's before fp8kit's own call's
    assert ("direct cause" in done.stderr) is (how == "fsdp"), done.stderr
    assert "rank 1: nothing: it hangs or has ended" in done.stderr
    assert "rank 1 was ended by SIGKILL" in done.stderr
    # rank 0 asks the other one for five seconds
    assert ended - float(re.search(r"fails at (\S+)", done.stderr)[1]) < launch.GRACE + 30


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="mine") as caught, naming_failures():
        raise RuntimeError("mine")
    assert type(caught.value) is RuntimeError
    with pytest.raises(dist.DistBackendError, match="no group"), naming_failures():
        raise dist.DistBackendError("before there is a process group: no group")
    own = BackendError("collectives", "rank 0", "gloo", "the same call")
    with pytest.raises(BackendError) as found, naming_failures():
        raise own
    assert found.value is own


def test_the_error_has_its_fields_and_whole_words():
    error = call_failed(f"rank 0: in call 2 {reason('gloo ' + 'word ' * 100 + chr(10) + 'line 2')}")
    assert (error.operation, error.argument, error.wanted) == (
        "collectives",
        "ranks",
        "the same call of all ranks",
    )
    assert str(error) == f"collectives: the ranks' call failed: {error.got}"
    assert error.got.endswith("word word ...)")
    assert len(error.got) <= len("rank 0: in call 2 ") + 202
    assert reason("") == "()"
    assert isinstance(pickle.loads(pickle.dumps(error)), BackendError)


def test_what_is_no_group():
    with pytest.raises(ArgumentError, match=r"group: got 'all', expected None or a process group"):
        naming_failures("all").__enter__()


def test_a_failure_is_named_by_layer(tmp_path):
    """Of one process that says what torch would."""

    class Broken(torch.nn.Module):
        def forward(self, x):
            raise dist.DistBackendError("a socket is closed")

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        said = pytest.raises(
            BackendError, match=r"call failed: rank 0: in a collective for Broken \(a socket is closed\)"
        )
        with said, naming_failures():
            torch.nn.Sequential(Broken())(torch.ones(1))
    finally:
        dist.destroy_process_group()


class Group:
    """A process's group of two processes."""

    group_name = "of two"

    def __init__(self, rank):
        self.rank = rank


def test_each_failure_has_its_own_words(monkeypatch):
    """What a process said of an earlier failure, in this group or in one before it that had its name, is not
    taken for what it says of the next one."""
    store, counts, process_of = dist.HashStore(), [Counter(), Counter()], {}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(collectives, "is_group", lambda group: True)
    monkeypatch.setattr(collectives.torch_compat, "store_of", lambda group: store)
    monkeypatch.setattr(collectives, "_doing", str)
    monkeypatch.setattr(collectives, "_GRACE", 0.2)

    def said(group, what):
        monkeypatch.setattr(TorchCollectives, "of", process_of.get)
        with pytest.raises(BackendError) as caught, naming_failures(group):
            raise dist.DistBackendError(what)
        return str(caught.value)

    for run in range(2):
        groups = [Group(0), Group(1)]
        for group in groups:
            monkeypatch.setattr(collectives, "_RUNS", counts[group.rank])
            process_of[group] = TorchCollectives(group)
        for use in range(2):
            what = f"use {use} of run {run}"
            assert f"rank 0: in {what}; rank 1: nothing" in said(groups[0], what)
            assert f"rank 0: in {what}; rank 1: in {what}, beside" in said(groups[1], f"{what}, beside")
