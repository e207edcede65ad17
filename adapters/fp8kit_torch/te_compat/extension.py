"""``transformer_engine_torch``, Transformer Engine's C++ library, as far as programs call it themselves."""

from __future__ import annotations

from enum import IntEnum

from fp8kit_torch.multi_tensor import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_compute_scale_and_scale_inv,
    multi_tensor_compute_scale_inv_e8m0,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from fp8kit_torch.te_compat.dtypes import DType, FP8BwdTensors, FP8FwdTensors


class NVTE_Bias_Type(IntEnum):
    """What is added to attention's scores."""

    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2
    NVTE_ALIBI = 3


class NVTE_Mask_Type(IntEnum):
    """Which of attention's scores are left."""

    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


class NVTE_Softmax_Type(IntEnum):
    """What is added to the softmax's denominator."""

    NVTE_VANILLA_SOFTMAX = 0
    NVTE_OFF_BY_ONE_SOFTMAX = 1
    NVTE_LEARNABLE_SOFTMAX = 2


class NVTE_QKV_Format(IntEnum):
    """Order of attention's dimensions."""

    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2


def get_num_cublas_streams() -> int:
    """Streams on which grouped products run: 1."""
    return 1


def ubuf_built_with_mpi() -> bool:
    """Whether overlapped communication starts by MPI: there is none."""
    return False


def device_supports_multicast(device_id: int = -1) -> bool:
    """Whether overlapped communication uses NVLink multicast: there is none."""
    return False


__all__ = [
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "NVTE_Bias_Type",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_Softmax_Type",
    "device_supports_multicast",
    "get_num_cublas_streams",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "ubuf_built_with_mpi",
]
