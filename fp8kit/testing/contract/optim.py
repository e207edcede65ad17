"""The kernels over many tensors, against float64.

AdamW's quotient has an error of a few u of (b1 |m| + (1 - b1) |g|) / (sqrt(v) + epsilon): m may cancel, v
cannot. SGD's is a few u of the sum of the terms' magnitudes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.formats import DType, bfloat16, float16, float32, int64
from fp8kit.testing.contract import (
    ROUNDOFF,
    Arguments,
    Array,
    KernelTest,
    Options,
    Results,
    Sampler,
    named,
    product,
    sum_slack,
    typed,
    wide,
)

Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((17, 33), (1,), (5, 3, 7), (0,), (300,), (70, 1000))
MIXED = (bfloat16, float32, float16)
LR = 1e-2


def _tensors(
    s: Sampler, m: int, n: int, shapes: Shapes | None = None, dtypes: tuple[DType, ...] = ()
) -> list[tuple[tuple[int, ...], DType]]:
    """Shapes, one of (m, n) without ``shapes``, with these dtypes in turn."""
    kinds = itertools.cycle(dtypes or (s.dtype,))
    return list(zip(((m, n),) if shapes is None else shapes, kinds, strict=False))


def _lists(
    s: Sampler,
    m: int,
    n: int,
    moment: str,
    step: int = 3,
    on_device: bool = False,
    skipped: bool = False,
    **tensors: Any,
) -> Arguments:
    """``tensors``: see ``_tensors``; masters, which are no roundings, where they are 16 bits wide.
    ``on_device``: numbers lie there, and gradients are scaled; ``skipped``: found_inf is set."""
    scale, kinds = np.inf if skipped else 1024.0 if on_device else 1.0, _tensors(s, m, n, **tensors)
    return {
        "params": [s.normal(*shape, dtype=dtype) for shape, dtype in kinds],
        "grads": [s.normal(*shape, dtype=dtype, scale=0.3 * scale) for shape, dtype in kinds],
        moment: [s.normal(*shape, dtype=float32, scale=0.1) for shape, _ in kinds],
        "masters": [None if dtype is float32 else s.normal(*shape, dtype=float32) for shape, dtype in kinds],
        **numbers(s, len(kinds), step, scale, on_device, skipped),
    }


def numbers(s: Sampler, count: int, step: int, scale: float, on_device: bool, skipped: bool) -> Arguments:
    """What a step over ``count`` tensors is given beside them. ``scale``: the gradients' factor."""
    return {
        "lr": s.full(LR, 1) if on_device else LR,
        "weight_decays": [0.0 if i % 2 else 0.1 for i in range(count)],
        "step": s.full(step, 1, dtype=int64) if on_device else step,
        "inv_scale": s.full(1 / scale, 1) if on_device else None,
        "found_inf": s.full(float(skipped), 1) if on_device or skipped else None,
    }


def adamw_(s: Sampler, m: int, n: int, **options: Any) -> Arguments:
    """See ``_lists``."""
    lists = _lists(s, m, n, "exp_avgs", **options)
    squares = [
        s.array(x.shape, float32, lambda shape=x.shape: np.square(s.draw(shape, 0.1)))  # type: ignore[misc]
        for x in lists["exp_avgs"]
    ]
    return {**lists, "exp_avg_sqs": squares, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}


def sgd_(
    s: Sampler,
    m: int,
    n: int,
    momentum: float = 0.9,
    dampening: float = 0.0,
    nesterov: bool = False,
    **options: Any,
) -> Arguments:
    """See ``_lists``."""
    lists = _lists(s, m, n, "buffers", **options)
    if not momentum:
        lists["buffers"] = [None for _ in lists["buffers"]]
    return {**lists, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}


def _scalar(value: Any) -> float:
    return float(np.asarray(value).reshape(-1)[0])


def _steps(a: Any, *moments: str) -> Iterator[tuple[str, Array, Array, float, list[Any]]]:
    """Yields for each tensor the name of what is updated, its values, the gradient, the decay, and what there
    is of ``moments``; nothing where found_inf is set."""
    if a.found_inf is not None and _scalar(a.found_inf):
        return
    factor = 1.0 if a.inv_scale is None else _scalar(a.inv_scale)
    lists = (getattr(a, name) for name in ("params", "masters", "grads", "weight_decays", *moments))
    for i, (param, master, grad, decay, *own) in enumerate(zip(*lists, strict=True)):
        name, weights = ("params", param) if master is None else ("masters", master)
        yield f"{name}[{i}]", wide(weights), wide(grad) * factor, decay, own


def adamw_oracle(a: Any) -> Results:
    """Loshchilov & Hutter 2019, algorithm 2."""
    found: Results = {}
    lr, step = _scalar(a.lr), _scalar(a.step)
    first, second = 1 - a.beta1**step, 1 - a.beta2**step
    for i, (name, w, g, decay, (m, v)) in enumerate(_steps(a, "exp_avgs", "exp_avg_sqs")):
        terms = a.beta1 * wide(m), (1 - a.beta1) * g
        size = np.abs(terms[0]) + np.abs(terms[1])
        square = a.beta2 * wide(v) + (1 - a.beta2) * g * g
        over = first * (np.sqrt(square / second) + a.epsilon)
        update, bound = lr * (sum(terms) / over + decay * w), lr * (size / over + decay * np.abs(w))
        found |= {
            f"exp_avgs[{i}]": (sum(terms), 8 * ROUNDOFF * size),
            f"exp_avg_sqs[{i}]": (square, 8 * ROUNDOFF * square),
            name: (w - update, 32 * ROUNDOFF * bound + 2 * ROUNDOFF * np.abs(w)),
        }
    return found


def sgd_oracle(a: Any) -> Results:
    """Sutskever et al. 2013, with PyTorch's dampening."""
    found: Results = {}
    lr = _scalar(a.lr)
    for i, (name, w, grad, decay, (buffer,)) in enumerate(_steps(a, "buffers")):
        g, size = grad + decay * w, np.abs(grad) + decay * np.abs(w)
        if buffer is not None:
            b = g if _scalar(a.step) == 1 else a.momentum * wide(buffer) + (1 - a.dampening) * g
            size = size + a.momentum * np.abs(wide(buffer))
            found[f"buffers[{i}]"] = b, 8 * ROUNDOFF * size
            g, size = (g + a.momentum * b if a.nesterov else b), 2 * size
        found[name] = w - lr * g, 8 * ROUNDOFF * lr * size + 2 * ROUNDOFF * np.abs(w)
    return found


def scale_(
    s: Sampler,
    m: int,
    n: int,
    shapes: Shapes | None = None,
    factor: float | None = 1.0,
    bad: float | None = None,
    look: bool = True,
) -> Arguments:
    """``bad`` is put into one element of the last tensor; ``look``: whether found_inf comes."""
    xs = [s.draw(shape).astype(dtype.numpy) for shape, dtype in _tensors(s, m, n, shapes)]
    if bad is not None:
        xs[-1].reshape(-1)[-3] = bad
    return {
        "xs": [s.put(x) for x in xs],
        "factor": s.scalar(factor),
        "found_inf": s.scalar(0.0 if look else None),
    }


def scale_oracle(a: Any) -> Results:
    """One float32 product, one rounding."""
    bad = any(not np.isfinite(wide(x)).all() for x in a.xs)
    factor = np.float32(1) if a.factor is None else a.factor
    return {
        "found_inf": None if a.found_inf is None else np.maximum(a.found_inf, np.float32(bad)),
        **named("xs", [(x.astype(np.float32) * factor).astype(x.dtype) for x in a.xs]),
    }


def loss_scale_(
    s: Sampler, m: int, n: int, scale: float = 8.0, good: int = 0, bad: bool = False, interval: int = 2
) -> Arguments:
    """After ``good`` good steps, and a bad one or not."""
    return {
        "scale": s.full(scale, 1),
        "inv_scale": s.full(1 / scale, 1),
        "good_steps": s.full(good, 1, dtype=int64),
        "found_inf": s.full(float(bad), 1),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": interval,
    }


def loss_scale_oracle(a: Any) -> Results:
    """Micikevicius et al. 2018, section 3.2."""
    scale, good = a.scale, a.good_steps + 1
    if a.found_inf[0]:
        scale, good = scale * np.float32(a.backoff_factor), 0 * good
    elif good[0] == a.growth_interval:
        grown = scale * np.float32(a.growth_factor)
        scale, good = grown if np.isfinite(grown) else scale, 0 * good
    return {
        "scale": scale,
        "inv_scale": np.float32(1) / scale,
        "good_steps": good,
        "found_inf": 0 * a.found_inf,
    }


def count_(s: Sampler, m: int, n: int, bad: bool | None = None) -> Arguments:
    """``bad``: what found_inf says, None for none."""
    return {"counter": s.full(5, 1, dtype=int64), "found_inf": s.scalar(None if bad is None else float(bad))}


def count_oracle(a: Any) -> Results:
    """One more."""
    return {"counter": a.counter + (a.found_inf is None or a.found_inf == 0)}


def _normal(s: Sampler, m: int, n: int, **tensors: Any) -> list[ArrayView]:
    return [s.normal(*shape, dtype=dtype) for shape, dtype in _tensors(s, m, n, **tensors)]


def l2norm(s: Sampler, m: int, n: int, **tensors: Any) -> Arguments:
    """See ``_tensors``."""
    return {"xs": _normal(s, m, n, **tensors), "out": s.output(1, dtype=float32)}


def l2norm_oracle(a: Any) -> Results:
    """A root halves the sum's relative error."""
    out = np.sqrt(sum(float(np.square(wide(x)).sum()) for x in a.xs))
    return {"out": (np.array([out]), sum_slack(out, sum(x.size for x in a.xs)) / 2)}


def clip_(s: Sampler, m: int, n: int, norm: float = 0.5, limit: float = 1.0, **tensors: Any) -> Arguments:
    """Tensors of that norm, or so it is said."""
    return {"xs": _normal(s, m, n, **tensors), "norm": s.full(norm, 1), "max_norm": limit}


def clip_oracle(a: Any) -> Results:
    """Nothing changes within the limit."""
    factor = min(1.0, a.max_norm / (float(a.norm[0]) + 1e-6))
    clipped = [wide(x) * factor for x in a.xs]
    return {} if factor == 1 else named("xs", [(x, 8 * ROUNDOFF * np.abs(x)) for x in clipped])


def _all(cases: dict[str, Options]) -> dict[str, Options]:
    """Cases over tensors of many shapes."""
    return product("{case}", {"case": cases}, shapes=SHAPES)


_SKIPPED: Options = {"dtypes": MIXED[:2], "skipped": True}
_ADAMW = {
    **typed(product("step-{step}", {"step": (1, 100)})),
    "mixed": {"dtypes": MIXED, "step": 7},
    "nothing": {"shapes": ()},
    **product("numbers-on-device-{step}", {"step": (1, 1000)}, dtypes=MIXED, on_device=True),
    "skipped": _SKIPPED,
}
_MOMENTA = ((0.0, False, 1), (0.9, False, 1), (0.9, False, 4), (0.9, True, 4))
_SGD = {
    **typed(product("{momentum}-{nesterov}-{step}", {"momentum nesterov step": _MOMENTA})),
    **product("dampened-{step}", {"step": (1, 2)}, dtypes=MIXED, dampening=0.3),
    **product("numbers-on-device-{step}", {"step": (1, 5)}, dtypes=MIXED, nesterov=True, on_device=True),
    "skipped": _SKIPPED,
}
_FACTORS = ((None, None), (None, np.nan), (0.37, None), (2.0**-10, np.inf), (0.5, -np.inf))
_SCALE = {
    **typed(product("{factor}-{bad}", {"factor bad": _FACTORS})),
    "not-looked-at": {"factor": 3.0, "bad": np.nan, "look": False},
}
_NORMS = {
    **_all({**typed({"": {}}), "mixed": {"dtypes": MIXED}}),
    "one": {"shapes": ((1,),)},
    "empty": {"shapes": ((0,),)},
    "many": {"shapes": ((9,),) * 200},
}
_CLIP = typed(product("{norm}-{limit}", {"norm": (12.0, 0.5, 0.0), "limit": (1.0,)}))
_LOSS_SCALE: dict[str, Options] = {
    "good": {},
    "grows": {"good": 1},
    "bad": {"good": 1, "bad": True},
    "grows-no-more": {"scale": 2.0**127, "good": 1},
    "of-a-long-interval": {"good": 998, "interval": 1000},
}

TESTS = (
    KernelTest("adamw_", adamw_, adamw_oracle, _all(_ADAMW)),
    KernelTest("sgd_", sgd_, sgd_oracle, _all(_SGD)),
    KernelTest("scale_", scale_, scale_oracle, _all(_SCALE)),
    KernelTest("loss_scale_", loss_scale_, loss_scale_oracle, _LOSS_SCALE),
    KernelTest("count_", count_, count_oracle, product("found-{bad}", {"bad": (None, False, True)})),
    KernelTest("l2norm", l2norm, l2norm_oracle, _NORMS),
    KernelTest("clip_", clip_, clip_oracle, _all(_CLIP)),
)
