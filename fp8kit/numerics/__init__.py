"""The numerics laboratory: what low precision does to the tensors of a training.

``tensor_statistics`` says it of one array of any library. ``statistics`` has the parts that it is made of:
which statistics are wanted (``request``), sums on the device (``collect``), sums of several micro-batches
and ranks (``merge``), and numbers (``values``). ``capture`` keeps the operands of a model's GEMMs, which
``fp8kit recipes compare`` casts by every recipe. ``plots`` draws a log, ``run_folder``, ``ranking`` and
``report`` make a page of a run (``fp8kit report``).
"""

from __future__ import annotations

import importlib
from typing import Any

from fp8kit.numerics.capture import Dump, GemmOperands, capture
from fp8kit.numerics.names import STATS, Operand
from fp8kit.numerics.statistics import Codes, Needs, collect, merge, request, tensor_statistics, values

__all__ = [
    "STATS",
    "Codes",
    "Dump",
    "GemmOperands",
    "Needs",
    "Operand",
    "capture",
    "collect",
    "merge",
    "request",
    "tensor_statistics",
    "values",
]

# modules that are imported when they are first asked for
_LATER = ("losses", "plots", "ranking", "report", "run_folder")


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'fp8kit.numerics' has no attribute {name!r}", name=name)
    return importlib.import_module(f"fp8kit.numerics.{name}")
