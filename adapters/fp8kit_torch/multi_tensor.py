"""``multi_tensor_*``: what Megatron and NeMo do to many tensors at once, under Transformer Engine's names and
with its argument order.

Each takes ``chunk_size`` (accepted; there are no chunks here), ``noop_flag``, an integer tensor (1,) on the
device, lists of tensors, and numbers. Where ``noop_flag`` is not 0, optimisers change nothing; scaling sets
it to 1 where it meets Inf or NaN. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fp8kit import formats
from fp8kit.arguments import flag, function, integer, number
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, BackendError, FormatError, ShapeError
from fp8kit.float8 import quantize
from fp8kit_torch import torch_compat
from fp8kit_torch.checks import Rule, check, is_scalar, named, optional, probability, shown
from fp8kit_torch.fused_optimizer import NO_CORRECTION, AdamNumbers, adam_
from fp8kit_torch.state import stream_of
from fp8kit_torch.views import FLOATS, as_view

Lists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """``applier(op, noop_flag, tensor_lists, *args)`` is ``op(chunk_size, noop_flag, tensor_lists,
    *args)``."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = integer("MultiTensorApply", "chunk_size", chunk_size, 1)

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Lists, *args: Any
    ) -> Any:
        function("multi_tensor_applier", "op", op)
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def _flag(operation: str, name: str, value: Any) -> None:
    if not is_scalar(value) or value.is_meta:
        raise ArgumentError(operation, name, shown(value), "a tensor (1,) on the device")


def _flag_or(rule: Rule) -> Rule:
    """``rule`` for a plain value, ``_flag`` for a tensor."""

    def either(operation: str, name: str, value: Any) -> Any:
        return (_flag if isinstance(value, Tensor) else rule)(operation, name, value)

    return either


_signed = partial(number, least=-math.inf)


_RULES: dict[str, Rule] = {
    **named(number, "epsilon weight_decay momentum dampening"),
    **named(probability, "beta1 beta2"),
    **named(flag, "bias_correction mode per_tensor nesterov first_run wd_after_momentum"),
    "noop_flag": _flag,
    "inv_scale": optional(_flag),
    "lr": _flag_or(number),
    "step": _flag_or(partial(integer, least=1, most=2**63 - 1)),
    "scale": _flag_or(_signed),
    "op": function,
}


def _lists(operation: str, lists: Lists, counts: tuple[int, ...], **beside: Any) -> list[list[Tensor]]:
    """The lists; ShapeError where there are not ``counts`` of them, or they are not alike, or where two
    elements of one of those that are written (all but the first) share their memory; FormatError
    where they are not floating; BackendError where they, and the tensors ``beside`` them, do not lie on one
    device."""
    wanted = f"{' or '.join(map(str, counts))} lists of floating tensors"
    if not isinstance(lists, list | tuple) or not all(isinstance(one, list | tuple) for one in lists):
        raise ArgumentError(operation, "tensor_lists", shown(lists), wanted)
    found = [list(one) for one in lists]
    every = list(chain(*found))
    for t in every:
        dense = isinstance(t, Tensor) and t.layout is torch.strided and not t.is_meta
        if not dense or not t.is_floating_point():
            raise FormatError(operation, "tensor_lists", shown(t), wanted)
    lengths = [len(one) for one in found]
    if len(found) not in counts or len(set(lengths)) > 1:
        got = f"{len(found)} lists of {lengths} tensors"
        raise ShapeError(
            operation, "tensor_lists", got, f"{' or '.join(map(str, counts))} lists of as many tensors each"
        )
    for row in zip(*found, strict=True):
        shapes = [tuple(t.shape) for t in row]
        if len(set(shapes)) > 1:
            raise ShapeError(operation, "tensor_lists", shapes, "the same shape in each list")
    for t in chain(*found[1:]):
        if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
            raise ShapeError(
                operation, "tensor_lists", f"strides {t.stride()}", "memory of its own for each element"
            )
    places = {t.device for t in every}
    if len(places) > 1:
        raise BackendError(
            operation, "tensor_lists", ", ".join(sorted(map(str, places))), "tensors on one device"
        )
    for name, value in beside.items() if places else ():
        if isinstance(value, Tensor) and value.device not in places:
            raise BackendError(
                operation, name, f"device {value.device}", f"device {places.pop()}, as tensor_lists"
            )
    return found


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor
) -> None:
    """out = in * scale, in float32, of lists (in, out); ``scale``: a number, or float32 (1,). ``noop_flag``
    becomes 1 where an element of in is Inf or NaN."""
    check("multi_tensor_scale", _RULES, locals())
    sources, results = _lists("multi_tensor_scale", tensor_lists, (2,), noop_flag=noop_flag, scale=scale)
    wide = [t.float() for t in sources]
    some = [t for t in wide if t.numel()]
    if not some:
        return
    largest = torch.stack(torch_compat.foreach_norm(some, float("inf")))  # Inf or NaN where an element is one
    noop_flag.copy_(torch.where(largest.isfinite().all(), noop_flag, torch.ones_like(noop_flag)))
    factor = scale.reshape(()) if isinstance(scale, Tensor) else float(scale)
    torch_compat.foreach_copy_(results, torch_compat.foreach_mul(wide, factor))


multi_tensor_scale_tensor = multi_tensor_scale


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """(sqrt of the sum of all squares, float32 (1,); that of each tensor, float32 (tensors,), or (0,) without
    ``per_tensor``)."""
    check("multi_tensor_l2norm", _RULES, locals())
    (tensors,) = _lists("multi_tensor_l2norm", tensor_lists, (1,))
    norms = torch.zeros(0, dtype=torch.float32, device=noop_flag.device)
    if tensors:
        norms = torch.stack(torch_compat.foreach_norm([t.float() for t in tensors], 2))
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else norms[:0]


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """``multi_tensor_l2norm`` of the tensors times ``inv_scale``, float32 (1,), which they are not multiplied
    by."""
    check("multi_tensor_unscale_l2norm", _RULES | {"inv_scale": _flag}, locals())
    _lists("multi_tensor_unscale_l2norm", tensor_lists, (1,), inv_scale=inv_scale)
    whole, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    factor = inv_scale.reshape(1).abs()
    return whole * factor, each * factor


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor | None = None,
) -> None:
    """Adam on lists (gradients, parameters, first and second moments) and, of 16-bit parameters, their
    float32 masters.

    ``mode``: 0, weight decay is added to the gradient (L2 regularisation); 1, it is decoupled (AdamW).
    ``bias_correction``: 0, without it. ``lr``, ``step`` and ``inv_scale``, which gradients are multiplied by,
    may be tensors (1,) on the device. See ``FusedAdam`` for the formulas. FormatError for moments or masters
    that are not float32, and for gradients and parameters that are not float32, bfloat16 or float16.
    """
    check("multi_tensor_adam", _RULES, locals())
    op = "multi_tensor_adam"
    lists = _lists(op, tensor_lists, (4, 5), noop_flag=noop_flag, lr=lr, step=step, inv_scale=inv_scale)
    for tensor in chain(*lists[:2]):
        if tensor.dtype not in FLOATS:
            raise FormatError(op, "gradients and parameters", tensor.dtype, "float32, bfloat16 or float16")
    for tensor in chain(*lists[2:]):
        if tensor.dtype is not torch.float32:
            raise FormatError(op, "moments and masters", tensor.dtype, "float32")
    # the kernel writes rows without gaps
    asked, lists = lists, [[t.contiguous() for t in one] for one in lists]
    grads, params, means, squares = lists[:4]
    masters: Sequence[Tensor | None] = lists[4] if len(lists) == 5 else [None] * len(params)
    if not params:
        return
    count: Any = NO_CORRECTION
    if bias_correction:
        count = step.reshape(1).to(torch.int64) if isinstance(step, Tensor) else step
    numbers = AdamNumbers(
        lr,
        (beta1, beta2),
        epsilon,
        float(weight_decay),
        mode != 0,
        count,
        None if inv_scale is None else inv_scale.float().reshape(1),
        (noop_flag.reshape(-1)[:1] != 0).float(),
    )
    adam_(params, grads, (means, squares), masters, numbers)
    for tensor, rows in zip(chain(*asked[1:]), chain(*lists[1:]), strict=True):
        if rows is not tensor:
            tensor.copy_(rows)
    torch.autograd.graph.increment_version(asked[1])


multi_tensor_adam_capturable = multi_tensor_adam_capturable_master = multi_tensor_adam


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """SGD with momentum on lists (gradients, parameters, momenta) and, where there are such, 16-bit copies of
    the parameters.

    In float32: g = scale * gradient, + weight_decay w unless ``wd_after_momentum``; b = g in the
    ``first_run``, else momentum b + (1 - dampening) g; w -= lr (g + momentum b with ``nesterov``, b without,
    + weight_decay w if ``wd_after_momentum``).
    """
    check("multi_tensor_sgd", _RULES | {"lr": number, "scale": _signed}, locals())
    lists = _lists("multi_tensor_sgd", tensor_lists, (3, 4), noop_flag=noop_flag)
    weight_decay, momentum, dampening, lr, scale = map(float, (weight_decay, momentum, dampening, lr, scale))
    live = noop_flag.reshape(-1)[0] == 0
    for i, (grad, param, buffer) in enumerate(zip(*lists[:3], strict=True)):
        w, g = param.float(), grad.float() * scale
        if weight_decay and not wd_after_momentum:
            g = g + weight_decay * w
        if momentum:
            b = g if first_run else momentum * buffer.float() + (1 - dampening) * g
            g = g + momentum * b if nesterov else b
            buffer.copy_(torch.where(live, b, buffer.float()))
        if weight_decay and wd_after_momentum:
            g = g + weight_decay * w
        param.copy_(torch.where(live, w - lr * g, w))
        if len(lists) == 4:
            lists[3][i].copy_(torch.where(live, param.float(), lists[3][i].float()))


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """scale = max_fp8 / max(amax, amax_epsilon), 1 where amax is 0, Inf or NaN, rounded down to a power of
    two with ``force_pow_2_scales``, and scale_inv = 1 / scale, of float32 lists (amax, scale, scale_inv).
    Nothing where ``noop_flag`` is not 0."""
    rules = _RULES | named(number, "max_fp8 amax_epsilon") | {"force_pow_2_scales": flag}
    check("multi_tensor_compute_scale_and_scale_inv", rules, locals())
    op = "multi_tensor_compute_scale_and_scale_inv"
    amaxes, *results = _lists(op, tensor_lists, (3,), noop_flag=noop_flag)
    if any(t.dtype is not torch.float32 for t in chain(amaxes, *results)):
        raise FormatError(op, "tensor_lists", "other dtypes", "float32")
    if not amaxes:
        return
    whole = as_view(torch.cat([t.reshape(-1) for t in amaxes]))
    made = [torch.empty(whole.shape, device=amaxes[0].device) for _ in range(2)]
    kernels, stream = dispatch.kernels(whole.device), stream_of(whole.device)
    how = float(max_fp8), bool(force_pow_2_scales), float(amax_epsilon), formats.float32.max
    kernels.scale_from_amax(whole, *map(as_view, made), *how, stream)
    for targets, values in zip(results, made, strict=True):
        parts = values.split([t.numel() for t in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(torch.where(noop_flag.reshape(()) != 0, target, part.view(target.shape)))


@torch.no_grad()
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: Lists
) -> None:
    """E8M0 bytes of the scales of MXFP8 with E4M3: amax / 448 rounded up to a power of two, of lists (amaxes,
    floating; scales, uint8 of their shape). Nothing where ``noop_flag``, which may be None, is not 0."""
    check("multi_tensor_compute_scale_inv_e8m0", _RULES | {"noop_flag": optional(_flag)}, locals())
    op = "multi_tensor_compute_scale_inv_e8m0"
    (amaxes,) = _lists(op, tensor_lists[:1], (1,), noop_flag=noop_flag)
    targets = list(tensor_lists[1]) if len(tensor_lists) == 2 else []
    if [(t.shape, torch.uint8) for t in amaxes] != [(t.shape, t.dtype) for t in targets]:
        raise ShapeError(op, "tensor_lists", "others", "amaxes, and uint8 tensors of their shapes")
    for amax, target in zip(amaxes, targets, strict=True):
        blocks = torch.zeros(amax.numel(), 32, device=amax.device)
        blocks[:, 0] = amax.reshape(-1)
        codes = quantize(blocks, scaling="mx_1x32", scale_rule="te").scale_codes.view(target.shape)
        target.copy_(codes if noop_flag is None else torch.where(noop_flag.reshape(()) != 0, target, codes))
