"""``checkpoint``: activations that are not kept for backward but computed once more (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost").

The first pass runs unrecorded. In backward the function runs again, recorded this time, with everything as it
was: autocast, policy, random state, the scales of delayed scaling and cached FP8 weights. Amaxes of forward
tensors were recorded by the first pass and are not recorded again. What the second pass put on the tape is
walked as a part of the same backward pass, in the same order as without recomputation, so that all gradients
have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8kit import arguments
from fp8kit.arrays import ArrayView
from fp8kit.autocast import current, resumed
from fp8kit.autograd import Tensor, is_grad_enabled, no_grad, set_grad_enabled
from fp8kit.autograd.tape import Edge, Node, Probe, probing, watcher, watching
from fp8kit.autograd.tensors import fresh, owned, unchanged
from fp8kit.backends.policy import get_policy, policy_context
from fp8kit.errors import AutogradError
from fp8kit.layers.recompute import Kept, Pass, Passes
from fp8kit.nests import mapped
from fp8kit.nn import random

_passes = Passes()
first, recomputing, recall = _passes.first, _passes.recomputing, _passes.recall


def idle() -> bool:
    """Whether this thread runs no pass of any checkpoint."""
    return _passes.running is None


def keep(owner: object, scales: Mapping[str, ArrayView], weights: Mapping[str, Any] | None) -> None:
    """Keep, in a first pass, what this call of ``owner`` found, scales by value."""
    if _passes.first():
        _passes.keep(Kept(owner, {name: fresh(view) for name, view in scales.items()}, weights))


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
    state, policy, draw_again, watched = current(), get_policy(), random.snapshot(), watcher()
    draws: list[ArrayView] = []
    one, probe, given = Pass(True, [], _passes.running), Probe(), _tensors((args, kwargs))
    checks = [unchanged("checkpoint", f"argument {i}", t) for i, t in enumerate(given)]
    with no_grad(), probing(probe), _passes.within(one), random.keeping(draws):
        out = function(*args, **kwargs)
    found = _tensors(out)
    if not probe.wanted and not any(t is g and g.requires_grad for t in found for g in given):
        return out
    results = [t._sharing(Tensor(t.view)) for t in found]
    floating = [i for i, result in enumerate(results) if result.dtype.floating]

    def backward(cotangents: list[ArrayView | None]) -> list[tuple[Edge, ArrayView | None]]:
        for check in (*checks, *probe.used):
            check()
        with (
            resumed(state),
            policy_context(policy),
            draw_again(),
            watching(watched),
            set_grad_enabled(True),
            probing(None),
            _passes.within(Pass(False, one.calls)),
            random.replaying(draws),
        ):
            seconds = _tensors(function(*args, **kwargs))
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
    made = iter(results)
    return mapped(out, lambda leaf: next(made) if isinstance(leaf, Tensor) else leaf)


def _tensors(value: Any) -> list[Tensor]:
    """Returns the Tensors in a nest of tuples, lists and dicts, in order."""
    found: list[Any] = []
    mapped(value, found.append)
    return [leaf for leaf in found if isinstance(leaf, Tensor)]
