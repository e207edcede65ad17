"""The kernel contract as tests: cases that any engine must pass, against the codec or a float64 oracle.

Each module holds ``CASES`` for the kernels of one file of the engines. A case makes its own data from a fixed
seed on the CPU, moves it to the device, calls one kernel, and compares; it raises AssertionError with the
first wrong coordinate.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends.protocol import Kernels
from fp8kit.formats import DType


@dataclass(frozen=True)
class Case:
    """One case: ``run(kernels, device)`` raises AssertionError when ``kernel`` does not keep the contract."""

    kernel: str
    name: str
    run: Callable[[Kernels, Device], None]

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}"


def cases() -> Iterator[Case]:
    """Every case of every module of this package."""
    for module in pkgutil.iter_modules(__path__):
        yield from importlib.import_module(f"{__name__}.{module.name}").CASES


def put(array: Any, device: Device) -> ArrayView:
    """A NumPy array on ``device`` (a copy, also on the CPU)."""
    return arrays.to(arrays.as_view(np.array(array, copy=True, order="C")), device)


def poisoned(shape: tuple[int, ...], dtype: DType, device: Device) -> ArrayView:
    """An output to be written: every byte 0xFF (NaN in float types), so that what a kernel leaves out
    shows."""
    host = np.full(dtype.numpy.itemsize * int(np.prod(shape, dtype=np.int64)), 0xFF, np.uint8)
    return arrays.to(arrays.as_view(host.view(dtype.numpy).reshape(shape)), device)


def workspace(nbytes: int, device: Device) -> ArrayView:
    """A workspace of that many bytes, poisoned."""
    from fp8kit.formats import uint8

    return poisoned((max(nbytes, 1),), uint8, device)


def get(view: ArrayView) -> np.ndarray[Any, Any]:
    """The view's values on the host, after the device's work is done."""
    arrays.synchronize(view.device)
    return view.numpy()
