"""``ops.linear`` with delayed scaling through three front doors, each in the few lines that a door needs.

Each door owns its parameters and its FP8 state, allocates what the operation fills, and hangs the operation's
own ``backward`` on its autograd. ``Problem`` fixes what is computed; a door's ``steps`` returns what every
step gave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.backends import dispatch
from fp8kit.formats import float32
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec
from fp8kit.recipe import DelayedScaling
from fp8kit.spec import Meta

SPEC = LinearSpec(ProductSpec(24, (40,), fp8=DelayedScaling().quantization))
NEEDS = frozenset({"x", "weight0", "bias0"})
HISTORY = 3
ROWS = 20
METAS = {
    "x": Meta((ROWS, 24), float32),
    "weight0": Meta((40, 24), float32),
    "bias0": Meta((40,), float32),
    "x_scale": Meta((1,), float32),
    "w_scale": Meta((1,), float32),
}
SIGNATURE = linear.infer(SPEC, METAS, NEEDS)
INPUTS = tuple(METAS)
OUTPUTS = (*SIGNATURE.outputs, *SIGNATURE.saved)  # what forward fills, in the order the doors pass it on
GRADS = tuple(SIGNATURE.grads)
FP8_MAX = {"x": 448.0, "w": 448.0, "g": 57344.0}


@dataclass
class Problem:
    """Parameters and, per step, an input and the gradient of the output."""

    weight: np.ndarray[Any, Any] = field(default_factory=lambda: _normal(1, 40, 24))
    bias: np.ndarray[Any, Any] = field(default_factory=lambda: _normal(2, 40))
    batches: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = field(
        default_factory=lambda: [
            (_normal(3 + i, ROWS, 24) * 2.0**i, _normal(13 + i, ROWS, 40) * 0.01) for i in range(4)
        ]
    )


@dataclass
class State:
    """FP8 state of the three quantised tensors: float32 scale [1], scale_inv [1], amax_history [HISTORY, 1]
    each."""

    scale: dict[str, Any]
    history: dict[str, Any]


def _normal(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def fresh_state() -> State:
    return State(
        {n: np.ones(1, np.float32) for n in FP8_MAX}, {n: np.zeros((HISTORY, 1), np.float32) for n in FP8_MAX}
    )


def plan() -> Any:
    """The plan every door uses; a door caches it by what it depends on."""
    return linear.plan(SPEC, METAS, NEEDS, dispatch.kernels(arrays.CPU))


def run_forward(inputs: dict[str, ArrayView], out: dict[str, ArrayView]) -> None:
    """``linear.forward`` on buffers that a door allocated. The amaxes are zeroed, as their metas ask."""
    for name, meta in SIGNATURE.outputs.items():
        if meta.zero:
            arrays.zero_(out[name])
    p = plan()
    linear.forward(p, inputs, out, out, scratch(p.scratch), 0)


def run_backward(
    saved: dict[str, ArrayView], g: ArrayView, g_scale: ArrayView, grads: dict[str, ArrayView]
) -> None:
    """``linear.backward`` on buffers that a door allocated."""
    arrays.zero_(grads["g_amax"])
    p = plan()
    linear.backward(p, {"g_scale": g_scale}, saved, {"y": g}, grads, scratch(p.backward_scratch), 0)


def scratch(metas: dict[str, Meta]) -> dict[str, ArrayView]:
    return {name: arrays.empty(meta.shape, meta.dtype, arrays.CPU) for name, meta in metas.items()}


def update(scale: ArrayView, history: ArrayView, fp8_max: float) -> None:
    """The mutating operation: new scale from the history, which rolls."""
    inv = arrays.empty((1,), float32, arrays.CPU)
    dispatch.kernels(arrays.CPU).update_delayed_([scale], [inv], [history], [fp8_max], 0, False, 0)


def native_steps(problem: Problem) -> list[dict[str, np.ndarray[Any, Any]]]:
    """The native door: ``autograd.apply``; amaxes go straight into row 0 of the histories."""
    from fp8kit.autograd import apply, tensor

    state = fresh_state()
    scale = {n: arrays.as_view(v) for n, v in state.scale.items()}
    history = {n: arrays.as_view(v) for n, v in state.history.items()}
    results = []
    for x, g in problem.batches:
        values = {
            n: tensor(v, requires_grad=True)
            for n, v in (("x", x), ("weight0", problem.weight), ("bias0", problem.bias))
        }
        given = {f"{n}_amax": h.slice(0, 0, 1).reshape(1) for n, h in history.items()}
        inputs = values | {"x_scale": scale["x"], "w_scale": scale["w"]}
        y = apply(linear, SPEC, inputs, given, late={"g_scale": scale["g"]})["y"]
        for n in ("x", "w"):
            update(scale[n], history[n], FP8_MAX[n])
        y.backward(g)
        update(scale["g"], history["g"], FP8_MAX["g"])
        got = {"y": y.numpy()} | {f"d{n}": v.grad.numpy() for n, v in values.items() if v.grad is not None}
        results.append(
            got
            | {f"{n}_scale": v.copy() for n, v in state.scale.items()}
            | {f"{n}_history": v.copy() for n, v in state.history.items()}
        )
    return results
