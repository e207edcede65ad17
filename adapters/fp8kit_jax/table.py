"""Which operations the door knows, and the types that their specs are made of."""

from __future__ import annotations

from fp8kit.ops.attention import AttentionSpec, attention
from fp8kit.ops.cross_entropy import CrossEntropySpec, cross_entropy
from fp8kit.ops.dropout_add import AddSpec, DropoutAddSpec, add, dropout_add
from fp8kit.ops.embedding import EmbeddingSpec, embedding
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.norm import NormSpec, norm
from fp8kit.ops.norm_linear import NormLinearSpec, norm_linear
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.quant import Fp8, Quant
from fp8kit.ops.rope import RopeSpec, rope
from fp8kit_jax import operations as own
from fp8kit_jax.program import register_operation

for _operation, _specs in (
    (linear, (LinearSpec, ProductSpec, Fp8, Quant)),
    (norm, (NormSpec,)),
    (norm_linear, (NormLinearSpec,)),
    (norm_mlp, (NormMLPSpec,)),
    (attention, (AttentionSpec,)),
    (rope, (RopeSpec,)),
    (dropout_add, (DropoutAddSpec,)),
    (add, (AddSpec,)),
    (embedding, (EmbeddingSpec,)),
    (cross_entropy, (CrossEntropySpec,)),
    (own.activation, (own.ActivationSpec,)),
    (own.quantize, (own.QuantizeSpec,)),
    (own.dequantize, (own.DequantizeSpec,)),
    (own.fp8_gemm, (own.Fp8GemmSpec,)),
):
    register_operation(_operation, *_specs)
