"""Our own FP8 products, for Hopper and for any chip: the contract, every bit against the model of their sums,
calls that are recorded, moved and captured, and how Hopper's cuts the result into tiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays
from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch, manager
from fp8kit.backends.cuda import OWN, gemm, hopper_gemm, launch, mma_gemm, own_gemm, register
from fp8kit.backends.manager import chain
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.backends.protocol import block_shapes
from fp8kit.backends.registry import CannotTake, OpRegistry
from fp8kit.errors import BackendError
from fp8kit.formats import E4M3, E5M2, bfloat16, float32, uint8
from fp8kit.lab import override
from fp8kit.raw_kernels import manifest
from fp8kit.testing.compare import assert_same_bits
from fp8kit.testing.contract import Case, cases, get, put
from tests.support import hopper as support
from tests.support.own_gemms import LINE, SQUARE, by_the_model, multiply, operand

GPU = Device("cuda", 0)
NAMES = tuple(OWN["mma_gemm.cu"])
WHICH = ("hopper", "mma")
PRODUCTS = [case for name in NAMES for case in cases(name)]


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Any:
    """Every kernel, these products by our own: Hopper's, or the one that the parameter names."""
    own = getattr(request, "param", "hopper")
    if own == "hopper":
        support.want_hopper()
    with policy_context(SelectionPolicy(per_op={name: (f"impl:cuda.{own}_{name}",) for name in NAMES})):
        yield dispatch.kernels(GPU)


both = pytest.mark.parametrize("kernels", WHICH, indirect=True)


@both
@pytest.mark.gpu
@pytest.mark.parametrize("case", PRODUCTS, ids=[f"{case.kernel}-{case.name}" for case in PRODUCTS])
def test_contract(case: Case, kernels: Any) -> None:
    case.run(kernels, GPU)


# --- bits ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize(
    "tiles", [None, (LINE, SQUARE), (SQUARE, LINE), (LINE, LINE)], ids=["tensor", "1x2", "2x1", "1x1"]
)
@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
@pytest.mark.parametrize("size", [(1, 16, 32), (300, 520, 1040), (1025, 777, 4096)], ids=str)
def test_every_bit_is_the_models(size: Any, fast: bool, tiles: Any, pair: Any, kernels: Any) -> None:
    """Sizes that no tile divides; a ring of stages that is used many times over."""
    if fast and tiles is not None:
        return  # blocks have no fast accumulation
    m, n, k = size
    a, b = (
        operand(rows, k, fmt, seed, tiles and tiles[seed])
        for seed, (rows, fmt) in enumerate(zip((m, n), pair, strict=True))
    )
    out = arrays.empty((m, n), float32, GPU)
    multiply(kernels, a, b, out, tiles, fast, pair=pair)
    assert_same_bits("out", get(out), by_the_model(kernels, a, b, size, tiles, fast, pair))


@pytest.mark.gpu
@pytest.mark.parametrize("interval", [32, 64])
@pytest.mark.parametrize("size", [(16, 528, 1040), (304, 528, 1040), (2100, 2064, 512)], ids=str)
def test_another_interval_of_promotion_is_the_models(size: Any, interval: int, kernels: Any) -> None:
    """Of small and of large tiles."""
    m, n, k = size
    a, b = (operand(rows, k, E4M3, seed, None) for seed, rows in enumerate((m, n)))
    out = arrays.empty((m, n), float32, GPU)
    source = manifest.text("hopper_gemm.cu")
    with override("fp8_gemm", source, defines=f"PROMOTE=128:{interval}") as used:
        multiply(dispatch.kernels(GPU), a, b, out, None, False)
    assert used.calls == 1
    how = Accumulation(13, 32, interval)
    assert_same_bits("out", get(out), by_the_model(kernels, a, b, size, None, how))


@pytest.mark.gpu
def test_scales_in_shared_memory_are_read_before_the_next_ones_come(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hundred times the same bits: a warp that said too early that it had read its columns' scales gave
    other ones about once in a thousand calls, most often where others of the chip write much."""
    monkeypatch.setattr(hopper_gemm, "tiling", lambda *_: hopper_gemm.Tiling(256, 128))
    monkeypatch.setattr(hopper_gemm, "planned", hopper_gemm.planned.__wrapped__)
    m, n, k = 2100, 2064, 2064
    (a, a_inv), (b, b_inv) = (operand(rows, k, E4M3, i, LINE) for i, rows in enumerate((m, n)))
    rng = np.random.default_rng(4)
    before, bias = (put(rng.normal(size=size).astype(bfloat16.numpy), GPU) for size in ((m, n), (n,)))
    out, results = arrays.empty((m, n), bfloat16, GPU), []
    for i in range(300):
        arrays.copy(out, before)
        kernels.block_gemm(a, b, out, E4M3, E4M3, a_inv, b_inv, LINE, LINE, bias, out, None, 0)
        results = [*results[:1], get(out)]
        assert_same_bits(f"call {i}", results[-1], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [False, True], ids=["alone", "bias and addend"])
@pytest.mark.parametrize("k", [128, 256, 384, 512, 1040, 2064])
@pytest.mark.parametrize(("m", "n"), [(100, 256), (300, 2060), (2100, 2064)], ids=str)
@pytest.mark.parametrize(
    ("tiles", "fast"),
    [(None, True), (None, False), ((LINE, SQUARE), False), ((SQUARE, LINE), False), ((LINE, LINE), False)],
    ids=["fast", "split", "1x2", "2x1", "1x1"],
)
def test_results_that_are_written_during_the_next_tile(
    tiles: Any,
    fast: bool,
    m: int,
    n: int,
    k: int,
    joined: bool,
    kernels: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large tiles of bfloat16: one, or one and several for each block, of one to three depths, which is where
    what waits in registers is written, and more; edges; rows that copies cannot write. Rows behind the result
    stay as they were."""
    monkeypatch.setattr(
        hopper_gemm, "tiling", lambda *_: hopper_gemm.Tiling(*((128, 256) if fast else (256, 128)))
    )
    monkeypatch.setattr(hopper_gemm, "planned", hopper_gemm.planned.__wrapped__)
    a, b = (operand(rows, k, E4M3, i, tiles and tiles[i]) for i, rows in enumerate((m, n)))
    rng = np.random.default_rng(k)
    before, added = (rng.normal(size=shape).astype(bfloat16.numpy) for shape in ((m + 3, n), (n,)))
    whole = put(before, GPU)
    out = whole.slice(0, 0, m)
    multiply(kernels, a, b, out, tiles, fast, (put(added, GPU), out) if joined else (None, None))
    want, sums = before.copy(), by_the_model(kernels, a, b, (m, n, k), tiles, fast)
    if joined:
        sums = sums + added.astype(np.float32) + before[:m].astype(np.float32)
    want[:m] = sums.astype(bfloat16.numpy)
    assert_same_bits("out", get(whole), want)


INVARIANT = pytest.mark.parametrize(
    ("tiles", "fast"),
    [(None, True), (None, False), ((LINE, SQUARE), False), ((LINE, LINE), False)],
    ids=["fast", "split", "1x2", "1x1"],
)


@both
@pytest.mark.gpu
@INVARIANT
@pytest.mark.parametrize("bits", [bfloat16, float32], ids=str)
def test_a_row_of_the_result_does_not_depend_on_the_others(
    bits: Any, tiles: Any, fast: bool, kernels: Any
) -> None:
    """By whichever tiles rows are made: from one row to more than any tile has. 1040 terms end within a block
    of scales; 3072 columns choose the larger tiles."""
    for n, k in ((520, 1040), (3072, 512)):
        (b, b_inv), whole = operand(n, k, E4M3, 2, tiles and tiles[1]), None
        for rows in (1100, 1, 16, 64, 130, 272):
            a, a_inv = operand(1100, k, E4M3, 1, tiles and tiles[0])
            out = arrays.empty((rows, n), bits, GPU)
            if tiles is None:
                a = a.slice(0, 0, rows + -rows % 16)
                kernels.fp8_gemm(a, b, out, E4M3, E4M3, a_inv, b_inv, None, None, fast, None, 0)
            else:
                (padded, _), scales = block_shapes(rows, k, LINE)
                a, few = a.slice(0, 0, padded), get(a_inv)[: scales[0], : scales[1]]
                scale = put(np.ascontiguousarray(few), GPU)
                kernels.block_gemm(a, b, out, E4M3, E4M3, scale, b_inv, *tiles, None, None, None, 0)
            whole = get(out) if whole is None else whole
            assert_same_bits(f"{rows} rows", get(out), whole[:rows])


@INVARIANT
def test_nor_does_a_row_of_the_model(tiles: Any, fast: bool) -> None:
    """Whose bits the kernels' are: on the CPU."""
    rng, kernels = np.random.default_rng(3), dispatch.kernels(arrays.CPU)
    k, n = 272, 33
    codes = [rng.integers(0, 0x7F, (rows, k), np.uint8) for rows in (130, n)]
    places = tiles or ((0, 0), (0, 0))
    shapes = [
        (1, 1) if tiles is None else (-(-rows // tile[0]), -(-k // tile[1]))
        for rows, tile in zip((130, n), places, strict=True)
    ]
    scales = [rng.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes]
    how = ACCUMULATIONS["hopper_fast" if fast else "hopper_split"]
    made = {}
    for rows in (130, 1, 16, 100):
        out = arrays.empty((rows, n), float32, arrays.CPU)
        few = scales[0] if tiles is None else scales[0][:rows]
        given = [put(array, arrays.CPU) for array in (codes[0][:rows], codes[1], few, scales[1])]
        operands = (*given[:2], out, E4M3, E4M3, *given[2:], *places, how, None, None, 0)
        kernels.model_gemm(*operands)
        made[rows] = get(out)
        assert_same_bits(f"{rows} rows", made[rows], made[130][:rows])


# --- recorded, moved, captured ------------------------------------------------------------------------------


@both
@pytest.mark.gpu
def test_a_recorded_call_is_made_again_elsewhere(kernels: Any) -> None:
    from fp8kit.backends.cuda import recorded
    from fp8kit.backends.cuda.moving import moving

    sets = [(*operand(200, 512, E4M3, i, LINE), *operand(384, 512, E4M3, i + 9, SQUARE)) for i in range(3)]
    outs = [arrays.zeros((200, 384), bfloat16, GPU) for _ in sets]

    def call(i: int, out: ArrayView) -> None:
        a, a_inv, b, b_inv = sets[i]
        kernels.block_gemm(a, b, out, E4M3, E4M3, a_inv, b_inv, LINE, SQUARE, None, None, None, 0)

    with recorded.recording() as made:
        call(0, outs[0])
    everything = [(*sets[i], outs[i]) for i in range(3)]
    addresses = [[view.ptr for view in views] for views in everything]
    sizes = [view.nbytes for view in everything[0]]
    mover = moving(made, made.steps, addresses[0], sizes)
    assert made.complete
    assert mover is not None
    arrays.zero_(outs[0])
    made()
    assert mover(addresses[1])
    assert mover(addresses[2])
    for i in range(3):
        want = arrays.zeros((200, 384), bfloat16, GPU)
        call(i, want)
        assert_same_bits(f"call {i}", get(outs[i]), get(want))


@both
@pytest.mark.gpu
def test_a_captured_call_is_launched_again(kernels: Any) -> None:
    import cupy

    (a, scale), (b, _) = operand(256, 256, E4M3, 1, None), operand(256, 256, E4M3, 2, None)
    out, want = (arrays.zeros((256, 256), bfloat16, GPU) for _ in range(2))

    def call(to: ArrayView, stream: int) -> None:
        kernels.fp8_gemm(a, b, to, E4M3, E4M3, scale, scale, None, None, True, None, stream)

    call(want, 0)
    arrays.synchronize(GPU)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        call(out, stream.ptr)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert_same_bits("out", get(out), get(want))


# --- without a GPU ------------------------------------------------------------------------------------------


class Launched(SimpleNamespace):
    """What would be launched, on a chip of ``multiprocessors``."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    return support.planned(hopper_gemm, monkeypatch)


def plan(planned: Any, m: int, n: int, k: int, scales: str = "whole", promote: int = 0, **more: Any) -> Any:
    strides = {"a_stride": k, "b_stride": k, "out_stride": n, "a_rows": m, "b_rows": n} | more
    return planned(0, m, n, k, *strides.values(), ("e4m3", "e4m3", "bf16"), scales, (0, 0), promote)


@pytest.mark.parametrize("scales", ["whole", "lines_squares", "squares_lines", "lines_lines"])
@pytest.mark.parametrize("m", [1, 64, 200, 1024, 8192, 16384])
@pytest.mark.parametrize("n", [16, 384, 4096, 12288])
def test_every_tile_has_a_block_and_every_variant_is_compiled(
    n: int, m: int, scales: str, planned: Any
) -> None:
    for promote in (0, 128) if scales == "whole" else (128,):
        found = plan(planned, m, n, 1024, scales, promote)
        defines = dict(found.kernel)
        assert found.kernel in manifest.source("hopper_gemm.cu").variants
        at = hopper_gemm.Tiling(*(int(defines[name]) for name in ("BM", "BN")))
        together = hopper_gemm.blocks_together(promote, "none", at)
        tall, wide, band = found.sizes[6:9]
        columns = at.columns * together
        assert (tall - 1) * at.rows < m <= tall * at.rows
        assert (wide - 1) * columns < n <= wide * columns
        assert 0 < found.blocks <= min(132, tall * wide * together)
        assert found.blocks % together == 0
        assert 1 <= band <= tall


@pytest.mark.parametrize(
    ("scales", "promote", "out", "stride", "by_copies"),
    [
        ("whole", 0, "bf16", 4096, True),
        ("whole", 0, "f32", 4096, False),
        ("whole", 0, "f16", 4100, False),
        ("whole", 128, "bf16", 4096, True),
        ("whole", 128, "f32", 4096, False),
        ("lines_squares", 128, "f16", 4096, True),
        ("lines_lines", 128, "bf16", 4104, True),
    ],
)
def test_which_results_are_written_by_copies(
    scales: str, promote: int, out: str, stride: int, by_copies: bool, planned: Any
) -> None:
    """Of 16 bits, in rows of whole chunks of 16 bytes, by the largest tiles."""
    k = 8192  # so many that the largest tile is chosen
    a_map, b_map, *_, out_map, _ = planned(
        0, 4096, 4096, k, k, k, stride, 4096, 4096, ("e4m3", "e4m3", out), scales, (0, 0), promote
    ).maps
    rows, columns = (128, 256) if not promote else (256, 128)
    assert (f"(128, {rows})" in a_map.decode(), f"(128, {columns})" in b_map.decode()) == (True, True)
    kind = {"bf16": "bfloat16", "f16": "float16"}.get(out)
    whole = kind, (4096, 4096, 1), (stride, 4096 * stride), (64, 16, 1), True
    assert out_map == (repr(whole).encode() if by_copies else bytes(120))


def test_small_tiles_without_promotion_write_from_registers(planned: Any) -> None:
    assert not any(plan(planned, 64, 128, 512).maps[4])


@pytest.mark.parametrize(("n", "k", "turns"), [(16384, 4096, True), (4096, 12288, False)])
def test_turns_pay_where_sums_are_short(n: int, k: int, turns: bool, planned: Any) -> None:
    """Two blocks are a cluster, and each copies half of the rows of a tile of a."""
    found = plan(planned, 8192, n, k)
    assert (dict(found.kernel)["BN"] == "128") == turns
    assert f"(128, {64 if turns else 128})" in found.maps[0].decode()


def test_what_it_cannot_take_is_said(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotTake, match="multiples of 16"):
        plan(planned, 64, 64, 64, a_stride=72)
    monkeypatch.setattr(launch, "capability", lambda index: (10, 0))
    with pytest.raises(CannotTake, match=r"10\.0"):
        plan(planned, 64, 64, 64)


def test_what_none_of_them_takes_is_said() -> None:
    fp8_gemm, block_gemm = own_gemm.contract("a_gemm", lambda product, stream: pytest.fail("was run"))
    codes, scale = np.zeros((16, 128), np.uint8), np.ones((1, 16), np.float32)
    a, one = arrays.as_view(codes), arrays.as_view(scale[:, :1])
    out, bias = arrays.as_view(np.zeros((16, 16), np.float32)), arrays.as_view(np.zeros(16, np.float16))
    with pytest.raises(BackendError, match=r"a_gemm.*not E5M2 twice"):
        fp8_gemm(a, a, out, E5M2, E5M2, one, one, None, None, True, None, 0)
    with pytest.raises(BackendError, match=r"a_gemm.*bias"):
        fp8_gemm(a, a, out, E4M3, E5M2, one, one, bias, None, True, None, 0)
    with pytest.raises(BackendError, match=r"\(1, 128\) for at least one operand"):
        block_gemm(a, a, out, E4M3, E4M3, one, one, SQUARE, SQUARE, None, None, None, 0)


@pytest.mark.parametrize(
    ("m", "n", "rows"), [(1, 4096, 32), (256, 4096, 32), (4096, 4096, 128), (16, 16384, 128)]
)
def test_few_tiles_have_few_rows(m: int, n: int, rows: int) -> None:
    """So that half of the multiprocessors have one at least."""
    assert mma_gemm.tile_rows(m, n, 132) == rows


@pytest.mark.parametrize(
    ("name", "more", "how"),
    [
        ("fp8_gemm", {"fast_accumulate": True}, "hopper_fast"),
        ("fp8_gemm", {"fast_accumulate": False}, "hopper_split"),
        ("block_gemm", {"a_tile": LINE, "b_tile": SQUARE}, "hopper_split"),
    ],
)
def test_who_says_how_products_are_added(
    name: str, more: dict[str, Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLASLt's products, timed or not, and our own for Hopper, on Hopper, whose bits the contract then asks
    for; not another chip's, nor a contraction that is cut, nor nothing, nor the other kernels."""
    registry, made, chip = OpRegistry(), SimpleNamespace(splits=1), [(9, 0)]
    register(registry)
    monkeypatch.setattr(gemm, "_fp8_plan", lambda *call: (made, False, 0))
    monkeypatch.setattr(launch, "capability", lambda index: chip[0])
    sizes = {"a": (32, 64), "b": (16, 64), "out": (32, 16), "a_scale_inv": (1,), "b_scale_inv": (1,)}
    arguments: dict[str, Any] = {key: ArrayView(4096, shape, float32, GPU) for key, shape in sizes.items()}
    arguments |= dict.fromkeys(("bias", "addend", "workspace")) | dict.fromkeys(
        ("a_format", "b_format"), E4M3
    )
    call, found = SimpleNamespace(**arguments, **more), registry.get_implementations(name)
    says = {impl.impl_id: getattr(impl.fn, "_sums", None) for impl in found}
    assert says.pop(f"cuda.mma_{name}") is None
    assert set(says) == {f"cuda.timed_{name}", f"cuda.{name}", f"cuda.hopper_{name}"}
    chained: Any = chain(found, [impl.fn for impl in found])
    assert chained._sums is says[f"cuda.{'timed' if name == 'fp8_gemm' else 'hopper'}_{name}"]
    assert all(sums(call) is ACCUMULATIONS[how] for sums in says.values())
    ours, theirs = says[f"cuda.hopper_{name}"], says[f"cuda.{name}"]
    assert ours(SimpleNamespace(**{**vars(call), "b": ArrayView(4104, (16, 64), float32, GPU)})) is None
    made.splits = 2
    assert theirs(call) is None
    made.splits = 1
    assert theirs(SimpleNamespace(**{**vars(call), "out": ArrayView(4096, (0, 16), float32, GPU)})) is None
    chip[0] = (8, 9)
    assert all(sums(call) is None for sums in says.values())


# --- which is chosen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_of_blocks_our_own_is_chosen_on_hopper_alone(arch: int) -> None:
    """And no other of these products by itself, while cuBLASLt's is there."""
    own = dispatch.get_default_manager()
    for policy in (SelectionPolicy(), SelectionPolicy(deterministic=True)):
        for name in NAMES:
            ids = [impl.impl_id for impl in own.ranked(name, GPU, policy, lambda: arch)[0]]
            hopper = f"cuda.hopper_{name}"
            assert (hopper in ids) is (arch == 90)
            assert (ids[0] == hopper) is (arch == 90 and name == "block_gemm")
            assert ids[-1] == f"cuda.mma_{name}"


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The kernels that are chosen for a Hopper that is not here, and what runs of which of them."""
    run: list[Any] = []
    monkeypatch.setattr(arrays.provider(GPU), "count", lambda: 1, raising=False)
    monkeypatch.setattr(arrays.provider(GPU), "arch", lambda device: 90, raising=False)
    monkeypatch.setattr(hopper_gemm, "planned", support.planned(hopper_gemm, monkeypatch))
    monkeypatch.setattr(hopper_gemm, "tensor_map", lambda *given: b"x" * 120)
    monkeypatch.setattr(launch, "launch", lambda kernel, *given: run.append("hopper"))
    # the last two of cuBLASLt's: whether it is timed, and the kinds of scales
    monkeypatch.setattr(gemm, "fp8_gemm", lambda *given: run.append(given[-2:]))
    return dispatch.OpManager().choose(GPU, SelectionPolicy()), run


@pytest.mark.parametrize(
    ("moved", "by"),
    [
        ({}, "hopper"),
        ({"out": 2}, "hopper"),
        ({"a": 8}, (True, ("block_1x128", "block_128x128"))),
        ({"b_scale_inv": 4}, (True, ("block_1x128", "block_128x128"))),
    ],
    ids=["whole", "out", "a", "scales"],
)
def test_what_it_cannot_take_goes_to_cublaslt(
    moved: dict[str, int],
    by: Any,
    on_hopper: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Addresses that copies cannot read from: which is said, once."""
    monkeypatch.setattr(manager, "_SAID", set())
    kernels, run = on_hopper
    sizes = {"a": (32, 256), "b": (128, 256), "out": (32, 128), "a_scale_inv": (2, 32), "b_scale_inv": (1, 4)}
    types = {"a": uint8, "b": uint8, "out": bfloat16}
    views = {
        name: ArrayView(4096 + moved.get(name, 0), shape, types.get(name, float32), GPU)
        for name, shape in sizes.items()
    }
    rest = {"a_format": E4M3, "b_format": E4M3, "a_tile": LINE, "b_tile": SQUARE, "stream": 0}
    for _ in range(2):
        kernels.block_gemm(**views, **rest, bias=None, addend=None, workspace=None)
    assert run == [by, by]
    said = "block_gemm: cuda.hopper_block_gemm cannot take the call"
    assert sum(said in message for message in caplog.messages) == (by != "hopper")


@pytest.mark.gpu
def test_a_layers_products_with_scales_of_blocks_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All six of an MLP's step, with rows that no tile divides; cuBLASLt's where a policy names it."""
    support.want_hopper()
    packed, library, made = hopper_gemm.packed, gemm.fp8_gemm, []
    monkeypatch.setattr(hopper_gemm, "packed", lambda *given: made.append("hopper") or packed(*given))
    monkeypatch.setattr(gemm, "fp8_gemm", lambda *given: made.append("cuBLASLt") or library(*given))
    rng = np.random.default_rng(0)
    x, g = (
        fk.tensor(rng.standard_normal((300, 256)).astype(bfloat16.numpy), device=GPU, requires_grad=needs)
        for needs in (True, False)
    )
    for policy, by in (
        (SelectionPolicy(), "hopper"),
        (SelectionPolicy(deterministic=True), "hopper"),
        (SelectionPolicy(per_op={"block_gemm": ("impl:cuda.block_gemm",)}), "cuBLASLt"),
    ):
        made.clear()
        layer = fk.nn.LayerNormMLP(256, 512, params_dtype=bfloat16, device=GPU)
        with policy_context(policy), fk.autocast(recipe=fk.recipe.Float8BlockScaling()):
            y = layer(x)
        y.backward(g)
        assert made == [by] * 6
