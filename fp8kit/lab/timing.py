"""How fast what serves an operation is, beside the ceiling of everything that moves memory: a copy of as many
bytes.

The bytes of a call are those of its arrays: each input read once, each output written once, what is changed
in place both; workspaces not counted. The copy moves as many, half of them read and half written. Data are
random, never zeros: power, and so speed, depends on the bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from fp8kit import arrays, formats
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import KERNELS, SPECS
from fp8kit.bench.kernels import copier
from fp8kit.bench.timing import clock_for, interleaved, medians
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.formats import HIGH_PRECISION, DType, bfloat16
from fp8kit.testing.contract import kernel_test
from fp8kit.testing.contract.sampler import Sampler

ROUNDS, CALLS, WARM_UPS = 7, 10, 2
# beyond the last cache on a GPU: two bfloat16 arrays are 256 MiB
SHAPES = {"cpu": (1024, 1024), "cuda": (8192, 8192)}
TIMED = tuple(name for name in KERNELS if SPECS[name].launches)


@dataclass(frozen=True)
class Measurement:
    """``seconds`` of a call of ``shape`` (rows, columns) and of the copy, ``ceiling``, that moves its
    ``nbytes`` bytes. ``flops``: what products and attention compute, 0 of whatever only moves memory."""

    operation: str
    implementation: str
    device: Device
    shape: tuple[int, int]
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
        what = f"{self.operation}: {self.implementation} on {self.device}, {self.shape[0]} x {self.shape[1]}"
        if self.flops:
            return f"{what}: {self.seconds * 1e6:.1f} us, {self.flops / self.seconds / 1e9:,.1f} GFLOP/s"
        return (
            f"{what}: {self.seconds * 1e6:.1f} us, {rate:.1f} GB/s, {self.share:.0%} of the speed of a copy "
            f"of {size:.1f} MiB"
        )


def measure(
    operation: str, device: Device | str, shape: tuple[int, int] | None = None, dtype: DType | str = bfloat16
) -> Measurement:
    """Time the implementation of ``operation`` in force on ``device``, on arrays of ``shape`` (rows, columns;
    columns a multiple of 128) and ``dtype``, float32, bfloat16 or float16, where the operation has a choice.
    ArgumentError for an operation that moves no arrays, ShapeError for another shape, FormatError for another
    dtype.
    """
    if operation not in TIMED:
        raise ArgumentError("measure", "operation", repr(operation), f"one of {', '.join(TIMED)}")
    device, kind = arrays.device(device), formats.dtype(dtype, "measure", "dtype")
    if kind not in HIGH_PRECISION:
        wanted = f"one of {', '.join(each.name for each in HIGH_PRECISION)}"
        raise FormatError("measure", "dtype", kind, wanted)
    shape = SHAPES.get(device.kind, SHAPES["cpu"]) if shape is None else shape
    good = (
        isinstance(shape, list | tuple) and len(shape) == 2 and all(isinstance(size, int) for size in shape)
    )
    if not good or shape[0] < 1 or shape[1] < 128 or shape[1] % 128:
        wanted = "(rows, columns): a row or more, columns a multiple of 128"
        raise ShapeError("measure", "shape", shape, wanted)
    kernels, spec, test = dispatch.kernels(device), SPECS[operation], kernel_test(operation)
    arguments = test.arguments(Sampler(kernels, device, kind), *shape, **test.timed)
    arguments["stream"] = arrays.current_stream(device)
    nbytes = spec.nbytes(arguments)
    steps = {"call": lambda: spec.call(kernels, arguments), "copy": copier(device, nbytes)}
    calls = CALLS if device.kind == "cuda" else 1
    times = medians(interleaved(steps, clock_for(device), ROUNDS, calls, WARM_UPS))
    usable, _ = dispatch.candidates(operation, device)
    flops = 0.0 if spec.flops is None else spec.flops(SimpleNamespace(**arguments))
    found = (usable[0].impl_id, device, (shape[0], shape[1]), nbytes, times["call"], times["copy"], flops)
    return Measurement(operation, *found)
