"""Arguments of Transformer Engine that change nothing where one process works, gradients that wait for
``backward_dw``, random states by name, and what subclasses call."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.module import TransformerEngineBaseModule

from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close, largest

WITHOUT_EFFECT = {
    "sequence_parallel": True,
    "parallel_mode": "row",
    "set_parallel_mode": True,
    "ub_overlap_ag": True,
    "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": True,
    "ub_bulk_dgrad": True,
    "ub_bulk_wgrad": True,
    "ub_tp_comm_overlap": True,
    "ub_name": "fc1",
    "symmetric_ar_type": "two_shot",
    "save_original_input": True,
    "rng_tracker_name": "other",
    "return_layernorm_output_gathered": True,
    "cp_comm_type": "a2a",
    "cp_global_ranks": [0],
    "sm_margin": 2,
    "use_grouped_tensor": False,
}
MAKERS = {
    "Linear": lambda **more: ft.Linear(32, 16, **more),
    "LayerNorm": lambda **more: ft.LayerNorm(32, **more),
    "RMSNorm": lambda **more: ft.RMSNorm(32, **more),
    "LayerNormLinear": lambda **more: ft.LayerNormLinear(32, 16, **more),
    "LayerNormMLP": lambda **more: ft.LayerNormMLP(32, 16, **more),
    "GroupedLinear": lambda **more: ft.GroupedLinear(2, 32, 16, **more),
    "MultiheadAttention": lambda **more: ft.MultiheadAttention(32, 4, attention_dropout=0.0, **more),
    "TransformerLayer": lambda **more: ft.TransformerLayer(
        32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, **more
    ),
}
TAKES = {name: set(ft.__dict__[name].__init__.__code__.co_varnames) for name in MAKERS}


def called(kind, **more):
    torch.manual_seed(0)
    layer, x = MAKERS[kind](**more), torch.randn(4, 2, 32)
    return layer(x, [4, 4]) if kind == "GroupedLinear" else layer(x)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("kind", "argument"), [(kind, name) for kind in MAKERS for name in WITHOUT_EFFECT if name in TAKES[kind]]
)
def test_what_is_about_several_processes_changes_nothing(kind, argument):
    assert torch.equal(called(kind, **{argument: WITHOUT_EFFECT[argument]}), called(kind))


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("sequence_parallel", "yes"),
        ("parallel_mode", "columns"),
        ("ub_name", 3),
        ("symmetric_ar_type", "ring"),
        ("ub_overlap_ag", None),
        ("get_rng_state_tracker", 3),
        ("delay_wgrad_compute", "late"),
        ("tp_group", 3),
    ],
)
def test_what_they_may_be_is_checked(argument, wrong):
    with pytest.raises(ArgumentError, match=f"Linear: {argument}: got"):
        ft.Linear(32, 16, device="cpu", **{argument: wrong})


# --- delayed gradients --------------------------------------------------------------------------------------


def gradients(kind, recipe, **more):
    torch.manual_seed(0)
    layer, x = MAKERS[kind](**more), torch.randn(16, 32, requires_grad=True)
    with ft.autocast(recipe=recipe()):
        y = layer(x, [8, 8]) if kind == "GroupedLinear" else layer(x)
    y.square().sum().backward()
    return layer, x.grad


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("recipe", [ft.Float8CurrentScaling, ft.DelayedScaling])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_weights_gradients_wait_for_backward_dw(kind, recipe):
    layer, dx = gradients(kind, recipe, delay_wgrad_compute=True)
    usual, usual_dx = gradients(kind, recipe)
    assert layer.need_backward_dw()
    assert not usual.need_backward_dw()
    assert torch.equal(dx, usual_dx)
    assert all(weight.grad is None for weight in layer.weight_inputs().values())
    layer.backward_dw()
    layer.backward_dw()  # of which nothing is left
    for own, other in zip(layer.parameters(), usual.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


def test_gradients_of_several_passes_are_added_once():
    torch.manual_seed(0)
    layer, x = ft.Linear(32, 16, bias=False, device="cpu", delay_wgrad_compute=True), torch.randn(4, 32)
    for _ in range(2):
        layer(x).sum().backward()
    layer.backward_dw()
    want = 2 * x.sum(0).expand(16, 32)
    assert_tensor_close("dw", layer.weight.grad, want, sum_slack(2 * x.abs().sum(0), 8))


@pytest.mark.usefixtures("everywhere")
def test_a_hook_runs_when_the_gradients_are_there():
    layer, seen = ft.Linear(32, 16, delay_wgrad_compute=True), []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(layer.weight.grad is not None))
    layer(torch.ones(4, 32)).sum().backward()
    assert seen == []
    layer.backward_dw()
    assert seen == [True]


@pytest.mark.usefixtures("everywhere")
def test_a_layer_of_layers_hands_over_what_waits_in_its_parts():
    layer = ft.TransformerLayer(32, 64, 4)
    layer.layernorm_mlp = ft.LayerNormMLP(32, 64, delay_wgrad_compute=True, return_bias=True)
    layer(torch.randn(4, 2, 32)).sum().backward()
    assert layer.need_backward_dw()
    assert layer.layernorm_mlp.fc1_weight.grad is None
    layer.backward_dw()
    assert layer.layernorm_mlp.fc1_weight.grad is not None


@pytest.mark.usefixtures("everywhere")
def test_a_copy_has_nothing_that_waits():
    layer = ft.Linear(32, 16, delay_wgrad_compute=True)
    layer(torch.ones(4, 32)).sum().backward()
    twin = copy.deepcopy(layer)
    twin.backward_dw()
    assert twin.weight.grad is None


@pytest.mark.parametrize("number", [0, -1])
def test_layers_are_counted_from_1(number):
    """As Transformer Engine asserts, which takes any number for the core attention."""
    for make in (
        lambda **k: ft.TransformerLayer(32, 64, 4, **k),
        lambda **k: ft.MultiheadAttention(32, 4, **k),
    ):
        with pytest.raises(ArgumentError, match=rf"layer_number: got {number}, expected an int >= 1$"):
            make(layer_number=number, device="cpu")
    assert ft.DotProductAttention(4, 8, layer_number=number).layer_number == number


# --- random states by name ----------------------------------------------------------------------------------


def tracker():
    made = ft.CudaRNGStatesTracker()
    made.add("model-parallel-rng", 3)
    made.add("other", 4)
    return lambda: made


def test_weights_start_from_the_trackers_states():
    torch.manual_seed(0)
    first = ft.Linear(32, 16, device="cpu", get_rng_state_tracker=tracker())
    before = torch.get_rng_state()
    again = ft.Linear(32, 16, device="cpu", get_rng_state_tracker=tracker())
    other = ft.Linear(32, 16, device="cpu", get_rng_state_tracker=tracker(), rng_tracker_name="other")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)


def test_a_layer_hands_the_tracker_to_its_parts():
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        layer = ft.TransformerLayer(
            32, 64, 4, hidden_dropout=0.0, device="cpu", get_rng_state_tracker=tracker()
        )
        before = torch.get_rng_state()
        made.append(layer(torch.ones(4, 2, 32).cumsum(0)))
        assert torch.equal(torch.get_rng_state(), before)  # attention dropped elements, too
    assert torch.equal(*made)


# --- norms over several dimensions --------------------------------------------------------------------------


@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_over_several_dimensions(centred):
    torch.manual_seed(0)
    norm = ft.LayerNorm((4, 8), zero_centered_gamma=centred, device="cpu")
    x = torch.randn(3, 4, 8, requires_grad=True)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    want = torch.nn.functional.layer_norm(x, (4, 8), norm.weight + float(centred), norm.bias)
    y = norm(x)
    assert_tensor_close("y", y, want, sum_slack(largest(want), 32))
    grads = torch.autograd.grad(y.square().sum(), (x, norm.weight, norm.bias))
    wanted = torch.autograd.grad(want.square().sum(), (x, norm.weight, norm.bias))
    for name, grad, exact in zip(("dx", "dweight", "dbias"), grads, wanted, strict=True):
        assert_tensor_close(name, grad, exact, sum_slack(largest(exact), 96))
    assert norm.weight.shape == (4, 8)
    with pytest.raises(ShapeError, match="LayerNorm: inp"):
        norm(torch.zeros(3, 5, 8))


# --- hooks of the base class --------------------------------------------------------------------------------


class Own(ft.Linear):
    """A layer of somebody else's, on the base class' hooks."""

    def forward(self, inp):
        self.set_activation_dtype(inp)
        self.fast_setattr("calls", getattr(self, "calls", 0) + 1)
        with self.prepare_forward_ctx(inp, num_gemms=1) as x:
            assert not self.is_debug_iter()
            return super().forward(x) + 1


@pytest.mark.usefixtures("everywhere")
def test_a_subclass_calls_the_hooks_of_the_base_class():
    layer = Own(32, 16)
    assert isinstance(layer, TransformerEngineBaseModule)
    x = torch.randn(32, 4).t()
    assert torch.equal(layer(x), ft.Linear.forward(layer, x) + 1)
    assert layer.activation_dtype is torch.float32
    assert layer.calls == 1
