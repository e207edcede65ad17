"""A float32 exponential that LLVM can turn into SIMD code, for the Numba kernels: libm's is a scalar call.

Range reduction by log 2 in two parts and a degree-6 polynomial (Cephes' expf constants); within 2 ulp of exp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.backends.reference.threads import njit

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P5, _P4, _P3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P2, _P1, _P0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ROUND = np.float32(12582912)  # 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
_LEAST, _MOST = np.float32(-87.3), np.float32(88)
_ZERO, _ONE, _INF = np.float32(0), np.float32(1), np.float32(np.inf)
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)


@njit(fastmath={"contract"})
def exp32(x: Any) -> Any:
    """exp(x) of a float32: 0 below -87.3 (where it would be subnormal), Inf above 88, NaN of NaN."""
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _P5
    p = p * r + _P4
    p = p * r + _P3
    p = p * r + _P2
    p = p * r + _P1
    p = p * r + _P0
    power = np.int32((np.float32(shifted).view(np.int32) + _BIAS) << _MANTISSA_BITS).view(np.float32)
    value = (p * r * r + r + _ONE) * power
    value = _ZERO if x < _LEAST else value
    return _INF if x > _MOST else value
