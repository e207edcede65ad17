"""Names of Transformer Engine that fp8kit has nothing for: they can be imported, and say so when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from fp8kit_torch.arguments import only

_PARALLEL = "there is no tensor parallelism, and no overlap of its communication"
_QUANTIZER = "recipes say how tensors are cast; QuantizedTensor.dequantize gives values, fp8kit.quantize casts"
_RECIPE = "the recipes are DelayedScaling, Float8CurrentScaling and Float8BlockScaling"
_MASTERS = "FusedAdam(master_weights=True) casts its masters to weights in FP8"

# why -> names; a name means the same in whatever module of Transformer Engine it is
_NAMES = {
    _PARALLEL: """initialize_ub destroy_ub UserBufferQuantizationMode gather_along_first_dim reduce_scatter_along_first_dim
        symmetric_all_reduce prepare_te_modules_for_fsdp AllGather AllReduce ReduceScatter ep_bootstrap ep_prepare ep_dispatch ep_combine
        ep_finalize EpBuffer""",
    _QUANTIZER: """Quantizer Float8Quantizer Float8CurrentScalingQuantizer Float8BlockQuantizer HybridQuantizer IdentityQuantizer
        QuantizerRole QuantizerRequest DelayedScalingRequest HybridQuantizedTensor HybridQuantizedTensorStorage IdentityTensor
        IdentityTensorStorage QuantizedTensorStorage Float8TensorStorage Float8BlockwiseQTensor Float8BlockwiseQTensorStorage
        GroupedTensor GroupedTensorStorage prepare_for_saving restore_from_saved restore_from_func_ctx Quantize""",
    _RECIPE: """MXFP8BlockScaling NVFP4BlockScaling CustomRecipe MXFP8Quantizer NVFP4Quantizer MXFP8Tensor MXFP8TensorStorage NVFP4Tensor
        NVFP4TensorStorage""",
    _MASTERS: "quantize_master_weights cast_master_weights_to_fp8 replace_raw_data post_all_gather_processing multi_tensor_adam_fp8",
    "linear, norm and attention layers are modules of their own": "FusedMLAQUpProjRopeQuant general_grouped_gemm",
    "the activation is not there": "ScaledSReLU SiTUGLU ScaledSwiGLU ScaledSiTUGLU ScaledClampedQGeGLU",
    "layers are fused as they are written": """register_forward_fusion register_backward_fusion register_forward_backward_fusion
        FusedOperation OperationFuser""",
    "the router is not there; plain torch computes it": """fused_topk_with_score_function fused_compute_score_for_moe_aux_loss
        fused_moe_aux_loss""",
    "the solver is not there": "CusolverMpCtx newton_schulz get_coefficients",
    "activations are not offloaded": "ManualOffloadSynchronizer",
    "weights are not interleaved": "interleave_glu_tensor deinterleave_glu_tensor",
}
WHY = {name: why for why, names in _NAMES.items() for name in names.split()}


class _Later(type):
    """Makes classes none of which has an instance: to call one, or ask it for anything, is refused."""

    why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"fp8kit_torch: {cls.__name__} is not supported: {cls.why}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"fp8kit_torch: {cls.__name__}.{name} is not supported: {cls.why}")


_MADE: dict[str, type] = {}


def later(module: str, name: str) -> Any:
    """What stands for a name that is in ``WHY``; AttributeError for any other of ``module``."""
    if name not in WHY:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if name not in _MADE:
        _MADE[name] = _Later(name, (), {"__module__": __name__, "__doc__": f"Not supported: {WHY[name]}.", "why": WHY[name]})
    return _MADE[name]


def get_cpu_offload_context(enabled: bool = False, num_layers: int = 1, model_layers: int = 1, offload_activations: bool = True,
                            offload_weights: bool = False, double_buffering: bool = False, manual_synchronization: bool = False,
                            retain_pinned_cpu_buffers: bool = False, offload_stream: Any = None
                            ) -> tuple[AbstractContextManager[None], Callable[[Tensor], Tensor]]:
    """(a context, a function that layers' outputs go through): both do nothing with ``enabled=False``, the only value; NotImplementedError
    otherwise. ``checkpoint`` and torch's ``save_on_cpu`` are what there is to save memory with."""
    only("get_cpu_offload_context", {"enabled": (enabled, False)})
    return nullcontext(), _same


def _same(tensor: Tensor) -> Tensor:
    return tensor


def mark_not_offload(*tensors: Tensor) -> None:
    """Accepted: nothing is offloaded."""


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Does nothing with ``enabled=False``, the only value; NotImplementedError otherwise: no operation here has an ONNX form."""
    only("onnx_export", {"enabled": (enabled, False)})
    yield


__all__ = ["get_cpu_offload_context", "mark_not_offload", "onnx_export"]
