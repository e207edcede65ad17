"""Lightning's Transformer Engine precision: training, resuming, loading a checkpoint into a plain model,
mixed models, and 16-bit weights."""

import tempfile
from pathlib import Path

import fp8kit_torch as te

te.as_transformer_engine()

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from torch import nn

from tests.clients.programs.checks import main

ROWS = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


class Plain(pl.LightningModule):
    def __init__(self, keep=False, save=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 32))
        self.losses = []
        if keep:
            te.keep_extra_state(self, save=save)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        (x,) = batch
        loss = (self(x).float() - x.float()).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return te.optimizers.FusedAdam(self.parameters(), lr=1e-2)


class Keeps(Plain):
    def __init__(self):
        super().__init__(keep=True)


class Mixed(Plain):
    """A layer of Transformer Engine's beside plain ones, and one whose sizes Lightning leaves."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 48), te.LayerNormLinear(48, 32, device="cpu"), nn.Linear(32, 33), nn.Linear(33, 32)
        )


def fit(model, folder, steps=4, ckpt=None, dtype=torch.float32, recipe=None, replace=None):
    precision = TransformerEnginePrecision(
        weights_dtype=dtype, recipe=recipe or {"amax_history_len": 4}, replace_layers=replace
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ROWS), 64)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        plugins=[precision],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        barebones=False,
    )
    trainer.fit(model, loader, ckpt_path=ckpt)
    return trainer


def scales(model):
    return [m.fp8_meta["scaling_fwd"].scale.tolist() for m in model.modules() if getattr(m, "fp8_meta", None)]


def check_resume_and_load():
    with tempfile.TemporaryDirectory() as folder:
        whole, part = Keeps(), Keeps()
        fit(whole, folder, 6)
        trainer = fit(part, folder, 4)
        path = Path(folder) / "at4.ckpt"
        trainer.save_checkpoint(path)
        kept = torch.load(path, weights_only=False)["state_dict"]
        assert any(key.endswith("_extra_state") and value.numel() for key, value in kept.items())
        resumed = Keeps()
        fit(resumed, folder, 6, str(path))
        assert resumed.losses == whole.losses[4:], (resumed.losses, whole.losses)
        assert scales(resumed) == scales(whole)
        # a plain model keeps the state, saves it, and has it once it is converted
        loaded = Keeps.load_from_checkpoint(path, map_location="cpu")
        assert type(loaded.net[0]) is nn.Linear
        again = loaded.state_dict()
        assert again.keys() == kept.keys()
        assert all(torch.equal(again[key], kept[key]) for key in kept)
        te.convert(loaded)
        assert loaded.net[0].fp8_meta["scaling_fwd"].scale.tolist() == scales(part)[0]
        loaded = Keeps.load_from_checkpoint(path, map_location="cpu")
        TransformerEnginePrecision(weights_dtype=torch.float32).convert_module(loaded)
        with te.autocast():  # when what waits is handed over
            pass
        assert scales(loaded) == scales(part)


def check_state_that_is_left_out():
    with tempfile.TemporaryDirectory() as folder:
        model = Plain(keep=True, save=False)
        trainer = fit(model, folder, 2)
        path = Path(folder) / "plain.ckpt"
        trainer.save_checkpoint(path)
        assert scales(model)
        loaded = Plain.load_from_checkpoint(path, map_location="cpu")
        assert type(loaded.net[0]) is nn.Linear
        assert torch.equal(loaded.net[0].weight, model.net[0].weight)


def check_recipes_and_mixed_models():
    with tempfile.TemporaryDirectory() as folder:
        for recipe in (
            {"fp8_format": "E4M3"},
            {"fp8_format": "E5M2"},
            {"fp8_format": "HYBRID", "override_linear_precision": [False, False, True]},
        ):
            model = Plain()
            fit(model, folder, recipe=recipe)
            assert model.losses[-1] < model.losses[0]
        mixed = Mixed()
        fit(mixed, folder)
        # Lightning leaves a model that has such layers already
        assert [type(part).__name__ for part in mixed.net] == [
            "Linear",
            "LayerNormLinear",
            "Linear",
            "Linear",
        ]
        assert type(mixed.net[0]) is nn.Linear
        assert len(scales(mixed)) == 1
        assert mixed.losses[-1] < mixed.losses[0]


def check_16_bit_weights_stay_finite():
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.float16, torch.bfloat16):
            model = Plain()
            fit(model, folder, 12, dtype=dtype)
            assert model.net[0].weight.dtype is dtype
            assert all(loss == loss for loss in model.losses), model.losses
            assert model.losses[-1] < model.losses[0]


if __name__ == "__main__":
    main(globals())
