"""The autocast state machine alone: nesting, exceptions, threads, when and with what forward states are
handed back."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from fp8kit.autocast import autocast, current, touch_forward
from fp8kit.errors import Fp8kitError, RecipeError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.recipes import NAMED


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

        def drop(self):
            log.append(("drop", self.name))

    return State


def test_the_innermost_decides():
    assert current() is None
    a, b = DelayedScaling(margin=1), Float8CurrentScaling()
    with autocast(recipe=a):
        assert current()[:5] == (True, False, a, 1, False)
        with autocast(enabled=False, recipe=b):
            assert current()[:5] == (False, False, b, 2, False)
            with autocast(calibrating=True):
                assert current()[:5] == (True, True, DelayedScaling(), 3, False)
            assert current()[:5] == (False, False, b, 2, False)
        assert current()[:5] == (True, False, a, 1, False)
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
    assert log == [("drop", "x")]
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
        assert current().recipe == recipe
    assert log == [("commit", recipe, ["x"])]
    leave.set()
    thread.join()
    assert seen == [None, 7]


def test_an_exit_without_an_entry_is_refused():
    a = autocast()
    for _ in range(2):
        with pytest.raises(Fp8kitError, match="one exit for each entry"):
            a.__exit__(None, None, None)
        with a:
            assert current() is not None


@pytest.mark.parametrize("first", [0, 1])
def test_exits_in_any_order_leave_nothing_on(first, make_state, log):
    """What is left decides; states are updated when no active one is left round them."""
    recipe, other = DelayedScaling(margin=1), Float8CurrentScaling()
    scopes = [autocast(recipe=recipe), autocast(recipe=other)]
    for scope in scopes:
        scope.__enter__()
    touch_forward(make_state("x"), recipe, True)
    scopes[first].__exit__(None, None, None)
    assert current().recipe == (other, recipe)[first]
    assert log == ([("commit", recipe, ["x"])] if first == 0 else [])
    touch_forward(make_state("y"), recipe, True)
    scopes[1 - first].__exit__(None, None, None)
    assert current() is None
    assert log == [("commit", recipe, each) for each in ([["x"], ["y"]] if first == 0 else [["x", "y"]])]


def test_generators_that_end_in_any_order_leave_nothing_on():
    def numbers(margin):
        with autocast(recipe=DelayedScaling(margin=margin)):
            yield current().recipe.margin
            yield current().recipe.margin

    one, two = numbers(1), numbers(2)
    assert [next(one), next(two)] == [1, 2]
    one.close()
    assert current().recipe.margin == 2
    two.close()
    assert current() is None


def test_tasks_that_take_turns_have_their_own(make_state, log):
    """Each task sees its own autocast, or the one around the loop; each one's states are its own."""
    seen = []

    async def task(name, margin, turns):
        recipe = DelayedScaling(margin=margin)
        async with asyncio.TaskGroup() as group:
            with autocast(recipe=recipe):
                group.create_task(within(margin))
                for _ in range(turns):
                    await asyncio.sleep(0)
                    seen.append((margin, current().recipe.margin, current().depth))
                touch_forward(make_state(name), recipe, True)
        await asyncio.sleep(0)
        seen.append((margin, None if current() is None else current().recipe.margin, "after"))

    async def within(margin):
        seen.append((margin, current().recipe.margin, "child"))

    async def main():
        await asyncio.gather(task("a", 1, 4), task("b", 2, 2), task("c", 3, 6))

    asyncio.run(main())
    assert current() is None
    assert all(margin == own and where in (1, "child") for margin, own, where in seen if own is not None)
    assert sorted(margin for margin, own, _ in seen if own is None) == [1, 2, 3]
    assert [names for _, _, names in log] == [["b"], ["a"], ["c"]]
    assert all(recipe.margin == "abc".index(names[0]) + 1 for _, recipe, names in log)
    with autocast(recipe=DelayedScaling(margin=7)):
        asyncio.run(within(7))


def test_a_task_that_outlives_its_autocast_is_in_none():
    async def late(begun):
        begun.append(current() is not None)
        await asyncio.sleep(0.01)
        begun.append(current() is not None)

    async def main():
        begun = []
        with autocast():
            task = asyncio.ensure_future(late(begun))
            await asyncio.sleep(0)
        await task
        return begun

    assert asyncio.run(main()) == [True, False]


def test_an_asynchronous_generator_that_another_task_closes():
    """The loop closes what was broken out of, in a task of its own."""

    async def numbers():
        with autocast():
            yield 1
            yield 2

    async def main():
        made = numbers()
        assert await made.__anext__() == 1
        assert current() is not None
        await asyncio.create_task(made.aclose())
        return current()

    assert asyncio.run(main()) is None


def test_an_object_that_threads_and_tasks_share():
    shared, failed = autocast(), []

    def enter(times):
        for _ in range(times):
            with shared:
                if current() is None or current().depth != 1:
                    failed.append("within")
            if current() is not None:
                failed.append("after")

    async def turns(n):
        with shared:
            for _ in range(n):
                await asyncio.sleep(0)
                if current() is None or current().depth != 1:
                    failed.append("task")
        if current() is not None:
            failed.append("after task")

    async def main():
        await asyncio.gather(turns(3), turns(1), turns(2))

    asyncio.run(main())
    threads = [threading.Thread(target=enter, args=(2000,)) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed


def test_a_recipe_in_the_place_of_enabled():
    with pytest.raises(RecipeError, match="enabled: got a DelayedScaling, expected a bool; recipe= takes it"):
        autocast(DelayedScaling())
    with pytest.raises(RecipeError, match=r"'mxfp8', expected a bool; recipe= .*recipes\.named\('mxfp8'\)"):
        autocast("mxfp8")


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


def test_a_named_recipe_in_the_place_of_its_recipe():
    with pytest.raises(RecipeError, match=r"its \.recipe is one"):
        autocast(recipe=NAMED["mxfp8"])
