"""``LayerNorm``, ``DenseGeneral``, ``LayerNormDenseGeneral``, ``LayerNormMLP`` as NNX modules, and their FP8
state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from fp8kit.arguments import check, shown
from fp8kit.errors import ArgumentError, RecipeError
from fp8kit_jax import functional, layers
from fp8kit_jax.activations import activation_of
from fp8kit_jax.arguments import as_array
from fp8kit_jax.checks import RULES
from fp8kit_jax.quantizers import QuantizerSet
from fp8kit_jax.scopes import history_of, recipe_in_force
from fp8kit_jax.state import Slot


class Fp8Meta(nnx.Variable):
    """One array of a slot: its scale, or its amax history."""


def update_fp8(module: nnx.Module, grads: Any) -> None:
    """Put the next state, which came as the gradient of ``Fp8Meta`` variables, into the module."""
    nnx.update(module, nnx.filter_state(grads, Fp8Meta))


class _Quantizers(nnx.Module):
    """The slots of one product, where the recipe in force keeps state."""

    def __init__(self) -> None:
        history = history_of(recipe_in_force())
        self.stateful = history is not None
        if history is not None:
            for name in ("x", "kernel", "grad"):
                for field, value in Slot.fresh(history.length)._asdict().items():
                    setattr(self, f"{name}_{field}", Fp8Meta(value))

    def __call__(self) -> QuantizerSet:
        recipe = recipe_in_force()
        if history_of(recipe) is None:
            return QuantizerSet(recipe=recipe)
        if not self.stateful:
            wanted = "one made within an autocast with DelayedScaling"
            raise RecipeError("fp8kit_jax.nnx", "Fp8Meta", "none of this module", wanted)
        slots = (
            Slot(getattr(self, f"{name}_scale")[...], getattr(self, f"{name}_amax_history")[...])
            for name in ("x", "kernel", "grad")
        )
        return QuantizerSet(*slots, recipe)


def want_rngs(operation: str, rngs: Any, stream: str = "params") -> None:
    """ArgumentError for what is no ``nnx.Rngs``, or has neither this stream nor a default one."""
    if not isinstance(rngs, nnx.Rngs) or not hasattr(rngs, stream):
        got = f"one of {', '.join(rngs)}" if isinstance(rngs, nnx.Rngs) else shown(rngs)
        raise ArgumentError(operation, "rngs", got, f"nnx.Rngs with a stream {stream!r}, or a default one")


def _kernel(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any, init: Any) -> nnx.Param:
    init = init or nnx.initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=tuple(range(1, len(shape)))
    )
    return nnx.Param(init(rngs.params(), shape, dtype))


class LayerNorm(nnx.Module):
    """norm(x) over the last dimension, N features. Parameters ``scale`` and, of "layernorm", ``ln_bias``
    (N,). x: h (..., N)."""

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        layernorm_type: str = "layernorm",
        zero_centered_gamma: bool = False,
        dtype: Any = jnp.float32,
    ) -> None:
        check("LayerNorm", RULES, locals())
        self.options = (layernorm_type, zero_centered_gamma, epsilon)
        self.scale = nnx.Param((jnp.zeros if zero_centered_gamma else jnp.ones)((num_features,), dtype))
        self.ln_bias = nnx.Param(jnp.zeros((num_features,), dtype)) if layernorm_type == "layernorm" else None

    def parameters(self, dtype: Any) -> tuple[Any, Any]:
        """(gamma, beta) in ``dtype``, beta None of "rmsnorm"."""
        return self.scale[...].astype(dtype), None if self.ln_bias is None else self.ln_bias[...].astype(
            dtype
        )

    def __call__(self, x: Any) -> Any:
        """Normalise."""
        x = as_array("LayerNorm", "x", x)
        return functional.layernorm(x, *self.parameters(x.dtype), *self.options)


class DenseGeneral(nnx.Module):
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
        shape = (features,) if isinstance(features, int) else tuple(features)
        self.kernel = _kernel(rngs, (in_features, *shape), dtype, kernel_init)
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if use_bias else None
        self.quantizers = _Quantizers()

    def __call__(self, x: Any, *, return_bias: bool = False, residual: Any = None) -> Any:
        """``x``: h (..., K). Returns y, h (..., features), with ``return_bias`` a pair with the bias, which
        then is not added, or None. ``residual``: like y, added by the product, see ``fp8kit_jax.dense``; not
        with ``return_bias``."""
        x = as_array("DenseGeneral", "x", x)
        bias = None if self.bias is None else self.bias[...].astype(x.dtype)
        more = {"return_bias": return_bias, "residual": residual}
        return layers.dense(
            x, self.kernel[...].astype(x.dtype), bias, quantizer_set=self.quantizers(), **more
        )


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
        self.norm = LayerNorm(
            in_features,
            epsilon=epsilon,
            layernorm_type=layernorm_type,
            zero_centered_gamma=zero_centered_gamma,
            dtype=dtype,
        )

    def __call__(self, x: Any, *, return_residual: bool = False) -> Any:
        """``x``: h (..., K). Returns h (..., features), with ``return_residual`` a pair with x itself, for a
        residual connection to start at: see ``fp8kit_jax.layernorm_dense``."""
        x = as_array("LayerNormDenseGeneral", "x", x)
        bias = None if self.bias is None else self.bias[...].astype(x.dtype)
        options = (*self.norm.parameters(x.dtype), bias, *self.norm.options, self.quantizers())
        return layers.layernorm_dense(
            x, self.kernel[...].astype(x.dtype), *options, return_residual=return_residual
        )


class LayerNormMLP(nnx.Module):
    """y = act(norm(x) wi_kernel + wi_bias) wo_kernel + wo_bias in one operation, H features in and out,
    ``intermediate_dim`` F between.

    Parameters ``wi_kernel`` (H, a, F), ``wo_kernel`` (F, H), ``wi_bias`` (a, F), ``wo_bias`` (H,), a =
    len(activations); child ``norm``. ``activations``, ``activation_params``: as ``fp8kit_jax.activation``.
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
    ) -> None:
        check("LayerNormMLP", RULES, locals())
        activation_of("LayerNormMLP", activations, activation_params)
        want_rngs("LayerNormMLP", rngs)
        self.activations = tuple(activations)
        self.activation_params = None if activation_params is None else tuple(activation_params.items())
        self.norm = LayerNorm(
            num_features,
            epsilon=epsilon,
            layernorm_type=layernorm_type,
            zero_centered_gamma=zero_centered_gamma,
            dtype=dtype,
        )
        inner = (len(self.activations), intermediate_dim)
        self.wi_kernel = _kernel(rngs, (num_features, *inner), dtype, kernel_init)
        self.wo_kernel = _kernel(rngs, (intermediate_dim, num_features), dtype, kernel_init)
        self.wi_bias = nnx.Param(jnp.zeros(inner, dtype)) if use_bias else None
        self.wo_bias = nnx.Param(jnp.zeros((num_features,), dtype)) if use_bias else None
        self.quantizers_0, self.quantizers_1 = _Quantizers(), _Quantizers()

    def __call__(
        self, x: Any, *, return_residual: bool = False, return_bias: bool = False, join_residual: bool = False
    ) -> Any:
        """``x``: h (..., H). Returns alike, or a tuple with x, as ``LayerNormDenseGeneral``, and with
        ``return_bias`` wo_bias, which then is not added, or None. ``join_residual``: x is added to y, see
        ``fp8kit_jax.layernorm_mlp``; neither of the two then."""
        x = as_array("LayerNormMLP", "x", x)
        kernels = (self.wi_kernel[...].astype(x.dtype), self.wo_kernel[...].astype(x.dtype))
        biases = [None if b is None else b[...].astype(x.dtype) for b in (self.wi_bias, self.wo_bias)]
        sets = self.quantizers_0(), self.quantizers_1()
        options = (
            *self.norm.options,
            self.activations,
            sets,
            False,
            "io",
            dict(self.activation_params or ()),
        )
        more = {
            "return_residual": return_residual,
            "return_bias": return_bias,
            "join_residual": join_residual,
        }
        return layers.layernorm_mlp(x, *self.norm.parameters(x.dtype), kernels, biases, *options, **more)
