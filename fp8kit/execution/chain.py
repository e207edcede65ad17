"""``chain``: several operations, one after the other, as one operation. A frontend's graph gets one node for
all of them, backward one block of saved memory, and a replay is one call. The kernels and their order are
those of the operations run one by one, and so are the bits. Run one by one, an operation may compute the
gradient of an input although no earlier operation uses it; a chain leaves that gradient out, and its amax.

A chain saves host time, which is most of what a small layer takes. A large layer is better run operation by
operation, because each then frees its memory as soon as it can.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8kit.buffers import Lasting
from fp8kit.errors import AutogradError, Fp8kitError
from fp8kit.execution import lifetimes
from fp8kit.execution.lifetimes import Lives
from fp8kit.execution.memory import Span
from fp8kit.execution.refusals import plan_of, signature_of
from fp8kit.ops.registry import OPERATIONS
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views, WorkingSet


@dataclass(frozen=True)
class ChainSpec:
    """``operations``: the operations' names, in order; ``specs``: their specs. ``sources``: for each
    operation, which of its inputs an earlier operation makes, as (input's name, number of the earlier
    operation, name of its output). No output is the input of two operations. The chain's output "y" is the
    first output of the last operation."""

    operations: tuple[str, ...]
    specs: tuple[Any, ...]
    sources: tuple[tuple[tuple[str, int, str], ...], ...]


class _Step(NamedTuple):
    """One operation of a chain, with its ``plan`` where there is one. Four mappings go from the operation's
    own names to the chain's: ``inputs``, ``outputs``, ``cotangents`` (an output -> the name of its gradient,
    which backward reads) and ``gradients`` (an input -> the name of its gradient, which backward fills)."""

    number: int
    operation: Operation
    metas: dict[str, Meta | None]
    needs: frozenset[str]
    signature: Signature
    plan: Plan | None
    inputs: dict[str, str]
    outputs: dict[str, str]
    cotangents: dict[str, str]
    gradients: dict[str, str]

    def own(self, name: str) -> str:
        """The chain's name of something that belongs to this operation alone."""
        return f"{self.number}.{name}"

    def value(self, name: str) -> str:
        """The chain's name of an input or output."""
        return self.inputs.get(name) or self.outputs[name]

    def gradient(self, name: str) -> str:
        """The chain's name of what backward fills."""
        return self.gradients.get(name, self.own(name))


class _Ready(NamedTuple):
    """A step, its plan, and its temporaries' names: the step's own -> the chain's."""

    step: _Step
    plan: Plan
    scratch: dict[str, str]
    backward_scratch: dict[str, str]


class Chain(Operation):
    """Operations one after the other (``ChainSpec``).

    What belongs to operation number i alone is called "i.name": inputs, amaxes, saved buffers, gradients. An
    output of operation i that is a later one's input is called "i:name", and so is its gradient. The output
    is "y".
    """

    name = "chain"
    parameters = ("weight", "bias")

    def argument(self, name: str, names: Container[str] = ()) -> str:
        return name.partition(".")[2]

    def _steps(
        self, spec: ChainSpec, metas: Metas, needs: frozenset[str], kernels: Any = None
    ) -> tuple[list[_Step], dict[str, Meta]]:
        """The steps, and the arrays that pass between them by name, without the chain's result. With
        ``kernels`` they have plans."""
        known: dict[str, Any] = dict(metas)
        values: dict[tuple[int, str], str] = {}
        wanted, steps = set(needs), []
        for i, (name, own, sources) in enumerate(zip(spec.operations, spec.specs, spec.sources, strict=True)):
            operation, start = OPERATIONS[name], f"{i}."
            inputs = {key.removeprefix(start): key for key in metas if key.startswith(start)}
            inputs |= {argument: values[at, output] for argument, at, output in sources}
            own_metas = {argument: known[value] for argument, value in inputs.items()}
            own_needs = frozenset(argument for argument, value in inputs.items() if value in wanted)
            plan = None
            with user_names(operation, own_metas):
                if kernels is None:
                    signature = signature_of(operation, own, own_metas, own_needs)
                else:
                    plan = plan_of(operation, own, own_metas, own_needs, kernels)
                    signature = plan.signature
            outputs = {
                output: f"{start}{output}" if meta.zero else f"{i}:{output}"
                for output, meta in signature.outputs.items()
            }
            if i == len(spec.operations) - 1:
                outputs[next(iter(outputs))] = "y"
            values |= {(i, output): value for output, value in outputs.items()}
            values |= {(i, output): inputs[source] for output, source in signature.passes.items()}
            known |= {outputs[output]: meta for output, meta in signature.outputs.items()}
            if own_needs:
                wanted.update(outputs.values())
            steps.append(_Step(i, operation, own_metas, own_needs, signature, plan, inputs, outputs, {}, {}))
        between = {value: meta for value, meta in known.items() if ":" in value}
        steps[-1].cotangents[next(iter(steps[-1].outputs))] = "y"
        for step in reversed(steps):
            self._route(step, steps, spec.sources[step.number])
        return steps, between

    def _route(self, step: _Step, steps: list[_Step], sources: tuple[tuple[str, int, str], ...]) -> None:
        """Name the gradients of a step's inputs. The gradient of an input that an earlier step makes is that
        step's cotangent, under the same name."""
        s = step.signature
        made = {argument: (at, output) for argument, at, output in sources}
        for argument in step.needs:
            passed = s.grad_passes.get(argument)
            if argument not in made:
                if passed is not None:
                    raise AutogradError(f"chain: {step.own(argument)}: its gradient is an output's own")
                step.gradients[argument] = step.own(argument)
                continue
            at, output = made[argument]
            if passed is None:
                step.gradients[argument] = steps[at].cotangents[output] = f"{at}:{output}"
            elif passed in step.cotangents:
                steps[at].cotangents[output] = step.cotangents[passed]
        for argument in s.grads:  # backward fills them although nobody reads them
            if argument in step.inputs and argument not in step.gradients:
                step.gradients[argument] = f"{step.number}:{argument}, unwanted"

    def infer(self, spec: ChainSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        return self._signature(*self._steps(spec, metas, needs))

    @staticmethod
    def _signature(steps: list[_Step], between: dict[str, Meta]) -> Signature:
        """The signature of what ``_steps`` returned."""
        last = steps[-1].signature.outputs
        outputs = {"y": next(iter(last.values()))}
        kept: dict[str, None] = {}
        saved: dict[str, Meta] = {}
        grads: dict[str, Meta] = {}
        backward_inputs: dict[str, Meta] = {}
        for step in steps:
            s = step.signature
            outputs |= {step.own(name): meta for name, meta in s.outputs.items() if meta.zero}
            saved |= {step.own(name): meta for name, meta in s.saved.items()}
            backward_inputs |= {step.own(name): meta for name, meta in s.backward_inputs.items()}
            for name in s.kept:
                value = step.value(name)
                if value in between:
                    saved[value] = between[value]
                else:
                    kept[value] = None
            for name, meta in s.grads.items():
                if ":" not in step.gradient(name):
                    grads[step.gradient(name)] = meta
        return Signature(outputs, saved, tuple(kept), grads, backward_inputs=backward_inputs)

    def plan(self, spec: ChainSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        steps, between = self._steps(spec, metas, needs, kernels)
        signature = self._signature(steps, between)
        ready = []
        forward = {value: meta for value, meta in between.items() if value not in signature.saved}
        backward = {
            step.gradient(name): meta
            for step in steps
            for name, meta in step.signature.grads.items()
            if ":" in step.gradient(name)
        }
        for step in steps:
            plan = step.plan
            assert plan is not None
            names = {name: f"{step.number}/{name}" for name in plan.scratch}
            forward |= {names[name]: meta for name, meta in plan.scratch.items()}
            back = {name: f"{step.number}/{name}" for name in plan.backward_scratch if step.needs}
            backward |= {back[name]: plan.backward_scratch[name] for name in back}
            ready.append(_Ready(step, plan, names, back))
        return Plan(spec, signature, kernels, forward, backward, ready)

    def lives(self, plan: Plan, backward: bool) -> Lives:
        """When each temporary of a pass is in use (``execution.lifetimes``). A step's own temporary is in use
        within the step. An array that passes between steps is in use from the step that fills it to the last
        step that reads it. Backward also says when saved arrays are last read, and when gradients are first
        filled."""
        found: dict[str, tuple[Span, ...]] = {}
        first: dict[str, float] = {}  # of what passes between steps, and of gradients
        last: dict[str, float] = {}
        done: dict[str, float] = {}
        clock = 0.0
        for step, own, *scratch in reversed(plan.extra) if backward else plan.extra:
            if backward and not step.needs:
                continue
            s, names, end = step.signature, scratch[backward], clock + 1
            filled, read, used = dict[str, float](), dict[str, float](), dict[str, float]()
            found |= dict.fromkeys(names.values(), ((clock, end),))
            if lifetimes.known(step.operation, own):
                lives = lifetimes.of(step.operation, own, step.metas, step.needs, backward)
                filled, read, used = dict(lives.filled), dict(lives.read), dict(lives.done)
                end = clock + lives.end + 1
                found |= dict.fromkeys(names.values(), ((clock, end),))
                spans = lifetimes.later(lives.spans, clock, end)
                found |= {names[name]: times for name, times in spans.items()}
            made = {name: step.gradient(name) for name in s.grads} if backward else step.outputs
            for name, value in made.items():
                first.setdefault(value, clock + filled.get(name, 0))
                last[value] = end
            for name, value in (step.cotangents if backward else step.inputs).items():
                last[value] = max(last.get(value, 0), clock + read.get(name, end - clock))
            done |= {step.own(name): clock + used.get(name, end - clock) for name in s.saved}
            done |= {step.value(name): end for name in s.kept}
            clock = end
        found |= {value: ((begin, last[value]),) for value, begin in first.items() if ":" in value}
        return Lives(found, first, {}, done, clock)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        there = {**ws.inputs, **ws.scratch, **ws.saved, **ws.outputs}
        for step, own, names, _ in plan.extra:
            s = step.signature
            inputs = {name: there[value] for name, value in step.inputs.items()}
            outputs = {name: there[value] for name, value in step.outputs.items()}
            saved = {name: there[step.own(name)] for name in s.saved}
            scratch = _part(ws.scratch, names)
            own_ws = ws._replace(inputs=inputs, outputs=outputs, saved=saved, scratch=scratch)
            step.operation.forward(own, own_ws)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        read = {**ws.inputs, **ws.saved}
        between = {**ws.scratch, **ws.outputs, "y": cotangents["y"]}
        for step, own, _, names in reversed(plan.extra):
            if not step.needs:
                continue
            s = step.signature
            found = {name: read[step.value(name)] for name in s.kept}
            found |= {name: read[step.own(name)] for name in s.backward_inputs}
            results = (*(name for name, meta in s.outputs.items() if not meta.zero), *s.passes)
            own_ws = ws._replace(
                inputs=found,
                outputs={name: between[step.gradient(name)] for name in s.grads},
                saved={name: ws.saved[step.own(name)] for name in s.saved},
                scratch=_part(ws.scratch, names),
            )
            incoming = {name: between.get(step.cotangents.get(name, "")) for name in results}
            step.operation.backward(own, own_ws, incoming)


@contextmanager
def user_names(operation: Operation, inputs: Container[str]) -> Iterator[None]:
    """Errors about the inputs of a step's operation name them as its user does."""
    try:
        yield
    except Fp8kitError as error:
        if error.argument is None:
            raise
        raise error.renamed(operation.name, operation.argument(error.argument, inputs)) from None


def _part(scratch: Views, names: Mapping[str, str]) -> Views:
    """A step's temporaries, by its own names."""
    if isinstance(scratch, Lasting):
        return scratch.again(names)
    return {own: scratch[name] for own, name in names.items()}


chain = Chain()

__all__ = ["Chain", "ChainSpec", "chain"]
