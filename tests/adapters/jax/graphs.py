"""The experiment that decides whether XLA may record fp8kit's calls into CUDA graphs: ``python -m
tests.adapters.jax.graphs`` on a GPU.

A step of FP8 training with dropout runs eight times, its inputs, scales, histories and keys different every
time, once with the frontend's handler as it is and once with the trait that lets XLA record it, each time by
itself and inside a ``lax.scan``, where the addresses stay and a graph is replayed. Counted is how often the
handler ran; compared are all results, bit for bit. The last line that is printed is the verdict, in JSON.
"""

from __future__ import annotations

import json
import os
import sys

FLAGS = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
STEPS = 8
if __name__ == "__main__":  # before JAX looks at it
    os.environ["XLA_FLAGS"] = FLAGS
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # tvm_ffi imports it where it is installed, which takes as long as all the rest
    sys.modules["torch"] = None

import fp8kit_jax as fj  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fp8kit_jax import calls  # noqa: E402

import fp8kit as fk  # noqa: E402
from fp8kit.recipe import DelayedScaling  # noqa: E402

PLAIN, RECORDED = "fp8kit.plain", "fp8kit.recorded"
ran = 0


def register(platform: str) -> None:
    """The frontend's handler twice more, counted: as a call that XLA may not record, and as one that it
    may."""
    receive = calls._receiver(calls.PLATFORMS[platform])

    def counted(*values):
        global ran
        ran += 1
        receive(*values)

    for name in (PLAIN, RECORDED):
        calls._register(
            name, counted, ["low", "high"], platform, graphs=name == RECORDED and platform == "gpu"
        )


def problem():
    """State, and the inputs of all steps: (state, (x, key)) with a leading dimension of steps."""
    draw = np.random.default_rng(0).standard_normal
    scales = 2.0 ** np.array([0, 3, -2, 5, 1, -4, 2, 0])[:STEPS]
    x = jnp.asarray(draw((STEPS, 2, 64, 128)) * scales[:, None, None, None], jnp.bfloat16)
    state = {
        "qkv": jnp.asarray(draw((128, 3, 128)) / 11, jnp.float32),
        "up": jnp.asarray(draw((128, 1, 256)) / 11, jnp.float32),
        "down": jnp.asarray(draw((256, 128)) / 16, jnp.float32),
        "sets": fj.create_set(DelayedScaling(amax_history_len=4), 3),
    }
    return state, (x, jax.random.split(jax.random.PRNGKey(0), STEPS))


def step(state, given):
    """One step: the next state, and (loss, y)."""
    x, key = given
    half = {name: state[name].astype(x.dtype) for name in ("qkv", "up", "down")}
    ones = jnp.ones(128, x.dtype)

    def loss(half, sets):
        qkv = fj.layernorm_dense(x, half["qkv"], ones, None, norm_type="rmsnorm", quantizer_set=sets[0])
        o = fj.dot_product_attention(qkv.reshape(2, 64, 3, 2, 64)).reshape(x.shape)
        h = fj.dropout_add(o, x, rate=0.25, key=key)
        y = fj.layernorm_mlp(
            h, ones, None, (half["up"], half["down"]), norm_type="rmsnorm", quantizer_sets=sets[1:]
        )
        return (y.astype(jnp.float32) ** 2).mean(), y

    (value, y), (grads, sets) = jax.value_and_grad(loss, (0, 1), has_aux=True)(half, state["sets"])
    moved = {name: state[name] - 0.01 * grads[name].astype(jnp.float32) for name in half}
    return moved | {"sets": sets}, (value, y)


def runs(target: str):
    """Results of both ways under a target, and how often the counted handler ran in each way."""
    global ran
    before, calls.target = calls.target, lambda deterministic: target
    try:
        with fk.deterministic():
            state, given = problem()
            alone = jax.jit(lambda *a: step(*a))
            scan = jax.jit(lambda state, given: jax.lax.scan(step, state, given))
            ran, results = 0, []
            for n in range(STEPS):
                state, out = alone(state, jax.tree.map(lambda leaf, n=n: leaf[n], given))
                results.append(jax.tree.map(np.asarray, (state, out)))
            counts = [ran]
            ran, state = 0, problem()[0]
            scanned = jax.tree.map(np.asarray, scan(state, given))
            counts.append(ran)
            return results, scanned, counts
    finally:
        calls.target = before


def first_difference(got, want):
    """The first step whose results differ in a bit, None where none does."""
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        if any(
            x.tobytes() != y.tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        ):
            return n
    return None


def experiment(platform: str) -> dict[str, object]:
    """The verdict: "refused" (with the error), "stale", "replayed" or "never replayed", and what it rests
    on."""
    register(platform)
    with jax.default_device(jax.devices(platform)[0]):
        want, whole, every = runs(PLAIN)
        # where nothing follows
        print(json.dumps({"verdict": "refused", "error": "recording ended the process"}), flush=True)
        try:
            got, scanned, counts = runs(RECORDED)
        except jax.errors.JaxRuntimeError as error:
            return {"verdict": "refused", "error": str(error).splitlines()[0][:300]}
    wrong = first_difference(got, want)
    in_scan = first_difference([scanned], [whole])
    found = {
        "handler runs": counts,
        "calls": every,
        "first wrong step": wrong,
        "scan wrong": in_scan is not None,
    }
    if wrong is not None or in_scan is not None:
        return {"verdict": "stale", **found}
    return {"verdict": "replayed" if counts != every else "never replayed", **found}


if __name__ == "__main__":
    print(json.dumps(experiment(sys.argv[1] if len(sys.argv) > 1 else "gpu")))
