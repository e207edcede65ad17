"""``te.ops`` as programs for Transformer Engine write it: groups, scaled activations, casts between
operations, operations and fusions of one's own."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import fusible as ops
from fp8kit_torch import fusion

from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close, largest

from .twins import RECIPES, same

TF32 = 2.0**-10  # a GPU rounds both numbers of a product to TF32's 11 bits


@pytest.fixture(autouse=True)
def no_fusions(monkeypatch):
    for name in ("_FORWARD", "_BACKWARD", "_BOTH"):
        monkeypatch.setattr(fusion, name, [])


def swiglu(x):
    u, v = x.chunk(2, -1)
    return torch.nn.functional.silu(u) * v


def situ(x):
    u, v = x.chunk(2, -1)
    return 4 * torch.tanh(u / 4) * torch.sigmoid(u) * 25 * torch.tanh(v / 25)


def clamped(x):
    u, v = x.chunk(2, -1)
    c, d = u.clamp(max=7), v.clamp(-7, 7)
    return c * torch.sigmoid(1.702 * c) * (d + 1)


SCALED = {
    "ScaledSwiGLU": swiglu,
    "ScaledSiTUGLU": situ,
    "ScaledClampedQGeGLU": clamped,
    "ScaledSReLU": lambda x: torch.relu(x).square(),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_activations(device, name):
    x = (3 * torch.randn(2, 6, 32, device=device)).requires_grad_()
    scales = torch.rand(2, 6, device=device, requires_grad=True)
    y = ops.Sequential(getattr(ops, name)())(x, scales)
    want = SCALED[name](x) * scales[..., None]
    # some 20 operations on values up to |want|, of which exp and tanh have two roundings each
    assert_tensor_close("y", y, want, sum_slack(largest(want), 2 * 20))
    g = torch.randn_like(y)
    dx, dscales = torch.autograd.grad(y, (x, scales), g)
    wanted_dx, wanted_dscales = torch.autograd.grad(want, (x, scales), g)
    assert_tensor_close("dx", dx, wanted_dx, sum_slack(largest(wanted_dx), 2 * 40))
    made = SCALED[name](x)  # a sum over the row
    assert_tensor_close("dscales", dscales, wanted_dscales, sum_slack((g * made).abs().sum(-1), 32 + 2 * 20))


def test_scales_of_another_shape():
    with pytest.raises(ShapeError, match="scales"):
        ops.ScaledSwiGLU()(torch.ones(4, 8), torch.ones(4, 1))


@pytest.mark.parametrize("make", [ops.SwiGLU, ops.SiTUGLU, ops.ClampedSwiGLU])
def test_interleaved_halves(device, make):
    x = torch.randn(3, 64, device=device)
    turns = ft.interleave_glu_tensor(x.t().contiguous(), 8).t()
    same(make(glu_interleave_size=8)(turns), make()(x), "y")
    with pytest.raises(ShapeError, match="multiple of 48"):
        make(glu_interleave_size=24)(x)


def test_a_cached_input_is_cast(device):
    x = torch.randn(16, 32, device=device, requires_grad=True)
    held = ft.Float8CurrentScalingQuantizer(ft.DType.kFloat8E4M3)(x.detach()).dequantize().requires_grad_()
    y = ops.GELU(cache_quantized_input=True)(x)
    same(y, ops.GELU()(x), "y")
    g = torch.randn_like(y)
    same(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(ops.GELU()(held), held, g)[0], "dx")


# --- groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_bias", [False, True])
def test_groups(device, scale_bias):
    op = ops.GroupedLinear(3, 16, 32, device=device, scale_bias=scale_bias)
    assert [name for name, _ in op.named_parameters()][:2] == ["weight0", "bias0"]
    assert op.num_extra_inputs == 1 + scale_bias
    with torch.no_grad():
        for p in op.parameters():
            p.normal_()
    x = torch.randn(9, 16, device=device, requires_grad=True)
    sizes, scales = torch.tensor([4, 0, 5]), torch.rand(9, device=device, requires_grad=True)
    y = ops.Sequential(op)(x, sizes, *([scales] if scale_bias else []))
    factors = scales[:, None] if scale_bias else 1
    rows = [x[:4] @ op.weight0.t(), x[4:] @ op.weight2.t()]
    biases = torch.cat([op.bias0.expand(4, -1), op.bias2.expand(5, -1)])
    want = torch.cat(rows) + factors * biases
    size = torch.cat([x[:4].abs() @ op.weight0.abs().t(), x[4:].abs() @ op.weight2.abs().t()])
    assert_tensor_close("y", y, want, TF32 * size + sum_slack(largest(want), 16))
    y.sum().backward()
    assert op.weight1.grad is None or not op.weight1.grad.any()
    if scale_bias:
        assert_tensor_close("dscales", scales.grad, biases.sum(1), sum_slack(biases.abs().sum(1), 32))


def test_an_mlp_of_groups(device):
    """As Megatron-Core writes it: sizes and probabilities as extra inputs, in the operations' order."""
    mlp = ops.Sequential(
        ops.GroupedLinear(2, 16, 64, bias=False, device=device),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(2, 32, 16, bias=False, device=device),
    )
    x, probs, sizes = torch.randn(6, 16, device=device), torch.rand(6, device=device), torch.tensor([2, 4])
    y = mlp(x, sizes, probs, sizes)
    want = torch.cat(
        [
            (swiglu(rows @ up.t()) * p[:, None]) @ down.t()
            for rows, p, up, down in zip(
                x.split([2, 4]),
                probs.split([2, 4]),
                (mlp[0].weight0, mlp[0].weight1),
                (mlp[2].weight0, mlp[2].weight1),
                strict=True,
            )
        ]
    )
    # both products round their operands; the 32 terms of a sum add up to at most 4 sqrt(32) of the largest
    assert_tensor_close("y", y, want, 4 * 32**0.5 * TF32 * largest(want))
    with pytest.raises(ArgumentError, match="extra_inputs: got 2, expected 3"):
        mlp(x, sizes, probs)


# --- casts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_cast_before_a_layer_is_the_layers_own(device, recipe):
    layer = ops.Linear(128, 128, device=device)
    x = torch.randn(128, 128, device=device)
    results = []
    for model in (layer, ops.Sequential(ops.Quantize(), layer)):
        own = x.clone().requires_grad_()
        layer.zero_grad()
        with ft.autocast(recipe=RECIPES[recipe]):
            y = model(own)
        y.square().sum().backward()
        results.append((y, own.grad, layer.weight.grad))
    for one, other in zip(*results, strict=True):
        same(one, other, "with a cast before it")


def test_a_cast_gives_codes_under_fp8_and_nothing_without(device):
    x = torch.randn(32, 32, device=device)
    op = ops.Quantize()
    assert op(x) is x
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        held = op(x)
        assert op(held) is held
    assert isinstance(held, ft.Float8Tensor)
    with ft.autocast(recipe=ft.MXFP8BlockScaling()):
        assert type(op(x)).__name__ == "MXFP8Tensor"


def test_a_gradient_is_cast(device):
    x = torch.randn(32, 32, device=device, requires_grad=True)
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        y = ops.Quantize(forward=False, backward=True)(x)
    assert type(y) is torch.Tensor
    g = torch.randn_like(x)
    (dx,) = torch.autograd.grad(y, x, g)
    assert isinstance(dx, ft.Float8Tensor)
    assert dx._fp8_dtype == ft.DType.kFloat8E5M2
    assert (dx.dequantize() - g).norm() < 2.0**-3 * g.norm()


# --- dtypes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda **how: ops.Linear(32, 32, **how),
        lambda **how: ops.LayerNorm(32, **how),
        lambda **how: ops.RMSNorm(32, **how),
    ],
)
def test_an_input_in_another_dtype_is_cast_to_the_weights(device, make):
    op = make(device=device, dtype=torch.bfloat16)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    y = op(x)
    assert torch.equal(y, op(x.bfloat16()))
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, op.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


def test_groups_of_rows_in_another_dtype(device):
    op = ops.GroupedLinear(2, 32, 32, device=device, dtype=torch.bfloat16)
    x, sizes = torch.randn(32, 32, device=device), torch.tensor([16, 16], device=device)
    assert torch.equal(op(x, sizes), op(x.bfloat16(), sizes))


# --- quantizers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        (ft.Float8CurrentScaling(), ["Float8CurrentScalingQuantizer"] * 3),
        (ft.DelayedScaling(), ["Float8Quantizer"] * 3),
        (ft.Float8BlockScaling(), ["Float8BlockQuantizer"] * 3),
        (ft.MXFP8BlockScaling(), ["MXFP8Quantizer"] * 3),
        (ft.NVFP4BlockScaling(), ["NVFP4Quantizer"] * 3),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_quantizers_of_a_recipe(device, recipe, kinds):
    op = ops.BasicLinear(64, 64, device=device)
    assert (op.num_quantizers("forward"), op.num_quantizers("backward")) == (2, 1)
    assert op.get_quantizer("forward", 0) is None
    with ft.autocast(recipe=recipe):
        found = [
            op.get_quantizer("forward", 0),
            op.get_quantizer("forward", 1),
            op.get_quantizer("backward", 0),
        ]
        with pytest.raises(ArgumentError, match="mode, index"):
            op.get_quantizer("forward", 2)
        either = [op.get_input_quantizer(), op.get_grad_output_quantizer()]
    assert [type(each) for each in either] == [type(found[0]), type(found[2])]
    assert ops.Identity().get_input_quantizer() is None
    assert [type(each).__name__ for each in found] == kinds
    x = torch.randn(64, 64, device=device)
    for quantizer in found:
        assert (quantizer(x).dequantize() - x).norm() < 0.25 * x.norm()


def test_quantizers_after_a_step_have_the_layers_scales(device):
    op, recipe = ops.BasicLinear(32, 32, device=device), ft.DelayedScaling(amax_history_len=4)
    x = torch.full((32, 32), 2.0, device=device, requires_grad=True)
    with ft.autocast(recipe=recipe):
        y = op(x)
    y.backward(torch.full_like(y, 4.0))
    assert op.get_quantizer("forward", 0).scale.item() == 448 / 2
    assert op.get_quantizer("backward", 0).scale.item() == 57344 / 4


def test_a_quantizer_casts_as_its_layer(device):
    op = ops.BasicLinear(64, 32, device=device)
    x = torch.randn(64, 64, device=device)
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        same(op(op.get_quantizer("forward", 0)(x)), op(x), "y")


def test_delayed_scalings_quantizer_reads_the_layers_state(device):
    op = ops.BasicLinear(64, 32, device=device)
    for _ in range(2):
        with ft.autocast(recipe=ft.DelayedScaling(amax_history_len=4)):
            op(torch.full((32, 64), 2.0, device=device))
    with ft.autocast(recipe=ft.DelayedScaling(amax_history_len=4)):
        quantizer = op.get_quantizer("forward", 0)
        assert quantizer.scale.item() == op.fp8_meta["scaling_fwd"].scale[0].item() == 224.0
        quantizer(torch.full((32, 64), 3.0, device=device))
        assert op.fp8_meta["scaling_fwd"].amax_history[0, 0].item() == 3.0


# --- operations and fusions of one's own --------------------------------------------------------------------


class Times(ops.BasicOperation):
    """y = weight x."""

    def __init__(self, value=2.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(value))

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer, power=1):
        ctx.power = power
        ctx.save_for_backward(input_)
        return input_ * self.weight**power

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        slope = ctx.power * self.weight ** (ctx.power - 1)
        return grad_output * self.weight**ctx.power, [(grad_output * x).sum() * slope]


class AddAndKeep(ops.BasicOperation):
    """x + extra, and x as an extra output."""

    num_extra_inputs = num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **others):
        return input_ + basic_op_extra_inputs[0][0], [(input_.clone(),)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return grad_output + basic_op_grad_extra_outputs[0][0], [()], [(grad_output,)]


class TwoTimes(ops.FusedOperation):
    """Two ``Times`` by one product."""

    def fuser_forward(self, basic_op_ctxs, input_, **others):
        first, second = self.basic_ops
        for ctx, x in zip(basic_op_ctxs, (input_, input_ * first.weight), strict=True):
            ctx.power = 1
            ctx.save_for_backward(x)
        return input_ * (first.weight * second.weight), [(), ()]


class TwoTimesBack(TwoTimes):
    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        first, second = self.basic_ops
        (x,), (y,) = (ctx.saved_tensors for ctx in basic_op_ctxs)
        between = grad_output * second.weight
        return between * first.weight, [[(between * x).sum()], [(grad_output * y).sum()]], [(), ()]


def pairs(made):
    """A fusion of each two ``Times``."""

    def fuse(found, *, recipe):
        out = []
        for op in found:
            if out and type(op) is type(out[-1]) is Times:
                out[-1] = made([out[-1], op])
            else:
                out.append(op)
        return out

    return fuse


def test_an_operation_of_ones_own():
    op, x = Times(3.0), torch.randn(4, requires_grad=True)
    y = op(x)
    y.sum().backward()
    assert torch.equal(y, 3 * x)
    assert torch.equal(x.grad, torch.full((4,), 3.0))
    assert_tensor_close("dweight", op.weight.grad, x.sum(), sum_slack(x.abs().sum(), 4))


def test_keyword_arguments_of_operations():
    model, x = ops.Sequential(Times(3.0), torch.nn.ReLU(), Times(2.0)), torch.ones(2)
    assert torch.equal(model(x, op_kwargs=[{"power": 2}, None, None]), 18 * x)
    with pytest.raises(ArgumentError, match="op_kwargs"):
        model(x, op_kwargs=[{}])


def test_extra_inputs_and_outputs_of_ones_own():
    x, extra = (torch.randn(3, requires_grad=True) for _ in range(2))
    y, kept = ops.Sequential(Times(2.0), AddAndKeep(), Times(3.0))(x, extra)
    assert torch.equal(y, 3 * (2 * x + extra))
    assert torch.equal(kept, 2 * x)
    (y.sum() + 5 * kept.sum()).backward()
    assert torch.equal(x.grad, torch.full((3,), 16.0))
    assert torch.equal(extra.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize("register", ["forward", "backward", "forward_backward"])
def test_registered_fusions(register):
    """Of forward, with the operations' own backward; of backward; of both."""
    made = {"forward": TwoTimes, "backward": TwoTimesBack, "forward_backward": TwoTimesBack}[register]
    calls = []

    class Seen(made):
        def fuser_forward(self, *given, **named):
            calls.append("forward")
            return super().fuser_forward(*given, **named)

    if register != "forward":

        def back(self, *given, **named):
            calls.append("backward")
            return made.fuser_backward(self, *given, **named)

        Seen.fuser_backward = back
    getattr(ops, f"register_{register}_fusion")(pairs(Seen))
    model = ops.Sequential(Times(2.0), Times(3.0), ops.ConstantScale(0.5))
    x = torch.randn(4, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert (
        calls
        == {"forward": ["forward"], "backward": ["backward"], "forward_backward": ["forward", "backward"]}[
            register
        ]
    )
    assert torch.equal(y, 3 * x)
    assert torch.equal(x.grad, torch.full((4,), 3.0))
    size = x.abs().sum()
    assert_tensor_close("dweight 0", model[0].weight.grad, 1.5 * x.sum(), sum_slack(1.5 * size, 4))
    assert_tensor_close("dweight 1", model[1].weight.grad, x.sum(), sum_slack(size, 4))


def test_a_fusion_before_the_others():
    order = []
    ops.register_forward_fusion(lambda found, *, recipe: (order.append("first"), found)[1])
    ops.register_forward_fusion(lambda found, *, recipe: (order.append(recipe), found)[1], prepend=True)
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        ops.Sequential(Times())(torch.ones(2))
    assert order == [ft.Float8CurrentScaling(), "first"]


def test_fusions_that_cannot_run():
    ops.register_forward_fusion(lambda found, *, recipe: [TwoTimes(found)])
    with pytest.raises(UnsupportedError, match="no fuser_backward"):
        ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0))(torch.ones(2))
    fusion._FORWARD[:] = [lambda found, *, recipe: found[:1]]
    with pytest.raises(ArgumentError, match="same basic operations"):
        ops.Sequential(Times(), Times())(torch.ones(2))


def test_quantised_tensors_are_kept_for_backward():
    class Squared(ops.BasicOperation):
        def op_forward(self, ctx, input_, **others):
            ctx.save_for_backward(ft.Float8CurrentScalingQuantizer(ft.DType.kFloat8E4M3)(input_))
            return input_.square()

        def op_backward(self, ctx, grad_output):
            (held,) = ctx.saved_tensors
            return 2 * held.dequantize() * grad_output, []

    x = torch.randn(8, 16, requires_grad=True)
    Squared()(x).sum().backward()
    assert (x.grad - 2 * x).norm() < 2.0**-4 * (2 * x).norm()


def test_arguments_about_several_processes_change_nothing_in_one():
    op = ops.Linear(16, 16, device="cpu", tensor_parallel_mode="column", sequence_parallel=True)
    assert op(torch.ones(2, 16)).shape == (2, 16)
    with pytest.raises(ArgumentError, match="tensor_parallel_mode"):
        ops.Linear(16, 16, device="cpu", tensor_parallel_mode="diagonal")


def test_a_sequence_compiles_as_one_graph():
    model = ops.Sequential(
        ops.Linear(16, 32, device="cpu"), ops.MakeExtraOutput(), ops.SwiGLU(), ops.AddExtraInput()
    )
    x, extra = torch.randn(4, 16), torch.randn(4, 16)
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        y, kept = torch.compile(model, backend="aot_eager", fullgraph=True)(x, extra)
        want, other = model(x, extra)
    same(y, want, "y")
    same(kept, other, "the extra output")


def test_a_weight_that_something_else_stands_for():
    made = ops.Linear(32, 16, bias=False, device="cpu")
    x = torch.randn(4, 32)
    want = made(x)
    torch.nn.utils.parametrize.register_parametrization(made, "weight", torch.nn.Identity())
    same(made(x), want, "result")
