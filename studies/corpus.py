"""The text: the sources of the Python packages that the machine has, as bytes. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fp8kit.errors import CheckpointError, Fp8kitError
from fp8kit.models.text import Bytes

VALIDATION = 0.1  # of the files
LEAST = 1 << 16


class Text(NamedTuple):
    """``train``, ``validation``: uint8 (n,). ``digest``: SHA-256 of both, in hexadecimal."""

    train: Bytes
    validation: Bytes
    digest: str

    def save(self, path: Path) -> None:
        """Write a file that ``load`` reads."""
        with path.open("wb") as file:
            np.savez(file, train=self.train, validation=self.validation, digest=np.array(self.digest))

    @classmethod
    def load(cls, path: Path) -> Text:
        """What ``save`` wrote. CheckpointError for another file, and for none."""
        try:
            with np.load(path) as found:
                return cls(found["train"], found["validation"], str(found["digest"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError("studies", "--text", f"{path}: {error}", "a study's text") from None


def sources(root: Path | None = None, megabytes: int = 32) -> Text:
    """The ``.py`` files under ``root``, None the folder of installed packages, up to ``megabytes`` (2^20
    bytes) in all.

    Files come in the order of the SHA-256 of their relative names, and one in ten, by another part of that
    hash, is validation text: the same files give the same bytes, in whatever order a folder lists them.
    Fp8kitError where less than 64 KiB is found.
    """
    base = root or Path(sysconfig.get_path("purelib"))
    named = []
    for path in base.rglob("*.py"):
        digest = hashlib.sha256(path.relative_to(base).as_posix().encode()).digest()
        named.append((digest[8:], int.from_bytes(digest[:8]) < VALIDATION * 2**64, path))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for _, validation, path in sorted(named):
        text = path.read_bytes()
        if total + len(text) <= megabytes << 20:
            total += len(text)
            parts[validation].append(text)
    if total < LEAST or not all(parts):
        wanted = f"at least {LEAST} bytes of .py files"
        raise Fp8kitError("studies", f"the text under {base}", f"{total} bytes", wanted)
    joined = [b"".join(part) for part in parts]
    found = [np.frombuffer(part, np.uint8) for part in joined]
    return Text(*found, hashlib.sha256(b"|".join(joined)).hexdigest())
