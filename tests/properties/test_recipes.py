"""Recipes as data, drawn at random: a Linear computes the products of the operands that the data say, or the
recipe is refused, by name and before anything runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8kit as fk
from fp8kit import recipe_check
from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.arrays import CPU
from fp8kit.blocks import signs_of
from fp8kit.errors import Fp8kitError, RecipeError, UnsupportedError
from fp8kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2
from fp8kit.quantization import OPERANDS, ROTATIONS, SIGNS, TILES, Gemm, Quantization, Quantizer
from fp8kit.recipe import DataRecipe
from fp8kit.testing import assert_close, assert_same_bits, sum_slack
from fp8kit.testing.contract.rotations import signs
from tests.support.draws import attempt, examples

M, K, N = 34, 144, 20
KINDS = ["high_precision", "dequantized"]
ODD = (
    *({"scale_source": source} for source in ("static", "amax", "delayed")),
    *({"scale_rule": rule} for rule in ("te", "exact")),
    {"static_scale": 4.0, "scale_source": "static", "granularity": "tensor", "scale_rule": "exact"},
    {"hadamard": 16, "signs": "te"},
    *(("hopper_fast", kind) for kind in ("quantized", *KINDS)),
)
RULES = {"mx": ("te", "floor", "ceil", "even", "rceil"), "block": ("exact", "power_2"), "nvfp4": ("exact",)}


@st.composite
def quantizers(draw, rotation, native):
    """A rule of one operand. ``native``: of those that FP8 products take, by whatever sums."""
    names = ["tensor", "row", "block_1x128"] if native else list(TILES)
    granularity = draw(st.sampled_from(names))
    rules = RULES.get(granularity.partition("_")[0], ("exact", "power_2"))
    wide = [E4M3, E4M3, E5M2] if native else [E4M3, E5M2, E2M1, E3M2, E2M3, fk.Format("E3M3", 3, 3)]
    static = granularity == "tensor" and draw(st.booleans())
    return Quantizer(
        draw(st.sampled_from(wide)),
        granularity,
        scale_source="static" if static else "current",
        scale_rule=draw(st.sampled_from(rules)),
        epsilon=draw(st.sampled_from([0.0, 0.0, 1e-4])),
        stochastic_bits=0 if native else draw(st.sampled_from([0, 0, 0, 4, 32])),
        hadamard=rotation[0],
        signs=rotation[1],
    )


@st.composite
def recipes(draw):
    """A recipe, or the error that says why there is none; one in five asks for something odd."""
    native, odd = draw(st.booleans()), draw(st.integers(0, 4)) == 0
    turns = [(0, "plus")] if native else [(0, "plus"), *((n, s) for n in ROTATIONS for s in SIGNS)]
    known = [*ACCUMULATIONS, Accumulation(20, 16, 64)] if native else []
    gemms = []
    for _ in OPERANDS:
        operand = quantizers(draw(st.sampled_from(turns)), native)
        how = draw(st.sampled_from(["split", "split", "fast", *known]))
        gemms.append(
            [draw(operand), draw(operand), how, draw(st.sampled_from(["quantized"] * 4 + KINDS[:1]))]
        )
    if native or draw(st.booleans()):  # operands that are cast alike for all GEMMs, as most recipes have them
        same = {"hadamard": 0, "signs": "plus"}
        if native:
            same |= {"granularity": gemms[0][0].granularity, "scale_source": "current"}
            same |= {"scale_rule": gemms[0][0].scale_rule, "format": E4M3}
        x, w, g = (replace(each, **same) for each in (gemms[0][0], gemms[0][1], gemms[1][0]))
        for gemm, pair in zip(gemms, ((x, w), (g, w), (g, x)), strict=True):
            gemm[:2] = pair
    if odd:
        gemm = gemms[draw(st.integers(0, 2))]
        change = draw(st.sampled_from(ODD))
        if isinstance(change, dict):
            gemm[0] = attempt(lambda: replace(gemm[0], **change))
        else:
            gemm[2:] = change
    if any(isinstance(each, Fp8kitError) for gemm in gemms for each in gemm):
        return RecipeError()
    return attempt(lambda: DataRecipe(Quantization(*(Gemm(*gemm) for gemm in gemms)), "drawn"))


def matrices(seed):
    """x, w and g of some binades."""
    random = np.random.default_rng(seed)
    for shape in ((M, K), (N, K), (M, N)):
        yield (random.standard_normal(shape) * np.exp2(random.integers(-2, 3, shape))).astype(np.float32)


def narrow(how, terms):
    """What sums of a model may lose of the sum of magnitudes: each of an instruction's terms, and the
    accumulator, less than 2^-F of the largest, and the sum what its accumulator has no room for."""
    how = ACCUMULATIONS.get(how, how)
    if isinstance(how, str) or how.exact:
        return 0.0
    instructions = -(-terms // how.chunk) + terms // 16
    return instructions * ((how.chunk + 1) * 2.0**-how.fraction_bits + 2.0 ** -min(how.fraction_bits, 23))


@examples(120)
@given(recipes(), st.integers(0, 2**30))
def test_a_linear_is_the_products_of_its_operands(recipe, seed):
    if isinstance(recipe, Fp8kitError):
        assert isinstance(recipe, RecipeError)
        return
    x, w, g = matrices(seed)
    found = attempt(lambda: recipe_check.check(recipe, x, w, g, device=CPU, seed=seed))
    if isinstance(found, Fp8kitError):
        assert isinstance(found, UnsupportedError | RecipeError), found
        return
    own = {"x": x, "w": w, "g": g}

    def value(gemm, matrix):
        cast = found.casts[gemm, matrix]
        return own[matrix].astype(np.float64) if cast is None else cast.values

    def back(values):
        """What multiplied the rotated values of fprop is rotated back, here by the matrix."""
        n, kind = recipe.quantization.fprop.a.rotation
        whole = K // n * n
        matrix, h = np.eye(K), np.ones((1, 1))
        while len(h) < n:
            h = np.block([[h, h], [h, -h]])
        matrix[:whole, :whole] = np.kron(np.eye(whole // n), h) / np.sqrt(n)
        factors = np.ones(K)
        factors[:whole] = signs_of(signs(kind, whole, np.array([seed, 0], np.int64)), whole)
        return (values @ matrix) * factors, np.abs(matrix)

    operands = {
        "y": ("fprop", value("fprop", "x"), value("fprop", "w").T, K),
        "dx": ("dgrad", value("dgrad", "g"), value("dgrad", "w"), N),
        "dw": ("wgrad", value("wgrad", "g").T, value("wgrad", "x"), M),
    }
    for result, (gemm, a, b, terms) in operands.items():
        size = np.abs(a) @ np.abs(b)
        slack = (
            sum_slack(size, terms + 8) + narrow(recipe.quantization.gemms[gemm].accumulation, terms) * size
        )
        exact, own_gemm = a @ b, recipe.quantization.gemms[gemm]
        if own_gemm.compute == "dequantized" and recipe.quantization.fprop.a.hadamard:
            exact, matrix = back(exact)
            slack = slack @ matrix + sum_slack(size @ matrix, 8)
        assert_close(result, found.found[result], exact, "float32", slack)


@pytest.mark.gpu
@examples(60)
@given(recipes(), st.integers(0, 2**30))
def test_both_engines_cast_the_same_operands(recipe, seed):
    if isinstance(recipe, Fp8kitError):
        return
    given_ = list(matrices(seed))
    found = []
    for device in ("cpu", "cuda"):
        where = fk.arrays.device(device)
        found.append(
            attempt(lambda where=where: recipe_check.check(recipe, *given_, device=where, seed=seed))
        )
    if any(isinstance(each, Fp8kitError) for each in found):
        return
    for place, here in found[0].casts.items():
        if here is not None:
            assert_same_bits(f"{place}", found[1].casts[place].values, here.values)
