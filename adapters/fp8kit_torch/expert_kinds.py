"""What the experts of a transformers model compute, whose weights are arrays of three dimensions: found out
by running them on a few rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from fp8kit_torch.views import FLOATS

GATED, UNGATED = ("gate_up_proj", "down_proj"), ("up_proj", "down_proj")  # biases end in "_bias"
# as far go the gates that are looked at: where activations differ most, and so that a limit shows, which is 7
# or 10 in models
_NEAR, _FAR = 3.0, 50.0
# what float32 operands of products are rounded to, by torch.get_float32_matmul_precision()
_OPERANDS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}


@dataclass(frozen=True)
class ExpertKind:
    """y = W2 a(W1 x + b1) + b2 of each expert. ``weights``: the names of W1 and W2; ``layout``: "oi", W1 is
    (E, N, K), or "io", (E, K, N); ``activation`` and ``params``: a, by ``backends.activation``;
    ``interleaved``: the gate's are every second of W1's outputs, from the first on. ``in_groups``:
    ``forward`` takes as many rows for each expert, one expert's after the other's, and no routing.
    ``routing``: what ``forward`` calls the chosen experts and their weights."""

    weights: tuple[str, str]
    layout: str
    biased: bool
    activation: str = ""
    params: tuple[float, ...] = ()
    interleaved: bool = False
    in_groups: bool = False
    routing: tuple[str, ...] = ()

    @property
    def gated(self) -> bool:
        """Whether W1 has two halves of outputs."""
        return self.weights == GATED


def layout_of(module: nn.Module) -> ExpertKind | str | None:
    """How a module keeps its experts, without what they compute; a reason for arrays of other shapes; None
    for a module that has not their parameters."""
    own = dict(module.named_parameters(recurse=False))
    names = GATED if GATED[0] in own else UNGATED
    biases = [f"{name}_bias" for name in names]
    biased = set(own) == {*names, *biases}
    if not biased and set(own) != set(names):
        return None
    first, second = (own[name] for name in names)
    halves = 2 if names is GATED else 1
    if first.ndim == 3:
        experts, out, features = first.shape
        for layout in ("oi", "io"):
            wanted = (
                (experts, features, out // halves) if layout == "oi" else (experts, out // halves, features)
            )
            fits = out % halves == 0 and tuple(second.shape) == wanted
            shapes = [(experts, out), (experts, features)]
            if fits and (not biased or [tuple(own[name].shape) for name in biases] == shapes):
                return ExpertKind(names, layout, biased)
            out, features = features, out
    sides = ("2 F" if halves == 2 else "F"), "F"
    return (
        f"experts whose {names[0]} and {names[1]} are not (E, {sides[0]}, H) and (E, H, F), nor "
        f"(E, H, {sides[0]}) and (E, F, H), with biases or without"
    )


def kind_of(module: nn.Module) -> ExpertKind | str | None:
    """What a module's experts compute, or why they cannot be replaced; None for a module that has not their
    parameters."""
    found = layout_of(module)
    if not isinstance(found, ExpertKind):
        return found
    own = list(module.parameters(recurse=False))
    if own[0].dtype not in FLOATS or any(p.dtype is not own[0].dtype or not p.is_contiguous() for p in own):
        return "experts whose weights are not contiguous arrays of float32, bfloat16 or float16"
    if "forward" in vars(module) or list(module.buffers(recurse=False)):
        return "experts whose forward was replaced, or that have buffers"
    if own[0].is_meta:
        return "on the meta device: what its forward computes is not known"
    takes = tuple(inspect.signature(type(module).forward).parameters)
    found = replace(found, in_groups=len(takes) == 2, routing=takes[2:4])  # after self and the rows
    return _computed(module, found)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
    "srelu": lambda u: nn.functional.relu(u).square(),
}
_GATES = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "srelu": "sreglu"}
_CHOSEN, _WEIGHTS = ((0, 1), (1, 0)), ((0.75, 0.25), (0.5, -1.0))  # of every second row, first or last expert


@torch.no_grad()
def _computed(module: nn.Module, kind: ExpertKind) -> ExpertKind | str:
    """The kind by which a few rows become what ``module`` makes of them, to the rounding of their dtype; the
    nearest of several; or why there is none."""
    w1, b1, w2, b2 = _of_two_experts(module, kind)
    limits, dtype = _numbers(module, "limit"), next(module.parameters()).dtype
    ramp = torch.linspace(-1.5, 2.5, w1.shape[-1], device=w1.device, dtype=torch.float64)
    x = torch.stack((ramp, ramp.flip(0).cos()))
    largest = float((x @ w1.mT).abs().max())
    if not 0 < largest < math.inf:
        return "experts whose weights are 0 or not finite: what their forward computes is not known"
    near, far = (x * (reach / largest) for reach in (_NEAR, max([_FAR, *(4 * limit for limit in limits)])))
    x = torch.cat((near, -near, far, -far)).to(dtype)
    got, wide, eps = _outputs(module, kind, x), x.double(), torch.finfo(dtype).eps
    first = _product(wide, torch.zeros_like(wide), w1, b1, eps)
    fitting: dict[float, ExpertKind] = {}
    for candidate in _candidates(module, kind, limits):
        y, error = _product(*_hidden(candidate, *first, eps), w2, b2, eps)
        if not kind.in_groups:
            probs = torch.tensor(_WEIGHTS * (len(x) // 2), device=x.device, dtype=torch.float64)
            y, error = _weighted(y, probs), _weighted(error, probs.abs())
        if got is not None and got.shape == y.shape:
            off = (got.double() - y).abs()
            worst = float(torch.where(off == 0, 0, off / error).max())
            if worst <= 1:  # a quarter of that, where it is the same function; NaN is not
                fitting.setdefault(worst, candidate)
    if fitting:
        return fitting[min(fitting)]
    return (
        "experts whose forward does not compute the weighted sum of down(silu(gate(x)) * up(x)), nor that "
        "with gelu, relu or relu^2, without a gate or with limits that are its attributes"
    )


def _of_two_experts(module: nn.Module, kind: ExpertKind) -> list[Tensor]:
    """W1 (2, N, K), b1 (2, 1, N), W2, b2 of the first and the last expert, in float64."""
    made = []
    for name in kind.weights:
        weight, bias = getattr(module, name), getattr(module, f"{name}_bias", None)
        two = weight[[0, -1]].double()
        two = two if kind.layout == "oi" else two.mT
        made += [two, two.new_zeros(2, 1, two.shape[1]) if bias is None else bias[[0, -1], None].double()]
    return made


def _outputs(module: nn.Module, kind: ExpertKind, x: Tensor) -> Tensor | None:
    """What ``module`` makes of the rows: (rows, H); of experts in groups (2, rows, H), of the first and the
    last. None where it fails."""
    experts, rows = getattr(module, kind.weights[0]).shape[0], len(x)
    try:
        if kind.in_groups:
            given = x.new_zeros(experts, *x.shape)
            given[[0, -1]] = x
            got = type(module).forward(module, given.flatten(0, 1))
            return got.reshape(experts, rows, -1)[[0, -1]] if isinstance(got, Tensor) else None
        index = torch.tensor(_CHOSEN * (rows // 2), device=x.device) * (experts - 1)
        weights = torch.tensor(_WEIGHTS * (rows // 2), device=x.device, dtype=x.dtype)
        got = type(module).forward(module, x, index, weights)
    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
        return None
    return got if isinstance(got, Tensor) else None


def _weighted(y: Tensor, weights: Tensor) -> Tensor:
    """The sums (rows, H) of what the two experts give, (2, rows, H)."""
    chosen = torch.tensor(_CHOSEN * (y.shape[1] // 2), device=y.device)
    own = y[chosen, torch.arange(y.shape[1], device=y.device)[:, None]]  # (rows, 2, H)
    return (own * weights[..., None]).sum(1)


def _numbers(module: nn.Module, ending: str) -> list[float]:
    """The positive numbers among a module's attributes whose names end so."""
    found = [value for name, value in vars(module).items() if name.endswith(ending)]
    return sorted({float(v) for v in found if isinstance(v, int | float) and 0 < v < math.inf})


def _candidates(module: nn.Module, kind: ExpertKind, limits: list[float]) -> Iterator[ExpertKind]:
    if not kind.gated:
        yield from (replace(kind, activation=name) for name in _ACTIVATIONS)
        return
    for interleaved in (False, True):
        own = replace(kind, interleaved=interleaved)
        yield from (replace(own, activation=name) for name in _GATES.values())
        for params in product(limits, {1.0, *_numbers(module, "alpha")}, (0.0, 1.0)):
            yield replace(own, activation="clamped_swiglu", params=params)


def _product(x: Tensor, error: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x W^T + b, its error): that of x and those of float32 sums, which add up as independent ones do, so
    that they stay small beside sums of many terms, and the result's own rounding. ``eps``: of the dtype."""
    y, sums = x @ w.mT + b, torch.finfo(torch.float32).eps
    rounded = _OPERANDS[torch.get_float32_matmul_precision()] if eps == sums else 0.0
    spread = error.square() + (sums**2 * x.shape[-1] + 2 * rounded**2) * x.square()
    return y, (spread @ w.square().mT).sqrt() + eps * (y.abs() + b.abs())


def _hidden(kind: ExpertKind, u: Tensor, error: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(a(u), its error) for an ``error`` of u."""
    if not kind.gated:
        acted = _ACTIVATIONS[kind.activation](u)
        return acted, _steep(kind, u) * (error + eps * u.abs()) + eps * acted.abs()
    (gate, up), (of_gate, of_up) = (
        (each[..., ::2], each[..., 1::2]) if kind.interleaved else each.chunk(2, -1) for each in (u, error)
    )
    if kind.params:
        limit, alpha, offset = kind.params
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + offset
        acted = gate * torch.sigmoid(alpha * gate)
    else:
        acted = _ACTIVATIONS[next(n for n, name in _GATES.items() if name == kind.activation)](gate)
    of_acted = _steep(kind, gate) * (of_gate + eps * gate.abs()) + eps * acted.abs()
    return acted * up, of_acted * up.abs() + acted.abs() * (of_up + 2 * eps * up.abs())


def _steep(kind: ExpertKind, u: Tensor) -> Tensor | float:
    """The slope, which is at most 1.13 for gelu, 1.1 for silu at any alpha, and 2 u for relu^2."""
    return 2 * u.abs() if kind.activation in ("srelu", "sreglu") else 1.13
