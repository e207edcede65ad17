"""``gather_rows``, ``reduce_rows``, ``reduce_all``, ``columns_to_rows``, ``rows_to_columns``: what ranks do
together with whole tensors.

For each the gradient is its transpose: of a gathering, sums of which each rank gets its rows, and the other
way round; of a sum that all get, the sum of all gradients; of an exchange, the exchange back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fp8kit import collectives
from fp8kit.arrays import Shape
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

    def _shape(self, ranks: int, shape: Shape) -> Shape:
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

    def _shape(self, ranks: int, shape: Shape) -> Shape:
        return ranks * shape[0], *shape[1:]

    move, move_back = staticmethod(_gather), staticmethod(_scatter)


class ReduceRows(_Communication):
    """y (n / P, ...): this rank's rows of the sum of the ranks' x. ShapeError where ranks do not divide
    n."""

    name = "reduce_rows"

    def _shape(self, ranks: int, shape: Shape) -> Shape:
        if shape[0] % ranks:
            raise ShapeError(self.name, "x", f"shape {shape}", f"a first dimension that {ranks} divides")
        return shape[0] // ranks, *shape[1:]

    move, move_back = staticmethod(_scatter), staticmethod(_gather)


class ReduceAll(_Communication):
    """y: the sum of the ranks' x. Its gradient is the sum of the ranks' gradients."""

    name = "reduce_all"

    move = move_back = staticmethod(_sum)


def _to_columns(plan: Plan, ws: WorkingSet, x: Any, y: Any) -> None:
    """x (P n, m) -> y (n, P m)."""
    parts, (rows, columns) = ws.scratch["parts"], y.shape
    plan.extra.all_to_all(x, parts, ws.stream, plan.spec.label)
    count = plan.extra.size
    shape = rows, count, columns // count
    apart = parts.reshape(count, rows, columns // count).transpose(1, 0, 2)
    ws.kernels.copy(apart, y.reshape(*shape), ws.stream)


def _to_rows(plan: Plan, ws: WorkingSet, x: Any, y: Any) -> None:
    """x (n, P m) -> y (P n, m)."""
    parts, (rows, columns) = ws.scratch["parts"], x.shape
    count = plan.extra.size
    shape = count, rows, columns // count
    apart = x.reshape(rows, count, columns // count).transpose(1, 0, 2)
    ws.kernels.copy(apart, parts.reshape(*shape), ws.stream)
    plan.extra.all_to_all(parts, y, ws.stream, plan.spec.label)


class _Exchange(_Communication):
    """x (n, m): one of its dimensions is divided by the ranks, the other one put together."""

    split: int  # the dimension that is divided

    def _shape(self, ranks: int, shape: Shape) -> Shape:
        if len(shape) != 2 or shape[self.split] % ranks:
            wanted = f"(n, m), dimension {self.split} a multiple of {ranks}"
            raise ShapeError(self.name, "x", f"shape {shape}", wanted)
        rows, columns = shape
        return (rows * ranks, columns // ranks) if self.split else (rows // ranks, columns * ranks)

    def plan(self, spec: GroupSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        found = super().plan(spec, metas, needs, kernels)
        y = found.signature.outputs["y"]
        parts = {"parts": Meta((math.prod(y.shape),), y.dtype)}
        return replace(found, scratch=parts, backward_scratch=parts if needs else {})


class ColumnsToRows(_Exchange):
    """y (P n, m / P): the ranks' rows one after the other, of each this rank's columns. ShapeError where
    ranks do not divide m."""

    name, split = "columns_to_rows", 1

    move, move_back = staticmethod(_to_rows), staticmethod(_to_columns)


class RowsToColumns(_Exchange):
    """y (n / P, P m): this rank's rows, of which each rank gives its columns, in the ranks' order. ShapeError
    where ranks do not divide n."""

    name, split = "rows_to_columns", 0

    move, move_back = staticmethod(_to_columns), staticmethod(_to_rows)


gather_rows, reduce_rows, reduce_all = GatherRows(), ReduceRows(), ReduceAll()
columns_to_rows, rows_to_columns = ColumnsToRows(), RowsToColumns()
