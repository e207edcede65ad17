"""User-defined functions on the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.autograd import tape
from fp8kit.autograd.tape import Node
from fp8kit.autograd.tensors import Tensor, like, on_tape, owned, unchanged
from fp8kit.errors import AutogradError


class Context:
    """What a Function's forward leaves for its backward: any attributes, and ``saved``, set by ``save``."""

    def __init__(self) -> None:
        self.saved: tuple[Any, ...] = ()

    def save(self, *values: Any) -> None:
        """Keep values for backward, arrays of any shape and dtype or anything else; they come back as
        ``saved``. A value that is changed in place later is not found out: no error."""
        self.saved = values


class Function:
    """A differentiable function of your own: subclass it with ``forward`` and ``backward``, call it with
    ``apply``.

    ``forward(context, *inputs)`` gets the inputs in their device's library (NumPy or CuPy; what is no Tensor
    comes as it is) and returns one array or a tuple. ``backward(context, *cotangents)`` gets an array per
    output, not to be written to (others may share it), and returns one per input (None where there is no
    gradient), of the input's shape and dtype. A class without ``backward`` raises AutogradError when a
    gradient is wanted; so does backward where an input or output that was ``context.save``d was changed in
    place by its Tensor since.
    """

    @staticmethod
    def forward(context: Context, *inputs: Any) -> Any:
        """Compute the outputs: an array or a tuple of them, of any shape and dtype. Errors raised here reach
        the caller of ``apply``."""
        raise NotImplementedError

    @staticmethod
    def backward(context: Context, *cotangents: Any) -> Any:
        """Compute the inputs' gradients: for each input an array of its shape and dtype, or None.
        ``cotangents``: an array for each output, of the output's shape and dtype. ShapeError for a gradient
        that does not fit, AutogradError for another number of them."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """Call the function on Tensors and other values; returns a Tensor per output. Raises AutogradError
        for a missing backward."""
        tracked = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
        recorded = tape.is_grad_enabled() and any(tracked)
        unrecorded = tape.probe()
        if unrecorded is not None:
            unrecorded.wanted |= any(tracked)
            unrecorded.used += [
                unchanged(cls.__name__, f"input {i}", x) for i, x in enumerate(inputs) if tracked[i]
            ]
        if recorded and cls.backward is Function.backward:
            raise AutogradError(
                f"{cls.__name__}: has no backward, but input {tracked.index(True)} requires a gradient"
            )
        context = Context()
        handed = [x.data if isinstance(x, Tensor) else x for x in inputs]
        with tape.no_grad():
            out = cls.forward(context, *handed)
        several = isinstance(out, tuple)
        outs = out if several else (out,)
        results = [cls._result(o, inputs, handed) for o in outs]
        if recorded:
            kept = {id(value) for value in context.saved}
            watched = [
                unchanged(cls.__name__, f"{kind} {i}", tensor)
                for kind, tensors, own in (("input", inputs, handed), ("output", results, outs))
                for i, (tensor, array) in enumerate(zip(tensors, own, strict=True))
                if isinstance(tensor, Tensor) and id(array) in kept
            ]
            cls._record(context, inputs, tracked, results, watched)
        return tuple(results) if several else results[0]

    @staticmethod
    def _result(out: Any, inputs: tuple[Any, ...], handed: list[Any]) -> Tensor:
        """Returns a Tensor over an output; one that is an input's array shares its count of changes."""
        result = Tensor(arrays.as_view(out, "Function.apply", "what forward returned"))
        for x, array in zip(inputs, handed, strict=True):
            if isinstance(x, Tensor) and array is out:
                return x._sharing(result)
        return result

    @classmethod
    def _record(
        cls,
        context: Context,
        inputs: tuple[Any, ...],
        tracked: list[bool],
        results: list[Tensor],
        watched: list[Callable[[], None]],
    ) -> None:
        edges = [x.edge() if t else None for x, t in zip(inputs, tracked, strict=True)]
        metas = [(r.view.shape, r.view.dtype, r.view.device) for r in results]

        def backward(cotangents: list[ArrayView | None]) -> list[ArrayView | None]:
            for check in watched:
                check()
            filled = [
                arrays.zeros(*meta) if g is None else g for g, meta in zip(cotangents, metas, strict=True)
            ]
            with tape.no_grad():
                grads = cls.backward(context, *map(arrays.native, filled))
            grads = grads if isinstance(grads, tuple) else (grads,)
            if len(grads) != len(inputs):
                raise AutogradError(
                    f"{cls.__name__}.backward: got {len(grads)} gradients, expected {len(inputs)}, "
                    "one per input"
                )
            where = f"{cls.__name__}.backward"
            return [
                None if edge is None or grad is None else owned(edge, like(x, grad, where, f"gradient {i}"))
                for i, (x, edge, grad) in enumerate(zip(inputs, edges, grads, strict=True))
            ]

        on_tape(Node(cls.__name__, len(results), edges, backward), results)
