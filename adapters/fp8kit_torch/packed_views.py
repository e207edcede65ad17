"""Queries, keys and values that are views of one tensor, which attention reads as it lies: no copy of its
parts is made. Gradients go the way of the parts. ``separate`` gives the parts again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fp8kit.ops.attention_spec import AttentionSpec
from fp8kit_torch.torch_compat import base as base_of

Found = tuple[Tensor | None, Tensor | None, Tensor | None, int]


class _Layout(NamedTuple):
    """Where parts lie in a row of ``whole`` elements: each ``starts`` somewhere, its (heads, features of a
    head) ``widths``, head after head by these ``steps``."""

    whole: int
    starts: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]


def packed_views(
    q: Any, k: Any, v: Any, leading: int, heads: int, groups: int, dims: tuple[int, int]
) -> Found | None:
    """(query_layer, kv_layer, qkv_layer, qkv_interleave_dim), the first two or the third one None, where k
    and v, perhaps q too, are the parts of one contiguous tensor; None otherwise.

    ``leading``: dimensions before those of heads, which are one (h d) or two (h, d); ``heads``, ``groups``:
    of q, and of k and v; ``dims``: of a head of q and k, and of v.
    """
    base = _base_of(k, v)
    if base is None:
        return None
    d, d_v = dims
    widths, steps = ((heads, d), (groups, d), (groups, d_v)), (d, d, d_v)
    if _base_of(k, q) is base:
        layout = _Layout(
            (heads + groups) * d + groups * d_v, (0, heads * d, (heads + groups) * d), widths, steps
        )
        if _lie(base, (q, k, v), leading, layout):
            return None, None, _Whole.apply(base, leading, layout, q, k, v), -3
        step = 2 * d + d_v
        layout = _Layout(heads * step, (0, d, 2 * d), widths, (step, step, step))
        if heads == groups and _lie(base, (q, k, v), leading, layout):
            return None, None, _Whole.apply(base, leading, layout, q, k, v), -2
    layout = _Layout(groups * (d + d_v), (0, groups * d), widths[1:], steps[1:])
    if _lie(base, (k, v), leading, layout):
        return q, _Whole.apply(base, leading, layout, k, v), None, -3
    return None


def _base_of(*views: Any) -> Tensor | None:
    """The tensor that all of them are views of."""
    base = base_of(views[0]) if type(views[0]) is Tensor else None
    if base is None or type(base) not in (Tensor, Parameter) or not base.is_contiguous():
        return None
    alike = all(type(view) is Tensor and base_of(view) is base and view.dtype is base.dtype for view in views)
    return base if alike else None


def _lie(base: Tensor, views: Sequence[Tensor], leading: int, layout: _Layout) -> bool:
    """Whether the views are the parts of ``base`` in this layout."""
    lead, (whole, *rest) = views[0].shape[:leading], layout
    if base.numel() != math.prod(lead) * whole:
        return False
    strides = [whole * math.prod(lead[i + 1 :]) for i in range(leading)]
    for view, start, (count, width), step in zip(views, *rest, strict=True):
        if view.storage_offset() - base.storage_offset() != start or view.shape[:leading] != lead:
            return False
        apart = view.ndim == leading + 2
        if not apart and (view.ndim != leading + 1 or step != width):
            return False
        inner, wanted = ((count, width), (step, 1)) if apart else ((count * width,), (1,))
        if view.shape[leading:] != inner or not _strided(view, (*strides, *wanted)):
            return False
    return True


def _strided(view: Tensor, wanted: Sequence[int]) -> bool:
    """Whether it has these strides, where it has more than one element along a dimension."""
    pairs = zip(view.shape, view.stride(), wanted, strict=True)
    return all(count == 1 or own == other for count, own, other in pairs)


def separate(spec: AttentionSpec, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """q (..., h, d), k (..., g, d) and v (..., g, d_v) of an attention's inputs, however they lie; views,
    where these are."""
    heads, groups, d, d_v = spec.num_heads, spec.num_gqa_groups, spec.head_dim, spec.head_dim_v
    lead = 1 if spec.packed else 2
    if spec.layout == "separate":
        parts = [inputs[name] for name in "qkv"]
    elif spec.layout == "q_kv":
        parts = [inputs["q"], *inputs["kv"].flatten(lead).split([groups * d, groups * d_v], -1)]
    elif spec.interleaved:
        whole = inputs["qkv"].flatten(lead).unflatten(-1, (heads, 2 * d + d_v))
        parts = list(whole.split([d, d, d_v], -1))
    else:
        parts = list(inputs["qkv"].flatten(lead).split([heads * d, groups * d, groups * d_v], -1))
    sizes = ((heads, d), (groups, d), (groups, d_v))
    return [part.reshape(*part.shape[:lead], *size) for part, size in zip(parts, sizes, strict=True)]


class _Whole(torch.autograd.Function):
    """``base`` as rows of its parts, which stand for it in autograd."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, leading: int, layout: _Layout, *parts: Tensor) -> Tensor:
        ctx.layout, ctx.shapes = layout, [part.shape for part in parts]
        return base.detach().view(*parts[0].shape[:leading], layout.whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (_, *rest) = grads, ctx.layout
        made = []
        for shape, start, (count, width), step in zip(ctx.shapes, *rest, strict=True):
            size, strides = (*grad.shape[:-1], count, width), (*grad.stride()[:-1], step, 1)
            made.append(grad.as_strided(size, strides, grad.storage_offset() + start).reshape(shape))
        return None, None, None, *made
