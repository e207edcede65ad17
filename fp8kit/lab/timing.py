"""How fast what serves an operation is, beside the ceiling of everything that moves memory: a copy of as many
bytes.

The bytes of a call are those of its arrays: each input read once, each output written once, what is changed
in place both; workspaces not counted. The copy moves as many, half of them read and half written. A
product's ceiling is what the chip's tensor cores multiply at most, where that is known (``peaks``). Data are
random, never zeros: power, and so speed, depends on the bits.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from fp8kit import arrays, formats
from fp8kit.arrays import Device, Shape
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import OWN, implementation
from fp8kit.backends.protocol import KERNELS, SPECS
from fp8kit.backends.registry import CannotTake, OpImpl
from fp8kit.bench.kernels import copier
from fp8kit.bench.timing import Step, clock_for, interleaved, medians
from fp8kit.errors import ArgumentError, BackendError, ShapeError, meant
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16
from fp8kit.lab.peaks import peak
from fp8kit.raw_kernels import manifest
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
    compute, 0 of whatever only moves memory. ``peak``: the operations a second that the chip makes at most
    for a product, 0 where that is not known. ``options``: those of the call that were asked for."""

    operation: str
    implementation: str
    device: Device
    shape: Shape
    nbytes: int
    seconds: float
    ceiling: float
    flops: float = 0.0
    peak: float = 0.0
    options: str = ""

    @property
    def share(self) -> float:
        """How much of the ceiling is reached: of the chip's peak where that is known, else of the copy's
        speed."""
        return float(self.flops / self.seconds / self.peak if self.peak else self.ceiling / self.seconds)

    def __str__(self) -> str:
        rate, size = self.nbytes / self.seconds / 1e9, self.nbytes / 2**20
        extent = " x ".join(map(str, self.shape))
        more = f" ({self.options})" if self.options else ""
        what = f"{self.operation}{more}: {self.implementation} on {self.device}, {extent}"
        if self.flops:
            of_peak = f", {self.share:.0%} of the chip's {self.peak / 1e12:,.0f} TFLOP/s" if self.peak else ""
            what += f": {self.seconds * 1e6:.1f} us, {self.flops / self.seconds / 1e9:,.1f} GFLOP/s"
            return what + of_peak
        return (
            f"{what}: {self.seconds * 1e6:.1f} us, {rate:.1f} GB/s, {self.share:.0%} of the speed of a copy "
            f"of {size:.1f} MiB"
        )


def measure(
    operation: str,
    device: Device | str,
    shape: Shape | None = None,
    dtype: DType | str = bfloat16,
    **options: Any,
) -> Measurement:
    """Time the implementation of ``operation`` in force on ``device``, on arrays of ``shape`` and ``dtype``,
    float32, bfloat16 or float16, where the operation has a choice.

    * ``operation``: a name of the kernel contract; or a source's or a raw kernel's, "hopper_gemm", for the
      first operation that launches it, on a GPU by that source.
    * ``shape``: rows and columns, a multiple of 128; of a product rows, columns, and terms of an element, a
      multiple of 16. Without a third number the terms are as many as columns.
    * ``options``: of the contract's sample calls (``fp8kit/testing/contract``): ``fast=False`` for the split
      accumulator's product.

    ArgumentError for an operation that moves no arrays and an option that it does not have, ShapeError for
    another shape, FormatError for another dtype, BackendError for a source that does not run on this GPU, and
    CannotTake for a shape that it does not take.
    """
    return _measured(operation, device, shape, dtype, False, options)[0]


def measure_all(
    operation: str,
    device: Device | str,
    shape: Shape | None = None,
    dtype: DType | str = bfloat16,
    **options: Any,
) -> list[Measurement]:
    """``measure`` of every implementation of ``operation`` that may serve ``device`` and takes the shape, in
    turn, in the order in which they are chosen: our own products for Hopper stand beside cuBLASLt's."""
    return _measured(operation, device, shape, dtype, True, options)


def has_option(operation: str, name: str) -> bool:
    """Whether calls of an operation that is timed have that option (``measure``)."""
    return name in inspect.signature(kernel_test(operation).sample).parameters


def _named(operation: str) -> tuple[str, str]:
    """The operation that a name stands for, and the source that it names, "" for none."""
    if operation in TIMED or not isinstance(operation, str):
        return operation, ""
    functions = {
        function: entry
        for entry in manifest.sources()
        for function in entry.functions
        if operation in (entry.name, entry.name.removesuffix(".cu"), function)
    }
    for function, entry in functions.items():
        for name in entry.operations[function] or (function, f"{function}_"):
            if name in TIMED:
                return name, entry.name
    return operation, ""


def _measured(
    operation: str,
    device: Device | str,
    shape: Shape | None,
    dtype: DType | str,
    every: bool,
    options: dict[str, Any],
) -> list[Measurement]:
    asked, (operation, source) = operation, _named(operation)
    if operation not in TIMED:
        wanted = f"one of {', '.join(TIMED)}, or a source of one{meant(operation, TIMED)}"
        raise ArgumentError("measure", "operation", repr(operation), wanted)
    device, kind = arrays.device(device), formats.dtype(dtype, "measure", "dtype", HIGH_PRECISION)
    kernels, spec, test = dispatch.kernels(device), SPECS[operation], kernel_test(operation)
    shape = SHAPES.get(device.kind, SHAPES["cpu"]) if shape is None else shape
    known = list(inspect.signature(test.sample).parameters)[3:]
    _want_shape(shape, "k" in known)
    for name in options:
        if name == "k" or name not in known:  # the shape says how many terms there are
            raise ArgumentError("measure", name, repr(options[name]), f"one of {', '.join(known) or 'none'}")
    rows, columns, *terms = shape
    more = dict(test.timed) | ({"k": terms[0]} if terms else {}) | options
    arguments = test.arguments(Sampler(kernels, device, kind), rows, columns, **more)
    arguments["stream"] = arrays.current_stream(device)
    nbytes = spec.nbytes(arguments)
    steps: dict[str, Step] = {}
    refused: CannotTake | None = None
    for impl in _implementations(asked, operation, source, device, every):
        if not steps and not source:  # with what stands behind it, where it refuses
            steps[impl.impl_id] = partial(spec.call, kernels, arguments)
            continue
        step = partial(spec.call, SimpleNamespace(**{operation: impl.fn}), arguments)
        try:
            step()
            steps[impl.impl_id] = step
        except CannotTake as error:
            refused = error
    if refused is not None and not steps:
        raise refused
    calls = CALLS if device.kind == "cuda" else 1
    times = medians(
        interleaved(steps | {"copy": copier(device, nbytes)}, clock_for(device), ROUNDS, calls, WARM_UPS)
    )
    flops = 0.0 if spec.flops is None else spec.flops(SimpleNamespace(**arguments))
    ceiling = peak(operation, device, kind)
    said = ", ".join(f"{name}={value}" for name, value in options.items())
    return [
        Measurement(
            operation, name, device, tuple(shape), nbytes, times[name], times["copy"], flops, ceiling, said
        )
        for name in steps
    ]


def _implementations(asked: str, operation: str, source: str, device: Device, every: bool) -> list[OpImpl]:
    """What is timed: what is in force, perhaps every other one behind it; of a source that is an
    implementation of its own, that one. BackendError where it does not run here."""
    usable, others = dispatch.candidates(operation, device)
    if source in OWN and device.kind == "cuda":
        function = implementation(operation, source)
        usable = [impl for impl in usable if impl.fn is function]
        if not usable:
            why = next((reason for impl, reason in others if impl.fn is function), "another one is in force")
            raise BackendError("measure", "operation", repr(asked), f"what runs on {device}: {why}")
    return usable if every else usable[:1]


def _want_shape(shape: Any, product: bool) -> None:
    """ShapeError unless ``shape`` is one of arrays that can be timed."""
    sizes = shape if isinstance(shape, list | tuple) else ()
    good = len(sizes) in ((2, 3) if product else (2,)) and all(isinstance(size, int) for size in sizes)
    if good and min(sizes) >= 1 and not sizes[-1] % (16 if product else 128):
        return
    wanted = "(rows, columns): a row or more, columns a multiple of 128"
    if product:
        wanted = "(rows, columns, terms) or (rows, columns): one or more, the last a multiple of 16"
    raise ShapeError("measure", "shape", shape, wanted)
