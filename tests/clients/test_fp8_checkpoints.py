"""Hugging Face checkpoints with weights in FP8 by blocks: what is written transformers loads bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from fp8kit_torch import Float8BlockScaling, Linear, autocast, convert, quantized_model_init
from fp8kit_torch.huggingface import load_fp8_pretrained, save_fp8_pretrained
from torch import nn

from fp8kit import checkpoint_format
from fp8kit.errors import ArgumentError, CheckpointError
from fp8kit.testing.compare import assert_same_bits

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def llama(seed=0, dtype=torch.float32, tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


def bits(tensor):
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["exact", "power_2"])
def test_transformers_loads_what_is_saved_bit_for_bit(tmp_path, dtype, rule):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model = convert(llama(dtype=dtype))
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    names = save_fp8_pretrained(model, tmp_path, rule)
    # q and o are 128 x 128, the three of the MLP 384 and 128; k and v have 64 rows
    assert len(names) == 2 * 5
    assert not hasattr(model.config, "quantization_config")
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    mine = load_fp8_pretrained(convert(llama(1, dtype)), tmp_path)
    found = dict(mine.named_parameters())
    for key, value in theirs.named_parameters():
        assert_same_bits(key, bits(found[key]), bits(value))
        changed = not torch.equal(value, plain[key])
        assert changed is (key.removesuffix(".weight") in names), key
    # what is saved again has the same codes, and scales within their rounding
    save_fp8_pretrained(mine, tmp_path / "again", rule)
    again = load_fp8_pretrained(llama(2, dtype), tmp_path / "again")
    for (key, value), other in zip(mine.named_parameters(), again.parameters(), strict=True):
        limit = 0 if rule == "power_2" else 2.0**-22 if dtype is torch.float32 else 2.0**-7
        assert ((value - other).abs() <= limit * value.abs()).all(), key
    ids = torch.arange(8)[None]
    with autocast(recipe=Float8BlockScaling()):
        mine(ids, labels=ids).loss.backward()


MOE = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 64, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
}


def of_experts(name, seed=0, options=None):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = CONFIG_MAPPING[name](
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        **(MOE[name] if options is None else options),
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", MOE)
def test_experts_lie_singly_in_the_file_and_are_put_together(tmp_path, name):
    """As in the checkpoints that DeepSeek and Qwen publish."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model = convert(of_experts(name))
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    names = save_fp8_pretrained(model, tmp_path)
    experts = [each for each in names if each.endswith(".experts")]
    assert len(experts) == (1 if name == "deepseek_v3" else 2)  # whose first layer has none
    arrays, _ = checkpoint_format.read(str(tmp_path / "model.safetensors"))
    codes = [key for key in arrays if ".experts.3." in key and not key.endswith("_scale_inv")]
    assert len(codes) == 3 * len(experts)
    for key in codes:
        assert arrays[key].dtype.name == "float8_e4m3fn"
        assert arrays[f"{key}_scale_inv"].shape == tuple(size // 128 for size in arrays[key].shape)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    mine = dict(load_fp8_pretrained(convert(of_experts(name, 1)), tmp_path).named_parameters())
    for key, value in theirs.named_parameters():
        assert_same_bits(key, bits(mine[key]), bits(value))
        changed = key.removesuffix(".weight") in names or key.rpartition(".")[0] in experts
        assert changed is not torch.equal(value, plain[key]), key
    del arrays[codes[0]]
    with open(tmp_path / "model.safetensors", "wb") as file:
        checkpoint_format.write(file, arrays, {})
    with pytest.raises(CheckpointError, match="every tensor of the model"):
        load_fp8_pretrained(of_experts(name, 2), tmp_path)


LEFT = {
    "gpt_oss": {"num_local_experts": 4, "head_dim": 64},  # (E, H, 2 F), with biases
    "qwen3_moe": {"num_experts": 4, "head_dim": 64, "moe_intermediate_size": 96},  # of no whole blocks
}


@pytest.mark.parametrize("name", LEFT)
def test_experts_that_stay_as_they_are_are_read_as_they_are(tmp_path, name):
    import json

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear

    model = of_experts(name, options=LEFT[name])
    kept = {key: value.clone() for key, value in model.state_dict().items() if ".experts." in key}
    names = save_fp8_pretrained(convert(model), tmp_path)
    assert kept
    assert names
    assert not [each for each in names if "experts" in each]
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config.pop("quant_method")
    plain = of_experts(name, 1, LEFT[name])
    skipped = config["modules_to_not_convert"]
    replace_with_fp8_linear(plain, skipped, FineGrainedFP8Config(**config), pre_quantized=True)
    kinds = {key: type(module) for key, module in plain.named_modules()}
    assert not [key for key, kind in kinds.items() if issubclass(kind, FP8Experts)]
    assert sorted(names) == sorted(key for key, kind in kinds.items() if kind is FP8Linear)
    loaded = load_fp8_pretrained(of_experts(name, 2, LEFT[name]), tmp_path).state_dict()
    for key, value in kept.items():
        assert_same_bits(key, bits(loaded[key]), bits(value))


def test_a_weight_that_is_held_in_fp8_is_missed(tmp_path):
    """Held weights have no address that says which of them are one."""
    from safetensors.torch import save_file

    save_file({"0.weight": torch.ones(128, 128)}, tmp_path / "model.safetensors")
    with quantized_model_init():
        held = nn.Sequential(*[Linear(128, 128, bias=False, device="cpu") for _ in range(2)])
    with pytest.raises(CheckpointError, match=r"no tensor '1\.weight'"):
        load_fp8_pretrained(held, tmp_path)


def test_tied_weights_shards_and_damage(tmp_path):
    model = llama(tied=True)
    save_fp8_pretrained(model, tmp_path)
    twin = load_fp8_pretrained(llama(1, tied=True), tmp_path)
    assert_same_bits("head", bits(twin.lm_head.weight), bits(model.lm_head.weight))
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    for wrong in (nn.Linear(128, 128), llama):
        with pytest.raises(ArgumentError, match="model"):
            save_fp8_pretrained(wrong, tmp_path)
    with pytest.raises(ArgumentError, match="scale_rule"):
        save_fp8_pretrained(model, tmp_path, "floor")
    before = {key: value.clone() for key, value in twin.state_dict().items()}
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": "none"}}'):
        index.write_text(text)
        with pytest.raises(CheckpointError):
            load_fp8_pretrained(twin, tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match="no tensor"):
        load_fp8_pretrained(nn.Sequential(nn.Linear(4, 4)), tmp_path)
    for key, value in twin.state_dict().items():
        assert_same_bits(key, bits(value), bits(before[key]))


def test_weights_that_do_not_become_fp8_are_told(tmp_path):
    with pytest.warns(
        UserWarning, match=r"10 of 14 layers are in FP8, .* model\.layers\.0\.self_attn\.k_proj"
    ):
        save_fp8_pretrained(llama(), tmp_path / "some")
    model = llama()
    for layer in model.model.layers:
        layer.self_attn = layer.mlp = None
    with pytest.raises(ArgumentError, match="none of its 0 layers"):
        save_fp8_pretrained(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()
