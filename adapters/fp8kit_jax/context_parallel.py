"""Attention over sequences that are split along a mesh axis: each device has its queries, and gathers keys
and values (the way back sums their gradients and gives each device its part).

A causal mask sees as many keys as the chunk of queries ends at: the diagonal ends in the last corner of
chunk x those keys. Of padded sequences a chunk has as many queries as are left for it; causal ones have as
many keys as queries. With causal load balancing a device has chunks r and 2 n - 1 - r of 2 n
(``reorder_causal_load_balancing``), so that all compute as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.arguments import flag, shown
from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit_jax.checks import ALIASES
from fp8kit_jax.scopes import mesh_resource
from fp8kit_jax.sequences import ReorderStrategy, inverse_reorder_causal_load_balancing

Attend = Callable[[Mapping[str, Any]], Any]
_OP = "dot_product_attention"
_PADDING = ("padding", "padding_causal")
_MASKS = ("no_mask", "causal", "causal_bottom_right", *_PADDING)
_SUMS = ("cu_seqlens_q", "cu_seqlens_kv")
# what a call with split sequences does not have
_NONE = ("mask", "bias", "attn_bias_type", "alibi_slopes", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def split_axis(arguments: Mapping[str, Any]) -> str:
    """The mesh axis along which a call's sequences are split, "" for none: ``context_parallel_axis``, or the
    ``cp_resource`` of the MeshResource in force where the call is one that can be split. ArgumentError for an
    axis that no mesh in force has, UnsupportedError for a call that cannot be split."""
    asked = arguments["context_parallel_axis"]
    balanced = arguments["context_parallel_causal_load_balanced"]
    flag(_OP, "context_parallel_causal_load_balanced", balanced)
    axis, mesh = asked or mesh_resource().cp_resource or "", _mesh()
    if not axis:
        if balanced:
            wanted = "False without context_parallel_axis, or cp_resource of a MeshResource"
            raise ArgumentError(_OP, "context_parallel_causal_load_balanced", True, wanted)
        return ""
    if mesh.empty or axis not in mesh.shape:
        if not asked:
            return ""
        wanted = "an axis of the mesh of jax.set_mesh, or of shard_map"
        raise ArgumentError(_OP, "context_parallel_axis", shown(axis), wanted)
    if mesh.shape[axis] == 1:
        return ""
    why = _refused(arguments)
    if why is not None and (asked or balanced or axis in mesh.manual_axes):
        raise UnsupportedError(_OP, *why)
    return "" if why is not None else axis


def attend_split(attend: Attend, arguments: Mapping[str, Any], axis: str, quantized: bool) -> Any:
    """``attend(arguments)`` with sequences split along ``axis``. UnsupportedError where the call is
    ``quantized``: operands share scales."""
    if quantized:
        wanted = "a recipe without fp8_dpa: scales are those of the whole sequence"
        raise UnsupportedError(_OP, "context_parallel_axis", shown(axis), wanted)
    layers = _separate(arguments)
    at = arguments["qkv_format"].index("s")
    offset = arguments["softmax_offset"]
    balanced = arguments["context_parallel_causal_load_balanced"]
    mesh = _mesh()
    chunks = mesh.shape[axis] * (2 if balanced else 1)
    manual = axis in mesh.manual_axes
    for name, layer in zip(("query", "key", "value"), layers, strict=True):
        if layer.ndim != 4 or layer.shape[at] % (chunks // (mesh.shape[axis] if manual else 1)):
            raise ShapeError(_OP, name, f"shape {layer.shape}", f"a sequence of equal {chunks} chunks")

    lengths = {n: jnp.diff(arguments[n]) for n in _SUMS if arguments[n] is not None}
    beside = lengths if offset is None else {"softmax_offset": offset} | lengths

    def local(query: Any, key: Any, value: Any, *given: Any) -> Any:
        of_device = dict(zip(beside, given, strict=True))
        sums = {name: _sums(value) for name, value in of_device.items() if name in _SUMS}
        return _of_device(attend, {**arguments, **of_device, **sums}, (query, key, value), axis, at)

    if manual:
        return local(*layers, *beside.values())
    spec, batch, heads = _specs(mesh, layers, axis, at)
    specs = (spec,) * 3 + tuple(P(heads if name == "softmax_offset" else batch) for name in beside)
    operands = (*layers, *beside.values())
    if mesh.explicit_axes:
        reshard: Any = jax.sharding.reshard
        operands = tuple(reshard(a, NamedSharding(mesh, own)) for a, own in zip(operands, specs, strict=True))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec)(*operands)


def _of_device(
    attend: Attend, arguments: Mapping[str, Any], layers: tuple[Any, Any, Any], axis: str, at: int
) -> Any:
    """The device's queries over all keys and values."""
    query, *both = layers
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    both = [jax.lax.all_gather(a, axis, axis=at, tiled=True) for a in both]
    beside = {"context_parallel_axis": "", "query": query}
    own = {**arguments, **beside, "context_parallel_causal_load_balanced": False}
    balanced = arguments["context_parallel_causal_load_balanced"]
    if balanced:
        swap = ReorderStrategy.DualChunkSwap
        both = [inverse_reorder_causal_load_balancing(a, swap, ranks, at) for a in both]
    own |= dict(zip(("key", "value"), both, strict=True))
    mask = ALIASES.get(arguments["attn_mask_type"], arguments["attn_mask_type"])
    if mask == "no_mask":
        return attend(own)
    batch, kind = query.shape[1 - at], "padding" if mask == "padding" else "padding_causal_bottom_right"
    rows = jnp.arange(batch + 1, dtype=jnp.int32)
    found = []
    queries = jnp.split(query, 2, at) if balanced else [query]
    for number, part in zip((rank, 2 * ranks - 1 - rank), queries, strict=False):
        length = part.shape[at]
        before = number.astype(jnp.int32) * length
        if mask in _PADDING:
            left = jnp.clip(jnp.diff(arguments["cu_seqlens_q"]) - before, 0, length)
            seen = left + jnp.where(left > 0, before, 0)
            sums = [_sums(left), _sums(seen)]
            if mask == "padding":
                sums[1] = arguments["cu_seqlens_kv"]
        else:
            sums = [rows * length, rows * (before + length)]
        how = {"attn_mask_type": kind, "bottom_right_diagonal": None, **dict(zip(_SUMS, sums, strict=True))}
        found.append(attend({**own, **how, "query": part}))
    return jnp.concatenate(found, at)


def _sums(lengths: Any) -> Any:
    """Running sums of lengths, ``cu_seqlens``."""
    return jnp.pad(jnp.cumsum(lengths), (1, 0)).astype(jnp.int32)


def _refused(arguments: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """(argument, what it is, what it may be) of a call whose sequences cannot be split; None for one that
    can."""
    kind = ALIASES.get(arguments["attn_mask_type"], arguments["attn_mask_type"])
    if arguments["qkv_format"] == "thd":
        return "qkv_format", "'thd'", "'bshd' or 'sbhd' with split sequences"
    if kind not in _MASKS:
        return "attn_mask_type", shown(kind), f"one of {', '.join(_MASKS)} with split sequences"
    if arguments["dropout_rate"]:
        return "dropout_rate", arguments["dropout_rate"], "0 with split sequences"
    if kind in ("no_mask", "padding") and arguments["window_size"] not in (None, (-1, -1)):
        return "window_size", arguments["window_size"], "none with split sequences and no causal mask"
    if kind not in _PADDING and any(arguments[name] is not None for name in _SUMS):
        return "cu_seqlens_q", "given", f"none with split sequences and the mask {kind}"
    if kind == "padding_causal" and arguments["cu_seqlens_kv"] is not arguments["cu_seqlens_q"]:
        return "cu_seqlens_kv", "another array", "cu_seqlens_q itself with split sequences and this mask"
    for name in _NONE:
        if arguments[name] is not None and arguments[name] != "no_bias":
            return name, "given", "none with split sequences"
    return None


def _separate(arguments: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Queries, keys and values, also of packed ones."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if key is None:
        query, key, value = (query[..., i, :, :] for i in range(3))
    elif value is None:
        key, value = (key[..., i, :, :] for i in range(2))
    return query, key, value


def _specs(mesh: Any, layers: tuple[Any, ...], axis: str, at: int) -> tuple[P, Any, Any]:
    """The PartitionSpec of queries, keys and values, and what splits their batches and heads: by the
    MeshResource in force, where mesh axes divide them."""
    own = mesh_resource()

    def axes(fields: tuple[str, ...], *sizes: int) -> Any:
        found: tuple[str, ...] = ()
        parts = 1
        for field in fields:
            name = getattr(own, field)
            if name is None or name == axis or name in found or name not in mesh.shape:
                continue
            if all(size % (parts * mesh.shape[name]) == 0 for size in sizes):
                found, parts = (*found, name), parts * mesh.shape[name]
        return found or None

    batch = axes(("dp_resource", "fsdp_resource"), layers[0].shape[1 - at])
    heads = axes(("tp_resource", "tpsp_resource"), *(layer.shape[2] for layer in layers))
    dims = (axis, batch) if at == 0 else (batch, axis)
    return P(*dims, heads), batch, heads


def _mesh() -> Any:
    """The mesh of ``jax.set_mesh`` or of a shard_map, or that of ``with mesh:``."""
    found = jax.sharding.get_abstract_mesh()
    if not found.empty:
        return found
    from fp8kit_jax.te_compat.sharding import _mesh as of_block

    mesh = of_block()
    return mesh if mesh.empty else mesh.abstract_mesh


__all__ = ["attend_split", "split_axis"]
