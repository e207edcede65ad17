"""``make_graphed_callables``: modules whose forward and backward are replayed as CUDA graphs, FP8 state
included.

A graph reads scales and accumulates amaxes where they lie; the update of the scales is left out of it and
made after each replay as it is without a graph, so that modules inside and outside of graphs are updated
together, by one kernel. Weights that micro-batches share in FP8 (``cache_quantized_params``) are cast by a
graph of their own, which runs before a first micro-batch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from fp8kit import inspection
from fp8kit.arguments import named_well, shown
from fp8kit.autocast import current, touch_forward
from fp8kit.errors import ArgumentError, BackendError, RecipeError, UnsupportedError
from fp8kit.recipe import Recipe
from fp8kit_torch.autocast import autocast, reduction_group
from fp8kit_torch.checks import check
from fp8kit_torch.graph_arguments import (
    RULES,
    either,
    layers_of,
    parameters_of,
    plain_of,
    samples_of,
    want_callables,
    want_device,
    want_hooks,
)
from fp8kit_torch.graph_calls import GraphedCall
from fp8kit_torch.graph_capture import Capture, unchanged, uncollected
from fp8kit_torch.graph_schedule import Schedule, in_turn, interleaved, shared_inputs
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.state import ScalingState, finish_backward, held
from fp8kit_torch.te_compat.capture import set_capture_end, set_capture_start

_OP = "make_graphed_callables"


def _schedule(order: Any, per_chunk: Any, reuse: bool, modules: int, samples: int) -> Schedule:
    """The order of the passes. ArgumentError for arguments that do not go together."""
    if order is not None:
        return interleaved(order, per_chunk, modules, samples)
    if reuse or per_chunk is not None:
        name = "_reuse_graph_input_output_buffers" if reuse else "_num_layers_per_chunk"
        raise ArgumentError(_OP, name, "given", "_order beside it")
    if samples != modules:
        raise ArgumentError(_OP, "sample_args", f"{samples} of them", f"one for each of {modules} modules")
    return in_turn(modules)


@named_well
def make_graphed_callables(
    modules: Callable[..., Any] | tuple[Callable[..., Any], ...],
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
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Any = None,
) -> Any:
    """The same modules, whose forward from now on replays a graph captured with ``sample_args``; a tuple for
    a tuple. With ``_order`` a function for each sample instead.

    * ``modules``: on a CUDA device, all training or all in evaluation mode, without hooks, or functions of
      tensors. In the other mode than at the capture modules run as they did. Captured in evaluation mode
      there is no backward pass.
    * ``sample_args``: tensors for the module, or a tuple of such tuples: the memory that the graphs read,
      where calls copy their arguments. What is no tensor is a part of the capture, and the same in each call.
    * ``sample_kwargs``: a mapping of further arguments, or a tuple of such.
    * ``num_warmup_iters``, ``allow_unused_input``, ``pool``: torch's. ``retain_graph_in_backward``: the
      captured backward passes keep what forward saved.
    * ``enabled``, ``calibrating``, ``recipe``, ``amax_reduction_group``: the autocast that is captured;
      ``fp8_enabled`` and so on are their deprecated names. Call a graphed module within an autocast of the
      same recipe; outside of any, its scales are updated at once.
    * ``cache_quantized_params`` (``fp8_weight_caching``): micro-batches share the weights' casts. Calls then
      say ``is_first_microbatch``: True casts the weights, and overwrites ``main_grad``.
    * ``_order``, ``_num_layers_per_chunk``: an interleaved pipeline, see ``graph_schedule.interleaved``.
      ``_reuse_graph_input_output_buffers``: calls that are never open at a time share their inputs' memory.
    * ``clone_param_grads_on_return``: False hands out the graphs' own memory as the parameters' gradients: to
      be read before the next replay.
    * ``pre_warmup_hook``, ``post_warmup_hook``: called before and after all warm-up iterations.
      ``capture_time_hooks``: for each module None or a mapping of "forward_pre_hooks", "forward_hooks",
      "backward_pre_hooks", "backward_hooks" to (id -> function), called in the warm-up and beside the
      capture, never by a replay; ids in "forward_pre_hooks_with_kwargs" and "forward_hooks_with_kwargs" get
      the keyword arguments too. They return None.

    What is returned has a method ``reset()``: the graphs and their memory are let go, and a module runs as
    it did. A replay writes its outputs to the same memory each time, and a backward pass is that of a graph's
    last call: AutogradError for another one.

    Capture changes no parameter, gradient, random state or FP8 state. Do not change the recipe's history
    length, or move or convert the modules, afterwards: a graph reads memory by address. BackendError without
    a CUDA device. ArgumentError for what does not fit, at the capture and at each call. Source of names and
    rules: Transformer Engine.
    """
    asked = locals()
    check(_OP, RULES, asked)
    one = not isinstance(modules, tuple)
    given: tuple[Any, ...] = (modules,) if one else tuple(modules)  # type: ignore[arg-type]
    samples, kwargs = samples_of(one, sample_args, sample_kwargs)
    reuse = bool(_reuse_graph_input_output_buffers)
    schedule = _schedule(_order, _num_layers_per_chunk, reuse, len(given), len(samples))
    trains = want_callables(given)
    hooks = want_hooks(capture_time_hooks, len(given))
    on, watching = bool(either(asked, "enabled")), bool(either(asked, "calibrating"))
    caching = bool(either(asked, "cache_quantized_params", "fp8_weight_caching"))
    group = either(asked, "amax_reduction_group", "fp8_group")
    scope = autocast(on, watching, either(asked, "recipe"), group)
    found = scope.recipe.fixed
    want_device(given, samples, kwargs)
    if found.by_layer:
        wanted = "a recipe that is the same for all layers; a graph of the whole step takes any"
        raise UnsupportedError(_OP, "recipe", found.short_name(), wanted)
    calls = [
        GraphedCall(plain_of(given[owner]), parameters_of(given[owner]), args, named, trains)
        for owner, args, named in zip(schedule.owners, samples, kwargs, strict=True)
    ]
    if reuse:
        for call, other in zip(calls, shared_inputs(schedule, [call.kind for call in calls]), strict=True):
            call.share(calls[other])
    layers = [layers_of(module) for module in given]
    # a capture must not find that a state is not there yet, or not as long as it should be
    stateful = found.history is not None and (on or watching)
    if found.history is not None and stateful:
        for layer in (layer for own in layers for layer in own):
            layer.prepare(found.history.length)
    capture = Capture(given, schedule, calls, layers, hooks, caching and on)
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    set_capture_start()
    try:
        with unchanged(given, layers), held(), scope, uncollected(), warnings.catch_warnings():
            # torch keeps its last warm-up's graph alive into the capture, and warns that it is on another
            # stream
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
            capture.warm_up(num_warmup_iters, bool(allow_unused_input), pre_warmup_hook, post_warmup_hook)
            capture.capture(pool, bool(retain_graph_in_backward), reuse)
    finally:
        set_capture_end()
    graphed = []
    for call, owner in zip(calls, schedule.owners, strict=True):
        call.clones = bool(clone_param_grads_on_return)
        graphed.append(_Graphed(given[owner], call, layers[owner], (on, watching, found), stateful, caching))
    if _order is not None:
        return tuple(graphed)
    for each in graphed:
        each.take_over()
    back = [each.shown for each in graphed]
    return back[0] if one else tuple(back)


class _Graphed:
    """What a call of a module or function (``of``) does from now on. ``layers``: within it. ``scope``:
    enabled, calibrating and recipe at the capture; ``stateful``: whether scales are updated; ``caching``:
    whether calls say ``is_first_microbatch``."""

    def __init__(
        self,
        of: Callable[..., Any],
        call: GraphedCall,
        layers: Sequence[TransformerEngineBaseModule],
        scope: tuple[bool, bool, Recipe],
        stateful: bool,
        caching: bool,
    ) -> None:
        self.call, self.layers, self.scope, self.caching = call, layers, scope, caching
        self.module = of if isinstance(of, nn.Module) else None
        self._own = None if self.module is None else vars(of).get("forward")
        self._states = [dict(layer.fp8_meta) for layer in layers] if stateful else []
        self._histories = [[s.amax_history for s in states.values()] for states in self._states]

    def take_over(self) -> None:
        """Be the module's ``forward``."""
        if self.module is not None:
            module: Any = self.module
            module.forward, module.reset = self, lambda: self.reset()

    @property
    def shown(self) -> Any:
        """The module, or this object for a function."""
        return self if self.module is None else self.module

    def reset(self) -> None:
        """Let go of the graphs and their memory. A module runs as it did; a function raises BackendError."""
        self.call.reset()
        if self.module is not None and vars(self.module).get("forward") is self:
            del self.module.forward, self.module.reset
            if self._own is not None:
                self.module.forward = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module has no graphs."""
        copied = memo.get(id(self.module))
        return self if copied is None else MethodType(type(copied).forward, copied)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A replay; the module's own forward where the inspector looks, which a replay shows nothing, or
        in the other mode than at the capture."""
        if inspection.hooks.inspector is not None:
            with nullcontext() if current() is not None else autocast(*self.scope):
                return self.call.function(*args, **kwargs)
        if self.module is not None and self.module.training != self.call.trains:
            return self.call.function(*args, **kwargs)
        first = kwargs.pop("is_first_microbatch", None) if self.caching else False
        if not isinstance(first, bool):
            wanted = "True or False: cache_quantized_params asks for it in each call"
            raise ArgumentError(_OP, "is_first_microbatch", shown(first), wanted)
        tensors, within = self.call.check(args, kwargs), self._want_scope()
        out = self.call.replay(tensors, first, self._around)
        if self._states:
            states = [states["scaling_fwd"] for states in self._states]
            if within:
                for state in states:
                    state.group = reduction_group()
                    touch_forward(state, self.scope[2], self.call.trains)
            else:
                ScalingState.commit_forward(self.scope[2], states)
        return out

    def _want_scope(self) -> bool:
        """Whether the call is within an autocast, of the captured recipe. RecipeError for one of another, and
        BackendError where the states are no longer those of the capture."""
        on, watching, recipe = self.scope
        for layer, states, histories in zip(self.layers, self._states, self._histories, strict=False):
            now = layer.fp8_meta
            same = all(now.get(name) is state for name, state in states.items())
            if not same or any(
                s.amax_history is not h for s, h in zip(states.values(), histories, strict=True)
            ):
                got = "another FP8 state than at the capture, in other memory"
                raise BackendError(_OP, "fp8_meta", got, "a capture after load_state_dict")
        scope = current()
        if scope is None or not (scope.enabled or scope.calibrating):
            return False
        if (on or watching) and scope.recipe != recipe:
            raise RecipeError(_OP, "recipe", scope.recipe, f"{recipe}, as captured")
        return True

    @contextmanager
    def _around(self, first: bool) -> Iterator[None]:
        """What a backward pass does beside its kernels. ``first``: of the micro-batches of a step."""
        fused = [layer for layer in self.layers if layer.fuse_wgrad_accumulation]
        weights: list[Any] = [w for layer in fused for w in layer.weight_inputs().values() if w.requires_grad]
        if first:  # the captured pass adds
            for weight in weights:
                weight.main_grad.zero_()
        yield
        for weight in weights:
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
        history: Any = self.scope[2].history
        finish_backward([(history, states["scaling_bwd"], None) for states in self._states])
