"""``LayerNorm``, ``RMSNorm`` and ``L2Normalization`` alone, and the norm parameters that fused layers
share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fp8kit import arrays
from fp8kit.arguments import flag, number, shown
from fp8kit.arrays import Device
from fp8kit.autograd import apply
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.formats import DType
from fp8kit.nn.later import CONSTRUCTOR, later
from fp8kit.nn.module import Module, Parameter, as_tensor, hints, make_parameter, positive, resolve
from fp8kit.ops.norm import L2NormSpec, NormSpec, norm


def norm_parameters(spec: NormSpec, dtype: DType, where: Device) -> tuple[Parameter, Parameter | None]:
    """(weight, bias): gamma starts at 1 (stored as 0 with zero_centered_gamma), beta at 0; RMSNorm has
    none."""
    weight = make_parameter((spec.features,), 0.0 if spec.zero_centered_gamma else 1.0, dtype, where)
    return weight, make_parameter((spec.features,), 0.0, dtype, where) if spec.centered else None


class _Norm(Module):
    normalization = ""

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        params_dtype: Any = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
        **other: Any,
    ) -> None:
        operation = type(self).__name__
        later(operation, CONSTRUCTOR[self.normalization], other)
        if (normalized_shape is None) == (hidden_size is None):
            wanted = "exactly one of normalized_shape and hidden_size"
            raise ArgumentError(operation, "normalized_shape", shown(normalized_shape), wanted)
        sizes = hidden_size if normalized_shape is None else normalized_shape
        shape = arrays.as_sizes(sizes)  # type: ignore[arg-type]
        if len(shape) != 1:
            raise ArgumentError(
                operation, "normalized_shape", shape, "one dimension: nothing else is supported yet"
            )
        positive(operation, normalized_shape=shape[0])
        dtype, where = resolve(operation, params_dtype, device)
        zero_centered = flag(operation, "zero_centered_gamma", zero_centered_gamma)
        self._spec = NormSpec(shape[0], self.normalization, number(operation, "eps", eps), zero_centered)
        self.weight, self.bias = norm_parameters(self._spec, dtype, where)

    def forward(self, inp: Any) -> Any:
        """``inp``: h (..., N), normalised over the last dimension. Returns the same shape and dtype.
        ShapeError for another last dimension, FormatError for another dtype than the parameters'."""
        inputs = {
            "x": as_tensor(type(self).__name__, "inp", inp),
            "norm_weight": self.weight,
            "norm_bias": self.bias,
        }
        return apply(norm, self._spec, inputs, owner=self)["y"]


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016).

    ``normalized_shape`` or ``hidden_size``: N. ``zero_centered_gamma``: the factor is 1 + weight. Parameters
    ``weight``, ``bias`` (N,) of ``params_dtype``, float32 (None), bfloat16 or float16. Fp8kitError for both
    or neither of the sizes, or more than one dimension.
    """

    normalization = "LayerNorm"


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019). Arguments as
    ``LayerNorm``; no bias."""

    normalization = "RMSNorm"


class L2Normalization(Module):
    """y = x / sqrt(sum of x^2 + eps) over the last dimension. No parameters.

    ``eps``: a number from 0 on. ``seq_length``, ``micro_batch_size``: accepted; they are hints for a warm-up
    that there is no need of here. Fp8kitError for others.
    """

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        hints("L2Normalization", seq_length=seq_length, micro_batch_size=micro_batch_size)
        self.eps = number("L2Normalization", "eps", eps)

    def forward(self, inp: Any) -> Any:
        """``inp``: h (..., N). Returns the same shape and dtype. ShapeError for no dimension, FormatError for
        another dtype."""
        x = as_tensor("L2Normalization", "inp", inp)
        if not x.shape:
            raise ShapeError("L2Normalization", "inp", "no dimension", "at least one")
        return apply(norm, _l2_spec(x.shape[-1], self.eps), {"x": x}, owner=self)["y"]


@lru_cache(maxsize=64)
def _l2_spec(features: int, eps: float) -> L2NormSpec:
    """The same object for the same arguments: plans are found by a spec's identity."""
    return L2NormSpec(features, epsilon=eps)
