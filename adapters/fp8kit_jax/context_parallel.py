"""Attention over sequences that are split along a mesh axis: each device has its queries, and gets keys and
values of the others: all at once, gathered (the way back sums their gradients and gives each device its
part), or one device's after the other's round a ring (``ring_attention``).

With gathered keys a causal mask sees as many of them as the chunk of queries ends at: the diagonal ends in
the last corner of chunk x those keys. Of padded sequences a chunk has as many queries as are left for it;
causal ones have as many keys as queries. With causal load balancing, so that all compute as much, a device
has chunks r and 2 n - 1 - r of 2 n of each sequence (``ReorderStrategy.DualChunkSwap``), or of packed
sequences every n-th token, or stripe of tokens (``ReorderStrategy.Striped``). Stripes change devices first,
so that each has every n-th token, and their outputs change back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.arguments import check, shown
from fp8kit.backends.policy import get_policy
from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError
from fp8kit.layers import context_maps as maps
from fp8kit.lru import memoized
from fp8kit.ops.attention import attention
from fp8kit.ops.ring_attention import chunks_of
from fp8kit_jax.arguments import as_array, check_sums, meta_of
from fp8kit_jax.checks import ALIASES, RULES
from fp8kit_jax.ring_attention import ring_attention
from fp8kit_jax.scopes import attention_in_force, mesh_resource
from fp8kit_jax.sequences import ReorderStrategy, inverse_reorder_causal_load_balancing
from fp8kit_jax.split_sequences import SIDES, chunk_sums, packed_sequences, part_of, seen_by, whole_sums

Attend = Callable[[Mapping[str, Any]], Any]
_OP = "dot_product_attention"
_PADDING = ("padding", "padding_causal")
_MASKS = ("no_mask", "causal", "causal_bottom_right", *_PADDING)
_SUMS = ("cu_seqlens_q", "cu_seqlens_kv")
_STARTS = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")
# what a program gets anew in each call, or does not look at
_ARRAYS = ("query", "key", "value", *_SUMS, *_STARTS, "softmax_offset", "dropout_key")
# what a call with split sequences does not have
_NONE = ("mask", "bias", "attn_bias_type", "alibi_slopes")


# arguments about sequences that are split, and others on which it depends whether they are
SPLIT = (
    "context_parallel_axis",
    "context_parallel_causal_load_balanced",
    "context_parallel_strategy",
    "stripe_size",
)
_PLACED = ("qkv_format", *SPLIT[1:])
_ASKED = ("attn_mask_type", "window_size")


class Division(NamedTuple):
    """How the sequences of a call lie on the devices of ``axis``: so many ``devices``, whether the caller
    is in a shard_map, ``manual``; ``balanced``, ``stripe``, ``packed`` as the call has them."""

    axis: str
    devices: int
    manual: bool
    balanced: bool
    stripe: int
    packed: bool

    @property
    def order(self) -> tuple[ReorderStrategy, int, int | None] | None:
        """How tokens are reordered: strategy, devices and stripe; None where they are not."""
        if not self.balanced:
            return None
        striped = ReorderStrategy.Striped, self.devices, self.stripe
        return striped if self.packed else (ReorderStrategy.DualChunkSwap, self.devices, None)


def division(arguments: Mapping[str, Any], module: str, rows: bool) -> Division | None:
    """Returns how the sequences of a call are split: along ``context_parallel_axis``, or the ``cp_resource``
    of the MeshResource in force where the call is one that can be split; None where they are not. ``module``:
    the name of the module that calls; ``rows``: packed sequences lie in rows of tokens, (b, s, heads, d).
    ArgumentError for an axis that no mesh in force has; for a call that cannot be split UnsupportedError, or
    ShapeError where that is for its sequences' lengths."""
    found = placed(arguments)
    if found is None:
        return None
    check(_OP, {name: RULES[name] for name in _ASKED}, arguments)
    padded = ALIASES.get(arguments["attn_mask_type"], arguments["attn_mask_type"]) in _PADDING
    if padded and any(arguments[name] is None for name in _SUMS):
        return None  # which no call takes
    why = _refused(arguments, found, module)
    error = _misfit(arguments, found, rows) if why is None else UnsupportedError(_OP, *why)
    if error is None:
        return found
    if arguments["context_parallel_axis"] or found.balanced or found.manual:
        raise error
    return None


def placed(arguments: Mapping[str, Any]) -> Division | None:
    """``division`` of a call, whatever else it asks for."""
    asked = arguments["context_parallel_axis"]
    balanced, stripe = arguments["context_parallel_causal_load_balanced"], arguments["stripe_size"]
    check(_OP, {name: RULES[name] for name in _PLACED}, arguments)
    packed = arguments["qkv_format"] == "thd"
    if stripe is not None and not (packed and balanced):
        wanted = "None without 'thd' and context_parallel_causal_load_balanced"
        raise ArgumentError(_OP, "stripe_size", stripe, wanted)
    axis, mesh = asked or mesh_resource().cp_resource or "", _mesh()
    if not axis:
        if balanced:
            wanted = "False without context_parallel_axis, or cp_resource of a MeshResource"
            raise ArgumentError(_OP, "context_parallel_causal_load_balanced", True, wanted)
        return None
    if mesh.empty or axis not in mesh.shape:
        if not asked:
            return None
        wanted = "an axis of the mesh of jax.set_mesh, or of shard_map"
        raise ArgumentError(_OP, "context_parallel_axis", shown(axis), wanted)
    if mesh.shape[axis] == 1:
        return None
    return Division(axis, mesh.shape[axis], axis in mesh.manual_axes, balanced, stripe or 1, packed)


def attend_split(
    attend: Attend,
    resolve: Callable[[Mapping[str, Any]], Any],
    arguments: Mapping[str, Any],
    how: Division,
    rows: bool = False,
) -> Any:
    """``attend(arguments)`` with sequences split as ``how`` says. ``resolve(arguments)``: their
    ``AttentionSpec``. ``rows``: as ``division`` has it."""
    layers, flat = _separate(arguments), how.packed and not rows
    if flat:
        layers = tuple(layer[None] for layer in layers)
    at = 1 if how.packed else arguments["qkv_format"].index("s")
    mesh = _mesh()
    lengths = [layer.shape[at] * (how.devices if how.manual else 1) for layer in layers[:2]]
    beside, offset = _sequences(arguments, how, layers, lengths), arguments["softmax_offset"]
    if offset is not None:
        beside["softmax_offset"] = offset

    if how.manual:
        o = _DeviceCall(attend, resolve, arguments, how, at, beside).attend(layers)
        return o[0] if flat else o
    spec, batch, heads = _specs(mesh, layers, how.axis, at)
    own = {name: P(heads if name == "softmax_offset" else batch) for name in beside}
    if mesh.explicit_axes:
        reshard: Any = jax.sharding.reshard
        layers = tuple(reshard(layer, NamedSharding(mesh, spec)) for layer in layers)
        beside = {name: reshard(a, NamedSharding(mesh, own[name])) for name, a in beside.items()}
    plain = tuple([(name, _hashable(value)) for name, value in arguments.items() if name not in _ARRAYS])
    fixed = plain, how, at, mesh, spec, tuple(own.items()), get_policy(), mesh_resource()
    o = _program(attend, resolve, *fixed)(*layers, beside)
    return o[0] if flat else o


def _hashable(value: Any) -> Any:
    """Returns a plain argument that may be a list, or an array of one number."""
    return tuple(value) if isinstance(value, list) else value.item() if hasattr(value, "item") else value


@memoized("JAX: attention over split sequences")
def _program(
    attend: Attend,
    resolve: Callable[[Mapping[str, Any]], Any],
    plain: tuple[tuple[str, Any], ...],
    how: Division,
    at: int,
    mesh: Any,
    spec: Any,
    beside_specs: tuple[tuple[str, Any], ...],
    *in_force: Any,
) -> Any:
    """Returns a call over all devices as one program, which calls outside of jit share too: each primitive of
    a shard_map there would be compiled anew. ``in_force``: what else it is traced by."""
    arguments = dict.fromkeys(_ARRAYS) | dict(plain)

    def local(query: Any, key: Any, value: Any, beside: dict[str, Any]) -> Any:
        return _DeviceCall(attend, resolve, arguments, how, at, beside).attend((query, key, value))

    specs = spec, spec, spec, dict(beside_specs)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec))


def _sequences(
    arguments: Mapping[str, Any], how: Division, layers: tuple[Any, ...], lengths: list[int]
) -> dict[str, Any]:
    """Returns where the whole sequences lie, by side: their lengths (b,), or a ``Packed``; {} for full ones.
    FormatError for running sums that are not int32, ArgumentError for wrong ones."""
    found: dict[str, Any] = {}
    for side, layer, length in zip(SIDES, layers, lengths, strict=False):
        name = f"cu_seqlens_{side}"
        if arguments[name] is None:
            continue
        arrays = {n: as_array(_OP, n, a) for n in (name, f"{name}_padded") if (a := arguments[n]) is not None}
        for key, sums in arrays.items():
            if sums.dtype != jnp.int32 or sums.ndim != 1:
                raise FormatError(_OP, key, f"{sums.dtype} {sums.shape}", "int32 (b + 1,)")
        if not how.packed:
            check_sums(_OP, arrays, name, None, length)
            found[side] = jnp.diff(arrays[name])
            continue
        rows, most = layer.shape[0], int(arguments[f"max_seqlen_{side}"])
        check_sums(_OP, arrays, name, rows * length, most or None)
        starts = arrays.get(f"{name}_padded", arrays[name])
        found[side] = packed_sequences(arrays[name], starts, rows, length)
    return found


class _DeviceCall:
    """A call on one device. ``beside``: of its batches where the whole sequences lie, by side, and its
    heads' ``softmax_offset``."""

    def __init__(
        self,
        attend: Attend,
        resolve: Callable[[Mapping[str, Any]], Any],
        arguments: Mapping[str, Any],
        how: Division,
        at: int,
        beside: Mapping[str, Any],
    ) -> None:
        self._attend, self._resolve, self.how, self.at = attend, resolve, how, at
        self.sides = {side: beside[side] for side in SIDES if side in beside}
        self.offset = beside.get("softmax_offset")
        plain = {"context_parallel_axis": "", "context_parallel_causal_load_balanced": False}
        none = dict.fromkeys((*_SUMS, *_STARTS, "stripe_size"))
        kind = ALIASES.get(arguments["attn_mask_type"], arguments["attn_mask_type"])
        self.mask = "causal" if kind == "causal_bottom_right" else kind
        self.causal = "causal" in kind
        strategy = {"context_parallel_strategy": "DEFAULT", "attn_mask_type": self.mask}
        own = {"softmax_offset": self.offset, "bottom_right_diagonal": None}
        self.arguments = {**arguments, **plain, **none, **strategy, **own}
        self.gathered = arguments["context_parallel_strategy"] != "RING"

    def attend(self, layers: tuple[Any, Any, Any]) -> Any:
        """o of the device's layers, (b, s, heads, d_v) or as the format has it."""
        if not self.how.packed:
            return self._over_gathered(layers) if self.gathered else self._over_ring(layers)
        if self.gathered and not self.how.balanced:
            return self._packed_over_gathered(layers)
        how, (rows, tokens) = self.how, layers[0].shape[:2]
        change = how.stripe > 1
        layers = tuple(_changed_stripes(a, how) for a in layers) if change else layers
        o = self._over_ring(tuple(a.reshape(-1, *a.shape[2:]) for a in layers), rows)
        o = o.reshape(rows, tokens, *o.shape[1:])
        return _changed_stripes(o, how, back=True) if change else o

    def _over_ring(self, layers: tuple[Any, ...], rows: int = 0) -> Any:
        """Block by block, of one device's keys after the other's. ``rows``: of packed sequences, which are
        flat."""
        how = self.how
        named = dict(zip(("query", "key", "value"), layers, strict=True))
        if not how.packed:
            sums = {side: maps.running(jnp, lengths) for side, lengths in self.sides.items()}
            own, longest = {f"cu_seqlens_{side}": a for side, a in sums.items()}, {}
        else:
            sums, own, longest = self.sides, {}, {}
            for (side, a), layer in zip(sums.items(), layers, strict=False):
                tokens = layer.shape[0] // rows
                own |= part_of(a, 0, how.devices, tokens, how.balanced).sums(side)
                longest |= self._longest(side, how.devices if how.balanced else 1, tokens)
        spec = self._resolve({**self.arguments, **named, **own, **longest})
        inputs = dict(zip("qkv", layers, strict=True)) | own | {"softmax_offset": self.offset}
        metas = {name: meta_of(_OP, name, a) for name, a in inputs.items() if a is not None}
        attention.infer(spec, metas, frozenset())  # which refuses what does not fit
        chunks = 2 if how.balanced and not how.packed and self.mask != "no_mask" else 1
        offset = self.offset
        if spec.softmax_type == "off-by-one":
            offset = jnp.zeros(spec.num_heads, jnp.float32)
        options = chunks, rows, how.packed and how.balanced, self.gathered
        spec = replace(spec, softmax_type="vanilla")
        return ring_attention(spec, how.axis, layers, offset, sums, *options)

    def _longest(self, side: str, share: int, tokens: int) -> dict[str, int]:
        """At most so many tokens of a sequence are among a device's ``tokens`` of a row, one of ``share``."""
        name = f"max_seqlen_{side}"
        return {name: min(-(-int(self.arguments[name]) // share), tokens)}

    def _over_gathered(self, layers: tuple[Any, Any, Any]) -> Any:
        """Returns the device's queries over all keys and values."""
        query, *both = layers
        how, rank = self.how, jax.lax.axis_index(self.how.axis).astype(jnp.int32)
        both = [jax.lax.all_gather(a, how.axis, axis=self.at, tiled=True) for a in both]
        if how.balanced:
            swap = ReorderStrategy.DualChunkSwap
            both = [inverse_reorder_causal_load_balancing(a, swap, how.devices, self.at) for a in both]
        own = self.arguments | dict(zip(("query", "key", "value"), (query, *both), strict=True))
        if self.mask == "no_mask":
            return self._attend(own)
        chunks, length = 2 if how.balanced else 1, query.shape[self.at] * how.devices
        starts = jnp.arange(query.shape[1 - self.at] + 1, dtype=jnp.int32) * length
        sums = {side: maps.running(jnp, self.sides[side]) if self.sides else starts for side in SIDES}
        kind = "padding_causal_bottom_right" if self.causal else "padding"
        found = []
        numbers = chunks_of(rank, how.devices, chunks)
        for half, (number, part) in enumerate(zip(numbers, jnp.split(query, chunks, self.at), strict=True)):
            here = chunk_sums(sums["q"], length, chunks, rank, how.devices, half if chunks > 1 else None)
            seen = sums["kv"]
            if self.causal:
                seen = maps.sums_up_to(jnp, seen, starts, (chunks * how.devices, number + 1))
            asked = {"attn_mask_type": kind, **dict(zip(_SUMS, (here, seen), strict=True))}
            found.append(self._attend({**own, **asked, "query": part}))
        return jnp.concatenate(found, self.at)

    def _packed_over_gathered(self, layers: tuple[Any, Any, Any]) -> Any:
        """Packed sequences in the tokens' natural order: the device's queries over all keys and values."""
        how, (rows, tokens) = self.how, layers[0].shape[:2]
        query, *both = layers
        both = [jax.lax.all_gather(a, how.axis, axis=1, tiled=True) for a in both]
        rank = jax.lax.axis_index(how.axis).astype(jnp.int32)
        part = part_of(self.sides["q"], rank, how.devices, tokens, striped=False)
        seen = seen_by(self.sides["kv"], part, self.causal)
        flat = [a.reshape(-1, *a.shape[2:]) for a in (query, *both)]
        own = self.arguments | dict(zip(("query", "key", "value"), flat, strict=True))
        own |= part.sums("q") | whole_sums(seen, both[0].shape[1])
        own |= self._longest("q", 1, tokens)
        own["attn_mask_type"] = "padding_causal_bottom_right" if self.causal else "padding"
        o = self._attend(own)
        return o.reshape(rows, tokens, *o.shape[1:])


def _changed_stripes(x: Any, how: Division, back: bool = False) -> Any:
    """x (b, s, ...), of which a device has every n-th stripe of tokens, with every n-th token; or
    ``back``."""
    rows, tokens, *rest = x.shape
    count, share = tokens // how.stripe, how.stripe // how.devices
    if back:
        x = x.reshape(rows, count, how.devices, share, *rest).swapaxes(2, 3)
    x = x.reshape(rows, count, share, how.devices, *rest)
    x = jax.lax.all_to_all(x, how.axis, 3, 3)
    return (x if back else x.swapaxes(2, 3)).reshape(rows, tokens, *rest)


def _refused(arguments: Mapping[str, Any], how: Division, module: str) -> tuple[str, Any, str] | None:
    """(argument, what it is, what it may be) of a call whose sequences cannot be split, whatever their
    lengths; None for another."""
    kind = ALIASES.get(arguments["attn_mask_type"], arguments["attn_mask_type"])
    ring, window = arguments["context_parallel_strategy"] == "RING", arguments["window_size"]
    if kind not in (_PADDING if how.packed else _MASKS):
        known = ", ".join(_PADDING if how.packed else _MASKS)
        return "attn_mask_type", shown(kind), f"one of {known} with split sequences"
    if arguments["dropout_rate"]:
        places = "its draws belong to places in the whole, of which a part of the rows knows nothing"
        return "dropout_rate", arguments["dropout_rate"], f"0 with split sequences: {places}"
    if window is not None and tuple(window) not in ((-1, -1), (-1, 0 if "causal" in kind else -1)):
        blocks = "a block of a ring, or of stripes, has no part of a window"
        if ring or (how.packed and how.balanced):
            return "window_size", window, f"none with split sequences: {blocks}"
        if "causal" not in kind:
            return "window_size", window, "none with split sequences and no causal mask"
    if kind not in _PADDING and any(arguments[name] is not None for name in _SUMS):
        return "cu_seqlens_q", "given", f"none with split sequences and the mask {kind}"
    if kind == "padding_causal" and not (how.packed and how.balanced):
        for own, other in (_SUMS, _STARTS):
            if arguments[other] is not arguments[own]:
                return other, "another array", f"{own} itself with split sequences and this mask"
    if not how.packed and any(arguments[name] is not None for name in _STARTS):
        return _STARTS[0], "given", "none with split sequences but for 'thd'"
    if how.stripe % how.devices and how.stripe > 1:
        return "stripe_size", how.stripe, f"1 or a multiple of the {how.devices} devices"
    for name in _NONE:
        if arguments[name] is not None and arguments[name] != "no_bias":
            return name, "given", "none with split sequences"
    if attention_in_force(_OP, module) is not None:
        wanted = "a recipe without fp8_dpa: scales are those of the whole sequence"
        return "context_parallel_axis", shown(how.axis), wanted
    return None


def _misfit(arguments: Mapping[str, Any], how: Division, rows: bool) -> ShapeError | None:
    """Returns what is wrong with the layers of a call whose sequences are to be split; None for nothing."""
    given = {n: as_array(_OP, n, a) for n in ("query", "key", "value") if (a := arguments[n]) is not None}
    at, dims = (int(rows), 3 + rows) if how.packed else (arguments["qkv_format"].index("s"), 4)
    parts = how.devices * (how.stripe if how.packed else 2 if how.balanced else 1)
    here, lengths = (how.devices if how.manual else 1), []
    for number, (name, layer) in enumerate(given.items(), 1):
        several = number == len(given) < 3  # the last one then holds keys and values
        if layer.ndim != dims + several or layer.shape[at] % (parts // here):
            return ShapeError(_OP, name, f"shape {layer.shape}", f"a sequence of {parts} equal chunks")
        lengths.append(layer.shape[at] * here)
    queries, keys = lengths[0], lengths[:2][-1]
    if "causal" in arguments["attn_mask_type"] and queries != keys:
        got = f"{queries} queries and {keys} keys"
        return ShapeError(_OP, "key", got, "as many as queries, with split sequences and a causal mask")
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
    """Returns the PartitionSpec of queries, keys and values, and what splits their batches and heads: by the
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
    """Returns the mesh of ``jax.set_mesh`` or of a shard_map, or that of ``with mesh:``, with its devices."""
    from fp8kit_jax.te_compat.sharding import _mesh as in_force

    return in_force()
