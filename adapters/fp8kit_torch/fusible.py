"""``te.ops``: operations one by one, and ``Sequential`` of them, under Transformer Engine's names.

Each is a module on fp8kit's operations and computes what its namesake does, FP8 under ``autocast`` included;
nothing is fused across them: that is what ``LayerNormLinear``, ``LayerNormMLP`` and ``TransformerLayer`` are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError
from fp8kit.ops.activation import activation
from fp8kit.ops.dropout_add import add
from fp8kit_torch import linear, norm
from fp8kit_torch.arguments import defaults, only, refuse, want_input
from fp8kit_torch.call import apply
from fp8kit_torch.checks import CONSTRUCTED, check, probability
from fp8kit_torch.functional import dropout_add
from fp8kit_torch.parameters import ParameterModule
from fp8kit_torch.specs import spec_for

L2Normalization, Identity = norm.L2Normalization, torch.nn.Identity


def _start(weight: Tensor) -> None:
    torch.nn.init.kaiming_uniform_(weight, math.sqrt(5))


class BasicOperation(torch.nn.Module):
    """Base of operations on one tensor; ``num_extra_inputs`` and ``num_extra_outputs`` beside it."""

    num_extra_inputs = 0
    num_extra_outputs = 0


class Linear(linear.Linear):
    """y = x W^T + b: ``fp8kit_torch.Linear`` whose ``weight`` starts as torch's does.
    ``accumulate_into_main_grad``: its ``fuse_wgrad_accumulation``. Others: tensor parallelism, at its
    defaults only."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        check("ops.Linear", CONSTRUCTED, locals())
        refuse("ops.Linear", _PARALLEL, locals())
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            device=device,
            params_dtype=dtype,
            init_method=_start,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
        )


_PARALLEL = defaults(
    Linear.__init__, "tensor_parallel_mode tensor_parallel_group sequence_parallel rng_state_tracker_function"
)


class BasicLinear(Linear):
    """y = x W^T. Arguments as ``Linear``; ``userbuffers_options``: None only."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: Any = None,
    ) -> None:
        refuse("ops.BasicLinear", _PARALLEL | {"userbuffers_options": None}, locals())
        super().__init__(
            in_features,
            out_features,
            bias=False,
            device=device,
            dtype=dtype,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )


class Bias(ParameterModule):
    """y = x + ``bias``, (size,), which starts at 0."""

    num_extra_inputs = num_extra_outputs = 0

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
        refuse("ops.Bias", {"tensor_parallel": False, "tensor_parallel_group": None}, locals())

        super().__init__()
        self.add_parameter("bias", (size,), 0.0, dtype, device)

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: h (..., size); so is the result."""
        inp = want_input("ops.Bias", "inp", inp, self.bias.shape[0])
        return apply(add, spec_for("AddSpec"), {"a": inp, "b": self.bias.to(inp.dtype)})["y"]


class _Norm:
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
        refuse(f"ops.{type(self).__name__}", {"sm_margin": 0}, locals())
        super().__init__(  # type: ignore[call-arg]
            normalized_shape, eps, params_dtype=dtype, zero_centered_gamma=zero_centered_gamma, device=device
        )


class LayerNorm(_Norm, norm.LayerNorm):
    """``fp8kit_torch.LayerNorm``; ``sm_margin``: 0 only."""


class RMSNorm(_Norm, norm.RMSNorm):
    """``fp8kit_torch.RMSNorm``; ``sm_margin``: 0 only."""


class _Activation(BasicOperation):
    activation = ""

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        neutral = {"cache_quantized_input": False, "glu_interleave_size": None}
        refuse(f"ops.{type(self).__name__}", neutral, locals())
        super().__init__()
        self.params: tuple[float, ...] = ()

    def forward(self, inp: Tensor) -> Tensor:
        """``inp``: h (..., F), of a gated activation (..., 2 F), the gate's half first. Returns h (...,
        F)."""
        spec = spec_for("ActivationSpec", self.activation, inp.shape[-1], self.params)
        return apply(activation, spec, {"x": inp})["y"]


def _activation(name: str) -> type[_Activation]:
    """The class of that name, whose activation is the same in small letters."""
    doc = f'"{name.lower()}", see ``fp8kit.backends.activation``.'
    return type(name, (_Activation,), {"activation": name.lower(), "__module__": __name__, "__doc__": doc})


GELU, QGELU, ReLU, SReLU, SiLU = map(_activation, ("GELU", "QGELU", "ReLU", "SReLU", "SiLU"))
GLU, GEGLU, QGEGLU, ReGLU = map(_activation, ("GLU", "GEGLU", "QGEGLU", "ReGLU"))
SReGLU, SwiGLU = map(_activation, ("SReGLU", "SwiGLU"))


class ClampedSwiGLU(_Activation):
    """ "clamped_swiglu", see ``fp8kit.backends.activation``."""

    activation = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.params = (float(limit), float(alpha), float(glu_linear_offset))


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


class Sequential(torch.nn.Sequential):
    """Operations, and any other modules, one after the other."""

    def forward(self, input: Tensor, *extra_inputs: Tensor, op_kwargs: Any = None) -> Any:
        """The result, or (the result, extra outputs...), in order. ``extra_inputs``: as many as the
        operations want, in order; Fp8kitError otherwise. ``op_kwargs``: None only."""
        only("ops.Sequential", {"op_kwargs": (op_kwargs, None)})
        wanted = [getattr(module, "num_extra_inputs", 0) for module in self]
        if sum(wanted) != len(extra_inputs):
            raise ArgumentError("ops.Sequential", "extra_inputs", len(extra_inputs), f"{sum(wanted)} tensors")
        x, extras, made = input, iter(extra_inputs), []
        for module, count in zip(self, wanted, strict=True):
            x = module(x, *(next(extras) for _ in range(count)))
            if getattr(module, "num_extra_outputs", 0):
                x, *more = x
                made += more
        return (x, *made) if made else x
