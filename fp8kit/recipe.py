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

import copy
import importlib
from dataclasses import field, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from fp8kit import formats
from fp8kit.attention_quantization import AttentionQuantization, attention_of, check_fields, words_of
from fp8kit.errors import RecipeError, meant
from fp8kit.quantization import AmaxCompute, AmaxHistory, Quantization, Quantizer, ScaleCompute
from fp8kit.recipe_fields import Format as Format
from fp8kit.recipe_fields import FormatLimits as FormatLimits
from fp8kit.recipe_fields import MMParams as MMParams
from fp8kit.recipe_fields import QParams as QParams
from fp8kit.recipe_fields import Strict, recipe_class

if TYPE_CHECKING:
    from fp8kit.block_recipes import MXFP8BlockScaling as MXFP8BlockScaling
    from fp8kit.block_recipes import NVFP4BlockScaling as NVFP4BlockScaling
    from fp8kit.layer_recipes import CustomRecipe as CustomRecipe
    from fp8kit.layer_recipes import DataRecipe as DataRecipe
    from fp8kit.layer_recipes import PerLayer as PerLayer
    from fp8kit.layer_recipes import QuantizerRole as QuantizerRole

_OVERRIDES = ("high_precision", "dequantized")


class Recipe(Strict):
    """Base of the recipes. The predicates are class methods, as in Transformer Engine:
    ``recipe.delayed()``. What a recipe does is said by ``quantization`` and ``history``."""

    fp8_format: Format
    fp8_gemm_fprop: MMParams
    fp8_gemm_dgrad: MMParams
    fp8_gemm_wgrad: MMParams
    backward_override: str | None
    # whether layers have recipes of their own (``for_layer``)
    by_layer: ClassVar[bool] = False

    def for_layer(self, kind: str, name: str) -> Recipe | None:
        """The recipe of a layer: of class ``kind``, "Linear" or "LayerNormMLP", say, and called ``name``, ""
        where it has no name; None for high precision. The same object for the same layer."""
        return self

    @property
    def quantization(self) -> Quantization:
        """How the operands of a layer's GEMMs become FP8. The same object for equal recipes: layers know by
        it what they have made for it."""
        raise NotImplementedError

    @property
    def attention(self) -> AttentionQuantization | None:
        """How the products of attention are quantised; None where they are in high precision."""
        return None

    def attention_for(self, name: str) -> AttentionQuantization | None:
        """``attention`` of a layer that is called ``name``."""
        return self.attention

    @property
    def history(self) -> AmaxHistory | None:
        """How scales follow from the amaxes of earlier steps; None where no operand's scale does."""
        return None

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field, as Transformer Engine's programs do: checked as when the recipe is made, and it counts
        from the next ``autocast`` on. RecipeError, and nothing is changed, for what is wrong."""
        cls = type(self).__name__
        known = [field.name for field in fields(self) if field.init]  # type: ignore[arg-type]
        if name not in known:
            wanted = f"one of {', '.join(known)}{meant(name, known)}"
            raise RecipeError(cls, "field", repr(name), wanted)
        if self.__dict__.get("fixed") is self:
            wanted = "the recipe that was given to autocast, which holds this copy"
            raise RecipeError(cls, name, "a recipe in force", wanted)
        made = replace(self, **{name: value})  # type: ignore[type-var]
        self.__dict__.clear()  # with what was derived from the fields
        self.__dict__.update(made.__dict__)

    @cached_property
    def fixed(self) -> Recipe:
        """The recipe as it is now, in an object whose fields cannot be set: what is kept of it. The same one
        until a field is set."""
        made = copy.copy(self)
        made.__dict__["fixed"] = made
        return made

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4 block scaling."""
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8 block scaling."""
        return False

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from the amax history of earlier steps."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether scales come from the tensor that is being quantised."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether a tensor has one scale."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether each block of 128 elements has its own float32 scale."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether quantisers are the user's own."""
        return False

    @property
    def forward_format(self) -> formats.Format:
        """Format of inputs and weights."""
        return self.fp8_format.forward

    @property
    def backward_format(self) -> formats.Format:
        """Format of output gradients."""
        return self.fp8_format.backward

    def short_name(self) -> str:
        """A printable name that fits into a log line."""
        raise NotImplementedError

    def _quantization(self, x: Quantizer, w: Quantizer, g: Quantizer) -> Quantization:
        """The operands, with the accumulation that the recipe's fields say."""
        gemms = (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)
        return self._overridden(Quantization.of(x, w, g, *(gemm.how for gemm in gemms)))

    def _overridden(self, made: Quantization) -> Quantization:
        """The GEMMs, with those of backward as ``backward_override`` says."""
        how = self.backward_override or "quantized"
        return Quantization(made.fprop, replace(made.dgrad, compute=how), replace(made.wgrad, compute=how))

    def _want_override(self) -> None:
        own = self.backward_override
        if not (own is None or (isinstance(own, str) and own in _OVERRIDES)):
            raise self._refuse("backward_override", "None, 'high_precision' or 'dequantized'")

    def _more(self) -> str:
        """What ``short_name`` says of attention and of ``backward_override``."""
        return words_of(self) + (f", backward {self.backward_override}" if self.backward_override else "")

    def _check_common(self, no_attention: str = "") -> None:
        self._want(Format, "fp8_format")
        if self.fp8_format is Format.E5M2:
            raise self._refuse(
                "fp8_format", "Format.HYBRID or Format.E4M3: the forward pass needs E4M3's precision"
            )
        if self.fp8_format is Format.E2M1:
            raise self._refuse("fp8_format", "Format.HYBRID or Format.E4M3: E2M1 has 4 bits")
        check_fields(self, no_attention)
        self._want_override()


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
    * ``fp8_format``: Format.HYBRID or Format.E4M3.
    * ``amax_history_len``: int >= 1, steps.
    * ``amax_compute_algo``: "max", "most_recent", or a callable ``amax_history -> amax`` on NumPy float32
      ``(H, n) -> (n,)``.
    * ``scaling_factor_compute_algo``: None for the rule above, or a callable ``(amax, scale, fp8_max, recipe)
      -> scale`` on NumPy float32 ``(n,)``. Positive answers are brought into [2^-126, FLT_MAX], as by the
      rule above. One that is not positive, or NaN, leaves the old scale where amax is 0, Inf or NaN;
      elsewhere it is a RecipeError, and nothing is updated. Callables run on the host and cost a
      synchronisation per update.
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
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, QParams(power_2_scale=power_2))
            self._want(QParams, name)
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
    * ``fp8_format``: Format.HYBRID or Format.E4M3.
    * ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight``, ``fp8_quant_bwd_grad``: QParams of input, weight and
      output gradient; None becomes ``QParams(power_2_scale=use_power_2_scales)``.
    * ``fp8_gemm_fprop``, ``fp8_gemm_dgrad``, ``fp8_gemm_wgrad``: MMParams of the three GEMMs.
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
    * ``fp8_format``: Format.E4M3, or Format.HYBRID for E5M2 output gradients.
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


# what is in other files
_ELSEWHERE = {
    "MXFP8BlockScaling": "block_recipes",
    "NVFP4BlockScaling": "block_recipes",
    "CustomRecipe": "layer_recipes",
    "DataRecipe": "layer_recipes",
    "PerLayer": "layer_recipes",
    "QuantizerRole": "layer_recipes",
}


def __getattr__(name: str) -> Any:
    """What other files hold. AttributeError that says which recipes there are."""
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"fp8kit.{_ELSEWHERE[name]}"), name)
    kinds = [kind.__name__ for kind in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)]
    kinds += [each for each in _ELSEWHERE if each != "QuantizerRole"]
    known = [*(each for each in globals() if not each.startswith("_")), *_ELSEWHERE]
    raise AttributeError(
        f"module {__name__!r} has no {name!r}; the recipes are {', '.join(kinds)}{meant(name, known)}",
        name=name,
    )
