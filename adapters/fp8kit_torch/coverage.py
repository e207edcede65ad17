"""``coverage``: which of a model's layers compute in FP8 under ``autocast``, which do not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from fp8kit_torch.checks import module
from fp8kit_torch.converted import Converted, ConvertedLinear
from fp8kit_torch.converted_attention import models_of, said_of
from fp8kit_torch.converted_mlp import layer_by_layer
from fp8kit_torch.convertible import NO_MATRIX, TABLE, replacement
from fp8kit_torch.experts import ConvertedExperts
from fp8kit_torch.stateful import StatefulModule


@dataclass(frozen=True)
class Covered:
    """A module that has parameters of its own. ``name``: in the model; ``kind``: its class; ``parameters``:
    how many numbers they are; ``fp8``: whether its products run in FP8 under ``autocast``; ``why``: what it
    is, or why it is not converted."""

    name: str
    kind: str
    parameters: int
    fp8: bool
    why: str


@dataclass(frozen=True)
class Coverage:
    """What ``coverage`` found. ``str`` of it is a table. ``attention``: of each model of transformers by its
    name, whose attention it has, and why not fp8kit's. ``mlps``: of each MLP of converted layers by its name,
    "" where it now runs as one operation under delayed scaling, else why layer by layer."""

    modules: tuple[Covered, ...]
    attention: Mapping[str, str] = field(default_factory=dict, hash=False)
    mlps: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def fp8_share(self) -> float:
        """The share of the model's parameters, shared ones counted once, that are weights and biases of
        layers with FP8 products: 0 to 1."""
        total = sum(each.parameters for each in self.modules)
        return sum(each.parameters for each in self.modules if each.fp8) / total if total else 0.0

    @property
    def left(self) -> tuple[Covered, ...]:
        """Those whose products are not in FP8 for a reason other than that they have none."""
        return tuple(each for each in self.modules if not each.fp8 and each.why not in _FINE)

    def __str__(self) -> str:
        rows = [("module", "class", "parameters", "FP8", "why")]
        rows += [
            (e.name or "(the model)", e.kind, f"{e.parameters:,}", "yes" if e.fp8 else "no", e.why)
            for e in self.modules
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]).rstrip() for row in rows]
        lines += [f"attention of {name or '(the model)'}: {why}" for name, why in self.attention.items()]
        if self.mlps:
            whole = sum(not why for why in self.mlps.values())
            lines.append(f"MLPs as one operation under delayed scaling: {whole} of {len(self.mlps)}")
            for why, count in Counter(filter(None, self.mlps.values())).items():
                first = next(name for name, own in self.mlps.items() if own == why) or "(the model)"
                lines.append(f"  layer by layer: {count} ({why}), the first is {first}")
        return "\n".join([*lines, f"{self.fp8_share:.1%} of the parameters are in layers with FP8 products"])


_EXPERTS = (
    "converted; experts take scales of the data (Float8CurrentScaling, Float8BlockScaling), and refuse "
    "delayed scaling, MXFP8 and NVFP4"
)
_NORM = "a norm of fp8kit, which computes in high precision"
_FINE = (TABLE, NO_MATRIX, _NORM)


def coverage(model: nn.Module, *, linear_classes: Sequence[type[nn.Linear]] = ()) -> Coverage:
    """For each module of ``model`` that has parameters of its own: whether its products run in FP8 under
    ``autocast``, and if not, why ``convert`` left it, or would leave it (``linear_classes`` as there); of
    transformers' models also whose attention they have; and which MLPs run as one operation. Counts of
    parameters are of numbers; one that several modules share counts for the first of them."""
    module("coverage", "model", model)
    seen: set[int] = set()
    found = []
    for name, part in model.named_modules():
        own = list(part.parameters(recurse=False))
        if not own:
            continue
        fresh = [p for p in own if id(p) not in seen]
        seen |= {id(p) for p in own}
        fp8 = isinstance(part, StatefulModule | ConvertedExperts)
        count = sum(p.numel() for p in fresh)
        found.append(Covered(name, type(part).__name__, count, fp8, _why(part, tuple(linear_classes))))
    attention = {name: said_of(part) for name, part in models_of(model).items()}
    return Coverage(tuple(found), attention, layer_by_layer(model))


def _why(part: nn.Module, linears: tuple[type[nn.Linear], ...]) -> str:
    if isinstance(part, ConvertedExperts):
        return _EXPERTS
    if isinstance(part, ConvertedLinear):
        return "converted"
    if isinstance(part, Converted):
        return _NORM
    if isinstance(part, StatefulModule):
        return "a layer of fp8kit_torch"
    made = replacement(part, linears)
    return made if isinstance(made, str) else "not converted, though it could be: convert was not asked to"
