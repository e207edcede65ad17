"""Functions of Transformer Engine beside its modules: ``jit``, attention's lengths and masks."""

from __future__ import annotations

import fp8kit_torch as te
import pytest
import torch
from fp8kit_torch.te_compat import attention_utils as utils
from fp8kit_torch.te_compat import fused_functions as jit

from fp8kit.errors import ArgumentError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close, largest


def test_gelu_with_a_bias_and_its_gradients():
    x, bias = torch.randn(4, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = jit.bias_gelu_fused(x, bias)
    dy = torch.randn_like(y)
    y.backward(dy)
    db, dx = jit.bgrad_dgelu_fused(dy, x, bias)
    assert_tensor_close("dx", dx, x.grad, sum_slack(largest(dy), 16))  # GELU's slope, of some 16 operations
    assert_tensor_close("db", db, bias.grad, sum_slack(12 * largest(dy), 12 + 16))  # sums of 12 such
    db, dx = jit.bgrad_dgelu_fused(dy, x, None)
    assert db is None
    assert torch.equal(jit.bias_gelu_fused(x, None), torch.nn.functional.gelu(x, approximate="tanh"))


def test_dropout_with_a_bias_and_a_residual():
    x, bias, residual = torch.randn(4, 8), torch.randn(8), torch.randn(4, 8)
    assert torch.equal(jit.get_bias_dropout_add(False)(x, bias, residual, 0.5), residual + (x + bias))
    torch.manual_seed(0)
    found = jit.get_bias_dropout_add(True)(x, bias, residual, 0.5)
    torch.manual_seed(0)
    assert torch.equal(found, residual + torch.nn.functional.dropout(x + bias, 0.5))


def test_l2_normalisation_and_its_gradient():
    x = torch.randn(4, 8, requires_grad=True)
    y, inverse = jit.l2normalization_fwd_fused(x, 1e-6)
    assert_tensor_close("y", y, torch.nn.functional.normalize(x, dim=-1), sum_slack(1, 8))
    dy = torch.randn_like(y)
    y.backward(dy)
    found = jit.l2normalization_backward_fused(dy, x.detach(), inverse.detach(), 1e-6)
    assert_tensor_close("dx", found, x.grad, sum_slack(8 * largest(dy) * largest(inverse), 8))


def test_lengths_and_masks_say_the_same():
    lengths = torch.tensor([3, 5, 0])
    sums = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    own, other = utils.get_padding_mask(3, sums, sums, 5, 6)
    assert (own.shape, other.shape) == ((3, 1, 1, 5), (3, 1, 1, 6))
    assert torch.equal(utils.get_cu_seqlens(own), sums)
    assert torch.equal(utils.get_cu_seqlens(other), sums)
    assert utils.get_full_cu_seqlens(2, 5, "cpu").tolist() == [0, 5, 10]


def test_a_padding_mask_is_attentions():
    q, k, v = torch.randn(3, 6, 2, 2, 16)
    sums = torch.tensor([0, 4, 9], dtype=torch.int32)
    call = te.DotProductAttention(2, 16, attn_mask_type="padding", attention_type="self")
    mask, _ = utils.get_padding_mask(2, sums, sums, 6, 6)
    found = call(q, k, v, attention_mask=mask)
    assert torch.equal(found, call(q, k, v, cu_seqlens_q=sums, cu_seqlens_kv=sums))


def test_windows_of_masks():
    assert utils.check_set_window_size("causal") == (-1, 0)
    assert utils.check_set_window_size("padding_causal", (4, 4)) == (4, 0)
    assert utils.check_set_window_size("no_mask", (4, 4)) == (4, 4)
    with pytest.raises(ArgumentError, match="attn_mask_type"):
        utils.check_set_window_size("nothing")
