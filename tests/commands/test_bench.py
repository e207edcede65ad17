"""``fp8kit bench``: what it measures, writes and refuses."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import cli
from fp8kit.bench import parts, report
from fp8kit.bench.report import Part, Setting
from fp8kit.bench.sizes import SMALL


def test_interruption_is_one_line(monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "run", stopped)
    assert cli.main(["bench", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "\nfp8kit bench: interrupted\n"


def test_bench_measures_and_checks(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert (
        cli.main(
            [
                "bench",
                "casts",
                "gemm",
                "--device",
                "cpu",
                "--json",
                str(file),
                "--out",
                str(tmp_path / "plots"),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "WRONG" not in said
    assert "quantize, ml_dtypes" in said
    assert said.startswith("fp8kit 0.")
    assert "\nsmall sizes: " in said
    assert "gpu_ms" not in said
    assert said.splitlines()[-2:] == [str(tmp_path / "plots/roofline.png"), str(file)]
    written = report.read(file)
    assert written.about["versions"] == report.versions()
    assert written.about["settings"]["layers"]["layer 64"] == "hidden 64, ffn 128, heads 2, 32 x 2 tokens"
    rows = written.rows("casts")
    assert len(rows) == 8
    assert all(np.isfinite(row["value"]) and row["value"] > 0 for row in rows)
    assert len(written.rows("gemm")) == 12
    assert (tmp_path / "plots/roofline.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_says_what_memory_is_kept(tmp_path, capsys):
    assert (
        cli.main(
            [
                "bench",
                "--memory",
                "--layer",
                "32,64,2,8,1",
                "--device",
                "cpu",
                "--json",
                str(tmp_path / "a.json"),
            ]
        )
        == 0
    )
    assert "norm_mlp 1: fc2_w_qt" in capsys.readouterr().out
    assert {row["workload"] for row in report.read(tmp_path / "a.json").rows("memory")} == {
        f"kept for backward, {name}, hidden 32, 8 tokens" for name in ("bf16", "FP8 delayed")
    }


def test_bench_reports_what_is_wrong(monkeypatch, capsys):
    wrong = Part("wrong", "", lambda setting: [{"workload": "w", "case": "c", "status": "WRONG: by design"}])
    monkeypatch.setattr(parts, "NATIVE", (wrong,))
    assert cli.main(["bench", "--device", "cpu", "--minutes", "5"]) == 1
    assert capsys.readouterr().err == "fp8kit bench: FAILED: wrong: w: c: WRONG: by design\n"


def test_a_bench_that_measures_nothing_fails(capsys):
    for part in ("start", "casts"):
        assert cli.main(["bench", part, "--device", "cpu", "--minutes", "1e-9"]) == 1
        assert capsys.readouterr().err == "fp8kit bench: FAILED: nothing was measured: there was no time\n"


@pytest.mark.gpu
def test_bench_on_a_gpu(tmp_path, monkeypatch):
    """Every part, in small."""
    monkeypatch.setattr(
        report, "setting_for", lambda device, **given: Setting(device, SMALL, 2, 2, 1, **given)
    )
    file = tmp_path / "bench.json"
    chosen = [part.name for part in parts.NATIVE if part.name != "start"]
    assert cli.main(["bench", *chosen, "--device", "cuda", "--json", str(file), "--out", str(tmp_path)]) == 0
    written = report.read(file)
    assert not written.failures()
    assert any(row["case"] == "skeleton" for row in written.rows("layer"))
    assert len(written.about["clocks"]) == 2
