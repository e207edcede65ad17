"""FP8 state: when it is updated, how it is moved, copied, saved and loaded."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time

import fp8kit_torch as ft
import numpy as np
import pytest
import torch
from fp8kit_torch import state, torch_compat
from fp8kit_torch.bound import TorchOp
from fp8kit_torch.module import _say_unset
from fp8kit_torch.state import _RECORDED

from fp8kit.collectives import Collectives
from fp8kit.errors import CheckpointError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.testing.compare import assert_close

from .twins import RECIPES, WIDTH, batches, same, same_state, torch_step, twins

RECIPE = RECIPES["delayed"]


def wait_for_passes():
    """Until backward passes that have raised are gone: a device's thread of the engine may let go of one a
    moment later."""
    gc.collect()
    end = time.monotonic() + 10
    while _RECORDED and time.monotonic() < end:
        time.sleep(1e-3)
    assert not _RECORDED


def trained(device, kind="TransformerLayer"):
    ours, _ = twins(kind, device)
    for x in batches(device):
        torch_step(ours, ours, RECIPE, x)
    return ours


def test_states_are_named_like_transformer_engines(device):
    mlp, layer = trained(device, "LayerNormMLP"), trained(device, "Linear")
    assert set(mlp.fp8_meta) == {"scaling_fwd", "scaling_bwd"}
    assert mlp.fp8_meta["scaling_fwd"].amax_history.shape == (3, 6)
    assert mlp.fp8_meta["scaling_bwd"].scale.shape == (4,)
    forward = layer.fp8_meta["scaling_fwd"]  # the batches grow, so the last one rules
    want = np.float32(448 / 2) / forward.amax_history.cpu().numpy()[:, 0].max()
    same(forward.scale[:1], np.array([want]), "scale")


def test_saved_and_loaded(device):
    ours = trained(device)
    stored = io.BytesIO()
    torch.save(ours.state_dict(), stored)
    stored.seek(0)
    state = torch.load(stored, weights_only=True)
    packed = state["layernorm_mlp._extra_state"]
    assert packed.dtype == torch.uint8
    other, _ = twins("TransformerLayer", device)
    other.load_state_dict(state)
    x = torch.randn(5, 3, WIDTH, device=device)
    one = torch_step(ours, ours, RECIPE, x)
    two = torch_step(other, other, RECIPE, x, one[-1])
    same(two[0], one[0], "y")
    same(two[1], one[1], "dx")
    for path, module in ours.named_modules():
        for name, part in getattr(module, "fp8_meta", {}).items():
            for field in ("scale", "scale_inv", "amax_history"):
                same(
                    getattr(other.get_submodule(path).fp8_meta[name], field),
                    getattr(part, field),
                    (path, name, field),
                )


def test_plain_weights_load(device):
    ours = trained(device, "Linear")
    plain = {name: p for name, p in ours.state_dict().items() if not name.endswith("_extra_state")}
    ft.Linear(WIDTH, 56, device=device).load_state_dict(plain)


def test_a_wrong_state_changes_nothing(device):
    ours = trained(device, "Linear")
    before = ours.get_extra_state()
    wide = trained(device, "LayerNormMLP").get_extra_state()
    for wrong, message in (
        (
            torch.tensor([1, 2, 3], dtype=torch.uint8),
            r"3 bytes that hold no such state, .* saved; nor is it Transformer Engine's: the pickle cannot",
        ),
        (wide, "expected float32"),
        (torch.zeros(3), r"uint8 \(n,\): a cast of a state dict leaves its _extra_state out"),
    ):
        with pytest.raises(CheckpointError, match=message):
            ours.set_extra_state(wrong)
    same(ours.get_extra_state(), before, "state")


def test_deepcopy_is_apart(device):
    ours = trained(device, "Linear")
    other = copy.deepcopy(ours)
    same(other.get_extra_state(), ours.get_extra_state(), "copied")
    before = ours.get_extra_state()
    torch_step(other, other, RECIPE, torch.randn(4, WIDTH, device=device) * 100)
    same(ours.get_extra_state(), before, "the original")
    assert not torch.equal(other.get_extra_state(), before)


def test_half_keeps_the_scales_float32(device):
    ours = trained(device, "Linear").half()
    assert ours.weight.dtype == torch.float16
    state = ours.fp8_meta["scaling_fwd"]
    assert state.scale.dtype == torch.float32
    torch_step(ours, ours, RECIPE, torch.randn(4, WIDTH, device=device).half())


def test_an_exception_drops_the_step(device):
    ours = trained(device, "Linear")
    before = ours.get_extra_state()

    def step():
        with ft.autocast(recipe=RECIPE):
            ours(torch.randn(4, WIDTH, device=device))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    same(ours.get_extra_state(), before, "state")


@pytest.mark.parametrize("how", ["plain", "checkpoint", "grouped"])
@pytest.mark.parametrize("direction", ["before", "after"])
def test_a_backward_pass_that_fails_leaves_no_trace(device, how, direction, monkeypatch):
    """It fails after some layers have recorded: in a hook between them, or within a layer whose own amax is
    recorded already."""

    class Fail(torch.autograd.Function):
        failing = True

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            if Fail.failing:
                raise ZeroDivisionError
            return g

    def net():
        torch.manual_seed(0)
        kind = ft.GroupedLinear if how == "grouped" else ft.Linear
        sizes = (2, WIDTH, WIDTH) if how == "grouped" else (WIDTH, WIDTH)
        return torch.nn.ModuleList([kind(*sizes, device=device) for _ in range(2)])

    def step(layers, x):
        with ft.autocast(recipe=RECIPE):

            def run(x):
                given = ([4, 4],) if how == "grouped" else ()
                x = layers[0](x, *given)
                return layers[1](Fail.apply(x) if direction == "before" else x, *given)

            y = ft.checkpoint(run, x, use_reentrant=False) if how == "checkpoint" else run(x)
        if direction == "after" and Fail.failing:
            whole, calls = TorchOp.call_backward, []

            def failing(self, *arguments):
                found = whole(self, *arguments)
                calls.append(self)
                if len(calls) == 2:
                    raise ZeroDivisionError
                return found

            with monkeypatch.context() as patch:
                patch.setattr(TorchOp, "call_backward", failing)
                y.sum().backward()
        else:
            y.sum().backward()

    ours, never = net(), net()
    x = torch.randn(8, WIDTH, device=device, requires_grad=True)
    Fail.failing = False
    for layers in (ours, never):
        step(layers, x)
    before = [layer.fp8_meta["scaling_bwd"].amax_history.clone() for layer in ours]
    assert all(history.any() for history in before)
    Fail.failing = True
    forward = {layer: copy.deepcopy(layer.fp8_meta["scaling_fwd"]) for layer in ours}
    with pytest.raises(ZeroDivisionError):
        step(ours, x * 100)
    wait_for_passes()
    for layer, history in zip(ours, before, strict=True):
        same(layer.fp8_meta["scaling_bwd"].amax_history, history, "history")
        layer.fp8_meta["scaling_fwd"] = forward[layer]  # the forward pass did succeed, and counts
        layer._forget()
    Fail.failing = False
    for layers in (ours, never):
        step(layers, x)
    for one, other in zip(ours, never, strict=True):
        same(one.get_extra_state(), other.get_extra_state(), "state")
    assert not _RECORDED  # nor has a pass that went well left any


def test_inference_leaves_no_trace(device):
    ours = trained(device, "Linear")
    before = ours.get_extra_state()
    for inference in (torch.no_grad, torch.inference_mode):
        with inference(), ft.autocast(recipe=RECIPE):
            ours(torch.randn(4, WIDTH, device=device))
    same(ours.get_extra_state(), before, "state")


def test_backward_state_is_updated_once_a_pass(device):
    ours, _ = twins("Linear", device)
    with ft.autocast(recipe=RECIPE):
        y = ours(torch.randn(4, WIDTH, device=device)) + ours(torch.randn(4, WIDTH, device=device))
    y.backward(torch.full_like(y, 0.5))
    history = ours.fp8_meta["scaling_bwd"].amax_history[:, 0].tolist()
    assert history == [0.0, 0.0, 0.5]
    assert ours.fp8_meta["scaling_bwd"].scale[0].item() == 57344 / 2 / 0.5


def test_history_length_may_change(device):
    ours = trained(device, "Linear")
    kept = ours.fp8_meta["scaling_fwd"].amax_history.clone()
    for length in (5, 2):
        with ft.autocast(recipe=DelayedScaling(amax_history_len=length)):
            ours(torch.zeros(4, WIDTH, device=device)).sum().backward()
        assert ours.fp8_meta["scaling_fwd"].amax_history.shape == (length, 3)
    same(ours.fp8_meta["scaling_fwd"].amax_history[:2, 0], kept[:2, 0], "an unused operand does not age")


@pytest.mark.parametrize("directions", [["scaling_fwd", "scaling_bwd"], ["scaling_fwd"], ["scaling_bwd"]])
@pytest.mark.parametrize("field", ["scale", "scale_inv", "amax_history"])
def test_a_state_may_get_other_tensors(field, directions, device):
    """A step works on the tensors that a state has by then, in both directions."""
    ours, other = trained(device, "Linear"), trained(device, "Linear")
    other.load_state_dict(ours.state_dict())
    for direction in directions:
        wanted, own = other.fp8_meta[direction], ours.fp8_meta[direction]
        getattr(wanted, field).mul_(0.5)
        before = getattr(own, field)
        setattr(own, field, before * 0.5)
        before.fill_(1e-30)  # nobody is to look at these
    x = torch.linspace(-3, 3, 5 * WIDTH, device=device).reshape(5, WIDTH)
    one = torch_step(ours, ours, RECIPE, x)
    two = torch_step(other, other, RECIPE, x, one[-1])
    same(one[0], two[0], "y")
    same(one[1], two[1], "dx")
    for direction in ("scaling_fwd", "scaling_bwd"):
        for got, want in zip(ours.fp8_meta[direction].parts, other.fp8_meta[direction].parts, strict=True):
            same(got, want, (direction, field))


def test_what_is_updated_is_seen_through_tensors_that_were_kept(device):
    """Forward states are updated when the autocast has ended, not when somebody asks a state."""
    ours = trained(device, "Linear")
    scale = ours.fp8_meta["scaling_fwd"].scale
    with ft.autocast(recipe=DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent")):
        y = ours(torch.full((4, WIDTH), 7.0, device=device))
        before = scale[0].item()
    assert scale[0].item() == 64.0 != before
    y.sum().backward()
    assert scale[0].item() == 64.0


def test_a_group_of_ranks_may_change(device):
    """Each pass leaves the group of its autocast with the states that it records into."""
    ours = trained(device, "Linear")
    groups = [ours.fp8_meta[name].group for name in ("scaling_fwd", "scaling_bwd")]
    alone = Collectives(0, 1)
    for group in (alone, alone, None):
        with ft.autocast(recipe=RECIPE, amax_reduction_group=group):
            y = ours(torch.ones(4, WIDTH, device=device))
        groups += [ours.fp8_meta[name].group for name in ("scaling_fwd", "scaling_bwd")]
        y.sum().backward()
    assert groups == [None, None, *[alone] * 4, None, None]


def test_callables_run_on_the_host(device):
    """On tensors, as in Transformer Engine; a NumPy array is an answer too."""
    seen = []

    def least(history):
        seen.append(history)
        return torch.min(history, dim=0).values

    def scale(amax, old, fp8_max, recipe):
        seen.append(amax)
        return torch.where(amax > 0, old, torch.full_like(old, 2.0))

    ours, _ = twins("Linear", device)
    x = torch.ones(4, WIDTH, device=device)
    how = DelayedScaling(amax_history_len=2, amax_compute_algo=least, scaling_factor_compute_algo=scale)
    with ft.autocast(recipe=how):
        y = ours(x)
    y.sum().backward()
    assert [(type(own), own.device.type, tuple(own.shape)) for own in seen[:2]] == [
        (torch.Tensor, "cpu", (2, 3)),
        (torch.Tensor, "cpu", (3,)),
    ]
    assert len(seen) == 4
    assert ours.fp8_meta["scaling_fwd"].scale.tolist() == [2.0, 2.0, 1.0]
    with ft.autocast(recipe=DelayedScaling(scaling_factor_compute_algo=lambda *given: np.full(3, 4.0))):
        ours(x)
    assert ours.fp8_meta["scaling_fwd"].scale.tolist() == [4.0, 4.0, 1.0]


def test_an_update_that_raises_drops_what_was_recorded(device):
    def refuse(history):
        if history.shape[1] == 2:
            raise ZeroDivisionError("backward")
        return history.amax(0)

    ours, x = twins("Linear", device)[0], torch.ones(4, WIDTH, device=device)
    with ft.autocast(recipe=DelayedScaling(amax_compute_algo=refuse)):
        y = ours(x)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    wait_for_passes()
    for part in ("scaling_fwd", "scaling_bwd"):
        assert not ours.fp8_meta[part].amax_history[0].any()
    assert ours.fp8_meta["scaling_bwd"].scale.tolist() == [1.0, 1.0]


class _Slow(dict):
    """A dictionary that every thread has looked into before any goes on."""

    def __init__(self, threads):
        super().__init__()
        self.all = threading.Barrier(threads)

    def __contains__(self, key):
        found = super().__contains__(key)
        self.all.wait(30)
        return found


def test_a_pass_has_a_thread_for_each_device(monkeypatch):
    """Four threads that record in one pass at the same moment: one callback at its end, and all states
    updated by it."""
    queued, updated = [], []
    monkeypatch.setattr(state, "_RECORDED", _Slow(4))
    # of no pass that there ever was
    monkeypatch.setattr(torch_compat, "current_backward", lambda: -7)
    monkeypatch.setattr(torch_compat, "at_backwards_end", queued.append)
    monkeypatch.setattr(state, "update", lambda history, states, forward: updated.append(states))
    states = [state.ScalingState(2, 1, "cpu") for _ in range(4)]
    tokens = [(RECIPE.history, own, None) for own in states]
    threads = [threading.Thread(target=state.finish_backward, args=([token],)) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (end,) = queued
    end()
    (found,) = updated
    assert {id(own) for own in found} == {id(own) for own in states}


def test_threads_have_autocasts_of_their_own(device):
    ours, _ = twins("Linear", device)
    found = []
    with ft.autocast(recipe=RECIPE):
        thread = threading.Thread(target=lambda: found.append(ours(torch.ones(4, WIDTH, device=device))))
        thread.start()
        thread.join()
    same(found[0], ours(torch.ones(4, WIDTH, device=device)), "high precision")
    assert not ours.fp8_meta


def test_meta_then_reset(device):
    ours = ft.TransformerLayer(WIDTH, 64, 4, device="meta")
    assert all(p.is_meta for p in ours.parameters())
    ours.to_empty(device=device)
    for module in ours.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    weight = ours.layernorm_mlp.fc1_weight
    assert abs(weight.std().item() - 0.023) < 5 * 0.023 / np.sqrt(2 * weight.numel())
    same(ours.layernorm_mlp.layer_norm_weight, np.ones(WIDTH, np.float32), "gamma")
    torch_step(ours, ours, RECIPE, torch.randn(5, 3, WIDTH, device=device))


@pytest.mark.gpu
def test_moves_between_devices():
    ours = trained("cpu", "Linear")
    before = ours.get_extra_state()
    ours.to("cuda")
    same(ours.get_extra_state(), before, "state")
    assert ours.fp8_meta["scaling_fwd"].scale.is_cuda
    torch_step(ours, ours, RECIPE, torch.randn(4, WIDTH, device="cuda"))


def test_native_state_is_the_same_file_of_numbers(device):
    ours, native = twins("Linear", device)
    same_state(ours, native)
    torch_step(ours, ours, RECIPE, torch.ones(4, WIDTH, device=device))
    state = ours.fp8_meta["scaling_fwd"]
    assert state.scale[0].item() == 448 / 2
    assert state.scale_inv[0].item() == np.float32(1) / np.float32(224)


AVERAGES = {
    "copy_": lambda own, new: own.copy_(0.5 * own + 0.5 * new),
    "copy_ alone": lambda own, new: own.copy_(new),
    "in place": lambda own, new: own.mul_(0.5).add_(new, alpha=0.5),
    "lerp_ of a file's": lambda own, new: own.lerp_(new.as_subclass(torch.Tensor), 0.5),
    "copy_ of float32": lambda own, new: own.copy_(0.5 * own.float() + 0.5 * new.float()),
}


@pytest.mark.parametrize("how", AVERAGES)
def test_a_state_dict_that_is_averaged_in_place_hands_over_the_scales(how, device):
    ours = trained(device, "Linear")
    copied, _ = twins("Linear", device)
    before = copied.get_extra_state()
    part = 1 if how == "copy_ alone" else 0.5
    old, weight = (layer.weight.detach().double().cpu().numpy() for layer in (copied, ours))
    for own, new in zip(copied.state_dict().values(), ours.state_dict().values(), strict=True):
        AVERAGES[how](own, new)
    same(copied.get_extra_state(), ours.get_extra_state(), "state")
    slack = 2.0**-23 * (np.abs(old) + np.abs(weight))  # of a few operations in float32
    mean = part * weight + (1 - part) * old
    assert_close("weight", copied.weight.detach().cpu().numpy(), mean, "float32", slack)
    assert before.numel() == 0  # what was taken before the step is a copy
    copied.fp8_meta["scaling_fwd"].scale.zero_()
    assert ours.fp8_meta["scaling_fwd"].scale[:2].all()


@pytest.mark.parametrize("newest", ["first", "last"])
def test_an_average_of_state_dicts_loads(newest, device):
    """A state that is empty gives way, wherever it stands; what comes out belongs to no layer."""
    ours = trained(device, "Linear")
    copied, _ = twins("Linear", device)
    own, new = copied.state_dict(), ours.state_dict()
    first, last = (new, own) if newest == "first" else (own, new)
    mean = {name: 0.5 * first[name] + 0.5 * last[name] for name in own}
    copied.load_state_dict(mean)
    same(copied.get_extra_state(), ours.get_extra_state(), "state")
    mean["_extra_state"].copy_(torch.empty(0, dtype=torch.uint8))
    assert not mean["_extra_state"].numel()
    assert ours.get_extra_state().numel()
    assert not (ours.get_extra_state() - ours.get_extra_state()).any()  # programs compare state dicts
    saved = own["_extra_state"].new_tensor([0, 1]).as_subclass(torch.Tensor)
    with pytest.raises(CheckpointError, match="2 bytes"):
        ours.state_dict()["_extra_state"].copy_(saved)
    with pytest.raises(
        CheckpointError, match=r"load_state_dict: _extra_state: got torch.float16 \(.* leaves its"
    ):
        ours.load_state_dict({name: part.half() for name, part in new.items()})


@pytest.mark.parametrize("before", ["nothing", "a step", "calibration", "another recipe"])
def test_scales_that_nothing_has_set_are_told_once(before, device, caplog):
    _say_unset.cache_clear()
    layer, _ = twins("Linear", device)
    x = torch.randn(4, WIDTH, device=device)
    if before == "a step":
        torch_step(layer, layer, RECIPE, x)
    elif before == "calibration":
        with torch.no_grad(), ft.autocast(enabled=False, calibrating=True, recipe=RECIPE):
            layer(x)
    for one in (layer, copy.deepcopy(layer)):
        with (
            torch.no_grad(),
            ft.autocast(recipe=Float8CurrentScaling() if before == "another recipe" else RECIPE),
        ):
            one(x)
    said = [message for message in caplog.messages if "scales of 1" in message]
    assert len(said) == (before == "nothing")


def test_a_state_may_start_in_inference_mode(device):
    ours, _ = twins("LayerNormMLP", device)
    with torch.inference_mode(), ft.autocast(recipe=RECIPE):
        ours(torch.ones(4, WIDTH, device=device), is_first_microbatch=True)
    y, *_ = torch_step(ours, ours, RECIPE, torch.randn(4, WIDTH, device=device), is_first_microbatch=False)
    assert y.requires_grad
    with ft.autocast(recipe=DelayedScaling(amax_history_len=7)):
        ours(torch.ones(4, WIDTH, device=device))
    assert ours.fp8_meta["scaling_fwd"].amax_history.shape == (7, 6)


@pytest.mark.parametrize("wrong", ["another layer's", "garbage"])
def test_a_state_that_does_not_fit_is_named_by_its_key_and_changes_nothing(wrong):
    model = torch.nn.Sequential(
        torch.nn.Sequential(ft.Linear(16, 16, device="cpu")), ft.LayerNormMLP(16, 32, device="cpu")
    )
    with ft.autocast(recipe=DelayedScaling()):
        model(torch.randn(16, 16)).sum().backward()
    saved, before = model.state_dict(), model[0][0].weight.detach().clone()
    state = saved["1._extra_state"] if wrong == "another layer's" else torch.zeros(9, dtype=torch.uint8)
    got = "scaling_fwd.scale: got" if wrong == "another layer's" else "got 9 bytes"
    with pytest.raises(CheckpointError, match=rf"^load_state_dict: 0\.0\._extra_state: {got} "):
        model.load_state_dict(saved | {"0.0._extra_state": state, "0.0.weight": before + 1})
    with pytest.raises(CheckpointError, match=rf"^set_extra_state: state: {got} "):
        model[0][0].set_extra_state(state)
    assert torch.equal(model[0][0].weight, before)
    model.load_state_dict(saved)
