"""Every layer under every recipe: a moved call has, byte for byte, the launches of the call that it stands
for, and a training with moved calls has the bits of one without."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest

from fp8kit.backends.cuda.moving import Moving
from fp8kit.execution.replay import Replays
from tests.golden.command import differences, run, selected

FRONTENDS = ("native", "torch")
CASES = {
    (frontend, program): [case for case in selected("cuda", (frontend,)) if case.program == program]
    for frontend in FRONTENDS
    for program in dict.fromkeys(case.program for case in selected("cuda", (frontend,)))
}
# of the calls that come a second time with the same alignments, so many move
LEAST = 0.9


class Elsewhere:
    """Allocations between the calls, so that arrays never lie where they lay."""

    def __init__(self, frontend: str) -> None:
        import cupy
        import torch

        self.random, self.kept = random.Random(0), []
        self.empty = cupy.empty if frontend == "native" else torch.empty
        self.kind = (
            {"dtype": cupy.uint8} if frontend == "native" else {"dtype": torch.uint8, "device": "cuda"}
        )

    def __call__(self) -> None:
        self.kept.append(self.empty(self.random.randrange(1, 1 << 16), **self.kind))


def checked(elsewhere: Elsewhere, found: collections.Counter[str]) -> Any:
    """A ``Replays.run`` that calls the function each time, and compares what is on the stream then with the
    form's call of before, moved to these arrays."""

    def run(self: Replays, key: Any, function: Any, *arguments: Any) -> None:
        elsewhere()
        with self._recorder() as recording:
            function(*arguments)
        if not recording.complete or not self._sizes:
            return
        form, addresses = self._form(key[0], key[1:]), key[1:]
        there = form in self._moving
        before, made = self._moving.get(form), recording.moving(addresses, self._sizes)
        self._moving[form] = made
        if not there:
            return
        found["moved" if before else f"not moved: {', '.join(recording.names)}"] += 1
        assert (before is None) == (made is None), recording.names
        if before is not None:
            assert before.names == made.names
            assert before.place(addresses) == made.place(addresses), recording.names
            np.testing.assert_array_equal(before._words, made._words, str(recording.names))

    return run


@pytest.mark.gpu
@pytest.mark.parametrize(("frontend", "program"), CASES, ids=["/".join(group) for group in CASES])
def test_a_moved_call_is_the_call(frontend: str, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, found = CASES[frontend, program], collections.Counter[str]()
    with monkeypatch.context() as within:
        within.setattr(Replays, "run", checked(Elsewhere(frontend), found))
        wanted = run(cases, "cuda")
    assert not [name for name, hashes in wanted.items() if hashes.get("error") == "AssertionError"]
    assert found["moved"] >= LEAST * found.total(), "\n".join(map(str, found.most_common()))
    away, moved = Elsewhere(frontend), []
    own, again = Replays.run, Moving.__call__
    monkeypatch.setattr(Replays, "run", lambda self, *given: (away(), own(self, *given))[1])
    monkeypatch.setattr(Moving, "__call__", lambda self, at: (moved.append(at), again(self, at))[1])
    lines = differences(wanted, run(cases, "cuda"))
    assert not lines, "\n".join(lines)
    assert moved or not found["moved"]
