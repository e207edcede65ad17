"""convert takes the experts of transformers' Mixtral, Qwen-MoE and DeepSeek models, whose weights are arrays
of three dimensions."""

from __future__ import annotations

import pytest
import torch
from fp8kit_torch import autocast, convert, coverage, revert
from fp8kit_torch.experts import ConvertedExperts
from torch import nn

from fp8kit.errors import UnsupportedError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing import assert_same_bits
from fp8kit.testing.compare import relative_error

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
DEEP = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
DEEP |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0}
MODELS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "DeepseekV3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **DEEP},
}


def model_of(name, **more):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name], **more)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def bits(t):
    return t.detach().float().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_the_same(name):
    model = model_of(name).eval()
    ids = torch.arange(24).reshape(2, 12) % 64
    want = model(ids).logits
    want.square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    keys = list(model.state_dict())
    convert(model, lambda module, path: "experts" in path.split(".")[-1])
    (experts,) = (part for part in model.modules() if isinstance(part, ConvertedExperts))
    assert list(model.state_dict()) == keys
    got = model(ids).logits
    got.square().mean().backward()
    # sums of a few dozen terms in float32, in another order
    assert relative_error(bits(got), bits(want)) < 2.0**-17
    for n, p in model.named_parameters():
        if n in grads:
            assert relative_error(bits(p.grad), bits(grads[n])) < 2.0**-15
    (row,) = (row for row in coverage(model).modules if row.kind == "ConvertedExperts")
    assert row.fp8
    assert row.parameters == experts.gate_up_proj.numel() + experts.down_proj.numel()
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        with autocast(recipe=recipe):
            error = relative_error(bits(model(ids).logits), bits(want))
        assert 0 < error < 0.1  # E4M3's half step is 2^-4 a factor; most of a model is not in FP8 here
    with pytest.raises(UnsupportedError, match="delayed scaling"), autocast(recipe=DelayedScaling()):
        model(ids)
    plain = experts.__dict__["plain"]
    revert(model)
    assert any(part is plain for part in model.modules())
    assert relative_error(bits(model(ids).logits), bits(want)) == 0


def test_a_whole_model_is_converted_and_compiled():
    model = convert(model_of("Mixtral")).eval()
    assert sum(isinstance(part, ConvertedExperts) for part in model.modules()) == 1
    experts = next(part for part in model.modules() if isinstance(part, ConvertedExperts))
    x, index = torch.randn(5, 32), torch.tensor([[0, 1], [3, 2], [1, 0], [1, 4], [2, 3]])
    weights = torch.rand(5, 2)
    call = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for recipe in (None, Float8CurrentScaling()):
        with autocast(enabled=recipe is not None, recipe=recipe):
            assert_same_bits("compiled", bits(call(x, index, weights)), bits(experts(x, index, weights)))
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
    assert y.dtype is torch.float32
    assert relative_error(bits(y), bits(experts(x, index, weights))) < 2.0**-5
    none = experts(x[:0], index[:0], weights[:0])
    assert none.shape == (0, 32)


class Other(nn.Module):
    """Arrays of the same names, with another function."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 4))
        self.down_proj = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x, index, weights):
        gate, up = torch.einsum("th,efh->tef", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("tef,ehf->th", torch.relu(gate) * up, self.down_proj)


def test_what_computes_something_else_stays():
    net = nn.Sequential(nn.Linear(4, 4), Other())
    convert(net)
    assert type(net[1]) is Other
    why = {row.name: row.why for row in coverage(net).modules}
    assert "does not compute" in why["1"]
    net[1].down_proj = nn.Parameter(torch.randn(2, 4, 5))
    assert "are not (E, 2 F, H)" in {row.name: row.why for row in coverage(net).modules}["1"]
