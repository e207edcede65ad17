"""Programs written for Transformer Engine's JAX package, with this frontend under its name. In processes of
their own: names are not given back."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types

import fp8kit_jax
import pytest

from fp8kit.errors import BackendError
from tests.support.source import ROOT

FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def python(*arguments, warnings="error"):
    known = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    env = os.environ | {
        "PYTHONPATH": known,
        "PYTHONWARNINGS": warnings,
        "XLA_FLAGS": FLAGS,
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_names():
    """Every public name can be imported; what there is nothing for says why when it is called."""
    code = """
        import sys
        sys.modules["torch"] = None  # is not needed
        import fp8kit_jax
        assert "flax" not in sys.modules and "transformer_engine" not in sys.modules
        whole = fp8kit_jax.as_transformer_engine()
        assert fp8kit_jax.as_transformer_engine() is whole
        import importlib, importlib.metadata, importlib.util
        from fp8kit.aliases import is_refused
        from fp8kit.errors import UnsupportedError
        from fp8kit_jax.te_compat.names import public_names, why_not
        there = refused = 0
        for module, names in public_names().items():
            scope = {}
            if names:
                exec(f"from {module} import {', '.join(names)}", scope)
            for name in names:
                assert scope[name] is getattr(importlib.import_module(module), name), (module, name)
                if not is_refused(scope[name]):
                    there += 1
                    continue
                refused += 1
                try:
                    scope[name]()
                except UnsupportedError as error:
                    assert why_not(module) in str(error) and len(why_not(module)) > 10, (module, name)
                else:
                    raise AssertionError(name)
        assert there > 120 and refused > 60, (there, refused)
        import transformer_engine
        import transformer_engine.jax as te
        from transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling
        assert te is transformer_engine.jax and te.flax.module.DenseGeneral is te.flax.DenseGeneral
        assert te.dense.dense.__module__.startswith("fp8kit_jax")
        import transformer_engine.jax.cpp_extensions as tex
        from transformer_engine.jax.cpp_extensions.gemm import CollectiveOp, gemm
        assert tex.gemm is gemm and callable(gemm) and te.dense.__name__.endswith("jax.dense")
        assert te.MeshResource is fp8kit_jax.MeshResource
        assert importlib.metadata.version("transformer-engine") == whole.__version__ == "2.20.0"
        assert importlib.util.find_spec("transformer_engine") is not None
        for name, said in (
            ("transformer_engine.jax.nothing", "fp8kit_jax"),
            ("transformer_engine_jax.nothing", "fp8kit_jax"),
            ("transformer_engine.pytorch", "fp8kit_torch.as_transformer_engine()"),
        ):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert said in str(error)
            else:
                raise AssertionError(name)
        print("names")
    """
    assert python("-c", textwrap.dedent(code)) == "names"


def test_too_late_is_refused(monkeypatch):
    """It leaves nothing behind: here in the tests' own process."""
    other = types.ModuleType("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", other)
    found = dict(sys.modules), list(sys.meta_path)
    with pytest.raises(BackendError, match="imported already"):
        fp8kit_jax.as_transformer_engine()
    assert (dict(sys.modules), list(sys.meta_path)) == found


@pytest.mark.programs
@pytest.mark.parametrize("order", [("jax", "torch"), ("torch", "jax")], ids="-".join)
def test_beside_pytorchs(order):
    code = f"""
        import importlib
        for name in {order!r}:
            whole = importlib.import_module(f"fp8kit_{{name}}").as_transformer_engine()
        import fp8kit_torch, transformer_engine.jax, transformer_engine.pytorch
        from transformer_engine.common.recipe import DelayedScaling
        from transformer_engine.jax.flax.module import TransformerEngineBase
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
        assert transformer_engine.pytorch is fp8kit_torch and transformer_engine is whole
        assert fp8kit_torch.as_transformer_engine() is whole
        assert isinstance(DelayedScaling(interval=1), fp8kit_torch.recipe.DelayedScaling)
        print("both")
    """
    assert python("-c", textwrap.dedent(code)) == "both"


PROGRAMS = {
    "images DelayedScaling": "trained DelayedScaling",
    "images Float8CurrentScaling": "trained Float8CurrentScaling",
    "images MXFP8BlockScaling": "trained MXFP8BlockScaling",
    "text": "trained on 4 devices",
    "quantization": "quantised by 4 names",
}


@pytest.mark.programs
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program):
    name, *arguments = program.split()
    script = ROOT / "tests" / "adapters" / "jax" / "te_programs" / f"{name}.py"
    # JAX's of ``with mesh:``, which such programs have
    own = {"warnings": "error,default::DeprecationWarning"}
    assert (
        python("-m", "fp8kit_jax.as_transformer_engine", str(script), *arguments, **own) == PROGRAMS[program]
    )


@pytest.mark.parametrize("arguments", [[], ["-m"], ["nothing.py"]])
def test_usage(arguments, capsys):
    import importlib

    assert importlib.import_module("fp8kit_jax.as_transformer_engine").main(arguments) == 2
    assert "usage: python -m fp8kit_jax.as_transformer_engine" in capsys.readouterr().err
