"""What programs ask about processes and checkpoints, and what they let processes do together
(``transformer_engine.pytorch.distributed``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fp8kit.autocast import current
from fp8kit.collectives import Collectives
from fp8kit.errors import ShapeError
from fp8kit.layers.base import spec_object
from fp8kit.ops.communicate import gather_rows, reduce_rows
from fp8kit.spec import Operation
from fp8kit_torch import recompute
from fp8kit_torch.call import apply
from fp8kit_torch.checks import module
from fp8kit_torch.collectives import ranks_of
from fp8kit_torch.distributed_weights import is_distributed
from fp8kit_torch.layer import TorchLayer
from fp8kit_torch.state import stream_of
from fp8kit_torch.te_compat.dtypes import UserBufferQuantizationMode
from fp8kit_torch.views import as_view


def get_distributed_world_size(group: Any = None) -> int:
    """Processes of ``group``, None all of them; 1 where torch.distributed is not set up."""
    known = torch.distributed
    return known.get_world_size(group) if known.is_available() and known.is_initialized() else 1


def get_distributed_rank(group: Any = None) -> int:
    """This process's place in ``group``, None among all; 0 where torch.distributed is not set up."""
    known = torch.distributed
    return known.get_rank(group) if known.is_available() and known.is_initialized() else 0


def gather_along_first_dim(
    inp: Tensor, process_group: Any, async_op: bool = False, quantizer: Any = None
) -> tuple[Tensor, None]:
    """(The ranks' ``inp`` one after the other along the first dimension, None: the call is on the stream when
    this returns). With a ``quantizer`` the whole is cast once it is there, a ``QuantizedTensor``: the layers
    themselves gather codes."""
    ranks = _ranks("gather_along_first_dim", "process_group", process_group)
    whole = inp if ranks is None else _gathered(inp, ranks)
    return (whole if quantizer is None else quantizer(whole)), None


def reduce_scatter_along_first_dim(inp: Tensor, tp_group: Any, async_op: bool = False) -> tuple[Tensor, None]:
    """(This rank's part, along the first dimension, of the sum of the ranks' ``inp``, None). ShapeError where
    they do not divide it."""
    ranks = _ranks("reduce_scatter_along_first_dim", "tp_group", tp_group)
    return (inp if ranks is None else _apply(reduce_rows, inp, ranks)), None


def allreduce(inp: Tensor, tp_group: Any = None, async_op: bool = False) -> tuple[Tensor, None]:
    """(The sum of the ranks' ``inp``, in place, None); None: of all processes, where there are several."""
    if tp_group is None and get_distributed_world_size() > 1:
        tp_group = torch.distributed.group.WORLD
    ranks = _ranks("allreduce", "tp_group", tp_group)
    if ranks is not None:
        whole = inp if inp.is_contiguous() else inp.contiguous()
        view = as_view(whole.detach())
        ranks.all_reduce(view, "sum", stream_of(view.device), "allreduce")
        if whole is not inp:
            inp.copy_(whole)
    return inp, None


def symmetric_all_reduce(
    inp: Tensor, tp_group: Any = None, async_op: bool = False, all_reduce_type: str = "multimem_all_reduce"
) -> tuple[Tensor, None]:
    """``allreduce``: the same sums, by the process group's own algorithm."""
    return allreduce(inp, tp_group, async_op)


def split_tensor_into_1d_equal_chunks(tensor: Tensor, tp_group: Any, new_buffer: bool = False) -> Tensor:
    """This rank's part of ``tensor``, flat; a copy with ``new_buffer``. ShapeError where ranks do not divide
    it."""
    ranks = _ranks("split_tensor_into_1d_equal_chunks", "tp_group", tp_group)
    flat = tensor.reshape(-1)
    if ranks is not None:
        if flat.numel() % ranks.size:
            wanted = f"a number of elements that {ranks.size} divides"
            raise ShapeError("split_tensor_into_1d_equal_chunks", "tensor", flat.numel(), wanted)
        flat = flat.tensor_split(ranks.size)[ranks.rank]
    return flat.clone() if new_buffer else flat


def gather_split_1d_tensor(tensor: Tensor, tp_group: Any) -> Tensor:
    """The ranks' chunks one after the other, flat."""
    ranks = _ranks("gather_split_1d_tensor", "tp_group", tp_group)
    return tensor if ranks is None else _gathered(tensor.reshape(-1), ranks)


def reduce_sequence_parallel_gradients(module: torch.nn.Module, tp_group: Any) -> None:
    """Sum over the ranks the gradients that each has of its own rows alone: those of the parameters that are
    marked ``sequence_parallel`` (norms, and biases behind a sum of the ranks), also under ``fully_shard``.
    Call it after backward; without it these parameters come apart. What Megatron does for the modules it
    knows."""
    ranks = _ranks("reduce_sequence_parallel_gradients", "tp_group", tp_group)
    known = set()
    for layer in module.modules() if ranks is not None else ():
        own = getattr(layer, "of_own_rows", ())
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in known or not (name in own or getattr(parameter, "sequence_parallel", False)):
                continue
            known.add(id(parameter))
            for grad in (parameter.grad, getattr(parameter, "main_grad", None)):
                if grad is not None:
                    allreduce(grad.to_local() if is_distributed(grad) else grad, tp_group)


def _ranks(operation: str, argument: str, group: Any) -> Collectives | None:
    """What a group communicates by; None for a group of one, or none."""
    found = ranks_of(operation, argument, group)
    return None if found is None or found.size == 1 else found


def _apply(operation: Operation, x: Tensor, ranks: Collectives) -> Tensor:
    return apply(operation, spec_object("GroupSpec", ranks.name, operation.name), {"x": x})["y"]


def _gathered(x: Tensor, ranks: Collectives) -> Tensor:
    return _apply(gather_rows, x, ranks)


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """The attributes by which Megatron knows how a parameter is split among processes."""
    for name, value in (
        ("tensor_model_parallel", is_parallel),
        ("partition_dim", dim),
        ("partition_stride", stride),
    ):
        setattr(tensor, name, value)


def initialize_affine_weight_gpu(
    weight: Tensor,
    init_method: Callable[[Tensor], Any],
    get_rng_state_tracker: Callable[[], Any] | None = None,
    partition_dim: int = 0,
    stride: int = 1,
    set_tp_attributes: bool = True,
) -> None:
    """Fill ``weight``, with the tracker's random numbers where one is given, and set the attributes of tensor
    parallelism."""
    if set_tp_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    forked = nullcontext() if get_rng_state_tracker is None else get_rng_state_tracker().fork()
    with torch.no_grad(), forked:
        init_method(weight)


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Nothing: ``fully_shard`` takes the layers as they are."""
    module("prepare_te_modules_for_fsdp", "fsdp_root", fsdp_root)


def get_te_classes() -> list[type]:
    """The classes by which ``has_te_modules`` knows a layer."""
    return [TorchLayer]


def has_te_modules(network: Any) -> bool:
    """Whether a module has a layer of this frontend within; True for what is no module, since nobody can look
    into a function."""
    if not isinstance(network, torch.nn.Module):
        return True
    return any(isinstance(module, TorchLayer) for module in network.modules())


def get_all_rng_states() -> dict[str, Any]:
    """Random states that checkpoints must bring back beside torch's own: none."""
    return {}


def set_all_rng_states(states: Any) -> None:
    """The inverse of ``get_all_rng_states``: nothing."""


def graph_safe_rng_available() -> bool:
    """Whether ``CudaRNGStatesTracker`` keeps generators that CUDA graphs capture: it keeps tensors."""
    return False


def is_graph_safe_rng_state(state: Any) -> bool:
    """Whether a random state is a generator rather than a tensor."""
    return isinstance(state, torch.Generator)


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether this runs within a checkpointed function, in its first or a recompute pass, with FP8 on."""
    state = current()
    return state is not None and state.enabled and not recompute.idle()


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this runs in a recompute pass of a checkpointed function."""
    return recompute.recomputing()


def use_reentrant_activation_recompute() -> bool:
    """Whether the checkpoint that runs its first pass is of torch's reentrant variant; True outside of any,
    as ``checkpoint``'s default is."""
    return recompute.idle() or recompute.first()


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """A tensor (shape) that stands for a weight's gradient where the real one is in ``main_grad``:
    undefined, or zeros with ``zero``."""
    return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=_device())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def get_workspace() -> Tensor:
    """A workspace for ``general_gemm``, which takes none: (0,)."""
    return torch.empty(0, dtype=torch.uint8, device=_device())


def is_ub_initialized() -> bool:
    """Whether communication overlaps products: never."""
    return False


def using_cublasmp_backend() -> bool:
    """Whether cuBLASMp does: never."""
    return False


# what programs' own layers give general_gemm as use_split_accumulator
_2X_ACC_FPROP, _2X_ACC_DGRAD, _2X_ACC_WGRAD = False, True, True

__all__ = [
    "_2X_ACC_DGRAD",
    "_2X_ACC_FPROP",
    "_2X_ACC_WGRAD",
    "UserBufferQuantizationMode",
    "allreduce",
    "gather_along_first_dim",
    "gather_split_1d_tensor",
    "get_all_rng_states",
    "get_distributed_rank",
    "get_distributed_world_size",
    "get_dummy_wgrad",
    "get_te_classes",
    "get_workspace",
    "graph_safe_rng_available",
    "has_te_modules",
    "in_fp8_activation_recompute_phase",
    "initialize_affine_weight_gpu",
    "is_fp8_activation_recompute_enabled",
    "is_graph_safe_rng_state",
    "is_ub_initialized",
    "prepare_te_modules_for_fsdp",
    "reduce_scatter_along_first_dim",
    "reduce_sequence_parallel_gradients",
    "set_all_rng_states",
    "set_tensor_model_parallel_attributes",
    "split_tensor_into_1d_equal_chunks",
    "symmetric_all_reduce",
    "use_reentrant_activation_recompute",
    "using_cublasmp_backend",
]
