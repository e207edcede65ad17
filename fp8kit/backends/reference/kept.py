"""Numba's machine code on disk, with digests: what was cut or overwritten is compiled again, where Numba
itself would fail, or run it.

Numba keeps an index (``.nbi``) and the code of each signature (``.nbc``) of a function. Here each begins with
the SHA-256 of the rest. Who may have written them is ``cache.why_not``'s question, asked once before.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
import stat
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

from fp8kit import cache

_DIGEST = 32  # bytes


def keep(compiled: Any) -> Any:
    """Returns the same compiled function, which looks for its code on disk and keeps it there. What Numba
    does not compile (NUMBA_DISABLE_JIT) stays as it is."""
    if hasattr(compiled, "enable_caching"):
        compiled._cache = _Cache(compiled.py_func)
    return compiled


def _say_that_it_compiles(folder: Path) -> None:
    """Tell, once in a process, that compiling begins, where ``folder`` has nothing yet: it takes long enough
    for a program to look as if it hung."""
    if _SAID:
        return
    _SAID.append(folder)
    if next(folder.rglob("*.nbi"), None) is None:
        log.warning(
            "first use of the CPU engine: Numba compiles its functions when they are first called, some 20 "
            "seconds in all on a free core, up to two minutes on a busy one; they are kept in %s",
            folder,
        )


_SAID: list[Path] = []
log = logging.getLogger("fp8kit")


class _Cache(FunctionCache):  # type: ignore[misc]
    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _Files(
            cache_path=self.cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def load_overload(self, *of: Any) -> Any:
        """The machine code of a signature, None where it is to be compiled."""
        found = super().load_overload(*of)
        if found is None:
            _say_that_it_compiles(Path(self.cache_path).parent)
        return found


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """``save(key, data)`` and ``load(key)`` are Numba's own; what they read and write with is here."""

    def save(self, key: Any, data: Any) -> None:
        folder = Path(self._cache_path)
        try:
            super().save(key, data)
        except OSError as error:  # the call goes on with what was compiled
            cache.tell(folder, error.strerror or str(error))

    def _load_index(self) -> dict[Any, str]:
        try:
            version, stamp, overloads = pickle.loads(_read(self._index_path))
        except OSError:
            return {}
        return overloads if (version, stamp) == (self._version, self._source_stamp) else {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        _write(self._index_path, self._dump((self._version, self._source_stamp, overloads)))

    def _load_data(self, name: str) -> Any:
        return pickle.loads(_read(self._data_path(name)))

    def _save_data(self, name: str, data: Any) -> None:
        _write(self._data_path(name), self._dump(data))


def _read(path: str) -> bytes:
    """Returns what ``_write`` wrote; OSError where that is not there, or no longer."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = file.read()
    if content[:_DIGEST] != hashlib.sha256(content[_DIGEST:]).digest():
        raise OSError(errno.EINVAL, "damaged")
    return content[_DIGEST:]


def _write(path: str, content: bytes) -> None:
    cache.publish(Path(path), hashlib.sha256(content).digest() + content)
