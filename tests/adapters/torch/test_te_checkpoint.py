"""State dicts of Transformer Engine and of plain torch layers in this frontend's modules."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from fp8kit_torch import DotProductAttention, LayerNormMLP, Linear, RMSNorm, autocast
from fp8kit_torch.te_compat.checkpoint import convert_extra_state, from_transformer_engine, load_state_dict

from fp8kit.errors import CheckpointError
from fp8kit.recipe import DelayedScaling
from fp8kit.testing.compare import assert_same_bits


def model():
    layers = {
        "fc": Linear(16, 32, device="cpu"),
        "mlp": LayerNormMLP(32, 48, device="cpu"),
        "norm": RMSNorm(32, device="cpu"),
        "core_attention": DotProductAttention(2, 16),
    }
    return torch.nn.ModuleDict(layers)


def te_extra(gemms, seed=0, **changes):
    """What a Transformer Engine module pickles, without its recipe's class."""
    rng = np.random.default_rng(seed)
    shapes = {
        "scale_fwd": (3 * gemms,),
        "amax_history_fwd": (5, 3 * gemms),
        "scale_bwd": (2 * gemms,),
        "amax_history_bwd": (5, 2 * gemms),
    }
    return {
        "recipe": None,
        **{n: torch.from_numpy(rng.random(s).astype(np.float32) + 0.5) for n, s in shapes.items()},
        "extra_fp8_variables": {},
    } | changes


def as_tensor(state):
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def te_dict(seed=0):
    rng = np.random.default_rng(seed)
    state = {
        n: torch.from_numpy(rng.standard_normal(t.shape).astype(np.float32))
        for n, t in model().state_dict().items()
        if "_extra_state" not in n
    }
    buffer = io.BytesIO()
    torch.save(te_extra(2, 2), buffer)
    buffer.seek(0)
    nothing = torch.empty(0, dtype=torch.uint8)
    return state | {
        "fc._extra_state": as_tensor(te_extra(1, 1)),
        "mlp._extra_state": buffer,
        "norm._extra_state": nothing,
        "core_attention._extra_state": as_tensor(te_extra(0)),
        "core_attention.fused_attention._extra_state": as_tensor(te_extra(0)),  # of an older one
    }


WAYS = [load_state_dict, torch.nn.Module.load_state_dict]  # by name, and a program's own call


@pytest.mark.parametrize("load", WAYS)
def test_scales_and_histories_keep_their_values_and_slots(load):
    net, state = model(), te_dict()
    result = load(net, state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    for name, gemms, seed in (("fc", 1, 1), ("mlp", 2, 2)):
        wanted = te_extra(gemms, seed)
        for direction in ("fwd", "bwd"):
            own = net[name].fp8_meta[f"scaling_{direction}"]
            assert_same_bits("scale", own.scale.numpy(), wanted[f"scale_{direction}"].numpy())
            assert_same_bits("history", own.amax_history.numpy(), wanted[f"amax_history_{direction}"].numpy())
            assert_same_bits("scale_inv", own.scale_inv.numpy(), 1 / wanted[f"scale_{direction}"].numpy())
    for name, p in net.named_parameters():
        assert_same_bits(name, p.detach().numpy(), state[name].numpy())


def test_the_loaded_scale_is_the_one_that_quantises():
    net, other = Linear(16, 32, device="cpu"), Linear(16, 32, device="cpu")
    extra = as_tensor(te_extra(1, scale_fwd=torch.full((3,), 2.0)))
    state = {"weight": torch.randn(32, 16), "bias": torch.zeros(32), "_extra_state": extra}
    load_state_dict(net, state)
    load_state_dict(other, state | {"_extra_state": torch.empty(0, dtype=torch.uint8)})
    x = torch.randn(4, 16)
    with torch.no_grad(), autocast(recipe=DelayedScaling(amax_history_len=5)):
        y, plain = net(x), other(x)
    cast = lambda t, s: (t * s).clamp(-448, 448).to(torch.float8_e4m3fn).double() / s  # noqa: E731
    for got, scale in ((y, 2.0), (plain, 1.0)):
        wanted = cast(x, scale) @ cast(state["weight"], scale).t()
        # fast accumulation may keep 14 bits
        assert (got.double() - wanted).abs().max() < 2.0**-10 * wanted.abs().max()


@pytest.mark.parametrize(
    "value",
    [
        as_tensor(te_extra(2)),
        b"none",
        torch.arange(64, dtype=torch.uint8),
        torch.ones(3),
        pickle.dumps(print),
    ],
)
def test_an_extra_state_that_is_nobody_saved_is_refused(value):
    """Another module's, and what nobody saved; nothing is run and the FP8 state stays."""
    net = Linear(16, 32, device="cpu")
    net.load_state_dict(net.state_dict() | {"_extra_state": as_tensor(te_extra(1))})
    before = [part.clone() for part in net.fp8_meta["scaling_fwd"].parts]
    with pytest.raises(CheckpointError, match="_extra_state"):
        net.load_state_dict(net.state_dict() | {"_extra_state": value})
    for part, old in zip(net.fp8_meta["scaling_fwd"].parts, before, strict=True):
        assert_same_bits("state", part.numpy(), old.numpy())


def test_plain_layers_load_without_extra_states():
    net, plain = Linear(16, 32, device="cpu"), torch.nn.Linear(16, 32)
    net.load_state_dict(plain.state_dict())
    assert_same_bits("weight", net.weight.detach().numpy(), plain.weight.detach().numpy())
    back = {n: t for n, t in net.state_dict().items() if n != "_extra_state"}
    plain.load_state_dict(back)
    load_state_dict(net, plain.state_dict())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"scale_fwd": torch.ones(6)}, "slots"),
        ({"amax_history_bwd": torch.zeros(4)}, "slots"),
        ({"scale_bwd": torch.tensor([1.0, -1])}, "positive"),
        ({"scale_bwd": torch.tensor([1.0, torch.nan])}, "positive"),
        ({"scale_fwd": [1, 2, 3]}, "float32"),
    ],
)
def test_what_does_not_fit_is_refused(changes, word):
    with pytest.raises(CheckpointError, match=word):
        convert_extra_state(as_tensor(te_extra(1, **changes)), 1)


def test_faults_are_named_and_change_nothing():
    net, state = model(), te_dict()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"^fc\._extra_state: got "):
        load_state_dict(net, state | {"fc._extra_state": as_tensor(te_extra(2))})
    for name, tensor in net.state_dict().items():
        assert_same_bits(name, tensor.numpy(), before[name].numpy())
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        from_transformer_engine(net, state | {"fc.weight": "x"})
