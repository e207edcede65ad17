"""From a kernel, a device and a policy to the implementation that runs: the candidates in order, and what
each call goes through.

Every choice is made once per device and policy and kept until the registry changes, so that a call costs one
look-up.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from fp8kit import arrays, settings
from fp8kit.arrays import Device
from fp8kit.backends import discovery
from fp8kit.backends import policy as policies
from fp8kit.backends.discovery import Discovered
from fp8kit.backends.policy import SelectionPolicy
from fp8kit.backends.protocol import KERNELS, SERVES, signature, views
from fp8kit.backends.registry import IN_TREE, LOCK, CannotTake, OpImpl, OpRegistry, want_kernel
from fp8kit.devices import lacking
from fp8kit.errors import BackendError

log = logging.getLogger("fp8kit")

Arch = Callable[[], int | None]
Refusals = list[tuple[OpImpl, str]]
_TABLE_LIMIT = 256
_SAID: set[tuple[str, ...]] = set()
_SAID_LIMIT = 4096
OVERRIDDEN = "fk.override is in force"


def say_once(level: int, text: str, *parts: object) -> None:
    """Log a message the first time that it comes with these parts."""
    key = (text, *map(str, parts))
    if key not in _SAID:
        if len(_SAID) >= _SAID_LIMIT:
            _SAID.clear()
        _SAID.add(key)
        log.log(level, text, *parts)


class Chosen(SimpleNamespace):
    """Every kernel of the contract, as it was chosen, and the ``policy``.

    ``recorder``: the engine's context manager that records calls (``execution.replay``), None where they
    cannot be; ``replays``: where the recorded calls of single kernels are kept. Neither is among ``vars``,
    since another object made of these kernels may have others.
    """

    __slots__ = ("recorder", "replays")


class OpManager:
    """A registry and the choices made from it. ``registry``: None is a new one, filled at the first question.

    ``device`` of the methods: a Device or its name; None is the CPU, and in ``call`` the device of the first
    array.
    """

    def __init__(self, registry: OpRegistry | None = None) -> None:
        self.registry = OpRegistry() if registry is None else registry
        self.table: dict[tuple[Device, int], Any] = {}  # (device, identity of the policy) -> kernels
        self.registry.on_change(self._forget)
        self._loaded: set[str] = set()
        self._discovered: tuple[Discovered, ...] | None = None
        self._registering: int | None = None  # the thread that lets plugins register

    # --- what there is --------------------------------------------------------------------------------------

    def ensure_initialized(self, kind: str | None = None) -> None:
        """Register the plugins and fp8kit's own engines for a device kind (None: all), once. A forked child
        has what its parent had."""
        wanted = [name for name, served in IN_TREE.items() if kind in (None, served)]
        if self._discovered is not None and self._loaded.issuperset(wanted):
            return
        # nothing is imported under the lock: a module that another thread is importing may compute, which
        # asks for the lock
        modules = {
            name: importlib.import_module(f"fp8kit.backends.{name}")
            for name in wanted
            if name not in self._loaded
        }
        with LOCK:
            for name, module in modules.items():
                if name not in self._loaded:
                    before = self.registry.snapshot()
                    try:
                        module.register(self.registry)
                    except BaseException:
                        self.registry.restore(before)
                        raise
                    self._loaded.add(name)
        self.discovered()

    def discovered(self) -> tuple[Discovered, ...]:
        """Returns the plugins that were found, and what became of them. Looks for them at the first call. A
        plugin whose module computes while it is imported does that without plugins: they are looked for again
        by who asks next."""
        if self._discovered is None:
            if self._registering == threading.get_ident():  # a plugin computes while it registers
                return ()
            plugins = discovery.load_plugins()
            if any(plugin.unfinished for plugin in plugins):
                return ()
            with LOCK:
                if self._discovered is None:
                    settings.set_log_level()
                    settings.replays()  # refuses
                    self._registering = threading.get_ident()
                    try:
                        self._discovered = discovery.register_plugins(self.registry, plugins)
                        vendors = (impl.vendor for impl in self.registry.every() if impl.vendor)
                        settings.warn({"cuda", *vendors})
                    finally:
                        self._registering = None
        return self._discovered

    def _forget(self) -> None:
        for found in self.table.values():
            found.policy.chosen.clear()
        self.table.clear()

    def reset(self) -> None:
        """Forget everything: implementations, plugins, choices. The next question starts anew."""
        with LOCK:
            self.registry.clear()
            self._loaded.clear()
            self._discovered = None

    # --- who may --------------------------------------------------------------------------------------------

    def candidates(
        self, op_name: str, device: Device, policy: SelectionPolicy | None = None
    ) -> tuple[list[OpImpl], Refusals]:
        """Implementations of a kernel for a device, in the order to try them, and those left out with the
        reason.

        Of a workspace function: those whose sizes count, of which the largest is taken. BackendError for an
        unknown kernel, and where the device has no driver.
        """
        return self.ranked(op_name, device, policy, lambda: _arch(device))

    def ranked(
        self, op_name: str, device: Device, policy: SelectionPolicy | None, arch: Arch
    ) -> tuple[list[OpImpl], Refusals]:
        """``candidates`` for a device whose compute capability times ten ``arch()`` says, None where that
        does not matter."""
        want_kernel("candidates", "op_name", op_name)
        self.ensure_initialized(device.kind)
        return self._ranked(op_name, device, policies.get_policy() if policy is None else policy, arch)

    def _ranked(
        self, op_name: str, device: Device, policy: SelectionPolicy, arch: Arch
    ) -> tuple[list[OpImpl], Refusals]:
        if op_name in SERVES:
            return self._companions(op_name, device, policy, arch)
        order, refused = self._overriding(op_name, device, policy, arch)
        if order:
            impls = self.registry.get_implementations(op_name)
            others = [(impl, _misplaced(impl, device) or OVERRIDDEN) for impl in impls]
        else:
            order, others = self._regular(op_name, device, policy, arch)
        return order, refused + others

    def _overriding(
        self, op_name: str, device: Device, policy: SelectionPolicy, arch: Arch
    ) -> tuple[list[OpImpl], Refusals]:
        chosen: list[OpImpl] = []
        refused: Refusals = []
        for impl in [impl for name, impl in reversed(policy.overrides) if name == op_name]:
            why = "a later fk.override is in force" if chosen else _unfit(impl, device, arch)
            if why is None:
                chosen.append(impl)
            else:
                refused.append((impl, why))
        return chosen, refused

    def _regular(
        self, op_name: str, device: Device, policy: SelectionPolicy, arch: Arch
    ) -> tuple[list[OpImpl], Refusals]:
        """Returns the candidates without overrides."""
        elsewhere = self._elsewhere(device, policy)
        asked = [
            (impl, elsewhere or policy.refuses(impl) or _unfit(impl, device, arch))
            for impl in self.registry.get_implementations(op_name)
        ]
        usable = [impl for impl, why in asked if why is None]
        order = policy.order(op_name, usable)
        refused = [(impl, why) for impl, why in asked if why is not None]
        return order, refused + [(impl, "not named by per_op") for impl in usable if impl not in order]

    def _elsewhere(self, device: Device, policy: SelectionPolicy) -> str | None:
        """Why nothing may run on the device: the engine in force is a plugin's that does not serve it."""
        if policy.backend is None or policy.backend in IN_TREE:
            return None
        served = self.registry.engines().get(policy.backend, frozenset())
        if device.kind in served:
            return None
        serves = ", ".join(sorted(served)) or "nothing: no implementation has that engine"
        return f"use_backend({policy.backend!r}) is in force, which serves {serves}"

    def _companions(
        self, op_name: str, device: Device, policy: SelectionPolicy, arch: Arch
    ) -> tuple[list[OpImpl], Refusals]:
        """Returns the workspace functions of ``op_name``, and why others are left out. They go with their
        kernels: of each implementation that a call may reach its own engine's counts, registered with the
        same options where there are several. An override may hand its call on to what it took the place of,
        so that counts as well."""
        reached: list[OpImpl] = []
        for kernel in SERVES[op_name]:
            order = self._regular(kernel, device, policy, arch)[0]
            reached += self._overriding(kernel, device, policy, arch)[0]
            reached += order[:1] if policy.strict else order
        usable, refused = self._overriding(op_name, device, policy, arch)
        impls = self.registry.get_implementations(op_name)
        for impl in reached:
            own = [one for one in impls if one.engine == impl.engine and device.kind in one.devices]
            own.sort(key=lambda one: _options(one) != _options(impl))
            usable += [one for one in own[:1] if one not in usable]
        why = f"its engine takes none of {', '.join(SERVES[op_name])} here"
        return usable, refused + [(impl, why) for impl in impls if impl not in usable]

    # --- who does -------------------------------------------------------------------------------------------

    def kernels(self, device: Device) -> Any:
        """Every kernel of the contract as attributes (``fp8kit.backends.protocol.Kernels``), chosen for
        ``device`` by the policy in force.

        Raises BackendError that names the kernel and each implementation's reason when none may be used.
        """
        return self.choose(device, policies.get_policy())

    def choose(self, device: Device, policy: SelectionPolicy) -> Any:
        """``kernels`` for a policy that is or was in force; made once."""
        found = self.table.get((device, id(policy)))
        if found is not None:
            return found
        self.ensure_initialized(device.kind)
        arch = functools.cache(lambda: _arch(device))
        with LOCK:
            if len(self.table) >= _TABLE_LIMIT:
                self._forget()
            # the policy is kept with what was chosen by it: its identity stays its own as long as the key
            # lives
            ranked = {name: self._ranked(name, device, policy, arch) for name in KERNELS}
            functions = {name: self._function(name, *ranked[name], device, policy) for name in KERNELS}
            found = Chosen(policy=policy, **functions)
            found.recorder = _recorder({name: usable for name, (usable, _) in ranked.items()})
            found.replays = None
            if self._discovered is not None:  # else what is there now is not all that there will be
                self.table[device, id(policy)] = found
            return found

    def _function(
        self, name: str, usable: list[OpImpl], refused: Refusals, device: Device, policy: SelectionPolicy
    ) -> Callable[..., Any]:
        if name in SERVES:
            return _largest(name, usable)
        if not usable:
            own = IN_TREE.get(policy.backend or "")
            here = f"; {lacking(own)}" if own is not None and not arrays.available(own) else ""
            raise BackendError(name, "array", f"device {device}", _served(refused) + here)
        for impl, why in refused:
            if impl.engine not in IN_TREE and isinstance(why, _Unfit):
                say_once(logging.WARNING, "%s: %s is left out on %s: %s", name, impl.impl_id, device, why)
        log.debug("%s on %s: %s", name, device, ", ".join(impl.impl_id for impl in usable))
        functions = [checked(impl) for impl in usable]
        if policy.strict:
            return _alone(usable[0], functions[0])
        if len(usable) == 1 and usable[0].engine in IN_TREE:
            return functions[0]  # its reason says enough, and a call of it costs nothing more
        return chain(usable, functions)

    # --- by operation ---------------------------------------------------------------------------------------

    def resolve(self, op_name: str, device: Device | str | None = None) -> Callable[..., Any]:
        """Returns the function that a call of the kernel goes to. BackendError as ``kernels``."""
        where = _device(device)
        want_kernel("resolve", "op_name", op_name)
        return getattr(self.kernels(where), op_name)  # type: ignore[no-any-return]

    def resolve_candidates(self, op_name: str, device: Device | str | None = None) -> list[OpImpl]:
        """Returns the implementations in the order to try them. BackendError where there is none."""
        where = _device(device)
        usable, refused = self.candidates(op_name, where)
        if not usable and op_name not in SERVES:
            raise BackendError(op_name, "device", where, _served(refused))
        return usable

    def call(self, op_name: str, *args: Any, **named: Any) -> Any:
        """Call the kernel on the device of its first array, with the contract's arguments."""
        device = next((view.device for view in views((*args, *named.values()))), arrays.CPU)
        return self.resolve(op_name, device)(*args, **named)

    def get_selected_impl_id(self, op_name: str, device: Device | str | None = None) -> str:
        """Id of the implementation that is asked first. BackendError where there is none."""
        usable = self.resolve_candidates(op_name, device)
        return usable[0].impl_id if usable else ""


def _device(device: Device | str | None) -> Device:
    return arrays.CPU if device is None else arrays.device(device)


def _served(refused: Refusals) -> str:
    """Returns what is wanted instead of a device for which every implementation was refused."""
    reasons = "; ".join(f"{impl.impl_id}: {why}" for impl, why in refused) or "nothing is registered for it"
    return f"a device that an allowed engine serves ({reasons})"


class _Unfit(str):
    """Why an implementation cannot run on a device of its kind: to be said, since its author may not know."""


def _unfit(impl: OpImpl, device: Device, arch: Arch) -> str | None:
    """Why an implementation cannot run on a device, or None."""
    misplaced = _misplaced(impl, device)
    least, most = impl.min_arch, impl.max_arch
    if misplaced is None and (least, most) != (None, None) and (have := arch()) is not None:
        if least is not None and have < least:
            return _Unfit(f"needs compute capability {least / 10}, {device} has {have / 10}")
        if most is not None and have > most:
            return _Unfit(f"is for compute capability {most / 10} at most, {device} has {have / 10}")
    if misplaced is None and not impl.is_available():
        return _Unfit("not available: its _is_available() says so")
    return misplaced


def _misplaced(impl: OpImpl, device: Device) -> str | None:
    if device.kind in impl.devices:
        return None
    return f"runs on {', '.join(sorted(impl.devices))}, not on {device.kind}"


def _arch(device: Device) -> int | None:
    """Compute capability times ten, None for devices that have none. BackendError where there is no such
    device."""
    provider = arrays.provider(device)
    ask = getattr(provider, "arch", None)
    if ask is None:
        return None
    if device.index >= provider.count():
        usable = f"{provider.count()} {device.kind} devices are"
        raise BackendError(f"device: {device} is not usable, {usable}; `fp8kit info` lists what is missing")
    return int(ask(device))


def _recorder(ranked: Mapping[str, list[OpImpl]]) -> Callable[[], Any] | None:
    """Returns the engine's recorder, where the kernels are all one in-tree engine's own functions, and it
    records calls."""
    names = {impl.engine for usable in ranked.values() for impl in usable}
    if len(names) != 1 or not names <= IN_TREE.keys():
        return None
    engine = importlib.import_module(f"fp8kit.backends.{names.pop()}")
    if not hasattr(engine, "recorder") or not settings.replays():
        return None
    own = all(
        getattr(impl.fn, "func", impl.fn) in engine.implementations(name)
        for name, usable in ranked.items()
        for impl in usable
    )
    return engine.recorder if own else None


def _options(impl: OpImpl) -> dict[str, Any]:
    """Returns what an implementation's function is always called with."""
    return getattr(impl.fn, "keywords", {})


def _largest(name: str, impls: list[OpImpl]) -> Callable[..., int]:
    """Returns a workspace that is enough for every one of them; no bytes where no implementation measures
    one. Of one function that is registered with options and without, the first is asked: the other would find
    out, at length, what is not going to run."""
    functions = list({getattr(impl.fn, "func", impl.fn): impl.fn for impl in reversed(impls)}.values())
    if len(functions) == 1:
        return functions[0]

    def largest(*args: Any, **named: Any) -> int:
        return max((int(function(*args, **named)) for function in functions), default=0)

    largest.__name__ = largest.__qualname__ = name
    return largest


@functools.cache
def _first_array(op_name: str) -> tuple[int, str] | None:
    """Place and name of a kernel's first parameter that is an array, or a sequence of arrays."""
    parameters = signature(op_name).parameters.values()
    return next(((i, p.name) for i, p in enumerate(parameters) if "ArrayView" in str(p.annotation)), None)


def checked(impl: OpImpl) -> Callable[..., Any]:
    """Returns the implementation, behind a look at the first array's dtype where it does not take all."""
    names, place = impl.supported_dtypes, _first_array(impl.op_name)
    if names is None or place is None:
        return impl.fn
    function, (at, name) = impl.fn, place

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        first = args[at] if len(args) > at else named.get(name)
        if isinstance(first, list | tuple):
            first = first[0] if first else None
        if first is not None and first.dtype.name not in names:
            raise CannotTake(f"dtype {first.dtype.name} of {name} is not among {', '.join(sorted(names))}")
        return function(*args, **named)

    return call


def _alone(impl: OpImpl, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the implementation of a strict policy: what it cannot take is the caller's error, which names
    it."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except CannotTake as reason:
            raise CannotTake(
                f"{impl.op_name}: {impl.impl_id} cannot take the call ({reason}), and the policy is strict"
            ) from reason

    return call


def chain(impls: list[OpImpl], functions: list[Callable[..., Any]]) -> Callable[..., Any]:
    """Try the next implementation when, and only when, one says that it cannot take the call. Each switch is
    logged once. CannotTake that names the last one where none can."""
    before = list(zip(impls, impls[1:], functions, strict=False))
    last = functions[-1]

    @functools.wraps(functions[0])
    def call(*args: Any, **named: Any) -> Any:
        for impl, after, function in before:
            try:
                return function(*args, **named)
            except CannotTake as reason:
                text = "%s: %s cannot take the call (%s); %s is asked"
                say_once(logging.WARNING, text, impl.op_name, impl.impl_id, reason, after.impl_id)
        try:
            return last(*args, **named)
        except CannotTake as reason:
            others = f", nor can {', '.join(impl.impl_id for impl in impls[:-1])}" if before else ""
            impl = impls[-1]
            raise CannotTake(
                f"{impl.op_name}: {impl.impl_id} cannot take the call ({reason}){others}"
            ) from reason

    return call
