"""Permutation of tokens to experts and back, against loops in float64."""

from __future__ import annotations

import fp8kit_torch as ft
import numpy as np
import pytest
import torch
from fp8kit_torch import moe

import fp8kit as fk
from fp8kit.errors import ArgumentError, Fp8kitError, ShapeError
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from tests.support.combinations import combinations

TOKENS, EXPERTS, HIDDEN = 13, 5, 7


def draw(seed, *shape, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def mask_of(seed, density=0.4):
    return torch.from_numpy(np.random.default_rng(seed).random((TOKENS, EXPERTS)) < density)


def pairs_of(mask):
    """(token, expert) in the order of the permuted rows."""
    return [(t, e) for e in range(mask.shape[1]) for t in range(mask.shape[0]) if mask[t, e]]


def f64(t):
    return t.detach().to(torch.float64).numpy()


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [0, 3, -4], ids=["exact", "room", "dropping"])
def test_mask_map(dtype, more):
    mask, x = mask_of(0), draw(1, TOKENS, HIDDEN, dtype=dtype).requires_grad_()
    pairs = pairs_of(mask)
    rows = len(pairs) + more
    out, row_id_map = moe.moe_permute(x, mask, rows)
    wanted = np.zeros((rows, HIDDEN))
    for r, (t, _) in enumerate(pairs[:rows]):
        wanted[r] = f64(x)[t]
    assert_same_bits("rows", f64(out), wanted)
    g = draw(2, rows, HIDDEN, dtype=dtype)
    out.backward(g)
    dx, size = np.zeros((TOKENS, HIDDEN)), np.zeros((TOKENS, HIDDEN))
    for r, (t, _) in enumerate(pairs[:rows]):
        dx[t] += f64(g)[r]
        size[t] += np.abs(f64(g)[r])
    assert_close("dx", f64(x.grad), dx, name_of(dtype), sum_slack(size, EXPERTS))

    probs = draw(3, TOKENS, EXPERTS).requires_grad_()
    y = draw(4, rows, HIDDEN, dtype=dtype).requires_grad_()
    back = moe.moe_unpermute(y, row_id_map, probs, (TOKENS, HIDDEN))
    g = draw(5, TOKENS, HIDDEN, dtype=dtype)
    back.backward(g)
    total, size, dy, dp = (
        np.zeros((TOKENS, HIDDEN)),
        np.zeros((TOKENS, HIDDEN)),
        np.zeros((rows, HIDDEN)),
        np.zeros((TOKENS, EXPERTS)),
    )
    for r, (t, e) in enumerate(pairs[:rows]):
        p = f64(probs)[t, e]
        total[t] += p * f64(y)[r]
        size[t] += np.abs(p * f64(y)[r])
        dy[r] = p * f64(g)[t]
        dp[t, e] = f64(y)[r] @ f64(g)[t]
    assert_close("out", f64(back), total, name_of(dtype), sum_slack(size, EXPERTS))
    assert_close("dy", f64(y.grad), dy, name_of(dtype))
    magnitude = np.abs(f64(y)).max() * np.abs(f64(g)).max() * HIDDEN
    assert_close("dprobs", f64(probs.grad), dp, "float32", sum_slack(magnitude, HIDDEN))


@pytest.mark.parametrize("rows", [-1, 20, 40], ids=["all", "dropping", "room"])
def test_index_map(rows):
    topk = 2
    index = torch.from_numpy(np.random.default_rng(0).integers(-1, EXPERTS, (TOKENS, topk)).astype(np.int32))
    x = draw(1, TOKENS, HIDDEN).requires_grad_()
    out, row_id_map = moe.moe_permute(x, index, rows, map_type="index")
    flat = [(t, k) for t in range(TOKENS) for k in range(topk)]
    order = sorted((p for p in flat if index[p] >= 0), key=lambda p: int(index[p]))
    count = TOKENS * topk if rows < 0 else rows
    order = order[:count]
    wanted = np.zeros((count, HIDDEN))
    for r, (t, _) in enumerate(order):
        wanted[r] = f64(x)[t]
    assert_same_bits("rows", f64(out), wanted)
    probs = draw(2, TOKENS, topk).requires_grad_()
    back = moe.moe_unpermute(out, row_id_map, probs, map_type="index")
    total, size = np.zeros((TOKENS, HIDDEN)), np.zeros((TOKENS, HIDDEN))
    for t, k in order:
        total[t] += f64(probs)[t, k] * f64(x)[t]
        size[t] += np.abs(f64(probs)[t, k] * f64(x)[t])
    assert_close("out", f64(back), total, "float32", sum_slack(size, topk))
    # the gradient of both together, against torch's own autograd in float64
    g = draw(3, TOKENS, HIDDEN)
    back.backward(g)
    x64, p64 = x.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    weights = torch.zeros(TOKENS, dtype=torch.float64)
    for t, k in order:
        weights = weights + p64[t, k] * torch.nn.functional.one_hot(torch.tensor(t), TOKENS)
    (x64 * weights[:, None]).backward(g.double())
    assert_close("dx", f64(x.grad), f64(x64.grad), "float32", sum_slack(10 * np.abs(f64(g)), 4))
    assert_close(
        "dprobs",
        f64(probs.grad),
        f64(p64.grad),
        "float32",
        sum_slack(HIDDEN * np.abs(f64(x) * f64(g)).max(), HIDDEN),
    )


def test_probs_travel_with_their_rows_and_padding_fills_experts_up():
    mask, x = mask_of(7), draw(1, TOKENS, HIDDEN).requires_grad_()
    probs = draw(2, TOKENS, EXPERTS).requires_grad_()
    pairs = pairs_of(mask)
    rows, weights, _ = moe.moe_permute_with_probs(x, probs, mask, len(pairs))
    assert_same_bits("probs", f64(weights), np.array([f64(probs)[p] for p in pairs]))
    counts = mask.sum(0)
    padded, pad_weights, row_id_map, offsets, new_counts = moe.moe_permute_and_pad_with_probs(
        x, probs, mask, counts, 4
    )
    assert new_counts.tolist() == [-(-int(c) // 4) * 4 for c in counts]
    start = 0
    for e, (have, want) in enumerate(zip(counts.tolist(), new_counts.tolist(), strict=True)):
        tokens = [t for t in range(TOKENS) if mask[t, e]]
        assert_same_bits(f"expert {e}", f64(padded)[start : start + have], f64(x)[tokens])
        assert not padded[start + have : start + want].any()
        assert not pad_weights[start + have : start + want].any()
        assert_same_bits(
            f"probs of expert {e}", f64(pad_weights)[start : start + have], f64(probs)[tokens, e]
        )
        start += want
    back = moe.moe_unpermute(padded, row_id_map, restore_shape=x.shape, pad_offsets=offsets)
    plain = moe.moe_unpermute(rows, row_id_map, restore_shape=x.shape)
    assert_same_bits("unpermuted", f64(back), f64(plain))
    (pad_weights * torch.arange(len(pad_weights))).sum().backward()
    where = {
        p: i
        for i, p in enumerate(
            (t, e)
            for e in range(EXPERTS)
            for t in [*[t for t in range(TOKENS) if mask[t, e]], *[-1] * int(new_counts[e] - counts[e])]
        )
    }
    wanted = np.array([[where.get((t, e), 0) for e in range(EXPERTS)] for t in range(TOKENS)], float)
    assert_same_bits("dprobs", f64(probs.grad), wanted)


def test_sorting_chunks():
    x, probs = draw(0, 11, 3).requires_grad_(), draw(1, 11).requires_grad_()
    sizes, order = torch.tensor([3, 0, 5, 2, 1]), torch.tensor([2, 4, 0, 1, 3])
    cuts = np.cumsum(sizes.numpy())[:-1]
    chunks, weights = f64(x).copy(), f64(probs).copy()
    wanted = np.concatenate([np.split(chunks, cuts)[i] for i in order])
    rows, out_probs = moe.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    assert_same_bits("rows", f64(rows), wanted)
    assert_same_bits("probs", f64(out_probs), np.concatenate([np.split(weights, cuts)[i] for i in order]))
    assert_same_bits("rows alone", f64(moe.moe_sort_chunks_by_index(x, sizes, order)), wanted)
    (rows * 2).sum().backward()
    assert_same_bits("dx", f64(x.grad), np.full((11, 3), 2.0))


def test_empty_inputs_and_refusals():
    out, row_id_map = moe.moe_permute(torch.zeros(0, 4), torch.zeros(0, 3, dtype=torch.bool), 0)
    assert out.shape == (0, 4)
    assert moe.moe_unpermute(out, row_id_map, restore_shape=(0, 4)).shape == (0, 4)
    x, mask = torch.zeros(3, 4), torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(ShapeError, match="moe_permute: routing_map"):
        moe.moe_permute(x, torch.ones(2, 2, dtype=torch.bool), 4)
    with pytest.raises(Fp8kitError, match="num_out_tokens"):
        moe.moe_permute(x, mask, -1)
    with pytest.raises(Fp8kitError, match="map_type"):
        moe.moe_permute(x, mask, 6, map_type="tokens")
    rows, row_id_map = moe.moe_permute(x, mask, 6)
    with pytest.raises(ShapeError, match="restore_shape"):
        moe.moe_unpermute(rows, row_id_map, restore_shape=(3, 5))
    with pytest.raises(ShapeError, match="inp"):
        moe.moe_unpermute(rows[:4], row_id_map, restore_shape=(3, 4))
    with pytest.warns(DeprecationWarning, match="merging_probs"):
        moe.moe_unpermute(rows, row_id_map, probs=torch.ones(3, 2))
    for sizes, order, argument in (
        ([1, 1], [1, 0], "split_sizes: got 2 rows together, expected 3"),
        ([4, -1], [1, 0], "split_sizes: got .* at least 0"),
        ([1, 2], [0, 0], "sorted_index: got .* a permutation of 2 chunks"),
        ([1, 2], [0, 2], "sorted_index"),
        ([1, 2], [-1, 0], "sorted_index"),
    ):
        with pytest.raises(ShapeError, match=f"moe_sort_chunks_by_index: {argument}"):
            moe.moe_sort_chunks_by_index(x, torch.tensor(sizes), torch.tensor(order))
    with pytest.raises(ArgumentError, match=r"tokens_per_expert: got \[3, 2\], expected the mask's \[3, 3\]"):
        moe.moe_permute_and_pad_with_probs(x, torch.ones(3, 2), mask, torch.tensor([3, 2]), 4)
    with pytest.raises(ShapeError, match="token_dispatch: routing_map"):
        moe.token_dispatch(x, mask[:2], 6)
    with pytest.raises(ArgumentError, match="token_dispatch: align_size"):
        moe.token_dispatch(x, mask, 6, align_size=0)
    with pytest.raises(ArgumentError, match="token_dispatch: num_experts"):
        moe.token_dispatch(x, mask, 6, num_experts=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
@pytest.mark.parametrize("odd", [2**32, 2**32 + 1, 2**31, 2**33 - 1, -(2**32), -(2**63)])
def test_indices_that_int32_does_not_hold_are_no_experts(odd, dtype):
    if dtype is torch.uint32 and not 0 <= odd < 2**32:
        odd = 2**32 - 1
    x, index = draw(0, 2, 4), torch.tensor([[1], [odd]], dtype=dtype)
    rows, _, row_map, _, sizes = moe.token_dispatch(x, index, 2, num_experts=3)
    assert sizes.tolist() == [0, 1, 0]
    assert_same_bits("rows", rows.numpy(), torch.stack((x[0], torch.zeros(4))).numpy())
    assert row_map.tolist() == [[0, 0], [-1, -1]]


def padded_and_back(x, probs, mask):
    rows, weights, row_id_map, offsets, _ = moe.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 8)
    rows = rows * rows * weights[:, None]
    return moe.moe_unpermute(rows, row_id_map, restore_shape=x.shape, pad_offsets=offsets)


def dispatched_and_back(x, probs, mask):
    rows, weights, row_id_map, _, _ = moe.token_dispatch(x, mask, TOKENS * EXPERTS, probs, 8)
    return moe.moe_unpermute(rows * rows * weights[:, None], row_id_map, restore_shape=x.shape)


@combinations({"path": [padded_and_back, dispatched_and_back]}, usual=())  # test_grouped_mlp compiles one
def test_compiled_rows_are_padded(path):
    """Without a look at the mask, with gradients; with and without numbers on the host."""
    made = []
    for call in (padded_and_back, torch.compile(path, fullgraph=True, backend="aot_eager")):
        x, probs = (draw(i, TOKENS, n).requires_grad_() for i, n in ((1, HIDDEN), (2, EXPERTS)))
        y = call(x, probs, mask_of(3))
        y.sum().backward()
        made.append((y, x.grad, probs.grad))
    for name, got, want in zip(("y", "dx", "dprobs"), made[1], made[0], strict=True):
        assert_same_bits(name, f64(got), f64(want))


@pytest.mark.parametrize("indices", [False, True], ids=["mask", "indices"])
@pytest.mark.parametrize("align", [None, 4])
def test_rows_of_a_fixed_number(indices, align):
    """``token_dispatch``: the rows of a loop, and the same as natively."""
    mask, x, probs = mask_of(5), draw(1, TOKENS, HIDDEN), draw(2, TOKENS, EXPERTS)
    routing = torch.where(mask, torch.arange(EXPERTS), -1) if indices else mask
    experts = EXPERTS if indices else None
    room = int(mask.sum()) + 3
    rows, weights, row_id_map, nothing, sizes = moe.token_dispatch(x, routing, room, probs, align, experts)
    step = align or 1
    total = (room + EXPERTS * (step - 1)) // step * step
    want, factors, start, counts = np.zeros((total, HIDDEN)), np.zeros(total), 0, []
    for e in range(EXPERTS):
        tokens = np.flatnonzero(mask[:, e])
        want[start : start + len(tokens)] = f64(x)[tokens]
        factors[start : start + len(tokens)] = f64(probs)[tokens, e]
        counts.append(-(-len(tokens) // step) * step)
        start += counts[-1]
    assert nothing is None
    assert sizes.tolist() == counts
    assert_same_bits("rows", f64(rows), want)
    assert_same_bits("probs", f64(weights), factors)
    given = routing.int().numpy() if indices else mask.numpy().astype(np.uint8)
    own = fk.nn.moe.token_dispatch(x.numpy(), given, room, probs.numpy(), align, experts)
    for name, a, b in zip(("rows", "probs", "map"), (rows, weights, row_id_map), own, strict=False):
        assert_same_bits(f"native {name}", a.numpy(), b.numpy())
    assert moe.token_dispatch(x, mask, room)[1] is None


@combinations({"map_type": ["mask", "index"], "tokens": [5, 0]}, usual=["index-5"])
def test_compiled_it_has_the_same_gradients(map_type, tokens):
    """Of rows and of probabilities, without tokens too."""
    table = torch.arange(3 * tokens).reshape(tokens, 3) % 4
    routing, count = (table > 1, int((table > 1).sum())) if map_type == "mask" else (table, table.numel())

    def step(x, probs):
        rows, row_id_map = moe.moe_permute(x, routing, count, map_type=map_type)
        return moe.moe_unpermute(rows * rows, row_id_map, probs, map_type=map_type)

    results = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x, probs = (draw(i, tokens, n).requires_grad_() for i, n in ((1, 8), (2, 3)))
        y = call(x, probs)
        y.sum().backward()
        results.append((y, x.grad, probs.grad))
    for name, got, want in zip(("y", "dx", "dprobs"), results[1], results[0], strict=True):
        assert got.shape == want.shape
        assert_same_bits(name, f64(got), f64(want))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compiled_the_number_of_rows_may_be_read_from_a_tensor():
    def there_and_back(x, mask):
        rows, row_id_map = moe.moe_permute(x, mask, mask.sum().item())
        return moe.moe_unpermute(rows, row_id_map, restore_shape=x.shape)

    x, mask = draw(1, 5, 8), torch.arange(15).reshape(5, 3) % 4 > 1
    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, mask), there_and_back(x, mask))


def test_compiled_chunks_are_sorted():
    sizes, order = torch.tensor([2, 0, 3]), torch.tensor([2, 0, 1])
    call = torch.compile(moe.moe_sort_chunks_by_index, fullgraph=True, backend="aot_eager")
    x, other = (draw(1, 5, 8).requires_grad_() for _ in range(2))
    y, want = call(x, sizes, order), moe.moe_sort_chunks_by_index(other, sizes, order)
    for each in (y, want):
        (each * each).sum().backward()
    assert_same_bits("y", f64(y), f64(want))
    assert_same_bits("dx", f64(x.grad), f64(other.grad))


# --- tensors in FP8 and FP4 ---------------------------------------------------------------------------------

E4M3 = ft.DType.kFloat8E4M3
QUANTIZERS = {
    "tensor": lambda: ft.Float8CurrentScalingQuantizer(E4M3),
    "rows": lambda: ft.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "mxfp8": lambda: ft.MXFP8Quantizer(E4M3),
    "mxfp8 squares": lambda: ft.MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4": lambda: ft.NVFP4Quantizer(),
    "nvfp4 rows": lambda: ft.NVFP4Quantizer(row_scaled_nvfp4=True),
}


def quantized(name, device):
    """(a tensor of that kind, its values, a mask)."""
    torch.manual_seed(0)
    x = torch.randn(32, 96, device=device) * torch.logspace(-2, 2, 32, device=device)[:, None]
    held = QUANTIZERS[name]()(x)
    return held.requires_grad_(), held.dequantize().detach().requires_grad_(), torch.rand(32, 4) < 0.4


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("more", [0, 5, -7], ids=["exact", "room", "dropping"])
def test_codes_and_scales_are_permuted(name, more, device):
    held, values, mask = quantized(name, device)
    mask = mask.to(device)
    rows = int(mask.sum()) + more
    out, row_map = moe.moe_permute(held, mask, rows)
    plain, _ = moe.moe_permute(values, mask, rows)
    assert type(out) is type(held)
    assert out.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(out.dequantize(), plain)
    places = row_map[:, 0].long()
    own = out._rowwise_data[places >= 0]
    assert torch.equal(own, held._rowwise_data[places[places >= 0]])  # and not cast anew
    grad = torch.randn(rows, 96, device=device)
    for result, leaf in ((out, held), (plain, values)):
        result.backward(grad)
        assert type(leaf.grad) is torch.Tensor
    assert torch.equal(held.grad, values.grad)
    back = moe.moe_unpermute(out.detach(), row_map, restore_shape=values.shape)
    assert type(back) is torch.Tensor
    assert torch.equal(back, moe.moe_unpermute(plain.detach(), row_map, restore_shape=values.shape))
    for part in out._parts.values():
        part.zero_()
    assert torch.equal(held.dequantize(), values)  # nothing is shared


@pytest.mark.parametrize("name", QUANTIZERS)
def test_probabilities_go_along_with_codes(name, device):
    held, values, mask = quantized(name, device)
    mask, found = mask.to(device), []
    for x in (held, values):
        probs = draw(1, 32, 4).to(device).requires_grad_()
        several = [
            moe.moe_permute_with_probs(x, probs, mask, 40),
            moe.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 16),
            moe.token_dispatch(x, mask, 40, probs, 8),
        ]
        assert {type(each[0]) for each in several} == {type(x)}
        sum(each[1].sum() * i for i, each in enumerate(several, 1)).backward()
        plain = [y.dequantize() if x is held else y for y, *_ in several]
        found.append([*plain, *[each[1] for each in several], probs.grad])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_chunks_of_codes_are_sorted(name, device):
    held, values, _ = quantized(name, device)
    chunks = torch.tensor([3, 20, 9]), torch.tensor([2, 0, 1])
    found = moe.moe_sort_chunks_by_index(held, *chunks)
    assert type(found) is type(held)
    assert torch.equal(found.dequantize(), moe.moe_sort_chunks_by_index(values, *chunks))


def test_a_layer_multiplies_permuted_codes_as_they_are(device):
    """Their scale is that of all tokens, though the largest is dropped."""
    held, values, mask = quantized("tensor", device)
    mask = mask.to(device)
    mask[-1] = False
    out, _ = moe.moe_permute(held, mask, int(mask.sum()))
    same = ft.Float8Quantizer(1 / held._scale_inv, torch.zeros(1, device=device), E4M3)
    plain, _ = moe.moe_permute(values, mask, int(mask.sum()))
    layer = ft.Linear(96, 32, device=device)
    with ft.autocast(recipe=ft.Float8CurrentScaling()):
        y = layer(out)
        assert torch.equal(y, layer(same(plain)))
        assert not torch.equal(y, layer(plain))


def test_rows_without_scales_of_their_own_are_values(device):
    x = torch.randn(128, 128, device=device)
    mask = torch.ones(128, 1, device=device, dtype=torch.bool)
    squares = ft.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)(x)
    columns = ft.MXFP8Quantizer(E4M3, rowwise=False)(x)
    for held in (squares, columns):
        out, _ = moe.moe_permute(held, mask, 128)
        assert type(out) is torch.Tensor
        assert torch.equal(out, held.dequantize())


@pytest.mark.parametrize("name", QUANTIZERS)
def test_no_tokens_in_fp8(name, device):
    held, _, mask = quantized(name, device)
    none = held.taken_rows(torch.zeros(0, dtype=torch.int32, device=device))
    out, _ = moe.moe_permute(none, mask[:0].to(device), 4)
    assert out.shape == (4, 96)
    assert type(out) is type(held)
    assert not out.dequantize().any()


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu():
    mask, x, probs = mask_of(3), draw(1, TOKENS, HIDDEN, dtype=torch.bfloat16), draw(2, TOKENS, EXPERTS)
    results = []
    for device in ("cpu", "cuda"):
        a, p = (t.detach().to(device).requires_grad_() for t in (x, probs))
        rows, weights, row_id_map = moe.moe_permute_with_probs(a, p, mask.to(device), int(mask.sum()))
        out = moe.moe_unpermute(rows * weights[:, None].to(rows.dtype), row_id_map, p, x.shape)
        out.sum().backward()
        results.append([f64(t.cpu()) for t in (rows, weights, out, a.grad, p.grad)])
    for cpu, gpu, name in zip(*results, ("rows", "weights", "out", "dx", "dprobs"), strict=True):
        assert_close(name, gpu, cpu, "bfloat16", sum_slack(EXPERTS * np.abs(cpu).max(), HIDDEN))
