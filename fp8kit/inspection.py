"""Where the inspector hooks in: what layers, operations and frontends know of it.

``hooks.inspector`` is None unless something is to be looked at in this step, so that all others pay one look
at it. A ``Watch`` says what a layer's call is to show. It is a part of the call's spec, and so the call has a
plan of its own (``ops.product_watched``), which fills one more small array for each tensor that is looked at.
The frontend hands these arrays to the inspector when they have been filled. ``fp8kit.numerics`` has the
inspector itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

# between the prefix of a product and the tensor, in names of what a watched call fills besides
WATCHED = "watched_"
FORWARD = ("activation", "weight", "output")
BACKWARD = ("gradient", "dgrad", "wgrad")
TENSORS = FORWARD + BACKWARD
# tensor -> the GEMM that makes it
MADE_BY = {"output": "fprop", "dgrad": "dgrad", "wgrad": "wgrad"}


@dataclass(frozen=True)
class TensorWatch:
    """What is wanted of one tensor. ``statistics``: the spec of the operation ``statistics`` of it, None for
    none; a twin is what the same GEMM makes in high precision. ``dump``: the tensor itself."""

    tensor: str
    statistics: Any = None
    dump: bool = False


@dataclass(frozen=True)
class ProductWatch:
    """What is wanted of one product: ``layer`` is its name, ``prefix`` that of the operation's names.
    ``tensors``: of which something is wanted. ``rounded``: pairs of a tensor that a GEMM makes and the
    ``Quantizer`` whose values it is rounded to."""

    layer: str
    prefix: str
    tensors: tuple[TensorWatch, ...] = ()
    rounded: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Watch:
    """What a layer's call is to show. ``products``: of each of its products. ``changed``: pairs of a prefix
    and the ``Quantization`` that the product has instead of the layer's, None for high precision."""

    products: tuple[ProductWatch, ...]
    changed: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.products, self.changed))

    def __hash__(self) -> int:  # layers find specs by it at each call
        return self._hash

    def of(self, prefix: str) -> ProductWatch:
        """Returns the watch of the product with this prefix, or one that asks for nothing."""
        return next((own for own in self.products if own.prefix == prefix), ProductWatch("", prefix))

    def only(self, forward: bool) -> Watch:
        """Returns the same with the tensors of one direction: those of a forward pass, or those of
        backward."""
        names = FORWARD if forward else BACKWARD
        return Watch(
            tuple(
                replace(own, tensors=tuple(t for t in own.tensors if t.tensor in names))
                for own in self.products
            ),
            self.changed,
        )


class Entry(NamedTuple):
    """What one array of a watched call holds: of which layer and tensor. ``kind``: "sums" or
    "dump". ``part``: the number of a weight's segment. ``spec``: of the statistics."""

    layer: str
    tensor: str
    kind: str
    part: int
    spec: Any


@dataclass(frozen=True)
class Place:
    """Which of stacked layers a call is of, where one call in a program stands for several: ``numbers``,
    outermost first, each behind the name of its stack among ``names``; behind the layer's whole name where
    that does not begin with it, and with ""."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]

    def name_of(self, layer: str) -> str:
        """Returns the name of a layer there: "layers.3.mlp" of "layers.mlp"."""
        ends = ""
        for name, number in zip(
            self.names[::-1], self.numbers[::-1], strict=True
        ):  # a stack's holds inner ones
            if name and f"{layer}.".startswith(f"{name}."):
                layer = f"{name}.{number}{layer.removeprefix(name)}"
            else:
                ends = f".{number}{ends}"
        return f"{layer}{ends}"


class Inspector(Protocol):
    """What layers and frontends ask of the inspector."""

    def of_layer(self, layer: Any, state: Any) -> Watch | None:
        """Returns what a layer's call within the autocast ``state`` is to show; None for nothing."""

    def of_products(
        self, names: tuple[tuple[str, str], ...], base: Any, transposed: bool = False
    ) -> Watch | None:
        """Likewise for products by (name, prefix), whose ``Quantization`` is ``base``; ``transposed``:
        whether their weights lie as (in, out)."""

    def unseen(self, name: str) -> None:
        """Take note that a layer of this name is called which shows nothing and is not changed."""

    def place(self, memory: Any, nbytes: int) -> Any:
        """Returns an ArrayView of so many bytes for counts and sums of a call that is about to run, on the
        device and the stream of ``execution.Memory``, contents undefined."""

    def take(self, entries: Mapping[str, Entry], arrays: Sequence[Any], place: Place | None = None) -> None:
        """Take the arrays of a call, in the order of ``entries``; they may not be filled yet. ``place``: of
        the layer in a stack, None where it is in none."""


@dataclass
class _Hooks:
    inspector: Inspector | None = None
    # called with the names of layers whose products of groups show nothing, while something records products
    watching: Callable[[str], None] | None = None


hooks = _Hooks()


def unseen(layer: str) -> None:
    """Say that a layer's products, of groups whose sizes stay on the device, show nothing."""
    if hooks.inspector is not None:
        hooks.inspector.unseen(layer)
    if hooks.watching is not None:
        hooks.watching(layer)


def is_watched(name: str) -> bool:
    """Whether an operation's output or gradient of this name is for the inspector."""
    return WATCHED in name
