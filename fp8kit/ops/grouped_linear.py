"""``grouped_linear``: rows in groups, each multiplied by a weight of its own: y_i = x_i W_i^T + b_i."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.errors import ShapeError
from fp8kit.ops.partition import Products
from fp8kit.ops.product import Product, ProductSpec, row_count, want, want_rows
from fp8kit.ops.products import product_of
from fp8kit.spec import Meta, Metas, Needs, Plan, Signature, Views, WorkingSet, workspace


@dataclass(frozen=True)
class GroupedLinearSpec:
    """``product``: of every group; ``rows``: of each group, one group after the other."""

    product: ProductSpec
    rows: tuple[int, ...]

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        """The groups' products, whose names begin with the group's number: "0_", "1_"..., each with the rules
        that the inspector has for it, where it has some."""
        watch, fp8 = self.product.watch, self.product.fp8
        own = {} if watch is None else dict(watch.changed)
        prefixes = [f"{i}_" for i in range(len(self.rows))]
        return tuple(replace(self.product, prefix=name, fp8=own.get(name, fp8)) for name in prefixes)


class GroupedLinear(Products):
    """y_i = x_i W_i^T + b_i for the groups of rows x_i.

    Inputs: x h (..., in), whose rows are those of all groups; for each group i ``linear``'s weight, bias and
    scales, or, where it has rows, its cached weight: {i}_weight0, {i}_bias0, {i}_x_scale... Outputs: y h
    (..., out); {i}_x_amax, {i}_w_amax. Gradients: x, {i}_weight0, {i}_bias0, and {i}_g_amax; backward reads
    {i}_g_scale. A group without rows runs no product, and leaves its amaxes as they are; its gradients are 0.
    """

    name = "grouped_linear"

    def argument(self, name: str, names: Container[str] = ()) -> str:
        group, _, own = name.partition("_")
        if group.isdigit() and own in ("weight0", "bias0"):
            return f"{own[:-1]}{group}"
        return "inp" if name == "x" else name

    def products(self, spec: GroupedLinearSpec) -> tuple[ProductSpec, ...]:
        return spec.products

    def _groups(self, spec: GroupedLinearSpec, metas: Metas, needs: Needs) -> list[Product]:
        """The product of each group; in high precision where there are no rows. ShapeError or FormatError
        where inputs do not fit."""
        x = want_rows(self.name, "x", metas, spec.product.in_features)
        if min(spec.rows, default=-1) < 0 or sum(spec.rows) != row_count(x):
            wanted = f"{len(spec.rows)} numbers of rows that sum to {row_count(x)}"
            raise ShapeError(self.name, "rows", list(spec.rows), wanted)
        metas.get("rng")  # groups without rows draw nothing
        groups = []
        for own, rows in zip(spec.products, spec.rows, strict=True):
            if not rows:
                if own.weight_cached:  # it may be given, or not
                    for name in product_of(own, 0, x.dtype).weight_outputs():
                        metas.get(name)
                own = replace(own, fp8=None)
            groups.append(product_of(own, rows, x.dtype, rows > 0 and "x" in needs, needs))
            groups[-1].check(self.name, metas)
        return groups

    def _signature(self, groups: list[Product], metas: Metas, needs: Needs) -> Signature:
        x, made = want(self.name, "x", metas), Signature({})
        made.outputs["y"] = Meta((*x.shape[:-1], groups[0].n), x.dtype)
        if "x" in needs:
            made.grads["x"] = x
        kept: tuple[str, ...] = ()
        for group in groups:
            made.grads.update(group.grads())
            if group.m:
                made.outputs.update(group.outputs())
                made.saved.update(group.saved())
                made.backward_inputs.update(group.backward_inputs())
                kept += group.kept()
                kept += ("x",) if group.wgrad_reads_x and group.needs_w else ()
        return replace(made, kept=tuple(dict.fromkeys(kept)))

    def infer(self, spec: GroupedLinearSpec, metas: Metas, needs: Needs) -> Signature:
        return self._signature(self._groups(spec, metas, needs), metas, needs)

    def plan(self, spec: GroupedLinearSpec, metas: Metas, needs: Needs, kernels: Any) -> Plan:
        groups = self._groups(spec, metas, needs)
        space = workspace(max(group.workspace(kernels) for group in groups))
        forward, backward = dict(space), dict(space)
        for group in groups:
            forward |= group.scratch() if group.m else {}
            backward |= group.backward_scratch()
        return Plan(spec, self._signature(groups, metas, needs), kernels, forward, backward, groups)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        for group, x, y in _parts(plan.extra, ws.inputs["x"], ws.outputs["y"]):
            if group.m:
                group.cast_x(ws, x)
                group.fprop(ws, x, y)

    def measure(self, plan: Plan, ws: WorkingSet) -> None:
        for group, x in _parts(plan.extra, ws.inputs["x"]):
            if group.m:
                group.measure(ws, x)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        dx = ws.outputs["x"] if "x" in plan.signature.grads else None
        for group, g, x, to in _parts(plan.extra, cotangents["y"], ws.inputs.get("x"), dx):
            group.cast_g(ws, g)
            if group.needs_x:
                group.dgrad(ws, g, to)
            if group.needs_w and (group.m or not group.adds):
                nothing = ArrayView(g.ptr, (0, group.k), g.dtype, g.device, g.owner)
                group.wgrad(ws, g, x if group.m else nothing)


def _parts(groups: list[Product], *arrays: Any) -> Iterator[tuple[Any, ...]]:
    """(group, its rows of each array), one group after the other; None for an array that is not there."""
    start, whole = 0, [None if array is None else array.rows() for array in arrays]
    for group in groups:
        yield group, *(None if array is None else array.slice(0, start, group.m) for array in whole)
        start += group.m


grouped_linear = GroupedLinear()
