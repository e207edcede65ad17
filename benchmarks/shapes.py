"""A training whose batches have ever other lengths: what the first visit of a length costs, and later ones.

    python -m benchmarks shapes --out DIR

One TransformerLayer, forward and backward, through PyTorch, beside a layer of torch's own modules with its
flash attention. Lengths are drawn once, from a fixed seed; a visit goes through all of them in order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext

import fp8kit_torch as ft
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.targets import FLASH, MISSING, TORCH
from benchmarks.torch_cases import without_cudnn
from benchmarks.torch_plain import Layer
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.bench.contest import row_of
from fp8kit.bench.report import NO_TIME, Row, Setting
from fp8kit.bench.sizes import FULL

LENGTHS, SEED = (100, 1000), 0
SMALL_LENGTHS = 3
VISITS = 3
Step = Callable[[torch.Tensor], None]


def _fp8kit(
    hidden: int, heads: int, device: torch.device, fp8: bool, policy: SelectionPolicy | None = None
) -> Step:
    layer = ft.TransformerLayer(
        hidden,
        4 * hidden,
        heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        device=device,
        attn_input_format="bshd",  # as the layer beside it
    )
    recipe = ft.recipe.DelayedScaling()

    def step(x: torch.Tensor) -> None:
        with nullcontext() if policy is None else policy_context(policy):
            with ft.autocast(enabled=fp8, recipe=recipe):
                y = layer(x)
            y.backward(torch.ones_like(y))
        layer.zero_grad(set_to_none=True)

    return step


def _torch(hidden: int, heads: int, device: torch.device) -> Step:
    layer = Layer(hidden, 4 * hidden, heads, device=device, dtype=torch.bfloat16)
    backend = SDPBackend.FLASH_ATTENTION if device.type == "cuda" else SDPBackend.MATH

    def step(x: torch.Tensor) -> None:
        with sdpa_kernel(backend):
            y = layer(x)
        y.backward(torch.ones_like(y))
        layer.zero_grad(set_to_none=True)

    return step


def shapes_part(setting: Setting) -> list[Row]:
    """A row for each number of batches, contender and visit: milliseconds a step, by the clock."""
    full = setting.sizes is FULL
    hidden, heads, batch, longest = (1024, 16, 2, 2048) if full else (64, 2, 2, 64)
    kind = setting.device.kind
    device = torch.device(kind, setting.device.index) if kind == "cuda" else torch.device("cpu")
    made = {
        TORCH: _fp8kit(hidden, heads, device, fp8=True),
        MISSING: _fp8kit(hidden, heads, device, fp8=True, policy=without_cudnn()),
        "fp8kit_torch bf16": _fp8kit(hidden, heads, device, fp8=False),
        FLASH: _torch(hidden, heads, device),
    }
    draw, rows = random.Random(SEED), list[Row]()
    for count in LENGTHS if full else (SMALL_LENGTHS,):
        lengths = [8 * draw.randint(longest // 160 + 1, longest // 8) for _ in range(count)]
        different = len(set(lengths))
        workload = f"hidden {hidden}, batch {batch}, {count} batches of {different} lengths"
        for visit in range(1, VISITS + 1):
            for name, step in made.items():
                case = f"{name}, visit {visit}"
                if setting.left() <= 0:
                    rows.append(row_of(workload, case, NO_TIME))
                    continue
                x = torch.randn(batch, longest, hidden, device=device, dtype=torch.bfloat16)
                if visit == 1 and count == LENGTHS[0]:
                    # compile the kernels: for long, for short, and for what no tile divides
                    for length in (longest, longest // 32, longest // 32 + 8):
                        step(x[:, :length].detach().requires_grad_())
                _wait(device)
                begin = time.perf_counter()
                for length in lengths:
                    step(x[:, :length].detach().requires_grad_())
                _wait(device)
                rows.append(
                    row_of(
                        workload, case, value=1e3 * (time.perf_counter() - begin) / count, unit="ms a step"
                    )
                )
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
