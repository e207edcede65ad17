"""The contract of attention, and what its kernels need to know beside their arrays.

Running sums (cu_seqlens and the like, int32 (b + 1,)) are right where they start at 0, never fall and end at
most at the total (t tokens; b * s positions), and where no sequence is longer than s, or than max_seqlen.
Starts, the last of which is an end, lie in [0, t], the first of them anywhere, and leave room for each
sequence before the next. Other values are the caller's error: operations refuse them on the CPU
(``ops.values``). On a device they are not checked, and an engine is safe for any values: it reads and writes
nothing out of bounds and writes all of its outputs, each entry counting as clamped to [the one before, t], or
each length to [0, s]. Rows of no sequence so understood are 0; the others have no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.formats import DType


class AttentionSpec(Protocol):
    """What the attention kernels need to know beside their arrays;
    ``fp8kit.ops.attention_spec.AttentionSpec`` is one."""

    @property
    def qkv_format(self) -> str:
        """Order of the dimensions of q, k, v, o: "sbhd" or "bshd"."""

    @property
    def softmax_scale(self) -> float:
        """Factor of q k^T."""

    @property
    def padded(self) -> bool:
        """Whether true lengths come in cu_seqlens."""

    @property
    def masked(self) -> bool:
        """Whether a mask array comes."""

    @property
    def window(self) -> tuple[int, int]:
        """Band round the diagonal that a row sees, (left, right), -1 unbounded; a causal mask is (-1, 0). See
        ``Kernels.attention_fwd``."""

    @property
    def bottom_right(self) -> bool:
        """Whether the diagonal ends at the last row and column, instead of starting at the first."""

    @property
    def bias(self) -> str:
        """What is added to the scores: "no_bias"; "pre_scale_bias" or "post_scale_bias" (a bias array comes);
        "alibi" (slopes come)."""

    @property
    def softmax_type(self) -> str:
        """Which softmax: "vanilla", "off-by-one" or "learnable" (a softmax_offset array comes)."""

    @property
    def softcap(self) -> float:
        """What scores are capped at, 0 for no cap; see ``Kernels.attention_fwd``."""

    @property
    def zero_padded(self) -> bool:
        """Whether the rows beyond the true lengths hold 0 already: k's and v's, and in backward also q's and
        do's."""

    @property
    def dropout(self) -> float:
        """Probability of dropping a weight, in [0, 1)."""

    @property
    def placed(self) -> bool:
        """Whether a dropout_place comes: the call is a part of a larger attention, whose numbers it draws.
        Only with dropout."""


class AttentionExtras(NamedTuple):
    """What an attention may be given beside q, k and v; ``None`` where its spec does not ask for it.

    * ``cu_seqlens_q``, ``cu_seqlens_kv``: int32 (b + 1,), running sums of each batch's true lengths; of any
      values, see above.
    * ``rng``: see the conventions; where dropout > 0.
    * ``mask``: uint8 or bool (1 | b, 1 | h, 1 | s_q, s_kv), not 0 where a score is masked out.
    * ``bias``: h, q's dtype, (1 | b, 1 | h, 1 | s_q, s_kv).
    * ``alibi_slopes``: float32 (h,) or (b, h). ``softmax_offset``: float32 (h,).
    * ``dropout_place``: int32 (3,), which batch and which head of the larger attention the first ones are,
      and how many heads that has; of any values, for they choose random words alone.
    """

    cu_seqlens_q: ArrayView | None = None
    cu_seqlens_kv: ArrayView | None = None
    rng: ArrayView | None = None
    mask: ArrayView | None = None
    bias: ArrayView | None = None
    alibi_slopes: ArrayView | None = None
    softmax_offset: ArrayView | None = None
    dropout_place: ArrayView | None = None


def _workspace(backward: bool) -> Callable[[Any, Any], int]:
    def measure(kernels: Any, a: Any) -> int:
        parts = (a.q, a.k, a.v)
        dbias = a.dbias.shape if backward and a.dbias is not None else None
        shapes, strides = ([getattr(part, name) for part in parts] for name in ("shape", "strides"))
        deterministic = not backward or a.deterministic
        asked = (*shapes, dbias, a.q.dtype, a.spec, backward, deterministic, strides)
        return int(kernels.attention_workspace(*asked))

    return measure


def _flops(products: int) -> Callable[[Any], float]:
    """Returns the function that counts the operations of ``products`` products of the size of q k^T; a causal
    mask leaves half of each."""

    def count(a: Any) -> float:
        columns = a.k.shape[a.spec.qkv_format.index("s")]
        whole = float(2 * products * a.q.size * columns)
        return whole / 2 if a.spec.window == (-1, 0) else whole

    return count


class Attentions(Protocol):
    """Attention over padded batches."""

    @kernel(writes="o lse", workspace=_workspace(backward=False), flops=_flops(2))
    def attention_fwd(
        self,
        q: ArrayView,
        k: ArrayView,
        v: ArrayView,
        o: ArrayView,
        lse: ArrayView,
        extras: AttentionExtras,
        spec: AttentionSpec,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """o = dropout(softmax(scores)) v over the scores that a row sees. q: h (s_q, b, h, d) for sbhd, (b,
        s_q, h, d) for bshd; k with s_kv and h_kv heads (h_kv divides h); v as k and o as q, but with d_v
        features; all may be strided, last stride 1.

        With n_q, n_kv a batch's true lengths (at most s_q, s_kv; these without cu_seqlens), row i stands at
        i' = i + n_kv - n_q where ``bottom_right``, else at i' = i. It sees column j iff i < n_q and j < n_kv,
        and j >= i' - left where left >= 0, and j <= i' + right where right >= 0, and the mask is 0 there.
        Score (Press et al., ALiBi, 2022): scale * q k^T; scale * (q k^T + bias); scale * q k^T + bias; or
        scale * q k^T - slope * |i' - j|. With a softcap c (Gemma 2, 2024) c * tanh(x / c)
        stands for x = scale * q k^T, or scale * (q k^T + bias); other biases, slopes, mask and further score
        come after it. Softmax types "off-by-one" (Miller 2023) and "learnable" (Xiao et
        al. 2023, attention sinks) add one more score, 0 or softmax_offset[h], to every row i < n_q: it takes
        weight and gives nothing to o.

        lse: float32 (b, h, s_q), the row's log-sum-exp, that further score included; -Inf for a row that sees
        nothing (vanilla) or lies beyond n_q. o of a row that sees nothing is 0. What lies in padding, in the
        rows of q beyond n_q and of k and v beyond n_kv, never reaches a true row, be it NaN or Inf, and the
        padding rows of o are 0. P's element index for dropout is ((b * heads + h) * s_q + i) * s_kv + j; with
        a dropout_place (b0, h0, heads') it is (((b0 + b) * heads' + h0 + h) * s_q + i) * s_kv + j, so that a
        part drops what the whole drops there."""

    @kernel(
        writes="dq dk dv dbias doffset", ordered=True, workspace=_workspace(backward=True), flops=_flops(5)
    )
    def attention_bwd(
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
        extras: AttentionExtras,
        spec: AttentionSpec,
        deterministic: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Gradients of ``attention_fwd`` (Dao et al. 2022, appendix B: P is recomputed from lse). dq, dk, dv
        like q, k, v, may be strided; every element is written, padding rows as 0. What lies in the padding
        rows of do, q, k and v never reaches a gradient. dbias: like the bias, C-contiguous, or None; doffset:
        float32 (h,) or None."""

    @workspace_of("attention_fwd", "attention_bwd")
    def attention_workspace(
        self,
        q: Shape,
        k: Shape,
        v: Shape,
        dbias: Shape | None,
        dtype: DType,
        spec: AttentionSpec,
        backward: bool,
        deterministic: bool,
        strides: Sequence[Shape],
    ) -> int:
        """Bytes of workspace for q, k and v of these shapes; ``dbias``: the bias's shape where backward makes
        its gradient; ``deterministic``: as backward gets it; ``strides``: of q, k and v, none where they are
        C-contiguous. dq, dk and dv are taken to have those too, o and do to be C-contiguous."""
