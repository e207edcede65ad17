"""What ``make_graphed_callables`` is called with: checked before anything is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.arguments import flag, function, integer, shown
from fp8kit.errors import ArgumentError, BackendError, RecipeError, UnsupportedError
from fp8kit_torch.checks import named, optional
from fp8kit_torch.graph_capture import Hooks
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.torch_compat import has_hooks, tree_leaves

_OP = "make_graphed_callables"
_HOOKS = ["forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"]
_WITH_KWARGS = ["forward_pre_hooks_with_kwargs", "forward_hooks_with_kwargs"]

RULES = {
    **named(
        optional(flag),
        "fp8_enabled fp8_calibrating enabled calibrating fp8_weight_caching cache_quantized_params",
    ),
    **named(
        flag,
        """allow_unused_input retain_graph_in_backward _reuse_graph_input_output_buffers
        clone_param_grads_on_return""",
    ),
    **named(optional(function), "pre_warmup_hook post_warmup_hook"),
    "num_warmup_iters": integer,
}


def either(asked: Mapping[str, Any], name: str, former: str = "") -> Any:
    """An argument that has a deprecated name as well, ``former``."""
    former = former or f"fp8_{name}"
    value, old = asked[name], asked[former]
    if value is not None and old is not None:
        raise RecipeError(_OP, former, old, f"None beside {name}")
    return old if value is None else value


def samples_of(one: bool, args: Any, kwargs: Any) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """The arguments of each sample."""
    several = [args] if one else args
    if not isinstance(several, tuple | list) or not all(isinstance(each, tuple | list) for each in several):
        wanted = "a tuple of tensors" + ("" if one else " for each sample")
        raise ArgumentError(_OP, "sample_args", shown(args), wanted)
    by_name = [kwargs] if one else kwargs
    if kwargs is None:
        by_name = [{}] * len(several)
    fitting = isinstance(by_name, tuple | list) and len(by_name) == len(several)
    if not fitting or not all(isinstance(each, Mapping) for each in by_name):
        wanted = "a mapping" if one else f"{len(several)} mappings, one a sample"
        raise ArgumentError(_OP, "sample_kwargs", shown(kwargs), f"{wanted}, or None")
    return list(several), list(by_name)


def want_callables(given: Sequence[Any]) -> bool:
    """Whether they train. ArgumentError for what is not callable, has hooks, or is partly in training."""
    for each in given:
        if not callable(each):
            raise ArgumentError(_OP, "modules", shown(each), "modules or functions")
        if not isinstance(each, nn.Module):
            continue
        if has_hooks(each):
            wanted = "one without hooks: a graph would hold or leave out what they do (capture_time_hooks)"
            raise ArgumentError(_OP, "modules", f"a {type(each).__name__} with hooks", wanted)
        if any(buffer.requires_grad for buffer in each.buffers()):
            raise ArgumentError(_OP, "modules", "a buffer that requires a gradient", "parameters alone do")
        if any(getattr(part, "delay_wgrad_compute", False) for part in each.modules()):
            wanted = "layers whose backward pass computes the weights' gradients"
            raise UnsupportedError(_OP, "delay_wgrad_compute", True, wanted)
    modes = {each.training for each in given if isinstance(each, nn.Module)} or {True}
    if len(modes) > 1:
        raise ArgumentError(_OP, "modules", "some of them in training mode", "all or none")
    return modes.pop()


def want_hooks(hooks: Any, callables: int) -> list[Hooks]:
    """``capture_time_hooks``, one mapping for each callable."""
    if hooks is None:
        return [{} for _ in range(callables)]
    wanted = f"{callables} of them, one for each module, None or a mapping of {', '.join(_HOOKS)}"
    if not isinstance(hooks, tuple | list) or len(hooks) != callables:
        raise ArgumentError(_OP, "capture_time_hooks", shown(hooks), wanted)
    for each in hooks:
        for kind, own in (
            ({} if each is None else each).items() if isinstance(each, Mapping | None) else [(each, 0)]
        ):
            if kind not in _HOOKS + _WITH_KWARGS or not isinstance(own, Mapping | set | list | tuple):
                raise ArgumentError(_OP, "capture_time_hooks", shown(kind), wanted)
            if kind in _HOOKS and not (isinstance(own, Mapping) and all(map(callable, own.values()))):
                raise ArgumentError(_OP, "capture_time_hooks", kind, "a mapping of ids to functions")
    return [each or {} for each in hooks]


def want_device(given: Sequence[Any], samples: Any, kwargs: Any) -> None:
    """BackendError without a CUDA device, and for tensors elsewhere. ArgumentError where ``torch.autocast``
    keeps casts, which a graph would not make anew."""
    wanted = "a CUDA device: a CPU has no graphs"
    if not torch.cuda.is_available():
        raise BackendError(_OP, "device", "no CUDA device", wanted)
    modules = [module for module in given if isinstance(module, nn.Module)]
    held_by = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    for tensor in (*held_by, *tree_leaves((samples, kwargs))):
        if isinstance(tensor, Tensor) and not tensor.is_cuda:
            raise BackendError(_OP, "modules, sample_args", f"a tensor on {tensor.device}", wanted)
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        wanted = "torch.autocast(cache_enabled=False): a graph would read a cast that is not made anew"
        raise ArgumentError(_OP, "torch.autocast", "one that keeps casts", wanted)


def plain_of(module: Any) -> Any:
    """What a module does without graphs: its own ``forward``; the function itself."""
    return module.forward if isinstance(module, nn.Module) else module


def parameters_of(module: Any) -> list[Tensor]:
    """A module's parameters; none for a function."""
    return [*module.parameters()] if isinstance(module, nn.Module) else []


def layers_of(module: Any) -> list[TransformerEngineBaseModule]:
    """The layers within a module that compute in FP8."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return [layer for layer in parts if isinstance(layer, TransformerEngineBaseModule)]
