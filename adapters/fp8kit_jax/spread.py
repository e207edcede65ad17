"""Operations of which a device's part is no call of the same operation: dropout, whose numbers know their
place in the whole array, the mean of cross entropy, a quotient of two sums over devices, and a cast with one
current scale. An attention with dropout is told its place.

Philox4x32-10 (Salmon et al., SC'11) here draws the words that the kernels draw (``backends.protocol``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit.formats import int32
from fp8kit.ops.attention_spec import LAYOUTS, batch_of
from fp8kit.spec import Meta
from fp8kit_jax.amaxes import AMAX, amax_of, scale_of
from fp8kit_jax.program import Program

Special = Callable[[Program, Sequence[Any], tuple[str, ...], Callable[..., Any]], list[Any]]
_MULTIPLIERS, _WEYL, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10


def special(program: Program, kind: str) -> Special | None:
    """How the part of a program is computed after a cut of a ``kind``, None where it is the program itself:
    ``(program, arrays, axes, bind)`` gives the results, the sums over devices done. ``axes``: the manual axes
    over which rows are cut."""
    if program.operation == "quantize" and kind == "tile" and not program.spec.given:
        return _quantized
    if program.operation == "drop_path" or (program.operation == "dropout_add" and program.spec.p > 0):
        return _dropped
    if (
        program.operation == "cross_entropy"
        and program.spec.reduction == "mean"
        and program.face == "forward"
    ):
        return _mean
    return None


def placed(
    program: Program, arrays: Sequence[Any], axes: Mapping[str, tuple[str, ...]]
) -> tuple[Program, Sequence[Any]]:
    """A device's part as it runs: attention with dropout gets its place in the whole. ``axes``: the manual
    axes of each kind of cut.

    What may be cut gets one where it is not, too: XLA may split the two directions differently, and both must
    drop the same weights. cuDNN, whose numbers know only the call, would not."""
    spec = program.spec
    if program.operation != "attention" or not spec.dropout or spec.packed:
        return program, arrays
    batches = batch_of(spec.qkv_format, dict(program.metas)[next(iter(LAYOUTS[spec.layout]))].shape)
    batch, head = (
        jax.lax.axis_index(axes[kind]) * count if kind in axes else 0
        for kind, count in (("rows", batches), ("heads", spec.num_heads))
    )
    heads = spec.num_heads * (jax.lax.axis_size(axes["heads"]) if "heads" in axes else 1)
    place, rest = jnp.array([batch, head, heads], jnp.int32), iter(arrays)
    inner = replace(
        program, spec=replace(spec, placed=True), metas=(*program.metas, ("dropout_place", Meta((3,), int32)))
    )
    return inner, [place if name == "dropout_place" else next(rest) for name, _ in inner.arguments]


def _quantized(
    program: Program, arrays: Sequence[Any], axes: tuple[str, ...], bind: Callable[..., Any]
) -> list[Any]:
    """The scale by the amax of all parts, given to a cast."""
    (x,) = arrays
    scale = scale_of(jax.lax.pmax(amax_of(x), axes), program.spec.format.max)
    spec, metas = replace(program.spec, given=True), (*program.metas, ("scale", AMAX))
    return list(bind(x, scale, program=replace(program, spec=spec, metas=metas)))


def _mean(
    program: Program, arrays: Sequence[Any], axes: tuple[str, ...], bind: Callable[..., Any]
) -> list[Any]:
    """The losses of the rows, then their sum by the number of targets that count."""
    rows = replace(program, spec=replace(program.spec, reduction="none"))
    loss, lse = bind(*arrays, program=rows)
    targets = dict(zip([name for name, _ in program.arguments], arrays, strict=True))["targets"]
    counted = (targets != program.spec.ignore_index).sum(dtype=jnp.float32)
    total, count = jax.lax.psum((loss.sum(), counted), axes)
    mean = total / jnp.maximum(count, 1.0)
    found = {"loss": mean.reshape(1), "lse": lse, "total": jnp.stack([mean, count])}
    return [found[name] for name, _ in program.results]


def _dropped(
    program: Program, arrays: Sequence[Any], axes: tuple[str, ...], bind: Callable[..., Any]
) -> list[Any]:
    """``dropout_add`` and ``drop_path`` in XLA's own code, in float32, rounded once."""
    have = {name: array for (name, _), array in zip(program.arguments, arrays, strict=True)}
    x = have["y"] if program.face == "backward" else have["x"]
    count = x.shape[0] if program.operation == "drop_path" else math.prod(x.shape)
    words = philox(have["rng"], jax.lax.axis_index(axes).astype(jnp.uint32), count)
    p = program.spec.p
    kept = jnp.where(words >= jnp.uint32(int(p * 2.0**32)), jnp.float32(1 / (1 - p)), 0.0)
    kept = kept.reshape((-1,) + (1,) * (x.ndim - 1) if program.operation == "drop_path" else x.shape)
    wide = x.astype(jnp.float32)
    if program.face == "forward":
        wide = wide + have["bias"].astype(jnp.float32) if "bias" in have else wide
        y = wide * kept
        y = y + have["residual"].astype(jnp.float32) if "residual" in have else y
        return [y.astype(x.dtype)]
    dx = wide * kept
    found = {"x": dx.astype(x.dtype)}
    if "bias" in dict(program.results):
        found["bias"] = jax.lax.psum(dx.sum(tuple(range(x.ndim - 1))), axes).astype(x.dtype)
    return [found[name] for name, _ in program.results]


def philox(rng: Any, part: Any, count: int) -> Any:
    """uint32 (count,): the words of elements part * count ... part * count + count - 1 for ``rng``, (seed,
    offset) as int64 (2,) or their uint32 (4,) words; ``part``: uint32 ()."""
    if rng.dtype != jnp.uint32:
        rng = jax.lax.bitcast_convert_type(rng, jnp.uint32).reshape(4)
    groups = -(-count // 4) + 1
    low, high = product(part, jnp.uint32(count))[::-1]
    first = (low >> 2) | (high << 30)
    number = first + jnp.arange(groups, dtype=jnp.uint32)
    counter = [
        number,
        (high >> 2) + (number < first).astype(jnp.uint32),
        *(jnp.broadcast_to(w, (groups,)) for w in rng[2:]),
    ]
    key = [rng[0], rng[1]]
    for _ in range(_ROUNDS):
        (h0, l0), (h1, l1) = (product(counter[2 * i], jnp.uint32(m)) for i, m in enumerate(_MULTIPLIERS))
        counter = [h1 ^ counter[1] ^ key[0], l1, h0 ^ counter[3] ^ key[1], l0]
        key = [k + jnp.uint32(w) for k, w in zip(key, _WEYL, strict=True)]
    return jax.lax.dynamic_slice_in_dim(jnp.stack(counter, 1).reshape(-1), (low & 3).astype(jnp.int32), count)


def product(a: Any, b: Any) -> tuple[Any, Any]:
    """(high, low) words of the product of uint32 numbers, from halves."""
    mask = jnp.uint32(0xFFFF)
    a0, a1, b0, b1 = a & mask, a >> 16, b & mask, b >> 16
    middle = a1 * b0 + ((a0 * b0) >> 16)
    other = a0 * b1 + (middle & mask)
    return a1 * b1 + (middle >> 16) + (other >> 16), a * b
