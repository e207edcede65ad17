"""Many tensors as launches of an optimiser: their number, and the tables byte by byte."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import launch, optim
from fp8kit.formats import DType, bfloat16, float32
from fp8kit.raw_kernels import manifest

GPU = Device("cuda", 0)


def views(at: int, sizes: list[int], dtype: DType = float32) -> list[ArrayView]:
    return [ArrayView(at + 8 * i, (size,), dtype, GPU) for i, size in enumerate(sizes)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        launch, "kernel", lambda source, function, index, **defines: (function, *defines.values())
    )
    monkeypatch.setattr(launch, "launch", lambda *arguments: found.append(arguments))
    return found


def columns(table: bytes, codes: str) -> list[tuple[Any, ...]]:
    """The table's columns, of 64 entries each."""
    values = struct.unpack("=" + "".join(f"64{code}" for code in codes), table)
    return [values[i : i + 64] for i in range(0, len(values), 64)]


@pytest.mark.parametrize("count", [1, 64, 65, 150])
def test_a_step_is_one_launch_for_64_tensors(count: int, launches: list[tuple[Any, ...]]) -> None:
    sizes = [5000 * i for i in range(1, count + 1)]
    lists = [views(at << 20, sizes) for at in range(1, 6)]
    decays = [0.5 * i for i in range(count)]
    optim.adamw_(*lists, 1e-2, 0.9, 0.95, 1e-8, decays, 1, None, None, 7)  # type: ignore[arg-type]
    assert len(launches) == -(-count // 64)
    done = 0
    for kernel, grid, threads, (*_, several, table), stream in launches:
        assert (kernel[1:], threads, stream) == (("f32",), 256, 7)
        found, blocks = columns(table, "qqqqqqIf"), 0
        for i in range(several):
            pointers = [(at << 20) + 8 * done for at in range(1, 6)]
            assert [column[i] for column in found] == [*pointers, sizes[done], blocks, decays[done]]
            blocks += -(-sizes[done] // 8192)
            done += 1
        assert grid == blocks
        assert all(not any(column[several:]) for column in found)
    assert done == count


def test_types_have_launches_of_their_own(launches: list[tuple[Any, ...]]) -> None:
    """And nothing of what is empty."""
    params = views(0, [3, 0, 5]) + views(1 << 20, [7, 9], bfloat16)
    optim.sgd_(params, params, [None] * 5, [None] * 5, 1e-2, 0.0, 0.0, False, [0.0] * 5, 1, None, None, 0)
    assert [(one[0][1:], one[3][-2]) for one in launches] == [(("f32",), 2), (("bf16",), 2)]


def test_the_tables_are_those_of_the_source() -> None:
    """As long, and small enough for the 4 KiB of parameters that every driver takes."""
    lengths = {name: int(n) for name, n in re.findall(r"(\w+)_TENSORS = (\d+)", manifest.text("optim.cu"))}
    assert lengths == {"STEP": optim._STEP_TENSORS, "LIST": optim._LIST_TENSORS}
    assert max(layout.size for layout in (optim._ADAMW, optim._SGD, optim._LIST)) <= 4096 - 12 * 8
