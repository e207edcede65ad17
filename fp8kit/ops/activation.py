"""``activation``: the activations of ``backends.activation`` alone, without norm and products around them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8kit.arguments import choice, number, shown
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import float32
from fp8kit.ops import partition as split
from fp8kit.ops.partition import Partition
from fp8kit.ops.product import row_count, want, want_rows
from fp8kit.spec import (
    Meta,
    Metas,
    Needs,
    Operation,
    Partitions,
    Plan,
    Shapes,
    Signature,
    Views,
    WorkingSet,
    workspace,
)


def activation_numbers(
    operation: str, activation: str, params: Mapping[str, Any] | None
) -> tuple[float, ...]:
    """The numbers that ``activation``'s kernels take, from ``params`` by name and the defaults of
    ``backends.activation``.

    FormatError for an unknown activation, a name that it does not have, what is no finite number, and a limit
    that is not positive.
    """
    row = ACTIVATIONS[choice(operation, "activation", activation, ACTIVATIONS, FormatError)]
    if params is not None and not isinstance(params, Mapping):
        raise FormatError(operation, "activation_params", shown(params), "a mapping of names to numbers")
    given = dict(params or {})
    unknown = [name for name in given if name not in row.params]
    if unknown:
        wanted = f"names out of {', '.join(row.params)}" if row.params else f"none for {activation}"
        raise FormatError(operation, "activation_params", ", ".join(map(repr, unknown)), wanted)
    for name, value in given.items():
        least, above = (0.0, 0.0) if name == "limit" else (-math.inf, None)
        argument = f"activation_params[{name!r}]"
        number(operation, argument, value, kind=FormatError, least=least, above=above)
    return tuple(float(given.get(name, default)) for name, default in row.params.items())


def all_numbers(
    operation: str, argument: str, activation: str, params: tuple[float, ...]
) -> tuple[float, ...]:
    """``params``, or the defaults for (). FormatError for an unknown activation and another count."""
    defaults = activation_numbers(operation, activation, None)
    if params and len(params) != len(defaults):
        raise FormatError(operation, argument, params, f"{len(defaults)} numbers for {activation}")
    return params or defaults


@dataclass(frozen=True)
class ActivationSpec:
    """``activation``: a name of ``backends.activation``; ``features`` of the input, of a gated one twice the
    output's; ``params``: its numbers, see ``activation_numbers``; () is the defaults. ``amax``: the amaxes of
    y and of x's gradient are taken on the way."""

    activation: str
    features: int
    params: tuple[float, ...] = ()
    amax: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", all_numbers("activation", "params", self.activation, self.params))
        if self.features % ACTIVATIONS[self.activation].parts:
            raise ShapeError("activation", "features", self.features, f"an even number for {self.activation}")


class Activation(Operation):
    """y = activation(x + bias0). Inputs x h (..., F), or h (..., 2 F) of a gated one; bias0 h, x's features,
    or None. Outputs y h (..., F); with ``spec.amax`` amax float32 [1]. Gradients of x and bias0, and with
    ``spec.amax`` amax."""

    name = "activation"

    def independent_rows(self, spec: ActivationSpec, saved: Collection[str]) -> tuple[str, ...]:
        return () if spec.amax else ("x",)

    def partitions(self, spec: ActivationSpec, metas: Metas, views: Shapes) -> Partitions:
        found = split.rows(metas, views, "x")
        if ACTIVATIONS[spec.activation].parts > 1 and "x" not in views:  # the two halves lie in one dimension
            return found
        return (*found, Partition("inner", (("x", -1, -1), ("bias0", -1, -1))))

    def part(self, spec: ActivationSpec, partition: Partition, count: int) -> Any:
        return None if spec.features % count else replace(spec, features=spec.features // count)

    def infer(self, spec: ActivationSpec, metas: Metas, needs: Needs) -> Signature:
        x = want_rows(self.name, "x", metas, spec.features)
        amax = {"amax": Meta((1,), float32, zero=True)} if spec.amax else {}
        grads = {"x": x} | amax if "x" in needs else {}
        biased = metas.get("bias0") is not None
        if biased:
            bias = want(self.name, "bias0", metas, (spec.features,), x.dtype)
            grads |= {"bias0": bias} if "bias0" in needs else {}
        y = Meta((*x.shape[:-1], spec.features // ACTIVATIONS[spec.activation].parts), x.dtype)
        kept = ("x", *(("bias0",) if biased else ())) if grads else ()
        return Signature({"y": y} | amax, {}, kept, grads)

    def plan(self, spec: ActivationSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        x = want_rows(self.name, "x", metas, spec.features)
        space = workspace(kernels.act_bwd_workspace(row_count(x), spec.features))
        return Plan(spec, self.infer(spec, metas, needs), kernels, {}, space)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        s: ActivationSpec = plan.spec
        x_and_bias = ws.inputs["x"].rows(), ws.inputs.get("bias0")
        out = ws.outputs["y"].rows(), ws.outputs.get("amax"), None
        ws.kernels.act_fwd(*x_and_bias, *out, s.activation, s.params, ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        s: ActivationSpec = plan.spec
        grads, dx = ws.outputs, ws.outputs.get("x")
        dy_x_and_bias = cotangents["y"].rows(), ws.inputs["x"].rows(), ws.inputs.get("bias0")
        out = None if dx is None else dx.rows(), grads.get("bias0"), grads.get("amax"), None
        ws.kernels.act_bwd(*dy_x_and_bias, *out, s.activation, s.params, ws.scratch["workspace"], ws.stream)


activation = Activation()
