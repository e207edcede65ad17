"""Every operation as torch ops, ``torch.ops.fp8kit.NAME``, and ``trace``, which calls them within
``torch.compile``.

One factory makes them of what an operation declares, also those of operations that are registered later. What
Dynamo sees is functional and differentiable. What the compiled graph calls has no autograd, which would cost
each call some Python of torch's, and fills tensors that the graph allocates: ``NAME_forward`` and
``NAME_backward``, which record delayed scaling's amaxes too. What is static about a call travels as one text
that any process can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.autocast import current, touch_forward
from fp8kit.backends import dispatch
from fp8kit.backends.policy import (
    SelectionPolicy,
    get_policy,
    policy_from_text,
    process_policy,
    traced_policy,
)
from fp8kit.errors import ArgumentError, Fp8kitError, UnsupportedError
from fp8kit.execution.codec import decode, encode
from fp8kit.execution.memory import Layout
from fp8kit.execution.refusals import signature_of, want_spec
from fp8kit.formats import float32
from fp8kit.lru import memoized
from fp8kit.ops.registry import OPERATIONS, each_operation
from fp8kit.quantization import AmaxHistory
from fp8kit.scaling import FORWARD_SLOTS, Placed, backward_slots, forward_slots, placed
from fp8kit.spec import Meta, Operation, Signature
from fp8kit_torch import state as states
from fp8kit_torch import torch_compat
from fp8kit_torch.arguments import not_compiled
from fp8kit_torch.bound import TensorMeta, TorchOp, addresses, as_the_user_calls_it, bind
from fp8kit_torch.constants import constant_result, exporting, onnx_mode
from fp8kit_torch.memory import place_of
from fp8kit_torch.once import once
from fp8kit_torch.state import NO_STATE, ScalingState, StateBinding, slot_addresses
from fp8kit_torch.torch_compat import below_autograd, library_of_op
from fp8kit_torch.views import as_view, dtype_of, kind_of

# when a state that recorded amaxes is updated; NEITHER: the graph does it itself
FORWARD, BACKWARD, NEITHER = 1, 2, 0
OPS: dict[str, TorchOps] = {}  # by the operation's name


# --- calls as text ------------------------------------------------------------------------------------------


class StaticCall:
    """What is static about a call in a compiled graph, from its text.

    ``names``: of the input tensors, in order. ``gemms``: prefixes of the GEMMs whose scales come from a
    state, in the order of its slots; none without. ``policy``: kernels are chosen by it: a graph keeps that
    of its forward pass, because its backward pass may run on another thread. ``needs``: inputs whose gradient
    is wanted. ``rule``: by which the states are updated, None without; ``when``, for the forward state. The
    slots of the first GEMM are number ``gemm`` of the state. ``count``: of states in each direction, among
    which the GEMMs are divided, in order and in equal parts.
    """

    def __init__(self, text: str) -> None:
        name, self.spec, self.names, gemms, policy, self.needs, rule, self.when, gemm, count = decode(text)
        self.operation: Operation = OPERATIONS[name]
        self.policy = policy_from_text(policy)
        start, own = FORWARD_SLOTS * gemm, len(gemms) // count
        parts = [gemms[i * own : (i + 1) * own] for i in range(count)]
        self.count = count
        self.forward = [{name: start + at for name, at in forward_slots(part).items()} for part in parts]
        self.backward = [backward_slots(part) for part in parts]
        self.rule = _rule(rule) if rule else None
        self.scales = tuple(f"{operand}_scale" for part in self.forward for operand in part)
        self._bound: dict[Any, TorchOp] = {}  # by what tells the tensors apart
        self._bindings: dict[Any, StateBinding] = {}  # by where the state lies

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
        kernels = dispatch.kernels(place_of(device), self.policy)  # backward has another thread's in force
        found = self._bound.get(key)
        if found is None or found.kernels is not kernels:
            if len(self._bound) >= _SHAPES:
                self._bound.clear()
            found = bind(self.operation, self.spec, self.needs, self.names, kinds(), self.scales, kernels)
            self._bound[key] = found
        return found

    def binding(self, scales: Sequence[Tensor], histories: Sequence[Tensor], backward: bool) -> StateBinding:
        """The operation's binding to its forward or backward states: their scales, and the histories whose
        rows 0 take the amaxes, none where they go nowhere."""
        key = (*map(Tensor.data_ptr, scales), *map(Tensor.data_ptr, histories), backward)
        found = self._bindings.get(key)
        if found is None:
            slots = self.backward if backward else self.forward
            rows: dict[str, int] = {}
            amaxes: dict[str, int] = {}
            for part, scale in zip(slots, scales, strict=True):
                rows |= slot_addresses(part, scale, "scale")
            for part, history in zip(slots, histories, strict=False):
                amaxes |= slot_addresses(part, history, "amax")
            found = StateBinding({}, {}, rows, amaxes) if backward else StateBinding(rows, amaxes)
            if len(self._bindings) >= _STATES:
                self._bindings.clear()
            self._bindings[key] = found
        return found


_SHAPES, _STATES = 64, 1024  # bound operations, and bindings, that a call keeps
_kind = attrgetter("shape", "dtype", "device")
call_by = memoized("torch: calls of compiled models")(StaticCall)


def text_of(
    name: str,
    spec: Any,
    names: tuple[str, ...],
    gemms: tuple[str, ...] = (),
    policy: str | None = None,
    needs: tuple[str, ...] = (),
    rule: str = "",
    when: int = NEITHER,
    gemm: int = 0,
    count: int = 1,
) -> str:
    """The text of a call, see ``StaticCall``; ``policy``, ``rule``: texts; None for the policy in force."""
    policy = get_policy().text if policy is None else policy
    return encode((name, spec, names, gemms, policy, needs, rule, when, gemm, count))


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


class TorchOps(NamedTuple):
    """An operation's torch ops.

    ``call``: functional and differentiable, what an exported program has. ``traced``: the same for a graph
    that is compiled, which has the others instead. ``forward``, ``backward``: fill tensors that the graph
    has allocated. ``recorded``: these two where they also record amaxes of delayed scaling.
    """

    call: Any
    traced: Any
    forward: Any
    backward: Any
    recorded: tuple[Any, Any]


def _contiguous(tensors: Any) -> Any:
    """The tensors of a list, contiguous; the list itself where they all are."""
    return tensors if all(map(Tensor.is_contiguous, tensors)) else [t.contiguous() for t in tensors]


def _arrived(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Cotangents, contiguous."""
    return [g if g is None or g.is_contiguous() else g.contiguous() for g in grads]


def _blank(metas: Iterable[Meta], like: Tensor) -> list[Tensor]:
    return [like.new_empty(meta.shape, dtype=dtype_of(meta.dtype)) for meta in metas]


def _outputs(signature: Signature) -> dict[str, Meta]:
    return {name: meta for name, meta in signature.outputs.items() if not meta.zero}


def op_of(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None,
    mutates: tuple[str, ...] = (),
    tags: tuple[Any, ...] = (),
    key: str = "CompositeExplicitAutograd",
    autograd: Callable[..., Any] | None = None,
) -> Any:
    """``torch.ops.fp8kit.NAME``, which ``function`` computes on every device; ``name`` may have an overload
    behind a dot. No ``fake``, with the key CompositeImplicitAutograd: a graph has what ``function`` calls.
    ``autograd``: what is called before, with the keys that are left.

    torch's ``custom_op`` makes the same, and looks at every call whether a result shares memory with an
    argument, which takes longer than to launch a product. Ours never do: ``opcheck`` tests it.
    """
    library = library_of_op("fp8kit", name)
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    library.impl(name, function, key)
    if autograd is not None:
        library.impl(name, autograd, "Autograd", with_keyset=True)
    if fake is not None:
        torch.library.register_fake(f"fp8kit::{name}", fake, lib=library)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.fp8kit, packet), overload or "default")


def _nothing(*given: Any) -> None:
    """The fake of an op that gives nothing."""


def _forward(filled: Sequence[Tensor], inputs: Sequence[Tensor], state: Sequence[Tensor], call: str) -> None:
    """Fill outputs and the saved block (where there is one). ``inputs``: by the call's names; ``state``:
    delayed scaling's scales and the states' handles, or the scales alone, or nothing. With handles the last
    of ``filled`` are the histories, whose rows 0 take the amaxes."""
    found, tensors = call_by(call), _contiguous(inputs)
    assert all(map(Tensor.is_contiguous, filled))  # as they were allocated
    op = found.bind(tensors)
    if not state:
        op.call(addresses(op, tensors)[1], NO_STATE, filled)
        return
    count = found.count
    recorded = len(state) > count
    if recorded and found.when == NEITHER and torch_compat.current_backward() != -1:
        # by scales that the graph has updated meanwhile, which autograd's count of writes does not show
        got = "a forward pass that backward computes again"
        wanted = "what forward kept: torch._functorch.config.activation_memory_budget = 1"
        raise UnsupportedError(found.operation.name, "delayed scaling", got, wanted)
    binding = found.binding(state[:count], filled[-count:] if recorded else (), False)
    op.call(addresses(op, tensors)[1], binding, filled)
    if recorded:
        for handle in state[count:]:
            note(handle, found.rule, found.when)


def _backward(
    filled: Sequence[Tensor],
    kept: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    state: Sequence[Tensor],
    shapes: Sequence[int],
    dtypes: str,
    call: str,
) -> None:
    """Fill the gradients of the call's ``needs`` that are computed; ``state`` as in ``_forward``."""
    found, first = call_by(call), cotangents[0]
    assert first is not None  # it always arrives
    assert all(map(Tensor.is_contiguous, filled))
    op = found.bind_shapes(shapes, dtypes, first.device)
    binding = NO_STATE
    if state:
        for handle in state[found.count :]:  # before what may fail, so that the pass drops what it recorded
            note(handle, found.rule, BACKWARD)
        binding = found.binding(state[: found.count], filled[-found.count :], True)
    count = len(op.kept_at)
    into = dict(zip(op.grads, filled, strict=False))
    op.call_backward(_contiguous(kept[:count]), list(kept[count:]), _arrived(cotangents), binding, into)


def _filled(inputs: Sequence[Tensor], state: Sequence[Tensor], histories: Sequence[Tensor], call: str) -> Any:
    """Carry out a forward pass: (signature, results, saved block or nothing). ``state``: the forward scales,
    those of the backward states, the handles of the forward and those of the backward states, where amaxes go
    into ``histories``, of which the forward states' come first; or the forward scales."""
    found = call_by(call)
    count = found.count
    if onnx_mode.on:
        onnx_mode.check(found.spec)
    signature, like, ops = found.infer(inputs), inputs[0], OPS[found.operation.name]
    outputs = _blank(_outputs(signature).values(), like)
    saved = []
    if signature.saved:
        saved = [like.new_empty(Layout(signature.saved).nbytes, dtype=torch.uint8)]
    if not histories:
        ops.forward([*outputs, *saved], inputs, state[:count], call)
    else:
        own = [*state[:count], *state[2 * count : 3 * count]]
        ops.recorded[0]([*outputs, *saved, *histories[:count]], inputs, own, call)
    sources = [inputs[found.names.index(source)] for source in signature.passes.values()]
    return signature, [*outputs, *[t.clone(memory_format=torch.contiguous_format) for t in sources]], saved


class _Traced(torch.autograd.Function):
    """The gradient of an op, for what traces it: the graph has ``forward``'s and ``backward``'s ops."""

    @staticmethod
    def forward(
        ctx: Any, call: str, state: list[Tensor], histories: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        signature, results, saved = _filled(inputs, state, histories, call)
        found = call_by(call)
        count = found.count
        names = (*_outputs(signature), *signature.passes)
        known = dict(zip(names, results, strict=True)) | dict(zip(found.names, inputs, strict=True))
        ctx.save_for_backward(*[known[name] for name in signature.kept if name in known], *saved)
        ctx.call, ctx.signature, ctx.names = call, signature, names
        # not the forward scales, which are others by then
        ctx.state, ctx.histories = [*state[count : 2 * count], *state[3 * count :]], histories[count:]
        ctx.shapes = [extent for t in inputs for extent in t.shape]
        ctx.dtypes = ",".join(f"{t.ndim}{str(t.dtype).removeprefix('torch.')}" for t in inputs)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found, signature, kept = call_by(ctx.call), ctx.signature, list(ctx.saved_tensors)
        arrived = _arrived(grads)
        if arrived[0] is None:
            meta = next(iter(_outputs(signature).values()))
            some = next((g for g in arrived if g is not None), kept[0])
            arrived[0] = some.new_zeros(meta.shape, dtype=dtype_of(meta.dtype))
        own: dict[str, Tensor | None] = {}
        if signature.grads:
            metas = {name: meta for name, meta in signature.grads.items() if name in found.names}
            made = _blank(metas.values(), arrived[0])
            ops, call = OPS[found.operation.name], (ctx.shapes, ctx.dtypes, ctx.call)
            if ctx.histories and len(metas) < len(signature.grads):
                ops.recorded[1]([*made, *ctx.histories], kept, arrived, ctx.state, *call)
            else:
                ops.backward(made, kept, arrived, [], *call)
            own.update(zip(metas, made, strict=True))
        own |= {n: arrived[ctx.names.index(out)] for n, out in signature.grad_passes.items()}
        return (None, None, None, *[own.get(n) for n in found.names])


def _traced(
    inputs: Sequence[Tensor], state: Sequence[Tensor], histories: Sequence[Tensor], call: str
) -> list[Tensor]:
    """Outputs, and copies of inputs that pass through. ``state``, see ``_filled``; ``histories``: of the
    forward and then the backward states, where amaxes are recorded."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return list(_Traced.apply(call, state, histories, *inputs))
    return _filled(inputs, state, histories, call)[1]  # type: ignore[no-any-return]


def _call(inputs: Sequence[Tensor], state: Sequence[Tensor], call: str) -> list[Tensor]:
    """``_traced`` without histories."""
    return _filled(inputs, state, (), call)[1]  # type: ignore[no-any-return]


def define(operation: Operation) -> None:
    """Make the torch ops of an operation; none for one that changes its inputs."""
    name = operation.name
    if operation.mutates or name in OPS:
        return

    def differentiable(
        keyset: Any, inputs: Sequence[Tensor], state: Sequence[Tensor], call: str
    ) -> list[Tensor]:
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
            return list(_Traced.apply(call, state, [], *inputs))
        return below_autograd(OPS[name].call, keyset, inputs, state, call)

    fills: dict[str, Any] = {"fake": _nothing, "mutates": ("filled",)}
    # what records runs on the host too, so that a captured graph is divided there
    records = {**fills, "tags": (torch.Tag.cudagraph_unsafe,)}
    OPS[name] = TorchOps(
        op_of(name, _call, _call, autograd=differentiable),
        op_of(f"{name}.traced", _traced, None, ("histories",), key="CompositeImplicitAutograd"),
        op_of(f"{name}_forward", _forward, **fills),
        op_of(f"{name}_backward", _backward, **fills),
        (
            op_of(f"{name}_forward.recorded", _forward, **records),
            op_of(f"{name}_backward.recorded", _backward, **records),
        ),
    )


def _parsed(shapes: Sequence[int], dtypes: str, device: torch.device) -> list[TensorMeta]:
    """What the inputs were, from all their extents and, for each, its number of dimensions and its dtype."""
    extents = iter(shapes)
    return [
        TensorMeta(tuple(islice(extents, int(dtype[0]))), getattr(torch, dtype[1:]), device)
        for dtype in dtypes.split(",")
    ]


# --- FP8 state ----------------------------------------------------------------------------------------------


def note(handle: Tensor, rule: _Rule | None, when: int) -> None:
    """Have the state of that handle, which recorded amaxes, updated by its ``rule``, see ``FORWARD`` and
    ``BACKWARD``."""
    if when == NEITHER:
        return
    assert rule is not None
    own = states.named(int(handle))
    if own is None:
        raise ArgumentError("record_", "handle", int(handle), "a state of a module that is alive")
    if when == BACKWARD:
        states.finish_backward(((rule.history, own, None),))
    elif current() is not None:
        touch_forward(own, rule, True)  # type: ignore[arg-type]


def _record(history: Tensor, amaxes: Tensor, handle: Tensor, recipe: str, when: int) -> None:
    row = history[0]
    torch.fmax(row, amaxes, out=row)
    note(handle, _rule(recipe) if recipe else None, when)


# record_(history, amaxes, handle, recipe, when): history[0] = max(history[0], amaxes), NaN ignored; and the
# state ``handle`` is to be updated, see ``FORWARD`` and ``BACKWARD``. It runs on the host too, so that a
# captured graph is divided there. ``history``: float32 (H, n); ``amaxes``: float32 (n,); ``handle``: int64 ()
# on the CPU; ``recipe``: text of an ``AmaxHistory``.
record_: Any = op_of("record_", _record, _nothing, ("history",), (torch.Tag.cudagraph_unsafe,))


class _Rule(NamedTuple):
    """What updates a state, as a recipe has it."""

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


update_: Any = op_of("update_", _update, _nothing, ("scales", "inverses", "histories"))
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
    of: Sequence[TracedState] = (),
    gemm: int = 0,
) -> dict[str, Tensor]:
    """The outputs by name of a call within ``torch.compile``; ``spec``: it, or its text. ``of``: the states
    whose GEMMs the call has, one after the other, under one recipe; ``gemm``: where their slots for
    this call begin."""
    name, names, tensors = operation.name, tuple(inputs), list(inputs.values())
    if operation.mutates:
        raise not_compiled(f"{name}, which changes its inputs,")
    text, refused = (spec, "") if isinstance(spec, str) else _spec_text(operation, spec)
    if refused:  # said here: Dynamo takes an error within a constant's making for one of its own
        raise ArgumentError(refused)
    needs: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        needs = tuple([n for n, t in zip(names, tensors, strict=True) if t.requires_grad])
    how: tuple[Any, ...] = ()
    if of:
        how = (of[0].recipe, of[0].when, gemm, len(of))
    gemms = tuple([prefix for own in of for prefix in own.gemms])
    call, outputs = described(name, text, names, gemms, policy_now().text, needs, *how)
    ops, scales = OPS[name], [own.forward.scale for own in of]
    if not of:
        made = ops.call(tensors, [], call) if exporting() else ops.traced(tensors, [], [], call)
    elif of[0].record:
        both = [own.forward for own in of] + [own.backward for own in of]
        own_state = [own.scale for own in both] + [own.handle for own in both]
        made = ops.traced(tensors, own_state, [own.amax_history for own in both], call)
    else:
        made = ops.traced(tensors, scales, [], call)
    return dict(zip(outputs, made[: len(outputs)], strict=True))
