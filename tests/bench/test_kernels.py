"""The table of bytes, and that a kernel that computes something else, or leaves something out, is found
out."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.arrays import CPU, Device
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import KERNELS
from fp8kit.bench import kernels, random
from fp8kit.bench.report import Setting
from fp8kit.bench.sizes import FULL, SMALL, Layer

CASES = {case.name: case for case in kernels.kernel_cases(SMALL.large, SMALL.vocabulary)}
QUICK = Setting(CPU, SMALL, 2, 1, 0)


def test_bytes_by_hand():
    """M = 8192 tokens, H = 4096, F = 16384; h is 2 bytes, a code 1, statistics and scales 4."""
    found = {case.name: case.nbytes for case in kernels.kernel_cases()}
    mh, mf, hf = 8192 * 4096, 8192 * 16384, 4096 * 16384
    scalars = 4 * 4  # scale and scale_inv once, the amax twice
    assert found["norm, cast both ways"] == mh * (2 + 1 + 1) + 2 * 4096 * 2 + 2 * 8192 * 4 + scalars
    assert found["cast of fc1's weight, both ways"] == hf * (2 + 1 + 1) + scalars
    assert found["bias, residual"] == mh * 6 + 4096 * 2
    assert found["GELU's gradient, cast both ways, sums"] == mf * (2 + 2 + 1 + 1) + 2 * 16384 * 2 + scalars
    assert found["norm's gradient, residual, sums"] == mh * 8 + 3 * 4096 * 2 + 2 * 8192 * 4
    assert found["AdamW with masters"] == hf * (2 + 2 + 3 * 8)
    assert found["amax"] == mh * 2 + 8
    # the passes of a layer: 4.16e9 bytes, one device copy of which takes about 1 ms at 4.3e12 bytes a second
    assert sum(c.nbytes * (c.uses + c.within) for c in kernels.kernel_cases()) == pytest.approx(
        4.16e9, rel=0.01
    )


def test_the_table_is_what_a_layer_runs(monkeypatch):
    """Kernels of one FP8 step on the CPU by name and shape, each as often as the table says."""
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    named = {case.kernel for case in CASES.values() if case.uses}
    own = dispatch.kernels(CPU)

    def counted(name):
        def call(*given, **options):
            # act_bwd's and norm_bwd's first arrays are gradients of their input's shape
            seen[name, given[0].shape] += 1
            return getattr(own, name)(*given, **options)

        return call

    spied = SimpleNamespace(
        policy=own.policy,
        replays=None,
        recorder=None,
        **{name: counted(name) if name in named else getattr(own, name) for name in KERNELS},
    )
    monkeypatch.setattr(dispatch, "kernels", lambda device: spied)
    size = Layer(64, 128, 2, 32, 3)
    layer = fk.nn.TransformerLayer(
        *size[:3],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype="bfloat16",
        device="cpu",
    )
    x = fk.tensor(np.ones((32, 3, 64), np.float32), requires_grad=True, dtype="bfloat16", device="cpu")
    with fk.autocast(recipe=fk.recipe.DelayedScaling()):
        y = layer(x)
    y.backward(y.view)
    wanted: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for case in kernels.kernel_cases(size):
        if case.uses:
            wanted[case.kernel, (case.rows, case.columns)] += case.uses
    assert seen == wanted


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_is_right(name):
    assert kernels.check(CASES[name], dispatch.kernels(CPU), CPU) < 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_is_right_on_a_gpu(name):
    device = Device("cuda")
    row = kernels.measure(CASES[name], Setting(device, SMALL, 2, 2, 1))
    assert row["status"] == "ok"
    assert row["of_copy"] > 0


def ruined(name, ruin):
    """The CPU's kernels, but that of a case: after it ran, ``ruin(views of the call)``."""
    own = dispatch.kernels(CPU)
    kernel = CASES[name].kernel

    def call(*given):
        getattr(own, kernel)(*given)
        ruin(given)

    return SimpleNamespace(**{**vars(own), kernel: call})


RUINED = {
    "a wrong value": (
        "bias, residual",
        lambda given: given[3].numpy().__setitem__((0, 0), 900),
        "of the error bound",
    ),
    "a sum": (
        "column sums",
        lambda given: given[1].numpy().__imul__(np.float32(1.1).astype(given[1].numpy().dtype)),
        "of the error bound",
    ),
    "an element left out": (
        "bias, residual",
        lambda given: given[3].numpy().__setitem__((-1, -1), np.nan),
        "elements were not written",
    ),
    "a code left out": (
        "norm, cast both ways",
        lambda given: given[7].q_t.numpy().__setitem__((-1, -1), 0xFF),
        "were not written",
    ),
}


@pytest.mark.parametrize("what", RUINED)
def test_a_wrong_kernel_is_reported(what):
    name, ruin, said = RUINED[what]
    row = kernels.measure(CASES[name], QUICK, ruined(name, ruin))
    assert row["status"].startswith("WRONG")
    assert said in row["status"]
    assert row["gpu_ms"] > 0


def test_a_kernel_that_does_nothing_leaves_its_poison():
    idle = SimpleNamespace(**{**vars(dispatch.kernels(CPU)), "norm_fwd": lambda *given: None})
    assert "were not written" in kernels.measure(CASES["norm, bfloat16"], QUICK, idle)["status"]


def test_a_kernel_that_fails_is_reported():
    def broken(*given):
        raise RuntimeError("no such thing")

    row = kernels.measure(
        CASES["amax"], QUICK, SimpleNamespace(**{**vars(dispatch.kernels(CPU)), "amax": broken})
    )
    assert row["status"] == "failed: RuntimeError: no such thing"


def test_the_layers_sum_counts_each_kernel_as_often_as_it_runs():
    rows = [
        {"uses": 2, "gpu_ms": 3.0, "copy_ms": 2.0, "mib": 1.0},
        {"uses": 1, "gpu_ms": 4.0, "copy_ms": 4.0, "mib": 5.0},
        {"uses": 0, "gpu_ms": 99.0, "copy_ms": 1.0, "mib": 1.0},
    ]
    whole = kernels.in_layer(rows)
    assert (whole["gpu_ms"], whole["copy_ms"], whole["mib"]) == (10, 8, 7)
    assert whole["of_copy"] == 0.8
    assert kernels.in_layer([{"uses": 1, "case": "failed"}])["status"] == "left out: a kernel has no time"


def test_a_copy_copies_by_turns():
    """The first of two sets twice, the second once."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.arrays, "copy", lambda target, source: seen.append((target, source)))
        copy = kernels.copier(CPU, 100, 2)
        for _ in range(3):
            copy()
    assert [view.nbytes for pair in seen for view in pair] == [50] * 6
    assert seen[0] == seen[2] != seen[1]


def test_random_data_have_no_zero_rows_and_no_equal_ones():
    x = random.normal((600, 4096), 3)
    assert abs(float(x.mean())) < 0.01
    assert float(x.std()) == pytest.approx(1, abs=0.01)
    assert len(np.unique(x[:, 0])) == 600  # a pool of prime length: rows start at places of their own
    assert FULL.large.tokens * FULL.large.hidden > random._POOL


def test_memory_that_is_handed_out_again_is_poison():
    from fp8kit import arrays, formats

    random.poison_free(CPU, (4, 8), formats.bfloat16)
    assert np.isnan(random.poisoned((4, 8), formats.bfloat16, CPU).numpy().astype(np.float32)).all()
    assert arrays.empty((4, 8), formats.bfloat16, CPU).shape == (4, 8)
