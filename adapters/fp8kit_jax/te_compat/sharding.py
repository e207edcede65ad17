"""``transformer_engine.jax.sharding``: names of logical axes, what the mesh axes mean, constraints."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax

from fp8kit.errors import ArgumentError
from fp8kit_jax.flax.common import constrained, mesh_axes
from fp8kit_jax.scopes import MeshResource, mesh_resource
from fp8kit_jax.scopes import global_shard_guard as global_shard_guard

BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"
JOINED_AXES = "nvte_joined"
W_NO_SHARD_AXES = "nvte_w_no_shard"
W_FSDP_AXES = "nvte_w_fsdp"
W_TP_AXES = "nvte_w_tp"
W_JOINED_AXES = "nvte_w_joined"


def _mesh() -> Any:
    """Returns the mesh of ``jax.set_mesh``, or of ``with mesh:``."""
    found = jax.sharding.get_abstract_mesh()
    if not found.empty:
        return found
    with warnings.catch_warnings():  # of a way that JAX is giving up, and programs still go
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.interpreters import pxla

        return pxla.thread_resources.env.physical_mesh


def global_mesh_resource() -> MeshResource:
    """Returns the MeshResource in force; one without axes where none is."""
    return mesh_resource()


def is_mesh_available() -> bool:
    """Whether a mesh is set."""
    return not _mesh().empty


def num_of_devices() -> int:
    """Returns the devices of all processes."""
    return len(jax.devices())


def get_all_mesh_axes() -> tuple[str, ...]:
    """Returns the names of the mesh's axes."""
    return tuple(_mesh().axis_names)


def get_num_devices_in_mesh(mesh: Any = None) -> int:
    """Returns the devices of ``mesh``, None: of the one that is set; 1 where none is."""
    found = _mesh() if mesh is None else mesh
    return 1 if found.empty else int(found.size)


def get_mesh_axis_size(axis: str | None, mesh: Any = None) -> int:
    """Returns the devices along an axis of ``mesh``, None: of the one that is set; 1 for no axis.
    ArgumentError for one that the mesh does not have."""
    if axis is None:
        return 1
    found = _mesh() if mesh is None else mesh
    if axis not in found.shape:
        raise ArgumentError("get_mesh_axis_size", "axis", repr(axis), f"one of {tuple(found.shape)}")
    return int(found.shape[axis])


def get_active_resource_axis(resource_name: str) -> str | None:
    """Returns the mesh axis of a field of the MeshResource in force, where it has more than one device."""
    axis = getattr(mesh_resource(), resource_name)
    return axis if is_mesh_available() and get_mesh_axis_size(axis) > 1 else None


def get_sharding_map_logic_axis_to_mesh_axis() -> dict[str, Any]:
    """Transformer Engine's logical axes -> mesh axes, by the MeshResource in force; none without a mesh."""
    return mesh_axes() if is_mesh_available() else {}


def get_padded_spec(spec: Any, ndim: int) -> tuple[Any, ...]:
    """Returns a PartitionSpec's axes, for ``ndim`` dimensions."""
    own = () if spec is None else tuple(spec)
    if len(own) > ndim:
        raise ArgumentError("get_padded_spec", "spec", own, f"at most {ndim} dimensions")
    return own + (None,) * (ndim - len(own))


def with_sharding_constraint(x: Any, pspec: Any) -> Any:
    """x with a constraint, less its manual axes; as it is without a mesh, or a PartitionSpec."""
    if pspec is None or not is_mesh_available():
        return x
    manual = jax.sharding.get_abstract_mesh().manual_axes

    def left(axes: Any) -> Any:
        if isinstance(axes, tuple):
            return tuple(axis for axis in axes if axis not in manual) or None
        return None if axes in manual else axes

    own = tuple(left(axes) for axes in pspec)
    return x if not any(own) else jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*own))


def with_sharding_constraint_by_logical_axes(x: Any, logical_axis_names: Sequence[Any] | None) -> Any:
    """x with a constraint by logical axes: by the rules of Flax in force, or Transformer Engine's."""
    return constrained(x, logical_axis_names)
