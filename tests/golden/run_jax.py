"""The cases of ``fp8kit_jax``: functions under ``jax.jit``, Flax and NNX modules, arrays over a mesh.

Every step is one compiled program, which gives outputs, gradients, and the next FP8 state as the gradient of
the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import flax
import fp8kit_jax as fj
import fp8kit_jax.flax
import fp8kit_jax.nnx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fp8kit as fk
from tests.golden.cases import RECIPES, Case
from tests.golden.jax_modules import FLAX, JAX, JAX_EXACT, NNX, Key, Model, Sets
from tests.golden.layers import Record
from tests.golden.modules import Function
from tests.golden.values import Angles, Array, Fixed, HostArray, draw, parameter

STEPS = 3


class Jax:
    """``fp8kit_jax`` on JAX's devices."""

    def __init__(self, device: str) -> None:
        self.device = jax.devices("cpu" if device == "cpu" else "gpu")[0]

    def run(self, case: Case, record: Record) -> None:
        """Run a case."""
        with jax.default_device(self.device):
            PROGRAMS[case.program](self, case, record)

    def host(self, value: Any) -> HostArray:
        """An array on the host."""
        return np.asarray(value)

    def scope(self, case: Case) -> AbstractContextManager[Any]:
        """The autocast of the case's recipe."""
        recipe = RECIPES[case.recipe]
        return fj.autocast(enabled=recipe is not None, recipe=recipe)

    def put(self, host: Any) -> Any:
        """An array on the device."""
        return jax.device_put(host, self.device)


def record_tree(record: Record, name: str, tree: Any) -> None:
    """Record every array of a tree, by its path."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        record(name + jax.tree_util.keystr(path), leaf)


def values(case: Case, key: str, call: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The arrays among the arguments of a call, at ``step``, on the host."""

    def made(name: str, value: Any) -> Any:
        if isinstance(value, Array):
            host = draw(f"{key}/{name}", value, step, case.exact)
            return host.astype(jnp.dtype(value.dtype or case.dtype))
        if isinstance(value, Fixed):
            return np.array(value.values, value.dtype)
        if isinstance(value, Angles):
            return fj.rope_frequencies(value.dim, value.positions, **value.options)
        if isinstance(value, Key):
            return np.array([value.seed + step, 0], np.uint32)
        if isinstance(value, tuple):
            return tuple(made(f"{name}{i}", part) for i, part in enumerate(value))
        return None

    return {
        name: found
        for name, value in call.items()
        if not isinstance(value, Sets) and jax.tree.leaves(found := made(name, value))
    }


def differentiated(value: Any) -> bool:
    """Whether an argument wants a gradient."""
    if isinstance(value, tuple):
        return any(isinstance(part, Array) and part.grad for part in value)
    return isinstance(value, Sets) or (isinstance(value, Array) and value.grad)


def weighted(case: Case, outputs: Any) -> Any:
    """A sum whose gradients with respect to the outputs are those of ``values``."""
    total = jnp.float32(0)
    for i, y in enumerate(jax.tree.leaves(outputs)):
        if jnp.issubdtype(y.dtype, jnp.floating):
            g = draw(f"g{i}", Array(y.shape), 0, case.exact).astype(y.dtype)
            total += (y * g).astype(jnp.float32).sum()
    return total


def function_of(case: Case, found: Function) -> tuple[Callable[..., Any], list[str]]:
    """What a step computes of (arguments that want gradients, the others), and the names of the former:
    (gradients, outputs)."""
    names = [name for name, value in found.call.items() if differentiated(value)]

    def forward(differentiable: dict[str, Any], others: dict[str, Any]) -> Any:
        kwargs = {**found.call, **differentiable, **others}
        return getattr(fj, found.function)(**kwargs)

    def loss(differentiable: dict[str, Any], others: dict[str, Any]) -> Any:
        outputs = forward(differentiable, others)
        return weighted(case, outputs), outputs

    return jax.grad(loss, has_aux=True), names


def sets_of(found: Function) -> dict[str, Any]:
    """Fresh QuantizerSets for the arguments that are to be some."""
    return {
        name: fj.create_set(n_quantizer_sets=value.count)
        for name, value in found.call.items()
        if isinstance(value, Sets)
    }


# --- programs -----------------------------------------------------------------------------------------------


def steps(f: Jax, case: Case, record: Record) -> None:
    """A function, forward and backward, its FP8 state carried on."""
    found = (JAX | JAX_EXACT)[case.what]
    inner, names = function_of(case, found)
    step_of = jax.jit(inner)
    with f.scope(case):
        sets = sets_of(found)
        for step in range(STEPS if sets else 2):
            arrays = {name: f.put(v) for name, v in values(case, case.what, found.call, step).items()}
            differentiable = {name: arrays.pop(name) for name in names if name in arrays} | sets
            grads, outputs = step_of(differentiable, arrays)
            sets = {name: grads.pop(name) for name in sets}
            record_tree(record, f"{step}.y", outputs)
            record_tree(record, f"{step}.d", grads)
            record_tree(record, f"{step}.state", sets)


def quantize(f: Jax, case: Case, record: Record) -> None:
    """Codes, scales and values, and their product, within jit."""
    scaling = case.options["scaling"]

    @jax.jit
    def all_of(x: Any, w: Any) -> Any:
        other = "block_1x128" if scaling == "block_128x128" else scaling
        a, b = fj.quantize(x, fk.E4M3, scaling=scaling), fj.quantize(w, fk.E4M3, scaling=other)
        drawn = fj.quantize(
            x, fk.E5M2, scaling=scaling, rounding="stochastic", key=jnp.array([3, 0], jnp.uint32)
        )
        return a, fj.dequantize(a), drawn, fj.gemm(a, b)

    x, w = (
        f.put(draw(name, Array(shape), 0, True)) for name, shape in (("x", (130, 256)), ("w", (144, 256)))
    )
    record_tree(record, "y", all_of(x, w))


def filled(key: str, tree: Any, case: Case) -> Any:
    """A tree of parameters with the values of ``values.parameter``, by their paths."""

    def made(path: Any, leaf: Any) -> Any:
        name = ".".join(str(getattr(part, "key", getattr(part, "name", part))) for part in path)
        return jnp.asarray(parameter(key, name, leaf.shape, case.exact), leaf.dtype)

    return jax.tree_util.tree_map_with_path(made, tree)


def fresh(variables: Mapping[str, Any]) -> Any:
    """Collections before their first use: scales of 1, the rest 0."""

    def made(path: Any, leaf: Any) -> Any:
        return (jnp.ones if "scale" in str(path[-1]) else jnp.zeros)(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(made, variables)


def _made(case: Case, model: Model) -> dict[str, Any]:
    """The constructor's arguments; computed in the case's dtype."""
    own = {} if case.dtype == "float32" else {"dtype": jnp.dtype(case.dtype)}
    return {**model.args, **own}


def _linen(case: Case, model: Model) -> Any:
    kwargs = _made(case, model)
    if "layer_type" in kwargs:
        kwargs["layer_type"] = getattr(fp8kit_jax.flax.TransformerLayerType, kwargs["layer_type"])
    return getattr(fp8kit_jax.flax, model.module)(**kwargs)


def _inputs(f: Jax, case: Case, model: Model, step: int) -> list[Any]:
    named = {f"x{i}": spec for i, spec in enumerate(model.inputs)}
    return [f.put(host) for host in values(case, "inputs", named, step).values()]


def _given(f: Jax, case: Case, model: Model) -> dict[str, Any]:
    """What a call takes beside its inputs, by name, the same at each step."""
    return model.call | {name: f.put(host) for name, host in values(case, "call", model.call, 0).items()}


def linen(f: Jax, case: Case, record: Record) -> None:
    """A Flax linen module."""
    model = FLAX[case.what]
    module = _linen(case, model)
    given = _given(f, case, model)

    def loss(params: Any, metas: Any, inputs: Any, key: Any) -> Any:
        outputs = module.apply({"params": params, **metas}, *inputs, **given, rngs={"dropout": key})
        return weighted(case, outputs), outputs

    step_of = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    with f.scope(case):
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        shapes = jax.eval_shape(lambda: module.init(rngs, *_inputs(f, case, model, 0), **given))
        metas, shapes = flax.core.pop({"params": {}, **flax.linen.unbox(shapes)}, "params")
        params, metas = filled(case.what, shapes, case), fresh(metas)
        for step in range(STEPS):
            (grads, state, inputs), outputs = step_of(
                params, metas, _inputs(f, case, model, step), jax.random.key(step)
            )
            metas = fj.update_collections(state, metas)
            # by the name that files of hashes have
            state = {"fp8_metas": metas[fj.FP8_COLLECTION_NAME]} if metas else {}
            for name, tree in (("y", outputs), ("g", grads), ("state", state), ("d", inputs)):
                record_tree(record, f"{step}.{name}", tree)


def decode(f: Jax, case: Case, record: Record) -> None:
    """A Flax layer token by token over a cache."""
    model = FLAX[case.what]
    module = _linen(case, model)
    (x,) = _inputs(f, case, model, 0)

    @jax.jit
    def step_of(variables: Any, cache: Any, part: Any) -> Any:
        kept = {**variables, "cache": cache}
        return module.apply(kept, part, deterministic=True, decode=True, mutable=["cache"])

    with f.scope(case):
        shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x, deterministic=True, decode=True))
        rest, shapes = flax.core.pop(flax.linen.unbox(shapes), "params")
        rest, cache = flax.core.pop(fresh(rest), "cache")
        variables = {"params": filled(case.what, shapes, case), **rest}
        for i, part in enumerate((x[:, :4], x[:, 4:5], x[:, 5:6])):
            y, changed = step_of(variables, cache, part)
            cache = changed["cache"]
            record(f"{i}.y", y)
        record_tree(record, "cache", cache)


def nnx_module(f: Jax, case: Case, record: Record) -> None:
    """A Flax NNX module."""
    model, meta = NNX[case.what], fp8kit_jax.nnx.Fp8Meta
    given = _given(f, case, model)
    with f.scope(case):
        kwargs = _made(case, model) | ({} if model.module == "LayerNorm" else {"rngs": nnx.Rngs(0)})
        made = getattr(fp8kit_jax.nnx, model.module)(**kwargs)
        graph, params, metas, rest = nnx.split(made, nnx.Param, meta, ...)
        params = _refilled(case, params)

        def loss(params: Any, metas: Any, inputs: Any, rest: Any) -> Any:
            outputs = nnx.merge(graph, params, metas, rest, copy=True)(*inputs, **given)
            return weighted(case, outputs), outputs

        step_of = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
        for step in range(STEPS):
            (grads, metas, inputs), outputs = step_of(params, metas, _inputs(f, case, model, step), rest)
            for name, tree in (("y", outputs), ("g", grads), ("state", metas), ("d", inputs)):
                record_tree(record, f"{step}.{name}", tree)


def _refilled(case: Case, params: Any) -> Any:
    """The state of an NNX module's parameters, with the values of ``values.parameter``."""
    pure = nnx.to_pure_dict(params)
    nnx.replace_by_pure_dict(params, filled(case.what, pure, case))
    return params


def sharded(f: Jax, case: Case, record: Record) -> None:
    """A function whose inputs lie over eight devices: rows over four, features over two."""
    found = (JAX | JAX_EXACT)[case.what]
    call = {**found.call, "x": Array((8, 10, 48))}
    found = Function(found.function, call)
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "tensor"))
    inner, names = function_of(case, found)
    step_of = jax.jit(inner)

    def put(name: str, host: Any) -> Any:
        def split(array: Any) -> Any:
            last = (None,) * (array.ndim - 1)
            spec = PartitionSpec("data") if name == "x" else PartitionSpec(*last, "tensor")
            return jax.device_put(array, NamedSharding(mesh, spec))

        return jax.tree.map(split, host) if name in ("x", "kernel", "bias") else host

    with f.scope(case):
        sets = sets_of(found)
        for step in range(STEPS):
            arrays = {name: put(name, v) for name, v in values(case, case.what, call, step).items()}
            differentiable = {name: arrays.pop(name) for name in names if name in arrays} | sets
            grads, outputs = step_of(differentiable, arrays)
            sets = {name: grads.pop(name) for name in sets}
            record_tree(record, f"{step}.y", outputs)
            record_tree(record, f"{step}.d", grads)
            record_tree(record, f"{step}.state", sets)


PROGRAMS: dict[str, Callable[[Any, Case, Record], None]] = {
    "steps": steps,
    "quantize": quantize,
    "linen": linen,
    "decode": decode,
    "nnx": nnx_module,
    "sharded": sharded,
}


def frontend(device: str) -> Jax:
    """The frontend on a device."""
    return Jax(device)
