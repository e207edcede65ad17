"""The fastest algorithm is found once, by timing, kept on disk, and never looked for in deterministic mode or
while a graph is captured."""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8kit import arrays, cache
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import algorithms, cublaslt, launch
from fp8kit.backends.cuda.cublaslt import MatmulKey
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.errors import BackendError
from fp8kit.formats import bfloat16, float8_e4m3fn, float32
from fp8kit.testing.compare import assert_close, sum_slack
from fp8kit.testing.contract import get, poisoned, put, workspace

GPU = Device("cuda", 0)
KEY = MatmulKey(512, 512, 1024, "nt", bfloat16, bfloat16, float32, 1024, 1024, 512, timed=True)
MILLISECONDS = (3.0, 1.0, 2.0)


class _Driver:
    """A runtime whose clock goes on by what the chosen algorithm takes."""

    CUDARuntimeError = RuntimeError

    def __init__(self) -> None:
        self.now, self.marks, self.capturing = 0.0, {}, False
        self.alive = 0

    def eventCreate(self) -> int:
        self.alive += 1
        return self.alive

    def eventDestroy(self, event: int) -> None:
        self.alive -= 1

    def eventRecord(self, event: int, stream: int) -> None:
        self.marks[event] = self.now

    def eventSynchronize(self, event: int) -> None:
        assert event in self.marks

    def eventElapsedTime(self, start: int, end: int) -> float:
        return float(self.marks[end] - self.marks[start])

    def memsetAsync(self, *arguments: int) -> None:
        pass

    def streamIsCapturing(self, stream: int) -> bool:
        return self.capturing

    def getDeviceProperties(self, index: int) -> dict[str, bytes]:
        return {"name": b"Some GPU"}


class _Plan:
    """A plan with an algorithm for each of ``times``, known by their numbers."""

    def __init__(self, key: MatmulKey = KEY, times: Sequence[float] = MILLISECONDS) -> None:
        self.key, self.times, self.algorithms, self.device, self.tuned = key, times, len(times), 0, False
        self.index, self.refuses, self.wide, self.calls = 0, set[int](), False, 0

    @property
    def chosen(self) -> bytes:
        return bytes([self.index])

    def widen(self) -> None:
        self.wide = True

    def lend(self) -> None:
        pass

    def choose(self, index: int) -> None:
        self.index = index

    def take(self, algorithm: bytes) -> bool:
        accepted = len(algorithm) == 1 and algorithm[0] < self.algorithms
        if accepted:
            self.index = algorithm[0]
        return accepted


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> _Driver:
    fake = _Driver()
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "runtime", lambda: fake)
    monkeypatch.setattr(launch, "current_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(
        algorithms, "provider", types.SimpleNamespace(alloc=lambda size, device: (4096, object()))
    )
    monkeypatch.setattr(algorithms, "bindings", lambda: types.SimpleNamespace(get_version=lambda: 130100))
    monkeypatch.setattr(algorithms, "_timed", {})
    monkeypatch.setattr(algorithms, "_met", {})
    algorithms._where.cache_clear()
    return fake


def product(plan: _Plan, driver: _Driver, to: list[int]) -> Any:
    def run(out: int) -> None:
        if plan.index in plan.refuses:
            raise BackendError("NOT_SUPPORTED")
        to.append(out)
        driver.now += plan.times[plan.index]

    return run


def call(plan: _Plan, driver: _Driver, to: list[int], times: int = 3) -> None:
    """So many calls of a product; they run beside what ``to`` gets."""
    for _ in range(times):
        if not plan.tuned:
            algorithms.tune(plan, product(plan, driver, to), 7)  # type: ignore[arg-type]


def test_the_fastest_is_taken_and_kept(driver: _Driver, tmp_path: Any) -> None:
    plan, to = _Plan(), []
    call(plan, driver, to, times=2)
    assert (plan.tuned, to) == (False, [])  # it may never come again
    call(plan, driver, to, times=1)
    assert plan.tuned
    assert plan.index == 1
    assert set(to) == {4096}  # never the caller's output
    assert driver.alive == 0
    (path,) = (tmp_path / "products").iterdir()
    kept = json.loads(path.read_text())
    assert kept["algorithm"] == "01"
    assert_close(
        "seconds", [kept["seconds"][str(i)] for i in range(3)], np.array(MILLISECONDS) / 1e3, "float64", 1e-13
    )
    again = _Plan()
    call(again, driver, calls := [], times=1)
    assert again.tuned
    assert (again.index, calls) == (1, [])  # another process would not time either


def sealed(**content: Any) -> str:
    return cache.seal(content).decode()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", '{"algorithm": "02"}', "[" * 200_000, sealed(algorithm="02").replace("02", "00")),
        *(sealed(algorithm=found) for found in ("03", "no", 1, None)),
        sealed(other=1),
    ],
)
def test_an_answer_that_does_not_fit_is_found_anew(driver: _Driver, tmp_path: Any, text: str) -> None:
    plan = _Plan()
    path = tmp_path / "products" / algorithms._name(plan)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True)
    path.write_text(text)
    call(plan, driver, [])
    assert plan.tuned
    assert plan.index == 1
    assert json.loads(path.read_text())["algorithm"] == "01"


def test_what_is_captured_is_not_timed(driver: _Driver) -> None:
    plan, driver.capturing = _Plan(), True
    call(plan, driver, to := [], times=3)
    assert not plan.tuned
    assert (plan.index, to) == (0, [])
    driver.capturing = False
    call(plan, driver, to, times=1)
    assert plan.tuned
    assert plan.index == 1


def test_small_products_and_single_candidates_are_not_timed(driver: _Driver) -> None:
    for plan in (
        _Plan(MatmulKey(64, 64, 64, "nt", bfloat16, bfloat16, float32, 64, 64, 64, timed=True)),
        _Plan(times=(1.0,)),
    ):
        call(plan, driver, to := [])
        assert (plan.tuned, plan.index, to) == (True, 0, [])


def test_a_folder_that_cannot_be_written_costs_nothing_else(driver: _Driver, tmp_path: Any) -> None:
    (tmp_path / "products").write_text("a file")
    plan = _Plan()
    call(plan, driver, [])
    assert plan.tuned
    assert plan.index == 1


def test_a_first_look_keeps_the_best(driver: _Driver, tmp_path: Any) -> None:
    """Of twelve candidates eight are measured again: not the slowest four."""
    plan = _Plan(times=(9.0, 12.0, 3.0, 11.0, 5.0, 8.0, 2.0, 10.0, 4.0, 1.5, 7.0, 6.0))
    call(plan, driver, [])
    assert plan.index == 9
    (path,) = (tmp_path / "products").iterdir()
    assert set(json.loads(path.read_text())["seconds"]) == {"2", "4", "5", "6", "8", "9", "10", "11"}


def test_what_is_refused_when_it_runs_is_not_taken(driver: _Driver) -> None:
    plan = _Plan()
    plan.refuses = {1}
    call(plan, driver, [])
    assert plan.index == 2
    assert driver.alive == 0
    hopeless = _Plan(
        MatmulKey(1024, 512, 1024, "nt", bfloat16, bfloat16, float32, 1024, 1024, 512, timed=True)
    )
    hopeless.refuses = {0, 1, 2}
    with pytest.raises(BackendError, match="NOT_SUPPORTED"):
        call(hopeless, driver, [])
    assert driver.alive == 0


@pytest.mark.parametrize(
    ("rows", "scaling", "wide"),
    [
        (8192, ("tensor", "tensor"), True),
        (512, ("tensor", "tensor"), False),
        (8192, ("row", "row"), False),
        (8192, None, False),
    ],
)
def test_relatives_are_candidates_of_large_fp8_products(
    driver: _Driver, rows: int, scaling: Any, wide: bool
) -> None:
    operand = float8_e4m3fn if scaling else bfloat16
    plan = _Plan(
        MatmulKey(
            rows, 4096, 4096, "nt", operand, operand, bfloat16, 4096, 4096, 4096, scaling=scaling, timed=True
        )
    )
    call(plan, driver, [])
    assert plan.wide is wide


def test_deterministic_products_take_the_first() -> None:
    manager = dispatch.get_default_manager()
    for kernel in ("gemm", "fp8_gemm", "block_gemm"):
        first = ["cuda.hopper_block_gemm"] if kernel == "block_gemm" else []
        last = {"gemm": [], "fp8_gemm": ["cuda.hopper_fp8_gemm", "cuda.mma_fp8_gemm"]}
        ours = last.get(kernel, ["cuda.mma_block_gemm"])
        free, _ = manager.ranked(kernel, GPU, SelectionPolicy(), lambda: 90)
        assert [impl.impl_id for impl in free] == [*first, f"cuda.timed_{kernel}", f"cuda.{kernel}", *ours]
        order, left_out = manager.ranked(kernel, GPU, SelectionPolicy(deterministic=True), lambda: 90)
        assert [impl.impl_id for impl in order] == [*first, f"cuda.{kernel}", *ours]
        refused = dict(left_out)
        why = next(why for impl, why in refused.items() if impl.impl_id == f"cuda.timed_{kernel}")
        assert "deterministic" in why


@pytest.mark.parametrize("kernel", ["attention", "packed_attention"])
def test_a_workspace_is_asked_as_its_kernel_is_called(kernel: str) -> None:
    """Asked of the other, deterministic one, attention would build graphs of cuDNN's that never run."""
    manager, said = dispatch.get_default_manager(), []
    for deterministic in (False, True):
        policy = SelectionPolicy(deterministic=deterministic)
        usable, _ = manager.ranked(f"{kernel}_workspace", GPU, policy, lambda: 90)
        asked = manager._function(f"{kernel}_workspace", usable, [], GPU, policy)
        said.append(getattr(asked, "keywords", {}))
        assert manager.ranked(f"{kernel}_fwd", GPU, policy, lambda: 90)[0][0].impl_id == (
            f"cuda.{kernel}_fwd" if deterministic else f"cuda.timed_{kernel}_fwd"
        )
    assert said == [{"timed": True}, {}]


@pytest.mark.gpu
def test_a_timed_product_is_the_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A product large enough to be timed, onto an output that is accumulated: once, not once a candidate."""
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(tmp_path))
    generator = np.random.default_rng(3)
    m, n, k = 512, 768, 1024
    a, b, start = (generator.standard_normal(shape).astype(np.float32) for shape in ((m, k), (n, k), (m, n)))
    want = a.astype(np.float64) @ b.astype(np.float64).T + start
    slack = sum_slack(np.abs(a) @ np.abs(b).T + np.abs(start), k + 1)
    with policy_context(SelectionPolicy(deterministic=False)):
        kernels = dispatch.kernels(GPU)
        views = [put(array, GPU) for array in (a, b)]
        space = workspace(kernels.gemm_workspace(), GPU)
        for call in ("first", "second", "timed", "later"):
            out = put(start, GPU)
            kernels.gemm(*views, out, "nt", None, out, space, arrays.current_stream(GPU))
            assert_close(f"{call} product", get(out), want, float32, slack)
            fresh = poisoned((m, n), float32, GPU)
            kernels.gemm(*views, fresh, "nt", None, None, space, arrays.current_stream(GPU))
            assert_close(f"{call} product into a fresh output", get(fresh), want - start, float32, slack)
    answers = [json.loads(path.read_text()) for path in (tmp_path / "products").iterdir()]
    assert len({kept["product"] for kept in answers}) == len(answers) == 2, (
        "onto an output and into a fresh one: two problems"
    )
    for kept in answers:
        assert len(bytes.fromhex(kept["algorithm"])) == 64
        assert kept["seconds"]
    cublaslt.plan.cache_clear()


def test_so_many_problems_are_timed_in_a_process(driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that come for the first time later take the first candidate, at once; kept answers count."""
    monkeypatch.setattr(algorithms, "_MOST", 3)
    plans = [_Plan(replace(KEY, m=KEY.m + 16 * i)) for i in range(5)]
    for plan in plans:
        call(plan, driver, [])
    assert [plan.tuned for plan in plans] == [True] * 5
    assert [plan.index for plan in plans] == [plans[0].index] * 3 + [0] * 2
    again = _Plan(plans[2].key)
    call(again, driver, [])
    assert again.index == plans[2].index


def test_with_many_problems_none_is_timed(driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that differ from batch to batch: also where some of them come again."""
    monkeypatch.setattr(algorithms, "_MANY", 3)
    plans = [_Plan(replace(KEY, m=KEY.m + 16 * i)) for i in range(5)]
    for plan in plans:
        call(plan, driver, to := [], times=1)
    assert [plan.tuned for plan in plans] == [False] * 3 + [True] * 2
    for plan in plans:
        call(plan, driver, to)
    assert [(plan.tuned, plan.index) for plan in plans] == [(True, 0)] * 5
    assert not to
