"""``GroupedTensor``, and ``GroupedLinear`` whose weights and biases are one parameter each."""

from __future__ import annotations

import copy
import io

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.te_compat.grouped_tensor import GroupedTensor, GroupedTensorStorage

from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.testing.compare import assert_same_bits
from tests.support.tensors import assert_tensor_close, largest

N, K, M, SPLITS = 3, 32, 48, [8, 0, 24]
ONE = {"single_grouped_weight": True, "single_grouped_bias": True}
RECIPES = [None, ft.DelayedScaling(), ft.Float8CurrentScaling(), ft.Float8BlockScaling()]


def pair(recipe=None, held=False, device="cpu", **more):
    """A layer with one parameter, and one like it with one for each group."""
    with ft.quantized_model_init(held, recipe):
        own, other = (ft.GroupedLinear(N, K, M, device=device, **more, **how) for how in (ONE, {}))
    other.load_state_dict(own.state_dict())
    return own, other


def step(layer, recipe, first=None):
    torch.manual_seed(1)
    x = torch.randn(sum(SPLITS), K, device=next(layer.parameters()).device, requires_grad=True)
    with ft.autocast(recipe is not None, recipe=recipe):
        y = layer(x, SPLITS, first)
    (y * torch.linspace(-1, 1, M, device=x.device)).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_parameter_computes_what_several_do(device, recipe):
    own, other = pair(device=device)
    assert [name for name, _ in own.named_parameters()] == ["weight", "bias"]
    assert own.weight0 is None
    assert own.bias2 is None
    assert isinstance(own.weight, GroupedTensor)
    assert isinstance(own.bias, GroupedTensor)
    assert own.weight_names == ["weight"]
    for first in (None, True, False):
        for name, a, b in zip(["y", "dx"], step(own, recipe, first), step(other, recipe, first), strict=True):
            assert_same_bits(name, a.cpu().numpy(), b.cpu().numpy())
    for i in range(N):
        assert torch.equal(own.weight.grad[i], getattr(other, f"weight{i}").grad)
        assert torch.equal(own.bias.grad[i], getattr(other, f"bias{i}").grad)


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_weights_that_are_held_in_fp8(device, recipe):
    own, other = pair(recipe, held=True, device=device)
    assert isinstance(own.weight, GroupedTensor)
    assert isinstance(own.weight, ft.QuantizedTensor)
    assert type(own.weight.quantized_tensors[1]) is type(other.weight1)
    for name, a, b in zip(["y", "dx"], step(own, recipe), step(other, recipe), strict=True):
        assert_same_bits(name, a.cpu().numpy(), b.cpu().numpy())
    assert torch.equal(own.weight.grad[2], other.weight2.grad)
    assert torch.equal(own.weight.dequantize()[0], other.weight0.dequantize())


@pytest.mark.parametrize("held", [False, True])
def test_optimizers_update_it(held):
    recipe = ft.Float8CurrentScaling()
    own, other = pair(recipe, held=held)
    if held:
        assert own.weight.shape == (N, M, K)
    options = {"lr": 0.05, "master_weights": held}
    optimizers = [ft.optimizers.FusedAdam(layer.parameters(), **options) for layer in (own, other)]
    for _ in range(2):
        for layer, optimizer in zip((own, other), optimizers, strict=True):
            step(layer, recipe)
            optimizer.step()
            optimizer.zero_grad()
    for i in range(N):
        found, want = own.weight, getattr(other, f"weight{i}")
        if held:
            found, want = found.dequantize(), want.dequantize()
        assert torch.equal(found[i], want)


def test_delayed_gradients_and_main_grad():
    own, other = pair(delay_wgrad_compute=True)
    for layer in (own, other):
        step(layer, None)
    assert own.weight.grad is None
    own.backward_dw()
    other.backward_dw()
    assert torch.equal(own.weight.grad[2], other.weight2.grad)

    own, other = pair(fuse_wgrad_accumulation=True)
    for layer in (own, other):
        for parameter in layer.parameters():
            parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
    own.weight.grad_added_to_main_grad = False
    for layer in (own, other):
        step(layer, None)
    assert own.weight.grad_added_to_main_grad
    assert own.weight.grad.shape == (N, M, K)  # says nothing, so that hooks run
    for i in range(N):
        assert torch.equal(own.weight.main_grad[i], getattr(other, f"weight{i}").main_grad)


@pytest.mark.parametrize("held", [False, True])
def test_checkpoints_of_both_forms_load(held):
    own, other = pair(ft.Float8CurrentScaling(), held=held)
    again = pair(ft.Float8CurrentScaling(), held=held)[0]
    again.load_state_dict(other.state_dict())
    assert torch.equal(again.weight.float(), own.weight.float())
    file = io.BytesIO()
    torch.save(own.state_dict(), file)
    file.seek(0)
    again = pair(ft.Float8CurrentScaling(), held=held)[0]
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again.weight.float(), own.weight.float())
    assert torch.equal(again.bias, own.bias)


@pytest.mark.parametrize("held", [False, True])
def test_copied_moved_and_started_anew(held):
    own, _ = pair(ft.Float8CurrentScaling(), held=held)
    twin = copy.deepcopy(own)
    assert isinstance(twin.weight, GroupedTensor)
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert torch.equal(twin.weight.float(), own.weight.float())
    assert twin.to(torch.bfloat16).bias.dtype is torch.bfloat16
    step(own.to("cpu"), None)
    before = own.weight.float().clone()
    own.reset_parameters()
    assert isinstance(own.weight, GroupedTensor)
    assert not torch.equal(own.weight.float(), before)
    meta = ft.GroupedLinear(N, K, M, device="meta", **ONE)
    meta.reset_parameters()
    assert meta.weight.shape == (N, M, K)
    assert not meta.weight.is_meta


def test_the_values_before_the_cast():
    recipe = ft.Float8CurrentScaling()
    with ft.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        own = ft.GroupedLinear(N, K, M, device="cpu", **ONE)
    high = own.weight.get_high_precision_init_val()
    assert high.shape == (N, M, K)
    # E4M3 rounds by half a step, 2^-4 of a value, or of its smallest normal one: 2^-6 of 448
    slack = 2.0**-4 * high.abs() + 2.0**-10 * 2.0**-6 * largest(high)
    assert_tensor_close("weight", own.weight.dequantize(), high, slack)
    own.weight.clear_high_precision_init_val()
    assert own.weight.get_high_precision_init_val() is None


def test_sizes_on_the_device():
    own, other = pair()
    own.sizes_on_device = other.sizes_on_device = True
    x, sizes = torch.randn(sum(SPLITS), K), torch.tensor(SPLITS)
    found, want = own(x, sizes), other(x, sizes)
    assert torch.equal(found, want)
    found.sum().backward()
    want.sum().backward()
    assert torch.equal(own.weight.grad[2], other.weight2.grad)


@pytest.mark.programs
def test_a_compiled_layer():
    own, other = pair()
    x = torch.randn(sum(SPLITS), K)
    y = torch.compile(lambda x: own(x, SPLITS), backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(y, other(x, SPLITS))
    y.sum().backward()
    other(x, SPLITS).sum().backward()
    assert torch.equal(own.weight.grad[0], other.weight0.grad)


def test_matrices_in_one_memory():
    made = GroupedTensor.make_grouped_tensor_with_shapes(2, [(4, 8)] * 2, device="cpu", dtype=torch.float32)
    assert (made.shape, made.num_tensors, made.logical_shape) == ((2, 4, 8), 2, (8, 8))
    assert made.all_same_shape()
    assert made.get_common_first_dim() == 4
    first, second = made.quantized_tensors
    first.fill_(1)
    second.fill_(2)
    assert torch.equal(made.sum((1, 2)), torch.tensor([32.0, 64.0]))
    assert type(made + 1) is torch.Tensor
    assert made.rowwise_data.data_ptr() == made.data_ptr()

    rows = torch.tensor([2, 6])
    uneven = GroupedTensorStorage.make_grouped_tensor(2, rows, None, 8, 16, device="cpu", dtype=torch.float32)
    assert uneven.shape == (8, 16)
    assert torch.equal(uneven.first_dims, rows)
    assert uneven.offsets == [0, 32, 128]
    assert torch.equal(uneven.tensor_offsets, torch.tensor([0, 32, 128]))
    assert [tuple(part.shape) for part in uneven.split_into_quantized_tensors()] == [(2, 16), (6, 16)]
    with pytest.raises(ShapeError, match="first_dims"):
        uneven.get_common_first_dim()

    data = torch.arange(6.0)
    vectors = GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=2, tensor_shape=(3,), rowwise_data=data
    )
    assert torch.equal(vectors, data.view(2, 3))


# shapes -> logical shape, numbers of rows, of columns
UNEVEN = {
    "columns": ([(128, 64), (128, 256)], (128, 320), None, [64, 256]),
    "both": ([(64, 128), (128, 256)], (1, 40960), [64, 128], [128, 256]),
    "rows": ([(64, 128), (192, 128)], (256, 128), [64, 192], None),
}
QUANTIZERS = [
    ft.Float8CurrentScalingQuantizer(ft.DType.kFloat8E4M3),
    ft.Float8BlockQuantizer(ft.DType.kFloat8E4M3, rowwise=True, columnwise=True),
    ft.MXFP8Quantizer(ft.DType.kFloat8E4M3),
    ft.NVFP4Quantizer(),
]


@pytest.mark.parametrize("quantizer", [None, *QUANTIZERS], ids=lambda quantizer: type(quantizer).__name__)
@pytest.mark.parametrize("name", UNEVEN)
def test_matrices_of_other_shapes(name, quantizer):
    """By shapes and by numbers on the device; each matrix is as it is by itself."""
    shapes, logical, rows, columns = UNEVEN[name]
    how = {"quantizer": quantizer, "device": "cpu", "dtype": torch.float32}
    made = GroupedTensor.make_grouped_tensor_with_shapes(2, shapes, **how)
    dims = [None if own is None else torch.tensor(own) for own in (rows, columns)]
    again = GroupedTensorStorage.make_grouped_tensor(2, *dims, *logical, **how)
    matrices = [torch.randn(shape) for shape in shapes]
    for grouped in (made, again):
        assert (tuple(grouped.shape), grouped.logical_shape, grouped.tensor_shapes) == (
            logical,
            logical,
            shapes,
        )
        found = [None if own is None else own.tolist() for own in (grouped.first_dims, grouped.last_dims)]
        assert found == [rows, columns]
        assert (grouped.all_same_first_dim(), grouped.all_same_last_dim()) == (rows is None, columns is None)
        assert (grouped.all_same_shape(), grouped.varying_both_dims()) == (False, name == "both")
        for own, ask in ((rows, grouped.get_common_first_dim), (columns, grouped.get_common_last_dim)):
            if own is None:
                assert ask() == 128
            else:
                with pytest.raises(ShapeError, match="_dims: got"):
                    ask()
        assert grouped.tensor_offsets.tolist() == [0, matrices[0].numel(), made.numel()]
        parts = grouped.split_into_quantized_tensors()
        if quantizer is None:
            for part, matrix in zip(parts, matrices, strict=True):
                part.copy_(matrix)
        else:
            grouped.quantize(matrices)
        values = grouped if quantizer is None else grouped.dequantize()
        want = [matrix if quantizer is None else quantizer(matrix).dequantize() for matrix in matrices]
        assert torch.equal(values.flatten(), torch.cat([each.flatten() for each in want]))
        twin = copy.deepcopy(grouped)
        assert twin.tensor_shapes == shapes
    wrong = (n + 1 for n in logical)
    with pytest.raises(ShapeError, match="logical_first_dim, logical_last_dim: got"):
        GroupedTensorStorage.make_grouped_tensor(2, *dims, *wrong, **how)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda quantizer: type(quantizer).__name__)
def test_codes_and_scales_of_all_lie_one_after_the_other(quantizer):
    made = GroupedTensor.make_grouped_tensor_with_shapes(2, [(128, 128)] * 2, quantizer, "cpu", torch.float32)
    matrices = [torch.randn(128, 128), 5 * torch.randn(128, 128)]
    made.quantize(matrices)
    for i, matrix in enumerate(matrices):
        want, found = quantizer(matrix), made.quantized_tensors[i]
        assert torch.equal(found._rowwise_data, want._rowwise_data)
        assert torch.equal(found._rowwise_scale_inv, want._rowwise_scale_inv)
        assert torch.equal(made.dequantize()[i], want.dequantize())
        codes = made.rowwise_data.view(2, -1)[i]
        assert torch.equal(codes, want._rowwise_data.reshape(-1))
    before = made.dequantize()
    made.quantize(matrices[::-1], noop_flag=torch.ones(1))
    assert torch.equal(made.dequantize(), before)


def test_codes_that_are_written_are_transposed_too():
    quantizer = ft.Float8CurrentScalingQuantizer(ft.DType.kFloat8E4M3)
    made = GroupedTensor.make_grouped_tensor_with_shapes(2, [(32, 16)] * 2, quantizer, "cpu", torch.float32)
    other = quantizer(torch.randn(32, 16))
    made.rowwise_data.view(2, -1)[1].copy_(other._rowwise_data.reshape(-1))
    found = made.quantized_tensors[1]
    assert torch.equal(found._columnwise_data, other._columnwise_data)


def test_what_is_refused():
    with pytest.raises(ShapeError, match="shapes"):
        GroupedTensor.make_grouped_tensor_with_shapes(2, [(4, 8), (4,)], dtype=torch.float32)
    with pytest.raises(ShapeError, match="shapes"):
        GroupedTensor.make_grouped_tensor_with_shapes(2, [(4, 8)], dtype=torch.float32)
    with pytest.raises(ArgumentError, match="dtype"):
        GroupedTensor.make_grouped_tensor_with_shapes(1, [(4, 8)])
    made = GroupedTensor.make_grouped_tensor_with_shapes(1, [(4, 8)], device="cpu", dtype=torch.float32)
    with pytest.raises(ArgumentError, match="quantizer"):
        made.quantize([torch.ones(4, 8)])


@pytest.mark.parametrize("one", [False, True], ids=["several", "one"])
@pytest.mark.parametrize("count", [2, 4])
def test_checkpoints_of_other_experts_are_refused_by_torch(one, count):
    """Which names the parameters that do not fit."""
    options = {"bias": False, "device": "cpu"}
    layer = ft.GroupedLinear(3, 8, 16, single_grouped_weight=one, **options)
    other = ft.GroupedLinear(count, 8, 16, single_grouped_weight=not one, **options).state_dict()
    with pytest.raises(RuntimeError, match=r'"weight'):
        layer.load_state_dict(other)
