"""``Accumulation``: how a chip's tensor cores add the products of a GEMM, exact to the bit.

A tensor core instruction adds some products to an accumulator at once. It does not round as float32 does: it
aligns all terms to the largest exponent and cuts off what lies below a fixed number of bits. Sources: the
models of ten architectures in MMA-Sim (arXiv 2511.10909); that of Hopper's FP8 instructions was compared with
cuBLASLt bit for bit (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8kit import codec
from fp8kit.arguments import integer, shown
from fp8kit.errors import ArgumentError, FormatError, meant
from fp8kit.formats import Format

# bits after the leading one that float32 keeps: an accumulator has no more
FLOAT32_BITS = 23
# exponents of float32's smallest normal numbers: that of an accumulator of 0
LOWEST = -126
_MOST_EXPONENT_BITS = 5
_MOST_GROUPED = 3  # sums of a group are integers of 64 bits


@dataclass(frozen=True)
class Accumulation:
    """How the K products of one element of a GEMM's result are summed.

    * ``fraction_bits`` F: bits that are kept below the largest exponent of an instruction's terms, 1 to 40.
      None: sums are exact.
    * ``chunk``: products that an instruction takes, 1 to 256.
    * ``promote``: after so many products, a multiple of ``chunk``, the sum is added to a float32 sum and
      starts again at 0; None: never.
    * ``group``: 0, products are summed as codes, and the scales multiply the sum of each block. n, a divisor
      of ``chunk`` at most 16: n neighbours that share their scales are summed exactly, and times these they
      are one term: scales of blocks are part of what is aligned (below).

    One instruction, with an accumulator c and its products p = a b ::

        E   = the largest exponent of c and of the products that are not 0, at least -126. A product's is the
              sum of its factors' exponents, a subnormal factor's that of the smallest normal one
        sum = c and all p, each cut off toward zero to a multiple of 2^(E - F), added exactly
        c   = sum, cut off toward zero to min(F, 23) bits after its leading one

    With ``group`` a term is t = p s, with the two scales' product s, and its exponent that of s, each scale's
    by itself; with ``group`` 1 that of p besides. Scales are those of E8M0 or E4M3. The sum then goes on from
    block to block.

    The products are taken in ascending order, ``chunk`` at a time. Promoted sums are added in float32, to
    nearest even, in ascending order. Exact sums are rounded to float32 once, to nearest even; of blocks with
    scales each block's is rounded to float64, multiplied by both scales and added in float64, and the total
    rounded to float32. NaN, Inf times 0, and Inf - Inf give NaN; other Infs give Inf.

    ArgumentError for values out of their range.
    """

    fraction_bits: int | None = None
    chunk: int = 32
    promote: int | None = None
    group: int = 0

    def __post_init__(self) -> None:
        integer("Accumulation", "group", self.group, 0, 16)
        if self.group and (self.exact or self.chunk % self.group):
            wanted = f"0, or a divisor of chunk, {self.chunk}, with fraction_bits"
            raise ArgumentError("Accumulation", "group", self.group, wanted)
        if self.fraction_bits is not None:
            integer("Accumulation", "fraction_bits", self.fraction_bits, 1, 40)
        integer("Accumulation", "chunk", self.chunk, 1, 256)
        if self.promote is not None:
            integer("Accumulation", "promote", self.promote, self.chunk)
            if self.promote % self.chunk:
                wanted = f"a multiple of chunk, {self.chunk}"
                raise ArgumentError("Accumulation", "promote", self.promote, wanted)

    @property
    def exact(self) -> bool:
        """Whether sums are exact."""
        return self.fraction_bits is None

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        promoted = "" if self.promote is None else f", promoted every {self.promote}"
        scaled = f", scaled in groups of {self.group}" if self.group else ""
        return f"{self.fraction_bits} fraction bits, {self.chunk} products at a time{scaled}{promoted}"


# the chips' arithmetic. "hopper_split" is what cuBLASLt makes of "hopper_fast" without fast accumulation;
# these two were compared with the chip, the others are MMA-Sim's models (arXiv 2511.10909), unverified here:
# Ada's instruction of 32 products in two halves; Hopper's mma.sync; Blackwell's tcgen05 without scales of
# blocks, with E8M0 scales of 32 (kind mxf8f6f4), and of E2M1 with scales of 16 or 32 (mxf4, mxf4nvf4).
# Whether cuBLASLt promotes or splits sums on Blackwell is not published, nor are Blackwell Ultra's sums
ACCUMULATIONS = {
    "exact": Accumulation(),
    "hopper_fast": Accumulation(13, 32),
    "hopper_split": Accumulation(13, 32, 128),
    "ada_fast": Accumulation(13, 16),
    "hopper_mma": Accumulation(25, 32),
    "blackwell": Accumulation(25, 32),
    "blackwell_mx": Accumulation(25, 32, group=1),
    "blackwell_fp4": Accumulation(35, 64, group=16),
}
SCALE_BITS = 3  # fraction bits of the scales of blocks that groups are multiplied by
_HOPPER = 9, 0  # compute capability


def on_chip(capability: tuple[int, int], fast: bool) -> Accumulation | None:
    """Returns how FP8 products are added on a chip of a compute capability, by cuBLASLt where it does not cut
    the contraction into parts, and by ``hopper_gemm``, with or without fast accumulation. None where that was
    not compared with the chip."""
    return ACCUMULATIONS["hopper_fast" if fast else "hopper_split"] if capability == _HOPPER else None


def accumulation(operation: str, argument: str, value: Any, known: Iterable[str] = ()) -> Accumulation:
    """Returns the Accumulation that ``value`` is or names. ArgumentError, about ``argument`` of
    ``operation``, for anything else, with the names that are ``known`` there."""
    if isinstance(value, Accumulation):
        return value
    if not isinstance(value, str):
        raise ArgumentError(operation, argument, shown(value), "a name or an fk.Accumulation")
    names = tuple(known or ACCUMULATIONS)
    if value not in names:
        wanted = f"one of {', '.join(names)}, or an fk.Accumulation{meant(value, names)}"
        raise ArgumentError(operation, argument, shown(value), wanted)
    return ACCUMULATIONS[value]


def check_formats(operation: str, *formats: Format, group: int = 0) -> None:
    """FormatError for a format whose products the models do not take: more than 5 exponent bits, 3 where
    ``group`` products are summed before they are scaled."""
    most = _MOST_GROUPED if group > 1 else _MOST_EXPONENT_BITS
    for fmt in formats:
        if fmt.exponent_bits > most:
            wanted = f"at most {most} exponent bits"
            raise FormatError(operation, "format", f"{fmt}, {fmt.exponent_bits} exponent bits", wanted)


def fields(fmt: Format) -> tuple[Any, Any]:
    """Every code as value = significand * 2^(exponent - mantissa_bits): two int32 (256,). The exponent of 0
    is so low that it is never the largest. Significands of NaN and Inf are 0: they are not summed."""
    values = codec.table(fmt)
    finite = np.where(np.isfinite(values), values, 0.0)
    lowest = np.frexp(fmt.smallest_normal)[1] - 1
    exponent = np.maximum(np.frexp(finite)[1] - 1, lowest)
    significand = np.rint(np.ldexp(finite, fmt.mantissa_bits - exponent)).astype(np.int32)
    return significand, np.where(significand == 0, -(1 << 20), exponent).astype(np.int32)


def lowest_bit(a: Format, b: Format) -> int:
    """Exponent of the lowest bit that a product of these formats may have."""
    return sum(int(np.frexp(f.smallest_normal)[1]) - 1 - f.mantissa_bits for f in (a, b))
