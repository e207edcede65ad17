"""Contract cases of the kernels over many tensors, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16, float16, float32, int64
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.elementwise import ROUNDOFF, draw, table, wide

_SHAPES = ((17, 33), (1,), (5, 3, 7), (0,), (300,), (70, 1000))
_LR, _B1, _B2, _EPSILON = 1e-2, 0.9, 0.999, 1e-8


class _Lists:
    """Tensors of these dtypes in turn: float32 ``masters``, params that are their roundings, grads times
    ``grad_factor``, decays."""

    def __init__(self, dtypes: tuple[DType, ...], grad_factor: float) -> None:
        self.kinds = [dtypes[i % len(dtypes)] for i in range(len(_SHAPES))]
        self.decays = [0.0 if i % 2 else 0.1 for i in range(len(_SHAPES))]
        self.masters = [draw(10 + i, s, float32) for i, s in enumerate(_SHAPES)]
        self.params = [w.astype(k.numpy) for w, k in zip(self.masters, self.kinds, strict=True)]
        self.grads = [
            draw(20 + i, s, k, 0.3 * grad_factor)
            for i, (s, k) in enumerate(zip(_SHAPES, self.kinds, strict=True))
        ]


def _scalar(value: float, dtype: DType, device: Device, on_device: bool) -> Any:
    """A number as the kernel takes it: itself, or an array of one element."""
    return put(np.array([value], dtype.numpy), device) if on_device else value


def _adamw(
    dtypes: tuple[DType, ...], step: int, on_device: bool = False
) -> Callable[[Kernels, Device], None]:
    """One step on tensors of these dtypes in turn, ``on_device`` with numbers that lie there and scaled
    gradients.

    16-bit parameters have float32 masters, which are not their roundings' equals.

    The quotient's error is a few u of (b1 |m| + (1 - b1) |g|) / (sqrt(v) + epsilon): m may cancel, v cannot.
    """

    def run(kernels: Kernels, device: Device) -> None:
        scale = 1024.0 if on_device else 1.0
        data = _Lists(dtypes, scale)
        kinds, decays, masters, params, grads = data.kinds, data.decays, data.masters, data.params, data.grads
        ms = [draw(30 + i, s, float32, 0.1) for i, s in enumerate(_SHAPES)]
        vs = [np.square(draw(40 + i, s, float32, 0.1)) for i, s in enumerate(_SHAPES)]
        w_, p_, g_, m_, v_ = ([put(t, device) for t in ts] for ts in (masters, params, grads, ms, vs))
        kept = [w if k is not float32 else None for w, k in zip(w_, kinds, strict=True)]
        inv = _scalar(1 / scale, float32, device, True) if on_device else None
        fine = _scalar(0.0, float32, device, True) if on_device else None
        kernels.adamw_(
            p_,
            g_,
            m_,
            v_,
            kept,
            _scalar(_LR, float32, device, on_device),
            _B1,
            _B2,
            _EPSILON,
            decays,
            _scalar(step, int64, device, on_device),
            inv,
            fine,
            0,
        )
        for i, kind in enumerate(kinds):
            g, w = wide(grads[i]) / scale, wide(masters[i] if kind is not float32 else params[i])
            m, v = _B1 * wide(ms[i]) + (1 - _B1) * g, _B2 * wide(vs[i]) + (1 - _B2) * g * g
            magnitude = _B1 * np.abs(wide(ms[i])) + (1 - _B1) * np.abs(g)
            denominator = np.sqrt(v / (1 - _B2**step)) + _EPSILON
            first = 1 - _B1**step
            update = _LR * (m / first / denominator + decays[i] * w)
            size = _LR * (magnitude / first / denominator + decays[i] * np.abs(w))
            assert_close(f"exp_avg {i}", get(m_[i]), m, float32, 8 * ROUNDOFF * magnitude)
            assert_close(f"exp_avg_sq {i}", get(v_[i]), v, float32, 8 * ROUNDOFF * v)
            got = get(p_[i] if kept[i] is None else w_[i])
            assert_close(
                f"weights {i}", got, w - update, float32, 32 * ROUNDOFF * size + 2 * ROUNDOFF * np.abs(w)
            )
            if kept[i] is not None:
                assert_same_bits(f"param {i}", get(p_[i]), got.astype(kind.numpy))

    return run


def _sgd(
    dtypes: tuple[DType, ...],
    momentum: float,
    dampening: float,
    nesterov: bool,
    step: int,
    on_device: bool = False,
) -> Callable[[Kernels, Device], None]:
    """One step, against float64; the error is a few u of the sum of the terms' magnitudes."""

    def run(kernels: Kernels, device: Device) -> None:
        scale = 1024.0 if on_device else 1.0
        data = _Lists(dtypes, scale)
        bs = [draw(30 + i, s, float32, 0.1) for i, s in enumerate(_SHAPES)]
        w_, p_, g_, b_ = ([put(t, device) for t in ts] for ts in (data.masters, data.params, data.grads, bs))
        kept = [w if k is not float32 else None for w, k in zip(w_, data.kinds, strict=True)]
        inv = _scalar(1 / scale, float32, device, True) if on_device else None
        kernels.sgd_(
            p_,
            g_,
            b_ if momentum else [None] * len(b_),
            kept,
            _scalar(_LR, float32, device, on_device),
            momentum,
            dampening,
            nesterov,
            data.decays,
            _scalar(step, int64, device, on_device),
            inv,
            None,
            0,
        )
        for i, kind in enumerate(data.kinds):
            w = wide(data.masters[i] if kind is not float32 else data.params[i])
            g = wide(data.grads[i]) / scale + data.decays[i] * w
            size = np.abs(wide(data.grads[i])) / scale + data.decays[i] * np.abs(w)
            if momentum:
                b = g if step == 1 else momentum * wide(bs[i]) + (1 - dampening) * g
                size = size + momentum * np.abs(wide(bs[i]))
                assert_close(f"buffer {i}", get(b_[i]), b, float32, 8 * ROUNDOFF * size)
                g = g + momentum * b if nesterov else b
                size = 2 * size
            got = get(p_[i] if kept[i] is None else w_[i])
            assert_close(
                f"weights {i}",
                got,
                w - _LR * g,
                float32,
                8 * ROUNDOFF * _LR * size + 2 * ROUNDOFF * np.abs(w),
            )
            if kept[i] is not None:
                assert_same_bits(f"param {i}", get(p_[i]), got.astype(kind.numpy))

    return run


def _skipped(
    step: Callable[[Kernels, dict[str, list[ArrayView]], ArrayView], None],
) -> Callable[[Kernels, Device], None]:
    """A step with found_inf set changes nothing."""

    def run(kernels: Kernels, device: Device) -> None:
        data = _Lists((bfloat16, float32), np.inf)
        moments = [draw(30 + i, s, float32) for i, s in enumerate(_SHAPES)]
        held = {"p": data.params, "g": data.grads, "w": data.masters, "m": moments, "v": moments}
        views = {name: [put(x, device) for x in xs] for name, xs in held.items()}
        step(kernels, views, put(np.ones(1, np.float32), device))
        for name, xs in held.items():
            for i, x in enumerate(xs):
                assert_same_bits(f"{name} {i}", get(views[name][i]), x)

    return run


def _scale(
    dtype: DType, factor: float | None, bad: float | None, look: bool = True
) -> Callable[[Kernels, Device], None]:
    """``bad`` is put into one element of the last tensor."""

    def run(kernels: Kernels, device: Device) -> None:
        xs = [draw(i, s, dtype) for i, s in enumerate(_SHAPES)]
        if bad is not None:
            xs[-1].reshape(-1)[-3] = bad
        views = [put(x, device) for x in xs]
        found = put(np.zeros(1, np.float32), device)
        by = None if factor is None else _scalar(factor, float32, device, True)
        kernels.scale_(views, by, found if look else None, 0)
        assert_same_bits("found_inf", get(found), np.array([float(look and bad is not None)], np.float32))
        for i, (x, view) in enumerate(zip(xs, views, strict=True)):
            with np.errstate(over="ignore", invalid="ignore"):
                wanted = (
                    x if factor is None else (x.astype(np.float32) * np.float32(factor)).astype(dtype.numpy)
                )
            finite = np.isfinite(wide(wanted))
            assert_same_bits(f"x {i}", get(view)[finite], wanted[finite])
            if not np.array_equal(np.isfinite(wide(get(view))), finite):
                raise AssertionError(f"x {i}: Inf and NaN are not where they were")

    return run


def _loss_scale(kernels: Kernels, device: Device) -> None:
    """Two good steps, a bad one, a long way up to where doubling gives Inf."""
    scale, inv = put(np.array([8.0], np.float32), device), put(np.array([0.125], np.float32), device)
    good, found = put(np.zeros(1, np.int64), device), put(np.zeros(1, np.float32), device)
    counter = put(np.array([5], np.int64), device)
    wanted, count = 8.0, 5
    for step, bad in enumerate((0, 0, 1, 0, *(0,) * 300)):
        if bad:
            found = put(np.ones(1, np.float32), device)
        kernels.count_(counter, found, 0)
        kernels.loss_scale_(scale, inv, good, found, 2.0, 0.5, 2, 0)
        count += 1 - bad
        if bad:
            wanted, since = wanted / 2, step
        elif step == 1 or (step > 2 and (step - since) % 2 == 0):
            wanted = min(wanted * 2, 2.0**127)
        assert_same_bits(f"scale after step {step}", get(scale), np.array([wanted], np.float32))
        assert_same_bits(
            f"inv_scale after step {step}", get(inv), np.float32(1) / np.array([wanted], np.float32)
        )
        assert_same_bits(f"found_inf after step {step}", get(found), np.zeros(1, np.float32))
    assert_same_bits("counter", get(counter), np.array([count]))
    kernels.count_(counter, None, 0)
    assert_same_bits("counter", get(counter), np.array([count + 1]))


def _l2norm(
    dtypes: tuple[DType, ...], shapes: tuple[tuple[int, ...], ...]
) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        xs = [draw(i, s, dtypes[i % len(dtypes)]) for i, s in enumerate(shapes)]
        sizes = [x.size for x in xs]
        results = []
        for _ in range(2):
            out = poisoned((1,), float32, device)
            kernels.l2norm(
                [put(x, device) for x in xs], out, workspace(kernels.l2norm_workspace(sizes), device), 0
            )
            results.append(get(out))
        reference = np.sqrt(sum(float(np.square(wide(x)).sum()) for x in xs))
        assert_close("out", results[0], np.array([reference]), float32, sum_slack(reference, sum(sizes)) / 2)
        assert_same_bits("out, the second time", results[1], results[0])

    return run


def _clip(dtype: DType, norm: float, limit: float) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        xs = [draw(i, s, dtype) for i, s in enumerate(_SHAPES)]
        views = [put(x, device) for x in xs]
        kernels.clip_(views, put(np.array([norm], np.float32), device), limit, 0)
        factor = min(1.0, limit / (float(np.float32(norm)) + 1e-6))
        for x, view in zip(xs, views, strict=True):
            if factor == 1:
                assert_same_bits("x", get(view), x)
            else:
                assert_close("x", get(view), wide(x) * factor, dtype, 8 * ROUNDOFF * np.abs(wide(x)) * factor)

    return run


CASES = [
    *table("adamw_", {f"{d.name}-step-{s}": _adamw((d,), s) for d in HIGH_PRECISION for s in (1, 100)}),
    *table(
        "adamw_",
        {
            "mixed": _adamw((bfloat16, float32, float16), 7),
            "nothing": lambda kernels, device: kernels.adamw_(
                [], [], [], [], [], _LR, _B1, _B2, _EPSILON, [], 1, None, None, 0
            ),
        },
    ),
    *table(
        "adamw_", {f"numbers-on-device-{s}": _adamw((bfloat16, float32, float16), s, True) for s in (1, 1000)}
    ),
    *table(
        "adamw_",
        {
            "skipped": _skipped(
                lambda k, x, found: k.adamw_(
                    x["p"],
                    x["g"],
                    x["m"],
                    x["v"],
                    [w if i % 2 == 0 else None for i, w in enumerate(x["w"])],
                    _LR,
                    _B1,
                    _B2,
                    _EPSILON,
                    [0.1] * len(_SHAPES),
                    3,
                    None,
                    found,
                    0,
                )
            )
        },
    ),
    *table(
        "sgd_",
        {
            f"{d.name}-{m}-{n}-{s}": _sgd((d,), m, 0.0, n, s)
            for d in HIGH_PRECISION
            for m, n, s in ((0.0, False, 1), (0.9, False, 1), (0.9, False, 4), (0.9, True, 4))
        },
    ),
    *table("sgd_", {f"dampened-{s}": _sgd((bfloat16, float32, float16), 0.9, 0.3, False, s) for s in (1, 2)}),
    *table(
        "sgd_",
        {
            f"numbers-on-device-{s}": _sgd((bfloat16, float32, float16), 0.9, 0.0, True, s, True)
            for s in (1, 5)
        },
    ),
    *table(
        "sgd_",
        {
            "skipped": _skipped(
                lambda k, x, found: k.sgd_(
                    x["p"],
                    x["g"],
                    x["m"],
                    [w if i % 2 == 0 else None for i, w in enumerate(x["w"])],
                    _LR,
                    0.9,
                    0.0,
                    False,
                    [0.1] * len(_SHAPES),
                    3,
                    None,
                    found,
                    0,
                )
            )
        },
    ),
    *table(
        "scale_",
        {
            f"{d.name}-{f}-{b}": _scale(d, f, b)
            for d in HIGH_PRECISION
            for f, b in ((None, None), (None, np.nan), (0.37, None), (2.0**-10, np.inf), (0.5, -np.inf))
        },
    ),
    *table("scale_", {"not-looked-at": _scale(float32, 3.0, np.nan, False)}),
    *table("loss_scale_", {"up-and-down": _loss_scale}),
    *table("count_", {"up-and-down": _loss_scale}),
    *table("l2norm", {d.name: _l2norm((d,), _SHAPES) for d in HIGH_PRECISION}),
    *table(
        "l2norm",
        {
            "mixed": _l2norm((bfloat16, float32, float16), _SHAPES),
            "one": _l2norm((float32,), ((1,),)),
            "empty": _l2norm((float32,), ((0,),)),
            "many": _l2norm((float32,), ((9,),) * 200),
        },
    ),
    *table(
        "clip_",
        {
            f"{d.name}-{n}-{m}": _clip(d, n, m)
            for d in HIGH_PRECISION
            for n, m in ((12.0, 1.0), (0.5, 1.0), (0.0, 1.0))
        },
    ),
]
