"""PEFT's adapters over layers of Transformer Engine's name, among them parts of a ``TransformerLayer``."""

import tempfile

import fp8kit_torch as te
import torch

from tests.clients.programs.checks import main

HIDDEN, OUT = 32, 8
te.as_transformer_engine()  # before PEFT is imported, which looks for Transformer Engine then


def model():
    """Two layers and a head."""
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
    layers = [te.TransformerLayer(HIDDEN, 64, 4, **options) for _ in range(2)]
    return torch.nn.Sequential(*layers, te.Linear(HIDDEN, OUT, device="cpu"))


def adapted(*targets):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model(), LoraConfig(r=4, target_modules=list(targets)))


def check_lora_trains_in_fp8_over_parts_of_a_layer():
    x = torch.randn(16, 2, HIDDEN)
    for targets in (("layernorm_qkv", "proj", "2"), ("layernorm_qkv", "layernorm_mlp")):
        adapters = adapted(*targets)
        assert torch.equal(adapters(x), model()(x))  # B starts as zeros
        optimizer = torch.optim.AdamW([p for p in adapters.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(6):
            with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
                loss = (adapters(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], losses
        assert all("lora" in name for name, p in adapters.named_parameters() if p.requires_grad)
        with adapters.disable_adapter():
            assert torch.equal(adapters(x), model()(x))


def check_adapters_are_saved_and_loaded():
    from peft import PeftModel

    adapters, x = adapted("layernorm_qkv", "proj"), torch.randn(16, 2, HIDDEN)
    for name, parameter in adapters.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    with tempfile.TemporaryDirectory() as folder:
        adapters.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(model(), folder)
    assert torch.equal(loaded(x), adapters(x))


if __name__ == "__main__":
    main(globals())
