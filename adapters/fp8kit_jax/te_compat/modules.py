"""What ``transformer_engine.jax.flax`` has beside ``fp8kit_jax.flax``, or by other defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from fp8kit.autocast import WANTED
from fp8kit.errors import RecipeError, ShapeError
from fp8kit.recipe import Recipe
from fp8kit_jax import functional, grouped
from fp8kit_jax.arguments import as_array
from fp8kit_jax.flax import dense, dot_general
from fp8kit_jax.flax.common import draws_keys, quantizer_set
from fp8kit_jax.quantizers import QuantizerSet
from fp8kit_jax.te_compat.attention import AttnSoftmaxType
from fp8kit_jax.te_compat.functions import SoftmaxFusionType


class TransformerEngineBase(nn.Module):
    """Base of modules that quantise: ``generate_quantizer_set`` makes the state of a product.
    Casts within ``__call__`` take their random keys from the module's rng collections."""

    def __init_subclass__(cls, **options: Any) -> None:
        if "__call__" in vars(cls):
            cls.__call__ = draws_keys(vars(cls)["__call__"])  # type: ignore[method-assign]
        super().__init_subclass__(**options)

    def generate_quantizer_set(
        self,
        postfix: str = "",
        variable_collection: str | None = None,
        quantization_checkpoint_name: str | None = None,
        fp8_recipe: Recipe | None = None,
        n_groups: int | None = None,
    ) -> QuantizerSet:
        """Returns the QuantizerSet of a product, by ``fp8_recipe`` or the autocast in force; with delayed
        scaling its state is in ``variable_collection``, None: ``FP8_COLLECTION_NAME``, under names that end
        in ``postfix``. ``quantization_checkpoint_name``: see ``QuantizerSet``'s ``kept_as``; ``n_groups`` is
        not read: groups come with their sizes."""
        recipe = None if fp8_recipe is None else fp8_recipe.fixed
        return quantizer_set(self, postfix, recipe, variable_collection, quantization_checkpoint_name)


class _AlsoOwn(type):
    """Of a class to whose instances those of this frontend's own class count, as layers make their parts:
    the two differ in defaults alone."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or type(instance) is vars(cls).get("_own")


class LayerNormDenseGeneral(dense.LayerNormDenseGeneral, metaclass=_AlsoOwn):
    __doc__ = dense.LayerNormDenseGeneral.__doc__

    _own = dense.LayerNormDenseGeneral
    return_layernorm_output: bool = True


class LayerNormMLP(dense.LayerNormMLP, metaclass=_AlsoOwn):
    __doc__ = dense.LayerNormMLP.__doc__

    _own = dense.LayerNormMLP
    return_layernorm_output: bool = True


def wrap_function_in_te_state_module(
    f: Callable[..., Any],
    quantization_recipe: Recipe | None,
    name: str | None = None,
    quantization_checkpoint_name: str | None = None,
) -> Any:
    """Returns a module class that calls ``f(generate_quantizer_set, *args, **kwargs)`` and holds what state
    the sets have; ``quantization_recipe`` None: sets of the autocast in force."""
    _want_recipe("wrap_function_in_te_state_module", quantization_recipe)

    class Wrapper(TransformerEngineBase):
        """A function with the state of its products."""

        def generate_quantizer_set(self, postfix: str = "", **options: Any) -> QuantizerSet:
            """Returns the set of one product of the function."""
            own = {
                "quantization_checkpoint_name": quantization_checkpoint_name,
                "fp8_recipe": quantization_recipe,
            }
            return super().generate_quantizer_set(postfix, **own | options)

        @nn.compact
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return f(self.generate_quantizer_set, *args, **kwargs)

    Wrapper.__name__ = Wrapper.__qualname__ = f"TEWrapper_{name or getattr(f, '__name__', 'function')}"
    return Wrapper


def make_dot_general_cls(quantization_recipe: Recipe | None) -> Any:
    """``fp8kit_jax.flax.make_dot_general_cls``."""
    return dot_general.make_dot_general_cls(quantization_recipe)


def make_grouped_dense_cls(
    quantization_recipe: Recipe | None, quantization_checkpoint_name: str | None = None
) -> Any:
    """Returns a module that calls ``grouped_dense(inputs, kernel, group_sizes)``, inputs (..., M, K) as rows
    one after the other."""

    def grouped_dense(
        generate_quantizer_set: Any, inputs: Any, kernel: Any, group_sizes: Any, **more: Any
    ) -> Any:
        inputs = as_array("grouped_dense", "inputs", inputs)
        if inputs.ndim < 2:
            raise ShapeError("grouped_dense", "inputs", f"shape {inputs.shape}", "(..., rows, features)")
        rows = inputs.reshape(-1, inputs.shape[-1])
        y = grouped.grouped_dense(rows, kernel, group_sizes, quantizer_set=generate_quantizer_set(), **more)
        return y.reshape(*inputs.shape[:-1], y.shape[-1])

    kind = wrap_function_in_te_state_module(
        grouped_dense, quantization_recipe, "grouped_dense", quantization_checkpoint_name
    )
    return kind()


class Softmax(nn.Module):
    """softmax(scale_factor * (inputs + bias)) of scores (b, heads, s_q, s_kv), masked by ``mask`` (not 0
    masks out) or, SCALED_UPPER_TRIANG_MASKED, above the diagonal. ``softmax_type``: OFF_BY_ONE adds 1 to the
    sum of exponentials, LEARNABLE exp(``softmax_offset``), (heads,) or (1, heads, 1, 1)."""

    scale_factor: float = 1.0
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED
    softmax_type: AttnSoftmaxType = AttnSoftmaxType.VANILLA_SOFTMAX

    @nn.compact
    def __call__(self, inputs: Any, mask: Any = None, bias: Any = None, softmax_offset: Any = None) -> Any:
        """Returns h like ``inputs``."""
        scores = as_array("Softmax", "inputs", inputs)
        if scores.ndim != 4:
            raise ShapeError("Softmax", "inputs", f"shape {scores.shape}", "(batch, heads, queries, keys)")
        if bias is not None:
            scores = scores + as_array("Softmax", "bias", bias).astype(scores.dtype)
        if self.softmax_fusion_type is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED:
            mask = ~jnp.tri(*scores.shape[-2:], dtype=bool)
        if self.softmax_type is AttnSoftmaxType.VANILLA_SOFTMAX:
            return functional.softmax(scores, mask, self.scale_factor)
        offset = jnp.zeros(scores.shape[1]) if softmax_offset is None else softmax_offset
        column = jnp.asarray(offset, jnp.float32).reshape(1, -1, 1, 1)
        scaled = scores.astype(jnp.float32) * self.scale_factor
        whole = jnp.concatenate([scaled, jnp.broadcast_to(column, (*scores.shape[:-1], 1))], -1)
        if mask is not None:
            hidden = jnp.broadcast_to(as_array("Softmax", "mask", mask) != 0, scores.shape)
            mask = jnp.concatenate([hidden, jnp.zeros_like(hidden[..., :1])], -1)
        return functional.softmax(whole, mask)[..., :-1].astype(scores.dtype)


def _want_recipe(operation: str, recipe: Any) -> None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError(operation, "quantization_recipe", repr(recipe), WANTED)
