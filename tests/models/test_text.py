"""The corpus: split, batches and the yardstick."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp8kit.errors import Fp8kitError, ShapeError
from fp8kit.models import text


@pytest.fixture(scope="module")
def corpus():
    return text.standard_library(max_bytes=4 << 20)


def test_standard_library_is_text_in_two_parts(corpus):
    assert 2 << 20 < corpus.train.size + corpus.validation.size <= 4 << 20
    assert 0.02 < corpus.validation.size / corpus.train.size < 0.2
    assert corpus.train.dtype == np.uint8
    assert b"def " in corpus.validation.tobytes()


def test_reading_again_gives_the_same(corpus):
    again = text.standard_library(max_bytes=4 << 20)
    assert np.array_equal(corpus.train, again.train)
    assert np.array_equal(corpus.validation, again.validation)


def test_split_depends_on_names_alone(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for i in range(64):
            (tmp_path / folder / f"m{i}.py").write_bytes(f"{i:04}".encode() * 8192)
    (tmp_path / "b" / "m1000.py").write_bytes(b"more" * 8192)
    first, second = (text.standard_library(root=tmp_path / folder) for folder in ("a", "b"))

    def chunks(part):
        return {part[i : i + 4].tobytes() for i in range(0, part.size, 4)}

    assert chunks(first.train) <= chunks(second.train)
    assert chunks(first.validation) <= chunks(second.validation)
    assert not chunks(first.train) & chunks(first.validation)


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(Fp8kitError, match="at least 1048576 bytes"):
        text.standard_library(root=tmp_path)


def test_unigram_entropy():
    assert text.unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(math.log(256), rel=1e-14)
    assert text.unigram_entropy(np.zeros(5, np.uint8)) == 0.0
    three = np.array([1, 1, 1, 2], np.uint8)
    assert text.unigram_entropy(three) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), rel=1e-14
    )
    with pytest.raises(ShapeError):
        text.unigram_entropy(np.zeros(0, np.uint8))


def test_batches_are_windows_with_their_successors():
    source = np.arange(200, dtype=np.uint8)
    ids, targets = text.batch(source, 16, 8, seed=3, step=5)
    assert ids.shape == targets.shape == (16, 8)
    assert ids.dtype == targets.dtype == np.int64
    assert np.array_equal(targets, ids + 1)  # the text counts upwards
    assert np.array_equal(ids[:, 1:], targets[:, :-1])


def test_batches_depend_on_seed_and_step_alone():
    source = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    first = text.batch(source, 4, 16, 1, 2)[0]
    text.batch(source, 4, 16, 1, 3)
    assert np.array_equal(first, text.batch(source, 4, 16, 1, 2)[0])
    assert not np.array_equal(first, text.batch(source, 4, 16, 1, 3)[0])
    assert not np.array_equal(first, text.batch(source, 4, 16, 2, 2)[0])


def test_every_window_can_be_drawn():
    source = np.arange(9, dtype=np.uint8)
    starts = set(text.batch(source, 200, 7, 0, 0)[0][:, 0].tolist())
    assert starts == {0, 1}
    with pytest.raises(ShapeError):
        text.batch(source, 1, 9, 0, 0)
