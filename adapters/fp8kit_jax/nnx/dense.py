"""``LayerNorm``, ``DenseGeneral``, ``LayerNormDenseGeneral``, ``LayerNormMLP`` as NNX modules, and their FP8
state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from fp8kit.arguments import NamedWell, check, shown
from fp8kit.errors import ArgumentError, RecipeError
from fp8kit_jax import functional, layers
from fp8kit_jax.activations import learned_of
from fp8kit_jax.arguments import as_array
from fp8kit_jax.checks import RULES
from fp8kit_jax.modules import NO_NORM, dims_of, fan_in
from fp8kit_jax.quantizers import QuantizerSet, from_variables, state_variables
from fp8kit_jax.scopes import goes_by_names, history_of, recipe_in_force


class Fp8Meta(nnx.Variable):
    """One array of a slot: its scale, or its amax history."""


def update_fp8(module: nnx.Module, grads: Any) -> None:
    """Put the next state, which came as the gradient of ``Fp8Meta`` variables, into the module."""
    nnx.update(module, nnx.filter_state(grads, Fp8Meta))


class _Quantizers(nnx.Module):
    """The slots of one product of a module of class ``kind``, where the recipe in force keeps state.
    ``layer``: the module's name, None before ``name_layers`` gave it one; ``ending``: of the product's.

    ``nnx.tabulate`` has jit call ``__call__`` and the public methods of all modules: what returns anything
    but arrays has a name that begins with "_"."""

    def __init__(self, kind: str, ending: str = "") -> None:
        self.kind, self.ending = kind, ending
        self.layer: str | None = None
        self.names: tuple[str, ...] = ()
        if not goes_by_names():
            self.make_slots()

    def make_slots(self) -> None:
        """Make those of the recipe in force, where there are none."""
        history = history_of(recipe_in_force(self.kind, self.layer))
        if history is None or self.names:
            return
        variables = state_variables(history)
        self.names = tuple(variables)
        for name, value in variables.items():
            setattr(self, name, Fp8Meta(value))

    def _in_force(self) -> QuantizerSet:
        """Returns the set of the recipe in force."""
        recipe = recipe_in_force(self.kind, self.layer)
        layer = "" if self.layer is None else f"{self.layer}{self.ending}"
        if history_of(recipe) is None:
            return QuantizerSet(recipe=recipe, layer=layer)
        if not self.names:
            wanted = "one made within an autocast with DelayedScaling"
            raise RecipeError("fp8kit_jax.nnx", "Fp8Meta", "none of this module", wanted)
        return from_variables(recipe, [getattr(self, name)[...] for name in self.names], layer)


def name_layers(model: Any) -> Any:
    """Give every layer of fp8kit within ``model``, an ``nnx.Module``, the name under which it is found there,
    its path joined by dots: what ``recipe.PerLayer`` and ``recipe.CustomRecipe`` go by. Returns the model.

    Call it within the ``autocast`` that the model is to run with: layers whose recipe there has state get the
    variables for it. ArgumentError if ``model`` is not an ``nnx.Module``.
    """
    if not isinstance(model, nnx.Module):
        raise ArgumentError("name_layers", "model", f"a {type(model).__name__}", "an nnx.Module")
    for path, module in list(nnx.iter_modules(model)):
        if isinstance(module, _Quantizers):
            module.layer = ".".join(map(str, path[:-1]))
            module.make_slots()
    return model


def want_rngs(operation: str, rngs: Any, stream: str = "params") -> None:
    """ArgumentError if it is not an ``nnx.Rngs``, or has neither this stream nor a default one."""
    if not isinstance(rngs, nnx.Rngs) or not hasattr(rngs, stream):
        got = f"one of {', '.join(rngs)}" if isinstance(rngs, nnx.Rngs) else shown(rngs)
        raise ArgumentError(operation, "rngs", got, f"nnx.Rngs with a stream {stream!r}, or a default one")


def norm_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a module's arguments by name, its ``locals()``, that its ``LayerNorm`` takes."""
    return {name: arguments[name] for name in ("epsilon", "layernorm_type", "zero_centered_gamma", "dtype")}


def _kernel(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any, init: Any) -> nnx.Param:
    init = init or fan_in(len(shape) - 1)
    return nnx.Param(init(rngs.params(), shape, dtype))


def _zeros(shape: tuple[int, ...], dtype: Any, wanted: Any) -> nnx.Param | None:
    return nnx.Param(jnp.zeros(shape, dtype)) if wanted else None


def _value(parameter: nnx.Param | None, dtype: Any) -> Any:
    """Returns a parameter's array in ``dtype``, None for None."""
    return None if parameter is None else parameter[...].astype(dtype)


class LayerNorm(NamedWell, nnx.Module):
    """norm(x) over the last dimension, N features. Parameters ``scale`` and, of "layernorm", ``ln_bias``
    (N,); ``gain``: what the factor starts at. x: h (..., N)."""

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        layernorm_type: str = "layernorm",
        zero_centered_gamma: bool = False,
        dtype: Any = jnp.float32,
        gain: float = 1.0,
    ) -> None:
        check("LayerNorm", RULES, locals())
        self.options = (layernorm_type, zero_centered_gamma, epsilon)
        self.scale = nnx.Param(jnp.full((num_features,), gain - bool(zero_centered_gamma), dtype))
        self.ln_bias = _zeros((num_features,), dtype, layernorm_type == "layernorm")

    def _arguments(self, dtype: Any) -> tuple[Any, ...]:
        """Returns the arguments of ``fp8kit_jax.layernorm`` after x, parameters in ``dtype``."""
        return _value(self.scale, dtype), _value(self.ln_bias, dtype), *self.options

    def __call__(self, x: Any) -> Any:
        """Normalise."""
        x = as_array("LayerNorm", "x", x)
        return functional.layernorm(x, *self._arguments(x.dtype))


class DenseGeneral(NamedWell, nnx.Module):
    """y = x kernel + bias over the last dimension, in FP8 under ``autocast``. Parameters ``kernel`` (K,
    features...) and ``bias``."""

    def __init__(
        self,
        in_features: int,
        features: int | Sequence[int],
        *,
        rngs: nnx.Rngs,
        use_bias: bool = True,
        kernel_init: Any = None,
        dtype: Any = jnp.float32,
    ) -> None:
        check("DenseGeneral", RULES, locals())
        want_rngs("DenseGeneral", rngs)
        shape = dims_of(features)
        self.kernel = _kernel(rngs, (in_features, *shape), dtype, kernel_init)
        self.bias = _zeros(shape, dtype, use_bias)
        self.quantizers = _Quantizers(type(self).__name__)

    def _arrays(self, dtype: Any) -> tuple[Any, Any]:
        return _value(self.kernel, dtype), _value(self.bias, dtype)

    def __call__(self, x: Any, *, return_bias: bool = False, residual: Any = None) -> Any:
        """``x``: h (..., K). Returns y, h (..., features), with ``return_bias`` a pair with the bias, which
        then is not added, or None. ``residual``: like y, added by the product, see ``fp8kit_jax.dense``; not
        with ``return_bias``."""
        x = as_array("DenseGeneral", "x", x)
        more = {"return_bias": return_bias, "residual": residual}
        return layers.dense(x, *self._arrays(x.dtype), quantizer_set=self.quantizers._in_force(), **more)


class LayerNormDenseGeneral(DenseGeneral):
    """y = norm(x) kernel + bias in one operation; the norm is the child ``norm``."""

    def __init__(
        self,
        in_features: int,
        features: int | Sequence[int],
        *,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        kernel_init: Any = None,
        epsilon: float = 1e-6,
        layernorm_type: str = "layernorm",
        zero_centered_gamma: bool = False,
        dtype: Any = jnp.float32,
    ) -> None:
        check("LayerNormDenseGeneral", RULES, locals())
        want_rngs("LayerNormDenseGeneral", rngs)
        super().__init__(
            in_features, features, rngs=rngs, use_bias=use_bias, kernel_init=kernel_init, dtype=dtype
        )
        self.norm = LayerNorm(in_features, **norm_options(locals()))

    def __call__(self, x: Any, *, return_residual: bool = False) -> Any:
        """``x``: h (..., K). Returns h (..., features), with ``return_residual`` a pair with x itself, for a
        residual connection to start at: see ``fp8kit_jax.layernorm_dense``."""
        x = as_array("LayerNormDenseGeneral", "x", x)
        (kernel, bias), (gamma, beta, *norm) = self._arrays(x.dtype), self.norm._arguments(x.dtype)
        return layers.layernorm_dense(
            x, kernel, gamma, beta, bias, *norm, self.quantizers._in_force(), return_residual=return_residual
        )


class LayerNormMLP(NamedWell, nnx.Module):
    """y = act(norm(x) wi_kernel + wi_bias) wo_kernel + wo_bias in one operation, H features in and out,
    ``intermediate_dim`` F between.

    Parameters ``wi_kernel`` (H, a, F), ``wo_kernel`` (F, H), ``wi_bias`` (a, F), ``wo_bias`` (H,), a =
    len(activations); child ``norm``, None without ``input_layernorm``. ``activations``,
    ``activation_params``: as ``fp8kit_jax.activation``; ("xielu",) adds ``alpha_p`` and ``alpha_n`` (1,).
    ``smooth_swiglu``: as ``fp8kit.nn.LayerNormMLP``.
    """

    def __init__(
        self,
        num_features: int,
        intermediate_dim: int,
        *,
        rngs: nnx.Rngs,
        activations: Sequence[str] = ("gelu",),
        use_bias: bool = False,
        kernel_init: Any = None,
        epsilon: float = 1e-6,
        layernorm_type: str = "layernorm",
        zero_centered_gamma: bool = False,
        dtype: Any = jnp.float32,
        activation_params: Mapping[str, float] | None = None,
        smooth_swiglu: str | None = None,
        input_layernorm: bool = True,
    ) -> None:
        check("LayerNormMLP", RULES, locals())
        learned = learned_of("LayerNormMLP", activations, activation_params)
        want_rngs("LayerNormMLP", rngs)
        self.activations = tuple(activations)
        self.activation_params = None if activation_params is None else tuple(activation_params.items())
        self.smooth_swiglu = smooth_swiglu
        self.norm = LayerNorm(num_features, **norm_options(locals())) if input_layernorm else None
        inner = (len(self.activations), intermediate_dim)
        self.wi_kernel = _kernel(rngs, (num_features, *inner), dtype, kernel_init)
        self.wo_kernel = _kernel(rngs, (intermediate_dim, num_features), dtype, kernel_init)
        self.wi_bias = _zeros(inner, dtype, use_bias)
        self.wo_bias = _zeros((num_features,), dtype, use_bias)
        self.learned = tuple(learned)
        for key, start in learned.items():
            setattr(self, key, nnx.Param(jnp.full((1,), start, dtype)))
        self.quantizers_0, self.quantizers_1 = (
            _Quantizers(type(self).__name__, ending) for ending in (".fc1", ".fc2")
        )

    def __call__(
        self, x: Any, *, return_residual: bool = False, return_bias: bool = False, join_residual: bool = False
    ) -> Any:
        """``x``: h (..., H). Returns alike, or a tuple with x, as ``LayerNormDenseGeneral``, and with
        ``return_bias`` wo_bias, which then is not added, or None. ``join_residual``: x is added to y, see
        ``fp8kit_jax.layernorm_mlp``; neither of the two then."""
        x = as_array("LayerNormMLP", "x", x)
        parameters = ((self.wi_kernel, self.wo_kernel), (self.wi_bias, self.wo_bias))
        kernels, biases = ([_value(p, x.dtype) for p in pair] for pair in parameters)
        gamma, beta, *norm = NO_NORM if self.norm is None else self.norm._arguments(x.dtype)
        alphas = [_value(getattr(self, key), x.dtype) for key in self.learned]
        return layers.layernorm_mlp(
            x,
            gamma,
            beta,
            kernels,
            biases,
            *norm,
            self.activations,
            (self.quantizers_0._in_force(), self.quantizers_1._in_force()),
            activation_params=dict(self.activation_params or ()) or None,
            return_residual=return_residual,
            return_bias=return_bias,
            join_residual=join_residual,
            smooth_swiglu=self.smooth_swiglu,
            alphas=alphas or None,
        )
