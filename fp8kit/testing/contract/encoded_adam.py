"""Adam on encoded states, known bit for bit: float32 arithmetic in NumPy, codes by ``fp8kit.codec``.

What expansion makes is known in float64, to 2^-18 of a value, which is what the engines' log2 and exp2 are
good for: a code may be its neighbour where so much decides, and a block's exponent the next sixteenth.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.formats import E4M3, DType, bfloat16, float16, float32, int16
from fp8kit.moments import PRESETS, MomentFormat, StateFormats, bias_correction
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    product,
    typed,
    wide,
)
from fp8kit.testing.contract.optim import Shapes, numbers

SHAPES: Shapes = ((17, 33), (1,), (5, 3, 7), (0,), (300,), (70, 200))
MIXED = (bfloat16, float32, float16)
_CLOSE = 2.0**-18
_HALF = MomentFormat("float16", power_2=True)
_F = np.float32


def encoded_adam_(
    s: Sampler,
    m: int,
    n: int,
    formats: StateFormats = PRESETS["coat"],
    shapes: Shapes = SHAPES,
    dtypes: tuple[DType, ...] = (),
    step: int = 3,
    on_device: bool = False,
    skipped: bool = False,
    decoupled: bool = True,
    bad: float | None = None,
    spread: int = 3,
) -> Arguments:
    """Tensors of ``shapes``, one of (m, n) where that is not 0, with ``dtypes`` in turn. Magnitudes spread
    over ``spread`` binades, a few of them are 0; at step 1 all states are. ``bad``: a gradient of the last
    tensor."""
    kinds = [((m, n) if m else shape) for shape in (shapes[:1] if m else shapes)]
    own = [(shape, (dtypes or (s.dtype,))[i % max(len(dtypes), 1)]) for i, shape in enumerate(kinds)]
    scale = np.inf if skipped else 1024.0 if on_device else 1.0
    found: Arguments = {name: [] for name in ("params", "grads", "masters", "master_scales")}
    for kept in ("exp_avg", "exp_avg_sq"):
        found |= {f"{kept}s": [], f"{kept}_scales": []}

    def strewn(shape: tuple[int, ...], scale: float = 1.0) -> Array:
        values = s.draw(shape, scale) * np.exp2(s.random.integers(-spread, 1, shape)).astype(_F)
        return np.where(s.random.random(shape) < 0.05, _F(0), values)

    def state(name: str, kept: MomentFormat, values: Array) -> None:
        codes, scales = _encoded(np.zeros(values.shape, _F) if step == 1 else values, kept)
        found[f"{name}s"].append(s.put(codes.reshape(values.shape), kept.dtype))
        found[f"{name}_scales"].append(None if scales is None else s.put(scales, float32))

    for shape, dtype in own:
        weights = s.draw(shape)
        kind = formats.master_dtype(dtype)
        grad = strewn(shape, 0.3 * scale)
        if bad is not None and grad.size and shape == own[-1][0]:
            grad.reshape(-1)[-3] = bad
        found["params"].append(s.put(weights.astype(dtype.numpy)))
        found["grads"].append(s.put(grad.astype(dtype.numpy)))
        state("exp_avg", formats.exp_avg, strewn(shape, 0.1))
        state("exp_avg_sq", formats.exp_avg_sq, np.square(strewn(shape, 0.1)))
        if kind is float16:
            state("master", _HALF, weights)
        elif kind is int16:
            found["masters"].append(s.put(s.random.integers(-(2**15), 2**15, shape), int16))
            found["master_scales"].append(None)
        else:
            found["masters"].append(None if kind is None else s.put(weights))
            found["master_scales"].append(None)
    return {
        **found,
        "formats": formats,
        "decoupled": decoupled,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        **numbers(s, len(own), step, scale, on_device, skipped),
    }


# --- codes -------------------------------------------------------------------------------------------------


def _rows(values: Array, block: int | None) -> Array:
    """Values in rows that share a factor, the last one filled up with NaN, which is not looked at."""
    flat = values.reshape(-1)
    width = max(block or flat.size, 1)
    return np.pad(flat, (0, -flat.size % width), constant_values=np.nan).reshape(-1, width)


def _amax(rows: Array) -> Array:
    """Returns the amax of each row, NaN ignored."""
    return np.max(np.where(np.isnan(rows), 0, np.abs(rows)), axis=1, initial=0)  # type: ignore[no-any-return]


def _factors(rows: Array, kept: MomentFormat) -> Array:
    amax, top = _amax(rows).astype(_F), _F(kept.top)
    with np.errstate(all="ignore"):
        if not kept.power_2:
            return np.where(amax > 0, amax / top, _F(0))
        exponent = np.frexp(np.where(amax > 0, top / amax, _F(1)))[1] - 1
        down = np.where(np.isinf(amax), np.inf, np.ldexp(1.0, -np.minimum(exponent, 127)))
        return np.where(amax > 0, down, 0).astype(_F)


def _cast(scaled: Array, kept: MomentFormat) -> Array:
    if kept.fp8 is not None:
        return codec.encode(scaled, kept.fp8)
    top = kept.top if kept.format == "float16" else np.inf
    return np.clip(scaled, -top, top).astype(kept.dtype.numpy)


def _encoded(values: Array, kept: MomentFormat) -> tuple[Array, Array | None]:
    """Codes and scales of float32 values; those of expansion as float64 has them."""
    codes, scales, _ = _known(values, kept)
    return codes, scales


def _known(values: Array, kept: MomentFormat) -> tuple[Array, Array | None, Any]:
    """(codes, scales, by how much both may be off: None where they are known bit for bit)."""
    if not kept.scaled:
        return _cast(values, kept).reshape(-1), None, None
    rows = _rows(values, kept.block)
    with np.errstate(all="ignore"):
        if not kept.expansion:
            factor = _factors(rows, kept)
            by = factor[:, None]
            scaled = np.where(by > 0, rows / np.where(by > 0, by, _F(1)), rows * _F(0)).astype(_F)
            return _cast(scaled, kept).reshape(-1)[: values.size], factor[: max(len(rows), 1)], None
        return _expanded(rows, kept, values.size)


def _expanded(rows: Array, kept: MomentFormat, size: int) -> tuple[Array, Array, Any]:
    """Xi et al. 2024, section 4, as ``fp8kit.moments`` writes it."""
    a, amax = np.abs(wide(rows)), wide(_amax(rows))
    amin = np.min(np.where(a > 0, a, np.inf), axis=1, initial=np.inf)
    span = np.where(amax > 0, np.log2(amax / amin), 1)
    candidates = []
    for off in (1 - _CLOSE, 1, 1 + _CLOSE):
        k = np.floor(off * 16 * math.log2(kept.top**2 / 2) / np.where(span > 0, span, 1)) / 16
        k = np.where(span > 0, np.clip(k, 1 / 16, 16), 16)
        candidates.append(np.where((amax > 0) & np.isfinite(amax), k, 0))
    found = []
    for k in candidates:
        y = kept.top * (np.maximum(a / np.where(amax > 0, amax, 1)[:, None], 2.0**-126)) ** k[:, None]
        y = np.where(a > 0, y, a)
        y = np.where(np.isinf(amax)[:, None], np.nan, np.copysign(y, rows))
        found += [codec.encode(y * near, E4M3).astype(int) for near in (1 - _CLOSE, 1, 1 + _CLOSE)]
    codes, k = found[4], candidates[1]
    slack = np.max(found, axis=0) - np.min(found, axis=0)
    slacks = slack.reshape(-1)[:size], np.stack([0 * k, candidates[2] - candidates[0]], 1)
    return codes.astype(np.uint8).reshape(-1)[:size], np.stack([amax, k], 1).astype(_F), slacks


def decoded(codes: Array, scales: Array | None, kept: MomentFormat) -> Array:
    """The float64 values of a state, flat; those without expansion are float32's."""
    values = codec.decode(codes, kept.fp8) if kept.fp8 is not None else wide(codes)
    flat = values.reshape(-1)
    if scales is None:
        return flat
    if not kept.expansion:
        return wide(flat.astype(_F) * np.repeat(scales, kept.block or flat.size)[: flat.size])
    amax, k = (np.repeat(wide(part), kept.block or 1)[: flat.size] for part in scales.T)
    with np.errstate(all="ignore"):
        x = amax * (np.abs(flat) / kept.top) ** (1 / np.where(k > 0, k, 1))
    return np.copysign(np.where(np.abs(flat) > 0, x, flat), flat)


# --- the step ----------------------------------------------------------------------------------------------


def encoded_adam_oracle(a: Any) -> Results:
    """Loshchilov & Hutter 2019, algorithm 2, with decay in the gradient where it is not decoupled: in float32
    where states are known so, else in float64."""
    found: Results = {}
    if a.found_inf is not None and a.found_inf[0]:
        return found
    t = int(np.asarray(a.step).reshape(-1)[0])
    first, second = (_F(bias_correction(beta, t)) for beta in (a.beta1, a.beta2))
    lr, by = _F(np.asarray(a.lr).reshape(-1)[0]), _F(1) if a.inv_scale is None else a.inv_scale[0]
    for i, (param, grad, decay) in enumerate(zip(a.params, a.grads, map(_F, a.weight_decays), strict=True)):
        if not param.size:
            continue
        w = _weights(param, a.masters[i], a.master_scales[i])
        g = grad.astype(_F).reshape(-1) * by
        if not a.decoupled:
            g, decay = g + decay * w, _F(0)
        loose = a.formats.exp_avg.expansion or a.formats.exp_avg_sq.expansion
        m, v = (
            decoded(codes[i], scales[i], kept).astype(_F)
            for codes, scales, kept in (
                (a.exp_avgs, a.exp_avg_scales, a.formats.exp_avg),
                (a.exp_avg_sqs, a.exp_avg_sq_scales, a.formats.exp_avg_sq),
            )
        )
        m = _F(a.beta1) * m + _F(1 - a.beta1) * g
        v = _F(a.beta2) * v + _F(1 - a.beta2) * (g * g)
        change = lr * ((m / first) / (np.sqrt(v / second) + _F(a.epsilon)) + decay * w)
        w = w - change
        for name, kept, values in (
            ("exp_avg", a.formats.exp_avg, m),
            ("exp_avg_sq", a.formats.exp_avg_sq, v),
        ):
            codes, scales, off = _known(values, kept)
            codes = codes.reshape(param.shape)
            found |= _results(f"{name}s[{i}]", codes, None if off is None else off[0].reshape(param.shape))
            if scales is not None:
                # the amax itself was made of decoded values
                if off is not None:
                    off = off[1] + np.stack([_CLOSE * wide(scales[:, 0]), 0 * scales[:, 1]], 1)
                found |= _results(f"{name}_scales[{i}]", scales, off)
        moved = _CLOSE * np.abs(wide(change)) if loose else None
        found |= _kept(i, param, a.masters[i], w, moved)
    return found


def _results(name: str, value: Array, slack: Any) -> Results:
    return {name: value if slack is None else (wide(value), slack)}


def _weights(param: Array, master: Array | None, scale: Array | None) -> Array:
    if master is None:
        return param.astype(_F).reshape(-1)
    if master.dtype == np.float32:
        return master.reshape(-1)
    if master.dtype == np.int16:
        bits = (param.view(np.uint16).astype(np.int64) << 16) + master
        return (bits % 2**32).astype(np.uint32).view(_F).reshape(-1)
    if scale is None or scale[0] == 0:
        return param.astype(_F).reshape(-1)
    return decoded(master, scale, _HALF).astype(_F)


def _kept(i: int, param: Array, master: Array | None, w: Array, slack: Array | None) -> Results:
    """What becomes of the weights. A slack moves a remainder by so many units of a float32's last place."""
    shape, name = param.shape, f"params[{i}]"
    spared = None if slack is None else slack.reshape(shape) + ROUNDOFF * np.abs(wide(w)).reshape(shape)
    if master is not None and master.dtype == np.int16:
        bits = np.where(np.isnan(w), 0x7FC00000, w.view(np.uint32).astype(np.int64))
        upper = (bits + 0x8000) >> 16
        rest = (bits - (upper << 16)).astype(np.int16).reshape(shape)
        high = upper.astype(np.uint16).view(param.dtype).reshape(shape)
        return {name: high, f"masters[{i}]": rest}
    found = _results(name, w.astype(param.dtype).reshape(shape), spared)
    if master is None:
        return found
    if master.dtype == np.float32:
        return found | _results(f"masters[{i}]", w.reshape(shape), spared)
    codes, scales, _ = _known(w, _HALF)
    factor = 0 if spared is None or scales is None else 1 / wide(scales)
    own = None if spared is None else factor * spared
    assert scales is not None
    return found | _results(f"masters[{i}]", codes.reshape(shape), own) | {f"master_scales[{i}]": scales}


def _moments(x: str, y: str, master: str = "float32") -> StateFormats:
    return StateFormats(MomentFormat(x), MomentFormat(y), master)


_FORMATS = {
    **PRESETS,
    "halves": _moments("bfloat16", "float16", "float16"),
    "remainder": _moments("bfloat16", "E5M2", "remainder"),
    "mixed": StateFormats(MomentFormat("E5M2", 256), MomentFormat("float16"), "float16"),
    "exact": StateFormats(
        MomentFormat("E5M2", 128, power_2=True), MomentFormat("E4M3", 256, power_2=True), "remainder"
    ),
    "expanded": StateFormats(MomentFormat("E4M3", 256, expansion=True), MomentFormat("E4M3", 128)),
}


def _dtypes(formats: StateFormats) -> tuple[DType, ...]:
    return (bfloat16, float32) if formats.master == "remainder" else MIXED


_CASES: dict[str, Options] = {}
for _name, _formats in _FORMATS.items():
    _own: Options = {"formats": _formats, "dtypes": _dtypes(_formats)}
    _CASES |= {
        f"{_name}-first": {**_own, "step": 1},
        f"{_name}-later": {**_own, "step": 70, "spread": 12},
        f"{_name}-numbers-on-device": {**_own, "on_device": True, "decoupled": False, "step": 1001},
    }
_COAT: Options = {"formats": PRESETS["coat"]}
_CASES |= {
    **typed({"equal": {**_COAT, "spread": 0}}),
    "skipped": {**_COAT, "dtypes": MIXED, "skipped": True},
    "skipped-by-tensor": {"formats": PRESETS["ms_amp"], "dtypes": MIXED, "skipped": True},
    "nothing": {"shapes": ()},
    "many": {"formats": PRESETS["fishman"], "dtypes": MIXED, "shapes": ((9,),) * 70},
    **product(
        "{bad}-{formats}",
        {
            "bad": (np.nan, np.inf),
            "formats": {name: {"formats": _FORMATS[name]} for name in ("coat", "fishman", "ms_amp", "exact")},
        },
        dtypes=MIXED[:1],
        shapes=((300,), (5, 60)),
    ),
}

TESTS = (KernelTest("encoded_adam_", encoded_adam_, encoded_adam_oracle, _CASES),)
