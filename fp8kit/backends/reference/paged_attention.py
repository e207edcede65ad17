"""Attention over keys and values in a cache of pages: read into padded batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView, as_view
from fp8kit.backends.protocol import AttentionExtras
from fp8kit.backends.reference.attention import attention_fwd
from fp8kit.backends.reference.kv_cache import cache_gather


def paged_attention_fwd(
    q: ArrayView,
    k_cache: ArrayView,
    v_cache: ArrayView,
    o: ArrayView,
    lse: ArrayView,
    pages: ArrayView,
    longest: int,
    extras: AttentionExtras,
    spec: Any,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``protocol.Kernels.paged_attention_fwd``."""
    assert extras.cu_seqlens_kv is not None
    batch = pages.shape[0]
    leading = (longest, batch) if spec.qkv_format == "sbhd" else (batch, longest)
    k, v = (
        as_view(np.empty((*leading, *cache.shape[2:]), cache.dtype.numpy)) for cache in (k_cache, v_cache)
    )
    for cache, dense in ((k_cache, k), (v_cache, v)):
        cache_gather(cache, dense, pages, extras.cu_seqlens_kv, spec.qkv_format, stream)
    attention_fwd(q, k, v, o, lse, extras, dataclasses.replace(spec, zero_padded=True), None, stream)
