"""The alias in processes that a program starts, or that a whole environment has (``fp8kit alias``)."""

from __future__ import annotations

import os
import textwrap

import pytest

from fp8kit import cli
from fp8kit.commands import alias
from tests.support.aliases import python, site
from tests.support.source import ROOT

__all__ = ["site"]
ASK = "import transformer_engine.pytorch as te; print(te.Linear.__module__)"


def test_status_install_remove(site, capsys):
    file = site / alias.FILE
    assert cli.main(["alias", "status"]) == 0
    said = capsys.readouterr().out
    for word in (str(file), "not installed", "PYTHONPATH="):
        assert word in said
    assert cli.main(["alias", "install"]) == 0
    assert str(file) in capsys.readouterr().out
    assert [p.name for p in site.iterdir()] == [alias.FILE]
    assert cli.main(["alias", "status"]) == 0
    assert "installed" in capsys.readouterr().out
    assert cli.main(["alias", "remove"]) == 0
    assert "removed" in capsys.readouterr().out
    assert not list(site.iterdir())
    assert cli.main(["alias", "remove"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_what_was_installed_by_another_fp8kit_is_said(site, capsys):
    (site / alias.FILE).write_text("import os\n")
    assert cli.main(["alias", "status"]) == 1
    assert "install it anew" in capsys.readouterr().out


def test_an_installed_transformer_engine_is_named(site, capsys):
    (site / "transformer_engine").mkdir()
    cli.main(["alias", "install"])
    assert "is not used" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(alias.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    assert cli.main(["alias", "install"]) == 1
    assert "a folder that can be written" in capsys.readouterr().err


def run_line(code, line=None, **variables):
    """``code`` in a process that has read the file's line first, as ``site`` does."""
    line = alias.line(alias.startup()) if line is None else line
    return python("-c", f"{line}\n{textwrap.dedent(code)}", **variables)


def test_the_line_imports_nothing_by_itself():
    done = run_line("import sys; print([m for m in ('torch', 'fp8kit', 'numpy') if m in sys.modules])")
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_the_line_does_nothing_where_it_is_told_so_or_fp8kit_is_gone(tmp_path):
    code = """
        import importlib.util
        print(importlib.util.find_spec("transformer_engine"))
    """
    assert run_line(code, FP8KIT_ALIAS="0").stdout == "None\n"
    assert run_line(code, alias.line(tmp_path / "gone.py")).stdout == "None\n"


@pytest.mark.programs
def test_the_first_import_gives_the_frontend():
    code = """
        import importlib.metadata, importlib.util, sys
        assert importlib.util.find_spec("transformer_engine") is not None
        assert "torch" not in sys.modules
        assert importlib.metadata.version("transformer_engine") == "2.20.0"
        import transformer_engine_torch as tex
        import transformer_engine, fp8kit_torch
        from transformer_engine.pytorch.constants import TE_DType
        assert transformer_engine.pytorch is fp8kit_torch and tex.DType in map(type, TE_DType.values())
        print("done")
    """
    done = run_line(code)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.programs
def test_children_of_the_runner_have_it_and_other_startup_code_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    script = tmp_path / "parent.py"
    script.write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ASK!r}], check=True)\n"
    )
    places = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), str(tmp_path)])
    done = python("-m", "fp8kit_torch.as_transformer_engine", str(script), PYTHONPATH=places)
    assert done.stdout == "mine\nmine\ntransformer_engine.pytorch.module.linear\n", done.stderr


@pytest.mark.programs
def test_workers_that_are_spawned_have_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import transformer_engine.pytorch as te

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return te.Linear(16, 16, device="cpu").weight.new_full((2,), float(i))

        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(
                Rows(), batch_size=2, num_workers=1, multiprocessing_context="spawn"
            )
            print([float(batch.sum()) for batch in loader])
        """)
    )
    done = python("-m", "fp8kit_torch.as_transformer_engine", str(script), PYTHONWARNINGS="default")
    assert done.stdout == "[2.0, 10.0]\n", done.stderr
