"""NVFP4 once more, from the paper's formulas and by ml_dtypes: it shares nothing with fp8kit."""

from __future__ import annotations

import numpy as np
from ml_dtypes import float4_e2m1fn, float8_e4m3fn

MAX = np.finfo(np.float32).max


def transcribed(x: np.ndarray, amax: np.ndarray, tensor_amax: np.float32) -> tuple[np.ndarray, ...]:
    """NVFP4 of values that each have the amax of their block, from the paper's formulas, by ml_dtypes."""
    f = np.float32
    with np.errstate(over="ignore", divide="ignore"):
        most = f(448) * f(6)
        s = min(most / tensor_amax, f(MAX)) if tensor_amax > 0 else f(1)
        d = f(1) / s
        c = np.minimum(amax * (s * (f(1) / f(6))), f(448)).astype(float8_e4m3fn)
        enc = np.minimum(f(1) / (c.astype(f) * d), f(MAX))
        q = np.clip(x * enc, f(-6), f(6)).astype(float4_e2m1fn)
    return c.view(np.uint8), q.view(np.uint8), c.astype(f) * d, d
