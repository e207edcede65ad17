"""The tape: which node made which value, and the walk back. It knows no operation and no array.

A ``Node`` is one step of the forward pass. It holds a function from the cotangents of its outputs to the
cotangents of its inputs, and an edge per input. ``run`` walks the nodes from the youngest to the oldest, adds
up cotangents that meet with the ``add`` it is given, and hands those that reach a leaf to the leaf.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, NamedTuple, Protocol

from fp8kit.arguments import flag
from fp8kit.errors import AutogradError
from fp8kit.scoped import Block, Entries, Scoped, changed

_SEQUENCE = itertools.count()


class Leaf(Protocol):
    """The end of an edge: a value that no operation computed."""

    def accumulate(self, cotangent: Any) -> None:
        """Take a gradient."""


class Edge(NamedTuple):
    """Where a cotangent goes: output ``index`` of a node, or a leaf (then index is 0)."""

    target: Node | Leaf
    output: int


class Node:
    """One step of the forward pass.

    * ``backward(cotangents)``: one entry per output (None is zero), returns one per edge (None is zero).
    * ``edges``: one per input, None where no gradient is wanted. Or None altogether: then ``backward``
      returns pairs of an edge and its cotangent, because the edges are found only then (recomputation).
    * ``hooks``: output -> functions that see the output's summed cotangent before ``backward``, and may
      replace it.
    * ``finish``: (function, item) or None; after the whole walk, ``function`` is called once with the list of
      the distinct items of all nodes that ran. When the walk fails, ``item.discard()`` is called instead, for
      each of them.
    """

    __slots__ = ("backward", "edges", "finish", "hooks", "name", "outputs", "sequence")

    def __init__(
        self,
        name: str,
        outputs: int,
        edges: Sequence[Edge | None] | None,
        backward: Callable[[list[Any]], Sequence[Any]],
        finish: tuple[Callable[[list[Any]], None], Any] | None = None,
    ) -> None:
        self.name = name
        self.outputs = outputs
        self.edges = edges
        self.backward: Callable[[list[Any]], Sequence[Any]] | None = backward
        self.finish = finish
        self.hooks: dict[int, list[Callable[[Any], Any]]] | None = None
        self.sequence = next(_SEQUENCE)


def nodes(root: Edge | None) -> list[Node]:
    """Returns the nodes from which ``root`` came, from the oldest to the youngest."""
    found: dict[int, Node] = {}
    edges = [root]
    while edges:
        edge = edges.pop()
        if edge is not None and isinstance(node := edge.target, Node) and node.sequence not in found:
            found[node.sequence] = node
            edges += node.edges or ()
    return [found[number] for number in sorted(found)]


def run(
    roots: Sequence[tuple[Edge, Any]], add: Callable[[Any, Any], Any], retain_graph: bool = False
) -> None:
    """Walk back from ``roots``, pairs of an edge and its cotangent. Unless ``retain_graph``, nodes give up
    what they saved.

    Where a node raises, no leaf has got anything, and what the nodes wanted to finish is discarded. Raises
    AutogradError when a node was already walked and gave up what it saved.
    """
    pending: dict[Node, list[Any]] = {}
    heap: list[tuple[int, Node]] = []
    leaves: dict[int, tuple[Leaf, Any]] = {}
    finishing: dict[Callable[[list[Any]], None], dict[int, Any]] = {}

    def deliver(edge: Edge, cotangent: Any) -> None:
        target, index = edge
        if not isinstance(target, Node):
            known = leaves.get(id(target))
            leaves[id(target)] = (target, cotangent if known is None else add(known[1], cotangent))
            return
        slots = pending.get(target)
        if slots is None:
            slots = pending[target] = [None] * target.outputs
            heapq.heappush(heap, (-target.sequence, target))
        slots[index] = cotangent if slots[index] is None else add(slots[index], cotangent)

    around, _MODE.retaining = _MODE.retaining, retain_graph
    try:
        for edge, cotangent in roots:
            deliver(edge, cotangent)
        while heap:
            _, node = heapq.heappop(heap)
            backward = node.backward
            if backward is None:
                raise AutogradError(
                    f"{node.name}: backward was already run through this graph; "
                    "pass retain_graph=True the first time"
                )
            # before the call: a node that fails half-way has something to discard too
            if node.finish is not None:
                function, item = node.finish
                finishing.setdefault(function, {})[id(item)] = item
            cotangents = pending.pop(node)
            for index, hooks in (node.hooks or {}).items():
                cotangents[index] = hooked(hooks, cotangents[index])
            gradients = backward(cotangents)
            pairs = gradients if node.edges is None else zip(node.edges, gradients, strict=True)
            for target, gradient in pairs:
                if target is not None and gradient is not None:
                    deliver(target, gradient)
            if not retain_graph:
                node.backward = None
        for leaf, gradient in leaves.values():
            leaf.accumulate(gradient)
        for function, items in finishing.items():
            function(list(items.values()))
    except BaseException:
        for items in finishing.values():
            for item in items.values():
                item.discard()
        raise
    finally:
        _MODE.retaining = around


def hooked(hooks: Sequence[Callable[[Any], Any]], cotangent: Any) -> Any:
    """Returns a cotangent after its hooks, in the order of their registration; None (zero) is not shown to
    them."""
    for hook in tuple(hooks):
        if cotangent is not None:
            answer = hook(cotangent)
            cotangent = cotangent if answer is None else answer
    return cotangent


class Probe:
    """What an unrecorded forward pass would have recorded: whether anything in it ``wanted`` a gradient, and
    ``used``, functions that raise AutogradError when a value that it used was changed in place since."""

    __slots__ = ("used", "wanted")

    def __init__(self) -> None:
        self.wanted = False
        self.used: list[Callable[[], None]] = []


def probing(probe: Probe | None) -> AbstractContextManager[None]:
    """Context manager: frontends tell ``probe`` (None: none) what they would have recorded on this thread."""
    return changed(_MODE, probe=probe)


class Watcher(Protocol):
    """An object that sees every operation's values on a thread, in forward, and in backward of what was
    recorded then. It may raise."""

    def forward(self, operation: str, inputs: Any, outputs: Any) -> Any:
        """After an operation; what is returned comes back as ``where``."""

    def backward(self, where: Any, cotangents: Any, gradients: Any) -> None:
        """Before its backward with the cotangents of its outputs by name, and after it with the gradients of
        its inputs."""


def watching(watcher: Watcher | None) -> AbstractContextManager[None]:
    """Context manager: ``watcher`` (None: none) sees the operations on this thread."""
    return changed(_MODE, watcher=watcher)


class _Mode(threading.local):
    retaining = False
    probe: Probe | None = None
    watcher: Watcher | None = None


_MODE = _Mode()
_RECORDED: Scoped[bool] = Scoped("fp8kit_grad_enabled", True)
_INNERMOST = _RECORDED.innermost


def is_grad_enabled() -> bool:
    """Whether the forward pass is being recorded on this thread, or in this asyncio task."""
    found = _INNERMOST.get()
    if found is not None and found.ended:
        found = _RECORDED.block()
    return found is None or found.value


def retaining() -> bool:
    """Whether the backward pass that runs on this thread keeps what was saved for it, because another one may
    come."""
    return _MODE.retaining


def probe() -> Probe | None:
    """Returns the probe of this thread, which is told of operations in place of the tape; see ``probing``."""
    return _MODE.probe


def watcher() -> Watcher | None:
    """Returns the watcher of this thread's operations; see ``watching``."""
    return _MODE.watcher


class set_grad_enabled:
    """Record the forward pass or not; holds from now on, or until the end of a ``with`` block."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = flag("set_grad_enabled", "enabled", enabled)
        self._around = _RECORDED.block()
        self._block: Block[bool] | None = None
        _RECORDED.put(self._enabled)

    def __enter__(self) -> None:
        _RECORDED.back(self._around)
        self._block = _RECORDED.enter(self._enabled)

    def __exit__(self, *exc: object) -> None:
        if self._block is None:  # not a block: what held before it was called
            _RECORDED.back(self._around)
        else:
            _RECORDED.leave(self._block)


class no_grad(ContextDecorator):
    """Do not record what is computed inside: ``with no_grad():`` or as a decorator. Nestable, per thread or
    asyncio task, exception-safe; blocks may end in any order."""

    def __init__(self) -> None:
        self._entered = Entries(_RECORDED)

    def __enter__(self) -> None:
        self._entered.enter(False)

    def __exit__(self, *exc: object) -> None:
        self._entered.leave()
