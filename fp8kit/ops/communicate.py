"""``gather_rows``, ``reduce_rows``, ``reduce_all``: what ranks do together with whole tensors.

For each the gradient is its transpose: of a gathering, sums of which each rank gets its rows, and the other
way round; of a sum that all get, the sum of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8kit import collectives
from fp8kit.errors import ShapeError
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet


@dataclass(frozen=True)
class GroupSpec:
    """``group``: name of the ``collectives``; ``label``: what errors call the layer."""

    group: str
    label: str = ""


Move = Callable[[Plan, WorkingSet, Any, Any], None]


class _Communication(Operation):
    """x h (n, ...) -> y, which ``move`` fills; ``move_back`` takes y's gradient to x's."""

    move: Move
    move_back: Move
    results: ClassVar[tuple[str, ...]] = ("y",)

    def communicates(self, spec: GroupSpec) -> bool:
        return True

    def _shape(self, ranks: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def infer(self, spec: GroupSpec, metas: Metas, needs: Needs) -> Signature:
        x, ranks = metas["x"], collectives.named(spec.group).size
        if x is None or not x.shape:
            raise ShapeError(self.name, "x", None if x is None else "no dimension", "at least one")
        return Signature({"y": Meta(self._shape(ranks, x.shape), x.dtype)}, grads={"x": x} if needs else {})

    def plan(self, spec: GroupSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        found = collectives.named(spec.group)
        return Plan(spec, self.infer(spec, metas, needs), kernels, extra=found)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        self.move(plan, ws, ws.inputs["x"], ws.outputs["y"])

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        self.move_back(plan, ws, cotangents["y"], ws.outputs["x"])


def _gather(plan: Plan, ws: WorkingSet, x: Any, y: Any) -> None:
    plan.extra.all_gather(x, y, ws.stream, plan.spec.label)


def _scatter(plan: Plan, ws: WorkingSet, x: Any, y: Any) -> None:
    plan.extra.reduce_scatter(x, y, ws.stream, plan.spec.label)


def _sum(plan: Plan, ws: WorkingSet, x: Any, y: Any) -> None:
    ws.kernels.copy(x, y, ws.stream)
    plan.extra.all_reduce(y, "sum", ws.stream, plan.spec.label)


class GatherRows(_Communication):
    """y (P n, ...): the ranks' x one after the other."""

    name = "gather_rows"

    def _shape(self, ranks: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        return ranks * shape[0], *shape[1:]

    move, move_back = staticmethod(_gather), staticmethod(_scatter)


class ReduceRows(_Communication):
    """y (n / P, ...): this rank's rows of the sum of the ranks' x. ShapeError where ranks do not divide
    n."""

    name = "reduce_rows"

    def _shape(self, ranks: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape[0] % ranks:
            raise ShapeError(self.name, "x", f"shape {shape}", f"a first dimension that {ranks} divides")
        return shape[0] // ranks, *shape[1:]

    move, move_back = staticmethod(_scatter), staticmethod(_gather)


class ReduceAll(_Communication):
    """y: the sum of the ranks' x. Its gradient is the sum of the ranks' gradients."""

    name = "reduce_all"

    move = move_back = staticmethod(_sum)


gather_rows, reduce_rows, reduce_all = GatherRows(), ReduceRows(), ReduceAll()
