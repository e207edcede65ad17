"""Number formats: the narrow ones that fp8kit quantises to, and the dtypes that arrays have.

``Format`` describes any ExMy of at most 8 bits and derives its limits; ``DType`` is a row of the table that
holds every foreign code (NumPy, DLPack, XLA, CUDA, NCCL) of an element type. Sources: OCP 8-bit Floating
Point Specification (E4M3, E5M2), OCP Microscaling Formats 1.0 (E2M1, E2M3, E3M2, MXINT8, E8M0), dlpack.h 1.1,
XLA's xla_data.proto, CUDA's library_types.h, NCCL's nccl.h.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import ml_dtypes
import numpy as np

from fp8kit.arguments import flag, integer, shown
from fp8kit.errors import FormatError, Fp8kitError, meant

Special = Literal["ieee", "fn", "none"]
# of float32, and the least that a format's largest value may be: data to 2^64 have finite scales then, and
# products of two such values are normal
_LEAST, _MOST, _LEAST_MAX = 2.0**-149, float(np.finfo(np.float32).max), 2.0**-63


@dataclass(frozen=True)
class Format:
    """A narrow floating-point format: sign, ``exponent_bits``, ``mantissa_bits``, at most 8 bits, one code a
    byte.

    ``special`` says what the top codes mean: "ieee" keeps the whole top exponent for Inf and NaN (E5M2), "fn"
    only the all-ones code for NaN and has no Inf (E4M3), "none" has neither (E2M1). ``zero=False`` has no
    zero and no subnormals: exponent field 0 is an ordinary exponent (E8M0). ``bias`` defaults to ``2 **
    (exponent_bits - 1) - 1``, and 0 without an exponent.

    ``exponent_bits=0`` is a fixed-point format: every value is a subnormal one, a multiple of ``2 ** (1 -
    bias - mantissa_bits)``. ``twos_complement`` writes its negative values as integers are written (MXINT8);
    the most negative code is decoded, but never made, so the range is symmetric.

    What ``fk.quantize`` takes. A recipe's ``fp8_format`` is another class of that name:
    ``fp8kit.recipe.Format``, a pair of these.

    Raises FormatError for a format that does not fit into 8 bits or has no finite value, for values that
    float32 does not have or that are all below 2^-63, and for a name ExMy of other bits.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int = -1
    special: Special = "ieee"
    signed: bool = True
    zero: bool = True
    twos_complement: bool = False

    def __post_init__(self) -> None:
        integer("Format", "exponent_bits", self.exponent_bits, 0, 8, FormatError)
        integer("Format", "mantissa_bits", self.mantissa_bits, 0, 8, FormatError)
        integer("Format", "bias", self.bias, -1, 1023, FormatError)
        for name in ("signed", "zero", "twos_complement"):
            object.__setattr__(self, name, flag("Format", name, getattr(self, name), FormatError))
        if self.bias < 0:
            object.__setattr__(self, "bias", 2 ** max(self.exponent_bits - 1, 0) - 1)
        if not isinstance(self.special, str) or self.special not in ("ieee", "fn", "none"):
            raise FormatError("Format", "special", repr(self.special), '"ieee", "fn" or "none"')
        if not isinstance(self.name, str):
            raise FormatError("Format", "name", shown(self.name), "a text")
        named = re.match(r"E(\d+)M(\d+)", self.name)
        if named and tuple(map(int, named.groups())) != (self.exponent_bits, self.mantissa_bits):
            wanted = f"E{self.exponent_bits}M{self.mantissa_bits}, as its bits are, or another name"
            raise FormatError("Format", "name", repr(self.name), wanted)
        if self.bits > 8:
            got = f"E{self.exponent_bits}M{self.mantissa_bits}, {self.bits} bits"
            raise FormatError("Format", self.name, got, "at most 8 bits")
        if self.exponent_bits == 0 and not self.zero:
            raise FormatError("Format", self.name, "no exponent bit", "at least 1 with zero=False")
        if self.twos_complement and not (self.signed and self.exponent_bits == 0 and self.special == "none"):
            got = f"E{self.exponent_bits}, special={self.special!r}, signed={self.signed}"
            wanted = 'no exponent bit, special="none" and a sign with twos_complement'
            raise FormatError("Format", self.name, got, wanted)
        if self.special == "ieee" and self.exponent_bits < 2:
            got = f"{self.exponent_bits} exponent bits"
            raise FormatError("Format", self.name, got, 'at least 2 with special="ieee"')
        if self.special == "ieee" and self.mantissa_bits < 1:
            raise FormatError(
                "Format", self.name, "no mantissa bit", 'special="fn" or "none": no code is left for NaN'
            )
        if self.max_code < 0 or not self.max > 0:
            raise FormatError("Format", self.name, "no value above 0", "at least one")
        if not (self.smallest_subnormal >= _LEAST and _LEAST_MAX <= self.max <= _MOST):
            got = f"values from {self.smallest_subnormal:g} to {self.max:g} by bias {self.bias}"
            wanted = "float32's values, from 2^-149 on, the largest at least 2^-63"
            raise FormatError("Format", self.name, got, wanted)

    @property
    def bits(self) -> int:
        """Bits of a code, the sign included."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def sign_code(self) -> int:
        """The sign bit's mask, 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.special == "ieee":
            return top - (1 << self.mantissa_bits)
        return top - 1 if self.special == "fn" else top

    @property
    def nan_code(self) -> int | None:
        """Code of the NaN that encoding produces: all ones, positive, as CUDA's conversions give; None where
        there is none."""
        return None if self.special == "none" else (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def inf_code(self) -> int | None:
        """Code of +Inf, None where the format has none."""
        return self.max_code + 1 if self.special == "ieee" else None

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        exponent, mantissa = divmod(self.max_code, 1 << self.mantissa_bits)
        if exponent == 0 and self.zero:
            return mantissa * self.smallest_subnormal
        return float(2.0 ** (exponent - self.bias) * (1 + mantissa / (1 << self.mantissa_bits)))

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value; without an exponent, what comes after ``max``."""
        return float(2.0 ** ((1 if self.zero else 0) - self.bias))

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value (the smallest normal one where there are no subnormals)."""
        if not self.zero or self.mantissa_bits == 0:
            return self.smallest_normal
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value: ``2 ** -mantissa_bits``, that of all values where there
        is no exponent."""
        return float(2.0**-self.mantissa_bits) if self.exponent_bits else self.smallest_subnormal

    def __str__(self) -> str:
        return self.name


E4M3 = Format("E4M3", 4, 3, special="fn")
E5M2 = Format("E5M2", 5, 2)
E8M0 = Format("E8M0", 8, 0, bias=127, special="fn", signed=False, zero=False)
E2M1 = Format("E2M1", 2, 1, special="none")
E2M3 = Format("E2M3", 2, 3, special="none")
E3M2 = Format("E3M2", 3, 2, special="none")
# as IEEE 754 would have it: what ml_dtypes calls float8_e4m3
E4M3_240 = Format("E4M3_240", 4, 3)
MXINT8 = Format("MXINT8", 0, 7, special="none", twos_complement=True)  # multiples of 2 ** -6
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E8M0, E2M1, E2M3, E3M2, E4M3_240, MXINT8)}


@dataclass(frozen=True, eq=False)
class DType:
    """An element type of arrays. Compared by identity; the instances below are the only ones.

    ``itemsize`` in bytes; ``dlpack`` is (type code, bits); ``cuda`` is the cudaDataType, -1 where there is
    none; ``format`` is set for the 8-bit float types.
    """

    name: str
    numpy: np.dtype
    dlpack: tuple[int, int]
    cuda: int = -1
    format: Format | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", self.numpy.itemsize)
        object.__setattr__(self, "floating", self.name in ("float64", "float32", "bfloat16", "float16"))

    itemsize = 0
    floating = False

    @cached_property
    def max(self) -> float:
        """Largest finite value of a floating type."""
        return float(ml_dtypes.finfo(self.numpy).max)

    def __repr__(self) -> str:
        return f"fp8kit.{self.name}"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name


def _row(name: str, kind: object, dlpack: tuple[int, int], cuda: int, fmt: Format | None = None) -> DType:
    return DType(name, np.dtype(kind), dlpack, cuda, fmt)  # type: ignore[call-overload]


#                name               numpy                      dlpack    cuda
float64 = _row("float64", np.float64, (2, 64), 1)
float32 = _row("float32", np.float32, (2, 32), 0)
float16 = _row("float16", np.float16, (2, 16), 2)
bfloat16 = _row("bfloat16", ml_dtypes.bfloat16, (4, 16), 14)
int64 = _row("int64", np.int64, (0, 64), 24)
int32 = _row("int32", np.int32, (0, 32), 10)
int16 = _row("int16", np.int16, (0, 16), 20)
int8 = _row("int8", np.int8, (0, 8), 3)
uint64 = _row("uint64", np.uint64, (1, 64), 26)
uint32 = _row("uint32", np.uint32, (1, 32), 12)
uint16 = _row("uint16", np.uint16, (1, 16), 22)
uint8 = _row("uint8", np.uint8, (1, 8), 8)
bool_ = _row("bool", np.bool_, (6, 8), -1)
float8_e4m3fn = _row("float8_e4m3fn", ml_dtypes.float8_e4m3fn, (10, 8), 28, E4M3)
float8_e5m2 = _row("float8_e5m2", ml_dtypes.float8_e5m2, (12, 8), 29, E5M2)
float8_e8m0fnu = _row("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, (14, 8), 30, E8M0)
float4_e2m1fn = _row("float4_e2m1fn", ml_dtypes.float4_e2m1fn, (17, 4), 33, E2M1)

DTYPES = {d.name: d for d in list(globals().values()) if isinstance(d, DType)}
_BY_NUMPY = {d.numpy: d for d in DTYPES.values()}
# hints
_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
}
_BY_DLPACK = {d.dlpack: d for d in DTYPES.values()}
HIGH_PRECISION = (float32, bfloat16, float16)


def dtype(
    value: object, operation: str = "dtype", argument: str = "value", among: Collection[DType] = ()
) -> DType:
    """Returns the DType that ``value`` names: a DType, its name, anything that ``numpy.dtype`` takes, or
    torch's dtypes. FormatError otherwise, and for one that is not ``among`` those that are wanted, about
    ``argument`` of ``operation``."""
    found = _named(value)
    if found is None or (among and found not in among):
        known = [kind.name for kind in among] or list(DTYPES)
        near = ""
        if found is None and isinstance(value, str):
            alike = [kind for kind in known if kind.startswith("float8") or not value.startswith("float8")]
            near = meant(_SHORT.get(value, value), alike)
        raise FormatError(
            operation, argument, shown(value) if found is None else found, f"one of {', '.join(known)}{near}"
        )
    return found


def _named(value: object) -> DType | None:
    if isinstance(value, DType):
        return value
    name = value if isinstance(value, str) else str(value).removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name]
    try:
        # an array is none, though NumPy may take its dtype
        if hasattr(value, "__array__") and not isinstance(value, type):
            return None
        return _BY_NUMPY.get(np.dtype(value))  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError):
        return None


def number_format(
    value: object, operation: str, argument: str = "format", kind: type[Fp8kitError] = FormatError
) -> Format:
    """Returns the Format that ``value`` names: a Format, its name in ``FORMATS``, or a dtype of its codes.
    An error of ``kind`` otherwise."""
    found = value if isinstance(value, Format) else FORMATS.get(value) if isinstance(value, str) else None
    if found is None:
        named = _named(value)
        found = None if named is None else named.format
    if found is None:
        near = meant(value, FORMATS) if isinstance(value, str) else ""
        own = "fp8kit.E4M3 or another fp8kit.Format (fp8kit.recipe.Format is for recipes), or the name of one"
        raise kind(operation, argument, shown(value), f"a number format: {own}{near}")
    return found


def dtype_from_dlpack(code: int, bits: int) -> DType:
    """Returns the DType of a DLPack (type code, bits) pair; FormatError where fp8kit has none."""
    try:
        return _BY_DLPACK[(code, bits)]
    except (KeyError, TypeError, ValueError):
        raise FormatError(
            "dlpack", "dtype", f"type code {code}, {bits} bits", "a type in fp8kit.formats.DTYPES"
        ) from None


def dtype_of_format(fmt: Format) -> DType | None:
    """Returns the array dtype whose elements are codes of ``fmt``, None for a user-defined format.
    FormatError if ``fmt`` is not a Format."""
    if not isinstance(fmt, Format):
        raise FormatError("dtype_of_format", "fmt", shown(fmt), "a Format")
    return next((d for d in DTYPES.values() if d.format == fmt), None)
