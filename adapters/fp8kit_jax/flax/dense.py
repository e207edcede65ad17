"""``DenseGeneral``, ``LayerNorm``, ``LayerNormDenseGeneral``, ``LayerNormMLP`` as Flax modules with
Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from fp8kit.arguments import NamedWell
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit_jax import functional
from fp8kit_jax import layers as functions
from fp8kit_jax.activations import activation
from fp8kit_jax.arguments import check_fused
from fp8kit_jax.flax.common import (
    alpha_parameters,
    bias_parameter,
    check_fields,
    constrained,
    constrains,
    draws_keys,
    kernel_parameter,
    norm_parameters,
    quantizer_set,
    want_array,
    want_fused,
)
from fp8kit_jax.flax.lora import adapted
from fp8kit_jax.modules import dims_of, dropped

Axes = tuple[Any, ...]


def _last_axis(module: Any) -> None:
    if module.axis not in (-1, (-1,)):
        raise ShapeError(
            type(module).__name__, "axis", module.axis, "-1: the norm is over the last dimension"
        )


def returned(module: Any, y: Any, *unadded: Any, normed: Any, residual: Any) -> tuple[Any, ...]:
    """What a module with a norm returns by its fields; ``unadded``: a bias that is not added, where it is
    asked for."""
    more = [residual] if module.return_residual else []
    return y, normed if module.return_layernorm_output else None, *more, *unadded


def _product(
    module: Any,
    x: Any,
    kernel: Any,
    bias: Any,
    quantizers: Any,
    axis: tuple[int, ...],
    residual: Any,
    prefix: str = "",
) -> tuple[Any, ...]:
    """(x kernel + bias + the adaptation + residual,), with the module's ``return_bias`` (y, bias)."""
    after = module.enable_low_rank_adaptation and residual is not None
    dims = (axis, tuple(range(len(axis))))
    added = None if after else residual
    y = functions.dense(x, kernel, bias, dims, quantizers, module.return_bias, residual=added)
    y, *unadded = y if module.return_bias else (y,)
    y = adapted(module, y, x, axis, kernel.shape[len(axis) :], prefix)
    return functional.dropout_add(y, residual) if after else y, *unadded


def _normed_product(
    module: Any, x: Any, kernel: Any, norm: Any, bias: Any, axes: Any, quantizers: Any, prefix: str = ""
) -> tuple[Any, Any, Any]:
    """norm(x) kernel + bias + the adaptation, norm(x) where it is asked for, x as the start of a residual
    connection. ``norm``: see ``norm_parameters``; ``axes``: logical axes of norm(x)."""
    gamma, beta, *how = norm
    residual, normed = x, None
    if gamma is None or constrains(axes):
        normed = constrained(x if gamma is None else functional.layernorm(x, *norm), axes)
        y = functions.dense(normed, kernel, bias, quantizer_set=quantizers)
    else:
        wanted = module.return_layernorm_output or module.enable_low_rank_adaptation
        y, *beside, residual = functions.layernorm_dense(
            x, kernel, gamma, beta, bias, *how, quantizers, wanted, return_residual=True
        )
        normed = beside[0] if wanted else None
    return adapted(module, y, normed, (x.ndim - 1,), kernel.shape[1:], prefix), normed, residual


class LayerNorm(NamedWell, nn.Module):
    """norm(x) over the last dimension. Parameters ``scale`` and, of "layernorm", ``ln_bias``, in ``dtype``;
    x: h (..., N), returned alike.

    Fields as Transformer Engine's: ``layernorm_type`` "layernorm" or "rmsnorm"; ``scale_init`` None: ones,
    zeros with ``zero_centered_gamma``; ``scale_axes``, ``bias_axes``: see ``DenseGeneral``.
    """

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ("embed",)
    bias_init: Any = nn.initializers.zeros
    bias_axes: Axes = ("embed",)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Normalise."""
        check_fields(self)
        x = want_array(self, "x", x)
        return functional.layernorm(x, *norm_parameters(self, x.shape[-1], x.dtype))


class DenseGeneral(NamedWell, nn.Module):
    """y = x kernel + bias, in FP8 under ``autocast``.

    * ``features``: int or several: the output's last dimensions. ``axis``: the input's dimensions that are
      summed over.
    * Parameters ``kernel`` (summed dimensions..., features...) and ``bias`` (features...), in ``dtype``, cast
      to x's dtype when used.
    * ``kernel_axes``, ``bias_axes``: logical axes of the parameters, which where there are some come in
      Flax's ``LogicallyPartitioned`` boxes (``flax.linen.unbox``); ``input_axes``: of the input.
    * ``enable_low_rank_adaptation``, ``low_rank_adaptation_dim``, ``low_rank_adaptation_alpha``: see
      ``lora.adapted``.
    * ``transpose_batch_sequence``: whether the sequence comes before the batch, which is the same here.
    * ``return_bias``: the bias is not added, and (y, bias or None) comes back: see ``fp8kit_jax.dense``.
    * ``residual`` of the call: added to y, by the product where there is no adaptation; not with
      ``return_bias``.
    * ``quantization_checkpoint_name``: what the product keeps for backward has that name for the policies of
      ``jax.checkpoint``.
    * Variables of the collection ``FP8_COLLECTION_NAME`` with delayed scaling. Fields of ``common.FIXED``
      have one value.
    """

    features: int | Sequence[int]
    kernel_init: Any = None
    kernel_axes: Axes = ()
    use_bias: bool = True
    bias_init: Any = nn.initializers.zeros
    bias_axes: Axes = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    input_axes: Axes = ()
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None
    return_bias: bool = False

    @nn.compact
    @draws_keys
    def __call__(self, inputs: Any, residual: Any = None) -> Any:
        """``inputs``: h (..., K); ``residual``: like y, or None. Returns y, h (..., features), with
        ``return_bias`` a pair."""
        check_fields(self)
        check_fused("DenseGeneral", residual is not None, "a residual", return_bias=self.return_bias)
        inputs = constrained(want_array(self, "inputs", inputs), self.input_axes)
        features = dims_of(self.features)
        along = dims_of(self.axis)
        if not all(-inputs.ndim <= d < inputs.ndim for d in along):
            raise ShapeError("DenseGeneral", "axis", self.axis, f"dimensions of inputs {inputs.shape}")
        axis = tuple(range(inputs.ndim)[d] for d in along)
        ins, kind = tuple(inputs.shape[d] for d in axis), inputs.dtype
        kernel = kernel_parameter(self, "kernel", ins, features, self.kernel_axes, kind)
        bias = bias_parameter(self, "bias", self.bias_axes, features, kind)
        y = _product(self, inputs, kernel, bias, quantizer_set(self), axis, residual)
        return y if self.return_bias else y[0]


class LayerNormDenseGeneral(NamedWell, nn.Module):
    """y = norm(x) kernel + bias in one operation; returns (y, norm(x) where ``return_layernorm_output``, else
    None), and with ``return_residual`` x itself as a third, for a residual connection to start at: see
    ``fp8kit_jax.layernorm_dense``.

    Parameters ``scale``, ``ln_bias``, ``kernel`` (K, features...), ``bias``. ``enable_layernorm=False``
    leaves the norm out; ``depth_scaling`` divides y. ``layernorm_input_axes``, ``dot_input_axes``: logical
    axes of x and of norm(x); where rules put those on the mesh, norm and product are two operations. The
    rest: as ``DenseGeneral``; ``axis`` is -1.
    """

    features: int | Sequence[int]
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Any = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Any = None
    kernel_axes: Axes = ()
    use_bias: bool = False
    bias_init: Any = nn.initializers.zeros
    bias_axes: Axes = ()
    return_layernorm_output: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_input_axes: Axes | None = None
    depth_scaling: float | None = None
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None
    return_residual: bool = False

    @nn.compact
    @draws_keys
    def __call__(self, inputs: Any) -> tuple[Any, ...]:
        """``inputs``: h (..., K)."""
        check_fields(self)
        _last_axis(self)
        inputs = constrained(want_array(self, "inputs", inputs), self.layernorm_input_axes)
        features, hidden, kind = dims_of(self.features), inputs.shape[-1], inputs.dtype
        norm = norm_parameters(self, hidden, kind)
        kernel = kernel_parameter(self, "kernel", (hidden,), features, self.kernel_axes, kind)
        bias = bias_parameter(self, "bias", self.bias_axes, features, kind)
        y, normed, residual = _normed_product(
            self, inputs, kernel, norm, bias, self.dot_input_axes, quantizer_set(self)
        )
        y = y if self.depth_scaling is None else y / jnp.asarray(self.depth_scaling, kind)
        return returned(self, y, normed=normed, residual=residual)


class LayerNormMLP(NamedWell, nn.Module):
    """y = act(norm(x) wi_kernel + wi_bias) wo_kernel + wo_bias; returns (y, norm(x) where
    ``return_layernorm_output``, else None), and with ``return_residual`` x itself, as
    ``LayerNormDenseGeneral``, and with ``return_bias`` wo_bias, which then is not added, or None.
    ``join_residual``: x is added to y, see ``fp8kit_jax.layernorm_mlp``; neither of the two then.

    Parameters ``scale``, ``ln_bias``, ``wi_kernel`` (H, a, F), ``wo_kernel`` (F, H), ``wi_bias`` (a, F),
    ``wo_bias`` (H,), with a = len(activations), which with ``activation_params`` are as in
    ``fp8kit_jax.activation``; ("xielu",) adds ``alpha_p`` and ``alpha_n`` (1,). ``smooth_swiglu``: "channel"
    or "token", see ``fp8kit.nn.LayerNormMLP``, where the module is one operation, or without norm.
    Adaptations' names begin with ``wi_`` and ``wo_``. One operation, but where dropout, adaptation,
    ``enable_layernorm=False`` or logical axes of what lies between make it several.
    ``intermediate_hidden_dropout_dims``: dimensions along which one draw serves all. y has the name
    ``ffn2_ckpt_name`` for ``jax.checkpoint``'s policies. The rest: as ``LayerNormDenseGeneral``.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Any = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Any = None
    kernel_axes_1: Axes = ("embed", "act", "mlp")
    kernel_axes_2: Axes = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Any = nn.initializers.zeros
    bias_axes_1: Axes = ("act", "mlp")
    bias_axes_2: Axes = ("embed",)
    return_layernorm_output: bool = False
    activations: Sequence[str] = ("gelu",)
    activation_params: Any = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_1_input_axes: Axes | None = None
    dot_2_input_axes: Axes | None = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None
    return_residual: bool = False
    return_bias: bool = False
    join_residual: bool = False
    smooth_swiglu: str | None = None

    @nn.compact
    @draws_keys
    def __call__(self, inputs: Any, deterministic: bool = False) -> tuple[Any, ...]:
        """``inputs``: h (..., H). ``deterministic`` leaves dropout out."""
        check_fields(self)
        want_fused(self, "join_residual", "return_residual", "return_bias")
        _last_axis(self)
        inputs = constrained(want_array(self, "inputs", inputs), self.layernorm_input_axes)
        hidden, kind, parts = inputs.shape[-1], inputs.dtype, tuple(self.activations)
        inner = (len(parts), self.intermediate_dim)
        norm = norm_parameters(self, hidden, kind)
        kernels = [
            kernel_parameter(self, "wi_kernel", (hidden,), inner, self.kernel_axes_1, kind),
            kernel_parameter(self, "wo_kernel", inner[1:], (hidden,), self.kernel_axes_2, kind),
        ]
        biases = [
            bias_parameter(self, "wi_bias", self.bias_axes_1, inner, kind),
            bias_parameter(self, "wo_bias", self.bias_axes_2, (hidden,), kind),
        ]
        sets = quantizer_set(self, "_0"), quantizer_set(self, "_1")
        rate = 0.0 if deterministic else self.intermediate_dropout_rate
        separate = rate or self.enable_low_rank_adaptation
        separate = separate or constrains(self.dot_1_input_axes) or constrains(self.dot_2_input_axes)
        smooth, alphas = self.smooth_swiglu, alpha_parameters(self, parts, kind)
        if smooth is not None and separate:
            wanted = "None with dropout between the products, adaptation, or axes of what lies between"
            raise ArgumentError("LayerNormMLP", "smooth_swiglu", repr(smooth), wanted)
        if not separate and (
            self.enable_layernorm or (not self.return_layernorm_output and (smooth or alphas))
        ):
            found = functions.layernorm_mlp(
                inputs,
                *norm[:2],
                kernels,
                biases,
                *norm[2:],
                parts,
                sets,
                self.return_layernorm_output,
                activation_params=self.activation_params,
                return_residual=not self.join_residual,
                return_bias=self.return_bias,
                join_residual=self.join_residual,
                smooth_swiglu=smooth,
                alphas=alphas or None,
            )
            y, *beside = found if isinstance(found, tuple) else (found,)
            normed = beside.pop(0) if self.return_layernorm_output else None
            residual, *unadded = beside or [None]
        else:
            h, normed, residual = _normed_product(
                self, inputs, kernels[0], norm, biases[0], self.dot_1_input_axes, sets[0], "wi_"
            )
            act = activation(h, parts, self.activation_params, alphas or None)
            if rate:
                key = self.make_rng(self.intermediate_dropout_rng_name)
                act = dropped(act, rate, key, tuple(self.intermediate_hidden_dropout_dims))
            act, added = constrained(act, self.dot_2_input_axes), residual if self.join_residual else None
            y, *unadded = _product(self, act, kernels[1], biases[1], sets[1], (act.ndim - 1,), added, "wo_")
        y = checkpoint_name(y, self.ffn2_ckpt_name)
        return returned(self, y, *unadded, normed=normed, residual=residual)
