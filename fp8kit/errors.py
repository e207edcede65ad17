"""The errors that fp8kit raises on purpose.

Every message names the operation, the argument, what came and what was expected; ``expected`` builds it so
that the wording is the same everywhere. Each class is also the built-in kind a caller would guess (ValueError
or RuntimeError).
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Fp8kitError(Exception):
    """Base of every error that fp8kit raises on purpose."""


class ShapeError(Fp8kitError, ValueError):
    """A shape, stride or size does not fit the operation."""


class ArgumentError(Fp8kitError, ValueError):
    """A plain argument (a number, a word, a flag, an array's values) is none that the operation takes."""


class FormatError(Fp8kitError, ValueError):
    """A dtype, FP8 format, scaling or rounding mode does not fit the operation."""


class RecipeError(Fp8kitError, ValueError):
    """A recipe has an unknown, contradictory or unsupported field."""


class BackendError(Fp8kitError, RuntimeError):
    """An engine, a device or a library that the call needs is missing or failed."""


class CheckpointError(Fp8kitError, RuntimeError):
    """A checkpoint cannot be read, or does not fit the model it is loaded into."""


class AutogradError(Fp8kitError, RuntimeError):
    """The tape cannot differentiate what it was asked to."""


class NonFiniteError(Fp8kitError, ArithmeticError):
    """A value became Inf or NaN where ``autocast(check_finite=True)`` looks for that."""


def expected(operation: str, argument: str, got: object, wanted: str) -> str:
    """The one sentence of a refusal: ``linear: x: got shape (3, 5), expected (tokens, 4)``."""
    return f"{operation}: {argument}: got {got}, expected {wanted}"


def meant(name: object, known: Iterable[str], most: int = 1, before: str = "") -> str:
    """What a wrong ``name`` was probably meant to be, as the end of a refusal, at most so many of the
    ``known``: ``; did you mean gemm?``. Nothing where none is like it. ``before``: what every such name
    begins with in print."""
    near = difflib.get_close_matches(str(name), list(dict.fromkeys(known)), most)
    return f"; did you mean {' or '.join(before + one for one in near)}?" if near else ""


def install(extra: str) -> str:
    """How to get the packages of one of fp8kit's extras: the end of a refusal for want of them."""
    return f"install it, in a checkout of fp8kit, with: pip install '.[{extra}]'"


def not_installed(who: str, extra: str, *modules: str) -> str:
    """Why ``who`` cannot be imported: those of the top-level ``modules`` that are not installed, and the
    extra that has them. Nothing where all are."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{who} needs {' and '.join(absent)}, not installed here; {install(extra)}" if absent else ""


def renamed(error: Fp8kitError, operation: str, argument: str) -> Fp8kitError:
    """The same refusal, of ``expected``'s form, as the one of ``operation``'s ``argument``: what a caller
    sees of a check further down."""
    *_, rest = str(error).split(": ", 2)
    return type(error)(f"{operation}: {argument}: {rest if rest.startswith('got ') else error}")


@contextmanager
def on_behalf_of(operation: str, **names: str) -> Iterator[None]:
    """Within, or in the function that this decorates, refusals are ``operation``'s: of its arguments, which
    ``names`` calls what they are further down. For what is made of parts that check for themselves."""
    try:
        yield
    except Fp8kitError as error:
        own, argument, rest = (*str(error).split(": ", 2), "", "")[:3]
        if own == operation or not rest.startswith("got "):
            raise
        raise type(error)(f"{operation}: {names.get(argument, argument)}: {rest}") from None
