"""Experts whose weights ``quantized_model_init`` holds in FP8, with sizes on the device: what layers compute
that cast the same weights at each call."""

from __future__ import annotations

import copy
from dataclasses import replace

import fp8kit_torch as ft
import pytest
import torch

import fp8kit as fk
from fp8kit.errors import RecipeError, UnsupportedError
from fp8kit.quantization import Quantization, Quantizer
from fp8kit.recipe import (
    DataRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from tests.support.combinations import combinations

E, ROWS = 3, 40
CURRENT = Float8CurrentScaling().quantization
TWO_WAYS = replace(CURRENT, dgrad=replace(CURRENT.dgrad, a=Quantizer(fk.E4M3), b=Quantizer(fk.E5M2)))
ROW = DataRecipe(Quantization.of(*(Quantizer(fmt, "row") for fmt in (fk.E4M3, fk.E4M3, fk.E5M2))), "rows")
RECIPES = {"current": Float8CurrentScaling(), "block": Float8BlockScaling(), "row": ROW}
ONE = {"single_grouped_weight": True}
SIZES = torch.tensor([7, 0, 20])  # and rows of no group


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    return request.param


def twins(place, recipe, kind=ft.GroupedLinear, features=(48, 64), **options):
    """A layer, and one with the same weights, held in FP8."""
    torch.manual_seed(0)
    made = {"params_dtype": torch.bfloat16, "device": place, "use_grouped_tensor": True, **options}
    plain = kind(E, *features, **made)
    with ft.quantized_model_init(recipe=recipe):
        held = kind(E, *features, **made)
    held.load_state_dict(plain.state_dict())
    return plain, held


def step(layer, recipe, first=None, seed=1):
    """y, and all gradients."""
    torch.manual_seed(seed)
    own = next(layer.parameters())
    features = layer.hidden_size if isinstance(layer, ft.GroupedMLP) else layer.in_features
    x = torch.randn(ROWS, features).to(own.device, torch.bfloat16).requires_grad_()
    with ft.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, SIZES.to(own.device), is_first_microbatch=first)
    y.backward(torch.randn(y.shape).to(y))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def same(got, want):
    assert len(got) == len(want)
    assert [i for i, pair in enumerate(zip(got, want, strict=True)) if not torch.equal(*pair)] == []


WAYS = [(recipe, options) for recipe in RECIPES for options in ({}, ONE)]


@combinations(
    {
        "features": [(48, 64), (40, 24), (256, 128)],
        "recipe": RECIPES.keys(),
        "options": {"several": {}, "one": ONE},
    }
)
def test_the_same_bits_as_weights_that_are_cast(place, recipe, features, options):
    plain, held = twins(place, RECIPES[recipe], features=features, **options)
    assert isinstance(next(iter(held.main_parameters())), ft.QuantizedTensor)
    for first in (None, True, False):
        made = step(held, RECIPES[recipe], first)
        same(made, step(plain, RECIPES[recipe], first))
        assert len(made) == 2 + (1 if options else E) + E


@pytest.mark.parametrize("options", [{}, ONE], ids=["several", "one"])
def test_experts_with_two_products(place, options):
    same(*(step(m, RECIPES["current"]) for m in twins(place, RECIPES["current"], ft.GroupedMLP, **options)))


@pytest.mark.parametrize("options", [{}, ONE], ids=["several", "one"])
def test_in_high_precision_they_are_their_values(place, options):
    plain, held = twins(place, RECIPES["current"], **options)
    with torch.no_grad():
        for to, weight in zip(plain.main_parameters(), held.main_parameters(), strict=True):
            to.copy_(weight.dequantize())
    same(step(held, None), step(plain, None))


@pytest.mark.parametrize("options", [{}, ONE], ids=["several", "one"])
def test_under_torchs_autocast(place, options):
    """Weights of layers in float32 are multiplied as those are of layers in bfloat16."""
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        _, held = twins(place, RECIPES["current"], params_dtype=dtype, **options)
        with torch.no_grad():
            for weight in held.main_parameters():
                weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape).bfloat16())
        with torch.autocast(torch.device(place).type, torch.bfloat16):
            made.append(step(held, RECIPES["current"]))
    same([t.bfloat16() for t in made[0]], made[1])


@pytest.mark.parametrize("options", [{}, ONE], ids=["several", "one"])
def test_what_is_written_to_a_weight_counts_at_the_next_call(place, options):
    """Also for a later micro-batch, since nothing is cast; codes that are written are noticed."""
    plain, held = twins(place, RECIPES["current"], **options)
    step(held, RECIPES["current"], True)
    with torch.no_grad():
        for layer in (plain, held):
            layer.zero_grad()
            for weight in layer.main_parameters():
                weight.mul_(-2)
    same(step(held, RECIPES["current"], False), step(plain, RECIPES["current"]))
    codes = held.main_parameters()[0]._rowwise_data
    held.zero_grad()
    codes.zero_()
    y, dx, *_ = step(held, RECIPES["current"])
    assert not y[: SIZES[0]].any()
    assert not dx[: SIZES[0]].any()


@pytest.mark.parametrize(("recipe", "options"), WAYS)
def test_gradients_into_main_grad(place, recipe, options):
    made = []
    for layer in twins(place, RECIPES[recipe], fuse_wgrad_accumulation=True, **options):
        for weight in layer.main_parameters():
            weight.main_grad = torch.ones(weight.shape, device=place)
        step(layer, RECIPES[recipe])
        made.append([weight.main_grad for weight in layer.main_parameters()])
    assert (made[0][0] != 1).any()
    same(*made)


@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}])
def test_an_input_in_fp8_is_its_values(place, options):
    """As ``fp8_output`` of a layer before gives it."""
    first = ft.Linear(48, 48, params_dtype=torch.bfloat16, device=place)
    for layer in twins(place, RECIPES["current"], **options):
        made = []
        for weight in layer.main_parameters():
            weight.main_grad = torch.zeros(weight.shape, device=place)
        for plain in (False, True):
            x = torch.ones(ROWS, 48, dtype=torch.bfloat16, device=place)
            with ft.autocast(recipe=RECIPES["current"]):
                hidden = first(x, fp8_output=True)
                assert isinstance(hidden, ft.QuantizedTensor)
                y = layer(hidden.dequantize() if plain else hidden, SIZES.to(place))
            first.zero_grad()
            y.sum().backward()
            made.append([y.detach(), first.weight.grad])
        same(*made)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, ONE], ids=["several", "one"])
def test_checkpoints(place, options, reentrant):
    _, held = twins(place, RECIPES["current"], **options)
    again = copy.deepcopy(held)
    forward = again.forward

    def call(*given, **named):
        named.pop("is_first_microbatch")
        return torch.utils.checkpoint.checkpoint(forward, *given, use_reentrant=reentrant)

    again.forward = call
    same(step(again, RECIPES["current"]), step(held, RECIPES["current"]))


def test_sharing_the_optimizers_weights(place):
    """Steps of an optimizer with float32 masters, which casts its weights anew."""
    made = []
    for layer in twins(place, RECIPES["current"], **ONE):
        optimizer = ft.optimizers.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True)
        for _ in range(2):
            optimizer.zero_grad()
            step(layer, RECIPES["current"])
            optimizer.step()
        made.append(step(layer, RECIPES["current"])[:1])
    assert (made[0][0] - made[1][0]).abs().max() <= 0.1 * made[0][0].abs().max()


@pytest.mark.parametrize("options", [{}, ONE], ids=["several", "one"])
def test_refusals(options):
    _, held = twins("cpu", RECIPES["current"], **options)
    for error, recipe in (
        (RecipeError, RECIPES["block"]),
        (UnsupportedError, DelayedScaling()),
        (UnsupportedError, MXFP8BlockScaling()),
        (UnsupportedError, Float8CurrentScaling(backward_override="high_precision")),
        (UnsupportedError, DataRecipe(TWO_WAYS, "two ways to cast a weight")),
    ):
        with pytest.raises(error):
            step(held, recipe)
    _, mlp = twins("cpu", RECIPES["current"], ft.GroupedMLP, **options)
    rules = (("mlp.fc2", RECIPES["block"]),)
    mlp.fc1.name, mlp.fc2.name = "mlp.fc1", "mlp.fc2"
    for sizes in (SIZES, [20, 10, 10]):
        mlp.fc1.sizes_on_device = mlp.fc2.sizes_on_device = sizes is SIZES
        with ft.autocast(recipe=fk.recipe.PerLayer(RECIPES["current"], rules)), pytest.raises(RecipeError):
            mlp(torch.randn(ROWS, 48, dtype=torch.bfloat16), sizes)
    if not options:
        held.weight1 = torch.nn.Parameter(torch.ones(64, 48, dtype=torch.bfloat16))
        with pytest.raises(UnsupportedError, match="weight1: got a Parameter"):
            step(held, RECIPES["current"])


def test_compiled_they_are_left_to_eager_code():
    plain, held = twins("cpu", RECIPES["current"])
    x = torch.randn(ROWS, 48, dtype=torch.bfloat16)
    call = torch.compile(held, backend="aot_eager")
    with ft.autocast(recipe=RECIPES["current"]), torch.no_grad():
        assert torch.equal(call(x, SIZES), plain(x, SIZES))
        torch._dynamo.reset()
        with pytest.raises(Exception, match="quantized_model_init is not supported within"):
            torch.compile(held, backend="aot_eager", fullgraph=True)(x, SIZES)
