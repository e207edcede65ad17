"""``NativeLayer``: what the shared layers ask of a frontend, on the native tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arguments import Rule, function, named, optional
from fp8kit.arrays import ArrayView, Shape
from fp8kit.autograd import Tensor, apply, is_grad_enabled, no_grad, tensor, validate
from fp8kit.errors import ShapeError
from fp8kit.formats import int64
from fp8kit.layers import arguments
from fp8kit.layers.base import Init, Layer
from fp8kit.nn import random
from fp8kit.nn.module import Module, as_tensor, make_parameter, make_parts, resolve
from fp8kit.nn.random import normal_init
from fp8kit.nn.recompute import checkpoint
from fp8kit.spec import Operation


def _device(operation: str, name: str, value: Any) -> arrays.Device:
    """Returns a device that is here."""
    return arrays.usable(value, operation, name)


CONSTRUCTED: dict[str, Rule] = {
    **arguments.CONSTRUCTED,
    **named(optional(function), "init_method output_layer_init_method"),
    **named(optional(arguments.parameter_dtype), "params_dtype dtype"),
    "device": optional(_device),
}


class NativeLayer(Layer, Module):
    """Base of layers whose parameters are attributes."""

    constructor_rules = CONSTRUCTED
    call_rules = arguments.CALLED
    # gradients are not accumulated by the operations here
    unsupported = {  # noqa: RUF012
        "fuse_wgrad_accumulation": False,
        "fp8_output": False,
        "fp8_grad": False,
    }

    def as_input(
        self, argument: str, value: Any, features: int | None = None, qkv_format: str | None = None
    ) -> Tensor:
        x = as_tensor(self.layer_name, argument, value)
        if features is not None and x.shape[-1:] != (features,):
            wanted = f"a last dimension of {features}"
            raise ShapeError(self.layer_name, argument, f"shape {x.shape}", wanted)
        if qkv_format is not None and len(x.shape) != len(qkv_format) - 1:
            wanted = f"({', '.join(qkv_format[:-2])}, {features}), {qkv_format!r}"
            raise ShapeError(self.layer_name, argument, f"shape {x.shape}", wanted)
        return x

    def add_parameter(
        self, name: str, shape: Shape, init: Init | float | None, dtype: Any, device: Any
    ) -> None:
        init = normal_init() if init is None else init
        setattr(self, name, make_parameter(shape, init, *resolve(self.layer_name, dtype, device)))

    def add_matrices(
        self, rows: Mapping[str, int], columns: int, init: Init | None, dtype: Any, device: Any
    ) -> None:
        kind, where = resolve(self.layer_name, dtype, device)
        parts = make_parts(list(rows.values()), columns, init or normal_init(), kind, where)
        for name, part in zip(rows, parts, strict=True):
            setattr(self, name, part)

    def host_array(self, value: Any) -> Any:
        return value.view.numpy()

    def read(self, name: str) -> Any:
        return getattr(self, name).view.numpy().astype(np.float32)

    def write(self, name: str, values: Any) -> None:
        parameter = getattr(self, name)
        with no_grad():
            parameter.copy_(tensor(values, dtype=parameter.dtype, device=parameter.device))

    def freeze(self, name: str) -> None:
        getattr(self, name).requires_grad = False

    def mark_parameter(
        self, name: str, dim: int | None, sequence: bool, blocks: tuple[int, ...] = (1,)
    ) -> None:
        parameter = getattr(self, name)
        parameter.partition_dim, parameter.partition_blocks = dim, blocks
        parameter.sequence_parallel = sequence

    def add_no_parameter(self, name: str) -> None:
        setattr(self, name, None)

    def call(
        self, operation: Operation, spec: Any, inputs: Mapping[str, Any], rng: bool = False
    ) -> dict[str, Tensor]:
        return apply(operation, spec, inputs, owner=self, draw=random.next_rng if rng else None)

    def check_call(
        self,
        operation: Operation,
        spec: Any,
        inputs: Mapping[str, Any],
        needs: tuple[str, ...] = (),
        rng: bool = False,
    ) -> None:
        if rng:
            first = next(value for value in inputs.values() if value is not None)
            inputs = {**inputs, "rng": ArrayView(0, (2,), int64, first.device)}
        validate(operation, spec, inputs, self, needs)

    def stand_in(self, shape: Shape, dtype: Any, device: Any) -> ArrayView:
        return ArrayView(0, shape, dtype, device)

    def call_checkpointed(self, function: Callable[..., Any], **arguments: Any) -> Any:
        return checkpoint(function, **arguments)

    def is_grad_enabled(self) -> bool:
        return is_grad_enabled()

    def no_grad(self) -> AbstractContextManager[Any]:
        return no_grad()
