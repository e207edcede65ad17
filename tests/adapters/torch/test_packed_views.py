"""DotProductAttention of views of one tensor: no copy, the same bits, the same gradients."""

from __future__ import annotations

import fp8kit_torch as te
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

S, B, H, D = 6, 2, 4, 8


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def thirds(x, at):
    return [x.select(at, i) for i in range(3)]


FORMS = {
    "sb3hd": ("sbhd", (S, B, 3, H, D), lambda x: thirds(x, 2)),
    "sbh3d": ("sbhd", (S, B, H, 3, D), lambda x: thirds(x, 3)),
    "bs3hd": ("bshd", (B, S, 3, H, D), lambda x: thirds(x, 2)),
    "bsh3d": ("bshd", (B, S, H, 3, D), lambda x: thirds(x, 3)),
    "t3hd": ("thd", (S, 3, H, D), lambda x: thirds(x, 1)),
    "th3d": ("thd", (S, H, 3, D), lambda x: thirds(x, 2)),
    "split": ("sbhd", (S, B, 3 * H * D), lambda x: x.split(H * D, -1)),
    "grouped": (
        "sbhd",
        (S, B, (H + 4) * D),
        lambda x: [p.unflatten(-1, (-1, D)) for p in x.split([H * D, 2 * D, 2 * D], -1)],
    ),
}


def attend(form, parts, qkv_format):
    groups = 2 if form == "grouped" else H
    call = te.DotProductAttention(H, D, num_gqa_groups=groups, qkv_format=qkv_format)
    more = {"attn_mask_type": "padding_causal"} if qkv_format == "thd" else {}
    if qkv_format == "thd":
        sums = torch.tensor([0, 2, S], dtype=torch.int32)
        more |= {"cu_seqlens_q": sums, "cu_seqlens_kv": sums}
    return call(*parts, **more)


@pytest.mark.parametrize("form", FORMS)
def test_views_are_not_copied(form):
    qkv_format, shape, split = FORMS[form]
    torch.manual_seed(0)
    whole = torch.randn(shape, requires_grad=True)
    parts = split(whole)
    with Operations() as done:
        y = attend(form, parts, qkv_format)
    assert not any("clone" in name or "copy" in name for name in done.names)
    dy = torch.randn_like(y)
    y.backward(dy)
    again = whole.detach().clone().requires_grad_()
    wanted = attend(form, [part.contiguous() for part in split(again)], qkv_format)
    wanted.backward(dy)
    assert torch.equal(y, wanted)
    assert torch.equal(whole.grad, again.grad)


def test_keys_and_values_of_one_tensor_beside_queries():
    torch.manual_seed(0)
    q, kv = torch.randn(S, B, H, D), torch.randn(S, B, 2, H, D, requires_grad=True)
    call = te.DotProductAttention(H, D)
    with Operations() as done:
        y = call(q, kv[:, :, 0], kv[:, :, 1])
    assert not any("clone" in name for name in done.names)
    y.sum().backward()
    assert torch.equal(y, call(q, kv[:, :, 0].contiguous(), kv[:, :, 1].contiguous()))
    assert kv.grad.any()


@pytest.mark.parametrize("case", ["hook", "retained", "detached", "order", "part", "asked"])
def test_gradients_are_those_of_the_views(case):
    torch.manual_seed(0)
    whole = torch.randn(S, B, 3, H, D, requires_grad=True)
    own = whole[1:] if case == "part" else whole
    q, k, v = thirds(own, 2)
    seen = []
    if case == "hook":
        q.register_hook(lambda grad: seen.append(grad) or grad * 0)
    elif case == "retained":
        k.retain_grad()
    elif case == "detached":
        v = v.detach()
    elif case == "order":
        q, k = k, q
    y = te.DotProductAttention(H, D)(q, k, v)
    if case == "asked":
        found = torch.autograd.grad(y.sum(), (q, k, v), retain_graph=True)
        assert all(grad.shape == q.shape for grad in found)
    y.sum().backward()
    assert torch.equal(y, te.DotProductAttention(H, D)(*[x.detach().contiguous() for x in (q, k, v)]))
    assert whole.grad is not None
    if case == "hook":
        assert len(seen) == 1
        assert not whole.grad[:, :, 0].any()
    elif case == "retained":
        assert k.grad is not None
    elif case == "detached":
        assert not whole.grad[:, :, 2].any()
