"""The operations of one layer's call, run as one (``fp8kit.execution.chain``). The layer's own code is called
with a ``Pending`` in the place of its input: each part then adds its operation to a list instead of running
it, and ``run_chain`` runs the list.

A small layer spends its time on the host, most of it once for each operation: a node of torch's graph, an
allocation, a look-up, a launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.errors import Fp8kitError
from fp8kit.execution.chain import ChainSpec, chain
from fp8kit.lru import LRU, SHAPES
from fp8kit.spec import Operation
from fp8kit_torch.bound import TorchOp
from fp8kit_torch.call import prepare, run
from fp8kit_torch.state import NO_STATE, StateBinding

# for each layer the bindings of its last call, and the names of the amaxes that its backward fills; a call
# uses its own, whatever other threads put here meanwhile
_bindings: weakref.WeakKeyDictionary[Any, tuple[list[str], list[StateBinding], StateBinding]]
_bindings = weakref.WeakKeyDictionary()


class _Form(NamedTuple):
    """What calls are without their tensors: the chain's names of their inputs and of their scales, and its
    spec."""

    names: tuple[str, ...]
    scales: tuple[str, ...]
    spec: ChainSpec


# key: of each call the operation's name, the identity of its spec, its inputs' names and classes, and where
# those come from that are ``Pending``; the value holds the specs, so that no other object gets their identity
_forms: LRU[Any, _Form] = LRU(SHAPES, name="torch: chains")


class Call(NamedTuple):
    """An operation that is to run."""

    operation: Operation
    spec: Any
    inputs: Mapping[str, Any]
    binding: StateBinding = NO_STATE


class Pending:
    """What stands for a tensor while a chain is put together: for output ``name`` of call number ``number``
    in ``calls``, which will make it, or for ``tensor``, the chain's input. A layer's code passes it on to
    operations and uses nothing of it but ``dtype``, ``device`` and ``to``."""

    __slots__ = ("calls", "device", "dtype", "name", "number", "tensor")

    def __init__(self, calls: list[Call], tensor: Tensor | None, like: Any, name: str = "") -> None:
        self.calls, self.tensor, self.name = calls, tensor, name
        self.number, self.dtype, self.device = len(calls) - 1, like.dtype, like.device

    def to(self, dtype: torch.dtype) -> Pending:
        """Itself: a chain has one dtype."""
        assert dtype is self.dtype
        return self


def chained(call: Call) -> dict[str, Pending]:
    """Add a call to the chain of its first input, a ``Pending``. Returns its outputs by name."""
    first = next(iter(call.inputs.values()))
    calls = first.calls
    calls.append(call)
    return {name: Pending(calls, None, first, name) for name in call.operation.outputs(call.spec)}


def run_chain(layer: torch.nn.Module, calls: list[Call]) -> Tensor:
    """Run the calls of ``layer``. Returns the last one's first output."""
    key: list[Any] = []
    tensors: list[Tensor] = []
    for operation, own, inputs, binding in calls:
        values = inputs.values()
        key += operation.name, id(own), len(inputs), *inputs, *binding.scales, *map(type, values)
        for value in values:
            if type(value) is not Pending:
                if value is not None:
                    tensors.append(value)
            elif value.tensor is None:
                key.append((value.number, value.name))
            else:
                key.append(None)
                tensors.append(value.tensor)
    known = tuple(key)
    found = _forms.get(known) or _forms.put(known, _form(calls))
    names, scales, spec = found
    try:
        op, tensors = prepare(chain, spec, dict(zip(names, tensors, strict=True)), scales)
        return run(op, tensors, _binding(layer, op, [call.binding for call in calls]))["y"]
    except Fp8kitError as error:
        named = {chain.name, *(call.operation.name for call in calls)}
        if error.operation not in named or error.argument is None:
            raise
        # about one of the tensors, whichever operation takes it
        argument = "hidden_states" if error.argument in ("x", "inp") else error.argument
        raise error.renamed(type(layer).__name__, argument) from None


def _form(calls: list[Call]) -> _Form:
    """What the calls are without their tensors."""
    names, sources, scales = [], [], []
    for i, call in enumerate(calls):
        scales += [f"{i}.{name}" for name in call.binding.scales]
        own = []
        for name, value in call.inputs.items():
            if type(value) is Pending and value.tensor is None:
                own.append((name, value.number, value.name))
            elif value is not None:
                names.append(f"{i}.{name}")
        sources.append(tuple(own))
    operations, specs = tuple(call.operation.name for call in calls), tuple(call.spec for call in calls)
    return _Form(tuple(names), tuple(scales), ChainSpec(operations, specs, tuple(sources)))


def _binding(layer: torch.nn.Module, op: TorchOp, parts: list[StateBinding]) -> StateBinding:
    """The bindings of the calls as one; made once for the same ones, whatever the sizes."""
    found, amaxes = _bindings.get(layer), [*op.grad_amaxes]
    same = found is not None and found[0] == amaxes and len(found[1]) == len(parts)
    if not same or not all(map(is_, found[1], parts)):  # type: ignore[index]
        merged: list[dict[str, int]] = [{}, {}, {}, {}]
        tokens, held = [], []
        for i, part in enumerate(parts):
            for whole, addresses in zip(merged, part[:4], strict=True):
                whole |= {f"{i}.{name}": address for name, address in addresses.items()}
            if any(name.startswith(f"{i}.") for name in amaxes):
                tokens += part.tokens
            held += part.held
        found = _bindings[layer] = amaxes, parts, StateBinding(*merged, tuple(tokens), tuple(held))
    return found[2]  # type: ignore[index]
