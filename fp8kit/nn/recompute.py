"""``checkpoint``: activations that are not kept for backward but computed once more (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost").

The first pass runs unrecorded. In backward the function runs again, recorded this time, with everything as it
was: autocast, policy, random state, the scales of delayed scaling and cached FP8 weights. Amaxes of forward
tensors were recorded by the first pass and are not recorded again. What the second pass put on the tape is
walked as a part of the same backward pass, in the same order as without recomputation, so that all gradients
have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fp8kit import arguments
from fp8kit.arrays import ArrayView
from fp8kit.autocast import AutocastState, current, resumed
from fp8kit.autograd import Tensor, is_grad_enabled, no_grad, set_grad_enabled
from fp8kit.autograd.tape import Edge, Node, Probe, Watcher, probing, watcher, watching
from fp8kit.autograd.tensors import fresh, owned, unchanged
from fp8kit.backends.policy import SelectionPolicy, get_policy, policy_context
from fp8kit.errors import AutogradError
from fp8kit.layers.recompute import Kept, Pass, Passes
from fp8kit.nn import random


class _Pass(Pass):
    """A ``Pass`` that fills or reads ``draws`` as well: random numbers that were not drawn by a seed."""

    def __init__(self, first: bool, calls: list[Kept], draws: list[ArrayView], above: Pass | None) -> None:
        super().__init__(first, calls, above)
        self.draws = draws


_passes = Passes()
first, recall = _passes.first, _passes.recall


def idle() -> bool:
    """Whether this thread runs no pass of any checkpoint."""
    return _passes.running is None


def keep(owner: object, scales: Mapping[str, ArrayView], weights: Mapping[str, Any] | None) -> None:
    """In a first pass: keep what this call of ``owner`` found, scales by value."""
    if _passes.first():
        _passes.keep(Kept(owner, {name: fresh(view) for name, view in scales.items()}, weights))


class _Call(NamedTuple):
    """A checkpointed call, and what it found around it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: AutocastState | None
    policy: SelectionPolicy
    random: random.snapshot
    watcher: Watcher | None

    def run(self, running: _Pass, probe: Probe | None, recorded: bool) -> Any:
        """Call the function."""
        mode = set_grad_enabled(True) if recorded else no_grad()
        draws = random.keeping(running.draws) if running.first else random.replaying(running.draws)
        with mode, probing(probe), _passes.within(running), draws:
            return self.function(*self.args, **self.kwargs)

    def again(self, first: _Pass) -> Any:
        """Call the function once more, on the tape."""
        with resumed(self.state), policy_context(self.policy), self.random.again(), watching(self.watcher):
            return self.run(_Pass(False, first.calls, first.draws, None), None, True)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of whose activations none is kept: backward calls the function again,
    with the same bits.

    ``function``: a module or any callable that computes with Tensors and returns one, or a tuple, list or
    dict of them, nested at will (other values in it are passed through); it must do the same each time.
    Dropout draws the same numbers again, delayed scaling's scales and cached weights are those of the first
    pass, and nothing is recorded twice. Checkpoints nest. Without gradients it is a plain call.

    Raises Fp8kitError for a function that cannot be called. In backward: AutogradError that names the value
    where an argument or a parameter was changed in place since, and where the second pass does not do what
    the first did.
    """
    arguments.function("checkpoint", "function", function)
    if not is_grad_enabled():
        return function(*args, **kwargs)
    call = _Call(function, args, kwargs, current(), get_policy(), random.snapshot(), watcher())
    one = _Pass(True, [], [], _passes.running)
    probe = Probe()
    given = [t for t in _tensors((args, kwargs)) if t.requires_grad]
    checks = [unchanged("checkpoint", f"argument {i}", t) for i, t in enumerate(_tensors((args, kwargs)))]
    out = call.run(one, probe, False)
    found = _tensors(out)
    if not probe.wanted and not any(t is g for t in found for g in given):
        return out
    results = [t._sharing(Tensor(t.view)) for t in found]
    floating = [i for i, result in enumerate(results) if result.dtype.floating]

    def backward(cotangents: list[ArrayView | None]) -> list[tuple[Edge, ArrayView | None]]:
        for check in (*checks, *probe.used):
            check()
        seconds = _tensors(call.again(one))
        shapes = [[(t.shape, t.dtype) for t in tensors] for tensors in (seconds, results)]
        if shapes[0] != shapes[1]:
            raise AutogradError(
                "checkpoint", "function", f"{shapes[0]} the second time", f"{shapes[1]}, as the first time"
            )
        edges = [seconds[i].edge() for i in floating]
        return [
            (edge, owned(edge, g))
            for edge, g in zip(edges, cotangents, strict=True)
            if edge is not None and g is not None
        ]

    node = Node("checkpoint", len(floating), None, backward)
    for index, i in enumerate(floating):
        results[i]._edge, results[i].requires_grad = Edge(node, index), True
    return _replaced(out, iter(results))


def _tensors(value: Any) -> list[Tensor]:
    """The Tensors in a nest of tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, tuple | list) else []


def _replaced(value: Any, results: Iterator[Tensor]) -> Any:
    """The nest with its Tensors replaced in order."""
    if isinstance(value, Tensor):
        return next(results)
    if isinstance(value, Mapping):
        return {name: _replaced(part, results) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(part, results) for part in value))
    return (
        type(value)(_replaced(part, results) for part in value) if isinstance(value, tuple | list) else value
    )
