"""Every published recipe by name: ``NAMED``, of ``fp8kit recipes list``. Its class, or its entry here, says
where it is published. An entry without a class of its own is data."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fp8kit.arguments import integer, shown
from fp8kit.attention_quantization import attention_of
from fp8kit.errors import ArgumentError, RecipeError, meant
from fp8kit.formats import E2M1, E2M3, E3M2, E4M3, E4M3_240, E5M2
from fp8kit.layer_recipes import DataRecipe
from fp8kit.quantization import AmaxHistory, Gemm, Quantization, Quantizer
from fp8kit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)


class Named(NamedTuple):
    """A recipe, and where it is published."""

    recipe: Recipe
    source: str


_TORCHAO = "torchao 0.18, float8/config.py"
_TINY = QParams(amax_epsilon=1e-12)
# scales rounded down to powers of two, of amaxes of at least 1e-12
_ROW = Quantizer(E4M3, "row", scale_rule="power_2", epsilon=1e-12)
_MX4 = Quantizer(E2M1, "mx_1x32", scale_rule="floor")
_LINE = Quantizer(E4M3, "block_1x128", epsilon=1e-4)
_NV4 = Quantizer(E2M1, "nvfp4_1x16")
_NV4_TO_SIX = replace(_NV4, scale_rule="4over6_mse")
_MOSS = Quantizer(E4M3, "moss_1x32", scale_rule="rceil")
# Quartet: forward by the deviation, with the gradients of what was clipped left out; backward stochastically,
# with room for the largest value
_QUARTET_FORWARD = replace(_MX4, scale_rule="gauss", ties="down", hadamard=32, clip_gradient=True)
_QUARTET_BACKWARD = replace(_MX4, stochastic_bits=32, hadamard=32, signs="random", factor=0.75)
_EDEN = replace(_NV4, scale_rule="eden", hadamard=128, signs="random", factor=16 / 17 / 0.93)
_EARLIER = Quantizer(E4M3, scale_source="delayed")
_EARLIER_GRADIENT = replace(_EARLIER, format=E5M2)
_NARROW = replace(_EARLIER, format=E4M3_240)
_WINDOW = 1024  # amaxes, of all ranks, by which Fishman's scales change
_STATIC = Quantizer(E4M3, scale_source="static")
_FLASH = replace(attention_of(Quantizer(E4M3), Quantizer(E5M2)), rows_per_block=128, rotation=128, signs="te")


def _of(name: str, quantizer: Quantizer) -> DataRecipe:
    """All operands cast alike."""
    return DataRecipe(Quantization.of(quantizer, quantizer, quantizer, "split"), name)


def moss(learning_rate: float, interval: int = 500) -> DataRecipe:
    """MOSS (arXiv 2511.05811) with the weight's scale predicted: its amax counts for ``interval`` steps, in
    each of which Adam moves no weight by more than ``learning_rate``, the largest of the training.
    RecipeError for values out of their range."""
    weight = Quantizer(E4M3, scale_source="delayed")
    data = Quantization.of(_MOSS, weight, replace(_MOSS, format=E5M2), fprop="split")
    rule = AmaxHistory(E4M3.max, E5M2.max, interval, growth=learning_rate)
    return DataRecipe(data, "moss_predicted", history=rule)


def fishman(ranks: int = 1) -> DataRecipe:
    """Fishman et al. (arXiv 2409.12517), with a window of 1024 / ``ranks`` steps: the amaxes of so many
    data-parallel ranks, at most 1024, fill it together. RecipeError for values out of their range."""
    integer("fishman", "ranks", ranks, 1, _WINDOW, RecipeError)
    gradient = Gemm(replace(_EARLIER_GRADIENT, stochastic_bits=32), _EARLIER_GRADIENT)
    data = Quantization(Gemm(_NARROW, _NARROW, "fast"), gradient, gradient)
    rule = AmaxHistory(E4M3_240.max, E5M2.max, _WINDOW // ranks, power_2=True, by_window=True)
    return DataRecipe(data, "fishman", history=rule)


NAMED: dict[str, Named] = {
    "delayed": Named(DelayedScaling(), "Micikevicius et al. 2022, arXiv 2209.05433; Transformer Engine"),
    "current": Named(Float8CurrentScaling(), "Transformer Engine, per-tensor current scaling"),
    "current_hopper": Named(
        Float8CurrentScaling(
            fp8_gemm_fprop=MMParams(accumulation="hopper_fast"),
            fp8_gemm_dgrad=MMParams(accumulation="hopper_split"),
            fp8_gemm_wgrad=MMParams(accumulation="hopper_split"),
        ),
        "as current, with the sums of Hopper's tensor cores on every device",
    ),
    "current_dpa": Named(
        Float8CurrentScaling(fp8_dpa=True),
        "as current, attention's products too: Transformer Engine, fp8_dpa",
    ),
    "current_mha": Named(
        Float8CurrentScaling(fp8_dpa=True, fp8_mha=True),
        "as current_dpa, what attention takes and gives too: Transformer Engine, fp8_mha",
    ),
    "flash_attention_3": Named(
        DataRecipe(Float8CurrentScaling().quantization, "flash_attention_3", _FLASH),
        "as current_dpa, scales for 128 rows, q and k rotated, by fixed signs: arXiv 2407.08608, 3.3",
    ),
    "tensorwise": Named(
        Float8CurrentScaling(fp8_quant_fwd_inp=_TINY, fp8_quant_fwd_weight=_TINY, fp8_quant_bwd_grad=_TINY),
        _TORCHAO,
    ),
    "rowwise": Named(DataRecipe(Quantization.of(_ROW, _ROW, _ROW), "rowwise"), _TORCHAO),
    "rowwise_with_gw_hp": Named(
        DataRecipe(
            Quantization(
                Gemm(_ROW, _ROW, "fast"),
                Gemm(_ROW, replace(_ROW, granularity="tensor")),
                Gemm(_ROW, _ROW, compute="high_precision"),
            ),
            "rowwise_with_gw_hp",
        ),
        _TORCHAO,
    ),
    "deepseek_v3": Named(
        DataRecipe(
            Quantization.of(_LINE, replace(_LINE, granularity="block_128x128"), _LINE, "split"), "deepseek_v3"
        ),
        "DeepSeek-V3 technical report, arXiv 2412.19437, 3.3.2; DeepGEMM, utils/math.py, where scale_inv is "
        "amax / 448: here 1 / (448 / amax), whose last bit may be another",
    ),
    "block": Named(Float8BlockScaling(), "Transformer Engine, block scaling; DeepSeek-V3, 3.3.2"),
    "fog": Named(
        DelayedScaling(fp8_dpa=True),
        "FOG, arXiv 2505.20524: every product in FP8, attention's too, of layers without outliers",
    ),
    "static": Named(
        DataRecipe(Quantization.of(_STATIC, _STATIC, replace(_STATIC, format=E5M2)), "static"),
        "muS, arXiv 2502.05967; u-muP, arXiv 2407.17465: casts that clip, no amax anywhere",
    ),
    "fp8_lm": Named(
        DataRecipe(
            Quantization.of(_EARLIER, _EARLIER, _EARLIER_GRADIENT),
            "fp8_lm",
            history=AmaxHistory(E4M3.max, E5M2.max, 16, power_2=True),
        ),
        "FP8-LM, arXiv 2310.18313; MS-AMP, nn/linear.py: scales 2^floor(log2(max / amax)) of 16 steps' "
        "largest; MS-AMP takes the weight's own amax, and in the first 16 steps each tensor's",
    ),
    "fishman": Named(
        fishman(),
        "Fishman et al. 2024, Scaling FP8 training to trillion-token LLMs, arXiv 2409.12517, and its "
        "experimental/fp8_linear.py: E4M3 up to 240 forward, all of E5M2 backward, gradients stochastically; "
        "scales in powers of two, once in 1024 steps by these steps' largest amax, here in the first 1024 "
        "after every step: fp8kit.recipes.fishman(ranks) for more ranks, whose windows are shorter",
    ),
    "mxfp8": Named(MXFP8BlockScaling(), "OCP Microscaling Formats 1.0; Transformer Engine"),
    "mxfp8_hybrid": Named(MXFP8BlockScaling(fp8_format=Format.HYBRID), "as mxfp8, gradients in E5M2"),
    "mxfp8_2d": Named(MXFP8BlockScaling(enable_2d_quantization=True), "as mxfp8, weights by 32 x 32"),
    "mxfp8_blackwell": Named(
        DataRecipe(MXFP8BlockScaling().quantization.summed("blackwell_mx"), "mxfp8_blackwell"),
        "as mxfp8, with the sums of Blackwell's tensor cores on every device, as MMA-Sim has them: arXiv "
        "2511.10909",
    ),
    "mxfp6_e3m2": Named(_of("mxfp6_e3m2", replace(_MX4, format=E3M2)), "OCP Microscaling Formats 1.0, 5.2"),
    "mxfp6_e2m3": Named(_of("mxfp6_e2m3", replace(_MX4, format=E2M3)), "OCP Microscaling Formats 1.0, 5.2"),
    "mxfp4": Named(_of("mxfp4", _MX4), "OCP Microscaling Formats 1.0, 5.2"),
    "mxfp4_h32_sr": Named(
        DataRecipe(
            Quantization(
                Gemm(replace(_MX4, hadamard=32), replace(_MX4, hadamard=32)),
                Gemm(
                    replace(_MX4, hadamard=32, signs="random", stochastic_bits=32),
                    replace(_MX4, hadamard=32, signs="random"),
                ),
                Gemm(
                    replace(_MX4, hadamard=32, signs="random", stochastic_bits=32),
                    replace(_MX4, hadamard=32, signs="random"),
                ),
            ),
            "mxfp4_h32_sr",
        ),
        "after Quartet, arXiv 2505.14669: rotations of 32, gradients rounded stochastically; without its "
        "clipping and its masks",
    ),
    "nvfp4": Named(NVFP4BlockScaling(), "NVIDIA 2025, arXiv 2509.25149; Transformer Engine"),
    "nvfp4_blackwell": Named(
        DataRecipe(NVFP4BlockScaling().quantization.summed("blackwell_fp4"), "nvfp4_blackwell"),
        "as nvfp4, with the sums of Blackwell's tensor cores on every device, as MMA-Sim has them",
    ),
    "nvfp4_rows": Named(
        NVFP4BlockScaling(row_scaled_activation=True), "Transformer Engine: the input's first scale by rows"
    ),
    "nvfp4_4over6": Named(
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
        "Cook et al. 2025, Four Over Six, arXiv 2512.02010; Transformer Engine",
    ),
    "fp4_all_the_way": Named(
        DataRecipe(
            Quantization(
                Gemm(_NV4, _NV4),
                Gemm(replace(_NV4, stochastic_bits=32), _NV4),
                Gemm(replace(_NV4, stochastic_bits=32), replace(_NV4, stochastic_bits=32)),
            ),
            "fp4_all_the_way",
        ),
        "FP4 All the Way, arXiv 2505.19115: to nearest forward, stochastically what backward and update cast "
        "anew; without its change to higher precision at the end",
    ),
    "quartet": Named(
        DataRecipe(
            Quantization(
                Gemm(_QUARTET_FORWARD, _QUARTET_FORWARD),
                Gemm(_QUARTET_BACKWARD, _QUARTET_BACKWARD, recast=True),
                Gemm(_QUARTET_BACKWARD, _QUARTET_BACKWARD, recast=True),
            ),
            "quartet",
        ),
        "Quartet, arXiv 2505.14669, algorithm 1, and its code: backward casts what forward multiplied anew",
    ),
    "quartet_2": Named(
        DataRecipe(
            Quantization(
                Gemm(_NV4_TO_SIX, _NV4_TO_SIX),
                Gemm(_EDEN, _EDEN, recast=True),
                Gemm(_EDEN, _EDEN, recast=True),
            ),
            "quartet_2",
        ),
        "Quartet II, arXiv 2601.22813, and its code: four over six forward, MS-EDEN backward, of 128 rotated "
        "values; amaxes here of the tensor itself, there also of the step before",
    ),
    "moss": Named(
        DataRecipe(
            Quantization.of(_MOSS, Quantizer(E4M3), replace(_MOSS, format=E5M2), fprop="split"), "moss"
        ),
        "MOSS, arXiv 2511.05811: activations and gradients in two levels; the weight's scale of its own amax",
    ),
    "moss_predicted": Named(
        moss(learning_rate=1e-2),
        "as moss, the weight's scale predicted for 500 steps from the learning rate, at most 1e-2 here: "
        "fp8kit.recipes.moss(learning_rate) for others",
    ),
    "nvfp4_fwd_mxfp8_bwd": Named(
        DataRecipe(
            Quantization(
                NVFP4BlockScaling().quantization.fprop,
                MXFP8BlockScaling().quantization.dgrad,
                MXFP8BlockScaling().quantization.wgrad,
            ),
            "nvfp4_fwd_mxfp8_bwd",
        ),
        "asked for by users of Transformer Engine, which had it once",
    ),
}


# Transformer Engine's names of recipes that have another one here
TE_RECIPES = {
    "fp8_delayed_scaling": "delayed",
    "fp8_current_scaling": "current",
    "fp8_block_scaling": "block",
}


_OWN = ", or that fp8kit.recipes.add has added (--from FILE.py)"


def entry(name: str, operation: str = "named") -> Named:
    """Returns a recipe and its source by its name in ``NAMED``. ArgumentError of the ``operation``, with the
    nearest names, for another one."""
    if not isinstance(name, str) or name not in NAMED:
        wanted = f"a name that `fp8kit recipes list` prints{meant(name, NAMED, 3) or _OWN}"
        raise ArgumentError(operation, "name", shown(name), wanted)
    return NAMED[name]


def named(name: str) -> Recipe:
    """Returns a recipe by its name in ``NAMED``. ArgumentError, with the nearest names, for another one."""
    return entry(name).recipe


def add(name: str, recipe: Recipe, source: str = "of one's own") -> None:
    """Give a recipe of one's own a name in ``NAMED``, until the process ends: ``named``, statistics of casts
    (``mine_sqnr``), comparisons and reports know it then, and ``fp8kit.cli.main``.

    ``name``: ASCII letters, digits and underscores. ``source``: what ``fp8kit recipes list`` says of it.
    ArgumentError for a name that is not a word or that another recipe has, and for a recipe that asks a
    function or differs by layer: a ``DataRecipe`` may have what such a one says for a layer, its
    ``quantization``.
    """
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
        raise ArgumentError("add", "name", shown(name), "letters, digits and underscores, no digit first")
    if not isinstance(recipe, Recipe) or recipe.by_layer:
        wanted = "a recipe that is the same for all layers"
        if isinstance(recipe, Recipe):
            wanted += f": of one by layers fk.recipe.DataRecipe(recipe.quantization, {name!r})"
        raise ArgumentError("add", "recipe", shown(recipe), wanted)
    if not isinstance(source, str):
        raise ArgumentError("add", "source", shown(source), "a text")
    if name in TE_RECIPES or NAMED.get(name, (recipe,))[0] != recipe:
        raise ArgumentError("add", "name", repr(name), "a name that no other recipe has")
    NAMED.setdefault(name, Named(recipe, source))
