"""``as_torchao``: programs written for ``torchao.float8`` import this frontend under that name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from fp8kit import aliases

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


class Finder(aliases.Finder):
    """Answers for ``torchao`` where none is installed: there is ``torchao.float8``, and nothing else."""

    package, version, who = "torchao", "0.18.0", "fp8kit_torch"

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        """None for other packages; ModuleNotFoundError for what is not here."""
        if name.partition(".")[0] == "torchao":
            why = "fp8kit_torch, which stands for torchao.float8 here, does not have it"
            raise ModuleNotFoundError(f"{name}: {why}; an installed torchao does", name=name)


def _module(name: str, parts: Iterable[str], path: list[str]) -> ModuleType:
    made = aliases.module(name, (importlib.import_module(f"{_HERE}.{part}") for part in parts), path)
    made.__fp8kit__ = True  # type: ignore[attr-defined]
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
    if aliases.ours("as_torchao", "torchao.float8") is not None:
        return sys.modules["torchao"]
    real = importlib.util.find_spec("torchao")
    folders = [f"{place}/float8" for place in (real.submodule_search_locations or [])] if real else []
    made = {name: _module(name, parts.split(), folders) for name, parts in _SAME.items()}
    top = made["torchao.float8"]
    for name, module in made.items():
        if module is not top:
            setattr(top, name.rpartition(".")[2], module)
    if real is not None:
        sys.modules.update(made)
        whole = importlib.import_module(real.name)  # what is installed
    else:
        whole = _module("torchao", (), [])
        whole.__version__ = Finder.version  # type: ignore[attr-defined]
        aliases.install({"torchao": whole, **made}, Finder())
    whole.float8 = top  # type: ignore[attr-defined]
    return whole
