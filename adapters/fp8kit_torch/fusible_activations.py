"""Activations of ``te.ops``, alone and with rows that an extra input multiplies, under Transformer Engine's
names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import flag, integer, number
from fp8kit.errors import ShapeError
from fp8kit.ops.activation import activation
from fp8kit.ops.scaled_activation import scaled_activation
from fp8kit_torch.call import apply
from fp8kit_torch.checks import shown
from fp8kit_torch.fusion import BasicOperation
from fp8kit_torch.specs import spec_for
from fp8kit_torch.te_compat.dtypes import DType
from fp8kit_torch.te_compat.quantizers import Float8CurrentScalingQuantizer
from fp8kit_torch.te_compat.saved_tensors import prepare_for_saving, restore_from_saved
from fp8kit_torch.views import FLOATS


class _Activation(BasicOperation):
    """``cache_quantized_input``: backward reads the input as it was cast to FP8 (E4M3, current scaling),
    which takes half of a 16-bit input's memory, and not the input itself. ``glu_interleave_size``: of gated
    ones, the halves of the columns come in turns of so many, the gate's first; None: the gate's half first.
    """

    activation = ""

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__()
        name = f"ops.{type(self).__name__}"
        self.cache_quantized_input = flag(name, "cache_quantized_input", cache_quantized_input)
        if glu_interleave_size is not None:
            integer(name, "glu_interleave_size", glu_interleave_size, 1)
        self.glu_interleave_size = glu_interleave_size
        self.params: tuple[float, ...] = ()

    def compute(self, inp: Tensor) -> Tensor:
        """The activation of a tensor whose gate's half comes first."""
        spec = spec_for("ActivationSpec", self.activation, inp.shape[-1], self.params)
        return apply(activation, spec, {"x": inp})["y"]

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: h (..., F), of a gated activation (..., 2 F). Returns h (..., F)."""
        size = self.glu_interleave_size
        if size is not None:
            if inp.shape[-1] % (2 * size):
                wanted = f"columns that are a multiple of {2 * size}"
                raise ShapeError(f"ops.{type(self).__name__}", "inp", shown(inp), wanted)
            pairs = inp.reshape(*inp.shape[:-1], -1, 2, size)
            inp = pairs.transpose(-3, -2).reshape(inp.shape)
        return _OfCodes.apply(inp, self.compute) if self.cache_quantized_input else self.compute(inp)


class _OfCodes(torch.autograd.Function):
    """A function of a tensor whose gradient is taken at the tensor's cast to FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        held = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)(x.detach())
        saved, ctx.shells = prepare_for_saving(held)
        ctx.save_for_backward(*saved)
        ctx.compute = compute
        return compute(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (held,) = restore_from_saved(ctx.shells, ctx.saved_tensors)
        with torch.enable_grad():
            x = held.dequantize().detach().requires_grad_()
            y = ctx.compute(x)
        return torch.autograd.grad(y, x, grad)[0], None


def _activation(name: str) -> type[_Activation]:
    """The class of that name, whose activation is the same in small letters."""
    doc = f'"{name.lower()}", see ``fp8kit.backends.activation``.'
    return type(name, (_Activation,), {"activation": name.lower(), "__module__": __name__, "__doc__": doc})


GELU, QGELU, ReLU, SReLU, SiLU = map(_activation, ("GELU", "QGELU", "ReLU", "SReLU", "SiLU"))
GLU, GEGLU, QGEGLU, ReGLU = map(_activation, ("GLU", "GEGLU", "QGEGLU", "ReGLU"))
SReGLU, SwiGLU = map(_activation, ("SReGLU", "SwiGLU"))


class ClampedSwiGLU(_Activation):
    """ "clamped_swiglu", see ``fp8kit.backends.activation``."""

    activation = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.params = (float(limit), float(alpha), float(glu_linear_offset))


class SiTUGLU(_Activation):
    """beta1 tanh(u / beta1) sigma(u) beta2 tanh(v / beta2), of the halves u and v (Kimi K3's SiTU-GLU), in
    float32 by torch."""

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.beta1, self.beta2 = (number("ops.SiTUGLU", "beta1, beta2", beta) for beta in (beta1, beta2))

    def compute(self, inp: Tensor) -> Tensor:
        u, v = inp.float().chunk(2, -1)
        gate = self.beta1 * torch.tanh(u / self.beta1) * torch.sigmoid(u)
        return (gate * (self.beta2 * torch.tanh(v / self.beta2))).to(inp.dtype)


class _Scaled(BasicOperation):
    """An activation whose rows are multiplied by an extra input. ``activation_recompute_in_mlp``: accepted;
    backward computes the activation anew in any case."""

    num_extra_inputs = 1
    inner: _Activation

    def forward(self, inp: Tensor, scales: Tensor) -> Tensor:
        """``inp``: as the activation's; ``scales``: floating, of its shape without the last dimension.
        Returns h (..., F). ShapeError for other scales."""
        if scales.shape != inp.shape[:-1] or not scales.is_floating_point():
            wanted = f"floating {tuple(inp.shape[:-1])}"
            raise ShapeError(f"ops.{type(self).__name__}", "scales", shown(scales), wanted)
        own = self.inner
        plain = own.compute.__func__ is _Activation.compute and own.glu_interleave_size is None
        if plain and inp.dtype in FLOATS and scales.dtype in FLOATS:
            spec = spec_for("ScaledActivationSpec", own.activation, inp.shape[-1], own.params)
            return apply(scaled_activation, spec, {"x": inp, "probs": scales.reshape(-1)})["y"]
        y = own(inp)
        return (y * scales.unsqueeze(-1)).to(y.dtype)


def _scaled(name: str, inner: type[_Activation]) -> type[_Scaled]:
    """The class of that name, of an activation without numbers of its own."""

    def __init__(
        self: _Scaled, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        super(made, self).__init__()
        flag(f"ops.{name}", "activation_recompute_in_mlp", activation_recompute_in_mlp)
        self.inner = inner(glu_interleave_size=glu_interleave_size)

    doc = f"``{inner.__name__}``, whose rows are multiplied by an extra input."
    made = type(name, (_Scaled,), {"__init__": __init__, "__module__": __name__, "__doc__": doc})
    return made


ScaledSReLU, ScaledSwiGLU = _scaled("ScaledSReLU", SReLU), _scaled("ScaledSwiGLU", SwiGLU)


class ScaledSiTUGLU(_Scaled):
    """``SiTUGLU``, whose rows are multiplied by an extra input."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__()
        self.inner = SiTUGLU(beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size)


class ScaledClampedQGeGLU(_Scaled):
    """``ClampedSwiGLU``, whose rows are multiplied by an extra input."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__()
        numbers = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        self.inner = ClampedSwiGLU(**numbers, glu_interleave_size=glu_interleave_size)


class ScaledTanhSReLU(_Scaled):
    """y = (s tanh(relu(x) / s))^2, s ``tanh_clamp_scale``, at most s^2; its rows are multiplied by an extra
    input."""

    def __init__(self, *, tanh_clamp_scale: float, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        flag("ops.ScaledTanhSReLU", "activation_recompute_in_mlp", activation_recompute_in_mlp)
        self.inner = _TanhSReLU(tanh_clamp_scale)


class _TanhSReLU(_Activation):
    def __init__(self, scale: float) -> None:
        super().__init__()
        most = float(torch.finfo(torch.float32).max)
        self.scale = number("ops.ScaledTanhSReLU", "tanh_clamp_scale", scale, most, above=0.0)

    def compute(self, inp: Tensor) -> Tensor:
        bounded = self.scale * torch.tanh(torch.relu(inp.float()) / self.scale)
        return (bounded * bounded).to(inp.dtype)
