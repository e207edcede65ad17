"""``get_cpu_offload_context``: gradients have the bits they have without it, and tensors are let go and come
back when they should. What is on the device is counted by weak references to the layers' saved tensors."""

from __future__ import annotations

import copy
import gc
import weakref

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import offloading
from fp8kit_torch.cpu_offload import get_cpu_offload_context, is_cpu_offload_enabled, mark_not_offload

from fp8kit.errors import ArgumentError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close

WIDTH, ROWS = 32, 24


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(offloading, "LEAST", 64)


class Square(torch.autograd.Function):
    """Saves a tensor of its own making, and notes it."""

    seen: list = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        kept = x + x
        Square.seen.append(weakref.ref(kept.untyped_storage()))
        ctx.save_for_backward(kept)
        return x * x

    @staticmethod
    def backward(ctx, g):
        Square.alive.append([ref() is not None for ref in Square.seen])
        return g * ctx.saved_tensors[0]

    alive: list = []  # noqa: RUF012


def squares(count, **options):
    """x^(2^count) through the context: what is alive after each forward, and at each backward; the
    gradient, and what the context returned."""
    Square.seen, Square.alive, forward = [], [], []
    context, synchronize, *manual = get_cpu_offload_context(True, model_layers=count, **options)
    y = x = torch.linspace(0.5, 1.0, 128, requires_grad=True)
    for _ in range(count):
        with context:
            y = Square.apply(y)
        y = synchronize(y)
        forward.append([ref() is not None for ref in Square.seen])
    return x, y, forward, manual


def test_layers_are_let_go_and_come_back_in_time():
    """Of four layers two are offloaded: two, and the one that is copied, are on the device at a time."""
    x, y, forward, _ = squares(4, num_layers=2)
    assert forward[1] == [True, True]  # the first is being copied
    assert forward[2] == [False, True, True]
    assert forward[3] == [False, False, True, True]
    y.sum().backward()
    # the fourth's backward: what was let go has come back as other memory
    assert Square.alive[0] == [False, False, True, True]
    assert_tensor_close("dx", x.grad, 16 * x.double() ** 15, sum_slack(16, 15))


def test_double_buffering_leaves_a_copy_the_time_of_a_layer():
    x, y, forward, _ = squares(4, num_layers=3, double_buffering=True)
    assert forward[1] == [True, True]  # the first is being copied, and may take until the third begins
    assert forward[2] == [False, True, True]
    y.sum().backward()
    assert_tensor_close("dx", x.grad, 16 * x.double() ** 15, sum_slack(16, 15))


@pytest.mark.parametrize("recipe", [None, DelayedScaling(amax_history_len=4), Float8CurrentScaling()])
def test_transformer_layers_have_the_gradients_that_they_have_without(device, recipe):
    torch.manual_seed(0)
    made = torch.nn.ModuleList(
        ft.TransformerLayer(WIDTH, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device)
        for _ in range(3)
    )
    x, found = torch.randn(ROWS, 2, WIDTH, device=device), []
    for enabled in (False, True):
        layers, own = copy.deepcopy(made), x.clone().requires_grad_()
        context, synchronize = get_cpu_offload_context(enabled, num_layers=2, model_layers=3)
        for first in (True, False):  # FP8 weights are kept, and stay
            y = own
            with ft.autocast(enabled=recipe is not None, recipe=recipe):
                for layer in layers:
                    with context:
                        y = layer(y, is_first_microbatch=first)
                    y = synchronize(y)
            assert not enabled or context.synchronizer.offloaded_bytes() > 4 * x.numel() * 4
            y.square().mean().backward()
        found.append([own.grad, *(p.grad for p in layers.parameters())])
    assert all(map(torch.equal, *found))


def test_a_gradient_twice_and_two_passes_under_way():
    x, y, _, _ = squares(3, num_layers=2)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), x)
    assert_tensor_close("dx", again, 8 * x.double() ** 7, sum_slack(8, 7))
    context, synchronize = get_cpu_offload_context(True, num_layers=1, model_layers=2)
    outputs = []
    for start in (0.5, 0.7):
        y = x = torch.full((128,), start, requires_grad=True)
        for _ in range(2):
            with context:
                y = Square.apply(y)
            y = synchronize(y)
        outputs.append((x, y))
    for x, y in outputs:
        y.sum().backward()
        assert_tensor_close("dx", x.grad, 4 * x.double() ** 3, sum_slack(4, 3))


def test_without_synchronize_tensors_come_back_when_they_are_read():
    context, _ = get_cpu_offload_context(True, num_layers=2, model_layers=3)
    y = x = torch.linspace(0.5, 1.0, 128, requires_grad=True)
    for _ in range(3):
        with context:
            y = Square.apply(y)
    y.sum().backward()
    assert_tensor_close("dx", x.grad, 8 * x.double() ** 7, sum_slack(8, 7))


def test_by_hand():
    x, y, forward, (manual,) = squares(3, num_layers=None, manual_synchronization=True)
    assert isinstance(manual, ft.ManualOffloadSynchronizer)
    assert forward[-1] == [True] * 3  # nothing is offloaded that is not asked for
    manual.start_offload_layer(0)
    manual.start_offload_layer(2)
    assert [ref() is not None for ref in Square.seen] == [True] * 3
    manual.release_activation_forward_gpu_memory(0)
    manual.release_activation_forward_gpu_memory(2)
    assert [ref() is not None for ref in Square.seen] == [False, True, False]
    assert manual.offloaded_bytes() == 2 * 128 * 4
    manual.start_reload_layer(2)
    assert manual.offloaded_bytes() == 128 * 4
    y.sum().backward()  # the first layer comes back by itself
    assert_tensor_close("dx", x.grad, 8 * x.double() ** 7, sum_slack(8, 7))


@pytest.mark.parametrize(
    ("name", "before", "said"),
    [
        ("release_activation_forward_gpu_memory", (), "0, which is held, expected a leaving one"),
        ("start_reload_layer", ("start_offload_layer",), "0, which is leaving, expected a away one"),
        ("start_offload_layer", ("start_offload_layer",), "0, which is leaving, expected a held one"),
    ],
)
def test_by_hand_in_another_order_is_refused(name, before, said):
    *_, (manual,) = squares(1, manual_synchronization=True)
    for step in before:
        getattr(manual, step)(0)
    with pytest.raises(ArgumentError, match=said):
        getattr(manual, name)(0)
    with pytest.raises(ArgumentError, match="layer_id: got 1, expected a layer whose forward pass has ended"):
        getattr(manual, name)(1)


def test_host_buffers_are_used_again():
    context, synchronize = get_cpu_offload_context(
        True, num_layers=1, model_layers=2, retain_pinned_cpu_buffers=True
    )
    addresses = set()
    for _ in range(3):
        y = x = torch.linspace(0.5, 1.0, 128, requires_grad=True)
        for _ in range(2):
            with context:
                y = Square.apply(y)
            y = synchronize(y)
        y.sum().backward()
        del x, y
        gc.collect()
        (buffers,) = context.synchronizer.pool.values()
        addresses.add(tuple(sorted(buffer.data_ptr() for buffer in buffers)))
    assert len(addresses) == 1


def test_what_stays():
    """Parameters, small tensors, and what is marked."""
    context, _ = get_cpu_offload_context(True, num_layers=1, model_layers=2)
    weight = torch.nn.Parameter(torch.ones(128))
    marked = torch.ones(128, requires_grad=True) * 1
    mark_not_offload(marked)
    push = context.synchronizer.push_tensor
    with context:
        assert is_cpu_offload_enabled()
        assert push(weight) is weight
        assert push(marked) is marked
        assert push(marked.view(2, 64)).shape == (2, 64)
        assert isinstance(push(torch.ones(63)), torch.Tensor)
        first = push(torch.ones(128))
        assert not isinstance(first, torch.Tensor)
    assert not is_cpu_offload_enabled()
    del marked
    gc.collect()
    assert not offloading._STAYING


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()])
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_of_experts_stay(one, recipe, frozen, monkeypatch):
    options = {"single_grouped_weight": True} if one else {}
    pushed, push = [], offloading.OffloadableLayer.push
    monkeypatch.setattr(
        offloading.OffloadableLayer, "push", lambda self, t: (pushed.append(t.detach()), push(self, t))[1]
    )
    experts = ft.GroupedLinear(
        2, WIDTH, WIDTH, bias=False, device="cpu", use_grouped_tensor=True, **options
    ).requires_grad_(not frozen)
    x, sizes = torch.randn(ROWS, WIDTH, requires_grad=True), torch.tensor([ROWS - 7, 7])
    places, grads = [p.untyped_storage().data_ptr() for p in experts.parameters()], []
    for enabled in (True, False):
        context, synchronize = get_cpu_offload_context(enabled, num_layers=1, model_layers=2)
        with ft.autocast(enabled=recipe is not None, recipe=recipe):
            y = x
            for _ in range(2):
                with context:
                    y = experts(y, sizes)
                y = synchronize(y)
        wanted = [x, *(p for p in experts.parameters() if p.requires_grad)]
        grads.append(torch.autograd.grad(y.sum(), wanted))
    assert all(map(torch.equal, *grads))
    assert not [t for t in pushed if t.untyped_storage().data_ptr() in places]
    assert pushed or frozen
    gc.collect()
    assert not offloading._STAYING


def test_wrong_arguments():
    with pytest.raises(ArgumentError, match="num_layers: got 2, expected at most 1"):
        get_cpu_offload_context(True, num_layers=2, model_layers=2)
    with pytest.raises(ArgumentError, match="offload_activations: got False"):
        get_cpu_offload_context(True, num_layers=1, model_layers=2, offload_activations=False)
    with pytest.raises(ArgumentError, match="offload_stream: got 3"):
        get_cpu_offload_context(True, num_layers=1, model_layers=2, offload_stream=3)
    context, _ = get_cpu_offload_context(True, num_layers=1, model_layers=2)
    with context, pytest.raises(ArgumentError, match="one layer at a time"), context:
        pass


def test_a_forward_pass_that_fails_ends_its_pass():
    context, _ = get_cpu_offload_context(True, num_layers=1, model_layers=2)
    with pytest.raises(RuntimeError, match="mine"), context:
        raise RuntimeError("mine")
    with context:
        pass
    assert context.layer.number == 0


@pytest.mark.gpu
def test_device_memory_is_let_go():
    """Eight products whose inputs are saved: with seven offloaded, fewer of them lie on the GPU after
    forward, and the gradients have the same bits."""
    size, layers = 1 << 22, 8
    results = []
    for count in (0, 7):
        context, synchronize = get_cpu_offload_context(True, num_layers=count, model_layers=layers)
        y = x = torch.linspace(0.5, 1.0, size, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(layers):
            with context:
                y = Square.apply(y)
            y = synchronize(y)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        y.sum().backward()
        results.append((held, x.grad))
    assert results[1][0] <= results[0][0] - 6 * 4 * size
    assert torch.equal(results[0][1], results[1][1])
