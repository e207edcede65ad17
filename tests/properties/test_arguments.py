"""Every argument of every public name, given what it cannot be: the call works all the same, or is an
Fp8kitError with nothing changed."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import nn
from fp8kit.errors import Fp8kitError
from tests.support.calls import CALLS
from tests.support.junk import JUNK, PYTHONS, USERS

PARTS = 3  # one of them for each argument in make test, another one for the next


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.combinations) for part in range(1, PARTS))]
)
@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_does_not_fit_is_refused(name, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a word may be the name of a file
    call = CALLS[name]
    call.run(**call.good())
    for place, argument in enumerate(call.good(), part):
        if argument in ("self", "t") or (name, argument) in USERS:
            continue
        for junk in JUNK[place % PARTS :: PARTS]:
            given = call.good() | {argument: junk}
            before = call.state(given)
            try:
                call.run(**given)
            except (Fp8kitError, PYTHONS.get(name, Fp8kitError)):
                assert call.state(given) == before, (
                    f"{name}: {argument}={junk!r} changed something before it was refused"
                )
            except Exception as error:
                raise AssertionError(
                    f"{name}: {argument}={junk!r}: {type(error).__name__} {error}"
                ) from error


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_argument_is_a_type_error(name):
    call = CALLS[name]
    if call.run.__name__ == "<lambda>":
        return
    with pytest.raises((TypeError, Fp8kitError)):
        call.run(**call.good(), no_such_argument=1)


def test_messages_call_parameters_by_the_users_names():
    layer = nn.Linear(4, 6, parameters_split=("query", "key"), device="cpu")
    layer.key_weight = nn.Parameter(nn.Linear(4, 5, device="cpu").weight.view)
    for module, said in (
        (layer, r"^Linear: key_weight: got shape \(5, 4\), expected shape \(3, 4\)$"),
        (nn.Linear(5, 6, device="cpu"), r"^Linear: inp: got shape \(2, 4\), expected a last dimension of 5$"),
        (nn.LayerNormLinear(5, 6, device="cpu"), r"^LayerNormLinear: inp: got shape"),
        (nn.LayerNorm(5, device="cpu"), r"^LayerNorm: inp: got shape"),
    ):
        with pytest.raises(Fp8kitError, match=said):
            module(np.zeros((2, 4), np.float32))
