"""Mesh axes of the kind ``Explicit``, which ``jax.make_mesh`` makes: an array's type says how it is split,
and so must a result's.

An operation runs there as on axes of the kind ``Auto``, where XLA splits it by what it has at hand
(``sharding``). Its outputs are typed by the same cuts, asked for with the types of the arguments; a gradient
takes the type of what it is the gradient of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from fp8kit_jax import sharding
from fp8kit_jax.program import Program

Arrays = Mapping[str, Any]


def mesh_of(tree: Any) -> Any:
    """The mesh whose explicit axes the types of the leaves name, None where there is none."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def run(
    function: Callable[[Any, Any], Any],
    mesh: Any,
    program: Program,
    arguments: Arrays,
    inputs: Any,
    state: Any,
) -> Any:
    """``function(inputs, state)``, which gives the outputs of the forward ``program`` by name, and their
    types. ``arguments``: its own."""
    types = {name: jax.typeof(value).sharding.spec for name, value in arguments.items()}
    specs = sharding.result_specs(program, mesh, [types[name] for name, _ in program.arguments])
    s = program.signature
    out = {name: NamedSharding(mesh, specs[name]) for name, meta in s.outputs.items() if not meta.zero}
    out |= {name: NamedSharding(mesh, types[source]) for name, source in s.passes.items()}
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=out)(inputs, state)
