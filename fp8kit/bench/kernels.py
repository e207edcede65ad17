"""The memory-bound kernels at a layer's sizes: the time of each beside a copy of the bytes that it reads and
writes.

The floor of such a kernel is the time to read each input once and to write each output once, at the speed of
a device-to-device copy. Every timed result is checked: outputs are poisoned first, no element may be left,
and parts of it are compared with the reference engine's, as exactly as the contract says: some rows of what
belongs to rows, and of sums over rows some columns.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import BLOCK, SPECS, KernelSpec, map_arrays, views
from fp8kit.bench import random
from fp8kit.bench.contest import row_of, within_time
from fp8kit.bench.report import Row, Setting, attempt
from fp8kit.bench.sizes import FULL, Layer
from fp8kit.formats import E2M1, E5M2
from fp8kit.testing.compare import Array
from fp8kit.testing.contract import copied, host, kernel_test, poisoned, put, snapshot, workspace
from fp8kit.testing.contract.agreement import errors_of
from fp8kit.testing.contract.sampler import Outline, Sampler

HALF = formats.bfloat16
SLICE = 64  # rows, or columns of sums, that are compared with the reference engine
# bytes that calls in a row go through before they meet a buffer again: beyond every cache
_ROTATE, _MOST_SETS = 512 << 20, 8


_NVFP4: dict[str, Any] = {"fmt": E2M1, "granularity": "nvfp4_1x16"}
_MXFP4: dict[str, Any] = {"fmt": E2M1, "granularity": "mx_1x32", "rule": "floor"}
# casts by blocks along the last dimension, and along the first
_BLOCKS: dict[str, dict[str, Any]] = {
    "MXFP8": {},
    "MXFP8 along columns": {"along": 0},
    "NVFP4": _NVFP4,
    "NVFP4 along columns": {**_NVFP4, "along": 0},
    "NVFP4, stochastic": {**_NVFP4, "bits": 8},
    "NVFP4 along columns, rotation of 16": {**_NVFP4, "along": 0, "size": 16, "kind": "te"},
    "NVFP4 by squares": {**_NVFP4, "granularity": "nvfp4_16x16"},
    "MXFP4, rotation of 32": {**_MXFP4, "size": 32},
}


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size.

    ``kernel``: its name in the contract; ``rows``, ``columns``, ``options``: of its sample
    (``fp8kit.testing.contract``). ``uses``: how often one FP8 layer with delayed scaling, forward and
    backward, runs it so. ``within``: how often the layer does this within a product, where the skeleton has a
    pass of its own.
    """

    name: str
    kernel: str
    rows: int
    columns: int
    options: dict[str, Any] = field(default_factory=dict)
    uses: int = 0
    within: int = 0

    @property
    def spec(self) -> KernelSpec:
        """What it reads and writes."""
        return SPECS[self.kernel]

    def arguments(self, sampler: Sampler, stream: int = 0) -> dict[str, Any]:
        """Returns a call's."""
        made = kernel_test(self.kernel).arguments(sampler, self.rows, self.columns, **self.options)
        return {**made, "stream": stream}

    @functools.cached_property
    def outline(self) -> dict[str, Any]:
        """A call's arguments without memory."""
        return self.arguments(Outline(HALF))

    @property
    def nbytes(self) -> int:
        """Bytes that must move: every input read once, every output written once."""
        return self.spec.nbytes(self.outline)

    @functools.cached_property
    def sums(self) -> frozenset[str]:
        """The outputs that are sums over rows: arrays as long whatever the rows."""
        fewer = replace(self, rows=self.rows // 2).outline
        pairs = zip(self.spec.outputs(self.outline), self.spec.outputs(fewer), strict=True)
        return frozenset(o.name for o, other in pairs if o.view.size > 1 and o.view.shape == other.view.shape)


def kernel_cases(layer: Layer = FULL.large, vocabulary: int = FULL.vocabulary) -> list[KernelCase]:
    """Every timed kernel at a layer's sizes (bfloat16, GELU, LayerNorm, biases): first those of its FP8 pass,
    then others."""
    m, h, f = layer.tokens, layer.hidden, layer.ffn
    cast, plain = {"strewn": False}, {"p": 0.0}
    sums = {"cast": {"fmt": E5M2}, "dbias": True}
    fused = {"biased": True, "cast": {}}
    return [
        KernelCase("norm, cast both ways", "norm_fwd", m, h, {"y": False, "cast": {}}, 2),
        KernelCase("attention's output, cast both ways", "quantize_transpose", m, h, cast, 1),
        KernelCase("bias, GELU, cast both ways", "act_fwd", m, f, {**fused, "y": False}, 1),
        KernelCase("bias, residual", "dropout_add", m, h, plain, within=2),
        *(
            KernelCase(f"cast of {name}'s weight, both ways", "quantize_transpose", *size, cast, 1)
            for name, size in layer.weights.items()
        ),
        KernelCase("gradient, cast both ways, sums", "quantize_transpose", m, h, sums, 2),
        KernelCase(
            "GELU's gradient, cast both ways, sums",
            "act_bwd",
            m,
            f,
            {**fused, "dx": False, "cast": {"fmt": E5M2}},
            1,
        ),
        KernelCase("dQKV, cast both ways, sums", "quantize_transpose", m, 3 * h, sums, 1),
        KernelCase("norm's gradient, residual, sums", "norm_bwd", m, h, {"residual": True}, 2),
        KernelCase("norm, bfloat16", "norm_fwd", m, h),
        KernelCase("amax", "amax", m, h, cast),
        KernelCase("dequantize", "dequantize", m, h, cast),
        KernelCase(
            "cast by blocks of 1 x 128", "block_quantize", m, h - h % BLOCK or BLOCK, {**cast, "only": "q"}
        ),
        *(
            KernelCase(name, "cast_blocks", m, h, {**cast, "only": "q scale_codes", **options})
            for name, options in _BLOCKS.items()
        ),
        KernelCase("rotation of 16, amax alone", "rotate", m, h, {**cast, "out": ""}),
        KernelCase("bias, dropout 0.1, residual", "dropout_add", m, h),
        KernelCase("column sums", "sum_rows", m, h),
        KernelCase("cross entropy", "cross_entropy_fwd", m, vocabulary, {"mean": False}),
        KernelCase("AdamW with masters", "adamw_", h, f),
    ]


# --- running one --------------------------------------------------------------------------------------------


def check(case: KernelCase, kernels: Any, device: Device) -> float:
    """Run a case once on fresh random inputs; the largest error beside the reference engine's result, over
    what two right ones may differ by. NaN where an element was not written."""
    spec, stream = case.spec, arrays.current_stream(device)
    call = case.arguments(Sampler(kernels, device, HALF), stream)
    before = copied(call)
    spec.call(kernels, call)
    outputs = list(spec.outputs(call))
    made = {output.name: host(output.view) for output in outputs}
    if any(map(_left, made.values())):
        return math.nan
    few_rows = replace(case, rows=min(SLICE, case.rows))
    few_columns = replace(case, columns=min(SLICE, case.columns))
    names = frozenset(output.name for output in outputs if not (output.kept and output.view.size == 1))
    return max(
        _part_error(few_rows, before, made, names - case.sums),
        _part_error(few_columns, before, made, case.sums),
    )


def _part_error(
    part: KernelCase, before: dict[str, Any], made: dict[str, Array], names: frozenset[str]
) -> float:
    """Returns the reference's results for a part of a call's arguments, and how far those of the call are
    from them."""
    spec, own = part.spec, dispatch.kernels(CPU)
    whole = views(value for name, value in before.items() if name != "workspace")

    def cut(view: ArrayView) -> ArrayView:
        return arrays.as_view(_cut(next(whole).numpy(), view).copy())

    call = {**{name: map_arrays(value, cut) for name, value in part.outline.items()}, "stream": 0}
    call["workspace"] = workspace(spec.workspace_bytes(own, call), CPU)
    slacks = kernel_test(part.kernel).slacks(snapshot(call, CPU))
    spec.call(own, call)
    found = [0.0]
    for output in spec.outputs(call):
        if output.name in names:
            want = output.view.numpy()
            error, limit = errors_of(output, _cut(made[output.name], output.view), want, slacks)
            found.append(float(np.max(np.divide(error, limit, out=1.0 * error, where=limit > 0), initial=0)))
    return max(found)


def _cut(array: Array, like: ArrayView) -> Array:
    """Returns what of a whole array belongs to a part of that shape."""
    return np.ascontiguousarray(array[tuple(slice(n) for n in like.shape)])


def _left(array: Array) -> bool:
    """Whether poison is left."""
    codes = array.dtype == np.uint8
    return bool((array == 0xFF if codes else np.isnan(array.astype(np.float32, copy=False))).any())


def copier(device: Device, nbytes: int, sets: int = 1) -> Callable[[], None]:
    """Returns a call that copies on the device, ``nbytes`` read and written together; of random bits, in as
    many buffers by turns as ``sets``."""
    half = max(nbytes // 2, 1)
    pairs = [
        (put(random.codes((half,), i), device), poisoned((half,), formats.uint8, device)) for i in range(sets)
    ]
    turn = itertools.cycle(pairs)

    def copy() -> None:
        source, target = next(turn)
        arrays.copy(target, source)

    return copy


def sets_of(nbytes: int, device: Device) -> int:
    """Returns how many buffers take turns, so that no cache holds what is read."""
    return 1 if device.kind == "cpu" else max(1, min(_MOST_SETS, -(-_ROTATE // max(nbytes, 1))))


def measure(case: KernelCase, setting: Setting, kernels: Any | None = None) -> Row:
    """One row: the kernel's time, that of a copy of the same bytes taken in turn with it, and how wrong the
    result is (``of_bound``)."""
    device = setting.device
    kernels = dispatch.kernels(device) if kernels is None else kernels
    row = _row(case, kernel=case.kernel, shape=[case.rows, case.columns], mib=case.nbytes / 2**20)
    with attempt(row):
        row["of_bound"] = error = check(case, kernels, device)
        if not error < 1:
            what = "elements were not written" if math.isnan(error) else f"{error:.2f} of the error bound"
            row["status"] = f"WRONG: {what}"
        count, stream = sets_of(case.nbytes, device), arrays.current_stream(device)
        turn = itertools.cycle([case.arguments(Sampler(kernels, device, HALF), stream) for _ in range(count)])
        steps = {
            "kernel": lambda: case.spec.call(kernels, next(turn)),
            "copy": copier(device, case.nbytes, count),
        }
        found = replace(setting.fewer_rounds(), calls=2 * setting.calls).medians(steps)
        row |= {
            "gpu_ms": found["kernel"] * 1e3,
            "copy_ms": found["copy"] * 1e3,
            "tbps": case.nbytes / found["kernel"] * 1e-12,
            "ceiling_tbps": case.nbytes / found["copy"] * 1e-12,
            "of_copy": found["copy"] / found["kernel"],
        }
    return row


def _row(case: KernelCase, **figures: Any) -> Row:
    return row_of("kernels", case.name, uses=case.uses, **figures)


def kernels_part(setting: Setting) -> list[Row]:
    """Every case, and the sums over what one layer runs."""
    cases = kernel_cases(setting.sizes.large, setting.sizes.vocabulary)
    rows = within_time(setting, cases, lambda case: [measure(case, setting)], _row)
    return [*rows, in_layer(rows)]


def in_layer(rows: list[Row]) -> Row:
    """Returns the row of all passes of one layer: sums of the kernels' and of the copies' times, by how often
    each runs."""
    row = row_of("in one layer", "all passes")
    used = [r for r in rows if r["uses"]]
    if any("gpu_ms" not in r for r in used):
        return row | {"status": "left out: a kernel has no time"}
    row |= {key: sum(r[key] * r["uses"] for r in used) for key in ("gpu_ms", "copy_ms", "mib")}
    return row | {"of_copy": row["copy_ms"] / row["gpu_ms"], "check": "sums of the rows above"}
