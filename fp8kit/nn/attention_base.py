"""``AttentionBase``: what attention, and layers that are made of others, ask of the native frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Device
from fp8kit.autograd import Tensor
from fp8kit.backends.policy import get_policy
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import bool_, uint8
from fp8kit.layers.attention_base import AttentionBase as Shared
from fp8kit.layers.attention_inputs import MISPLACED, alibi_slopes
from fp8kit.nn.layer import NativeLayer
from fp8kit.nn.module import as_tensor


@lru_cache(maxsize=64)
def alibi_slopes_for(heads: int, device: Device) -> ArrayView:
    """ALiBi's slopes, float32 (h,)."""
    return arrays.to(np.array(alibi_slopes(heads), np.float32), device)


class AttentionBase(Shared, NativeLayer):
    """Base of attention and of the layers around it."""

    @property
    def parts(self) -> Mapping[str, Any]:
        return vars(self)

    def call_part(self, part: Any, x: Any, is_first_microbatch: bool | None, **asked: Any) -> Any:
        return part.compute(x, is_first_microbatch, **asked)

    def check_part(self, operation: str, name: str, x: Tensor) -> None:
        found = getattr(vars(self)[name], "weight_inputs", None)
        for weight in () if found is None else found().values():
            if weight.dtype is not x.dtype:
                wanted = f"{weight.dtype.name} as the parameters"
                raise FormatError(operation, "hidden_states", x.dtype.name, wanted)

    def constant(self, argument: str, value: Any, like: Any) -> ArrayView:
        view = arrays.to(as_tensor(self.layer_name, argument, value).view, like.device)
        return arrays.contiguous(view)

    def detached(self, parameter: Any, like: Tensor) -> ArrayView:
        return parameter.view  # type: ignore[no-any-return]

    def host_views(self, inputs: Mapping[str, Any]) -> Mapping[str, ArrayView]:
        return inputs

    def host_values(self, value: Any) -> np.ndarray[Any, Any]:
        return value.numpy()  # type: ignore[no-any-return]

    def index_array(self, values: np.ndarray[Any, Any], like: Any) -> ArrayView:
        return arrays.to(values, like.device)

    def indices(self, function: Callable[..., Any], *views: ArrayView) -> ArrayView:
        there = [arrays.native(arrays.as_view(view)) for view in views]
        library = import_module(type(there[0]).__module__.partition(".")[0])  # numpy or cupy
        return arrays.as_view(library.ascontiguousarray(function(library, *there), dtype=np.int32))

    def sums_of_mask(self, mask: Tensor) -> np.ndarray[Any, Any]:
        if mask.dtype not in (bool_, uint8):
            wanted = "bool, True where masked out"
            raise FormatError(self.layer_name, "attention_mask", mask.dtype.name, wanted)
        rows = mask.numpy()[:, 0, 0] != 0
        if (rows[:, :-1] & ~rows[:, 1:]).any():
            raise ShapeError(self.layer_name, "attention_mask", *MISPLACED)
        return np.concatenate([[0], np.cumsum((~rows).sum(1))]).astype(np.int32)

    def slopes(self, heads: int, device: Device) -> ArrayView:
        return alibi_slopes_for(heads, device)

    def is_deterministic(self) -> bool:
        return get_policy().deterministic
