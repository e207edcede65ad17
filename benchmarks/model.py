"""A Hugging Face Llama, whole training steps: plain, and converted by ``fp8kit_torch.convert``, each eager
and under ``torch.compile``.

    python -m benchmarks model --out DIR

The layers are those of Llama 3.2 1B (grouped heads, gated MLP), twelve of them, with random weights. A step
is forward with the loss, backward and torch's fused AdamW; ``convert`` replaces layers and attention, loss
and optimiser are the plain model's. docs/performance.md says what transformers' mask costs a compiled model.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import fp8kit_torch as ft
import torch
from torch import Tensor

from benchmarks.targets import COMPILED, EAGER, TORCH
from benchmarks.torch_cases import TorchPeak, free
from fp8kit.bench.contest import Contest, row_of
from fp8kit.bench.problem import RECIPES, bounds
from fp8kit.bench.report import Row, Setting, Unavailable
from fp8kit.bench.sizes import FULL
from fp8kit.bench.timing import Step
from fp8kit.recipe import Recipe

_CHECKED = 1024  # rows of logits that are compared
_UNMASKED = "sdpa_unmasked"


class Size(NamedTuple):
    """Of the model: features, of the MLP too, layers, heads of q, and of k and v, tokens of the vocabulary;
    length and number of its sequences."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    groups: int
    vocabulary: int
    sequence: int
    batch: int

    def __str__(self) -> str:
        return f"Llama, hidden {self.hidden}, {self.layers} layers, {self.sequence} x {self.batch} tokens"


LARGE = Size(2048, 8192, 12, 32, 8, 32000, 2048, 4)
TINY = Size(64, 128, 2, 4, 2, 96, 16, 2)
NO_MASK = ", no mask"  # of the plain model, see ``plain``
# recipe, None for the plain model; whether it is compiled: in the order in which they are made, so that a
# deadline leaves out the last ones
CASES: dict[str, tuple[str | None, bool]] = {
    EAGER: (None, False),
    TORCH: ("FP8 delayed", False),
    f"{TORCH}, torch.compile": ("FP8 delayed", True),
    COMPILED: (None, True),
    f"{COMPILED}{NO_MASK}": (None, True),
    "fp8kit_torch bf16": ("bf16", False),
    "fp8kit_torch FP8 current": ("FP8 current", False),
    "fp8kit_torch FP8 current, torch.compile": ("FP8 current", True),
}


class Trained(NamedTuple):
    """A model: ``look`` is a step's forward and backward, which gives its logits and leaves the gradients;
    ``step`` the whole one."""

    model: torch.nn.Module
    look: Callable[[], Tensor]
    step: Step


def plain(size: Size, device: torch.device, seed: int, mask: bool = True) -> torch.nn.Module:
    """The model with random weights, bfloat16. Unavailable where transformers is not installed.

    Without ``mask`` transformers makes none: attention is causal by its argument, as the eager model's is,
    and as a converted model's is anyway. Within ``torch.compile`` transformers may not see that nothing is
    padded or packed, and hands over a mask then, which keeps torch from its flash kernels.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Unavailable("not installed: transformers")
    found = importlib.import_module("transformers")
    config = found.LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.sequence,
    )
    if not mask:  # a name without a function for masks
        found.AttentionInterface.register(_UNMASKED, found.AttentionInterface()["sdpa"])
        config._attn_implementation = _UNMASKED
    torch.manual_seed(seed)
    with device:
        made: torch.nn.Module = found.LlamaForCausalLM(config)
    return made.to(torch.bfloat16)


def trained(model: torch.nn.Module, tokens: Tensor, recipe: Recipe | None, compiled: bool) -> Trained:
    """The model's training on these tokens (batch, sequence)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    backend = "inductor" if tokens.is_cuda else "aot_eager"
    call: Any = torch.compile(model, backend=backend, dynamic=False) if compiled else model

    def scope() -> AbstractContextManager[Any]:
        return nullcontext() if recipe is None else ft.autocast(recipe=recipe)

    def look() -> Tensor:
        with scope():
            out = call(tokens, labels=tokens)
        out.loss.backward()
        logits: Tensor = out.logits
        return logits.detach()

    def step() -> None:
        look()
        optimizer.step()
        optimizer.zero_grad()  # what one contender keeps, another has not

    return Trained(model, look, step)


def _results(made: Trained) -> tuple[Tensor, Tensor]:
    """Some logits of a step that changes nothing, and the gradient of the embeddings, which every layer's
    gradient passes; float32."""
    logits = made.look().flatten(0, 1)
    rows = logits[:: max(1, len(logits) // _CHECKED)].float()
    embeddings: Any = made.model.get_parameter("model.embed_tokens.weight")
    gradient = embeddings.grad.float()
    made.model.zero_grad()
    return rows, gradient


def verdict(case: str, size: Size, found: dict[str, float]) -> str:
    """ "ok", or by how much the errors are too large. The bounds are those of a layer (``problem.bounds``)
    times the root of their number: a layer's error is independent of the others', and stays in the sum that
    the residual stream is."""
    y, dx = (bound * size.layers**0.5 for bound in bounds(case, "TransformerLayer"))
    if found["error_y"] < y and found["error_dx"] < dx:
        return "ok"
    return f"WRONG: errors {found['error_y']:.3f}, {found['error_dx']:.3f}, bounds {y:.3f}, {dx:.3f}"


def model_part(setting: Setting, cases: dict[str, tuple[str | None, bool]] = CASES) -> list[Row]:
    """A row a case: time of a whole step, peak memory, and the errors of logits and of the embeddings'
    gradient against the plain model in float32. ``ratio``: to the plain model's eager step; of a compiled
    case ``detail`` says the ratio to its own eager one."""
    size, kind = LARGE if setting.sizes is FULL else TINY, setting.device.kind
    device = torch.device(kind, setting.device.index) if kind == "cuda" else torch.device("cpu")
    contest = Contest(setting, str(size))
    try:
        exact = plain(size, device, setting.seed).float()
    except Unavailable as why:
        return [row_of(str(size), "all", str(why))]
    draw = torch.Generator().manual_seed(setting.seed)
    tokens = torch.randint(size.vocabulary, (size.batch, size.sequence), generator=draw).to(device)
    wanted = _results(trained(exact, tokens, None, False))
    del exact
    free()

    def make(recipe: str | None, compiled: bool, row: Row) -> Step:
        memory = TorchPeak(setting.device)
        model = plain(size, device, setting.seed, mask=NO_MASK not in row["case"])
        if recipe is not None:
            ft.convert(model)
        made = trained(model, tokens, RECIPES[recipe] if recipe else None, compiled)
        for _ in range(2):  # delayed scaling has seen the values then
            _results(made)
        found = zip(("error_y", "error_dx"), _results(made), wanted, strict=True)
        row |= (errors := {name: float((got - one).norm() / one.norm()) for name, got, one in found})
        row["status"] = verdict(row["case"], size, errors)
        made.step()
        if kind == "cuda":
            row["peak_gib"] = memory.bytes(made.step) / 2**30
        contest.kept.append(made)
        return made.step

    for case, (recipe, compiled) in cases.items():
        if setting.left() > 0:
            contest.enter(case, partial(make, recipe, compiled))
        else:
            contest.leave_out(case)
    rows = contest.time(host=False)
    _compare(contest.rows)
    return rows


def _compare(rows: dict[str, Row]) -> None:
    """Ratios to the plain model, and of the compiled ones to their own eager model."""
    times = {case: row["gpu_ms"] for case, row in rows.items() if "gpu_ms" in row}
    for case, own in times.items():
        if EAGER in times:
            rows[case]["ratio"] = own / times[EAGER]
        eager = case.removesuffix(NO_MASK)
        eager = EAGER if eager == COMPILED else eager.removesuffix(", torch.compile")
        if eager != case and eager in times:
            rows[case]["detail"] = f"{own / times[eager]:.3f} of its own eager step"
