"""How Transformer Engine's programs call attention: masks and lengths that are not looked at, packed layers
in every layout, redundant arguments, the softmax's offset."""

from __future__ import annotations

from functools import partial

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import fusible
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from tests.support.tensors import assert_tensor_close, largest

S, B, H, D = 6, 2, 4, 8


def sums(*lengths, device="cpu"):
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(device)


def layers(device, *lead):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return torch.randn(*lead, 3, H, D, dtype=dtype, device=device)


def core(device, **more):
    return ft.DotProductAttention(H, D, **{"device": device, **more})


@pytest.mark.parametrize("mask", ["causal", "no_mask", "causal_bottom_right"])
def test_masks_and_lengths_beside_a_mask_that_needs_none_are_not_looked_at(device, mask):
    attend, (q, k, v) = core(device, attn_mask_type=mask), layers(device, S, B).unbind(-3)
    want = attend(q, k, v)
    hidden = torch.ones(B, 1, 1, S, dtype=torch.bool, device=device)
    lengths = {"cu_seqlens_q": sums(3, 2, device=device), "cu_seqlens_kv": sums(3, 2, device=device)}
    assert torch.equal(attend(q, k, v, attention_mask=hidden), want)
    assert torch.equal(attend(q, k, v, **lengths), want)
    assert torch.equal(attend(q, k, v, attention_mask=hidden, **lengths), want)


@pytest.mark.parametrize("mask", ["causal", "causal_bottom_right", "padding_causal"])
def test_causal_masks_have_their_corner_whatever_is_said_beside(device, mask):
    """Of fewer rows than columns, for which the corner makes a difference."""
    q, (k, v) = layers(device, 3, B)[..., 0, :, :], layers(device, S, B).unbind(-3)[1:]
    more = {}
    if mask.startswith("padding"):
        more = {"cu_seqlens_q": sums(3, 2, device=device), "cu_seqlens_kv": sums(S, 4, device=device)}
    want = core(device, attn_mask_type=mask, attention_type="cross")(q, k, v, **more)
    for corner in (True, False):
        said = core(device, attn_mask_type=mask, attention_type="cross", bottom_right_diagonal=corner)
        assert torch.equal(said(q, k, v, **more), want)
        assert torch.equal(said(q, k, v, bottom_right_diagonal=not corner, **more), want)
    layer = ft.TransformerLayer(32, 64, H, hidden_dropout=0, attention_dropout=0, device=device)
    x = torch.randn(S, B, 32, device=device)
    assert torch.equal(layer(x, bottom_right_diagonal=True), layer(x))


def test_causal_masks_end_at_the_diagonal_whatever_the_window_says(device):
    q, k, v = layers(device, S, B).unbind(-3)
    want = core(device, attn_mask_type="causal", window_size=(2, 0))(q, k, v)
    wide = core(device, attn_mask_type="causal", window_size=(2, 2))
    assert torch.equal(wide(q, k, v), want)
    assert torch.equal(wide(q, k, v, window_size=(2, 1)), want)
    assert not torch.equal(wide(q, k, v, attn_mask_type="no_mask"), want)


def test_lengths_go_before_a_padding_mask(device):
    attend, (q, k, v) = core(device, attn_mask_type="padding"), layers(device, S, B).unbind(-3)
    hidden = torch.arange(S, device=device) >= torch.tensor([[3], [2]], device=device)
    hidden = hidden[:, None, None]
    lengths = {"cu_seqlens_q": sums(3, 2, device=device), "cu_seqlens_kv": sums(3, 2, device=device)}
    want = attend(q, k, v, attention_mask=hidden)
    assert torch.equal(attend(q, k, v, **lengths), want)
    assert torch.equal(attend(q, k, v, attention_mask=hidden, **lengths), want)
    assert not torch.equal(attend(q, k, v, attn_mask_type="no_mask"), want)


FORMS = {"sbhd": (S, B), "bshd": (B, S), "thd": (S * B,)}


@pytest.mark.parametrize("form", FORMS)
def test_packed_layers_in_every_layout(device, form):
    """Transformer Engine's ten layouts of one or two tensors, and views of them, give the bits of separate
    layers, gradients too."""
    x = layers(device, *FORMS[form]).requires_grad_()
    mask = "padding_causal" if form == "thd" else "causal"
    attend = core(device, qkv_format=form, attn_mask_type=mask)
    more = {}
    if form == "thd":
        more = {"cu_seqlens_q": sums(S, S, device=device), "cu_seqlens_kv": sums(S, S, device=device)}
        more |= {"max_seqlen_q": S, "max_seqlen_kv": S}
    want = attend(*(part.contiguous() for part in x.unbind(-3)), **more)
    g = torch.randn_like(want)
    (dx,) = torch.autograd.grad(want, x, g)
    y = x.detach().transpose(-3, -2).contiguous().requires_grad_()  # (..., h, 3, d)
    for name, of, got in (
        ("3hd", x, attend(qkv_layer=x, **more)),
        ("h3d", y, attend(qkv_layer=y, qkv_interleave_dim=-2, **more)),
        ("hd_2hd", x, attend(x[..., 0, :, :], kv_layer=x[..., 1:, :, :], **more)),
        ("hd_h2d", y, attend(y[..., 0, :], kv_layer=y[..., 1:, :], qkv_interleave_dim=-2, **more)),
        ("views of 3hd", x, attend(*x.unbind(-3), **more)),
        ("views of h3d", y, attend(*y.unbind(-2), **more)),
    ):
        assert torch.equal(got, want), name
        (own,) = torch.autograd.grad(got, of, g)
        assert torch.equal(own if of is x else own.transpose(-3, -2), dx), name


def test_a_packed_layer_of_another_order_is_refused():
    x = torch.zeros(S, B, H, 3, D)
    with pytest.raises(ShapeError, match=r"qkv_layer: got shape .*expected 3 in dimension"):
        core("cpu")(qkv_layer=x)
    with pytest.raises(ShapeError, match=r"kv_layer: got shape .*expected 2 in dimension"):
        core("cpu")(x[..., 0, :], kv_layer=x)


def test_no_gaps_between_sequences_is_right_beside_equal_starts():
    attend, x = core("cpu", qkv_format="thd", attn_mask_type="padding_causal"), layers("cpu", S * B)
    q, k, v = x.unbind(-3)
    ends = sums(S, S)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": S, "max_seqlen_kv": S}
    padded = {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}
    want = attend(q, k, v, **lengths)
    for said in (None, False, True):
        assert torch.equal(attend(q, k, v, **lengths, **padded, pad_between_seqs=said), want)
    assert torch.equal(attend(q, k, v, **lengths, pad_between_seqs=False), want)
    for bound in (torch.tensor(S), torch.tensor([S], dtype=torch.int32)):
        bounds = {"max_seqlen_q": bound, "max_seqlen_kv": bound}
        assert torch.equal(attend(q, k, v, **lengths | bounds), want)
        assert torch.equal(attend(q, k, v, **lengths | bounds, checkpoint_core_attention=True), want)
    for bound in (torch.tensor([S, S]), torch.tensor(5.0), torch.tensor(True), torch.tensor(-1)):
        with pytest.raises(ArgumentError, match="max_seqlen_q"):
            attend(q, k, v, **lengths | {"max_seqlen_q": bound})
    with pytest.raises(ArgumentError, match="pad_between_seqs: got True"):
        attend(q, k, v, **lengths, pad_between_seqs=True)


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_starts_of_sequences_are_not_looked_at_where_the_shape_says_them(form):
    """As in Transformer Engine, whose programs give all that they have."""
    attend, x = core("cpu", qkv_format=form, attn_mask_type="padding_causal"), layers("cpu", S, B)
    q, k, v = (x if form == "sbhd" else x.transpose(0, 1).contiguous()).unbind(-3)
    lengths, starts = sums(S, S - 1), sums(S, S)
    given = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    padded = {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    assert torch.equal(attend(q, k, v, **given, **padded), attend(q, k, v, **given))


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
def test_the_softmaxs_offset_is_an_attribute(kind):
    attend = core("cpu", softmax_type=kind)
    if kind == "vanilla":
        assert attend.softmax_offset is None
    else:
        assert torch.equal(attend.softmax_offset.detach(), torch.zeros(H))
    learned = kind == "learnable"
    assert isinstance(attend.softmax_offset, torch.nn.Parameter) is learned
    assert list(attend.state_dict()) == ["softmax_offset"] * learned


def test_the_softmaxs_offset_is_cast_with_the_model(device):
    """A parameter in bfloat16 gives the bits of the same values in float32, and a gradient in bfloat16."""
    q, k, v = layers(device, S, B).to(torch.bfloat16).unbind(-3)
    attend = core(device, softmax_type="learnable")
    torch.nn.init.constant_(attend.softmax_offset, 0.5)
    want = attend(q, k, v)
    want.sum().backward()
    cast = core(device, softmax_type="learnable").bfloat16()
    torch.nn.init.constant_(cast.softmax_offset, 0.5)
    got = cast(q, k, v)
    got.sum().backward()
    assert torch.equal(got, want)
    assert cast.softmax_offset.dtype == torch.bfloat16
    assert torch.equal(cast.softmax_offset.grad, attend.softmax_offset.grad.bfloat16())


def test_what_is_refused_says_why():
    q = torch.zeros(S, B, H, D)
    with pytest.raises(NotImplementedError, match=r"score_mod: .*do not call functions"):
        core("cpu")(q, q, q, score_mod=3)


def test_num_splits_changes_nothing():
    q = layers("cpu", S, B)[..., 0, :, :]
    assert torch.equal(core("cpu")(q, q, q, num_splits=4), core("cpu")(q, q, q))
    with pytest.raises(ArgumentError, match="num_splits: got 'two'"):
        core("cpu")(q, q, q, num_splits="two")


@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_backward_in_high_precision_behind_a_quantised_forward(form):
    """q, k and v are integers below 8 with an amax of 7, whose scale is a power of two: their casts are
    exact, and so is the rows' log-sum-exp. Then dv = P^T dO is high precision's; o is the quantised one."""
    attend = core("cpu", qkv_format=form, attn_mask_type="padding" if form == "thd" else "causal")
    torch.manual_seed(0)
    x = torch.randint(-7, 8, (*FORMS[form], 3, H, D)).float()
    x.view(-1, 3, H, D)[0] = 7.0
    x.requires_grad_()
    q, k, v = x.unbind(-3)
    more = {} if form == "sbhd" else dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), sums(5, S))
    more |= {} if form == "sbhd" else {"max_seqlen_q": S, "max_seqlen_kv": S}
    g = torch.randn(*FORMS[form], H * D)

    def run(fp8, **asked):
        with ft.autocast(enabled=fp8, recipe=Float8CurrentScaling(fp8_dpa=True)):
            o = attend(q, k, v, **more, **asked)
        return o, torch.autograd.grad(o, v, g)[0]

    (o, dv), (quantised, dv_quantised), (got, dv_got) = run(False), run(True), run(True, bf16_backward=True)
    assert torch.equal(got, quantised)
    assert not torch.equal(got, o)
    # float32's rounding of scores up to 49 sqrt(D), which is relative in P, in sums of S terms below max |g|
    assert (dv_got - dv).abs().max() <= 2 * S * 49 * D**0.5 * 2.0**-23 * g.abs().max()
    assert (dv_quantised - dv).abs().max() > 2.0**-8 * g.abs().max()
    assert torch.equal(run(False, bf16_backward=True)[1], dv)


class Watched(ft.DotProductAttention):
    """With Transformer Engine's signature, as a program's own subclass has it."""

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, **more):
        self.seen = [tuple(layer.shape) for layer in (query_layer, key_layer, value_layer)]
        return super().forward(query_layer, key_layer, value_layer, attention_mask, **more)


def test_the_norm_without_parameters_is_that_of_the_operations():
    layer = ft.MultiheadAttention(H * D, H, qk_norm_type="L2Normalization", device="cpu")
    assert isinstance(layer.q_norm, fusible.L2Normalization)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("norm", [None, "RMSNorm"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_hooks_and_subclasses_of_the_core_attention_see_heads(interleaved, norm, kind, again):
    """Queries, keys and values, by position, as Transformer Engine hands them over; the same bits."""
    groups = H // 2
    options = {"qkv_weight_interleaved": interleaved, "fuse_qkv_params": interleaved, "qk_norm_type": norm}
    options |= {"attention_type": kind, "attention_dropout": 0.0, "num_gqa_groups": groups}
    torch.manual_seed(0)
    layer = ft.MultiheadAttention(H * D, H, attn_mask_type="no_mask", device="cpu", **options)
    x = torch.randn(S, B, H * D, requires_grad=True)
    encoder = {"encoder_output": torch.randn(S + 1, B, H * D)} if kind == "cross" else {}

    def run():
        with ft.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
            y = layer(x, checkpoint_core_attention=again, **encoder)
        return y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    want, seen = run(), []
    hook = layer.core_attention.register_forward_hook(
        lambda module, given, o: seen.append([tuple(one.shape) for one in given])
    )
    hooked = run()
    hook.remove()
    layer.core_attention = Watched(H, D, groups, attention_dropout=0.0, attn_mask_type="no_mask")
    assert all(torch.equal(*pair) for pair in zip(want, hooked, strict=True))
    assert all(torch.equal(*pair) for pair in zip(want, run(), strict=True))
    keys = (S + 1 if kind == "cross" else S, B, groups, D)
    assert seen[0] == layer.core_attention.seen == [(S, B, H, D), keys, keys]


WRAPPERS = {"checkpoint": checkpoint_wrapper, "compile": partial(torch.compile, backend="eager")}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile asks of views
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_what_wraps_a_core_attention_is_called(wrap):
    layer = ft.MultiheadAttention(H * D, H, attention_dropout=0.0, device="cpu")
    x = torch.randn(S, B, H * D, requires_grad=True)

    def run():
        y = layer(x)
        return y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    want = run()
    layer.core_attention = wrap(layer.core_attention)
    assert all(torch.equal(*pair) for pair in zip(want, run(), strict=True))


def test_gradients_of_heads_reach_a_backward_hook():
    layer, seen = ft.MultiheadAttention(H * D, H, device="cpu"), []
    layer.core_attention.register_full_backward_hook(
        lambda module, dx, dy: seen.append([tuple(one.shape) for one in dx])
    )
    layer(torch.randn(S, B, H * D, requires_grad=True)).sum().backward()
    assert seen == [[(S, B, H, D)] * 3]


def test_a_core_attention_that_is_none_is_refused():
    layer = ft.TransformerLayer(H * D, 2 * H * D, H, device="cpu")
    layer.self_attention.core_attention = torch.nn.Identity()
    with pytest.raises(ArgumentError, match="core_attention: got a Identity, expected a DotProduct"):
        layer(torch.randn(S, B, H * D))


def test_a_decoder_of_sequences_in_a_row(device):
    """The decoder's sequences lie as cu_seqlens_q says in both attentions, the encoder's as cu_seqlens_kv:
    each is as it is by itself."""
    size, dtype = H * D, torch.float32 if device == "cpu" else torch.bfloat16
    options = {"layer_type": "decoder", "hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device}
    options |= {"params_dtype": dtype, "self_attn_mask_type": "padding_causal"}
    packed = ft.TransformerLayer(
        size, 2 * size, H, attn_input_format="thd", enc_dec_attn_mask_type="padding", **options
    )
    whole = ft.TransformerLayer(
        size, 2 * size, H, attn_input_format="bshd", **options | {"self_attn_mask_type": "causal"}
    )
    whole.load_state_dict(packed.state_dict())
    torch.manual_seed(1)
    x, e = (torch.randn(n, size, dtype=dtype, device=device) for n in (5, 9))
    x.requires_grad_()
    ends = {"cu_seqlens_q": sums(3, 2, device=device), "cu_seqlens_kv": sums(4, 5, device=device)}
    y = packed(x, encoder_output=e, max_seqlen_q=3, max_seqlen_kv=5, **ends)
    parts = [(slice(0, 3), slice(0, 4)), (slice(3, 5), slice(4, 9))]
    want = torch.cat([whole(x[own][None], encoder_output=e[source][None])[0] for own, source in parts])
    # two attentions and an MLP that sum in another order: float32's roundings on the CPU, some 8 of bfloat16
    unit = 2.0**-19 if device == "cpu" else 2.0**-5
    assert_tensor_close("y", y, want, unit * largest(want))
    found = torch.autograd.grad(y.sum(), x)[0]
    wanted = torch.autograd.grad(want.sum(), x)[0]
    assert_tensor_close("dx", found, wanted, unit * largest(wanted))


@pytest.mark.parametrize("form", ["bshd", "sbhd"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "causal"])
def test_a_padded_decoder_without_masks(device, form, mask):
    """cu_seqlens_q and cu_seqlens_kv say what masks of the decoder's and the encoder's padding say."""
    size, dtype = H * D, torch.float32 if device == "cpu" else torch.bfloat16
    options = {"layer_type": "decoder", "hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device}
    options |= {"params_dtype": dtype, "self_attn_mask_type": mask, "enc_dec_attn_mask_type": "padding"}
    layer = ft.TransformerLayer(size, 2 * size, H, attn_input_format=form, **options)
    torch.manual_seed(1)
    x, e = (torch.randn(2, n, size, dtype=dtype, device=device) for n in (4, 6))
    x, e = (x, e) if form == "bshd" else (x.transpose(0, 1).contiguous(), e.transpose(0, 1).contiguous())
    ends = {"cu_seqlens_q": sums(3, 4, device=device), "cu_seqlens_kv": sums(6, 5, device=device)}
    lengths = {4: (3, 4), 6: (6, 5)}
    own, source = (
        torch.arange(n, device=device) >= torch.tensor(true, device=device)[:, None, None, None]
        for n, true in lengths.items()
    )
    masks = {"attention_mask": own if "padding" in mask else None, "enc_dec_attn_mask": (own, source)}
    y = layer(x, encoder_output=e, max_seqlen_q=4, max_seqlen_kv=6, **ends)
    assert torch.equal(y, layer(x, encoder_output=e, **masks))


def test_as_many_angles_as_a_tensor_says(device):
    embedding = ft.RotaryPositionEmbedding(D, device=device)
    assert torch.equal(embedding(sums(3, 2, device=device)[-1]), embedding(5))
    with pytest.raises(ArgumentError, match="max_seq_len"):
        embedding(torch.tensor(5.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_of_sixteen_bits(device, dtype):
    """They are read as the values they are, by the function and by the layer."""
    torch.manual_seed(2)
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    angles = ft.RotaryPositionEmbedding(D, device=device)(S).to(dtype)
    q = torch.randn(S, B, H, D, device=device, dtype=kind)
    assert torch.equal(ft.apply_rotary_pos_emb(q, angles), ft.apply_rotary_pos_emb(q, angles.float()))
    layer = ft.MultiheadAttention(H * D, H, attention_dropout=0.0, device=device, params_dtype=kind)
    x = torch.randn(S, B, H * D, device=device, dtype=kind)
    assert torch.equal(layer(x, rotary_pos_emb=angles), layer(x, rotary_pos_emb=angles.float()))


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_output_in_fp8(device, kind, checkpointed):
    """Where the recipe quantises attention, o comes as the next layer's input: codes of its own scale, which
    that layer multiplies as they are. The gradient passes."""
    recipe, attend = kind(fp8_dpa=True, fp8_mha=True), core(device, attn_mask_type="causal")
    x = layers(device, S, B).requires_grad_()
    q, k, v = x.unbind(-3)
    options = {"fp8_output": True, "checkpoint_core_attention": checkpointed}
    with ft.autocast(recipe=recipe):
        o, want = attend(q, k, v, **options), attend(q, k, v)
    assert isinstance(o, ft.Float8Tensor)
    assert o.shape == want.shape
    # E4M3 rounds by half a step, 2^-4 of a value, or of its smallest normal one
    assert_tensor_close("o", o.dequantize(), want, 2.0**-4 * want.abs() + 2.0**-9 * largest(want))
    gradients = [torch.autograd.grad(each.float().sum(), x, retain_graph=True)[0] for each in (o, want)]
    assert torch.equal(*gradients)
    project = ft.Linear(H * D, 16, device=device, params_dtype=x.dtype)
    with ft.autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(project(o), project(want))


def test_an_output_in_fp8_is_asked_for_where_attention_is_not():
    """As in Transformer Engine, nothing becomes of it."""
    attend, (q, k, v) = core("cpu"), layers("cpu", S, B).unbind(-3)
    for recipe in (None, Float8CurrentScaling()):
        with ft.autocast(recipe is not None, recipe=recipe):
            assert type(attend(q, k, v, fp8_output=True)) is torch.Tensor
    with pytest.raises(ArgumentError, match="fp8_output"):
        attend(q, k, v, fp8_output="yes")
