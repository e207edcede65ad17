"""``LayerNormLinear``: y = norm(x) W^T + b in one operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear
from fp8kit_torch.arguments import CONSTRUCTOR, positive, refuse, want_input, want_plain
from fp8kit_torch.calibration import Amaxes, amaxes_of
from fp8kit_torch.checks import CONSTRUCTED, check
from fp8kit_torch.linear import LinearBase
from fp8kit_torch.module import Branch, Inputs, branch_of
from fp8kit_torch.norm import NORM_INPUTS, add_norm
from fp8kit_torch.parameters import Init


class LayerNormLinear(LinearBase):
    """y = norm(x) W^T + b; under ``autocast`` the normalisation writes FP8 itself.

    ``normalization``: "LayerNorm" or "RMSNorm"; ``eps``, ``zero_centered_gamma`` as there.
    ``return_layernorm_output``: also return norm(x). Other arguments as ``Linear``. Parameters
    ``layer_norm_weight``, ``layer_norm_bias`` (K,), ``weight`` (N, K), ``bias`` (N,) or their
    ``parameters_split`` names.
    """

    operation = norm_linear
    calibration_options = {"return_norm": True}  # noqa: RUF012

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        check("LayerNormLinear", CONSTRUCTED, locals())
        super().__init__()
        refuse("LayerNormLinear", CONSTRUCTOR["LayerNormLinear"], locals())
        positive("LayerNormLinear", in_features=in_features)
        norm = NormSpec(in_features, normalization, float(eps), bool(zero_centered_gamma))
        self.return_layernorm_output = bool(return_layernorm_output)
        add_norm(self, "layer_norm_", norm, params_dtype, device)
        product = self._make(
            in_features,
            out_features,
            bias,
            return_bias,
            parameters_split,
            init_method,
            params_dtype,
            device,
            fuse_wgrad_accumulation,
            name,
        )
        self.set_spec(NormLinearSpec(norm, product))

    def calibrate(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Amaxes:
        return amaxes_of(0, [outputs["normed"]]) + amaxes_of(
            1, [inputs[name] for name in self.weight_inputs()]
        )

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        part: Mapping[str, Any] | None = None,
    ) -> Any:
        """``inp``: h (..., K). Returns y, or a tuple (y, bias where ``return_bias``, norm(x) where
        ``return_layernorm_output``). ``fp8_output``, ``fp8_grad``: see ``Linear``. ``part``: for the layer
        that this is a part of, see ``branch``."""
        # the layer that this is a part of calls, so that hooks run; it has asked for what is asked here
        if part is not None:
            return self.branch(inp, is_first_microbatch, **part)
        x = want_input("LayerNormLinear", "inp", inp, self.in_features)
        want_plain("LayerNormLinear", is_first_microbatch, fp8_output, fp8_grad)
        out = self.branch(
            x, is_first_microbatch, self.bias_mode, False, self.return_layernorm_output, fp8_output, fp8_grad
        )
        parts: list[Any] = [out.y]
        if self.return_bias:
            parts.append(self.bias)
        if self.return_layernorm_output:
            parts.append(out.normed)
        return tuple(parts) if len(parts) > 1 else parts[0]

    def branch(
        self,
        x: Tensor,
        is_first_microbatch: bool | None,
        bias: str,
        residual: bool = False,
        return_norm: bool = False,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Branch:
        """y, and the residual stream and norm(x) where asked for."""
        inputs: Inputs = {"x": x, **self.inputs_of(NORM_INPUTS), **self.product_inputs(bias)}
        return branch_of(
            self.run(
                inputs,
                is_first_microbatch,
                bias,
                fp8_output,
                fp8_grad,
                residual=residual,
                return_norm=return_norm,
            )
        )
