"""cuBLASLt, replaced."""

from __future__ import annotations

import contextlib
import types

import pytest

from fp8kit.backends.cuda import cublaslt
from fp8kit.lru import LRU
from tests.support.cuda_libraries import Library


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    monkeypatch.setattr(cublaslt, "bindings", lambda: fake)
    monkeypatch.setattr(cublaslt, "_NEAR", LRU(4096))  # its algorithms are none of the real one's
    monkeypatch.setattr(cublaslt, "_handle", lambda index: 1)
    monkeypatch.setattr(cublaslt.launch, "current_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(cublaslt.launch, "runtime", lambda: types.SimpleNamespace(getDevice=lambda: 0))
    return fake
