"""The contract of attention over quantised operands: the products' operands are values of a narrow format, in
float32, and the probabilities and the scores' gradients are rounded to one between the products."""

from __future__ import annotations

from typing import Any, Protocol

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol.attention import AttentionExtras, AttentionSpec
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.quantization import Quantizer

# numbers of the casts of P, in forward and in backward, and of dS; dropout has number 0
P_DRAWS, DS_DRAW = (1, 2), 3


def _workspace(backward: bool) -> Any:
    def measure(kernels: Any, a: Any) -> int:
        dbias = a.dbias.shape if backward and a.dbias is not None else None
        asked = a.q.shape, a.k.shape, a.v.shape, dbias, a.spec, backward
        return int(kernels.quantized_attention_workspace(*asked))

    return measure


def _flops(products: int) -> Any:
    def count(a: Any) -> float:
        return float(2 * products * a.q.size * a.k.shape[a.spec.qkv_format.index("s")])

    return count


class QuantizedAttentions(Protocol):
    """Attention over padded batches, all arrays float32. With Q(x) = decode(encode(x * scale)) * (1 / scale),
    saturating, in a quantizer's format: to nearest even or, by ``stochastic_bits`` as ``quantize`` does, with
    word draw * 2**48 + i * s_kv + j of ``rng``'s stream, i the row's index in lse and j its column. ``draw``:
    see ``P_DRAWS`` and ``DS_DRAW``; rng: None where nothing is rounded so."""

    @kernel(updates="x", exact=True)
    def clear_padding_(self, x: ArrayView, cu_seqlens: ArrayView, stream: int) -> None:
        """x[b, :, i] = 0 for rows i from the batch's true length on. x: float32 (b, h, s, d), C-contiguous;
        cu_seqlens: int32 (b + 1,), of any values (``protocol.attention``)."""

    @kernel(writes="o lse", workspace=_workspace(backward=False), flops=_flops(2))
    def quantized_attention_fwd(
        self,
        q: ArrayView,
        k: ArrayView,
        v: ArrayView,
        o: ArrayView,
        lse: ArrayView,
        extras: AttentionExtras,
        spec: AttentionSpec,
        p: Quantizer,
        rng: ArrayView | None,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """As ``attention_fwd``, with its scores and rules, but: m = the largest score of a row, its further
        one included; e = exp(score - m); l = the sum of e, not rounded, and exp(further score - m); o =
        (dropout(Q(e)) v) / l, with ``p``'s format and ``static_scale``; lse = m + log(l).

        All arrays float32, also a bias. Padding of q, k and v holds 0. q, k, v and o may be strided, last
        stride 1."""

    @kernel(
        writes="dq dk dv dbias doffset", ordered=True, workspace=_workspace(backward=True), flops=_flops(5)
    )
    def quantized_attention_bwd(
        self,
        do: ArrayView,
        q: ArrayView,
        k: ArrayView,
        v: ArrayView,
        o: ArrayView,
        lse: ArrayView,
        do_rows: ArrayView,
        q_rows: ArrayView,
        k_rows: ArrayView,
        dq: ArrayView,
        dk: ArrayView,
        dv: ArrayView,
        dbias: ArrayView | None,
        doffset: ArrayView | None,
        extras: AttentionExtras,
        spec: AttentionSpec,
        p: Quantizer,
        ds: Quantizer,
        rng: ArrayView | None,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Gradients, of what forward would give without its roundings, by rounded operands: P = exp(score -
        lse), D = rowsum(do * o), dS = scale * P * (dropout(do v^T) - D); the scale of Q for dS follows from
        the amax of all of dS by ``scale_from_amax``, with ``ds``'s rule and epsilon and the largest float32
        for Inf. dv = dropout(Q(P))^T do_rows, dq = Q(dS) k_rows, dk = Q(dS)^T q_rows. dbias and doffset as in
        ``attention_bwd``, of dS before it is rounded.

        ``do``, ``q``, ``k``: as operands of products over features; ``do_rows``, ``q_rows``, ``k_rows``: the
        same as operands of products over rows, whose codes may be others. All arrays float32; padding of q,
        k, v and do holds 0; o and do have the same strides, all may be strided, last stride 1. dq, dk and dv
        are written everywhere, padding as 0."""

    @workspace_of("quantized_attention_fwd", "quantized_attention_bwd")
    def quantized_attention_workspace(
        self, q: Shape, k: Shape, v: Shape, dbias: Shape | None, spec: AttentionSpec, backward: bool
    ) -> int:
        """Bytes of workspace for q, k and v of these shapes; ``dbias``: the bias's shape where backward makes
        its gradient."""
