"""How a program splits over a mesh under ``jax.jit`` with shardings: custom_partitioning, so that XLA gathers nothing.

Two dimensions may be split: *rows*, the first dimension of x (or of q, k and v: the batch), and *columns*, a matrix product's output
features. Which dimension of every other array goes along is not written down anywhere: the operation's own ``infer`` is asked for the
program of one device, and what has become smaller is split. What has not, is the same on all devices, or, in backward, a sum over them;
amaxes are maxima over them, taken before the cast where scales are current.

A program that cannot be split, because rows of different devices meet in it or because a device's part would be padded, runs whole on
every device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.errors import Fp8kitError
from fp8kit.formats import float32
from fp8kit.spec import Meta
from fp8kit_jax.program import Named, Program
from fp8kit_jax.rules_amax import amax_of, scaled_now, with_amaxes

ROWS = {"linear": ("x",), "norm": ("x",), "norm_linear": ("x",), "norm_mlp": ("x",), "activation": ("x",),
        "attention": ("q", "k", "v", "kv", "qkv")}
COLUMNS = ("linear", "norm_linear")
Bind = Callable[..., Any]
Cuts = list[int | None]  # for each array, which dimension is cut, None for none


class Split(NamedTuple):
    """Into how many parts rows and columns are cut."""

    rows: int = 1
    columns: int = 1


def part(program: Program, split: Split) -> Program | None:
    """The program of one device, None where the program does not split so."""
    spec, metas = program.spec, dict(program.metas)
    products = [getattr(spec, name) for name in ("product", "fc1", "fc2") if hasattr(spec, name)]
    fp8 = next((product.fp8 for product in products if product.fp8 is not None), None)
    grain = 1 if fp8 is None else 128 if fp8.blocks else 16  # a part must need no padding
    if split.rows > 1:
        names = [name for name in ROWS.get(program.operation, ()) if name in metas]
        extents = [metas[name].shape for name in names]
        if not extents or any(len(shape) < 2 or shape[0] % split.rows for shape in extents):
            return None
        if any(math.prod(shape[:-1]) // split.rows % grain for shape in extents):
            return None
        if fp8 is not None and (fp8.blocks and (fp8.x.tile[0] > 1 or fp8.g.tile[0] > 1)):
            return None
        if scaled_now(spec, products) and program.operation == "norm_mlp":
            return None
        if program.operation == "attention" and (spec.qkv_format != "bshd" or len(metas) > len(names)):
            return None
        for name in names:
            shape = metas[name].shape
            metas[name] = metas[name]._replace(shape=(shape[0] // split.rows, *shape[1:]))
    if split.columns > 1:
        if program.operation not in COLUMNS or len(spec.product.segments) != 1 or (fp8 is not None and fp8.blocks):
            return None
        n = spec.product.out_features
        if n % (split.columns * grain):
            return None
        for name, at in (("weight0", 1 if spec.product.layout == "io" else 0), ("bias0", 0)):
            if name in metas:
                shape = list(metas[name].shape)
                shape[at] //= split.columns
                metas[name] = metas[name]._replace(shape=tuple(shape))
        spec = replace(spec, product=replace(spec.product, segments=(n // split.columns,)))
    found = replace(program, spec=spec, metas=tuple(metas.items()))
    try:
        _ = found.signature
    except Fp8kitError:
        return None
    return found


def axes_of(program: Program, local: Program | None, count: int) -> tuple[Cuts, Cuts]:
    """Which dimension of each argument and of each result is cut into ``count`` parts, None where none is."""

    def cut(whole: Named, parts: Named) -> Cuts:
        found: Cuts = []
        for (_, a), (_, b) in zip(whole, parts, strict=True):
            changed = [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
            assert len(changed) < 2
            assert all(a.shape[d] == count * b.shape[d] for d in changed)
            found.append(changed[0] if changed else None)
        return found

    if local is None:
        return [None] * len(program.arguments), [None] * len(program.results)
    return cut(program.arguments, local.arguments), cut(program.results, local.results)


@functools.lru_cache(maxsize=1024)
def partitioned(program: Program, bind: Bind) -> Any:
    """The program as a function that XLA may split. ``bind(*arrays, program=...)`` runs it on one device."""
    function = custom_partitioning(lambda *arrays: tuple(bind(*arrays, program=program)))
    function.def_partition(functools.partial(_partition, program, bind), sharding_rule=_rule(program))
    return function


def _rule(program: Program) -> SdyShardingRule:
    """Along which dimensions shardings go from array to array: factor "r" for rows, "c" for columns, each other dimension its own. Where
    rows are flattened, "r" is the major part of a compound."""
    arrays = [*program.arguments, *program.results]
    along: dict[tuple[int, int], str] = {}  # (array, dimension) -> factor
    base: dict[str, int] = {}  # factor -> its size
    for factor, split in (("r", Split(rows=2)), ("c", Split(columns=2))):
        cuts = [d for group in axes_of(program, part(program, split), 2) for d in group]
        along |= {(i, d): factor for i, d in enumerate(cuts) if d is not None}
        extents = [arrays[i][1].shape[d] for i, d in enumerate(cuts) if d is not None]
        base |= {factor: min(extents)} if extents else {}
    sizes: dict[str, int] = {}
    mapped: list[tuple[Any, ...]] = []
    for i, (_, meta) in enumerate(arrays):
        dims: list[Any] = []
        for d, n in enumerate(meta.shape):
            own, factor = f"a{i}d{d}", along.get((i, d))
            if factor is not None and n == base[factor]:
                dims.append(factor)
            elif factor is not None and n % base[factor] == 0:
                sizes |= {factor: base[factor], own: n // base[factor]}
                dims.append(CompoundFactor(factor, own))
            else:
                dims.append(own)
        mapped.append(tuple(dims))
    whole = {factor for dims in mapped for factor in dims if isinstance(factor, str)}  # the sizes of these are known
    count = len(program.arguments)
    return SdyShardingRule(tuple(mapped[:count]), tuple(mapped[count:]), **{f: n for f, n in sizes.items() if f not in whole})


def _partition(program: Program, bind: Bind, mesh: Any, arg_shapes: Sequence[Any], result_shape: Any) -> Any:
    row_axes, column_axes = _asked(program, arg_shapes)

    def size(axes: tuple[str, ...]) -> int:
        return math.prod(mesh.shape[axis] for axis in axes)

    split = Split(size(row_axes), size(column_axes))
    if part(program, split) is None:  # one of the two alone may do
        for rows, columns in ((row_axes, ()), ((), column_axes), ((), ())):
            split = Split(size(rows), size(columns))
            if part(program, split) is not None:
                row_axes, column_axes = rows, columns
                break
    local = part(program, split)
    assert local is not None
    by_rows = axes_of(program, part(program, Split(rows=split.rows)), split.rows) if split.rows > 1 else None
    by_columns = axes_of(program, part(program, Split(columns=split.columns)), split.columns) if split.columns > 1 else None

    def shardings(which: int, named: Named) -> tuple[NamedSharding, ...]:
        found = []
        for i, (_, meta) in enumerate(named):
            dims: list[Any] = [None] * len(meta.shape)
            for cut, axes in ((by_rows, row_axes), (by_columns, column_axes)):
                if cut is not None and cut[which][i] is not None:
                    dims[cut[which][i]] = axes
            found.append(NamedSharding(mesh, P(*dims)))
        return tuple(found)

    used = [(cut[1], axes) for cut, axes in ((by_rows, row_axes), (by_columns, column_axes)) if cut is not None]

    def lower(*arrays: Any) -> tuple[Any, ...]:
        return _run_part(local, bind, arrays, used)

    return mesh, lower, shardings(1, program.results), shardings(0, program.arguments)


def _asked(program: Program, arg_shapes: Sequence[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that XLA suggests for rows and for columns: those of the arguments' cut dimensions, one after the other."""
    found = []
    for split in (Split(rows=2), Split(columns=2)):
        cut, _ = axes_of(program, part(program, split), 2)
        axes: tuple[str, ...] = ()
        for shape, d in zip(arg_shapes, cut, strict=True):
            spec = shape.sharding.spec
            if d is not None and d < len(spec) and spec[d] and not axes:
                axes = (spec[d],) if isinstance(spec[d], str) else tuple(spec[d])
        found.append(axes)
    rows, columns = found
    return rows, tuple(axis for axis in columns if axis not in rows)


def _run_part(local: Program, bind: Bind, arrays: Sequence[Any], used: Sequence[tuple[Cuts, tuple[str, ...]]]) -> tuple[Any, ...]:
    """One device's program, and what its results need of the other devices."""
    everywhere = tuple(axis for _, axes in used for axis in axes)
    given = list(arrays)
    program = local
    if everywhere and scaled_now(local.spec):
        known = tuple((f"{name}_amax_in", Meta((1,), float32)) for name in "xw")
        program = replace(local, spec=with_amaxes(local.spec), metas=(*local.metas, *known))
        if local.face == "forward":
            measure = replace(local, face="measure")
            given += [jax.lax.pmax(amax, everywhere) for amax in bind(*arrays, program=measure)]
        elif "g_amax" in local.signature.grads:
            cotangent = arrays[len(arrays) - len(local.cotangents) + local.cotangents.index("y")]
            at = len(arrays) - len(local.cotangents) - len(local.signature.saved)
            given.insert(at, jax.lax.pmax(amax_of(cotangent), everywhere))
            program = replace(program, late=(*local.late, "g_amax_in"))
    results = list(bind(*given, program=program))
    for i, (_, meta) in enumerate(local.results):
        for cut, axes in used:
            if cut[i] is None and meta.zero:
                results[i] = jax.lax.pmax(results[i], axes)
            elif cut[i] is None and local.face == "backward":
                results[i] = jax.lax.psum(results[i], axes)
    return tuple(results)
