"""Transformer Engine's pickled extra state, read without running what it says."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections import namedtuple
from enum import Enum

import numpy as np
import pytest
import torch
from fp8kit_torch.te_compat.extra_state import Record, read_extra_state

from fp8kit.errors import CheckpointError
from fp8kit.testing.compare import assert_same_bits

RECIPE = "transformer_engine.common.recipe"


@pytest.fixture
def te_state(monkeypatch):
    """What a module of Transformer Engine with delayed scaling saves, its recipe a class of theirs."""
    module = types.ModuleType(RECIPE)

    class DelayedScaling:
        def __init__(self):
            self.margin, self.amax_history_len, self.fp8_format = 0, 4, module.Format.HYBRID

    helper = namedtuple("_FormatHelper", ["max_fwd", "max_bwd"])
    module._FormatHelper, module.DelayedScaling = helper, DelayedScaling
    module.Format = Enum("Format", {"E4M3": helper(448, 448), "HYBRID": helper(448, 57344)}, module=RECIPE)
    for kind in (helper, DelayedScaling):
        kind.__module__, kind.__qualname__ = RECIPE, kind.__name__
    for name in ("transformer_engine", "transformer_engine.common", RECIPE):
        monkeypatch.setitem(sys.modules, name, module)
    rng = np.random.default_rng(0)
    arrays = {"scale_fwd": (3,), "amax_history_fwd": (4, 3), "scale_bwd": (2,), "amax_history_bwd": (4, 2)}
    state = {n: torch.from_numpy(rng.random(s).astype(np.float32)) for n, s in arrays.items()}
    return {
        "recipe": DelayedScaling(),
        **state,
        "extra_fp8_variables": {"num_gemms": 1, "fp8_checkpoint": True},
    }


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("form", ["tensor", "bytesio", "protocol-2"])
def test_reads_what_they_write(te_state, form):
    if form == "bytesio":
        value = io.BytesIO()
        torch.save(te_state, value)
    else:
        value = as_tensor(pickle.dumps(te_state, protocol=2 if form == "protocol-2" else None))
    got = read_extra_state(value)
    for name in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"):
        assert_same_bits(name, got[name].numpy(), te_state[name].numpy())
    assert got["extra_fp8_variables"] == te_state["extra_fp8_variables"]
    assert isinstance(got["recipe"], Record)
    assert got["recipe"].name == f"{RECIPE}.DelayedScaling"
    assert got["recipe"].fields["amax_history_len"] == 4


def test_nothing_saved_is_nothing():
    assert read_extra_state(torch.empty(0, dtype=torch.uint8)) is None
    assert read_extra_state(io.BytesIO()) is None
    assert read_extra_state(None) is None


class Bomb:
    def __init__(self, function, *arguments):
        self.what = function, arguments

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize(
    "bomb",
    [
        Bomb(eval, "1/0"),
        Bomb(exec, "raise SystemExit"),
        Bomb(getattr, "", "join"),
        Bomb(io.open, "/dev/null"),
        Bomb(torch.load, "x"),
        Bomb(__import__, "os"),
        Bomb(torch.hub.load, "a", "b"),
    ],
    ids=lambda b: b.what[0].__name__,
)
@pytest.mark.parametrize("saved", [False, True], ids=["pickle", "torch.save"])
def test_nothing_is_called(bomb, saved):
    value = io.BytesIO()
    if saved:
        torch.save({"recipe": bomb}, value)
    with pytest.raises(CheckpointError, match="neither data nor Transformer Engine's"):
        read_extra_state(value if saved else as_tensor(pickle.dumps({"recipe": bomb})))


def test_inner_pickles_are_not_run_either():
    inner = io.BytesIO()
    torch.save(Bomb(eval, "1/0"), inner, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_extra_state(
            as_tensor(pickle.dumps({"scale_fwd": Bomb(torch.storage._load_from_bytes, inner.getvalue())}))
        )


def test_tensors_may_not_reach_beyond_their_storage():
    storage = torch.zeros(4).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    for offset, size, stride in (
        (0, (5,), (1,)),
        (-1, (1,), (1,)),
        (3, (2,), (1,)),
        (0, (2,), (9,)),
        (0, (2,), (-1,)),
    ):
        bad = Bomb(torch._utils._rebuild_tensor_v2, typed, offset, size, stride, False, {})
        with pytest.raises(CheckpointError, match="tensor"):
            read_extra_state(as_tensor(pickle.dumps({"scale_fwd": bad})))


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3),
        "x",
        as_tensor(b"garbage"),
        as_tensor(b"PK garbage"),
        as_tensor(pickle.dumps([1])),
        as_tensor(pickle.dumps({"scale_fwd": 3})),
    ],
    ids=["float", "text", "garbage", "zip", "list", "number"],
)
def test_what_is_not_an_extra_state_is_refused(value):
    with pytest.raises(CheckpointError, match="_extra_state"):
        read_extra_state(value)
