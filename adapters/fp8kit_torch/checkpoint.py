"""``checkpoint``: activations are computed once more in backward instead of kept, in FP8 with the bits of the first time.

``torch.utils.checkpoint`` runs the function again; this adds what it does not know: the autocast that was in force, and the scales and
cached weights that each layer had then. The second run records no amaxes, since the first one did.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from fp8kit.autocast import AutocastState, current, resumed
from fp8kit_torch.arguments import only


class Kept(NamedTuple):
    """What one call of a layer saw: its forward scales, and its cached FP8 weights; None where it had none."""

    scale: Tensor | None
    weights: dict[str, Tensor] | None


class Memory:
    """What the layers within one checkpointed function saw, by layer, in the order of their calls; ``again``: it is being read."""

    def __init__(self, state: AutocastState | None) -> None:
        self.state, self.again = state, False
        self.kept: defaultdict[int, list[Kept]] = defaultdict(list)
        self.left: dict[int, deque[Kept]] = {}

    def keep(self, layer: object, scale: Tensor | None, weights: dict[str, Tensor] | None) -> None:
        """Note a layer's call."""
        self.kept[id(layer)].append(Kept(None if scale is None else scale.clone(), weights))

    def recall(self, layer: object) -> Kept:
        """What the layer saw at its corresponding call."""
        return self.left[id(layer)].popleft()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first run."""
        with _within(self):
            yield

    @contextmanager
    def second(self) -> Iterator[None]:
        """Around a recomputation; there may be several, one after the other."""
        self.again, self.left = True, {layer: deque(calls) for layer, calls in self.kept.items()}
        with _within(self), resumed(self.state):
            yield


class _Thread(threading.local):
    memory: Memory | None = None


_thread = _Thread()


def memory() -> Memory | None:
    """That of the checkpointed function that this thread runs."""
    return _thread.memory


@contextmanager
def _within(own: Memory) -> Iterator[None]:
    before, _thread.memory = _thread.memory, own
    try:
        yield
    finally:
        _thread.memory = before


def checkpoint(function: Callable[..., Any], *args: Any, distribute_saved_activations: bool = False, get_rng_state_tracker: Any = None,
               tp_group: Any = None, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which only the arguments are kept for backward, which runs it once more.

    The same outputs, gradients and FP8 state as without; randomness is repeated (torch's generators). An ``autocast`` in force outside
    holds for the second run too.

    ``use_reentrant``: accepted; there is one way, torch's non-reentrant one, whose further options (``preserve_rng_state``,
    ``determinism_check``, ``debug``) go through. The others: their defaults only, NotImplementedError otherwise.
    """
    only("checkpoint", {
        "distribute_saved_activations": (distribute_saved_activations, False), "get_rng_state_tracker": (get_rng_state_tracker, None),
        "tp_group": (tp_group, None), "context_fn": (kwargs.pop("context_fn", None), None),
    })  # fmt: skip
    own = Memory(current())
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (own.first(), own.second()), **kwargs)
