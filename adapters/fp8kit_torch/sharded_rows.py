"""``ShardedWeight``: a process's rows of a weight of ``quantized_model_init`` under torch's ``fully_shard``.

The rows stay in high precision, as an optimiser wants them, and know of writes to them. What is gathered of
them says their ``Rows``: ``sharded_weight`` (FP8 as layers multiply it), ``te_compat.sharded_blocks`` (MXFP8
and NVFP4).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8kit import slowness
from fp8kit_torch import torch_compat
from fp8kit_torch.held_values import written_by

_aten = torch.ops.aten


class Rows:
    """A process's rows of one weight, with those that make all processes' parts as long: ``padded`` h (rows,
    K). ``fp8``: how the weight is held; ``count``: the whole weight's rows, once they are known; ``written``:
    whether somebody was seen to write to the rows since; ``gathering``: whether ``fully_shard`` has asked for
    their codes and has no whole weight yet; ``former``: rows whose values are perhaps to be copied here, see
    ``follow``, and their shape without those that pad. A subclass says what is gathered."""

    def __init__(self, padded: Tensor, fp8: Any, former: tuple[Any, ...] = (None, None)) -> None:
        self.padded, self.fp8, self.former = padded, fp8, former
        self.count = 0
        self.written, self.gathering = True, False
        self._taken = -1

    # --- what a subclass says -------------------------------------------------------------------------------

    def gathered(self, mesh: Any, count: int) -> tuple[tuple[Tensor, ...], Any]:
        """(What is gathered of these rows, what of it torch does not move). ``mesh``: of the processes;
        ``count``: the whole weight's rows."""
        raise NotImplementedError

    def parts_of(
        self, gathered: Sequence[Tensor], more: Any, held: dict[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """The whole weight's parts of gathered codes, written into ``held``, or where that is None into new
        memory, in which the first of ``gathered`` may be a part as it lies."""
        raise NotImplementedError

    def cast_whole(self, values: Tensor) -> Any:
        """The whole weight of its values."""
        raise NotImplementedError

    def made(self, parts: dict[str, Tensor], size: tuple[int, int], dtype: torch.dtype) -> Any:
        """The whole weight of these parts."""
        raise NotImplementedError

    def rebuilding(self) -> tuple[Any, Any]:
        """(function, its second argument) that make a parameter again that was copied or loaded."""
        raise NotImplementedError

    # --- what they share ------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether rows were written to since ``noted``, also by a view of them."""
        return self.written or self._taken != self._now()

    def noted(self) -> None:
        """Know the rows as they are."""
        self.written, self._taken = False, self._now()

    def follow(self, source: Seen, target: Seen) -> Rows | None:
        """Rows of which all were copied here, whose place these take. ``fully_shard`` pads rows again when a
        state was loaded, in the processes that have fewer rows; for the others they are the same weight
        still."""
        known, shape = self.former
        if known is None or known() is not source._rows or {source.shape, target.shape} != {shape}:
            return None
        self.former = (None, None)
        return source._rows

    def whole(
        self, outputs: Sequence[Tensor], more: Any, dtype: torch.dtype, local: Any
    ) -> tuple[Any, tuple[Tensor, ...]] | None:
        """(The whole weight, memory that it has beside what was gathered), or None where ``local``, what this
        gave before, is filled anew."""
        first = outputs[0]
        size = self.count, self.padded.shape[-1]
        self.gathering = False
        if first.dtype is torch.uint8:
            parts = self.parts_of(outputs, more, None if local is None else local._parts)
        else:
            with torch.inference_mode(False), torch.no_grad():  # the memory outlives this call
                cast = self.cast_whole(first[: self.count].to(dtype))
                parts = {name: part.clone() for name, part in cast._parts.items()}  # memory that can be freed
        if local is None:
            beside = [part for part in parts.values() if part.dtype is torch.uint8]
            shared = first.untyped_storage().data_ptr()
            own = tuple(part for part in beside if part.untyped_storage().data_ptr() != shared)
            return self.made(parts, size, dtype), own
        local.refill(parts)
        return None

    def seen(self, plain: Tensor) -> Seen:
        """A tensor in the memory of ``padded``: a weight where it is its first rows, as they lie."""

        def lying(t: Tensor) -> Any:
            return t.dtype, t.storage_offset(), t.stride(), t.shape[1:]

        kind = ShardedWeight if lying(plain) == lying(self.padded) else Seen
        return kind(plain, self)  # type: ignore[no-any-return]

    def _now(self) -> int:
        return 0 if self.padded.is_inference() else torch_compat.version(self.padded)


def say_values(what: str) -> None:
    """Warn that codes of parts are not those of the whole."""
    slowness.say(
        f"fully_shard: codes of parts are not those of the whole: {what}",
        "weights are gathered in high precision, and cast by each process",
        "take scales of tensors, MXFP8's, or blocks of which each process has whole ones",
    )


def read_here(tensor: Tensor) -> Tensor:
    """``tensor``, which may be of another stream, and replaced before this one has read it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


class _Knowing(torch.Tensor):
    """Attributes that copies do not have: torch's stager of asynchronous checkpoints makes plain tensors, and
    gives them all of a tensor's ``__dict__`` and of its class' own ``__slots__``."""

    __slots__ = ("_plain", "_rows")

    _rows: Rows
    _plain: Tensor


class Seen(_Knowing):
    """Memory of a process's rows in any shape: a plain tensor, but writes to it and to its views are known.
    (``data``, and views that are made below autograd, have version counters of their own.)"""

    __slots__ = ()

    @staticmethod
    def __new__(cls, plain: Tensor, rows: Rows | None = None, *, requires_grad: bool = False) -> Any:
        if rows is None:  # as accelerate makes a parameter of a parameter's class
            return torch.nn.Parameter(plain, requires_grad)
        made = torch_compat.make_subclass(cls, plain)
        made._plain, made._rows = plain, rows
        return made

    def __init__(self, plain: Tensor, rows: Rows) -> None:
        pass

    __torch_function__ = torch_compat.no_torch_function

    @property
    def data(self) -> Any:  # type: ignore[override]
        """As torch's: modules assign it where they change dtype or device."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        rows = value._rows if isinstance(value, Seen) else _alike(self._rows, value.detach())
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._plain, self._rows = _opened(value).detach(), rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation on the plain tensor; those by which ``fully_shard`` and modules move rows give such
        rows again."""
        kwargs = kwargs or {}
        given, named = [*map(_opened, args)], {name: _opened(value) for name, value in kwargs.items()}
        own = args[0] if args and isinstance(args[0], Seen) else None
        for place, name in written_by(func):
            _note_all(args[place] if place < len(args) else kwargs.get(name))
        if isinstance(own, ShardedWeight) and func in _MOVING:
            whole = func(own._rows.padded, *given[1:], **named)
            return ShardedWeight(whole[: own.shape[0]], _alike(own._rows, whole))
        out = func(*given, **named)
        if func is _aten.copy_.default and own is not None and isinstance(args[1], Seen):
            own._rows.follow(args[1], own)
        if own is None or out is own._plain:
            return own if own is not None else out
        if func is _aten.new_zeros.default and out.ndim == 2 and out.shape[1:] == own.shape[1:]:
            return ShardedWeight(out, _alike(own._rows, out, (weakref.ref(own._rows), own.shape)))
        return torch_compat.tree_map(own._rows.seen, out) if func.is_view else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self, torch.nn.Parameter):
            function, how = self._rows.rebuilding()
            return function, (self._plain, how, self.requires_grad)
        return self._plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    # torch refuses both for classes of one's own

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a NumPy array in their memory."""
        return self._plain.numpy(force=force)

    def tolist(self) -> Any:
        """The values as nested lists."""
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


class ShardedWeight(Seen):
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
        """What is gathered of this process's rows; and these rows, which may be those of a copy, with what
        belongs to the codes and is not gathered. ``mesh``: of the processes; ``outer_size``: the whole
        weight's."""
        tensors, more = self._rows.gathered(mesh, outer_size[0])
        return tensors, (self._rows, more)

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """(The whole weight, memory that it has beside what was gathered), or None where ``out``, what this
        gave before, is filled anew."""
        rows, more = metadata
        return rows.whole(all_gather_outputs, more, param_dtype, torch_compat.local_part(out))


def note_written(tensor: Any) -> None:
    """Say that somebody wrote to the memory of ``tensor``, where that is a process's rows of a weight."""
    if isinstance(tensor, Seen):
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
    return value._plain if isinstance(value, Seen) else value


def _alike(rows: Rows, padded: Tensor, former: tuple[Any, ...] = (None, None)) -> Rows:
    return type(rows)(padded, rows.fp8, former)


_MOVING = (torch_compat.TO_COPY, _aten.clone.default, _aten.empty_like.default, torch_compat.PIN_MEMORY)
_LISTS = (list, tuple)
_OWN = {Seen, ShardedWeight, *_LISTS}
