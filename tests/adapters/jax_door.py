"""The JAX door of ``doors.py``: FFI calls inside jit, their gradient by custom_vjp, the FP8 state explicit.

The forward state goes in and comes out as values. The backward state's new value comes back as the "gradient"
of its old one.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from fp8kit_jax import call, register, shape_struct

from fp8kit.arrays import ArrayView
from fp8kit.formats import float32
from fp8kit.spec import Meta

from .doors import (
    FP8_MAX,
    GRADS,
    HISTORY,
    INPUTS,
    OUTPUTS,
    SIGNATURE,
    Problem,
    run_backward,
    run_forward,
    update,
)


def _forward(*views: ArrayView) -> None:
    run_forward(
        dict(zip(INPUTS, views[: len(INPUTS)], strict=True)),
        dict(zip(OUTPUTS, views[len(INPUTS) :], strict=True)),
    )


def _backward(g: ArrayView, g_scale: ArrayView, *views: ArrayView) -> None:
    count = len(SIGNATURE.saved)
    run_backward(
        dict(zip(SIGNATURE.saved, views[:count], strict=True)),
        g,
        g_scale,
        dict(zip(GRADS, views[count:], strict=True)),
    )


def _update(
    scale: ArrayView,
    history: ArrayView,
    amax: ArrayView,
    new_scale: ArrayView,
    new_history: ArrayView,
    fp8_max: float,
) -> None:
    new_scale.numpy()[...], new_history.numpy()[...] = scale.numpy(), history.numpy()
    new_history.numpy()[0] = amax.numpy()
    update(new_scale, new_history, fp8_max)


register("fp8kit_proof.linear", _forward)
register("fp8kit_proof.linear_backward", _backward)
register("fp8kit_proof.update_scale", _update, ["fp8_max"])


def _update_scale(scale: Any, history: Any, amax: Any, fp8_max: float) -> Any:
    out = (shape_struct(Meta((1,), float32)), shape_struct(Meta((HISTORY, 1), float32)))
    return call("fp8kit_proof.update_scale", out, scale, history, amax, fp8_max=np.float64(fp8_max))


@jax.custom_vjp
def layer(x: Any, weight: Any, bias: Any, forward_state: Any, backward_state: Any) -> Any:
    """y and the new forward state."""
    return _layer_forward(x, weight, bias, forward_state, backward_state)[0]


def _layer_forward(x: Any, weight: Any, bias: Any, forward_state: Any, backward_state: Any) -> Any:
    metas = SIGNATURE.outputs | SIGNATURE.saved
    scales = [forward_state[n][0] for n in "xw"]
    out = call("fp8kit_proof.linear", [shape_struct(m) for m in metas.values()], x, weight, bias, *scales)
    named = dict(zip(OUTPUTS, out, strict=True))
    new = {n: _update_scale(*forward_state[n], named[f"{n}_amax"], FP8_MAX[n]) for n in "xw"}
    return (named["y"], new), ([named[n] for n in SIGNATURE.saved], backward_state, forward_state)


def _layer_backward(kept: Any, cotangents: Any) -> Any:
    saved, (g_scale, g_history), forward_state = kept
    out = call(
        "fp8kit_proof.linear_backward",
        [shape_struct(m) for m in SIGNATURE.grads.values()],
        cotangents[0],
        g_scale,
        *saved,
    )
    grads = dict(zip(GRADS, out, strict=True))
    new = _update_scale(g_scale, g_history, grads["g_amax"], FP8_MAX["g"])
    return (
        grads["x"],
        grads["weight0"],
        grads["bias0"],
        jax.tree.map(jax.numpy.zeros_like, forward_state),
        new,
    )


layer.defvjp(_layer_forward, _layer_backward)


@jax.jit
def _step(x: Any, weight: Any, bias: Any, forward_state: Any, backward_state: Any, g: Any) -> Any:
    (y, new_forward), pull = jax.vjp(layer, x, weight, bias, forward_state, backward_state)
    dx, dw, db, _, new_backward = pull((g, jax.tree.map(jax.numpy.zeros_like, new_forward)))
    return y, dx, dw, db, new_forward, new_backward


def steps(problem: Problem) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Every step of the problem inside jit."""

    def fresh() -> tuple[Any, Any]:
        return jax.numpy.ones(1), jax.numpy.zeros((HISTORY, 1))

    forward_state, backward_state = {n: fresh() for n in "xw"}, fresh()
    results = []
    for x, g in problem.batches:
        y, dx, dw, db, forward_state, backward_state = _step(
            x, problem.weight, problem.bias, forward_state, backward_state, g
        )
        state = forward_state | {"g": backward_state}
        got = {"y": y, "dx": dx, "dweight0": dw, "dbias0": db}
        got |= {f"{n}_scale": s for n, (s, _) in state.items()} | {
            f"{n}_history": h for n, (_, h) in state.items()
        }
        results.append({n: np.asarray(v).copy() for n, v in got.items()})
    return results
