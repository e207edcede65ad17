"""A real RUN folder: a small GPT is trained, and the inspector looks at its GEMMs' operands.

``python -m tests.support.run_folder DIR --layers 12 --steps 500 --hidden 64`` writes a large one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit import arrays, nn, optim
from fp8kit.autograd import tensor
from fp8kit.models import text
from fp8kit.models.gpt import GPT
from fp8kit.models.presets import preset
from fp8kit.models.train import VALIDATION_SEED, loss_of
from fp8kit.numerics import run_folder
from fp8kit.recipes import NAMED

CPU = arrays.device("cpu")
TENSORS = ("activation", "weight", "gradient")
OF_TENSORS = ("exponents", "cur_amax", "crest_factor")
OF_CASTS = ("sqnr", "underflows%", "overflows%", "scale_inv_max", "scale_inv_min", "mxfp8_sqnr", "nvfp4_sqnr")


def config(every: int) -> dict[str, Any]:
    """Returns what the inspector is to look at in each ``every``-th step: the operands of all layers but the
    head, which is in high precision."""
    how = {"enabled": True, "tensors": list(TENSORS), "freq": every}
    features = {
        "LogTensorStats": {**how, "stats": list(OF_TENSORS)},
        "LogFp8TensorStats": {**how, "stats": list(OF_CASTS)},
    }
    layers = {"layer_name_regex_pattern": "^layers"}
    return {"operands": {"enabled": True, "layers": layers, "transformer_engine": features}}


def train(model: GPT, shape: Any, corpus: Any, recipe: str | None, seed: int, log: Any = None) -> list[float]:
    """Returns the losses of one training; ``log``: an inspector's."""
    parameters, losses = list(model.parameters()), []
    optimizer = optim.AdamW(parameters, lr=shape.learning_rate, betas=(0.9, 0.95))
    used = NAMED[recipe].recipe if recipe else None
    for step in range(shape.steps):
        optimizer.lr = optim.warmup_cosine(
            step, shape.learning_rate, shape.warmup, shape.steps, shape.learning_rate / 10
        )
        loss = loss_of(model, text.batch(corpus.train, shape.sequences, shape.context, seed, step), used)
        loss.backward(tensor(np.ones((1,) if loss.shape else (), np.float32), device=CPU))
        losses.append(loss.item())
        optim.clip_grad_norm_(parameters, shape.clip)
        optimizer.step()
        optimizer.zero_grad()
        if log is not None:
            log.step()
    return losses


def validate(model: GPT, shape: Any, corpus: Any, recipe: str | None) -> float:
    """Returns the mean loss of four batches that no training sees."""
    used = NAMED[recipe].recipe if recipe else None
    with fk.no_grad():
        batches = [
            text.batch(corpus.validation, shape.sequences, shape.context, VALIDATION_SEED, i)
            for i in range(4)
        ]
        return float(np.mean([loss_of(model, batch, used).item() for batch in batches]))


def write(
    folder: Path,
    layers: int = 2,
    steps: int = 6,
    hidden: int = 32,
    seeds: int = 2,
    every: int = 1,
    recipes: tuple[str, ...] = ("current",),
) -> Path:
    """Train in high precision and under ``recipes``, with ``seeds`` seeds each, and write the folder; the
    statistics are those of the first recipe's first seed, each ``every`` steps."""
    small = replace(preset("tiny"), layers=layers, hidden=hidden, context=32, sequences=4)
    shape = replace(small, steps=steps, warmup=max(1, steps // 10), learning_rate=3e-3)
    corpus = text.standard_library(4 << 20)
    losses, validation = {}, {}
    for recipe in (None, *recipes):
        for seed in range(seeds):
            nn.manual_seed(seed)
            model, name = GPT(shape, fk.float32, CPU), f"{recipe or 'float32'} seed {seed}"
            if recipe == recipes[0] and seed == 0:
                with fk.inspect(model, config(every), sinks=folder / "statistics.jsonl", keep=False) as log:
                    losses[name] = train(model, shape, corpus, recipe, seed, log)
            else:
                losses[name] = train(model, shape, corpus, recipe, seed)
            validation[name] = {steps - 1: validate(model, shape, corpus, recipe)}
    return run_folder.write(
        folder,
        recipe=recipes[0],
        losses=losses,
        validation=validation,
        device=CPU,
        model={"kind": "GPT", "layers": layers, "hidden": hidden, "heads": shape.heads, "context": 32},
        settings={
            "reference": "float32",
            "steps": steps,
            "learning_rate": shape.learning_rate,
            "sequences": shape.sequences,
            "seeds": seeds,
            "statistics_every": every,
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for option, usual in (("layers", 2), ("steps", 6), ("hidden", 32), ("seeds", 2), ("every", 1)):
        parser.add_argument(f"--{option}", type=int, default=usual)
    parser.add_argument("--recipes", nargs="+", default=["current"])
    options = vars(parser.parse_args())
    print(write(options.pop("folder"), **{**options, "recipes": tuple(options["recipes"])}))
