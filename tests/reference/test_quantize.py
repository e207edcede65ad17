"""The casts of the reference engine: what it promises beyond the contract."""

import numpy as np
import pytest

from fp8kit import codec, formats
from fp8kit.arrays import as_view
from fp8kit.backends.protocol import Cast
from fp8kit.backends.reference import philox, quantize, scales
from fp8kit.formats import E4M3, E5M2
from fp8kit.testing.compare import assert_close, sum_slack


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's kat_vectors, philox4x32, 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    assert philox.philox4(*(np.uint32(c) for c in counter), *(np.uint32(k) for k in key)) == words


def test_philox_words_start_anywhere():
    whole = np.empty(41, np.uint32)
    philox.words(-7, 2**35, 2**34 - 3, whole)
    for start in range(9):
        part = np.empty(13, np.uint32)
        philox.words(-7, 2**35, 2**34 - 3 + start, part)
        np.testing.assert_array_equal(part, whole[start : start + 13])


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("saturate", [True, False])
def test_every_bfloat16_and_float16(fmt, saturate):
    """All 65536 values of both 16-bit dtypes."""
    one, inverse = np.ones(1, np.float32), np.empty(1, np.float32)
    for kind in (formats.bfloat16, formats.float16):
        x = np.arange(1 << 16, dtype=np.uint16).view(kind.numpy).reshape(256, 256)
        q = np.empty(x.shape, np.uint8)
        quantize.quantize(
            as_view(x),
            as_view(q),
            as_view(one),
            as_view(inverse),
            None,
            fmt,
            x.shape,
            saturate,
            0,
            0,
            None,
            0,
        )
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(q, codec.encode(x.astype(np.float32), fmt, "nearest", saturate))


def test_random_float32_bits():
    """Two million random bit patterns: every exponent, subnormals and NaN payloads among them."""
    x = np.random.default_rng(5).integers(0, 2**32, (1024, 2048), np.uint32).view(np.float32)
    q, one, inverse = np.empty(x.shape, np.uint8), np.ones(1, np.float32), np.empty(1, np.float32)
    quantize.quantize(
        as_view(x), as_view(q), as_view(one), as_view(inverse), None, E4M3, x.shape, True, 0, 0, None, 0
    )
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(q, codec.encode(x, E4M3))


@pytest.mark.parametrize("kind", formats.HIGH_PRECISION, ids=str)
def test_dequantize_rounds_once(kind):
    """Every code under scales of every exponent: normal, subnormal, overflowing and NaN results, as NumPy's
    own casts round them."""
    q = np.tile(np.arange(256, dtype=np.uint8), (4096, 1))
    scale_inv = np.random.default_rng(6).integers(0, 0x7F800000, 4096, np.uint32).view(np.float32)
    scale_inv[::2] = np.exp2(np.random.default_rng(7).uniform(-32, 12, 2048))  # about float16's range
    x = np.empty(q.shape, kind.numpy)
    quantize.dequantize(as_view(q), as_view(x), as_view(scale_inv), E5M2, (1, 256), 0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wanted = (codec.decode(q, E5M2).astype(np.float32) * scale_inv[:, None]).astype(kind.numpy)
    nan = np.isnan(wanted.astype(np.float32))
    bits = f"u{kind.itemsize}"
    np.testing.assert_array_equal(np.isnan(x.astype(np.float32)), nan)
    np.testing.assert_array_equal(x.view(bits)[~nan], wanted.view(bits)[~nan])


@pytest.mark.parametrize("shape", [(64, 256), (65, 257), (130, 600), (3, 1030), (200, 1)])
def test_transpose_across_blocks(shape):
    """Sizes on both sides of the blocks that the cast to both orientations works in, padding and column sums
    included."""
    m, n = shape
    padded = (-(-m // 16) * 16, -(-n // 16) * 16)
    x = np.random.default_rng(8).standard_normal(shape).astype(np.float32)
    q, q_t = np.full(padded, 255, np.uint8), np.full(padded[::-1], 255, np.uint8)
    scale, inverse, amax, dbias = (
        np.full(1, 3, np.float32),
        np.empty(1, np.float32),
        np.zeros(1, np.float32),
        np.empty(n, np.float32),
    )
    cast = Cast(E4M3, as_view(q), as_view(q_t), as_view(scale), as_view(inverse), as_view(amax))
    quantize.quantize_transpose(as_view(x), cast, as_view(dbias), None, 0)
    wanted = np.zeros(padded, np.uint8)
    wanted[:m, :n] = codec.encode(x * np.float32(3), E4M3)
    np.testing.assert_array_equal(q, wanted)
    np.testing.assert_array_equal(q_t, wanted.T)
    assert amax[0] == np.abs(x).max()
    exact = x.astype(np.float64)
    assert_close("dbias", dbias, exact.sum(0), formats.float32, sum_slack(np.abs(exact).sum(0), m))


def test_read_only_input():
    x = np.arange(32, dtype=np.float32).reshape(2, 16)
    x.flags.writeable = False
    found = np.zeros(2, np.float32)
    scales.amax(as_view(x), as_view(found), (1, 16), 0)
    np.testing.assert_array_equal(found, [15, 31])
