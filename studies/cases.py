"""What is trained: the sizes and the cases, two tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp8kit.accumulation import Accumulation
from fp8kit.errors import ArgumentError, meant
from fp8kit.formats import E4M3, E5M2
from fp8kit.layer_recipes import DataRecipe, PerLayer
from fp8kit.models import arrangements
from fp8kit.models.arrangements import Arrangement
from fp8kit.models.presets import Preset
from fp8kit.quantization import Quantization, Quantizer
from fp8kit.recipe import Float8CurrentScaling, MMParams, NVFP4BlockScaling, Recipe
from fp8kit.recipes import named

SEEDS = 3
BASE = "bf16"

SIZES = {
    # about 1.5 s of a CPU a run: whether it runs
    "tiny": Preset("tiny", 2, 64, 2, 32, 2, 6, 2, 3e-3, validation_batches=2),
    # minutes of a CPU: a model that learns, for the stress and the accumulator
    "small": Preset("small", 2, 128, 4, 64, 8, 300, 30, 2e-3, validation_batches=8),
    # 86 M parameters, 8192 bytes a step
    "full": Preset("full", 12, 768, 12, 512, 16, 600, 60, 6e-4, validation_batches=16),
}


@dataclass(frozen=True)
class Case:
    """A training that is compared with another.

    * ``recipe``: from the number of layers to the recipe, None for high precision.
    * ``against``: the case whose losses are the yardstick. ``arrangement``: how the layers are made.
    * ``states``: of AdamW, a key of ``fp8kit.moments.PRESETS``.
    * ``main``: whether it is trained from every seed at once, or from one first.
    * ``cost``: time of a step, of the yardstick's, before it is measured.
    * ``study``: what it belongs to, a command. ``float32``: high precision is float32 on every device.
    * ``growth``: from a third of the steps on, one hidden channel of each block grows by this factor a step
      (``studies.stress``); 1: none does.
    """

    name: str
    about: str
    recipe: Callable[[int], Recipe | None]
    against: str = BASE
    arrangement: str = "gpt2"
    states: str = "fp32"
    main: bool = False
    cost: float = 1.0
    study: str = "convergence"
    float32: bool = False
    growth: float = 1.0


def _named(name: str) -> Callable[[int], Recipe]:
    return lambda layers: named(name)


def _nvfp4(**options: bool) -> Callable[[int], Recipe]:
    return lambda layers: NVFP4BlockScaling(**options)


def last_in_high_precision(recipe: Recipe, layers: int, share: float = 0.15) -> PerLayer:
    """``recipe`` but in the last blocks, at least a ``share`` of all, which are in high precision (NVIDIA
    2025, arXiv 2509.25149, section 4.1)."""
    count = math.ceil(share * layers)
    return PerLayer(recipe, tuple((f"layers.{i}.*", None) for i in range(layers - count, layers)))


def _current(split: bool) -> Callable[[int], Recipe]:
    """``current`` with one kind of the tensor cores' own sums in all three products."""
    return lambda layers: _summed(MMParams(use_split_accumulator=split))


def _summed(how: MMParams) -> Recipe:
    return Float8CurrentScaling(fp8_gemm_fprop=how, fp8_gemm_dgrad=how, fp8_gemm_wgrad=how)


def _static(x: float, w: float, g: float) -> Callable[[int], Recipe]:
    """Scales that never change, in powers of two."""
    kept = Quantizer(E4M3, scale_source="static")
    data = Quantization.of(
        replace(kept, static_scale=2.0**x),
        replace(kept, static_scale=2.0**w),
        replace(kept, format=E5M2, static_scale=2.0**g),
    )
    return lambda layers: DataRecipe(data, f"static 2^{x:g} 2^{w:g} 2^{g:g}")


def _none(layers: int) -> None:
    return None


_SWIGLU = "swiglu"
ARRANGEMENTS: dict[str, Arrangement] = {
    "gpt2": arrangements.arrangement("gpt2"),
    "smooth_swiglu": arrangements.arrangement("smooth_swiglu"),
}
_SMOOTH = ARRANGEMENTS["smooth_swiglu"]
ARRANGEMENTS["smooth_token"] = replace(
    _SMOOTH, name="smooth_token", layer={**_SMOOTH.layer, "smooth_swiglu": "token"}
)
ARRANGEMENTS[_SWIGLU] = replace(
    _SMOOTH, name=_SWIGLU, layer={k: v for k, v in _SMOOTH.layer.items() if k != "smooth_swiglu"}
)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(BASE, "high precision", _none, main=True),
        Case("delayed", "one scale a tensor, of earlier steps", _named("delayed"), main=True),
        Case("current", "one scale a tensor, of the tensor", _named("current"), main=True),
        Case("block", "a scale for 128 elements", _named("block"), main=True, cost=1.2),
        Case("mxfp8", "E4M3, a scale for 32 elements", _named("mxfp8"), main=True, cost=1.4),
        Case("mxfp6", "E3M2, a scale for 32 elements", _named("mxfp6_e3m2"), main=True, cost=1.4),
        Case("mxfp4", "E2M1, a scale for 32 elements", _named("mxfp4"), main=True, cost=1.4),
        Case("nvfp4", "rotation, stochastic rounding, 2D scales", _nvfp4(), main=True, cost=1.8),
        Case(
            "nvfp4_last",
            "nvfp4, the last 15 % of the blocks in bf16",
            lambda layers: last_in_high_precision(NVFP4BlockScaling(), layers),
            main=True,
            cost=1.7,
        ),
        Case("mxfp6_e2m3", "E2M3, a scale for 32 elements", _named("mxfp6_e2m3"), cost=1.4),
        Case("mxfp4_h32_sr", "mxfp4, rotated, gradients stochastic", _named("mxfp4_h32_sr"), cost=1.8),
        Case("nvfp4_no_rht", "nvfp4 without rotation", _nvfp4(disable_rht=True), cost=1.6),
        Case("nvfp4_no_sr", "nvfp4, to nearest", _nvfp4(disable_stochastic_rounding=True), cost=1.7),
        Case(
            "nvfp4_plain",
            "nvfp4 without either",
            _nvfp4(disable_rht=True, disable_stochastic_rounding=True),
            cost=1.5,
        ),
        Case("nvfp4_4over6", "nvfp4, the better of two scales", _named("nvfp4_4over6"), cost=1.7),
        Case("rowwise", "a scale for each row", _named("rowwise"), cost=1.1),
        Case("rowwise_with_gw_hp", "the same, dW in bf16", _named("rowwise_with_gw_hp"), cost=1.3),
        Case("static", "fixed scales: x 2^4, w 2^8, dy 2^20", _static(4, 8, 20)),
        Case("static_1", "casts without scales", _static(0, 0, 0)),
        Case("current_fast", "current, the chip's fast sums in all products", _current(False)),
        Case("current_split", "current, the chip's promoted sums in all products", _current(True)),
        Case("moments_ms_amp", "bf16; Adam's m E4M3, v float16", _none, states="ms_amp"),
        Case("moments_fishman", "bf16; m E4M3, v E5M2", _none, states="fishman"),
        Case("moments_coat", "bf16; both E4M3, expanded, by 128", _none, states="coat"),
        Case("moments_block_256", "bf16; both E4M3 by 256", _none, states="block_256"),
        Case("attention", "current, attention's products too", _named("current_dpa"), cost=3.0),
        Case("flash_attention_3", "the same by blocks, rotated", _named("flash_attention_3"), cost=3.5),
        Case("swiglu_bf16", "SwiGLU and RMSNorm, high precision", _none, against="", arrangement=_SWIGLU),
        Case("swiglu", "the same, delayed", _named("delayed"), "swiglu_bf16", _SWIGLU),
        Case(
            "smooth_swiglu",
            "the same, delayed, Smooth-SwiGLU",
            _named("delayed"),
            "swiglu_bf16",
            "smooth_swiglu",
            cost=1.2,
        ),
    )
}


def _stress(name: str, about: str, recipe: Callable[[int], Recipe | None], **more: Any) -> Case:
    """One of the stress study: SwiGLU with one hidden channel of each block that grows."""
    more = {"against": "stress_float32", "arrangement": _SWIGLU, **more}
    return Case(f"stress_{name}", about, recipe, study="stress", float32=True, growth=GROWTH, **more)


def _sums(name: str, about: str, sums: str | Accumulation, **more: Any) -> Case:
    """One of the accumulator study: ``current`` with the sums of all three products as said."""
    recipe = _summed(MMParams(accumulation=sums))
    more = {"against": "sums_float32", **more}
    return Case(f"sums_{name}", about, lambda layers: recipe, study="accumulator", float32=True, **more)


GROWTH = 1.03  # of the channel's weights a step: its activation grows by the square
# no less than float32: 30 bits below the largest of 32 products
FLOAT32_SUMS = Accumulation(30, 32)
for _case in (
    _stress("float32", "the channels grow, high precision", _none, against="", main=True),
    _stress("delayed", "delayed", _named("delayed")),
    _stress("current", "current", _named("current")),
    _stress("smooth_channel", "delayed, Smooth-SwiGLU by channel", _named("delayed"),
            arrangement="smooth_swiglu"),
    _stress("smooth_token", "delayed, Smooth-SwiGLU by token", _named("delayed"), arrangement="smooth_token"),
    _stress("block", "a scale for 128 elements", _named("block")),
    _stress("mxfp8", "a scale for 32 elements", _named("mxfp8")),
    _sums("float32", "current; no bit below float32's is lost", FLOAT32_SUMS, against="", main=True),
    _sums("hopper_split", "current, Hopper's promoted sums in all products", "hopper_split"),
    _sums("hopper_fast", "current, Hopper's fast sums in all products", "hopper_fast"),
):  # fmt: skip
    CASES[_case.name] = _case


def of_study(study: str) -> list[str]:
    """The names of a study's cases."""
    return [name for name, own in CASES.items() if own.study == study]


def case(name: str, study: str | None = None) -> Case:
    """The case of that name; ArgumentError that lists them where there is none, or none of the study."""
    known = list(CASES) if study is None else of_study(study)
    if name not in known:
        raise ArgumentError("studies", "--only", repr(name), f"one of {', '.join(known)}{meant(name, known)}")
    return CASES[name]


def size(name: str, steps: int | None = None) -> Preset:
    """The size of that name, for another number of steps where ``steps`` says so."""
    found = SIZES[name]
    return found if steps is None else found.with_steps(steps)
