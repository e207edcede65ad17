"""Checks of plain arguments, with one wording: each returns the value in the type that the code goes on with,
or raises.

Not for the hot path: constructors and the like. ``kind`` is the error's class.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from typing import Any, Self, TypeVar

import numpy as np

from fp8kit.errors import ArgumentError, CheckpointError, Fp8kitError, meant

_Function = TypeVar("_Function", bound=Callable[..., Any])

_FEW = 12  # names that an error lists
_NO_NUMBER = bool | np.timedelta64  # though Python and NumPy count them among the ints


def is_integer(value: object) -> bool:
    """Whether a value is an int, of NumPy's too; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, _NO_NUMBER)


def flag(operation: str, name: str, value: Any, kind: type[Fp8kitError] = ArgumentError) -> bool:
    """A bool, or 0 or 1."""
    if isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise kind(operation, name, shown(value), "True or False")


def integer(
    operation: str,
    name: str,
    value: Any,
    least: int | None = None,
    most: int | None = None,
    kind: type[Fp8kitError] = ArgumentError,
) -> int:
    """Returns an int in [least, most]; a bool is none."""
    if is_integer(value) and (least is None or value >= least) and (most is None or value <= most):
        return int(value)
    limits = f" in [{least}, {most}]"
    if most is None:
        limits = "" if least is None else f" >= {least}"
    elif least is None:
        limits = f" <= {most}"
    raise kind(operation, name, shown(value), f"an int{limits}")


def number(
    operation: str,
    name: str,
    value: Any,
    below: float = math.inf,
    kind: type[Fp8kitError] = ArgumentError,
    least: float = 0.0,
    above: float | None = None,
) -> float:
    """Returns a finite number in [least, below), or in (above, below)."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, _NO_NUMBER)
    try:
        found = float(value) if real else math.nan  # a float16 would bring the limits into its own range
        if math.isfinite(found) and found < below and (found >= least if above is None else found > above):
            return found
    except OverflowError:  # an int that no float holds
        pass
    lower = f" and >= {least:g}" if above is None else f" and > {above:g}"
    if least == -math.inf:
        lower = ""
    upper = "" if below == math.inf else f" and < {below:g}"
    raise kind(operation, name, shown(value), f"a finite number{lower}{upper}")


def choice(
    operation: str, name: str, value: Any, options: Iterable[str], kind: type[Fp8kitError] = ArgumentError
) -> str:
    """One of some words."""
    words = tuple(options)
    if not isinstance(value, str) or value not in words:
        printed = map(repr, words) if any("," in word for word in words) else words
        raise kind(operation, name, shown(value), f"one of {', '.join(printed)}{meant(value, words)}")
    return value


def function(
    operation: str,
    name: str,
    value: Any,
    kind: type[Fp8kitError] = ArgumentError,
    takes: tuple[Any, ...] = (),
    said: str = "a function",
) -> Callable[..., Any]:
    """Something to call, with such arguments as ``takes`` where these are given."""
    fits = callable(value)
    if fits and takes:
        try:
            inspect.signature(value).bind(*takes)
        except TypeError:
            fits = False
        except ValueError:  # a function that does not say what it takes
            pass
    if not fits:
        raise kind(operation, name, shown(value), said)
    return value  # type: ignore[no-any-return]


def listed(
    operation: str, name: str, value: Any, wanted: str, kind: type[Fp8kitError] = ArgumentError
) -> list[Any]:
    """Returns what an iterable holds; a string and an array are none."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | np.ndarray):
        return list(value)
    raise kind(operation, name, shown(value), wanted)


def sizes(operation: str, values: Iterable[Any], kind: type[Fp8kitError]) -> tuple[int, ...]:
    """Ints of any sign: extents, axes, offsets."""
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise kind(operation, "arguments", shown(values), "ints") from None


def path(operation: str, value: Any) -> str:
    """Returns a file's path as a string. CheckpointError for anything else."""
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str) and "\0" not in text and os.path.basename(text):
            return text
    raise CheckpointError(operation, "path", shown(value), f"a path: {operation}(path, module)")


@cache
def _names_of(function: Any) -> tuple[str, ...]:
    """Returns the arguments that may be given by name; () where any may."""
    known = inspect.signature(function).parameters.values()
    any_name = any(p.kind is p.VAR_KEYWORD for p in known)
    return (
        ()
        if any_name
        else tuple(p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    )


def want_names(said: str, function: Any, named: Iterable[str]) -> None:
    """TypeError for a name that is no argument of ``function``, which is ``said`` to be called so, with the
    one that was meant, or, where none is like it, with all of them if they are few."""
    known = [each for each in _names_of(function) if each not in ("self", "cls")]
    for name in named:
        if known and name not in known:
            near = meant(name, known) or (f"; it has {', '.join(known)}" if len(known) <= _FEW else "")
            raise TypeError(f"{said}() got an unexpected keyword argument {name!r}{near}")


def without_unknown(function: _Function) -> _Function:
    """``function``, whose last parameter, ``**unknown``, takes what ``want_names`` is to refuse, and is no
    part of the signature that ``inspect`` finds: a try statement around the call would be a further frame."""
    own = inspect.signature(function)
    known = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = own.replace(parameters=known)  # type: ignore[attr-defined]
    return function


def want_known(cls: type, named: Iterable[str]) -> None:
    """TypeError for a name that the constructor of ``cls`` does not have, with the one that was meant."""
    if named:
        want_names(f"{cls.__name__}.__init__", cls.__init__, named)  # type: ignore[misc]


class NamedWell:
    """Base of classes whose constructors say of an unknown name which one was meant. A base, so that what
    ``inspect`` finds is ``__init__``."""

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """TypeError for a name that the constructor does not have."""
        want_known(cls, named)
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        """What has no docstring has its first base's: a frontend's layer does what the shared one says."""
        super().__init_subclass__()
        if cls.__doc__ is None:
            cls.__doc__ = cls.__mro__[1].__doc__


def named_well(function: _Function) -> _Function:
    """Returns the function, which says of a keyword argument that it does not have which one was meant."""

    known = _names_of(function)  # not at a call, which torch.compile may trace

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        for name in named:
            if known and name not in known:
                want_names(function.__qualname__, function, named)
        return function(*arguments, **named)

    return call  # type: ignore[return-value]


# --- rules: checks of arguments by their names --------------------------------------------------------------

Rule = Callable[[str, str, Any], Any]


def check(operation: str, rules: Mapping[str, Rule], given: Mapping[str, Any]) -> None:
    """Call the rule of each argument in ``given``, by name; names without a rule are passed over. Raises what
    a rule raises, mostly ArgumentError."""
    for name, value in given.items():
        rule = rules.get(name)
        if rule is not None:
            rule(operation, name, value)


def optional(rule: Rule) -> Rule:
    """``rule``, or None."""
    return lambda operation, name, value: None if value is None else rule(operation, name, value)


def one(*words: str) -> Rule:
    """One of some words."""
    return lambda operation, name, value: choice(operation, name, value, words)


def named(rule: Rule, names: str) -> dict[str, Rule]:
    """``rule`` for each of the names."""
    return dict.fromkeys(names.split(), rule)


def shown(value: Any, most: int = 60) -> str:
    """Returns a value's ``repr``, shortened; an array or a tensor by its kind."""
    dtype = getattr(value, "dtype", None)
    if isinstance(getattr(value, "shape", None), tuple) and not isinstance(value, np.generic | np.dtype):
        kind = "an array" if isinstance(value, np.ndarray) else "a tensor"
        if type(value).__module__.startswith("fp8kit."):  # beside another library's of the same name
            kind = f"an fp8kit.{type(value).__name__}"
        return f"{kind} of {getattr(dtype, 'name', dtype)}, shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
