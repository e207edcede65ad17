"""A text of a few sources, and a size that trains in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies import cases, corpus


@pytest.fixture(scope="session")
def text() -> corpus.Text:
    root = Path(__file__).resolve().parents[2] / "fp8kit"
    return corpus.sources(root, 1)


@pytest.fixture(scope="session")
def size():
    return cases.size("tiny", 3)
