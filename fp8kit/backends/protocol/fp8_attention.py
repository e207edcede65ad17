"""The contract of attention in FP8: products of FP8 codes with one scale a tensor, whose results are FP8's
too."""

from __future__ import annotations

from typing import Any, Protocol

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol.attention import AttentionExtras, AttentionSpec
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.formats import Format
from fp8kit.quantization import Quantizer


def _workspace(backward: bool) -> Any:
    def measure(kernels: Any, a: Any) -> int:
        gradients, deterministic = (a.dqkv.format, a.deterministic) if backward else (a.p.format, True)
        asked = a.q.shape, a.k.shape, a.v.shape, a.spec, a.p.format, gradients, backward, deterministic
        return int(kernels.fp8_attention_workspace(*asked))

    return measure


def _flops(products: int) -> Any:
    def count(a: Any) -> float:
        seen = 0.5 if a.spec.window == (-1, 0) else 1.0
        return seen * float(2 * products * a.q.size * a.k.shape[2])

    return count


class Fp8Attentions(Protocol):
    """Attention over padded batches, without mask array, bias and dropout, with softmax type "vanilla".

    All arrays (b, heads, s, features), C-contiguous, whatever ``spec.qkv_format`` says: codes uint8, the
    others float32. An operand x stands for decode(codes) * scale_inv. Padding holds 0. With Q(x) as
    ``QuantizedAttentions`` has it, the scale from the amax of what is rounded, by ``scale_from_amax`` with
    the quantizer's rule and epsilon and the largest float32 for Inf.

    An engine may sum as its tensor cores do, and may round the probabilities of some columns of a row before
    it has seen the others: by the largest score so far, m', instead of the row's own, m."""

    @kernel(writes="o lse", workspace=_workspace(backward=False), flops=_flops(2))
    def fp8_attention_fwd(
        self,
        q: ArrayView,
        k: ArrayView,
        v: ArrayView,
        scale_invs: ArrayView,
        o: ArrayView,
        lse: ArrayView,
        extras: AttentionExtras,
        spec: AttentionSpec,
        p: Quantizer,
        out: Quantizer,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """As ``quantized_attention_fwd``, then o = Q(o) by ``out``. Codes of q, k and v are of ``p``'s
        format, which is ``out``'s. scale_invs: float32 (3,), of q, k and v. lse: float32 (b, h, s_q)."""

    @kernel(writes="dq dk dv", workspace=_workspace(backward=True), flops=_flops(5))
    def fp8_attention_bwd(
        self,
        do: ArrayView,
        q: ArrayView,
        k: ArrayView,
        v: ArrayView,
        scale_invs: ArrayView,
        o: ArrayView,
        lse: ArrayView,
        dq: ArrayView,
        dk: ArrayView,
        dv: ArrayView,
        extras: AttentionExtras,
        spec: AttentionSpec,
        p: Quantizer,
        out: Quantizer,
        ds: Quantizer,
        dqkv: Quantizer,
        groups: tuple[int, int, int],
        deterministic: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """As ``quantized_attention_bwd`` with Q(o) by ``out`` in the place of o, then dq, dk and dv = Q of
        them by ``dqkv``: those with the same number in ``groups`` (0 to 2) have one scale, from the largest
        of their amaxes. Codes of do are of ``ds``'s format, which is ``dqkv``'s. scale_invs: float32 (4,), of
        do, q, k and v. deterministic: the same arguments give the same bits. dq, dk and dv are written
        everywhere, padding as 0."""

    @workspace_of("fp8_attention_fwd", "fp8_attention_bwd")
    def fp8_attention_workspace(
        self,
        q: Shape,
        k: Shape,
        v: Shape,
        spec: AttentionSpec,
        forward_format: Format,
        backward_format: Format,
        backward: bool,
        deterministic: bool,
    ) -> int:
        """Bytes of workspace for q, k and v of these shapes; 0 where the engine does not take the call, or
        has no tensor cores for it: ``quantized_attention_fwd`` and ``quantized_attention_bwd`` then do."""
