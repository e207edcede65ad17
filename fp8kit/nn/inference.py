"""``InferenceParams`` in native arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends import dispatch
from fp8kit.formats import DType
from fp8kit.layers import inference
from fp8kit.nn.layer import CONSTRUCTED
from fp8kit.nn.module import resolve


class InferenceParams(inference.InferenceParams):
    constructor_rules = CONSTRUCTED

    def _place(self, device: Any) -> None:
        self.device = resolve("InferenceParams", None, device)[1]

    def _empty(self, shape: Shape, dtype: DType, zero: bool = False) -> ArrayView:
        return (arrays.zeros if zero else arrays.empty)(shape, dtype, self.device)

    def as_new(self, operation: str, name: str, array: Any) -> ArrayView:
        view = arrays.to(arrays.as_view(array, operation, name), self.device)
        return view if view.strides[-1:] == (1,) else arrays.contiguous(view)

    def on_host(self, sums: Any) -> np.ndarray[Any, Any] | None:
        if sums is None or arrays.as_view(sums).device.kind != "cpu":
            return None
        return arrays.as_view(sums).numpy()

    def _upload(self, host: np.ndarray[Any, Any]) -> ArrayView:
        return arrays.to(host, self.device)

    def _given(self, operation: str, name: str, array: Any) -> ArrayView:
        return arrays.to(arrays.as_view(array, operation, name), self.device)

    def _copy(self, new: ArrayView, whole: ArrayView) -> None:
        arrays.assign(whole.slice(0, 0, new.shape[0]), new)

    def _part(self, whole: ArrayView, offset: int, shape: Shape) -> ArrayView:
        return whole.slice(0, offset, int(np.prod(shape))).reshape(*shape)

    def _append(self, new: ArrayView, cache: ArrayView, qkv_format: str) -> None:
        pages, fresh, totals = (self._sent(name) for name in ("pages", "cu_seqlens_q", "cu_seqlens_kv"))
        starts, stream = fresh if qkv_format == "thd" else None, arrays.current_stream(self.device)
        append = dispatch.kernels(self.device).cache_append_
        append(new, cache, pages, fresh, totals, starts, qkv_format, stream)

    def _first(self, cache: ArrayView, rows: int) -> ArrayView:
        return cache.slice(0, 0, rows)

    def _gather(self, cache: ArrayView, shape: Shape, pages: ArrayView, totals: ArrayView) -> ArrayView:
        y = self._empty(shape, cache.dtype)
        dispatch.kernels(self.device).cache_gather(
            cache, y, pages, totals, "bshd", arrays.current_stream(self.device)
        )
        return y
