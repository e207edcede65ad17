"""Contract cases of the attention, against float64; what the tolerances are made of stands in
``fp8kit.testing.attention``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.backends.protocol import AttentionExtras, Kernels
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16, float16, float32
from fp8kit.testing.attention import Oracle, Rules, Sizes
from fp8kit.testing.compare import assert_close, assert_same_bits
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.dropout import RNG, factors_of
from fp8kit.testing.contract.elementwise import Array, draw, host, table

PLACE = np.array([2**20, 5, 11], np.int32)  # from element 2^32 on already for some 400 scores


def kept(rules: Rules, sizes: Sizes) -> Array:
    """Dropout's factors (b, h, s_q, s_kv), those of the whole attention where the rules say placed."""
    batch, head, heads = (int(n) for n in PLACE) if rules.placed else (0, 0, sizes.h)
    b, h, i, j = np.ogrid[: sizes.b, : sizes.h, : sizes.s_q, : sizes.s_kv]
    return factors_of(RNG, rules.dropout, (((batch + b) * heads + head + h) * sizes.s_q + i) * sizes.s_kv + j)


class Problem:
    """Inputs (b, h, s, d) and the oracle of a case."""

    def __init__(self, dtype: DType, sizes: Sizes, rules: Rules, device: Device) -> None:
        z = sizes
        self.dtype, self.sizes, self.rules, self.device = dtype, sizes, rules, device
        self.q, self.k = draw(1, (z.b, z.h, z.s_q, z.d), dtype), draw(2, (z.b, z.h_kv, z.s_kv, z.d), dtype)
        self.v, self.do = (
            draw(3, (z.b, z.h_kv, z.s_kv, z.depth_v), dtype),
            draw(4, (z.b, z.h, z.s_q, z.depth_v), dtype),
        )
        over = (*z.over, z.s_kv)
        self.mask = np.random.default_rng(5).random(over) < 0.3 if rules.masked else None
        self.bias = draw(6, over, dtype) if rules.bias.endswith("scale_bias") else None
        # slopes of one batch or of each
        self.slopes = (
            2.0 ** -np.arange(1, z.h * z.over[0] + 1, dtype=np.float32) if rules.bias == "alibi" else None
        )
        if self.slopes is not None and z.over[0] > 1:
            self.slopes = self.slopes.reshape(z.b, z.h)
        self.offset = draw(7, (z.h,), float32) if rules.softmax_type == "learnable" else None
        self.oracle = Oracle(
            dtype,
            z,
            rules,
            device.kind == "cpu",
            self.q,
            self.k,
            self.v,
            self.do,
            self.mask,
            self.bias,
            self.slopes,
            self.offset,
            kept(rules, z) if rules.dropout else None,
        )

    def spoil(self, value: float) -> None:
        """Put ``value`` into all padding of q, k, v and do. The oracle has seen other numbers there."""
        for batch, (queries, keys) in enumerate(
            zip(self.sizes.lengths_q, self.sizes.lengths_kv, strict=True)
        ):
            for x, length in ((self.q, queries), (self.do, queries), (self.k, keys), (self.v, keys)):
                x[batch, :, length:] = value

    def place(self, x: Array) -> Array:
        """(b, h, s, d) values in the rules' order of dimensions."""
        return np.ascontiguousarray(
            x.transpose((2, 0, 1, 3) if self.rules.qkv_format == "sbhd" else (0, 2, 1, 3))
        )

    def extras(self) -> AttentionExtras:
        """What comes beside q, k and v, on the device."""

        def there(x: Array | None) -> ArrayView | None:
            return None if x is None else put(x, self.device)

        lengths = (self.sizes.lengths_q, self.sizes.lengths_kv)
        cu = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) if n else None for n in lengths]
        rng, place = RNG if self.rules.dropout else None, PLACE if self.rules.placed else None
        return AttentionExtras(
            *(there(x) for x in (*cu, rng, self.mask, self.bias, self.slopes, self.offset, place))
        )

    def room(self, kernels: Kernels, backward: bool, strides: tuple[Shape, ...] = ()) -> ArrayView:
        """The workspace for q, k and v of these strides."""
        q, k, v = (self.place(x).shape for x in (self.q, self.k, self.v))
        dbias = None if self.bias is None or not backward else self.bias.shape
        return workspace(
            kernels.attention_workspace(q, k, v, dbias, self.dtype, self.rules, backward, True, strides),
            self.device,
        )


def _packed(parts: tuple[Array, ...], device: Device, blank: bool = False) -> list[ArrayView]:
    """Arrays of equal shape as views into one buffer, next to each other along the heads (a layer's joint
    projection)."""
    heads = parts[0].shape[2]
    joint = np.concatenate(parts, axis=2)
    whole = poisoned(joint.shape, _dtype(parts[0]), device) if blank else put(joint, device)
    return [whole.slice(2, i * heads, heads) for i in range(len(parts))]


def _dtype(x: Array) -> DType:
    return next(d for d in HIGH_PRECISION if d.numpy == x.dtype)


def _fwd(
    dtype: DType, sizes: Sizes, rules: Rules, packed: bool = False, padding: float | None = None
) -> Callable[[Kernels, Device], None]:
    """``padding``: what lies there."""

    def run(kernels: Kernels, device: Device) -> None:
        case = Problem(dtype, sizes, rules, device)
        if padding is not None:
            case.spoil(padding)
        parts = tuple(case.place(x) for x in (case.q, case.k, case.v))
        q, k, v = _packed(parts, device) if packed else (put(x, device) for x in parts)
        want = case.place(case.oracle.o)
        o, lse = poisoned(want.shape, dtype, device), poisoned((sizes.b, sizes.h, sizes.s_q), float32, device)
        kernels.attention_fwd(
            q,
            k,
            v,
            o,
            lse,
            case.extras(),
            rules,
            case.room(kernels, False, (q.strides, k.strides, v.strides)),
            0,
        )
        assert_close("o", get(o), want, dtype, case.place(case.oracle.o_slack))
        assert_close("lse", get(lse), case.oracle.lse, float32, case.oracle.lse_slack)

    return run


def _bwd(
    dtype: DType, sizes: Sizes, rules: Rules, packed: bool = False, padding: float | None = None
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        case = Problem(dtype, sizes, rules, device)
        if padding is not None:
            case.spoil(padding)
        parts = tuple(case.place(x) for x in (case.q, case.k, case.v))
        q, k, v = _packed(parts, device) if packed else (put(x, device) for x in parts)
        results = []
        for _ in range(2):
            grads = (
                _packed(parts, device, True) if packed else [poisoned(x.shape, dtype, device) for x in parts]
            )
            dbias = None if case.bias is None else poisoned(case.bias.shape, dtype, device)
            doffset = None if case.offset is None else poisoned(case.offset.shape, float32, device)
            kernels.attention_bwd(
                put(case.place(case.do), device),
                q,
                k,
                v,
                put(case.place(case.oracle.o_given), device),
                put(case.oracle.lse_given, device),
                grads[0],
                grads[1],
                grads[2],
                dbias,
                doffset,
                case.extras(),
                rules,
                True,
                case.room(kernels, True, (q.strides, k.strides, v.strides)),
                0,
            )
            results.append([host(g) for g in (*grads, *(x for x in (dbias, doffset) if x is not None))])
        for (name, want), got, again in zip(case.oracle.grads.items(), *results, strict=True):
            slack, kind = case.oracle.slacks[name], float32 if name == "doffset" else dtype
            if name in ("dq", "dk", "dv"):
                want, slack = case.place(want), case.place(slack)
            assert_close(name, got, want, kind, slack)
            assert_same_bits(f"{name}, the second time", again, got)

    return run


_FORMATS = ("sbhd", "bshd")
_CAUSAL = Rules(window=(-1, 0))
_PADDED = Sizes(3, 17, 33, 2, 2, 16, (17, 5, 1), (33, 9, 20))
_CAUSAL_PADDED = Sizes(3, 33, 33, 2, 2, 16, (33, 5, 20), (33, 5, 20))
_LONG_KEYS = Sizes(s_q=17, s_kv=33)


def _rules(form: str = "sbhd", **changes: object) -> Rules:
    return dataclasses.replace(Rules(form), **changes)  # type: ignore[arg-type]


# name -> sizes, rules, packed: run forward and backward, in every high-precision dtype
_ALL = {
    **{f"{f}-no_mask": (Sizes(), Rules(f), False) for f in _FORMATS},
    **{f"{f}-causal": (Sizes(), _rules(f, window=(-1, 0)), False) for f in _FORMATS},
    **{f"{f}-padding": (_PADDED, _rules(f, padded=True), False) for f in _FORMATS},
    **{
        f"{f}-padding_causal": (_CAUSAL_PADDED, _rules(f, padded=True, window=(-1, 0)), False)
        for f in _FORMATS
    },
    **{
        f"{f}-groups": (Sizes(h=6, h_kv=2, s_q=19, s_kv=19, d=8), _rules(f, window=(-1, 0)), False)
        for f in _FORMATS
    },
    **{f"{f}-packed": (Sizes(h=3, h_kv=3), _rules(f, window=(-1, 0)), True) for f in _FORMATS},
    "cross": (Sizes(s_q=9, s_kv=40, d=64), Rules(), False),
    "one-query-one-head": (Sizes(b=1, s_q=1, s_kv=21, h=1, h_kv=1), Rules(), False),
    "long": (Sizes(b=1, s_q=300, s_kv=300, h=1, h_kv=1, d=32), _CAUSAL, False),
    "bottom-right": (_LONG_KEYS, _rules(window=(-1, 0), bottom_right=True), False),
    "padding-bottom-right": (_PADDED, _rules("bshd", window=(-1, 0), bottom_right=True, padded=True), False),
    "padding-bottom-right-blind-rows": (
        Sizes(3, 33, 33, 2, 2, 16, (33, 20, 7), (9, 20, 30)),
        _rules(window=(-1, 0), bottom_right=True, padded=True),
        False,
    ),
    "window-causal": (Sizes(s_q=40, s_kv=40), _rules(window=(5, 0)), False),
    "window-both": (_LONG_KEYS, _rules("bshd", window=(3, 4), bottom_right=True), False),
    "window-long": (Sizes(b=1, s_q=300, s_kv=300, h=2, h_kv=1, d=32), _rules(window=(20, 0)), False),
    "window-padding": (_PADDED, _rules(window=(4, 2), bottom_right=True, padded=True), False),
    "mask": (_LONG_KEYS, _rules(masked=True), False),
    "mask-all": (
        dataclasses.replace(_LONG_KEYS, over=(2, 2, 17)),
        _rules("bshd", masked=True, window=(9, 9), bottom_right=True),
        False,
    ),
    "pre-bias": (dataclasses.replace(_LONG_KEYS, over=(1, 2, 17)), _rules(bias="pre_scale_bias"), False),
    "post-bias": (
        dataclasses.replace(_LONG_KEYS, over=(2, 1, 17)),
        _rules("bshd", bias="post_scale_bias"),
        False,
    ),
    "post-bias-causal-groups": (
        Sizes(h=6, h_kv=2, over=(1, 6, 17), d=8),
        _rules(bias="post_scale_bias", window=(-1, 0)),
        False,
    ),
    "post-bias-padding": (
        dataclasses.replace(_PADDED, over=(1, 2, 17)),
        _rules(bias="post_scale_bias", padded=True),
        False,
    ),
    "alibi": (_LONG_KEYS, _rules(bias="alibi", window=(-1, 0), bottom_right=True), False),
    "alibi-batches": (
        dataclasses.replace(_PADDED, over=(3, 1, 1)),
        _rules("bshd", bias="alibi", bottom_right=True, padded=True),
        False,
    ),
    "off-by-one": (Sizes(), _rules(softmax_type="off-by-one", window=(-1, 0)), False),
    "learnable": (_LONG_KEYS, _rules("bshd", softmax_type="learnable"), False),
    "learnable-padding": (
        _PADDED,
        _rules(softmax_type="learnable", padded=True, window=(-1, 0), bottom_right=True),
        False,
    ),
    "depth-of-v": (Sizes(d=16, d_v=24, h=4, h_kv=2), _CAUSAL, False),
    "placed": (Sizes(s_kv=23), _rules("bshd", dropout=0.25, placed=True), False),
    "placed-causal-groups": (
        Sizes(h=6, h_kv=2, s_q=40, s_kv=40),
        _rules(window=(-1, 0), dropout=0.5, placed=True),
        False,
    ),
    "placed-padding": (_PADDED, _rules("bshd", padded=True, dropout=0.5, placed=True), False),
}
# only in float32: dropout (vendor libraries draw their own masks in 16 bits), odd depths and lengths, batches
# or rows that see nothing
_FLOAT32 = {
    "dropout": (Sizes(s_kv=23), _rules(dropout=0.25), False),
    "dropout-causal-groups": (Sizes(s_q=150, s_kv=150, h=4, b=1), _rules(window=(-1, 0), dropout=0.1), False),
    "dropout-padding": (_PADDED, _rules("bshd", padded=True, dropout=0.5), False),
    "dropout-window-bias": (
        Sizes(s_q=150, s_kv=150, b=1, over=(1, 1, 1)),
        _rules(window=(30, 0), dropout=0.2, bias="post_scale_bias"),
        False,
    ),
    "dropout-learnable": (Sizes(s_kv=23), _rules(dropout=0.25, softmax_type="learnable"), False),
    "odd-depth": (Sizes(d=5), _CAUSAL, False),
    "odd-depth-of-v": (Sizes(d=16, d_v=3), _CAUSAL, False),
    "nothing-to-see": (Sizes(2, 17, 33, 2, 2, 16, (17, 5), (33, 0)), _rules(padded=True), False),
    "nothing-to-see-learnable": (
        Sizes(2, 17, 33, 2, 2, 16, (17, 5), (33, 0)),
        _rules(padded=True, softmax_type="learnable"),
        False,
    ),
    "causal-long-queries": (Sizes(s_q=33, s_kv=17), _CAUSAL, False),
    "causal-long-keys": (_LONG_KEYS, _CAUSAL, False),
    "bottom-right-long-queries": (Sizes(s_q=33, s_kv=17), _rules(window=(-1, 0), bottom_right=True), False),
    "window-beyond-the-keys": (Sizes(s_q=40, s_kv=17), _rules(window=(2, 0)), False),
    "window-of-one": (Sizes(), _rules(window=(0, 0)), False),
    "mask-of-everything": (
        Sizes(1, 2, 3, 1, 1, 8, over=(1, 1, 2)),
        _rules(masked=True, window=(0, -1), bottom_right=True),
        False,
    ),
    "bias-of-one-row": (Sizes(b=3, over=(1, 1, 1)), _rules(bias="pre_scale_bias"), False),
    "bias-of-everything": (
        Sizes(h=4, over=(2, 4, 17)),
        _rules(bias="post_scale_bias", window=(-1, 0)),
        False,
    ),
    "everything": (
        dataclasses.replace(_PADDED, h=4, over=(1, 4, 17), d_v=8),
        _rules(
            "bshd",
            padded=True,
            masked=True,
            bias="pre_scale_bias",
            softmax_type="learnable",
            window=(11, 3),
            bottom_right=True,
            dropout=0.3,
        ),
        False,
    ),
}

# sizes, rules: run with NaN and Inf in padding, and with 0 that the rules know of. Lengths of queries and
# keys equal and unequal, a batch without keys, packed inputs, depths that are and are not whole vectors.
_CROSS = dataclasses.replace(_PADDED, d=24, d_v=8, h=4)
_POISONED = {
    "sbhd": (_CAUSAL_PADDED, _rules(padded=True), True),
    "bshd": (_CAUSAL_PADDED, _rules("bshd", padded=True, window=(-1, 0)), False),
    "cross-sbhd": (_CROSS, _rules(padded=True, window=(7, 3), bottom_right=True), False),
    "cross-bshd": (_CROSS, _rules("bshd", padded=True), False),
    "odd-depth": (dataclasses.replace(_PADDED, d=5, d_v=3), _rules("bshd", padded=True), False),
    "no-keys": (Sizes(2, 17, 33, 4, 2, 16, (17, 5), (33, 0)), _rules(padded=True), False),
}
_POISONED_FLOAT32 = {
    "dropout": (_PADDED, _rules("bshd", padded=True, dropout=0.5), False),
    "bias-learnable": (
        dataclasses.replace(_PADDED, over=(3, 2, 17)),
        _rules(padded=True, bias="post_scale_bias", softmax_type="learnable"),
        False,
    ),
}


def _poisoned(
    make: Callable[..., Callable[[Kernels, Device], None]],
) -> dict[str, Callable[[Kernels, Device], None]]:
    rows = {}
    for dtype in HIGH_PRECISION:
        for name, (sizes, rules, packed) in (
            _POISONED | _POISONED_FLOAT32 if dtype is float32 else _POISONED
        ).items():
            for padding in (np.nan, np.inf, -np.inf, 0.0):
                known = dataclasses.replace(rules, zero_padded=padding == 0)
                rows[f"{dtype.name}-padding-of-{padding}-{name}"] = make(dtype, sizes, known, packed, padding)
    return rows


CASES = [
    *(
        case
        for kernel, make in (("attention_fwd", _fwd), ("attention_bwd", _bwd))
        for case in (
            *table(
                kernel,
                {
                    f"{d.name}-{name}": make(d, *row)
                    for d in (float32, bfloat16, float16)
                    for name, row in _ALL.items()
                },
            ),
            *table(kernel, {f"float32-{name}": make(float32, *row) for name, row in _FLOAT32.items()}),
            *table(kernel, _poisoned(make)),
        )
    )
]
