"""``transformer_engine.jax.quantize``: scaling modes, sets of quantizers, what is supported. Everything is,
on every device: where the hardware has no such products they are emulated."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8kit import recipes
from fp8kit.arguments import choice, integer, shown
from fp8kit.errors import RecipeError, UnsupportedError
from fp8kit.recipe import DelayedScaling, Format, Recipe
from fp8kit_jax.quantizers import QuantizerSet, create_set, noop_quantizer_set
from fp8kit_jax.scopes import MeshResource, autocast, history_of, recipe_in_force
from fp8kit_jax.state import NVTE_FP8_COLLECTION_NAME, Slot
from fp8kit_jax.state import update_collections as update_collections


class ScalingMode(Enum):
    """How an operand's scales are found."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    CURRENT_TENSOR_SCALING = 2
    MXFP8_1D_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5

    def is_tensor_scaling(self) -> bool:
        """Whether a tensor has one scale."""
        return self in (ScalingMode.DELAYED_TENSOR_SCALING, ScalingMode.CURRENT_TENSOR_SCALING)

    def is_1d_block_scaling(self) -> bool:
        """Whether blocks lie along one dimension."""
        return self in (ScalingMode.MXFP8_1D_SCALING, ScalingMode.NVFP4_1D_SCALING)

    @property
    def is_mxfp8_scaling(self) -> bool:
        """Whether it is MXFP8's."""
        return self is ScalingMode.MXFP8_1D_SCALING

    @property
    def is_nvfp4_scaling(self) -> bool:
        """Whether it is NVFP4's."""
        return self in (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)


class QuantizeLayout(Enum):
    """Which orientations of an operand are made: the products decide that here."""

    ROWWISE = 0
    COLWISE = 1
    ROWWISE_COLWISE = 2


class TensorSource(Enum):
    """Which operand a tensor is."""

    X = 0
    KERNEL = 1
    DGRAD = 2


class AmaxComputeAlgo(Enum):
    """What of the history delayed scaling takes."""

    MAX = "max"
    MOST_RECENT = "most_recent"


@dataclass(frozen=True)
class QuantizeMeta:
    """One operand's state with delayed scaling: ``scale`` float32 (1,), ``amax_history`` float32 (steps,)."""

    scale: Any = None
    amax_history: Any = None


@dataclass(frozen=True)
class QuantizeMetaSet:
    """The states of a product's three operands."""

    x: QuantizeMeta
    kernel: QuantizeMeta
    grad: QuantizeMeta


_MODES = {
    ScalingMode.DELAYED_TENSOR_SCALING: "DelayedScaling",
    ScalingMode.CURRENT_TENSOR_SCALING: "Float8CurrentScaling",
    ScalingMode.MXFP8_1D_SCALING: "MXFP8BlockScaling",
    ScalingMode.NVFP4_1D_SCALING: "NVFP4BlockScaling",
    ScalingMode.NVFP4_2D_SCALING: "NVFP4BlockScaling",
}
_FORMATS = {
    ("float8_e4m3fn", "float8_e4m3fn"): Format.E4M3,
    ("float8_e4m3fn", "float8_e5m2"): Format.HYBRID,
    ("float8_e5m2", "float8_e5m2"): Format.E5M2,
}


# and the format of 4 bits, of both directions
_DTYPES = {value: tuple(map(jnp.dtype, key)) for key, value in _FORMATS.items()}
_DTYPES[Format.E2M1] = (jnp.dtype(jnp.float4_e2m1fn),) * 2


def _recipe_of(mode: ScalingMode, forward: Any, backward: Any) -> Recipe | None:
    if mode is ScalingMode.NO_SCALING:
        return None
    kind = getattr(recipes, _MODES[mode])
    if forward is None and backward is None:
        return kind()
    pair = tuple(np.dtype(one or jnp.float8_e4m3fn).name for one in (forward, backward))
    if mode.is_nvfp4_scaling:
        return kind()
    if pair not in _FORMATS:
        wanted = f"one of {list(_FORMATS)}"
        raise RecipeError("QuantizerFactory.create_set", "fwd_dtype, bwd_dtype", pair, wanted)
    return kind(fp8_format=_FORMATS[pair])


class QuantizerFactory:
    """Makes sets of quantizers."""

    @staticmethod
    def create(*arguments: Any, **named: Any) -> Any:
        """UnsupportedError: there is no quantizer of one operand."""
        wanted = "create_set, whose products cast their operands; fp8kit_jax.quantize casts one array"
        raise UnsupportedError("QuantizerFactory.create", "quantizer", "of one operand", wanted)

    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1,
        scaling_mode: ScalingMode | None = None,
        fwd_dtype: Any = None,
        bwd_dtype: Any = None,
        is_2x2x: bool | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        fp8_recipe: Recipe | None = None,
        **state: Any,
    ) -> Any:
        """Returns a QuantizerSet, or a tuple of ``n_quantizer_sets`` of them: by ``fp8_recipe``, or by
        ``scaling_mode`` with the formats of both directions, or by the autocast in force.

        ``quantize_meta_set``: the states with delayed scaling, None, or None in them: fresh ones.
        ``checkpoint_name``: see ``QuantizerSet``'s ``kept_as``. ``is_2x2x`` and ``n_groups`` are accepted:
        products ask for the orientations and the groups that they need. UnsupportedError for a quantizer's
        other arguments.
        """
        op = "QuantizerFactory.create_set"
        count = integer(op, "n_quantizer_sets", n_quantizer_sets, 1, 2**16)
        meta = state.pop("quantize_meta_set", None)
        if state:
            raise UnsupportedError(
                op, ", ".join(state), "given", "a recipe, which says how operands are cast"
            )
        if scaling_mode is not None and fp8_recipe is not None:
            raise RecipeError(op, "scaling_mode", shown(scaling_mode), "None beside fp8_recipe")
        if scaling_mode is not None:
            recipe = _recipe_of(scaling_mode, fwd_dtype, bwd_dtype)
        else:
            recipe = recipe_in_force() if fp8_recipe is None else fp8_recipe

        def one() -> QuantizerSet:
            found = noop_quantizer_set if recipe is None else create_set(recipe)
            slots = {}
            if meta is not None and history_of(recipe) is not None:
                own = {name: getattr(meta, name) for name in ("x", "kernel", "grad")}
                slots = {
                    name: Slot(each.scale, each.amax_history)
                    for name, each in own.items()
                    if each.scale is not None
                }
            return replace(found, kept_as=checkpoint_name or "", **slots)

        return one() if count == 1 else tuple(one() for _ in range(count))


class QuantizeConfig:
    """What the autocast in force says."""

    COLLECTION_NAME = NVTE_FP8_COLLECTION_NAME

    def __init__(self, recipe: Recipe | None) -> None:
        self.recipe = recipe

    def is_fp8_enabled(self) -> bool:
        """Whether there is a recipe."""
        return self.recipe is not None

    @property
    def AMAX_HISTORY_LEN(self) -> int:
        """The length of histories, 0 without delayed scaling."""
        history = history_of(self.recipe)
        return 0 if history is None else history.length

    @property
    def AMAX_COMPUTE_ALGO(self) -> AmaxComputeAlgo:
        """What of the history delayed scaling takes."""
        algo = self._field("amax_compute_algo", "max")
        if callable(algo):
            raise UnsupportedError("AMAX_COMPUTE_ALGO", "recipe", "a function", "max or most_recent")
        return AmaxComputeAlgo(algo)

    @property
    def MARGIN(self) -> float:
        """The margin of delayed scaling, 0 without it."""
        return float(self._field("margin", 0))

    @property
    def FWD_DTYPE(self) -> Any:
        """The dtype of inputs' and weights' codes, None without a recipe."""
        return self._dtypes()[0]

    @property
    def BWD_DTYPE(self) -> Any:
        """The dtype of gradients' codes, None without a recipe."""
        return self._dtypes()[1]

    @property
    def DISABLE_STOCHASTIC_ROUNDING(self) -> bool:
        """NVFP4BlockScaling's field, False for other recipes; so the next two."""
        return bool(self._field("disable_stochastic_rounding", False))

    @property
    def DISABLE_RHT(self) -> bool:
        """Whether gradients are not rotated."""
        return bool(self._field("disable_rht", False))

    @property
    def DISABLE_2D_QUANTIZATION(self) -> bool:
        """Whether weights have blocks of one dimension."""
        return bool(self._field("disable_2d_quantization", False))

    def get_scaling_mode(self, tensor_source: TensorSource) -> ScalingMode:
        """Returns how the scales of an operand are found. UnsupportedError for a recipe that Transformer
        Engine's JAX does not have."""
        if self.recipe is None:
            return ScalingMode.NO_SCALING
        modes = [mode for mode, kind in _MODES.items() if isinstance(self.recipe, getattr(recipes, kind))]
        if not modes:
            wanted = f"one of {', '.join(dict.fromkeys(_MODES.values()))}"
            raise UnsupportedError("get_scaling_mode", "recipe", self.recipe.short_name(), wanted)
        flat = tensor_source is not TensorSource.KERNEL or self.DISABLE_2D_QUANTIZATION
        return modes[0] if flat else modes[-1]

    def _field(self, name: str, other: Any) -> Any:
        return getattr(self.recipe, name, other)

    def _dtypes(self) -> tuple[Any, ...]:
        found = self._field("fp4_format", self._field("fp8_format", None))
        return _DTYPES.get(found, (None, None))

    def is_supported(self) -> tuple[bool, str]:
        """(whether it works, why not): it does, on every device."""
        return True, ""


def get_global_quantize_recipe() -> Recipe | None:
    """Returns the recipe of the autocast in force, None where FP8 is off."""
    return recipe_in_force()


def get_quantize_config() -> QuantizeConfig:
    """Returns what the autocast in force says."""
    return QuantizeConfig(recipe_in_force())


def get_quantize_config_with_recipe(fp8_recipe: Recipe) -> QuantizeConfig:
    """Returns the same of a recipe."""
    return QuantizeConfig(fp8_recipe)


def is_scaling_mode_supported(scaling_mode: ScalingMode, gpu_id: int | None = None) -> tuple[bool, str]:
    """(whether it works, why not): it does, on every device."""
    if not isinstance(scaling_mode, ScalingMode):
        raise RecipeError("is_scaling_mode_supported", "scaling_mode", shown(scaling_mode), "a ScalingMode")
    return True, ""


def is_fp8_available(
    scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING, gpu_id: int | None = None
) -> tuple[bool, str]:
    """``is_scaling_mode_supported``, by its former name."""
    return is_scaling_mode_supported(scaling_mode, gpu_id)


def get_supported_scaling_modes() -> list[ScalingMode]:
    """All of them but NO_SCALING."""
    return [mode for mode in ScalingMode if mode is not ScalingMode.NO_SCALING]


def get_supported_quantization_recipes() -> list[Recipe]:
    """One of each recipe that Transformer Engine's JAX has."""
    return [getattr(recipes, name)() for name in dict.fromkeys(_MODES.values())]


def get_quantization_recipe(name: str) -> Recipe:
    """Returns the recipe of Transformer Engine's JAX whose class has that name, by its defaults. RecipeError
    for another name."""
    known = {type(recipe).__name__: recipe for recipe in get_supported_quantization_recipes()}
    return known[choice("get_quantization_recipe", "name", name, known, RecipeError)]


def is_quantize_recipe_supported(recipe_name: str) -> tuple[bool, str]:
    """(whether it works, why not) of a recipe by the name of its class: it does, on every device. RecipeError
    for another name."""
    get_quantization_recipe(recipe_name)
    return True, ""


def get_device_compute_capability(gpu_id: int = 0) -> int:
    """Returns the compute capability of one of this process's devices, 90 of an H200; 0 of a CPU."""
    found = getattr(jax.local_devices()[gpu_id], "compute_capability", "0")
    return int(found.replace(".", ""))


def is_fp8_gemm_with_all_layouts_supported() -> bool:
    """Whether the devices' FP8 products take operands of either layout."""
    return all(100 <= get_device_compute_capability(i) < 120 for i in range(len(jax.local_devices())))


def get_delayed_scaling() -> DelayedScaling:
    """Returns the DelayedScaling of the autocast in force; the default one where there is none."""
    found = recipe_in_force()
    return found if found is not None and found.delayed() else DelayedScaling()


def fp8_autocast(
    enabled: bool = False, fp8_recipe: Recipe | None = None, mesh_resource: MeshResource | None = None
) -> AbstractContextManager[None]:
    """``autocast``, by its former name and its former names of arguments."""
    return autocast(enabled, fp8_recipe, mesh_resource)
