"""``fp8kit kernels``, and the page about it: every command there runs, and ends as the page says."""

from __future__ import annotations

import io
import re
import shlex
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fp8kit as fk
from fp8kit import arrays, cli, formats, lab
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import compile as compiler
from fp8kit.backends.cuda import hopper_gemm
from fp8kit.backends.registry import CannotTake
from fp8kit.commands import kernels
from fp8kit.errors import ArgumentError, BackendError, Fp8kitError
from fp8kit.lab import native, peaks, sources, timing
from fp8kit.lab.timing import TIMED
from fp8kit.raw_kernels import manifest
from tests.support.combinations import combinations
from tests.support.source import ROOT

PAGE = ROOT / "docs/kernel_lab.md"
COMMANDS = [line for line in PAGE.read_text().splitlines() if line.startswith("fp8kit kernels ")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dispatch.kernels(arrays.CPU)  # the CPU engine's own compiled code stays where it always is
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files go to a folder of the test's own, compiled kernels to one of this module's."""
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(cache))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is one; where there is, also as if there were none."""
    if not request.param:
        monkeypatch.setattr(arrays.provider(arrays.device("cuda")), "count", lambda: 0, raising=False)
    return bool(request.param)


@pytest.mark.programs
def test_every_command_of_the_page(gpu: bool, own_folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) >= 13
    for line in COMMANDS:
        words, _, remark = line.partition("#")
        arguments = shlex.split(words)
        assert arguments.pop(0) == "fp8kit"
        into = arguments.pop() if ">" in arguments else None
        if into is not None:
            assert arguments.pop() == ">"
        out = io.StringIO()
        with redirect_stdout(out):
            status = cli.main(arguments)
        if into is not None:
            (own_folders / into).write_text(out.getvalue())
        told = re.search(r"exit status (\d) without a GPU", remark)
        expected = int(told[1]) if told and not gpu else 0
        said = capsys.readouterr().err
        if "nvdisasm" in remark and status == 1:
            assert "needs nvdisasm or cuobjdump, neither is installed" in said
            continue
        assert status == expected, (line, said)
        assert out.getvalue().strip() or status, line
        if status:
            assert "it needs a GPU" in said


def run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with redirect_stdout(out):
        status = cli.main(["kernels", *arguments])
    return status, out.getvalue()


@pytest.mark.programs
def test_list_has_every_kernel_with_its_resources(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run("list", "--arch", "sm_90a")
    assert status == 0
    head, *rows = out.splitlines()
    assert head.split() == [
        "raw",
        "kernel",
        "kernels",
        "variants",
        "shown",
        "for",
        "sm_90a",
        "registers",
        "shared",
        "spills",
    ]
    assert len(rows) == sum(len(entry.functions) for entry in manifest.sources())
    line = next(row for row in rows if row.startswith("quantize.cu:quantize_transpose "))
    serves, variants = "quantize_transpose fp8_gemm_cast", "FORMAT=e4m3,e5m2; T=f32,bf16,f16"
    assert re.search(rf" {serves} +{variants} +FORMAT=e4m3,T=bf16 +\d+ +\d+ +0$", line)
    allowed = {entry.name for entry in manifest.sources() if entry.spills}
    assert all(row.endswith(" 0") or row.partition(":")[0] in allowed for row in rows)
    assert re.fullmatch(
        r"fp8kit kernels: \d+ sources for sm_90a, compiled where they are not in the cache yet\n",
        capsys.readouterr().err,
    )


def test_without_nvrtc_the_columns_are_blank_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise BackendError("compile: NVRTC cannot be loaded")

    monkeypatch.setattr(compiler, "nvrtc_version", refuse)
    status, out = run("list", "--arch", "sm_90a")
    assert status == 0
    assert re.search(r"^elementwise\.cu:add +add +T=f32,bf16,f16 +T=bf16$", out, re.MULTILINE)
    assert "no resources: compile: NVRTC cannot be loaded" in capsys.readouterr().err


def test_show_prints_source_ptx_and_machine_code(
    monkeypatch: pytest.MonkeyPatch, own_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("show", "rope.cu")[1].partition("\n")[2].rstrip() == manifest.text("rope.cu").rstrip()
    _, out = run("show", "quantize_fp8", "--ptx", "--arch", "sm_90a", "--variant", "T=f16")
    assert "// quantize.cu, FORMAT=e4m3,T=f16, sm_90a" in out
    assert ".target sm_90a" in out
    assert ".entry quantize_fp8" in out
    monkeypatch.setattr(sources.shutil, "which", lambda program: None)
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    assert run("show", "rope.cu", "--sass")[0] == 1
    assert (
        "needs nvdisasm or cuobjdump, neither is installed: pip install nvidia-cuda-nvdisasm"
        in capsys.readouterr().err
    )
    tool = own_folders / "nvidia/cu13/bin/cuobjdump"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\n[ "$1" = -sass ] && [ -s "$2" ] && echo "Function : rope"\n')
    tool.chmod(0o755)
    place = SimpleNamespace(submodule_search_locations=[str(own_folders / "nvidia")])
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: place)
    assert "Function : rope" in run("show", "rope.cu", "--sass")[1]


def test_some_variants_are_compiled(own_folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own_folders / "mine.cu").write_text(manifest.text("drop_path.cu"))
    status, out = run("compile", "mine.cu", "--variant", "T=bf16", "--arch", "sm_90a")
    assert (status, len(out.splitlines())) == (0, 2)
    assert "T=bf16" in out
    assert "1 variants for sm_90a, compiled where they are not in the cache yet" in capsys.readouterr().err
    assert run("compile", "mine.cu", "--variant", "T=bf17", "--arch", "sm_90a")[0] == 2
    assert "got 'T=bf17', expected T to be one of f32, bf16, f16, which the source" in capsys.readouterr().err


@pytest.mark.combinations
def test_on_a_terminal_a_bar_shows_how_far_compiling_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    run("compile", "drop_path", "--arch", "sm_90a")
    assert re.search(r"variants .*━.*100%", shown.getvalue())


def test_where_one_variant_does_not_compile_the_others_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = []

    def compiled(part: Any, defines: manifest.Defines, arch: str) -> None:
        begun.append(defines)
        if len(begun) == 1:
            raise BackendError("compile: the first one")
        time.sleep(0.05)

    monkeypatch.setattr(sources.Part, "compiled", compiled)
    assert run("compile", "mma_gemm.cu")[0] == 1
    assert len(begun) < len(manifest.source("mma_gemm.cu").variants)


@pytest.mark.parametrize("action", ["check", "bench"])
def test_another_variant_needs_a_gpu_and_one_source(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(action, "mma_gemm", "--variant", "BM=32", "--device", "cpu") == (3, "")
    assert "it needs a GPU" in capsys.readouterr().err
    assert run(action, "quantize_transpose", "--variant", "T=bf16", "--device", "cpu")[0] == 2
    assert "--variant: got 'T=bf16', expected a name of one source beside it, qu" in capsys.readouterr().err


def test_a_source_that_another_kernel_stands_before_is_checked_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a GPU's name it is put in that one's place, for the checks alone."""
    used = []

    def override(operation: str, text: str, defines: str = "") -> Any:
        used.append((operation, text == manifest.text("mma_gemm.cu"), defines))
        return nullcontext()

    monkeypatch.setattr(kernels, "override", override)
    gpu, found = arrays.Device("cuda", 0), sources.find("mma_gemm")
    monkeypatch.setattr(kernels.checks, "check", lambda *arguments: lab.checks.Report("x", "y", gpu))
    assert not kernels._is_wrong(found, gpu)
    assert used == [("block_gemm", True, ""), ("fp8_gemm", True, "")]
    kernels._is_wrong(found, arrays.CPU)
    kernels._is_wrong(sources.find("fp8_gemm"), gpu)
    assert len(used) == 2
    kernels._is_wrong(found, gpu, "130x70", variant="BM=32")
    assert used[2:] == [("fp8_gemm", True, "BM=32")]


def test_products_are_timed_at_several_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of FP8 beside bfloat16's; columns are any, terms a multiple of 16."""
    monkeypatch.setattr(timing, "ROUNDS", 1)
    sizes = ["--shape", "33", "100", "48", "--shape", "1", "16", "16"]
    status, out = run("bench", "gemm", "--device", "cpu", "--split", *sizes)
    assert status == 0
    assert re.findall(r"^(\S.*): reference.* on cpu, (.*): \d", out, re.M) == [
        (name, size)
        for name in ("gemm", "fp8_gemm (fast=False)", "block_gemm")
        for size in ("33 x 100 x 48", "1 x 16 x 16")
    ]


SAID = {
    (
        "show",
        "quantise_transpose",
    ): r"got 'quantise_transpose', expected .*; did you mean quantize_transpose ",
    ("show", "gemm_workspace"): "this one launches none",
    (
        "show",
        "rope",
        "--ptx",
        "--variant",
        "T=f8",
    ): "variant: got 'T=f8', expected T to be one of f32, bf16, f16, which the source lists",
    ("show", "rope", "--ptx", "--variant", "f8"): "variant: got 'f8'",
    ("check", "add", "--device", "moon"): "got 'moon'",
    (
        "check",
        "add",
        "--only",
        "no such case",
        "--device",
        "cpu",
    ): "only: got 'no such case', expected a word in the name of a case of add: float32",
    ("check", "nothing.cu"): "got 'nothing.cu', expected a .cu file, or a source: no such file is there",
    (
        "bench",
        "add",
        "--shape",
        "4",
        "100",
        "--device",
        "cpu",
    ): r"shape: got \(4, 100\), expected .* multiple of 128",
    (
        "diff",
        "drop_path",
        "rope",
    ): "^fp8kit kernels: b: got 'rope', expected a version of drop_path.cu, as drop_path is",
    ("watch", "nothing.cu"): "^fp8kit kernels: file: got 'nothing.cu', expected a .cu file that is there",
    (
        "compile",
        "rope",
        "--arch",
        "sm_1",
    ): "--arch: got 'sm_1', expected one of sm_80, .*, what NVRTC here compiles for",
}


@pytest.mark.parametrize("arguments", SAID)
def test_refusals_are_one_word_from_the_cause(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments)[0] == 2
    assert re.search(SAID[arguments], capsys.readouterr().err)


def test_names_are_found() -> None:
    assert sources.find("quantize").operations == ("quantize",)  # an operation before a source of that stem
    assert [part.entry.name for part in sources.find("quantize").parts] == [
        "quantize.cu",
        "quantize_any.cu",
        "amax.cu",
    ]
    of_file = sources.find("quantize.cu").operations
    assert of_file[:3] == ("quantize", "dequantize", "quantize_transpose")
    assert set(of_file[3:]) == {"quantize_stack", "fp8_attention_fwd", "fp8_attention_bwd", "fp8_gemm_cast"}
    one = sources.find("quantize.cu:quantize_fp8")  # as the list has it
    assert [(part.entry.name, part.functions) for part in one.parts] == [("quantize.cu", ("quantize_fp8",))]
    assert sources.find("column_sums").operations == ("dropout_bwd", "sum_rows")
    assert sources.find("embedding").operations == ("embedding_fwd", "embedding_bwd")


def is_product(operation: str) -> bool:
    return "gemm" in operation or "attention" in operation


@combinations(
    {"operation": TIMED},
    usual=["add", "attention_fwd", "block_quantize", "fp8_gemm", "grouped_gemm", "norm_bwd", "quantize"],
)
def test_every_operation_can_be_timed(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 1)
    found = timing.measure(operation, arrays.CPU, (33, 128), formats.bfloat16)
    assert found.seconds > 0
    assert found.share == found.ceiling / found.seconds
    products = is_product(operation)
    assert ("GFLOP/s" in str(found), "of the speed of a copy" in str(found)) == (products, not products)


def test_what_a_call_computes_and_moves_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every operation, without a run, for which Numba would compile each."""
    monkeypatch.setattr(timing, "interleaved", lambda steps, *how: steps)
    monkeypatch.setattr(timing, "medians", lambda steps: dict.fromkeys(steps, 2.0))
    for operation in TIMED:
        found = timing.measure(operation, arrays.CPU, (33, 128), formats.bfloat16)
        assert found.nbytes > 0, operation
        assert (found.flops > 0) == is_product(operation), operation
        assert (found.seconds, found.share) == (2.0, 1.0), operation
    assert timing.measure("fp8_gemm", arrays.CPU, (33, 128), formats.bfloat16).flops == 2 * 33 * 128 * 128
    assert (
        timing.measure("attention_fwd", arrays.CPU, (32, 128), formats.bfloat16).flops
        == 2 * 2 * 32 * 32 * 128 / 2
    )
    # x read, codes written twice, scale read; scale_inv and amax written, the amax read before
    assert (
        timing.measure("quantize_transpose", arrays.CPU, (32, 128), formats.bfloat16).nbytes
        == 32 * 128 * 4 + 4 * 4
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (((0, 128),), r"shape: got \(0, 128\), expected \(rows, columns\)"),
        (((128,),), r"shape: got \(128,\)"),
        (((4.0, 128),), r"shape: got \(4\.0, 128\)"),
        ((None, "int32"), "dtype: got .*int32, expected one of float32, bfloat16, float16"),
        ((None, "tea"), "measure: dtype: got 'tea'"),
    ],
)
def test_what_cannot_be_timed_is_refused(wrong: tuple[Any, ...], said: str) -> None:
    with pytest.raises(Fp8kitError, match=said):
        timing.measure("add", "cpu", *wrong)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"fats": 1}, "measure: fats: got 1, expected one of .*fast"), ({"k": 16}, "measure: k: got 16")],
)
def test_options_that_a_call_does_not_have_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        lab.measure("fp8_gemm", "cpu", (16, 16), **options)


def test_what_runs_a_source_is_timed_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 1)
    names = {
        "hopper_gemm": "fp8_gemm",
        "mma_gemm.cu": "fp8_gemm",
        "quantize.cu": "quantize",
        "rope": "rope_fwd",
    }
    for name, operation in names.items():
        assert lab.measure(name, "cpu", (32, 128)).operation == operation
    with pytest.raises(
        ArgumentError, match=r"got 'hoper_gemm', expected .* or a source of one; did you mean"
    ):
        lab.measure("hoper_gemm", "cpu")


def test_of_a_source_of_its_own_no_other_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    device, own, other = (SimpleNamespace(kind="cuda"), SimpleNamespace(fn=hopper_gemm.fp8_gemm), object())
    found: Any = ([SimpleNamespace(fn=None), own], [])
    monkeypatch.setattr(dispatch, "candidates", lambda operation, device: found)
    call: Any = ("hopper_gemm", "fp8_gemm", "hopper_gemm.cu", device, True)
    assert timing._implementations(*call) == [own]
    found = ([SimpleNamespace(fn=None)], [(own, "it needs 9.0"), (SimpleNamespace(fn=other), "no")])
    with pytest.raises(BackendError, match=r"got 'hopper_gemm', expected what runs on .*: it needs 9\.0"):
        timing._implementations(*call)


def test_implementations_that_do_not_take_a_shape_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise CannotTake("add", "a", "a shape", "another one")

    (usable, others) = dispatch.candidates("add", arrays.CPU)
    second = [SimpleNamespace(impl_id=name, fn=refuse) for name in ("never", "nor")]
    found = ([*usable, *second], others)
    monkeypatch.setattr(dispatch, "candidates", lambda operation, device: found)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    made = timing.measure_all("add", arrays.CPU, (2, 128))
    assert [each.implementation for each in made] == [impl.impl_id for impl in usable]
    monkeypatch.setattr(timing, "_implementations", lambda *asked: second)
    with pytest.raises(CannotTake, match="expected another one"):
        lab.measure("elementwise.cu", "cpu", (2, 128))


@pytest.mark.parametrize(
    ("operation", "dtype", "teraflops"),
    [
        ("fp8_gemm", "float32", 1979),
        ("block_gemm", "bfloat16", 1979),
        ("grouped_fp8_gemm", "bfloat16", 1979),
        ("gemm", "bfloat16", 989.5),
        ("gemm", "float32", 0),
        ("model_gemm", "bfloat16", 0),
        ("add", "bfloat16", 0),
    ],
)
def test_a_products_ceiling_is_the_chips(
    operation: str, dtype: str, teraflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, kind = arrays.Device("cuda", 0), formats.dtype(dtype, "", "")
    monkeypatch.setattr(peaks, "machine", lambda device: "NVIDIA H200")
    assert peaks.peak(operation, gpu, kind) == teraflops * 1e12
    assert peaks.peak(operation, arrays.CPU, kind) == 0
    monkeypatch.setattr(peaks, "machine", lambda device: "a chip of next year")
    assert peaks.peak(operation, gpu, kind) == 0


def test_the_share_of_the_peak_is_said() -> None:
    found = timing.Measurement("fp8_gemm", "x", arrays.CPU, (1, 1), 1, 2.0, 1.0, 3e12, 2e12)
    assert found.share == 0.75
    assert str(found).endswith("1,500.0 GFLOP/s, 75% of the chip's 2 TFLOP/s")


def test_names_of_devices_and_dtypes_will_do() -> None:
    assert lab.measure("add", "cpu", (2, 128), "float32").nbytes == 3 * 2 * 128 * 4
    assert not lab.check("add", "cpu", "float32-15-1").failures


def test_a_file_that_stands_for_nothing_is_refused(
    own_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text, said in (
        ("a.cu", "int x;", "a.cu: its functions (none) are not the functions of any source; a kernel begins"),
        ("c.cu", "\udcff", "c.cu is no text: 'utf-8' codec can't decode byte 0xff"),
        ("b.cu", 'extern "C" __global__ void rope(T* x) {}', "b.cu: rope: the parameters are not those that"),
        ("d.cu", '#include "no.cuh"\n', "d.cu: header 'no.cuh' is neither"),
    ):
        (own_folders / name).write_text(text, errors="surrogateescape")
        assert run("compile", name)[0] == 2
        assert capsys.readouterr().err.startswith(f"fp8kit kernels: {said}")


@pytest.mark.parametrize("action", ["check", "bench"])
def test_a_device_that_is_not_here_is_no_fault_of_the_kernel(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(action, "drop_path", "--device", "cuda:99") == (3, "")
    assert "it needs a GPU" in capsys.readouterr().err


def test_a_wrong_implementation_is_told_by_the_status(gpu: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with fk.override("add", lambda a, b, out, stream: native(out).fill(0)):
        status, out = run("check", "add", "--device", "cuda" if gpu else "cpu")
    assert status == 1
    assert re.search(r"add: override\.add on \S+: 15 cases, 12 WRONG", out)
    assert "  float32-561-561: out: 561 of 561 differ, first at (0, 0): got " in out


def test_diff_shows_source_and_resources(gpu: bool, own_folders: Path) -> None:
    (own_folders / "mine.cu").write_text(manifest.text("drop_path.cu").replace("256)", "128)"))
    status, out = run("diff", "drop_path", "mine.cu")
    assert status == 0 or gpu
    assert re.search(r"^-.*__launch_bounds__\(256\)", out, re.MULTILINE)
    assert re.search(r"^\+.*__launch_bounds__\(128\)", out, re.MULTILINE)
    assert re.search(r"^drop_path +\d+ +\d+ +0 +0 +0 +0$", out, re.MULTILINE)
    assert ("time and errors of both: they need a GPU" in out) != gpu
    assert "the sources are the same" in run("diff", "rope_fwd", "rope.cu")[1]
    (own_folders / "copy.cu").write_text(run("show", "drop_path")[1])
    assert "the sources are the same" in run("diff", "drop_path", "copy.cu")[1]


@pytest.mark.combinations
def test_watch_looks_again_at_every_change(
    own_folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays.provider(arrays.device("cuda")), "count", lambda: 0, raising=False)
    path, header = own_folders / "mine.cu", own_folders / "mine.cuh"
    good = manifest.text("drop_path.cu") + '#include "mine.cuh"\n'
    path.write_text(good)
    header.write_text("")
    edits = [
        lambda: None,
        lambda: path.write_text(good.replace("rng", "no_such_name")),
        lambda: path.unlink(),
        lambda: path.write_text(good),
        lambda: header.write_text("// changed\n"),
    ]

    def sleep(seconds: float) -> None:
        assert seconds == kernels.POLL
        edits.pop(0)()

    assert kernels.watch(path, "sm_90a", 5, sleep) == 0
    assert not edits
    said = capsys.readouterr()
    assert said.out.count("--- mine.cu") == 5
    assert len(re.findall(r"mine\.cu:drop_path +T=bf16 +\d+ +0 +0", said.out)) == 3
    assert said.out.count("it needs a GPU") == 3
    assert "no_such_name" in said.err

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels.time, "sleep", interrupt)
    monkeypatch.setattr(kernels.watch, "__defaults__", (None, interrupt))
    assert cli.main(["kernels", "watch", "mine.cu"]) == 130
