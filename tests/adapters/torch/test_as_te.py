"""Programs written for Transformer Engine, with this frontend under its name. In processes of their own:
names are not given back."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap

import pytest

from tests.support.source import ROOT

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
    scaling = DelayedScaling(
        margin=0, interval=1, fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
    )
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
# what is tried, one after the other in one process: importing PyTorch takes longer than all of it
PARTS = {
    "too late is refused": """
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
        del sys.modules["transformer_engine"]
    """,
    "the call gives names and refuses what is not there": """
        import sys, importlib.util, importlib.metadata
        import fp8kit_torch
        early = [name for name in sys.modules if name.startswith("transformer_engine")]
        assert not early, "import alone must not do it"
        before = fp8kit_torch.__spec__
        assert fp8kit_torch.common.recipe is fp8kit_torch.recipe
        for name in ("GroupedTensor", "initialize_ub"):  # so that a program that asks takes its other path
            assert not hasattr(fp8kit_torch, name)
        whole = fp8kit_torch.as_transformer_engine()
        assert fp8kit_torch.as_transformer_engine() is whole
        assert importlib.util.find_spec("transformer_engine") is not None
        assert importlib.metadata.version("transformer-engine") == whole.__version__
        import transformer_engine.pytorch
        assert transformer_engine.pytorch is fp8kit_torch and fp8kit_torch.__spec__ is before
        import fp8kit
        assert transformer_engine.common.recipe.Float8CurrentScaling is fp8kit.recipe.Float8CurrentScaling
        te = transformer_engine.pytorch
        assert te.common is transformer_engine.common and te.recipe is fp8kit.recipe
        scaling = te.common.recipe.DelayedScaling(interval=1, amax_history_len=8)
        assert scaling == te.recipe.DelayedScaling(amax_history_len=8)
        from fp8kit.errors import RecipeError
        try:
            transformer_engine.common.recipe.DelayedScaling(interval=2)
        except RecipeError as error:
            assert "interval" in str(error)
        else:
            raise AssertionError("interval=2 was taken")
        for name in ("transformer_engine.jax", "transformer_engine.pytorch.moe", "transformer_engine.x"):
            try:
                __import__(name)
            except ModuleNotFoundError as error:
                assert "fp8kit_torch" in str(error), error
            else:
                raise AssertionError(name)
    """,
    "what a program sets in a module is there by either way": """
        import sys
        import fp8kit_torch as ft
        ft.as_transformer_engine()
        import transformer_engine
        for name, module in [*sys.modules.items()]:
            if not name.startswith("transformer_engine.pytorch."):
                continue
            own = transformer_engine
            for part in name.split(".")[1:]:
                own = getattr(own, part)
            assert own is module or callable(own), name  # newton_schulz is a function and a module
        transformer_engine.pytorch.attention._SplitAlongDim = transformer_engine.pytorch.utils.SplitAlongDim
        from transformer_engine.pytorch.attention import _SplitAlongDim
        transformer_engine.pytorch.attention._attention_backends["backend_selection_requires_update"] = True
        try:
            from transformer_engine.pytorch.attention import anything
        except ImportError:
            pass
        else:
            raise AssertionError("anything")
        try:
            import transformer_engine.pytorch.module.anything
        except ModuleNotFoundError as error:
            assert "fp8kit_torch" in str(error), error
    """,
    "names with an underscore that programs take": """
        import fp8kit_torch as ft
        ft.as_transformer_engine()
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
        from transformer_engine.pytorch.module.base import _2X_ACC_DGRAD, _2X_ACC_FPROP, _2X_ACC_WGRAD
        _attention_backends["backend_selection_requires_update"] = True
        assert "use_flash_attention" in _attention_backends
        assert (_2X_ACC_FPROP, _2X_ACC_DGRAD, _2X_ACC_WGRAD) == (False, True, True)
    """,
    "modules within, and what there is nothing for": """
        import fp8kit_torch as ft
        ft.as_transformer_engine()
        import torch
        import transformer_engine.pytorch as te
        import transformer_engine.pytorch.attention.rope as rope
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.float8_tensor import Float8Tensor
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
        from transformer_engine.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm
        from transformer_engine.pytorch.tensor import QuantizedTensor

        assert rope is te.attention.rope and rope.apply_rotary_pos_emb is ft.apply_rotary_pos_emb
        assert te.module.base.TransformerEngineBaseModule is TransformerEngineBaseModule
        assert te.module.Linear is ft.Linear
        from transformer_engine.pytorch.newton_schulz import newton_schulz
        from transformer_engine.pytorch.optimizers.newton_schulz import get_coefficients
        assert te.newton_schulz is newton_schulz and len(get_coefficients(3)) == 3
        assert te.attention.DotProductAttention is ft.DotProductAttention
        assert te.fp8.FP8GlobalStateManager is te.quantization.FP8GlobalStateManager is FP8GlobalStateManager
        assert te.float8_tensor.Float8Tensor is Float8Tensor is te.Float8Tensor
        assert issubclass(Float8Tensor, QuantizedTensor)
        assert te.cpp_extensions.general_gemm is general_gemm
        parts = te.ops.LayerNorm(32, device="cpu"), te.ops.Linear(32, 16, device="cpu"), te.ops.GELU()
        model = te.ops.Sequential(*parts)
        overflow, tensors = torch.zeros(1, dtype=torch.int), [[torch.full((3, 4), 2.0)]]
        norm, _ = multi_tensor_applier(multi_tensor_l2norm, overflow, tensors, False)
        assert abs(float(norm) ** 2 - 48) < 48 * 2.0**-22
        assert model(torch.ones(4, 32)).shape == (4, 16)
        context, sync = te.get_cpu_offload_context(enabled=False)
        with context, te.onnx_export(False):
            assert sync(model) is model
        te.mark_not_offload(model[1].weight)
        for module in (te, te.ops, te.tensor, te.module):
            try:
                module.nonsense
            except AttributeError as error:
                assert "nonsense" in str(error)
            else:
                raise AssertionError(module)
    """,
    # programs import more than they call; before, ``hasattr`` says what there is
    "what there is nothing for says why when it is called": """
        import importlib
        import torch
        import fp8kit_torch as ft
        ft.as_transformer_engine()
        import transformer_engine.pytorch as te
        for module, name, word in (
            ("transformer_engine.pytorch", "initialize_ub", "runs beside GEMMs"),
            ("transformer_engine.pytorch.ep", "ep_prepare", "all_to_all"),
            ("transformer_engine.pytorch.ops.fused", "ForwardLinearBiasAdd", "as they are written"),
            ("transformer_engine.pytorch.optimizers", "multi_tensor_adam_fp8", "master_weights=True"),
            ("transformer_engine_torch", "fused_attn_fwd", "C++ library"),
            ("transformer_engine.pytorch.ep", "EpBuffer", "all_to_all"),
        ):
            found = importlib.import_module(module)
            scope = {}
            exec(f"from {module} import {name}", scope)
            assert scope[name] is getattr(found, name)
            class Heir(scope[name]):
                pass
            assert not isinstance(torch.ones(1), scope[name])
            for called in (scope[name], Heir):
                try:
                    called(1, word=2)
                except NotImplementedError as said:
                    assert word in str(said), said
                else:
                    raise AssertionError(name)
            try:
                scope[name].attribute
            except AttributeError as said:
                assert word in str(said), said
            else:
                raise AssertionError(name)
        from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
        assert GroupedTensor is ft.tensor.GroupedTensor
        from transformer_engine.pytorch.attention.inference import KVCacheManager
        assert KVCacheManager(1).pre_step({"a": 2}) == {"a": 2}
        assert not hasattr(te, "nonsense")
        try:
            from transformer_engine.pytorch import nonsense
        except ImportError as said:
            assert "nonsense" in str(said)
        else:
            raise AssertionError("nonsense")
        from transformer_engine.common.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling
        for kind in (CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling):
            assert getattr(te, kind.__name__) is kind is getattr(te.recipe, kind.__name__)
        from transformer_engine.pytorch import fp8, attention
        assert attention.DotProductAttention is ft.DotProductAttention
    """,
    "every public name can be imported": """
        import importlib
        import fp8kit_torch as ft
        ft.as_transformer_engine()
        from fp8kit.aliases import is_refused
        from fp8kit_torch.te_compat.public import public_names, why_not
        there = 0
        for module, names in public_names().items():
            found = importlib.import_module(module)
            scope = {}
            if names:
                exec(f"from {module} import {', '.join(names)}", scope)
            for name in names:
                assert scope[name] is getattr(found, name), (module, name)
                if is_refused(scope[name]):
                    assert len(why_not(module, name)) > 10
                else:
                    there += 1
        assert there > 300
        named = {*sum(map(list, public_names().values()), [])}
        for name in ("router", "permutation", "jit", "cpp_extensions.gemm"):  # and nothing that is ours
            found = vars(importlib.import_module(f"transformer_engine.pytorch.{name}"))
            own = {key for key in found if not key.startswith("_")}
            assert own <= named, own - named
            assert not any(isinstance(found[key], type(importlib)) for key in own), own
        scope = {}
        exec("from transformer_engine.pytorch.utils import *", scope)
        assert scope["divide"](6, 3) == 2
    """,
    "what programs ask beside its public names": """
        from pathlib import Path
        import fp8kit_torch
        fp8kit_torch.as_transformer_engine()
        import transformer_engine
        import transformer_engine.pytorch as te
        from transformer_engine.debug import features
        from transformer_engine.pytorch import torch_version
        from transformer_engine.pytorch.attention import dot_product_attention, inference
        from transformer_engine.pytorch.torch_version import torch_version as within
        assert torch_version() >= (2, 0) and within is torch_version
        folder = Path(transformer_engine.__file__).parent / "debug" / "features"
        assert folder == Path(features.__file__).parent
        dot_product_attention._attention_backends["backend_selection_requires_update"] = True
        inner = dot_product_attention.dot_product_attention
        assert inner._attention_backends["backend_selection_requires_update"]
        for pages in (False, True):
            sizes = {"total_num_pages": 4, "page_size": 8} if pages else {}
            cache = te.InferenceParams(2, 16, is_paged=pages, device="cpu", **sizes)
            assert isinstance(cache.cache_manager, inference.PagedKVCacheManager) == pages
    """,
    "modules say where Transformer Engine has them": """
        import pickle
        import fp8kit_torch as ft
        ft.as_transformer_engine()
        import transformer_engine.pytorch as te
        for kind, module in (
            (te.Linear, "module.linear"),
            (te.LayerNormMLP, "module.layernorm_mlp"),
            (te.RMSNorm, "module.rmsnorm"),
            (te.DotProductAttention, "attention.dot_product_attention.dot_product_attention"),
            (te.MultiheadAttention, "attention.multi_head_attention"),
            (te.TransformerLayer, "transformer"),
            (te.ops.Linear, "ops.linear"),
            (te.ops.Bias, "ops.basic.bias"),
            (te.optimizers.FusedAdam, "optimizers.fused_adam"),
        ):
            assert kind.__module__ == f"transformer_engine.pytorch.{module}", kind.__module__
            assert pickle.loads(pickle.dumps(kind)) is kind
    """,
    "what is installed": """
        import importlib.metadata, importlib.util
        import fp8kit_torch as ft
        ft.as_transformer_engine()
        for name in ("transformer_engine", "transformer-engine"):
            assert importlib.metadata.version(name) == "2.20.0"
        assert importlib.util.find_spec("transformer_engine_torch") is not None
    """,
}
RUN = """
    import json, sys, traceback
    told = {}
    for name, code in json.loads(sys.argv[1]).items():
        try:
            exec(code, {"__name__": name})
        except BaseException:
            told[name] = traceback.format_exc()
    print(json.dumps(told))
"""


def python(*arguments):
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")]),
        "PYTHONWARNINGS": "error",
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )


@pytest.mark.programs
def test_an_unchanged_script_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM) + "import helper\n")
    (tmp_path / "helper.py").write_text("print('beside the script')\n")
    done = python("-m", "fp8kit_torch.as_transformer_engine", str(script), "--steps", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "arguments ['--steps', '5'] name __main__\nbeside the script\n"


@pytest.fixture(scope="module")
def told():
    """Part -> the traceback of what failed in it."""
    command = json.dumps({name: textwrap.dedent(code) for name, code in PARTS.items()})
    done = python("-c", textwrap.dedent(RUN), command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.programs
@pytest.mark.parametrize("part", PARTS)
def test_within_a_program(part, told):
    assert part not in told, told[part]


@pytest.mark.parametrize("arguments", [[], ["-m"], ["nosuch.py"]])
def test_without_a_program_the_usage_is_said(arguments, capsys):
    # the frontend has a function of that name
    assert importlib.import_module("fp8kit_torch.as_transformer_engine").main(arguments) == 2
    assert "usage" in capsys.readouterr().err
    assert "transformer_engine" not in sys.modules


def test_help_is_the_usage(capsys):
    assert importlib.import_module("fp8kit_torch.as_transformer_engine").main(["--help"]) == 0
    assert "usage" in capsys.readouterr().out
