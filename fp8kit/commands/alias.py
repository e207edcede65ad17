"""``fp8kit alias``: fp8kit_torch under the name transformer_engine, or as torchao's float8, in every process
of a Python environment, by one file in its site-packages, which is written and removed here."""

from __future__ import annotations

import argparse
import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from fp8kit.commands import FAILED, command
from fp8kit.errors import BackendError

FILE = "fp8kit_transformer_engine.pth"
# name -> the folder of fp8kit_torch that has its startup program
_FOLDERS = {"transformer_engine": "te_compat", "torchao": "torchao_compat"}
NAMES = tuple(_FOLDERS)


def add(commands: Any) -> None:
    """Register the subcommand; ``commands`` is what ``ArgumentParser.add_subparsers`` returned."""
    about = "make `import transformer_engine` give fp8kit_torch in every process of this environment"
    parser = command(commands, "alias", about, _alias)
    parser.add_argument("action", choices=("install", "remove", "status"), help="what to do")
    said = "which package it stands for: transformer_engine, or torchao, of which it is torchao.float8"
    parser.add_argument("name", nargs="?", choices=NAMES, default=NAMES[0], help=said)


def place(name: str = NAMES[0]) -> Path:
    """Returns the file that is written: Python reads the ``.pth`` files of site-packages when it starts."""
    return Path(sysconfig.get_path("purelib")) / FILE.replace(NAMES[0], name)


def startup(name: str = NAMES[0]) -> Path:
    """Returns the program that the file runs. BackendError where fp8kit_torch is not installed."""
    found = importlib.util.find_spec("fp8kit_torch")
    if found is None or not found.submodule_search_locations:
        raise BackendError("alias", "fp8kit_torch", "not installed", "the PyTorch frontend of fp8kit")
    return Path(found.submodule_search_locations[0]) / _FOLDERS[name] / "startup" / "sitecustomize.py"


def line(program: Path) -> str:
    """Returns what the file says: one line, as Python wants it; nothing happens once ``program`` is gone."""
    path = repr(str(program))
    code = f"compile(open({path}, encoding='utf-8').read(), {path}, 'exec')"
    return f"import os; os.path.exists({path}) and exec({code}, {{'__name__': 'fp8kit_alias'}})\n"


def _alias(options: argparse.Namespace) -> int:
    actions = {"install": _install, "remove": _remove, "status": _status}
    return actions[options.action](place(options.name), options.name)


def _install(file: Path, name: str) -> int:
    program, text = startup(name), line(startup(name))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BackendError("alias", "site-packages", error, "a folder that can be written") from None
    whole = {"torchao": "torchao.float8"}.get(name, name)
    own = "" if name == NAMES[0] else f" {name}"
    print(f"wrote {file}:\n  {text}`import {whole}` gives fp8kit_torch from now on")
    print(
        f"FP8KIT_ALIAS=0 leaves a process out; `fp8kit alias remove{own}` removes the file. It runs {program}"
    )
    _say_installed(name)
    return 0


def _remove(file: Path, name: str) -> int:
    if not file.exists():
        print(f"{file} is not there; nothing to remove")
        return 0
    try:
        file.unlink()
    except OSError as error:
        raise BackendError("alias", "site-packages", error, "a folder that can be written") from None
    print(f"removed {file}")
    return 0


def _status(file: Path, name: str) -> int:
    there = file.exists()
    current = there and file.read_text(encoding="utf-8", errors="replace") == line(startup(name))
    if not there:
        print(f"not installed: `fp8kit alias install {name}` would write {file}")
    else:
        print(f"installed: {file}" + ("" if current else "; it is of another fp8kit: install it anew"))
    print(f"for one command alone: PYTHONPATH={startup(name).parent} command")
    _say_installed(name)
    return 0 if current or not there else FAILED


def _say_installed(name: str) -> None:
    root = Path(sysconfig.get_path("purelib")) / name
    if name != NAMES[0]:
        if root.is_dir():
            print(f"{name} itself is installed in {root}; but for its float8 it stays as it is")
    elif root.is_dir():
        print(f"Transformer Engine itself is installed in {root}; where the alias is on, it is not used")
