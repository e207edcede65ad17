"""Values of running sums and of indices: on the CPU wrong ones are refused at the frontend, before anything
runs and with nothing changed."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import nn
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.testing import assert_same_bits

H, D, T, S = 2, 4, 5, 4
RNG = np.random.default_rng(0)
TOKENS = RNG.standard_normal((T, H * D)).astype(np.float32)
BATCH = RNG.standard_normal((S, 2, H * D)).astype(np.float32)

# of 5 tokens, or of batches of 4 positions: what is wrong with them
WRONG = {
    "beyond": ([0, 2, 9], "up to 5|at most 4"),
    "not_from_0": ([1, 2, 5], "0 first"),
    "falling": ([0, 4, 2], "none less"),
    "negative": ([0, -3, 2], "none less"),
    "far": ([0, -(2**31), 2**31 - 1], "none less"),
}
STARTS = {
    "overlapping": ([0, 1, 4], "room for each"),
    "beyond": ([0, 4, 7], r"\[0, 5\]"),
    "negative": ([-1, 2, 4], r"\[0, 5\]"),
    "falling": ([3, 1, 5], "room for each"),
}


def sums(values):
    return np.array(values, np.int32)


def core(form, **options):
    x = (TOKENS if form == "thd" else BATCH).reshape(*(TOKENS if form == "thd" else BATCH).shape[:-1], H, D)
    x = x.swapaxes(0, 1) if form == "bshd" else x
    layer = nn.DotProductAttention(H, D, qkv_format=form, attn_mask_type="padding", device="cpu")
    return layer(x, x, x, **options)


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("side", ["q", "kv"])
@pytest.mark.parametrize("kind", WRONG)
def test_attention_refuses_them(form, side, kind):
    values, said = WRONG[kind]
    given = {"cu_seqlens_q": sums([0, 2, 4]), "cu_seqlens_kv": sums([0, 2, 4])} | {
        f"cu_seqlens_{side}": sums(values)
    }
    with pytest.raises(ArgumentError, match=f"DotProductAttention: cu_seqlens_{side}: got .*({said})"):
        core(form, **given)


@pytest.mark.parametrize("kind", STARTS)
def test_attention_refuses_starts_without_room(kind):
    values, said = STARTS[kind]
    lengths = sums([0, 2, 4])
    with pytest.raises(ArgumentError, match=f"DotProductAttention: cu_seqlens_kv_padded: got .*{said}"):
        core(
            "thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            cu_seqlens_q_padded=sums([1, 3, 5]),
            cu_seqlens_kv_padded=sums(values),
        )
    with pytest.raises(ArgumentError, match=f"rope: cu_seqlens_padded: got .*{said}"):
        rotated(cu_seqlens=lengths, cu_seqlens_padded=sums(values))


def test_no_sequence_is_longer_than_was_said():
    with pytest.raises(ArgumentError, match=r"DotProductAttention: cu_seqlens_q: got .* at most 2, not of 3"):
        core(
            "thd",
            cu_seqlens_q=sums([0, 2, 5]),
            cu_seqlens_kv=sums([0, 2, 5]),
            max_seqlen_q=2,
            max_seqlen_kv=3,
        )
    with pytest.raises(ArgumentError, match=r"rope: cu_seqlens: got .* at most 3, not of 5"):
        rotated(positions=3, cu_seqlens=sums([0, 5]))


def rotated(positions=8, **options):
    freqs = nn.RotaryPositionEmbedding(D, device="cpu")(positions)
    return nn.apply_rotary_pos_emb(TOKENS.reshape(T, H, D), freqs, "thd", **options)


@pytest.mark.parametrize("kind", WRONG)
def test_rope_refuses_them(kind):
    with pytest.raises(ArgumentError, match=f"rope: cu_seqlens: got .*({WRONG[kind][1]})"):
        rotated(cu_seqlens=sums(WRONG[kind][0]))


def test_tokens_behind_the_last_sequence_belong_to_none():
    """Fewer tokens than there are is no mistake: batches of one size keep a captured graph."""
    short = sums([0, 2, 3])
    o = core("thd", cu_seqlens_q=short, cu_seqlens_kv=short).numpy()
    alone = nn.DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding", device="cpu")(
        *[TOKENS[:3].reshape(3, H, D)] * 3, cu_seqlens_q=short, cu_seqlens_kv=short
    )
    assert_same_bits("true rows", o[:3], alone.numpy())
    assert not o[3:].any()


@pytest.mark.parametrize("form", ["sbhd", "thd"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_layer_refuses_them_before_its_projections_run(form, kind):
    """Neither the FP8 state nor the random state knows of the call."""
    layer = nn.TransformerLayer(
        H * D, 16, H, attn_input_format=form, self_attn_mask_type="padding", device="cpu"
    )
    x, good, bad = (TOKENS if form == "thd" else BATCH), sums([0, 2, 4]), sums(WRONG[kind][0])

    def run(lengths):
        with fk.autocast(recipe=fk.recipe.DelayedScaling(amax_history_len=2)):
            return layer(x, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)

    run(good)
    before = {name: view.numpy().copy() for name, view in layer.state_dict().items()}, nn.get_rng_state()
    with pytest.raises(ArgumentError, match="TransformerLayer: cu_seqlens_q: got "):
        run(bad)
    after = {name: view.numpy() for name, view in layer.state_dict().items()}, nn.get_rng_state()
    for was, now in zip(before, after, strict=True):
        assert was.keys() == now.keys()
        for name in was:
            assert_same_bits(name, np.asarray(now[name]), np.asarray(was[name]))


@pytest.mark.parametrize(
    "option",
    [
        {"self_attn_mask_type": "some"},
        {"window_size": (1, 2, 3)},
        {"core_attention_bias_type": 3},
        {"pad_between_seqs": 2},
        {"inference_params": 1},
        {"attention_mask": np.zeros(3, bool), "self_attn_mask_type": "padding"},
        {"max_seqlen_q": -1},
        {"bottom_right_diagonal": "no"},
    ],
)
def test_a_layer_refuses_options_before_its_projections_run(option):
    layer = nn.TransformerLayer(H * D, 16, H, device="cpu")
    with fk.autocast(recipe=fk.recipe.DelayedScaling(amax_history_len=2)):
        layer(BATCH)
    before = {name: view.numpy().copy() for name, view in layer.state_dict().items()}
    with fk.autocast(recipe=fk.recipe.DelayedScaling(amax_history_len=2)):
        said = f"TransformerLayer: {next(iter(option))}: got "
        with pytest.raises((ArgumentError, ShapeError), match=said):
            layer(BATCH, **option)
        for name, view in layer.state_dict().items():
            assert_same_bits(name, view.numpy(), before[name])


@pytest.mark.parametrize("wrong", [-1, 3, 2**40])
def test_classes_and_ids_out_of_range(wrong):
    logits, targets = np.zeros((2, 3), np.float32), np.array([0, wrong])
    with pytest.raises(
        ArgumentError,
        match=rf"cross_entropy: targets: got {wrong} among them, expected classes in \[0, 3\), or -100",
    ):
        nn.cross_entropy(logits, targets)
    assert nn.cross_entropy(logits, targets, ignore_index=wrong).item() == pytest.approx(np.log(3), rel=1e-6)
    with pytest.raises(
        ArgumentError, match=rf"embedding: ids: got {wrong} among them, expected indices in \[0, 3\)"
    ):
        nn.Embedding(3, 2, device="cpu")(targets)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", WRONG)
def test_on_a_gpu_nobody_looks_and_nothing_breaks(kind):
    """The call comes back with an output of the right shape, and the device works on."""
    x = fk.tensor(TOKENS.reshape(T, H, D), device="cuda")
    layer = nn.DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding", device="cuda")
    bad, good = sums(WRONG[kind][0]), sums([0, 2, 5])
    o = layer(x, x, x, cu_seqlens_q=bad, cu_seqlens_kv=bad, max_seqlen_q=8, max_seqlen_kv=8)
    fk.synchronize(x.device)
    assert o.shape == (T, H * D)
    assert np.isfinite(layer(x, x, x, cu_seqlens_q=good, cu_seqlens_kv=good).numpy()).all()
    logits, targets = (fk.tensor(a, device="cuda") for a in (np.zeros((2, 3), np.float32), np.array([0, 7])))
    loss = nn.cross_entropy(logits, targets, "none").numpy()
    assert np.isnan(loss[1])
    assert np.isfinite(loss[0])
