"""The same module through both frontends, and a step of it: what the torch frontend gives is compared with
the native one bit for bit."""

from __future__ import annotations

import contextlib
from typing import Any

import fp8kit_torch as ft
import numpy as np
import torch

import fp8kit as fk
from fp8kit import arrays, formats, nn
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

RECIPES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=3, margin=1),
    "recent": DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
WIDTH = 48
KINDS: dict[str, dict[str, Any]] = {
    "Linear": {"in_features": WIDTH, "out_features": 56},
    "LayerNormLinear": {
        "in_features": WIDTH,
        "out_features": 56,
        "parameters_split": {"query": 24, "key": 32},
    },
    "LayerNormMLP": {"hidden_size": WIDTH, "ffn_hidden_size": 40},
    "LayerNorm": {"normalized_shape": WIDTH},
    "RMSNorm": {"normalized_shape": WIDTH},
    "TransformerLayer": {
        "hidden_size": WIDTH,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_gqa_groups": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}


def scope(frontend, recipe):
    return contextlib.nullcontext() if recipe is None else frontend.autocast(recipe=recipe)


def twins(kind, device, dtype="float32", **options):
    """(torch module, native module) with the same random parameters."""
    options = KINDS[kind] | options
    ours = getattr(ft, kind)(device=device, params_dtype=getattr(torch, dtype), **options)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    native = getattr(nn, kind)(device=device, params_dtype=dtype, **options)
    native.load_state_dict({name: numpy_of(p) for name, p in ours.named_parameters()})
    return ours, native


def numpy_of(tensor):
    """A tensor's values as a NumPy array of its dtype, bfloat16 too."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().view(formats.bfloat16.numpy).copy()
    return host.numpy().copy()


def bits(value):
    array = numpy_of(value) if isinstance(value, torch.Tensor) else arrays.as_view(value).numpy()
    return np.ascontiguousarray(array).view(np.uint8)


def same(got, want, what):
    np.testing.assert_array_equal(bits(got), bits(want), err_msg=str(what))


def same_state(ours, native):
    """Every FP8 state of both trees, bit for bit. Returns how many there are."""
    count = 0
    for path, module in native.named_modules():
        for name, state in getattr(module, "fp8_meta", {}).items():
            for field in ("scale", "scale_inv", "amax_history"):
                same(
                    getattr(ours.get_submodule(path).fp8_meta[name], field),
                    state.views[field],
                    (path, name, field),
                )
                count += 1
    return count


def batches(device, dtype="float32", steps=3, shape=(5, 3, WIDTH)):
    for i in range(steps):
        yield torch.randn(shape, dtype=getattr(torch, dtype), device=device) * 2**i


def native_step(native, recipe, x, g, **options):
    xn = fk.tensor(numpy_of(x), requires_grad=True, device=str(x.device))
    native.zero_grad()
    with scope(fk, recipe):
        y = native(xn, **options)
    y.backward(arrays.to(arrays.as_view(numpy_of(g)), y.device))
    return y, xn.grad, {name: p.grad for name, p in native.named_parameters()}


def torch_step(ours, call, recipe, x, g=None, **options):
    xt = x.clone().requires_grad_()
    ours.zero_grad()
    with scope(ft, recipe):
        y = call(xt, **options)
    g = torch.randn_like(y) if g is None else g
    y.backward(g)
    return y, xt.grad, {name: p.grad for name, p in ours.named_parameters()}, g


def same_steps(ours, native, call, recipe, device, dtype="float32", around=None, **options):
    """Three steps through both frontends, everything compared. ``around``: the recipe of the autocast that
    the test itself enters."""
    for x in batches(device, dtype):
        y, dx, grads, g = torch_step(ours, call, around, x, **options)
        yn, dxn, gradsn = native_step(native, recipe, x, g, **options)
        same(y, yn.view, "y")
        same(dx, dxn, "dx")
        for name, grad in grads.items():
            same(grad, gradsn[name], name)
        states = same_state(ours, native)
        assert (states > 0) == (
            recipe is not None and recipe.delayed() and bool(getattr(native, "fp8_meta", True))
        )


HELD_SIZES = {"Linear": (WIDTH, 40), "LayerNormLinear": (WIDTH, 40), "LayerNormMLP": (WIDTH, 64)}


def held_pair(kind, device, recipe, dtype=torch.float32, **options):
    """(a module whose weights are kept in FP8, one with the weights from before the cast)."""
    with ft.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        held = getattr(ft, kind)(*HELD_SIZES[kind], device=device, params_dtype=dtype, **options)
    plain = getattr(ft, kind)(*HELD_SIZES[kind], device=device, params_dtype=dtype, **options)
    with torch.no_grad():
        for name, parameter in held.named_parameters():
            own = (
                parameter.get_high_precision_init_val()
                if isinstance(parameter, ft.QuantizedTensor)
                else parameter
            )
            plain.get_parameter(name).copy_(own)
    return held, plain
