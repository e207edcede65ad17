"""What a chip's tensor cores multiply at most: the ceiling of products, as a copy is of what moves memory.

Dense products by the maker's papers, at the boost clock, summed in float32. Under load the power limit keeps
a chip below that. A chip that is not listed has no ceiling here.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8kit.arrays import Device
from fp8kit.backends.protocol import KERNELS, SPECS
from fp8kit.bench.report import machine
from fp8kit.formats import DType, float32


class Peak(NamedTuple):
    """10^12 operations a second with FP8 operands (0: no tensor core takes them) and with 16-bit ones."""

    fp8: float
    half: float


# products of the contract by tensor cores -> what they multiply
PRODUCTS = {
    name: "fp8" if "fp8" in name or name == "block_gemm" else "half"
    for name in KERNELS
    if "gemm" in name and SPECS[name].flops is not None and name != "model_gemm"
}

# the driver's name -> NVIDIA's data sheet of the chip. Sheets that print figures with sparsity print twice
# these.
PEAKS = {
    **dict.fromkeys(  # "NVIDIA A100 Tensor Core GPU", 2021
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
        Peak(0, 312),
    ),
    "NVIDIA L4": Peak(242.5, 121),  # "NVIDIA L4 Tensor Core GPU", 2023
    "NVIDIA L40S": Peak(733, 362.05),  # "NVIDIA L40S GPU", 2023
    "NVIDIA GeForce RTX 4090": Peak(330.3, 165.2),  # "NVIDIA Ada GPU Architecture", 2023, appendix A
    "NVIDIA H100 80GB HBM3": Peak(1979, 989.5),  # "NVIDIA H100 Tensor Core GPU", 2023, SXM
    "NVIDIA H100 PCIe": Peak(1513, 756.5),  # "NVIDIA H100 Tensor Core GPU", 2022, PCIe
    "NVIDIA H200": Peak(1979, 989.5),  # "NVIDIA H200 Tensor Core GPU", 2024, SXM
}


def peak(operation: str, device: Device, dtype: DType) -> float:
    """Operations a second that ``device`` makes at most for a product of the kernel contract; 0 where that is
    not known, for products of float32 arrays, and for what is no product of tensor cores. ``dtype``: of the
    arrays that have a choice."""
    found = PEAKS.get(machine(device)) if device.kind == "cuda" and operation in PRODUCTS else None
    if found is None or (PRODUCTS[operation] == "half" and dtype is float32):
        return 0.0
    return float(getattr(found, PRODUCTS[operation])) * 1e12
