"""Which plain modules ``convert`` can replace, by what, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp8kit.ops.norm import NormSpec
from fp8kit_torch.converted import EPSILONS, Converted, ConvertedLinear, ConvertedNorm, standing_for
from fp8kit_torch.experts import experts_replacement
from fp8kit_torch.views import FLOATS

Make = Callable[[], nn.Module]

# reasons of what has no product, which no conversion could give one
TABLE = "a table of rows, of which there is no product"
NO_MATRIX = "parameters of one dimension, of which there is no product"
_PRODUCTS = ("Linear", "Conv", "Bilinear", "Attention", "Expert", "Router", "LSTM", "GRU", "RNN")


def replacement(module: nn.Module, linears: tuple[type[nn.Module], ...] = ()) -> Make | str:
    """What makes the module that takes this one's place, or why it stays. ``linears``: subclasses of
    ``nn.Linear`` that are replaced too."""
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled by TorchScript"
    own = dict(module.named_parameters(recurse=False))
    weight, kind = own.get("weight"), type(module)
    if isinstance(module, Converted):
        return "replaced already"
    if kind.__module__.partition(".")[0] == "fp8kit_torch" or hasattr(module, "fp8_meta"):
        return "a module of fp8kit_torch"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return TABLE
    if weight is None:
        return experts_replacement(module) or _without_weight(own)
    if any(getattr(module, name, None) is not own.get(name) for name in ("weight", "bias")):
        return "its weight or bias is made of other parameters before each call"
    if any(is_lazy(p) for p in own.values()):
        return "its parameters are not made yet"
    if odd := sorted({str(p.dtype).removeprefix("torch.") for p in own.values() if p.dtype not in FLOATS}):
        return f"its parameters are {', '.join(odd)}, not float32, bfloat16 or float16"
    if not all(p.is_contiguous() for p in own.values()):
        return "its parameters are not contiguous"
    if "forward" in vars(module):
        return "its forward was replaced"
    if list(module.children()):
        return "it has modules within"
    if kind is nn.Linear:
        return lambda: standing_for(ConvertedLinear, kind)(module, "oi")
    if isinstance(module, nn.Linear):
        return _subclass(module, linears)
    if kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers":
        return lambda: standing_for(ConvertedLinear, kind)(module, "io")
    spec = _norm_spec(module, weight, own)
    return spec if isinstance(spec, str) else lambda: standing_for(ConvertedNorm, kind)(module, spec)


def _without_weight(own: Mapping[str, Tensor]) -> str:
    experts = [name for name, p in own.items() if p.ndim == 3]
    if experts:
        return f"weights of experts in one array of three dimensions: {', '.join(experts)}"
    matrices = [name for name, p in own.items() if p.ndim > 1]
    return f"a module of its own kind, with {', '.join(matrices)}" if matrices else NO_MATRIX


def _subclass(module: nn.Linear, linears: tuple[type[nn.Module], ...]) -> Make | str:
    kind = type(module)
    if kind not in linears:
        return f"a subclass of nn.Linear, which may compute something else: linear_classes=({kind.__name__},)"
    if not module.weight.is_meta and not _is_linear(module):
        return f"{kind.__name__}.forward does not compute x W^T + b"
    return lambda: standing_for(ConvertedLinear, kind)(module, "oi")


@torch.no_grad()
def _is_linear(module: nn.Linear) -> bool:
    """Whether a few rows become x W^T + b, to the rounding of its dtype."""
    weight, bias = module.weight.double(), module.bias
    x = torch.linspace(-1.5, 2.5, module.in_features, device=weight.device)
    x = torch.stack((x, x.flip(0).cos())).to(module.weight.dtype)
    try:
        got = type(module).forward(module, x)
    except (TypeError, RuntimeError, ValueError):
        return False
    wanted, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    if bias is not None:
        wanted, size = wanted + bias.double(), size + bias.double().abs()
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        return False
    # the sum of so many terms, each rounded, and the result
    limit = 4 * torch.finfo(module.weight.dtype).eps + module.in_features * torch.finfo(torch.float32).eps
    return bool(((got.double() - wanted).abs() <= limit * size).all())


def _norm_spec(module: nn.Module, weight: Tensor, own: Mapping[str, Tensor]) -> NormSpec | str:
    """What a norm computes; why not, for what is not one that fp8kit has."""
    kind = type(module)
    named = kind.__name__.endswith(("RMSNorm", "LayerNorm", "LayerNorm1P"))
    if not named:
        product = any(word in kind.__name__ for word in _PRODUCTS)
        return "a product of another kind than nn.Linear" if product else "not a linear layer or norm"
    if weight.ndim != 1 or weight.numel() == 0:
        return "a norm over several dimensions"
    features = weight.numel()
    if kind is nn.LayerNorm:
        return NormSpec(features, "LayerNorm", module.eps)
    if kind is nn.RMSNorm:
        eps = torch.finfo(weight.dtype).eps if module.eps is None else module.eps
        return NormSpec(features, "RMSNorm", eps)
    if not set(own) <= {"weight", "bias"} or [*module.buffers()]:
        return "a norm with further parameters or buffers"
    if weight.is_meta:
        return "on the meta device: what its forward computes is not known"
    found = (getattr(module, name, None) for name in EPSILONS)
    eps = next((value for value in found if isinstance(value, float)), None)
    return "a norm without epsilon" if eps is None else _probed(module, weight, own.get("bias"), eps)


@torch.no_grad()
def _probed(module: nn.Module, weight: Tensor, bias: Tensor | None, eps: float) -> NormSpec | str:
    """A norm of another library, known by what it makes of a few rows: small ones as well, so that epsilon
    shows."""
    features = weight.numel()
    ramp = torch.linspace(-1.5, 2.5, features, device=weight.device)
    x = torch.stack((ramp, ramp.flip(0) * 3, ramp.cos() * eps**0.5)).to(weight.dtype)[None]
    try:
        got = type(module).forward(module, x)  # past hooks, which are for the user's calls
    except (TypeError, RuntimeError, ValueError):
        return "a norm whose forward does not take (batch, length, features)"
    odd = "a norm that is neither x / rms(x) * weight, x / rms(x) * (1 + weight) nor a LayerNorm of them"
    if not isinstance(got, Tensor) or got.shape != x.shape:
        return odd
    w = weight.detach().double()
    shift: Any = 0.0 if bias is None else bias.double()
    # a rounding of the normalised row, of 1 + weight, of their product, and one to spare
    limit = 4 * torch.finfo(weight.dtype).eps
    for normalization in ("RMSNorm", "LayerNorm") if bias is None else ("LayerNorm",):
        wide = x.double()
        if normalization == "LayerNorm":
            wide = wide - wide.mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        for centered in (False, True):
            scaled = normed * (1 + w if centered else w)
            size = scaled.abs() + (normed.abs() if centered else 0) + abs(shift)
            # a row's mean is rounded at the size of its elements
            if normalization == "LayerNorm":
                size = size + normed.abs().amax() * (w.abs() + centered)
            if ((got.double() - scaled - shift).abs() <= limit * size).all():
                return NormSpec(features, normalization, eps, centered)
    return odd
