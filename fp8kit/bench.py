"""``fp8kit bench``: the native library timed beside what a user would otherwise take, each number with a check of the result.

Data are random, never zeros: power, and so speed, depends on the bits. Times are wall-clock medians. On a GPU "gpu" is the time
of one call when calls are queued back to back, "host" the time until such a call returns.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp8kit
from fp8kit import arrays, codec, formats, nn
from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.backends import dispatch
from fp8kit.float8 import quantize
from fp8kit.formats import E4M3, E5M2, Format
from fp8kit.models.gpt import GPT
from fp8kit.models.presets import PRESETS
from fp8kit.models.train import fp8_recipe
from fp8kit.recipe import DelayedScaling, Recipe
from fp8kit.testing import relative_error

PACKAGES = ("numpy", "ml_dtypes", "numba", "tbb", "safetensors", "matplotlib", "cupy-cuda13x", "nvmath-python", "cuda-bindings",
            "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "torch", "jax", "jax-tvm-ffi")
CAST_SHAPE = (2048, 2048)
# name, sequence, batch, hidden, feed-forward, heads
LAYERS = (("768", 1024, 8, 768, 3072, 12), ("4096", 2048, 4, 4096, 16384, 32))
# of the layer of hidden 4096, 8192 tokens: rows, columns, contraction
GEMMS = ((8192, 12288, 4096), (8192, 4096, 4096), (8192, 16384, 4096), (8192, 4096, 16384))
# E4M3 keeps 3 mantissa bits: rounding an operand has a relative error of about 2**-4 / sqrt(3), and two operands sqrt(2) times that
PRODUCT_ERROR = 2**-4
LAYER_ERROR = 2 * PRODUCT_ERROR


@dataclass(frozen=True)
class Result:
    """One number: ``value`` in ``unit``; ``correct`` and ``check`` say whether the timed result was right, and against what."""

    name: str
    value: float
    unit: str
    correct: bool
    check: str


def versions() -> dict[str, str]:
    """Package name -> installed version, or "not installed", of what fp8kit can use."""
    found = {"fp8kit": fp8kit.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def run(device: Device) -> list[Result]:
    """Everything that can be timed here: casts and a training step on the CPU, layers and GEMMs where ``device`` is a GPU."""
    results = [*_casts(E4M3), *_casts(E5M2), *_training_step()]
    if device.kind != "cpu":
        results += [result for layer in LAYERS for result in _layer(device, *layer)]
        results += [_gemm(device, *shape) for shape in GEMMS]
    return results


def table(results: list[Result]) -> str:
    """The results as aligned lines."""
    width = max(len(r.name) for r in results)
    rows = (f"{r.name:{width}}  {r.value:10.3f} {r.unit:8}  {'ok' if r.correct else 'WRONG':5}  {r.check}" for r in results)
    return "\n".join(row.rstrip() for row in rows)


def write(path: Path, results: list[Result]) -> None:
    """The results, versions and machine as a JSON file."""
    whole = {"machine": platform.machine(), "python": platform.python_version(), "versions": versions(),
             "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(whole, indent=1) + "\n")


# --- how time is taken ------------------------------------------------------------------------------------------------


def median_seconds(call: Callable[[], object], device: Device = CPU, rounds: int = 7, calls: int = 1, warmups: int = 2) -> float:
    """Median over ``rounds`` of the mean time of ``calls`` calls queued back to back, waiting for the device once a round."""
    return _timed(call, device, rounds, calls, warmups, wait_inside=True)


def host_seconds(call: Callable[[], object], device: Device, rounds: int = 20, warmups: int = 3) -> float:
    """Median time until one call returns, the device idle when it starts."""
    return _timed(call, device, rounds, 1, warmups, wait_inside=False)


def _timed(call: Callable[[], object], device: Device, rounds: int, calls: int, warmups: int, wait_inside: bool) -> float:
    for _ in range(warmups):
        call()
    times = []
    for _ in range(rounds):
        arrays.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if wait_inside:
            arrays.synchronize(device)
        times.append((time.perf_counter() - start) / calls)
    arrays.synchronize(device)
    return statistics.median(times)


def _random(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    return np.random.Generator(np.random.Philox(seed)).standard_normal(shape, np.float32)


# --- on the CPU -------------------------------------------------------------------------------------------------------


def _casts(fmt: Format) -> Iterator[Result]:
    """The reference engine's casts beside ml_dtypes'."""
    x = _random(CAST_SHAPE, 1)
    kind = formats.dtype_of_format(fmt)
    assert kind is not None
    scale = np.ones(1, np.float32)
    ours = quantize(x, fmt, scale=scale)
    theirs = x.astype(kind.numpy)
    back = theirs.astype(np.float32)
    same = bool(np.array_equal(ours.data, theirs.view(np.uint8)))
    same_back = bool(np.array_equal(ours.dequantize(), back))
    cases: tuple[tuple[str, Callable[[], object], bool, str], ...] = (
        (f"quantize {fmt}, reference", lambda: quantize(x, fmt, scale=scale), same, "same codes as ml_dtypes"),
        (f"quantize {fmt}, ml_dtypes", lambda: x.astype(kind.numpy), same, ""),
        (f"dequantize {fmt}, reference", ours.dequantize, same_back, "same values as ml_dtypes"),
        (f"dequantize {fmt}, ml_dtypes", lambda: theirs.astype(np.float32), same_back, ""),
    )
    for name, call, correct, check in cases:
        yield Result(name, x.size / median_seconds(call) / 1e9, "Gelem/s", correct, check)


def _training_step() -> list[Result]:
    """Forward and backward of the demo's model on the CPU, FP8 beside float32."""
    size = PRESETS["demo-cpu"]
    ids = np.random.Generator(np.random.Philox(2)).integers(0, 256, (size.sequences, size.context + 1))
    x, y = tensor(np.ascontiguousarray(ids[:, :-1])), tensor(np.ascontiguousarray(ids[:, 1:]))
    seconds, losses = {}, {}
    for name, recipe in (("float32", None), ("FP8", fp8_recipe(size))):
        nn.manual_seed(0)
        model = GPT(size, formats.float32, CPU)

        def step(model: GPT = model, recipe: Recipe | None = recipe) -> float:
            with autocast(enabled=recipe is not None, recipe=recipe):
                loss = nn.cross_entropy(model(x), y)
            loss.backward()
            model.zero_grad()
            return loss.item()

        seconds[name] = median_seconds(step, rounds=5)
        losses[name] = step()
    gap = abs(losses["FP8"] / losses["float32"] - 1)
    check = f"losses differ by {gap:.2%}, bound 2%"
    return [
        Result("demo-cpu step, float32", seconds["float32"] * 1e3, "ms", gap < 0.02, check),
        Result("demo-cpu step, FP8", seconds["FP8"] * 1e3, "ms", gap < 0.02, check),
        Result("demo-cpu step, FP8 / float32", seconds["FP8"] / seconds["float32"], "ratio", gap < 0.02, check),
    ]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def _on(device: Device, host: np.ndarray[Any, Any]) -> ArrayView:
    return arrays.to(arrays.as_view(host), device)


def _layer(device: Device, name: str, sequence: int, batch: int, hidden: int, ffn: int, heads: int) -> Iterator[Result]:
    """Forward and backward of an eager TransformerLayer in bfloat16, plain and under FP8 with delayed scaling."""
    nn.manual_seed(0)
    layer = nn.TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=formats.bfloat16, device=device)
    host = [_random((sequence, batch, hidden), seed).astype(ml_dtypes.bfloat16) for seed in (3, 4)]
    x, dy = tensor(_on(device, host[0]), requires_grad=True), _on(device, host[1])
    recipe = DelayedScaling()
    outputs, gpu = {}, {}
    for kind in ("bfloat16", "FP8"):

        def step(fp8: bool = kind == "FP8") -> Any:
            with autocast(enabled=fp8, recipe=recipe):
                y = layer(x)
            y.backward(dy)
            layer.zero_grad()
            x.grad = None
            return y

        gpu[kind] = median_seconds(step, device, calls=10, warmups=5) * 1e3
        host_time = host_seconds(step, device) * 1e3
        outputs[kind] = step().numpy().astype(np.float64) - host[0].astype(np.float64)  # the branches, without the residual stream
        error = relative_error(outputs[kind], outputs["bfloat16"])
        check = f"relative error to bfloat16 {error:.4f}, bound {LAYER_ERROR}"
        yield Result(f"layer {name} fwd+bwd, {kind}, gpu", gpu[kind], "ms", error < LAYER_ERROR, check)
        yield Result(f"layer {name} fwd+bwd, {kind}, host", host_time, "ms", error < LAYER_ERROR, check)
    yield Result(f"layer {name} fwd+bwd, FP8 / bfloat16", gpu["FP8"] / gpu["bfloat16"], "ratio", error < LAYER_ERROR, check)


def _gemm(device: Device, rows: int, columns: int, depth: int) -> Result:
    """One FP8 product, E4M3 by E4M3 into bfloat16; a corner of it is checked against float64."""
    a, b = (quantize(_on(device, _random(shape, seed)), E4M3) for shape, seed in (((rows, depth), 5), ((columns, depth), 6)))
    codes = [arrays.as_view(operand.data) for operand in (a, b)]
    scales = [arrays.as_view(operand.scale_inv).reshape(1) for operand in (a, b)]
    kernels, stream = dispatch.kernels(device), arrays.current_stream(device)
    out = arrays.empty((rows, columns), formats.bfloat16, device)
    workspace = arrays.empty((kernels.fp8_gemm_workspace(rows, columns),), formats.uint8, device)

    def product() -> None:
        kernels.fp8_gemm(codes[0], codes[1], out, E4M3, E4M3, scales[0], scales[1], None, False, True, workspace, stream)

    seconds = median_seconds(product, device, calls=20, warmups=5)
    corner = [codec.decode(view.slice(0, 0, 64).numpy(), E4M3) * float(s.numpy()[0]) for view, s in zip(codes, scales, strict=True)]
    reference = corner[0].astype(np.float64) @ corner[1].astype(np.float64).T
    error = relative_error(out.slice(0, 0, 64).numpy()[:, :64], reference)
    limit = 2.0**-7  # bfloat16's rounding and the tensor cores' 14-bit sums
    rate = 2 * rows * columns * depth / seconds / 1e12
    check = f"relative error {error:.5f}, bound {limit:.5f}"
    return Result(f"fp8_gemm {rows} x {columns} x {depth}", rate, "TFLOP/s", error < limit, check)
