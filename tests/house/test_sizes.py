"""What is meant to be read in one sitting stays short enough for it."""

from __future__ import annotations

from fp8kit.raw_kernels import manifest

HOPPER_LINES = 900


def test_hoppers_product_with_its_epilogues_can_be_read_in_one_sitting() -> None:
    lines = sum(len(manifest.text(f"hopper_{part}").splitlines()) for part in ("gemm.cu", "epilogue.cuh"))
    assert lines < HOPPER_LINES
