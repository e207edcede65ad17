"""``as_torchao``: programs written for ``torchao.float8`` import this frontend under that name."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fp8kit.errors import BackendError

STANDS_FOR = "0.18.0"  # the torchao whose names and defaults these are
_HERE = "fp8kit_torch.torchao_compat"
# module of torchao -> modules here that have its names
_SAME = {
    "torchao.float8": "config training",
    "torchao.float8.config": "config",
    "torchao.float8.float8_linear": "config training",
    "torchao.float8.float8_linear_utils": "config training",
    "torchao.float8.fsdp_utils": "training",
    "torchao.float8.float8_tensor_parallel": "tensor_parallel",
}


class _Distribution(importlib.metadata.Distribution):
    """What ``importlib.metadata`` says of "torchao"."""

    def read_text(self, filename: str) -> str | None:
        """The METADATA, and nothing else."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: torchao\nVersion: {STANDS_FOR}\nSummary: fp8kit_torch\n"

    def locate_file(self, path: Any) -> Any:
        """There are no files."""
        raise FileNotFoundError(f"torchao: {path}: this is fp8kit_torch under another name")


def distributions() -> list[importlib.metadata.Distribution]:
    """What ``importlib.metadata`` finds as "torchao" where none is installed."""
    return [_Distribution()]


class _Finder:
    """Answers for ``torchao`` where none is installed: there is ``torchao.float8``, and nothing else."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        """None for other packages; ModuleNotFoundError for what is not here."""
        if name.partition(".")[0] == "torchao":
            why = "fp8kit_torch, which stands for torchao.float8 here, does not have it"
            raise ModuleNotFoundError(f"{name}: {why}; an installed torchao does", name=name)

    def find_distributions(self, context: Any) -> Iterable[importlib.metadata.Distribution]:
        """The one distribution, when it is asked for."""
        return distributions() if (context.name or "").lower() == "torchao" else []


def _module(name: str, parts: Iterable[str], path: list[str]) -> ModuleType:
    made = ModuleType(name, f"fp8kit under the name {name}.")
    made.__spec__, made.__path__ = ModuleSpec(name, None, is_package=True), path
    made.__fp8kit__ = True  # type: ignore[attr-defined]
    for part in parts:
        own = importlib.import_module(f"{_HERE}.{part}")
        made.__dict__.setdefault("__file__", own.__file__)
        for key in own.__all__:
            setattr(made, key, getattr(own, key))
    return made


def as_torchao() -> ModuleType:
    """Make ``torchao.float8`` a name of this frontend in this process: ``convert_to_float8_training``,
    ``Float8LinearConfig`` and what they need, the modules ``config``, ``float8_linear``,
    ``float8_linear_utils``, ``fsdp_utils`` and
    ``float8_tensor_parallel`` among it. Returns ``torchao``. Calling it again does nothing.

    The rest of an installed torchao stays as it is; where none is installed there is ``torchao.float8``
    alone. BackendError where ``torchao.float8`` was imported already. ``fp8kit alias install torchao`` does
    the same for every process of an environment.
    """
    known = sys.modules.get("torchao.float8")
    if getattr(known, "__fp8kit__", False):
        return sys.modules["torchao"]
    if known is not None:
        raise BackendError(
            "as_torchao", "torchao.float8", "imported already", "a call before its first import"
        )
    real = importlib.util.find_spec("torchao")
    folders = [f"{place}/float8" for place in (real.submodule_search_locations or [])] if real else []
    made = {name: _module(name, parts.split(), folders) for name, parts in _SAME.items()}
    top = made["torchao.float8"]
    for name, module in made.items():
        if module is not top:
            setattr(top, name.rpartition(".")[2], module)
    sys.modules.update(made)
    if real is not None:
        whole = importlib.import_module(real.name)  # what is installed
    else:
        whole = sys.modules["torchao"] = _module("torchao", (), [])
        whole.__version__ = STANDS_FOR  # type: ignore[attr-defined]
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    whole.float8 = top  # type: ignore[attr-defined]
    return whole
