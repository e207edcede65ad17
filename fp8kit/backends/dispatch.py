"""Choosing implementations: from a device and the policy in force to one object that has every kernel of the
contract.

This is the process's own registry and manager. The choice is made once per device and policy and kept until
the registry changes, so that a call costs one dictionary look-up.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from fp8kit import arrays, settings
from fp8kit.arguments import choice
from fp8kit.arrays import Device
from fp8kit.backends.manager import OpManager, say_once
from fp8kit.backends.policy import SelectionPolicy, Switch, get_policy
from fp8kit.backends.protocol import block_shapes
from fp8kit.backends.registry import IN_TREE, LOCK, CannotTake, Kind, OpImpl, OpRegistry
from fp8kit.devices import lacking, say_unused
from fp8kit.errors import BackendError

__all__ = [
    "CannotTake",
    "Kind",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "SelectionPolicy",
    "block_shapes",
    "candidates",
    "default_device",
    "deterministic",
    "engines",
    "get_default_manager",
    "kernels",
    "plugins_fingerprint",
    "registry",
    "reset_default_manager",
    "say_once",
    "use_backend",
]

_MANAGER = OpManager()
registry = _MANAGER.registry


def get_default_manager() -> OpManager:
    """Returns the process's manager: what layers, optimisers and frontends choose by."""
    return _MANAGER


def reset_default_manager() -> None:
    """Forget every implementation and choice of the process's manager; the next call registers the engines
    and plugins anew."""
    _MANAGER.reset()


def engines() -> dict[str, str]:
    """Returns the engines that there are: name -> device kinds that it serves, separated by commas. fp8kit's
    own come first."""
    _MANAGER.discovered()
    found = {
        name: ", ".join(sorted(kinds)) for name, kinds in registry.engines().items() if name not in IN_TREE
    }
    return {**IN_TREE, **dict(sorted(found.items()))}


def candidates(
    op_name: str, device: Device, policy: SelectionPolicy | None = None
) -> tuple[list[OpImpl], list[tuple[OpImpl, str]]]:
    """Implementations of a kernel for a device, in the order to try them, and those left out with the
    reason."""
    return _MANAGER.candidates(op_name, device, policy)


def kernels(device: Device, policy: SelectionPolicy | None = None) -> Any:
    """Every kernel of the contract as attributes (``fp8kit.backends.protocol.Kernels``), chosen for
    ``device`` by the policy, None for the one in force.

    Raises BackendError that names the kernel and each implementation's reason when none may be used.
    """
    if policy is None:
        policy = get_policy()
    try:
        return policy.chosen[device]
    except KeyError:
        return _chosen(device, policy)


def _chosen(device: Device, policy: SelectionPolicy) -> Any:
    found = _MANAGER.choose(device, policy)
    with LOCK:  # what is kept here is forgotten with the manager's own when the registry changes
        if _MANAGER.table.get((device, id(policy))) is found:
            policy.chosen[device] = found
    return found


def plugins_fingerprint() -> str:
    """Returns what is registered beside fp8kit's own engines, as a short text that is the same in every
    process with the same plugins; "" where nothing is."""
    _MANAGER.discovered()
    return _fingerprint(registry.version)


@functools.lru_cache(maxsize=1)
def _fingerprint(version: int) -> str:
    said = [
        f"{i.op_name} {i.impl_id} {i.kind.value} {i.vendor} {i.priority} {i.min_arch} "
        f"{i.max_arch} {sorted(i.devices)} {i.supported_dtypes and sorted(i.supported_dtypes)}"
        for i in registry.every()
        if i.engine not in IN_TREE
    ]
    digest = hashlib.sha256("\n".join(sorted(said)).encode()).hexdigest()
    return f"{digest[:16]}.{registry.restored}" if said else ""


def default_device() -> Device:
    """Returns where ``device=None`` puts things: ``fk.use_backend``'s device, FP8KIT_DEVICE, CUDA where it is
    usable, else the CPU. BackendError where what the first two name is not usable here."""
    backend = get_policy().backend
    if backend is not None and backend in IN_TREE:
        _want_device(backend, IN_TREE[backend])
        return Device(IN_TREE[backend])
    said = settings.device()
    named = arrays.usable(said, "environment", "FP8KIT_DEVICE") if said else None
    if backend is not None:
        served = registry.engines().get(backend, frozenset())
        if named is not None and named.kind in served:
            return named
        usable = [
            kind for kind in ("cuda", *sorted(served - {"cuda"})) if kind in served and arrays.available(kind)
        ]
        if usable:
            return Device(usable[0])
        wanted = f"one of the engine's devices usable here: {', '.join(sorted(served))}"
        raise BackendError("device", "None", f"use_backend({backend!r})", wanted)
    if named is not None:
        return named
    if arrays.available("cuda"):
        return Device("cuda")
    say_unused()
    return arrays.CPU


def _want_device(backend: str, *kinds: str) -> None:
    """BackendError, of ``use_backend``, where no device of the ``kinds`` that an engine serves is usable
    here."""
    if not any(map(arrays.available, kinds)):
        wanted = f"an engine whose device is here: {'; '.join(map(lacking, kinds))}"
        raise BackendError("use_backend", "name", repr(backend), wanted)


def use_backend(name: str | None) -> Switch:
    """Use one engine: new arrays are placed on its device, and an array anywhere else is a BackendError.

    ``name`` is "reference" or "cuda", and nothing else computes then; or a plugin's engine, which goes first
    in the kernels that it has, while the others of its devices fill in. None lifts the restriction. Holds
    from now on; as ``with fk.use_backend(...):`` for a block. BackendError for an unknown engine, and for one
    that serves no device that is usable here.
    """
    if name is not None:
        choice(
            "use_backend",
            "name",
            name,
            IN_TREE if isinstance(name, str) and name in IN_TREE else engines(),
            BackendError,
        )
        _want_device(name, *([IN_TREE[name]] if name in IN_TREE else sorted(registry.engines()[name])))
    return Switch(backend=name)


def deterministic(enabled: bool = True) -> Switch:
    """Only algorithms that give the same bits every time (on a CPU: for the same thread count).

    Holds from now on; as ``with fk.deterministic():`` for a block. The CPU engine always is deterministic.
    """
    if not isinstance(enabled, bool):
        raise BackendError("deterministic", "enabled", repr(enabled), "True or False")
    return Switch(deterministic=enabled)
