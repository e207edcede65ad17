"""Every operation as a pair of torch ops, ``torch.ops.fp8kit.NAME`` and ``NAME_backward``, made by one
factory; two more for FP8 state.

The factory takes the fake implementation from ``infer`` and the gradient from ``backward``. Ops are
functional; what changes FP8 state, ``record_`` and ``update_``, is apart, because torch refuses an autograd
formula on an op that mutates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from fp8kit.arrays import ArrayView, Device
from fp8kit.autocast import current, touch_forward
from fp8kit.errors import ArgumentError
from fp8kit.spec import Meta, Signature
from fp8kit_torch import state as states
from fp8kit_torch.memory import NOTHING, Block, Placed, scale_views
from fp8kit_torch.plans import Call, call_by
from fp8kit_torch.ready import Ready
from fp8kit_torch.texts import OPERATIONS, decode
from fp8kit_torch.views import as_view, dtype_of, kind_of

# when a state that recorded amaxes is updated; NEITHER: the graph does it itself
FORWARD, BACKWARD, NEITHER = 1, 2, 0


def _needs(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _tidy(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t if t.is_contiguous() else t.contiguous() for t in tensors]


def _signature(call: Call, tensors: Sequence[Tensor], needs: str) -> Signature:
    return call.infer([(t.shape, kind_of(t.dtype)) for t in tensors], _needs(needs))


def _blank(meta: Meta, like: Tensor) -> Tensor:
    return like.new_empty(meta.shape, dtype=dtype_of(meta.dtype))


def _scales(call: Call, ready: Ready, scale: Tensor | None) -> Placed:
    return NOTHING if scale is None else scale_views(call.front, scale, ready.place)


def make(name: str) -> tuple[Any, Any]:
    """The forward and the backward op of the operation ``name``.

    Forward: ``inputs`` by the call's names; ``scale`` of the forward state; ``late``: scale, history and
    handle of the backward state; ``call``: its text; ``needs``: inputs whose gradient is wanted; ``recipe``:
    text of the ``AmaxHistory`` of the backward state. Returns outputs, copies of inputs that pass through,
    amaxes by slot (where the call has GEMMs), and the saved block (where there is one).
    """

    @custom_op(f"fp8kit::{name}", mutates_args=())
    def forward(
        inputs: Sequence[Tensor],
        scale: Tensor | None,
        late: Sequence[Tensor],
        call: str,
        needs: str,
        recipe: str,
    ) -> list[Tensor]:
        found, tensors = call_by(call), _tidy(inputs)
        ready = found.ready(tensors, _needs(needs))
        outputs, row, held = ready.forward(tensors, _scales(found, ready, scale), NOTHING)
        copies = [tensors[found.names.index(source)].clone() for source in ready.signature.passes.values()]
        return [*outputs, *copies, *([] if row is None else [row]), *held]

    @forward.register_fake
    def _(
        inputs: Sequence[Tensor],
        scale: Tensor | None,
        late: Sequence[Tensor],
        call: str,
        needs: str,
        recipe: str,
    ) -> list[Tensor]:
        found, like = call_by(call), inputs[0]
        signature = _signature(found, inputs, needs)
        made = [_blank(meta, like) for n, meta in signature.outputs.items() if not _is_amax(n, found.front)]
        made += [
            torch.empty_like(inputs[found.names.index(n)], memory_format=torch.contiguous_format)
            for n in signature.passes.values()
        ]
        size = Block(signature.saved).size
        row = (
            [like.new_empty(found.front_slots, dtype=torch.float32)]
            if any(_is_amax(n, found.front) for n in signature.outputs)
            else []
        )
        return [*made, *row, *([like.new_empty(size, dtype=torch.uint8)] if signature.saved else [])]

    @custom_op(f"fp8kit::{name}_backward", mutates_args=())
    def backward(
        kept: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        late: Sequence[Tensor],
        shapes: Sequence[int],
        kinds: str,
        there: str,
        call: str,
        needs: str,
    ) -> list[Tensor]:
        found, wanted = call_by(call), _needs(needs)
        sizes, dtypes = _layout(shapes, kinds)
        ready = found.ready_for(sizes, dtypes, wanted, cotangents[0].device)
        given = iter(cotangents)
        arrived = [next(given) if mark == "1" else None for mark in there]
        inner, held = _tidy(kept[: len(ready.kept)]), list(kept[len(ready.kept) :])
        scales = scale_views(found.back, late[0], ready.place) if late else NOTHING
        grads, row = ready.backward(inner, held, arrived, scales, NOTHING)
        own = dict(zip(wanted, grads, strict=True))
        named = (own[n] for n in wanted if n in ready.signature.grads)
        return [*named, *([] if row is None else [row])]  # type: ignore[list-item]

    @backward.register_fake
    def _(
        kept: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        late: Sequence[Tensor],
        shapes: Sequence[int],
        kinds: str,
        there: str,
        call: str,
        needs: str,
    ) -> list[Tensor]:
        found, wanted = call_by(call), _needs(needs)
        sizes, dtypes = _layout(shapes, kinds)
        signature = found.infer(
            [(size, kind_of(dtype)) for size, dtype in zip(sizes, dtypes, strict=True)], wanted
        )
        like = cotangents[0]
        row = (
            [like.new_empty(found.back_slots, dtype=torch.float32)]
            if any(_is_amax(n, found.back) for n in signature.grads)
            else []
        )
        return [*(_blank(signature.grads[n], like) for n in wanted if n in signature.grads), *row]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        tensors, _, ctx.late, ctx.call, ctx.needs, ctx.recipe = inputs
        found = call_by(ctx.call)
        signature = _signature(found, tensors, ctx.needs)
        outputs = [n for n in signature.outputs if not _is_amax(n, found.front)]
        count = len(outputs) + len(signature.passes)
        kept = [
            tensors[found.names.index(n)] if n in found.names else output[outputs.index(n)]
            for n in signature.kept
            if n in found.names or n in outputs
        ]
        ctx.save_for_backward(*kept, *([output[-1]] if signature.saved else []))
        ctx.shapes = [n for t in tensors for n in t.shape]
        ctx.kinds = ",".join(f"{t.ndim}{str(t.dtype).removeprefix('torch.')}" for t in tensors)
        ctx.signature = signature
        ctx.mark_non_differentiable(*output[count:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grads: list[Tensor | None]) -> Any:
        found, wanted, signature = call_by(ctx.call), _needs(ctx.needs), ctx.signature
        count = len([n for n in signature.outputs if not _is_amax(n, found.front)]) + len(signature.passes)
        arrived = list(grads[:count])
        if arrived[0] is None:
            meta = next(iter(signature.outputs.values()))
            some = next((g for g in arrived if g is not None), ctx.saved_tensors[0])
            arrived[0] = some.new_zeros(meta.shape, dtype=dtype_of(meta.dtype))
        arrived = [None if g is None else g.contiguous() for g in arrived]
        there = "".join("0" if g is None else "1" for g in arrived)
        back: list[Tensor] = []
        if signature.grads:
            present = [g for g in arrived if g is not None]
            back = backward(
                list(ctx.saved_tensors),
                present,
                list(ctx.late),
                ctx.shapes,
                ctx.kinds,
                there,
                ctx.call,
                ctx.needs,
            )
        names = [n for n in wanted if n in signature.grads]
        own: dict[str, Tensor | None] = dict(zip(names, back, strict=False))
        if len(back) > len(names) and ctx.late:
            record_(ctx.late[1], back[-1], ctx.late[2], ctx.recipe, BACKWARD)
        passing = [*(n for n in signature.outputs if not _is_amax(n, found.front)), *signature.passes]
        own |= {n: arrived[passing.index(out)] for n, out in signature.grad_passes.items()}
        return [own.get(n) for n in found.names], None, [None] * len(ctx.late), None, None, None

    forward.register_autograd(differentiate, setup_context=setup)
    return forward, backward


def _is_amax(name: str, slots: Any) -> bool:
    return name.endswith("_amax") and name.removesuffix("_amax") in slots


def _layout(shapes: Sequence[int], kinds: str) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
    """Shapes and dtypes of the inputs, from all their extents and, for each, its number of dimensions and its
    dtype."""
    sizes, dtypes, at = [], [], 0
    for kind in kinds.split(","):
        ndim = int(kind[0])
        sizes.append(tuple(shapes[at : at + ndim]))
        dtypes.append(getattr(torch, kind[1:]))
        at += ndim
    return sizes, dtypes


@custom_op("fp8kit::record_", mutates_args=("history",), tags=(torch.Tag.cudagraph_unsafe,))
def record_(history: Tensor, amaxes: Tensor, handle: Tensor, recipe: str, when: int) -> None:
    """history[0] = max(history[0], amaxes), NaN ignored; and the state ``handle`` is to be updated, see
    ``FORWARD`` and ``BACKWARD``.

    It runs on the host too, so that a captured graph is divided there.

    ``history``: float32 (H, n); ``amaxes``: float32 (n,); ``handle``: int64 () on the CPU; ``recipe``: text,
    read for BACKWARD.
    """
    torch.fmax(history[0], amaxes, out=history[0])
    if when == NEITHER:
        return
    own = states.named(int(handle))
    if own is None:
        raise ArgumentError("record_", "handle", int(handle), "a state of a module that is alive")
    if when == BACKWARD:
        states.finish_backward(decode(recipe), own)
        return
    scope = current()
    if scope is not None:
        touch_forward(own, scope.recipe, True)


@record_.register_fake
def _(history: Tensor, amaxes: Tensor, handle: Tensor, recipe: str, when: int) -> None:
    return None


class _Parts(NamedTuple):
    """A state by its tensors, as ``fp8kit.scaling.update`` takes it."""

    views: dict[str, ArrayView]
    device: Device
    amax_history: Tensor
    group: None = None


@custom_op("fp8kit::update_", mutates_args=("scales", "inverses", "histories"))
def update_(
    scales: Sequence[Tensor],
    inverses: Sequence[Tensor],
    histories: Sequence[Tensor],
    recipe: str,
    forward: bool,
) -> None:
    """Delayed scaling's update (``fp8kit.scaling.update``) of states by their tensors, by the
    ``AmaxHistory`` of that text."""
    own = []
    for parts in zip(scales, inverses, histories, strict=True):
        views = dict(zip(states.FIELDS, map(as_view, parts), strict=True))
        own.append(_Parts(views, views["scale"].device, parts[2]))
    states.update(decode(recipe), own, forward)


@update_.register_fake
def _(
    scales: Sequence[Tensor],
    inverses: Sequence[Tensor],
    histories: Sequence[Tensor],
    recipe: str,
    forward: bool,
) -> None:
    return None


MUTATING = ("cached_attention",)  # change an input and have no gradient: ``kv_cache``
OPS, BACKWARD_OPS = {}, {}
for _name in OPERATIONS:
    if _name not in MUTATING:
        OPS[_name], BACKWARD_OPS[_name] = make(_name)
