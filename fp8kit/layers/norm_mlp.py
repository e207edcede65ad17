"""``LayerNormMLP``: y = act(norm(x) W1^T + b1) W2^T + b2 in one operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8kit.arguments import shown, without_unknown
from fp8kit.backends.activation import ALL
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.layers.base import Branch, Init, branch_of
from fp8kit.layers.fields import SpecField
from fp8kit.layers.norm import NORM_INPUTS, add_norm
from fp8kit.layers.parallel import ParallelLayer
from fp8kit.ops.activation import activation, activation_numbers
from fp8kit.ops.linear import linear
from fp8kit.ops.norm import NoNormSpec, norm
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.scale_lines import line_scales, scale_lines

_INPUTS = [(f"{name}0", name) for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")]


class LayerNormMLP(ParallelLayer):
    """y = act(norm(x) W1^T + b1) W2^T + b2.

    * ``hidden_size`` H, ``ffn_hidden_size`` F. Parameters ``layer_norm_weight``, ``layer_norm_bias`` (H,),
      ``fc1_weight`` (F, H), ``fc1_bias`` (F,), ``fc2_weight`` (H, F), ``fc2_bias`` (H,); with a gated
      activation fc1 has 2 F rows: the gate's half first.
    * ``activation``: "gelu" (tanh form), "qgelu", "relu", "silu", "srelu"; gated: "geglu", "glu", "qgeglu",
      "reglu", "sreglu", "swiglu", "clamped_swiglu"; and "xielu", which adds the learned parameters
      ``alpha_p`` and ``alpha_n`` (1,). Formulas: ``fp8kit.backends.activation``. ``activation_params``: of
      "clamped_swiglu", a mapping of "limit" (7.0), "alpha" (1.702), "glu_linear_offset" (1.0); of "xielu", of
      "beta" (0.5), "eps" (-1e-6); None is the defaults.
    * ``smooth_swiglu``: "channel" or "token", with a gated activation that has no limits: fc2's input is cast
      in parts of a hidden channel's, or a token's, largest size, so that outliers of one do not cost the
      others their precision (Smooth-SwiGLU; formulas: ``fp8kit.ops.smooth``). The layer is the same function;
      in high precision it has the same bits. By channel the second weight is cast in every microbatch,
      whatever ``is_first_microbatch`` says.
    * ``input_layernorm``: False leaves the norm out, and its parameters; no ``return_layernorm_output`` then.
    * ``checkpoint``: of the activations only the input is kept for backward, which computes norm, fc1 and
      activation once more, but not fc2: the same bits, less memory.
    * ``init_method``, ``output_layer_init_method``: for fc1's and fc2's weight; None is normal(0, 0.023).
    * ``set_parallel_mode``: of ``tp_group``'s ranks (``Linear``) each has a part of F: fc1 is split as
      "column", fc2 as "row"; a gated activation's two halves are split alike. Not with ``smooth_swiglu``.
    * ``return_bias``: fc2's bias is returned, not added. ``return_layernorm_output``: also return norm(x).
      Others as ``LayerNormLinear``.
    * ``seq_length``, ``micro_batch_size``: accepted; in Transformer Engine they are hints for a warm-up, and
      there is none here.
    """

    layer_name = "LayerNormMLP"
    activation = SpecField("activation")
    eps = SpecField("norm", "epsilon")
    zero_centered_gamma = SpecField("norm", "zero_centered_gamma")
    operation = norm_mlp
    gemms = ("fc1_", "fc2_")
    calibration_options = {"return_norm": True}  # noqa: RUF012
    hidden_size: int
    ffn_hidden_size: int
    checkpoint: bool
    smooth_swiglu: str | None
    input_layernorm: bool
    fc1_weight: Any
    fc2_weight: Any
    fc1_bias: Any
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
        *,
        smooth_swiglu: str | None = None,
        input_layernorm: bool = True,
    ) -> None:
        super().__init__()
        arguments = self.checked(locals())
        self.keep(
            arguments,
            """hidden_size ffn_hidden_size checkpoint return_bias return_layernorm_output
            fuse_wgrad_accumulation smooth_swiglu input_layernorm return_layernorm_output_gathered name""",
        )
        self.take_parallel(
            arguments, {"fc1_": "column", "fc2_": "row"} if arguments.set_parallel_mode else {}
        )
        numbers = activation_numbers(self.layer_name, activation, activation_params)
        split = self.splits_weights
        ffn = self.part_of(self.ffn_hidden_size, "ffn_hidden_size") if split else self.ffn_hidden_size
        hidden, self.use_bias = self.hidden_size, arguments.bias
        kind = ALL[activation]
        rows = kind.parts * ffn
        if self.smooth_swiglu is not None and not kind.linear:
            known = ", ".join(name for name, row in ALL.items() if row.linear)
            wanted = f"None with activation {activation!r}: {known} have it"
            raise ArgumentError(self.layer_name, "smooth_swiglu", repr(smooth_swiglu), wanted)
        if split and self.smooth_swiglu is not None:
            wanted = "None with tensor parallelism: ranks have parts of what is smoothed"
            raise UnsupportedError(self.layer_name, "smooth_swiglu", repr(smooth_swiglu), wanted)
        self.casts_weights_anew = self.smooth_swiglu == "channel"
        if self.input_layernorm:
            first = add_norm(self, "layer_norm_", hidden, normalization, arguments)
        elif self.return_layernorm_output:
            raise ArgumentError(
                self.layer_name, "return_layernorm_output", True, "input_layernorm=True beside it"
            )
        else:
            first = NoNormSpec(hidden)
            self.calibration_options = {}  # type: ignore[misc]
            for _, name in NORM_INPUTS:
                self.add_no_parameter(name)
        for prefix, shape, init in (
            ("fc1_", (rows, hidden), init_method),
            ("fc2_", (hidden, ffn), output_layer_init_method),
        ):
            self.add_parameter(f"{prefix}weight", shape, init, params_dtype, device)
            if self.use_bias:
                self.add_parameter(f"{prefix}bias", shape[:1], 0.0, params_dtype, device)
            else:
                self.add_no_parameter(f"{prefix}bias")
            if split:
                row = prefix == "fc2_"
                blocks = (1,) if row else (1,) * kind.parts  # of a gated activation each half is divided
                self.mark_parameter(f"{prefix}weight", int(row), False, blocks)
                if self.use_bias:
                    summed = row and self.sequence_parallel
                    self.mark_parameter(f"{prefix}bias", None if row else 0, summed, blocks)
        self.mark_norm(first)
        fc1 = ProductSpec(hidden, (rows,), bias="deferred" if bias else "none", prefix="fc1_")
        fc2 = ProductSpec(ffn, (hidden,), bias="add" if bias else "none", prefix="fc2_")
        for name, start in kind.learned.items():
            self.add_parameter(name, (1,), start, params_dtype, device)
        self._learned = [(name, name) for name in kind.learned]
        smooth = self.smooth_swiglu or ""
        self.set_spec(NormMLPSpec(first, fc1, fc2, activation, activation_params=numbers, smooth=smooth))

    def weight_inputs(self) -> dict[str, Any]:
        return {"fc1_weight0": self.fc1_weight, "fc2_weight0": self.fc2_weight}

    def calibrate(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """norm(x) is an output; fc2's input, and its weight by channel, are computed once more."""
        own: NormMLPSpec = self._spec
        weight, bias = inputs["fc1_weight0"], inputs.get("fc1_bias0")
        normed = outputs["normed"] if self.input_layernorm else inputs["x"]
        product = {"x": normed, "fc1_weight0": weight, "fc1_bias0": bias}
        h = self.call(linear, self.product_spec(0), product)["y"]
        kind = self.spec_for("ActivationSpec", own.activation, h.shape[-1], own.activation_params)
        numbers = {name: inputs[name] for name in own.learned}
        activated = self.call(activation, kind, {"x": h, "bias0": bias, **numbers})["y"]
        last = inputs["fc2_weight0"]
        if own.smooth:
            axis = int(own.smooth == "channel")
            scales = self._scales_of(h, bias, axis)
            activated = self._scaled(activated, scales, axis, True)
            last = self._scaled(last, scales, 1, False) if axis else last
        return [(0, normed), (1, weight), (3, activated), (4, last)]

    def channel_scales(self, inp: Any) -> Any:
        """Returns the powers of two that smoothing by channel would multiply fc2's columns by for this input,
        h (..., H): float32 NumPy (F,). For ``fold_channel_scales``, from a batch of calibration data."""
        self._want_linear("channel_scales")
        x = self.as_input("inp", inp, self.hidden_size)
        with self.no_grad():
            if self.input_layernorm:
                parameters = self.parameters_by(NORM_INPUTS)
                x = self.call(norm, self._spec.norm, {"x": x, **parameters})["y"]
            product = {"x": x, "fc1_weight0": self.fc1_weight, "fc1_bias0": self.fc1_bias}
            h = self.call(linear, self.product_spec(0), product)["y"]
            return self.host_array(self._scales_of(h, self.fc1_bias, 1))

    def fold_channel_scales(self, scales: Any) -> None:
        """Put scales of hidden channels, positive numbers (F,), into the weights: those of fc1's second half,
        and its bias, are divided by them, fc2's columns multiplied. The layer is the same function, to the
        last bit where they are powers of two; it then needs no ``smooth_swiglu`` on data like those that the
        scales are of. ArgumentError for other numbers."""
        self._want_linear("fold_channel_scales")
        given, ffn = np.asarray(scales, np.float32), self._spec.fc2.in_features
        if given.shape != (ffn,) or not (np.isfinite(given) & (given > 0)).all():
            wanted = f"positive numbers ({ffn},)"
            raise ArgumentError(f"{self.layer_name}.fold_channel_scales", "scales", shown(scales), wanted)
        for name in ("fc1_weight", "fc1_bias") if self.use_bias else ("fc1_weight",):
            values = self.read(name).copy()
            values[ffn:] /= given[:, None] if values.ndim > 1 else given
            self.write(name, values)
        self.write("fc2_weight", self.read("fc2_weight") * given)
        self._weights = None

    def _want_linear(self, method: str) -> None:
        kind = self._spec.activation
        if not ALL[kind].linear:
            raise ArgumentError(f"{self.layer_name}.{method}", "activation", repr(kind), "a gated one")

    def _scales_of(self, h: Any, bias: Any, axis: int) -> Any:
        """s of fc1's output without its bias: of tokens (0) or of channels (1)."""
        spec = self.spec_for("LineScalesSpec", h.shape[-1], axis, h.shape[-1] // 2, bool(axis))
        return self.call(line_scales, spec, {"x": h, "bias0": bias})["scales"]

    def _scaled(self, x: Any, scales: Any, axis: int, divide: bool) -> Any:
        """x times s, or divided by it."""
        spec = self.spec_for("ScaleLinesSpec", 1.0, 1.0, axis, divide)
        return self.call(scale_lines, spec, {"x": x, "scales": scales})["y"]

    @without_unknown
    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        *,
        part: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> Any:
        """``inp``: h (..., H). Returns y, or a tuple (y, bias where ``return_bias``, norm(x) where
        ``return_layernorm_output``). ``part``: for the layer that this is a part of, see ``compute``."""
        if unknown:
            self.refuse_names(unknown)
        # the layer that this is a part of calls, so that hooks run; it has checked what is checked here
        if part is not None:
            return self.compute(inp, is_first_microbatch, **part)
        x = self.as_input("inp", inp, self.hidden_size)
        self.check_options(is_first_microbatch)
        bias = "add" if self.use_bias and not self.return_bias else "none"
        found = self.compute(x, is_first_microbatch, bias, return_norm=self.return_layernorm_output)
        out = found if isinstance(found, Branch) else Branch(found)
        return self.returned(out.y, "fc2_bias", out.normed)

    def compute(
        self,
        x: Any,
        is_first_microbatch: bool | None,
        bias: str | None = None,
        residual: bool = False,
        return_norm: bool = False,
        fused_residual: bool = False,
    ) -> Any:
        """y, x added to it where it is the ``fused_residual``, in a ``Branch`` where the residual stream or
        norm(x) was asked for; ``bias``: fc2's, added where it is None."""
        bias = bias or ("add" if self.use_bias else "none")
        names = [*NORM_INPUTS, *_INPUTS, *self._learned]
        inputs = {"x": x, **self.parameters_by(names)}
        if bias == "none":
            inputs["fc2_bias0"] = None
        options = {"residual": residual, "return_norm": return_norm, "fused_residual": fused_residual}
        options["recompute"] = self.checkpoint
        found = self.run(inputs, is_first_microbatch, bias, **options)
        return branch_of(found) if residual or return_norm else found["y"]
