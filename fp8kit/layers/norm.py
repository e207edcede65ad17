"""``LayerNorm``, ``RMSNorm`` and ``L2Normalization`` alone, and the norm parameters that fused layers
share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from fp8kit.arguments import listed, shown
from fp8kit.arrays import Shape
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.layers.arguments import size
from fp8kit.layers.base import Layer
from fp8kit.layers.fields import SpecField
from fp8kit.ops.norm import NormSpec, norm

# inputs of an operation that begins with a norm -> the parameters of its layer
NORM_INPUTS = [("norm_weight", "layer_norm_weight"), ("norm_bias", "layer_norm_bias")]


def add_norm(
    layer: Layer,
    prefix: str,
    features: int,
    kind: str,
    arguments: SimpleNamespace,
    shape: Shape | None = None,
) -> NormSpec:
    """Parameters ``{prefix}weight`` and ``{prefix}bias`` as the constructor's ``arguments`` say, (features,)
    or of a ``shape`` of as many elements: gamma starts at ``gain``, 1 where there is no such argument (stored
    less 1 with zero_centered_gamma), beta at 0; RMSNorm has no bias. Returns the norm."""
    spec = NormSpec(features, kind, arguments.eps, arguments.zero_centered_gamma)
    dtype, device = arguments.params_dtype, arguments.device
    start = getattr(arguments, "gain", 1.0) - (1.0 if spec.zero_centered_gamma else 0.0)
    extents = (features,) if shape is None else shape
    layer.add_parameter(f"{prefix}weight", extents, start, dtype, device)
    if spec.centered:
        layer.add_parameter(f"{prefix}bias", extents, 0.0, dtype, device)
    else:
        layer.add_no_parameter(f"{prefix}bias")
    return spec


class Norm(Layer):
    """What ``LayerNorm`` and ``RMSNorm`` share."""

    layer_name: ClassVar[str]
    eps = SpecField("epsilon")
    zero_centered_gamma = SpecField("zero_centered_gamma")
    weight: Any
    bias: Any
    normalized_shape: Shape

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: Any = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        dtype: Any = None,
        sm_margin: Any = 0,
        gain: float = 1.0,
        learned: bool = True,
    ) -> None:
        super().__init__()
        operation, wanted = self.layer_name, "an int, or a sequence of ints"
        # of the two sizes one may be missing
        arguments = self.checked({**locals(), "hidden_size": 1})
        if params_dtype is not None and dtype is not None:
            raise ArgumentError(operation, "dtype", dtype, "None beside params_dtype, its other name")
        if (normalized_shape is None) == (hidden_size is None):
            both = "exactly one of normalized_shape and hidden_size"
            raise ArgumentError(operation, "normalized_shape", shown(normalized_shape), both)
        extent: Any = hidden_size if normalized_shape is None else normalized_shape
        if isinstance(extent, int | np.integer):
            shape = [extent]
        elif hasattr(extent, "shape"):
            raise ArgumentError(operation, "normalized_shape", shown(extent), wanted)
        else:
            shape = listed(operation, "normalized_shape", extent, wanted)
        if not shape:
            raise ArgumentError(operation, "normalized_shape", (), wanted)
        arguments.params_dtype = dtype if params_dtype is None else params_dtype
        self.normalized_shape = tuple([size(operation, "normalized_shape", each) for each in shape])
        features = size(operation, "normalized_shape", math.prod(self.normalized_shape))
        self.set_spec(add_norm(self, "", features, operation, arguments, self.normalized_shape))
        for name in self._spec.inputs() if arguments.sequence_parallel else ():
            self.mark_parameter(name.removeprefix("norm_"), None, True)
        if not arguments.learned:
            for name in self._spec.inputs():
                self.freeze(name.removeprefix("norm_"))

    def forward(self, inp: Any) -> Any:
        """``inp``: h (..., N), normalised over the last dimension, or over as many last dimensions as
        ``normalized_shape`` has. Returns the same shape and dtype. ShapeError for other last dimensions,
        FormatError for another dtype than the parameters'."""
        last = len(self.normalized_shape)
        x = self.as_input("inp", inp, self.normalized_shape[-1])
        weight, bias, shape = self.weight, self.bias, tuple(x.shape)
        if last > 1:
            if shape[-last:] != self.normalized_shape:
                wanted = f"last dimensions of {self.normalized_shape}"
                raise ShapeError(self.layer_name, "inp", f"shape {shape}", wanted)
            x = x.reshape(*shape[:-last], self._spec.features)
            weight, bias = (None if own is None else own.reshape(-1) for own in (weight, bias))
        inputs = self.autocast_inputs({"x": x, "norm_weight": weight, "norm_bias": bias})
        y = self.call(norm, self.own_spec(), inputs)["y"]
        return y.reshape(*shape) if last > 1 else y


class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016).

    ``normalized_shape`` or ``hidden_size``: N. ``zero_centered_gamma``: the factor is 1 + weight. Parameters
    ``weight``, ``bias`` (N,), in ``params_dtype`` or ``dtype``, two names of one argument. ``gain``: what the
    factor starts at; ``learned``: False keeps both parameters as they start. ``normalized_shape`` of several
    dimensions: these are normalised as one, and parameters have that shape. ``sequence_parallel``: marks
    the parameters in torch, whose gradients are of the rank's rows alone. ``sm_margin``: accepted, without
    effect. ArgumentError for both or neither of the sizes.
    """

    layer_name = "LayerNorm"


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019). Arguments as
    ``LayerNorm``; no bias."""

    layer_name = "RMSNorm"


class L2Normalization(Layer):
    """y = x / sqrt(sum of x^2 + eps) over the last dimension. No parameters.

    ``eps``: a number from 0 on. ``seq_length``, ``micro_batch_size``: accepted; they are hints for a warm-up
    that there is no need of here. x and y: h (..., N), of one dtype. ArgumentError for other arguments.
    """

    layer_name = "L2Normalization"
    eps: float

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        self.keep(self.checked(locals()), "eps")

    def forward(self, inp: Any) -> Any:
        """``inp``: h (..., N). Returns the same shape and dtype. ShapeError for no dimension, FormatError for
        another dtype."""
        x = self.as_input("inp", inp)
        if not x.shape:
            raise ShapeError("L2Normalization", "inp", "no dimension", "at least one")
        spec = self.spec_for("L2NormSpec", x.shape[-1], "L2Normalization", self.eps)
        return self.call(norm, spec, {"x": x})["y"]
