"""Mixture of experts on the native tape: the router, tokens to rows by expert, grouped products, and back.

Names and rules are Transformer Engine's; the kernels and operations are those of the other frontends
(``fp8kit.ops.router``, ``fp8kit.ops.permute``). Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fp8kit import arrays, formats, inspection
from fp8kit.arguments import choice, integer, listed, shown
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.autocast import current
from fp8kit.autograd import Tensor, apply, tensor, validate
from fp8kit.errors import ArgumentError, FormatError, ShapeError, UnsupportedError, on_behalf_of
from fp8kit.layers.base import spec_object
from fp8kit.layers.grouped import host_sizes
from fp8kit.nn.module import as_tensor
from fp8kit.ops import router as ops
from fp8kit.ops.expert_linear import EXPERT_ARGUMENTS, expert_linear, want_sizes
from fp8kit.ops.permute import MAP_ARGUMENTS, dispatch_rows, expert_rows, permute, unpermute, want_chunks
from fp8kit.ops.scaled_activation import scaled_activation, want_row_probs
from fp8kit.ops.values import check_groups
from fp8kit.quantization import Quantization

__all__ = [
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "grouped_dense",
    "scaled_swiglu",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
]


@on_behalf_of("fused_topk_with_score_function")
def fused_topk_with_score_function(
    logits: Any,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Any = None,
) -> tuple[Tensor, Tensor]:
    """(probs, routing_map): each token's probabilities, 0 for experts that are not chosen, and its choice.

    * ``logits``: h (..., E), E at most 1024. ``topk``: experts of a token.
    * ``score_function``: "softmax", over the chosen logits, or with ``use_pre_softmax`` over all before top-k
      (not normalised again); "sigmoid" or "sqrtsoftplus", divided by their sum over the chosen + 1e-20 where
      ``topk`` is above 1.
    * ``num_groups``, ``group_topk``: experts lie in groups of equal size, by the sum of whose ``topk /
      group_topk`` largest scores ``group_topk`` groups are kept (DeepSeek-V3). None for no groups.
    * ``scaling_factor``: of the probabilities; None is 1.
    * ``expert_bias``: float32 (E,), added to the scores for the choice alone; with "sigmoid" and
      "sqrtsoftplus".

    probs: h (..., E) like logits, differentiable in logits; routing_map: uint8 (..., E), 1 for the chosen. Of
    equal scores the lowest expert is chosen first. Raises ShapeError, FormatError and ArgumentError.
    """
    x = as_tensor("router", "logits", logits)
    fields = ops.router_fields(
        x, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function
    )
    bias = None if expert_bias is None else as_tensor("router", "expert_bias", expert_bias)
    out = apply(ops.router, spec_object("RouterSpec", *fields), {"logits": x, "expert_bias": bias})
    return out["probs"], out["chosen"]


@on_behalf_of("fused_compute_score_for_moe_aux_loss")
def fused_compute_score_for_moe_aux_loss(
    logits: Any, topk: int, score_function: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """(routing_map, scores) for ``fused_moe_aux_loss``: a plain top-k, uint8 (..., E), and float32 (..., E):
    softmax over all experts, or s / (sum of all s + 1e-20). Arguments as
    ``fused_topk_with_score_function``."""
    x = as_tensor("router", "logits", logits)
    fields = ops.router_fields(x, topk, False, None, None, None, score_function, dense=True)
    out = apply(ops.router, spec_object("RouterSpec", *fields), {"logits": x})
    return out["chosen"], out["probs"]


@on_behalf_of("fused_moe_aux_loss", counts="tokens_per_expert")
def fused_moe_aux_loss(
    probs: Any, tokens_per_expert: Any, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """coeff E / (topk T^2) times the sum of probs[t, e] tokens_per_expert[e]: a scalar of probs' dtype
    (Switch Transformer, Fedus et al. 2021).

    ``probs``: h (tokens, E), with E = ``num_experts``; ``tokens_per_expert``: int32, int64 or float32 (E,);
    ``total_num_tokens``: T. Differentiable in probs. Raises ShapeError, FormatError and ArgumentError.
    """
    x, counts = (
        as_tensor("moe_aux_loss", "probs", probs),
        as_tensor("moe_aux_loss", "tokens_per_expert", tokens_per_expert),
    )
    factor = ops.aux_loss_factor("moe_aux_loss", x.shape, total_num_tokens, num_experts, topk, coeff)
    spec = spec_object("AuxLossSpec", factor)
    return apply(ops.moe_aux_loss, spec, {"probs": x, "counts": counts})["loss"].reshape(())


def token_dispatch(
    inp: Any,
    routing_map: Any,
    num_out_tokens: int,
    probs: Any = None,
    align_size: int | None = None,
    num_experts: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, None, Tensor]:
    """(rows by expert, their probabilities or None, row_id_map, None, tokens_per_expert).

    * ``inp``: h (tokens, hidden).
    * ``routing_map``: a mask, bool or integer (tokens, E), not 0 where the token goes to the expert; or with
      ``num_experts`` indices, integer (tokens, k), but for bool and uint8, which stay masks. Rows of an
      expert keep the order of their tokens.
    * ``num_out_tokens``: number of rows; those behind the last expert's are 0, more are dropped. With
      ``align_size`` each expert's rows are filled up with zeros to a multiple of it, and there are as many
      rows as that can need: num_out_tokens + E (align_size - 1), rounded down to a multiple.
    * ``probs``: h (tokens, E), or (tokens, k) for indices; they go along.

    row_id_map: int32 (rows, 2), what ``token_combine`` takes; tokens_per_expert: int32 (E,), padding with
    them, on the device. Differentiable in inp and probs. Raises ShapeError, FormatError and ArgumentError.
    """
    x, routing = (
        as_tensor("token_dispatch", "inp", inp),
        as_tensor("token_dispatch", "routing_map", routing_map),
    )
    routing = _as_routing(routing, num_experts is None)
    experts, rows, align = dispatch_rows(x, routing, num_out_tokens, align_size, num_experts)
    weights = None if probs is None else as_tensor("token_dispatch", "probs", probs)
    if weights is not None and weights.shape != routing.shape:
        wanted = f"{routing.shape}, as routing_map"
        raise ShapeError("token_dispatch", "probs", f"shape {weights.shape}", wanted)
    with on_behalf_of("token_dispatch", **MAP_ARGUMENTS):
        made = apply(expert_rows, spec_object("ExpertRowsSpec", experts, rows, align), {"routing": routing})
        inputs = {"x": x, "row_map": made["row_map"], "probs": weights}
        out = apply(permute, spec_object("PermuteSpec", probs is not None), inputs)
    return out["y"], out.get("row_probs"), made["row_map"], None, made["sizes"]


def _as_routing(routing: Tensor, is_mask: bool) -> Tensor:
    """A map of bools or integers of any width as the operation takes them: uint8 for a mask, int32 for
    indices. FormatError for others."""
    kind = routing.dtype
    if kind is formats.uint8 or (kind is formats.int32 and not is_mask):
        return routing
    native = arrays.native(routing.view)
    if native.dtype.kind not in "biu":
        raise FormatError("token_dispatch", "routing_map", kind.name, "bool or integers")
    if is_mask or kind is formats.bool_:
        return Tensor(arrays.as_view((native != 0).astype(np.uint8)))
    return Tensor(_as_int32(native))  # what is no expert stays none


def _as_int32(native: Any) -> ArrayView:
    """Integers of any width as int32, those that it does not hold as its least or largest."""
    own, held = np.iinfo(native.dtype), np.iinfo(np.int32)
    bounds = max(own.min, held.min), min(own.max, held.max)
    return arrays.as_view(native.clip(*bounds).astype(np.int32))


def grouped_dense(
    x: Any,
    kernel: Any,
    group_sizes: Any,
    bias: Any = None,
    layout: str = "io",
    slots: int = 0,
    *,
    name: str | None = None,
) -> Tensor:
    """y[r] = x[r] kernel[e] + bias[e] for the rows r of group e; rows of no group, behind the last one's, are
    0, and what lies there in x, and in y's gradient, counts in no scale.

    * ``x``: h (M, K), rows of group 0 first; ``kernel``: h (E, K, N), or with ``layout`` "oi" (E, N, K), as
      weights of ``Linear`` lie; ``bias``: h (E, N) or None; all of one h.
    * ``group_sizes``: integers (E,), on the device; nothing waits for it. What they claim beyond M does not
      count on a GPU; on the CPU, where they are looked at, it is an ArgumentError, as a negative one is.
    * ``slots``: not 0 where group e has rows e * slots ... of x, of which its first ``group_sizes[e]`` count,
      as in decoding; M is then E * slots.
    * ``name``: what ``recipe.CustomRecipe`` and ``recipe.PerLayer`` call the layer, a "GroupedLinear".

    The autocast in force says how operands are quantised: recipes whose scales follow from the data, per
    tensor (each kernel has its own), per row, by blocks of 128. Sums are in float32. Differentiable in x,
    kernel and bias. Returns h (M, N). Raises ShapeError, FormatError, ArgumentError and UnsupportedError.
    """
    op = "grouped_dense"
    choice(op, "layout", layout, ("io", "oi"))
    slots = integer(op, "slots", slots, 0, 2**31 - 1)
    if not (name is None or isinstance(name, str)):
        raise ArgumentError(op, "name", shown(name), "a text or None")
    weight = as_tensor(op, "kernel", kernel)
    inputs = {"x": as_tensor(op, "x", x), "weight": weight}
    if len(weight.shape) != 3:
        raise ShapeError(op, "kernel", f"shape {weight.shape}", "(experts, in, out), or as layout says")
    sizes = as_tensor(op, "group_sizes", group_sizes).view
    inputs["group_sizes"] = Tensor(device_sizes(op, "group_sizes", sizes, weight.shape[0], sizes.device))
    if bias is not None:
        inputs["bias"] = as_tensor(op, "bias", bias)
    with on_behalf_of(op, **EXPERT_ARGUMENTS):
        return expert_product(op, inputs, layout, slots, name or "")[0]


def expert_product(
    op: str,
    inputs: dict[str, Any],
    layout: str,
    slots: int,
    name: str,
    cached: Callable[[Quantization], Mapping[str, Any]] | None = None,
) -> tuple[Tensor, bool]:
    """y of the operation ``expert_linear`` under the autocast in force, and whether x's gradient is made of
    the weight itself, as it is then, and not of codes. ``inputs``: Tensors by the operation's names;
    ``name``: by which recipes know the layer, a "GroupedLinear"; ``op``: what errors call it; ``cached``:
    what gives the weight in FP8, where micro-batches share it.
    UnsupportedError while calibrating, and of the operation's for recipes that it does not carry out."""
    inspection.unseen(name or "GroupedLinear")
    how = spec_in_force(op, inputs["weight"].shape, layout, slots, name)
    spec, fp8 = spec_object("ExpertLinearSpec", *how), how[-2]
    if cached is not None and fp8 is not None:
        validate(expert_linear, spec, inputs)  # a cast is kept, but not for what is refused
        rows = math.prod(inputs["x"].shape[:-1])
        check_groups(expert_linear.name, "m_splits", inputs["group_sizes"].view, rows, slots)
        spec = spec_object("ExpertLinearSpec", *how, True)
        inputs |= cached(fp8)
    reads = fp8 is None or fp8.dgrad.compute == "high_precision"
    return apply(expert_linear, spec, inputs)["y"], reads


def spec_in_force(op: str, weight: Shape, layout: str, slots: int, name: str) -> tuple[Any, ...]:
    """Returns the first fields of the operation's spec for a ``weight`` of this shape, up to ``slots``, under
    the autocast in force. For the others, and what is refused, see ``expert_product``."""
    state, fp8 = current(), None
    if state is not None and state.calibrating and not state.enabled:
        raise UnsupportedError(op, "calibrating", True, "False: experts have no state of scales")
    if state is not None and state.enabled:
        own = state.recipe.for_layer("GroupedLinear", name)
        fp8 = None if own is None else own.quantization
    experts, *sides = weight
    if layout == "oi":
        sides.reverse()
    return experts, *sides, layout, fp8, slots


def device_sizes(operation: str, name: str, values: Any, groups: int, device: Device) -> ArrayView:
    """Numbers of rows, a list or a view, as operations take them: int32 on ``device``, a view unread."""
    if isinstance(values, ArrayView):
        sizes = values
    else:
        sizes = arrays.as_view(np.array(host_sizes(operation, values, name), np.int32))
    want_sizes(operation, name, Tensor(sizes), sizes.dtype.numpy.kind in "iu", sizes.shape, groups)
    sizes = arrays.to(arrays.contiguous(sizes), device)
    if sizes.dtype is formats.int32:
        return sizes
    return _as_int32(arrays.provider(device).native(sizes))


def scaled_swiglu(inp: Any, probs: Any) -> Tensor:
    """SwiGLU whose rows are multiplied by probabilities (Transformer Engine's ScaledSwiGLU): silu(gate) up of
    ``inp`` h (..., 2 F), the gate's half first, rounded to its dtype, times ``probs``, h of any type, of
    inp's shape without the last dimension. Returns h (..., F). Differentiable in both. Raises ShapeError and
    FormatError."""
    op = "scaled_swiglu"
    x, weights = as_tensor(op, "inp", inp), as_tensor(op, "probs", probs)
    features = want_row_probs(op, x.shape, weights.shape)
    spec = spec_object("ScaledActivationSpec", "swiglu", features)
    with on_behalf_of(op, x="inp"):
        return apply(scaled_activation, spec, {"x": x, "probs": weights.reshape(-1)})["y"]


def token_combine(
    inp: Any, row_id_map: Any, merging_probs: Any = None, num_tokens: int | None = None
) -> Tensor:
    """The sum of each token's rows, times ``merging_probs`` where they are there: h (tokens, hidden), in
    float32, rounded once.

    ``inp``: h (rows, hidden); ``row_id_map``: as ``token_dispatch`` gave it; ``merging_probs``: h (tokens, E
    or k), or None with ``num_tokens``. Raises ShapeError, FormatError and ArgumentError.
    """
    x, row_map = as_tensor("token_combine", "inp", inp), as_tensor("token_combine", "row_id_map", row_id_map)
    weights = None if merging_probs is None else as_tensor("token_combine", "merging_probs", merging_probs)
    if weights is None and num_tokens is None:
        raise ShapeError("token_combine", "num_tokens", None, "the number of tokens, without merging_probs")
    tokens = -1 if num_tokens is None else integer("token_combine", "num_tokens", num_tokens, 0, 2**31 - 1)
    spec = spec_object("UnpermuteSpec", tokens)
    with on_behalf_of("token_combine", probs="merging_probs", **MAP_ARGUMENTS):
        return apply(unpermute, spec, {"x": x, "row_map": row_map, "probs": weights})["y"]


def sort_chunks_by_index(inp: Any, split_sizes: Any, sorted_indices: Any) -> Tensor:
    """``inp`` cut into chunks of ``split_sizes`` rows, put together again in the order ``sorted_indices``.

    ``inp``: h (rows, hidden); ``split_sizes``: a list of ints that sum to rows; ``sorted_indices``: a list,
    a permutation of the chunks. Raises ShapeError and ArgumentError.
    """
    op = "sort_chunks_by_index"
    x = as_tensor(op, "inp", inp)
    if len(x.shape) != 2:
        raise ShapeError(op, "inp", f"shape {x.shape}", "(rows, hidden)")
    named = {"split_sizes": split_sizes, "sorted_indices": sorted_indices}
    sizes, order = (
        [integer(op, name, n, 0, 2**31 - 1) for n in listed(op, name, values, "a list of ints")]
        for name, values in named.items()
    )
    want_chunks(op, ("split_sizes", "sorted_indices"), sizes, order, x.shape[0])
    chunks = np.split(np.arange(x.shape[0], dtype=np.int32), np.cumsum(sizes)[:-1])
    rows = np.concatenate([chunks[i] for i in order]) if sizes else np.zeros(0, np.int32)
    row_map = tensor(np.stack((rows, np.zeros_like(rows)), 1), device=x.device)
    return apply(permute, spec_object("PermuteSpec"), {"x": x, "row_map": row_map})["y"]
