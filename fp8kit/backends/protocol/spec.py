"""``KernelSpec``: what a kernel reads and writes, said once, by a decorator on its signature.

The signature says the rest: ``ArrayView | None`` is an array that may be absent, ``workspace`` and ``stream``
are what their names say, and every array that a spec does not name is only read. Arguments hold arrays in
four ways: alone, in lists, in a ``Cast``, in ``AttentionExtras``; ``map_arrays`` finds them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.cast import Cast
from fp8kit.nests import mapped

Function = TypeVar("Function", bound=Callable[..., Any])
_CAST = ("q", "q_t", "scale", "scale_inv", "scale_inv_t", "amax")  # a Cast's arrays
_CAST_WRITES = ("q", "q_t", "scale_inv", "scale_inv_t", "amax")

SPECS: dict[str, KernelSpec] = {}  # by name, in the order of definition


class Output(NamedTuple):
    """An array that a call writes: its ``name`` ("q", "cast.q_t", "params[3]"), the array, whether its former
    content matters (``kept``), the ``argument`` it belongs to, the ``cast`` that holds it, and whether it is
    the rounding of another output (``rounded``)."""

    name: str
    view: ArrayView
    kept: bool
    argument: str
    cast: Cast | None = None
    rounded: bool = False


@dataclass(frozen=True)
class KernelSpec:
    """The facts of one kernel of the contract.

    * ``name``; ``family``: the file that holds it, in this package and in every engine; ``signature``:
      without self.
    * ``writes``: arguments that it writes, whatever stood there. ``updates``: arguments whose former content
      matters: accumulated, changed in place, or not written everywhere.
    * ``casts``: the array, a result or an input, whose cast ``cast`` holds and whose largest magnitude
      ``amax`` takes in.
    * ``sums``: output -> the array whose column sums it holds, of a result as it was stored.
    * ``rounded``: output -> the output that it is the rounding of, tensor by tensor, where there is one.
    * ``exact``: every output is known bit for bit; otherwise ``fp8kit.testing.contract`` has the tolerance.
    * ``ordered``: the same arguments give the same bits every time.
    * ``workspace``: (kernels, arguments) -> bytes of workspace that a call needs; ``serves``: the kernels
      whose workspace this function measures.
    * ``flops``: arguments -> floating-point operations, for kernels that memory does not bound.
    """

    name: str
    family: str
    signature: inspect.Signature
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    casts: str = ""
    sums: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False
    ordered: bool = False
    workspace: Callable[[Any, Any], int] | None = None
    serves: tuple[str, ...] = ()
    flops: Callable[[Any], float] | None = None

    @property
    def launches(self) -> bool:
        """Whether it works on arrays; the functions that measure workspaces do not."""
        return "stream" in self.signature.parameters

    def bind(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Returns the arguments of a call by name."""
        return dict(self.signature.bind(*args, **named).arguments)

    def call(self, kernels: Any, arguments: Mapping[str, Any]) -> Any:
        """Call the kernel of ``kernels`` with arguments by name."""
        return getattr(kernels, self.name)(*(arguments[name] for name in self.signature.parameters))

    def complete(self, arguments: Mapping[str, Any], stream: int = 0) -> dict[str, Any]:
        """Returns the arguments in the signature's order, with the stream, and None for those that are
        absent."""
        given = {"stream": stream, **arguments}
        return {name: given.get(name) for name in self.signature.parameters}

    def workspace_bytes(self, kernels: Any, arguments: Mapping[str, Any]) -> int:
        """Bytes of workspace that ``kernels`` need for a call with these arguments."""
        return 0 if self.workspace is None else int(self.workspace(kernels, SimpleNamespace(**arguments)))

    def outputs(self, arguments: Mapping[str, Any]) -> Iterator[Output]:
        """Every array that a call with these arguments writes."""
        for name in self.signature.parameters:
            if name not in self.writes + self.updates or arguments[name] is None:
                continue
            value, kept = arguments[name], name in self.updates
            if isinstance(value, ArrayView | Cast):
                yield from _written(name, value, kept, name)
                continue
            sources = arguments[self.rounded[name]] if name in self.rounded else [None] * len(value)
            for i, (part, source) in enumerate(zip(value, sources, strict=True)):
                for output in _written(f"{name}[{i}]", part, kept, name):
                    yield output._replace(rounded=source is not None)

    def nbytes(self, arguments: Mapping[str, Any]) -> int:
        """Bytes that a call must move: what is read or written once, what is updated twice; no workspace."""
        moved = views(value for name, value in arguments.items() if name != "workspace")
        once = {view.ptr: view.nbytes for view in moved}
        updated = (o.view.nbytes for o in self.outputs(arguments) if o.kept and not o.rounded)
        return sum(once.values()) + sum(updated)


def kernel(writes: str = "", updates: str = "", **facts: Any) -> Callable[[Function], Function]:
    """Decorator of a kernel's signature: its ``KernelSpec``; names of arguments with blanks between them."""

    def note(method: Function) -> Function:
        whole = inspect.signature(method)
        own = whole.replace(parameters=list(whole.parameters.values())[1:])
        family = method.__module__.rpartition(".")[2]
        SPECS[method.__name__] = KernelSpec(
            method.__name__, family, own, tuple(writes.split()), tuple(updates.split()), **facts
        )
        return method

    return note


def workspace_of(*kernels: str) -> Callable[[Function], Function]:
    """Decorator of a function that measures the workspace of ``kernels``."""
    return kernel(serves=kernels)


def measured(by: str, argument: str) -> Callable[[Any, Any], int]:
    """Returns the ``workspace`` of a spec: what the function ``by`` says for an argument's shape."""
    return lambda kernels, a: int(getattr(kernels, by)(*getattr(a, argument).shape))


def map_arrays(value: Any, change: Callable[[ArrayView], Any]) -> Any:
    """Returns an argument with every array in it replaced by ``change(array)``."""

    def leaf(part: Any) -> Any:
        if isinstance(part, Cast):
            arrays = {name: leaf(getattr(part, name)) for name in _CAST}
            return Cast(part.format, **arrays, rule=part.rule, tile=part.tile)
        return change(part) if isinstance(part, ArrayView) else part

    return mapped(value, leaf)


def views(values: Iterable[Any]) -> Iterator[ArrayView]:
    """Every array in some arguments, in order."""
    for value in values:
        if isinstance(value, ArrayView):
            yield value
        elif isinstance(value, Cast):
            yield from views(getattr(value, name) for name in _CAST)
        elif isinstance(value, list | tuple):
            yield from views(value)


def _written(name: str, value: ArrayView | Cast | None, kept: bool, argument: str) -> Iterator[Output]:
    """Yields the outputs in one array, in one Cast, or in nothing."""
    if isinstance(value, ArrayView):
        yield Output(name, value, kept, argument)
    elif value is not None:
        for part in _CAST_WRITES:
            view = getattr(value, part)
            if view is not None:
                yield Output(f"{name}.{part}", view, part == "amax", argument, value)
