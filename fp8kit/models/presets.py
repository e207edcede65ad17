"""The sizes that can be trained by name: one table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fp8kit.arguments import choice


@dataclass(frozen=True)
class Preset:
    """A byte-level GPT and how to train it.

    * ``layers``, ``hidden``, ``heads``, ``context``: the model; the feed-forward width is ``4 * hidden``;
      ``context`` in bytes.
    * ``sequences``: sequences of ``context`` bytes in a microbatch; ``accumulate``: microbatches in a step.
    * ``steps``, ``warmup``: optimiser steps; ``learning_rate`` is the peak of a linear warm-up and a cosine
      down to a tenth of it.
    * ``weight_decay``: on matrices only; ``clip``: largest norm of all gradients.
    * ``amax_history``: rows of the delayed-scaling history, at least 2 (the newest is what the statistics
      show).
    * ``statistics_every``: steps between two readings of amax and scale.
    * ``validation_batches``: microbatches of validation text that the final losses are the mean of.
    * ``judged``: whether its own steps teach it enough for the demo's bounds.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    context: int
    sequences: int
    steps: int
    warmup: int
    learning_rate: float
    accumulate: int = 1
    weight_decay: float = 0.1
    clip: float = 1.0
    amax_history: int = 16
    statistics_every: int = 5
    validation_batches: int = 8
    # the demo's; a training is the same with it and without
    judged: bool = field(default=True, compare=False)

    @property
    def tokens(self) -> int:
        """Bytes that one optimiser step trains on."""
        return self.context * self.sequences * self.accumulate

    def with_steps(self, steps: int) -> Preset:
        """Returns the same for another number of optimiser steps, at most a tenth of them warm-up."""
        if steps == self.steps:
            return self
        return replace(self, steps=steps, warmup=min(self.warmup, max(1, steps // 10)))


PRESETS = {
    preset.name: preset
    for preset in (
        #       name         layers hidden heads context sequences steps warmup learning rate
        Preset(
            "tiny",
            2,
            32,
            2,
            32,
            4,
            6,
            2,
            3e-3,
            accumulate=2,
            statistics_every=2,
            validation_batches=2,
            judged=False,
        ),
        Preset("demo-cpu", 4, 128, 4, 128, 16, 400, 40, 2e-3, validation_batches=16),
        Preset("demo-gpu", 8, 512, 8, 512, 32, 300, 30, 1e-3, statistics_every=10),
        Preset("gpt2-small", 12, 768, 12, 1024, 16, 500, 50, 6e-4, statistics_every=10),
    )
}


def preset(name: str) -> Preset:
    """Returns the preset of that name; ArgumentError that lists them where there is none."""
    return PRESETS[choice("preset", "name", name, PRESETS)]
