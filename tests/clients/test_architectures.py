"""transformers' architectures in tiny configurations: converted, each gives the logits and gradients of the
plain model, and trains in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8kit_torch import Float8CurrentScaling, autocast, convert, converted_attention, coverage, revert
from torch import nn

from fp8kit.testing.compare import assert_same_bits, relative_error
from tests.support.tiny_models import SIZES

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CAUSAL = """
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox gpt_neox_japanese opt
    bloom falcon mpt stablelm starcoder2 olmo olmo2 olmo3 granite cohere cohere2 nemotron persimmon glm
    glm4 smollm3 ernie4_5 exaone4 arcee seed_oss gpt_bigcode biogpt xglm openai-gpt bitnet apertus
    diffllama lfm2 vaultgemma doge nanochat mamba mixtral granitemoe minimax phimoe flex_olmo
    gpt_oss llama4_text deepseek_v4 aria_text
"""
MASKED = """
    bert roberta distilbert electra albert deberta deberta-v2 mpnet xlm-roberta camembert big_bird fnet
    megatron-bert nystromformer roformer modernbert esm eurobert data2vec-text
"""
ENCODER_DECODER = ["t5", "blenderbot-small"]


@pytest.fixture(autouse=True)
def on_cpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8kit's attention in the place of torch's on a CPU, as it is on a GPU."""
    monkeypatch.setattr(converted_attention, "_DEVICES", ("cpu", "cuda"))


def make(name: str, auto: Any) -> Any:
    from transformers import CONFIG_MAPPING

    torch.manual_seed(0)
    model = auto.from_config(CONFIG_MAPPING[name](**SIZES)).eval()  # without dropout
    with torch.no_grad():
        for p in model.parameters():  # also those that start at 0 or 1
            p.add_(torch.randn_like(p) * 0.02)
    return model


def passed(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, and the gradients of all parameters as one row."""
    model.zero_grad()
    logits = model(**inputs).logits
    (logits * torch.linspace(-1, 1, logits.shape[-1])).mean().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return logits.detach(), torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("name", [*CAUSAL.split(), *MASKED.split(), *ENCODER_DECODER])
def test_logits_and_gradients_are_the_plain_models(name):
    import transformers

    head = "CausalLM" if name in CAUSAL.split() else "MaskedLM" if name in MASKED.split() else "Seq2SeqLM"
    model = make(name, getattr(transformers, f"AutoModelFor{head}"))
    ids = (torch.arange(24) % 60 + 3).reshape(2, 12)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if name in ENCODER_DECODER else {})
    state = {key: value.clone() for key, value in model.state_dict().items()}
    wanted, gradient = passed(model, inputs)
    kinds = {type(part) for part in model.modules()}
    falcon = [kind for kind in kinds if kind.__name__ == "FalconLinear"]
    assert bool(falcon) is (name == "falcon")
    convert(model, linear_classes=falcon)
    assert model.state_dict().keys() == state.keys()
    report = coverage(model)
    assert not any("could be" in row.why for row in report.modules)
    assert not any(isinstance(part, nn.Linear) and type(part) is nn.Linear for part in model.modules())
    assert report.fp8_share > (0.35 if name == "albert" else 0.5)  # which repeats one layer
    logits, got = passed(model, inputs)
    # sums of up to some hundred terms in another order, through two blocks: some ten roundings of float32
    assert relative_error(logits.numpy(), wanted.numpy()) < 16 * 2.0**-23
    assert relative_error(got.numpy(), gradient.numpy()) < 16 * 2.0**-23
    with autocast(recipe=Float8CurrentScaling()):
        fp8, _ = passed(model, inputs)
    # E4M3's half step is 2^-4 of an element; residuals carry most of it past the products
    assert 1e-5 < relative_error(fp8.numpy(), wanted.numpy()) < 0.2
    revert(model)
    assert_same_bits("reverted", passed(model, inputs)[0].numpy(), wanted.numpy())
