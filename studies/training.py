"""One training of a case: a step, recorded as a CUDA graph where there is a GPU, and the whole run."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit import arrays, formats, nn, optim
from fp8kit.arrays import Device
from fp8kit.autograd import Tensor, no_grad, tensor
from fp8kit.bench.report import machine, versions
from fp8kit.errors import Fp8kitError
from fp8kit.models import text
from fp8kit.models.gpt import GPT, parameter_count, precision
from fp8kit.models.presets import Preset
from fp8kit.models.train import VALIDATION_SEED, high_precision, loss_of
from fp8kit.recipe import Recipe
from studies.cases import ARRANGEMENTS, Case
from studies.corpus import Text
from studies.stress import Growth

READ_EVERY = 25  # steps between two readings of losses: reading waits for the device
BETAS = (0.9, 0.95)
NO_CLIP = 1e9
Say = Callable[[str], None]


def model_of(case: Case, size: Preset, device: Device, seed: int) -> GPT:
    """A fresh model with the seed's weights, its layers named."""
    nn.manual_seed(seed)
    dtype = formats.float32 if case.float32 else high_precision(device)
    model = GPT(size, dtype, device, ARRANGEMENTS[case.arrangement])
    return nn.name_layers(model)  # type: ignore[no-any-return]


class Trainer:
    """A model, its optimiser, and steps of training.

    ``recorded``: after two steps a step is recorded as a CUDA graph and replayed from then on: the same bits,
    without the host's time.
    """

    def __init__(
        self, model: GPT, size: Preset, recipe: Recipe | None, states: str = "fp32", recorded: bool = False
    ) -> None:
        self.model, self.size, self.recipe, self.recorded = model, size, recipe, recorded
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self.parameters if len(p.shape) > 1]
        vectors = [p for p in self.parameters if len(p.shape) == 1]
        device = model.device
        # on the device, where a recorded step reads it
        self.rate = arrays.to(arrays.as_view(np.zeros(1, np.float32)), device)
        groups = [
            {"params": matrices, "weight_decay": size.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = optim.AdamW(groups, lr=self.rate, betas=BETAS, states=states)
        self.one = tensor(np.ones(1, np.float32), device=device)
        self.call: Any = fk.graph(self._step) if recorded else self._step

    def _step(self, ids: Tensor, targets: Tensor) -> Tensor:
        with precision(self.recipe):
            loss = nn.cross_entropy(self.model(ids), targets)
        loss.backward(self.one.view)
        optim.clip_grad_norm_(self.parameters, self.size.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self, corpus: text.Bytes, seed: int, number: int) -> Tensor:
        """Step ``number`` on the seed's batch; returns the loss in nats a byte, float32 (1,), not yet
        read."""
        size, device = self.size, self.model.device
        rate = optim.warmup_cosine(
            number, size.learning_rate, size.warmup, size.steps, size.learning_rate / 10
        )
        arrays.copy(self.rate, arrays.as_view(np.full(1, rate, np.float32)))
        batch = text.batch(corpus, size.sequences, size.context, seed, number)
        ids, targets = (tensor(part, device=device) for part in batch)
        return self.call(ids, targets)  # type: ignore[no-any-return]


def validation_loss(model: GPT, size: Preset, corpus: text.Bytes, recipe: Recipe | None) -> float:
    """Mean loss in nats a byte over the size's validation batches, the same in all runs, in the recipe's
    precision; NaN where one is not finite."""
    losses = []
    for i in range(size.validation_batches):
        batch = text.batch(corpus, size.sequences, size.context, VALIDATION_SEED, i)
        with no_grad():
            losses.append(loss_of(model, batch, recipe).item())
    return sum(losses) / len(losses)


def about(device: Device) -> dict[str, Any]:
    """Machine and versions, for a file of results."""
    return {"machine": machine(device), "device": str(device), "python": platform.python_version()} | {
        "versions": versions()
    }


def settings_of(case: Case, size: Preset, seed: int) -> dict[str, Any]:
    """What a run is made of, as JSON has it."""
    recipe = case.recipe(size.layers)
    return {
        "case": case.name,
        "recipe": None if recipe is None else recipe.short_name(),
        "arrangement": case.arrangement,
        "float32": case.float32,
        "growth": case.growth,
        "states": case.states,
        "seed": seed,
        "size": asdict(size),
    }


def run(
    case: Case, size: Preset, corpus: Text, device: Device, seed: int, say: Say = print
) -> dict[str, Any]:
    """Train a case from a seed; what its file holds.

    On a GPU steps are recorded; where they cannot be, the run begins again without, and ``recorded`` says so.
    A loss that is not finite ends the run: ``diverged`` is its step, and there is no validation loss.
    Deterministic: the same machine and versions give the same losses again.
    """
    start = time.perf_counter()
    with fk.deterministic():
        try:
            found = _trained(case, size, corpus, device, seed, device.kind != "cpu", say)
        except Fp8kitError as error:
            if device.kind == "cpu":
                raise
            say(f"steps cannot be recorded ({error}); the run begins again without")
            found = _trained(case, size, corpus, device, seed, False, say)
    known = {"settings": settings_of(case, size, seed), "corpus": corpus.digest, **about(device)}
    return {**known, **found, "seconds": time.perf_counter() - start}


def _trained(
    case: Case, size: Preset, corpus: Text, device: Device, seed: int, recorded: bool, say: Say
) -> dict[str, Any]:
    recipe = case.recipe(size.layers)
    model = model_of(case, size, device, seed)
    growing = case.growth != 1
    # the gradients of channels that are held grow with them, and would decide the norm of all
    size = replace(size, clip=NO_CLIP) if growing else size
    trainer = Trainer(model, size, recipe, case.states, recorded)
    losses: list[float] = []
    waiting: list[Tensor] = []
    growth = Growth(model, case.growth, size.steps // 3) if growing else None
    parent, start, diverged = os.getppid(), 0.0, None
    for number in range(size.steps):
        if growth is not None:
            growth.apply(number)
        waiting.append(trainer.step(corpus.train, seed, number))
        if number == 0 or len(waiting) == READ_EVERY or number == size.steps - 1:
            losses += [loss.item() for loss in waiting]
            waiting = []
            bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
            start = start or time.perf_counter()
            say(f"{case.name} seed {seed}: step {number + 1} of {size.steps}, loss {losses[-1]:.4f}")
            if bad:
                diverged = bad[0] + 1
                losses = losses[: bad[0]]
                break
            if os.getppid() != parent:
                sys.exit("the command that started this run is gone")
    seconds = time.perf_counter() - start
    final = None
    if diverged is None:
        value = validation_loss(model, size, corpus.validation, recipe)
        final = value if math.isfinite(value) else None
    return {
        "parameters": parameter_count(model),
        "recorded": recorded,
        "losses": losses,
        "validation_loss": final,
        "diverged": diverged,
        "training_seconds": seconds,
    }
