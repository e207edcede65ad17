"""What one custom call runs, as a value: ``Program``, its text, and its execution on pointers.

A program names a face of an operation, its spec, and the shapes and dtypes of the operation's inputs. From
that follow the arrays that come in and go out (``execution.bound.Interface``) and the scratch
(``execution.bound.BoundOp``). Nothing in it belongs to a process: the text is the same everywhere and enough
to run the program in a fresh process.
"""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import Device, Shape
from fp8kit.backends import dispatch
from fp8kit.backends.dispatch import SelectionPolicy
from fp8kit.backends.policy import policy_context
from fp8kit.errors import BackendError
from fp8kit.execution import watching
from fp8kit.execution.bound import BoundOp, Interface, views_at
from fp8kit.execution.codec import decode, encode
from fp8kit.inspection import Entry
from fp8kit.ops.registry import OPERATIONS
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Operation

log = logging.getLogger("fp8kit")

FORM = 2  # of the text; another number where older texts can no longer be run
Named = tuple[tuple[str, Meta], ...]


@dataclass(frozen=True)
class Program:
    """One call.

    * ``face``: "forward" (outputs, amaxes, saved), "backward" (grads and their amaxes) or "measure" (amaxes)
      of ``operation`` with ``spec``.
    * ``metas``: the operation's inputs as (name, Meta). ``needs``: inputs whose gradient is wanted.
    * ``cotangents``: results whose cotangent comes.
    * ``policy``: which implementations are chosen, as it was when the program was traced. ``plugins``: what
      there was to choose from beside fp8kit's own then: a program is traced and prepared anew when that
      changes.
    * ``views``: shapes that arrays have in JAX where the operation has them flattened (a kernel (K, 3, N) as
      (K, 3 N)), by name. The memory is the same, and so is the text: only what splits over devices reads it.
    """

    face: str
    operation: str
    spec: Any
    metas: Named
    needs: tuple[str, ...]
    cotangents: tuple[str, ...] = ()
    policy: SelectionPolicy = SelectionPolicy()  # noqa: RUF009  (a frozen value)
    plugins: str = field(default_factory=dispatch.plugins_fingerprint)
    views: tuple[tuple[str, Shape], ...] = ()

    @cached_property
    def op(self) -> Operation:
        """The operation itself."""
        if self.operation not in OPERATIONS:
            wanted = "one that register_operation registered in this process"
            raise BackendError("fp8kit.run", "operation", repr(self.operation), wanted)
        return OPERATIONS[self.operation]

    def __repr__(self) -> str:
        """What a printed jaxpr has of a call, such as ``linear forward: fprop f8_e4m3 * f8_e4m3``: the
        operation, and what its matrix products multiply in few bits, "by" the format of coded scales."""
        run = {"forward": ("fprop",), "backward": ("dgrad", "wgrad")}.get(self.face, ())
        words = []
        for own in self.op.products(self.spec):
            found = {} if own.fp8 is None else own.fp8.gemms
            for name, gemm in found.items():
                if name in run and gemm.compute != "high_precision":
                    words.append(f"{own.prefix}{name} {_short(gemm.a)} * {_short(gemm.b)}")
        return f"{self.operation} {self.face}" + (": " if words else "") + ", ".join(words)

    @cached_property
    def interface(self) -> Interface:
        """What goes in and comes out; raises what ``infer`` raises, AutogradError for a gradient that is not
        there."""
        return Interface(self.op, self.spec, dict(self.metas), self.needs)

    @cached_property
    def read(self) -> Named:
        """The arrays that come in but the cotangents, in order: backward's are what is kept, its own inputs,
        what was saved."""
        i = self.interface
        if self.face != "backward":
            return self.metas
        return (*i.kept_metas.items(), *i.backward_inputs.items(), *i.signature.saved.items())

    @cached_property
    def arguments(self) -> Named:
        """The arrays that come in, in order."""
        return *self.read, *((name, self.interface.result_metas[name]) for name in self.cotangents)

    @cached_property
    def results(self) -> Named:
        """The arrays that go out, in order, scratch not counted."""
        i = self.interface
        if self.face == "backward":
            return (*i.grads.items(), *i.grad_amaxes.items(), *i.grad_watched.items())
        if self.face == "measure":
            return tuple(i.amaxes.items())
        return (*i.outputs.items(), *i.amaxes.items(), *i.watched.items(), *i.signature.saved.items())

    @cached_property
    def watched(self) -> dict[str, Entry]:
        """What those results hold that are for the inspector."""
        i = self.interface
        names = {"forward": i.watched, "backward": i.grad_watched}.get(self.face, {})
        return watching.entries(self.op, self.spec, names)

    @cached_property
    def is_whole(self) -> bool:
        """Whether it runs whole, since the inspector looks at whole tensors or rounds them."""
        watches = [own.watch.of(own.prefix) for own in self.op.products(self.spec) if own.watch is not None]
        return bool(self.watched) or any(own.rounded for own in watches)

    def seen(self, kind: str) -> list[tuple[str, Shape]]:
        """Names and shapes of "arguments" or "results" as JAX has them, int64 as the operation has it."""
        views = dict(self.views)
        return [(name, views.get(name, meta.shape)) for name, meta in getattr(self, kind)]

    def named(self, arrays: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments by name, and cotangents by name."""
        own = {name: array for (name, _), array in zip(self.read, arrays, strict=False)}
        return own, dict(zip(self.cotangents, arrays[len(self.read) :], strict=True))

    def ordered(self, values: Mapping[str, Any], incoming: Mapping[str, Any]) -> list[Any]:
        """Returns the inverse of ``named``: one list."""
        return [*(values[name] for name, _ in self.read), *(incoming[name] for name in self.cotangents)]

    def text(self, scratch: int) -> str:
        """Returns the program as text, with the bytes of scratch that it was compiled with."""
        own = self.face, self.operation, self.spec, self.metas, self.needs, self.cotangents, self.policy
        return json.dumps({"form": FORM, "program": encode((*own, scratch))})


def _short(operand: Quantizer) -> str:
    """An operand's format by JAX's short name of such a dtype."""
    scales = " by f8_e4m3" if operand.granularity.startswith("nvfp4") else " by f8_e8m0"
    name = f"f{operand.format.bits}_{operand.format}".lower()
    return name + scales * operand.coded_scales


class XlaOp(BoundOp):
    """A program on a device, ready to run on arrays that XLA allocated. ``temporaries``: the layout of its
    scratch. ``holds_interpreter``: see ``Operation``."""

    def __init__(self, program: Program, device: Device) -> None:
        with policy_context(program.policy):
            own = program.op, program.spec, dict(program.metas), program.needs
            super().__init__(*own, device, dispatch.kernels(device), streaming=False)
        self._chosen = self.kernels.policy.chosen
        self.holds_interpreter = program.op.holds_interpreter
        self.face, self.cotangents = program.face, program.cotangents
        layouts = {"forward": self.scratch, "backward": self.backward_scratch}
        self.temporaries = layouts.get(self.face, self.measure_scratch)
        zeroed = self.amaxes if self.face != "backward" else self.grads | self.grad_amaxes
        self._zeroed = {name for name, meta in zeroed.items() if meta.zero}
        products = program.op.products(program.spec)
        scales = {f"{own.prefix}{operand}_scale" for own in products for operand in ("x", "w")}
        # of delayed scaling; nothing waits for a GPU's
        looked_at = self.inputs if device == arrays.CPU and self.face == "forward" else ()
        self._scales = [(i, name) for i, name in enumerate(looked_at) if name in scales]

    @property
    def current(self) -> bool:
        """Whether the kernels are still those that its policy chooses: what is registered may have changed
        since."""
        return self._chosen.get(self.device) is self.kernels

    def run(self, pointers: Sequence[int], stream: int) -> None:
        """Run on the addresses of the program's arguments, its results and its scratch, where it has some."""
        rest = iter(pointers)

        def some(names: Any) -> list[int]:
            return list(islice(rest, len(names)))

        def views(metas: dict[str, Meta], addresses: Sequence[int]) -> dict[str, Any]:
            parts = [(name, meta.shape, meta.dtype) for name, meta in metas.items()]
            found = views_at(parts, addresses, self.device)
            for name in self._zeroed & found.keys():
                arrays.provider(self.device).fill_zero(found[name], stream)
            return found

        def scratch() -> dict[str, Any]:
            return self.temporaries.at(next(rest, 0), self.device)

        saved = self.signature.saved
        if self.face == "backward":
            kept, scales, held = some(self.kept), some(self.backward_inputs), views(saved, some(saved))
            incoming = dict(zip(self.cotangents, some(self.cotangents), strict=True))
            grads, amaxes = views(self.grads, some(self.grads)), some(self.grad_amaxes)
            views(self.grad_amaxes, amaxes)
            amaxes += some(self.grad_watched)
            cotangents = [incoming.get(name) for name in self.results]
            self.run_backward(kept, scales, held, cotangents, grads, amaxes, scratch(), stream)
            return
        inputs, outputs = some(self.inputs), some(self.outputs) if self.face == "forward" else []
        for i, name in self._scales:
            if ctypes.c_float.from_address(inputs[i]).value == 0:
                _warn_of_zero(f"{self.operation.name}: {name}")
        amaxes = some(self.amaxes)
        views(self.amaxes, amaxes)
        watched = some(self.watched) if self.face == "forward" else []
        if self.face == "measure":
            self.run_measure(inputs, amaxes, scratch(), stream)
        else:
            amaxes += watched
            self.run_forward(inputs, outputs, amaxes, views(saved, some(saved)), scratch(), stream)


@cache
def _warn_of_zero(what: str) -> None:
    """Said once, and not raised: other devices may wait for this one at a collective."""
    log.warning(
        "%s is 0, which makes NaN. Where pmap, or shard_map with check_vma=False, goes around jax.grad, the "
        "next state is the sum of the devices' gradients: psum it, do not take it as it is",
        what,
    )


def prepare(text: str, device: Device) -> XlaOp:
    """Returns what a program's text runs on a device. BackendError for a text of another fp8kit, and where
    the device needs other scratch than the program was compiled with."""
    try:
        found = json.loads(text)
        form = f"form {found.get('form')}"
    except (ValueError, AttributeError):  # an earlier fp8kit's calls do not begin with the text
        found, form = {}, "no text"
    if found.get("form") != FORM:
        raise BackendError("fp8kit.run", "program", form, f"form {FORM}: compiled by another fp8kit")
    *own, policy, scratch = decode(found["program"])
    op = XlaOp(Program(*own, policy), device)
    if op.temporaries.nbytes != scratch:
        wanted = f"{op.temporaries.nbytes} bytes: compiled by another fp8kit or for another kind of device"
        raise BackendError("fp8kit.run", "scratch", f"{scratch} bytes", wanted)
    return op
