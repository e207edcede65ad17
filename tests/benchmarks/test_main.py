"""``python -m benchmarks``: parts by name, failures, verdicts from a recorded run, the documents' tables."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

import benchmarks
from benchmarks import __main__ as command
from benchmarks import attention, error, own_gemms, parts, table, targets, train
from fp8kit.arrays import CPU
from fp8kit.bench import layers
from fp8kit.bench import report as reports
from fp8kit.bench.report import Part, Report, Setting
from fp8kit.bench.sizes import FULL, SMALL
from fp8kit.errors import Fp8kitError

QUICK = ["--device", "cpu", "--rounds", "1"]


def row(case, workload="layer 4096", status="ok", **figures):
    return {"workload": workload, "case": case, "status": status, **figures}


def recorded():
    """A run as a good one would be: every target is reached, some only as they must."""
    layer = []
    for workload, base in (
        ("layer 4096", 18.0),
        ("layer 2048", 2.7),
        ("layer 1024", 1.5),
        ("layer 768", 1.3),
    ):
        layer += [
            row(targets.EAGER, workload, gpu_ms=base, peak_gib=2.0),
            row(targets.CUDNN, workload, gpu_ms=base),
            row(targets.MISSING, workload, gpu_ms=0.6 * base),
        ]
        layer += [row(case, workload, gpu_ms=0.54 * base, peak_gib=1.9) for case in targets.FRONTENDS]
    layer += [
        row(targets.COMPILED, gpu_ms=17.0),
        row("fp8kit native bf16", gpu_ms=16.0),
        row("skeleton", gpu_ms=9.9),
        row("fp8kit native FP8 current", gpu_ms=10.0),
        row("fp8kit_torch FP8 current", gpu_ms=11.0),
        row("fp8kit_torch FP8 block", gpu_ms=11.5),
        row(targets.GRAPH, "layer 1024", gpu_ms=1.0),
        row(f"{targets.NATIVE}, graph", "layer 1024", gpu_ms=0.9),
    ]
    shapes = [
        row(f"{case}, visit {visit}", f"{count} batches", value=value * (4 if visit == 1 else 1))
        for count in (100, 1000)
        for visit in (1, 2, 3)
        for case, value in ((targets.TORCH, 2.2 if count == 1000 else 2.1), (targets.FLASH, 2.0))
    ]
    attention = [row("fp8kit native, forward", "attention, layer 4096", gpu_ms=1.0)]
    for size, own in (
        ("head_dim 64, 32/32 heads, 4 x 2048", 1.2),
        ("head_dim 256, 8/8 heads, 4 x 2048", 9.0),
    ):
        for direction in ("forward", "backward"):
            attention += [
                row(f"{targets.LIBRARY}, {direction}", size, gpu_ms=1.0),
                row(
                    f"{targets.OWN_KERNEL}, {direction}", size, gpu_ms=own if direction == "backward" else 1.0
                ),
            ]
    own = [
        row(own_gemms.OURS, f"{scales}: forward, 16 x 64 x 64", scales=scales, of_best=share)
        for scales, share in (
            (own_gemms.TENSORS, 0.98),
            (own_gemms.FEW, 1.1),
            (own_gemms.BLOCKS, 1.2),
            (own_gemms.EPILOGUES, 1.1),
        )
    ]
    found = {
        "layer": layer,
        "own": own,
        "inspect": [row("frequency 100", ratio=1.01), row("frequency 1", ratio=1.2)],
        "host": [
            row(targets.NATIVE, host_us=150.0),
            row(targets.TORCH, host_us=301.0),
            row(targets.EAGER, host_us=200.0),
        ],
        "shapes": shapes,
        "attention": attention,
        "model": [
            row(targets.EAGER, "Llama", gpu_ms=100.0),
            row(targets.TORCH, "Llama", gpu_ms=62.0),
            row(f"{targets.TORCH}, torch.compile", "Llama", gpu_ms=50.0),
        ],
        "kernels": [row("all passes", of_copy=0.9)],
        "start": [row("empty cache", seconds=7.0), row("warm cache", seconds=2.0)],
        "ranks": [
            row(targets.TORCH, ratio=0.6),
            row(f"{targets.EAGER}, {targets.SHARDED}", gathered_mib=200.0),
            row(f"{targets.TORCH}, {targets.SHARDED}", gathered_mib=100.0, ratio=0.6, scaling=0.9),
            row(f"{targets.TORCH}, {targets.SUMMED}", scaling=0.96),
        ],
    }
    about = {"machine": "a GPU", "versions": {"fp8kit": "0", "torch": "2"}, "settings": {"sizes": "full"}}
    return Report(
        about, {name: {"status": "ok", "seconds": 1.0, "rows": rows} for name, rows in found.items()}
    )


def test_verdicts_by_hand():
    found = {r["what"]: r for r in targets.evaluate(recorded())}
    assert len(found) == 34
    first = found["native FP8 delayed layer / torch eager bf16"]
    assert (first["verdict"], first["value"]) == ("goal", pytest.approx(0.54))
    assert found["native FP8 delayed layer / the skeleton of the same run"]["value"] == pytest.approx(
        9.72 / 9.9
    )
    # the slower frontend
    assert found["FP8 current scaling, both frontends / torch eager bf16"]["value"] == pytest.approx(11 / 18)
    verdicts = {
        what.partition(",")[0] if "Linear" in what else what: r["verdict"] for what, r in found.items()
    }
    assert [v for v in verdicts.values() if v == "not measured"] == []
    assert found["host time, native Linear FP8, 64 tokens, 256 to 256"]["verdict"] == "must"
    assert found["host time, fp8kit_torch Linear FP8 / torch eager bf16"]["verdict"] == "MISS"
    assert found["memory-bound kernels: copy time of their bytes / their time"]["verdict"] == "must"
    assert found["first step, empty kernel cache"]["verdict"] == "goal"
    assert (
        found["peak memory of the hidden 4096 FP8 layer, both frontends / torch eager bf16"]["verdict"]
        == "must"
    )
    for part, values in (
        ("shapes", (8.4, 1.1)),
        ("attention", (1 / 1.2,)),
        ("model", (0.62, 50 / 62)),
        ("own", (0.98, 1.1, 1.1, 1.2, 1.1)),
    ):
        got = [r["value"] for r in found.values() if r["part"] == part]
        assert got == pytest.approx(values), part
    missing = found["FP8 layer where cuDNN is missing / where it is there, every size"]
    assert missing["value"] == pytest.approx(0.6 / 0.54)
    assert found["hidden 1024 layer, native FP8 graph / torch bf16 graph"]["verdict"] == "must"
    text = targets.text(list(found.values()), ["layer", "host"])
    assert "MISS" in text
    assert "150 us" in text
    assert "first step" not in text  # of a part that did not run
    assert targets.text(list(found.values()), ["gemm"]) == "== targets: none is of these parts"


def verdict_of(run, start):
    return next(r["verdict"] for r in targets.evaluate(run) if r["what"].startswith(start))


def test_targets_at_their_edges():
    run = recorded()
    for key, value, verdict in (
        ("of_copy", 0.85, "must"),
        ("of_copy", 0.8499, "MISS"),
        ("of_copy", 0.92, "goal"),
    ):
        run.rows("kernels")[0][key] = value
        assert verdict_of(run, "memory-bound") == verdict
    for value, verdict in ((20.0, "must"), (20.01, "MISS"), (8.0, "goal")):
        run.rows("start")[0]["seconds"] = value
        assert verdict_of(run, "first step, empty") == verdict


def test_a_wrong_result_or_a_missing_one_is_no_figure():
    run = recorded()
    next(r for r in run.rows("layer") if r["case"] == targets.NATIVE)["status"] = "WRONG: errors"
    del run.parts["start"]
    found = targets.evaluate(run)
    assert found[0]["verdict"] == "not measured"
    assert found[0]["reason"] == "layer, fp8kit native FP8 delayed: WRONG: errors"
    assert found[-8]["reason"] == "start, empty cache: not measured"
    run.about["settings"]["sizes"] = "small"
    assert {r["verdict"] for r in targets.evaluate(run)} == {"not measured"}


def test_the_inspector_in_small(tmp_path):
    out = tmp_path / "run"
    assert command.main(["inspect", *QUICK, "--out", str(out)]) == 0
    rows = reports.read(out / command.FILE).rows("inspect")
    assert [row["case"] for row in rows] == ["off", "frequency 4", "frequency 1"]
    assert all(row["status"] == "ok" and row["ratio"] > 0 for row in rows)


@pytest.mark.programs
def test_a_run_in_small(tmp_path, capsys):
    out = tmp_path / "deep" / "results"
    assert command.main(["gemm", "error", "memory", *QUICK, "--out", str(out)]) == 0
    made = reports.read(out / command.FILE)
    assert list(made.parts) == ["gemm", "memory", "error"]
    assert {"transformer_engine", "torchao", "torch"} <= set(made.about["versions"])
    assert len(made.rows("error")) == 4
    assert len(made.targets) == 34
    assert (out / "roofline.png").exists()
    said = capsys.readouterr().out
    assert "torch._scaled_mm FP8" in said
    assert said.splitlines()[-2] == "== targets: none is of these parts"
    assert "not measured" not in said
    assert said.startswith("fp8kit 0.")
    assert "\nlayer 64: hidden 64, " in said
    assert "\nLinear, 32 x 48 to 64  error_y  error_dx  error_dW\n" in said


def test_a_part_that_fails_is_reported_and_hides_nothing(tmp_path, monkeypatch, capsys):
    def failing(setting):
        raise RuntimeError("it broke")

    own = {part.name: part for part in parts.PARTS}
    monkeypatch.setattr(parts, "PARTS", (replace(own["kernels"], run=failing), own["error"]))
    assert command.main([*QUICK, "--out", str(tmp_path)]) == 1
    assert (
        capsys.readouterr().err == "python -m benchmarks: FAILED: kernels: failed: RuntimeError: it broke\n"
    )
    assert reports.read(tmp_path / command.FILE).parts["error"]["status"] == "ok"


def test_of_the_layers_one(tmp_path, monkeypatch):
    """In this process and in a part's own, by one contender of the layer."""

    def child(order, **options):
        assert order[order.index("--only") + 1] == "layer 32"
        return SimpleNamespace(returncode=command.main(order[3:]), stderr="")

    def first(problem, workload):
        return dict(list(layers.native_only(problem, workload).items())[:1])

    own = Part("layer", "", partial(layers.layer_part, field=layers.Field(first)))
    found = (own, Part("attention", "", attention.attention_part))
    monkeypatch.setattr(parts, "PARTS", found)
    monkeypatch.setattr(command.subprocess, "run", child)
    for more in ([], ["--isolate"]):
        command.main([*QUICK, "--only", "layer 32", *more, "--out", str(tmp_path)])
        made = reports.read(tmp_path / command.FILE)
        found = {row["workload"] for part in made.parts for row in made.rows(part)}
        assert found == {"layer 32", "attention, layer 32"}


def test_other_libraries_failures_are_not_this_runs(tmp_path, monkeypatch):
    rows = [
        row("torch.compile bf16", status="failed: it"),
        row("Transformer Engine bf16", status="WRONG: by much"),
        row("plain JAX bfloat16", status="failed: it"),
    ]
    monkeypatch.setattr(parts, "PARTS", (Part("layer", "", lambda setting: rows),))
    assert command.main([*QUICK, "--out", str(tmp_path)]) == 0
    rows.append(row("fp8kit native bf16", status="WRONG: by much"))
    assert command.main([*QUICK, "--out", str(tmp_path)]) == 1


def test_parts_apart_are_taken_together(tmp_path, monkeypatch):
    """A child that reports, one that dies, and one that hangs; children that are real take too long here."""

    class Done:
        returncode, stderr = -11, "Segmentation fault"

    def child(order, **options):
        name, out = order[3], order[5]
        if name == "gemm":
            raise command.subprocess.TimeoutExpired(order, 1)
        if name == "error":
            (tmp_path / "parts" / "error").mkdir(parents=True)
            Report(
                {"device": "cpu", "clocks": [{"a": "b"}]},
                {"error": {"status": "ok", "seconds": 1.0, "rows": []}},
            ).write(tmp_path / "parts" / "error" / command.FILE)
            assert out == str(tmp_path / "parts" / "error")
        return Done()

    monkeypatch.setattr(command.subprocess, "run", child)
    assert command.main(["kernels", "gemm", "error", *QUICK, "--isolate", "--out", str(tmp_path)]) == 1
    made = reports.read(tmp_path / command.FILE)
    assert made.parts["kernels"]["status"] == "failed: the process ended with -11: Segmentation fault"
    assert made.parts["gemm"]["status"].startswith("failed: no end after 600 s")
    assert made.parts["error"]["status"] == "ok"
    assert made.about["clocks"] == [{"a": "b"}]


def ended(arguments):
    """The exit status of the command."""
    try:
        return command.main(arguments)
    except SystemExit as stopped:
        return stopped.code


def test_usage(capsys, tmp_path, monkeypatch):
    out = ["--out", str(tmp_path)]
    (tmp_path / "file").write_text("")
    for wrong, status, said in (
        (["tea"], 2, "argument PART: no such part: tea; --list names them"),
        (["kernel", *out], 2, "; did you mean kernels;"),
        (["gemm", "--minutes", "0", *out], 2, "argument --minutes: got 0, expected a finite number and > 0"),
        (["gemm", "--rounds", "none"], 2, "argument --rounds: none is not a positive number"),
        (
            ["layer", *QUICK, "--only", "layer 62", *out],
            2,
            "expected one of layer 64, layer 48, layer 32, layer 16; did you mean layer 64",
        ),
        (["gemm", "--only", "layer 64", *out], 2, "argument --only: not for gemm, which"),
        (["--table", "--only", "layer 64"], 2, "argument --only: not allowed"),
        (["--update"], 2, "argument --update: not"),
        (["gemm"], 2, "required: --out"),
        (["gemm", "--device", "gpu", *out], 2, "--device: got 'gpu', expected a name like"),
        (["gemm", "--out", str(tmp_path / "file" / "x")], 2, "--out: got"),
        (["gemm", "--device", "cpu:7", *out], 2, "got 'cpu:7', expected"),
        (["--table", "tea"], 2, "argument PART: not allowed with argument --table"),
        (["--table", *out], 2, "argument --out: not allowed"),
    ):
        assert ended(wrong) == status
        printed = capsys.readouterr().err
        assert printed.startswith("python -m benchmarks: ")
        assert said in printed
        assert printed.count("\n") == 1
    assert command.main(["gemm", *QUICK, "--minutes", "1e-9", "--out", str(tmp_path)]) == 1
    assert (
        capsys.readouterr().err == "python -m benchmarks: FAILED: nothing was measured: there was no time\n"
    )
    # as without torch
    for name in ("benchmarks.parts", "benchmarks.torch_cases", "benchmarks.error", "benchmarks.train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(benchmarks, name.rpartition(".")[2], raising=False)
    monkeypatch.setitem(sys.modules, "fp8kit_torch", None)
    assert command.main(["--list"]) == 1
    assert (
        capsys.readouterr().err
        == "python -m benchmarks: import of fp8kit_torch halted; None in sys.modules\n"
    )
    monkeypatch.undo()
    assert command.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"{part.name:12}{part.about} ({part.takes}" in said for part in parts.PARTS)
    assert "soak " in said.splitlines()[-2]
    assert said.splitlines()[-2].endswith("(1 min, only where it is named)")
    with pytest.raises(SystemExit):
        command.main(["layer"])


def test_a_linears_errors_are_the_roundings(tmp_path):
    rows = {r["case"]: r for r in error.error_part(Setting(CPU, SMALL))}
    assert rows["bfloat16"]["error_y"] < 2**-8
    # two operands of E4M3: 2.6 % each (see the part's text), a gradient of E5M2 twice that
    assert rows["DelayedScaling"]["error_y"] == pytest.approx(0.026 * 2**0.5, rel=0.15)
    assert rows["DelayedScaling"]["error_dx"] == pytest.approx(0.026 * 5**0.5, rel=0.15)


def test_training_writes_its_curves(tmp_path, capsys):
    rows = train.train_part(Setting(CPU, SMALL, out=tmp_path), seeds=1, steps=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.csv", "loss.png", "result.json"]
    assert rows[-1]["status"] == "ok"
    assert json.loads((tmp_path / "result.json").read_text())["preset"]["name"] == "tiny"


# --- the documents' tables and their picture ----------------------------------------------------------------


def test_the_tables_show_the_run():
    run = recorded()
    made = table.long(run).splitlines()
    assert made[0] == "a GPU, fp8kit 0, torch 2."
    assert "| torch eager bf16 | 18.00 | 2.70 | 1.50 | 1.30 |" in made
    assert "| skeleton | 9.90 |  |  |  |" in made
    assert "| native FP8 delayed layer / torch eager bf16 | 0.540 | 0.6 | 0.55 | goal |" in made
    assert (
        "| a step of a length that is met for the first time, hidden 1024 | 8.40 ms | 25 | 8 | must |" in made
    )
    assert "| first step, warm kernel cache | 2.00 s | 3 | 1.5 | must |" in made
    readme = table.short(run).splitlines()
    assert "| fp8kit.nn FP8, CUDA graph |  |  | 0.90 |  |" in readme


def test_a_row_for_each_contender_that_was_measured():
    """At most eight in README. What is not installed has no row, and a wrong result no figure."""
    run = recorded()
    assert table.ENGINE not in table.long(run)
    run.parts["layer"]["rows"] += [
        row(table.ENGINE, status="not installed"),
        row(table.ENGINE, "layer 2048", gpu_ms=2.0),
        row(f"{targets.TORCH}, graph", gpu_ms=1.0, status="WRONG: error_y"),
    ]
    run.parts["jax"] = {"status": "ok", "seconds": 1.0, "rows": [row(table.JAX, "in jax.jit", gpu_ms=9.0)]}
    made = table.short(run).splitlines()
    assert "| Transformer Engine FP8 |  | 2.00 |  |  |" in made
    assert "| fp8kit_torch FP8, CUDA graph | wrong |  |  |  |" in made
    assert "| fp8kit_jax FP8, jax.jit | 9.00 |  |  |  |" in made
    assert len(made) - 2 <= 8
    shown = table.bars(run)
    assert shown["layer 2048"]["Transformer Engine FP8"] == 2.0
    assert "fp8kit_torch FP8, CUDA graph" not in shown["layer 4096"]


def test_markers():
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.with_table(text, "new\n") == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    for wrong in ("none", table.BEGIN, f"{table.END}{table.BEGIN}", f"{text}{text}"):
        with pytest.raises(Fp8kitError, match="expected one"):
            table.with_table(wrong, "")


@pytest.mark.parametrize("document", table.DOCUMENTS, ids=lambda path: path.stem)
def test_documents_show_the_committed_run(document):
    """Made by ``python -m benchmarks --table --update``."""
    assert table.block(document.read_text()) == f"\n{table.DOCUMENTS[document](table.committed())}"


def test_each_part_is_of_the_newest_run():
    runs = [json.loads((table.FOLDER / name).read_text())["parts"] for name in table.RESULTS]
    shown = table.committed()
    assert list(shown.parts)
    for name, part in shown.parts.items():
        assert part == next(run[name] for run in runs if name in run)


def test_the_picture_is_of_the_committed_run(tmp_path):
    """By the same command. The file carries a digest of its figures, since its bytes are matplotlib's."""
    run = table.committed()
    table.draw(tmp_path / "layers.png", run)
    for path in (table.PICTURE, tmp_path / "layers.png"):
        assert table.digest(run).encode() in path.read_bytes(), path


def test_sizes_of_the_targets():
    """The layers that the targets are of, by name."""
    assert {name: layer[:3] for name, layer in FULL.layers.items()} == {
        "layer 4096": (4096, 16384, 32),
        "layer 2048": (2048, 8192, 16),
        "layer 1024": (1024, 4096, 16),
        "layer 768": (768, 3072, 12),
    }
    assert len(FULL.layers) == len(SMALL.layers)
    assert FULL.linear == (64, 256, 256)
