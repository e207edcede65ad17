"""FP8 training on several devices with JAX: weights sharded over all of them (FSDP) and split between pairs
(tensor parallelism), by logical axes. Of one process, on four devices that XLA makes of a CPU ::

    XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu python examples/26_jax_devices.py

or of several, here two on one machine; with GPUs, one process for each ::

    for k in 0 1; do python examples/26_jax_devices.py localhost:12345 2 $k & done; wait

Shows: a MeshResource says what mesh axes mean, and Transformer Engine's logical axes place parameters by it;
amaxes are reduced before each cast, so that the FP8 scales are those of one device; a process that dies ends
the others within the heartbeat timeout. Needs: JAX, Flax and optax (extra flax); about 20 seconds on a CPU.
"""

import sys

from fp8kit.errors import not_installed

if why := not_installed("26_jax_devices.py", "flax", "flax", "optax"):
    raise SystemExit(why)

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from fp8kit_jax.flax import TransformerLayer, extend_logical_axis_rules
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.recipe import DelayedScaling

HIDDEN, LENGTH, SEQUENCES, STEPS = 64, 32, 8, 20
RECIPE = DelayedScaling(amax_history_len=16)


class Model(nn.Module):
    """Two layers that learn to say what came before each token."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = TransformerLayer(
                HIDDEN, 2 * HIDDEN, 4, hidden_dropout=0.0, attention_dropout=0.0, enable_rotary_pos_emb=True
            )(x, deterministic=True)
        return x


def start():
    """The training's state; the FP8 state is among the parameters, its gradient is its next value."""
    variables = Model().init(jax.random.key(0), jnp.zeros((SEQUENCES, LENGTH, HIDDEN)))
    return TrainState.create(apply_fn=Model().apply, params=variables, tx=optax.adam(3e-3))


def step(state, x):
    def loss(params):
        return ((state.apply_fn(params, x)[:, 1:] - x[:, :-1]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def main(coordinator=None, processes="1", process="0"):
    if coordinator is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(processes), int(process), heartbeat_timeout_seconds=20)
    pairs = 2 if jax.device_count() % 2 == 0 else 1
    mesh = Mesh(np.array(jax.devices()).reshape(-1, pairs), ("fsdp", "tp"))
    resource = fj.MeshResource(fsdp_resource="fsdp", tp_resource="tp")
    with fj.autocast(True, RECIPE, resource), jax.set_mesh(mesh):
        rules = extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            axes = nn.get_partition_spec(jax.eval_shape(start))
            placed = nn.logical_to_mesh_sharding(axes, mesh, rules)
            state, run = nn.unbox(jax.jit(start, out_shardings=placed)()), jax.jit(step)
            kernel = state.params["params"]["TransformerLayer_0"]["mlp"]["wi_kernel"]
            part = kernel.addressable_shards[0].data.shape
            print(f"{dict(mesh.shape)}: of a kernel {kernel.shape} each device has {part}")
            rows, rng = NamedSharding(mesh, P("fsdp")), np.random.default_rng(0)
            for number in range(STEPS):
                # every process draws the same batch and keeps its devices' rows
                x = rng.standard_normal((SEQUENCES, LENGTH, HIDDEN)).astype(np.float32)
                x = jax.make_array_from_callback(x.shape, rows, lambda part, x=x: x[part])
                state, loss = run(state, x)
                if number % 5 == 4:
                    print(f"step {number + 1}: {float(loss):.4f}")
    scale = state.params[fj.FP8_COLLECTION_NAME]["TransformerLayer_0"]["mlp"]["x_0_scale"]
    print(f"scale of the MLP's input: {float(scale[0]):g}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
