"""Names of Transformer Engine's JAX package that stand for others: recipes by the names of their classes, its
GEMM, its collectives; descriptors of more sequences than a call can have."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import flax as modules
from fp8kit_jax.te_compat import collectives, functions, quantize
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

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
    with pytest.raises(UnsupportedError, match=r"QuantizerFactory.create: .* expected create_set, "):
        quantize.QuantizerFactory.create(scaling_mode=quantize.ScalingMode.MXFP8_1D_SCALING)


@pytest.mark.parametrize("packed", [True, False])
def test_more_sequences_than_there_may_be(packed):
    """Ids that are not traced are looked at; numpy's as JAX's. Without packing several would be one."""
    ids = np.array([[1, 1, 2, 2, 3, 0], [1, 1, 1, 1, 0, 0]], np.int32)
    layout = {"qkv_layout": "thd_thd_thd", "max_segments_per_seq": 2} if packed else {}
    module = modules.DotProductAttention(8, 4, attn_mask_type="padding", **layout)
    got, said = (
        ("3 sequences a row", "at most 2, as max_segments") if packed else ("rows of several", "one a")
    )
    for given in (ids, jnp.asarray(ids)):
        descriptor = fj.SequenceDescriptor.from_segment_ids_and_pos(given)
        with pytest.raises(ArgumentError, match=f"segment_ids: got {got}.*, expected {said}"):
            module.apply({}, *[draw(i, 2, 6, 4, 8) for i in range(3)], descriptor)


def test_sequences_may_be_numbered_over_the_batch():
    """One a row, whatever its number."""
    ids = np.array([[1, 1, 1, 1, 0, 0], [2, 2, 2, 2, 2, 0]], np.int32)
    module = modules.DotProductAttention(8, 4, attn_mask_type="padding")
    layers = [draw(i, 2, 6, 4, 8) for i in range(3)]
    of = fj.SequenceDescriptor.from_segment_ids_and_pos
    same_bits(module.apply({}, *layers, of(ids)), module.apply({}, *layers, of((ids > 0).astype(np.int32))))


@pytest.mark.parametrize("own", [{"attn_bias_type": "alibi"}, {"softmax_type": "learnable"}])
def test_what_each_head_has_of_its_own_is_refused_with_a_part_of_them(own):
    """Within a shard_map a module does not know which heads it has."""
    mesh, split = Mesh(np.array(jax.devices("cpu")[:2]), ("heads",)), P(None, None, "heads")
    module = modules.DotProductAttention(8, 4, attn_mask_type="no_mask", **own)
    call = jax.shard_map(lambda *a: module.apply({}, *a), mesh=mesh, in_specs=(split,) * 3, out_specs=split)
    with pytest.raises(UnsupportedError, match=f"{next(iter(own))}.*which heads these are"):
        call(*[draw(i, 2, 6, 4, 8) for i in range(3)])


def test_collectives():
    gather = collectives.CollectiveOpSet.create(collectives.CollectiveOp.ALL_GATHER)
    assert gather.forward.is_all_gather
    assert gather.backward.is_reduce_scatter
    same_bits(functions.dense(X, W, None, DIMS, collective_op_set=gather), fj.dense(X, W, None, DIMS))
    collectives.collective_gemm_bootstrap(8, 1, 7, 4, num_max_streams=3)
    with pytest.raises(ArgumentError, match="tensor_parallel_size: got 3, expected a divisor of 8"):
        collectives.collective_gemm_bootstrap(8, 1, 0, 3)
    with pytest.raises(ArgumentError, match=r"forward_collective_op: got 'AG', expected a CollectiveOp"):
        functions.gemm(X, W, collective_op="AG")
    with pytest.raises(ArgumentError, match="collective_op_set"):
        functions.dense(X, W, collective_op_set=None)
