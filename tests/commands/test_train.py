"""``fp8kit train`` and ``fp8kit demo``: checkpoints, verdicts, what an interruption says."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from fp8kit import cli, nn
from fp8kit.errors import BackendError
from fp8kit.models.presets import PRESETS
from fp8kit.models.progress import Progress


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


@pytest.mark.programs
def test_a_demo_that_is_too_short_to_be_judged_says_so(short_samples, tmp_path, capsys):
    words = ["demo", "--preset", "tiny", "--steps", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert "\ntiny is too short to be judged: " in said.out
    assert "bound:" not in said.out
    assert "FAILED" not in said.err


@pytest.mark.programs
def test_demo_fails_when_a_bound_fails(short_samples, monkeypatch, tmp_path, capsys):
    assert [name for name, size in PRESETS.items() if not size.judged] == ["tiny"]
    monkeypatch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], judged=True))
    assert (
        cli.main(["demo", "--preset", "tiny", "--steps", "2", "--device", "cpu", "--out", str(tmp_path)]) == 1
    )
    said = capsys.readouterr()
    assert "FAILED: the FP8 loss" in said.err
    assert "unigram entropy" in said.out


@pytest.mark.parametrize("name", ["cuda", "cuda:99"])
def test_a_device_that_is_not_there_is_named(name, monkeypatch, capsys):
    monkeypatch.setattr(cli.arrays.provider(cli.arrays.device("cuda")), "count", lambda: 0, raising=False)
    assert cli.main(["train", "--preset", "tiny", "--device", name]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"fp8kit train: --device: {cli.arrays.device(name)} is not usable, 0 cuda devices are"
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("moon", "got 'moon', expected a name like cpu, cuda or cuda:1"),
        ("cuda:3", "got cuda:3, expected cpu: no CUDA device found"),
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


@pytest.mark.programs
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
