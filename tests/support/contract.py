"""Few of the contract's cases, for tests that go through every kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from fp8kit.formats import float32
from fp8kit.testing.contract import Case, cases
from tests.support.combinations import covering

# attention over thousands of pairs of tokens, for whose oracle the CPU takes a second
LONG = ("long", "window-long", "many-tiles")


@functools.cache
def usual(kernel: str) -> tuple[Case, ...]:
    """Cases of a kernel in which every value of every option occurs, but for those of attention's longest
    calls."""
    return _some([case for case in cases(kernel) if case.name not in LONG])


def _some(found: Sequence[Case]) -> tuple[Case, ...]:
    named = {
        tuple((name, repr(value)) for name, value in ({"dtype": float32} | case.options).items()): case
        for case in found
    }
    return tuple(named[options] for options in covering(list(named)))


def params(given: Iterable[Case]) -> list[Any]:
    """Cases of one kernel as parameters, those that are not needed for every value of every option for
    ``make test-combinations``."""
    found = [*given]
    some = _some(found)
    return [
        pytest.param(case, id=str(case), marks=() if case in some else pytest.mark.combinations)
        for case in found
    ]
