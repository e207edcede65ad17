"""The CUDA engine: NVRTC kernels, cuBLASLt and cuDNN behind the kernel contract.

``register`` names what implements which kernel. CuPy, nvmath and cudnn are imported by the first call that
needs them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fp8kit.backends.protocol import KERNELS, SPECS

if TYPE_CHECKING:
    from fp8kit.backends.registry import OpRegistry

MIN_ARCH = 80  # bfloat16 starts with Ampere
FP8_ARCH = 89  # FP8 tensor cores, which cuBLASLt's FP8 products are for, with Ada


# A source whose kernels do what a library or a more general source does elsewhere: the kernels of the
# contract which it implements so, and the modules that launch them.
OWN = {
    "hopper_gemm.cu": {
        "fp8_gemm": "hopper_gemm",
        "block_gemm": "hopper_gemm",
        **dict.fromkeys(("grouped_fp8_gemm", "grouped_gemm"), "hopper_grouped"),
        **dict.fromkeys(
            ("fp8_gemm_act", "fp8_gemm_act_bwd", "fp8_gemm_cast", "fp8_gemm_lines"), "hopper_fused"
        ),
    },
    "mma_gemm.cu": {"fp8_gemm": "mma_gemm", "block_gemm": "mma_gemm"},
}
# implementations of these that come before the library or the general source, being faster (docs/moe.md,
# docs/performance.md)
FIRST = {"hopper_block_gemm", "hopper_grouped_fp8_gemm", "hopper_grouped_gemm"}


def implementation(kernel: str, source: str = "") -> Callable[..., Any]:
    """Returns the function that implements a kernel of the contract: in the module of its family, or where
    ``source``, which it is to launch kernels of, is among ``OWN``, in that one's. KeyError for a name that is
    not in the contract. Imports the module."""
    name = OWN.get(source, {}).get(kernel, SPECS[kernel].family)
    return getattr(importlib.import_module(f"{__name__}.{name}"), kernel)  # type: ignore[no-any-return]


def implementations(kernel: str) -> list[Callable[..., Any]]:
    """All functions of this engine that implement a kernel of the contract. Imports their modules."""
    others = [source for source, kernels in OWN.items() if kernel in kernels]
    return [implementation(kernel, source) for source in ("", *others)]


def recorder() -> AbstractContextManager[Any]:
    """Context manager that gives a ``recorded.Recording`` of what the engine does within, in this thread."""
    from fp8kit.backends.cuda import recorded

    return recorded.recording()


def register(registry: OpRegistry) -> None:
    """Register every kernel of this engine. Imports its modules, but neither CuPy nor any other CUDA
    library."""
    from fp8kit.backends.registry import PRIORITY, Kind, OpImpl

    def impl(name: str, impl_id: str, function: Callable[..., Any], **more: Any) -> OpImpl:
        more |= {"vendor": "cuda", "devices": frozenset({"cuda"})}
        more.setdefault("min_arch", FP8_ARCH if name == "fp8_gemm" else MIN_ARCH)
        return OpImpl(name, f"cuda.{impl_id}", Kind.VENDOR, function, **more)

    for name in KERNELS:
        function = implementation(name)
        registry.register_impl(impl(name, name, function))
        # products may take the fastest of cuBLASLt's algorithms, unless the policy is deterministic
        if "timed" in inspect.signature(function).parameters:
            timed, priority = functools.partial(function, timed=True), PRIORITY[Kind.VENDOR] + 1
            vars(timed).update(vars(function))
            registry.register_impl(impl(name, f"timed_{name}", timed, priority=priority, deterministic=False))
    for source, modules in OWN.items():  # not chosen unless a policy names them, or they are ``FIRST``
        for name, module in modules.items():
            own = importlib.import_module(f"{__name__}.{module}")
            impl_id = f"{module.partition('_')[0]}_{name}"
            more = dict(zip(("min_arch", "max_arch"), own.ARCHS, strict=True))
            more["priority"] = PRIORITY[Kind.VENDOR] + (2 if impl_id in FIRST else -1)
            registry.register_impl(impl(name, impl_id, implementation(name, source), **more))
