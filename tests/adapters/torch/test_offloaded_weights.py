"""``get_cpu_offload_context(offload_weights=True)``: weights' memory is let go between a layer's forward and
its backward pass, nobody computes with what is not there, and steps have the bits they have without."""

from __future__ import annotations

import copy
import gc
import pickle

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import offloading
from fp8kit_torch.cpu_offload import get_cpu_offload_context
from torch.multiprocessing.reductions import StorageWeakRef

from fp8kit.errors import AutogradError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.support.combinations import combinations

WIDTH, ROWS = 32, 24


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(offloading, "LEAST", 64)


def linears(count=3, kind=torch.nn.Linear, **options):
    torch.manual_seed(0)
    return torch.nn.ModuleList(kind(WIDTH, WIDTH, **options) for _ in range(count))


def forward(layers, x, **options):
    options = {"num_layers": len(layers) - 1, "offload_weights": True} | options
    context, synchronize, *manual = get_cpu_offload_context(True, model_layers=len(layers), **options)
    for layer in layers:
        with context:
            x = layer(x)
        x = synchronize(x)
    return x, *manual


def on_device(layers):
    """Of each layer, whether its weight has all its memory."""
    return [layer.weight.untyped_storage().nbytes() == layer.weight.nbytes for layer in layers]


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_go_and_come_back_with_the_gradients_that_there_are_without(activations, frozen):
    """Torch's own layers, which save a view of the weight."""
    layers = linears()
    layers[0].weight.requires_grad_(not frozen)
    values = [layer.weight.detach().clone() for layer in layers]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y, grads = x, []
    for layer in layers:
        y = layer(y)
    wanted = torch.autograd.grad(y.sum(), [x, *(p for p in layers.parameters() if p.requires_grad)])
    y, *_ = forward(layers, x, offload_activations=activations)
    assert on_device(layers) == [False, False, True]
    assert layers[0].weight.isnan().all()
    seen = []
    y.register_hook(lambda g: seen.append(on_device(layers)))
    grads = torch.autograd.grad(y.sum(), [x, *(p for p in layers.parameters() if p.requires_grad)])
    assert all(map(torch.equal, grads, wanted))
    assert seen == [[False, False, True]]
    assert on_device(layers) == [True] * 3
    assert all(map(torch.equal, [layer.weight for layer in layers], values))


@combinations(
    {"recipe": {"high": None, "delayed": DelayedScaling(amax_history_len=4), "block": Float8BlockScaling()}},
    usual=["delayed"],
)
def test_training_has_the_bits_that_it_has_without(device, recipe):
    """Two steps of two micro-batches, with an optimizer that writes by address."""
    torch.manual_seed(0)
    made = torch.nn.ModuleList(
        ft.TransformerLayer(WIDTH, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device)
        for _ in range(3)
    )
    x, found = torch.randn(ROWS, 2, WIDTH, device=device), []
    for enabled in (False, True):
        layers = copy.deepcopy(made)
        optimizer = ft.optimizers.FusedAdam(layers.parameters(), lr=1e-3)
        context, synchronize = get_cpu_offload_context(enabled, 2, 3, offload_weights=True)
        for first in (True, False, True, False):
            y = x
            with ft.autocast(enabled=recipe is not None, recipe=recipe):
                for layer in layers:
                    with context:
                        y = layer(y, is_first_microbatch=first)
                    y = synchronize(y)
            weight = layers[0].layernorm_mlp.fc1_weight
            assert bool(weight.isnan().all()) is enabled
            y.square().mean().backward()
            if not first:
                optimizer.step()
                optimizer.zero_grad()
        found.append([p.detach() for p in layers.parameters()])
    assert all(map(torch.equal, *found))


def test_a_module_that_is_called_meanwhile_has_its_weights():
    """A layer that two share, and an evaluation between forward and backward."""
    layers = linears(2)
    shared = torch.nn.ModuleList([layers[0], layers[0], layers[1]])
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        wanted = layers[1](layers[0](layers[0](x)))
    y, *_ = forward(shared, x)
    assert torch.equal(y, wanted)
    assert on_device(shared) == [False, False, True]
    with torch.no_grad():
        assert torch.equal(layers[0](x), torch.nn.functional.linear(x, layers[0].weight, layers[0].bias))
    assert not layers[0].weight.isnan().any()
    y.sum().backward()
    assert not any(p.grad.isnan().any() for p in layers.parameters())


def test_state_dict_and_a_graph_that_is_dropped_bring_weights_back():
    layers = linears()
    values = copy.deepcopy(layers.state_dict())
    y, *_ = forward(layers, torch.randn(ROWS, WIDTH))
    assert on_device(layers) == [False, False, True]
    read = layers.state_dict()
    assert all(torch.equal(read[name], value) for name, value in values.items())
    del read, y
    y, *_ = forward(layers, torch.randn(ROWS, WIDTH))
    assert on_device(layers) == [False, False, True]
    del y
    gc.collect()
    assert on_device(layers) == [True] * 3
    assert all(torch.equal(p, values[name]) for name, p in layers.named_parameters())


def test_without_a_graph_nothing_goes():
    layers = linears()
    with torch.no_grad():
        forward(layers, torch.randn(ROWS, WIDTH))
    assert on_device(layers) == [True] * 3


def test_what_shares_memory_stays():
    """A second tensor of the weight's memory, and parameters that are parts of one buffer."""
    layers = linears()
    alias = layers[0].weight.detach()
    buffer = torch.cat([layers[1].weight.detach(), torch.ones(1, WIDTH)])
    layers[1].weight = torch.nn.Parameter(buffer[:WIDTH])
    y, *_ = forward(layers, torch.randn(ROWS, WIDTH))
    assert not alias.isnan().any()
    assert not any(layer.weight.isnan().any() for layer in layers)
    y.sum().backward()
    alias.zero_()
    assert not layers[0].weight.any()


def test_by_hand():
    layers = linears()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y, manual = forward(layers, x, num_layers=None, manual_synchronization=True)
    assert on_device(layers) == [True] * 3
    for number in (0, 2):
        manual.start_offload_layer(number)
    assert on_device(layers) == [True] * 3
    for number in (0, 2):
        manual.release_activation_forward_gpu_memory(number)
    assert on_device(layers) == [False, True, False]
    manual.start_reload_layer(2)
    assert on_device(layers) == [False, True, True]
    y.sum().backward()
    plain = torch.autograd.grad(layers[2](layers[1](layers[0](x))).sum(), x)
    assert torch.equal(x.grad, plain[0])


def test_weights_in_fp8_stay():
    with ft.quantized_model_init(recipe=DelayedScaling()):
        layers = linears(kind=ft.Linear, device="cpu")
    with ft.autocast(recipe=DelayedScaling()):
        y, *_ = forward(layers, torch.randn(ROWS, WIDTH))
    assert not any(layer.weight.dequantize().isnan().any() for layer in layers)
    y.sum().backward()


def experts(count=3, **options):
    torch.manual_seed(0)
    made = {"device": "cpu", "use_grouped_tensor": True, **options}
    return torch.nn.ModuleList(ft.GroupedLinear(2, WIDTH, WIDTH, **made) for _ in range(count))


def run_experts(layers, x, recipe, **options):
    sizes = torch.tensor([ROWS - 7, 7])
    calls = [lambda x, layer=layer: layer(x, sizes) for layer in layers]
    with ft.autocast(enabled=recipe is not None, recipe=recipe):
        return forward(calls, x, **options)


def together(layer):
    """Whether a layer's weights lie side by side, or are one, with values."""
    if layer.single_grouped_weight:
        return not layer.weight.isnan().any()
    found = layer._stacks.find("weight", layer._members("weight"))
    return found is not None and not found.isnan().any()


@combinations(
    {
        "recipe": {"plain": None, "current": Float8CurrentScaling()},
        "one": {"several": False, "one": True},
        "options": {
            "at once": {},
            "fused": {"fuse_wgrad_accumulation": True},
            "delayed": {"delay_wgrad_compute": True},
        },
        "activations": {"weights": False, "activations": True},
    }
)
def test_experts_go_and_come_back_as_one(recipe, one, options, activations, monkeypatch):
    """Their joint array is no activation: it goes with the weights, and is one again, for steps to come."""
    pushed, push = [], offloading.OffloadableLayer.push
    monkeypatch.setattr(
        offloading.OffloadableLayer, "push", lambda self, t: (pushed.append(tuple(t.shape)), push(self, t))[1]
    )
    made = []
    for enabled in (True, False):
        layers = experts(single_grouped_weight=one, **options)
        memories = [StorageWeakRef(layer.main_parameters()[0].untyped_storage()) for layer in layers]
        memories = memories if one else [layer._stacks.known()[0].memory for layer in layers]
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for step in range(2):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
            for parameter in layers.parameters():
                parameter.main_grad = torch.zeros(parameter.shape)
            if enabled:
                y, *_ = run_experts(layers, x, recipe, offload_activations=activations)
                assert [together(layer) for layer in layers] == [False, False, True]
                away = {name for name, p in layers[0].named_parameters() if p.isnan().all()}
                assert away == ({"weight"} if one else {"weight0", "weight1"})
                gc.collect()
                assert step or [memory.expired() for memory in memories] == [True, True, False]
            else:
                sizes, y = torch.tensor([ROWS - 7, 7]), x
                for layer in layers:
                    with ft.autocast(enabled=recipe is not None, recipe=recipe):
                        y = layer(y, sizes)
            y.square().sum().backward()
            assert all(map(together, layers))
            for layer in layers:
                layer.backward_dw()
            made.append([x.grad, *(p.main_grad for p in layers.parameters())])
            made[-1] += [p.grad.clone() for p in layers.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        made.append([p.detach() for p in layers.parameters()])
    half = len(made) // 2
    for got, want in zip(made[:half], made[half:], strict=True):
        assert len(got) == len(want)
        assert all(map(torch.equal, got, want))
    assert (2, WIDTH, WIDTH) not in pushed or recipe is not None  # codes are activations
    gc.collect()
    assert not offloading._TOGETHER


def test_experts_whose_weights_move_meanwhile():
    """One that has other memory goes by itself, and one that others have stays with all."""
    layers, x = experts(bias=False), torch.randn(ROWS, WIDTH, requires_grad=True)
    wanted = [p.detach().clone() for p in layers.parameters()]
    held = layers[0].weight1.detach()
    y, *_ = run_experts(layers, x, None)
    assert [layer.weight0.isnan().any().item() for layer in layers] == [False, True, False]
    assert layers.state_dict()["1.weight1"].isnan().any().item() is False
    assert all(map(together, layers))
    del held
    y.sum().backward()
    layers[0].weight1.data = layers[0].weight1.data.clone()
    y, *_ = run_experts(layers, x, None)
    assert [p.isnan().all().item() for p in layers.parameters()] == [True] * 4 + [False] * 2
    y.sum().backward()
    assert all(map(torch.equal, layers.parameters(), wanted))
    assert [together(layer) for layer in layers] == [False, True, True]
    layers[0]._put_side_by_side()
    y, *_ = run_experts(layers, x, None)
    assert [p.isnan().all().item() for p in layers.parameters()] == [True] * 4 + [False] * 2
    del y
    gc.collect()
    assert all(map(together, layers))
    assert all(map(torch.equal, layers.parameters(), wanted))


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("kind", ["several", "one", "torch"])
def test_a_weight_that_is_changed_before_backward_is_refused(kind, activations):
    """As torch refuses it where nothing is offloaded; torch does not look at what hooks give back."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    layers = linears() if kind == "torch" else experts(single_grouped_weight=kind == "one")

    def y():
        if kind == "torch":
            return forward(layers, x, offload_activations=activations)[0].sum()
        return run_experts(layers, x, None, offload_activations=activations)[0].sum()

    for changed in layers:  # two that were away, and one that was not
        loss = y()
        changed.load_state_dict(changed.state_dict())
        with pytest.raises(AutogradError, match="changed in place"):
            loss.backward()
        del loss
        y().backward()


@pytest.mark.parametrize("one", [False, True], ids=["several", "one"])
def test_what_else_reads_and_writes_experts(one):
    """They are loaded while they are away, cast to another dtype before they go again, or while they are
    away, and pickled."""
    layers, x = experts(single_grouped_weight=one), torch.randn(ROWS, WIDTH, requires_grad=True)
    other = {name: torch.full_like(value, 0.5) for name, value in layers.state_dict().items()}
    y, *_ = run_experts(layers, x, None)
    assert not all(map(together, layers))
    layers.load_state_dict(other)
    del y
    gc.collect()
    for dtype in (torch.bfloat16, torch.float64):
        if dtype is torch.bfloat16:
            layers.to(dtype)
        y, *_ = run_experts(layers, x.bfloat16(), None)
        assert not all(map(together, layers))
        layers.to(dtype)
        del y
        gc.collect()
        assert {p.dtype for p in layers.parameters()} == {dtype}
        assert all((p == 0.5).all() for p in layers.parameters())
    copied = pickle.loads(pickle.dumps(layers))
    assert all(map(torch.equal, copied.parameters(), layers.parameters()))
    y, *_ = run_experts(copied.to(torch.float32), x, None)
    assert [together(layer) for layer in copied] == [False, False, True]
    y.sum().backward()
    assert all(map(together, copied))


@pytest.mark.gpu
def test_device_memory_of_experts_is_let_go():
    """Four layers of 32 MiB: three are not on the GPU after forward, and none is there twice after backward;
    gradients have the same bits."""
    size, count, found = 1024, 4, []
    for enabled in (True, False):
        torch.manual_seed(0)
        made = {"bias": False, "device": "cuda", "use_grouped_tensor": True}
        layers = torch.nn.ModuleList(ft.GroupedLinear(8, size, size, **made) for _ in range(count))
        x, sizes = (
            torch.randn(64, size, device="cuda", requires_grad=True),
            torch.full((8,), 8, device="cuda"),
        )
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        calls = [lambda x, layer=layer, sizes=sizes: layer(x, sizes) for layer in layers]
        for _ in range(2):
            y, *_ = forward(calls, x, offload_weights=enabled)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            grads = torch.autograd.grad(y.sum(), [x, *layers.parameters()])
            assert all(map(together, layers))
        found.append((held, grads))
        del layers, y, calls
    left = 3 * 512  # what is away has one element there, and the least that torch takes for one is 512 bytes
    assert found[0][0] <= found[1][0] - 3 * 4 * 8 * size * size + left
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.gpu
def test_device_memory_is_let_go_and_copies_run_beside():
    """Eight layers of 32 MiB: seven are not on the GPU after forward, and gradients have the same bits."""
    size, count, found = 2896, 8, []
    for enabled in (False, True):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(size, size, device="cuda") for _ in range(count))
        x = torch.randn(64, size, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        options = {"offload_weights": enabled, "double_buffering": False}
        for _ in range(2):
            y, *_ = forward(layers, x, **options)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            grads = torch.autograd.grad(y.sum(), [x, *layers.parameters()])
        found.append((held, grads))
        del layers, y
    assert found[1][0] <= found[0][0] - 7 * 4 * size * size
    assert all(map(torch.equal, found[0][1], found[1][1]))
