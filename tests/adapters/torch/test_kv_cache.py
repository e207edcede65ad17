"""Attention over a cache as torch ops, and under ``torch.compile``: the eager bits, and no compilation for a
longer cache."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.kv_cache import cached_attention_, take_step_
from fp8kit_torch.library import text_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from fp8kit.errors import ArgumentError, AutogradError, Fp8kitError, ShapeError
from fp8kit.layers.attention_call import TRACED_LENGTHS
from fp8kit.ops.attention import AttentionSpec
from tests.support.combinations import combinations

from .twins import KINDS, RECIPES, WIDTH, same

PAGED = {"is_paged": True, "total_num_pages": 33, "page_size": 5}
# prompts, steps of one token, one that joins and one that ends; on to where more of the cache is read at once
# (``layers.inference``)
STEPS = [{"a": 5, "b": 3}, {"a": 1, "b": 1}, {"b": 2, "a": 1, "c": 60}, *[{"c": 1, "b": 1}] * 7]


def layer_of(form, device):
    options = {
        "num_gqa_groups": 2,
        "attention_dropout": 0.0,
        "qkv_format": form,
        "fuse_qkv_params": True,
        "attn_mask_type": "padding_causal" if form == "thd" else "causal",
    }
    return ft.MultiheadAttention(WIDTH, 4, **options, layer_number=1, device=device)


def tokens(form, step, device):
    longest, count = max(step.values()), len(step)
    shape = {
        "sbhd": (longest, count, WIDTH),
        "bshd": (count, longest, WIDTH),
        "thd": (sum(step.values()), WIDTH),
    }[form]
    return torch.randn(shape, device=device)


def same_caches(got, want):
    assert (got.sequences, got._written) == (want.sequences, want._written)
    for mine, other in zip(got.convert_paged_to_nonpaged(1), want.convert_paged_to_nonpaged(1), strict=True):
        same(mine, other, "cache")


@pytest.mark.parametrize(
    ("form", "paged", "recipe", "backend"),
    [
        pytest.param("sbhd", {}, "current", "aot_eager", marks=pytest.mark.combinations),
        ("bshd", PAGED, "delayed", "eager"),
        pytest.param("thd", {}, "current", "aot_eager", marks=pytest.mark.combinations),
        pytest.param("thd", PAGED, "high", "aot_eager", marks=pytest.mark.combinations),
        pytest.param("sbhd", PAGED, "current", "inductor", marks=pytest.mark.combinations),
    ],
)
def test_compiled_steps_are_the_eager_ones(device, form, paged, recipe, backend):
    layer = layer_of(form, device)
    angles = ft.RotaryPositionEmbedding(12, device=device)(80)
    caches = [ft.InferenceParams(3, 80, qkv_format=form, device=device, **paged) for _ in range(2)]
    counter = CompileCounterWithBackend(backend)
    function = torch.compile(layer, fullgraph=True, backend=counter)
    counts = []
    for step in STEPS:
        x = tokens(form, step, device)
        for cache in caches:
            cache.pre_step(step)
        with torch.no_grad(), ft.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            want = layer(x, inference_params=caches[0], rotary_pos_emb=angles)
        with torch.no_grad(), ft.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            same(function(x, inference_params=caches[1], rotary_pos_emb=angles), want, step)
        same_caches(caches[1], caches[0])
        counts.append(counter.frame_count)
    assert counts[-1] == counts[2] <= 3  # the first step makes the caches, the others have open sizes
    copied, x = copy.deepcopy(caches), tokens(form, STEPS[-1], device)
    for cache in copied:
        cache.pre_step(STEPS[-1])
    with torch.no_grad(), ft.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        same(
            function(x, inference_params=copied[1], rotary_pos_emb=angles),
            layer(x, inference_params=copied[0], rotary_pos_emb=angles),
            "a copy",
        )
    same_caches(copied[1], copied[0])
    assert caches[1].sequences != copied[1].sequences


@pytest.mark.combinations
def test_eager_and_compiled_steps_take_turns(device):
    options = KINDS["TransformerLayer"] | {"attn_input_format": "bshd", "layer_number": 1}
    layer = ft.TransformerLayer(**options, device=device)
    function = torch.compile(layer, fullgraph=True, backend="aot_eager")
    caches = [ft.InferenceParams(3, 80, qkv_format="bshd", device=device) for _ in range(2)]
    for number, step in enumerate(STEPS):
        x = tokens("bshd", step, device)
        for cache in caches:
            cache.pre_step(step)
        with torch.no_grad():
            same(
                (function, layer)[number % 2](x, inference_params=caches[1]),
                layer(x, inference_params=caches[0]),
                step,
            )
    same_caches(caches[1], caches[0])


def test_what_compiled_steps_refuse(device):
    core = ft.DotProductAttention(4, 8, 2, qkv_format="bshd", layer_number=1, device=device)
    function = torch.compile(core, fullgraph=True, backend="eager")
    cache = ft.InferenceParams(2, 20, qkv_format="bshd", device=device)
    cache.pre_step({"a": 3})
    qkv = [torch.randn(1, 3, heads, 8, device=device) for heads in (4, 2, 2)]
    other = copy.deepcopy(cache)
    with torch.no_grad():
        same(function(*qkv, inference_params=cache), core(*qkv, inference_params=other), "o")
        same_caches(cache, other)
        with pytest.raises(Fp8kitError, match="layer_number: got 1 twice in a step"):
            function(*qkv, inference_params=cache)
        cache.pre_step({"a": 3})
        cache.pre_step({"a": 3})
        with pytest.raises(
            ShapeError,
            match=r"got 1, whose cache holds 3 of sequence 'a', expected the 6 tokens before this step",
        ):
            function(*qkv, inference_params=cache)
        cache.reset()
        cache.pre_step({"a": 3})
        with pytest.raises(
            ShapeError,
            match=r"query_layer: got batch 1 and 2 positions, expected batch 1 and at least 3 positions",
        ):
            function(*(t[:, :2] for t in qkv), inference_params=cache)
        function(*qkv, inference_params=cache)
    qkv[0].requires_grad_()
    cache.pre_step({"a": 3})
    with pytest.raises(
        # torch names the arguments of the error in other ways in each version, in this order
        Exception,
        match=r"'inference_params.*'a call with gradients on.*'inference: eval\(\), or no_grad",
    ):
        function(*qkv, inference_params=cache)
    assert cache.sequences not in cache._written.values()
    with pytest.raises(AutogradError):
        core(*qkv, inference_params=cache)


@combinations({"form": ["sbhd", "bshd", "thd"]}, usual=["thd"])
def test_opcheck(device, form, monkeypatch):
    params = ft.InferenceParams(
        3,
        20,
        2,
        8,
        torch.float32,
        is_paged=True,
        total_num_pages=20,
        page_size=4,
        qkv_format=form,
        device=device,
    )
    params.pre_step({"a": 5, "b": 3})
    q, k, v = (
        tokens(form, {"a": 5, "b": 3}, device)[..., : heads * 8].unflatten(-1, (heads, 8)).clone()
        for heads in (4, 2, 2)
    )
    given = params.inputs(1, 2, (8, 8), params.dtype)
    caches = [given.pop("k_cache").zero_(), given.pop("v_cache").zero_()]
    inputs = {"q": q, "k": k, "v": v} | {name: tensor.clone() for name, tensor in given.items()}
    spec = AttentionSpec(
        4,
        8,
        2,
        form,
        "padding_causal_bottom_right",
        layout="separate",
        max_seqlen_q=TRACED_LENGTHS[0],
        max_seqlen_kv=TRACED_LENGTHS[1],
    )
    text = text_of("cached_attention", spec, (*inputs, "k_cache", "v_cache"))
    with monkeypatch.context() as patched:
        patched.setattr(params, "stepped", lambda number: None)  # the checks take the step several times
        longest = torch.zeros(2, dtype=torch.int64)
        opcheck(take_step_, (longest, q, params.handle, 1, text))
        assert longest.tolist() == [0, 0]
        take_step_(longest, q, params.handle, 1, text)
    opcheck(cached_attention_, (list(inputs.values()), *[cache.clone() for cache in caches], longest, text))

    o = cached_attention_(list(inputs.values()), *caches, longest, text)
    with torch.no_grad():
        core = ft.DotProductAttention(
            4,
            8,
            2,
            qkv_format=form,
            attn_mask_type="padding_causal" if form == "thd" else "causal",
            layer_number=1,
            device=device,
        )
        own = ft.InferenceParams(
            3,
            20,
            2,
            8,
            torch.float32,
            is_paged=True,
            total_num_pages=20,
            page_size=4,
            qkv_format=form,
            device=device,
        )
        own.pre_step({"a": 5, "b": 3})
        same(o, core(q, k, v, inference_params=own), "o")
    params.stepped(1)
    same_caches(params, own)


def test_what_the_host_reads_stays_with_it():
    """Whatever torch's default device is."""
    with torch.device("meta"):
        params = ft.InferenceParams(
            2, 16, 4, WIDTH // 4, qkv_format="bshd", device="cpu", dtype=torch.float32
        )
        state = ft.Linear(16, 16, device="cpu").fp8_meta
    assert params.handle.device.type == "cpu"
    assert all(kept.handle.device.type == "cpu" for kept in state.values())


def test_a_handle_of_nothing():
    params = ft.InferenceParams(1, 4, qkv_format="bshd", device="cpu")
    handle = params.handle
    spec = AttentionSpec(2, 8, 2, "bshd", "padding", max_seqlen_kv=1)
    text = text_of("cached_attention", spec, ("q", "k", "v"))
    del params
    with pytest.raises(
        ArgumentError, match=r"^take_step_: handle: got \d+, expected InferenceParams that are alive"
    ):
        take_step_(torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1, 2, 8), handle, 1, text)
