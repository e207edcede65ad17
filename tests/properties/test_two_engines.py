"""The same random call on the CPU and on a GPU: both give the same numbers, within their rounding, or both
refuse it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import nn, recipe
from fp8kit.errors import Fp8kitError
from fp8kit.testing import assert_close, assert_same_bits, epsilon
from tests.support.draws import FLOATS, HIGH, examples, host, seeds, shapes, values

pytestmark = pytest.mark.gpu
DEVICES = ("cpu", "cuda")
F32 = np.dtype(np.float32)


def both(call):
    """What ``call(device)`` gives on each device: two results, or two refusals of the same kind and words
    (None)."""
    found = []
    for device in DEVICES:
        try:
            found.append(call(device))
        except Fp8kitError as error:
            found.append(error)
    refused = [isinstance(each, Fp8kitError) for each in found]
    assert refused[0] == refused[1], found
    if not refused[0]:
        return found
    assert type(found[0]) is type(found[1]), found
    assert str(found[0]) == str(found[1])
    return None


def alike(what, found, magnitude, terms, roundings=1):
    """Two sums of ``terms`` products, rounded to their dtype so many times: each within its rounding of the
    other."""
    cpu, gpu = (host(each) for each in found)
    slack = 2 * ((terms + 12) * 2.0**-24 + roundings * epsilon(cpu.dtype)) * magnitude
    assert_close(what, gpu.astype(np.float64), cpu.astype(np.float64), "float64", slack)


@examples(100)
@given(
    shapes(0, 3),
    st.sampled_from(FLOATS),
    st.sampled_from([fk.E4M3, fk.E5M2, fk.E2M1]),
    st.booleans(),
    seeds,
    st.booleans(),
    st.sampled_from(["tensor", "row", "block_1x128", "block_128x128", "mx_1x32"]),
)
def test_casts(shape, dtype, fmt, saturate, seed, stochastic, scaling):
    x = values(shape, dtype, seed, wild=True)
    rng = {"rounding": "stochastic", "rng": (seed, 3)} if stochastic else {}

    def cast(device):
        q = fk.quantize(fk.tensor(x, device=device), fmt, scaling=scaling, saturate=saturate, **rng)
        return q.data, q.scale_inv, q.dequantize()

    found = both(cast)
    if found is None:
        return
    for what, cpu, gpu in zip(("codes", "scale_inv", "values"), *found, strict=True):
        assert_same_bits(what, one_nan(host(gpu)), one_nan(host(cpu)))


def one_nan(a):
    """The array with one bit pattern for NaN: a GPU's arithmetic gives 0x7fffffff, a CPU's keeps the
    operand's sign and payload."""
    return a if a.dtype.itemsize == 1 else np.where(np.isnan(a), a.dtype.type(np.nan), a)


LAYERS = {
    "Linear": lambda width, **o: nn.Linear(width, 24, **o),
    "LayerNormLinear": lambda width, **o: nn.LayerNormLinear(width, 24, **o),
    "LayerNormMLP": lambda width, **o: nn.LayerNormMLP(width, 40, activation="swiglu", **o),
    "LayerNorm": lambda width, **o: nn.LayerNorm(width, **o),
    "RMSNorm": lambda width, **o: nn.RMSNorm(width, **o),
}


@examples(100)
@given(
    st.sampled_from(list(LAYERS)),
    shapes(0, 3),
    st.sampled_from([1, 8, 16, 33]),
    st.sampled_from(HIGH),
    st.sampled_from(HIGH),
    seeds,
    st.booleans(),
)
def test_layers_in_high_precision(kind, shape, width, dtype, other, seed, fits):
    """With rows of the right width and dtype, or of another."""
    x = values((*shape[:-1], width) if fits and shape else shape, dtype if fits else other, seed) / 8

    def run(device):
        nn.manual_seed(seed % 1000)
        layer = LAYERS[kind](width, params_dtype=dtype, device=device)
        leaf = fk.tensor(x, requires_grad=True, device=device)
        y = layer(leaf)
        y.backward(values(y.shape, dtype, seed + 1))
        return y, leaf.grad, *(parameter.grad for parameter in layer.parameters())

    found = both(run)
    if width == 1 and "Norm" in kind:  # 0 / 0: rounding errors divided by nothing
        return
    for i, (cpu, gpu) in enumerate(zip(*(found or ((), ())), strict=True)):
        size = np.abs(host(cpu).astype(np.float64)).max(initial=0)
        alike(f"array {i}", (cpu, gpu), 64 * (1 + size), 64 + x.size, 4)


@examples(40)
@given(
    st.sampled_from([recipe.DelayedScaling(amax_history_len=2), recipe.Float8CurrentScaling()]),
    st.sampled_from([1, 3, 16, 40]),
    st.sampled_from([5, 16, 48]),
    seeds,
)
def test_fp8_products(how, rows, width, seed):
    """One step in FP8: the casts agree bit for bit, so that only the sums' order and the accumulation's width
    differ."""
    x = values((rows, width), F32, seed)

    def run(device):
        nn.manual_seed(seed % 1000)
        layer = nn.Linear(width, 24, device=device)
        with fk.autocast(recipe=how):
            return layer(fk.tensor(x, device=device)), layer.weight

    (cpu, weight), (gpu, _) = both(run)
    # tensor cores lose at most 2^-13 of the largest product's magnitude an addition of 32 (docs/numerics.md)
    magnitude = np.abs(x).max() * np.abs(host(weight)).max() * width
    assert_close("y", host(gpu), host(cpu).astype(np.float64), "float32", 2.0**-12 * magnitude)


@examples(60)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 3, 17, 64]),
    st.sampled_from([1, 2]),
    st.sampled_from([4, 16, 64]),
    st.sampled_from(["no_mask", "causal", "padding", "padding_causal"]),
    st.sampled_from(["sbhd", "bshd"]),
    st.sampled_from(HIGH),
    seeds,
)
def test_attention(batch, length, heads, dim, mask, form, dtype, seed):
    leading = (length, batch) if form == "sbhd" else (batch, length)
    q, k, v = (values((*leading, heads, dim), F32, seed + i).clip(-2, 2).astype(dtype) for i in range(3))
    lengths = np.random.default_rng(seed).integers(0, length + 1, batch)
    sums = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    given_ = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums} if "padding" in mask else {}

    def run(device):
        layer = nn.DotProductAttention(heads, dim, qkv_format=form, attn_mask_type=mask, device=device)
        leaves = [fk.tensor(x, requires_grad=True, device=device) for x in (q, k, v)]
        o = layer(*leaves, **given_)
        o.backward(values(o.shape, F32, seed + 3).clip(-2, 2).astype(dtype))
        return o, *(leaf.grad for leaf in leaves)

    for what, cpu, gpu in zip(("o", "dq", "dk", "dv"), *both(run), strict=True):
        size = 1 + np.abs(host(cpu).astype(np.float64)).max(initial=0)
        alike(what, (cpu, gpu), 16 * size, 64 * (dim + length), 16)


@examples(60)
@given(
    shapes(1, 3), st.sampled_from(HIGH), st.sampled_from(["mean", "none"]), st.sampled_from([0.0, 0.1]), seeds
)
def test_losses(shape, dtype, reduction, smoothing, seed):
    x = values(shape, dtype, seed)
    targets = np.random.default_rng(seed).integers(0, max(shape[-1], 1), shape[:-1])

    def run(device):
        leaf = fk.tensor(x, requires_grad=True, device=device)
        loss = nn.cross_entropy(
            leaf, targets if device == "cpu" else fk.tensor(targets, device=device), reduction, smoothing
        )
        if reduction == "mean":
            loss.backward()
        return (loss, leaf.grad) if reduction == "mean" else (loss,)

    found = both(run)
    for i, (cpu, gpu) in enumerate(zip(*(found or ((), ())), strict=True)):
        alike(
            f"array {i}",
            (cpu, gpu),
            4 * (1 + np.abs(x.astype(np.float64)).max(initial=0)),
            shape[-1] + x.size,
            2,
        )


@examples(40)
@given(shapes(0, 3), st.sampled_from([None, "cpu", "cuda"]), st.sampled_from(["int32", "float32"]), seeds)
def test_mixed_devices_are_refused(shape, where, kind, seed):
    """Parameters here, an array there."""
    x = fk.tensor(values((*shape, 8), F32, seed), device=where)
    for device in DEVICES:
        layer = nn.Linear(8, 4, device=device)
        if str(x.device).startswith(device):
            assert layer(x).shape == (*shape, 4)
            continue
        with pytest.raises(fk.BackendError, match="device"):
            layer(x)
    with pytest.raises(Fp8kitError):
        fk.quantize(x, scale=np.ones((3, 1, 2), kind))
