"""``embedding``: rows of a table by id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8kit import formats
from fp8kit.errors import FormatError
from fp8kit.formats import DType
from fp8kit.ops.product import want
from fp8kit.ops.values import check_indices
from fp8kit.spec import Meta, Metas, Operation, Plan, Signature, Views


@dataclass(frozen=True)
class EmbeddingSpec:
    """``vocabulary`` rows of ``features`` elements of ``dtype``."""

    vocabulary: int
    features: int
    dtype: DType


class Embedding(Operation):
    """y[...] = table[ids[...]]. Inputs: ids int32 or int64, any shape, in [0, vocabulary); table h (V, N). An
    id out of range is an ArgumentError of ``forward`` on the CPU; on a GPU, where nobody looks, it gives NaN.
    """

    name = "embedding"

    def infer(self, spec: EmbeddingSpec, metas: Metas, needs: frozenset[str]) -> Signature:
        ids = metas.get("ids")
        if ids is None or ids.dtype not in (formats.int32, formats.int64):
            raise FormatError(self.name, "ids", None if ids is None else ids.dtype.name, "int32 or int64")
        table = want(self.name, "table", metas, (spec.vocabulary, spec.features), spec.dtype)
        grads = {"table": Meta(table.shape, table.dtype)} if "table" in needs else {}
        return Signature({"y": Meta((*ids.shape, spec.features), spec.dtype)}, {}, ("ids",), grads)

    def plan(self, spec: EmbeddingSpec, metas: Metas, needs: frozenset[str], kernels: Any) -> Plan:
        return Plan(spec, self.infer(spec, metas, needs), kernels)

    def forward(
        self, plan: Plan, inputs: Views, outputs: Views, saved: Views, scratch: Views, stream: int
    ) -> None:
        ids, y = inputs["ids"], outputs["y"]
        assert ids is not None and y is not None
        check_indices(self.name, "ids", ids, plan.spec.vocabulary)
        plan.kernels.embedding_fwd(
            ids.reshape(ids.size), inputs["table"], y.reshape(ids.size, plan.spec.features), stream
        )

    def backward(
        self,
        plan: Plan,
        kept: Views,
        saved: Views,
        cotangents: Views,
        grads: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        ids, dy = kept["ids"], cotangents["y"]
        assert ids is not None and dy is not None
        plan.kernels.embedding_bwd(
            ids.reshape(ids.size), dy.reshape(ids.size, plan.spec.features), grads["table"], stream
        )


embedding = Embedding()
