"""cuBLASLt plans: the row-major to column-major mapping by NumPy, and values beyond the contract's cases on
the GPU."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fp8kit import arrays, codec, formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import cublaslt, gemm
from fp8kit.backends.cuda.cublaslt import MatmulKey, Operand, operands
from fp8kit.errors import BackendError
from fp8kit.formats import E4M3, E5M2, bfloat16, float8_e4m3fn, float32
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import get, poisoned, put, workspace
from tests.support.cuda_libraries import Library

GPU = Device("cuda", 0)
LAYOUTS = ("nt", "nn", "tn")


def column_major(memory: Any, operand: Operand) -> Any:
    """The matrix that cuBLASLt sees in ``memory``."""
    items = memory.dtype.itemsize
    seen = np.lib.stride_tricks.as_strided(
        memory, (operand.rows, operand.columns), (items, operand.ld * items)
    )
    return seen.T if operand.transposed else seen


def stored(rows: int, columns: int, stride: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, stride))[:, :columns]


def pair(layout: str, m: int, n: int, k: int, pad: int = 0) -> tuple[Any, Any, Any]:
    """a, b as stored for a layout (rows ``pad`` longer than they are), and their product."""
    a = stored(*((k, m, m + pad) if layout == "tn" else (m, k, k + pad)), seed=1)
    b = stored(*((n, k, k + pad) if layout == "nt" else (k, n, n + pad)), seed=2)
    return a, b, (a.T if layout == "tn" else a) @ (b.T if layout == "nt" else b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pad", [0, 3])
def test_the_transposed_problem_is_the_same_product(layout: Any, pad: int) -> None:
    m, n, k = 5, 7, 4
    a, b, product = pair(layout, m, n, k, pad)
    key = MatmulKey(m, n, k, layout, float32, float32, float32, a.strides[0] // 8, b.strides[0] // 8, n + pad)
    first, second, result = operands(key)
    out = np.zeros((m, n + pad))
    column_major(out, result)[:] = column_major(b, first) @ column_major(a, second)
    assert_close("product", out[:, :n], product, "float64", 1e-14 * np.abs(product))
    assert not out[:, n:].any()


def test_fp8_products_are_what_hopper_takes() -> None:
    key = MatmulKey(
        32, 48, 64, "nt", float8_e4m3fn, float8_e4m3fn, bfloat16, 64, 64, 48, scaling=("tensor", "tensor")
    )
    first, second, _ = operands(key)
    assert (first.transposed, second.transposed) == (True, False)  # FP8 is "TN" only


def test_a_run_patches_only_pointers_that_changed(library: Library) -> None:
    key = MatmulKey(
        32,
        48,
        64,
        "nt",
        float8_e4m3fn,
        float8_e4m3fn,
        bfloat16,
        64,
        64,
        48,
        bias=True,
        accumulate=True,
        scaling=("row", "row"),
        fast_accumulate=True,
    )
    plan = cublaslt.MatmulPlan(key, 0)
    # TRANSA, TRANSB, EPILOGUE (bias), BIAS_DATA_TYPE (bfloat16), FAST_ACCUM, A and B SCALE_MODE
    # (OUTER_VEC_32F), and some scale pointers
    assert library.attributes == [
        (3, 1),
        (4, 0),
        (7, 4),
        (26, 14),
        (25, 1),
        (31, 3),
        (32, 3),
        (17, 256),
        (18, 256),
    ]
    library.attributes.clear()
    plan.run((1000, 2000, 3000, 11, 22, 33, 4000, 0), 555, 9)
    assert library.attributes == [(17, 22), (18, 11), (8, 33)]  # cuBLASLt's A is our b
    library.attributes.clear()
    plan.run((1000, 2000, 3000, 11, 44, 33, 4000, 0), 555, 9)
    assert library.attributes == [(17, 44)]
    assert len(library.products) == 2
    plan.run((1000, 2000, 3000, 11, 44, 33, 4000, 6000), 555, 9)
    *_, added, c_form, d, d_form = library.products[2][:8]
    assert (added, d) == (6000, 3000)
    assert c_form == d_form
    b, first, a, second, out, result, also_out, also_result, algorithm, scratch, size, stream, alpha, beta = (
        library.products[1]
    )
    assert (a, b, out, also_out, scratch, size, stream) == (1000, 2000, 3000, 3000, 4000, 555, 9)
    assert len({first, second, result}) == 3
    assert result == also_result
    assert (chr(algorithm), alpha, beta) == ("A", 1.0, 1.0)


def test_block_scaling_modes_swap_with_the_operands(library: Library) -> None:
    key = MatmulKey(
        32,
        48,
        128,
        "nt",
        float8_e4m3fn,
        float8_e4m3fn,
        bfloat16,
        128,
        128,
        48,
        scaling=("block_1x128", "block_128x128"),
    )
    cublaslt.MatmulPlan(key, 0)
    # FAST_ACCUM off; A (our b) is BLK128x128_32F, B (our a) VEC128_32F
    assert library.attributes[2:5] == [(25, 0), (31, 5), (32, 4)]


def test_other_candidates_can_be_chosen(library: Library) -> None:
    plan = cublaslt.MatmulPlan(MatmulKey(4, 4, 4, "nn", float32, float32, float32, 4, 4, 4, alpha=0.25), 0)
    plan.choose(2)
    plan.run((1, 2, 3, 0, 0, 0, 0, 0), 0, 0)
    assert chr(library.products[0][8]) == "C"
    assert library.products[0][-2:] == (0.25, 0.0)
    with pytest.raises(BackendError, match="expected one of 3"):
        plan.choose(3)


def test_a_problem_begins_with_what_one_about_as_large_has_taken(library: Library) -> None:
    def plan(rows: int, timed: bool = True) -> cublaslt.MatmulPlan:
        key = MatmulKey(rows, 64, 32, "nt", bfloat16, bfloat16, bfloat16, 32, 32, 64, timed=timed)
        return cublaslt.MatmulPlan(key, 0)

    def taken(plan: cublaslt.MatmulPlan) -> str:
        return chr(plan.chosen[0])

    first = plan(200)
    first.choose(2)
    first.lend()
    library.refused = "matmul_algo_get_heuristic"
    near = plan(210)  # both are a quarter of 128 below 225
    assert taken(near) == "C"
    library.refused = "matmul_algo_check"
    assert [taken(plan(210)), taken(plan(240)), taken(plan(210, False))] == ["A"] * 3
    library.refused = ""
    assert near.algorithms == 3  # its own, and two more of the heuristic's
    near.choose(1)
    assert taken(near) == "A"
    assert near.take(first.chosen)
    assert taken(plan(222)) == "C"
    library.refused = "matmul_algo_get_heuristic"
    assert plan(210).algorithms == 1


def test_rows_that_lie_badly_begin_apart() -> None:
    """An algorithm that reads 16 bytes at once may not be offered to them."""

    def coarse(stride: int, alignment: int = 16) -> MatmulKey:
        types = bfloat16, bfloat16, bfloat16
        key = MatmulKey(64, 64, 1000, "nt", *types, stride, stride, 64, alignment=alignment, timed=True)
        return cublaslt._coarse(key)

    assert coarse(1016) == coarse(1024)
    found = [coarse(*lying).alignment for lying in ((1016,), (1020,), (1023,), (1024, 2))]
    assert found == [16, 8, 2, 2]


PLAIN = MatmulKey(4, 4, 4, "nn", float32, float32, float32, 4, 4, 4)


@pytest.mark.parametrize("function", ["matmul_algo_get_heuristic", "matmul_desc_set_attribute"])
def test_a_problem_that_cublaslt_refuses_is_one_error(library: Library, function: str) -> None:
    library.refused = function
    with pytest.raises(BackendError, match=r"cublaslt: MatmulKey.*NOT_SUPPORTED"):
        cublaslt.MatmulPlan(PLAIN, 0)


@pytest.mark.parametrize("function", ["matmul", "matmul_desc_set_attribute"])
def test_a_product_that_cublaslt_refuses_is_one_error(library: Library, function: str) -> None:
    plan = cublaslt.MatmulPlan(PLAIN, 0)
    library.refused = function
    with pytest.raises(BackendError, match="NOT_SUPPORTED"):
        plan.run((1, 2, 3, 4, 5, 0, 0, 0), 0, 0)  # with scales, so that the descriptor is told


def test_a_recorded_product_that_cublaslt_refuses_is_one_error(library: Library) -> None:
    plan = cublaslt.MatmulPlan(PLAIN, 0)
    for function in ("matmul", "matmul_desc_set_attribute"):
        library.refused = function
        with pytest.raises(BackendError, match=r"cublaslt: MatmulKey.*NOT_SUPPORTED"):
            cublaslt.Bound(plan, (1, 2, 3, 0, 0, 0, 0, 3), 0).run(5)


def test_no_handle_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def create() -> int:
        raise Library.cuBLASLtError("NOT_INITIALIZED (1)")

    monkeypatch.setattr(
        cublaslt,
        "bindings",
        lambda: types.SimpleNamespace(create=create, cuBLASLtError=Library.cuBLASLtError),
    )
    monkeypatch.setattr(cublaslt.launch, "current_device", lambda index: contextlib.nullcontext())
    with pytest.raises(BackendError, match=r"no handle on cuda:0.*NOT_INITIALIZED"):
        cublaslt._handle.__wrapped__(0)


def test_fp8_operands_of_other_strides_have_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[MatmulKey] = []

    def made(key: MatmulKey, index: int) -> Any:
        keys.append(key)
        return types.SimpleNamespace(run=lambda *numbers: None, tuned=True)

    monkeypatch.setattr(gemm, "plan", made)
    one, out = ArrayView(1024, (1,), float32, GPU), ArrayView(2048, (32, 48), bfloat16, GPU)
    gemm._plan.cache_clear()
    try:
        for a_stride, b_stride in ((64, 64), (80, 64), (64, 96), (80, 64)):
            a = ArrayView(4096, (32, 64), formats.uint8, GPU, None, (a_stride, 1))
            b = ArrayView(8192, (48, 64), formats.uint8, GPU, None, (b_stride, 1))
            gemm.fp8_gemm(a, b, out, E4M3, E5M2, one, one, None, None, True, None, 0)
    finally:
        gemm._plan.cache_clear()
    assert [(key.a_stride, key.b_stride) for key in keys] == [(64, 64), (80, 64), (64, 96)]


def run(
    key: MatmulKey, a: ArrayView, b: ArrayView, out: ArrayView, scratch: ArrayView, choice: int = 0
) -> None:
    plan = cublaslt.MatmulPlan(key, 0)
    plan.choose(choice % plan.algorithms)
    plan.run((a.ptr, b.ptr, out.ptr, 0, 0, 0, scratch.ptr, 0), key.workspace, arrays.current_stream(GPU))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_with_steps_and_alpha(layout: Any) -> None:
    batch, m, n, k = 6, 32, 40, 24
    rng = np.random.default_rng(3)
    a = rng.standard_normal((batch, k, m) if layout == "tn" else (batch, m, k)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((batch, n, k) if layout == "nt" else (batch, k, n)).astype(ml_dtypes.bfloat16)
    left = a.astype(np.float64).swapaxes(1, 2) if layout == "tn" else a.astype(np.float64)
    right = b.astype(np.float64).swapaxes(1, 2) if layout == "nt" else b.astype(np.float64)
    out = poisoned((batch, m, n), float32, GPU)
    key = MatmulKey(
        m,
        n,
        k,
        layout,
        bfloat16,
        bfloat16,
        float32,
        a.shape[2],
        b.shape[2],
        n,
        batch=batch,
        a_step=m * k,
        b_step=n * k,
        out_step=m * n,
        alpha=0.5,
    )
    da, db, scratch = put(a, GPU), put(b, GPU), workspace(cublaslt.WORKSPACE, GPU)
    run(key, da, db, out, scratch)
    assert_close("out", get(out), 0.5 * left @ right, "float32", sum_slack(np.abs(left) @ np.abs(right), k))


@pytest.mark.gpu
def test_every_candidate_gives_the_product() -> None:
    m, n, k = 256, 128, 512
    a, b, _ = pair("nt", m, n, k)
    a, b = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    slack = sum_slack(np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64).T, k)
    da, db, scratch = put(a, GPU), put(b, GPU), workspace(cublaslt.WORKSPACE, GPU)
    key = MatmulKey(m, n, k, "nt", bfloat16, bfloat16, float32, k, k, n)
    for choice in range(cublaslt.plan(key, 0).algorithms):
        out = poisoned((m, n), float32, GPU)
        run(key, da, db, out, scratch, choice)
        assert_close(f"algorithm {choice}", get(out), exact, "float32", slack)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_is_not_rounded_to_tf32(layout: Any) -> None:
    m, n, k = 96, 64, 160
    a, b, _ = pair(layout, m, n, k)
    a, b = a.astype(np.float32), b.astype(np.float32)
    left = (a.T if layout == "tn" else a).astype(np.float64)
    right = (b.T if layout == "nt" else b).astype(np.float64)
    out = poisoned((m, n), float32, GPU)
    gemm.gemm(
        put(a, GPU),
        put(b, GPU),
        out,
        layout,
        None,
        None,
        workspace(gemm.gemm_workspace(), GPU),
        arrays.current_stream(GPU),
    )
    assert_close("out", get(out), left @ right, "float32", sum_slack(np.abs(left) @ np.abs(right), k))


@pytest.mark.parametrize("offset", [0, 2, 8])
def test_arrays_at_odd_addresses_go_another_way(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """cuBLASLt never sees them: an addend is copied to the output first, a bias added by a kernel of its
    own."""
    done: list[tuple[Any, ...]] = []
    plan = types.SimpleNamespace(tuned=True, run=lambda of, *_: done.append(("product", of[5], of[7])))
    monkeypatch.setattr(gemm, "_plan", lambda *given: plan)
    monkeypatch.setattr(gemm.elementwise, "copy", lambda x, y, stream: done.append(("copy", x.ptr, y.ptr)))
    monkeypatch.setattr(
        gemm,
        "_finish",
        lambda product, stride, bias, out, addend, stream: done.append(("finish", bias.ptr, addend.ptr)),
    )
    a, b = ArrayView(4096, (32, 64), formats.uint8, GPU), ArrayView(8192, (48, 64), formats.uint8, GPU)
    one, out = ArrayView(256, (1,), float32, GPU), ArrayView(65536, (32, 48), bfloat16, GPU)
    bias, addend = (
        ArrayView(1024 + offset, (48,), bfloat16, GPU),
        ArrayView(131072 + offset, (32, 48), bfloat16, GPU),
    )
    room = ArrayView(1 << 20, (gemm.fp8_gemm_workspace(32, 48),), formats.uint8, GPU)
    gemm.fp8_gemm(a, b, out, E4M3, E4M3, one, one, bias, addend, True, room, 0)
    if offset:
        assert done == [("copy", addend.ptr, out.ptr), ("product", 0, 0), ("finish", bias.ptr, out.ptr)]
    else:
        assert done == [("product", bias.ptr, addend.ptr)]


@pytest.mark.gpu
@pytest.mark.parametrize("out_type", ["bfloat16", "float32"])
@pytest.mark.parametrize(("m", "n"), [(48, 32), (41, 32), (48, 29), (33, 19)])
@pytest.mark.parametrize("add", ["", "accumulate", "add"])
def test_fp8_with_bias_padding_and_addend_rounds_once(out_type: str, m: int, n: int, add: str) -> None:
    k, dtype = 64, formats.dtype(out_type)
    rng = np.random.default_rng(5)
    rows, columns = -(-m // 16) * 16, -(-n // 16) * 16
    a, b = rng.standard_normal((rows, k)), rng.standard_normal((columns, k))
    a[m:], b[n:] = 0, 0
    qa, qb = codec.encode(a, E5M2), codec.encode(b, E4M3)
    bias = rng.standard_normal(n).astype(dtype.numpy)
    before = rng.standard_normal((m, n)).astype(dtype.numpy)
    scales = np.float32([0.5]), np.float32([4.0])
    da, db = codec.decode(qa, E5M2)[:m] * 0.5, codec.decode(qb, E4M3)[:n] * 4.0
    exact = da @ db.T + bias.astype(np.float64) + (before.astype(np.float64) if add else 0)
    magnitude = (
        np.abs(da) @ np.abs(db).T + np.abs(bias.astype(np.float64)) + np.abs(before.astype(np.float64))
    )
    out = put(before, GPU)
    addend = {"": None, "accumulate": out, "add": put(before, GPU)}[add]
    gemm.fp8_gemm(
        put(qa, GPU),
        put(qb, GPU),
        out,
        E5M2,
        E4M3,
        put(scales[0], GPU),
        put(scales[1], GPU),
        put(bias, GPU),
        addend,
        False,
        workspace(gemm.fp8_gemm_workspace(m, n), GPU),
        arrays.current_stream(GPU),
    )
    # Hopper's tensor cores add products of FP8 numbers in 14 bits: their own bound, beside float32's
    assert_close("out", get(out), exact, out_type, 2.0**-12 * magnitude)


@pytest.mark.gpu
def test_no_contraction_writes_bias_and_what_was_there() -> None:
    before, bias = np.ones((3, 5), np.float32), np.arange(5, dtype=np.float32)
    out, stream = put(before, GPU), arrays.current_stream(GPU)
    empty_a, empty_b = poisoned((3, 0), float32, GPU), poisoned((5, 0), float32, GPU)
    gemm.gemm(empty_a, empty_b, out, "nt", put(bias, GPU), out, None, stream)
    assert_same_bits("out", get(out), before + bias)
    gemm.gemm(empty_a, empty_b, out, "nt", put(bias, GPU), put(before, GPU), None, stream)
    assert_same_bits("out", get(out), before + bias)
    gemm.gemm(empty_a, empty_b, out, "nt", None, None, None, stream)
    assert_same_bits("out", get(out), np.zeros_like(before))


@pytest.mark.gpu
def test_the_same_plan_serves_two_pairs_of_scales() -> None:
    a = np.full((16, 16), codec.encode(np.float64(1.0), E4M3), np.uint8)
    da, db, stream = put(a, GPU), put(a, GPU), arrays.current_stream(GPU)
    scratch = workspace(gemm.gemm_workspace(), GPU)
    for left, right in ((1.0, 2.0), (3.0, 5.0), (1.0, 7.0)):
        out = poisoned((16, 16), bfloat16, GPU)
        scales = put(np.float32([left]), GPU), put(np.float32([right]), GPU)
        gemm.fp8_gemm(da, db, out, E4M3, E4M3, *scales, None, None, True, scratch, stream)
        assert_same_bits("out", get(out), np.full((16, 16), 16 * left * right, ml_dtypes.bfloat16))
