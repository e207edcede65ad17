"""``Module``: a tree of parameters.

Parameters are attributes of type ``Parameter``, buffers of type ``ArrayView``, children of type ``Module``;
nothing is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from fp8kit import arguments, arrays, captured, formats, serialization
from fp8kit.arguments import flag, shown, want_names
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.autocast import checking_finite
from fp8kit.autograd import Tensor
from fp8kit.autograd.tensors import fresh
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, CheckpointError, FormatError
from fp8kit.formats import DType
from fp8kit.layers.arguments import parameter_dtype
from fp8kit.nn import finite
from fp8kit.nn.random import Init

_Self = TypeVar("_Self", bound="Module")
EXTRA = "_extra_state."


class Parameter(Tensor):
    """A Tensor that requires a gradient and belongs to a module: ``view``, ``grad`` and ``data`` as
    ``Tensor``.

    ``partition_dim``: the dimension of which this rank has a part, None where all ranks have the whole;
    ``partition_blocks``: of each of which blocks, whose sizes are to each other as these numbers;
    ``sequence_parallel``: whether its gradient is of this rank's rows alone.
    """

    __slots__ = ("partition_blocks", "partition_dim", "sequence_parallel")

    def __init__(self, view: ArrayView) -> None:
        super().__init__(view, requires_grad=True)
        self.partition_dim: int | None = None
        self.partition_blocks: tuple[int, ...] = (1,)
        self.sequence_parallel = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        copied = Parameter(fresh(self.view))
        copied.requires_grad = self.requires_grad
        for name in Parameter.__slots__:
            setattr(copied, name, getattr(self, name))
        return copied

    def __repr__(self) -> str:
        return f"fp8kit.nn.Parameter({self.shape}, {self.dtype.name}, {self.device})"


class Module(serialization.Loadable):
    """Base of layers. A subclass sets attributes in ``__init__`` and defines ``forward``; calling the module
    calls it."""

    training = True
    # an operation's input -> the argument of forward that errors call it
    argument_names: ClassVar[dict[str, str]] = {"x": "inp"}

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute the outputs. A module says which shapes and dtypes its inputs have, and which errors others
        raise."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        captured.hold(self, self._held)
        try:
            if checking_finite():
                with finite.looking(self):
                    return self.forward(*inputs, **options)
            return self.forward(*inputs, **options)
        except TypeError:
            want_names(f"{type(self).__name__}.forward", type(self).forward, options)
            raise
        except FormatError as error:
            renamed = _of_the_input(self, error)
            if renamed is None:
                raise
            raise renamed from None

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(vars(self).get(name), Parameter) and not (
            value is None or isinstance(value, Parameter)
        ):
            wanted = "a Parameter; load_state_dict copies values into it"
            raise FormatError(type(self).__name__, name, type(value).__name__, wanted)
        object.__setattr__(self, name, value)

    # --- the tree -------------------------------------------------------------------------------------------

    def children(self) -> Iterator[tuple[str, Module]]:
        """(name, module) of direct children, in the order of assignment."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(path, module) of this module (path "") and everything below, each once."""
        seen: set[int] = set()

        def walk(path: str, module: Module) -> Iterator[tuple[str, Module]]:
            if id(module) in seen:
                return
            seen.add(id(module))
            yield path, module
            for name, child in module.children():
                yield from walk(_dotted(path, name), child)

        yield from walk(prefix, self)

    def _named(self, kind: type) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, kind) and id(value) not in seen:
                    seen.add(id(value))
                    yield _dotted(path, name), value

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(path, parameter), each once, also where modules share it."""
        return self._named(Parameter)

    def parameters(self) -> Iterator[Parameter]:
        """Yields the parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, ArrayView]]:
        """(path, array) of arrays that belong to the module but are not trained; FP8 state is not among
        them."""
        return self._named(ArrayView)

    def buffers(self) -> Iterator[ArrayView]:
        """Yields the buffers, each once."""
        return (buffer for _, buffer in self.named_buffers())

    # --- modes ----------------------------------------------------------------------------------------------

    def train(self: _Self, mode: bool = True) -> _Self:
        """Dropout is active (``mode``) or not, in the whole tree. Returns the module."""
        training = flag(type(self).__name__, "mode", mode)
        for _, module in self.named_modules():
            module.training = training
        return self

    def eval(self: _Self) -> _Self:
        """``train(False)``."""
        return self.train(False)

    def apply(self: _Self, function: Callable[[Module], object]) -> _Self:
        """Call ``function`` with every module, children first. Returns the module. Fp8kitError if
        ``function`` cannot be called."""
        arguments.function(type(self).__name__, "function", function)
        for _, module in reversed(list(self.named_modules())):
            function(module)
        return self

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for _, module in self.named_modules():
            for value in vars(module).values():
                if isinstance(value, Parameter):
                    value.grad = None

    # --- graphs ---------------------------------------------------------------------------------------------

    def arrays_used(self) -> Iterator[ArrayView]:
        """Yields the arrays that this one module's calls read and write, and keep: parameters, buffers, and
        what a subclass adds."""
        for value in vars(self).values():
            if isinstance(value, Parameter | ArrayView):
                yield value.view if isinstance(value, Parameter) else value

    def _held(self) -> tuple[list[str], captured.Read, object]:
        """Settings and arrays of the whole tree, as ``captured.hold`` takes them: a captured graph would not
        see them change."""
        modules = [(_dotted(type(self).__name__, path), module) for path, module in self.named_modules()]
        settings = [
            (path, module, name)
            for path, module in modules
            for name in {"training": True, **vars(module)}
            if _is_setting(getattr(module, name))
        ]

        def read() -> list[Any]:
            values = [getattr(module, name, None) for _, module, name in settings]
            return values + [view.ptr for _, module in modules for view in module.arrays_used()]

        held = [(path, view) for path, module in modules for view in module.arrays_used()]
        names = [_dotted(path, name) for path, _, name in settings]
        return names + [_dotted(path, "the address of an array") for path, _ in held], read, held

    # --- state ----------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, ArrayView]:
        """Further arrays of this one module that a checkpoint holds, under ``_extra_state.``; none by
        default."""
        return {}

    def check_extra_state(self, state: Mapping[str, ArrayView]) -> Callable[[], None]:
        """Check what ``extra_state`` once gave, arrays by name, and return what takes it over.
        CheckpointError where names, shapes, dtypes or values do not fit."""
        if state:
            raise CheckpointError(f"unexpected: {', '.join(state)}")
        return lambda: None

    def forget(self) -> None:
        """Drop what this one module derived from its parameters; called when other values are loaded into
        them."""

    def _held_arrays(self) -> dict[str, ArrayView]:
        """Parameters and buffers by path."""
        parameters = {name: parameter.view for name, parameter in self.named_parameters()}
        return parameters | dict(self.named_buffers())

    def state_dict(self) -> dict[str, ArrayView]:
        """Parameters, buffers and FP8 state by path; views of the module's own memory."""
        extra = {
            _dotted(path, EXTRA + name): view
            for path, module in self.named_modules()
            for name, view in module.extra_state().items()
        }
        return self._held_arrays() | extra

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Callable[[], None]:
        """Check arrays (NumPy, CuPy, views, tensors), and return what copies them into parameters and
        buffers, and takes over FP8 state.

        ``strict``: every parameter and buffer must be there, and nothing else; a module without FP8 state in
        ``state`` loses its own, as it was when it was saved. Otherwise what is missing stays as it is. Raises
        CheckpointError that names what is missing, unexpected, of another shape or dtype, or no FP8 scale or
        amax.
        """
        serialization.mapping("load_state_dict", state)
        strict = flag("load_state_dict", "strict", strict, CheckpointError)
        own, modules = self._held_arrays(), dict(self.named_modules())
        paths = {_dotted(path, EXTRA): path for path in modules}
        extra: dict[str, dict[str, ArrayView]] = {}
        plain: dict[str, Any] = {}
        for name, array in state.items():
            start, mark, rest = name.rpartition(EXTRA)
            path = paths.get(start + mark)
            if path is None:
                plain[name] = array
            else:
                extra.setdefault(path, {})[rest] = serialization.array("load_state_dict", name, array)
        found = serialization.check(own, plain, strict)
        takers = []
        for path, module in modules.items():
            if strict or path in extra:
                try:
                    takers.append(module.check_extra_state(extra.get(path, {})))
                except CheckpointError as error:
                    where = _dotted(path, EXTRA).removesuffix(".")
                    raise CheckpointError(f"load: {where}: {error}") from None

        def take_all() -> None:
            for name, view in found.items():
                arrays.copy(own[name], arrays.contiguous(view))
            for parameter in self.parameters():
                parameter.version().count += 1
            for take in takers:
                take()
            for module in modules.values():
                module.forget()

        return take_all

    def __repr__(self) -> str:
        inner = [f"  ({name}): " + repr(child).replace("\n", "\n  ") for name, child in self.children()]
        own = ", ".join(f"{n}={list(p.shape)}" for n, p in vars(self).items() if isinstance(p, Parameter))
        body = "\n" + "\n".join(inner) + "\n" if inner else ""
        return f"{type(self).__name__}({own}{body})"


class ModuleList(Module):
    """Modules in a list; their names in paths are "0", "1", ..."""

    def __init__(self, modules: Any = ()) -> None:
        for module in arguments.listed(type(self).__name__, "modules", modules, "Modules"):
            self.append(module)

    def append(self, module: Module) -> None:
        """Add a module at the end; Fp8kitError for anything else."""
        if not isinstance(module, Module):
            raise ArgumentError(type(self).__name__, "modules", type(module).__name__, "Modules")
        vars(self)[str(len(self))] = module

    def __len__(self) -> int:
        return sum(isinstance(value, Module) for value in vars(self).values())

    def __iter__(self) -> Iterator[Module]:
        return (child for _, child in self.children())

    def __getitem__(self, index: int) -> Module:
        return list(self)[index]


class Sequential(ModuleList):
    """Modules that are called one after the other: ``Sequential(a, b)(x)`` is ``b(a(x))``."""

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Any) -> Any:
        """x through all modules: any shape and dtype that the first takes; what does not fit is an error of
        the module that it reaches."""
        for module in self:
            x = module(x)
        return x


# --- what modules share -------------------------------------------------------------------------------------


def _dotted(path: str, name: str) -> str:
    """Returns ``path.name``, or the one that is not empty."""
    return f"{path}.{name}" if path and name else path or name


def _is_setting(value: Any) -> bool:
    return isinstance(value, int | float | str) or (isinstance(value, tuple) and all(map(_is_setting, value)))


def as_tensor(operation: str, argument: str, value: Any) -> Tensor:
    """Returns a Tensor as it is, any other array wrapped; FormatError that names the argument for anything
    else."""
    return value if isinstance(value, Tensor) else Tensor(arrays.as_view(value, operation, argument))


def _of_the_input(module: Module, error: FormatError) -> FormatError | None:
    """Returns a refusal of a parameter that has not the input's dtype, as one of the input, where the
    module's own parameters have one dtype; None for any other refusal."""
    argument, given, x = error.argument or "", error.wanted, module.argument_names.get("x")
    own = {name: value.dtype.name for name, value in vars(module).items() if isinstance(value, Parameter)}
    if (
        x is None
        or error.got != own.get(argument)
        or len(set(own.values())) != 1
        or given not in [kind.name for kind in formats.HIGH_PRECISION]
    ):
        return None
    return FormatError(error.operation, x, given, f"{own[argument]} as the parameters")


def resolve(operation: str, params_dtype: Any, device: Any) -> tuple[DType, Device]:
    """Dtype and device of new parameters; None: float32 and the default device. FormatError for other than
    float32 and 16-bit floats, BackendError for a device that is not here."""
    kind = formats.float32
    if params_dtype is not None:
        kind = parameter_dtype(operation, "params_dtype", params_dtype)
    where = dispatch.default_device() if device is None else arrays.usable(device, operation, "device")
    return kind, where


def make_parameter(shape: Shape, init: Init | float, dtype: DType, device: Device) -> Parameter:
    """Returns a parameter filled by ``init`` (called with a float32 NumPy array to fill, or a constant),
    rounded to ``dtype``."""
    host = arrays.empty(shape, formats.float32, arrays.CPU).numpy()
    if callable(init):
        init(host)
    elif isinstance(init, int | float):
        host.fill(init)
    else:
        raise ArgumentError(
            "init_method", "init_method", shown(init), "None, or a function that fills a NumPy array"
        )
    return Parameter(arrays.to(host.astype(dtype.numpy), device))


def make_parts(
    rows: Sequence[int], columns: int, init: Init, dtype: DType, device: Device
) -> list[Parameter]:
    """Parameters of ``rows`` rows each, filled as by ``make_parameter``, one after the other, which lie side
    by side in memory: what takes them as one matrix need not copy."""

    def fill(host: Any) -> None:
        for part in np.split(host, np.cumsum(rows)[:-1]):
            init(part)

    whole = make_parameter((sum(rows), columns), fill, dtype, device).view
    return [Parameter(whole.slice(0, sum(rows[:i]), count)) for i, count in enumerate(rows)]
