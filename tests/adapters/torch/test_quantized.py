"""Weights that are held in FP8: the bits of casting them at each step, values to everything else, updates
through float32 masters."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.module import _say_plain
from fp8kit_torch.stateful import _say_replaced

import fp8kit as fk
from fp8kit.errors import ArgumentError, FormatError, RecipeError, ShapeError, UnsupportedError
from fp8kit.formats import E4M3
from tests.support.tensors import assert_tensor_close

from .twins import HELD_SIZES, RECIPES, WIDTH, batches, held_pair, same, torch_step

SCALED = ["delayed", "current", "block"]


def held_names(module):
    return [
        name for name, parameter in module.named_parameters() if isinstance(parameter, ft.QuantizedTensor)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("kind", HELD_SIZES)
def test_the_bits_of_casting_at_each_step(device, kind, recipe, dtype):
    held, plain = held_pair(kind, device, recipe, dtype)
    assert len(held_names(held)) == len(held.gemms)
    for x in batches(device, str(dtype).removeprefix("torch.")):
        y, dx, grads, g = torch_step(plain, plain, RECIPES[recipe], x)
        y2, dx2, grads2, _ = torch_step(held, held, RECIPES[recipe], x, g)
        same(y2, y, "y")
        same(dx2, dx, "dx")
        for name, grad in grads.items():
            same(grads2[name], grad, name)


@pytest.mark.parametrize("init", [None, "dequantized"])
@pytest.mark.parametrize("name", SCALED)
def test_backward_on_values(device, name, init):
    """dgrad multiplies the held weight's values, wgrad those of x that is in FP8 already, by the output
    gradient as it is; in high precision there is no weight."""
    how = replace(RECIPES[name], backward_override="dequantized")
    with ft.quantized_model_init(recipe=replace(how, backward_override=init)):
        first, held = (ft.Linear(WIDTH, n, bias=False, device=device) for n in (WIDTH, 40))
    x = torch.randn(24, WIDTH, device=device, requires_grad=True)
    with ft.autocast(recipe=how):
        between = first(x, fp8_output=True)
        y = held(between)
    g = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (between, held.weight), g)
    values = between.dequantize().double()
    weight, wide = held.weight.dequantize().double(), g.double()
    # sums of at most 64 terms of some 1e-2 to 10, by products that a GPU may make of TF32's 11 bits
    slack = {"cpu": 64 * 2.0**-24, "cuda": 2.0**-10}[device]
    assert_tensor_close("dx", dx, wide @ weight, slack * (wide.abs() @ weight.abs()))
    assert_tensor_close("dw", dw, wide.T @ values, slack * (wide.abs().T @ values.abs()))
    with (
        pytest.raises(UnsupportedError, match="Linear: recipe: got dgrad in high precision"),
        ft.autocast(recipe=replace(how, backward_override="high_precision")),
    ):
        held(x)


@pytest.mark.parametrize("recipe", SCALED)
def test_values_are_those_of_quantize(device, recipe):
    held, plain = held_pair("Linear", device, recipe)
    scaling = "block_128x128" if recipe == "block" else "tensor"
    wanted = fk.quantize(plain.weight.detach().cpu().numpy(), E4M3, scaling=scaling).dequantize()
    same(held.weight.dequantize(), torch.from_numpy(wanted), "values")
    # in high precision; a GPU may round its inputs to TF32's 11 bits
    product = held(torch.eye(WIDTH, device=device))
    want = held.weight.dequantize().t()
    assert_tensor_close("product", product, want, 2.0**-10 * want.abs())
    y = held(torch.randn(4, WIDTH, device=device))
    y.sum().backward()
    assert type(held.weight.grad) is torch.Tensor


def test_delayed_scaling_keeps_its_state(device):
    held, plain = held_pair("Linear", device, "delayed")
    for x in batches(device):
        torch_step(held, held, RECIPES["delayed"], x)
        torch_step(plain, plain, RECIPES["delayed"], x)
    for name, slot in (("scaling_fwd", 0), ("scaling_bwd", 0)):
        ours, other = held.fp8_meta[name], plain.fp8_meta[name]
        if name == "scaling_fwd":
            same(ours.scale[slot], other.scale[slot], name)
        assert ours.scale[slot] != 1
    assert held.fp8_meta["scaling_fwd"].scale[1] == 1  # the weight's scale is its own


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "torch"])
def test_training(device, recipe, optimizer):
    held, plain = held_pair("LayerNormMLP", device, recipe)

    def made(module):
        if optimizer == "adam":
            return ft.optimizers.FusedAdam(
                module.parameters(), lr=1e-2, weight_decay=0.1, master_weights=True
            )
        if optimizer == "sgd":
            return ft.optimizers.FusedSGD(module.parameters(), lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(module.parameters(), lr=1e-2)

    ours, other = made(held), made(plain)
    if optimizer == "adam":
        for name in held_names(held):
            weight = held.get_parameter(name)
            ours.initialize_state(weight)
            ours.set_scaled_state(weight, "master_param", weight.get_high_precision_init_val().to(device))
            weight.clear_high_precision_init_val()
            assert weight.get_high_precision_init_val() is weight._high_precision_init_val is None
    before = held.fc1_weight.dequantize()
    pointer = held.fc1_weight._parts["w_q"].data_ptr()
    for x in batches(device, steps=4):
        y, _, _, g = torch_step(plain, plain, RECIPES[recipe], x)
        y2, _, _, _ = torch_step(held, held, RECIPES[recipe], x, g)
        if optimizer == "adam":
            same(y2, y, "y")
        # the weight itself is rounded at each step: E4M3's step is 2^-3 of a value, far more than what is
        # lost
        else:
            assert (y2 - y).norm() < 2.0**-3 * y.norm()
        for one in (ours, other):
            one.step()
    assert pointer == held.fc1_weight._parts["w_q"].data_ptr()  # in place, as a captured graph wants
    assert not torch.equal(before, held.fc1_weight.dequantize())
    if optimizer == "adam":
        master = ours.get_unscaled_state(held.fc1_weight, "master_param")
        same(master, plain.fc1_weight, "master")
        again = made(held)
        again.load_state_dict(ours.state_dict())
        same(again.get_unscaled_state(held.fc1_weight, "master_param"), master, "loaded")


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_torchs_optimisers_write_lists_alike(device, kind):
    """``foreach`` and ``fused`` write a list of parameters in one operation; a value may round to the
    neighbouring code of E4M3."""
    results = []
    held, _ = held_pair("LayerNormMLP", device, "current")
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        layer = copy.deepcopy(held)
        opt = getattr(torch.optim, kind)(layer.parameters(), lr=0.1, **options)
        torch.manual_seed(3)
        torch_step(layer, layer, RECIPES["current"], torch.randn(8, WIDTH, device=device))
        opt.step()
        assert len(held_names(layer)) == 2
        results.append(
            [p.dequantize() if isinstance(p, ft.QuantizedTensor) else p.detach() for p in layer.parameters()]
        )
    for i, start in enumerate(held.parameters()):
        assert not torch.equal(results[0][i], start.detach())
        for other in results[1:]:
            assert_tensor_close(f"{i}", other[i], results[0][i], 2.0**-3 * results[0][i].abs() + 0.01)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_values_in_another_dtype_and_other_values(device, recipe):
    """Decoded to float32 nothing is rounded: the codes times 2^-k of the block's or the tensor's scale, as
    ``quantize`` has them."""
    held, _ = held_pair("Linear", device, recipe, torch.bfloat16)
    weight = held.weight
    exact = weight.dequantize(dtype=torch.float32)
    codes, inverse = weight.side(False)
    if recipe == "current":
        n, k = weight.shape
        same(exact, codes[:n, :k].view(torch.float8_e4m3fn).float() * inverse, "values")
    same(exact.bfloat16(), weight.dequantize(), "rounded once")
    (exact * 2).sum().backward()
    same(weight.grad, torch.full_like(weight.grad, 2), "gradient")
    assert weight.grad.dtype is torch.bfloat16
    values = torch.randn(weight.shape, device=device)
    assert weight.quantize_(values) is weight
    same(
        weight.dequantize(dtype=torch.float32),
        ft.quantized.OperandTensor.of(values, weight._fp8).dequantize(),
        "cast anew",
    )
    before = weight.side(False)[0].clone()
    for error, call in (
        (ArgumentError, lambda: weight.dequantize(dtype=torch.int8)),
        (ShapeError, lambda: weight.quantize_(values[1:])),
        (ArgumentError, lambda: weight.quantize_(3)),
        (FormatError, lambda: weight.quantize_(values.to_sparse())),
        (ArgumentError, lambda: weight.quantize_(values, noop_flag=values)),
    ):
        with pytest.raises(error):
            call()
    same(weight.side(False)[0], before, "codes")


def test_averages_of_weights_are_written(device):
    """torch's averaged models use ``torch._foreach_lerp_``."""
    held, _ = held_pair("Linear", device, "current")
    average = torch.optim.swa_utils.AveragedModel(
        held, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    start = held.weight.dequantize().detach().clone()
    average.update_parameters(held)
    with torch.no_grad():
        held.weight.mul_(3)
    average.update_parameters(held)
    same(
        average.module.weight.dequantize(),
        ft.quantized.OperandTensor.of(2 * start, held.weight._fp8).dequantize(),
        "average",
    )


def test_a_move_that_fails_changes_nothing(device):
    held, _ = held_pair("Linear", device, "current")
    before, names = held.weight, list(held._parameters)

    def full(tensor):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        held._apply(full)
    assert held.weight is before
    assert list(held._parameters) == names


def test_saved_copied_and_moved(device):
    held, _ = held_pair("LayerNormLinear", device, "current")
    file = io.BytesIO()
    torch.save(held.state_dict(), file)
    file.seek(0)
    other, plain = held_pair("LayerNormLinear", device, "current")
    assert not torch.equal(other.weight.dequantize(), held.weight.dequantize())
    other.load_state_dict(torch.load(file))
    plain.load_state_dict(held.state_dict())
    for weight in (other.weight, copy.deepcopy(held).weight, plain.weight):
        same(weight.dequantize(), held.weight.dequantize(), "weight")
        assert isinstance(weight, torch.nn.Parameter)
    kept = held.weight
    codes = kept._parts["w_q"].clone()
    names = [name for name, _ in held.named_parameters()]
    held.to(torch.bfloat16)
    assert held.weight is kept
    assert held.weight.dtype is torch.bfloat16
    assert [name for name, _ in held.named_parameters()] == names
    same(held.weight._parts["w_q"], codes, "codes")
    x = torch.randn(4, WIDTH, device=device, dtype=torch.bfloat16)
    with ft.autocast(recipe=RECIPES["current"]):
        held(x).sum().backward()
    assert held.weight.grad.dtype is torch.bfloat16
    with torch.no_grad():
        held.weight.mul_(2)
        # the codes stay; their values are rounded to bfloat16 before and after, by 2^-8 each
        want = 2 * other.weight.dequantize()
        assert_tensor_close("doubled", held.weight.dequantize().float(), want, 2.0**-7 * want.abs())
        held.weight.zero_()
    assert not held.weight.dequantize().any()


def test_in_inference_mode(device):
    """It is saved, loaded, copied and viewed there, made outside or within, and trains on afterwards."""
    held, _ = held_pair("LayerNormLinear", device, "current")
    with torch.inference_mode():
        within, _ = held_pair("LayerNormLinear", device, "current")
        for layer in (held, within):
            state = layer.state_dict()
            same(state["weight"].dequantize(), layer.weight.dequantize(), "weight")
            same(layer.weight.view(-1), layer.weight.dequantize().view(-1), "view")
            copied = copy.deepcopy(layer)
            copied.load_state_dict(state)
            same(copied.weight.data.dequantize(), layer.weight.detach().dequantize(), "copy")
    assert not held.weight.detach().is_inference()
    x = torch.randn(4, WIDTH, device=device)
    with ft.autocast(recipe=RECIPES["current"]):
        held(x).sum().backward()
    assert held.weight.grad is not None


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_under_torchs_autocast(device, recipe):
    held, plain = held_pair("LayerNormLinear", device, recipe)
    for x in batches(device, steps=2):
        g = torch.randn(*x.shape[:-1], 40, device=device).bfloat16()
        found = []
        for module in (plain, held):
            module.zero_grad()
            with torch.autocast(device, torch.bfloat16), ft.autocast(recipe=RECIPES[recipe]):
                y = module(x)
            y.backward(g)
            found.append((y, *(p.grad for p in module.parameters())))
        # casting the weight from bfloat16 instead of float32 moves a code where the two round differently, by
        # a step of 2^-3
        for got, want in zip(found[1], found[0], strict=True):
            assert got.dtype is want.dtype
            assert (got.float() - want.float()).norm() < 2.0**-5 * want.float().norm()


@pytest.mark.parametrize("init", ["current", "delayed"])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_recipes_of_one_format_may_differ(device, init, recipe):
    """A weight's scale is its own, so what quantized_model_init was told and what the autocast says need the
    same format alone."""
    with ft.quantized_model_init(recipe=RECIPES[init], preserve_high_precision_init_val=True):
        held = ft.Linear(WIDTH, 40, device=device)
    with ft.quantized_model_init(recipe=RECIPES[recipe]):
        other = ft.Linear(WIDTH, 40, device=device)
    other.load_state_dict({"weight": held.weight.get_high_precision_init_val(), "bias": held.bias})
    for x in batches(device):
        y, dx, grads, g = torch_step(other, other, RECIPES[recipe], x)
        y2, dx2, grads2, _ = torch_step(held, held, RECIPES[recipe], x, g)
        for got, want in ((y2, y), (dx2, dx), (grads2["weight"], grads["weight"])):
            same(got, want, "result")


def test_on_the_meta_device_and_back(device):
    """There a layer is as one that was made there: its weights are plain until ``reset_parameters``."""
    held, _ = held_pair("Linear", device, "current")
    held.to("meta", torch.bfloat16)
    assert not held_names(held)
    assert {(p.device.type, p.dtype, p.requires_grad) for p in held.parameters()} == {
        ("meta", torch.bfloat16, True)
    }
    held.to_empty(device=device)
    held.reset_parameters()
    assert held_names(held) == ["weight"]
    with ft.autocast(recipe=RECIPES["current"]):
        held(torch.ones(4, WIDTH, device=device, dtype=torch.bfloat16)).sum().backward()


def test_made_later(device):
    with ft.quantized_model_init(recipe=RECIPES["current"], preserve_high_precision_init_val=True):
        layer = ft.Linear(WIDTH, 40, device="meta")
        with ft.quantized_model_init(enabled=False):
            usual = ft.Linear(WIDTH, 40, device=device)
    assert not held_names(usual)
    layer.reset_parameters()
    assert held_names(layer) == ["weight"]
    first = layer.weight.get_high_precision_init_val()
    layer.reset_parameters()
    assert held_names(layer) == ["weight"]
    assert not torch.equal(first, layer.weight.get_high_precision_init_val())


def loaded_pair(preserve=False, kind=ft.LayerNormMLP, sizes=(WIDTH, 64), **options):
    """A layer on the meta device that is to hold its weights, and the state of a plain one."""
    with ft.quantized_model_init(recipe=RECIPES["current"], preserve_high_precision_init_val=preserve):
        held = kind(*sizes, device="meta", **options)
    return held, kind(*sizes, device="cpu", **options)


def decoded(tensor):
    return tensor.dequantize() if isinstance(tensor, ft.QuantizedTensor) else tensor


def assert_holds(held, plain):
    """That ``held`` is as a layer that was made on the CPU and got these values."""
    with ft.quantized_model_init(recipe=RECIPES["current"]):
        wanted = copy.deepcopy(held).to("meta").to_empty(device="cpu")
    wanted.reset_parameters()
    wanted.load_state_dict(plain.state_dict())
    assert held_names(held) == held_names(wanted) != []
    for parameter, other in zip(held.parameters(), wanted.parameters(), strict=True):
        same(decoded(parameter), decoded(other), "values")


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("way", ["assign", "setattr", "to_empty"])
def test_values_that_take_the_place_of_meta_weights_are_held(way, preserve):
    held, plain = loaded_pair(preserve)
    if way == "setattr":  # as transformers loads
        for name, parameter in plain.named_parameters():
            given = torch.nn.Parameter(parameter.detach().clone())
            given.mark = name
            setattr(held, name, given)
        assert held.fc1_weight.mark == "fc1_weight"
    else:
        if way == "to_empty":
            held.to_empty(device="cpu")
        held.load_state_dict(plain.state_dict(), assign=way == "assign")
    assert_holds(held, plain)
    if preserve:
        for name in held_names(held):
            same(getattr(held, name).get_high_precision_init_val(), getattr(plain, name), "kept")


def test_values_written_after_to_empty_are_held():
    held, plain = loaded_pair()
    held.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(held.parameters(), plain.parameters(), strict=True):
            parameter.copy_(value)
    assert_holds(held, plain)


def test_assigned_values_are_held_where_there_was_memory(device):
    held, plain = held_pair("Linear", device, "current")
    wanted = copy.deepcopy(held)
    wanted.load_state_dict(plain.state_dict())
    held.load_state_dict(plain.state_dict(), assign=True)
    assert held_names(held) == ["weight"]
    same(held.weight.dequantize(), wanted.weight.dequantize(), "values")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("single", [("weight",), ("weight", "bias")])
def test_one_parameter_of_all_groups_is_held(single, assign):
    options = {f"single_grouped_{name}": True for name in single}
    held, plain = loaded_pair(kind=ft.GroupedLinear, sizes=(2, WIDTH, 64), **options)
    if not assign:
        held.to_empty(device="cpu")
    held.load_state_dict(plain.state_dict(), assign=assign)
    assert_holds(held, plain)


def test_weights_that_were_put_there_past_torch(caplog):
    """accelerate writes to the mapping of the parameters."""
    _say_plain.cache_clear()
    held, plain = loaded_pair(kind=ft.Linear, sizes=(WIDTH, 40))
    for name, parameter in plain.named_parameters():
        held._parameters[name] = torch.nn.Parameter(parameter.detach().clone())
    x = torch.randn(4, WIDTH)
    with pytest.raises(NotImplementedError, match=r"cast by model.load_state_dict\(model.state_dict"):
        held(x)
    with torch.no_grad(), ft.autocast(recipe=RECIPES["current"]):
        given = held(x)
    assert "it casts them in each pass" in caplog.text
    assert not held_names(held)
    held.load_state_dict(held.state_dict())
    assert_holds(held, plain)
    with torch.no_grad(), ft.autocast(recipe=RECIPES["current"]):
        same(held(x), given, "result")


def test_a_state_dicts_tensors_have_their_values_memory(device):
    held, _ = held_pair("Linear", device, "current")
    state = held.state_dict()["weight"]
    assert state.data_ptr() == 0  # torch.distributed.checkpoint copies codes then
    memory = state.untyped_storage()
    assert state.data_ptr() == memory.data_ptr() != 0
    assert state.to("cpu", copy=True).data_ptr() != 0
    assert memory.nbytes() == state.numel() * state.element_size()
    assert held.weight.data_ptr() == 0  # a parameter has codes only
    values = torch.empty(0, dtype=state.dtype, device=device).set_(memory).view(state.shape)
    same(values, state.dequantize(), "memory")
    with torch.no_grad():
        held.weight.mul_(2)
    values = torch.empty(0, dtype=state.dtype, device=device).set_(state.untyped_storage())
    same(values.view(state.shape), held.weight.dequantize(), "memory after a write")


def test_a_transformer_layer_trains(device):
    with ft.fp8_model_init(recipe=RECIPES["current"]):
        layer = ft.TransformerLayer(
            WIDTH, 64, 4, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0, device=device
        )
    assert len(held_names(layer)) == 4
    optimizer = ft.optimizers.FusedAdam(layer.parameters(), lr=3e-3, master_weights=True)
    x, target = torch.randn(6, 2, WIDTH, device=device), torch.randn(6, 2, WIDTH, device=device)
    losses = []
    for _ in range(12):
        with ft.autocast(recipe=RECIPES["current"]):
            y = ft.checkpoint(layer, x, use_reentrant=False)
        loss = (y - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_masters_start_at_the_codes_values(device):
    """In float32, not rounded to the weight's dtype."""
    with ft.quantized_model_init(recipe=RECIPES["current"]):
        layer = ft.Linear(WIDTH, WIDTH, bias=False, device=device, params_dtype=torch.bfloat16)
    optimizer = ft.optimizers.FusedAdam(layer.parameters(), lr=0.0, master_weights=True)
    values, codes = layer.weight.detach().float(), layer.weight._data.clone()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert torch.equal(optimizer.get_unscaled_state(layer.weight, "master_param"), values)
    assert torch.equal(layer.weight._data, codes)


def test_what_does_not_fit_says_so(device):
    held, _ = held_pair("Linear", device, "current")
    x = torch.randn(4, WIDTH, device=device)
    with (
        ft.autocast(recipe=RECIPES["block"]),
        pytest.raises(RecipeError, match=r"Linear: weight: got FP8 as \('E4M3', 'tensor'\)"),
    ):
        held(x)
    with pytest.raises(RecipeError, match="recipe"), ft.quantized_model_init(recipe=3):
        pass
    with ft.quantized_model_init():
        for make in (
            lambda: ft.TransformerLayer(WIDTH, 64, 4, device=device),
            lambda: ft.Linear(WIDTH, 40, parameters_split=("a", "b"), device=device),
        ):
            with pytest.raises(
                NotImplementedError, match=r"\d weights for 1 products in .*, expected one a product"
            ):
                make()
    held.weight = torch.nn.Parameter(torch.zeros(40, WIDTH, device=device))  # as fully_shard does
    with pytest.raises(
        NotImplementedError,
        match=r"Linear: weight0: got a Parameter, expected the QuantizedTensor .* fully_shard",
    ):
        held(x)


def test_compiled_it_says_so(device):
    held, _ = held_pair("Linear", device, "current")
    x = torch.randn(4, WIDTH, device=device)
    with pytest.raises(Exception, match="a weight of quantized_model_init is not supported within"):
        torch.compile(held, fullgraph=True, backend="aot_eager")(x)


def test_weights_that_others_have_are_replaced_aloud(caplog):
    """A tied layer, an optimiser; what no parameter of the layer's own stands for is left alone."""
    _say_replaced.cache_clear()
    held, _ = held_pair("Linear", "cpu", "current")
    held.weight = torch.nn.Parameter(torch.zeros_like(held.weight.dequantize()))
    held.load_state_dict(held.state_dict())
    assert isinstance(held.weight, ft.QuantizedTensor)
    assert "an optimiser or a tied layer" in caplog.text
    weight = held.weight.dequantize()
    del held.weight
    held.to("cpu")
    held.weight = weight
    held.to("cpu")
    assert held.weight is weight
    del held.weight


def test_memory_of_the_values_follows_their_dtype():
    held, _ = held_pair("Linear", "cpu", "current")
    state = held.state_dict()["weight"]
    before = state.untyped_storage().nbytes()
    state.data = state.to_dtype(torch.bfloat16)
    assert state.dtype == torch.bfloat16
    assert state.untyped_storage().nbytes() == before // 2
