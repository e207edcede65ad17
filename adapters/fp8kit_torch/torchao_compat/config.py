"""``Float8LinearConfig`` and what it is made of, by torchao 0.18's names, fields and defaults, and the recipe
that it says."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch

from fp8kit.errors import ArgumentError
from fp8kit.formats import E4M3, E5M2
from fp8kit.layer_recipes import DataRecipe
from fp8kit.quantization import Gemm, Quantization, Quantizer

e4m3_dtype, e5m2_dtype = torch.float8_e4m3fn, torch.float8_e5m2
_FORMATS = {e4m3_dtype: E4M3, e5m2_dtype: E5M2}
_LEAST_AMAX = 1e-12  # torchao's EPS


class ScalingType(enum.Enum):
    """Whether an operand is cast, by a scale of its own amax, or stays as it is."""

    DYNAMIC = "dynamic"
    DISABLED = "disabled"

    def short_str(self) -> str:
        """ "dyn" or "dis"."""
        return self.value[:3]


class ScalingGranularity(enum.Enum):
    """One scale for a tensor, or one for each row along the sum."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"

    def short_str(self) -> str:
        """ "ten" or "axs"."""
        return {"tensorwise": "ten", "axiswise": "axs"}[self.value]


class Float8LinearRecipeName(enum.Enum):
    """The configurations that have a name."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class CastConfig:
    """How one operand is cast. ``target_dtype``: ``torch.float8_e4m3fn`` or ``float8_e5m2``; None is E4M3 for
    inputs and weights, E5M2 for gradients. ArgumentError for another."""

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.target_dtype is not None and self.target_dtype not in _FORMATS:
            wanted = "torch.float8_e4m3fn, torch.float8_e5m2 or None"
            raise ArgumentError("CastConfig", "target_dtype", self.target_dtype, wanted)
        axis = self.scaling_granularity is ScalingGranularity.AXISWISE
        if axis and self.scaling_type is not ScalingType.DYNAMIC:
            got = f"{self.scaling_type} with {self.scaling_granularity}"
            raise ArgumentError("CastConfig", "scaling_type", got, "ScalingType.DYNAMIC for rows")

    def short_str(self) -> str:
        """Such as "dyn_ten_e4m3"."""
        kind = "e5m2" if self.target_dtype is e5m2_dtype else "e4m3"
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}_{kind}"


@dataclass(frozen=True)
class Float8GemmConfig:
    """How one product is summed: ``use_fast_accum`` in the tensor cores' own width."""

    use_fast_accum: bool = False


@dataclass(frozen=True)
class Float8LinearConfig:
    """How the three products of a linear layer's weight are computed.

    The six ``cast_config_*``: of input, weight and output gradient, each as one product reads it and as the
    other does; None is as the first. ``gemm_config_*``: of the three products. ``pad_inner_dim``,
    ``emulate``, ``force_recompute_fp8_weight_in_bwd``: accepted; sizes need no padding here, the device
    decides whether FP8 is emulated, and weights are cast as the recipe says.
    ``enable_fsdp_float8_all_gather``: accepted; ``fully_shard`` gathers weights in their own dtype here,
    which are cast to the same codes.
    ``round_scales_to_power_of_2``: scales are rounded down to powers of two.

    ArgumentError where the operands of one product are not both cast, or one has two formats.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        whole = self.cast_config_weight.scaling_granularity is ScalingGranularity.TENSORWISE
        if self.enable_fsdp_float8_all_gather and not whole:
            wanted = "False where weights have a scale for each row"
            raise ArgumentError("Float8LinearConfig", "enable_fsdp_float8_all_gather", True, wanted)
        for first, second, default in (
            ("cast_config_input", "cast_config_input_for_grad_weight", e4m3_dtype),
            ("cast_config_weight", "cast_config_weight_for_grad_input", e4m3_dtype),
            ("cast_config_grad_output", "cast_config_grad_output_for_grad_weight", e5m2_dtype),
        ):
            casts = [getattr(self, first), getattr(self, second) or getattr(self, first)]
            casts = [replace(cast, target_dtype=cast.target_dtype or default) for cast in casts]
            if casts[0].target_dtype is not casts[1].target_dtype:
                got = f"{casts[1].target_dtype}, with {casts[0].target_dtype} as {first}"
                raise ArgumentError("Float8LinearConfig", second, got, "one format for both")
            for name, cast in zip((first, second), casts, strict=True):
                object.__setattr__(self, name, cast)
        for gemm, names in _GEMMS.items():
            kinds = {getattr(self, name).scaling_type for name in names}
            if len(kinds) > 1:
                wanted = "both operands of a product cast, or neither"
                raise ArgumentError("Float8LinearConfig", " and ".join(names), f"one of {gemm}'s", wanted)

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """The configuration of that name: "tensorwise", "rowwise" or "rowwise_with_gw_hp". ArgumentError for
        another."""
        known = [name.value for name in Float8LinearRecipeName]
        value = getattr(recipe_name, "value", recipe_name)
        if value not in known:
            raise ArgumentError(
                "Float8LinearConfig", "recipe_name", recipe_name, f"one of {', '.join(known)}"
            )
        if value == "tensorwise":
            return Float8LinearConfig()
        row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=e4m3_dtype)
        made = Float8LinearConfig(row, None, row, None, row, round_scales_to_power_of_2=True)
        if value == "rowwise":
            return made
        plain = CastConfig(ScalingType.DISABLED, target_dtype=e4m3_dtype)
        return replace(
            made,
            cast_config_weight_for_grad_input=CastConfig(target_dtype=e4m3_dtype),
            cast_config_input_for_grad_weight=plain,
            cast_config_grad_output_for_grad_weight=plain,
        )


# product -> the fields that say how its operands are cast
_GEMMS = {
    "output": ("cast_config_input", "cast_config_weight"),
    "grad_input": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "grad_weight": ("cast_config_grad_output_for_grad_weight", "cast_config_input_for_grad_weight"),
}


def recipe_of(config: Float8LinearConfig) -> DataRecipe:
    """The recipe whose products are those of the configuration."""
    rule = "power_2" if config.round_scales_to_power_of_2 else "exact"
    gemms = []
    for gemm, names in _GEMMS.items():
        casts = [getattr(config, name) for name in names]
        operands = [
            Quantizer(
                _FORMATS[cast.target_dtype],
                "row" if cast.scaling_granularity is ScalingGranularity.AXISWISE else "tensor",
                scale_rule=rule,
                epsilon=_LEAST_AMAX,
            )
            for cast in casts
        ]
        fast = getattr(config, f"gemm_config_{gemm}").use_fast_accum
        cast = casts[0].scaling_type is ScalingType.DYNAMIC
        compute = "quantized" if cast else "high_precision"
        gemms.append(Gemm(operands[0], operands[1], "fast" if fast else "split", compute))
    return DataRecipe(Quantization(*gemms), "torchao")


__all__ = [
    "CastConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
    "e4m3_dtype",
    "e5m2_dtype",
    "recipe_of",
]
