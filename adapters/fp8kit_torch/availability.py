"""What can run here, and what is missing: Transformer Engine's questions, answered for the place where
tensors go.

That place is torch's CUDA device where torch has one, else the CPU. On a CPU the answer for FP8 is yes: the
reference engine computes the same FP8 products there, exactly and slowly. MXFP8 and NVFP4 run wherever fp8kit
does: where no tensor cores take their scales, products are emulated, in high precision.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from fp8kit import arrays, scaled_products
from fp8kit.arguments import flag
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.errors import BackendError
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.products import product_class
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

Answer = bool | tuple[bool, str]


def _place() -> Device:
    return Device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else arrays.CPU


def missing_for(recipe: Recipe) -> str:
    """Why the products of a recipe cannot run as fast as FP8 does, "" where they can: on a GPU without FP8
    tensor cores they run, slowly."""
    kind = product_class(recipe.quantization)
    return _missing(kind.kernels, kind.tensor_cores)


def _missing(kernels: tuple[str, ...], least: tuple[int, int]) -> str:
    """Why these kernels cannot run, "" where they can. ``least``: the compute capability that a CUDA device
    needs."""
    place = _place()
    if place.kind == "cuda":
        have = get_device_compute_capability()
        if have < least:
            return (
                f"compute capability {least[0]}.{least[1]} or higher is needed, "
                f"{torch.cuda.get_device_name()} has {have[0]}.{have[1]}"
            )
        if not arrays.available("cuda"):
            return "fp8kit's CUDA engine cannot be loaded; `fp8kit info` lists what is missing"
    for name in kernels:
        try:
            usable, refused = dispatch.candidates(name, place)
        except BackendError as error:
            return str(error)
        if not usable:
            why = "; ".join(f"{impl.impl_id} {why}" for impl, why in refused)
            return f"{name} on {place}: {why or 'nothing implements it'}"
    return ""


def want_fp8(operation: str, spec: Any, device: torch.device) -> None:
    """BackendError where a CUDA device does not carry out a spec's products."""
    products = [value for value in getattr(spec, "__dict__", {}).values() if isinstance(value, ProductSpec)]
    asked = [product_class(product.fp8) for product in products if product.fp8 is not None]
    if device.type == "cuda" and asked:
        have = torch.cuda.get_device_capability(device)
        kind = max(asked, key=lambda kind: kind.capability)
        if have < kind.capability:
            least = "{}.{}".format(*kind.capability)
            wanted = f"{least} or higher for {kind.described}, or autocast(enabled=False)"
            raise BackendError(
                operation, "device", f"{device} of compute capability {have[0]}.{have[1]}", wanted
            )


def _answer(reason: str, return_reason: bool) -> Answer:
    return (not reason, reason) if flag("is_available", "return_reason", return_reason) else not reason


def is_fp8_available(return_reason: bool = False) -> Answer:
    """Whether per-tensor FP8 (DelayedScaling, Float8CurrentScaling) runs here: on a CPU yes, on CUDA from
    compute capability 8.9.

    ``return_reason``: answer (available, what is missing), the latter "" where nothing is.
    """
    return _answer(missing_for(DelayedScaling()), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Answer:
    """Whether Float8BlockScaling runs here: on a CPU yes, on CUDA from compute capability 8.9.
    ``return_reason`` as for FP8."""
    return _answer(missing_for(Float8BlockScaling()), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Answer:
    """Whether MXFP8BlockScaling runs here: yes, on a CPU and on CUDA, with emulated products before compute
    capability 10.0. ``return_reason`` as for FP8."""
    return _answer(missing_for(MXFP8BlockScaling()), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Answer:
    """Whether NVFP4BlockScaling runs here: yes, emulated, as MXFP8 does. ``return_reason`` as for FP8."""
    return _answer(missing_for(NVFP4BlockScaling()), return_reason)


def is_bf16_available(return_reason: bool = False) -> Answer:
    """Whether bfloat16 runs here: on a CPU yes, on CUDA from compute capability 8.0. ``return_reason`` as for
    FP8."""
    return _answer(_missing(("gemm",), (8, 0)), return_reason)


def get_default_recipe() -> Recipe:
    """The recipe of an autocast that names none: ``DelayedScaling()``."""
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe  # Transformer Engine's name of it in its module of recipes


def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of torch's current CUDA device, (0, 0) where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the cuDNN that torch loads, (0, 0, 0) where there is none."""
    version = (torch.backends.cudnn.version() or 0) if torch.cuda.is_available() else 0
    scale = 10000 if version >= 90000 else 1000  # cuDNN's own two ways to write its version as one number
    return version // scale, version % scale // 100, version % 100


def check_fp8_support() -> tuple[bool, str]:
    """``is_fp8_available(return_reason=True)``, by its older name."""
    return is_fp8_available(True)  # type: ignore[return-value]


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """``is_fp8_block_scaling_available(return_reason=True)``, by its older name."""
    return is_fp8_block_scaling_available(True)  # type: ignore[return-value]


def check_mxfp8_support() -> tuple[bool, str]:
    """``is_mxfp8_available(return_reason=True)``, by its older name, by which accelerate asks before it
    trains so; a UserWarning where products of MXFP8 are emulated."""
    if not scaled_products.takes_scales(_place()):
        warnings.warn(
            "check_mxfp8_support: MXFP8BlockScaling computes with MXFP8's numbers, but its products are "
            "emulated in high precision here: it saves no time",
            stacklevel=2,
        )
    return is_mxfp8_available(True)  # type: ignore[return-value]
