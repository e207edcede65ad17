"""Every kernel source compiles in every variant for every architecture, without spilling registers or warning. No GPU is needed. What is
compiled for float16 differs from bfloat16 in conversions alone: it is compiled for one architecture.

The cubins are kept in pytest's cache, where a name is the digest of all that went into one (``fp8kit.backends.cuda.compile``): only what
changed since the last run is compiled again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fp8kit.backends.cuda.compile import compile_cubin
from fp8kit.raw_kernels import manifest

ARCHITECTURES = ("sm_90a", "sm_89", "sm_100a")
STATIC_SHARED = 48 * 1024
KEPT = 14 * 24 * 3600  # seconds after its last use


@pytest.fixture(scope="module")
def kept(pytestconfig: pytest.Config) -> Path:
    """The folder of former runs' cubins, without those that no run used for long."""
    folder = pytestconfig.cache.mkdir("kernels")  # type: ignore[union-attr]
    for path in folder.glob("**/*.*"):
        if path.stat().st_mtime < time.time() - KEPT:
            path.unlink(missing_ok=True)
    return folder


@pytest.fixture(autouse=True)
def kernel_cache(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cubins go there."""
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(kept))


def note_use(path: Path) -> None:
    """Note that a cubin and what stands beside it were used."""
    for file in (path, path.with_suffix(".json")):
        os.utime(file)


LIKE_OTHERS = {("T", "f16"), ("TILES", "e4m3"), ("TILES", "none")}  # what compiles much as another variant does
VARIANTS = [
    pytest.param(source, variant, arch, id="-".join([source.name, *(value for _, value in variant), arch]))
    for source in manifest.sources()
    for variant in source.variants
    for arch in (ARCHITECTURES if LIKE_OTHERS.isdisjoint(variant) else ARCHITECTURES[:1])
]


@pytest.mark.parametrize(("source", "variant", "arch"), VARIANTS)
def test_compiles_without_spills(source: manifest.Source, variant: manifest.Defines, arch: str) -> None:
    kernel = compile_cubin(source.name, variant, arch)
    note_use(kernel.path)
    assert set(kernel.resources) == set(source.functions)
    assert "warning" not in kernel.log.lower(), kernel.log
    for function, used in kernel.resources.items():
        assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{function} uses {used}"
        assert used.shared <= STATIC_SHARED, f"{function} uses {used}"


def test_every_file_is_a_kernel_source_or_a_header() -> None:
    included = {header for path in manifest.FOLDER.glob("*.cu") for header in manifest.headers(path.name)}
    assert {path.name for path in manifest.FOLDER.glob("*.cuh")} == included
    assert {path.suffix for path in manifest.FOLDER.iterdir() if path.is_file()} == {".cu", ".cuh", ".py"}
