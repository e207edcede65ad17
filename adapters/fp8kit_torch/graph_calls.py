"""A call of a module as CUDA graphs: one of its forward pass, one of its backward pass, and what a replay
copies to and from the memory that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError, AutogradError, BackendError, FormatError, ShapeError
from fp8kit_torch.once import once
from fp8kit_torch.torch_compat import tree_flatten, tree_unflatten

_OP = "make_graphed_callables"


class Graph:
    """CUDA work that is captured once, and launched again as a whole. ``pool``: the memory that graphs share,
    ``stream``: what is captured on."""

    def __init__(self, pool: Any, stream: Any) -> None:
        self._graph, self._pool, self._stream = torch.cuda.CUDAGraph(), pool, stream

    def capture(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives; its kernels are noted, and not run."""
        with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream):
            return work()

    def replay(self) -> None:
        """Launch what was captured, on the current stream."""
        self._graph.replay()

    def reset(self) -> None:
        """Let go of the graph and its memory."""
        self._graph.reset()


class GraphedCall:
    """One call of ``function`` with the sample's arguments.

    The sample's tensors are the memory that the graphs read: a replay copies its arguments there. Other
    arguments are those of the capture. ``parameters``: what else gets gradients. ``trains``: whether there is
    a backward pass.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Sequence[Tensor],
        args: Any,
        kwargs: Mapping[str, Any],
        trains: bool,
    ) -> None:
        self.function, self.trains = function, trains
        self.leaves, self._form = tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
        self.names = set(kwargs)
        self._at = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.parameters = [p for p in parameters if p.requires_grad]
        self.outputs: list[Any] = []
        self.gradients: list[Tensor | None] = []
        self.grad_outputs: list[Tensor | None] = []
        self.forward_graph: Any = None
        self.backward_graph: Any = None
        # the graph that casts the weights that micro-batches share, and what holds their memory
        self.cast_weights: Any = None
        self.kept: Any = None
        self.clones = True
        self.number = 0  # of the last replay

    @property
    def inputs(self) -> list[Tensor]:
        """The sample's tensors."""
        return [self.leaves[i] for i in self._at]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The sample, as the function is called with it."""
        return tree_unflatten(self.leaves, self._form)  # type: ignore[no-any-return]

    @property
    def output(self) -> Any:
        """What the function gave last."""
        return tree_unflatten(self.live, self._out_form)

    @property
    def kind(self) -> Any:
        """What calls have in common that may share their inputs' memory."""
        kinds = [(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in self.inputs]
        return repr(self._form), tuple(kinds)

    def share(self, other: GraphedCall) -> None:
        """Read the memory of ``other``'s inputs, which has the same ``kind``."""
        for at, tensor in zip(self._at, other.inputs, strict=True):
            self.leaves[at] = tensor

    @property
    def has_gradients(self) -> bool:
        """Whether an output depends on an input or a parameter that wants a gradient."""
        wanted = any(t.requires_grad for t in (*self.inputs, *self.parameters))
        return wanted and any(g is not None for g in self.grad_outputs)

    # --- eagerly, and while a graph is captured -------------------------------------------------------------

    def forward(self) -> list[Any]:
        """The outputs of the function, flat."""
        args, kwargs = self.arguments
        with torch.set_grad_enabled(self.trains):
            out = self.function(*args, **kwargs)
        outputs, self._out_form = tree_flatten(out)
        self.live = outputs
        return outputs  # type: ignore[no-any-return]

    def prepare_backward(self, shared: dict[Any, Tensor] | None = None) -> None:
        """Make the memory of the outputs' gradients, the same for calls with like outputs where it is
        ``shared``."""
        self.grad_outputs = []
        for at, out in enumerate(self.live):
            grad = None
            if isinstance(out, Tensor) and out.requires_grad:
                key = at, out.shape, out.stride(), out.dtype, out.device
                grad = None if shared is None else shared.get(key)
                grad = torch.zeros_like(out) if grad is None else grad
                if shared is not None:
                    shared[key] = grad
            self.grad_outputs.append(grad)

    def backward(self, retain: bool = False) -> list[Tensor | None]:
        """The gradients of the inputs and the parameters, None for what needs or has none."""
        if not self.has_gradients:
            return [None] * (len(self.inputs) + len(self.parameters))
        pairs = [(o, g) for o, g in zip(self.live, self.grad_outputs, strict=True) if g is not None]
        wanted = [t for t in (*self.inputs, *self.parameters) if t.requires_grad]
        outputs, grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, grads, retain, allow_unused=True))
        return [next(found) if t.requires_grad else None for t in (*self.inputs, *self.parameters)]

    def capture_forward(self, graph: Any) -> None:
        """The outputs lie in the graph's memory from then on."""
        self.outputs, self.forward_graph = graph.capture(self.forward), graph
        self.differentiable = [isinstance(o, Tensor) and o.requires_grad for o in self.outputs]

    def capture_backward(self, graph: Any, retain: bool) -> None:
        """So do the gradients; autograd's graph is let go of. A call without gradients has no graph."""
        if self.has_gradients:
            self.gradients, self.backward_graph = graph.capture(lambda: self.backward(retain)), graph
        self.close()

    def close(self) -> None:
        """Keep the outputs' memory, and nothing of what made them."""
        self.outputs = [o.detach() if isinstance(o, Tensor) else o for o in self.outputs]
        self.live = self.outputs

    # --- replayed -------------------------------------------------------------------------------------------

    def check(self, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call that is to be replayed. ArgumentError, ShapeError or FormatError where it is
        not like the captured one, BackendError where its graphs are gone."""
        if self.forward_graph is None:
            raise BackendError(_OP, "replay", "a call after reset()", "one before")
        missing = sorted(self.names - set(kwargs))
        more = sorted(name for name in set(kwargs) - self.names if kwargs[name] is not None)
        if missing or more:
            wanted = f"those of sample_kwargs: {', '.join(sorted(self.names)) or 'none'}"
            got = f"no {', '.join(missing)}" if missing else ", ".join(more)
            raise ArgumentError(_OP, "kwargs", got, wanted)
        own = {name: kwargs[name] for name in sorted(self.names)}
        leaves, form = tree_flatten((tuple(args), own))
        if form != self._form:
            wanted = "as many, in the same tuples and mappings, as captured"
            raise ArgumentError(_OP, "arguments", f"{len(leaves)} values", f"{len(self.leaves)}: {wanted}")
        for given, sample in zip(leaves, self.leaves, strict=True):
            if not isinstance(sample, Tensor):
                if isinstance(given, Tensor) or given != sample:
                    wanted = f"{shown(sample)}, as captured: a graph reads no value of Python"
                    raise ArgumentError(_OP, "arguments", shown(given), wanted)
            elif not isinstance(given, Tensor) or given.shape != sample.shape:
                raise ShapeError(_OP, "arguments", shown(given), f"shape {tuple(sample.shape)}, as captured")
            elif given.dtype != sample.dtype or given.device != sample.device:
                got = f"{given.dtype} on {given.device}"
                raise FormatError(_OP, "arguments", got, f"{sample.dtype} on {sample.device}, as captured")
            elif (
                given.requires_grad and torch.is_grad_enabled() and not (self.trains and sample.requires_grad)
            ):
                mode = (
                    "a sample without one" if self.trains else "evaluation mode, which has no backward pass"
                )
                wanted = f"one that requires none: the capture was with {mode}"
                raise ArgumentError(_OP, "arguments", "a tensor that requires a gradient", wanted)
        return [leaves[i] for i in self._at]

    def replay(
        self, tensors: Sequence[Tensor], first: bool, around: Callable[[bool], AbstractContextManager[None]]
    ) -> Any:
        """The output of a call with these ``tensors``, in memory that the next replay writes anew. ``first``:
        of micro-batches that share the weights' casts, which are made now. ``around``: called with ``first``,
        a context of the backward pass."""
        found = iter(_Replay.apply(self, first, around, *tensors, *self.parameters))
        out = [next(found) if isinstance(o, Tensor) else o for o in self.outputs]
        return tree_unflatten(out, self._out_form)

    def reset(self) -> None:
        """Let go of the graphs and of all that they hold in memory."""
        for graph in (self.forward_graph, self.backward_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = self.cast_weights = self.kept = None
        self.outputs, self.gradients, self.grad_outputs, self.live = [], [], [], []
        self.leaves = [None] * len(self.leaves)


def _put(target: Tensor, value: Tensor) -> None:
    """Copy, unless it lies there already."""
    if target.data_ptr() != value.data_ptr():
        target.copy_(value)
    elif target.stride() != value.stride():  # the same memory in another order
        target.copy_(value.clone())


def _is_placeholder(gradient: Tensor) -> bool:
    """Whether it is one number for all elements, as what stands for a gradient in ``main_grad``."""
    return gradient.numel() > 1 and not any(gradient.stride())


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: GraphedCall, first: bool, around: Callable[[bool], Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = call.inputs
        ctx.leaves = [value.is_leaf for value in tensors[: len(inputs)]]
        for target, value in zip(inputs, tensors[: len(inputs)], strict=True):
            _put(target.detach(), value)
        if first and call.cast_weights is not None:
            call.cast_weights.replay()
        call.forward_graph.replay()
        call.number += 1
        ctx.call, ctx.number, ctx.around = call, call.number, partial(around, first)
        outputs = tuple([o.detach() for o in call.outputs if isinstance(o, Tensor)])
        there = [d for d, o in zip(call.differentiable, call.outputs, strict=True) if isinstance(o, Tensor)]
        ctx.mark_non_differentiable(*[o for o, has in zip(outputs, there, strict=True) if not has])
        return outputs

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call: GraphedCall = ctx.call
        if call.backward_graph is None or ctx.number != call.number:
            got = "reset() since" if call.backward_graph is None else "another call of the same graph since"
            raise AutogradError(_OP, "backward", got, "the backward pass of a graph's last call")
        there = [t for t, o in zip(call.grad_outputs, call.outputs, strict=True) if isinstance(o, Tensor)]
        for target, value in zip(there, grads, strict=True):
            if target is not None:
                _put(target, value)
        with ctx.around():
            call.backward_graph.replay()
        found: list[Any] = [None if g is None else g.detach() for g in call.gradients]
        for i, leaf in enumerate(ctx.leaves):  # which would keep the graph's memory as their own gradient
            if leaf and found[i] is not None:
                found[i] = found[i].clone()
        if call.clones:
            inputs = len(call.inputs)
            found[inputs:] = [g if g is None or _is_placeholder(g) else g.clone() for g in found[inputs:]]
        return None, None, None, *found
