"""Quantised tensors made of what others say of themselves: metadata, ``make_like``, other dtypes, memory that
is let go; and products of several pairs."""

from __future__ import annotations

import pickle

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.te_compat import factory_zoo
from fp8kit_torch.te_compat.gemms import general_gemm, general_grouped_gemm

from fp8kit.errors import FormatError, ShapeError, UnsupportedError
from fp8kit.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling

E4M3 = ft.DType.kFloat8E4M3
MADE = {
    "current": lambda: ft.Float8CurrentScalingQuantizer(E4M3),
    "rows": lambda: ft.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "squares": lambda: ft.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda: ft.MXFP8Quantizer(E4M3),
}


@pytest.fixture
def w(everywhere):
    torch.manual_seed(0)
    return torch.randn(256, 128)


@pytest.mark.parametrize("name", MADE)
def test_a_tensor_is_made_of_its_metadata(name, w):
    held = MADE[name]()(w)
    again = type(held)(shape=held.shape, dtype=held.dtype, **held.get_metadata())
    assert type(again) is type(held)
    assert torch.equal(again.dequantize(), held.dequantize())
    assert again._rowwise_data.data_ptr() == held._rowwise_data.data_ptr()
    assert torch.equal(again._columnwise_data, held._columnwise_data)
    assert again._get_quantizer() is held._quantizer
    layer = ft.Linear(128, 32)
    recipe = {"current": ft.Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling()}
    with ft.autocast(recipe=recipe.get(name, ft.Float8BlockScaling())):
        assert torch.equal(layer(again), layer(held))


def test_one_side_of_blocks_is_enough(w):
    held = MADE["squares"]()(w)
    known = held.get_metadata() | {"rowwise_data": None, "rowwise_scale_inv": None}
    assert torch.equal(ft.Float8BlockwiseQTensor(**known).dequantize(), held.dequantize())
    with pytest.raises(FormatError, match="one side"):
        ft.Float8BlockwiseQTensor(**known | {"columnwise_data": None})
    with pytest.raises(FormatError, match="float32"):
        ft.Float8BlockwiseQTensor(**known | {"columnwise_scale_inv": torch.ones(1)})


@pytest.mark.parametrize("name", MADE)
def test_others_of_the_same_codes(name, w):
    held = MADE[name]()(w)
    like = type(held).make_like(held, dtype=torch.bfloat16, requires_grad=True)
    assert (type(like), like.dtype, like.requires_grad) == (type(held), torch.bfloat16, True)
    assert torch.equal(like.dequantize(dtype=torch.float32), held.dequantize())
    assert torch.equal(held.to_dtype(torch.float16).dequantize(), held.dequantize(dtype=torch.float16))
    shaped = type(held).make_like(held, shape=(2, 128, 128))
    assert torch.equal(shaped.dequantize(), held.dequantize().view(2, 128, 128))
    with pytest.raises(ShapeError, match="make_like: shape"):
        type(held).make_like(held, shape=(3, 128))


def test_codes_in_anothers_place(w):
    held, other = MADE["current"]()(w), MADE["current"]()(2 * w.flip(0))
    like = ft.Float8Tensor.make_like(held, data=other._data)
    assert torch.equal(like._data, other._data)
    assert torch.equal(like._scale_inv, held._scale_inv)
    assert torch.equal(like._transpose, other._transpose)
    assert not torch.equal(held._data, other._data)
    held.update_usage(columnwise_usage=False)
    both = ft.Float8Tensor.make_like(held, data=other._data, data_transpose=other._transpose)
    assert torch.equal(both._transpose, other._transpose)
    assert held.get_usages() == {"rowwise": True, "columnwise": False}


BLOCKS = [
    ft.MXFP8Quantizer(E4M3, columnwise=False),
    ft.MXFP8Quantizer(ft.DType.kFloat8E5M2, with_2d_quantization=True),
    ft.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    ft.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False),
    ft.NVFP4Quantizer(with_2d_quantization=True),
    ft.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"),
    ft.NVFP4Quantizer(row_scaled_nvfp4=True, stochastic_rounding=True),
]


@pytest.mark.parametrize("quantizer", BLOCKS, ids=lambda each: type(each).__name__)
def test_a_loaded_tensor_of_blocks_knows_how_it_was_cast(quantizer, w):
    loaded = pickle.loads(pickle.dumps(quantizer(w)))
    again = loaded._get_quantizer()
    assert type(again) is type(quantizer)
    assert again.how() == quantizer.how()
    assert again.get_usages() == quantizer.get_usages()


@pytest.mark.parametrize("name", MADE)
def test_memory_that_is_let_go(name, w):
    held, other = MADE[name]()(w), MADE[name]()(w)
    held.clear()
    assert sum(part.numel() for part in held._parts.values()) == 0
    held.data = other
    assert torch.equal(held.dequantize(), other.dequantize())


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_products_of_several_pairs(layout, in_fp8):
    torch.manual_seed(0)
    splits = [16, 0, 32]
    cast = ft.Float8CurrentScalingQuantizer(E4M3) if in_fp8 else (lambda values: values)
    weights, x, g = (
        torch.randn(3, 48, 64),
        torch.randn(48, 64).split(splits),
        torch.randn(48, 48).split(splits),
    )
    a, b = {"TN": (weights, x), "NN": (weights, g), "NT": (x, g)}[layout]
    a, b = ([cast(each) if each.numel() else each for each in tensors] for tensors in (a, b))
    width = 48 if layout == "TN" else 64
    whole = torch.full((48, width), 7.0)
    if layout == "NT":
        out, one = [torch.full((48, 64), 7.0) for _ in splits], False
    else:
        out, one = [whole], True
    general_grouped_gemm(a, b, out, None, torch.float32, layout, splits, single_output=one)
    parts = whole.split(splits) if one else out
    for left, right, found in zip(a, b, parts, strict=True):
        want = general_gemm(left, right, layout=layout)[0] if right.numel() else torch.zeros_like(found)
        assert torch.equal(found, want)


def test_several_products_biases_and_casts():
    a, b = torch.randn(2, 32, 16), torch.randn(2, 8, 16)
    bias, out = torch.randn(2, 32), [torch.empty(8, 32) for _ in range(2)]
    quantizers = [ft.Float8CurrentScalingQuantizer(E4M3), None]
    found, _, inner = general_grouped_gemm(
        a, b, out, quantizers, torch.float32, gelu=True, bias=bias, use_bias=True
    )
    for i, quantizer in enumerate(quantizers):
        want = general_gemm(a[i], b[i], bias=bias[i], gelu=True, quantization_params=quantizer)
        first, second = (
            y.dequantize() if isinstance(y, ft.QuantizedTensor) else y for y in (found[i], want[0])
        )
        assert torch.equal(first, second)
        assert torch.equal(inner[i], want[2])
    grads = general_grouped_gemm(
        b,
        torch.randn(2, 8, 32),
        [torch.empty(32, 16) for _ in range(2)],
        None,
        None,
        "NT",
        grad=True,
        bias=bias,
        use_bias=True,
    )[1]
    assert [tuple(each.shape) for each in grads] == [(32,), (32,)]
    with pytest.raises(ShapeError, match="as many of each"):
        general_grouped_gemm(a, b[:1], out, None, None)
    with pytest.raises(ShapeError, match="single_output"):
        general_grouped_gemm(a, b, out, None, None, single_output=True)


# --- functions that mix formats -----------------------------------------------------------------------------


def results(recipe):
    torch.manual_seed(0)
    layer = ft.Linear(128, 128, device="cpu")
    x = torch.randn(128, 128, requires_grad=True)
    with ft.autocast(recipe is not None, recipe=recipe):
        y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def test_forward_in_one_format_and_backward_in_another():
    plain, mx, fp4 = (results(recipe) for recipe in (None, MXFP8BlockScaling(), NVFP4BlockScaling()))
    forward = {
        "high_precision_fwd_mxfp8_bwd_factory": plain,
        "mxfp8_fwd_high_precision_bwd_factory": mx,
        "mxfp8_fwd_nvfp4_bwd_factory": mx,
    }
    for name, want in forward.items():
        y, dx = results(CustomRecipe(qfactory=getattr(factory_zoo, name)))
        assert torch.equal(y, want[0]), name
        assert not torch.equal(dx, want[1]), name
    y, _ = results(CustomRecipe(qfactory=factory_zoo.nvfp4_1d_weight_factory))
    assert not torch.equal(y, fp4[0])
    # weights by rows of 16 have less error than those by squares
    assert (y - plain[0]).norm() < (fp4[0] - plain[0]).norm()


def test_a_hybrid_casts_the_tensor_itself():
    one = MADE["mxfp8"]()
    with pytest.raises(UnsupportedError, match="columnwise_source: got rowwise_dequantized"):
        ft.HybridQuantizer(
            rowwise_quantizer=one, columnwise_quantizer=one, columnwise_source="rowwise_dequantized"
        )
