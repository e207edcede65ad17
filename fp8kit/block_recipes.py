"""Recipes whose operands have scales of small blocks, with Transformer Engine's names, fields and defaults.

``fp8kit.recipe`` has them. Where a chip has no tensor cores for them, which is every chip that fp8kit runs on
so far, their products are emulated (``ops.product_emulated``): every operand is the one that a chip which has
them multiplies, bit for bit; only the order of the sums is another.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from fp8kit import formats
from fp8kit.attention_quantization import AttentionQuantization, attention_of, check_fields
from fp8kit.errors import RecipeError
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.recipe import Format, Recipe
from fp8kit.recipe_fields import recipe_class

_SCOPES = ("none", "weights", "activations", "all")
_NO_MHA = "the projections' operands have scales of small blocks, which attention's FP8 values do not have"
_TE_ROUNDING_BITS = 8  # random bits of the conversion that Blackwell has


class _BlockRecipe(Recipe):
    """Base of the recipes below."""

    def _check(self, *flags: str) -> None:
        """RecipeError for ``flags`` that are no bool, and for fields that all have."""
        self._want(bool, *flags)
        check_fields(self, mha=_NO_MHA)
        self._want_override()


@recipe_class
class MXFP8BlockScaling(_BlockRecipe):
    """FP8 with a power of two as the scale of each block of 32 elements along the contraction (OCP
    Microscaling Formats 1.0; Transformer Engine's MXFP8BlockScaling) ::

        scale_inv = 2^(B - 127), B the byte of amax / fp8_max rounded up to a power of two (rule "te" of
                    ``fp8kit.blocks``: 0 for an amax of 0, 0xFE for Inf, 0xFF for NaN)
        q         = encode(x / scale_inv)

    An operand's transposed copy (wgrad's and dgrad's operands) is cast from the high-precision tensor with
    blocks along the other axis.

    * ``margin``: 0; the rule has none, and Transformer Engine does not read it.
    * ``fp8_format``: Format.E4M3, or Format.HYBRID for E5M2 output gradients.
    * ``backward_override``: None; "high_precision", dgrad and wgrad multiply the tensors as they are;
      "dequantized", the values that fprop multiplied, by the output gradient as it is.
    * ``enable_2d_quantization``: bool; the weight has blocks of 32 x 32, and so the same values in fprop and
      dgrad.
    * ``fp8_dpa``: bool; attention's products are quantised too (``fp8kit.attention_quantization``): q, k, v
      and the output gradient by blocks of 32 along each contraction, P and dS with one scale. ``fp8_mha``:
      refused unless False, as in Transformer Engine.

    There is no state. Raises RecipeError.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        self._want(int, "margin")
        if self.margin != 0:
            raise self._refuse("margin", "0: the rule of the scales has no margin")
        self._want(Format, "fp8_format")
        if self.fp8_format not in (Format.E4M3, Format.HYBRID):
            raise self._refuse("fp8_format", "Format.E4M3 or Format.HYBRID")
        self._check("enable_2d_quantization")

    @classmethod
    def mxfp8(cls) -> bool:
        return True

    @cached_property
    @lru_cache(maxsize=256)  # noqa: B019  equal recipes give one object
    def quantization(self) -> Quantization:
        """A power of two a block, from the block itself."""
        x, g = (
            Quantizer(fmt, "mx_1x32", scale_rule="te") for fmt in (self.forward_format, self.backward_format)
        )
        w = replace(x, granularity="mx_32x32") if self.enable_2d_quantization else x
        return self._overridden(Quantization.of(x, w, g, fprop="split"))

    @cached_property
    @lru_cache(maxsize=256)  # noqa: B019  equal recipes give one object
    def attention(self) -> AttentionQuantization | None:
        """A power of two a block, from the block itself."""
        if not self.fp8_dpa:
            return None
        own = self.quantization
        return attention_of(own.x, own.g)

    def short_name(self) -> str:
        """For example ``mxfp8(E4M3)``."""
        more = ", 2d" if self.enable_2d_quantization else ""
        return f"mxfp8({self.fp8_format.name}{more}{self._more()})"


@recipe_class
class NVFP4BlockScaling(_BlockRecipe):
    """FP4 with two levels of scales: E4M3 for each block of 16 elements along the contraction, and float32
    for the tensor (NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149; Transformer
    Engine's NVFP4BlockScaling) ::

        S = 448 * 6 / amax(tensor)            c = E4M3(amax(block) * S / 6)
        q = E2M1(x * S / c)                   value = q * c / S

    * ``disable_rht``: bool; without it wgrad's operands, x and the output gradient, are rotated before the
      cast, 16 neighbours along the contraction by a Hadamard matrix with Transformer Engine's signs. The
      rotations cancel in the product.
    * ``disable_stochastic_rounding``: bool; without it the output gradient is rounded stochastically, by 8
      random bits an element, in both of its orientations. The bits come from the layer's random numbers
      (``fk.manual_seed``, torch's generator, ``rng`` of JAX's autocast).
    * ``disable_2d_quantization``: bool; without it the weight has blocks of 16 x 16, and so the same values
      in fprop and dgrad.
    * ``row_scaled_activation``: bool; the input has S for each of its rows, and so has its transposed copy.
    * ``nvfp4_4over6``: "none", "weights", "activations" (the input, not the output gradient) or "all": what
      is cast by the better of two scales for each block, with which its amax becomes 6 or 4
      (``fp8kit.blocks.four_over_six``; Cook et al. 2025, Four Over Six, arXiv 2512.02010). Not with a
      rotation: activations want ``disable_rht=True`` or a ``backward_override``.
      ``nvfp4_4over6_e4m3_use_256``: likewise; of those what has 256 in the place of 448.
      ``nvfp4_4over6_err_mode``: "MAE" or "MSE", what is better. Both have no effect without the first.
    * ``fp4_format``: Format.E2M1; ``fp8_format``, of the blocks' scales: Format.E4M3.
    * ``fp8_dpa``: bool; attention's products are in FP8, E4M3 and for gradients E5M2, with the scales of
      ``Float8CurrentScaling``, as Transformer Engine has it with NVTE_DPA_FP8_RECIPE. ``fp8_mha``: refused
      unless False: the projections' operands have 4 bits.
    * ``backward_override``: as in ``MXFP8BlockScaling``.

    There is no state. Raises RecipeError.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check(
            "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "row_scaled_activation"
        )
        words = {"nvfp4_4over6": _SCOPES, "nvfp4_4over6_e4m3_use_256": _SCOPES}
        for name, known in {**words, "nvfp4_4over6_err_mode": ("MAE", "MSE")}.items():
            self._want(str, name)
            if getattr(self, name) not in known:
                raise self._refuse(name, f"one of {', '.join(map(repr, known))}")
        rotated = not self.disable_rht and self.backward_override is None
        if rotated and self.nvfp4_4over6 in ("activations", "all"):
            raise self._refuse("nvfp4_4over6", "'none' or 'weights', unless disable_rht=True")
        for name, wanted in (("fp4_format", Format.E2M1), ("fp8_format", Format.E4M3)):
            if getattr(self, name) is not wanted:
                raise RecipeError(type(self).__name__, name, repr(getattr(self, name)), str(wanted))

    @classmethod
    def nvfp4(cls) -> bool:
        return True

    @property
    def forward_format(self) -> formats.Format:
        return formats.E2M1

    @property
    def backward_format(self) -> formats.Format:
        return formats.E2M1

    @cached_property
    @lru_cache(maxsize=256)  # noqa: B019  equal recipes give one object
    def quantization(self) -> Quantization:
        """Two levels of scales, from the tensor itself."""
        plain = Quantizer(formats.E2M1, "nvfp4_1x16")
        x = replace(plain, granularity="nvfp4_row_1x16") if self.row_scaled_activation else plain
        x = replace(x, scale_rule=self._rule("activations"))
        w = plain if self.disable_2d_quantization else replace(plain, granularity="nvfp4_16x16")
        w = replace(w, scale_rule=self._rule("weights"))
        bits = 0 if self.disable_stochastic_rounding else _TE_ROUNDING_BITS
        g = replace(plain, stochastic_bits=bits)
        if self.disable_rht or x.scale_rule != "exact":
            wgrad = Gemm(g, x)
        else:
            rotation: dict[str, Any] = {"hadamard": 16, "signs": "te"}
            wgrad = Gemm(replace(g, **rotation), replace(x, **rotation))
        return self._overridden(Quantization(Gemm(x, w), Gemm(g, w), wgrad))

    def _rule(self, scope: str) -> str:
        """The rule of the scales of "weights" or "activations"."""
        if self.nvfp4_4over6 not in (scope, "all"):
            return "exact"
        bound = "_256" if self.nvfp4_4over6_e4m3_use_256 in (scope, "all") else ""
        return f"4over6_{self.nvfp4_4over6_err_mode.lower()}{bound}"

    @cached_property
    @lru_cache(maxsize=256)  # noqa: B019  equal recipes give one object
    def attention(self) -> AttentionQuantization | None:
        """One scale a tensor, in FP8."""
        return attention_of(Quantizer(formats.E4M3), Quantizer(formats.E5M2)) if self.fp8_dpa else None

    def short_name(self) -> str:
        """For example ``nvfp4(rht, sr, 2d)``."""
        parts = {
            "rht": not self.disable_rht,
            "sr": not self.disable_stochastic_rounding,
            "2d": not self.disable_2d_quantization,
            "rows": self.row_scaled_activation,
            f"4over6 {self.nvfp4_4over6}": self.nvfp4_4over6 != "none",
        }
        return f"nvfp4({', '.join(name for name, on in parts.items() if on)}{self._more()})"
