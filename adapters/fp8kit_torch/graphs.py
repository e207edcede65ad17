"""``make_graphed_callables``: modules whose forward and backward are replayed as CUDA graphs, FP8 state
included.

torch captures and replays. A graph reads scales and accumulates amaxes where they lie; the update of the
scales is left out of it and made after each replay as it is without a graph, so that modules inside and
outside of graphs are updated together, by one kernel.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit import inspection
from fp8kit.arguments import flag, integer
from fp8kit.autocast import current, touch_forward
from fp8kit.errors import BackendError, RecipeError, UnsupportedError
from fp8kit.recipe import Recipe
from fp8kit_torch import checks
from fp8kit_torch.arguments import defaults, only, refuse
from fp8kit_torch.autocast import autocast
from fp8kit_torch.checks import check, named, optional
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.state import ScalingState, finish_backward, held
from fp8kit_torch.torch_compat import tree_leaves

Forward = Callable[..., Any]


def make_graphed_callables(
    modules: nn.Module | tuple[nn.Module, ...],
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: object = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: object = None,
    cache_quantized_params: bool | None = None,
    _order: Any = None,
    _num_layers_per_chunk: Any = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Any = None,
    post_warmup_hook: Any = None,
    capture_time_hooks: Any = None,
) -> Any:
    """The same modules, whose forward from now on replays a graph captured with ``sample_args``; a tuple for
    a tuple.

    * ``modules``: on a CUDA device, without hooks, called with positional tensors of the sample's shapes. In
      the other mode (training or evaluation) than at the capture they run as they did.
    * ``sample_args``: tensors for the module, or a tuple of such tuples. ``sample_kwargs``: None only.
    * ``num_warmup_iters``, ``allow_unused_input``, ``pool``: torch's.
    * ``enabled``, ``calibrating``, ``recipe``: the autocast that is captured; ``fp8_enabled`` and so on are
      their deprecated names. Call a graphed module within an autocast of the same recipe; outside of any, its
      scales are updated at once.
    * ``amax_reduction_group``, ``cache_quantized_params``, their deprecated names, and all others: at their
      defaults only.

    Capture changes no parameter, gradient or FP8 state. Do not change the recipe's history length, or move or
    convert the modules, afterwards: a graph reads memory by address. BackendError without a CUDA device.
    """
    op, asked = "make_graphed_callables", locals()
    check(op, _RULES, asked)
    refuse(op, _NEUTRAL, asked)
    only(op, {name: (bool(asked[name]), False) for name in ("cache_quantized_params", "fp8_weight_caching")})
    given = modules if isinstance(modules, tuple) else (modules,)
    samples = sample_args if isinstance(modules, tuple) else (sample_args,)
    for module in given:
        checks.module(op, "modules", module)
    on, watching = bool(_either(asked, "enabled")), bool(_either(asked, "calibrating"))
    scope = autocast(on, watching, _either(asked, "recipe"))
    found = scope.recipe.fixed
    wanted = "a CUDA device: a CPU has no graphs"
    if not torch.cuda.is_available():
        raise BackendError(op, "device", "no CUDA device", wanted)
    held_by = (t for module in given for t in (*module.parameters(), *module.buffers()))
    for tensor in (*held_by, *tree_leaves(samples)):
        if isinstance(tensor, Tensor) and not tensor.is_cuda:
            raise BackendError(op, "modules, sample_args", f"a tensor on {tensor.device}", wanted)
    if found.by_layer:
        wanted = "a recipe that is the same for all layers; a graph of the whole step takes any"
        raise UnsupportedError(op, "recipe", found.short_name(), wanted)
    layers = [_layers(module) for module in given]
    # a capture must not find that a state is not there yet, or not as long as it should be
    stateful = found.history is not None and (on or watching)
    if found.history is not None and stateful:
        for layer in (layer for part in layers for layer in part):
            layer.prepare(found.history.length)
    plain = [module.forward for module in given]
    with _unchanged(layers), held(), scope, uncollected(), warnings.catch_warnings():
        # torch keeps its last warm-up's graph alive into the capture, and warns that it is on another stream
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
        torch.cuda.make_graphed_callables(given, samples, num_warmup_iters, allow_unused_input, pool)
    for module in given:
        for parameter in module.parameters():
            if parameter.requires_grad:
                # a replay writes gradients to the same memory each time: what is accumulated must not lie
                # there
                parameter.register_hook(torch.clone)
    if stateful:
        for module, own in zip(given, layers, strict=True):
            if own:
                module.forward = _updating(module, module.forward, own, found)  # type: ignore[method-assign]
    for module, own_forward in zip(given, plain, strict=True):
        shown = _shown(module.forward, own_forward, (on, watching, found))
        module.forward = shown  # type: ignore[method-assign]
    return modules


def _shown(graphed: Forward, plain: Forward, scope: tuple[bool, bool, Recipe]) -> Forward:
    """``graphed``, but ``plain`` in a step that the inspector looks at: a replay shows it nothing."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if inspection.inspector is None:
            return graphed(*args, **kwargs)
        with nullcontext() if current() is not None else autocast(*scope):
            return plain(*args, **kwargs)

    return forward


_RULES = {
    **named(
        optional(flag),
        "fp8_enabled fp8_calibrating enabled calibrating fp8_weight_caching cache_quantized_params",
    ),
    "num_warmup_iters": integer,
    "allow_unused_input": flag,
}
_NEUTRAL = defaults(
    make_graphed_callables,
    """sample_kwargs amax_reduction_group fp8_group _order _num_layers_per_chunk retain_graph_in_backward
    _reuse_graph_input_output_buffers clone_param_grads_on_return pre_warmup_hook post_warmup_hook
    capture_time_hooks""",
)


def _either(asked: Mapping[str, Any], name: str) -> Any:
    """An argument that has a deprecated name as well."""
    value, old = asked[name], asked[f"fp8_{name}"]
    if value is not None and old is not None:
        raise RecipeError("make_graphed_callables", f"fp8_{name}", old, f"None beside {name}")
    return old if value is None else value


def _layers(module: nn.Module) -> list[TransformerEngineBaseModule]:
    return [layer for layer in module.modules() if isinstance(layer, TransformerEngineBaseModule)]


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage is collected before and not within: what that frees, memory or another graph's, may end a
    capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _unchanged(layers: Sequence[Sequence[TransformerEngineBaseModule]]) -> Iterator[None]:
    """Whatever runs within leaves the layers' FP8 state as it is, in its memory."""
    states = {id(state): state for own in layers for layer in own for state in layer.fp8_meta.values()}
    before = {key: [part.clone() for part in state.parts] for key, state in states.items()}
    try:
        yield
    finally:
        for key, state in states.items():
            for part, value in zip(state.parts, before[key], strict=True):
                part.copy_(value)


class _Finish(torch.autograd.Function):
    """The identity; in backward the states are named for the update at the end of the pass."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, states: Sequence[ScalingState], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.recipe, ctx.states = recipe, states
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        for state in ctx.states:
            finish_backward(ctx.recipe.history, state)
        return (None, None, *grads)


def _updating(
    module: nn.Module, graphed: Forward, layers: list[TransformerEngineBaseModule], recipe: Recipe
) -> Forward:
    """``graphed``, and what a layer does about its state when it runs."""
    captured = module.training

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = graphed(*args, **kwargs)
        if module.training != captured:
            return out
        states = [layer.fp8_meta["scaling_fwd"] for layer in layers]
        scope = current()
        if scope is None or not (scope.enabled or scope.calibrating):
            ScalingState.commit_forward(recipe, states)
        elif scope.recipe != recipe:
            raise RecipeError("make_graphed_callables", "recipe", scope.recipe, f"{recipe}, as captured")
        else:
            for state in states:
                touch_forward(state, recipe, captured)
        if not torch.is_grad_enabled():
            return out
        flat = (out,) if isinstance(out, Tensor) else tuple(out)
        ended = _Finish.apply(recipe, [layer.fp8_meta["scaling_bwd"] for layer in layers], *flat)
        return ended[0] if isinstance(out, Tensor) else type(out)(ended)

    return forward
