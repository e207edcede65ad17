"""Gathering and summing by copies between the ranks' workspaces: ranks are threads here, and processes with a
GPU each in ``symmetric_worker``."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fp8kit_torch import torch_compat
from fp8kit_torch.symmetric import _GRAIN, Beside, Copies, Workspace

from tests.support.processes import PLACES, run


class Machine:
    """Memory that the ranks, threads, reach of each other, and how often they met."""

    def __init__(self, size):
        self.size, self.made = size, []
        self.barrier = threading.Barrier(size, timeout=20)
        self.buffers = [None] * size

    def make(self, rank):
        def made(size):
            # whoever reads what nobody has written finds it
            self.buffers[rank] = torch.full((size,), 0xA5, dtype=torch.uint8)
            self.barrier.wait()
            found = list(self.buffers)
            self.barrier.wait()
            self.made.append(size)
            return Workspace(found, self.barrier.wait)

        return made

    def run(self, work):
        results, errors = [None] * self.size, []

        def rank(i):
            try:
                results[i] = work(Copies(i, self.size, self.make(i)))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(i,)) for i in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@pytest.mark.parametrize("size", [2, 3])
def test_calls_follow_each_other(size):
    """Each call, of any kind, size and dtype, gives what it is to; ranks are early and late by turns, and
    send parts of sums before."""
    rng = np.random.default_rng(0)
    calls = [
        (operation, int(rng.integers(1, 3000)) * 16, dtype)
        for _ in range(12)
        for operation in ("all_gather", "reduce_scatter")
        for dtype in ((torch.uint8, torch.float32) if operation == "all_gather" else (torch.bfloat16,))
    ]
    given = [
        [
            torch.from_numpy(rng.integers(0, 99, (n,))).to(dtype).tile(size if scatters else 1)
            for _ in range(size)
        ]
        for kind, n, dtype in calls
        for scatters in [kind == "reduce_scatter"]
    ]
    for i, sources in enumerate(given):
        if calls[i][0] == "reduce_scatter":  # parts of a rank's source differ
            given[i] = [source + torch.arange(source.numel()).to(source.dtype) % 7 for source in sources]

    def work(copies):
        found = []
        for i, (operation, n, dtype) in enumerate(calls):
            if (i + copies.rank) % 5 == 0:
                time.sleep(0.003)
            source, others = given[i][copies.rank], [(copies.rank + s) % size for s in range(1, size)]
            if operation == "all_gather":
                target, came = torch.empty(n * size, dtype=dtype), []
                copies.all_gather(source, target, came.append)
                assert came == others
            else:
                target = torch.empty(n, dtype=dtype)
                for other in others[: i % size]:  # some parts, or all, before
                    copies.send(source, other)
                    time.sleep(0.001 * (i % 2))
                copies.reduce_scatter(source, target)
            found.append(target)
        return found

    machine = Machine(size)
    for rank, found in enumerate(machine.run(work)):
        for (operation, *_), sources, got in zip(calls, given, found, strict=True):
            wanted = (
                torch.cat(sources)
                if operation == "all_gather"
                else torch.stack([s.float().chunk(size)[rank] for s in sources]).sum(0).to(got.dtype)
            )
            assert torch.equal(got, wanted), operation
    assert max(machine.made) == 2 * -(-max(s[0].nbytes for s in given) // _GRAIN) * _GRAIN


def test_a_workspace_grows_when_it_must():
    def work(copies):
        for n in (100, 200, _GRAIN, 300, _GRAIN + 1, 5):
            source = torch.full((n,), copies.rank, dtype=torch.uint8)
            target = torch.empty(2 * n, dtype=torch.uint8)
            copies.all_gather(source, target)
            assert target.tolist() == [0] * n + [1] * n
        return copies.calls

    machine = Machine(2)
    assert machine.run(work) == [6, 6]
    assert sorted(machine.made) == [2 * _GRAIN] * 2 + [4 * _GRAIN] * 2


def test_how_long_ranks_wait_is_the_groups():
    options = SimpleNamespace(_timeout=timedelta(seconds=7))
    known = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    assert torch_compat.timeout_of(known, torch.device("cuda")) == timedelta(seconds=7)
    unknown = SimpleNamespace(_get_backend=lambda device: None)
    assert torch_compat.timeout_of(unknown, torch.device("cuda")) == timedelta(minutes=10)
    assert not torch_compat.has_symmetric_memory("a group of nobody")


def test_a_sum_that_an_error_ended_is_left():
    def work(copies):
        source = torch.arange(4, dtype=torch.float32) + copies.rank
        copies.send(source, 1 - copies.rank)
        gathered = torch.empty(8)
        copies.all_gather(source, gathered)
        assert gathered.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
        return copies.calls

    assert Machine(2).run(work) == [2, 2]


def test_calls_of_a_group(monkeypatch):
    """What is put on which stream, and what waits for it, with stand-ins for CUDA's streams and for torch's
    handle of the memory."""
    machine, log = Machine(2), threading.local()

    class Stream:
        def __init__(self, *how, **more):
            self.name = "aside" if how else "main"

        def record_event(self):
            log.said.append(("event",))
            return f"event {len(log.said)}"

        def __getattr__(self, name):
            return lambda *given: log.said.append((self.name, name, *map(str, given)))

    def memory(size, device, name):
        space = machine.make(log.rank)(size)

        def barrier(channel, limit):
            log.said.append(("meet", channel, limit))
            space.barrier()

        return None, SimpleNamespace(get_buffer=lambda rank, *_: space.buffers[rank], barrier=barrier)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch_compat, "symmetric_memory", memory)

    def work(copies):
        rank = log.rank = copies.rank
        log.said = []
        options = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))
        group = SimpleNamespace(
            rank=lambda: rank, size=lambda: 2, group_name="0", _get_backend=lambda device: options
        )
        beside = Beside(group, torch.device("cpu"))
        source, whole = torch.full((4,), rank + 1.0), torch.empty(8)
        wait = beside.start("all_gather", source, whole)
        wait(0, 1 - rank)
        wait(0, rank)  # comes with the whole
        wait(0)
        assert whole.tolist() == [1.0] * 4 + [2.0] * 4
        waits = [words[-1] for words in log.said if words[1:2] == ("wait_event",)]
        assert waits[0] != waits[1] == waits[2]
        assert ("meet", 0, 7000) in log.said
        beside.send(whole, 1 - rank)
        beside.start("reduce_scatter", whole, source)(0)
        assert source.tolist() == [2.0 * (rank + 1)] * 4
        names = [what[0] for name, *what in log.said if name == "aside"]
        assert names == ["synchronize", "wait_stream", "wait_stream", "wait_stream"]

    machine.run(work)


@pytest.mark.parametrize("place", PLACES)
def test_two_processes(place, tmp_path):
    """Products by parts are made over Gloo too, whose calls are then waited for by parts, with no symmetric
    memory."""
    cases = ["high", "delayed", "current", "block"] if place == "cuda" else []
    run(
        "tests.adapters.torch.symmetric_worker", 2, tmp_path, place, ["products_by_parts", *cases], timeout=90
    )
