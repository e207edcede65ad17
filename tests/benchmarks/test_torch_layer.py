"""``benchmarks.torch_layer`` in small: its report, its cases of other libraries through modules that stand in for them, its errors."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import fp8kit_torch as ft
import pytest
import torch

import fp8kit as fk
from benchmarks import torch_cases, torch_layer, torch_plain, torch_timing
from benchmarks.torch_cases import EAGER, Unavailable, make_problem
from fp8kit import recipe
from fp8kit.bench import versions

SMALL = ["--layer", "64", "128", "2", "32", "2", "--small", "32", "64", "2", "16", "2", "--linear", "8", "32", "48", "--rounds", "1",
         "--calls", "2", "--compile", "aot_eager"]  # fmt: skip
OURS = {f"fp8kit_torch {name}" for name in torch_cases.RECIPES} | {"fp8kit native bf16", "fp8kit native FP8 delayed"}
ABSENT = {f"Transformer Engine {name}" for name in torch_cases.RECIPES}
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _no_traces_left():
    yield
    torch._dynamo.reset()


def small_problem(kind, device="cpu", layout="sbhd"):
    sizes = {"Linear": (32, 48), "LayerNormMLP": (32, 64), "TransformerLayer": (32, 64, 2)}[kind]
    return make_problem(kind, sizes, 2, 16, layout, "aot_eager", torch.device(device), 5)


def results(step):
    return step.results(*step())


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")  # torch's, in its backward thread
@devices
def test_the_report(device, tmp_path, capsys):
    out = tmp_path / "deep" / "report.json"
    assert torch_layer.main([*SMALL, "--device", device, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert set(report) == {"machine", "device", "python", "versions", "settings", "clocks", "workloads", "gemms", "seconds"}
    assert set(report["versions"]) == {*versions(), "transformer_engine", "torchao"}
    assert report["settings"]["layer"] == [64, 128, 2, 32, 2]
    assert [work["name"] for work in report["workloads"]] == ["layer", "mlp", "linear", "small-layer", "small-linear"]
    taken = {"case", "status", "first_step_s", "error_y", "error_dx", "host_us", "host_ratio"}
    taken |= {"gpu_ms", "gpu_ratio", "peak_gib"} if device == "cuda" else set()
    for work in report["workloads"]:
        rows = {row["case"]: row for row in work["cases"]}
        assert {EAGER, *OURS, *ABSENT} <= set(rows)
        assert ("torch.compile bf16" in rows) == ("torchao FP8 tensorwise, torch.compile" in rows) == (work["name"] == "layer")
        assert rows[EAGER]["host_ratio"] == 1
        for name, row in rows.items():
            if row["status"] == "ok":
                assert set(row) == taken
                assert all(value > 0 for key, value in row.items() if key not in ("case", "status"))
            else:
                assert name not in OURS | {EAGER, "torch.compile bf16"}
                assert row == {"case": name, "status": "not installed"}
    assert [(p["rows"], p["columns"], p["depth"]) for p in report["gemms"]] == [(64, 192, 64), (64, 64, 64), (64, 128, 64), (64, 64, 128)]
    for product in report["gemms"]:
        ours = next(row for row in product["cases"] if row["case"] == "fp8kit FP8")
        assert ours["status"] == "ok"
        assert {"host_us", "error"} <= set(ours)
    text = capsys.readouterr().out
    assert text.count("fp8kit_torch FP8 delayed") == 5
    assert "not installed" in text


def test_only_what_is_asked_for_runs(tmp_path, capsys):
    out = tmp_path / "report.json"
    torch_layer.main([*SMALL, "--device", "cpu", "--only", "gemms", "small-linear", "--out", str(out)])
    report = json.loads(out.read_text())
    assert [work["name"] for work in report["workloads"]] == ["small-linear"]
    assert len(report["gemms"]) == 4


@devices
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("kind", list(torch_plain.PLAIN))
def test_doors_agree_bit_for_bit(device, kind, layout):
    """The native library and the torch door get the same weights and data, so a comparison of their times is one of doors alone."""
    problem = small_problem(kind, device, layout)
    with fk.deterministic():
        native = results(torch_cases.native(problem, None))
        door = results(torch_cases.fp8kit_torch(problem, None))
    assert all(torch.equal(a, b) for a, b in zip(native, door, strict=True))


@pytest.mark.parametrize("own", torch_cases.RECIPES)
def test_transformer_engine_is_used_where_it_is_installed(monkeypatch, own):
    """Its names lead to this door here: the case gives what fp8kit_torch gives under the same recipe."""
    problem = small_problem("TransformerLayer")
    given = torch_cases.RECIPES[own]
    made = torch_cases.cases(problem, True)[f"Transformer Engine {own}"]
    monkeypatch.setattr(torch_cases, "version_of", lambda peer: "not installed")
    with pytest.raises(Unavailable, match="not installed"):
        made(problem)
    monkeypatch.setattr(torch_cases, "version_of", lambda peer: "0")
    for name, module in (("", SimpleNamespace()), (".pytorch", ft), (".common", SimpleNamespace()), (".common.recipe", recipe)):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    with fk.deterministic():
        theirs, ours = results(made(problem)), results(torch_cases.fp8kit_torch(problem, given))
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_torchao_is_used_where_it_is_installed(monkeypatch):
    """A stand-in that converts nothing: the case gives what plain torch gives under the same compiler."""
    asked = []
    config = SimpleNamespace(from_recipe_name=lambda name: asked.append(name) or name)
    stand_in = SimpleNamespace(Float8LinearConfig=config, convert_to_float8_training=lambda module, config: module)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=stand_in))
    monkeypatch.setitem(sys.modules, "torchao.float8", stand_in)
    monkeypatch.setattr(torch_cases, "version_of", lambda peer: "0")
    problem = small_problem("LayerNormMLP")
    theirs, plain = results(torch_cases.torchao(problem)), results(torch_cases.compiled(problem))
    assert asked == ["tensorwise"]
    assert all(torch.equal(a, b) for a, b in zip(theirs, plain, strict=True))


def test_a_compiler_that_fails_is_reported(tmp_path, capsys):
    """The reason stands in its row, the other rows are there, and it is no failure of fp8kit."""
    out = tmp_path / "report.json"
    tiny = [*SMALL, "--device", "cpu", "--only", "layer", "--compile", "no_such_backend", "--out", str(out)]
    assert torch_layer.main(tiny) == 0
    rows = {row["case"]: row for row in json.loads(out.read_text())["workloads"][0]["cases"]}
    assert rows["torch.compile bf16"]["status"].startswith("failed: ")
    assert "no_such_backend" in rows["torch.compile bf16"]["status"]
    assert rows["fp8kit_torch FP8 block"]["status"] == "ok"


def test_a_wrong_result_is_reported(monkeypatch, tmp_path, capsys):
    """Random weights of another seed in place of the right ones: errors near sqrt(2), over every bound."""
    right = torch_cases.fp8kit_torch

    def wrong(problem, given):
        other = make_problem(problem.kind, problem.sizes, 1, 8, "sbhd", "", problem.device, 9)
        return right(torch_cases.Problem(**vars(problem) | {"weights": other.weights}), given)

    monkeypatch.setattr(torch_cases, "fp8kit_torch", wrong)
    out = tmp_path / "report.json"
    assert torch_layer.main([*SMALL, "--device", "cpu", "--only", "small-linear", "--out", str(out)]) == 1
    rows = {row["case"]: row for row in json.loads(out.read_text())["workloads"][0]["cases"]}
    assert rows["fp8kit_torch FP8 delayed"]["status"].startswith("wrong: errors above 0.075, 0.140")
    assert abs(rows["fp8kit_torch bf16"]["error_y"] - 2**0.5) < 0.2
    assert rows["fp8kit native bf16"]["status"] == "ok"


@pytest.mark.gpu
def test_peak_memory_counts_both_allocators():
    """A step that takes a torch tensor of 3 MiB and an fp8kit array of 5 MiB, beyond 2 MiB that stay."""
    from fp8kit import arrays, formats

    torch_timing.free_memory()
    memory = torch_timing.Memory()
    kept = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")

    def step():
        return torch.empty(3 << 20, dtype=torch.uint8, device="cuda"), arrays.empty((5 << 20,), formats.uint8, arrays.device("cuda"))

    # an allocator may give up to 1 MiB more than it was asked for rather than split a block
    assert memory.peak_gib(step) * 1024 == pytest.approx(10, abs=1)
    assert kept.numel() == 2 << 20
