"""``ShardedWeight``: a process's rows of a weight of ``quantized_model_init`` under torch's ``fully_shard``.

The rows stay in high precision, as an optimiser wants them; what is gathered are codes, a byte an element.
Each process casts its rows by the scale of the whole weight, so that all have the codes that one process
would: the amaxes of all weights are reduced together, once after each change of them.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8kit import slowness
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
from fp8kit_torch.held_values import written_by
from fp8kit_torch.operand_tensor import SHARDED_BY, OperandTensor, of_parts
from fp8kit_torch.state import stream_of
from fp8kit_torch.views import as_view
from fp8kit_torch.weight_scales import limits_of

_aten = torch.ops.aten
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


class _Rows:
    """A process's rows of one weight, with those that make all processes' parts as long: ``padded`` h (rows,
    K). ``fp8``: how the weight is held; ``mesh``, ``group``, ``count``: the processes, and the whole weight's
    rows, once they are known; ``together``: the weights that are cast with this one, None where no codes are
    gathered; ``amax``, ``scale``, ``inverse``: of the whole weight, or of the rows' blocks; ``written``:
    whether somebody was seen to write to the rows since; ``codes``: of the rows, of earlier scales where they
    are ``stale``; ``gathering``: whether ``fully_shard`` has asked for them and has no whole weight yet;
    ``former``: rows whose values are perhaps to be copied here, see ``follow``, and their shape without those
    that pad."""

    def __init__(self, padded: Tensor, fp8: Quantization, former: tuple[Any, ...] = (None, None)) -> None:
        self.padded, self.fp8, self.former = padded, fp8, former
        self.mesh: Any = None
        self.group: Any = None
        self.together: _Together | None = None
        self.count = self.processes = 0
        self.written = self.stale = True
        self.gathering = False
        self.amax: Tensor | None = None
        self.scale: Tensor | None = None
        self.inverse: Tensor | None = None
        self.codes: Tensor | None = None
        self._taken = -1
        self.casting: _Cast | None = None  # of what lies where it lay before
        self._filling: tuple[Sequence[int], list[_Move], list[str]] = ((), [], [])
        self._known = _Known()

    @property
    def changed(self) -> bool:
        """Whether rows were written to since ``take``, also by a view of them."""
        return self.written or self._taken != self._now()

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
        self.written, self._taken = False, self._now()

    def follow(self, source: _Seen, target: _Seen) -> None:
        """Take the place of rows of which all were copied here. ``fully_shard`` pads rows again when a state
        was loaded, in the processes that have fewer rows; for the others they are the same weight still."""
        known, shape = self.former
        former = source._rows
        if known is None or known() is not former or {source.shape, target.shape} != {shape}:
            return
        self.former = (None, None)
        together = former.together
        if together is None:
            return
        self.together, self.mesh, self.group = together, former.mesh, former.group
        self.count, self.processes = former.count, former.processes
        together.places = [weakref.ref(self) if each() is former else each for each in together.places]
        former.together = former.mesh = former.group = None
        if not former.changed:
            assert former.scale is not None and former.inverse is not None
            self.take(former.amax, former.scale, former.inverse)

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

    def seen(self, plain: Tensor) -> _Seen:
        """A tensor in the memory of ``padded``: a weight where it is its first rows, as they lie."""

        def lying(t: Tensor) -> Any:
            return t.dtype, t.storage_offset(), t.stride(), t.shape[1:]

        kind = ShardedWeight if lying(plain) == lying(self.padded) else _Seen
        return kind(plain, self)  # type: ignore[no-any-return]

    def _now(self) -> int:
        return 0 if self.padded.is_inference() else torch_compat.version(self.padded)


class _Cast:
    """The places of one weight's arrays, and how it is cast: the rows, their codes, scales, and amaxes where
    these are taken, and where the cast writes the scales' inverses."""

    __slots__ = ("amax", "codes", "format", "inverse", "rows", "scale", "tile")

    def __init__(
        self, own: _Rows, codes: Tensor, scale: Tensor, inverse: Tensor, amax: Tensor | None = None
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
        self.places: list[weakref.ref[_Rows]] = []
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

    def _cast_of(self, i: int, rows: _Rows) -> _Cast:
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


def _tiles(rows: _Rows) -> tuple[tuple[int, int], tuple[int, ...]]:
    """A tile's size, and the shape of one value a tile."""
    return tiling(rows.fp8.w.granularity, tuple(rows.padded.shape))


class _Knowing(torch.Tensor):
    """Attributes that copies do not have: torch's stager of asynchronous checkpoints makes plain tensors, and
    gives them all of a tensor's ``__dict__`` and of its class' own ``__slots__``."""

    __slots__ = ("_plain", "_rows")

    _rows: _Rows
    _plain: Tensor


class _Seen(_Knowing):
    """Memory of a process's rows in any shape: a plain tensor, but writes to it and to its views are known.
    (``data``, and views that are made below autograd, have version counters of their own.)"""

    __slots__ = ()

    @staticmethod
    def __new__(cls, plain: Tensor, rows: _Rows | None = None, *, requires_grad: bool = False) -> Any:
        if rows is None:  # as accelerate makes a parameter of a parameter's class
            return torch.nn.Parameter(plain, requires_grad)
        made = torch_compat.make_subclass(cls, plain)
        made._plain, made._rows = plain, rows
        return made

    def __init__(self, plain: Tensor, rows: _Rows) -> None:
        pass

    __torch_function__ = torch_compat.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation on the plain tensor; those by which ``fully_shard`` and modules move rows give such
        rows again."""
        kwargs = kwargs or {}
        given, named = [*map(_opened, args)], {name: _opened(value) for name, value in kwargs.items()}
        own = args[0] if args and isinstance(args[0], _Seen) else None
        for place, name in written_by(func):
            _note_all(args[place] if place < len(args) else kwargs.get(name))
        if isinstance(own, ShardedWeight) and func in _MOVING:
            whole = func(own._rows.padded, *given[1:], **named)
            rows = _Rows(whole, own._rows.fp8)
            return ShardedWeight(whole[: own.shape[0]], rows)
        out = func(*given, **named)
        if func is _aten.copy_.default and own is not None and isinstance(args[1], _Seen):
            own._rows.follow(args[1], own)
        if own is None or out is own._plain:
            return own if own is not None else out
        if func is _aten.new_zeros.default and out.ndim == 2 and out.shape[1:] == own.shape[1:]:
            return ShardedWeight(out, _Rows(out, own._rows.fp8, (weakref.ref(own._rows), own.shape)))
        return torch_compat.tree_map(own._rows.seen, out) if func.is_view else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self, torch.nn.Parameter):
            return _parameter, (self._plain, encode(self._rows.fp8), self.requires_grad)
        return self._plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    # torch refuses both for classes of one's own

    def numpy(self, *, force: bool = False) -> Any:
        return self._plain.numpy(force=force)

    def tolist(self) -> Any:
        return self._plain.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedWeight({self._plain!r})"


class _Hook:
    """A method that ``fully_shard`` asks for its parameters before each call: the answer is kept."""

    def __init__(self, function: Callable[..., Any]) -> None:
        signature = inspect.signature(function)
        own = {"__signature__": signature.replace(parameters=[*signature.parameters.values()][1:])}
        self._function, self._bound = function, type(function.__name__, (partial,), own)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._function if instance is None else self._bound(self._function, instance)


class ShardedWeight(_Seen):
    """Rows h (rows, K) of a weight that its layer multiplies in FP8, a plain tensor to everybody but
    ``fully_shard``, which makes it: any optimiser takes it, and ``state_dict`` has its values.

    Gathered are uint8 codes, and with scales of blocks these: of rows that are a multiple of 128 in each
    process. Where they are not, or a recipe scales neither tensors nor such blocks, the values themselves are
    gathered, and cast by each process, with a warning.
    """

    __slots__ = ()

    # --- what fully_shard calls -----------------------------------------------------------------------------

    @_Hook
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What is gathered of this process's rows; and these rows, which may be those of a copy, with the
        weight's scale_inv where that is not gathered. ``mesh``: of the processes; ``outer_size``: the whole
        weight's."""
        rows = self._rows
        if rows.mesh is not mesh or rows.count != outer_size[0]:
            rows.join(mesh, outer_size[0])
        if rows.together is None:
            return (rows.padded,), (rows, None)
        blocks = rows.fp8.w.granularity == _BLOCKS
        if rows.changed:
            rows.together.share() if blocks else _share_amaxes(rows.group)
        codes, rows.gathering = rows.cast(), True
        # torch moves the first alone where there is one process
        if blocks and rows.processes > 1:
            return (codes, rows.inverse), (rows, None)
        return (codes,), (rows, rows.inverse)

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """(The whole weight, memory that it has beside what was gathered), or None where ``out``, what this
        gave before, is filled anew."""
        (rows, inverse), first = metadata, all_gather_outputs[0]
        size = rows.count, first.shape[-1]
        local: OperandTensor | None = torch_compat.local_part(out)
        rows.gathering = False
        if first.dtype is torch.uint8:
            if inverse is None:
                inverse = all_gather_outputs[1]
            elif inverse.is_cuda:  # which may be of another stream, and replaced before this one has read it
                inverse.record_stream(torch.cuda.current_stream(inverse.device))
            parts = _new_parts(first, inverse, rows.fp8, size) if local is None else local._parts
            rows.fill(first, inverse, parts)
        else:
            with torch.no_grad():
                cast = OperandTensor.of(first[: rows.count].to(param_dtype), rows.fp8)
                parts = {name: part.clone() for name, part in cast._parts.items()}  # memory that can be freed
        if local is None:
            beside = [part for part in parts.values() if part.dtype is torch.uint8]
            shared = first.untyped_storage().data_ptr()
            own = tuple(part for part in beside if part.untyped_storage().data_ptr() != shared)
            return of_parts(parts, rows.fp8, size, param_dtype), own
        local.refill(parts)
        return None


def note_written(tensor: Any) -> None:
    """Say that somebody wrote to the memory of ``tensor``, where that is a process's rows of a weight."""
    if isinstance(tensor, _Seen):
        tensor._rows.written = True


def _note_all(value: Any) -> None:
    """``note_written`` of a tensor, or of those in lists."""
    if type(value) in _LISTS:
        if not _OWN.isdisjoint(map(type, value)):
            for one in value:
                _note_all(one)
    else:
        note_written(value)


def _opened(value: Any) -> Any:
    """An argument with plain tensors in the place of such rows."""
    if (kind := type(value)) in _LISTS:
        return value if _OWN.isdisjoint(map(type, value)) else kind(map(_opened, value))
    return value._plain if isinstance(value, _Seen) else value


def _codes_fit(rows: _Rows) -> bool:
    """Whether the codes of the processes' rows are those of the whole weight, one after the other."""
    how, own, processes = rows.fp8.w.granularity, rows.padded.shape[0], rows.processes
    fits = how == "tensor" or (how == _BLOCKS and own % 128 == 0 and rows.count == own * processes)
    if not fits:
        what = f"{rows.count} rows of {processes} processes with scales by {how}"
        slowness.say(
            f"fully_shard: codes of parts are not those of the whole: {what}",
            "weights are gathered in high precision, and cast by each process",
            "take scales of tensors, or rows that are a multiple of 128 in each process",
        )
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
    return ShardedWeight(values, _Rows(values, fp8))


def _parameter(values: Tensor, fp8: str, requires_grad: bool) -> torch.nn.Parameter:
    """A whole weight on the meta device that was copied or loaded."""
    return torch.nn.Parameter(rows_of(values, decode(fp8)), requires_grad)


SHARDED_BY.append(rows_of)
_MOVING = (torch_compat.TO_COPY, _aten.clone.default, _aten.empty_like.default, torch_compat.PIN_MEMORY)
_LISTS = (list, tuple)
_OWN = {_Seen, ShardedWeight, *_LISTS}
