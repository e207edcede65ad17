"""Rotations, and back: bit for bit against ``fp8kit.blocks``."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import blocks as rules
from fp8kit.formats import DType, bfloat16, float16, float32, uint8
from fp8kit.testing.contract import Arguments, Array, KernelTest, Results, Sampler, product, sized, typed
from fp8kit.testing.contract.casts import largest
from fp8kit.testing.contract.dropout import philox


def drawn(s: Sampler, rows: int, columns: int, dtype: DType) -> Array:
    """Values on the host whose magnitude changes every eight rows and columns, with zeros, tiny ones, ties,
    Inf and NaN."""
    x = s.random.standard_normal((rows, columns))
    x[s.random.random(x.shape) < 0.2] = s.random.choice([0.0, -0.0, 1.5, -1.25, 1.75, 5.0, 3.5, 2.5])
    for i, j in np.ndindex(-(-rows // 8), -(-columns // 8)):
        part = x[8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
        part *= 2.0 ** s.random.integers(-30, 12)
        kind = s.random.integers(0, 40)
        if kind < 6:
            part[...] = 0
        elif kind < 9:
            part *= 2.0**-110
        elif kind < 11:
            put_special(s, part)
    return narrow(x, dtype)


def put_special(s: Sampler, part: Any) -> None:
    """Inf or NaN somewhere."""
    part[tuple(s.random.integers(0, part.shape))] = s.random.choice([np.inf, -np.inf, np.nan])


def narrow(x: Array, dtype: DType) -> Array:
    """Rounded to float32 and then to ``dtype``; too large is Inf."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype.numpy)


def signs(kind: str, count: int, rng: Array | None) -> Any:
    """``blocks.hadamard``'s signs of so many indices."""
    if kind != "random":
        return kind
    at = np.arange(count, dtype=np.uint64)
    index = np.uint64(rules.SIGNS_AT) + at // np.uint64(32)
    words = philox(rng, index).astype(np.uint64)  # type: ignore[arg-type]
    return np.where(words >> (at % np.uint64(32)) & np.uint64(1), np.float32(-1), np.float32(1))


def rotated(x: Array, n: int, kind: str, along: int, rng: Array | None) -> Array:
    """x in float32, rotated along its last (``along`` 1) or first dimension."""
    lying = x.astype(np.float32) if along else x.astype(np.float32).T
    found = rules.hadamard(lying, n, signs(kind, lying.shape[1], rng)) if n else lying
    return np.ascontiguousarray(found if along else found.T)


def rotate(
    s: Sampler,
    m: int,
    n: int,
    size: int = 16,
    kind: str = "plus",
    along: int = 1,
    out: str = "x",
    amax: float | None = 0.001,
    strewn: bool = True,
) -> Arguments:
    """``size``: values that are rotated together; ``kind``: of signs; ``out``: "x", its dtype, "float32", or
    nothing."""
    return {
        "x": s.put(drawn(s, m, n, s.dtype)) if strewn else s.normal(m, n),
        "out": s.output(m, n, dtype=float32 if out == "float32" else s.dtype) if out else None,
        "amax": s.scalar(amax),
        "n": size,
        "signs": kind,
        "along": along,
        "rng": s.rng() if kind == "random" else None,
    }


def rotate_oracle(a: Any) -> Results:
    """``blocks.hadamard``, one rounding."""
    values = rotated(a.x, a.n, a.signs, a.along, a.rng)
    found: Results = {} if a.amax is None else {"amax": np.maximum(a.amax, largest(values))}
    return found if a.out is None else {**found, "out": values.astype(a.out.dtype)}


def rotate_back(
    s: Sampler,
    m: int,
    n: int,
    size: int = 16,
    kind: str = "plus",
    along: int = 1,
    out: str = "x",
    mask: bool = False,
    strewn: bool = True,
) -> Arguments:
    """``mask``: whether some elements count as 0; else as ``rotate``."""
    return {
        "x": s.put(drawn(s, m, n, s.dtype)) if strewn else s.normal(m, n),
        "out": s.output(m, n, dtype=float32 if out == "float32" else s.dtype),
        "inside": s.put((s.random.random((m, n)) > 0.2).astype(np.uint8), uint8) if mask else None,
        "n": size,
        "signs": kind,
        "along": along,
        "rng": s.rng() if size and kind == "random" else None,
    }


def rotate_back_oracle(a: Any) -> Results:
    """The rotation without signs is its own reverse; theirs follows."""
    x = a.x.astype(np.float32)
    x = x if a.inside is None else np.where(a.inside != 0, x, np.float32(0))
    values = rotated(x, a.n, "plus", a.along, None)
    whole = values.shape[a.along] // a.n * a.n if a.n else 0
    own = signs(a.signs, whole, a.rng)
    factors = rules.signs_of(own, whole)
    values = values if a.along else values.T
    values[:, :whole] *= factors
    return {"out": (values if a.along else values.T).astype(a.out.dtype)}


SHAPES = ((128, 128), (256, 384), (130, 70), (1, 1), (17, 129), (5, 512), (300, 40), (0, 64), (64, 0))
ROTATIONS = {
    f"{size}-{kind}": {"size": size, "kind": kind}
    for size in (16, 32, 64, 128)
    for kind in ("plus", "te", "random")
}
_ROTATE = {
    **typed(product("along{along}-{case}", {"along": (1, 0), "case": sized(SHAPES)}, size=32, kind="random")),
    **product(
        "along{along}-{rotation}", {"along": (1, 0), "rotation": ROTATIONS}, m=260, n=264, dtype=bfloat16
    ),
    **product(
        "{dtype.name}-along{along}-float32-out",
        {"dtype": (bfloat16, float16), "along": (1, 0)},
        m=150,
        n=200,
        out="float32",
    ),
    **product(
        "along{along}-{only}",
        {"along": (1, 0), "only": {"amax": {"out": ""}, "out": {"amax": None}}},
        m=70,
        n=96,
    ),
}

_BACK = {
    **typed(
        product(
            "along{along}-{case}", {"along": (1, 0), "case": sized(SHAPES)}, size=32, kind="random", mask=True
        )
    ),
    **product(
        "along{along}-{rotation}-{mask}",
        {
            "along": (1, 0),
            "rotation": {**ROTATIONS, "none": {"size": 0}},
            "mask": {"masked": {"mask": True}, "all": {}},
        },
        m=150,
        n=264,
    ),
    **product(
        "{dtype.name}-along{along}-float32",
        {"dtype": (bfloat16, float16), "along": (1, 0)},
        m=150,
        n=200,
        out="float32",
        mask=True,
    ),
}

TESTS = (
    KernelTest("rotate", rotate, rotate_oracle, _ROTATE, {"strewn": False}),
    KernelTest("rotate_back", rotate_back, rotate_back_oracle, _BACK, {"strewn": False}),
)
