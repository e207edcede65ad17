"""Errors of a layer's call are the layer's, whichever of its parts or operations finds what is wrong."""

from __future__ import annotations

import fp8kit_torch as ft
import ml_dtypes
import numpy as np
import pytest
import torch

from fp8kit import nn
from fp8kit.autocast import autocast
from fp8kit.errors import FormatError
from fp8kit.recipe import DelayedScaling

H, HEADS = 32, 4
# what makes a layer in either frontend, and what it calls its input
LAYERS = {
    "TransformerLayer": (lambda here: here.TransformerLayer(H, 48, HEADS, device="cpu"), "hidden_states"),
    "TransformerLayer, decoder": (
        lambda here: here.TransformerLayer(H, 48, HEADS, layer_type="decoder", device="cpu"),
        "hidden_states",
    ),
    "TransformerLayer, output norm": (
        lambda here: here.TransformerLayer(H, 48, HEADS, output_layernorm=True, device="cpu"),
        "hidden_states",
    ),
    "MultiheadAttention": (lambda here: here.MultiheadAttention(H, HEADS, device="cpu"), "hidden_states"),
    "MultiheadAttention, normed": (
        lambda here: here.MultiheadAttention(H, HEADS, input_layernorm=True, device="cpu"),
        "hidden_states",
    ),
    "LayerNormMLP": (lambda here: here.LayerNormMLP(H, 48, device="cpu"), "inp"),
    "LayerNormLinear": (lambda here: here.LayerNormLinear(H, 48, device="cpu"), "inp"),
    "Linear": (lambda here: here.Linear(H, 48, device="cpu"), "inp"),
    "LayerNorm": (lambda here: here.LayerNorm(H, device="cpu"), "inp"),
    "RMSNorm": (lambda here: here.RMSNorm(H, device="cpu"), "inp"),
}


def refused(name, here, x, words):
    make, argument = LAYERS[name]
    layer = make(here)
    more = {"encoder_output": x} if "decoder" in name else {}
    for enabled in (False, True):
        scope = (ft.autocast if here is ft else autocast)(enabled=enabled, recipe=DelayedScaling())
        with pytest.raises(FormatError) as caught, scope:
            layer(x, **more)
        assert str(caught.value).startswith(f"{name.partition(',')[0]}: {argument}: got {words}, expected ")


CAST = {("LayerNorm", "bfloat16"), ("RMSNorm", "bfloat16")}  # norms of torch cast these


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int32", "bool", "complex64"])
@pytest.mark.parametrize("name", LAYERS)
def test_torch(name, dtype):
    if (name, dtype) in CAST:
        assert LAYERS[name][0](ft)(torch.ones(4, 2, H, dtype=torch.bfloat16)).dtype == torch.float32
        return
    refused(name, ft, torch.ones(4, 2, H).to(getattr(torch, dtype)), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int32", "bool"])
@pytest.mark.parametrize("name", LAYERS)
def test_native(name, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    refused(name, nn, np.ones((4, 2, H)).astype(kind), dtype)


def test_a_parameter_of_a_part_is_named_by_its_path():
    layer = ft.TransformerLayer(H, 48, HEADS, device="cpu")
    layer.layernorm_mlp.to(torch.bfloat16)
    with pytest.raises(
        FormatError, match=r"^TransformerLayer: hidden_states: .*, as layernorm_mlp\.layer_norm_weight: cast"
    ):
        layer(torch.ones(4, 2, H))
    layer = ft.MultiheadAttention(H, HEADS, device="cpu")
    layer.proj.bias.data = layer.proj.bias.data.double()
    with pytest.raises(
        FormatError, match=r"^MultiheadAttention: proj\.bias: got float64, expected float32, as hidden_states"
    ):
        layer(torch.ones(4, 2, H))
