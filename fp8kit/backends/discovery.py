"""Finding plugins: packages that announce themselves by an entry point, and modules that a variable names.

A plugin is all or nothing: one that fails to import or to register leaves no trace in the registry, is
reported with its traceback, and does not keep the others from working.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fp8kit import settings
from fp8kit.backends.registry import IN_TREE, LOCK, OpRegistry
from fp8kit.errors import BackendError

PLUGIN_GROUP = "fp8kit.plugins"
PLUGIN_MODULES_ENV = "FP8KIT_PLUGIN_MODULES"
_FUNCTIONS = ("register", "te_fl_register")

log = logging.getLogger("fp8kit")


class Discovered(NamedTuple):
    """A plugin that was found: its ``name``, its ``source`` (the entry point's distribution, or the
    variable), whether it is registered, how many ``implementations`` it brought, and, where it failed, the
    traceback."""

    name: str
    source: str
    ok: bool
    implementations: int = 0
    error: str = ""


class Loaded(NamedTuple):
    """A plugin's module or function, ``found``, or why there is none: the ``error`` and its ``traceback``.
    ``unfinished``: its module is being imported further up in this thread, or waits for this thread."""

    name: str
    source: str
    found: Any = None
    error: BaseException | None = None
    traceback: str = ""
    unfinished: bool = False


def discover_plugin(registry: OpRegistry) -> tuple[Discovered, ...]:
    """Register every plugin that is installed (entry points of the group ``fp8kit.plugins``) or named by
    FP8KIT_PLUGIN_MODULES.

    A plugin is a module with ``register(registry)`` (or ``te_fl_register``), or that function itself. Raises
    nothing: what fails is logged, and said in the answer.
    """
    return register_plugins(registry, load_plugins())


def load_plugins() -> list[Loaded]:
    """Import what is installed or named. To be called without any lock: the module may compute, and so may
    one that another thread is importing and that this one then waits for."""
    found = []
    for name, source, module, load in (*_from_entry_points(), *_from_variable()):
        try:
            found.append(Loaded(name, source, load(), unfinished=_unfinished(module)))
        except (Exception, SystemExit) as error:
            found.append(Loaded(name, source, None, error, traceback.format_exc(), _unfinished(module)))
    return found


def _unfinished(module: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False))


def register_plugins(registry: OpRegistry, plugins: Iterable[Loaded]) -> tuple[Discovered, ...]:
    """Let what was loaded register itself; see ``discover_plugin``."""
    found: list[Discovered] = []
    done: set[Any] = set()
    for plugin in plugins:
        name, source = plugin.name, plugin.source
        with LOCK:
            before, known, version = registry.snapshot(), set(registry.every()), registry.version
            try:
                if plugin.error is not None:
                    raise plugin.error
                function = _function(name, plugin.found)
                if function in done:  # named twice
                    found.append(Discovered(name, source, True))
                    continue
                function(registry)
                done.add(function)
                new = [impl for impl in registry.every() if impl not in known]
                for impl in new:
                    if impl.engine in IN_TREE:
                        wanted = f"another engine than fp8kit's own {', '.join(IN_TREE)}"
                        raise BackendError("plugin", name, f"impl_id {impl.impl_id!r}", wanted)
            except (Exception, SystemExit) as error:
                if registry.version != version:
                    registry.restore(before)
                found.append(
                    Discovered(name, source, False, error=plugin.traceback or traceback.format_exc())
                )
                log.error(
                    "plugin %s (%s) failed and is left out: %s: %s; `fp8kit plugins list` shows where",
                    name,
                    source,
                    type(error).__name__,
                    error,
                )
            else:
                found.append(Discovered(name, source, True, len(new)))
                log.info("plugin %s (%s): %d implementations", name, source, len(new))
    return tuple(found)


def _from_entry_points() -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    for point in sorted(importlib.metadata.entry_points(group=PLUGIN_GROUP), key=lambda p: (p.name, p.value)):
        known = point.dist
        source = f"entry point {point.value}" if known is None else f"{known.name} {known.version}"
        yield point.name, source, point.module, point.load


def _from_variable() -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    for module in settings.plugin_modules():
        yield module, PLUGIN_MODULES_ENV, module, functools.partial(importlib.import_module, module)


def _function(name: str, found: Any) -> Callable[[OpRegistry], Any]:
    for attribute in _FUNCTIONS:
        function = getattr(found, attribute, None)
        if callable(function):
            return function  # type: ignore[no-any-return]
    if callable(found):
        return found  # type: ignore[no-any-return]
    raise BackendError(
        "plugin", name, repr(found), f"a module with {' or '.join(_FUNCTIONS)}(registry), or such a function"
    )
