"""Every operation as a pair of torch ops, ``torch.ops.fp8kit.NAME`` and ``NAME_backward``, and ``trace``,
which calls them within ``torch.compile``.

One factory makes them of what an operation declares, also those of operations that are registered later. The
fake implementation is ``infer``, the gradient ``backward``. Ops are functional; what changes FP8 state,
``record_`` and ``update_``, is separate, because torch refuses an autograd formula on an op that mutates.
What is static about a call travels as one text that any process can read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.arrays import Device
from fp8kit.autocast import current, touch_forward
from fp8kit.backends import dispatch
from fp8kit.backends.policy import (
    SelectionPolicy,
    get_policy,
    policy_context,
    policy_from_text,
    process_policy,
    traced_policy,
)
from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.execution.codec import decode, encode
from fp8kit.execution.memory import Layout
from fp8kit.execution.refusals import signature_of, want_spec
from fp8kit.formats import float32
from fp8kit.lru import memoized
from fp8kit.ops.registry import OPERATIONS, each_operation
from fp8kit.quantization import AmaxHistory
from fp8kit.scaling import BACKWARD_SLOTS, FORWARD_SLOTS, Placed, backward_slots, forward_slots, placed
from fp8kit.spec import Meta, Operation, Signature
from fp8kit_torch import state as states
from fp8kit_torch.arguments import not_compiled
from fp8kit_torch.bound import TensorMeta, TorchOp, addresses, as_the_user_calls_it, bind
from fp8kit_torch.constants import constant_result, onnx_mode
from fp8kit_torch.memory import place_of
from fp8kit_torch.once import once
from fp8kit_torch.state import NO_STATE, ScalingState, StateBinding, slot_addresses
from fp8kit_torch.torch_compat import library_of_op
from fp8kit_torch.views import as_view, dtype_of, kind_of

# when a state that recorded amaxes is updated; NEITHER: the graph does it itself
FORWARD, BACKWARD, NEITHER = 1, 2, 0
OPS: dict[str, tuple[Any, Any]] = {}  # by the operation's name: the forward and the backward op


# --- calls as text ------------------------------------------------------------------------------------------


class StaticCall:
    """What is static about a call in a compiled graph, from its text.

    ``names``: of the input tensors, in order. ``gemms``: prefixes of the GEMMs whose scales come from a
    state, in the order of its slots; none without. ``policy``: kernels are chosen by it: a graph keeps that
    of its forward pass, because its backward pass may run on another thread. ``needs``: inputs whose gradient
    is wanted. ``history``: text of the backward state's ``AmaxHistory``, "" without.
    """

    def __init__(self, text: str) -> None:
        name, self.spec, self.names, gemms, policy, self.needs, self.history = decode(text)
        self.operation: Operation = OPERATIONS[name]
        self.policy = policy_from_text(policy)
        self.forward, self.backward = forward_slots(gemms), backward_slots(gemms)
        self.forward_count, self.backward_count = FORWARD_SLOTS * len(gemms), BACKWARD_SLOTS * len(gemms)
        self.scales = tuple(f"{operand}_scale" for operand in self.forward)
        self._bound: dict[Any, TorchOp] = {}  # by what tells the tensors apart

    def infer(self, tensors: Sequence[Tensor | TensorMeta]) -> Signature:
        """The operation's own ``infer`` for tensors like these, whose shapes may have symbols."""
        kinds = [*map(_kind, tensors)]
        metas = {
            name: Meta(tuple(shape), kind_of(dtype))
            for name, (shape, dtype, _) in zip(self.names, kinds, strict=True)
        }
        metas |= dict.fromkeys(self.scales, Meta((1,), float32))
        try:
            return signature_of(self.operation, self.spec, metas, frozenset(self.needs))
        except Fp8kitError as error:
            raise as_the_user_calls_it(error, self.operation, self.names, kinds) from None

    def bind(self, tensors: Sequence[Tensor]) -> TorchOp:
        """The bound operation for these tensors."""
        kinds = tuple(map(_kind, tensors))
        return self._bind(kinds, kinds[0][2], lambda: kinds)

    def bind_shapes(self, shapes: Sequence[int], dtypes: str, device: torch.device) -> TorchOp:
        """The bound operation for tensors as ``_parsed`` takes them."""
        return self._bind((*shapes, dtypes, device), device, lambda: _parsed(shapes, dtypes, device))

    def _bind(self, key: Any, device: torch.device, kinds: Callable[[], Sequence[Any]]) -> TorchOp:
        """Looked up here first: a compiled model calls with the same few shapes, and to bind takes as long as
        to launch."""
        kernels = self._kernels(place_of(device))
        found = self._bound.get(key)
        if found is None or found.kernels is not kernels:
            if len(self._bound) >= _SHAPES:
                self._bound.clear()
            found = bind(self.operation, self.spec, self.needs, self.names, kinds(), self.scales, kernels)
            self._bound[key] = found
        return found

    def _kernels(self, place: Device) -> Any:
        """The kernels of the call's own policy: backward has another thread's in force."""
        if get_policy() is self.policy:
            return dispatch.kernels(place)
        with policy_context(self.policy):
            return dispatch.kernels(place)


_SHAPES = 64  # bound operations that a call keeps
_kind = attrgetter("shape", "dtype", "device")
call_by = memoized("torch: calls of compiled models")(StaticCall)


def text_of(
    name: str,
    spec: Any,
    names: tuple[str, ...],
    gemms: tuple[str, ...] = (),
    policy: str | None = None,
    needs: tuple[str, ...] = (),
    history: str = "",
) -> str:
    """The text of a call, see ``StaticCall``; ``policy``: its text, None for the one in force."""
    policy = get_policy().text if policy is None else policy
    return encode((name, spec, names, gemms, policy, needs, history))


@constant_result
def described(name: str, spec: str, *rest: Any) -> tuple[str, tuple[str, ...]]:
    """Within ``torch.compile``: text of a call whose spec is given as a text, and names of its outputs.
    ``rest``: as ``text_of`` takes it."""
    found = decode(spec)
    return text_of(name, found, *rest), OPERATIONS[name].outputs(found)


@torch.compiler.assume_constant_result
def _spec_text(operation: Operation, spec: Any) -> tuple[str, str]:
    """(text of a spec, ""), or ("", why this call cannot be compiled)."""
    try:
        want_spec(operation, spec)
        if operation.name not in OPS:
            how = f"fk.register_operation(operation, {type(spec).__name__})"
            raise ArgumentError(f"{operation.name}: not registered, which torch.compile wants: {how}")
        return encode(spec), ""
    except Fp8kitError as error:
        return "", str(error)


def policy_now() -> SelectionPolicy:
    """The policy in force, also within ``torch.compile``, which guards it: another one compiles anew."""
    if not torch.compiler.is_compiling():
        return get_policy()
    _read_environment()
    policy = traced_policy()
    assert policy is not None  # it has been asked for
    return policy


@torch.compiler.assume_constant_result
def _read_environment() -> bool:
    """The environment is read for the process's policy, if nobody has asked yet: a function that calls no
    module may be compiled first. Before Dynamo reads it, which guards what it finds."""
    process_policy()
    return True


# --- the factory --------------------------------------------------------------------------------------------


def _contiguous(tensors: Sequence[Any]) -> list[Any]:
    return [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]


def _blank(metas: Mapping[str, Meta], like: Tensor) -> list[Tensor]:
    return [like.new_empty(meta.shape, dtype=dtype_of(meta.dtype)) for meta in metas.values()]


def _outputs(signature: Signature) -> dict[str, Meta]:
    return {name: meta for name, meta in signature.outputs.items() if not meta.zero}


def _slots(slots: Mapping[str, int], scale: Tensor, row: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Addresses of the operands' scales and amaxes."""
    return slot_addresses(slots, scale, "scale"), slot_addresses(slots, row, "amax")


def op_of(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    mutates: tuple[str, ...] = (),
    tags: tuple[Any, ...] = (),
) -> Any:
    """``torch.ops.fp8kit.NAME``, which ``function`` computes on every device. ``gradient``: autograd's
    formula, and what prepares its context.

    torch's ``custom_op`` makes the same, and looks at every call whether a result shares memory with an
    argument, which takes longer than to launch a product. Ours never do: ``opcheck`` tests it.
    """
    library, full = library_of_op("fp8kit", name), f"fp8kit::{name}"
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    library.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
    torch.library.register_fake(full, fake, lib=library)
    if gradient is not None:
        torch.library.register_autograd(full, gradient[0], setup_context=gradient[1], lib=library)
    return getattr(torch.ops.fp8kit, name).default


def define(operation: Operation) -> None:
    """Make the torch ops of an operation; none for one that changes its inputs.

    Forward: ``inputs`` by the call's names; ``state``: the forward scale, and scale, history and handle of
    the backward state, or nothing; ``call``: its text. Returns outputs, copies of inputs that pass through,
    amaxes by the state's slots (where there is a state), and the saved block (where there is one).
    """
    name = operation.name
    if operation.mutates or name in OPS:
        return

    def forward(inputs: Sequence[Tensor], state: Sequence[Tensor], call: str) -> list[Tensor]:
        found, tensors = call_by(call), _contiguous(inputs)
        op = found.bind(tensors)
        rows, binding = [], NO_STATE
        if state:
            rows = [op.memory.zeros(found.forward_count)]
            binding = StateBinding(*_slots(found.forward, state[0], rows[0]))
        outputs, saved = op.call(addresses(op, tensors)[1], binding)
        return [*outputs, *[tensors[at].clone() for at in op.through], *rows, *saved]

    def fake_forward(inputs: Sequence[Tensor], state: Sequence[Tensor], call: str) -> list[Tensor]:
        found, like = call_by(call), inputs[0]
        if onnx_mode.on:
            onnx_mode.check(found.spec)
        signature = found.infer(inputs)
        sources = [inputs[found.names.index(source)] for source in signature.passes.values()]
        made = _blank(_outputs(signature), like)
        made += [torch.empty_like(t, memory_format=torch.contiguous_format) for t in sources]
        if state:
            made.append(like.new_empty(found.forward_count, dtype=torch.float32))
        if signature.saved:
            made.append(like.new_empty(Layout(signature.saved).nbytes, dtype=torch.uint8))
        return made

    def backward(
        kept: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        state: Sequence[Tensor],
        shapes: Sequence[int],
        dtypes: str,
        call: str,
    ) -> list[Tensor]:
        found, first = call_by(call), cotangents[0]
        assert first is not None  # it always arrives
        op = found.bind_shapes(shapes, dtypes, first.device)
        binding, row = NO_STATE, op.memory.zeros(found.backward_count)
        if state:
            binding = StateBinding({}, {}, *_slots(found.backward, state[0], row))
        held, saved = _contiguous(kept[: len(op.kept)]), list(kept[len(op.kept) :])
        made = op.call_backward(held, saved, _contiguous(cotangents), binding)
        own = [g for n, g in zip(found.needs, made, strict=True) if n in op.grads and g is not None]
        return [*own, row] if state and op.grad_amaxes else own

    def fake_backward(
        kept: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        state: Sequence[Tensor],
        shapes: Sequence[int],
        dtypes: str,
        call: str,
    ) -> list[Tensor]:
        found, like = call_by(call), cotangents[0]
        assert like is not None  # the first one always arrives
        grads = found.infer(_parsed(shapes, dtypes, like.device)).grads
        made = _blank({name: grads[name] for name in found.needs if name in grads}, like)
        if state and any(name not in found.names for name in grads):
            made.append(like.new_empty(found.backward_count, dtype=torch.float32))
        return made

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        tensors, state, ctx.call = inputs
        ctx.state = list(state[1:])  # not the forward scale, which is another one by then
        found = call_by(ctx.call)
        ctx.signature = found.infer(tensors)
        outputs = list(_outputs(ctx.signature))
        known = dict(zip(outputs, output, strict=False)) | dict(zip(found.names, tensors, strict=True))
        kept = [known[name] for name in ctx.signature.kept if name in known]
        ctx.save_for_backward(*kept, *output[-1:] if ctx.signature.saved else ())
        ctx.shapes = [extent for t in tensors for extent in t.shape]
        ctx.dtypes = ",".join(f"{t.ndim}{str(t.dtype).removeprefix('torch.')}" for t in tensors)
        ctx.mark_non_differentiable(*output[len(outputs) + len(ctx.signature.passes) :])
        ctx.set_materialize_grads(False)

    @once
    def gradients(ctx: Any, *grads: Tensor | None) -> list[Tensor | None]:
        found, signature = call_by(ctx.call), ctx.signature
        outputs = _outputs(signature)
        results = [*outputs, *signature.passes]
        arrived = _contiguous(grads[: len(results)])
        if arrived[0] is None:
            meta = next(iter(outputs.values()))
            some = next((g for g in arrived if g is not None), ctx.saved_tensors[0])
            arrived[0] = some.new_zeros(meta.shape, dtype=dtype_of(meta.dtype))
        made: list[Tensor] = []
        if signature.grads:
            kept = list(ctx.saved_tensors)
            made = backward_op(kept, arrived, ctx.state, ctx.shapes, ctx.dtypes, ctx.call)
        names = [n for n in found.needs if n in signature.grads]
        own: dict[str, Tensor | None] = dict(zip(names, made, strict=False))
        if len(made) > len(names):
            record_(ctx.state[1], made[-1], ctx.state[2], found.history, BACKWARD)
        own |= {n: arrived[results.index(out)] for n, out in signature.grad_passes.items()}
        return [own.get(n) for n in found.names]

    def differentiate(ctx: Any, grads: list[Tensor | None]) -> Any:
        none = [None] * (1 + len(ctx.state)) if ctx.state else []
        return [*gradients(ctx, *grads)], none, None

    backward_op = op_of(f"{name}_backward", backward, fake_backward)
    forward_op = op_of(name, forward, fake_forward, (differentiate, setup))
    OPS[name] = forward_op, backward_op


def _parsed(shapes: Sequence[int], dtypes: str, device: torch.device) -> list[TensorMeta]:
    """What the inputs were, from all their extents and, for each, its number of dimensions and its dtype."""
    extents = iter(shapes)
    return [
        TensorMeta(tuple(islice(extents, int(dtype[0]))), getattr(torch, dtype[1:]), device)
        for dtype in dtypes.split(",")
    ]


# --- FP8 state ----------------------------------------------------------------------------------------------


def _record(history: Tensor, amaxes: Tensor, handle: Tensor, recipe: str, when: int) -> None:
    row = history[0]
    torch.fmax(row, amaxes, out=row)
    if when == NEITHER:
        return
    own = states.named(int(handle))
    if own is None:
        raise ArgumentError("record_", "handle", int(handle), "a state of a module that is alive")
    if when == BACKWARD:
        states.finish_backward([(decode(recipe), own, None)])
    elif (scope := current()) is not None:
        rule: Any = _rule(recipe)
        touch_forward(own, scope.recipe if scope.recipe.history == rule.history else rule, True)


# record_(history, amaxes, handle, recipe, when): history[0] = max(history[0], amaxes), NaN ignored; and the
# state ``handle`` is to be updated, see ``FORWARD`` and ``BACKWARD``. It runs on the host too, so that a
# captured graph is divided there. ``history``: float32 (H, n); ``amaxes``: float32 (n,); ``handle``: int64 ()
# on the CPU; ``recipe``: text of an ``AmaxHistory``.
record_: Any = op_of(
    "record_", _record, lambda *given: None, mutates=("history",), tags=(torch.Tag.cudagraph_unsafe,)
)


class _Rule(NamedTuple):
    """What updates the state of a layer whose recipe is not that of the autocast (``Recipe.for_layer``)."""

    history: AmaxHistory


@lru_cache(maxsize=256)
def _rule(history: str) -> _Rule:
    """The same object for the same text of an ``AmaxHistory``."""
    return _Rule(decode(history))


class _Parts(NamedTuple):
    """A state by its tensors, as ``fp8kit.scaling.update`` takes it."""

    placed: Placed
    amax_history: Tensor
    group: None = None


def _update(
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
        own.append(_Parts(placed(*map(as_view, parts)), parts[2]))
    states.update(decode(recipe), own, forward)


update_: Any = op_of("update_", _update, lambda *given: None, mutates=("scales", "inverses", "histories"))
each_operation(define)


# --- within torch.compile -----------------------------------------------------------------------------------


class TracedState(NamedTuple):
    """How a layer's operation uses its FP8 state in a compiled graph."""

    forward: ScalingState
    backward: ScalingState
    gemms: tuple[str, ...]
    recipe: str  # text
    record: bool
    when: int  # see ``record_``

    def of_gemm(self, i: int) -> TracedState:
        """That of the cast of one GEMM's weight."""
        return self._replace(gemms=self.gemms[i : i + 1])


def trace(
    operation: Operation,
    spec: Any,
    inputs: Mapping[str, Tensor],
    state: TracedState | None = None,
    gemm: int = 0,
) -> dict[str, Tensor]:
    """The outputs by name of a call within ``torch.compile``; ``spec``: it, or its text. ``gemm``: where the
    ``state``'s slots for this call begin."""
    name, names, tensors = operation.name, tuple(inputs), list(inputs.values())
    if operation.mutates:
        raise not_compiled(f"{name}, which changes its inputs,")
    text, refused = (spec, "") if isinstance(spec, str) else _spec_text(operation, spec)
    if refused:  # said here: Dynamo takes an error within a constant's making for one of its own
        raise ArgumentError(refused)
    gemms, history_text = ((), "") if state is None else (state.gemms, state.recipe)
    needs: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        needs = tuple([n for n, t in zip(names, tensors, strict=True) if t.requires_grad])
    call, outputs = described(name, text, names, gemms, policy_now().text, needs, history_text)
    op = OPS[name][0]
    if state is None:
        made = op(tensors, [], call)
    else:
        scale, late, history = state.forward.scale, state.backward, state.forward.amax_history
        first, count = FORWARD_SLOTS * gemm, FORWARD_SLOTS * len(gemms)
        own = [scale[first : first + count], late.scale, late.amax_history, late.handle]
        made = op(tensors, own, call)
        if state.record:
            amaxes = made[len(outputs)]
            if count < history.shape[1]:
                amaxes = torch.nn.functional.pad(amaxes, (first, history.shape[1] - first - count))
            record_(history, amaxes, state.forward.handle, state.recipe, state.when)
    return dict(zip(outputs, made[: len(outputs)], strict=True))
