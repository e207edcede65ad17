"""``LayerNormLinear``: y = norm(x) W^T + b in one operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8kit.arguments import flag, number
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor
from fp8kit.nn.fp8 import Inputs, amax_of
from fp8kit.nn.later import CONSTRUCTOR, later, not_yet
from fp8kit.nn.linear import LinearBase
from fp8kit.nn.module import as_tensor, positive, resolve
from fp8kit.nn.norm import norm_parameters
from fp8kit.nn.random import Init
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear
from fp8kit.ops.product import ProductSpec


class LayerNormLinear(LinearBase):
    """y = norm(x) W^T + b; under ``autocast`` the normalisation writes FP8 itself.

    ``normalization``: "LayerNorm" or "RMSNorm"; ``eps``, ``zero_centered_gamma`` as there.
    ``return_layernorm_output``: also return norm(x). Other arguments, shapes, dtypes and errors as
    ``Linear``. Parameters ``layer_norm_weight``, ``layer_norm_bias`` (K,), ``weight`` (N, K), ``bias`` (N,)
    or their ``parameters_split`` names.
    """

    operation = norm_linear
    calibration_options = {"return_norm": True}  # noqa: RUF012

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: Any = None,
        return_layernorm_output: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        name: str | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        later("LayerNormLinear", CONSTRUCTOR["LayerNormLinear"], other)
        positive("LayerNormLinear", in_features=in_features)
        dtype, where = resolve("LayerNormLinear", params_dtype, device)
        op = "LayerNormLinear"
        zero_centered = flag(op, "zero_centered_gamma", zero_centered_gamma)
        self._norm = NormSpec(int(in_features), normalization, number(op, "eps", eps), zero_centered)
        self.return_layernorm_output = flag(op, "return_layernorm_output", return_layernorm_output)
        self.layer_norm_weight, self.layer_norm_bias = norm_parameters(self._norm, dtype, where)
        self._make_parameters(
            in_features, out_features, bias, return_bias, parameters_split, init_method, dtype, where, name
        )

    def make_spec(self, products: list[ProductSpec], **options: Any) -> NormLinearSpec:
        return NormLinearSpec(self._norm, products[0], **options)

    def calibrate(self, inputs: Inputs, outputs: Mapping[str, Tensor], amaxes: list[ArrayView]) -> None:
        amax_of(outputs["normed"].view, amaxes[0])
        for weight in self.weight_inputs().values():
            amax_of(weight.view, amaxes[1])

    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """``inp``: h (..., K). Returns y, h (..., N), or a tuple (y, bias where ``return_bias``, norm(x)
        where ``return_layernorm_output``)."""
        not_yet("LayerNormLinear", {"fp8_output": (fp8_output, False), "fp8_grad": (fp8_grad, False)})
        x = as_tensor("LayerNormLinear", "inp", inp)
        out = self.branch(x, is_first_microbatch, self.bias_mode, return_norm=self.return_layernorm_output)
        parts: list[Any] = [out["y"]]
        if self.return_bias:
            parts.append(self.bias if self.use_bias else None)  # type: ignore[attr-defined]
        if self.return_layernorm_output:
            parts.append(out["normed"])
        return tuple(parts) if len(parts) > 1 else parts[0]

    def branch(
        self,
        x: Tensor,
        is_first_microbatch: bool | None,
        bias: str,
        residual: bool = False,
        return_norm: bool = False,
    ) -> dict[str, Tensor]:
        """For ``x`` as in ``forward``: outputs "y", and "residual" (x, its gradient summed in backward) and
        "normed" where asked for."""
        inputs: Inputs = {
            "x": x,
            "norm_weight": self.layer_norm_weight,
            "norm_bias": self.layer_norm_bias,
            **self.product_inputs(bias),
        }
        return self.run(inputs, is_first_microbatch, bias, residual=residual, return_norm=return_norm)
