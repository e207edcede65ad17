"""The small kernels: copy, add and rng_next_ bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8kit.formats import HIGH_PRECISION, DType, bfloat16, float16, float32, float64, int64, uint8
from fp8kit.testing.contract import Arguments, Array, KernelTest, Results, Sampler, product, sized, typed
from fp8kit.testing.contract.dropout import SIZES


def copy(
    s: Sampler,
    m: int,
    n: int,
    shape: tuple[int, ...] = (),
    axes: tuple[int, ...] = (),
    to: DType | None = None,
    values: Array | None = None,
    repeat: int = 0,
) -> Arguments:
    """x, or ``values``, with its dimensions in the order ``axes``, or one element ``repeat`` times; into
    ``to``, or else to float32, or from there to bfloat16."""
    shape = shape or (m, n)
    target = to or (bfloat16 if s.dtype is float32 else float32)
    if values is None and s.dtype is not uint8:
        x = s.normal(*shape, scale=3.0)
    else:
        x = s.put(s.random.integers(0, 256, shape).astype(np.uint8) if values is None else values)
    x = x.repeated(repeat) if repeat else x.transpose(*axes) if axes else x
    return {"x": x, "y": s.output(*x.shape, dtype=target)}


def copy_oracle(a: Any) -> Results:
    """float64 goes through float32."""
    if a.x.dtype == a.y.dtype:
        return {"y": a.x}
    return {"y": a.x.astype(np.float32).astype(a.y.dtype)}


def add(s: Sampler, m: int, n: int, shape: tuple[int, ...] = (), b: tuple[int, ...] = ()) -> Arguments:
    """``b``: the shape of what is repeated."""
    shape = shape or (m, n)
    return {"a": s.normal(*shape), "b": s.normal(*(b or shape)), "out": s.output(*shape)}


def add_oracle(a: Any) -> Results:
    """One float32 addition, one rounding."""
    out = a.a.astype(np.float32) + np.resize(a.b.astype(np.float32), a.a.shape)
    return {"out": out.astype(a.out.dtype)}


def sum_rows(s: Sampler, m: int, n: int) -> Arguments:
    """A matrix."""
    return {"x": s.normal(m, n), "out": s.output(n)}


def rng_next_(s: Sampler, m: int, n: int, offset: int = 2**40) -> Arguments:
    """A state."""
    return {"state": s.put((-7, offset), int64), "out": s.output(2, dtype=int64)}


def rng_next_oracle(a: Any) -> Results:
    """The offset goes on by one."""
    return {"out": a.state, "state": a.state + np.array([0, 1])}


def _same(*dtypes: DType) -> dict[str, Any]:
    """An axis: x and y have one dtype."""
    return {"dtype to": [(dtype, dtype) for dtype in dtypes]}


# numbers that float32 or the target cannot hold, and one that two roundings bring elsewhere than one
_NARROW = np.random.default_rng(1).standard_normal((8, 16))
_NARROW[:, 0] = 1e-46, -1e-45, 1e-40, 1e300, -np.inf, np.nan, 1 + 2.0**-9 + 2.0**-40, -0.0
_COPY = {
    **product("{dtype.name}-{to.name}", {"dtype": HIGH_PRECISION, "to": HIGH_PRECISION}, m=17, n=33),
    **product("{dtype.name}-5d", _same(*HIGH_PRECISION, uint8), shape=(2, 3, 4, 5, 6), axes=(3, 0, 2, 1, 4)),
    # bytes that change places, in whole words and not: tiles of 64 x 64, and what is left over
    **product(
        "uint8-{size}-transposed",
        {
            "dtype": (uint8,),
            "to": (uint8,),
            "size": {
                "64x64": {"shape": (64, 64)},
                "132x260": {"shape": (132, 260)},
                "7x4": {"shape": (7, 4)},
            },
        },
        axes=(1, 0),
    ),
    **product(
        "{dtype.name}-to-float32-transposed",
        {"dtype": (bfloat16, float16)},
        to=float32,
        shape=(5, 3, 7),
        axes=(2, 1, 0),
    ),
    **product("{dtype.name}-into-rows", _same(*HIGH_PRECISION), m=7, n=5, parts={"y": (1, 0, 3)}),
    **product(
        "float64-{to.name}-{order}",
        {"to": HIGH_PRECISION, "order": {"": {}, "transposed": {"axes": (1, 0)}}},
        dtype=float64,
        values=_NARROW,
    ),
    "empty": {"shape": (0, 4), "to": bfloat16},
    **product("{to.name}-repeated", {"to": (float32, bfloat16)}, dtype=float32, shape=(1,), repeat=37),
}
_ADD = (((17, 33), (17, 33)), ((4, 6, 5), (6, 5)), ((9, 7), (7,)), ((3, 5), (1,)), ((0, 3), (3,)))

TESTS = (
    KernelTest("copy", copy, copy_oracle, _COPY),
    KernelTest(
        "add",
        add,
        add_oracle,
        typed({f"{math.prod(shape)}-{math.prod(b)}": {"shape": shape, "b": b} for shape, b in _ADD}),
    ),
    KernelTest("sum_rows", sum_rows, None, typed(sized((*SIZES, (1000, 40))))),
    KernelTest("rng_next_", rng_next_, rng_next_oracle, {"steps": {}, "carry": {"offset": 2**32 - 1}}),
)
