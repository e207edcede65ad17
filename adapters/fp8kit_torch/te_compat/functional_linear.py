"""``BasicLinear._functional_forward`` and ``_functional_backward``: the products of a layer without autograd,
as fused operations of one's own call them, with Transformer Engine's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import choice, optional
from fp8kit.errors import ArgumentError
from fp8kit_torch.checks import tensor
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.te_compat.gemms import general_gemm
from fp8kit_torch.te_compat.parallel import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim

_FORWARD, _BACKWARD = (f"BasicLinear._functional_{way}" for way in ("forward", "backward"))
_MODES = optional(lambda op, name, value: choice(op, name, value, ("column", "row")))


class _Ranks:
    """Who shares the products: what "column" gathers and sums forward "row" does backward."""

    def __init__(self, operation: str, mode: str | None, group: Any, sequence_parallel: bool) -> None:
        _MODES(operation, "tensor_parallel_mode", mode)
        self.operation, self.mode, self.group, self.rows = operation, mode, group, sequence_parallel

    def gathers(self, mode: str) -> bool:
        """Whether ranks of this mode have rows of the input each."""
        return self.rows and self.mode == mode

    def summed(self, y: Tensor, mode: str) -> Tensor:
        """The ranks' sum of y, or this rank's rows of it, in that mode."""
        if self.mode != mode:
            return y
        return (reduce_scatter_along_first_dim if self.rows else allreduce)(y, self.group)[0]

    def operand(
        self,
        name: str,
        value: Any,
        dtype: torch.dtype,
        quantized: bool,
        quantizer: Any,
        mode: str,
        **usage: bool,
    ) -> Tensor:
        """What a product reads of ``value``: cast where it is to be ``quantized`` and is not yet, else values
        of ``dtype``; all ranks' rows in this ``mode``."""
        tensor(self.operation, name, value)
        if isinstance(value, QuantizedTensor) and quantized and not self.gathers(mode):
            return value
        plain = value.dequantize() if isinstance(value, QuantizedTensor) else value
        if self.gathers(mode):
            plain = gather_along_first_dim(plain, self.group)[0]
        if not quantized:
            return plain.to(dtype)
        if quantizer is None:
            wanted = "a quantizer, with with_quantized_compute"
            raise ArgumentError(self.operation, f"{name}_quantizer", None, wanted)
        quantizer.set_usage(**usage)
        return quantizer(plain)  # type: ignore[no-any-return]


def _multiply(a: Tensor, b: Tensor, out: Tensor | None, quantizer: Any, **how: Any) -> Tensor:
    """``general_gemm``, which casts what it makes, but not what it writes to ``out``."""
    params = None if out is not None else quantizer
    return general_gemm(a, b, out=out, quantization_params=params, **how)[0]  # type: ignore[no-any-return]


def _kept(made: Tensor, given: Tensor, both: bool) -> Tensor:
    """An operand for backward, which reads columns: without the rows where they were cast here."""
    if made is not given and both and isinstance(made, QuantizedTensor):
        made.update_usage(rowwise_usage=False, columnwise_usage=True)
    return made


@torch.no_grad()
def functional_forward(
    input: Tensor,
    weight: Tensor,
    *,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    device: Any = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    beta: float | None = None,
    accumulate_into_out: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    backward_override: str | None = None,
    input_quantizer: Any = None,
    weight_quantizer: Any = None,
    output_quantizer: Any = None,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(y, x, w): alpha x W^T + b, and the operands as ``_functional_backward`` takes them, None for one whose
    product is not wanted.

    * ``input``: h (..., K), ``weight``: h (N, K), either may be a ``QuantizedTensor``. ``dtype``: of y, None
      as ``out`` or the weight. ``out``, ``beta``, ``accumulate_into_out``: as ``general_gemm`` has them.
    * ``with_quantized_compute``: the quantizers cast what is not cast, and y by ``output_quantizer`` if there
      is one. ``backward_override``: not None keeps what needs no columns.
    * ``tensor_parallel_mode``: "column" gathers the input with ``sequence_parallel``, "row" sums y.
      ``device`` is not read.

    Raises ArgumentError for what is missing, and what ``general_gemm`` raises.
    """
    ranks = _Ranks(_FORWARD, tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
    dtype = (weight if out is None else out).dtype if dtype is None else dtype
    cast, columns = with_quantized_compute, backward_override is None
    row = tensor_parallel_mode == "row"
    if row and accumulate_into_out:
        raise ArgumentError(_FORWARD, "accumulate_into_out", True, "False in row mode, where y is summed")
    usage = {"rowwise": True, "columnwise": weight_requires_grad and columns}
    x = ranks.operand("input", input, dtype, cast, input_quantizer, "column", **usage)
    usage = {"rowwise": True, "columnwise": input_requires_grad and columns}
    w = ranks.operand("weight", weight, dtype, cast, weight_quantizer, "", **usage)
    how = {"out_dtype": dtype, "alpha": alpha, "beta": beta, "accumulate": accumulate_into_out, "bias": bias}
    y = _multiply(w, x, out, output_quantizer if cast and not row else None, **how)
    kept_x = input if ranks.gathers("column") else _kept(x, input, weight_requires_grad and columns)
    kept_w = _kept(w, weight, input_requires_grad and columns)
    y = ranks.summed(y, "row")
    return y, kept_x if weight_requires_grad else None, kept_w if input_requires_grad else None


@torch.no_grad()
def functional_backward(
    grad_output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    *,
    grad_input_alpha: float | None = None,
    input_requires_grad: bool = True,
    grad_weight_alpha: float | None = None,
    weight_requires_grad: bool = True,
    device: Any = None,
    dtype: torch.dtype | None = None,
    grad_weight: Tensor | None = None,
    grad_weight_beta: float | None = None,
    accumulate_into_grad_weight: bool = False,
    grad_input: Tensor | None = None,
    grad_input_beta: float | None = None,
    accumulate_into_grad_input: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    input_quantizer: Any = None,
    weight_quantizer: Any = None,
    grad_output_quantizer: Any = None,
    grad_input_quantizer: Any = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of the input, of the weight), None for one that is not wanted: g W and g^T x.

    ``input``, ``weight``: as ``_functional_forward`` gave them. ``grad_input``, ``grad_weight``: where they
    are written or, with ``accumulate_into_...``, added to beta times what is there; ``..._alpha``: factors.
    The rest: as there. Raises the same.
    """
    ranks = _Ranks(_BACKWARD, tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
    tensor(_BACKWARD, "grad_output", grad_output)
    dtype = (grad_output if weight is None else weight).dtype if dtype is None else dtype
    cast, column = with_quantized_compute, tensor_parallel_mode == "column"
    if column and accumulate_into_grad_input:
        got, wanted = "accumulate_into_grad_input", "False in column mode, where the gradient is summed"
        raise ArgumentError(_BACKWARD, got, True, wanted)
    usage = {"rowwise": input_requires_grad, "columnwise": weight_requires_grad}
    dy = ranks.operand("grad_output", grad_output, dtype, cast, grad_output_quantizer, "row", **usage)
    usage, dx, dw = {"columnwise": True}, None, None
    if input_requires_grad:
        w = ranks.operand("weight", weight, dtype, cast, weight_quantizer, "", **usage)
        how = {"beta": grad_input_beta, "accumulate": accumulate_into_grad_input, "layout": "NN"}
        how |= {"alpha": 1.0 if grad_input_alpha is None else grad_input_alpha, "out_dtype": dtype}
        by = grad_input_quantizer if cast and not column else None
        dx = ranks.summed(_multiply(w, dy, grad_input, by, use_split_accumulator=True, **how), "column")
    if weight_requires_grad:
        x = ranks.operand("input", input, dtype, cast, input_quantizer, "column", rowwise=False, **usage)
        how = {"beta": grad_weight_beta, "accumulate": accumulate_into_grad_weight, "layout": "NT"}
        how |= {"alpha": 1.0 if grad_weight_alpha is None else grad_weight_alpha, "out_dtype": dtype}
        dw = _multiply(x, dy, grad_weight, None, use_split_accumulator=True, **how)
    return dx, dw
