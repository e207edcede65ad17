"""All of Transformer Engine's quantizers and tensors in one place, under the names that it has in
``transformer_engine.pytorch.tensor``. What it calls storages are the tensors themselves."""

from fp8kit_torch.quantized import Float8BlockwiseQTensor, Float8Tensor, QuantizedTensor
from fp8kit_torch.te_compat.block_tensors import MXFP8Quantizer, MXFP8Tensor, NVFP4Quantizer, NVFP4Tensor
from fp8kit_torch.te_compat.grouped_tensor import GroupedTensor, GroupedTensorStorage
from fp8kit_torch.te_compat.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)
from fp8kit_torch.te_compat.saved_tensors import (
    cast_master_weights_to_fp8,
    prepare_for_saving,
    replace_raw_data,
    restore_from_func_ctx,
    restore_from_saved,
)

QuantizedTensorStorage = QuantizedTensor
Float8TensorStorage, Float8BlockwiseQTensorStorage = Float8Tensor, Float8BlockwiseQTensor
MXFP8TensorStorage, NVFP4TensorStorage = MXFP8Tensor, NVFP4Tensor

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "GroupedTensor",
    "GroupedTensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "cast_master_weights_to_fp8",
    "prepare_for_saving",
    "replace_raw_data",
    "restore_from_func_ctx",
    "restore_from_saved",
]
