"""The page of a run: what stands in it, what is down-sampled, how large it is; and the command."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8kit import cli
from fp8kit.numerics import report
from fp8kit.numerics.run_folder import BINS, Curve, Key, RunFolder, Series, read, write
from tests.support import run_folder

LARGEST = 5_000_000  # bytes of a page
PARTS = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
ABOUT: dict[str, Any] = {
    "model": {"kind": "GPT"},
    "settings": {"steps": 500},
    "versions": {"fp8kit": "1"},
    "recipe": "current",
    "device": "cpu",
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 layers and 6 steps."""
    return run_folder.write(tmp_path_factory.mktemp("run"), steps=6)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def synthetic(layers: int, steps: int, stats: int) -> RunFolder:
    """A run with every statistic of every tensor of every layer at every step, and 18 loss curves."""
    random = np.random.default_rng(0)
    at = np.arange(steps)
    names = [f"blocks.{i}.{part}" for i in range(layers) for part in PARTS]
    log: dict[Key, Series] = {}
    for layer in names:
        for tensor in ("activation", "weight", "gradient"):
            for i in range(stats):
                values = np.exp(random.standard_normal(steps) * 4)
                log[Key(layer, tensor, "", f"stat_{i}")] = Series(at, values)
            counts = random.integers(0, 100_000, (steps, BINS)) * (abs(np.arange(BINS) - 110) < 30)
            log[Key(layer, tensor, "", "exponents")] = Series(at, counts)
    curves = tuple(
        Curve(f"{kind} seed {seed}", str(kind), seed, at, random.random(steps), ((steps, 2.0),))
        for kind in range(6)
        for seed in range(3)
    )
    return RunFolder(Path("run"), ABOUT, curves, log)


@pytest.mark.combinations
def test_500_steps_of_12_layers_are_less_than_5_mb() -> None:
    page = report.page(report.digest(synthetic(12, 500, 20)))
    assert len(page.encode()) < LARGEST
    data = data_of(page)
    assert data["cells"] <= report.CELLS
    assert all(len(map_["from"]) <= report.COLUMNS for map_ in data["maps"])
    assert len(data["maps"]) == 60
    assert sum(len(entry["times"]) for entry in data["histograms"]["entries"]) <= report.HISTOGRAMS
    assert all(len(group["steps"]) <= report.POINTS for group in data["losses"]["groups"])
    assert data["steps"] == 500


def test_a_column_shows_the_worst_of_its_steps() -> None:
    random = np.random.default_rng(1)
    steps = np.sort(random.choice(1000, 200, replace=False))
    values = random.standard_normal(200)
    values[[17, 90]] = math.nan, -math.inf
    starts = steps[::7].tolist()
    for smallest in (False, True):
        found = report.columns_of(Series(steps, values), starts, smallest)
        for i, start in enumerate(starts):
            own = values[(steps >= start) & (steps < (starts[i + 1] if i + 1 < len(starts) else 1001))]
            expected = own.min() if smallest else own.max()  # NaN wins in both
            np.testing.assert_array_equal(found[i], expected)
    assert report.columns_of(Series(steps[:1], values[:1]), [int(steps[0]), 2000], True)[1] is None
    assert [report.least(name) for name in ("sqnr", "nvfp4_sqnr", "mse", "nvfp4_scale_inv_min")] == [
        *(True, True, False, True)
    ]


def test_the_page_has_what_the_run_has(real: Path) -> None:
    run = read(real)
    data = data_of(report.page(report.digest(run)))
    assert data["about"] == run.about
    assert data["steps"] == 6
    for map_ in data["maps"]:
        for layer, row in zip(map_["layers"], map_["rows"], strict=True):
            series = run.statistics[Key(layer, map_["tensor"], map_["gemm"], map_["stat"])]
            assert map_["from"] == map_["to"] == series.steps.tolist()
            expected = [report.number(value) for value in series.values.tolist()]
            assert row == expected
    assert {map_["stat"] for map_ in data["maps"]} >= set(report.DEFAULT_PANELS)
    assert len(data["maps"]) == len({(key.tensor, key.stat) for key in run.statistics}) - 3  # histograms
    entry = data["histograms"]["entries"][0]
    counts = run.statistics[Key(entry["layer"], entry["tensor"], "", "exponents")].values[-1]
    last = entry["times"][-1]
    assert sum(last["shares"]) + last["zeros"] == pytest.approx(100, abs=0.5)
    assert last["shares"][0] == pytest.approx(100 * counts[last["first"]] / counts.sum(), rel=5e-3)
    assert set(last["ranges"]) == {"current", "mxfp8", "nvfp4"}
    scale = run.statistics[Key(entry["layer"], entry["tensor"], "", "scale_inv_max")].values[-1]
    assert last["ranges"]["current"][2] == pytest.approx(math.log2(448 * scale), abs=1e-3)
    assert [row["name"] for row in data["losses"]["table"]] == ["float32", "current"]
    assert data["losses"]["reference"] == "float32"
    assert data["breaks"]
    assert data["gemms"]["fprop"]["operands"]["x"]["format"] == "E4M3"


def test_an_inspected_training_becomes_a_page(real: Path, tmp_path: Path) -> None:
    """From ``fk.inspect`` to the page: every heat map that a report opens with has a number of each layer at
    each step, which is the inspector's, and every operand has its histograms."""
    page = tmp_path / "page.html"
    assert cli.main(["report", str(real), "-o", str(page)]) == 0
    data = data_of(page.read_text())
    layers = [f"layers.{i}.{part}" for i in range(2) for part in PARTS]
    logged = {
        (row["layer"], row["tensor"], row["stat"], row["step"]): row["value"]
        for row in map(json.loads, (real / "statistics.jsonl").read_text().splitlines())
    }
    maps = {(map_["tensor"], map_["stat"]): map_ for map_ in data["maps"]}
    for tensor in run_folder.TENSORS:
        for stat in report.DEFAULT_PANELS:
            map_ = maps[tensor, stat]
            assert (map_["layers"], map_["from"]) == (layers, list(range(6)))
            for layer, row in zip(layers, map_["rows"], strict=True):
                assert row == [report.number(logged[layer, tensor, stat, step]) for step in range(6)]
                assert all(isinstance(value, int | float) for value in row), (tensor, stat, layer)
        assert min(map(min, maps[tensor, "sqnr"]["rows"])) > 10  # dB: casts to 8 bits
        assert min(map(min, maps[tensor, "scale_inv_max"]["rows"])) > 0
    shown = {(entry["layer"], entry["tensor"]): entry["times"] for entry in data["histograms"]["entries"]}
    assert set(shown) == {(layer, tensor) for layer in layers for tensor in run_folder.TENSORS}
    assert all(sum(time["shares"]) > 50 for times in shown.values() for time in times)
    assert {each["layer"] for each in data["breaks"]} <= set(layers)
    assert [group["steps"] for group in data["losses"]["groups"]] == [list(range(6))] * 2


def test_the_page_asks_for_nothing() -> None:
    page = report.page(report.digest(synthetic(1, 4, 1)))
    shell = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    addresses = set(re.findall(r"[a-z]+://[^\s\"'`)]+", shell))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, of SVG's elements
    assert not re.search(r"\b(src|href)=\"(?!#|data:)|@import|url\((?!#)", shell.replace("url(#${clip})", ""))
    assert "default-src 'none'" in shell


def test_names_cannot_end_the_data_or_the_title() -> None:
    bad = "</script><script>alert(1)</script><!--"
    key = Key(bad, "activation", "", "sqnr")
    about = {**ABOUT, "model": {"name": bad}, "recipe": bad, "settings": {bad: "\u2028"}}
    run = RunFolder(Path("run"), about, (), {key: Series(np.arange(3), np.ones(3))})
    page = report.page(report.digest(run))
    assert page.count("</script>") == 2
    assert page.count("<script") == 2
    assert data_of(page)["maps"][0]["layers"] == [bad]
    assert data_of(page)["about"] == about


def test_inf_and_nan_are_told_apart_from_nothing() -> None:
    values = np.array([1.0, math.inf, -math.inf, math.nan])
    log = {
        Key("a", "activation", "", "sqnr"): Series(np.arange(4), values),
        Key("b", "activation", "", "sqnr"): Series(np.array([2, 9]), np.array([1.23456, 2e-30])),
    }
    data = data_of(report.page(report.digest(RunFolder(Path("run"), ABOUT, (), log))))
    (map_,) = data["maps"]
    assert map_["from"] == [0, 1, 2, 3, 9]
    assert map_["rows"] == [[1, "inf", "-inf", "nan", None], [None, None, 1.235, None, 2e-30]]


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    data = data_of(report.page(report.digest(RunFolder(tmp_path, {**ABOUT, "recipe": None}, (), {}))))
    assert (data["maps"], data["losses"]["groups"], data["breaks"], data["gemms"]) == ([], [], [], {})


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_says_that_a_recipe_has_another_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, recipe="curent", losses={"a": [1.0, 2.0]}, device="cpu")
    assert cli.main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith("no format's range, and no limits that follow from one: the recipe 'curent'")
    assert said.endswith("did you mean current?")


def test_the_command_writes_the_page(real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(real)]) == 0
    text = (real / "report.html").read_text()
    layers, series = 8, len(read(real).statistics)
    assert capsys.readouterr().out == (
        f"{real / 'report.html'}: {len(text.encode()) / 1e6:.2f} MB; 4 loss curves, {series} statistics of "
        f"{layers} layers\n"
    )
    out = tmp_path / "page.html"
    assert cli.main(["report", str(real), "-o", str(out), "--reference", "current"]) == 0
    assert data_of(out.read_text())["losses"]["reference"] == "current"


def test_the_command_refuses_in_one_line(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> tuple[int, str]:
        status = cli.main(["report", *arguments])
        return status, capsys.readouterr().err

    nowhere = tmp_path / "nowhere"
    wanted = "expected a folder with run.json and two .jsonl files"
    assert refused(str(nowhere)) == (2, f"fp8kit report: RUN: got '{nowhere}', {wanted}\n")
    run = tmp_path / "run"
    run.mkdir()
    status, said = refused(str(run))
    assert (status, said.split(", expected")[0]) == (2, f"fp8kit report: RUN: got '{run}', without run.json")
    assert said.endswith("run_folder.write made (docs/report.md); `fp8kit train` makes none\n")
    for name in ("run.json", "losses.jsonl", "statistics.jsonl"):
        (run / name).write_bytes((real / name).read_bytes())
    status, said = refused(str(run), "--reference", "float31")
    assert (status, said.split(": got")[0]) == (2, "fp8kit report: --reference")
    with (run / "statistics.jsonl").open("a") as file:
        lines = (run / "statistics.jsonl").read_text().count("\n")
        file.write('{"step": 7, "layer": "head"')
    status, said = refused(str(run))
    assert status == 1
    assert said.startswith(f"fp8kit report: {run / 'statistics.jsonl'}, line {lines + 1}: got ")
    assert said.count("\n") == 1
    status, said = refused(str(real), "-o", str(tmp_path))
    assert (status, said.split(": got")[0]) == (2, "fp8kit report: --output")
