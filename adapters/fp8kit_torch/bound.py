"""``TorchOp``: a bound operation that allocates by torch and works on torch's stream; ``bind`` finds it by a
key that costs little. ``validate`` raises what a call would raise, and runs nothing.

Errors call the inputs as the user does. Where a parameter and the input differ in dtype or device, they say
what can be done about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import call
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.arrays import Shape
from fp8kit.backends import dispatch
from fp8kit.errors import BackendError, FormatError, Fp8kitError, UnsupportedError
from fp8kit.execution import plans
from fp8kit.execution.bound import BoundOp
from fp8kit.execution.chain import ChainSpec
from fp8kit.formats import float32
from fp8kit.spec import Meta, Operation
from fp8kit_torch import torch_compat
from fp8kit_torch.arguments import dtype_name, unlike_devices, unlike_dtypes
from fp8kit_torch.availability import want_fp8
from fp8kit_torch.finite import warn_of_hidden_overflow
from fp8kit_torch.held_values import Part
from fp8kit_torch.memory import KINDS, TorchMemory, memory_of, place_of
from fp8kit_torch.state import NO_STATE, StateBinding
from fp8kit_torch.views import has_kind, kind_of

Kind = tuple[Shape, torch.dtype, torch.device]
_NOWHERE: Mapping[str, Tensor] = {}
_address: Callable[[Tensor], int] = Tensor.data_ptr


class TensorMeta(NamedTuple):
    """What stands for a tensor that is not there yet."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


class TorchOp(BoundOp):
    """A bound operation and the functions that allocate its outputs and gradients.

    ``wanted``: for each tensor its place among ``needs``, -1 where it is none of them. ``through``: places,
    among the tensors, of what ``passes`` name.
    """

    memory: TorchMemory

    def __init__(
        self,
        operation: Operation,
        spec: Any,
        metas: Mapping[str, Meta],
        needs: tuple[str, ...],
        memory: TorchMemory,
        kernels: Any,
    ) -> None:
        calls = [(operation.name, spec)]
        if isinstance(spec, ChainSpec):
            calls = list(zip(spec.operations, spec.specs, strict=True))
        for name, own in calls:
            want_fp8(name, own, memory.where)
        super().__init__(operation, spec, metas, needs, memory, kernels, save_in_block=memory.compiled)
        self.make_outputs = [memory.maker(meta) for meta in self.outputs.values()]
        self.make_grads = [
            None if name in self.streamed_grads else memory.maker(meta) for name, meta in self.grads.items()
        ]
        # by ``call.prepare``: what was asked for beside tensors, whether others are as those were, and how
        # often that may be said anew, as where the first ones came in another mode of torch
        self.asked: Any = None
        self.fits: Callable[..., bool]
        self.renewals = 8
        # of the outputs and the tensors, one after the other, those that backward reads
        self.kept_at = [place + len(self.outputs) * (not made) for place, made in self.kept.values()]
        self.no_amaxes, self.no_grad_amaxes = (None,) * len(self.amaxes), (None,) * len(self.grad_amaxes)
        places = {name: i for i, name in enumerate(metas)}
        self.wanted = [needs.index(name) if name in needs else -1 for name in metas]
        self.through = [places[name] for name in self.passes.values()]
        # whether the gradients that are made are the wanted ones, in that order
        self.direct = self.gradients == [(i, None) for i in range(len(self.grads))]

    def call(
        self, inputs: list[int], state: StateBinding = NO_STATE, into: Sequence[Tensor] = ()
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """(outputs, what is saved for backward). ``inputs``: addresses of the tensors; ``state`` adds those
        of the scales, and of the amaxes, without which these go to memory that does not last. ``into``: the
        outputs, contiguous, and what is saved in one block, where the caller has allocated them."""
        memory = self.memory
        if memory.several and torch_compat.current_device() != self.device.index:
            with torch.cuda.device(memory.where):
                return self.call(inputs, state, into)
        outputs = into[: len(self.outputs)] if into else [*map(call, self.make_outputs)]
        block = into[len(self.outputs)] if into and self.saved.nbytes else None
        amaxes: Sequence[int | None] = self.no_amaxes
        if state.amaxes:
            amaxes = [*map(state.amaxes.__getitem__, self.amaxes)]
        if state.scales:
            inputs = [*inputs, *state.scales.values()]
        return outputs, self.forward(inputs, [*map(_address, outputs)], amaxes, block)

    def call_backward(
        self,
        kept: Sequence[Tensor],
        saved: list[Tensor],
        cotangents: Sequence[Tensor | None],
        state: StateBinding = NO_STATE,
        into: Mapping[str, Tensor] = _NOWHERE,
        consumed: bool = False,
    ) -> list[Tensor | None]:
        """The gradients of ``needs``. ``kept``: the tensors of ``BoundOp.kept``; ``saved``: what ``call``
        gave, emptied of what goes early; ``cotangents``: contiguous; ``into``: where gradients by name go,
        not with ``consumed``, see ``BoundOp.backward``."""
        memory = self.memory
        if memory.several and torch_compat.current_device() != self.device.index:
            with torch.cuda.device(memory.where):
                return self.call_backward(kept, saved, cotangents, state, into, consumed)
        grads: list[Tensor | None]
        if into or self.streamed_grads:
            grads = [
                into[name] if name in into else None if make is None else make()
                for name, make in zip(self.grads, self.make_grads, strict=True)
            ]
            places = [None if t is None else _address(t) for t in grads]
        else:
            grads = [*map(call, self.make_grads)]  # type: ignore[arg-type]
            places = [*map(_address, grads)]
        amaxes: Sequence[int | None] = self.no_grad_amaxes
        if state.backward_amaxes:
            amaxes = [*map(state.backward_amaxes.__getitem__, self.grad_amaxes)]
        if self.signature.grads:
            try:
                given: list[int | None] = [*map(_address, cotangents)]  # type: ignore[arg-type]
            except TypeError:  # one is None
                given = [None if g is None else _address(g) for g in cotangents]
            streamed = self.backward(
                [*map(_address, kept)],
                [*map(state.backward_scales.__getitem__, self.backward_inputs)],
                saved,
                given,
                places,
                amaxes,
                consumed,
            )
            if streamed:
                grads = [streamed.get(name, grad) for name, grad in zip(self.grads, grads, strict=True)]
        if self.direct:
            return grads
        found: Any = cotangents
        return [found[passed] if at is None else grads[at] for at, passed in self.gradients]


def bind(
    operation: Operation,
    spec: Any,
    needs: tuple[str, ...],
    names: tuple[str, ...],
    kinds: Sequence[Kind],
    scales: tuple[str, ...] = (),
    kernels: Any = None,
) -> TorchOp:
    """The bound operation for tensors of these names and kinds, and scales of these names; made once.

    ``kernels``: what a compiled graph works by; None for those in force, for an eager call. Raises what
    ``infer`` raises, BackendError when the tensors are on different devices, and UnsupportedError within
    ``torch.jit.trace``.
    """
    device, chosen = kinds[0][2], kernels
    try:
        place = place_of(device)
    except FormatError:
        _want_one_device(operation, names, kinds)
        raise
    if chosen is None:
        chosen = dispatch.kernels(place)
    mine = ("torch", kernels is None, scales, names, *kinds)
    key = plans.key_of(operation, spec, needs, chosen, mine)
    found = plans.plans.get(key)
    if found is None:
        if torch.jit.is_tracing():  # where shapes are of tensors: no plan is ever found again
            got, wanted = "a call that torch.jit.trace traces", "torch.compile, torch.export or onnx_export"
            raise UnsupportedError(operation.name, operation.argument(names[0], names), got, wanted)
        metas = _metas(operation, names, kinds, scales)
        try:
            found = TorchOp(operation, spec, metas, needs, memory_of(device, kernels is not None), chosen)
        except Fp8kitError as error:
            raise as_the_user_calls_it(error, operation, names, kinds) from None
        if needs and kinds[0][1] is torch.float16:
            warn_of_hidden_overflow(spec, needs)
        del found.wanted[len(names) :]  # scales are no tensors of the call
        plans.keep(key, found)
    return found  # type: ignore[return-value]


def validate(
    operation: Operation,
    spec: Any,
    inputs: Mapping[str, Tensor | TensorMeta],
    needs: tuple[str, ...] = (),
    scales: tuple[str, ...] = (),
) -> None:
    """Raise what an eager ``apply`` would raise for these inputs' shapes, dtypes and devices, and run
    nothing; some may be there by their meta only. ``needs``: names of those whose gradient will be wanted,
    where that matters. Within ``torch.compile`` nothing: there all is refused before anything runs."""
    if torch.compiler.is_compiling():
        return
    names, kinds = tuple(inputs), [(t.shape, t.dtype, t.device) for t in inputs.values()]
    metas = _metas(operation, names, kinds, scales)
    try:
        plans.validate(operation, spec, metas, needs)
    except Fp8kitError as error:
        raise as_the_user_calls_it(error, operation, names, kinds) from None


def _metas(
    operation: Operation, names: Sequence[str], kinds: Sequence[Kind], scales: Sequence[str]
) -> dict[str, Meta]:
    """The inputs as the operation knows them. FormatError, by the user's name of the input, for a dtype that
    fp8kit does not have; BackendError for several devices."""
    _want_one_device(operation, names, kinds)
    for name, (_, dtype, _) in zip(names, kinds, strict=True):
        if not has_kind(dtype):
            argument, wanted = operation.argument(name, names), "a dtype of fp8kit, such as float32"
            raise FormatError(operation.name, argument, dtype_name(dtype), wanted)
    metas = {
        name: Meta(tuple(shape), kind_of(dtype)) for name, (shape, dtype, _) in zip(names, kinds, strict=True)
    }
    return metas | dict.fromkeys(scales, _SCALE) if scales else metas


_SCALE = Meta((1,), float32)


def _want_one_device(operation: Operation, names: Sequence[str], kinds: Sequence[Kind]) -> None:
    """BackendError where the tensors are on several devices, FormatError for one that computes nothing."""
    device = kinds[0][2]
    if all(kind[2] == device for kind in kinds):
        if device.type not in KINDS:
            argument = operation.argument(names[0], names)
            raise FormatError(operation.name, argument, f"device {device}", "cpu or cuda")
        return
    first, *rest = (operation.argument(name, names) for name in names)
    devices = {name: str(kind[2]) for name, kind in zip(rest, kinds[1:], strict=True)}
    if names[0] == "x" and any(map(operation.is_parameter, names)):
        raise unlike_devices(operation.name, devices, str(device))
    name, other = next((name, other) for name, other in devices.items() if other != str(device))
    raise BackendError(operation.name, name, f"device {other}", f"device {device}, as {first}")


def as_the_user_calls_it(
    error: Fp8kitError, operation: Operation, names: Sequence[str], kinds: Sequence[Any]
) -> Fp8kitError:
    """An error of ``infer`` with the user's name of the input, also of one that is missing. For a parameter
    of another dtype than x it says what can be done. ``kinds``: (shape, dtype, ...) for each of ``names``."""
    argument = error.argument
    if argument is None or (argument not in names and error.got is not None):
        return error
    dtypes = {name: dtype_name(kind[1]) for name, kind in zip(names, kinds, strict=True)}
    if isinstance(error, FormatError) and operation.is_parameter(argument) and "x" in dtypes:
        own = {name: dtype for name, dtype in dtypes.items() if operation.is_parameter(name)}
        if own.get(argument, dtypes["x"]) != dtypes["x"]:
            named = {operation.argument(name, names): dtype for name, dtype in own.items()}
            return unlike_dtypes(operation.name, named, dtypes["x"])
    return error.renamed(operation.name, operation.argument(argument, names))


def addresses(op: TorchOp, tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The tensors of a call, and their addresses, 0 for one without elements. A wrapper of a torch.func
    transform that has ended is replaced by the tensor that it wraps. FormatError for a tensor without memory
    of its own, such as a FakeTensor or a DTensor; UnsupportedError within a torch.func transform and in
    forward mode."""
    if torch_compat.DUALS[torch_compat.LEVEL] >= 0:
        want_no_transform(op.operation, tuple(op.inputs), tensors)
    for tensor in tensors:
        if tensor.__class__ is Part:  # the kernel reads its memory: that has the whole's values
            tensor.data_ptr()
    try:
        found = [*map(_address, tensors)]
        if all(found):
            return tensors, found
    except RuntimeError:
        tensors = [torch_compat.unwrap(t) for t in tensors]
        found = [_address_or_0(t) for t in tensors]
    names = tuple(op.inputs)
    for name, tensor, address in zip(names, tensors, found, strict=False):  # scales come after them
        if address or not tensor.numel():
            continue
        # a tensor in FP8 has codes beside it
        if not (hasattr(tensor, "held_in_fp8") and any(own.endswith("_q") for own in names)):
            want_no_transform(op.operation, names, tensors)
            got = f"a {type(tensor).__name__} without memory"
            wanted = "a tensor with memory of its own: a DTensor's to_local(), a real one for a FakeTensor"
            raise FormatError(op.operation.name, op.operation.argument(name, names), got, wanted)
    return tensors, found


# by the beginning of what ``torch_compat.transform_of`` returns
_INSTEAD = {
    "torch.vmap": "the whole batch in one call, as leading dimensions of the input",
    "torch.func.functionalize": "a call outside of it",
    "torch.func.grad": "y.backward(), or torch.autograd.grad",
    "torch.func.jvp": "reverse mode: y.backward(), or torch.autograd.grad",
    "torch.autograd.forward_ad": "reverse mode: y.backward(), or torch.autograd.grad",
    "torch.func": "a call outside of it",
}


def _instead(transform: str) -> str:
    return next(text for start, text in _INSTEAD.items() if transform.startswith(start))


def want_no_running_transform(layer: str) -> None:
    """UnsupportedError within a transform of torch.func: what a layer makes there and keeps, such as the
    state of delayed scaling, would be the transform's."""
    transform = torch_compat.running_transform()
    if transform:
        raise UnsupportedError(layer, "inp", f"a call within {transform}", _instead(transform))


def want_no_transform(
    operation: Operation, names: Sequence[str], tensors: Sequence[Tensor | None], instead: str = ""
) -> None:
    """UnsupportedError for the first of the tensors that a transform of torch.func or forward mode has
    wrapped. ``instead``: what to do, where that is not what the transform's name says."""
    for name, tensor in zip(names, tensors, strict=False):
        transform = "" if tensor is None else torch_compat.transform_of(tensor)
        if transform:
            wanted = instead or _instead(transform)
            argument = operation.argument(name, names)
            raise UnsupportedError(operation.name, argument, f"a tensor of {transform}", wanted)


def _address_or_0(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
