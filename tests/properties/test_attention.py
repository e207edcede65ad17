"""Attention, with and without a KV cache, against NumPy's float64, for any shape."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import nn
from fp8kit.errors import Fp8kitError
from fp8kit.testing import assert_close
from tests.support.draws import attempt, examples, host, seeds, values

F32 = np.dtype(np.float32)


@examples(60)
@given(
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 3, 17]),
    st.sampled_from([1, 2, 9]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(["no_mask", "causal", "causal_bottom_right"]),
    st.sampled_from(["sbhd", "bshd"]),
    seeds,
)
def test_attention(batch, rows, columns, heads, dim, mask, form, seed):
    shape = lambda n: (n, batch, heads, dim)  # noqa: E731
    q, k, v = (values(shape(n), F32, seed + i) / 4 for i, n in enumerate((rows, columns, columns)))
    reordered = [x if form == "sbhd" else x.swapaxes(0, 1) for x in (q, k, v)]
    layer = nn.DotProductAttention(heads, dim, qkv_format=form, attn_mask_type=mask, device="cpu")
    o = attempt(lambda: layer(*reordered))
    assert not isinstance(o, Fp8kitError), o
    scores = np.einsum("sbhd,tbhd->bhst", q.astype(float), k.astype(float)) / np.sqrt(dim)
    shift = columns - rows if mask == "causal_bottom_right" else 0
    hidden = (
        (np.arange(columns) > np.arange(rows)[:, None] + shift)
        if mask != "no_mask"
        else np.zeros((rows, columns), bool)
    )
    top = np.where(hidden, -np.inf, scores).max(-1, keepdims=True, initial=-1e30)
    weights = np.where(hidden, 0.0, np.exp(np.where(hidden, 0.0, scores - top)))
    total = weights.sum(-1, keepdims=True)
    want = np.einsum(
        "bhst,tbhd->sbhd",
        np.divide(weights, total, out=np.zeros_like(weights), where=total > 0),
        v.astype(float),
    )
    got = host(o).astype(np.float64) if form == "sbhd" else host(o).astype(np.float64).swapaxes(0, 1)
    spread = (dim + columns + 24) * 2.0**-23 * (1 + np.abs(scores).max()) * (np.abs(v).max() + 1)
    assert_close("o", got.reshape(want.shape), want, "float32", spread)


CACHES = [{}, {"is_paged": True, "page_size": 3, "total_num_pages": 9}]
STEPS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1, max_size=3),
    min_size=1,
    max_size=5,
)


@examples(40)
@given(STEPS, st.sampled_from(["sbhd", "bshd", "thd"]), st.sampled_from(CACHES), seeds)
def test_inference_params(steps, form, form_of_cache, seed):
    """Whatever sequences join, go on, finish and come back: each new token attends over its own sequence up
    to itself, or the step does not fit, and nothing has changed."""
    heads, dim, most = 2, 4, 9
    params = nn.InferenceParams(3, most, qkv_format=form, device="cpu", **form_of_cache)
    layer = nn.DotProductAttention(heads, dim, qkv_format=form, layer_number=1, device="cpu")
    rng, told = np.random.default_rng(seed), {}  # sequence -> q, k, v of all its tokens
    for step in steps:
        grown = {name: len(told[name][0]) + new if name in told else new for name, new in step.items()}
        pages = sum(-(-length // params.page_size) for length in grown.values())
        before = dict(params.sequences)
        lengths = attempt(lambda step=step: params.pre_step(step))
        assert isinstance(lengths, Fp8kitError) == (
            max(grown.values()) > most or pages > params.total_num_pages
        )
        if isinstance(lengths, Fp8kitError):
            assert params.sequences == before
            continue
        assert lengths == grown
        fresh = {
            name: [rng.standard_normal((new, heads, dim)).astype(np.float32) for _ in range(3)]
            for name, new in step.items()
        }
        told = {
            name: [
                np.concatenate([*([told[name][i]] if name in told else []), part])
                for i, part in enumerate(parts)
            ]
            for name, parts in fresh.items()
        }
        longest = max(step.values())

        def laid(i, fresh=fresh, longest=longest):
            parts = [part[i] for part in fresh.values()]
            if form == "thd":
                return np.concatenate(parts)
            whole = np.stack(
                [
                    np.concatenate([part, np.full((longest - len(part), heads, dim), np.nan, np.float32)])
                    for part in parts
                ]
            )
            return whole if form == "bshd" else whole.swapaxes(0, 1)

        with fk.no_grad():
            o = host(layer(*(laid(i) for i in range(3)), inference_params=params)).astype(float)
        ends = np.cumsum(list(step.values()))
        rows = (
            np.split(o, ends[:-1])
            if form == "thd"
            else [
                r[:new]
                for r, new in zip(o if form == "bshd" else o.swapaxes(0, 1), step.values(), strict=True)
            ]
        )
        for name, got in zip(step, rows, strict=True):
            q, k, v = (part.astype(float) for part in told[name])
            scores = np.einsum("shd,thd->hst", q, k) / np.sqrt(dim)
            weights = np.tril(np.exp(scores))
            want = np.einsum("hst,thd->shd", weights / weights.sum(-1, keepdims=True), v)[-step[name] :]
            spread = (dim + most + 24) * 2.0**-23 * (1 + np.abs(scores).max()) * (np.abs(v).max() + 1)
            assert_close(name, got.reshape(want.shape), want, "float32", spread)
        again = attempt(lambda: layer(*(laid(i) for i in range(3)), inference_params=params))
        assert isinstance(again, Fp8kitError)  # a layer takes a step once
