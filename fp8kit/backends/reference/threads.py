"""Numba for this engine: the threading layer, the compiled-code cache and the one ``njit``.

Numba's default OpenMP layer kills a forked child, and its workqueue layer aborts when several Python threads
enter it; TBB does neither. The ``tbb`` wheel's library lies where the loader does not look, so it is loaded
here by path, before Numba asks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import numba

from fp8kit import settings
from fp8kit.errors import BackendError

_LIBRARY = "libtbb.so.12"
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

prange = numba.prange


def _candidates() -> list[str]:
    """Where TBB may be: the files of the ``tbb`` wheel, the environment's own lib folder, the loader's
    path."""
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
    that can be written: where it cannot, Numba would go on to folders of its own choice, the package's among
    them, and so nothing is kept at all.

    Numba looks at the file of the compiled function alone, not at those it calls into; so the folder's name
    is a digest of the engine.
    """
    if "NUMBA_CACHE_DIR" not in os.environ:
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        numba.config.CACHE_DIR = str(settings.cache_dir() / "numba" / digest.hexdigest()[:16])
    why = settings.unwritable(Path(numba.config.CACHE_DIR))
    if why is not None:
        logging.getLogger("fp8kit").warning(
            "the cache folder %s cannot be written (%s): every process compiles the CPU engine's functions "
            "anew, and keeps nothing; set FP8KIT_CACHE_DIR to a folder that can be written",
            numba.config.CACHE_DIR,
            why,
        )
    return why is None


@overload
def njit(function: _Kernel, /) -> _Kernel: ...
@overload
def njit(**options: Any) -> Callable[[_Kernel], _Kernel]: ...
def njit(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """``numba.njit`` as every file of this engine uses it: kept on disk where that can be, without the GIL,
    arithmetic as IEEE 754 says (no fast-math).

    Used bare or with Numba's options: ``@njit``, ``@njit(parallel=True)``.
    """
    decorate = numba.njit(cache=_KEPT, nogil=True, error_model="numpy", **options)
    return decorate if function is None else decorate(function)


_use_tbb()
_KEPT = _cache()
