"""How Hopper's product writes its result, by the source itself without a GPU: compiled for the host, on what
the host code says, tile after tile of one block. Parts of it go by shared memory, whose copies read it as
late as they may."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import hopper_gemm, hopper_grouped, launch
from fp8kit.backends.cuda.hopper_gemm import Tiling
from fp8kit.backends.protocol import block_shapes
from fp8kit.formats import E4M3, DType, bfloat16, float16, float32
from tests.support import host_compiled
from tests.support.hopper import GPU, map_of

LINE, SQUARE = (1, 128), (128, 128)
M, N, K = 328, 552, 128  # an edge below, and one at the right that no copy writes
# depths of tiles one after another: what waits of one is written in the next from three on, else at its end
DEPTHS = (1, 3, 1, 2, 4, 5, 9, 3, 1, 1)


def given(values: Any, dtype: DType | None = None) -> ArrayView:
    """Memory of the host that the host code takes for a GPU's."""
    view = arrays.as_view(values)
    return ArrayView(view.ptr, view.shape, dtype or view.dtype, GPU, view)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "capability", lambda index: (9, 0))
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    for module in (hopper_gemm, hopper_grouped):
        monkeypatch.setattr(module, "tensor_map", map_of)
        name = "planned" if module is hopper_gemm else "_plan"
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)


def written(call: Any, sums: Any, tiling: Tiling, folder: Path) -> None:
    """Carries out a call with ``sums`` (groups, M, N) for its product, all tiles by one block."""

    def run(kernel: launch.Kernel, grid: Any, block: Any, args: Any, *rest: Any) -> None:
        made = host_compiled.library(kernel.defines, folder)
        groups, m, n = sums.shape
        down, across = -(-m // tiling.rows), -(-n // tiling.columns)
        padded = np.zeros((groups, down * tiling.rows, across * tiling.columns), np.float32)
        padded[:, :m, :n] = sums
        tiles, places = [], []
        for i, (group, x, y) in enumerate(np.ndindex(groups, down, across)):
            row, column = x * tiling.rows, y * tiling.columns
            tiles.append(padded[group, row : row + tiling.rows, column : column + tiling.columns])
            places += [row, column, group, DEPTHS[i % len(DEPTHS)]]
        every = np.ascontiguousarray(np.stack(tiles))
        with host_compiled.placed(args[0]) as job:
            made.run_tiles(job, ctypes.c_void_p(every.ctypes.data), len(tiles), *places)

    with launch.launching_by(run):
        call()


@pytest.mark.kernels
@pytest.mark.skipif(host_compiled.COMPILER is None, reason="there is no g++ here")
@pytest.mark.parametrize("extras", [0, 1, 2])
@pytest.mark.parametrize(
    ("tiling", "tiles", "dtype", "stride"),
    [
        (Tiling(128, 256), None, bfloat16, N),
        (Tiling(128, 256), None, float16, N + 5),  # rows that no copy writes
        (Tiling(128, 256), None, float32, N),
        (Tiling(256, 128), (LINE, SQUARE), bfloat16, N + 8),
        (Tiling(256, 128), (LINE, LINE), float16, N),
        (Tiling(128, 64), (LINE, SQUARE), bfloat16, N),
        (Tiling(128, 128), None, bfloat16, N),
        (Tiling(64, 32), (LINE, SQUARE), float16, N),
        (Tiling(64, 32), None, float32, N + 1),
    ],
    ids=["late", "late-odd", "late-f32", "blocks", "lines", "narrow", "turns", "few", "few-f32"],
)
def test_each_element_is_written_once_and_is_its_sum(
    tiling: Tiling,
    tiles: Any,
    dtype: DType,
    stride: int,
    extras: int,
    tmp_path: Path,
    on_hopper: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the scale, a bias, an addend that is the result before; what lies behind rows stays as it was."""
    monkeypatch.setattr(hopper_gemm, "tiling", lambda *arguments: tiling)
    rng, kind = np.random.default_rng(7), dtype.numpy
    before = rng.integers(-3, 4, (M, stride)).astype(kind)
    whole, bias = before.copy(), rng.integers(-9, 9, N).astype(kind)
    view = given(whole, dtype)
    out = view.slice(1, 0, N)
    joined = given(bias, dtype) if extras else None, out if extras > 1 else None
    sums = rng.integers(-500, 500, (1, M, N)).astype(np.float32)
    if tiles is None:
        a, b = (given(np.zeros((rows, K), np.uint8)) for rows in (M, N))
        scales = given(np.full(1, 0.5, np.float32)), given(np.full(1, 4.0, np.float32))
        product: Any = hopper_gemm.fp8_gemm
        rest: Any = *scales, *joined, True, None, 0
    else:
        shapes = [block_shapes(rows, K, tile) for rows, tile in zip((M, N), tiles, strict=True)]
        a, b = (given(np.zeros(codes, np.uint8)) for codes, _ in shapes)
        product = hopper_gemm.block_gemm
        rest = *(given(np.ones(grid, np.float32)) for _, grid in shapes), *tiles, *joined, None, 0
    written(lambda: product(a, b, out, E4M3, E4M3, *rest), sums, tiling, tmp_path)
    want = sums[0] * (2 if tiles is None else 1)
    want = want + (bias.astype(np.float32) if extras else 0)
    want = want + (before[:, :N].astype(np.float32) if extras > 1 else 0)
    np.testing.assert_array_equal(whole[:, :N], want.astype(kind))
    np.testing.assert_array_equal(whole[:, N:], before[:, N:])


@pytest.mark.kernels
@pytest.mark.skipif(host_compiled.COMPILER is None, reason="there is no g++ here")
@pytest.mark.parametrize("tiling", [Tiling(128, 256), Tiling(256, 128)], ids=str)
def test_groups_of_terms_have_a_result_each(
    tiling: Tiling, tmp_path: Path, on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits of a tile may be of another group's result than the next one's."""
    monkeypatch.setattr(hopper_grouped, "tiling", lambda *arguments: tiling)
    out, sums = np.full((3, M, N), 7, np.float16), np.random.default_rng(8).normal(size=(3, M, N))
    sums = sums.astype(np.float32)
    a, b = (given(np.zeros((rows, 3 * K), np.uint8)) for rows in (M, N))
    one, sizes = given(np.ones(1, np.float32)), given(np.full(3, K, np.int32))
    fast = tiling.columns == 256

    def call() -> None:
        how = None, E4M3, E4M3, one, one, (0, 0), (0, 0), fast, None, 0
        hopper_grouped.grouped_fp8_gemm(a, b, given(out), sizes, "terms", 0, *how)

    written(call, sums, tiling, tmp_path)
    np.testing.assert_array_equal(out, sums.astype(np.float16))


@pytest.mark.kernels
@pytest.mark.skipif(host_compiled.COMPILER is None, reason="there is no g++ here")
@pytest.mark.parametrize("slots", [0, 192])
@pytest.mark.parametrize("stride", [N, N + 8, N + 1], ids=["whole", "strided", "odd"])
def test_groups_of_rows_do_not_write_each_others(
    stride: int, slots: int, tmp_path: Path, on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 128 x 256, half of whose columns wait for the next one, begin and end within 16 rows that a
    copy writes: with the group's bias, 0 in rows of none, and nothing behind a row."""
    monkeypatch.setattr(hopper_grouped, "tiling", lambda *arguments: Tiling(128, 256))
    monkeypatch.setattr(arrays, "fill_zero", lambda view, stream: None)
    sizes, rng = np.array([7, 0, 130, 16, 100], np.int32), np.random.default_rng(9)
    rows = slots * len(sizes) if slots else int(sizes.sum()) + 21
    tall, wide = rows + 128, -(-N // 256) * 256
    sums = np.zeros((tall, wide), np.float32)
    sums[:rows, :N] = rng.integers(-500, 500, (rows, N))
    whole, bias = np.full((rows, stride), 7, np.float16), rng.integers(-9, 9, (len(sizes), N))
    out = given(whole).slice(1, 0, N)

    def run(kernel: launch.Kernel, grid: Any, block: Any, args: Any, *rest: Any) -> None:
        covers = [slots or int(size) for size in sizes]
        tiles = sum(-(-cover // 128) for cover in [*covers, rows - sum(covers)]) * wide // 256
        places = [DEPTHS[i // 4 % len(DEPTHS)] if i % 4 == 3 else 0 for i in range(4 * tiles)]
        made = host_compiled.library(kernel.defines, tmp_path)
        with host_compiled.placed(args[0]) as job:
            made.run_tiles(job, ctypes.c_void_p(sums.ctypes.data), tiles, *places)

    a, b = given(np.zeros((rows, K), np.uint8)), given(np.zeros((len(sizes), N, K), np.uint8))
    one, space = given(np.ones(1, np.float32)), given(np.zeros(16, np.uint8))
    scales = one, given(np.full(len(sizes), 0.5, np.float32))
    how = given(bias.astype(np.float16)), E4M3, E4M3, *scales, (0, 0), (0, 0), True, space, 0
    with launch.launching_by(run):
        hopper_grouped.grouped_fp8_gemm(a, b, out, given(sizes), "rows", slots, *how)
    want, start = np.zeros((rows, N), np.float16), 0
    for e, size in enumerate(sizes.tolist()):
        own = slice(start, start + size)
        want[own] = sums[own, :N] * np.float32(0.5) + bias[e]
        start += slots or size
    np.testing.assert_array_equal(whole[:, :N], want)
    np.testing.assert_array_equal(whole[:, N:], 7)
