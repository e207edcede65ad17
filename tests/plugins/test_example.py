"""The example plugin, installed by pip and used from a process that knows of it by its entry point alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plugin import Run

STEP = """
import json
import numpy as np
import fp8kit as fk
from fp8kit.plugins import get_discovered_plugin
from fp8kit.testing import relative_error

def step(recipe):
    fk.manual_seed(0)
    mlp = fk.nn.LayerNormMLP(32, 64, normalization="RMSNorm", device="cpu")
    model = fk.nn.Sequential(mlp, fk.nn.RMSNorm(32, device="cpu"))
    optimizer = fk.optim.AdamW(model.parameters(), lr=1e-2)
    x = fk.tensor(np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32), device="cpu")
    with fk.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    (x + y).backward(y.detach())
    optimizer.step()
    return [y.numpy()] + [p.numpy() for p in model.parameters()]

got = [step(None), step(fk.recipe.Float8CurrentScaling())]
import fp8kit_numba
calls = dict(fp8kit_numba.CALLS)
with fk.use_backend("reference"):
    want = [step(None), step(fk.recipe.Float8CurrentScaling())]
assert dict(fp8kit_numba.CALLS) == calls, "the plugin ran where the reference alone may"
with fk.use_backend("numba"):
    again = step(None)
assert all(np.array_equal(a, b) for a, b in zip(again, got[0], strict=True))
# float32 sums in another order; in FP8 a last bit may take the neighbouring code, half a step of E4M3 away
error = [
    max(relative_error(a, b.astype(np.float64)) for a, b in zip(*pair, strict=True))
    for pair in zip(got, want, strict=True)
]
print(json.dumps({"calls": calls, "error": error, "plugins": get_discovered_plugin()}))
"""


@pytest.mark.programs
def test_a_training_step_uses_it(installed: Path, python: Run) -> None:
    import json

    done = python("-c", STEP, paths=(installed,))
    said = json.loads(done.stdout)
    assert said["plugins"] == [["numba", "fp8kit-numba 1.0", True, 5, ""]]
    assert set(said["calls"]) == {"add", "amax", "norm_fwd", "sum_rows"}
    assert said["error"][0] < 64 * 2.0**-24 * 8
    assert said["error"][1] < 2.0**-4
    # what falls through is said once, with the reason
    assert (
        done.stderr.count(
            "cannot take the call (RMSNorm into a high-precision array only); reference.norm_fwd is asked"
        )
        == 1
    )


@pytest.mark.programs
def test_it_is_listed_and_explained(installed: Path, python: Run) -> None:
    said = python("-m", "fp8kit", "plugins", "list", paths=(installed,)).stdout
    assert "numba                                 fp8kit-numba 1.0            5 implementations" in said
    assert "> numba.add " in said
    assert (
        "reference.add                           reference           50  is asked where numba.add cannot "
        "take a call" in said
    )
    assert "reference.gemm " in said
    assert "cuda.gemm " in said
    said = python(
        "-m",
        "fp8kit",
        "plugins",
        "explain",
        "add",
        "--device",
        "cpu",
        paths=(installed,),
        FP8KIT_PREFER="reference",
    ).stdout
    assert said.splitlines()[1].split()[:2] == [">", "reference.add"]
    assert (
        "numba.add                               default            150  is asked where reference.add cannot "
        "take a call" in said
    )


@pytest.mark.programs
def test_it_keeps_the_contract(installed: Path, python: Run) -> None:
    said = python("-m", "fp8kit", "plugins", "check", "numba", paths=(installed,)).stdout
    assert "5 of 5 keep the contract" in said
    assert "numba.column_sum_workspace (column_sum_workspace) on cpu: keeps the contract" in said
    assert "declined: one amax for the whole array only" in said
