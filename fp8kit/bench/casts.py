"""On the CPU: the reference engine's casts beside ml_dtypes', and a training step of the demo's model, FP8
beside float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from fp8kit import formats, nn
from fp8kit.arrays import CPU
from fp8kit.bench import random
from fp8kit.bench.contest import row_of, within_time
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.timing import Step, WallClock, interleaved, medians
from fp8kit.float8 import quantize
from fp8kit.formats import E4M3, E5M2, Format
from fp8kit.models.gpt import GPT
from fp8kit.models.presets import PRESETS
from fp8kit.models.train import fp8_recipe, loss_of
from fp8kit.recipe import Recipe

LOSSES = 0.02  # by how much the losses of a first step may differ


def casts_part(setting: Setting) -> list[Row]:
    """``value`` in 10^9 elements a second; the codes and values must be ml_dtypes'."""
    x = random.normal(setting.sizes.cast, 1)

    def title(fmt: Format) -> str:
        return f"casts on the CPU, {fmt}, {x.shape[0]} x {x.shape[1]}"

    return within_time(
        setting, (E4M3, E5M2), lambda fmt: _casts(title(fmt), fmt, x), lambda fmt: row_of(title(fmt), "all")
    )


def _casts(title: str, fmt: Format, x: random.HostArray) -> list[Row]:
    scale, kind = np.ones(1, np.float32), formats.dtype_of_format(fmt)
    assert kind is not None
    theirs, ours = x.astype(kind.numpy), quantize(x, fmt, scale=scale)
    same = np.array_equal(ours.data, theirs.view(np.uint8)) and np.array_equal(
        ours.dequantize(), theirs.astype(np.float32)
    )
    status = "ok" if same else "WRONG: not ml_dtypes' codes or values"
    steps: dict[str, Step] = {
        "quantize, reference": partial(quantize, x, fmt, scale=scale),
        "quantize, ml_dtypes": partial(x.astype, kind.numpy),
        "dequantize, reference": ours.dequantize,
        "dequantize, ml_dtypes": partial(theirs.astype, np.float32),
    }
    rows = []
    for case, seconds in medians(interleaved(steps, WallClock(), 7, 1)).items():
        row = row_of(title, case, value=x.size / seconds / 1e9, unit="Gelem/s", check="")
        if "reference" in case:
            row |= {"status": status, "check": "ml_dtypes' bits" if same else ""}
        rows.append(row)
    return rows


def training_part(setting: Setting) -> list[Row]:
    """Forward and backward of the demo's model on the CPU; the losses must agree."""
    size = PRESETS[setting.sizes.preset]
    ids = np.random.Generator(np.random.Philox(2)).integers(0, 256, (size.sequences, size.context + 1))
    batch = [np.ascontiguousarray(part) for part in (ids[:, :-1], ids[:, 1:])]

    def step(model: GPT, recipe: Recipe | None) -> float:
        loss = loss_of(model, batch, recipe)
        loss.backward()
        model.zero_grad()
        return loss.item()

    steps: dict[str, Callable[[], float]] = {}
    for name, recipe in (("float32", None), ("FP8", fp8_recipe(size))):
        nn.manual_seed(0)
        steps[name] = partial(step, GPT(size, formats.float32, CPU), recipe)
    times = medians(interleaved(steps, WallClock(), 5, 1))
    gap = abs(steps["FP8"]() / steps["float32"]() - 1)
    status = "ok" if gap < LOSSES else f"WRONG: the losses differ by {gap:.2%}"
    said = {"float32": "", "FP8": f"loss off float32's by {gap:.1e}"}
    row = partial(row_of, f"{size.name} step on the CPU, forward and backward", status=status, unit="ms")
    return [
        row(case=name, value=seconds * 1e3, ratio=seconds / times["float32"], check=said[name])
        for name, seconds in times.items()
    ]
