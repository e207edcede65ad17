"""Weights of groups that lie side by side: one array without a copy, and the same bits wherever they lie."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from fp8kit_torch import (
    GroupedLinear,
    GroupedMLP,
    autocast,
    grouped_weights,
    quantized_model_init,
    side_by_side,
    torch_compat,
)
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from fp8kit.errors import AutogradError
from fp8kit.recipe import Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing.compare import assert_same_bits
from tests.support.combinations import combinations

E, K, N = 4, 48, 128
SIZES = (7, 0, 20, 13)
RECIPES = {"plain": None, "current": Float8CurrentScaling(), "block": Float8BlockScaling()}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def module(place, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return GroupedLinear(E, K, N, params_dtype=dtype, device=place, use_grouped_tensor=True, **options)


def named(layer, name):
    return [getattr(layer, f"{name}{i}") for i in range(E)]


def joined(layer, name="weight"):
    """The array over the parameters' own memory, or None."""
    return layer._stacks.find(name, named(layer, name))


def apart(layer):
    """The layer, each of its parameters in memory of its own."""
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    assert joined(layer) is None
    return layer


def step(layer, recipe=None, where=None, call=None):
    """Output and gradients of a step, by name."""
    where = where or layer.weight0.device
    dtype = layer.weight1.dtype
    torch.manual_seed(1)
    x = torch.randn(sum(SIZES) + 3, K).to(where, dtype).requires_grad_()
    g = torch.randn(sum(SIZES) + 3, N).to(where, dtype)
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = (call or layer)(x, torch.tensor(SIZES, device=where))
    y.backward(g)
    made = {"y": y.detach(), "dx": x.grad}
    own = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return made | {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in own.items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert_same_bits(name, *(t.float().cpu().numpy() for t in (value, want[name])))


@combinations({"recipe": list(RECIPES), "dtype": [torch.float32, torch.bfloat16]})
def test_no_copy_and_the_same_bits(place, recipe, dtype, monkeypatch):
    together, other = module(place, dtype), apart(module(place, dtype))
    want = step(other, RECIPES[recipe])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", None)  # nothing is copied
        got = step(together, RECIPES[recipe])
    assert_same(got, want)
    for name in ("weight", "bias"):
        members, whole = named(together, name), joined(together, name)
        assert whole.data_ptr() == members[0].data_ptr()
        for tensors in (members, [p.grad for p in members]):
            assert [t.data_ptr() for t in tensors] == [
                tensors[0].data_ptr() + i * t.nbytes for i, t in enumerate(tensors)
            ]
        assert [p.untyped_storage().nbytes() for p in members] == [p.nbytes for p in members]
        assert all(type(p) is Parameter and p.is_leaf and not p._is_view() for p in members)


def test_names_order_and_values_are_as_ever():
    layer = module("cpu")
    assert [name for name, _ in layer.named_parameters()] == [
        f"{p}{i}" for i in range(E) for p in ("weight", "bias")
    ]
    torch.manual_seed(0)
    assert_same_bits("weight0", layer.weight0.detach().numpy(), torch.empty(N, K).normal_(0, 0.023).numpy())
    mlp = GroupedMLP(E, K, N, device="cpu")
    assert joined(mlp.fc1) is not None
    assert joined(mlp.fc2) is not None


def _called(layer):
    """After a first call, before which nothing that was read from a file moves."""
    layer(torch.ones(sum(SIZES), K, dtype=layer.weight0.dtype), torch.tensor(SIZES))
    return layer


def _saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MOVES = {
    "to a dtype": lambda layer: layer.to(torch.bfloat16),
    "half and float": lambda layer: layer.half().float(),
    "to where it is": lambda layer: layer.to("cpu"),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda layer: _called(pickle.loads(pickle.dumps(layer))),
    "torch.save": lambda layer: _called(_saved(layer)),
    "of the meta device": lambda layer: _loaded(module("meta").to_empty(device="cpu"), layer),
    "made after meta": lambda layer: _loaded(_reset(module("meta")), layer),
    "loaded": lambda layer: _loaded(module("cpu"), layer),
}


def _loaded(other, layer, **options):
    other.load_state_dict(layer.state_dict(), **options)
    return other


def _reset(layer):
    layer.reset_parameters()
    return layer


@pytest.mark.parametrize("move", MOVES)
def test_they_stay_together(move):
    layer = module("cpu")
    moved = MOVES[move](layer)
    whole = joined(moved)
    assert whole is not None
    assert whole.data_ptr() == moved.weight0.data_ptr()
    other = apart(_loaded(module("cpu", moved.weight0.dtype), moved))
    assert_same(step(moved), step(other))
    if move == "copy":  # has the same parameters
        assert joined(layer) is not None


def test_files_hold_each_parameter_once():
    layer = module("cpu")
    assert len(pickle.dumps(layer)) < 2 * sum(p.nbytes for p in layer.parameters())
    file = io.BytesIO()
    torch.save(layer.weight1, file)
    assert file.tell() < 2 * layer.weight1.nbytes


def _strides(layer):
    layer.weight2.data = layer.weight2.data.view(K, N).t()  # the same address, and shape


def _replaced(layer):
    layer.weight1 = Parameter(layer.weight1.detach().clone())


def _exchanged(layer):
    layer.weight1.data, layer.weight2.data = layer.weight2.data, layer.weight1.data


CHANGES = {
    "replaced": _replaced,
    "other memory": lambda layer: setattr(layer.weight3, "data", layer.weight3.data + 1),
    "other strides": _strides,
    "exchanged": _exchanged,
    "assigned": lambda layer: _loaded(layer, module("cpu"), assign=True),
    "shared memory": lambda layer: layer.share_memory(),
    "parametrized": lambda layer: torch.nn.utils.parametrize.register_parametrization(
        layer, "weight1", torch.nn.ReLU()
    ),
}


@combinations(
    {"recipe": ["plain", "current"], "change": list(CHANGES), "look": {"at once": True, "one by one": False}}
)
def test_what_no_longer_lies_so_is_copied(change, recipe, look, monkeypatch):
    if not look:  # as with a torch that cannot check all in one call
        monkeypatch.setattr(torch_compat, "_TensorGuards", None)
    layer = module("cpu")
    for _ in range(2):
        assert joined(layer) is not None
    CHANGES[change](layer)
    assert joined(layer) is None
    want = [w.detach().clone() for w in named(layer, "weight")]
    if change == "shared memory":
        assert all(p.is_shared() for p in layer.parameters())
    other = apart(module("cpu"))
    with torch.no_grad():
        for weight, value in zip(named(other, "weight"), want, strict=True):
            weight.copy_(value)
    got, wanted = (step(each, RECIPES[recipe]) for each in (layer, other))
    got = {name.replace("parametrizations.weight1.original", "weight1"): t for name, t in got.items()}
    assert_same(got, wanted)


def test_they_are_found_in_every_mode():
    layer = module("cpu")
    stack = layer._stacks._known["weight"]
    for _ in range(2 * stack.RENEWALS):  # more often than the quick look is made anew
        for scope in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
            with scope:
                assert joined(layer).data_ptr() == layer.weight0.data_ptr()
        layer.weight1.requires_grad_(not layer.weight1.requires_grad)
        assert joined(layer) is not None
    assert not stack._left


def test_a_look_at_all_is_one_call(monkeypatch):
    layer = module("cpu")
    assert joined(layer) is not None
    monkeypatch.setattr(side_by_side, "_kind", None)  # of the look at one after the other
    assert joined(layer) is not None


def test_memory_is_gone_with_the_parameters():
    layer = module("cpu")
    memory = layer._stacks._known["weight"].memory
    assert not memory.expired()
    for i in range(E):
        setattr(layer, f"weight{i}", Parameter(torch.zeros(N, K)))
    gc.collect()
    assert memory.expired()


def test_a_process_that_is_given_a_module_trains_its_parameters():
    layer = module("cpu")
    layer.share_memory()
    other = _called(pickle.loads(bytes(ForkingPickler.dumps(layer))))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7)
    assert all((p == 7).all() for p in layer.parameters())
    assert not any(p.is_shared() for p in copy.deepcopy(other).parameters())


def test_a_first_call_that_is_captured_moves_nothing(monkeypatch):
    """Nor does a later one: the graph has the addresses."""
    layer = _saved(module("cpu"))
    places = [p.data_ptr() for p in layer.parameters()]
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(grouped_weights, "is_capturing", lambda: True)
        patch.setattr(Parameter, "is_cuda", True)
        layer._place_loaded()
    _called(layer)
    assert [p.data_ptr() for p in layer.parameters()] == places


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_tied_memory_of_a_file_stays_tied(first):
    layer, tied = module("cpu"), torch.nn.Linear(K, N)
    tied.weight.data = layer.weight2.data
    layer, tied = _saved((layer, tied)) if first else reversed(_saved((tied, layer)))
    _called(layer)
    with torch.no_grad():
        tied.weight.fill_(7)
    assert (layer.weight2 == 7).all()
    assert joined(layer) is None
    assert joined(layer, "bias") is not None


def test_odd_sizes_and_weights_in_fp8_stay_apart():
    odd = GroupedLinear(E, 5, 3, device="cpu", use_grouped_tensor=True)
    assert joined(odd) is None
    assert odd(torch.ones(4, 5), torch.tensor([1, 1, 1, 1])).shape == (4, 3)
    with quantized_model_init(recipe=RECIPES["current"]):
        held = GroupedLinear(E, K, N, device="cpu")
    assert "weight" not in held._stacks._known
    assert joined(GroupedLinear(E, K, N, device="cpu", single_grouped_bias=True)) is not None


@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, lr=0.5), torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_optimizers_update_in_place(place, kind):
    made = []
    for layer in (module(place), apart(module(place))):
        optimizer = kind(layer.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            found = step(layer, RECIPES["current"])
            optimizer.step()
        made.append(found | {name: p.detach() for name, p in layer.named_parameters()})
    assert_same(*made)


def test_gradients_add_up_and_frozen_members_have_none(place):
    made = []
    for layer in (module(place), apart(module(place))):
        layer.weight2.requires_grad_(False)
        step(layer)
        made.append(step(layer))
        assert layer.weight2.grad is None
    assert_same(*made)


def test_a_weight_that_backward_does_not_read_may_change():
    layer = module("cpu")
    y = layer(torch.randn(8, K), torch.tensor([2, 2, 2, 2]))
    with torch.no_grad():
        layer.weight3.add_(1)
    y.sum().backward()
    assert layer.weight3.grad is not None


def test_tied_members_and_parts_of_a_buffer_stay_where_they_are():
    tied = module("cpu")
    tied.weight1 = tied.weight0
    tied = tied.to(torch.bfloat16)
    assert joined(tied) is None
    flat = torch.zeros(E, N, K)
    parts = module("cpu")
    for weight, part in zip(named(parts, "weight"), flat, strict=True):
        weight.data = part
    flat, parts = _saved((flat, parts))
    flat.fill_(2)
    assert all((weight == 2).all() for weight in named(parts, "weight"))


def test_a_weight_changed_between_the_passes_is_refused():
    layer = module("cpu")
    x = torch.randn(8, K, requires_grad=True)
    y = layer(x, torch.tensor([2, 2, 2, 2]))
    with torch.no_grad():
        layer.weight3.add_(1)
    with pytest.raises(AutogradError, match="weight3: got a weight changed in place"):
        y.sum().backward()
    assert x.grad is None


def test_recomputed_and_called_on_other_parameters():
    layer, sizes = module("cpu"), torch.tensor(SIZES)
    want = step(layer, RECIPES["current"])
    layer.zero_grad()
    for reentrant in (False, True):  # backward is without the autocast
        layer.zero_grad()
        again = partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=reentrant)
        assert_same(step(layer, RECIPES["current"], call=again), want)
    x, twice = torch.randn(sum(SIZES), K), {name: 2 * p.detach() for name, p in layer.named_parameters()}
    assert_same_bits(
        "y",
        *(
            y.detach().numpy()
            for y in (torch.func.functional_call(layer, twice, (x, sizes)), 2 * layer(x, sizes))
        ),
    )


@pytest.mark.parametrize("recipe", ["plain", "current"])
def test_in_data_parallel_wrappers(one_process, recipe):
    want = step(module("cpu"), RECIPES[recipe])
    layer = module("cpu")
    ddp = DistributedDataParallel(layer)
    assert_same(step(layer, RECIPES[recipe], call=ddp), want)
    assert joined(layer) is not None
    sharded = module("cpu")
    memory = sharded._stacks._known["weight"].memory
    fully_shard(sharded)
    gc.collect()
    assert memory.expired()
    assert_same(step(sharded, RECIPES[recipe], where="cpu"), want)


def test_the_notes_of_copies_are_their_own():
    layer = module("cpu")
    assert copy.copy(layer)._stacks is layer._stacks
    assert isinstance(copy.deepcopy(layer)._stacks, side_by_side.Stacks)
    assert copy.deepcopy(layer)._stacks is not layer._stacks
