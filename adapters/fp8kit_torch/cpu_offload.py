"""``get_cpu_offload_context``: what layers keep for backward waits in pinned host memory, copied there and
back beside the computation (``offloading``)."""

from __future__ import annotations

from contextlib import ContextDecorator, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fp8kit.arguments import flag, integer, named_well, optional, shown
from fp8kit.errors import ArgumentError
from fp8kit.layers.arguments import size
from fp8kit_torch.checks import check, named
from fp8kit_torch.offloading import (
    OPEN,
    ManualOffloadSynchronizer,
    OffloadableLayer,
    OffloadSynchronizer,
    mark_not_offload,
)

_OP = "get_cpu_offload_context"


class _Context(ContextDecorator):
    def __init__(self, synchronizer: OffloadSynchronizer) -> None:
        self.synchronizer, self.layer, self._hooks = synchronizer, None, None

    layer: OffloadableLayer | None
    _hooks: saved_tensors_hooks | None

    def __enter__(self) -> _Context:
        if self._hooks is not None:
            wanted = "one layer at a time: the context is open"
            raise ArgumentError(_OP, "context", "a context within itself", wanted)
        self.layer = self.synchronizer.fwd_step()
        self._hooks = saved_tensors_hooks(self.synchronizer.push_tensor, self.synchronizer.pop_tensor)
        self._hooks.__enter__()
        OPEN.depth += 1
        OPEN.weights += self.synchronizer.offloads_weights
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        assert hooks is not None
        OPEN.depth -= 1
        OPEN.weights -= self.synchronizer.offloads_weights
        hooks.__exit__(kind, *error)
        self.synchronizer.end_forward(kind is None)

    def synchronize(self, tensor: Tensor) -> Tensor:
        """The output of the layer that was called last, as it is: its backward pass is noticed here."""
        layer = self.layer
        if layer is not None and isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda grads: self.synchronizer.bwd_step(layer))
        return tensor


def _stream(operation: str, name: str, value: Any) -> None:
    if not isinstance(value, torch.cuda.Stream):
        raise ArgumentError(operation, name, shown(value), "a torch.cuda.Stream or None")


_RULES = {
    **named(
        flag,
        """enabled offload_activations offload_weights double_buffering manual_synchronization
        retain_pinned_cpu_buffers""",
    ),
    "num_layers": optional(integer),
    "model_layers": size,
    "offload_stream": optional(_stream),
}


@named_well
def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, ...]:
    """(a context around each layer's call, a function that each layer's output goes through) ::

        context, synchronize = get_cpu_offload_context(True, num_layers=2, model_layers=len(layers))
        for layer in layers:
            with context:
                x = layer(x)
            x = synchronize(x)

    What the first ``num_layers`` of ``model_layers`` layers save for backward goes to pinned host memory and
    comes back before it is read, on a stream of its own: at most ``model_layers - num_layers`` layers, at
    least one, are on the device, and the one that is being copied. The gradients have the bits they have
    without. Any layers of torch's autograd; FP8 weights of ``is_first_microbatch``, tensors of less than 256
    Ki elements and those of ``mark_not_offload`` stay.

    * ``enabled``: False gives a context and a function that do nothing.
    * ``offload_activations``: False: what layers save stays. ``offload_weights``: the parameters of the
      modules that are called in the context go and come in the same way, as soon as the layer's backward pass
      needs them; meanwhile a parameter reads as NaN outside of its modules. Those that share memory with
      other tensors stay, as do FP8 weights and those of graphed modules. Transformer Engine accepts it, warns
      and offloads none.
    * ``double_buffering``: one layer more is on the device, so that a layer's copy to the host has the whole
      time of the next layer.
    * ``manual_synchronization``: a third value is returned, on which the user calls
      ``start_offload_layer(i)``, ``release_activation_forward_gpu_memory(i)`` and ``start_reload_layer(i)``;
      ``num_layers`` is not looked at. For pipelines, whose backward passes come in another order.
    * ``retain_pinned_cpu_buffers``: host buffers are used again in later passes. ``offload_stream``: for the
      copies; None: one of our own for each device.

    ArgumentError for what is out of its range. Source of names and rules: Transformer Engine.
    """
    check(_OP, _RULES, locals())
    if not enabled:
        return nullcontext(), _same
    if not offload_activations and not offload_weights:
        wanted = "True, or offload_weights=True: else there is nothing to offload"
        raise ArgumentError(_OP, "offload_activations", False, wanted)
    what = offload_activations, offload_weights
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(model_layers, retain_pinned_cpu_buffers, offload_stream, *what)
        context = _Context(manual)
        return context, context.synchronize, manual
    layers = 0 if num_layers is None else num_layers
    if layers >= model_layers:
        wanted = f"at most {model_layers - 1}: the last layer's activations are read at once"
        raise ArgumentError(_OP, "num_layers", layers, wanted)
    held = retain_pinned_cpu_buffers, offload_stream
    context = _Context(OffloadSynchronizer(model_layers, layers, *held, *what, double_buffering))
    return context, context.synchronize


def _same(tensor: Tensor) -> Tensor:
    return tensor


def is_cpu_offload_enabled() -> bool:
    """Whether a context of ``get_cpu_offload_context`` is open in this thread."""
    return OPEN.depth > 0


def mark_activation_offload(*tensors: Tensor) -> None:
    """Accepted: within a context whatever a layer saves is offloaded."""


def start_offload(*tensors: Tensor, offload_base_tensor: bool = False) -> None:
    """Accepted: copies begin when the layer's forward pass has ended."""


__all__ = [
    "ManualOffloadSynchronizer",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_activation_offload",
    "mark_not_offload",
    "start_offload",
]
