"""Attention over sequences that lie one after the other: its padded batches against float64, as
``contract.attention`` has them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from fp8kit.backends.protocol import SPECS, Lying
from fp8kit.formats import float32
from fp8kit.testing.contract import Arguments, Array, KernelTest, Options, Results, Sampler, snapshot, typed
from fp8kit.testing.contract import attention as padded
from fp8kit.testing.contract.running_sums import BATCH, GOOD, LENGTH, bad_cases, running

Sums = tuple[int, ...]


def packed_attention_fwd(
    s: Sampler,
    m: int,
    n: int,
    lengths_q: Sums = (),
    lengths_kv: Sums = (),
    gaps: Sums = (),
    rest: int = 0,
    sums_q: Sums = (),
    starts_q: Sums = (),
    sums_kv: Sums = (),
    starts_kv: Sums = (),
    **options: Any,
) -> Arguments:
    """``gaps``: tokens of no sequence behind each; ``rest``: behind all. ``sums_q`` and so on: running sums
    in the place of those of lengths and starts. By default four sequences of a quarter of ``m`` tokens each,
    and heads of 64. "do" is for backward."""
    lengths_q = lengths_q or (max(1, m // 4),) * 4
    lengths_kv = lengths_kv or lengths_q
    usual = {"s_q": max(lengths_q), "s_kv": max(lengths_kv), "d": 64, "h": max(1, n // 64)}
    own = {"h_kv": options.get("h", usual["h"])} | options
    z, rules = padded.problem(
        0,
        n,
        {**usual, **own, "b": len(lengths_q), "lengths_q": lengths_q, "lengths_kv": lengths_kv}
        | {"padded": True, "qkv_format": "bshd"},
    )
    extras = padded.extras(s, z, rules, (sums_q, sums_kv))

    def starts(lengths: Sums, same: Any, given: Sums) -> tuple[Any, int]:
        """Where sequences start, the array of their lengths where nothing lies between them, and tokens."""
        apart = running(np.add(lengths, gaps or 0))
        return s.sums(*(given or apart)) if given or gaps else same, apart[-1] + rest

    first_q, t_q = starts(lengths_q, extras.cu_seqlens_q, starts_q)
    first_kv, t_kv = starts(lengths_kv, extras.cu_seqlens_kv, starts_kv)
    return {
        "q": s.normal(t_q, z.h, z.d),
        "k": s.normal(t_kv, z.h_kv, z.d),
        "v": s.normal(t_kv, z.h_kv, z.depth_v),
        "o": s.output(t_q, z.h, z.depth_v),
        "lse": s.output(z.b, z.h, z.s_q, dtype=float32),
        "lying": Lying(first_q, first_kv, z.s_q, z.s_kv),
        "extras": extras,
        "do": s.normal(t_q, z.h, z.depth_v),
        "spec": rules,
    }


def _places(a: Any, name: str) -> Iterator[tuple[int, int, int]]:
    """(sequence, where it starts, where it ends) of the tokens of q, k, v, o or a gradient; of invalid
    running sums the part within the array."""
    side = "kv" if name in ("k", "v", "dk", "dv") else "q"
    lengths, starts = getattr(a.extras, f"cu_seqlens_{side}"), getattr(a.lying, f"starts_{side}")
    tokens, longest = getattr(a, name).shape[0], getattr(a.lying, f"longest_{side}")
    for b, length in enumerate(np.diff(lengths.astype(np.int64))):
        start = int(np.clip(starts[b], 0, tokens))
        yield b, start, start + int(np.clip(length, 0, min(longest, tokens - start)))


def _dense(a: Any) -> Any:
    """The call's arguments as ``attention_fwd`` and ``attention_bwd`` have them."""
    found = vars(a) | {}
    for name in {"q", "k", "v", "o", "do"} & found.keys():
        longest = a.lying.longest_kv if name in ("k", "v") else a.lying.longest_q
        x = getattr(a, name)
        found[name] = np.zeros((a.lse.shape[0], longest, *x.shape[1:]), x.dtype)
        for b, start, end in _places(a, name):
            found[name][b, : end - start] = x[start:end]
    return SimpleNamespace(**found)


def _packed(a: Any, name: str, x: Array) -> Array:
    """Padded batches (b, s, h, d) as the tokens of an output."""
    found = np.zeros((getattr(a, name).shape[0], *x.shape[2:]), x.dtype)
    for b, start, end in _places(a, name):
        found[start:end] = x[b, : end - start]
    return found


def packed_attention_fwd_oracle(a: Any) -> Results:
    """Returns the results of the padded batches."""
    value, slack = padded.attention_fwd_oracle(dense := _dense(a))["o"]
    lse = padded.attention_fwd_oracle(dense)["lse"]
    return {"o": (_packed(a, "o", value), _packed(a, "o", slack)), "lse": lse}


def packed_attention_bwd(s: Sampler, m: int, n: int, forward: bool = False, **options: Any) -> Arguments:
    """o and lse are the oracle's, rounded, or with ``forward`` those of the kernel."""
    made, spec = packed_attention_fwd(s, m, n, **options), SPECS["packed_attention_fwd"]
    if forward:
        padded.run(s, spec, made)
    else:
        a = snapshot(made, s.device)
        exact = padded.oracle(_dense(a), False)
        o = _packed(a, "o", padded.placed(exact.o_given, a.spec))
        made |= {"o": s.put(o), "lse": s.put(exact.lse_given)}
    return {**made, **padded.gradients(s, made), "deterministic": True}


def packed_attention_bwd_oracle(a: Any) -> Results:
    """Returns the results of the padded batches."""
    found = padded.attention_bwd_oracle(_dense(a))
    for name in ("dq", "dk", "dv"):
        value, slack = found[name]
        found[name] = _packed(a, name, value), _packed(a, name, slack)
    return found


_CAUSAL: Options = {"window": (-1, 0)}
_SELF: Options = {"lengths_q": (5, 20, 33), "h": 2, "d": 16}
_CROSS: Options = {**_SELF, "lengths_kv": (9, 1, 40)}
_APART: Options = {"gaps": (3, 0, 70), "rest": 5}
_LONG: Options = {"lengths_q": (150, 300, 64), "h": 1, "d": 32}
# in every high-precision dtype
_FORMS: dict[str, Options] = {
    "plain": _SELF,
    "causal": {**_SELF, **_CAUSAL},
    "causal-gaps": {**_SELF, **_APART, **_CAUSAL},
    "cross-gaps": {**_CROSS, **_APART},
    "cap-gaps": {**_SELF, **_APART, **_CAUSAL, "softcap": 1.5},
    "cross-bottom-right": {**_CROSS, **_CAUSAL, "bottom_right": True},
    "empty": {**_SELF, "lengths_q": (0, 7, 0, 20, 0), "lengths_kv": (3, 7, 0, 0, 2), **_CAUSAL},
    "longest-is-longer": {**_SELF, "s_q": 200, "s_kv": 130, **_APART},
    "groups": {**_SELF, "h": 6, "h_kv": 2, "d": 8, "d_v": 24, **_CAUSAL},
    "long": {**_LONG, **_CAUSAL},
    "long-window": {**_LONG, **_APART, "window": (20, 0)},
    "window-both": {**_CROSS, "window": (3, 4), "bottom_right": True},
    "alibi": {**_SELF, **_APART, "bias": "alibi", **_CAUSAL},
    "off-by-one": {**_SELF, "softmax_type": "off-by-one", **_CAUSAL},
    "learnable": {**_SELF, "h": 3, **_APART, "softmax_type": "learnable"},
    "parts": {**_SELF, "parts": {"q": (1, 0, 4), "k": (1, 2, 2), "v": (1, 4, 0)}, **_CAUSAL},
    "one-token": {"lengths_q": (1,), "h": 1, "d": 8},
    "deep": {**_SELF, "d": 192, "d_v": 128},
}
_FLOAT32: dict[str, Options] = {
    "dropout": {**_SELF, **_APART, "dropout": 0.25},
    "post-bias": {**_CROSS, "over": (1, 2, 33), "bias": "post_scale_bias", **_APART},
}
_CASES = {**typed(_FORMS), **typed(_FLOAT32, (float32,))}
_BACKWARD = padded.backward_of(_CASES)
_LENGTHS = tuple(int(n) for n in np.diff(GOOD))
assert len(_LENGTHS) == BATCH
_SMALL: Options = {"lengths_q": _LENGTHS, "rest": 4, "s_q": LENGTH, "s_kv": LENGTH, "h": 2, "d": 8}
_BAD = bad_cases(
    {**_SMALL, **_CAUSAL, "bottom_right": True},
    {name: (name,) for name in ("sums_q", "starts_q", "sums_kv", "starts_kv")}
    | {"all": ("sums_q", "starts_q", "sums_kv", "starts_kv")},
    "lost",
)
_TIMED: Options = {**_CAUSAL, "softmax_scale": 0.125}

TESTS = (
    KernelTest(
        "packed_attention_fwd", packed_attention_fwd, packed_attention_fwd_oracle, {**_CASES, **_BAD}, _TIMED
    ),
    KernelTest(
        "packed_attention_bwd",
        packed_attention_bwd,
        packed_attention_bwd_oracle,
        {**_BACKWARD, **{name: {**own, "forward": True} for name, own in _BAD.items()}},
        {**_TIMED, "forward": True},
    ),
)
