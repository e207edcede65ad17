"""PEFT's adapters over converted models, and what transformers does to a model's embeddings."""

import torch
from torch import nn

from tests.clients.programs.checks import main

SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **SIZES)
    )


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=32, n_layer=2, n_head=2, **drop, **SIZES))


IDS = torch.arange(16)[None] + 3


def adapted(model, targets):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return model, loss.item(), grads


def check_lora_over_converted_layers_is_lora_over_plain_ones():
    import fp8kit_torch as te

    for make, targets in ((llama, ["q_proj", "down_proj"]), (gpt2, ["c_attn", "c_fc"])):
        plain, wanted, grads = adapted(make(), targets)
        model, loss, mine = adapted(te.convert(make()), targets)
        assert abs(loss - wanted) < 1e-5
        assert mine.keys() == grads.keys()
        assert all("lora" in name for name in mine)
        for name, grad in grads.items():
            assert (mine[name] - grad).norm() < 1e-5 * grad.norm(), name
        logits = [each.merge_and_unload()(IDS).logits for each in (plain, model)]
        assert (logits[0] - logits[1]).norm() < 1e-5 * logits[0].norm()


def check_lora_trains_in_fp8_over_frozen_weights():
    import fp8kit_torch as te

    model, _, _ = adapted(te.convert(llama()), ["q_proj", "up_proj"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses


def check_embeddings_are_resized_and_found():
    import fp8kit_torch as te

    for make in (llama, gpt2):
        model = te.convert(make())
        assert model.get_output_embeddings() is model.lm_head
        assert isinstance(model.lm_head, nn.Linear)
        model.resize_token_embeddings(70)
        te.convert(model)  # an untied head is a new nn.Linear
        assert type(model.lm_head) is not nn.Linear
        assert model.lm_head.out_features == 70
        with te.autocast(recipe=te.Float8CurrentScaling()):
            logits = model(IDS + 50).logits
        assert logits.shape[-1] == 70
        assert (model.lm_head.weight is model.get_input_embeddings().weight) is (make is gpt2)


def check_weight_decay_leaves_converted_norms_out():
    import fp8kit_torch as te
    from transformers import Trainer

    for make in (llama, gpt2):
        model = make()
        wanted = Trainer.get_decay_parameter_names(None, model)
        assert Trainer.get_decay_parameter_names(None, te.convert(model)) == wanted


if __name__ == "__main__":
    main(globals())
