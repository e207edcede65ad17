"""The contract of attention over keys and values that lie in a cache of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol.attention import AttentionExtras, AttentionSpec
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.formats import DType


def _workspace(kernels: Any, a: Any) -> int:
    shapes = a.q.shape, a.k_cache.shape, a.v_cache.shape
    asked = (*shapes, a.longest, a.q.dtype, a.spec, (a.q.strides, a.k_cache.strides, a.v_cache.strides))
    return int(kernels.paged_attention_workspace(*asked))


def _flops(a: Any) -> float:
    """Returns the operations of q k^T and P v, with every sequence as long as the longest; a causal mask
    leaves half of each."""
    whole = float(4 * a.q.size * a.longest)
    return whole / 2 if a.spec.window == (-1, 0) and not a.spec.bottom_right else whole


class PagedAttentions(Protocol):
    """Attention over a cache of pages. ``spec.padded`` is true, and there is neither a mask array nor a bias
    array; it has no backward."""

    @kernel(writes="o lse", workspace=_workspace, flops=_flops)
    def paged_attention_fwd(
        self,
        q: ArrayView,
        k_cache: ArrayView,
        v_cache: ArrayView,
        o: ArrayView,
        lse: ArrayView,
        pages: ArrayView,
        longest: int,
        extras: AttentionExtras,
        spec: AttentionSpec,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """``attention_fwd`` of q and of the padded batches of ``longest`` positions that ``cache_gather``
        makes of the caches: sequence b's position p, of the length that ``extras.cu_seqlens_kv`` says, is
        k_cache[pages[b, p / size], p % size], and 0 where the table names no page that there is. k_cache: h
        (pages, size, h_kv, d), v_cache: h (pages, size, h_kv, d_v), C-contiguous; pages: int32 (b, m), m
        pages hold ``longest`` positions. What lies in pages behind a sequence's end never reaches o."""

    @workspace_of("paged_attention_fwd")
    def paged_attention_workspace(
        self,
        q: Shape,
        k_cache: Shape,
        v_cache: Shape,
        longest: int,
        dtype: DType,
        spec: AttentionSpec,
        strides: Sequence[Shape],
    ) -> int:
        """Bytes of workspace, as ``attention_workspace`` has it; ``strides``: of q and the caches."""
