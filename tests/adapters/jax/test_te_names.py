"""Names of Transformer Engine's JAX package that stand for others: recipes by the names of their classes, its
GEMM, its collectives."""

from __future__ import annotations

import fp8kit_jax as fj
import pytest
from fp8kit_jax.te_compat import collectives, functions, quantize

from fp8kit.errors import ArgumentError, RecipeError, UnsupportedError
from fp8kit.recipe import Float8CurrentScaling
from tests.support.sharding import draw, same_bits

X, W, B = draw(0, 4, 8, 32), draw(1, 32, 48), draw(2, 48)
DIMS = ((2,), (0,))


def test_recipes_by_name():
    for recipe in quantize.get_supported_quantization_recipes():
        name = type(recipe).__name__
        assert quantize.get_quantization_recipe(name) == recipe
        assert quantize.is_quantize_recipe_supported(name) == (True, "")
    for function in (quantize.get_quantization_recipe, quantize.is_quantize_recipe_supported):
        with pytest.raises(RecipeError, match="MXFP8BlockScaling"):
            function("MXFP8")


def test_gemm():
    """Dense, with its set and without quantizers of one operand."""
    own = quantize.QuantizerFactory.create_set(fp8_recipe=Float8CurrentScaling())
    got = functions.gemm(X, W, B, DIMS, collective_op=collectives.CollectiveOp.ALL_GATHER, quantizer_set=own)
    same_bits((got, functions.gemm(X, W)), (fj.dense(X, W, B, DIMS, own), fj.dense(X, W, None, DIMS)))
    with pytest.raises(UnsupportedError, match=r"gemm: rhs_quantizer: got object, .*quantizer_set"):
        functions.gemm(X, W, rhs_quantizer=object())


def test_collectives():
    gather = collectives.CollectiveOpSet.create(collectives.CollectiveOp.ALL_GATHER)
    assert gather.forward.is_all_gather
    assert gather.backward.is_reduce_scatter
    same_bits(functions.dense(X, W, None, DIMS, collective_op_set=gather), fj.dense(X, W, None, DIMS))
    collectives.collective_gemm_bootstrap(8, 1, 7, 4, num_max_streams=3)
    with pytest.raises(ArgumentError, match="tensor_parallel_size: got 3, expected a divisor of 8"):
        collectives.collective_gemm_bootstrap(8, 1, 0, 3)
    with pytest.raises(ArgumentError, match="collective_op_set"):
        functions.dense(X, W, collective_op_set=None)
