"""On the CPU: the reference engine's casts beside ml_dtypes', and a training step of the demo's model, FP8
beside float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from fp8kit import formats, nn
from fp8kit.arrays import CPU
from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.bench import random
from fp8kit.bench.report import NO_TIME, Row, Setting
from fp8kit.bench.timing import WallClock, interleaved, medians
from fp8kit.float8 import quantize
from fp8kit.formats import E4M3, E5M2
from fp8kit.models.gpt import GPT
from fp8kit.models.presets import PRESETS
from fp8kit.models.train import fp8_recipe
from fp8kit.recipe import Recipe

LOSSES = 0.02  # by how much the losses of a first step may differ


def casts_part(setting: Setting) -> list[Row]:
    """``value`` in 10^9 elements a second; the codes and values must be ml_dtypes'."""
    x = random.normal(setting.sizes.cast, 1)
    scale = np.ones(1, np.float32)
    rows: list[Row] = []
    for fmt in (E4M3, E5M2):
        title = f"casts on the CPU, {fmt}, {x.shape[0]} x {x.shape[1]}"
        if setting.left() <= 0:
            rows.append({"workload": title, "case": "all", "status": NO_TIME})
            continue
        kind = formats.dtype_of_format(fmt)
        assert kind is not None
        theirs = x.astype(kind.numpy)
        ours = quantize(x, fmt, scale=scale)
        same = np.array_equal(ours.data, theirs.view(np.uint8)) and np.array_equal(
            ours.dequantize(), theirs.astype(np.float32)
        )
        steps: dict[str, Callable[[], Any]] = {
            "quantize, reference": functools.partial(quantize, x, fmt, scale=scale),
            "quantize, ml_dtypes": functools.partial(x.astype, kind.numpy),
            "dequantize, reference": ours.dequantize,
            "dequantize, ml_dtypes": functools.partial(theirs.astype, np.float32),
        }
        for case, seconds in medians(interleaved(steps, WallClock(), 7, 1)).items():
            status = "ok" if same or "ml_dtypes" in case else "WRONG: not ml_dtypes' codes or values"
            rows.append(
                {
                    "workload": title,
                    "case": case,
                    "status": status,
                    "value": x.size / seconds / 1e9,
                    "unit": "Gelem/s",
                    "check": "ml_dtypes' bits" if same and "ml_dtypes" not in case else "",
                }
            )
    return rows


def training_part(setting: Setting) -> list[Row]:
    """Forward and backward of the demo's model on the CPU; the losses must agree."""
    size = PRESETS[setting.sizes.preset]
    ids = np.random.Generator(np.random.Philox(2)).integers(0, 256, (size.sequences, size.context + 1))
    x, y = tensor(np.ascontiguousarray(ids[:, :-1])), tensor(np.ascontiguousarray(ids[:, 1:]))
    steps: dict[str, Callable[[], float]] = {}
    for name, recipe in (("float32", None), ("FP8", fp8_recipe(size))):
        nn.manual_seed(0)
        model = GPT(size, formats.float32, CPU)

        def step(model: GPT = model, recipe: Recipe | None = recipe) -> float:
            with autocast(enabled=recipe is not None, recipe=recipe):
                loss = nn.cross_entropy(model(x), y)
            loss.backward()
            model.zero_grad()
            return loss.item()

        steps[name] = step
    times = medians(interleaved(steps, WallClock(), 5, 1))
    gap = abs(steps["FP8"]() / steps["float32"]() - 1)
    status = "ok" if gap < LOSSES else f"WRONG: the losses differ by {gap:.2%}"
    title = f"{size.name} step on the CPU, forward and backward"
    said = {"float32": "", "FP8": f"loss off float32's by {gap:.1e}"}
    return [
        {
            "workload": title,
            "case": name,
            "status": status,
            "value": seconds * 1e3,
            "unit": "ms",
            "ratio": seconds / times["float32"],
            "check": said[name],
        }
        for name, seconds in times.items()
    ]
