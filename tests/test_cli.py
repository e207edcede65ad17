"""The command line: what it prints, writes and returns."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from fp8kit import cli, nn
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import support
from fp8kit.backends.manager import OpManager
from fp8kit.bench import parts, report
from fp8kit.bench.report import Part, Setting
from fp8kit.bench.sizes import SMALL
from fp8kit.errors import BackendError
from fp8kit.models.presets import PRESETS
from fp8kit.models.progress import Progress


def test_info_names_every_engine_and_attention(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "default device",
        "numpy",
        "engine reference",
        "kernels",
        "engine cuda",
        "cuBLASLt",
        "attention on cuda",
    ):
        assert word in printed
    for line in printed.splitlines():
        if "missing" in line:
            assert line.split("missing", 1)[1].strip(), f"says not what is missing: {line}"


def rows_of(printed):
    """title -> {name: rest of the row} of what info prints."""
    rows, found = {}, {}
    for line in printed.splitlines():
        if line.startswith("  "):
            name, _, rest = line.strip().partition("  ")
            rows[name] = rest.strip()
        else:
            rows = found[line] = {}
    return found


def test_info_says_once_that_there_is_no_driver(monkeypatch, capsys):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(support.ctypes, "CDLL", absent)
    assert cli.main(["info"]) == 0
    row = rows_of(capsys.readouterr().out)["engine cuda"]["driver"]
    assert row == "missing  no NVIDIA driver; install NVIDIA's driver, 580 or newer"


EXAMPLE = (
    "heads=32 groups=8 head_dim=128 sequence=2048 batch=4 dtype=bfloat16 mask=causal window=128,0 bias=none "
    "softmax=vanilla dropout=0.1 layout=sbhd"
)
# question -> what speaks against cuDNN before it is asked
QUESTIONS = {
    EXAMPLE: None,
    "": None,
    "layout=thd mask=padding_causal sequence=100 head_dim_v=64": None,
    "dtype=float32": "dtype float32: cuDNN takes bfloat16 and float16",
    "bias=alibi softmax=learnable": (
        "bias 'alibi': only the unfused path has it; softmax_type 'learnable': only the unfused path has it"
    ),
    "bias=post_scale_bias mask=no_mask": "bias 'post_scale_bias': only the unfused path has it",
    "mask=arbitrary head_dim=20": (
        "head_dim 20: cuDNN takes multiples of 8 up to 256; mask 'arbitrary': "
        "only the unfused path reads a mask array"
    ),
    "mask=causal_bottom_right sequence=64 sequence_kv=32": (
        "a row that sees no column: cuDNN gives NaN for it"
    ),
    "mask=no_mask window=8,-1 bottom_right=false sequence=64 sequence_kv=32": (
        "a row that sees no column: cuDNN gives NaN for it"
    ),
}


@pytest.mark.parametrize("asked", QUESTIONS)
def test_info_explains_an_attention(asked, monkeypatch, capsys):
    monkeypatch.setattr(cli.arrays.provider(cli.arrays.device("cuda")), "count", lambda: 0, raising=False)
    assert cli.main(["info", "--attention", *([asked] if asked else [])]) == 0
    found = rows_of(capsys.readouterr().out)
    assert found["attention on cpu"] == {
        "forward": "runs     reference.attention_fwd",
        "backward": "runs     reference.attention_bwd",
    }
    why = QUESTIONS[asked]
    said = "cuDNN would be asked" if why is None else f"unfused, not cuDNN: {why}"
    wanted = f"missing  no usable CUDA device; on one {said}"
    assert found["attention on cuda"] == dict.fromkeys(
        ("forward", "backward", "deterministic backward"), wanted
    )


def test_info_reads_words_together_or_apart(capsys):
    printed = []
    for words in ([EXAMPLE], EXAMPLE.split()):
        assert cli.main(["info", "--attention", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    for word in (*EXAMPLE.split(), "head_dim_v=128", "sequence_kv=2048", "bottom_right=default"):
        assert f" {word}" in printed[0].splitlines()[1]


REFUSED = {
    "heads": "'heads': got no =, expected key=value",
    "head=8": (
        "'head=8': got the key 'head', expected one of heads, groups, head_dim, head_dim_v, sequence, "
        "sequence_kv, batch, dtype, mask, window, bottom_right, bias, softmax, dropout, layout; "
        "did you mean heads?"
    ),
    "heads=8 heads=4": "heads: got two values, expected one",
    "heads=many": "heads: got 'many', expected a positive number",
    "groups=0": "groups: got '0', expected a positive number below 2^31, a divisor of heads",
    "sequence=99999999999": "sequence: got '99999999999', expected a positive number below 2^31",
    "groups=5": "groups: got 5, expected a divisor of 32 heads",
    "dtype=float64": "dtype: got 'float64', expected one of float32, bfloat16, float16",
    "mask=square": "mask: got 'square', expected one of no_mask, causal,",
    "window=3": "window: got '3', expected left,right",
    "window=3,-2": "window: got '3,-2', expected left,right",
    "window=3,4": (
        "window: got (3, 4), expected right -1 or 0: mask 'causal' sees nothing right of the diagonal"
    ),
    "bottom_right=maybe": "bottom_right: got 'maybe', expected one of default, true, false",
    "bottom_right=true": "bottom_right: got True, expected None or False with mask 'causal'",
    "bias=some": "bias: got 'some', expected one of none, no_bias,",
    "softmax=hard": "softmax: got 'hard', expected one of vanilla, off-by-one, learnable",
    "dropout=1": "dropout: got '1', expected a probability in [0, 1)",
    "layout=hsbd": "layout: got 'hsbd', expected one of sbhd, bshd, thd",
    "layout=thd": "mask: got 'causal', expected one of the padding masks, with layout 'thd'",
}


@pytest.mark.parametrize("asked", REFUSED)
def test_info_refuses_what_it_cannot_read(asked, capsys):
    assert cli.main(["info", "--attention", asked]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"fp8kit info --attention: {REFUSED[asked]}")
    assert said.err.count("\n") == 1
    assert not said.out


@pytest.mark.gpu
def test_info_explains_an_attention_on_a_gpu(capsys):
    """What the engine would do, by path: cuDNN takes the plain one, and nothing but the unfused path takes
    float32."""
    for asked, wanted in (
        (EXAMPLE.replace("window=128,0", "window=none"), "cuDNN"),
        ("dtype=float32", "unfused, not cuDNN: dtype float32: cuDNN takes bfloat16 and float16"),
    ):
        assert cli.main(["info", "--attention", asked]) == 0
        rows = rows_of(capsys.readouterr().out)["attention on cuda:0"]
        assert rows == dict.fromkeys(("forward", "backward", "deterministic backward"), f"runs     {wanted}")


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


def test_train_writes_a_checkpoint(tmp_path, capsys):
    assert (
        cli.main(["train", "--preset", "tiny", "--steps", "3", "--device", "cpu", "--out", str(tmp_path)])
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith(
        "tiny on cpu, FP8 beside float32: 2 layers of 32, 3 steps of 256 bytes, seed 0\n"
        "text: the Python standard lib"
    )
    assert "nats/byte" in said
    assert "replaces" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "loss.csv",
        "model.safetensors",
        "scales.csv",
        "training.safetensors",
    ]
    again = ["train", "--preset", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main([*again, "--steps", "5", "--resume"]) == 1
    assert capsys.readouterr().err == (
        f"fp8kit train: resume: {tmp_path / 'training.safetensors'} is of another training: "
        "steps: 3 in the file, 5 here; the same options continue it, another folder starts anew; "
        "the learning rate follows the number of steps, so that a training cannot be made longer\n"
    )
    assert cli.main([*again, "--steps", "2", "--precision", "high"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "tiny on cpu, float32: 2 layers of 32, 2 steps of 256 bytes, seed 0"
    assert said[2] == f"replaces loss.csv, model.safetensors, training.safetensors in {tmp_path}/"


@pytest.fixture
def short_samples(monkeypatch):
    """The demo's models say a few bytes."""
    monkeypatch.setattr("fp8kit.models.demo.SAMPLE_BYTES", 8)


def test_a_demo_that_is_too_short_to_be_judged_says_so(short_samples, tmp_path, capsys):
    assert cli.main(["demo", "--preset", "tiny", "--device", "cpu", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "\ntiny is too short to be judged: " in said.out
    assert "bound:" not in said.out
    assert "FAILED" not in said.err


def test_demo_fails_when_a_bound_fails(short_samples, monkeypatch, tmp_path, capsys):
    assert [name for name, size in PRESETS.items() if not size.judged] == ["tiny"]
    monkeypatch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], judged=True))
    assert (
        cli.main(["demo", "--preset", "tiny", "--steps", "2", "--device", "cpu", "--out", str(tmp_path)]) == 1
    )
    said = capsys.readouterr()
    assert "FAILED: the FP8 loss" in said.err
    assert "unigram entropy" in said.out


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


@pytest.mark.parametrize("name", ["cuda", "cuda:99"])
def test_a_device_that_is_not_there_is_named(name, monkeypatch, capsys):
    monkeypatch.setattr(cli.arrays.provider(cli.arrays.device("cuda")), "count", lambda: 0, raising=False)
    assert cli.main(["train", "--preset", "tiny", "--device", name]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"fp8kit train: --device: {cli.arrays.device(name)} is not usable, 0 cuda devices are"
    )
    assert said.count("\n") == 1


BAD = {
    "FP8KIT_DEVICE": ("moon", "got 'moon', expected a name like cpu, cuda or cuda:1"),
    "FP8KIT_STRICT": ("maybe", "got 'maybe', expected 0 or 1"),
    "FP8KIT_LOG_LEVEL": ("loud", "got 'LOUD', expected DEBUG,"),
    "TE_FL_PREFER": ("speed", "got 'speed', expected default, vendor or reference"),
    "FP8KIT_CACHE_DIR": (
        "/proc/none",
        "got '/proc/none', expected a folder that can be written (No such file or directory)",
    ),
    "FP8KIT_PER_OP": ("a=b", "SelectionPolicy: per_op: got 'a', expected a kernel"),
}


def test_info_tells_of_bad_settings_and_prints_the_rest(monkeypatch, capsys):
    monkeypatch.setenv("FP8KIT_PLUGIN_MODULES", "")
    for name, (value, _) in BAD.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["info"]) == 1
    said = capsys.readouterr()
    rows = rows_of(said.out)
    bad = [name for name in rows["environment"] if name in BAD]
    assert said.err.splitlines()[-1] == f"fp8kit info: {', '.join(bad)}: see environment"
    for name, (_, why) in BAD.items():
        assert rows["environment"][name].startswith(f"bad      {why}")
    assert {"machine", "libraries", "engine reference", "engine cuda", "attention asked about"} <= rows.keys()


def test_info_tells_of_a_plugin_that_failed(monkeypatch, capsys):
    monkeypatch.setenv("FP8KIT_PLUGIN_MODULES", "math,a_module_that_is_not_there")
    monkeypatch.setattr(dispatch, "_MANAGER", OpManager())
    assert cli.main(["info"]) == 1
    said = capsys.readouterr()
    row = rows_of(said.out)["environment"]["FP8KIT_PLUGIN_MODULES"]
    assert row.startswith("bad      got math (fp8kit.errors.BackendError: plugin: math: got <module 'math'")
    assert (
        "a_module_that_is_not_there (ModuleNotFoundError: No module named 'a_module_that_is_not_there'), "
        "expected modules" in row
    )
    assert said.err.splitlines()[-1] == "fp8kit info: FP8KIT_PLUGIN_MODULES: see environment"


def test_info_shows_the_settings_that_are_good(monkeypatch, capsys):
    monkeypatch.setenv("FP8KIT_DEVICE", "cpu")
    assert cli.main(["info"]) == 0
    assert rows_of(capsys.readouterr().out)["environment"]["FP8KIT_DEVICE"] == "cpu"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("moon", "got 'moon', expected a name like cpu, cuda or cuda:1"),
        ("cuda:3", "got cuda:3, expected cpu, or a device that is here: 0 of cuda"),
    ],
)
def test_a_device_of_the_environment_is_refused_by_its_variable(value, wanted, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli.arrays.provider(cli.arrays.device("cuda")), "count", lambda: 0, raising=False)
    monkeypatch.setenv("FP8KIT_DEVICE", value)
    assert cli.main(["train", "--preset", "tiny", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"fp8kit train: environment: FP8KIT_DEVICE: {wanted}")
    assert said.count("\n") == 1
    with pytest.raises(BackendError, match=r"^environment: FP8KIT_DEVICE: got "):
        nn.Linear(4, 4)


def stopped_at(monkeypatch, step):
    """A training that Ctrl-C stops when ``step`` steps are done."""
    update = Progress.update

    def stop(self, done, *given, **values):
        update(self, done, *given, **values)
        if done == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "update", stop)


def test_a_stopped_training_says_how_to_go_on(monkeypatch, tmp_path, capsys):
    words = [
        "train",
        "--preset",
        "tiny",
        "--device",
        "cpu",
        "--save-every",
        "2",
        "--out",
        str(tmp_path / "a b"),
    ]
    with monkeypatch.context() as patched:
        stopped_at(patched, 1)
        assert cli.main(words) == 130
        said = capsys.readouterr().err.splitlines()
        assert said[0] == "FP8 0/6 first step: compiles or loads kernels"
        assert said[-1] == (
            "fp8kit train: interrupted; nothing is saved yet (--save-every 2): the same command starts anew"
        )
    with monkeypatch.context() as patched:
        stopped_at(patched, 4)
        assert cli.main(words) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    start = "fp8kit train: interrupted; this goes on after the last save, bit for bit: fp8kit "
    assert said.startswith(start)
    again = shlex.split(said.removeprefix(start))
    assert again == [*words, "--resume"]
    assert cli.main(again) == 0
    assert "FP8: continues after step 2 of 6\nFP8 2/6 first step" in capsys.readouterr().err


def test_a_stopped_demo_says_what_can_be_resumed(monkeypatch, tmp_path, capsys):
    stopped_at(monkeypatch, 2)
    assert cli.main(["demo", "--preset", "tiny", "--device", "cpu", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().err
    assert "float32 0/6 first step: compiles or loads kernels\n" in said
    assert said.splitlines()[-1] == (
        "fp8kit demo: interrupted; a demo starts anew; what can be stopped and goes on with --resume is "
        "`fp8kit train --preset tiny`: the same model, in FP8"
    )


def test_interruption_is_one_line(monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "run", stopped)
    assert cli.main(["bench", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "\nfp8kit bench: interrupted\n"


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


def test_warmup_says_what_it_compiled(monkeypatch, tmp_path, capsys):
    """One small source stands for all of them; the second time it is in the cache."""
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        sys.modules["fp8kit.warmup"], "variants", lambda *given: [("scales.cu", {"STATES": "8"})]
    )
    for said, more in (
        ("1 variants compiled", "compiled scales.cu STATES=8, "),
        ("0 variants compiled in", "1 variants for sm_90a, "),
    ):
        assert cli.main(["warmup", "--preset", "tiny", "--arch", "sm_90a"]) == 0
        printed = capsys.readouterr()
        assert said in printed.out
        assert f"fp8kit warmup: {more}" in printed.err


def test_warmup_on_a_cpu_says_what_it_is_at(capsys):
    assert cli.main(["warmup", "--preset", "tiny", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert lines[0].startswith(
        "fp8kit warmup: on the CPU: nothing is compiled for a GPU; the first step compiles the reference "
        "engine's"
    )
    assert lines[1] == (
        "fp8kit warmup: two steps on cpu: a layer of 32/128/2, bfloat16, delayed(HYBRID, h1024, max), "
        "32 x 4 tokens"
    )
    assert [line.partition(", ")[0] for line in lines[2:]] == [
        f"fp8kit warmup: step {n}: forward done" for n in (1, 2)
    ]
    assert said.out.startswith("two steps of the layer: ")


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
        ([], "required: command"),
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
        (["warmup", "--arch", "sm_90"], "fp8kit warmup: arch: got 'sm_90', expected one of sm_89, sm_90a,"),
        (["warmup", "--arch", "foo"], "fp8kit warmup: arch: got 'foo', expected one of sm_89, sm_90a,"),
        (
            ["kernels", "compile", "rope", "--arch", "foo"],
            "fp8kit kernels: --arch: got 'foo', expected one of sm_89, sm_90a,",
        ),
        (
            ["kernels", "show", "rope", "--ptx", "--arch", "sm_1"],
            "fp8kit kernels: --arch: got 'sm_1', expected one of sm_89, sm_90a,",
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
            "fp8kit kernels: check: operation: got 'add' with cases 'tea', expected",
        ),
        (["kernels", "show", "tea"], "fp8kit kernels: name: got 'tea', expected an operation"),
        (
            ["kernels", "show", "rope", "--ptx", "--variant", "T=tea"],
            "fp8kit kernels: variant: got 'T=tea', expected defines of rope.cu",
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
