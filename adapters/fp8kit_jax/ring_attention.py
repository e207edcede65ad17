"""Attention over split sequences block by block: each device attends with its queries over the keys and
values of one device after the other, and merges what it finds by log-sum-exp. They come round a ring, by
``ppermute``, or are gathered at once.

The rules are those of ``fp8kit.ops.ring_attention``, of which Transformer Engine's and Striped Attention's
(Brandon et al. 2023) orders of tokens are kinds. One program serves all devices: which chunk a block is of,
and whether its queries see its keys, follows from the device's index.

The gradient is a rule of its own (``jax.custom_vjp``). Of a call a device keeps its queries, keys, values,
output and, in float32, one log-sum-exp a row and head: as much as without a ring, whatever the number of
devices. Backward makes the same steps again; the gradients of keys and values, in float32, go round with
them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8kit.backends.dispatch import SelectionPolicy
from fp8kit.backends.policy import get_policy
from fp8kit.ops.attention_spec import AttentionSpec
from fp8kit.ops.ring_attention import NOTHING, off_diagonal
from fp8kit_jax import manual, primitive
from fp8kit_jax.program import Program
from fp8kit_jax.split_sequences import SIDES, Sums, by_sequence, by_token, chunk_sums, part_of

Layers = tuple[Any, ...]


class Ring(NamedTuple):
    """What is static about a call. ``spec``: of one device's part, with layout "separate", softmax "vanilla"
    and the mask "no_mask", "causal", "padding" or "padding_causal"; ``axis``, of so many ``devices``.
    ``chunks``: of a sequence on each device, 2 with causal load balancing. ``rows``: of packed sequences;
    ``striped``: whether a device has every ``devices``-th token of them. ``gathered``: keys and values come
    at once."""

    spec: AttentionSpec
    axis: str
    devices: int
    chunks: int
    rows: int
    striped: bool
    gathered: bool
    policy: SelectionPolicy

    @property
    def at(self) -> int:
        """The dimension of tokens."""
        return max(self.spec.qkv_format.find("s"), 0)


class _Block(NamedTuple):
    """An attention of some queries over some keys: ``spec``; which half of the device's ``queries`` and of
    the ``keys`` that have come, None for all of them; its running ``sums``; whether the queries see the keys,
    ``seen``, None for yes."""

    spec: AttentionSpec
    sums: Sums
    queries: Any = None
    keys: Any = None
    seen: Any = None


def ring_attention(
    spec: AttentionSpec,
    axis: str,
    layers: Layers,
    offset: Any,
    sums: Any,
    chunks: int = 1,
    rows: int = 0,
    striped: bool = False,
    gathered: bool = False,
) -> Any:
    """o like the queries, (b, s, h, d_v) or as the format has it, of a device's ``layers``, queries, keys and
    values, h (b, s, h, d) each; (t, h, d) with "thd".

    ``offset``: a further score of each head, float32 (h,), or None. ``sums``: by side, "q" and "kv", the
    running sums (b + 1,) of the whole sequences' true lengths, or with "thd" a ``Packed``; {} without a
    padding mask. The others: see ``Ring``.
    """
    how = Ring(spec, axis, jax.lax.axis_size(axis), chunks, rows, striped, gathered, get_policy())
    arrays = manual.alike((*layers, offset, sums))
    # of this call alone, and one program where the shard_map is outside of jit
    return jax.jit(functools.partial(_ring, how), inline=True)(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(how: Ring, q: Any, k: Any, v: Any, offset: Any, sums: Any) -> Any:
    return _forward(how, q, k, v, offset, sums)[0]


def _ring_forward(how: Ring, q: Any, k: Any, v: Any, offset: Any, sums: Any) -> tuple[Any, Any]:
    o, total = _forward(how, q, k, v, offset, sums)
    return o, (q, k, v, offset, sums, o, total)


def _forward(how: Ring, q: Any, k: Any, v: Any, offset: Any, sums: Any) -> tuple[Any, Any]:
    """o, and the log-sum-exps of all scores of its rows, float32 like o but for the features; ``NOTHING``
    where there are none."""
    o = manual.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32, q)
    total = manual.zeros(q.shape[:-1], jnp.float32, q) + (NOTHING if offset is None else offset)
    total = jnp.maximum(total, NOTHING)
    for step, (key, value) in enumerate(_coming(how, (k, v))):
        for block in _blocks(how, step, (q, k), sums):
            own, both = _half(how, q, block.queries), _halves(how, (key, value), block.keys)
            found = _run(how, block, {"q": own, "k": both[0], "v": both[1]})
            made, lse = found["o"], _by_rows(how, block, found["lse"], own)
            if block.seen is not None:  # 0 instead of an output that may be no number
                made, lse = jnp.where(block.seen, made, 0), jnp.where(block.seen, lse, -jnp.inf)
            before = _halves(how, (o, total), block.queries)
            after = _merged(*before, made, lse)
            o, total = (
                _with_half(how, whole, part, block.queries)
                for whole, part in zip((o, total), after, strict=True)
            )
    return o.astype(q.dtype), total


def _merged(o: Any, total: Any, part: Any, lse: Any) -> tuple[Any, Any]:
    """Returns the output over two sets of keys, the mean of both by the exponentials of their
    log-sum-exps."""
    both = jnp.logaddexp(total, lse)
    old, new = (jnp.exp(own - both)[..., None] for own in (total, lse))
    return old * o + new * part.astype(jnp.float32), both


def _ring_backward(how: Ring, kept: Any, do: Any) -> tuple[Any, ...]:
    q, k, v, offset, sums, o, total = kept
    dq, dkv, parts = manual.zeros(q.shape, jnp.float32, q), _zeros(k, v), []
    for step, (key, value) in enumerate(_coming(how, (k, v))):
        dkv = _zeros(k, v) if how.gathered else dkv
        for block in _blocks(how, step, (q, k), sums):
            own, dout, out, lse = _halves(how, (q, do, o, total), block.queries)
            both = _halves(how, (key, value), block.keys)
            lse = _by_sequences(how, block, jnp.where(lse <= NOTHING, -jnp.inf, lse))
            inputs = {"q": own, "k": both[0], "v": both[1], "o": out, "lse": lse}
            found = _run(how, block, inputs, dout)
            if block.seen is not None:
                found = {name: jnp.where(block.seen, a, 0) for name, a in found.items()}
            dq = _added(how, dq, found["q"], block.queries)
            dkv = tuple(_added(how, a, found[n], block.keys) for n, a in zip("kv", dkv, strict=True))
        parts.append(dkv)
        if not how.gathered:  # after as many steps as there are devices they are at home
            dkv = _handed_on(how, dkv)
    if how.gathered:
        dkv = tuple(_home(how, of_step) for of_step in zip(*parts, strict=True))
    grads = tuple(a.astype(like.dtype) for a, like in zip((dq, *dkv), (q, k, v), strict=True))
    return *grads, None if offset is None else _offset_gradient(offset, total, o, do), None


_ring.defvjp(_ring_forward, _ring_backward)


def _offset_gradient(offset: Any, total: Any, o: Any, do: Any) -> Any:
    """- sum exp(offset - lse) rowsum(do * o) of each head; rows that see nothing, padding among them, count
    nothing."""
    rows = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)
    weighted = jnp.where(total > offset, jnp.exp(offset - total) * rows, 0.0)
    return -jnp.sum(weighted, tuple(range(weighted.ndim - 1)))


# --- blocks -------------------------------------------------------------------------------------------------


def _blocks(how: Ring, step: int, sides: Layers, sums: Any) -> list[_Block]:
    """Returns what the device's queries see of the keys that come in a step, those of the device so many
    before it. ``sides``: a device's queries, and keys.

    Of two chunks each, r and 2 n - 1 - r, the second half of the queries sees the first half of all other
    devices' keys; beside that the first half sees it too, or, of a later device, the second half sees the
    second.
    """
    rank = jax.lax.axis_index(how.axis).astype(jnp.int32)
    source, spec = (rank - step) % how.devices, how.spec
    free = off_diagonal(spec)
    earlier = source < rank if spec.causal and step else None
    if spec.packed:
        own, other = (
            part_of(sums[side], device, how.devices, a.shape[0] // how.rows, how.striped)
            for side, device, a in zip(SIDES, (rank, source), sides, strict=True)
        )
        if how.striped and spec.causal:  # the diagonal starts at the first key that is not later
            own = own.without_first(other.places > own.places)
        kind = spec if how.striped or not step else free
        return [_Block(kind, own.sums("q") | other.sums("kv"), seen=None if how.striped else earlier)]

    lengths = [a.shape[how.at] * how.devices for a in sides]

    def block(spec: AttentionSpec, queries: Any = None, keys: Any = None, seen: Any = None) -> _Block:
        here = {
            f"cu_seqlens_{side}": chunk_sums(sums[side], length, how.chunks, device, how.devices, half)
            for side, length, device, half in zip(
                SIDES, lengths, (rank, source), (queries, keys), strict=True
            )
            if side in sums
        }
        return _Block(spec, here, queries, keys, seen)

    if how.chunks == 1 or not step or not spec.causal:
        return [block(free if step else spec, seen=earlier)]
    half = jnp.where(source < rank, 0, 1).astype(jnp.int32)
    return [block(free, jnp.int32(1), jnp.int32(0)), block(free, half, half)]


def _run(how: Ring, block: _Block, inputs: dict[str, Any], do: Any = None) -> dict[str, Any]:
    """o and lse of a block; with the output's gradient those of q, k and v, from o and lse of all keys."""
    operands = {name: inputs[name] for name in ("q", "k", "v")} | block.sums
    metas = tuple((name, primitive.meta_of(array)) for name, array in operands.items())
    o = (*operands["q"].shape[:-1], operands["v"].shape[-1])
    program = Program(
        "forward", "attention", block.spec, metas, ("q", "k", "v"), policy=how.policy, views=(("o", o),)
    )
    if do is None:
        arrays = [operands[name] for name, _ in program.arguments]
    else:
        program = replace(program, face="backward", cotangents=("o",))
        arrays = program.ordered(operands | inputs, {"o": do})
    found = primitive.bind(*manual.alike(arrays), program=program)
    return {name: array for (name, _), array in zip(program.results, found, strict=True)}


def _by_rows(how: Ring, block: _Block, lse: Any, q: Any) -> Any:
    """lse (b, h, s) like q but for the features."""
    if how.spec.packed:
        return by_token(lse, block.sums, q.shape[0])
    return lse.transpose(2, 0, 1) if how.spec.qkv_format == "sbhd" else lse.transpose(0, 2, 1)


def _by_sequences(how: Ring, block: _Block, rows: Any) -> Any:
    """Returns the inverse of ``_by_rows``."""
    if how.spec.packed:
        return by_sequence(rows, block.sums, how.spec.max_seqlen_q)
    return rows.transpose(1, 2, 0) if how.spec.qkv_format == "sbhd" else rows.transpose(0, 2, 1)


def _half(how: Ring, whole: Any, half: Any) -> Any:
    """One half of the tokens, or all of them."""
    if half is None:
        return whole
    size = whole.shape[how.at] // 2
    return jax.lax.dynamic_slice_in_dim(whole, half * size, size, how.at)


def _halves(how: Ring, wholes: Layers, half: Any) -> Layers:
    return tuple(_half(how, whole, half) for whole in wholes)


def _with_half(how: Ring, whole: Any, part: Any, half: Any) -> Any:
    """``whole`` with another half, or ``part`` itself for all of it."""
    if half is None:
        return part
    start = half * (whole.shape[how.at] // 2)
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, how.at)


def _added(how: Ring, total: Any, part: Any, half: Any) -> Any:
    return _with_half(how, total, _half(how, total, half) + part.astype(jnp.float32), half)


# --- what moves ---------------------------------------------------------------------------------------------


def _coming(how: Ring, both: Layers) -> Iterator[Layers]:
    """Keys and values of this device, of the one before it, and so on round the ring."""
    if how.gathered:
        every = [jax.lax.all_gather(a, how.axis) for a in both]
        rank = jax.lax.axis_index(how.axis)
        for step in range(how.devices):
            source = (rank - step) % how.devices
            yield tuple(jax.lax.dynamic_index_in_dim(a, source, keepdims=False) for a in every)
        return
    yield both
    for _ in range(how.devices - 1):
        both = _handed_on(how, both)
        yield both


def _handed_on(how: Ring, arrays: Layers) -> Layers:
    """Returns the arrays of the device before this one."""
    steps = [(i, (i + 1) % how.devices) for i in range(how.devices)]
    return tuple(jax.lax.ppermute(a, how.axis, steps) for a in arrays)


def _home(how: Ring, of_step: Layers) -> Any:
    """Returns the sum over devices of what each has found for this one's keys; ``of_step``: what a device
    found in each step."""
    source = jax.lax.axis_index(how.axis) - jnp.arange(how.devices)
    found = jnp.take(jnp.stack(of_step), source % how.devices, axis=0)
    return jax.lax.psum_scatter(found, how.axis)


def _zeros(*like: Any) -> Layers:
    return tuple(manual.zeros(a.shape, jnp.float32, a) for a in like)
