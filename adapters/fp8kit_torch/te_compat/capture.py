"""``transformer_engine.pytorch.graph`` and ``.jit``: what programs say to Transformer Engine before they
capture or compile, of which nothing is needed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_capturing: list[None] = []


def set_capture_start() -> None:
    """Say that a program captures CUDA graphs from now on: ``is_graph_capturing`` is True. Nothing else comes
    of it; layers see a capture by themselves."""
    _capturing[:] = [None]


def set_capture_end() -> None:
    """The end of that."""
    _capturing.clear()


def is_graph_capturing() -> bool:
    """Whether this is between ``set_capture_start`` and ``set_capture_end``, or a CUDA graph is being
    captured."""
    return bool(_capturing) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def graph_pool_handle() -> Any:
    """A pool of memory that CUDA graphs share: ``make_graphed_callables(pool=...)``."""
    return torch.cuda.graph_pool_handle()


def no_torch_dynamo(recursive: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of functions that ``torch.compile`` is not to follow."""
    return lambda function: torch.compiler.disable(function, recursive=recursive)


def jit_fuser(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as it is: nothing is compiled behind a program's back."""
    return function


lazy_compile = jit_fuser


def set_jit_fusion_options() -> None:
    """Nothing: there are no options of TorchScript to set."""


def torch_version() -> tuple[int, ...]:
    """Torch's version as numbers."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3] if part.isdigit())


__all__ = [
    "graph_pool_handle",
    "is_graph_capturing",
    "jit_fuser",
    "lazy_compile",
    "no_torch_dynamo",
    "set_capture_end",
    "set_capture_start",
    "set_jit_fusion_options",
    "torch_version",
]
