"""A layer's step over a cache of keys and values as torch ops, for ``torch.compile``: one for the host's
side, one for the device's.

How long sequences are changes with every step, and a graph that knew would be compiled anew: it asks its
``InferenceParams`` when it runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fp8kit.errors import ArgumentError, AutogradError, ShapeError
from fp8kit.execution.codec import decode, encode
from fp8kit.layers.inference import InferenceParams
from fp8kit.lru import memoized
from fp8kit.ops.kv_cache import cached_attention
from fp8kit_torch.bound import addresses
from fp8kit_torch.library import StaticCall, call_by, described, policy_now
from fp8kit_torch.views import dtype_of, kind_of

_OP = "DotProductAttention"
_CACHES = ("k_cache", "v_cache")
_HANDLES = itertools.count(1)
_LIVE: weakref.WeakValueDictionary[int, InferenceParams] = weakref.WeakValueDictionary()


def handle_of(params: InferenceParams) -> Tensor:
    """int64 () on the CPU: a new name for ``params`` while they live, in graphs."""
    number = next(_HANDLES)
    _LIVE[number] = params
    return torch.tensor(number, device="cpu")


@custom_op("fp8kit::take_step_", mutates_args=("longest",), tags=(torch.Tag.cudagraph_unsafe,))
def take_step_(longest: Tensor, layer: Tensor, handle: Tensor, layer_number: int, call: str) -> None:
    """Take the announced step of the ``InferenceParams`` of that handle for one of its layers, on the host.

    ``longest``: int64 (2,) on the CPU, becomes (max_seqlen_q, max_seqlen_kv) of ``ops.kv_cache``. ``layer``:
    the new tokens' first input, of which shape and dtype count. Raises what ``InferenceParams.check_step``
    raises.
    """
    params = _LIVE.get(int(handle))
    if params is None:
        raise ArgumentError("take_step_", "handle", int(handle), "InferenceParams that are alive")
    spec = call_by(call).spec
    leading = tuple(layer.shape[: 1 if spec.packed else 2])
    dims = spec.head_dim, spec.head_dim_v
    _, sizes = params.check_step(
        _OP, layer_number, spec.qkv_format, leading, spec.num_gqa_groups, dims, kind_of(layer.dtype)
    )
    params.stepped(layer_number)
    longest.copy_(torch.tensor(sizes, device="cpu"))


@custom_op("fp8kit::cached_attention_", mutates_args=_CACHES, tags=(torch.Tag.cudagraph_unsafe,))
def cached_attention_(
    inputs: Sequence[Tensor], k_cache: Tensor, v_cache: Tensor, longest: Tensor, call: str
) -> Tensor:
    """``o`` of ``ops.kv_cache``, whose new keys and values go into the caches. ``inputs``: by the call's
    names, of which the caches' are the last two; ``longest``: see ``take_step_``."""
    tensors = [*(t if t.is_contiguous() else t.contiguous() for t in inputs), k_cache, v_cache]
    for name, cache in zip(_CACHES, tensors[-2:], strict=True):
        if not cache.is_contiguous():
            raise ShapeError("cached_attention_", name, f"strides {cache.stride()}", "C-contiguous")
    op = _with_lengths(call, *longest.tolist()).bind(tensors)
    return op.call(addresses(op, tensors)[1])[0][0]


@cached_attention_.register_fake
def _(inputs: Sequence[Tensor], k_cache: Tensor, v_cache: Tensor, longest: Tensor, call: str) -> Tensor:
    meta = call_by(call).infer((*inputs, k_cache, v_cache)).outputs["o"]
    return inputs[0].new_empty(meta.shape, dtype=dtype_of(meta.dtype))


@memoized("torch: lengths of compiled decoding")
def _with_lengths(text: str, rows: int, columns: int) -> StaticCall:
    """The call of that text with these lengths."""
    name, spec, *rest = decode(text)
    return call_by(encode((name, dataclasses.replace(spec, max_seqlen_q=rows, max_seqlen_kv=columns), *rest)))


def trace_cached(spec: str, inputs: Mapping[str, Tensor], handle: Tensor, layer_number: int) -> Tensor:
    """Attention over a cache within ``torch.compile``. ``spec``: its text, with ``TRACED_LENGTHS``;
    ``inputs``: the operation's, one of the new tokens first. AutogradError where a gradient would be
    wanted."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs.values()):
        wanted = "inference: eval(), or no_grad()"
        raise AutogradError(_OP, "inference_params", "a call with gradients on", wanted)
    names = [name for name in inputs if name not in _CACHES]
    text, _ = described(cached_attention.name, spec, (*names, *_CACHES), (), policy_now().text)
    longest = torch.empty(2, dtype=torch.int64, device="cpu")
    take_step_(longest, inputs[names[0]], handle, layer_number, text)
    return cached_attention_(
        [inputs[name] for name in names], *[inputs[name] for name in _CACHES], longest, text
    )  # type: ignore[no-any-return]
