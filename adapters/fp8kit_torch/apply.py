"""Calling an operation on tensors, in one of two ways that give the same bits.

Eagerly, a node of the graph (``nodes``) goes straight to the plan: amaxes land in the history's own row, and
a residual stream that goes through an operation is the input itself. Under ``torch.compile`` the operation's
torch op is called instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.scaling import FORWARD_SLOTS
from fp8kit_torch.constants import constant_result
from fp8kit_torch.nodes import NO_STATE, Fused, Step, Wiring, run_step
from fp8kit_torch.ops import OPS, record_
from fp8kit_torch.plans import Call, Stand, call, policy_now
from fp8kit_torch.ready import Ready
from fp8kit_torch.state import ScalingState
from fp8kit_torch.texts import decode

_PLAIN = (Tensor, torch.nn.Parameter)


class Prepared(NamedTuple):
    """A call that will not be refused: its plan, its tensors, contiguous, and whether any of them wants a
    gradient."""

    ready: Ready
    tensors: Sequence[Tensor]
    wanted: bool

    def run(self, wiring: Wiring = NO_STATE, fused: Fused | None = None) -> dict[str, Tensor]:
        """The outputs by name."""
        ready, tensors, wanted = self
        outputs: Sequence[Tensor]
        if wanted:
            outputs = run_step(Step(ready, wiring, fused), tensors)
        else:
            made, _, _ = ready.forward(tensors, wiring.scales, wiring.front)
            outputs = [*made, *(tensors[i] for i in ready.through)]
        return dict(zip(ready.names, outputs, strict=True))


def prepare(what: Call, tensors: Sequence[Tensor], alike: bool = False) -> Prepared:
    """An eager call, before it runs. Raises what ``infer`` raises, BackendError for tensors on different
    devices, and, with ``alike``, FormatError for one of another dtype than x."""
    needs: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        needs = tuple(compress(what.names, [t.requires_grad for t in tensors]))
    tensors = [t if t.is_contiguous() else t.contiguous() for t in tensors]
    return Prepared(what.ready(tensors, needs, alike), tensors, bool(needs))


def apply(
    what: Call, tensors: Sequence[Tensor], wiring: Wiring = NO_STATE, fused: Fused | None = None
) -> dict[str, Tensor]:
    """The outputs of an eager call by name. Raises what ``prepare`` raises."""
    return prepare(what, tensors).run(wiring, fused)


def rehearse(name: str, spec: Any, inputs: Mapping[str, Tensor | Stand], needs: tuple[str, ...] = ()) -> None:
    """Refuse what an eager ``run`` would refuse of inputs, and run nothing; some may stand for what is not
    there yet. ``needs``: names of those whose gradient will be wanted, where that matters. Within
    ``torch.compile`` nothing: there all is refused before anything runs."""
    if not torch.compiler.is_compiling():
        call(name, spec, tuple(inputs)).rehearse(list(inputs.values()), needs)


class Traced(NamedTuple):
    """How a layer's FP8 state hangs on its operation in a compiled graph."""

    forward: ScalingState
    backward: ScalingState
    recipe: str  # text
    record: bool
    when: int  # see ``ops.record_``


@constant_result
def described(
    name: str, spec: str, names: tuple[str, ...], gemms: tuple[str, ...], scaled: bool, policy: str
) -> tuple[str, tuple[str, ...]]:
    """Within ``torch.compile``: text of a call whose spec is given as a text, and names of its outputs."""
    found = call(name, decode(spec), names, gemms, scaled, policy)
    return found.text, found.outputs


def trace(
    name: str,
    spec: str,
    names: tuple[str, ...],
    tensors: list[Tensor],
    gemms: tuple[str, ...] = (),
    state: Traced | None = None,
    gemm: int | None = None,
    outputs: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """The outputs by name of a call within ``torch.compile``; ``spec``: its text. ``gemm``: the one GEMM that
    this is about, if not all."""
    text, known = described(name, spec, names, gemms, state is not None, policy_now().text)
    outputs = outputs or known
    needs = ""
    if torch.is_grad_enabled():
        needs = ",".join([n for n, t in zip(names, tensors, strict=True) if t.requires_grad])
    if state is None:
        made = OPS[name](tensors, None, [], text, needs, "")
    else:
        late, scale, history = state.backward, state.forward.scale, state.forward.amax_history
        first = FORWARD_SLOTS * (gemm or 0)
        if gemm is not None:
            scale = scale[first : first + FORWARD_SLOTS]
        made = OPS[name](
            tensors, scale, [late.scale, late.amax_history, late.handle], text, needs, state.recipe
        )
        if state.record:
            amaxes = made[len(outputs)]
            if gemm is not None:
                amaxes = torch.nn.functional.pad(amaxes, (first, history.shape[1] - first - FORWARD_SLOTS))
            record_(history, amaxes, state.forward.handle, state.recipe, state.when)
    return dict(zip(outputs, made[: len(outputs)], strict=True))


def run(
    name: str, spec: Any, inputs: Mapping[str, Tensor | None], outputs: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """The outputs by name of an operation without FP8 state, whichever way. ``inputs`` that are None are left
    out.

    ``spec``: the spec, or its text where this is called from within ``torch.compile``. ``outputs``: their
    names, where they are others than ``Call.outputs`` knows; asked for within ``torch.compile`` only.
    """
    there = {n: t for n, t in inputs.items() if t is not None}
    if torch.compiler.is_compiling():
        return trace(name, spec, tuple(there), list(there.values()), outputs=outputs)
    if isinstance(spec, str):
        spec = decode(spec)
    there = {
        n: t if type(t) in _PLAIN or not hasattr(t, "held_in_fp8") else t.dequantize()
        for n, t in there.items()
    }
    return apply(call(name, spec, tuple(there)), list(there.values()))
