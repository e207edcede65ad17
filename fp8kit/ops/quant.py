"""How an operation quantises its operands: the part of a recipe that the arithmetic needs, as values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol import BLOCK, Cast, Rule
from fp8kit.errors import FormatError, RecipeError
from fp8kit.formats import Format

if TYPE_CHECKING:
    from fp8kit.recipe import Recipe

ALIGN = 16  # FP8 products take dimensions that are multiples of 16 (cuBLASLt, "FP8 data types")


def pad(n: int) -> int:
    """The next multiple of 16."""
    return -(-n // ALIGN) * ALIGN


@dataclass(frozen=True)
class Quant:
    """Scaling of one operand.

    ``source`` says where the scale comes from. A scale for the whole tensor: "scale", it is an input and the
    amax is an output (delayed scaling); "current", the amax is taken now; "amax", the amax is an input,
    reduced over devices by the door. A scale for each block, from the block: "block", with ``tile`` (1, 128)
    or (128, 128), see ``block_quantize``. ``power_2`` and ``epsilon`` belong to the rule of current scaling
    (``scale_from_amax``). FormatError for a source that is none of these or does not fit the tile.
    """

    format: Format
    source: str = "scale"
    power_2: bool = False
    epsilon: float = 0.0
    tile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.source not in ("scale", "current", "amax", "block"):
            raise FormatError("Quant", "source", repr(self.source), '"scale", "current", "amax" or "block"')
        tiles = ((1, BLOCK), (BLOCK, BLOCK)) if self.source == "block" else (None,)
        if self.tile not in tiles:
            raise FormatError(
                "Quant", "tile", self.tile, f"{' or '.join(map(str, tiles))} for source {self.source!r}"
            )

    @property
    def rule(self) -> Rule | None:
        """What makes the tensor's scale of its amax; None where the scale is given, or each block has its
        own."""
        return Rule(self.power_2, self.epsilon) if self.source in ("current", "amax") else None


@dataclass(frozen=True)
class Fp8:
    """The three operands of a layer's products and the accumulation of each product (True: fast, False: split
    accumulator).

    FormatError where some operands are scaled by blocks and some not, or two by squares, which no product
    takes.
    """

    x: Quant
    w: Quant
    g: Quant
    fprop_fast: bool = True
    dgrad_fast: bool = False
    wgrad_fast: bool = False

    def __post_init__(self) -> None:
        tiles = [quant.tile for quant in (self.x, self.w, self.g)]
        if (None in tiles and set(tiles) != {None}) or tiles.count((BLOCK, BLOCK)) > 1:
            raise FormatError(
                "Fp8", "tiles of x, w, g", tiles, "none, or blocks for all and (128, 128) for at most one"
            )
        if self.blocks and (self.fprop_fast or self.dgrad_fast or self.wgrad_fast):
            raise FormatError(
                "Fp8", "accumulation", "fast", "the split accumulator for operands scaled by blocks"
            )

    @property
    def blocks(self) -> bool:
        """Whether the operands are scaled by blocks."""
        return self.x.tile is not None


@lru_cache(maxsize=256)
def fp8_from_recipe(recipe: Recipe) -> Fp8:
    """What a recipe means for a layer's products; RecipeError for a recipe that no operation knows. Equal
    recipes give one object."""
    forward, backward = recipe.fp8_format.forward, recipe.fp8_format.backward
    if recipe.delayed():
        return Fp8(Quant(forward), Quant(forward), Quant(backward))
    given: Any = recipe
    if recipe.float8_current_scaling():

        def operand(fmt: Format, params: Any) -> Quant:
            return Quant(fmt, "current", params.power_2_scale, params.amax_epsilon)

        return Fp8(
            operand(forward, given.fp8_quant_fwd_inp),
            operand(forward, given.fp8_quant_fwd_weight),
            operand(backward, given.fp8_quant_bwd_grad),
            not given.fp8_gemm_fprop.use_split_accumulator,
            not given.fp8_gemm_dgrad.use_split_accumulator,
            not given.fp8_gemm_wgrad.use_split_accumulator,
        )
    if recipe.float8_block_scaling():

        def block(fmt: Format, params: Any, dim: int) -> Quant:
            return Quant(
                fmt, "block", params.power_2_scale, params.amax_epsilon, (1 if dim == 1 else BLOCK, BLOCK)
            )

        return Fp8(
            block(forward, given.fp8_quant_fwd_inp, given.x_block_scaling_dim),
            block(forward, given.fp8_quant_fwd_weight, given.w_block_scaling_dim),
            block(backward, given.fp8_quant_bwd_grad, given.grad_block_scaling_dim),
            fprop_fast=False,
        )
    raise RecipeError(
        "autocast",
        "recipe",
        type(recipe).__name__,
        "DelayedScaling, Float8CurrentScaling or Float8BlockScaling",
    )


def quantize_operand(
    k: Any,
    quant: Quant,
    x: ArrayView,
    q: ArrayView | None,
    q_t: ArrayView | None,
    scale: ArrayView | None,
    scale_inv: ArrayView,
    amax: ArrayView | None,
    dbias: ArrayView | None,
    workspace: ArrayView | None,
    stream: int,
    amax_known: bool = False,
) -> None:
    """Cast ``x``, h (M, N), to both orientations by the operand's rule, with one scale for the tensor.

    ``scale``: float32 [1], the given scale; None where there is a rule. ``amax``: float32 [1], zeroed or a
    running maximum: the amax output, or for "amax" the given one. ``amax_known``: a fused kernel has put the
    amax there already.
    """
    if quant.source == "current" and not amax_known:
        k.amax(x, amax, x.shape, stream)
    k.quantize_transpose(
        x, Cast(quant.format, q, q_t, scale, scale_inv, amax, quant.rule), dbias, workspace, stream
    )
