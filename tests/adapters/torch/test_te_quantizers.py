"""Transformer Engine's quantizers of FP8, and the tensors that they make."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.te_compat.extension_casts import fp8_transpose

from fp8kit.collectives import FakeCollectives
from fp8kit.errors import ArgumentError, ShapeError
from tests.support.tensors import assert_tensor_close

E4M3, E5M2 = ft.DType.kFloat8E4M3, ft.DType.kFloat8E5M2
KINDS = {
    "current": lambda device: ft.Float8CurrentScalingQuantizer(E4M3, device),
    "delayed": lambda device: ft.Float8Quantizer(
        torch.full((1,), 4.0, device=device), torch.zeros(1, device=device), E4M3
    ),
    "rows": lambda _: ft.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "squares": lambda _: ft.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
}
TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


@pytest.fixture
def x(device):
    torch.manual_seed(0)
    return torch.randn(32, 48, device=device)


def codes(values, dtype):
    return values.to(TORCH[dtype]).view(torch.uint8)


@pytest.mark.parametrize(("dtype", "most"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_current_scaling(x, dtype, most):
    held = ft.Float8CurrentScalingQuantizer(dtype, x.device)(x)
    scale = most / x.abs().max()
    assert torch.equal(held._data, codes(x * scale, dtype))
    assert torch.equal(held._rowwise_data, held._data)
    assert torch.equal(held._columnwise_data, held._data.t())
    # one rounding of the quotient, one of its inverse
    assert_tensor_close("inverse", held._scale_inv.view(()), 1 / scale, 2.0**-22 / scale)


def test_scales_that_are_powers_of_two(x):
    held = ft.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True)(x)
    scale = 2.0 ** torch.floor(torch.log2(448 / x.abs().max()))
    assert held._scale_inv.item() == 1 / scale
    assert torch.equal(held._data, codes(x * scale, E4M3))


def test_the_least_amax(x):
    held = ft.Float8CurrentScalingQuantizer(E4M3, amax_epsilon=56.0)(x)
    assert held._scale_inv.item() == 0.125
    assert torch.equal(held._data, codes(x * 8, E4M3))


def test_an_amax_that_somebody_else_has_taken(x):
    """The scale is that amax's, as it is at each cast; a layer multiplies the codes as they are."""
    amax = x.abs().max().view(1)
    quantizer = ft.Float8CurrentScalingQuantizer(E4M3, x.device, use_existing_amax=True, amax=amax)
    usual = ft.Float8CurrentScalingQuantizer(E4M3, x.device)(x)
    held = quantizer(x)
    assert torch.equal(held._data, usual._data)
    assert torch.equal(held._scale_inv, usual._scale_inv)
    layer = ft.Linear(48, 16, device=x.device)
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        assert torch.equal(layer(held), layer(x))
    amax.fill_(56.0)
    assert quantizer(x)._scale_inv.item() == 0.125
    made = ft.Float8CurrentScalingQuantizer(E4M3, x.device, use_existing_amax=True)
    made.amax.fill_(56.0)
    assert torch.equal(made(x)._data, quantizer(x)._data)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_an_amax_of_all_processes(kind):
    """Their parts are cast by the scale of the whole."""
    torch.manual_seed(0)
    whole = torch.randn(32, 48).to(kind)
    whole[-1, -1] = 1e4
    wanted = ft.Float8CurrentScalingQuantizer(E4M3, "cpu")(whole)

    def rank(ranks):
        own = whole.chunk(2)[ranks.rank]
        group = {"with_amax_reduction": True, "amax_reduction_group": ranks}
        held = ft.Float8CurrentScalingQuantizer(E4M3, "cpu", **group)(own)
        alone = ft.Float8CurrentScalingQuantizer(E4M3, "cpu", amax_reduction_group=ranks)(own)
        assert torch.equal(alone._data, ft.Float8CurrentScalingQuantizer(E4M3, "cpu")(own)._data)
        return held

    parts = FakeCollectives(2).run(rank)
    assert torch.equal(torch.cat([part._data for part in parts]), wanted._data)
    assert [part._scale_inv.item() for part in parts] == [wanted._scale_inv.item()] * 2
    with pytest.raises(ArgumentError, match="amax_reduction_group"):
        ft.Float8CurrentScalingQuantizer(E4M3, "cpu", amax_reduction_group="all")


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_that_is_given_and_the_amax_that_is_taken(x, dtype):
    scale, amax = torch.full((1,), 8.0, device=x.device), torch.zeros(1, device=x.device)
    quantizer = ft.Float8Quantizer(scale, amax, dtype)
    held = quantizer(x)
    assert torch.equal(held._data, codes(x * 8, dtype))
    assert held._scale_inv.item() == 0.125
    assert amax.item() == x.abs().max()
    quantizer(x / 2)
    assert amax.item() == x.abs().max()  # the larger one stays
    scale.fill_(4.0)
    held.quantize_(x)
    assert torch.equal(held._data, codes(x * 4, dtype))


@pytest.mark.parametrize("dim", [1, 2])
def test_blocks(dim):
    torch.manual_seed(0)
    w = torch.randn(256, 128)
    quantizer = ft.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)
    held = quantizer(w)
    tiles = w.view(256, 1, 128) if dim == 1 else w.view(2, 128, 128)
    most = tiles.abs().amax((1, 2)) if dim == 2 else tiles.abs().amax(2)[:, 0]
    scale = 2.0 ** torch.floor(torch.log2(448 / most))
    whole = scale.repeat_interleave(256 // len(scale))[:, None]
    assert torch.equal(held._rowwise_data, codes(w * whole, E4M3))
    assert torch.equal(held.dequantize(), held._rowwise_data.view(TORCH[E4M3]).float() / whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (5,), (3, 2, 48), (2, 3, 4, 48)])
def test_the_last_dimension_of_the_transposed_codes_comes_first(kind, shape, device):
    torch.manual_seed(0)
    values = torch.randn(shape, device=device)
    quantizer = KINDS[kind](device)
    held, matrix = quantizer(values), quantizer(values.reshape(-1, *shape[-1:] or (1,)))
    wanted = shape[-1:] + shape[:-1]
    assert held._columnwise_data.shape == quantizer.get_columnwise_shape(shape) == wanted
    assert torch.equal(held._columnwise_data, matrix._columnwise_data.view(wanted))
    if kind != "rows":  # whose codes are cast by other scales
        assert torch.equal(held._columnwise_data, fp8_transpose(held._rowwise_data, held._fp8_dtype))
    assert torch.equal(held.dequantize(), matrix.dequantize().view(shape))
    if kind in ("rows", "squares"):
        sides = {"rowwise_data": None, "rowwise_scale_inv": None}
        assert ft.Float8BlockwiseQTensor(**held.get_metadata() | sides).shape == shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_no_dimension(kind, device):
    """As one of a single element; blocks of MXFP8 and NVFP4 want whole ones."""
    value = torch.tensor(-3.25, device=device, requires_grad=True)
    held = KINDS[kind](device)(value)
    assert held.shape == ()
    assert held.item() == KINDS[kind](device)(value.view(1)).item() != 0
    assert torch.equal(held.view(1, 1).dequantize(), held.dequantize().view(1, 1))
    held.dequantize().backward()
    assert value.grad.item() == 1
    with torch.no_grad():
        held.copy_(torch.tensor(2.0))
    assert held.item() == 2
    assert torch.equal(copy.deepcopy(held.detach()).dequantize(), held.detach().dequantize())
    if kind in ("current", "delayed"):
        known = {"dtype": held.dtype, "shape": ()} | held.get_metadata()
        assert ft.Float8Tensor(**known).item() == 2
    with pytest.raises(ShapeError, match=r"MXFP8Tensor: tensor: got shape \(\)"):
        ft.MXFP8Quantizer(E4M3)(value)


def test_nothing_changes_where_the_flag_is_set(x):
    for quantizer in (
        ft.Float8CurrentScalingQuantizer(E4M3),
        ft.Float8Quantizer(torch.ones(1, device=x.device), torch.zeros(1, device=x.device), E4M3),
    ):
        held = quantizer(x)
        before = held.dequantize().clone()
        held.quantize_(2 * x, noop_flag=torch.ones(1, device=x.device))
        assert torch.equal(held.dequantize(), before)
        held.quantize_(2 * x, noop_flag=torch.zeros(1, device=x.device))
        assert torch.equal(held.dequantize(), quantizer(2 * x).dequantize())


def test_a_weight_of_a_model_that_holds_fp8_takes_the_flag():
    with ft.quantized_model_init(recipe=ft.Float8CurrentScaling()):
        weight = ft.Linear(32, 16, device="cpu").weight
    before = weight.dequantize().clone()
    weight.quantize_(torch.ones(16, 32), noop_flag=torch.ones(1))
    assert torch.equal(weight.dequantize(), before)
    weight.quantize_(torch.ones(16, 32), noop_flag=torch.zeros(1))
    assert torch.equal(weight.dequantize(), torch.ones(16, 32))


def test_over_what_another_tensor_holds(x):
    quantizer = ft.Float8CurrentScalingQuantizer(E4M3)
    out = quantizer.make_empty((32, 48), device=x.device)
    assert not out.dequantize().any()
    assert quantizer.quantize(x, out=out) is out
    assert torch.equal(out._data, quantizer(x)._data)
    with pytest.raises(ShapeError, match="src: got shape"):
        quantizer.update_quantized(x[:16], out)
    with pytest.raises(ArgumentError, match="dst: got"):
        quantizer.update_quantized(x, x)


def test_the_gradient_passes_through(x):
    x.requires_grad_()
    ft.Float8CurrentScalingQuantizer(E4M3)(x).dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_layer_multiplies_the_codes_as_they_are(x):
    layer = ft.Linear(48, 16, device=x.device)
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        assert torch.equal(layer(ft.Float8CurrentScalingQuantizer(E4M3)(x)), layer(x))


def test_taken_apart_and_put_together(x):
    held = ft.Float8CurrentScalingQuantizer(E4M3)(x)
    saved, shells = ft.prepare_for_saving(held, None, x)
    assert all(each is None or type(each) is torch.Tensor for each in saved)
    (again, nothing, plain), left = ft.restore_from_saved(shells, [*saved, x], return_saved_tensors=True)
    assert torch.equal(again.dequantize(), held.dequantize())
    assert nothing is None
    assert plain is x
    assert left == [x]


def test_usages_and_copies():
    quantizer = ft.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=False)
    twin = quantizer.copy()
    twin.set_usage(columnwise=True)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    assert twin.get_usages() == {"rowwise": True, "columnwise": True}
    assert quantizer.dtype == E4M3


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ft.Float8CurrentScalingQuantizer(ft.DType.kFloat32), "fp8_dtype"),
        (lambda: ft.Float8Quantizer(torch.ones(2), torch.zeros(1), E4M3), "scale"),
        (lambda: ft.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=3), "dim"),
        (lambda: ft.Float8CurrentScalingQuantizer(E4M3, rowwise="no"), "rowwise"),
        (lambda: ft.Float8CurrentScalingQuantizer(E4M3, amax=torch.zeros(2)), "amax"),
    ],
)
def test_wrong_arguments(make, word):
    with pytest.raises(ArgumentError, match=word):
        make()
