"""Calls of operations on torch tensors, and their plans, found by a cheap key.

A ``Call`` is what is static: an operation, its spec, the names of its inputs. A ``Ready`` is a call for
certain shapes: its plan and where everything lies. Both ways into an operation, the eager one and the ops
that torch.compile sees, run through them: the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.arrays import Device, Shape
from fp8kit.backends import dispatch
from fp8kit.backends.policy import (
    SelectionPolicy,
    apart,
    get_policy,
    policy_context,
    policy_from_text,
    process_policy,
    traced_policy,
)
from fp8kit.errors import BackendError, FormatError, ShapeError
from fp8kit.formats import DType, float32
from fp8kit.ops.linear import weight_cast
from fp8kit.ops.products import product_of
from fp8kit.ops.split_heads import split_heads
from fp8kit.scaling import BACKWARD_SLOTS, FORWARD_SLOTS, backward_slots, forward_slots
from fp8kit.spec import Meta, Signature
from fp8kit_torch.arguments import dtype_name, unlike_devices, unlike_dtypes, want_parameters
from fp8kit_torch.memory import place_of
from fp8kit_torch.ready import Ready
from fp8kit_torch.texts import OPERATIONS, decode, encode
from fp8kit_torch.views import has_kind, kind_of
from fp8kit_torch.words import argument_of

_LAYERS_OWN = ("linear", "norm", "norm_linear", "norm_mlp")  # operations of x and a layer's parameters
_PARAMETER = re.compile(r"(weight|bias)\d*$")
_OUTPUTS = {"attention": ("o",), "cross_entropy": ("loss",)}  # of operations that have another than "y"
_PLAN_LIMIT = 1024  # shapes a call
_SCALAR = Meta((1,), float32)


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

    ``names``: of the input tensors, in order. ``gemms``: prefixes of its GEMMs, none for an operation without
    FP8. ``scaled``: whether the scales come from a ``ScalingState``. ``policy``: text of the policy to choose
    kernels by, "" for the one in force: a compiled graph keeps that of its forward pass, because its backward
    pass may run on another thread. ``text``: all this as a string (``texts``).
    """

    __slots__ = (
        "back",
        "back_slots",
        "front",
        "front_slots",
        "gemms",
        "names",
        "operation",
        "plans",
        "policy",
        "rehearsed",
        "scaled",
        "spec",
        "text",
    )

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
        metas: dict[str, Meta | None] = {
            name: Meta(tuple(shape), kind) for name, (shape, kind) in zip(self.names, kinds, strict=True)
        }
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
        """The plan for these tensors; made once for their shapes and dtypes and the policy in force. Raises
        what ``infer`` raises, and BackendError when tensors live on different devices."""
        device = tensors[0].device
        if not (tensors[0].is_cuda or tensors[0].is_cpu):  # a device takes longer to say its kind
            self._want_one_device(tensors)
        kernels = (
            dispatch.kernels(place_of(device)) if self.policy is None else self._kernels(place_of(device))
        )
        found = self.plans.get((needs, id(kernels), *[(t.shape, t.dtype, t.device) for t in tensors]))
        if found is None:
            if alike:
                want_alike(self.operation.name, dict(zip(self.names, tensors, strict=True)))
            self._want_one_device(tensors)
            found = self.ready_for([t.shape for t in tensors], [t.dtype for t in tensors], needs, device)
        return found

    def ready_for(
        self,
        shapes: Sequence[Shape],
        dtypes: Sequence[torch.dtype],
        needs: tuple[str, ...],
        device: torch.device,
    ) -> Ready:
        """``ready`` for tensors of these shapes and dtypes on ``device``."""
        kernels = (
            dispatch.kernels(place_of(device)) if self.policy is None else self._kernels(place_of(device))
        )
        key = (
            needs,
            id(kernels),
            *[(shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)],
        )
        found = self.plans.get(key)
        if found is None:
            kinds = self._kinds(shapes, dtypes)
            if len(self.plans) >= _PLAN_LIMIT:
                self.plans.clear()
            with self._in_the_users_words(kinds):
                found = self.plans[key] = Ready(self, kinds, needs, device, kernels)
        return found

    def rehearse(self, tensors: Sequence[Tensor | Stand], needs: tuple[str, ...] = ()) -> None:
        """Refuse what ``ready`` would refuse of these inputs' shapes, dtypes and devices, and make no plan:
        what a layer asks before its first operation about those that follow. What was found right is
        remembered."""
        self._want_one_device(tensors)
        key = (needs, *[(t.shape, t.dtype) for t in tensors])
        if key not in self.rehearsed:
            self.infer(self._kinds([t.shape for t in tensors], [t.dtype for t in tensors]), needs)
            if len(self.rehearsed) >= _PLAN_LIMIT:
                self.rehearsed.clear()
            self.rehearsed.add(key)

    def _kinds(self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[tuple[Any, DType]]:
        """The inputs' shapes and fp8kit's dtypes. FormatError, by the user's name of the input, where there
        is none."""
        for name, dtype in zip(self.names, dtypes, strict=True):
            if not has_kind(dtype):
                argument = argument_of(self.operation.name, name, self.names)
                raise FormatError(
                    self.operation.name, argument, dtype_name(dtype), "a dtype of fp8kit, such as float32"
                )
        return [(tuple(shape), kind_of(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def _want_one_device(self, tensors: Sequence[Tensor | Stand]) -> None:
        device, operation = tensors[0].device, self.operation.name
        if all(tensor.device == device for tensor in tensors):
            return
        first, *rest = (argument_of(operation, name, self.names) for name in self.names)
        if first == "inp" and operation in _LAYERS_OWN:
            raise unlike_devices(
                operation,
                {name: str(t.device) for name, t in zip(rest, tensors[1:], strict=True)},
                str(device),
            )
        name, other = next(
            (name, t.device) for name, t in zip(rest, tensors[1:], strict=True) if t.device != device
        )
        raise BackendError(operation, name, f"device {other}", f"device {device}, as {first}")

    @contextmanager
    def _in_the_users_words(self, kinds: Sequence[tuple[Any, DType]]) -> Iterator[None]:
        """Within, refusals of ``infer`` call the inputs, be they there or missing, as the user does, and say
        of a parameter that has not the dtype of x what can be done."""
        try:
            yield
        except (ShapeError, FormatError) as error:
            argument = error.argument
            if argument is None or (argument not in self.names and error.got is not None):
                raise
            operation, dtypes = (
                self.operation.name,
                {name: kind.name for name, (_, kind) in zip(self.names, kinds, strict=True)},
            )
            own = {name: dtype for name, dtype in dtypes.items() if name != "x" and _PARAMETER.search(name)}
            if (
                operation in _LAYERS_OWN
                and isinstance(error, FormatError)
                and own.get(argument, dtypes["x"]) != dtypes["x"]
            ):
                named = {argument_of(operation, name, self.names): dtype for name, dtype in own.items()}
                raise unlike_dtypes(operation, named, dtypes["x"]) from None
            raise error.renamed(operation, argument_of(operation, argument, self.names)) from None

    def _kernels(self, place: Device) -> Any:
        """The kernels of the call's own policy. BackendError where that is not what the caller's task has in
        force."""
        policy = get_policy()
        assert self.policy is not None
        if policy is self.policy:
            return dispatch.kernels(place)
        if apart() and torch._C._current_graph_task_id() == -1:
            got = (
                f"the policy {policy.text} of a block within an asyncio task (or of a context copied into "
                "this thread)"
            )
            raise BackendError(
                self.operation.name,
                "policy",
                got,
                "a block around the event loop: torch.compile reads no other",
            )
        with policy_context(self.policy):
            return dispatch.kernels(place)


def want_alike(operation: str, tensors: Mapping[str, Tensor]) -> None:
    """BackendError or FormatError where a layer's parameters are on another device or of another dtype than
    x."""
    names = tuple(tensors)
    want_parameters(
        operation,
        {argument_of(operation, name, names): tensors[name] for name in names if name != "x"},
        tensors["x"],
        False,
    )


@lru_cache(maxsize=4096)
def call_by(text: str) -> Call:
    """The call that a text describes; one object for one text."""
    return Call(text)


def call(
    name: str,
    spec: Any,
    names: tuple[str, ...],
    gemms: tuple[str, ...] = (),
    scaled: bool = False,
    policy: str = "",
) -> Call:
    """The call of the operation ``name``; one object for equal arguments."""
    return call_by(encode((name, spec, names, gemms, scaled, policy)))


def policy_now() -> SelectionPolicy:
    """The policy in force, also within ``torch.compile``, which guards it: another one compiles anew."""
    if not torch.compiler.is_compiling():
        return get_policy()
    _ask()
    policy = traced_policy()
    assert policy is not None  # it has been asked for
    return policy


@torch.compiler.assume_constant_result
def _ask() -> bool:
    """The environment is read for the process's policy, if nobody has asked yet: a function that calls no
    module may be compiled first. Before Dynamo reads it, which guards what it finds."""
    process_policy()
    return True
