"""Manual mesh axes: where a function runs once a device (shard_map), what varies over which axis, and
reductions over them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fp8kit_jax.scopes import mesh_resource


def axes(tree: Any) -> tuple[str, ...]:
    """Returns the manual mesh axes over which a tree's leaves may differ, pipeline stages left out: a stage
    has tensors of its own.

    A shard_map that checks what varies says so in the types; one that does not (``check_vma=False``) leaves
    all of its axes."""
    stages = mesh_resource().pp_resource
    found = tuple(axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis != stages)
    if not found or not _varying(jax.lax.axis_index(found[0])):
        return found
    union = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(tree)))
    return tuple(axis for axis in found if axis in union)


def varying(kind: Any) -> frozenset[str]:
    """Returns the manual axes over which an abstract array varies."""
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else kind.vma)


def _varying(leaf: Any) -> frozenset[str]:
    return varying(jax.typeof(leaf))


def alike(tree: Any) -> Any:
    """Returns the tree with every leaf varying over the manual axes that any leaf varies over; the way back
    sums, as JAX does it for every leaf that is the same on all devices."""
    leaves = jax.tree.leaves(tree)
    union = frozenset().union(*(_varying(leaf) for leaf in leaves))
    if not union:
        return tree
    return jax.tree.map(lambda leaf: _cast(leaf, union - _varying(leaf)), tree)


def _cast(leaf: Any, missing: frozenset[str]) -> Any:
    return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf


def zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """Zeros that vary over the axes that the first leaf of ``like`` varies over."""
    return _cast(jnp.zeros(shape, dtype), _varying(jax.tree.leaves(like)[0]))


def first(names: tuple[str, ...]) -> Any:
    """Whether this device is the first along all of these manual axes: a scalar bool."""
    own = jnp.array(True)
    for name in names:
        own = own & (jax.lax.axis_index(name) == 0)
    return own
