"""``autocast(check_finite=True)``: which layer and which tensor was the first to hold Inf or NaN.

While a module runs, every operation's weights, inputs and outputs are looked at, and in backward the
cotangents of its outputs and the gradients of its inputs. Names are paths from the outermost module that was
called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor
from fp8kit.autograd.tape import watcher, watching
from fp8kit.backends import dispatch
from fp8kit.formats import float32
from fp8kit.layers.finite import MAY_BE_INFINITE, refuse

if TYPE_CHECKING:
    from fp8kit.nn.module import Module


class _Where(NamedTuple):
    """A layer's path and type with the operation, and its parameters' paths by the operation's names."""

    layer: str
    parameters: Mapping[str, str]


class _Finder:
    """The watcher of one outermost module's call; ``stack``: the modules that run, innermost last."""

    def __init__(self, root: Module) -> None:
        self.stack: list[Module] = []
        self.name = type(root).__name__  # where no module runs: a checkpointed function in backward
        self.paths = {id(module): path or type(root).__name__ for path, module in root.named_modules()}
        self.parameters = {id(parameter): path for path, parameter in root.named_parameters()}

    def forward(self, operation: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> _Where:
        """Look at weights first, then at inputs, then at outputs."""
        named = {
            name: self.parameters[id(value)] for name, value in inputs.items() if id(value) in self.parameters
        }
        layer = next((path.rpartition(".")[0] for path in named.values()), "")
        where = _Where(f"{layer or self._running()} ({operation})", named)
        rest = {
            name: value
            for name, value in inputs.items()
            if name not in named and (operation, name) not in MAY_BE_INFINITE
        }
        _look(where, "weight", {path: inputs[name] for name, path in named.items()})
        _look(where, "input", rest)
        _look(where, "output", outputs)
        return where

    def _running(self) -> str:
        """Returns the innermost module that runs, the root outside of any."""
        return self.paths.get(id(self.stack[-1]), type(self.stack[-1]).__name__) if self.stack else self.name

    def backward(self, where: _Where, cotangents: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
        """Look at what came and at what goes on."""
        _look(where, "gradient of output", cotangents)
        _look(
            where,
            "gradient of",
            {where.parameters.get(name, f"input {name}"): view for name, view in gradients.items()},
        )


def _look(where: _Where, what: str, values: Mapping[str, Any]) -> None:
    """NonFiniteError for the first value that is not finite. One look on the device where all are."""
    views: dict[str, ArrayView] = {}
    for name, value in values.items():
        view = value.view if isinstance(value, Tensor) else value
        if isinstance(view, ArrayView) and view.dtype in formats.HIGH_PRECISION:
            views[name] = arrays.contiguous(view)
    if not views:
        return
    device = next(iter(views.values())).device
    found = arrays.zeros((1,), float32, device)
    dispatch.kernels(device).scale_(list(views.values()), None, found, arrays.current_stream(device))
    if found.numpy()[0] == 0:
        return
    for name, view in views.items():
        host = view.numpy().astype(np.float32)
        nans, infs = int(np.isnan(host).sum()), int(np.isinf(host).sum())
        refuse(where.layer, f"{what} {name}", nans, infs, host.size)


@contextmanager
def looking(module: Module) -> Iterator[None]:
    """Look at what the call of ``module`` computes; within another module's call, as a part of that."""
    outer = watcher()
    finder = outer if isinstance(outer, _Finder) and id(module) in outer.paths else _Finder(module)
    finder.stack.append(module)
    try:
        with watching(finder):
            yield
    finally:
        finder.stack.pop()
