"""``convert``: a plain model's linear layers and norms replaced by fp8kit's, in place and around the same
parameters; ``revert`` undoes it.

No weight is copied: a new module holds the old one's ``Parameter`` objects, so optimisers, tied weights and
checkpoints do not notice. transformers' ``Conv1D`` keeps its (in, out) weights.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp8kit.arguments import function
from fp8kit.errors import ArgumentError
from fp8kit.execution.codec import encode
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.norm import NormSpec, norm
from fp8kit.ops.product import ProductSpec
from fp8kit_torch.arguments import autocast_dtype, want_input
from fp8kit_torch.call import apply
from fp8kit_torch.checks import module
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.torch_compat import unseen
from fp8kit_torch.views import FLOATS

Filter = Callable[[nn.Module, str], bool]
# what a user or a library has hung on a module, and which goes with it
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)

# torch's layers that read their parts' parameters in inference, past the parts: (class, the attribute that
# allows it, its value without)
_PAST_PARTS = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
_ALLOWED = "_fp8kit_plain"  # where such a layer keeps the attribute's value meanwhile


class _Converted(nn.Module):
    """What stands for a plain module: the same parameters, and the module itself, out of torch's sight."""

    def adopt(self, plain: nn.Module) -> None:
        """Take over the plain module's parameters, hooks and mode."""
        self.__dict__["plain"] = plain  # not a submodule: it would show in names and counts
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(plain, name, None))
        self.training = plain.training
        for name in _HOOKS:
            self.__dict__[name] = plain.__dict__[name]

    def give_back(self) -> nn.Module:
        """The plain module, with what this one's parameters are now."""
        plain: nn.Module = self.__dict__["plain"]
        plain._parameters.update((n, p) for n, p in self._parameters.items() if n in plain._parameters)
        plain.train(self.training)
        return plain


class ConvertedLinear(_Converted, TransformerEngineBaseModule):
    """y = x W^T + b for an ``nn.Linear``, y = x W + b for a ``Conv1D``, with the plain module's parameters;
    FP8 under ``autocast``."""

    operation = linear
    holds = False  # the parameters are the plain module's

    def __init__(self, plain: nn.Module, layout: str) -> None:
        super().__init__()
        self.adopt(plain)
        out, features = self.weight.shape if layout == "oi" else reversed(self.weight.shape)
        self.in_features, self.out_features = int(features), int(out)
        self.nx, self.nf = self.in_features, self.out_features  # Conv1D's names
        self.mode = "none" if self.bias is None else "add"
        self.set_spec(LinearSpec(ProductSpec(self.in_features, (self.out_features,), layout, self.mode)))

    def weight_inputs(self) -> dict[str, Tensor]:
        return {"weight0": self.weight}

    def calibrate(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> list[tuple[int, Tensor]]:
        return [(0, inputs["x"]), (1, inputs["weight0"])]

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (..., in_features) of the weight's dtype."""
        x = want_input("Linear", "inp", x, self.in_features)
        return self.run({"x": x, "weight0": self.weight, "bias0": self.bias}, None, self.mode)["y"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # nothing beside what the plain module would save
        if not destination[f"{prefix}_extra_state"].numel():
            del destination[f"{prefix}_extra_state"]

    def extra_repr(self) -> str:
        """Sizes and layout."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class ConvertedNorm(_Converted):
    """LayerNorm or RMSNorm over the last dimension in one pass, with the plain module's parameters."""

    def __init__(self, plain: nn.Module, spec: NormSpec) -> None:
        super().__init__()
        self.adopt(plain)
        self._found: dict[tuple[Any, ...], torch.dtype] = {}
        self.spec, self._text = spec, encode(spec)
        self.eps = self.variance_epsilon = spec.epsilon  # the plain modules' names

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (..., features). Computed in the wider of its and the weight's dtype; the result has the
        dtype of the plain module's, also within ``torch.autocast``, which on CUDA computes torch's norms in
        float32."""
        x, own = want_input(self.spec.normalization, "inp", x, self.spec.features), self.weight.dtype
        cast = autocast_dtype(x)
        inputs = {"x": x, "norm_weight": self.weight, "norm_bias": self.bias if self.spec.centered else None}
        spec: Any = self._text if torch.compiler.is_compiling() else self.spec
        if x.dtype not in FLOATS or (cast is None and x.dtype == own):
            return apply(norm, spec, inputs)["y"]
        result = self.result_of(x.device.type, cast, x.dtype, own)
        wide = torch.promote_types(torch.promote_types(x.dtype, own), result)
        y = apply(norm, spec, {name: None if t is None else t.to(wide) for name, t in inputs.items()})["y"]
        return y.to(result)

    @torch.compiler.assume_constant_result
    def result_of(
        self, device: str, cast: torch.dtype | None, x: torch.dtype, weight: torch.dtype
    ) -> torch.dtype:
        """The dtype of the plain module's result, within ``torch.autocast(device, cast)`` where there is a
        ``cast``: found out at the first call. Libraries have three ways, x's, the weight's and the wider one,
        and autocast's lists are another matter on each device and in each release of torch. The wider dtype
        where the plain module refuses such a pair."""
        key = device, cast, x, weight
        if key not in self._found:
            within = contextlib.nullcontext() if cast is None else torch.autocast(device, cast)
            with within:
                result = _result(self.__dict__["plain"], x, weight, torch.device(device))
            self._found[key] = result or torch.promote_types(x, weight)
        return self._found[key]

    def extra_repr(self) -> str:
        """What is computed."""
        return f"{self.spec.features}, {self.spec.normalization}, eps={self.spec.epsilon}"


def convert(model: nn.Module, filter_fn: Filter | None = None) -> nn.Module:
    """Replace in place, and return ``model``: every ``nn.Linear``, every ``Conv1D`` of transformers, every
    ``nn.LayerNorm`` with weight and bias over one dimension, and every RMSNorm whose numbers are x / rms(x) *
    weight or * (1 + weight).

    * ``filter_fn``: called with (module, its name in ``model``); False leaves that module as it is. A
      language model's head, for one.

    Parameters stay the same objects. Their dtype is float32, bfloat16 or float16; other modules, subclasses
    of the named ones (they may compute something else), modules whose ``forward`` was replaced, those whose
    weight is made of others before each call (pruned, with a spectral or weight norm) or not made yet (lazy),
    and weights of experts in one array of three dimensions are left alone. Whether an RMSNorm of some library
    is one is found out by running it on a few numbers, and modules on the meta device are not looked at.
    ``nn.MultiheadAttention`` keeps its projections: they are no ``nn.Linear``. ``nn.TransformerEncoder``
    leaves out its fast path, which would pass the layers by, and which sets padded positions to 0; convert it
    whole: over layers converted alone it keeps that path. But for these positions, outside of ``autocast`` a
    converted model computes what it did, up to the last bits, but no gradient of a gradient, not under
    ``torch.func``, nor in float64: ``revert`` first, also before a ``state_dict`` for the plain model, since
    FP8 state is among its keys. Convert before ``torch.compile``, DistributedDataParallel or fully_shard.
    Fp8kitError where ``model`` itself would have to be replaced, and then nothing is; a UserWarning where
    nothing was replaced, neither now nor before.
    """
    module("convert", "model", model)
    if filter_fn is not None:
        said = "a function of a module and its name"
        function("convert", "filter_fn", filter_fn, takes=(model, ""), said=said)
    if _replacement(model) is not None and (filter_fn is None or filter_fn(model, "")):
        wanted = "a model that contains layers: no layer can replace itself"
        raise ArgumentError("convert", "model", type(model).__name__, wanted)
    swapped: dict[nn.Module, nn.Module] = {}
    places, chosen, left = list(_children(model)), [], 0
    for parent, name, child, path in places:
        if filter_fn is not None and not filter_fn(child, path):
            left += 1
            continue
        if child not in swapped:
            made = _replacement(child)
            if made is None:
                continue
            swapped[child] = made()
        chosen.append((parent, name, swapped[child]))
    for parent, name, made_one in chosen:
        parent._modules[name] = made_one
    for layer in model.modules():
        for kind, name, without in _PAST_PARTS:
            fast = isinstance(layer, kind) and name in vars(layer) and _ALLOWED not in vars(layer)
            if fast and any(isinstance(part, _Converted) for part in layer.modules()):
                vars(layer)[_ALLOWED] = getattr(layer, name)
                setattr(layer, name, without)
    if not swapped and not any(isinstance(child, _Converted) for _, _, child, _ in places):
        why = f"; filter_fn left out {left} of its {len(places)} modules" if left else ""
        warnings.warn(
            f"convert: model: {type(model).__name__} has no layer that was replaced{why}: "
            "it computes as before",
            stacklevel=2,
        )
    return model


def revert(model: nn.Module) -> nn.Module:
    """Put back in place every module that ``convert`` replaced, with the parameters that there are now;
    returns ``model``. FP8 state is dropped."""
    module("revert", "model", model)
    for parent, name, child, _ in list(_children(model)):
        if isinstance(child, _Converted):
            parent._modules[name] = child.give_back()
    for layer in model.modules():
        for kind, name, _ in _PAST_PARTS:
            if isinstance(layer, kind) and _ALLOWED in vars(layer):
                setattr(layer, name, vars(layer).pop(_ALLOWED))
    return model


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """(parent, name in it, child, path), every place that a module stands in."""
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child, f"{path}.{name}" if path else name


def _replacement(module: nn.Module) -> Callable[[], nn.Module] | None:
    """What makes the module that takes this one's place; None where it stays."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is None or any(getattr(module, name, None) is not own.get(name) for name in ("weight", "bias")):
        return None  # not its own: made of other parameters before each call, as pruning and weight norms do
    if any(is_lazy(p) or p.dtype not in FLOATS or not p.is_contiguous() for p in own.values()):
        return None
    if "forward" in vars(module) or isinstance(module, _Converted) or module._modules:
        return None
    kind = type(module)
    if kind is nn.Linear:
        return lambda: ConvertedLinear(module, "oi")
    if kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers":
        return lambda: ConvertedLinear(module, "io")
    spec = _norm_spec(module, weight, own)
    return None if spec is None else lambda: ConvertedNorm(module, spec)


def _norm_spec(module: nn.Module, weight: Tensor, own: Mapping[str, Tensor]) -> NormSpec | None:
    """What a norm computes; None for what is not one that fp8kit has."""
    if weight.ndim != 1 or weight.numel() == 0:
        return None
    features = weight.numel()
    kind = type(module)
    if kind is nn.LayerNorm:
        return NormSpec(features, "LayerNorm", module.eps) if module.bias is not None else None
    if kind is nn.RMSNorm:
        eps = torch.finfo(weight.dtype).eps if module.eps is None else module.eps
        return NormSpec(features, "RMSNorm", eps)
    named = kind.__name__.endswith("RMSNorm") or kind.__name__ == "T5LayerNorm"
    if not named or list(own) != ["weight"] or weight.is_meta or [*module.buffers()]:
        return None
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    eps = next((value for value in found if isinstance(value, float)), None)
    return None if eps is None else _probed(module, weight, eps)


def _result(
    plain: nn.Module, x: torch.dtype, weight: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """The dtype of a norm's result for those of its input and its weight; None where it refuses them."""
    twin = copy.copy(plain)
    # a selective checkpoint counts the calls of both passes, of which the second one has none of these
    with torch.inference_mode(False), torch.no_grad(), unseen(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of pairs for which it has no fused kernel
        own = {
            name: None if p is None else torch.ones(p.shape, dtype=weight, device=device)
            for name, p in plain._parameters.items()
        }
        twin.__dict__["_parameters"] = own
        with contextlib.suppress(TypeError, RuntimeError, ValueError):
            row = torch.zeros(1, plain.weight.numel(), dtype=x, device=device)  # type: ignore[operator]
            # past hooks, which are for the user's calls
            return type(plain).forward(twin, row).dtype  # type: ignore[no-any-return]
    return None


def _probed(module: nn.Module, weight: Tensor, eps: float) -> NormSpec | None:
    """An RMSNorm of another library, known by what it makes of a few rows: small ones as well, so that
    epsilon shows."""
    features = weight.numel()
    ramp = torch.linspace(-1.5, 2.5, features, device=weight.device)
    x = torch.stack((ramp, ramp.flip(0) * 3, ramp.cos() * eps**0.5)).to(weight.dtype)
    try:
        with torch.no_grad():
            got = type(module).forward(module, x)  # past hooks, which are for the user's calls
    except (TypeError, RuntimeError, ValueError):
        return None
    if not isinstance(got, Tensor) or got.shape != x.shape:
        return None
    wide, w = x.double(), weight.detach().double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # a rounding of the normalised row, of 1 + weight, of their product, and one to spare
    limit = 4 * torch.finfo(weight.dtype).eps
    for centered in (False, True):
        wanted = normed * (1 + w if centered else w)
        if (
            (got.double() - wanted).abs() <= limit * (wanted.abs() + (normed.abs() if centered else 0))
        ).all():
            return NormSpec(features, "RMSNorm", eps, centered)
    return None
