"""Casts and amaxes of many matrices as launches: their number, and the tables byte by byte."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import _lists, block, launch, quantize, scales
from fp8kit.backends.protocol import Cast
from fp8kit.formats import E4M3, E5M2, DType, bfloat16, float32, uint8
from fp8kit.raw_kernels import manifest

GPU = Device("cuda", 0)


def view(ptr: int, shape: tuple[int, ...], dtype: DType = uint8) -> ArrayView:
    return ArrayView(ptr, shape, dtype, GPU)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        launch, "kernel", lambda source, function, index, **defines: (function, *sorted(defines.values()))
    )
    monkeypatch.setattr(launch, "launch", lambda *arguments: found.append(arguments))
    return found


def columns(table: bytes, length: int, codes: str) -> list[tuple[Any, ...]]:
    """The table's columns."""
    values = struct.unpack("=" + "".join(f"{length}{code}" for code in codes), table)
    return [values[i * length : (i + 1) * length] for i in range(len(codes))]


def cast(i: int, rows: int, fmt: Any = E4M3) -> Cast:
    own = 1000 * (i + 1)
    scale, scale_inv, amax = (view(own + at, (1,), float32) for at in (3, 4, 5))
    return Cast(fmt, view(own + 1, (rows, 64)), view(own + 2, (64, rows)), scale, scale_inv, amax)


@pytest.mark.parametrize("count", [1, 48, 49, 100])
def test_weights_are_cast_in_one_launch_for_48(count: int, launches: list[tuple[Any, ...]]) -> None:
    """The four weights of twelve layers are one launch. Tiles have 128 rows and 64 columns."""
    xs = [view(1000 * (i + 1), (16 * (i + 1), 50), bfloat16) for i in range(count)]
    quantize.quantize_transpose_many(xs, [cast(i, 16 * (i + 1)) for i in range(count)], 7)
    assert len(launches) == -(-count // 48)
    done = 0
    for kernel, grid, block_, (several, table), stream in launches:
        assert (kernel, block_, stream) == (("quantize_transpose_many", "bf16", "e4m3"), 256, 7)
        found = columns(table, 48, "qqqqqqIIIIIII")
        blocks = 0
        for i in range(several):
            own, rows = 1000 * (done + 1), 16 * (done + 1)
            assert [column[i] for column in found] == [
                *(own + at for at in range(6)),
                rows,
                50,
                rows,
                64,
                64,
                rows,
                blocks,
            ]
            blocks += -(-rows // 128)
            done += 1
        assert grid == blocks
        assert all(not any(column[several:]) for column in found)
    assert done == count


def test_kinds_are_launched_apart(launches: list[tuple[Any, ...]]) -> None:
    kinds = [(dtype, fmt) for dtype in (bfloat16, float32) for fmt in (E4M3, E5M2)]
    xs = [view(1000 * (i + 1), (16, 64), kinds[i % 4][0]) for i in range(12)]
    quantize.quantize_transpose_many(xs, [cast(i, 16, kinds[i % 4][1]) for i in range(12)], 0)
    assert [(one[0][1:], one[3][0]) for one in launches] == [
        (("bf16", "e4m3"), 3),
        (("bf16", "e5m2"), 3),
        (("e4m3", "f32"), 3),
        (("e5m2", "f32"), 3),
    ]


def test_amaxes_and_blocks(launches: list[tuple[Any, ...]]) -> None:
    scales.amax_many(
        [view(16 * (i + 1), (i, 100), bfloat16) for i in range(400)],
        [view(i, (1,), float32) for i in range(400)],
        0,
    )
    assert [one[3][0] for one in launches] == [128, 128, 128, 15]  # nothing of what is empty
    found = columns(launches[1][3][1], 128, "qqqI")
    assert [column[0] for column in found] == [16 * 130, 129, 12900, 0]
    assert launches[0][1] == sum(-(-100 * i // 16384) for i in range(1, 129))
    launches.clear()
    sides = [[view(at * 1000 + i, (144 if at else 256, 256)) for i in range(65)] for at in range(4)]
    block.block_quantize_many(
        [view(i, (130, 256), bfloat16) for i in range(65)], *sides, E4M3, (128, 128), True, 0.5, 0
    )  # type: ignore
    assert [(one[1], one[3][5]) for one in launches] == [(256, 64), (4, 1)]
    assert launches[0][3][:5] == (1, 448.0, 0.5, bfloat16.max, 1)
    found = columns(launches[1][3][6], 64, "qqqqqIIIII")
    assert [column[0] for column in found] == [64, 64, 1064, 2064, 3064, 130, 256, 256, 144, 0]


@pytest.mark.parametrize(
    ("source", "module"), [("quantize.cu", quantize), ("amax.cu", scales), ("block.cu", block)]
)
def test_the_tables_are_those_of_the_sources(source: str, module: Any) -> None:
    """As long, and small enough for the 4 KiB of parameters that every driver takes."""
    for name, value in re.findall(r"(\w+)_TENSORS = (\d+)", manifest.text(source)):
        layout = {
            "CAST": (quantize._CASTS, quantize._CAST_TENSORS),
            "AMAX": (scales._AMAXES, scales._AMAX_TENSORS),
            "BLOCK": (block._TABLE, block._TENSORS),
        }[name]
        assert layout[1] == int(value)
        assert layout[0].size <= 4096 - 6 * 8
    assert _lists.firsts([2, 0, 3]) == ([0, 2, 2], 5)
