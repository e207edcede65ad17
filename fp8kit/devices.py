"""Devices: where arrays live, and who serves them there.

A device is served by a ``DeviceProvider`` that the device's engine registers, so that no other module needs
NumPy's or CuPy's allocator. Everybody else finds these names in ``fp8kit.arrays``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fp8kit import slowness
from fp8kit.arguments import shown
from fp8kit.errors import BackendError

if TYPE_CHECKING:
    from fp8kit.arrays import ArrayView


class Device(NamedTuple):
    """A place where arrays live: ``kind`` ("cpu", "cuda", or what a plugin registers) and ``index``."""

    kind: str
    index: int = 0  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu", 0)
NOWHERE = Device("nowhere", 0)  # of arrays that are planned and not there
_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each


def device(value: object, operation: str = "device", argument: str = "value") -> Device:
    """Returns the Device that ``value`` names: a Device, "cpu", "cuda" or "cuda:1", or PyTorch's device of
    such a name, which says its index. BackendError for anything else, about ``argument`` of ``operation``."""
    if isinstance(value, Device):
        return value
    foreign = type(value).__name__ == "device"
    if isinstance(value, str) or foreign:
        kind, _, at = str(value).partition(":")
        if foreign and kind == "cuda" and not at:  # PyTorch's current one, of which nothing is known here
            raise BackendError(operation, argument, shown(value), "one with an index, as cuda:0")
        if (
            kind in _LOADERS
            and (not at or (at.isdecimal() and len(at) < 6))
            and (kind != "cpu" or not int(at or 0))
        ):
            return Device(kind, int(at or 0))
    raise BackendError(operation, argument, shown(value), f"a name like {', '.join(_LOADERS)} or cuda:1")


def usable(value: object, operation: str = "device", argument: str = "value") -> Device:
    """``device(value)``, where it can be used now. BackendError, about ``argument`` of ``operation``, for one
    that is not here."""
    where = device(value, operation, argument)
    count = provider(where).count()
    if where.index >= count:
        wanted = (
            f"cpu, or a device up to {where.kind}:{count - 1}" if count else f"cpu: {lacking(where.kind)}"
        )
        raise BackendError(operation, argument, str(where), wanted)
    return where


class DeviceProvider(Protocol):
    """What the engine of a device provides so that arrays can live there."""

    def count(self) -> int:
        """Devices of this kind that are usable now; 0 where the driver or a library is missing."""

    def alloc(self, nbytes: int, device: Device) -> tuple[int, object]:
        """Address and owner of ``nbytes`` fresh bytes, 256-byte aligned on accelerators."""

    def current_stream(self, device: Device) -> int:
        """Handle of the stream that work goes to now."""

    def synchronize(self, device: Device) -> None:
        """Wait for all work of the current stream."""

    def order_after(self, stream: int, device: Device) -> None:
        """Make the foreign ``stream`` wait for what the current stream holds (DLPack's producer side)."""

    def fill_zero(self, view: ArrayView, stream: int) -> None:
        """Write zero bytes over a C-contiguous view."""

    def copy(self, dst: ArrayView, src: ArrayView, stream: int) -> None:
        """Copy bytes between C-contiguous views, one of them on this device; to the host it waits until they
        are there."""

    def fetch(self, view: ArrayView, stream: int) -> Callable[[], np.ndarray[Any, Any]]:
        """Begin to copy a C-contiguous uint8 view to the host, behind what ``stream`` holds. Returns a
        function that waits until the copy is there and returns it; the view is kept alive until then."""

    def native(self, view: ArrayView) -> Any:
        """Returns the view as an array of the device's own library (NumPy, CuPy), sharing its memory; FP8
        stays uint8."""


class _Host:
    """The CPU's provider: NumPy's allocator, no streams."""

    def count(self) -> int:
        return 1

    def alloc(self, nbytes: int, device: Device) -> tuple[int, object]:
        try:
            owner = np.empty(max(nbytes, 1), np.uint8)
        except (MemoryError, ValueError, OverflowError) as error:
            raise BackendError(f"empty: {nbytes} bytes on the CPU cannot be had ({error})") from None
        return owner.ctypes.data, owner

    def current_stream(self, device: Device) -> int:
        return 0

    def synchronize(self, device: Device) -> None:
        return None

    def order_after(self, stream: int, device: Device) -> None:
        return None

    def fill_zero(self, view: ArrayView, stream: int) -> None:
        ctypes.memset(view.ptr, 0, view.nbytes)

    def copy(self, dst: ArrayView, src: ArrayView, stream: int) -> None:
        ctypes.memmove(dst.ptr, src.ptr, src.nbytes)

    def fetch(self, view: ArrayView, stream: int) -> Callable[[], np.ndarray[Any, Any]]:
        return view.numpy

    def native(self, view: ArrayView) -> Any:
        return view.numpy()


class _Nowhere(_Host):
    """The provider of ``NOWHERE``, where nothing is done."""

    def count(self) -> int:
        return 0

    def fill_zero(self, view: ArrayView, stream: int) -> None:
        return None

    def copy(self, dst: ArrayView, src: ArrayView, stream: int) -> None:
        return None


_PROVIDERS: dict[str, DeviceProvider] = {"cpu": _Host(), "nowhere": _Nowhere()}
_LOADERS: dict[str, str] = {"cpu": "", "cuda": "fp8kit.backends.cuda.device"}


def register_device(kind: str, module: str) -> None:
    """Say that devices of ``kind`` are served by ``module.provider``, imported when one is first used."""
    _LOADERS[kind] = module


def provider(where: Device) -> DeviceProvider:
    """Returns the provider of a device, imported at its first use; BackendError when the kind is unknown or
    its library is missing."""
    try:
        found = _PROVIDERS.get(where.kind)
    except (AttributeError, TypeError, ValueError):  # not a device, or not hashable
        raise BackendError("device", "value", shown(where), "a Device, such as arrays.CPU") from None
    if found is None:
        if where.kind not in _LOADERS:
            raise BackendError("device", "kind", repr(where.kind), f"one of {', '.join(_LOADERS)}")
        try:
            found = importlib.import_module(_LOADERS[where.kind]).provider
        except ImportError as error:
            raise BackendError(
                f"device {where}: its engine cannot be loaded ({error}); `fp8kit info` lists what is missing"
            ) from error
        _PROVIDERS[where.kind] = found
    return found


def available(kind: str) -> bool:
    """Whether a device of this kind is usable now."""
    try:
        return provider(Device(kind)).count() > 0
    except BackendError:
        return False


def lacking(kind: str) -> str:
    """Returns the text of an error that no device of this kind is usable, and what is missing first, by its
    engine's module ``support`` (``fp8kit info``)."""
    first = _missing_first(kind)
    name = kind.upper() if kind == "cuda" else kind
    return f"no {name} device found{first}; `fp8kit info` lists what is missing"


def _missing_first(kind: str) -> str:
    # a plugin's engine may have none
    with contextlib.suppress(ImportError, BackendError, KeyError, AttributeError):
        support = importlib.import_module(f"{_LOADERS[kind].rpartition('.')[0]}.support")
        return next(
            (f" ({row.component}: {row.detail})" for row in support.report() if row.status == "missing"), ""
        )
    return ""


@functools.cache
def say_unused() -> None:
    """Warn where the machine has a GPU, by NVIDIA's driver, that is not hidden, and that cannot be used."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if not hidden and _GPUS.is_dir() and any(_GPUS.iterdir()) and not available("cuda"):
        cause = f"this machine has a GPU that is not used{_missing_first('cuda')}"
        slowness.say(cause, "work without a device goes to the CPU", "`fp8kit info` lists what is missing")


def current_stream(where: Device) -> int:
    """Handle of the stream that work for this device goes to now; 0 on the CPU. BackendError if this is not a
    device."""
    return 0 if where is CPU else provider(where).current_stream(where)


def synchronize(where: Device) -> None:
    """Wait until the current stream's work on this device is done."""
    provider(where).synchronize(where)
