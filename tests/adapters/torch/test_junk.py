"""Every argument of every public name of the torch frontend, given what it cannot be: the call works all the
same, or is refused by an error of the right kind, with nothing changed."""

from __future__ import annotations

import re

import numpy as np
import torch

from fp8kit.errors import Fp8kitError
from tests.adapters.torch.calls import CALLS
from tests.support.combinations import combinations
from tests.support.effort import FACTOR, chosen
from tests.support.torch_state import state_of

W = torch.linspace(-2, 2, 12).reshape(3, 4)
JUNK = {
    "None": None,
    "a word": "word",
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "2**70": 2**70,
    "True": True,
    "()": (),
    "[]": [],
    "{}": {},
    "object": object(),
    "np.float64": np.float64(0.5),
    "1j": 1j,
    "array": np.zeros((2, 3), np.float32),
    "[1, a]": [1, "a"],
    "(1, 2, 3)": (1, 2, 3),
    "{a: 1}": {"a": 1},
    "a dtype": torch.float64,
    "a device": torch.device("cuda:99"),
    "int8": torch.int8,
    "tensor": W,
    "meta": torch.zeros(3, 4, device="meta"),
    "empty": torch.zeros(0, 4),
    "float64": W.double(),
    "int64": torch.ones(3, 4, dtype=torch.int64),
    "bool": W > 0,
    "complex": W + 0j,
    "transposed": W.t(),
    "()-tensor": torch.tensor(1.5),
    "grad": W.clone().requires_grad_(),
    "sparse": W.to_sparse(),
    "half": W.half(),
    "NaNs": torch.full((3, 4), float("nan")),
    "5-d": torch.zeros(1, 1, 1, 1, 1),
    "strings": ["a", "b"],
    "[tensor]": [W],
    "a module": torch.nn.Identity(),
}
ALLOWED = (Fp8kitError, NotImplementedError)


STEP = 1 if FACTOR else 3  # every how many of them in the default run, others for each argument


def ruined(name):
    call = CALLS[name]
    for place, argument in enumerate(call.good()):
        if argument != "self":
            for label, junk in chosen(JUNK, place, STEP):
                if argument in call.users and (callable(junk) or argument == "x"):
                    continue
                given = call.good() | {argument: junk}
                yield argument, label, call.run, given


def complaint(name, argument, label, run, given):
    """What is wrong with this refusal; "" for a right one and for a call that works."""
    before = state_of(given)
    try:
        run(**given)
    except ALLOWED as error:
        if state_of(given) != before:
            return f"{name}: {argument}={label}: refused after a change"
        said = str(error)
        if not re.match(r"[\w.]+: .+: (got .*|missing), expected ", said, re.DOTALL) and not isinstance(
            error, NotImplementedError
        ):
            return f"{name}: {argument}={label}: said {said!r}"
    except Exception as error:
        return f"{name}: {argument}={label}: {type(error).__name__} {str(error)[:120]!r}"
    return ""


@combinations({"name": CALLS.keys()}, usual=list(CALLS)[::8])
def test_an_argument_that_does_not_fit_is_refused(name):
    torch.manual_seed(3)
    CALLS[name].run(**CALLS[name].good())
    wrong = [said for given in ruined(name) if (said := complaint(name, *given))]
    assert not wrong, "\n".join(wrong)
