"""The JAX primitive behind every operation: its shapes, its lowering to the custom call, its batching.

``bind(*arrays, program=...)`` binds it. Its results are the program's; the scratch is a further result of the
custom call alone, sized when the program is lowered, for the platform it is lowered to, and XLA takes the
memory back at once.

vmap is exact. Where each row of the batch is computed by itself (nothing shares a scale, nothing is summed
over rows, nothing but numbers of rows is kept for backward), the batch becomes further rows of one call: the
same codes, scales and terms, and, without a matrix product, the same bits. The matrix library may sum a
longer matrix in another order: ``fk.deterministic(True)``, whose promise is the bits, runs products one
element after the other too. Everywhere else the elements run so always.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from fp8kit import formats
from fp8kit.arrays import CPU, Device
from fp8kit.errors import AutogradError, BackendError, FormatError, ShapeError
from fp8kit.spec import Meta
from fp8kit_jax import calls, manual, sharding
from fp8kit_jax.program import Program, XlaOp

call_p = Primitive("fp8kit_call")
part_p = Primitive("fp8kit_part")  # the same, on one device for certain
call_p.multiple_results = part_p.multiple_results = True
DEVICES = {"cpu": CPU, "cuda": Device("cuda")}


def bind(*arrays: Any, program: Program) -> list[Any]:
    """The program on arrays in the order of its ``arguments``; its results in theirs. Traceable, not
    differentiable.

    Where XLA may have several devices to itself, the primitive holds the program's form that can be split:
    JAX must see it when it traces.
    """
    alone = not _several() or jax.sharding.get_abstract_mesh().manual_axes
    split = None if alone else _split(program, jax.sharding.get_abstract_mesh(), jax.config.jax_enable_x64)
    return call_p.bind(*arrays, program=program, split=split)


@functools.cache
def _several() -> bool:
    """Whether any kind of device is there more than once."""
    counts = []
    for platform in calls.PLATFORMS:
        with contextlib.suppress(RuntimeError):  # no such device here
            counts.append(jax.device_count(platform))
    return max(counts, default=1) > 1


@functools.lru_cache(maxsize=1024)
def _split(program: Program, mesh: Any, wide: bool) -> Any:
    """The split form of a program as a jaxpr, traced where ``mesh`` is in force; ``wide``: with 64 bits
    (``wire``)."""
    shapes = [jax.ShapeDtypeStruct(*wire(meta, shape)) for meta, shape in _both(program, "arguments")]
    return jax.make_jaxpr(sharding.partitioned(program, part_p.bind, wide))(*shapes)


# --- shapes and dtypes --------------------------------------------------------------------------------------


def meta_of(array: Any) -> Meta:
    """Shape and dtype of a JAX array or tracer; FormatError for a dtype that fp8kit does not have."""
    return Meta(tuple(array.shape), formats.dtype(np.dtype(array.dtype)))


def wire(meta: Meta, shape: tuple[int, ...]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array as JAX holds it: int64 as pairs of uint32, low word first, since JAX has 64
    bits only on request. ``shape``: the array's own, where the meta's is a flattened one."""
    if meta.dtype is formats.int64 and not jax.config.jax_enable_x64:
        return (*shape[:-1], 2 * shape[-1]), np.dtype(np.uint32)
    return shape, meta.dtype.numpy


def _both(program: Program, kind: str) -> list[tuple[Meta, tuple[int, ...]]]:
    """The metas of "arguments" or "results", each with its shape in JAX."""
    return [
        (meta, shape)
        for (_, meta), (_, shape) in zip(getattr(program, kind), program.seen(kind), strict=True)
    ]


def _like(aval: Any, meta: Meta, shape: tuple[int, ...]) -> Any:
    """An abstract array of ``meta`` on the same mesh and varying over the same manual axes as ``aval``."""
    shape, dtype = wire(meta, shape)
    sharding = jax.sharding.NamedSharding(
        aval.sharding.mesh, jax.sharding.PartitionSpec(*[None] * len(shape))
    )
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


@call_p.def_abstract_eval
def _abstract(*avals: Any, program: Program, split: Any = None) -> list[Any]:
    for (name, _), (meta, seen), aval in zip(
        program.arguments, _both(program, "arguments"), avals, strict=True
    ):
        shape, dtype = wire(meta, seen)
        if tuple(aval.shape) != shape:
            raise ShapeError(program.operation, name, f"shape {tuple(aval.shape)}", f"shape {shape}")
        if aval.dtype != dtype:
            raise FormatError(program.operation, name, aval.dtype.name, dtype.name)
    # results vary over every axis over which an argument varies
    widest = max(avals, key=lambda aval: len(manual.varying(aval)))
    return [_like(widest, meta, shape) for meta, shape in _both(program, "results")]


part_p.def_abstract_eval(_abstract)


def _no_tangents(primals: Any, tangents: Any, *, program: Program, split: Any) -> Any:
    """AutogradError: gradients are rules of ``rules.apply``, and this primitive has none of its own."""
    asked = "a second one, or forward mode (jvp, hessian)"
    raise AutogradError(program.operation, "derivative", asked, "first ones, by grad or vjp")


ad.primitive_jvps[call_p] = _no_tangents


@functools.lru_cache(maxsize=1024)
def _compiled(program: Program) -> Callable[..., Any]:
    return jax.jit(functools.partial(bind, program=program))


@call_p.def_impl
def _eager(*arrays: Any, program: Program, split: Any) -> Any:
    with jax.disable_jit(False):  # the call exists in compiled form only
        return _compiled(program)(*arrays)


# --- lowering -----------------------------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, program: Program, platform: str) -> Any:
    scratch = XlaOp(program, DEVICES[platform]).temporaries.nbytes
    extra = [jax.core.ShapedArray((scratch,), np.uint8)] if scratch else []
    inner = ctx.replace(avals_out=[*ctx.avals_out, *extra])
    lower = jax.ffi.ffi_lowering(calls.target(program.policy.deterministic))
    return lower(inner, *operands, **calls.attributes(program.text(scratch)))[: len(ctx.avals_out)]


def _lower_anywhere(ctx: Any, *operands: Any, program: Program, split: Any) -> Any:
    """Split over devices where XLA has several to itself; in a shard_map, and on one device, as it is."""
    axes = ctx.module_context.axis_context
    several = getattr(axes, "num_devices", 1) > 1
    # no argument of jit says it; the mesh that is set does
    if several and split is not None and axes.abstract_mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size != axes.num_devices:
            got = f"shardings over {axes.num_devices} devices, none of an argument with a mesh"
            raise BackendError(
                program.operation, "mesh", got, "a NamedSharding, or jax.set_mesh around the call"
            )
        ctx = ctx.replace(
            module_context=ctx.module_context.replace(axis_context=replace(axes, abstract_mesh=mesh))
        )
    run = (
        jaxpr_as_fun(split)
        if several and split is not None
        else functools.partial(part_p.bind, program=program)
    )
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


mlir.register_lowering(call_p, _lower_anywhere)
for _platform in DEVICES:
    mlir.register_lowering(part_p, functools.partial(_lower, platform=_platform), platform=_platform)


# --- vmap ---------------------------------------------------------------------------------------------------


def _batch(arrays: Sequence[Any], dims: Sequence[int | None], *, program: Program, split: Any) -> Any:
    moved = [a if dim is None else _front(a, dim) for a, dim in zip(arrays, dims, strict=True)]
    names = [name for name, _ in program.arguments]
    rows = _independent_rows(program)
    batched = [name for name, dim in zip(names, dims, strict=True) if dim is not None]
    if batched and batched == [name for name in names if name in rows]:
        size = moved[names.index(batched[0])].shape[0]
        metas = tuple(
            (name, meta._replace(shape=(size, *meta.shape)) if name in rows else meta)
            for name, meta in program.metas
        )
        inputs = dict(program.metas)
        views = tuple(
            (name, shape if name in inputs and name not in rows else (size, *shape))
            for name, shape in program.views
        )
        wide = replace(program, metas=metas, views=views)
        results = zip(bind(*moved, program=wide), program.seen("results"), strict=True)
        return [result.reshape(size, *shape) for result, (_, shape) in results], [0] * len(wide.results)

    def one(parts: list[Any]) -> list[Any]:
        rest = iter(parts)
        return bind(
            *(a if dim is None else next(rest) for a, dim in zip(moved, dims, strict=True)), program=program
        )

    mapped = [a for a, dim in zip(moved, dims, strict=True) if dim is not None]
    return jax.lax.map(one, mapped), [0] * len(program.results)


def _independent_rows(program: Program) -> tuple[str, ...]:
    """The arguments whose rows are computed each by itself, to the last bit where that is promised."""
    summed = program.policy.deterministic and program.op.products(program.spec)
    if program.face != "forward" or summed:
        return ()
    return program.op.independent_rows(program.spec, program.interface.signature.saved)


def _front(array: Any, dim: int) -> Any:
    return array if dim == 0 else jax.numpy.moveaxis(array, dim, 0)


batching.primitive_batchers[call_p] = _batch
