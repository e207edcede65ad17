"""What an attention call is about: sizes, element type and rules, as one hashable value that plans and
decisions are kept by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import AttentionSpec
from fp8kit.formats import DType

Strides = tuple[int, int, int, int]
ALIGN = 256  # bytes, of what lies in a workspace


class Problem(NamedTuple):
    """``rows`` = s_q, ``columns`` = s_kv, ``groups`` = key and value heads, ``dim`` and ``dim_v`` = features
    of a head of q and k and of v, ``dtype`` a DType's name, the rest as in ``protocol.AttentionSpec``:
    ``left`` and ``right`` its window, ``bottom_right`` False where it makes no difference. ``strides``: of q,
    k and v in elements, in the order batch, head, sequence, feature; none: C-contiguous ones. ``tokens``: of
    q and of k where ``qkv_format`` is "thd"; ``rows`` and ``columns`` are then the longest sequence's."""

    batch: int
    heads: int
    groups: int
    rows: int
    columns: int
    dim: int
    dim_v: int
    dtype: str
    qkv_format: str
    scale: float
    dropout: float = 0.0
    padded: bool = False
    masked: bool = False
    left: int = -1
    right: int = -1
    bottom_right: bool = False
    bias: str = "no_bias"
    softmax_type: str = "vanilla"
    zero_padded: bool = False
    placed: bool = False
    strides: tuple[Strides, ...] = ()
    tokens: tuple[int, int] = (0, 0)
    softcap: float = 0.0

    @property
    def cleaned(self) -> bool:
        """Whether padding may hold anything, so that products must not read it."""
        return self.padded and not self.zero_padded

    @property
    def banded(self) -> bool:
        """Whether rows see only a band round the diagonal."""
        return self.left >= 0 or self.right >= 0

    @property
    def bias_factor(self) -> float:
        """What the bias is multiplied by when it joins the scaled product."""
        return self.scale if self.bias == "pre_scale_bias" else 1.0

    @property
    def bias_capped(self) -> bool:
        """Whether the bias joins the product before its cap."""
        return self.softcap > 0 and self.bias == "pre_scale_bias"

    @property
    def blind(self) -> bool:
        """Whether some row sees no column by the band alone; lengths in cu_seqlens are not known here."""
        shift = self.columns - self.rows if self.bottom_right else 0
        return (self.right >= 0 and shift + self.right < 0) or (
            self.left >= 0 and self.rows - 1 + shift - self.left >= self.columns
        )


def problem(
    q: Shape, k: Shape, v: Shape, dtype: DType, spec: AttentionSpec, strides: Sequence[Shape] = ()
) -> Problem:
    """Returns the problem of q, k and v with these shapes and ``strides`` (order of dimensions by
    ``spec.qkv_format``; none: C-contiguous)."""
    s, b = (0, 1) if spec.qkv_format == "sbhd" else (1, 0)
    (left, right), bias = spec.window, spec.bias
    slanted = left >= 0 or right >= 0 or bias == "alibi"
    return Problem(
        q[b],
        q[2],
        k[2],
        q[s],
        k[s],
        q[3],
        v[3],
        dtype.name,
        spec.qkv_format,
        spec.softmax_scale,
        spec.dropout,
        spec.padded,
        spec.masked,
        left,
        right,
        spec.bottom_right and slanted and (spec.padded or q[s] != k[s]),
        bias,
        spec.softmax_type,
        spec.zero_padded,
        spec.placed,
        tuple([ordered(spec.qkv_format, steps) for steps in strides]),
        softcap=spec.softcap,
    )


def bhsd(qkv_format: str, view: ArrayView) -> Strides:
    """Strides of a (s, b, h, d), (b, s, h, d) or (t, h, d) view in elements, in the order batch, head,
    sequence, feature; of the last the batch's is 0."""
    return ordered(qkv_format, view.strides)


def ordered(qkv_format: str, strides: Shape) -> Strides:
    """``bhsd`` of a view's strides."""
    if qkv_format == "thd":
        token, head, feature = strides
        return 0, head, token, feature
    first, second, head, feature = strides
    return (second, head, first, feature) if qkv_format == "sbhd" else (first, head, second, feature)


def contiguous_bhsd(problem: Problem, heads: int, length: int, dim: int) -> Strides:
    """Those strides of a C-contiguous array with so many heads, positions and features."""
    row = heads * dim
    batch, position = (row, problem.batch * row) if problem.qkv_format == "sbhd" else (length * row, row)
    return batch, dim, position, 1


def arranged(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns where parts of so many bytes lie in a workspace, one after the other; the last ends at
    "end"."""
    places, top = {}, 0
    for name, nbytes in sizes.items():
        places[name] = top
        top += -(-nbytes // ALIGN) * ALIGN
    return places | {"end": top}
