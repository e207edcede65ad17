"""Attention over keys and values in a cache of pages: its padded batches against float64, as
``contract.attention`` has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from fp8kit.formats import float32, int32
from fp8kit.testing.contract import Arguments, Array, KernelTest, Options, Results, Sampler, typed
from fp8kit.testing.contract import attention as padded
from fp8kit.testing.contract.running_sums import FAR, GOOD, LENGTH, bad_cases

Lengths = tuple[int, ...]


def paged_attention_fwd(
    s: Sampler,
    m: int,
    n: int,
    lengths_q: Lengths = (),
    lengths_kv: Lengths = (),
    size: int = 16,
    longest: int = 0,
    room: int = 0,
    holes: bool = False,
    sums_q: Lengths = (),
    sums_kv: Lengths = (),
    **options: Any,
) -> Arguments:
    """Sequences of ``lengths_kv``, the last ``lengths_q`` of which are new, in pages of ``size`` in no order,
    NaN in what they leave of their last ones; table entries behind those name no page. ``longest``:
    positions that are read (0: those of the longest sequence), and ``room`` for more in the table. ``holes``:
    the first page of each sequence is one that there is not. By default one new token of each of four
    sequences of ``m`` tokens, and heads of 64."""
    lengths_q = lengths_q or (1,) * 4
    lengths_kv = lengths_kv or (max(1, m),) * len(lengths_q)
    columns = longest or max(lengths_kv)
    usual = {"s_q": max(lengths_q), "s_kv": columns, "d": 64, "h": max(1, n // 64)}
    own = {"h_kv": options.get("h", usual["h"])} | options
    known = {"b": len(lengths_q), "lengths_q": lengths_q, "lengths_kv": lengths_kv, "padded": True}
    z, rules = padded.problem(0, n, {**usual, **own, **known})
    used = [-(-max(length, 0) // size) for length in lengths_kv]
    count = sum(used) + 1
    free, table = (
        s.random.permutation(count),
        np.full((z.b, -(-max(columns, *lengths_kv) // size) + room), FAR),
    )
    for row, pages in zip(table, used, strict=True):
        row[:pages], free = free[:pages], free[pages:]
    if holes:
        table[:, 0] = -1
    shape = (z.b, z.s_q, z.h) if rules.qkv_format == "bshd" else (z.s_q, z.b, z.h)
    return {
        "q": s.normal(*shape, z.d),
        "k_cache": _cache(s, (count, size, z.h_kv, z.d), table, lengths_kv),
        "v_cache": _cache(s, (count, size, z.h_kv, z.depth_v), table, lengths_kv),
        "o": s.output(*shape, z.depth_v),
        "lse": s.output(z.b, z.h, z.s_q, dtype=float32),
        "pages": s.put(table, int32),
        "longest": columns,
        "extras": padded.extras(s, z, rules, (sums_q, sums_kv)),
        "spec": rules,
    }


def _cache(s: Sampler, shape: tuple[int, ...], table: Array, lengths: Lengths) -> Any:
    """Keys or values of the sequences, NaN where no sequence has any."""
    values, size = s.draw(shape), shape[1]
    cache = np.full(shape, np.nan, np.float32)
    for row, length in zip(table, lengths, strict=True):
        for p in range(length):
            if 0 <= row[p // size] < len(cache):
                at = row[p // size], p % size
                cache[at] = values[at]
    return s.put(cache.astype(s.dtype.numpy))


def _dense(a: Any, cache: Array) -> Array:
    """The padded batches, in the order of q's dimensions."""
    dense = np.zeros((len(a.pages), a.longest, *cache.shape[2:]), cache.dtype)
    for b, length in enumerate(np.diff(a.extras.cu_seqlens_kv)):
        for p in range(min(int(length), a.longest)):
            page = a.pages[b, p // cache.shape[1]]
            if 0 <= page < len(cache):
                dense[b, p] = cache[page, p % cache.shape[1]]
    return dense if a.spec.qkv_format == "bshd" else dense.swapaxes(0, 1)


def paged_attention_fwd_oracle(a: Any) -> Results:
    """Returns the results of the padded batches."""
    dense = {"k": _dense(a, a.k_cache), "v": _dense(a, a.v_cache)}
    return padded.attention_fwd_oracle(SimpleNamespace(**vars(a), **dense))


_CAUSAL: Options = {"window": (-1, 0), "bottom_right": True}
_STEP: Options = {"lengths_q": (1, 1, 1), "lengths_kv": (33, 1, 70), "h": 2, "d": 16, **_CAUSAL}
_PROMPT: Options = {"lengths_q": (5, 20, 33), "lengths_kv": (9, 20, 130), "h": 2, "d": 16, **_CAUSAL}
_BSHD: Options = {"qkv_format": "bshd"}
# in every high-precision dtype
_FORMS: dict[str, Options] = {
    "step": _STEP,
    "step-bshd": {**_STEP, **_BSHD, "size": 64},
    "prompt": _PROMPT,
    "prompt-bshd": {**_PROMPT, **_BSHD},
    "pages-of-one": {**_STEP, "size": 1},
    "pages-of-seven": {**_PROMPT, "size": 7, **_BSHD},
    "pages-of-a-sequence": {**_PROMPT, "size": 150},
    "groups": {**_STEP, "h": 6, "h_kv": 2, "d": 64, "size": 5},
    "heads-of-128": {**_STEP, "h": 4, "h_kv": 1, "d": 128, "d_v": 128},
    "heads-of-192": {**_STEP, "d": 192, "d_v": 128, "size": 9},
    "heads-of-256": {**_STEP, "d": 256, "size": 32, **_BSHD},
    "empty": {**_STEP, "lengths_q": (0, 1, 0), "lengths_kv": (20, 17, 0)},
    "nothing": {**_STEP, "lengths_q": (0, 0, 0), "lengths_kv": (0, 0, 3), "s_q": 2},
    "more-is-read": {**_STEP, "longest": 128, "room": 3},
    "holes": {**_STEP, "holes": True},
    "window": {**_PROMPT, "window": (12, 0)},
    "no-mask": {**_PROMPT, "window": (-1, -1), "bottom_right": False},
    "alibi": {**_PROMPT, "bias": "alibi"},
    "off-by-one": {**_STEP, "softmax_type": "off-by-one"},
    "learnable": {**_PROMPT, "softmax_type": "learnable", "size": 11},
    "odd-heads": {**_STEP, "d": 10},
    "cap": {**_STEP, "d": 64, "softcap": 1.5},
    "cap-alibi-learnable": {**_PROMPT, "bias": "alibi", "softmax_type": "learnable", "softcap": 1.5},
    "dropout": {**_PROMPT, "dropout": 0.25},
    "many-new": {"lengths_q": (150, 140), "lengths_kv": (150, 300), "h": 1, "d": 32, **_CAUSAL},
}
_LENGTHS = tuple(int(n) for n in np.diff(GOOD))
_BAD = bad_cases(
    {"lengths_q": _LENGTHS, "lengths_kv": _LENGTHS, "size": 4, "s_q": LENGTH, "h": 2, "d": 8, **_CAUSAL},
    {"sums_q": ("sums_q",), "sums_kv": ("sums_kv",), "both": ("sums_q", "sums_kv")},
    "lost",
)

TESTS = (
    KernelTest(
        "paged_attention_fwd",
        paged_attention_fwd,
        paged_attention_fwd_oracle,
        {**typed(_FORMS), **_BAD},
        {**_CAUSAL, "softmax_scale": 0.125},
    ),
)
