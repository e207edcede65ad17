"""What the inspector costs a training step: five statistics of three tensors of every GEMM's operands.

    python -m benchmarks inspect --out DIR

A TransformerLayer through PyTorch, forward, backward and the end of the step, off, in every hundredth step,
and in every step, in turns of as many steps each. Rows go to a file of JSON lines. ``ratio`` is to the turns
without an inspector. On a CPU the layer is small, and the seldom looked-at steps are every fourth.
"""

from __future__ import annotations

import statistics
import time
from tempfile import TemporaryDirectory
from typing import Any

import fp8kit_torch as ft
import torch

from fp8kit import arrays
from fp8kit.bench.report import Row, Setting, attempt
from fp8kit.bench.sizes import FULL
from fp8kit.recipe import Float8CurrentScaling

# hidden size, heads, sequence, batch; steps from one that is looked at to the next
FULL_SIZE, SMALL_SIZE = (2048, 16, 2048, 4, 100), (128, 2, 64, 2, 4)
ROUNDS = 3
STATS = ("min", "max", "mean", "std", "underflows%")
TENSORS = ("activation", "weight", "gradient")
OFF, SELDOM, EVERY = "off", "frequency {}", "frequency 1"


def configuration(freq: int) -> dict[str, Any]:
    """Five statistics of every operand in every ``freq``-th step."""
    feature = {"enabled": True, "tensors": list(TENSORS), "stats": list(STATS), "freq": freq}
    return {
        "all": {
            "enabled": True,
            "layers": {"layer_types": ["all"]},
            "transformer_engine": {"LogFp8TensorStats": feature},
        }
    }


def inspect_part(setting: Setting) -> list[Row]:
    """A row for each way to look, and one without."""
    hidden, heads, sequence, batch, freq = FULL_SIZE if setting.sizes is FULL else SMALL_SIZE
    device = torch.device(str(setting.device))
    kind = {"params_dtype": torch.bfloat16, "device": device}
    layer = ft.TransformerLayer(hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0, **kind)
    x, g = (torch.randn(sequence, batch, hidden, dtype=torch.bfloat16, device=device) for _ in range(2))
    x.requires_grad_()
    recipe = Float8CurrentScaling()

    def step() -> None:
        with ft.autocast(recipe=recipe):
            y = layer(x)
        y.backward(g)
        layer.zero_grad(set_to_none=True)

    def turn(own: int) -> float:
        """Mean seconds of a step, looked at every ``own``-th, never for 0."""
        if not own:
            return _seconds(step, freq, setting)
        with (
            TemporaryDirectory() as folder,
            ft.inspect(layer, configuration(own), sinks=f"{folder}/rows.jsonl", keep=False) as log,
        ):
            return _seconds(lambda: (step(), log.step()), freq, setting)

    ways = {OFF: 0, SELDOM.format(freq): freq, EVERY: 1}
    times: dict[str, list[float]] = {name: [] for name in ways}
    workload = f"layer {hidden}, {sequence} x {batch}"
    rows: list[Row] = [{"workload": workload, "case": name, "status": "ok"} for name in ways]
    for own in ways.values():
        turn(own)
    for number in range(ROUNDS):
        for name, own in list(ways.items())[:: -1 if number % 2 else 1]:
            times[name].append(turn(own))
    for row in rows:
        with attempt(row):
            found, plain = (statistics.median(times[name]) for name in (str(row["case"]), OFF))
            row |= {"gpu_ms": found * 1e3, "ratio": found / plain}
    return rows


def _seconds(step: Any, calls: int, setting: Setting) -> float:
    """Mean seconds of so many steps, queued back to back."""
    arrays.synchronize(setting.device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    arrays.synchronize(setting.device)
    return (time.perf_counter() - start) / calls
