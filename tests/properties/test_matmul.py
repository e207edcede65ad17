"""``fk.matmul``: any formats, scalings, shapes and sums, within the bound of their arithmetic on the CPU, and
with the same bits on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit.accumulation import ACCUMULATIONS
from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.testing import assert_same_bits
from tests.support.draws import attempt, examples, host, seeds, values

FORMATS = [fk.E4M3, fk.E5M2, fk.E2M1, fk.Format("E3M4", 3, 4)]
SCALINGS = ["tensor", "row", "block_1x128", "block_128x128", "mx_1x32"]
SIZES = st.sampled_from([0, 1, 3, 16, 33, 70])
sums = st.builds(
    lambda bits, chunk, steps: attempt(lambda: fk.Accumulation(bits, chunk, steps and steps * chunk)),
    st.integers(0, 41),
    st.integers(1, 70),
    st.integers(0, 4),
) | st.sampled_from(list(ACCUMULATIONS.values()))


def operands(m, n, k, pair, scalings, seed):
    x, y = values((m, k), np.dtype(np.float32), seed), values((n, k), np.dtype(np.float32), seed + 1)
    return [(z, fmt, scaling) for z, fmt, scaling in zip((x, y), pair, scalings, strict=True)]


@examples(150)
@given(
    SIZES,
    SIZES,
    st.sampled_from([0, 1, 31, 32, 129, 300]),
    st.tuples(*[st.sampled_from(FORMATS)] * 2),
    st.tuples(*[st.sampled_from(SCALINGS)] * 2),
    sums,
    seeds,
)
def test_sums_stay_within_their_arithmetic(m, n, k, pair, scalings, how, seed):
    if isinstance(how, Fp8kitError):
        assert isinstance(how, ArgumentError)
        return
    a, b = (fk.quantize(*each[:2], scaling=each[2]) for each in operands(m, n, k, pair, scalings, seed))
    got = attempt(lambda: fk.matmul(a, b.T, accumulate=how))
    lengths = {32 if s == "mx_1x32" else 128 for s in scalings if "_" in s}
    assert isinstance(got, Fp8kitError) == (len(lengths) > 1), got
    if isinstance(got, Fp8kitError):
        return
    with np.errstate(all="ignore"):
        wide = [host(q.dequantize()).astype(np.float64) for q in (a, b)]
        exact, magnitude = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
    known = np.isfinite(exact)
    assert np.array_equal(np.isfinite(host(got)), known)
    # an instruction cuts off less than 2^-F of its largest term, at most the sum of magnitudes, for each term
    # and for the accumulator, and 2^-min(F, 23) of the sum; the scales and float32's sums round
    loss = 0.0
    if not how.exact:
        loss = (-(-k // how.chunk) + k // 32 + 1) * (
            (how.chunk + 1) * 2.0**-how.fraction_bits + 2.0 ** -min(how.fraction_bits, 23)
        )
    slack = (loss + (k + 8) * 2.0**-23) * magnitude + 2.0**-140
    assert (np.abs(host(got) - exact)[known] <= slack[known]).all()


@pytest.mark.gpu
@examples(60)
@given(
    SIZES,
    SIZES,
    st.sampled_from([1, 31, 32, 129, 300]),
    st.tuples(*[st.sampled_from(FORMATS)] * 2),
    st.sampled_from(SCALINGS),
    sums,
    seeds,
)
def test_the_same_bits_on_a_gpu(m, n, k, pair, scaling, how, seed):
    if isinstance(how, Fp8kitError):
        return
    found = []
    for device in ("cpu", "cuda"):
        a, b = (
            fk.quantize(fk.tensor(x, device=device), fmt, scaling=s)
            for x, fmt, s in operands(m, n, k, pair, (scaling, scaling), seed)
        )
        found.append(host(fk.matmul(a, b.T, accumulate=how)))
    assert_same_bits(str(how), found[1], found[0])
