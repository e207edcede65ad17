"""A training's whole state in one file, so that a run which was killed at any moment continues, with the same
bits where engine, libraries, number of threads and deterministic kernels are the same.

The file holds the model with its FP8 state, the optimiser (masters, moments, step counts, hyperparameters),
the random state, and what the run has seen so far: its losses, whose number is the position in the data and
in the schedule, and its statistics. Batches depend on seed and position alone, so that no reader has a state.
The header says what is being trained; a file of another training is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays, nn, serialization
from fp8kit.arrays import Device
from fp8kit.errors import CheckpointError
from fp8kit.models.gpt import GPT
from fp8kit.models.presets import Preset
from fp8kit.models.text import Corpus
from fp8kit.optim import Optimizer, ShardedOptimizer
from fp8kit.recipe import Recipe

KIND = "training 1"  # of the file: its name and the version of its layout


class Statistic(NamedTuple):
    """What delayed scaling knew of one tensor after ``step``: its last ``amax`` and the ``scale`` of the next
    step.

    ``layer`` is the module's path with the GEMM's prefix, ``tensor`` is "input", "weight" or "grad_output".
    """

    step: int
    layer: str
    tensor: str
    amax: float
    scale: float


@dataclass
class Run:
    """A finished training. ``losses``: nats/byte of each step; ``validation_loss``: nats/byte; ``seconds`` of
    all steps that this process took, the first and its compilation included; ``statistics``: readings of the
    FP8 state, none in high precision."""

    label: str
    model: GPT
    recipe: Recipe | None
    losses: list[float] = field(default_factory=list)
    validation_loss: float = math.nan
    seconds: float = 0.0
    statistics: list[Statistic] = field(default_factory=list)


def identity(
    preset: Preset, corpus: Corpus, recipe: Recipe | None, label: str, device: Device, seed: int
) -> dict[str, str]:
    """Returns what a training is, as strings by name: model, data, recipe, kind of device, seed. It is what a
    file is checked for, not all that bits depend on: number of threads, deterministic kernels, engine and
    versions of libraries are the user's to keep the same."""
    digest = hashlib.sha256(corpus.train.tobytes() + b"|" + corpus.validation.tobytes()).hexdigest()
    compared = (each.name for each in dataclasses.fields(preset) if each.compare)
    said = {f"preset.{name}": repr(getattr(preset, name)) for name in compared}
    return said | {
        "label": label,
        "recipe": repr(recipe),
        "device": device.kind,
        "seed": str(seed),
        "corpus": digest,
    }


# part of an identity -> what its user calls it
_CALLED = {"preset.name": "preset", "preset.steps": "steps", "label": "precision", "corpus": "text"}


def differences(kept: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Returns where the identity of a file is not that of the training, in a user's words. What only follows
    from another difference is left out: a preset's fields from its name, its warm-up from the number of
    steps, the recipe from both."""
    names = [name for name, value in wanted.items() if kept.get(name) != value]
    follows = {"preset.warmup"} if "preset.steps" in names else set()
    if "preset.name" in names:
        follows |= {name for name in names if name.startswith("preset.")} - {"preset.name"}
    if {"preset.name", "label"} & set(names):
        follows.add("recipe")

    def one(name: str) -> str:
        there, here = kept.get(name, "none").strip("'"), wanted[name].strip("'")
        if name == "corpus":
            there, here = "another", "this"
        return f"{_CALLED.get(name, name)}: {there} in the file, {here} here"

    return [one(name) for name in names if name not in follows]


class Checkpoint:
    """The file ``path`` of the training ``run`` with its ``optimizer`` and ``identity``. ``writes``: whether
    this process is the one that writes it; of several processes all call ``save``."""

    def __init__(
        self,
        path: Path,
        run: Run,
        optimizer: Optimizer | ShardedOptimizer,
        identity: Mapping[str, str],
        writes: bool = True,
    ) -> None:
        self.path, self.writes = path, writes
        self.identity = {"fp8kit": KIND, **identity}
        self.bundle = serialization.Bundle(
            model=run.model, optimizer=optimizer, random=nn.RandomState(), seen=_Seen(run)
        )

    def save(self) -> None:
        """Write the state as it is now; the file's former contents stay until the new ones are whole on the
        disk."""
        if self.writes:
            serialization.save(self.path, self.bundle, self.identity)
        else:
            self.bundle.state_dict()  # its parts, which the ranks gather

    def load(self) -> None:
        """Take over the file's state. CheckpointError that names what is wrong, with nothing changed, for a
        file that is missing, no safetensors file, truncated, of another kind or training, or whose arrays do
        not fit."""
        serialization.sweep(self.path)
        state, said = serialization.read(self.path)
        kind = said.get("fp8kit")
        if kind != KIND:
            got = "a file that holds no training" if kind is None else f"a file of kind {kind!r}"
            raise CheckpointError("resume", str(self.path), got, f"one of kind {KIND!r}")
        if unlike := differences(said, self.identity):
            cure = "the same options continue it, another folder starts anew"
            if any(name.startswith("steps:") for name in unlike):
                why = "the learning rate follows the number of steps"
                cure += f"; {why}, so that a training cannot be made longer"
            where = f"resume: {self.path} is of another training"
            raise CheckpointError(f"{where}: {'; '.join(unlike[:8])}; {cure}")
        try:
            self.bundle.load_state_dict(state)
        except CheckpointError as error:
            raise CheckpointError(f"resume: {self.path}: {error}") from error


class _Seen(serialization.Loadable):
    """A run's losses and statistics as arrays."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        """``losses`` float64 (steps,), ``statistics``: JSON rows as uint8."""
        text = json.dumps(self.run.statistics).encode()
        return {"losses": np.array(self.run.losses, np.float64), "statistics": np.frombuffer(text, np.uint8)}

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Callable[[], None]:
        host = {name: arrays.as_view(array).numpy() for name, array in state.items()}
        wanted = {"losses": (np.float64, 1), "statistics": (np.uint8, 1)}
        if {name: (array.dtype.type, array.ndim) for name, array in host.items()} != wanted:
            got = {name: f"{array.dtype} {array.shape}" for name, array in host.items()}
            raise CheckpointError("load", "losses, statistics", got, "float64 (steps,) and uint8 (bytes,)")
        try:
            statistics = [Statistic(*row) for row in json.loads(host["statistics"].tobytes())]
        except (ValueError, TypeError) as error:
            raise CheckpointError("load", "statistics", "no JSON rows", f"what was saved ({error})") from None

        def take() -> None:
            self.run.losses, self.run.statistics = host["losses"].tolist(), statistics

        return take
