"""``FusedAdam(states=...)``: the native optimiser's bits, state dicts, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from fp8kit_torch.optimizers import FusedAdam

import fp8kit as fk
from fp8kit.errors import ArgumentError, CheckpointError, FormatError
from fp8kit.optim import PRESETS, AdamW, MomentFormat, StateFormats
from fp8kit.testing import assert_close
from fp8kit.testing.contract.encoded_adam import decoded

ENCODED = [name for name in PRESETS if name != "fp32"]
REMAINDER = StateFormats(MomentFormat("bfloat16"), MomentFormat("E5M2", 256), "remainder")
SHAPES = [(37, 11), (300,), (1,)]
DTYPES = [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


def draw(seed, i, place="cpu"):
    values = np.random.default_rng(seed).standard_normal(SHAPES[i])
    return torch.from_numpy(values).to(DTYPES[i]).to(place)


def made(place, states, **options):
    params = [torch.nn.Parameter(draw(i, i, place)) for i in range(3)]
    return params, FusedAdam(params, lr=1e-2, weight_decay=0.1, states=states, **options)


def go(params, optimizer, steps):
    for step in steps:
        for i, param in enumerate(params):
            param.grad = draw(10 * step + i, i, param.device)
        optimizer.step()


def same(one, other):
    return torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))


@pytest.mark.parametrize("states", [*ENCODED, REMAINDER], ids=str)
@pytest.mark.parametrize("capturable", [False, True])
def test_bits_of_the_native_optimizer(place, states, capturable):
    params, optimizer = made(place, states, master_weights=True, capturable=capturable)
    natives = [fk.tensor(p.detach().clone(), requires_grad=True) for p in params]
    native = AdamW(natives, lr=1e-2, weight_decay=0.1, states=states)
    for step in range(4):
        go(params, optimizer, [step])
        for i, one in enumerate(natives):
            one.grad = draw(10 * step + i, i, place)
        native.step()
    kept = native.state_dict()
    for i, (param, one) in enumerate(zip(params, natives, strict=True)):
        assert same(param.cpu(), torch.from_dlpack(fk.arrays.to(one.view, fk.arrays.CPU)))
        for name, state in optimizer.state[param].items():
            right = kept[f"{name.replace('master_param', 'master')}.{i}"].numpy()
            np.testing.assert_array_equal(state.cpu().view(torch.uint8).numpy(), right.view(np.uint8))


@pytest.mark.parametrize("states", [*ENCODED, REMAINDER], ids=str)
def test_state_comes_back_with_the_same_bits(place, states):
    params, optimizer = made(place, states, master_weights=True)
    go(params, optimizer, range(3))
    saved, held = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    go(params, optimizer, range(3, 5))
    others, again = made(place, states, master_weights=True)
    with torch.no_grad():
        for param, value in zip(others, held, strict=True):
            param.copy_(value)
    again.load_state_dict(saved)
    go(others, again, range(3, 5))
    for param, other in zip(params, others, strict=True):
        assert same(param, other)
        assert optimizer.state[param].keys() == again.state[other].keys()
        for name, state in optimizer.state[param].items():
            assert same(state, again.state[other][name])


@pytest.mark.parametrize("states", [*ENCODED, REMAINDER], ids=str)
def test_values_of_states(place, states):
    """As the contract's decoding in float64 has them; a master is the parameter before it was rounded."""
    params, optimizer = made(place, states, master_weights=True)
    go(params, optimizer, range(2))
    formats = optimizer.formats
    for param in params:
        state = optimizer.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            scale = state.get(f"{name}_scale")
            codes = state[name].float() if state[name].dtype is torch.bfloat16 else state[name]
            right = decoded(
                codes.cpu().numpy(), None if scale is None else scale.cpu().numpy(), getattr(formats, name)
            )
            found = optimizer.get_unscaled_state(param, name).cpu().double().numpy().reshape(-1)
            assert_close(name, found, right, "float32", 2.0**-18 * np.abs(right))  # float32's powers
        if "master_param" in state:
            master = optimizer.get_unscaled_state(param, "master_param")
            assert (master - param).abs().max() <= 2.0**-8 * master.abs().max()


def test_l2_regularisation_and_no_masters(place):
    """Adam's own form, on parameters without masters: float64's first step."""
    params, optimizer = made(place, "coat", adam_w_mode=False)
    twins = [torch.nn.Parameter(p.detach().double().cpu()) for p in params]
    right = torch.optim.Adam(twins, lr=1e-2, weight_decay=0.1)
    go(params, optimizer, [0])
    for param, twin in zip(params, twins, strict=True):
        twin.grad = param.grad.double().cpu()
    right.step()
    for param, twin in zip(params, twins, strict=True):
        rounding = 2.0**-8 if param.dtype is torch.bfloat16 else 2.0**-22
        assert ((param.cpu().double() - twin).abs() <= rounding * twin.abs() + 2.0**-22).all()


def test_fp32_is_the_plain_optimizer(place):
    (params, optimizer), (others, plain) = made(place, "fp32"), made(place, None)
    go(params, optimizer, range(2))
    go(others, plain, range(2))
    assert all(same(param, other) for param, other in zip(params, others, strict=True))
    assert optimizer.state_dict().keys() == plain.state_dict().keys()


def test_refusals():
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    for error, word, options in (
        (ArgumentError, "states: got 'fp4'", {"states": "fp4"}),
        (FormatError, "exp_avg_dtype", {"states": "coat", "exp_avg_dtype": torch.uint8}),
        (FormatError, "store_param_remainders", {"states": "coat", "store_param_remainders": True}),
        (FormatError, "remainder", {"states": REMAINDER, "master_weights": True}),
    ):
        with pytest.raises(error, match=word):
            FusedAdam([half], **options)
    params, optimizer = made("cpu", "block_128")
    go(params, optimizer, [0])
    with pytest.raises(NotImplementedError, match="set_scaled_state"):
        optimizer.set_scaled_state(params[0], "exp_avg", torch.zeros(SHAPES[0]))
    for other in ("coat", None):
        with pytest.raises(CheckpointError, match="state_formats"):
            made("cpu", other)[1].load_state_dict(optimizer.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["exp_avg_scale"] = torch.zeros(4)
    with pytest.raises(CheckpointError, match="exp_avg_scale"):
        made("cpu", "block_128")[1].load_state_dict(saved)
