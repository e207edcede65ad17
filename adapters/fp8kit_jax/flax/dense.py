"""``DenseGeneral``, ``LayerNorm``, ``LayerNormDenseGeneral``, ``LayerNormMLP`` as Flax modules with Transformer Engine's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fp8kit_jax import layers as functions
from fp8kit_jax import small
from fp8kit_jax.activations import activation
from fp8kit_jax.flax.common import check_fixed, constrained, fan_in, norm_parameters, partitioned, quantizer_set

Axes = tuple[Any, ...]


def _features(features: int | Sequence[int]) -> tuple[int, ...]:
    return (features,) if isinstance(features, int) else tuple(features)


class LayerNorm(nn.Module):
    """norm(x) over the last dimension. Parameters ``scale`` and, of "layernorm", ``ln_bias``, in ``dtype``; x: h (..., N), returned alike.

    Fields as Transformer Engine's: ``layernorm_type`` "layernorm" or "rmsnorm"; ``scale_init`` None: ones, zeros with
    ``zero_centered_gamma``.
    """

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ()
    bias_init: Any = nn.initializers.zeros
    bias_axes: Axes = ()
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Normalise."""
        scale, bias = norm_parameters(self, x.shape[-1], x.dtype)
        return small.layernorm(x, scale, bias, self.layernorm_type, self.zero_centered_gamma, self.epsilon)


class DenseGeneral(nn.Module):
    """y = x kernel + bias, in FP8 under ``autocast``.

    * ``features``: int or several: the output's last dimensions. ``axis``: the input's dimensions that are summed over.
    * Parameters ``kernel`` (summed dimensions..., features...) and ``bias`` (features...), in ``dtype``, cast to x's dtype when used.
    * ``kernel_axes``, ``bias_axes``: logical axes of the parameters (Flax's ``LogicallyPartitioned`` boxes); ``input_axes``: of the input.
    * Variables of the collection "fp8_metas" with delayed scaling. Fields of ``common.FIXED`` have one value.
    """

    features: int | Sequence[int]
    kernel_init: Any = None
    kernel_axes: Axes = ()
    use_bias: bool = True
    bias_init: Any = nn.initializers.zeros
    bias_axes: Axes = ()
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    input_axes: Axes = ()
    enable_low_rank_adaptation: bool = False
    quantization_checkpoint_name: str | None = None

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        """``inputs``: h (..., K). Returns h (..., features)."""
        check_fixed(self)
        inputs = constrained(inputs, self.input_axes)
        features = _features(self.features)
        axis = tuple(range(inputs.ndim)[d] for d in ((self.axis,) if isinstance(self.axis, int) else self.axis))
        flat = math.prod(inputs.shape[d] for d in axis)

        def start(key: Any, shape: Any, dtype: Any) -> Any:
            init = self.kernel_init or fan_in(len(features))
            return init(key, (flat, *features), dtype).reshape(shape)

        kernel = self.param("kernel", partitioned(start, self.kernel_axes), (*(inputs.shape[d] for d in axis), *features), self.dtype)
        bias = self.param("bias", partitioned(self.bias_init, self.bias_axes), features, self.dtype) if self.use_bias else None
        bias = None if bias is None else jnp.asarray(bias, inputs.dtype)
        dims = (axis, tuple(range(len(axis))))
        return functions.dense(inputs, jnp.asarray(kernel, inputs.dtype), bias, dims, quantizer_set(self))


class LayerNormDenseGeneral(nn.Module):
    """y = norm(x) kernel + bias in one operation; returns (y, norm(x) where ``return_layernorm_output``, else None).

    Parameters ``scale``, ``ln_bias``, ``kernel`` (K, features...), ``bias``. ``enable_layernorm=False`` leaves the norm out;
    ``depth_scaling`` divides y.
    """

    features: int | Sequence[int]
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ()
    ln_bias_init: Any = nn.initializers.zeros
    ln_bias_axes: Axes = ()
    kernel_init: Any = None
    kernel_axes: Axes = ()
    use_bias: bool = False
    bias_init: Any = nn.initializers.zeros
    bias_axes: Axes = ()
    return_layernorm_output: bool = False
    dtype: Any = jnp.float32
    depth_scaling: float | None = None
    layernorm_input_axes: Axes | None = None
    dot_input_axes: Axes | None = None
    enable_low_rank_adaptation: bool = False
    quantization_checkpoint_name: str | None = None

    @nn.compact
    def __call__(self, inputs: Any) -> tuple[Any, Any]:
        """``inputs``: h (..., K)."""
        check_fixed(self)
        inputs = constrained(inputs, self.layernorm_input_axes)
        features, kind = _features(self.features), inputs.dtype
        init = self.kernel_init or fan_in(len(features))
        scale, ln_bias = norm_parameters(self, inputs.shape[-1], kind) if self.enable_layernorm else (None, None)
        kernel = self.param("kernel", partitioned(init, self.kernel_axes), (inputs.shape[-1], *features), self.dtype)
        bias = self.param("bias", partitioned(self.bias_init, self.bias_axes), features, self.dtype) if self.use_bias else None
        kernel, bias = jnp.asarray(kernel, kind), None if bias is None else jnp.asarray(bias, kind)
        normed = None
        if self.enable_layernorm:
            options = (self.layernorm_type, self.zero_centered_gamma, self.epsilon, quantizer_set(self), self.return_layernorm_output)
            y = functions.layernorm_dense(inputs, kernel, scale, ln_bias, bias, *options)
            y, normed = y if self.return_layernorm_output else (y, None)
        else:
            y = functions.dense(inputs, kernel, bias, quantizer_set=quantizer_set(self))
            normed = inputs if self.return_layernorm_output else None
        return (y if self.depth_scaling is None else y / jnp.asarray(self.depth_scaling, kind)), normed


class LayerNormMLP(nn.Module):
    """y = act(norm(x) wi_kernel + wi_bias) wo_kernel + wo_bias; returns (y, norm(x) where ``return_layernorm_output``, else None).

    Parameters ``scale``, ``ln_bias``, ``wi_kernel`` (H, a, F), ``wo_kernel`` (F, H), ``wi_bias`` (a, F), ``wo_bias`` (H,), with
    a = len(activations), which with ``activation_params`` are as in ``fp8kit_jax.activation``. One operation, but where
    ``intermediate_dropout_rate`` or ``enable_layernorm=False`` takes it apart.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ()
    ln_bias_init: Any = nn.initializers.zeros
    ln_bias_axes: Axes = ()
    kernel_init: Any = None
    kernel_axes_1: Axes = ()
    kernel_axes_2: Axes = ()
    use_bias: bool = False
    bias_init: Any = nn.initializers.zeros
    bias_axes_1: Axes = ()
    bias_axes_2: Axes = ()
    return_layernorm_output: bool = False
    activations: Sequence[str] = ("gelu",)
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    dtype: Any = jnp.float32
    activation_params: Any = None
    layernorm_input_axes: Axes | None = None
    dot_1_input_axes: Axes | None = None
    dot_2_input_axes: Axes | None = None
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    quantization_checkpoint_name: str | None = None

    @nn.compact
    def __call__(self, inputs: Any, deterministic: bool = False) -> tuple[Any, Any]:
        """``inputs``: h (..., H). ``deterministic`` leaves dropout out."""
        check_fixed(self)
        inputs = constrained(inputs, self.layernorm_input_axes)
        hidden, wide, parts, kind = inputs.shape[-1], self.intermediate_dim, tuple(self.activations), inputs.dtype

        def parameter(name: str, init: Any, axes: Axes, *shape: int) -> Any:
            return jnp.asarray(self.param(name, partitioned(init, axes), shape, self.dtype), kind)

        scale, ln_bias = norm_parameters(self, hidden, kind) if self.enable_layernorm else (None, None)
        wi = parameter("wi_kernel", self.kernel_init or fan_in(2), self.kernel_axes_1, hidden, len(parts), wide)
        wo = parameter("wo_kernel", self.kernel_init or fan_in(1), self.kernel_axes_2, wide, hidden)
        bi = parameter("wi_bias", self.bias_init, self.bias_axes_1, len(parts), wide) if self.use_bias else None
        bo = parameter("wo_bias", self.bias_init, self.bias_axes_2, hidden) if self.use_bias else None
        sets = quantizer_set(self, "_0"), quantizer_set(self, "_1")
        norm = (self.layernorm_type, self.zero_centered_gamma, self.epsilon)
        rate = 0.0 if deterministic else self.intermediate_dropout_rate
        if self.enable_layernorm and not rate:
            options = (*norm, parts, sets, self.return_layernorm_output, "io", self.activation_params)
            y = functions.layernorm_mlp(inputs, scale, ln_bias, (wi, wo), (bi, bo), *options)
            return y if self.return_layernorm_output else (y, None)
        if self.enable_layernorm:
            first = functions.layernorm_dense(inputs, wi, scale, ln_bias, bi, *norm, sets[0], True)
        else:
            first = functions.dense(inputs, wi, bi, quantizer_set=sets[0]), inputs
        act = activation(first[0], parts, self.activation_params)
        if rate:
            act = small.dropout_add(act, rate=rate, key=self.make_rng(self.intermediate_dropout_rng_name))
        return functions.dense(act, wo, bo, quantizer_set=sets[1]), first[1] if self.return_layernorm_output else None


def joined(module: nn.Module, x: Any, residual: Any, rate: float, name: str, deterministic: bool, path: float, form: str) -> Any:
    """residual + dropout(x) with the module's generator ``name``; whole samples of dropout(x) dropped with probability ``path``."""
    rate, path = (0.0, 0.0) if deterministic else (rate, path)
    key: jax.Array | None = module.make_rng(name) if rate else None
    if not path:
        return small.dropout_add(x, residual, rate=rate, key=key)
    branch = small.dropout_add(x, rate=rate, key=key) if rate else x
    return small.drop_path(branch, residual, path, module.make_rng(name), form)
