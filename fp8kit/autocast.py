"""``autocast``: where FP8 is on, by which recipe, and when forward states are updated. Knows no operation, no
frontend and no array.

Frontends ask ``current()`` in every layer, and ``touch_forward`` each state whose amaxes they recorded. When
the outermost active autocast ends, every touched state is handed back once, grouped by recipe, to its class's
``commit_forward``; when it ends by an exception, or an update raises, each is told to ``drop`` what it
recorded, so that a step that never finished leaves no trace in the history.

An autocast holds for its thread or asyncio task, as the blocks of ``scoped``. torch.compile cannot call a
ContextVar, but it reads, and guards, what a property gives whose getter is a builtin: ``_Task.innermost``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from fp8kit.arguments import shown, want_known, without_unknown
from fp8kit.collectives import Collectives
from fp8kit.errors import Fp8kitError, RecipeError, UnsupportedError
from fp8kit.recipe import DelayedScaling, Recipe


class ForwardState(Protocol):
    """What a frontend registers with ``touch_forward``: one module's forward scales and amax history."""

    @classmethod
    def commit_forward(cls, recipe: Recipe, states: Sequence[Any]) -> None:
        """Update the scales of all ``states``, each named once, by ``recipe``."""

    def drop(self) -> None:
        """Forget the amaxes that were recorded since the last update."""


# what ``recipe`` may be, as refusals say it
WANTED = "a Recipe, such as fp8kit.recipe.DelayedScaling() or fp8kit.recipes.named('mxfp8'), or None"


class AutocastState(NamedTuple):
    """The innermost autocast of the thread or task.

    ``enabled``: FP8 is on. ``calibrating``: compute stays as ``enabled`` says, and amaxes are recorded in any
    case. ``recipe``: the recipe in force. ``depth``: 1 for an outermost autocast. ``check_finite``: modules
    look for Inf and NaN. ``key``: of one that a compiled function opened, its recipe's.
    """

    enabled: bool
    calibrating: bool
    recipe: Recipe
    depth: int
    check_finite: bool = False
    key: str = ""


# (class of the states, identity of a recipe, whose hash takes time) -> the recipe, and its states
_Touched = dict[tuple[type[ForwardState], Any], tuple[Recipe, dict[ForwardState, None]]]
_Stack = list[tuple["autocast | resumed", AutocastState]]


class _Entered:
    """One autocast that was entered, ``scope``. ``stack``: it, and what is around it, from the outermost one
    on. ``root``: the outermost ``active`` one, None where none is, whose ``touched`` has what is to be
    updated. ``traced``: the stack of the compiled function's own autocasts that are around it, None where
    none is."""

    traced: _Stack | None = None

    def __init__(
        self, scope: autocast | resumed, state: AutocastState, active: bool, above: _Entered | None
    ) -> None:
        self.scope, self.value, self.active, self.above = scope, state, active, above
        self.ended = False
        self.root: _Entered | None = self if active else None
        self.stack: _Stack = [(scope, state)]
        self.touched: _Touched = {}
        if above is not None:
            self.stack = above.stack + self.stack
            self.root = above.live_root() or self.root
        _INNERMOST.set(self)
        before = _thread.stack
        if before:  # entered by what a compiled function left untraced
            outermost = above is None or before[-1][0].tracing
            self.traced = before if outermost else above.traced  # type: ignore[union-attr]
            self.stack = [*before, (scope, state)]
            _thread.stack = self.stack

    def live_root(self) -> _Entered | None:
        """``root``; where that one ended before what is in it, the outermost active one that is left."""
        root = self.root
        if root is not None and root.ended:
            self.root = None
            at: _Entered | None = self
            while at is not None:
                if at.active and not at.ended:
                    self.root = at
                at = at.above
        return self.root


class _Thread(threading.local):
    """The autocasts that a compiled function has opened itself while it runs, with those around them."""

    def __init__(self) -> None:
        self.stack: _Stack = []


_thread = _Thread()
_INNERMOST: ContextVar[_Entered | None] = ContextVar("fp8kit_autocast", default=None)  # perhaps ended


class _Task:
    """What torch.compile reads: ``innermost`` is the entry of ``_INNERMOST``, or this object where there is
    none, which looks like one that says nothing."""

    innermost: Any = property(_INNERMOST.get)
    ended = active = False
    value = above = None


_task = _Task()


def _innermost() -> _Entered | None:
    """The innermost autocast of this thread or task."""
    found = _INNERMOST.get()
    while found is not None and found.ended:
        found = found.above
    return found


def _left(own: _Entered) -> None:
    """Put what is in force after the end of an autocast where it is read."""
    found = _innermost()
    _INNERMOST.set(found)
    if own.traced is not None:
        _thread.stack = found.stack if found is not None and found.traced is own.traced else own.traced


def current() -> AutocastState | None:
    """The innermost autocast of this thread or task, None outside of any."""
    stack = _thread.stack
    if stack:
        return stack[-1][1]
    found = _INNERMOST.get()
    if found is not None and found.ended:
        found = _innermost()
    return None if found is None else found.value


def entered() -> list[tuple[Any, AutocastState]]:
    """Every autocast of this thread or task with its state, from the outermost one on."""
    stack = _thread.stack
    if stack:
        return stack
    found = _INNERMOST.get()
    if found is not None and found.ended:
        found = _innermost()
    return [] if found is None else found.stack


def traced_state() -> AutocastState | None:
    """``current()`` for code that torch.compile traces."""
    stack = _thread.stack
    if stack:
        return stack[-1][1]
    found = _task.innermost
    while found is not None and found.ended:
        found = found.above
    return None if found is None else found.value


def traced_active() -> bool:
    """For code that torch.compile traces: whether an autocast is around it that will update states."""
    found = _task.innermost
    while found is not None:
        if found.active and not found.ended:
            return True
        found = found.above
    return False


class _FiniteChecks:
    ever = False


# whether any autocast had ``check_finite`` so far: what is read where every call counts
finite_checks = _FiniteChecks()


def checking_finite() -> bool:
    """Whether modules are to look for Inf and NaN."""
    found = _INNERMOST.get()
    if found is not None and found.ended:
        found = _innermost()
    return found is not None and found.value.check_finite


def _drop(touched: _Touched) -> None:
    for _, states in touched.values():
        for state in states:
            state.drop()


def leave_all() -> None:
    """End every autocast of this thread or task, and forget the amaxes that were recorded in them."""
    while (found := _innermost()) is not None:
        found.ended = True
        _left(found)
        _drop(found.touched)


def touch_forward(state: ForwardState, recipe: Recipe, training: bool) -> autocast | resumed:
    """Register that ``state`` recorded amaxes and is to be updated by ``recipe`` when the outermost active
    autocast ends. Returns the innermost autocast.

    ``training``: whether gradients were enabled. Without gradients a state is not updated (inference must not
    change a model), except while calibrating, whose purpose that is. Fp8kitError outside of an active
    autocast.
    """
    stack = _thread.stack
    if stack:
        scope = stack[-1][0]
        if isinstance(scope, autocast) and scope.tracing and scope.touched_untraced(state, recipe, training):
            return scope
    found = _INNERMOST.get()
    if found is None or found.ended:
        found = _innermost()
    if found is None or (root := found.root) is None or (root.ended and (root := found.live_root()) is None):
        raise Fp8kitError(
            "touch_forward", "state", "a call outside of autocast", "a call within an active autocast"
        )
    if training or found.value.calibrating:
        # in one step: another thread may end it meanwhile
        root.touched.setdefault((type(state), id(recipe)), (recipe, {}))[1][state] = None
    return found.scope


def _by_value(touched: _Touched) -> _Touched:
    """Those of equal recipes together."""
    found: _Touched = {}
    for (own, _), (recipe, states) in touched.items():
        found.setdefault((own, recipe), (recipe, {}))[1].update(states)
    return found


def _commit(touched: _Touched) -> None:
    """Update what was touched; where an update raises, forget what is left."""
    if len(touched) > 1:
        touched = _by_value(touched)
    try:
        for (own, _), (recipe, states) in [*touched.items()]:
            own.commit_forward(recipe, [*states])
            states.clear()
    except BaseException:
        _drop(touched)
        raise


def commit_touched() -> None:
    """Update what was touched within the outermost active autocast now, not at its end."""
    found = _innermost()
    root = None if found is None else found.live_root()
    if root is not None:
        touched, root.touched = root.touched, {}
        _commit(touched)


def want_no_checks(operation: str, state: AutocastState | None) -> None:
    """UnsupportedError in the scope of ``check_finite``, for layers that do not look for Inf and NaN."""
    if state is not None and state.check_finite:
        wanted = "False: fp8kit.nn's and fp8kit_torch's eager layers alone look for Inf and NaN"
        raise UnsupportedError(operation, "check_finite of autocast", True, wanted)


class autocast(ContextDecorator):
    """Context manager and decorator: modules within compute in FP8.

    * ``enabled``: False switches FP8 off, also inside another autocast.
    * ``calibrating``: record amaxes and update scales, also with ``enabled=False`` (high-precision compute)
      and without gradients: this prepares a model for FP8 inference.
    * ``recipe``: a Recipe, which counts as it is when the block is entered; None is ``DelayedScaling()``.
    * ``check_finite``: True makes ``fp8kit.nn``'s modules and PyTorch's eager ones look at every activation,
      weight and gradient for Inf and NaN, in high precision too, and raise NonFiniteError that names the
      first layer and tensor with one; what the step recorded is dropped. For finding faults: it waits for the
      device after every operation. None is as the autocast around this one, False where there is none. JAX's
      linear layers, and PyTorch's within ``torch.compile``, cannot look, and are refused in its scope.
    * ``amax_reduction_group``: ranks over which delayed scaling's amaxes are reduced by their maximum before
      each update, where the recipe has ``reduce_amax``: a ``Collectives``; None is all processes, where
      ``distributed.init`` was called. They run the same layers in the same order.

    Holds for its thread or, within asyncio, for its task and the tasks started in it. Nests: the innermost
    decides. Forward states are updated when the outermost active (enabled or calibrating) autocast ends; not
    when it ends by an exception: then what was recorded is dropped. Backward states are updated when the
    backward pass ends, wherever that is. Blocks may end in any order, as generators and tasks do. One object
    may be entered any number of times, in any thread; Fp8kitError where it is left more often. Raises
    RecipeError for wrong arguments. Source: Transformer Engine's ``autocast``.
    """

    tracing: bool = False  # open within a function that torch.compile traced

    @without_unknown
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: object = None,
        check_finite: bool | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            want_known(type(self), unknown)
        flags = (enabled is True or enabled is False) and (calibrating is False or calibrating is True)
        if not flags or not (check_finite is None or check_finite is True or check_finite is False):
            checking = False if check_finite is None else check_finite
            _refuse_flag(enabled=enabled, calibrating=calibrating, check_finite=checking)
        if recipe is not None and not isinstance(recipe, Recipe):
            raise self._no_recipe(recipe)
        if amax_reduction_group is not None:
            self._want_group(amax_reduction_group)
        self.amax_reduction_group: Any = amax_reduction_group
        self.enabled = enabled
        self.calibrating = calibrating
        self.check_finite = check_finite
        self.recipe = _DEFAULT if recipe is None else recipe
        # entered and not left, in their order; threads may share it
        self._open: dict[_Entered, None] = {}

    def _no_recipe(self, recipe: object) -> RecipeError:
        """The error for a ``recipe`` that is none."""
        return RecipeError("autocast", "recipe", shown(recipe), f"{WANTED}{_inside(recipe)}")

    def _want_group(self, group: object) -> None:
        """RecipeError for an ``amax_reduction_group`` that is none."""
        if not isinstance(group, Collectives):
            wanted = "None or a Collectives, such as distributed.init() gives"
            raise RecipeError("autocast", "amax_reduction_group", repr(group), wanted)

    def __enter__(self) -> autocast:
        above = _INNERMOST.get()
        if above is not None and above.ended:
            above = _innermost()
        depth, check = 1, self.check_finite
        if above is not None:
            depth, check = above.value.depth + 1, above.value.check_finite if check is None else check
        if check:
            finite_checks.ever = True
        enabled, calibrating = self.enabled, self.calibrating
        state = AutocastState(enabled, calibrating, self.recipe.fixed, depth, check is True)
        self._open[_Entered(self, state, enabled or calibrating, above)] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own = innermost = _INNERMOST.get()
        if own is None or own.ended or own.scope is not self:
            own = self._entry()
        del self._open[own]
        own.ended, own.root = True, None  # which may be itself, and would keep it
        if own is innermost and own.above is None and own.traced is None:  # the same in fewer calls
            _INNERMOST.set(None)
        else:
            _left(own)
        recipe = own.value.recipe
        if recipe.by_layer and own.above is None and kind is None:
            recipe.ended()
        if own.touched:
            touched, own.touched = own.touched, {}
            (_commit if kind is None else _drop)(touched)

    def _entry(self) -> _Entered:
        """Of the entries of this object that are open the innermost one of this thread or task; where none
        is, because an entry is left elsewhere, the last one. Fp8kitError where none is open."""
        if not self._open:
            raise Fp8kitError(
                "autocast", "exit", "an autocast that is not entered", "one exit for each entry"
            )
        at = _innermost()
        while at is not None and at not in self._open:
            at = at.above
        return next(reversed(self._open)) if at is None else at

    def touched_untraced(self, state: ForwardState, recipe: Recipe, training: bool) -> bool:
        """Of one that a compiled function opened: whether it updates this state of a layer that the function
        left untraced."""
        return False


class resumed:
    """Context manager: what ``current()`` said when a forward pass ran, once more, for its recomputation.
    Updates no state at its end."""

    __slots__ = ("_entered", "state")
    tracing = False
    amax_reduction_group = None

    def __init__(self, state: AutocastState | None) -> None:
        self.state = state

    def __enter__(self) -> None:
        state = self.state or AutocastState(False, False, _DEFAULT, 0)
        self._entered = _Entered(self, state, False, _innermost())

    def __exit__(self, *exc: object) -> None:
        self._entered.ended = True
        _left(self._entered)


_DEFAULT = DelayedScaling().fixed


def _refuse_flag(**flags: Any) -> None:
    """RecipeError for the first of the flags that is no bool."""
    name, flag = next((name, flag) for name, flag in flags.items() if type(flag) is not bool)
    got = f"a {type(flag).__name__}" if isinstance(flag, Recipe) else shown(flag)
    more = "; recipe= takes it" if isinstance(flag, Recipe) else ""
    more = f"; recipe= takes {WANTED}" if isinstance(flag, str) else more
    raise RecipeError("autocast", name, got, f"a bool{more}")


def _inside(value: Any) -> str:
    """The end of a refusal of an entry of ``recipes.NAMED``, which has a recipe."""
    return ": its .recipe is one" if isinstance(getattr(value, "recipe", None), Recipe) else ""
