"""Which of the activations' kernels takes what: those for whole tiles ask nothing, so nothing that they would
miss may reach them."""

from __future__ import annotations

from typing import Any

import pytest

from fp8kit import formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda._rows import covered
from fp8kit.backends.cuda.activation import tiles_of
from fp8kit.backends.protocol import Cast
from fp8kit.formats import E4M3, E5M2, DType, bfloat16, float32, uint8

GPU = Device("cuda", 0)
WHOLE = (256, 512)


def view(
    shape: tuple[int, int], dtype: DType = bfloat16, at: int = 4096, stride: int | None = None
) -> ArrayView:
    made = ArrayView(at, shape, dtype, GPU, None)
    return (
        made if stride is None else ArrayView(at, (shape[0], stride), dtype, GPU, None).slice(1, 0, shape[1])
    )


def choice(
    shape: tuple[int, int] = WHOLE,
    activation: str = "gelu",
    dtype: DType = bfloat16,
    x_at: int = 4096,
    q_at: int = 4096,
    qt_at: int = 4096,
    pad: int = 0,
    q_stride: int | None = None,
    qt_stride: int | None = None,
    fmt: Any = E4M3,
    missing: str = "",
    plain: bool = False,
    parts: int = 1,
) -> str:
    rows, columns = shape
    one = view((1, 1), float32)
    q = None if missing == "q" else view((rows + pad, columns), uint8, q_at, q_stride)
    q_t = None if missing == "q_t" else view((columns, rows + pad), uint8, qt_at, qt_stride)
    cast = None if missing == "cast" else Cast(fmt, q, q_t, one, one, None)
    walked = covered(cast, rows, columns)
    return tiles_of(
        activation,
        (view((rows, parts * columns), dtype, x_at),),
        rows,
        columns,
        view(shape) if plain else None,
        cast,
        walked != (rows, columns),
    )


@pytest.mark.parametrize("dtype", [bfloat16, formats.float16], ids=str)
def test_whole_tiles(dtype: DType) -> None:
    assert choice(dtype=dtype) == "e4m3"
    assert choice(dtype=dtype, fmt=E5M2) == "e5m2"
    assert choice(dtype=dtype, missing="cast") == "none"
    assert choice(dtype=dtype, activation="swiglu", parts=2) == "e4m3"
    assert choice((8192, 16384), dtype=dtype) == "e4m3"  # eight tiles a block
    assert choice(dtype=dtype, q_at=4104, q_stride=WHOLE[1] + 8) == "e4m3"


@pytest.mark.parametrize(
    "options",
    [
        {"shape": (0, 128)},
        {"shape": (128, 0)},
        {"shape": (0, 0)},  # a grid has a block all the same
        # the last block would walk beyond the last row
        {"shape": (96, 512)},
        {"shape": (256, 448)},
        {"shape": (8192 + 64, 16384)},
        {"pad": 16},
        {"missing": "q"},
        {"missing": "q_t"},
        {"plain": True},
        {"dtype": float32},
        {"activation": "clamped_swiglu", "parts": 2},
        {"x_at": 4098},
        {"x_at": 4104},
        {"q_at": 4100},
        {"qt_at": 4104},
        {"q_stride": WHOLE[1] + 4},
        {"qt_stride": WHOLE[0] + 8},
    ],
    ids=str,
)
def test_anything_else(options: dict[str, Any]) -> None:
    assert choice(**options) == "mixed"


def test_more_elements_than_32_bits_count_in_eights() -> None:
    assert choice((2**19, 2**16 - 128)) == "e4m3"
    assert choice((2**19, 2**16)) == "mixed"
