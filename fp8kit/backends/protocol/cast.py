"""``Cast``: where a kernel of any family writes its result in FP8, by one scale."""

from __future__ import annotations

from typing import NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.formats import Format


class Rule(NamedTuple):
    """Current scaling's rule: ``scale_from_amax`` with the largest value of a cast's format, and float32's
    for an Inf."""

    power_2: bool
    epsilon: float


class Cast:
    """Where and how a kernel writes a high-precision result in FP8 (per-tensor scaling).

    The kernel first rounds its result to the high-precision dtype that it would have stored, then takes the
    amax of that, then writes ``encode(result * scale)``, nearest even, saturating.

    * ``format``: target format.
    * ``q``: uint8 (Mp, Np) or None, row-major codes. ``q_t``: uint8 (Np, Mp) or None, the transposed codes.
      Mp >= M and Np >= N; what lies beyond the result is written as zero codes and enters no amax. At least
      one of the two is given. Both may be strided along rows (last stride 1): several weight segments are
      cast into one buffer.
    * ``scale``: float32[1], read. ``scale_inv``: float32[1], written ``1 / scale``.
    * ``amax``: float32[1] or None, max-accumulated with max|result|.
    * ``rule``: where there is one, the scale is what it makes of ``amax``, which is read and not changed, and
      ``scale`` is None.

    ValueError for a scale and a rule, for neither, and for a rule without an amax.
    """

    __slots__ = ("amax", "format", "q", "q_t", "rule", "scale", "scale_inv")

    def __init__(
        self,
        format: Format,
        q: ArrayView | None,
        q_t: ArrayView | None,
        scale: ArrayView | None,
        scale_inv: ArrayView,
        amax: ArrayView | None,
        rule: Rule | None = None,
    ) -> None:
        if (scale is None) is (rule is None) or (rule is not None and amax is None):
            raise ValueError(
                f"Cast: got scale {scale!r}, amax {amax!r} and rule {rule!r}, expected a scale, "
                "or an amax and a rule"
            )
        self.format = format
        self.q = q
        self.q_t = q_t
        self.scale = scale
        self.scale_inv = scale_inv
        self.amax = amax
        self.rule = rule
