"""``InferenceParams`` in torch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.formats import DType
from fp8kit.layers import inference
from fp8kit_torch.checks import CONSTRUCTED, tensor
from fp8kit_torch.kv_cache import handle_of
from fp8kit_torch.parameters import placed
from fp8kit_torch.state import stream_of
from fp8kit_torch.te_compat.capture import is_graph_capturing
from fp8kit_torch.views import as_view


class InferenceParams(inference.InferenceParams):
    constructor_rules = CONSTRUCTED
    custom: Any = None  # the program's own manager

    def _place(self, device: Any) -> None:
        self.device = placed("InferenceParams", device)
        self.handle = handle_of(self)  # by which a compiled graph names the object

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = handle_of(self)  # a copy is another one

    def _empty(self, shape: Shape, dtype: DType, zero: bool = False) -> Tensor:
        # torch.compile hashes no DType
        make = torch.zeros if zero else torch.empty
        return make(shape, dtype=getattr(torch, dtype.name), device=self.device)

    def as_new(self, operation: str, name: str, array: Tensor) -> ArrayView:
        if torch.compiler.is_compiling():
            wanted = "a call outside of torch.compile, which runs attention layers with inference_params"
            raise UnsupportedError(operation, name, "a tensor of a compiled graph", wanted)
        view = as_view(array)
        where = as_view(self._sent("pages")).device
        if view.device != where:
            raise ArgumentError(operation, name, f"a tensor on {view.device}", f"{where} as the caches")
        return view if view.strides[-1:] == (1,) else as_view(array.contiguous())

    def on_host(self, sums: Tensor | None) -> np.ndarray[Any, Any] | None:
        return None if sums is None or sums.device.type != "cpu" else sums.numpy()

    def _upload(self, host: np.ndarray[Any, Any]) -> Tensor:
        with torch.inference_mode(False):  # later steps are written there, in any mode
            return torch.from_numpy(host).to(self.device, copy=True)

    def _write(self, whole: Tensor, host: np.ndarray[Any, Any]) -> Tensor:
        return whole.copy_(torch.from_numpy(host))

    def take_manager(self, manager: Any, dtype: Any) -> None:
        if manager is None:
            self.custom = None
            return
        from fp8kit_torch.te_compat.cache_managers import made  # which needs attention

        self.custom = made(manager, self, dtype)

    @property
    def cache_manager(self) -> Any:
        return super().cache_manager if self.custom is None else self.custom

    def pre_step(self, step_dict: Any) -> dict[Any, int]:
        lengths = super().pre_step(step_dict)
        if self.custom is not None:
            self.custom.pre_step(OrderedDict(step_dict))
        return lengths

    def get_seqlens_pre_step(self) -> Tensor:  # type: ignore[override]
        """Lengths of the step's sequences without its new tokens: int32 (batch,), on the CPU."""
        return torch.from_numpy(super().get_seqlens_pre_step())

    def reset(self) -> None:
        super().reset()
        if self.custom is not None:
            self.custom.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        if self.custom is None:
            super().allocate_memory(layer_number)
        else:
            self.custom.allocate_memory(layer_number)

    def inputs(self, layer_number: int, *sizes: Any) -> dict[str, Any]:
        return super().inputs(layer_number, *sizes) if self.custom is None else {}

    def _given(self, operation: str, name: str, array: Any) -> Tensor:
        return tensor(operation, name, array)

    def _copy(self, new: Tensor, whole: Tensor) -> None:
        within = new.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        with torch.inference_mode():  # caches may have been made in it
            whole[: len(new)].copy_(new.clone() if within else new)

    def is_recorded(self) -> bool:
        return is_graph_capturing()

    def _part(self, whole: Tensor, offset: int, shape: Shape) -> Tensor:
        return whole[offset : offset + int(np.prod(shape))].view(shape)

    def _append(self, new: ArrayView, cache: Tensor, qkv_format: str) -> None:
        pages, fresh, totals = (
            as_view(self._sent(name)) for name in ("pages", "cu_seqlens_q", "cu_seqlens_kv")
        )
        starts, stream = fresh if qkv_format == "thd" else None, stream_of(new.device)
        append = dispatch.kernels(new.device).cache_append_
        append(new, as_view(cache), pages, fresh, totals, starts, qkv_format, stream)

    def _first(self, cache: Tensor, rows: int) -> Tensor:
        return cache[:rows]

    def _gather(self, cache: Tensor, shape: Shape, pages: Tensor, totals: Tensor) -> Tensor:
        y = torch.empty(shape, dtype=cache.dtype, device=self.device)
        source = as_view(cache)
        dispatch.kernels(source.device).cache_gather(
            source, as_view(y), as_view(pages), as_view(totals), "bshd", stream_of(source.device)
        )
        return y
