"""Transformer Engine's quantizers as the answers of a ``CustomRecipe``'s function, and those that only make
sense there: ``HybridQuantizer``, ``IdentityQuantizer``, ``DelayedScalingRequest``; and functions that answer
as its own recipes do (``custom_recipes.quantizer_factories``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.formats import E2M1
from fp8kit.layer_recipes import QuantizerRole, answers_with
from fp8kit.quantization import OPERANDS, AmaxHistory
from fp8kit.quantization import Quantizer as Rule
from fp8kit.recipe import DelayedScaling, Format, Recipe
from fp8kit_torch.parameters import default_device
from fp8kit_torch.te_compat.block_tensors import MXFP8Quantizer, NVFP4Quantizer
from fp8kit_torch.te_compat.dtypes import DType, format_of
from fp8kit_torch.te_compat.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)

# the GEMM that reads an operand along its rows; the other one reads its columns
_BY_ROWS = {"input": "fprop", "weight": "fprop", "grad_output": "dgrad"}


class HybridQuantizer(Quantizer):
    """One quantizer for each of the two GEMMs that read a tensor: along its rows (fprop; dgrad of
    grad_output), and along its columns. For a ``CustomRecipe``'s function; there is no tensor in two formats:
    the two quantizers cast one each. ``columnwise_source``: "original" only, both read the tensor itself."""

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        if columnwise_source != "original":
            wanted = (
                "'original': each GEMM casts the tensor itself; backward_override='dequantized' of a recipe"
            )
            raise UnsupportedError("HybridQuantizer", "columnwise_source", columnwise_source, wanted)
        for name, own in (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer)):
            if not isinstance(own, Quantizer | QuantizerRequest):
                wanted = "a quantizer of transformer_engine.pytorch"
                raise ArgumentError("HybridQuantizer", f"{name}_quantizer", type(own).__name__, wanted)
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer, columnwise_quantizer
        histories = {own.history for own in (rowwise_quantizer, columnwise_quantizer) if _asks(own)}
        if len(histories) > 1:
            wanted = "the history of rowwise_quantizer: a tensor has one"
            raise ArgumentError("HybridQuantizer", "columnwise_quantizer", "another history", wanted)
        self.history: AmaxHistory | None = histories.pop() if histories else None

    def quantize_impl(self, tensor: Tensor) -> Any:
        """Raises UnsupportedError: there is no tensor in two formats."""
        wanted = "rowwise_quantizer(tensor) and columnwise_quantizer(tensor)"
        raise UnsupportedError("HybridQuantizer", "tensor", "a cast to two formats at once", wanted)


def _asks(quantizer: Any) -> TypeGuard[DelayedScalingRequest]:
    """Whether it asks for delayed scaling's state."""
    return isinstance(quantizer, DelayedScalingRequest)


class IdentityQuantizer(Quantizer):
    """Casts nothing. As a ``CustomRecipe``'s answer it leaves the GEMMs that read the tensor in high
    precision."""

    def __init__(
        self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype  # type: ignore[assignment]

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """The tensor, of ``dtype`` or the constructor's, where one is given."""
        asked: Any = dtype or self.dtype
        made = tensor if asked is None else tensor.to(asked)
        return made if out is None else out.copy_(made)

    def quantize_impl(self, tensor: Tensor) -> Any:
        """``quantize`` without a gradient."""
        return self.quantize(tensor.detach())

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Copy ``src`` to ``dst``, which is returned; not where ``noop_flag``, (1,), is not 0."""
        with torch.no_grad():
            return dst.copy_(src if noop_flag is None else torch.where(noop_flag == 0, src, dst))

    def make_empty(
        self,
        shape: Any,
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """A plain tensor of that shape, of the constructor's dtype where there is one, not filled."""
        where, asked = default_device() if device is None else device, self.dtype or dtype
        options: Any = {"dtype": asked, "device": where, "pin_memory": pin_memory}
        return torch.empty(tuple(shape), requires_grad=requires_grad, **options)


@dataclass(frozen=True)
class QuantizerRequest:
    """A ``CustomRecipe``'s answer that asks for state: ``DelayedScalingRequest``."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Delayed scaling for a tensor, with the arguments of ``DelayedScaling``: those of all requests of a
    layer are the same."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True

    @property
    def recipe(self) -> DelayedScaling:
        """The recipe with these arguments."""
        return DelayedScaling(**vars(self))

    @property
    def history(self) -> AmaxHistory:
        """How its scales follow from earlier steps."""
        return self.recipe.history  # type: ignore[return-value]


@singledispatch
def _rule(quantizer: Any, role: QuantizerRole) -> Rule | None:
    """What an answer says of an operand of a GEMM; None for high precision."""
    wanted = "a quantizer of transformer_engine.pytorch, or None"
    raise UnsupportedError("CustomRecipe", "qfactory", f"a {type(quantizer).__name__}", wanted)


@_rule.register
def _(quantizer: HybridQuantizer, role: QuantizerRole) -> Rule | None:
    rows = _BY_ROWS[role.operand] == role.gemm
    return _rule(quantizer.rowwise_quantizer if rows else quantizer.columnwise_quantizer, role)


@_rule.register
def _(quantizer: IdentityQuantizer, role: QuantizerRole) -> Rule | None:
    return None


@_rule.register(Float8CurrentScalingQuantizer)
@_rule.register(Float8BlockQuantizer)
def _(quantizer: Any, role: QuantizerRole) -> Rule:
    return quantizer.rule()  # type: ignore[no-any-return]


@_rule.register
def _(quantizer: Float8Quantizer, role: QuantizerRole) -> Rule:
    scale = float(quantizer.scale.item())
    return Rule(format_of("Quantizer", quantizer.dtype), scale_source="static", static_scale=scale)


@_rule.register
def _(request: DelayedScalingRequest, role: QuantizerRole) -> Rule:
    return _of_recipe(request.recipe, role)


@_rule.register
def _(quantizer: MXFP8Quantizer, role: QuantizerRole) -> Rule:
    kind = "mx_32x32" if quantizer.with_2d_quantization else "mx_1x32"
    return Rule(format_of("Quantizer", quantizer.dtype), kind, scale_rule="te")


@_rule.register
def _(quantizer: NVFP4Quantizer, role: QuantizerRole) -> Rule:
    if quantizer.row_scaled_nvfp4:
        wanted = "an fp8kit.quantization.Quantizer for NVFP4 with a scale of each row"
        raise UnsupportedError("CustomRecipe", "qfactory", "such an NVFP4Quantizer", wanted)
    rotated = quantizer.with_rht and role.gemm == "wgrad"  # its operands are read along their columns
    return Rule(
        E2M1,
        "nvfp4_16x16" if quantizer.with_2d_quantization else "nvfp4_1x16",
        scale_rule=quantizer.how().rule,
        stochastic_bits=8 if quantizer.stochastic_rounding else 0,
        hadamard=16 if rotated else 0,
        signs="te" if rotated and quantizer.with_random_sign_mask else "plus",
    )


answers_with(Quantizer, _rule)
answers_with(QuantizerRequest, _rule)


def _of_recipe(recipe: Recipe, role: QuantizerRole) -> Rule:
    """What a recipe says of that operand of that GEMM."""
    gemm, operands = recipe.quantization.gemms[role.gemm], OPERANDS[role.gemm]
    place = operands.index({"input": "x", "weight": "w", "grad_output": "g"}[role.operand])
    return (gemm.a, gemm.b)[place]


# --- functions for ``CustomRecipe`` -------------------------------------------------------------------------


def current_scaling_factory(role: QuantizerRole) -> Quantizer:
    """As ``Float8CurrentScaling``."""
    gradient = role.operand == "grad_output"
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3)


def delayed_scaling_factory(role: QuantizerRole) -> QuantizerRequest:
    """As ``DelayedScaling``."""
    return DelayedScalingRequest()


def float8_block_scaling_factory(role: QuantizerRole) -> Quantizer:
    """As ``Float8BlockScaling``."""
    dims = 2 if role.operand == "weight" else 1
    return Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dims)


def mxfp8_factory(role: QuantizerRole) -> Quantizer:
    """As ``MXFP8BlockScaling``."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: QuantizerRole) -> Quantizer:
    """As ``NVFP4BlockScaling``."""
    if role.operand == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    rounding = role.operand == "grad_output"
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=rounding)


def high_precision_factory(role: QuantizerRole) -> Quantizer:
    """No operand in FP8."""
    return IdentityQuantizer()
