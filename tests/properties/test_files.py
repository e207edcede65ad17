"""Checkpoints: what was written is read bit for bit; a file that is cut, changed, foreign or of another model
is a CheckpointError that names what is wrong, and the model, the optimiser, the scaler and the random state
stay as they were."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import nn, optim, recipe, serialization
from fp8kit.autocast import autocast
from fp8kit.errors import CheckpointError
from tests.support.draws import FLOATS, OTHERS, attempt, examples, host, seeds, things, values

DTYPES = [*FLOATS, *OTHERS]


def trained(seed, features=4):
    """Everything that a training has, after a step."""
    nn.manual_seed(seed)
    model = nn.Sequential(
        nn.LayerNormLinear(8, 8, params_dtype="bfloat16", device="cpu"),
        nn.Linear(8, features, params_dtype="bfloat16", device="cpu"),
    )
    opt, scaler = optim.AdamW(model.parameters()), optim.GradScaler()
    with autocast(recipe=recipe.DelayedScaling(amax_history_len=2)):
        y = model(values((4, 8), np.dtype("bfloat16"), seed))
    scaler.scale(y).backward(np.ones(y.shape, y.dtype.numpy))
    scaler.step(opt)
    scaler.update()
    return serialization.Bundle(model=model, optimizer=opt, scaler=scaler, random=nn.RandomState())


def bits(thing):
    return {name: host(value).tobytes() for name, value in thing.state_dict().items()}


# lone surrogates included, which UTF-8 has not
NAMES = st.text(st.characters(exclude_categories=[]), max_size=8)


@pytest.fixture(scope="module")
def good():
    path = Path(tempfile.mkdtemp()) / "good"
    fk.save(path, trained(1), {"step": "1"})
    return path.read_bytes()


@examples(80)
@given(
    st.dictionaries(NAMES | st.just("__metadata__"), things(DTYPES, 0, 3), max_size=4),
    st.dictionaries(NAMES, NAMES, max_size=2),
)
def test_what_is_written_is_read(named, metadata):
    path = Path(tempfile.mkdtemp()) / "x"
    given_ = {name: x.thing for name, x in named.items()}
    refused = attempt(lambda: fk.save(path, given_, metadata), *named.values())
    unwritable = "__metadata__" in named or any(
        re.search("[\ud800-\udfff]", t) for t in (*named, *metadata, *metadata.values())
    )
    if isinstance(refused, CheckpointError | fk.FormatError):
        assert not path.exists()
        assert unwritable or any(x.refused for x in named.values())
        return
    assert not unwritable
    state, said = serialization.read(path)
    assert said == metadata
    for name, x in named.items():
        assert (state[name].dtype, state[name].shape, state[name].tobytes()) == (
            x.values.dtype,
            x.values.shape,
            x.values.tobytes(),
        )
    mine = {name: np.zeros(x.values.shape, x.values.dtype) for name, x in named.items()}
    assert fk.load(path, mine) == metadata
    assert all(mine[name].tobytes() == x.values.tobytes() for name, x in named.items())
    assert list(path.parent.iterdir()) == [path]
    serialization.sweep(path)
    serialization.assign({n: fk.arrays.as_view(a) for n, a in mine.items()}, state, True)
    serialization.check({n: fk.arrays.as_view(a) for n, a in mine.items()}, state, True)


def refused(data, said=""):
    """Loading these bytes is a CheckpointError, and changes nothing."""
    path = Path(tempfile.mkdtemp()) / "bad"
    path.write_bytes(data)
    bundle = trained(2)
    before = bits(bundle)
    with pytest.raises(CheckpointError, match=said) as caught:
        fk.load(path, bundle)
    assert bits(bundle) == before
    assert str(path) in str(caught.value)


@examples(40)
@given(st.data())
def test_a_cut_file(good, data):
    refused(good[: data.draw(st.integers(0, len(good) - 1))], "truncated or foreign")


@examples(40)
@given(st.binary(max_size=200))
def test_a_foreign_file(noise):
    refused(noise, "truncated or foreign")


@examples(40)
@given(st.data())
def test_a_file_with_changed_header(good, data):
    size = int.from_bytes(good[:8], "little")
    at = data.draw(st.integers(0, size + 7))
    changed = bytearray(good)
    changed[at] ^= data.draw(st.integers(1, 255))
    path = Path(tempfile.mkdtemp()) / "bad"
    path.write_bytes(changed)
    bundle = trained(2)
    before = bits(bundle)
    try:
        fk.load(path, bundle)
    except CheckpointError:
        assert bits(bundle) == before
    else:  # a letter of the metadata, or nothing that counts
        assert json.loads(changed[8 : 8 + size])


@examples(60)
@given(
    st.data(),
    st.sampled_from(["missing", "unexpected", "shape", "dtype", "no array", "negative"]),
    st.booleans(),
)
def test_a_state_of_something_else(data, how, strict):
    bundle = trained(2)
    state = {name: host(value).copy() for name, value in trained(1).state_dict().items()}
    # one that is not named starts anew
    needed = [name for name in state if how != "missing" or not name.startswith("random/device.")]
    name = data.draw(st.sampled_from(sorted(needed)))
    if how == "missing":
        del state[name]
    elif how == "unexpected":
        name = data.draw(
            st.sampled_from(
                [
                    "x",
                    "model/x",
                    "optimizer/exp_avg.99",
                    "random/device.moon:1",
                    "model/0._extra_state.y",
                    "scaler/z",
                ]
            )
        )
        state[name] = np.zeros(2, np.float32)
    elif how == "shape":
        state[name] = np.zeros((*state[name].shape, 2), state[name].dtype)
    elif how == "dtype":
        with np.errstate(over="ignore"):
            state[name] = state[name].astype(np.float16)
    elif how == "no array":
        state[name] = data.draw(st.sampled_from([None, "text", object(), [1.0], 3]))
    else:
        state[name] = -np.ones_like(state[name])
    before = bits(bundle)
    error = attempt(lambda: bundle.load_state_dict(state, strict))
    if error is None:  # a state that fits, though it is another
        assert not strict or how == "negative"
        return
    assert isinstance(error, CheckpointError)
    assert bits(bundle) == before
    assert how in ("missing", "negative") or name.partition("/")[2].rpartition("_extra_state.")[2] in str(
        error
    )


@examples(20)
@given(seeds)
def test_a_whole_training_goes_on_with_the_same_bits(seed):
    path = Path(tempfile.mkdtemp()) / "whole"
    bundle = trained(seed % 99)
    fk.save(path, bundle)
    other = trained(seed % 99 + 1)
    fk.load(path, other)
    assert bits(other) == bits(bundle)
    refused(path.read_bytes() + b"x", "truncated or foreign")
    with pytest.raises(CheckpointError, match="got bfloat16"):
        fk.load(path, trained(1, features=5))
