"""Grouped FP8 products on Hopper: every bit against the model of single products' sums, what a group does not
see of others, calls that are moved and captured, and how results are cut into tiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8kit import arrays, formats
from fp8kit.accumulation import ACCUMULATIONS
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import hopper_grouped, launch, register
from fp8kit.backends.cuda.grouped import COUNTER
from fp8kit.backends.cuda.hopper_gemm import Tiling
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.backends.protocol import SPECS, block_shapes
from fp8kit.backends.registry import CannotTake, OpRegistry
from fp8kit.bench.random import codes as drawn
from fp8kit.errors import BackendError
from fp8kit.formats import E4M3, E5M2, Format, bfloat16, float32, uint8
from fp8kit.raw_kernels import manifest
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import Case, cases, get, put
from fp8kit.testing.contract.grouped import modelled_groups
from tests.support import hopper as support

GPU = Device("cuda", 0)
TENSOR, ROW, LINE, SQUARE = (0, 0), (1, 0), (1, 128), (128, 128)
KINDS = {
    "rows": {"tensor": (TENSOR, TENSOR), "row": (ROW, ROW), "block": (LINE, SQUARE)},
    "terms": {"tensor": (TENSOR, TENSOR), "row": (ROW, ROW), "block": (LINE, LINE)},
}
SIZES = [300, 0, 17, 129, 0, 512, 64, 1, 255]  # and some rows of no group
REST, N, K = 37, 520, 1040


@pytest.fixture
def hopper() -> None:
    support.want_hopper()


def operand(
    groups: tuple[int, ...], rows: int, terms: int, fmt: Format, seed: int, tile: tuple[int, int]
) -> tuple[Any, Any]:
    """(codes, scale_inv) on the host, zeros beyond what is asked for."""
    count = int(np.prod(groups, dtype=int))
    shape, scales = (rows + -rows % 16, terms + -terms % 16), (count,)
    if tile == ROW:
        scales = (count * shape[0],)
    elif tile != TENSOR:
        shape, grid = block_shapes(rows, terms, tile)
        scales = (*groups, *grid)
    dtype = formats.dtype_of_format(fmt)
    assert dtype is not None
    codes = drawn((*groups, *shape), seed, dtype, 64.0 if fmt == E4M3 else 8192.0).view(np.uint8).copy()
    codes[..., rows:, :], codes[..., terms:] = 0, 0
    return codes, np.exp2(np.random.default_rng(seed).uniform(-7, -5, scales)).astype(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(cases("grouped_fp8_gemm")), ids=str)
def test_contract(case: Case, hopper: None) -> None:
    """The kernel of every chip keeps it too, where this one is chosen."""
    with policy_context(SelectionPolicy(per_op={case.kernel: ("impl:cuda.grouped_fp8_gemm",)})):
        case.run(dispatch.kernels(GPU), GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3)], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("large", [False, True], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("along", KINDS)
@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
def test_every_bit_is_the_models(
    dtype: Any,
    along: Any,
    kind: str,
    fast: bool,
    large: bool,
    pair: Any,
    monkeypatch: pytest.MonkeyPatch,
    hopper: None,
) -> None:
    """Of every group, as if it were alone, in both tilings."""
    if fast and kind == "block":
        return  # blocks have no fast accumulation
    tiling = Tiling(128, 128) if not large else Tiling(128, 256) if fast else Tiling(256, 128)
    monkeypatch.setattr(hopper_grouped, "tiling", lambda *arguments: tiling)
    monkeypatch.setattr(hopper_grouped, "_plan", hopper_grouped._plan.__wrapped__)
    compare(along, KINDS[along][kind], pair, dtype, fast, SIZES, N, K)


def compare(
    along: Any, tiles: Any, pair: Any, dtype: Any, fast: bool, sizes: list[int], n: int, k: int
) -> None:
    """Every bit of a product with the model's, groups of ``sizes``, then ``REST`` rows or terms."""
    m, rows = sum(sizes) + REST, along == "rows"
    shapes: Any = (((), m, k), ((len(sizes),), n, k)) if rows else (((), k, m), ((), n, m))
    (a, a_inv), (b, b_inv) = (
        [put(x, GPU) for x in operand(*shapes[i], pair[i], 1 + i, tiles[i])] for i in (0, 1)
    )
    out = arrays.empty((m, n) if rows else (len(sizes), k, n), dtype, GPU)
    given = (
        a,
        b,
        out,
        put(np.array(sizes, np.int32), GPU),
        along,
        0,
        None,
        *pair,
        a_inv,
        b_inv,
        *tiles,
        fast,
        arrays.empty((COUNTER,), uint8, GPU),
        0,
    )
    hopper_grouped.grouped_fp8_gemm(*given)
    named = SimpleNamespace(**SPECS["grouped_fp8_gemm"].bind(*given))
    how = hopper_grouped.sums(named)
    assert how is ACCUMULATIONS["hopper_fast" if fast else "hopper_split"]
    assert_same_bits("out", get(out), modelled_groups(how, dispatch.kernels(GPU), named)["out"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [
        ([171], 128, 256),  # one cluster, whose second block has no column
        ([0, 0, 91], 264, 256),  # groups of nothing, clusters whose second block has a few columns
        ([1, 15, 16, 17, 1200, 0, 1300, 0], 1032, 1040),  # several tiles for each cluster, of 1 to 11 depths
    ],
    ids=["one", "few", "many"],
)
@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
@pytest.mark.parametrize("kind", ["tensor", "block"])
@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
def test_large_tiles_of_groups_of_terms(
    dtype: Any,
    kind: str,
    fast: bool,
    sizes: Any,
    n: int,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
    hopper: None,
) -> None:
    """Clusters of two blocks; without promotion, results that wait in registers for the next tile, which may
    be another group's or have no terms."""
    if fast and kind == "block":
        return  # blocks have no fast accumulation
    tiling = Tiling(128, 256) if fast else Tiling(256, 128)
    monkeypatch.setattr(hopper_grouped, "tiling", lambda *arguments: tiling)
    monkeypatch.setattr(hopper_grouped, "_plan", hopper_grouped._plan.__wrapped__)
    compare("terms", KINDS["terms"][kind], (E4M3, E4M3), dtype, fast, sizes, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "fast"), [("tensor", True), ("tensor", False), ("block", False)])
def test_blocks_take_tiles_as_they_come(
    kind: str, fast: bool, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands, which are full, half empty or of rows of no group, each is made once."""
    tiling = Tiling(128, 256) if fast else Tiling(256, 128)
    monkeypatch.setattr(hopper_grouped, "tiling", lambda *arguments: tiling)
    monkeypatch.setattr(hopper_grouped, "_plan", hopper_grouped._plan.__wrapped__)
    sizes = [int(size) for size in np.random.default_rng(5).integers(0, 700, 40)]
    compare("rows", KINDS["rows"][kind], (E4M3, E4M3), bfloat16, fast, [*sizes, 0, 1], 4096, 384)


def large_cases() -> list[Any]:
    """Groups of rows with a bias, in slots, in high precision and in FP8, whose tiles are 128 x 256."""
    whole = [case for name in ("grouped_gemm", "grouped_fp8_gemm") for case in cases(name)]
    return [
        case for case in whole if case.options.get("layout") != "tn" and case.options.get("along") != "terms"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", large_cases(), ids=str)
def test_large_tiles_of_rows_keep_the_contract(
    case: Case, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of operands, both layouts, biases, slots, odd sizes, by the largest tiles that there are."""
    support.use_largest_tiles(monkeypatch)
    case.run(dispatch.kernels(GPU), GPU)


def call(
    a: ArrayView,
    b: ArrayView,
    out: ArrayView,
    sizes: ArrayView,
    along: Any,
    tiles: Any,
    inverses: Any,
    space: ArrayView | None,
    stream: int,
) -> None:
    """A product of E4M3 codes."""
    how = None, E4M3, E4M3, *inverses, *tiles, False, space, stream
    hopper_grouped.grouped_fp8_gemm(a, b, out, sizes, along, 0, *how)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_nothing_of_other_groups_is_in_a_sum(kind: str, hopper: None) -> None:
    """Not even NaN, right before a group's first term and right behind its last one."""
    tiles, sizes = KINDS["terms"][kind], np.array([100, 0, 37, 200, 63], np.int32)
    (a, a_inv), (b, b_inv) = (operand((), rows, 400, E4M3, rows, tiles[0]) for rows in (256, 384))
    inverses, found = [put(x, GPU) for x in (a_inv, b_inv)], []
    for marred in (False, True):
        if marred:
            a[:, 100:137], b[:, 99] = 0x7F, 0xFF
        out = arrays.empty((5, 256, 384), float32, GPU)
        call(put(a, GPU), put(b, GPU), out, put(sizes, GPU), "terms", tiles, inverses, None, 0)
        found.append(get(out))
    for e in (1, 3, 4):
        assert_same_bits(f"group {e}", found[1][e], found[0][e])
    assert np.isnan(found[1][[0, 2]]).all()


@pytest.mark.gpu
def test_a_captured_call_follows_the_sizes(hopper: None) -> None:
    import cupy

    (a, a_inv), (b, b_inv) = (operand(g, 512 if g else 1024, 512, E4M3, 1, TENSOR) for g in ((), (4,)))
    codes, inverses = [put(x, GPU) for x in (a, b)], [put(x, GPU) for x in (a_inv, b_inv)]
    sizes = put(np.array([1, 2, 3, 4], np.int32), GPU)
    out, want = (arrays.empty((1024, 512), bfloat16, GPU) for _ in range(2))
    space = arrays.empty((COUNTER,), uint8, GPU)
    call(*codes, want, sizes, "rows", (TENSOR, TENSOR), inverses, space, 0)
    arrays.synchronize(GPU)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        call(*codes, out, sizes, "rows", (TENSOR, TENSOR), inverses, space, stream.ptr)
        graph = stream.end_capture()
        for other in ([256] * 4, [0, 1000, 24, 0], [1, 0, 0, 0]):
            arrays.copy(sizes, put(np.array(other, np.int32), GPU))
            arrays.synchronize(GPU)
            graph.launch(stream)
            stream.synchronize()
            call(*codes, want, sizes, "rows", (TENSOR, TENSOR), inverses, space, stream.ptr)
            assert_same_bits(str(other), get(out), get(want))


# --- without a GPU ------------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    return support.planned(hopper_grouped, monkeypatch)


def plan(planned: Any, along: str, m: int, groups: int, kind: str, promote: int) -> Any:
    n, k = 384, 256
    shapes = ((m, n), (m, k), (groups, n, k)) if along == "rows" else ((groups, k, n), (k, m), (n, m))
    out, a, b = shapes
    return planned(0, along, out, n, a, b, groups, 0, "e4m3", "e4m3", "bf16", KINDS[along][kind], promote)


@pytest.mark.parametrize("along", KINDS)
@pytest.mark.parametrize("m", [16, 208, 4096, 32768])
@pytest.mark.parametrize("groups", [1, 8, 64])
def test_every_variant_is_compiled_and_every_block_may_have_a_tile(
    groups: int, m: int, along: str, planned: Any
) -> None:
    for kind in ("tensor", "row", "block"):
        for promote in (0, 128) if kind != "block" else (128,):
            found = plan(planned, along, m, groups, kind, promote)
            assert found.kernel in manifest.source("hopper_gemm.cu").variants
            tall, wide, band, *own = found.sizes[6:]
            assert own[:2] == [groups, 0]
            assert own[3] == (256 if along == "rows" else m)
            tiles = wide * (tall + groups if along == "rows" else tall * groups)
            together = 2 if along == "terms" and ("BM", "256") in found.kernel else 1
            assert found.blocks % together == 0
            assert 0 < found.blocks <= min(132, tiles * together)
            assert band > 0


@pytest.mark.parametrize("multiprocessors", [131, 132])
@pytest.mark.parametrize("columns", [64, 1000, 4096])
def test_two_blocks_share_what_they_load_of_a(
    columns: int, multiprocessors: int, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each half of 256 rows, for tiles beside each other: grids of whole clusters alone."""
    monkeypatch.setattr(launch, "sm_count", lambda index: multiprocessors)
    shapes = (8, 4096, columns), columns, (4096, 32768), (columns, 32768)
    found = planned(0, "terms", *shapes, 8, 0, "e4m3", "e4m3", "bf16", (TENSOR, TENSOR), 128)
    assert ("BM", "256") in found.kernel
    wide = -(-columns // 256)
    assert found.sizes[6:8] == (16, wide)
    assert found.blocks == 2 * min(8 * 16 * wide, multiprocessors // 2)
    assert "(128, 128)" in found.maps[0].decode()


def test_small_groups_have_small_tiles() -> None:
    """A tile of 256 rows would be filled by less than half."""
    assert hopper_grouped.tiling("rows", 4096, 4096, 4096, 64, 128, 132).rows == 128
    assert hopper_grouped.tiling("rows", 32768, 4096, 4096, 8, 128, 132).rows == 256


def test_what_it_cannot_take_is_said(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotTake, match="tiles"):
        planned(0, "rows", (64, 64), 64, (64, 64), (1, 64, 64), 1, 0, *"abc", (LINE, LINE), 128)
    with pytest.raises(CannotTake, match="multiples of 16"):
        plan(planned, "terms", 24, 2, "tensor", 128)
    monkeypatch.setattr(launch, "capability", lambda index: (10, 0))
    with pytest.raises(CannotTake, match=r"10\.0"):
        plan(planned, "rows", 64, 2, "tensor", 128)
    codes, scale = np.zeros((16, 128), np.uint8), np.ones(1, np.float32)
    a, one = arrays.as_view(codes), arrays.as_view(scale)
    out, sizes = arrays.as_view(np.zeros((16, 16), np.float32)), arrays.as_view(np.ones(1, np.int32))
    given = a, a.reshape(1, 16, 128), out, sizes, "rows", 0, None
    with pytest.raises(CannotTake, match="not E5M2 twice"):
        hopper_grouped.grouped_fp8_gemm(*given, E5M2, E5M2, one, one, TENSOR, TENSOR, True, None, 0)
    with pytest.raises(CannotTake, match="an empty one"):
        hopper_grouped.grouped_fp8_gemm(
            a.slice(0, 0, 0), *given[1:], E4M3, E4M3, one, one, TENSOR, TENSOR, True, None, 0
        )
    monkeypatch.setattr(launch, "capability", lambda index: (9, 0))
    with pytest.raises(BackendError, match="workspace: missing, expected 16 bytes"):
        hopper_grouped.grouped_fp8_gemm(*given, E4M3, E4M3, one, one, TENSOR, TENSOR, True, None, 0)


def test_it_is_chosen_on_hopper_alone() -> None:
    registry = OpRegistry()
    register(registry)
    for name in ("grouped_fp8_gemm", "grouped_gemm"):
        found = registry.get_implementations(name)
        assert [impl.impl_id for impl in found] == [f"cuda.hopper_{name}", f"cuda.{name}"]
        assert (found[0].min_arch, found[0].max_arch) == (90, 90)
