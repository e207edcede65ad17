"""Programs written for Transformer Engine, with this door under its name. Each in a process of its own: names are not given back."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.house.source import ROOT

PROGRAM = """
    import sys
    import torch
    import transformer_engine
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch import Linear, fp8_autocast
    from transformer_engine.pytorch.fp8 import check_fp8_support
    from transformer_engine.pytorch.optimizers import FusedAdam
    from transformer_engine.pytorch.quantization import fp8_model_init, quantized_model_init
    from transformer_engine.pytorch.tensor import QuantizedTensor

    torch.manual_seed(0)
    layer = te.Linear(32, 16, params_dtype=torch.float32, device="cpu")
    assert isinstance(layer, Linear) and transformer_engine.pytorch is te
    scaling = DelayedScaling(margin=0, interval=1, fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    assert isinstance(scaling, recipe.DelayedScaling) and scaling.amax_history_len == 16
    opt = FusedAdam(layer.parameters(), lr=1e-2)
    x = torch.randn(16, 32)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        with te.fp8_autocast(enabled=check_fp8_support()[0], fp8_recipe=scaling):
            loss = (layer(x) - 1).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    assert float(layer.fp8_meta["scaling_fwd"].scale[0]) != 1.0
    print("arguments", sys.argv[1:], "name", __name__)
"""


def python(*arguments, code=None):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")]), "PYTHONWARNINGS": "error"}
    command = [sys.executable, *arguments, *(["-c", textwrap.dedent(code)] if code else [])]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


def test_an_unchanged_script_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM) + "import helper\n")
    (tmp_path / "helper.py").write_text("print('beside the script')\n")
    done = python("-m", "fp8kit_torch.as_transformer_engine", str(script), "--steps", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "arguments ['--steps', '5'] name __main__\nbeside the script\n"


def test_the_call_gives_names_and_refuses_what_is_not_there():
    done = python(code="""
        import sys, importlib.util, importlib.metadata
        import fp8kit_torch
        assert not any(name.startswith("transformer_engine") for name in sys.modules), "import alone must not do it"
        before = fp8kit_torch.__spec__
        whole = fp8kit_torch.as_transformer_engine()
        assert fp8kit_torch.as_transformer_engine() is whole
        assert importlib.util.find_spec("transformer_engine") is not None
        assert importlib.metadata.version("transformer-engine") == whole.__version__
        import transformer_engine.pytorch
        assert transformer_engine.pytorch is fp8kit_torch and fp8kit_torch.__spec__ is before
        import fp8kit
        assert transformer_engine.common.recipe.Float8CurrentScaling is fp8kit.recipe.Float8CurrentScaling
        from fp8kit.errors import RecipeError
        try:
            transformer_engine.common.recipe.DelayedScaling(interval=2)
        except RecipeError as error:
            assert "interval" in str(error)
        else:
            raise AssertionError("interval=2 was taken")
        for name in ("transformer_engine.jax", "transformer_engine.pytorch.moe", "transformer_engine_torch"):
            try:
                __import__(name)
            except ModuleNotFoundError as error:
                assert "fp8kit_torch" in str(error), error
            else:
                raise AssertionError(name)
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [(), ("-m",)])
def test_without_a_program_the_usage_is_said(arguments):
    done = python("-m", "fp8kit_torch.as_transformer_engine", *arguments)
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_too_late_is_refused():
    done = python(code="""
        import sys, types
        sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
        import fp8kit_torch
        from fp8kit.errors import BackendError
        try:
            fp8kit_torch.as_transformer_engine()
        except BackendError as error:
            assert "imported already" in str(error)
        else:
            raise AssertionError("taken over")
    """)
    assert done.returncode == 0, done.stderr
