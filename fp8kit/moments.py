"""How an optimiser keeps a parameter's state between steps: Adam's moments in fewer bits, and the master.

``MomentFormat`` is the rule of one moment, ``StateFormats`` that of both and of the master; ``PRESETS`` has
the published ones by name. A moment x of n elements is kept as codes of a format and, per tensor or per block
of neighbours, one number or two:

* a factor: x = code * factor, factor = amax / top, ``top`` the format's largest value. With ``power_2``
  factor = 1 / 2^floor(log2(top / amax)) (FP8-LM, Peng et al. 2023, section 2.2; MS-AMP);
* with ``expansion`` (COAT, Xi et al. 2024, section 4) the block's amax and an exponent k:
  |x| = amax * (|code| / top)^(1 / k), k = floor(16 log2(top^2 / 2) / log2(amax / amin)) / 16, within 1/16 to
  16. That is COAT's sign(x) (|x| / c)^k / s with its c and s put together. amin is the smallest magnitude
  that is not 0: a zero among the values must not stretch the range.

Every number is 0 at first, and zero codes are then zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fp8kit import formats
from fp8kit.arguments import flag
from fp8kit.errors import ArgumentError, FormatError, meant
from fp8kit.formats import DType, Format

BLOCKS = (128, 256)
KEPT: dict[str, DType | Format] = {
    kind.name: kind
    for kind in (formats.float32, formats.bfloat16, formats.float16, formats.E4M3, formats.E5M2)
}
MASTERS = ("float32", "remainder", "float16")
LEAST_EXPONENT, MOST_EXPONENT = 1 / 16, 16.0


@dataclass(frozen=True)
class MomentFormat:
    """How one moment is kept.

    * ``format``: "float32" and "bfloat16" as they are; "float16" with a factor for the tensor; "E4M3" and
      "E5M2", one byte an element.
    * ``block``: None, one factor for the tensor; FP8 also 128 or 256, neighbours of the flattened tensor that
      share a factor, the last block with what is left.
    * ``power_2``: whether factors are powers of two. ``expansion``: an exponent for each block, E4M3 in
      blocks only.

    Raises FormatError.
    """

    format: str = "float32"
    block: int | None = None
    power_2: bool = False
    expansion: bool = False

    def __post_init__(self) -> None:
        name = "MomentFormat"
        if not isinstance(self.format, str) or self.format not in KEPT:
            raise FormatError(name, "format", repr(self.format), f"one of {', '.join(KEPT)}")
        for argument in ("power_2", "expansion"):
            flag(name, argument, getattr(self, argument), FormatError)
        if self.block is not None and (type(self.block) is not int or self.block not in BLOCKS):
            raise FormatError(name, "block", repr(self.block), "None, 128 or 256")
        if self.block is not None and self.fp8 is None:
            raise FormatError(name, "block", self.block, f"None for {self.format}")
        if self.power_2 and (not self.scaled or self.expansion):
            got = "True with expansion" if self.expansion else f"True for {self.format}"
            raise FormatError(name, "power_2", got, "False where there is no factor")
        if self.expansion and (self.block is None or self.format != "E4M3"):
            raise FormatError(name, "expansion", f"True for {self}", "E4M3 in blocks")

    def __str__(self) -> str:
        words = [self.format]
        if self.scaled:
            words.append("per tensor" if self.block is None else f"per {self.block}")
        words += ["powers of two"] * self.power_2 + ["expanded"] * self.expansion
        return ", ".join(words)

    @property
    def fp8(self) -> Format | None:
        """The format of the codes, None where values are kept."""
        kind = KEPT[self.format]
        return kind if isinstance(kind, Format) else None

    @property
    def dtype(self) -> DType:
        """Of the array of codes: uint8 for FP8, else the format itself."""
        kind = KEPT[self.format]
        return kind if isinstance(kind, DType) else formats.uint8

    @property
    def scaled(self) -> bool:
        """Whether there is an array of numbers beside the codes."""
        return self.format not in ("float32", "bfloat16")

    @property
    def by_tensor(self) -> bool:
        """Whether all elements share a factor, so that none can be encoded before all are known."""
        return self.scaled and self.block is None

    @property
    def top(self) -> float:
        """What the largest magnitude becomes: the format's largest value."""
        return KEPT[self.format].max

    def scales(self, size: int) -> tuple[int, ...] | None:
        """Returns the shape of the float32 array beside ``size`` codes: (1,), (blocks,), (blocks, 2) of amax
        and exponent with ``expansion``; None where there is none."""
        if not self.scaled:
            return None
        if self.block is None:
            return (1,)
        blocks = -(-size // self.block)
        return (blocks, 2) if self.expansion else (blocks,)

    def nbytes(self, size: int) -> int:
        """Bytes that a moment of ``size`` elements takes."""
        return size * self.dtype.itemsize + 4 * math.prod(self.scales(size) or (0,))


@dataclass(frozen=True)
class StateFormats:
    """How both moments, and the master of a 16-bit parameter, are kept.

    ``master``: "float32"; "remainder", the 16 bits by which a bfloat16 parameter differs from its float32
    master, as int16: together they are that master, exactly; "float16" with a factor for the tensor, a power
    of two, so that a new factor rounds nothing. float32 parameters have no master. Raises FormatError.
    """

    exp_avg: MomentFormat = MomentFormat()
    exp_avg_sq: MomentFormat = MomentFormat()
    master: str = "float32"

    def __post_init__(self) -> None:
        for argument in ("exp_avg", "exp_avg_sq"):
            value = getattr(self, argument)
            if not isinstance(value, MomentFormat):
                raise FormatError("StateFormats", argument, repr(value), "a MomentFormat")
        if not isinstance(self.master, str) or self.master not in MASTERS:
            raise FormatError("StateFormats", "master", repr(self.master), f"one of {', '.join(MASTERS)}")

    @property
    def plain(self) -> bool:
        """Whether all is float32."""
        return self == StateFormats()

    @property
    def by_tensor(self) -> bool:
        """Whether something has one factor for the tensor, so that a step takes two passes."""
        return self.exp_avg.by_tensor or self.exp_avg_sq.by_tensor or self.master == "float16"

    @property
    def numbers(self) -> tuple[int, ...]:
        """The formats as integers, for files: of each moment its place in ``KEPT``, block (0: none),
        ``power_2`` and ``expansion``, then the master's place in ``MASTERS``."""
        found: list[int] = []
        for kept in (self.exp_avg, self.exp_avg_sq):
            found += list(KEPT).index(kept.format), kept.block or 0, int(kept.power_2), int(kept.expansion)
        return (*found, MASTERS.index(self.master))

    def master_dtype(self, param: DType) -> DType | None:
        """Returns the dtype of a parameter's master, None for float32 parameters. FormatError for remainders
        of float16."""
        if param is formats.float32:
            return None
        if self.master == "remainder":
            if param is not formats.bfloat16:
                raise FormatError("StateFormats", "master", '"remainder" for float16', '"float32", "float16"')
            return formats.int16
        return formats.float32 if self.master == "float32" else formats.float16

    def nbytes(self, size: int, param: DType = formats.bfloat16) -> int:
        """Bytes that the states of a parameter of ``size`` elements of the dtype ``param`` take, without the
        parameter and its gradient."""
        kind = self.master_dtype(param)
        master = 0 if kind is None else size * kind.itemsize + 4 * (kind is formats.float16)
        return self.exp_avg.nbytes(size) + self.exp_avg_sq.nbytes(size) + master


def _both(format: str, block: int, expansion: bool = False) -> StateFormats:
    kept = MomentFormat(format, block, expansion=expansion)
    return StateFormats(kept, kept)


PRESETS: dict[str, StateFormats] = {
    "fp32": StateFormats(),
    # FP8-LM's level O2 (Peng et al. 2023)
    "ms_amp": StateFormats(
        MomentFormat("E4M3", power_2=True), MomentFormat("float16", power_2=True), master="float16"
    ),
    # Fishman et al. 2024, section 5
    "fishman": StateFormats(MomentFormat("E4M3"), MomentFormat("E5M2"), master="float16"),
    "coat": _both("E4M3", 128, expansion=True),
    "block_128": _both("E4M3", 128),
    # torchao's AdamWFp8
    "block_256": _both("E4M3", 256),
}


def _name(format: Any) -> Any:
    """Returns a format's name; anything else as it is."""
    return format.name if isinstance(format, Format | DType) else format


def state_formats(
    operation: str, states: Any, exp_avg: Any = None, exp_avg_sq: Any = None, master: Any = None
) -> StateFormats:
    """``states`` (a preset's name or StateFormats) with the parts that are not None in their place. A moment
    is a MomentFormat, or a format or its name, which is one for the tensor. ArgumentError for an unknown
    preset, FormatError for the rest."""
    found = PRESETS.get(states) if isinstance(states, str) else states
    if not isinstance(found, StateFormats):
        known = f"{', '.join(PRESETS)}{meant(states, PRESETS)}"
        raise ArgumentError(operation, "states", repr(states), f"StateFormats or {known}")
    moments = [
        whole if one is None else one if isinstance(one, MomentFormat) else MomentFormat(_name(one))
        for one, whole in ((exp_avg, found.exp_avg), (exp_avg_sq, found.exp_avg_sq))
    ]
    return StateFormats(moments[0], moments[1], found.master if master is None else master)


def bias_correction(beta: float, step: int) -> float:
    """1 - beta^step by repeated squaring in float64, as the engines compute it on the device."""
    power = 1.0
    while step > 0:
        power = power * beta if step & 1 else power
        step, beta = step >> 1, beta * beta
    return 1.0 - power
