"""``QuantizedTensor``: a tensor that is held in a narrow format, codes and scales, and in nothing else.

It stands where a tensor of its shape and dtype would: optimisers, ``state_dict``, copies and arithmetic see
its values, decoded; what is written to it is cast again. What formats there are: ``quantized`` (FP8 as layers
multiply it), ``te_compat.block_tensors`` (MXFP8 and NVFP4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fp8kit.arrays import Shape
from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit_torch import checks, torch_compat
from fp8kit_torch.checks import shown
from fp8kit_torch.held_values import HeldTensor, Part, as_made, counting, on_values
from fp8kit_torch.loaded_parts import Gathered, LoadedParts
from fp8kit_torch.views import FLOATS

_aten = torch.ops.aten
# kind of tensor -> what makes a process's rows of such a weight under ``fully_shard``, of their values and
# the weight; ``sharded_weight`` and ``te_compat.sharded_blocks`` put their functions here
SHARDED_BY: dict[type, Callable[[Tensor, Any], Tensor]] = {}
# whether several layers have a parameter; ``stateful`` puts its function here
SHARED: list[Callable[[Tensor], bool]] = []
_VIEWS = (_aten.view.default, torch_compat.UNSAFE_VIEW)


class QuantizedTensor(HeldTensor):
    """Base of tensors of codes and scales.

    Its dtype is the one that its values are decoded to.

    * ``dequantize()``: decode(code) / scale, in its dtype or another; differentiable. ``quantize_`` casts
      anew. Any other operation of torch works on these values.
    * ``copy_`` and operations in place cast what they write. A plain optimiser thus loses updates that are
      smaller than a step between codes: use ``FusedAdam(master_weights=True)``, which updates float32 masters
      and casts them.
    * ``view`` and ``reshape`` share the codes where the scales allow it (``shared_view``), with a gradient.
      Slices and other views are values in memory of their own: ``weight[0].fill_(1)`` casts the whole anew.
    * ``to(device)`` moves codes and scales, ``to(dtype)`` gives a plain tensor; a module's ``to`` keeps codes
      and scales in both cases. Not for ``torch.compile``.
    * ``torch.save`` writes codes and scales. What writes a tensor's memory (safetensors, ``save_pretrained``)
      writes values: those of a ``state_dict`` decode them into memory of their own, kept as long as they are.

    A subclass says what its parts are: ``_values``, ``_fresh`` and ``_rebuilding``.
    """

    held_in_fp8 = True
    _held = ("_parts", "_how", "_lag")  # attributes that say what is held
    _parts: dict[str, Tensor]
    _how: Any  # how it was cast: what parts of the same kind are made by
    _high_precision_init_val: Tensor | None = None
    _gathered: Gathered | None = None  # while a distributed checkpoint is read
    # writes of the parts so far, the values, and these parts
    _decoded: tuple[list[tuple[int, int]] | None, Tensor, list[Tensor]] | None = None
    _quantizer: Any = None  # what it was cast by, where that was one of Transformer Engine's quantizers

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """UnsupportedError: tensors are made by quantizers."""
        raise UnsupportedError(f"{cls.__name__}: quantizers and quantized_model_init make these tensors")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if made := vars(cls).get("__new__"):
            cls.__new__ = staticmethod(_or_parameter(made.__func__))  # type: ignore[method-assign,assignment]

    @classmethod
    def _made(
        cls,
        parts: Mapping[str, Tensor],
        how: Any,
        shape: Shape,
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> Any:
        """One of these parts."""
        device = next(iter(parts.values())).device
        made = torch_compat.wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._parts, made._how = dict(parts), how
        return made

    # --- what a subclass says -------------------------------------------------------------------------------

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of this dtype, or of the tensor's."""
        raise NotImplementedError

    def _fresh(self, values: Tensor) -> dict[str, Tensor]:
        """Parts of a plain tensor of this shape, on this device, cast as this one."""
        raise NotImplementedError

    def shared_view(self, shape: Shape) -> QuantizedTensor | None:
        """The same codes under another shape, None where their scales do not allow it."""
        return None

    def taken_rows(self, places: Tensor) -> QuantizedTensor | None:
        """The matrix of these rows, codes and scales with the columns as the contraction alone; rows of 0
        where ``places``, integer (rows,), is negative. None where the scales do not allow it."""
        return None

    def rows_in_parts(self, values: Tensor) -> Tensor:
        """``values``, zeros h (rows, K), as a process's rows of a parameter that ``fully_shard`` divides, and
        that know how they are gathered; as they are where there is no such way."""
        make = next((make for kind, make in SHARDED_BY.items() if isinstance(self, kind)), None)
        return values if make is None else make(values, self)

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        """(function, first arguments) that make such a tensor of parts, for pickles and copies."""
        raise NotImplementedError

    # --- values ---------------------------------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The values as a plain tensor of ``dtype``, float32, bfloat16 or float16, rounded once; None is this
        tensor's. The gradient passes through. ArgumentError for another dtype."""
        if dtype is not None and dtype not in FLOATS:
            raise ArgumentError(
                "QuantizedTensor.dequantize", "dtype", shown(dtype), "float32, bfloat16, float16 or None"
            )
        return _Decode.apply(self, dtype)

    def float(self, memory_format: Any = None) -> Tensor:  # type: ignore[override]
        """The values in float32, plain also where that is this tensor's dtype."""
        return self.dequantize(dtype=torch.float32)

    def bfloat16(self, memory_format: Any = None) -> Tensor:  # type: ignore[override]
        """The values in bfloat16."""
        return self.dequantize(dtype=torch.bfloat16)

    def half(self, memory_format: Any = None) -> Tensor:  # type: ignore[override]
        """The values in float16."""
        return self.dequantize(dtype=torch.float16)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        """Cast a tensor of this shape over what is held, unrecorded; returns self. ``noop_flag``: a tensor of
        one element; where it is not 0, nothing changes. Nothing waits for the device."""
        if noop_flag is not None and not checks.is_scalar(noop_flag):
            wanted = "a tensor of one element, or None"
            raise ArgumentError("QuantizedTensor.quantize_", "noop_flag", shown(noop_flag), wanted)
        checks.tensor("QuantizedTensor.quantize_", "tensor", tensor)
        if tensor.shape != self.shape:
            raise ShapeError("QuantizedTensor.quantize_", "tensor", shown(tensor), tuple(self.shape))
        with torch.no_grad():
            self.take_parts(self._parts_of(tensor), noop_flag)
        return self

    def take_parts(self, fresh: Mapping[str, Tensor], noop_flag: Tensor | None = None) -> None:
        """Take over codes and scales by name; not where ``noop_flag`` is not 0."""
        with torch.no_grad():
            for name, part in self._parts.items():
                new = fresh[name]
                part.copy_(new if noop_flag is None else torch.where(noop_flag.view(()) != 0, part, new))

    def _parts_of(self, values: Tensor) -> Mapping[str, Tensor]:
        """Parts like this tensor's, of other values: theirs where they are held alike, else cast."""
        held = isinstance(values, QuantizedTensor)
        alike = held and type(values) is type(self) and values._how == self._how  # type: ignore[attr-defined]
        if alike and values.shape == self.shape and values._parts.keys() >= self._parts.keys():
            return values._parts  # type: ignore[attr-defined,no-any-return]
        plain = values._values() if isinstance(values, HeldTensor) else values
        wide = plain if plain.dtype in FLOATS else plain.float()
        wide = wide.detach().to(self.device).expand(self.shape)
        if self._quantizer is not None:
            return self._quantizer.parts_like(self, wide)  # type: ignore[no-any-return]
        return self._fresh(wide)

    def _take(self, values: Any) -> None:
        """Cast ``values`` over what it holds, in place."""
        self.take_parts(self._parts_of(values))

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values that it was first cast from, on the CPU; None where they were not kept or were
        cleared."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Drop them."""
        self._high_precision_init_val = None

    def _like(
        self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None, shape: Shape | None = None
    ) -> Any:
        """One of the same kind whose parts are changed."""
        parts = {name: change(part) for name, part in self._parts.items()}
        made = self._made(
            parts, self._how, tuple(self.shape) if shape is None else shape, dtype or self.dtype
        )
        made._quantizer = self._quantizer
        return made

    def follow(self, change: Callable[[Tensor], Tensor]) -> None:
        """Take over the device and dtype that ``change`` gives tensors; the codes stay."""
        probe = change(torch.empty(0, dtype=self.dtype, device=self.device))
        if (probe.device, probe.dtype) != (self.device, self.dtype):
            self.data = self._like(lambda part: part.to(probe.device), probe.dtype)
            if self.grad is not None:
                grad, self.grad = self.grad, None
                self.grad = change(grad)

    @property
    def data(self) -> Any:  # type: ignore[override]
        """As torch's; assigning a tensor of this kind takes over its memory, any other is cast: over what is
        held where it has this shape and dtype, else by the quantizer, if there is one."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        other = (value.shape, value.dtype) != (self.shape, self.dtype) and value.dtype in FLOATS
        if type(value) is not type(self) and other and (quantizer := self._get_quantizer()) is not None:
            own = quantizer.copy()
            own.set_usage(**self.get_usages())
            value = own.quantize_impl(value.to(self.device))
        if type(value) is type(self):
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            vars(self).update((name, vars(value)[name]) for name in self._held if name in vars(value))
        else:
            with torch.no_grad():
                self.copy_(value)

    # --- others of its kind ---------------------------------------------------------------------------------

    @classmethod
    def make_like(
        cls,
        tensor: QuantizedTensor,
        *,
        shape: Any = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        data: Tensor | None = None,
        data_transpose: Tensor | None = None,
    ) -> Any:
        """Another tensor of the codes and scales of ``tensor``: of another ``shape``, where these allow it,
        another ``dtype`` of the values, or with the codes ``data`` in the place of the rows'. With
        ``data_transpose`` the columns are held too, which follow from the rows. ShapeError for another
        shape."""
        made = tensor._like(lambda part: part, dtype)
        if shape is not None and tuple(shape) != tuple(tensor.shape):
            made = made.shared_view(tuple(shape))
            if made is None:
                got, wanted = tuple(shape), f"one of {tuple(tensor.shape)}'s elements, and of whole blocks"
                raise ShapeError(f"{cls.__name__}.make_like", "shape", got, wanted)
        if data is not None:
            made._rowwise_data = data
        if data_transpose is not None:
            made.update_usage(columnwise_usage=True)
        return made.requires_grad_(requires_grad)

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same codes and scales, of values of ``dtype``."""
        return self.make_like(self, dtype=dtype)

    def get_metadata(self) -> dict[str, Any]:
        """Its parts by the names of the constructor's arguments, where there is a constructor, with
        ``quantizer``; but for ``shape`` and ``dtype``."""
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        return {name: getattr(self, f"_{name}") for name in names} | {"quantizer": self._get_quantizer()}

    # --- written to files that know plain tensors only ------------------------------------------------------

    def data_ptr(self) -> int:
        """0; once ``untyped_storage`` was asked for, the address in it: safetensors asks for both, torch's
        asynchronous checkpoints for this one first, and for no values. UnsupportedError of a parameter of
        several layers, which accelerate would take for all that have no address."""
        if isinstance(self, torch.nn.Parameter) and any(is_shared(self) for is_shared in SHARED):
            wanted = "one of each layer: accelerate tells weights apart by addresses, and these have none"
            raise UnsupportedError("data_ptr", "weight", "a weight in FP8 that several layers share", wanted)
        return super().data_ptr() if self._decoded is None else self._memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Memory of the values, decoded, which the tensor has beside the codes from then on. A parameter has
        none; ``state_dict`` has tensors that are no parameters."""
        own = isinstance(self, torch.nn.Parameter)
        return super().untyped_storage() if own else self._memory().untyped_storage()

    def _writes(self) -> list[tuple[int, int]] | None:
        parts = self._parts.values()
        if any(part.is_inference() for part in parts):
            return None
        return [(id(part), torch_compat.version(part)) for part in parts]

    def _part(self, values: Tensor, view: Callable[[Tensor], Tensor]) -> Part:
        return Part(values, self, view)

    def _memory(self) -> Tensor:
        parts = [*self._parts.values()]
        writes, known = self._writes(), self._decoded
        if known is None or writes is None or known[0] != writes or known[1].dtype != self.dtype:
            self._decoded = writes, self._values(), parts
        return self._decoded[1]  # type: ignore[index]

    def numpy(self, *, force: bool = False) -> Any:
        """The values in memory of their own."""
        return self.dequantize().numpy(force=force)

    def clear(self) -> None:
        """Let the memory go: the codes and scales are empty until ``data`` is assigned."""
        self._parts = {name: part.new_empty(0) for name, part in self._parts.items()}

    # --- taken apart ----------------------------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensor]:
        """(plain tensors for ``ctx.save_for_backward``, a tensor without them that ``restore_from_saved``
        fills). This one stays as it is."""
        shell = self._like(lambda part: part)
        shell._parts = dict.fromkeys(self._parts)
        return list(self._parts.values()), shell

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take back the tensors of ``prepare_for_saving``, the first of those that are given; returns the
        others."""
        count = len(self._parts)
        self._parts = dict(zip(self._parts, tensors, strict=False))  # type: ignore[arg-type]
        return list(tensors[count:])

    def get_data_tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """(the codes as they lie, those of the columns)."""
        return self._rowwise_data, self._columnwise_data

    @property
    def _rowwise_data(self) -> Tensor | None:
        """The codes of the rows, None where they were dropped."""
        raise NotImplementedError

    @property
    def _columnwise_data(self) -> Tensor | None:
        """The codes for products that contract the rows, None where they were dropped."""
        raise NotImplementedError

    def get_usages(self) -> dict[str, bool]:
        """Which of both are held."""
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Hold an orientation, or let go of it; None leaves it."""
        raise NotImplementedError

    def _get_quantizer(self) -> Any:
        """What it was cast by; one that casts as it was cast, for a tensor that a layer made."""
        return self._quantizer

    def update_quantizer(self, quantizer: Any) -> None:
        """Let ``quantize_`` cast by another one of the same kind from now on."""
        self._quantizer = quantizer

    def copy_from_storage(self, src: QuantizedTensor) -> None:
        """Take over the codes and scales of another tensor of this kind and shape. TypeError for others."""
        if type(src) is not type(self) or src.shape != self.shape:
            raise TypeError(f"copy_from_storage: {shown(src)} is no {type(self).__name__} of this shape")
        self.take_parts(self._parts_of(src))

    # --- torch.distributed.checkpoint: what is read comes in parts ------------------------------------------

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self._gathered = Gathered(self)
        return [ChunkStorageMetadata(torch.Size([0] * self.ndim), self.size())]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        gathered = self._gathered
        return self if gathered is None else LoadedParts(gathered.values, gathered)

    # --- torch ----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation of torch on values; those that only copy or move, on codes."""
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], QuantizedTensor) else None
        if own is not None:
            if func in (_aten.detach.default, _aten.alias.default):
                with as_made(own):
                    return own._like(lambda part: part)
            if func is _aten.clone.default:
                return own._like(torch.clone)
            if func is _aten.copy_.default:
                with counting():
                    own._take(args[1])
                return own
            if func is torch_compat.TO_COPY and kwargs.get("dtype") in (None, own.dtype):
                device = kwargs.get("device") or own.device
                copied = own._like(
                    lambda part: part.to(device, non_blocking=kwargs.get("non_blocking", False), copy=True)
                )
                if own._decoded is not None:  # safetensors writes a copy on the CPU
                    copied._memory()
                return copied
            if func is _aten.new_empty.default and _is_copys_place(own, *args[1:], **kwargs):
                return own._like(lambda part: part.new_empty(part.shape, device=kwargs["device"]))
            if func is _aten.as_strided.default and _is_all(own, *args[1:]):
                return own._like(lambda part: part)
            if func is _aten.new_zeros.default and isinstance(own, torch.nn.Parameter):
                like = torch.empty(0, dtype=own.dtype, device=own.device)
                zeros = like.new_zeros(*args[1:], **kwargs)
                rows = zeros.ndim == own.ndim == 2 and zeros.shape[1] == own.shape[1]
                return own.rows_in_parts(zeros) if rows and zeros.dtype == own.dtype else zeros
            if func in _VIEWS:
                with as_made(own), counting():
                    shared = own.shared_view(_whole_shape(args[1], own.numel()))
                if shared is not None:
                    return shared
        return on_values(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        rebuild, arguments = self.__reduce_ex__(2)
        memo[id(self)] = copied = rebuild(*torch_compat.tree_map(_cloned, arguments))
        copied._quantizer = self._quantizer
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, first = self._rebuilding()
        last = tuple(self.shape), self.dtype, self.requires_grad, isinstance(self, torch.nn.Parameter)
        return rebuild, (*first, *last, self._high_precision_init_val)


def _or_parameter(make: Callable[..., Any]) -> Callable[..., Any]:
    """A class's ``__new__`` that makes a parameter of a tensor, too, as accelerate calls a parameter's class
    for another parameter in its place."""

    @wraps(make)
    def new(cls: type, *given: Any, **options: Any) -> Any:
        if len(given) == 1 and isinstance(given[0], Tensor) and options.keys() <= {"requires_grad"}:
            return torch.nn.Parameter(given[0], **options)
        return make(cls, *given, **options)

    return new


def _is_all(tensor: Tensor, size: Any, stride: Any, offset: int | None = None) -> bool:
    """Whether these are a tensor's own sizes and strides."""
    return not offset and tuple(size) == tuple(tensor.shape) and tuple(stride) == tensor.stride()


def _is_copys_place(
    tensor: Tensor, size: Any, *, device: Any = None, dtype: Any = None, **options: Any
) -> bool:
    """Whether that is what torch's stager of asynchronous checkpoints makes first of a tensor that it copies,
    whose attributes it then sets: as large, on a device that it names."""
    return device is not None and dtype in (None, tensor.dtype) and tuple(size) == tuple(tensor.shape)


def taken(part: Tensor, places: Tensor, count: int, dim: int = 0, empty: float = 0) -> Tensor:
    """Slices of ``part`` along ``dim``, ``empty`` where ``places``, integer (rows,), is negative, and behind
    them until there are ``count``."""
    places = torch.nn.functional.pad(places, (0, count - places.shape[0]), value=-1)
    if not part.shape[dim]:
        return part.new_full((*part.shape[:dim], count, *part.shape[dim + 1 :]), empty)
    shape = [-1 if axis == dim else 1 for axis in range(part.ndim)]
    return part.index_select(dim, places.clamp(min=0)).masked_fill_((places < 0).view(shape), empty)


def rebuilt(made: Any, requires_grad: bool, parameter: bool, high: Tensor | None) -> Any:
    """What was copied or loaded, as a parameter where it was one."""
    made = torch.nn.Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)
    made._high_precision_init_val = high
    return made


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
        ctx.dtype = held.dtype
        return held._values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None


def _whole_shape(shape: Any, count: int) -> Shape:
    """A shape whose -1 is worked out."""
    known = math.prod(size for size in shape if size != -1)
    return tuple(count // max(known, 1) if size == -1 else int(size) for size in shape)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
