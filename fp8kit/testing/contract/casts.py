"""What a ``Cast`` must hold, by the codec, and the scales that current scaling's rule makes, of tensors and
of tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import codec, formats
from fp8kit.arrays import Shape, Tile
from fp8kit.backends.protocol import BLOCK, block_shapes
from fp8kit.formats import Format, float32
from fp8kit.testing.compare import Array


def largest(x: Array) -> Any:
    """The largest magnitude in float32; NaN counts as nothing."""
    with np.errstate(over="ignore"):
        return np.fmax.reduce(np.abs(x.astype(np.float32)), axis=None, initial=np.float32(0))


def scale_of(
    amax: Array, fp8_max: float, power_2: bool, epsilon: float, for_inf: float = float32.max
) -> Array:
    """``scale_from_amax``, one element at a time, as its text reads."""
    scale = np.ones_like(amax)
    with np.errstate(all="ignore"):
        for i, raw in enumerate(amax):
            a = raw if np.isnan(raw) else max(raw, np.float32(epsilon))
            if not (np.isfinite(a) and a > 0):
                continue
            s = np.float32(fp8_max) / a
            s = np.float32(for_inf) if np.isinf(s) else s
            scale[i] = np.float32(2.0 ** (np.frexp(s)[1] - 1)) if power_2 and s > 0 else s
    return scale


def scaled(x: Array, scale: Any) -> Array:
    """x * scale in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x.astype(np.float32) * scale)


def grid(m: int, n: int, tile: Tile) -> Tile:
    """How many tiles lie along each dimension, at least one."""
    return max(1, -(-m // tile[0])), max(1, -(-n // tile[1]))


def each(per_tile: Array, shape: Shape, tile: Tile) -> Array:
    """Every element's entry of an array of tiles."""
    rows, columns = shape
    down, across = np.indices((rows, columns))
    return np.asarray(per_tile.reshape(grid(rows, columns, tile))[down // tile[0], across // tile[1]])


def tile_amax(x: Array, tile: Tile, start: Array) -> Array:
    """Tile by tile, the slow and obvious way."""
    found = start.reshape(grid(x.shape[0], x.shape[1], tile)).copy()
    for i, j in np.ndindex(found.shape):
        part = x[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        found[i, j] = max(found[i, j], largest(part))
    return found.reshape(-1)


def operand(
    x: Array, tile: Tile, fmt: Format, power_2: bool, epsilon: float, for_inf: float
) -> tuple[Array, Array]:
    """(codes, scale_inv in cuBLASLt's layout) of one orientation, from the rule's text."""
    rows, columns = x.shape
    codes_shape, layout_shape = block_shapes(rows, columns, tile)
    codes, layout = np.zeros(codes_shape, np.uint8), np.ones(layout_shape, np.float32)
    inverse = np.ones(grid(rows, columns, tile), np.float32)
    amax = tile_amax(x, tile, np.zeros(inverse.size, np.float32))
    scale = scale_of(amax, fmt.max, power_2, epsilon, for_inf)
    codes[:rows, :columns] = codec.encode(scaled(x, each(scale, x.shape, tile)), fmt)
    inverse /= scale.reshape(inverse.shape)
    inverse = inverse.T if tile[0] == 1 else inverse
    layout[: inverse.shape[0], : inverse.shape[1]] = inverse
    return codes, layout


def each_scale(layout: Array, shape: Shape, tile: Tile) -> Array:
    """The scale_inv of every code."""
    rows = layout.T if tile[0] == 1 else np.repeat(layout, BLOCK, 0)
    return np.repeat(rows, BLOCK, 1)[: shape[0], : shape[1]]


def cast_results(a: Any, values: Any) -> dict[str, Array]:
    """Every array of ``a.cast``, and ``a.amax``, after ``values`` were cast; where there is an ``a.second``,
    half of their columns to each."""
    found: dict[str, Array] = {}
    second = getattr(a, "second", None)
    half = values.shape[1] // 2 if second is not None else None
    for name, cast in (("cast", a.cast), ("second", second)):
        if cast is None:
            continue
        part = values[:, half:] if name == "second" else values[:, :half]
        rule, fmt = cast.rule, cast.format
        if cast.tile is not None:
            found |= _by_blocks(name, cast, part)
            continue
        scale = cast.scale if rule is None else scale_of(cast.amax, fmt.max, rule.power_2, rule.epsilon)
        codes = np.zeros(cast.q_t.shape[::-1] if cast.q is None else cast.q.shape, np.uint8)
        codes[: part.shape[0], : part.shape[1]] = codec.encode(scaled(part, scale), fmt)
        found |= {f"{name}.q": codes, f"{name}.q_t": np.ascontiguousarray(codes.T)}
        found[f"{name}.scale_inv"] = np.float32(1) / scale
        known = cast.amax is None or rule is not None
        found[f"{name}.amax"] = cast.amax if known else np.maximum(cast.amax, largest(part))
    if getattr(a, "amax", None) is not None:
        found["amax"] = np.maximum(a.amax, largest(values))
    return found


def _by_blocks(name: str, cast: Any, values: Array) -> dict[str, Array]:
    """Every array of a cast by blocks."""
    how = cast.tile, cast.format, cast.rule.power_2, cast.rule.epsilon, formats.dtype(values.dtype).max
    (q, inverse), (q_t, inverse_t) = operand(values, *how), operand(values.T, *how)
    found = {"q": q, "scale_inv": inverse, "q_t": q_t, "scale_inv_t": inverse_t}
    return {f"{name}.{part}": array for part, array in found.items()}
