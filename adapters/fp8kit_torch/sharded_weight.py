"""``ShardedWeight``: a process's rows of a weight of ``quantized_model_init`` under torch's ``fully_shard``.

The rows stay in high precision, as an optimiser wants them; what is gathered are codes, a byte an element.
Each process casts its rows by the scale of the whole weight, so that all have the codes that one process
would: the amaxes of all weights are reduced together, once after each change of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from fp8kit import slowness
from fp8kit.backends import dispatch
from fp8kit.lru import memoized
from fp8kit.ops.products import product_class
from fp8kit.quantization import Quantization
from fp8kit.tiles import tiling
from fp8kit_torch import torch_compat
from fp8kit_torch.collectives import TorchCollectives
from fp8kit_torch.operand_tensor import SHARDED_BY, OperandTensor, of_parts
from fp8kit_torch.state import _stream
from fp8kit_torch.views import as_view
from fp8kit_torch.weight_scales import amax_of, scales_of

_aten = torch.ops.aten
# process group -> the weights whose amaxes its processes reduce, in the order of their first gathering, which
# is the same everywhere. Each process collects garbage at its own time: a weight's place stays until no
# process has the weight any more.
_OF_GROUP: weakref.WeakKeyDictionary[Any, list[weakref.ref[_Rows]]] = weakref.WeakKeyDictionary()
_GONE = -1.0  # the amax of a weight that this process does not have any more
_BLOCKS = "block_128x128"


class _Rows:
    """A process's rows of one weight, with those that make all processes' parts as long: ``padded`` h (rows,
    K). ``fp8``: how the weight is held; ``group``, ``count``: the processes, and the whole weight's rows,
    once they are known; ``scale`` and ``inverse``: of the whole weight, or of the rows' blocks; ``written``:
    whether somebody was seen to write to the rows since; ``codes``: of the rows, kept while nobody does."""

    def __init__(self, padded: Tensor, fp8: Quantization) -> None:
        self.padded, self.fp8 = padded, fp8
        self.group: Any = None
        self.count, self.written = 0, True
        self.amax: Tensor | None = None
        self.scale: Tensor | None = None
        self.inverse: Tensor | None = None
        self.codes: Tensor | None = None
        self._version = -1

    @property
    def changed(self) -> bool:
        """Whether rows were written to since ``take``, also by a view of them."""
        return self.written or self._version != self._now()

    def take(self, amax: Tensor | None, scale: Tensor, inverse: Tensor) -> None:
        """Know the scales of the rows as they are."""
        self.amax, self.scale, self.inverse, self.codes = amax, scale, inverse, None
        self.written, self._version = False, self._now()

    def cast(self) -> Tensor:
        """The rows' codes, uint8, by ``scale``."""
        if self.codes is None:
            rule, rows = self.fp8.w, as_view(self.padded)
            self.codes = torch.empty(self.padded.shape, dtype=torch.uint8, device=self.padded.device)
            assert self.scale is not None
            taken = torch.empty_like(self.scale)  # the inverses, as ``inverse`` has them
            views = as_view(self.codes), as_view(self.scale), as_view(taken), None
            how = rule.format, tiling(rule.granularity, rows.shape)[0], True, 0, 0, None
            dispatch.kernels(rows.device).quantize(rows, *views, *how, _stream(rows.device))
        return self.codes

    def seen(self, plain: Tensor) -> _Seen:
        """A tensor in the memory of ``padded``: a weight where it is its first rows, as they lie."""

        def lying(t: Tensor) -> Any:
            return t.dtype, t.storage_offset(), t.stride(), t.shape[1:]

        made: _Seen = (ShardedWeight if lying(plain) == lying(self.padded) else _Seen)(plain, self)
        return made

    def _now(self) -> int:
        return 0 if self.padded.is_inference() else self.padded._version


class _Seen(torch.Tensor):
    """Memory of a process's rows in any shape: a plain tensor, but writes to it and to its views are known.
    (``data``, and views that are made below autograd, have version counters of their own.)"""

    _rows: _Rows
    _plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor, rows: _Rows) -> Any:
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
        given, named = torch_compat.tree_map(_plain, args), torch_compat.tree_map(_plain, kwargs or {})
        own = args[0] if args and isinstance(args[0], _Seen) else None
        collective = func.namespace == "c10d"  # whose schemas do not say what they write
        for place, argument in enumerate(torch_compat.schema_arguments(func)):
            value = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
            for one in torch_compat.tree_leaves(value) if argument.is_write or collective else ():
                note_written(one)
        if isinstance(own, ShardedWeight) and func in _MOVING:
            whole = func(own._rows.padded, *given[1:], **named)
            rows = _Rows(whole, own._rows.fp8)
            return ShardedWeight(whole[: own.shape[0]], rows)
        out = func(*given, **named)
        if own is None or out is own._plain:
            return own if own is not None else out
        if func is _aten.new_zeros.default and out.ndim == 2 and out.shape[1:] == own.shape[1:]:
            return ShardedWeight(out, _Rows(out, own._rows.fp8))
        return torch_compat.tree_map(own._rows.seen, out) if func.is_view else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return made

    # torch refuses both for classes of one's own

    def numpy(self, *, force: bool = False) -> Any:
        return self._plain.numpy(force=force)

    def tolist(self) -> Any:
        return self._plain.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedWeight({self._plain!r})"


class ShardedWeight(_Seen):
    """Rows h (rows, K) of a weight that its layer multiplies in FP8, a plain tensor to everybody but
    ``fully_shard``, which makes it: any optimiser takes it, and ``state_dict`` has its values.

    Gathered are uint8 codes, and with scales of blocks these: of rows that are a multiple of 128 in each
    process. Where they are not, or a recipe scales neither tensors nor such blocks, the values themselves are
    gathered, and cast by each process, with a warning.
    """

    # --- what fully_shard calls -----------------------------------------------------------------------------

    @torch.no_grad()
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What is gathered of this process's rows, and, where that is not gathered, the weight's scale_inv.
        ``mesh``: of the processes; ``outer_size``: the whole weight's."""
        rows, rule = self._rows, self._rows.fp8.w
        rows.count = outer_size[0]
        if not _codes_fit(rows, mesh.size()):
            return (rows.padded,), None
        if rule.granularity == _BLOCKS:
            if rows.changed:
                rows.take(None, *scales_of(amax_of(rows.padded, rule), rule, rows.padded.dtype))
            # torch moves the first alone where there is one process
            return ((rows.cast(), rows.inverse), None) if mesh.size() > 1 else ((rows.cast(),), rows.inverse)
        if rows.group is not (group := mesh.get_group()):
            rows.group = group
            _OF_GROUP.setdefault(group, []).append(weakref.ref(rows))
            rows.written = True
        if rows.changed:
            _share_amaxes(group)
        return (rows.cast(),), rows.inverse

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """(The whole weight, memory that it has beside what was gathered), or None where ``out``, what this
        gave before, is filled anew."""
        rows, first = self._rows, all_gather_outputs[0]
        size = rows.count, first.shape[-1]
        local: OperandTensor | None = getattr(out, "_local_tensor", out)
        if first.dtype is torch.uint8:
            inverse = all_gather_outputs[1] if metadata is None else metadata
            former = {} if local is None else local._parts
            with torch_compat.unseen_writes(tuple(former.values())):
                parts = _of_codes(first, inverse, rows.fp8, size, former)
        else:
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


def _plain(value: Any) -> Any:
    return value._plain if isinstance(value, _Seen) else value


def _codes_fit(rows: _Rows, processes: int) -> bool:
    """Whether the codes of the processes' rows are those of the whole weight, one after the other."""
    how, own = rows.fp8.w.granularity, rows.padded.shape[0]
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
    """Take anew the amaxes of all weights of these processes: one reduction. A process's own rows that have
    not changed count by the amax of the whole weight."""
    places = _OF_GROUP[group]
    held = [reference() for reference in places]
    own = next(rows.padded for rows in held if rows is not None)
    gone = own.new_full((1,), _GONE, dtype=torch.float32)
    amaxes = torch.cat([gone if rows is None else _amax(rows) for rows in held])
    view = as_view(amaxes)
    TorchCollectives.of(group).all_reduce(view, "max", _stream(view.device), "amaxes of sharded weights")
    for rows, amax, *scales in zip(held, amaxes.split(1), *_scales(held, amaxes), strict=True):
        if rows is not None:
            rows.take(amax, *scales)
    if None in held:
        left = zip(places, amaxes.tolist(), strict=True)
        places[:] = [reference for reference, amax in left if amax != _GONE]


def _scales(held: list[_Rows | None], amaxes: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The scale of each weight, and its inverse: made together where all have one rule."""
    rules = {(rows.fp8.w, rows.padded.dtype) for rows in held if rows is not None}
    if len(rules) == 1:
        made = scales_of(amaxes, *rules.pop())
        return made[0].split(1), made[1].split(1)
    found = [
        (amax, amax) if rows is None else scales_of(amax, rows.fp8.w, rows.padded.dtype)
        for rows, amax in zip(held, amaxes.split(1), strict=True)
    ]
    return [scale for scale, _ in found], [inverse for _, inverse in found]


def _amax(rows: _Rows) -> Tensor:
    """The amax of a process's rows, or of the whole weight where nobody wrote to them; float32 (1,)."""
    if rows.changed or rows.amax is None:
        return amax_of(rows.padded, rows.fp8.w)
    return rows.amax


def _of_codes(
    codes: Tensor, inverse: Tensor, fp8: Quantization, size: tuple[int, int], former: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A weight's parts, of its codes (rows and perhaps more, K) and its scales' inverses; in the memory of
    ``former`` parts, where there are any."""
    (n, k), rule = size, fp8.w
    shapes = _shapes(fp8, size)
    parts = {}
    for name, (shape, of_scales) in shapes.items():
        rows, columns = (n, k) if name == "w_q" else (k, n)
        if name == "w_q" and shape == (n, k):  # as they lie
            parts[name] = former.get(name, codes[:n])
        else:
            held = former[name] if name in former else codes.new_empty(shape)
            if shape != (rows, columns):
                held.zero_()
            lying, to = as_view(codes[:n] if name == "w_q" else codes[:n].t()), held[:rows, :columns]
            dispatch.kernels(lying.device).copy(lying, as_view(to), _stream(lying.device))
            parts[name] = held
        if rule.granularity == _BLOCKS:
            grid = inverse if name == "w_q" else inverse.t()
            parts[f"{name}_inv"] = inverse.new_ones(of_scales)
            parts[f"{name}_inv"][: grid.shape[0], : grid.shape[1]] = grid
    if rule.granularity != _BLOCKS:  # memory of its own: libraries want scales aligned
        known = former.get("w_scale_inv")
        parts["w_scale_inv"] = (
            inverse.reshape(1).clone() if known is None else known.copy_(inverse.reshape(1))
        )
    return parts


@memoized("parts of sharded weights")
def _shapes(fp8: Quantization, size: tuple[int, int]) -> dict[str, Any]:
    """Of the codes of both orientations, and of their scales."""
    product: Any = product_class(fp8)
    (n, k), rule = size, fp8.w
    return {"w_q": product.shapes(n, k, rule), "w_qt": product.shapes(k, n, rule)}


def _rows_of(values: Tensor, fp8: Quantization) -> ShardedWeight:
    return ShardedWeight(values, _Rows(values, fp8))


SHARDED_BY.append(_rows_of)
_MOVING = (_aten._to_copy.default, _aten.clone.default, _aten._pin_memory.default)
