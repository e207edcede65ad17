"""The autocast state machine alone: nesting, exceptions, threads, when and with what forward states are
handed back."""

from __future__ import annotations

import threading

import pytest

from fp8kit.autocast import autocast, current, touch_forward
from fp8kit.errors import Fp8kitError, RecipeError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling


@pytest.fixture
def log():
    return []


@pytest.fixture
def make_state(log):
    class State:
        def __init__(self, name):
            self.name = name

        @classmethod
        def commit_forward(cls, recipe, states):
            log.append(("commit", recipe, [s.name for s in states]))

        @classmethod
        def discard_forward(cls, states):
            log.append(("discard", [s.name for s in states]))

    return State


def test_the_innermost_decides():
    assert current() is None
    a, b = DelayedScaling(margin=1), Float8CurrentScaling()
    with autocast(recipe=a):
        assert current() == (True, False, a, 1, False)
        with autocast(enabled=False, recipe=b):
            assert current() == (False, False, b, 2, False)
            with autocast(calibrating=True):
                assert current() == (True, True, DelayedScaling(), 3, False)
            assert current() == (False, False, b, 2, False)
        assert current() == (True, False, a, 1, False)
    assert current() is None


def test_states_are_handed_back_once_at_the_outermost_exit(log, make_state):
    a, b = DelayedScaling(margin=1), DelayedScaling(margin=2)
    x, y = make_state("x"), make_state("y")
    with autocast(recipe=a):
        touch_forward(x, a, True)
        touch_forward(x, a, True)
        with autocast(recipe=b):
            touch_forward(y, b, True)
        with autocast(recipe=a):
            touch_forward(y, a, True)
        assert log == []
    assert log == [("commit", a, ["x", "y"]), ("commit", b, ["y"])]
    with autocast(recipe=a):
        pass
    assert len(log) == 2


def test_a_disabled_outer_block_does_not_defer_the_update(log, make_state):
    recipe = DelayedScaling()
    with autocast(enabled=False):
        with autocast(recipe=recipe):
            touch_forward(make_state("x"), recipe, True)
        assert log == [("commit", recipe, ["x"])]


def test_without_gradients_nothing_is_updated_except_while_calibrating(log, make_state):
    recipe = DelayedScaling()
    with autocast(recipe=recipe):
        touch_forward(make_state("x"), recipe, False)
    assert log == []
    with autocast(enabled=False, calibrating=True, recipe=recipe):
        touch_forward(make_state("x"), recipe, False)
    assert log == [("commit", recipe, ["x"])]


def test_an_exception_drops_what_was_recorded(log, make_state):
    recipe = DelayedScaling()

    @autocast(recipe=recipe)
    @autocast(recipe=recipe)
    def step():
        touch_forward(make_state("x"), recipe, True)
        raise KeyError

    with pytest.raises(KeyError):
        step()
    assert log == [("discard", ["x"])]
    assert current() is None
    with autocast(recipe=recipe):
        pass
    assert len(log) == 1


def test_an_exception_caught_inside_changes_nothing(log, make_state):
    recipe = DelayedScaling()

    @autocast(recipe=recipe)
    def step():
        touch_forward(make_state("x"), recipe, True)
        raise KeyError

    with autocast(recipe=recipe):
        with pytest.raises(KeyError):
            step()
        assert log == []
    assert log == [("commit", recipe, ["x"])]


def test_one_object_as_decorator_reentrant_and_recursive():
    recipe = DelayedScaling(margin=3)
    scope = autocast(recipe=recipe)

    @scope
    def depth(n):
        return current().depth if n == 0 else depth(n - 1)

    assert depth(0) == 1
    assert depth(3) == 4
    with scope, scope:
        assert current().depth == 2
    assert current() is None


def test_threads_do_not_see_each_other(log, make_state):
    recipe = DelayedScaling()
    seen, inside, leave = [], threading.Event(), threading.Event()

    def other():
        seen.append(current())
        with autocast(recipe=DelayedScaling(margin=7)):
            inside.set()
            leave.wait(10)
            seen.append(current().recipe.margin)

    thread = threading.Thread(target=other)
    with autocast(recipe=recipe):
        thread.start()
        assert inside.wait(10)
        touch_forward(make_state("x"), recipe, True)
        assert current().recipe is recipe
    assert log == [("commit", recipe, ["x"])]
    leave.set()
    thread.join()
    assert seen == [None, 7]


def test_exits_out_of_order_are_refused():
    a, b = autocast(), autocast()
    a.__enter__()
    b.__enter__()
    with pytest.raises(Fp8kitError, match="reverse order"):
        a.__exit__(None, None, None)
    b.__exit__(None, None, None)
    a.__exit__(None, None, None)
    with pytest.raises(Fp8kitError, match="reverse order"):
        a.__exit__(None, None, None)


def test_a_recipe_in_the_place_of_enabled():
    with pytest.raises(RecipeError, match="enabled: got a DelayedScaling, expected a bool; recipe= takes it"):
        autocast(DelayedScaling())


def test_touching_needs_an_active_autocast(make_state):
    with pytest.raises(Fp8kitError, match="touch_forward"):
        touch_forward(make_state("x"), DelayedScaling(), True)
    with autocast(enabled=False), pytest.raises(Fp8kitError, match="touch_forward"):
        touch_forward(make_state("x"), DelayedScaling(), True)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"enabled": 1},
        {"calibrating": "no"},
        {"recipe": "delayed"},
        {"recipe": DelayedScaling},
        {"amax_reduction_group": 0},
    ],
)
def test_wrong_arguments(kwargs):
    with pytest.raises(RecipeError, match=next(iter(kwargs))):
        autocast(**kwargs)
