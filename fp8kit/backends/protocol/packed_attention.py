"""The contract of attention over sequences that lie one after the other, read and written where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol.attention import AttentionExtras, AttentionSpec
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.formats import DType


class Lying(NamedTuple):
    """Where sequences lie: ``starts_q``, ``starts_kv``, int32 (b + 1,), where each begins in the tokens of q
    and of k, as ``unpack_sequences`` takes them; ``longest_q``, ``longest_kv``: none is longer."""

    starts_q: ArrayView
    starts_kv: ArrayView
    longest_q: int
    longest_kv: int


def _workspace(backward: bool) -> Callable[[Any, Any], int]:
    def measure(kernels: Any, a: Any) -> int:
        shapes, strides = ([getattr(x, name) for x in (a.q, a.k, a.v)] for name in ("shape", "strides"))
        sizes = a.lying.starts_q.shape[0] - 1, a.lying.longest_q, a.lying.longest_kv
        dbias = a.dbias.shape if backward and a.dbias is not None else None
        deterministic = not backward or a.deterministic
        asked = (*shapes, sizes, dbias, a.q.dtype, a.spec, backward, deterministic, strides)
        return int(kernels.packed_attention_workspace(*asked))

    return measure


def _flops(products: int) -> Callable[[Any], float]:
    """Returns the function that counts the operations of ``products`` products of the size of q k^T, with
    sequences of their mean length; a causal mask leaves half of each."""

    def count(a: Any) -> float:
        columns = a.k.shape[0] / max(1, a.lying.starts_kv.shape[0] - 1)
        whole = float(2 * products * a.q.size * columns)
        return whole / 2 if a.spec.window == (-1, 0) else whole

    return count


class PackedAttentions(Protocol):
    """Attention over sequences one after the other. ``spec.padded`` is true, and ``spec.qkv_format`` has no
    meaning. What lies between the sequences is padding: it is never read, and is 0 in what is written. An
    engine that brings ``attention_fwd`` and not these is not asked about packed sequences."""

    @kernel(writes="o lse", workspace=_workspace(backward=False), flops=_flops(2))
    def packed_attention_fwd(
        self,
        q: ArrayView,
        k: ArrayView,
        v: ArrayView,
        o: ArrayView,
        lse: ArrayView,
        lying: Lying,
        extras: AttentionExtras,
        spec: AttentionSpec,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """``attention_fwd`` of the padded batches (b, longest, h, d) that ``unpack_sequences`` makes of q: h
        (t_q, h, d), k: h (t_kv, h_kv, d) and v: h (t_kv, h_kv, d_v), which may be strided, last stride 1; o:
        h (t_q, h, d_v), likewise, as ``pack_sequences`` makes it. lse: float32 (b, h, longest_q)."""

    @kernel(
        writes="dq dk dv dbias doffset", ordered=True, workspace=_workspace(backward=True), flops=_flops(5)
    )
    def packed_attention_bwd(
        self,
        do: ArrayView,
        q: ArrayView,
        k: ArrayView,
        v: ArrayView,
        o: ArrayView,
        lse: ArrayView,
        dq: ArrayView,
        dk: ArrayView,
        dv: ArrayView,
        dbias: ArrayView | None,
        doffset: ArrayView | None,
        lying: Lying,
        extras: AttentionExtras,
        spec: AttentionSpec,
        deterministic: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Gradients of ``packed_attention_fwd``, as ``attention_bwd`` makes them. do like o; dq, dk, dv like
        q, k, v, may be strided."""

    @workspace_of("packed_attention_fwd", "packed_attention_bwd")
    def packed_attention_workspace(
        self,
        q: Shape,
        k: Shape,
        v: Shape,
        sizes: tuple[int, int, int],
        dbias: Shape | None,
        dtype: DType,
        spec: AttentionSpec,
        backward: bool,
        deterministic: bool,
        strides: Sequence[Shape],
    ) -> int:
        """Bytes of workspace, as ``attention_workspace`` has it; ``sizes``: sequences, longest_q,
        longest_kv."""
