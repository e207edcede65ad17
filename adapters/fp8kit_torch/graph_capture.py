"""How calls are warmed up and captured as CUDA graphs, in the order of a schedule."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.autocast import current
from fp8kit.errors import ArgumentError
from fp8kit_torch.graph_calls import Graph, GraphedCall
from fp8kit_torch.graph_schedule import Schedule
from fp8kit_torch.module import TransformerEngineBaseModule

_OP = "make_graphed_callables"
Layers = Sequence[TransformerEngineBaseModule]
Hooks = Mapping[str, Mapping[Any, Any]]


@dataclass
class Capture:
    """``calls`` of ``callables``, whose ``layers`` compute in FP8, and the ``hooks`` of each. ``caching``:
    micro-batches share the weights' casts."""

    callables: Sequence[Callable[..., Any]]
    schedule: Schedule
    calls: Sequence[GraphedCall]
    layers: Sequence[Layers]
    hooks: Sequence[Hooks]
    caching: bool

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def warm_up(self, rounds: int, allow_unused: bool, before: Any, after: Any) -> None:
        """Run every pass ``rounds`` times, so that what is made at first use is there. ``before``,
        ``after``: functions to call, or None. ArgumentError for an input that has no gradient, unless that is
        allowed."""
        with _on(self.stream):
            if before is not None:
                before()
            for number in range(max(rounds, 1) if self.caching else rounds):
                with self._microbatch(number == 0):
                    self._round(allow_unused)
            if after is not None:
                after()
        for call in self.calls:
            call.live = []
        gc.collect()

    def _round(self, allow_unused: bool) -> None:
        for number, forward in self.schedule.passes:
            call = self.calls[number]
            if forward:
                self._forward(number, call.forward)
            elif call.trains:
                call.prepare_backward()
                found = self._backward(number, call.backward)
                for i, (tensor, gradient) in enumerate(zip(call.inputs, found, strict=False)):
                    if tensor.requires_grad and gradient is None and not allow_unused:
                        wanted = "an output that depends on it, or allow_unused_input=True"
                        raise ArgumentError(_OP, "sample_args", f"tensor {i}, which has no gradient", wanted)

    def capture(self, pool: Any, retain: bool, reuse: bool) -> None:
        """Capture every pass. ``retain``: backward keeps what forward saved; ``reuse``: calls share the
        memory of their outputs' gradients."""
        shared: dict[Any, Tensor] | None = {} if reuse else None
        with self._microbatch(False):
            if self.caching:
                self._capture_casts()
            for number, forward in self.schedule.passes:
                call, graph = self.calls[number], Graph(pool, self.stream)
                if forward:
                    self._forward(number, lambda call=call, graph=graph: call.capture_forward(graph))
                elif call.trains:
                    call.prepare_backward(shared)
                    self._backward(
                        number, lambda call=call, graph=graph: call.capture_backward(graph, retain)
                    )
        for call in self.calls:
            call.close()

    # --- weights that micro-batches share -------------------------------------------------------------------

    @contextmanager
    def _microbatch(self, first: bool) -> Iterator[None]:
        """Layers run as in a first micro-batch, or in a later one, where these share the weights' casts."""
        whole = [layer for own in self.layers for layer in own] if self.caching else []
        for layer in whole:
            layer.microbatch = first
        try:
            yield
        finally:
            for layer in whole:
                layer.microbatch = None

    def _capture_casts(self) -> None:
        """For each callable a graph that casts its weights to where the warm-up's casts lie. These graphs
        have memory of their own: they run between any two others."""
        pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        made = []
        for own in self.layers:
            kept = [(layer, layer._weights.arrays) for layer in own if layer._weights is not None]
            graph = Graph(pool, self.stream)
            graph.capture(lambda kept=kept: [_cast_into(layer, arrays) for layer, arrays in kept])
            made.append((graph, kept))
        for call, owner in zip(self.calls, self.schedule.owners, strict=True):
            call.cast_weights, call.kept = made[owner]

    # --- hooks ----------------------------------------------------------------------------------------------

    def _forward(self, number: int, run: Callable[[], Any]) -> None:
        """``run`` the forward pass of a call, between the hooks of its callable."""
        owner, call = self.schedule.owners[number], self.calls[number]
        hooks, own = self.hooks[owner], self.callables[owner]
        args, kwargs = call.arguments
        named = hooks.get("forward_pre_hooks_with_kwargs", ())
        for key, hook in hooks.get("forward_pre_hooks", {}).items():
            _silent("forward_pre_hooks", hook(own, args, kwargs) if key in named else hook(own, args))
        run()
        named, out = hooks.get("forward_hooks_with_kwargs", ()), call.output
        for key, hook in hooks.get("forward_hooks", {}).items():
            _silent("forward_hooks", hook(own, args, kwargs, out) if key in named else hook(own, args, out))

    def _backward(self, number: int, run: Callable[[], Any]) -> Any:
        """``run`` the backward pass of a call, between the hooks of its callable."""
        owner, call = self.schedule.owners[number], self.calls[number]
        hooks, own = self.hooks[owner], self.callables[owner]
        into = tuple(call.grad_outputs)
        for hook in hooks.get("backward_pre_hooks", {}).values():
            _silent("backward_pre_hooks", hook(own, into))
        found = run()
        for hook in hooks.get("backward_hooks", {}).values():
            _silent("backward_hooks", hook(own, tuple(call.gradients if found is None else found), into))
        return found


def _silent(kind: str, found: Any) -> None:
    if found is not None:
        wanted = "functions that return None: a replay would not know of what they change"
        raise ArgumentError(_OP, "capture_time_hooks", f"{kind} with a result", wanted)


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Work within runs on ``stream``, behind all before it; what follows waits for it."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _cast_into(layer: TransformerEngineBaseModule, arrays: Mapping[str, Tensor]) -> None:
    """Cast a layer's weights anew, as the first micro-batch of a step does, into ``arrays``."""
    state = current()
    assert state is not None
    recipe, weights = state.recipe, layer.weight_inputs()
    inputs = layer.autocast_inputs({"x": next(iter(weights.values())), **weights})
    binding = layer.no_binding
    if recipe.history is not None:
        binding = layer.bind_state(recipe, layer.training, layer.training or state.calibrating, None)
    made = layer.cast_weights(layer._fp8_of(recipe), "none", inputs, binding)
    for name, array in arrays.items():
        array.copy_(made[name])


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
def unchanged(callables: Sequence[Callable[..., Any]], layers: Sequence[Layers]) -> Iterator[None]:
    """Whatever runs within leaves the layers' FP8 state, what parameters have as ``main_grad``, buffers and
    the random state as they are, in their memory."""
    states = {id(state): state for own in layers for layer in own for state in layer.fp8_meta.values()}
    modules = [module for module in callables if isinstance(module, nn.Module)]
    parameters: list[Any] = [p for module in modules for p in module.parameters()]
    mains = [p.main_grad for p in parameters if isinstance(getattr(p, "main_grad", None), Tensor)]
    flagged = [(p, p.grad_added_to_main_grad) for p in parameters if hasattr(p, "grad_added_to_main_grad")]
    buffers = [b for module in modules for b in module.buffers()]
    parts = [part for state in states.values() for part in state.parts] + mains + buffers
    before = [part.clone() for part in parts]
    random = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        with torch.no_grad():
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)
        for parameter, flag in flagged:
            parameter.grad_added_to_main_grad = flag
        if random is not None:
            torch.cuda.set_rng_state(random)
