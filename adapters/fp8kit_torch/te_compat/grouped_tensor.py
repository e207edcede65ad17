"""``GroupedTensor``: matrices in one piece of memory, one after the other, under Transformer Engine's names:
the weights of ``GroupedLinear(single_grouped_weight=True)``, and what programs make.

In high precision it is a tensor like any other, of shape (groups, rows, K), or (all rows, K) where their
numbers of rows differ; where columns differ its shape, (rows, all columns) or, where both do, (1, all
elements), says nothing of where an element lies. ``QuantizedGroupedTensor`` holds codes and scales, each part
of all matrices in one tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import integer
from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit_torch import torch_compat
from fp8kit_torch.checks import shown
from fp8kit_torch.operand_tensor import lag_of
from fp8kit_torch.quantized_tensor import QuantizedTensor, rebuilt

_OP = "GroupedTensor"
Shapes = tuple[tuple[int, ...], ...]


class GroupedTensorStorage:
    """What both kinds say of their matrices.

    ``num_tensors``, ``tensor_shapes``: how many, and of which shapes. ``logical_shape``: (all rows, K),
    (rows, all columns) or (1, all elements). ``first_dims``, ``last_dims``: int64 (groups,), their numbers of
    rows and of columns, None where these are equal.
    ``offsets``, ``tensor_offsets``: where each begins, in elements, as a list and on the device (None where
    all are alike). ``quantizer``: by which they are cast, None in high precision. ``rowwise_data``: the
    values, or the codes, flat; ``columnwise_data``, ``scale_inv``, ``columnwise_scale_inv``: flat too, None
    where there are none. ``quantized_tensors``: the matrices.
    """

    tensor_shapes: list[tuple[int, ...]]
    quantizer: Any = None
    dtype: torch.dtype
    device: Any
    amax = columnwise_amax = scale = None

    @property
    def num_tensors(self) -> int:
        """How many matrices."""
        return len(self.tensor_shapes)

    @property
    def fake_dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.dtype

    @property
    def logical_shape(self) -> tuple[int, int]:
        """(all rows, columns), (rows, all columns) where only columns differ, (1, all elements) where both
        do."""
        return _logical(self.tensor_shapes)

    @property
    def first_dims(self) -> Tensor | None:
        """int64 (groups,), the numbers of rows; None where these are equal."""
        return self._dims(_rows(self.tensor_shapes))

    @property
    def last_dims(self) -> Tensor | None:
        """int64 (groups,), the numbers of columns; None where these are equal."""
        return self._dims([shape[-1] for shape in self.tensor_shapes])

    def _dims(self, sizes: list[int]) -> Tensor | None:
        return None if len(set(sizes)) == 1 else torch.tensor(sizes, dtype=torch.int64, device=self.device)

    @property
    def offsets(self) -> list[int]:
        """Where each matrix begins, in elements, and where the last one ends."""
        return [0, *itertools.accumulate(map(math.prod, self.tensor_shapes))]

    @property
    def tensor_offsets(self) -> Tensor | None:
        """``offsets``, int64 on the device; None where all shapes are equal."""
        alike = len(set(self.tensor_shapes)) == 1
        return None if alike else torch.tensor(self.offsets, dtype=torch.int64, device=self.device)

    @property
    def rowwise_data(self) -> Tensor | None:
        """The values, or the codes of the rows, flat; None where these were dropped."""
        raise NotImplementedError

    columnwise_data: Tensor | None
    scale_inv: Tensor | None
    columnwise_scale_inv: Tensor | None

    @property
    def quantized_tensors(self) -> list[Tensor]:
        """``split_into_quantized_tensors``."""
        return self.split_into_quantized_tensors()

    def split_into_quantized_tensors(self) -> list[Tensor]:
        """The matrices, in this one's memory, without a gradient."""
        raise NotImplementedError

    def has_data(self) -> bool:
        """Whether there are values, or codes of the rows."""
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        """Whether there are codes of the columns."""
        return self.columnwise_data is not None

    def all_same_first_dim(self) -> bool:
        """Whether all have as many rows."""
        return self.first_dims is None

    def all_same_last_dim(self) -> bool:
        """Whether all have as many columns."""
        return self.last_dims is None

    def all_same_shape(self) -> bool:
        """Whether all have one shape."""
        return self.all_same_first_dim() and self.all_same_last_dim()

    def varying_both_dims(self) -> bool:
        """Whether rows and columns differ."""
        return not (self.all_same_first_dim() or self.all_same_last_dim())

    def get_common_first_dim(self) -> int:
        """How many rows each has. ShapeError where these differ."""
        if not self.all_same_first_dim():
            raise ShapeError(_OP, "first_dims", [shape[0] for shape in self.tensor_shapes], "equal numbers")
        return _rows(self.tensor_shapes)[0]

    def get_common_last_dim(self) -> int:
        """How many columns each has. ShapeError where these differ."""
        if not self.all_same_last_dim():
            raise ShapeError(_OP, "last_dims", [shape[-1] for shape in self.tensor_shapes], "equal numbers")
        return self.tensor_shapes[0][-1]

    def get_dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.dtype

    def quantize(self, tensors: Sequence[Tensor], noop_flag: Tensor | None = None) -> list[Tensor]:
        """Cast ``tensors`` over the matrices; returns these. ``noop_flag``: (1,), on the device; where it is
        not 0 nothing changes. ArgumentError in high precision."""
        if self.quantizer is None:
            raise ArgumentError(_OP, "quantizer", None, "a tensor that a quantizer was given for")
        members = self.split_into_quantized_tensors()
        for source, member in zip(tensors, members, strict=True):
            self.quantizer.update_quantized(source, member, noop_flag=noop_flag)
        return members

    # --- how they are made ----------------------------------------------------------------------------------

    @staticmethod
    def make_grouped_tensor_with_shapes(
        num_tensors: int,
        shapes: Sequence[tuple[int, int]],
        quantizer: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """A new one of matrices of these ``shapes``: uninitialised of ``dtype``, or zeros cast by
        ``quantizer``. ``device``: None is the current CUDA device, or the CPU where there is none. ShapeError
        for what are no shapes of so many matrices."""
        integer(_OP, "num_tensors", num_tensors, 1)
        sizes = tuple(tuple(int(n) for n in shape) for shape in shapes)
        if len(sizes) != num_tensors or any(len(size) != 2 for size in sizes):
            raise ShapeError(_OP, "shapes", shown(shapes), f"{num_tensors} shapes (rows, columns)")
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
        if quantizer is not None:
            kind = torch.float32 if dtype is None else dtype
            members = [quantizer.make_empty(shape, dtype=kind, device=where) for shape in sizes]
            return QuantizedGroupedTensor.of(members, quantizer)
        if dtype is None:
            raise ArgumentError(_OP, "dtype", None, "a dtype, where there is no quantizer")
        return grouped(torch.empty(sum(map(math.prod, sizes)), dtype=dtype, device=where), sizes)

    @staticmethod
    def make_grouped_tensor(
        num_tensors: int,
        first_dims: Tensor | None,
        last_dims: Tensor | None,
        logical_first_dim: int,
        logical_last_dim: int,
        quantizer: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """``make_grouped_tensor_with_shapes`` of matrices with ``first_dims`` rows and ``last_dims`` columns,
        read on the host. None: equal numbers of rows, ``logical_first_dim`` in all or, with ``last_dims``,
        each; ``logical_last_dim`` columns. ShapeError where the two numbers are not ``logical_shape``'s."""
        rows = logical_first_dim if last_dims is not None else logical_first_dim // num_tensors
        pairs = ((first_dims, rows), (last_dims, logical_last_dim))
        shapes = [
            *zip(*([n] * num_tensors if own is None else own.tolist() for own, n in pairs), strict=True)
        ]
        if sum(map(math.prod, shapes)) != logical_first_dim * logical_last_dim:
            got = f"({logical_first_dim}, {logical_last_dim})"
            raise ShapeError(_OP, "logical_first_dim, logical_last_dim", got, f"of matrices {shapes}")
        return GroupedTensorStorage.make_grouped_tensor_with_shapes(
            num_tensors, shapes, quantizer, device, dtype
        )

    @staticmethod
    def make_grouped_tensor_from_rowwise_data(
        *,
        num_tensors: int,
        tensor_shape: Sequence[int],
        rowwise_data: Tensor,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> Any:
        """One in the memory of ``rowwise_data``, contiguous, of matrices or vectors of ``tensor_shape``.
        ``dtype``: that of the data. ShapeError for another number of elements."""
        shapes = (tuple(tensor_shape),) * integer(_OP, "num_tensors", num_tensors, 1)
        count = num_tensors * math.prod(tensor_shape)
        if rowwise_data.numel() != count or not rowwise_data.is_contiguous():
            raise ShapeError(_OP, "rowwise_data", shown(rowwise_data), f"contiguous, of {count} elements")
        if dtype not in (None, rowwise_data.dtype) or any(value is not None for value in others.values()):
            got = shown(dtype) if dtype not in (None, rowwise_data.dtype) else ", ".join(others)
            raise ArgumentError(_OP, "rowwise_data", got, f"values in {rowwise_data.dtype} alone")
        return grouped(rowwise_data.detach().reshape(-1), shapes)


class GroupedTensor(GroupedTensorStorage, torch.Tensor):
    """The values of several matrices, a tensor of shape (groups, rows, K), or ``logical_shape`` where their
    shapes differ. Operations of torch see that tensor and give usual ones."""

    columnwise_data = scale_inv = columnwise_scale_inv = None

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """UnsupportedError: ``make_grouped_tensor_with_shapes`` and its kin make them."""
        raise UnsupportedError(f"{_OP}: make_grouped_tensor_with_shapes and its kin make these tensors")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    __torch_function__ = torch_compat.no_torch_function

    @property
    def rowwise_data(self) -> Tensor | None:
        """The values, flat, in this tensor's memory."""
        return torch.Tensor.detach(self).view(-1)

    def split_into_quantized_tensors(self) -> list[Tensor]:
        flat, ends = torch.Tensor.detach(self).view(-1), self.offsets
        parts = zip(ends, ends[1:], self.tensor_shapes, strict=False)
        return [flat[start:end].view(shape) for start, end, shape in parts]

    def detach(self) -> Any:
        """As torch's, of this class."""
        return _of(torch.Tensor.detach(self), self.tensor_shapes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = torch.Tensor.clone(torch.Tensor.detach(self))
        made = _as_was(copied, self.tensor_shapes, self.requires_grad, isinstance(self, torch.nn.Parameter))
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = torch.Tensor.detach(self)
        if not isinstance(self, torch.nn.Parameter):  # in a checkpoint it is a tensor like others
            return plain.__reduce_ex__(protocol)
        return _as_was, (plain, self.tensor_shapes, self.requires_grad, True)


def _of(values: Tensor, shapes: Sequence[tuple[int, ...]], requires_grad: bool = False) -> Any:
    made = torch_compat.make_subclass(GroupedTensor, values, requires_grad)
    made.tensor_shapes = list(shapes)  # type: ignore[attr-defined]
    return made


def _as_was(values: Tensor, shapes: list[tuple[int, ...]], requires_grad: bool, parameter: bool) -> Any:
    """What was copied or loaded, as a parameter where it was one."""
    made = _of(values, shapes)
    return torch.nn.Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)


def grouped(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Any:
    """The ``GroupedTensor`` of matrices of ``shapes`` in the memory of ``flat``."""
    return _of(flat.view(_whole(shapes)), shapes)


def stacked(members: Sequence[Tensor]) -> Any:
    """A new ``GroupedTensor``, or ``QuantizedGroupedTensor``, of what ``members`` hold."""
    if isinstance(members[0], QuantizedTensor):
        return QuantizedGroupedTensor.of(members, members[0]._get_quantizer())
    flat = torch.cat([member.detach().reshape(-1) for member in members])
    return grouped(flat, [tuple(member.shape) for member in members])


def _whole(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return (len(shapes), *shapes[0]) if len(set(shapes)) == 1 else _logical(shapes)


def _rows(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return [math.prod(shape[:-1]) for shape in shapes]


def _logical(shapes: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    rows, columns = _rows(shapes), [shape[-1] for shape in shapes]
    if len(set(columns)) == 1:
        return sum(rows), columns[0]
    return (rows[0], sum(columns)) if len(set(rows)) == 1 else (1, sum(map(math.prod, shapes)))


@dataclass(frozen=True)
class _Layout:
    """How matrices of one kind lie in flat parts. ``parts``: name -> the shape of each matrix' part."""

    kind: type[QuantizedTensor]
    how: Any
    shapes: Shapes
    parts: tuple[tuple[str, Shapes], ...]


class QuantizedGroupedTensor(QuantizedTensor, GroupedTensor):
    """Matrices that one quantizer casts, each by itself: a ``QuantizedTensor`` whose codes and scales are
    those of all of them, one after the other."""

    @classmethod
    def of(cls, members: Sequence[Any], quantizer: Any) -> QuantizedGroupedTensor:
        """One of what ``members`` hold. The matrices' memory is this one's own."""
        first = members[0]
        names = list(first._parts)
        layout = _Layout(
            type(first),
            first._how,
            tuple(tuple(member.shape) for member in members),
            tuple((name, tuple(tuple(member._parts[name].shape) for member in members)) for name in names),
        )
        parts = {name: torch.cat([member._parts[name].reshape(-1) for member in members]) for name in names}
        made = cls._made(parts, layout, _whole(layout.shapes), first.dtype)
        made.quantizer, made._lag = quantizer, lag_of(parts)
        highs = [member._high_precision_init_val for member in members]
        made._high_precision_init_val = None if None in highs else torch.stack(highs)
        return made  # type: ignore[no-any-return]

    @property
    def tensor_shapes(self) -> list[tuple[int, ...]]:  # type: ignore[override]
        """The shape of each matrix."""
        return list(self._how.shapes)

    def split_into_quantized_tensors(self) -> list[Any]:
        split = {
            name: self._parts[name].split([math.prod(shape) for shape in shapes])
            for name, shapes in self._how.parts
        }
        found = []
        for i, shape in enumerate(self._how.shapes):
            parts = {name: split[name][i].view(shapes[i]) for name, shapes in self._how.parts}
            member = self._how.kind._made(parts, self._how.how, shape, self.dtype)
            member._quantizer = self.quantizer
            found.append(member)
        if self._lag != lag_of(self._parts):  # somebody wrote to the codes
            for member in found:
                member._transpose_again()
            self._lag = lag_of(self._parts)
        return found

    def parts_as_one(self) -> dict[str, Tensor]:
        """Codes and scales of all matrices, each part in one piece of memory; nothing where they differ in
        shape."""
        if len(set(self._how.shapes)) > 1:
            return {}
        if self._lag != lag_of(self._parts):  # somebody wrote to the codes
            self.split_into_quantized_tensors()
        return self._parts

    def operands(self) -> list[Any]:
        """The matrices to be read, not written: scales lie at multiples of 16 bytes, as GEMMs want them."""
        found = self.split_into_quantized_tensors()
        for name, shapes in self._how.parts:
            held = self._parts[name]
            if all(math.prod(shape) * held.element_size() % 16 == 0 for shape in shapes):
                continue
            sizes = [math.prod(shape) for shape in shapes]
            wide, alike = held.new_empty(len(sizes), -(-max(sizes) // 16) * 16), len(set(sizes)) == 1
            if alike:  # one copy for all
                wide[:, : sizes[0]].copy_(held.view(len(sizes), -1))
            for row, size, shape, member in zip(wide, sizes, shapes, found, strict=True):
                if not alike:
                    row[:size].copy_(member._parts[name].view(-1))
                member._parts[name] = row[:size].view(shape)
        return found

    def _flat(self, attribute: str) -> Tensor | None:
        """What all matrices have as ``attribute``, one after the other; a view of what is held."""
        found = [getattr(member, attribute) for member in self.split_into_quantized_tensors()]
        if found[0] is None:
            return None
        for held in self._parts.values():
            if held.data_ptr() == found[0].data_ptr() and held.dtype == found[0].dtype:
                return held
        return torch.cat([part.reshape(-1) for part in found])

    rowwise_data = property(lambda self: self._flat("_rowwise_data"))
    columnwise_data = property(lambda self: self._flat("_columnwise_data"))  # type: ignore[assignment]
    scale_inv = property(lambda self: self._flat("_rowwise_scale_inv"))  # type: ignore[assignment]
    columnwise_scale_inv = property(  # type: ignore[assignment]
        lambda self: self._flat("_columnwise_scale_inv")
    )
    _rowwise_data, _columnwise_data = rowwise_data, columnwise_data  # type: ignore[assignment]
    detach = torch.Tensor.detach
    __deepcopy__ = QuantizedTensor.__deepcopy__
    __reduce_ex__ = QuantizedTensor.__reduce_ex__

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        values = [member._values(dtype) for member in self.split_into_quantized_tensors()]
        return torch.cat([value.reshape(-1) for value in values]).view(tuple(self.shape))

    def _fresh(self, values: Tensor) -> dict[str, Tensor]:
        made = self._like(torch.empty_like)
        matrices = grouped(values.reshape(-1), self._how.shapes).split_into_quantized_tensors()
        for member, matrix in zip(made.split_into_quantized_tensors(), matrices, strict=True):
            member._take(matrix)
        return made._parts  # type: ignore[no-any-return]

    def take_parts(self, fresh: Any, noop_flag: Tensor | None = None) -> None:
        super().take_parts(fresh, noop_flag)
        self._lag = lag_of(self._parts)

    def _like(self, *arguments: Any, **options: Any) -> Any:
        made = super()._like(*arguments, **options)
        made.quantizer, made._lag = self.quantizer, lag_of(made._parts)
        return made

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _grouped_again, (self.split_into_quantized_tensors(),)

    def _get_quantizer(self) -> Any:
        return self.quantizer


def _grouped_again(
    members: list[Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
    high: Tensor | None,
) -> Any:
    """What was copied or loaded."""
    made = QuantizedGroupedTensor.of(members, members[0]._get_quantizer())
    return rebuilt(made, requires_grad, parameter, high)


torch.serialization.add_safe_globals([_grouped_again, QuantizedGroupedTensor])


class _Members(torch.autograd.Function):
    """The matrices of a grouped parameter, differentiable; their gradients are stacked."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.like = tuple(whole.shape)
        if isinstance(whole, QuantizedGroupedTensor):
            return tuple(whole.operands())
        return torch.Tensor.detach(whole).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None
        if len(there) == len(grads) and not any(any(grad.stride()) for grad in there):
            return there[0].new_zeros(()).expand(ctx.like)  # gradients that say nothing: see ``MainGrads``
        return torch.stack([torch.zeros_like(there[0]) if grad is None else grad for grad in grads])


def members_of(whole: Tensor) -> list[Tensor]:
    """The matrices of a parameter (groups, ...), differentiable."""
    if torch.compiler.is_compiling():
        return list(whole.unbind(0))
    return list(_Members.apply(whole))


__all__ = ["GroupedTensor", "GroupedTensorStorage"]
