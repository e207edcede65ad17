"""``InferenceParams``: the keys and values of sequences that grow token by token, kept from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8kit.arrays import Shape
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError
from fp8kit.formats import HIGH_PRECISION, DType
from fp8kit.layers.kv_steps import Steps
from fp8kit_torch.arguments import only
from fp8kit_torch.calibration import stream_of
from fp8kit_torch.checks import CONSTRUCTED, check
from fp8kit_torch.kv_cache import handle_of
from fp8kit_torch.parameters import placed
from fp8kit_torch.views import as_view, dtype_of


class InferenceParams(Steps):
    """A cache of keys and values for every layer of a model, and the sequences that are in it.

    Each step of generation is announced once, then run through the whole model::

        params = InferenceParams(max_batch_size=8, max_sequence_length=2048, qkv_format="sbhd")
        params.pre_step({"a": 5, "b": 3})        # sequence id -> new tokens: two prompts
        y = model(x, inference_params=params)    # x (5, 2, H): a's tokens, b's tokens and 2 rows of padding
        params.pre_step({"a": 1, "c": 7})        # a goes on, b is finished, c joins

    A sequence lives as long as every step names it. Every layer needs a ``layer_number`` of its own. With
    "sbhd" and "bshd" the new tokens of a sequence come first in its column, padding after them; with "thd"
    the sequences' new tokens lie one after the other. Masks are meant for whole sequences: "causal" lets each
    token see its sequence up to itself. It serves inference: under ``torch.no_grad()``. A model may be
    compiled, with ``fullgraph=True`` too: ``pre_step`` stays outside of what is, and longer sequences compile
    nothing anew.

    * ``max_batch_size``: sequences in a step. ``max_sequence_length``: tokens of a sequence. ``max_ctx_len``:
      new tokens of a sequence in one step (None: ``max_sequence_length``).
    * ``num_heads_kv`` g, ``head_dim_k`` d, ``head_dim_v`` (None: d), ``dtype``: of the caches; None: as each
      layer's own.
    * ``is_paged``: False gives every sequence room for ``max_sequence_length`` at once; True hands out pages
      of ``page_size`` tokens, as sequences grow, of which there are ``total_num_pages``.
    * ``qkv_format``: of the layers: "bshd", "sbhd" or "thd". ``custom_cache_manager``: None only,
      NotImplementedError otherwise.
    * ``device``: where the caches lie; None as for parameters.

    ``sequences``: id -> length, new tokens included, in the step's order. ``handle``: int64 () on the CPU, by
    which a compiled graph names the object.

    Raises Fp8kitError kinds for what does not fit. Source of names: Transformer Engine; of the pages: Kwon et
    al., PagedAttention, 2023.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: object = None,
        *,
        device: Any = None,
    ) -> None:
        check("InferenceParams", CONSTRUCTED, locals())
        only("InferenceParams", {"custom_cache_manager": (custom_cache_manager, None)})
        self.device = placed("InferenceParams", device)
        kind = next((kind for kind in HIGH_PRECISION if dtype_of(kind) is dtype), None)
        if dtype is not None and kind is None:
            names = ", ".join(known.name for known in HIGH_PRECISION)
            raise ArgumentError("InferenceParams", "dtype", dtype, f"one of {names}")
        super().__init__(
            max_batch_size,
            max_sequence_length,
            num_heads_kv,
            head_dim_k,
            kind,
            head_dim_v,
            is_paged,
            total_num_pages,
            page_size,
            max_ctx_len,
            qkv_format,
        )
        self.handle = handle_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = handle_of(self)  # a copy is another one

    def _empty(self, shape: Shape, dtype: DType) -> Tensor:
        # torch.compile hashes no DType
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=self.device)

    def _upload(self, host: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(host).to(self.device)

    def _part(self, whole: Tensor, offset: int, shape: Shape) -> Tensor:
        return whole[offset : offset + int(np.prod(shape))].view(shape)

    def _gather(self, cache: Tensor, shape: Shape, pages: Tensor, totals: Tensor) -> Tensor:
        y = torch.empty(shape, dtype=cache.dtype, device=self.device)
        source = as_view(cache)
        dispatch.kernels(source.device).cache_gather(
            source, as_view(y), as_view(pages), as_view(totals), "bshd", stream_of(source.device)
        )
        return y
