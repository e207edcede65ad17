"""Whatever lies in padding, or between packed sequences, attention gives the bits that it gives with zeros
there."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import nn
from fp8kit.autograd import tensor
from fp8kit.testing.compare import assert_same_bits
from tests.support.layers import draw
from tests.support.products import host

HEADS, GROUPS, D = 4, 2, 8
ROWS, COLUMNS = (7, 3, 5), (5, 11, 2)
# where packed sequences start, gaps behind some; and the tokens there are
STARTS = {"q": (1, 9, 16, 24), "kv": (0, 8, 19, 25)}


def _cu(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _true(form, lengths, starts, length):
    """Which rows are true ones: bool (t,), (s, b) or (b, s)."""
    if form == "thd":
        found = np.zeros(starts[-1], bool)
        for start, n in zip(starts, lengths, strict=False):
            found[start : start + n] = True
        return found
    found = np.arange(length)[:, None] < np.array(lengths)
    return found if form == "sbhd" else found.T


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_reaches_nothing(device, dtype, form, mask, value):
    module = nn.DotProductAttention(HEADS, D, GROUPS, qkv_format=form, attn_mask_type=mask, device=device)
    true = {"q": _true(form, ROWS, STARTS["q"], 7), "kv": _true(form, COLUMNS, STARTS["kv"], 11)}
    lengths = {"cu_seqlens_q": _cu(ROWS), "cu_seqlens_kv": _cu(COLUMNS)}
    if form == "thd":
        lengths |= {
            f"cu_seqlens_{side}_padded": np.array(starts, np.int32) for side, starts in STARTS.items()
        }
        lengths |= {"max_seqlen_q": 7, "max_seqlen_kv": 11}
    shapes = {
        "q": (*true["q"].shape, HEADS, D),
        "k": (*true["kv"].shape, GROUPS, D),
        "v": (*true["kv"].shape, GROUPS, D),
    }
    results = []
    for filled in (0.0, value):
        arrays = {name: draw(seed, shape, dtype) for seed, (name, shape) in enumerate(shapes.items())}
        do = draw(9, (*true["q"].shape, HEADS * D), dtype)
        for name, x in arrays.items():
            x[~true["q" if name == "q" else "kv"]] = filled
        do[~true["q"]] = filled
        inputs = {name: tensor(x, requires_grad=True, device=device) for name, x in arrays.items()}
        o = module(*inputs.values(), **lengths)
        o.backward(tensor(do, device=device))
        results.append({"o": host(o)} | {f"d{name}": host(x.grad) for name, x in inputs.items()})
    for name, clean in results[0].items():
        assert_same_bits(name, results[1][name], clean)
        assert not clean[~true["q" if name in ("o", "dq") else "kv"]].astype(np.float32).any(), (
            f"{name}: padding is not 0"
        )
        assert np.isfinite(clean.astype(np.float32)).all()
