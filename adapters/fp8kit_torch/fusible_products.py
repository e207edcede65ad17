"""Operations of ``te.ops`` that multiply or cast, under Transformer Engine's names."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import choice, flag
from fp8kit.errors import ShapeError
from fp8kit_torch import grouped_linear, linear
from fp8kit_torch.arguments import as_parameter
from fp8kit_torch.checks import CONSTRUCTED, check, shown
from fp8kit_torch.fusible_ranks import tensor_ranks
from fp8kit_torch.fusion import BasicOperation, FusibleOperation
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.te_compat.functional_linear import functional_backward, functional_forward
from fp8kit_torch.te_compat.recipe_quantizers import quantizer_of_operand
from fp8kit_torch.torch_compat import own_parameters


def _start(weight: Tensor) -> None:
    torch.nn.init.kaiming_uniform_(weight, math.sqrt(5))


class CastsInput:
    """Of an operation with weights: its input in another floating dtype is cast to theirs, and the input's
    gradient back, as ``torch.autocast`` does it to both where that is on."""

    def as_input(self, argument: str, value: Any, *shape: Any) -> Any:
        """The input, cast."""
        x = super().as_input(argument, value, *shape)  # type: ignore[misc]
        if argument != "inp" or not isinstance(x, Tensor) or isinstance(x, QuantizedTensor):
            return x
        # none where something else stands for the weight
        return as_parameter(x, next((each for each in own_parameters(self).values() if each is not None), x))


class _Products(CastsInput, FusibleOperation):
    """What operations with weights share: three quantizers of a product."""

    def num_quantizers(self, mode: str) -> int:
        return {"forward": 2, "backward": 1}.get(mode, 0)

    def _quantizer(self, recipe: Any, mode: str, index: int) -> Any:
        prepare, fp8_meta = self.prepare, self.fp8_meta  # type: ignore[attr-defined]
        return quantizer_of_operand(recipe, "g" if mode == "backward" else "xw"[index], prepare, fp8_meta)


class Linear(_Products, linear.Linear):
    """y = x W^T + b: ``fp8kit_torch.Linear`` whose ``weight`` starts as torch's does.
    ``accumulate_into_main_grad``: its ``fuse_wgrad_accumulation``; ``rng_state_tracker_function``: its
    ``get_rng_state_tracker``; ``tensor_parallel_mode``, ``tensor_parallel_group`` (None: all processes) and
    ``sequence_parallel``: its ``parallel_mode``, ``tp_group`` and ``sequence_parallel``."""

    tensor_parallel_mode = property(lambda self: self.parallel_mode)
    tensor_parallel_group = property(lambda self: self.tp_group)
    tensor_parallel_size = property(lambda self: self.tp_size)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        check("ops.Linear", CONSTRUCTED, locals())
        ranks, together = tensor_ranks("ops.Linear", "tensor_parallel_group", tensor_parallel_group), {}
        if tensor_parallel_mode is not None:
            choice("ops.Linear", "tensor_parallel_mode", tensor_parallel_mode, ("column", "row"))
            together = {"tp_group": ranks, "parallel_mode": tensor_parallel_mode}
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            device=device,
            params_dtype=dtype,
            init_method=_start,
            get_rng_state_tracker=rng_state_tracker_function,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            sequence_parallel=sequence_parallel,
            **together,
        )


class BasicLinear(Linear):
    """y = x W^T. Arguments as ``Linear``; ``userbuffers_options``: accepted, communication that overlaps
    products is that of several processes."""

    _functional_forward = staticmethod(functional_forward)
    _functional_backward = staticmethod(functional_backward)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: Any = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=False,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )


class GroupedLinear(_Products, grouped_linear.GroupedLinear):
    """y_i = x_i W_i^T + b_i for groups of rows: ``fp8kit_torch.GroupedLinear`` whose weights start as torch's
    do. ``scale_bias``: each row's bias is multiplied by a second extra input."""

    num_extra_inputs = 1

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        self.__dict__["scale_bias"] = flag("ops.GroupedLinear", "scale_bias", scale_bias) and bias
        super().__init__(
            num_groups,
            in_features,
            out_features,
            bias=bias,
            return_bias=self.scale_bias,
            device=device,
            params_dtype=dtype,
            init_method=_start,
            get_rng_state_tracker=rng_state_tracker_function,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.num_groups = self.num_gemms
        self.num_extra_inputs = 2 if self.scale_bias else 1

    def forward(self, inp: Tensor, split_sizes: Any, scales: Tensor | None = None) -> Any:
        """``inp``: (..., K); ``split_sizes``: integer (groups,), the numbers of its rows; ``scales``: with
        ``scale_bias``, floating, one a row. Returns (..., M)."""
        inp = self.as_input("inp", inp, self.in_features)
        if not self.scale_bias:
            return super().forward(inp, split_sizes)
        y, biases = super().forward(inp, split_sizes)
        rows = y.reshape(-1, y.shape[-1])
        if scales is None or scales.numel() != rows.shape[0]:
            raise ShapeError("ops.GroupedLinear", "scales", shown(scales), f"{rows.shape[0]} numbers")
        counts = torch.as_tensor(split_sizes, device=rows.device)
        each = torch.stack(list(biases)).repeat_interleave(counts, 0, output_size=rows.shape[0])
        return (rows + (scales.reshape(-1, 1) * each).to(rows.dtype)).view(y.shape)

    def num_quantizers(self, mode: str) -> int:
        return self.num_groups * super().num_quantizers(mode)

    def _quantizer(self, recipe: Any, mode: str, index: int) -> Any:
        prepare, fp8_meta = self.prepare, self.fp8_meta
        operand, group = ("g", index) if mode == "backward" else ("xw"[index % 2], index // 2)
        return quantizer_of_operand(recipe, operand, prepare, fp8_meta, group)


class Quantize(BasicOperation):
    """x, cast as an input of the autocast's recipe, for the layer after it; with ``backward`` its gradient,
    cast as an output gradient, for the layer before it. x itself without FP8, and where it is cast already.

    The scale is the tensor's own, under delayed scaling too.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward = flag("ops.Quantize", "forward", forward)
        self._quantize_backward = flag("ops.Quantize", "backward", backward)

    def num_quantizers(self, mode: str) -> int:
        asked = {"forward": self._quantize_forward, "backward": self._quantize_backward}
        return int(asked.get(mode, False))

    def _quantizer(self, recipe: Any, mode: str, index: int) -> Any:
        return quantizer_of_operand(recipe, "g" if mode == "backward" else "x")

    def forward(self, input: Tensor) -> Tensor:
        """``input``: h (..., K)."""
        of_input, of_gradient = (
            self.get_quantizer(mode, 0) if self.num_quantizers(mode) else None
            for mode in ("forward", "backward")
        )
        x = input
        if of_gradient is not None and not isinstance(input, QuantizedTensor):
            x = _CastGradient.apply(input, of_gradient)
        return x if of_input is None or isinstance(x, QuantizedTensor) else of_input(x)


class _CastGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Any) -> Tensor:
        ctx.quantizer = quantizer
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.quantizer(grad), None
