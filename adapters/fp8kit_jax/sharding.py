"""How a program splits over a mesh, so that XLA gathers nothing: under ``jax.jit`` with shardings
(custom_partitioning), and on mesh axes of the kind ``Explicit``.

Operations declare the ways to split them (``Operation.partitions``), and ``ops.partition.part_of`` gives what
one device computes then. Which dimension of every array goes along is not written down anywhere: the
operation's own ``infer`` is asked for the program of one device, and what has become smaller is split. What
has not, is the same on all devices, or a sum over them; amaxes are maxima over them, taken before the cast
where scales are current (``shared_amaxes``). Dropout's numbers are those of one device, cuDNN's own aside.

A program that cannot be split as its arguments are, because rows of different devices meet in it or because a
device's part would be padded, runs whole on every device along that mesh axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.errors import Fp8kitError
from fp8kit.lru import memoized
from fp8kit.ops.partition import Partition, part_of
from fp8kit.ops.product import ProductSpec
from fp8kit_jax import manual, shared_amaxes
from fp8kit_jax.program import Program

Bind = Callable[..., Any]
Dims = list[int | None]  # for each array, which dimension is split, None for none
Made = tuple[tuple[Partition, int], ...]  # partitions, and into how many parts each
_NO_MESH = jax.sharding.AbstractMesh((), ())
_FACTORS = (2, 3, 5, 7)  # numbers of parts by which a partition's dimensions are found


class Chosen(NamedTuple):
    """A partition that is made: into how many parts, over which mesh axes, and which dimension of every
    argument and result it splits."""

    partition: Partition
    count: int
    axes: tuple[str, ...]
    arguments: Dims
    results: Dims


@memoized("JAX: partitions")
def partitions(program: Program) -> tuple[Partition, ...]:
    """Returns the partitions of a program, those that cost no sum over devices first; none where the
    inspector looks at whole tensors."""
    if program.is_whole:
        return ()
    return program.op.partitions(program.spec, dict(program.metas), dict(program.views))


@memoized("JAX: parts")
def part(program: Program, made: Made) -> Program | None:
    """Returns the program of one part; None where there is none."""
    found = part_of(program.op, program.spec, dict(program.metas), dict(program.views), made)
    if found is None:
        return None
    spec, metas, views = found
    streams = (partition.stream for partition, _ in made if partition.stream)
    cotangents = (*program.cotangents, *streams) if program.face == "backward" else ()
    own = replace(
        program, spec=spec, metas=tuple(metas.items()), views=tuple(views.items()), cotangents=cotangents
    )
    try:
        _ = own.interface
    except Fp8kitError:
        return None
    return own


def dims_of(program: Program, partition: Partition, count: int) -> tuple[Dims, Dims] | None:
    """Returns which dimension of each argument and of each result a partition into ``count`` parts splits;
    None where the program has no such parts."""
    own = part(program, ((partition, count),))
    if own is None:
        return None

    def split(kind: str) -> Dims | None:
        smaller, dims = dict(own.seen(kind)), list[int | None]()
        for name, whole in program.seen(kind):
            sizes = zip(whole, smaller.get(name, whole), strict=True)
            changed = {} if name in partition.windows else {d: s for d, s in enumerate(sizes) if s[0] != s[1]}
            if len(changed) > 1 or any(m != count * n for m, n in changed.values()):
                return None
            dims.append(next(iter(changed), None))
        return dims

    arguments, results = split("arguments"), split("results")
    return None if arguments is None or results is None else (arguments, results)


def _found(program: Program, partition: Partition) -> tuple[Dims, Dims] | None:
    return next((dims for n in _FACTORS if (dims := dims_of(program, partition, n)) is not None), None)


@memoized("JAX: partitioned programs", 1024)
def partitioned(program: Program, bind: Bind, wide: bool) -> Any:
    """Returns the program as a function that XLA may split. ``bind(*arrays, program=...)`` runs it on one
    device; ``wide``: with 64 bits, which XLA does not know when it asks for a part."""
    function = custom_partitioning(lambda *arrays: tuple(bind(*arrays, program=program)))
    function.def_partition(
        functools.partial(_partition, program, bind, wide),
        functools.partial(_inferred, program),
        sharding_rule=_rule(program),
    )
    return function


def _inferred(program: Program, mesh: Any, arg_shapes: Sequence[Any], result_shape: Any) -> Any:
    """Returns how the results are split where the arguments are so. GSPMD asks this instead of the rule,
    which is Shardy's, and before it knows how all arguments are split."""
    known = [P() if shape.sharding is None else shape.sharding.spec for shape in arg_shapes]
    chosen = _choose(program, mesh, known)
    return tuple(NamedSharding(mesh, spec) for spec in _specs(program, chosen, "results"))


def _rule(program: Program) -> SdyShardingRule:
    """Along which dimensions shardings go from array to array: a factor for each partition, each other
    dimension its own. Where what is split is flattened together with other dimensions, the factor is the
    major part of a compound."""
    arrays = [*program.seen("arguments"), *program.seen("results")]
    along: dict[tuple[int, int], str] = {}  # (array, dimension) -> factor
    base: dict[str, int] = {}  # factor -> its size
    for number, partition in enumerate(partitions(program)):
        found = _found(program, partition)
        if found is None:
            continue
        dims = [(i, d) for i, d in enumerate([*found[0], *found[1]]) if d is not None and (i, d) not in along]
        along |= dict.fromkeys(dims, f"c{number}")
        base[f"c{number}"] = math.gcd(*(arrays[i][1][d] for i, d in dims))
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
    """Returns the partitions that the arguments' PartitionSpecs suggest, as many as can be made together, one
    after the other."""
    chosen: list[Chosen] = []
    taken: set[str] = set()
    split: set[tuple[int, int, int]] = set()  # (arguments or results, array, dimension)
    for partition in partitions(program):
        found = _found(program, partition)
        axes: tuple[str, ...] = ()
        for spec, d in zip(specs, found[0] if found is not None else (), strict=False):
            if d is not None and d < len(spec) and spec[d] and not axes:
                named = (spec[d],) if isinstance(spec[d], str) else tuple(spec[d])
                axes = tuple(axis for axis in named if axis not in taken)
        count = math.prod(mesh.shape[axis] for axis in axes)
        dims = dims_of(program, partition, count) if count > 1 else None
        if dims is None:
            continue
        own, more = Chosen(partition, count, axes, *dims), _splits(dims)
        if split & more or part(program, _made([*chosen, own])) is None:
            continue
        chosen.append(own)
        taken, split = taken | set(axes), split | more
    return chosen


def _splits(dims: tuple[Dims, Dims]) -> set[tuple[int, int, int]]:
    return {(kind, i, d) for kind, own in enumerate(dims) for i, d in enumerate(own) if d is not None}


def _made(chosen: Sequence[Chosen]) -> Made:
    return tuple((one.partition, one.count) for one in chosen)


def _specs(program: Program, chosen: Sequence[Chosen], kind: str) -> list[P]:
    """Returns the PartitionSpecs of "arguments" or "results" after the partitions ``chosen``."""
    found = []
    for i, (_, shape) in enumerate(program.seen(kind)):
        axes = {getattr(one, kind)[i]: one.axes for one in chosen}
        found.append(P(*(axes.get(d) for d in range(len(shape)))))
    return found


def result_specs(program: Program, mesh: Any, specs: Sequence[Any]) -> dict[str, P]:
    """Returns how the results are split, by name, where the arguments are split by ``specs``: as without the
    inspector, which looks at them whole."""
    program = _unwatched(program)
    found = _specs(program, _choose(program, mesh, specs), "results")
    return {name: spec for (name, _), spec in zip(program.results, found, strict=True)}


def _unwatched(program: Program) -> Program:
    """Returns the program without what the inspector wants of it."""
    if not program.is_whole:
        return program
    products = {name: own for name, own in vars(program.spec).items() if isinstance(own, ProductSpec)}
    plain = {name: replace(own, watch=None) for name, own in products.items()}
    return replace(program, spec=replace(program.spec, **plain))


def _partition(
    program: Program, bind: Bind, wide: bool, mesh: Any, arg_shapes: Sequence[Any], result_shape: Any
) -> Any:
    chosen = _choose(program, mesh, [shape.sharding.spec for shape in arg_shapes])

    def lower(*arrays: Any) -> tuple[Any, ...]:
        # as without a mesh around: JAX 0.12 types a sum's terms by one with explicit axes, which XLA refuses
        with jax.enable_x64(wide), jax.sharding.use_abstract_mesh(_NO_MESH):
            return _run_part(program, chosen, arrays, bind)

    results, arguments = (
        tuple(NamedSharding(mesh, spec) for spec in _specs(program, chosen, kind))
        for kind in ("results", "arguments")
    )
    return mesh, lower, results, arguments


# --- one device's part --------------------------------------------------------------------------------------


def _run_part(
    program: Program, chosen: Sequence[Chosen], arrays: Sequence[Any], bind: Bind
) -> tuple[Any, ...]:
    """Returns the results of ``program`` on one device: its part of them, with what that needs of the
    others."""
    own = part(program, _made(chosen))
    assert own is not None
    have, incoming = program.named(arrays)
    forward, whole = program.face == "forward", dict(have)
    for one in chosen:
        if one.partition.stream and not forward:
            incoming[one.partition.stream] = incoming[one.partition.sums[0]]
        table, names = (have, one.partition.once) if forward else (incoming, _counted_once(program, one))
        first = manual.first(one.axes)
        table |= {n: jnp.where(first, table[n], jnp.zeros_like(table[n])) for n in names if n in table}
        for name in have.keys() & set(one.partition.windows):
            length = dict(own.metas)[name].shape[0]
            start = jax.lax.axis_index(one.axes) * (length - 1)
            window = jax.lax.dynamic_slice_in_dim(have[name], start, length)
            have[name] = window - window[0]
    own, have = _placed(own, have, chosen)
    means = [(one.partition.mean, one.axes) for one in chosen if one.partition.mean is not None and forward]
    run = replace(own, spec=means[0][0].spec) if means else own
    everywhere = tuple(axis for one in chosen for axis in one.axes)
    found = shared_amaxes.run(run, run.ordered(have, incoming), everywhere, bind)
    results = {name: result for (name, _), result in zip(run.results, found, strict=True)}
    for mean, axes in means:
        rows, counted = results[mean.name], have[mean.rows_of] != mean.ignored
        total, count = jax.lax.psum((rows.sum(), counted.sum(dtype=jnp.float32)), axes)
        results[mean.name] = (total / jnp.maximum(count, 1.0)).reshape(1)
        results[mean.total] = jnp.stack([results[mean.name][0], count])
    for i, (name, meta) in enumerate(program.results):
        for one in chosen:
            if one.results[i] is None and meta.zero:
                results[name] = jax.lax.pmax(results[name], one.axes)
            elif one.results[i] is None and _sums(program, one.partition, name):
                results[name] = jax.lax.psum(results[name], one.axes)
    for one in chosen:
        if one.partition.addend and forward:
            (name,) = one.partition.sums
            results[name] = results[name] + whole[one.partition.addend]
    return tuple(results[name] for name, _ in program.results)


def _counted_once(program: Program, one: Chosen) -> set[str]:
    """Returns the names of the cotangents that count on one device only: those of outputs that are the same
    on all devices."""
    dims, p = one.arguments[len(program.read) :], one.partition
    same = {name for name, d in zip(program.cotangents, dims, strict=True) if d is None}
    return (same | {p.stream}) - {*p.sums, p.mean.name if p.mean is not None else ""}


def _sums(program: Program, partition: Partition, result: str) -> bool:
    """Whether a result that is not split is the sum of the parts'; otherwise it is the same in all."""
    if program.face == "forward":
        return result in partition.sums
    return program.face == "backward" and result not in partition.once


def _placed(own: Program, have: dict[str, Any], chosen: Sequence[Chosen]) -> tuple[Program, dict[str, Any]]:
    """Returns the part as it runs, with its place in the whole as an input where it draws random numbers."""
    parts = {
        one.partition.kind: (jax.lax.axis_index(one.axes), jax.lax.axis_size(one.axes)) for one in chosen
    }
    place = own.op.place(own.spec, dict(own.metas), parts)
    if place is None:
        return own, have
    numbers = jnp.stack([jnp.asarray(n, jnp.int32) for n in place.numbers])
    if place.name in have:
        first = have[place.name]  # int64, or pairs of uint32
        numbers = numbers.astype(first.dtype)
        if first.dtype == jnp.uint32:
            numbers = jnp.stack([numbers, jnp.zeros_like(numbers)], 1).reshape(-1)
        numbers = jnp.concatenate([first, numbers])
    metas = dict(own.metas) | {place.name: place.meta}
    return replace(own, spec=place.spec, metas=tuple(metas.items())), have | {place.name: numbers}


# --- mesh axes of the kind Explicit -------------------------------------------------------------------------


def explicit_mesh(tree: Any) -> Any:
    """Returns the mesh of the leaves' types where it has axes of the kind Explicit, else None. On such a mesh
    an array's type says how it is split, and a result's type must say it too."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def run_explicit(
    function: Callable[[Any, Any], Any],
    mesh: Any,
    program: Program,
    arguments: Mapping[str, Any],
    inputs: Any,
    state: Any,
) -> Any:
    """``function(inputs, state)``, which gives the outputs of the forward ``program`` by name, run as on axes
    of the kind ``Auto``; the outputs are typed by the partitions that the types of its ``arguments`` ask for.
    A gradient takes the type of what it is the gradient of."""
    types = {name: jax.typeof(value).sharding.spec for name, value in arguments.items()}
    specs = result_specs(program, mesh, [types[name] for name, _ in program.arguments])
    out = {name: NamedSharding(mesh, specs[name]) for name in program.interface.outputs}
    passes = program.interface.passes.items()
    out |= {name: NamedSharding(mesh, types[source]) for name, source in passes}
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=out)(inputs, state)
