"""Names and shapes of the parameters of MultiheadAttention and TransformerLayer, in every form."""

from __future__ import annotations

import pytest

from fp8kit import nn

H, HEADS = 32, 4


FIRST = {
    False: ["query_weight", "key_weight", "value_weight", "query_bias", "key_bias", "value_bias"],
    True: ["weight", "bias"],
}
NORM = ["layer_norm_weight", "layer_norm_bias"]
PROJ = ["proj.weight", "proj.bias"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("qk", [None, "L2Normalization", "RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_names_and_shapes_of_the_attentions_parameters(kind, qk, normed, fused):
    module = nn.MultiheadAttention(
        H,
        HEADS,
        num_gqa_groups=2,
        attention_type=kind,
        qk_norm_type=qk,
        input_layernorm=normed,
        fuse_qkv_params=fused,
        device="cpu",
    )
    found = {name: parameter.shape for name, parameter in module.named_parameters()}
    d, kv = H // HEADS, H // 2
    norms = {None: [], "L2Normalization": [], "RMSNorm": ["weight"], "LayerNorm": ["weight", "bias"]}[qk]
    want = {f"{side}_norm.{name}": (d,) for side in "qk" for name in norms}
    first = {
        ("self", True): "layernorm_qkv",
        ("self", False): "qkv",
        ("cross", True): "layernorm_query",
        ("cross", False): "query_layer",
    }
    child = first[kind, normed]
    want |= {f"{child}.{name}": (H,) for name in NORM if normed}
    sizes = {"query": H, "key": kv, "value": kv}
    projections = (
        {child: ("query", "key", "value")}
        if kind == "self"
        else {child: ("query",), "key_value": ("key", "value")}
    )
    for name, parts in projections.items():
        whole = {"": sum(sizes[part] for part in parts)}
        split = {f"{part}_": sizes[part] for part in parts}
        for prefix, rows in (whole if fused or name == "query_layer" else split).items():
            want |= {f"{name}.{prefix}weight": (rows, H), f"{name}.{prefix}bias": (rows,)}
    assert found == want | {"proj.weight": (H, H), "proj.bias": (H,)}


def test_names_of_a_decoders_parameters():
    layer = nn.TransformerLayer(
        H,
        48,
        HEADS,
        layer_type="decoder",
        output_layernorm=True,
        qk_norm_type="RMSNorm",
        device="cpu",
        name="layer",
        seq_length=128,
        micro_batch_size=4,
    )
    attention = ["q_norm.weight", "k_norm.weight"]
    mlp = [*NORM, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    assert [name for name, _ in layer.named_parameters()] == [
        *[
            f"self_attention.{name}"
            for name in (*attention, *(f"qkv.{name}" for name in FIRST[False]), *PROJ)
        ],
        *[f"inter_attention.{name}" for name in attention],
        *[f"inter_attention.layernorm_query.{name}" for name in (*NORM, "query_weight", "query_bias")],
        *[
            f"inter_attention.key_value.{part}_{kind}"
            for kind in ("weight", "bias")
            for part in ("key", "value")
        ],
        *[f"inter_attention.{name}" for name in PROJ],
        *[f"layernorm_mlp.{name}" for name in mlp],
        "layernorm.weight",
        "layernorm.bias",
    ]
    assert layer.inter_attention.key_value.name == "layer.inter_attention.key_value"
    plain = nn.TransformerLayer(H, 48, HEADS, layer_type="decoder", bias=False, device="cpu")
    assert {name.rpartition(".")[2] for name, _ in plain.named_parameters() if name.endswith("bias")} == {
        "layer_norm_bias"
    }
