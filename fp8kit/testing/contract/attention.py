"""The attention against float64; what the tolerances are made of stands in ``fp8kit.testing.attention``."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fp8kit import formats
from fp8kit.arrays import ArrayView, current_stream
from fp8kit.backends.protocol import SPECS, AttentionExtras
from fp8kit.formats import float32, int32
from fp8kit.testing.attention import Oracle, Rules, Sizes
from fp8kit.testing.compare import Array
from fp8kit.testing.contract import Arguments, KernelTest, Options, Results, snapshot, typed
from fp8kit.testing.contract.dropout import factors_of
from fp8kit.testing.contract.running_sums import BATCH, GOOD, LENGTH, bad_cases, running
from fp8kit.testing.contract.sampler import Sampler

EVEN, NO_MASK = Sizes(), Rules()
PLACE = (2**20, 5, 11)  # from element 2^32 on already for some 400 scores
_ORDERS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}  # of dimensions, to (b, h, s, d)


def _place(x: Array, rules: Any) -> Array:
    """(b, h, s, d) values in the rules' order of dimensions."""
    return x.transpose([int(i) for i in np.argsort(_ORDERS[rules.qkv_format])])


def _extras(s: Sampler, z: Sizes, rules: Rules, sums: Any) -> AttentionExtras:
    """What comes beside q, k and v; ``sums``: running sums in the place of those of the lengths."""
    over = (*z.over, z.s_kv)
    slopes = None
    if rules.bias == "alibi":  # of one batch or of each
        count = z.h * z.over[0]
        slopes = s.put(2.0 ** -np.arange(1, count + 1).reshape((z.b, z.h) if count > z.h else count), float32)
    cu_q, cu_kv = (
        s.sums(*(own or running(lengths))) if rules.padded else None
        for own, lengths in zip(sums, (z.lengths_q, z.lengths_kv), strict=True)
    )
    return AttentionExtras(
        cu_q,
        cu_kv,
        s.rng() if rules.dropout else None,
        s.put(s.random.random(over) < 0.3) if rules.masked else None,
        s.normal(*over) if rules.bias.endswith("scale_bias") else None,
        slopes,
        s.normal(z.h, dtype=float32) if rules.softmax_type == "learnable" else None,
        s.put(PLACE, int32) if rules.placed else None,
    )


def _sizes(m: int, n: int) -> Sizes:
    """Heads of 64 over sequences of at most 1024."""
    length, heads = min(1024, m), max(1, n // 64)
    return Sizes(max(1, m // max(length, 1)), length, length, heads, heads, 64)


def attention_fwd(
    s: Sampler,
    m: int = 0,
    n: int = 0,
    sizes: Sizes | None = None,
    rules: Rules = NO_MASK,
    padding: float | None = None,
    sums_q: tuple[int, ...] = (),
    sums_kv: tuple[int, ...] = (),
) -> Arguments:
    """``padding``: what lies there. ``sums_q``, ``sums_kv``: running sums in the place of the lengths'."""
    z = sizes or _sizes(m, n)

    def part(heads: int, length: int, depth: int, true: tuple[int, ...]) -> ArrayView:
        x = s.draw((z.b, heads, length, depth)).astype(s.dtype.numpy)
        for batch, count in enumerate(true if padding is not None else ()):
            x[batch, :, count:] = padding
        return s.put(_place(x, rules))

    q = part(z.h, z.s_q, z.d, z.lengths_q)
    v = part(z.h_kv, z.s_kv, z.depth_v, z.lengths_kv)
    return {
        "q": q,
        "k": part(z.h_kv, z.s_kv, z.d, z.lengths_kv),
        "v": v,
        "o": s.output(*q.shape[:3], z.depth_v),
        "lse": s.output(z.b, z.h, z.s_q, dtype=float32),
        "extras": _extras(s, z, rules, (sums_q, sums_kv)),
        "spec": rules,
    }


def _oracle(a: Any) -> Oracle:
    """Of a call's arguments: padding counts as 0."""
    spec, extras, order = a.spec, a.extras, _ORDERS[a.spec.qkv_format]
    true_q, true_kv = (
        () if cu is None else tuple(int(n) for n in np.diff(cu))
        for cu in (extras.cu_seqlens_q, extras.cu_seqlens_kv)
    )

    def clean(x: Array, true: tuple[int, ...]) -> Array:
        x = x.transpose(order).copy()
        for batch, count in enumerate(true):
            x[batch, :, max(count, 0) :] = 0
        return x

    q, k, v = clean(a.q, true_q), clean(a.k, true_kv), clean(a.v, true_kv)
    backward = hasattr(a, "do")
    do = clean(a.do, true_q) if backward else np.ones((*q.shape[:3], v.shape[3]))
    (b, h, s_q, d), (_, h_kv, s_kv, d_v) = q.shape, v.shape
    z = Sizes(b, s_q, s_kv, h, h_kv, d, true_q, true_kv, d_v)
    keep = None
    if spec.dropout:
        first, head, heads = (0, 0, h) if extras.dropout_place is None else map(int, extras.dropout_place)
        batch, own, i, j = np.ogrid[:b, :h, :s_q, :s_kv]
        element = (((first + batch) * heads + head + own) * s_q + i) * s_kv + j
        keep = factors_of(extras.rng, spec.dropout, element)
    return Oracle(
        formats.dtype(a.q.dtype),
        z,
        spec,
        a.device.kind == "cpu",
        q,
        k,
        v,
        do,
        extras.mask,
        extras.bias,
        extras.alibi_slopes,
        extras.softmax_offset,
        keep,
        clean(a.o, true_q) if backward else None,
    )


def attention_fwd_oracle(a: Any) -> Results:
    """See ``Oracle``."""
    found = _oracle(a)
    return {
        "o": (_place(found.o, a.spec), _place(found.o_slack, a.spec)),
        "lse": (found.lse, found.lse_slack),
    }


def attention_bwd(
    s: Sampler, m: int = 0, n: int = 0, forward: bool = False, deterministic: bool = True, **options: Any
) -> Arguments:
    """o and lse are the oracle's, rounded, or with ``forward`` those of the kernel."""
    made = attention_fwd(s, m, n, **options)
    rules, spec = made["spec"], SPECS["attention_fwd"]
    padding, z = options.get("padding"), options.get("sizes") or _sizes(m, n)
    if forward:
        call = spec.complete(made, current_stream(s.device))
        call["workspace"] = s.workspace(spec.workspace_bytes(s.kernels, call))
        spec.call(s.kernels, call)
    else:
        exact = _oracle(snapshot(made, s.device))
        made |= {"o": s.put(_place(exact.o_given, rules)), "lse": s.put(exact.lse_given)}
    do = s.draw((z.b, z.h, z.s_q, z.depth_v)).astype(s.dtype.numpy)
    for batch, count in enumerate(z.lengths_q if padding is not None else ()):
        do[batch, :, count:] = padding
    bias, offset = made["extras"].bias, made["extras"].softmax_offset
    return {
        **made,
        "do": s.put(_place(do, rules)),
        **{f"d{name}": s.output(*made[name].shape) for name in "qkv"},
        "dbias": None if bias is None else s.output(*bias.shape),
        "doffset": None if offset is None else s.output(*offset.shape, dtype=float32),
        "deterministic": deterministic,
    }


def attention_bwd_oracle(a: Any) -> Results:
    """See ``Oracle``."""
    found = _oracle(a)
    return {
        name: (_place(grad, a.spec), _place(found.slacks[name], a.spec))
        if name[1:] in ("q", "k", "v")
        else (grad, found.slacks[name])
        for name, grad in found.grads.items()
    }


_SIZES = {field.name for field in dataclasses.fields(Sizes)}


def _case(sizes: Sizes = EVEN, packed: bool = False, **changes: Any) -> Options:
    """``changes`` of the sizes and of the rules. ``packed``: q, k and v lie next to each other along the
    heads (a layer's joint projection)."""
    own = {name: value for name, value in changes.items() if name in _SIZES}
    h = own.get("h", sizes.h)
    return {
        "sizes": dataclasses.replace(sizes, **own),
        "rules": Rules(**{name: value for name, value in changes.items() if name not in _SIZES}),
        "parts": {"q": (2, 0, 2 * h), "k": (2, h, h), "v": (2, 2 * h, 0)} if packed else {},
    }


_CAUSAL: Options = {"window": (-1, 0)}
_BOTTOM_RIGHT: Options = {**_CAUSAL, "bottom_right": True}
_BSHD: Options = {"qkv_format": "bshd"}
_PAD: Options = {"padded": True}
_PADDED = Sizes(3, 17, 33, 2, 2, 16, (17, 5, 1), (33, 9, 20))
_CAUSAL_PADDED = Sizes(3, 33, 33, 2, 2, 16, (33, 5, 20), (33, 5, 20))
_LONG_KEYS = Sizes(s_q=17, s_kv=33)
_LONG = Sizes(b=1, s_q=300, s_kv=300, h=1, h_kv=1, d=32)
# run forward and backward, in every high-precision dtype
_ALL = {
    **{
        f"{form}-{name}": {**own, "rules": dataclasses.replace(own["rules"], qkv_format=form)}
        for form in _ORDERS
        for name, own in {
            "no_mask": _case(),
            "causal": _case(**_CAUSAL),
            "padding": _case(_PADDED, **_PAD),
            "padding_causal": _case(_CAUSAL_PADDED, **_PAD, **_CAUSAL),
            "groups": _case(h=6, h_kv=2, s_q=19, s_kv=19, d=8, **_CAUSAL),
            "packed": _case(packed=True, h=3, h_kv=3, **_CAUSAL),
        }.items()
    },
    "cross": _case(s_q=9, s_kv=40, d=64),
    "one-query-one-head": _case(b=1, s_q=1, s_kv=21, h=1, h_kv=1),
    "long": _case(_LONG, **_CAUSAL),
    "bottom-right": _case(_LONG_KEYS, **_BOTTOM_RIGHT),
    "padding-bottom-right": _case(_PADDED, **_BSHD, **_PAD, **_BOTTOM_RIGHT),
    "padding-bottom-right-blind-rows": _case(
        _CAUSAL_PADDED, lengths_q=(33, 20, 7), lengths_kv=(9, 20, 30), **_PAD, **_BOTTOM_RIGHT
    ),
    "window-causal": _case(s_q=40, s_kv=40, window=(5, 0)),
    "window-both": _case(_LONG_KEYS, **_BSHD, window=(3, 4), bottom_right=True),
    "window-long": _case(_LONG, h=2, window=(20, 0)),
    "window-padding": _case(_PADDED, **_PAD, window=(4, 2), bottom_right=True),
    "mask": _case(_LONG_KEYS, masked=True),
    "mask-all": _case(_LONG_KEYS, **_BSHD, over=(2, 2, 17), masked=True, window=(9, 9), bottom_right=True),
    "pre-bias": _case(_LONG_KEYS, over=(1, 2, 17), bias="pre_scale_bias"),
    "post-bias": _case(_LONG_KEYS, **_BSHD, over=(2, 1, 17), bias="post_scale_bias"),
    "post-bias-causal-groups": _case(h=6, h_kv=2, over=(1, 6, 17), d=8, bias="post_scale_bias", **_CAUSAL),
    "post-bias-padding": _case(_PADDED, **_PAD, over=(1, 2, 17), bias="post_scale_bias"),
    "alibi": _case(_LONG_KEYS, bias="alibi", **_BOTTOM_RIGHT),
    "alibi-batches": _case(_PADDED, **_BSHD, **_PAD, over=(3, 1, 1), bias="alibi", bottom_right=True),
    "off-by-one": _case(softmax_type="off-by-one", **_CAUSAL),
    "learnable": _case(_LONG_KEYS, **_BSHD, softmax_type="learnable"),
    "learnable-padding": _case(_PADDED, **_PAD, softmax_type="learnable", **_BOTTOM_RIGHT),
    "depth-of-v": _case(d=16, d_v=24, h=4, h_kv=2, **_CAUSAL),
    "placed": _case(s_kv=23, **_BSHD, dropout=0.25, placed=True),
    "placed-causal-groups": _case(h=6, h_kv=2, s_q=40, s_kv=40, **_CAUSAL, dropout=0.5, placed=True),
    "placed-padding": _case(_PADDED, **_BSHD, **_PAD, dropout=0.5, placed=True),
}
# only in float32: dropout (vendor libraries draw their own masks in 16 bits), odd depths and lengths, batches
# or rows that see nothing
_NO_KEYS = Sizes(2, 17, 33, 2, 2, 16, (17, 5), (33, 0))
_FLOAT32 = {
    "dropout": _case(s_kv=23, dropout=0.25),
    "dropout-causal-groups": _case(s_q=150, s_kv=150, h=4, b=1, **_CAUSAL, dropout=0.1),
    "dropout-padding": _case(_PADDED, **_BSHD, **_PAD, dropout=0.5),
    "dropout-window-bias": _case(s_q=150, s_kv=150, b=1, window=(30, 0), dropout=0.2, bias="post_scale_bias"),
    "dropout-learnable": _case(s_kv=23, dropout=0.25, softmax_type="learnable"),
    "odd-depth": _case(d=5, **_CAUSAL),
    "odd-depth-of-v": _case(d=16, d_v=3, **_CAUSAL),
    "nothing-to-see": _case(_NO_KEYS, **_PAD),
    "nothing-to-see-learnable": _case(_NO_KEYS, **_PAD, softmax_type="learnable"),
    "causal-long-queries": _case(s_q=33, s_kv=17, **_CAUSAL),
    "causal-long-keys": _case(_LONG_KEYS, **_CAUSAL),
    "bottom-right-long-queries": _case(s_q=33, s_kv=17, **_BOTTOM_RIGHT),
    "window-beyond-the-keys": _case(s_q=40, s_kv=17, window=(2, 0)),
    "window-of-one": _case(window=(0, 0)),
    "mask-of-everything": _case(
        Sizes(1, 2, 3, 1, 1, 8, over=(1, 1, 2)), masked=True, window=(0, -1), bottom_right=True
    ),
    "bias-of-one-row": _case(b=3, bias="pre_scale_bias"),
    "bias-of-everything": _case(h=4, over=(2, 4, 17), bias="post_scale_bias", **_CAUSAL),
    "everything": _case(
        _PADDED,
        h=4,
        over=(1, 4, 17),
        d_v=8,
        masked=True,
        bias="pre_scale_bias",
        softmax_type="learnable",
        window=(11, 3),
        bottom_right=True,
        dropout=0.3,
        **_BSHD,
        **_PAD,
    ),
}
# run with NaN and Inf in padding, and with 0 that the rules know of. Lengths of queries and keys equal and
# unequal, a batch without keys, packed inputs, depths that are and are not whole vectors
_CROSS: Options = {"d": 24, "d_v": 8, "h": 4}
_POISONED = {
    "sbhd": _case(_CAUSAL_PADDED, True, **_PAD),
    "bshd": _case(_CAUSAL_PADDED, **_BSHD, **_PAD, **_CAUSAL),
    "cross-sbhd": _case(_PADDED, **_CROSS, **_PAD, window=(7, 3), bottom_right=True),
    "cross-bshd": _case(_PADDED, **_CROSS, **_BSHD, **_PAD),
    "odd-depth": _case(_PADDED, d=5, d_v=3, **_BSHD, **_PAD),
    "no-keys": _case(_NO_KEYS, h=4, **_PAD),
}
_POISONED_FLOAT32 = {
    "dropout": _case(_PADDED, **_BSHD, **_PAD, dropout=0.5),
    "bias-learnable": _case(
        _PADDED, **_PAD, over=(3, 2, 17), bias="post_scale_bias", softmax_type="learnable"
    ),
}


def _padded(rows: dict[str, Options]) -> dict[str, Options]:
    return {
        f"padding-of-{padding}-{name}": {
            **own,
            "padding": padding,
            "rules": dataclasses.replace(own["rules"], zero_padded=padding == 0),
        }
        for name, own in rows.items()
        for padding in (np.nan, np.inf, -np.inf, 0.0)
    }


_CASES = {
    **typed({**_ALL, **_padded(_POISONED)}),
    **typed({**_FLOAT32, **_padded(_POISONED_FLOAT32)}, (float32,)),
}
_BACKWARD = {
    name: {**own, "parts": {**own["parts"], **{f"d{x}": place for x, place in own["parts"].items()}}}
    for name, own in _CASES.items()
}
_SMALL = Sizes(BATCH, LENGTH, LENGTH, 2, 2, 8)
_WHOLE, _BANDED = Rules(padded=True), Rules(padded=True, window=(-1, 0), bottom_right=True)


def _bad(queries: Rules, keys: Rules, **more: Any) -> dict[str, Options]:
    """Bad lengths of the queries, and of the keys."""
    other = {"sums_q": GOOD, "sums_kv": GOOD, "sizes": _SMALL, **more}
    return {
        **bad_cases({**other, "rules": queries}, {"queries": ("sums_q",)}),
        **bad_cases({**other, "rules": keys}, {"keys": ("sums_kv",)}),
    }


_TIMED: Options = {"rules": Rules(window=(-1, 0), softmax_scale=0.125)}

TESTS = (
    KernelTest(
        "attention_fwd", attention_fwd, attention_fwd_oracle, {**_CASES, **_bad(_WHOLE, _BANDED)}, _TIMED
    ),
    KernelTest(
        "attention_bwd",
        attention_bwd,
        attention_bwd_oracle,
        {**_BACKWARD, **_bad(_BANDED, _WHOLE, forward=True)},
        {**_TIMED, "forward": True, "deterministic": False},
    ),
)
