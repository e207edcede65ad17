"""The factory: an ``Operation`` as a differentiable JAX function, its gradient rule the operation's own
``backward``.

``apply`` is what every function here is made of. FP8 state with delayed scaling comes in as a value,
one ``Slot`` a quantised tensor, and its *cotangent is its new value* (Transformer Engine's convention for
JAX): the amaxes of the forward pass and of the gradients meet in the rule, which updates all slots at once.
JAX sums cotangents over the devices of a shard_map and over the elements of a vmap; ``state`` says how the
new value survives that.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from fp8kit.arguments import shown
from fp8kit.arrays import Shape
from fp8kit.backends.policy import get_policy
from fp8kit.errors import ArgumentError, AutogradError, FormatError, RecipeError, ShapeError
from fp8kit.execution.refusals import want_call
from fp8kit.formats import int64
from fp8kit.quantization import AmaxHistory
from fp8kit.spec import Meta, Operation
from fp8kit_jax import inspection, manual, primitive, sharding, shared_amaxes
from fp8kit_jax.arguments import as_array
from fp8kit_jax.program import Program
from fp8kit_jax.state import State, next_state

Arrays = dict[str, Any]


@dataclass(frozen=True)
class _Static:
    """What does not change from call to call of one traced function."""

    operation: str
    spec: Any
    pairs: tuple[str, ...]  # inputs that come as pairs of words
    scaling: AmaxHistory | None  # delayed scaling's rule, None where there is no state
    axes: tuple[str, ...]  # manual mesh axes over which amaxes are reduced
    views: tuple[tuple[str, tuple[int, ...]], ...] = ()  # shapes in JAX of what the operation has flattened
    flat: tuple[tuple[str, tuple[int, ...]], ...] = ()  # and the operation's shapes of those that are inputs
    kept_as: str = ""  # name of what is kept for backward, for the policies of jax.checkpoint


_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Kept:
    """Residuals: what backward reads, the amaxes of the forward pass where there is state, the state, and
    which of stacked layers it is, where the inspector is to know."""

    read: Arrays
    amaxes: Arrays
    state: Any
    place: Any
    program: Program = field(metadata=_STATIC)
    inputs: tuple[str, ...] = field(metadata=_STATIC)  # names of what is differentiated
    refused: str | None = field(metadata=_STATIC)  # why there is no gradient


def apply(
    operation: Operation,
    spec: Any,
    inputs: Mapping[str, Any],
    state: State | None = None,
    scaling: AmaxHistory | None = None,
    pairs: tuple[str, ...] = ("rng",),
    flat: Mapping[str, Shape] | None = None,
    views: Mapping[str, Shape] | None = None,
    kept_as: str = "",
) -> Arrays:
    """Run an operation, a registered one of your own too; its outputs by name, amaxes left out.

    * ``inputs``: JAX arrays by name, None or left out where absent. Integers and states are not
      differentiated.
    * ``state``: slots by prefix and operand (``{"x": Slot, "w": Slot, "g": Slot}``, prefixed in operations of
      several products), with ``scaling``, the rule that updates them.
    * ``pairs``: inputs that are int64 to the operation and come as uint32 pairs (``rng``).
    * ``flat``: the operation's own shapes of inputs that come with more dimensions (a kernel (K, 3, N) as (K,
      3 N)); ``views``: the shapes that outputs and saved arrays have in JAX, where not the operation's. So
      devices can split what the operation has flattened.
    * ``kept_as``: the name, for the policies of ``jax.checkpoint``, of what forward computes and backward
      reads (codes, statistics); "" for none.

    Raises what ``infer`` raises, when it is traced; ShapeError for an input that is missing, ArgumentError
    for one that the operation does not have and for a spec of another class, FormatError for one that is no
    array; AutogradError for forward mode, which within ``jax.jit`` JAX itself refuses.
    """
    want_call(operation, spec, inputs, lambda value: True, "an array")  # ``as_array`` says what is one
    if not _hashable(spec):
        raise ArgumentError(operation.name, "spec", shown(spec), "a frozen dataclass, which can be hashed")
    arrays = {
        name: as_array(operation.name, name, value) for name, value in inputs.items() if value is not None
    }
    arrays, state = manual.alike((arrays, state or {}))
    axes = manual.axes((arrays, state))
    own = {
        name: shape for name, shape in (flat or {}).items() if name in arrays and arrays[name].shape != shape
    }
    seen = {name: arrays[name].shape for name in own} | dict(views or {})
    views = tuple(seen.items())
    static = _Static(operation.name, spec, pairs, scaling, axes, views, tuple(own.items()), kept_as)
    place = inspection.place()

    def run(arrays: Arrays, state: State) -> Arrays:
        return _run(static, arrays, state, place)  # type: ignore[no-any-return]

    # a shard_map outside of jit refuses rules with symbolic zeros
    if jax.sharding.get_abstract_mesh().manual_axes:
        # of this call alone: the policy in force is no part of what jit would know it by
        run = jax.jit(run, inline=True)
    mesh = sharding.explicit_mesh((arrays, state))
    try:
        if mesh is None:
            return run(arrays, state)
        program, arguments = _program(static, arrays, state, ())
        return sharding.run_explicit(run, mesh, program, arguments, arrays, state)
    except TypeError as error:  # which JAX raises for much else: its text alone tells
        if "forward-mode" not in str(error):
            raise
        asked = "one in forward mode (jvp, jacfwd)"
        raise AutogradError(
            operation.name, "derivative", asked, "one in reverse mode: grad, vjp, jacrev"
        ) from None


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _metas(static: _Static, inputs: Mapping[str, Any]) -> tuple[tuple[str, Meta], ...]:
    out, flat = [], dict(static.flat)
    for name, value in inputs.items():
        try:
            meta = primitive.meta_of(value)
        except FormatError:
            raise FormatError(static.operation, name, value.dtype, "a dtype of fp8kit") from None
        if not all(isinstance(n, int) for n in meta.shape):
            raise ShapeError(
                static.operation, name, f"shape {meta.shape}", "sizes that are known when it is traced"
            )
        meta = meta._replace(shape=flat.get(name, meta.shape))
        if name in static.pairs and meta.dtype.name == "uint32":
            meta = Meta((*meta.shape[:-1], meta.shape[-1] // 2), int64)
        out.append((name, meta))
    return tuple(out)


def _program(static: _Static, inputs: Arrays, state: State, needs: tuple[str, ...]) -> tuple[Program, Arrays]:
    """Returns the forward program and its arguments."""
    arguments = inputs | {f"{key}_scale": slot.scale for key, slot in state.items() if not key.endswith("g")}
    metas = _metas(static, arguments)
    return Program(
        "forward", static.operation, static.spec, metas, needs, policy=get_policy(), views=static.views
    ), arguments


def _forward(
    static: _Static, inputs: Arrays, state: State, place: Any, needs: tuple[str, ...]
) -> tuple[Program, Arrays, Arrays]:
    """Returns the forward program, its arguments, and its results, passes included."""
    program, arguments = _program(static, inputs, state, needs)
    results = _bound(program, list(arguments.values()), static)
    passes = {name: arguments[source] for name, source in program.interface.passes.items()}
    inspection.show(program, results, place)
    return program, arguments, results | passes


def _bound(program: Program, arrays: list[Any], static: _Static) -> Arrays:
    """Returns the program's results by name; its amaxes those of all devices."""
    found = shared_amaxes.run(program, arrays, static.axes, primitive.bind)
    return {name: result for (name, _), result in zip(program.results, found, strict=True)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static: _Static, inputs: Arrays, state: State, place: Any) -> Arrays:
    program, _, results = _forward(static, inputs, state, place, ())
    return {name: results[name] for name in program.interface.results}


def _run_forward(static: _Static, inputs: Any, state: Any, place: Any) -> tuple[Arrays, _Kept]:
    values = {name: leaf.value for name, leaf in inputs.items()}
    needs = tuple(
        name
        for name, leaf in inputs.items()
        if leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.floating)
    )
    slots, place = jax.tree.map(
        lambda leaf: leaf.value, (state, place), is_leaf=lambda leaf: hasattr(leaf, "perturbed")
    )
    refused = None
    try:  # it is said when a gradient is asked for: what a loss is no function of, such as a straight-through
        # estimate's rounding behind ``stop_gradient``, may well be differentiated on the way
        _ = _program(static, values, slots, needs)[0].interface
    except AutogradError as error:
        refused, needs = str(error), ()
    program, arguments, results = _forward(static, values, slots, place, needs)
    own, everything = program.interface, results | arguments
    read = {name: everything[name] for name in (*own.kept, *own.signature.saved)}
    amaxes = {name: results[name] for name in own.amaxes if state}
    if static.kept_as:
        made = {name: value for name, value in read.items() if name not in arguments}
        read |= checkpoint_name(made, static.kept_as)
        amaxes = checkpoint_name(amaxes, static.kept_as)
    kept = _Kept(read, amaxes, slots, place, program, tuple(inputs), refused)
    return {name: results[name] for name in own.results}, kept


def _run_backward(static: _Static, kept: _Kept, cotangents: Any) -> tuple[Any, Any, None]:
    if kept.refused is not None:
        raise AutogradError(kept.refused)
    program, state = kept.program, kept.state
    own = program.interface
    g = {name: value for name, value in cotangents.items() if not isinstance(value, SymbolicZero)}
    first = own.results[0]  # backward reads this one's, zeros where it is not used
    if first not in g:
        g[first] = manual.zeros(cotangents[first].shape, cotangents[first].dtype, kept)
    found: Arrays = {}
    if own.signature.grads:
        incoming = tuple(name for name in own.results if name in g)
        scales = {f"{key}_scale": slot.scale for key, slot in state.items()}
        backward = replace(program, face="backward", cotangents=incoming)
        found = _bound(backward, backward.ordered(kept.read | scales, g), static)
        inspection.show(backward, found, kept.place)
    grads = {
        name: found[name] if passed is None else g.get(own.results[passed])
        for name, (_, passed) in zip(program.needs, own.gradients, strict=True)
    }
    inputs = {name: grads.get(name) for name in kept.inputs}
    if not state:
        return inputs, state, None
    if static.scaling is None:
        raise RecipeError(
            static.operation, "quantizer_set", "slots", "none beside a recipe that keeps no state"
        )
    amaxes = kept.amaxes | {name: found[name] for name in own.grad_amaxes if name in found}
    largest = {name.removesuffix("_amax"): value for name, value in amaxes.items()}
    return inputs, next_state(static.scaling, state, largest, static.axes), None


_run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)
