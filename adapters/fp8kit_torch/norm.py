"""``LayerNorm``, ``RMSNorm`` and ``L2Normalization`` in torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8kit import layers
from fp8kit_torch.arguments import as_parameter
from fp8kit_torch.distributed_weights import is_distributed, rows_in_parts
from fp8kit_torch.fusion import FusibleOperation
from fp8kit_torch.layer import TorchLayer
from fp8kit_torch.parameters import ParameterModule
from fp8kit_torch.torch_compat import own_parameters, set_own_parameters


class _Norm(layers.norm.Norm, ParameterModule):
    """With parameters that torch's ``SequenceParallel`` made DTensors, the norm of each rank's rows."""

    def forward(self, inp: Any) -> Any:
        """See ``fp8kit.layers.norm.Norm``; outside of ``torch.autocast`` an input of another dtype is cast to
        the parameters', as in Transformer Engine."""
        weight = self.weight
        if isinstance(inp, Tensor):
            inp = as_parameter(inp, weight)
        if not is_distributed(weight):
            return super().forward(inp)
        return rows_in_parts(self._of_rows, inp, weight, self.bias)

    def _of_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        whole = own_parameters(self)
        set_own_parameters(self, {**whole, "weight": weight, "bias": bias})
        try:
            return super().forward(x)  # type: ignore[no-any-return]
        finally:
            set_own_parameters(self, whole)


class LayerNorm(_Norm, layers.LayerNorm):
    __doc__ = layers.LayerNorm.__doc__


class RMSNorm(_Norm, layers.RMSNorm):
    __doc__ = layers.RMSNorm.__doc__


class L2Normalization(layers.L2Normalization, FusibleOperation, TorchLayer):
    __doc__ = layers.L2Normalization.__doc__
