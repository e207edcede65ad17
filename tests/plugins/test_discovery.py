"""Plugins that are found, and plugins that fail: each is all or nothing, and none keeps the others from
working."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8kit.plugins import KERNELS, OpManager, OpRegistry, discover_plugin
from tests.support.plugin import Run

GOOD = """
from fp8kit.plugins import Kind, OpImpl

def add(a, b, out, stream):
    out.numpy()[...] = 7

def {function}(registry):
    registry.register_impl(OpImpl("add", "{name}.add", Kind.DEFAULT, add))
"""
FAULTS = {
    "missing": "import a_package_that_is_not_there\n",
    "halfway": GOOD.format(function="register", name="halfway") + "    raise ValueError('in the middle')\n",
    "twice": GOOD.format(function="register", name="twice")
    + "    register_once(registry)\nregister_once = lambda r: r.register_many(\n"
    "    [OpImpl('add', 'twice.add', Kind.DEFAULT, add)])\n",
    "misfit": GOOD.format(function="register", name="misfit").replace("out, stream", "out"),
    "unknown": GOOD.format(function="register", name="unknown").replace('"add", "', '"rmsnorm_fwd", "'),
    "posing": GOOD.format(function="register", name="reference"),
    "empty": "x = 1\n",
    "leaving": "raise SystemExit(3)\n",
}
SAID = {
    "missing": "ModuleNotFoundError: No module named 'a_package_that_is_not_there'",
    "halfway": "ValueError: in the middle",
    "twice": "impl_id: got 'twice.add', expected one not yet registered for add",
    "misfit": "fn: got misfit.add(a, b, out), expected the contract's add(a, b, out, stream)",
    "unknown": "op_name: got 'rmsnorm_fwd', expected a kernel of",
    "posing": "got impl_id 'reference.add', expected another engine than",
    "empty": "expected a module with register or te_fl_register(registry)",
    "leaving": "SystemExit: 3",
}


def write(folder: Path, **modules: str) -> None:
    for name, text in modules.items():
        (folder / f"plugin_{name}.py").write_text(text)


def test_what_fails_is_reported_and_the_rest_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        tmp_path,
        good=GOOD.format(function="register", name="good"),
        tefl=GOOD.format(function="te_fl_register", name="tefl"),
        **FAULTS,
    )
    names = ["good", *FAULTS, "tefl"]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FP8KIT_PLUGIN_MODULES", ", ".join(f"plugin_{name}" for name in [*names, "good"]))
    registry = OpRegistry()
    named = [plugin for plugin in discover_plugin(registry) if plugin.source == "FP8KIT_PLUGIN_MODULES"]
    found = {plugin.name.removeprefix("plugin_"): plugin for plugin in named}
    assert list(found) == names
    assert [name for name, plugin in found.items() if plugin.ok] == ["good", "tefl"]
    assert {impl.engine for impl in registry.get_implementations("add")} >= {"good", "tefl"}
    assert not {impl.engine for impl in registry.get_implementations("add")} & {*FAULTS, "reference"}
    for name, said in SAID.items():
        assert said in found[name].error, found[name].error
        assert "Traceback (most recent call last)" in found[name].error
        assert any(
            f"plugin plugin_{name} (FP8KIT_PLUGIN_MODULES) failed and is left out" in message
            for message in caplog.messages
        )


def test_a_plugin_that_is_named_twice_is_registered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        once=GOOD.format(function="register", name="once") + "also = register\n",
        alias="from plugin_once import register\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "plugin_once,plugin_alias")
    found = [plugin for plugin in discover_plugin(OpRegistry()) if plugin.source == "FP8KIT_PLUGIN_MODULES"]
    assert [(plugin.name, plugin.ok, plugin.implementations) for plugin in found] == [
        ("plugin_once", True, 1),
        ("plugin_alias", True, 0),
    ]


def test_a_plugin_may_compute_while_it_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GOOD.format(function="register", name="early") + (
        "    import numpy as np, fp8kit as fk\n"
        "    assert (fk.tensor(np.ones(2, np.float32), device='cpu') + "
        "fk.tensor(np.ones(2, np.float32), device='cpu')).numpy()[0] == 2\n"
    )
    write(tmp_path, early=text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FP8KIT_PLUGIN_MODULES", "plugin_early")
    manager = OpManager()
    assert [plugin.ok for plugin in manager.discovered() if plugin.name == "plugin_early"] == [True]
    assert manager.get_selected_impl_id("add") == "early.add"
    assert len(manager.registry.list_operators()) == len(KERNELS)


COMPUTING = (
    GOOD.format(function="register", name="busy")
    + """
import numpy as np
import fp8kit as fk
{wait}
ones = np.ones(2, np.float32)
while_imported = (fk.tensor(ones, device="cpu") + fk.tensor(ones, device="cpu")).numpy().tolist()
"""
)
MODULE_FIRST = """
import plugin_busy, numpy as np, fp8kit as fk
x = fk.tensor(np.ones(2, np.float32), device="cpu")
print(plugin_busy.while_imported, (x + x).numpy().tolist())
"""
TWO_THREADS = """
import faulthandler, threading
faulthandler.dump_traceback_later(60, exit=True)
import numpy as np, fp8kit as fk
started, asked = threading.Event(), threading.Event()
fk.started, fk.asked = started, asked
x = fk.tensor(np.ones(2, np.float32), device="cpu")
importer = threading.Thread(target=lambda: __import__("plugin_busy"))
importer.start()
started.wait()
threading.Timer(0.3, asked.set).start()  # by then the line below waits for the import
print((x + x).numpy().tolist())
importer.join()
import plugin_busy
print(plugin_busy.while_imported)
"""


def test_a_module_that_computes_while_it_is_imported_does_so_without_plugins(
    tmp_path: Path, python: Run
) -> None:
    write(tmp_path, busy=COMPUTING.format(wait=""))
    done = python("-c", MODULE_FIRST, paths=(tmp_path,), FP8KIT_PLUGIN_MODULES="plugin_busy")
    assert (done.stdout, done.stderr) == ("[2.0, 2.0] [7.0, 7.0]\n", "")


def test_threads_that_import_and_look_for_plugins_do_not_wait_for_each_other(
    tmp_path: Path, python: Run
) -> None:
    write(tmp_path, busy=COMPUTING.format(wait="fk.started.set(); fk.asked.wait()"))
    done = python("-c", TWO_THREADS, paths=(tmp_path,), FP8KIT_PLUGIN_MODULES="plugin_busy")
    assert (done.stdout, done.stderr) == ("[7.0, 7.0]\n[2.0, 2.0]\n", "")


@pytest.mark.programs
def test_the_list_shows_the_traceback_and_the_process_goes_on(tmp_path: Path, python: Run) -> None:
    write(tmp_path, good=GOOD.format(function="register", name="good"), missing=FAULTS["missing"])
    variables = {"FP8KIT_PLUGIN_MODULES": "plugin_missing,plugin_good"}
    done = python("-m", "fp8kit", "plugins", "list", "--device", "cpu", paths=(tmp_path,), **variables)
    assert "plugin_missing                        FP8KIT_PLUGIN_MODULES       FAILED, left out" in done.stdout
    assert "    Traceback (most recent call last):" in done.stdout
    assert "No module named 'a_package_that_is_not_there'" in done.stdout
    assert (
        "plugin_good                           FP8KIT_PLUGIN_MODULES       1 implementation\n" in done.stdout
    )
    assert "> good.add" in done.stdout
    assert done.stderr.count("failed and is left out") == 1
    code = (
        "import numpy as np, fp8kit as fk; x = fk.tensor(np.ones(2, np.float32), device='cpu'); "
        "print((x + x).numpy()); print(fk.quantize(np.ones((2, 2), np.float32), fk.E4M3).dequantize())"
    )
    assert python("-c", code, paths=(tmp_path,), **variables).stdout == "[7. 7.]\n[[1. 1.]\n [1. 1.]]\n"


@pytest.mark.programs
def test_the_log_level_shows_what_is_found(tmp_path: Path, python: Run) -> None:
    write(tmp_path, good=GOOD.format(function="register", name="good"))
    code = "from fp8kit.backends import dispatch; from fp8kit.arrays import CPU; dispatch.kernels(CPU)"
    variables = {"FP8KIT_PLUGIN_MODULES": "plugin_good"}
    said = python("-c", code, paths=(tmp_path,), FP8KIT_LOG_LEVEL="DEBUG", **variables).stderr
    assert "fp8kit INFO: plugin plugin_good (FP8KIT_PLUGIN_MODULES): 1 implementations" in said
    assert "fp8kit DEBUG: add on cpu: good.add, reference.add" in said
    assert python("-c", code, paths=(tmp_path,), **variables).stderr == ""
    wrong = python("-m", "fp8kit", "plugins", "list", check=False, FP8KIT_LOG_LEVEL="LOUD")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "FP8KIT_LOG_LEVEL: got 'LOUD'" in wrong.stderr
