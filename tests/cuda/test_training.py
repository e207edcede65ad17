"""Training on a GPU: the same bits twice in deterministic mode, and the CPU engine's losses within what the
precision explains."""

from __future__ import annotations

import io

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.models import text
from fp8kit.models.presets import preset
from fp8kit.models.resume import Run
from fp8kit.models.train import fp8_recipe, train
from fp8kit.recipe import Float8CurrentScaling, Recipe
from fp8kit.testing import assert_close, assert_same_bits

pytestmark = pytest.mark.gpu

GPU = Device("cuda", 0)
RECIPES = [None, "delayed", Float8CurrentScaling()]


def run(recipe: Recipe | str | None, device: Device = GPU, steps: int = 6) -> Run:
    size = preset("tiny").with_steps(steps)
    corpus = text.standard_library()
    return train(
        size, corpus, fp8_recipe(size) if recipe == "delayed" else recipe, "run", device, 0, io.StringIO()
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=["bf16", "delayed", "current"])
def test_deterministic_mode_gives_the_same_bits_twice(recipe: Recipe | str | None) -> None:
    with fk.deterministic():
        first, second = run(recipe), run(recipe)
    assert first.losses == second.losses
    for (name, a), (_, b) in zip(
        first.model.named_parameters(), second.model.named_parameters(), strict=True
    ):
        assert_same_bits(name, a.numpy(), b.numpy())
    assert first.statistics == second.statistics


@pytest.mark.parametrize("recipe", RECIPES, ids=["bf16", "delayed", "current"])
def test_losses_are_those_of_the_cpu_engine(recipe: Recipe | str | None) -> None:
    """The CPU trains in float32, the GPU in bfloat16 (2**-8 a rounding, some ten of them down the residual
    stream of two layers): 4 %."""
    want = np.array(run(recipe, arrays.CPU).losses)
    assert_close("losses", run(recipe).losses, want, "float64", 0.04 * np.abs(want))


def test_use_backend_forbids_the_other_device() -> None:
    x = fk.tensor(np.ones((4, 4), np.float32), device="cuda")
    with fk.use_backend("reference"), pytest.raises(fk.BackendError, match="use_backend"):
        x + x
    with fk.use_backend("reference"):
        assert fk.nn.Linear(4, 4).weight.device == arrays.CPU
