"""``statistics``: what there is to know of a tensor, its casts, and it beside another, as one small array of
counts and sums that can be put together over micro-batches and ranks; no gradient.

``StatisticsSpec.sections`` says what the array holds, and ``fp8kit.numerics`` makes numbers of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol import Rule
from fp8kit.backends.protocol.statistics import (
    BRIEF_COUNTS,
    CAST_COUNTS,
    CODE_COUNTS,
    EXPONENTS,
    TENSOR_COUNTS,
)
from fp8kit.blocks import kind_of, tile_of
from fp8kit.formats import E4M3, E5M2, DType, float32, float64, int64, uint8
from fp8kit.ops.casts import grid, no_gradient, whole
from fp8kit.ops.emulated_casts import scale_lines_of
from fp8kit.ops.product import want
from fp8kit.quantization import Quantizer
from fp8kit.spec import Meta, Metas, Needs, Operation, Plan, Signature, WorkingSet, workspace

_WORD = 8  # bytes of a count or a sum
_LINES = ("tensor", "row")  # granularities whose scales belong to whole lines, or to all
MOMENTS, RATIOS, CAST_SUMS, BRIEF_SUMS, PAIR_SUMS = 8, 2, 4, 2, 4


@dataclass(frozen=True)
class CastStatistics:
    """One cast of x: by a ``quantizer``, along its last dimension (1) or its rows (0). ``given``: "rowwise"
    or "columnwise", where its codes may be inputs (``Statistics``). ``brief``: without the histogram of
    scales and the errors, so that no codes need be made; the cast must be ``can_be_brief``."""

    quantizer: Quantizer
    along: int = 1
    given: str = ""
    brief: bool = False


@dataclass(frozen=True)
class StatisticsSpec:
    """``tensor``: counts and moments of x. ``tiles``: (rows, columns) of blocks whose ratios are taken, as
    many as there are. ``casts`` of x. ``twin``: whether x is compared with the input "twin". ``exponents``:
    whether the counts are a histogram; without it the least magnitude and the sum of fourth powers are there
    where it is ``deep``."""

    tensor: bool = True
    tiles: tuple[tuple[int, int], ...] = ()
    casts: tuple[CastStatistics, ...] = ()
    twin: bool = False
    exponents: bool = True
    deep: bool = True

    @property
    def brief(self) -> bool:
        """Whether ``brief_statistics`` has x's counts and moments."""
        return self.tensor and not self.exponents

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """What the array holds, in its order."""
        found: list[Section] = []
        for kernel, call, name, dtype, count in _parts(self):
            start = found[-1].start + found[-1].many if found else 0
            found.append(Section(kernel, call, name, dtype, start, count))
        return tuple(found)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return _WORD * sum(section.many for section in self.sections)


class Section(NamedTuple):
    """A part of the array: ``many`` int64 or float64 numbers of dtype from word ``start`` on; ``kernel``:
    whose ``counts``, ``moments``, ``ratios`` or ``sums`` they are, and of which of its calls."""

    kernel: str
    call: int
    name: str
    dtype: DType
    start: int
    many: int


def _parts(spec: StatisticsSpec) -> Iterator[tuple[str, int, str, DType, int]]:
    if spec.tensor:
        yield "tensor", 0, "counts", int64, TENSOR_COUNTS if spec.exponents else BRIEF_COUNTS
        yield "tensor", 0, "moments", float64, MOMENTS
    for call in range(len(spec.tiles)):
        yield "tile", call, "ratios", float64, RATIOS
    for call, cast in enumerate(spec.casts):
        yield "cast", call, "counts", int64, CODE_COUNTS if cast.brief else CAST_COUNTS
        yield "cast", call, "sums", float64, BRIEF_SUMS if cast.brief else CAST_SUMS
    if spec.twin:
        yield "pair", 0, "sums", float64, PAIR_SUMS


def can_be_brief(quantizer: Quantizer) -> bool:
    """Whether the counts of a cast follow from the magnitudes of x: one scale for all, nearest even, and a
    format of the layers."""
    plain = not (quantizer.hadamard or quantizer.stochastic_bits)
    return plain and quantizer.granularity == "tensor" and quantizer.format in (E4M3, E5M2)


def tile_on(quantizer: Quantizer, along: int) -> tuple[int, int]:
    """(rows, columns) of a quantizer's tiles on a matrix whose contraction is its dimension ``along``, 0 is
    all of them."""
    if quantizer.granularity == "row":
        return (1, 0) if along else (0, 1)
    return tile_of(quantizer, along)


class Statistics(Operation):
    """Counts and sums of x. Inputs: x h (..., N); twin, h like x, where the spec says so. Of a cast with
    ``given``, "rowwise" say, there may be q_rowwise uint8 like x and scale_inv_rowwise float32 (tiles,), the
    codes that something else was computed with; of one whose scale follows from earlier steps there may be
    scale_rowwise float32 (1,). Without these x is cast here, with the scale that its own amax gives, which
    may be given, too: amax float32 (1,); random bits are those of seed 0, offset 0. A rotated cast is
    compared with x as it is rotated; q is then of that. Output: record, uint8, the bytes of what the spec's
    ``sections`` say."""

    name = "statistics"
    results = ("record",)

    def infer(self, spec: StatisticsSpec, metas: Metas, needs: Needs) -> Signature:
        no_gradient(self.name, needs)
        x = self._matrix(metas, "x")
        if spec.twin:
            other = self._matrix(metas, "twin")
            want(self.name, "twin", metas, x.shape, other.dtype)
        for cast in spec.casts:
            tiles = grid(x.shape, tile_on(cast.quantizer, cast.along))
            codes, inverse, scale = (f"{name}_{cast.given}" for name in ("q", "scale_inv", "scale"))
            if cast.given and metas.get(codes) is not None:
                want(self.name, codes, metas, x.shape, uint8)
                want(self.name, inverse, metas, tiles, float32)
            if cast.given and cast.quantizer.needs_state and metas.get(scale) is not None:
                want(self.name, scale, metas, tiles, float32)
        if metas.get("amax") is not None:
            want(self.name, "amax", metas, (1,), float32)
        return Signature({"record": Meta((spec.nbytes,), uint8)})

    def _matrix(self, metas: Metas, name: str) -> Meta:
        return want(self.name, name, metas, None, *formats.HIGH_PRECISION)

    def plan(self, spec: StatisticsSpec, metas: Metas, needs: Needs, kernels: object) -> Plan:
        signature, x = self.infer(spec, metas, needs), self._matrix(metas, "x")
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1] if x.shape else 1
        scratch = workspace(kernels.statistics_workspace(rows, columns))  # type: ignore[attr-defined]
        size = rows * columns
        given = [cast for cast in spec.casts if cast.given and metas.get(f"q_{cast.given}") is not None]
        made = [cast for cast in spec.casts if cast not in given and not cast.brief]
        if size and any(cast.brief for cast in given):
            scratch["counts"] = Meta((CAST_COUNTS + CAST_SUMS,), int64)
        if size and any(cast.brief and cast not in given for cast in spec.casts):
            scratch["brief_scale"] = Meta((3,), float32)
        if size and made:
            tiles = [math.prod(grid(x.shape, tile_on(c.quantizer, c.along))) for c in made]
            scratch["codes"] = Meta((size,), uint8)
            scratch["scale_inv"] = Meta((max(tiles),), float32)
            scratch["scale_codes"] = Meta((max(tiles),), uint8)
            lines = [t for t, c in zip(tiles, made, strict=True) if c.quantizer.granularity in _LINES]
            scratch["amax"] = Meta((max([rows, columns, *lines]),), float32)
            scratch["scale"] = Meta((max([rows, columns, *lines]),), float32)
        if size and any(cast.quantizer.hadamard for cast in spec.casts):
            scratch["rotated"] = Meta((size,), float32)
        if size and any(cast.quantizer.needs_rng for cast in spec.casts):
            scratch["rng"] = Meta((2,), int64)
        return Plan(spec, signature, kernels, scratch, extra=spec.sections)

    def forward(self, plan: Plan, ws: WorkingSet) -> None:
        spec: StatisticsSpec = plan.spec
        record, x, k, space = ws.outputs["record"], ws.inputs["x"].rows(), ws.kernels, ws.scratch["workspace"]
        if not _written_whole(spec) or not x.size:
            arrays.fill_zero(record, ws.stream)
        parts = {(s.kernel, s.call, s.name): _numbers(record, s) for s in plan.extra}
        self._brief(spec, ws, x, parts)
        if spec.tensor and spec.exponents:
            own = parts["tensor", 0, "counts"], parts["tensor", 0, "moments"]
            k.tensor_statistics(x, *own, space, ws.stream)
        for call, tile in enumerate(spec.tiles):
            k.tile_statistics(x, parts["tile", call, "ratios"], whole(x.shape, tile), ws.stream)
        if spec.twin:
            k.pair_statistics(x, ws.inputs["twin"].rows(), parts["pair", 0, "sums"], space, ws.stream)
        rng = ws.scratch.get("rng")
        if rng is not None:
            arrays.fill_zero(rng, ws.stream)
        for call, cast in enumerate(spec.casts):
            if x.size and not cast.brief:
                source, codes, scale_inv = self._cast(cast, ws, x)
                own = parts["cast", call, "counts"], parts["cast", call, "sums"]
                tile = whole(x.shape, tile_on(cast.quantizer, cast.along))
                k.cast_statistics(
                    source, codes, scale_inv, *own, cast.quantizer.format, tile, space, ws.stream
                )

    def _brief(
        self, spec: StatisticsSpec, ws: WorkingSet, x: ArrayView, parts: dict[tuple[str, int, str], ArrayView]
    ) -> None:
        """What needs no histogram: x's counts and moments, in one pass with those of the first cast."""
        tensor = (parts["tensor", 0, "counts"], parts["tensor", 0, "moments"]) if spec.brief else (None, None)
        known: dict[Any, tuple[ArrayView, ArrayView]] = {}  # one scale's cast is the same in both directions
        for call, cast in enumerate(spec.casts):
            if not cast.brief or not x.size:
                continue
            into = parts["cast", call, "counts"], parts["cast", call, "sums"]
            if cast.given and ws.inputs.get(f"q_{cast.given}") is not None:
                self._count_given(cast, ws, x, *into)
                continue
            key = cast.quantizer, ws.inputs.get(f"scale_{cast.given}") if cast.given else None
            if key in known:
                for made, out in zip(known[key], into, strict=True):
                    _copy(ws, made, out)
            else:
                known[key], source = into, self._brief_scale(cast, ws, x)
                self._brief_pass(spec, ws, x, tensor, into, source, cast.quantizer.format)
                tensor = None, None
        if tensor[0] is not None:
            self._brief_pass(spec, ws, x, tensor, (None, None), (None, None, None), None)

    @staticmethod
    def _brief_pass(
        spec: StatisticsSpec, ws: WorkingSet, x: ArrayView, tensor: Any, cast: Any, source: Any, fmt: Any
    ) -> None:
        k, space = ws.kernels, ws.scratch["workspace"]
        k.brief_statistics(x, *tensor, *cast, *source, fmt, spec.deep, space, ws.stream)

    def _brief_scale(
        self, cast: CastStatistics, ws: WorkingSet, x: ArrayView
    ) -> tuple[ArrayView | None, ArrayView | None, Rule | None]:
        """Returns the cast's scale, or its amax and what makes a scale of it."""
        own, stream = cast.quantizer, ws.stream
        scale = ws.inputs.get(f"scale_{cast.given}") if cast.given else None
        if scale is not None:
            return scale, None, None
        amax = ws.inputs.get("amax")
        if amax is None or own.static:
            amax, scale, inverse = (ws.scratch["brief_scale"].slice(0, i, 1) for i in range(3))
            if own.static:
                scale_lines_of(ws.kernels, x, own, x.shape, amax, scale, inverse, stream)
                return scale, None, None
            arrays.fill_zero(amax, stream)
            ws.kernels.amax(x, amax, x.shape, stream)
        return None, amax, Rule(own.power_2, own.epsilon)

    def _count_given(
        self, cast: CastStatistics, ws: WorkingSet, x: ArrayView, counts: ArrayView, sums: ArrayView
    ) -> None:
        """Count codes that were made before."""
        k, space, whole_record = ws.kernels, ws.scratch["workspace"], ws.scratch["counts"]
        source, codes, scale_inv = self._cast(cast, ws, x)
        arrays.fill_zero(whole_record, ws.stream)
        found = whole_record.slice(0, 0, CAST_COUNTS)
        ends = whole_record.slice(0, CAST_COUNTS, CAST_SUMS).view(float64)
        tile = whole(x.shape, tile_on(cast.quantizer, cast.along))
        k.cast_statistics(
            source, codes, scale_inv, found, ends, cast.quantizer.format, tile, space, ws.stream
        )
        _copy(ws, found.slice(0, EXPONENTS, CODE_COUNTS), counts)
        _copy(ws, ends.slice(0, CAST_SUMS - BRIEF_SUMS, BRIEF_SUMS), sums)

    def _cast(
        self, cast: CastStatistics, ws: WorkingSet, x: ArrayView
    ) -> tuple[ArrayView, ArrayView, ArrayView]:
        """(x as it is compared, its codes, their scale_invs)."""
        own, k, rng, matrix = cast.quantizer, ws.kernels, ws.scratch.get("rng"), x
        if own.hadamard:
            x = ws.scratch["rotated"].first(x.shape)
            random = rng if own.signs == "random" else None
            k.rotate(matrix, x, None, own.hadamard, own.signs, cast.along, random, ws.stream)
        given = ws.inputs.get(f"q_{cast.given}") if cast.given else None
        if given is not None:
            return x, given.rows(), ws.inputs[f"scale_inv_{cast.given}"]
        codes = ws.scratch["codes"].first(x.shape)
        tile = tile_on(own, cast.along)
        scale_inv = ws.scratch["scale_inv"].slice(0, 0, math.prod(grid(x.shape, tile)))
        if own.granularity in _LINES:
            drawn = rng if own.stochastic_bits else None
            self._by_lines(cast, replace(own, hadamard=0, signs="plus"), ws, x, (codes, scale_inv), drawn)
        else:
            self._by_blocks(cast, ws, matrix, x, (codes, scale_inv))
        return x, codes, scale_inv

    def _by_lines(
        self,
        cast: CastStatistics,
        own: Quantizer,
        ws: WorkingSet,
        x: ArrayView,
        into: tuple[ArrayView, ArrayView],
        rng: ArrayView | None,
    ) -> None:
        """One scale for all, or for each line along the contraction."""
        k, (codes, scale_inv), tile = ws.kernels, into, whole(x.shape, tile_on(own, cast.along))
        scale = ws.inputs.get(f"scale_{cast.given}") if cast.given else None
        if scale is None:
            scale = ws.scratch["scale"].slice(0, 0, scale_inv.size)
            amax = ws.scratch["amax"].slice(0, 0, scale_inv.size)
            scale_lines_of(k, x, own, tile, amax, scale, scale_inv, ws.stream)
        how = own.format, tile, True, own.stochastic_bits, 0, rng
        k.quantize(x, codes, scale, scale_inv, None, *how, ws.stream)

    def _by_blocks(
        self,
        cast: CastStatistics,
        ws: WorkingSet,
        matrix: ArrayView,
        x: ArrayView,
        into: tuple[ArrayView, ArrayView],
    ) -> None:
        """Scales of blocks, and of NVFP4 those of the tensor or of its lines. The kernel rotates ``matrix``
        itself, since rule eden corrects what was rotated together; ``x``, rotated, has the amaxes."""
        own, k, (codes, scale_inv) = cast.quantizer, ws.kernels, into
        rng = ws.scratch.get("rng") if own.needs_rng else None
        lying: Shape = x.shape
        scale_codes = amax = tensor_scale_inv = None
        if kind_of(own) != "block":
            scale_codes = ws.scratch["scale_codes"].slice(0, 0, scale_inv.size)
        if own.two_level:
            count = x.shape[1 - cast.along] if own.row_scaled else 1
            if own.row_scaled:
                lying = (1, x.shape[1]) if cast.along else (x.shape[0], 1)
            amax, tensor_scale_inv = (ws.scratch[name].slice(0, 0, count) for name in ("amax", "scale"))
            arrays.fill_zero(amax, ws.stream)
            k.amax(x, amax, lying, ws.stream)
        targets = codes, scale_inv, scale_codes, None, amax, tensor_scale_inv
        k.cast_blocks(matrix, *targets, own, cast.along, 0, rng, None, ws.stream)


def _written_whole(spec: StatisticsSpec) -> bool:
    """Whether kernels write all of the array, and add to nothing that is there."""
    return not spec.tiles and (spec.brief or not spec.tensor) and all(cast.brief for cast in spec.casts)


def _copy(ws: WorkingSet, source: ArrayView, out: ArrayView) -> None:
    """Numbers of eight bytes, by a kernel that calls can be recorded with, and that knows halves of them."""
    halves = [ArrayView(v.ptr, (2 * v.size,), float32, v.device, v.owner) for v in (source, out)]
    ws.kernels.copy(*halves, ws.stream)


def _numbers(record: ArrayView, section: Section) -> ArrayView:
    """Returns a section of the array as numbers."""
    at = record.ptr + _WORD * section.start
    return ArrayView(at, (section.many,), section.dtype, record.device, record.owner)


statistics = Statistics()
