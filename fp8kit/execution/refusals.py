"""Errors that every frontend raises before anything runs. For a call: a spec of the wrong class, a missing
input, an unknown input, a value that is no array. For an operation: an impossible declaration.

An operation does not list its inputs: its ``infer`` reads each of them by name. An input is missing if
``infer`` reads it and the call does not have it; it is unknown if neither ``infer`` nor ``plan`` reads it.
These checks run when a plan is made; ``want_call`` runs after a call has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError, ShapeError, meant
from fp8kit.inspection import is_watched
from fp8kit.ops.registry import spec_classes
from fp8kit.spec import Meta, Needs, Operation, Plan, Signature


class GivenMetas(Mapping[str, Meta]):
    """The metas of a call's inputs, ``own``; remembers the names that were ``asked`` for. Iterating asks for
    all of them. ShapeError for a missing name; ``get`` and ``in`` ask without an error."""

    def __init__(self, operation: Operation, metas: Mapping[str, Meta]) -> None:
        self.operation, self.own, self.asked = operation, metas, set[str]()

    def __getitem__(self, name: str) -> Meta:
        self.asked.add(name)
        if name in self.own:
            return self.own[name]
        given = ", ".join(map(repr, self.own)) or "none"
        other = f" as {name!r}" if self.operation.argument(name) != name else ""
        raise ShapeError(self.operation.name, name, None, f"an array{other}; given: {given}")

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return name in self.own

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's."""
        self.asked.add(name)
        return self.own.get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.asked.update(self.own)
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def __or__(self, other: Mapping[str, Meta]) -> dict[str, Meta]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Meta]) -> dict[str, Meta]:
        return {**other, **self}

    def want_no_others(self, needs: Needs) -> None:
        """ArgumentError for an input that nobody asked for, but for a state's scales, which come whether the
        spec uses them or not. Those of ``needs`` are left to the error about their gradient."""
        for name in self.own.keys() - self.asked - needs:
            if not str(name).endswith("_scale"):
                known = sorted(self.asked)
                wanted = f"one of the inputs that infer looks at: {', '.join(known) or 'none'}"
                raise ArgumentError(self.operation.name, name, "an array", wanted + meant(name, known))


def signature_of(operation: Operation, spec: Any, metas: Mapping[str, Meta], needs: Needs) -> Signature:
    """``operation.infer``. Raises what it raises; ArgumentError for a spec of another class, for an input
    that the operation does not have, and for an answer that cannot be (``want_signature``), ShapeError for an
    input that is missing."""
    given = GivenMetas(operation, metas)
    with reading(operation, spec):
        signature = operation.infer(spec, given, needs)
    want_signature(operation, spec, given, signature)
    given.want_no_others(needs)
    return signature


def plan_of(operation: Operation, spec: Any, metas: Mapping[str, Meta], needs: Needs, kernels: Any) -> Plan:
    """``operation.plan``; raises as ``signature_of``."""
    given = GivenMetas(operation, metas)
    with reading(operation, spec):
        plan = operation.plan(spec, given, needs, kernels)
    if not isinstance(plan, Plan):
        raise ArgumentError(operation.name, "plan", shown(plan), "a Plan, returned by plan")
    want_signature(operation, spec, given, plan.signature)
    given.want_no_others(needs)
    return plan


def want_signature(operation: Operation, spec: Any, given: GivenMetas, signature: Any) -> None:
    """ArgumentError that says what an operation's author has to change, where ``infer`` answers something
    else than a Signature of Metas, outputs that the operation does not declare, names that are none, or a
    gradient that has not its input's shape. ``given``: the metas that ``infer`` has seen."""
    name = operation.name
    if not isinstance(signature, Signature):
        raise ArgumentError(name, "infer", shown(signature), "a Signature, returned by infer")
    for field in ("outputs", "saved", "grads", "backward_inputs"):
        metas = getattr(signature, field)
        if not isinstance(metas, Mapping):
            raise ArgumentError(name, field, shown(metas), "a dict, name -> Meta")
        for key, meta in metas.items():
            if not isinstance(meta, Meta):
                got = f"{key!r}: {shown(meta)}"
                raise ArgumentError(name, field, got, "Meta(shape, dtype) for each name")
    made = [key for key, meta in signature.outputs.items() if not (meta.zero or is_watched(key))]
    results = *made, *signature.passes
    declared = tuple(operation.outputs(spec))
    if declared != results:
        wanted = f"{results}, as infer says: declare `results = {results}` in {type(operation).__name__}"
        raise ArgumentError(
            name, "results", declared, f"{wanted}, or return them from outputs(spec) where the spec decides"
        )
    kept: Any = signature.kept
    if isinstance(kept, str):
        raise ArgumentError(name, "kept", repr(kept), "a tuple of names")
    inputs, outputs = given.asked | given.own.keys(), set(results)
    for field, names, known in (
        ("kept", kept, inputs | outputs),
        ("passes", signature.passes.values(), inputs),
        ("grad_passes", signature.grad_passes.keys(), inputs),
        ("grad_passes", signature.grad_passes.values(), outputs),
    ):
        for key in names:
            if key not in known:
                among = ", ".join(sorted(known)) or "none"
                raise ArgumentError(name, field, repr(key), f"names among {among}{meant(key, known)}")
    for key, meta in signature.grads.items():
        source = given.own.get(key)
        if source is not None and meta.shape != source.shape:
            wanted = f"{source.shape}, that of the input {key!r}"
            raise ArgumentError(name, "grads", f"shape {meta.shape} of {key!r}", wanted)


@contextmanager
def reading(operation: Operation, spec: Any) -> Iterator[None]:
    """Around code of an operation that reads ``spec``. ArgumentError where it is of another class than that
    which ``infer`` names, or has not an attribute that is read."""
    want_spec(operation, spec)
    try:
        yield
    except AttributeError as error:
        if error.obj is not spec:
            raise
        wanted = f"a spec of this operation, which has {error.name!r}"
        raise ArgumentError(operation.name, "spec", shown(spec), wanted) from error


def want_spec(operation: Operation, spec: Any) -> None:
    """ArgumentError for what is no operation; for a spec of none of the classes that the operation was
    registered with, or, where there are none, of another class than that with which ``infer`` annotates
    it."""
    if not isinstance(operation, Operation):
        raise ArgumentError("apply", "operation", shown(operation), "an Operation, an instance of its class")
    kinds = spec_classes(operation)
    if not kinds:
        infer = type(operation).infer
        kind = infer.__annotations__.get("spec")
        if isinstance(kind, str):
            kind = infer.__globals__.get(kind)
        kinds = (kind,) if isinstance(kind, type) and kind is not Any else ()
    wanted = " or ".join(kind.__name__ for kind in kinds) or "the spec's class"
    if isinstance(spec, type) or (kinds and not isinstance(spec, kinds)):
        raise ArgumentError(operation.name, "spec", shown(spec), f"an instance of {wanted}")


def want_call(
    operation: Operation, spec: Any, inputs: Any, is_array: Callable[[Any], bool], array: str
) -> None:
    """The ArgumentError or ShapeError that says what is wrong with the arguments of ``apply``, asked after
    the call has failed in Python; nothing where they are right. ``array``: what ``is_array`` wants, in
    words."""
    want_spec(operation, spec)
    if not isinstance(inputs, Mapping):
        raise ArgumentError(operation.name, "inputs", shown(inputs), "arrays by name, a dict")
    for name, value in inputs.items():
        if not isinstance(name, str):
            raise ArgumentError(operation.name, "inputs", f"the name {shown(name)}", "names that are strings")
        if value is not None and not is_array(value):
            raise ArgumentError(operation.name, operation.argument(name, inputs), shown(value), array)
    if all(value is None for value in inputs.values()):
        refuse_no_inputs(operation, spec)


def refuse_no_inputs(operation: Operation, spec: Any) -> NoReturn:
    """ShapeError for a call without inputs: about the first that the operation asks for."""
    signature_of(operation, spec, {}, frozenset())
    raise ShapeError(operation.name, "inputs", "none", "at least one array")
