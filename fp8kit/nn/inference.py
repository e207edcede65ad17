"""``InferenceParams`` in native arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends import dispatch
from fp8kit.formats import DType
from fp8kit.layers import inference
from fp8kit.nn.layer import CONSTRUCTED
from fp8kit.nn.module import resolve


class InferenceParams(inference.InferenceParams):
    __doc__ = inference.InferenceParams.__doc__
    constructor_rules = CONSTRUCTED

    def _place(self, device: Any) -> None:
        self.device = resolve("InferenceParams", None, device)[1]

    def _kind(self, dtype: Any) -> DType:
        return formats.dtype(dtype, "InferenceParams", "dtype", formats.HIGH_PRECISION)

    def _empty(self, shape: Shape, dtype: DType) -> ArrayView:
        return arrays.empty(shape, dtype, self.device)

    def _upload(self, host: np.ndarray[Any, Any]) -> ArrayView:
        return arrays.to(arrays.as_view(host), self.device)

    def _part(self, whole: ArrayView, offset: int, shape: Shape) -> ArrayView:
        return whole.slice(0, offset, int(np.prod(shape))).reshape(*shape)

    def _gather(self, cache: ArrayView, shape: Shape, pages: ArrayView, totals: ArrayView) -> ArrayView:
        y = self._empty(shape, cache.dtype)
        dispatch.kernels(self.device).cache_gather(
            cache, y, pages, totals, "bshd", arrays.current_stream(self.device)
        )
        return y
