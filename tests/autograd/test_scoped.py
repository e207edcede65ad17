"""Blocks that end in any order, by generators and asyncio tasks, leave nothing in force."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.arrays import CPU
from fp8kit.autograd import is_grad_enabled, set_grad_enabled
from fp8kit.nn import random


def unrecorded():
    with fk.no_grad():
        yield
        yield


@pytest.mark.parametrize("first", [0, 1])
def test_generators_end_in_any_order(first):
    made = [unrecorded(), unrecorded()]
    for each in made:
        next(each)
    assert not is_grad_enabled()
    made[first].close()
    assert not is_grad_enabled()
    made[1 - first].close()
    assert is_grad_enabled()


def test_tasks_that_take_turns_record_or_do_not():
    shared = fk.no_grad()

    async def without(turns):
        with shared:
            for _ in range(turns):
                await asyncio.sleep(0)
                assert not is_grad_enabled()
                with set_grad_enabled(True):
                    await asyncio.sleep(0)
                    assert is_grad_enabled()
        assert is_grad_enabled()

    async def recorded():
        for _ in range(8):
            await asyncio.sleep(0)
            assert is_grad_enabled()

    async def main():
        await asyncio.gather(without(3), recorded(), without(1), without(5))

    asyncio.run(main())
    assert is_grad_enabled()


def test_what_is_set_without_a_block_holds_until_the_block_around_it_ends():
    set_grad_enabled(False)
    assert not is_grad_enabled()
    for _ in range(1000):
        set_grad_enabled(True)  # keeps nothing of the one before
    with fk.no_grad():
        set_grad_enabled(True)
        assert is_grad_enabled()
        with fk.no_grad():
            assert not is_grad_enabled()
        assert is_grad_enabled()
    assert is_grad_enabled()
    with set_grad_enabled(False):
        assert not is_grad_enabled()
    assert is_grad_enabled()


def test_what_draws_ends_with_its_block():
    """``draw_from`` of two generators, closed in the order in which they were entered."""

    def drawing(seed):
        with fk.draw_from(lambda device: np.array([seed, 0], np.int64)):
            yield
            yield

    one, two = drawing(1), drawing(2)
    next(one)
    next(two)
    one.close()
    assert random.next_rng(CPU).numpy().tolist() == [2, 0]
    two.close()
    fk.manual_seed(5)
    assert random.next_rng(CPU).numpy().tolist() == [5, 0]
