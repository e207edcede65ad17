"""The cast that a statistic measures: by the layer's own recipe, or (what if) by another one."""

from __future__ import annotations

from fp8kit.errors import ArgumentError
from fp8kit.quantization import OPERANDS, Quantization, Quantizer
from fp8kit.recipes import NAMED, TE_RECIPES

# tensor -> the operand whose rules cast it. A GEMM's result is cast in what-ifs alone, by the rules that it
# would have as an operand of the next layer
_SOURCES = {"activation": "x", "weight": "w", "gradient": "g", "output": "x", "dgrad": "g", "wgrad": "g"}
CAST = ("activation", "weight", "gradient")  # the tensors that a layer casts


def recipe_names() -> tuple[str, ...]:
    """Returns what a statistic's name may begin with: every name of ``fp8kit.recipes.NAMED``, and Transformer
    Engine's."""
    return (*NAMED, *TE_RECIPES)


def quantization_of(recipe: str) -> Quantization:
    """Returns the rules of a recipe by one of ``recipe_names``."""
    return NAMED[TE_RECIPES.get(recipe, recipe)].recipe.quantization


def cast_of(
    stat: str, tensor: str, quantization: Quantization, columnwise: bool, transposed: bool
) -> tuple[Quantizer, int]:
    """(quantizer, dimension along which it lies) of a tensor as the first GEMM that reads it casts it, or,
    ``columnwise``, the second: fprop and wgrad of an activation, fprop and dgrad of a weight, dgrad and wgrad
    of a gradient. ``transposed``: the weight lies as (in, out). ArgumentError, of ``stat``, where that GEMM
    does not cast it."""
    source = _SOURCES[tensor]
    readers = [(name, pair.index(source)) for name, pair in OPERANDS.items() if source in pair]
    name, place = readers[columnwise]
    gemm, along = quantization.gemms[name], 1 - columnwise
    if gemm.compute == "dequantized" and source != "g":  # as the first GEMM casts it
        (first, place), along = readers[0], 1
        gemm = quantization.gemms[first]
    as_it_is = gemm.plain == "ab"[place]
    if gemm.compute != "quantized" or as_it_is:
        how = f"{name} is computed {gemm.compute!r}" + f", with the {tensor} as it is" * as_it_is
        wanted = f"a GEMM that multiplies codes of the {tensor}: {how}"
        raise ArgumentError("statistics", "stats", repr(stat), wanted)
    if transposed and tensor == "weight":
        along = 1 - along
    return (gemm.a, gemm.b)[place], along
