"""How a program splits over a mesh under ``jax.jit`` with shardings: custom_partitioning, so that XLA gathers
nothing.

``cuts`` says along what a program may be cut, and what one device computes then (its ``local`` program).
Which dimension of every array goes along is not written down anywhere: the operation's own ``infer`` is asked
for the program of one device, and what has become smaller is cut. What has not, is the same on all devices,
or a sum over them (``Cut.sums``); amaxes are maxima over them, taken before the cast where scales are current
(``shared``). Dropout's numbers are those of one device (``spread``), cuDNN's own aside.

A program that cannot be cut as its arguments are, because rows of different devices meet in it or because a
device's part would be padded, runs whole on every device along that mesh axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.arrays import Shape
from fp8kit_jax import manual, shared, spread
from fp8kit_jax.cuts import RUNNING, Cut, cuts, local, unjoined
from fp8kit_jax.program import Program

Bind = Callable[..., Any]
Dims = list[int | None]  # for each array, which dimension is cut, None for none
_FACTORS = (2, 3, 5, 7)  # numbers of parts by which a cut's dimensions are found


class Chosen(NamedTuple):
    """A cut that is made: over which mesh axes, and which dimension of every argument and result it cuts."""

    cut: Cut
    axes: tuple[str, ...]
    arguments: Dims
    results: Dims


def dims_of(program: Program, cut: Cut, count: int) -> tuple[Dims, Dims] | None:
    """Which dimension of each argument and of each result a cut into ``count`` parts cuts; None where the
    program has no such parts."""
    part = local(program, ((cut, count),))
    if part is None:
        return None

    def one(name: str, whole: Shape, own: Shape) -> int | None:
        changed = [d for d, (m, n) in enumerate(zip(whole, own, strict=True)) if m != n]
        if name in RUNNING or not changed:
            return None
        if len(changed) > 1 or whole[changed[0]] != count * own[changed[0]]:
            raise ValueError(name)
        return changed[0]

    try:
        return tuple(  # type: ignore[return-value]
            [one(name, a, b) for (name, a), (_, b) in zip(program.seen(kind), part.seen(kind), strict=True)]
            for kind in ("arguments", "results")
        )
    except ValueError:
        return None


def _found(program: Program, cut: Cut) -> tuple[Dims, Dims] | None:
    return next((dims for count in _FACTORS if (dims := dims_of(program, cut, count)) is not None), None)


@functools.lru_cache(maxsize=1024)
def partitioned(program: Program, bind: Bind, wide: bool) -> Any:
    """The program as a function that XLA may split. ``bind(*arrays, program=...)`` runs it on one device;
    ``wide``: with 64 bits, which XLA does not know when it asks for a part."""
    function = custom_partitioning(lambda *arrays: tuple(bind(*arrays, program=program)))
    function.def_partition(functools.partial(_partition, program, bind, wide), sharding_rule=_rule(program))
    return function


def _rule(program: Program) -> SdyShardingRule:
    """Along which dimensions shardings go from array to array: a factor for each cut, each other dimension
    its own. Where what is cut is flattened together with other dimensions, the factor is the major part of a
    compound."""
    arrays = [*program.seen("arguments"), *program.seen("results")]
    along: dict[tuple[int, int], str] = {}  # (array, dimension) -> factor
    base: dict[str, int] = {}  # factor -> its size
    for number, cut in enumerate(cuts(program)):
        found = _found(program, cut)
        if found is None:
            continue
        dims = {
            (i, d): f"c{number}"
            for i, d in enumerate([*found[0], *found[1]])
            if d is not None and (i, d) not in along
        }
        along |= dims
        extents = [arrays[i][1][d] for i, d in dims]
        base |= {f"c{number}": math.gcd(*extents)} if extents else {}
    sizes: dict[str, int] = {}
    mapped: list[tuple[Any, ...]] = []
    for i, (_, shape) in enumerate(arrays):
        dims_here: list[Any] = []
        for d, n in enumerate(shape):
            own, factor = f"a{i}d{d}", along.get((i, d))
            if factor is None or base[factor] == 1:
                dims_here.append(own)
            elif n == base[factor]:
                dims_here.append(factor)
            else:
                sizes |= {factor: base[factor], own: n // base[factor]}
                dims_here.append(CompoundFactor(factor, own))
        mapped.append(tuple(dims_here))
    # the sizes of these are known
    whole = {factor for dims_here in mapped for factor in dims_here if isinstance(factor, str)}
    count = len(program.arguments)
    return SdyShardingRule(
        tuple(mapped[:count]), tuple(mapped[count:]), **{f: n for f, n in sizes.items() if f not in whole}
    )


def _choose(program: Program, mesh: Any, specs: Sequence[Any]) -> list[Chosen]:
    """The cuts that the arguments' PartitionSpecs suggest, as many as can be made together, one after the
    other."""
    chosen: list[Chosen] = []
    counts: tuple[tuple[Cut, int], ...] = ()
    taken: set[str] = set()
    for cut in cuts(program):
        found = _found(program, cut)
        axes: tuple[str, ...] = ()
        for spec, d in zip(specs, found[0] if found is not None else (), strict=False):
            if d is not None and d < len(spec) and spec[d] and not axes:
                named = (spec[d],) if isinstance(spec[d], str) else tuple(spec[d])
                axes = tuple(axis for axis in named if axis not in taken)
        count = math.prod(mesh.shape[axis] for axis in axes)
        dims = dims_of(program, cut, count) if count > 1 else None
        if dims is None or local(program, (*counts, (cut, count))) is None:
            continue
        if any(
            a is not None and a == b
            for other in chosen
            for mine, own in zip(dims, other[2:], strict=True)
            for a, b in zip(mine, own, strict=True)
        ):
            continue  # two cuts of one dimension
        chosen.append(Chosen(cut, axes, *dims))
        counts, taken = (*counts, (cut, count)), taken | set(axes)
    return chosen


def _specs(program: Program, chosen: Sequence[Chosen], kind: str) -> list[P]:
    """The PartitionSpecs of "arguments" or "results" after the cuts ``chosen``."""
    found = []
    for i, (_, shape) in enumerate(program.seen(kind)):
        dims: list[Any] = [None] * len(shape)
        for one in chosen:
            d = getattr(one, kind)[i]
            if d is not None:
                dims[d] = one.axes
        found.append(P(*dims))
    return found


def result_specs(program: Program, mesh: Any, specs: Sequence[Any]) -> dict[str, P]:
    """How the results are split, by name, where the arguments are split by ``specs``."""
    found = _specs(program, _choose(program, mesh, specs), "results")
    return {name: spec for (name, _), spec in zip(program.results, found, strict=True)}


def _partition(
    program: Program, bind: Bind, wide: bool, mesh: Any, arg_shapes: Sequence[Any], result_shape: Any
) -> Any:
    chosen = _choose(program, mesh, [shape.sharding.spec for shape in arg_shapes])
    part = local(
        program, tuple((one.cut, math.prod(mesh.shape[axis] for axis in one.axes)) for one in chosen)
    )
    assert part is not None

    def lower(*arrays: Any) -> tuple[Any, ...]:
        with jax.enable_x64(wide):
            return _run_part(part, bind, arrays, chosen)

    results, arguments = (
        tuple(NamedSharding(mesh, spec) for spec in _specs(program, chosen, kind))
        for kind in ("results", "arguments")
    )
    return mesh, lower, results, arguments


def _run_part(part: Program, bind: Bind, arrays: Sequence[Any], chosen: Sequence[Chosen]) -> tuple[Any, ...]:
    """One device's program, and what its results need of the other devices."""
    given, addend = list(arrays), None
    if any(one.cut.kind in ("inner", "contraction") for one in chosen):
        part, given, addend = unjoined(part, arrays)
    for one in chosen:
        for i in one.cut.once(part):
            given[i] = jnp.where(manual.first(one.axes), given[i], jnp.zeros_like(given[i]))
        for i, (name, meta) in enumerate(part.arguments):
            if name in RUNNING and given[i].shape != meta.shape:
                start = jax.lax.axis_index(one.axes) * (meta.shape[0] - 1)
                window = jax.lax.dynamic_slice_in_dim(given[i], start, meta.shape[0])
                given[i] = window - window[0]
    part, given = spread.placed(part, given, {one.cut.kind: one.axes for one in chosen})
    everywhere = tuple(axis for one in chosen for axis in one.axes)
    special = spread.special(part, chosen[0].cut.kind) if chosen else None
    results = list(
        special(part, given, chosen[0].axes, bind) if special else shared.run(part, given, everywhere, bind)
    )
    for i, (name, meta) in enumerate(part.results):
        for one in chosen:
            if one.results[i] is None and meta.zero:
                results[i] = jax.lax.pmax(results[i], one.axes)
            elif one.results[i] is None and one.cut.sums(part.face, name) and not special:
                results[i] = jax.lax.psum(results[i], one.axes)
        if name == "y" and addend is not None:
            results[i] = results[i] + addend
    return tuple(results)
