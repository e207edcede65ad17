"""The training loop: the same steps in high precision and in FP8."""

from __future__ import annotations

import csv
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fp8kit import arrays, distributed, formats, nn, optim
from fp8kit.arrays import Device
from fp8kit.autograd import Tensor, no_grad, tensor
from fp8kit.collectives import Collectives
from fp8kit.collectives import share as share_of
from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.formats import DType
from fp8kit.models import text
from fp8kit.models.gpt import GPT, precision
from fp8kit.models.presets import Preset
from fp8kit.models.progress import Progress
from fp8kit.models.resume import Checkpoint, Run, Statistic, identity
from fp8kit.models.text import Bytes, Corpus
from fp8kit.recipe import DelayedScaling, Recipe

VALIDATION_SEED = 1 << 32  # training seeds are below it
FIRST = "first step: compiles or loads kernels"  # seconds, before there is a loss to show
DRAIN = 10  # steps between two readings of losses from an accelerator: reading waits for it


def high_precision(device: Device) -> DType:
    """Returns the dtype that a device trains in beside FP8: float32 on the CPU, bfloat16 elsewhere."""
    return formats.float32 if device.kind == "cpu" else formats.bfloat16


def fp8_recipe(preset: Preset) -> DelayedScaling:
    """Returns the recipe of the FP8 run: HYBRID, delayed scaling, with the preset's history."""
    return DelayedScaling(amax_history_len=preset.amax_history)


def train(
    preset: Preset,
    corpus: Corpus,
    recipe: Recipe | None,
    label: str,
    device: Device,
    seed: int = 0,
    stream: TextIO | None = None,
    keep: Path | None = None,
    save_every: int = 0,
    resume: bool = False,
    ranks: Collectives | None = None,
) -> Run:
    """Train a fresh GPT of ``preset`` on ``corpus.train``, and measure it on ``corpus.validation``.

    ``recipe`` None is high precision (``high_precision(device)``), else FP8. ``seed``, below 2**32, decides
    weights and batches, so that runs that differ in the recipe alone start alike and see the same text.
    ``stream`` is where progress goes, None standard error.

    ``keep``: file that the whole state is written to after each ``save_every`` steps, and at the end.
    ``resume``: continue from that file, with the same bits as if the run had never stopped
    (``fk.deterministic`` on a GPU, the same thread count on a CPU). Raises Fp8kitError when the loss is no
    longer finite, CheckpointError for a file that is not of this very training; see ``Checkpoint``.

    ``ranks``: processes that share the work, each with its part of every batch's sequences and of the
    optimiser's state; the first writes files. Losses are one process's, but for the order of sums, and a file
    is continued by any number of processes. ArgumentError where they do not divide the sequences.
    """
    if not 0 <= seed < VALIDATION_SEED:
        raise ArgumentError("train", "seed", seed, f"an int in [0, {VALIDATION_SEED})")
    nn.manual_seed(seed)
    run = Run(label, GPT(preset, high_precision(device), device), recipe)
    parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    ranks = Collectives(0, 1) if ranks is None else ranks
    share_of(preset.sequences, ranks.size, "train", "preset.sequences")
    optimizer = _optimizer(parameters, preset, ranks)
    kept = None
    if keep is not None:
        said = identity(preset, corpus, recipe, label, device, seed)
        kept = Checkpoint(keep, run, optimizer, said, writes=ranks.rank == 0)
    if resume:
        if kept is None:
            raise Fp8kitError("train", "keep", None, "the file to resume from")
        kept.load()
        end = f"continues after step {len(run.losses)} of {preset.steps}"
        if len(run.losses) == preset.steps:
            end = "is complete: nothing is left to do"
        print(f"{label}: {end}", file=stream or sys.stderr)
    share = tensor(np.full(1, 1 / (preset.accumulate * ranks.size), np.float32), device=device)
    pending: list[list[Tensor]] = []
    start = time.perf_counter()
    with Progress(label, preset.steps, preset.tokens, "tokens", stream) as progress:
        if len(run.losses) < preset.steps:
            progress.begin(len(run.losses), FIRST)
        for step in range(len(run.losses), preset.steps):
            optimizer.lr = optim.warmup_cosine(
                step, preset.learning_rate, preset.warmup, preset.steps, preset.learning_rate / 10
            )
            done = step + 1
            numbers = range(step * preset.accumulate, done * preset.accumulate)
            pending.append(
                [_microbatch(run, preset, corpus.train, seed, number, share, ranks) for number in numbers]
            )
            if isinstance(optimizer, optim.AdamW):
                optim.clip_grad_norm_(parameters, preset.clip)
            else:
                optimizer.clip_grad_norm_(preset.clip)
            optimizer.step()
            optimizer.zero_grad()
            if recipe is not None and (done % preset.statistics_every == 0 or step == 0):
                run.statistics += read_statistics(run.model, done)
            last = done == preset.steps
            due = kept is not None and (last or (save_every > 0 and done % save_every == 0))
            if due or device.kind == "cpu" or done % DRAIN == 0 or step == 0 or last:
                _drain(run, pending, ranks.size)
                pending.clear()
                progress.update(done, loss=run.losses[-1])
            if due and kept is not None:
                kept.save()
    arrays.synchronize(device)
    run.seconds = time.perf_counter() - start
    run.validation_loss = validate(run.model, preset, corpus.validation, recipe, ranks)
    return run


def _optimizer(
    parameters: Sequence[Tensor], preset: Preset, ranks: Collectives
) -> optim.AdamW | optim.ShardedOptimizer:
    """Returns AdamW, which several ranks share; vectors do not decay."""
    groups = [
        {"params": [p for p in parameters if len(p.shape) > 1], "weight_decay": preset.weight_decay},
        {"params": [p for p in parameters if len(p.shape) == 1], "weight_decay": 0.0},
    ]
    how: dict[str, Any] = {"lr": preset.learning_rate, "betas": (0.9, 0.95)}
    if ranks.size == 1:
        return optim.AdamW(groups, **how)
    return optim.ShardedOptimizer(optim.AdamW, groups, ranks, average=False, **how)


def _rows(batch: Iterable[Any], ranks: Collectives) -> list[Any]:
    """Returns a rank's sequences of a batch."""
    return [np.ascontiguousarray(np.split(part, ranks.size)[ranks.rank]) for part in batch]


def _microbatch(
    run: Run, preset: Preset, corpus: Bytes, seed: int, number: int, share: Tensor, ranks: Collectives
) -> Tensor:
    """One forward and backward of the batch ``number``; returns the loss of all ranks' rows, summed over
    ranks, not yet read."""
    batch = _rows(text.batch(corpus, preset.sequences, preset.context, seed, number), ranks)
    # with several microbatches the weights are cast once a step
    several = run.recipe is not None and preset.accumulate > 1
    loss = loss_of(run.model, batch, run.recipe, number % preset.accumulate == 0 if several else None)
    loss.backward(share)
    return distributed.all_reduce(loss.detach(), ranks)


def loss_of(
    model: GPT, batch: Iterable[Any], recipe: Recipe | None, is_first_microbatch: bool | None = None
) -> Tensor:
    """Returns the mean loss in nats/byte of ids and targets, arrays on the host, in the precision of
    ``recipe``."""
    ids, targets = (tensor(part, device=model.device) for part in batch)
    with precision(recipe):
        return nn.cross_entropy(model(ids, is_first_microbatch=is_first_microbatch), targets)


def _drain(run: Run, pending: Sequence[Sequence[Tensor]], ranks: int) -> None:
    """Read the losses of steps that were queued, sums over ``ranks``; Fp8kitError at the first that is not
    finite."""
    for losses in pending:
        value = sum(loss.item() for loss in losses) / (len(losses) * ranks)
        run.losses.append(value)
        if not math.isfinite(value):
            what = f"loss of step {len(run.losses)} ({run.label})"
            raise Fp8kitError("train", what, value, "a finite number")


def validate(
    model: GPT, preset: Preset, validation: Bytes, recipe: Recipe | None, ranks: Collectives | None = None
) -> float:
    """Mean loss in nats/byte over the preset's validation batches, the same ones in every run, in the
    precision of ``recipe``; ``ranks`` share each batch's sequences."""
    total, ranks = 0.0, Collectives(0, 1) if ranks is None else ranks
    for i in range(preset.validation_batches):
        batch = text.batch(validation, preset.sequences, preset.context, VALIDATION_SEED, i)
        with no_grad():
            loss = loss_of(model, _rows(batch, ranks), recipe)
            total += distributed.all_reduce(loss, ranks).item() / ranks.size
    return total / preset.validation_batches


def read_statistics(model: nn.Module, step: int) -> list[Statistic]:
    """Newest amax and present scale of every quantised tensor under ``model``, read from ``fp8_meta``; waits
    for the device."""
    rows = []
    for path, module in model.named_modules():
        meta = getattr(module, "fp8_meta", {})
        if "scaling_fwd" not in meta:
            continue
        gemms: Sequence[str] = module.gemms  # type: ignore[attr-defined]
        # slots per GEMM: input, weight, output forward, and grad_output, grad_input backward; output and
        # grad_input stay high precision
        kinds = (("scaling_fwd", ("input", "weight"), 3), ("scaling_bwd", ("grad_output",), 2))
        for name, tensors, slots in kinds:
            views = meta[name].views
            amax, scale = views["amax_history"].numpy()[-1], views["scale"].numpy()
            for i, prefix in enumerate(gemms):
                layer = f"{path}.{prefix.rstrip('_')}".rstrip(".")
                for slot, kind in enumerate(tensors, slots * i):
                    rows.append(Statistic(step, layer, kind, float(amax[slot]), float(scale[slot])))
    return rows


def write_losses(path: Path, columns: Mapping[str, Sequence[float]]) -> None:
    """A CSV file with ``step`` (from 1) and one column of losses in nats/byte for each run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *columns])
        writer.writerows(
            [step, *(f"{loss:.6f}" for loss in row)]
            for step, row in enumerate(zip(*columns.values(), strict=True), 1)
        )


def write_statistics(path: Path, statistics: Sequence[Statistic]) -> None:
    """A CSV file with one row for each reading of a tensor's amax and scale."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Statistic._fields)
        writer.writerows(statistics)
