"""``DType`` and the other enumerations and constants of Transformer Engine, with its values."""

from __future__ import annotations

from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from fp8kit.errors import ArgumentError
from fp8kit.formats import E4M3, E5M2, Format
from fp8kit.formats import DType as Kind
from fp8kit.ops.attention_spec import BIASES, MASKS
from fp8kit_torch.checks import shown


class DType(IntEnum):
    """What the elements of a tensor are: ``kByte`` uint8, ``kInt16``, ``kInt32``, ``kInt64``, ``kFloat32``,
    ``kFloat16``, ``kBFloat16``, ``kFloat8E4M3``, ``kFloat8E5M2``, ``kFloat8E8M0``, ``kFloat4E2M1``."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: int) -> DType:
        """The member of that value. ValueError where there is none."""
        return cls(int(dtype))


TE_DType = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
TE_DType_To_Torch = {member: dtype for dtype, member in TE_DType.items()}


def of_format(kind: Kind) -> DType:
    """The member for one of fp8kit's formats of eight or four bits. KeyError for others."""
    known = {"E4M3": DType.kFloat8E4M3, "E5M2": DType.kFloat8E5M2, "E2M1": DType.kFloat4E2M1}
    return known[kind.name]


def format_of(operation: str, dtype: Any) -> Format:
    """E4M3 or E5M2 of Transformer Engine's or torch's dtype. ArgumentError for others."""
    known = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}
    try:
        return known[TE_DType.get(dtype, dtype)]
    except (KeyError, TypeError):
        wanted = "DType.kFloat8E4M3 or DType.kFloat8E5M2"
        raise ArgumentError(operation, "fp8_dtype", shown(dtype), wanted) from None


class FP8FwdTensors(IntEnum):
    """Where a module's forward tensors stand in its FP8 state."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(IntEnum):
    """Where a module's gradients stand in its FP8 state."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


FP8FwdTensorIdx = SimpleNamespace(**{member.name: int(member) for member in FP8FwdTensors})
FP8BwdTensorIdx = SimpleNamespace(**{member.name: int(member) for member in FP8BwdTensors})


class CPLoadBalancingStrategy(Enum):
    """How context parallelism deals out tokens: layers take the first."""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


class UserBufferQuantizationMode(Enum):
    """What overlapped communication casts to; there is none here."""

    NONE = "none"
    FP8 = "fp8"


AttnMaskTypes, AttnBiasTypes = MASKS, BIASES
AttnTypes = ("self", "cross")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)
MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16
_PACKED = ("{0}3hd", "{0}h3d", "{0}hd_{0}2hd", "{0}hd_{0}h2d", "{0}hd_{0}hd_{0}hd")
QKVLayouts = (
    *(layout.format(form) for form in ("sb", "bs", "t") for layout in _PACKED),
    *("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd"),
    *(f"paged_kv_{q}_{kv}_{kv}" for q in ("bshd", "sbhd", "thd") for kv in ("bshd", "sbhd")),
)
dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else object
TORCH_DType = {int(member): dtype for member, dtype in TE_DType_To_Torch.items()}

__all__ = [
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "AttnBiasTypes",
    "AttnMaskTypes",
    "AttnTypes",
    "CPLoadBalancingStrategy",
    "DType",
    "FP8BwdTensorIdx",
    "FP8BwdTensors",
    "FP8FwdTensorIdx",
    "FP8FwdTensors",
    "GemmParallelModes",
    "LayerTypes",
    "QKVLayouts",
    "TE_DType",
    "TE_DType_To_Torch",
    "TORCH_DType",
    "UserBufferQuantizationMode",
    "dist_group_type",
]
