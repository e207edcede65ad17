"""The kernels over many tensors, against float64.

AdamW's quotient has an error of a few u of (b1 |m| + (1 - b1) |g|) / (sqrt(v) + epsilon): m may cancel, v
cannot. SGD's is a few u of the sum of the terms' magnitudes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fp8kit.formats import DType, bfloat16, float16, float32, int64
from fp8kit.testing.compare import ROUNDOFF, Array, sum_slack
from fp8kit.testing.contract import Arguments, KernelTest, Options, Results, typed, wide
from fp8kit.testing.contract.sampler import Sampler

Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((17, 33), (1,), (5, 3, 7), (0,), (300,), (70, 1000))
MIXED = (bfloat16, float32, float16)
_LR = 1e-2


def _shapes(m: int, n: int, shapes: Shapes | None) -> Shapes:
    return ((m, n),) if shapes is None else shapes


def _lists(
    s: Sampler,
    m: int = 0,
    n: int = 0,
    moment: str = "",
    shapes: Shapes | None = None,
    dtypes: tuple[DType, ...] = (),
    step: int = 3,
    on_device: bool = False,
    skipped: bool = False,
) -> Arguments:
    """Tensors of these dtypes in turn, one of (m, n) without ``shapes``; masters, which are no roundings,
    where they are 16 bits wide. ``on_device``: numbers lie there, and gradients are scaled; ``skipped``:
    found_inf is set."""
    dtypes, scale = dtypes or (s.dtype,), np.inf if skipped else 1024.0 if on_device else 1.0
    tensors = [(shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(_shapes(m, n, shapes))]
    return {
        "params": [s.normal(*shape, dtype=dtype) for shape, dtype in tensors],
        "grads": [s.normal(*shape, dtype=dtype, scale=0.3 * scale) for shape, dtype in tensors],
        moment: [s.normal(*shape, dtype=float32, scale=0.1) for shape, _ in tensors],
        "masters": [
            None if dtype is float32 else s.normal(*shape, dtype=float32) for shape, dtype in tensors
        ],
        "lr": s.full(_LR, 1) if on_device else _LR,
        "weight_decays": [0.0 if i % 2 else 0.1 for i in range(len(tensors))],
        "step": s.full(step, 1, dtype=int64) if on_device else step,
        "inv_scale": s.full(1 / scale, 1) if on_device else None,
        "found_inf": s.full(float(skipped), 1) if on_device or skipped else None,
    }


def adamw_(s: Sampler, m: int = 0, n: int = 0, **options: Any) -> Arguments:
    """See ``_lists``."""
    lists = _lists(s, m, n, "exp_avgs", **options)
    squares = [
        s.array(x.shape, float32, lambda shape=x.shape: np.square(s.draw(shape, 0.1)))  # type: ignore[misc]
        for x in lists["exp_avgs"]
    ]
    return {**lists, "exp_avg_sqs": squares, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}


def sgd_(
    s: Sampler,
    m: int = 0,
    n: int = 0,
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
    """Of each tensor: the name of what is updated, its values, the gradient, decay, and what there is of
    ``moments``, all None where found_inf is set."""
    factor = 1.0 if a.inv_scale is None else _scalar(a.inv_scale)
    lists = zip(
        a.params, a.masters, a.grads, a.weight_decays, *(getattr(a, name) for name in moments), strict=True
    )
    for i, (param, master, grad, decay, *own) in enumerate(lists):
        name, weights = ("params", param) if master is None else ("masters", master)
        yield f"{name}[{i}]", wide(weights), wide(grad) * factor, decay, own


def _unchanged(a: Any, *names: str) -> Results | None:
    """What stood there, where found_inf is set."""
    if a.found_inf is None or not _scalar(a.found_inf):
        return None
    return {
        f"{name}[{i}]": x for name in ("params", "masters", *names) for i, x in enumerate(getattr(a, name))
    }


def adamw_oracle(a: Any) -> Results:
    """Loshchilov & Hutter 2019, algorithm 2."""
    found = _unchanged(a, "exp_avgs", "exp_avg_sqs")
    if found is not None:
        return found
    found, lr, step = {}, _scalar(a.lr), _scalar(a.step)
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
    found = _unchanged(a, "buffers")
    if found is not None:
        return found
    found, lr = {}, _scalar(a.lr)
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
    m: int = 0,
    n: int = 0,
    shapes: Shapes | None = None,
    factor: float | None = 1.0,
    bad: float | None = None,
    look: bool = True,
) -> Arguments:
    """``bad`` is put into one element of the last tensor; ``look``: whether found_inf comes."""
    xs = [s.draw(shape).astype(s.dtype.numpy) for shape in _shapes(m, n, shapes)]
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
        **{f"xs[{i}]": (x.astype(np.float32) * factor).astype(x.dtype) for i, x in enumerate(a.xs)},
    }


def loss_scale_(
    s: Sampler,
    m: int = 0,
    n: int = 0,
    scale: float = 8.0,
    good: int = 0,
    bad: bool = False,
    interval: int = 2,
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


def count_(s: Sampler, m: int = 0, n: int = 0, bad: bool | None = None) -> Arguments:
    """``bad``: what found_inf says, None for none."""
    return {"counter": s.full(5, 1, dtype=int64), "found_inf": s.scalar(None if bad is None else float(bad))}


def count_oracle(a: Any) -> Results:
    """One more."""
    return {"counter": a.counter + (a.found_inf is None or a.found_inf == 0)}


def l2norm(
    s: Sampler, m: int = 0, n: int = 0, shapes: Shapes | None = None, dtypes: tuple[DType, ...] = ()
) -> Arguments:
    """Tensors of these dtypes in turn."""
    kinds = dtypes or (s.dtype,)
    xs = [s.normal(*shape, dtype=kinds[i % len(kinds)]) for i, shape in enumerate(_shapes(m, n, shapes))]
    return {"xs": xs, "out": s.output(1, dtype=float32)}


def l2norm_oracle(a: Any) -> Results:
    """A root halves the sum's relative error."""
    out = np.sqrt(sum(float(np.square(wide(x)).sum()) for x in a.xs))
    return {"out": (np.array([out]), sum_slack(out, sum(x.size for x in a.xs)) / 2)}


def clip_(
    s: Sampler, m: int = 0, n: int = 0, shapes: Shapes | None = None, norm: float = 0.5, limit: float = 1.0
) -> Arguments:
    """Tensors of that norm, or so it is said."""
    return {
        "xs": [s.normal(*shape) for shape in _shapes(m, n, shapes)],
        "norm": s.full(norm, 1),
        "max_norm": limit,
    }


def clip_oracle(a: Any) -> Results:
    """Nothing changes within the limit."""
    factor = min(1.0, a.max_norm / (float(a.norm[0]) + 1e-6))
    if factor == 1:
        return {f"xs[{i}]": x for i, x in enumerate(a.xs)}
    return {
        f"xs[{i}]": (wide(x) * factor, 8 * ROUNDOFF * np.abs(wide(x)) * factor) for i, x in enumerate(a.xs)
    }


def _all(cases: dict[str, Options]) -> dict[str, Options]:
    """Cases over tensors of many shapes."""
    return {name: {"shapes": SHAPES, **own} for name, own in cases.items()}


_SKIPPED: Options = {"dtypes": MIXED[:2], "skipped": True}
_ADAMW = {
    **typed({f"step-{step}": {"step": step} for step in (1, 100)}),
    "mixed": {"dtypes": MIXED, "step": 7},
    "nothing": {"shapes": ()},
    **{f"numbers-on-device-{n}": {"dtypes": MIXED, "step": n, "on_device": True} for n in (1, 1000)},
    "skipped": _SKIPPED,
}
_SGD = {
    **typed(
        {
            f"{momentum}-{nesterov}-{step}": {"momentum": momentum, "nesterov": nesterov, "step": step}
            for momentum, nesterov, step in (
                (0.0, False, 1),
                (0.9, False, 1),
                (0.9, False, 4),
                (0.9, True, 4),
            )
        }
    ),
    **{f"dampened-{step}": {"dtypes": MIXED, "dampening": 0.3, "step": step} for step in (1, 2)},
    **{
        f"numbers-on-device-{step}": {"dtypes": MIXED, "nesterov": True, "step": step, "on_device": True}
        for step in (1, 5)
    },
    "skipped": _SKIPPED,
}
_FACTORS = ((None, None), (None, np.nan), (0.37, None), (2.0**-10, np.inf), (0.5, -np.inf))
_SCALE = {
    **typed({f"{factor}-{bad}": {"factor": factor, "bad": bad} for factor, bad in _FACTORS}),
    "not-looked-at": {"factor": 3.0, "bad": np.nan, "look": False},
}
_NORMS: dict[str, Options] = {
    **_all(typed({"": {}})),
    "mixed": {"dtypes": MIXED, "shapes": SHAPES},
    "one": {"shapes": ((1,),)},
    "empty": {"shapes": ((0,),)},
    "many": {"shapes": ((9,),) * 200},
}
_CLIP = typed(
    {
        f"{norm}-{limit}": {"norm": norm, "limit": limit}
        for norm, limit in ((12.0, 1.0), (0.5, 1.0), (0.0, 1.0))
    }
)
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
    KernelTest("count_", count_, count_oracle, {f"found-{bad}": {"bad": bad} for bad in (None, False, True)}),
    KernelTest("l2norm", l2norm, l2norm_oracle, _NORMS),
    KernelTest("clip_", clip_, clip_oracle, _all(_CLIP)),
)
