"""Schemes that train in 4 bits, against their rules written down once more; and gradients through rotations,
masks and values that are cast anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import blocks, recipe_check
from fp8kit.arrays import CPU
from fp8kit.formats import E2M1, E4M3
from fp8kit.quantization import Gemm, Quantization, Quantizer
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_close, sum_slack
from fp8kit.testing.contract.rotations import signs

M, N, K, SEED = 64, 96, 160, 7
STEPS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TURN = {"hadamard": 32, "signs": "random"}


def sylvester(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def transposed(x, n, kind="plus"):
    """x in float64, every n neighbours of its rows rotated, and the way back."""
    turn = rotation(x.shape[1], n, kind)
    return x @ turn, lambda y: y @ turn.T


def rotation(size, n, kind):
    drawn = signs(kind, size, np.array([SEED, 0], np.int64))
    drawn = blocks.signs_of(kind, size) if isinstance(drawn, str) else drawn
    return drawn.astype(np.float64)[:, None] * np.kron(np.eye(size // n), sylvester(n)) / np.sqrt(n)


def same(what, got, left, right, mask=1, turn=None, dtype="float32"):
    """``got`` is left right, where ``mask`` is not 0, times ``turn``, but for the roundings of float32: of
    the product's sum and of a rotation's, which adds 32 neighbours in five steps and multiplies them; and
    that of the result."""
    exact, size, terms = (left @ right) * mask, np.abs(left) @ np.abs(right) * mask, left.shape[1]
    if turn is not None:
        exact, size, terms = exact @ turn, size @ np.abs(turn), terms + 6
    assert_close(what, got, exact, dtype, sum_slack(size, terms))


def quest(x):
    """Quartet's forward cast of rotated rows, in float64: values and mask."""
    parts = x.reshape(len(x), -1, 32)
    scale = 2.0 ** np.floor(np.log2(2.92247856 / 6 * parts.std(2, keepdims=True) + 1e-8))
    scaled = parts / scale
    places = np.searchsorted((STEPS[1:] + STEPS[:-1]) / 2, np.abs(scaled), side="left")  # ties down
    values = np.sign(scaled) * STEPS[places] * scale
    return values.reshape(x.shape), (np.abs(scaled) <= 6).reshape(x.shape)


def data():
    random = np.random.default_rng(3)
    return [random.standard_normal(shape).astype(np.float32) for shape in ((M, K), (N, K), (M, N))]


def test_quartet_is_its_algorithm():
    """Forward to the bit but for the sums; backward, whose random bits are the casts' own, with the operands
    that the layer multiplied."""
    x, w, g = data()
    found = recipe_check.check(NAMED["quartet"].recipe, x, w, g, device=CPU, seed=SEED)
    (x_h, _), (w_h, _) = transposed(x.astype(np.float64), 32), transposed(w.astype(np.float64), 32)
    (x_q, mask_x), (w_q, mask_w) = quest(x_h), quest(w_h)
    assert 0.02 < 1 - mask_x.mean() < 0.3
    for own, name in ((x_q, "x"), (w_q, "w")):
        assert (found.casts["fprop", name].values == own).mean() > 0.999  # a sum in float32 may tie otherwise
    x_q, w_q = (found.casts["fprop", name].values for name in "xw")
    same("y", found.found["y"], x_q, w_q.T)
    # backward's operands are fprop's values, rotated by drawn signs, 3/4 of them rounded stochastically
    pairs = {"dgrad": ("w", w_q.T), "wgrad": ("x", x_q.T)}
    for gemm, (name, source) in pairs.items():
        own, turn = found.casts[gemm, name], rotation(source.shape[1], 32, "random")
        same("rotated", own.source.T, source, turn)
        # a code is a neighbour, at most a third of the largest away, and nothing is clipped; x * scale rounds
        rounded = np.abs(own.source) * 2.0**-23
        assert (np.abs(own.values - own.source) <= own.most / 3 + rounded).all()
        assert (np.abs(own.source) <= own.most + rounded).all()
    back = rotation(K, 32, "plus").T
    g_q, w_t = found.casts["dgrad", "g"].values, found.casts["dgrad", "w"].values
    same("dx", found.found["dx"], g_q, w_t, mask_x, back)
    g_t, x_t = found.casts["wgrad", "g"].values, found.casts["wgrad", "x"].values
    same("dw", found.found["dw"], g_t.T, x_t, mask_w, back)


@pytest.mark.parametrize("compute", ["dequantized", "recast"])
@pytest.mark.parametrize("kind", ["plus", "te", "random"])
@pytest.mark.parametrize("granularity", ["mx_1x32", "nvfp4_1x16", "tensor", "row"])
def test_gradients_come_back_through_the_rotation(compute, kind, granularity):
    """Where backward multiplies the rotated values of fprop, dx and dW are those of the tensors as they are:
    in E4M3 near the exact ones. A cast's relative error is evenly spread up to 2^-4 at most, 2^-4 / sqrt(3)
    its deviation; a result has up to three casts."""
    rule = "rceil" if granularity.startswith("mx") else "exact"
    own = Quantizer(E4M3, granularity, scale_rule=rule, hadamard=32, signs=kind)
    plain = replace(own, hadamard=0, signs="plus")
    if compute == "recast":
        backward = Gemm(plain, plain, recast=True)
    else:
        backward = Gemm(own, own, compute="dequantized")
    recipe = fk.recipe.DataRecipe(Quantization(Gemm(own, own), backward, backward), "back")
    for dtype in ("float32", "float16"):
        found = recipe_check.check(recipe, *data(), dtype=dtype, device=CPU, seed=SEED)
        assert max(error.relative_error for error in found.results.values()) < 2.0**-4, found.results
        if compute == "dequantized":  # g is exact
            g, wide = data()[2].astype(dtype).astype(np.float64), found.casts["fprop", "w"].values
            same("dx", found.found["dx"], g, wide, 1, rotation(K, 32, kind).T, dtype)


def test_masks_without_a_rotation_and_of_what_is_cast_from_the_source():
    x, w, g = data()
    own = Quantizer(E2M1, "mx_1x32", scale_rule="floor", factor=1.5, clip_gradient=True)
    plain, turn = Quantizer(E4M3, "mx_1x32", scale_rule="rceil"), {"hadamard": 32, "signs": "te"}
    for rotated in (own, replace(own, **turn)):
        recipe = fk.recipe.DataRecipe(
            Quantization(Gemm(rotated, rotated), Gemm(plain, plain), Gemm(plain, plain)), "masked"
        )
        found = recipe_check.check(recipe, x, w, g, device=CPU)
        cast = found.casts["fprop", "x"]
        mask = np.abs(cast.source) <= cast.most  # scales of powers of two, times 1.5: exact
        assert 0.01 < 1 - mask.mean() < 0.5
        g_q, w_t = found.casts["dgrad", "g"].values, found.casts["dgrad", "w"].values
        if rotated.hadamard:  # the gradient of the rotated input, masked, and back
            turn = rotation(K, 32, "te")
            masked = ((g_q @ w_t) @ turn) * mask
            size = ((np.abs(g_q) @ np.abs(w_t)) @ np.abs(turn)) @ np.abs(turn.T)
            assert_close("dx", found.found["dx"], masked @ turn.T, "float32", sum_slack(size, N + 12))
        else:
            same("dx", found.found["dx"], g_q, w_t, mask)


def eden(x, words, group=128):
    """x rotated, and the values of its codes."""
    lying = blocks.hadamard(x, group, "plus")
    amax = np.abs(lying).max()
    _, scale, value = blocks.eden(lying, np.float32(amax), words, group)
    q = np.repeat(scale, 16, 1) * lying
    q = np.sign(q) * STEPS[np.searchsorted((STEPS[1:] + STEPS[:-1]) / 2, np.abs(q))]
    inverse = blocks.nvfp4_tensor_scale(np.float32(amax), E2M1, 255.99)[1]
    return lying, q * np.repeat(value, 16, 1) * inverse


@pytest.mark.combinations
def test_eden_restores_the_length_and_is_unbiased():
    """The projection of a block that is a group on what was cast is its square, over the stochastic rounding
    of the scales; that of several blocks whose scales differ nearly so. Over random signs the mean is x."""
    random = np.random.default_rng(0)
    x = random.standard_normal((1, 128)).astype(np.float32)
    for group, slack in ((16, 2.0**-20), (128, 0.01)):
        ratios = []
        for _ in range(300):
            words = random.integers(0, 2**32, (1, 8), dtype=np.uint32)
            lying, values = eden(x, words, group)
            ratios.append((values * lying).sum() / (lying.astype(np.float64) ** 2).sum())
        error = np.std(ratios) / np.sqrt(len(ratios))
        assert abs(np.mean(ratios) - 1) < 4 * error + slack
    total, count = np.zeros(128), 1000
    for _ in range(count):
        flips = random.choice([-1.0, 1.0], 128).astype(np.float32)
        _, values = eden(x * flips, random.integers(0, 2**32, (1, 8), dtype=np.uint32))
        total += (transposed(np.eye(128), 128)[1](values) * flips)[0]
    apart = total / count - x[0]
    one = 0.11 * np.sqrt(np.mean(x**2))  # the deviation of one cast of a coordinate, from A2's 20 dB
    assert np.sqrt(np.mean(apart**2)) < 1.5 * one / np.sqrt(count) * np.sqrt(1 + 2 / 128), apart


def test_moss_keeps_what_one_scale_loses():
    """Blocks 2^-18 of the largest: a scale of the tensor alone flushes them, two levels do not; the values
    are those of MX of x times the tensor's scale."""
    x, w, g = data()
    x[:, 32:] *= 2.0**-18
    found = recipe_check.check(NAMED["moss"].recipe, x, w, g, device=CPU)
    values, small = found.casts["fprop", "x"].values, np.s_[:, 32:]
    assert np.abs(values - x)[small].max() < 2.0**-4 * np.abs(x)[small].max()
    one = fk.quantize(x, E4M3).dequantize()
    assert np.abs(one - x)[small].max() > 2.0**-4 * np.abs(x)[small].max()
    scale, inverse = blocks.nvfp4_tensor_scale(np.abs(x).max(), E4M3, 1.0)
    mx = fk.quantize(x * scale, E4M3, scaling="mx_1x32", scale_rule="rceil").dequantize()
    exact = mx * np.float64(inverse)
    assert_close("values", values, exact, "float32", 2.0**-22 * np.abs(exact))  # two roundings, each twice
