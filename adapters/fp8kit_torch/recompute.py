"""``checkpoint``: activations that are not kept for backward but computed once more (Chen et al. 2016), with
FP8 as it was.

torch's own checkpoint does the work, in both of its variants. What it does not know is done here, for its own
``checkpoint`` as for ours: each recompute pass runs under the autocast and policy of the first, quantises
with the scales and the cached weights that the first pass found, and records no amaxes. Torch's random state
gives dropout the same numbers.

A layer that is called within a checkpointed function finds torch's note of what is to be called again
(``torch_checkpoint``), and puts an ``_Recomputed`` in that place, which lives as long as the graph does.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from torch.utils.checkpoint import noop_context_fn

from fp8kit.arguments import flag
from fp8kit.arguments import function as callable_
from fp8kit.autocast import AutocastState, entered, resumed
from fp8kit.backends.policy import get_policy, policy_context
from fp8kit.errors import ArgumentError, AutogradError
from fp8kit.layers.recompute import Kept, Pass, Passes
from fp8kit.scoped import changed
from fp8kit_torch import torch_checkpoint as torchs
from fp8kit_torch import torch_compat
from fp8kit_torch.arguments import not_compiled, only
from fp8kit_torch.checks import check, one, optional
from fp8kit_torch.collectives import ranks_of
from fp8kit_torch.state import open_backward
from fp8kit_torch.torch_compat import unseen


class _RecomputePass(Pass):
    """A recompute pass. ``backward``: number of the backward pass that it belongs to; ``hook``: torch's
    innermost hook when it began."""

    def __init__(self, calls: list[Kept], backward: int) -> None:
        super().__init__(False, calls)
        self.backward, self.hook = backward, torchs.hook()


_passes = Passes()  # of which the later ones run; a first one is found by torch's note of it


class _Kept:
    """What a program's own first pass keeps (``phase``), of each layer in the order of its calls."""

    reentrant = True  # gradients are disabled in it

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, deque[Kept]] = weakref.WeakKeyDictionary()
        self.calls = self

    def append(self, kept: Kept) -> None:
        self.of.setdefault(kept.owner, deque()).append(kept._replace(owner=None))


class _ByHand(threading.local):
    first: _Kept | None = None  # while such a pass runs


_by_hand, _kept_by_hand = _ByHand(), _Kept()


class _LaterByHand(Pass):
    """A program's own recompute pass."""

    def __init__(self) -> None:
        super().__init__(False, [])
        self.backward = None if torch_compat.current_backward() == -1 else open_backward()
        self.hook = torchs.hook()

    def next(self, owner: object) -> Kept:
        queue = _kept_by_hand.of.get(owner)
        if not queue:
            got = f"{type(owner).__name__}, of which no first pass is kept"
            wanted = "the same layers as in activation_recompute_forward(True, recompute_phase=False)"
            raise AutogradError("activation_recompute_forward", "recompute_phase", got, wanted)
        return queue.popleft()._replace(owner=owner)


@contextmanager
def phase(first: bool) -> Iterator[None]:
    """Around a pass of a program's own recomputation: a first one, whose layers keep what they find, or a
    later one, whose layers take it."""
    if not first:
        with _passes.within(_LaterByHand()):
            yield
        return
    with changed(_by_hand, first=_kept_by_hand):
        yield


def forget_phases() -> None:
    """Drop what such first passes have kept."""
    _kept_by_hand.of.clear()


class _Recomputed:
    """What backward calls instead of a checkpointed ``function``, and what the first pass found.
    ``reentrant``: torch's variant."""

    def __init__(self, function: Callable[..., Any], reentrant: bool) -> None:
        self.function, self.reentrant = function, reentrant
        self.calls: list[Kept] = []
        self.backward, self.policy = backward_pass(), get_policy()
        self.state: AutocastState | None = None
        self.depth: int | None = None

    def look(self) -> None:
        """Note the autocast around the first pass: that of the call with the fewest around it. The function
        enters its own ones anew."""
        stack = entered()
        if self.depth is None or len(stack) < self.depth:
            self.depth, self.state = len(stack), stack[-1][1] if stack else None

    def __call__(self, *args: Any) -> Any:
        """A recompute pass."""
        running = _RecomputePass(self.calls, open_backward() if self.backward is None else self.backward)
        with resumed(self.state), policy_context(self.policy), _passes.within(running):
            return self.function(*args)


def _noted(holder: Any, name: str, reentrant: bool) -> _Recomputed:
    """The ``_Recomputed`` in a place of torch's; put there where there is none yet."""
    found = getattr(holder, name)
    if type(found) is not _Recomputed:
        found = _Recomputed(found, reentrant)
        setattr(holder, name, found)
    found.look()
    return found


def _firsts() -> list[Any]:
    """The checkpointed functions that run for the first time, within the recompute pass that runs, if one
    does."""
    running = _passes.running
    own = torchs.contexts(_Recomputed.__call__.__code__)
    found: list[Any] = [_noted(ctx, "run_function", True) for ctx in own]
    frames = torchs.frames(None if running is None else running.hook)
    found += [_noted(frame, "recompute_fn", False) for frame in frames]
    return found if _by_hand.first is None else [*found, _by_hand.first]


def idle() -> bool:
    """Whether this thread runs no pass of any checkpoint. AutogradError in a second pass of a function that
    ran no layer in the first."""
    if _passes.running is None:
        if _by_hand.first is None and torchs.outside():
            return True
        if not _firsts():
            if torchs.recomputing():
                raise AutogradError(
                    "torch.utils.checkpoint",
                    "function",
                    "layers of FP8 in the second pass alone",
                    "the same layers in the same order as in the first pass",
                )
            return True
    return False


def note() -> None:
    """What a layer calls that runs in high precision, unless all is ``idle``: so that it does in recompute
    passes too, whatever autocast is around backward."""
    _firsts()


def first() -> bool:
    """Whether this call is a training step although gradients are disabled, as they are in the first pass of
    the reentrant variant."""
    return any(noted.reentrant for noted in _firsts())


def recomputing() -> bool:
    """Whether this is a recompute pass: what it computes, a first pass has computed before."""
    return _passes.running is not None


def recall(owner: object) -> Kept | None:
    """What this call of ``owner`` found in the first pass that is being recomputed; None where none is."""
    running = _passes.running
    if running is None:
        return None
    kept: Kept = running.next(owner)
    for noted in _firsts():  # of a checkpoint within that one
        noted.calls.append(kept)
    return kept


def keep(owner: object, scale: Tensor | None, weights: Any = None) -> None:
    """In a first pass: keep what this call of ``owner`` found, its scales by value."""
    firsts = _firsts()
    if firsts:
        with unseen():  # in recompute passes there is no such call
            kept = Kept(owner, None if scale is None else scale.detach().clone(), weights)
        for noted in firsts:
            noted.calls.append(kept)


def backward_pass() -> int | None:
    """Number of the backward pass, the outermost one, that a recomputation runs for; None where none is
    running."""
    running = _passes.running
    return None if running is None else running.backward


def nowhere(slots: int, device: torch.device) -> Tensor:
    """float32 (slots,) for amaxes of a recompute pass, which are not recorded again."""
    with unseen():
        return torch.zeros(slots, dtype=torch.float32, device=device)


class _Anew(AbstractContextManager[None]):
    """``make()``'s context, a new one each time: a graph that is retained is gone back through again, and
    recomputes again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextmanager
def _opened(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Around a first pass: what is around it is noted now, the policy too, and not when its first layer
    runs."""
    with context:
        _firsts()
        yield


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=checkpoint_contexts)``:
    the selection policy of the recompute passes is the one around the first pass. Without it, it is the one
    around the first layer; autocast, scales and amaxes are right either way.

    Returns the contexts of the first pass and of the later ones.
    """
    return _opened(nullcontext()), nullcontext()


@contextmanager
def _tracked(
    tracker: Any, states: Mapping[str, Tensor], context: AbstractContextManager[Any]
) -> Iterator[None]:
    """``context``, in which ``tracker`` has other states."""
    before = dict(tracker.get_states())
    tracker.set_states(states)
    try:
        with context:
            yield
    finally:
        tracker.set_states(before)


_RULES = {
    "use_reentrant": flag,
    "debug": flag,
    "determinism_check": one("default", "none"),
    "context_fn": callable_,
    "get_rng_state_tracker": optional(callable_),
}


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: object = None,
    use_reentrant: bool = True,
    context_fn: Callable[
        [], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    ] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, of whose activations none is kept: backward calls the function again,
    with the same bits.

    * ``function``: a module or any callable that does the same each time. Autocasts may be around it or
      within it.
    * ``use_reentrant``: which of torch's two variants. The first one, reentrant, needs an argument that
      requires a gradient, and cannot be used with ``torch.autograd.grad``; the other one has neither limit.
      In the reentrant one a layer that the function calls under ``torch.no_grad()`` records amaxes.
    * ``get_rng_state_tracker``: returns an object such as ``CudaRNGStatesTracker``, whose states are those of
      the first pass again.
    * ``context_fn``, ``determinism_check``: torch's, for ``use_reentrant=False``; ``debug``: False only.
    * ``distribute_saved_activations``: NotImplementedError but for False: each rank keeps the arguments. So
      ``tp_group``, the ranks that would share them, changes nothing.

    ``torch.utils.checkpoint.checkpoint`` itself, and what calls it, recomputes FP8 layers in the same way.
    Not so beside ``torch.compile``: around a compiled function torch refuses the non-reentrant variant, and
    the reentrant one runs its second pass without the autocast that is around it, in high precision; within
    one, delayed scaling is refused: with ``fullgraph=True`` by an error, else that part is left to eager
    layers. Checkpoint eager layers.

    Checkpoints nest. Without gradients it is a plain call. Raises Fp8kitError for wrong arguments, and
    AutogradError in backward where the second pass does not run the FP8 layers of the first.
    """
    if not callable(function):
        raise ArgumentError("checkpoint", "function", type(function).__name__, "a module or another callable")
    if not torch.compiler.is_compiling():
        check("checkpoint", _RULES, locals())
    only("checkpoint", {"distribute_saved_activations": (distribute_saved_activations, False)})
    if torch.compiler.is_compiling():
        raise not_compiled("checkpoint")
    ranks_of("checkpoint", "tp_group", tp_group)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if debug:
        raise ArgumentError(
            "checkpoint", "debug", debug, "False: torch allows it beside no contexts, which FP8 needs"
        )
    # torch restores the random state of the devices of positional tensors only, and its older variant
    # differentiates only these
    named = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    rest = {name: value for name, value in kwargs.items() if name not in named}
    tensors = [kwargs[name] for name in named]

    def positional(*given: Any) -> Any:
        return function(*given[: len(args)], **dict(zip(named, given[len(args) :], strict=True)), **rest)

    own, again = _around(None if get_rng_state_tracker is None else get_rng_state_tracker(), context_fn)
    if not use_reentrant:
        return torchs_checkpoint(
            positional,
            *args,
            *tensors,
            use_reentrant=False,
            context_fn=lambda: (own, again),
            determinism_check=determinism_check,
        )
    if context_fn is not noop_context_fn or determinism_check != "default":
        raise ArgumentError(
            "checkpoint", "context_fn, determinism_check", "given", "defaults with use_reentrant=True"
        )
    passes = iter((own,))

    def call(*given: Any) -> Any:
        with next(passes, again):
            return positional(*given)

    return torchs_checkpoint(call, *args, *tensors, use_reentrant=True)


def _around(tracker: Any, context_fn: Callable[[], Sequence[AbstractContextManager[Any]]]) -> tuple[Any, Any]:
    """Contexts of the first pass and, to be entered any number of times, of the later ones."""
    own = context_fn()
    if tracker is None:
        return _opened(own[0]), own[1]
    states = dict(tracker.get_states())
    return _opened(own[0]), _Anew(lambda: _tracked(tracker, states, own[1]))
