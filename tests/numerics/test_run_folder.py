"""A RUN folder is read as it is written, and what is damaged is named by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fp8kit
from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.numerics.run_folder import Key, curves_of, kind_of, layer_order, read, series_of, write

ABOUT = {"model": {}, "recipe": "current", "settings": {}, "versions": {}, "device": "cpu"}
LOSS = {"step": 1, "loss": 2.5, "series": "bf16 seed 0"}
ROW = {"step": 1, "layer": "0.fc1", "tensor": "activation", "stat": "sqnr", "value": 30.5}
COUNTS = [0] * 120 + [5] + [0] * 135 + [3]


def folder(path: Path, about: Any = ABOUT, losses: Any = (LOSS,), rows: Any = (ROW,)) -> Path:
    (path / "run.json").write_text(about if isinstance(about, str) else json.dumps(about))
    for name, lines in (("losses", losses), ("statistics", rows)):
        text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        (path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in text))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    histogram = {**ROW, "stat": "exponents", "value": COUNTS}
    product = {**ROW, "tensor": "output", "gemm": "fprop", "step": 3}
    rows = [{**ROW, "step": 4, "value": 1}, ROW, histogram, product, {**ROW, "value": float("nan")}, ""]
    run = read(folder(tmp_path, rows=rows))
    assert run.about == ABOUT
    steps, values = run.statistics[Key("0.fc1", "activation", "", "sqnr")]
    assert steps.tolist() == [1, 4]
    assert np.isnan(values[0])  # the later of two rows of a step counts
    assert values[1] == 1
    found = run.statistics[Key("0.fc1", "activation", "", "exponents")]
    assert found.values.dtype == np.int64
    assert found.values.tolist() == [COUNTS]
    assert run.statistics[Key("0.fc1", "output", "fprop", "sqnr")].steps.tolist() == [3]


def test_a_training_becomes_a_folder(tmp_path: Path) -> None:
    """What ``write`` gets is what ``read`` gives; an inspector's file stays."""
    run = tmp_path / "new" / "run"
    losses = {"bf16 seed 0": [3.0, np.float32(2.5)], "mxfp8 seed 0": {4: 2.0, np.int64(2): float("nan")}}
    made = write(
        run,
        recipe="mxfp8",
        losses=losses,
        validation={"bf16 seed 0": {1: 2.75}},
        device="cpu",
        model={"layers": 2},
        settings={"dtype": np.dtype(np.float32)},
    )
    assert made == run
    found = read(run)
    assert {name: found.about[name] for name in ("recipe", "device", "model", "settings")} == {
        "recipe": "mxfp8",
        "device": "cpu",
        "model": {"layers": 2},
        "settings": {"dtype": "float32"},
    }
    assert found.about["versions"].items() >= {"fp8kit": fp8kit.__version__, "numpy": np.__version__}.items()
    one, other = found.curves
    assert (one.name, one.steps.tolist(), one.losses.tolist()) == ("bf16 seed 0", [0, 1], [3.0, 2.5])
    assert one.validation == ((1, 2.75),)
    assert other.steps.tolist() == [2, 4]
    np.testing.assert_array_equal(other.losses, [np.nan, 2.0])
    assert found.statistics == {}
    (run / "statistics.jsonl").write_text(json.dumps(ROW) + "\n")
    write(run, recipe=None, losses={}, device="cuda:0", versions={"torch": "2"})
    again = read(run)
    assert again.about["versions"] == {"torch": "2"}
    assert (again.curves, len(again.statistics)) == ((), 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"recipe": 3}, "recipe: got 3, expected a name or null"),
        ({"model": "GPT"}, "model: got .*GPT.*, expected a mapping"),
        ({"losses": [2.5]}, "losses: got .*2.5.*, expected losses by the name of their run"),
        ({"losses": {"bf16": 2.5}}, "losses: got 2.5, expected numbers or {step: loss}"),
        ({"losses": {"bf16": ["2.5"]}}, 'losses: got .*, expected "loss": a number'),
        ({"losses": {"bf16": {-1: 2.5}}}, 'losses: got .*, expected "step": an int, not negative'),
        ({"losses": {"": [2.5]}}, 'losses: got .*, expected "series": the name of a run'),
        ({"validation": {"bf61": [2.5]}}, "validation: got 'bf61', expected .*bf16"),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, wrong: Any, said: str) -> None:
    right: Any = {"recipe": None, "losses": {"bf16": [2.5]}, "device": "cpu"}
    with pytest.raises(ArgumentError, match=said):
        write(tmp_path / "run", **{**right, **wrong})
    assert not (tmp_path / "run").exists()


def test_curves_have_groups_and_seeds() -> None:
    rows = [LOSS, {**LOSS, "step": 2, "loss": 2.0}, {**LOSS, "series": "mxfp8, 15 % bf16, seed 3"}]
    rows += [{**LOSS, "series": "nvfp4"}, {**LOSS, "validation": True, "loss": 9.0}]
    found = curves_of(rows)
    assert [(curve.group, curve.seed) for curve in found] == [
        ("bf16", 0),
        ("mxfp8, 15 % bf16", 3),
        ("nvfp4", None),
    ]
    assert found[0].losses.tolist() == [2.5, 2.0]
    assert found[0].validation == ((1, 9.0),)


def test_layers_stand_in_the_order_in_which_they_compute() -> None:
    names = [f"layers.{i}.{part}" for i in (10, 2) for part in ("layernorm_mlp.fc1", "layernorm_mlp.fc2")]
    names += ["layers.2.self_attention.proj", "layers.2.self_attention.layernorm_qkv"]
    assert sorted(names, key=layer_order) == [
        "layers.2.self_attention.layernorm_qkv",
        "layers.2.self_attention.proj",
        "layers.2.layernorm_mlp.fc1",
        "layers.2.layernorm_mlp.fc2",
        "layers.10.layernorm_mlp.fc1",
        "layers.10.layernorm_mlp.fc2",
    ]
    sorted(
        ["head", "0", "a.1.b", "1", "a.b", "a1", "_1"], key=layer_order
    )  # names of any kind can be compared
    flax = [
        f"layers_{i}.{part}"
        for i in (0, 2, 10)
        for part in ("attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2")
    ]
    assert sorted(sorted(flax), key=layer_order) == flax


def test_histograms_are_told_by_their_names() -> None:
    assert [kind_of(name) for name in ("exponents", "mxfp8_scales", "scale_inv_max")] == [
        "exponents",
        "scales",
        None,
    ]
    assert series_of([]) == {}


WRONG_ROWS = [
    ('{"step": 1,', "a JSON object"),
    ("[1]", "a JSON object"),
    ({**ROW, "step": -1}, '"step": an int, not negative'),
    ({**ROW, "step": True}, '"step": an int, not negative'),
    ({**ROW, "layer": 3}, '"layer": a name'),
    ({**ROW, "tensor": "bias"}, '"tensor": one of activation, weight, gradient, output, dgrad, wgrad'),
    ({**ROW, "stat": ""}, '"stat": a name'),
    ({**ROW, "gemm": "forward"}, '"gemm": one of fprop, dgrad, wgrad, or none'),
    ({**ROW, "gemm": ["fprop"]}, '"gemm": one of fprop, dgrad, wgrad, or none'),
    ({**ROW, "value": "30"}, '"value": a number'),
    ({**ROW, "value": [1, 2]}, '"value": a number'),
    ({**ROW, "stat": "exponents", "value": [1, 2]}, '"value": a list of 257 counts'),
    ({**ROW, "stat": "exponents", "value": [*COUNTS[:-1], 0.5]}, '"value": a list of 257 counts'),
]


@pytest.mark.parametrize(("row", "wanted"), WRONG_ROWS, ids=[str(i) for i in range(len(WRONG_ROWS))])
def test_a_damaged_statistic_is_named(tmp_path: Path, row: Any, wanted: str) -> None:
    path = folder(tmp_path, rows=[ROW, "", row, ROW])
    with pytest.raises(Fp8kitError) as caught:
        read(path)
    assert caught.value.argument == f"{path / 'statistics.jsonl'}, line 3"
    assert caught.value.wanted == wanted


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({**LOSS, "loss": None}, '"loss": a number'),
        ({**LOSS, "series": ""}, '"series": the name of a run'),
        ({**LOSS, "step": 1.5}, '"step": an int, not negative'),
        ({**LOSS, "validation": "yes"}, '"validation": true or false'),
        ("\x00", "a JSON object"),
    ],
)
def test_a_damaged_loss_is_named(tmp_path: Path, row: Any, wanted: str) -> None:
    path = folder(tmp_path, losses=[LOSS, row])
    with pytest.raises(Fp8kitError) as caught:
        read(path)
    assert caught.value.argument == f"{path / 'losses.jsonl'}, line 2"
    assert caught.value.wanted == wanted


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path)
    with (path / "statistics.jsonl").open("ab") as file:
        file.write(b'{"step": \xff}\n')
    with pytest.raises(Fp8kitError, match=r"statistics\.jsonl, line 2: got .*not UTF-8"):
        read(path)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ('{"model": {},\n "recipe" 3}', "run.json, line 2: got no JSON"),
        ("[]", "run.json, line 1: got [], expected an object"),
        ({**ABOUT, "recipe": 3}, 'run.json, "recipe": got 3, expected a name or null'),
        ({**ABOUT, "model": None}, 'run.json, "model": got null, expected an object'),
        ({name: ABOUT[name] for name in ABOUT if name != "device"}, '"device": missing, expected a word'),
    ],
)
def test_a_damaged_run_json_is_named(tmp_path: Path, about: Any, said: str) -> None:
    path = folder(tmp_path, about=about)
    with pytest.raises(Fp8kitError) as caught:
        read(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["run.json", "losses.jsonl", "statistics.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path)
    (path / name).unlink()
    with pytest.raises(Fp8kitError) as caught:
        read(path)
    wanted = "missing, expected a file of a RUN folder that can be read"
    assert str(caught.value) == f"report: {path / name}: {wanted}"


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"RUN: got .*nowhere"):
        read(tmp_path / "nowhere")
