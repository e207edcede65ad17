"""Writes the table of layouts in docs/scale.md: a small model of what tensor, pipeline and data parallelism
move and compute, and the layout that it finds fastest ::

    PYTHONPATH=. python docs/scale_table.py

A transformer of L layers, H features and n = 12 L H^2 parameters on G GPUs, of which t share weights
(tensor and sequence parallel), p are stages, and d = G / (t p) have other rows. Sources: Narayanan et al.
2021, arXiv:2104.04473 (pipelines); Korthikanti et al. 2022, arXiv:2205.05198 (activations); Rajbhandari et
al. 2020, arXiv:1910.02054 (ZeRO). ``tests/adapters/torch/test_scale_table.py`` compares the bytes of tensor
parallelism with those that a layer moves.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("scale.md")
BEGIN, END = "<!-- layouts -->", "<!-- /layouts -->"


class Model(NamedTuple):
    """A transformer: its name, layers and features."""

    name: str
    layers: int
    hidden: int

    @property
    def parameters(self) -> int:
        """12 L H^2."""
        return 12 * self.layers * self.hidden**2


MODELS = (Model("7B", 32, 4096), Model("70B", 80, 8192), Model("400B", 128, 16384))
GPUS = (8, 64, 512, 4096, 16384)
SEQUENCE = 8192
TOKENS = 2**22  # of a step; at least two sequences a GPU
# assumed of a GPU like the H200, none measured here: FP8 products within a layer, float/s; bytes of memory
# that are left to a training; bytes/s to a GPU of the same machine of 8, and to others
RATE, MEMORY, NEAR, FAR, MACHINE = 0.9e15, 120e9, 350e9, 40e9, 8
# bytes an element of H and token that a layer moves with tensor and sequence parallelism: forward two
# gatherings of codes and two sums in bfloat16; backward two sums, two gatherings of codes for wgrad, and two
# of gradients' codes in both orientations
TENSOR_BYTES = {
    "fp8": (2 * 1 + 2 * 2, 2 * 2 + 2 * 1 + 2 * 2),
    "bfloat16": (2 * 2 + 2 * 2, 2 * 2 + 2 * 2 + 2 * 2),
}
# bytes a parameter: codes in both orientations and a gradient in bfloat16; master, two moments
WEIGHT, GRADIENT, STATE = 2, 2, 12
ACTIVATION = 24  # bytes an element of H and token that a layer keeps: 34 with bfloat16's operands, less 10


@dataclass(frozen=True)
class Layout:
    """t, p, d; ``sharded``: weights too are divided among the d (FSDP), not their optimiser's state alone
    (ZeRO-1). Times in seconds of a step, ``memory`` in bytes a GPU, ``moved`` bytes that a GPU receives."""

    tensor: int
    stages: int
    data: int
    sharded: bool
    memory: float
    compute: float
    communication: float
    idle: float
    moved: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.communication + self.idle

    def __str__(self) -> str:
        return f"t {self.tensor}, p {self.stages}, d {self.data}, {'FSDP' if self.sharded else 'ZeRO-1'}"


def tokens_of(gpus: int) -> int:
    """Of a step."""
    return max(TOKENS, 2 * SEQUENCE * gpus)


def layout(model: Model, gpus: int, tensor: int, stages: int, sharded: bool) -> Layout | None:
    """What a layout costs; None where it divides something that it cannot, or has no sequence for each."""
    data, rest = divmod(gpus, tensor * stages)
    tokens = tokens_of(gpus)
    batches = tokens // (SEQUENCE * data) if data else 0
    if rest or model.layers % stages or batches < stages or (sharded and stages > 1):
        return None
    own = model.parameters / (tensor * stages)
    layers, near = model.layers // stages, NEAR if tensor <= MACHINE else FAR
    if sharded:
        held = own * (WEIGHT + GRADIENT + STATE) / data + 2 * own / layers * (WEIGHT + GRADIENT)
    else:
        held = own * (WEIGHT + GRADIENT + STATE / data)
    kept = ACTIVATION * model.hidden * SEQUENCE * layers * min(stages, batches) / tensor
    attention = 6 * model.layers * model.hidden * SEQUENCE  # causal, forward and backward, a token
    compute = (6 * model.parameters + attention) * tokens / (gpus * RATE)
    # of tensor parallelism all waits; of data parallelism what backward (FSDP: both passes) does not hide
    elements = model.hidden * SEQUENCE * batches * layers * (tensor - 1) / tensor
    shared = sum(TENSOR_BYTES["fp8"]) * elements
    part = own * (data - 1) / data
    reduced = part * (2 + 2 * 1 if sharded else 2 + 2) * (batches if sharded else 1)
    link = NEAR if tensor * stages * data <= MACHINE else FAR
    hidden = compute if sharded else compute * 2 / 3 / batches
    communication = shared / near + max(0.0, reduced / link - hidden)
    idle = (stages - 1) / batches * (compute + shared / near)
    moved = shared + reduced
    return Layout(tensor, stages, data, sharded, held + kept, compute, communication, idle, moved)


def best(model: Model, gpus: int) -> Layout | None:
    """The fastest layout that fits; None where none does."""
    sizes = itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64), (False, True))
    found = [made for each in sizes if (made := layout(model, gpus, *each)) is not None]
    return min((one for one in found if one.memory <= MEMORY), key=lambda one: one.seconds, default=None)


def table() -> str:
    """A row for each model and number of GPUs."""
    head = "| model | GPUs | M tokens | layout | GB a GPU | GB moved a step | s a step | of it waiting |"
    lines = [head, "|" + "---|" * 8]
    for model, gpus in itertools.product(MODELS, GPUS):
        one, tokens = best(model, gpus), f"{tokens_of(gpus) / 1e6:.0f}"
        if one is None:
            lines.append(f"| {model.name} | {gpus} | {tokens} | none fits | | | | |")
            continue
        waits = (one.communication + one.idle) / one.seconds
        cells = f"{one.memory / 1e9:.0f} | {one.moved / 1e9:.0f} | {one.seconds:.2f} | {waits:.0%}"
        lines.append(f"| {model.name} | {gpus} | {tokens} | {one} | {cells} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page's text with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
