"""Norms whose columns their kernel knows: it takes whole tiles alone and asks nothing, so nothing that it
would miss may reach it; the bits are those of the kernel for any tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import norm
from fp8kit.backends.cuda._rows import covered
from fp8kit.backends.protocol import Cast, Rule
from fp8kit.formats import E4M3, E5M2, DType, bfloat16, float16, float32, uint8
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import get, poisoned, put

GPU = Device("cuda", 0)
KNOWN = sorted(norm._for_whole_tiles())
TYPES = {"bf16": bfloat16, "f16": float16}


def view(shape: tuple[int, int], dtype: DType = bfloat16) -> ArrayView:
    return ArrayView(4096, shape, dtype, GPU, None)


def choice(
    rows: int = 128,
    columns: int = 4096,
    chunks: int = 16,
    dtype: DType = bfloat16,
    pad: int = 0,
    fmt: Any = E4M3,
    missing: str = "",
    plain: bool = False,
) -> int:
    one = view((1, 1), float32)
    q = None if missing == "q" else view((rows + pad, columns), uint8)
    q_t = None if missing == "q_t" else view((columns, rows + pad), uint8)
    cast = None if missing == "cast" else Cast(fmt, q, q_t, one, one, None)
    padded = covered(cast, rows, columns) != (rows, columns)
    return norm.columns_of(
        chunks, 32, view((rows, columns), dtype), view((rows, columns)) if plain else None, cast, padded
    )


def test_a_row_is_all_chunks_of_all_its_threads() -> None:
    assert KNOWN
    for name, chunks, columns in KNOWN:
        assert (norm.chunks_of(columns, columns, 2), norm._lanes(columns, 2)) == (
            chunks,
            columns // 8 // chunks,
        )
        assert 8 * chunks * norm._lanes(columns, 2) == columns
        assert choice(columns=columns, chunks=chunks, dtype=TYPES[name]) == columns


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 0},
        {"rows": 144},
        {"columns": 4088},
        {"columns": 2048},
        {"pad": 16},
        {"missing": "q"},
        {"missing": "q_t"},
        {"missing": "cast"},
        {"plain": True},
        {"dtype": float32},
        {"dtype": float16},
        {"fmt": E5M2},
    ],
    ids=str,
)
def test_anything_else(options: dict[str, Any]) -> None:
    assert choice(**options) == 0


@pytest.mark.parametrize(
    ("rows", "plain", "tall", "columns"),
    [
        (8192, False, 32, 4096),
        (64, False, 16, 4096),
        (48, False, 16, 4096),
        (40, False, 16, 0),
        (8208, False, 32, 0),
        (8192, True, 32, 0),
    ],
)
def test_what_is_launched(
    monkeypatch: pytest.MonkeyPatch, rows: int, plain: bool, tall: int, columns: int
) -> None:
    """The choice is by the tiles of the launch, which are less tall where there are few rows, and reaches the
    kernel."""
    asked: dict[str, str] = {}
    launched: list[Any] = []
    walk = norm.Forward(16, (32, 16), 32, 163840, 132)
    monkeypatch.setattr(norm, "forward", lambda *given: walk)
    monkeypatch.setattr(
        norm, "kernel", lambda source, function, like, **defines: asked.update(defines, source=source)
    )
    monkeypatch.setattr(
        norm.launch, "launch", lambda function, grid, block, arguments, *rest: launched.append(arguments)
    )
    x, one = view((rows, 4096)), view((1, 1), float32)
    cast = Cast(E4M3, view((rows, 4096), uint8), view((4096, (rows + 15) // 16 * 16), uint8), one, one, None)
    norm.norm_fwd(
        x, view((1, 4096)), None, x if plain else None, None, one, None, cast, "RMSNorm", 1e-5, False, 0
    )
    assert asked == {"source": "norm_fwd.cu", "CHUNKS": "16", "COLUMNS": str(columns)}
    assert launched[0][9:11] == (tall, (rows + tall - 1) // tall)


@pytest.mark.parametrize(
    ("columns", "dtype", "known"),
    [
        (4096, bfloat16, ["0", "4096"]),
        (4096, float16, ["0"]),
        (1024, float16, ["0", "1024"]),
        (4096, float32, ["0"]),
        (5120, bfloat16, ["0"]),
        (4100, bfloat16, []),
    ],
    ids=str,
)
def test_what_is_compiled_beforehand(columns: int, dtype: DType, known: list[str]) -> None:
    found = [defines for source, defines in norm.variants(columns, dtype) if source == "norm_fwd.cu"]
    assert [defines["COLUMNS"] for defines in found] == known


def placed(values: Any, dtype: DType, odd: bool) -> ArrayView:
    """On the GPU, ``odd``: where no access of more than an element may begin."""
    made = put(np.concatenate([values[:1], values]).astype(dtype.numpy), GPU)
    return made.slice(0, 1, len(values)) if odd else put(values.astype(dtype.numpy), GPU)


def codes_of(rows: int, columns: int, wider: int) -> ArrayView:
    return poisoned((rows, columns + wider), uint8, GPU).slice(1, 0, columns)


FORMS: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "several tiles a block": {"several": True},
    "RMSNorm": {"normalization": "RMSNorm"},
    "RMSNorm, several tiles a block": {"normalization": "RMSNorm", "several": True},
    "L2Normalization": {"normalization": "L2Normalization"},
    "weight around zero": {"around_zero": True},
    "scale by a rule": {"rule": Rule(False, 0.0)},
    "strides": {"wider": 48},
    "odd addresses": {"odd": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "columns"), [(name, columns) for name, _, columns in KNOWN])
def test_the_bits_are_those_of_the_kernel_for_any_tile(name: str, columns: int, form: str) -> None:
    """Beside a plain result, the codes come from that one."""
    how = {
        "normalization": "LayerNorm",
        "several": False,
        "around_zero": False,
        "rule": None,
        "wider": 0,
        "odd": False,
    } | FORMS[form]
    dtype, layer, kernels = TYPES[name], how["normalization"] == "LayerNorm", dispatch.kernels(GPU)
    generator, walk = np.random.default_rng(7), norm.forward(columns, columns, 2, True, 0)
    assert walk is not None
    rows = walk.rows * (walk.resident + 1) if how["several"] else 64
    host = [
        generator.standard_normal(shape, np.float32)
        for shape in ((min(rows, 2048), columns), (columns,), (columns,))
    ]
    x = put(np.resize(host[0], (rows, columns)).astype(dtype.numpy), GPU)
    weight, bias = (placed(values, dtype, how["odd"]) for values in (1 + host[1] / 8, host[2]))
    scale, found = None if how["rule"] else put(np.full(1, 64.0, np.float32), GPU), []
    for plain in (False, True):
        y = poisoned((rows, columns), dtype, GPU) if plain else None
        codes = codes_of(rows, columns, how["wider"]), codes_of(columns, rows, how["wider"])
        statistics = [poisoned((rows,), float32, GPU) for _ in range(2)]
        inverse, amax = (
            poisoned((1,), float32, GPU),
            put(np.full(1, 3.0 if how["rule"] else 0.0, np.float32), GPU),
        )
        cast = Cast(E4M3, *codes, scale, inverse, amax, how["rule"])
        assert norm.columns_of(walk.chunks, walk.rows, x, y, cast, False) == (0 if plain else columns)
        kernels.norm_fwd(
            x,
            None if how["normalization"] == "L2Normalization" else weight,
            bias if layer else None,
            y,
            statistics[0] if layer else None,
            statistics[1],
            None,
            cast,
            how["normalization"],
            1e-5,
            how["around_zero"],
            0,
        )
        found.append([get(part) for part in (*codes, inverse, amax, *statistics[1 - layer :])])
    for part, got, want in zip(
        ("q", "q_t", "scale_inv", "amax", "rstd or mean", "rstd"), *found, strict=False
    ):
        assert_same_bits(part, got, want)
