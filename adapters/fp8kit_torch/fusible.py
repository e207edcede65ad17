"""``te.ops``: operations one by one, and ``Sequential`` of them, under Transformer Engine's names.

Each is a module on fp8kit's operations and computes what its namesake does, FP8 under ``autocast`` included.
fp8kit fuses nothing across them itself: that is what ``LayerNormLinear``, ``LayerNormMLP`` and
``TransformerLayer`` are; what a program registers does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import flag
from fp8kit.errors import ArgumentError
from fp8kit.ops.dropout_add import add
from fp8kit_torch import norm
from fp8kit_torch.arguments import want_input
from fp8kit_torch.call import apply
from fp8kit_torch.checks import CONSTRUCTED, check, probability
from fp8kit_torch.functional import dropout_add
from fp8kit_torch.fusible_activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from fp8kit_torch.fusible_products import BasicLinear, GroupedLinear, Linear, Quantize
from fp8kit_torch.fusible_ranks import AllGather, AllReduce, ReduceScatter, tensor_ranks
from fp8kit_torch.fusion import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationFuser,
    Sequential,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from fp8kit_torch.norm import L2Normalization
from fp8kit_torch.parameters import ParameterModule
from fp8kit_torch.specs import spec_for


class Identity(BasicOperation):
    """The input as it is."""

    def forward(self, input: Tensor) -> Tensor:
        """``input``: any tensor, which is the result."""
        return input


class Bias(FusibleOperation, ParameterModule):
    """y = x + ``bias``, (size,), which starts at 0. ``tensor_parallel``: the ranks of
    ``tensor_parallel_group`` (None: all processes) share it, so that there are size / ranks of it here."""

    def __init__(
        self,
        size: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        check("ops.Bias", CONSTRUCTED, locals())
        super().__init__()
        ranks = tensor_ranks("ops.Bias", "tensor_parallel_group", tensor_parallel_group)
        ranks = ranks if flag("ops.Bias", "tensor_parallel", tensor_parallel) else None
        if ranks is not None and size % ranks.size:
            raise ArgumentError("ops.Bias", "size", size, f"a multiple of the {ranks.size} ranks")
        own = size if ranks is None else size // ranks.size
        self.add_parameter("bias", (own,), 0.0, dtype, device)

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: h (..., size); so is the result."""
        inp = want_input("ops.Bias", "inp", inp, self.bias.shape[0])
        return apply(add, spec_for("AddSpec"), {"a": inp, "b": self.bias.to(inp.dtype)})["y"]


class _Norm(FusibleOperation):
    """How the norms here are made."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            normalized_shape, eps, params_dtype=dtype, zero_centered_gamma=zero_centered_gamma, device=device
        )


class LayerNorm(_Norm, norm.LayerNorm):
    """``fp8kit_torch.LayerNorm``; ``sm_margin``: accepted, a hint about kernels that run beside it."""


class RMSNorm(_Norm, norm.RMSNorm):
    """``fp8kit_torch.RMSNorm``; ``sm_margin``: accepted, as for ``LayerNorm``."""


class Dropout(BasicOperation):
    """Elements dropped with probability ``p`` while training, the rest divided by 1 - p."""

    def __init__(self, p: float) -> None:
        super().__init__()
        probability("ops.Dropout", "p", p)
        self.dropout_probability = float(p)

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: h (..., N); so is the result."""
        p = self.dropout_probability
        return dropout_add(inp, p=p) if self.training and p else inp


class ConstantScale(BasicOperation):
    """y = x * ``scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = float(scale)

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: any shape and dtype; so is the result."""
        return inp * self.scale


class Reshape(BasicOperation):
    """The same elements in another ``shape``, of which one extent may be -1."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: any tensor of that many elements."""
        return inp.reshape(self.shape)


class AddExtraInput(BasicOperation):
    """x + the next extra input, of x's shape. ``in_place``: accepted; nothing is written over here."""

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()

    def forward(self, inp: Tensor, extra: Tensor) -> Tensor:
        """Both of one shape and dtype; so is the result."""
        return inp + extra


class MakeExtraOutput(BasicOperation):
    """x, which is an extra output too. ``in_place``: accepted, as for ``AddExtraInput``."""

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        """(inp, inp)."""
        return inp, inp


def is_op_fuser_grouped_tensor_path_supported(recipe: Any, dtype: torch.dtype) -> bool:
    """Whether a sequence multiplies groups of rows that lie in one ``GroupedTensor``, as Transformer Engine's
    kernels of later GPUs do: never; ``GroupedLinear`` reads the groups' sizes from the device itself."""
    return False


__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationFuser",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "is_op_fuser_grouped_tensor_path_supported",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
