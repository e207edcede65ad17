"""transformers' models in FP8: converted in place, trained by its Trainer and by accelerate, the FP8 products
counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from accelerate import Accelerator
from fp8kit_torch import autocast, checkpoint_contexts, convert, revert
from fp8kit_torch.converted import ConvertedLinear, ConvertedNorm
from fp8kit_torch.optimizers import FusedAdam
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from fp8kit import arrays
from fp8kit.backends import dispatch
from fp8kit.recipe import DelayedScaling
from fp8kit.testing.compare import assert_same_bits, relative_error
from tests.support.source import ROOT

VOCABULARY, LENGTH, STEPS, LAYERS = 64, 16, 4, 2
_GPT2 = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=LENGTH,
    n_embd=32,
    n_layer=LAYERS,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
_LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)
_BERT = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=LENGTH,
)

# name -> (class, config, its linear layers, its norms)
MODELS = {
    "gpt2": (GPT2LMHeadModel, _GPT2, 4 * LAYERS + 1, 2 * LAYERS + 1),
    "llama": (LlamaForCausalLM, _LLAMA, 7 * LAYERS + 1, 2 * LAYERS + 1),
    "bert": (BertForMaskedLM, _BERT, 6 * LAYERS + 2, 2 * LAYERS + 2),
}
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


def make(name):
    torch.manual_seed(0)
    kind, config, *_ = MODELS[name]
    return kind(config)


@pytest.fixture
def products(monkeypatch):
    """One entry for each FP8 product that runs."""
    ran, kernels = [], dispatch.kernels(arrays.CPU)
    run = kernels.fp8_gemm
    monkeypatch.setattr(kernels, "fp8_gemm", lambda *args: (ran.append(1), run(*args))[1])
    return ran


def batches():
    ids = torch.arange(LENGTH).repeat(2 * STEPS, 1) * 3 % VOCABULARY
    ids[1::2] += 1
    return [{"input_ids": row, "labels": row} for row in ids]


class Fp8Trainer(Trainer):
    """A Trainer whose loss is computed under ``autocast``."""

    recipe = DelayedScaling(amax_history_len=4)

    def compute_loss(self, *args, **kwargs):
        with autocast(recipe=self.recipe):
            return super().compute_loss(*args, **kwargs)


def losses_of(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", MODELS)
def test_trainer_trains_in_fp8(name, tmp_path, products):
    options = {
        "output_dir": str(tmp_path),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "seed": 1,
    }
    plain = losses_of(Trainer(make(name), TrainingArguments(**options), train_dataset=batches()))
    assert not products
    model = convert(make(name))
    linears = [m for m in model.modules() if isinstance(m, ConvertedLinear)]
    assert len(linears) == MODELS[name][2]
    assert len([m for m in model.modules() if isinstance(m, ConvertedNorm)]) == MODELS[name][3]
    losses = losses_of(Fp8Trainer(model, TrainingArguments(**options), train_dataset=batches()))
    assert len(products) == 3 * len(linears) * STEPS
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert all(abs(a - b) < 0.1 * b for a, b in zip(losses, plain, strict=True))
    assert losses != plain
    assert all(float(m.fp8_meta["scaling_fwd"].scale[0]) != 1 for m in linears)


@pytest.mark.parametrize("name", MODELS)
def test_trainers_gradient_checkpointing_recomputes_in_fp8(name, tmp_path, products):
    options = {
        "output_dir": str(tmp_path),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "seed": 1,
    }
    ways = [
        {},
        *(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
            for kwargs in (
                None,
                {"use_reentrant": True},
                {"use_reentrant": False, "context_fn": checkpoint_contexts},
            )
        ),
    ]
    losses, counts = [], []
    for further in ways:
        products.clear()
        losses.append(
            losses_of(
                Fp8Trainer(
                    convert(make(name)), TrainingArguments(**options, **further), train_dataset=batches()
                )
            )
        )
        counts.append(len(products))
    assert all(found == losses[0] for found in losses)
    # linear layers of a block, which is what is recomputed
    inner = (MODELS[name][2] - (2 if name == "bert" else 1)) // LAYERS
    assert all(count - counts[0] == inner * LAYERS * STEPS for count in counts[1:])


@pytest.mark.parametrize("name", MODELS)
def test_converted_and_reverted(name, tmp_path):
    model = make(name).eval()
    before, ids = (
        {n: p.data_ptr() for n, p in model.named_parameters()},
        torch.arange(LENGTH)[None] % VOCABULARY,
    )
    state = {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(ids).logits
        got = convert(model)(ids).logits
    assert relative_error(got, wanted) < 1e-5
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert_same_bits("reverted", revert(model)(ids).logits.numpy(), wanted.numpy())
        assert_same_bits(
            "loaded", type(model).from_pretrained(tmp_path).eval()(ids).logits.numpy(), wanted.numpy()
        )
    for key, tensor in model.state_dict().items():
        assert_same_bits(key, tensor.numpy(), state[key].numpy())
    if name == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("name", MODELS)
def test_accelerate_trains_in_fp8(name, products):
    accelerator = Accelerator(cpu=True)
    model = convert(make(name), lambda module, path: path not in ("lm_head", "cls.predictions.decoder"))
    model, opt, loader = accelerator.prepare(
        model, FusedAdam(model.parameters(), lr=1e-2), torch.utils.data.DataLoader(batches(), 2)
    )
    losses = []
    for batch in loader:
        with autocast(recipe=DelayedScaling(amax_history_len=4)):
            loss = model(**batch).loss
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert len(products) == 3 * (MODELS[name][2] - 1) * STEPS
    assert losses[-1] < losses[0]


HANDLERS = {
    "TERecipeKwargs": "TERecipeKwargs(amax_history_len=4)",
    "FP8RecipeKwargs": (
        'FP8RecipeKwargs(backend="TE", amax_history_len=4, amax_compute_algo="max", fp8_format="HYBRID", '
        "margin=0)"
    ),
}


ACCELERATE = """
    import json, sys, traceback
    import fp8kit_torch
    fp8kit_torch.as_transformer_engine()
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FP8RecipeKwargs, TERecipeKwargs
    from accelerate.utils import apply_fp8_autowrap, convert_model, has_transformer_engine_layers

    def train(handler):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler()])
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 48), torch.nn.LayerNorm(48), torch.nn.ReLU(), torch.nn.Linear(48, 32)
        )
        model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert has_transformer_engine_layers(model)
        x, losses = torch.randn(16, 32), []
        for _ in range(5):
            loss = (model(x).float() - x).square().mean()
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], losses
        layer = next(m for m in model.modules() if isinstance(m, fp8kit_torch.Linear))
        assert float(layer.fp8_meta["scaling_fwd"].scale[0]) != 1.0
        assert layer.fp8_meta["scaling_fwd"].history_len == 4

        plain = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.LayerNorm(48), torch.nn.Linear(48, 32))
        wanted = plain(x).detach()
        with torch.no_grad():
            convert_model(plain)
        assert [type(m) for m in plain] == [fp8kit_torch.Linear, fp8kit_torch.LayerNorm, fp8kit_torch.Linear]
        got = plain(x)
        assert (got - wanted).norm() < 1e-5 * wanted.norm()
        wrapped = apply_fp8_autowrap(plain, handler())
        wrapped.eval()
        assert torch.equal(wrapped(x), got), "evaluation is in high precision unless it is asked for"
        wrapped.train()
        error = (wrapped(x) - wanted).norm() / wanted.norm()
        # E4M3's half step is 2^-4 of a value; scales of 1 lose some more of what is small
        assert 1e-4 < error < 2.0**-3, error

    told = {}
    for name, handler in json.loads(sys.argv[1]).items():
        AcceleratorState._reset_state(True)
        try:
            train(lambda: eval(handler))
        except Exception:
            told[name] = traceback.format_exc()
    print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def accelerated():
    """Handler -> the traceback of what failed with it, of one process for both: the imports take longer than
    the trainings."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")])}
    command = [sys.executable, "-c", textwrap.dedent(ACCELERATE), json.dumps(HANDLERS)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("handler", HANDLERS)
def test_accelerates_own_fp8_mode_finds_this_frontend(handler, accelerated):
    """``mixed_precision="fp8"`` with its Transformer Engine backend: accelerate converts the model itself."""
    assert handler not in accelerated, accelerated[handler]
