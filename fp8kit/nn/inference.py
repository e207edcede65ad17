"""``InferenceParams``: the keys and values of sequences that grow token by token, kept from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends import dispatch
from fp8kit.formats import DType
from fp8kit.layers.kv_steps import Steps
from fp8kit.nn.module import resolve


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
    token see its sequence up to itself. It serves inference: under ``no_grad()``.

    * ``max_batch_size``: sequences in a step. ``max_sequence_length``: tokens of a sequence. ``max_ctx_len``:
      new tokens of a sequence in one step (None: ``max_sequence_length``).
    * ``num_heads_kv`` g, ``head_dim_k`` d, ``head_dim_v`` (None: d), ``dtype``: of the caches; None: as each
      layer's own.
    * ``is_paged``: False gives every sequence room for ``max_sequence_length`` at once; True hands out pages
      of ``page_size`` tokens, as sequences grow, of which there are ``total_num_pages``.
    * ``qkv_format``: of the layers: "bshd", "sbhd" or "thd". ``custom_cache_manager``: None only.
    * ``device``: where the caches lie; None is the default device.

    ``sequences``: id -> length, new tokens included, in the step's order.

    Raises Fp8kitError kinds for what does not fit. Source of names: Transformer Engine; of the pages: Kwon et
    al., PagedAttention, 2023.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: Any = None,
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
        kind, self.device = resolve("InferenceParams", dtype, device, "dtype")
        super().__init__(
            max_batch_size,
            max_sequence_length,
            num_heads_kv,
            head_dim_k,
            None if dtype is None else kind,
            head_dim_v,
            is_paged,
            total_num_pages,
            page_size,
            max_ctx_len,
            qkv_format,
            custom_cache_manager,
        )

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
