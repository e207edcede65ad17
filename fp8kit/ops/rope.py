"""Rotary position embedding as an operation (Su et al., RoFormer, 2021), on one tensor or on the parts of a
packed one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fp8kit.arrays import ArrayView, Shape, contiguous_strides
from fp8kit.errors import ShapeError
from fp8kit.formats import HIGH_PRECISION, float32, int32
from fp8kit.ops.attention_spec import FORMATS, batch_of, check_starts, length_of
from fp8kit.ops.attention_views import want_features
from fp8kit.ops.partition import Partition
from fp8kit.ops.product import want
from fp8kit.ops.values import check_sequences
from fp8kit.spec import Metas, Needs, Operation, Partitions, Plan, Shapes, Signature, Views, WorkingSet

_SEQUENCES = ("cu_seqlens", "cu_seqlens_padded")  # the sequences' lengths, and where they start


@dataclass(frozen=True)
class RopeSpec:
    """Static arguments of ``Rope``.

    * ``segments``: (heads, features of a head, name of the angles' input) of each part that lies in the last
      dimension, in order; "" for a part that is copied. The names are "freqs" and "k_freqs".
    * ``qkv_format``: "sbhd", "bshd" or "thd". ``interleaved``: pairs are neighbours, instead of the two
      halves.
    * ``alternating``: the segments, of equally many heads, alternate from head to head, instead of lying one
      after the other.
    """

    segments: tuple[tuple[int, int, str], ...]
    qkv_format: str = "sbhd"
    interleaved: bool = False
    alternating: bool = False

    @property
    def width(self) -> int:
        """Features of all segments."""
        return sum(heads * dim for heads, dim, _ in self.segments)

    @property
    def angles(self) -> tuple[str, ...]:
        """Names of the angles' inputs."""
        return tuple(dict.fromkeys(name for *_, name in self.segments if name))


class Rope(Operation):
    """y = x with its segments' heads rotated. Inputs: x h (s, b, N), (b, s, N) or (t, N), the heads of a
    single segment also as a dimension of their own; ``freqs`` (and ``k_freqs``): float32 (positions, r),
    angles in radians, r even and at most the head's features; ``start_positions`` int32 (b,) or None: added
    to each sequence's positions; ``cu_seqlens`` int32 (b + 1,), running sums of the sequences' lengths, with
    "thd" and only there; there also ``cu_seqlens_padded``, int32 (b + 1,): where each sequence starts, if
    there are gaps between them. s, b and t may be 0. Output y like x; rotated heads of tokens of no sequence
    are 0. Gradient of x, 0 likewise.

    ``infer`` raises ShapeError for sizes and names that do not fit, too few positions among them; FormatError
    for dtypes; ``forward`` ArgumentError for invalid running sums on the CPU (``ops.values``). Where
    start_positions, or with "thd" on a GPU a sequence's length, lead beyond the angles, the result is NaN.
    """

    name = "rope"

    def partitions(self, spec: RopeSpec, metas: Metas, views: Shapes) -> Partitions:
        x = metas["x"]
        if spec.qkv_format == "thd" or x is None or len(x.shape) != 4:
            return ()
        at = spec.qkv_format.index("b")
        rows = [("x", at, at)]
        if metas.get("start_positions") is not None:
            rows.append(("start_positions", 0, 0))
        return Partition("rows", tuple(rows)), Partition("heads", (("x", 2, 2),))

    def part(self, spec: RopeSpec, partition: Partition, count: int) -> Any:
        ((heads, dim, angles),) = spec.segments
        return None if heads % count else replace(spec, segments=((heads // count, dim, angles),))

    def infer(self, spec: RopeSpec, metas: Metas, needs: Needs) -> Signature:
        if spec.qkv_format not in FORMATS:
            raise ShapeError("rope", "qkv_format", repr(spec.qkv_format), f"one of {', '.join(FORMATS)}")
        if spec.alternating and len({heads for heads, *_ in spec.segments}) != 1:
            wanted = "equally many heads in each, where they alternate"
            raise ShapeError("rope", "segments", spec.segments, wanted)
        x = want("rope", "x", metas, None, *HIGH_PRECISION)
        packed = spec.qkv_format == "thd"
        forms: list[Shape] = [(spec.width,)]
        if len(spec.segments) == 1:
            forms.append(spec.segments[0][:2])
        want_features("rope", "x", x.shape, spec.qkv_format, forms, ", heads and features not 0")
        for name in spec.angles:
            shape = want("rope", name, metas, None, float32).shape
            most = min(dim for _, dim, used in spec.segments if used == name)
            if len(shape) != 2 or shape[1] % 2 or not 0 < shape[1] <= most:
                raise ShapeError("rope", name, f"shape {shape}", f"(positions, an even number up to {most})")
            if not packed and shape[0] < length_of(spec.qkv_format, x.shape):
                least = f"at least {length_of(spec.qkv_format, x.shape)} positions"
                raise ShapeError("rope", name, f"shape {shape}", least)
        if packed:
            sums = want("rope", "cu_seqlens", metas, None, int32).shape
            batch = check_starts("rope", "cu_seqlens", sums, x.shape[0])
        else:
            batch = batch_of(spec.qkv_format, x.shape)
        for name in _SEQUENCES:
            if metas.get(name) is None:
                continue
            if not packed:
                raise ShapeError("rope", name, "an array", f"None with qkv_format {spec.qkv_format!r}")
            want("rope", name, metas, sums, int32)
        if metas.get("start_positions") is not None:
            want("rope", "start_positions", metas, (batch,), int32)
        if "x" not in needs:
            return Signature({"y": x})
        others = (name for name in ("start_positions", *_SEQUENCES) if metas.get(name) is not None)
        return Signature({"y": x}, {}, (*spec.angles, *others), {"x": x})

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        x = ws.inputs["x"]
        check_tokens(self.name, plan.spec, ws.inputs, x.shape[0])
        self._rotate(plan.spec, ws, ws.kernels.rope_fwd, x, ws.outputs["y"])

    def backward(self, plan: Plan, ws: WorkingSet, cotangents: Views) -> None:
        self._rotate(plan.spec, ws, ws.kernels.rope_bwd, cotangents["y"], ws.outputs["x"])

    def _rotate(self, spec: RopeSpec, ws: WorkingSet, kernel: Any, x: ArrayView, y: ArrayView) -> None:
        """Rotate or copy each segment of x to that of y."""
        if not x.size:
            return
        views, lengths = ws.inputs, ws.inputs.get("cu_seqlens")
        places = views.get("start_positions"), lengths, views.get("cu_seqlens_padded") or lengths
        for name, source, target in _segments(spec, x, y):
            if name:
                settings = spec.qkv_format, spec.interleaved
                kernel(source, views[name], target, *places, *settings, ws.stream)
            else:
                ws.kernels.copy(source, target, ws.stream)


rope = Rope()


def check_tokens(operation: str, spec: RopeSpec, inputs: Views, tokens: int) -> None:
    """ArgumentError for running sums on the CPU that do not fit so many tokens, or whose sequences are longer
    than the angles reach."""
    started = inputs.get("start_positions") is not None
    positions = None if started else min((inputs[name].shape[0] for name in spec.angles), default=None)
    check_sequences(operation, inputs, "cu_seqlens", tokens, positions)


def _segments(spec: RopeSpec, x: ArrayView, y: ArrayView) -> Iterator[tuple[str, ArrayView, ArrayView]]:
    """(angles' name, the segment's heads in x, in y)."""
    leading: Shape = x.shape[: 1 if spec.qkv_format == "thd" else 2]
    steps = contiguous_strides((*leading, spec.width))[:-1]
    offset, whole = 0, sum(dim for _, dim, _ in spec.segments)
    for heads, dim, name in spec.segments:
        shape, strides = (*leading, heads, dim), (*steps, whole if spec.alternating else dim, 1)
        yield name, x.with_strides(shape, strides, offset), y.with_strides(shape, strides, offset)
        offset += dim if spec.alternating else heads * dim
