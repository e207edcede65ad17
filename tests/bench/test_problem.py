"""Problems and contenders: weights that fit, results that are checked, failures that are reported."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import formats, nn
from fp8kit.arrays import CPU
from fp8kit.bench import layers, problem
from fp8kit.bench.problem import (
    RECIPES,
    Problem,
    Running,
    bounds,
    captured,
    errors,
    native,
    parameter_shapes,
    reference,
    verdict,
)
from fp8kit.bench.report import Setting, Unavailable
from fp8kit.bench.sizes import SMALL
from fp8kit.testing.compare import assert_close

pytestmark = pytest.mark.usefixtures("frozen_garbage")

SIZES = {"Linear": (32, 48), "LayerNormMLP": (32, 64), "TransformerLayer": (32, 64, 2)}
QUICK = Setting(CPU, SMALL, 1, 1, 1)


def small(kind, layout="sbhd"):
    return Problem(kind, SIZES[kind], 16, 2, CPU, 5, layout)


@pytest.mark.parametrize("kind", SIZES)
def test_parameters_are_the_modules(kind):
    module = getattr(nn, kind)(*SIZES[kind], params_dtype="bfloat16", device="cpu", **small(kind).options)
    assert {name: p.shape for name, p in module.named_parameters()} == parameter_shapes(kind, SIZES[kind])


def test_weights_are_random_and_keep_the_variance():
    weights = small("TransformerLayer").weights
    spread = weights["layernorm_mlp.fc1_weight"].astype(np.float64).std() * 32**0.5
    assert spread == pytest.approx(1, abs=4 * (2 * 32 * 64) ** -0.5 + 0.01)
    assert all((np.asarray(w, np.float32) != 0).any() for w in weights.values())


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_layouts_hold_the_same_problem(layout):
    """A layer without attention across tokens would not notice; this one does: lengths and batch differ."""
    made = small("TransformerLayer", layout)
    assert made.x.shape == ((16, 2, 32) if layout == "sbhd" else (2, 16, 32))
    running = native(made, None)
    running.step()
    found = errors(made.branches(*running.results()), reference(made))
    assert verdict("bf16", made.kind, found) == "ok"


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_stay_within_their_bounds(name):
    made = small("TransformerLayer")
    running = native(made, RECIPES[name])
    for _ in range(3):
        running.step()
    running.poison()
    running.step()
    assert verdict(name, made.kind, errors(made.branches(*running.results()), reference(made))) == "ok"


def test_bounds_grow_as_independent_errors_do():
    assert bounds("FP8", "LayerNormMLP")[0] == pytest.approx(2**0.5 * bounds("FP8", "Linear")[0])
    assert bounds("bf16", "Linear") == (2**-7, 2**-7 * 2**0.5)
    assert verdict("FP8", "Linear", {"error_y": float("nan"), "error_dx": 0.0}).startswith("WRONG")


def test_a_wrong_a_failing_and_an_absent_contender_are_reported():
    made = small("Linear")

    def wrong(given):
        """Weights of another seed: errors near sqrt(2), over every bound."""
        return native(Problem(given.kind, given.sizes, given.sequence, given.batch, CPU, 9), None)

    def stale(given):
        """Right once; then its results are whatever lies in the memory."""
        right = native(given, None)
        right.step()
        y, dx = (value.copy() for value in right.results())
        return Running(lambda: None, lambda: (y, dx), lambda: (y.fill(np.nan), dx.fill(np.nan)))

    def failing(given):
        raise RuntimeError("no kernel")

    def absent(given):
        raise Unavailable("not installed")

    contenders = {
        "right": lambda p: native(p, None),
        "wrong": wrong,
        "stale": stale,
        "failing": failing,
        "absent": absent,
    }
    rows = {row["case"]: row for row in layers.measure("w", made, contenders, QUICK)}
    assert rows["right"]["status"] == "ok"
    assert rows["wrong"]["status"].startswith("WRONG: errors 1.")
    assert rows["stale"]["status"].startswith("WRONG: errors nan")
    assert rows["failing"]["status"] == "failed: RuntimeError: no kernel"
    assert rows["absent"]["status"] == "not installed"
    assert "gpu_ms" not in rows["failing"]
    assert {"gpu_ms", "error_y", "error_dx", "first_step_s"} <= set(rows["right"])
    assert "host_us" not in rows["right"]  # on the CPU it would be the same time again


def test_further_calls_take_their_turns():
    calls = []
    rows = layers.measure(
        "w",
        small("Linear"),
        {"a": lambda p: native(p, None)},
        QUICK,
        extra={"skeleton": lambda: calls.append(1)},
    )
    assert [row["case"] for row in rows] == ["a", "skeleton"]
    assert len(calls) == 2  # a warm-up and a call


def test_graphs_are_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(problem.fp8kit, "graph", None, raising=False)
    with pytest.raises(Unavailable, match=r"fk\.graph is missing"):
        captured(lambda: None)
    calls = []

    def graph(function):
        """Runs the function twice, and does nothing after."""
        return lambda: calls.append(function() if len(calls) < 2 else None)

    monkeypatch.setattr(problem.fp8kit, "graph", graph, raising=False)
    step = captured(lambda: len(calls))
    assert [step() for _ in range(4)] == [0, 1, 1, 1]
    assert calls == [None] * 4


def test_a_captured_step_gives_the_eager_result(monkeypatch):
    """A graph that runs its function stands in for the real one."""
    monkeypatch.setattr(problem.fp8kit, "graph", lambda call: call, raising=False)
    made = small("Linear")
    with fk.deterministic():
        pair = [native(made, None, graph=graph) for graph in (False, True)]
        for running in pair:
            running.step()
            running.poison()
        eager = native(made, None)
        eager.step()
    np.testing.assert_array_equal(pair[1].results()[0].view(np.uint16), eager.results()[0].view(np.uint16))


def test_references_are_float32():
    y, dx = reference(small("Linear"))
    assert y.dtype == dx.dtype == np.float32
    x, weight, bias = (
        np.asarray(a, np.float64) for a in (small("Linear").x, *small("Linear").weights.values())
    )
    exact = (x.reshape(32, 32) @ weight.T + bias).astype(np.float32)
    assert_close("y", y, exact, "float64", 32 * np.finfo(np.float32).eps * np.abs(exact).max())
    assert formats.bfloat16.numpy == small("Linear").x.dtype
