"""Experts as libraries keep them, in arrays of three dimensions: their products with sizes on the device, and
what ``convert`` puts in the place of transformers' expert modules (Mixtral, Qwen-MoE, DeepSeek)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fp8kit import inspection
from fp8kit.autocast import current, traced_state
from fp8kit.errors import UnsupportedError, on_behalf_of
from fp8kit.layers.base import spec_object
from fp8kit.ops.activation import activation
from fp8kit.ops.expert_linear import expert_linear
from fp8kit.ops.permute import expert_rows, permute, unpermute
from fp8kit_torch.arguments import autocast_dtype, want_input
from fp8kit_torch.autocast import recipe_parts
from fp8kit_torch.call import apply
from fp8kit_torch.converted import Converted, _Bare, standing_for
from fp8kit_torch.specs import expert_text, spec_for
from fp8kit_torch.views import FLOATS

EXPERTS = ("gate_up_proj", "down_proj")  # (E, 2 F, H) and (E, H, F)


def expert_product(
    x: Tensor, sizes: Tensor, weight: Tensor, bias: Tensor | None, layer: tuple[str, str]
) -> Tensor:
    """y[r] = x[r] W_e^T + b_e, under the autocast in force: x (rows, K), sizes int32 (E,), weight (E, N, K),
    bias (E, N) or None. ``layer``: class and name, by which recipes know it. UnsupportedError for recipes
    that ``expert_linear`` does not carry out, and while calibrating."""
    fields = weight.shape[0], weight.shape[2], weight.shape[1], "oi"
    if not torch.compiler.is_compiling():
        inspection.unseen(layer[1] or layer[0])
    state = traced_state() if torch.compiler.is_compiling() else current()
    if state is not None and state.calibrating and not state.enabled:
        raise UnsupportedError(layer[0], "calibrating", True, "False: experts have no state of scales")
    if state is None or not state.enabled:
        spec = spec_for("ExpertLinearSpec", *fields)
    elif torch.compiler.is_compiling():
        spec = expert_text(fields, recipe_parts(state.recipe), layer)
    else:
        own = state.recipe.for_layer(*layer)
        with on_behalf_of(layer[0]):
            spec = spec_object("ExpertLinearSpec", *fields, None if own is None else own.quantization)
    inputs = {"x": x, "group_sizes": sizes, "weight": weight, "bias": bias}
    return apply(expert_linear, spec, inputs)["y"]


class ConvertedExperts(Converted, _Bare):
    """Gated experts y = sum over a token's experts e of p_e W2_e (silu(G_e x) * (U_e x)), with the plain
    module's parameters: gate_up_proj (E, 2 F, H), G first, and down_proj (E, H, F). FP8 under ``autocast``,
    with recipes whose scales follow from the data. Nothing waits for the device."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.adopt(plain)
        for name in ("weight", "bias"):
            del self._parameters[name]
        for name, own in plain.named_parameters(recurse=False):
            self.register_parameter(name, own)
        self.name = ""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``hidden_states``: (tokens, H); ``top_k_index``: integers (tokens, k), experts, those out of [0, E)
        none; ``top_k_weights``: floating (tokens, k). Returns (tokens, H)."""
        up, down = self.gate_up_proj, self.down_proj
        experts, wide, features = up.shape
        x = want_input("Experts", "hidden_states", hidden_states, features)
        given, cast = x.dtype, autocast_dtype(x)
        if cast is not None:
            x, up, down = (t.to(cast) for t in (x, up, down))
        rows = top_k_index.numel()
        inputs = {"routing": top_k_index.to(torch.int32)}
        made = apply(expert_rows, spec_for("ExpertRowsSpec", experts, rows, 1), inputs)
        row_map, sizes = made["row_map"], made["sizes"]
        own = apply(permute, spec_for("PermuteSpec"), {"x": x, "row_map": row_map})["y"]
        hidden = expert_product(own, sizes, up, None, ("GroupedLinear", f"{self.name}.gate_up_proj"))
        hidden = apply(activation, spec_for("ActivationSpec", "swiglu", wide), {"x": hidden})["y"]
        own = expert_product(hidden, sizes, down, None, ("GroupedLinear", f"{self.name}.down_proj"))
        weights = top_k_weights if top_k_weights.dtype in FLOATS else top_k_weights.float()
        inputs = {"x": own, "row_map": row_map, "probs": weights}
        return apply(unpermute, spec_for("UnpermuteSpec", -1), inputs)["y"].to(given)

    def extra_repr(self) -> str:
        """The sizes of the experts."""
        experts, wide, features = self.gate_up_proj.shape
        return f"experts={experts}, in_features={features}, ffn_features={wide // 2}"


def experts_of(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """gate_up_proj (E, 2 F, H) and down_proj (E, H, F) of a module that has these parameters and no other."""
    own = dict(module.named_parameters(recurse=False))
    if set(own) != set(EXPERTS):
        return None
    up, down = (own[name] for name in EXPERTS)
    wanted = up.ndim == 3 and up.shape[1] % 2 == 0
    return (up, down) if wanted and down.shape == (up.shape[0], up.shape[2], up.shape[1] // 2) else None


def experts_replacement(module: nn.Module, own: Mapping[str, Tensor]) -> Callable[[], nn.Module] | str | None:
    """What makes the module that takes the place of gated experts, or why they stay; None for a module that
    has not their parameters."""
    if set(own) != set(EXPERTS):
        return None
    if (found := experts_of(module)) is None:
        return "experts whose gate_up_proj and down_proj are not (E, 2 F, H) and (E, H, F)"
    up, down = found
    if (
        up.dtype not in FLOATS
        or down.dtype is not up.dtype
        or not (up.is_contiguous() and down.is_contiguous())
    ):
        return "experts whose weights are not contiguous arrays of float32, bfloat16 or float16"
    if "forward" in vars(module) or module._buffers:
        return "experts whose forward was replaced, or that have buffers"
    if up.is_meta:
        return "on the meta device: what its forward computes is not known"
    if not _computes_swiglu(module, up, down):
        return "experts whose forward does not compute the weighted sum of down(silu(gate(x)) * up(x))"
    kind = type(module)
    return lambda: standing_for(ConvertedExperts, kind)(module)


@torch.no_grad()
def _computes_swiglu(module: nn.Module, up: Tensor, down: Tensor) -> bool:
    """Whether two tokens become what gated experts with silu make of them, to the rounding of their dtype."""
    experts, _, features = up.shape
    x = torch.linspace(-1.5, 2.5, features, device=up.device, dtype=torch.float64)
    x = torch.stack((x, x.flip(0).cos())).to(up.dtype)
    index = torch.tensor([[0, experts - 1], [experts - 1, 0]], device=up.device)
    weights = torch.tensor([[0.75, 0.25], [0.5, -1.0]], device=up.device, dtype=up.dtype)
    try:
        got = type(module).forward(module, x, index, weights)
    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
        return False
    total = size = torch.zeros_like(x, dtype=torch.float64)
    for place in range(2):
        w1, w2 = up[index[:, place]].double(), down[index[:, place]].double()
        wide = x.double()[:, None, :]
        gate, other = (wide @ w1.transpose(1, 2)).chunk(2, -1)
        sizes = (wide.abs() @ w1.abs().transpose(1, 2)).chunk(2, -1)
        hidden, factor = nn.functional.silu(gate) * other, weights[:, place, None].double()
        # silu's slope is at most 1.1
        bound = 1.1 * (sizes[0] * (other.abs() + sizes[1]) + gate.abs() * sizes[1]) @ w2.abs().transpose(1, 2)
        total = total + (hidden @ w2.transpose(1, 2))[:, 0] * factor
        size = size + bound[:, 0] * factor.abs()
    if not isinstance(got, Tensor) or got.shape != total.shape:
        return False
    # a few roundings to the dtype on the way, and sums in float32
    terms = features + down.shape[2]
    limit = 8 * torch.finfo(up.dtype).eps + terms * torch.finfo(torch.float32).eps
    return bool(((got.double() - total).abs() <= limit * size).all())
