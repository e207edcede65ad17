"""The planted channels, and the linear models of the accumulator."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.arrays import CPU
from fp8kit.models import text as texts
from fp8kit.models.train import loss_of
from studies import cases, files, layer, linear
from studies.stress import MOST, Growth
from studies.training import model_of

SIZE = cases.size("tiny")


def mlp_input(size):
    return fk.tensor(np.random.default_rng(0).standard_normal((32, size.hidden)).astype(np.float32))


def test_channels_align_and_grow_while_the_function_stays(text):
    model = model_of(cases.CASES["stress_delayed"], SIZE, CPU, 0)
    batch = texts.batch(text.train, 2, 32, 0, 0)
    growth = Growth(model, 2.0, 5)
    before = model.layers[0].layernorm_mlp.fc1_weight.numpy().copy()
    growth.apply(4)
    assert (model.layers[0].layernorm_mlp.fc1_weight.numpy() == before).all()
    losses = []
    for step in (10, 12, 100):
        growth.apply(step)
        losses.append(loss_of(model, batch, None).item())
        for own, (u, column) in zip(growth.layers, growth.planted, strict=True):
            k = np.float32(min(2.0 ** (step - 5), MOST))
            first = own.fc1_weight.numpy()
            assert (first[0] == k * u).all()
            assert (first[own.ffn_hidden_size] == k * u).all()
            assert (own.fc2_weight.numpy()[:, 0] == column / k**2).all()
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)


def test_the_growth_costs_one_scale_a_tensor_and_smoothing_cures_it():
    """fc2's output, by the error of the layer under the recipe, when the channel has grown."""
    errors = {}
    for name in ("stress_current", "stress_smooth_channel", "stress_block"):
        case = cases.CASES[name]
        model = model_of(case, SIZE, CPU, 0)
        Growth(model, 2.0, 0).apply(20)
        mlp, x = model.layers[0].layernorm_mlp, mlp_input(SIZE)
        exact = mlp(x)[0].numpy()
        recipe = fk.recipe.Float8CurrentScaling() if "smooth" in name else case.recipe(2)
        with fk.autocast(recipe=recipe):
            errors[name] = np.linalg.norm(mlp(x)[0].numpy() - exact) / np.linalg.norm(exact)
    assert errors["stress_current"] > 0.3
    assert errors["stress_smooth_channel"] < 0.1


def test_linear_models_and_their_table(tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "STEPS", 10)
    monkeypatch.setattr(linear, "QUICK", (256,))
    assert linear.measure(tmp_path, CPU, True, float("inf"))
    found = files.read(tmp_path / "linear" / "positive.256.json")["sums"]
    assert list(found) == cases.of_study("accumulator")
    forward = {name: np.mean(own["forward"]) for name, own in found.items()}
    assert forward["sums_hopper_fast"] > 1.1 * forward["sums_float32"]
    times = [path.stat().st_mtime_ns for path in sorted((tmp_path / "linear").iterdir())]
    assert linear.measure(tmp_path, CPU, True, 0.0)  # all are there
    assert times == [path.stat().st_mtime_ns for path in sorted((tmp_path / "linear").iterdir())]
    rows = linear.rows(tmp_path)
    assert len(rows) == 6
    assert rows[0][:3] in {("random", "256", "`sums_float32`"), ("positive", "256", "`sums_float32`")}
    (tmp_path / "linear" / "random.256.json").unlink()
    assert not linear.measure(tmp_path, CPU, True, 0.0)


@pytest.mark.programs
def test_delayed_scaling_fails_where_the_layer_matters_and_blocks_cure_it(tmp_path, monkeypatch):
    """A shorter student: the channel grows faster, and stays."""
    monkeypatch.setattr(layer, "STEPS", 120)
    monkeypatch.setattr(layer, "GROWTH", 1.2)
    monkeypatch.setattr(layer, "SEEDS", 1)
    names = ["stress_float32", "stress_delayed", "stress_mxfp8", "stress_smooth_channel"]
    assert layer.measure(tmp_path, CPU, names, float("inf"))
    found = {
        name: layer.final(files.read(tmp_path / "layer" / f"{name}.json")["curves"][0]) for name in names
    }
    assert found["stress_delayed"] > 2 * found["stress_float32"]
    assert found["stress_mxfp8"] < 1.3 * found["stress_float32"]
    assert found["stress_smooth_channel"] < 1.3 * found["stress_float32"]
    assert [row[0] for row in layer.rows(tmp_path)] == [
        f"`{name}`" for name in cases.of_study("stress") if name in names
    ]
    assert layer.measure(tmp_path, CPU, names, 0.0)  # all are there
