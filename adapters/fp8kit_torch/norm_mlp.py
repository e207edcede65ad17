"""``LayerNormMLP``: y = act(norm(x) W1^T + b1) W2^T + b2 in one operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.ops.activation import activation_numbers
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit_torch.arguments import CONSTRUCTOR, positive, refuse, want_input, want_plain
from fp8kit_torch.calibration import Amaxes, activated, amax_of
from fp8kit_torch.checks import CONSTRUCTED, check
from fp8kit_torch.module import Branch, Inputs, TransformerEngineBaseModule, branch_of
from fp8kit_torch.norm import NORM_INPUTS, add_norm
from fp8kit_torch.parameters import Init, normal_init

_INPUTS = [(f"{name}0", name) for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")]


class LayerNormMLP(TransformerEngineBaseModule):
    """y = act(norm(x) W1^T + b1) W2^T + b2.

    * ``hidden_size`` H, ``ffn_hidden_size`` F. Parameters ``layer_norm_weight``, ``layer_norm_bias`` (H,),
      ``fc1_weight`` (F, H), ``fc1_bias`` (F,), ``fc2_weight`` (H, F), ``fc2_bias`` (H,); with a gated
      activation fc1 has 2 F rows: the gate's half first.
    * ``activation``: "gelu" (tanh form), "qgelu", "relu", "silu", "srelu"; gated: "geglu", "glu", "qgeglu",
      "reglu", "sreglu", "swiglu", "clamped_swiglu". Formulas: ``fp8kit.backends.activation``.
      ``activation_params``: of "clamped_swiglu", a mapping of "limit" (7.0), "alpha" (1.702),
      "glu_linear_offset" (1.0); None is the defaults.
    * ``checkpoint``: of the activations only the input is kept for backward, which computes norm, fc1 and
      activation once more, but not fc2: the same bits, less memory.
    * ``init_method``, ``output_layer_init_method``: for fc1's and fc2's weight; None is normal(0, 0.023).
    * ``return_bias``: fc2's bias is returned, not added. ``return_layernorm_output``: also return norm(x).
      Others as ``LayerNormLinear``.
    """

    operation = norm_mlp
    gemms = ("fc1_", "fc2_")
    calibration_options = {"return_norm": True}  # noqa: RUF012

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        output_layer_init_method: Init | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        op = "LayerNormMLP"
        check(op, CONSTRUCTED, locals())
        super().__init__()
        # seq_length and micro_batch_size prepare kernels elsewhere: nothing depends on them here
        refuse(op, CONSTRUCTOR[op], locals())
        positive(op, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        numbers = activation_numbers(op, activation, activation_params)
        self.hidden_size, self.ffn_hidden_size, self.name, self.activation = (
            hidden_size,
            ffn_hidden_size,
            name,
            activation,
        )
        self.checkpoint = bool(checkpoint)
        self.use_bias, self.return_bias, self.return_layernorm_output = (
            bool(bias),
            bool(return_bias),
            bool(return_layernorm_output),
        )
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        norm = NormSpec(hidden_size, normalization, float(eps), bool(zero_centered_gamma))
        add_norm(self, "layer_norm_", norm, params_dtype, device)
        rows = ACTIVATIONS[activation].parts * ffn_hidden_size
        self.add_parameter(
            "fc1_weight", (rows, hidden_size), init_method or normal_init, params_dtype, device
        )
        if bias:
            self.add_parameter("fc1_bias", (rows,), torch.nn.init.zeros_, params_dtype, device)
        else:
            self.register_parameter("fc1_bias", None)
        self.add_parameter(
            "fc2_weight",
            (hidden_size, ffn_hidden_size),
            output_layer_init_method or normal_init,
            params_dtype,
            device,
        )
        if bias:
            self.add_parameter("fc2_bias", (hidden_size,), torch.nn.init.zeros_, params_dtype, device)
        else:
            self.register_parameter("fc2_bias", None)
        fc1 = ProductSpec(hidden_size, (rows,), bias="deferred" if bias else "none", prefix="fc1_")
        fc2 = ProductSpec(ffn_hidden_size, (hidden_size,), bias="add" if bias else "none", prefix="fc2_")
        self.set_spec(
            NormMLPSpec(norm, fc1, fc2, activation, activation_params=numbers, recompute=bool(checkpoint))
        )

    def weight_inputs(self) -> dict[str, Tensor]:
        return {"fc1_weight0": self.fc1_weight, "fc2_weight0": self.fc2_weight}

    def calibrate(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Amaxes:
        """norm(x) is an output; fc2's input is computed once more, its amax taken on the way."""
        seen = {0: outputs["normed"], 1: inputs["fc1_weight0"], 4: inputs["fc2_weight0"]}
        found = [(slot, amax_of(tensor)) for slot, tensor in seen.items()]
        return [
            *found,
            (
                3,
                activated(outputs["normed"], inputs["fc1_weight0"], inputs.get("fc1_bias0"), self._spec_text),
            ),
        ]

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, *, part: Mapping[str, Any] | None = None
    ) -> Any:
        """``inp``: h (..., H). Returns y, or a tuple (y, bias where ``return_bias``, norm(x) where
        ``return_layernorm_output``). ``part``: for the layer that this is a part of, see ``branch``."""
        # the layer that this is a part of calls, so that hooks run; it has asked for what is asked here
        if part is not None:
            return self.branch(inp, is_first_microbatch, **part)
        bias = "add" if self.use_bias and not self.return_bias else "none"
        x = want_input("LayerNormMLP", "inp", inp, self.hidden_size)
        want_plain("LayerNormMLP", is_first_microbatch)
        out = self.branch(x, is_first_microbatch, bias, return_norm=self.return_layernorm_output)
        parts: list[Any] = [out.y]
        if self.return_bias:
            parts.append(self.fc2_bias)
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
        joins: bool = False,
    ) -> Branch:
        """y, x added to it where it ``joins``, and the residual stream and norm(x) where asked for; ``bias``:
        fc2's."""
        inputs: Inputs = {"x": x, **self.inputs_of(NORM_INPUTS), **self.inputs_of(_INPUTS)}
        if bias == "none":
            inputs["fc2_bias0"] = None
        return branch_of(
            self.run(
                inputs, is_first_microbatch, bias, residual=residual, return_norm=return_norm, joins=joins
            )
        )
