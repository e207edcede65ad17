"""Operations that programs write themselves for ``te.ops``, with a forward and a backward of their own, and
functions that put fused ones in the place of several.

An operation of fp8kit is a module whose gradients autograd knows. One of a program's own says ``op_forward``
and ``op_backward`` (``fuser_forward`` and ``fuser_backward`` with extra inputs and outputs, or for several
operations at once). ``OperationFuser`` runs both kinds in a row, after the registered fusions have looked at
the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import flag, function
from fp8kit.autocast import current
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit_torch.te_compat.saved_tensors import prepare_for_saving, restore_from_saved

OperationFusionFunction = Callable[..., list[Any]]
_FORWARD: list[OperationFusionFunction] = []
_BACKWARD: list[OperationFusionFunction] = []
_BOTH: list[OperationFusionFunction] = []


class OperationContext:
    """What an operation's forward hands over to its backward: attributes, and tensors by
    ``save_for_backward``. ``requires_grad``: whether there will be a backward."""

    def __init__(self) -> None:
        self.to_save: tuple[Tensor | None, ...] = ()
        self.saved_tensors: tuple[Any, ...] = ()
        self.requires_grad = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, quantised ones too, as ``saved_tensors`` of backward."""
        self.to_save = tensors


class FusibleOperation:
    """Base of what ``te.ops.Sequential`` runs and fuses."""

    num_extra_inputs = 0
    num_extra_outputs = 0
    is_fused_op = False

    def num_quantizers(self, mode: str) -> int:
        """How many quantizers ``get_quantizer`` knows for the mode "forward" or "backward"."""
        return 0

    def get_quantizer(self, mode: str, index: int) -> Any:
        """A quantizer as the recipe of the autocast around says; outside of FP8 as the last one says that it
        ran by, None before that. ArgumentError for an index that there is not."""
        count = self.num_quantizers(mode)
        if mode not in ("forward", "backward") or not 0 <= index < count:
            got, wanted = f"{mode!r}, {index}", f"'forward' or 'backward', less than {count}"
            raise ArgumentError(f"{type(self).__name__}.get_quantizer", "mode, index", got, wanted)
        state = current()
        last = getattr(self, "last_recipe", None)
        recipe = last if state is None or not state.enabled else state.recipe
        return None if recipe is None else self._quantizer(recipe, mode, index)

    def get_input_quantizer(self) -> Any:
        """The quantizer of its input, that of ``get_quantizer("forward", 0)``; None where it casts none."""
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Any:
        """The quantizer of its output's gradient; None where it casts none."""
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    def _quantizer(self, recipe: Any, mode: str, index: int) -> Any:
        raise NotImplementedError


class BasicOperation(FusibleOperation, torch.nn.Module):
    """One operation. A subclass has a ``forward`` of its own, or ``op_forward`` and ``op_backward`` ::

        op_forward(ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer, **kwargs) -> output
        op_backward(ctx, grad_output) -> (grad_input, gradients of its parameters in order)

    Both quantizers are None: operations make what they want themselves.
    """

    def op_forward(self, ctx: OperationContext, input_: Tensor, **options: Any) -> Tensor:
        """See the class."""
        raise NotImplementedError(f"{type(self).__name__} has neither forward nor op_forward")

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Any, Iterable[Any]]:
        """See the class."""
        raise NotImplementedError(f"{type(self).__name__} has no op_backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, list[Sequence[Tensor]]]:
        """(output, of each basic operation its extra outputs), of ``op_forward``."""
        y = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return y, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Any, list[Iterable[Any]], list[Iterable[Any]]]:
        """(the input's gradient, of each basic operation those of its parameters, those of its extra
        inputs), of ``op_backward``."""
        dx, dparams = self.op_backward(basic_op_ctxs[0], grad_output)
        return dx, [dparams], [()]

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """The output, or (output, extra outputs...)."""
        return OperationFuser([self])(input, *extra_inputs, basic_op_kwargs=[kwargs])


class FusedOperation(FusibleOperation, torch.nn.Module):
    """Several basic operations at once. A subclass has ``fuser_forward``, ``fuser_backward`` or both, see
    ``BasicOperation``; a registered function puts it in their place."""

    is_fused_op = True

    def __init__(self, basic_ops: Iterable[Any]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        self.num_extra_inputs = sum(op.num_extra_inputs for op in self.basic_ops)
        self.num_extra_outputs = sum(op.num_extra_outputs for op in self.basic_ops)

    def forward(self, input: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Any = None) -> Any:
        """The output, or (output, extra outputs...), of the basic operations as they are fused."""
        return OperationFuser([self])(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)


def _register(name: str, known: list[OperationFusionFunction], func: Any, prepend: Any) -> None:
    function(name, "op_fusion_func", func)
    known.insert(0 if flag(name, "prepend", prepend) else len(known), func)


def register_forward_fusion(op_fusion_func: OperationFusionFunction, prepend: bool = False) -> None:
    """Let ``op_fusion_func(ops, recipe=)`` say which operations run forward: it is given a list of
    operations and returns one in which ``FusedOperation``s may stand for several. ``prepend``: before those
    that are registered."""
    _register("register_forward_fusion", _FORWARD, op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: OperationFusionFunction, prepend: bool = False) -> None:
    """``register_forward_fusion`` for backward."""
    _register("register_backward_fusion", _BACKWARD, op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: OperationFusionFunction, prepend: bool = False) -> None:
    """``register_forward_fusion`` for both, before those of one direction."""
    _register("register_forward_backward_fusion", _BOTH, op_fusion_func, prepend)


class OperationFuser:
    """Operations one after the other, fused as the registered functions say. ``ops``: a ``FusedOperation``
    stands for its basic operations."""

    def __init__(self, ops: Iterable[Any]) -> None:
        self.basic_ops: list[Any] = []
        for op in ops:
            self.basic_ops += op.basic_ops if isinstance(op, FusedOperation) else [op]

    def __call__(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> Any:
        """The output, or (output, extra outputs...). ``extra_inputs``: as many as the operations want, in
        order; ``basic_op_kwargs``: keyword arguments of each operation. ArgumentError for other numbers of
        them, UnsupportedError for a fusion of one direction over operations of fp8kit, whose gradients
        autograd knows."""
        given, options = _of_each(self.basic_ops, extra_inputs, basic_op_kwargs)
        x, made, start = input, [], 0
        for forward_ops, backward_ops in self._parts():
            stop = start + sum(len(_basic(op)) for op in forward_ops)
            own, inputs, kwargs = (part[start:stop] for part in (self.basic_ops, given, options))
            if forward_ops == backward_ops and len(forward_ops) == 1 and not _says(forward_ops[0], "forward"):
                x, *more = _tuple(forward_ops[0](x, *inputs[0], **kwargs[0]))
            else:
                run = _Run(own, forward_ops, backward_ops, kwargs)
                flat = [t for each in inputs for t in each], [p for op in own for p in op.parameters()]
                x, *more = _Apply.apply(run, x, *flat[0], *flat[1])
            made += more
            start = stop
        return (x, *made) if made else x

    def _parts(self) -> list[tuple[list[Any], list[Any]]]:
        """(operations of forward, of backward) of the shortest rows of basic operations that both have
        whole."""
        state = current()
        recipe = state.recipe if state is not None and state.enabled else None

        def fused(ops: list[Any], functions: list[OperationFusionFunction]) -> list[Any]:
            for each in functions:
                ops = list(each(ops, recipe=recipe))
            if [id(op) for own in ops for op in _basic(own)] != [id(op) for op in self.basic_ops]:
                got, wanted = "other operations", "the same basic operations in the same order"
                raise ArgumentError("ops.Sequential", "a registered fusion", got, wanted)
            return ops

        both = fused(self.basic_ops, _BOTH) if _BOTH else self.basic_ops
        forward_ops, backward_ops = (fused(both, own) if own else both for own in (_FORWARD, _BACKWARD))
        parts: list[tuple[list[Any], list[Any]]] = []
        forward_ops, backward_ops = list(forward_ops), list(backward_ops)
        while forward_ops:
            first, last = [forward_ops.pop(0)], [backward_ops.pop(0)]
            while (size := _size(first)) != (other := _size(last)):
                shorter, rest = (first, forward_ops) if size < other else (last, backward_ops)
                shorter.append(rest.pop(0))
            parts.append((first, last))
        return parts


def _of_each(
    modules: Sequence[Any],
    extra_inputs: tuple[Tensor, ...],
    op_kwargs: Sequence[Mapping[str, Any] | None] | None,
) -> tuple[list[tuple[Tensor, ...]], list[dict[str, Any]]]:
    """(extra inputs, keyword arguments) of each module. ArgumentError for other numbers of them."""
    options = [dict(each or {}) for each in ([None] * len(modules) if op_kwargs is None else op_kwargs)]
    if len(options) != len(modules):
        raise ArgumentError("ops.Sequential", "op_kwargs", len(options), f"{len(modules)} mappings")
    counts = [getattr(module, "num_extra_inputs", 0) for module in modules]
    if sum(counts) != len(extra_inputs):
        raise ArgumentError("ops.Sequential", "extra_inputs", len(extra_inputs), f"{sum(counts)} tensors")
    ends = accumulate(counts)
    return [extra_inputs[end - count : end] for count, end in zip(counts, ends, strict=True)], options


def _fuses(op: Any) -> bool:
    """Whether an operation is one that fusions may look at, or one that says itself what it does."""
    if not isinstance(op, FusibleOperation):
        return False
    own = op.is_fused_op or _says(op, "forward")
    return own or bool(_FORWARD or _BACKWARD or _BOTH)


def _basic(op: Any) -> list[Any]:
    return list(op.basic_ops) if isinstance(op, FusedOperation) else [op]


def _size(ops: list[Any]) -> int:
    return sum(len(_basic(op)) for op in ops)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _says(op: Any, direction: str) -> bool:
    """Whether an operation says itself what it does in that direction."""
    own = getattr(type(op), f"fuser_{direction}", None)
    if own is None or own is not getattr(BasicOperation, f"fuser_{direction}"):
        return own is not None
    return getattr(type(op), f"op_{direction}") is not getattr(BasicOperation, f"op_{direction}")


class _Run:
    """A row of operations that say themselves what they do."""

    def __init__(
        self, own: list[Any], forward_ops: list[Any], backward_ops: list[Any], kwargs: list[dict[str, Any]]
    ) -> None:
        self.own, self.forward_ops, self.backward_ops, self.kwargs = own, forward_ops, backward_ops, kwargs
        for direction, ops in (("forward", forward_ops), ("backward", backward_ops)):
            for op in ops:
                if not _says(op, direction):
                    wanted = "fusions of both directions (register_forward_backward_fusion) over such"
                    raise UnsupportedError(
                        "ops.Sequential", type(op).__name__, f"no fuser_{direction}", wanted
                    )
        self.contexts = [OperationContext() for _ in own]


class _Apply(torch.autograd.Function):
    """A ``_Run`` of x, extra inputs and parameters: (output, extra outputs...)."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: Tensor, *tensors: Tensor) -> Any:
        for own in run.contexts:
            own.requires_grad = any(ctx.needs_input_grad)
        y, made, start, rest = x, [], 0, iter(tensors)
        for op in run.forward_ops:
            stop = start + len(_basic(op))
            inputs = [tuple(next(rest) for _ in range(one.num_extra_inputs)) for one in run.own[start:stop]]
            y, more = op.fuser_forward(
                run.contexts[start:stop],
                y,
                basic_op_extra_inputs=inputs,
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=run.kwargs[start:stop],
            )
            made += [t for each in more for t in each]
            start = stop
        saved, ctx.shells = prepare_for_saving(*(t for own in run.contexts for t in own.to_save))
        ctx.save_for_backward(*saved)
        ctx.run = run
        y = y.detach() if y is x else y
        return (y, *made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *extras: Tensor | None) -> Any:  # type: ignore[override]
        run = ctx.run
        found, rest = iter(restore_from_saved(ctx.shells, ctx.saved_tensors)), iter(extras)
        for own in run.contexts:
            own.saved_tensors = tuple(next(found) for _ in own.to_save)
        given = [tuple(next(rest) for _ in range(one.num_extra_outputs)) for one in run.own]
        dparams: list[Any] = [None] * len(run.own)
        dextras: list[Any] = [None] * len(run.own)
        stop = len(run.own)
        for op in reversed(run.backward_ops):
            start = stop - len(_basic(op))
            grad, params, inputs = op.fuser_backward(
                run.contexts[start:stop], grad, basic_op_grad_extra_outputs=given[start:stop]
            )
            dparams[start:stop], dextras[start:stop] = params, inputs
            stop = start
        return None, grad, *(g for each in (*dextras, *dparams) for g in each)


class Sequential(torch.nn.Sequential):
    """Operations, and any other modules, one after the other. Operations that follow each other are fused as
    the registered functions say (``fp8kit_torch.fusion``)."""

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        op_kwargs: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> Any:
        """The result, or (the result, extra outputs...), in order. ``extra_inputs``: as many as the
        operations want, in order; ``op_kwargs``: keyword arguments for each module, None for none;
        Fp8kitError for others."""
        modules = list(self)
        inputs, options = _of_each(modules, extra_inputs, op_kwargs)
        x, made, start = input, [], 0
        while start < len(modules):
            stop = start + 1
            if _fuses(modules[start]):  # all that follow and are fused, too
                while stop < len(modules) and _fuses(modules[stop]):
                    stop += 1
            given = [t for each in inputs[start:stop] for t in each]
            if _fuses(modules[start]):
                kwargs: list[Any] = []
                for op, own in zip(modules[start:stop], options[start:stop], strict=True):
                    kwargs += [own] * len(_basic(op))
                y = OperationFuser(modules[start:stop])(x, *given, basic_op_kwargs=kwargs)
            else:
                y = modules[start](x, *given, **options[start])
            outputs = sum(getattr(module, "num_extra_outputs", 0) for module in modules[start:stop])
            x, *more = y if outputs else (y,)
            made += more
            start = stop
        return (x, *made) if made else x


__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "OperationContext",
    "OperationFuser",
    "OperationFusionFunction",
    "Sequential",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
