"""``activation``: the activations of ``backends.activation`` alone, without norm and products around them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fp8kit.arguments import choice, number, shown
from fp8kit.arrays import ArrayView
from fp8kit.backends.activation import ALL
from fp8kit.backends.protocol import Cast
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
    """Returns the numbers that ``activation``'s kernels take, from ``params`` by name and the defaults of
    ``backends.activation``.

    FormatError for an unknown activation, a name that it does not have, a number that is not finite, and a
    limit that is not positive.
    """
    row = ALL[choice(operation, "activation", activation, ALL, FormatError)]
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


def want_learned(operation: str, activation: str, metas: Metas, dtype: Any) -> dict[str, Meta]:
    """Returns the activation's learned numbers by name, checked: each h (1,), of ``dtype``."""
    return {name: want(operation, name, metas, (1,), dtype) for name in ALL[activation].learned}


def activate(
    ws: WorkingSet,
    activation: str,
    params: tuple[float, ...],
    x: ArrayView,
    bias: ArrayView | None,
    y: ArrayView | None,
    amax: ArrayView | None = None,
    cast: Cast | None = None,
) -> None:
    """y = activation(x + bias) by the kernel that has it, learned numbers from ``ws.inputs``. Those that have
    some write y alone: no ``cast``, and the ``amax`` in a further pass."""
    k, stream = ws.kernels, ws.stream
    if not ALL[activation].learned:
        k.act_fwd(x, bias, y, amax, cast, activation, params, stream)
        return
    assert y is not None and cast is None
    k.xielu_fwd(x, bias, ws.inputs["alpha_p"], ws.inputs["alpha_n"], y, params, stream)
    if amax is not None:
        k.amax(y, amax, y.shape, stream)


def activate_bwd(
    ws: WorkingSet,
    activation: str,
    params: tuple[float, ...],
    given: tuple[ArrayView, ArrayView, ArrayView | None],
    out: tuple[ArrayView | None, ArrayView | None],
    space: ArrayView,
    amax: ArrayView | None = None,
    cast: Cast | None = None,
) -> None:
    """The gradients of ``activate``. ``given``: dy, x and bias; ``out``: dx and dbias. Those of learned
    numbers go to ``ws.outputs``, or to the scratch "alphas" where they are not wanted. ``space``: of
    ``gradient_workspace``."""
    k, stream, (dy, x, bias), (dx, dbias) = ws.kernels, ws.stream, given, out
    if not ALL[activation].learned:
        k.act_bwd(dy, x, bias, dx, dbias, amax, cast, None, activation, params, space, stream)
        return
    assert dx is not None and cast is None
    numbers = ws.inputs["alpha_p"], ws.inputs["alpha_n"]
    spare = ws.scratch["alphas"]
    grads = [ws.outputs.get(name) or spare.slice(0, i, 1) for i, name in enumerate(ALL[activation].learned)]
    k.xielu_bwd(dy, x, bias, *numbers, dx, *grads, params, space, stream)
    if dbias is not None:
        k.sum_rows(dx, dbias, space, stream)
    if amax is not None:
        k.amax(dx, amax, dx.shape, stream)


def gradient_workspace(kernels: Any, activation: str, rows: int, features: int) -> int:
    """Bytes of ``activate_bwd``'s workspace for an x of (rows, features)."""
    if not ALL[activation].learned:
        return int(kernels.act_bwd_workspace(rows, features))
    sizes = kernels.xielu_bwd_workspace(rows, features), kernels.column_sum_workspace(rows, features)
    return int(max(sizes))


def gradient_scratch(activation: str, dtype: Any) -> dict[str, Meta]:
    """Returns further temporaries of ``activate_bwd``: gradients of learned numbers, where they are not
    outputs."""
    learned = ALL[activation].learned
    return {"alphas": Meta((len(learned),), dtype)} if learned else {}


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
        if self.features % ALL[self.activation].parts:
            raise ShapeError("activation", "features", self.features, f"an even number for {self.activation}")


class Activation(Operation):
    """y = activation(x + bias0). Inputs x h (..., F), or h (..., 2 F) of a gated one; bias0 h, x's features,
    or None; learned numbers h (1,) each, of an activation that has some. Outputs y h (..., F); with
    ``spec.amax`` amax float32 [1]. Gradients of all inputs, and with ``spec.amax`` amax."""

    name = "activation"
    parameters: ClassVar[tuple[str, ...]] = ("alpha_p", "alpha_n")

    def independent_rows(self, spec: ActivationSpec, saved: Collection[str]) -> tuple[str, ...]:
        return () if spec.amax else ("x",)

    def partitions(self, spec: ActivationSpec, metas: Metas, views: Shapes) -> Partitions:
        found = split.rows(metas, views, "x")
        if ALL[spec.activation].parts > 1 and "x" not in views:  # the two halves lie in one dimension
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
        learned = want_learned(self.name, spec.activation, metas, x.dtype)
        grads |= {name: meta for name, meta in learned.items() if name in needs}
        y = Meta((*x.shape[:-1], spec.features // ALL[spec.activation].parts), x.dtype)
        kept = ("x", *(("bias0",) if biased else ()), *learned) if grads else ()
        return Signature({"y": y} | amax, {}, kept, grads)

    def plan(self, spec: ActivationSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        x = want_rows(self.name, "x", metas, spec.features)
        size = row_count(x), spec.features
        scratch = workspace(gradient_workspace(kernels, spec.activation, *size))
        scratch |= gradient_scratch(spec.activation, x.dtype)
        if ALL[spec.activation].learned and "x" not in needs:
            scratch["dx"] = Meta(size, x.dtype)
        return Plan(spec, self.infer(spec, metas, needs), kernels, {}, scratch)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        s: ActivationSpec = plan.spec
        x_and_bias = ws.inputs["x"].rows(), ws.inputs.get("bias0")
        activate(ws, s.activation, s.params, *x_and_bias, ws.outputs["y"].rows(), ws.outputs.get("amax"))

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        s: ActivationSpec = plan.spec
        grads, dx = ws.outputs, ws.outputs.get("x") or ws.scratch.get("dx")
        x, rows = ws.inputs["x"].rows(), None if dx is None else dx.rows()
        dy, space = cotangents["y"].rows(), ws.scratch["workspace"]
        given, out = (dy, x, ws.inputs.get("bias0")), (rows, grads.get("bias0"))
        activate_bwd(ws, s.activation, s.params, given, out, space, grads.get("amax"))


activation = Activation()
