"""convert takes the experts of transformers' models, whose weights are arrays of three dimensions."""

from __future__ import annotations

import re

import fp8kit_torch.experts
import pytest
import torch
from fp8kit_torch import autocast, convert, coverage, name_layers, revert
from fp8kit_torch.expert_kinds import kind_of
from fp8kit_torch.experts import ConvertedExperts, expert_product
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fp8kit.errors import ShapeError, UnsupportedError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, PerLayer
from fp8kit.testing import assert_same_bits
from fp8kit.testing.compare import relative_error
from tests.support.combinations import combinations

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
DEEP = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
DEEP |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0}
MODELS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "DeepseekV3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **DEEP},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "Llama4": {"num_local_experts": 4, "interleave_moe_layer_step": 1, "head_dim": 16},
}
PARTS = MODELS | {
    "NemotronH": {"n_routed_experts": 4, "num_experts_per_tok": 2, "hybrid_override_pattern": "E"},
    "DeepseekV4": {"n_routed_experts": 4, "swiglu_limit": 5.0},
}


def model_of(name):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")
    config = kind(**SMALL, **PARTS[name])
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
    (row,) = (row for row in coverage(model).modules if row.kind == type(experts).__name__)
    assert row.fp8
    assert row.parameters == sum(p.numel() for p in experts.parameters())
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        with autocast(recipe=recipe):
            error = relative_error(bits(model(ids).logits), bits(want))
        assert 0 < error < 0.1  # E4M3's half step is 2^-4 a factor; most of a model is not in FP8 here
    assert "refuse delayed scaling" in row.why
    name_layers(model)
    told = rf"^the experts '{re.escape(row.name)}' \(\w+\): recipe: .*delayed.*Float8Current.*PerLayer"
    with pytest.raises(UnsupportedError, match=told), autocast(recipe=DelayedScaling()):
        model(ids)
    with autocast(recipe=PerLayer(DelayedScaling(), ((f"{row.name}.*", Float8CurrentScaling()),))):
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
    with autocast(recipe=Float8CurrentScaling()):
        assert_same_bits("compiled", bits(call(x, index, weights)), bits(experts(x, index, weights)))
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
    assert y.dtype is torch.float32
    assert relative_error(bits(y), bits(experts(x, index, weights))) < 2.0**-5
    none = experts(x[:0], index[:0], weights[:0])
    assert none.shape == (0, 32)


@pytest.mark.combinations
def test_layers_of_experts_share_compiled_code_whatever_their_names():
    torch.compiler.reset()
    model = nn.Sequential(*(converted("NemotronH")[1] for _ in range(2)))
    name_layers(model)
    assert [part.name for part in model] == ["0", "1"]
    count = CompileCounterWithBackend("aot_eager")
    for part in model:
        with autocast(recipe=Float8CurrentScaling()):
            torch.compile(part, fullgraph=True, backend=count)(*routing())
    assert count.frame_count == 1
    rules = PerLayer(Float8CurrentScaling(), (("1.*", None),))
    for part in model:
        with autocast(recipe=rules):
            y = torch.compile(part, fullgraph=True, backend=count)(*routing())
            assert_same_bits("compiled", bits(y), bits(part(*routing())))
    assert_same_bits("high precision", bits(y), bits(model[1](*routing())))


def experts_of(name):
    """The experts of a model, with weights that make sums of some units."""
    model = model_of(name)
    experts = next(part for part in model.modules() if type(part).__name__.endswith("Experts"))
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn_like(p))
    return nn.Sequential(experts)


def passed(experts, *inputs):
    """y and the gradients of all parameters, as one row each."""
    experts.zero_grad()
    y = experts(*inputs)
    y.square().mean().backward()
    return bits(y), bits(torch.cat([p.grad.flatten() for p in experts.parameters()]))


def routing(tokens=5):
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    return torch.randn(tokens, 32), index, torch.rand(tokens, 2)


def converted(name):
    """The plain experts, and those that convert made of them."""
    holder = experts_of(name)
    plain = holder[0]
    return plain, convert(holder)[0]


@pytest.mark.parametrize("name", ["GptOss", "DeepseekV4"])
def test_the_limits_of_gates_are_kept(name):
    plain, ours = converted(name)
    assert ours.kind.activation == "clamped_swiglu"
    x, index, weights = routing()
    for got, want in zip(passed(ours, x, index, weights), passed(plain, x, index, weights), strict=True):
        assert relative_error(got, want) < 2.0**-17  # sums in float32, in another order
    plain.limit = 100.0  # beyond all gates: then the numbers are others
    assert relative_error(bits(plain(x, index, weights)), bits(ours(x, index, weights))) > 0.01


def test_the_routing_may_come_by_the_plain_modules_names():
    ours = converted("GptOss")[1]
    x, index, weights = routing()
    y = ours(x, router_indices=index, routing_weights=weights)
    assert_same_bits("y", bits(y), bits(ours(x, index, weights)))
    for wrong in ((x, index), (x, index, weights, x)):
        with pytest.raises(TypeError, match="takes hidden_states, router_indices, routing_weights"):
            ours(*wrong)


def test_experts_without_a_gate_are_converted():
    plain, ours = converted("NemotronH")
    assert ours.kind.activation == "srelu"
    for got, want in zip(passed(ours, *routing()), passed(plain, *routing()), strict=True):
        assert relative_error(got, want) < 2.0**-17


@combinations({"name": ["GptOss", "NemotronH"]}, usual=())  # test_a_whole_model_is_converted_and_compiled
def test_other_kinds_of_experts_are_compiled(name):
    ours = converted(name)[1]
    call = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for recipe in (None, Float8CurrentScaling()):
        with autocast(enabled=recipe is not None, recipe=recipe):
            assert_same_bits("compiled", bits(call(*routing())), bits(ours(*routing())))


def test_rows_that_no_router_sent_are_not_computed(monkeypatch):
    """Llama 4 gives every token to every expert, times 0 but for one."""
    plain, ours = converted("Llama4")
    x = torch.randn(4, 6, 32)
    x[torch.rand(4, 6) < 0.7] = 0
    x = x.flatten(0, 1)
    seen = []

    def watched(y, sizes, *rest):
        seen.append(sizes)
        return expert_product(y, sizes, *rest)

    monkeypatch.setattr(fp8kit_torch.experts, "expert_product", watched)
    for got, want in zip(passed(ours, x), passed(plain, x), strict=True):
        assert relative_error(got, want) < 2.0**-17
    assert [int(sizes.sum()) for sizes in seen] == [int((x != 0).any(-1).sum())] * 2
    with pytest.raises(ShapeError, match="a multiple of 4"):
        ours(x[:7])


def test_groups_of_experts_are_compiled():
    ours = converted("Llama4")[1]
    x = torch.randn(8, 32) * torch.tensor([1, 0, 1, 1, 0, 0, 1, 1])[:, None]
    call = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with autocast(recipe=Float8CurrentScaling()):
        assert_same_bits("compiled", bits(call(x)), bits(ours(x)))


def test_what_shows_no_function_stays():
    holder = experts_of("Mixtral")
    with torch.no_grad():
        holder[0].gate_up_proj.zero_()
    with pytest.warns(UserWarning, match="no layer that was replaced"):
        convert(holder)
    assert "weights are 0" in coverage(holder).modules[0].why


class Limited(nn.Module):
    """Gated experts with a limit that no attribute has, far above what small weights give."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 4) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x, index, weights):
        gate, up = torch.einsum("th,efh->tef", x, self.gate_up_proj).chunk(2, -1)
        hidden = nn.functional.silu(gate.clamp(max=7)) * up
        y = torch.einsum("tef,ehf->teh", hidden, self.down_proj)
        return (y.gather(1, index[..., None].expand(-1, -1, 4)) * weights[..., None]).sum(1)


def test_a_limit_that_small_weights_do_not_reach_is_seen():
    net = convert(nn.Sequential(nn.Linear(4, 4), Limited()))
    assert type(net[1]) is Limited


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


ACTS = {
    "swiglu": nn.functional.silu,
    "geglu": lambda u: nn.functional.gelu(u, approximate="tanh"),
    "reglu": nn.functional.relu,
    "sreglu": lambda u: nn.functional.relu(u).square(),
    "": torch.tanh,  # which none of ours is
}


class Wide(nn.Module):
    """Gated experts whose sums are as long as a model's."""

    def __init__(self, act, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = nn.Parameter((torch.randn(2, 512, 512) * 0.02).to(dtype))
        self.down_proj = nn.Parameter((torch.randn(2, 512, 256) * 0.02).to(dtype))
        self.act = act

    def forward(self, x, index, weights):
        y = torch.zeros_like(x)
        for e in range(2):
            rows, at = torch.where(index == e)
            gate, up = nn.functional.linear(x[rows], self.gate_up_proj[e]).chunk(2, -1)
            own = nn.functional.linear(self.act(gate) * up, self.down_proj[e])
            y.index_add_(0, rows, own * weights[rows, at, None])
        return y


@combinations({"name": ACTS.keys(), "dtype": [torch.float32, torch.bfloat16, torch.float16]})
def test_long_sums_do_not_hide_another_activation(name, dtype):
    found = kind_of(Wide(ACTS[name], dtype))
    assert (found.activation if name else found.split(" does")[0]) == (name or "experts whose forward")


def test_experts_that_give_no_numbers_stay():
    assert "does not compute" in kind_of(Wide(lambda u: u * torch.nan, torch.float32))
