"""Flax modules trained on meshes of devices by logical axes, and on one device: what the tests of meshes and
of several processes share."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from fp8kit_jax import flax as modules
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from fp8kit.recipes import NAMED

RECIPES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "rowwise": NAMED["rowwise"].recipe,
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
BATCH, LENGTH, WIDTH, INNER = 4, 16, 64, 128
_MLP = {"kernel_axes_1": ("nvte_w_fsdp", None, "nvte_w_tp"), "kernel_axes_2": ("nvte_w_tp", "nvte_w_fsdp")}
MODELS = {
    "DenseGeneral": lambda: modules.DenseGeneral(
        WIDTH, use_bias=True, kernel_axes=("nvte_w_fsdp", "nvte_w_tp"), bias_axes=("nvte_w_tp",)
    ),
    "LayerNormMLP": lambda: modules.LayerNormMLP(INNER, activations=("silu", "linear"), **_MLP),
    "TransformerLayer": lambda: modules.TransformerLayer(
        WIDTH, INNER, 4, hidden_dropout=0.0, attention_dropout=0.0, enable_relative_embedding=False
    ),
}


class Layout(NamedTuple):
    """Sizes of a mesh's axes by their names, and what they mean; ``manual``: by shard_map."""

    axes: dict[str, int]
    resource: fj.MeshResource
    manual: bool = False


LAYOUTS = {
    "fsdp": Layout({"fsdp": 2}, fj.MeshResource(fsdp_resource="fsdp")),
    "tp": Layout({"tp": 2}, fj.MeshResource(tp_resource="tp")),
    "fsdp and tp": Layout({"fsdp": 2, "tp": 2}, fj.MeshResource(fsdp_resource="fsdp", tp_resource="tp")),
    "dp and tpsp": Layout({"dp": 2, "tp": 2}, fj.MeshResource(dp_resource="dp", tpsp_resource="tp")),
    "dp and cp": Layout({"dp": 2, "cp": 2}, fj.MeshResource(dp_resource="dp", cp_resource="cp")),
    "shard_map": Layout({"dp": 4}, fj.MeshResource(dp_resource="dp"), manual=True),
}
# of two devices
PAIRS = {
    "fsdp": LAYOUTS["fsdp"],
    "tp": LAYOUTS["tp"],
    "cp": Layout({"cp": 2}, fj.MeshResource(cp_resource="cp")),
    "two by shard_map": Layout({"dp": 2}, fj.MeshResource(dp_resource="dp"), manual=True),
}
ANY_LAYOUT = LAYOUTS | PAIRS


def batches(steps: int) -> tuple[Any, Any]:
    """Inputs and targets, float32 (steps, b, s, H)."""
    x = np.random.default_rng(0).standard_normal((steps, BATCH, LENGTH, WIDTH)).astype(np.float32)
    return x, np.tanh(x[:, :, ::-1])


def train(model: str, recipe: str, steps: int, layout: Layout | None = None) -> tuple[list[float], Any]:
    """Returns the losses of so many steps of Adam, and the state after them, on one device or by a layout.
    Works where the devices belong to several processes."""
    module = MODELS[model]()
    resource = fj.MeshResource() if layout is None else layout.resource

    def init() -> TrainState:
        variables = module.init({"params": jax.random.key(0)}, jnp.zeros((BATCH, LENGTH, WIDTH)))
        return TrainState.create(apply_fn=module.apply, params=variables, tx=optax.adam(1e-3))

    def loss(variables: Any, x: Any, target: Any) -> Any:
        y = module.apply(variables, x, **({} if model == "DenseGeneral" else {"deterministic": True}))
        return (((y[0] if isinstance(y, tuple) else y) - target) ** 2).mean()

    def step(state: TrainState, x: Any, target: Any) -> tuple[TrainState, Any]:
        if layout is None or not layout.manual:
            value, grads = jax.value_and_grad(loss)(state.params, x, target)
        else:
            rows = P("dp")
            whole = jax.shard_map(
                lambda *a: jax.lax.pmean(loss(*a), "dp"), mesh=mesh, in_specs=(P(), rows, rows), out_specs=P()
            )
            value, grads = jax.value_and_grad(whole)(state.params, x, target)
        return state.apply_gradients(grads=grads), value

    with contextlib.ExitStack() as scopes:
        scopes.enter_context(fj.autocast(RECIPES[recipe] is not None, RECIPES[recipe], resource))
        place: Any = lambda array: array  # noqa: E731
        if layout is None:
            state = nn.unbox(jax.jit(init)())
        else:
            count = int(np.prod([*layout.axes.values()]))
            devices = np.array(jax.devices()[:count]).reshape([*layout.axes.values()])
            mesh = Mesh(devices, tuple(layout.axes))
            rules = modules.extend_logical_axis_rules(())
            scopes.enter_context(jax.set_mesh(mesh))
            scopes.enter_context(nn.logical_axis_rules(rules))
            named = nn.get_partition_spec(jax.eval_shape(init))
            own = nn.logical_to_mesh_sharding(named, mesh, rules)
            state = nn.unbox(jax.jit(init, out_shardings=None if layout.manual else own)())
            batch = tuple(axis for axis in layout.axes if axis not in ("tp", "cp"))
            rows = NamedSharding(mesh, P(batch, *(axis for axis in layout.axes if axis == "cp")))

            def place(array: Any) -> Any:
                return jax.make_array_from_callback(array.shape, rows, lambda part: array[part])

        run, losses = jax.jit(step), []
        for x, target in zip(*batches(steps), strict=True):
            state, value = run(state, place(x), place(target))
            losses.append(value)
        return [float(value) for value in losses], state


def fp8_state(state: TrainState) -> dict[str, np.ndarray]:
    """Returns the scales and histories of a trained module, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state.params.get(fj.FP8_COLLECTION_NAME, {}))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
