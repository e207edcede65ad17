"""Attention for Hopper: what its kernels are handed, and what they do not take."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8kit import formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import flash, hopper_flash, launch
from fp8kit.backends.cuda.attention_problem import Problem, problem
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.raw_kernels import manifest
from fp8kit.testing.attention import Rules

CUDA, BATCH, ROWS, COLUMNS = Device("cuda", 0), 2, 300, 200
CAUSAL = Rules(window=(-1, 0), bottom_right=True, softmax_scale=0.25)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Launches on a chip of compute capability 9.0 with 132 multiprocessors; maps are what is asked of them,
    in words."""
    found: list[tuple[Any, ...]] = []

    def tensor_map(kind: str, sizes: Any, strides: Any, box: Any, swizzled: bool) -> bytes:
        assert (kind, swizzled) == ("bfloat16", True)
        return np.array([*sizes, *strides, *box, 0, 0, 0, 0], np.int64).tobytes()

    monkeypatch.setattr(hopper_flash, "tensor_map", tensor_map)
    monkeypatch.setattr(launch, "capability", lambda index: (9, 0))
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    monkeypatch.setattr(
        launch, "kernel", lambda *names, **defines: SimpleNamespace(name=names[1], device=0, defines=defines)
    )
    monkeypatch.setattr(launch, "launch", lambda *call: found.append(call))
    return found


def view(ptr: int, heads: int, length: int, dim: int = 128) -> ArrayView:
    return ArrayView(ptr, (length, BATCH, heads, dim), formats.bfloat16, CUDA)


def words(call: tuple[Any, ...]) -> list[int]:
    (job,) = call[3]
    assert len(job) % 64 == 0
    assert set(range(0, len(job), 8)) >= set(job.pointers)
    return [int(word) for word in np.frombuffer(job, np.int64)]


def scores(found: list[int]) -> tuple[list[int], list[float]]:
    raw = np.array(found, np.int64)
    return raw.view(np.int32)[:6].tolist(), raw.view(np.float32)[6:8].tolist()


def test_the_structures_are_those_that_the_sources_declare(calls: list[tuple[Any, ...]]) -> None:
    """Maps, arrays, grids and the band of both directions; 8 query heads and 2 key heads of 128."""
    q, do, o, dq = (view(16 * i, 8, ROWS) for i in (1, 2, 3, 4))
    k, v, dk, dv = (view(16 * i, 2, COLUMNS) for i in (5, 6, 7, 8))
    lse = ArrayView(256, (BATCH, 8, ROWS), formats.float32, CUDA)
    about = problem(q.shape, k.shape, v.shape, q.dtype, CAUSAL)
    scratch = ArrayView(512, (flash.workspace(about, True),), formats.uint8, CUDA)
    flash.forward(about, q, k, v, o, lse, AttentionExtras(), None, 0)
    flash.backward(about, do, q, k, v, o, lse, dq, dk, dv, None, AttentionExtras(), scratch, 0)

    def a_map(ptr: int, heads: int, length: int, rows: int) -> list[int]:
        row = BATCH * heads * 128
        return [ptr, 128, length, heads, BATCH, row, 128, heads * 128, 64, rows, 1, 1, 0, 0, 0, 0]

    def an_array(ptr: int, heads: int) -> list[int]:
        return [ptr, heads * 128, 128, BATCH * heads * 128]

    forward, dots, keys, queries = map(words, calls)
    maps = a_map(16, 8, ROWS, 128) + a_map(80, 2, COLUMNS, 128) + a_map(96, 2, COLUMNS, 128)
    assert forward[:58] == [*maps, *an_array(48, 8), 256, 4, 3, 8, 16, 16]
    band = [ROWS, COLUMNS, COLUMNS - ROWS, -1, 0, 8]
    assert scores(forward[58:62]) == (band, [0.25, float(np.float32(0.25 / np.log(2)))])
    arrays = an_array(48, 8) + an_array(32, 8) + an_array(64, 8) + an_array(112, 2) + an_array(128, 2)
    for found, rows, grid in (
        (dots, 128, [3, 8, 16, 16]),
        (queries, 128, [3, 8, 16, 16]),
        (keys, 64, [2, 2, 4, 4]),
    ):
        maps = a_map(32, 8, ROWS, rows) + a_map(16, 8, ROWS, rows)
        maps += a_map(80, 2, COLUMNS, 128) + a_map(96, 2, COLUMNS, 128)
        assert found[:91] == [*maps, *arrays, 256, 512, 4, *grid]
        assert scores(found[91:95])[0] == band
    named = "hopper_flash_fwd hopper_flash_bwd_dot hopper_flash_bwd_keys hopper_flash_bwd_queries"
    assert [call[0].name for call in calls] == named.split()
    assert {tuple(call[0].defines.items()) for call in calls} == {
        (("T", "bf16"), ("D", "128"), ("DV", "128"), ("KIND", "0"))
    }
    assert [(call[1], call[2]) for call in calls] == [
        (48, 384),
        (BATCH * 8 * ROWS * 128 // 2048, 256),
        (8, 384),
        (48, 384),
    ]
    for name, fields in (
        ("hopper_flash_fwd.cu", "q k v o lse repeat grid scores"),
        ("hopper_flash_bwd.cu", "d_o q k v o_at d_o_at dq dk dv lse dot repeat grid scores"),
    ):
        body = manifest.text(name).partition("Job {")[2].partition("};")[0]
        declared = re.findall(r"(\w+)[,;]", re.sub(r"//.*", "", body))
        assert " ".join(declared) == fields


def test_few_long_heads_are_gone_through_at_a_time() -> None:
    """32 MiB of two arrays in 16 bits, where four blocks of a head do not run at once; query heads share the
    keys of their group. 11 tiles of 24 heads are two rounds of 132 blocks."""
    about = Problem(8, 64, 16, 2**13, 2**13, 128, 128, "bfloat16", "bshd", 1.0)
    assert hopper_flash._grid(about, 128, 132) == (64, 64, 512, 33)
    assert hopper_flash._grid(about._replace(rows=8100, columns=2**13), 192, 132) == (43, 64, 512, 32)
    assert hopper_flash._grid(about._replace(rows=1408, columns=2**13), 128, 132) == (11, 64, 512, 24)
    assert hopper_flash._grid(about, 128, 132, by_keys=True) == (64, 16, 128, 33)
    assert hopper_flash._grid(about._replace(batch=2), 128, 132, by_keys=True) == (64, 16, 32, 32)


@pytest.mark.parametrize("tiles", [3, 4, 11, 16, 43, 64])
@pytest.mark.parametrize("pairs", [16, 64, 96, 640])
def test_every_block_has_about_as_much_to_do(tiles: int, pairs: int) -> None:
    """The work of ``Walk`` (hopper_flash.cuh) on an H100 under a causal mask, where a tile costs as many
    steps as lie before its end, and one more. What a block has beyond the mean is at most the longest tile,
    or 8 %: where bundles end within rounds, since tiles and multiprocessors have no factor in common."""
    blocks = 132
    about = Problem(1, pairs, pairs, 128 * tiles, 128 * tiles, 128, 128, "bfloat16", "bshd", 1.0)
    *_, bundle = hopper_flash._grid(about, 128, blocks)
    steps, place = np.zeros(blocks), 0
    for first in range(0, pairs, bundle):
        for tile in range(tiles):
            for _ in range(min(bundle, pairs - first)):
                turn, block = divmod(place, blocks)
                steps[blocks - 1 - block if turn % 2 else block] += tiles - tile + 1
                place += 1
    assert steps.max() - steps.mean() <= max(tiles, 0.08 * steps.mean())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"left": 5, "right": 3, "dtype": "float16", "dim": 128, "dim_v": 128}, None),
        ({"dim": 96, "dim_v": 96}, "head_dim 96, head_dim_v 96: both 64 or both 128"),
        ({"dim": 128}, "head_dim 128, head_dim_v 64: both 64 or both 128"),
        ({"padded": True}, "lengths in cu_seqlens"),
        ({"softcap": 30.0}, "softcap 30.0"),
        ({"dropout": 0.1}, "more than a band: "),
        ({"scale": -1.0}, "more than a band: "),
        ({"columns": 0}, "an empty array"),
    ],
)
def test_what_they_do_not_take(
    change: dict[str, Any], reason: str | None, calls: list[tuple[Any, ...]]
) -> None:
    about = Problem(2, 8, 2, 40, 72, 64, 64, "bfloat16", "sbhd", 0.125, right=0)._replace(**change)
    found = hopper_flash.why_not(about, flash._shape(about).defines, 0)
    assert found == reason if reason is None else str(found).startswith(reason)
    assert flash.kernels(about, 0).startswith(
        "its kernels for any chip" if reason else "its kernels for Hopper"
    )


def test_other_chips_and_arrays_that_repeat_themselves(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    about = Problem(2, 8, 2, 40, 72, 64, 64, "bfloat16", "sbhd", 0.125)
    defines, x = flash._shape(about).defines, view(16, 8, 40, 64)
    repeated = ArrayView(16, x.shape, x.dtype, CUDA, None, (0, 512, 64, 1))
    assert hopper_flash.why_not(about, defines, 0, x, repeated) == "an array that repeats itself"
    monkeypatch.setattr(launch, "capability", lambda index: (10, 0))
    assert hopper_flash.why_not(about, defines, 0) == "compute capability 10.0: they are for 9.0"
    assert hopper_flash.why_not(about, defines, None) is None
