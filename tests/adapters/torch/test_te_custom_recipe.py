"""CustomRecipe with Transformer Engine's quantizers as answers."""

from __future__ import annotations

import copy
import pickle

import fp8kit_torch as te
import pytest
import torch
from fp8kit_torch.te_compat import custom_recipes as factories

from fp8kit.errors import ArgumentError, RecipeError, UnsupportedError
from fp8kit.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2


def results(recipe, steps=1, kind=te.Linear):
    """Outputs, gradients and scales of a few steps."""
    torch.manual_seed(0)
    layer, found = kind(128, 128, device=torch.get_default_device()), []
    for seed in range(steps):
        torch.manual_seed(seed)
        x = torch.randn(128, 128, requires_grad=True)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad]
    found += [p.grad for p in layer.parameters()]
    return found + [part for state in layer.fp8_meta.values() for part in state.parts]


def same(recipe, wanted, **options):
    pairs = zip(results(recipe, **options), results(wanted, **options), strict=True)
    assert [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)] == []


@pytest.mark.parametrize(
    ("factory", "recipe"),
    [
        (factories.current_scaling_factory, te.Float8CurrentScaling()),
        (factories.float8_block_scaling_factory, te.Float8BlockScaling()),
        (factories.mxfp8_factory, MXFP8BlockScaling()),
        (factories.nvfp4_factory, NVFP4BlockScaling()),
        (factories.high_precision_factory, None),
    ],
)
def test_factories_give_what_the_recipes_give(factory, recipe):
    same(CustomRecipe(qfactory=factory), recipe)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("hybrid", [False, True])
def test_requests_share_delayed_scalings_state(hybrid):
    """Products are summed otherwise than DelayedScaling's: a CustomRecipe's are split, as TE's."""
    request = te.DelayedScalingRequest(amax_history_len=2)
    if hybrid:
        request = te.HybridQuantizer(rowwise_quantizer=request, columnwise_quantizer=request)
    recipe = CustomRecipe(
        lambda role: request, accumulation=lambda gemm: "fast" if gemm == "fprop" else "split"
    )
    same(recipe, te.DelayedScaling(amax_history_len=2), steps=3)


def test_requests_of_a_layer_are_alike():
    def factory(role):
        return te.DelayedScalingRequest(amax_history_len=2 if role.tensor_type == "input" else 3)

    with pytest.raises(RecipeError, match="history"):
        results(CustomRecipe(factory))


def test_a_function_reads_the_role_as_transformer_engine_has_it():
    seen = set()

    def factory(role):
        seen.add((role.module_type, role.tensor_type, role.name))
        return te.IdentityQuantizer()

    with te.autocast(recipe=CustomRecipe(factory)):
        te.LayerNormMLP(32, 32, device="cpu", name="mlp")(torch.ones(16, 32))
        te.GroupedLinear(1, 32, 32, device="cpu")(torch.ones(16, 32), [16])
    assert seen == {
        (kind, operand, name)
        for kind, name in (("linear", "mlp"), ("grouped_linear", ""))
        for operand in ("input", "weight", "grad_output")
    }


def test_a_hybrid_is_one_format_forward_and_another_backward():
    """fprop as MXFP8, both products of backward in high precision: y is MXFP8's, gradients are those of plain
    products."""
    rows = te.MXFP8Quantizer(E4M3)

    def factory(role):
        if role.tensor_type == "grad_output":
            return te.IdentityQuantizer()
        return te.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=te.IdentityQuantizer())

    found, forward = results(CustomRecipe(factory)), results(MXFP8BlockScaling())
    assert torch.equal(found[0], forward[0])
    torch.manual_seed(0)
    layer = te.Linear(128, 128, device="cpu")
    torch.manual_seed(0)
    x = torch.randn(128, 128)
    dy = 2 * found[0]
    w = layer.weight
    assert_tensor_close("dx", found[1], dy @ w, sum_slack(dy.abs() @ w.abs(), 128))
    assert_tensor_close("dw", found[2], dy.T @ x, sum_slack(dy.abs().T @ x.abs(), 128))


def test_a_scale_that_is_given_stays():
    quantizer = te.Float8Quantizer(torch.tensor([2.0]), torch.zeros(1), E4M3)
    recipe = CustomRecipe(lambda role: quantizer if role.gemm == "fprop" else None)
    with te.autocast(recipe=recipe):
        y = te.Linear(32, 32, bias=False, device="cpu", init_method=torch.nn.init.eye_)(
            torch.full((16, 32), 300.0)
        )
    assert bool((y == 224).all())  # 448 / 2


def test_an_identity_gives_its_input():
    x = torch.randn(2, 32)
    assert te.IdentityQuantizer()(x) is x
    assert te.IdentityQuantizer(dtype=torch.bfloat16)(x).dtype is torch.bfloat16


def test_what_cannot_be_is_refused_by_name():
    quantizer = te.Float8CurrentScalingQuantizer(E5M2)
    hybrid = te.HybridQuantizer(rowwise_quantizer=quantizer, columnwise_quantizer=quantizer)
    with pytest.raises(UnsupportedError, match="two formats at once"):
        hybrid(torch.ones(2, 32))
    with pytest.raises(ArgumentError, match="rowwise_quantizer"):
        te.HybridQuantizer(rowwise_quantizer=3, columnwise_quantizer=quantizer)
    short, long = (te.DelayedScalingRequest(amax_history_len=n) for n in (2, 3))
    with pytest.raises(ArgumentError, match="columnwise_quantizer: got another history"):
        te.HybridQuantizer(rowwise_quantizer=short, columnwise_quantizer=long)
    with pytest.raises(RecipeError, match="qfactory"):
        results(CustomRecipe(lambda role: 3))


def test_a_model_under_such_a_recipe_can_be_copied():
    layer = te.Linear(32, 32, device="cpu")
    with te.autocast(recipe=CustomRecipe(factories.current_scaling_factory)):
        layer(torch.ones(16, 32))
    copy.deepcopy(layer)


def test_an_identity_makes_and_fills_plain_tensors():
    own, x = te.IdentityQuantizer(dtype=torch.bfloat16), torch.randn(2, 32)
    made = own.make_empty((2, 32), device="cpu", requires_grad=True)
    assert (type(made), made.dtype, made.shape, made.requires_grad) == (
        torch.Tensor,
        torch.bfloat16,
        (2, 32),
        True,
    )
    assert own.update_quantized(x, made) is made
    assert torch.equal(made, x.bfloat16())
    own.update_quantized(-x, made, noop_flag=torch.ones(1))
    assert torch.equal(made, x.bfloat16())
    own.update_quantized(-x, made, noop_flag=torch.zeros(1))
    assert torch.equal(made, -x.bfloat16())
    assert not own.quantize_impl(x.requires_grad_()).requires_grad


def test_a_role_is_made_by_either_words():
    """A factory may be asked by a program, too."""
    role = te.QuantizerRole(module_type="grouped_linear", tensor_type="weight", name="fc1")
    assert role == te.QuantizerRole("GroupedLinear", "fc1", "weight")
    assert (role.module_type, role.tensor_type, role.name) == ("grouped_linear", "weight", "fc1")
    assert pickle.loads(pickle.dumps(role)) == role
    assert role._replace(name="fc2").name == "fc2"
    linear = te.QuantizerRole(module_type="linear", tensor_type="grad_output")
    assert factories.current_scaling_factory(linear).dtype is te.DType.kFloat8E5M2
