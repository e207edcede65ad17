"""Modules through the torch frontend and through the native one: outputs, gradients and FP8 state are the
same bits."""

from __future__ import annotations

import fp8kit_torch as ft
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import nn
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from fp8kit.testing import assert_close, sum_slack
from tests.support.combinations import combinations
from tests.support.tensors import assert_tensor_close, largest

from .twins import (
    KINDS,
    RECIPES,
    WIDTH,
    batches,
    native_step,
    numpy_of,
    same,
    same_state,
    same_steps,
    scope,
    torch_step,
    twins,
)


@combinations(
    {"kind": ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"], "recipe": RECIPES.keys()},
    usual=[
        *(f"TransformerLayer-{recipe}" for recipe in RECIPES),
        "Linear-delayed",
        "LayerNormLinear-current",
        "LayerNormMLP-block",
    ],
)
def test_layers(device, kind, recipe):
    ours, native = twins(kind, device)
    same_steps(ours, native, ours, RECIPES[recipe], device, around=RECIPES[recipe])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms(device, kind):
    ours, native = twins(kind, device)
    same_steps(ours, native, ours, None, device)


@pytest.mark.parametrize("recipe", ["high", "delayed", "current"])
def test_bfloat16(device, recipe):
    ours, native = twins(
        "TransformerLayer", device, "bfloat16", normalization="RMSNorm", activation="swiglu", bias=False
    )
    same_steps(ours, native, ours, RECIPES[recipe], device, "bfloat16", around=RECIPES[recipe])


@pytest.mark.parametrize(
    "options",
    [
        {"apply_residual_connection_post_layernorm": True},
        {"output_layernorm": True, "attn_input_format": "bshd"},
        {"fuse_qkv_params": True, "num_gqa_groups": 4, "window_size": (2, 0)},
        {"softmax_type": "off-by-one", "self_attn_mask_type": "no_mask", "zero_centered_gamma": True},
        {"fuse_qkv_params": True},
        {
            "fuse_qkv_params": True,
            "qkv_weight_interleaved": False,
            "qk_norm_type": "RMSNorm",
            "qk_norm_before_rope": True,
        },
        {"qk_norm_type": "L2Normalization", "qk_norm_eps": 1e-4, "num_gqa_groups": 4},
        {"parallel_attention_mlp": True, "qk_norm_type": "LayerNorm", "fuse_qkv_params": True},
        {"output_layernorm": True, "apply_residual_connection_post_layernorm": True, "bias": False},
        {
            "activation": "clamped_swiglu",
            "activation_params": {"limit": 1.0},
            "seq_length": 5,
            "micro_batch_size": 3,
        },
    ],
    ids=[
        "post",
        "output",
        "fused",
        "softmax",
        "groups",
        "norm before",
        "norm after",
        "parallel",
        "both",
        "clamped",
    ],
)
def test_layer_variants(device, options):
    ours, native = twins("TransformerLayer", device, **options)
    same_steps(ours, native, ours, RECIPES["delayed"], device, around=RECIPES["delayed"])


@combinations({"kind": list(ACTIVATIONS), "recipe": ["high", "delayed", "block"]})
def test_activations(device, kind, recipe):
    ours, native = twins(
        "LayerNormMLP",
        device,
        activation=kind,
        activation_params={"limit": 0.5} if ACTIVATIONS[kind].params else None,
    )
    same_steps(ours, native, ours, RECIPES[recipe], device, around=RECIPES[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_mlp_computed_again(device, recipe):
    plain, _ = twins("LayerNormMLP", device)
    ours, native = twins("LayerNormMLP", device, checkpoint=True)
    ours.load_state_dict(plain.state_dict())
    native.load_state_dict({name: numpy_of(p) for name, p in ours.named_parameters()})
    same_steps(ours, native, ours, RECIPES[recipe], device, around=RECIPES[recipe])
    x, kept = torch.randn(64, WIDTH, device=device, requires_grad=True), {}
    for module in (plain, ours):
        sizes = kept[module] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=sizes: s.append(t.numel() * t.element_size()) or t, lambda t: t
        ):
            module(x)
    assert sum(kept[ours]) < sum(kept[plain])


@pytest.mark.parametrize("recipe", ["high", "delayed"])
def test_decoder(device, recipe):
    options = {"layer_type": "decoder", "fuse_qkv_params": True, "enc_dec_window_size": (2, 2)}
    ours, native = twins("TransformerLayer", device, **options)
    for x in batches(device):
        memory = torch.randn(7, 3, WIDTH, device=device, requires_grad=True)
        foreign = fk.tensor(numpy_of(memory), requires_grad=True, device=device)
        y, dx, grads, g = torch_step(ours, ours, RECIPES[recipe], x, encoder_output=memory)
        yn, dxn, gradsn = native_step(native, RECIPES[recipe], x, g, encoder_output=foreign)
        for got, want, what in ((y, yn.view, "y"), (dx, dxn, "dx"), (memory.grad, foreign.grad, "dmemory")):
            same(got, want, what)
        for name, grad in grads.items():
            same(grad, gradsn[name], name)
        same_state(ours, native)
    with pytest.raises(fk.errors.Fp8kitError, match="encoder_output"):
        ours(x)


def same_draws(
    ours,
    native,
    recipe,
    device,
    shape=(5, 3, WIDTH),
    own=None,
    foreign=None,
    dtype="float32",
    call=None,
    **options,
):
    """Three steps from one ``torch.manual_seed``: both frontends draw the same pairs, as many, and all is the
    same bits. ``own``, ``foreign``: arguments that each frontend has in arrays of its own."""
    generator = torch.cuda.default_generators[0] if device == "cuda" else torch.default_generator
    given = [(x, torch.randn_like(x)) for x in batches(device, dtype, shape=shape)]
    torch.manual_seed(5)
    for x, g in given:
        before = generator.get_state()
        y, dx, grads, _ = torch_step(
            ours, ours if call is None else call, recipe, x, g, **options, **(own or {})
        )
        after = generator.get_state()
        generator.set_state(before)
        with fk.draw_from(ft.dropout_seed):
            yn, dxn, gradsn = native_step(native, recipe, x, g, **options, **(foreign or {}))
        same(generator.get_state(), after, "draws")
        same(y, yn.view, "y")
        same(dx, dxn, "dx")
        for name, grad in grads.items():
            same(grad, gradsn[name], name)
        assert (same_state(ours, native) > 0) == (recipe is not None and recipe.delayed())


DROPS = {"drop_path_rate": 0.4, "hidden_dropout": 0.25, "attention_dropout": 0.1}


@combinations(
    {
        "form": ["sbhd", "bshd", "thd"],
        "recipe": ["delayed", "high"],
        "recomputed": {"kept": False, "recomputed": True},
    }
)
def test_drop_path_and_dropout(device, form, recipe, recomputed):
    mask = "padding_causal" if form == "thd" else "causal"
    ours, native = twins(
        "TransformerLayer", device, self_attn_mask_type=mask, attn_input_format=form, **DROPS
    )
    starts = {"cu_seqlens_q": [0, 3, 7, 15], "cu_seqlens_kv": [0, 3, 7, 15]} if form == "thd" else {}
    own = {name: torch.tensor(value, dtype=torch.int32, device=device) for name, value in starts.items()}
    foreign = {name: fk.tensor(np.array(value, np.int32), device=device) for name, value in starts.items()}
    same_draws(
        ours,
        native,
        RECIPES[recipe],
        device,
        (15, WIDTH) if form == "thd" else (5, 3, WIDTH),
        own,
        foreign,
        checkpoint_core_attention=recomputed,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"parallel_attention_mlp": True, "bias": False},
        {"hidden_dropout": 0.0},
        {"drop_path_rate": 0.0},
        {"attention_dropout": 0.0},
        {"apply_residual_connection_post_layernorm": True, "fuse_qkv_params": True},
    ],
    ids=["parallel", "paths", "dropout", "hidden", "post"],
)
def test_draws_of_variants(device, options):
    ours, native = twins("TransformerLayer", device, **DROPS | options)
    same_draws(ours, native, RECIPES["delayed"], device)


def test_draws_of_a_decoder(device):
    ours, native = twins("TransformerLayer", device, layer_type="decoder", **DROPS)
    memory = torch.randn(4, 3, WIDTH, device=device)
    same_draws(
        ours,
        native,
        RECIPES["delayed"],
        device,
        own={"encoder_output": memory},
        foreign={"encoder_output": fk.tensor(numpy_of(memory), device=device)},
    )


@combinations(
    {"options": {"aot_eager": {"backend": "aot_eager"}, "inductor": {"options": {"fallback_random": True}}}},
    usual=(),
)
def test_draws_when_compiled(device, options):
    """Inductor has a generator of its own, but for ``fallback_random``."""
    ours, native = twins("TransformerLayer", device, **DROPS)
    same_draws(ours, native, RECIPES["delayed"], device, call=torch.compile(ours, fullgraph=True, **options))


def test_draws_of_attention_in_16_bits(device):
    """Heads that cuDNN takes on a GPU, which makes its own numbers of the same pair."""
    ours, native = twins(
        "TransformerLayer",
        device,
        "bfloat16",
        hidden_size=128,
        num_attention_heads=2,
        num_gqa_groups=2,
        **DROPS,
    )
    same_draws(ours, native, RECIPES["current"], device, (8, 2, 128), dtype="bfloat16")


@pytest.mark.parametrize("recipe", ["high", "delayed"])
def test_the_core_attention_computed_again(device, recipe):
    kept, native = twins("TransformerLayer", device, attention_dropout=0.3, qk_norm_type="RMSNorm")
    again, _ = twins("TransformerLayer", device, attention_dropout=0.3, qk_norm_type="RMSNorm")
    again.load_state_dict(kept.state_dict())
    for seed, x in enumerate(batches(device)):
        torch.manual_seed(seed)
        y, dx, grads, g = torch_step(kept, kept, RECIPES[recipe], x, torch.ones_like(x))
        torch.manual_seed(seed)
        y2, dx2, grads2, _ = torch_step(again, again, RECIPES[recipe], x, g, checkpoint_core_attention=True)
        same(y2, y, "y")
        same(dx2, dx, "dx")
        for name, grad in grads.items():
            same(grads2[name], grad, name)
    assert len(list(native.parameters())) == len(grads)


@combinations(
    {
        "form": ["sbhd", "bshd", "thd"],
        "paged": {"whole": {}, "paged": {"is_paged": True, "total_num_pages": 11, "page_size": 3}},
    }
)
def test_a_growing_cache(device, form, paged):
    options = {
        "attn_input_format": form,
        "fuse_qkv_params": True,
        "layer_number": 1,
        "self_attn_mask_type": "padding_causal" if form == "thd" else "causal",
    }
    ours, native = twins("TransformerLayer", device, **options)
    angles = ft.RotaryPositionEmbedding(12, device=device)(24)
    foreign = fk.tensor(numpy_of(angles), device=device)
    caches = [lib.InferenceParams(3, 24, qkv_format=form, device=device, **paged) for lib in (ft, nn)]
    for step in ({"a": 5, "b": 3}, {"a": 1, "b": 1}, {"b": 2, "a": 1, "c": 7}, {"c": 1, "b": 1}):
        longest, count = max(step.values()), len(step)
        shape = {
            "sbhd": (longest, count, WIDTH),
            "bshd": (count, longest, WIDTH),
            "thd": (sum(step.values()), WIDTH),
        }[form]
        x = torch.randn(shape, device=device)
        lengths = [cache.pre_step(step) for cache in caches]
        assert lengths[0] == lengths[1]
        with torch.no_grad(), ft.autocast(recipe=RECIPES["current"]):
            y = ours(x, inference_params=caches[0], rotary_pos_emb=angles)
        with fk.no_grad(), fk.autocast(recipe=RECIPES["current"]):
            yn = native(
                fk.tensor(numpy_of(x), device=device), inference_params=caches[1], rotary_pos_emb=foreign
            )
        same(y, yn.view, step)
        for got, want in zip(
            caches[0].convert_paged_to_nonpaged(1), caches[1].convert_paged_to_nonpaged(1), strict=True
        ):
            same(got, want, "cache")
    with pytest.raises(fk.errors.Fp8kitError, match="pre_step before each step"):
        ours(x, inference_params=caches[0])
    caches[0].pre_step({"c": 1})
    with pytest.raises(fk.errors.AutogradError, match="gradients on"):
        ours(x[:1, :1] if form != "thd" else x[:1], inference_params=caches[0])


def test_rotary_and_bias(device):
    ours, native = twins("TransformerLayer", device)
    angles = ft.RotaryPositionEmbedding(12, device=device)(5)
    # ulps of pow
    assert_close(
        "values",
        angles.cpu().numpy(),
        nn.RotaryPositionEmbedding(12, device="cpu")(5).numpy(),
        "float32",
        1e-06 * np.abs(nn.RotaryPositionEmbedding(12, device="cpu")(5).numpy()),
    )
    bias = torch.randn(1, 4, 5, 5, device=device)
    own = {
        "rotary_pos_emb": angles,
        "core_attention_bias_type": "post_scale_bias",
        "core_attention_bias": bias,
    }
    foreign = {
        n: fk.tensor(v.cpu().numpy(), device=device) if isinstance(v, torch.Tensor) else v
        for n, v in own.items()
    }
    for x in batches(device):
        y, dx, _, g = torch_step(ours, ours, RECIPES["delayed"], x, **own)
        yn, dxn, _ = native_step(native, RECIPES["delayed"], x, g, **foreign)
        same(y, yn.view, "y")
        same(dx, dxn, "dx")
    assert same_state(ours, native) == 18


@pytest.mark.parametrize("starts", [[0, 3, 7], [1, 12, 20]])
def test_rotary_with_tokens_of_no_sequence(device, starts):
    """thd with gaps and with rows after the last sequence, farther on than there are angles."""
    ours, native = twins(
        "TransformerLayer", device, attn_input_format="thd", self_attn_mask_type="padding_causal"
    )
    lengths = [0, 3, 7]
    at = [b + i for b, n in zip(starts, (3, 4), strict=False) for i in range(n)]
    own = {
        f"cu_seqlens_{side}{end}": torch.tensor(value, dtype=torch.int32, device=device)
        for side in ("q", "kv")
        for end, value in (("", lengths), ("_padded", starts))
    }
    own |= {"rotary_pos_emb": ft.RotaryPositionEmbedding(12, device=device)(4)}
    foreign = {n: fk.tensor(v.cpu().numpy(), device=device) for n, v in own.items()}
    for x in batches(device, shape=(24, WIDTH)):
        g = torch.zeros_like(x)
        g[at] = torch.randn_like(x[at])
        y, dx, grads, g = torch_step(ours, ours, RECIPES["high"], x, g, **own)
        yn, dxn, gradsn = native_step(native, RECIPES["high"], x, g, **foreign)
        same(y, yn.view, "y")
        same(dx, dxn, "dx")
        assert torch.isfinite(y).all()
        assert torch.isfinite(dx).all()
        for name, grad in grads.items():
            assert torch.isfinite(grad).all(), name
            same(grad, gradsn[name], name)
    own_angles, t = own["rotary_pos_emb"], torch.full((24, 2, 12), torch.nan, device=device)
    t[at] = torch.randn(7, 2, 12, device=device)
    rotated = ft.apply_rotary_pos_emb(
        t.requires_grad_(),
        own_angles,
        "thd",
        cu_seqlens=own["cu_seqlens_q"],
        cu_seqlens_padded=own["cu_seqlens_q_padded"],
    )
    same(
        rotated,
        nn.apply_rotary_pos_emb(
            fk.tensor(numpy_of(t), device=device),
            foreign["rotary_pos_emb"],
            "thd",
            cu_seqlens=foreign["cu_seqlens_q"],
            cu_seqlens_padded=foreign["cu_seqlens_q_padded"],
        ).view,
        "rotated",
    )
    rotated.sum().backward()
    assert torch.isfinite(rotated).all()
    assert torch.isfinite(t.grad).all()


def test_cross_attention(device):
    options = {
        "hidden_size": WIDTH,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "attention_type": "cross",
        "device": device,
        "input_layernorm": True,
        "attn_mask_type": "no_mask",
    }
    ours, native = ft.MultiheadAttention(**options), nn.MultiheadAttention(**options)
    native.load_state_dict({name: p.detach().cpu().numpy() for name, p in ours.named_parameters()})
    x, memory = torch.randn(5, 3, WIDTH, device=device), torch.randn(7, 3, WIDTH, device=device)
    for _ in range(2):
        with scope(ft, RECIPES["delayed"]):
            y = ours(x, encoder_output=memory)
        with scope(fk, RECIPES["delayed"]):
            yn = native(
                x.cpu().numpy() if device == "cpu" else fk.tensor(x.cpu().numpy(), device=device),
                encoder_output=fk.tensor(memory.cpu().numpy(), device=device),
            )
        same(y, yn.view, "y")
        y.sum().backward()
        yn.backward(fk.tensor(np.ones(yn.shape, np.float32), device=device))
    assert same_state(ours, native) == 18


def test_packed_sequences(device):
    ours = ft.DotProductAttention(4, 12, qkv_format="thd", attn_mask_type="padding_causal", device=device)
    native = nn.DotProductAttention(4, 12, qkv_format="thd", attn_mask_type="padding_causal", device=device)
    lengths = torch.tensor([0, 3, 7, 8], dtype=torch.int32, device=device)
    parts = [torch.randn(8, 4, 12, device=device) for _ in range(3)]
    y = ours(*parts, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    foreign = [fk.tensor(part.cpu().numpy(), device=device) for part in (*parts, lengths)]
    same(y, native(*foreign[:3], cu_seqlens_q=foreign[3], cu_seqlens_kv=foreign[3]).view, "o")


def test_padding_mask_is_counted(device):
    ours = ft.DotProductAttention(4, 12, attn_mask_type="padding", device=device)
    parts = [torch.randn(6, 2, 4, 12, device=device) for _ in range(3)]
    mask = (
        torch.arange(6, device=device)[None, None, None]
        >= torch.tensor([4, 6], device=device)[:, None, None, None]
    )
    lengths = torch.tensor([0, 4, 10], dtype=torch.int32, device=device)
    same(ours(*parts, attention_mask=mask), ours(*parts, cu_seqlens_q=lengths, cu_seqlens_kv=lengths), "o")
    with pytest.raises(fk.errors.ShapeError, match="padding after all true positions"):
        ours(*parts, attention_mask=~mask)
    short = [torch.randn(4, 2, 4, 12, device=device) for _ in range(2)]
    with pytest.raises(
        fk.errors.ShapeError, match=r"got shape \(2, 1, 1, 6\), expected \(batch, 1, 1, 4\) for keys, a pair"
    ):
        ours(parts[0], *short, attention_mask=mask)
    with pytest.raises(fk.errors.ShapeError, match=r"expected \(batch, 1, 1, 6\) for queries"):
        ours(*parts, attention_mask=mask[..., :5])


@combinations({"kind": ["LayerNormMLP", "TransformerLayer"], "recipe": ["delayed", "current", "block"]})
def test_microbatches(device, kind, recipe):
    ours, native = twins(kind, device)
    for i, x in enumerate(batches(device, steps=4)):
        first = i % 2 == 0
        y, dx, grads, g = torch_step(ours, ours, RECIPES[recipe], x, is_first_microbatch=first)
        yn, dxn, gradsn = native_step(native, RECIPES[recipe], x, g, is_first_microbatch=first)
        same(y, yn.view, "y")
        same(dx, dxn, "dx")
        for name, grad in grads.items():
            same(grad, gradsn[name], name)
        same_state(ours, native)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_calibration(device, kind):
    ours, native = twins(kind, device)
    recipe = DelayedScaling(amax_history_len=3)
    for x in batches(device, steps=2):
        with torch.no_grad(), ft.autocast(enabled=False, calibrating=True, recipe=recipe):
            y = ours(x)
        with fk.no_grad(), fk.autocast(enabled=False, calibrating=True, recipe=recipe):
            yn = native(fk.tensor(x.cpu().numpy(), device=device))
        same(y, yn.view, "y")
        assert same_state(ours, native) == 6


def test_dropout_follows_torchs_generator(device):
    ours, _ = twins("TransformerLayer", device, hidden_dropout=0.3, attention_dropout=0.2)
    x = torch.randn(5, 3, WIDTH, device=device)

    def once(seed):
        torch.manual_seed(seed)
        return ours(x).detach()

    same(once(3), once(3), "the same seed")
    assert not torch.equal(once(3), once(4))
    ours.eval()
    same(once(3), once(4), "no dropout")


def test_functions(device):
    logits, targets = (
        torch.randn(4, 3, 20, device=device, requires_grad=True),
        torch.randint(0, 20, (4, 3), device=device),
    )
    targets[0, 0] = -100
    loss = ft.parallel_cross_entropy(logits, targets, label_smoothing=0.1, reduce_loss=True)
    want = torch.nn.functional.cross_entropy(
        logits.double().reshape(-1, 20), targets.reshape(-1), label_smoothing=0.1
    )
    # sums of 20 exponentials, and the mean of 11
    assert_tensor_close("loss", loss, want, sum_slack(largest(want), 20 + 11))
    (grad,), (expected,) = torch.autograd.grad(loss, logits), torch.autograd.grad(want, logits)
    assert_tensor_close("dlogits", grad, expected, sum_slack(1 / 11, 20))  # each below the mean's 1 / 11
    table = torch.randn(20, 8, device=device, requires_grad=True)
    ids = torch.tensor([[1, 3], [3, 19]], device=device)
    rows = ft.embedding(ids, table)
    same(rows, table[ids], "rows")
    rows.backward(torch.ones_like(rows))
    same(table.grad, torch.autograd.grad(table[ids].sum(), table)[0], "dtable")
    x, r, b = (torch.randn(shape, device=device, requires_grad=True) for shape in ((3, 8), (3, 8), (8,)))
    y = ft.dropout_add(x, r, b)
    same(y, r + (x + b), "y")
    y.sum().backward()
    same(b.grad, torch.full((8,), 3.0), "db")


def test_kinds_are_all_there():
    assert set(KINDS) <= set(ft.__all__)
    assert Float8CurrentScaling is ft.Float8CurrentScaling
