"""What is measured: the sizes of every part, in full for a GPU and in small for the CPU and the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Layer(NamedTuple):
    """A transformer layer and its input: ``hidden``, ``ffn``, ``heads``; ``sequence`` tokens in each of
    ``batch`` sequences."""

    hidden: int
    ffn: int
    heads: int
    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.sequence * self.batch

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """Shapes (out, in) of its weights, in the order of a forward pass."""
        h, f = self.hidden, self.ffn
        return {"qkv": (3 * h, h), "proj": (h, h), "fc1": (f, h), "fc2": (h, f)}

    def __str__(self) -> str:
        tokens = f"{self.sequence} x {self.batch} tokens"
        return f"hidden {self.hidden}, ffn {self.ffn}, heads {self.heads}, {tokens}"


def layer_of(hidden: int, tokens: int) -> Layer:
    """Returns the layer of that size in the break-even grid: heads of 64 features up to hidden 1024 and of
    128 above, sequences of 2048 at most."""
    sequence, features = min(tokens, 2048), 64 if hidden <= 1024 else 128
    return Layer(hidden, 4 * hidden, max(1, hidden // features), sequence, tokens // sequence)


@dataclass(frozen=True)
class Sizes:
    """``layers`` by name, which has the hidden size, the largest first: ``modules``, ``kernels``, ``gemm``
    and the skeleton are of it. ``linear``: tokens, in and out of the host's test. ``start``: the layer of the
    cold start. ``hidden``, ``tokens``: the break-even grid. ``vocabulary``: classes of the cross entropy.
    ``cast``: rows and columns of the casts on the CPU; ``preset``: the training step there. ``error``: rows,
    in and out of the Linear whose error is measured against float64."""

    name: str
    layers: dict[str, Layer]
    linear: tuple[int, int, int]
    start: Layer
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    vocabulary: int
    cast: tuple[int, int]
    preset: str
    error: tuple[int, int, int]

    @property
    def large(self) -> Layer:
        """The largest layer."""
        return next(iter(self.layers.values()))


FULL = Sizes(
    "full",
    {
        "layer 4096": Layer(4096, 16384, 32, 2048, 4),
        "layer 2048": Layer(2048, 8192, 16, 2048, 2),
        "layer 1024": Layer(1024, 4096, 16, 1024, 4),
        "layer 768": Layer(768, 3072, 12, 1024, 8),
    },
    (64, 256, 256),
    Layer(768, 3072, 12, 1024, 8),
    (256, 512, 1024, 2048, 4096, 8192),
    (256, 512, 1024, 2048, 4096, 8192, 16384),
    50304,
    (2048, 2048),
    "demo-cpu",
    (8192, 4096, 16384),
)
SMALL = Sizes(
    "small",
    {
        "layer 64": Layer(64, 128, 2, 32, 2),
        "layer 48": Layer(48, 96, 2, 16, 2),
        "layer 32": Layer(32, 64, 2, 16, 2),
        "layer 16": Layer(16, 32, 1, 16, 2),
    },
    (8, 32, 48),
    Layer(32, 64, 2, 16, 2),
    (32, 64),
    (16, 32),
    96,
    (256, 512),
    "tiny",
    (32, 48, 64),
)
SIZES = {sizes.name: sizes for sizes in (FULL, SMALL)}
