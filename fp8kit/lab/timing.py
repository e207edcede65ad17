"""How fast what serves an operation is, beside the ceiling of everything that moves memory: a copy of as many
bytes.

The bytes of a call are those of its arrays: each input read once, each output written once, what is changed
in place both; workspaces not counted. The copy moves as many, half of them read and half written. Data are
random, never zeros: power, and so speed, depends on the bits.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from fp8kit import arrays, formats
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import KERNELS, SPECS
from fp8kit.bench.kernels import copier
from fp8kit.bench.timing import Step, clock_for, interleaved, medians
from fp8kit.errors import ArgumentError, ShapeError
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16
from fp8kit.testing.contract import kernel_test
from fp8kit.testing.contract.sampler import Sampler

ROUNDS, CALLS, WARM_UPS = 7, 10, 2
# beyond the last cache on a GPU: two bfloat16 arrays are 256 MiB
SHAPES = {"cpu": (1024, 1024), "cuda": (8192, 8192)}
TIMED = tuple(name for name in KERNELS if SPECS[name].launches)


@dataclass(frozen=True)
class Measurement:
    """``seconds`` of a call of ``shape`` (rows, columns; of a product perhaps the terms of an element, too)
    and of the copy, ``ceiling``, that moves its ``nbytes`` bytes. ``flops``: what products and attention
    compute, 0 of whatever only moves memory."""

    operation: str
    implementation: str
    device: Device
    shape: tuple[int, ...]
    nbytes: int
    seconds: float
    ceiling: float
    flops: float = 0.0

    @property
    def share(self) -> float:
        """How much of the copy's speed is reached: 1 is the ceiling."""
        return float(self.ceiling / self.seconds)

    def __str__(self) -> str:
        rate, size = self.nbytes / self.seconds / 1e9, self.nbytes / 2**20
        extent = " x ".join(map(str, self.shape))
        what = f"{self.operation}: {self.implementation} on {self.device}, {extent}"
        if self.flops:
            return f"{what}: {self.seconds * 1e6:.1f} us, {self.flops / self.seconds / 1e9:,.1f} GFLOP/s"
        return (
            f"{what}: {self.seconds * 1e6:.1f} us, {rate:.1f} GB/s, {self.share:.0%} of the speed of a copy "
            f"of {size:.1f} MiB"
        )


def measure(
    operation: str, device: Device | str, shape: tuple[int, ...] | None = None, dtype: DType | str = bfloat16
) -> Measurement:
    """Time the implementation of ``operation`` in force on ``device``, on arrays of ``shape`` (rows, columns;
    columns a multiple of 128) and ``dtype``, float32, bfloat16 or float16, where the operation has a choice.
    Of a product without a third number the terms of an element are as many as columns.
    ArgumentError for an operation that moves no arrays, ShapeError for another shape, FormatError for another
    dtype.
    """
    return _measured(operation, device, shape, dtype, False)[0]


def measure_all(
    operation: str, device: Device | str, shape: tuple[int, ...] | None = None, dtype: DType | str = bfloat16
) -> list[Measurement]:
    """``measure`` of every implementation of ``operation`` that may serve ``device``, in turn, in the order
    in which they are chosen: our own products for Hopper stand beside cuBLASLt's."""
    return _measured(operation, device, shape, dtype, True)


def _measured(
    operation: str, device: Device | str, shape: tuple[int, ...] | None, dtype: DType | str, every: bool
) -> list[Measurement]:
    if operation not in TIMED:
        raise ArgumentError("measure", "operation", repr(operation), f"one of {', '.join(TIMED)}")
    device, kind = arrays.device(device), formats.dtype(dtype, "measure", "dtype", HIGH_PRECISION)
    kernels, spec, test = dispatch.kernels(device), SPECS[operation], kernel_test(operation)
    shape = SHAPES.get(device.kind, SHAPES["cpu"]) if shape is None else shape
    _want_shape(shape, "k" in inspect.signature(test.sample).parameters)
    rows, columns, *terms = shape
    more = dict(test.timed) | ({"k": terms[0]} if terms else {})
    arguments = test.arguments(Sampler(kernels, device, kind), rows, columns, **more)
    arguments["stream"] = arrays.current_stream(device)
    nbytes = spec.nbytes(arguments)
    usable, _ = dispatch.candidates(operation, device)
    steps: dict[str, Step] = {usable[0].impl_id: lambda: spec.call(kernels, arguments)}
    for impl in usable[1:] if every else ():
        steps[impl.impl_id] = partial(spec.call, SimpleNamespace(**{operation: impl.fn}), arguments)
    calls = CALLS if device.kind == "cuda" else 1
    times = medians(
        interleaved(steps | {"copy": copier(device, nbytes)}, clock_for(device), ROUNDS, calls, WARM_UPS)
    )
    flops = 0.0 if spec.flops is None else spec.flops(SimpleNamespace(**arguments))
    return [
        Measurement(operation, name, device, tuple(shape), nbytes, times[name], times["copy"], flops)
        for name in steps
    ]


def _want_shape(shape: Any, product: bool) -> None:
    """ShapeError unless ``shape`` is one of arrays that can be timed."""
    sizes = shape if isinstance(shape, list | tuple) else ()
    good = len(sizes) in ((2, 3) if product else (2,)) and all(isinstance(size, int) for size in sizes)
    if not good or min(sizes) < 1 or sizes[1] % 128 or (len(sizes) == 3 and sizes[2] % 128):
        wanted = "(rows, columns): a row or more, columns a multiple of 128"
        wanted += ", and terms, one, too" if product else ""
        raise ShapeError("measure", "shape", shape, wanted)
