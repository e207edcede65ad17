"""``LayerNorm`` and ``RMSNorm``, and the norm parameters that fused layers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import listed
from fp8kit.errors import ArgumentError, ShapeError, UnsupportedError
from fp8kit.execution.codec import encode
from fp8kit.ops.norm import NormSpec, norm
from fp8kit_torch.arguments import autocast_dtype, only, positive, want_input
from fp8kit_torch.call import apply
from fp8kit_torch.checks import CALLED, CONSTRUCTED, check
from fp8kit_torch.parameters import ParameterModule
from fp8kit_torch.reprs import described
from fp8kit_torch.specs import spec_for

# inputs of an operation that begins with a norm -> the parameters of its layer
NORM_INPUTS = [("norm_weight", "layer_norm_weight"), ("norm_bias", "layer_norm_bias")]


def add_norm(
    module: ParameterModule, prefix: str, spec: NormSpec, dtype: torch.dtype | None, device: Any
) -> None:
    """Parameters ``{prefix}weight`` and ``{prefix}bias``: gamma starts at 1 (stored as 0 with
    zero_centered_gamma), beta at 0; RMSNorm has no bias."""
    start = torch.nn.init.zeros_ if spec.zero_centered_gamma else torch.nn.init.ones_
    module.add_parameter(f"{prefix}weight", (spec.features,), start, dtype, device)
    if spec.centered:
        module.add_parameter(f"{prefix}bias", (spec.features,), torch.nn.init.zeros_, dtype, device)
    else:
        module.register_parameter(f"{prefix}bias", None)


class _Norm(ParameterModule):
    normalization = ""

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sm_margin: Any = 0,
    ) -> None:
        operation = type(self).__name__
        check(
            operation, CONSTRUCTED, {name: value for name, value in locals().items() if name != "hidden_size"}
        )
        super().__init__()
        parallel = None if sequence_parallel is False else sequence_parallel  # both say no
        only(operation, {"sequence_parallel": (parallel, None), "sm_margin": (sm_margin, 0)})
        if params_dtype is not None and dtype is not None:
            raise ArgumentError(operation, "dtype", dtype, "None beside params_dtype, its other name")
        if (normalized_shape is None) == (hidden_size is None):
            raise ArgumentError(
                operation, "normalized_shape", normalized_shape, "one of normalized_shape and hidden_size"
            )
        extent: Any = hidden_size if normalized_shape is None else normalized_shape
        whole = isinstance(extent, int)
        if isinstance(extent, torch.Tensor):
            raise ArgumentError(operation, "normalized_shape", "a tensor", "an int, or a sequence of one")
        shape = (
            (extent,)
            if whole
            else tuple(listed(operation, "normalized_shape", extent, "an int, or a sequence of one"))
        )
        if len(shape) != 1:
            raise UnsupportedError(
                operation, "normalized_shape", shape, "one dimension: nothing else is supported yet"
            )
        positive(operation, normalized_shape=shape[0])
        self._spec = NormSpec(shape[0], self.normalization, float(eps), bool(zero_centered_gamma))
        self._spec_text = encode(self._spec)
        add_norm(self, "", self._spec, dtype if params_dtype is None else params_dtype, device)

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: h (..., N), normalised over the last dimension. Returns the same shape and dtype."""
        x = want_input(type(self).__name__, "inp", inp, self._spec.features)
        weight, bias, dtype = self.weight, self.bias, autocast_dtype(x)
        if dtype is not None:
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        spec = self._spec_text if torch.compiler.is_compiling() else self._spec
        return apply(norm, spec, {"x": x, "norm_weight": weight, "norm_bias": bias})["y"]


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016).

    ``normalized_shape`` or ``hidden_size``: N. ``zero_centered_gamma``: the factor is 1 + weight. Parameters
    ``weight``, ``bias`` (N,), in ``params_dtype`` or ``dtype``, two names of one argument. ``sm_margin``: 0
    only.
    """

    normalization = "LayerNorm"


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019). Arguments as
    ``LayerNorm``; no bias."""

    normalization = "RMSNorm"


class L2Normalization(torch.nn.Module):
    """y = x / sqrt(sum of x^2 + eps) over the last dimension. No parameters.

    ``seq_length``, ``micro_batch_size``: accepted; they are hints for a warm-up that there is no need of
    here.
    """

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        check("L2Normalization", CONSTRUCTED, locals())
        super().__init__()
        self.eps = float(eps)

    def extra_repr(self) -> str:
        """Sizes, and what is not as usual (``reprs``)."""
        return described(self)

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: h (..., N). Returns the same shape and dtype. ShapeError for no dimension, FormatError for
        another dtype."""
        if not torch.compiler.is_compiling():
            check("L2Normalization", CALLED, locals())
        if not inp.ndim:
            raise ShapeError("L2Normalization", "inp", "no dimension", "at least one")
        return apply(norm, spec_for("L2NormSpec", inp.shape[-1], "L2Normalization", self.eps), {"x": inp})[
            "y"
        ]
