"""Rows of groups filled up with zeros, and back, with their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8kit_torch.padding import Fp8Padding, Fp8Unpadding

from fp8kit.errors import Fp8kitError, ShapeError
from fp8kit.testing.compare import assert_same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("align", [None, 4])
def test_there_and_back(dtype, align):
    splits, step = [3, 0, 16, 5], align or 16
    x = torch.arange(24 * 3, dtype=torch.float32).reshape(24, 3).to(dtype).requires_grad_()
    out, padded = Fp8Padding(4, align)(x, splits)
    assert padded == [-(-n // step) * step for n in splits]
    parts = [
        np.pad(p.detach().float().numpy(), ((0, q - len(p)), (0, 0)))
        for p, q in zip(x.split(splits), padded, strict=True)
    ]
    assert_same_bits("padded", out.detach().float().numpy(), np.concatenate(parts))
    back = Fp8Unpadding(4, align)(out, splits)
    assert_same_bits("back", back.detach().float().numpy(), x.detach().float().numpy())
    (out * out).sum().backward()
    assert_same_bits("dx", x.grad.float().numpy(), (2 * x.detach()).float().numpy())


def test_nothing_to_do_returns_the_input_and_what_does_not_fit_is_refused():
    x = torch.zeros(2, 16, 3)
    out, padded = Fp8Padding(2)(x, [16, 16])
    assert out is x
    assert padded == [16, 16]
    assert Fp8Unpadding(2)(x, [16, 16]) is x
    with pytest.raises(ShapeError, match="Fp8Padding: m_splits"):
        Fp8Padding(3)(x, [16, 16])
    with pytest.raises(ShapeError, match="Fp8Padding: inp"):
        Fp8Padding(2)(x, [16, 15])
    with pytest.raises(ShapeError, match="Fp8Unpadding: inp"):
        Fp8Unpadding(2)(x, [33, 3])
    with pytest.raises(Fp8kitError, match="align_size"):
        Fp8Padding(2, 0)
