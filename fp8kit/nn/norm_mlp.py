"""``LayerNormMLP``: y = act(norm(x) W1^T + b1) W2^T + b2 in one operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8kit import arrays
from fp8kit.arguments import flag, number
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor
from fp8kit.backends import dispatch
from fp8kit.backends.activation import ACTIVATIONS
from fp8kit.formats import uint8
from fp8kit.nn.fp8 import Fp8Module, Inputs, amax_of
from fp8kit.nn.later import CONSTRUCTOR, later
from fp8kit.nn.module import Parameter, as_tensor, hints, make_parameter, positive, resolve
from fp8kit.nn.norm import norm_parameters
from fp8kit.nn.random import Init, init_of
from fp8kit.ops.activation import activation_numbers
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization


class LayerNormMLP(Fp8Module):
    """y = act(norm(x) W1^T + b1) W2^T + b2.

    * ``hidden_size`` H, ``ffn_hidden_size`` F. Parameters ``layer_norm_weight``, ``layer_norm_bias`` (H,),
      ``fc1_weight`` (F, H), ``fc1_bias`` (F,), ``fc2_weight`` (H, F), ``fc2_bias`` (H,); with a gated
      activation fc1 has 2 F rows: the gate's half first.
    * ``activation``: "gelu" (tanh form), "qgelu", "relu", "silu", "srelu"; gated: "geglu", "glu", "qgeglu",
      "reglu", "sreglu", "swiglu", "clamped_swiglu". Formulas: ``fp8kit.backends.activation``.
      ``activation_params``: of "clamped_swiglu", a mapping of "limit" (7.0), "alpha" (1.702),
      "glu_linear_offset" (1.0); None is the defaults.
    * ``init_method``, ``output_layer_init_method``: for fc1's and fc2's weight; None is normal(0, 0.023).
    * ``checkpoint``: of the activations only the input is kept for backward, which computes norm, fc1 and
      activation once more, but not fc2: the same bits, less memory.
    * ``return_bias``: fc2's bias is returned, not added. ``return_layernorm_output``: also return norm(x).
      Others as ``LayerNormLinear``.
    * ``seq_length``, ``micro_batch_size``: accepted; in Transformer Engine they are hints for a warm-up, and
      there is none here.
    """

    gemms = ("fc1_", "fc2_")
    operation = norm_mlp
    calibration_options = {"return_norm": True}  # noqa: RUF012

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        return_bias: bool = False,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        output_layer_init_method: Init | None = None,
        params_dtype: Any = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        name: str | None = None,
        checkpoint: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        op = "LayerNormMLP"
        later(op, CONSTRUCTOR[op], other)
        positive(op, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        hints(op, seq_length=seq_length, micro_batch_size=micro_batch_size)
        self._activation_numbers = activation_numbers(op, activation, activation_params)
        dtype, where = resolve(op, params_dtype, device)
        self.hidden_size, self.ffn_hidden_size, self.name = int(hidden_size), int(ffn_hidden_size), name
        self.activation, self.use_bias, self.checkpoint = (
            activation,
            flag(op, "bias", bias),
            flag(op, "checkpoint", checkpoint),
        )
        self.return_bias = flag(op, "return_bias", return_bias)
        self.return_layernorm_output = flag(op, "return_layernorm_output", return_layernorm_output)
        zero_centered = flag(op, "zero_centered_gamma", zero_centered_gamma)
        self._norm = NormSpec(self.hidden_size, normalization, number(op, "eps", eps), zero_centered)
        first, second = (
            init_of(op, "init_method", init_method),
            init_of(op, "output_layer_init_method", output_layer_init_method),
        )
        self.layer_norm_weight, self.layer_norm_bias = norm_parameters(self._norm, dtype, where)
        rows = ACTIVATIONS[activation].parts * self.ffn_hidden_size
        self.fc1_weight = make_parameter((rows, self.hidden_size), first, dtype, where)
        self.fc1_bias = make_parameter((rows,), 0.0, dtype, where) if self.use_bias else None
        self.fc2_weight = make_parameter((self.hidden_size, self.ffn_hidden_size), second, dtype, where)
        self.fc2_bias = make_parameter((self.hidden_size,), 0.0, dtype, where) if self.use_bias else None

    def weight_inputs(self) -> dict[str, Parameter]:
        return {"fc1_weight0": self.fc1_weight, "fc2_weight0": self.fc2_weight}

    def make_product(self, gemm: int, fp8: Quantization | None, cached: bool, bias: str) -> ProductSpec:
        if gemm == 0:
            first = "deferred" if self.use_bias else "none"
            rows = ACTIVATIONS[self.activation].parts * self.ffn_hidden_size
            return ProductSpec(
                self.hidden_size, (rows,), bias=first, fp8=fp8, weight_cached=cached, prefix="fc1_"
            )
        return ProductSpec(
            self.ffn_hidden_size, (self.hidden_size,), bias=bias, fp8=fp8, weight_cached=cached, prefix="fc2_"
        )

    def make_spec(self, products: list[ProductSpec], **options: Any) -> NormMLPSpec:
        return NormMLPSpec(
            self._norm,
            products[0],
            products[1],
            self.activation,
            activation_params=self._activation_numbers,
            **options,
        )

    def calibrate(self, inputs: Inputs, outputs: Mapping[str, Tensor], amaxes: list[ArrayView]) -> None:
        """norm(x) is an output; fc2's input is computed once more, its amax taken on the way."""
        normed = outputs["normed"].view.rows()
        w1, w2 = self.fc1_weight.view, self.fc2_weight.view
        for view, slot in ((normed, 0), (w1, 1), (w2, 4)):
            amax_of(view, amaxes[slot])
        device, rows = normed.device, normed.shape[0]
        kernels, stream = dispatch.kernels(device), arrays.current_stream(device)
        h = arrays.empty((rows, w1.shape[0]), normed.dtype, device)
        act = arrays.empty((rows, w2.shape[1]), normed.dtype, device)
        workspace = arrays.empty((max(kernels.gemm_workspace(), 1),), uint8, device)
        kernels.gemm(normed, w1, h, "nt", None, None, workspace, stream)
        bias = None if self.fc1_bias is None else self.fc1_bias.view
        kernels.act_fwd(h, bias, act, amaxes[3], None, self.activation, self._activation_numbers, stream)

    def forward(self, inp: Any, is_first_microbatch: bool | None = None) -> Any:
        """``inp``: h (..., H). Returns y, or a tuple (y, bias where ``return_bias``, norm(x) where
        ``return_layernorm_output``)."""
        bias = "add" if self.use_bias and not self.return_bias else "none"
        out = self.branch(
            as_tensor("LayerNormMLP", "inp", inp),
            is_first_microbatch,
            bias,
            return_norm=self.return_layernorm_output,
        )
        parts: list[Any] = [out["y"]]
        if self.return_bias:
            parts.append(self.fc2_bias)
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
        joins: bool = False,
    ) -> dict[str, Tensor]:
        """Outputs "y", x added to it where it ``joins``, and "residual" (x, its gradient summed in backward)
        and "normed" where asked for; ``bias``: fc2's."""
        inputs: Inputs = {
            "x": x,
            "norm_weight": self.layer_norm_weight,
            "norm_bias": self.layer_norm_bias,
            "fc1_weight0": self.fc1_weight,
            "fc1_bias0": self.fc1_bias,
            "fc2_weight0": self.fc2_weight,
            "fc2_bias0": None if bias == "none" else self.fc2_bias,
        }
        options = {
            "residual": residual,
            "return_norm": return_norm,
            "recompute": self.checkpoint,
            "joins": joins,
        }
        return self.run(inputs, is_first_microbatch, bias, **options)
