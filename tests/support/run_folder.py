"""A real RUN folder: a small GPT is trained, and statistics of its GEMMs' operands are taken by NumPy.

``python -m tests.support.run_folder DIR --layers 12 --steps 500 --hidden 64`` writes a large one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp8kit as fk
from fp8kit import arrays, nn, optim
from fp8kit.autograd import Tensor, tensor
from fp8kit.autograd.tape import is_grad_enabled
from fp8kit.formats import E4M3, E5M2
from fp8kit.models import text
from fp8kit.models.gpt import GPT
from fp8kit.models.presets import preset
from fp8kit.models.train import VALIDATION_SEED, loss_of
from fp8kit.recipes import NAMED

HostArray = np.ndarray[Any, Any]
Row = dict[str, Any]
CPU = arrays.device("cpu")
EPSILON = 1e-5  # of the layers' norms
ROUNDED = np.float32(1 + 2.0**-22)  # of a scale and its inverse in float32


def exponents(x: HostArray) -> list[int]:
    """Counts of the 256 exponents of float32, and of zeros: 257 ints."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).ravel()
    zeros = int((bits & 0x7FFFFFFF == 0).sum())
    counts = np.bincount((bits >> 23) & 0xFF, minlength=256)
    counts[0] -= zeros
    return [*map(int, counts), zeros]


def statistics(x: HostArray, format: Any, how: dict[str, Any]) -> dict[str, Any]:
    """The statistics of a matrix and its codes; ``how``: arguments of ``fk.quantize``."""
    x = np.ascontiguousarray(x, np.float32)
    cast = fk.quantize(x, format, **how)
    values = np.asarray(cast.dequantize(), np.float64)
    wide = x.astype(np.float64)
    each = np.asarray(cast.scale_inv, np.float32)
    largest = float(format.max)
    beyond = 0
    if each.size == 1:
        beyond = int((np.abs(x) > np.float32(largest) * each.ravel()[0] * ROUNDED).sum())
    noise, signal = float(((wide - values) ** 2).sum()), float((wide**2).sum())
    rms = float(np.sqrt((wide**2).mean()))
    amax = float(np.abs(x).max())
    return {
        "underflows%": 100 * int(((x != 0) & (values == 0)).sum()) / x.size,
        "overflows%": 100 * beyond / x.size,
        "sqnr": 10 * float(np.log10(signal / noise)) if noise and signal else float("inf"),
        "scale_inv_max": float(each.max()),
        "scale_inv_min": float(each.min()),
        "cur_amax": amax,
        "crest_factor": amax / rms if rms else 0.0,
        "exponents": exponents(x),
    }


def normalised(x: HostArray, module: Any) -> HostArray:
    """The layer norm of rows, as a layer with a norm has it before its first GEMM."""
    weight, bias = (
        np.asarray(getattr(module, f"layer_norm_{name}").numpy(), np.float32) for name in ("weight", "bias")
    )
    centred = x - x.mean(-1, keepdims=True)
    made = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * weight + bias
    return np.asarray(made, np.float32)


def gelu(x: HostArray) -> HostArray:
    """GELU by its tanh formula."""
    return np.asarray(0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))), np.float32)


class Watcher:
    """Operands of the GEMMs of a GPT while ``on``: (layer, tensor) -> matrix."""

    def __init__(self, model: GPT) -> None:
        self.on = False
        self.seen: dict[tuple[str, str], HostArray] = {}
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.LayerNormLinear | nn.LayerNormMLP) and path != "head":
                object.__setattr__(module, "compute", self._watched(path, module, module.compute))

    def _watched(self, path: str, module: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        mlp = isinstance(module, nn.LayerNormMLP)
        last = f"{path}.fc2" if mlp else path

        def run(x: Any, *arguments: Any, **options: Any) -> Any:
            out = compute(x, *arguments, **options)
            if not self.on or not is_grad_enabled():
                return out
            rows = x.numpy().astype(np.float32).reshape(-1, x.shape[-1])
            first = normalised(rows, module) if hasattr(module, "layer_norm_weight") else rows
            self.seen[f"{path}.fc1" if mlp else path, "activation"] = first
            if mlp:
                inner = first @ module.fc1_weight.numpy().T + module.fc1_bias.numpy()
                self.seen[last, "activation"] = gelu(inner)
                for part in ("fc1", "fc2"):
                    self.seen[f"{path}.{part}", "weight"] = getattr(module, f"{part}_weight").numpy().copy()
            else:
                self.seen[path, "weight"] = module.weight.numpy().copy()
            y = out if isinstance(out, Tensor) else out.y
            y.register_hook(lambda g: self.seen.__setitem__((last, "gradient"), g.numpy().copy()))
            return out

        return run


def rows_of(step: int, seen: dict[tuple[str, str], HostArray], recipe: str) -> Iterator[Row]:
    """The log's rows of one step; a gradient is cast to E5M2 by a scale of its own, or as ``recipe`` says."""
    block = recipe.startswith("mxfp8")
    for (layer, kind), matrix in sorted(seen.items()):
        flat = matrix.reshape(-1, matrix.shape[-1])
        format = E5M2 if kind == "gradient" and not block else E4M3
        how = {"scaling": "mx_1x32", "scale_rule": "te"} if block else {}
        found = statistics(flat, format, how)
        found["mxfp8_sqnr"] = statistics(flat, E4M3, {"scaling": "mx_1x32", "scale_rule": "te"})["sqnr"]
        found["nvfp4_sqnr"] = statistics(flat, fk.E2M1, {"scaling": "nvfp4_1x16"})["sqnr"]
        for stat, value in found.items():
            yield {"step": step, "layer": layer, "tensor": kind, "stat": stat, "value": value}


def train(
    shape: Any, corpus: Any, recipe: str | None, seed: int, every: int
) -> tuple[list[float], float, list[Row]]:
    """Losses, the validation loss and the statistics of one training."""
    nn.manual_seed(seed)
    model = GPT(shape, fk.float32, CPU)
    watcher, rows, losses = Watcher(model), [], []
    optimizer = optim.AdamW(list(model.parameters()), lr=shape.learning_rate, betas=(0.9, 0.95))
    used = NAMED[recipe].recipe if recipe else None
    for step in range(1, shape.steps + 1):
        watcher.on = recipe is not None and every > 0 and (step % every == 0 or step == 1)
        watcher.seen.clear()
        optimizer.lr = optim.warmup_cosine(
            step - 1, shape.learning_rate, shape.warmup, shape.steps, shape.learning_rate / 10
        )
        batch = text.batch(corpus.train, shape.sequences, shape.context, seed, step)
        loss = loss_of(model, batch, used)
        loss.backward(tensor(np.ones((1,) if loss.shape else (), np.float32), device=CPU))
        losses.append(loss.item())
        optim.clip_grad_norm_(list(model.parameters()), shape.clip)
        optimizer.step()
        optimizer.zero_grad()
        rows += rows_of(step, watcher.seen, recipe or "")
    with fk.no_grad():
        batches = [
            text.batch(corpus.validation, shape.sequences, shape.context, VALIDATION_SEED, i)
            for i in range(4)
        ]
        validation = [loss_of(model, batch, used).item() for batch in batches]
    return losses, float(np.mean(validation)), rows


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
    folder.mkdir(parents=True, exist_ok=True)
    small = replace(preset("tiny"), layers=layers, hidden=hidden, context=32, sequences=4)
    shape = replace(small, steps=steps, warmup=max(1, steps // 10), learning_rate=3e-3)
    corpus = text.standard_library(4 << 20)
    losses: list[Row] = []
    rows: list[Row] = []
    for recipe in (None, *recipes):
        for seed in range(seeds):
            watched = every if recipe == recipes[0] and seed == 0 else 0
            found, validation, new = train(shape, corpus, recipe, seed, watched)
            name = f"{recipe or 'float32'} seed {seed}"
            losses += [
                {"step": step, "loss": loss, "series": name} for step, loss in enumerate(found, start=1)
            ]
            losses.append({"step": steps, "loss": validation, "series": name, "validation": True})
            rows += new
    about = {
        "model": {"kind": "GPT", "layers": layers, "hidden": hidden, "heads": shape.heads, "context": 32},
        "recipe": recipes[0],
        "settings": {
            "reference": "float32",
            "steps": steps,
            "learning_rate": shape.learning_rate,
            "sequences": shape.sequences,
            "seeds": seeds,
            "statistics_every": every,
        },
        "versions": {"fp8kit": fk.__version__, "numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__},
        "device": "cpu",
    }
    (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")
    for name, entries in (("losses", losses), ("statistics", rows)):
        lines = (json.dumps(entry) + "\n" for entry in entries)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for option, usual in (("layers", 2), ("steps", 6), ("hidden", 32), ("seeds", 2), ("every", 1)):
        parser.add_argument(f"--{option}", type=int, default=usual)
    parser.add_argument("--recipes", nargs="+", default=["current"])
    options = vars(parser.parse_args())
    print(write(options.pop("folder"), **{**options, "recipes": tuple(options["recipes"])}))
