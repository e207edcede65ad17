"""A program for Transformer Engine: a configuration of quantisation by names, as a training framework has
one, that gives a class of dot_general for its own layers, of which Transformer Engine is one of several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from transformer_engine.jax.cpp_extensions import CollectiveOp, CollectiveOpSet, collective_gemm_bootstrap
from transformer_engine.jax.sharding import MeshResource, global_shard_guard

NAMES = ("te_fp8_delayedscaling", "te_fp8_currentscaling", "te_mxfp8", "te_nvfp4_no_rht")


class Quantization:
    def __init__(self, name):
        from transformer_engine.common import recipe

        self.recipe = {
            "te_fp8_delayedscaling": recipe.DelayedScaling,
            "te_fp8_currentscaling": recipe.Float8CurrentScaling,
            "te_mxfp8": recipe.MXFP8BlockScaling,
            "te_nvfp4_no_rht": functools.partial(
                recipe.NVFP4BlockScaling, disable_rht=True, disable_stochastic_rounding=True
            ),
        }[name]()

    def dot_general_cls(self):
        import transformer_engine.jax

        own = self.recipe

        class Wrapper(transformer_engine.jax.flax.module.TransformerEngineBase):
            def generate_quantizer_set(self, postfix=""):
                return super().generate_quantizer_set(
                    postfix=postfix,
                    variable_collection="_overwrite_with_gradient",
                    quantization_checkpoint_name="quantization",
                    fp8_recipe=own,
                )

            @nn.compact
            def __call__(self, x, kernel, dims, *args, **kwargs):
                contracting_dims, batch_dims = dims
                assert batch_dims == ((), ())
                return transformer_engine.jax.dense.dense(
                    x,
                    kernel,
                    contracting_dims=contracting_dims,
                    collective_op_set=CollectiveOpSet.create(CollectiveOp.NONE),
                    quantizer_set=self.generate_quantizer_set(),
                )

        return Wrapper


class Block(nn.Module):
    dot_general_cls: object

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general_cls=self.dot_general_cls)
        return x + dense(32)(nn.gelu(dense(64, name="up")(x)))


def main():
    collective_gemm_bootstrap(1, 1, 0, 1)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 32)), jnp.bfloat16)
    policy = jax.checkpoint_policies.save_only_these_names("quantization")
    want = None
    for name in NAMES:
        model = Block(Quantization(name).dot_general_cls())
        with global_shard_guard(MeshResource()):
            variables = model.init(jax.random.key(0), x)
            want = Block(None).apply({"params": variables["params"]}, x) if want is None else want

            @jax.jit
            def loss(variables, x, model=model):
                return (
                    jax.checkpoint(model.apply, policy=policy)(variables, x).astype(jnp.float32) ** 2
                ).mean()

            for _ in range(2):
                grads = jax.grad(loss)(variables, x)
                variables |= {key: grads[key] for key in grads if key != "params"}
            y = model.apply(variables, x)
        assert ("_overwrite_with_gradient" in variables) is ("delayed" in name)
        if "delayed" in name:
            assert float(variables["_overwrite_with_gradient"]["up"]["Wrapper_0"]["x_scale"][0]) > 1
        error = jnp.linalg.norm((y - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
        assert 1e-4 < error < (0.3 if "fp4" in name else 0.1), (name, float(error))
        for leaf in jax.tree.leaves(grads["params"]):
            assert leaf.dtype == jnp.float32
            assert bool(jnp.isfinite(leaf).all())
    print("quantised by", len(NAMES), "names")


main()
