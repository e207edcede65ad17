"""Float32 division that is rounded to nearest even on every platform.

XLA's GPU code divides float32 numbers to within two units in the last place, and its CPU code takes subnormal
numbers for 0; scales are promised bit for bit. So the quotient is made from integers: long division of the
significands, up to eight bits a step, since the rest has 24 bits and a word 32 (IEEE 754-2019, 5.4.1, says
what it must round to). A program has this once for each quantised tensor: a step a bit would be half of what
XLA compiles for a small layer.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

_FRACTION, _BIAS = 23, 150  # bits of the fraction; a float32 is significand * 2**(exponent - _BIAS)
_LARGEST = 0x7F7FFFFF  # FLT_MAX's bits


def divide(numerator: float, x: Any) -> Any:
    """``numerator / x`` in float32, FLT_MAX where that overflows.

    ``numerator``: a positive normal float32 number. ``x``: float32 of any shape, positive and finite;
    subnormal numbers count in full. A quotient below the normal numbers becomes 0.
    """
    significand, power = math.frexp(np.float32(numerator))
    top = jnp.uint32(int(significand * 2**24))
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent, fraction = (bits >> _FRACTION).astype(jnp.int32), bits & jnp.uint32(0x7FFFFF)
    shift = jnp.where(exponent == 0, lax.clz(fraction).astype(jnp.int32) - 8, 0)
    below = jnp.where(
        exponent == 0, fraction << shift.astype(jnp.uint32), fraction | jnp.uint32(1 << _FRACTION)
    )
    exponent = jnp.where(exponent == 0, 1 - shift, exponent)

    quotient, rest = top // below, top % below
    for more in (8, 8, 8, 1):
        rest = rest << more
        quotient, rest = (quotient << more) | lax.div(rest, below), lax.rem(rest, below)

    drop = jnp.where(quotient >= jnp.uint32(1 << 25), 2, 1).astype(jnp.uint32)  # 24 of 26 or 25 bits stay
    low, half, kept = quotient & ((jnp.uint32(1) << drop) - 1), jnp.uint32(1) << (drop - 1), quotient >> drop
    up = (low > half) | ((low == half) & ((rest > 0) | ((kept & 1) == 1)))
    rounded = kept + up.astype(jnp.uint32)  # at most 2**24: the carry goes into the exponent below

    biased = (power - 24) - (exponent - _BIAS) - 25 + drop.astype(jnp.int32) + _BIAS
    normal = ((jnp.maximum(biased, 1) - 1).astype(jnp.uint32) << _FRACTION) + rounded
    made = jnp.where(
        (biased > 254) | (normal > _LARGEST),
        jnp.uint32(_LARGEST),
        jnp.where(biased < 1, jnp.uint32(0), normal),
    )
    return lax.bitcast_convert_type(made, jnp.float32)
