"""What ``fully_shard`` gathers of a weight in FP8: codes, a byte an element.

Each process casts its rows by the scale of the whole weight, so that all have the codes that one process
would: the amaxes of all weights are reduced together, once after each change of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.arrays import ArrayView
from fp8kit.backends import dispatch
from fp8kit.execution.codec import decode, encode
from fp8kit.execution.replay import Replays, replays
from fp8kit.lru import memoized
from fp8kit.ops.products import product_class
from fp8kit.quantization import Quantization
from fp8kit.tiles import tiling
from fp8kit_torch import torch_compat
from fp8kit_torch.collectives import TorchCollectives
from fp8kit_torch.operand_tensor import OperandTensor, of_parts
from fp8kit_torch.quantized_tensor import SHARDED_BY
from fp8kit_torch.sharded_rows import Rows, Seen, ShardedWeight, read_here, say_values
from fp8kit_torch.state import stream_of
from fp8kit_torch.views import as_view
from fp8kit_torch.weight_scales import limits_of

_GONE = -1.0  # the amax of a weight that this process does not have any more
_BLOCKS = "block_128x128"


class _Known:
    """Kernels on arrays that mostly lie where they lay before: done again from recordings, where the engine
    makes such (``execution.replay``). One object for arrays of the same shapes, dtypes and device."""

    def __init__(self) -> None:
        self._kernels: Any = None
        self._replays: Replays | None = None

    def run(self, like: ArrayView, key: Sequence[int], work: Callable[..., None], *arguments: Any) -> None:
        """``work(kernels, *arguments, stream)`` on the device of ``like``; ``key``: what tells these calls
        apart, the arrays' addresses."""
        kernels, stream = dispatch.kernels(like.device), stream_of(like.device)
        if kernels is not self._kernels:
            self._kernels, self._replays = kernels, replays(kernels)
        if self._replays is None:
            work(kernels, *arguments, stream)
        else:
            self._replays.run((stream, *key), work, kernels, *arguments, stream)


class OperandRows(Rows):
    """A process's rows of one weight in FP8. ``fp8``: how the weight is held; ``mesh``, ``group``,
    ``processes``: once they are known; ``together``: the weights that are cast with this one, None where no
    codes are gathered; ``amax``, ``scale``, ``inverse``: of the whole weight, or of the rows' blocks;
    ``codes``: of the rows, of earlier scales where they are ``stale``."""

    fp8: Quantization

    def __init__(self, padded: Tensor, fp8: Quantization, former: tuple[Any, ...] = (None, None)) -> None:
        super().__init__(padded, fp8, former)
        self.mesh: Any = None
        self.group: Any = None
        self.together: _Together | None = None
        self.processes = 0
        self.stale = True
        self.amax: Tensor | None = None
        self.scale: Tensor | None = None
        self.inverse: Tensor | None = None
        self.codes: Tensor | None = None
        self.casting: _Cast | None = None  # of what lies where it lay before
        self._filling: tuple[Sequence[int], list[_Move], list[str]] = ((), [], [])
        self._known = _Known()

    def gathered(self, mesh: Any, count: int) -> tuple[tuple[Tensor, ...], Any]:
        """Codes; with scales of blocks these too, and else that of the weight is not gathered."""
        if self.mesh is not mesh or self.count != count:
            self.join(mesh, count)
        if self.together is None:
            return (self.padded,), None
        blocks = self.fp8.w.granularity == _BLOCKS
        if self.changed:
            self.together.share() if blocks else _share_amaxes(self.group)
        codes, self.gathering = self.cast(), True
        # torch moves the first alone where there is one process
        if blocks and self.processes > 1:
            return (codes, self.inverse), None  # type: ignore[return-value]
        return (codes,), self.inverse

    def parts_of(
        self, gathered: Sequence[Tensor], more: Any, held: dict[str, Tensor] | None
    ) -> dict[str, Tensor]:
        codes = gathered[0]
        inverse = gathered[1] if more is None else read_here(more)
        size = self.count, codes.shape[-1]
        parts = _new_parts(codes, inverse, self.fp8, size) if held is None else held
        self.fill(codes, inverse, parts)
        return parts

    def cast_whole(self, values: Tensor) -> OperandTensor:
        return OperandTensor.of(values, self.fp8)

    def made(self, parts: dict[str, Tensor], size: tuple[int, int], dtype: torch.dtype) -> OperandTensor:
        return of_parts(parts, self.fp8, size, dtype)

    def rebuilding(self) -> tuple[Any, Any]:
        return _parameter, encode(self.fp8)

    def join(self, mesh: Any, count: int) -> None:
        """Know the processes and the whole weight's rows."""
        group, known = mesh.get_group(), (self.count, self.processes)
        self.mesh, self.count, self.processes = mesh, count, mesh.size()
        if known != (self.count, self.processes):
            self._filling, self._known = ((), [], []), _Known()
        if not _codes_fit(self):
            self.together = None
        elif self.together is None or self.group is not group:
            groups = _BLOCKS_OF_GROUP if self.fp8.w.granularity == _BLOCKS else _OF_GROUP
            self.together = groups.setdefault(group, _Together())
            self.together.places.append(weakref.ref(self))
            self.written = True
        self.group = group

    def take(self, amax: Tensor | None, scale: Tensor, inverse: Tensor) -> None:
        """Know the scales of the rows as they are."""
        self.amax, self.scale, self.inverse, self.stale = amax, scale, inverse, True
        self.noted()

    def follow(self, source: Seen, target: Seen) -> Rows | None:
        former: Any = super().follow(source, target)
        together = None if former is None else former.together
        if together is None:
            return former  # type: ignore[no-any-return]
        self.together, self.mesh, self.group = together, former.mesh, former.group
        self.count, self.processes = former.count, former.processes
        together.places = [weakref.ref(self) if each() is former else each for each in together.places]
        former.together = former.mesh = former.group = None
        if not former.changed:
            assert former.scale is not None and former.inverse is not None
            self.take(former.amax, former.scale, former.inverse)
        return former  # type: ignore[no-any-return]

    def cast(self) -> Tensor:
        """The rows' codes, uint8, by ``scale``."""
        if self.codes is None or self.stale:
            assert self.scale is not None
            taken = torch.empty_like(self.scale)
            own = _Cast(self, self.new_codes(), self.scale, taken)
            device = own.rows.device
            _cast_all(dispatch.kernels(device), [own], stream_of(device))
            self.stale = False
        assert self.codes is not None
        return self.codes

    def new_codes(self) -> Tensor:
        """New memory for ``codes``."""
        self.codes = torch.empty(self.padded.shape, dtype=torch.uint8, device=self.padded.device)
        return self.codes

    def fill(self, codes: Tensor, inverse: Tensor, parts: dict[str, Tensor]) -> None:
        """Fill the whole weight's ``parts`` of its codes (rows and perhaps more, K) and its scales' inverses:
        all but those that are the codes as they lie."""
        addresses = [t.data_ptr() for t in (codes, inverse, *parts.values())]
        if addresses != self._filling[0]:
            self._filling = addresses, *_moves(codes, inverse, self.fp8, self.count, parts)
        _, moves, padded = self._filling
        if padded:
            larger = [parts[name] for name in padded]
            with torch.no_grad(), torch_compat.unseen_writes(tuple(larger)):
                for part in larger:
                    part.zero_()
        self._known.run(moves[0][0], addresses, _move_all, moves)


class _Cast:
    """The places of one weight's arrays, and how it is cast: the rows, their codes, scales, and amaxes where
    these are taken, and where the cast writes the scales' inverses."""

    __slots__ = ("amax", "codes", "format", "inverse", "rows", "scale", "tile")

    def __init__(
        self, own: OperandRows, codes: Tensor, scale: Tensor, inverse: Tensor, amax: Tensor | None = None
    ) -> None:
        self.amax = None if amax is None else _place(amax)
        self.rows, self.codes, self.scale, self.inverse = map(_place, (own.padded, codes, scale, inverse))
        self.format, self.tile = own.fp8.w.format, _tiles(own)[0]


class _Together:
    """Weights that a group of processes gathers: those that changed get their amaxes, scales and codes
    together, in memory that stays theirs as long as the weights are the same.

    ``places``: the weights, in the order of their first gathering, which is the same everywhere. Each process
    collects garbage at its own time: a weight's place stays until no process has the weight any more.
    """

    def __init__(self) -> None:
        self.places: list[weakref.ref[OperandRows]] = []
        self._count = -1  # weights that the rest is of
        self._amaxes = torch.empty(0)
        self._tensors: list[tuple[Tensor, ...]] = []  # of each weight: amax, scale, inverse, the cast's own
        self._limited: list[tuple[Any, ...]] = []  # arguments of ``scale_from_amax``
        self._known = _Known(), _Known()

    def __len__(self) -> int:
        return len(self.places)

    def share(self, group: Any = None) -> None:
        """Make the amaxes, scales and codes of all weights that changed. ``group``: of the processes, which
        take the amaxes of whole weights by one reduction; rows that have not changed count by that of the
        whole weight. None where amaxes are of a process's own blocks."""
        held: list[Any] = [reference() for reference in self.places]
        held = [rows if rows is not None and rows.together is self else None for rows in held]
        changed = [i for i, rows in enumerate(held) if rows is not None and rows.changed]
        # what was asked for is still to be read, perhaps on another stream
        if None in held or len(held) != self._count or any(held[i].gathering for i in changed):
            with torch.inference_mode(False), torch.no_grad():  # the memory outlives this call
                self._make(held)
        elif len(changed) == len(held):
            self._amaxes.zero_()
        else:
            for i in changed:
                self._tensors[i][0].zero_()
        casts = [self._cast_of(i, held[i]) for i in changed]
        amaxes = as_view(self._amaxes)
        key = [amaxes.ptr, *changed, *[own.rows.ptr for own in casts]]
        self._known[0].run(amaxes, key, _amax_all, casts)
        if group is not None:
            what = "amaxes of sharded weights"
            TorchCollectives.of(group).all_reduce(amaxes, "max", stream_of(amaxes.device), what)
        key += [own.codes.ptr for own in casts]
        self._known[1].run(amaxes, key, _scale_and_cast, self._limited, casts)
        for rows, own in zip(held, self._tensors, strict=True):
            if rows is not None:
                rows.take(*own[:3])
        for i in changed:
            held[i].stale = False
        if None in held:
            self._count = -1
            left = [rows is not None for rows in held]
            if group is not None:
                left = [amax != _GONE for amax in self._amaxes.tolist()]
            self.places[:] = [place for place, stays in zip(self.places, left, strict=True) if stays]

    def _make(self, held: list[Any]) -> None:
        """New memory for these weights. Amaxes are 0 where rows have changed, ``_GONE`` where they are
        gone."""
        alive = [rows for rows in held if rows is not None]
        grids = [(1,) if rows is None else _tiles(rows)[1] for rows in held]
        sizes = [math.prod(grid) for grid in grids]
        whole = alive[0].padded.new_zeros((4, sum(sizes)), dtype=torch.float32)
        self._count, self._amaxes, self._known = len(held), whole[0], (_Known(), _Known())
        self._tensors = [
            tuple(row.view(grid) for row in part.unbind())
            for part, grid in zip(whole.split(sizes, 1), grids, strict=True)
        ]
        gone, known = whole.new_full((1,), _GONE), []
        for rows, (_, _, _, zeros) in zip(held, self._tensors, strict=True):
            known.append(gone if rows is None else zeros if rows.changed else rows.amax)
            if rows is not None:
                rows.casting = None
        torch.cat([each.view(-1) for each in known], out=self._amaxes)
        rules = {(rows.fp8.w, rows.padded.dtype) for rows in alive}
        each = [(rows, own[:3]) for rows, own in zip(held, self._tensors, strict=True) if rows is not None]
        if len(rules) == 1:
            each = [(alive[0], whole[:3].unbind())]
        self._limited = [(*map(_place, own), *limits_of(rows.fp8.w, rows.padded.dtype)) for rows, own in each]

    def _cast_of(self, i: int, rows: OperandRows) -> _Cast:
        """The cast of a weight that has changed."""
        own, codes = rows.casting, rows.codes
        if codes is None or rows.gathering:
            codes = rows.new_codes()
        elif own is not None and (own.rows.ptr, own.codes.ptr) == (rows.padded.data_ptr(), codes.data_ptr()):
            return own
        amax, scale, _, taken = self._tensors[i]
        own = rows.casting = _Cast(rows, codes, scale, taken, amax)
        return own


# process group -> the weights of one scale, whose amaxes its processes reduce; those with scales of blocks
_OF_GROUP: weakref.WeakKeyDictionary[Any, _Together] = weakref.WeakKeyDictionary()
_BLOCKS_OF_GROUP: weakref.WeakKeyDictionary[Any, _Together] = weakref.WeakKeyDictionary()
_Move = tuple[ArrayView, ArrayView]


def _place(tensor: Tensor) -> ArrayView:
    """``as_view``, without keeping the memory alive: for what is kept beside a tensor."""
    view = as_view(tensor)
    view.owner = None
    return view


def _amax_all(kernels: Any, casts: Sequence[_Cast], stream: int) -> None:
    for own in casts:
        kernels.amax(own.rows, own.amax, own.tile, stream)


def _scale_and_cast(
    kernels: Any, limited: Sequence[tuple[Any, ...]], casts: Sequence[_Cast], stream: int
) -> None:
    for arguments in limited:
        kernels.scale_from_amax(*arguments, stream)
    _cast_all(kernels, casts, stream)


def _cast_all(kernels: Any, casts: Sequence[_Cast], stream: int) -> None:
    for own in casts:
        how = None, own.format, own.tile, True, 0, 0, None
        kernels.quantize(own.rows, own.codes, own.scale, own.inverse, *how, stream)


def _move_all(kernels: Any, moves: Sequence[_Move], stream: int) -> None:
    for source, target in moves:
        kernels.copy(source, target, stream)


def _tiles(rows: OperandRows) -> tuple[tuple[int, int], tuple[int, ...]]:
    """A tile's size, and the shape of one value a tile."""
    return tiling(rows.fp8.w.granularity, tuple(rows.padded.shape))


def _codes_fit(rows: OperandRows) -> bool:
    """Whether the codes of the processes' rows are those of the whole weight, one after the other."""
    how, own, processes = rows.fp8.w.granularity, rows.padded.shape[0], rows.processes
    fits = how == "tensor" or (how == _BLOCKS and own % 128 == 0 and rows.count == own * processes)
    if not fits:
        say_values(f"{rows.count} rows of {processes} processes with scales by {how}")
    return fits


def _share_amaxes(group: Any) -> None:
    """Take anew the amaxes of all weights of these processes that have one scale."""
    _OF_GROUP[group].share(group)


def _new_parts(codes: Tensor, inverse: Tensor, fp8: Quantization, size: tuple[int, int]) -> dict[str, Tensor]:
    """Memory for a weight's parts, of which ``codes``, as they lie, are perhaps one."""
    blocks, parts = fp8.w.granularity == _BLOCKS, {}
    for name, (shape, of_scales) in _shapes(fp8, size).items():
        parts[name] = codes[: size[0]] if name == "w_q" and shape == size else codes.new_empty(shape)
        if blocks:
            parts[f"{name}_inv"] = inverse.new_ones(of_scales)
    if not blocks:
        parts["w_scale_inv"] = inverse.new_empty(1)  # memory of its own: libraries want scales aligned
    return parts


def _moves(
    codes: Tensor, inverse: Tensor, fp8: Quantization, n: int, parts: dict[str, Tensor]
) -> tuple[list[_Move], list[str]]:
    """(Copies that fill a weight's parts, names of parts that are larger than what is copied into them)."""
    found, padded = [], []
    for name, part in parts.items():
        transposed = name.startswith("w_qt")
        if name in ("w_q", "w_qt"):
            source = codes[:n].t() if transposed else codes[:n]
            if part.data_ptr() == source.data_ptr():  # as they lie
                continue
            if tuple(part.shape) != tuple(source.shape):
                padded.append(name)
        else:
            grid = inverse.reshape(1) if name == "w_scale_inv" else inverse
            source = grid.t() if transposed else grid
        found.append((source, part[tuple(map(slice, source.shape))]))
    return [(_place(source), _place(target)) for source, target in found], padded


@memoized("parts of sharded weights")
def _shapes(fp8: Quantization, size: tuple[int, int]) -> dict[str, Any]:
    """Of the codes of both orientations, and of their scales."""
    product: Any = product_class(fp8)
    (n, k), rule = size, fp8.w
    return {"w_q": product.shapes(n, k, rule), "w_qt": product.shapes(k, n, rule)}


def rows_of(values: Tensor, fp8: Quantization) -> ShardedWeight:
    """``values`` h (rows, K) as a process's rows."""
    return ShardedWeight(values, OperandRows(values, fp8))


def _parameter(values: Tensor, fp8: str, requires_grad: bool) -> torch.nn.Parameter:
    """A whole weight on the meta device that was copied or loaded."""
    return torch.nn.Parameter(rows_of(values, decode(fp8)), requires_grad)


SHARDED_BY[OperandTensor] = lambda values, held: rows_of(values, held._fp8)
