"""``quantized_model_init``, under which modules make their weights in FP8, and how tensors are held there.

FP8 layers take the codes of such a weight as they are, so that no cast of it is left in a step, nor of an
output that the layer before was asked for in FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.arguments import flag, named_well
from fp8kit.autocast import WANTED
from fp8kit.errors import RecipeError, UnsupportedError, on_behalf_of
from fp8kit.ops.product_emulated import EmulatedProduct
from fp8kit.ops.products import product_class
from fp8kit.quantization import Quantization
from fp8kit.recipe import DelayedScaling, Recipe
from fp8kit.scoped import Scoped
from fp8kit_torch.checks import check
from fp8kit_torch.distributed_weights import is_distributed
from fp8kit_torch.operand_tensor import Float8BlockwiseQTensor, Float8Tensor, OperandTensor
from fp8kit_torch.operand_tensor import _rebuilt as _rebuilt  # where files of earlier versions look for it
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.sharded_rows import ShardedWeight
from fp8kit_torch.sharded_weight import rows_of
from fp8kit_torch.te_compat.recipe_quantizers import quantizer_of_operand
from fp8kit_torch.te_compat.sharded_blocks import rows_of_coded


@lru_cache(maxsize=256)
def want_codes(operation: str, argument: str, fp8: Quantization) -> None:
    """UnsupportedError where products are emulated, on values: there are no codes of an operand to hold."""
    if fp8.fprop.compute != "quantized":
        raise UnsupportedError(operation, argument, "fprop in high precision", "fprop in FP8")
    if issubclass(product_class(fp8), EmulatedProduct):
        wanted = "a recipe whose products take FP8 codes, with scales of tensors or of blocks of 128"
        raise UnsupportedError(operation, argument, f"emulated products of {fp8.x}", wanted)


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


class HeldWeights(NamedTuple):
    """How modules that are made now hold their weights. ``quantizer``: what casts them, where products have
    no codes to take, and where a program has put them there; ``fp8``: None then."""

    fp8: Quantization | None
    preserve: bool
    quantizer: Any = None

    def may_cast(self, weight: Tensor) -> bool:
        """Whether a pass may cast what stands in a weight's place for itself: not where it wants a gradient,
        and not beside one that a program has cast."""
        wants = torch.is_grad_enabled() and weight.requires_grad
        return self.fp8 is not None and not wants and not is_distributed(weight)

    def parameter(self, weight: Tensor) -> torch.nn.Parameter:
        """The parameter ``weight``, held so; on the meta device one whose rows ``fully_shard`` will gather as
        codes."""
        values = weight.detach()
        if values.is_meta:
            rows = (
                rows_of(values, self.fp8) if self.quantizer is None else rows_of_coded(values, self.quantizer)
            )
            shell = torch.nn.Parameter(rows, weight.requires_grad)
            vars(shell).update(vars(weight))
            return shell
        held = OperandTensor.of(values, self.fp8) if self.quantizer is None else self.quantizer(values)
        made: Any = torch.nn.Parameter(held, weight.requires_grad)
        vars(made).update(vars(weight))
        if self.preserve:
            made._high_precision_init_val = weight.detach().cpu().clone()
        return made  # type: ignore[no-any-return]


_HELD: Scoped[HeldWeights | None] = Scoped("fp8kit_quantized_model_init", None)


def held_now() -> HeldWeights | None:
    """What the innermost ``quantized_model_init`` says; None outside of any."""
    return _HELD.get()


@named_well
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

    Weights of recipes with MXFP8's and NVFP4's scales are ``MXFP8Tensor`` and ``NVFP4Tensor``, of sizes that
    are multiples of the block: a layer casts their values anew in each call, fprop's to the same codes.

    For ``Linear``, ``LayerNormLinear``, ``LayerNormMLP``, ``GroupedLinear`` and what is made of them, with
    one weight a product, because it has one scale: ``fuse_qkv_params=True``, no ``parameters_split``, as
    Transformer Engine demands it; NotImplementedError for others, within ``torch.compile``, for weights that
    something else stands for since, and for recipes whose formats no quantizer of Transformer Engine has.
    RecipeError for what is no recipe.

    Layers on the meta device hold their weights as soon as torch puts values there: ``load_state_dict``,
    ``setattr`` (transformers' ``from_pretrained``), ``reset_parameters``, ``to`` and ``to_empty``. With
    ``preserve_high_precision_init_val`` those of ``to_empty`` stay plain until they are loaded or reset. A
    pass with gradients refuses weights that came by another way; ``load_state_dict`` of the model's own state
    casts them.

    Under torch's ``fully_shard`` each process has its rows in high precision (``ShardedWeight``), and codes
    are gathered.
    """
    check("quantized_model_init", {"enabled": flag, "preserve_high_precision_init_val": flag}, locals())
    recipe = DelayedScaling() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise RecipeError("quantized_model_init", "recipe", repr(recipe), WANTED)
    if enabled and recipe.by_layer:
        wanted = "a recipe that is the same for all layers"
        raise UnsupportedError("quantized_model_init", "recipe", recipe.short_name(), wanted)
    held = None
    if enabled:
        fp8, quantizer = recipe.quantization, None
        if fp8.w.coded_scales and fp8.fprop.compute == "quantized":
            with on_behalf_of("quantized_model_init"):
                quantizer = quantizer_of_operand(recipe, "w")
        else:
            want_codes("quantized_model_init", "recipe", fp8)
        held = HeldWeights(_held(fp8), bool(preserve_high_precision_init_val), quantizer)
    with _HELD.within(held):
        yield


fp8_model_init = quantized_model_init  # the name that it had before

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8Tensor",
    "OperandTensor",
    "QuantizedTensor",
    "ShardedWeight",
    "fp8_model_init",
    "quantized_model_init",
]
