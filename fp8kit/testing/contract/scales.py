"""Amaxes, bit for bit; current scaling's rule and delayed scaling's update, as their texts read."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.arrays import Tile
from fp8kit.formats import HIGH_PRECISION, float32, float64
from fp8kit.recipe import UNFILLED
from fp8kit.testing.contract import (
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    product,
    sized,
    typed,
)
from fp8kit.testing.contract.casts import grid, scale_of, tile_amax

WHOLE, ROW = (0, 0), (1, 0)  # 0: as many as the matrix has
SIZES = ((1, 1), (33, 65), (128, 256), (5, 1000), (0, 8))
TILINGS: dict[str, Options] = {
    "tensor": {"tile": WHOLE},
    "row": {"tile": ROW},
    "1x128": {"tile": (1, 128)},
    "128x128": {"tile": (128, 128)},
    "1x32": {"tile": (1, 32)},
    "32x1": {"tile": (32, 1)},
}


def tile_of(tile: Tile, m: int, n: int) -> Tile:
    """A tile's rows and columns."""
    return tile[0] or max(m, 1), tile[1] or max(n, 1)


def tile_count(m: int, n: int, tile: Tile) -> int:
    """How many tiles there are."""
    down, across = grid(m, n, tile_of(tile, m, n))
    return down * across


def amax(
    s: Sampler,
    m: int,
    n: int,
    tile: Tile = WHOLE,
    start: float = 0.0,
    values: Any = None,
    strewn: bool = True,
) -> Arguments:
    """``values``: x; else drawn."""
    x = s.put(values) if values is not None else s.strewn(m, n, finite=True) if strewn else s.normal(m, n)
    return {"x": x, "amax": s.full(start, tile_count(m, n, tile)), "tile": tile_of(tile, m, n)}


def amax_oracle(a: Any) -> Results:
    """See ``tile_amax``."""
    return {"amax": tile_amax(a.x, a.tile, a.amax)}


def scale_from_amax(
    s: Sampler,
    m: int,
    n: int,
    fp8_max: float = 448.0,
    power_2: bool = False,
    epsilon: float = 0.0,
    for_inf: float = float32.max,
) -> Arguments:
    """Amaxes of every binade, and special ones."""
    count = m * n or 511

    def amaxes() -> Array:
        special = [0, np.inf, np.nan, 1e-45, 1e-40, 1.1754944e-38, fp8_max, 1.0, 3.0, float32.max, 1e-37]
        drawn = np.exp2(s.random.uniform(-140, 127, max(count - len(special), 0)))
        return np.array([*special, *drawn], np.float32)[:count]

    return {
        "amax": s.array((count,), float32, amaxes),
        "scale": s.output(count, dtype=float32),
        "scale_inv": s.output(count, dtype=float32),
        "fp8_max": fp8_max,
        "power_2": power_2,
        "epsilon": epsilon,
        "value_for_inf": for_inf,
    }


def scale_from_amax_oracle(a: Any) -> Results:
    """See ``scale_of``."""
    scale = scale_of(a.amax, a.fp8_max, a.power_2, a.epsilon, a.value_for_inf)
    return {"scale": scale, "scale_inv": np.float32(1) / scale}


_HISTORY = np.array([0, np.nan, np.inf, 1e-45, 1e-42, 3.0, 2.0**100, 2.0**118, float32.max], np.float32)


def update_delayed_(
    s: Sampler,
    m: int,
    n: int,
    margin: int = 0,
    recent: bool = False,
    newest: bool = False,
    power_2: bool = False,
    growth: float | None = None,
    by_window: bool = False,
) -> Arguments:
    """Histories of ``m`` updates, with special amaxes among them, of ``n`` states, or of 1, 7 and 300;
    ``newest``: not in the newest row, as after an ordinary step. With ``growth`` a third of them hold no
    other row, with ``by_window`` the oldest is unfilled or missing in some."""

    def history(count: int) -> Array:
        values = np.abs(s.draw((m, count)))
        strewn = s.random.random(values.shape) < 0.3
        strewn[0] &= not newest
        values[strewn] = s.random.choice(_HISTORY, int(strewn.sum()))
        if growth is not None:
            values[1:, s.random.random(count) < 1 / 3] = 0
        if by_window:
            oldest = s.random.choice([0, UNFILLED, 1], count)
            values[1:2] = np.where(oldest < 1, oldest, values[1:2])
        return values

    counts = (n,) if n else (1, 7, 300)
    return {
        "scales": [s.put(s.random.uniform(0.01, 30, count), float32) for count in counts],
        "scale_invs": [s.full(5.0, count) for count in counts],
        "histories": [s.put(history(count)) for count in counts],
        "fp8_maxes": (448.0, 57344.0, 448.0)[: len(counts)],
        "margin": margin,
        "most_recent": recent,
        "power_2": power_2,
        "growth": growth,
        "by_window": by_window,
    }


def update_delayed_oracle(a: Any) -> Results:
    """One state at a time, step by step as the rule reads."""
    found: Results = {}
    for i, (scale, inverse, history, fp8_max) in enumerate(
        zip(a.scales, a.scale_invs, a.histories, a.fp8_maxes, strict=True)
    ):
        scale, inverse, rows = scale.copy(), inverse.copy(), history.copy()
        for t in np.flatnonzero(history[0] != 0):
            amax = rows[0, t] if a.most_recent else np.fmax.reduce(rows[:, t], initial=0)
            stored = rows[0, t]
            if a.growth is not None:
                amax, stored = _bound(rows[:, t], np.float32(a.growth))
            oldest = rows[min(1, len(rows) - 1), t]
            full = a.by_window and oldest > np.float32(UNFILLED)
            if np.isfinite(amax) and amax > 0 and (not a.by_window or full or oldest == 0):
                with np.errstate(over="ignore", under="ignore", divide="ignore"):
                    fresh = np.float32(fp8_max * 2.0**-a.margin) / np.float32(amax)
                scale[t] = np.clip(fresh, np.float32(2.0**-126), np.float32(float32.max))
                if a.power_2:
                    scale[t] = np.ldexp(np.float32(0.5), np.frexp(scale[t])[1])
            inverse[t] = np.float32(1) / scale[t]
            rolled = [UNFILLED] * (len(rows) - 1) if full else [*rows[2:, t], stored][: len(rows) - 1]
            rows[:, t] = [0, *rolled]
        found |= {f"scales[{i}]": scale, f"scale_invs[{i}]": inverse, f"histories[{i}]": rows}
    return found


def _bound(rows: Array, growth: Any) -> tuple[Any, Any]:
    """(a bound of the next amax, the measure that is kept) of one tensor's history."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = [row + growth * np.float32(len(rows) - i + 1) for i, row in enumerate(rows) if i and row > 0]
        if found:
            return max(found), 0
        return rows[0] + growth, rows[0] if np.isfinite(rows[0]) else 0


def _specials(dtype: Any) -> Array:
    x = np.full((4, 37), np.nan, dtype.numpy)
    x[1, 5], x[2, 36], x[3, 0] = -np.inf, -(2.0**-14), -0.0
    return x


_TINY = np.array([[1e-46], [-1e-45], [1e-40], [1e300]])
_AMAX = typed({**sized(SIZES), **product("{tiling}", {"tiling": TILINGS}, m=130, n=300)})
_RULES = ((448.0, 0.0, float32.max), (57344.0, 1e-6, float32.max), (448.0, 0.0, 65504.0))
# updates kept, margin; of those where the most recent amax counts
_MARGINS = ((1, 0), (4, 0), (16, 2), (1024, -1), (2100, 0), (3, 20))
_RECENT = ((4, 0), (2, 9), (2, -20))
_NEWEST = {"": {}, "-newest": {"newest": True}}
_GROWTHS = ((True, None), (False, 0.0), (False, 0.25), (True, 3e38))
_UPDATES = {
    **product("H{m}-margin{margin}{newest}", {"m margin": _MARGINS, "newest": _NEWEST}),
    **product("H{m}-margin{margin}-recent{newest}", {"m margin": _RECENT, "newest": _NEWEST}, recent=True),
    **product("H{m}-power2-growth{growth}", {"m": (1, 2, 16, 2100), "power_2 growth": _GROWTHS}, margin=1),
    **product(
        "H{m}-window{case}",
        {"m": (1, 2, 16, 2100), "case": {"": {"power_2": True}, "-recent": {"recent": True}}},
        by_window=True,
    ),
}

TESTS = (
    KernelTest(
        "amax",
        amax,
        amax_oracle,
        {
            **_AMAX,
            **product("{case}-running", {"case": _AMAX}, start=40.0),
            **product(
                "{dtype.name}-specials",
                {"dtype values": [(dtype, _specials(dtype)) for dtype in HIGH_PRECISION]},
                m=4,
                n=37,
                tile=ROW,
            ),
            "float64-tiny": {"dtype": float64, "m": 4, "n": 1, "tile": (1, 1), "values": _TINY},
        },
        {"strewn": False},
    ),
    KernelTest(
        "scale_from_amax",
        scale_from_amax,
        scale_from_amax_oracle,
        product(
            "{fp8_max:g}-eps{epsilon:g}-inf{for_inf:.3g}{power}",
            {
                "power": {"": {"power_2": False}, "-power2": {"power_2": True}},
                "fp8_max epsilon for_inf": _RULES,
            },
        ),
    ),
    KernelTest("update_delayed_", update_delayed_, update_delayed_oracle, _UPDATES),
)
