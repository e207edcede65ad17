"""What frontends need to stand for another package: modules made of names, names that say why there is
nothing for them, and what ``importlib.metadata`` finds."""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from fp8kit import recipe as recipes
from fp8kit.errors import BackendError, UnsupportedError


class Distribution(importlib.metadata.Distribution):
    """What ``importlib.metadata`` says of a package that another one stands for."""

    def __init__(self, name: str, version: str, who: str) -> None:
        self._name, self._version, self._who = name, version, who

    def read_text(self, filename: str) -> str | None:
        """Returns the METADATA, and nothing else."""
        if filename != "METADATA":
            return None
        about = f"Name: {self._name}\nVersion: {self._version}\nSummary: {self._who} under another name\n"
        return f"Metadata-Version: 2.1\n{about}"

    def locate_file(self, path: Any) -> Any:
        """There are no files."""
        raise FileNotFoundError(f"{self._name}: {path}: this is {self._who} under another name")


class Finder:
    """What is put into ``sys.meta_path`` for a package that another one stands for. Subclasses have
    ``find_spec``, which refuses the names that are not here."""

    package: ClassVar[str] = "transformer-engine"
    version: ClassVar[str] = "2.20.0"  # whose names and defaults these are
    who: ClassVar[str]  # stands for it

    @classmethod
    def find_distributions(cls, context: Any) -> list[importlib.metadata.Distribution]:
        """Returns what ``importlib.metadata`` finds: one, when it is asked for."""
        asked = (context.name or "").replace("_", "-").lower()
        return [Distribution(asked, cls.version, cls.who)] if asked == cls.package else []


def ours(operation: str, *names: str) -> ModuleType | None:
    """Returns the module of the first of these ``names``, as a frontend has made it, or None. BackendError
    where another package was imported under one of them."""
    for name in names:
        if name in sys.modules and not hasattr(sys.modules[name], "__fp8kit__"):
            raise BackendError(operation, name, "imported already", "a call before its first import")
    return sys.modules.get(names[0])


def module(
    name: str,
    parts: Iterable[ModuleType] = (),
    path: Sequence[str] = (),
    wanted: Collection[str] | None = None,
) -> ModuleType:
    """Returns a module of that name, a package with those folders, with the public names of ``parts``: those
    of ``__all__``, and where there is none all, or those of ``wanted`` that are no modules."""
    made = ModuleType(name, f"fp8kit under the name {name}.")
    made.__spec__, made.__path__ = ModuleSpec(name, None, is_package=True), list(path)
    for part in parts:
        made.__dict__.setdefault("__file__", part.__file__)
        public = [
            key
            for key, value in vars(part).items()
            if (key[0] != "_" if wanted is None else key in wanted and not isinstance(value, ModuleType))
        ]
        for key in getattr(part, "__all__", public):
            setattr(made, key, getattr(part, key))
    return made


def install(modules: Mapping[str, ModuleType], finder: Any) -> None:
    """Make the ``modules`` importable; ``finder`` answers for other names before those that are there."""
    sys.meta_path.insert(0, finder)
    sys.modules.update(modules)


def recipe_module() -> ModuleType:
    """``transformer_engine.common.recipe``: the names of ``fp8kit.recipe``, those too that it loads at their
    first use."""
    made = module("transformer_engine.common.recipe", [recipes])
    for name in ("MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe"):
        setattr(made, name, getattr(recipes, name))
    return made


@cache
def public_names(path: Path) -> dict[str, tuple[str, ...]]:
    """Module -> its public names, of a file with a line ``module: name name`` for each, which further lines
    that begin with a blank continue; ``#`` begins a comment."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        names = line
        if not line.startswith(" "):
            name, _, names = line.partition(":")
        found[name] = (*found.get(name, ()), *names.split())
    return found


class _Refused(type):
    """Calls are an UnsupportedError with the reason, attributes an AttributeError with it."""

    why: str
    like: type | tuple[type, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.like) or super().__instancecheck__(instance)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{cls.__module__}.{cls.__qualname__} is not supported by fp8kit: {cls.why}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        of = f"{cls.__module__}.{cls.__qualname__}"
        raise AttributeError(f"{of} has no {name}: it is not supported by fp8kit: {cls.why}", name=name)


@cache
def refused(module: str, name: str, why: str, like: type | tuple[type, ...] = ()) -> type:
    """Returns what stands for a name that there is nothing for: a class that can be imported, subclassed and
    asked about with ``isinstance``, whose instances are those of ``like``, and that says ``why`` when it is
    called. The same class each time."""
    text = f"Not supported by fp8kit: {why}. A call raises UnsupportedError."
    return _Refused(name, (), {"__module__": module, "__doc__": text, "why": why, "like": like})


def is_refused(value: object) -> bool:
    """Whether it is what ``refused`` makes, or a subclass."""
    return isinstance(value, _Refused)


def program_runner(
    command: str, prepare: Callable[[], Any], startup: Path | None = None
) -> Callable[[Sequence[str]], int]:
    """The function that runs its arguments, ``script.py args...`` or ``-m module args...``, as Python itself
    would, after ``prepare``. Python processes that the program starts find ``sitecustomize`` in ``startup``.
    It returns 2, with a word on the usage of ``command``, where no program is named, or a file that is not
    there."""
    return partial(_run_program, command, prepare, startup)


def _run_program(
    command: str, prepare: Callable[[], Any], startup: Path | None, arguments: Sequence[str]
) -> int:
    is_module = list(arguments[:1]) == ["-m"]
    program = list(arguments[1:] if is_module else arguments)
    usage = f"usage: python -m {command} [-m module | script.py] args..."
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage)
        return 0
    if not program or not (is_module or Path(program[0]).exists()):
        print(f"{program[0]}: no such file\n{usage}" if program else usage, file=sys.stderr)
        return 2
    prepare()
    if startup is not None:
        known = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
        others = [place for place in known if place != str(startup)]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(startup), *others])
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")
    return 0
