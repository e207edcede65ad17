"""``QuantizedTensor``: a tensor that is held in FP8 and in nothing else, and ``quantized_model_init``, under
which modules make their weights so.

It stands where a tensor of its shape and dtype would: optimisers, ``state_dict``, copies and arithmetic see
its values, decoded; what is written to it is cast again. FP8 layers take its codes as they are, so that no
cast of a weight is left in a step, nor of an output that the layer before was asked for in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.arguments import flag
from fp8kit.errors import ArgumentError, RecipeError, ShapeError, UnsupportedError
from fp8kit.execution.codec import decode, encode
from fp8kit.lru import memoized
from fp8kit.ops.linear import LinearSpec, weight_cast
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.product_quantized import Operand, QuantizedProduct
from fp8kit.ops.products import product_class
from fp8kit.quantization import Quantization, Quantizer
from fp8kit.recipe import DelayedScaling, Recipe
from fp8kit.scoped import Scoped
from fp8kit_torch import checks, torch_compat
from fp8kit_torch.call import prepare, run
from fp8kit_torch.checks import check, shown
from fp8kit_torch.state import NO_STATE, StateBinding
from fp8kit_torch.views import FLOATS, as_view

_FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
_aten = torch.ops.aten


class QuantizedTensor(torch.Tensor):
    """A matrix (N, K), or (..., K), as FP8 codes and scales, in both of the orientations that products want:
    2 bytes an element.

    Its dtype is the one that its values are decoded to. A weight's scale comes from the values themselves
    (current scaling, also under a recipe of delayed scaling, since a weight's largest value is known when it
    is cast), or from each block with ``Float8BlockScaling``; an output's or a gradient's (``fp8_output``,
    ``fp8_grad``) is the recipe's.

    * ``dequantize()``: decode(code) / scale, in its dtype or another; differentiable. ``quantize_`` casts
      anew. Any other operation of torch works on these values.
    * ``copy_`` and operations in place cast what they write. A plain optimiser thus loses updates that are
      smaller than a step between codes: use ``FusedAdam(master_weights=True)``, which updates float32 masters
      and casts them.
    * Slices and other views are copies of values: ``weight[0] = 1`` writes to the codes,
      ``weight[0].fill_(1)`` to a copy.
    * ``to(device)`` moves codes and scales, ``to(dtype)`` gives a plain tensor; a module's ``to`` keeps codes
      and scales in both cases. Not for ``torch.compile``.
    """

    held_in_fp8 = True
    _parts: dict[str, Tensor]
    _fp8: Quantization  # its ``w`` says how this tensor is held
    _high: Tensor | None
    _quantizer: Any = None  # what it was cast by, where that was one of Transformer Engine's quantizers

    @staticmethod
    def __new__(
        cls,
        parts: Mapping[str, Tensor],
        fp8: Quantization,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        device = parts["w_q"].device
        made = torch_compat.wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._parts, made._fp8, made._high = dict(parts), fp8, None
        return made

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    @classmethod
    def of(cls, values: Tensor, fp8: Quantization) -> QuantizedTensor:
        """h (N, K), a weight, cast for products as ``fp8`` says."""
        return cls(_cast(values, fp8), fp8, tuple(values.shape), values.dtype)

    @classmethod
    def cast(cls, values: Tensor, fp8: Quantization, state: StateBinding = NO_STATE) -> QuantizedTensor:
        """h (..., K), cast as ``fp8`` says of w, with the scale and the amax of ``state``, by the names
        w_scale and w_amax."""
        parts = _cast(values.reshape(-1, values.shape[-1]), fp8, state)
        return cls(parts, fp8, tuple(values.shape), values.dtype)

    # --- values ---------------------------------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The values as a plain tensor of ``dtype``, float32, bfloat16 or float16, rounded once; None is this
        tensor's. The gradient passes through. ArgumentError for another dtype."""
        if dtype is not None and dtype not in FLOATS:
            raise ArgumentError(
                "QuantizedTensor.dequantize", "dtype", shown(dtype), "float32, bfloat16, float16 or None"
            )
        return _Decode.apply(self, dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        """Cast a tensor of this shape over what is held, unrecorded; returns self. ``noop_flag``: a tensor of
        one element; where it is not 0, nothing changes. Nothing waits for the device."""
        if noop_flag is not None and not checks.is_scalar(noop_flag):
            wanted = "a tensor of one element, or None"
            raise ArgumentError("QuantizedTensor.quantize_", "noop_flag", shown(noop_flag), wanted)
        if self._quantizer is not None and not isinstance(tensor, QuantizedTensor):
            quantizer: Any = self._quantizer
            return quantizer.update_quantized(tensor, self, noop_flag=noop_flag)  # type: ignore[no-any-return]
        checks.tensor("QuantizedTensor.quantize_", "tensor", tensor)
        if tensor.shape != self.shape:
            raise ShapeError("QuantizedTensor.quantize_", "tensor", shown(tensor), tuple(self.shape))
        with torch.no_grad():
            if noop_flag is None:
                self.copy_(tensor)
            else:
                fresh = self._like(torch.clone)
                fresh.copy_(tensor)
                self.take_parts(fresh, noop_flag)
        return self

    def take_parts(self, other: QuantizedTensor, noop_flag: Tensor | None = None) -> None:
        """Take over the codes and scales of one of this shape; not where ``noop_flag`` is not 0."""
        with torch.no_grad():
            for name, part in self._parts.items():
                fresh = other._parts[name]
                part.copy_(fresh if noop_flag is None else torch.where(noop_flag.view(()) != 0, part, fresh))

    @property
    def _rowwise_data(self) -> Tensor:
        """The codes, uint8 of this shape."""
        codes, k = self._parts["w_q"].view(torch.uint8), self.shape[-1]
        return codes[: self.numel() // max(k, 1), :k].reshape(self.shape)

    @property
    def _data(self) -> Tensor:
        """Another name of them."""
        return self._rowwise_data

    @property
    def _rowwise_scale_inv(self) -> Tensor:
        """float32: of the tensor (1,), or as blocks lie in memory."""
        return self.side(False)[1]

    @property
    def _scale_inv(self) -> Tensor:
        """Another name of it."""
        return self._rowwise_scale_inv

    @property
    def _columnwise_data(self) -> Tensor:
        """The codes of the transposed matrix, uint8 (K, N)."""
        codes, k = self._parts["w_qt"].view(torch.uint8), self.shape[-1]
        return codes[:k, : self.numel() // max(k, 1)]

    @property
    def _transpose(self) -> Tensor:
        """Another name of them."""
        return self._columnwise_data

    @property
    def _columnwise_scale_inv(self) -> Tensor:
        """``_rowwise_scale_inv`` of the transposed matrix."""
        return self.side(True)[1]

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values that it was first cast from, on the CPU; None where they were not kept or were
        cleared."""
        return self._high

    def clear_high_precision_init_val(self) -> None:
        """Drop them."""
        self._high = None

    def inputs(self, operation: str, prefix: str, fp8: Quantization) -> dict[str, Tensor]:
        """Its parts by the names of an operation's cached weight. RecipeError where ``fp8`` wants another
        format or tiling, UnsupportedError where it wants the weight in high precision."""
        if fp8.dgrad.compute == "high_precision":
            wanted = "one that multiplies codes or their values: the weight is held in FP8 alone"
            raise UnsupportedError(operation, "recipe", "dgrad in high precision", wanted)
        if not self.fits(fp8.w):
            got, wanted = ((each.format.name, each.granularity) for each in (self._fp8.w, fp8.w))
            raise RecipeError(
                operation, "weight", f"FP8 as {got}", f"{wanted}, as the recipe of this autocast"
            )
        transposed = ("w_qt", "w_qt_inv") if fp8.dgrad.compute == "dequantized" else ()
        return {f"{prefix}{name}": part for name, part in self._parts.items() if name not in transposed}

    def fits(self, quantizer: Quantizer) -> bool:
        """Whether an operand of that format and granularity can be this tensor as it is."""
        own = self._fp8.w
        return own.format == quantizer.format and own.granularity == quantizer.granularity

    def input_parts(self) -> dict[str, Tensor]:
        """Its parts by the names of a product's cached input."""
        return {f"x{name.removeprefix('w')}": part for name, part in self._parts.items()}

    def side(self, transposed: bool) -> tuple[Tensor, Tensor]:
        """(codes, scale_inv) with the last dimension, or, ``transposed``, the rows as the contraction of a
        product."""
        name = "w_qt" if transposed else "w_q"
        scale_inv = self._parts.get(f"{name}_inv", self._parts.get("w_scale_inv"))
        assert scale_inv is not None
        return self._parts[name], scale_inv

    def operand(self, transposed: bool) -> Operand:
        """``side`` as the operand of a product."""
        codes, scale_inv = map(as_view, self.side(transposed))
        return codes, scale_inv, self._fp8.w

    @property
    def product(self) -> type[QuantizedProduct]:
        """The products that take it as an operand."""
        return product_class(self._fp8)

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        k, quantizer = self.shape[-1], self._fp8.w
        n = self.numel() // max(k, 1)
        codes, scale_inv = self.side(False)
        values = codes[:n, :k].view(_FLOAT8[quantizer.format.name]).to(torch.float32)
        scales = self.product.grid(scale_inv, quantizer)
        for dim, size in enumerate(quantizer.tile):
            scales = scales.repeat_interleave(size, dim) if size > 1 else scales
        return (values * scales[:n, :k]).to(dtype).view(self.shape)

    def _take(self, values: Any) -> None:
        """Cast ``values`` over what it holds, in place."""
        held = isinstance(values, QuantizedTensor)
        if held and values._fp8 == self._fp8 and values.shape == self.shape:
            parts = values._parts
        else:
            plain = values._values() if held else values
            wide = plain if plain.dtype in FLOATS else plain.float()
            parts = _cast(wide.to(self.device).expand(self.shape).reshape(-1, self.shape[-1]), self._fp8)
        for name, part in self._parts.items():
            part.copy_(parts[name])

    def _like(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QuantizedTensor:
        parts = {name: change(part) for name, part in self._parts.items()}
        return QuantizedTensor(parts, self._fp8, tuple(self.shape), dtype or self.dtype)

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
        """As torch's; assigning a tensor of this kind takes over its memory, any other is cast."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, QuantizedTensor):
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            self._parts, self._fp8 = value._parts, value._fp8
        else:
            with torch.no_grad():
                self.copy_(value)

    # --- torch ----------------------------------------------------------------------------------------------

    __torch_function__ = torch_compat.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation of torch on values; those that only copy or move, on codes."""
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], QuantizedTensor) else None
        if own is not None:
            if func in (_aten.detach.default, _aten.alias.default):
                with _as_made(own):
                    return own._like(lambda part: part)
            if func is _aten.clone.default:
                return own._like(torch.clone)
            if func is _aten.copy_.default:
                own._take(args[1])
                return own
            if func is _aten._to_copy.default and kwargs.get("dtype") in (None, own.dtype):
                device = kwargs.get("device") or own.device
                return own._like(
                    lambda part: part.to(device, non_blocking=kwargs.get("non_blocking", False), copy=True)
                )
        decoded: dict[int, Tensor] = {}

        def plain(value: Any) -> Any:
            if not isinstance(value, QuantizedTensor):
                return value
            return decoded.setdefault(id(value), value._values())

        with _as_made(own) if own is not None and func.is_view else nullcontext():
            given, named = torch_compat.tree_map(plain, args), torch_compat.tree_map(plain, kwargs)
            out = func(*given, **named)
        written = {}
        for place, argument in enumerate(torch_compat.schema_arguments(func)):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            # also one of a list, as optimisers with foreach=True write them
            for one in torch_compat.tree_leaves(value) if argument.is_write else ():
                if isinstance(one, QuantizedTensor):
                    one._take(decoded[id(one)])
                    written[id(decoded[id(one)])] = one
        return torch_compat.tree_map(lambda value: written.get(id(value), value), out) if written else out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        rebuild, arguments = self.__reduce_ex__(2)
        memo[id(self)] = copied = rebuild(*torch_compat.tree_map(_cloned, arguments))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (
            self._parts,
            encode(self._fp8),
            tuple(self.shape),
            self.dtype,
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
            self._high,
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"QuantizedTensor({self._fp8.w.format.name}, {self._fp8.w.granularity}, {self._values()!r})"


Float8Tensor = QuantizedTensor  # Transformer Engine's name


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
        ctx.dtype = held.dtype
        return held._values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None


def _as_made(tensor: Tensor) -> torch.inference_mode:
    """Where views of ``tensor`` are made: of a usual one outside of inference mode, because torch gives them
    its version, which tensors of that mode have none of."""
    return torch.inference_mode(tensor.is_inference())


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _rebuilt(
    parts: dict[str, Tensor],
    fp8: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
    high: Tensor | None,
) -> Tensor:
    """What was copied or loaded."""
    made: Any = QuantizedTensor(parts, decode(fp8), tuple(shape), dtype, requires_grad and not parameter)
    if parameter:
        made = torch.nn.Parameter(made, requires_grad)
    made._high = high
    return made  # type: ignore[no-any-return]


torch.serialization.add_safe_globals([_rebuilt, QuantizedTensor])


@lru_cache(maxsize=256)
def want_codes(operation: str, argument: str, fp8: Quantization) -> None:
    """UnsupportedError where products are emulated, on values: there are no codes of an operand to hold."""
    if fp8.fprop.compute != "quantized":
        raise UnsupportedError(operation, argument, "fprop in high precision", "fprop in FP8")
    if issubclass(product_class(fp8), EmulatedProduct):
        wanted = "a recipe whose products take FP8 codes, with scales of tensors or of blocks of 128"
        raise UnsupportedError(operation, argument, f"emulated products of {fp8.x}", wanted)


@lru_cache(maxsize=256)
def _of_values(fp8: Quantization) -> Quantization:
    """``fp8`` with scales from the values themselves."""
    return fp8.map(lambda own: replace(own, scale_source="current"))


@memoized("torch: casts of weights")
def _cast_spec(rows: int, columns: int, fp8: Quantization) -> LinearSpec:
    return LinearSpec(ProductSpec(columns, (rows,), bias="none", fp8=fp8))


def _cast(values: Tensor, fp8: Quantization, state: StateBinding = NO_STATE) -> dict[str, Tensor]:
    spec = _cast_spec(*values.shape, _of_values(fp8) if state is NO_STATE else fp8)
    with torch.inference_mode(False), torch.no_grad():
        return run(*prepare(weight_cast, spec, {"weight0": values.detach()}, tuple(state.scales)), state)


@lru_cache(maxsize=256)
def _held(fp8: Quantization) -> Quantization:
    """How a weight is held: for fprop and a dgrad that multiplies codes, whatever that of ``fp8`` does."""
    return replace(fp8, dgrad=replace(fp8.dgrad, compute="quantized"))


@lru_cache(maxsize=256)
def held_as(fp8: Quantization, operand: str) -> Quantization:
    """``fp8`` with its w and its operand "x" or "g" in each other's place: what a ``QuantizedTensor`` that is
    no weight is cast by."""
    own = {"x": fp8.x, "w": fp8.w, "g": fp8.g}
    own |= {operand: fp8.w, "w": own[operand]}
    return Quantization.of(**own, **{name: gemm.accumulation for name, gemm in fp8.gemms.items()})


# --- where modules make their weights so --------------------------------------------------------------------


class Held(NamedTuple):
    """How modules that are made now hold their weights."""

    fp8: Quantization
    preserve: bool

    def parameter(self, weight: Tensor) -> torch.nn.Parameter:
        """The parameter ``weight``, held so; other attributes it had are kept."""
        made: Any = torch.nn.Parameter(QuantizedTensor.of(weight.detach(), self.fp8), weight.requires_grad)
        if self.preserve:
            made._high = weight.detach().cpu().clone()
        return made  # type: ignore[no-any-return]


_HELD: Scoped[Held | None] = Scoped("fp8kit_quantized_model_init", None)


def held_now() -> Held | None:
    """What the innermost ``quantized_model_init`` says; None outside of any."""
    return _HELD.get()


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Modules that are made within hold their weights in FP8 alone, as ``QuantizedTensor`` parameters.

    * ``enabled``: False makes them as usual, also within an outer block. ``recipe``: whose format and tiling
      weights get; None is ``DelayedScaling()``. Autocasts must have a recipe with the same of both.
    * ``preserve_high_precision_init_val``: ``weight.get_high_precision_init_val()`` gives the values from
      before the cast, on the CPU, to start an optimiser's master weights with, and
      ``weight.clear_high_precision_init_val()`` drops them.

    For ``Linear``, ``LayerNormLinear``, ``LayerNormMLP``, ``GroupedLinear`` and what is made of them, with
    one weight a product, because it has one scale: ``fuse_qkv_params=True``, no ``parameters_split``, as
    Transformer Engine demands it; NotImplementedError for others, within ``torch.compile``, and for weights
    that something else stands for since (``fully_shard``), and for recipes whose products are emulated.
    RecipeError for what is no recipe.
    """
    check("quantized_model_init", {"enabled": flag, "preserve_high_precision_init_val": flag}, locals())
    recipe = DelayedScaling() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        wanted = "a Recipe, such as recipe.DelayedScaling(), or None"
        raise RecipeError("quantized_model_init", "recipe", repr(recipe), wanted)
    if enabled and recipe.by_layer:
        wanted = "a recipe that is the same for all layers"
        raise UnsupportedError("quantized_model_init", "recipe", recipe.short_name(), wanted)
    if enabled:
        want_codes("quantized_model_init", "recipe", recipe.quantization)
    held = Held(_held(recipe.quantization), bool(preserve_high_precision_init_val)) if enabled else None
    with _HELD.within(held):
        yield


fp8_model_init = quantized_model_init  # the name that it had before
