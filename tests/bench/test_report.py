"""Reports: failing parts, deadlines, JSON, tables."""

from __future__ import annotations

import json
import time

import pytest

from fp8kit.arrays import CPU
from fp8kit.bench import report
from fp8kit.bench.report import Part, Report, Setting, Unavailable, bad, read, run, table, text, versions
from fp8kit.bench.sizes import FULL, SMALL, layer_of

GOOD = {"workload": "w", "case": "good", "status": "ok", "gpu_ms": 1.25, "error_y": 0.01}
WRONG = {"workload": "w", "case": "bad", "status": "WRONG: error 1.000", "gpu_ms": 2.0}


def failing(setting):
    raise RuntimeError("it broke\nhere")


PARTS = [
    Part("first", "", lambda setting: [GOOD]),
    Part("broken", "", failing),
    Part("last", "", lambda setting: [WRONG]),
]


def test_a_part_that_fails_costs_the_others_nothing(tmp_path):
    path, said = tmp_path / "a.json", []
    made = run(
        PARTS, Setting(CPU, SMALL), lambda r: r.write(path), said.append, lambda: {"clocks.sm": "1 MHz"}
    )
    assert {name: part["status"] for name, part in made.parts.items()} == {
        "first": "ok",
        "broken": "failed: RuntimeError: it broke here",
        "last": "ok",
    }
    assert made.failures() == [
        "broken: failed: RuntimeError: it broke here",
        "last: w: bad: WRONG: error 1.000",
    ]
    assert made.failures(lambda row: row["case"] == "good") == ["broken: failed: RuntimeError: it broke here"]
    assert len(said) == 4
    assert said[0] == report.head(made.about)
    again = read(path)
    assert (again.about, again.parts, again.targets) == (made.about, made.parts, made.targets)
    assert again.about["clocks"] == [{"clocks.sm": "1 MHz"}] * 2
    assert again.about["settings"]["sizes"] == "small"
    assert json.loads(path.read_text())["about"]["versions"] == versions()


def test_it_is_written_after_each_part():
    seen = []
    run(PARTS, Setting(CPU, SMALL), lambda r: seen.append(list(r.parts)), lambda line: None)
    assert seen == [["first"], ["first", "broken"], ["first", "broken", "last"], ["first", "broken", "last"]]


def test_nothing_begins_after_the_deadline():
    made = run(PARTS, Setting(CPU, SMALL, deadline=time.monotonic() - 1), say=lambda line: None)
    assert {part["status"] for part in made.parts.values()} == {report.NO_TIME}
    assert not made.failures()
    assert not made.measured()
    assert run(PARTS[:1], Setting(CPU, SMALL), say=lambda line: None).measured()


def test_settings_know_what_is_left():
    assert Setting().left() == float("inf")
    assert 0 < Setting().within(50).left() <= 50
    assert Setting(deadline=time.monotonic() + 5).within(50).left() <= 5
    assert report.setting_for(CPU).sizes is SMALL
    assert report.setting_for(CPU, sizes=FULL).sizes is FULL


def test_why_a_case_did_not_run():
    assert report.reason(Unavailable("not installed")) == "not installed"
    assert report.reason(ValueError("a\n b")) == "failed: ValueError: a b"
    assert [bad(s) for s in ("ok", "not installed", "left out: x", "failed: x", "WRONG: x")] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_tables_line_up():
    lines = table("w", [GOOD, WRONG])
    assert lines[0].split() == ["w", "gpu_ms", "error_y"]
    assert lines[1].endswith("1.250   0.0100")
    assert lines[2].endswith("WRONG: error 1.000")
    assert lines[1].index("1.250") == lines[2].index("2.000")
    whole = text("name", {"status": "ok", "seconds": 1.0, "rows": [GOOD, {**GOOD, "workload": "v"}]})
    assert whole.startswith("== name (1.0 s)\n\nw ")
    assert "\nv " in whole


# figures -> how the table's head and its row end
PRINTED = {
    (("peak_gib", 0.0123), ("tbps", 0.0005)): ("   peak_mib      gbps", "     12.595     0.500"),
    (("peak_gib", 1.5), ("tbps", 2.25)): ("  peak_gib    tbps", "     1.500   2.250"),
    (("mib", 0.0),): ("        kib", "      0.000"),
    (("check", "bits"), ("detail", "bfloat16[2]")): ("  check  detail", "  bits   bfloat16[2]"),
}


@pytest.mark.parametrize("figures", PRINTED)
def test_small_figures_are_in_small_units(figures):
    lines = table(
        "w",
        [
            {"workload": "w", "case": "c", "status": "ok", **dict(figures)},
            {"workload": "w", "case": "d", "status": "ok"},
        ],
    )
    assert (lines[0][1:], lines[1][1:]) == PRINTED[figures]
    assert lines[2] == "d"


def test_the_head_says_device_sizes_and_versions():
    about = report.about_of(Setting(CPU, SMALL, 2, 3, 1))
    lines = report.head(about).splitlines()
    assert lines[0].startswith(f"fp8kit {versions()['fp8kit']} on cpu: {about['machine']}; Python 3.")
    assert all(f"{name} {versions()[name]}" in lines[0] for name in ("numpy", "ml_dtypes", "numba"))
    assert lines[1].startswith("small sizes: whether it runs, not how fast it can be; 2 rounds of 3 calls")
    assert lines[2] == "layer 64: hidden 64, ffn 128, heads 2, 32 x 2 tokens"
    assert lines[-2:] == [
        "layer 16: hidden 16, ffn 32, heads 1, 16 x 2 tokens",
        "modules, kernels, gemm and memory are of layer 64",
    ]
    assert (
        report.head(report.about_of(Setting(CPU, FULL)))
        .splitlines()[1]
        .startswith("full sizes; 6 rounds of 5 calls")
    )
    assert all(
        int(name.split()[1]) == size.hidden for sizes in (FULL, SMALL) for name, size in sizes.layers.items()
    )


def test_no_time_of_a_cpu_is_called_a_gpus():
    made = run(PARTS[:1], Setting(CPU, SMALL), say=lambda line: None)
    assert made.rows("first") == [{**{k: v for k, v in GOOD.items() if k != "gpu_ms"}, "cpu_ms": 1.25}]
    assert GOOD["gpu_ms"] == 1.25


def test_parts_that_did_not_run_have_no_rows():
    assert Report().rows("nothing") == []


@pytest.mark.parametrize(
    ("hidden", "tokens", "wanted"),
    [(256, 256, (256, 1024, 4, 256, 1)), (8192, 16384, (8192, 32768, 64, 2048, 8))],
)
def test_layers_of_the_grid(hidden, tokens, wanted):
    assert layer_of(hidden, tokens) == wanted
    assert layer_of(hidden, tokens).tokens == tokens
