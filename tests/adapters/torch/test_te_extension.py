"""Casts and activations of ``transformer_engine_torch``."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import fusible
from fp8kit_torch.te_compat import extension_casts as tex

from fp8kit.errors import ShapeError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close

NAMES = {
    "gelu": "GELU",
    "geglu": "GEGLU",
    "qgelu": "QGELU",
    "qgeglu": "QGEGLU",
    "relu": "ReLU",
    "reglu": "ReGLU",
    "srelu": "SReLU",
    "sreglu": "SReGLU",
    "silu": "SiLU",
    "swiglu": "SwiGLU",
    "glu": "GLU",
    "situglu": "SiTUGLU",
    "clamped_swiglu": "ClampedSwiGLU",
}


@pytest.fixture
def quantizer():
    return ft.Float8CurrentScalingQuantizer(ft.DType.kFloat8E4M3)


@pytest.mark.parametrize("name", NAMES)
def test_activations_and_their_gradients(device, name):
    x = torch.randn(8, 32, device=device, requires_grad=True)
    y = getattr(fusible, NAMES[name])()(x)
    g = torch.randn_like(y)
    backward = "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"
    assert torch.equal(tex.ACTIVATIONS[name](x, None), y)
    assert torch.equal(tex.ACTIVATIONS[backward](g, x, None), torch.autograd.grad(y, x, g)[0])


def test_an_activations_result_is_cast(quantizer):
    x = torch.randn(16, 32)
    assert torch.equal(tex.swiglu(x, quantizer)._data, quantizer(tex.swiglu(x))._data)
    dbias, dx = tex.dbias_dgelu(torch.ones(16, 32), x, quantizer)
    plain = tex.dgelu(torch.ones(16, 32), x)
    assert torch.equal(dx._data, quantizer(plain)._data)
    assert_tensor_close("dbias", dbias, plain.sum(0), sum_slack(plain.abs().sum(0), 16))


def test_an_activations_numbers():
    x = 9 * torch.randn(4, 8)
    wanted = fusible.ClampedSwiGLU(limit=3.0, alpha=1.702, glu_linear_offset=0.5)(x)
    assert torch.equal(tex.clamped_swiglu(x, None, glu_linear_offset=0.5, limit=3.0), wanted)
    assert torch.equal(tex.clamped_swiglu(x, None, 3.0, 1.702, 0.5), wanted)
    with pytest.raises(TypeError, match="expected none"):
        tex.gelu(x, None, 3.0)


def test_casts(quantizer):
    x = torch.randn(48, 32)
    held = tex.quantize(x, quantizer)
    assert torch.equal(tex.dequantize(held, ft.DType.kBFloat16), held.dequantize(dtype=torch.bfloat16))
    tex.quantize(2 * x, quantizer, held, torch.ones(1))
    assert torch.equal(held._data, quantizer(x)._data)
    tex.quantize(x.flip(0), quantizer, held)
    assert torch.equal(held._data, quantizer(x.flip(0))._data)
    parts = tex.split_quantize(x, [16, 32], [quantizer, quantizer])
    assert torch.equal(parts[1]._data, quantizer(x[16:])._data)
    with pytest.raises(ShapeError, match="quantizer_list"):
        tex.multi_tensor_quantize([x], [])


def test_sums_amaxes_and_transposes(quantizer):
    x = torch.randn(48, 32)
    dbias, held = tex.bgrad_quantize(x, quantizer)
    assert_tensor_close("dbias", dbias, x.sum(0), sum_slack(x.abs().sum(0), 48))
    amax = torch.zeros(1)
    tex.compute_amax(x, amax)
    assert amax.item() == x.abs().max()
    assert torch.equal(tex.fp8_transpose(held._data, held._fp8_dtype), held._columnwise_data)
    assert torch.equal(tex.swap_first_dims(x.view(2, 24, 32)), x.view(2, 24, 32).transpose(0, 1))
