"""The parts of ``fp8kit bench``, by name."""

from __future__ import annotations

from fp8kit.bench.breakeven import breakeven_part
from fp8kit.bench.casts import casts_part, training_part
from fp8kit.bench.gemms import gemm_part
from fp8kit.bench.kernels import kernels_part
from fp8kit.bench.layers import host_part, layer_part, modules_part, steps_part
from fp8kit.bench.memory import memory_part
from fp8kit.bench.report import Part
from fp8kit.bench.skeleton import attention_part
from fp8kit.bench.start import start_part

NATIVE = (
    Part("casts", "casts on the CPU beside ml_dtypes'", casts_part),
    Part("training", "a training step of the demo's model on the CPU", training_part),
    Part(
        "layer",
        "a TransformerLayer, forward and backward, at four sizes; the skeleton of the same run",
        layer_part,
    ),
    Part("steps", "a TransformerLayer's training step with AdamW", steps_part),
    Part("modules", "LayerNormMLP and Linear, forward and backward", modules_part),
    Part("attention", "causal attention alone", attention_part),
    Part("kernels", "each memory-bound kernel beside a copy of the same bytes", kernels_part),
    Part("gemm", "the layer's FP8 products beside cuBLASLt's best algorithms", gemm_part),
    Part("host", "the host's time on a tiny Linear", host_part),
    Part("start", "the first step of a fresh process, kernel cache empty and warm", start_part),
    Part("memory", "where the tensors go that are kept for backward", memory_part),
    Part("breakeven", "from which size on FP8 pays", breakeven_part),
)
