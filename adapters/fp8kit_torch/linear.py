"""``Linear``: y = x W^T + b."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import integer, listed, shown
from fp8kit.errors import ArgumentError
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec
from fp8kit_torch.arguments import CONSTRUCTOR, only, positive, refuse, want_input, want_plain
from fp8kit_torch.calibration import Amaxes, amaxes_of
from fp8kit_torch.checks import CONSTRUCTED, check
from fp8kit_torch.module import Inputs, TransformerEngineBaseModule
from fp8kit_torch.parameters import Init, normal_init


def split_sizes(operation: str, out_features: int, parameters_split: Any) -> dict[str, int]:
    """Prefix of parameter names -> output features: {"": out_features} for None, equal parts for a tuple of
    names, or a mapping.

    "query", "query_" both become "query_". Fp8kitError where the sizes do not add up.
    """
    if parameters_split is None:
        return {"": out_features}
    if isinstance(parameters_split, Mapping):
        sizes = dict(parameters_split)
    else:
        if isinstance(parameters_split, torch.Tensor):
            raise ArgumentError(operation, "parameters_split", "a tensor", "names, or names -> sizes")
        names = tuple(listed(operation, "parameters_split", parameters_split, "names, or names -> sizes"))
        sizes = {name: out_features // max(len(names), 1) for name in names}
    for name, size in sizes.items():
        if not isinstance(name, str):
            raise ArgumentError(
                operation, "parameters_split", shown(parameters_split), "names, or names -> sizes"
            )
        integer(operation, f"parameters_split[{name!r}]", size, 1)
    named = {f"{name.rstrip('_')}_": size for name, size in sizes.items()}
    if (
        not named
        or len(named) != len(sizes)
        or sum(named.values()) != out_features
        or min(named.values()) < 1
    ):
        wanted = f"different names whose sizes sum to {out_features}"
        raise ArgumentError(operation, "parameters_split", repr(parameters_split), wanted)
    return named


class LinearBase(TransformerEngineBaseModule):
    """Weights and biases in segments along the output dimension: what ``Linear`` and ``LayerNormLinear``
    share."""

    def _make(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        return_bias: bool,
        parameters_split: Any,
        init_method: Init | None,
        dtype: torch.dtype | None,
        device: Any,
        fuse: bool,
        name: str | None,
    ) -> ProductSpec:
        operation = type(self).__name__
        positive(operation, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.name = bool(bias), bool(return_bias), name
        self.apply_bias, self.fuse_wgrad_accumulation = self.use_bias and not self.return_bias, bool(fuse)
        self._split = split_sizes(operation, out_features, parameters_split)
        self._weight_names = [(f"weight{i}", f"{prefix}weight") for i, prefix in enumerate(self._split)]
        self._product_names = self._weight_names + [
            (f"bias{i}", f"{prefix}bias") for i, prefix in enumerate(self._split) if self.use_bias
        ]
        if self.return_bias and len(self._split) > 1:
            only(operation, {"return_bias": (True, False)})
        for prefix, size in self._split.items():
            self.add_parameter(
                f"{prefix}weight", (size, in_features), init_method or normal_init, dtype, device
            )
        for prefix, size in self._split.items():
            if self.use_bias:
                self.add_parameter(f"{prefix}bias", (size,), torch.nn.init.zeros_, dtype, device)
            else:
                self.register_parameter(f"{prefix}bias", None)
        return ProductSpec(in_features, tuple(self._split.values()), bias=self.bias_mode)

    def weight_inputs(self) -> dict[str, Tensor]:
        return self.inputs_of(self._weight_names)

    @property
    def bias_mode(self) -> str:
        """Whether the operation adds the bias: "add", or "none" where there is none or it is returned."""
        return "add" if self.apply_bias else "none"

    def product_inputs(self, bias: str) -> Inputs:
        """Weights, and biases where the operation takes them."""
        return self.inputs_of(self._weight_names if bias == "none" else self._product_names)


class Linear(LinearBase):
    """y = x W^T + b.

    * ``in_features``, ``out_features``: sizes K and N. Parameters ``weight`` (N, K) and ``bias`` (N,).
    * ``init_method``: fills a tensor in place; None is normal(0, 0.023). Biases start at 0.
    * ``bias``: whether there is one. ``return_bias``: return (y without bias, bias) instead.
    * ``params_dtype``: float32, bfloat16 or float16; None is torch's default dtype; inputs have the same,
      outside of ``torch.autocast``.
    * ``device``: None is torch's default device where one is set, else CUDA where it is usable, else the CPU;
      "meta" defers the start to ``reset_parameters``.
    * ``parameters_split``: names, or names -> sizes, of parameters that W is split into along N: "query"
      gives ``query_weight``.
    * ``fuse_wgrad_accumulation``: the weight's gradient goes into ``weight.main_grad``, see ``main_grad``.
    * ``name``: kept, for the user. Others: Transformer Engine's, at their defaults only
      (``fp8kit.layers.CONSTRUCTOR``).

    x: (..., K); y: (..., N) in x's dtype. Under ``autocast`` the three GEMMs run in FP8 (any sizes; multiples
    of 16 need no padding).
    """

    operation = linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        check("Linear", CONSTRUCTED, locals())
        super().__init__()
        refuse("Linear", CONSTRUCTOR["Linear"], locals())
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
        self.set_spec(LinearSpec(product))

    def calibrate(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Amaxes:
        return amaxes_of(0, [inputs["x"]]) + amaxes_of(1, [inputs[name] for name in self.weight_inputs()])

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        part: Mapping[str, Any] | None = None,
    ) -> Any:
        """``inp``: h (..., K). ``is_first_microbatch``: None casts the weight at each call; True casts and
        keeps it, False takes it, whatever the weight is by then.

        ``fp8_output``, where FP8 is on: y is a ``QuantizedTensor`` in the forward format, which the next
        ``Linear`` multiplies as it is; anything else sees its values. ``fp8_grad``: so is the gradient of
        ``inp``, in the backward format; a layer before this one casts its values for its own products. With
        delayed scaling their scales are the state's output and grad_input.

        Returns h (..., N), with ``return_bias`` also the bias. ``part``: for the layer that this is a part
        of, see ``branch``.
        """
        # the layer that this is a part of calls, so that hooks run; it has asked for what is asked here
        if part is not None:
            return self.branch(inp, is_first_microbatch, **part)
        x = want_input("Linear", "inp", inp, self.in_features)
        want_plain("Linear", is_first_microbatch, fp8_output, fp8_grad)
        bias = "add" if self.apply_bias else "none"
        inputs = {"x": x, **self.product_inputs(bias)}
        y = self.run(inputs, is_first_microbatch, bias, fp8_output, fp8_grad)["y"]
        return (y, self.bias) if self.return_bias else y

    def branch(
        self, x: Tensor, is_first_microbatch: bool | None, bias: str, residual: Tensor | None = None
    ) -> Tensor:
        """y with the bias "add"-ed, not ("none"), or left to a later operation while its gradient is made
        here ("deferred"), and with ``residual`` added, like y."""
        inputs = {"x": x, **self.product_inputs(bias), "residual": residual}
        return self.run(inputs, is_first_microbatch, bias)["y"]
