"""Recordings of calls: what is done again is what was done, byte by byte, and what cannot be done again is
not recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import subprocess
import sys
import types
from typing import Any

import pytest

import fp8kit as fk
from fp8kit import arrays, settings
from fp8kit.arrays import Device
from fp8kit.backends import cuda, dispatch, manager
from fp8kit.backends.cuda import cublaslt, launch, recorded
from fp8kit.backends.cuda.cublaslt import MatmulKey
from fp8kit.backends.protocol import KERNELS
from fp8kit.backends.registry import OpRegistry
from fp8kit.errors import BackendError
from fp8kit.execution.replay import Replays, replays
from fp8kit.formats import bfloat16, float8_e4m3fn, float32
from fp8kit.raw_kernels import manifest
from tests.support.cuda_libraries import Library, fake

KEY = MatmulKey(
    32,
    48,
    64,
    "nt",
    float8_e4m3fn,
    float8_e4m3fn,
    bfloat16,
    64,
    64,
    48,
    bias=True,
    scaling=("tensor", "tensor"),
)


@pytest.mark.parametrize(("parameters", "structure"), [("qqd", 0), ("qs", 24), ("qqs", 200), ("s", 4000)])
def test_a_launch_again_is_the_same_launch(
    parameters: str, structure: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, driver = fake(parameters, monkeypatch, structure)
    numbers = [2.5 if code == "d" else 1 << (40 + i) for i, code in enumerate(parameters) if code != "s"]
    given = (*numbers, bytes(range(250)) * 16)[: len(parameters)]
    given = (*given[:-1], given[-1][:structure]) if structure else given
    with recorded.recording() as made:
        launch.launch(kernel, (3, 2), 128, given, 99, 1024)
    other = tuple(b"\xee" * structure if code == "s" else 5 for code in parameters)
    launch.launch(kernel, 7, 32, other, 1)  # in the same memory
    made()
    first, _, again = driver.launches
    assert made.complete
    assert again == first
    if structure:
        assert driver.addresses[-1] % 16 == 0


def test_all_steps_are_done_again_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    beside: list[int] = []
    with recorded.recording() as made:
        launch.launch(kernel, 1, 32, (1,), 0)
        recorded.put(0, 0, "note", lambda stream: beside.append(len(driver.launches)), ())
        launch.launch(kernel, 1, 32, (2,), 0)
    made()
    assert beside == [1, 3]
    assert [struct.unpack("q", entry[4])[0] for entry in driver.launches] == [1, 2, 1, 2]
    launch.launch(kernel, 1, 32, (3,), 0)  # outside
    assert len(made.steps) == 3


class _Stream:
    """Stands for CuPy's stream: counts captures. ``fails``: the end of one does."""

    ptr = 1 << 33

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0

    def begin_capture(self) -> None:
        self.begun += 1

    def end_capture(self) -> Any:
        self.ended += 1
        return types.SimpleNamespace(graphExec=500 + self.ended)


@pytest.fixture
def aside(monkeypatch: pytest.MonkeyPatch) -> _Stream:
    """The stream that graphs are captured from, and a driver and a runtime that take part."""
    stream = _Stream()
    monkeypatch.setattr(recorded, "_aside", lambda device: stream)
    monkeypatch.setattr(recorded, "unsafe_calls", contextlib.nullcontext)
    monkeypatch.setattr(recorded, "OFTEN", 2)
    monkeypatch.setattr(launch, "capturing", lambda handle: False)
    return stream


def two_launches(kernel: launch.Kernel, stream: int) -> recorded.Recording:
    with recorded.recording() as made:
        launch.launch(kernel, 1, 32, (1,), stream)
        launch.launch(kernel, 2, 32, (2,), stream)
    return made


def launched_graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Graphs that ``fake``'s runtime launches from here on, and their streams."""
    graphs: list[tuple[int, int]] = []
    calls = types.SimpleNamespace(
        **vars(launch.runtime()), graphLaunch=lambda graph, stream: graphs.append((graph, stream))
    )
    monkeypatch.setattr(launch, "runtime", lambda: calls)
    return graphs


def test_a_call_that_comes_often_becomes_a_graph(aside: _Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    graphs = launched_graphs(monkeypatch)
    before, made = len(recorded._graphed), two_launches(kernel, 99)
    made()
    assert not aside.begun
    made()  # the second time is often, here: done as before, then captured
    assert (aside.begun, aside.ended, len(driver.launches), graphs) == (1, 1, 8, [])
    captured = driver.launches[-2:]
    assert [entry[3] for entry in captured] == [_Stream.ptr] * 2
    assert [entry[:3] + entry[4:] for entry in captured] == [
        entry[:3] + entry[4:] for entry in driver.launches[:2]
    ]
    made()
    assert (len(driver.launches), graphs) == (8, [(501, 99)])
    assert len(recorded._graphed) == before + 1
    assert not made.steps
    del made
    assert len(recorded._graphed) == before


def test_a_graph_is_launched_where_its_device_is_current(
    aside: _Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among several devices, of which a thread may have made any current."""
    kernel, driver = fake("q", monkeypatch)
    current, seen = [0], []
    monkeypatch.setattr(launch, "entry_point", lambda: (driver.entry, lambda: current[0]))
    calls = types.SimpleNamespace(
        getDevice=lambda: current[0],
        setDevice=lambda device: current.__setitem__(0, device),
        graphLaunch=lambda graph, stream: seen.append((graph, current[0])),
    )
    monkeypatch.setattr(launch, "runtime", lambda: calls)
    made = two_launches(kernel, 99)
    for device in (0, 0, 0, 1, 0):
        current[0] = device
        made()
        assert current == [device]
    assert seen == [(501, 0)] * 3


def test_what_is_captured_already_is_not_made_a_graph_of_its_own(
    aside: _Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, driver = fake("q", monkeypatch)
    monkeypatch.setattr(launch, "capturing", lambda handle: handle == 99)
    made = two_launches(kernel, 99)
    for _ in range(4):
        made()
    assert (aside.begun, len(driver.launches)) == (0, 10)


def test_work_beside_kernels_is_part_of_the_graph(aside: _Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    graphs, streams = launched_graphs(monkeypatch), []
    with recorded.recording() as made:
        launch.launch(kernel, 1, 32, (1,), 0)
        recorded.put(0, 0, "note", streams.append, ())
    for _ in range(3):
        made()
    assert graphs == [(501, 0)]
    assert (aside.begun, aside.ended, len(driver.launches), streams) == (1, 1, 4, [0, 0, 0, _Stream.ptr])


@pytest.mark.parametrize("slow", [False, True])
def test_one_step_becomes_a_graph_where_it_is_slower_than_that(
    slow: bool, aside: _Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("q", monkeypatch)
    graphs = launched_graphs(monkeypatch)
    done: list[tuple[str, int]] = []
    with recorded.recording() as made:
        work, captured = (
            lambda stream, name=name: done.append((name, stream)) for name in ("work", "captured")
        )
        recorded.put(0, 9, "note", work, (), captured, slow=slow)
    for _ in range(3):
        made()
    assert done == ([("work", 9)] * 3 + [("captured", _Stream.ptr)] if slow else [("work", 9)] * 4)
    assert (aside.begun, graphs) == (slow, [(501, 9)] * slow)


def test_what_cannot_be_captured_goes_on_step_by_step(
    aside: _Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, driver = fake("q", monkeypatch)

    def broken() -> Any:
        raise RuntimeError("capture is broken")

    monkeypatch.setattr(aside, "end_capture", broken)
    made = two_launches(kernel, 0)
    for _ in range(4):
        made()
    assert (aside.begun, len([entry for entry in driver.launches if entry[3] == 0])) == (1, 10)


def test_graphs_are_bounded(aside: _Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    monkeypatch.setattr(recorded, "MOST_GRAPHS", len(recorded._graphed))
    made = two_launches(kernel, 0)
    for _ in range(4):
        made()
    assert (aside.begun, len(driver.launches)) == (0, 10)


def test_a_refusal_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    monkeypatch.setattr(launch, "error_text", lambda status: f"error {status}")
    with recorded.recording() as made:
        launch.launch(kernel, 1, 32, (1,), 0)
    driver.status = 700
    with pytest.raises(BackendError, match=r"^launch of fake: error 700$"):
        made()


def _raising() -> None:
    raise RuntimeError("within")


RUINED = {
    "mark_unrecordable": lambda kernel: recorded.mark_unrecordable(),
    "another device": lambda kernel: recorded.put(1, 0, "note", lambda stream: None, ()),
    "another stream": lambda kernel: recorded.put(0, 7, "note", lambda stream: None, ()),
    "a recording within": lambda kernel: recorded.recording().__enter__(),
    "a recorded call within": lambda kernel: recorded.Recording()(),
    "an allocation": lambda kernel: arrays.provider(Device("cuda")).alloc(8, Device("cuda")),
}


@pytest.mark.parametrize("case", RUINED)
def test_what_cannot_be_done_again_is_not_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = fake("q", monkeypatch)
    from fp8kit.backends.cuda import device

    monkeypatch.setattr(device, "_calls", lambda: (None, lambda size: types.SimpleNamespace(ptr=1), None))
    monkeypatch.setattr(device.CudaProvider, "check", lambda self, where: None)
    with recorded.recording() as made:
        launch.launch(kernel, 1, 32, (1,), 0)
        assert made.complete
        RUINED[case](kernel)
    assert not made.complete


def test_an_error_within_leaves_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Replays(recorded.recording)
    with pytest.raises(RuntimeError, match="within"):
        known.run((1,), _raising)
    assert not known.found
    assert launch.here.recording is None


def test_a_product_again_has_its_own_addresses(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "entry_point", lambda: (None, None))
    monkeypatch.setattr(launch, "here", launch.Here())
    launch.here.memory = types.SimpleNamespace()  # type: ignore[assignment]
    destroyed: list[int] = []
    library.matmul_desc_destroy = destroyed.append  # type: ignore[attr-defined]
    plan = cublaslt.MatmulPlan(KEY, 0)
    with recorded.recording() as made:
        plan.run((1000, 2000, 3000, 11, 22, 33, 4000, 0), 555, 9)
        own = library.attributes[-10:]
    plan.run((1, 2, 3, 4, 5, 6, 7, 0), 8, 9)  # the plan's descriptor has other scales now
    plan.choose(2)
    made()
    first, _, again = library.products
    assert {(17, 22), (18, 11), (8, 33)} <= set(own)
    assert again[:8] == first[:8]
    assert chr(again[8]) == "C"  # the plan's algorithm, whenever that was found
    assert again[9:] == first[9:]
    del made
    assert len(destroyed) == 1


def test_a_recorded_product_has_the_algorithm_that_is_chosen_later(library: Library) -> None:
    plan = cublaslt.MatmulPlan(MatmulKey(4, 4, 4, "nn", float32, float32, float32, 4, 4, 4, timed=True), 0)
    plan.tune = lambda own, run, stream: None
    with recorded.recording() as made:
        plan.run((1, 2, 3, 0, 0, 0, 0, 0), 0, 0)
    assert made.complete

    def tune(own: cublaslt.MatmulPlan, run: Any, stream: int) -> None:
        run(4096)
        own.choose(2)
        own.tuned = True

    plan.tune = tune
    (step,) = made.steps
    step.replay()
    step.replay()
    algorithms = [product[8] for product in library.products]
    assert algorithms == [65, 65, 67, 67]
    assert [product[6] for product in library.products] == [3, 4096, 3, 3]


def test_keys_are_told_apart_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake("q", monkeypatch)
    known, done = Replays(recorded.recording), []

    def work(number: int) -> None:
        done.append(number)
        launch.launch(kernel, 1, 32, (number,), 0)

    for number in (1, 2, 1, 2, 1, 2):
        known.run((number,), work, number)
    assert done == [1, 2, 1, 2]  # the second time it is recorded
    assert [struct.unpack("q", entry[4])[0] for entry in driver.launches] == [1, 2] * 3
    for number in range(3, 4 + Replays.LIMIT):
        for _ in range(2):
            known.run((number,), work, number)
    assert 0 < len(known.found) <= Replays.LIMIT


def test_what_never_comes_again_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of another length has plans of its own, each of which is asked once; what comes again beside
    them is recorded all the same."""
    kernel, driver = fake("q", monkeypatch)
    known, before = Replays(recorded.recording), Replays.total
    for number in range(3 * Replays.LIMIT):
        known.run((number,), launch.launch, kernel, 1, 32, (number,), 0)
    assert [struct.unpack("q", entry[4])[0] for entry in driver.launches] == list(range(3 * Replays.LIMIT))
    assert Replays.total == before
    known.run((number,), launch.launch, kernel, 1, 32, (number,), 0)
    assert (len(known.found), Replays.total) == (1, before + 1)


def test_all_plans_together_keep_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = fake("q", monkeypatch)
    before = Replays.total
    monkeypatch.setattr(Replays, "PROCESS_LIMIT", before + 3)
    one, other = Replays(recorded.recording), Replays(recorded.recording)
    for number in (0, 0, 1, 1):
        one.run((number,), launch.launch, kernel, 1, 32, (number,), 0)
        other.run((number,), launch.launch, kernel, 1, 32, (number,), 0)
    assert (len(one.found), len(other.found)) == (2, 1)
    del one
    for _ in range(2):
        other.run((7,), launch.launch, kernel, 1, 32, (7,), 0)
    assert len(other.found) == 2
    other.forget()
    assert Replays.total == before


def test_recordings_can_be_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.replays()
    monkeypatch.setenv("FP8KIT_REPLAYS", "0")
    assert not settings.replays()


def test_only_the_engines_own_kernels_are_recorded() -> None:
    assert replays(dispatch.kernels(arrays.CPU)) is None
    assert replays(types.SimpleNamespace(**vars(dispatch.kernels(arrays.CPU)))) is None


_PROGRAM = """
import numpy as np
import fp8kit as fk
from fp8kit import nn
from fp8kit.backends.cuda import recorded

recorded.OFTEN = 2
layer = nn.Linear(64, 128, device="cuda")
x = fk.tensor(np.ones((32, 64), np.float32), device="cuda")
for step in range(40):
    with fk.autocast():
        y = layer(x)
    y.backward(y.view)
    del y
    layer.zero_grad()
print(len(recorded._graphed) > 0)
"""


@pytest.mark.gpu
def test_a_process_with_recordings_ends_silently() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_every_function_of_the_engine_is_recorded() -> None:
    """Also those that only a policy takes; one of somebody else among them is enough to record nothing."""
    registry = OpRegistry()
    cuda.register(registry)
    ranked = {name: registry.get_implementations(name) for name in KERNELS}
    assert manager._recorder(ranked) is cuda.recorder
    ranked["amax"] = [dataclasses.replace(ranked["amax"][0], fn=_ours)]
    assert manager._recorder(ranked) is None


def _ours(x: Any, amax: Any, tile: Any, stream: int) -> None:
    """A kernel of somebody else."""


@pytest.mark.gpu
@pytest.mark.parametrize("replacement", [_ours, manifest.text("amax.cu")], ids=["function", "text"])
def test_an_override_is_never_passed_over(replacement: Any) -> None:
    assert replays(dispatch.kernels(Device("cuda"))) is not None
    with fk.override("amax", replacement):
        assert replays(dispatch.kernels(Device("cuda"))) is None
    assert replays(dispatch.kernels(Device("cuda"))) is not None
