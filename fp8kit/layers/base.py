"""``Layer``: what the shared layers ask of a frontend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from fp8kit import formats
from fp8kit.arguments import NamedWell, Rule, shown, want_names
from fp8kit.arrays import Shape
from fp8kit.collectives import Collectives
from fp8kit.errors import ArgumentError
from fp8kit.layers.unsupported import CONSTRUCTOR, refuse
from fp8kit.lru import memoized
from fp8kit.ops.registry import SPECS
from fp8kit.spec import Operation

Init = Callable[[Any], Any]


class Branch(NamedTuple):
    """What a layer gives the one that it is a part of: ``y``, and, where asked for, ``residual`` (x, its
    gradient summed in backward) and ``normed``, norm(x)."""

    y: Any
    residual: Any = None
    normed: Any = None


def as_branch(layer: str, value: Any, x: Any, normed: bool) -> Branch:
    """Returns what a part of the layer ``layer`` returned for ``x``: a ``Branch``, or what a hook made of
    one, a tuple of as many values or y alone. ArgumentError for anything else."""
    if isinstance(value, Branch):
        return value
    if isinstance(value, tuple) and len(value) == len(Branch._fields):
        return Branch(*value)
    if isinstance(value, tuple) or not hasattr(value, "dtype") or normed:
        got = f"{type(value).__name__} from a hook"
        wanted = "y, or the tuple (y, residual, normed) that the hook was given, changed"
        if normed:
            wanted = "the tuple (y, residual, normed) that the hook was given, changed: normed is added to y"
        raise ArgumentError(layer, "output of a part", got, wanted)
    return Branch(value, x)


def branch_of(outputs: Mapping[str, Any]) -> Branch:
    """Returns a ``Branch`` of an operation's outputs by name."""
    return Branch(outputs["y"], outputs.get("residual"), outputs.get("normed"))


@memoized("specs")
def spec_object(kind: str, *fields: Any) -> Any:
    """Returns the spec of class ``kind`` with these plain fields, dtypes by their names, of "LinearSpec"
    those of its product; the same object for the same fields: plans are found by it."""
    if kind == "EmbeddingSpec":  # the one spec that holds a dtype
        fields = (*fields[:-1], formats.DTYPES[fields[-1]])
    if kind == "LinearSpec" and isinstance(fields[0], int):
        fields = (SPECS["ProductSpec"](*fields),)
    return SPECS[kind](*fields)


def checked(operation: str, rules: Mapping[str, Rule], arguments: Mapping[str, Any]) -> SimpleNamespace:
    """``arguments`` by name, each as its rule returns it; unchanged where there is no rule, or a rule that
    returns None. Raises what a rule raises: mostly ArgumentError, FormatError for dtypes."""
    found = dict(arguments)
    for name, value in arguments.items():
        if name in rules and (plain := rules[name](operation, name, value)) is not None:
            found[name] = plain
    return SimpleNamespace(**found)


def picked(arguments: SimpleNamespace, names: str) -> dict[str, Any]:
    """Returns the arguments with these names, to be handed on."""
    return {name: getattr(arguments, name) for name in names.split()}


def child_name(name: str | None, child: str) -> str | None:
    """Returns the ``name`` argument of a layer that is the part ``child`` of one that is called ``name``."""
    return None if name is None else f"{name}.{child}"


class Layer(NamedWell):
    """Base of the layers that all frontends have.

    A layer is a mixin: ``class Linear(layers.Linear, FrontendBase)``. It holds the constructor, the checks,
    the parameters and what ``forward`` is made of; the frontend's base, a subclass of ``Layer``, gives the
    methods below in its own tensors.
    """

    # Transformer Engine's name of the layer, which errors begin with
    layer_name: ClassVar[str]
    # where the frontend's own classes are found by name, for layers that are made of others
    frontend: ClassVar[Any]
    # what errors call an array
    array_name: ClassVar[str] = "an array"
    # rules of the constructor's arguments, and of forward's, by name
    constructor_rules: ClassVar[Mapping[str, Rule]] = {}
    call_rules: ClassVar[Mapping[str, Rule]] = {}
    # further arguments that have one value in this frontend
    unsupported: ClassVar[Mapping[str, Any]] = {}
    training: bool
    # of layers that may return more than y
    return_bias = False
    return_layernorm_output = False

    # --- arguments ------------------------------------------------------------------------------------------

    def checked(self, arguments: Mapping[str, Any]) -> SimpleNamespace:
        """Constructor arguments by name (a constructor's ``locals()``), each in the type that the code goes
        on with. ArgumentError for one out of its range, FormatError for a dtype, BackendError for a device,
        UnsupportedError for a value other than the one that is supported."""
        found = checked(self.layer_name, self.constructor_rules, arguments)
        table = CONSTRUCTOR.get(self.layer_name, {})
        own = self.constructor_rules
        refuse(self.layer_name, {name: table[name] for name in table if name not in own}, arguments)
        self.take_further(found)
        self.check_supported(arguments)
        return found

    def take_further(self, arguments: SimpleNamespace) -> None:
        """Keep what this frontend alone has of the constructor's ``arguments``."""

    def forked(self) -> AbstractContextManager[Any]:
        """Returns where random numbers are drawn from the tracker's states."""
        return nullcontext()

    def keep(self, arguments: SimpleNamespace, names: str) -> None:
        """Attributes of the arguments with these names."""
        for name, value in picked(arguments, names).items():
            setattr(self, name, value)

    def refuse_names(self, unknown: Iterable[str]) -> None:
        """TypeError for keywords of a call that ``forward`` does not have, with the one that was meant."""
        own = (vars(kind).get("forward") for kind in type(self).__mro__)
        known = next(function for function in own if hasattr(function, "__signature__"))
        want_names(f"{type(self).__name__}.forward", known, unknown)

    def check_supported(self, arguments: Mapping[str, Any]) -> None:
        """UnsupportedError for arguments by name that have only one value in this frontend."""
        table = {name: value for name, value in self.unsupported.items() if name in arguments}
        refuse(self.layer_name, table, arguments)

    def returned(self, y: Any, bias: str, normed: Any = None) -> Any:
        """What ``forward`` returns: y, or a tuple (y, the bias of that attribute where ``return_bias``,
        norm(x) where ``return_layernorm_output``)."""
        found = [y]
        if self.return_bias:
            found.append(getattr(self, bias))
        if self.return_layernorm_output:
            found.append(normed)
        return tuple(found) if len(found) > 1 else y

    def as_input(
        self, argument: str, value: Any, features: int | None = None, qkv_format: str | None = None
    ) -> Any:
        """``value`` as a tensor whose last dimension is ``features``, with the dimensions of ``qkv_format``.
        FormatError, ShapeError that name the argument for anything else."""
        raise NotImplementedError

    # --- ranks ----------------------------------------------------------------------------------------------

    def ranks_of(self, argument: str, group: Any) -> Collectives | None:
        """Returns the collectives of a group given as ``argument``, None for None. ArgumentError if it is not
        a group."""
        if group is not None and not isinstance(group, Collectives):
            raise ArgumentError(self.layer_name, argument, shown(group), "None or a Collectives")
        return group

    def group_of(self, ranks: Collectives) -> Any:
        """Returns the group that ``ranks_of`` made it of."""
        return ranks

    # --- parameters -----------------------------------------------------------------------------------------

    def add_parameter(
        self, name: str, shape: Shape, init: Init | float | None, dtype: Any, device: Any
    ) -> None:
        """A parameter as attribute ``name``. ``init``: a function that fills it in place, a constant, or None
        for normal(0, 0.023); ``dtype``, ``device``: None for the frontend's defaults. FormatError for a dtype
        that the operations do not have, BackendError for a device that is not there."""
        raise NotImplementedError

    def add_matrices(
        self, rows: Mapping[str, int], columns: int, init: Init | None, dtype: Any, device: Any
    ) -> None:
        """Parameters by name, (rows, columns) each, one after the other, as ``add_parameter``; side by side
        in memory where the frontend can."""
        for name, count in rows.items():
            self.add_parameter(name, (count, columns), init, dtype, device)

    def host_array(self, value: Any) -> Any:
        """Returns a tensor's values as a NumPy array, on the host."""
        raise NotImplementedError

    def read(self, name: str) -> Any:
        """Returns the values of the parameter ``name``, float32 on the host."""
        raise NotImplementedError

    def write(self, name: str, values: Any) -> None:
        """Put float32 values of the host into the parameter ``name``, in place, rounded to its dtype."""
        raise NotImplementedError

    def freeze(self, name: str) -> None:
        """Leave the parameter ``name`` out of training: no gradient is wanted of it."""
        raise NotImplementedError

    def mark_parameter(
        self, name: str, dim: int | None, sequence: bool, blocks: tuple[int, ...] = (1,)
    ) -> None:
        """Say on a parameter how ranks share it: of which dimension each has a part (None: all have it), of
        each of the ``blocks``, whose sizes are to each other as these numbers, and whether its gradient is of
        the rank's rows alone, to be summed over the ranks (``sequence``)."""

    def add_no_parameter(self, name: str) -> None:
        """None as the parameter ``name``."""
        raise NotImplementedError

    def parameters_by(self, names: Iterable[tuple[str, str]]) -> dict[str, Any]:
        """Parameters by an operation's names, of (name, attribute)."""
        return {name: getattr(self, attribute) for name, attribute in names}

    # --- operations -----------------------------------------------------------------------------------------

    def set_spec(self, spec: Any) -> None:
        """Keep the spec of a layer that is one operation."""
        self._spec = spec

    def change_spec(self, spec: Any) -> None:
        """Go on with another spec."""
        self.set_spec(spec)

    def own_spec(self) -> Any:
        """Returns the spec that ``set_spec`` got; within ``torch.compile`` its text."""
        return self._spec

    def spec_for(self, kind: str, *fields: Any) -> Any:
        """``spec_object``; within ``torch.compile`` its text."""
        return spec_object(kind, *fields)

    def call(
        self, operation: Operation, spec: Any, inputs: Mapping[str, Any], rng: bool = False
    ) -> dict[str, Any]:
        """Returns the outputs of an operation by name, recorded for backward. ``inputs``: None where absent;
        ``rng``: add the input ``rng``, drawn once nothing is refused any more."""
        raise NotImplementedError

    def check_call(
        self,
        operation: Operation,
        spec: Any,
        inputs: Mapping[str, Any],
        needs: tuple[str, ...] = (),
        rng: bool = False,
    ) -> None:
        """Raise what ``call`` would raise, and run nothing. ``inputs`` may be ``stand_in``; ``needs``: names
        of those whose gradient will be wanted."""
        raise NotImplementedError

    def stand_in(self, shape: Shape, dtype: Any, device: Any) -> Any:
        """Returns what stands for a tensor that is not there yet, for ``check_call``."""
        raise NotImplementedError

    def autocast_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """``inputs`` in the dtype of ``call_dtype``."""
        return inputs

    def call_dtype(self, x: Any) -> Any:
        """Returns the dtype that operations on ``x`` run in: its own, but within ``torch.autocast``."""
        return x.dtype

    def call_checkpointed(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """``function(**arguments)``, whose activations are not kept but computed once more in backward."""
        raise NotImplementedError

    def is_grad_enabled(self) -> bool:
        """Whether calls are recorded for backward."""
        raise NotImplementedError

    def no_grad(self) -> AbstractContextManager[Any]:
        """Around calls that are not recorded for backward."""
        raise NotImplementedError

    def is_compiling(self) -> bool:
        """Whether ``torch.compile`` follows this call."""
        return False
