"""Context parallelism of the native frontend, and what it is made of: an exchange of columns for rows, one
step round a ring, maps of rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.arrays import as_view
from fp8kit.attention_quantization import attention_of
from fp8kit.autograd import apply
from fp8kit.collectives import FakeCollectives
from fp8kit.errors import ArgumentError, BackendError, ShapeError, UnsupportedError
from fp8kit.formats import E4M3, E5M2
from fp8kit.layers import context_maps as maps
from fp8kit.ops.attention import attention
from fp8kit.ops.attention_spec import AttentionSpec
from fp8kit.ops.communicate import GroupSpec, columns_to_rows, rows_to_columns
from fp8kit.ops.ring_attention import RingSpec, ring_attention
from fp8kit.quantization import Quantizer
from fp8kit.testing.compare import assert_close

S, B, H, G, D = 32, 2, 4, 2, 16
CU = np.int32([0, 16, 24, 56, 64])
# of numbers that are sums of at most S products, in another order (see test_context_parallel of torch)
APART = (S + 8) * 2.0**-24


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def part(x, form, rank, size):
    """A rank's two chunks of each sequence."""
    axis = max(form.find("s"), 0)
    ends = CU if form == "thd" else [0, x.shape[axis]]
    found = []
    for start, end in itertools.pairwise(ends):
        chunks = np.split(np.take(x, range(start, end), axis), 2 * size, axis)
        found += [chunks[rank], chunks[2 * size - 1 - rank]]
    return np.ascontiguousarray(np.concatenate(found, axis))


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize(
    ("form", "mask"), [("sbhd", "causal"), ("bshd", "no_mask"), ("thd", "padding_causal")]
)
def test_each_way_gives_what_one_rank_gives(kind, form, mask):
    packed = form == "thd"
    lead = (64,) if packed else (S, B) if form == "sbhd" else (B, S)
    arrays = draw(*lead, H, D), draw(*lead, G, D), draw(*lead, G, D) + 1
    g, options = draw(*lead, H * D), {"cu_seqlens_q": CU, "cu_seqlens_kv": CU} if packed else {}

    def step(layer, arrays, g):
        leaves = [fk.tensor(x, requires_grad=True, device="cpu") for x in arrays]
        o = layer(*leaves, **options)
        o.backward(fk.tensor(g, device="cpu"))
        return [o.numpy(), *(leaf.grad.numpy() for leaf in leaves)]

    def make(**more):
        window = (-1, 0) if mask == "causal" else None  # Transformer Engine's way to say it
        own = {"qkv_format": form, "attn_mask_type": mask, "window_size": window}
        return fk.nn.DotProductAttention(H, D, num_gqa_groups=G, **own, **more)

    def rank(ranks):
        own = [part(x, form, ranks.rank, 2) for x in (*arrays, g)]
        return step(make(cp_group=ranks, cp_comm_type=kind), own[:3], own[3])

    wanted = step(make(), arrays, g)
    for i, got in enumerate(FakeCollectives(2).run(rank)):
        for own, whole in zip(got, wanted, strict=True):
            assert np.abs(own - part(whole, form, i, 2)).max() <= APART * np.abs(whole).max()


def test_a_layer_of_two_ranks_and_its_losses():
    """MultiheadAttention with rotary embeddings, three steps of gradient descent."""
    x, goal, angles = draw(S, B, 64), draw(S, B, 64) * 0.5, fk.nn.RotaryPositionEmbedding(16)(S)

    def train(ranks=None):
        fk.manual_seed(0)
        net = fk.nn.MultiheadAttention(64, 4, attention_dropout=0.0, device="cpu")
        with fk.no_grad():
            for i, parameter in enumerate(net.parameters()):
                parameter.copy_(fk.tensor(0.1 * draw(*parameter.shape) + 0.01 * i, device="cpu"))
        net.set_context_parallel_group(ranks)
        own, target = (y if ranks is None else part(y, "sbhd", ranks.rank, ranks.size) for y in (x, goal))
        losses = []
        for _ in range(3):
            y = net(fk.tensor(own, device="cpu"), rotary_pos_emb=angles)
            off = y.numpy() - target
            y.backward(fk.tensor(off / S, device="cpu"))
            total = np.square(off).sum(dtype=np.float64)
            for parameter in net.parameters():
                grad = parameter.grad
                if ranks is not None:
                    ranks.all_reduce(as_view(grad), "sum", 0)
                with fk.no_grad():
                    parameter.add_(fk.tensor(-0.01 * grad.numpy(), device="cpu"))
                parameter.grad = None
            losses.append(total)
        return np.array(losses)

    wanted = train()
    assert wanted[-1] < wanted[0]
    together = sum(FakeCollectives(2).run(train))
    # of sums of a dozen operations, in another order
    assert_close("losses", together, wanted, "float32", 12 * APART * wanted)


@pytest.mark.parametrize("rank", [0, 1])
def test_rotations_of_divided_sequences(rank):
    freqs = fk.nn.RotaryPositionEmbedding(D)(S)
    for form, shape in (("sbhd", (S, B, H, D)), ("bshd", (B, S, H, D)), ("thd", (64, H, D))):
        x, options = draw(*shape), {"cu_seqlens": CU} if form == "thd" else {}
        whole = fk.nn.apply_rotary_pos_emb(x, freqs, form, **options).numpy()
        own = fk.nn.apply_rotary_pos_emb(
            part(x, form, rank, 2), freqs, form, **options, cp_size=2, cp_rank=rank
        )
        assert np.array_equal(own.numpy(), part(whole, form, rank, 2))


def test_an_exchange_and_its_gradient_are_each_others_transposes():
    def rank(ranks):
        own = ranks.rank
        x = np.arange(12, dtype=np.float32).reshape(2, 6) + 100 * own
        leaf, spec = fk.tensor(x, requires_grad=True, device="cpu"), GroupSpec(ranks.name)
        y = apply(columns_to_rows, spec, {"x": leaf})["y"]
        half = np.arange(12).reshape(2, 6)[:, 3 * own : 3 * own + 3]
        assert np.array_equal(y.numpy(), np.concatenate([half, half + 100]))
        back = apply(rows_to_columns, spec, {"x": y})["y"]
        assert np.array_equal(back.numpy(), x)
        back.backward(fk.tensor(2 * x, device="cpu"))
        assert np.array_equal(leaf.grad.numpy(), 2 * x)
        with pytest.raises(ShapeError, match="dimension 1 a multiple of 2"):
            apply(columns_to_rows, spec, {"x": fk.tensor(x[:, :5], device="cpu")})

    FakeCollectives(2).run(rank)


def test_a_step_round_the_ring():
    def rank(ranks):
        x, y = (fk.tensor(np.full(3, value, np.float32), device="cpu") for value in (ranks.rank, -1))
        ranks.shift(x.view, y.view, 0)
        with pytest.raises(ArgumentError, match="shift: source, target"):
            ranks.shift(x.view.slice(0, 0, 2), y.view, 0)
        return y.numpy().tolist()

    assert FakeCollectives(3).run(rank) == [[2.0] * 3, [0.0] * 3, [1.0] * 3]
    assert FakeCollectives(1).run(rank) == [[0.0] * 3]


@pytest.mark.parametrize(
    ("form", "cap"), [("sbhd", 0.0), ("bshd", 0.0), ("thd", 0.0), ("sbhd", 0.5), ("thd", 0.5)]
)
def test_the_chunks_of_one_rank_are_an_attention(device, form, cap):
    """A ring of one rank merges what its second chunk of queries sees in both chunks of keys."""
    packed = form == "thd"
    lead = (64,) if packed else (S, B) if form == "sbhd" else (B, S)
    mask, dtype = ("padding_causal" if packed else "causal"), ("float32" if device == "cpu" else "bfloat16")
    fields = {"num_gqa_groups": G, "qkv_format": form, "mask": mask, "layout": "separate"}
    fields["softcap"] = cap
    spec = AttentionSpec(H, D, **fields, max_seqlen_q=S, max_seqlen_kv=S)
    arrays = {n: draw(*lead, heads * D) + (n == "v") for n, heads in (("q", H), ("k", G), ("v", G))}
    g, sums = draw(*lead, H * D) * 0.5, {}
    order = maps.packed_chunks(np, np.arange(32), CU, None) if packed else maps.chunks(form, lead, None)
    chunk = (2, 32) if packed else (2, S // 2, B) if form == "sbhd" else (2, B, S // 2)
    if packed:
        sums = {f"cu_seqlens_{side}": CU for side in ("q", "kv")}
        own = np.stack([CU // 2, CU // 2])
        starts = {f"cu_seqlens_{side}_padded": CU // 2 for side in ("q", "kv")}
        chunked_sums = {"sums_q": own, "sums_kv": own} | starts
    else:
        chunked_sums = {}

    def step(operation, spec, arrays, g, beside):
        leaves = {n: fk.tensor(x, requires_grad=True, dtype=dtype, device=device) for n, x in arrays.items()}
        o = apply(operation, spec, leaves | {n: fk.tensor(x, device=device) for n, x in beside.items()})["o"]
        o.backward(fk.tensor(g, dtype=dtype, device=device))
        return [o.numpy(), *(leaf.grad.numpy() for leaf in leaves.values())]

    def chunked(x):
        return x.reshape(-1, x.shape[-1])[order[:, 0]].reshape(*chunk, x.shape[-1])

    wanted = step(attention, spec, arrays, g, sums)
    one = FakeCollectives(1).ranks[0]
    ring = RingSpec(replace(spec, max_seqlen_q=S // 2, max_seqlen_kv=S // 2), one.name)
    parts = {n: chunked(x) for n, x in arrays.items()}
    got = step(ring_attention, ring, parts, chunked(g), chunked_sums)
    # of bfloat16 each of two parts, and their sum, are rounded: 2^-9 each, of numbers below the largest
    apart = APART if device == "cpu" else 2.0**-6
    for own, whole in zip(got, wanted, strict=True):
        own, whole = own.astype(np.float32), chunked(whole).astype(np.float32)
        assert np.abs(own - whole).max() <= apart * np.abs(whole).max()


def test_what_a_rank_that_calls_something_else_is_told():
    def rank(ranks):
        x = fk.tensor(np.zeros((2, 4, 2, 32), np.float32), device="cpu")
        spec = RingSpec(AttentionSpec(2, 16, layout="separate"), ranks.name, 2, "layer 3")
        if ranks.rank:
            ranks.all_reduce(x.view, "sum", 0, "layer 4")
        else:
            apply(ring_attention, spec, {"q": x, "k": x, "v": x})

    with pytest.raises(BackendError, match=r"shift of float32 .* in layer 3.*all_reduce sum .* in layer 4"):
        FakeCollectives(2).run(rank)


def test_what_the_ring_refuses():
    group, x = FakeCollectives(2), np.zeros((2, 4, 2, 32), np.float32)
    name = group.ranks[0].name
    random = attention_of(Quantizer(E4M3, stochastic_bits=8), Quantizer(E5M2))
    for changes, arrays, error, text in (
        ({"layout": "qkv"}, (x, x, x), UnsupportedError, "layout: got 'qkv'"),
        ({"dropout": 0.1}, (x, x, x), UnsupportedError, "dropout"),
        ({"window_size": (3, 0)}, (x, x, x), UnsupportedError, "window_size"),
        ({"quantized": random}, (x, x, x), UnsupportedError, "would draw the same bits"),
        ({}, (x[:1], x, x), ShapeError, "q: got shape"),
        ({}, (x[:, :0], x[:, :0], x[:, :0]), ShapeError, "an empty chunk"),
        ({"mask": "padding"}, (x, x, x), ShapeError, "cu_seqlens_q"),
    ):
        spec = RingSpec(AttentionSpec(2, 16, **({"layout": "separate"} | changes)), name)
        inputs = {n: fk.tensor(y, device="cpu") for n, y in zip("qkv", arrays, strict=True)}
        with pytest.raises(error, match=text):
            apply(ring_attention, spec, inputs)


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_maps_of_padded_batches(form):
    """Rows of ranks, brought into the order of the sequences, are the whole; chunks come one after the
    other."""
    lead, size = ((8, 3) if form == "sbhd" else (3, 8)), 4
    whole = np.arange(96).reshape((32, 3) if form == "sbhd" else (3, 32))
    gathered = np.concatenate([part(whole, form, rank, size).ravel() for rank in range(size)])
    ordered = maps.order(form, lead, size, 2)
    assert np.array_equal(gathered[ordered[:, 0]], whole.ravel())
    own = part(whole, form, 1, size).ravel()
    chunks = own[maps.chunks(form, lead, None)[:, 0]]
    axis = form.index("s")
    assert np.array_equal(chunks[:12], np.take(whole, range(4, 8), axis).ravel())
    assert np.array_equal(chunks[12:], np.take(whole, range(24, 28), axis).ravel())
    assert np.array_equal(own[maps.chunks(form, lead, 1)[:, 0]], chunks[12:])


def test_maps_of_packed_sequences():
    """The same, with sequences of no tokens and tokens of no sequence, whose rows are empty."""
    starts, tokens, size = np.int32([0, 0, 8, 24, 24]), 32, 2
    whole = np.arange(tokens)
    own = [
        np.concatenate([whole[[0, 1, 6, 7]], whole[8:12], whole[20:24], whole[24:28]]),
        np.concatenate([whole[2:6], whole[12:20], whole[28:]]),
    ]
    ordered = maps.packed_order(np, np.arange(tokens), starts, size)
    assert np.array_equal(np.concatenate(own)[ordered[:24, 0]], whole[:24])
    assert (ordered[24:] == -1).all()
    chunks = maps.packed_chunks(np, np.arange(8), starts // size, None)
    assert own[0][chunks[:6, 0]].tolist() == [0, 1, 8, 9, 10, 11]
    assert own[0][chunks[8:14, 0]].tolist() == [6, 7, 20, 21, 22, 23]
    assert (chunks[[6, 7, 14, 15]] == -1).all()
    assert maps.chunk_sums(np, np.int32([0, 0, 5, 21, 21]), starts, (4, 2)).tolist() == [0, 0, 1, 5, 5]
    assert maps.sums_up_to(np, np.int32([0, 0, 5, 21, 21]), starts, (4, 3)).tolist() == [0, 0, 5, 17, 17]
