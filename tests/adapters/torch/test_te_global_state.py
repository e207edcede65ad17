"""``FP8GlobalStateManager``: autocast by hand, states, recomputation, and the names of older versions."""

from __future__ import annotations

import copy

import fp8kit_torch as te
import pytest
import torch
from fp8kit_torch.te_compat.global_state import FP8GlobalStateManager as State

from fp8kit.autocast import current
from fp8kit.errors import ArgumentError, AutogradError

CURRENT, DELAYED = te.Float8CurrentScaling(), te.DelayedScaling(amax_history_len=2)


@pytest.fixture(autouse=True)
def left():
    yield
    assert current() is None
    State.reset()


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return te.Linear(32, 32, device="cpu")


def sample(seed=0):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_autocast_by_hand_is_autocast(layer):
    with te.autocast(recipe=CURRENT):
        wanted = layer(sample())
    State.autocast_enter(enabled=True, fp8_recipe=CURRENT)
    found = layer(sample())
    State.autocast_exit(enabled=True, _graph=False)
    assert torch.equal(found, wanted)
    assert current() is None
    with pytest.raises(ArgumentError, match="autocast_enter"):
        State.autocast_exit(True, False)


def test_autocast_by_hand_updates_scales_at_its_end(layer):
    State.fp8_autocast_enter(True, fp8_recipe=DELAYED)
    layer(sample())
    assert bool((layer.fp8_meta["scaling_fwd"].scale == 1).all())
    State.fp8_autocast_exit(True, False)
    assert layer.fp8_meta["scaling_fwd"].scale[0] > 1


def test_a_state_is_put_back_until_the_autocast_ends():
    with te.autocast(recipe=CURRENT):
        kept = State.get_autocast_state()
        State.autocast_enter(enabled=False)
        assert not State.is_fp8_enabled()
        State.set_autocast_state(kept)
        assert State.is_fp8_enabled()
        assert State.get_fp8_recipe() == CURRENT
        State.autocast_exit(False, False)
        assert State.get_autocast_state()[:2] == (True, CURRENT)
        State.set_autocast_state(kept)  # it holds
    with pytest.raises(ArgumentError, match="between autocast_enter and autocast_exit"):
        State.set_autocast_state(kept)


def test_scales_may_be_updated_before_the_autocast_ends(layer):
    twin = copy.deepcopy(layer)
    with te.autocast(recipe=DELAYED):
        layer(sample())
    with te.autocast(recipe=DELAYED):
        twin(sample())
        State.reduce_and_update_fp8_tensors(forward=True)
        assert torch.equal(twin.fp8_meta["scaling_fwd"].scale, layer.fp8_meta["scaling_fwd"].scale)
    same_state(twin, layer)
    State.reduce_and_update_fp8_tensors(forward=False)


def test_a_state_of_ones_own_is_updated_with_the_layers(layer):
    layer.prepare(2)
    state = layer.fp8_meta["scaling_fwd"]
    with te.autocast(recipe=DELAYED):
        state.amax_history[0, 0] = 4.0
        State.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
    assert state.scale[0] == 448 / 4
    State.add_fp8_tensors_to_global_buffer(layer.fp8_meta)  # outside of autocast: nothing


def test_scales_of_a_first_pass_come_back_for_its_recomputation(layer):
    for seed in range(2):
        with te.autocast(recipe=DELAYED):
            layer(sample(seed))
    meta = layer.fp8_meta
    first = meta["scaling_fwd"].scale.clone()
    State.copy_forward_fp8_meta_tensors_for_recompute(meta)
    with te.autocast(recipe=DELAYED):
        layer(sample() * 8)
    newest = meta["scaling_fwd"].scale.clone()
    assert not torch.equal(first, newest)
    State.get_old_fp8_meta_tensors_for_recompute(meta)
    assert torch.equal(meta["scaling_fwd"].scale, first)
    State.restore_fp8_meta_tensors(meta)
    assert torch.equal(meta["scaling_fwd"].scale, newest)
    with pytest.raises(ArgumentError, match="of which nothing is kept"):
        State.get_old_fp8_meta_tensors_for_recompute(meta)


def test_names_of_older_versions_are_read():
    assert State.FP8_ENABLED is False
    assert State.quantization_state.autocast_depth == 0
    with te.autocast(calibrating=True, recipe=CURRENT):
        assert (State.FP8_ENABLED, State.FP8_CALIBRATION, State.FP8_RECIPE) == (True, True, CURRENT)
        assert State.quantization_state.fp8_recipe == CURRENT
        assert State.FP8_AUTOCAST_DEPTH == 1
        assert State.IS_FIRST_FP8_MODULE
        assert State.is_first_fp8_module()
        assert not State.quantization_state.is_first_fp8_module
    with pytest.raises(AttributeError, match="read only"):
        State.quantization_state.fp8_enabled = True
    with pytest.raises(AttributeError, match="has no nonsense"):
        State.quantization_state.nonsense  # noqa: B018


def test_keys_of_a_recipe_and_a_direction():
    key = State.get_key_in_buffer(True, CURRENT, None)
    assert (
        key != State.get_key_in_buffer(False, CURRENT, None) != State.get_key_in_buffer(False, DELAYED, None)
    )
    assert State.split_key_in_buffer(key) == (True, State.get_unique_autocast_key(CURRENT, None))


def test_the_flag_of_cached_weights():
    assert State.get_skip_fp8_weight_update_tensor() is None
    State.set_skip_fp8_weight_update_tensor(True)
    assert State.get_skip_fp8_weight_update_tensor().tolist() == [1.0]
    one = torch.ones(1)
    State.reduce_tensor_across_group_op_max(one, None)
    assert one.item() == 1


# --- recomputation by hand ----------------------------------------------------------------------------------


def same_state(one, other):
    for name, state in one.fp8_meta.items():
        for a, b in zip(state.parts, other.fp8_meta[name].parts, strict=True):
            assert torch.equal(a, b), name


class ByHand(torch.autograd.Function):
    """A program's own checkpoint."""

    @staticmethod
    def forward(ctx, module, recipe, x):
        ctx.module, ctx.recipe = module, recipe
        ctx.save_for_backward(x)
        with torch.no_grad(), te.distributed.activation_recompute_forward(True, recompute_phase=False):
            assert te.distributed.is_fp8_activation_recompute_enabled()
            assert not te.distributed.in_fp8_activation_recompute_phase()
            return module(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with (
            torch.enable_grad(),
            te.autocast(recipe=ctx.recipe),
            te.distributed.activation_recompute_forward(True, recompute_phase=True),
        ):
            assert te.distributed.in_fp8_activation_recompute_phase()
            y = ctx.module(x)
        y.backward(dy)
        return None, None, x.grad


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_a_programs_own_recomputation_has_the_bits_of_a_plain_step(recipe):
    """Also where two micro-batches are open at a time."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(te.Linear(32, 64, device="cpu"), te.LayerNormMLP(64, 32, device="cpu"))
    other = copy.deepcopy(plain)
    for step in range(3):
        results = []
        for model in (plain, other):
            model.zero_grad()
            batches, outputs = [sample(2 * step), sample(2 * step + 1)], []
            for x in batches:
                with te.autocast(recipe=recipe):
                    outputs.append(model(x) if model is plain else ByHand.apply(model, recipe, x))
            for y in outputs:
                y.square().sum().backward()
            results.append([*outputs, *[x.grad for x in batches], *[p.grad for p in model.parameters()]])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        for one, two in zip(plain, other, strict=True):
            same_state(one, two)


def test_a_later_pass_without_a_first_one_is_refused(layer):
    recompute = te.distributed.activation_recompute_forward
    with (
        te.autocast(recipe=DELAYED),
        recompute(True, True),
        pytest.raises(AutogradError, match="no first pass"),
    ):
        layer(sample())


def test_without_recomputation_the_context_does_nothing(layer):
    @te.distributed.activation_recompute_forward()
    def call():
        assert not te.distributed.is_fp8_activation_recompute_enabled()
        return layer(sample())

    with te.autocast(recipe=CURRENT):
        assert torch.equal(call(), layer(sample()))


def test_contexts_for_torchs_checkpoint(layer):
    contexts = te.distributed.get_activation_recompute_contexts
    results = []
    for checkpointed in (True, False):
        x = sample()
        with te.autocast(recipe=CURRENT):
            y = (
                torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
                if checkpointed
                else layer(x)
            )
        y.square().sum().backward()
        results.append([y, x.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert te.distributed.use_reentrant_activation_recompute()


def test_an_autocast_of_a_graph_leaves_scales_to_the_one_around_it():
    """As in Transformer Engine: ``_graph`` updates nothing, amaxes stay recorded."""
    own = te.Linear(16, 16, device="cpu")
    x, recipe = torch.randn(16, 16), DELAYED
    with te.fp8_autocast(fp8_recipe=recipe, _graph=True):
        own(x)
    state = own.fp8_meta["scaling_fwd"]
    assert torch.equal(state.scale, torch.ones(3))
    assert state.amax_history[0, 0] == x.abs().max()
    with te.autocast(recipe=recipe):
        with te.autocast(recipe=recipe, _graph=True):
            own(x)
        assert state.scale[0] == 1
    assert state.scale[0] > 1
    with pytest.raises(ArgumentError, match="_graph"):
        te.autocast(_graph="yes")
