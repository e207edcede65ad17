"""Layers of a program's own, made of Transformer Engine's base class, quantizers and GEMM."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import fp8kit_torch as te
import pytest
import torch
from fp8kit_torch.te_compat.capture import restore_fp8_tensors, save_fp8_tensors
from fp8kit_torch.te_compat.custom_recipes import IdentityQuantizer
from fp8kit_torch.te_compat.gemms import general_gemm
from fp8kit_torch.te_compat.own_layers import quantize_weight

from fp8kit.errors import ArgumentError
from fp8kit.testing import assert_same_bits
from tests.support.combinations import combinations


class Product(torch.autograd.Function):
    """y = x W^T by the layer's quantizers."""

    @staticmethod
    def forward(ctx, x, weight, quantizers):
        x, weight = quantizers["scaling_fwd"][0](x), quantizers["scaling_fwd"][1](weight)
        ctx.save_for_backward(x.dequantize(), weight.dequantize())
        ctx.quantizer = quantizers["scaling_bwd"][0]
        return general_gemm(weight, x, out_dtype=torch.float32)[0]

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        g = ctx.quantizer(grad).dequantize()
        return g @ weight, g.T @ x, None


class KeptProduct(torch.autograd.Function):
    """``Product`` with the weight that the layer keeps."""

    @staticmethod
    def forward(ctx, x, weight, layer, first):
        x, own = layer.quantizers["scaling_fwd"][0](x), layer.quantizers["scaling_fwd"][1]
        held = layer.get_weight_workspace(
            tensor=weight,
            quantizer=own,
            cache_name=None if first is None else "weight",
            update_workspace=first is None or first,
            workspace_dtype=torch.float32,
        )
        held.update_usage(rowwise_usage=True)
        layer.last = held
        ctx.save_for_backward(x.dequantize(), held.dequantize())
        ctx.quantizer = layer.quantizers["scaling_bwd"][0]
        return general_gemm(held, x, out_dtype=torch.float32)[0]

    @staticmethod
    def backward(ctx, grad):
        return *Product.backward(ctx, grad)[:2], None, None


class Own(te.TransformerEngineBaseModule):
    def __init__(self, features, out, **named):
        super().__init__()
        weight = torch.nn.Parameter(torch.zeros(out, features))
        self.register_parameter("weight", weight, fp8_meta_index=1, **named)
        self.reset_parameters()

    def forward(self, inp):
        with self.prepare_forward_ctx(inp, num_gemms=1) as x:
            return Product.apply(x, self.weight, self.quantizers) if self.fp8 else x @ self.weight.T


def state_after_steps(layer):
    """y, and the scales and histories of input, weight and output gradient, after three steps."""
    torch.manual_seed(1)
    for step in range(3):
        x = (torch.randn(32, 64) * (step + 1)).requires_grad_()
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
            y = layer(x)
        y.square().sum().backward()
    kept = layer.fp8_meta
    parts = [kept["scaling_fwd"].scale[:2], kept["scaling_bwd"].scale[:1]]
    parts += [kept["scaling_fwd"].amax_history[:, :2], kept["scaling_bwd"].amax_history[:, :1]]
    return y, torch.cat([part.flatten() for part in parts])


def test_delayed_scaling_of_an_own_layer_is_that_of_linear():
    own, linear = Own(64, 32), te.Linear(64, 32, bias=False, device="cpu")
    with torch.no_grad():
        linear.weight.copy_(own.weight)
    (y, state), (want, wanted) = state_after_steps(own), state_after_steps(linear)
    assert_same_bits("y", y.detach().numpy(), want.detach().numpy())
    assert_same_bits("state", state.numpy(), wanted.numpy())
    assert (state[:3] != 1).all()


class OwnLinear(te.Linear):
    """A layer whose forward is a program's."""

    def forward(self, inp):
        with self.prepare_forward_ctx(inp, num_gemms=1) as x:
            return Product.apply(x, self.weight, self.quantizers)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@combinations({"kind": ["own", "linear"], "inside": {"autocast inside": True, "autocast around": False}})
def test_a_compiled_function_leaves_an_own_layer_to_eager_code(kind, inside):
    recipe = te.DelayedScaling(amax_history_len=4)

    def trained(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = Own(64, 32) if kind == "own" else OwnLinear(64, 32, bias=False, device="cpu")

        def function(x):
            with te.autocast(recipe=recipe) if inside else nullcontext():
                return layer(x * 2) + 1

        call = torch.compile(function, backend="eager") if compiled else function
        found = []
        for step in range(3):
            x = (torch.randn(16, 64) * (step + 1)).requires_grad_()
            with nullcontext() if inside else te.autocast(recipe=recipe):
                y = call(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        states = [part for state in layer.fp8_meta.values() for part in state.parts]
        return [*found, layer.weight.grad, *states]

    compiled, eager = trained(True), trained(False)
    for got, want in zip(compiled, eager, strict=True):
        assert torch.equal(got, want)
    assert (eager[-3][0] != 1).all()  # backward's scale of the output's gradient


def test_an_own_layer_in_one_graph_says_why_it_cannot_be():
    call = torch.compile(Own(16, 16), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="a program's own layer with quantizers is not supported within"):
        call(torch.ones(4, 16))


def test_an_own_layers_state_is_saved_and_loaded():
    own, fresh = Own(64, 32), Own(64, 32)
    state_after_steps(own)
    fresh.load_state_dict(own.state_dict())
    assert torch.equal(fresh.fp8_meta["scaling_bwd"].scale, own.fp8_meta["scaling_bwd"].scale)


def test_parameters_start_by_their_function_within_the_tracker():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    made = [Own(8, 8, init_fn=torch.nn.init.uniform_, get_rng_state_tracker=lambda: tracker)]
    tracker.reset()
    tracker.add("model-parallel-rng", 5)
    made.append(Own(8, 8, init_fn=torch.nn.init.uniform_, get_rng_state_tracker=lambda: tracker))
    assert torch.equal(made[0].weight, made[1].weight)
    assert 0 < made[0].weight.min() < made[0].weight.max() < 1
    assert made[0].weight.std() > 10 * 0.023
    assert Own(64, 64).weight.std().item() == pytest.approx(0.023, rel=0.1)  # of 4096 numbers


RECIPES = {
    "delayed": te.DelayedScaling(amax_history_len=2),
    "current": te.Float8CurrentScaling(),
    "blocks": te.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
    "nvfp4": te.recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}


class Keeping(Own):
    def forward(self, inp, is_first_microbatch=None):
        with self.prepare_forward_ctx(inp, num_gemms=1) as x:
            return KeptProduct.apply(x, self.weight, self, is_first_microbatch)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.filterwarnings("ignore:.*high precision:UserWarning")
@pytest.mark.parametrize("kind", RECIPES)
def test_a_weight_is_cast_once_for_several_micro_batches(kind):
    layer, recipe, x = Keeping(64, 32), RECIPES[kind], torch.randn(32, 64, requires_grad=True)

    def run(first):
        with te.autocast(recipe=recipe):
            return layer(x, first).detach()

    for _ in range(3):  # until the scales are what they stay
        fresh = run(None)
    kept = run(True)
    assert torch.equal(fresh, kept)
    held = layer.last
    with torch.no_grad():
        layer.weight.neg_()
    assert torch.equal(run(False), kept)
    assert layer.last is held
    changed = run(True)
    assert layer.last is held  # its memory
    assert torch.equal(changed, -kept)
    assert torch.equal(run(None), changed)
    assert layer.last is not held
    copied = copy.deepcopy(layer)
    assert not copied._workspaces
    assert torch.equal(copied.weight, layer.weight)
    layer.to(torch.float32)
    assert run(False) is not None
    assert layer.last is not held


@pytest.mark.usefixtures("everywhere")
def test_a_kept_weight_follows_its_quantizer_and_its_flag():
    layer, weight = Own(32, 32), torch.randn(32, 32)
    e4m3, e5m2 = (
        te.Float8CurrentScalingQuantizer(dtype) for dtype in (te.DType.kFloat8E4M3, te.DType.kFloat8E5M2)
    )
    kept = layer.get_weight_workspace(tensor=weight, quantizer=e4m3, cache_name="w")
    flag = torch.ones(1)
    same = layer.get_weight_workspace(tensor=-weight, quantizer=e4m3, cache_name="w", skip_update_flag=flag)
    assert same is kept
    assert torch.equal(kept.dequantize(), e4m3(weight).dequantize())
    assert layer.get_weight_workspace(tensor=-weight, cache_name="w") is kept
    assert torch.equal(kept.dequantize(), e4m3(-weight).dequantize())
    other = layer.get_weight_workspace(tensor=weight, quantizer=e5m2, cache_name="w", update_workspace=False)
    assert torch.equal(other.dequantize(), e5m2(weight).dequantize())
    assert layer.get_weight_workspace(tensor=kept) is kept
    for more in ({"block_scaling_dim": 1}, {"block_scaling_dim": 2}, {"force_pow_2_scales": False}):
        blocks = te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True, **more)
        made = layer.get_weight_workspace(
            tensor=weight, quantizer=blocks, cache_name="blocks", update_workspace=False
        )
        assert torch.equal(made.dequantize(), blocks.quantize(weight).dequantize())
    half = layer.get_weight_workspace(
        tensor=weight, quantizer=e5m2, cache_name="w", workspace_dtype=torch.bfloat16
    )
    assert half.dtype is torch.bfloat16
    with pytest.raises(ArgumentError, match="tensor: missing"):
        layer.get_weight_workspace(cache_name="w")
    with pytest.raises(ArgumentError, match="quantizer: missing"):
        layer.get_weight_workspace(tensor=weight, cache_name="new")


@pytest.mark.usefixtures("everywhere")
def test_a_program_keeps_a_weights_cast_itself():
    """As ``get_weight_workspace`` does, without a layer: what is new is what to keep; a flag decides in the
    place of ``update_workspace``."""
    weight = torch.randn(32, 32)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
    want, minus = quantizer(weight).dequantize(), quantizer(-weight).dequantize()
    made, kept = quantize_weight(tensor=weight, quantizer=quantizer)
    assert torch.equal(made.dequantize(), want)
    assert kept is None
    made, kept = quantize_weight(tensor=weight, quantizer=quantizer, cache=True)
    assert made is kept

    def again(**more):
        given = {"tensor": -weight, "quantizer": quantizer, "workspace": kept, "cache": True}
        got, new = quantize_weight(**given | more)
        assert new is None
        assert got is kept or more
        return got.dequantize()

    assert torch.equal(again(update_workspace=False), want)
    assert torch.equal(again(update_workspace=False, skip_update_flag=torch.ones(1)), want)
    assert torch.equal(again(update_workspace=False, skip_update_flag=torch.zeros(1)), minus)
    assert torch.equal(again(tensor=weight), want)
    assert torch.equal(again(tensor=quantizer(-weight)), minus)  # a cast weight is itself
    quantizer.dtype = te.DType.kFloat8E5M2  # of the same object
    other, new = quantize_weight(tensor=weight, quantizer=quantizer, workspace=kept, cache=True)
    assert other is new is not kept
    assert torch.equal(other.dequantize(), quantizer(weight).dequantize())
    with pytest.raises(ArgumentError, match="quantize_weight: tensor: missing"):
        quantize_weight(quantizer=quantizer)


def test_a_weight_that_is_not_cast_is_not_kept():
    weight, quantizer = torch.randn(4, 4), IdentityQuantizer(dtype=torch.bfloat16)
    made, kept = quantize_weight(tensor=weight, quantizer=quantizer, cache=True)
    assert kept is None
    assert torch.equal(made, weight.bfloat16())
    layer = te.Linear(32, 32, device="cpu")
    for _ in range(2):
        made = layer.get_weight_workspace(tensor=weight, quantizer=quantizer, cache_name="w")
        assert torch.equal(made, weight.bfloat16())


def test_what_else_programs_keep_in_fp8_meta_is_beside_the_states():
    """As Megatron-LM's CUDA graphs do."""
    layer = te.Linear(32, 32, device="cpu")
    current = te.Float8CurrentScaling()
    assert isinstance(layer.fp8_meta["recipe"], te.DelayedScaling)
    assert layer.fp8_meta.get("fp8_group") is None
    layer.fp8_meta["fp8_group"], layer.fp8_meta["recipe"] = "group", current
    assert layer.fp8_meta["recipe"] is current
    assert not layer.fp8_meta_tensors_initialized
    state_after = te.DelayedScaling(amax_history_len=3)
    with te.autocast(recipe=state_after):
        layer(torch.randn(4, 32))
        assert layer.fp8_meta["recipe"] == state_after
    assert sorted(layer.fp8_meta) == ["scaling_bwd", "scaling_fwd"]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to("cpu")):
        assert other.fp8_meta["fp8_group"] == "group"
        assert torch.equal(other.fp8_meta["scaling_fwd"].scale, layer.fp8_meta["scaling_fwd"].scale)
    te.Linear(32, 32, device="cpu").load_state_dict(layer.state_dict())
    layer.reset_fp8_meta_tensors()
    with pytest.raises(KeyError, match="num_gemms"):
        _ = layer.fp8_meta["num_gemms"]
    meta, states = layer.fp8_meta, dict(layer.fp8_meta)
    meta.update(num_gemms=1)
    assert (meta.setdefault("num_gemms", 2), meta.setdefault("recipe")) == (1, meta["recipe"])
    assert [name in meta for name in ("num_gemms", "recipe", "other")] == [True, True, False]
    assert dict(meta) == states
    layer.state_dict()  # of the states alone
    assert (meta.pop("num_gemms"), meta.pop("num_gemms", 3)) == (1, 3)
    assert "num_gemms" not in meta


def test_states_are_saved_around_a_capture_and_put_back():
    model = torch.nn.Sequential(te.Linear(32, 32, device="cpu"), te.LayerNormMLP(32, 32, device="cpu"))
    recipe = te.DelayedScaling(amax_history_len=4)

    def run(part, factor):
        with te.autocast(recipe=recipe):
            part(factor * torch.ones(16, 32)).sum().backward()

    run(model[0], 3.0)
    before = [part.clone() for state in model[0].fp8_meta.values() for part in state.parts]
    saved = save_fp8_tensors([model], recipe)
    run(model, 100.0)
    places = [part.data_ptr() for state in model[0].fp8_meta.values() for part in state.parts]
    restore_fp8_tensors([model], saved)
    after = [part for state in model[0].fp8_meta.values() for part in state.parts]
    assert [part.data_ptr() for part in after] == places
    for part, want in zip(after, before, strict=True):
        assert torch.equal(part, want)
    assert (model[1].fp8_meta["scaling_fwd"].scale == 1).all()
    assert (model[1].fp8_meta["scaling_fwd"].amax_history == 0).all()


class Roles(Own):
    def get_quantizer_roles(self, *, fwd, num_quantizers):
        names = ("left", "right", None) if fwd else ("left", None)
        roles = [name and te.QuantizerRole("mine", self.name or "", name) for name in names]
        return roles[: num_quantizers - self.missing]

    missing = 0


def test_a_custom_recipe_answers_the_roles_that_an_own_layer_gives():
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
    asked = []

    def qfactory(role):
        asked.append(role)
        return quantizer

    layer, x = Roles(64, 32), torch.randn(32, 64, requires_grad=True)
    with te.autocast(recipe=te.recipe.CustomRecipe(qfactory)):
        assert all(own is quantizer for slots in layer.quantizers.values() for own in slots)
        y = layer(x)
    y.sum().backward()
    assert {role and role.operand for role in asked} >= {"left", "right", None}
    layer.missing = 1
    refused = pytest.raises(ArgumentError, match=r"get_quantizer_roles.*2 roles.*a list of 3 roles")
    with te.autocast(recipe=te.recipe.CustomRecipe(qfactory)), refused:
        _ = layer.quantizers
