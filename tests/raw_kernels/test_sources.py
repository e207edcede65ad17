"""Every kernel source compiles for every architecture, without spilling registers or warning. No GPU is needed.

In every variant, with one exception for the time it takes: of a source with many variants, the architectures after the first compile
every fifth, each its own.
"""

from __future__ import annotations

import pytest

from fp8kit.backends.cuda.compile import compile_cubin
from fp8kit.raw_kernels import manifest

ARCHITECTURES = ("sm_90a", "sm_89", "sm_100a")
MANY = 24
STATIC_SHARED = 48 * 1024


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", [path.name for path in sorted(manifest.FOLDER.glob("*.cu"))])
def test_compiles_without_spills(name: str, arch: str) -> None:
    source = manifest.source(name)
    turn = ARCHITECTURES.index(arch)
    thinned = len(source.variants) > MANY and turn > 0
    for i, variant in enumerate(source.variants):
        if thinned and i % 5 != turn:
            continue
        kernel = compile_cubin(name, variant, arch)
        about = f"{name} {dict(variant)} {arch}"
        assert set(kernel.resources) == set(source.functions), about
        assert "warning" not in kernel.log.lower(), f"{about}\n{kernel.log}"
        for function, used in kernel.resources.items():
            spilled = (used.stack, used.spill_stores, used.spill_loads)
            assert spilled == (0, 0, 0), f"{about}: {function} uses {used}"
            assert used.shared <= STATIC_SHARED, f"{about}: {function} uses {used}"


def test_every_file_is_a_kernel_source_or_a_header() -> None:
    included = {header for path in manifest.FOLDER.glob("*.cu") for header in manifest.headers(path.name)}
    assert {path.name for path in manifest.FOLDER.glob("*.cuh")} == included
    assert {path.suffix for path in manifest.FOLDER.iterdir() if path.is_file()} == {".cu", ".cuh", ".py"}
