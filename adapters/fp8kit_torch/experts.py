"""Experts as libraries keep them, in arrays of three dimensions: their products with sizes on the device, and
what ``convert`` puts in the place of transformers' expert modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8kit import inspection
from fp8kit.autocast import current, traced_state
from fp8kit.errors import ShapeError, UnsupportedError, on_behalf_of
from fp8kit.layers.base import spec_object
from fp8kit.lru import LRU, SHAPES
from fp8kit.ops.activation import activation
from fp8kit.ops.expert_linear import expert_linear
from fp8kit.ops.permute import expert_rows, permute, unpermute
from fp8kit.ops.values import check_groups
from fp8kit.quantization import Quantization
from fp8kit_torch import recompute
from fp8kit_torch.arguments import autocast_dtype, want_input
from fp8kit_torch.autocast import recipe_key
from fp8kit_torch.bound import validate
from fp8kit_torch.call import apply, prepare, run
from fp8kit_torch.converted import Converted, _Bare, standing_for
from fp8kit_torch.expert_kinds import ExpertKind, kind_of
from fp8kit_torch.main_grad import StackedMainGrads
from fp8kit_torch.side_by_side import want_unchanged
from fp8kit_torch.specs import any_rows, expert_text, spec_for
from fp8kit_torch.views import FLOATS, as_view

if TYPE_CHECKING:
    from fp8kit_torch.grouped_linear import GroupedLinear


def expert_product(
    x: Tensor,
    sizes: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: tuple[str, str],
    layout: str = "oi",
    said: str = "",
    slots: int = 0,
    read: Sequence[Tensor] = (),
    main: StackedMainGrads | None = None,
    owner: GroupedLinear | None = None,
    first: bool | None = None,
    codes: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """y[r] = x[r] W_e^T + b_e, under the autocast in force: x (rows, K), sizes int32 (E,), weight (E, N, K),
    or with ``layout`` "io" (E, K, N), bias (E, N) or None. ``layer``: class and name, by which recipes know
    it; ``said``: what errors call it instead; ``slots``: see ``moe.grouped_dense``. ``read``: the parameters
    that ``weight`` consists of where they are, which may not change until backward has read them;
    ``main``: where the weight's gradient goes, eagerly. ``owner``: the module whose weights micro-batches may
    share in FP8, and checkpoints keep; ``first``: whether this is a step's first one; None: they do not.
    ``codes``: of the weight, where it is held in FP8, and the autocast wants them.
    UnsupportedError for recipes that ``expert_linear`` does not carry out, and while calibrating."""
    experts, out, features = weight.shape
    fields = (experts, features, out, layout) if layout == "oi" else (experts, out, features, layout)
    idle = True
    if not torch.compiler.is_compiling():
        idle = recompute.idle()  # so that a checkpoint's recompute passes find the autocast of the first
        inspection.unseen(layer[1] or layer[0])
    inputs = {"x": x, "group_sizes": sizes, "weight": weight, "bias": bias}
    spec, fp8 = spec_in_force(fields, layer, said, slots, main is not None)
    if codes is not None:
        if not idle and recompute.recall(owner) is None:
            recompute.keep(owner, None, None)
        inputs |= codes
        spec = _spec(said, fields, fp8, slots, True, main is not None)
    elif torch.compiler.is_compiling():
        if owner is not None and first is not None:
            spec, held = owner.traced_weights(first, weight, spec)
            inputs |= held
    elif owner is not None and fp8 is not None and not (idle and first is None):
        validate(expert_linear, spec, {name: t for name, t in inputs.items() if t is not None})
        if not sizes.is_cuda:
            check_groups(expert_linear.name, "m_splits", as_view(sizes), x.shape[:-1].numel(), slots)
        held = owner.shared_weights(first, weight, fp8)
        if held is not None:
            inputs |= held
            spec = _spec(said, fields, fp8, slots, True, main is not None)
    if main is None and codes is None:
        y = apply(expert_linear, spec, inputs)["y"]
    else:
        if main is not None:
            main.made_by(spec, weight.dtype)
        there = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        y = run(*prepare(expert_linear, spec, there), main=main)["y"]
    if read and x.requires_grad and (fp8 is None or fp8.dgrad.compute == "high_precision"):
        want_unchanged(y, read)
    return y


def spec_in_force(
    fields: tuple[Any, ...], layer: tuple[str, str], said: str = "", slots: int = 0, wide: bool = False
) -> tuple[Any, Quantization | None]:
    """The spec of these first ``fields`` under the autocast in force, within ``torch.compile`` its text; and
    how it is quantised, None in high precision and within ``torch.compile``. For the others see
    ``expert_product``."""
    compiling = torch.compiler.is_compiling()
    state = traced_state() if compiling else current()
    if state is not None and state.calibrating and not state.enabled:
        raise UnsupportedError(layer[0], "calibrating", True, "False: experts have no state of scales")
    if state is None or not state.enabled:
        return spec_for("ExpertLinearSpec", *fields, None, slots), None
    if compiling:
        return expert_text(fields, recipe_key(state), layer, slots), None
    own = state.recipe.for_layer(*layer)
    said = said or " ".join((layer[0], *([repr(layer[1])] if layer[1] else [])))
    if own is not None and own.history is not None:
        raise UnsupportedError(said, "recipe", own.short_name(), _NO_HISTORY)
    fp8 = None if own is None else own.quantization
    return _spec(said, fields, fp8, slots, False, wide), fp8


def expert_numbers(index: Tensor) -> Tensor:
    """Numbers of experts in int32, what it does not hold as one that no expert has."""
    if index.dtype is torch.int32:
        return index
    if index.dtype in _WIDE:
        index = index.to(torch.int64).clamp(-(2**31), 2**31 - 1)
    return index.to(torch.int32)


_WIDE = (torch.int64, torch.uint32, torch.uint64)


def _spec(
    said: str, fields: tuple[Any, ...], fp8: Quantization | None, slots: int, cached: bool, wide: bool
) -> Any:
    """``ExpertLinearSpec``, by the identity of ``fp8``, whose hash takes longer than a call's look-ups."""
    key = fields, id(fp8), slots, cached, wide
    found = _specs.get(key)
    if found is None:
        with on_behalf_of(said):
            spec = spec_object("ExpertLinearSpec", *fields, fp8, slots, cached, wide)
        found = _specs.put(key, (spec, fp8))  # fp8 is held: its identity counts
    return found[0]


_specs: LRU[Any, tuple[Any, Quantization | None]] = LRU(SHAPES, name="torch: experts")


_NO_HISTORY = (
    "a recipe whose scales follow from the data, as sizes of groups are on the device: "
    "autocast(recipe=Float8CurrentScaling()) or Float8BlockScaling(), or recipe.PerLayer, which gives the "
    "experts one of them and other layers another (delayed scaling is autocast's default)"
)


class ConvertedExperts(Converted, _Bare):
    """Experts y = sum over a token's experts e of p_e (W2_e a(W1_e x + b1_e) + b2_e), with the plain module's
    parameters; ``kind`` says how they lie and what a is. FP8 under ``autocast``, with recipes whose scales
    follow from the data. Nothing waits for the device."""

    takes_name = True  # of name_layers

    def __init__(self, plain: nn.Module, kind: ExpertKind) -> None:
        super().__init__()
        self.adopt(plain)
        for name in ("weight", "bias"):
            delattr(self, name)
        for name, own in plain.named_parameters(recurse=False):
            self.register_parameter(name, own)
        self.name, self.kind = "", kind

    def forward(self, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        """``hidden_states``: (tokens, H). ``routing``, or by the plain module's names for them: integers
        (tokens, k), experts, those out of [0, E) none; floating (tokens, k), their weights. Returns
        (tokens, H)."""
        given = (*routing, *(named.pop(name) for name in self.kind.routing[len(routing) :] if name in named))
        if named or len(given) != 2:
            wanted = f"hidden_states, {', '.join(self.kind.routing)}"
            raise TypeError(f"{type(self).__name__}.forward() takes {wanted}")
        return self._experts(hidden_states, *given)

    def _experts(self, x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
        kind = self.kind
        biased = [f"{name}_bias" for name in kind.weights] if kind.biased else []
        parts = [getattr(self, name) for name in (*kind.weights, *biased)]
        experts, *sides = parts[0].shape
        wide, features = sides if kind.layout == "oi" else reversed(sides)
        x = want_input("Experts", "hidden_states", x, features)
        given, cast = x.dtype, autocast_dtype(x)
        if cast is not None:
            x, *parts = (t.to(cast) for t in (x, *parts))
        rows, like = any_rows(index.numel(), x)
        inputs = {"routing": expert_numbers(index), "like": like}
        made = apply(expert_rows, spec_for("ExpertRowsSpec", experts, rows, 1), inputs)
        row_map, sizes = made["row_map"], made["sizes"]
        y = apply(permute, spec_for("PermuteSpec"), {"x": x, "row_map": row_map})["y"]
        for i, name in enumerate(kind.weights):
            if i:
                y = y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if kind.interleaved else y
                y = apply(
                    activation, spec_for("ActivationSpec", kind.activation, wide, kind.params), {"x": y}
                )["y"]
            bias = parts[2 + i] if biased else None
            y = expert_product(y, sizes, parts[i], bias, self._layer(name), kind.layout, self._said(name))
        back = {"x": y, "row_map": row_map}
        if weights is None:
            tokens, back["like"] = any_rows(x.shape[0], x)
            return apply(unpermute, spec_for("UnpermuteSpec", tokens), back)["y"].to(given)
        back["probs"] = weights if weights.dtype in FLOATS else weights.float()
        return apply(unpermute, spec_for("UnpermuteSpec", -1), back)["y"].to(given)

    def _layer(self, part: str) -> tuple[str, str]:
        """Class and name of a product. Layers share what is compiled for them: there the name is left out
        where the recipe does not ask for it."""
        if torch.compiler.is_compiling():
            state = traced_state()
            if state is None or not state.recipe.by_layer:
                return "GroupedLinear", ""
        return "GroupedLinear", f"{self.name}.{part}" if self.name else part

    def _said(self, part: str) -> str:
        """What errors call a product; compiled, nothing, so that layers share what is compiled."""
        if torch.compiler.is_compiling():
            return ""
        return f"the experts {self.name!r} ({part})" if self.name else f"the experts ({part})"

    def extra_repr(self) -> str:
        """The sizes of the experts, and their activation."""
        (experts, *first), second = (getattr(self, name).shape for name in self.kind.weights)
        features, inner = first[self.kind.layout == "oi"], second[2 if self.kind.layout == "oi" else 1]
        own = f"experts={experts}, in_features={features}, ffn_features={inner}"
        return f"{own}, activation={self.kind.activation!r}"


class ConvertedGroups(ConvertedExperts):
    """``ConvertedExperts`` that are given as many rows each, Llama 4's: every token for every expert, times 0
    where the router does not send it there. Without biases such rows, and their gradients, are 0, and are not
    computed."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """``hidden_states``: (E * rows, H), the first expert's rows first. Returns as many."""
        experts = getattr(self, self.kind.weights[0]).shape[0]
        rows = hidden_states.shape[0]
        if rows % experts:
            raise ShapeError(
                "Experts", "hidden_states", tuple(hidden_states.shape), f"(a multiple of {experts}, H)"
            )
        index = torch.arange(rows, device=hidden_states.device, dtype=torch.int32) // (rows // experts or 1)
        if not self.kind.biased:
            index = torch.where((hidden_states != 0).any(-1), index, -1)
        return self._experts(hidden_states, index[:, None], None)


def experts_replacement(module: nn.Module) -> Callable[[], nn.Module] | str | None:
    """What makes the module that takes the place of experts, or why they stay; None for a module that has not
    their parameters."""
    found = kind_of(module)
    if not isinstance(found, ExpertKind):
        return found
    ours = standing_for(ConvertedGroups if found.in_groups else ConvertedExperts, type(module))
    return lambda: ours(module, found)
