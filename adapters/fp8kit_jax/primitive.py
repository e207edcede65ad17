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
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from fp8kit import formats
from fp8kit.arrays import CPU, Device, Shape
from fp8kit.errors import AutogradError, BackendError, FormatError, ShapeError
from fp8kit.lru import memoized
from fp8kit.spec import Meta
from fp8kit_jax import calls, manual, several_gpus, sharding
from fp8kit_jax.program import Named, Program, XlaOp

call_p = Primitive("fp8kit_call")
part_p = Primitive("fp8kit_part")  # the same, on one device for certain
call_p.multiple_results = part_p.multiple_results = True
DEVICES = {"cpu": CPU, "cuda": Device("cuda")}


def bind(*arrays: Any, program: Program) -> list[Any]:
    """Returns the program on arrays in the order of its ``arguments``; its results in theirs. Traceable, not
    differentiable.

    Where XLA may have several devices to itself, the primitive holds the program's form that can be split:
    JAX must see it when it traces.
    """
    alone = not _several() or jax.sharding.get_abstract_mesh().manual_axes
    modes = jax.config.jax_enable_x64, jax.config.jax_use_shardy_partitioner
    split = None if alone else _split(program, jax.sharding.get_abstract_mesh(), *modes)
    return call_p.bind(*arrays, program=program, split=split)


@functools.cache
def _several() -> bool:
    """Whether any kind of device is there more than once."""
    counts = []
    for platform in calls.PLATFORMS:
        with contextlib.suppress(RuntimeError):  # no such device here
            counts.append(jax.device_count(platform))
    return max(counts, default=1) > 1


@memoized("JAX: split programs", 1024)
def _split(program: Program, mesh: Any, wide: bool, shardy: bool) -> Any:
    """Returns the split form of a program as a jaxpr, traced where ``mesh`` is in force; ``wide``: with 64
    bits (``wire``); ``shardy``: for that partitioner, or for GSPMD."""
    shapes = [jax.ShapeDtypeStruct(*wired) for wired in _wired(program, "arguments")]
    return jax.make_jaxpr(sharding.partitioned(program, part_p.bind, wide))(*shapes)


# --- shapes and dtypes --------------------------------------------------------------------------------------


def meta_of(array: Any) -> Meta:
    """Shape and dtype of a JAX array or tracer; FormatError for a dtype that fp8kit does not have."""
    return Meta(tuple(array.shape), formats.dtype(np.dtype(array.dtype)))


def wire(meta: Meta, shape: Shape) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array as JAX holds it: int64 as pairs of uint32, low word first, since JAX has 64
    bits only on request. ``shape``: the array's own, where the meta's is a flattened one."""
    if meta.dtype is formats.int64 and not jax.config.jax_enable_x64:
        return (*shape[:-1], 2 * shape[-1]), np.dtype(np.uint32)
    return shape, meta.dtype.numpy


def _wired(program: Program, kind: str) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shapes and dtypes of "arguments" or "results" as JAX holds them."""
    metas: Named = getattr(program, kind)
    return [wire(meta, shape) for (_, meta), (_, shape) in zip(metas, program.seen(kind), strict=True)]


def _like(aval: Any, shape: Shape, dtype: np.dtype[Any]) -> Any:
    """Returns an abstract array on the same mesh and varying over the same manual axes as ``aval``."""
    whole = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, whole)
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


@call_p.def_abstract_eval
def _abstract(*avals: Any, program: Program, split: Any = None) -> list[Any]:
    arguments = zip(program.arguments, _wired(program, "arguments"), avals, strict=True)
    for (name, _), (shape, dtype), aval in arguments:
        if tuple(aval.shape) != shape:
            raise ShapeError(program.operation, name, f"shape {tuple(aval.shape)}", f"shape {shape}")
        if aval.dtype != dtype:
            raise FormatError(program.operation, name, aval.dtype.name, dtype.name)
    # results vary over every axis over which an argument varies
    widest = max(avals, key=lambda aval: len(manual.varying(aval)))
    return [_like(widest, shape, dtype) for shape, dtype in _wired(program, "results")]


part_p.def_abstract_eval(_abstract)


def _no_tangents(primals: Any, tangents: Any, *, program: Program, split: Any) -> Any:
    """AutogradError: gradients are rules of ``rules.apply``, and this primitive has none of its own."""
    asked = "a second-order one, or one in forward mode (jvp, hessian)"
    wanted = "a first-order one, by grad or vjp: others are not supported"
    raise AutogradError(program.operation, "derivative", asked, wanted)


ad.primitive_jvps[call_p] = _no_tangents


@memoized("JAX: compiled calls", 1024)
def _compiled(program: Program) -> Callable[..., Any]:
    return jax.jit(functools.partial(bind, program=program))


@call_p.def_impl
def _eager(*arrays: Any, program: Program, split: Any) -> Any:
    with jax.disable_jit(False):  # the call exists in compiled form only
        if not (jax.config.jax_debug_nans or jax.config.jax_debug_infs):
            return _compiled(program)(*arrays)
        # JAX would run the function again op by op where it finds such a value: this call, without end
        with jax.debug_nans(False), jax.debug_infs(False):
            results = _compiled(program)(*arrays)
    _want_finite(program, results)
    return results


def _want_finite(program: Program, results: Sequence[Any]) -> None:
    """FloatingPointError that names the operation where an output or a gradient has what ``jax.debug_nans``
    or ``jax.debug_infs`` looks for."""
    own = program.interface
    searches = {"nan": (jax.config.jax_debug_nans, np.isnan), "inf": (jax.config.jax_debug_infs, np.isinf)}
    for (name, _), result in zip(program.results, results, strict=True):
        if not (name in own.outputs or name in own.grads) or not jnp.issubdtype(result.dtype, jnp.floating):
            continue
        for kind, (asked, search) in searches.items():
            if asked and any(search(np.asarray(shard.data)).any() for shard in result.addressable_shards):
                raise FloatingPointError(
                    f"invalid value ({kind}) encountered in {program.operation}, {program.face}: {name}"
                )


# --- lowering -----------------------------------------------------------------------------------------------


def _devices(axes: Any) -> int:
    """Returns how many devices run the program that is lowered; 2 where that is not said, as by pmap."""
    mesh = getattr(axes, "mesh", None)
    return int(getattr(axes, "num_devices", 2) if mesh is None else mesh.size)


def _lower(ctx: Any, *operands: Any, program: Program, platform: str) -> Any:
    scratch = XlaOp(program, DEVICES[platform]).temporaries.nbytes
    extra = [jax.core.ShapedArray((scratch,), np.uint8)] if scratch else []
    text = program.text(scratch)
    constant = calls.constant(text)
    whole = [jax.core.ShapedArray(constant.shape, constant.dtype), *ctx.avals_in]
    inner = ctx.replace(avals_in=whole, avals_out=[*ctx.avals_out, *extra])
    if _devices(ctx.module_context.axis_context) > 1:  # GPUs that run programs of their own wait for no other
        several_gpus.note_devices(platform)
    lower = jax.ffi.ffi_lowering(calls.target(program.policy.deterministic))
    values = lower(inner, mlir.ir_constant(constant), *operands, **calls.attributes(text))
    return values[: len(ctx.avals_out)]


def _lower_anywhere(ctx: Any, *operands: Any, program: Program, split: Any) -> Any:
    """Split over devices where XLA has several to itself; in a shard_map, and on one device, as it is."""
    axes = ctx.module_context.axis_context
    split = split if getattr(axes, "num_devices", 1) > 1 else None
    # no argument of jit says it; the mesh that is set does
    if split is not None and axes.abstract_mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size != axes.num_devices:
            got = f"shardings over {axes.num_devices} devices, none of an argument with a mesh"
            raise BackendError(
                program.operation, "mesh", got, "a NamedSharding, or jax.set_mesh around the call"
            )
        ctx = ctx.replace(
            module_context=ctx.module_context.replace(axis_context=replace(axes, abstract_mesh=mesh))
        )
    run = functools.partial(part_p.bind, program=program) if split is None else jaxpr_as_fun(split)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


mlir.register_lowering(call_p, _lower_anywhere)
for _platform in DEVICES:
    mlir.register_lowering(part_p, functools.partial(_lower, platform=_platform), platform=_platform)


# --- vmap ---------------------------------------------------------------------------------------------------


def _batch(arrays: Sequence[Any], dims: Sequence[int | None], *, program: Program, split: Any) -> Any:
    # by place: backward may read an output and its gradient, which have one name
    names = [name for name, _ in program.arguments]
    batched = {i: jax.numpy.moveaxis(arrays[i], dim, 0) for i, dim in enumerate(dims) if dim is not None}
    whole = {i: arrays[i] for i, dim in enumerate(dims) if dim is None}

    def run(parts: dict[int, Any], program: Program = program) -> list[Any]:
        every = whole | parts
        return bind(*(every[i] for i in range(len(names))), program=program)

    rows, front = _independent_rows(program), [0] * len(program.results)
    if batched.keys() != {i for i, name in enumerate(names) if name in rows}:
        return jax.lax.map(run, batched), front
    size, alone = next(iter(batched.values())).shape[0], {names[i] for i in whole}
    metas = tuple(
        (name, meta._replace(shape=(size, *meta.shape)) if name in rows else meta)
        for name, meta in program.metas
    )
    views = tuple((name, shape if name in alone else (size, *shape)) for name, shape in program.views)
    results = run(batched, replace(program, metas=metas, views=views))
    seen = zip(results, program.seen("results"), strict=True)
    return [result.reshape(size, *shape) for result, (_, shape) in seen], front


def _independent_rows(program: Program) -> tuple[str, ...]:
    """Returns the arguments whose rows are computed each by itself, to the last bit where that is
    promised."""
    summed = program.policy.deterministic and program.op.products(program.spec)
    if program.face != "forward" or summed or program.is_whole:
        return ()
    return program.op.independent_rows(program.spec, program.interface.signature.saved)


batching.primitive_batchers[call_p] = _batch
