"""A program for Transformer Engine: a convolutional net whose dense layers are in FP8, TrainState over the
parameters alone, the FP8 state carried beside them. Numbers of 8 x 8 pixels, made here."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from flax import linen as nn
from flax.training import train_state
from transformer_engine.common import recipe
from transformer_engine.jax.quantize import ScalingMode, get_quantize_config, is_scaling_mode_supported

RECIPES = {
    "DelayedScaling": (recipe.DelayedScaling(), ScalingMode.DELAYED_TENSOR_SCALING),
    "Float8CurrentScaling": (recipe.Float8CurrentScaling(), ScalingMode.CURRENT_TENSOR_SCALING),
    "MXFP8BlockScaling": (recipe.MXFP8BlockScaling(), ScalingMode.MXFP8_1D_SCALING),
}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, disable_dropout=False):
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3), dtype=jnp.bfloat16)(x))
        x = nn.max_pool(x, window_shape=(2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        x = nn.relu(te_flax.DenseGeneral(features=32, dtype=jnp.float32)(x))
        x = nn.Dropout(rate=0.1)(x, deterministic=disable_dropout)
        x = te_flax.DenseGeneral(features=16, dtype=jnp.float32)(x)
        assert x.dtype == jnp.bfloat16
        return x


@jax.jit
def apply_model(state, images, labels, var_collect, rngs):
    def loss_fn(var_collect):
        logits = state.apply_fn(var_collect, images, rngs=rngs)
        one_hot = jax.nn.one_hot(labels, 16)
        return jnp.mean(optax.softmax_cross_entropy(logits=logits.astype(jnp.float32), labels=one_hot))

    loss, grads = jax.value_and_grad(loss_fn)({**var_collect, "params": state.params})
    return grads, loss


@partial(jax.jit)
def update_model(state, grads):
    return state.apply_gradients(grads=grads["params"]), grads


def main(name):
    own, mode = RECIPES[name]
    supported, why = is_scaling_mode_supported(mode)
    assert supported, why
    rng = np.random.default_rng(0)
    shapes, labels = rng.standard_normal((10, 8, 8, 1)), rng.integers(0, 10, 64)
    images = jnp.asarray(shapes[labels] + 0.1 * rng.standard_normal((64, 8, 8, 1)), jnp.bfloat16)
    keys = {"params": jax.random.PRNGKey(0), "dropout": jax.random.PRNGKey(1)}
    with te.autocast(enabled=True, recipe=own, mesh_resource=te.sharding.MeshResource()):
        assert get_quantize_config().is_fp8_enabled()
        net = Net()
        var_collect = net.init(keys, images)
        state = train_state.TrainState.create(
            apply_fn=net.apply, params=var_collect["params"], tx=optax.sgd(0.05, 0.9)
        )
        losses = []
        for _ in range(12):
            grads, loss = apply_model(
                state, images, jnp.asarray(labels), var_collect, {"dropout": keys["dropout"]}
            )
            state, var_collect = update_model(state, grads)
            losses.append(float(loss))
        assert losses[-1] < 0.5 * losses[0], losses
        carried = te.NVTE_FP8_COLLECTION_NAME in var_collect
        assert carried is (name == "DelayedScaling")
        if carried:
            assert float(var_collect[te.NVTE_FP8_COLLECTION_NAME]["DenseGeneral_0"]["x_scale"][0]) > 1
    print("trained", name)


main(sys.argv[1])
