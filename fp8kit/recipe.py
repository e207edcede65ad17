"""Recipes: how tensors become FP8. Hashable values with Transformer Engine's names, order, defaults and
rules. A field that is set counts from the next ``autocast`` on.

A recipe decides, for each GEMM of a layer ::

    fprop  y  = x W^T        x, W in the forward format
    dgrad  dx = dy W         dy in the backward format
    wgrad  dW = dy^T x

the formats, the scale of each operand (``q = encode(x * scale)``, ``scale_inv = 1 / scale``) and the
accumulation: ``recipe.quantization`` and, where scales follow from earlier steps, ``recipe.history``, values
of ``fp8kit.quantization``. Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (formats,
per-tensor scaling), the DeepSeek-V3 technical report (blocks), and Transformer Engine's documentation
(delayed, current and block scaling). Recipes are strict: an unknown field, a wrong type or a contradiction is
a RecipeError, and every field that is accepted has its effect. No environment variable changes a recipe.
"""

from __future__ import annotations

import importlib
from dataclasses import field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from fp8kit import formats
from fp8kit.attention_quantization import AttentionQuantization, attention_of, check_fields
from fp8kit.errors import RecipeError, meant
from fp8kit.quantization import AmaxCompute, AmaxHistory, Gemm, Quantization, Quantizer, ScaleCompute
from fp8kit.recipe_fields import Format as Format
from fp8kit.recipe_fields import FormatLimits as FormatLimits
from fp8kit.recipe_fields import MMParams as MMParams
from fp8kit.recipe_fields import OperandsOfFP4, recipe_class
from fp8kit.recipe_fields import QParams as QParams
from fp8kit.recipe_fields import Recipe as Recipe

if TYPE_CHECKING:
    from fp8kit.layer_recipes import CustomRecipe as CustomRecipe
    from fp8kit.layer_recipes import DataRecipe as DataRecipe
    from fp8kit.layer_recipes import PerLayer as PerLayer
    from fp8kit.layer_recipes import QuantizerRole as QuantizerRole

_MOST_MARGIN = 18
# The least and the greatest scale of delayed scaling. Both have a finite inverse, and no float32 times the
# least one reaches 4, which is below every format's largest value: it saturates nothing, whatever the margin.
DELAYED_SCALES = (2.0**-126, formats.float32.max)
# in an amax history by windows, a later window's step that is still to come; below it no amax counts, since
# the scale of each is the greatest
UNFILLED = 2.0**-126

_NO_BLOCK_ATTENTION = (
    "Transformer Engine has no attention with blocks of 128; a DataRecipe says whatever attention you want"
)
_SCOPES = ("none", "weights", "activations", "all")
_NO_MHA = "the projections' operands have scales of small blocks, which attention's FP8 values do not have"
_OF_FP4 = {  # what says it in the place of QParams
    "random_hadamard_transform": "NVFP4BlockScaling(disable_rht=False)",
    "stochastic_rounding": "NVFP4BlockScaling(disable_stochastic_rounding=False)",
    "fp4_2d_quantization": "NVFP4BlockScaling(disable_2d_quantization=False)",
}
_TE_ROUNDING_BITS = 8  # random bits of the conversion that Blackwell has
_EXACT, _POWER_2 = QParams(), QParams(power_2_scale=True)
_FAST, _SPLIT = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)


# functions, as torch.compile traces no call whose defaults are objects
def _fast() -> MMParams:
    return _FAST


def _split() -> MMParams:
    return _SPLIT


@recipe_class
class DelayedScaling(Recipe):
    """Per-tensor scales from the largest absolute values of earlier steps, so that a tensor is quantised in
    one pass.

    A step quantises with the scale it finds and records the tensor's amax in row 0 of ``amax_history``
    (``amax_history_len`` rows). At the end of the step, for each tensor whose row 0 is not 0 (one that is 0
    was not used, and does not age) ::

        amax      = max(amax_history)      "max"          or   amax_history[0]     "most_recent"
        scale     = fp8_max * 2 ** -margin / amax         kept where amax is 0, Inf or NaN
                    2^-126 where that is less, so that 1 / scale is finite and no float32 saturates;
                    FLT_MAX where that overflows
        scale_inv = 1 / scale
        history   = roll(history, -1): row 0 becomes the newest row, H - 1, and row 0 starts again at 0

    Scales start at 1. A NaN in the history is ignored by "max". Forward states are updated when the outermost
    autocast ends, backward states when a backward pass ends.

    * ``margin``: int from 0 to 18, powers of two kept free below the format's largest value; with 19 E4M3
      would round even that to 0.
    * ``fp8_format``: Format.HYBRID, Format.E4M3 or Format.E5M2. Products of two operands in E5M2 are
      emulated, since no tensor core takes them; Transformer Engine refuses them.
    * ``amax_history_len``: int >= 1, steps.
    * ``amax_compute_algo``: "max", "most_recent", or a callable ``amax_history -> amax`` on float32
      ``(H, n) -> (n,)``.
    * ``scaling_factor_compute_algo``: None for the rule above, or a callable ``(amax, scale, fp8_max, recipe)
      -> scale`` on float32 ``(n,)``. Positive answers are brought into [2^-126, FLT_MAX], as by the
      rule above. One that is not positive, or NaN, leaves the old scale where amax is 0, Inf or NaN;
      elsewhere it is a RecipeError, and nothing is updated. Callables run on the host and cost a
      synchronisation per update; they get NumPy arrays, in PyTorch tensors on the CPU.
    * ``reduce_amax``: bool; whether amaxes are reduced over the processes of a group. One process has nothing
      to reduce.
    * ``fp8_dpa``, ``fp8_mha``: bool; FP8 attention, as in ``Float8CurrentScaling``: its scales have no state
      (Transformer Engine's own history for attention has one step). What ``fp8_mha`` hands on is rounded by
      the next layer's scales.
    * ``backward_override``: None; "high_precision", dgrad and wgrad multiply the tensors as they are;
      "dequantized", the values that fprop multiplied, rounded to the layer's dtype, by the output gradient as
      it is.

    Raises RecipeError. Source: Transformer Engine's DelayedScaling.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | AmaxCompute = "max"
    scaling_factor_compute_algo: ScaleCompute | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._want(int, "margin", "amax_history_len")
        self._want(bool, "reduce_amax")
        if not 0 <= self.margin <= _MOST_MARGIN:
            raise self._refuse("margin", f"an int from 0 to {_MOST_MARGIN}")
        if self.amax_history_len < 1:
            raise self._refuse("amax_history_len", "an int >= 1")
        algo = self.amax_compute_algo
        if not callable(algo) and not (isinstance(algo, str) and algo in ("max", "most_recent")):
            raise self._refuse("amax_compute_algo", '"max", "most_recent" or a callable')
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise self._refuse("scaling_factor_compute_algo", "None or a callable")
        self._check_common()

    # accumulation of the three GEMMs, no fields here
    fp8_gemm_fprop = _FAST
    fp8_gemm_dgrad = fp8_gemm_wgrad = _SPLIT

    @classmethod
    def delayed(cls) -> bool:
        return True

    @cached_property
    @lru_cache(maxsize=256)  # noqa: B019  equal recipes give one object
    def quantization(self) -> Quantization:
        """A scale a tensor, from its state."""
        forward, backward = (
            Quantizer(fmt, scale_source="delayed") for fmt in (self.forward_format, self.backward_format)
        )
        return self._quantization(forward, forward, backward)

    @cached_property
    @lru_cache(maxsize=256)  # noqa: B019  equal recipes give one object
    def attention(self) -> AttentionQuantization | None:
        """One scale a tensor, from the tensor itself."""
        if not self.fp8_dpa:
            return None
        operands = Quantizer(self.forward_format), Quantizer(self.backward_format)
        return attention_of(*operands, self.fp8_mha, casts_on=False)

    @cached_property
    def history(self) -> AmaxHistory:
        """The rule of the scales."""
        made = AmaxHistory(
            self.forward_format.max,
            self.backward_format.max,
            self.amax_history_len,
            self.margin,
            self.amax_compute_algo,
            self.scaling_factor_compute_algo,
            self.reduce_amax,
        )
        return replace(made, recipe=self) if made.on_host else made

    @property
    def host_update(self) -> bool:
        """Whether a callable makes the update run on the host."""
        return self.history.on_host

    def short_name(self) -> str:
        """For example ``delayed(HYBRID, h1024, max)``."""
        algo = self.amax_compute_algo if isinstance(self.amax_compute_algo, str) else "callable"
        margin = f", m{self.margin}" if self.margin else ""
        return f"delayed({self.fp8_format.name}, h{self.amax_history_len}, {algo}{margin}{self._more()})"


class _ScaledNow(Recipe):
    """Base of recipes whose scales come from the tensor that is cast, with QParams for each operand."""

    fp8_quant_fwd_inp: QParams
    fp8_quant_fwd_weight: QParams
    fp8_quant_bwd_grad: QParams

    def _check_operands(self, power_2: bool, why: str) -> None:
        """Fill in the QParams that are None. RecipeError where ``power_2`` scales are asked for, by the field
        ``why``, and not given."""
        usual = _POWER_2 if power_2 else _EXACT
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
                continue
            self._want(QParams, name)
            if of_fp4 := [flag for flag in _OF_FP4 if getattr(getattr(self, name), flag)]:
                raise self._refuse(name, f"{of_fp4[0]}=False: that is of FP4 ({_OF_FP4[of_fp4[0]]})")
            if power_2 and not getattr(self, name).power_2_scale:
                raise self._refuse(name, f"power_2_scale=True, because {why}={getattr(self, why)}")
        self._want(MMParams, "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")

    def _scaled_now(self, *granularities: str) -> Quantization:
        """Operands x, w and g with scales of these granularities."""
        forward, backward = self.forward_format, self.backward_format
        params = (self.fp8_quant_fwd_inp, self.fp8_quant_fwd_weight, self.fp8_quant_bwd_grad)
        operands = [
            Quantizer(fmt, granularity, "current", "power_2" if p.power_2_scale else "exact", p.amax_epsilon)
            for fmt, granularity, p in zip((forward, forward, backward), granularities, params, strict=True)
        ]
        return self._quantization(*operands)


@recipe_class
class Float8CurrentScaling(_ScaledNow):
    """Per-tensor scales from the tensor itself: one pass for its amax, one for the cast ::

        amax      = max(max|x|, amax_epsilon)
        scale     = fp8_max / amax, 1 where amax is 0, Inf or NaN; FLT_MAX where that overflows
                    rounded down to a power of two with power_2_scale
        scale_inv = 1 / scale

    * ``use_power_2_scales``: bool, default of ``power_2_scale`` for all three operands.
    * ``fp8_format``: as in ``DelayedScaling``.
    * ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight``, ``fp8_quant_bwd_grad``: QParams of input, weight and
      output gradient; None becomes ``QParams(power_2_scale=use_power_2_scales)``.
    * ``fp8_gemm_fprop``, ``fp8_gemm_dgrad``, ``fp8_gemm_wgrad``: MMParams of the three GEMMs; by default the
      last two have ``use_split_accumulator``.
    * ``fp8_dpa``: bool; attention's products are quantised too (``fp8kit.attention_quantization``), q, k and
      v as an input, their gradients' side as an output gradient. ``fp8_mha``: bool, only beside it; what the
      projections before and after it hand to attention and get from it is in FP8.
    * ``backward_override``: as in ``DelayedScaling``; attention's backward is quantised all the same.

    There is no state, so nothing is saved. Raises RecipeError, also for ``use_power_2_scales=True`` beside
    QParams without ``power_2_scale``. Source: Transformer Engine's Float8CurrentScaling.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = None  # type: ignore[assignment]
    fp8_quant_fwd_weight: QParams = None  # type: ignore[assignment]
    fp8_quant_bwd_grad: QParams = None  # type: ignore[assignment]
    fp8_gemm_fprop: MMParams = field(default_factory=_fast)
    fp8_gemm_dgrad: MMParams = field(default_factory=_split)
    fp8_gemm_wgrad: MMParams = field(default_factory=_split)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._want(bool, "use_power_2_scales")
        self._check_operands(self.use_power_2_scales, "use_power_2_scales")
        self._check_common()

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return True

    @cached_property
    @lru_cache(maxsize=256)  # noqa: B019  equal recipes give one object
    def quantization(self) -> Quantization:
        """A scale a tensor, from the tensor itself."""
        return self._scaled_now("tensor", "tensor", "tensor")

    @cached_property
    @lru_cache(maxsize=256)  # noqa: B019  equal recipes give one object
    def attention(self) -> AttentionQuantization | None:
        """One scale a tensor, as for the products with weights."""
        own = self.quantization
        return attention_of(own.x, own.g, self.fp8_mha) if self.fp8_dpa else None

    def short_name(self) -> str:
        """For example ``current(HYBRID, pow2)``."""
        power_2 = ", pow2" if self.use_power_2_scales else ""
        return f"current({self.fp8_format.name}{power_2}{self._more()})"


@recipe_class
class Float8BlockScaling(_ScaledNow):
    """A scale for each block of 128 elements along the contraction, from the block itself (DeepSeek-V3
    technical report, section 3.3.2) ::

        amax      = max(max|block|, amax_epsilon)
        scale     = fp8_max / amax, 1 where amax is 0, Inf or NaN;
                    the largest value of the tensor's dtype where that overflows
                    rounded down to a power of two with power_2_scale
        scale_inv = 1 / scale, float32

    An operand of dimension 1 has blocks of 1 x 128, and its transposed copy (wgrad's and dgrad's operands) is
    cast from the high-precision tensor with blocks along the other axis; one of dimension 2 has blocks of 128
    x 128, whose transpose is exact.

    * ``use_f32_scales``: bool; the default of ``power_2_scale`` for all three operands is its opposite.
    * ``fp8_format``: Format.E4M3, Format.HYBRID for E5M2 output gradients, or Format.E5M2, emulated.
    * ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight``, ``fp8_quant_bwd_grad``: QParams of input, weight and
      output gradient; None becomes ``QParams(power_2_scale=not use_f32_scales)``.
    * ``x_block_scaling_dim``, ``w_block_scaling_dim``, ``grad_block_scaling_dim``: 1 or 2; at most one of the
      three is 2, since no product takes two operands of dimension 2.
    * ``fp8_gemm_fprop``, ``fp8_gemm_dgrad``, ``fp8_gemm_wgrad``: MMParams of the three GEMMs; partial sums
      are promoted to float32 at every block, so only ``MMParams(use_split_accumulator=True)``.
    * ``fp8_dpa``, ``fp8_mha``: refused unless False, as in Transformer Engine; a ``DataRecipe`` may have FP8
      attention beside these products.
    * ``backward_override``: as in ``DelayedScaling``.

    There is no state, so nothing is saved. Raises RecipeError, also for ``use_f32_scales=False`` beside
    QParams without ``power_2_scale``. Source: Transformer Engine's Float8BlockScaling.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = None  # type: ignore[assignment]
    fp8_quant_fwd_weight: QParams = None  # type: ignore[assignment]
    fp8_quant_bwd_grad: QParams = None  # type: ignore[assignment]
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = field(default_factory=_split)
    fp8_gemm_dgrad: MMParams = field(default_factory=_split)
    fp8_gemm_wgrad: MMParams = field(default_factory=_split)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._want(bool, "use_f32_scales")
        self._check_operands(not self.use_f32_scales, "use_f32_scales")
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        self._want(int, *dims)
        for name in dims:
            if getattr(self, name) not in (1, 2):
                raise self._refuse(name, "1 or 2")
        squares = [name for name in dims if getattr(self, name) == 2]
        if len(squares) > 1:
            raise self._refuse(
                squares[0], f"1 beside {squares[1]}=2: no product takes two operands of dimension 2"
            )
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise self._refuse(name, "MMParams(use_split_accumulator=True)")
        self._check_common(_NO_BLOCK_ATTENTION)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return True

    @cached_property
    @lru_cache(maxsize=256)  # noqa: B019  equal recipes give one object
    def quantization(self) -> Quantization:
        """A scale a block, from the block itself."""
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        return self._scaled_now(*("block_1x128" if dim == 1 else "block_128x128" for dim in dims))

    def short_name(self) -> str:
        """For example ``block(E4M3, pow2)``; the dimensions of x, w and grad are named where they are not 1,
        2 and 1."""
        scales = "f32" if self.use_f32_scales else "pow2"
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        odd = "" if dims == (1, 2, 1) else f", dims {dims[0]}{dims[1]}{dims[2]}"
        return f"block({self.fp8_format.name}, {scales}{odd}{self._more()})"


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
    * ``fp8_format``: Format.E4M3, Format.HYBRID for E5M2 output gradients, or Format.E5M2.
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

    quantization_alignment = 32

    def __post_init__(self) -> None:
        self._want(int, "margin")
        if self.margin != 0:
            raise self._refuse("margin", "0: the rule of the scales has no margin")
        self._want(Format, "fp8_format")
        if self.fp8_format is Format.E2M1:
            raise self._refuse("fp8_format", "Format.E4M3, Format.HYBRID or Format.E5M2")
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
class NVFP4BlockScaling(OperandsOfFP4, _BlockRecipe):
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

    ``fp4_quant_fwd_inp``, ``fp4_quant_fwd_weight`` and ``fp4_quant_bwd_grad`` are what the flags mean for
    each operand, as QParams. Setting one sets its flags: input and output gradient are rotated both or
    neither, as the last of the two says.

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

    quantization_alignment = 128

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
        """Returns the rule of the scales of "weights" or "activations"."""
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


# what is in other files
_ELSEWHERE = {
    "CustomRecipe": "layer_recipes",
    "DataRecipe": "layer_recipes",
    "PerLayer": "layer_recipes",
    "QuantizerRole": "layer_recipes",
}


def __getattr__(name: str) -> Any:
    """Returns what other files hold. AttributeError that says which recipes there are."""
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"fp8kit.{_ELSEWHERE[name]}"), name)
    own = DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
    kinds = [kind.__name__ for kind in own]
    kinds += [each for each in _ELSEWHERE if each != "QuantizerRole"]
    public = [each for each in globals() if not (each.startswith("_") or each.isupper())]
    known = [*public, *_ELSEWHERE]
    raise AttributeError(
        f"module {__name__!r} has no {name!r}; the recipes are {', '.join(kinds)}{meant(name, known)}",
        name=name,
    )
