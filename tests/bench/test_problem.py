"""Problems and contenders: weights that fit, results that are checked, failures that are reported."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import formats, nn
from fp8kit.arrays import CPU, Device
from fp8kit.bench import layers, problem, report
from fp8kit.bench.contest import Contest
from fp8kit.bench.problem import (
    RECIPES,
    Problem,
    Running,
    bounds,
    errors,
    native,
    parameter_shapes,
    reference,
    verdict,
)
from fp8kit.bench.report import Setting, Unavailable
from fp8kit.bench.sizes import SMALL
from fp8kit.bench.timing import WallClock
from fp8kit.testing.compare import assert_close

SIZES = {"Linear": (32, 48), "LayerNormMLP": (32, 64), "TransformerLayer": (32, 64, 2)}
QUICK = Setting(CPU, SMALL, 1, 1, 1)


def small(kind):
    return Problem(kind, SIZES[kind], 16, 2, CPU, 5)


@pytest.mark.parametrize("kind", SIZES)
def test_parameters_are_the_modules(kind):
    module = getattr(nn, kind)(*SIZES[kind], params_dtype="bfloat16", device="cpu", **small(kind).options)
    assert {name: p.shape for name, p in module.named_parameters()} == parameter_shapes(kind, SIZES[kind])


def test_weights_are_random_and_keep_the_variance():
    weights = small("TransformerLayer").weights
    spread = weights["layernorm_mlp.fc1_weight"].astype(np.float64).std() * 32**0.5
    assert spread == pytest.approx(1, abs=4 * (2 * 32 * 64) ** -0.5 + 0.01)
    assert all((np.asarray(w, np.float32) != 0).any() for w in weights.values())


def test_the_layer_gets_sequences_first():
    """A layer without attention across tokens would not notice; this one does: lengths and batch differ."""
    made = small("TransformerLayer")
    assert made.x.shape == (16, 2, 32)
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
    rows = {
        row["case"]: row
        for row in layers.entered(Contest(QUICK, "w"), made, contenders, layers.NATIVE).time()
    }
    assert rows["right"]["status"] == "ok"
    assert rows["wrong"]["status"].startswith("WRONG: errors 1.")
    assert rows["stale"]["status"].startswith("WRONG: errors nan")
    assert rows["failing"]["status"] == "failed: RuntimeError: no kernel"
    assert rows["absent"]["status"] == "not installed"
    assert "gpu_ms" not in rows["failing"]
    assert {"gpu_ms", "error_y", "error_dx", "first_step_s"} <= set(rows["right"])
    assert "host_us" not in rows["right"]  # on the CPU it would be the same time again


def test_the_largest_layer_has_its_skeleton_beside_it_on_a_gpu(monkeypatch):
    """It takes its turns like the others."""
    calls = []
    setting = Setting(Device("cuda"), SMALL, 1, 1, 1)
    monkeypatch.setattr(layers, "entered", lambda contest, *given: None)
    monkeypatch.setattr(layers, "skeletons", lambda layer, setting: {"skeleton": lambda: calls.append(layer)})
    monkeypatch.setattr(report, "clock_for", lambda device: WallClock())
    monkeypatch.setattr(layers.Contest, "time_host", lambda self, rounds, calls: [])
    rows = layers.layer_part(setting)
    assert [(row["workload"], row["case"]) for row in rows] == [("layer 64", "skeleton")]
    assert rows[0]["gpu_ms"] > 0
    assert calls == [SMALL.large] * 40  # ten warm-ups and thirty calls


def test_a_captured_steps_results_stay_where_the_capture_wrote_them(monkeypatch):
    """With a graph that runs its function twice, and does nothing after; what it returns is not copied."""
    calls = []
    monkeypatch.setattr(
        problem.graphs, "graph", lambda function: lambda: calls.append(function() if len(calls) < 2 else None)
    )
    running = native(small("Linear"), None, graph=True)
    running.step()
    running.step()
    before = running.results()
    for _ in range(2):
        running.step()
        running.poison()
    for got, wanted in zip(running.results(), before, strict=True):
        np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16))
    assert calls == [None] * 4


def test_a_captured_step_gives_the_eager_result(monkeypatch):
    """A graph that runs its function stands in for the real one."""
    monkeypatch.setattr(problem.graphs, "graph", lambda call: call)
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
