"""What an attention call is about: sizes, element type and rules, as one hashable value that plans and decisions are kept by."""

from __future__ import annotations

from typing import NamedTuple

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import AttentionSpec
from fp8kit.formats import DType

Strides = tuple[int, int, int, int]


class Problem(NamedTuple):
    """``rows`` = s_q, ``columns`` = s_kv, ``groups`` = key and value heads, ``dim`` = features of a head, ``dtype`` a DType's name,
    the rest as in ``protocol.AttentionSpec``."""

    batch: int
    heads: int
    groups: int
    rows: int
    columns: int
    dim: int
    dtype: str
    qkv_format: str
    mask: str
    scale: float
    dropout: float

    @property
    def causal(self) -> bool:
        """Whether row i sees only columns up to i."""
        return self.mask.endswith("causal")

    @property
    def padded(self) -> bool:
        """Whether true lengths come in cu_seqlens."""
        return self.mask.startswith("padding")


def problem(q: Shape, kv: Shape, dtype: DType, spec: AttentionSpec) -> Problem:
    """The problem of q, k and v with these shapes (order of dimensions by ``spec.qkv_format``)."""
    s, b = (0, 1) if spec.qkv_format == "sbhd" else (1, 0)
    return Problem(q[b], q[2], kv[2], q[s], kv[s], q[3], dtype.name, spec.qkv_format, spec.mask, spec.softmax_scale, spec.dropout)


def bhsd(qkv_format: str, view: ArrayView) -> Strides:
    """Strides of a (s, b, h, d) or (b, s, h, d) view in elements, in the order batch, head, sequence, feature."""
    first, second, head, feature = view.strides
    return (second, head, first, feature) if qkv_format == "sbhd" else (first, head, second, feature)


def contiguous_bhsd(problem: Problem, heads: int, length: int) -> Strides:
    """Those strides of a C-contiguous array with so many heads and positions."""
    row = heads * problem.dim
    batch, position = (row, problem.batch * row) if problem.qkv_format == "sbhd" else (length * row, row)
    return batch, problem.dim, position, 1
