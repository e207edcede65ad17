"""accelerate's FP8 mode by Transformer Engine's name: high precision for some GEMMs, MXFP8, ``accelerate
launch``; and the Trainer's resume with its FP8 state."""

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import fp8kit_torch

fp8kit_torch.as_transformer_engine()
os.environ["ACCELERATE_FP8_BACKEND"] = "TE"  # an installed torchao comes first else

import torch
from torch import nn

from tests.clients.programs.checks import main


def train(steps=5, **fields):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TERecipeKwargs

    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**fields)])
    model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 32))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    x, losses = torch.randn(16, 32), []
    for _ in range(steps):
        loss = (model(x).float() - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    return losses


def check_gemms_in_high_precision():
    plain = train(amax_history_len=4)
    for own in ((False, False, True), (False, True, True), (True, False, False)):
        losses = train(amax_history_len=4, override_linear_precision=own)
        assert losses != plain
        assert all(abs(a - b) < 0.1 * b for a, b in zip(losses, plain, strict=True))


def check_mxfp8_is_emulated_and_says_so():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = train(use_mxfp8_block_scaling=True)
    assert any("emulated" in str(warning.message) for warning in told)
    plain = train(amax_history_len=4)
    assert all(a != b and abs(a - b) < 0.1 * b for a, b in zip(losses, plain, strict=True))


def check_e5m2():
    losses, plain = train(fp8_format="E5M2", amax_history_len=4), train(amax_history_len=4)
    assert all(a != b and abs(a - b) < 0.1 * b for a, b in zip(losses, plain, strict=True))


LAUNCHED = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
assert accelerator.mixed_precision == "fp8" and accelerator.fp8_backend == "TE", accelerator.fp8_backend
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
x = torch.randn(16, 32)
for _ in range(3):
    loss = (model(x).float() - x).square().mean()
    accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
layer = accelerator.unwrap_model(model)[0]
print(type(layer).__module__, float(layer.fp8_meta["scaling_fwd"].scale[0]) > 1, accelerator.num_processes)
"""


def check_launch():
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(LAUNCHED)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "fp8kit_torch.as_transformer_engine", "-m"),
                *("accelerate.commands.launch", "--cpu", "--mixed_precision", "fp8"),
                *("--num_processes", "1", "--num_machines", "1", "--dynamo_backend", "no", str(script)),
            ],
            env=os.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "transformer_engine.pytorch.module.linear True 1" in done.stdout, done.stdout + done.stderr


def check_trainer_resumes_with_its_fp8_state():
    """A run of four steps, and one that stops after two and goes on: the same losses, to the bit."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    from accelerate.state import AcceleratorState
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    ids = torch.arange(16).repeat(8, 1) * 3 % 64
    ids[1::2] += 1
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def run(folder, steps, resume=None):
        AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
            )
        )
        fp8kit_torch.keep_extra_state(model)
        options = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(model, options, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        layers = [m for m in trainer.model.modules() if isinstance(m, fp8kit_torch.Linear)]
        assert len(layers) == 15, len(layers)
        scales = torch.cat([layer.fp8_meta["scaling_fwd"].scale for layer in layers])
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], scales

    with tempfile.TemporaryDirectory() as folder:
        whole, scales = run(Path(folder) / "whole", 4)
        run(Path(folder) / "part", 2)
        resumed, again = run(Path(folder) / "part", 4, str(Path(folder) / "part" / "checkpoint-2"))
    assert resumed == whole, (resumed, whole)
    assert torch.equal(scales, again)
    assert (scales != 1).any()
    del os.environ["ACCELERATE_MIXED_PRECISION"]


if __name__ == "__main__":
    main(globals())
