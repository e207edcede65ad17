"""Activations with blocks that walk several whole tiles each: sizes that the contract's cases do not reach.
An amax alone, for which most values are not worked out, is that of the values."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.activation import rows_in_dy
from fp8kit.backends.cuda import activation as cuda_activation
from fp8kit.backends.cuda.activation import _spans, _tiles, tiles_of
from fp8kit.backends.protocol import Cast
from fp8kit.errors import BackendError
from fp8kit.formats import E4M3, E5M2, DType, bfloat16, float16, float32, uint8
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import Case, get, kernel_test, poisoned, put

SHAPE = (8448, 2048)  # 132 x 16 tiles: two a block


CASES = {
    "act_fwd": {"y": False, "cast": {"fmt": E4M3, "pad": (0, 0)}},
    "act_bwd": {"dx": False, "cast": {"fmt": E5M2, "pad": (0, 0)}},
}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CASES)
def test_blocks_of_several_tiles_write_the_codes_of_the_plain_result(kernel: str) -> None:
    assert _tiles(*SHAPE) == 2
    device = Device("cuda", 0)
    options = {"dtype": bfloat16, "m": SHAPE[0], "n": SHAPE[1], "biased": True, **CASES[kernel]}
    Case(kernel, "large", kernel_test(kernel), options).run(dispatch.kernels(device), device)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows", [1040, 8192])
def test_codes_in_dy_lie_where_dy_has_been_read(rows: int, gated: bool) -> None:
    columns = 128
    width = columns * (2 if gated else 1)
    dy = ArrayView(1 << 20, (rows, columns), bfloat16, CPU)
    first = rows_in_dy(rows, 2 * columns, width)
    q = ArrayView(dy.ptr + dy.nbytes - first * width, (rows, width), uint8, CPU)
    one = ArrayView(0, (1,), float32, CPU)
    parts = _spans(dy, rows, Cast(E5M2, q, ArrayView(0, (width, rows), uint8, CPU), one, one, None))
    assert [(start, stop) for start, stop, _ in parts] == [(first, rows), (0, first)]
    assert first % (64 * _tiles(rows, columns)) == 0 < first
    taken = [[cast.q.ptr, cast.q.ptr + cast.q.nbytes] for _, _, cast in parts]
    assert taken == [[dy.ptr + dy.nbytes, q.ptr + q.nbytes], [q.ptr, dy.ptr + dy.nbytes]]
    assert q.ptr >= dy.ptr + first * 2 * columns  # the rows that are done last are not overwritten
    with pytest.raises(BackendError, match=r"as rows_in_dy says"):
        _spans(dy, rows, Cast(E5M2, q.slice(0, 1, rows - 1), None, one, one, None))


def _special(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """x and bias. The amax of each is found only if the values that are left out are the right ones."""
    generator = np.random.default_rng(7)
    x = generator.standard_normal(SHAPE).astype(np.float32)
    bias = generator.standard_normal(SHAPE[1]).astype(np.float32) / 8
    if name == "negative":  # below 0 the highest has not the largest value
        x[:], bias = -20.0, None
        x[-1, 5] = -1.0
    elif name == "small":  # nor has it near 0
        x[:], bias = 2.0**-6, None
        x[-1, :8] = 0.0
        x[-1, 5] = -0.75
    elif name == "near":  # a little above all others
        x[:], bias = 3.0, None
        x[-1, 5] = 3.0 + 2.0**-6
    elif name in ("infinite", "NaN"):
        x[-70, 5] = np.inf if name == "infinite" else np.nan
    return x, bias


@pytest.mark.gpu
@pytest.mark.parametrize("special", ["normal", "negative", "small", "near", "infinite", "NaN"])
@pytest.mark.parametrize("activation", ["gelu", "qgelu", "silu"])
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=["bf16", "f16"])
def test_an_amax_alone_is_that_of_the_values(dtype: DType, activation: str, special: str) -> None:
    """That the margin is wide enough for the value's own error is proved beside the kernel, not here:
    rounding hides it."""
    device = Device("cuda", 0)
    kernels = dispatch.kernels(device)
    x, bias = (
        None if array is None else put(array.astype(dtype.numpy), device) for array in _special(special)
    )
    assert x is not None
    assert tiles_of(activation, (x,), *SHAPE, None, None, False) == "none"
    y, amaxes = poisoned(SHAPE, dtype, device), [put(np.zeros(1, np.float32), device) for _ in range(2)]
    for where, amax in zip((y, None), amaxes, strict=True):
        kernels.act_fwd(x, bias, where, amax, None, activation, (), 0)
    assert_same_bits("amax", get(amaxes[1]), get(amaxes[0]))
    assert get(amaxes[1])[0] == np.nanmax(np.abs(get(y).astype(np.float32)))


CASTS = struct.Struct("=5Q7qQdq")  # raw_kernels/rows.cuh, struct Cast


def _launched(monkeypatch: pytest.MonkeyPatch, activation: str, shape: tuple[int, int], *casts: Any) -> Any:
    """What ``act_bwd`` on a dy of ``shape`` launches: the kernel's TILES, its grid, M and F, and both casts'
    fields."""
    found: list[Any] = []
    monkeypatch.setattr(cuda_activation, "kernel", lambda source, name, like, **defines: defines["TILES"])
    monkeypatch.setattr(cuda_activation.launch, "launch", lambda *arguments: found.append(arguments))
    rows, columns = shape
    parts = 2 if activation == "swiglu" else 1
    dy = ArrayView(1 << 30, shape, bfloat16, Device("cuda", 0))
    x = ArrayView(1 << 40, (rows, parts * columns), bfloat16, Device("cuda", 0))
    amax, cast, second = casts
    cuda_activation.act_bwd(dy, x, None, None, None, amax, cast, second, activation, (), None, 0)
    ((form, grid, _, arguments, _),) = found
    *numbers, packed = arguments
    assert len(packed.pointers) == 6 * parts
    return form, grid, numbers[5:7], [CASTS.unpack(packed[i : i + CASTS.size]) for i in (0, CASTS.size)]


def _cast(rows: int, columns: int, at: int, scale: int) -> Cast:
    q, q_t = (
        ArrayView(at, (rows, columns), uint8, CPU),
        ArrayView(at + (1 << 25), (columns, rows), uint8, CPU),
    )
    return Cast(E5M2, q, q_t, _number(scale), _number(scale + 8), _number(scale + 16))


def _number(at: int) -> ArrayView:
    return ArrayView(at, (1,), float32, CPU)


@pytest.mark.parametrize("pad", [0, 16])
def test_a_cast_of_both_halves_is_two(pad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one scale, the second one with what is padding."""
    rows, columns, q, q_t = 256, 512, 1 << 27, (1 << 27) + (1 << 25)
    cast = _cast(rows + pad, 2 * columns + pad, q, 64)
    form, grid, sizes, (first, last) = _launched(monkeypatch, "swiglu", (rows, columns), None, cast, None)
    assert sizes == [rows, columns]
    assert form == ("mixed" if pad else "e5m2")
    assert grid == (5 * 5 if pad else 4 * 4)
    width, tall = 2 * columns + pad, rows + pad
    assert first[:5] == (q, q_t, 64, 72, 80)
    assert first[5:11] == (tall, columns, width, columns, tall, tall)
    assert last[:5] == (q + columns, q_t + columns * tall, 64, 72, 80)
    assert last[5:11] == (tall, columns + pad, width, columns + pad, tall, tall)


def test_halves_with_casts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, places = (256, 512), [(1 << 27, 64), (1 << 28, 160)]
    own = [_cast(*shape, *place) for place in places]
    form, _, _, packed = _launched(monkeypatch, "swiglu", shape, None, *own)
    assert form == "e5m2"
    for fields, (q, scale) in zip(packed, places, strict=True):
        assert fields[:5] == (q, q + (1 << 25), scale, scale + 8, scale + 16)
        assert fields[5:11] == (256, 512, 512, 512, 256, 256)
    own[1] = _cast(256, 512, (1 << 28) + 4, 160)  # codes that lie badly
    assert _launched(monkeypatch, "swiglu", shape, None, *own)[0] == "mixed"
    padded = [_cast(32, 48, *place) for place in places]
    form, grid, sizes, packed = _launched(monkeypatch, "swiglu", (17, 33), None, *padded)
    assert (form, grid, sizes) == ("mixed", 1, [17, 33])
    assert [fields[5:11] for fields in packed] == [(32, 48, 48, 48, 32, 32)] * 2


def test_without_halves_and_without_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (256, 512)
    _, _, _, (first, last) = _launched(monkeypatch, "gelu", shape, None, _cast(*shape, 1 << 27, 64), None)
    assert first[0] == 1 << 27
    assert not any(last)
    form, _, _, packed = _launched(monkeypatch, "swiglu", shape, _number(80), None, None)
    assert form == "none"
    assert [fields[:5] for fields in packed] == [(0, 0, 0, 0, 80)] * 2
