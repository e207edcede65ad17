"""A kernel cache of the tests' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8kit.raw_kernels import manifest


@pytest.fixture(autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels go to a fresh folder."""
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def sources(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """An empty folder that stands for raw_kernels: write .cu and .cuh files into it."""
    folder = tmp_path_factory.mktemp("sources")
    monkeypatch.setattr(manifest, "FOLDER", folder)
    _forget()
    yield folder
    _forget()


def _forget() -> None:
    manifest.headers.cache_clear()
    manifest.source.cache_clear()
