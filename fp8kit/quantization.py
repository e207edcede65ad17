"""What a recipe comes to, as data: how each operand of each GEMM of a layer becomes codes and scales.

``Quantizer`` is the rule of one operand, ``Gemm`` two of them and the accumulation, ``Quantization`` the
three GEMMs. ``AmaxHistory`` says how scales follow from earlier steps where operands have state. The classes
of ``fp8kit.recipe`` are constructors of these values; all other code asks the values, never a recipe's class.

They can say more than is carried out: ``ops.products`` refuses by name what no kernel does yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.arguments import choice, flag, integer, named_well, number, shown
from fp8kit.errors import RecipeError, meant
from fp8kit.formats import E2M1, Format, float32, number_format

HostArray = np.ndarray[Any, Any]
AmaxCompute = Callable[[Any], Any]  # of arrays, in PyTorch of tensors
ScaleCompute = Callable[[Any, Any, float, Any], Any]

_INF = 2.0**128 - 2.0**103  # the least number that float32 rounds to Inf
_BLOCKS = [(rows, n) for n in (16, 32, 64, 128) for rows in (1, n)]
# granularity -> (rows, columns) of a tile of elements that share a scale, 0: all of them. Scales of "block"
# are float32; of "mx" E8M0; of "nvfp4" E4M3, and the tensor, or each row ("nvfp4_row"), has a float32 scale
# as well
TILES = {
    "tensor": (0, 0),
    "row": (1, 0),
    **{f"{kind}_{rows}x{n}": (rows, n) for kind in ("block", "mx") for rows, n in _BLOCKS},
    "nvfp4_1x16": (1, 16),
    "nvfp4_16x16": (16, 16),
    "nvfp4_row_1x16": (1, 16),
}
# those of operands of layers: "moss" has E8M0 below a float32 scale of the tensor
GRANULARITIES = {**TILES, "moss_1x32": (1, 32)}
_SOURCES = ("current", "delayed", "amax", "static")
# rules of scales that are powers of two in E8M0, and those of all
MX_RULES = ("floor", "ceil", "even", "rceil", "te")
# rules of NVFP4's scales besides "exact": the better of two scales for each block, by the mean absolute or
# squared error, scales of blocks up to 448 or 256
FOUR_OVER_SIX = ("4over6_mae", "4over6_mse", "4over6_mae_256", "4over6_mse_256")
# rules of E2M1 alone: E8M0 by a block's standard deviation, and NVFP4's that makes a cast unbiased
GAUSS, EDEN = "gauss", "eden"
SCALE_RULES = ("exact", "power_2", *MX_RULES, *FOUR_OVER_SIX, GAUSS, EDEN)
# kind of granularity -> its rules
_RULES = {
    **dict.fromkeys(("tensor", "row", "block"), ("exact", "power_2")),
    "mx": (*MX_RULES, GAUSS),
    "moss": MX_RULES,
    "nvfp4": ("exact", *FOUR_OVER_SIX, EDEN),
}
ROTATIONS = (16, 32, 64, 128)  # neighbours that a Hadamard matrix rotates
COMPUTES = ("quantized", "dequantized", "high_precision")  # how a GEMM is computed
SIGNS = ("plus", "te", "random")
TIES = ("even", "down")


class KnownFields:
    """Base of values whose arguments that are no field are a RecipeError that names the nearest field. A
    missing one is Python's own TypeError, which names it: ``copy`` calls ``__new__`` without any."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """RecipeError for names that are no field, and for what comes twice or has no place."""
        fields: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        if not args and kwargs.keys() <= fields.keys():
            return super().__new__(cls)
        known = list(fields)  # as torch.compile can trace it
        for name in kwargs:
            if name not in known:
                raise RecipeError(
                    cls.__name__, "field", repr(name), f"one of {', '.join(known)}{meant(name, known)}"
                )
        if len(args) > len(known):
            raise RecipeError(
                cls.__name__, "arguments", len(args), f"at most {len(known)}: {', '.join(known)}"
            )
        for name in known[: len(args)]:
            if name in kwargs:
                raise RecipeError(cls.__name__, name, "a value by position and by name", "one value")
        return super().__new__(cls)

    def _want_each(self, kind: type, names: Iterable[str], how: str) -> None:
        """RecipeError for a field whose value is no ``kind``, which is made ``how``."""
        for name, own in ((name, getattr(self, name)) for name in names):
            if not isinstance(own, kind):
                raise RecipeError(type(self).__name__, name, shown(own), f"a {kind.__name__}, such as {how}")


@dataclass(frozen=True)
class Quantizer(KnownFields):
    """How one operand of a GEMM becomes codes and scales. The operand is a matrix whose columns are the
    contraction ::

        amax      = max(max|tile|, epsilon)         of each tile of ``granularity``
        scale     = format.max / amax               rounded by ``scale_rule``; 1 where amax is 0, Inf or NaN
        q         = encode(x * scale)
        scale_inv = 1 / scale

    * ``format``: of the codes, its name, or a dtype of such codes. ``granularity``: which elements share a
      scale: "tensor", "row", "block_1x128", "block_128x128", "mx_1x32", "nvfp4_1x16", "moss_1x32" and others:
      a key of ``GRANULARITIES``.
    * ``scale_source``: "current", the amax is taken from the tile itself; "delayed", the scale is an input
      that follows from the amaxes of earlier steps (``AmaxHistory``), and the tensor's amax an output;
      "static", ``static_scale``; "amax", which operations make of "current" where devices share amaxes, and
      no recipe has: the amax is an input.
    * ``scale_rule``: "exact"; "power_2", rounded down to a power of two; of blocks alone the others:
      "floor", "ceil", "even", "rceil", "te": the rules of scales in E8M0 (OCP Microscaling Formats 1.0,
      section 6.3); "4over6_mae", "4over6_mse", "4over6_mae_256", "4over6_mse_256": NVFP4's choice between two
      scales (``fp8kit.blocks.four_over_six``), of E2M1 to nearest even, without a rotation; "gauss": of MX
      with E2M1, by the block's standard deviation (``fp8kit.blocks.gauss_bytes``); "eden": of NVFP4 with
      E2M1 to nearest even, scales that are corrected and rounded stochastically (``fp8kit.blocks.eden``).
    * ``epsilon``: the least amax, 0 or more, finite in float32. ``static_scale``: positive and finite in
      float32, as its inverse; 1 unless the source is "static".
    * ``stochastic_bits``: 0, codes are rounded to nearest; n, stochastically by n random bits, at most 32.
      ``ties``: to nearest "even", or "down", toward zero, of blocks.
    * ``factor``: what x * scale is multiplied by before it becomes a code, and codes are divided by: less
      than 1 keeps room above, more than 1 clips. Positive; of blocks, with scales of the data.
    * ``clip_gradient``: of fprop's operands, cast by blocks. An element whose code was clipped (|x| * scale
      more than the format's largest value), in the rotated operand where it is rotated, has the gradient 0.
    * ``hadamard``: 0, the operand as it is; 16, 32, 64 or 128: so many neighbours along the contraction are
      first rotated by a Hadamard matrix. ``signs`` of its columns: "plus", "te" (the 16 of Transformer
      Engine, repeated) or "random" (drawn for each call).

    RecipeError for another word, a number out of its range, and for a format that is not one.
    """

    format: Format
    granularity: str = "tensor"
    scale_source: str = "current"
    scale_rule: str = "exact"
    epsilon: float = 0.0
    static_scale: float = 1.0
    stochastic_bits: int = 0
    hadamard: int = 0
    signs: str = "plus"
    ties: str = "even"
    factor: float = 1.0
    clip_gradient: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", number_format(self.format, "Quantizer", kind=RecipeError))
        words = {"granularity": GRANULARITIES, "scale_source": _SOURCES, "scale_rule": SCALE_RULES}
        for name, known in {**words, "signs": SIGNS, "ties": TIES}.items():
            choice("Quantizer", name, getattr(self, name), known, RecipeError)
        integer("Quantizer", "stochastic_bits", self.stochastic_bits, 0, 32, RecipeError)
        number("Quantizer", "epsilon", self.epsilon, _INF, RecipeError)
        number("Quantizer", "static_scale", self.static_scale, _INF, RecipeError, above=0.0)
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / np.float32(self.static_scale)
        if not 0 < inverse < np.inf:
            wanted = "positive, and finite in float32 as its inverse"
            raise RecipeError("Quantizer", "static_scale", shown(self.static_scale), wanted)
        if self.static_scale != 1 and not self.static:
            got = f"{self.static_scale} with scale_source {self.scale_source!r}"
            raise RecipeError("Quantizer", "static_scale", got, "1, or scale_source 'static'")
        rules = _RULES[self.granularity.partition("_")[0]]
        if self.scale_rule not in rules:
            if self.format != E2M1:
                rules = tuple(rule for rule in rules if rule not in (*FOUR_OVER_SIX, GAUSS, EDEN))
            default = " (the default)" if self.scale_rule == "exact" else ""
            got = f"{self.scale_rule!r} with {self.granularity}{default}"
            raise RecipeError("Quantizer", "scale_rule", got, f"one of {', '.join(rules)}")
        if self.scale_rule in FOUR_OVER_SIX and (
            self.stochastic_bits or self.hadamard or self.format != E2M1 or not self.two_level
        ):
            wanted = "E2M1 by nvfp4_*, to nearest even, without a rotation"
            raise RecipeError("Quantizer", "scale_rule", f"{self.scale_rule!r} of {self}", wanted)
        if self.hadamard not in (0, *ROTATIONS):
            raise RecipeError("Quantizer", "hadamard", shown(self.hadamard), f"one of {(0, *ROTATIONS)}")
        if self.signs != "plus" and not self.hadamard:
            got = f"{self.signs!r} with hadamard=0"
            raise RecipeError("Quantizer", "signs", got, "hadamard=16 or more, which takes it")
        if self.needs_state and self.granularity != "tensor":
            got = f"{self.granularity} with scale_source 'delayed'"
            raise RecipeError("Quantizer", "granularity", got, "tensor: its amaxes alone have a history")
        self._want_levers()

    def _want_levers(self) -> None:
        """RecipeError for levers of blocks that do not fit the rest."""
        if not (isinstance(self.factor, int | float) and 2.0**-10 <= self.factor <= 2.0**10):
            raise RecipeError("Quantizer", "factor", shown(self.factor), "a number from 2^-10 to 2^10")
        if not isinstance(self.clip_gradient, bool):
            raise RecipeError("Quantizer", "clip_gradient", shown(self.clip_gradient), "a bool")
        for name in self.levers:
            if self.granularity in ("tensor", "row") or self.static or self.scale_rule in FOUR_OVER_SIX:
                got = f"{getattr(self, name)!r} of {self.granularity}, {self.scale_source}, {self.scale_rule}"
                wanted = "a granularity of blocks, scale_source 'current', and no 4over6 rule"
                raise RecipeError("Quantizer", name, got, wanted)
        if self.ties != "even" and self.stochastic_bits:
            raise RecipeError("Quantizer", "ties", repr(self.ties), "'even' with stochastic_bits: no ties")
        one = self.format == E2M1 and self.tile[0] == 1
        if self.scale_rule == GAUSS and not (one and self.granularity.startswith("mx")):
            raise RecipeError("Quantizer", "scale_rule", f"'gauss' of {self}", "E2M1 by mx_1xN")
        plain = not self.stochastic_bits and self.ties == "even"
        if self.scale_rule == EDEN and not (one and plain and self.granularity == "nvfp4_1x16"):
            raise RecipeError(
                "Quantizer", "scale_rule", f"'eden' of {self}", "E2M1 by nvfp4_1x16, to nearest"
            )

    @property
    def levers(self) -> tuple[str, ...]:
        """The fields of casts by blocks alone that have another value than their default."""
        pulled = {
            "factor": self.factor != 1,
            "ties": self.ties != "even",
            "clip_gradient": self.clip_gradient,
        }
        return tuple(name for name, own in pulled.items() if own)

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, columns) of the elements that share a scale; 0 is all of them."""
        return GRANULARITIES[self.granularity]

    @property
    def needs_state(self) -> bool:
        """Whether the scale follows from earlier steps."""
        return self.scale_source == "delayed"

    @property
    def needs_amax(self) -> bool:
        """Whether the amax of the whole tensor is an output: taken for its scale, or recorded."""
        return self.granularity == "tensor" and self.scale_source != "static"

    @property
    def takes_amax(self) -> bool:
        """Whether the amax of the whole tensor is taken before the tensor can be cast."""
        return self.needs_amax and self.scale_source == "current"

    @property
    def rotation(self) -> tuple[int, str]:
        """(size, signs) of the rotation, (0, "plus") for none."""
        return (self.hadamard, self.signs) if self.hadamard else (0, "plus")

    @property
    def static(self) -> bool:
        """Whether the scale is always the same."""
        return self.scale_source == "static"

    @property
    def coded_scales(self) -> bool:
        """Whether the blocks' scales are a byte each, in E8M0 or E4M3."""
        return self.granularity.startswith(("mx", "nvfp4", "moss"))

    @property
    def two_level(self) -> bool:
        """Whether the tensor, or each row, has a scale besides those of its blocks."""
        return self.granularity.startswith(("nvfp4", "moss"))

    @property
    def scaled_after(self) -> bool:
        """Whether something multiplies the products of the blocks' values: such a scale, or 1 / ``factor``
        of MX, which its values do not have."""
        return self.two_level or (self.factor != 1 and self.granularity.startswith("mx"))

    @property
    def row_scaled(self) -> bool:
        """Whether that is each row."""
        return self.granularity.startswith("nvfp4_row")

    @property
    def needs_rng(self) -> bool:
        """Whether the cast draws random bits."""
        random_signs = bool(self.hadamard) and self.signs == "random"
        return bool(self.stochastic_bits) or random_signs or self.scale_rule == EDEN

    @property
    def power_2(self) -> bool:
        """Whether scales are rounded down to powers of two."""
        return self.scale_rule == "power_2"

    @property
    def scale_limits(self) -> tuple[float, bool, float, float]:
        """What a kernel that makes a scale of an amax is told: the largest value that the scale maps it to,
        whether scales are powers of two, the least amax that counts, and the scale where 1 / amax is Inf."""
        return self.format.max, self.power_2, self.epsilon, float32.max

    def with_amax(self) -> Quantizer:
        """Returns the same with the amax as an input, where it takes it itself."""
        return replace(self, scale_source="amax") if self.takes_amax else self

    def __str__(self) -> str:
        """For example ``E4M3 by block_1x128, current, power_2``."""
        more = {"stochastic": self.stochastic_bits, "hadamard": self.hadamard, "epsilon": self.epsilon}
        more |= {"factor": self.factor if self.factor != 1 else 0}
        source = f"{self.scale_source} {self.static_scale:g}" if self.static else self.scale_source
        words = [source, *(() if self.scale_rule == "exact" else (self.scale_rule,))]
        words += [f"{name} {value:g}" for name, value in more.items() if value]
        words += ["ties down"] * (self.ties == "down") + ["clip_gradient"] * self.clip_gradient
        return f"{self.format} by {self.granularity}, {', '.join(words)}"


@dataclass(frozen=True)
class Gemm(KnownFields):
    """One GEMM, out = a b^T: how its operands are cast, and how it is computed.

    * ``accumulation``: "split" promotes partial sums to float32 regularly, "fast" accumulates in the tensor
      cores' own width. Or an ``Accumulation``, or the name of one: that arithmetic, with the same bits on
      every device (``fp8kit.accumulation``).
    * ``compute``: "quantized" multiplies the codes; "dequantized" their values, in high precision;
      "high_precision" the operands as they are.
    * ``recast``: of dgrad and wgrad, ``b`` is not cast from the weight or the input, but from the values of
      fprop's codes, rounded to the layer's dtype.
    * ``plain``: "a" or "b": that operand of a "quantized" GEMM is multiplied as it is, by the values of the
      other one's codes; "": neither.
    * ``emulated``: False; or True: the codes' values are multiplied, in high precision, also where tensor
      cores would multiply the codes (``Quantization.emulated``).
    * ``scaled``: False; or True: the codes are multiplied by the scales of their blocks in tensor cores that
      take both (``fp8kit.scaled_products``). Layers say so on such a chip.

    RecipeError for another word, and for an operand that is no Quantizer.
    """

    a: Quantizer
    b: Quantizer
    accumulation: str | Accumulation = "split"
    compute: str = "quantized"
    recast: bool = False
    plain: str = ""
    emulated: bool = False
    scaled: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.accumulation, Accumulation):
            known = ("split", "fast", *ACCUMULATIONS)
            choice("Gemm", "accumulation", self.accumulation, known, RecipeError)
        choice("Gemm", "compute", self.compute, COMPUTES, RecipeError)
        self._want_each(Quantizer, "ab", "Quantizer(fk.E4M3)")
        if not isinstance(self.recast, bool) or (self.recast and self.compute != "quantized"):
            got = f"{shown(self.recast)} with {self.compute!r}"
            raise RecipeError("Gemm", "recast", got, "a bool, False unless compute is 'quantized'")
        choice("Gemm", "plain", self.plain, ("", "a", "b"), RecipeError)
        for own in self.cast:
            if not own.format.zero:
                got = f"{own.format}, which has no zero"
                raise RecipeError("Gemm", "format", got, "a format of values, such as E4M3")
        if self.plain and (self.compute != "quantized" or self.cast[0].hadamard):
            wanted = '"", or a quantized GEMM whose other operand is not rotated'
            raise RecipeError("Gemm", "plain", shown(self.plain), wanted)
        for name in ("emulated", "scaled"):
            flag("Gemm", name, getattr(self, name), RecipeError)
        if self.compute == "quantized" and not self.plain and self.a.rotation != self.b.rotation:
            sides = (("a", self.a), ("b", self.b))
            got = " and ".join(f"{own.hadamard}, {own.signs!r} for {side}" for side, own in sides)
            raise RecipeError("Gemm", "hadamard, signs", got, "the same for both, so that they cancel")

    @property
    def cast(self) -> tuple[Quantizer, ...]:
        """How those operands are cast that it multiplies the codes of, a's first."""
        if self.compute != "quantized":
            return ()
        return tuple(own for name, own in (("a", self.a), ("b", self.b)) if name != self.plain)

    @property
    def fast(self) -> bool:
        """Whether it accumulates in the tensor cores' own width."""
        return self.accumulation == "fast"

    @property
    def how(self) -> bool | Accumulation:
        """The arithmetic that it is summed by; with the device's own whether that is ``fast``."""
        own = self.accumulation
        return own if isinstance(own, Accumulation) else ACCUMULATIONS.get(own, self.fast)


# GEMM -> the operands that it reads: the input, the weight, the output gradient
OPERANDS = {"fprop": "xw", "dgrad": "gw", "wgrad": "gx"}
NAMES = {"x": "input", "w": "weight", "g": "grad_output"}


def gemm_of(
    name: str, a: Quantizer, b: Quantizer, accumulation: str | Accumulation, compute: str = "quantized"
) -> Gemm:
    """``Gemm(a, b, accumulation, compute)`` for the GEMM of that name: a refusal names it and its
    operands."""
    try:
        return Gemm(a, b, accumulation, compute)
    except RecipeError as error:
        sides = " and ".join(f"{side} the {NAMES[of]}" for side, of in zip("ab", OPERANDS[name], strict=True))
        raise error.renamed(f"Gemm {name} ({sides})", str(error.argument)) from None


@dataclass(frozen=True)
class Quantization(KnownFields):
    """The three GEMMs of a layer's weight ::

        fprop  y  = x W^T        a: x (M, K)               b: w (N, K)
        dgrad  dx = g W          a: g (M, N)               b: w transposed (K, N)
        wgrad  dW = g^T x        a: g transposed (N, M)    b: x transposed (K, M)

    Each operand is read by two of them. ``x``, ``w`` and ``g`` are the operands as the first reads them.
    Raises RecipeError.
    """

    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm

    def __post_init__(self) -> None:
        self._want_each(Gemm, OPERANDS, "Gemm(quantizer_of_a, quantizer_of_b)")
        if self.fprop.compute == "dequantized":
            wanted = "'quantized' or 'high_precision': only dgrad and wgrad can reuse fprop's codes"
            raise RecipeError("Quantization", "fprop.compute", "'dequantized'", wanted)
        if self.fprop.recast:
            raise RecipeError("Quantization", "fprop.recast", True, "False: only dgrad and wgrad can recast")

    @classmethod
    @named_well
    def of(
        cls,
        x: Quantizer,
        w: Quantizer,
        g: Quantizer,
        fprop: str | Accumulation = "fast",
        dgrad: str | Accumulation = "split",
        wgrad: str | Accumulation = "split",
    ) -> Quantization:
        """Operands that both of their GEMMs cast alike, and each GEMM's accumulation. Raises RecipeError."""
        return cls(
            gemm_of("fprop", x, w, fprop), gemm_of("dgrad", g, w, dgrad), gemm_of("wgrad", g, x, wgrad)
        )

    @property
    def x(self) -> Quantizer:
        """The input, as fprop reads it, or, where that is in high precision, wgrad."""
        return self.wgrad.b if self.fprop.compute == "high_precision" else self.fprop.a

    @property
    def w(self) -> Quantizer:
        """The weight, as fprop reads it, or, where that is in high precision, dgrad."""
        return self.dgrad.b if self.fprop.compute == "high_precision" else self.fprop.b

    @property
    def g(self) -> Quantizer:
        """The output gradient, as dgrad reads it, or, where that casts none, wgrad."""
        return self.dgrad.a if self.dgrad.compute == "quantized" else self.wgrad.a

    @property
    def gemms(self) -> dict[str, Gemm]:
        """The GEMMs by name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @cached_property
    def needs_rng(self) -> bool:
        """Whether an operand's cast draws random bits."""
        return any(operand.needs_rng for operand in self._cast)

    @cached_property
    def random_weight(self) -> bool:
        """Whether the weight's cast draws random bits: such a weight is cast anew in each microbatch, since
        signs that are drawn for it are drawn for what it is multiplied by, too."""
        used = [gemm for gemm in (self.fprop, self.dgrad) if gemm.compute == "quantized"]
        return any(gemm.b.needs_rng for gemm in used if not gemm.recast and gemm.plain != "b")

    @cached_property
    def two_level(self) -> bool:
        """Whether an operand's tensor has a scale besides those of its blocks."""
        return any(operand.two_level for operand in self._cast)

    @cached_property
    def whole(self) -> bool:
        """Whether casts see all of an operand: random bits know their place, tensors' scales all of the
        tensor, and what fprop multiplied, or did not clip, is read by another GEMM."""
        again = any(gemm.recast for gemm in self.gemms.values())
        return self.needs_rng or self.two_level or again or any(own.clip_gradient for own in self._cast)

    @property
    def stateful(self) -> list[tuple[str, Quantizer]]:
        """("x", "w" or "g", how it is cast) of every operand whose scale follows from earlier steps."""
        return [
            (source, own)
            for name, gemm in self.gemms.items()
            for source, place, own in zip(OPERANDS[name], "ab", (gemm.a, gemm.b), strict=True)
            if gemm.compute == "quantized" and place != gemm.plain and own.needs_state
        ]

    @property
    def _cast(self) -> list[Quantizer]:
        """The operands of the GEMMs that multiply codes: the others cast none of their own."""
        return [operand for gemm in self.gemms.values() for operand in gemm.cast]

    def map(self, change: Callable[[Quantizer], Quantizer], operands: str = "xwg") -> Quantization:
        """Returns the same with ``change(quantizer)`` for those ``operands``."""
        made = (
            replace(
                gemm,
                a=change(gemm.a) if pair[0] in operands else gemm.a,
                b=change(gemm.b) if pair[1] in operands else gemm.b,
            )
            for gemm, pair in zip(self.gemms.values(), OPERANDS.values(), strict=True)
        )
        return Quantization(*made)

    def summed(self, how: str | Accumulation) -> Quantization:
        """Returns the same with all three GEMMs summed by ``how``, a ``Gemm.accumulation``."""
        return Quantization(*(replace(gemm, accumulation=how) for gemm in self.gemms.values()))

    def emulated(self) -> Quantization:
        """Returns the same, never by products on codes: on every device, those that have none among them."""
        return Quantization(*(replace(gemm, emulated=True, scaled=False) for gemm in self.gemms.values()))

    def __str__(self) -> str:
        """x, w and g, then what of the GEMMs differs: ``x: ...; w: ...; g: ...; w of dgrad: ...``."""
        own = {"x": self.x, "w": self.w, "g": self.g}
        words = [f"{name}: {cast}" for name, cast in own.items()]
        for name, gemm in self.gemms.items():
            if gemm.compute != "quantized":
                words.append(f"{name}: {gemm.compute}")
                continue
            for side, of, cast in zip("ab", OPERANDS[name], (gemm.a, gemm.b), strict=True):
                again = gemm.recast and side == "b"
                if side == gemm.plain:
                    words.append(f"{of} of {name}: as it is")
                elif again or cast != own[of]:
                    words.append(f"{of} of {name}: {cast}{', of the values of fprop' * again}")
        return "; ".join(words)


# fp8_max, margin, most_recent, power_2, growth, by_window: arguments of the kernel ``update_delayed_``
DelayedRule = tuple[float, int, bool, bool, float | None, bool]


@dataclass(frozen=True)
class AmaxHistory(KnownFields):
    """How the scales of operands with state follow from the amaxes of earlier steps, by the rule that
    ``recipe.DelayedScaling`` states.

    * ``max_forward``, ``max_backward``: what the amax of x and w, and of g, becomes: the largest value of
      their format. ``length``: steps. ``margin``: powers of two kept free.
    * ``amax_algo``: "max", "most_recent" or a callable; ``scale_algo``: None or a callable; ``recipe``: what
      the callables belong to, None where there are none. ``reduce``: whether processes share their amaxes.
    * ``power_2``: scales are rounded down to powers of two (FP8-LM, arXiv 2310.18313).
    * ``growth``: None; or the most that the amax of w grows in a step, Adam's learning rate, say: w's scale
      is then predicted (MOSS, arXiv 2511.05811). An amax that is measured counts for ``length`` steps ::

          scale = max_forward * 2^-margin / (amax + growth * steps since)

      the first one at 1 step; then the next is measured. It is the update that skips what is measured in
      between: casts record it. ``amax_algo`` has no meaning then for w, and x has no state.
    * ``by_window``: the scales change once in ``length`` steps: when the window is full, by its amaxes. Then
      the next window begins (Fishman et al., arXiv 2409.12517). In the first window, which begins with scales
      of 1, they change after every step, by the amaxes so far. Not with callables or ``growth``.

    RecipeError for values out of their range.
    """

    max_forward: float
    max_backward: float
    length: int = 1024
    margin: int = 0
    amax_algo: str | AmaxCompute = "max"
    scale_algo: ScaleCompute | None = None
    reduce: bool = True
    recipe: Any = None
    power_2: bool = False
    growth: float | None = None
    by_window: bool = False

    def __post_init__(self) -> None:
        for name in ("max_forward", "max_backward"):
            number("AmaxHistory", name, getattr(self, name), kind=RecipeError, above=0.0)
        integer("AmaxHistory", "length", self.length, 1, None, RecipeError)
        integer("AmaxHistory", "margin", self.margin, -32, 32, RecipeError)
        if not callable(self.amax_algo):
            choice("AmaxHistory", "amax_algo", self.amax_algo, ("max", "most_recent"), RecipeError)
        flag("AmaxHistory", "by_window", self.by_window, RecipeError)
        if self.by_window and (self.on_host or self.growth is not None):
            raise RecipeError("AmaxHistory", "by_window", "True", "False beside callables or growth")
        if self.growth is None:
            return
        if not (isinstance(self.growth, int | float) and 0 <= self.growth < np.inf):
            raise RecipeError(
                "AmaxHistory", "growth", shown(self.growth), "None, or a finite number from 0 on"
            )
        if self.on_host:
            raise RecipeError("AmaxHistory", "growth", self.growth, "None beside callables")

    def __str__(self) -> str:
        """For example ``max of 1024 steps``."""
        algo = self.amax_algo if isinstance(self.amax_algo, str) else "a function"
        words = [f"{algo} of {self.length} steps"]
        words += [f"margin {self.margin}"] * bool(self.margin) + ["powers of two"] * self.power_2
        if self.growth is not None:
            words.append(f"w predicted, {self.growth:g} a step, from one amax in {self.length}")
        words += ["once in a window"] * self.by_window
        return ", ".join(words)

    @cached_property
    def rules(self) -> dict[bool, DelayedRule]:
        """What the kernel ``update_delayed_`` is told of x and w (True) and of g (False)."""
        own = self.margin, self.most_recent, self.power_2
        return {
            True: (self.max_forward, *own, self.growth, self.by_window),
            False: (self.max_backward, *own, None, self.by_window),
        }

    @cached_property
    def most_recent(self) -> bool:
        """Whether the newest amax alone decides."""
        return self.amax_algo == "most_recent"

    @cached_property
    def on_host(self) -> bool:
        """Whether a callable makes the update run on the host."""
        return callable(self.amax_algo) or self.scale_algo is not None
