"""The CUDA engine: NVRTC kernels, cuBLASLt and cuDNN behind the kernel contract.

``register`` names what implements which kernel. CuPy, nvmath and cudnn are imported by the first call that
needs them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8kit.backends.registry import OpRegistry

# take the fastest of cuBLASLt's algorithms, unless the policy is deterministic
TIMED = ("gemm", "fp8_gemm", "block_gemm")
MIN_ARCH = 89  # FP8 conversions and tensor cores start with Ada

# module -> the kernels of the contract that it implements
IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    "quantize": (
        "amax",
        "amax_many",
        "quantize",
        "dequantize",
        "quantize_transpose",
        "quantize_transpose_many",
        "quantize_transpose_workspace",
    ),
    "scales": ("scale_from_amax", "update_delayed_"),
    "gemm": ("gemm", "fp8_gemm", "gemm_workspace", "fp8_gemm_workspace"),
    "block": ("block_quantize", "block_quantize_many", "block_gemm"),
    "norm": ("norm_fwd", "norm_bwd", "norm_bwd_workspace"),
    "activation": ("act_fwd", "act_bwd", "act_bwd_workspace"),
    "dropout": ("dropout_add", "dropout_bwd"),
    "drop_path": ("drop_path",),
    "attention": ("attention_fwd", "attention_bwd", "attention_workspace"),
    "sequences": ("unpack_sequences", "pack_sequences"),
    "kv_cache": ("cache_append_", "cache_gather"),
    "rope": ("rope_fwd", "rope_bwd"),
    "embedding": ("embedding_fwd", "embedding_bwd"),
    "cross_entropy": ("cross_entropy_fwd", "cross_entropy_bwd"),
    "optim": ("adamw_", "sgd_", "scale_", "loss_scale_", "count_", "l2norm", "l2norm_workspace", "clip_"),
    "elementwise": ("copy", "add", "sum_rows", "column_sum_workspace", "rng_next_"),
}


def implementation(kernel: str) -> Callable[..., Any]:
    """The function that implements a kernel of the contract; KeyError for a name that is not in it. Imports
    its module."""
    module = next((m for m, kernels in IMPLEMENTATIONS.items() if kernel in kernels), None)
    if module is None:
        raise KeyError(kernel)
    return getattr(importlib.import_module(f"{__name__}.{module}"), kernel)  # type: ignore[no-any-return]


def recorder() -> AbstractContextManager[Any]:
    """Context manager that gives a ``recorded.Recording`` of what the engine does within, in this thread."""
    from fp8kit.backends.cuda import recorded

    return recorded.recording()


def register(registry: OpRegistry) -> None:
    """Register every kernel of this engine. Imports its modules, but neither CuPy nor any other CUDA
    library."""
    from fp8kit.backends.registry import PRIORITY, Kind, OpImpl

    def add(op_name: str, impl_id: str, function: Callable[..., Any], **more: Any) -> None:
        registry.register_impl(
            OpImpl(
                op_name,
                impl_id,
                Kind.VENDOR,
                function,
                vendor="cuda",
                min_arch=MIN_ARCH,
                devices=frozenset({"cuda"}),
                **more,
            )
        )

    for kernels in IMPLEMENTATIONS.values():
        for name in kernels:
            add(name, f"cuda.{name}", implementation(name))
    for name in TIMED:
        function = functools.partial(implementation(name), timed=True)
        add(name, f"cuda.timed_{name}", function, priority=PRIORITY[Kind.VENDOR] + 1, deterministic=False)
