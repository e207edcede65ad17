"""``fk.override``: another implementation of one operation of the kernel contract, for a block, a function,
one call or a whole training.

An override is an ``OpImpl`` in the policy in force: thread by thread, nested, and travelling from forward to
backward with the plan that was made under it. Outside of a block nothing is changed, and nothing costs
anything.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8kit.backends import dispatch
from fp8kit.backends.policy import SelectionPolicy, get_policy, policy_context
from fp8kit.backends.protocol import SPECS, signature, views
from fp8kit.backends.registry import Kind, OpImpl, want_kernel
from fp8kit.errors import BackendError
from fp8kit.lab.verify import on, verified
from fp8kit.raw_kernels import manifest

log = logging.getLogger("fp8kit")

_ANY, _CUDA = frozenset({"cpu", "cuda"}), frozenset({"cuda"})
_KINDS = "a CUDA source (str, or Path of a .cu), a cupy.RawKernel, a numba.cuda kernel or a Python function"


class _Local(threading.local):
    def __init__(self) -> None:
        self.blocks: list[tuple[AbstractContextManager[object], int]] = []


class Override(ContextDecorator):
    """What ``override`` gives: a context manager and a decorator, to be entered as often as one likes.
    ``calls`` counts the calls of the implementation (of kernels: the launches, with ``defines`` those that
    these ask for) since it was made."""

    def __init__(self, operation: str, make: Callable[[SelectionPolicy], OpImpl], where: str) -> None:
        self.operation = operation
        self.calls = 0
        # one implementation for one policy round it: plans are kept by it
        self._make = functools.lru_cache(maxsize=8)(make)
        self._where = where
        self._local = _Local()

    def count(self) -> None:
        """Note that the implementation was called."""
        self.calls += 1

    def __enter__(self) -> Override:
        policy = get_policy()
        overrides = (*policy.overrides, (self.operation, self._make(policy)))
        block = policy_context(replace(policy, overrides=overrides))
        block.__enter__()
        self._local.blocks.append((block, self.calls))
        return self

    def __exit__(self, *error: Any) -> None:
        block, before = self._local.blocks.pop()
        block.__exit__(*error)
        if error[0] is None and self.calls == before:
            log.warning(
                "override of %s: nothing within the block called it (it serves %s)",
                self.operation,
                self._where,
            )

    def __repr__(self) -> str:
        return f"Override({self.operation}, {self.calls} calls)"


def override(
    operation: str,
    implementation: Any,
    *,
    defines: str = "",
    function: str | None = None,
    verify: bool = False,
) -> Override:
    """Use ``implementation`` for ``operation``, a name of ``fp8kit.backends.protocol.KERNELS``, within a
    block or a decorated function.

    * A Python function has the contract's parameters, by name and order (``protocol.signature``); its arrays
      are ``ArrayView``s of the shapes and dtypes that the contract says (``fp8kit.lab.native`` makes NumPy or
      CuPy arrays of them). With a first parameter named ``original`` it gets there what would have been
      called without it.
    * A CUDA source, text or ``Path``, stands for the file of fp8kit's raw kernels whose functions it defines:
      every function that the operation takes from that file, with the same parameters. The engine's host code
      launches it, compiled with the same defines, but for what ``defines`` says, as `fp8kit kernels bench
      --variant` does: "PROMOTE=128:64" compiles 64 where the engine's PROMOTE is 128, "PROMOTE=64,BM=256"
      where its BM is 256. Grid and arguments stay the engine's.
    * A ``cupy.RawKernel`` or a numba.cuda kernel takes the place of one function, ``function``, by default
      the one of the operation's name.

    ``verify``: the CPU engine computes every call a second time, on copies, and the first difference is an
    error, within the contract's tolerances; slow, not within a captured graph. Raises BackendError here,
    before anything runs, for an argument that does not fit, naming it; at a call for a source that does not
    compile and, with ``verify``, for a wrong result. Kernels serve CUDA arrays; others are not concerned.
    """
    want_kernel("override", "operation", operation)
    if not isinstance(verify, bool):
        raise BackendError("override", "verify", repr(verify), "True or False")
    kind = _kind(implementation)
    if not isinstance(defines, str) or (defines and kind != "text"):
        wanted = "a text, NAME=VALUE or NAME=OLD:NEW by commas, beside a CUDA source"
        raise BackendError("override", "defines", repr(defines), wanted)
    if function is not None and kind not in ("cupy", "numba"):
        raise BackendError(
            "override", "function", repr(function), "None, but for a cupy.RawKernel or a numba.cuda kernel"
        )
    if kind == "python":
        takes_original = _check_signature(operation, implementation)
        devices = _ANY

        def make(outer: SelectionPolicy) -> OpImpl:
            inner = (
                functools.partial(_with_original, implementation, operation, outer)
                if takes_original
                else implementation
            )
            return implement(_on_its_stream(operation, inner, made.count))
    else:
        engine, asked = _replaced(operation, implementation, kind, function, defines)
        devices = _CUDA

        def note(variant: manifest.Defines) -> None:
            if asked.of(variant) is not None:
                made.count()

        def make(outer: SelectionPolicy) -> OpImpl:
            return implement(engine(note))

    def implement(call: Callable[..., Any]) -> OpImpl:
        return OpImpl(
            operation,
            f"override.{operation}",
            Kind.DEFAULT,
            verified(operation, call) if verify else call,
            devices=devices,
        )

    where = " and ".join(sorted(devices)) + " arrays" + (f", launches with {defines}" if defines else "")
    made = Override(operation, make, where)
    return made


def _kind(implementation: Any) -> str:
    if isinstance(implementation, str | Path):
        return "text"
    kind = type(implementation)
    library = kind.__module__.partition(".")[0]
    if library == "cupy" and kind.__name__ == "RawKernel":
        return "cupy"
    if library in ("numba", "numba_cuda") and kind.__name__ == "CUDADispatcher":
        return "numba"
    if callable(implementation):
        return "python"
    raise BackendError("override", "implementation", kind.__name__, _KINDS)


# --- Python functions ---------------------------------------------------------------------------------------


def _check_signature(operation: str, function: Callable[..., Any]) -> bool:
    """Whether the function takes the original; BackendError where its parameters are not the contract's."""
    wanted = [p.replace(annotation=inspect.Parameter.empty) for p in signature(operation).parameters.values()]
    text = f"({', '.join(p.name for p in wanted)})"
    name = getattr(function, "__name__", type(function).__name__)
    try:
        given = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        raise BackendError(
            "override", "implementation", f"{name}, whose parameters are unknown", _KINDS
        ) from None
    takes_original = bool(given) and given[0].name == "original"
    if takes_original and not SPECS[operation].launches:
        raise BackendError(
            "override", "implementation", f"{name}(original, ...)", f"{text}: {operation} takes no arrays"
        )
    given = given[takes_original:]
    if any(p.kind is p.VAR_POSITIONAL for p in given):
        return takes_original
    if [p.name for p in given] != [p.name for p in wanted] or any(p.kind is p.KEYWORD_ONLY for p in given):
        got = f"{name}({', '.join(map(str, (p.name for p in given)))})"
        raise BackendError(
            "override", "implementation", got, f"the contract's parameters of {operation}, {text}"
        )
    return takes_original


def _with_original(function: Callable[..., Any], operation: str, outer: SelectionPolicy, *args: Any) -> Any:
    """``function`` with what ``outer``, the policy round the override, chooses for the arrays' device."""
    device = next(views(args)).device
    with policy_context(outer):
        return function(getattr(dispatch.kernels(device), operation), *args)


def _on_its_stream(
    operation: str, function: Callable[..., Any], count: Callable[[], None]
) -> Callable[..., Any]:
    """Returns the function, called with positional arguments, CuPy's current stream being the call's."""
    contract, launches = signature(operation), SPECS[operation].launches

    def call(*args: Any, **named: Any) -> Any:
        count()
        if named:
            args = contract.bind(*args, **named).args
        first = next(views(args), None)
        with nullcontext() if first is None else on(first.device, args[-1]):
            answer = function(*args)
        if launches and answer is not None:  # what was to be written is not written then
            got = f"{getattr(function, '__name__', operation)}, which returns {type(answer).__name__}"
            raise BackendError(
                "override",
                "implementation",
                got,
                f"results written into the arrays that {operation} is given",
            )
        return answer

    return call


# --- kernels ------------------------------------------------------------------------------------------------


def _replaced(
    operation: str, implementation: Any, kind: str, function: str | None, defines: str
) -> tuple[Callable[[Callable[[manifest.Defines], None]], Callable[..., Any]], manifest.Asked]:
    """What makes the engine's implementation with the kernel in its place, given what is to be called at
    every launch of it, with the engine's defines; and of these what ``defines`` asks for."""
    from fp8kit.backends.cuda import substitute

    if not manifest.uses(operation):
        raise BackendError(
            "override", "implementation", "a kernel", f"a Python function: {operation} launches none"
        )
    asked = manifest.Asked()
    if kind == "text":
        unit = read(implementation)
        source = _source_of(operation, unit)
        try:
            asked = manifest.asked(defines, manifest.source(source), unit)
        except ValueError as error:
            raise BackendError("override", "defines", repr(defines), str(error)) from None
        table = substitute.of_text(unit, source, asked)
    else:
        place = _place_of(operation, function)
        table = (substitute.of_cupy if kind == "cupy" else substitute.of_numba)(implementation, place)
    return functools.partial(substitute.engine_with, operation, table), asked


def read(text: str | Path) -> manifest.Unit:
    """Returns a CUDA source, text or file, with the headers that it includes. BackendError where one of them
    cannot be read."""
    try:
        if isinstance(text, Path):
            return manifest.foreign(text.read_text(encoding="utf-8"), text.name, text.parent)
        if text.endswith(".cu") and "\n" not in text:
            raise ValueError(f"{text!r} is a file's name, expected its text, or a Path")
        return manifest.foreign(text, "override.cu")
    except UnicodeDecodeError as error:
        raise BackendError(f"override: {text} is no text: {error}") from None
    except OSError as error:
        wanted = f"a CUDA source that can be read ({error.strerror or error})"
        raise BackendError("override", "implementation", str(error.filename or text), wanted) from None
    except ValueError as error:
        raise BackendError(f"override: {error}") from None


def _source_of(operation: str, unit: manifest.Unit) -> str:
    """Returns the source that the text stands for: the one of the operation's of which it defines all
    functions that the operation launches."""
    uses = manifest.uses(operation)
    named = manifest.functions_of(unit)
    touched = [source for source, functions in uses.items() if named & set(functions)]
    if len(touched) != 1:
        choices = "; or ".join(f"{', '.join(functions)} of {source}" for source, functions in uses.items())
        got = f"{unit.name}, which defines {', '.join(sorted(named)) or 'no function'}"
        wanted = f'a source that defines extern "C" __global__ {choices}'
        raise BackendError("override", "implementation", got, wanted)
    missing = set(uses[touched[0]]) - named
    if missing:
        raise BackendError(
            "override",
            "implementation",
            f"{unit.name} without {', '.join(sorted(missing))}",
            f"every function that {operation} takes from {touched[0]}",
        )
    return touched[0]


def _place_of(operation: str, function: str | None) -> tuple[str, str]:
    """(source, function) that one kernel takes the place of."""
    places = [(source, name) for source, functions in manifest.uses(operation).items() for name in functions]
    wanted = operation.rstrip("_") if function is None and len(places) > 1 else function
    found = (
        [place for place in places if wanted in (None, place[1])] if isinstance(wanted, str | None) else []
    )
    if len(found) != 1:
        names = ", ".join(name for _, name in places)
        raise BackendError("override", "function", repr(function), f"one of {names}")
    return found[0]
