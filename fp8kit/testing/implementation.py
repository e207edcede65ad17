"""An acceptance test for one implementation of one kernel: the contract's own cases, and a report."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.backends.manager import checked
from fp8kit.backends.protocol import SERVES
from fp8kit.backends.registry import CannotTake, OpImpl, check_signature
from fp8kit.errors import BackendError, Fp8kitError
from fp8kit.testing.contract import Case, cases


class Outcome(NamedTuple):
    """What came of one case: ``verdict`` is "kept", "declined" (CannotTake: the next
    implementation's) or "broken", ``detail`` says why."""

    case: str
    verdict: str
    detail: str = ""


@dataclass(frozen=True)
class ContractReport:
    """What came of the contract's cases for ``impl`` on ``device``; ``missing`` says why none ran, where none
    did."""

    impl: OpImpl
    device: Device
    outcomes: tuple[Outcome, ...]
    missing: str = ""

    def count(self, verdict: str) -> int:
        """Returns how many cases came out so."""
        return sum(outcome.verdict == verdict for outcome in self.outcomes)

    @property
    def ok(self) -> bool:
        """Whether nothing is broken, and something was kept."""
        return self.count("kept") > 0 and self.count("broken") == 0

    def __str__(self) -> str:
        where = f"{self.impl.impl_id} ({self.impl.op_name}) on {self.device}"
        if self.missing:
            return f"{where}: NOT TESTED: {self.missing}"
        kept, declined, broken = map(self.count, ("kept", "declined", "broken"))
        title = "BREAKS THE CONTRACT" if broken else "keeps the contract" if kept else "takes no case"
        reasons = [f"declined: {o.detail}" for o in self.outcomes if o.verdict == "declined"]
        failures = [f"broken: {o.case}: {o.detail}" for o in self.outcomes if o.verdict == "broken"]
        numbers = f"{kept} cases kept, {declined} declined, {broken} broken"
        return "\n  ".join([f"{where}: {title}: {numbers}", *dict.fromkeys(reasons), *failures])


def check_implementation(
    impl: OpImpl,
    device: Device | str | None = None,
    workspace: OpImpl | None = None,
    show: Callable[[str], Any] | None = print,
) -> ContractReport:
    """Run the contract's own tests of a kernel against any implementation of it, registered or not; print and
    return the report.

    ``device``: None is the first of ``impl.devices`` that is usable here. ``workspace``: the implementation
    that measures the kernel's workspace; None is the one that its engine has registered, and where it has
    none the kernel is given no bytes. For an ``impl`` that is a workspace function, the cases of its engine's
    own kernels run. Everything else that a case calls is chosen by the policy in force. ``show``: takes the
    report's text; None for silence. Arrays of the cases: shapes, dtypes and values as
    ``fp8kit.testing.contract`` has them. BackendError if it is not an OpImpl; a case that fails raises
    nothing.
    """
    if not isinstance(impl, OpImpl):
        raise BackendError("check_implementation", "impl", repr(impl), "an OpImpl")
    report = _report(impl, _where(impl, device), workspace)
    if show is not None:
        show(str(report))
    return report


def _where(impl: OpImpl, device: Device | str | None) -> Device:
    if device is not None:
        return arrays.device(device)
    kinds = sorted(impl.devices)
    return arrays.device(next((kind for kind in kinds if arrays.available(kind)), kinds[0]))


def _report(impl: OpImpl, device: Device, workspace: OpImpl | None) -> ContractReport:
    if device.kind not in impl.devices:
        return ContractReport(impl, device, (), f"it runs on {', '.join(sorted(impl.devices))}")
    if not arrays.available(device.kind):
        return ContractReport(impl, device, (), f"no usable {device.kind} device here")
    try:
        check_signature(impl.op_name, impl.impl_id, impl.fn)
    except BackendError as error:
        return ContractReport(impl, device, (Outcome("signature", "broken", str(error)),))
    dispatch.get_default_manager().ensure_initialized(device.kind)
    tested = {impl.op_name: impl}
    if impl.op_name in SERVES:
        workspace, served = impl, SERVES[impl.op_name]
        own = ((name, _of_engine(name, impl.engine)) for name in served)
        tested = {name: found for name, found in own if found is not None}
        if not tested:
            return ContractReport(impl, device, (), f"its engine has registered none of {', '.join(served)}")
    kernels = SimpleNamespace(**vars(dispatch.kernels(device)))
    for name, one in tested.items():
        setattr(kernels, name, checked(one))
        for measure in (measure for measure, served in SERVES.items() if name in served):
            given = workspace is not None and workspace.op_name == measure
            found = workspace if given else _of_engine(measure, impl.engine)
            setattr(kernels, measure, found.fn if found is not None else _no_bytes)
    return ContractReport(
        impl, device, tuple(_outcome(case, kernels, device) for case in cases() if case.kernel in tested)
    )


def _of_engine(op_name: str, engine: str) -> OpImpl | None:
    return next(
        (impl for impl in dispatch.registry.get_implementations(op_name) if impl.engine == engine), None
    )


def _no_bytes(*args: Any, **named: Any) -> int:
    return 0


def _outcome(case: Case, kernels: Any, device: Device) -> Outcome:
    try:
        case.run(kernels, device)
    except CannotTake as reason:
        return Outcome(str(case), "declined", str(reason))
    except (AssertionError, Fp8kitError) as error:
        return Outcome(str(case), "broken", str(error).strip().split("\n")[0] or repr(error))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(str(case), "broken", f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})")
    return Outcome(str(case), "kept")
