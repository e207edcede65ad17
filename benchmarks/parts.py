"""The parts of ``python -m benchmarks``: those of ``fp8kit bench`` with the peers beside, and what only a
checkout has."""

from __future__ import annotations

from functools import partial

from benchmarks import (
    arithmetic,
    attention,
    error,
    inspector,
    model,
    moe,
    named,
    own_gemms,
    ranks,
    shapes,
    soak,
    torch_cases,
    torch_kernels,
    train,
)
from fp8kit.bench.breakeven import breakeven_part
from fp8kit.bench.gemms import gemm_part
from fp8kit.bench.kernels import kernels_part
from fp8kit.bench.layers import Field, host_part, layer_part, modules_part
from fp8kit.bench.memory import memory_part
from fp8kit.bench.report import Part, Row, Setting
from fp8kit.bench.start import start_part

_FIELD = Field(torch_cases.contenders, torch_cases.reference, torch_cases.TorchPeak)


def jax_part(setting: Setting) -> list[Row]:
    """Imported when it runs: JAX takes the GPU's memory as its environment says."""
    from benchmarks import jax_cases

    return jax_cases.jax_part(setting)


PARTS = (
    Part(
        "layer",
        "a TransformerLayer at four sizes, all frontends and peers; the skeleton of the same run",
        partial(layer_part, field=_FIELD),
        takes="3 min",
    ),
    Part("kernels", "each memory-bound kernel beside a copy of the same bytes", kernels_part, takes="50 s"),
    Part("host", "the host's time on a tiny Linear", partial(host_part, field=_FIELD), takes="6 s"),
    Part("start", "the first step of a fresh process, kernel cache empty and warm", start_part, takes="20 s"),
    Part(
        "gemm",
        "the layer's FP8 products beside cuBLASLt's best algorithms and torch's",
        partial(gemm_part, peers=torch_kernels.products),
        takes="12 s",
    ),
    Part(
        "own",
        "our FP8 product for Hopper beside cuBLASLt's, scales per tensor and of blocks",
        own_gemms.own_part,
        usual=False,
        takes="2 min",
    ),
    Part(
        "attention",
        "causal attention alone: ours, cuDNN, torch's flash and FlexAttention over lengths and heads",
        attention.attention_part,
        takes="3 min, most of it torch.compile's",
    ),
    Part("modules", "LayerNormMLP and Linear", partial(modules_part, field=_FIELD), takes="30 s"),
    Part("memory", "where the tensors go that are kept for backward", memory_part, takes="2 s"),
    Part("jax", "the layer inside jax.jit", jax_part, takes="45 s"),
    Part(
        "breakeven",
        "from which size on FP8 pays, eager and as a graph",
        partial(breakeven_part, contenders=torch_cases.breakeven),
        takes="150 s",
    ),
    Part("error", "a Linear's error against float64, for each recipe", error.error_part, takes="10 s"),
    Part(
        "arithmetic",
        "cuBLASLt's products beside the model of Hopper's tensor cores, bit for bit, and the model's time",
        arithmetic.arithmetic_part,
        usual=False,
        takes="50 s",
    ),
    Part(
        "recipes",
        "a layer under every published recipe beside bfloat16",
        named.recipes_part,
        usual=False,
        takes="40 s",
    ),
    Part(
        "inspect",
        "what the inspector costs a step, by how often it looks",
        inspector.inspect_part,
        takes="12 s",
    ),
    Part(
        "shapes",
        "a layer over batches of ever other lengths: first and later visits",
        shapes.shapes_part,
        takes="80 s",
    ),
    Part(
        "moe",
        "grouped products and experts beside products one after another and torch's _grouped_mm",
        moe.moe_part,
        usual=False,
        takes="2 min",
    ),
    Part(
        "model",
        "a Hugging Face Llama, plain and converted, eager and compiled: whole training steps",
        model.model_part,
        usual=False,
        takes="6 min, most of it torch.compile's",
    ),
    Part(
        "ranks",
        "two GPUs: a layer by tensor parallelism, a model by FSDP2 and DDP, beside torch's own",
        ranks.ranks_part,
        usual=False,
        takes="2 min on two H100",
    ),
    Part(
        "soak",
        "2,000 steps over 1,000 lengths: memory stays, and no plan is made again",
        soak.soak_part,
        usual=False,
        takes="1 min",
    ),
    Part(
        "train",
        "training in bfloat16 and FP8 from several seeds",
        train.train_part,
        usual=False,
        takes="some minutes",
    ),
)
