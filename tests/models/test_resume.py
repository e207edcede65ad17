"""A training that is stopped, or killed, continues with the same bits; a file that does not fit changes
nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from fp8kit import arrays, cli, nn, optim, serialization
from fp8kit.arrays import CPU
from fp8kit.errors import CheckpointError, Fp8kitError
from fp8kit.models import text
from fp8kit.models.gpt import GPT
from fp8kit.models.presets import PRESETS, preset
from fp8kit.models.resume import KIND, Checkpoint, Run, identity
from fp8kit.models.train import fp8_recipe, train
from tests.support.combinations import combinations
from tests.support.source import ROOT
from tests.support.stops import Stop, Stopped

TINY = preset("tiny")
RECIPES = {"high": None, "FP8": fp8_recipe(TINY)}


@pytest.fixture(scope="module")
def corpus():
    return text.standard_library(max_bytes=2 << 20)


def bits(run, path):
    """Everything that a finished run leaves: its file, whole, and its numbers."""
    state, said = serialization.read(path)
    arrays_of = {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in state.items()}
    return run.losses, run.statistics, run.validation_loss, arrays_of, said


@combinations({"label": list(RECIPES)}, usual=["FP8"])
def test_a_stopped_run_continues_with_the_same_bits(corpus, tmp_path, label):
    recipe, quiet = RECIPES[label], Stop(None)
    whole = bits(train(TINY, corpus, recipe, label, CPU, 3, quiet, tmp_path / "whole"), tmp_path / "whole")
    stopped = tmp_path / "stopped"
    # stopped after step 2, 3 and 5, each time before it was saved; step 1, 2 and 4 were
    for step in (2, 3, 5):
        with pytest.raises(Stopped):
            train(TINY, corpus, recipe, label, CPU, 3, Stop(step), stopped, 1, resume=step > 2)
        nn.manual_seed(99)  # the process's random state is not what continues
    assert len(serialization.read(stopped)[0]["seen/losses"]) == 4
    assert bits(train(TINY, corpus, recipe, label, CPU, 3, quiet, stopped, 1, resume=True), stopped) == whole
    # nothing is left to do
    assert bits(train(TINY, corpus, recipe, label, CPU, 3, quiet, stopped, 1, resume=True), stopped) == whole


@pytest.mark.programs
def test_a_killed_command_continues_with_the_same_bits(tmp_path):
    options = ["train", "--preset", "tiny", "--steps", "20", "--device", "cpu", "--save-every", "1", "--out"]
    assert cli.main([*options, str(tmp_path / "whole")]) == 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # there is nothing yet: from the start
    command = [sys.executable, "-m", "fp8kit", *options, str(tmp_path / "killed"), "--resume"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    saved, deadline = tmp_path / "killed/training.safetensors", time.monotonic() + 60
    while not saved.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(0.03)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 0 < len(serialization.read(saved)[0]["seen/losses"]) < 20
    assert cli.main([*options, str(tmp_path / "killed"), "--resume"]) == 0
    for name in ("loss.csv", "scales.csv", "model.safetensors", "training.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.programs
def test_200_kills_during_saves_lose_nothing(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "tests.models.kill_saves", str(tmp_path), "200", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("200 kills")
    assert int(done.stdout.split()[2]) > 20, done.stdout  # many of them hit a save


# --- files that do not fit ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "state"
    train(replace(TINY, steps=2), corpus, RECIPES["FP8"], "FP8", CPU, 3, Stop(None), path)
    return path


def changed(path, target, **changes):
    """A copy of the file with other arrays (None: without)."""
    state, said = serialization.read(path)
    serialization.save(target, {k: v for k, v in (state | changes).items() if v is not None}, said)


BROKEN = {
    "missing": (lambda good, path: None, "readable file"),
    "empty": (lambda good, path: path.write_bytes(b""), "truncated or foreign"),
    "truncated": (lambda good, path: path.write_bytes(good.read_bytes()[:-100]), "truncated or foreign"),
    "no header": (lambda good, path: path.write_bytes(good.read_bytes()[:100]), "truncated or foreign"),
    "a picture": (lambda good, path: path.write_bytes(b"\x89PNG\r\n\x1a\n" * 99), "truncated or foreign"),
    "another kind": (
        lambda good, path: serialization.save(path, {"x": np.zeros(2)}, {"preset": "tiny"}),
        f"holds no training, expected one of kind '{KIND}'",
    ),
    "no model": (
        lambda good, path: changed(good, path, **{"model/head.weight": None}),
        "model: load: missing: head.weight",
    ),
    "shape": (
        lambda good, path: changed(good, path, **{"model/head.weight": np.zeros((2, 2), np.float32)}),
        "head.weight: got float32",
    ),
    "optimizer": (
        lambda good, path: changed(good, path, **{"optimizer/exp_avg.3": None}),
        "optimizer: .*missing: exp_avg.3",
    ),
    "history": (
        lambda good, path: changed(
            good,
            path,
            **{"model/layers.0.layernorm_mlp._extra_state.scaling_fwd.scale": np.ones(2, np.float32)},
        ),
        "scaling_fwd.scale",
    ),
    "random": (
        lambda good, path: changed(good, path, **{"random/host.key": np.zeros(3, np.int64)}),
        "random: .*host.key",
    ),
    "seen": (
        lambda good, path: changed(good, path, **{"seen/statistics": np.frombuffer(b"[[", np.uint8)}),
        "seen: .*JSON",
    ),
    "unknown": (lambda good, path: changed(good, path, **{"more/x": np.zeros(1)}), "unexpected: more/x"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_does_not_fit_changes_nothing(corpus, good, tmp_path, how):
    make, said = BROKEN[how]
    make(good, tmp_path / "state")
    two = replace(TINY, steps=2)
    nn.manual_seed(8)
    run = Run("FP8", GPT(two, device=CPU), RECIPES["FP8"])
    optimizer = optim.AdamW(
        [
            {
                "params": [p for p in run.model.parameters() if len(p.shape) > 1],
                "weight_decay": two.weight_decay,
            },
            {"params": [p for p in run.model.parameters() if len(p.shape) == 1], "weight_decay": 0.0},
        ]
    )
    for p in run.model.parameters():
        p.grad = arrays.zeros(p.shape, p.dtype, p.device)
    optimizer.step()
    kept = Checkpoint(tmp_path / "state", run, optimizer, identity(two, corpus, run.recipe, "FP8", CPU, 3))

    def everything():
        return {
            name: np.asarray(arrays.as_view(array).numpy()).tobytes()
            for name, array in kept.bundle.state_dict().items()
        }

    before = everything()
    with pytest.raises(CheckpointError, match=said):
        kept.load()
    assert everything() == before
    Checkpoint(good, run, optimizer, identity(two, corpus, run.recipe, "FP8", CPU, 3)).load()
    assert everything() != before


def test_another_training_is_named(corpus, good):
    two = replace(TINY, steps=2)
    for options, said in (
        (
            (two, corpus, RECIPES["FP8"], "FP8", CPU, 4),
            "seed: 3 in the file, 4 here; the same options continue it",
        ),
        (
            (replace(two, hidden=64, learning_rate=1.0), corpus, RECIPES["FP8"], "FP8", CPU, 3),
            "hidden: 32 in the file, 64 here; preset.learning_rate: 0.003 in the file, 1.0 here",
        ),
        (
            (two, corpus, None, "FP8", CPU, 3),
            "another training: recipe: DelayedScaling.* in the file, None here; the",
        ),
        (
            (two, text.Corpus(corpus.train[:-1], corpus.validation), RECIPES["FP8"], "FP8", CPU, 3),
            "another training: text: another in the file, this here; the same",
        ),
        (
            (two.with_steps(40), corpus, RECIPES["FP8"], "FP8", CPU, 3),
            "another training: steps: 2 in the file, 40 here; the same",
        ),
        (
            (two, corpus, None, "float32", CPU, 3),
            "another training: precision: FP8 in the file, float32 here; the same",
        ),
        (
            (PRESETS["demo-cpu"], corpus, None, "float32", CPU, 3),
            (
                "another training: preset: tiny in the file, demo-cpu here; precision: FP8 in the file, "
                "float32 here; the same"
            ),
        ),
    ):
        with pytest.raises(CheckpointError, match=said):
            train(*options, Stop(None), good, resume=True)
    unjudged = replace(two, judged=not two.judged)  # nothing that a training depends on
    assert identity(unjudged, corpus, None, "x", CPU, 3) == identity(two, corpus, None, "x", CPU, 3)
    with pytest.raises(Fp8kitError, match="keep"):
        train(two, corpus, None, "x", CPU, resume=True, stream=Stop(None))


def test_a_link_stays_a_link(tmp_path):
    """The file that it names is written, and what a killed save left beside that file is swept."""
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "state", tmp_path / "latest"
    link.symlink_to(real)
    for value in (1.0, 2.0):
        serialization.save(link, {"x": np.full(3, value, np.float32)})
        assert link.is_symlink()
        np.testing.assert_array_equal(serialization.read(real)[0]["x"], np.full(3, value, np.float32))
    left = real.with_name(f".{real.name}.00000000{serialization._BESIDE}")
    left.touch()
    serialization.sweep(link)
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["state"]
