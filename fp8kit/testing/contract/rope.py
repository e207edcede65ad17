"""Contract cases of the rotary embedding, against complex rotations in float64.

float32's cos and sin are within 2 units of the last place; two products and a sum follow: 6 u of the terms'
absolute values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit.arrays import Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16, float32
from fp8kit.testing.compare import assert_close, assert_same_bits
from fp8kit.testing.contract import poisoned, put
from fp8kit.testing.contract.elementwise import ROUNDOFF, Array, draw, host, table, wide

_HEADS, _BATCH, _LENGTH = 3, 2, 9
# a sequence of nothing, and two rows of no sequence after the last
_CU = np.array([0, 4, 4, 9, 14], np.int32)
# where they start with rows of no sequence before, between and after them
_GAPS = np.array([1, 8, 8, 14, 19], np.int32)
_TOKENS = 22


def tokens_of(first: Array) -> list[tuple[int, int, int]]:
    """(token, sequence, place in it) of each token of a sequence, where the sequences of ``_CU`` start at
    ``first``."""
    return [(int(first[b]) + i, b, i) for b, length in enumerate(np.diff(_CU)) for i in range(length)]


def angles(form: str, freqs: Array, starts: Array | None, first: Array = _CU) -> Array:
    """The angles of every token, float64 (..., 1, rotated), from the rule's words; any for tokens of no
    sequence."""
    if form == "thd":
        place = np.zeros(_TOKENS, int)
        for token, b, i in tokens_of(first):
            place[token] = i + (0 if starts is None else starts[b])
    else:
        place = np.arange(_LENGTH)[:, None] + (np.zeros(_BATCH, int) if starts is None else starts)
        place = place if form == "sbhd" else place.T
    return np.asarray(wide(freqs)[place][..., None, :])


def rotate(x: Array, angle: Array, interleaved: bool, back: bool) -> tuple[Array, Array]:
    """Values in float64 and the sizes of their terms. Each feature f of a pair turns by its own angle;
    ``back``: the transposed matrix."""
    rotated = angle.shape[-1]
    partner = np.arange(rotated) ^ 1 if interleaved else (np.arange(rotated) + rotated // 2) % rotated
    sign = np.where(np.arange(rotated) < partner, -1.0, 1.0)
    out, size = wide(x), np.abs(wide(x))
    y = wide(x)[..., :rotated]
    sine = sign * np.sin(angle)
    other = y[..., partner] * (sine[..., partner] if back else sine)
    out[..., :rotated] = y * np.cos(angle) + other
    size[..., :rotated] = np.abs(y * np.cos(angle)) + np.abs(other) + np.abs(y) + np.abs(y[..., partner])
    return out, size


def _case(
    dtype: DType,
    form: str,
    way: str,
    depth: int = 16,
    rotated: int = 16,
    interleaved: bool = False,
    starts: bool = False,
    where: str = "apart",
    doubled: bool = True,
    gaps: bool = False,
) -> Callable[[Kernels, Device], None]:
    """``where``: y is "apart", "in-place" (x's memory), or both are "packed" among other heads. ``doubled``:
    both features of a pair turn by the same angle, as in the paper. ``gaps``: there are rows between the
    sequences. Rows of no sequence hold NaN."""

    def run(kernels: Kernels, device: Device) -> None:
        leading = {"sbhd": (_LENGTH, _BATCH), "bshd": (_BATCH, _LENGTH), "thd": (_TOKENS,)}[form]
        x = draw(1, (*leading, _HEADS, depth), dtype)
        begin = _GAPS if gaps else _CU
        none = np.ones(leading, bool) if form == "thd" else np.zeros(leading, bool)
        none[[token for token, *_ in tokens_of(begin)] if form == "thd" else ()] = False
        x[none] = np.nan
        # as many as the longest sequence has
        freqs = draw(2, (16 if starts else 9 if form != "thd" else 5, rotated), float32, 3.0)
        if doubled:
            half = freqs[:, : rotated // 2]
            freqs = np.repeat(half, 2, axis=1) if interleaved else np.concatenate([half, half], axis=1)
        first = np.array([5, 0, 3, 11], np.int32)[: _BATCH if form != "thd" else None] if starts else None
        axis = len(leading)
        if where == "packed":
            joint = np.concatenate([x, x], axis=axis)
            source = put(joint, device).slice(axis, 0, _HEADS)
            whole = poisoned(joint.shape, dtype, device)
            target = whole.slice(axis, _HEADS, _HEADS)
        else:
            source = put(x, device)
            target = source if where == "in-place" else poisoned(x.shape, dtype, device)
        places = None if first is None else put(first, device)
        cu, at = (put(_CU, device), put(begin, device)) if form == "thd" else (None, None)
        getattr(kernels, way)(source, put(freqs, device), target, places, cu, at, form, interleaved, 0)
        x[none] = 0
        want, size = rotate(x, angles(form, freqs, first, begin), interleaved, way == "rope_bwd")
        assert_close("y", host(target), want, dtype, 6 * ROUNDOFF * size)
        assert_same_bits("features beyond", host(target)[..., rotated:], x[..., rotated:])

    return run


def _beyond(kernels: Kernels, device: Device) -> None:
    x, y = draw(1, (2, 1, 1, 4), float32), poisoned((2, 1, 1, 4), float32, device)
    freqs, starts = put(np.zeros((3, 2), np.float32), device), put(np.array([2], np.int32), device)
    kernels.rope_fwd(put(x, device), freqs, y, starts, None, None, "sbhd", False, 0)
    want = x.copy()
    want[1, ..., :2] = np.nan
    assert_close("y", host(y), want, float32)


_ROWS: dict[str, Callable[[DType, str], Callable[[Kernels, Device], None]]] = {
    f"{form}-{name}": (
        lambda dtype, way, form=form, own=options: _case(dtype, form, way, **own)  # type: ignore[misc]
    )
    for form in ("sbhd", "bshd", "thd")
    for name, options in {
        "halves": {},
        "interleaved": {"interleaved": True},
        "partial": {"depth": 24, "rotated": 10, "where": "packed"},
        "partial-interleaved": {"depth": 7, "rotated": 6, "interleaved": True, "where": "in-place"},
        "offsets": {"starts": True, "where": "in-place"},
        "own-angles": {"doubled": False, "where": "packed"},
        "own-angles-interleaved": {"doubled": False, "interleaved": True},
    }.items()
}
_ROWS |= {
    f"thd-gaps-{name}": (
        lambda dtype, way, own=options: _case(dtype, "thd", way, gaps=True, **own)  # type: ignore[misc]
    )
    for name, options in {
        "offsets": {"starts": True, "where": "in-place"},
        "partial": {"depth": 24, "rotated": 10, "where": "packed"},
    }.items()
}

CASES = [
    case
    for way in ("rope_fwd", "rope_bwd")
    for case in table(
        way,
        {
            f"{d.name}-{name}": make(d, way)
            for d in HIGH_PRECISION
            for name, make in _ROWS.items()
            if d in (float32, bfloat16) or "partial" in name
        },
    )
]
CASES += table("rope_fwd", {"positions-beyond": _beyond})
