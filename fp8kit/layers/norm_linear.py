"""``LayerNormLinear``: y = norm(x) W^T + b in one operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8kit.errors import ArgumentError
from fp8kit.layers.base import Init, branch_of
from fp8kit.layers.fields import SpecField
from fp8kit.layers.linear import LinearBase
from fp8kit.layers.norm import NORM_INPUTS, add_norm
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear


class LayerNormLinear(LinearBase):
    """y = norm(x) W^T + b; under ``autocast`` the normalisation writes FP8 itself.

    ``normalization``: "LayerNorm" or "RMSNorm"; ``eps``, ``zero_centered_gamma`` as there.
    ``return_layernorm_output``: also return norm(x), the rows of all ranks with
    ``return_layernorm_output_gathered`` and ``sequence_parallel``. Other arguments, shapes, dtypes and
    errors as ``Linear``. Parameters ``layer_norm_weight``, ``layer_norm_bias`` (K,), ``weight`` (N, K),
    ``bias`` (N,) or their ``parameters_split`` names.
    """

    layer_name = "LayerNormLinear"
    eps = SpecField("norm", "epsilon")
    zero_centered_gamma = SpecField("norm", "zero_centered_gamma")
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
        params_dtype: Any = None,
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
        super().__init__()
        arguments = self.checked(locals())
        self.keep(arguments, "return_layernorm_output return_layernorm_output_gathered")
        norm = add_norm(self, "layer_norm_", arguments.in_features, normalization, arguments)
        self.set_spec(NormLinearSpec(norm, self.add_linear(arguments)))
        if self.modes.get("") == "row":
            wanted = "'column' or None: the norm is over all features"
            raise ArgumentError(self.layer_name, "parallel_mode", "'row'", wanted)
        self.mark_norm(norm)

    def calibrate(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[tuple[int, Any]]:
        return [(0, outputs["normed"]), *((1, inputs[name]) for name, _ in self._weight_names)]

    def options(self) -> dict[str, Any]:
        return {"residual": False, "return_norm": self.return_layernorm_output}

    def operands(self, x: Any, bias: str) -> dict[str, Any]:
        return {"x": x, **self.parameters_by(NORM_INPUTS), **super().operands(x, bias)}

    def compute(
        self,
        x: Any,
        is_first_microbatch: bool | None,
        bias: str | None = None,
        residual: bool = False,
        return_norm: bool = False,
    ) -> Any:
        """y, in a ``Branch`` where the residual stream or norm(x) was asked for; ``bias``: as ``Linear``."""
        bias = bias or self.bias_mode
        options = {"residual": residual, "return_norm": return_norm}
        found = self.run(self.operands(x, bias), is_first_microbatch, bias, **options)
        return branch_of(found) if residual or return_norm else found["y"]
