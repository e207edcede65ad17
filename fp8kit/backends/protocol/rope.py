"""The contract of rotary position embedding."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel


class Ropes(Protocol):
    """Rotary position embedding."""

    @kernel(writes="y")
    def rope_fwd(
        self,
        x: ArrayView,
        freqs: ArrayView,
        y: ArrayView,
        start_positions: ArrayView | None,
        lengths: ArrayView | None,
        starts: ArrayView | None,
        qkv_format: str,
        interleaved: bool,
        stream: int,
    ) -> None:
        """Rotary position embedding (Su et al., RoFormer, 2021). x, y: h (s, b, h, d) for sbhd, (b, s, h, d)
        for bshd, (t, h, d) for thd; may be strided, last stride 1; y may be x's memory. freqs: float32
        (positions, r), r even, at most d: angles. Of the first r features, y_f = x_f cos(a_f) + p_f sin(a_f)
        with a = freqs[position] and p the partner: -x_{f + r / 2} in the first half and x_{f - r / 2} in the
        second, or, ``interleaved``, -x_{f + 1} for even and x_{f - 1} for odd f. Features beyond r are
        copied. The position is the place in the sequence, plus start_positions[b] (int32 (b,)). A position
        beyond freqs gives NaN.

        lengths, starts: int32 (b + 1,), running sums of the true lengths and where the sequences begin, as
        ``pack_sequences`` takes them; None but for thd. Tokens of no sequence become 0, all features of them,
        whatever they were."""

    @kernel(writes="dx")
    def rope_bwd(
        self,
        dy: ArrayView,
        freqs: ArrayView,
        dx: ArrayView,
        start_positions: ArrayView | None,
        lengths: ArrayView | None,
        starts: ArrayView | None,
        qkv_format: str,
        interleaved: bool,
        stream: int,
    ) -> None:
        """Gradient of ``rope_fwd`` with respect to x: the transposed rotation, 0 for tokens of no
        sequence. dx may be dy's memory."""
