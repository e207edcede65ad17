"""The demo: one model trained twice on the machine's own text, in high precision and in FP8, compared and
judged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from fp8kit import serialization
from fp8kit.arrays import Device
from fp8kit.models import plots, text
from fp8kit.models.gpt import generate, parameter_count
from fp8kit.models.presets import Preset
from fp8kit.models.progress import duration
from fp8kit.models.resume import Run
from fp8kit.models.train import fp8_recipe, high_precision, train, write_losses, write_statistics

LEARNED = 0.7  # nats/byte that both runs must end below the unigram entropy
GAP = 0.02  # largest relative difference of the two validation losses
PROMPT = b"def "
SAMPLE_BYTES = 400
SHOWN_BYTES = 100  # of the sample, on the screen
RESULTS = ("loss.csv", "loss.png", "scales.csv", "scales.png", "fp8.safetensors", "sample.txt")


@dataclass(frozen=True)
class Verdict:
    """What the demo found: validation losses and the yardstick in nats/byte, and a sentence for each bound
    that failed. ``judged``: whether there are bounds, see ``Preset``."""

    high_precision: float
    fp8: float
    unigram: float
    judged: bool = True

    @property
    def gap(self) -> float:
        """(FP8 - high precision) / high precision."""
        return (self.fp8 - self.high_precision) / self.high_precision

    @property
    def failures(self) -> list[str]:
        """Bounds that do not hold; empty when all do, or there are none. A NaN fails."""
        if not self.judged:
            return []
        bound, losses = self.unigram - LEARNED, {"high-precision": self.high_precision, "FP8": self.fp8}
        failed = [
            f"the {name} loss {loss:.4f} is not below {bound:.4f} nats/byte (unigram entropy less {LEARNED})"
            for name, loss in losses.items()
            if not loss <= bound
        ]
        if not abs(self.gap) <= GAP:
            failed.append(f"the FP8 loss differs by {self.gap:+.2%} from high precision, more than {GAP:.0%}")
        return failed


def run_demo(
    preset: Preset,
    out: Path,
    device: Device,
    steps: int | None = None,
    seed: int = 0,
    stream: TextIO | None = None,
) -> Verdict:
    """Train twice, write the results under ``out`` and return the verdict.

    ``steps`` replaces the preset's number (the warm-up shrinks with it). Written: ``loss.csv``, ``loss.png``,
    ``scales.csv``, ``scales.png``, ``fp8.safetensors`` (the FP8 model with its scaling state) and
    ``sample.txt``. Raises BackendError before any training where matplotlib is missing, Fp8kitError where
    there is no text or a loss is not finite.
    """
    plots.figure()
    if steps is not None:
        preset = preset.with_steps(steps)
    corpus = text.standard_library()
    out.mkdir(parents=True, exist_ok=True)
    label = high_precision(device).name
    print(
        f"{preset.name} on {device}: {label}, then FP8, {preset.steps} steps of {preset.tokens:,} "
        f"tokens (bytes)\n{corpus}",
        flush=True,
    )
    recipes = {label: None, "FP8": fp8_recipe(preset)}
    runs = [train(preset, corpus, recipe, name, device, seed, stream) for name, recipe in recipes.items()]
    high, fp8 = (run.validation_loss for run in runs)
    verdict = Verdict(high, fp8, corpus.unigram_entropy(), preset.judged)
    _write(out, runs, verdict, preset, seed)
    print(report(preset, device, runs, verdict, corpus))
    return verdict


def _write(out: Path, runs: list[Run], verdict: Verdict, preset: Preset, seed: int) -> None:
    curves, fp8 = {run.label: run.losses for run in runs}, runs[1]
    write_losses(out / "loss.csv", curves)
    plots.plot_losses(out / "loss.png", curves, verdict.unigram)
    write_statistics(out / "scales.csv", fp8.statistics)
    plots.plot_statistics(out / "scales.png", fp8.statistics)
    metadata = {
        "preset": preset.name,
        "steps": str(preset.steps),
        "validation_loss": f"{fp8.validation_loss:.6f}",
    }
    serialization.save(out / "fp8.safetensors", fp8.model, metadata)
    print(f"the FP8 model writes {SAMPLE_BYTES} bytes, for sample.txt", flush=True)
    sample = PROMPT + generate(fp8.model, PROMPT, SAMPLE_BYTES, fp8.recipe, seed=seed)
    (out / "sample.txt").write_bytes(sample)
    print(f"it begins: {sample[:SHOWN_BYTES].decode(errors='replace')!r}", flush=True)


def report(preset: Preset, device: Device, runs: list[Run], verdict: Verdict, corpus: text.Corpus) -> str:
    """Returns the table that the demo prints."""
    lines = [
        "",
        (
            f"{preset.name} on {device}: {parameter_count(runs[0].model):,} parameters, "
            f"{preset.steps} steps of {preset.tokens:,} tokens"
        ),
        str(corpus),
        "",
        f"{'':18}{'validation loss':>16}{'perplexity/byte':>17}{'time':>8}{'tokens/s':>12}",
    ]
    for run in runs:
        loss, rate = run.validation_loss, preset.tokens * preset.steps / run.seconds
        speed = f"{duration(run.seconds):>8}{rate:12,.0f}"
        lines.append(f"{run.label:18}{loss:16.4f}{math.exp(loss):17.3f}{speed}")
    bounds = f"   (bound: {GAP:.0%} either way)", f"   (bound: both losses at least {LEARNED} below it)"
    gap, entropy = bounds if verdict.judged else ("", "")
    lines += [
        f"{'gap':18}{verdict.gap:>+16.2%}{gap}",
        f"{'unigram entropy':18}{verdict.unigram:16.4f}{entropy}",
    ]
    if device.kind == "cpu":
        lines += ["", "a CPU has no FP8 arithmetic: FP8 is emulated here, and takes longer than float32"]
    if not verdict.judged:
        why = "it shows that everything runs, not that it learns"
        lines += ["", f"{preset.name} is too short to be judged: {why}"]
    return "\n".join(lines)
