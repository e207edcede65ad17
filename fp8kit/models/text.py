"""Text that every machine has: the sources of its own Python standard library, as bytes.

Nothing is downloaded. A file goes to the training or the validation part by the hash of its name, so the
split depends neither on the order of a directory nor on the file's contents, and no validation text is ever
trained on.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8kit.errors import Fp8kitError, ShapeError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ids = np.ndarray[Any, np.dtype[np.int64]]

# installed packages are not the library; tests and their tables differ most between distributions
SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})
VALIDATION_SHARE = 16  # of 256: a file whose hash starts with a smaller byte is validation text
LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Text in two parts. ``train``, ``validation``: uint8 (n,), one element a byte."""

    train: Bytes
    validation: Bytes

    def __str__(self) -> str:
        return (
            f"text: the Python standard library, {self.train.size:,} bytes to train on and "
            f"{self.validation.size:,} to validate"
        )

    def unigram_entropy(self) -> float:
        """Entropy of the validation part's byte frequencies in nats/byte: the loss of a model that knows
        frequencies only."""
        return unigram_entropy(self.validation)


def standard_library(max_bytes: int = 16 << 20, root: Path | None = None) -> Corpus:
    """Returns the ``.py`` files of the running Python's standard library, in the order of their names'
    hashes, up to ``max_bytes`` in all.

    ``root`` is another folder to read instead. Fp8kitError where less than 1 MiB of source is found.
    """
    base = root or Path(sysconfig.get_path("stdlib"))
    named = []
    for path in base.rglob("*.py"):
        name = path.relative_to(base)
        if not SKIPPED.intersection(name.parts):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            named.append((digest[1:], digest[0] < VALIDATION_SHARE, path))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    # by another part of the hash, so that a limit cuts both parts alike
    for _, validation, path in sorted(named):
        text = path.read_bytes()
        if total + len(text) > max_bytes:
            continue
        total += len(text)
        parts[validation].append(text)
    if total < LEAST_BYTES or not parts[0] or not parts[1]:
        wanted = f"at least {LEAST_BYTES} bytes of source"
        raise Fp8kitError("standard_library", str(base), f"{total} bytes of .py files", wanted)
    return Corpus(*(np.frombuffer(b"".join(part), np.uint8) for part in parts))


def unigram_entropy(text: Bytes) -> float:
    """-sum p ln p over the byte frequencies p of ``text``, uint8 (n,), in nats/byte (Shannon 1948).
    ShapeError for an empty text."""
    if text.size == 0:
        raise ShapeError("unigram_entropy", "text", "no bytes", "at least one byte")
    counts = np.bincount(text, minlength=256)
    p = counts[counts > 0] / text.size
    return float(-(p * np.log(p)).sum())


def batch(text: Bytes, sequences: int, length: int, seed: int, step: int) -> tuple[Ids, Ids]:
    """Random windows of ``text`` and their successors: ids and targets, both int64 (sequences, length),
    C-contiguous.

    The windows depend on (seed, step) alone, through a Philox generator keyed by them: any step's batch can
    be made again without making those before it. ShapeError where the text is not longer than ``length``.
    """
    if text.size <= length:
        raise ShapeError("batch", "text", f"{text.size} bytes", f"more than length={length}")
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))
    starts = generator.integers(0, text.size - length, sequences)
    windows = text[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
