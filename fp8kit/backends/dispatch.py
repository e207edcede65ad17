"""Choosing implementations: from a device and the policy in force to one object that has every kernel of the contract.

The choice is made once per (device kind, policy, registry version) and cached, so that a call costs one dictionary look-up.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fp8kit import arrays, settings
from fp8kit.arguments import choice
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import policy as policies
from fp8kit.backends.policy import SelectionPolicy, Switch
from fp8kit.backends.protocol import KERNELS, block_shapes
from fp8kit.backends.registry import CannotTake, Kind, OpImpl, OpRegistry
from fp8kit.errors import BackendError, expected

__all__ = [
    "CannotTake",
    "Kind",
    "OpImpl",
    "OpRegistry",
    "SelectionPolicy",
    "block_shapes",
    "candidates",
    "default_device",
    "deterministic",
    "engines",
    "kernels",
    "registry",
    "use_backend",
]

log = logging.getLogger("fp8kit")
registry = OpRegistry()

# engine -> (module with register(registry), device kind it serves)
_ENGINES = {"reference": ("fp8kit.backends.reference", "cpu"), "cuda": ("fp8kit.backends.cuda", "cuda")}
_LOADED: set[str] = set()
_LOCK = threading.RLock()
_RESOLVED: dict[tuple[Device, int, int], Any] = {}
_RESOLVED_LIMIT = 256
_SWITCHED: set[tuple[str, str]] = set()


def engines() -> dict[str, str]:
    """The engines that come with fp8kit: name -> device kind."""
    return {name: kind for name, (_, kind) in _ENGINES.items()}


def _load(kind: str) -> None:
    """Register the engines that serve a device kind, once."""
    for name, (module, served) in _ENGINES.items():
        if served == kind and name not in _LOADED:
            with _LOCK:
                if name not in _LOADED:
                    importlib.import_module(module).register(registry)
                    _LOADED.add(name)


def candidates(op_name: str, device: Device, policy: SelectionPolicy | None = None) -> tuple[list[OpImpl], list[tuple[OpImpl, str]]]:
    """Implementations of a kernel for a device, in the order to try them, and those left out with the reason."""
    policy = policy or policies.get_policy()
    _load(device.kind)
    usable: list[OpImpl] = []
    refused: list[tuple[OpImpl, str]] = []
    for impl in reversed([impl for name, impl in policy.overrides if name == op_name]):
        if device.kind not in impl.devices:
            refused.append((impl, f"runs on {', '.join(sorted(impl.devices))}, not on {device.kind}"))
        elif usable:
            refused.append((impl, "a later fk.override is in force"))
        else:
            usable.append(impl)
    if usable:
        return usable, refused + [(impl, "fk.override is in force") for impl in registry.get_implementations(op_name)]
    for impl in registry.get_implementations(op_name):
        why = policy.refuses(impl)
        if why is None and device.kind not in impl.devices:
            why = f"runs on {', '.join(sorted(impl.devices))}, not on {device.kind}"
        if why is None and impl.min_arch is not None and _arch(device) < impl.min_arch:
            why = f"needs compute capability {impl.min_arch / 10}, {device} has {_arch(device) / 10}"
        if why is None:
            usable.append(impl)
        else:
            refused.append((impl, why))
    order = policy.order(op_name, usable)
    refused += [(impl, "not named by per_op") for impl in usable if impl not in order]
    return order, refused


def _arch(device: Device) -> int:
    """Compute capability times ten, 0 for devices that have none."""
    ask = getattr(arrays.provider(device), "arch", None)
    return int(ask(device)) if ask is not None else 0


def kernels(device: Device) -> Any:
    """Every kernel of the contract as attributes (``fp8kit.backends.protocol.Kernels``), chosen for ``device`` by the policy in force.

    Raises BackendError that names the kernel and each implementation's reason when none may be used.
    """
    policy = policies.get_policy()
    key = (device, id(policy), registry.version)
    found = _RESOLVED.get(key)
    if found is None:
        _load(device.kind)
        chosen = {name: _choose(name, device, policy) for name in KERNELS}
        found = SimpleNamespace(policy=policy, **chosen)
        if len(_RESOLVED) >= _RESOLVED_LIMIT:
            _RESOLVED.clear()
        _RESOLVED[(device, id(policy), registry.version)] = found
    return found


def _choose(name: str, device: Device, policy: SelectionPolicy) -> Callable[..., Any]:
    usable, refused = candidates(name, device, policy)
    if not usable:
        reasons = "; ".join(f"{impl.impl_id}: {why}" for impl, why in refused) or "nothing is registered for it"
        raise BackendError(expected(name, "array", f"device {device}", f"a device that an allowed engine serves ({reasons})"))
    checked = [_checked(impl) for impl in usable]
    return checked[0] if policy.strict or len(checked) == 1 else _chain(usable, checked)


def _checked(impl: OpImpl) -> Callable[..., Any]:
    """The implementation, behind a look at the first array's dtype where it does not take all."""
    if impl.supported_dtypes is None:
        return impl.fn

    @functools.wraps(impl.fn)
    def call(*args: Any, **named: Any) -> Any:
        first = next((a for a in (*args, *named.values()) if isinstance(a, ArrayView)), None)
        if first is not None and first.dtype.name not in (impl.supported_dtypes or ()):
            raise CannotTake(f"{impl.impl_id}: dtype {first.dtype.name} is not among {sorted(impl.supported_dtypes or ())}")
        return impl.fn(*args, **named)

    return call


def _chain(impls: list[OpImpl], functions: list[Callable[..., Any]]) -> Callable[..., Any]:
    """Try the next implementation when, and only when, one says that it cannot take the call. Each switch is logged once."""

    @functools.wraps(functions[0])
    def call(*args: Any, **named: Any) -> Any:
        for impl, function in zip(impls[:-1], functions[:-1], strict=True):
            try:
                return function(*args, **named)
            except CannotTake as reason:
                if (impl.impl_id, str(reason)) not in _SWITCHED:
                    _SWITCHED.add((impl.impl_id, str(reason)))
                    log.warning("%s: %s cannot take the call (%s); the next implementation does", impl.op_name, impl.impl_id, reason)
        return functions[-1](*args, **named)

    return call


def default_device() -> Device:
    """Where ``device=None`` puts things: ``fk.use_backend``'s device, FP8KIT_DEVICE, CUDA where it is usable, else the CPU."""
    backend = policies.get_policy().backend
    if backend is not None:
        return Device(_ENGINES[backend][1])
    named = settings.device()
    if named:
        return arrays.device(named)
    return Device("cuda") if arrays.available("cuda") else arrays.CPU


def use_backend(name: str | None) -> Switch:
    """Use one engine only: new arrays are placed on its device, and an array anywhere else is a BackendError.

    ``name`` is "reference" or "cuda", None lifts the restriction. Holds from now on; as ``with fk.use_backend(...):`` for a block.
    """
    if name is not None:
        choice("use_backend", "name", name, _ENGINES, BackendError)
    return Switch(backend=name)


def deterministic(enabled: bool = True) -> Switch:
    """Only algorithms that give the same bits every time (on a CPU: for the same thread count).

    Holds from now on; as ``with fk.deterministic():`` for a block. The CPU engine always is deterministic.
    """
    if not isinstance(enabled, bool):
        raise BackendError(expected("deterministic", "enabled", repr(enabled), "True or False"))
    return Switch(deterministic=enabled)
