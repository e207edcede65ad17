"""``fp8kit.autocast(check_finite=True)`` around eager layers: which layer and which tensor was the first to
hold Inf or NaN, as ``fp8kit.nn`` says it. It waits for the device at every operation."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.layers.finite import MAY_BE_INFINITE, refuse
from fp8kit_torch.views import FLOATS

_PLAIN = (Tensor, nn.Parameter)


class Look:
    """A look at one operation's call: at its weights, then its other inputs, when it is made."""

    def __init__(self, operation: str, inputs: Mapping[str, Tensor]) -> None:
        calling = _calling()
        root = calling[0] if calling else None
        own = {} if root is None else {id(p): path for path, p in root.named_parameters()}
        self.names = tuple(inputs)
        self.parameters = {name: own[id(t)] for name, t in inputs.items() if id(t) in own}
        layer = next((path.rpartition(".")[0] for path in self.parameters.values()), "")
        self.where = f"{layer or _path(calling)} ({operation})"
        rest = [name for name in inputs if (operation, name) not in MAY_BE_INFINITE]
        self._at("weight", ((path, inputs[name]) for name, path in self.parameters.items()))
        self._at("input", ((name, inputs[name]) for name in rest if name not in self.parameters))

    def follow(self, outputs: Mapping[str, Tensor], left: Collection[str] = ()) -> None:
        """Look at the outputs, and in backward at what comes for them and at what goes on, but for the inputs
        in ``left``, whose gradients go elsewhere."""
        self._at("output", outputs.items())
        node: Any = next((t.grad_fn for t in outputs.values() if t.grad_fn is not None), None)
        if node is None:
            return
        names = tuple(outputs)

        def before(cotangents: Sequence[Tensor | None]) -> None:
            self._at("gradient of output", zip(names, cotangents, strict=False))

        def after(gradients: Sequence[Tensor | None], _: Any) -> None:
            pairs = zip(self.names, gradients, strict=False)
            said = [(self.parameters.get(name, f"input {name}"), g) for name, g in pairs if name not in left]
            self._at("gradient of", said)

        node.register_prehook(before)
        node.register_hook(after)

    def _at(self, what: str, values: Iterable[tuple[str, Any]]) -> None:
        for name, value in values:
            if type(value) in _PLAIN and value.dtype in FLOATS:
                nans, infs = value.isnan().sum(), value.isinf().sum()
                refuse(self.where, f"{what} {name}", *torch.stack((nans, infs)).tolist(), value.numel())


def _calling() -> list[nn.Module]:
    """The modules whose calls are on this thread's stack, the outermost one first."""
    found: list[nn.Module] = []
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and (not found or found[-1] is not module):
            found.append(module)
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def _path(calling: Sequence[nn.Module]) -> str:
    """The innermost module's path in the outermost one, or its class."""
    if not calling:
        return "no module"
    paths = (path for path, module in calling[0].named_modules() if module is calling[-1])
    return next(paths, "") or type(calling[-1]).__name__
