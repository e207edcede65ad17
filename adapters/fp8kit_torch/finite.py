"""``fp8kit.autocast(check_finite=True)`` around eager layers: which layer and which tensor was the first to
hold Inf or NaN, as ``fp8kit.nn`` says it. It waits for the device at every operation.

And a warning of float16 gradients whose Inf a cast to FP8 hides from ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.execution.chain import ChainSpec
from fp8kit.layers.finite import MAY_BE_INFINITE, refuse
from fp8kit.ops.product import ProductSpec
from fp8kit_torch.views import FLOATS

log = logging.getLogger("fp8kit")
_PLAIN = (Tensor, nn.Parameter)


@functools.cache
def _say_hidden() -> None:
    """Warn once that an overflow may go unseen."""
    log.warning(
        "a float16 gradient is cast to FP8 in a layer without a bias: its Inf becomes a finite number there, "
        "so torch.amp.GradScaler may not see an overflow. bfloat16 needs no GradScaler; MXFP8BlockScaling "
        "keeps Inf; fp8kit.autocast(check_finite=True) finds it"
    )


def warn_of_hidden_overflow(spec: Any, needs: Collection[str]) -> None:
    """Where products of an operation's spec cast a float16 gradient in a way that saturates Inf, and no bias
    gets its sums in high precision. ``needs``: names of the inputs whose gradient is wanted."""
    products = [
        product
        for own in (spec.specs if isinstance(spec, ChainSpec) else [spec])
        for product in getattr(own, "__dict__", {}).values()
        if isinstance(product, ProductSpec) and product.fp8 is not None
    ]
    for product in products:
        gemms = product.fp8.dgrad, product.fp8.wgrad
        casts = [gemm.a for gemm in gemms if gemm.compute == "quantized" and gemm.plain != "a"]
        saturates = any(not own.granularity.startswith("mx") for own in casts)  # a block of MX becomes NaN
        if saturates and not any(f"{product.prefix}bias0" in name for name in needs):
            _say_hidden()


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
