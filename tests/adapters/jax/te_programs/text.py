"""A program for Transformer Engine: a text classifier of one encoder layer over a mesh of data and tensor
parallel devices, by logical axes, in FP8."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from flax import linen as nn
from flax.linen import partitioning as nn_partitioning
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.jax.quantize import is_fp8_available


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, mask, disable_dropout=False):
        x = nn.Embed(num_embeddings=64, features=32, dtype=jnp.bfloat16)(x)
        x = te_flax.TransformerLayer(
            hidden_size=32,
            mlp_hidden_size=64,
            num_attention_heads=4,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            dropout_rng_name="dropout",
            layer_type=te_flax.TransformerLayerType.ENCODER,
            self_attn_mask_type="padding",
            enable_relative_embedding=False,
            mlp_activations=("gelu", "linear"),
        )(x, attention_mask=mask, deterministic=disable_dropout)
        x = x.reshape(x.shape[0], -1)
        x = te_flax.DenseGeneral(
            features=32, kernel_axes=("my_broadcast_axis", "my_tp_axis"), bias_axes=("my_tp_axis",)
        )(x)
        x = te_flax.DenseGeneral(
            features=32, kernel_axes=("my_tp_axis", "my_broadcast_axis"), bias_axes=("my_broadcast_axis",)
        )(x)
        return nn.Dense(features=2)(x)


def train_step(state, inputs, masks, labels, var_collect, rngs):
    def loss_fn(var_collect):
        logits = state.apply_fn(var_collect, inputs, masks, rngs=rngs)
        one_hot = jax.nn.one_hot(labels, 2)
        return jnp.mean(optax.softmax_cross_entropy(logits=logits.astype(jnp.float32), labels=one_hot))

    loss, grads = jax.value_and_grad(loss_fn)({**var_collect, "params": state.params})
    var_collect, grads = flax.core.pop(grads, "params")
    return state.apply_gradients(grads=grads), loss, var_collect


def main():
    assert is_fp8_available()[0]
    own = DelayedScaling(margin=0, fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.integers(0, 64, (8, 16)), jnp.int32)
    labels = jnp.asarray(rng.integers(0, 2, 8), jnp.int32)
    masks = np.ones((8, 1, 16, 16), np.uint8)
    for row, length in enumerate(rng.integers(8, 17, 8)):
        masks[row, :, :length, :length] = 0
    with (
        jax.sharding.Mesh(devices, ("data", "model")) as mesh,
        nn_partitioning.axis_rules((("my_broadcast_axis", None), ("my_tp_axis", "model"))),
        te.fp8_autocast(
            enabled=True, fp8_recipe=own, mesh_resource=te.MeshResource("data", "model", None, None)
        ),
    ):
        net, keys = Net(), {"params": jax.random.PRNGKey(0), "dropout": jax.random.PRNGKey(1)}
        shapes = jax.eval_shape(net.init, keys, inputs, masks)
        rules = te_flax.extend_logical_axis_rules(nn_partitioning.get_axis_rules())
        sharding = nn.logical_to_mesh_sharding(nn.get_partition_spec(shapes), mesh, rules)
        rows = [NamedSharding(mesh, PartitionSpec("data", *[None] * n)) for n in (1, 3, 0)]
        outs = {key: sharding["params"] if key == "params" else None for key in shapes}
        init = jax.jit(net.init, in_shardings=(None, *rows[:2]), out_shardings=outs)
        var_collect, params = flax.core.pop(init(keys, inputs, masks), "params")
        split = [leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params["TransformerLayer_0"])]
        assert split.count(False) == 4, split
        tx = optax.adamw(3e-3)
        state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx)
        step = jax.jit(train_step, in_shardings=(None, *rows, None, None))
        losses = []
        for _ in range(8):
            state, loss, var_collect = step(
                state, inputs, masks, labels, var_collect, {"dropout": keys["dropout"]}
            )
            losses.append(float(loss))
        assert losses[-1] < 0.7 * losses[0], losses
    print("trained on", len(devices.reshape(-1)), "devices")


main()
