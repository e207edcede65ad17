"""Messages in which a reader stumbled over the words: they say what to give instead."""

from __future__ import annotations

import fp8kit_jax.flax as ff
import fp8kit_torch as ft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import nn
from fp8kit.errors import ArgumentError, FormatError, ShapeError


@pytest.mark.parametrize(
    ("here", "ones"), [(nn, lambda *n: np.ones(n, np.float32)), (ft, torch.ones)], ids=["native", "torch"]
)
def test_masks(here, ones):
    layer, x = here.TransformerLayer(32, 48, 4, device="cpu"), ones(4, 2, 32)
    known = (
        r"got 'casual', expected one of 'no_mask', 'causal', .*'padding,causal', .*; did you mean causal\?"
    )
    with pytest.raises(ArgumentError, match=known):
        layer(x, self_attn_mask_type="casual")


def test_a_bool_is_called_bool():
    with pytest.raises(FormatError, match="x: got bool, expected one of"):
        fk.quantize(np.ones(3, bool))
    assert fk.formats.dtype("bool") is fk.formats.dtype(np.bool_) is fk.formats.dtype(torch.bool)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (
            [(2, 4, 3, 8), (2, 4, 2, 8)],
            r"query: got shape \(2, 4, 3, 8\), expected \(\.\.\., 4, 8\), by num_att",
        ),
        (
            [(2, 4, 4, 8), (2, 4, 4, 8)],
            r"value: got shape \(2, 4, 4, 8\), expected \(\.\.\., 2, 8\), by num_gqa",
        ),
        ([(2, 4, 4, 8)], r"query, key and value: got 1 arrays, expected 3, with qkv_layout 'bshd_bshd_bshd'"),
    ],
)
def test_flax_heads(shapes, words):
    module = ff.DotProductAttention(
        head_dim=8, num_attention_heads=4, num_gqa_groups=2, transpose_batch_sequence=False
    )
    query, *rest = [jnp.ones(shape) for shape in shapes]
    with pytest.raises(ShapeError, match=f"^DotProductAttention: {words}"):
        module.init(jax.random.key(0), query, *rest, *rest)
