"""Dynamic loss scaling: float16 gradients are kept above float16's smallest numbers by a factor on the loss.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2. Whether a step overflowed is known
on the device only; the optimiser's kernel reads it there, so that nothing waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fp8kit import arrays, captured
from fp8kit.arguments import flag, integer, number, shown
from fp8kit.arrays import ArrayView, Device
from fp8kit.autograd import Tensor
from fp8kit.autograd.tensors import fresh, record
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, BackendError, CheckpointError, FormatError
from fp8kit.formats import HIGH_PRECISION, float32, int64
from fp8kit.optim.base import Optimizer, Taking, Wanted, faults_of, state_views, want_none, want_writable
from fp8kit.serialization import Loadable

_STATE: Wanted = {"scale": ((1,), float32), "good_steps": ((1,), int64)}
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # of a factor
_LIMITS = {"scale": (_LEAST, _MOST), "good_steps": (0, 2**63 - 1)}


class GradScaler(Loadable):
    """Scales the loss, and with it all gradients, and takes the factor out again inside the optimiser's step
    ::

        scaler.scale(loss).backward()
        clip_grad_norm_(parameters, 1.0, scaler)        # optional
        scaler.step(optimizer)                          # skipped where a gradient is Inf or NaN
        scaler.update()                                 # the factor for the next step

    * ``init_scale``: first factor. A step with Inf or NaN multiplies it by ``backoff_factor``;
      ``growth_interval`` good steps in a row multiply it by ``growth_factor``.
    * ``enabled``: False makes ``scale`` the identity, and ``step`` the optimiser's own.

    The state is made on the first loss's device and lives there. Raises Fp8kitError for factors outside their
    range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        op = "GradScaler"
        number(op, "init_scale", init_scale, math.nextafter(_MOST, math.inf), least=_LEAST)
        self.growth_factor = number(op, "growth_factor", growth_factor, above=1.0)
        self.backoff_factor = number(op, "backoff_factor", backoff_factor, 1.0, above=0.0)
        self.growth_interval = integer(op, "growth_interval", growth_interval, 1, 2**62)
        self.enabled = flag(op, "enabled", enabled)
        self._host: dict[str, Any] = {
            "scale": np.full(1, init_scale, np.float32),
            "good_steps": np.zeros(1, np.int64),
        }
        self._views: dict[str, ArrayView] = {}
        self._found: dict[Optimizer, ArrayView] = {}  # of the optimisers looked at since the last update
        self._unscaled: set[Optimizer] = set()

    def _state(self, device: Device) -> dict[str, ArrayView]:
        """``scale``, ``inv_scale``, ``good_steps`` and ``found_inf`` on the device."""
        if not self._views:
            inverse = np.float32(1) / self._host["scale"]
            host = self._host | {"inv_scale": inverse, "found_inf": np.zeros(1, np.float32)}
            self._views = {n: arrays.to(array.copy(), device) for n, array in host.items()}
        if self._views["scale"].device != device:
            raise BackendError(
                "GradScaler", "device", device, f"{self._views['scale'].device}, where its state is"
            )
        return self._views

    @property
    def inv_scale(self) -> ArrayView | None:
        """1 / the present factor, float32 [1] on the device; None where nothing is scaled."""
        return self._views["inv_scale"] if self.enabled and self._views else None

    def get_scale(self) -> float:
        """Returns the present factor; waits for the device."""
        if not self.enabled:
            return 1.0
        return float(self._views["scale"].numpy()[0] if self._views else self._host["scale"][0])

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the factor, on the tape. float32 or 16-bit, any shape; in float16 it may overflow,
        which skips the step.

        FormatError for anything else, BackendError for a loss on another device than the first one's.
        """
        if not isinstance(loss, Tensor) or loss.dtype not in HIGH_PRECISION:
            got = loss.dtype.name if isinstance(loss, Tensor) else shown(loss)
            raise FormatError("GradScaler.scale", "loss", got, "a Tensor of float32, bfloat16 or float16")
        captured.hold(self, self._held)
        if not self.enabled:
            return loss
        factor = self._state(loss.device)["scale"]

        def times(view: ArrayView) -> ArrayView:
            own = fresh(view)
            dispatch.kernels(own.device).scale_([own], factor, None, arrays.current_stream(own.device))
            return own

        return record("scale", [loss], times(loss.view), lambda g: [times(g)])

    def _held(self) -> tuple[list[str], captured.Read, object]:
        """Returns what a captured graph would not see change, as ``captured.hold`` takes it."""
        names = ["enabled", "growth_factor", "backoff_factor", "growth_interval"]
        views = list(self._views.values())

        def read() -> list[Any]:
            return [getattr(self, name) for name in names] + [view.ptr for view in self._views.values()]

        shown_as = [f"GradScaler.{name}" for name in names]
        return shown_as + ["GradScaler: state, which was loaded"] * len(views), read, views

    def _look(self, optimizer: Optimizer, taking: Sequence[Taking], unscale: bool) -> ArrayView | None:
        """found_inf of the gradients that the optimiser is ``taking``, None where there is none. ``unscale``:
        the factor is taken out."""
        grads = [grad for _, grad, *_ in taking]
        if not grads:
            return None
        device = grads[0].device
        state = self._state(device)
        found = arrays.zeros((1,), float32, device)
        kernels, stream = dispatch.kernels(device), arrays.current_stream(device)
        kernels.scale_(grads, state["inv_scale"] if unscale else None, found, stream)
        self._found[optimizer] = found
        kernels.amax(found.reshape(1, 1), state["found_inf"], (1, 1), stream)
        return found

    def unscale_(self, optimizer: Optimizer) -> None:
        """Take the factor out of the optimiser's gradients now, so that they can be looked at; once before
        its step.

        FormatError for 16-bit gradients, which would lose what the factor saved: ``clip_grad_norm_`` takes
        the scaler instead.
        """
        _optimizer("unscale_", optimizer)
        if not self.enabled:
            return
        if optimizer in self._unscaled or optimizer in self._found:
            got = "one that was unscaled or stepped"
            raise ArgumentError("GradScaler.unscale_", "optimizer", got, "one call before its step")
        for param in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            if param.dtype is not float32:
                raise FormatError("GradScaler.unscale_", "gradients", param.dtype.name, "float32")
            # backward's are; a user may have set any array
            want_writable("GradScaler.unscale_", "gradients", arrays.as_view(param.grad), FormatError)
        self._look(optimizer, optimizer.taking(), True)
        self._unscaled.add(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` on the gradients without the factor; where one of them is Inf or NaN nothing
        changes and no step counts."""
        _optimizer("step", optimizer)
        # what the step refuses it refuses here, before anything is noted of it; it may be a user's own
        taking = optimizer.taking()
        found = self._found.get(optimizer)  # once an update
        if self.enabled and found is None:
            found = self._look(optimizer, taking, False)
        by = None if found is None or optimizer in self._unscaled else self._views["inv_scale"]
        optimizer.step(by, found)

    def update(self) -> None:
        """The factor for the next step, from what the steps since the last update found. Without a step
        nothing changes."""
        if self._found:
            state = self._views
            device = state["scale"].device
            views = (state[name] for name in ("scale", "inv_scale", "good_steps", "found_inf"))
            factors = self.growth_factor, self.backoff_factor, self.growth_interval
            dispatch.kernels(device).loss_scale_(*views, *factors, arrays.current_stream(device))
        self._found.clear()
        self._unscaled.clear()

    def state_dict(self) -> dict[str, ArrayView]:
        """``scale`` float32 [1] and ``good_steps`` int64 [1], for ``fk.save``."""
        return {name: self._views.get(name, arrays.as_view(self._host[name])) for name in _STATE}

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Callable[[], None]:
        """Check what ``state_dict`` gave, and return what takes it over. CheckpointError for missing or
        (``strict``) unexpected names, other shapes or dtypes, and numbers that are not finite, a ``scale``
        below the least of ``init_scale``, or a negative ``good_steps``."""
        operation = "GradScaler.load_state_dict"
        strict = flag(operation, "strict", strict, CheckpointError)
        views = state_views(operation, state)
        faults = faults_of(views, _STATE, strict)
        host = {name: views[name].numpy().copy() for name in _STATE if name in views}
        for name, (least, most) in _LIMITS.items():
            if name in host and host[name].shape == (1,) and not least <= host[name][0].item() <= most:
                faults.append(f"{name}: got {host[name][0]}, expected a finite number >= {least}")
        want_none(operation, faults)

        def take() -> None:
            device = self._views["scale"].device if self._views else None
            self._host, self._views = host, {}
            self._found.clear()
            self._unscaled.clear()
            if device is not None:
                self._state(device)

        return take


def _optimizer(operation: str, optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"GradScaler.{operation}", "optimizer", shown(optimizer), "an Optimizer, such as AdamW"
        )
