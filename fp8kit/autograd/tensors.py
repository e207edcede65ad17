"""``Tensor``: an array on the tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arguments import flag, function, shown
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.autograd import tape
from fp8kit.autograd.tape import Edge, Node
from fp8kit.backends import dispatch
from fp8kit.captured import capturing
from fp8kit.errors import AutogradError, FormatError, ShapeError
from fp8kit.formats import DType
from fp8kit.printing import view_text

Hook = Callable[[ArrayView], ArrayView | None]


class Version:
    """How often a piece of memory was changed in place through its tensors."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class HookHandle:
    """What ``Tensor.register_hook`` returns."""

    def __init__(self, hooks: list[Hook], hook: Hook) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """End the hook; a second call does nothing."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


_ELSEWHERE = (
    "the tape has what fk.nn computes, + and reshape; fk.Function makes an operation of your own, "
    "and .data or .numpy() is the array, off the tape"
)


def _refused(symbol: str) -> Callable[..., Any]:
    """Returns the method of an operator that the tape does not have; operands that ask NumPy to leave mixed
    operators to them are asked first."""

    def refuse(self: Any, other: Any = None) -> Any:
        if getattr(type(other), "__array_ufunc__", refuse) is None:
            return NotImplemented
        raise TypeError(f"{type(self).__name__} has no operator {symbol}; {_ELSEWHERE}")

    return refuse


class Tensor:
    """An array with a place on the tape.

    ``view`` is the array (``ArrayView``); ``requires_grad`` whether a gradient is wanted; ``grad`` the
    gradient that backward accumulated, an ArrayView of the same shape and dtype, or None. Shares memory with
    NumPy, CuPy and anything that takes ``__dlpack__``: ``data`` is the device library's own array,
    ``numpy()`` a host array (a copy from a GPU).

    What the tape can differentiate is what ``fk.nn`` computes, ``+`` and ``reshape``: a Tensor has no other
    arithmetic (``@``, ``*``, ``mean``, ``[]``), and says so. A number in a sum is rounded to the tensor's
    dtype first; ``float()`` of one element is ``item()``. ``fk.Function`` makes an operation of your own of
    any NumPy or CuPy code; what needs no gradient is computed with ``data`` or ``numpy()``.

    Raises FormatError for ``requires_grad`` with a dtype that is not floating.
    """

    __slots__ = ("__weakref__", "_edge", "_hooks", "_version", "grad", "requires_grad", "view")

    def __init__(self, view: ArrayView, requires_grad: bool = False) -> None:
        if type(view) is not ArrayView:
            view = arrays.as_view(view, "Tensor", "view")
        if requires_grad is not False:
            requires_grad = flag("tensor", "requires_grad", requires_grad)
        if requires_grad and not view.dtype.floating:
            raise FormatError(
                "tensor", "requires_grad", f"True for dtype {view.dtype.name}", "a floating dtype"
            )
        self.view = view
        self.requires_grad = requires_grad
        self.grad: ArrayView | None = None
        self._edge: Edge | None = None
        self._hooks: list[Hook] | None = None  # a leaf's
        self._version: Version | None = None

    @property
    def shape(self) -> Shape:
        """Extent in elements."""
        return self.view.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.view.dtype

    @property
    def device(self) -> Device:
        """Where the array lives."""
        return self.view.device

    @property
    def is_leaf(self) -> bool:
        """Whether nothing on the tape computed this."""
        return self._edge is None

    @property
    def data(self) -> Any:
        """The array in its device's library (NumPy or CuPy), sharing memory.

        What is written through it no count sees: in-place detection (``copy_``, ``add_``, ``zero_``,
        optimisers, loading) is told by the tensor, and backward would use values written here without a word.
        The same holds for ``numpy()`` and for DLPack's consumers.
        """
        return arrays.native(self.view)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the array on the host: the same memory on the CPU, a copy from a GPU. What is written
        through it no count sees; see ``data``."""
        return self.view.numpy()

    def item(self) -> float:
        """Returns the only element as a Python number; waits for the device. ShapeError when there are
        several."""
        if self.view.size != 1:
            raise ShapeError("item", "tensor", f"shape {self.shape}", "one element")
        return float(self.numpy().reshape(-1)[0])

    def detach(self) -> Tensor:
        """Returns the same array off the tape."""
        return self._sharing(Tensor(self.view))

    def version(self) -> Version:
        """Returns the count of changes in place, shared with every tensor that was made of this one's
        memory."""
        if self._version is None:
            self._version = Version()
        return self._version

    def _sharing(self, other: Tensor) -> Tensor:
        other._version = self.version()
        return other

    # --- changes in place: not recorded; a backward that needs the old value raises -------------------------

    def copy_(self, source: Any) -> Tensor:
        """Take the values of an array of the same shape and any floating dtype (or the same one), in place.
        Returns the tensor.

        AutogradError while recording, if this or ``source`` requires a gradient: changes in place have none;
        use ``no_grad``. ShapeError or FormatError where the values do not fit, FormatError where the tensor's
        memory is read-only.
        """
        arrays.want_writable("copy_", "tensor", self.view)
        view = arrays.as_view(source, "copy_", "source")
        if tape.is_grad_enabled() and (self.requires_grad or _requires_grad(source)):
            raise AutogradError(
                "copy_: a change in place is not recorded, and a gradient is required here; use no_grad()"
            )
        if view.shape != self.shape:
            raise ShapeError("copy_", "source", f"shape {view.shape}", f"shape {self.shape}")
        if view.dtype is not self.dtype and not {view.dtype, self.dtype} <= set(formats.HIGH_PRECISION):
            raise FormatError("copy_", "source", view.dtype.name, self.dtype.name)
        view = arrays.to(view, self.device)
        if view.dtype is self.dtype and self.view.contiguous:
            arrays.copy(self.view, arrays.contiguous(view))
        elif view.dtype is self.dtype:
            arrays.assign(self.view, view)
        else:
            dispatch.kernels(self.device).copy(view, self.view, arrays.current_stream(self.device))
        self.version().count += 1
        return self

    def add_(self, other: Any) -> Tensor:
        """``copy_(self + other)``; the same shape and dtype. Errors as ``copy_``."""
        with tape.no_grad():
            total = self.detach() + arrays.as_view(other, "add_", "other")
        return self.copy_(Tensor(total.view, _requires_grad(other)))

    def zero_(self) -> Tensor:
        """Zeros, in place. Errors as ``copy_``."""
        return self.copy_(arrays.zeros(self.shape, self.dtype, self.device))

    # --- the tape -------------------------------------------------------------------------------------------

    def register_hook(self, hook: Callable[[ArrayView], Any]) -> HookHandle:
        """Call ``hook`` with this tensor's whole gradient each time that a backward pass has summed it, an
        ArrayView that must not be changed. What it returns, an array of the same shape and dtype, goes on in
        its place; None leaves it. Returns a handle whose ``remove()`` ends it. AutogradError where no
        gradient is wanted, Fp8kitError for a hook that cannot be called.
        """
        function("register_hook", "hook", hook)
        edge = self.edge()
        if edge is None:
            raise AutogradError("register_hook: this tensor requires no gradient")

        def checked(gradient: ArrayView) -> ArrayView | None:
            answer = hook(gradient)
            if answer is None:
                return None
            return fresh(like(gradient, answer, "register_hook", "the hook's answer"))

        if isinstance(edge.target, Node):
            if edge.target.hooks is None:
                edge.target.hooks = {}
            hooks = edge.target.hooks.setdefault(edge.output, [])
        else:
            hooks = self._hooks = [] if self._hooks is None else self._hooks
        hooks.append(checked)
        return HookHandle(hooks, checked)

    def edge(self) -> Edge | None:
        """Returns where a cotangent of this value goes, None when no gradient is wanted."""
        if self._edge is not None:
            return self._edge
        return Edge(self, 0) if self.requires_grad else None

    def accumulate(self, cotangent: ArrayView) -> None:
        """Add ``cotangent``, of this shape and dtype, to ``grad``: the leaf's side of the tape."""
        if self._hooks:
            cotangent = tape.hooked(self._hooks, cotangent)
        if self.grad is None:
            self.grad = cotangent if cotangent.contiguous else arrays.contiguous(cotangent)
        else:
            self.grad = add_views(arrays.as_view(self.grad), cotangent)  # a user may have set any array

    def backward(self, gradient: Any = None, retain_graph: bool = False) -> None:
        """Walk back from here; every tensor that requires a gradient gets its ``grad``.

        ``gradient``: any array of this shape and dtype; may be left out for a single element (then 1). Raises
        AutogradError when nothing here was recorded, ShapeError or FormatError for a gradient that does not
        fit.
        """
        edge = self.edge()
        retain_graph = flag("backward", "retain_graph", retain_graph)
        if edge is None:
            raise AutogradError(
                "backward: this tensor was computed without anything that requires a gradient, "
                "or under no_grad"
            )
        if gradient is None:
            if self.view.size != 1:
                wanted = f"an array of shape {self.shape}: the tensor has several elements"
                raise ShapeError("backward", "gradient", "nothing", wanted)
            gradient = np.ones(self.shape, self.dtype.numpy)
        view = arrays.as_view(gradient, "backward", "gradient")
        if view.shape != self.shape:
            raise ShapeError("backward", "gradient", f"shape {view.shape}", f"shape {self.shape}")
        if view.dtype is not self.dtype:
            raise FormatError("backward", "gradient", view.dtype.name, self.dtype.name)
        root = owned(edge, arrays.to(arrays.contiguous(view), self.device))
        tape.run([(edge, root)], add_views, retain_graph)

    def reshape(self, *shape: Any) -> Tensor:
        """Returns the same memory under another shape (one -1 is worked out); ShapeError when the sizes
        differ, or not C-contiguous."""
        if len(shape) == 1 and isinstance(shape[0], tuple | list):
            (shape,) = shape
        view, before = self.view.reshape(*shape), self.shape
        return self._sharing(record("reshape", [self], view, lambda g: [g.reshape(*before)]))

    # a + b as an operation of the tape; ``call``, which runs operations, defines it
    _plus: ClassVar[Callable[[Tensor, Tensor | ArrayView], Tensor]]

    def __add__(self, other: Any) -> Tensor:
        if isinstance(other, complex):
            return NotImplemented
        if isinstance(other, int | float | np.integer | np.floating):
            other = self._number(other)
        elif not isinstance(other, Tensor):
            other = arrays.as_view(other, "add", "other")
        return self._plus(other)

    def _number(self, value: Any) -> ArrayView:
        """Returns a number as an array () of this dtype, on this device; Inf where the dtype does not
        reach."""
        try:
            with np.errstate(all="ignore"):
                host = np.full((), float(value), self.dtype.numpy)
        except OverflowError:
            raise FormatError("add", "other", shown(value), "a number that a float can be") from None
        return arrays.to(host, self.device)

    if not TYPE_CHECKING:  # a checker knows without them that they are not there

        def __getattr__(self, name: str) -> Any:
            where = "" if name.startswith("_") else f"; {_ELSEWHERE}"
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}{where}", name=name, obj=self
            )

        __sub__, __rsub__ = _refused("-"), _refused("-")
        __mul__, __rmul__ = _refused("*"), _refused("*")
        __truediv__, __rtruediv__ = _refused("/"), _refused("/")
        __pow__, __rpow__ = _refused("**"), _refused("**")
        __matmul__, __rmatmul__ = _refused("@"), _refused("@")
        __neg__ = _refused("-")
        __getitem__ = _refused("[]")

    # array + tensor is the tensor's to answer: NumPy would convert it, and leave the tape
    __array_priority__ = 1000

    def __radd__(self, other: Any) -> Tensor:
        if isinstance(other, int | float | complex | np.integer | np.floating):
            return self.__add__(other)  # which has one rounding either way
        return Tensor(arrays.as_view(other, "add", "other")) + self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Returns a tensor of its own memory, without the gradient. AutogradError for one that was computed
        on the tape."""
        if self._edge is not None:
            raise AutogradError("deepcopy: this tensor was computed on the tape; detach() it first")
        copied = type(self).__new__(type(self))
        Tensor.__init__(copied, fresh(self.view), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it is memory by address; use fk.save and fk.load, "
            "or numpy()"
        )

    def __fp8kit_view__(self) -> ArrayView:
        return self.view

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.view.__array__(dtype, copy)

    def __dlpack__(self, **options: Any) -> object:
        return self.view.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self.view.__cuda_array_interface__

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("len", "tensor", "no dimension", "at least one")
        return self.shape[0]

    def __float__(self) -> float:
        return self.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __repr__(self) -> str:
        """Returns the values as NumPy prints them, of a large array those that it prints; while a graph is
        captured none: nothing is computed then."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        values = "..." if capturing() else view_text(self.view, "fp8kit.Tensor(")
        return f"fp8kit.Tensor({values}, shape={self.shape}, {self.dtype.name}, {self.device}{grad})"


fresh = arrays.duplicate


def add_views(a: ArrayView, b: ArrayView) -> ArrayView:
    """a + b in a fresh array: how cotangents that meet are summed."""
    a, b = arrays.contiguous(a), arrays.contiguous(b)
    if a.dtype is formats.float64:  # a user's function's: the kernel adds in float32
        return arrays.as_view(arrays.native(a) + arrays.native(b))
    out = arrays.empty(a.shape, a.dtype, a.device)
    dispatch.kernels(a.device).add(a, b, out, arrays.current_stream(a.device))
    return out


def owned(edge: Edge | None, view: ArrayView | None) -> ArrayView | None:
    """Returns a cotangent that may be shared, made safe for where it goes: a leaf keeps it as ``grad`` and
    gets a copy of its own."""
    if view is None or edge is None or isinstance(edge.target, Node):
        return view
    return fresh(view)


def like(other: Any, answer: Any, operation: str, argument: str) -> ArrayView:
    """Returns what a user's function gave, C-contiguous. ShapeError where its shape, dtype or device is not
    that of ``other``."""
    view = arrays.contiguous(arrays.as_view(answer, operation, argument))
    if (view.shape, view.dtype, view.device) != (other.shape, other.dtype, other.device):
        got, wanted = (f"{a.dtype.name} {a.shape} on {a.device}" for a in (view, other))
        raise ShapeError(operation, argument, got, wanted)
    return view


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def name_in(owner: object, name: str, value: Any) -> str:
    """Returns the user's name of an operation's input: the owner's attribute that holds it, or the argument
    that its ``argument_names`` say."""
    if owner is None:
        return name
    for attribute, held in vars(owner).items():
        if value is not None and held is value:
            return attribute
    names: Mapping[str, str] = getattr(owner, "argument_names", {})
    return names.get(name, name)


def unchanged(operation: str, argument: str, value: Tensor, owner: object = None) -> Callable[[], None]:
    """Returns a function that raises AutogradError when ``value`` was changed in place since now; ``owner``
    as in ``name_in``."""
    version = value.version()
    then = version.count

    def check() -> None:
        if version.count != then:
            raise AutogradError(
                f"{operation}: {name_in(owner, argument, value)}: got a value changed in place since the "
                f"forward pass (version {version.count}), expected it as backward needs it (version {then})"
            )

    return check


def record(name: str, inputs: list[Tensor], output: ArrayView, backward: Any) -> Tensor:
    """Returns a tensor for ``output`` whose node has one edge per input; ``backward(g)`` gives a cotangent
    per input."""
    result = Tensor(output)
    wanted = any(t.requires_grad for t in inputs)
    unrecorded = tape.probe()
    if unrecorded is not None:
        unrecorded.wanted |= wanted
    if wanted and tape.is_grad_enabled():
        edges = [t.edge() for t in inputs]

        def walk(cotangents: list[ArrayView]) -> list[ArrayView | None]:
            return list(map(owned, edges, backward(cotangents[0])))

        on_tape(Node(name, 1, edges, walk), [result])
    return result


def on_tape(node: Node, results: Sequence[Tensor]) -> None:
    """Make a node the source of those of its results that can have a gradient."""
    for index, result in enumerate(results):
        if result.view.dtype.floating:
            result._edge, result.requires_grad = Edge(node, index), True
