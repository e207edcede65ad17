"""Programs that several processes of ``jax.distributed`` run together: ``python -m
tests.adapters.jax.processes RANK RANKS PORT NAME PLACE``. On the CPU a rank has two devices, else a GPU."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

if __name__ == "__main__":  # tvm_ffi imports torch where it is installed, which takes as long as all the rest
    sys.modules["torch"] = None
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np


def training(rank):
    """Losses of each model, and the FP8 state of the last one, by layouts over all processes' devices."""
    from tests.support.meshes import ANY_LAYOUT, fp8_state, train

    found = {}
    for model, recipe, layout in CASES[jax.default_backend()]:
        losses, state = train(model, recipe, STEPS, ANY_LAYOUT[layout])
        found[f"{model} {recipe} {layout}"] = losses
    own = {name: float(np.sum(leaf)) for name, leaf in fp8_state(state).items()}
    print(json.dumps({"losses": found, "state": own}), flush=True)


def rings(rank):
    """The largest error of a device's outputs and gradients, relative to one device's: packed sequences in
    stripes over all processes' devices."""
    import fp8kit_jax as fj
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from fp8kit.testing.compare import relative_error
    from tests.support.split_sequences import HEADS, PLACES, D, T, draw, striped, value_and_gradients

    def attend(*layers, **more):
        return fj.dot_product_attention(*layers, **{"attn_mask_type": "padding_causal"} | PLACES | more)

    dtype, devices = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16, jax.device_count()
    arrays = [draw(seed, T, HEADS, D).astype(dtype) for seed in range(4)]
    wanted = [striped(np.asarray(a), devices, 4) for a in value_and_gradients(attend, arrays[:3], arrays[3])]
    mesh = jax.make_mesh((devices,), ("cp",))
    split = {"context_parallel_axis": "cp", "context_parallel_causal_load_balanced": True, "stripe_size": 4}
    with jax.set_mesh(mesh):
        tokens = NamedSharding(mesh, P("cp"))
        parts = [np.asarray(striped(a, devices, 4)) for a in arrays]
        *layers, weight = [jax.make_array_from_callback(a.shape, tokens, a.__getitem__) for a in parts]
        for strategy in ("RING", "ALL_GATHER"):

            def step(*layers, how=split | {"context_parallel_strategy": strategy}):
                return attend(*layers, **how)

            got = value_and_gradients(step, layers, weight)
            pairs = [
                (np.asarray(part.data), np.asarray(whole)[part.index])
                for own, whole in zip(got, wanted, strict=True)
                for part in own.addressable_shards
            ]
            print(json.dumps(max(float(relative_error(*pair)) for pair in pairs)), flush=True)


STEPS, HEARTBEAT = 10, 20
CASES = {
    "cpu": [
        ("DenseGeneral", "current", "fsdp and tp"),
        ("LayerNormMLP", "high", "shard_map"),
        ("TransformerLayer", "current", "dp and cp"),
        ("LayerNormMLP", "delayed", "fsdp and tp"),
    ],
    "gpu": [
        ("DenseGeneral", "current", "fsdp"),
        ("LayerNormMLP", "block", "two by shard_map"),
        ("TransformerLayer", "current", "cp"),
        ("LayerNormMLP", "delayed", "tp"),
    ],
}


def dying(rank):
    """Rank 1 is killed between two steps; the others go on."""
    import fp8kit_jax as fj
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        x = jax.make_array_from_callback((16, 32), rows, lambda part: np.ones((16, 32), np.float32)[part])
        step = jax.jit(lambda x, w: fj.dense(x, w, name="projection").sum())
        for number in range(200):
            if rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            print("step", number, float(step(x, np.ones((32, 16), np.float32))), flush=True)
            time.sleep(0.1)


if __name__ == "__main__":
    rank, ranks, port, name, place = *map(int, sys.argv[1:4]), *sys.argv[4:]
    jax.config.update("jax_platforms", place)
    options = {"heartbeat_timeout_seconds": HEARTBEAT}
    if place == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    else:
        options["local_device_ids"] = [rank]
    jax.distributed.initialize(f"localhost:{port}", ranks, rank, **options)
    {f.__name__: f for f in (training, rings, dying)}[name](rank)
