"""The memory-bound kernels: one table of what each reads and writes, and the time of each beside a copy of
the same bytes.

The floor of such a kernel is the time to read each input once and to write each output once, at the speed of
a device-to-device copy. Every timed result is checked: its buffers are poisoned first, no element may be
left, and parts of it are compared with the reference engine's: some rows of what belongs to rows, and of sums
over rows some columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import BLOCK, Cast, block_shapes
from fp8kit.bench import random
from fp8kit.bench.report import NO_TIME, Row, Setting, reason
from fp8kit.bench.sizes import FULL, Layer
from fp8kit.bench.timing import clock_for, interleaved, medians
from fp8kit.formats import E4M3, E5M2, DType, Format
from fp8kit.testing import relative_error

Views = dict[str, ArrayView]
HALF = formats.bfloat16
SLICE = 64  # rows, or columns of sums, that are compared with the reference engine
TILE = (1, BLOCK)  # of the block-scaled cast
# bytes that calls in a row go through before they meet a buffer again: beyond every cache
_ROTATE, _MOST_SETS = 512 << 20, 8
# relative error of a result: bfloat16's rounding, codes of which few may differ by a step, float32 sums in
# another order
BOUNDS: dict[DType, float] = {formats.bfloat16: 2.0**-7, formats.uint8: 2.0**-6, formats.float32: 2.0**-10}


class Buffer(NamedTuple):
    """One argument: ``dims``, letters of ``KernelCase.dims``; ``role``: "in", "out", "sum" (an output summed
    over rows), "max" (a running maximum, zeroed before), "both" (read and written). ``values``: how an input
    is drawn, a name of ``fp8kit.bench.random``."""

    name: str
    dims: str
    dtype: DType
    role: str
    values: str = "normal"

    def shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape, a scalar's (1,)."""
        return tuple(dims[letter] for letter in self.dims) or (1,)


Call = Callable[[Any, Views, int], None]


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size.

    ``kernel``: its name in the contract; ``rows``, ``columns``: M and N. ``uses``: how often one FP8 layer
    with delayed scaling, forward and backward, runs it so. ``call(kernels, views, stream)`` runs it;
    ``workspace(kernels, M, N)`` is what it needs in bytes, None for nothing. ``within``: how often the layer
    does this within a product, where the skeleton has a pass of its own.
    """

    name: str
    kernel: str
    rows: int
    columns: int
    buffers: tuple[Buffer, ...]
    call: Call
    uses: int = 0
    workspace: Callable[[Any, int, int], int] | None = None
    within: int = 0

    @property
    def dims(self) -> dict[str, int]:
        """Sizes by letter; B and C: rows and columns of a block-scaled operand's scales; 2: itself."""
        _, (b, c) = block_shapes(self.rows, self.columns, TILE)
        return {"M": self.rows, "N": self.columns, "B": b, "C": c, "2": 2}

    @property
    def nbytes(self) -> int:
        """Bytes that must move: every input read once, every output written once."""
        each = (
            math.prod(b.shape(self.dims)) * b.dtype.itemsize * (2 if b.role == "both" else 1)
            for b in self.buffers
        )
        return sum(each)


# --- the table ----------------------------------------------------------------------------------------------

_X, _SCALE = Buffer("x", "MN", HALF, "in"), Buffer("scale", "", formats.float32, "in", "scale")
_CODES = (Buffer("q", "MN", formats.uint8, "out"), Buffer("q_t", "NM", formats.uint8, "out"))
_CAST = (
    *_CODES,
    _SCALE,
    Buffer("scale_inv", "", formats.float32, "out"),
    Buffer("amax", "", formats.float32, "max"),
)
_STATISTICS = tuple(Buffer(name, "M", formats.float32, "out") for name in ("mean", "rstd"))
_SEEN = (
    Buffer("mean", "M", formats.float32, "in", "small"),
    Buffer("rstd", "M", formats.float32, "in", "near one"),
)
_GAMMA, _BETA = Buffer("gamma", "N", HALF, "in", "near one"), Buffer("beta", "N", HALF, "in", "small")
_RNG = Buffer("rng", "2", formats.int64, "in", "rng")
_Y, _DX, _DY = Buffer("y", "MN", HALF, "out"), Buffer("dx", "MN", HALF, "out"), Buffer("dy", "MN", HALF, "in")
_RESIDUAL, _DBIAS = Buffer("residual", "MN", HALF, "in"), Buffer("dbias", "N", HALF, "sum")


def _cast(v: Views, fmt: Format) -> Cast:
    return Cast(fmt, v["q"], v["q_t"], v["scale"], v["scale_inv"], v["amax"])


def _norm_fwd(k: Any, v: Views, s: int) -> None:
    cast = _cast(v, E4M3) if "q" in v else None
    k.norm_fwd(
        v["x"],
        v["gamma"],
        v["beta"],
        v.get("y"),
        v["mean"],
        v["rstd"],
        None,
        cast,
        "LayerNorm",
        1e-5,
        False,
        s,
    )


def _norm_bwd(k: Any, v: Views, s: int) -> None:
    k.norm_bwd(
        v["dy"],
        v["x"],
        v["gamma"],
        v["mean"],
        v["rstd"],
        v["residual"],
        v["dx"],
        v["dgamma"],
        v["dbias"],
        "LayerNorm",
        False,
        v["workspace"],
        s,
    )


def _both_ways(k: Any, v: Views, s: int) -> None:
    k.quantize_transpose(
        v["x"], _cast(v, E5M2 if "dbias" in v else E4M3), v.get("dbias"), v.get("workspace"), s
    )


def _act_fwd(k: Any, v: Views, s: int) -> None:
    k.act_fwd(v["x"], v["bias"], None, None, _cast(v, E4M3), "gelu", (), s)


def _act_bwd(k: Any, v: Views, s: int) -> None:
    k.act_bwd(
        v["dy"], v["x"], v["bias"], None, v["dbias"], None, _cast(v, E5M2), "gelu", (), v["workspace"], s
    )


def _dropout_add(k: Any, v: Views, s: int) -> None:
    k.dropout_add(v["x"], v["bias"], v["residual"], v["y"], 0.1 if "rng" in v else 0.0, v.get("rng"), s)


def _block(k: Any, v: Views, s: int) -> None:
    k.block_quantize(v["x"], v["q"], v["q_inv"], None, None, E4M3, TILE, True, 0.0, s)


def _adamw(k: Any, v: Views, s: int) -> None:
    one = {name: [v[name]] for name in ("x", "dy", "m", "v", "master")}
    k.adamw_(
        one["x"],
        one["dy"],
        one["m"],
        one["v"],
        one["master"],
        1e-3,
        0.9,
        0.999,
        1e-8,
        [0.1],
        1,
        None,
        None,
        s,
    )


def _sums(k: Any, rows: int, columns: int) -> int:
    return int(k.quantize_transpose_workspace(rows, columns))


def _norm_sums(k: Any, rows: int, columns: int) -> int:
    return int(k.norm_bwd_workspace(rows, columns))


def _act_sums(k: Any, rows: int, columns: int) -> int:
    return int(k.act_bwd_workspace(rows, columns))


def _weights(name: str, rows: int, columns: int) -> KernelCase:
    return KernelCase(
        f"cast of {name}, both ways", "quantize_transpose", rows, columns, (_X, *_CAST), _both_ways, 1
    )


def kernel_cases(layer: Layer = FULL.large, vocabulary: int = FULL.vocabulary) -> list[KernelCase]:
    """Every timed kernel at a layer's sizes (bfloat16, GELU, LayerNorm, biases): first those of its FP8 pass,
    then others."""
    m, h, f = layer.tokens, layer.hidden, layer.ffn
    bias = Buffer("bias", "N", HALF, "in")
    grads = (_X, *_CAST, _DBIAS)
    return [
        KernelCase(
            "norm, cast both ways", "norm_fwd", m, h, (_X, _GAMMA, _BETA, *_CAST, *_STATISTICS), _norm_fwd, 2
        ),
        KernelCase(
            "attention's output, cast both ways", "quantize_transpose", m, h, (_X, *_CAST), _both_ways, 1
        ),
        KernelCase("bias, GELU, cast both ways", "act_fwd", m, f, (_X, bias, *_CAST), _act_fwd, 1),
        KernelCase("bias, residual", "dropout_add", m, h, (_X, bias, _RESIDUAL, _Y), _dropout_add, within=2),
        _weights("qkv's weight", 3 * h, h),
        _weights("proj's weight", h, h),
        _weights("fc1's weight", f, h),
        _weights("fc2's weight", h, f),
        KernelCase("gradient, cast both ways, sums", "quantize_transpose", m, h, grads, _both_ways, 2, _sums),
        KernelCase(
            "GELU's gradient, cast both ways, sums",
            "act_bwd",
            m,
            f,
            (_DY, _X, bias, *_CAST, _DBIAS),
            _act_bwd,
            1,
            _act_sums,
        ),
        KernelCase("dQKV, cast both ways, sums", "quantize_transpose", m, 3 * h, grads, _both_ways, 1, _sums),
        KernelCase(
            "norm's gradient, residual, sums",
            "norm_bwd",
            m,
            h,
            (_DY, _X, _GAMMA, *_SEEN, _RESIDUAL, _DX, Buffer("dgamma", "N", HALF, "sum"), _DBIAS),
            _norm_bwd,
            2,
            _norm_sums,
        ),
        KernelCase("norm, bfloat16", "norm_fwd", m, h, (_X, _GAMMA, _BETA, _Y, *_STATISTICS), _norm_fwd),
        KernelCase(
            "amax",
            "amax",
            m,
            h,
            (_X, Buffer("amax", "", formats.float32, "max")),
            lambda k, v, s: k.amax(v["x"], v["amax"], v["x"].shape, s),
        ),
        KernelCase(
            "dequantize",
            "dequantize",
            m,
            h,
            (Buffer("q", "MN", formats.uint8, "in", "codes"), _SCALE, _Y),
            lambda k, v, s: k.dequantize(v["q"], v["y"], v["scale"], E4M3, v["q"].shape, s),
        ),
        KernelCase(
            "cast by blocks of 1 x 128",
            "block_quantize",
            m,
            h - h % BLOCK or BLOCK,
            (_X, _CODES[0], Buffer("q_inv", "BC", formats.float32, "out")),
            _block,
        ),
        KernelCase(
            "bias, dropout 0.1, residual", "dropout_add", m, h, (_X, bias, _RESIDUAL, _RNG, _Y), _dropout_add
        ),
        KernelCase(
            "column sums",
            "sum_rows",
            m,
            h,
            (_X, _DBIAS),
            lambda k, v, s: k.sum_rows(v["x"], v["dbias"], v["workspace"], s),
            0,
            lambda k, rows, columns: int(k.column_sum_workspace(rows, columns)),
        ),
        KernelCase(
            "cross entropy",
            "cross_entropy_fwd",
            m,
            vocabulary,
            (
                _X,
                Buffer("ids", "M", formats.int64, "in", "ids"),
                *(Buffer(n, "M", formats.float32, "out") for n in ("loss", "lse")),
            ),
            lambda k, v, s: k.cross_entropy_fwd(v["x"], v["ids"], v["loss"], v["lse"], None, 0.0, -100, s),
        ),
        KernelCase(
            "AdamW with masters",
            "adamw_",
            h,
            f,
            (
                Buffer("x", "MN", HALF, "out"),
                _DY,
                *(
                    Buffer(n, "MN", formats.float32, "both", how)
                    for n, how in (("m", "small"), ("v", "near one"), ("master", "normal"))
                ),
            ),
            _adamw,
        ),
    ]


# --- running one --------------------------------------------------------------------------------------------


def inputs(case: KernelCase) -> dict[str, np.ndarray[Any, Any]]:
    """Random values of everything that is read, on the host."""
    return {
        b.name: random.values(b.values, b.shape(case.dims), b.dtype, i)
        for i, b in enumerate(case.buffers)
        if b.role in ("in", "both")
    }


def place(case: KernelCase, host: Mapping[str, np.ndarray[Any, Any]], device: Device, kernels: Any) -> Views:
    """Every buffer on ``device``: inputs filled, running maxima 0, outputs and workspace poisoned with 0xFF,
    NaN in every type."""
    found = {
        b.name: arrays.to(arrays.as_view(host[b.name].copy()), device)
        if b.name in host
        else random.poisoned(b.shape(case.dims), b.dtype, device)
        for b in case.buffers
    }
    for b in case.buffers:
        if b.role == "max":
            arrays.zero_(found[b.name])
    if case.workspace is not None:
        space = max(1, case.workspace(kernels, case.rows, case.columns))
        found["workspace"] = random.poisoned((space,), formats.uint8, device)
    return found


def check(case: KernelCase, kernels: Any, device: Device) -> float:
    """Run a case once on fresh random inputs; the largest relative error to the reference engine's result,
    each output's over its bound.

    NaN where an element was not written.
    """
    host = inputs(case)
    views = place(case, host, device, kernels)
    case.call(kernels, views, arrays.current_stream(device))
    made = {b.name: views[b.name].numpy() for b in case.buffers if b.role != "in"}
    if any(_left(array) for array in made.values()):
        return math.nan
    few = {"M": min(SLICE, case.rows), "N": min(SLICE, case.columns)}
    errors = [0.0]
    for roles, cut in ((("out", "both"), "M"), (("sum",), "N")):
        if not any(b.role in roles for b in case.buffers):
            continue
        part = replace(case, rows=few["M"]) if cut == "M" else replace(case, columns=few["N"])
        own = dispatch.kernels(CPU)
        small = {name: _cut(array, _buffer(case, name), part) for name, array in host.items()}
        exact = place(part, small, CPU, own)
        part.call(own, exact, 0)
        for b in case.buffers:
            if b.role in roles:
                got, want = _cut(made[b.name], b, part), exact[b.name].numpy()
                errors.append(_error(got, want, E5M2 if "dbias" in views else E4M3) / BOUNDS[b.dtype])
    return max(errors)


def _buffer(case: KernelCase, name: str) -> Buffer:
    return next(b for b in case.buffers if b.name == name)


def _cut(array: np.ndarray[Any, Any], buffer: Buffer, part: KernelCase) -> np.ndarray[Any, Any]:
    """What of a whole buffer belongs to a case of fewer rows or columns."""
    return np.ascontiguousarray(array[tuple(slice(n) for n in buffer.shape(part.dims))])


def _left(array: np.ndarray[Any, Any]) -> bool:
    """Whether poison is left."""
    return (
        bool((array == 0xFF).any())
        if array.dtype == np.uint8
        else bool(np.isnan(array.astype(np.float32, copy=False)).any())
    )


def _error(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], fmt: Format) -> float:
    if got.dtype == np.uint8:
        kind = formats.dtype_of_format(fmt)
        assert kind is not None
        got, want = (array.view(kind.numpy) for array in (got, want))
    return relative_error(got.astype(np.float64), want.astype(np.float64))


def copier(device: Device, nbytes: int, sets: int = 1) -> Callable[[], None]:
    """A call that copies on the device, ``nbytes`` read and written together; of random bits, in as many
    buffers by turns as ``sets``."""
    half = max(nbytes // 2, 1)
    pairs = [
        (random.codes_on((half,), device, i), random.poisoned((half,), formats.uint8, device))
        for i in range(sets)
    ]
    turn = _turns(pairs)
    return lambda: (lambda pair: arrays.copy(pair[1], pair[0]))(next(turn))


def _turns(sets: list[Any]) -> Iterator[Any]:
    while True:
        yield from sets


def sets_of(nbytes: int, device: Device) -> int:
    """How many buffers take turns, so that no cache holds what is read."""
    return 1 if device.kind == "cpu" else max(1, min(_MOST_SETS, -(-_ROTATE // max(nbytes, 1))))


@functools.lru_cache(maxsize=64)
def copy_ceiling(device: Device, nbytes: int) -> float:
    """Bytes a second, read and written, of a device-to-device copy that moves ``nbytes`` in all: what a
    memory-bound kernel could reach."""
    steps = {"copy": copier(device, nbytes, sets_of(nbytes, device))}
    return nbytes / medians(interleaved(steps, clock_for(device), 3, 10))["copy"]


def measure(case: KernelCase, setting: Setting, kernels: Any | None = None) -> Row:
    """One row: the kernel's time, that of a copy of the same bytes taken in turn with it, and how wrong the
    result is (``of_bound``)."""
    device = setting.device
    kernels = dispatch.kernels(device) if kernels is None else kernels
    row: Row = {
        "workload": "kernels",
        "case": case.name,
        "kernel": case.kernel,
        "shape": [case.rows, case.columns],
        "status": "ok",
        "mib": case.nbytes / 2**20,
        "uses": case.uses,
    }
    try:
        row["of_bound"] = error = check(case, kernels, device)
        if not error < 1:
            row["status"] = (
                "WRONG: "
                f"{'elements were not written' if math.isnan(error) else f'{error:.2f} of the error bound'}"
            )
        count = sets_of(case.nbytes, device)
        host, stream = inputs(case), arrays.current_stream(device)
        turn = _turns([place(case, host, device, kernels) for _ in range(count)])
        steps = {
            "kernel": lambda: case.call(kernels, next(turn), stream),
            "copy": copier(device, case.nbytes, count),
        }
        found = medians(
            interleaved(
                steps, clock_for(device), max(2, setting.rounds // 2), 2 * setting.calls, setting.warmups
            )
        )
    except Exception as failed:  # one kernel's failure must not cost the others' figures; it is reported
        row["status"] = reason(failed)
        return row
    row |= {
        "gpu_ms": found["kernel"] * 1e3,
        "copy_ms": found["copy"] * 1e3,
        "tbps": case.nbytes / found["kernel"] * 1e-12,
        "ceiling_tbps": case.nbytes / found["copy"] * 1e-12,
        "of_copy": found["copy"] / found["kernel"],
    }
    return row


def kernels_part(setting: Setting) -> list[Row]:
    """Every case, and the sums over what one layer runs."""
    rows = []
    for case in kernel_cases(setting.sizes.large, setting.sizes.vocabulary):
        if setting.left() <= 0:
            rows.append({"workload": "kernels", "case": case.name, "status": NO_TIME, "uses": case.uses})
            continue
        rows.append(measure(case, setting))
    return [*rows, in_layer(rows)]


def in_layer(rows: list[Row]) -> Row:
    """The row of all passes of one layer: sums of the kernels' and of the copies' times, by how often each
    runs."""
    row: Row = {"workload": "in one layer", "case": "all passes", "status": "ok"}
    used = [r for r in rows if r["uses"]]
    if any("gpu_ms" not in r for r in used):
        return row | {"status": "left out: a kernel has no time"}
    whole, copies = (sum(r[key] * r["uses"] for r in used) for key in ("gpu_ms", "copy_ms"))
    return row | {
        "gpu_ms": whole,
        "copy_ms": copies,
        "mib": sum(r["mib"] * r["uses"] for r in used),
        "of_copy": copies / whole,
        "check": "sums of the rows above",
    }
