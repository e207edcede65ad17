"""Operands captured from a model: they are the ones that its GEMMs multiply; and comparisons of recipes on
them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import cli, recipe_check
from fp8kit.errors import ArgumentError, CheckpointError, UnsupportedError
from fp8kit.numerics import Dump, GemmOperands, capture
from fp8kit.numerics.compare import compare, sampled, summaries
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_close, assert_same_bits, sum_slack

ROWS, HIDDEN = 48, 64


def batch(device, dtype="float32"):
    x = np.random.default_rng(3).standard_normal((ROWS, HIDDEN)).astype(np.float32)
    return fk.tensor(x, dtype=dtype, device=device)


def model_of(device, dtype="float32"):
    fk.manual_seed(1)
    options = {"params_dtype": dtype, "device": device}
    return fk.nn.Sequential(
        fk.nn.LayerNormMLP(HIDDEN, 128, activation="swiglu", **options), fk.nn.Linear(HIDDEN, 32, **options)
    )


def loss(y):
    return fk.nn.cross_entropy(y, fk.tensor(np.arange(ROWS) % 32, device=y.device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operands_are_those_of_the_products(device):
    """x, w and g by hand, from the layers' parts; and each GEMM's g^T x is the weight's gradient."""
    model, x = model_of(device), batch(device)
    dump = capture(model, x, loss)
    assert list(dump.gemms) == ["0.fc1", "0.fc2", "1"]
    weights = {"0.fc1": model[0].fc1_weight, "0.fc2": model[0].fc2_weight, "1": model[1].weight}
    normed = fk.nn.LayerNorm(HIDDEN, device=device)(x).numpy()
    assert_same_bits("norm(x)", dump.gemms["0.fc1"].activation, normed)
    assert all(weight.grad is None for weight in weights.values())
    y = model(x)
    loss(y).backward()
    for layer, weight in weights.items():
        own = dump.gemms[layer]
        assert_same_bits(layer, own.weight, weight.numpy())
        g, x_of = own.gradient.astype(np.float64), own.activation.astype(np.float64)
        slack = sum_slack(np.abs(g.T) @ np.abs(x_of), ROWS)
        assert_close(f"{layer}: dW", fk.arrays.as_view(weight.grad).numpy(), g.T @ x_of, "float32", slack)
    last = dump.gemms["1"]
    a, w = last.activation.astype(np.float64), last.weight.astype(np.float64)
    exact = a @ w.T + model[1].bias.numpy()
    assert_close("y", y.numpy(), exact, "float32", sum_slack(np.abs(a) @ np.abs(w.T) + np.abs(exact), HIDDEN))


def test_a_gpt_with_all_its_gemms(tmp_path):
    from fp8kit.models.gpt import GPT
    from fp8kit.models.presets import preset

    fk.manual_seed(0)
    model = GPT(preset("tiny"), None, fk.arrays.CPU)
    ids = np.random.default_rng(0).integers(0, 256, (2, 32))
    targets = fk.tensor(np.roll(ids, -1, 1))
    dump = capture(model, (fk.tensor(ids),), lambda y: fk.nn.cross_entropy(y, targets))
    parts = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
    assert list(dump.gemms) == [f"layers.{i}.{part}" for i in range(2) for part in parts] + ["head"]
    dump.save(tmp_path / "a.safetensors")
    again = Dump.load(tmp_path / "a.safetensors")
    assert list(again.gemms) == list(dump.gemms)
    for layer, own in dump.gemms.items():
        for name, array in own._asdict().items():
            assert_same_bits(f"{layer} {name}", getattr(again.gemms[layer], name), array)


def test_a_first_layer_whose_input_wants_no_gradient_and_gradients_stay():
    model = model_of("cpu")
    kept = fk.tensor(np.ones((32, HIDDEN), np.float32))
    model[1].weight.grad = kept.view
    dump = capture(model, batch("cpu"), loss)
    assert dump.gemms["0.fc1"].gradient.any()
    assert model[1].weight.grad is kept.view or np.shares_memory(
        fk.arrays.as_view(model[1].weight.grad).numpy(), kept.view.numpy()
    )


def test_separate_weights_are_one_gemm_of_their_layer():
    fk.manual_seed(0)
    layer = fk.nn.MultiheadAttention(HIDDEN, 4, attention_dropout=0.0, fuse_qkv_params=False)
    x = np.random.default_rng(0).standard_normal((8, 2, HIDDEN)).astype(np.float32)
    targets = fk.tensor(np.zeros(16, np.int64))
    dump = capture(layer, fk.tensor(x), lambda y: fk.nn.cross_entropy(y.reshape(16, HIDDEN), targets))
    (qkv, projection) = dump.gemms.values()
    assert qkv.weight.shape == (3 * HIDDEN, HIDDEN)
    assert projection.weight.shape == (HIDDEN, HIDDEN)


def test_what_cannot_be_captured():
    model = model_of("cpu")
    with pytest.raises(ArgumentError, match=r"loss: got shape \(48, 32\), expected a function that gives"):
        capture(model, batch("cpu"))
    with pytest.raises(ArgumentError, match="loss: got 5, expected a function"):
        capture(model, batch("cpu"), 5)
    with pytest.raises(ArgumentError, match="model: got a function"):
        capture(lambda x: x, batch("cpu"), loss)
    with pytest.raises(ArgumentError, match="multiplied no parameter"):
        capture(fk.nn.LayerNorm(HIDDEN), batch("cpu"), lambda y: fk.nn.cross_entropy(
            y, fk.tensor(np.zeros(ROWS, np.int64))))  # fmt: skip
    with pytest.raises(
        ArgumentError, match=r"model: got a Linear of another library, .* fp8kit_torch.capture"
    ):
        capture(torch.nn.Linear(HIDDEN, HIDDEN), np.zeros((2, HIDDEN)), loss)
    twice = fk.nn.Linear(HIDDEN, HIDDEN)
    with pytest.raises(UnsupportedError, match="a weight that multiplies twice"):
        capture(fk.nn.Sequential(twice, twice), batch("cpu"), loss)


def test_what_cannot_be_read_is_not_written(tmp_path):
    (layer, own), *_ = capture(model_of("cpu"), batch("cpu"), loss).gemms.items()
    gradient = own.gradient.copy()
    gradient[0, 0] = np.nan
    path = tmp_path / "operands.safetensors"
    with pytest.raises(ArgumentError, match=f"{layer}/gradient: got Inf or NaN, expected finite numbers"):
        Dump({layer: own._replace(gradient=gradient)}).save(path)
    assert not path.exists()


def test_comparisons_are_the_checks_and_sorted():
    dump = capture(model_of("cpu"), batch("cpu"), loss)
    recipes = {name: NAMED[name].recipe for name in ("nvfp4", "mxfp8", "current")}
    found = compare(dump, recipes, fk.arrays.CPU, seed=5)
    assert [own.layer for own in found] == [layer for layer in dump.gemms for _ in range(3)]
    for own in found:
        checked = recipe_check.check(recipes[own.recipe], *dump.gemms[own.layer], seed=5)
        assert own.results == checked.results
        assert own.operands == checked.operands
        place = own.worst
        assert own.operands[place].relative_error == max(
            errors.relative_error for errors in own.operands.values() if errors
        )
    for i in range(0, len(found), 3):
        assert [own.error for own in found[i : i + 3]] == sorted(own.error for own in found[i : i + 3])
    assert [own.recipe for own in summaries(found)][-1] == "nvfp4"


def test_recipes_by_layer_leave_out_what_is_in_high_precision():
    dump = capture(model_of("cpu"), batch("cpu"), loss)
    recipe = fk.recipe.PerLayer(NAMED["mxfp8"].recipe, (("1", None),))
    assert [own.layer for own in compare(dump, {"most": recipe}, fk.arrays.CPU)] == ["0.fc1", "0.fc2"]


def test_rows_are_sampled_evenly():
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    own = sampled(GemmOperands(x, np.ones((3, 2), np.float32), np.repeat(x[:, :1], 3, 1)), 4)
    assert own.activation[:, 0].tolist() == [0, 6, 12, 18]
    assert own.gradient[:, 0].tolist() == [0, 6, 12, 18]


def saved(tmp_path, **changes):
    """A dump's file with some of its arrays changed or left out."""
    whole = {
        "a/activation": np.ones((4, 8), np.float32),
        "a/weight": np.ones((2, 8), np.float32),
        "a/gradient": np.ones((4, 2), np.float32),
    }
    whole |= {name.replace("__", "/"): array for name, array in changes.items()}
    path = tmp_path / "dump.safetensors"
    metadata = {"kind": "fp8kit operands 1"}
    fk.save(path, {name: array for name, array in whole.items() if array is not None}, metadata)
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a__gradient": None}, "a/gradient: got nothing"),
        ({"a__weight": np.ones((2, 9), np.float32)}, "activation (4, 8), weight (2, 9), gradient (4, 2)"),
        ({"a__weight": np.full((2, 8), np.nan, np.float32)}, "a/weight: got Inf or NaN"),
        ({"a__weight": np.ones(8, np.float32)}, "a/weight: got float32 (8,)"),
        ({"a__weight": np.ones((2, 8), np.int64)}, "a/weight: got int64 (2, 8)"),
        ({"other": np.ones(8, np.float32)}, "name: got 'other'"),
    ],
)
def test_damaged_dumps_say_what_is_wrong(tmp_path, changes, said, capsys):
    path = saved(tmp_path, **changes)
    with pytest.raises(CheckpointError) as error:
        Dump.load(path)
    assert said in str(error.value)
    assert cli.main(["recipes", "compare", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_files_of_another_kind(tmp_path, capsys):
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="truncated"):
        Dump.load(path)
    fk.save(path, {"weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"a file of fk\.numerics\.capture"):
        Dump.load(path)
    assert cli.main(["recipes", "compare", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_command(tmp_path, capsys):
    path = tmp_path / "dump.safetensors"
    capture(model_of("cpu", "bfloat16"), batch("cpu", "bfloat16"), loss).save(path)
    line = ["recipes", "compare", str(path), "--recipes", "mxfp8", "nvfp4", "--device", "cpu"]
    assert cli.main([*line, "--rows", "32"]) == 0
    out = capsys.readouterr().out
    assert "0.fc1  32 of 48 x 64 to 256  mxfp8" in out
    assert cli.main([*line, "--json", "--layers", "0.*"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["against"] == "float64"
    assert found["gemms"]["0.fc2"] == {"rows": 48, "used": 48, "weight": [64, 128]}
    assert {row["layer"] for row in found["rows"]} == {"0.fc1", "0.fc2"}
    assert [own["recipe"] for own in found["recipes"]] == ["mxfp8", "nvfp4"]
    assert cli.main([*line, "--layers", "0.fc1"]) == 0
    assert f"{path}: 1 GEMM, against float64" in capsys.readouterr().out
    assert cli.main([*line, "--layers", "nothing"]) == 2
    assert "a pattern of some of 0.fc1, 0.fc2, 1" in capsys.readouterr().err
    assert cli.main(["recipes", "compare", str(path), "--recipes", "mxfp8,tea"]) == 2
    assert "name: got 'tea', expected a name that" in capsys.readouterr().err


class Grouped(fk.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = fk.nn.Linear(HIDDEN, 32, device="cpu")
        self.kernel = fk.tensor(np.ones((2, 32, 32), np.float32), requires_grad=True)

    def forward(self, x):
        sizes = fk.tensor(np.array([ROWS - 8, 8], np.int32))
        return fk.nn.moe.grouped_dense(self.first(x), self.kernel, sizes, name="experts")


def test_grouped_products_are_left_out_with_a_warning(caplog):
    assert list(capture(Grouped(), batch("cpu"), loss).gemms) == ["first"]
    assert [record.message for record in caplog.records] == [
        "capture: layer experts is left out, since its numbers of rows stay on the device"
    ]
