"""Amaxes that devices share: where scales are current, they are measured first, reduced, and given to the
operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from fp8kit_jax import stages
from fp8kit_jax.amaxes import AMAX, amax_of, with_amaxes
from fp8kit_jax.cuts import products
from fp8kit_jax.program import Program


def run(
    program: Program, arrays: Sequence[Any], axes: tuple[str, ...], bind: Callable[..., Any]
) -> list[Any]:
    """The results of a program that runs on every device along the manual ``axes``, each with its part of the
    arrays.

    What has one scale for the whole tensor that is taken now, takes it from the amax of all parts.
    ``bind(*arrays, program=...)`` runs a program on this device.
    """
    found = next((p.fp8 for p in products(program.spec) if p.fp8 is not None), None)
    if not axes or found is None or not found.x.takes_amax or program.face == "measure":
        return list(bind(*arrays, program=program))
    have = {name: array for (name, _), array in zip(program.arguments, arrays, strict=True)}

    def reduced(amax: Any) -> Any:
        return jax.lax.pmax(amax, axes)

    amaxes: dict[str, Any] = {}
    if program.face == "forward":
        measure = replace(program, face="measure", needs=())
        amaxes = {
            name: reduced(a)
            for (name, _), a in zip(measure.results, bind(*arrays, program=measure), strict=True)
        }
    if program.operation == "norm_mlp":
        return stages.run(program, have, amaxes, reduced, bind)
    known = tuple((f"{name}_amax_in", AMAX) for name in "xw")
    inner = replace(
        program,
        spec=replace(program.spec, product=with_amaxes(program.spec.product)),
        metas=(*program.metas, *known),
    )
    have |= {f"{name}_in": amax for name, amax in amaxes.items()}
    if program.face == "backward" and "g_amax" in program.signature.grads:
        inner = replace(inner, late=(*program.late, "g_amax_in"))
        have["g_amax_in"] = reduced(amax_of(have["y"]))
    return list(bind(*(have[name] for name, _ in inner.arguments), program=inner))
