"""Plans are kept in bounded numbers, and are not destroyed while something may use them. No GPU is needed."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import types
from collections import defaultdict
from typing import Any

import pytest

import fp8kit
from fp8kit import lru
from fp8kit.backends.cuda import algorithms, cublaslt, cudnn_plans, launch, recorded
from fp8kit.backends.cuda.attention_problem import Problem
from fp8kit.backends.cuda.cublaslt import MatmulKey
from fp8kit.errors import BackendError
from fp8kit.formats import float32
from fp8kit.lru import LRU, SHAPES, cache_info, memoized


def test_the_least_recently_used_goes() -> None:
    made: list[int] = []
    gone: list[tuple[int, str]] = []

    def make(key: int) -> str:
        made.append(key)
        return str(key)

    cache: LRU[int, str] = LRU(2, lambda key, value: gone.append((key, value)))
    assert [cache.make(key, make) for key in (1, 2, 1, 3, 1, 2)] == ["1", "2", "1", "3", "1", "2"]
    assert made == [1, 2, 3, 2]
    assert gone == [(2, "2"), (3, "3")]
    assert len(cache) == 2
    assert cache.info == (2, 2, 2, 4)


def test_named_caches_are_listed() -> None:
    cache: LRU[int, int] = LRU(2, name="test of a cache")

    @memoized("test of a function", 3)
    def double(x: int) -> int:
        return 2 * x

    assert [cache.make(key, lambda key: key) for key in (1, 2, 3, 3)] == [1, 2, 3, 3]
    assert [double(x) for x in (1, 2, 1)] == [2, 4, 2]
    listed = fp8kit.cache_info()
    assert listed["test of a cache"] == {"size": 2, "limit": 2, "hits": 1, "misses": 3}
    assert listed["test of a function"] == {"size": 2, "limit": 3, "hits": 1, "misses": 2}
    assert listed["plans"]["limit"] == SHAPES
    for name in ("test of a cache", "test of a function"):
        del lru._LISTED[name]
    assert list(cache_info()) == sorted(cache_info())


def test_an_error_is_passed_on_and_not_kept() -> None:
    asked: list[int] = []

    def make(key: int) -> int:
        asked.append(key)
        if len(asked) == 1:
            raise ValueError("not yet")
        return 10 * key

    cache: LRU[int, int] = LRU(2)
    with pytest.raises(ValueError, match="not yet"):
        cache.make(7, make)
    assert cache.make(7, make) == 70
    assert asked == [7, 7]


def test_threads_that_ask_at_once_get_the_same_value() -> None:
    made: list[int] = []

    def make(key: int) -> list[int]:
        time.sleep(0.01)
        made.append(key)
        return [key]

    cache: LRU[int, list[int]] = LRU(100)
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.extend(cache.make(key, make) for key in range(5)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert made == list(range(5))
    assert sorted(value[0] for value in found) == sorted(list(range(5)) * 4)
    assert len({id(value) for value in found}) == 5


class _Runtime:
    """Stands for CuPy's runtime. ``capturing``: streams under capture."""

    def __init__(self) -> None:
        self.waited = 0
        self.capturing: set[int] = set()

    def deviceSynchronize(self) -> None:
        if self.capturing:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")
        self.waited += 1

    def streamIsCapturing(self, stream: int) -> bool:
        return stream in self.capturing


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    fake = _Runtime()
    monkeypatch.setattr(launch, "runtime", lambda: fake)
    monkeypatch.setattr(launch, "current_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(cudnn_plans, "_HELD", [])
    return fake


def _plan() -> tuple[cudnn_plans.GraphPlan, list[int]]:
    launched: list[int] = []
    graph = types.SimpleNamespace(execute=lambda pointers, workspace, handle: launched.append(workspace))
    return cudnn_plans.GraphPlan(graph, 0), launched


KEY = cudnn_plans.Key(Problem(1, 1, 1, 8, 8, 8, 8, "bfloat16", "sbhd", 1.0), 0, False, True, ())


def test_a_retired_plan_waits_for_its_kernels_and_is_launched_no_more(runtime: _Runtime) -> None:
    plan, launched = _plan()
    assert cudnn_plans._launched(plan, {}, 5, None, 0)
    cudnn_plans._retire(KEY, plan)
    assert (runtime.waited, cudnn_plans._HELD) == (1, [])
    assert not cudnn_plans._launched(plan, {}, 6, None, 0)
    assert launched == [5]


def test_a_plan_that_a_graph_may_hold_is_never_destroyed(runtime: _Runtime) -> None:
    plan, _ = _plan()
    runtime.capturing = {40}
    assert cudnn_plans._launched(plan, {}, 5, None, 40)
    runtime.capturing = set()
    cudnn_plans._retire(KEY, plan)
    assert (runtime.waited, cudnn_plans._HELD) == (0, [plan])


def test_a_plan_is_held_where_waiting_is_not_allowed(runtime: _Runtime) -> None:
    plan, _ = _plan()
    runtime.capturing = {40}
    cudnn_plans._retire(KEY, plan)
    assert [plan] == cudnn_plans._HELD


def test_graphs_of_our_own_hold_no_more_plans_than_so_many(
    runtime: _Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, launched = _plan()
    monkeypatch.setattr(cudnn_plans, "plan_of", lambda key: plan)
    monkeypatch.setattr(cudnn_plans, "_FREE", {0: [types.SimpleNamespace(stream=0)]})
    cudnn_plans._captured(KEY, {}, 0, 5, 0)
    cudnn_plans._HELD.extend([plan] * cudnn_plans.KEPT)
    with pytest.raises(BackendError, match="256 plans are held"):
        cudnn_plans._captured(KEY, {}, 0, 6, 0)
    assert launched == [0]


def test_threads_share_handles_but_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes when another one's call is over makes none: that would wait for the device. Devices
    share none."""
    made = iter(range(100))
    monkeypatch.setattr(cudnn_plans, "_FREE", defaultdict(list))
    monkeypatch.setattr(
        cudnn_plans, "library", lambda: types.SimpleNamespace(create_handle=lambda: next(made))
    )
    found: list[int] = []

    def call(device: int) -> None:
        with cudnn_plans._handle(device) as handle:
            found.append(handle)

    for _ in range(3):
        thread = threading.Thread(target=call, args=(0,))
        thread.start()
        thread.join()
    with cudnn_plans._handle(0) as first, cudnn_plans._handle(0) as second:
        assert (first, second) == (0, 1)
    call(1)
    with pytest.raises(ValueError, match="refused"), cudnn_plans._handle(0):
        raise ValueError("refused")
    call(0)
    assert found == [0, 0, 0, 2, 0]


def test_devices_wait_apart(runtime: _Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one device's plan is made, which may wait for the device, another's is made."""
    begun, ended = threading.Event(), threading.Event()

    def build(key: cudnn_plans.Key) -> cudnn_plans.GraphPlan:
        if key.device == 0:
            begun.set()
            assert ended.wait(30)
        return cudnn_plans.GraphPlan(key.device, 0)

    monkeypatch.setattr(cudnn_plans, "_build", build)
    cudnn_plans._plans.cache_clear()
    try:
        thread = threading.Thread(target=cudnn_plans.plan_of, args=(KEY,))
        thread.start()
        assert begun.wait(30)
        assert cudnn_plans.plan_of(KEY._replace(device=1)).graph == 1
        ended.set()
        thread.join(30)
        assert cudnn_plans.plan_of(KEY).graph == 0
    finally:
        ended.set()
        cudnn_plans._plans.cache_clear()


@pytest.mark.parametrize("locks", [launch._LOADING, algorithms._TIMING, recorded._graphing])
def test_a_lock_within_which_a_device_may_be_waited_for_is_that_devices(locks: launch.Locks) -> None:
    with locks[1000]:
        assert locks[1000].locked()
        assert not locks[1001].locked()


def test_descriptors_go_with_the_last_reference_to_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[Any] = []

    class _Plan:
        def __init__(self, key: MatmulKey, device: int) -> None:
            self._lt = types.SimpleNamespace(
                matmul_desc_destroy=destroyed.append, matrix_layout_destroy=destroyed.append
            )
            self._description, self._layouts = key.m, (10, 11, 12)

    monkeypatch.setattr(cublaslt, "MatmulPlan", _Plan)
    cublaslt.plan.cache_clear()
    try:
        first = cublaslt.plan(MatmulKey(1, 4, 4, "nn", float32, float32, float32, 4, 4, 4), 0)
        for m in range(2, SHAPES + 3):
            cublaslt.plan(MatmulKey(m, 4, 4, "nn", float32, float32, float32, 4, 4, 4), 0)
        gc.collect()
        assert destroyed == [2, 10, 11, 12]  # the first went too, but is used here
        del first
        gc.collect()
        assert destroyed[4:] == [1, 10, 11, 12]
    finally:
        cublaslt.plan.cache_clear()
