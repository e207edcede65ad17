"""``LayerNormMLP``: y = act(norm(x) W1^T + b1) W2^T + b2 in one operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.layers.base import Branch, Init, branch_of
from fp8kit.layers.fp8_layer import FP8Layer
from fp8kit.layers.norm import NORM_INPUTS, add_norm
from fp8kit.ops.activation import activation_numbers
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec

_INPUTS = [(f"{name}0", name) for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")]


class LayerNormMLP(FP8Layer):
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
    * ``seq_length``, ``micro_batch_size``: accepted; in Transformer Engine they are hints for a warm-up, and
      there is none here.
    """

    layer_name = "LayerNormMLP"
    operation = norm_mlp
    gemms = ("fc1_", "fc2_")
    calibration_options = {"return_norm": True}  # noqa: RUF012
    fc1_weight: Any
    fc2_weight: Any
    fc2_bias: Any

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
        params_dtype: Any = None,
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
        self.check_constructor(locals())
        super().__init__()
        numbers = activation_numbers(self.layer_name, activation, activation_params)
        hidden, ffn, rows = int(hidden_size), int(ffn_hidden_size), ACTIVATIONS[activation].parts
        rows *= ffn
        self.hidden_size, self.ffn_hidden_size, self.name, self.activation = hidden, ffn, name, activation
        self.use_bias, self.return_bias, self.checkpoint = bool(bias), bool(return_bias), bool(checkpoint)
        self.return_layernorm_output = bool(return_layernorm_output)
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        norm = NormSpec(hidden, normalization, float(eps), bool(zero_centered_gamma))
        add_norm(self, "layer_norm_", norm, params_dtype, device)
        shapes = {"fc1": (rows, hidden), "fc2": (hidden, ffn)}
        for (prefix, shape), init in zip(
            shapes.items(), (init_method, output_layer_init_method), strict=True
        ):
            self.add_parameter(f"{prefix}_weight", shape, init, params_dtype, device)
            if self.use_bias:
                self.add_parameter(f"{prefix}_bias", shape[:1], 0.0, params_dtype, device)
            else:
                self.add_no_parameter(f"{prefix}_bias")
        fc1 = ProductSpec(hidden, (rows,), bias="deferred" if bias else "none", prefix="fc1_")
        fc2 = ProductSpec(ffn, (hidden,), bias="add" if bias else "none", prefix="fc2_")
        self.set_spec(NormMLPSpec(norm, fc1, fc2, activation, activation_params=numbers))

    def weight_inputs(self) -> dict[str, Any]:
        return {"fc1_weight0": self.fc1_weight, "fc2_weight0": self.fc2_weight}

    def calibrate(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """norm(x) is an output; fc2's input is computed once more, its amax taken on the way."""
        normed, weight = outputs["normed"], inputs["fc1_weight0"]
        amax = self.activated_amax(normed, weight, inputs.get("fc1_bias0"))
        return [(0, normed), (1, weight), (3, amax), (4, inputs["fc2_weight0"])]

    def forward(
        self, inp: Any, is_first_microbatch: bool | None = None, *, part: Mapping[str, Any] | None = None
    ) -> Any:
        """``inp``: h (..., H). Returns y, or a tuple (y, bias where ``return_bias``, norm(x) where
        ``return_layernorm_output``). ``part``: for the layer that this is a part of, see ``compute``."""
        # the layer that this is a part of calls, so that hooks run; it has checked what is checked here
        if part is not None:
            return self.compute(inp, is_first_microbatch, **part)
        x = self.as_input("inp", inp, self.hidden_size)
        self.check_options(is_first_microbatch)
        bias = "add" if self.use_bias and not self.return_bias else "none"
        out = self.compute(x, is_first_microbatch, bias, return_norm=self.return_layernorm_output)
        parts: list[Any] = [out.y]
        if self.return_bias:
            parts.append(self.fc2_bias)
        if self.return_layernorm_output:
            parts.append(out.normed)
        return tuple(parts) if len(parts) > 1 else parts[0]

    def compute(
        self,
        x: Any,
        is_first_microbatch: bool | None,
        bias: str,
        residual: bool = False,
        return_norm: bool = False,
        joins: bool = False,
    ) -> Branch:
        """y, x added to it where it ``joins``, and the residual stream and norm(x) where asked for; ``bias``:
        fc2's."""
        inputs = {"x": x, **self.parameters_by(NORM_INPUTS), **self.parameters_by(_INPUTS)}
        if bias == "none":
            inputs["fc2_bias0"] = None
        options = {"residual": residual, "return_norm": return_norm, "joins": joins}
        options["recompute"] = self.checkpoint
        return branch_of(self.run(inputs, is_first_microbatch, bias, **options))
