"""Casts and activations of ``transformer_engine_torch``, which programs call without autograd. ``quantizer``
casts a result; None leaves it in high precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.ops.activation import activation
from fp8kit_torch.call import apply
from fp8kit_torch.checks import shown, tensor
from fp8kit_torch.fusible_activations import SiTUGLU
from fp8kit_torch.quantized_tensor import QuantizedTensor
from fp8kit_torch.specs import spec_for
from fp8kit_torch.te_compat.dtypes import TE_DType_To_Torch

_PLAIN = "gelu geglu qgelu qgeglu relu reglu srelu sreglu silu swiglu glu"
_WITH_BIAS = "gelu silu relu qgelu srelu"
# numbers of activations, by name, with their defaults
_NUMBERS = {
    "clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0},
    "situglu": {"beta1": 4.0, "beta2": 25.0},
}


@torch.no_grad()
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """``quantizer(tensor)``; over what ``output`` holds, where that is given, and not where ``noop`` is not
    0."""
    if output is None:
        return quantizer(tensor.detach())
    return quantizer.update_quantized(tensor.detach(), output, noop_flag=noop)


@torch.no_grad()
def dequantize(input: QuantizedTensor, otype: Any) -> Tensor:
    """The values of a quantised tensor. ``otype``: a DType, or torch's dtype."""
    if not isinstance(input, QuantizedTensor):
        raise ArgumentError("dequantize", "input", shown(input), "a QuantizedTensor")
    return input.dequantize(dtype=TE_DType_To_Torch.get(otype, otype))


def multi_tensor_quantize(tensor_list: Sequence[Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    """Each tensor cast by its quantizer. ShapeError for other numbers of them."""
    if len(tensor_list) != len(quantizer_list):
        got = f"{len(quantizer_list)} for {len(tensor_list)} tensors"
        raise ShapeError("multi_tensor_quantize", "quantizer_list", got, "as many as tensors")
    return [quantize(*pair) for pair in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(tensor: Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any]) -> list[Any]:
    """The first dimension's parts of ``split_sections`` rows, each cast by its quantizer."""
    return multi_tensor_quantize(tensor.split(list(split_sections)), quantizer_list)


@torch.no_grad()
def bgrad_quantize(input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """(the sum of the rows, in the input's dtype, the input cast)."""
    return input.reshape(-1, input.shape[-1]).float().sum(0).to(input.dtype), quantize(input, quantizer)


@torch.no_grad()
def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Write max|input| to ``amax``, float32 (1,)."""
    tensor("compute_amax", "input", input)
    amax.copy_(input.abs().amax().float().view(amax.shape) if input.numel() else torch.zeros_like(amax))


def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """The codes (..., K) with the last dimension first, uint8 (K, ...); ``out``: where they are written."""
    transposed = input.movedim(-1, 0).contiguous() if input.ndim else input.clone()
    return transposed if out is None else out.copy_(transposed)


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A copy with the first two dimensions in each other's place."""
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


def _numbers(name: str, given: tuple[float, ...], named: dict[str, float]) -> dict[str, float]:
    """An activation's numbers by name. TypeError for others."""
    known = _NUMBERS.get(name, {})
    asked = dict(zip(known, given, strict=False)) | named
    if len(given) > len(known) or asked.keys() - known.keys():
        raise TypeError(f"{name}: numbers {given} and {named}, expected {', '.join(known) or 'none'}")
    return known | asked


def _computed(name: str, x: Tensor, numbers: dict[str, float]) -> Tensor:
    if name == "situglu":
        return SiTUGLU(**numbers).compute(x)
    spec = spec_for("ActivationSpec", name, x.shape[-1], tuple(map(float, numbers.values())))
    return apply(activation, spec, {"x": x})["y"]


def _activations() -> dict[str, Callable[..., Any]]:
    """``gelu(input, quantizer)``, ``dgelu(grad, fwd_input, quantizer)``, ``dbias_dgelu(grad, fwd_input,
    quantizer)`` and the like."""
    made: dict[str, Callable[..., Any]] = {}

    def cast(y: Tensor, quantizer: Any) -> Any:
        return y if quantizer is None else quantize(y, quantizer)

    def add(name: str, backward: str) -> None:
        def forward(input: Tensor, quantizer: Any = None, *numbers: float, **named: float) -> Any:
            with torch.no_grad():
                return cast(_computed(name, input, _numbers(name, numbers, named)), quantizer)

        def gradient(
            grad: Tensor, fwd_input: Tensor, quantizer: Any = None, *numbers: float, **named: float
        ) -> Any:
            with torch.enable_grad():
                x = fwd_input.detach().requires_grad_()
                y = _computed(name, x, _numbers(name, numbers, named))
                (dx,) = torch.autograd.grad(y, x, grad)
            return cast(dx, quantizer)

        def with_bias(grad: Tensor, fwd_input: Tensor, quantizer: Any = None) -> tuple[Tensor, Any]:
            return bgrad_quantize(gradient(grad, fwd_input), quantizer or torch.Tensor.detach)

        forward.__doc__ = f"The activation {name!r} of ``input``, cast by ``quantizer``."
        gradient.__doc__ = f"The gradient of {name!r} at ``fwd_input``, cast by ``quantizer``."
        with_bias.__doc__ = f"(that gradient's sum over rows, the gradient of {name!r} itself, cast)."
        made[name], made[backward] = forward, gradient
        if name in _WITH_BIAS.split():
            made[f"dbias_d{name}"] = with_bias

    for name in _PLAIN.split():
        add(name, f"d{name}")
    add("situglu", "dsituglu")
    add("clamped_swiglu", "clamped_dswiglu")
    for name, function in made.items():
        function.__name__ = function.__qualname__ = name
    return made


ACTIVATIONS = _activations()
globals().update(ACTIVATIONS)
