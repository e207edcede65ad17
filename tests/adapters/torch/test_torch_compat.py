"""What ``torch_compat`` does with a torch that has not a name, and what its quick ways give."""

from __future__ import annotations

import pytest
import torch
from fp8kit_torch import torch_compat

from fp8kit.errors import BackendError


def test_a_torch_without_a_name_is_refused_by_it(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_norm")
    with pytest.raises(BackendError, match=r"which has no torch\._foreach_norm, expected torch 2\.11"):
        torch_compat._required(torch, "_foreach_norm")


@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_memory_without_the_quick_name(monkeypatch, shape):
    strides = torch.empty(shape).stride()
    quick = torch_compat.empty_strided("cpu")(shape, strides, torch.float16)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    plain = torch_compat.empty_strided("cpu")(shape, strides, torch.float16)
    assert (quick.shape, quick.dtype, quick.stride()) == (plain.shape, plain.dtype, plain.stride())
