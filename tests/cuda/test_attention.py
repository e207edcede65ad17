"""CUDA attention: cuDNN's path and the unfused one against the formulas in float64."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fp8kit import formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import attention, cudnn_sdpa, unfused
from fp8kit.backends.cuda.attention_problem import Problem, problem
from fp8kit.errors import BackendError
from fp8kit.ops.attention import AttentionSpec
from fp8kit.testing.attention import attention_oracle
from fp8kit.testing.compare import assert_close, assert_same_bits, epsilon
from fp8kit.testing.contract import get, poisoned, put, workspace

CUDA = Device("cuda", 0)
BATCH, ROWS, COLUMNS = 3, 40, 72
CU_Q, CU_KV = np.array([0, 40, 57, 97], np.int32), np.array([0, 50, 122, 122], np.int32)  # the last batch sees nothing
RNG = np.array([1234, 7], np.int64)
BASE = AttentionSpec(num_heads=4, head_dim=64, num_gqa_groups=2, layout="separate", mask="no_mask")
CASES = {
    "plain": BASE,
    "causal": dataclasses.replace(BASE, mask="causal"),
    "bshd": dataclasses.replace(BASE, mask="causal", qkv_format="bshd"),
    "no_groups": dataclasses.replace(BASE, num_gqa_groups=4, mask="causal"),
    "scale": dataclasses.replace(BASE, softmax_scale=0.3),
    "wide": dataclasses.replace(BASE, head_dim=128, mask="causal"),
    "padding": dataclasses.replace(BASE, mask="padding"),
    "padding_causal": dataclasses.replace(BASE, mask="padding_causal", qkv_format="bshd"),
    "dropout": dataclasses.replace(BASE, dropout=0.25),
    "dropout_padding_causal": dataclasses.replace(BASE, mask="padding_causal", dropout=0.1),
}
PATHS = {"cudnn": cudnn_sdpa, "unfused": unfused}


def oracle(spec: AttentionSpec, x: dict[str, Any], keep: Any) -> dict[str, tuple[Any, Any]]:
    """``attention_oracle`` of this file's data."""
    return attention_oracle(spec, x["q"], x["k"], x["v"], x["do"], keep, (CU_Q, CU_KV) if spec.padded else None)


def check(spec: AttentionSpec, dtype: str, found: dict[str, Any], truth: dict[str, tuple[Any, Any]], what: str = "") -> None:
    """Slack relative to the absolute terms: the scores' float32 error enters exp four times, sums lose u a term; in 16 bits P, dS and o are
    rounded on the way, each by half an epsilon."""
    unit, score_size = 2.0**-24, truth["lse"][1]
    relative = 4 * (spec.head_dim + 4) * unit * score_size + (ROWS + COLUMNS + 16) * unit
    relative += 0 if dtype == "float32" else 1.5 * epsilon(dtype)
    assert_close(f"{what} lse", found["lse"], truth["lse"][0], "float32", (spec.head_dim + COLUMNS) * unit * (1 + score_size))
    for name in ("o", "dq", "dk", "dv"):
        value, size = truth[name]
        assert_close(f"{what} {name}", found[name], value, dtype, relative * size)


def data(spec: AttentionSpec, dtype: str, columns: int = COLUMNS) -> dict[str, Any]:
    random, kind = np.random.default_rng(3), formats.dtype(dtype).numpy
    lead = (lambda n: (n, BATCH)) if spec.qkv_format == "sbhd" else (lambda n: (BATCH, n))
    query, other = (*lead(ROWS), spec.num_heads, spec.head_dim), (*lead(columns), spec.num_gqa_groups, spec.head_dim)
    shapes = {"q": query, "k": other, "v": other, "do": query}
    return {name: random.standard_normal(shape).astype(kind) for name, shape in shapes.items()}


def gapped(view: ArrayView, gap: int) -> ArrayView:
    """A poisoned view of the same shape whose tokens lie ``gap`` elements further apart: part of a wider, packed array."""
    first, second, heads, dim = view.shape
    width = heads * dim + gap
    whole = poisoned((first * second * width,), view.dtype, view.device)
    return whole.with_strides(view.shape, (second * width, width, dim, 1), gap // 2)


def spread(array: Any, gap: int) -> ArrayView:
    """The array on the device, its tokens ``gap`` elements further apart."""
    first, second, heads, dim = array.shape
    whole = np.zeros((first, second, heads * dim + gap), array.dtype)
    whole[..., gap // 2 : gap // 2 + heads * dim] = array.reshape(first, second, -1)
    width = heads * dim + gap
    return put(whole, CUDA).with_strides(array.shape, (second * width, width, dim, 1), gap // 2)


def run(path: ModuleType, spec: AttentionSpec, x: dict[str, Any], deterministic: bool = True, gap: int = 0) -> dict[str, Any]:
    """Forward and backward of one path; every buffer poisoned beforehand."""
    q, k, v, do = (spread(x[name], gap) if gap else put(x[name], CUDA) for name in ("q", "k", "v", "do"))
    about = problem(q.shape, k.shape, q.dtype, spec)
    cu = [put(CU_Q, CUDA), put(CU_KV, CUDA)] if spec.padded else [None, None]
    rng = put(RNG, CUDA) if spec.dropout else None
    o = poisoned(q.shape, q.dtype, CUDA)
    lse = poisoned((BATCH, spec.num_heads, ROWS), formats.float32, CUDA)
    dq, dk, dv = (gapped(view, gap) if gap else poisoned(view.shape, view.dtype, CUDA) for view in (q, k, v))
    scratch = workspace(path.workspace(about, False, False, 0), CUDA)
    path.forward(about, q, k, v, o, lse, *cu, rng, scratch, 0)
    scratch = workspace(path.workspace(about, True, deterministic, 0), CUDA)
    path.backward(about, do, q, k, v, o, lse, dq, dk, dv, *cu, rng, deterministic, scratch, 0)
    return {name: get(view) for name, view in (("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv))}


def factors(path: ModuleType, spec: AttentionSpec, dtype: str) -> Any:
    """Dropout's factors (b, h, s_q, s_kv) of a path, seen through equal weights and values that are the rows of an identity, a part of the
    columns at a time. Dropping does not depend on what the numbers are."""
    if not spec.dropout:
        return np.ones(1)
    plain, columns, keep = dataclasses.replace(spec, softmax_scale=1.0), np.arange(COLUMNS), []
    for start in range(0, COLUMNS, spec.head_dim):
        x = data(spec, dtype)
        x["q"][...] = 0
        one = (columns[:, None] == start + np.arange(spec.head_dim)).astype(x["v"].dtype)
        x["v"][...] = one[:, None, None] if spec.qkv_format == "sbhd" else one[None, :, None]
        o = np.asarray(run(path, plain, x)["o"], np.float64)
        keep.append(o.transpose((1, 2, 0, 3) if spec.qkv_format == "sbhd" else (0, 2, 1, 3)))
    kept = np.concatenate(keep, axis=3)[..., :COLUMNS] > 0
    return np.where(kept, 1 / (1 - spec.dropout), 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("path", "dtype", "gap"),
    [("cudnn", "bfloat16", 0), ("cudnn", "bfloat16", 32), ("cudnn", "float16", 32), ("unfused", "bfloat16", 32), ("unfused", "float32", 6)],
)
def test_values_and_gradients(path: str, dtype: str, gap: int, name: str) -> None:
    spec, x = CASES[name], data(CASES[name], dtype)
    if path == "cudnn":
        about = problem(x["q"].shape, x["k"].shape, formats.dtype(dtype), spec)
        assert [cudnn_sdpa.why_not(about, *mode, 0) for mode in ((False, False), (True, False), (True, True))] == [None] * 3
    keep = factors(PATHS[path], spec, dtype)
    for deterministic in (True, False):
        found = run(PATHS[path], spec, x, deterministic, gap)
        check(spec, dtype, found, oracle(spec, x, keep), f"deterministic={deterministic}")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [1, 7, 20, 264])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_head_sizes_that_cudnn_refuses(head_dim: int, dtype: str) -> None:
    spec = dataclasses.replace(BASE, head_dim=head_dim, mask="causal")
    x = data(spec, dtype)
    check(spec, dtype, run(unfused, spec, x), oracle(spec, x, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [1, 9000, 100_000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_tiles_give_the_same(monkeypatch: pytest.MonkeyPatch, dtype: str, limit: int) -> None:
    monkeypatch.setattr(unfused, "_LIMIT", limit)
    unfused.layout.cache_clear()
    try:
        spec = dataclasses.replace(CASES["padding_causal"], dropout=0.2)
        x = data(spec, dtype)
        check(spec, dtype, run(unfused, spec, x), oracle(spec, x, factors(unfused, spec, dtype)))
    finally:
        unfused.layout.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_dropout_drops_the_right_share(path: str) -> None:
    spec = CASES["dropout"]
    keep = factors(PATHS[path], spec, "bfloat16")
    dropped, count = float((keep == 0).mean()), keep.size
    assert abs(dropped - spec.dropout) < 5 * np.sqrt(spec.dropout * (1 - spec.dropout) / count)
    assert abs(np.corrcoef((keep[0, 0] == 0).ravel(), (keep[0, 1] == 0).ravel())[0, 1]) < 5 / np.sqrt(ROWS * COLUMNS)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["causal", "padding", "dropout"])
def test_deterministic_runs_give_the_same_bits(path: str, name: str) -> None:
    x = data(CASES[name], "bfloat16")
    first, second = (run(PATHS[path], CASES[name], x) for _ in range(2))
    for key in first:
        assert_same_bits(key, first[key], second[key])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "path"), [("bfloat16", "cudnn"), ("float32", "unfused")])
@pytest.mark.parametrize("name", ["causal", "dropout_padding_causal"])
def test_contract_kernels_take_the_path_that_explain_names(dtype: str, path: str, name: str) -> None:
    spec, x = CASES[name], data(CASES[name], dtype)
    q, k, v, do = (put(x[key], CUDA) for key in ("q", "k", "v", "do"))
    rows = dict(attention.explain(q.shape, k.shape, q.dtype, spec))
    assert rows["unfused"] == "runs"
    for row in ("cuDNN forward", "cuDNN backward", "cuDNN deterministic backward"):
        assert rows[row] == "runs" if path == "cudnn" else rows[row].startswith("dtype float32: cuDNN takes bfloat16 and float16")
    cu = [put(CU_Q, CUDA), put(CU_KV, CUDA)] if spec.padded else [None, None]
    rng = put(RNG, CUDA)
    o, dq, dk, dv = (poisoned(view.shape, view.dtype, CUDA) for view in (q, q, k, v))
    lse = poisoned((BATCH, spec.num_heads, ROWS), formats.float32, CUDA)
    scratch = workspace(attention.attention_workspace(q.shape, k.shape, q.dtype, spec, False), CUDA)
    attention.attention_fwd(q, k, v, o, lse, *cu, rng, spec, scratch, 0)
    scratch = workspace(attention.attention_workspace(q.shape, k.shape, q.dtype, spec, True), CUDA)
    attention.attention_bwd(do, q, k, v, o, lse, dq, dk, dv, *cu, rng, spec, True, scratch, 0)
    wanted = run(PATHS[path], spec, x)
    for key, view in (("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)):
        assert_same_bits(key, get(view), wanted[key])


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_a_workspace_that_is_too_small_is_refused(path: str) -> None:
    spec, x = CASES["padding"], data(CASES["padding"], "bfloat16")
    q, k, v = (put(x[key], CUDA) for key in "qkv")
    about = problem(q.shape, k.shape, q.dtype, spec)
    lse = poisoned((BATCH, spec.num_heads, ROWS), formats.float32, CUDA)
    with pytest.raises(BackendError, match="attention: workspace: got"):
        PATHS[path].forward(about, q, k, v, q, lse, put(CU_Q, CUDA), put(CU_KV, CUDA), None, None, 0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "groups", "dtype"), [(40, 72, 2, "float32"), (9000, 8200, 8, "bfloat16"), (5, 200_000, 3, "float16")]
)
def test_tiles_cover_every_row_once_in_bounded_memory(rows: int, columns: int, groups: int, dtype: str, backward: bool) -> None:
    about = Problem(2, 24, groups, rows, columns, 64, dtype, "sbhd", "causal", 0.125, 0.0)
    cut, seen = unfused.layout(about, backward), np.zeros((2, 24, rows), int)
    opened: dict[tuple[int, int], int] = {}
    for tile in unfused._tiles(about, cut):
        assert tile.rows <= cut.rows
        assert tile.groups <= cut.groups
        repeat = 24 // groups
        seen[tile.batch, tile.head : tile.head + tile.groups * repeat : repeat, tile.row : tile.row + tile.rows] += 1
        key = (tile.batch, tile.group)
        assert tile.first == (key not in opened)
        opened[key] = opened.get(key, 0) + tile.rows
        assert tile.last == (opened[key] == repeat * rows)
    assert (seen == 1).all()
    sums = 2 * 4 * cut.groups * columns * 64 if cut.summed else 0
    assert cut.total <= unfused._LIMIT + sums + unfused.cublaslt.WORKSPACE + 8 * unfused._ALIGN


@pytest.mark.parametrize(
    ("change", "backward", "reason"),
    [
        ({"dtype": "float32"}, False, "dtype float32: cuDNN takes bfloat16 and float16"),
        ({"dim": 20}, False, "head_dim 20: cuDNN takes multiples of 8 up to 256"),
        ({"dim": 264}, False, "head_dim 264: cuDNN takes multiples of 8 up to 256"),
        ({"rows": 1, "columns": 1}, True, "one row by one column: cuDNN has no backward for it"),
        ({"rows": 1, "columns": 1}, False, None),
        ({}, True, None),
    ],
)
def test_rules_known_before_asking_cudnn(change: dict[str, Any], backward: bool, reason: str | None) -> None:
    about = Problem(2, 8, 2, 40, 72, 64, "bfloat16", "sbhd", "causal", 0.125, 0.0)._replace(**change)
    assert cudnn_sdpa._refused(about, backward) == reason
