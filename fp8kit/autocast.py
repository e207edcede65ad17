"""``autocast``: where FP8 is on, by which recipe, and when forward states are updated. Knows no operation, no
frontend and no array.

Frontends ask ``current()`` in every layer, and ``touch_forward`` each state whose amaxes they recorded. When
the outermost active autocast of the thread ends, every touched state is handed back once, grouped by recipe,
to its class's ``commit_forward``; when it ends by an exception, or an update raises, to ``discard_forward``
instead, so that a step that never finished leaves no trace in the history.

The stack is ``threading.local``: an autocast never leaks into another thread (torch.compile can read it
there, a ContextVar not).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from fp8kit.errors import Fp8kitError, RecipeError
from fp8kit.recipe import DelayedScaling, Recipe


class ForwardState(Protocol):
    """What a frontend registers with ``touch_forward``: one module's forward scales and amax history."""

    @classmethod
    def commit_forward(cls, recipe: Recipe, states: Sequence[Any]) -> None:
        """Update the scales of all ``states``, each named once, by ``recipe``."""

    @classmethod
    def discard_forward(cls, states: Sequence[Any]) -> None:
        """Forget the amaxes that were recorded since the last update."""


class AutocastState(NamedTuple):
    """The innermost autocast of the thread.

    ``enabled``: FP8 is on. ``calibrating``: compute stays as ``enabled`` says, and amaxes are recorded in any
    case. ``recipe``: the recipe in force. ``depth``: 1 for an outermost autocast. ``check_finite``: modules
    look for Inf and NaN.
    """

    enabled: bool
    calibrating: bool
    recipe: Recipe
    depth: int
    check_finite: bool = False


_Touched = tuple[type[ForwardState], Recipe, dict[int, ForwardState]]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[autocast | resumed, AutocastState]] = []
        self.active = 0  # depth of the outermost enabled or calibrating autocast, 0 where there is none
        # by the identity of a recipe, whose hash takes time: (recipe, states by their identity)
        self.touched: dict[tuple[type[ForwardState], int], tuple[Recipe, dict[int, ForwardState]]] = {}


_thread = _Thread()


def current() -> AutocastState | None:
    """The innermost autocast of this thread, None outside of any."""
    stack = _thread.stack
    return stack[-1][1] if stack else None


def touch_forward(state: ForwardState, recipe: Recipe, training: bool) -> None:
    """Register that ``state`` recorded amaxes and is to be updated by ``recipe`` when the outermost active
    autocast ends.

    ``training``: whether gradients were enabled. Without gradients a state is not updated (inference must not
    change a model), except while calibrating, whose purpose that is. Fp8kitError outside of an active
    autocast.
    """
    stack = _thread.stack
    if not _thread.active:
        raise Fp8kitError(
            "touch_forward", "state", "a call outside of autocast", "a call within an active autocast"
        )
    if training or stack[-1][1].calibrating:
        key = type(state), id(recipe)
        known = _thread.touched.get(key)
        if known is None:
            known = _thread.touched[key] = recipe, {}
        known[1][id(state)] = state


def _by_value(touched: list[_Touched]) -> list[_Touched]:
    """Those of equal recipes together."""
    groups: dict[tuple[type[ForwardState], Recipe], dict[int, ForwardState]] = {}
    for own, recipe, states in touched:
        groups.setdefault((own, recipe), {}).update(states)
    return [(own, recipe, states) for (own, recipe), states in groups.items()]


class autocast(ContextDecorator):
    """Context manager and decorator: modules within compute in FP8.

    * ``enabled``: False switches FP8 off, also inside another autocast.
    * ``calibrating``: record amaxes and update scales, also with ``enabled=False`` (high-precision compute)
      and without gradients: this prepares a model for FP8 inference.
    * ``recipe``: a Recipe; None is ``DelayedScaling()``.
    * ``check_finite``: True makes modules look at every activation, weight and gradient for Inf and NaN, in
      high precision too, and raise NonFiniteError that names the first layer and tensor with one; what the
      step recorded is dropped. For finding faults: it waits for the device after every operation. None is as
      the autocast around this one, False where there is none.
    * ``amax_reduction_group``: must be None; one process has nothing to reduce.

    Nests: the innermost decides. Forward states are updated when the outermost active (enabled or
    calibrating) autocast of the thread ends; not when it ends by an exception: then what was recorded is
    dropped. Backward states are updated when the backward pass ends, wherever that is. One object may be
    entered any number of times, in any thread. Raises RecipeError for wrong arguments. Source: Transformer
    Engine's ``autocast``.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: object = None,
        check_finite: bool | None = None,
    ) -> None:
        checking = False if check_finite is None else check_finite
        flags: dict[str, Any] = {"enabled": enabled, "calibrating": calibrating, "check_finite": checking}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                got, more = (
                    (f"a {type(flag).__name__}", "; recipe= takes it")
                    if isinstance(flag, Recipe)
                    else (repr(flag), "")
                )
                raise RecipeError("autocast", name, got, f"a bool{more}")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise RecipeError("autocast", "recipe", repr(recipe), "a Recipe, such as recipe.DelayedScaling()")
        if amax_reduction_group is not None:
            group = repr(amax_reduction_group)
            raise RecipeError("autocast", "amax_reduction_group", group, "None: groups are not supported yet")
        self.enabled = enabled
        self.calibrating = calibrating
        self.check_finite = check_finite
        self.recipe = _DEFAULT if recipe is None else recipe

    def __enter__(self) -> autocast:
        thread = _thread
        depth = len(thread.stack) + 1
        check = self.check_finite
        if check is None:
            check = bool(thread.stack) and thread.stack[-1][1].check_finite
        thread.stack.append((self, AutocastState(self.enabled, self.calibrating, self.recipe, depth, check)))
        if not thread.active and (self.enabled or self.calibrating):
            thread.active = depth
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread = _thread
        if not thread.stack or thread.stack[-1][0] is not self:
            got = "an autocast that is not this thread's innermost one"
            raise Fp8kitError(
                "autocast", "exit", got, "exits in the reverse order of entering, in the same thread"
            )
        depth = thread.stack.pop()[1].depth
        if depth != thread.active:
            return
        thread.active = 0
        left = [(own, recipe, states) for (own, _), (recipe, states) in thread.touched.items()]
        thread.touched = {}
        if len(left) > 1:
            left = _by_value(left)
        try:
            while left and kind is None:
                own, recipe, states = left[0]
                own.commit_forward(recipe, list(states.values()))
                del left[0]
        finally:
            for own, _, states in left:
                own.discard_forward(list(states.values()))


class resumed:
    """Context manager: what ``current()`` said when a forward pass ran, once more, for its recomputation.
    Updates no state at its end."""

    __slots__ = ("state",)

    def __init__(self, state: AutocastState | None) -> None:
        self.state = state

    def __enter__(self) -> None:
        _thread.stack.append((self, self.state or AutocastState(False, False, _DEFAULT, 0)))

    def __exit__(self, *exc: object) -> None:
        _thread.stack.pop()


_DEFAULT = DelayedScaling()
