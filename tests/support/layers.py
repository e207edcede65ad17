"""Modules with random parameters, the recipes that every layer is tested under, and one training step of a
module."""

from __future__ import annotations

import contextlib

import numpy as np

from fp8kit import formats
from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from tests.support.products import Quantiser, f64, scales_of

MODES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=3, margin=1),
    "current": Float8CurrentScaling(),
    "e4m3": DelayedScaling(fp8_format=Format.E4M3, amax_compute_algo="most_recent"),
    "block": Float8BlockScaling(),
    "block_f32": Float8BlockScaling(True, Format.HYBRID, x_block_scaling_dim=2, w_block_scaling_dim=1),
}


def scope(mode):
    return contextlib.nullcontext() if MODES[mode] is None else autocast(recipe=MODES[mode])


def quantiser(mode, module, gemm=0):
    recipe = MODES[mode]
    if recipe is None:
        return None
    narrow, fp8 = module.device.kind == "cuda", recipe.quantization
    if fp8.x.granularity != "tensor":
        tiles = {name: (own.tile, own.power_2) for name, own in (("x", fp8.x), ("w", fp8.w), ("g", fp8.g))}
        return Quantiser(None, fp8.g.format, narrow, tiles)
    return Quantiser(scales_of(module, gemm) if fp8.x.needs_state else None, fp8.g.format, narrow)


def draw(seed, shape, dtype, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32).astype(formats.dtype(dtype).numpy)


def make(kind, device, dtype, **options):
    """A module whose parameters, biases and gammas too, are random."""
    module = kind(params_dtype=dtype, device=device, **options)
    state = {}
    for i, (name, parameter) in enumerate(module.named_parameters()):
        base = 1.0 if name.endswith("norm_weight") or (name == "weight" and parameter.view.ndim == 1) else 0.0
        noise = draw(100 + i, parameter.shape, "float32", 0.1) + np.float32(base)
        state[name] = noise.astype(formats.dtype(dtype).numpy)
    module.load_state_dict(state)
    return module


def step(module, mode, x, g, **options):
    """One forward and backward; (output, x's gradient, gradients by name), float64 matrices."""
    x = tensor(
        x,
        requires_grad=True,
        device=module.device if hasattr(module, "device") else next(module.parameters()).device,
    )
    with scope(mode):
        y = module(x, **options)
    y.backward(g)
    grads = {name: f64(parameter.grad) for name, parameter in module.named_parameters()}
    module.zero_grad()
    return f64(y).reshape(-1, y.shape[-1]), f64(x.grad).reshape(-1, x.shape[-1]), grads
