"""What can run here, against what does run."""

from __future__ import annotations

import fp8kit_torch
import numpy as np
import pytest
import torch
from fp8kit_torch import availability as a

import fp8kit as fk
from fp8kit.plugins import SelectionPolicy, policy_context
from fp8kit.testing.compare import assert_same_bits

QUESTIONS = [
    a.is_fp8_available,
    a.is_fp8_block_scaling_available,
    a.is_mxfp8_available,
    a.is_nvfp4_available,
    a.is_bf16_available,
]


@pytest.mark.parametrize("ask", QUESTIONS, ids=lambda f: f.__name__)
def test_answers_have_reasons(ask):
    available, reason = ask(return_reason=True)
    assert ask() is available
    assert isinstance(available, bool)
    assert bool(reason) is not available


def test_the_cpu_computes_what_it_says_it_can(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert a.is_fp8_available() is True
    assert a.is_fp8_block_scaling_available() is True
    assert a.is_bf16_available() is True
    assert a.get_device_compute_capability() == (0, 0)
    assert a.get_cudnn_version() == (0, 0, 0)
    x = 448 * np.eye(16, dtype=np.float32)  # its scale is 1
    q = fk.quantize(x, fk.E4M3)
    assert_same_bits("product", np.asarray(q @ q.T, np.float32), 448 * x)


def test_emulated_recipes_run_where_they_say_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ask, recipe in (
        (a.is_mxfp8_available, fk.recipe.MXFP8BlockScaling()),
        (a.is_nvfp4_available, fk.recipe.NVFP4BlockScaling()),
    ):
        assert ask(return_reason=True) == (True, "")
        layer = fp8kit_torch.Linear(32, 48, device="cpu")
        x = torch.randn(16, 32, requires_grad=True)
        exact = layer(x)
        with fp8kit_torch.autocast(recipe=recipe):
            y = layer(x)
        error = (y - exact).norm() / exact.norm()
        assert 0.01 < error < 0.2
    with pytest.warns(UserWarning, match="emulated"):
        assert a.check_mxfp8_support() == (True, "")


def test_a_kernel_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with policy_context(SelectionPolicy(backend="cuda")):
        for ask in (a.is_mxfp8_available, a.is_nvfp4_available):
            available, reason = ask(return_reason=True)
            assert not available
            assert reason.startswith("cast_blocks")


def test_other_answers():
    assert a.get_default_recipe() == fk.recipe.DelayedScaling()
    assert a.check_fp8_support() == a.is_fp8_available(return_reason=True)
    assert a.check_fp8_block_scaling_support() == a.is_fp8_block_scaling_available(return_reason=True)


def test_forbidden_engines_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with policy_context(SelectionPolicy(backend="cuda")):
        available, reason = a.is_fp8_available(return_reason=True)
    assert not available
    assert "reference" in reason


@pytest.mark.gpu
def test_the_gpu_says_what_it_is():
    assert a.get_device_compute_capability() == torch.cuda.get_device_capability()
    assert a.is_fp8_available() is (torch.cuda.get_device_capability() >= (8, 9))
    assert a.get_cudnn_version() >= (9, 0, 0)
