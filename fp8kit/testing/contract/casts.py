"""What a ``Cast`` must hold, by the codec, and the scales that current scaling's rule makes."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.formats import float32
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
