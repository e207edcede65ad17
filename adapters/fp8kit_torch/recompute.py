"""``checkpoint``: activations that are not kept for backward but computed once more (Chen et al. 2016), with FP8 as it was.

torch's own checkpoint does the work, in both of its variants. What it does not know is done here: the second pass runs under the autocast
and policy of the first, quantises with the scales and the cached weights that the first pass found, and records no amaxes again. Torch's
random state gives dropout the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from fp8kit.arguments import flag
from fp8kit.arguments import function as callable_
from fp8kit.autocast import current, resumed
from fp8kit.backends.policy import get_policy, policy_context
from fp8kit.errors import ArgumentError, expected
from fp8kit.layers import Kept, Pass, Passes
from fp8kit_torch.arguments import not_compiled
from fp8kit_torch.checks import check, one, optional
from fp8kit_torch.state import open_walk


class _Pass(Pass):
    """A ``Pass``; a later one knows the backward pass that it belongs to (``walk``)."""

    def __init__(self, first: bool, calls: list[Kept], above: Pass | None, walk: int | None) -> None:
        super().__init__(first, calls, above)
        self.walk = walk


_passes = Passes()
first, recall = _passes.first, _passes.recall


def idle() -> bool:
    """Whether this thread runs no pass of any checkpoint."""
    return _passes.running is None


def keep(owner: object, scale: Tensor | None, weights: Any = None) -> None:
    """In a first pass: keep what this call of ``owner`` found, its scales by value."""
    if _passes.first():
        _passes.keep(Kept(owner, None if scale is None else scale.detach().clone(), weights))


def walk() -> int | None:
    """The backward pass, the outermost one, that a recomputation runs for; None where none is running."""
    running = _passes.running
    return None if running is None else running.walk


class _Around:
    """What a checkpoint found around it, and its two passes as context managers."""

    def __init__(self, tracker: Any, context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]) -> None:
        self.above, self.walk = _passes.running, walk()
        self.calls: list[Kept] = []
        self.state, self.policy, self.tracker = current(), get_policy(), tracker
        self.states: Mapping[str, Tensor] | None = None if tracker is None else dict(tracker.get_states())
        self.own = context_fn()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around the first pass."""
        self.calls.clear()
        with self.own[0], _passes.within(_Pass(True, self.calls, self.above, self.walk)):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a later pass."""
        before = None if self.tracker is None else dict(self.tracker.get_states())
        if self.tracker is not None:
            self.tracker.set_states(self.states)
        later = _Pass(False, self.calls, None, open_walk() if self.walk is None else self.walk)
        try:
            with self.own[1], resumed(self.state), policy_context(self.policy), _passes.within(later):
                yield
        finally:
            if self.tracker is not None:
                self.tracker.set_states(before)


class _Anew(AbstractContextManager[None]):
    """``make()``'s context, a new one each time: a graph that is retained is gone back through again, and recomputes again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=checkpoint_contexts)`` needs to do what ``checkpoint``
    does: for programs that call torch's own. Without it torch calls the function a second time outside of the first pass's autocast, or
    with the scales of a later step. transformers' Trainer:

        TrainingArguments(gradient_checkpointing=True,
                          gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": checkpoint_contexts})

    Returns the contexts of the first pass and of the later ones.
    """
    around = _Around(None, noop_context_fn)
    return around.one(), _Anew(around.again)


_RULES = {"use_reentrant": flag, "debug": flag, "determinism_check": one("default", "none"), "context_fn": callable_,
          "get_rng_state_tracker": optional(callable_)}


def checkpoint(
    function: Callable[..., Any], *args: Any, distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None, tp_group: object = None, use_reentrant: bool = True,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn,
    determinism_check: str = "default", debug: bool = False, **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, of whose activations none is kept: backward calls the function again, with the same bits.

    * ``function``: a module or any callable that does the same each time. Autocasts may be around it or within it.
    * ``use_reentrant``: which of torch's two variants. The first one, reentrant, needs an argument that requires a gradient, and cannot be
      used with ``torch.autograd.grad``; the other one has neither limit.
    * ``get_rng_state_tracker``: returns an object such as ``CudaRNGStatesTracker``, whose states are those of the first pass again.
    * ``context_fn``, ``determinism_check``: torch's, for ``use_reentrant=False``; ``debug``: False only.
    * ``distribute_saved_activations``, ``tp_group``: refused; there is no tensor parallelism yet.

    ``torch.utils.checkpoint.checkpoint`` by itself knows nothing of FP8, see ``checkpoint_contexts``.

    Checkpoints nest. Without gradients it is a plain call. Raises Fp8kitError for wrong arguments, and AutogradError in backward where the
    second pass does not run the FP8 layers of the first.
    """
    if not callable(function):
        raise ArgumentError(expected("checkpoint", "function", type(function).__name__, "a module or another callable"))
    if not torch.compiler.is_compiling():
        check("checkpoint", _RULES, locals())
    for name, value, neutral in (("distribute_saved_activations", distribute_saved_activations, False), ("tp_group", tp_group, None)):
        if value is not neutral and value is not None:
            raise ArgumentError(expected("checkpoint", name, value, f"{neutral}: there is no tensor parallelism yet"))
    if torch.compiler.is_compiling():
        raise not_compiled("checkpoint")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    around = _Around(None if get_rng_state_tracker is None else get_rng_state_tracker(), context_fn)
    # torch restores the random state of the devices of positional tensors only, and its older variant differentiates only these
    named = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    rest = {name: value for name, value in kwargs.items() if name not in named}
    tensors = [kwargs[name] for name in named]

    def positional(*given: Any) -> Any:
        return function(*given[: len(args)], **dict(zip(named, given[len(args) :], strict=True)), **rest)

    if debug:
        raise ArgumentError(expected("checkpoint", "debug", debug, "False: torch allows it beside no contexts, which FP8 needs"))
    if not use_reentrant:
        return torch_checkpoint(positional, *args, *tensors, use_reentrant=False, context_fn=lambda: (around.one(), _Anew(around.again)),
                                determinism_check=determinism_check)
    if context_fn is not noop_context_fn or determinism_check != "default":
        raise ArgumentError(expected("checkpoint", "context_fn, determinism_check", "given", "defaults with use_reentrant=True"))
    passes = iter((around.one(),))

    def call(*given: Any) -> Any:
        with next(passes, None) or around.again():
            return positional(*given)

    return torch_checkpoint(call, *args, *tensors, use_reentrant=True)


__all__ = ["Kept", "checkpoint", "checkpoint_contexts", "first", "idle", "keep", "recall", "walk"]
