"""Where the sums of Hopper's tensor cores show in a loss: a linear model with one contraction of length K.

y = x W^T is fitted to a known W by AdamW, each step on new rows, with ``current`` and the sums of all three
products as said. Of "random" data terms have both signs, and what sums cut off mostly cancels; of "positive"
data x and W are positive, and it adds up. The loss is mean((y - t)^2) / mean(t^2), its mean over the last
tenth of the steps.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit import nn, optim
from fp8kit.arrays import Device
from fp8kit.recipe import Recipe
from studies import files
from studies.cases import CASES, of_study
from studies.training import about

KINDS = ("random", "positive")
SIZES = (256, 1024, 4096)
QUICK = (256, 1024)
SEEDS, STEPS, ROWS, OUTPUTS = 3, 100, 32, 8
RATE = 0.015  # of AdamW at the start, over sqrt(K)


def measure(folder: Path, device: Device, quick: bool, end: float) -> bool:
    """Fit every kind and size, a file each in ``folder/linear``; those that are there are skipped. Returns
    whether all are there; nothing begins after ``end``."""
    for k in QUICK if quick else SIZES:
        for kind in KINDS:
            path = folder / "linear" / f"{kind}.{k}.json"
            if path.exists():
                continue
            if time.monotonic() > end:
                print(f"linear: no time for {kind} data of K = {k} and what follows; call again")
                return False
            sums = {name: _of(name, kind, k, device) for name in of_study("accumulator")}
            files.write(path, {**about(device), "kind": kind, "k": k, "steps": STEPS, "sums": sums})
            words = ", ".join(f"{name} {statistics.fmean(own['losses']):.3g}" for name, own in sums.items())
            print(f"{kind}, K = {k}: {words}", flush=True)
    return True


def _of(name: str, kind: str, k: int, device: Device) -> dict[str, Any]:
    """``losses`` by seed, and ``forward``, the relative error of y with the W that is sought."""
    recipe = CASES[name].recipe(1)
    found = [fit(recipe, kind, k, seed, device) for seed in range(SEEDS)]
    return {"losses": [loss for loss, _ in found], "forward": [error for _, error in found]}


def fit(recipe: Recipe | None, kind: str, k: int, seed: int, device: Device) -> tuple[float, float]:
    """The loss at the end, and the relative error of y with the weight that is sought."""
    random = np.random.default_rng((seed, k))

    def drawn(*shape: int) -> Any:
        values = random.standard_normal(shape).astype(np.float32)
        return np.abs(values) if kind == "positive" else values

    wanted = drawn(OUTPUTS, k) / np.float32(k**0.5)
    layer = nn.Linear(k, OUTPUTS, bias=False, device=device)

    def missed(x: Any) -> tuple[Any, Any, Any]:
        with fk.autocast(recipe=recipe):
            y = layer(fk.tensor(x, device=device))
        exact = x.astype(np.float64) @ wanted.T.astype(np.float64)
        return y, y.numpy() - exact, exact

    layer.load_state_dict({"weight": wanted})
    _, off, exact = missed(drawn(ROWS, k))
    forward = float(np.sqrt(np.mean(off**2) / np.mean(exact**2)))
    layer.load_state_dict({"weight": np.full_like(wanted, wanted.mean())})
    optimizer = optim.AdamW(layer.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        optimizer.lr = optim.warmup_cosine(step, RATE / k**0.5, 0, STEPS, 0.0)
        y, off, exact = missed(drawn(ROWS, k))
        losses.append(float(np.mean(off**2) / np.mean(exact**2)))
        y.backward((off / ROWS).astype(np.float32))
        optimizer.step()
        optimizer.zero_grad()
    return statistics.fmean(losses[-STEPS // 10 :]), forward


def rows(folder: Path) -> list[tuple[str, ...]]:
    """The table's rows: kind, K, and of each sum the mean loss, its spread and the forward error."""
    found = []
    for path in sorted((folder / "linear").glob("*.json"), key=lambda path: files.read(path)["k"]):
        own = files.read(path)
        base = own["sums"]["sums_float32"]["losses"]
        spread = statistics.stdev(base)
        for name, values in own["sums"].items():
            mean = statistics.fmean(values["losses"])
            gap = (mean - statistics.fmean(base)) / spread
            found.append(
                (
                    *(own["kind"], str(own["k"]), f"`{name}`", f"{mean:.4g}", f"{spread:.2g}"),
                    "" if name == "sums_float32" else f"{gap:+.1f}" if abs(gap) > 1 else f"0 ({gap:+.1f})",
                    f"{statistics.fmean(values['forward']):.4g}",
                )
            )
    return found


COLUMNS = ("data", "K", "sums", "loss", "spread of float32's", "gap / spread", "error of y with the W sought")
