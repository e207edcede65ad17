"""Commands of ``fp8kit`` in files of their own, each with ``add(commands)``, which adds its parser; and what
all commands share."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, BackendError, Fp8kitError, meant

# exit status of a command that ran and whose result is not what it must be, or that could not run here
FAILED = 1
_LEAST = 8  # characters that a column keeps on a terminal
WRONG_ARGUMENT = 2  # of one whose arguments are none, as argparse has it


def device_of(options: argparse.Namespace) -> Device:
    """Returns the device that was asked for, or the default one. ArgumentError for an unknown name,
    BackendError for a device that is not usable."""
    if options.device is None:
        return dispatch.default_device()
    try:
        device = arrays.device(options.device, options.command, "--device")
    except BackendError as error:
        raise ArgumentError(*error.args) from None
    usable = arrays.provider(device).count()
    if device.index >= usable:
        raise BackendError(
            f"--device: {device} is not usable, {usable} {device.kind} devices are; "
            "`fp8kit info` lists what is missing"
        )
    return device


def folder(path: Path) -> Path:
    """``path`` as a folder that exists, made before the work whose results go there. ArgumentError where that
    is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        wanted = f"a folder that can be made ({error.strerror})"
        raise ArgumentError("results", "--out", path, wanted) from None
    return path


def writable(argument: str, path: Path) -> None:
    """ArgumentError where ``path`` is no file that can be written: before the work whose results go there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except (OSError, ValueError) as error:
        wanted = f"a file that can be written ({getattr(error, 'strerror', None) or error})"
        raise ArgumentError("results", argument, path, wanted) from None


def said(command: str, error: Exception) -> str:
    """Returns a refusal as ``command`` says it: which operation refused is left out where that is the
    command, or an option of its own is named."""
    text = str(error).removeprefix(f"{command}: ")
    if isinstance(error, Fp8kitError) and (error.argument or "").startswith("--"):
        text = text.removeprefix(f"{error.operation}: ")
    return text if text.startswith(f"fp8kit {command}") else f"fp8kit {command}: {text}"


def status_of(error: Exception) -> int:
    """Returns the exit status that a refusal ends a command with: 2 where it is of an argument (a ValueError,
    see ``fp8kit.errors``), else 1: the environment, the machine or a file is not what the command needs."""
    return WRONG_ARGUMENT if isinstance(error, ValueError) else FAILED


class Parser(argparse.ArgumentParser):
    """A parser whose refusal is one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but that a command refuses what it does not know, not the program around it."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            near = meant(unknown[0].partition("=")[0], known).rstrip("?")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Say what is wrong on standard error and exit with 2."""
        # argparse gives a refusal as a text and nothing else
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            word = "cuda" if choice[1] == "gpu" else choice[1]
            message += meant(word, re.findall(r"[\w-]+", choice[2])).rstrip("?")
        if message.startswith("the following arguments are required: "):
            for action in self._actions:
                named = str(action.metavar or action.dest) in message
                if named and not action.option_strings and action.choices:
                    message += f", one of {', '.join(action.choices)}"
        self.exit(WRONG_ARGUMENT, f"{self.prog}: error: {message}; {self.prog} --help says more\n")


def command(commands: Any, name: str, what: str, run: Any = None, **options: Any) -> argparse.ArgumentParser:
    """Returns the parser of a command, or of one of its actions, added to ``commands``, what
    ``add_subparsers`` gave. ``run``: what the command does; ``what`` says it in a line."""
    about = f"{what[0].upper()}{what[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=about, **options)
    parser.set_defaults(run=run)
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the argument that ``device_of`` reads."""
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (cuda where usable, else cpu)")


def positive(text: str) -> int:
    """Returns an argument of argparse that is a positive number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def seed(text: str) -> int:
    """Returns a seed, for argparse."""
    if not (text.isdecimal() and text.isascii() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"got {text}, expected an int in [0, {2**32})")
    return int(text)


def minutes(text: str) -> float:
    """Returns an argument of argparse that is a time above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text}, expected a finite number and > 0")


def positional(about: str | None, **kinds: Callable[[str], Any]) -> list[Any]:
    """Returns the process's arguments, for a program that takes at most one for each of the names, read by
    their ``kinds``. Other arguments end it with status 2 and one line that says what is wrong; --help prints
    ``about`` and the names."""
    parser = Parser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in kinds.items():
        parser.add_argument(name, type=kind, nargs="?")
    return [value for value in vars(parser.parse_args()).values() if value is not None]


def table(head: Sequence[str], rows: Iterable[Sequence[object]], fit: bool = False) -> None:
    """Print aligned columns; the last one is not filled up. ``fit``: on a terminal the widest are cut to its
    width."""
    lines = [tuple(head), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    if fit and sys.stdout.isatty():
        most = shutil.get_terminal_size().columns - 2 * (len(head) - 1)
        while sum(widths) > most and max(widths) > _LEAST:
            widths[widths.index(max(widths))] -= 1
    for line in lines:
        cells = [
            cell if len(cell) <= width else f"{cell[: width - 3]}..."
            for cell, width in zip(line, widths, strict=True)
        ]
        print("  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())


def numbers(text: str, count: int) -> tuple[int, ...]:
    """``--layer``: ``count`` positive numbers separated by commas; ArgumentError otherwise."""
    parts = text.split(",")
    if len(parts) != count or not all(part.isdecimal() and int(part) > 0 for part in parts):
        wanted = f"{count} positive numbers separated by commas"
        raise ArgumentError("argument", "--layer", repr(text), wanted)
    return tuple(map(int, parts))
