"""Kernels of ``transformer_engine_torch`` that programs call themselves: norms, rotations, softmax, dropout,
products, and sequences that lie one after the other; beside torch's own operations."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.te_compat import extension as enums
from fp8kit_torch.te_compat import extension_kernels as tex
from fp8kit_torch.te_compat import extension_sequences as thd

from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close, largest

CU = torch.tensor([0, 8, 24, 32], dtype=torch.int32)  # sequences of 8, 16 and 8 tokens


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms(device, kind, centered):
    x = torch.randn(3, 5, 32, device=device, requires_grad=True)
    weight, bias = (torch.randn(32, device=device, requires_grad=True) for _ in range(2))
    gain = weight + 1 if centered else weight
    g = torch.randn_like(x)
    if kind == "layernorm":
        y = torch.nn.functional.layer_norm(x, (32,), gain, bias, 1e-5)
        wanted = torch.autograd.grad(y, (x, weight, bias), g)
        found, mean, rstd = tex.layernorm_fwd(
            x, weight, bias, 1e-5, None, None, ft.DType.kFloat32, 0, centered
        )
        assert_tensor_close("mean", mean.view(3, 5), x.mean(-1), sum_slack(largest(x), 32))
        grads = tex.layernorm_bwd(g, x, mean, rstd, weight, 0, centered)
    else:
        y = torch.nn.functional.rms_norm(x, (32,), gain, 1e-5)
        wanted = torch.autograd.grad(y, (x, weight), g)
        found, mean, rstd = tex.rmsnorm_fwd(x, weight, 1e-5, None, None, ft.DType.kFloat32, 0, centered)
        assert mean is None
        exact = (x.square().mean(-1) + 1e-5).rsqrt()
        assert_tensor_close("rstd", rstd.view(3, 5), exact, sum_slack(largest(exact), 32))
        grads = tex.rmsnorm_bwd(g, x, rstd, weight, 0, centered)
        more, _ = tex.rmsnorm_bwd_add(g, x, y.detach(), rstd, weight, 0, centered)
        exact = wanted[0] + y
        assert_tensor_close("dx + y", more, exact, sum_slack(largest(exact, y, wanted[0]), 2 * 32))
    assert_tensor_close("y", found, y, sum_slack(largest(y), 32))
    for own, other in zip(grads, wanted, strict=True):
        assert_tensor_close("gradient", own, other, sum_slack(largest(other), 2 * 32 + 15))


def test_a_norms_result_is_cast_and_written():
    x, weight = torch.randn(16, 32).bfloat16(), torch.ones(32)
    quantizer = ft.Float8CurrentScalingQuantizer(ft.DType.kFloat8E4M3)
    plain, _, _ = tex.rmsnorm_fwd(x, weight, 1e-5, None, None, ft.DType.kBFloat16, 0, False)
    assert plain.dtype is torch.bfloat16
    held, _, _ = tex.rmsnorm_fwd(x, weight, 1e-5, None, quantizer, ft.DType.kBFloat16, 16, False)
    assert torch.equal(held._data, quantizer(plain)._data)
    out = torch.empty_like(x)
    assert tex.rmsnorm_fwd(x, weight, 1e-5, out, None, None, 0, False)[0] is out
    assert torch.equal(out, plain)
    with pytest.raises(ShapeError, match="weight"):
        tex.rmsnorm_fwd(x, torch.ones(16), 1e-5, None, None, None, 0, False)


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_rotations(form):
    freqs = ft.RotaryPositionEmbedding(16)(8)
    shape = (8, 2, 3, 16) if form == "sbhd" else (2, 8, 3, 16)
    x, g = torch.randn(shape, requires_grad=True), torch.randn(shape)
    y = ft.attention.rope.apply_rotary_pos_emb(x, freqs, form)
    number = enums.NVTE_QKV_Format[f"NVTE_{form.upper()}"]
    assert torch.equal(tex.fused_rope_forward(x, freqs, None, number, False, None, 1, 0), y)
    assert torch.equal(
        tex.fused_rope_backward(g, freqs, None, number, False, None, 1, 0), torch.autograd.grad(y, x, g)[0]
    )
    qkv = torch.randn(*shape[:2], 2, 4 * 16, requires_grad=True)  # two groups of two queries
    made = ft.attention.rope.apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [32, 16, 16], form)
    grads = [torch.randn_like(part) for part in made]
    found = tex.fused_qkv_rope_forward(qkv, freqs, freqs, None, [32, 16, 16], number, False)
    assert all(map(torch.equal, found, made))
    (wanted,) = torch.autograd.grad(made, qkv, grads)
    assert torch.equal(
        tex.fused_qkv_rope_backward(*grads, freqs, freqs, None, [32, 16, 16], number, False), wanted
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_rotations_of_divided_sequences(rank):
    """A process' tokens get the angles that they have in the whole sequences."""
    freqs = ft.RotaryPositionEmbedding(16)(16)
    whole = torch.randn(16, 2, 3, 16)
    own = thd.thd_get_partitioned_indices(torch.tensor([0, 16]), 16, 2, rank)
    rotate = ft.attention.rope.apply_rotary_pos_emb
    found = rotate(whole[own], freqs, cp_size=2, cp_rank=rank)
    assert torch.equal(found, rotate(whole, freqs)[own])
    found = rotate(whole[own].transpose(0, 1), freqs, "bshd", cp_size=2, cp_rank=rank)
    assert torch.equal(found.transpose(0, 1), rotate(whole, freqs)[own])
    packed, own = torch.randn(32, 3, 16), thd.thd_get_partitioned_indices(CU, 32, 2, rank)
    found = rotate(packed[own], freqs, "thd", cu_seqlens=CU, cp_size=2, cp_rank=rank)
    assert torch.equal(found, rotate(packed, freqs, "thd", cu_seqlens=CU)[own])
    with pytest.raises(ShapeError, match="positions"):
        rotate(whole, freqs, cp_size=2, cp_rank=rank)
    with pytest.raises(ArgumentError, match="cp_rank"):
        rotate(whole, freqs, cp_size=2, cp_rank=2)


def test_softmax():
    x = torch.randn(2, 3, 8, 16, requires_grad=True)
    mask = torch.rand(2, 1, 8, 16) < 0.3
    mask[0, 0, 0] = True
    causal = torch.ones(8, 16, dtype=torch.bool).triu(9)
    square = x[..., :8].reshape(6, 8, 8)
    above = torch.ones(8, 8, dtype=torch.bool).triu(1)
    cases = [
        (tex.scaled_softmax_forward, (x,), torch.zeros(1, dtype=torch.bool)),
        (tex.scaled_masked_softmax_forward, (x, mask), mask),
        (tex.scaled_aligned_causal_masked_softmax_forward, (x,), causal),
        (tex.scaled_upper_triang_masked_softmax_forward, (square,), above),
    ]
    for function, given, hidden in cases:
        y = (0.5 * given[0]).masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden, 0)
        found = function(*given, 0.5)
        assert_tensor_close(function.__name__, found, y, sum_slack(1, 16))
        g = torch.randn_like(y)
        (wanted,) = torch.autograd.grad(y, given[0], g, retain_graph=True)
        made = tex.scaled_softmax_backward(g, found, 0.5)
        assert_tensor_close(function.__name__, made, wanted, sum_slack(largest(g), 16))
    with pytest.raises(ShapeError, match="as many rows as columns"):
        tex.scaled_upper_triang_masked_softmax_forward(x[0], 1.0)


def test_dropout():
    x = torch.ones(100, 13)
    torch.manual_seed(0)
    y, mask = tex.dropout_fwd(x, 0.25)
    assert mask.dtype is torch.uint8
    assert mask.numel() == -(-1300 // 8)
    assert set(y.unique().tolist()) == {0.0, x.div(0.75)[0, 0].item()}
    left = (y != 0).float().mean().item()
    assert abs(left - 0.75) < 4 * (0.75 * 0.25 / 1300) ** 0.5  # four standard deviations
    assert torch.equal(tex.dropout_bwd(x, mask, 0.25), y)
    assert not tex.dropout_fwd(x, 1.0)[0].any()


def test_products_and_versions():
    a, b, bias = torch.randn(24, 16), torch.randn(8, 16), torch.randn(24)
    rest = (None, 0, False, None, False, None, 0, False, False)
    y, *others = tex.generic_gemm(a, True, b, False, None, None, ft.DType.kFloat32, bias, *rest[1:])
    size = b.abs() @ a.abs().t() + bias.abs()
    assert_tensor_close("y", y, b @ a.t() + bias, sum_slack(size, 17))
    assert others == [None, None, None]
    assert isinstance(tex.get_cudnn_version(), int)
    assert enums.DType.kFloat32 == 4
    assert tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend == -1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_process_has_two_chunks_of_each_sequence(ranks):
    found = [thd.thd_get_partitioned_indices(CU, 32, ranks, rank).tolist() for rank in range(ranks)]
    for rank, own in enumerate(found):
        wanted = []
        for start, end in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
            size = (end - start) // (2 * ranks)
            for chunk in (rank, 2 * ranks - 1 - rank):
                wanted += range(start + chunk * size, start + (chunk + 1) * size)
        assert own == wanted
    assert sorted(token for own in found for token in own) == list(range(32))
    with pytest.raises(ArgumentError, match="rank"):
        thd.thd_get_partitioned_indices(CU, 32, ranks, ranks)
    with pytest.raises(ShapeError, match="total_tokens"):
        thd.thd_get_partitioned_indices(CU, 31, ranks, 0)


def halves():
    """Tokens of the first, and of the second halves."""
    parts = [(s, (s + e) // 2, e) for s, e in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True)]
    first = [t for s, middle, _ in parts for t in range(s, middle)]
    return first, [t for _, middle, e in parts for t in range(middle, e)]


def test_halves_of_sequences():
    first, second = halves()
    x, both = torch.randn(32, 2, 4), torch.randn(2, 32, 2, 4)
    assert torch.equal(thd.thd_read_half_tensor(x, CU, 0), x[first])
    assert torch.equal(thd.thd_read_half_tensor(both, CU, 1), both[:, second])
    lse = torch.randn(2, 32)
    found = thd.thd_read_second_half_lse(lse, CU, True, 20)
    assert torch.equal(found[:, :16], lse[:, second])
    assert not found[:, 16:].any()
    padded = torch.randn(3, 2, 16)
    found = thd.thd_read_second_half_lse(padded, CU, False, 8)
    assert torch.equal(found[1], padded[1, :, 8:])
    assert torch.equal(found[2, :, :4], padded[2, :, 4:8])
    assert not found[2, :, 4:].any()


def test_attention_in_parts_is_attention():
    """Second halves' queries over two sets of keys, one after the other, corrected: as over both at once."""
    first, second = halves()
    scores, values = torch.randn(32, 2, 10), torch.randn(10, 2, 4)

    def attend(rows, keys):
        s = scores[rows][..., keys]
        return torch.einsum("thk,khd->thd", s.softmax(-1), values[keys]), s.logsumexp(-1)

    whole = list(range(32))
    keys, more = list(range(6)), list(range(6, 10))
    (out, lse), (part, part_lse) = attend(whole, keys), attend(second, more)
    total = lse.t().contiguous()
    thd.thd_second_half_lse_correction(total, part_lse.t().contiguous(), CU, True)
    result = torch.zeros_like(out)
    thd.thd_out_correction(result, out, total, lse.t().contiguous(), CU, False, True)
    thd.thd_out_correction(result, part, total, part_lse.t().contiguous(), CU, True, True)
    slack = sum_slack(largest(values), 2 * 10)  # of probabilities, which sum up to 1, in two parts
    assert_tensor_close("second", result[second], attend(second, keys + more)[0], slack)
    assert_tensor_close("first", result[first], out[first], slack)
    # the same with statistics (b, h, s)
    wide = thd.convert_thd_to_bshd(lse, CU, 3, 16).transpose(1, 2).contiguous()
    small = torch.zeros(3, 2, 8)
    for i, (start, length) in enumerate(((0, 4), (4, 8), (12, 4))):
        small[i, :, :length] = part_lse[start : start + length].t()
    summed, again = wide.clone(), torch.zeros_like(out)
    thd.thd_second_half_lse_correction(summed, small, CU, False)
    thd.thd_out_correction(again, out, summed, wide, CU, False, False)
    thd.thd_out_correction(again, part, summed, small, CU, True, False)
    assert_tensor_close("bhs", again, result, slack)


def test_gradients_in_parts():
    first, second = halves()
    start, half, whole = torch.randn(32, 2, 4), torch.randn(16, 2, 4), torch.randn(32, 2, 4)
    grad = start.clone()
    thd.thd_grad_correction(grad, half, CU, "none", "add")
    assert torch.equal(grad[second], start[second] + half)
    assert torch.equal(grad[first], start[first])
    thd.thd_grad_correction(grad, whole, CU, "copy", "add")
    assert torch.equal(grad[first], whole[first])
    assert torch.equal(grad[second], start[second] + half + whole[second])
    with pytest.raises(ArgumentError, match="two different ones"):
        thd.thd_grad_correction(grad, whole, CU, "add", "add")


def test_layouts_and_padding():
    x = torch.randn(32, 2, 4)
    wide = thd.convert_thd_to_bshd(x, CU, 3, 18)
    assert torch.equal(wide[1, :16], x[8:24])
    assert not wide[0, 8:].any()
    assert torch.equal(thd.convert_bshd_to_thd(wide, CU, 32), x)
    rows, out = torch.randn(7, 4), torch.full((12, 4), 9.0)
    thd.fused_multi_row_padding(rows, out, [3, 4], [8, 4])
    assert torch.equal(out[:8], torch.cat([rows[:3], torch.zeros(5, 4)]))
    assert torch.equal(out[8:], rows[3:])
    back = torch.empty(7, 4)
    thd.fused_multi_row_unpadding(out, back, [8, 4], [3, 4])
    assert torch.equal(back, rows)
    with pytest.raises(ShapeError, match="input, output"):
        thd.fused_multi_row_padding(rows, out, [3, 4], [8, 8])
    assert thd.splits_to_offsets(torch.tensor([3, 0, 4]), 16).tolist() == [0, 48, 48, 112]
