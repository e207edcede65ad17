"""The planted channel where nothing can do without the layer: a SwiGLU layer that learns another one.

The student begins as the teacher with noise on its weights, all but those of channel 0, which is planted in
both (``studies.stress``): the teacher has it fully grown; the student's grows from a quarter of the steps on.
Loss: mean((y - t)^2) / mean(t^2), its mean over the last tenth of the steps.
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit import nn, optim
from fp8kit.arrays import Device
from studies import files
from studies.cases import ARRANGEMENTS, CASES, of_study
from studies.stress import MOST, Growth
from studies.training import about

SEEDS, STEPS, ROWS, HIDDEN, CHANNELS = 3, 400, 64, 64, 256
RATE, GROWTH, NOISE = 2e-3, 1.05, 0.5


def measure(folder: Path, device: Device, names: list[str], end: float) -> bool:
    """Train a student of each case from every seed, a file each case in ``folder/layer``; those that are
    there are skipped. Returns whether all are there; nothing begins after ``end``."""
    for name in names:
        path = folder / "layer" / f"{name}.json"
        if path.exists():
            continue
        if time.monotonic() > end:
            print(f"layer: no time for {name} and what follows; call again")
            return False
        curves = [fit(name, seed, device) for seed in range(SEEDS)]
        files.write(path, {**about(device), "case": name, "steps": STEPS, "curves": curves})
        print(f"{name}: {statistics.fmean(map(final, curves)):.3g}", flush=True)
    return True


def final(curve: list[float]) -> float:
    """The loss at the end."""
    return statistics.fmean(curve[-max(1, len(curve) // 10) :])


def fit(name: str, seed: int, device: Device) -> list[float]:
    """A student's losses, step by step; up to the first that is not finite."""
    case, random = CASES[name], np.random.default_rng(seed)
    recipe = case.recipe(1)
    by = ARRANGEMENTS[case.arrangement].layer.get("smooth_swiglu")
    options: dict[str, Any] = {"activation": "swiglu", "bias": False, "input_layernorm": False}
    layers = [
        nn.LayerNormMLP(HIDDEN, CHANNELS, **options, smooth_swiglu=how, device=device) for how in (None, by)
    ]
    first = random.standard_normal((2 * CHANNELS, HIDDEN)).astype(np.float32) / HIDDEN**0.5
    second = random.standard_normal((HIDDEN, CHANNELS)).astype(np.float32) / CHANNELS**0.5
    first[CHANNELS] = first[0]
    noises = [NOISE * random.standard_normal(w.shape).astype(np.float32) * w.std() for w in (first, second)]
    noises[0][[0, CHANNELS]] = 0
    noises[1][:, 0] = 0
    teacher, student = layers
    teacher.load_state_dict({"fc1_weight": first, "fc2_weight": second})
    student.load_state_dict({"fc1_weight": first + noises[0], "fc2_weight": second + noises[1]})
    _growth(teacher, math.inf, 0).apply(1)
    growth = _growth(student, GROWTH, STEPS // 4)
    optimizer = optim.AdamW(student.parameters(), lr=RATE, weight_decay=0.0)
    losses: list[float] = []
    for step in range(STEPS):
        growth.apply(step)
        optimizer.lr = optim.warmup_cosine(step, RATE, 0, STEPS, RATE / 10)
        x = fk.tensor(random.standard_normal((ROWS, HIDDEN)).astype(np.float32), device=device)
        with fk.no_grad():
            wanted = teacher(x).numpy()
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = student(x)
        off = y.numpy() - wanted
        loss = float(np.mean(off.astype(np.float64) ** 2) / np.mean(wanted.astype(np.float64) ** 2))
        if not math.isfinite(loss):
            break
        losses.append(loss)
        y.backward(off / ROWS)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _growth(layer: Any, growth: float, first: int) -> Growth:
    model: Any = SimpleNamespace(layers=[SimpleNamespace(layernorm_mlp=layer)])
    return Growth(model, min(growth, MOST), first)


COLUMNS = ("case", "what", "loss", "spread", "of float32's")


def rows(folder: Path) -> list[tuple[str, ...]]:
    """The table's rows: mean loss over the seeds, its spread, and how many times high precision's it is."""
    found: dict[str, list[float]] = {}
    for name in of_study("stress"):
        path = folder / "layer" / f"{name}.json"
        if path.exists():
            found[name] = [final(curve) for curve in files.read(path)["curves"] if curve]
    base = found.get("stress_float32")
    lines = []
    for name, losses in found.items():
        mean = statistics.fmean(losses)
        times = "" if not base else f"{mean / statistics.fmean(base):.2f}"
        spread = f"{statistics.stdev(losses):.2g}" if len(losses) > 1 else ""
        lines.append((f"`{name}`", CASES[name].about, f"{mean:.4g}", spread, times))
    return lines
