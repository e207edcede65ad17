"""The JAX door of ``doors.py``: FFI calls inside jit, their gradient by custom_vjp, the FP8 state explicit.

The forward state goes in and comes out as values. The backward state's new value comes back as the "gradient" of its old one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax_tvm_ffi
import numpy as np
import tvm_ffi

from fp8kit.arrays import CPU, ArrayView
from fp8kit.formats import DTYPES

from .doors import FP8_MAX, GRADS, HISTORY, INPUTS, OUTPUTS, SIGNATURE, Problem, run_backward, run_forward, update


def view(t: Any) -> ArrayView:
    """What the FFI hands over, by pointer."""
    return ArrayView(t.data_ptr(), tuple(t.shape), DTYPES[str(t.dtype)], CPU, t)


def _register(name: str, function: Callable[..., None], arg_spec: list[str]) -> None:
    jax_tvm_ffi.register_ffi_target(name, tvm_ffi.convert(function), arg_spec=arg_spec, platform="cpu", pass_owned_tensor=True)


def _forward(*tensors: Any) -> None:
    views = [view(t) for t in tensors]
    run_forward(dict(zip(INPUTS, views[: len(INPUTS)], strict=True)), dict(zip(OUTPUTS, views[len(INPUTS) :], strict=True)))


def _backward(g: Any, g_scale: Any, *tensors: Any) -> None:
    views = [view(t) for t in tensors]
    count = len(SIGNATURE.saved)
    run_backward(
        dict(zip(SIGNATURE.saved, views[:count], strict=True)), view(g), view(g_scale), dict(zip(GRADS, views[count:], strict=True))
    )


def _update(scale: Any, history: Any, amax: Any, new_scale: Any, new_history: Any, fp8_max: float) -> None:
    ns, nh = view(new_scale).numpy(), view(new_history).numpy()
    ns[...], nh[...] = view(scale).numpy(), view(history).numpy()
    nh[0] = view(amax).numpy()
    update(view(new_scale), view(new_history), fp8_max)


_register("fp8kit_proof.linear", _forward, ["args", "rets"])
_register("fp8kit_proof.linear_backward", _backward, ["args", "rets"])
_register("fp8kit_proof.update_scale", _update, ["args", "rets", "attrs.fp8_max"])


def _shape(meta: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(meta.shape, meta.dtype.numpy)


def _update_scale(scale: Any, history: Any, amax: Any, fp8_max: float) -> Any:
    out = (jax.ShapeDtypeStruct((1,), np.float32), jax.ShapeDtypeStruct((HISTORY, 1), np.float32))
    return jax.ffi.ffi_call("fp8kit_proof.update_scale", out)(scale, history, amax, fp8_max=np.float64(fp8_max))


@jax.custom_vjp
def layer(x: Any, weight: Any, bias: Any, forward_state: Any, backward_state: Any) -> Any:
    """y and the new forward state."""
    return _layer_forward(x, weight, bias, forward_state, backward_state)[0]


def _layer_forward(x: Any, weight: Any, bias: Any, forward_state: Any, backward_state: Any) -> Any:
    metas = SIGNATURE.outputs | SIGNATURE.saved
    scales = [forward_state[n][0] for n in "xw"]
    out = jax.ffi.ffi_call("fp8kit_proof.linear", [_shape(m) for m in metas.values()])(x, weight, bias, *scales)
    named = dict(zip(OUTPUTS, out, strict=True))
    new = {n: _update_scale(*forward_state[n], named[f"{n}_amax"], FP8_MAX[n]) for n in "xw"}
    return (named["y"], new), ([named[n] for n in SIGNATURE.saved], backward_state, forward_state)


def _layer_backward(kept: Any, cotangents: Any) -> Any:
    saved, (g_scale, g_history), forward_state = kept
    out = jax.ffi.ffi_call("fp8kit_proof.linear_backward", [_shape(m) for m in SIGNATURE.grads.values()])(cotangents[0], g_scale, *saved)
    grads = dict(zip(GRADS, out, strict=True))
    new = _update_scale(g_scale, g_history, grads["g_amax"], FP8_MAX["g"])
    return grads["x"], grads["weight0"], grads["bias0"], jax.tree.map(jax.numpy.zeros_like, forward_state), new


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
        y, dx, dw, db, forward_state, backward_state = _step(x, problem.weight, problem.bias, forward_state, backward_state, g)
        state = forward_state | {"g": backward_state}
        got = {"y": y, "dx": dx, "dweight0": dw, "dbias0": db}
        got |= {f"{n}_scale": s for n, (s, _) in state.items()} | {f"{n}_history": h for n, (_, h) in state.items()}
        results.append({n: np.asarray(v).copy() for n, v in got.items()})
    return results
