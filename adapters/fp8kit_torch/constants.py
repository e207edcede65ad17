"""What ``torch.compile`` takes for a constant: what a function makes of plain values, which are guarded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _constants(value: Any) -> Any:
    """``value`` with its numbers as constants. Dynamo makes a number symbolic that was another one at the
    last compilation; this guards it, so that each number has a compilation of its own."""
    if isinstance(value, tuple | list):  # a call that is traced takes as long as twenty expressions
        return tuple([part if isinstance(part, str) else _constants(part) for part in value])
    return guard_scalar(value) if isinstance(value, int | float) else value


def constant_result(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.assume_constant_result`` for functions of plain values and tuples of them, whatever
    their numbers were before."""
    made = torch.compiler.assume_constant_result(function)

    @wraps(function, updated=())  # not the mark that torch has left on it
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return made(*_constants(args), **{name: _constants(value) for name, value in kwargs.items()})

    return call


class _OnnxMode(threading.local):
    on = False

    @staticmethod
    def check(spec: Any) -> None:
        """Refuses a spec that has no form in ONNX (``onnx_extensions.check``, while it is on)."""


onnx_mode = _OnnxMode()  # of ``onnx_export``


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """``torch.compiler.is_exporting``; Dynamo of torch 2.11 takes that one for true in all that it
    compiles."""
    return torch.compiler.is_exporting()
