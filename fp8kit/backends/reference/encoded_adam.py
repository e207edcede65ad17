"""Adam on states that are kept in fewer bits; see ``fp8kit.moments``.

``log2`` and ``exp2`` are made of float32 additions, multiplications and a division alone, in the order of
``raw_kernels/encoded_adam.cu``, so that engines agree bit for bit; a libm's would not. Both are within 2^-20
of the exact value, absolute and relative, for the arguments that occur.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Array, Float32, f32, quiet, store
from fp8kit.backends.reference.cast_rows import encode_row, rounding
from fp8kit.backends.reference.optim import adam, is_set, number, unscaling
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.formats import E4M3, float32, int16
from fp8kit.moments import LEAST_EXPONENT, MOST_EXPONENT, MomentFormat, StateFormats, bias_correction

_TASK = 1 << 15  # elements that a task of a parallel loop takes: whole blocks
_TINY, _UP, _PLACES = np.float32(2.0**-126), np.float32(2.0**24), np.float32(24)
_ROOT_HALF, _MANTISSA_BITS, _BIAS = np.int32(0x3F3504F3), np.int32(23), np.int32(127)
_ZERO, _ONE, _INF, _NAN = np.float32(0), np.float32(1), np.float32(np.inf), np.float32(np.nan)
# log2((1 + s) / (1 - s)) = sum of 2 s^(2j + 1) / ((2j + 1) ln 2)
_L1, _L3, _L5, _L7, _L9 = (np.float32(2 / (n * math.log(2))) for n in (1, 3, 5, 7, 9))
# 2^f = sum of (f ln 2)^j / j!
_E1, _E2, _E3, _E4, _E5, _E6, _E7 = (np.float32(math.log(2) ** j / math.factorial(j)) for j in range(1, 8))
_ROUND, _LEAST = np.float32(12582912), np.float32(-126)
_TOP = np.float32(E4M3.max)
_RANGE = np.float32(16 * math.log2(E4M3.max**2 / 2))
_LEAST_K, _MOST_K, _SIXTEENTH = np.float32(LEAST_EXPONENT), np.float32(MOST_EXPONENT), np.float32(1 / 16)


@njit
def log2(a: Any) -> Any:
    """log2 of a float32 above 0, subnormals too."""
    tiny = a < _TINY
    bits = np.float32(a * _UP if tiny else a).view(np.int32)
    exponent = np.int32(np.int32(bits - _ROOT_HALF) >> _MANTISSA_BITS)
    m = np.int32(bits - np.int32(exponent << _MANTISSA_BITS)).view(np.float32)
    s = (m - _ONE) / (m + _ONE)
    z = s * s
    p = _L9 * z + _L7
    p = p * z + _L5
    p = p * z + _L3
    p = p * z + _L1
    whole = np.float32(exponent)
    whole = whole - _PLACES if tiny else whole
    return s * p + whole


@njit
def exp2(t: Any) -> Any:
    """2^t of a float32 up to 0; 2^-126 from -126 down."""
    t = max(t, _LEAST)
    shifted = t + _ROUND
    n = shifted - _ROUND
    f = t - n
    p = _E7 * f + _E6
    p = p * f + _E5
    p = p * f + _E4
    p = p * f + _E3
    p = p * f + _E2
    p = p * f + _E1
    p = p * f + _ONE
    power = np.int32((np.int32(n) + _BIAS) << _MANTISSA_BITS).view(np.float32)
    return p * power


@quiet
def encoded_adam_(
    params: Sequence[ArrayView],
    grads: Sequence[ArrayView],
    exp_avgs: Sequence[ArrayView],
    exp_avg_scales: Sequence[ArrayView | None],
    exp_avg_sqs: Sequence[ArrayView],
    exp_avg_sq_scales: Sequence[ArrayView | None],
    masters: Sequence[ArrayView | None],
    master_scales: Sequence[ArrayView | None],
    formats: StateFormats,
    decoupled: bool,
    lr: float | ArrayView,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decays: Sequence[float],
    step: int | ArrayView,
    inv_scale: ArrayView | None,
    found_inf: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """One step of Adam on encoded states; see ``protocol.Kernels.encoded_adam_``."""
    if is_set(found_inf):
        return
    first, second = (bias_correction(beta, int(number(step))) for beta in (beta1, beta2))
    usual = number(lr), beta1, 1 - beta1, beta2, 1 - beta2, epsilon, first, second
    numbers, factor = [np.float32(v) for v in usual], unscaling(inv_scale)
    lists = (params, grads, exp_avgs, exp_avg_scales, exp_avg_sqs, exp_avg_sq_scales, masters, master_scales)
    for param, grad, m, m_scale, v, v_scale, master, master_scale, decay in zip(
        *lists, weight_decays, strict=True
    ):
        if not param.size:
            continue
        weights = _weights(param, master, master_scale)
        means, squares = _decoded(m, m_scale, formats.exp_avg), _decoded(v, v_scale, formats.exp_avg_sq)
        gradient = np.ascontiguousarray(f32(grad)).reshape(-1)
        loose, tied = (np.float32(decay * on) for on in (decoupled, not decoupled))
        adam(weights, gradient, means, squares, (*numbers, loose, tied, factor))
        _encode(means, m, m_scale, formats.exp_avg)
        _encode(squares, v, v_scale, formats.exp_avg_sq)
        _keep(weights, param, master, master_scale)


# --- masters -----------------------------------------------------------------------------------------------

_HALF = MomentFormat("float16", power_2=True)


def _weights(param: ArrayView, master: ArrayView | None, scale: ArrayView | None) -> Float32:
    """Returns what the step works on, flat: a float32 array's own memory, or a new one."""
    if master is None:
        return f32(param).reshape(-1)
    if master.dtype is float32:
        return f32(master).reshape(-1)
    if master.dtype is int16:
        upper = param.numpy().view(np.uint16).reshape(-1).astype(np.uint32) << np.uint32(16)
        bits: Array = upper.view(np.int32) + master.numpy().reshape(-1).astype(np.int32)
        return bits.view(np.float32)
    if scale is None or not scale.numpy()[0] > 0:
        return f32(param).reshape(-1).copy()
    return _decoded(master, scale, _HALF)


def _keep(weights: Float32, param: ArrayView, master: ArrayView | None, scale: ArrayView | None) -> None:
    if master is not None and master.dtype is int16:
        bits = np.where(np.isnan(weights), np.int32(0x7FC00000), weights.view(np.int32))
        upper = (bits + np.int32(0x8000)) >> np.int32(16)
        param.view(int16).numpy().reshape(-1)[:] = upper.astype(np.int16)
        master.numpy().reshape(-1)[:] = (bits - (upper << np.int32(16))).astype(np.int16)
        return
    store(param, weights.reshape(param.shape))
    if master is not None and master.dtype is not float32:
        _encode(weights, master, scale, _HALF)


# --- moments -----------------------------------------------------------------------------------------------


def _decoded(view: ArrayView, scale: ArrayView | None, kept: MomentFormat) -> Float32:
    """Returns a state's float32 values, flat: its own memory where it is float32."""
    if kept.format == "float32":
        return f32(view).reshape(-1)
    values = np.ascontiguousarray(view.numpy()).reshape(-1)
    if kept.fp8 is not None:
        values = codec.table(kept.fp8).astype(np.float32)[values]
    values = values.astype(np.float32, copy=False)
    if scale is None:
        return values
    if kept.block is None:
        values *= scale.numpy()[0]
    elif kept.expansion:
        _contract(values, scale.numpy(), kept.block)
    else:
        _multiply(values, scale.numpy(), kept.block)
    return values


def _encode(values: Float32, view: ArrayView, scale: ArrayView | None, kept: MomentFormat) -> None:
    """Write float32 values into a state, and its scales; ``values`` are used up."""
    if scale is None:
        store(view, values.reshape(view.shape))
        return
    scales = scale.numpy()
    top = np.float32(kept.top)
    if kept.block is None:
        _by_tensor(values, scales, top, kept.power_2)
    elif kept.expansion:
        _expand(values, scales, kept.block)
    else:
        _by_blocks(values, scales, top, kept.power_2, kept.block)
    if kept.fp8 is None:
        view.numpy().reshape(-1)[:] = np.clip(values, -top, top)  # NaN stays
    else:
        _codes(values.view(np.uint32), view.numpy().reshape(-1), rounding(kept.fp8, True))


@njit(parallel=True)
def _codes(values: Array, codes: Array, how: Any) -> None:
    n = values.size
    for task in prange((n + _TASK - 1) // _TASK):
        part = slice(task * _TASK, min(n, task * _TASK + _TASK))
        encode_row(values[part], _ONE, how, codes[part])


@njit(parallel=True)
def _multiply(values: Array, factors: Array, block: int) -> None:
    n = values.size
    for b in prange(factors.size):
        part, factor = values[b * block : min(n, b * block + block)], factors[b]
        for i in range(part.size):
            part[i] *= factor


@njit
def _range(values: Any) -> Any:
    """(amax, smallest magnitude that is not 0 or Inf), NaN ignored."""
    most, least = _ZERO, _INF
    for x in values:
        a = abs(x)
        most = a if a > most else most
        least = a if a > _ZERO and a < least else least
    return most, least


@njit
def factor_of(amax: Any, top: Any, power_2: Any) -> Any:
    """Returns what codes are multiplied by: amax / top, or a power of two; 0 for an amax of 0."""
    if not amax > _ZERO:
        return _ZERO
    if not power_2:
        return amax / top
    scale = np.int32(np.float32(top / amax).view(np.int32) & np.int32(0x7F800000)).view(np.float32)
    return _ONE / min(scale, np.float32(2.0**127))


@njit
def _divide(values: Any, factor: Any) -> None:
    """Values as they are encoded: a factor of 0 belongs to zeros and NaN."""
    for i in range(values.size):
        values[i] = values[i] / factor if factor > _ZERO else values[i] * _ZERO


@njit(parallel=True)
def _by_blocks(values: Array, factors: Array, top: Any, power_2: bool, block: int) -> None:
    """Each block's new factor, and its values divided by it."""
    n = values.size
    for b in prange(factors.size):
        part = values[b * block : min(n, b * block + block)]
        factors[b] = factor_of(_range(part)[0], top, power_2)
        _divide(part, factors[b])


@njit(parallel=True)
def _by_tensor(values: Array, factors: Array, top: Any, power_2: bool) -> None:
    """The same with one factor."""
    n = values.size
    most = np.zeros((n + _TASK - 1) // _TASK, np.float32)
    for task in prange(most.size):
        most[task] = _range(values[task * _TASK : min(n, task * _TASK + _TASK)])[0]
    factor = factor_of(most.max(), top, power_2)
    factors[0] = factor
    for task in prange(most.size):
        _divide(values[task * _TASK : min(n, task * _TASK + _TASK)], factor)


@njit
def exponent_of(most: Any, least: Any) -> Any:
    """k of a block's range; 0 where there is none."""
    if not most > _ZERO:
        return _ZERO
    span = log2(most) - log2(least)
    k = np.float32(np.floor(_RANGE / span)) * _SIXTEENTH if span > _ZERO else _MOST_K
    return min(max(k, _LEAST_K), _MOST_K)


@njit(parallel=True)
def _expand(values: Array, scales: Array, block: int) -> None:
    """Each block's amax and exponent, and the values as they are encoded."""
    n = values.size
    for b in prange(scales.shape[0]):
        part = values[b * block : min(n, b * block + block)]
        most, least = _range(part)
        k = exponent_of(most, least) if most < _INF else _ZERO
        scales[b, 0], scales[b, 1] = most, k
        for i in range(part.size):
            a = abs(part[i])
            if not most < _INF:
                part[i] = _NAN
            elif a > _ZERO:
                y = _TOP * exp2(k * log2(max(a / most, _TINY)))
                part[i] = -y if part[i] < _ZERO else y


@njit(parallel=True)
def _contract(values: Array, scales: Array, block: int) -> None:
    n, top = values.size, log2(_TOP)
    for b in prange(scales.shape[0]):
        most, k = scales[b, 0], scales[b, 1]
        for i in range(b * block, min(n, b * block + block)):
            a = abs(values[i])
            if a > _ZERO:
                x = exp2((log2(a) - top) / k) * most
                values[i] = -x if values[i] < _ZERO else x
