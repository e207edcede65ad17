"""``verify`` on every operation of a training on the CPU: the bounds hold for real arguments, and looking
changes no bit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import nn
from fp8kit.backends.protocol import KERNELS, signature
from fp8kit.testing import assert_same_bits

RECIPES = {"delayed": fk.recipe.DelayedScaling(amax_history_len=2), "block": fk.recipe.Float8BlockScaling()}
ALWAYS = {
    "copy",
    "gemm",
    "norm_fwd",
    "norm_bwd",
    "act_fwd",
    "act_bwd",
    "attention_fwd",
    "attention_bwd",
    "dropout_add",
    "dropout_bwd",
    "drop_path",
    "embedding_fwd",
    "embedding_bwd",
    "cross_entropy_fwd",
    "cross_entropy_bwd",
    "adamw_",
    "clip_",
    "l2norm",
    "scale_",
    "count_",
    "loss_scale_",
    "rng_next_",
    "sum_rows",
}
BY_RECIPE = {
    "delayed": {"fp8_gemm", "quantize_transpose", "update_delayed_"},
    "block": {"block_gemm", "block_quantize"},
}


def train(recipe: Any) -> list[Any]:
    """Two steps; the parameters after them."""
    nn.manual_seed(5)
    embedding = nn.Embedding(24, 32, params_dtype="bfloat16", device="cpu")
    layer = nn.TransformerLayer(
        32,
        64,
        4,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        drop_path_rate=0.3,
        activation="swiglu",
        params_dtype="bfloat16",
        device="cpu",
    )
    head = nn.Linear(32, 24, params_dtype="bfloat16", device="cpu")
    params = [p for module in (embedding, layer, head) for p in module.parameters()]
    opt, scaler = fk.optim.AdamW(params, lr=1e-3), fk.optim.GradScaler()
    rng = np.random.default_rng(5)
    for _ in range(2):
        ids = fk.tensor(rng.integers(0, 24, (8, 2)), device="cpu")
        with fk.autocast(recipe=recipe):
            y = layer(embedding(ids))
        scaler.scale(nn.cross_entropy(head(y), ids)).backward()
        fk.optim.clip_grad_norm_(params, 1.0, scaler)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return [p.view.numpy() for p in params]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_within_its_bounds(recipe: str) -> None:
    want = train(RECIPES[recipe])

    def same(original: Any, *args: Any) -> Any:
        return original(*args)

    with ExitStack() as blocks:
        watched = [
            blocks.enter_context(fk.override(name, same, verify=True))
            for name in KERNELS
            if "stream" in signature(name).parameters
        ]
        got = train(RECIPES[recipe])
        called = {one.operation for one in watched if one.calls}
    assert ALWAYS | BY_RECIPE[recipe] <= called
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(f"parameter {i}", a, b)
