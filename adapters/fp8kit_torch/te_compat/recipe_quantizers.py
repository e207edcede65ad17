"""Transformer Engine's quantizers as recipes have them for the operands of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8kit.errors import UnsupportedError
from fp8kit.formats import E2M1
from fp8kit.scaling import BACKWARD_SLOTS, FORWARD_SLOTS
from fp8kit_torch.te_compat.block_tensors import MXFP8Quantizer, NVFP4Quantizer
from fp8kit_torch.te_compat.dtypes import of_format
from fp8kit_torch.te_compat.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)


def quantizer_of_operand(
    recipe: Any,
    operand: str,
    prepare: Callable[[int], None] | None = None,
    fp8_meta: Mapping[str, Any] | None = None,
    gemm: int = 0,
) -> Quantizer:
    """How a recipe casts "x", "w" or "g" of a layer's product number ``gemm``. ``prepare``, ``fp8_meta``: the
    layer's, whose scales and amaxes delayed scaling takes; without them a scale is the tensor's own.
    UnsupportedError for what no quantizer of Transformer Engine casts by."""
    fp8 = recipe.quantization
    rule = getattr(fp8, operand)
    again = {"x": fp8.wgrad.b, "w": fp8.dgrad.b, "g": fp8.wgrad.a}[operand]  # as the other product reads it
    kind, scale_rule = rule.granularity, rule.scale_rule
    plain = not (rule.levers or rule.hadamard or rule.static)  # no quantizer has these
    nearest = plain and not rule.stochastic_bits
    how = {"force_pow_2_scales": rule.power_2, "amax_epsilon": rule.epsilon}
    if nearest and kind in ("mx_1x32", "mx_32x32") and scale_rule == "te":
        return MXFP8Quantizer(of_format(rule.format), with_2d_quantization=kind == "mx_32x32")
    rotated = bool(again.hadamard)
    if rotated:  # as the quantizer's columns are, which have no 4over6 rule then
        plain = plain and again.rotation == (16, "te") and scale_rule == "exact"
    if plain and kind.startswith("nvfp4") and rule.format == E2M1 and scale_rule != "eden":
        return NVFP4Quantizer(
            with_rht=rotated,
            with_post_rht_amax=rotated,
            with_2d_quantization=kind == "nvfp4_16x16",
            stochastic_rounding=bool(rule.stochastic_bits),
            row_scaled_nvfp4=rule.row_scaled,
            nvfp4_use_4over6=scale_rule != "exact",
            nvfp4_e4m3_max=256 if scale_rule.endswith("_256") else 448,
            nvfp4_4over6_err_mode="MSE" if "mse" in scale_rule else "MAE",
        )
    if nearest and kind in ("block_1x128", "block_128x128"):
        return Float8BlockQuantizer(
            of_format(rule.format),
            rowwise=True,
            columnwise=True,
            block_scaling_dim=1 if kind == "block_1x128" else 2,
            **how,
        )
    if not nearest or kind != "tensor":
        wanted = "a recipe of Transformer Engine's formats and scales"
        raise UnsupportedError("get_quantizer", "recipe", str(rule), wanted)
    if not rule.needs_state or prepare is None or fp8_meta is None:
        return Float8CurrentScalingQuantizer(of_format(rule.format), **how)
    direction, slots = ("scaling_bwd", BACKWARD_SLOTS) if operand == "g" else ("scaling_fwd", FORWARD_SLOTS)
    prepare(recipe.history.length)
    state, slot = fp8_meta[direction], slots * gemm + (operand == "w")
    return Float8Quantizer(
        state.scale[slot : slot + 1], state.amax_history[0, slot : slot + 1], of_format(rule.format)
    )
