"""The update of many states as launches: variants, tables byte by byte, and what is put together once."""

from __future__ import annotations

import gc
import struct
import weakref
from typing import Any

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


def states(count: int) -> tuple[tuple[ArrayView, ...], ...]:
    return tuple(
        tuple(ArrayView(1000 * (i + 1) + at, shape, float32, GPU) for i in range(count))
        for at, shape in ((1, (3,)), (2, (3,)), (3, (16, 3)))
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
