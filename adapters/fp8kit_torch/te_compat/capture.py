"""``transformer_engine.pytorch.graph`` and ``.jit``: what programs say to Transformer Engine before they
capture or compile, of which little is needed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fp8kit.recipe import Recipe

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


def save_fp8_tensors(modules: Iterable[torch.nn.Module], recipe: Recipe | None) -> list[list[Any]]:
    """Copies of the delayed scaling's states of every layer in ``modules``, for ``restore_fp8_tensors``:
    their histories get the length of ``recipe`` first, where it has one."""
    saved = []
    for module in modules:
        layers = _stateful(module)
        for layer in layers:
            if recipe is not None and layer.fp8_meta:
                layer.init_fp8_meta_tensors(recipe)
        saved.append([layer.get_fp8_meta_tensors() for layer in layers])
    return saved


def restore_fp8_tensors(modules: Iterable[torch.nn.Module], fp8_tensors: Iterable[Iterable[Any]]) -> None:
    """Put such copies back, in the states' memory; a state that was made since is as it begins."""
    for module, saved in zip(modules, fp8_tensors, strict=True):
        for layer, parts in zip(_stateful(module), saved, strict=True):
            layer.reset_fp8_meta_tensors(parts or None)


def _stateful(module: torch.nn.Module) -> list[Any]:
    return [layer for layer in module.modules() if hasattr(layer, "get_fp8_meta_tensors")]


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
