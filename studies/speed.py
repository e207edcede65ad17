"""Tokens a second of each case, alone on the device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.errors import Fp8kitError
from fp8kit.models.gpt import GPT
from fp8kit.models.presets import Preset
from studies import files
from studies.cases import CASES, Case
from studies.corpus import Text
from studies.training import Trainer, about, model_of

WARM = 5  # steps that compile, choose algorithms and record
STEPS = 20


def measure(
    folder: Path, size: Preset, corpus: Text, device: Device, names: Sequence[str], end: float
) -> bool:
    """Time ``STEPS`` steps of each case, and write ``speed.json`` after each; those that are there are
    skipped. Returns whether all are there. Nothing begins after ``end``.

    One process and one model for each arrangement: kernels are compiled, and algorithms chosen, without
    another run beside it."""
    path = folder / "speed.json"
    found = files.read(path) if path.exists() else {**about(device), "cases": {}}
    models: dict[str, GPT] = {}
    todo = [name for name in names if name not in found["cases"]]
    for name in todo:
        case = CASES[name]
        if time.monotonic() > end:
            print(f"speed: no time for {name} and what follows; call again")
            return False
        if case.arrangement not in models:
            models.clear()
            gc.collect()
            models[case.arrangement] = model_of(case, size, device, 0)
        found["cases"][name] = _case(case, size, corpus, models[case.arrangement])
        files.write(path, found)
        own = found["cases"][name]
        print(f"{name}: {own['milliseconds']:.2f} ms, {own['tokens_per_second']:,.0f} tokens/s", flush=True)
    return True


def _case(case: Case, size: Preset, corpus: Text, model: GPT) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        times, recorded = _times(case, size, corpus, model, model.device.kind != "cpu")
    except Fp8kitError:
        if model.device.kind == "cpu":
            raise
        times, recorded = _times(case, size, corpus, model, False)
    gc.collect()
    milliseconds = 1000 * statistics.median(times)
    return {
        "milliseconds": milliseconds,
        "tokens_per_second": 1000 * size.tokens / milliseconds,
        "recorded": recorded,
        "seconds": time.perf_counter() - start,
    }


def _times(case: Case, size: Preset, corpus: Text, model: GPT, recorded: bool) -> tuple[list[float], bool]:
    """Seconds of steps, each waited for."""
    trainer = Trainer(model, size, case.recipe(size.layers), case.states, recorded)
    times = []
    for number in range(WARM + STEPS):
        arrays.synchronize(model.device)
        start = time.perf_counter()
        trainer.step(corpus.train, 0, number)
        arrays.synchronize(model.device)
        times.append(time.perf_counter() - start)
    return times[WARM:], recorded
