"""Calls of recipes, optimisers, statistics and files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit import nn, numerics, optim, recipe, serialization, testing
from tests.support.calls.call import Call, X, always, leaf, method, plain, positional


def min_of() -> numerics.Needs:
    return numerics.request(["min"])


def sums_of(x: Any) -> Any:
    return numerics.collect(x, min_of()).numpy()


def stepped() -> optim.AdamW:
    made = optim.AdamW([leaf()], lr=0.1)
    made.step()
    return made


def saved() -> Path:
    path = Path(tempfile.mkdtemp()) / "file"
    serialization.save(path, {"x": X})
    return path


def fresh_path() -> Path:
    return Path(tempfile.mkdtemp()) / "file"


CALLS: dict[str, Call] = {
    "autocast": plain(
        lambda **given: fk.autocast(**given).__enter__().__exit__(None, None, None),
        enabled=always(True),
        calibrating=always(False),
        recipe=lambda: recipe.DelayedScaling(),
        amax_reduction_group=always(None),
        check_finite=always(False),
    ),
    "load": plain(fk.load, path=saved, module=lambda: {"x": np.zeros_like(X)}, strict=always(True)),
    "save": plain(fk.save, path=fresh_path, module=lambda: {"x": X}, metadata=lambda: {"a": "b"}),
    "numerics.tensor_statistics": plain(
        numerics.tensor_statistics,
        x=lambda: X,
        stats=always(("min", "sqnr", "mxfp8_mse", "cosine")),
        tensor=always("weight"),
        recipe=always("current"),
        twin=lambda: X + 1,
        quantized=always(None),
    ),
    "numerics.Operand": plain(
        numerics.Operand, tensor=always("weight"), quantization=always(None), transposed=always(True)
    ),
    "numerics.request": plain(
        numerics.request, stats=always(["min", "mxfp8_mse"]), operand=lambda: numerics.Operand("gradient")
    ),
    "numerics.collect": plain(
        numerics.collect,
        x=lambda: X,
        needs=lambda: numerics.request(["min", "cosine"]),
        quantized=always(None),
        twin=lambda: X + 1,
    ),
    "numerics.merge": plain(numerics.merge, needs=min_of, a=lambda: sums_of(X), b=lambda: sums_of(X)),
    "numerics.values": plain(numerics.values, needs=min_of, sums=lambda: sums_of(X)),
    "warmup": plain(
        fk.warmup,
        hidden=always(4),
        ffn=always(6),
        heads=always(2),
        sequence=always(3),
        batch=always(1),
        dtype=always("float32"),
        recipe=lambda: recipe.DelayedScaling(),
        activation=always("relu"),
        normalization=always("RMSNorm"),
        arch=always(None),
        device=always("cpu"),
        threads=always(1),
    ),
    "checkpoint": positional(fk.checkpoint, function=always(lambda x: x + x), x=leaf),
    "optim.AdamW": plain(
        lambda **given: optim.AdamW(**given).step(),
        params=lambda: [leaf()],
        lr=always(0.1),
        betas=always((0.9, 0.99)),
        eps=always(1e-8),
        weight_decay=always(0.1),
        states=always("coat"),
        exp_avg_dtype=always("E4M3"),
        exp_avg_sq_dtype=always("bfloat16"),
        master_dtype=always("float32"),
    ),
    "optim.MomentFormat": plain(
        optim.MomentFormat,
        format=always("E4M3"),
        block=always(128),
        power_2=always(False),
        expansion=always(True),
    ),
    "optim.StateFormats": plain(
        optim.StateFormats,
        exp_avg=always(optim.MomentFormat("E4M3")),
        exp_avg_sq=always(optim.MomentFormat("float16")),
        master=always("remainder"),
    ),
    "optim.AdamW.beta": plain(
        lambda params, beta: optim.AdamW(params, betas=(beta, beta)).step(),
        params=lambda: [leaf()],
        beta=always(0.9),
    ),
    "optim.SGD": plain(
        lambda **given: optim.SGD(**given).step(),
        params=lambda: [leaf()],
        lr=always(0.1),
        momentum=always(0.9),
        dampening=always(0.0),
        weight_decay=always(0.1),
        nesterov=always(True),
    ),
    "optim.Optimizer.groups": plain(
        lambda **given: optim.AdamW([given]).step(), params=lambda: [leaf()], lr=always(0.1)
    ),
    "optim.Optimizer.step": method(
        "step", stepped, inv_scale=lambda: np.ones(1, np.float32), found_inf=lambda: np.zeros(1, np.float32)
    ),
    "optim.Optimizer.load_state_dict": method(
        "load_state_dict", stepped, state=lambda: stepped().state_dict(), strict=always(True)
    ),
    "optim.GradScaler": plain(
        lambda **given: optim.GradScaler(**given).scale(leaf()),
        init_scale=always(2.0),
        growth_factor=always(2.0),
        backoff_factor=always(0.5),
        growth_interval=always(10),
        enabled=always(True),
    ),
    "optim.GradScaler.scale": method("scale", optim.GradScaler, loss=leaf),
    "optim.GradScaler.step": method("step", optim.GradScaler, optimizer=stepped),
    "optim.GradScaler.unscale_": method("unscale_", optim.GradScaler, optimizer=stepped),
    "optim.GradScaler.load_state_dict": method(
        "load_state_dict",
        optim.GradScaler,
        state=lambda: optim.GradScaler().state_dict(),
        strict=always(True),
    ),
    "optim.clip_grad_norm_": plain(
        optim.clip_grad_norm_, params=lambda: [leaf()], max_norm=always(1.0), scaler=always(None)
    ),
    "optim.warmup_cosine": plain(
        optim.warmup_cosine,
        step=always(2),
        lr=always(0.1),
        warmup_steps=always(1),
        total_steps=always(9),
        min_lr=always(0.01),
    ),
    "recipe.DelayedScaling": plain(
        recipe.DelayedScaling,
        margin=always(1),
        fp8_format=always(recipe.Format.HYBRID),
        amax_history_len=always(3),
        amax_compute_algo=always("max"),
        scaling_factor_compute_algo=always(None),
        reduce_amax=always(True),
        fp8_dpa=always(True),
        fp8_mha=always(True),
        backward_override=always(None),
    ),
    "recipe.Float8CurrentScaling": plain(
        recipe.Float8CurrentScaling,
        use_power_2_scales=always(False),
        fp8_format=always(recipe.Format.E4M3),
        fp8_quant_fwd_inp=always(None),
        fp8_gemm_fprop=always(recipe.MMParams()),
    ),
    "recipe.Float8BlockScaling": plain(
        recipe.Float8BlockScaling,
        use_f32_scales=always(False),
        fp8_quant_fwd_weight=always(None),
        x_block_scaling_dim=always(1),
        w_block_scaling_dim=always(2),
        grad_block_scaling_dim=always(1),
        fp8_gemm_dgrad=always(recipe.MMParams()),
    ),
    "recipe.MXFP8BlockScaling": plain(
        recipe.MXFP8BlockScaling,
        margin=always(0),
        fp8_format=always(recipe.Format.HYBRID),
        backward_override=always("dequantized"),
        enable_2d_quantization=always(True),
    ),
    "recipe.NVFP4BlockScaling": plain(
        recipe.NVFP4BlockScaling,
        disable_rht=always(True),
        disable_stochastic_rounding=always(True),
        disable_2d_quantization=always(True),
        row_scaled_activation=always(True),
        nvfp4_4over6=always("all"),
        nvfp4_4over6_err_mode=always("MSE"),
        backward_override=always("high_precision"),
    ),
    "recipe.DataRecipe": plain(
        recipe.DataRecipe,
        data=lambda: recipe.Float8CurrentScaling().quantization,
        name=always("mine"),
        attention=lambda: recipe.Float8CurrentScaling(fp8_dpa=True).attention,
    ),
    "recipe.PerLayer": plain(
        recipe.PerLayer, default=lambda: recipe.MXFP8BlockScaling(), rules=always((("*.head", None),))
    ),
    "recipe.CustomRecipe": plain(
        recipe.CustomRecipe, qfactory=always(lambda role: None), accumulation=always(lambda gemm: "split")
    ),
    "recipe.MMParams": plain(
        recipe.MMParams, use_split_accumulator=always(True), accumulation=always("hopper_fast")
    ),
    "recipe.QParams": plain(
        recipe.QParams,
        power_2_scale=always(True),
        amax_epsilon=always(0.1),
        random_hadamard_transform=always(False),
        stochastic_rounding=always(False),
        fp4_2d_quantization=always(False),
    ),
    "serialization.Bundle": plain(
        lambda state, part: serialization.Bundle(a=part).load_state_dict(state),
        part=lambda: nn.LayerNorm(4, device="cpu"),
        state=lambda: {"a/weight": X[0], "a/bias": X[1]},
    ),
    "serialization.read": plain(serialization.read, path=saved),
    "serialization.sweep": plain(serialization.sweep, path=fresh_path),
    "testing.epsilon": plain(testing.epsilon, dtype=always("float32")),
}
