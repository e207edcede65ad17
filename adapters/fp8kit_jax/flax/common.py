"""What the Flax modules share: parameters, logical axes, fields that are refused, dropout, FP8 state in the
collection ``FP8_COLLECTION_NAME``."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fp8kit.arguments import Rule, check, shown
from fp8kit.errors import ArgumentError, RecipeError
from fp8kit.recipe import Recipe
from fp8kit_jax.activations import learned_of
from fp8kit_jax.arguments import as_array, check_fused
from fp8kit_jax.checks import RULES
from fp8kit_jax.modules import NO_NORM, fan_in, residual_sum
from fp8kit_jax.quantizers import QuantizerSet, from_variables, state_names, state_variables
from fp8kit_jax.scopes import history_of, keys_from, mesh_resource, recipe_in_force
from fp8kit_jax.state import FORMER_COLLECTION_NAME, FP8_COLLECTION_NAME

log = logging.getLogger("fp8kit")

_SCORES = "scores are changed by bias, mask, window and ALiBi"

# fields and arguments of Transformer Engine's modules that there are for their one value: name -> (value, why
# no other)
FIXED: dict[str, tuple[Any, str]] = {
    "ffn1_ckpt_name": ("ffn1", "what lies between the products does not leave their one call"),
    "enable_sequence_parallel": (False, "rows are split along their first dimension, not along the sequence"),
    "score_mod": (None, _SCORES),
    "score_mod_bprop": (None, _SCORES),
    "score_mod_tensors": (None, _SCORES),
    "score_mod_bprop_tensors": (None, _SCORES),
}
# of MultiHeadAttention besides
RENAMED: dict[str, tuple[Any, str]] = {
    "num_heads": (None, "renamed: num_attention_heads"),
    "dropout_rate": (None, "renamed: attention_dropout"),
    "output_layernorm": (None, "renamed: input_layernorm"),
    "apply_residual_connection_post_layernorm": (None, "renamed: return_layernorm_output"),
    "fuse_qkv": (None, "renamed: fuse_qkv_params"),
}

# logical axes of Transformer Engine's kernels and activations -> fields of MeshResource that they follow, in
# this order
LOGICAL_AXES = {
    "nvte_batch": ("dp_resource", "fsdp_resource"),
    "nvte_seqlen": (),
    "nvte_seqlen_tp": ("tpsp_resource",),
    "nvte_seqlen_cp": ("cp_resource",),
    "nvte_head": ("tp_resource", "tpsp_resource"),
    "nvte_hidden": (),
    "nvte_hidden_tp": ("tp_resource", "tpsp_resource"),
    "nvte_joined": (),
    "nvte_w_no_shard": (),
    "nvte_w_fsdp": ("fsdp_resource",),
    "nvte_w_tp": ("tp_resource", "tpsp_resource"),
    "nvte_w_joined": (),
}

NORM_AXES = {"scale_axes": ("nvte_w_no_shard",), "ln_bias_axes": ("nvte_w_no_shard",)}
MLP_AXES = NORM_AXES | {
    "kernel_axes_1": ("nvte_w_fsdp", "nvte_w_joined", "nvte_w_tp"),
    "kernel_axes_2": ("nvte_w_tp", "nvte_w_fsdp"),
    "bias_axes_1": ("nvte_w_joined", "nvte_w_tp"),
    "bias_axes_2": ("nvte_w_no_shard",),
}

# fields whose words may have either case, as in Transformer Engine -> the case that they are kept in
_CASES: dict[str, Callable[[str], str]] = {
    "attn_bias_type": str.lower,
    "self_attn_bias_type": str.lower,
    "qkv_layout": str.lower,
    "context_parallel_strategy": str.upper,
}


class EitherCase(nn.Module):
    """A module whose fields of ``_CASES`` may have either case."""

    def __post_init__(self) -> None:
        for name, kept in _CASES.items():
            value = getattr(self, name, None)
            if isinstance(value, str):
                word = kept(value)
                setattr(self, name, "ALL_GATHER" if word == "ALLGATHER" else word)
        super().__post_init__()


def check_fields(
    module: Any,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    fixed: Mapping[str, tuple[Any, str]] = FIXED,
    rules: Mapping[str, Rule] = RULES,
) -> None:
    """ArgumentError for a field that ``rules`` refuse, and for a ``fixed`` field, or one of the ``arguments``
    of a call, with another value; TypeError for an argument that there is not."""
    op = type(module).__name__
    check(op, rules, vars(module))
    for name in arguments.keys() - fixed.keys():
        raise TypeError(f"{op}: unexpected argument {name!r}")
    for name, (value, why) in fixed.items():
        found = arguments.get(name, getattr(module, name, value))
        alike = found is value or (isinstance(found, str | int | float | None) and found == value)
        if not alike:
            raise ArgumentError(op, name, shown(found), f"{value!r}: {why}")


def shared_fields(module: Any, child: type, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a child: ``options``, and the module's own fields that the child has too."""
    names = {field.name for field in dataclasses.fields(child)} - {"parent", "name", *FIXED, *RENAMED}
    return {name: value for name, value in vars(module).items() if name in names} | options


def want_array(module: Any, name: str, value: Any) -> Any:
    """Returns the input of a module as a JAX array. FormatError, which names it, if it is not an array."""
    return as_array(type(module).__name__, name, value)


def want_fused(module: Any, name: str, *others: str) -> None:
    """ArgumentError where the field ``name``, which has y added to something, and one of the ``others`` are
    asked for."""
    asked = {other: getattr(module, other) for other in others}
    check_fused(type(module).__name__, getattr(module, name), name, **asked)


# --- logical axes -------------------------------------------------------------------------------------------


def mesh_axes() -> dict[str, Any]:
    """Returns the mesh axes of each of ``LOGICAL_AXES`` by the MeshResource in force: one, several, None."""
    resource, found = mesh_resource(), dict[str, Any]()
    for name, fields in LOGICAL_AXES.items():
        axes = tuple(axis for axis in (getattr(resource, field) for field in fields) if axis is not None)
        found[name] = axes[0] if len(axes) == 1 else axes or None
    return found


def extend_logical_axis_rules(rules: Any) -> tuple[tuple[str, Any], ...]:
    """``rules`` (logical axis, mesh axes) and those of ``LOGICAL_AXES`` by the MeshResource in force, for
    ``flax.linen.logical_axis_rules``. Fp8kitError where two rules of one name differ."""
    present, found = dict(rules), [*rules]
    for name, axes in mesh_axes().items():
        if name not in present:
            found.append((name, axes))
        elif present[name] != axes:
            wanted = f"{axes!r}, as the MeshResource has it"
            raise ArgumentError("extend_logical_axis_rules", name, repr(present[name]), wanted)
    return tuple(found)


def _rules() -> Any:
    return nn.get_logical_axis_rules() or extend_logical_axis_rules(())


def constrains(axes: Any) -> bool:
    """Whether the rules in force put one of these logical axes on the mesh."""
    return bool(axes) and any(axis is not None for axis in nn.logical_to_mesh_axes(tuple(axes), _rules()))


def constrained(x: Any, axes: Any) -> Any:
    """x with a sharding constraint by logical axes, where there are some that lie on the mesh."""
    return nn.with_logical_constraint(x, tuple(axes), rules=_rules()) if constrains(axes) else x


# --- random bits --------------------------------------------------------------------------------------------

# collection of random keys for casts (Transformer Engine's name)
RNG_COLLECTION_NAME = "sr_rng"


@functools.cache
def _say_params() -> None:
    """Warn once that casts draw by a key that programs often keep."""
    log.warning(
        "random bits of casts come from the rng collection 'params', since there is no %r: give a new key "
        "for each step, and name %r in split_rngs of a scan",
        RNG_COLLECTION_NAME,
        RNG_COLLECTION_NAME,
    )


class _ModuleKeys:
    """The random keys of a module's casts: from its rng collection, or from "params" as of any collection
    that is not given."""

    also = f", or apply(..., rngs={{{RNG_COLLECTION_NAME!r}: key}})"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def next(self) -> Any:
        """Returns the next one, None where there is none."""
        own = self.module
        if not own.has_rng(RNG_COLLECTION_NAME):
            if not own.has_rng("params"):
                return None
            if not own.is_initializing():
                _say_params()
        return own.make_rng(RNG_COLLECTION_NAME)


def draws_keys(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a module's ``__call__`` whose casts take their random keys from the collection
    ``RNG_COLLECTION_NAME`` where the autocast in force has no key."""

    @functools.wraps(call)
    def keyed(self: nn.Module, *args: Any, **options: Any) -> Any:
        with keys_from(_ModuleKeys(self)):
            return call(self, *args, **options)

    return keyed


# names of a module's products for the inspector, by their state's postfix
_ENDINGS = {"": "", "_0": ".fc1", "_1": ".fc2"}

# --- parameters and state -----------------------------------------------------------------------------------


def quantizer_set(
    module: nn.Module,
    postfix: str = "",
    recipe: Recipe | None = None,
    collection: str | None = None,
    kept_as: str | None = None,
) -> QuantizerSet:
    """Returns the set of one product by ``recipe``, None: by the autocast in force; with delayed scaling its
    slots are the module's variables ``x{postfix}_scale``, ``x{postfix}_amax_history`` and those of ``kernel``
    and ``grad`` (Transformer Engine's names), in ``collection``; None: FP8_COLLECTION_NAME, or the former one
    where they are there. ``kept_as``: see ``QuantizerSet``; None is the module's
    ``quantization_checkpoint_name``."""
    # a model that is one layer has no path
    kind, path = type(module).__name__, ".".join(map(str, module.path)) or module.name or ""
    layer = f"{path}{_ENDINGS.get(postfix, f'.{postfix}')}"
    kept_as = kept_as or getattr(module, "quantization_checkpoint_name", None) or ""
    recipe = recipe_in_force(kind, path) if recipe is None else recipe.for_layer(kind, path)
    history = history_of(recipe)
    if history is None:
        return QuantizerSet(recipe=recipe, layer=layer, kept_as=kept_as)
    names = (FP8_COLLECTION_NAME, FORMER_COLLECTION_NAME) if collection is None else (collection,)
    found = next((name for name in names if module.has_variable(name, f"x{postfix}_scale")), None)
    if found is None:
        found = names[0]
        if not module.is_mutable_collection(found):
            wanted = "the variables that init makes within an autocast with DelayedScaling, passed to apply"
            if module.is_initializing():
                wanted = "an init that makes it: name it in variable_axes of a scan or vmap, or in mutable"
            raise RecipeError(kind, found, "none of this layer", wanted)

    def start(name: str) -> Any:
        with jax.ensure_compile_time_eval():  # within a jitted function of JAX's own too, such as einsum
            return state_variables(history, postfix)[name]

    values = [module.variable(found, name, start, name).value for name in state_names(postfix)]
    return from_variables(recipe, values, layer, kept_as)


def partitioned(init: Any, axes: tuple[Any, ...]) -> Any:
    """Returns the initialiser, with the parameter's logical axes where there are some."""
    return nn.with_logical_partitioning(init, axes) if axes else init


def parameter(
    module: Any, name: str, init: Any, axes: tuple[Any, ...], shape: tuple[int, ...], dtype: Any
) -> Any:
    """Returns the module's parameter, kept in the module's dtype, as an array of ``dtype``."""
    return jnp.asarray(module.param(name, partitioned(init, axes), shape, module.dtype), dtype)


def kernel_parameter(
    module: Any, name: str, ins: tuple[int, ...], features: tuple[int, ...], axes: tuple[Any, ...], dtype: Any
) -> Any:
    """Returns a product's kernel (ins..., features...); its initialiser sees all of ``ins`` as one
    dimension."""
    init = module.kernel_init or fan_in(len(features))

    def start(key: Any, shape: Any, dtype: Any) -> Any:
        return init(key, (math.prod(ins), *features), dtype).reshape(shape)

    return parameter(module, name, start, axes, (*ins, *features), dtype)


def bias_parameter(module: Any, name: str, axes: tuple[Any, ...], shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns a product's bias, None without ``use_bias``."""
    return parameter(module, name, module.bias_init, axes, shape, dtype) if module.use_bias else None


def alpha_parameters(module: Any, activations: tuple[str, ...], dtype: Any) -> list[Any]:
    """Returns the learned numbers ``alpha_p`` and ``alpha_n`` of an activation, none of one that has none."""
    learned = learned_of(type(module).__name__, activations)
    return [
        parameter(module, key, nn.initializers.constant(start), (), (1,), dtype)
        for key, start in learned.items()
    ]


def norm_parameters(module: Any, features: int, dtype: Any) -> tuple[Any, ...]:
    """Returns the arguments of ``fp8kit_jax.layernorm`` after x for a module with Transformer Engine's
    fields: parameters ``scale`` and, of a LayerNorm, ``ln_bias``, and the options; ``NO_NORM`` without
    ``enable_layernorm``."""
    if not getattr(module, "enable_layernorm", True):
        return NO_NORM
    usual = nn.initializers.zeros if module.zero_centered_gamma else nn.initializers.ones
    scale = parameter(module, "scale", module.scale_init or usual, module.scale_axes, (features,), dtype)
    bias, prefix = None, "ln_" if hasattr(module, "ln_bias_init") else ""
    if module.layernorm_type != "rmsnorm":
        init, axes = (getattr(module, f"{prefix}bias_{field}") for field in ("init", "axes"))
        bias = parameter(module, "ln_bias", init, axes, (features,), dtype)
    return scale, bias, module.layernorm_type, module.zero_centered_gamma, module.epsilon


def add_residual(module: Any, branch: Any, bias: Any, residual: Any, deterministic: bool, path: float) -> Any:
    """residual + dropout(branch + bias) by the fields of a TransformerLayer; whole samples of dropout(...)
    are dropped with probability ``path``."""
    rates = (0.0, 0.0) if deterministic else (module.hidden_dropout, path)
    draws = [(rate, module.make_rng(module.dropout_rng_name) if rate else None) for rate in rates]
    return residual_sum(branch, bias, residual, *draws, tuple(module.hidden_dropout_dims), form(module))


def form(module: Any) -> str:
    """Returns the order of the dimensions of a module's arrays."""
    return "sbhd" if module.transpose_batch_sequence else "bshd"
