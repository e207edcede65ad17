"""``transformer_engine.pytorch.utils``: small functions that programs take from there, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, ShapeError
from fp8kit_torch.availability import get_cudnn_version as get_cudnn_version
from fp8kit_torch.availability import get_device_compute_capability, is_bf16_available
from fp8kit_torch.checks import tensor
from fp8kit_torch.parameters import default_device, normal_init
from fp8kit_torch.torch_compat import base

Init = Callable[[Tensor], Any]


# --- how parameters start -----------------------------------------------------------------------------------


def init_method_normal(sigma: float) -> Init:
    """A function that fills a tensor from normal(0, ``sigma``)."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Init:
    """A function that fills a tensor from normal(0, ``sigma`` / sqrt(2 ``num_layers``)), as GPT-2 starts the
    last layer of each branch (Radford et al. 2019, section 2.3)."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def init_method_constant(val: float) -> Init:
    """A function that fills a tensor with ``val``; a bfloat16 and a float32 one alike."""
    return lambda tensor: torch.nn.init.constant_(tensor, val)


def get_default_init_method() -> Init:
    """What fills weights where no ``init_method`` is given: normal(0, 0.023)."""
    return normal_init


# --- numbers ------------------------------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """ShapeError, a ValueError, where ``denominator`` does not divide ``numerator``."""
    if numerator % denominator:
        raise ShapeError("divide", "numerator", numerator, f"a multiple of {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """``numerator`` / ``denominator``, exact. ShapeError where it is not."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def ceil_div(numerator: int, denominator: int) -> int:
    """``numerator`` / ``denominator``, rounded up."""
    return -(-numerator // denominator)


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``. ShapeError for a ``multiple`` of 0."""
    if multiple == 0:
        raise ShapeError("round_up_to_nearest_multiple", "multiple", 0, "another number")
    return ceil_div(value, multiple) * multiple


# --- tensors ------------------------------------------------------------------------------------------------


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """``tensor`` in ``num_partitions`` equal parts along ``dim``, views, or copies with
    ``contiguous_split_chunks``. ShapeError where it has no such parts."""
    parts = torch.split(tensor, divide(tensor.shape[dim], num_partitions), dim=dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


class SplitAlongDim:
    """``SplitAlongDim.apply(tensor, dim, sizes or size, squeeze=False)``: parts along ``dim``, without that
    dimension with ``squeeze``."""

    @staticmethod
    def apply(
        mixed_x_layer: Tensor,
        split_dim: int,
        split_size_or_sections: int | Sequence[int],
        squeeze: Any = False,
    ) -> tuple[Tensor, ...]:
        """The parts, views of ``mixed_x_layer``."""
        sizes = split_size_or_sections
        parts = torch.split(mixed_x_layer, sizes if isinstance(sizes, int) else list(sizes), dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else tuple(parts)


def combine_tensors(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors of one shape as one, along a new dimension before their dimension ``dim``: a copy."""
    return torch.stack(list(tensors), dim=dim if dim >= 0 else dim - 1)


def cast_if_needed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``tensor`` in ``dtype``, itself where it has it; None for None."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """The rows of a gated layer's first weight (2 F, ...) or bias, gate rows before linear ones, reordered in
    blocks of ``interleave_size`` of each in turn. ShapeError where 2 F is no multiple of two blocks."""
    return _regrouped("interleave_glu_tensor", tensor, interleave_size, True)


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """The inverse of ``interleave_glu_tensor``."""
    return _regrouped("deinterleave_glu_tensor", tensor, interleave_size, False)


def _regrouped(operation: str, value: Tensor, block: int, interleave: bool) -> Tensor:
    tensor(operation, "tensor", value)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ArgumentError(operation, "interleave_size", block, "an int of at least 1")
    if not value.ndim or value.shape[0] % (2 * block):
        raise ShapeError(operation, "tensor", tuple(value.shape), f"a multiple of {2 * block} rows")
    pairs = value.shape[0] // (2 * block)
    groups = (2, pairs) if interleave else (pairs, 2)
    return value.reshape(*groups, block, *value.shape[1:]).transpose(0, 1).reshape(value.shape)


def make_weak_ref(x: Any) -> Any:
    """``x``, a tensor or numbers, tuples, lists and dicts of them, with each plain tensor on a CUDA device as
    one of the same memory that does not keep it alive: it may be read for as long as somebody else keeps the
    memory, as a CUDA graph does that of its outputs. All else is as it came. ArgumentError for other
    objects."""
    if isinstance(x, dict):
        return {name: make_weak_ref(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        found = map(make_weak_ref, x)
        return type(x)(*found) if hasattr(x, "_fields") else type(x)(found)
    if x is None or isinstance(x, int | float):
        return x
    tensor("make_weak_ref", "x", x)
    if not x.is_cuda or not x.numel() or type(x) not in (Tensor, torch.nn.Parameter):
        return x
    return _as_it_lies(torch.as_tensor(_Memory(x), device=x.device), x)


class _Memory:
    """The bytes of a tensor, which this does not hold."""

    def __init__(self, x: Tensor) -> None:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        size, at = (last + 1) * x.element_size(), x.data_ptr()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (at, False),
            "version": 3,
        }


def _as_it_lies(data: Tensor, x: Tensor) -> Tensor:
    """Bytes as a tensor of the dtype, shape and strides of ``x``."""
    return data.view(x.dtype).as_strided(x.shape, x.stride())


def clear_tensor_data(*tensors: Tensor | None) -> None:
    """Let go of the memory of tensors that nothing reads any more; None is passed over."""
    for each in tensors:
        if each is not None:
            each.data = torch.empty(0, dtype=each.dtype, device=each.device)


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient is wanted of any of them."""
    return any(each is not None and each.requires_grad for each in tensors)


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Scores, in place, -10000 where the mask is True."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def all_close(a: Tensor, b: Tensor) -> bool:
    """``torch.allclose`` at its own tolerances."""
    return torch.allclose(a, b)


def compare_tensors(a: Tensor, b: Tensor) -> None:
    """Print the largest and the mean difference of two tensors of one shape."""
    difference = (a.double() - b.double()).abs()
    print(f"largest difference {float(difference.max()):g}, mean {float(difference.mean()):g}")


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """``tensor`` or a list of them, as it is. ArgumentError, a ValueError, for a view of another one."""
    for each in tensor if isinstance(tensor, list) else [tensor]:
        if isinstance(each, Tensor) and base(each) is not None:
            wanted = "a tensor that is no view" + (f"; {extra_msg}" if extra_msg else "")
            raise ArgumentError("assert_viewless_tensor", "tensor", "a view", wanted)
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """``tensor.data = new_data_tensor``. ArgumentError where ``tensor`` is a view."""
    assert_viewless_tensor(tensor)
    tensor.data = new_data_tensor


# --- what FP8 wants -----------------------------------------------------------------------------------------


def check_dim_for_fp8_exec(tensor: Tensor) -> bool:
    """Whether a matrix has multiples of 8 rows and of 16 columns, which Transformer Engine demands. Nothing
    here does."""
    return tensor.ndim == 2 and tensor.shape[0] % 8 == 0 and tensor.shape[1] % 16 == 0


def assert_dim_for_fp8_exec(*tensors: Tensor) -> None:
    """ShapeError, a ValueError, where the leading dimensions' product is no multiple of 8, or the last
    dimension none of 16."""
    for each in tensors:
        if math.prod(each.shape[:-1]) % 8 or each.shape[-1] % 16:
            wanted = "leading dimensions of a multiple of 8, a last one of a multiple of 16"
            raise ShapeError("assert_dim_for_fp8_exec", "tensor", tuple(each.shape), wanted)


def is_bf16_compatible() -> bool:
    """Whether the device computes in bfloat16; a CPU does."""
    return bool(is_bf16_available())


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether the GPU multiplies FP8 matrices that do not lie along the contraction: compute capability 10.x,
    11.x and from 13.0 on. False on a CPU."""
    if not torch.cuda.is_available():
        return False
    major = get_device_compute_capability()[0]
    return major in (10, 11) or major >= 13


# --- surroundings -------------------------------------------------------------------------------------------


def print_rank_0(*args: Any) -> None:
    """``print`` in the first process alone."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()) or group.get_rank() == 0:
        print(*args)


def canonicalize_device(device: torch.device | str | None) -> torch.device:
    """``device`` with an index where it is CUDA; None is the device that layers are made on."""
    found = default_device() if device is None else torch.device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """``dtype``; None is torch's default."""
    return torch.get_default_dtype() if dtype is None else dtype


def devices_match(device1: torch.device, device2: torch.device) -> bool:
    """Whether two devices are the same, CUDA without an index being the current one."""
    return canonicalize_device(device1) == canonicalize_device(device2)


def canonicalize_process_group(group: Any) -> Any:
    """``group``; None is the default one where processes work together, else None."""
    if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.group.WORLD
    return group


def get_sm_count() -> int:
    """Multiprocessors of the current CUDA device. RuntimeError of torch without one."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def torch_get_autocast_gpu_dtype() -> torch.dtype:
    """What ``torch.autocast`` casts to on CUDA."""
    return torch.get_autocast_dtype("cuda")


def gpu_autocast_ctx(enabled: bool = True, **options: Any) -> AbstractContextManager[Any]:
    """``torch.autocast`` on CUDA."""
    return torch.autocast("cuda", enabled=enabled, **options)


def validate_ctx_manager(ctx: Callable[[], AbstractContextManager[Any]]) -> None:
    """ArgumentError, a ValueError, where ``with ctx()`` fails."""
    try:
        with ctx():
            pass
    except Exception as error:
        raise ArgumentError("validate_ctx_manager", "ctx", str(error), "a context manager") from error


def validate_rng_states_func(get_rng_tracker: Callable[[], Any]) -> None:
    """ArgumentError where it gives no object with ``get_states``, ``set_states`` and ``fork``."""
    operation, wanted = "validate_rng_states_func", "a function that returns a CudaRNGStatesTracker"
    if not callable(get_rng_tracker):
        raise ArgumentError(operation, "get_rng_tracker", get_rng_tracker, wanted)
    tracker = get_rng_tracker()
    if not all(callable(getattr(tracker, name, None)) for name in ("get_states", "set_states", "fork")):
        raise ArgumentError(operation, "get_rng_tracker", tracker, wanted)


def get_nvtx_range_context(msg: str) -> AbstractContextManager[Any]:
    """A range of that name in a profile on CUDA; nothing elsewhere."""
    return torch.cuda.nvtx.range(msg) if torch.cuda.is_available() else nullcontext()


def nvtx_range_push(msg: str) -> None:
    """Begin a range in a profile on CUDA."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """End the range that began last."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()
