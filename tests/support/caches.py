"""Layers that go step by step over a cache, for their tests."""

from __future__ import annotations

from fp8kit import nn
from tests.support.layers import make

HEADS, GROUPS, D = 4, 2, 8
HIDDEN = HEADS * D
MOST = 24  # tokens of a sequence
PAGED = {"is_paged": True, "total_num_pages": 11, "page_size": 3}


def params(form, device, paged=False, **options):
    return nn.InferenceParams(3, MOST, qkv_format=form, device=device, **(PAGED if paged else {}), **options)


def layer_of(form, device, mask="causal", dtype="float32", **options):
    kind = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 48,
        "num_attention_heads": HEADS,
        "num_gqa_groups": GROUPS,
        "layer_number": 1,
        "attn_input_format": form,
        "self_attn_mask_type": mask,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return make(nn.TransformerLayer, device, dtype, **(kind | options)).eval()
