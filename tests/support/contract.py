"""Few of the contract's cases, for tests that go through every kernel."""

from __future__ import annotations

import functools

from fp8kit.formats import float32
from fp8kit.testing.contract import Case, cases
from tests.support.combinations import covering

# attention over thousands of pairs of tokens, for whose oracle the CPU takes a second
LONG = ("long", "window-long", "many-tiles")


@functools.cache
def usual(kernel: str) -> tuple[Case, ...]:
    """Cases of a kernel in which every value of every option occurs, but for those of attention's longest
    calls."""
    found = {
        tuple((name, repr(value)) for name, value in ({"dtype": float32} | case.options).items()): case
        for case in cases(kernel)
        if case.name not in LONG
    }
    return tuple(found[options] for options in covering(list(found)))
