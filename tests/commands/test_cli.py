"""What every command does alike: one line for a refusal, status 2, nothing written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fp8kit import cli


def test_a_reader_that_leaves_is_no_error():
    words = [sys.executable, "-m", "fp8kit", "info", "--attention"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait(60) == 141


def test_module_runs_like_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "fp8kit", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("fp8kit 0.")


def test_errors_are_one_line(capsys):
    assert cli.main(["train", "--preset", "tiny", "--device", "moon"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fp8kit train: --device: got 'moon'")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["demo", "--preset", "tiny", "--out"], ["train", "--preset", "tiny", "--out"], ["bench", "--json"]],
)
def test_results_have_a_place_before_the_work(arguments, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("kept")
    assert cli.main([*arguments, str(file / "results")]) == 2
    said = capsys.readouterr().err
    assert "that can be made" in said or "that can be written" in said
    assert said.count("\n") == 1
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["train", "--preset", "tiny", "--steps", "0"],
        ["demo", "--steps", "many"],
        ["demo", "--preset", "huge"],
        ["warmup", "--layer", "64,256,2", "--preset", "tiny"],
        ["warmup", "--layer", "10,40,3"],
    ],
)
def test_wrong_usage_is_refused(arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "tea"],
        ["bench", "--memory", "--layer", "3,4"],
        ["bench", "--memory", "--layer", "64,128,3,16,1"],
        ["warmup", "--activation", "tea"],
    ],
)
def test_what_commands_cannot_take_is_one_line(arguments, capsys):
    assert cli.main([*arguments, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "expected" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "--memory", "--json", "."], "--json: got"),
        (["bench", "--minutes", "-1"], "--minutes: got -1, expected"),
        (
            ["demo", "--seed", "-1"],
            "fp8kit demo: error: argument --seed: got -1, expected an int in [0, 4294967296)",
        ),
        (
            ["bench", "casts", "--minutes", "0"],
            "fp8kit bench: error: argument --minutes: got 0, expected a finite number and > 0",
        ),
        (
            ["bench", "casts", "--minutes", "soon"],
            "argument --minutes: got soon, expected a finite number and > 0",
        ),
        (
            ["bench", "cast", "--device", "cpu"],
            "fp8kit bench: part: got cast, expected some of casts, training, layer",
        ),
        (["bench", "cast", "--device", "cpu", "--out", "x", "--json", "y/z"], "; did you mean casts?"),
        (["bench", "--layer", "1,2,1,4,1"], "--layer: got"),
        (["bench", "layer", "--memory"], "bench: part: got layer, expected none beside --memory"),
        (["bench", "--memory", "--minutes", "1"], "bench: --minutes: got 1.0, expected none beside --memory"),
        (["bench", "--memory", "--out", "x"], "bench: --out: got x, expected none beside --memory"),
        (["bench", "--memory", "--layer", "a"], "--layer: got 'a'"),
        (["demo", "--device", "cpu:7"], "--device: got 'cpu:7', expected a name like"),
        (["demo", "--device", "cuda:99"], "is not usable"),
        (["train", "--preset", "x"], "argument --preset: invalid choice: 'x'"),
        (["warmup", "--threads", "x"], "argument --threads"),
        (["nothing"], "argument command"),
        (["plugins", "explain", "foo"], "got 'foo'"),
        (["kernels", "foo"], "argument ACTION"),
        ([], "required: command, one of info, demo, train, "),
        (["kernels"], "required: ACTION, one of list, show, "),
        (["alias"], "required: action, one of install, remove, status; fp8kit alias --help"),
        (["doctor", "--strickt"], "--strickt; did you mean --strict; fp8kit doctor --help says more"),
        (["info", "--foo"], "unrecognized arguments: --foo; fp8kit info --help says more"),
        (["kernels", "check", "add", "--onyl", "x"], "; did you mean --only; fp8kit kernels check --help"),
        (["train"], "required: --preset"),
        (["demo", "--preset", "demo-cup"], "; did you mean demo-cpu; fp8kit demo --help says more"),
        (["train", "--preset", "tiny", "--device", "gpu"], "fp8kit train: --device: got 'gpu'"),
        (
            ["warmup", "--layer", "1,2"],
            (
                "argument --layer: got '1,2', expected 3 or 5 positive numbers: "
                "HIDDEN,FFN,HEADS[,SEQUENCE,BATCH]"
            ),
        ),
        (["warmup", "--layer", "0,1,2"], "argument --layer: got '0,1,2', expected 3 or 5 positive numbers"),
        (
            ["warmup", "--layer", "10,40,3", "--arch", "sm_90a"],
            "--layer: got '10,40,3', expected HIDDEN a multiple of HEADS: 10 is none of 3",
        ),
        (
            ["warmup", "--layer", "64,256,2", "--preset", "tiny"],
            "argument --preset: not allowed with argument --layer",
        ),
        (["warmup", "--activation", "gell"], "fp8kit warmup: activation: got 'gell', expected one of gelu,"),
        (["warmup", "--activation", "gell"], "; did you mean gelu?"),
        (["warmup", "--arch", "sm_90"], "fp8kit warmup: arch: got 'sm_90', expected one of sm_80, "),
        (["warmup", "--arch", "foo"], "fp8kit warmup: arch: got 'foo', expected one of sm_80, "),
        (
            ["kernels", "compile", "rope", "--arch", "foo"],
            "fp8kit kernels: --arch: got 'foo', expected one of sm_80, ",
        ),
        (
            ["kernels", "show", "rope", "--ptx", "--arch", "sm_1"],
            "fp8kit kernels: --arch: got 'sm_1', expected one of sm_80, ",
        ),
        (
            ["kernels", "show", "rope", "--variant", "T=f16"],
            "fp8kit kernels: --variant: got 'T=f16', expected --ptx or --sass beside it",
        ),
        (["kernels", "bench", "add", "--device", "gpu"], "fp8kit kernels: --device: got 'gpu'"),
        (
            ["kernels", "bench", "add", "--device", "cpu", "--shape", "1", "7"],
            "fp8kit kernels: measure: shape: got (1, 7), expected (rows",
        ),
        (
            ["kernels", "check", "add", "--only", "tea"],
            "fp8kit kernels: check: only: got 'tea', expected a word",
        ),
        (["kernels", "show", "tea"], "fp8kit kernels: name: got 'tea', expected a kernel"),
        (
            ["kernels", "show", "rope", "--ptx", "--variant", "T=tea"],
            "variant: got 'T=tea', expected T to be one of f32, bf16, f16, which the source lists",
        ),
        (["kernels", "watch", "tea.cu"], "file: got 'tea.cu', expected a .cu file that is there"),
        (["kernels", "diff", "add", "rope"], "b: got 'rope', expected a version of"),
        (["info", "--attention", "mask=tea"], "fp8kit info --attention: mask: got 'tea', expected one of"),
        (["warmup", "--device", "gpu"], "fp8kit warmup: --device: got 'gpu', expected a name like"),
        (["warmup", "--threads", "0"], "fp8kit warmup: threads: got 0, expected an int in"),
        (["plugins", "explain", "gem"], "fp8kit plugins: kernel: got 'gem', expected a kernel of"),
        (["plugins", "explain", "gem"], "; did you mean gemm?"),
        (
            ["plugins", "check", "referenc"],
            "fp8kit plugins: name: got 'referenc', expected an implementation's id",
        ),
        (["plugins", "check", "referenc"], "; did you mean reference?"),
    ],
)
def test_bad_arguments_are_one_line_each(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    printed = capsys.readouterr()
    assert status == (1 if "is not usable" in said else 2)
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not list(tmp_path.iterdir())
