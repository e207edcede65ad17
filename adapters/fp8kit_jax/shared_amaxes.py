"""Amaxes that devices share: where scales are taken of a whole tensor now, amaxes are measured first, reduced
over the devices, and passed to the operation (``Operation.shared_amaxes``). Where they are taken between
products too, what the operation is made of runs instead (``Operation.decompose``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit.formats import float32
from fp8kit.ops.partition import Component
from fp8kit.spec import Meta
from fp8kit_jax.program import Program

AMAX = Meta((1,), float32)
Arrays = dict[str, Any]
Bind = Callable[..., Any]
Reduce = Callable[[Any], Any]


def run(program: Program, arrays: Sequence[Any], axes: tuple[str, ...], bind: Bind) -> list[Any]:
    """Returns the results of a program that runs on every device along the manual ``axes``, each with its
    part of the arrays: all parts cast with the scales of the whole. ``bind(*arrays, program=...)`` runs a
    program on this device."""
    shared = program.op.shared_amaxes(program.spec) if axes and program.face != "measure" else None
    if shared is None:
        return list(bind(*arrays, program=program))

    def reduced(amax: Any) -> Any:
        return jax.lax.pmax(amax, axes)

    have, incoming = program.named(arrays)
    measure = _measure(program)
    if program.face == "forward" and measure.results:
        have |= {f"{name}_in": reduced(amax) for name, amax in _run(measure, have, {}, bind).items()}
    if shared.spec is not None:
        have |= _amaxes_of(program, have, incoming, reduced)
        found = _run(_with_amaxes(program), have, incoming, bind)
    elif program.face == "forward":
        found = _forward(program, have, reduced, bind)
    else:
        found = _backward(program, have, incoming, reduced, bind)
    return [found[name].reshape(shape) for name, shape in program.seen("results")]


def amax_of(x: Any) -> Any:
    """max|x|, NaN ignored, float32 (1,)."""
    size = jnp.abs(x).astype(jnp.float32)
    return jnp.max(jnp.where(jnp.isnan(size), 0.0, size)).reshape(1)


def _measure(program: Program) -> Program:
    return replace(program, face="measure", needs=(), cotangents=())


def _run(program: Program, have: Arrays, incoming: Arrays, bind: Bind) -> Arrays:
    """Returns a program's results by name, from its arguments and its cotangents by name."""
    values = zip(program.ordered(have, incoming), program.seen("arguments"), strict=True)
    shaped = [value.reshape(shape) for value, (_, shape) in values]
    return {name: r for (name, _), r in zip(program.results, bind(*shaped, program=program), strict=True)}


def _with_amaxes(program: Program) -> Program:
    """Returns the program with those amaxes as inputs that it would take itself."""
    shared = program.op.shared_amaxes(program.spec)
    if shared is None:
        return program
    names = [f"{name}_in" for name, _ in _measure(program).results]
    names += [name for name, of in shared.arrays.items() if of in dict(program.metas)]
    return replace(program, spec=shared.spec, metas=(*program.metas, *((name, AMAX) for name in names)))


def _amaxes_of(program: Program, have: Arrays, incoming: Arrays, reduced: Reduce) -> Arrays:
    """Those of the amaxes of ``_with_amaxes`` that are of arrays at hand."""
    shared = program.op.shared_amaxes(program.spec)
    source = incoming if program.face == "backward" else have
    wanted = {name for name, _ in _with_amaxes(program).arguments} - have.keys()
    arrays = {} if shared is None else shared.arrays
    return {name: reduced(amax_of(source[of])) for name, of in arrays.items() if name in wanted}


# --- calls that are made of several -------------------------------------------------------------------------


def _components(program: Program) -> list[tuple[Component, Program]]:
    """Returns what a program is made of, each with its forward program; that of its own amaxes."""
    metas, wanted, found = dict(program.metas), set(program.needs), []
    for component in program.op.decompose(program.spec):
        own = tuple((name, metas[whole]) for name, whole in component.inputs.items() if whole in metas)
        needs = tuple(name for name, _ in own if component.inputs[name] in wanted)
        one = Program("forward", component.operation.name, component.spec, own, needs, policy=program.policy)
        for name, meta in one.interface.result_metas.items():
            whole = component.results.get(name, name)
            metas[whole] = meta
            wanted |= {whole} if needs else set()
        found.append((component, one))
    return found


def _forward(program: Program, have: Arrays, reduced: Reduce, bind: Bind) -> Arrays:
    """Returns the results of a program by name, and what lies between its components."""
    have = dict(have)
    for component, one in _components(program):
        sources, made, inner = component.inputs, component.results, _with_amaxes(one)
        values = {name: have[sources.get(name, name)] for name, _ in inner.arguments}
        for name, result in _run(inner, values, {}, bind).items():
            whole = made.get(name, name)
            have[whole] = result
            if name in one.interface.amaxes and f"{name}_in" not in values:
                have[f"{whole}_in"] = reduced(result)
        for name, source in one.interface.passes.items():
            have[made.get(name, name)] = have[sources[source]]
    return have | {name: have[f"{name}_in"] for name in program.interface.amaxes}


def _backward(program: Program, have: Arrays, incoming: Arrays, reduced: Reduce, bind: Bind) -> Arrays:
    """Returns the gradients of a program by name, and their amaxes."""
    have, grads = dict(have), dict(incoming)
    for component, one in reversed(_components(program)):
        if not one.needs:
            continue
        sources, made, own = component.inputs, component.results, one.interface
        came = {name: grads[made.get(name, name)] for name in own.results if made.get(name, name) in grads}
        back = replace(one, face="backward", cotangents=tuple(came))
        have |= _amaxes_of(back, have, came, reduced)
        inner = _with_amaxes(back)
        values = {name: have[sources.get(name, made.get(name, name))] for name, _ in inner.read}
        for name, result in _run(inner, values, came, bind).items():
            whole = component.grad_amaxes.get(name, name)
            if name in own.grads:
                grads[sources[name]] = result
            elif name in own.grad_watched:
                grads[name] = result
            elif f"{whole}_in" not in have:
                have[f"{whole}_in"] = reduced(result)
        for name, passed in own.signature.grad_passes.items():
            grads[sources[name]] = grads[made.get(passed, passed)]
    return grads | {name: have[f"{name}_in"] for name in program.interface.grad_amaxes}
