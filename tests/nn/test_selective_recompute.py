"""``LayerNormMLP(checkpoint=True)``: what is kept, what is computed again, and that the bits are those of
computing it once."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.autograd import call, tensor
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, FormatError
from fp8kit.execution import plans
from fp8kit.ops.norm import NormSpec
from fp8kit.ops.norm_mlp import NormMLPSpec, norm_mlp
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantizer
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.spec import Meta, WorkingSet
from fp8kit.testing.contract import put
from tests.support.layers import draw

RECIPES = {
    "high": None,
    "delayed": DelayedScaling().quantization,
    "current": Float8CurrentScaling().quantization,
    "block": Float8BlockScaling().quantization,
    "given": Float8CurrentScaling().quantization.map(Quantizer.with_amax),
}
ROWS, H, F = 48, 32, 64
ALL = frozenset({"x", "norm_weight", "norm_bias", "fc1_weight0", "fc1_bias0", "fc2_weight0", "fc2_bias0"})
NEEDS = {
    "all": ALL,
    "no fc2 weight": ALL - {"fc2_weight0"},
    "fc2 weight": frozenset({"fc2_weight0"}),
    "fc1 bias": frozenset({"fc1_bias0"}),
    "no fc1 weight": ALL - {"fc1_weight0"},
    "fc2 bias": frozenset({"fc2_bias0"}),
}


class Counting:
    """The kernels of a device; counts their calls."""

    def __init__(self, kernels):
        self.kernels, self.calls = kernels, Counter()

    def __getattr__(self, name):
        kernel = getattr(self.kernels, name)

        def call(*arguments, **options):
            self.calls[name] += 1
            return kernel(*arguments, **options)

        return call if callable(kernel) and not name.endswith("_workspace") else kernel


def allocate(metas, device):
    """Buffers by name, zeroed where the operation accumulates."""
    make = {True: arrays.zeros, False: arrays.empty}
    return {name: make[meta.zero](meta.shape, meta.dtype, device) for name, meta in metas.items()}


def spec_of(recipe, recompute, activation="swiglu", return_norm=False):
    fp8 = RECIPES[recipe]
    parts = 2 if activation == "swiglu" else 1
    return NormMLPSpec(
        NormSpec(H),
        ProductSpec(H, (parts * F,), bias="deferred", fp8=fp8, prefix="fc1_"),
        ProductSpec(F, (H,), fp8=fp8, prefix="fc2_"),
        activation,
        return_norm=return_norm,
        recompute=recompute,
    )


def inputs_of(spec, recipe, device):
    shapes = {
        "x": (ROWS, H),
        "norm_weight": (H,),
        "norm_bias": (H,),
        "fc1_weight0": (spec.fc1.out_features, H),
        "fc1_bias0": (spec.fc1.out_features,),
        "fc2_weight0": (H, F),
        "fc2_bias0": (H,),
    }
    values = {name: draw(i, shape, "bfloat16") for i, (name, shape) in enumerate(shapes.items())}
    suffix = {"delayed": "scale", "given": "amax_in"}.get(recipe)
    if suffix:
        for i, operand in enumerate(("fc1_x", "fc1_w", "fc2_x", "fc2_w")):
            values[f"{operand}_{suffix}"] = np.array([8.0 + i], np.float32)
    return {name: put(value, device) for name, value in values.items()}


def run(spec, recipe, needs, device):
    """(outputs, gradients, kernel calls of backward, signature). The scales change between the two, as those
    of delayed scaling do."""
    device = arrays.device(device)
    views, kernels = inputs_of(spec, recipe, device), Counting(dispatch.kernels(device))
    metas = {name: Meta(view.shape, view.dtype) for name, view in views.items()}
    plan = norm_mlp.plan(spec, metas, needs, kernels)
    outputs, saved = allocate(plan.signature.outputs, device), allocate(plan.signature.saved, device)
    stream = arrays.current_stream(device)
    scratch = allocate(plan.scratch, device)
    norm_mlp.forward(plan, WorkingSet(kernels, views, outputs, saved, scratch, stream))
    for name, view in views.items():
        if name.endswith(("_scale", "_amax_in")):
            arrays.zero_(view)
    kept = {name: views[name] if name in views else outputs[name] for name in plan.signature.kept}
    late = {"delayed": "g_scale", "given": "g_amax_in"}.get(recipe)
    if late:
        kept |= {f"{fc}_{late}": put(np.array([64.0], np.float32), device) for fc in ("fc1", "fc2")}
    cotangents = {"y": put(draw(99, (ROWS, H), "bfloat16", 2.0**-6), device)}
    grads = allocate(plan.signature.grads, device)
    kernels.calls.clear()
    scratch = allocate(plan.backward_scratch, device)
    norm_mlp.backward(plan, WorkingSet(kernels, kept, grads, saved, scratch, stream), cotangents)
    arrays.synchronize(device)
    found = {
        name: np.asarray(view.numpy()).tobytes()
        for name, view in {**outputs, **{f"d{n}": v for n, v in grads.items()}}.items()
    }
    return found, kernels.calls, plan.signature


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_no_recomputation(device, recipe, needs):
    return_norm = needs == "all"
    with fk.deterministic():
        want, once, _ = run(spec_of(recipe, False, return_norm=return_norm), recipe, NEEDS[needs], device)
        got, calls, _ = run(spec_of(recipe, True, return_norm=return_norm), recipe, NEEDS[needs], device)
    assert got == want
    more = calls - once
    if needs == "fc2 bias":
        assert not more
        return
    # norm and fc1 once more, the activation where its result is read, fc2's product never
    products = sum(more[name] for name in ("gemm", "fp8_gemm", "block_gemm"))
    assert (more["norm_fwd"], products, more["act_fwd"], more["amax"]) == (
        1,
        1,
        int("fc2_weight0" in NEEDS[needs]),
        0,
    )


def size(metas):
    return sum(int(np.prod(meta.shape)) * meta.dtype.itemsize for meta in metas.values())


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_only_numbers_are_saved(device, recipe, activation):
    """Without: statistics, the activation's input, and the operands of the weights' gradients. With: 16 bytes
    for each cast's scale."""
    parts = 2 if activation == "swiglu" else 1
    plain, again = (
        run(spec_of(recipe, recompute, activation), recipe, ALL, device)[2] for recompute in (False, True)
    )
    activations = 2 * 4 * ROWS + 2 * ROWS * parts * F + (2 if recipe == "high" else 1) * ROWS * (H + F)
    assert size(plain.saved) >= activations
    assert size(again.saved) == (0 if recipe in ("high", "block") else 4 * 16)
    metas = {**plain.outputs, **again.outputs}
    assert not [name for name in again.kept if name in metas]  # inputs alone
    assert {"x", "norm_weight", "norm_bias", "fc1_weight0", "fc1_bias0", "fc2_weight0"} == set(again.kept)


def living(monkeypatch, module, x):
    """Bytes that are alive after a forward pass and were not before, the output aside."""
    provider, alive = arrays.provider(arrays.CPU), {}

    def alloc(nbytes, device, plain=provider.alloc):
        ptr, owner = plain(nbytes, device)
        alive[ptr] = nbytes
        weakref.finalize(owner, alive.pop, ptr, None)
        return ptr, owner

    monkeypatch.setattr(provider, "alloc", alloc)
    plans.plans.clear()  # which know the allocator
    call.memory_of.cache_clear()
    with fk.autocast(recipe=Float8CurrentScaling()):
        y = module(x)
    gc.collect()
    monkeypatch.undo()
    plans.plans.clear()
    call.memory_of.cache_clear()
    return sum(alive.values()) - y.numpy().nbytes


def test_the_tape_holds_no_activation(monkeypatch):
    """Measured, in FP8, at a size where activations outweigh the smallest allocations."""
    rows, hidden, width = 1024, 64, 256
    module = nn.LayerNormMLP(hidden, width, activation="geglu", params_dtype="bfloat16", device="cpu")
    x = tensor(draw(1, (rows, hidden), "bfloat16"), requires_grad=True)
    module(x)  # plans are made once
    once = living(monkeypatch, module, x)
    module.checkpoint = True
    again = living(monkeypatch, module, x)
    weights = hidden * 2 * width + width * hidden
    # statistics, fc1's output, both inputs and weights in FP8
    assert once >= rows * (8 + 2 * 2 * width + hidden + width) + weights
    assert again < 4096


def test_activation_params_are_checked():
    options = {"hidden_size": 8, "ffn_hidden_size": 8, "device": "cpu"}
    assert nn.LayerNormMLP(**options, activation="clamped_swiglu")._spec.activation_params == (
        7.0,
        1.702,
        1.0,
    )
    for activation, params, words in (
        ("clamped_swiglu", {"limits": 1.0}, "limits.*limit, alpha, glu_linear_offset"),
        ("gelu", {"limit": 1.0}, "none for gelu"),
        ("clamped_swiglu", {"limit": 0.0}, "limit.*finite number and > 0"),
        ("clamped_swiglu", {"alpha": float("nan")}, "alpha.*finite"),
        ("clamped_swiglu", {"alpha": "1"}, "alpha.*finite"),
        ("mish", None, "mish.*sreglu"),
    ):
        kind = ArgumentError if activation == "mish" else FormatError  # no such word; no such numbers
        with pytest.raises(kind, match=f"LayerNormMLP: .*{words}"):
            nn.LayerNormMLP(**options, activation=activation, activation_params=params)
    with pytest.raises(FormatError, match=r"norm_mlp: activation_params: got \(1.0,\), expected 3 numbers"):
        replace(spec_of("high", False), activation="clamped_swiglu", activation_params=(1.0,))
