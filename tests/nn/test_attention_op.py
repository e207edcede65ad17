"""The attention operation on the reference engine, against the formulas in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fp8kit import arrays, formats
from fp8kit.backends import dispatch
from fp8kit.errors import FormatError, ShapeError
from fp8kit.ops.attention import LAYOUTS, AttentionSpec, attention
from fp8kit.spec import Meta, WorkingSet
from fp8kit.testing.attention import attention_oracle
from fp8kit.testing.compare import assert_close, assert_same_bits, epsilon
from fp8kit.testing.contract import get, poisoned, put

BATCH, ROWS, COLUMNS = 3, 13, 17
# the last batch has no query at all
CU_Q, CU_KV = np.array([0, 13, 18, 18], np.int32), np.array([0, 9, 26, 30], np.int32)
RNG = np.array([1234, 7], np.int64)
PLAIN = AttentionSpec(num_heads=4, head_dim=8, num_gqa_groups=2, layout="separate", mask="no_mask")

CASES = {
    "plain": PLAIN,
    "causal": dataclasses.replace(PLAIN, mask="causal"),
    "bshd": dataclasses.replace(PLAIN, qkv_format="bshd", mask="causal"),
    "no_groups": dataclasses.replace(PLAIN, num_gqa_groups=0),
    "one_group": dataclasses.replace(PLAIN, num_gqa_groups=1),
    "scale": dataclasses.replace(PLAIN, softmax_scale=0.7),
    "padding": dataclasses.replace(PLAIN, mask="padding"),
    "padding_causal": dataclasses.replace(PLAIN, mask="padding_causal", qkv_format="bshd"),
    "dropout": dataclasses.replace(PLAIN, dropout=0.3),
    "dropout_causal_padding": dataclasses.replace(PLAIN, mask="padding_causal", dropout=0.1),
    "q_kv": dataclasses.replace(PLAIN, layout="q_kv", mask="causal"),
    "qkv": dataclasses.replace(PLAIN, layout="qkv", mask="causal"),
    "qkv_bshd_dropout": dataclasses.replace(PLAIN, layout="qkv", qkv_format="bshd", dropout=0.2),
    "qkv_interleaved": dataclasses.replace(PLAIN, layout="qkv_interleaved", num_gqa_groups=4, mask="causal"),
    "bfloat16": PLAIN,
    "float16": dataclasses.replace(PLAIN, layout="qkv", mask="causal"),
}


def keep_factors(spec: AttentionSpec, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Dropout's factors, Philox4x32-10 by its definition (Salmon et al., SC'11), element by element."""
    if not spec.dropout:
        return np.ones(shape)
    count = int(np.prod(shape))
    group = np.arange((count + 3) // 4, dtype=np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    c = [group & mask, group >> np.uint64(32), np.full_like(group, RNG[1]), np.zeros_like(group)]
    k0, k1 = np.uint64(RNG[0]), np.uint64(0)
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ k0,
            second & mask,
            (first >> np.uint64(32)) ^ c[3] ^ k1,
            first & mask,
        ]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    words = np.stack(c, axis=1).reshape(-1)[:count].reshape(shape)
    return np.where(words >= int(spec.dropout * 2**32), float(np.float32(1 / (1 - spec.dropout))), 0.0)


def relative_slack(dtype: str, terms: int, score_size: float) -> float:
    """How far a sum of products of weights may be off, relative to its absolute terms: the scores' float32
    error enters exp four times (weights and their normaliser, forward and backward), sums lose u a term;
    16-bit o enters backward rounded."""
    unit = 2.0**-24
    return (
        4 * (terms + 4) * unit * score_size
        + (terms + 16) * unit
        + (epsilon(dtype) if dtype != "float32" else 0.0)
    )


def data(spec: AttentionSpec, dtype: str, columns: int = COLUMNS) -> tuple[dict[str, Any], Any]:
    """q, k, v of 4 dimensions and the cotangent of o, the same numbers for every layout."""
    random = np.random.default_rng(5)
    kind = formats.dtype(dtype).numpy
    first = {"sbhd": lambda n: (n, BATCH), "bshd": lambda n: (BATCH, n)}[spec.qkv_format]
    q = random.standard_normal((*first(ROWS), spec.num_heads, spec.head_dim)).astype(kind)
    k, v = (
        random.standard_normal((*first(columns), spec.num_gqa_groups, spec.head_dim)).astype(kind)
        for _ in "kv"
    )
    return {"q": q, "k": k, "v": v}, random.standard_normal(q.shape).astype(kind)


def packed(spec: AttentionSpec, parts: dict[str, Any]) -> dict[str, Any]:
    """The inputs of the spec's layout."""
    if spec.interleaved:
        return {"qkv": np.stack([parts[part] for part in "qkv"], axis=3).reshape(*parts["q"].shape[:2], -1)}
    flat = {name: part.reshape(*part.shape[:2], -1) for name, part in parts.items()}
    return {
        name: np.concatenate([flat[part] for part in names], axis=2)
        for name, names in LAYOUTS[spec.layout].items()
    }


def unpacked(spec: AttentionSpec, found: dict[str, Any]) -> dict[str, Any]:
    """The gradients of q, k and v, 4-dimensional, out of those of the inputs."""
    if spec.interleaved:
        whole = found["qkv"].reshape(*found["qkv"].shape[:2], spec.num_heads, 3, spec.head_dim)
        return {part: whole[..., i, :] for i, part in enumerate("qkv")}
    parts = {}
    for name, names in LAYOUTS[spec.layout].items():
        edges = np.cumsum([spec.width(part) for part in names])[:-1]
        for part, piece in zip(names, np.split(found[name], edges, axis=2), strict=True):
            parts[part] = piece.reshape(*piece.shape[:2], spec.heads(part), spec.head_dim)
    return parts


def run(spec: AttentionSpec, inputs: dict[str, Any], do: Any, needs: frozenset[str]) -> dict[str, Any]:
    """Forward and backward as a frontend does it, with every buffer poisoned beforehand."""
    if spec.padded:
        inputs = inputs | {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV}
    if spec.dropout:
        inputs = inputs | {"rng": RNG}
    views = {name: put(x, arrays.CPU) for name, x in inputs.items()}
    plan = attention.plan(
        spec, {n: Meta(x.shape, x.dtype) for n, x in views.items()}, needs, dispatch.kernels(arrays.CPU)
    )

    def buffers(metas: dict[str, Meta]) -> dict[str, Any]:
        return {name: poisoned(meta.shape, meta.dtype, arrays.CPU) for name, meta in metas.items()}

    outputs, saved = buffers(plan.signature.outputs), buffers(plan.signature.saved)
    attention.forward(plan, WorkingSet(plan.kernels, views, outputs, saved, buffers(plan.scratch), 0))
    found = {name: get(view) for name, view in (outputs | saved).items()}
    if plan.signature.grads:
        kept = {name: (views | outputs)[name] for name in plan.signature.kept}
        grads = buffers(plan.signature.grads)
        cotangent = put(do.reshape(outputs["o"].shape), arrays.CPU)
        ws = WorkingSet(plan.kernels, kept, grads, saved, buffers(plan.backward_scratch), 0)
        attention.backward(plan, ws, {"o": cotangent})
        found |= {name: get(view) for name, view in grads.items()}
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    spec, dtype = CASES[name], name if name in formats.DTYPES else "float32"
    parts, do = data(spec, dtype, ROWS if spec.layout.startswith("qkv") else COLUMNS)
    keep = keep_factors(spec, (BATCH, spec.num_heads, ROWS, parts["k"].shape[spec.qkv_format.index("s")]))
    truth = attention_oracle(
        spec, parts["q"], parts["k"], parts["v"], do, keep, (CU_Q, CU_KV) if spec.padded else None
    )
    found = run(spec, packed(spec, parts), do, frozenset(LAYOUTS[spec.layout]))
    score_size = truth["lse"][1]
    slack = relative_slack(dtype, ROWS + COLUMNS, score_size)
    assert_close(
        "lse",
        found["lse"],
        truth["lse"][0],
        "float32",
        slack=(spec.head_dim + COLUMNS) * 2.0**-24 * (1 + score_size),
    )
    value, size = truth["o"]
    assert_close("o", found["o"].reshape(value.shape), value, dtype, slack * size)
    for part, got in unpacked(spec, found).items():
        assert_close(f"d{part}", got, truth[f"d{part}"][0], dtype, slack * truth[f"d{part}"][1])


@pytest.mark.parametrize("layout", ["q_kv", "qkv"])
def test_packed_inputs_give_the_bits_of_separate_ones(layout: str) -> None:
    spec = dataclasses.replace(PLAIN, layout=layout, mask="causal", dropout=0.25)
    apart = dataclasses.replace(spec, layout="separate")
    parts, do = data(spec, "float32", ROWS)
    one = run(spec, packed(spec, parts), do, frozenset(LAYOUTS[layout]))
    other = run(apart, parts, do, frozenset("qkv"))  # here with the heads as a dimension
    assert_same_bits("o", one["o"], other["o"])
    for part, got in unpacked(spec, one).items():
        assert_same_bits(f"d{part}", got, other[part])


def test_only_wanted_gradients_and_none_without_needs() -> None:
    parts, do = data(PLAIN, "float32")
    whole = run(PLAIN, parts, do, frozenset("qkv"))
    some = run(PLAIN, parts, do, frozenset("k"))
    nothing = run(PLAIN, parts, do, frozenset())
    assert set(some) == {"o", "lse", "k"}
    assert set(nothing) == {"o"}
    assert_same_bits("dk", some["k"], whole["k"])
    assert_same_bits("o", nothing["o"], whole["o"])


def meta(*shape: int, dtype: str = "float32") -> Meta:
    return Meta(shape, formats.dtype(dtype))


GOOD = {"q": meta(13, 3, 32), "k": meta(17, 3, 16), "v": meta(17, 3, 2, 8)}
PADDED = GOOD | {"cu_seqlens_q": meta(4, dtype="int32"), "cu_seqlens_kv": meta(4, dtype="int32")}
WRONG = {
    "heads": ({"num_heads": 0}, {}, ShapeError, "num_heads"),
    "groups": ({"num_gqa_groups": 3}, {}, ShapeError, "num_gqa_groups: got 3, expected a divisor of 4"),
    "head_dim": ({"head_dim": -1}, {}, ShapeError, "head_dim"),
    "format": (
        {"qkv_format": "bhsd"},
        {},
        ShapeError,
        "qkv_format: got 'bhsd', expected one of sbhd, bshd, thd",
    ),
    "mask": ({"mask": "casual"}, {}, ShapeError, "mask: got 'casual'"),
    "layout": ({"layout": "kvq"}, {}, ShapeError, "layout"),
    "interleaved_groups": (
        {"layout": "qkv_interleaved"},
        {},
        ShapeError,
        "layout: got 'qkv_interleaved', expected one with",
    ),
    "scale": ({"softmax_scale": float("nan")}, {}, ShapeError, "softmax_scale"),
    "dropout": ({"dropout": 1.0}, {}, ShapeError, "dropout: got 1.0"),
    "absent": ({}, {"v": None}, ShapeError, "v: missing"),
    "width": (
        {},
        {"q": meta(13, 3, 31)},
        ShapeError,
        r"q: got shape \(13, 3, 31\), expected \(sequence, batch, 32\) or",
    ),
    "flat": ({}, {"q": meta(13, 96)}, ShapeError, "q: got shape"),
    "no_features": ({}, {"q": meta(13, 3, 0)}, ShapeError, r"q: got shape \(13, 3, 0\)"),
    "no_sequence": (
        {"mask": "padding", "qkv_format": "thd", "max_seqlen_q": 3, "max_seqlen_kv": 3},
        {"q": meta(13, 32), "k": meta(17, 16), "v": meta(17, 16), "cu_seqlens_q": meta(1, dtype="int32")},
        ShapeError,
        "cu_seqlens_q: got",
    ),
    "lengths": ({}, {"v": meta(16, 3, 16)}, ShapeError, "v: got shape"),
    "batches": ({}, {"q": meta(13, 2, 32)}, ShapeError, "one batch size"),
    "dtype": ({}, {"q": meta(13, 3, 32, dtype="float64")}, FormatError, "q: got float64"),
    "mixed": ({}, {"k": meta(17, 3, 16, dtype="bfloat16")}, FormatError, "k: got bfloat16"),
    "no_lengths": ({"mask": "padding"}, {}, ShapeError, "cu_seqlens_q: missing, expected int32 "),
    "lengths_unheard": ({}, {"cu_seqlens_q": meta(4, dtype="int32")}, ShapeError, "cu_seqlens_q"),
    "lengths_int64": (
        {"mask": "padding"},
        PADDED | {"cu_seqlens_kv": meta(4, dtype="int64")},
        FormatError,
        "cu_seqlens_kv",
    ),
    "lengths_short": (
        {"mask": "padding"},
        PADDED | {"cu_seqlens_kv": meta(3, dtype="int32")},
        ShapeError,
        "cu_seqlens_kv",
    ),
    "no_rng": ({"dropout": 0.1}, {}, ShapeError, "rng: missing"),
    "rng": ({"dropout": 0.1}, {"rng": meta(2, dtype="int32")}, FormatError, "rng"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_infer(name: str) -> None:
    changes, inputs, kind, text = WRONG[name]
    with pytest.raises(kind, match=f"attention: {text}" if ":" in text else text):
        attention.infer(dataclasses.replace(PLAIN, **changes), GOOD | inputs, frozenset("qkv"))


def test_infer_says_what_forward_fills_and_backward_needs() -> None:
    spec = dataclasses.replace(PLAIN, mask="padding", dropout=0.1)
    signature = attention.infer(spec, PADDED | {"rng": meta(2, dtype="int64")}, frozenset("qv"))
    assert signature.outputs == {"o": meta(13, 3, 32)}
    assert signature.saved == {"lse": meta(3, 4, 13)}
    assert signature.kept == ("q", "k", "v", "o", "cu_seqlens_q", "cu_seqlens_kv", "rng")
    assert signature.grads == {"q": meta(13, 3, 32), "v": meta(17, 3, 2, 8)}
