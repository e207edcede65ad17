"""Caches, steps and calls that inference refuses, and what they leave as it is."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from fp8kit import nn
from fp8kit.autocast import autocast
from fp8kit.autograd import no_grad, tensor
from fp8kit.errors import ArgumentError, AutogradError, FormatError, Fp8kitError, ShapeError
from fp8kit.recipe import DelayedScaling
from fp8kit.testing.compare import assert_close, assert_same_bits
from tests.support.caches import GROUPS, HEADS, HIDDEN, D, layer_of, params
from tests.support.layers import draw

U = 2.0**-24


MAKE = {
    "max_batch_size": ({"max_batch_size": 0}, "max_batch_size: got 0"),
    "qkv_format": ({"qkv_format": "hsbd"}, "qkv_format: got 'hsbd', expected one of sbhd, bshd, thd"),
    "page_size": ({"is_paged": True, "total_num_pages": 4}, "page_size: missing"),
    "no_page": ({"page_size": 0}, "page_size: got 0"),
    "manager": ({"custom_cache_manager": "mine"}, "custom_cache_manager: got 'mine'"),
    "dtype": ({"dtype": "float64"}, "float64"),
}


@pytest.mark.parametrize("name", MAKE)
def test_wrong_caches_are_refused(name):
    options, said = MAKE[name]
    with pytest.raises(Fp8kitError, match=said):
        nn.InferenceParams(**({"max_batch_size": 2, "max_sequence_length": 8, "device": "cpu"} | options))


ANNOUNCE = {
    "nothing": ({}, "0 sequences"),
    "list": ([1, 2], "step_dict: got list"),
    "many": (dict.fromkeys("abcd", 1), "4 sequences"),
    "zero": ({"a": 0}, "step_dict\\['a'\\]: got 0"),
    "long": ({"a": 9}, "at most max_ctx_len = 8"),
    "full": ({"a": 6}, "at most 8 with the 3 there are"),
}


@pytest.mark.parametrize("name", ANNOUNCE)
def test_wrong_steps_are_refused(name):
    counts, said = ANNOUNCE[name]
    cache = nn.InferenceParams(3, 8, device="cpu")
    cache.pre_step({"a": 3})
    with pytest.raises(Fp8kitError, match=said):
        cache.pre_step(counts)
    assert cache.sequences == {"a": 3}


CALLS = {
    "no_step": ({}, {}, None, "no step, expected pre_step"),
    "no_number": ({"layer_number": None}, {}, {"a": 2}, "layer_number: missing"),
    "format": (
        {"qkv_format": "sbhd"},
        {},
        {"a": 2},
        "qkv_format: got 'sbhd', expected 'bshd' as inference_params",
    ),
    "batch": ({}, {}, {"a": 2, "b": 1}, "batch 1 and 2 positions, expected batch 2"),
    "rows": ({}, {}, {"a": 3}, "expected batch 1 and at least 3 positions"),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, {}, {"a": 2}, "attn_mask_type: got 'arbitrary'"),
    "cross": ({"attention_type": "cross"}, {}, {"a": 2}, "attention_type"),
    "lengths": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": np.array([0, 1], np.int32)},
        {"a": 2},
        "cu_seqlens_q: got \\[0, 1\\], expected None, or \\[0, 2\\]",
    ),
    "bias": ({}, {"core_attention_bias_type": "post_scale_bias"}, {"a": 2}, "core_attention_bias_type"),
    "heads": ({"num_gqa_groups": 4}, {}, {"a": 2}, "num_heads_kv: got 4, expected 2 as inference_params"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_a_cache_cannot_serve_are_refused(name):
    options, call, counts, said = CALLS[name]
    core = nn.DotProductAttention(
        HEADS, D, **({"num_gqa_groups": GROUPS, "qkv_format": "bshd", "layer_number": 1} | options)
    )
    cache = nn.InferenceParams(2, 8, num_heads_kv=GROUPS, head_dim_k=D, dtype="float32", device="cpu")
    if counts is not None:
        cache.pre_step(counts)
    heads = (HEADS, core.num_gqa_groups, core.num_gqa_groups)
    q, k, v = (np.ones((1, 2, h, D), np.float32) for h in heads)
    with no_grad(), pytest.raises(Fp8kitError, match=said):
        core(q, k, v, inference_params=cache, **call)


def test_a_cache_of_another_dtype_is_refused_before_anything_runs(device):
    """Two layers of one number, of different dtypes: the second one's projections do not run."""
    cache, x = nn.InferenceParams(1, 8, qkv_format="bshd", device=device), np.ones((1, 2, HIDDEN), np.float32)
    for step, dtype in enumerate(("float32", "float16")):
        layer = layer_of("bshd", device, dtype=dtype)
        cache.pre_step({0: 2})
        expected = (
            pytest.raises(FormatError, match=r"k_cache: got .*float32, expected .*float16")
            if step
            else contextlib.nullcontext()
        )
        with no_grad(), autocast(recipe=DelayedScaling()), expected:
            layer(tensor(x, dtype=dtype, device=device), inference_params=cache)
        assert bool(layer.self_attention.layernorm_qkv.fp8_meta) is not bool(step)


def test_too_few_angles_are_refused():
    layer, cache = layer_of("bshd", "cpu"), params("bshd", "cpu")
    freqs = nn.RotaryPositionEmbedding(D, device="cpu")(4)
    cache.pre_step({"a": 5})
    with (
        no_grad(),
        pytest.raises(
            Fp8kitError,
            match="rotary_pos_emb: got 4 positions, expected at least the 5 of the longest sequence",
        ),
    ):
        layer(np.ones((1, 5, HIDDEN), np.float32), rotary_pos_emb=freqs, inference_params=cache)


def test_a_step_is_taken_once_and_without_gradients():
    core = nn.DotProductAttention(HEADS, D, qkv_format="bshd", layer_number=1)
    cache = nn.InferenceParams(2, 8, device="cpu")
    cache.pre_step({"a": 2})
    x = np.ones((1, 2, HEADS, D), np.float32)
    with pytest.raises(
        AutogradError, match="DotProductAttention: inference_params: got a call with gradients on"
    ):
        core(tensor(x, requires_grad=True), x, x, inference_params=cache)
    with pytest.raises(FormatError, match=r"attention: k: got float16, expected float32"):
        core(x, x.astype(np.float16), x, inference_params=cache)
    assert cache._caches == {}  # a cache would have the refused call's dtype
    want = core(x, x, x).numpy()  # the refused call was no step
    assert_close(
        "o", core(x, x, x, inference_params=cache).numpy(), want.astype(np.float64), "float32", 64 * D * U
    )
    with pytest.raises(
        Fp8kitError,
        match="1 twice in a step, expected pre_step before each step, and a number of its own for each layer",
    ):
        core(x, x, x, inference_params=cache)


@pytest.mark.parametrize("kind", ["DotProductAttention", "MultiheadAttention", "TransformerLayer"])
def test_refusals_name_what_the_caller_of_the_layer_gave(kind):
    own = "attn_input_format" if kind == "TransformerLayer" else "qkv_format"
    tokens = "query_layer" if kind == "DotProductAttention" else "hidden_states"
    sizes = {"DotProductAttention": (4, 8), "MultiheadAttention": (32, 4), "TransformerLayer": (32, 64, 4)}[
        kind
    ]

    def call(form, cached, shape):
        layer = getattr(nn, kind)(*sizes, layer_number=1, device="cpu", **{own: form})
        x = tensor(np.ones((*shape, 32), np.float32), requires_grad=True, device="cpu")
        cache = nn.InferenceParams(2, 8, qkv_format=cached, device="cpu")
        cache.pre_step({"a": 3, "b": 2})
        layers = [x.reshape(*shape, 4, 8)] * 3 if kind == "DotProductAttention" else [x]
        layer(*layers, inference_params=cache)

    told = "got a call with gradients on, expected inference: eval\\(\\), or no_grad"
    with pytest.raises(AutogradError, match=f"^{kind}: inference_params: {told}"):
        call("bshd", "bshd", (2, 3))
    with no_grad():
        with pytest.raises(
            ShapeError, match=f"^{kind}: {tokens}: got batch 2 and 2 positions, expected batch 2"
        ):
            call("bshd", "bshd", (2, 2))
        with pytest.raises(ShapeError, match=f"^{kind}: {tokens}: got 2 tokens, expected at least 5"):
            call("thd", "thd", (2,))
        with pytest.raises(
            ArgumentError, match=f"^{kind}: {own}: got 'sbhd', expected 'bshd' as inference_p"
        ):
            call("sbhd", "bshd", (3, 2))


def test_a_step_that_a_layer_left_out_is_no_hole():
    """The cache would hold memory that nothing has written. A sequence that ends and comes back begins
    anew."""
    core, other = (nn.DotProductAttention(HEADS, D, qkv_format="bshd", layer_number=n) for n in (1, 2))
    cache = nn.InferenceParams(2, 8, device="cpu")
    x = draw(1, (1, 2, HEADS, D), "float32")

    def step(layer):
        return layer(x, x, x, inference_params=cache).numpy()

    cache.pre_step({"a": 2})
    want = step(core)
    cache.pre_step({"a": 2})
    step(core)
    with pytest.raises(
        ShapeError,
        match="layer_number: got 2, whose cache holds 0 of sequence 'a', expected the 2 tokens before",
    ):
        step(other)
    cache.pre_step({"a": 2})
    cache.pre_step({"a": 2})
    with pytest.raises(
        ShapeError,
        match="layer_number: got 1, whose cache holds 4 of sequence 'a', expected the 6 tokens before",
    ):
        step(core)
    cache.pre_step({"b": 2})
    cache.pre_step({"a": 2})
    assert_same_bits("core", step(core), want)
    cache.reset()
    cache.pre_step({"a": 2})
    assert_same_bits("other", step(other), want)


def test_a_step_that_cannot_be_sent_changes_nothing(monkeypatch):
    core = nn.DotProductAttention(HEADS, D, qkv_format="bshd", layer_number=1)
    cache = params("bshd", "cpu", paged=True)
    x = draw(1, (1, 4, HEADS, D), "float32")
    cache.pre_step({"a": 4})
    before = (
        dict(cache.sequences),
        {name: list(pages) for name, pages in cache._pages.items()},
        list(cache._free),
        cache.cu_seqlens_kv,
    )
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_upload", lambda host: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            cache.pre_step({"b": 7, "a": 3})
    assert before == (cache.sequences, cache._pages, cache._free, cache.cu_seqlens_kv)
    want = core(x, x, x).numpy()
    assert_close(
        "o", core(x, x, x, inference_params=cache).numpy(), want.astype(np.float64), "float32", 64 * D * U
    )
