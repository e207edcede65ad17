"""Every published recipe by name: ``NAMED`` of ``fp8kit recipes list``. Its class, or its entry here, says
where it is published."""

from __future__ import annotations

from typing import NamedTuple

from fp8kit.block_recipes import MXFP8BlockScaling, NVFP4BlockScaling
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, Recipe


class Named(NamedTuple):
    """A recipe, and where it is published."""

    recipe: Recipe
    source: str


NAMED: dict[str, Named] = {
    "delayed": Named(DelayedScaling(), "Micikevicius et al. 2022, arXiv 2209.05433; Transformer Engine"),
    "current": Named(Float8CurrentScaling(), "Transformer Engine, per-tensor current scaling"),
    "deepseek_v3": Named(
        Float8BlockScaling(use_f32_scales=True), "DeepSeek-V3 technical report, arXiv 2412.19437, 3.3.2"
    ),
    "block": Named(Float8BlockScaling(), "Transformer Engine, block scaling; DeepSeek-V3, 3.3.2"),
    "mxfp8": Named(MXFP8BlockScaling(), "OCP Microscaling Formats 1.0; Transformer Engine"),
    "mxfp8_hybrid": Named(MXFP8BlockScaling(fp8_format=Format.HYBRID), "as mxfp8, gradients in E5M2"),
    "mxfp8_2d": Named(MXFP8BlockScaling(enable_2d_quantization=True), "as mxfp8, weights by 32 x 32"),
    "nvfp4": Named(NVFP4BlockScaling(), "NVIDIA 2025, arXiv 2509.25149; Transformer Engine"),
}
