"""What makes no quantised array, and is refused by name."""

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import packing
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import E2M1, E4M3
from fp8kit.quantization import Quantizer
from fp8kit.tiles import Rotation

X = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
CODES = np.zeros((4, 32), np.uint8)


def stochastic(rng):
    return fk.quantize(X, rounding="stochastic", rng=rng)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (FormatError, "scale_rule: got 'te'", lambda: fk.quantize(X, scale_rule="te")),
        (FormatError, "one of exact", lambda: fk.quantize(X, scaling="nvfp4_1x16", scale_rule="power_2")),
        (FormatError, "scale_rule", lambda: fk.quantize(X, scaling="mx_1x32", scale_rule="exact")),
        (FormatError, "None with scales", lambda: fk.quantize(X, scaling="nvfp4_1x16", scale=1.0)),
        (
            FormatError,
            "True with scales",
            lambda: fk.quantize(X, scaling="mx_1x32", scale_rule="te", saturate=False),
        ),
        (FormatError, "stochastic_bits: got 33", lambda: fk.quantize(X, stochastic_bits=33)),
        (FormatError, "stochastic_bits: got 8 with", lambda: fk.quantize(X, stochastic_bits=8)),
        (FormatError, "signs: got 'te' with", lambda: fk.quantize(X, signs="te")),
        (FormatError, "hadamard: got 8", lambda: fk.quantize(X, hadamard=8)),
        (FormatError, "signs: got 'minus'", lambda: fk.quantize(X, hadamard=16, signs="minus")),
        (FormatError, "random signs", lambda: fk.quantize(X, hadamard=16, signs="random")),
        (FormatError, "'mx_1x32' with along=0", lambda: fk.quantize(X, scaling="mx_32x1")),
        (FormatError, "scaling='row' says how", lambda: fk.quantize(X, E4M3, "row")),
        (FormatError, r"x\.dequantize", lambda: fk.quantize(fk.quantize(X))),
        (FormatError, "format: got E4M3, expected", lambda: fk.quantize(X).packed()),
        (TypeError, "dequantize", lambda: fk.quantize(X) * 2),
        (TypeError, "dequantize", lambda: X + fk.quantize(X)),
        (AttributeError, r"q\.dequantize", lambda: fk.dequantize),
        (AttributeError, "'numpy'; dequantize", lambda: fk.quantize(X).numpy()),
        (AttributeError, "'scale'; scale_inv", lambda: fk.quantize(X).scale),
        (AttributeError, "did you mean dequantize", lambda: fk.quantize(X).dequantise()),
        (FormatError, r"got 7, expected int64 \(seed, offset\): rng=\(7, 0\)", lambda: stochastic(rng=7)),
        (FormatError, "along: got 2", lambda: fk.quantize(X, along=2)),
        (FormatError, "along: got True", lambda: fk.quantize(X, along=True)),
        (
            FormatError,
            "scale_codes: got None",
            lambda: fk.QuantizedArray(CODES, np.ones((4, 2), "f4"), E2M1, "nvfp4_1x16"),
        ),
        (
            FormatError,
            "scale_codes: .*None for 'row'",
            lambda: fk.QuantizedArray(
                CODES, np.ones(4, "f4"), scaling="row", scale_codes=np.ones((4, 1), np.uint8)
            ),
        ),
        (
            FormatError,
            "tensor_scale_inv",
            lambda: fk.QuantizedArray(CODES, np.ones(1, "f4"), tensor_scale_inv=np.ones(1, "f4")),
        ),
        (
            FormatError,
            "scale_codes: got float32",
            lambda: fk.QuantizedArray(CODES, None, E4M3, "mx_1x32", scale_codes=np.ones((4, 1), "f4")),
        ),
        (
            ShapeError,
            "scale_codes",
            lambda: fk.QuantizedArray(CODES, None, E4M3, "mx_1x32", scale_codes=np.ones(3, np.uint8)),
        ),
        (
            FormatError,
            "rotation",
            lambda: fk.QuantizedArray(CODES, np.ones(1, "f4"), rotation=Rotation(8, "plus")),
        ),
        (
            FormatError,
            "rotation",
            lambda: fk.QuantizedArray(CODES, np.ones(1, "f4"), rotation=Rotation(16, "random")),
        ),
        (ShapeError, "along dim 0", lambda: fk.quantize(X, scaling="row", along=0)[1]),
        (ShapeError, "last dimension", lambda: fk.quantize(X, hadamard=16).reshape(8, 16)),
        (ShapeError, "swizzle", lambda: packing.swizzle(CODES.reshape(-1))),
        (ShapeError, "unswizzle", lambda: packing.unswizzle(CODES.reshape(-1), 4, 4)),
        (ShapeError, "unpack", lambda: packing.unpack(np.uint8(3))),
    ],
)
def test_refusals(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_every_quantizer_of_blocks_says_the_same():
    """The array's scaling and rule are a Quantizer's words."""
    q = fk.quantize(X, scaling="mx_1x32", scale_rule="even")
    assert str(Quantizer(q.format, q.scaling, scale_rule=q.scale_rule)) == "E4M3 by mx_1x32, current, even"


@pytest.mark.parametrize("name", ["format", "scaling", "scale_inv", "scale_rule", "rotation"])
def test_what_the_codes_mean_cannot_be_set(name: str) -> None:
    q = fk.quantize(X)
    with pytest.raises(AttributeError):
        setattr(q, name, getattr(q, name))
