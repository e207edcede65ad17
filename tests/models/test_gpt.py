"""The model, its training and the demo at the size "tiny"."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from fp8kit import formats, nn, serialization
from fp8kit.arrays import CPU
from fp8kit.autograd import no_grad, tensor
from fp8kit.collectives import Collectives
from fp8kit.errors import BackendError, Fp8kitError, ShapeError
from fp8kit.models import demo, plots, resume, text, train
from fp8kit.models.gpt import GPT, generate, parameter_count
from fp8kit.models.presets import PRESETS, preset
from fp8kit.recipe import DelayedScaling
from tests.support.combinations import combinations

TINY = preset("tiny")
RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture(scope="module")
def corpus():
    return text.standard_library(max_bytes=2 << 20)


def make(seed=0):
    nn.manual_seed(seed)
    return GPT(TINY, formats.float32, CPU)


def ids_of(seed, shape=(2, 32)):
    return np.random.default_rng(seed).integers(0, 256, shape)


@pytest.mark.parametrize("size", PRESETS.values(), ids=PRESETS)
def test_presets_fit_fp8(size):
    assert size.hidden % 16 == 0
    assert size.sequences * size.context % 16 == 0
    assert size.hidden % size.heads == 0
    assert 0 < size.warmup < size.steps
    assert size.with_steps(20).warmup == min(2, size.warmup)
    assert size.with_steps(size.steps) == size


def test_gpt2_small_has_86_million_parameters():
    h, layers = 768, 12
    per_layer = 12 * h * h + 13 * h  # qkv, proj, fc1, fc2 with their biases, and two norms
    assert layers * per_layer + 2 * 256 * h + 1024 * h + 2 * h == pytest.approx(86.2e6, rel=2e-3)
    assert parameter_count(make()) == 2 * (12 * 32 * 32 + 13 * 32) + 2 * 256 * 32 + 32 * 32 + 2 * 32


def test_unknown_preset_is_refused():
    with pytest.raises(Fp8kitError, match="tiny, demo-cpu"):
        preset("huge")


def test_same_seed_same_weights():
    a, b, c = make(1).state_dict(), make(1).state_dict(), make(2).state_dict()
    assert all(np.array_equal(a[name].numpy(), b[name].numpy()) for name in a)
    assert not np.array_equal(a["head.weight"].numpy(), c["head.weight"].numpy())


def test_fresh_model_predicts_nearly_uniformly():
    logits = make()(tensor(ids_of(0)))
    loss = nn.cross_entropy(logits, tensor(ids_of(1))).item()
    assert loss == pytest.approx(math.log(256), abs=0.15)


def test_model_is_causal():
    model, ids = make(), ids_of(2)
    changed = ids.copy()
    changed[:, 20:] = 255 - changed[:, 20:]
    with no_grad():
        before, after = model(tensor(ids)).numpy(), model(tensor(changed)).numpy()
    assert np.array_equal(before[:, :20], after[:, :20])
    assert not np.array_equal(before[:, 20], after[:, 20])


def test_gradient_of_the_loss():
    """The analytic derivative along a random direction against a central difference of the float32 loss."""
    model, ids, targets = make(), tensor(ids_of(3)), tensor(ids_of(4))
    parameters = list(model.parameters())
    nn.cross_entropy(model(ids), targets).backward()
    rng = np.random.default_rng(5)
    directions = [rng.standard_normal(p.shape).astype(np.float32) * 0.01 for p in parameters]
    slope = sum(
        float((p.grad.numpy().astype(np.float64) * d).sum())
        for p, d in zip(parameters, directions, strict=True)
    )
    step = 0.05

    def loss_at(factor):
        for p, d in zip(parameters, directions, strict=True):
            p.numpy()[...] += np.float32(factor) * d
        with no_grad():
            return nn.cross_entropy(model(ids), targets).item()

    up = loss_at(step)
    down = loss_at(-2 * step)
    # rounding of both float32 losses over the interval, and the third derivative's share
    assert (up - down) / (2 * step) == pytest.approx(
        slope, abs=4 * 2.0**-23 * math.log(256) / (2 * step) + 0.02 * abs(slope)
    )


def test_wrong_ids_are_refused():
    for shape in ((32,), (1, 33), (1, 0)):
        with pytest.raises(ShapeError, match="GPT: ids"):
            make()(tensor(np.zeros(shape, np.int64)))


@pytest.mark.combinations
def test_generate_follows_the_model():
    model = make()
    a, b = (generate(model, b"def ", 40, RECIPE, seed=7) for _ in range(2))
    assert a == b
    assert len(a) == 40
    assert a != generate(model, b"def ", 40, RECIPE, seed=8)
    window = np.zeros((1, 32), np.int64)
    window[0, :4] = list(b"def ")
    with no_grad():
        likeliest = int(model(tensor(window)).numpy()[0, 3].argmax())
    # so cold that only the likeliest byte is left
    assert generate(model, b"def ", 1, temperature=1e-4)[0] == likeliest
    for wrong in ({"prompt": b"", "count": 1}, {"prompt": b"a", "count": 1, "temperature": 0.0}):
        with pytest.raises(ShapeError):
            generate(model, **wrong)


@combinations({"recipe": {"plain": None, "fp8": RECIPE}}, usual=["fp8"])
def test_generate_says_the_same_with_and_without_the_cache(corpus, recipe):
    """Greedy, beyond the context of 32 bytes, where the window begins to move."""
    model = train.train(TINY.with_steps(6), corpus, recipe, "run", CPU, seed=1).model
    for prompt, count in ((b"def ", 40), (b"x" * 32, 3), (b"import numpy as np  # and much more text\n", 3)):
        texts = [
            generate(model, prompt, count, recipe, temperature=1e-6, use_cache=cached)
            for cached in (True, False)
        ]
        assert texts[0] == texts[1]


def test_logits_of_sequences_that_grow():
    """Two sequences of different lengths, in steps, against the whole ones; beyond the context they are
    refused."""
    model, ids = make(), ids_of(6)
    cache, done = nn.InferenceParams(2, 40, device=CPU), [0, 0]
    with no_grad():
        whole = model(tensor(ids)).numpy()
        for counts in ((7, 2), (1, 1), (3, 20), (1, 1)):
            cache.pre_step(dict(enumerate(counts)))
            step = np.zeros((2, max(counts)), np.int64)
            for b, n in enumerate(counts):
                step[b, :n] = ids[b, done[b] : done[b] + n]
            logits = model(tensor(step), inference_params=cache).numpy()
            for b, n in enumerate(counts):
                want = whole[b, done[b] : done[b] + n]
                assert np.abs(logits[b, :n] - want).max() <= 64 * TINY.hidden * 2.0**-24 * np.abs(want).max()
                done[b] += n
        cache.pre_step({0: 1, 1: 9})
        with pytest.raises(
            ShapeError, match="2 sequences of up to 33 tokens, expected 2 as ids, of up to 32"
        ):
            model(tensor(np.zeros((2, 9), np.int64)), inference_params=cache)


def test_training_learns_in_both_precisions_alike(corpus):
    size = TINY.with_steps(12)
    high = train.train(size, corpus, None, "float32", CPU, seed=1)
    low = train.train(size, corpus, train.fp8_recipe(size), "FP8", CPU, seed=1)
    assert len(high.losses) == len(low.losses) == 12
    assert high.losses[0] == pytest.approx(low.losses[0], rel=0.01)
    assert high.losses[-1] < high.losses[0] - 0.3
    assert low.validation_loss == pytest.approx(high.validation_loss, rel=0.02)
    assert not high.statistics
    again = train.train(size, corpus, train.fp8_recipe(size), "FP8", CPU, seed=1)
    assert again.losses == low.losses


def test_accumulation_is_the_mean_over_microbatches(corpus):
    """The gradient of a step of two microbatches is the mean of theirs."""
    model = make()
    half = tensor(np.full(1, 0.5, np.float32))
    grads = []
    for micro in range(2):
        ids, targets = text.batch(corpus.train, TINY.sequences, TINY.context, 0, micro)
        nn.cross_entropy(model(tensor(ids)), tensor(targets)).backward()
        grads.append(model.head.weight.grad.numpy().astype(np.float64))
        model.zero_grad()
    run = resume.Run("float32", model, None)
    for micro in range(2):
        train._microbatch(run, TINY, corpus.train, 0, micro, half, Collectives(0, 1))
    got = model.head.weight.grad.numpy()
    assert np.abs(got - sum(grads) / 2).max() <= 4 * 2.0**-24 * max(np.abs(g).max() for g in grads)


def test_statistics_are_what_the_recipe_says(corpus):
    size = TINY.with_steps(4)
    run = train.train(
        size, corpus, DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"), "FP8", CPU
    )
    layers = {row.layer for row in run.statistics}
    assert len(layers) == 4 * TINY.layers
    assert "layers.0.layernorm_mlp.fc1" in layers
    assert {row.step for row in run.statistics} == {1, 2, 4}
    assert {row.tensor for row in run.statistics} == set(plots.TENSORS)
    for row in run.statistics:  # most recent: the next scale is fp8_max / amax of this step
        largest = 57344.0 if row.tensor == "grad_output" else 448.0
        assert row.scale == np.float32(largest) / np.float32(row.amax)


def test_divergence_is_an_error(corpus, monkeypatch):
    monkeypatch.setattr(
        train.nn,
        "cross_entropy",
        lambda logits, targets: nn_cross_entropy(logits, targets) + tensor(np.float32([np.nan])),
    )
    with pytest.raises(Fp8kitError, match="loss of step 1"):
        train.train(TINY, corpus, None, "float32", CPU)


nn_cross_entropy = nn.cross_entropy


def test_verdict():
    good = demo.Verdict(2.10, 2.12, 3.0)
    assert good.failures == []
    assert good.gap == pytest.approx(0.02 / 2.10)
    assert len(demo.Verdict(2.31, 2.31, 3.0).failures) == 2
    assert len(demo.Verdict(2.0, 2.05, 3.0).failures) == 1
    assert len(demo.Verdict(2.0, 1.95, 3.0).failures) == 1
    assert len(demo.Verdict(2.0, math.nan, 3.0).failures) == 2
    assert demo.Verdict(2.31, 2.6, 3.0, judged=False).failures == []


@pytest.mark.programs
def test_demo_writes_its_results(tmp_path, capsys, monkeypatch, corpus):
    monkeypatch.setattr(demo, "SAMPLE_BYTES", 8)
    verdict = demo.run_demo(TINY, tmp_path, CPU, steps=4)
    assert not verdict.failures  # four steps of a tiny model learn too little to be judged
    assert abs(verdict.gap) < demo.GAP
    printed = capsys.readouterr().out
    for word in (
        "float32",
        "FP8",
        "unigram entropy",
        "gap",
        "tiny is too short to be judged",
        "a CPU has no FP8 arithmetic: FP8 is emulated here, and takes longer than float32",
        "it begins: 'def ",
        f"{verdict.fp8:.4f}",
    ):
        assert word in printed
    with (tmp_path / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert float(rows[0]["float32"]) == pytest.approx(float(rows[0]["FP8"]), rel=0.01)
    for name in ("loss.png", "scales.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "sample.txt").read_bytes()) == 12
    with (tmp_path / "scales.csv").open() as file:
        assert {row["tensor"] for row in csv.DictReader(file)} == set(plots.TENSORS)
    model = make(9)
    assert serialization.load(tmp_path / "fp8.safetensors", model)["preset"] == "tiny"
    loss = train.validate(model, TINY, text.standard_library().validation, train.fp8_recipe(TINY))
    assert loss == pytest.approx(verdict.fp8, abs=1e-12)  # the checkpoint holds weights and scales


def test_missing_matplotlib_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(plots.importlib, "import_module", missing)
    with pytest.raises(BackendError, match=r"in a checkout of fp8kit, with: pip install '\.\[demo\]'"):
        plots.figure()
