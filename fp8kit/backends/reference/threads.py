"""Numba for this engine: the threading layer, the compiled-code cache and the one ``njit``.

Numba's default OpenMP layer kills a forked child, and its workqueue layer aborts when several Python threads
enter it; TBB does neither. The ``tbb`` wheel's library lies where the loader does not look, so it is loaded
here by path, before Numba asks for it.

Numba has TBB end its threads before a fork. TBB cannot while another Python thread that used it lives, and
Numba prints "Unable to join threads"; a child then computes the same bits, unless that thread was inside TBB
just then (docs/native.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import numba

from fp8kit import cache, settings, slowness
from fp8kit.backends.reference.kept import keep
from fp8kit.errors import BackendError

_LIBRARY = "libtbb.so.12"
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

prange = numba.prange


def _candidates() -> list[str]:
    """Returns where TBB may be: the files of the ``tbb`` wheel, the environment's own lib folder, the
    loader's path."""
    found: list[str] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = [
            str(Path(str(file.locate())).resolve())
            for file in importlib.metadata.files("tbb") or ()
            if file.name == _LIBRARY
        ]
    return [*found, str(Path(sys.prefix, "lib", _LIBRARY)), _LIBRARY]


def _use_tbb() -> None:
    problems = []
    for path in _candidates():
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            problems.append(str(error))
        else:
            numba.config.THREADING_LAYER = "tbb"
            return
    raise BackendError(f"reference: the TBB library is missing (pip install tbb): {'; '.join(problems)}")


def _cache() -> bool:
    """Keep compiled code in fp8kit's cache folder, unless the user gave Numba a folder of their own. Whether
    that may be read and can be written: where it cannot, Numba would go on to folders of its own choice, the
    package's among them, and so nothing is kept at all.

    Numba looks at the file of the compiled function alone, not at those it calls into; so the folder's name
    is a digest of the engine and of Numba's version.
    """
    if "NUMBA_CACHE_DIR" not in os.environ:
        digest = hashlib.sha256(numba.__version__.encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        numba.config.CACHE_DIR = str(settings.cache_dir() / "numba" / digest.hexdigest()[:16])
    folder = Path(numba.config.CACHE_DIR)
    if (why := cache.why_not(folder, inside=True)) is not None:
        cache.tell_distrusted(folder, why)
        return False
    if (why := cache.unwritable(folder)) is not None:
        cache.tell(folder, why)
        return False
    return True


def _want_compiled() -> None:
    """Warn where Numba is told to interpret what it should compile."""
    if numba.config.DISABLE_JIT:
        slowness.say(
            "NUMBA_DISABLE_JIT is set",
            "the CPU engine's functions run in Python, some thousand times slower",
            "unset it",
        )


@overload
def njit(function: _Kernel, /) -> _Kernel: ...
@overload
def njit(**options: Any) -> Callable[[_Kernel], _Kernel]: ...
def njit(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """``numba.njit`` as every file of this engine uses it: kept on disk where that can be, without the GIL,
    arithmetic as IEEE 754 says (no fast-math).

    Used bare or with Numba's options: ``@njit``, ``@njit(parallel=True)``.
    """
    if function is None:
        return lambda given: njit(given, **options)
    compiled = numba.njit(nogil=True, error_model="numpy", **options)(function)
    return keep(compiled) if _KEPT else compiled


_use_tbb()
_want_compiled()
_KEPT = _cache()
