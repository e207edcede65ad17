"""``permute``: tokens to rows of their own, such as the experts they go to; ``unpermute``: the sum of each
token's rows; ``expert_rows``: the map of tokens to experts.

A map, int32 (R, 2), says for each row its (token, slot): the slot is the column of the row's probability,
such as the expert. (-1, -1) is an empty row, and each (token, slot) stands in one row at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fp8kit.arguments import integer, is_integer, shown
from fp8kit.arrays import ArrayView
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.formats import HIGH_PRECISION, int32, uint8
from fp8kit.ops.partition import Partition
from fp8kit.ops.product import want
from fp8kit.spec import Meta, Metas, Needs, Operation, Partitions, Plan, Shapes, Signature, Views, WorkingSet

# what functions of these operations call their inputs, for ``errors.on_behalf_of``
MAP_ARGUMENTS = {"row_map": "row_id_map", "routing": "routing_map", "x": "inp"}


@dataclass(frozen=True)
class PermuteSpec:
    """``probs``: whether rows have probabilities, which go along."""

    probs: bool = False


@dataclass(frozen=True)
class UnpermuteSpec:
    """``tokens``: rows of the result; negative: those of ``probs``, or without of ``like``."""

    tokens: int = -1


@dataclass(frozen=True)
class ExpertRowsSpec:
    """``experts`` E; ``rows`` R of the map, -1: those of ``like``; ``align``: each expert begins at a
    multiple of it."""

    experts: int
    rows: int
    align: int = 1

    def __post_init__(self) -> None:
        for name, least in (("experts", 1), ("rows", -1), ("align", 1)):
            integer("expert_rows", name, getattr(self, name), least, 2**31 - 1)


def dispatch_rows(
    x: Any, routing: Any, num_out_tokens: Any, align_size: Any, num_experts: Any
) -> tuple[int, int, int]:
    """(experts, rows, align) of the map of ``routing``, a mask or indices for the tokens of x; with an
    ``align_size`` as many rows as it can need. ShapeError, ArgumentError for what they may not be."""
    op, kind = "token_dispatch", routing.dtype
    is_mask = getattr(kind, "name", str(kind).rpartition(".")[2]) != "int32"  # torch's dtypes have no name
    if len(routing.shape) != 2:
        raise ShapeError(op, "routing_map", f"shape {tuple(routing.shape)}", "(tokens, experts or topk)")
    if len(x.shape) != 2:
        raise ShapeError(op, "inp", f"shape {tuple(x.shape)}", "(tokens, hidden)")
    if routing.shape[0] != x.shape[0]:
        wanted = f"{x.shape[0]}, as inp"
        raise ShapeError(op, "routing_map", f"{routing.shape[0]} tokens", wanted)
    other = num_experts is not None and not (is_integer(num_experts) and num_experts == routing.shape[1])
    if is_mask and other:
        raise ArgumentError(
            op, "num_experts", shown(num_experts), f"{routing.shape[1]}, as in routing_map, or None"
        )
    experts = integer(op, "num_experts", routing.shape[1] if is_mask else num_experts, 1, 2**31 - 1)
    rows = integer(op, "num_out_tokens", num_out_tokens, 0, 2**31 - 1)
    align = 1 if align_size is None else integer(op, "align_size", align_size, 1, 2**31 - 1)
    return experts, (rows + experts * (align - 1)) // align * align, align


def want_chunks(operation: str, names: tuple[str, str], sizes: Any, order: Any, rows: int) -> None:
    """ShapeError for sizes of chunks, by the first name, that are negative or do not sum to ``rows``, and for
    an order that is no permutation of them; both are sequences, or arrays on the host."""
    counts, places = (np.asarray(values).tolist() for values in (sizes, order))
    if any(n < 0 for n in counts):
        raise ShapeError(operation, names[0], shown(counts), "numbers of rows, at least 0")
    if sum(counts) != rows:
        raise ShapeError(operation, names[0], f"{sum(counts)} rows together", f"{rows}, the rows of inp")
    if sorted(places) != list(range(len(counts))):
        raise ShapeError(operation, names[1], shown(places), f"a permutation of {len(counts)} chunks")


def check_map(operation: str, name: str, row_map: ArrayView | None, tokens: int, slots: int | None) -> None:
    """ArgumentError for a map on the CPU, int32 (R, 2), that names a token that there is not, or a slot, a
    column of the probabilities; ``slots``: None without them."""
    if row_map is None or row_map.device.kind != "cpu" or row_map.shape[1:] != (2,) or not row_map.size:
        return
    limits = [("tokens", tokens, ""), ("slots", slots, " the columns of the probabilities,")]
    for (what, count, of), values in zip(limits, row_map.numpy().T, strict=True):
        if count is not None and not -1 <= values.min() <= values.max() < count:
            got = f"{what} from {values.min()} to {values.max()}"
            raise ArgumentError(operation, name, got, f"{what} in [0, {count}),{of} or -1 for none")


class _ByMap(Operation):
    """What both share. A column of the result needs that column of x alone."""

    arguments: ClassVar[Mapping[str, str]] = {"x": "inp"}

    def partitions(self, spec: Any, metas: Metas, views: Shapes) -> Partitions:
        return (Partition("features", (("x", -1, -1),)),)

    def _matrix(self, name: str, metas: Metas, rows: int | None = None) -> Meta:
        """The meta of x or probs, h (rows, any). ShapeError or FormatError for another."""
        return want(self.name, name, metas, (rows, None), *HIGH_PRECISION)

    def _check_map(self, row_map: ArrayView, tokens: int, probs: ArrayView | None) -> None:
        check_map(self.name, "row_map", row_map, tokens, None if probs is None else probs.shape[1])


class Permute(_ByMap):
    """y[r] = x[token], and row_probs[r] = probs[token, slot]; both 0 in an empty row r.

    Inputs: x h (T, N); row_map int32 (R, 2); where the spec says so probs h (T, S), of any type. Outputs: y
    (R, N) like x, and row_probs (R,) like probs. Gradients of x and probs. A token or slot out of range is an
    ArgumentError on the CPU; on a GPU, where nobody looks, such a row is empty.
    """

    name = "permute"

    def outputs(self, spec: PermuteSpec) -> tuple[str, ...]:
        return ("y", "row_probs") if spec.probs else ("y",)

    def infer(self, spec: PermuteSpec, metas: Metas, needs: Needs) -> Signature:
        inputs = {"x": self._matrix("x", metas)}
        if spec.probs:
            inputs["probs"] = self._matrix("probs", metas, inputs["x"].shape[0])
        rows = want(self.name, "row_map", metas, (None, 2), int32).shape[0]
        shapes = (rows, inputs["x"].shape[1]), (rows,)
        made = {
            n: Meta(s, m.dtype) for n, s, m in zip(("y", "row_probs"), shapes, inputs.values(), strict=False)
        }
        return Signature(made, {}, ("row_map",), {n: meta for n, meta in inputs.items() if n in needs})

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        x, row_map, probs = ws.inputs["x"], ws.inputs["row_map"], ws.inputs.get("probs")
        self._check_map(row_map, x.shape[0], probs)
        ws.kernels.permute_rows(x, row_map, None, ws.outputs["y"], ws.stream)
        if probs is not None:
            ws.kernels.permute_probs(probs, row_map, ws.outputs["row_probs"], ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        row_map, dy, g = ws.inputs["row_map"], cotangents["y"], cotangents.get("row_probs")
        if "x" in ws.outputs:
            ws.kernels.unpermute_rows(dy, row_map, None, ws.outputs["x"], ws.stream)
        if "probs" in ws.outputs:
            if g is None:  # no row, and zeros for all
                dy, row_map = dy.slice(0, 0, 0), row_map.slice(0, 0, 0)
            rows = dy if g is None else g.reshape(g.size, 1)
            ws.kernels.unpermute_probs(rows, None, row_map, ws.outputs["probs"], ws.stream)


class Unpermute(_ByMap):
    """y[token] = the sum of x[r] * probs[token, slot], without probs of x[r], over the token's rows r: in
    float32, in the order of the rows, rounded once.

    Inputs: x h (R, N); row_map int32 (R, 2); probs h (T, S), of any type, or None; like (T, any), whose
    number of rows alone counts, where neither probs nor the spec says T. Output: y (T, N) like x. Gradients
    of x and probs. A token or slot out of range: see ``permute``.
    """

    name = "unpermute"
    arguments: ClassVar[Mapping[str, str]] = {"x": "inp", "probs": "merging_probs"}

    def infer(self, spec: UnpermuteSpec, metas: Metas, needs: Needs) -> Signature:
        inputs, tokens = {"x": self._matrix("x", metas)}, spec.tokens
        x = inputs["x"]
        want(self.name, "row_map", metas, (x.shape[0], 2), int32)
        if tokens < 0 and metas.get("like") is not None:
            tokens = want(self.name, "like", metas, (None, None)).shape[0]
        if tokens < 0 or metas.get("probs") is not None:
            inputs["probs"] = self._matrix("probs", metas, tokens if tokens >= 0 else None)
            tokens = inputs["probs"].shape[0]
        grads = {name: meta for name, meta in inputs.items() if name in needs}
        kept = ("row_map", *(("probs",) if "x" in grads else ()), *(("x",) if "probs" in grads else ()))
        return Signature({"y": Meta((tokens, x.shape[1]), x.dtype)}, {}, kept, grads)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        row_map, probs, y = ws.inputs["row_map"], ws.inputs.get("probs"), ws.outputs["y"]
        self._check_map(row_map, y.shape[0], probs)
        ws.kernels.unpermute_rows(ws.inputs["x"], row_map, probs, y, ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        row_map, dy = ws.inputs["row_map"], cotangents["y"]
        if "x" in ws.outputs:
            ws.kernels.permute_rows(dy, row_map, ws.inputs.get("probs"), ws.outputs["x"], ws.stream)
        if "probs" in ws.outputs:
            ws.kernels.unpermute_probs(ws.inputs["x"], dy, row_map, ws.outputs["probs"], ws.stream)


class ExpertRows(Operation):
    """The map of tokens to experts, without a look at the host. Inputs: routing, a mask uint8 (T, E), or
    indices int32 (T, k); like (R, any), whose number of rows alone counts, where the spec does not say R.
    Outputs: row_map int32 (R, 2), its rows expert after expert, each padded with empty
    rows to a multiple of ``align``; sizes int32 (E,), the rows of each expert with their padding; counts
    int32 (E,), without. Rows beyond R are dropped. No gradient."""

    name = "expert_rows"
    results = ("row_map", "sizes", "counts")
    arguments: ClassVar[Mapping[str, str]] = {"routing": "routing_map"}

    def infer(self, spec: ExpertRowsSpec, metas: Metas, needs: Needs) -> Signature:
        is_mask = want(self.name, "routing", metas, (None, None), uint8, int32).dtype is uint8
        want(self.name, "routing", metas, (None, spec.experts if is_mask else None))
        of_experts, rows = Meta((spec.experts,), int32), spec.rows
        if rows < 0:
            rows = want(self.name, "like", metas, (None, None)).shape[0]
        return Signature({"row_map": Meta((rows, 2), int32), "sizes": of_experts, "counts": of_experts})

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        made = (ws.outputs[name] for name in self.results)
        ws.kernels.expert_rows(ws.inputs["routing"], *made, plan.spec.align, ws.stream)


expert_rows = ExpertRows()
permute = Permute()
unpermute = Unpermute()
