"""Every kernel source compiles in its variants, without spilling registers or warning. No GPU is needed.

Of each source one variant is compiled for sm_90a, that which shows the most values of its defines. ``make
test-kernels`` compiles more: every variant for sm_90a, or, where a source has very many, so many that every
two values that occur together do so in one of them; for the other architectures so many that every value
occurs, and of the product for any chip, which is compiled for Blackwell's smaller ones too, every two. What
is compiled for float16 differs from bfloat16 in conversions alone: it is compiled for sm_90a.
FP8KIT_PROPERTIES=1 compiles every variant for all of them.

The cubins are kept in pytest's cache, where a name is the digest of all that went into one
(``fp8kit.backends.cuda.compile``): only what changed since the last run is compiled again.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fp8kit.backends.cuda.compile import compile_cubin
from fp8kit.raw_kernels import manifest
from tests.support.combinations import covering, pairwise
from tests.support.effort import FACTOR

ARCHITECTURES = ("sm_90a", "sm_89", "sm_100a", "sm_80")
EVERYWHERE = {"mma_gemm.cu": "sm_120a"}  # sources that are compiled for all of them, and for another
OLDEST_SPILLS = 16  # bytes
STATIC_SHARED = 48 * 1024
MANY = 80  # variants of a source, of which pairs are compiled
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


# what compiles much as another variant does
LIKE_OTHERS = {("T", "f16"), ("TILES", "e4m3"), ("TILES", "none")}


def variants_of(source: manifest.Source) -> dict[str, Sequence[manifest.Defines]]:
    """What is compiled of a source for each architecture."""
    first, *others = ARCHITECTURES
    rest = [variant for variant in source.variants if LIKE_OTHERS.isdisjoint(variant)]
    everywhere = source.name in EVERYWHERE
    others += [EVERYWHERE[source.name]] if everywhere else []
    if FACTOR:
        return {first: source.variants, **dict.fromkeys(others, rest)}
    some = pairwise(rest) if everywhere else covering(rest)
    many = len(source.variants) > MANY
    return {first: pairwise(source.variants) if many else source.variants, **dict.fromkeys(others, some)}


def usual(source: manifest.Source) -> manifest.Defines:
    """What ``make test`` compiles of it, for Hopper."""
    rest = [variant for variant in source.variants if LIKE_OTHERS.isdisjoint(variant)]
    return covering(source.variants if source.name == "convert.cu" else rest)[0]


VARIANTS = [
    pytest.param(
        source,
        variant,
        arch,
        id="-".join([source.name, *(value for _, value in variant), arch]),
        marks=() if (variant, arch) == (usual(source), ARCHITECTURES[0]) else pytest.mark.kernels,
    )
    for source in manifest.sources()
    for arch, variants in variants_of(source).items()
    for variant in variants
]


@pytest.mark.parametrize(("source", "variant", "arch"), VARIANTS)
def test_compiles_without_spills(source: manifest.Source, variant: manifest.Defines, arch: str) -> None:
    kernel = compile_cubin(source.name, variant, arch)
    note_use(kernel.path)
    assert set(kernel.resources) == set(source.functions)
    assert "warning" not in kernel.log.lower(), kernel.log
    assert "serialized" not in kernel.log, kernel.log  # wgmma that waits for itself
    # chips without an instruction for it need more registers
    allowed = max(source.may_spill(arch), OLDEST_SPILLS if arch == ARCHITECTURES[-1] else 0)
    for function, used in kernel.resources.items():
        spilled = max(used.stack, used.spill_stores)  # loads count each place that reads it again
        assert spilled <= allowed, f"{function} uses {used}, {source.name} allows {allowed} bytes"
        assert used.spill_loads == 0 or allowed, f"{function} uses {used}"
        assert used.shared <= STATIC_SHARED, f"{function} uses {used}"


def test_every_file_is_a_kernel_source_or_a_header() -> None:
    included = {header for path in manifest.FOLDER.glob("*.cu") for header in manifest.headers(path.name)}
    assert {path.name for path in manifest.FOLDER.glob("*.cuh")} == included
    assert {path.suffix for path in manifest.FOLDER.iterdir() if path.is_file()} == {".cu", ".cuh", ".py"}


@pytest.mark.parametrize("source", manifest.sources(), ids=lambda source: source.name)
def test_no_value_of_a_define_is_left_out(source: manifest.Source) -> None:
    """Nor any two of them for sm_90a; but for other architectures those of variants that compile much as
    another does."""
    first, *others = variants_of(source).values()

    def pairs(variants: Sequence[manifest.Defines]) -> set[object]:
        return {pair for variant in variants for pair in itertools.combinations(variant, 2)}

    assert usual(source) in first
    assert set(first) <= set(source.variants)
    assert set().union(*first) == set().union(*source.variants)
    assert pairs(first) == pairs(source.variants)
    rest = {variant for variant in source.variants if LIKE_OTHERS.isdisjoint(variant)}
    for some in others:
        assert some
        assert set(some) <= rest
        assert set().union(*some) == set().union(*rest)
