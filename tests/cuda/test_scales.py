"""The update of many states as launches: variants, tables byte by byte, and what is put together once."""

from __future__ import annotations

import contextlib
import gc
import struct
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fp8kit import scaling
from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import launch, scales
from fp8kit.formats import float32
from fp8kit.nn import Linear
from fp8kit.raw_kernels import manifest
from fp8kit.recipe import DelayedScaling

GPU = Device("cuda", 0)
PARTS = (1, (3,)), (2, (3,)), (3, (16, 3))  # of a state: where they lie from its start, and their shapes


class Recorded(NamedTuple):
    """A recording of what ``again`` does."""

    again: Callable[[], None]
    complete: bool = True

    def __call__(self) -> None:
        self.again()


def states(count: int) -> tuple[tuple[ArrayView, ...], ...]:
    return tuple(
        tuple(ArrayView(1000 * (i + 1) + at, shape, float32, GPU) for i in range(count))
        for at, shape in PARTS
    )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        launch, "kernel", lambda source, function, index, **defines: (function, defines["STATES"])
    )
    monkeypatch.setattr(launch, "launch", lambda *arguments: found.append(arguments))
    return found


def test_the_variants_are_those_of_the_source() -> None:
    assert {dict(v)["STATES"] for v in manifest.source("scales.cu").variants} == set(map(str, scales._STATES))


@pytest.mark.parametrize("count", [1, 8, 9, 96, 97, 200])
def test_every_state_travels_once(count: int, launches: list[tuple[Any, ...]]) -> None:
    parts = states(count)
    scales.update_delayed_(*parts, [448.0 + i for i in range(count)], 2, True, False, 0.5, False, 77)
    seen = []
    for (function, room), grid, block, (*rule, table), stream in launches:
        assert (function, block, *rule, stream) == ("update_delayed", 128, True, False, 0.5, False, 77)
        assert len(table) == 40 * int(room)
        assert grid[0] <= int(room)
        assert grid[1] == 3
        rows = list(struct.iter_unpack("=QQQiifi", table))
        seen += rows[: grid[0]]
        assert not any(any(row) for row in rows[grid[0] :])
    assert seen == [
        (1000 * (i + 1) + 1, 1000 * (i + 1) + 2, 1000 * (i + 1) + 3, 3, 16, (448.0 + i) / 4, 0)
        for i in range(count)
    ]
    assert [one[0][1] for one in launches] == [
        "8" if n <= 8 else "96" for n in [96] * (count // 96) + ([count % 96] if count % 96 else [])
    ]


def test_an_update_keeps_no_state_alive(launches: list[tuple[Any, ...]]) -> None:
    """What is launched is numbers: a model that is gone leaves nothing behind."""
    owner = type("Owner", (), {})()
    gone = weakref.ref(owner)
    parts = [[ArrayView(7, shape, float32, GPU, owner)] for shape in ((3,), (3,), (16, 3))]
    scales.update_delayed_(*parts, [448.0], 0, False, True, None, False, 0)
    assert len(launches) == 1
    del parts, owner
    gc.collect()
    assert gone() is None


def test_the_states_of_each_device_are_updated_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def kernels(device: Device) -> Any:
        def update(scales: Any, inverses: Any, histories: Any, *rest: Any) -> None:
            calls.append((device.index, [view.ptr for view in scales], rest[0], rest[-1]))

        return types.SimpleNamespace(update_delayed_=update, recorder=None, replays=None)

    monkeypatch.setattr(dispatch, "kernels", kernels)
    own = [
        types.SimpleNamespace(
            group=None,
            placed=scaling.placed(
                *[ArrayView(100 * i + at, shape, float32, Device("cuda", i % 2)) for at, shape in PARTS]
            ),
        )
        for i in range(5)
    ]
    history: Any = DelayedScaling().history
    scaling.update(history, own, True, lambda index: 70 + index)
    scaling.update(history, own[:1], False, lambda index: 70 + index)
    assert calls == [
        (0, [1, 201, 401], [448.0] * 3, 70),
        (1, [101, 301], [448.0] * 2, 71),
        (0, [1], [57344.0], 70),
    ]


def test_an_update_of_the_same_states_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its recording: not where the states, their order, the rule, the direction or the stream differ."""
    done: list[Any] = []

    @contextlib.contextmanager
    def recorder() -> Any:
        at = len(done) - 1
        yield Recorded(lambda: done.append(("again", done[at + 1])))

    made = types.SimpleNamespace(
        recorder=recorder,
        replays=None,
        update_delayed_=lambda scales, *rest: done.append(([view.ptr for view in scales], rest[2:])),
    )
    monkeypatch.setattr(dispatch, "kernels", lambda device: made)
    first, second = (
        types.SimpleNamespace(
            group=None,
            placed=scaling.placed(*[ArrayView(start + at, shape, float32, GPU) for at, shape in PARTS]),
        )
        for start in (100, 200)
    )
    recipe, other = DelayedScaling(), DelayedScaling(margin=1)
    usual = recipe.history, [first, second], True, 5
    different = [
        (recipe.history, [second, first], True, 5),
        (recipe.history, [first], True, 5),
        (other.history, [first, second], True, 5),
        (recipe.history, [first, second], False, 5),
        (recipe.history, [first, second], True, 6),
    ]

    def run(history: Any, states: Any, forward: bool, stream: int) -> Any:
        scaling.update(history, states, forward, lambda index: stream)
        return done[-1]

    wanted = run(*usual)
    assert run(*usual) == wanted  # recorded
    assert run(*usual) == run(*usual) == ("again", wanted)
    seen = [wanted]
    for each in different:
        found = run(*each)
        assert found not in seen
        seen.append(found)
    assert run(*usual) == ("again", wanted)


def test_an_update_goes_to_the_memory_that_states_have_now(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = dispatch.kernels
    layers = [Linear(16, 16, device="cpu") for _ in range(3)]
    recipe = DelayedScaling(amax_history_len=4)
    for layer in layers:
        layer._bound(recipe, True)
    own = [layer.fp8_meta["scaling_fwd"] for layer in layers]

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            return getattr(real(CPU), name)

        def update_delayed_(self, *arguments: Any) -> None:
            calls.append(arguments)

    monkeypatch.setattr(dispatch, "kernels", lambda device: Kernels())
    scaling.update(recipe.history, own, forward=True)
    own[1].resize(6)
    scaling.update(recipe.history, own, forward=True)
    for call, rows in zip(calls, (4, 6), strict=True):
        assert [history.shape[0] for history in call[2]] == [4, rows, 4]
    assert [view.ptr for view in calls[1][2]] == [state.views["amax_history"].ptr for state in own]
    scaling.update(recipe.history, own[:2], forward=False)
    assert (len(calls[2][0]), list(calls[2][3])) == (2, [57344.0, 57344.0])
    kept = weakref.ref(own[0].views["amax_history"].owner)
    del layers, own, layer, call
    calls.clear()
    gc.collect()
    assert kept() is None
