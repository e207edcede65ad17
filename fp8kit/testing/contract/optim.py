"""Contract cases of the kernels over many tensors, against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit.arrays import Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16, float16, float32
from fp8kit.testing.compare import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract import get, poisoned, put, workspace
from fp8kit.testing.contract.elementwise import ROUNDOFF, draw, table, wide

_SHAPES = ((17, 33), (1,), (5, 3, 7), (0,), (300,), (70, 1000))
_LR, _B1, _B2, _EPSILON = 1e-2, 0.9, 0.999, 1e-8


def _adamw(dtypes: tuple[DType, ...], step: int) -> Callable[[Kernels, Device], None]:
    """One step on tensors of these dtypes in turn. 16-bit parameters have float32 masters, which are not their roundings' equals.

    The quotient's error is a few u of (b1 |m| + (1 - b1) |g|) / (sqrt(v) + epsilon): m may cancel, v cannot.
    """

    def run(kernels: Kernels, device: Device) -> None:
        kinds = [dtypes[i % len(dtypes)] for i in range(len(_SHAPES))]
        decays = [0.0 if i % 2 else 0.1 for i in range(len(_SHAPES))]
        masters = [draw(10 + i, s, float32) for i, s in enumerate(_SHAPES)]
        params = [w.astype(k.numpy) for w, k in zip(masters, kinds, strict=True)]
        grads = [draw(20 + i, s, k, 0.3) for i, (s, k) in enumerate(zip(_SHAPES, kinds, strict=True))]
        ms = [draw(30 + i, s, float32, 0.1) for i, s in enumerate(_SHAPES)]
        vs = [np.square(draw(40 + i, s, float32, 0.1)) for i, s in enumerate(_SHAPES)]
        w_, p_, g_, m_, v_ = ([put(t, device) for t in ts] for ts in (masters, params, grads, ms, vs))
        kept = [w if k is not float32 else None for w, k in zip(w_, kinds, strict=True)]
        kernels.adamw_(p_, g_, m_, v_, kept, _LR, _B1, _B2, _EPSILON, decays, step, 0)
        for i, kind in enumerate(kinds):
            g, w = wide(grads[i]), wide(masters[i] if kind is not float32 else params[i])
            m, v = _B1 * wide(ms[i]) + (1 - _B1) * g, _B2 * wide(vs[i]) + (1 - _B2) * g * g
            magnitude = _B1 * np.abs(wide(ms[i])) + (1 - _B1) * np.abs(g)
            denominator = np.sqrt(v / (1 - _B2**step)) + _EPSILON
            first = 1 - _B1**step
            update = _LR * (m / first / denominator + decays[i] * w)
            size = _LR * (magnitude / first / denominator + decays[i] * np.abs(w))
            assert_close(f"exp_avg {i}", get(m_[i]), m, float32, 8 * ROUNDOFF * magnitude)
            assert_close(f"exp_avg_sq {i}", get(v_[i]), v, float32, 8 * ROUNDOFF * v)
            got = get(p_[i] if kept[i] is None else w_[i])
            assert_close(f"weights {i}", got, w - update, float32, 32 * ROUNDOFF * size + 2 * ROUNDOFF * np.abs(w))
            if kept[i] is not None:
                assert_same_bits(f"param {i}", get(p_[i]), got.astype(kind.numpy))

    return run


def _l2norm(dtypes: tuple[DType, ...], shapes: tuple[tuple[int, ...], ...]) -> Callable[[Kernels, Device], None]:
    def run(kernels: Kernels, device: Device) -> None:
        xs = [draw(i, s, dtypes[i % len(dtypes)]) for i, s in enumerate(shapes)]
        sizes = [x.size for x in xs]
        results = []
        for _ in range(2):
            out = poisoned((1,), float32, device)
            kernels.l2norm([put(x, device) for x in xs], out, workspace(kernels.l2norm_workspace(sizes), device), 0)
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
    *table("adamw_", {"mixed": _adamw((bfloat16, float32, float16), 7), "nothing": lambda kernels, device: kernels.adamw_(
        [], [], [], [], [], _LR, _B1, _B2, _EPSILON, [], 1, 0)}),
    *table("l2norm", {d.name: _l2norm((d,), _SHAPES) for d in HIGH_PRECISION}),
    *table("l2norm", {"mixed": _l2norm((bfloat16, float32, float16), _SHAPES), "one": _l2norm((float32,), ((1,),)),
                      "empty": _l2norm((float32,), ((0,),)), "many": _l2norm((float32,), ((9,),) * 200)}),
    *table("clip_", {f"{d.name}-{n}-{m}": _clip(d, n, m) for d in HIGH_PRECISION for n, m in ((12.0, 1.0), (0.5, 1.0), (0.0, 1.0))}),
]
