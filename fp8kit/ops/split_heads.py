"""``split_heads``: the queries, keys and values of a packed projection as arrays of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8kit.arrays import ArrayView
from fp8kit.errors import ShapeError
from fp8kit.ops.product import want_rows
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet


@dataclass(frozen=True)
class SplitHeadsSpec:
    """``parts``: (output's name, its heads) in the order in which they lie; heads have ``head_dim`` features.
    ``groups``: how often that order repeats, each time with ``heads / groups`` heads of each part: 1 has the
    parts one after the other; with as many groups as keys, each group has its queries, its key and its value.
    """

    parts: tuple[tuple[str, int], ...]
    head_dim: int
    groups: int = 1


class SplitHeads(Operation):
    """Input: x h (..., N), N the features of all parts. Outputs: each part h (..., heads, head_dim). Gradient
    of x.

    ``infer`` raises ShapeError where the features, or the groups and the heads, do not fit.
    """

    name = "split_heads"

    def outputs(self, spec: SplitHeadsSpec) -> tuple[str, ...]:
        return tuple(part for part, _ in spec.parts)

    def infer(self, spec: SplitHeadsSpec, metas: Metas, needs: Needs) -> Signature:
        for part, heads in spec.parts:
            if heads % spec.groups:
                raise ShapeError(self.name, part, f"{heads} heads", f"a multiple of {spec.groups} groups")
        x = want_rows(self.name, "x", metas, sum(heads for _, heads in spec.parts) * spec.head_dim)
        outputs = {part: Meta((*x.shape[:-1], heads, spec.head_dim), x.dtype) for part, heads in spec.parts}
        # zeroed: the place of a part that nothing was made of
        return Signature(outputs, grads={"x": x._replace(zero=True)} if "x" in needs else {})

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        for packed, apart in _pairs(plan.spec, ws.inputs["x"], ws.outputs):
            ws.kernels.copy(packed, apart, ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        for packed, apart in _pairs(plan.spec, ws.outputs["x"], cotangents):
            ws.kernels.copy(apart, packed, ws.stream)


split_heads = SplitHeads()


def _pairs(spec: SplitHeadsSpec, x: ArrayView, parts: Views) -> Iterator[tuple[ArrayView, ArrayView]]:
    """(a part inside x, the part by itself) of those that there are, as (rows, groups, features) both."""
    if not x.size:
        return
    rows, width = x.rows().shape
    offset = 0
    for name, heads in spec.parts:
        features, part = heads // spec.groups * spec.head_dim, parts.get(name)
        if part is not None:
            shape = (rows, spec.groups, features)
            yield x.with_strides(shape, (width, width // spec.groups, 1), offset), part.reshape(*shape)
        offset += features
