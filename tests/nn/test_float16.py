"""The layers made of others in float16: the tests of their own files, in one more dtype."""

from __future__ import annotations

import pytest

from tests.nn import test_attention_layers, test_rope, test_transformer

FLOAT16 = "float16"


@pytest.mark.parametrize(
    ("mode", "kind", "form"),
    [
        ("high", "LayerNorm", "pre"),
        ("high", "RMSNorm", "post_residual"),
        ("delayed", "LayerNorm", "pre"),
        ("current", "RMSNorm", "pre"),
        ("block", "LayerNorm", "pre"),
    ],
)
def test_transformer_layer(device, mode, kind, form):
    test_transformer.test_transformer_layer(device, mode, FLOAT16, kind, form)


@pytest.mark.parametrize("mask", test_transformer.MASKS)
def test_masks(device, mask):
    test_transformer.test_dot_product_attention(device, FLOAT16, "sbhd", mask, 2)


@pytest.mark.parametrize("name", test_attention_layers.CASES)
def test_kinds_of_attention(device, name):
    test_attention_layers.test_dot_product_attention(device, name, FLOAT16)


@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_rotary_positions(device, form):
    test_rope.test_apply_rotary_pos_emb(device, FLOAT16, form, 0.5, False)
