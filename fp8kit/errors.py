"""The errors that fp8kit raises on purpose.

``ShapeError("linear", "x", "shape (3, 5)", "(tokens, 4)")`` carries its four fields and reads ``linear: x:
got shape (3, 5), expected (tokens, 4)``, or ``missing, expected ...`` where nothing came; an error of one
argument is that sentence. Each class is also the built-in kind a caller would guess (ValueError, RuntimeError
or NotImplementedError).
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self


class Fp8kitError(Exception):
    """Base of every error that fp8kit raises on purpose.

    Made of (operation, argument, got, wanted), which are then its fields, or of one sentence.
    """

    # no __init__ of its own: torch.compile traces code that raises

    @property
    def operation(self) -> str | None:
        """What refused; None for an error that was made of a sentence, as the other three."""
        return self.args[0] if len(self.args) == 4 else None

    @property
    def argument(self) -> str | None:
        """Which of its arguments."""
        return self.args[1] if len(self.args) == 4 else None

    @property
    def got(self) -> Any:
        """What came; None where nothing did."""
        return self.args[2] if len(self.args) == 4 else None

    @property
    def wanted(self) -> str | None:
        """What was expected."""
        return self.args[3] if len(self.args) == 4 else None

    def __str__(self) -> str:
        if len(self.args) != 4:
            return super().__str__()
        came = "missing" if self.got is None else f"got {self.got}"
        return f"{self.operation}: {self.argument}: {came}, expected {self.wanted}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def renamed(self, operation: str, argument: str) -> Self:
        """Returns the same refusal as one of ``operation``'s ``argument``: what a caller sees of a check
        further down. A sentence follows the two names."""
        if self.argument is None:
            return type(self)(f"{operation}: {argument}: {self}")
        return type(self)(operation, argument, self.got, self.wanted)


class ShapeError(Fp8kitError, ValueError):
    """A shape, stride or size does not fit the operation."""


class ArgumentError(Fp8kitError, ValueError):
    """A plain argument (a number, a word, a flag, an array's values) is none that the operation takes."""


class FormatError(Fp8kitError, ValueError):
    """A dtype, FP8 format, scaling or rounding mode does not fit the operation."""


class RecipeError(Fp8kitError, ValueError):
    """A recipe has an unknown, contradictory or unsupported field."""


class UnsupportedError(Fp8kitError, NotImplementedError):
    """A correct call of something that fp8kit does not have; the message says why."""


class BackendError(Fp8kitError, RuntimeError):
    """An engine, a device or a library that the call needs is missing or failed."""


class CheckpointError(Fp8kitError, RuntimeError):
    """A checkpoint cannot be read, or does not fit the model it is loaded into."""

    def __str__(self) -> str:
        text = super().__str__()  # has names out of a file, which may be of any length
        return text if len(text) <= 4000 else f"{text[:2000]} ... {text[-1000:]}"


class AutogradError(Fp8kitError, RuntimeError):
    """The tape cannot differentiate what it was asked to."""


class NonFiniteError(Fp8kitError, ArithmeticError):
    """A value became Inf or NaN where ``autocast(check_finite=True)`` looks for that."""


# what others call a thing -> what Transformer Engine and fp8kit do
_ELSEWHERE = {
    "swish": "silu",
    "dropout": "hidden_dropout",
    "dtype": "params_dtype",
    "eps": "epsilon",
    "learning_rate": "lr",
    "grad": "gradient",
    "granularity": "scaling",
    "scaling": "granularity",
    "rotation": "hadamard",
    "block": "block_1x128",
}


def meant(name: object, known: Iterable[str], most: int = 1, before: str = "") -> str:
    """Returns what a wrong ``name`` was probably meant to be, as the end of a refusal, at most so many of the
    ``known``: ``; did you mean gemm?``; but all, where at most three begin with it, or else contain it.
    Nothing where none is like it, in upper or lower case, or for a name that begins with two underscores,
    which Python or a tool asks for. ``before``: what every such name begins with in print."""
    if str(name).startswith("__"):
        return ""
    lower: dict[str, str] = {}
    for one in known:
        lower.setdefault(one.lower(), one)
    wrong = str(name).lower()
    wrong = _ELSEWHERE.get(wrong, "") if _ELSEWHERE.get(wrong, "") in lower else wrong
    near = difflib.get_close_matches(wrong, list(lower), most)
    if not any(wrong in one and len(one) <= len(wrong) + 1 for one in near):
        begun = [one for one in lower if one.startswith(wrong)]
        words = [one for one in begun if one.startswith(f"{wrong}_")]
        having = [one for one in lower if wrong in one and len(wrong) > 2]
        # all that it begins, or is a part of, before those that are like it
        near = next((some for some in (begun, words, having) if 0 < len(some) <= 3), near)
    return f"; did you mean {' or '.join(before + lower[one] for one in near)}?" if near else ""


def install(extra: str) -> str:
    """Returns how to get the packages of one of fp8kit's extras: the end of a refusal for want of them."""
    return f"install it, in a checkout of fp8kit, with: pip install '.[{extra}]'"


def not_installed(who: str, extra: str | None, *modules: str) -> str:
    """Why ``who`` cannot be imported: those of the top-level ``modules`` that are not installed, and the
    extra that has them; None: no small one has, and they are packages of their own names. Nothing where all
    are."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    cure = install(extra) if extra else f"install it with: pip install {' '.join(absent)}"
    return f"{who} needs {' and '.join(absent)}, not installed here; {cure}" if absent else ""


@contextmanager
def on_behalf_of(operation: str, **names: str) -> Iterator[None]:
    """Within, or in the function that this decorates, refusals are ``operation``'s: of its arguments, which
    ``names`` calls what they are further down. For what is made of parts that check for themselves."""
    try:
        yield
    except Fp8kitError as error:
        if error.argument is None or error.operation == operation:
            raise
        raise error.renamed(operation, names.get(error.argument, error.argument)) from None
