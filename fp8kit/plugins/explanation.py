"""Who implements a kernel, who is chosen now, and why the others are not: as values and as text.

Both kinds of device are explained wherever this runs: where there is no GPU, the CUDA engine's
implementations are listed all the same, and what depends on a device's compute capability is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.backends import dispatch, manager
from fp8kit.backends.discovery import Discovered
from fp8kit.backends.policy import SelectionPolicy, get_policy
from fp8kit.backends.protocol import KERNELS, SERVES
from fp8kit.backends.registry import IN_TREE, OpImpl
from fp8kit.errors import ArgumentError, BackendError, meant


class Row(NamedTuple):
    """One implementation: its ``place`` in the order, from 0, or None where it is left out, and ``why``."""

    impl: OpImpl
    place: int | None
    why: str


@dataclass(frozen=True)
class Explanation:
    """The implementations of ``op_name`` for ``device`` under ``policy``. ``usable``: whether such a device
    is there."""

    op_name: str
    device: Device
    policy: SelectionPolicy
    usable: bool
    rows: tuple[Row, ...]

    @property
    def chosen(self) -> OpImpl | None:
        """The implementation that is asked first, None where there is none."""
        return next((row.impl for row in self.rows if row.place == 0), None)

    def lines(self, among: Sequence[Row] | None = None) -> Iterator[str]:
        """Yields a line for each row."""
        for row in self.rows if among is None else among:
            mark = ">" if row.place == 0 else " "
            what = row.impl.kind.value + (f" {row.impl.vendor}" if row.impl.vendor else "")
            yield f"{mark} {row.impl.impl_id:40}{what:18}{row.impl.priority or 0:>4}  {row.why}"

    def text(self) -> str:
        """Returns the whole, for reading."""
        title = f"{self.op_name} on {self.device.kind}" + (
            "" if self.usable else f" (no usable {self.device.kind} device here)"
        )
        nothing = (
            "  no bytes: no implementation measures a workspace"
            if self.op_name in SERVES
            else "  no implementation may be used"
        )
        return "\n".join(
            [title, *(f"  {line}" for line in self.lines()), *([] if self.chosen else [nothing])]
        )


def explain(
    op_name: str, device: Device | str = arrays.CPU, policy: SelectionPolicy | None = None
) -> Explanation:
    """Why which implementation of a kernel is chosen on a device under a policy (None: the one in force).
    BackendError for an unknown kernel or device."""
    where = arrays.device(device)
    policy = get_policy() if policy is None else policy
    there = where.index < _count(where)
    arch = partial(manager._arch, where) if there else lambda: None
    order, refused = dispatch.get_default_manager().ranked(op_name, where, policy, arch)
    rows = [Row(impl, place, _place(op_name, order, place, policy)) for place, impl in enumerate(order)]
    return Explanation(
        op_name, where, policy, there, (*rows, *(Row(impl, None, why) for impl, why in refused))
    )


def _count(where: Device) -> int:
    try:
        return arrays.provider(where).count()
    except BackendError:
        return 0


def _place(op_name: str, order: list[OpImpl], place: int, policy: SelectionPolicy) -> str:
    impl = order[place]
    if op_name in SERVES:
        return "its size counts, the largest is taken" if len(order) > 1 else "its size is taken"
    takes = "" if impl.supported_dtypes is None else f", takes {', '.join(sorted(impl.supported_dtypes))}"
    if place == 0:
        return (
            "fk.override is in force" if (op_name, impl) in policy.overrides else "is asked first"
        ) + takes
    return (
        "is not asked: the policy is strict"
        if policy.strict
        else f"is asked where {order[place - 1].impl_id} cannot take a call{takes}"
    )


def get_discovered_plugin() -> tuple[Discovered, ...]:
    """Returns the plugins that were found in this process, and what became of them."""
    return dispatch.get_default_manager().discovered()


def listing(kinds: Sequence[str] = ("cpu", "cuda")) -> str:
    """Everything at once: plugins with their tracebacks, the policy, and for each kind of device every kernel
    with its implementations. BackendError for an unknown kind."""
    for kind in kinds:
        arrays.device(kind)
    return "\n".join(line for kind in ("", *kinds) for line in (_device(kind) if kind else _head()))


def _head() -> Iterator[str]:
    found = get_discovered_plugin()
    yield "plugins"
    if not found:
        yield "  none is installed, and FP8KIT_PLUGIN_MODULES names none"
    for plugin in found:
        outcome = (
            f"{plugin.implementations} implementation{'s' * (plugin.implementations != 1)}"
            if plugin.ok
            else "FAILED, left out"
        )
        yield f"  {plugin.name:38}{plugin.source:28}{outcome}"
        yield from (f"    {line}" for line in plugin.error.splitlines())
    yield "engines"
    yield from (
        f"  {name:38}{kinds}{'' if name in IN_TREE else '  (plugin)'}"
        for name, kinds in dispatch.engines().items()
    )
    yield "policy"
    said = [(item.name, getattr(get_policy(), item.name)) for item in fields(SelectionPolicy) if item.init]
    yield from (
        f"  {name:38}{_shown(value)}" for name, value in said if value or name == "strict" or name == "prefer"
    )


def _shown(value: object) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value))
    if isinstance(value, tuple):
        return "; ".join(
            f"{name}={'|'.join(what) if isinstance(what, tuple) else what.impl_id}" for name, what in value
        )
    return str(value)


def _device(kind: str) -> Iterator[str]:
    where = Device(kind)
    yield kind if _count(where) else f"{kind}: no usable device here; this is what one would use"
    for name in KERNELS:
        about = explain(name, where)
        # the others stand under their own kind
        mine = [row for row in about.rows if kind in row.impl.devices]
        for first, line in zip([name, *[""] * len(mine)], about.lines(mine), strict=False):
            yield f"  {first:30}{line}"
        if about.chosen is None:
            why = "no bytes" if name in SERVES else "no implementation may be used"
            yield f"  {'' if mine else name:30}  {why}"


def want_implementations(name: str) -> list[OpImpl]:
    """Returns the implementations that ``name`` means: an engine, or one by its id. ArgumentError where there
    is none."""
    dispatch.get_default_manager().ensure_initialized()
    every = dispatch.registry.snapshot().impls_by_op.values()
    found = [impl for impls in every for impl in impls if name in (impl.engine, impl.impl_id)]
    if not found:
        known = [*dispatch.engines(), *(impl.impl_id for impls in every for impl in impls)]
        wanted = f"an implementation's id, or an engine: {', '.join(dispatch.engines())}{meant(name, known)}"
        raise ArgumentError("plugins", "name", repr(name), wanted)
    return found
