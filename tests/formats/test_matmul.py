"""``fk.matmul``: sums with a chip's arithmetic, on a CPU as on that chip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import accumulation, codec
from fp8kit.formats import Format


def _codes(shape: tuple[int, ...], positive: bool, seed: int) -> Any:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return fk.quantize(np.abs(x) if positive else x)


# RMS error of 64 sums relative to the result's, of Hopper's rule alone: made by an independent program
_ERRORS = {
    (512, False): (3.7e-4, 1.1e-4),
    (512, True): (6.1e-3, 6.4e-4),
    (4096, False): (1.4e-3, 1.5e-4),
    (4096, True): (7.1e-2, 6.5e-4),
}


@pytest.mark.parametrize(("k", "positive"), _ERRORS)
def test_the_loss_of_hoppers_sums(k: int, positive: bool) -> None:
    a, b = (_codes((64, k), positive, seed) for seed in (0, 1))
    exact = a.dequantize().astype(np.float64) @ b.dequantize().astype(np.float64).T
    for name, known in zip(("hopper_fast", "hopper_split"), _ERRORS[k, positive], strict=True):
        off = fk.matmul(a, b.T, accumulate=name) - exact
        error = np.sqrt(np.mean(off**2) / np.mean(exact**2))
        # 64 sums: of both signs they estimate an RMS to 9 %, three times that here
        assert abs(error / known - 1) < (0.1 if positive else 0.27), (name, error, known)


@pytest.mark.parametrize("fmt", [fk.E4M3, fk.E5M2, fk.E2M1, Format("E3M4", 3, 4)], ids=str)
def test_exact_sums_are_rounded_once(fmt: Format) -> None:
    x = np.random.default_rng(0).standard_normal((2, 40, 500)).astype(np.float32)
    a, b = (fk.quantize(part, fmt) for part in x)
    sums = codec.decode(a.data, fmt) @ codec.decode(b.data, fmt).T  # exact in float64: at most 41 bits
    scale = np.float32(a.scale_inv * b.scale_inv)
    assert np.array_equal(fk.matmul(a, b.T, accumulate="exact"), sums.astype(np.float32) * scale)


def test_wide_sums_are_nearly_float32() -> None:
    a, b = _codes((30, 256), False, 0), _codes((40, 256), False, 1)
    exact = fk.matmul(a, b.T, accumulate="exact")
    close = fk.matmul(a, b.T, accumulate=fk.Accumulation(35, 32))
    # each of 8 instructions cuts off less than 2^-35 of the largest term for each of its 33, and float32's
    # last bit, 2^-23
    bound = 8 * (33 * 2.0**-35 + 2.0**-23) * (np.abs(a.dequantize()) @ np.abs(b.dequantize()).T)
    assert (np.abs(close - exact) <= bound).all()
    assert not np.array_equal(fk.matmul(a, b.T, accumulate="hopper_fast"), exact)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block_1x128", "block_128x128", "mx_1x32"])
@pytest.mark.parametrize("accumulate", ["fp32", "exact", "hopper_split"])
def test_every_scaling(scaling: str, accumulate: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 20, 300)).astype(np.float32)
    a, b = (fk.quantize(part, scaling=scaling) for part in x)
    wide = a.dequantize().astype(np.float64), b.dequantize().astype(np.float64).T
    got = fk.matmul(a, b.T, accumulate=accumulate)
    assert got.dtype == np.float32
    # Hopper keeps 13 bits of the largest of 33 terms, in each of the 4 instructions before a promotion
    slack = 4 * 33 * 2.0**-13 if accumulate == "hopper_split" else 300 * 2.0**-24
    assert (np.abs(got - wide[0] @ wide[1]) <= slack * (np.abs(wide[0]) @ np.abs(wide[1]))).all()


def test_results_are_rounded_to_the_dtype_once() -> None:
    a, b = _codes((3, 64), False, 0), _codes((5, 64), False, 1)
    wide = fk.matmul(a, b.T, accumulate="hopper_fast")
    assert np.array_equal(
        fk.matmul(a, b.T, accumulate="hopper_fast", dtype="float16"), wide.astype(np.float16)
    )


def test_a_transposed_factor_and_leading_dimensions() -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, 48)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((48, 7)).astype(np.float32)
    a, b = fk.quantize(x), fk.quantize(w)
    got = fk.matmul(a, b, accumulate="hopper_fast")
    assert got.shape == (4, 3, 7)
    flat = fk.matmul(a.reshape(12, 48), fk.quantize(np.ascontiguousarray(w.T)).T, accumulate="hopper_fast")
    assert np.array_equal(got.reshape(12, 7), flat)
    assert fk.matmul(fk.quantize(x[:0]), b, accumulate="exact").shape == (0, 3, 7)


def test_refusals() -> None:
    a, b = _codes((3, 64), False, 0), _codes((5, 64), False, 1)
    refused = [
        (fk.FormatError, lambda: fk.matmul(np.zeros((3, 64)), b.T, accumulate="exact"), "a: got"),
        (fk.ArgumentError, lambda: fk.matmul(a, b.T, accumulate=None), "accumulate"),
        (
            fk.ArgumentError,
            lambda: fk.matmul(a, b.T, accumulate="hopper"),
            "hopper_fast or hopper_split or hopper_mma",
        ),
        (fk.ShapeError, lambda: fk.matmul(a, b, accumulate="exact"), "(3, 64) @ (5, 64)"),
        (fk.FormatError, lambda: fk.matmul(a, b.T, accumulate="exact", dtype="int32"), "dtype"),
        (fk.ArgumentError, lambda: fk.Accumulation(0), "fraction_bits"),
        (fk.ArgumentError, lambda: fk.Accumulation(13, 32, 48), "multiple"),
    ]
    rows = fk.quantize(np.ones((64, 5), np.float32), scaling="row")
    refused.append((fk.FormatError, lambda: fk.matmul(a, rows, accumulate="exact"), "across K"))
    six = fk.quantize(np.ones((3, 64), np.float32), Format("E6M1", 6, 1))
    refused.append((fk.FormatError, lambda: fk.matmul(six, b.T, accumulate="exact"), "exponent bits"))
    for kind, call, said in refused:
        with pytest.raises(kind, match=said.replace("(", r"\(").replace(")", r"\)")):
            call()


def test_blackwells_scales_are_part_of_what_is_aligned() -> None:
    """Two blocks of one product each, 2^26 of the first block's scale away from each other: 25 bits keep the
    small one only where its sum is made apart."""
    x, y = np.zeros((2, 1, 64), np.float32)
    x[0, 0], y[0, 0], x[0, 32], y[0, 32] = 2.0**13, 2.0**13, 1, 1.5
    a, b = (fk.quantize(each, scaling="mx_1x32", scale_rule="floor") for each in (x, y))
    assert fk.matmul(a, b.T, accumulate="blackwell_mx") == 2.0**26
    assert fk.matmul(a, b.T, accumulate="exact") == np.float32(2.0**26 + 1.5)
    # NVFP4: the scales of both tensors, 1 / 448 in float32, multiply the sum
    sixes = fk.quantize(np.full((1, 64), 6, np.float32), scaling="nvfp4_1x16")
    assert abs(fk.matmul(sixes, sixes.T, accumulate="blackwell_fp4") / (64 * 36) - 1) < 2.0**-22
    halves = fk.quantize(np.full((64, 3), 0.5, np.float32), fk.E2M1, scaling="mx_1x32", along=0)
    left = fk.quantize(np.full((2, 64), 3, np.float32), fk.E2M1, scaling="mx_1x32")
    assert np.array_equal(fk.matmul(left, halves, accumulate="blackwell_fp4"), np.full((2, 3), 96.0))
    wide = fk.quantize(np.ones((1, 64), np.float32), scaling="mx_1x32")
    with pytest.raises(fk.FormatError, match="3 exponent bits"):
        fk.matmul(wide, wide.T, accumulate="blackwell_fp4")
    with pytest.raises(fk.FormatError, match="E8M0 or E4M3"):
        fk.matmul(_codes((1, 64), True, 0), wide.T, accumulate="blackwell_mx")
    with pytest.raises(fk.ArgumentError, match="divisor of chunk"):
        fk.Accumulation(25, 32, group=5)


def test_the_names_of_the_chips() -> None:
    assert str(accumulation.ACCUMULATIONS["hopper_split"]) == (
        "13 fraction bits, 32 products at a time, promoted every 128"
    )
    assert str(fk.Accumulation()) == "exact"


def test_another_sum_is_refused_with_all_that_there_are() -> None:
    a = _codes((4, 64), True, 0)
    with pytest.raises(fk.ArgumentError, match=r"one of fp32, .*, or an fk\.Accumulation; did you mean"):
        fk.matmul(a, a.T, accumulate="hoper")
