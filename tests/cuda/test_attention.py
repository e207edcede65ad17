"""CUDA attention: cuDNN's path, our flash kernels and the unfused path against the formulas in float64."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fp8kit import formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.cuda import attention, cudnn_sdpa, flash, unfused
from fp8kit.backends.cuda.attention_problem import problem
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.errors import BackendError
from fp8kit.ops.attention import AttentionSpec
from fp8kit.testing.attention import attention_oracle
from fp8kit.testing.compare import assert_close, assert_same_bits, epsilon
from fp8kit.testing.contract import get, poisoned, put, workspace

CUDA = Device("cuda", 0)
BATCH, ROWS, COLUMNS = 3, 40, 72
# the last batch sees nothing
CU_Q, CU_KV = np.array([0, 40, 57, 97], np.int32), np.array([0, 50, 122, 122], np.int32)
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
    "bottom_right": dataclasses.replace(BASE, mask="causal_bottom_right"),
    "padding_bottom_right": dataclasses.replace(BASE, mask="padding_causal_bottom_right"),
    "window": dataclasses.replace(BASE, window_size=(9, 5), qkv_format="bshd"),
    "window_causal": dataclasses.replace(BASE, mask="causal", window_size=(20, 0)),
    "window_padding": dataclasses.replace(BASE, mask="padding_causal", window_size=(7, 0)),
    "dropout": dataclasses.replace(BASE, dropout=0.25),
    "dropout_padding_causal": dataclasses.replace(BASE, mask="padding_causal", dropout=0.1),
}
PATHS = {"cudnn": cudnn_sdpa, "flash": flash, "unfused": unfused}


def oracle(spec: AttentionSpec, x: dict[str, Any], keep: Any) -> dict[str, tuple[Any, Any]]:
    """``attention_oracle`` of this file's data."""
    return attention_oracle(
        spec, x["q"], x["k"], x["v"], x["do"], keep, (CU_Q, CU_KV) if spec.padded else None
    )


def check(
    spec: AttentionSpec, dtype: str, found: dict[str, Any], truth: dict[str, tuple[Any, Any]], what: str = ""
) -> None:
    """Slack relative to the absolute terms: the scores' float32 error enters exp four times, sums lose u a
    term; in 16 bits P, dS and o are rounded on the way, each by half an epsilon."""
    unit, score_size = 2.0**-24, truth["lse"][1]
    relative = 4 * (spec.head_dim + 4) * unit * score_size + (ROWS + COLUMNS + 16) * unit
    relative += 0 if dtype == "float32" else 1.5 * epsilon(dtype)
    assert_close(
        f"{what} lse",
        found["lse"],
        truth["lse"][0],
        "float32",
        (spec.head_dim + COLUMNS) * unit * (1 + score_size),
    )
    for name in ("o", "dq", "dk", "dv"):
        value, size = truth[name]
        assert_close(f"{what} {name}", found[name], value, dtype, relative * size)


def data(spec: AttentionSpec, dtype: str, columns: int = COLUMNS) -> dict[str, Any]:
    random, kind = np.random.default_rng(3), formats.dtype(dtype).numpy
    lead = (lambda n: (n, BATCH)) if spec.qkv_format == "sbhd" else (lambda n: (BATCH, n))
    query, other = (
        (*lead(ROWS), spec.num_heads, spec.head_dim),
        (*lead(columns), spec.num_gqa_groups, spec.head_dim),
    )
    shapes = {"q": query, "k": other, "v": other, "do": query}
    return {name: random.standard_normal(shape).astype(kind) for name, shape in shapes.items()}


def gapped(view: ArrayView, gap: int) -> ArrayView:
    """A poisoned view of the same shape whose tokens lie ``gap`` elements further apart: part of a wider,
    packed array."""
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


def beside(spec: AttentionSpec) -> AttentionExtras:
    """What the spec needs beside q, k and v, on the device."""
    lengths = (put(CU_Q, CUDA), put(CU_KV, CUDA)) if spec.padded else (None, None)
    return AttentionExtras(*lengths, put(RNG, CUDA) if spec.dropout else None)


def run(
    path: ModuleType, spec: AttentionSpec, x: dict[str, Any], deterministic: bool = True, gap: int = 0
) -> dict[str, Any]:
    """Forward and backward of one path; every buffer poisoned beforehand."""
    q, k, v, do = (spread(x[name], gap) if gap else put(x[name], CUDA) for name in ("q", "k", "v", "do"))
    about = problem(q.shape, k.shape, v.shape, q.dtype, spec, (q.strides, k.strides, v.strides))
    extras = beside(spec)
    o = poisoned(q.shape, q.dtype, CUDA)
    lse = poisoned((BATCH, spec.num_heads, ROWS), formats.float32, CUDA)
    dq, dk, dv = (gapped(view, gap) if gap else poisoned(view.shape, view.dtype, CUDA) for view in (q, k, v))
    if path is cudnn_sdpa:
        cudnn_sdpa.forward(
            about, q, k, v, o, lse, extras, workspace(cudnn_sdpa.workspace(about, False, False, 0), CUDA), 0
        )
        scratch = workspace(cudnn_sdpa.workspace(about, True, deterministic, 0), CUDA)
        cudnn_sdpa.backward(about, do, q, k, v, o, lse, dq, dk, dv, extras, deterministic, scratch, 0)
    else:
        scratch = [workspace(path.workspace(about, backward), CUDA) for backward in (False, True)]
        path.forward(about, q, k, v, o, lse, extras, scratch[0], 0)
        bias = () if path is flash else (None,)
        path.backward(about, do, q, k, v, o, lse, dq, dk, dv, *bias, None, extras, scratch[1], 0)
    return {name: get(view) for name, view in (("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv))}


def factors(path: ModuleType, spec: AttentionSpec, dtype: str) -> Any:
    """Dropout's factors (b, h, s_q, s_kv) of a path, seen through equal weights and values that are the rows
    of an identity, a part of the columns at a time. Dropping does not depend on what the numbers are."""
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
    [
        ("cudnn", "bfloat16", 0),
        ("cudnn", "bfloat16", 32),
        ("cudnn", "float16", 32),
        ("flash", "bfloat16", 0),
        ("flash", "bfloat16", 32),
        ("flash", "float16", 32),
        ("unfused", "bfloat16", 32),
        ("unfused", "float32", 6),
    ],
)
def test_values_and_gradients(path: str, dtype: str, gap: int, name: str) -> None:
    spec, x = CASES[name], data(CASES[name], dtype)
    if path == "cudnn":
        about = problem(x["q"].shape, x["k"].shape, x["v"].shape, formats.dtype(dtype), spec)
        assert [
            cudnn_sdpa.why_not(about, *mode, 0) for mode in ((False, False), (True, False), (True, True))
        ] == [None] * 3
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
@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 128, 136, 192, 200, 256])
@pytest.mark.parametrize("name", ["padding_bottom_right", "window", "dropout_padding_causal"])
def test_head_sizes_of_flash(head_dim: int, name: str) -> None:
    spec = dataclasses.replace(CASES[name], head_dim=head_dim)
    x = data(spec, "bfloat16")
    keep = factors(unfused, spec, "bfloat16")  # the same words
    check(spec, "bfloat16", run(flash, spec, x), oracle(spec, x, keep))


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
    assert abs(np.corrcoef((keep[0, 0] == 0).ravel(), (keep[0, 1] == 0).ravel())[0, 1]) < 5 / np.sqrt(
        ROWS * COLUMNS
    )


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["causal", "padding", "dropout"])
def test_deterministic_runs_give_the_same_bits(path: str, name: str) -> None:
    x = data(CASES[name], "bfloat16")
    first, second = (run(PATHS[path], CASES[name], x) for _ in range(2))
    for key in first:
        assert_same_bits(key, first[key], second[key])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "path"), [("bfloat16", "cudnn"), ("bfloat16", "flash"), ("float32", "unfused")]
)
@pytest.mark.parametrize("name", ["causal", "dropout_padding_causal"])
def test_contract_kernels_take_the_path_that_explain_names(
    dtype: str, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SMALL", 0 if path == "cudnn" else 1e30)
    monkeypatch.setattr(flash, "on_hopper", lambda *about: False)  # which needs no graph at this size
    attention.forget()
    spec, x = CASES[name], data(CASES[name], dtype)
    q, k, v, do = (put(x[key], CUDA) for key in ("q", "k", "v", "do"))
    rows = dict(attention.explain(q.shape, k.shape, q.dtype, spec))
    why = {
        "cuDNN": "too small to be worth a graph",
        "flash": "dtype float32: tensor cores take bfloat16 and float16",
    }
    if dtype == "float32":
        why["cuDNN"] = "dtype float32: cuDNN takes bfloat16 and float16"
        if spec.dropout:
            why["cuDNN backward"] = f"{why['cuDNN']}, and with dropout forward must run there too"
            why["cuDNN deterministic backward"] = why["cuDNN backward"]
    for one in attention.PATHS:
        for direction in attention.DIRECTIONS:
            said = rows[f"{one} {direction}"]
            passed = attention.PATHS.index(one) < [name.lower() for name in attention.PATHS].index(path)
            assert said == (why.get(f"{one} {direction}", why[one]) if passed else "runs")
    extras = beside(spec)._replace(rng=put(RNG, CUDA))
    o, dq, dk, dv = (poisoned(view.shape, view.dtype, CUDA) for view in (q, q, k, v))
    lse = poisoned((BATCH, spec.num_heads, ROWS), formats.float32, CUDA)
    asked = (q.shape, k.shape, v.shape, None, q.dtype, spec)
    scratch = workspace(attention.attention_workspace(*asked, False, True, ()), CUDA)
    attention.attention_fwd(q, k, v, o, lse, extras, spec, scratch, 0)
    scratch = workspace(attention.attention_workspace(*asked, True, True, ()), CUDA)
    attention.attention_bwd(do, q, k, v, o, lse, dq, dk, dv, None, None, extras, spec, True, scratch, 0)
    wanted = run(PATHS[path], spec, x)
    for key, view in (("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)):
        assert_same_bits(key, get(view), wanted[key])


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_a_workspace_that_is_too_small_is_refused(path: str) -> None:
    """Forward's, but of flash, whose forward needs none, backward's."""
    spec, x = CASES["padding"], data(CASES["padding"], "bfloat16")
    q, k, v = (put(x[key], CUDA) for key in "qkv")
    about = problem(q.shape, k.shape, v.shape, q.dtype, spec)
    lse = poisoned((BATCH, spec.num_heads, ROWS), formats.float32, CUDA)
    # cuDNN is asked for what is left behind the lengths, so that nothing is 0 bytes there
    missing = "got 0 bytes" if path == "cudnn" else "missing, expected"
    call = partial(PATHS[path].forward, about, q, k, v, q, lse)
    if path == "flash":
        call = partial(flash.backward, about, q, q, k, v, q, lse, q, k, v, None)
    small = put(np.zeros(16, np.uint8), CUDA)
    for space, said in ((None, missing), (small, r"got \d+ bytes")):
        with pytest.raises(BackendError, match=rf"attention: workspace: {said}"):
            call(beside(spec), space, 0)
