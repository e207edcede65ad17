"""The attention against float64; what the tolerances are made of stands in ``fp8kit.testing.attention``."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fp8kit import formats
from fp8kit.arrays import ArrayView, Shape, current_stream
from fp8kit.backends.protocol import SPECS, AttentionExtras, KernelSpec
from fp8kit.formats import DType, float32, int32
from fp8kit.testing.attention import ORDERS, Oracle, Rules, Sizes
from fp8kit.testing.contract import (
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    product,
    snapshot,
    typed,
)
from fp8kit.testing.contract.dropout import factors_of
from fp8kit.testing.contract.running_sums import BATCH, GOOD, LENGTH, bad_cases, running
from fp8kit.testing.quantized_attention import QuantizedOracle

_SIZES = {field.name for field in dataclasses.fields(Sizes)}
PLACE = (2**20, 5, 11)  # from element 2^32 on already for some 400 scores


def placed(x: Array, rules: Any) -> Array:
    """(b, h, s, d) values in the rules' order of dimensions."""
    return x.transpose([int(i) for i in np.argsort(ORDERS[rules.qkv_format])])


def extras(s: Sampler, z: Sizes, rules: Rules, sums: Any) -> AttentionExtras:
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


def problem(m: int, n: int, options: Options, most: int = 1024, depth: int = 64) -> tuple[Sizes, Rules]:
    """The sizes and rules that ``options`` name; by default heads of ``depth`` over sequences of at most
    ``most``."""
    length, heads = min(most, m), max(1, n // depth)
    usual = (max(1, m // max(length, 1)), length, length, heads, heads, depth) if m else ()
    own = {name: value for name, value in options.items() if name in _SIZES}
    rules = Rules(**{name: value for name, value in options.items() if name not in _SIZES})
    return dataclasses.replace(Sizes(*usual), **own), rules


def _rows(
    s: Sampler, rules: Rules, shape: Shape, lengths: tuple[int, ...], padding: float | None
) -> ArrayView:
    """Values of (b, h, s, d), beyond the lengths ``padding``, if it is not None."""
    x = s.draw(shape).astype(s.dtype.numpy)
    return s.put(placed(x if padding is None else filled(x, lengths, padding), rules))


def filled(x: Array, lengths: tuple[int, ...], padding: float) -> Array:
    """(b, h, s, d) values with ``padding`` beyond each batch's length."""
    x = x.copy()
    for batch, length in enumerate(lengths):
        x[batch, :, max(length, 0) :] = padding
    return x


def attention_fwd(
    s: Sampler,
    m: int,
    n: int,
    padding: float | None = None,
    sums_q: tuple[int, ...] = (),
    sums_kv: tuple[int, ...] = (),
    **options: Any,
) -> Arguments:
    """``padding``: what lies there. ``sums_q``, ``sums_kv``: running sums in the place of the lengths'.
    ``options``: fields of ``Sizes`` and ``Rules``. "do" is for backward."""
    z, rules = problem(m, n, options)

    q = _rows(s, rules, (z.b, z.h, z.s_q, z.d), z.lengths_q, padding)
    v = _rows(s, rules, (z.b, z.h_kv, z.s_kv, z.depth_v), z.lengths_kv, padding)
    return {
        "q": q,
        "k": _rows(s, rules, (z.b, z.h_kv, z.s_kv, z.d), z.lengths_kv, padding),
        "v": v,
        "o": s.output(*q.shape[:3], z.depth_v),
        "lse": s.output(z.b, z.h, z.s_q, dtype=float32),
        "extras": extras(s, z, rules, (sums_q, sums_kv)),
        "do": _rows(s, rules, (z.b, z.h, z.s_q, z.depth_v), z.lengths_q, padding),
        "spec": rules,
    }


def call_of(a: Any, backward: bool) -> tuple[Sizes, tuple[Array, ...], tuple[Array | None, ...]]:
    """What an oracle takes of a call's arguments, padding counting as 0: the sizes; q, k, v and do; mask,
    bias, slopes, offset, dropout's factors and, in backward, o."""
    spec, extras, order = a.spec, a.extras, ORDERS[a.spec.qkv_format]
    sums = extras.cu_seqlens_q, extras.cu_seqlens_kv
    z = Sizes.of(a.q.transpose(order), a.v.transpose(order), *sums)

    def clean(x: Array, lengths: tuple[int, ...]) -> Array:
        return filled(x.transpose(order), lengths, 0)

    q, k, v = clean(a.q, z.lengths_q), clean(a.k, z.lengths_kv), clean(a.v, z.lengths_kv)
    do = clean(a.do, z.lengths_q) if backward else np.ones((*q.shape[:3], z.d_v))
    keep = None
    if spec.dropout:
        first, head, heads = (0, 0, z.h) if extras.dropout_place is None else map(int, extras.dropout_place)
        batch, own, i, j = np.ogrid[: z.b, : z.h, : z.s_q, : z.s_kv]
        element = (((first + batch) * heads + head + own) * z.s_q + i) * z.s_kv + j
        keep = factors_of(extras.rng, spec.dropout, element)
    given = clean(a.o, z.lengths_q) if backward else None
    further = extras.mask, extras.bias, extras.alibi_slopes, extras.softmax_offset
    return z, (q, k, v, do), (*further, keep, given)


def oracle(a: Any, backward: bool) -> Oracle:
    """Returns the oracle of a call's arguments; in backward the gradients are those of the call's o."""
    z, layers, extras = call_of(a, backward)
    return Oracle(formats.dtype(a.q.dtype), z, a.spec, a.device.kind == "cpu", *layers, *extras)


def attention_fwd_oracle(a: Any) -> Results:
    """See ``Oracle``."""
    found = oracle(a, False)
    return {
        "o": (placed(found.o, a.spec), placed(found.o_slack, a.spec)),
        "lse": (found.lse, found.lse_slack),
    }


def run(s: Sampler, spec: KernelSpec, made: Arguments) -> None:
    """Fill the outputs among a kernel's arguments by calling it."""
    call = spec.complete(made, current_stream(s.device))
    call["workspace"] = s.workspace(spec.workspace_bytes(s.kernels, call))
    spec.call(s.kernels, call)


def attention_bwd(
    s: Sampler, m: int, n: int, forward: bool = False, deterministic: bool = True, **options: Any
) -> Arguments:
    """o and lse are the oracle's, rounded, or with ``forward`` those of the kernel."""
    made = attention_fwd(s, m, n, **options)
    rules, spec = made["spec"], SPECS["attention_fwd"]
    if forward:
        run(s, spec, made)
    else:
        exact = oracle(snapshot(made, s.device), False)
        made |= {"o": s.put(placed(exact.o_given, rules)), "lse": s.put(exact.lse_given)}
    return {**made, **gradients(s, made), "deterministic": deterministic}


def gradients(s: Sampler, made: Arguments, dtype: DType | None = None) -> Arguments:
    """Arrays for all gradients of a call of forward, of ``dtype`` or the sampler's."""
    bias, offset = made["extras"].bias, made["extras"].softmax_offset
    return {
        **{f"d{name}": s.output(*made[name].shape, dtype=dtype) for name in "qkv"},
        "dbias": None if bias is None else s.output(*bias.shape, dtype=dtype),
        "doffset": None if offset is None else s.output(*offset.shape, dtype=float32),
    }


def attention_bwd_oracle(a: Any) -> Results:
    """See ``Oracle``."""
    return results_of(oracle(a, True), a)


def results_of(found: Oracle | QuantizedOracle, a: Any) -> Results:
    """An oracle's gradients with their slacks, those of q, k and v as they lie."""
    return {
        name: (placed(grad, a.spec), placed(found.slacks[name], a.spec))
        if name[1:] in ("q", "k", "v")
        else (grad, found.slacks[name])
        for name, grad in found.grads.items()
    }


def _packed(h: int) -> Options:
    """q, k and v of ``h`` heads each lie next to each other along the heads (a layer's joint projection)."""
    return {"h": h, "h_kv": h, "parts": {"q": (2, 0, 2 * h), "k": (2, h, h), "v": (2, 2 * h, 0)}}


_CAUSAL: Options = {"window": (-1, 0)}
_BOTTOM_RIGHT: Options = {**_CAUSAL, "bottom_right": True}
_BSHD: Options = {"qkv_format": "bshd"}
_PADDED: Options = {
    "padded": True,
    "b": 3,
    "s_q": 17,
    "s_kv": 33,
    "lengths_q": (17, 5, 1),
    "lengths_kv": (33, 9, 20),
}
_SELF_PADDED: Options = {**_PADDED, "s_q": 33, "lengths_q": (33, 5, 20), "lengths_kv": (33, 5, 20)}
_BLIND: Options = {"lengths_q": (33, 20, 7), "lengths_kv": (9, 20, 30)}
_LONG_KEYS: Options = {"s_kv": 33}
_LONG: Options = {"b": 1, "s_q": 300, "s_kv": 300, "h": 1, "h_kv": 1, "d": 32}
_GROUPS: Options = {"h": 6, "h_kv": 2}
_ALIBI, _LEARNABLE = {"bias": "alibi"}, {"softmax_type": "learnable"}
_CAP: Options = {"softcap": 1.5}  # of scores up to some 5: all of the curve
_PRE, _POST = {"bias": "pre_scale_bias"}, {"bias": "post_scale_bias"}


def _square(length: int) -> Options:
    return {"s_q": length, "s_kv": length}


def _dropped(p: float, placed: bool = False) -> Options:
    return {"dropout": p, "placed": placed}


# run forward and backward, in every high-precision dtype
_FORMS: dict[str, Options] = {
    "no_mask": {},
    "causal": _CAUSAL,
    "padding": _PADDED,
    "padding_causal": {**_SELF_PADDED, **_CAUSAL},
    "groups": {**_GROUPS, **_square(19), "d": 8, **_CAUSAL},
    "packed": {**_packed(3), **_CAUSAL},
}
ALL_CASES: dict[str, Options] = {
    **product("{qkv_format}-{case}", {"qkv_format": tuple(ORDERS), "case": _FORMS}),
    "cross": {"s_q": 9, "s_kv": 40, "d": 64},
    "one-query-one-head": {"b": 1, "s_q": 1, "s_kv": 21, "h": 1, "h_kv": 1},
    "long": {**_LONG, **_CAUSAL},
    "bottom-right": {**_LONG_KEYS, **_BOTTOM_RIGHT},
    "padding-bottom-right": {**_PADDED, **_BSHD, **_BOTTOM_RIGHT},
    "padding-bottom-right-blind-rows": {**_SELF_PADDED, **_BLIND, **_BOTTOM_RIGHT},
    "window-causal": {**_square(40), "window": (5, 0)},
    "window-both": {**_LONG_KEYS, **_BSHD, "window": (3, 4), "bottom_right": True},
    "window-long": {**_LONG, "h": 2, "window": (20, 0)},
    "window-padding": {**_PADDED, "window": (4, 2), "bottom_right": True},
    "mask": {**_LONG_KEYS, "masked": True},
    "mask-all": {
        **_LONG_KEYS,
        **_BSHD,
        "over": (2, 2, 17),
        "masked": True,
        "window": (9, 9),
        "bottom_right": True,
    },
    "pre-bias": {**_LONG_KEYS, "over": (1, 2, 17), **_PRE},
    "post-bias": {**_LONG_KEYS, **_BSHD, "over": (2, 1, 17), **_POST},
    "post-bias-causal-groups": {**_GROUPS, "over": (1, 6, 17), "d": 8, **_POST, **_CAUSAL},
    "post-bias-padding": {**_PADDED, "over": (1, 2, 17), **_POST},
    "alibi": {**_LONG_KEYS, **_ALIBI, **_BOTTOM_RIGHT},
    "alibi-batches": {**_PADDED, **_BSHD, "over": (3, 1, 1), **_ALIBI, "bottom_right": True},
    "off-by-one": {"softmax_type": "off-by-one", **_CAUSAL},
    "learnable": {**_LONG_KEYS, **_BSHD, **_LEARNABLE},
    "learnable-padding": {**_PADDED, **_LEARNABLE, **_BOTTOM_RIGHT},
    "depth-of-v": {"d_v": 24, "h": 4, **_CAUSAL},
    "cap": {**_LONG_KEYS, **_CAP, **_CAUSAL, "bottom_right": True},
    "cap-padding-groups": {**_PADDED, **_GROUPS, **_BSHD, **_CAP, "window": (5, 3)},
    "cap-pre-bias": {**_LONG_KEYS, "over": (1, 2, 17), **_CAP, **_PRE},
    "cap-post-bias": {**_LONG_KEYS, **_BSHD, "over": (2, 1, 17), **_CAP, **_POST},
    "cap-alibi-learnable-mask": {
        **_LONG_KEYS,
        "over": (2, 2, 17),
        "masked": True,
        **_CAP,
        **_ALIBI,
        **_LEARNABLE,
    },
    "cap-dropout-placed": {"s_kv": 23, **_BSHD, **_CAP, **_dropped(0.25, True)},
    "placed": {"s_kv": 23, **_BSHD, **_dropped(0.25, True)},
    "placed-causal-groups": {**_GROUPS, **_square(40), **_CAUSAL, **_dropped(0.5, True)},
    "placed-padding": {**_PADDED, **_BSHD, **_dropped(0.5, True)},
}
# heads of 64 and 128 over several tiles of queries and keys, of which the last are not whole: kernels for one
# chip alone have the largest
ALL_CASES |= {
    "tiles-64": {**_packed(2), "b": 1, **_square(209), "d": 64, **_CAUSAL},
    "tiles-64-blind-rows": {"b": 1, "s_q": 301, "s_kv": 150, "h_kv": 1, "d": 64, **_BSHD, **_BOTTOM_RIGHT},
    "tiles-128-groups": {**_GROUPS, "b": 1, **_square(139), "d": 128, **_BSHD, **_CAUSAL},
    "tiles-128-window": {"b": 1, "s_q": 150, "s_kv": 277, "d": 128, "window": (70, 9), "bottom_right": True},
    "tiles-128-cross": {"b": 1, "s_q": 131, "s_kv": 259, "h": 1, "h_kv": 1, "d": 128},
    "cap-tiles-64": {**_packed(2), "b": 1, **_square(209), "d": 64, **_CAP, **_CAUSAL},
    "cap-tiles-128": {"b": 1, "s_q": 131, "s_kv": 259, "h": 1, "h_kv": 1, "d": 128, **_CAP, **_BOTTOM_RIGHT},
    "cap-tiles-256": {**_GROUPS, "b": 1, **_square(70), "d": 256, **_CAP, "window": (40, 0)},
}
# only in float32: dropout (vendor libraries draw their own masks in 16 bits), odd depths and lengths, batches
# or rows that see nothing
_TINY: Options = {"b": 1, "s_q": 2, "s_kv": 3, "h": 1, "h_kv": 1, "d": 8, "over": (1, 1, 2)}
_NO_KEYS: Options = {**_PADDED, "b": 2, "lengths_q": (17, 5), "lengths_kv": (33, 0)}
FLOAT32_CASES: dict[str, Options] = {
    "dropout": {"s_kv": 23, **_dropped(0.25)},
    "dropout-causal-groups": {**_square(150), "h": 4, "b": 1, **_CAUSAL, **_dropped(0.1)},
    "dropout-padding": {**_PADDED, **_BSHD, **_dropped(0.5)},
    "dropout-window-bias": {**_square(150), "b": 1, "window": (30, 0), **_dropped(0.2), **_POST},
    "dropout-learnable": {"s_kv": 23, **_dropped(0.25), **_LEARNABLE},
    "odd-depth": {"d": 5, **_CAUSAL},
    "odd-depth-of-v": {"d_v": 3, **_CAUSAL},
    "nothing-to-see": _NO_KEYS,
    "nothing-to-see-learnable": {**_NO_KEYS, **_LEARNABLE},
    "causal-long-queries": {"s_q": 33, **_CAUSAL},
    "causal-long-keys": {**_LONG_KEYS, **_CAUSAL},
    "bottom-right-long-queries": {"s_q": 33, **_BOTTOM_RIGHT},
    "window-beyond-the-keys": {"s_q": 40, "window": (2, 0)},
    "window-of-one": {"window": (0, 0)},
    "mask-of-everything": {**_TINY, "masked": True, "window": (0, -1), "bottom_right": True},
    "bias-of-one-row": {"b": 3, **_PRE},
    "bias-of-everything": {"h": 4, "over": (2, 4, 17), **_POST, **_CAUSAL},
    "everything-capped": {
        **_PADDED,
        "h": 4,
        "over": (1, 4, 17),
        "masked": True,
        **_POST,
        **_LEARNABLE,
        **_CAP,
        "window": (11, 3),
        **_dropped(0.3),
    },
    "cap-far-above": {**_LONG_KEYS, "softcap": 1e4},
    "cap-far-below": {**_LONG_KEYS, "softcap": 1e-3},
    "everything": {
        **_PADDED,
        "h": 4,
        "over": (1, 4, 17),
        "d_v": 8,
        "masked": True,
        **_PRE,
        **_LEARNABLE,
        "window": (11, 3),
        "bottom_right": True,
        **_dropped(0.3),
        **_BSHD,
    },
}
# run with NaN and Inf in padding, and with 0 that the rules know of. Lengths of queries and keys equal and
# unequal, a batch without keys, packed inputs, depths that are and are not whole vectors
_CROSS: Options = {**_PADDED, "d": 24, "d_v": 8, "h": 4}
_POISONED = {
    "sbhd": {**_SELF_PADDED, **_packed(2)},
    "bshd": {**_SELF_PADDED, **_BSHD, **_CAUSAL},
    "cross-sbhd": {**_CROSS, "window": (7, 3), "bottom_right": True},
    "cross-bshd": {**_CROSS, **_BSHD},
    "odd-depth": {**_PADDED, "d": 5, "d_v": 3, **_BSHD},
    "no-keys": {**_NO_KEYS, "h": 4},
}
_POISONED_FLOAT32 = {
    "dropout": {**_PADDED, **_BSHD, **_dropped(0.5)},
    "bias-learnable": {**_PADDED, "over": (3, 2, 17), **_POST, **_LEARNABLE},
}


def _padded(cases: dict[str, Options]) -> dict[str, Options]:
    poison = {str(value): {"padding": value} for value in (np.nan, np.inf, -np.inf)}
    zeros = {"0.0": {"padding": 0.0, "zero_padded": True}}
    return product("padding-of-{padding}-{case}", {"case": cases, "padding": {**poison, **zeros}})


_CASES = {
    **typed({**ALL_CASES, **_padded(_POISONED)}),
    **typed({**FLOAT32_CASES, **_padded(_POISONED_FLOAT32)}, (float32,)),
}


def backward_of(cases: dict[str, Options]) -> dict[str, Options]:
    """The cases of backward: gradients lie where what they are of does."""
    return {
        name: {**own, "parts": {**own["parts"], **{f"d{x}": place for x, place in own["parts"].items()}}}
        if "parts" in own
        else own
        for name, own in cases.items()
    }


_BACKWARD = backward_of(_CASES)
_SMALL: Options = {"b": BATCH, **_square(LENGTH), "d": 8, "padded": True, "sums_q": GOOD, "sums_kv": GOOD}


def _bad(queries: Options, keys: Options) -> dict[str, Options]:
    """Bad lengths of the queries, and of the keys."""
    return {
        **bad_cases({**_SMALL, **queries}, {"queries": ("sums_q",)}),
        **bad_cases({**_SMALL, **keys}, {"keys": ("sums_kv",)}),
    }


_TIMED: Options = {"window": (-1, 0), "softmax_scale": 0.125}

TESTS = (
    KernelTest(
        "attention_fwd", attention_fwd, attention_fwd_oracle, {**_CASES, **_bad({}, _BOTTOM_RIGHT)}, _TIMED
    ),
    KernelTest(
        "attention_bwd",
        attention_bwd,
        attention_bwd_oracle,
        {**_BACKWARD, **product("{case}", {"case": _bad(_BOTTOM_RIGHT, {})}, forward=True)},
        {**_TIMED, "forward": True, "deterministic": False},
    ),
)
