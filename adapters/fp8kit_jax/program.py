"""What one custom call runs, as a value: ``Program``, its text, and its execution on pointers.

A program names a face of an operation, its spec, and the shapes and dtypes of the operation's inputs. From
that follow, through the operation's own ``infer``, the arrays that come in and go out, and, through ``plan``,
the scratch. Nothing in it belongs to a process: the text is the same everywhere and enough to run the program
in a fresh process.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.dispatch import SelectionPolicy
from fp8kit.backends.policy import policy_context, policy_from_text
from fp8kit.errors import BackendError, FormatError
from fp8kit.formats import FORMATS, Format
from fp8kit.spec import Meta, Operation, Plan, Signature

FORM = 1  # of the text; another number where texts of before can no longer be run
Named = tuple[tuple[str, Meta], ...]
_OPERATIONS: dict[str, Operation] = {}
_SPECS: dict[str, type] = {kind.__name__: kind for kind in (Format, SelectionPolicy)}


def register_operation(operation: Operation, *specs: type) -> None:
    """Make an operation known to the door, with the (frozen dataclass) types that its spec is made of. A
    user's own too."""
    _OPERATIONS[operation.name] = operation
    register_specs(*specs)


def register_specs(*specs: type) -> None:
    """Make frozen dataclasses known that specs are made of."""
    for kind in specs:
        if not dataclasses.is_dataclass(kind):
            raise FormatError("register_operation", "specs", kind.__name__, "frozen dataclasses")
        _SPECS[kind.__name__] = kind


@dataclass(frozen=True)
class Program:
    """One call.

    * ``face``: "forward" (outputs, then saved), "backward" (grads) or "measure" (amax outputs) of
      ``operation`` with ``spec``.
    * ``metas``: the operation's inputs as (name, Meta). ``needs``: inputs whose gradient is wanted.
    * ``late``: further inputs of backward, float32 (1,): the gradients' scales or amaxes. ``cotangents``:
      outputs whose cotangent comes.
    * ``policy``: which implementations are chosen, as it was when the program was traced. ``plugins``: what
      there was to choose from beside fp8kit's own then: a program is traced and prepared anew when that
      changes.
    * ``views``: shapes that arrays have in JAX where the operation has them flattened (a kernel (K, 3, N) as
      (K, 3 N)), by name. The memory is the same, and so is the text: only what splits over devices looks at
      it.
    """

    face: str
    operation: str
    spec: Any
    metas: Named
    needs: tuple[str, ...]
    late: tuple[str, ...] = ()
    cotangents: tuple[str, ...] = ()
    policy: SelectionPolicy = SelectionPolicy()  # noqa: RUF009  (a frozen value)
    plugins: str = field(default_factory=dispatch.plugins_fingerprint)
    views: tuple[tuple[str, arrays.Shape], ...] = ()

    @cached_property
    def op(self) -> Operation:
        """The operation itself."""
        return _OPERATIONS[self.operation]

    @cached_property
    def signature(self) -> Signature:
        """What ``infer`` answers; raises what it raises."""
        return self.op.infer(self.spec, dict(self.metas), frozenset(self.needs))

    @cached_property
    def arguments(self) -> Named:
        """The arrays that come in, in order: backward's are what is kept, what is late, what was saved, the
        cotangents."""
        if self.face != "backward":
            return self.metas
        known, s = dict(self.metas), self.signature
        kept = [
            (name, known[name] if name in known else s.outputs[name])
            for name in s.kept
            if name in known or name in s.outputs
        ]
        late = [(name, Meta((1,), formats.float32)) for name in self.late]
        outputs = s.outputs | {name: known[source] for name, source in s.passes.items()}
        return (*kept, *late, *s.saved.items(), *((name, outputs[name]) for name in self.cotangents))

    @cached_property
    def results(self) -> Named:
        """The arrays that go out, in order, scratch not counted."""
        s = self.signature
        if self.face == "backward":
            return tuple(s.grads.items())
        if self.face == "measure":
            return tuple((name, meta) for name, meta in s.outputs.items() if meta.zero)
        return (*s.outputs.items(), *s.saved.items())

    def seen(self, kind: str) -> list[tuple[str, arrays.Shape]]:
        """Names and shapes of "arguments" or "results" as JAX has them, int64 as the operation has it."""
        views = dict(self.views)
        return [(name, views.get(name, meta.shape)) for name, meta in getattr(self, kind)]

    def plan(self, device: Device) -> Plan:
        """The plan on a device."""
        with policy_context(self.policy):
            kernels = dispatch.kernels(device)
            return self.op.plan(self.spec, dict(self.metas), frozenset(self.needs), kernels)

    def scratch(self, plan: Plan) -> Named:
        """The temporaries of this face."""
        found = {"forward": plan.scratch, "backward": plan.backward_scratch, "measure": plan.measure_scratch}[
            self.face
        ]
        return tuple(
            (name, meta._replace(shape=(1,)) if meta.shape == (0,) else meta) for name, meta in found.items()
        )

    def text(self, scratch: Named) -> str:
        """The program as text, with the temporaries that it was compiled with."""
        whole = {
            "form": FORM,
            "program": _encode(dataclasses.replace(self, views=())),
            "scratch": _encode(scratch),
        }
        return json.dumps(whole, separators=(",", ":"), sort_keys=True)


_SPECS["Program"] = Program


def _encode(value: Any) -> Any:
    if isinstance(value, Format) and FORMATS.get(value.name) == value:
        return {"format": value.name}
    if isinstance(value, SelectionPolicy):
        return {"policy": policy_from_text(value.text).text}  # where it has overrides, it is kept from now on
    if isinstance(value, Meta):
        return {"meta": [list(value.shape), value.dtype.name, value.zero]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
        if type(value).__name__ not in _SPECS:
            raise FormatError(
                "fp8kit_jax", "spec", type(value).__name__, "a type that register_operation was told of"
            )
        return {"is": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [_encode(part) for part in value]
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise FormatError("fp8kit_jax", "spec", repr(value), "numbers, text, formats, tuples and known specs")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(part) for part in value)
    if not isinstance(value, dict):
        return value
    if "is" in value:
        return _SPECS[value["is"]](**{name: _decode(part) for name, part in value.items() if name != "is"})
    if "policy" in value:
        return policy_from_text(value["policy"])
    if "format" in value:
        return FORMATS[value["format"]]
    if "meta" in value:
        shape, dtype, zero = value["meta"]
        return Meta(tuple(shape), formats.DTYPES[dtype], zero)
    return frozenset(value["set"])


# --- execution ----------------------------------------------------------------------------------------------

Step = Callable[[Sequence[int], int], None]
Part = tuple[str, arrays.Shape, formats.DType]


@lru_cache(maxsize=4096)
def prepare(text: str, device: Device) -> Step:
    """``step(pointers, stream)`` for a program's text on a device: pointers of arguments, results and scratch
    in the program's order."""
    found = json.loads(text)
    if found.get("form") != FORM:
        raise BackendError(
            "fp8kit.run", "program", f"form {found.get('form')}", f"form {FORM}: compiled by another fp8kit"
        )
    program: Program = _decode(found["program"])
    plan = program.plan(device)
    if program.scratch(plan) != _decode(found["scratch"]):
        wanted = f"{program.scratch(plan)}: compiled by another fp8kit or for another kind of device"
        raise BackendError("fp8kit.run", "temporaries", _decode(found["scratch"]), wanted)
    provider, op, face, signature = arrays.provider(device), program.op, program.face, program.signature
    groups = [_parts(program.arguments), _parts(program.results), _parts(program.scratch(plan))]
    zeroed = [name for name, meta in program.results if meta.zero]
    cotangents = set(program.cotangents)
    kept = {
        name
        for name, _ in program.arguments[: len(program.arguments) - len(signature.saved) - len(cotangents)]
    }

    def views(parts: Sequence[Part], pointers: Sequence[int]) -> dict[str, ArrayView]:
        return {
            name: ArrayView(ptr, shape, dtype, device)
            for (name, shape, dtype), ptr in zip(parts, pointers, strict=True)
        }

    def step(pointers: Sequence[int], stream: int) -> None:
        a, r = len(groups[0]), len(groups[1])
        results, scratch = views(groups[1], pointers[a : a + r]), views(groups[2], pointers[a + r :])
        for name in zeroed:
            provider.fill_zero(results[name], stream)
        if face == "backward":
            count = len(kept)
            own, rest = groups[0][:count], groups[0][count:]
            saved_parts, g_parts = rest[: len(signature.saved)], rest[len(signature.saved) :]
            have = views(own, pointers[:count])
            saved = views(saved_parts, pointers[count : count + len(saved_parts)])
            given: dict[str, ArrayView | None] = dict.fromkeys([*signature.outputs, *signature.passes])
            given |= views(g_parts, pointers[count + len(saved_parts) : a])
            op.backward(plan, have, saved, given, results, scratch, stream)
            return
        inputs = views(groups[0], pointers[:a])
        if face == "measure":
            op.measure(plan, inputs, results, scratch, stream)
        else:
            op.forward(plan, inputs, results, results, scratch, stream)

    return step


def _parts(named: Sequence[tuple[str, Meta]]) -> list[Part]:
    return [(name, meta.shape, meta.dtype) for name, meta in named]
