"""``embedding``: rows of a table by id."""

from __future__ import annotations

from dataclasses import dataclass

from fp8kit.formats import DType, int32, int64
from fp8kit.ops.product import want
from fp8kit.ops.values import check_indices
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, Views, WorkingSet


@dataclass(frozen=True)
class EmbeddingSpec:
    """``vocabulary`` rows of ``features`` elements of ``dtype``."""

    vocabulary: int
    features: int
    dtype: DType


class Embedding(Operation):
    """y[...] = table[ids[...]]. Inputs: ids int32 or int64, any shape, in [0, vocabulary); table h (V, N). An
    id out of range is an ArgumentError of ``forward`` on the CPU; on a GPU, where ids are not checked, it
    gives NaN.
    """

    name = "embedding"

    def infer(self, spec: EmbeddingSpec, metas: Metas, needs: Needs) -> Signature:
        ids = want(self.name, "ids", metas, None, int32, int64)
        table = want(self.name, "table", metas, (spec.vocabulary, spec.features), spec.dtype)
        grads = {"table": table} if "table" in needs else {}
        return Signature({"y": Meta((*ids.shape, spec.features), spec.dtype)}, {}, ("ids",), grads)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        ids, rows = ws.inputs["ids"], ws.outputs["y"].rows()
        check_indices(self.name, "ids", ids, plan.spec.vocabulary)
        ws.kernels.embedding_fwd(ids.reshape(ids.size), ws.inputs["table"], rows, ws.stream)

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        ids, rows = ws.inputs["ids"], cotangents["y"].rows()
        ws.kernels.embedding_bwd(ids.reshape(ids.size), rows, ws.outputs["table"], ws.stream)


embedding = Embedding()
