"""Calls of operations on torch tensors: plans found by a cheap key, memory from torch's allocator, work on torch's stream.

A ``Call`` is what is static: an operation, its spec, the names of its inputs. A ``Ready`` is a call for certain shapes: its plan and where
everything lies. Both ways into an operation, the eager one and the ops that torch.compile sees, run through them: the same bits.

What forward saves for backward is one block of bytes, and, in an eager call that saves much, a tensor for each large buffer
(``fp8kit.scratch``), so that backward can give it back early. The amaxes of a layer's operands, forward or backward, are float32 slots in
the order of its ``ScalingState``: the state's own row, or one small tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.arrays import ArrayView, Device, Shape, contiguous_strides
from fp8kit.backends import dispatch
from fp8kit.backends.policy import SelectionPolicy, apart, get_policy, policy_context, policy_from_text, traced_policy
from fp8kit.errors import BackendError, FormatError, ShapeError, expected, renamed
from fp8kit.formats import DType, float32
from fp8kit.ops.linear import weight_cast
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.products import product_of
from fp8kit.ops.split_heads import split_heads
from fp8kit.replays import replays
from fp8kit.scaling import BACKWARD_SLOTS, FORWARD_SLOTS, backward_slots, forward_slots
from fp8kit.scratch import Buffers, Scratch, large
from fp8kit.spec import Meta, Signature
from fp8kit_torch.arguments import unlike_devices, unlike_dtypes, want_parameters
from fp8kit_torch.texts import OPERATIONS, decode, encode
from fp8kit_torch.views import dtype_of, kind_of

# an operation's input -> what errors call it: the argument of forward, or the parameter
_LAYERS = {"q": "query_layer", "k": "key_layer", "v": "value_layer", "kv": "kv_layer", "qkv": "qkv_layer", "bias": "core_attention_bias",
           "mask": "attention_mask"}
_PARAMETERS = {"x": "inp", "weight0": "weight", "bias0": "bias", "norm_weight": "layer_norm_weight", "norm_bias": "layer_norm_bias",
               "fc1_weight0": "fc1_weight", "fc1_bias0": "fc1_bias", "fc2_weight0": "fc2_weight", "fc2_bias0": "fc2_bias"}
_ARGUMENTS = {"attention": _LAYERS, "cached_attention": _LAYERS, "linear": _PARAMETERS, "norm_linear": _PARAMETERS,
              "norm_mlp": _PARAMETERS, "norm": {"x": "inp", "norm_weight": "weight", "norm_bias": "bias"},
              "cross_entropy": {"logits": "inp", "targets": "target"}}
_LAYERS_OWN = ("linear", "norm", "norm_linear", "norm_mlp")  # operations of x and a layer's parameters
_PARAMETER = re.compile(r"(weight|bias)\d*$")
_OUTPUTS = {"attention": ("o",), "cross_entropy": ("loss",)}  # of operations that have another than "y"
Views = dict[str, ArrayView]
Make = Callable[[Meta], ArrayView]


class Placed(dict[str, ArrayView]):
    """Scales or amaxes by name, and ``at``, where they lie."""

    __slots__ = ("at",)

    def __init__(self, views: Mapping[str, ArrayView]) -> None:
        super().__init__(views)
        self.at = tuple([view.ptr for view in views.values()])


NOTHING = Placed({})
_KINDS = ("cpu", "cuda")
_ALIGNMENT = 256  # bytes, of every buffer in a block
_PLAN_LIMIT = 1024  # shapes a call
_SCALAR = Meta((1,), float32)
_NOWHERE: Mapping[str, Tensor] = {}
_NEVER: Mapping[str, Meta] = {}


def _memory(nbytes: int, device: Device) -> tuple[int, Tensor]:
    memory = torch.empty(nbytes, dtype=torch.uint8, device=torch.device(device.kind, device.index))
    return memory.data_ptr(), memory


_SCRATCH = Scratch(_memory)


class Block:
    """Buffers that live and die together, laid out in one tensor of bytes. With ``make`` the large ones lie ``apart``, made by it."""

    __slots__ = ("apart", "make", "parts", "size")

    def __init__(self, metas: Mapping[str, Meta], make: Make | None = None) -> None:
        self.size: Any = 0
        self.parts: list[tuple[str, int, Shape, DType]] = []
        self.make, self.apart = make, {} if make is None else large(metas)
        for name, meta in metas.items():
            if name in self.apart:
                continue
            self.parts.append((name, self.size, meta.shape, meta.dtype))
            self.size += (math.prod(meta.shape) * meta.dtype.itemsize + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT

    def carve(self, memory: Tensor, device: Device) -> Views:
        """The buffers by name in ``memory``, uint8 (size,)."""
        return self._laid(memory.data_ptr(), memory, device)

    def opened(self, held: list[Tensor], device: Device) -> Views:
        """The buffers by name in what ``Ready.forward`` gave, and nowhere else: the list is empty then."""
        views = self.carve(held[0], device) if self.parts else {}
        if self.apart:
            own = zip(self.apart.items(), held[-len(self.apart) :], strict=True)
            views = Buffers(views | {name: view_of(tensor, meta, device) for (name, meta), tensor in own}, {}, self.make)
        held.clear()
        return views

    def kept_at(self, device: Device, stream: int) -> int:
        """Address of the thread's memory for these temporaries, 0 for none; -1 where they lie elsewhere at each call (see ``room``)."""
        if device.kind == "cpu" or torch.cuda.is_current_stream_capturing():
            return -1
        return _SCRATCH.room(self.size, device, stream).ptr if self.parts else 0

    def room(self, device: Device, where: torch.device, stream: int, kept: bool) -> Views:
        """Buffers for one operation's temporaries on ``stream``, not to be changed. ``kept``: those in the thread's ``fp8kit.scratch``; but
        fresh ones on the CPU, and while a graph is captured, which may be replayed beside what the thread does later."""
        if self.apart:
            return Buffers(self._room(device, where, stream, kept) if self.parts else {}, self.apart, self.make)
        return self._room(device, where, stream, kept) if self.parts else {}

    def _room(self, device: Device, where: torch.device, stream: int, kept: bool) -> Views:
        """The buffers that do not lie apart."""
        if not kept or device.kind == "cpu" or torch.cuda.is_current_stream_capturing():
            return self.carve(torch.empty(self.size, dtype=torch.uint8, device=where), device)
        room = _SCRATCH.room(self.size, device, stream)
        views: Views | None = room.carved.get(self)
        if views is None:
            views = self._laid(room.ptr, room.owner, device)
            room.keep(self, views)
        return views

    def _laid(self, start: int, owner: object, device: Device) -> Views:
        return {name: ArrayView(start + offset, shape, kind, device, owner) for name, offset, shape, kind in self.parts}


def view_of(tensor: Tensor, meta: Meta, device: Device) -> ArrayView:
    """A tensor as what ``meta`` says."""
    return ArrayView(tensor.data_ptr(), meta.shape, meta.dtype, device, tensor)


def maker(where: torch.device, device: Device) -> Make:
    """A function that allocates an array of a meta there."""
    return lambda meta: view_of(torch.empty(meta.shape, dtype=dtype_of(meta.dtype), device=where), meta, device)


class Stand(NamedTuple):
    """What stands for a tensor that is not there yet."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


class Call:
    """What is static about calling an operation.

    ``names``: of the input tensors, in order. ``gemms``: prefixes of its GEMMs, none for an operation without FP8. ``scaled``: whether the
    scales come from a ``ScalingState``. ``policy``: text of the policy to choose kernels by, "" for the one in force: a compiled graph
    keeps that of its forward pass, because its backward pass may run on another thread. ``text``: all this as a string (``texts``).
    """

    __slots__ = ("back", "back_slots", "front", "front_slots", "gemms", "names", "operation", "plans", "policy", "rehearsed", "scaled",
                 "spec", "text")

    def __init__(self, text: str) -> None:
        name, self.spec, self.names, self.gemms, self.scaled, policy = decode(text)
        self.policy = policy_from_text(policy) if policy else None
        self.text = text
        self.operation = OPERATIONS[name]
        self.front, self.back = forward_slots(self.gemms), backward_slots(self.gemms)
        self.front_slots, self.back_slots = FORWARD_SLOTS * len(self.gemms), BACKWARD_SLOTS * len(self.gemms)
        self.plans: dict[Any, Ready] = {}
        self.rehearsed: set[Any] = set()

    def metas(self, kinds: Sequence[tuple[Any, DType]]) -> dict[str, Meta | None]:
        """Inputs by name, from shapes and dtypes in order; the scales with them."""
        metas: dict[str, Meta | None] = {name: Meta(tuple(shape), kind) for name, (shape, kind) in zip(self.names, kinds, strict=True)}
        return metas | {f"{name}_scale": _SCALAR for name in self.front} if self.scaled else metas

    def infer(self, kinds: Sequence[tuple[Any, DType]], needs: Sequence[str]) -> Signature:
        """The operation's own ``infer``, whose refusals call the inputs as the user does."""
        with self._in_the_users_words(kinds):
            return self.operation.infer(self.spec, self.metas(kinds), frozenset(needs))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, amaxes aside; those that are an input come last."""
        if self.operation is weight_cast:
            metas = product_of(self.spec.product, 0, float32, False, False, False).weight_outputs()
            return tuple(name for name in metas if not name.endswith("_amax"))
        if self.operation.name in _OUTPUTS:
            return _OUTPUTS[self.operation.name]
        if self.operation is split_heads:
            return tuple(part for part, _ in self.spec.parts)
        further = {"normed": "return_norm", "residual": "residual"}
        return ("y", *(name for name, flag in further.items() if getattr(self.spec, flag, False)))

    def ready(self, tensors: Sequence[Tensor], needs: tuple[str, ...], alike: bool = False) -> Ready:
        """The plan for these tensors; made once for their shapes and dtypes and the policy in force. Raises what ``infer`` raises, and
        BackendError when tensors live on different devices."""
        policy, device = self.policy, tensors[0].device
        if device.type not in _KINDS:
            self._want_one_device(tensors)
        kernels = dispatch.kernels(_place(device)) if policy is None else self._kernels(_place(device))
        found = self.plans.get((needs, id(kernels), *[(t.shape, t.dtype, t.device) for t in tensors]))
        if found is None:
            if alike:
                want_alike(self.operation.name, dict(zip(self.names, tensors, strict=True)))
            self._want_one_device(tensors)
            found = self.ready_for([t.shape for t in tensors], [t.dtype for t in tensors], needs, device)
        return found

    def ready_for(self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], needs: tuple[str, ...], device: torch.device) -> Ready:
        """``ready`` for tensors of these shapes and dtypes on ``device``."""
        kernels = dispatch.kernels(_place(device)) if self.policy is None else self._kernels(_place(device))
        key = (needs, id(kernels), *[(shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)])
        found = self.plans.get(key)
        if found is None:
            kinds = [(tuple(shape), kind_of(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
            if len(self.plans) >= _PLAN_LIMIT:
                self.plans.clear()
            with self._in_the_users_words(kinds):
                found = self.plans[key] = Ready(self, kinds, needs, device, kernels)
        return found

    def rehearse(self, tensors: Sequence[Tensor | Stand], needs: tuple[str, ...] = ()) -> None:
        """Refuse what ``ready`` would refuse of these inputs' shapes, dtypes and devices, and make no plan: what a layer asks before its
        first operation about those that follow. What was found right is remembered."""
        self._want_one_device(tensors)
        key = (needs, *[(t.shape, t.dtype) for t in tensors])
        if key not in self.rehearsed:
            self.infer([(t.shape, kind_of(t.dtype)) for t in tensors], needs)
            if len(self.rehearsed) >= _PLAN_LIMIT:
                self.rehearsed.clear()
            self.rehearsed.add(key)

    def _want_one_device(self, tensors: Sequence[Tensor | Stand]) -> None:
        device, operation = tensors[0].device, self.operation.name
        if all(tensor.device == device for tensor in tensors):
            return
        first, *rest = (argument_of(operation, name, self.names) for name in self.names)
        if first == "inp" and operation in _LAYERS_OWN:
            raise unlike_devices(operation, {name: str(t.device) for name, t in zip(rest, tensors[1:], strict=True)}, str(device))
        name, other = next((name, t.device) for name, t in zip(rest, tensors[1:], strict=True) if t.device != device)
        raise BackendError(expected(operation, name, f"device {other}", f"device {device}, as {first}"))

    @contextmanager
    def _in_the_users_words(self, kinds: Sequence[tuple[Any, DType]]) -> Iterator[None]:
        """Within, refusals of ``infer`` call the inputs, be they there or missing, as the user does, and say of a parameter that has not
        the dtype of x what can be done."""
        try:
            yield
        except (ShapeError, FormatError) as error:
            _, argument, rest = (*str(error).split(": ", 2), "", "")[:3]
            if argument not in self.names and not rest.startswith("got None"):
                raise
            operation, dtypes = self.operation.name, {name: kind.name for name, (_, kind) in zip(self.names, kinds, strict=True)}
            own = {name: dtype for name, dtype in dtypes.items() if name != "x" and _PARAMETER.search(name)}
            if operation in _LAYERS_OWN and isinstance(error, FormatError) and own.get(argument, dtypes["x"]) != dtypes["x"]:
                named = {argument_of(operation, name, self.names): dtype for name, dtype in own.items()}
                raise unlike_dtypes(operation, named, dtypes["x"]) from None
            raise renamed(error, operation, argument_of(operation, argument, self.names)) from None

    def _kernels(self, place: Device) -> Any:
        """The kernels of the call's own policy. BackendError where that is not what the caller's task has in force."""
        policy = get_policy()
        assert self.policy is not None
        if policy is self.policy:
            return dispatch.kernels(place)
        if apart() and torch._C._current_graph_task_id() == -1:
            got = f"the policy {policy.text} of a block within an asyncio task (or of a context copied into this thread)"
            raise BackendError(expected(self.operation.name, "policy", got, "a block around the event loop: torch.compile reads no other"))
        with policy_context(self.policy):
            return dispatch.kernels(place)


def argument_of(operation: str, name: str, names: Sequence[str]) -> str:
    """What errors call an operation's input: a parameter in several segments keeps its number."""
    several = name.endswith("0") and f"{name[:-1]}1" in names
    return name if several else _ARGUMENTS.get(operation, {}).get(name, name)


def want_alike(operation: str, tensors: Mapping[str, Tensor]) -> None:
    """BackendError or FormatError where a layer's parameters are on another device or of another dtype than x."""
    names = tuple(tensors)
    want_parameters(operation, {argument_of(operation, name, names): tensors[name] for name in names if name != "x"}, tensors["x"], False)


@lru_cache(maxsize=4096)
def call_by(text: str) -> Call:
    """The call that a text describes; one object for one text."""
    return Call(text)


def call(name: str, spec: Any, names: tuple[str, ...], gemms: tuple[str, ...] = (), scaled: bool = False,
         policy: str = "") -> Call:
    """The call of the operation ``name``; one object for equal arguments."""
    return call_by(encode((name, spec, names, gemms, scaled, policy)))


def policy_now() -> SelectionPolicy:
    """The policy in force, also within ``torch.compile``, which guards it: another one compiles anew."""
    policy = traced_policy() if torch.compiler.is_compiling() else get_policy()
    assert policy is not None  # every module asks for it when it is made
    return policy


@lru_cache(maxsize=64)
def _place(device: torch.device) -> Device:
    if device.type not in _KINDS:
        raise FormatError(expected("fp8kit_torch", "tensor", f"device {device}", "cpu or cuda"))
    return Device(device.type, device.index or 0)


class _Out(NamedTuple):
    name: str
    shape: Shape
    strides: Shape
    dtype: torch.dtype
    kind: DType
    zero: bool


def _outs(metas: Mapping[str, Meta], slots: Mapping[str, int]) -> list[_Out]:
    """What is to be allocated; amaxes are not."""
    return [
        _Out(name, meta.shape, contiguous_strides(meta.shape), dtype_of(meta.dtype), meta.dtype, meta.zero)
        for name, meta in metas.items()
        if not (name.endswith("_amax") and name.removesuffix("_amax") in slots)
    ]


def amax_views(slots: Mapping[str, int], row: Tensor, device: Device) -> Placed:
    """A row of float32 slots as the amaxes of the operands."""
    start = row.data_ptr()
    return Placed({f"{name}_amax": ArrayView(start + 4 * slot, (1,), float32, device, row) for name, slot in slots.items()})


def scale_views(slots: Mapping[str, int], scale: Tensor, device: Device) -> Placed:
    """A state's scales as the operands' inputs."""
    start = scale.data_ptr()
    return Placed({f"{name}_scale": ArrayView(start + 4 * slot, (1,), float32, device, scale) for name, slot in slots.items()})


def want_fp8(operation: str, blocks: bool, device: torch.device) -> None:
    """BackendError where the tensor cores of a CUDA device do not multiply FP8, or not with the scales of blocks."""
    if device.type == "cuda":
        have, least = torch.cuda.get_device_capability(device), (9, 0) if blocks else (8, 9)
        if have < least:
            what = "FP8 with scales of blocks" if blocks else "FP8"
            wanted = f"{least[0]}.{least[1]} or higher for {what}, or autocast(enabled=False)"
            raise BackendError(expected(operation, "device", f"{device} of compute capability {have[0]}.{have[1]}", wanted))


class Ready:
    """A call for certain shapes, dtypes, wanted gradients (``needs``), device and policy."""

    def __init__(self, call: Call, kinds: list[tuple[Shape, DType]], needs: tuple[str, ...], device: torch.device, kernels: Any) -> None:
        self.operation, self.needs, self.device, self.place = call.operation, needs, device, _place(device)
        self.guarded = device.type == "cuda" and torch.cuda.device_count() > 1  # an only device is always the current one
        self.eager = not call.policy  # compiled functions may be captured, and then account for all memory that they find allocated
        if call.gemms:
            products = [value for value in vars(call.spec).values() if isinstance(value, ProductSpec)]
            want_fp8(self.operation.name, any(p.fp8 is not None and p.fp8.blocks for p in products), device)
        self.plan = plan = call.operation.plan(call.spec, call.metas(kinds), frozenset(needs), kernels)
        self.signature = signature = plan.signature
        self.inputs = [(name, *kind) for name, kind in zip(call.names, kinds, strict=True)]
        self.outputs, self.grads = _outs(signature.outputs, call.front), _outs(signature.grads, call.back)
        self.names = (*(out.name for out in self.outputs), *signature.passes)
        early = self.operation.early
        self.make = maker(device, self.place)
        make = self.make if early else None
        self.saved, self.saved_apart = Block(signature.saved), Block(signature.saved, make)  # the former for torch.compile's ops
        self.scratch, self.back_scratch = Block(plan.scratch, make), Block(plan.backward_scratch, make)
        self.grads_apart = large(signature.grads) if early else {}
        self.front = {name: slot for name, slot in call.front.items() if f"{name}_amax" in signature.outputs}
        self.back = {name: slot for name, slot in call.back.items() if f"{name}_amax" in signature.grads}
        self.front_slots, self.back_slots = call.front_slots, call.back_slots
        # what was done already; None where that is not recorded, as where buffers lie apart
        self.again = replays(kernels) if self.eager and not self.scratch.apart else None
        self.back_again = replays(kernels) if self.eager and not (self.grads_apart or self.back_scratch.apart) else None
        at = {name: i for i, name in enumerate(call.names)}
        self.wanted = [at[name] for name in needs]
        self.through = [at[name] for name in signature.passes.values()]
        made = {out.name: i for i, out in enumerate(self.outputs)}
        # (name, index, whether it is an output, shape, dtype) of what backward reads
        shapes = {name: (shape, kind) for name, shape, kind in self.inputs} | {out.name: (out.shape, out.kind) for out in self.outputs}
        self.kept = [(n, at[n] if n in at else made[n], n not in at, *shapes[n]) for n in signature.kept if n in at or n in made]
        # of each wanted gradient: its place among those that are made, or of the output whose cotangent it is
        own = {out.name: i for i, out in enumerate(self.grads)}
        passed = {name: i for i, name in enumerate(self.names)}
        self.answers = [(own.get(name), passed.get(signature.grad_passes.get(name, ""))) for name in needs]
        missing = [name for name in needs if name not in signature.grads and name not in signature.grad_passes]
        if missing:
            raise FormatError(expected(call.operation.name, missing[0], "a tensor that requires a gradient", "one that does not"))

    def stream(self) -> int:
        """Handle of torch's current stream."""
        return torch._C._cuda_getCurrentRawStream(self.place.index) if self.place.kind == "cuda" else 0

    def forward(
        self, tensors: Sequence[Tensor], scales: Placed, amaxes: Placed, apart: bool = False
    ) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        """(outputs, amaxes, what is saved). ``amaxes``: where they are max-accumulated; ``NOTHING`` makes a tensor of slots for them.
        ``apart``: large buffers among what is saved are tensors of their own; otherwise all is one tensor."""
        if self.guarded and torch.cuda.current_device() != self.place.index:
            with torch.cuda.device(self.device):
                return self._forward(tensors, scales, amaxes, apart)
        return self._forward(tensors, scales, amaxes, apart)

    def _forward(
        self, tensors: Sequence[Tensor], scales: Placed, amaxes: Placed, apart: bool
    ) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        device, row = self.device, None
        if not amaxes and self.front:
            row = torch.zeros(self.front_slots, dtype=torch.float32, device=device)
            amaxes = amax_views(self.front, row, self.place)
        outputs = self._made(self.outputs)
        block = self.saved_apart if apart else self.saved
        held = [torch.empty(block.size, dtype=torch.uint8, device=device)] if block.parts else []
        stream = self.stream()
        again = None if block.apart else self.again
        at = -1 if again is None else self.scratch.kept_at(self.place, stream)
        if at < 0:
            held += self._run_forward(tensors, scales, amaxes, outputs, block, held, stream)
            return outputs, row, held
        key = (stream, at, scales.at, amaxes.at, *[t.data_ptr() for t in (*tensors, *outputs, *held)])
        again.run(key, self._run_forward, tensors, scales, amaxes, outputs, block, held, stream)  # type: ignore[union-attr]
        return outputs, row, held

    def _run_forward(self, tensors: Sequence[Tensor], scales: Placed, amaxes: Placed, outputs: list[Tensor], block: Block,
                     held: list[Tensor], stream: int) -> list[Tensor]:
        """The operation's forward; gives what was saved apart."""
        place = self.place
        views: Any = dict(scales)
        for (name, shape, kind), tensor in zip(self.inputs, tensors, strict=True):
            views[name] = ArrayView(tensor.data_ptr() or self._nowhere(name, tensor), shape, kind, place, tensor)
        saved = block.carve(held[0], place) if held else {}
        if block.apart:
            saved = Buffers(saved, block.apart, self.make)
        scratch = self.scratch.room(place, self.device, stream, self.eager)
        self.operation.forward(self.plan, views, self._views(self.outputs, outputs, amaxes), saved, scratch, stream)
        return [saved[name].owner for name in block.apart]  # type: ignore[misc]

    def _nowhere(self, name: str, tensor: Tensor) -> int:
        """The address of a tensor that is not read: without elements, or one in FP8 whose codes come beside it. FormatError for one that
        stands for values that are elsewhere."""
        names = [own for own, _, _ in self.inputs]
        if tensor.numel() and not (hasattr(tensor, "held_in_fp8") and any(own.endswith("_q") for own in names)):
            argument = argument_of(self.operation.name, name, names)
            wanted = "a tensor with memory of its own: a DTensor's to_local(), a real one for a FakeTensor"
            raise FormatError(expected(self.operation.name, argument, f"a {type(tensor).__name__} without memory", wanted))
        return 0

    def backward(
        self, kept: Sequence[Tensor], held: list[Tensor], cotangents: Sequence[Tensor | None], scales: Placed, amaxes: Placed,
        into: Mapping[str, Tensor] = _NOWHERE, apart: bool = False,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """(gradients of ``needs``, amaxes). ``held``: what forward saved, ``apart`` or not; the list is emptied. ``kept``, ``cotangents``:
        in the order of ``self.kept`` and ``self.names``; ``into``: where gradients by name go that have a place already."""
        if self.guarded and torch.cuda.current_device() != self.place.index:
            with torch.cuda.device(self.device):
                return self._backward(kept, held, cotangents, scales, amaxes, into, apart)
        return self._backward(kept, held, cotangents, scales, amaxes, into, apart)

    def _backward(
        self, kept: Sequence[Tensor], held: list[Tensor], cotangents: Sequence[Tensor | None], scales: Placed, amaxes: Placed,
        into: Mapping[str, Tensor], apart: bool,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        row = None
        if not amaxes and self.back:
            row = torch.zeros(self.back_slots, dtype=torch.float32, device=self.device)
            amaxes = amax_views(self.back, row, self.place)
        arrived = [g if g is None or g.is_contiguous() else g.contiguous() for g in cotangents]
        if arrived[0] is None:
            main = self.outputs[0]
            arrived[0] = torch.zeros(main.shape, dtype=main.dtype, device=self.device)
        made = self._made(self.grads, into, self.grads_apart)
        stream = self.stream()
        again = None if self.saved_apart.apart else self.back_again
        at = -1 if again is None else self.back_scratch.kept_at(self.place, stream)
        if at < 0:
            made = self._run_backward(kept, held, arrived, scales, amaxes, made, into, apart, stream)
        else:
            key = (stream, at, scales.at, amaxes.at, *[t.data_ptr() for t in (*kept, *held, *made)],
                   *[None if g is None else (g.data_ptr(), g.dtype) for g in arrived])  # fmt: skip
            again.run(key, self._run_backward, kept, held, arrived, scales, amaxes, made, into, apart, stream)  # type: ignore[union-attr]
        return [(None if passed is None else arrived[passed]) if at is None else made[at] for at, passed in self.answers], row

    def _run_backward(self, kept: Sequence[Tensor], held: list[Tensor], arrived: Sequence[Tensor | None], scales: Views,
                      amaxes: Placed, made: list[Tensor], into: Mapping[str, Tensor], apart: bool, stream: int
                      ) -> list[Tensor]:
        """The operation's backward; gives the gradients."""
        place = self.place
        views: Any = dict(scales)
        for (name, _, _, shape, kind), tensor in zip(self.kept, kept, strict=True):
            views[name] = ArrayView(tensor.data_ptr(), shape, kind, place, tensor)
        incoming = {name: None if g is None else ArrayView(g.data_ptr(), tuple(g.shape), kind_of(g.dtype), place, g)
                    for name, g in zip(self.names, arrived, strict=True)}  # fmt: skip
        filled = self._views([out for out in self.grads if out.name in into or out.name not in self.grads_apart], made, amaxes)
        if self.grads_apart:
            filled = Buffers(filled, self.grads_apart, self.make)
        saved = (self.saved_apart if apart else self.saved).opened(held, place) if held else {}
        scratch = self.back_scratch.room(place, self.device, stream, self.eager)
        self.operation.backward(self.plan, views, saved, incoming, filled, scratch, stream)
        return [filled[out.name].owner for out in self.grads] if self.grads_apart else made

    def _made(self, outs: list[_Out], into: Mapping[str, Tensor] = _NOWHERE, later: Mapping[str, Meta] = _NEVER) -> list[Tensor]:
        """Tensors, fresh but for those in ``into``; but for those that are made ``later``."""
        made, device = [], self.device
        for name, shape, strides, dtype, _, zero in outs:
            if name in into:
                made.append(into[name])
            elif name not in later:  # ``empty`` is the slower one: it has more forms, among which its arguments choose
                tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                made.append(tensor.zero_() if zero else tensor)
        return made

    def _views(self, outs: list[_Out], made: list[Tensor], amaxes: Views) -> Any:
        """What was made, and the amaxes, by name."""
        views = dict(amaxes)
        for out, tensor in zip(outs, made, strict=True):
            views[out.name] = ArrayView(tensor.data_ptr(), out.shape, out.kind, self.place, tensor)
        return views
