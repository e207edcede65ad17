"""The kernel contract: every kernel that an engine implements, with shapes, dtypes, units and errors.

A kernel is a stateless function on ``ArrayView``s. Its outputs, its workspace and its stream are given; it allocates nothing that
outlives the call and never synchronises with the host. Callers (``fp8kit.ops``) have validated everything: a kernel may assume
what stands here and raises only BackendError, for what its engine cannot run.

Conventions

* ``M`` rows (tokens), ``N`` columns, ``K`` the contraction. h is float32, bfloat16 or float16; arithmetic is in float32, each h
  output is rounded once, to nearest even. Views are C-contiguous unless a text says strided; ``None`` means absent.
* FP8 codes are uint8 views; their ``Format`` travels beside. ``scale`` multiplies before the cast, ``scale_inv = 1 / scale``.
* ``amax`` outputs are *max-accumulated*: the caller zeroes them or points them at a running maximum. NaN is ignored in an amax, Inf is not.
* ``rng`` is int64[2] ``(seed, offset)``. Element i of the operation's output uses word ``i % 4`` of Philox4x32-10 with counter
  ``(lo(i // 4), hi(i // 4), lo(offset), hi(offset))`` and key ``(lo(seed), hi(seed))`` (Salmon et al., SC'11). Dropout keeps an
  element when its word is at least ``floor(p * 2**32)`` and multiplies it by float32(1 / (1 - p)).
* ``workspace`` is a uint8 view of at least ``<kernel>_workspace(...)`` bytes, contents undefined before and after.
* ``stream`` is the raw stream handle, 0 on the CPU.
* Kernels whose name ends in ``_`` change their argument in place; no other kernel writes what it reads unless its text allows it.

``KERNELS`` lists the names; ``signature(name)`` gives the signature that an implementation must have.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, get_args

from fp8kit.arrays import ArrayView, Shape
from fp8kit.formats import DType, Format

Layout = Literal["nt", "nn", "tn"]
Normalization = Literal["LayerNorm", "RMSNorm", "L2Normalization"]
NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)


class Cast:
    """Where and how a kernel writes a high-precision result in FP8 (per-tensor scaling).

    The kernel first rounds its result to the high-precision dtype that it would have stored, then takes the amax of that, then
    writes ``encode(result * scale)``, nearest even, saturating.

    * ``format``: target format.
    * ``q``: uint8 (Mp, Np) or None, row-major codes. ``q_t``: uint8 (Np, Mp) or None, the transposed codes. Mp >= M and Np >= N;
      what lies beyond the result is written as zero codes and enters no amax. At least one of the two is given. Both may be
      strided along rows (last stride 1): several weight segments are cast into one buffer.
    * ``scale``: float32[1], read. ``scale_inv``: float32[1], written ``1 / scale``.
    * ``amax``: float32[1] or None, max-accumulated with max|result|.
    """

    __slots__ = ("amax", "format", "q", "q_t", "scale", "scale_inv")

    def __init__(
        self, format: Format, q: ArrayView | None, q_t: ArrayView | None, scale: ArrayView, scale_inv: ArrayView, amax: ArrayView | None
    ) -> None:
        self.format = format
        self.q = q
        self.q_t = q_t
        self.scale = scale
        self.scale_inv = scale_inv
        self.amax = amax


BLOCK = 128  # elements along the contraction that share a scale in ``block_quantize`` and ``block_gemm``


def block_shapes(rows: int, columns: int, tile: tuple[int, int]) -> tuple[Shape, Shape]:
    """Shapes of an operand of ``block_gemm`` for a matrix of (rows, columns): of its codes, uint8, and of its scale_inv, float32."""
    r, k = -(-rows // 16) * 16, -(-columns // BLOCK) * BLOCK
    scales = (k // BLOCK, r) if tile[0] == 1 else (-(-r // BLOCK), -(-k // (4 * BLOCK)) * 4)
    return (r, k), scales


class AttentionSpec(Protocol):
    """What the attention kernels need to know beside their arrays; ``fp8kit.ops.attention_spec.AttentionSpec`` is one."""

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
        """Band round the diagonal that a row sees, (left, right), -1 unbounded; a causal mask is (-1, 0). See ``Kernels.attention_fwd``."""

    @property
    def bottom_right(self) -> bool:
        """Whether the diagonal ends at the last row and column, instead of starting at the first."""

    @property
    def bias(self) -> str:
        """What is added to the scores: "no_bias"; "pre_scale_bias" or "post_scale_bias" (a bias array comes); "alibi" (slopes come)."""

    @property
    def softmax_type(self) -> str:
        """Which softmax: "vanilla", "off-by-one" or "learnable" (a softmax_offset array comes)."""

    @property
    def dropout(self) -> float:
        """Probability of dropping a weight, in [0, 1)."""


class AttentionExtras(NamedTuple):
    """What an attention may be given beside q, k and v; ``None`` where its spec does not ask for it.

    * ``cu_seqlens_q``, ``cu_seqlens_kv``: int32 (b + 1,), running sums of each batch's true lengths.
    * ``rng``: see the conventions; where dropout > 0.
    * ``mask``: uint8 or bool (1 | b, 1 | h, 1 | s_q, s_kv), not 0 where a score is masked out.
    * ``bias``: h, q's dtype, (1 | b, 1 | h, 1 | s_q, s_kv).
    * ``alibi_slopes``: float32 (h,) or (b, h). ``softmax_offset``: float32 (h,).
    """

    cu_seqlens_q: ArrayView | None = None
    cu_seqlens_kv: ArrayView | None = None
    rng: ArrayView | None = None
    mask: ArrayView | None = None
    bias: ArrayView | None = None
    alibi_slopes: ArrayView | None = None
    softmax_offset: ArrayView | None = None


class Kernels(Protocol):
    """The contract. ``fp8kit.backends.dispatch.kernels(device)`` gives one object with all of these, each chosen by policy."""

    # --- casts and scales -----------------------------------------------------------------------------------------------

    def amax(self, x: ArrayView, amax: ArrayView, tile: tuple[int, int], stream: int) -> None:
        """amax[i, j] = max(amax[i, j], max|x| over tile (i, j)). x: h (M, N). tile: (rows, columns) of a tile; (M, N) is per
        tensor, (1, N) per row. amax: float32, ceil(M / rows) * ceil(N / columns) elements."""

    def scale_from_amax(
        self,
        amax: ArrayView,
        scale: ArrayView,
        scale_inv: ArrayView,
        fp8_max: float,
        power_2: bool,
        epsilon: float,
        value_for_inf: float,
        stream: int,
    ) -> None:
        """Current scaling's rule, element by element (Transformer Engine's compute_scale_from_amax). amax, scale, scale_inv: float32 [n].

        a = max(amax, epsilon); scale = 1 where a is 0, Inf or NaN, else fp8_max / a (correctly rounded), value_for_inf where that
        is Inf; power_2: the scale's mantissa bits are cleared (rounded down to a power of two). scale_inv = 1 / scale."""

    def update_delayed_(
        self,
        scales: Sequence[ArrayView],
        scale_invs: Sequence[ArrayView],
        histories: Sequence[ArrayView],
        fp8_maxes: Sequence[float],
        margin: int,
        most_recent: bool,
        stream: int,
    ) -> None:
        """Delayed scaling's update of many states at once. scales, scale_invs: float32 [n] each; histories: float32 [H, n].

        Per tensor: if history row 0 (the amax since the last update) is 0, nothing changes. Else amax = max over all rows, NaN ignored
        (``most_recent``: row 0); scale = fp8_max * 2**-margin / amax if amax is finite and positive, else unchanged; FLT_MAX if that
        is Inf; scale_inv = 1 / scale; then the rows roll by -1, row 0's amax becomes row H - 1, and row 0 becomes 0."""

    def quantize(
        self,
        x: ArrayView,
        q: ArrayView,
        scale: ArrayView,
        scale_inv: ArrayView,
        amax: ArrayView | None,
        format: Format,
        tile: tuple[int, int],
        saturate: bool,
        rng: ArrayView | None,
        stream: int,
    ) -> None:
        """q = encode(float32(x) * scale): the plain cast. x: h or float64 (M, N); q: uint8 (M, N); scale, scale_inv and amax: float32,
        one element a tile (see ``amax``); scale is read, scale_inv written. Nearest even, or stochastic where ``rng`` is given: up iff
        word(i) < fraction * 2**32, i = row * N + column. saturate: |v| beyond the largest finite value, and Inf, become it; else
        they become Inf (or NaN where the format has none); overflow is judged after rounding. NaN becomes the positive NaN code (the
        largest value where there is none). Unsigned formats: a negative value becomes NaN, where there is none the smallest code.
        Ties between codes of no mantissa (E8M0) go to the even code. Any ``Format``."""

    def dequantize(self, q: ArrayView, x: ArrayView, scale_inv: ArrayView, format: Format, tile: tuple[int, int], stream: int) -> None:
        """x = decode(q) * scale_inv in float32, rounded to x's dtype. q: uint8 (M, N); x: h (M, N); scale_inv as in ``quantize``."""

    def quantize_transpose(self, x: ArrayView, cast: Cast, dbias: ArrayView | None, workspace: ArrayView | None, stream: int) -> None:
        """The layers' cast: x, h (M, N), to both orientations with padding (see ``Cast``); E4M3 or E5M2. dbias: h (N,) or None,
        written with the sums of x's columns."""

    def quantize_transpose_workspace(self, rows: int, columns: int) -> int:
        """Bytes of ``quantize_transpose``'s workspace when it has a dbias."""

    def block_quantize(
        self,
        x: ArrayView,
        q: ArrayView | None,
        scale_inv: ArrayView | None,
        q_t: ArrayView | None,
        scale_inv_t: ArrayView | None,
        format: Format,
        tile: tuple[int, int],
        power_2: bool,
        epsilon: float,
        stream: int,
    ) -> None:
        """Current scaling by blocks, x and its transpose each as an operand of ``block_gemm``; E4M3 or E5M2. x: h (M, N), rows of 1 x 128
        or squares of 128 x 128 elements share a scale: ``tile``. q: uint8 (M up to 16, N up to 128: the next multiples), q_t: uint8
        (N up to 16, M up to 128), either may be None; zero codes beyond x. A scale is ``scale_from_amax`` of its tile's amax with
        fp8_max = format.max and value_for_inf = the largest finite value of x's dtype; the code is ``encode(x * scale)``, saturating.

        Tile (1, 128) runs along the contraction: q has a scale for 128 neighbours of a row of x, q_t, cast from x as well, one for 128
        neighbours of a column. Tile (128, 128): q_t is q transposed. Layouts (cuBLASLt's), of an operand (R, Kp): tile (1, 128): float32
        (Kp / 128, R); tile (128, 128): float32 (ceil(R / 128), Kp / 128 up to 4). Every element is written, 1 for a tile outside x."""

    # --- matrix products ------------------------------------------------------------------------------------------------

    def gemm(
        self,
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        layout: Layout,
        bias: ArrayView | None,
        accumulate: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """High-precision product: out = a b^T ("nt": a (M, K), b (N, K)), a b ("nn": (M, K), (K, N)) or a^T b ("tn": (K, M), (K, N)),
        accumulated in float32. a, b: h, the same; out: h, the same dtype or float32, (M, N); bias: a's dtype (N,) or None, added.
        accumulate: added onto out. a, b and out may be strided along rows (last stride 1). Where a bias or the old out joins a 16-bit
        out, the engine may round the product to out's dtype first (cuBLASLt does in some of its kernels)."""

    def fp8_gemm(
        self,
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        a_format: Format,
        b_format: Format,
        a_scale_inv: ArrayView,
        b_scale_inv: ArrayView,
        bias: ArrayView | None,
        accumulate: bool,
        fast_accumulate: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """FP8 product: out = (a b^T) * a_scale_inv * b_scale_inv. a: uint8 (Mp, K), b: uint8 (Np, K), K, Mp, Np multiples of 16;
        out: h (M, N), Mp - 16 < M <= Mp, Np - 16 < N <= Np: rows and columns beyond are not computed into it. scale_inv: float32 [1], or
        [Mp] and [Np] (row scaling, both). bias: out's dtype (N,) or None. fast_accumulate lets the engine accumulate in the tensor cores'
        own width (Hopper: 14 bits); False promotes to float32 regularly (split accumulator). Not both E5M2. a, b and the scales are 16-byte
        aligned. Rounding where a bias or the old out joins: as in ``gemm``."""

    def block_gemm(
        self,
        a: ArrayView,
        b: ArrayView,
        out: ArrayView,
        a_format: Format,
        b_format: Format,
        a_scale_inv: ArrayView,
        b_scale_inv: ArrayView,
        a_tile: tuple[int, int],
        b_tile: tuple[int, int],
        bias: ArrayView | None,
        accumulate: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """FP8 product of operands scaled by blocks: out = (a * its scales) (b * its scales)^T. a: uint8 (Mp, Kp), b: uint8 (Np, Kp) with
        their scale_inv, both as ``block_quantize`` writes them; tiles (1, 128) or (128, 128), not both (128, 128). out, bias, accumulate,
        formats, alignment as in ``fp8_gemm``; partial sums are promoted to float32 at every block (split accumulator). Workspace:
        ``fp8_gemm_workspace``."""

    def gemm_workspace(self) -> int:
        """Bytes of workspace that ``gemm`` and ``fp8_gemm`` want, padded output included (see ``fp8_gemm_workspace``)."""

    def fp8_gemm_workspace(self, rows: int, columns: int) -> int:
        """Bytes for an FP8 product of (rows, columns): ``gemm_workspace`` and, where the sizes need padding, a padded output."""

    # --- normalisation --------------------------------------------------------------------------------------------------

    def norm_fwd(
        self,
        x: ArrayView,
        weight: ArrayView | None,
        bias: ArrayView | None,
        y: ArrayView | None,
        mean: ArrayView | None,
        rstd: ArrayView,
        amax: ArrayView | None,
        cast: Cast | None,
        normalization: Normalization,
        epsilon: float,
        zero_centered_gamma: bool,
        stream: int,
    ) -> None:
        """y = (x - mean) * rstd * g + bias per row (LayerNorm, Ba et al. 2016), or x * rstd * g (RMSNorm, Zhang & Sennrich 2019;
        mean and bias None); g = weight, or 1 + weight with zero_centered_gamma. x, y: h (M, N); weight, bias: h (N,); mean, rstd:
        float32 (M,), written, rstd = 1 / sqrt(var + epsilon). y, cast or both are given. amax: float32[1] or None, max-accumulated with
        max|y| (current scaling; with ``cast`` its own amax is used and this is None).

        L2Normalization: y = x / sqrt(sum of x^2 + epsilon), which is RMSNorm with epsilon / N for epsilon (so is rstd) and g = 1 / sqrt(N)
        throughout; weight, bias and mean None."""

    def norm_bwd(
        self,
        dy: ArrayView,
        x: ArrayView,
        weight: ArrayView | None,
        mean: ArrayView | None,
        rstd: ArrayView,
        residual: ArrayView | None,
        dx: ArrayView,
        dweight: ArrayView | None,
        dbias: ArrayView | None,
        normalization: Normalization,
        zero_centered_gamma: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Gradients of ``norm_fwd``. residual: h (M, N) or None, added to dx before rounding (a residual stream's fan-in); dx may be the
        same memory as dy or residual. dweight, dbias: h (N,), summed over rows in a fixed order; None where there is no such parameter."""

    def norm_bwd_workspace(self, rows: int, columns: int) -> int:
        """Bytes of ``norm_bwd``'s workspace."""

    # --- activations, dropout, residuals --------------------------------------------------------------------------------

    def act_fwd(
        self,
        x: ArrayView,
        bias: ArrayView | None,
        y: ArrayView | None,
        amax: ArrayView | None,
        cast: Cast | None,
        activation: str,
        params: tuple[float, ...],
        stream: int,
    ) -> None:
        """y = activation(x + bias), by the formulas of ``backends.activation``. x: h (M, F), or (M, 2F) where it is gated; y: h (M, F);
        bias: h, x's columns. params: the activation's numbers in the order of its row, empty where it has none. y, cast, amax as in
        ``norm_fwd``."""

    def act_bwd(
        self,
        dy: ArrayView,
        x: ArrayView,
        bias: ArrayView | None,
        dx: ArrayView | None,
        dbias: ArrayView | None,
        amax: ArrayView | None,
        cast: Cast | None,
        activation: str,
        params: tuple[float, ...],
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Gradients of ``act_fwd``: dx as x, dbias the column sums of dx (of dx rounded to h). dx, cast, amax as y there."""

    def act_bwd_workspace(self, rows: int, columns: int) -> int:
        """Bytes of ``act_bwd``'s workspace for an x of (rows, columns)."""

    def dropout_add(
        self, x: ArrayView, bias: ArrayView | None, residual: ArrayView | None, y: ArrayView, p: float, rng: ArrayView | None, stream: int
    ) -> None:
        """y = residual + dropout(x + bias), rounded once. x, residual, y: h (M, N); bias: h (N,). p = 0 needs no rng. y may be x's
        memory."""

    def dropout_bwd(
        self,
        dy: ArrayView,
        dx: ArrayView | None,
        dbias: ArrayView | None,
        p: float,
        rng: ArrayView | None,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """dx = dy * mask / (1 - p) with ``dropout_add``'s mask, and dbias = its column sums, taken before or after rounding. dx is None
        where only dbias is wanted."""

    def column_sum_workspace(self, rows: int, columns: int) -> int:
        """Bytes of workspace of the column sums in ``dropout_bwd``."""

    def drop_path(
        self,
        x: ArrayView,
        residual: ArrayView | None,
        y: ArrayView,
        starts: ArrayView | None,
        inner: int,
        count: int,
        p: float,
        rng: ArrayView,
        stream: int,
    ) -> None:
        """y = residual + x * factor of the row's sample: stochastic depth (Huang et al. 2016), and its gradient. x, residual, y: h (M, N);
        y may be x's memory. ``count`` samples; row i belongs to (i // inner) % count, or, with starts int32 (count + 1,), to the last
        sample s with starts[s] <= i. Factor: 0 where word s of the stream is below int(p * 2^32), else float32(1 / (1 - p)); what is
        dropped is 0 whatever it was. p in (0, 1)."""

    # --- attention ------------------------------------------------------------------------------------------------------

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
        """o = dropout(softmax(scores)) v over the scores that a row sees. q: h (s_q, b, h, d) for sbhd, (b, s_q, h, d) for bshd; k with
        s_kv and h_kv heads (h_kv divides h); v as k and o as q, but with d_v features; all may be strided, last stride 1.

        With n_q, n_kv a batch's true lengths (at most s_q, s_kv; these without cu_seqlens), row i stands at i' = i + n_kv - n_q where
        ``bottom_right``, else at i' = i. It sees column j iff i < n_q and j < n_kv, and j >= i' - left where left >= 0, and
        j <= i' + right where right >= 0, and the mask is 0 there. Score (Press et al., ALiBi, 2022): scale * q k^T;
        scale * (q k^T + bias); scale * q k^T + bias; or scale * q k^T - slope * |i' - j|. Softmax types "off-by-one" (Miller 2023) and
        "learnable" (Xiao et al. 2023, attention sinks) add one more score, 0 or softmax_offset[h], to every row i < n_q: it takes weight
        and gives nothing to o.

        lse: float32 (b, h, s_q), the row's log-sum-exp, that further score included; -Inf for a row that sees nothing (vanilla) or lies
        beyond n_q. o of a row that sees nothing is 0. P's element index for dropout is ((b * heads + h) * s_q + i) * s_kv + j."""

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
        """Gradients of ``attention_fwd`` (Dao et al. 2022, appendix B: P is recomputed from lse). dq, dk, dv like q, k, v, may be strided;
        every element is written, padding rows as 0. dbias: like the bias, C-contiguous, or None; doffset: float32 (h,) or None."""

    def attention_workspace(
        self, q: Shape, k: Shape, v: Shape, dbias: Shape | None, dtype: DType, spec: AttentionSpec, backward: bool
    ) -> int:
        """Bytes of workspace for q, k and v of these shapes; ``dbias``: the bias's shape where backward makes its gradient."""

    def unpack_sequences(self, x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
        """Sequences that lie one after the other, made a padded batch: y[b, i] = x[starts[b] + i] for i < lengths[b + 1] - lengths[b], 0
        beyond. x: h (t, n); y: h (b, s, n); lengths, starts: int32 (b + 1,), running sums (of true and of padded lengths; the same array
        where nothing lies between the sequences)."""

    def pack_sequences(self, x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
        """The way back: y[starts[b] + i] = x[b, i], 0 in rows that belong to no sequence, NaN in rows of a sequence beyond its first s.
        x: h (b, s, n); y: h (t, n)."""

    def cache_append_(
        self,
        x: ArrayView,
        cache: ArrayView,
        pages: ArrayView,
        fresh: ArrayView,
        totals: ArrayView,
        starts: ArrayView | None,
        qkv_format: str,
        stream: int,
    ) -> None:
        """New keys or values written at the ends of their sequences in a cache of pages. x: h (s, b, g, d) for sbhd, (b, s, g, d) for bshd,
        (t, g, d) for thd; may be strided, last stride 1. cache: x's dtype (pages, page size, g, d). pages: int32 (b, m): where sequence b's
        positions lie, page after page. fresh, totals: int32 (b + 1,), running sums of the sequences' new tokens and of their lengths with
        them. starts: int32 (b + 1,), where the sequences begin in t; None but for thd. With n of its length L new, sequence b's token
        i < n goes to position p = L - n + i: cache[pages[b, p / size], p % size]. Tokens beyond n, or of no sequence, are not read."""

    def cache_gather(
        self, cache: ArrayView, y: ArrayView, pages: ArrayView, totals: ArrayView, qkv_format: str, stream: int
    ) -> None:
        """Sequences read out of a cache of pages, as a padded batch: position p < L of sequence b, 0 beyond. y: h (s, b, g, d) for sbhd,
        (b, s, g, d) for bshd, C-contiguous; the rest as in ``cache_append_``. What lies beyond y's s is left out."""

    def rope_fwd(
        self,
        x: ArrayView,
        freqs: ArrayView,
        y: ArrayView,
        start_positions: ArrayView | None,
        cu_seqlens: ArrayView | None,
        qkv_format: str,
        interleaved: bool,
        stream: int,
    ) -> None:
        """Rotary position embedding (Su et al., RoFormer, 2021). x, y: h (s, b, h, d) for sbhd, (b, s, h, d) for bshd, (t, h, d) for thd;
        may be strided, last stride 1; y may be x's memory. freqs: float32 (positions, r), r even, at most d: angles. Of the first r
        features, y_f = x_f cos(a_f) + p_f sin(a_f) with a = freqs[position] and p the partner: -x_{f + r / 2} in the first half and
        x_{f - r / 2} in the second, or, ``interleaved``, -x_{f + 1} for even and x_{f - 1} for odd f. Features beyond r are copied. The
        position is the place in the sequence, plus start_positions[b] (int32 (b,)); thd counts from its sequence's start, the last of
        cu_seqlens (int32 (b + 1,)) that is not beyond the token, but for the final one. A position beyond freqs gives NaN."""

    def rope_bwd(
        self,
        dy: ArrayView,
        freqs: ArrayView,
        dx: ArrayView,
        start_positions: ArrayView | None,
        cu_seqlens: ArrayView | None,
        qkv_format: str,
        interleaved: bool,
        stream: int,
    ) -> None:
        """Gradient of ``rope_fwd`` with respect to x: the transposed rotation. dx may be dy's memory."""

    # --- embedding, loss ------------------------------------------------------------------------------------------------

    def embedding_fwd(self, ids: ArrayView, table: ArrayView, out: ArrayView, stream: int) -> None:
        """out[i] = table[ids[i]]. ids: int32 or int64 (M,), in range (an id out of range gives a row of NaN); table: h (V, N);
        out: h (M, N)."""

    def embedding_bwd(self, ids: ArrayView, dout: ArrayView, dtable: ArrayView, stream: int) -> None:
        """dtable[v] = sum of dout[i] over ids[i] == v, in the order of i, in float32; rows that no id names are written as 0."""

    def cross_entropy_fwd(
        self,
        logits: ArrayView,
        targets: ArrayView,
        loss: ArrayView,
        lse: ArrayView,
        total: ArrayView | None,
        label_smoothing: float,
        ignore_index: int,
        stream: int,
    ) -> None:
        """loss[i] = lse[i] - (1 - s) * logits[i, t] - s * mean(logits[i]), s = label_smoothing, t = targets[i]; 0 where t is ignore_index;
        NaN where t is out of range. logits: h (M, V); targets: int32 or int64 (M,); loss, lse: float32 (M,); total: float32 [2] or None,
        written with (mean loss over the rows not ignored, their number), summed in a fixed order; the mean of no rows is 0."""

    def cross_entropy_bwd(
        self,
        logits: ArrayView,
        targets: ArrayView,
        lse: ArrayView,
        dloss: ArrayView,
        total: ArrayView | None,
        dlogits: ArrayView,
        label_smoothing: float,
        ignore_index: int,
        stream: int,
    ) -> None:
        """dlogits = (softmax(logits) - (1 - s) * onehot(t) - s / V) * dloss, 0 in ignored rows. dloss: float32 (M,), or float32 [1] with
        ``total`` given: then divided by total[1] (the mean's gradient). A target out of range has no onehot. dlogits may be logits'
        memory."""

    # --- many tensors at once -------------------------------------------------------------------------------------------

    def adamw_(
        self,
        params: Sequence[ArrayView],
        grads: Sequence[ArrayView],
        exp_avgs: Sequence[ArrayView],
        exp_avg_sqs: Sequence[ArrayView],
        masters: Sequence[ArrayView | None],
        lr: float | ArrayView,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decays: Sequence[float],
        step: int | ArrayView,
        inv_scale: ArrayView | None,
        found_inf: ArrayView | None,
        stream: int,
    ) -> None:
        """AdamW (Loshchilov & Hutter 2019, algorithm 2) on lists of tensors. params, grads: h; exp_avg, exp_avg_sq: float32; master:
        float32 where the parameter is 16 bits wide, else None: then the update is made on the master and the parameter is its rounding.
        m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr * (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + epsilon) + decay * w).

        lr: a number or float32 [1]; step: a number from 1 or int64 [1]: arrays are read on the device, so that a captured graph sees
        their new values. inv_scale: float32 [1] or None: g = grad * inv_scale, in float32. found_inf: float32 [1] or None: where it is not
        0, nothing changes."""

    def sgd_(
        self,
        params: Sequence[ArrayView],
        grads: Sequence[ArrayView],
        buffers: Sequence[ArrayView | None],
        masters: Sequence[ArrayView | None],
        lr: float | ArrayView,
        momentum: float,
        dampening: float,
        nesterov: bool,
        weight_decays: Sequence[float],
        step: int | ArrayView,
        inv_scale: ArrayView | None,
        found_inf: ArrayView | None,
        stream: int,
    ) -> None:
        """SGD with momentum (Sutskever et al. 2013; dampening as PyTorch's SGD has it) on lists of tensors. buffers: float32, None where
        momentum is 0; everything else as in ``adamw_``.
        g = grad + decay w; b = g at step 1, else momentum b + (1 - dampening) g; w -= lr * (g + momentum b with nesterov, else b)."""

    def scale_(self, xs: Sequence[ArrayView], factor: ArrayView | None, found_inf: ArrayView | None, stream: int) -> None:
        """x *= factor[0] for every tensor, rounded once, and found_inf[0] = 1 where any element of any x was Inf or NaN before (else it
        stays as it is). xs: h; factor, found_inf: float32 [1] or None: not multiplied, not looked at."""

    def loss_scale_(
        self,
        scale: ArrayView,
        inv_scale: ArrayView,
        good_steps: ArrayView,
        found_inf: ArrayView,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        stream: int,
    ) -> None:
        """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2). scale, inv_scale, found_inf: float32 [1]; good_steps: int64 [1].
        found_inf not 0: scale *= backoff_factor, good_steps = 0. Else good_steps += 1, and at growth_interval scale *= growth_factor
        (unless that is Inf) and good_steps = 0. Then inv_scale = 1 / scale and found_inf = 0."""

    def count_(self, counter: ArrayView, found_inf: ArrayView | None, stream: int) -> None:
        """counter[0] += 1, unless found_inf is given and not 0. counter: int64 [1]; found_inf: float32 [1] or None."""

    def l2norm(self, xs: Sequence[ArrayView], out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
        """out[0] = sqrt(sum of squares of every element), in a fixed order. xs: h; out: float32 [1]."""

    def l2norm_workspace(self, sizes: Sequence[int]) -> int:
        """Bytes of ``l2norm``'s workspace for tensors of these sizes."""

    def clip_(self, xs: Sequence[ArrayView], norm: ArrayView, max_norm: float, stream: int) -> None:
        """x *= min(1, max_norm / (norm[0] + 1e-6)) for every tensor. xs: h; norm: float32 [1]."""

    # --- small things ---------------------------------------------------------------------------------------------------

    def copy(self, x: ArrayView, y: ArrayView, stream: int) -> None:
        """y = x converted to y's dtype (h or uint8 to uint8). Equal shapes of at most 5 dimensions; both may be strided."""

    def add(self, a: ArrayView, b: ArrayView, out: ArrayView, stream: int) -> None:
        """out = a + b. h, equal sizes; b may have fewer elements: then a's size is a multiple of b's, and b repeats (leading broadcast)."""

    def sum_rows(self, x: ArrayView, out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
        """out = column sums of x. x: h (M, N); out: h (N,). Workspace as ``column_sum_workspace``."""

    def rng_next_(self, state: ArrayView, out: ArrayView, stream: int) -> None:
        """out = state; state[1] += 1. Both int64 [2]: hands one operation its own (seed, offset) without the host."""


KERNELS: tuple[str, ...] = tuple(name for name, value in vars(Kernels).items() if inspect.isfunction(value) and not name.startswith("_"))


def signature(kernel: str) -> inspect.Signature:
    """The signature, without self, that every implementation of ``kernel`` has."""
    whole = inspect.signature(getattr(Kernels, kernel))
    return whole.replace(parameters=list(whole.parameters.values())[1:])
